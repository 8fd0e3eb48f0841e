"""The storage that the settings name. A backend is imported when it is wanted: each is an extra."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from uuid import UUID

from mediamill import signing
from mediamill.config import Settings
from mediamill.storage import Finding, Storage, StorageRefused
from mediamill.storage.local import open_local


async def open_storage(
    settings: Settings,
    installation: UUID,
    keyring: Callable[[], signing.Keyring],
    *,
    may_be_new: bool = True,
) -> Storage:
    """The storage of this installation. Raises StorageRefused, Failure."""
    match settings.storage:
        case "local":
            return open_local(
                settings.objects_dir,
                installation,
                keyring,
                settings.base_url,
                may_be_new=may_be_new,
            )
        case "s3":
            try:
                from mediamill.storage import s3
            except ImportError as error:
                raise missing("s3", error) from None
            return await s3.open_s3(s3.place(settings), installation, may_be_new=may_be_new)


async def inspect(settings: Settings, origin: str) -> AsyncIterator[Finding]:
    """What the storage really enforces; `origin` is that of a page that uploads. Raises
    StorageRefused."""
    if settings.storage == "local":
        yield Finding("local disk", True, f"{settings.objects_dir}; the API enforces all")
        return
    try:
        from mediamill.storage import s3
        from mediamill.storage.inspection import Inspection
    except ImportError as error:
        raise missing(settings.storage, error) from None
    wire = s3.Wire(s3.place(settings))
    try:
        async for finding in Inspection(wire, origin).run():
            yield finding
    finally:
        await wire.close()


def missing(extra: str, error: ImportError) -> StorageRefused:
    """What to install for a storage whose libraries are not there."""
    return StorageRefused(
        f"MEDIAMILL_STORAGE={extra} needs {error.name}: pip install 'mediamill[{extra}]'."
    )

"""The storage that the settings name. A backend is imported when it is wanted: each is an extra."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING
from uuid import UUID

from mediamill import signing
from mediamill.config import Settings
from mediamill.storage import Finding, Storage, StorageRefused
from mediamill.storage.local import open_local

if TYPE_CHECKING:
    from mediamill.storage.bucket import Bucket


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
        case "gcs":
            try:
                from mediamill.storage import gcs
            except ImportError as error:
                raise missing("gcs", error) from None
            return await gcs.open_gcs(gcs.place(settings), installation, may_be_new=may_be_new)
        case "azure":
            try:
                from mediamill.storage import azure
            except ImportError as error:
                raise missing("azure", error) from None
            return await azure.open_azure(
                azure.place(settings), installation, may_be_new=may_be_new
            )


async def _unopened(settings: Settings) -> Bucket | None:
    """The bucket of the settings, whoever's it is; None on a local disk. Raises StorageRefused."""
    try:
        match settings.storage:
            case "local":
                return None
            case "s3":
                from mediamill.storage import s3

                return await s3.unopened(s3.place(settings))
            case "gcs":
                from mediamill.storage import gcs

                return await gcs.unopened(gcs.place(settings))
            case "azure":
                from mediamill.storage import azure

                return await azure.unopened(azure.place(settings))
    except ImportError as error:
        raise missing(settings.storage, error) from None


async def inspect(settings: Settings, origin: str) -> AsyncIterator[Finding]:
    """What the storage really enforces; `origin` is that of a page that uploads. Raises
    StorageRefused."""
    bucket = await _unopened(settings)
    if bucket is None:
        yield Finding("local disk", True, f"{settings.objects_dir}; the API enforces all")
        return
    from mediamill.storage.inspection import Inspection

    try:
        async for finding in Inspection(bucket, origin).run():
            yield finding
    finally:
        await bucket.close()


def missing(extra: str, error: ImportError) -> StorageRefused:
    """What to install for a storage whose libraries are not there."""
    return StorageRefused(
        f"MEDIAMILL_STORAGE={extra} needs {error.name}: pip install 'mediamill[{extra}]'."
    )

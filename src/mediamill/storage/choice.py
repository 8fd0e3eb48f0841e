"""The storage that the settings name. A backend is imported when it is wanted: each is an extra."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from mediamill import signing
from mediamill.config import Settings
from mediamill.storage import Storage, StorageRefused
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


def missing(extra: str, error: ImportError) -> StorageRefused:
    """What to install for a storage whose libraries are not there."""
    return StorageRefused(
        f"MEDIAMILL_STORAGE={extra} needs {error.name}: pip install 'mediamill[{extra}]'."
    )

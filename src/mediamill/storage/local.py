"""Objects on a local disk, with the semantics of an object store.

An object is a read-only file that appears whole: written under a temporary name, synced, then
linked to its name (link refuses a taken name; rename would overwrite), then its folder synced.
Objects on the same filesystem as the scratch folder are linked, not copied.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from io import BufferedReader
from pathlib import Path
from typing import Final, TypeVar
from uuid import UUID, uuid4

from mediamill import signing
from mediamill.failures import Code, Failure
from mediamill.storage import AlreadyStored, SignedRequest, StorageRefused, Stored

T = TypeVar("T")

_MARKER: Final = "mediamill-storage"
_INCOMING: Final = ".incoming"
_CHUNK: Final = 1 << 20
_KEY_LENGTH: Final = 1024
_PART_LENGTH: Final = 255  # a longer name fits no directory
_KEY_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789/_.-")


class LocalStorage:
    """The storage in one folder; its signed addresses are served by our own API."""

    def __init__(self, root: Path, keyring: Callable[[], signing.Keyring], base_url: str) -> None:
        self.root = root
        self._keyring = keyring
        self._base_url = base_url

    async def stat(self, key: str) -> Stored | None:
        return await _in_thread(lambda: self._stat(key))

    def _stat(self, key: str) -> Stored | None:
        try:
            return _stored(os.stat(self.path(key)))
        except (FileNotFoundError, NotADirectoryError):
            return None

    async def fetch(self, key: str, version: str, destination: Path) -> str:
        return await _in_thread(lambda: self._fetch(key, version, destination))

    def _fetch(self, key: str, version: str, destination: Path) -> str:
        try:
            file = open(self.path(key), "rb")  # noqa: SIM115  # closed by the with below
        except (FileNotFoundError, NotADirectoryError):
            raise Failure(Code.SOURCE_MISSING, "The original is no longer in storage.") from None
        with file:
            if _stored(os.fstat(file.fileno())).version != version:
                raise Failure(Code.SOURCE_CHANGED)
            _link_or_copy(self.path(key), destination)
            return _sha256(file)

    async def put(self, key: str, source: Path) -> Stored:
        return await _in_thread(lambda: self._put(key, source))

    def _put(self, key: str, source: Path) -> Stored:
        incoming = self._incoming()
        try:
            _link_or_copy(source, incoming)
            return self._settle(incoming, key)
        finally:
            incoming.unlink(missing_ok=True)

    async def copy(self, source: str, key: str) -> None:
        def copy() -> None:
            try:
                self._put(key, self.path(source))
            except FileNotFoundError:
                raise Failure(Code.SOURCE_MISSING) from None

        await _in_thread(copy)

    async def delete(self, prefix: str) -> int:
        return await _in_thread(lambda: self._delete(prefix))

    def _delete(self, prefix: str) -> int:
        path = self.path(prefix)
        removed = self._incoming()
        try:  # out of the way in one step: no writer at work in it trips over the removal
            os.rename(path, removed)
        except (FileNotFoundError, NotADirectoryError):  # there is none, or another removed it
            return 0
        if removed.is_dir():
            count = sum(len(files) for _, _, files in os.walk(removed))
            shutil.rmtree(removed)
        else:
            count = 1
            removed.unlink()
        self._prune(path.parent)
        return count

    def _prune(self, folder: Path) -> None:
        """Remove the parents that are empty now, below the areas."""
        while len(folder.relative_to(self.root).parts) > 1:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent

    async def list(self, prefix: str) -> list[str]:
        def listed() -> list[str]:
            try:
                return sorted(os.listdir(self.path(prefix)))
            except (FileNotFoundError, NotADirectoryError):
                return []

        return await _in_thread(listed)

    def sign_put(
        self, key: str, *, content_type: str, size: int, expires_at: datetime
    ) -> SignedRequest:
        grant = signing.Grant("PUT", key, int(expires_at.timestamp()), content_type, size)
        headers = {"Content-Type": content_type, "Content-Length": str(size)}
        return SignedRequest("PUT", self._address(grant), headers, expires_at)

    def sign_get(self, key: str, *, expires_at: datetime) -> SignedRequest:
        grant = signing.Grant("GET", key, int(expires_at.timestamp()))
        return SignedRequest("GET", self._address(grant), {}, expires_at)

    def _address(self, grant: signing.Grant) -> str:
        return f"{self._base_url}/storage/{signing.sign(self._keyring(), grant)}"

    # For the API, which plays the object store towards clients.

    def path(self, key: str) -> Path:
        """The file of a key. Raises ValueError for a key that we would never mint."""
        parts = key.split("/")
        if (
            not key
            or len(key) > _KEY_LENGTH
            or any(p in ("", ".", "..") or len(p) > _PART_LENGTH for p in parts)
            or not _KEY_CHARACTERS.issuperset(key)
        ):
            raise ValueError("not a storage key")
        return self.root.joinpath(*parts)

    async def receive(self, key: str) -> Receiver:
        """Begin to take in an object; raises AlreadyStored if its key is taken."""

        def begin() -> Receiver:
            if self.path(key).exists():
                raise AlreadyStored(key)
            return Receiver(self, key, self._incoming())

        return await _in_thread(begin)

    def _incoming(self) -> Path:
        return self.root / _INCOMING / uuid4().hex

    def _settle(self, incoming: Path, key: str) -> Stored:
        """Give a complete file its name, durably."""
        os.chmod(incoming, 0o444)
        _sync(incoming)
        stored = _stored(os.stat(incoming))  # the same inode as under its name
        path = self.path(key)
        while True:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, FileNotFoundError):
                # A concurrent delete removed one of the folders; or an object has its name.
                if path.parent.is_file():
                    raise
                continue
            try:
                os.link(incoming, path)
                break
            except FileExistsError:
                raise AlreadyStored(key) from None
            except FileNotFoundError:
                # The empty folder was removed again; or the incoming file is gone.
                if not incoming.exists():
                    raise
        with suppress(FileNotFoundError):  # deleted again already
            _sync(path.parent)
        return stored

    def sweep_incoming(self, *, older_than_seconds: float, now: float) -> int:
        """Remove what crashed writers and deletions left behind."""
        swept = 0
        for entry in os.scandir(self.root / _INCOMING):
            with suppress(FileNotFoundError):
                if now - entry.stat().st_ctime > older_than_seconds:
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path)
                    else:
                        os.unlink(entry.path)
                    swept += 1
        return swept


class Receiver:
    """An object on its way in. Write, then commit; abort is safe at any time."""

    def __init__(self, storage: LocalStorage, key: str, incoming: Path) -> None:
        self._storage = storage
        self._key = key
        self._incoming = incoming
        self._file = open(incoming, "xb", buffering=0)  # noqa: SIM115  # owned by this object
        self.written = 0

    async def write(self, data: bytes) -> None:
        await _in_thread(lambda: self._write(data))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self.written += len(data)

    async def commit(self) -> Stored:
        """Make it an object. Raises AlreadyStored if another writer was first."""

        def commit() -> Stored:
            self._file.close()
            try:
                return self._storage._settle(self._incoming, self._key)
            finally:
                self._incoming.unlink(missing_ok=True)

        return await _in_thread(commit)

    def abort(self) -> None:
        self._file.close()
        self._incoming.unlink(missing_ok=True)


def open_local(
    root: Path,
    installation: UUID,
    keyring: Callable[[], signing.Keyring],
    base_url: str,
    *,
    may_be_new: bool = True,
) -> LocalStorage:
    """The local storage of this installation.

    A marker in the folder names the installation that it belongs to: a folder with objects but
    without it, or with another's, is refused, and so is one without it when the database knows of
    objects (`may_be_new` False), so that an unmounted disk or a mixed-up path never looks like an
    empty storage. Raises StorageRefused.
    """
    marker = root / _MARKER
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not marker.exists():
            if any(name != _INCOMING for name in os.listdir(root)):
                raise StorageRefused(
                    f"{root} holds files but not Mediamill's marker {_MARKER!r}. Is it the right "
                    "folder, and is its disk mounted?"
                )
            if not may_be_new:
                raise StorageRefused(
                    f"{root} is empty, but the database knows of objects. Is its disk mounted? To "
                    f"go on without them, write {installation} into {marker}."
                )
            (root / _INCOMING).mkdir(exist_ok=True)
            fresh = root / _INCOMING / uuid4().hex
            fresh.write_text(f"{installation}\n")
            _sync(fresh)
            with suppress(FileExistsError):
                os.link(fresh, marker)
            fresh.unlink()
            _sync(root)
        (root / _INCOMING).mkdir(exist_ok=True)  # a restored backup may lack it
        found = marker.read_text().strip()
    except OSError as error:
        raise StorageRefused(f"{root} cannot be used: {error.strerror}.") from None
    if found != str(installation):
        raise StorageRefused(
            f"{root} belongs to installation {found}, the database to {installation}. "
            "Point MEDIAMILL_DATA_DIR and MEDIAMILL_DATABASE_URL to things that belong together."
        )
    return LocalStorage(root, keyring, base_url)


async def _in_thread(work: Callable[[], T]) -> T:
    """Run disk work off the loop, with its errors as failures that the engine understands."""
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Failure(Code.SCRATCH_FULL, "The storage's disk is full.") from error
        raise Failure(Code.STORAGE_UNAVAILABLE) from error


def _stored(stat: os.stat_result) -> Stored:
    # The inode's birth is one write: size, inode and time of change of content name these bytes.
    return Stored(stat.st_size, f"{stat.st_size:x}-{stat.st_ino:x}-{stat.st_mtime_ns:x}")


def _link_or_copy(source: Path, destination: Path) -> None:
    try:
        os.link(source, destination)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, destination)


def _sha256(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

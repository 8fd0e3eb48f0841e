"""Objects on a local disk, with the semantics of an object store.

An object is a read-only file that appears whole: written under a temporary name, synced, then
linked to its name (link refuses a taken name; rename would overwrite), then its folder synced.
Objects on the same filesystem as the scratch folder are linked, not copied.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Final, TypeVar
from uuid import UUID, uuid4

from mediamill import signing
from mediamill.failures import Code, Failure
from mediamill.storage import (
    MARKER,
    AlreadyStored,
    Part,
    PartReceiver,
    SignedForm,
    SignedRequest,
    StorageRefused,
    Stored,
    checked_key,
)

T = TypeVar("T")

_INCOMING: Final = ".incoming"
_CHUNK: Final = 1 << 20
_DATA: Final = "data"
_REMOVALS: Final = 10
_FENCE: Final = "fence"
_UPLOAD: Final = re.compile(r"parts-[0-9a-f]{32}")


class LocalStorage:
    """The storage in one folder; its signed addresses are served by our own API.

    An object in parts is one file under `.incoming`, in which each part has its place: to complete
    it copies nothing.
    """

    least_part_bytes = 0
    most_parts = 10_000

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
            _remove_tree(removed)
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

    async def close(self) -> None:
        """Nothing is held open."""

    async def read(self, key: str, version: str) -> AsyncGenerator[bytes, None]:
        def opened() -> BufferedReader:
            try:
                file = open(self.path(key), "rb")  # noqa: SIM115  # closed by the with below
            except (FileNotFoundError, NotADirectoryError):
                raise Failure(Code.SOURCE_MISSING) from None
            if _stored(os.fstat(file.fileno())).version != version:
                file.close()
                raise Failure(Code.SOURCE_CHANGED)
            return file

        with await _held(opened, BufferedReader.close) as file:
            while data := await _in_thread(lambda: file.read(_CHUNK)):
                yield data

    # Objects in parts.

    async def begin_parts(self, key: str, *, content_type: str) -> str:
        self.path(key)
        upload = f"parts-{uuid4().hex}"

        def begin() -> None:
            folder = self.root / _INCOMING / upload
            folder.mkdir()
            (folder / _FENCE).write_bytes(b"0")
            (folder / _DATA).touch()
            _sync(folder)
            _sync(folder.parent)

        await _in_thread(begin)
        return upload

    async def open_part(
        self, key: str, upload: str, number: int, *, offset: int, fence: int = 0
    ) -> PartReceiver:
        folder = self._parts(upload)

        def begin() -> _LocalPart:
            try:
                return _LocalPart(self, folder, number, offset, fence)
            except FileNotFoundError:
                raise Failure(Code.SOURCE_MISSING) from None

        return await _held(begin, _LocalPart.abort)

    async def list_parts(self, key: str, upload: str) -> Sequence[Part]:
        folder = self._parts(upload)

        def listed() -> list[Part]:
            try:
                names = [name for name in os.listdir(folder) if name.isdigit()]
                found = [json.loads((folder / name).read_bytes()) for name in names]
            except FileNotFoundError:
                raise Failure(Code.SOURCE_MISSING) from None
            return sorted((Part(**part) for part in found), key=lambda part: part.number)

        return await _in_thread(listed)

    async def complete_parts(
        self, key: str, upload: str, parts: Sequence[Part], *, size: int
    ) -> Stored:
        folder = self._parts(upload)

        def complete() -> Stored:
            data = folder / _DATA
            try:
                with _locked(folder / _FENCE):
                    there = os.stat(data).st_size
                    if there < size:
                        raise Failure(Code.SOURCE_CHANGED, "The storage does not have these parts.")
                    if there > size:  # written and never committed
                        os.truncate(data, size)
                    stored = self._settle(data, key)
                    self._discard(folder)
            except FileNotFoundError:
                found = self._stat(key)
                if found is None or found.size != size:
                    raise Failure(Code.SOURCE_MISSING) from None
                return found
            except AlreadyStored:
                # Cut off between the name and the removal: the object is this very file.
                if not os.path.samefile(data, self.path(key)):
                    raise
                self._discard(folder)
                return _stored(os.stat(self.path(key)))
            return stored

        return await _in_thread(complete)

    async def abort_parts(self, key: str, upload: str) -> None:
        with suppress(Failure):  # a name that is none of ours has nothing here
            folder = self._parts(upload)
            await _in_thread(lambda: self._discard(folder))

    def _discard(self, folder: Path) -> None:
        """Remove a folder; whoever looks at it sees all of it, or nothing."""
        away = self._incoming()
        with suppress(FileNotFoundError):  # another was first
            os.rename(folder, away)
            _remove_tree(away)

    def _parts(self, upload: str) -> Path:
        if not _UPLOAD.fullmatch(upload):
            raise Failure(Code.SOURCE_MISSING)
        return self.root / _INCOMING / upload

    # Requests for others to send.

    def sign_put(
        self,
        key: str,
        *,
        content_type: str,
        size: int,
        expires_at: datetime,
        sha256: str | None = None,
    ) -> SignedRequest:
        grant = signing.Grant("PUT", key, int(expires_at.timestamp()), content_type, size)
        headers = {"Content-Type": content_type, "Content-Length": str(size)}
        return SignedRequest("PUT", self._address(grant), headers, expires_at)

    async def sign_form(
        self, key: str, *, content_type: str, most: int, expires_at: datetime
    ) -> SignedForm | None:
        return None

    def sign_get(
        self,
        key: str,
        *,
        expires_at: datetime,
        content_type: str | None = None,
        filename: str | None = None,
    ) -> SignedRequest:
        # What is served takes type and name from the manifest.
        grant = signing.Grant("GET", key, int(expires_at.timestamp()))
        return SignedRequest("GET", self._address(grant), {}, expires_at)

    def sign_part(
        self,
        key: str,
        upload: str,
        number: int,
        *,
        offset: int,
        size: int | None,
        most: int,
        expires_at: datetime,
    ) -> SignedRequest:
        part = (upload, number, offset) if size is not None else (upload, number, offset, most)
        grant = signing.Grant("PUT", key, int(expires_at.timestamp()), size=size, part=part)
        headers = {} if size is None else {"Content-Length": str(size)}
        return SignedRequest("PUT", self._address(grant), headers, expires_at)

    def _address(self, grant: signing.Grant) -> str:
        return f"{self._base_url}/storage/{signing.sign(self._keyring(), grant)}"

    # For the API, which plays the object store towards clients.

    def path(self, key: str) -> Path:
        """The file of a key. Raises ValueError for a key that we would never mint."""
        return self.root.joinpath(*checked_key(key).split("/"))

    async def receive(self, key: str) -> Receiver:
        """Begin to take in an object; raises AlreadyStored if its key is taken."""

        def begin() -> Receiver:
            if self.path(key).exists():
                raise AlreadyStored(key)
            return Receiver(self, key, self._incoming())

        return await _held(begin, Receiver.drop)

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

    async def sweep(
        self, *, older_than_seconds: float, now: float, keep: Collection[str] = ()
    ) -> int:
        def swept() -> int:
            count = 0
            for entry in os.scandir(self.root / _INCOMING):
                with suppress(FileNotFoundError):
                    old = now - _last_change(entry) > older_than_seconds
                    if old and entry.name not in keep:
                        if entry.is_dir(follow_symlinks=False):
                            _remove_tree(Path(entry.path))
                        else:
                            os.unlink(entry.path)
                        count += 1
            return count

        return await _in_thread(swept)


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

    async def abort(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Close and remove what came in so far."""
        self._file.close()
        self._incoming.unlink(missing_ok=True)


class _LocalPart:
    """A part that is written to its place in the one file. What was written and not committed is
    overwritten by whoever comes next."""

    def __init__(
        self, storage: LocalStorage, folder: Path, number: int, offset: int, fence: int
    ) -> None:
        self._storage = storage
        self._folder = folder
        self._number = number
        self._offset = offset
        self._fence = fence
        # Whoever writes under a fence keeps account by itself and needs no ETag.
        self._digest = None if fence else hashlib.md5(usedforsecurity=False)
        self._file = open(folder / _DATA, "r+b", buffering=0)  # noqa: SIM115  # owned by this object
        self.written = 0

    async def write(self, data: bytes) -> None:
        await _in_thread(lambda: self._write(data))

    def _write(self, data: bytes) -> None:
        with self._turn():
            view, at = memoryview(data), self._offset + self.written
            while view:
                count = os.pwrite(self._file.fileno(), view, at)
                view, at = view[count:], at + count
        if self._digest is not None:
            self._digest.update(data)
        self.written += len(data)

    async def commit(self) -> Part:
        etag = f'"{self._digest.hexdigest()}"' if self._digest is not None else ""
        part = Part(self._number, self.written, etag)

        def commit() -> None:
            with self._turn():
                os.fsync(self._file.fileno())
                if not self._fence:
                    self._note(part)
            self._file.close()

        await _in_thread(commit)
        return part

    async def set_aside(self, key: str) -> None:
        def copy() -> None:
            incoming = self._storage._incoming()
            try:
                with open(incoming, "xb") as file:
                    os.sendfile(file.fileno(), self._file.fileno(), self._offset, self.written)
                self._storage._settle(incoming, key)
            finally:
                incoming.unlink(missing_ok=True)
                self._file.close()

        await _in_thread(copy)

    def _note(self, part: Part) -> None:
        fresh = self._folder / f".{uuid4().hex}"
        fresh.write_text(json.dumps(dataclasses.asdict(part)))
        _sync(fresh)
        os.rename(fresh, self._folder / str(part.number))
        _sync(self._folder)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Alone in the file, unless a writer with a higher fence has been there."""
        try:
            with _locked(self._folder / _FENCE) as fence:
                seen = int(os.pread(fence, 20, 0))
                if seen > self._fence:
                    raise Failure(Code.SOURCE_CHANGED, "Another writer took this upload over.")
                if seen < self._fence:
                    os.pwrite(fence, str(self._fence).encode(), 0)
                yield
        except FileNotFoundError:
            raise Failure(Code.SOURCE_MISSING) from None

    def abort(self) -> None:
        self._file.close()


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
    marker = root / MARKER
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not marker.exists():
            if any(name != _INCOMING for name in os.listdir(root)):
                raise StorageRefused(
                    f"{root} holds files but not Mediamill's marker {MARKER!r}. Is it the right "
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


def _remove_tree(folder: Path) -> None:
    """Remove a folder that is out of the way. A writer that had found its old place just before may
    still lay a file into it: then once more."""
    for _ in range(_REMOVALS):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            if not folder.exists():
                return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
        else:
            return
    shutil.rmtree(folder)


async def _in_thread(work: Callable[[], T]) -> T:
    """Run disk work off the loop, with its errors as failures that the engine understands."""
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Failure(Code.SCRATCH_FULL, "The storage's disk is full.") from error
        raise Failure(Code.STORAGE_UNAVAILABLE) from error


async def _held(opening: Callable[[], T], let_go: Callable[[T], object]) -> T:
    """Open something in a thread. A caller that is canceled meanwhile does not leave it open."""
    opened = asyncio.ensure_future(_in_thread(opening))
    try:
        return await asyncio.shield(opened)
    except asyncio.CancelledError:

        def close(done: asyncio.Future[T]) -> None:
            if not done.cancelled() and done.exception() is None:
                let_go(done.result())

        opened.add_done_callback(close)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _last_change(entry: os.DirEntry[str]) -> float:
    """When something came in last; for an object in parts, its latest byte."""
    if _UPLOAD.fullmatch(entry.name):
        with suppress(FileNotFoundError):
            return os.stat(os.path.join(entry.path, _DATA)).st_mtime
    return entry.stat().st_ctime


def _stored(stat: os.stat_result) -> Stored:
    # The inode's birth is one write: size, inode and time of change of content name these bytes.
    version = f"{stat.st_size:x}-{stat.st_ino:x}-{stat.st_mtime_ns:x}"
    return Stored(stat.st_size, version, datetime.fromtimestamp(stat.st_mtime, UTC))


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

"""What the storages in a bucket share: data through obstore, the rest by requests that we sign.

A vendor's module says how its requests are signed, what names a version, and how parts are joined.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import tempfile
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from urllib.parse import quote
from uuid import UUID
from xml.etree import ElementTree

import httpx2 as httpx
import obstore
from obstore import exceptions

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

from mediamill.failures import Code, Failure
from mediamill.storage import (
    MARKER,
    AlreadyStored,
    Part,
    PartReceiver,
    Receiver,
    SignedForm,
    SignedRequest,
    StorageRefused,
    Stored,
    checked_key,
)

T = TypeVar("T")

_PROBED: Final = "uploads/mediamill-probe"
BINARY: Final = "application/octet-stream"
_OWN_SECONDS: Final = 900.0  # life of the requests that we sign for ourselves
_SMALL_BYTES: Final = 8 << 20  # stored by one request out of memory
_PART_BYTES: Final = 16 << 20
_MEMORY_BYTES: Final = 1 << 20  # of a part on its way in; what is more waits on disk
_AT_ONCE: Final = 4
_DELETES_AT_ONCE: Final = 16
_CHUNK: Final = 1 << 20
_CONNECT_SECONDS: Final = 3.0
_IDLE_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 60.0
TAKEN: Final = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "BlobAlreadyExists"})
_DENIED: Final = frozenset({401, 403})
_TRIES: Final = 4
_PAUSE_SECONDS: Final = 0.3  # before the second try; three times as long before each one after it


class Refusal(Exception):
    """An answer of the storage that is none of the expected ones; `code` is the vendor's name for
    it."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Tried:
    """What a form is answered that is right, and one whose file is too long; 0 without forms."""

    right: int
    longer: int

    @property
    def held(self) -> bool:
        return 200 <= self.right < 300 and 400 <= self.longer < 500


class Kept(NamedTuple):
    """What stays of deleted objects: `ok` False if bytes do that we do not remove."""

    ok: bool | None
    detail: str
    remedy: str = ""


class Wire(ABC):
    """Requests to one bucket, signed by its vendor's library."""

    object_headers: Mapping[str, str] = {}
    """What a request that stores a whole object has to say."""
    list_query: Mapping[str, str] = {"list-type": "2", "max-keys": "1"}
    """What a request for the list of objects has to ask."""
    unbound: frozenset[str] = frozenset()
    """The findings of an inspection that no signature of this vendor can bring about."""

    def __init__(self) -> None:
        self._client: httpx.AsyncClient | None = None

    @abstractmethod
    def sign(
        self,
        method: str,
        key: str,
        *,
        expires_at: datetime,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        public: bool = True,
    ) -> SignedRequest:
        """A request that anyone may send until `expires_at`, with exactly these headers where the
        vendor can bind them."""

    @abstractmethod
    def address(self, key: str, *, public: bool) -> str:
        """Where an object is, or with "" the bucket; for clients if `public`."""

    async def send(
        self,
        method: str,
        key: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> httpx.Response:
        """Send a request that is safe to repeat. Raises Refusal, Failure."""
        return await insisting(
            lambda: self.send_once(method, key, query=query, headers=headers, content=content)
        )

    async def send_once(
        self,
        method: str,
        key: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | AsyncIterator[bytes] | None = None,
    ) -> httpx.Response:
        """Send one request. Raises Refusal, Failure."""
        expires_at = datetime.now(UTC) + timedelta(seconds=_OWN_SECONDS)
        signed = self.sign(
            method, key, expires_at=expires_at, query=query, headers=headers, public=False
        )
        return await self.send_as_is(method, signed.url, headers=signed.headers, content=content)

    async def send_as_is(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | AsyncIterator[bytes] | None = None,
    ) -> httpx.Response:
        """Send a request that somebody else has signed. Raises Refusal, Failure."""
        try:
            answer = await self._connections().request(
                method, url, headers=dict(headers or {}), content=content
            )
        except httpx.HTTPError as error:
            raise Failure(Code.STORAGE_UNAVAILABLE) from error
        return _checked(answer)

    async def post(self, form: SignedForm, size: int) -> int:
        """Send a form with a file of that size; the status. Raises Failure."""
        file = {"file": ("probe", b"x" * size, BINARY)}
        try:
            answer = await self._connections().post(form.url, data=form.fields, files=file)
        except httpx.HTTPError as error:
            raise Failure(Code.STORAGE_UNAVAILABLE) from error
        if answer.status_code >= 500 and answer.status_code != 501:
            raise Failure(Code.STORAGE_UNAVAILABLE)
        return answer.status_code

    def _connections(self) -> httpx.AsyncClient:
        if self._client is None:
            timeout = httpx.Timeout(_IDLE_SECONDS, connect=_CONNECT_SECONDS)
            self._client = httpx.AsyncClient(timeout=timeout, trust_env=False)
        return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


class Bucket(ABC):
    """The storage in one bucket, but for what differs from vendor to vendor."""

    least_part_bytes = 5 << 20
    most_parts = 10_000

    def __init__(self, wire: Wire, store: ObjectStore) -> None:
        self.wire = wire
        self._store = store
        self._holds_forms: bool | None = None

    # What a vendor says.

    @abstractmethod
    def _pinned(self, version: str) -> GetOptions:
        """The options of a read that gets this version or none."""

    @abstractmethod
    async def _put_whole(self, key: str, data: bytes) -> Stored | None:
        """Store an object by one request, unless the key is taken; None if the answer does not say
        its version. Raises Refusal, Failure."""

    @abstractmethod
    async def _put_part(self, key: str, upload: str, number: int, size: int, body: Spool) -> Part:
        """Store a part by one request. Raises Refusal, Failure."""

    @abstractmethod
    def _uploads(self, prefix: str) -> AsyncIterator[tuple[str, str, float]]:
        """The objects in parts below a prefix: key, name, and when each began (Unix seconds)."""

    @abstractmethod
    async def kept_after_deletion(self) -> Kept:
        """Whether deleted bytes stay in the bucket. Raises Refusal, Failure."""

    @abstractmethod
    async def tidies_up(self) -> bool:
        """Whether the bucket removes unfinished parts by itself. Raises Refusal, Failure."""

    @abstractmethod
    def cors_rule(self, origin: str, headers: Sequence[str]) -> str:
        """The rule that lets pages of an origin send these headers, as the vendor writes it."""

    @abstractmethod
    async def begin_parts(self, key: str, *, content_type: str) -> str: ...

    @abstractmethod
    async def complete_parts(
        self, key: str, upload: str, parts: Sequence[Part], *, size: int
    ) -> Stored: ...

    @abstractmethod
    async def abort_parts(self, key: str, upload: str) -> None: ...

    @abstractmethod
    def sign_put(
        self,
        key: str,
        *,
        content_type: str,
        size: int,
        expires_at: datetime,
        sha256: str | None = None,
    ) -> SignedRequest: ...

    @abstractmethod
    def sign_get(
        self,
        key: str,
        *,
        expires_at: datetime,
        content_type: str | None = None,
        filename: str | None = None,
    ) -> SignedRequest: ...

    def form(
        self, key: str, *, content_type: str, most: int, expires_at: datetime, public: bool = True
    ) -> SignedForm | None:
        """A form as the vendor has it, whether or not this bucket holds to it; None if it has
        none."""
        return None

    # What all do alike.

    async def stat(self, key: str) -> Stored | None:
        checked_key(key)
        try:
            with translated():
                return _stored(await obstore.head_async(self._store, key))
        except FileNotFoundError:
            return None

    async def fetch(self, key: str, version: str, destination: Path) -> str:
        digest = hashlib.sha256()
        with tempfile.NamedTemporaryFile(dir=destination.parent, delete=False) as file:
            try:
                async for chunk in self.read(key, version):
                    await asyncio.to_thread(_write_and_hash, file, digest, chunk)
                file.flush()
                Path(file.name).rename(destination)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        return digest.hexdigest()

    async def read(self, key: str, version: str) -> AsyncGenerator[bytes, None]:
        checked_key(key)
        options = self._pinned(version)
        seen = 0
        try:
            with translated():
                found = await obstore.get_async(self._store, key, options=options)
                size = found.meta["size"]
                if _stored(found.meta).version != version:
                    raise Failure(Code.SOURCE_CHANGED)
                async for chunk in found.stream(min_chunk_size=_CHUNK):
                    seen += len(chunk)
                    yield bytes(chunk)
        except FileNotFoundError:
            if "version" in options and await self.stat(key) is not None:
                raise Failure(Code.SOURCE_CHANGED) from None
            raise _missing() from None
        except Failure as failure:  # some judge the condition before they look for the object
            if failure.code is Code.SOURCE_CHANGED and await self.stat(key) is None:
                raise _missing() from None
            raise
        if seen != size:  # never a verdict on the file
            raise Failure(Code.STORAGE_UNAVAILABLE, "The storage's answer was cut short.")

    async def put(self, key: str, source: Path) -> Stored:
        checked_key(key)
        size = source.stat().st_size
        if size <= _SMALL_BYTES:
            return await self.put_small(key, await asyncio.to_thread(source.read_bytes))
        await self.refuse_taken(key)
        upload = await self.begin_parts(key, content_type=BINARY)
        step = max(_PART_BYTES, -(-size // self.most_parts))
        limit = asyncio.Semaphore(_AT_ONCE)

        async def part(number: int, offset: int) -> Part:
            async with limit:
                receiver = Spool(self, key, upload, number)
                try:
                    with source.open("rb") as file:
                        file.seek(offset)
                        left = min(step, size - offset)
                        while left:
                            data = await asyncio.to_thread(file.read, min(left, _CHUNK))
                            if not data:
                                raise Failure(Code.INTERNAL, "A file shrank while it was stored.")
                            await receiver.write(data)
                            left -= len(data)
                    return await receiver.commit()
                finally:
                    receiver.abort()

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(part(number, offset))
                    for number, offset in enumerate(range(0, size, step), start=1)
                ]
            return await self.complete_parts(
                key, upload, [task.result() for task in tasks], size=size
            )
        except BaseExceptionGroup as group_error:
            await self.give_up(key, upload)
            raise group_error.exceptions[0] from None
        except BaseException:
            await self.give_up(key, upload)
            raise

    async def put_small(self, key: str, data: bytes) -> Stored:
        """Store what fits into one request. An answer that is lost is no failure: what is refused
        after it, and has our size, is our own."""
        for attempt in range(1, _TRIES + 1):
            try:
                stored = await self._put_whole(key, data)
            except Refusal as refusal:
                meant = meaning(refusal, key)
                if isinstance(meant, AlreadyStored) and attempt > 1:
                    there = await self.stat(key)
                    if there is not None and there.size == len(data):
                        return there
                raise meant from refusal
            except Failure as failure:
                if failure.code is not Code.STORAGE_UNAVAILABLE or attempt == _TRIES:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS * 3 ** (attempt - 1))
            else:
                return stored or await self.there(key)
        raise AssertionError

    async def put_part(self, key: str, upload: str, number: int, size: int, body: Spool) -> Part:
        try:
            return await insisting(lambda: self._put_part(key, upload, number, size, body))
        except Refusal as refusal:
            raise meaning(refusal, key) from refusal

    async def take_back(self, key: str) -> None:
        """Remove an object of a probe with all its versions. Needs no thread of obstore, which a
        command that ends right after could meet in its exit."""
        await self._remove(key)

    async def refuse_taken(self, key: str) -> None:
        """Raises AlreadyStored."""
        if await self.stat(key) is not None:
            raise AlreadyStored(key)

    async def there(self, key: str) -> Stored:
        """An object that the storage has said to have stored."""
        stored = await self.stat(key)
        if stored is None:
            raise Failure(Code.STORAGE_UNAVAILABLE, "The storage lost what it said it has.")
        return stored

    async def delete(self, prefix: str) -> int:
        checked_key(prefix)
        count = await self._delete_objects(prefix)
        async for key, upload, _ in self._uploads(prefix):
            await self.abort_parts(key, upload)
        return count

    async def _delete_objects(self, prefix: str) -> int:
        count = 0
        with translated():
            async for batch in obstore.list(self._store, prefix, chunk_size=1000):
                count += await self._delete_keys([entry["path"] for entry in batch])
        if await self.stat(prefix) is not None:
            with translated():
                count += await self._delete_keys([prefix])
        return count

    async def _delete_keys(self, keys: list[str]) -> int:
        """Remove these; how many there were, where the vendor tells."""
        limit = asyncio.Semaphore(_DELETES_AT_ONCE)

        async def one(key: str) -> bool:
            async with limit:
                return await self._remove(key)

        return sum(await asyncio.gather(*(one(key) for key in keys)))

    async def _remove(
        self,
        key: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bool:
        """Remove one; whether there was one."""
        try:
            await self.wire.send("DELETE", key, query=query, headers=headers)
        except Refusal as refusal:
            if refusal.status in (404, 412):
                return False
            raise meaning(refusal, key) from refusal
        return True

    async def list(self, prefix: str) -> list[str]:
        # By objects: some servers go on naming a common prefix after its last object is gone.
        checked_key(prefix)
        names = set()
        with translated():
            async for batch in obstore.list(self._store, prefix, chunk_size=1000):
                below = (entry["path"].removeprefix(f"{prefix}/") for entry in batch)
                names |= {path.partition("/")[0] for path in below}
        return sorted(names)

    async def sign_form(
        self, key: str, *, content_type: str, most: int, expires_at: datetime
    ) -> SignedForm | None:
        made = self.form(checked_key(key), content_type=content_type, most=most,
                         expires_at=expires_at)  # fmt: skip
        if made is not None and self._holds_forms is None:
            self._holds_forms = (await self.try_form()).held
        return made if self._holds_forms else None

    async def try_form(self) -> Tried:
        """Find out what this bucket makes of a form, with objects that are removed again."""
        key = f"{_PROBED}/{secrets.token_hex(8)}"
        expires_at = datetime.now(UTC) + timedelta(seconds=_OWN_SECONDS)
        made = self.form(key, content_type=BINARY, most=8, expires_at=expires_at, public=False)
        if made is None:
            return Tried(0, 0)
        try:
            longer, right = [await self.wire.post(made, size) for size in (9, 8)]
        finally:
            await self.take_back(key)
        return Tried(right, longer)

    async def receive(self, key: str) -> Receiver:
        checked_key(key)
        await self.refuse_taken(key)
        return _Incoming(self, key)

    async def open_part(
        self, key: str, upload: str, number: int, *, offset: int, fence: int = 0
    ) -> PartReceiver:
        return Spool(self, checked_key(key), upload, number)

    async def sweep(
        self, *, older_than_seconds: float, now: float, keep: Collection[str] = ()
    ) -> int:
        swept = 0
        async for key, upload, began in self._uploads(""):
            if now - began > older_than_seconds and upload not in keep:
                await self.abort_parts(key, upload)
                swept += 1
        return swept

    async def give_up(self, key: str, upload: str) -> None:
        with suppress(Failure):  # the sweep takes what is left
            await self.abort_parts(key, upload)

    async def close(self) -> None:
        await self.wire.close()


class Spool:
    """A part that is held until its length is known: no vendor takes one of unknown length."""

    def __init__(self, bucket: Bucket, key: str, upload: str, number: int) -> None:
        self._bucket = bucket
        self._key = key
        self._upload = upload
        self._number = number
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=_MEMORY_BYTES)  # noqa: SIM115
        self.nonce = secrets.token_hex(8)
        self.written = 0

    async def write(self, data: bytes) -> None:
        self.written += len(data)
        if self.written <= _MEMORY_BYTES:
            self._file.write(data)
        else:
            await asyncio.to_thread(self._file.write, data)

    async def commit(self) -> Part:
        try:
            return await self._bucket.put_part(
                self._key, self._upload, self._number, self.written, self
            )
        finally:
            self.abort()

    async def set_aside(self, key: str) -> None:
        self._file.seek(0)
        data = await asyncio.to_thread(self._file.read)
        self.abort()
        await self._bucket.put_small(checked_key(key), data)

    async def chunks(self) -> AsyncIterator[bytes]:
        """All that came, from its beginning."""
        self._file.seek(0)
        while data := await asyncio.to_thread(self._file.read, _CHUNK):
            yield data

    def abort(self) -> None:
        self._file.close()


class _Incoming:
    """An object of unknown length: one request if it stays small, else parts."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket = bucket
        self._key = key
        self._held = bytearray()
        self._upload: str | None = None
        self._part: PartReceiver | None = None
        self._parts: list[Part] = []
        self._done = False
        self.written = 0

    async def write(self, data: bytes) -> None:
        self.written += len(data)
        if self._upload is None:
            self._held += data
            if len(self._held) <= _SMALL_BYTES:
                return
            self._upload = await self._bucket.begin_parts(self._key, content_type=BINARY)
            data = bytes(self._held)
            self._held = bytearray()
        if self._part is None:
            self._part = Spool(self._bucket, self._key, self._upload, len(self._parts) + 1)
        await self._part.write(data)
        if self._part.written >= _PART_BYTES:
            self._parts.append(await self._part.commit())
            self._part = None

    async def commit(self) -> Stored:
        if self._upload is None:
            stored = await self._bucket.put_small(self._key, bytes(self._held))
        else:
            if self._part is not None:
                self._parts.append(await self._part.commit())
                self._part = None
            stored = await self._bucket.complete_parts(
                self._key, self._upload, self._parts, size=self.written
            )
        self._done = True
        return stored

    async def abort(self) -> None:
        if self._part is not None:
            self._part.abort()
        if self._upload is not None and not self._done:
            self._done = True
            await self._bucket.give_up(self._key, self._upload)


async def claim(wire: Wire, name: str, installation: UUID, *, may_be_new: bool) -> bytes:
    """Make sure that a bucket belongs to this installation; the marker's content.

    Raises StorageRefused, Refusal, Failure.
    """
    try:
        found = (await wire.send("GET", MARKER)).text.strip()
    except Refusal as refusal:
        if refusal.code not in ("NoSuchKey", "BlobNotFound", "") or refusal.status != 404:
            raise
        if not may_be_new:
            raise StorageRefused(
                f"Bucket {name!r} lacks Mediamill's marker {MARKER!r}, but the "
                f"database knows of objects. Is it the right bucket? To go on without them, write "
                f"{installation} into an object of that name."
            ) from None
        found = str(installation)
        await wire.send("PUT", MARKER, headers=wire.object_headers, content=f"{found}\n".encode())
    if found != str(installation):
        raise StorageRefused(
            f"Bucket {name!r} belongs to installation {found}, the database to {installation}. "
            "Point the bucket's setting and MEDIAMILL_DATABASE_URL to things that belong together."
        )
    return f"{found}\n".encode()


def unusable(name: str, refusal: Refusal) -> StorageRefused:
    """Why a bucket cannot be opened, with what to look at."""
    hint = {
        "NoSuchBucket": "There is no such bucket.",
        "ContainerNotFound": "There is no such container.",
        "SignatureDoesNotMatch": "The secret key is wrong.",
        "AuthenticationFailed": "The account's name or key is wrong, or the clock.",
        "AuthorizationFailure": "The account's name or key is wrong, or may not be used here.",
        "InvalidAccessKeyId": "The access key is not known there.",
        "AccessDenied": "The key may not read or write there.",
        "RequestTimeTooSkewed": "The clock of this machine is wrong.",
    }.get(refusal.code, "")
    return StorageRefused(
        f"Bucket {name!r} cannot be used: {refusal}. {hint} "
        "`mediamill storage doctor` says more.".replace("  ", " ")
    )


def client_options(endpoint: str) -> ClientConfig:
    """How obstore's connections behave."""
    return {
        "allow_http": endpoint.startswith("http:"),
        "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
        "read_timeout": timedelta(seconds=_IDLE_SECONDS),
        "timeout": timedelta(hours=6),
    }


def retry_config() -> RetryConfig:
    """How often obstore repeats."""
    return {"max_retries": _TRIES, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)}


def disposition(filename: str) -> str:
    """A Content-Disposition that shows a file under its name."""
    plain = filename if filename.isascii() and filename.isprintable() else "file"
    plain = plain.replace("\\", "_").replace('"', "_")
    return f"inline; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}"


def below(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}/")


def named_version(etag: str | None, version: str | None) -> str:
    """What names these bytes: the ETag, and the version where the bucket keeps several."""
    named = etag or ""
    return named if version in (None, "", "null") else f"{named} {version}"


def meaning(refusal: Refusal, key: str) -> Exception:
    """What a refusal means for work."""
    if refusal.status in (409, 412) or refusal.code in TAKEN:
        return AlreadyStored(key)
    if refusal.status == 404 and refusal.code not in ("NoSuchBucket", "ContainerNotFound"):
        return Failure(Code.SOURCE_MISSING)
    if refusal.status in _DENIED:
        return Failure(Code.STORAGE_AUTH)
    if refusal.code in ("InvalidPart", "InvalidPartOrder", "EntityTooSmall", "InvalidBlockList"):
        return Failure(Code.SOURCE_CHANGED, "The storage does not have these parts.")
    return Failure(Code.STORAGE_UNAVAILABLE)


@contextmanager
def translated() -> Iterator[None]:
    """obstore's errors as failures that the engine understands; absence as FileNotFoundError."""
    try:
        yield
    except (exceptions.NotFoundError, FileNotFoundError):
        raise FileNotFoundError from None
    except exceptions.PreconditionError:
        raise Failure(Code.SOURCE_CHANGED) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise Failure(Code.STORAGE_AUTH) from error
    except exceptions.BaseError as error:
        # Some refusals come as errors of no kind; the library's text has their status.
        denied = re.search(r"\b40[13] (Unauthorized|Forbidden)", str(error))
        raise Failure(Code.STORAGE_AUTH if denied else Code.STORAGE_UNAVAILABLE) from error


async def insisting(call: Callable[[], Awaitable[T]]) -> T:
    """The outcome of `call`, which is repeated while the storage does not answer."""
    for attempt in range(1, _TRIES):
        try:
            return await call()
        except Failure as failure:
            if failure.code is not Code.STORAGE_UNAVAILABLE:
                raise
        await asyncio.sleep(_PAUSE_SECONDS * 3 ** (attempt - 1))
    return await call()


def parsed(answer: httpx.Response) -> ElementTree.Element:
    """The document of an answer. Raises Failure."""
    try:
        return ElementTree.fromstring(answer.content)  # noqa: S314  # from our own storage
    except ElementTree.ParseError as error:
        raise Failure(Code.STORAGE_UNAVAILABLE) from error


def every(element: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    """The children of that name, whatever their namespace."""
    return [child for child in element if _plain(child.tag) == name]


def text(element: ElementTree.Element, name: str) -> str:
    """The text of the first child of that name; "" without one."""
    return next((child.text or "" for child in element if _plain(child.tag) == name), "")


def _plain(tag: str) -> str:
    return re.sub(r"^\{.*\}", "", tag)


def _stored(meta: Any) -> Stored:
    version = named_version(meta["e_tag"], meta["version"])
    return Stored(meta["size"], version, meta["last_modified"])


def _missing() -> Failure:
    return Failure(Code.SOURCE_MISSING, "The original is no longer in storage.")


def _write_and_hash(file: Any, digest: Any, chunk: bytes) -> None:
    file.write(chunk)
    digest.update(chunk)


def _checked(answer: httpx.Response) -> httpx.Response:
    """The answer if it is a success. Raises Refusal, Failure.

    A copy and a completion may say 200 first and tell of their failure in the body.
    """
    failed = answer.status_code >= 400
    code = answer.headers.get("x-ms-error-code", "")
    if failed or b"<Error>" in answer.content[:1000]:
        with suppress(ElementTree.ParseError):
            code = text(ElementTree.fromstring(answer.content), "Code")  # noqa: S314  # from our storage
    if not failed and not code:
        return answer
    status = answer.status_code if failed else 500
    if code in ("AccessDenied", "NoSuchUpload", "NoSuchKey") or status < 500 or status == 501:
        raise Refusal(status, code)
    raise Failure(Code.STORAGE_UNAVAILABLE)

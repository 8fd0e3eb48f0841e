"""Objects in a bucket that speaks S3: data through obstore, the rest by requests that we sign.

Signatures are botocore's. What a bucket enforces is found out when it is opened, not guessed from
its vendor's name.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import re
import tempfile
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
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit
from uuid import UUID
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import httpx2 as httpx
import obstore
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.session import Session
from obstore import exceptions
from obstore.store import S3Store

if TYPE_CHECKING:
    from obstore import GetOptions

from mediamill.config import Settings
from mediamill.failures import Code, Failure
from mediamill.storage import (
    AlreadyStored,
    Part,
    PartReceiver,
    Receiver,
    SignedRequest,
    StorageRefused,
    Stored,
    checked_key,
)

T = TypeVar("T")

_MARKER: Final = "mediamill-storage"
_OWN_SECONDS: Final = 900.0  # life of the requests that we sign for ourselves
_SMALL_BYTES: Final = 8 << 20  # stored by one request out of memory
_PART_BYTES: Final = 16 << 20
_COPY_BYTES: Final = 5 << 30  # the most that one copy request takes
_COPY_PART_BYTES: Final = 1 << 30
_MEMORY_BYTES: Final = 1 << 20  # of a part on its way in; what is more waits on disk
_AT_ONCE: Final = 4
_CHUNK: Final = 1 << 20
_CONNECT_SECONDS: Final = 3.0
_IDLE_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 60.0
_TAKEN: Final = frozenset({"PreconditionFailed", "ConditionalRequestConflict"})
_DENIED: Final = frozenset({401, 403})
_TRIES: Final = 4
_PAUSE_SECONDS: Final = 0.3  # before the second try; three times as long before each one after it


@dataclass(frozen=True, slots=True)
class Place:
    """Where a bucket is. `public_endpoint` is the address that clients use, if it is another."""

    bucket: str
    region: str
    endpoint: str | None = None
    public_endpoint: str | None = None
    virtual_host: bool = False
    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None


def place(settings: Settings) -> Place:
    """The bucket that the settings name; config.py has checked that there is one."""
    assert settings.s3_bucket is not None
    return Place(
        bucket=settings.s3_bucket,
        region=settings.s3_region,
        endpoint=settings.s3_endpoint,
        public_endpoint=settings.s3_public_endpoint,
        virtual_host=settings.s3_virtual_host,
        access_key_id=settings.s3_access_key_id,
        secret_access_key=settings.s3_secret_access_key,
    )


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a bucket was found to do."""

    conditional_put: bool
    """`If-None-Match: *` keeps an object from being overwritten."""
    versioned: bool
    """Deleting an object leaves its older versions behind."""


class Refusal(Exception):
    """An answer of the storage that is none of the expected ones; `code` is S3's name for it."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status = status
        self.code = code


class Wire:
    """Requests to one bucket, signed by botocore."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.credentials = _credentials(place)
        self._client: httpx.AsyncClient | None = None

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
        """A request that anyone may send until `expires_at`, with exactly these headers."""
        seconds = max(1, math.ceil((expires_at - datetime.now(UTC)).total_seconds()))
        address = self.address(key, public=public)
        if query:
            address += f"?{urlencode(query, quote_via=quote)}"
        given = dict(headers or {})
        request = AWSRequest(method=method, url=address, headers=dict(given))
        frozen = self.credentials.get_frozen_credentials()
        signer = S3SigV4QueryAuth(frozen, "s3", self.place.region, expires=seconds)
        signer.add_auth(request)
        return SignedRequest(method, request.url, given, expires_at)

    def address(self, key: str, *, public: bool) -> str:
        place = self.place
        endpoint = place.endpoint or f"https://s3.{place.region}.amazonaws.com"
        if public and place.public_endpoint:
            endpoint = place.public_endpoint
        endpoint = endpoint.rstrip("/")
        if place.virtual_host:
            parts = urlsplit(endpoint)
            return f"{parts.scheme}://{place.bucket}.{parts.netloc}{parts.path}/{quote(key)}"
        return f"{endpoint}/{place.bucket}/{quote(key)}" if key else f"{endpoint}/{place.bucket}"

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
        return await _insisting(
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
        if self._client is None:
            timeout = httpx.Timeout(_IDLE_SECONDS, connect=_CONNECT_SECONDS)
            self._client = httpx.AsyncClient(timeout=timeout, trust_env=False)
        try:
            answer = await self._client.request(
                method, signed.url, headers=dict(signed.headers), content=content
            )
        except httpx.HTTPError as error:
            raise Failure(Code.STORAGE_UNAVAILABLE) from error
        return _checked(answer)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


class S3Storage:
    """The storage in one bucket."""

    least_part_bytes = 5 << 20
    most_parts = 10_000

    def __init__(self, wire: Wire, store: S3Store, abilities: Abilities) -> None:
        self.wire = wire
        self.abilities = abilities
        self._store = store

    async def stat(self, key: str) -> Stored | None:
        checked_key(key)
        try:
            with _translated():
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
        etag, _, object_version = version.partition(" ")
        options: GetOptions = {"if_match": etag}
        if object_version:
            options["version"] = object_version
        seen = 0
        try:
            with _translated():
                found = await obstore.get_async(self._store, key, options=options)
                size = found.meta["size"]
                if _stored(found.meta).version != version:
                    raise Failure(Code.SOURCE_CHANGED)
                async for chunk in found.stream(min_chunk_size=_CHUNK):
                    seen += len(chunk)
                    yield bytes(chunk)
        except FileNotFoundError:
            if object_version and await self.stat(key) is not None:
                raise Failure(Code.SOURCE_CHANGED) from None
            raise Failure(Code.SOURCE_MISSING, "The original is no longer in storage.") from None
        if seen != size:  # never a verdict on the file
            raise Failure(Code.STORAGE_UNAVAILABLE, "The storage's answer was cut short.")

    async def put(self, key: str, source: Path) -> Stored:
        checked_key(key)
        size = source.stat().st_size
        if size <= _SMALL_BYTES:
            return await self._put_small(key, await asyncio.to_thread(source.read_bytes))
        await self._refuse_taken(key)
        upload = await self.begin_parts(key, content_type="application/octet-stream")
        step = max(_PART_BYTES, -(-size // self.most_parts))
        limit = asyncio.Semaphore(_AT_ONCE)

        async def part(number: int, offset: int) -> Part:
            async with limit:
                receiver = _S3Part(self, key, upload, number)
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
            await self._give_up(key, upload)
            raise group_error.exceptions[0] from None
        except BaseException:
            await self._give_up(key, upload)
            raise

    async def _put_small(self, key: str, data: bytes) -> Stored:
        """Store what fits into one request. An answer that is lost is no failure: what is refused
        after it, and has our size, is our own."""
        headers = {"If-None-Match": "*"} if self.abilities.conditional_put else {}
        if not headers:
            await self._refuse_taken(key)
        for attempt in range(1, _TRIES + 1):
            try:
                answer = await self.wire.send_once("PUT", key, headers=headers, content=data)
            except Refusal as refusal:
                meant = _meant(refusal, key)
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
                etag, version = answer.headers.get("etag"), answer.headers.get("x-amz-version-id")
                if etag is None:
                    return await self._there(key)
                return Stored(len(data), _version(etag, version))
        raise AssertionError

    async def _refuse_taken(self, key: str) -> None:
        if await self.stat(key) is not None:
            raise AlreadyStored(key)

    async def _there(self, key: str) -> Stored:
        stored = await self.stat(key)
        if stored is None:
            raise Failure(Code.STORAGE_UNAVAILABLE, "The storage lost what it said it has.")
        return stored

    async def copy(self, source: str, key: str) -> None:
        checked_key(source)
        checked_key(key)
        await self._refuse_taken(key)
        there = await self.stat(source)
        if there is None:
            raise Failure(Code.SOURCE_MISSING)
        headers = {"x-amz-copy-source": quote(f"/{self.wire.place.bucket}/{source}")}
        if there.size > _COPY_BYTES:
            await self._copy_large(headers, key, there.size)
            return
        try:
            await self._send_new("PUT", key, headers=headers)
        except Refusal as refusal:
            raise _meant(refusal, key) from refusal

    async def _copy_large(self, headers: dict[str, str], key: str, size: int) -> None:
        upload = await self.begin_parts(key, content_type="application/octet-stream")
        try:
            parts = []
            for number, offset in enumerate(range(0, size, _COPY_PART_BYTES), start=1):
                end = min(offset + _COPY_PART_BYTES, size)
                span = {"x-amz-copy-source-range": f"bytes={offset}-{end - 1}"}
                answer = await self.wire.send(
                    "PUT", key, query=_part(upload, number), headers={**headers, **span}
                )
                parts.append(Part(number, end - offset, _text(_xml(answer), "ETag")))
            await self.complete_parts(key, upload, parts, size=size)
        except Refusal as refusal:
            await self._give_up(key, upload)
            raise _meant(refusal, key) from refusal
        except BaseException:
            await self._give_up(key, upload)
            raise

    async def delete(self, prefix: str) -> int:
        checked_key(prefix)
        count = 0
        if self.abilities.versioned:
            count = await self._delete_versions(prefix)
        else:
            with _translated():
                found = obstore.list(self._store, prefix, chunk_size=1000)
                async for batch in found:
                    keys = [entry["path"] for entry in batch]
                    await obstore.delete_async(self._store, keys)
                    count += len(keys)
            if await self.stat(prefix) is not None:
                with _translated():
                    await obstore.delete_async(self._store, prefix)
                count += 1
        async for key, upload, _ in self._uploads(prefix):
            await self.abort_parts(key, upload)
        return count

    async def _delete_versions(self, prefix: str) -> int:
        """Also the versions that a plain deletion leaves; returns how many objects were live."""
        live = 0
        after: dict[str, str] = {}
        while True:
            page = _xml(
                await self._send("GET", "", query={"versions": "", "prefix": prefix, **after})
            )
            for entry in [*_all(page, "Version"), *_all(page, "DeleteMarker")]:
                key = _text(entry, "Key")
                if not _below(key, prefix):
                    continue
                await self._send("DELETE", key, query={"versionId": _text(entry, "VersionId")})
                is_version = entry.tag.endswith("Version")
                live += is_version and _text(entry, "IsLatest") == "true"
            if _text(page, "IsTruncated") != "true":
                return live
            after = {
                "key-marker": _text(page, "NextKeyMarker"),
                "version-id-marker": _text(page, "NextVersionIdMarker"),
            }

    async def list(self, prefix: str) -> list[str]:
        # By objects: some servers go on naming a common prefix after its last object is gone.
        checked_key(prefix)
        names = set()
        with _translated():
            async for batch in obstore.list(self._store, prefix, chunk_size=1000):
                below = (entry["path"].removeprefix(f"{prefix}/") for entry in batch)
                names |= {path.partition("/")[0] for path in below}
        return sorted(names)

    async def receive(self, key: str) -> Receiver:
        checked_key(key)
        await self._refuse_taken(key)
        return _S3Receiver(self, key)

    async def sweep(
        self, *, older_than_seconds: float, now: float, keep: Collection[str] = ()
    ) -> int:
        swept = 0
        async for key, upload, began in self._uploads(""):
            if now - began > older_than_seconds and upload not in keep:
                await self.abort_parts(key, upload)
                swept += 1
        return swept

    async def _uploads(self, prefix: str) -> AsyncIterator[tuple[str, str, float]]:
        """The objects in parts below a prefix: key, name, and when each began (Unix seconds)."""
        after: dict[str, str] = {}
        while True:
            page = _xml(
                await self._send("GET", "", query={"uploads": "", "prefix": prefix, **after})
            )
            for entry in _all(page, "Upload"):
                began = _text(entry, "Initiated")
                at = datetime.fromisoformat(began).timestamp() if began else 0.0
                key = _text(entry, "Key")
                if not prefix or _below(key, prefix):
                    yield key, _text(entry, "UploadId"), at
            if _text(page, "IsTruncated") != "true":
                return
            after = {
                "key-marker": _text(page, "NextKeyMarker"),
                "upload-id-marker": _text(page, "NextUploadIdMarker"),
            }

    # Objects in parts.

    async def begin_parts(self, key: str, *, content_type: str) -> str:
        checked_key(key)
        answer = await self._send(
            "POST", key, query={"uploads": ""}, headers={"Content-Type": content_type}
        )
        return _text(_xml(answer), "UploadId")

    async def open_part(
        self, key: str, upload: str, number: int, *, offset: int, fence: int = 0
    ) -> PartReceiver:
        return _S3Part(self, checked_key(key), upload, number)

    async def list_parts(self, key: str, upload: str) -> Sequence[Part]:
        checked_key(key)
        parts: list[Part] = []
        after = ""
        while True:
            query = {"uploadId": upload, **({"part-number-marker": after} if after else {})}
            page = _xml(await self._send("GET", key, query=query))
            parts += [
                Part(int(_text(e, "PartNumber")), int(_text(e, "Size")), _text(e, "ETag"))
                for e in _all(page, "Part")
            ]
            if _text(page, "IsTruncated") != "true":
                return parts
            after = _text(page, "NextPartNumberMarker")

    async def complete_parts(
        self, key: str, upload: str, parts: Sequence[Part], *, size: int
    ) -> Stored:
        checked_key(key)
        listed = "".join(
            f"<Part><PartNumber>{part.number}</PartNumber><ETag>{escape(part.etag)}</ETag></Part>"
            for part in sorted(parts, key=lambda part: part.number)
        )
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        try:
            await self._send_new("POST", key, query={"uploadId": upload}, content=body)
        except Refusal as refusal:
            # Its answer may have been lost before: then the object is there, and no upload.
            stored = await self.stat(key) if refusal.code != "InvalidPart" else None
            if refusal.code in _TAKEN and stored is not None:
                if await self._begun(key, upload):
                    raise AlreadyStored(key) from None
                return stored
            if stored is None or stored.size != size:
                raise _meant(refusal, key) from refusal
            return stored
        stored = await self._there(key)
        if stored.size != size:
            raise Failure(Code.SIZE_MISMATCH)
        return stored

    async def _begun(self, key: str, upload: str) -> bool:
        try:
            await self.list_parts(key, upload)
        except Failure as failure:
            if failure.code is not Code.SOURCE_MISSING:
                raise
            return False
        return True

    async def abort_parts(self, key: str, upload: str) -> None:
        try:
            await self.wire.send("DELETE", checked_key(key), query={"uploadId": upload})
        except Refusal as refusal:
            if refusal.code not in ("NoSuchUpload", "NoSuchKey") and refusal.status != 404:
                raise _meant(refusal, key) from refusal

    async def _give_up(self, key: str, upload: str) -> None:
        with suppress(Failure):  # the sweep takes what is left
            await self.abort_parts(key, upload)

    async def _send(
        self,
        method: str,
        key: str,
        *,
        query: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        try:
            return await self.wire.send(method, key, query=query, headers=headers)
        except Refusal as refusal:
            raise _meant(refusal, key) from refusal

    async def _send_new(
        self,
        method: str,
        key: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> None:
        """Make an object that is not there yet. Some servers know the condition for a plain PUT
        only; whoever calls has looked before."""
        given = dict(headers or {})
        if self.abilities.conditional_put:
            try:
                await self.wire.send(
                    method,
                    key,
                    query=query,
                    headers={**given, "If-None-Match": "*"},
                    content=content,
                )
                return
            except Refusal as refusal:
                if refusal.code != "NotImplemented" and refusal.status != 501:
                    raise
        await self.wire.send(method, key, query=query, headers=given, content=content)

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
        headers = {"Content-Type": content_type, "Content-Length": str(size)}
        if self.abilities.conditional_put:
            headers["If-None-Match"] = "*"
        if sha256 is not None:
            headers["x-amz-checksum-sha256"] = base64.b64encode(bytes.fromhex(sha256)).decode()
        return self.wire.sign("PUT", checked_key(key), expires_at=expires_at, headers=headers)

    def sign_get(
        self,
        key: str,
        *,
        expires_at: datetime,
        content_type: str | None = None,
        filename: str | None = None,
    ) -> SignedRequest:
        query = {"response-cache-control": "private, max-age=31536000, immutable"}
        if content_type is not None:
            query["response-content-type"] = content_type
        if filename is not None:
            name = quote(filename, safe="")
            plain = filename if filename.isascii() and filename.isprintable() else "file"
            plain = plain.replace("\\", "_").replace('"', "_")
            query["response-content-disposition"] = (
                f"inline; filename=\"{plain}\"; filename*=UTF-8''{name}"
            )
        return self.wire.sign("GET", checked_key(key), expires_at=expires_at, query=query)

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
        return self.wire.sign(
            "PUT",
            checked_key(key),
            expires_at=expires_at,
            query=_part(upload, number),
            headers={} if size is None else {"Content-Length": str(size)},
        )

    async def close(self) -> None:
        await self.wire.close()


class _S3Part:
    """A part that is held until its length is known: S3 takes no part of unknown length."""

    def __init__(self, storage: S3Storage, key: str, upload: str, number: int) -> None:
        self._storage = storage
        self._key = key
        self._upload = upload
        self._number = number
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=_MEMORY_BYTES)  # noqa: SIM115
        self.written = 0

    async def write(self, data: bytes) -> None:
        self.written += len(data)
        if self.written <= _MEMORY_BYTES:
            self._file.write(data)
        else:
            await asyncio.to_thread(self._file.write, data)

    async def commit(self) -> Part:
        try:
            return await _insisting(self._send)
        except Refusal as refusal:
            raise _meant(refusal, self._key) from refusal
        finally:
            self.abort()

    async def _send(self) -> Part:
        self._file.seek(0)
        answer = await self._storage.wire.send_once(
            "PUT",
            self._key,
            query=_part(self._upload, self._number),
            headers={"Content-Length": str(self.written)},
            content=self._chunks(),
        )
        return Part(self._number, self.written, answer.headers["etag"])

    async def set_aside(self, key: str) -> None:
        self._file.seek(0)
        data = await asyncio.to_thread(self._file.read)
        self.abort()
        await self._storage._put_small(checked_key(key), data)

    async def _chunks(self) -> AsyncIterator[bytes]:
        while data := await asyncio.to_thread(self._file.read, _CHUNK):
            yield data

    def abort(self) -> None:
        self._file.close()


class _S3Receiver:
    """An object of unknown length: one request if it stays small, else parts."""

    def __init__(self, storage: S3Storage, key: str) -> None:
        self._storage = storage
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
            self._upload = await self._storage.begin_parts(
                self._key, content_type="application/octet-stream"
            )
            data = bytes(self._held)
            self._held = bytearray()
        if self._part is None:
            self._part = _S3Part(self._storage, self._key, self._upload, len(self._parts) + 1)
        await self._part.write(data)
        if self._part.written >= _PART_BYTES:
            self._parts.append(await self._part.commit())
            self._part = None

    async def commit(self) -> Stored:
        if self._upload is None:
            stored = await self._storage._put_small(self._key, bytes(self._held))
        else:
            if self._part is not None:
                self._parts.append(await self._part.commit())
                self._part = None
            stored = await self._storage.complete_parts(
                self._key, self._upload, self._parts, size=self.written
            )
        self._done = True
        return stored

    async def abort(self) -> None:
        if self._part is not None:
            self._part.abort()
        if self._upload is not None and not self._done:
            self._done = True
            await self._storage._give_up(self._key, self._upload)


async def open_s3(place: Place, installation: UUID, *, may_be_new: bool = True) -> S3Storage:
    """The storage of this installation in a bucket. Raises StorageRefused, Failure.

    A marker object names the installation that the bucket belongs to, as on a local disk. Writing
    it a second time tells whether the bucket keeps objects from being overwritten.
    """
    wire = Wire(place)
    try:
        return await _open(wire, installation, may_be_new=may_be_new)
    except Refusal as refusal:
        await wire.close()
        hint = {
            "NoSuchBucket": "There is no such bucket.",
            "SignatureDoesNotMatch": "The secret key is wrong.",
            "InvalidAccessKeyId": "The access key is not known there.",
            "AccessDenied": "The key may not read or write there.",
            "RequestTimeTooSkewed": "The clock of this machine is wrong.",
        }.get(refusal.code, "")
        raise StorageRefused(
            f"Bucket {place.bucket!r} cannot be used: {refusal}. {hint} "
            "`mediamill storage doctor` says more.".replace("  ", " ")
        ) from None
    except BaseException:
        await wire.close()
        raise


async def _open(wire: Wire, installation: UUID, *, may_be_new: bool) -> S3Storage:
    try:
        found = (await wire.send("GET", _MARKER)).text.strip()
    except Refusal as refusal:
        if refusal.code not in ("NoSuchKey", "") or refusal.status != 404:
            raise
        if not may_be_new:
            raise StorageRefused(
                f"Bucket {wire.place.bucket!r} lacks Mediamill's marker {_MARKER!r}, but the "
                f"database knows of objects. Is it the right bucket? To go on without them, write "
                f"{installation} into an object of that name."
            ) from None
        found = str(installation)
        await wire.send("PUT", _MARKER, content=f"{found}\n".encode())
    if found != str(installation):
        raise StorageRefused(
            f"Bucket {wire.place.bucket!r} belongs to installation {found}, the database to "
            f"{installation}. Point MEDIAMILL_S3_BUCKET and MEDIAMILL_DATABASE_URL to things that "
            "belong together."
        )
    abilities = Abilities(
        conditional_put=await keeps_objects(wire, _MARKER, f"{found}\n".encode()),
        versioned=await is_versioned(wire),
    )
    return S3Storage(wire, _store(wire), abilities)


async def keeps_objects(wire: Wire, key: str, content: bytes) -> bool:
    """Whether the bucket refuses to overwrite the object under `key`, which is there with this
    content."""
    try:
        await wire.send("PUT", key, headers={"If-None-Match": "*"}, content=content)
    except Refusal as refusal:
        if refusal.status in (409, 412):
            return True
        if refusal.status != 501:  # S3's way to say that it does not know a header
            raise
    return False


async def is_versioned(wire: Wire) -> bool:
    """Whether the bucket keeps, or once kept, what is overwritten or deleted."""
    try:
        answer = await wire.send("GET", "", query={"versioning": ""})
    except Refusal as refusal:
        if refusal.status in (400, 403, 404, 405, 501):  # not known there, or not ours to ask
            return False
        raise
    return _text(_xml(answer), "Status") in ("Enabled", "Suspended")


def _store(wire: Wire) -> S3Store:
    place = wire.place
    endpoint = place.endpoint or f"https://s3.{place.region}.amazonaws.com"
    if place.virtual_host:
        endpoint = wire.address("", public=False).rstrip("/")

    def current() -> Any:
        frozen = wire.credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(minutes=5),
        }

    return S3Store(
        place.bucket,
        endpoint=endpoint.rstrip("/"),
        region=place.region,
        virtual_hosted_style_request=place.virtual_host,
        credential_provider=current,
        client_options={
            "allow_http": endpoint.startswith("http:"),
            "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
            "read_timeout": timedelta(seconds=_IDLE_SECONDS),
            "timeout": timedelta(hours=6),
        },
        retry_config={
            "max_retries": _TRIES,
            "retry_timeout": timedelta(seconds=_RETRY_SECONDS),
        },
    )


def _credentials(place: Place) -> Credentials:
    if place.access_key_id is not None:
        return Credentials(place.access_key_id, place.secret_access_key, place.session_token)
    found = Session().get_credentials()
    if found is None:
        raise StorageRefused(
            "There are no credentials for the bucket: set MEDIAMILL_S3_ACCESS_KEY_ID and "
            "MEDIAMILL_S3_SECRET_ACCESS_KEY, or give this machine a role."
        )
    return found


def _part(upload: str, number: int) -> dict[str, str]:
    return {"partNumber": str(number), "uploadId": upload}


def _below(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}/")


def _stored(meta: Any) -> Stored:
    version = _version(meta["e_tag"], meta["version"])
    return Stored(meta["size"], version, meta["last_modified"])


def _version(etag: str | None, version: str | None) -> str:
    """What names these bytes: the ETag, and the version where the bucket keeps several."""
    named = etag or ""
    return named if version in (None, "", "null") else f"{named} {version}"


def _write_and_hash(file: Any, digest: Any, chunk: bytes) -> None:
    file.write(chunk)
    digest.update(chunk)


def _checked(answer: httpx.Response) -> httpx.Response:
    """The answer if it is a success. Raises Refusal, Failure.

    A copy and a completion may say 200 first and tell of their failure in the body.
    """
    failed = answer.status_code >= 400
    code = ""
    if failed or b"<Error>" in answer.content[:1000]:
        with suppress(ElementTree.ParseError):
            code = _text(ElementTree.fromstring(answer.content), "Code")  # noqa: S314  # from our storage
    if not failed and not code:
        return answer
    status = answer.status_code if failed else 500
    if code in ("AccessDenied", "NoSuchUpload", "NoSuchKey") or status < 500 or status == 501:
        raise Refusal(status, code)
    raise Failure(Code.STORAGE_UNAVAILABLE)


def _meant(refusal: Refusal, key: str) -> Exception:
    """What a refusal means for work."""
    if refusal.status in (409, 412) or refusal.code in _TAKEN:
        return AlreadyStored(key)
    if refusal.status == 404 and refusal.code != "NoSuchBucket":
        return Failure(Code.SOURCE_MISSING)
    if refusal.status in _DENIED:
        return Failure(Code.STORAGE_AUTH)
    if refusal.code in ("InvalidPart", "InvalidPartOrder", "EntityTooSmall"):
        return Failure(Code.SOURCE_CHANGED, "The storage does not have these parts.")
    return Failure(Code.STORAGE_UNAVAILABLE)


@contextmanager
def _translated() -> Iterator[None]:
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


async def _insisting(call: Callable[[], Awaitable[T]]) -> T:
    """The outcome of `call`, which is repeated while the storage does not answer."""
    for attempt in range(1, _TRIES):
        try:
            return await call()
        except Failure as failure:
            if failure.code is not Code.STORAGE_UNAVAILABLE:
                raise
        await asyncio.sleep(_PAUSE_SECONDS * 3 ** (attempt - 1))
    return await call()


def _xml(answer: httpx.Response) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(answer.content)  # noqa: S314  # from our own storage
    except ElementTree.ParseError as error:
        raise Failure(Code.STORAGE_UNAVAILABLE) from error


def _all(element: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [child for child in element if _plain(child.tag) == name]


def _text(element: ElementTree.Element, name: str) -> str:
    return next((child.text or "" for child in element if _plain(child.tag) == name), "")


def _plain(tag: str) -> str:
    return re.sub(r"^\{.*\}", "", tag)

"""Objects in a bucket of Google Cloud Storage. Signatures are google-cloud-storage's (V4).

The XML API joins parts without looking whether the key is taken. So parts are joined under
`parts/<key>/<nonce>`, and what they make is copied to its key on the condition that nothing is
there; within a bucket a copy moves no bytes.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote
from uuid import UUID
from xml.sax.saxutils import escape

import google.auth
import httpx2 as httpx
import obstore
from google.api_core.exceptions import GoogleAPICallError
from google.auth.exceptions import GoogleAuthError
from google.cloud.storage import Client
from google.oauth2 import service_account
from obstore.store import GCSStore

if TYPE_CHECKING:
    from obstore import GetOptions

from mediamill.config import Settings
from mediamill.failures import Code, Failure
from mediamill.storage import (
    AlreadyStored,
    Part,
    SignedForm,
    SignedRequest,
    StorageRefused,
    Stored,
    bucket,
    checked_key,
)
from mediamill.storage.bucket import (
    Bucket,
    Kept,
    Refusal,
    Spool,
    claim,
    client_options,
    disposition,
    every,
    meaning,
    named_version,
    parsed,
    retry_config,
    text,
    translated,
    unusable,
)

_JOINED: Final = "parts"
_ENDPOINT: Final = "https://storage.googleapis.com"
_NEW: Final = {"x-goog-if-generation-match": "0"}
_SCOPES: Final = ["https://www.googleapis.com/auth/devstorage.read_write"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a bucket is. `public_endpoint` is the address that clients use, if it is another."""

    bucket: str
    credentials_file: Path | None = None
    endpoint: str | None = None
    public_endpoint: str | None = None


def place(settings: Settings) -> Place:
    """The bucket that the settings name; config.py has checked that there is one."""
    assert settings.gcs_bucket is not None
    return Place(
        bucket=settings.gcs_bucket,
        credentials_file=settings.gcs_credentials_file,
        endpoint=settings.gcs_endpoint,
        public_endpoint=settings.gcs_public_endpoint,
    )


class Wire(bucket.Wire):
    """Requests to one bucket of the XML API."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self.client = Client(
            project="-",
            credentials=_credentials(place),
            client_options={"api_endpoint": place.endpoint or _ENDPOINT},
        )
        self._bucket = self.client.bucket(place.bucket)

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
        """V4 binds every header but the length, for which there is one of Google's own."""
        signed = self._bucket.blob(key) if key else self._bucket
        given = dict(headers or {})
        bound = {k: v for k, v in given.items() if k != "Content-Length"}
        url: str = signed.generate_signed_url(
            version="v4",
            expiration=expires_at,
            api_access_endpoint=self._base(public=public),
            method=method,
            headers=bound,
            query_parameters=dict(query or {}),
        )
        return SignedRequest(method, url, given, expires_at)

    def address(self, key: str, *, public: bool) -> str:
        whole = f"{self._base(public=public)}/{self.place.bucket}"
        return f"{whole}/{quote(key)}" if key else whole

    def _base(self, *, public: bool) -> str:
        place = self.place
        return (place.public_endpoint if public else None) or place.endpoint or _ENDPOINT


class GcsStorage(Bucket):
    """The storage in one bucket."""

    wire: Wire

    def _pinned(self, version: str) -> GetOptions:
        etag, _, generation = version.partition(" ")
        return {"version": generation} if generation else {"if_match": etag}

    async def _put_whole(self, key: str, data: bytes) -> Stored | None:
        answer = await self.wire.send_once("PUT", key, headers=_NEW, content=data)
        etag, generation = answer.headers.get("etag"), answer.headers.get("x-goog-generation")
        return Stored(len(data), named_version(etag, generation))

    async def copy(self, source: str, key: str) -> None:
        checked_key(source)
        checked_key(key)
        await self.refuse_taken(key)
        try:
            await self._copy(source, key)
        except Refusal as refusal:
            raise meaning(refusal, key) from refusal

    async def _copy(self, source: str, key: str) -> None:
        headers = {"x-goog-copy-source": quote(f"/{self.wire.place.bucket}/{source}"), **_NEW}
        await self.wire.send("PUT", key, headers=headers)

    async def _uploads(self, prefix: str) -> AsyncIterator[tuple[str, str, float]]:
        area = f"{_JOINED}/{prefix}" if prefix else _JOINED
        after: dict[str, str] = {}
        while True:
            page = parsed(await self._ask("GET", "", {"uploads": "", "prefix": area, **after}))
            for entry in every(page, "Upload"):
                key, nonce = _origin(text(entry, "Key"))
                if not prefix or bucket.below(key, prefix):
                    at = datetime.fromisoformat(text(entry, "Initiated")).timestamp()
                    yield key, f"{nonce}~{text(entry, 'UploadId')}", at
            if text(page, "IsTruncated") != "true":
                break
            after = {
                "key-marker": text(page, "NextKeyMarker"),
                "upload-id-marker": text(page, "NextUploadIdMarker"),
            }
        # What was joined, and cut off before it came to its key.
        with translated():
            async for batch in obstore.list(self._store, area, chunk_size=1000):
                for found in batch:
                    key, nonce = _origin(found["path"])
                    yield key, f"{nonce}~", found["last_modified"].timestamp()

    async def kept_after_deletion(self) -> Kept:
        told = await self._properties()
        days = (told.soft_delete_policy.retention_duration_seconds or 0) / 86400
        if days or told.versioning_enabled:
            kept = "old versions are" if told.versioning_enabled else "deleted objects are"
            return Kept(
                False,
                f"{kept} kept" + (f" for {days:g} days" if days else ""),
                f"gcloud storage buckets update gs://{self.wire.place.bucket} --clear-soft-delete "
                "--no-versioning: what is deleted here must be gone.",
            )
        return Kept(True, "none are kept")

    async def tidies_up(self) -> bool:
        rules = (await self._properties()).lifecycle_rules
        return any(r["action"]["type"] == "AbortIncompleteMultipartUpload" for r in rules)

    async def _properties(self) -> Any:
        """The bucket as the JSON API tells of it. Raises Refusal, Failure."""
        try:
            return await asyncio.to_thread(
                self.wire.client.get_bucket, self.wire.place.bucket, timeout=10.0, retry=None
            )
        except GoogleAPICallError as error:
            raise Refusal(int(error.code or 500), type(error).__name__) from error
        except (GoogleAuthError, OSError) as error:
            raise Failure(Code.STORAGE_UNAVAILABLE) from error

    def cors_rule(self, origin: str, headers: Sequence[str]) -> str:
        rule = {
            "origin": [origin],
            "method": ["GET", "HEAD", "PUT", "POST"],
            "responseHeader": ["ETag", *headers],
            "maxAgeSeconds": 7200,
        }
        return json.dumps([rule])

    # Objects in parts.

    async def begin_parts(self, key: str, *, content_type: str) -> str:
        nonce = secrets.token_hex(8)
        joined = f"{_JOINED}/{checked_key(key)}/{nonce}"
        headers = {"Content-Type": content_type}
        answer = await self._ask("POST", joined, {"uploads": ""}, headers)
        return f"{nonce}~{text(parsed(answer), 'UploadId')}"

    async def _put_part(self, key: str, upload: str, number: int, size: int, body: Spool) -> Part:
        joined, query = _part(key, upload, number)
        headers = {"Content-Length": str(size)}
        answer = await self.wire.send_once(
            "PUT", joined, query=query, headers=headers, content=body.chunks()
        )
        return Part(number, size, answer.headers["etag"])

    async def list_parts(self, key: str, upload: str) -> Sequence[Part]:
        joined, name = _names(checked_key(key), upload)
        parts: list[Part] = []
        after = ""
        while True:
            query = {"uploadId": name, **({"part-number-marker": after} if after else {})}
            page = parsed(await self._ask("GET", joined, query))
            parts += [
                Part(int(text(e, "PartNumber")), int(text(e, "Size")), text(e, "ETag"))
                for e in every(page, "Part")
            ]
            if text(page, "IsTruncated") != "true":
                return parts
            after = text(page, "NextPartNumberMarker")

    async def complete_parts(
        self, key: str, upload: str, parts: Sequence[Part], *, size: int
    ) -> Stored:
        joined, name = _names(checked_key(key), upload)
        listed = "".join(
            f"<Part><PartNumber>{part.number}</PartNumber><ETag>{escape(part.etag)}</ETag></Part>"
            for part in sorted(parts, key=lambda part: part.number)
        )
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        try:
            await self.wire.send("POST", joined, query={"uploadId": name}, content=body)
        except Refusal as refusal:
            if refusal.status != 404 or await self.stat(joined) is None:
                # Its answer may have been lost before: then the object is there, and no upload.
                stored = await self.stat(key) if refusal.status == 404 else None
                if stored is None or stored.size != size:
                    raise meaning(refusal, key) from refusal
                return stored
        try:
            await self._copy(joined, key)
        except Refusal as refusal:
            meant = meaning(refusal, key)
            if not isinstance(meant, AlreadyStored) or not await self._same(joined, key):
                raise meant from refusal
        await self._remove(joined)
        stored = await self.there(key)
        if stored.size != size:
            raise Failure(Code.SIZE_MISMATCH)
        return stored

    async def _same(self, one: str, other: str) -> bool:
        """Whether two objects have the same bytes, by their size and checksum."""
        seen = [(await self.wire.send("HEAD", key)).headers for key in (one, other)]
        first, second = [(h.get("content-length"), h.get("x-goog-hash")) for h in seen]
        return first == second

    async def abort_parts(self, key: str, upload: str) -> None:
        joined, name = _names(checked_key(key), upload)
        if name:
            await self._remove(joined, query={"uploadId": name})
        await self._remove(joined)

    async def _ask(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        try:
            return await self.wire.send(method, key, query=query, headers=headers)
        except Refusal as refusal:
            raise meaning(refusal, key) from refusal

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
        headers = {
            "Content-Type": content_type,
            "Content-Length": str(size),
            "x-goog-content-length-range": f"{size},{size}",
            **_NEW,
        }
        return self.wire.sign("PUT", checked_key(key), expires_at=expires_at, headers=headers)

    def form(
        self, key: str, *, content_type: str, most: int, expires_at: datetime, public: bool = True
    ) -> SignedForm:
        wire = self.wire
        signed = wire.client.generate_signed_post_policy_v4(
            wire.place.bucket,
            key,
            expires_at,
            conditions=[["content-length-range", 1, most]],
            fields={"Content-Type": content_type},
        )
        return SignedForm(f"{wire.address('', public=public)}/", signed["fields"], expires_at)

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
            query["response-content-disposition"] = disposition(filename)
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
        joined, query = _part(checked_key(key), upload, number)
        headers = {} if size is None else {"Content-Length": str(size)}
        return self.wire.sign("PUT", joined, expires_at=expires_at, query=query, headers=headers)


async def unopened(place: Place) -> GcsStorage:
    """A bucket that need not belong to anybody, for its inspection. Raises StorageRefused."""
    return GcsStorage(Wire(place), _store(place))


async def open_gcs(place: Place, installation: UUID, *, may_be_new: bool = True) -> GcsStorage:
    """The storage of this installation in a bucket. Raises StorageRefused, Failure."""
    wire = Wire(place)
    try:
        await claim(wire, place.bucket, installation, may_be_new=may_be_new)
    except Refusal as refusal:
        await wire.close()
        raise unusable(place.bucket, refusal) from None
    except BaseException:
        await wire.close()
        raise
    return GcsStorage(wire, _store(place))


def _store(place: Place) -> GCSStore:
    endpoint = place.endpoint or _ENDPOINT
    given: dict[str, Any] = {}
    if place.credentials_file is not None:
        given["service_account"] = str(place.credentials_file)
    return GCSStore(
        place.bucket,
        base_url=endpoint,
        client_options=client_options(endpoint),
        retry_config=retry_config(),
        **given,
    )


def _credentials(place: Place) -> Any:
    """Credentials that can sign. Raises StorageRefused."""
    try:
        if place.credentials_file is None:
            found, _ = google.auth.default(scopes=_SCOPES)
        else:
            found = service_account.Credentials.from_service_account_file(  # type: ignore[no-untyped-call]
                str(place.credentials_file), scopes=_SCOPES
            )
    except (GoogleAuthError, OSError, ValueError) as error:
        raise StorageRefused(f"There are no credentials for the bucket: {error}") from None
    if not hasattr(found, "sign_bytes"):
        raise StorageRefused(
            "The credentials for the bucket cannot sign: set MEDIAMILL_GCS_CREDENTIALS_FILE to the "
            "key file of a service account."
        )
    return found


def _origin(joined: str) -> tuple[str, str]:
    """The key and the nonce of parts/<key>/<nonce>."""
    key, _, nonce = joined.removeprefix(f"{_JOINED}/").rpartition("/")
    return key, nonce


def _names(key: str, upload: str) -> tuple[str, str]:
    """Where parts are joined, and the vendor's name for it."""
    nonce, _, name = upload.partition("~")
    return f"{_JOINED}/{key}/{nonce}", name


def _part(key: str, upload: str, number: int) -> tuple[str, dict[str, str]]:
    joined, name = _names(key, upload)
    return joined, {"partNumber": str(number), "uploadId": name}

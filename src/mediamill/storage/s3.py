"""Objects in a bucket that speaks S3: data through obstore, the rest by requests that we sign.

Signatures are botocore's. What a bucket enforces is found out when it is opened, not guessed from
its vendor's name.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode, urlsplit
from uuid import UUID
from xml.sax.saxutils import escape

import httpx2 as httpx
import obstore
from botocore.auth import S3SigV4PostAuth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.session import Session
from obstore.store import S3Store

if TYPE_CHECKING:
    from obstore import GetOptions

from mediamill.config import Settings
from mediamill.failures import Code, Failure
from mediamill.storage import (
    MARKER,
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
    BINARY,
    TAKEN,
    Bucket,
    Kept,
    Refusal,
    Spool,
    below,
    claim,
    client_options,
    disposition,
    every,
    meaning,
    named_version,
    parsed,
    retry_config,
    text,
    unusable,
)

_COPY_BYTES: Final = 5 << 30  # the most that one copy request takes
_COPY_PART_BYTES: Final = 1 << 30
_NOT_THERE: Final = frozenset({400, 403, 404, 405, 501})  # not known there, or not ours to ask


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


class Wire(bucket.Wire):
    """Requests to one bucket, signed by botocore."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self.credentials = _credentials(place)

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


class S3Storage(Bucket):
    """The storage in one bucket."""

    wire: Wire

    def __init__(self, wire: Wire, store: S3Store, abilities: Abilities) -> None:
        super().__init__(wire, store)
        self.abilities = abilities

    def _pinned(self, version: str) -> GetOptions:
        etag, _, object_version = version.partition(" ")
        options: GetOptions = {"if_match": etag}
        if object_version:
            options["version"] = object_version
        return options

    async def _put_whole(self, key: str, data: bytes) -> Stored | None:
        headers = {"If-None-Match": "*"} if self.abilities.conditional_put else {}
        if not headers:
            await self.refuse_taken(key)
        answer = await self.wire.send_once("PUT", key, headers=headers, content=data)
        etag, version = answer.headers.get("etag"), answer.headers.get("x-amz-version-id")
        return None if etag is None else Stored(len(data), named_version(etag, version))

    async def _put_part(self, key: str, upload: str, number: int, size: int, body: Spool) -> Part:
        answer = await self.wire.send_once(
            "PUT",
            key,
            query=_part(upload, number),
            headers={"Content-Length": str(size)},
            content=body.chunks(),
        )
        return Part(number, size, answer.headers["etag"])

    async def copy(self, source: str, key: str) -> None:
        checked_key(source)
        checked_key(key)
        await self.refuse_taken(key)
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
            raise meaning(refusal, key) from refusal

    async def _copy_large(self, headers: dict[str, str], key: str, size: int) -> None:
        upload = await self.begin_parts(key, content_type=BINARY)
        try:
            parts = []
            for number, offset in enumerate(range(0, size, _COPY_PART_BYTES), start=1):
                end = min(offset + _COPY_PART_BYTES, size)
                span = {"x-amz-copy-source-range": f"bytes={offset}-{end - 1}"}
                answer = await self.wire.send(
                    "PUT", key, query=_part(upload, number), headers={**headers, **span}
                )
                parts.append(Part(number, end - offset, text(parsed(answer), "ETag")))
            await self.complete_parts(key, upload, parts, size=size)
        except Refusal as refusal:
            await self.give_up(key, upload)
            raise meaning(refusal, key) from refusal
        except BaseException:
            await self.give_up(key, upload)
            raise

    async def _delete_objects(self, prefix: str) -> int:
        if self.abilities.versioned:
            return await self._delete_versions(prefix)
        return await super()._delete_objects(prefix)

    async def _delete_keys(self, keys: list[str]) -> int:
        await obstore.delete_async(self._store, keys if len(keys) > 1 else keys[0])
        return len(keys)

    async def take_back(self, key: str) -> None:
        if self.abilities.versioned:
            await self._delete_versions(key)
        else:
            await super().take_back(key)

    async def kept_after_deletion(self) -> Kept:
        kept = await is_versioned(self.wire)
        if kept:
            return Kept(None, "old versions are kept; deletions remove them too")
        return Kept(True, "none are kept")

    async def tidies_up(self) -> bool:
        try:
            rules = (await self.wire.send("GET", "", query={"lifecycle": ""})).text
        except Refusal as refusal:
            if refusal.status in _NOT_THERE:
                return False
            raise
        return "AbortIncompleteMultipartUpload" in rules

    def cors_rule(self, origin: str, headers: Sequence[str]) -> str:
        rule = {
            "AllowedOrigins": [origin],
            "AllowedMethods": ["GET", "HEAD", "PUT", "POST"],
            "AllowedHeaders": [*headers, "x-amz-*"],
            "ExposeHeaders": ["ETag"],
            "MaxAgeSeconds": 7200,
        }
        return json.dumps({"CORSRules": [rule]})

    async def _delete_versions(self, prefix: str) -> int:
        """Also the versions that a plain deletion leaves; returns how many objects were live."""
        live = 0
        after: dict[str, str] = {}
        while True:
            page = parsed(
                await self._send("GET", "", query={"versions": "", "prefix": prefix, **after})
            )
            for entry in [*every(page, "Version"), *every(page, "DeleteMarker")]:
                key = text(entry, "Key")
                if not below(key, prefix):
                    continue
                await self._send("DELETE", key, query={"versionId": text(entry, "VersionId")})
                is_version = entry.tag.endswith("Version")
                live += is_version and text(entry, "IsLatest") == "true"
            if text(page, "IsTruncated") != "true":
                return live
            after = {
                "key-marker": text(page, "NextKeyMarker"),
                "version-id-marker": text(page, "NextVersionIdMarker"),
            }

    async def _uploads(self, prefix: str) -> AsyncIterator[tuple[str, str, float]]:
        """The objects in parts below a prefix: key, name, and when each began (Unix seconds)."""
        after: dict[str, str] = {}
        while True:
            page = parsed(
                await self._send("GET", "", query={"uploads": "", "prefix": prefix, **after})
            )
            for entry in every(page, "Upload"):
                began = text(entry, "Initiated")
                at = datetime.fromisoformat(began).timestamp() if began else 0.0
                key = text(entry, "Key")
                if not prefix or below(key, prefix):
                    yield key, text(entry, "UploadId"), at
            if text(page, "IsTruncated") != "true":
                return
            after = {
                "key-marker": text(page, "NextKeyMarker"),
                "upload-id-marker": text(page, "NextUploadIdMarker"),
            }

    # Objects in parts.

    async def begin_parts(self, key: str, *, content_type: str) -> str:
        checked_key(key)
        answer = await self._send(
            "POST", key, query={"uploads": ""}, headers={"Content-Type": content_type}
        )
        return text(parsed(answer), "UploadId")

    async def list_parts(self, key: str, upload: str) -> Sequence[Part]:
        checked_key(key)
        parts: list[Part] = []
        after = ""
        while True:
            query = {"uploadId": upload, **({"part-number-marker": after} if after else {})}
            page = parsed(await self._send("GET", key, query=query))
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
            if refusal.code in TAKEN and stored is not None:
                if await self._begun(key, upload):
                    raise AlreadyStored(key) from None
                return stored
            if stored is None or stored.size != size:
                raise meaning(refusal, key) from refusal
            return stored
        stored = await self.there(key)
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
                raise meaning(refusal, key) from refusal

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
            raise meaning(refusal, key) from refusal

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

    def form(
        self, key: str, *, content_type: str, most: int, expires_at: datetime, public: bool = True
    ) -> SignedForm:
        place = self.wire.place
        request = AWSRequest(method="POST", url=self.wire.address("", public=public))
        request.context["s3-presign-post-fields"] = {}
        request.context["s3-presign-post-policy"] = {
            "expiration": expires_at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "conditions": [
                {"bucket": place.bucket},
                {"key": key},
                {"Content-Type": content_type},
                ["content-length-range", 1, most],
            ],
        }
        frozen = self.wire.credentials.get_frozen_credentials()
        S3SigV4PostAuth(frozen, "s3", place.region).add_auth(request)
        signed = request.context["s3-presign-post-fields"]
        fields = {"key": key, "Content-Type": content_type, **signed}
        return SignedForm(request.url, fields, expires_at)

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
        return self.wire.sign(
            "PUT",
            checked_key(key),
            expires_at=expires_at,
            query=_part(upload, number),
            headers={} if size is None else {"Content-Length": str(size)},
        )


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
        raise unusable(place.bucket, refusal) from None
    except BaseException:
        await wire.close()
        raise


async def unopened(place: Place) -> S3Storage:
    """A bucket that need not belong to anybody, for its inspection. Raises StorageRefused."""
    wire = Wire(place)
    versioned = False
    with suppress(Refusal, Failure):  # the inspection says why
        versioned = await is_versioned(wire)
    return S3Storage(wire, data_plane(wire), Abilities(conditional_put=True, versioned=versioned))


async def _open(wire: Wire, installation: UUID, *, may_be_new: bool) -> S3Storage:
    content = await claim(wire, wire.place.bucket, installation, may_be_new=may_be_new)
    abilities = Abilities(
        conditional_put=await keeps_objects(wire, MARKER, content),
        versioned=await is_versioned(wire),
    )
    return S3Storage(wire, data_plane(wire), abilities)


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
        if refusal.status in _NOT_THERE:
            return False
        raise
    return text(parsed(answer), "Status") in ("Enabled", "Suspended")


def data_plane(wire: Wire) -> S3Store:
    """How objects of this bucket are read and listed."""
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
        client_options=client_options(endpoint),
        retry_config=retry_config(),
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

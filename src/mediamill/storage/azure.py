"""Objects in a container of Azure Blob Storage. Signatures are azure-storage-blob's.

A signed address binds the object and what may be done with it, and neither type nor length: those
are looked at when an original is accepted. An object in parts is a blob with blocks that are not
committed; since Azure knows no name for it, an object below `parts/` says that it was begun.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode
from uuid import UUID

import httpx2 as httpx
import obstore
from azure.storage.blob import (
    AccountSasPermissions,
    BlobSasPermissions,
    ContainerSasPermissions,
    ResourceTypes,
    generate_account_sas,
    generate_blob_sas,
    generate_container_sas,
)
from obstore.store import AzureStore

if TYPE_CHECKING:
    from obstore import GetOptions

from mediamill.config import Settings
from mediamill.failures import Code, Failure
from mediamill.storage import (
    AlreadyStored,
    Part,
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
    parsed,
    retry_config,
    text,
    translated,
    unusable,
)

_BEGUN: Final = "parts"  # parts/<key>/<upload> stands for an object in parts
_SIGNED_NONCE: Final = "0" * 16  # of blocks that clients store; ours have one each
_ASK_LIFE: Final = timedelta(minutes=10)
_COPY_LIFE: Final = timedelta(hours=24)
_COPY_LOOK_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Place:
    """Where a container is. `public_endpoint` is the address that clients use, if another."""

    container: str
    account: str
    account_key: str
    endpoint: str | None = None
    public_endpoint: str | None = None

    def base(self, *, public: bool) -> str:
        given = (self.public_endpoint if public else None) or self.endpoint
        return (given or f"https://{self.account}.blob.core.windows.net").rstrip("/")


def place(settings: Settings) -> Place:
    """The container that the settings name; config.py has checked that there is one."""
    assert settings.azure_container is not None
    assert settings.azure_account is not None
    assert settings.azure_account_key is not None
    return Place(
        container=settings.azure_container,
        account=settings.azure_account,
        account_key=settings.azure_account_key,
        endpoint=settings.azure_endpoint,
        public_endpoint=settings.azure_public_endpoint,
    )


class Wire(bucket.Wire):
    """Requests to one container, with signatures that grant as little as will do."""

    object_headers: Mapping[str, str] = {"x-ms-blob-type": "BlockBlob"}
    list_query: Mapping[str, str] = {
        "restype": "container",
        "comp": "list",
        "maxresults": "1",
    }
    unbound = frozenset({"exact length", "exact type"})

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        with suppress(binascii.Error):
            if base64.b64decode(place.account_key, validate=True):
                return
        raise StorageRefused("MEDIAMILL_AZURE_ACCOUNT_KEY is not the key of an account (base64).")

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
        """Clients may read with a GET, and with a PUT make what is not there yet."""
        grants = ("r" if method == "GET" else "c") if public else "rcwd"
        return self.grant(
            method, key, grants, expires_at=expires_at, query=query, headers=headers, public=public
        )

    def grant(
        self,
        method: str,
        key: str,
        grants: str,
        *,
        expires_at: datetime,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        public: bool = True,
        shown: Mapping[str, str] | None = None,
    ) -> SignedRequest:
        """A request with these permissions (r, c, w, d). `shown` are headers of the answer."""
        place = self.place
        address = self.address(key, public=public)
        more: dict[str, Any] = {"expiry": expires_at, **(shown or {})}
        if address.startswith("https:"):
            more["protocol"] = "https"
        if key:
            permission = BlobSasPermissions.from_string(grants)
            token = generate_blob_sas(
                place.account,
                place.container,
                key,
                account_key=place.account_key,
                permission=permission,
                **more,
            )
        else:
            token = generate_container_sas(
                place.account,
                place.container,
                account_key=place.account_key,
                permission=ContainerSasPermissions.from_string("rl"),
                **more,
            )
        asked = f"{urlencode(query, quote_via=quote)}&" if query else ""
        return SignedRequest(method, f"{address}?{asked}{token}", dict(headers or {}), expires_at)

    async def ask(self, path: str) -> httpx.Response:
        """Ask for what belongs to the account. Raises Refusal, Failure."""
        return await self.send_as_is("GET", f"{self.place.base(public=False)}{path}")

    def address(self, key: str, *, public: bool) -> str:
        whole = f"{self.place.base(public=public)}/{self.place.container}"
        return f"{whole}/{quote(key)}" if key else whole


class AzureStorage(Bucket):
    """The storage in one container."""

    wire: Wire

    def _pinned(self, version: str) -> GetOptions:
        return {"if_match": version}

    async def _put_whole(self, key: str, data: bytes) -> Stored | None:
        headers = {**self.wire.object_headers, "If-None-Match": "*"}
        answer = await self.wire.send_once("PUT", key, headers=headers, content=data)
        return Stored(len(data), answer.headers["etag"])

    async def copy(self, source: str, key: str) -> None:
        checked_key(source)
        checked_key(key)
        await self.refuse_taken(key)
        if await self.stat(source) is None:
            raise Failure(Code.SOURCE_MISSING)
        expires_at = datetime.now(UTC) + _COPY_LIFE
        read = self.wire.grant("GET", source, "r", expires_at=expires_at, public=False)
        headers = {"x-ms-copy-source": read.url, "If-None-Match": "*"}
        try:
            answer = await self.wire.send("PUT", key, headers=headers)
            while answer.headers.get("x-ms-copy-status") == "pending":
                await asyncio.sleep(_COPY_LOOK_SECONDS)
                answer = await self.wire.send("HEAD", key)
        except Refusal as refusal:
            raise meaning(refusal, key) from refusal
        if answer.headers.get("x-ms-copy-status", "success") != "success":
            await self._delete_keys([key])
            raise Failure(Code.STORAGE_UNAVAILABLE, "The storage gave a copy up.")

    async def _remove(
        self,
        key: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bool:
        given = {"x-ms-delete-snapshots": "include", **(headers or {})}
        return await super()._remove(key, query=query, headers=given)

    async def _uploads(self, prefix: str) -> AsyncIterator[tuple[str, str, float]]:
        area = f"{_BEGUN}/{prefix}" if prefix else _BEGUN
        with translated():
            async for batch in obstore.list(self._store, area, chunk_size=1000):
                for entry in batch:
                    key, _, upload = entry["path"].removeprefix(f"{_BEGUN}/").rpartition("/")
                    yield key, upload, entry["last_modified"].timestamp()

    async def kept_after_deletion(self) -> Kept:
        place = self.wire.place
        token = generate_account_sas(
            place.account,
            place.account_key,
            resource_types=ResourceTypes(service=True),
            permission=AccountSasPermissions(read=True),
            expiry=datetime.now(UTC) + _ASK_LIFE,
        )
        page = parsed(await self.wire.ask(f"/?restype=service&comp=properties&{token}"))
        for policy in every(page, "DeleteRetentionPolicy"):
            if text(policy, "Enabled") == "true":
                days = text(policy, "Days") or "?"
                return Kept(
                    False,
                    f"deleted blobs are kept for {days} days",
                    "Switch soft delete of blobs off: what is deleted here must be gone.",
                )
        return Kept(
            None,
            "deleted blobs are not kept; whether old versions are, is not told",
            "See to it that versioning of blobs is off.",
        )

    async def tidies_up(self) -> bool:
        return True  # Azure drops blocks that nobody committed after a week

    def cors_rule(self, origin: str, headers: Sequence[str]) -> str:
        return (
            f"az storage cors add --services b --methods GET HEAD PUT --origins {origin} "
            f"--allowed-headers '{','.join(headers)}' --exposed-headers ETag --max-age 7200 "
            f"--account-name {self.wire.place.account}"
        )

    # Objects in parts.

    async def begin_parts(self, key: str, *, content_type: str) -> str:
        upload = secrets.token_hex(8)
        await self.put_small(_sign_of(checked_key(key), upload), content_type.encode())
        return upload

    async def _put_part(self, key: str, upload: str, number: int, size: int, body: Spool) -> Part:
        await self._type_of(key, upload)
        await self.wire.send_once(
            "PUT",
            key,
            query={"comp": "block", "blockid": _block(upload, number, body.nonce)},
            headers={"Content-Length": str(size)},
            content=body.chunks(),
        )
        return Part(number, size, f'"{body.nonce}"')

    async def list_parts(self, key: str, upload: str) -> Sequence[Part]:
        await self._type_of(checked_key(key), upload)
        blocks = await self._blocks(key, "uncommitted")
        return sorted(
            (
                Part(int(number), size, f'"{nonce}"')
                for (name, number, nonce), size in blocks
                if name == upload
            ),
            key=lambda part: part.number,
        )

    async def complete_parts(
        self, key: str, upload: str, parts: Sequence[Part], *, size: int
    ) -> Stored:
        checked_key(key)
        try:
            content_type = await self._type_of(key, upload)
        except Failure as failure:
            # Its answer may have been lost before: then the object is there, and no upload.
            stored = await self.stat(key) if failure.code is Code.SOURCE_MISSING else None
            if stored is None or stored.size != size:
                raise
            return stored
        blocks = [
            _block(upload, part.number, part.etag.strip('"'))
            for part in sorted(parts, key=lambda part: part.number)
        ]
        try:
            await self._commit(key, blocks, content_type)
        except Refusal as refusal:
            if await self.stat(key) is None:
                raise meaning(refusal, key) from refusal
            committed = await self._blocks(key, "committed")
            if not any(name == upload for (name, *_), _ in committed):
                raise AlreadyStored(key) from None
        stored = await self.there(key)
        await self._remove(_sign_of(key, upload))
        if stored.size != size:
            raise Failure(Code.SIZE_MISMATCH)
        return stored

    async def abort_parts(self, key: str, upload: str) -> None:
        # Blocks that are not committed go with the next commit, here of none of them.
        if await self.stat(_sign_of(checked_key(key), upload)) is None:
            return
        if await self.stat(key) is None and await self._blocks(key, "uncommitted"):
            try:
                answer = await self._commit(key, [], "")
            except Refusal as refusal:
                meant = meaning(refusal, key)
                if not isinstance(meant, AlreadyStored):
                    raise meant from refusal
            else:
                await self._remove(key, headers={"If-Match": answer.headers["etag"]})
        await self._remove(_sign_of(key, upload))

    async def _commit(self, key: str, blocks: Sequence[str], content_type: str) -> httpx.Response:
        """Make a blob of these blocks, if there is none."""
        listed = "".join(f"<Latest>{block}</Latest>" for block in blocks)
        headers = {"If-None-Match": "*"}
        if content_type:
            headers["x-ms-blob-content-type"] = content_type
        return await self.wire.send(
            "PUT",
            key,
            query={"comp": "blocklist"},
            headers=headers,
            content=f"<BlockList>{listed}</BlockList>".encode(),
        )

    async def _type_of(self, key: str, upload: str) -> str:
        """The type of an object in parts. Raises Failure(SOURCE_MISSING) if it is not begun, or is
        complete."""
        try:
            return (await self.wire.send("GET", _sign_of(key, upload))).text
        except Refusal as refusal:
            raise meaning(refusal, key) from refusal

    async def _blocks(self, key: str, kind: str) -> list[tuple[list[str], int]]:
        """The blocks of a blob, each as its upload, number and nonce, with its bytes."""
        query = {"comp": "blocklist", "blocklisttype": kind}
        try:
            page = parsed(await self.wire.send("GET", key, query=query))
        except Refusal as refusal:
            if refusal.code == "BlobNotFound":
                return []
            raise meaning(refusal, key) from refusal
        found = []
        for blocks in page:
            for block in every(blocks, "Block"):
                with suppress(ValueError):  # not ours
                    name = base64.b64decode(text(block, "Name")).decode().split(".")
                    if len(name) == 3:
                        found.append((name, int(text(block, "Size"))))
        return found

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
            **self.wire.object_headers,
            "Content-Type": content_type,
            "Content-Length": str(size),
            "If-None-Match": "*",
        }
        return self.wire.sign("PUT", checked_key(key), expires_at=expires_at, headers=headers)

    def sign_get(
        self,
        key: str,
        *,
        expires_at: datetime,
        content_type: str | None = None,
        filename: str | None = None,
    ) -> SignedRequest:
        shown = {"cache_control": "private, max-age=31536000, immutable"}
        if content_type is not None:
            shown["content_type"] = content_type
        if filename is not None:
            shown["content_disposition"] = disposition(filename)
        return self.wire.grant("GET", checked_key(key), "r", expires_at=expires_at, shown=shown)

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
        return self.wire.grant(
            "PUT",
            checked_key(key),
            "w",
            expires_at=expires_at,
            query={"comp": "block", "blockid": _block(upload, number, _SIGNED_NONCE)},
            headers={} if size is None else {"Content-Length": str(size)},
        )


async def unopened(place: Place) -> AzureStorage:
    """A container that need not belong to anybody, for its inspection. Raises StorageRefused."""
    return AzureStorage(Wire(place), _data_plane(place))


async def open_azure(place: Place, installation: UUID, *, may_be_new: bool = True) -> AzureStorage:
    """The storage of this installation in a container. Raises StorageRefused, Failure."""
    wire = Wire(place)
    try:
        await claim(wire, place.container, installation, may_be_new=may_be_new)
    except Refusal as refusal:
        await wire.close()
        raise unusable(place.container, refusal) from None
    except BaseException:
        await wire.close()
        raise
    return AzureStorage(wire, _data_plane(place))


def _data_plane(place: Place) -> AzureStore:
    endpoint = place.base(public=False)
    return AzureStore(
        place.container,
        account_name=place.account,
        account_key=place.account_key,
        endpoint=endpoint,
        client_options=client_options(endpoint),
        retry_config=retry_config(),
    )


def _sign_of(key: str, upload: str) -> str:
    return f"{_BEGUN}/{key}/{upload}"


def _block(upload: str, number: int, nonce: str) -> str:
    """A block's name; all of one blob must be of the same length."""
    return base64.b64encode(f"{upload}.{number:05}.{nonce}".encode()).decode()

"""/storage: the local storage, played towards clients as an object store would.

A signed address is the only way in or out. What is served has the type and hash of the manifest,
never what the disk or the uploader says.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    MalformedRangeHeader,
    RangeNotSatisfiable,
    Response,
)

from mediamill import db, failpoints, signing, storage, uploads, variants
from mediamill.api.services import services
from mediamill.failures import Code, Failure, Refused
from mediamill.storage import AlreadyStored, PartReceiver, Receiver
from mediamill.storage.local import LocalStorage

_WRITE_BYTES: Final = 1 << 20
# What is served cannot run script, frame, or sniff its way into another type.
_SAFE_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Cross-Origin-Resource-Policy": "cross-origin",
    "Referrer-Policy": "no-referrer",
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Expose-Headers": "ETag, Content-Range, Accept-Ranges",
}


async def put_object(request: Request) -> Response:
    """Take in one object: the exact key, type and length that were signed, once."""
    here = services(request)
    key = request.path_params["key"]
    length = request.headers.get("content-length")
    if length is None:
        raise Refused(Code.LENGTH_REQUIRED)
    size = int(length) if length.isascii() and length.isdigit() and len(length) < 17 else -1
    content_type = request.headers.get("content-type", "")
    store = _local(request)
    if "upload" in request.query_params:
        return await _put_part(request, store, key, size)
    _verify(request, signing.Grant("PUT", key, _expires(request), content_type, size))
    if not key.startswith(f"{storage.UPLOADS}/"):
        raise Refused(Code.NOT_FOUND)
    try:
        receiver = await store.receive(key)
    except AlreadyStored:
        raise Refused(Code.ALREADY_WRITTEN) from None
    try:
        await _take_in(request, receiver, size)
        failpoints.hit("api.put")
        stored = await receiver.commit()
    except AlreadyStored:
        raise Refused(Code.ALREADY_WRITTEN) from None
    finally:
        await receiver.abort()
    # A signed address outlives its media. Asked only now: a deletion from here on finds the object.
    with suppress(db.Unavailable):
        async with db.acquire(here.pool) as connection:
            wanted = await uploads.wanted_still(connection, key)
        if not wanted:
            await store.delete(key)
            raise Refused(Code.GONE, "It was deleted, or its slot expired, before the bytes came.")
    headers = {
        "ETag": f'"{stored.version}"',
        "Access-Control-Allow-Origin": "*",
        "Access-Control-Expose-Headers": "ETag",
    }
    return Response(status_code=200, headers=headers)


async def _put_part(request: Request, store: LocalStorage, key: str, size: int) -> Response:
    """Take in one part of exactly the length that was signed; sent again, it replaces the first."""
    query = request.query_params
    number, offset = _number(query.get("part")), _number(query.get("offset"))
    part: tuple[str | int, ...] = (query["upload"], number, offset)
    signed_size: int | None = size
    if "most" in query:  # the length was not known when it was signed
        part, signed_size = (*part, _number(query["most"])), None
    _verify(request, signing.Grant("PUT", key, _expires(request), size=signed_size, part=part))
    if "most" in query and not 0 <= size <= _number(query["most"]):
        raise Refused(Code.SIGNATURE_INVALID, "More bytes come than were signed for.")
    try:
        receiver = await store.open_part(key, query["upload"], number, offset=offset)
        try:
            await _take_in(request, receiver, size)
            stored = await receiver.commit()
        finally:
            receiver.abort()
    except Failure as failure:
        if failure.code is Code.SOURCE_MISSING:
            raise Refused(Code.GONE, "The upload is complete, or was given up.") from None
        raise
    headers = {
        "ETag": stored.etag,
        "Access-Control-Allow-Origin": "*",
        "Access-Control-Expose-Headers": "ETag",
    }
    return Response(status_code=200, headers=headers)


async def _take_in(request: Request, receiver: Receiver | PartReceiver, size: int) -> None:
    """Write the body, which must have exactly this size. Raises Refused."""
    buffer = bytearray()
    async for chunk in request.stream():
        buffer += chunk
        if receiver.written + len(buffer) > size:
            raise Refused(Code.SIGNATURE_INVALID, "More bytes came than were announced.")
        if len(buffer) >= _WRITE_BYTES:
            await receiver.write(bytes(buffer))
            buffer.clear()
    await receiver.write(bytes(buffer))
    if receiver.written != size:
        raise Refused(Code.MALFORMED_REQUEST, "The upload ended before its announced length.")


def _local(request: Request) -> LocalStorage:
    """The local storage; with another one there is nothing under these addresses."""
    store = services(request).storage
    if not isinstance(store, LocalStorage):
        raise Refused(Code.NOT_FOUND)
    return store


async def get_object(request: Request) -> Response:
    """Serve one published object, with Range, to the holder of a signed address."""
    here, store = services(request), _local(request)
    key = request.path_params["key"]
    _verify(request, signing.Grant("GET", key, _expires(request)))
    if not key.startswith(f"{storage.MEDIA}/"):
        raise Refused(Code.NOT_FOUND)
    async with db.acquire(here.pool) as connection:
        row = await variants.by_key(connection, key)
    path = store.path(key)
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        row = None
    if row is None:
        raise Refused(Code.NOT_FOUND)
    etag = f'"{row["sha256"]}"'
    name = row["name"].rpartition("/")[2]
    headers = {
        **_SAFE_HEADERS,
        "ETag": etag,
        # The key names the content, so a copy never goes stale; but only the holder may keep it.
        "Cache-Control": "private, max-age=31536000, immutable",
        # Our names are ASCII; RFC 8187's form is for what else a name may hold one day.
        "Content-Disposition": (
            f"inline; filename=\"{name}\"; filename*=UTF-8''{quote(name, safe='')}"
        ),
    }
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    _check_range(request, stat.st_size)
    return FileResponse(path, 200, headers, row["content_type"], stat_result=stat)


def _check_range(request: Request, size: int) -> None:
    """A Range that the object does not have is our problem document; a malformed one does not count
    (RFC 9110 §14.2)."""
    header = request.headers.get("range")
    if header is None:
        return
    try:
        FileResponse._parse_range_header(header, size)
    except RangeNotSatisfiable:
        raise Refused(
            Code.RANGE_NOT_SATISFIABLE, headers={"Content-Range": f"bytes */{size}"}
        ) from None
    except MalformedRangeHeader:
        request.scope["headers"] = [
            (name, value) for name, value in request.scope["headers"] if name != b"range"
        ]


async def preflight(request: Request) -> Response:
    """Browsers ask before they PUT from another origin; the signature is what protects."""
    return Response(
        status_code=204,
        headers={
            "Access-Control-Allow-Origin": "*",
            "Access-Control-Allow-Methods": "PUT, GET, HEAD",
            "Access-Control-Allow-Headers": "content-type, range, if-none-match",
            "Access-Control-Max-Age": "7200",
        },
    )


def _expires(request: Request) -> int:
    return _number(request.query_params.get("expires"))


def _number(text: str | None) -> int:
    """A number as we sign them; 0 for what is none."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 17 else 0


def _verify(request: Request, grant: signing.Grant) -> None:
    try:
        _local(request).path(grant.key)
    except ValueError:  # a key that we would never mint, and so never signed
        raise Refused(Code.NOT_FOUND) from None
    query = request.query_params
    signing.verify(
        services(request).installation.keyring,
        grant,
        key_id=query.get("key_id", ""),
        signature=query.get("signature", ""),
        now=time.time(),
    )

"""/v1/uploads: tus 1.0 on the wire (https://tus.io/protocols/resumable-upload).

What is appended, and when it counts, is tus.py's matter; here are headers, methods and answers.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from email.utils import format_datetime
from functools import partial
from typing import Any, Final
from uuid import UUID

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mediamill import db, idempotency, ids, tus
from mediamill.api.problems import problem_response
from mediamill.api.services import caller, idempotency_key, services
from mediamill.failures import Code, Failure, Problem, Refused
from mediamill.idempotency import Answer
from mediamill.keys import Caller
from mediamill.tus import Checksum, Cut, Transfer
from mediamill.uploads import Wanted

VERSION: Final = "1.0.0"
EXTENSIONS: Final = (
    "creation",
    "creation-with-upload",
    "creation-defer-length",
    "expiration",
    "checksum",
    "termination",
    "concatenation",
)
_PATH: Final = "/v1/uploads"
_CHUNK_TYPE: Final = "application/offset+octet-stream"
_METADATA_BYTES: Final = 4096
_METADATA_ENTRIES: Final = 32
_JOINED_MOST: Final = 100
_NUMBER_DIGITS: Final = 16
_METADATA_KEY: Final = re.compile(r"[\x21-\x2b\x2d-\x7e]{1,64}")
_UPLOAD_PATH: Final = re.compile(r"(?:https?://[^/\s]+)?/v1/uploads/(upl_[0-9a-z]{26})")
# Metadata with a meaning of its own; the rest becomes the media's metadata.
_OWN_NAMES: Final = frozenset(
    {"filename", "name", "filetype", "type", "recipe", "recipe_version", "sha256"}
)
_COMMON: Final = {
    "Tus-Resumable": VERSION,
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Expose-Headers": (
        "Location, Tus-Resumable, Tus-Version, Tus-Extension, Tus-Max-Size, "
        "Tus-Checksum-Algorithm, Upload-Offset, Upload-Length, Upload-Defer-Length, "
        "Upload-Expires, Upload-Metadata, Upload-Concat, Mediamill-Media, Idempotent-Replayed, "
        "X-Request-Id, Retry-After"
    ),
}
Endpoint = Callable[[Request], Awaitable[Response]]


async def collection(request: Request) -> Response:
    """Create an upload, or say what this server can."""
    return await _spoken(request, {"POST": _create, "OPTIONS": _options})


async def upload(request: Request) -> Response:
    """One upload: where it stands, more bytes, or its end."""
    return await _spoken(
        request, {"HEAD": _head, "PATCH": _patch, "DELETE": _delete, "OPTIONS": _options}
    )


async def _spoken(request: Request, methods: Mapping[str, Endpoint]) -> Response:
    """The answer of the method that is meant, in the protocol's headers."""
    method = request.method
    if method == "POST":  # before anything depends on the method, also who may do this
        method = request.headers.get("x-http-method-override", method).upper()
    errors, headers = None, {}
    try:
        endpoint = methods.get(method)
        if endpoint is None:
            raise Refused(Code.METHOD_NOT_ALLOWED, headers={"Allow": ", ".join(sorted(methods))})
        if method != "OPTIONS" and request.headers.get("tus-resumable") != VERSION:
            raise Refused(
                Code.PRECONDITION_FAILED,
                f"Send Tus-Resumable: {VERSION}.",
                headers={"Tus-Version": VERSION},
            )
        response = await endpoint(request)
    except Refused as error:
        problem, errors, headers = error.problem, error.errors, error.headers
    except Failure as error:
        problem = error.problem
    except db.Unavailable:
        problem = Problem(Code.DATABASE_UNAVAILABLE)
    else:
        response.headers.update(_COMMON)
        return response
    return problem_response(request, problem, errors=errors, headers={**headers, **_COMMON})


async def _options(request: Request) -> Response:
    settings = services(request).settings
    most = max(settings.max_image_bytes, settings.max_video_bytes, settings.max_audio_bytes)
    return Response(
        status_code=204,
        headers={
            "Tus-Version": VERSION,
            "Tus-Max-Size": str(most),
            "Tus-Extension": ",".join(EXTENSIONS),
            "Tus-Checksum-Algorithm": ",".join(tus.ALGORITHMS),
            "Access-Control-Allow-Methods": "POST, HEAD, PATCH, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": (
                "Authorization, Content-Type, Tus-Resumable, Upload-Length, Upload-Offset, "
                "Upload-Metadata, Upload-Defer-Length, Upload-Concat, Upload-Checksum, "
                "Idempotency-Key, X-HTTP-Method-Override, X-Requested-With, X-Request-ID, "
                "traceparent"
            ),
            "Access-Control-Max-Age": "7200",
        },
    )


async def _create(request: Request) -> Response:
    sender = await caller(request, "uploads:write")
    transfers = services(request).transfers
    text = request.headers.get("upload-metadata")
    concat = request.headers.get("upload-concat")
    wanted = _wanted(_metadata(text or ""))
    if concat is not None and concat != "partial":
        made = await transfers.join(sender.tenant_id, _joined(concat), wanted, text)
        return Response(status_code=201, headers=_created(made))
    size, deferred = _number(request, "upload-length"), request.headers.get("upload-defer-length")
    if deferred not in (None, "1") or (size is None) == (deferred is None):
        raise Refused(
            Code.MALFORMED_REQUEST, "Send either Upload-Length or Upload-Defer-Length: 1."
        )
    with_bytes = _brings_bytes(request)
    if with_bytes:
        _check_type(request)
    checksum = _checksum(request) if with_bytes else None
    made, replayed = await opened(
        request,
        sender,
        wanted,
        size=size,
        metadata=text,
        role="partial" if concat else "whole",
        about=(text or "", str(size), concat or ""),
    )
    headers = {"Idempotent-Replayed": "true"} if replayed else {}
    if with_bytes and made.received == 0:
        try:
            made = await _append(request, made, 0, checksum)
        except Cut:
            raise ClientDisconnect from None
    if with_bytes or replayed:  # of a repeat whose bytes came before, nothing is taken
        headers["Upload-Offset"] = str(made.received)
    return Response(status_code=201, headers={**_created(made), **headers})


async def opened(
    request: Request,
    sender: Caller,
    wanted: Wanted,
    *,
    size: int | None,
    about: Sequence[str],
    metadata: str | None = None,
    role: str = "whole",
) -> tuple[Transfer, bool]:
    """A new upload, or the one that this Idempotency-Key made before, and whether it is that.

    `about` is what makes two requests the same. Of one that was made before, the writer at work is
    stopped: whoever repeats a request has given it up. Raises Refused.
    """
    here = services(request)
    key = idempotency_key(
        request, sender, idempotency.fingerprint("upload", role, *about), route=_PATH
    )
    open_ = partial(
        here.transfers.open, sender.tenant_id, wanted, size=size, metadata=metadata, role=role
    )
    if key is None:
        return await open_(), False
    made: Transfer | None = None
    async with db.transaction(here.pool) as connection:

        async def work() -> Answer:
            nonlocal made
            made = await open_(connection=connection)
            return Answer(201, "{}", f"{_PATH}/{ids.encode(ids.UPLOAD, made.id)}", made.id)

        answer = await idempotency.once(
            connection, key, keep_seconds=here.settings.idempotency_seconds, work=work
        )
    if made is not None:
        return made, False
    return await here.transfers.settled(sender.tenant_id, answer.about), True


async def _head(request: Request) -> Response:
    sender = await caller(request, "uploads:write")
    named = await appendable(request, sender)
    found = await services(request).transfers.settled(sender.tenant_id, named.id)
    headers = {
        "Upload-Offset": str(found.received),
        "Cache-Control": "no-store",
        **_about(found),
    }
    if found.size is None:
        headers["Upload-Defer-Length"] = "1"
    else:
        headers["Upload-Length"] = str(found.size)
    if found.metadata:
        headers["Upload-Metadata"] = found.metadata
    return Response(status_code=200, headers=headers)


async def _patch(request: Request) -> Response:
    sender = await caller(request, "uploads:write")
    transfers = services(request).transfers
    _check_type(request)
    offset = _number(request, "upload-offset")
    if offset is None:
        raise Refused(Code.MALFORMED_REQUEST, "Send Upload-Offset.")
    checksum = _checksum(request)
    found = await appendable(request, sender)
    if found.role == "final":
        raise Refused(Code.UPLOAD_IS_FINAL)
    size = _number(request, "upload-length")
    if size is not None:
        found = await transfers.declare_size(found, size)
    try:
        found = await _append(request, found, offset, checksum)
    except Cut:
        raise ClientDisconnect from None
    return Response(
        status_code=204, headers={"Upload-Offset": str(found.received), **_about(found)}
    )


async def _delete(request: Request) -> Response:
    sender = await caller(request, "uploads:write")
    transfers = services(request).transfers
    await transfers.end(await appendable(request, sender))
    return Response(status_code=204)


async def _append(
    request: Request, found: Transfer, offset: int, checksum: Checksum | None
) -> Transfer:
    return await services(request).transfers.append(
        found,
        offset,
        body(request),
        length=_number(request, "content-length"),
        checksum=checksum,
    )


async def body(request: Request) -> AsyncIterator[bytes]:
    """The bytes of a request as they come. Raises Cut."""
    try:
        async for chunk in request.stream():
            if chunk:
                yield chunk
    except ClientDisconnect:
        raise Cut from None


def _brings_bytes(request: Request) -> bool:
    length = request.headers.get("content-length")
    return (length is not None and length != "0") or "transfer-encoding" in request.headers


def _check_type(request: Request) -> None:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _CHUNK_TYPE:
        raise Refused(Code.UNSUPPORTED_MEDIA_TYPE, f"Send {_CHUNK_TYPE}.")


def _created(made: Transfer) -> dict[str, str]:
    return {"Location": f"{_PATH}/{ids.encode(ids.UPLOAD, made.id)}", **_about(made)}


def _about(found: Transfer) -> dict[str, str]:
    """What every answer about an upload says."""
    headers = {}
    if found.completed_at is None:
        headers["Upload-Expires"] = format_datetime(found.expires_at, usegmt=True)
    if found.role == "partial":
        headers["Upload-Concat"] = "partial"
    elif found.joins is not None:
        pieces = (ids.encode(ids.UPLOAD, UUID(each)) for each in found.joins.split())
        headers["Upload-Concat"] = "final;" + " ".join(f"{_PATH}/{piece}" for piece in pieces)
    if found.role != "partial" and found.size is not None:
        headers["Mediamill-Media"] = f"/v1/media/{ids.encode(ids.MEDIA, found.id)}"
    return headers


async def appendable(request: Request, sender: Caller) -> Transfer:
    """The upload that the path names, if it is one that bytes are appended to. Raises Refused."""
    named = ids.decode(ids.UPLOAD, request.path_params["upload_id"])
    if named is None:
        raise Refused(Code.NOT_FOUND)
    found = await services(request).transfers.get(sender.tenant_id, named)
    if found.protocol != tus.PROTOCOL:
        raise Refused(Code.NOT_FOUND)
    return found


def _joined(concat: str) -> list[UUID]:
    """The partial uploads that a final one names."""
    kind, _, text = concat.partition(";")
    matches = [_UPLOAD_PATH.fullmatch(address) for address in text.split()]
    found = [ids.decode(ids.UPLOAD, match[1]) for match in matches if match is not None]
    known = [each for each in found if each is not None]
    if kind != "final" or not known or len(known) < len(matches) or len(known) > _JOINED_MOST:
        raise Refused(
            Code.MALFORMED_REQUEST,
            "Upload-Concat reads `partial`, or `final;` with the addresses of partial uploads, "
            f"{_JOINED_MOST} at most.",
        )
    return known


def _number(request: Request, header: str) -> int | None:
    text = request.headers.get(header)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > _NUMBER_DIGITS:
        raise Refused(Code.MALFORMED_REQUEST, f"{header.title()} must be a number from 0.")
    return int(text)


def _checksum(request: Request) -> Checksum | None:
    text = request.headers.get("upload-checksum")
    if text is None:
        return None
    algorithm, _, encoded = text.partition(" ")
    if algorithm not in tus.ALGORITHMS:
        raise Refused(
            Code.MALFORMED_REQUEST, f"Checksums are taken by {', '.join(tus.ALGORITHMS)}."
        )
    try:
        return Checksum(algorithm, base64.b64decode(encoded, validate=True))
    except binascii.Error:
        raise Refused(Code.MALFORMED_REQUEST, "Upload-Checksum is not base64.") from None


def _metadata(text: str) -> dict[str, str]:
    """Upload-Metadata as names and values. Raises Refused."""
    if len(text) > _METADATA_BYTES:
        raise Refused(
            Code.MALFORMED_REQUEST, f"Upload-Metadata has at most {_METADATA_BYTES} bytes."
        )
    found: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, _, encoded = pair.partition(" ")
        try:
            value = base64.b64decode(encoded, validate=True).decode()
        except ValueError:
            raise Refused(
                Code.MALFORMED_REQUEST,
                f"Upload-Metadata: the value of {name!a} is not base64 of UTF-8.",
            ) from None
        if not _METADATA_KEY.fullmatch(name) or name in found or "\0" in value:
            raise Refused(
                Code.MALFORMED_REQUEST,
                "Upload-Metadata is a list of `name base64`, separated by commas, each name once.",
            )
        found[name] = value
    return found


def _wanted(given: Mapping[str, str]) -> Wanted:
    """What the metadata says about the file. Raises Refused."""
    rest: dict[str, Any] = {name: v for name, v in given.items() if name not in _OWN_NAMES}
    version = given.get("recipe_version")
    if (
        len(rest) > _METADATA_ENTRIES
        or (version is not None and not re.fullmatch("[0-9]{1,6}", version))
        or not re.fullmatch("[0-9a-f]{64}", given.get("sha256", "0" * 64))
    ):
        raise Refused(
            Code.INVALID_REQUEST,
            f"Upload-Metadata has at most {_METADATA_ENTRIES} entries of your own; recipe_version "
            "is a number, sha256 is in lowercase hex.",
        )
    return Wanted(
        size=0,
        content_type=given.get("filetype") or given.get("type") or None,
        filename=given.get("filename") or given.get("name"),
        sha256=given.get("sha256"),
        recipe=given.get("recipe", "web"),
        recipe_version=None if version is None else int(version),
        metadata=rest,
    )

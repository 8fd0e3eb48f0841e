"""/v1/uploads as the IETF drafts resumable uploads for HTTP, beside tus and over the same rows.

A draft may change, so it is off unless a setting turns it on; interop version 8. The interim answer
104 is not sent: the servers that we run on cannot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from email.message import Message
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mediamill import db, ids
from mediamill.api import uploads
from mediamill.api.problems import problem_response
from mediamill.api.services import caller, services
from mediamill.failures import Code, Failure, Problem, Refused
from mediamill.tus import Cut, Transfer
from mediamill.uploads import Wanted

VERSION: Final = "8"
_CHUNK_TYPE: Final = "application/partial-upload"
_NUMBER: Final = re.compile("[0-9]{1,15}")
_COMMON: Final = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Expose-Headers": (
        "Location, Upload-Offset, Upload-Complete, Upload-Length, Upload-Limit, Mediamill-Media, "
        "Idempotent-Replayed"
    ),
}
_REGISTRY: Final = "https://iana.org/assignments/http-problem-types#"


async def collection(request: Request) -> Response:
    """Create an upload, in whichever of the two protocols is spoken."""
    if not _spoken_here(request):
        return await uploads.collection(request)
    return await _answered(request, {"POST": _create, "OPTIONS": _options})


async def upload(request: Request) -> Response:
    """One upload, in whichever of the two protocols is spoken."""
    if not _spoken_here(request):
        return await uploads.upload(request)
    return await _answered(
        request, {"HEAD": _head, "PATCH": _patch, "DELETE": _delete, "OPTIONS": _options}
    )


def _spoken_here(request: Request) -> bool:
    if not services(request).settings.draft_resumable_uploads:
        return False
    if "tus-resumable" in request.headers:
        return False
    # The version is there as long as this is a draft; tus has its own header on all of these.
    return (
        "upload-complete" in request.headers
        or request.headers.get("upload-draft-interop-version") == VERSION
        or request.method in ("HEAD", "DELETE")
    )


async def _answered(request: Request, methods: Mapping[str, uploads.Endpoint]) -> Response:
    errors, headers = None, {}
    try:
        endpoint = methods.get(request.method)
        if endpoint is None:
            raise Refused(Code.METHOD_NOT_ALLOWED, headers={"Allow": ", ".join(sorted(methods))})
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
    headers = {
        "Upload-Limit": _limit(request),
        "Accept-Patch": _CHUNK_TYPE,
        "Access-Control-Allow-Methods": "POST, HEAD, PATCH, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": (
            "Authorization, Content-Type, Content-Disposition, Upload-Offset, Upload-Complete, "
            "Upload-Length, Upload-Draft-Interop-Version, Idempotency-Key"
        ),
    }
    return Response(status_code=204, headers=headers)


async def _create(request: Request) -> Response:
    sender = await caller(request, "uploads:write")
    complete, length = _complete(request), _number(request, "upload-length")
    body_length = _number(request, "content-length")
    if complete and length is None:
        length = body_length  # None for a body of unknown length
    if complete and body_length not in (None, length):
        return _inconsistent(request)
    disposition = Message()
    disposition["content-disposition"] = request.headers.get("content-disposition", "")
    wanted = Wanted(
        size=0,
        content_type=request.headers.get("content-type"),
        filename=disposition.get_filename(),
        recipe=request.query_params.get("recipe", "web"),
    )
    said = ("content-type", "content-disposition", "upload-complete")
    made, replayed = await uploads.opened(
        request,
        sender,
        wanted,
        size=length,
        about=(str(length), wanted.recipe, *(request.headers.get(name, "") for name in said)),
    )
    headers = {"Location": f"/v1/uploads/{ids.encode(ids.UPLOAD, made.id)}"}
    if replayed:
        headers["Idempotent-Replayed"] = "true"
    if not replayed or (made.received == 0 and made.completed_at is None):
        made = await _append(request, made, 0, complete=complete)
    return _state(request, made, 201, headers)


async def _head(request: Request) -> Response:
    sender = await caller(request, "uploads:write")
    named = await uploads.appendable(request, sender)
    found = await services(request).transfers.settled(sender.tenant_id, named.id)
    return _state(request, found, 204, {"Cache-Control": "no-store"})


async def _patch(request: Request) -> Response:
    sender = await caller(request, "uploads:write")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _CHUNK_TYPE:
        raise Refused(
            Code.UNSUPPORTED_MEDIA_TYPE,
            f"Send {_CHUNK_TYPE}.",
            headers={"Accept-Patch": _CHUNK_TYPE},
        )
    transfers = services(request).transfers
    complete, offset = _complete(request), _number(request, "upload-offset")
    if offset is None:
        raise Refused(Code.MALFORMED_REQUEST, "Send Upload-Offset.")
    found = await uploads.appendable(request, sender)
    if found.role == "final":
        raise Refused(Code.UPLOAD_IS_FINAL)
    if found.completed_at is not None:
        return _problem(
            request, Problem(Code.WRONG_STATE, "It is complete."), 400, "completed-upload"
        )
    length, body_length = _number(request, "upload-length"), _number(request, "content-length")
    known = found.size if found.size is not None else length
    if length not in (None, known) or (
        complete and None not in (known, body_length) and offset + (body_length or 0) != known
    ):
        # An offset that is wrong besides is the client's first concern.
        if offset == found.received:
            return _inconsistent(request)
    elif length is not None:
        found = await transfers.declare_size(found, length)
    try:
        found = await _append(request, found, offset, complete=complete)
    except Refused as refused:
        if refused.code is not Code.UPLOAD_OFFSET_MISMATCH:
            raise
        now = await transfers.get(sender.tenant_id, found.id)
        return _mismatch(request, refused.problem, expected=now.received, provided=offset)
    return _state(request, found, 200 if found.completed_at else 204, {})


async def _delete(request: Request) -> Response:
    sender = await caller(request, "uploads:write")
    transfers = services(request).transfers
    await transfers.end(await uploads.appendable(request, sender))
    return Response(status_code=204)


async def _append(request: Request, found: Transfer, offset: int, *, complete: bool) -> Transfer:
    """Take the body in. Raises Refused; an end that comes too soon leaves the upload as it is."""
    transfers = services(request).transfers
    try:
        found = await transfers.append(
            found, offset, uploads.body(request), length=_number(request, "content-length")
        )
    except Cut:
        raise ClientDisconnect from None
    if complete and found.size is None:
        found = await transfers.declare_size(found, found.received)
        await transfers.finish(found)
        return await transfers.get(found.tenant_id, found.id)
    if complete and not found.whole:
        raise Refused(
            Code.MALFORMED_REQUEST,
            f"It was said to be complete at {found.received:,} of {found.size:,} bytes.",
        )
    return found


def _state(request: Request, found: Transfer, status: int, more: Mapping[str, str]) -> Response:
    headers = {
        "Upload-Offset": str(found.received),
        "Upload-Complete": "?1" if found.completed_at else "?0",
        "Upload-Limit": _limit(request),
        **more,
    }
    if found.size is not None:
        headers["Upload-Length"] = str(found.size)
        headers["Mediamill-Media"] = f"/v1/media/{ids.encode(ids.MEDIA, found.id)}"
    return Response(status_code=status, headers=headers)


def _mismatch(request: Request, problem: Problem, *, expected: int, provided: int) -> Response:
    """Our problem, under the type and with the members that the draft gives it."""
    members = {"expected-offset": expected, "provided-offset": provided}
    response = _problem(request, problem, 409, "mismatching-upload-offset", members)
    response.headers["Upload-Offset"] = str(expected)
    return response


def _inconsistent(request: Request) -> Response:
    problem = Problem(Code.MALFORMED_REQUEST, "The lengths of this request do not fit each other.")
    return _problem(request, problem, 400, "inconsistent-upload-length")


def _problem(
    request: Request,
    problem: Problem,
    status: int,
    kind: str,
    members: Mapping[str, int] | None = None,
) -> Response:
    """A problem under the type that the draft registers."""
    response = problem_response(request, problem)
    body = json.loads(bytes(response.body)) | {
        "type": f"{_REGISTRY}{kind}",
        "status": status,
        **(members or {}),
    }
    headers = {k: v for k, v in response.headers.items() if k != "content-length"}
    return Response(json.dumps(body), status, headers)


def _limit(request: Request) -> str:
    settings = services(request).settings
    most = max(settings.max_image_bytes, settings.max_video_bytes, settings.max_audio_bytes)
    return f"max-size={most}, max-age={settings.resumable_ttl_seconds}"


def _complete(request: Request) -> bool:
    text = request.headers.get("upload-complete")
    if text not in ("?0", "?1"):
        raise Refused(Code.MALFORMED_REQUEST, "Send Upload-Complete: ?0 or ?1.")
    return text == "?1"


def _number(request: Request, header: str) -> int | None:
    text = request.headers.get(header)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text):
        raise Refused(Code.MALFORMED_REQUEST, f"{header.title()} must be a number from 0.")
    return int(text)

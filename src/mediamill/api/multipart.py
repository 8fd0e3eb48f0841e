"""Multipart uploads: a JSON API of our own, and the two ways in which Uppy's S3 plugin speaks.

Uppy's requests carry no headers of ours, so who may send them stands in the path: an upload token,
sealed by us, short-lived, good for new uploads of one tenant and nothing else. Either it asks for
what a Companion has, or it speaks S3 itself and has each request signed: then the bytes go to the
storage, and what begins, lists, joins or ends an upload comes to us in S3's words, so that the plan
of the parts, their check and the acceptance stay ours on every kind of storage.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal
from urllib.parse import parse_qsl
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from mediamill import db, idempotency, ids, media, multipart, signing, uploads
from mediamill.api.media import NewMedia
from mediamill.api.problems import problem_response
from mediamill.api.services import (
    MAX_JSON_BYTES,
    Callback,
    caller,
    idempotency_key,
    iso_time,
    json_body,
    json_response,
    json_text,
    parse_body,
    path_id,
    services,
)
from mediamill.failures import Code, Failure, Problem, Refused
from mediamill.idempotency import Answer
from mediamill.storage import SignedRequest
from mediamill.tus import Transfer
from mediamill.uploads import Wanted

_MOST_SIGNED: Final = 100
_CORS: Final = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Expose-Headers": "ETag, Location, X-Request-Id, Retry-After",
}
Endpoint = Callable[[Request], Awaitable[Response]]


class PartNumbers(BaseModel):
    """The parts that the client wants to send next."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: Literal[1] = 1
    numbers: list[int] = Field(min_length=1, max_length=_MOST_SIGNED)


class SentPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    number: int = Field(ge=1, le=10_000)
    etag: str = Field(max_length=200)


class Completed(BaseModel):
    """The parts as the client has seen them stored. Unset: what is there is meant."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: Literal[1] = 1
    parts: list[SentPart] | None = Field(default=None, max_length=10_000)


class NewToken(BaseModel):
    """What a browser may upload with the token."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: Literal[1] = 1
    ttl_seconds: int = Field(default=900, ge=60, le=3600)
    recipe: str = Field(default="web", max_length=63)
    recipe_version: int | None = Field(default=None, ge=1)


class ToSign(BaseModel):
    """A request that Uppy wants to send (`signRequest`). `size` is for pages that tell it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    method: Literal["GET", "POST", "PUT", "DELETE"]
    key: str = Field(min_length=1, max_length=1024)
    content_type: str | None = Field(default=None, alias="contentType", max_length=255)
    upload_id: str | None = Field(default=None, alias="uploadId", max_length=64)
    part_number: int | None = Field(default=None, alias="partNumber")
    size: int | None = Field(default=None, ge=0, le=1 << 53)


@dataclass(frozen=True, slots=True)
class Token:
    """What an upload token says."""

    tenant: str
    expires: int
    recipe: str
    recipe_version: int | None


async def open_multipart(request: Request) -> Response:
    """Open a multipart upload: the plan of its parts, each of which is signed on demand."""
    sender = await caller(request, "uploads:write")
    here = services(request)
    raw = await json_body(request)
    asked = parse_body(NewMedia, raw)
    wanted = asked.wanted()
    key = idempotency_key(
        request, sender, idempotency.fingerprint("json", raw), route="/v1/uploads/multipart"
    )
    callback = await Callback.of(here, asked.callback_url)
    async with db.transaction(here.pool) as connection:

        async def work() -> Answer:
            made = await here.multiparts.open(
                sender.tenant_id, wanted, size=wanted.size, connection=connection
            )
            await callback.register(connection, sender.tenant_id, made.id)
            return Answer(201, json_text(_shown(made)), _path(made), made.id)

        answer = await idempotency.once(
            connection, key, keep_seconds=here.settings.idempotency_seconds, work=work
        )
    headers = {"Location": answer.location, "Cache-Control": "no-store"}
    if answer.replayed:
        headers["Idempotent-Replayed"] = "true"
    return json_response(json.loads(answer.body), answer.status, headers)


async def sign_parts(request: Request) -> Response:
    """Signed requests for some of the parts; ask again when they have expired."""
    transfer = await _of_caller(request)
    wanted = parse_body(PartNumbers, await json_body(request))
    sign = services(request).multiparts.sign
    parts = [{"number": n, **_signed(sign(transfer, n))} for n in wanted.numbers]
    body = {"schema_version": 1, "parts": parts}
    return json_response(body, 200, {"Cache-Control": "no-store"})


async def list_parts(request: Request) -> Response:
    """The parts that are stored: what is missing is still to be sent."""
    transfer = await _of_caller(request)
    parts = await services(request).multiparts.parts(transfer)
    listed = [{"number": p.number, "bytes": p.size, "etag": p.etag} for p in parts]
    return json_response({**_shown(transfer), "parts": listed}, 200, {"Cache-Control": "no-store"})


async def complete_multipart(request: Request) -> Response:
    """Join the parts; the file is accepted and queued. Safe to repeat."""
    transfer = await _of_caller(request)
    given = parse_body(Completed, await json_body(request)).parts
    etags = None if given is None else {part.number: part.etag for part in given}
    done = await services(request).multiparts.complete(transfer, etags)
    return json_response(_shown(done), 202, {"Location": _media(done)})


async def abort_multipart(request: Request) -> Response:
    """Give the upload up; its parts are removed."""
    transfer = await _of_caller(request)
    await services(request).multiparts.abort(transfer)
    return Response(status_code=204)


async def create_token(request: Request) -> Response:
    """A token for a browser: it may upload with it for some minutes, and do nothing else."""
    sender = await caller(request, "uploads:write")
    wanted = parse_body(NewToken, await json_body(request))
    here = services(request)
    # A recipe that does not exist is told now, and not to the browser.
    uploads.slot(
        here.settings,
        sender.tenant_id,
        Wanted(size=1, recipe=wanted.recipe, recipe_version=wanted.recipe_version),
    )
    expires = int(time.time()) + wanted.ttl_seconds
    content = json_text(
        {"t": sender.tenant_id, "x": expires, "r": wanted.recipe, "v": wanted.recipe_version}
    )
    token = signing.seal(here.installation.keyring, content)
    body = {
        "schema_version": 1,
        "token": token,
        "expires_at": iso_time(datetime.fromtimestamp(expires, UTC)),
        "companion_url": f"{here.settings.base_url}/uppy/{token}",
        "sign_url": f"{here.settings.base_url}/uppy/{token}/s3/sign",
    }
    return json_response(body, 201, {"Cache-Control": "no-store"})


# What Uppy asks of a Companion.


async def uppy(request: Request) -> Response:
    """Every route below an upload token, with what a browser needs to read the answer."""
    if request.method == "OPTIONS":
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": "content-type, authorization, uppy-auth-token, "
            "uppy-versions, x-request-id",
            "Access-Control-Max-Age": "7200",
        }
        return Response(status_code=204, headers={**headers, **_CORS})
    errors, headers = None, {}
    try:
        response = await _companion(request)
    except Refused as error:
        problem, errors, headers = error.problem, error.errors, error.headers
    except Failure as error:
        problem = error.problem
    except db.Unavailable:
        problem = Problem(Code.DATABASE_UNAVAILABLE)
    else:
        response.headers.update(_CORS)
        return response
    return problem_response(request, problem, errors=errors, headers={**headers, **_CORS})


async def _companion(request: Request) -> Response:
    token = _token(request)
    match request.method, request.path_params["rest"].split("/"):
        case "GET", ["params"]:
            return await _params(request, token)
        case "POST", ["multipart"]:
            return await _create(request, token)
        case "GET", ["multipart", upload]:
            transfer = await _of_token(request, token, upload)
            parts = await services(request).multiparts.parts(transfer)
            listed = [{"PartNumber": p.number, "Size": p.size, "ETag": p.etag} for p in parts]
            return _json(listed)
        case "GET", ["multipart", upload, number] if number.isascii() and number.isdigit():
            transfer = await _of_token(request, token, upload)
            signed = services(request).multiparts.sign(transfer, int(number[:6]))
            return _json({"url": signed.url, "expires": 3600})
        case "POST", ["multipart", upload, "complete"]:
            transfer = await _of_token(request, token, upload)
            done = await services(request).multiparts.complete(transfer, await _etags(request))
            return _json({"location": _media(done), "key": done.key})
        case "DELETE", ["multipart", upload]:
            await services(request).multiparts.abort(await _of_token(request, token, upload))
            return _json({})
        case "POST", ["sign"]:
            return await _sign(request, token)
        case _, ["object", upload]:
            return await _spoken_s3(request, await _of_token(request, token, upload))
    raise Refused(Code.NOT_FOUND)


async def _params(request: Request, token: Token) -> Response:
    """One signed PUT for a small file, if its size is told (`metadata[size]`)."""
    query = dict(parse_qsl(request.url.query))
    size = query.get("metadata[size]", "")
    if not size.isascii() or not size.isdigit() or len(size) > 16:
        raise Refused(
            Code.INVALID_REQUEST,
            "Send metadata[size], or let every file go in parts (shouldUseMultipart: true).",
            errors=[{"parameter": "metadata[size]", "detail": "must be the size in bytes"}],
        )
    wanted = _wanted(token, query.get("filename"), query.get("type"), int(size))
    return _json({"method": "PUT", "fields": {}, **await _put_slot(request, token, wanted)})


async def _put_slot(request: Request, token: Token, wanted: Wanted) -> dict[str, Any]:
    """A slot for a whole file, as Uppy wants to hear of it. Raises Refused."""
    here = services(request)
    slot = uploads.slot(here.settings, token.tenant, wanted)
    async with db.transaction(here.pool) as connection:
        await media.open_slot(connection, slot)
    signed = uploads.sign(here.storage, slot)
    # A browser sets the length by itself, and lets no script do it.
    headers = {k: v for k, v in signed.headers.items() if k != "Content-Length"}
    media_id = ids.encode(ids.MEDIA, slot.id)
    return {"url": signed.url, "headers": headers, "key": slot.upload_key, "media": media_id}


async def _create(request: Request, token: Token) -> Response:
    given = await _json_object(request)
    name, content_type = given.get("filename"), given.get("type")
    wanted = _wanted(
        token,
        name if isinstance(name, str) else None,
        content_type if isinstance(content_type, str) else None,
        0,
    )
    made = await services(request).multiparts.open(token.tenant, wanted, size=None)
    upload = ids.encode(ids.UPLOAD, made.id)
    return _json({"key": made.key, "uploadId": upload, "media": ids.encode(ids.MEDIA, made.id)})


async def _sign(request: Request, token: Token) -> Response:
    """Where the browser sends this request: parts and whole files to the storage, the rest to us.
    A new upload gets a key of ours, which Uppy takes over."""
    asked = parse_body(ToSign, await json_body(request))
    multiparts = services(request).multiparts
    # Uppy asks for UUID-NAME, unless the page has its own way.
    name = re.sub(r"^[0-9a-f-]{36}-", "", asked.key.rpartition("/")[2])
    match asked.method, asked.upload_id, asked.part_number:
        case "PUT", None, None:
            if asked.size is None:
                raise Refused(
                    Code.INVALID_REQUEST,
                    "Send `size` too, or let every file go in parts (shouldUseMultipart: true).",
                    errors=[{"pointer": "/size", "detail": "must be the size in bytes"}],
                )
            wanted = _wanted(token, name, asked.content_type, asked.size)
            return _json(await _put_slot(request, token, wanted))
        case "POST", None, None:
            wanted = _wanted(token, name, asked.content_type, asked.size or 0)
            made = await multiparts.open(token.tenant, wanted, size=asked.size)
            return _json({"url": f"{_object_url(request, made)}?uploads", "key": made.key})
        case "PUT", str(upload), int(number):
            transfer = await _of_token(request, token, upload, asked.key)
            return _json({"url": multiparts.sign(transfer, number).url})
        case (("GET" | "POST" | "DELETE"), str(upload), None):
            transfer = await _of_token(request, token, upload, asked.key)
            return _json({"url": _object_url(request, transfer)})
    raise Refused(Code.INVALID_REQUEST, "This is no request of an upload.")


async def _spoken_s3(request: Request, transfer: Transfer) -> Response:
    """One of S3's requests about an upload in parts, and S3's answer."""
    multiparts = services(request).multiparts
    upload, key = ids.encode(ids.UPLOAD, transfer.id), escape(transfer.key)
    match request.method:
        case "POST" if "uploads" in request.query_params:
            return _xml(
                "InitiateMultipartUploadResult",
                f"<Key>{key}</Key><UploadId>{upload}</UploadId>",
            )
        case "GET":
            listed = "".join(
                f"<Part><PartNumber>{part.number}</PartNumber>"
                f"<ETag>{escape(part.etag)}</ETag><Size>{part.size}</Size></Part>"
                for part in await multiparts.parts(transfer)
            )
            return _xml("ListPartsResult", f"<Key>{key}</Key>{listed}")
        case "POST":
            done = await multiparts.complete(transfer, await _etags_in_xml(request))
            location = services(request).settings.base_url + _media(done)
            return _xml(
                "CompleteMultipartUploadResult",
                f"<Location>{escape(location)}</Location><Key>{key}</Key>",
            )
        case "DELETE":
            await multiparts.abort(transfer)
            return Response(status_code=204)
    raise Refused(Code.METHOD_NOT_ALLOWED, headers={"Allow": "DELETE, GET, POST"})


def _object_url(request: Request, transfer: Transfer) -> str:
    """Where we take S3's requests about this upload. Uppy tells a beginning from a completion by
    what it sends; we by the query, since both are POST."""
    base = services(request).settings.base_url
    path = f"{base}/uppy/{request.path_params['token']}/s3/object"
    return f"{path}/{ids.encode(ids.UPLOAD, transfer.id)}"


async def _etags_in_xml(request: Request) -> dict[int, str]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_JSON_BYTES:
            raise Refused(Code.PAYLOAD_TOO_LARGE)
    try:
        if b"<!" in body:  # S3 knows no document types, and we expand nothing
            raise ValueError
        found = {}
        for part in ElementTree.fromstring(bytes(body)):  # noqa: S314  # no entities, see above
            said = {child.tag.rpartition("}")[2]: child.text or "" for child in part}
            found[int(said["PartNumber"])] = said["ETag"]
    except (ElementTree.ParseError, KeyError, ValueError):
        raise Refused(Code.MALFORMED_REQUEST, "Send CompleteMultipartUpload as S3 does.") from None
    if not all(1 <= number <= 10_000 for number in found):
        raise Refused(Code.INVALID_REQUEST, "A part has a number from 1 to 10000.")
    return found


async def _etags(request: Request) -> dict[int, str]:
    parts = (await _json_object(request)).get("parts")
    found: dict[int, str] = {}
    for part in parts if isinstance(parts, list) else []:
        match part:
            case {"PartNumber": int(number), "ETag": str(etag)} if 1 <= number <= 10_000:
                found[number] = etag
            case {"PartNumber": int(number)} if 1 <= number <= 10_000:
                found[number] = ""  # a browser that may not read the header sends none
            case _:
                raise Refused(Code.INVALID_REQUEST, "`parts` is a list of PartNumber and ETag.")
    return found


async def _json_object(request: Request) -> dict[str, Any]:
    try:
        given = json.loads(await json_body(request))
    except (ValueError, RecursionError):
        raise Refused(Code.MALFORMED_REQUEST, "The body is not JSON.") from None
    if not isinstance(given, dict):
        raise Refused(Code.INVALID_REQUEST, "The body must be a JSON object.")
    return given


def _wanted(token: Token, filename: str | None, content_type: str | None, size: int) -> Wanted:
    return Wanted(
        size=size,
        filename=filename and filename.replace("\0", ""),
        content_type=content_type or None,
        recipe=token.recipe,
        recipe_version=token.recipe_version,
    )


def _token(request: Request) -> Token:
    content = signing.unseal(services(request).installation.keyring, request.path_params["token"])
    if content is None:
        raise Refused(Code.SIGNATURE_INVALID, "This upload token was not made here.")
    given = json.loads(content)
    token = Token(given["t"], given["x"], given["r"], given["v"])
    if token.expires < time.time():
        raise Refused(Code.SIGNATURE_EXPIRED, "The upload token has expired; ask for a new one.")
    return token


async def _of_token(
    request: Request, token: Token, upload: str, key: str | None = None
) -> Transfer:
    found = ids.decode(ids.UPLOAD, upload)
    if found is None:
        raise Refused(Code.NOT_FOUND)
    transfer = await services(request).multiparts.get(token.tenant, found)
    if (key or request.query_params.get("key", transfer.key)) != transfer.key:
        raise Refused(Code.NOT_FOUND)
    return transfer


async def _of_caller(request: Request) -> Transfer:
    sender = await caller(request, "uploads:write")
    found = path_id(request, ids.UPLOAD, "upload_id")
    return await services(request).multiparts.get(sender.tenant_id, found)


def _shown(transfer: Transfer) -> dict[str, Any]:
    known = transfer.size is not None
    return {
        "schema_version": 1,
        "id": ids.encode(ids.UPLOAD, transfer.id),
        "media": ids.encode(ids.MEDIA, transfer.id),
        "size": transfer.size,
        "part_bytes": transfer.part_bytes,
        "part_count": multipart.part_count(transfer) if known else None,
        "completed": transfer.completed_at is not None,
        "expires_at": iso_time(transfer.expires_at),
        "links": {"self": _path(transfer), "parts": f"{_path(transfer)}/parts",
                  "complete": f"{_path(transfer)}/complete", "media": _media(transfer)},
    }  # fmt: skip


def _signed(signed: SignedRequest) -> dict[str, Any]:
    return {
        "method": signed.method,
        "url": signed.url,
        "headers": dict(signed.headers),
        "expires_at": iso_time(signed.expires_at),
    }


def _json(body: Any) -> Response:
    text = json.dumps(body, ensure_ascii=False)
    return Response(
        text.encode(), media_type="application/json", headers={"Cache-Control": "no-store"}
    )


def _xml(name: str, content: str) -> Response:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}>{content}</{name}>'
    headers = {"Cache-Control": "no-store"}
    return Response(text, media_type="application/xml", headers=headers)


def _path(transfer: Transfer) -> str:
    return f"/v1/uploads/{ids.encode(ids.UPLOAD, transfer.id)}"


def _media(transfer: Transfer) -> str:
    return f"/v1/media/{ids.encode(ids.MEDIA, transfer.id)}"

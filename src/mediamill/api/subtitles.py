"""/v1/media/{id}/subtitles: files of subtitles beside a film."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from mediamill import db, ids, media, sidecars
from mediamill.api.services import (
    caller,
    iso_time,
    json_response,
    known_parameters,
    path_id,
    services,
)
from mediamill.failures import Code, Failure, Refused
from mediamill.states import MediaState

SCHEMA_VERSION: Final = 1
TYPES: Final = ("application/x-subrip", "text/vtt", "text/srt", "text/plain")
_MOST_LABEL: Final = 80


class SubtitlesBody(BaseModel):
    """Subtitles that lie beside a film. `charset` is what the bytes were taken for."""

    schema_version: int
    language: str
    label: str | None
    format: str
    charset: str
    cues: int
    bytes: int
    created_at: str


async def put_subtitles(request: Request) -> Response:
    """Lay a file of subtitles (SubRip or WebVTT) beside a film, in place of an earlier one of that
    language. It becomes WebVTT when the media is processed next: send it before `complete`, or
    process the media again.

    Without a `charset` in Content-Type it is UTF-8, UTF-16 with its mark, or the old Windows page
    of the language.
    """
    sender = await caller(request, "uploads:write")
    known_parameters(request, "label")
    here = services(request)
    media_id, language = path_id(request, ids.MEDIA, "media_id"), _language(request)
    label = _label(request)
    async with db.acquire(here.pool) as connection:
        await _original(connection, sender.tenant_id, media_id)
    charset = _charset(request)
    data = await _body(request)
    try:
        text = sidecars.read(data, language=language, charset=charset)
    except Failure as failure:
        raise Refused(failure.code, failure.problem.detail) from None
    async with db.transaction(here.pool) as connection:
        original = await _original(connection, sender.tenant_id, media_id)
        if original.state == MediaState.EXPIRED:
            raise Refused(Code.UPLOAD_EXPIRED)
        kept = await sidecars.put(
            connection, sender.tenant_id, media_id, language, text, label=label
        )
        if kept is None:
            await _original(connection, sender.tenant_id, media_id)  # deleted a moment ago
            most = sidecars.MAX_LANGUAGES
            raise Refused(
                Code.RESOURCE_LIMIT,
                f"A media has subtitles in at most {most} languages.",
                limit={"name": "languages", "allowed": most, "seen": most + 1, "unit": "files"},
            )
        rows = await sidecars.listed(connection, sender.tenant_id, media_id)
    row = next(row for row in rows if row["language"] == language)
    return json_response({"schema_version": SCHEMA_VERSION, **_shown(row)})


async def list_subtitles(request: Request) -> Response:
    """The files of subtitles that lie beside a film, by language."""
    sender = await caller(request, "media:read")
    known_parameters(request)
    here = services(request)
    media_id = path_id(request, ids.MEDIA, "media_id")
    async with db.acquire(here.pool) as connection:
        await _original(connection, sender.tenant_id, media_id)
        rows = await sidecars.listed(connection, sender.tenant_id, media_id)
    return json_response(
        {"schema_version": SCHEMA_VERSION, "data": [_shown(row) for row in rows]},
        200,
        {"Cache-Control": "private, no-cache"},
    )


async def delete_subtitles(request: Request) -> Response:
    """Take a file of subtitles away. What was published from it stays until the media is processed
    again."""
    sender = await caller(request, "uploads:write")
    known_parameters(request)
    here = services(request)
    media_id, language = path_id(request, ids.MEDIA, "media_id"), _language(request)
    async with db.transaction(here.pool) as connection:
        await _original(connection, sender.tenant_id, media_id)
        if not await sidecars.remove(connection, sender.tenant_id, media_id, language):
            raise Refused(Code.NOT_FOUND)
    return Response(status_code=204)


async def _original(connection: db.Connection, tenant_id: str, media_id: UUID) -> media.Original:
    found = await media.original(connection, tenant_id, media_id)
    if found is None:
        raise Refused(Code.NOT_FOUND)
    if found.deleted_at is not None:
        raise Refused(Code.GONE)
    return found


def _shown(row: db.Row) -> dict[str, Any]:
    return {**dict(row), "created_at": iso_time(row["created_at"])}


def _language(request: Request) -> str:
    language = str(request.path_params["language"]).lower()
    if len(language) > 35 or not sidecars.LANGUAGE.fullmatch(language):
        raise Refused(
            Code.NOT_FOUND, "The address ends in a language (BCP 47), such as en, pt-br or und."
        )
    return language


def _label(request: Request) -> str | None:
    """What a player shows for them. Raises Refused."""
    label = request.query_params.get("label")
    if label is not None and not (0 < len(label) <= _MOST_LABEL and label.isprintable()):
        raise Refused(
            Code.INVALID_REQUEST,
            f"label: must be plain text of at most {_MOST_LABEL} characters.",
            errors=[{"parameter": "label", "detail": "must be short, plain text"}],
        )
    return label


def _charset(request: Request) -> str | None:
    """The charset of a type that is taken. Raises Refused for another type."""
    essence, *parameters = request.headers.get("content-type", "").split(";")
    if essence.strip().lower() not in TYPES:
        raise Refused(Code.UNSUPPORTED_MEDIA_TYPE, f"Send one of {', '.join(TYPES)}.")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip('"')[:40] or None
    return None


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > sidecars.MAX_BYTES:
            most = sidecars.MAX_BYTES
            raise Refused(
                Code.PAYLOAD_TOO_LARGE,
                f"Subtitles have at most {most:,} bytes.",
                limit={"name": "subtitles", "allowed": most, "seen": None, "unit": "bytes"},
            )
    return bytes(body)

"""What every route uses, and who may use it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from mediamill import db, ids
from mediamill.config import Settings
from mediamill.estimates import Forecaster
from mediamill.failures import BY_NAME, Code, Problem, Refused
from mediamill.installation import Installation
from mediamill.keys import Caller, Keychain
from mediamill.storage.local import LocalStorage

JSON: Final = "application/json"
MAX_JSON_BYTES: Final = 1 << 20


@dataclass(slots=True)
class Services:
    """The outside world of one API process."""

    settings: Settings
    pool: db.Pool
    storage: LocalStorage
    installation: Installation
    keychain: Keychain
    forecaster: Forecaster
    shutting_down: asyncio.Event = field(default_factory=asyncio.Event)


def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


async def caller(request: Request, scope: str) -> Caller:
    """Who sends this, if the key may do `scope`. Raises Refused before any of the body is read."""
    header = request.headers.get("authorization", "")
    scheme, _, token = header.partition(" ")
    known = None
    if scheme.lower() == "bearer":
        known = await services(request).keychain.identify(token.strip())
    if known is None:
        raise Refused(Code.UNAUTHENTICATED)
    if not known.may(scope):
        raise Refused(Code.MISSING_SCOPE, f"The key needs the scope {scope}.")
    return known


def path_id(request: Request, prefix: str, name: str) -> UUID:
    """The id in the path. A malformed one is as unknown as one that does not exist."""
    value = ids.decode(prefix, request.path_params[name])
    if value is None:
        raise Refused(Code.NOT_FOUND)
    return value


async def json_body(request: Request) -> bytes:
    """The raw body of a JSON request. Raises Refused for another type or too much of it."""
    essence = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if essence != JSON:
        raise Refused(Code.UNSUPPORTED_MEDIA_TYPE, f"Send {JSON}.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_JSON_BYTES:
            raise Refused(
                Code.PAYLOAD_TOO_LARGE, f"A JSON body has at most {MAX_JSON_BYTES} bytes."
            )
    return bytes(body)


def json_text(body: dict[str, Any]) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def json_response(
    body: dict[str, Any] | str, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    text = body if isinstance(body, str) else json_text(body)
    return Response(text.encode(), status, headers, JSON)


def known_parameters(request: Request, *names: str) -> None:
    """A query parameter that we do not know is an error: a misspelt filter must not be ignored."""
    unknown = [name for name in request.query_params if name not in names]
    if unknown:
        raise Refused(
            Code.UNKNOWN_PARAMETER,
            f"Known here: {', '.join(names) or 'none'}.",
            errors=[{"parameter": name, "detail": "is not known"} for name in unknown],
        )


def shown_error(stored: dict[str, Any] | None) -> dict[str, Any] | None:
    """A stored failure in today's words: the code is what was stored, its sentence is the
    table's."""
    if stored is None or stored.get("code") not in BY_NAME:
        return stored
    code = BY_NAME[stored["code"]]
    return Problem(code, stored.get("detail", ""), stored.get("limit")).as_dict()


def iso_time(value: datetime | None) -> str | None:
    """RFC 3339 in UTC."""
    return None if value is None else value.astimezone(UTC).isoformat().replace("+00:00", "Z")

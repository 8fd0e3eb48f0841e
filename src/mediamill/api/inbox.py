"""/v1/inbox: a place to send your own webhooks to while you develop. Only with `inbox = true`."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from typing import Any, Final, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from mediamill.api.services import caller, iso_time, json_response, known_parameters, services
from mediamill.failures import Code, Refused

SCHEMA_VERSION: Final = 1
KEPT: Final = 200
_MOST_BYTES: Final = 256 << 10
_SHOWN: Final = ("webhook-id", "webhook-timestamp", "webhook-signature", "user-agent")


class LetterBody(BaseModel):
    """A webhook as it arrived."""

    received_at: datetime
    headers: dict[str, str]
    body: str


class LettersBody(BaseModel):
    """Newest first."""

    schema_version: Literal[1]
    data: list[LetterBody]


Letters = deque[dict[str, Any]]


async def receive(request: Request) -> Response:
    """Take a webhook; the newest 200 are kept, in the memory of this process."""
    _open(request)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_BYTES:
            raise Refused(Code.PAYLOAD_TOO_LARGE, f"The inbox takes {_MOST_BYTES:,} bytes.")
    letters: Letters = request.app.state.letters
    letters.appendleft(
        {
            "received_at": iso_time(datetime.now(UTC)),
            "headers": {n: request.headers[n] for n in _SHOWN if n in request.headers},
            "body": body.decode("utf-8", "replace"),
        }
    )
    return Response(status_code=204)


async def read(request: Request) -> Response:
    """What has arrived, newest first, with its headers."""
    await caller(request, "webhooks:manage")
    known_parameters(request)
    _open(request)
    body = {"schema_version": SCHEMA_VERSION, "data": list(request.app.state.letters)}
    return json_response(body, 200, {"Cache-Control": "private, no-store"})


def _open(request: Request) -> None:
    if not services(request).settings.inbox:
        raise Refused(Code.NOT_FOUND, "There is no inbox; an operator opens it with `inbox`.")

"""/internal/storage-events: buckets say that something came, each in its own way."""

from __future__ import annotations

import hmac
from collections import Counter
from typing import Final

import structlog
from starlette.requests import Request
from starlette.responses import Response

from mediamill import storage_events
from mediamill.api.services import bearer, json_response, services
from mediamill.failures import Code, Refused
from mediamill.observability import Metrics
from mediamill.storage_events import Handshake, Unreadable

log = structlog.get_logger()

_MOST_BYTES: Final = 256 << 10


async def receive(request: Request) -> Response:
    """Take hints in. What they name is looked at; what is not ours is counted and forgotten, since
    a refusal would only make the sender repeat it."""
    _check_secret(request)
    here = services(request)
    source = request.path_params["source"]
    await here.senders.check_token(source, bearer(request))
    body = await _body(request)
    await here.senders.check_message(source, body)
    metrics: Metrics = request.app.state.metrics
    try:
        found = storage_events.read(body)
    except Unreadable as error:
        log.warning("storage_event_unreadable", source=source, why=str(error))
        raise Refused(Code.INVALID_REQUEST, f"No known form of event: {error}.") from None
    outcomes: Counter[str] = Counter()
    for hint in found:
        if isinstance(hint, Handshake):
            if hint.confirm_url is not None:
                await here.senders.confirm(hint.confirm_url)
            log.info("storage_events_confirmed", provider=hint.provider)
            return json_response(dict(hint.answer), 200)
        outcome = await storage_events.follow(here.pool, here.storage, here.settings, hint)
        metrics.storage_events.labels(hint.provider, outcome).inc()
        outcomes[outcome] += 1
    return json_response({"schema_version": 1, **outcomes}, 200)


async def may_send(request: Request) -> Response:
    """The handshake of CloudEvents: the sender asks whether its events are wanted."""
    _check_secret(request)
    origin = request.headers.get("webhook-request-origin", "")
    if not origin or not origin.isprintable():
        raise Refused(Code.MALFORMED_REQUEST, "Send WebHook-Request-Origin.")
    headers = {"WebHook-Allowed-Origin": origin, "WebHook-Allowed-Rate": "*"}
    return Response(status_code=200, headers=headers)


def _check_secret(request: Request) -> None:
    """Raise Refused unless the sender shows its secret; an unknown source costs the same work."""
    here, source = services(request), request.path_params["source"]
    secret = (here.settings.storage_event_secrets or {}).get(source)
    shown = None if here.senders.wants_token(source) else bearer(request)
    if shown is None:
        shown = request.query_params.get("token", "")
    good = hmac.compare_digest((secret or "unknown").encode(), shown.encode("utf-8", "replace"))
    if secret is None or not good:
        raise Refused(Code.UNAUTHENTICATED, "The secret of this source is missing or wrong.")


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_BYTES:
            raise Refused(Code.PAYLOAD_TOO_LARGE, f"At most {_MOST_BYTES} bytes are taken.")
    return bytes(body)

"""/v1/webhook-endpoints and /v1/deliveries: where a tenant wants to be told, and how that went."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from mediamill import db, events, idempotency, ids, webhooks
from mediamill.api.services import (
    Page,
    Services,
    caller,
    chosen,
    idempotency_key,
    if_match,
    iso_time,
    json_body,
    json_response,
    json_text,
    known_parameters,
    listed,
    parse_body,
    path_id,
    plain_text,
    services,
)
from mediamill.failures import Code, Refused
from mediamill.idempotency import Answer
from mediamill.sealing import CannotOpen
from mediamill.states import DeliveryState

SCHEMA_VERSION: Final = 1
_OVERLAP_SECONDS: Final = 86400
_PREFIXES: Final = frozenset(f"{name.partition('.')[0]}.*" for name in events.TYPES)


def _type(value: str) -> str:
    if value not in events.TYPES and value not in _PREFIXES:
        raise PydanticCustomError(
            "event_type", "must be an event type such as media.ready, or media.* for all of media"
        )
    return value


def _secret(value: str) -> str:
    try:
        webhooks.read_secret(value)
    except ValueError:
        raise PydanticCustomError(
            "secret", "must read whsec_ and 24 to 64 bytes in base64"
        ) from None
    return value


Types = Annotated[list[Annotated[str, AfterValidator(_type)]], Field(min_length=1, max_length=64)]
Url = Annotated[str, Field(max_length=2048, examples=["https://example.com/hooks"])]
Text = Annotated[str, Field(max_length=500), AfterValidator(plain_text)]
Version = Annotated[int, Field(ge=events.PAYLOAD_VERSIONS[0], le=events.PAYLOAD_VERSIONS[-1])]
Secret = Annotated[str, AfterValidator(_secret)]


class NewEndpoint(BaseModel):
    """An address of yours that wants events."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: Literal[1] = 1
    url: Url
    description: Text | None = None
    types: Types | None = Field(
        default=None, description="Event types, or prefixes such as `media.*`. Default: all."
    )
    payload: webhooks.Payload = Field(
        default="full", description="`thin` sends ids and the state only."
    )
    payload_version: Version = events.PAYLOAD_VERSIONS[-1]
    signing: webhooks.Signing = "hmac"
    secret: Secret | None = Field(
        default=None, description="An HMAC secret of your own; default: a new one."
    )

    @model_validator(mode="after")
    def _own_secret_signs_by_hmac(self) -> NewEndpoint:
        if self.secret is not None and self.signing != "hmac":
            raise PydanticCustomError("secret", "`secret` goes with hmac only")
        return self


class EndpointChange(BaseModel):
    """What shall be different. Fields that are left out stay as they are."""

    model_config = ConfigDict(extra="forbid", strict=True)

    url: Url | None = None
    description: Text | None = None
    types: Types | None = None
    payload: webhooks.Payload | None = None
    payload_version: Version | None = None
    state: Literal["enabled", "disabled"] | None = None


class Rotation(BaseModel):
    """How long the old secret signs beside the new one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    overlap_seconds: float = Field(default=_OVERLAP_SECONDS, ge=0, le=7 * 86400)
    secret: Secret | None = None


class Recovery(BaseModel):
    """From when on."""

    model_config = ConfigDict(extra="forbid")

    since: datetime


class EndpointBody(BaseModel):
    """A webhook endpoint as the API shows it."""

    schema_version: Literal[1]
    id: str
    url: str
    description: str | None
    types: list[str] | None
    payload: str
    payload_version: int
    signing: str
    state: Literal["enabled", "disabled"]
    reason: str | None = Field(description="Why it is disabled.")
    failures: int = Field(description="Failed attempts in a row.")
    failing_since: datetime | None
    paused_until: datetime | None = Field(description="Nothing is sent to it before.")
    created_at: datetime
    updated_at: datetime
    links: dict[str, str]


class NewEndpointBody(EndpointBody):
    secret: str = Field(
        description="Checks signatures: whsec_…, or whpk_… (a public key). Shown here only."
    )


class DeliveryBody(BaseModel):
    """One event for one endpoint."""

    schema_version: Literal[1]
    id: str
    endpoint_id: str
    event_id: str
    type: str
    state: DeliveryState
    reason: str | None
    attempt: int
    status: int | None
    next_attempt_at: datetime | None
    created_at: datetime
    finished_at: datetime | None


class EndpointPage(BaseModel):
    """Newest first."""

    schema_version: Literal[1]
    data: list[EndpointBody]
    next_cursor: str | None


class RotatedBody(NewEndpointBody):
    old_secret_until: datetime | None = Field(description="Until then the old one signs too.")


class TriedBody(BaseModel):
    """One attempt at a delivery."""

    attempt: int
    at: datetime
    duration_ms: float
    timings: dict[str, float | None]
    status: int | None
    response: str | None = Field(description="Its first bytes.")
    failure: str | None = Field(description="Why there was no good answer.")


class FullDelivery(DeliveryBody):
    """A delivery with what was sent and every attempt."""

    url: str
    body: str | None
    attempts: list[TriedBody]


class DeliveryPage(BaseModel):
    """Newest first."""

    schema_version: Literal[1]
    data: list[DeliveryBody]
    next_cursor: str | None


class RecoveredBody(BaseModel):
    schema_version: Literal[1]
    recovered: int


async def create_endpoint(request: Request) -> Response:
    """Register an endpoint. Its address is checked now and before each delivery."""
    sender = await caller(request, "webhooks:manage")
    known_parameters(request)
    here = services(request)
    raw = await json_body(request)
    wanted = parse_body(NewEndpoint, raw)
    key = idempotency_key(
        request, sender, idempotency.fingerprint("json", raw), route="/v1/webhook-endpoints"
    )
    own = None if wanted.secret is None else webhooks.read_secret(wanted.secret)
    origin = await webhooks.origin(here.egress, wanted.url)
    async with db.transaction(here.pool) as connection:

        async def work() -> Answer:
            row, secret = await webhooks.add(
                connection,
                sender.tenant_id,
                webhooks.Wanted(**wanted.model_dump(exclude={"schema_version", "secret"})),
                origin=origin,
                secret=own,
                most=here.settings.max_endpoints,
                vault=here.vault,
            )
            body = _shown(row) | {"secret": _kept(here, row, secret)}
            return Answer(201, json_text(body), body["links"]["self"], row["id"])

        answer = await idempotency.once(
            connection, key, keep_seconds=here.settings.idempotency_seconds, work=work
        )
    headers = {"Location": answer.location, "Cache-Control": "no-store"}
    return _with_secret(here, answer, headers)


async def list_endpoints(request: Request) -> Response:
    """Newest first."""

    async def ask(connection: db.Connection, tenant_id: str, page: Page) -> list[db.Row]:
        return await webhooks.endpoints(
            connection, tenant_id, before=page.before, limit=page.limit + 1
        )

    return await listed(request, "webhooks:manage", (), ask, _shown)


async def read_endpoint(request: Request) -> Response:
    """One endpoint. Its secret is not shown again."""
    sender = await caller(request, "webhooks:manage")
    known_parameters(request)
    async with db.acquire(services(request).pool) as connection:
        row = await _find(request, connection, sender.tenant_id)
    return _endpoint(row)


async def change_endpoint(request: Request) -> Response:
    """Change an endpoint, switch it off or on again. Needs If-Match."""
    sender = await caller(request, "webhooks:manage")
    known_parameters(request)
    here = services(request)
    wanted = parse_body(EndpointChange, await json_body(request))
    changes = {name: getattr(wanted, name) for name in wanted.model_fields_set}
    for name in ("url", "payload", "payload_version", "state"):
        if name in changes and changes[name] is None:
            raise Refused(
                Code.INVALID_REQUEST,
                f"{name} cannot be null.",
                errors=[{"pointer": f"/{name}", "detail": "cannot be null"}],
            )
    if wanted.url is not None:
        changes["origin"] = await webhooks.origin(here.egress, wanted.url)
    async with db.transaction(here.pool) as connection:
        row = await _find(request, connection, sender.tenant_id, change=True)
        if_match(request, _etag(row))
        row = await webhooks.change(connection, row, changes)
    return _endpoint(row)


async def delete_endpoint(request: Request) -> Response:
    """Forget an endpoint; what was pending for it is canceled. Needs If-Match."""
    sender = await caller(request, "webhooks:manage")
    known_parameters(request)
    async with db.transaction(services(request).pool) as connection:
        row = await _find(request, connection, sender.tenant_id, change=True)
        if_match(request, _etag(row))
        await webhooks.delete(connection, row)
    return Response(status_code=204)


async def rotate_secret(request: Request) -> Response:
    """A new secret; the old one signs beside it for `overlap_seconds` (default a day)."""
    sender = await caller(request, "webhooks:manage")
    known_parameters(request)
    here = services(request)
    raw = await json_body(request)
    wanted = parse_body(Rotation, raw)
    endpoint_id = path_id(request, ids.ENDPOINT, "endpoint_id")
    key = idempotency_key(
        request,
        sender,
        idempotency.fingerprint("json", str(endpoint_id), raw),
        route="/v1/webhook-endpoints/{endpoint_id}/rotate-secret",
    )
    async with db.transaction(here.pool) as connection:

        async def work() -> Answer:
            row = await _find(request, connection, sender.tenant_id, change=True)
            if wanted.secret is not None and row["signing"] != "hmac":
                raise Refused(
                    Code.INVALID_REQUEST,
                    "`secret` goes with hmac only.",
                    errors=[{"pointer": "/secret", "detail": "goes with hmac only"}],
                )
            secret = await webhooks.rotate(
                connection,
                row,
                overlap_seconds=wanted.overlap_seconds,
                secret=None if wanted.secret is None else webhooks.read_secret(wanted.secret),
                vault=here.vault,
            )
            valid = await webhooks.secrets_of(connection, row)
            body = _shown(row) | {
                "secret": _kept(here, row, secret),
                "old_secret_until": iso_time(next((s["retires_at"] for s in valid[1:]), None)),
            }
            return Answer(200, json_text(body), body["links"]["self"], row["id"])

        answer = await idempotency.once(
            connection, key, keep_seconds=here.settings.idempotency_seconds, work=work
        )
    return _with_secret(here, answer, {"Cache-Control": "no-store"})


def _kept(here: Services, row: db.Row, secret: bytes) -> str:
    """The secret for an answer that is kept for repeats of the request."""
    text = webhooks.shown_secret(row["signing"], secret).encode()
    return base64.b64encode(here.vault.seal(text, about=row["id"].bytes)).decode()


def _with_secret(here: Services, answer: Answer, headers: dict[str, str]) -> Response:
    body = json.loads(answer.body)
    kept = base64.b64decode(body["secret"])
    try:
        body["secret"] = here.vault.open(kept, about=answer.about.bytes).decode()
    except CannotOpen as error:
        raise Refused(Code.GONE, f"The secret cannot be told again: {error}.") from None
    if answer.replayed:
        headers["Idempotent-Replayed"] = "true"
    return json_response(body, answer.status, headers)


async def test_endpoint(request: Request) -> Response:
    """Send a `webhook.test` event to this endpoint now. 202 with its delivery."""
    sender = await caller(request, "webhooks:manage")
    known_parameters(request)
    here = services(request)
    endpoint_id = path_id(request, ids.ENDPOINT, "endpoint_id")
    key = idempotency_key(
        request,
        sender,
        idempotency.fingerprint("test", str(endpoint_id)),
        route="/v1/webhook-endpoints/{endpoint_id}/test",
    )
    async with db.transaction(here.pool) as connection:

        async def work() -> Answer:
            row = await _find(request, connection, sender.tenant_id)
            if row["state"] != "enabled":
                raise Refused(Code.WRONG_STATE, "The endpoint is disabled; enable it first.")
            delivery_id = await webhooks.test(connection, row)
            found = await webhooks.delivery(connection, sender.tenant_id, delivery_id)
            assert found is not None
            return Answer(
                202, json_text(_delivery(found[0])), _delivery_path(delivery_id), delivery_id
            )

        answer = await idempotency.once(
            connection, key, keep_seconds=here.settings.idempotency_seconds, work=work
        )
    headers = {"Location": answer.location}
    if answer.replayed:
        headers["Idempotent-Replayed"] = "true"
    return json_response(answer.body, answer.status, headers)


async def recover_endpoint(request: Request) -> Response:
    """Deliver again what has not arrived since a moment: what was given up, and what happened while
    the endpoint was off. 202 with how many."""
    sender = await caller(request, "webhooks:manage")
    known_parameters(request)
    wanted = parse_body(Recovery, await json_body(request))
    since = wanted.since if wanted.since.tzinfo else wanted.since.replace(tzinfo=UTC)
    async with db.transaction(services(request).pool) as connection:
        row = await _find(request, connection, sender.tenant_id, change=True)
        if row["state"] != "enabled":
            raise Refused(Code.WRONG_STATE, "The endpoint is disabled; enable it first.")
        count = await webhooks.recover(connection, row, since)
    return json_response({"schema_version": SCHEMA_VERSION, "recovered": count}, 202)


async def list_deliveries(request: Request) -> Response:
    """What was sent to an endpoint, newest first. `state` takes several, separated by commas."""

    async def ask(connection: db.Connection, tenant_id: str, page: Page) -> list[db.Row]:
        endpoint = await _find(request, connection, tenant_id)
        return await webhooks.deliveries(
            connection,
            tenant_id,
            endpoint["id"],
            before=page.before,
            states=chosen(request, "state", DeliveryState),
            limit=page.limit + 1,
        )

    return await listed(request, "deliveries:read", ("state",), ask, _delivery)


async def read_delivery(request: Request) -> Response:
    """A delivery with what was sent and every attempt."""
    sender = await caller(request, "deliveries:read")
    known_parameters(request)
    delivery_id = path_id(request, ids.DELIVERY, "delivery_id")
    async with db.acquire(services(request).pool) as connection:
        found = await webhooks.delivery(connection, sender.tenant_id, delivery_id)
    if found is None:
        raise Refused(Code.NOT_FOUND)
    row, attempts = found
    body = _delivery(row) | {
        "url": row["called"],
        "body": row["body"] and row["body"].decode(),
        "attempts": [_attempt(a) for a in attempts],
    }
    return json_response(body, 200, {"Cache-Control": "private, no-store"})


async def redeliver(request: Request) -> Response:
    """Send a delivery again now, under the same `webhook-id`."""
    sender = await caller(request, "webhooks:manage")
    known_parameters(request)
    delivery_id = path_id(request, ids.DELIVERY, "delivery_id")
    async with db.transaction(services(request).pool) as connection:
        if await webhooks.delivery(connection, sender.tenant_id, delivery_id) is None:
            raise Refused(Code.NOT_FOUND)
        if not await webhooks.redeliver(connection, sender.tenant_id, delivery_id):
            raise Refused(
                Code.WRONG_STATE, "Its endpoint is disabled or deleted, or it is on its way."
            )
        found = await webhooks.delivery(connection, sender.tenant_id, delivery_id)
        assert found is not None
    return json_response(_delivery(found[0]), 202, {"Location": _delivery_path(delivery_id)})


async def _find(
    request: Request, connection: db.Connection, tenant_id: str, *, change: bool = False
) -> db.Row:
    endpoint_id = path_id(request, ids.ENDPOINT, "endpoint_id")
    row = await webhooks.endpoint(connection, tenant_id, endpoint_id, change=change)
    if row is None:
        raise Refused(Code.NOT_FOUND)
    return row


def _endpoint(row: db.Row) -> Response:
    return json_response(
        _shown(row), 200, {"ETag": _etag(row), "Cache-Control": "private, no-cache"}
    )


def _etag(row: db.Row) -> str:
    return f'W/"{row["version"]}"'


def _shown(row: db.Row) -> dict[str, Any]:
    path = _path(row["id"])
    return {
        "schema_version": SCHEMA_VERSION,
        "id": ids.encode(ids.ENDPOINT, row["id"]),
        "url": row["url"],
        "description": row["description"],
        "types": row["types"],
        "payload": row["payload"],
        "payload_version": row["payload_version"],
        "signing": row["signing"],
        "state": row["state"],
        "reason": row["reason"],
        "failures": row["failures"],
        "failing_since": iso_time(row["failing_since"]),
        "paused_until": iso_time(row["open_until"]),
        "created_at": iso_time(row["created_at"]),
        "updated_at": iso_time(row["changed_at"]),
        "links": {"self": path, "deliveries": f"{path}/deliveries"},
    }


def _delivery(row: db.Row) -> dict[str, Any]:
    pending = row["state"] == DeliveryState.PENDING
    return {
        "schema_version": SCHEMA_VERSION,
        "id": ids.encode(ids.DELIVERY, row["id"]),
        "endpoint_id": ids.encode(ids.ENDPOINT, row["endpoint_id"]),
        "event_id": ids.encode(ids.EVENT, row["event_id"]),
        "type": row["type"],
        "state": row["state"],
        "reason": row["reason"],
        "attempt": row["attempt"],
        "status": row["status"],
        "next_attempt_at": iso_time(row["due_at"]) if pending else None,
        "created_at": iso_time(row["created_at"]),
        "finished_at": iso_time(row["finished_at"]),
    }


def _attempt(row: db.Row) -> dict[str, Any]:
    response = row["response"]
    # The address that was called is for operators, who read the table.
    timings = {name: value for name, value in row["timings"].items() if name != "address"}
    return {
        "attempt": row["attempt"],
        "at": iso_time(row["at"]),
        "duration_ms": row["duration_ms"],
        "timings": timings,
        "status": row["status"],
        "response": None if response is None else response.decode("utf-8", "replace"),
        "failure": row["failure"],
    }


def _path(endpoint_id: UUID) -> str:
    return f"/v1/webhook-endpoints/{ids.encode(ids.ENDPOINT, endpoint_id)}"


def _delivery_path(delivery_id: UUID) -> str:
    return f"/v1/deliveries/{ids.encode(ids.DELIVERY, delivery_id)}"

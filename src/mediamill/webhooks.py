"""Webhooks in the Standard Webhooks format: endpoints, deliveries, and the courier that sends them.

A delivery is a row that is written with its event (see the schema). Here it is claimed by endpoint,
so that one that hangs holds few slots and no other waits behind it; signed; sent through the
guarded way out; and recorded. A courier that dies after sending sends again under the same id.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal
from uuid import UUID

import asyncpg
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mediamill import db, events, failpoints, ids
from mediamill.config import Settings
from mediamill.egress import Caps, Egress, Policy, Timings, Unreachable
from mediamill.failures import Code, Failure, Refused
from mediamill.sealing import CannotOpen, Vault
from mediamill.states import DeliveryState, EndpointState

log = structlog.get_logger()

_SQL: Final = db.load("webhooks")

BODY_BYTES: Final = 64 << 10
"""A larger payload is sent thin, with `truncated`."""
_EXCERPT_BYTES: Final = 4096
_IN_FLIGHT: Final = 2
_POLL_SECONDS: Final = 0.25
_GATHER_SECONDS: Final = 0.02
_BREAKER_MOST_SECONDS: Final = 3600.0
_RETRY_AFTER_MOST_SECONDS: Final = 86400
_WORN_OUT_FAILURES: Final = 20
_JITTER: Final = 0.2
_HMAC_BYTES: Final = 32
_LATER: Final = frozenset({429, 503})
_GONE: Final = 410

Signing = Literal["hmac", "ed25519"]
Payload = Literal["full", "thin"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """An endpoint as it is asked for."""

    url: str
    description: str | None = None
    types: list[str] | None = None
    payload: Payload = "full"
    payload_version: int = events.PAYLOAD_VERSIONS[-1]
    signing: Signing = "hmac"


def new_secret(signing: Signing) -> bytes:
    """The bytes of a fresh secret: an HMAC key, or the private half of an ed25519 pair."""
    if signing == "hmac":
        return secrets.token_bytes(_HMAC_BYTES)
    return Ed25519PrivateKey.generate().private_bytes_raw()


def shown_secret(signing: Signing, value: bytes) -> str:
    """What the receiver needs to check signatures: `whsec_…`, or the public key `whpk_…`."""
    if signing == "hmac":
        return f"whsec_{base64.b64encode(value).decode()}"
    public = Ed25519PrivateKey.from_private_bytes(value).public_key().public_bytes_raw()
    return f"whpk_{base64.b64encode(public).decode()}"


def read_secret(text: str) -> bytes:
    """An HMAC secret that the client brings, `whsec_` and 24 to 64 bytes in base64. Raises
    ValueError."""
    fault = ValueError("must read whsec_ and 24 to 64 bytes in base64")
    try:
        value = base64.b64decode(text.removeprefix("whsec_"), validate=True)
    except ValueError:
        raise fault from None
    if not text.startswith("whsec_") or not 24 <= len(value) <= 64:
        raise fault
    return value


def sign(
    signing: Signing, keys: Iterable[bytes], *, message_id: str, timestamp: int, body: bytes
) -> dict[str, str]:
    """The three headers of Standard Webhooks; one signature for each key that is valid now."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    if signing == "hmac":
        marks = [("v1", hmac.new(key, signed, hashlib.sha256).digest()) for key in keys]
    else:
        marks = [("v1a", Ed25519PrivateKey.from_private_bytes(key).sign(signed)) for key in keys]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(
            f"{version},{base64.b64encode(mark).decode()}" for version, mark in marks
        ),
    }


def encoded(body: dict[str, Any]) -> bytes:
    """The bytes that are signed, sent and kept."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def composed(row: db.Row, *, payload: Payload, version: int) -> bytes:
    """The body of an event for an endpoint; too large a one is sent thin."""
    body = encoded(events.shown(row, version=version, thin=payload == "thin"))
    if len(body) <= BODY_BYTES:
        return body
    thin = events.shown(row, version=version, thin=True)
    thin["data"]["truncated"] = True
    return encoded(thin)


# Endpoints.


async def origin(egress: Egress, url: str, *, pointer: str = "/url") -> str:
    """The origin of an address that may be called now. Raises Refused."""
    try:
        return (await egress.check(url)).origin
    except Failure as error:
        detail = error.problem.detail
        raise Refused(
            Code.SOURCE_NOT_ALLOWED, detail, errors=[{"pointer": pointer, "detail": detail}]
        ) from None


async def add(
    connection: db.Connection,
    tenant_id: str,
    wanted: Wanted,
    *,
    origin: str,
    secret: bytes | None = None,
    most: int,
    vault: Vault,
) -> tuple[db.Row, bytes]:
    """Register an endpoint of a checked origin; the row and its secret. Raises Refused when there
    are `most` already."""
    if await connection.fetchval(_SQL.endpoint_count, tenant_id) >= most:
        raise Refused(
            Code.RESOURCE_LIMIT,
            f"At most {most} endpoints.",
            limit={"name": "endpoints", "allowed": most, "seen": most + 1, "unit": "endpoints"},
        )
    value, endpoint_id = secret or new_secret(wanted.signing), ids.new()
    row = await connection.fetchrow(
        _SQL.add_endpoint,
        tenant_id,
        endpoint_id,
        wanted.url,
        origin,
        wanted.description,
        wanted.types,
        wanted.payload,
        wanted.payload_version,
        wanted.signing,
        vault.seal(value, about=endpoint_id.bytes),
    )
    assert row is not None
    return row, value


async def endpoints(
    connection: db.Connection, tenant_id: str, *, before: UUID | None, limit: int
) -> list[db.Row]:
    return await connection.fetch(_SQL.endpoints, tenant_id, before, limit)


async def endpoint(
    connection: db.Connection, tenant_id: str, endpoint_id: UUID, *, change: bool = False
) -> db.Row | None:
    """An endpoint; with `change` nobody else changes it until the transaction ends."""
    statement = _SQL.endpoint_for_change if change else _SQL.endpoint
    return await connection.fetchrow(statement, tenant_id, endpoint_id)


async def change(connection: db.Connection, before: db.Row, changes: dict[str, Any]) -> db.Row:
    """Change some of url (with its origin), description, types, payload, payload_version and state.
    Switching off ends what was still pending; it can be recovered."""
    now = {name: changes.get(name, before[name]) for name in _CHANGEABLE}
    reason = before["reason"]
    if now["state"] != before["state"]:
        reason = "by its owner" if now["state"] == EndpointState.DISABLED else None
    row = await connection.fetchrow(
        _SQL.change_endpoint,
        before["tenant_id"],
        before["id"],
        now["url"],
        now["origin"],
        now["description"],
        now["types"],
        now["payload"],
        now["payload_version"],
        now["state"],
        reason,
    )
    assert row is not None
    if now["state"] == EndpointState.DISABLED and before["state"] == EndpointState.ENABLED:
        await _end_pending(connection, row, DeliveryState.EXHAUSTED, "the endpoint is disabled")
    return row


_CHANGEABLE: Final = (
    "url",
    "origin",
    "description",
    "types",
    "payload",
    "payload_version",
    "state",
)


async def delete(connection: db.Connection, row: db.Row) -> None:
    """Forget an endpoint; what was pending for it is canceled."""
    await connection.fetchrow(
        _SQL.change_endpoint,
        row["tenant_id"],
        row["id"],
        row["url"],
        row["origin"],
        row["description"],
        row["types"],
        row["payload"],
        row["payload_version"],
        EndpointState.DELETED,
        "deleted",
    )
    await _end_pending(connection, row, DeliveryState.CANCELED, "the endpoint was deleted")


async def _end_pending(
    connection: db.Connection, row: db.Row, state: DeliveryState, reason: str
) -> None:
    await connection.execute(_SQL.end_pending, row["tenant_id"], row["id"], state, reason)


async def rotate(
    connection: db.Connection,
    row: db.Row,
    *,
    overlap_seconds: float,
    secret: bytes | None = None,
    vault: Vault,
) -> bytes:
    """A new secret; the old ones sign beside it for the overlap."""
    value = secret or new_secret(row["signing"])
    await connection.execute(
        _SQL.rotate,
        row["tenant_id"],
        row["id"],
        vault.seal(value, about=row["id"].bytes),
        timedelta(seconds=overlap_seconds),
    )
    return value


async def secrets_of(connection: db.Connection, row: db.Row) -> list[db.Row]:
    """The secrets that sign now, the newest first, as they are kept."""
    return await connection.fetch(_SQL.secrets, row["tenant_id"], row["id"])


async def test(connection: db.Connection, row: db.Row) -> UUID:
    """Send a test event to one endpoint; the id of its delivery."""
    delivery_id: UUID = await connection.fetchval(
        _SQL.test_event, row["tenant_id"], row["id"], ids.encode(ids.ENDPOINT, row["id"])
    )
    return delivery_id


async def call_back(
    connection: db.Connection, tenant_id: str, subject_id: UUID, url: str, *, origin: str
) -> None:
    """Tell the events of one media or job to `url` as well. Raises Refused unless an enabled
    endpoint of the tenant has the same origin; that endpoint signs."""
    endpoint_id = await connection.fetchval(_SQL.callback_endpoint, tenant_id, origin)
    if endpoint_id is None:
        raise Refused(
            Code.SOURCE_NOT_ALLOWED,
            f"No enabled webhook endpoint has the origin {origin}; register one first.",
            errors=[{"pointer": "/callback_url", "detail": "is of no registered origin"}],
        )
    await connection.execute(_SQL.add_callback, tenant_id, subject_id, endpoint_id, url)


# Deliveries.


async def deliveries(
    connection: db.Connection,
    tenant_id: str,
    endpoint_id: UUID,
    *,
    before: UUID | None,
    states: Sequence[str] | None,
    limit: int,
) -> list[db.Row]:
    return await connection.fetch(_SQL.deliveries, tenant_id, endpoint_id, before, states, limit)


async def delivery(
    connection: db.Connection, tenant_id: str, delivery_id: UUID
) -> tuple[db.Row, list[db.Row]] | None:
    """A delivery with its attempts."""
    row = await connection.fetchrow(_SQL.delivery, tenant_id, delivery_id)
    if row is None:
        return None
    return row, await connection.fetch(_SQL.delivery_attempts, tenant_id, delivery_id)


async def redeliver(connection: db.Connection, tenant_id: str, delivery_id: UUID) -> bool:
    """Send a delivery again now, under the same event id; False while its endpoint is off or it is
    on its way."""
    return await connection.fetchval(_SQL.redeliver, tenant_id, delivery_id) is not None


async def recover(connection: db.Connection, row: db.Row, since: datetime) -> int:
    """Deliver again what did not arrive since a moment, and what was not even noted while the
    endpoint was off; how many that is."""
    old = await connection.fetch(_SQL.recover_old, row["tenant_id"], row["id"], since)
    missed = await connection.fetch(_SQL.recover_missed, row["tenant_id"], row["id"], since)
    return len(old) + len(missed)


# Sending.


@dataclass(frozen=True, slots=True)
class Parcel:
    """A claimed delivery, ready to be sent."""

    tenant_id: str
    id: UUID
    endpoint_id: UUID
    event_id: UUID
    attempt: int
    tried: int
    """Attempts since it was last asked for, this one included."""
    url: str
    signing: Signing
    secrets: tuple[bytes, ...]
    """As they are kept."""
    body: bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an attempt."""

    duration_ms: float
    timings: dict[str, Any]
    status: int | None = None
    response: bytes | None = None
    failure: str | None = None
    retry_after: float | None = None

    @property
    def good(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a delivery and its endpoint after an attempt. `delay_seconds` is before the
    next one, `shut_seconds` before anything is sent to the endpoint."""

    state: DeliveryState
    delay_seconds: float = 0.0
    reason: str | None = None
    record: Literal["good", "bad", "later"] = "bad"
    shut_seconds: float | None = None
    disable: str | None = None


def decide(outcome: Outcome, *, tried: int, schedule: Sequence[float], spread: float) -> Decision:
    """Pure: what an attempt's outcome means. `spread` is a number from -1 to 1."""
    if outcome.good:
        return Decision(DeliveryState.DELIVERED, record="good")
    if outcome.status == _GONE:
        return Decision(DeliveryState.EXHAUSTED, reason="gone", disable="it answered 410 Gone")
    later = outcome.status in _LATER
    record: Literal["bad", "later"] = "later" if later else "bad"
    why = outcome.failure or f"answered {outcome.status}"
    if tried > len(schedule):
        return Decision(DeliveryState.EXHAUSTED, reason=why, record=record)
    pause = schedule[tried - 1] * (1 + _JITTER * spread)
    asked = outcome.retry_after
    return Decision(
        DeliveryState.PENDING,
        delay_seconds=max(pause, asked or 0.0),
        reason=why,
        record=record,
        shut_seconds=asked if later else None,
    )


class Courier:
    """Delivers what is due, `slots` at a time, until it is told to stop."""

    def __init__(
        self,
        settings: Settings,
        pool: db.Pool,
        *,
        name: str,
        slots: int,
        egress: Egress | None = None,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._name = name
        self._slots = slots
        self._egress = egress or Egress(Policy.of(settings))
        self._flying: dict[asyncio.Task[None], str] = {}
        self._landed = asyncio.Event()
        self._caps = Caps(
            total_seconds=settings.webhook_timeout_seconds,
            first_byte_seconds=min(10.0, settings.webhook_timeout_seconds),
        )
        self._lease = 2 * settings.webhook_timeout_seconds
        self._vault = Vault.of(settings)

    async def run(self) -> None:
        """Deliver until canceled; what is on its way then is canceled too and sent again by
        another."""
        try:
            while True:
                try:
                    taken = await self.once()
                except (db.Unavailable, asyncpg.PostgresError, OSError) as error:
                    log.warning("delivery_claim_failed", error=type(error).__name__)
                    taken = 0
                await self._pause(full=len(self._flying) >= self._slots, busy=taken > 0)
        finally:
            for task in self._flying:
                task.cancel()
            await asyncio.gather(*self._flying, return_exceptions=True)
            self._egress.close()

    async def _pause(self, *, full: bool, busy: bool) -> None:
        """Until a slot is free, or for the time between two looks."""
        self._landed.clear()
        if full:
            await self._landed.wait()
        if busy:  # a claim for many costs as much as one for one
            await asyncio.sleep(_GATHER_SECONDS)
        elif not full:
            try:
                async with asyncio.timeout(_POLL_SECONDS):
                    await self._landed.wait()
            except TimeoutError:
                pass

    async def settle(self) -> None:
        """Wait for what is on its way."""
        while self._flying:
            await asyncio.wait(self._flying)

    async def once(self) -> int:
        """Claim for the free slots and send; how many were claimed."""
        free = self._slots - len(self._flying)
        async with db.acquire(self._pool) as connection:
            if free <= 0 or not await connection.fetchval(_SQL.any_due):
                return 0
        parcels = await self._claim(free)
        for parcel in parcels:
            task = asyncio.create_task(self._deliver(parcel))
            self._flying[task] = parcel.tenant_id
            task.add_done_callback(self._ended)
        return len(parcels)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._flying.pop(task, None)
        self._landed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("delivery_failed", exc_info=error)

    async def _claim(self, free: int) -> list[Parcel]:
        flying = Counter(self._flying.values())
        async with db.transaction(self._pool) as connection:
            await connection.execute(_SQL.lazily)
            await connection.execute(_SQL.lock_claims)
            rows = await connection.fetch(
                _SQL.claim,
                free,
                _IN_FLIGHT,
                timedelta(seconds=self._lease),
                self._settings.webhook_breaker_failures,
                max(1, self._slots // 4),
                list(flying),
                list(flying.values()),
                max(1, self._slots - self._slots // 4),
            )
            told = {r["id"]: r for r in await events.told(connection, [r["event"] for r in rows])}
            bodies = {row["id"]: row["body"] for row in rows}
            fresh = [row for row in rows if row["body"] is None and row["event"] in told]
            for row in fresh:
                bodies[row["id"]] = composed(
                    told[row["event"]], payload=row["payload"], version=row["payload_version"]
                )
            if fresh:
                await connection.execute(
                    _SQL.keep_body,
                    [row["tenant_id"] for row in fresh],
                    [row["id"] for row in fresh],
                    [bodies[row["id"]] for row in fresh],
                )
        return [
            Parcel(
                tenant_id=row["tenant_id"],
                id=row["id"],
                endpoint_id=row["endpoint_id"],
                event_id=row["event_id"],
                attempt=row["attempt"],
                tried=row["tried"],
                url=row["url"],
                signing=row["signing"],
                secrets=tuple(row["secrets"] or ()),
                body=bodies[row["id"]] or b"{}",
            )
            for row in rows
        ]

    async def _deliver(self, parcel: Parcel) -> None:
        outcome = await self._send(parcel)
        failpoints.hit("webhook.sent")
        decision = decide(
            outcome,
            tried=parcel.tried,
            schedule=self._settings.webhook_schedule_seconds,
            spread=random.uniform(-1, 1),  # noqa: S311
        )
        # Past the lease another courier has it; until then an outage is waited for.
        await db.outlast(
            lambda: self._record(parcel, outcome, decision),
            seconds=self._settings.webhook_timeout_seconds,
        )

    async def _send(self, parcel: Parcel) -> Outcome:
        begun = asyncio.get_running_loop().time()
        timings = Timings()
        try:
            signing_keys = [
                self._vault.open(kept, about=parcel.endpoint_id.bytes) for kept in parcel.secrets
            ]
        except CannotOpen as error:
            # Its turn comes again: another process may have the key, or this one at its next start.
            log.error("webhook_secret_sealed", endpoint=str(parcel.endpoint_id), reason=str(error))
            return Outcome(duration_ms=0.0, timings={}, failure=f"internal: secret {error}")
        headers = {
            "content-type": "application/json",
            **sign(
                parcel.signing,
                signing_keys,
                message_id=ids.encode(ids.EVENT, parcel.event_id),
                timestamp=int(time.time()),
                body=parcel.body,
            ),
        }
        status, response, failure, retry_after = None, None, None, None
        try:
            async with self._egress.call(
                "POST",
                parcel.url,
                headers=headers,
                body=parcel.body,
                caps=self._caps,
                timings=timings,
            ) as reply:
                status = reply.status
                retry_after = _seconds(reply.headers.get("retry-after"))
                response = await reply.excerpt(_EXCERPT_BYTES)
        except Unreachable as error:
            # The status has arrived, and with it all that counts; the rest of the answer has not.
            failure = f"{error.kind}: {error.problem.detail}"
        except Failure as error:
            failure = f"{error.code.code}: {error.problem.detail}"
        return Outcome(
            duration_ms=round((asyncio.get_running_loop().time() - begun) * 1000, 3),
            timings={
                "dns_ms": timings.dns_ms,
                "connect_ms": timings.connect_ms,
                "tls_ms": timings.tls_ms,
                "first_byte_ms": timings.first_byte_ms,
                "address": timings.address,
            },
            status=status,
            response=response,
            failure=failure if status is None else None,
            retry_after=retry_after,
        )

    async def _record(self, parcel: Parcel, outcome: Outcome, decision: Decision) -> None:
        settings = self._settings
        async with db.transaction(self._pool) as connection:
            await connection.execute(_SQL.lazily)
            row = await connection.fetchrow(
                _SQL.record,
                parcel.tenant_id,
                parcel.id,
                parcel.attempt,
                decision.state,
                timedelta(seconds=decision.delay_seconds),
                decision.reason,
                self._name,
                outcome.duration_ms,
                outcome.timings,
                outcome.status,
                outcome.response,
                outcome.failure,
                decision.record,
                None if decision.shut_seconds is None else timedelta(seconds=decision.shut_seconds),
                settings.webhook_breaker_failures,
                timedelta(seconds=settings.webhook_breaker_seconds),
                timedelta(seconds=_BREAKER_MOST_SECONDS),
                timedelta(seconds=settings.webhook_disable_seconds),
                _WORN_OUT_FAILURES,
            )
            if row is None:  # another courier has it by now
                return
            reason = decision.disable or (
                "it has not answered with success for too long" if row["worn_out"] else None
            )
            if reason is not None:
                await self._disable(connection, parcel, reason)

    async def _disable(self, connection: db.Connection, parcel: Parcel, reason: str) -> None:
        if not await connection.fetchval(
            _SQL.disable, parcel.tenant_id, parcel.endpoint_id, reason
        ):
            return
        await connection.execute(
            _SQL.end_pending,
            parcel.tenant_id,
            parcel.endpoint_id,
            DeliveryState.EXHAUSTED,
            "the endpoint is disabled",
        )
        public = ids.encode(ids.ENDPOINT, parcel.endpoint_id)
        await connection.execute(_SQL.announce_disabled, parcel.tenant_id, public, reason)
        log.warning("endpoint_disabled", endpoint=public, reason=reason)


def _seconds(text: str | None) -> float | None:
    """Retry-After in seconds, at most a day; a date is not taken."""
    if text is None or not text.strip().isdigit() or len(text) > 12:
        return None
    return float(min(int(text), _RETRY_AFTER_MOST_SECONDS))


async def figures(connection: db.Connection) -> db.Row:
    """Pending deliveries, the age of the oldest, endpoints by state."""
    row = await connection.fetchrow(_SQL.figures)
    assert row is not None
    return row

"""The log of events: what each one says, and following it live without missing any.

Events are numbered when they are written and become visible when their transaction commits, so a
higher number may be seen before a lower one. A follower therefore stops before a gap until every
transaction that could still fill it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC
from typing import Any, Final
from uuid import UUID

import asyncpg
import structlog

from mediamill import db, ids
from mediamill.failures import BY_NAME, Problem
from mediamill.states import JOB_TERMINAL, MEDIA_TERMINAL

log = structlog.get_logger()

_SQL: Final = db.load("events")

PAYLOAD_VERSIONS: Final = (1,)
"""Versions of the payload that can be told, the newest last. Golden files hold each for ever."""

TYPES: Final[dict[str, str]] = {
    "media.uploaded": "The original is stored, verified and accepted.",
    "media.queued": "Its main job waits for a worker; `reason` says why, if it did before.",
    "media.processing": "A worker has begun.",
    "media.preview": "The placeholder, dimensions and dominant colour are known.",
    "media.ready": "Every variant of `variants` exists, is verified and can be fetched.",
    "media.failed": "It ended without a result; `error` says why.",
    "media.expired": "The upload slot closed before the bytes came.",
    "media.deleted": "It was deleted; its bytes are being removed.",
    "variant.ready": "A stage of the recipe is published while the rest is still at work.",
    "job.queued": "A job waits for a worker.",
    "job.processing": "An attempt has begun.",
    "job.completed": "Its result is stored.",
    "job.failed": "It ended without a result.",
    "job.canceled": "It was canceled.",
    "job.dead_lettered": "Its attempts are used up; it can be replayed.",
    "endpoint.disabled": "A webhook endpoint was switched off; `reason` says why.",
    "webhook.test": "Sent on request, to see whether an endpoint works.",
}
"""Every type of event, and when it happens."""

ENDS_MEDIA: Final = frozenset({*(f"media.{s}" for s in MEDIA_TERMINAL), "media.deleted"})
ENDS_JOB: Final = frozenset(f"job.{s}" for s in JOB_TERMINAL)

_BATCH: Final = 1000
_POLL_SECONDS: Final = 0.2
_IDLE_POLL_SECONDS: Final = 1.0
_BACKLOG: Final = 100


def shown(row: db.Row, *, version: int = 1, thin: bool = False) -> dict[str, Any]:
    """An event as SSE and webhooks tell it. `row` is one of `told`; `version` is one of
    PAYLOAD_VERSIONS."""
    assert version in PAYLOAD_VERSIONS
    said: dict[str, Any] = row["data"] or {}
    data: dict[str, Any] = {
        "media_id": row["media_id"] and ids.encode(ids.MEDIA, row["media_id"]),
        "job_id": row["job_id"] and ids.encode(ids.JOB, row["job_id"]),
        "sequence": row["id"],
        **{name: said[name] for name in ("state", "reason", "endpoint") if name in said},
    }
    if not thin:
        if "error" in said:
            data["error"] = _error(said["error"])
        if "preview" in said:
            data["preview"] = said["preview"]
        if row["type"].startswith("media.") and row["media_state"] is not None:
            data |= {name: row[name] for name in _MEDIA_FACTS}
        if row["variants"] is not None:
            data["variants"] = row["variants"]
    return {
        "type": row["type"],
        "timestamp": row["at"].astimezone(UTC).isoformat().replace("+00:00", "Z"),
        "schema_version": version,
        "id": ids.encode(ids.EVENT, row["event_id"]),
        "data": data,
    }


_MEDIA_FACTS: Final = (
    "kind",
    "recipe",
    "recipe_version",
    "generation",
    "metadata",
    "size",
    "width",
    "height",
    "duration_seconds",
)


def _error(stored: dict[str, Any]) -> dict[str, Any]:
    """A stored failure in today's words."""
    code = BY_NAME.get(stored.get("code", ""))
    if code is None:
        return stored
    return Problem(code, stored.get("detail", ""), stored.get("limit")).as_dict()


async def told(connection: db.Connection, numbers: Sequence[int]) -> list[db.Row]:
    """These events, in order, with what `shown` needs."""
    return await connection.fetch(_SQL.told, list(numbers))


@dataclass(frozen=True, slots=True)
class Topic:
    """What a subscriber hears of: a media, a job, or all of a tenant."""

    tenant_id: str
    media_id: UUID | None = None
    job_id: UUID | None = None

    def key(self) -> tuple[str, UUID | None]:
        return self.tenant_id, self.media_id or self.job_id


async def since(
    connection: db.Connection, topic: Topic, after: int, upto: int, *, limit: int = 1000
) -> list[int]:
    """Numbers of a topic's events after one number and up to another."""
    if topic.media_id is not None:
        statement, subject = _SQL.of_media, [topic.media_id]
    elif topic.job_id is not None:
        statement, subject = _SQL.of_job, [topic.job_id]
    else:
        statement, subject = _SQL.of_tenant, []
    rows = await connection.fetch(statement, topic.tenant_id, *subject, after, upto, limit)
    return [row["id"] for row in rows]


async def oldest(connection: db.Connection) -> int:
    """The lowest number that is still kept."""
    number: int = await connection.fetchval(_SQL.oldest)
    return number


@dataclass(frozen=True, slots=True)
class Entry:
    """An event in the order of the log."""

    tenant_id: str
    id: int
    type: str
    media_id: UUID | None
    job_id: UUID | None


class Tail:
    """Reads the log from its end on, in order, each event once, none left out."""

    def __init__(self) -> None:
        self.horizon = 0
        """Every event up to here has been read, or will never exist."""
        self._started = False
        self._gap: tuple[int, set[str]] | None = None

    async def start(self, connection: db.Connection, *, after: int | None = None) -> None:
        """Begin after a number; default: after the newest event, once nothing before it can come
        any more."""
        if after is None:
            after = await connection.fetchval(_SQL.newest)
            pending = await _writers(connection)
            while pending:
                await asyncio.sleep(0.02)
                pending &= await _writers(connection)
        assert after is not None
        self.horizon = after
        self._started = True

    async def read(self, connection: db.Connection) -> list[Entry]:
        """What can be said now."""
        assert self._started
        passed = self.horizon
        if self._gap is not None:
            upto, pending = self._gap
            pending &= await _writers(connection)
            if pending:
                self._gap = upto, pending
            else:  # looked at before the rows: whoever was here then is seen below, or undone
                passed, self._gap = upto, None
        rows = await connection.fetch(_SQL.written, self.horizon, _BATCH)
        found: list[Entry] = []
        for row in rows:
            if row["id"] > max(self.horizon + 1, passed):
                if self._gap is None:
                    self._gap = row["id"], await _writers(connection)
                break
            found.append(Entry(**dict(row)))
            self.horizon = row["id"]
        return found


async def _writers(connection: db.Connection) -> set[str]:
    return {row["virtualtransaction"] for row in await connection.fetch(_SQL.writers)}


@dataclass(slots=True, eq=False)
class Subscription:
    """One subscriber's share of the log. Wait for `wake`, then take what came."""

    topic: Topic
    start: int
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    lost: bool = False
    """More came than was taken: what is missing must be read from the log."""
    _waiting: list[Entry] = field(default_factory=list)

    def put(self, entry: Entry) -> None:
        if len(self._waiting) >= _BACKLOG:
            self._waiting.clear()
            self.lost = True
        if not self.lost:
            self._waiting.append(entry)
        self.wake.set()

    def take(self) -> list[Entry]:
        """What came since the last time."""
        found, self._waiting = self._waiting, []
        self.wake.clear()
        return found


class Follower:
    """Follows the log for all subscribers of one process, on one connection at a time.

    It reads only while somebody listens, a few times a second: no event waits longer, and a
    database that is busy is not woken by each of them.
    """

    def __init__(self, pool: db.Pool) -> None:
        self._pool = pool
        self._subscriptions: dict[tuple[str, UUID | None], set[Subscription]] = {}
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._tail = Tail()
        self.count = 0

    async def subscribe(self, topic: Topic) -> Subscription:
        """Hear of every event of a topic after `start`, which is safe to read the log up to."""
        self.count += 1
        try:
            if self._task is None:
                self._task = asyncio.create_task(self._follow())
            await self._ready.wait()
        except asyncio.CancelledError:
            self.count -= 1
            raise
        found = Subscription(topic, self._tail.horizon)
        self._subscriptions.setdefault(topic.key(), set()).add(found)
        return found

    def leave(self, subscription: Subscription) -> None:
        """End a subscription."""
        self.count -= 1
        key = subscription.topic.key()
        others = self._subscriptions.get(key)
        if others is not None:
            others.discard(subscription)
            if not others:
                del self._subscriptions[key]

    @property
    def horizon(self) -> int:
        """The log can be read up to here without missing any."""
        return self._tail.horizon

    def wake_all(self) -> None:
        """Let every subscriber look around, for instance because the process is leaving."""
        for group in self._subscriptions.values():
            for subscription in group:
                subscription.wake.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _follow(self) -> None:
        while True:
            try:
                if not self._ready.is_set():
                    self._tail = Tail()
                    async with db.acquire(self._pool) as connection:
                        await self._tail.start(connection)
                    self._ready.set()
                if self.count == 0:
                    # Nobody listens: forget the place, and begin anew with the next one who does.
                    self._ready.clear()
                    self._task = None
                    return
                async with db.acquire(self._pool) as connection:
                    entries = await self._tail.read(connection)
                for entry in entries:
                    self._hand_out(entry)
                if len(entries) < _BATCH:
                    await asyncio.sleep(_POLL_SECONDS)
            except (db.Unavailable, asyncpg.PostgresError, OSError) as error:
                log.warning("follow_failed", error=type(error).__name__)
                await asyncio.sleep(_IDLE_POLL_SECONDS)

    def _hand_out(self, entry: Entry) -> None:
        for subject in {None, entry.media_id, entry.job_id}:
            for subscription in self._subscriptions.get((entry.tenant_id, subject), ()):
                subscription.put(entry)

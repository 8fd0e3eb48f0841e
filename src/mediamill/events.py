"""The log of events: what each one says, and following it live without missing any.

Events are numbered when they are written and become visible when their transaction commits, so a
higher number may be seen before a lower one. A follower therefore stops before a gap until every
transaction that could still fill it has ended.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
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

PROGRESS: Final = "job.progress"
"""Told to streams of one media or job only, and not kept."""

ENDS_MEDIA: Final = frozenset({*(f"media.{s}" for s in MEDIA_TERMINAL), "media.deleted"})
ENDS_JOB: Final = frozenset(f"job.{s}" for s in JOB_TERMINAL)

_BATCH: Final = 1000
_POLL_SECONDS: Final = 0.2
_AGAIN_SECONDS: Final = 1.0
_START_SECONDS: Final = 10.0
_PROGRESS_SECONDS: Final = 1.0
_REMEMBERED: Final = 10_000
_BACKLOG: Final = 100


def shown(
    row: db.Row | Mapping[str, Any], *, version: int = 1, thin: bool = False
) -> dict[str, Any]:
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
            data |= {"metadata": row["metadata"], "size": row["size"]}
            if row["type"] in _PROBED:
                data |= {name: row[name] for name in _FACTS}
        if row["variants"] is not None:
            data["variants"] = row["variants"]
            data |= {"recipe": row["set_recipe"], "recipe_version": row["set_recipe_version"]}
        if row["type"] in ("media.ready", "job.completed"):
            data["progress"] = 100.0
    return {
        "type": row["type"],
        "timestamp": row["at"].astimezone(UTC).isoformat().replace("+00:00", "Z"),
        "schema_version": version,
        "id": ids.encode(ids.EVENT, row["event_id"]),
        "data": data,
    }


# Only what does not change any more: an event is told as it was, however late.
_PROBED: Final = frozenset({"media.preview", "media.ready"})
_FACTS: Final = ("kind", "width", "height", "duration_seconds")


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
    """An event in the order of the log. Progress has no number: it is not kept."""

    tenant_id: str
    id: int
    type: str
    media_id: UUID | None
    job_id: UUID | None


@dataclass(frozen=True, slots=True)
class Frame:
    """An event as it goes out to a stream, made once for all who hear it."""

    type: str
    data: bytes


def frame(type_: str, body: dict[str, Any], number: int | None = None) -> Frame:
    """One event of a `text/event-stream`. Without a number it cannot be resumed from."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    head = "" if number is None else f"id: {number}\n"
    return Frame(type_, f"{head}event: {type_}\ndata: {text}\n\n".encode())


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
    _waiting: list[Frame] = field(default_factory=list)

    def put(self, heard: Frame) -> None:
        if self._waiting and heard.type == self._waiting[-1].type == PROGRESS:
            self._waiting.pop()
        if len(self._waiting) >= _BACKLOG:
            self._waiting.clear()
            self.lost = True
        if not self.lost:
            self._waiting.append(heard)
        self.wake.set()

    def take(self) -> list[Frame]:
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
        self._progress: dict[UUID, tuple[int, str | None, float | None]] = {}
        self._progress_at = 0.0
        self.count = 0

    async def subscribe(self, topic: Topic) -> Subscription:
        """Hear of every event of a topic after `start`; up to it the log can be read. Raises
        db.Unavailable."""
        self.count += 1
        try:
            if self._task is None:
                self._task = asyncio.create_task(self._follow())
            async with asyncio.timeout(_START_SECONDS):
                await self._ready.wait()
        except TimeoutError:
            self.count -= 1
            raise db.Unavailable("the log of events cannot be read") from None
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

    def wake_all(self) -> None:
        """Let every subscriber look around, for instance because the process is leaving."""
        for group in self._subscriptions.values():
            for subscription in group:
                subscription.wake.set()

    async def close(self) -> None:
        """Stop following."""
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
                    self._progress.clear()
                    self._task = None
                    return
                if not await self._look():
                    await asyncio.sleep(_POLL_SECONDS)
            except (db.Unavailable, asyncpg.PostgresError, OSError) as error:
                log.warning("follow_failed", error=type(error).__name__)
                await asyncio.sleep(_AGAIN_SECONDS)
            except Exception:  # whatever it is, the others who listen must hear what comes next
                log.exception("follow_failed")
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _look(self) -> bool:
        """Read on and hand out; whether there is more to read at once."""
        async with db.acquire(self._pool) as connection:
            entries = await self._tail.read(connection)
            heard = [e for e in entries if any(self._subscriptions.get(k) for k in _keys(e))]
            rows = {row["id"]: row for row in await told(connection, [e.id for e in heard])}
            running = []
            now = asyncio.get_running_loop().time()
            if now - self._progress_at >= _PROGRESS_SECONDS:
                self._progress_at = now
                running = await connection.fetch(_SQL.progress)
        for entry in heard:
            if entry.id in rows:  # else its tenant was told to forget it
                made = frame(entry.type, shown(rows[entry.id]), entry.id)
                for key in _keys(entry):
                    self._hand_out(key, made)
        for row in running:
            self._tell_progress(row)
        return len(entries) >= _BATCH

    def _tell_progress(self, row: db.Row) -> None:
        """To those who watch this job or its media; a tenant's stream has no progress."""
        state = row["attempt"], row["stage"], row["progress"]
        if self._progress.get(row["id"]) == state:
            return
        if len(self._progress) >= _REMEMBERED:
            self._progress.clear()
        self._progress[row["id"]] = state
        keys = [(row["tenant_id"], row["id"])]
        if row["role"] == "main":
            keys.append((row["tenant_id"], row["media_id"]))
        if not any(self._subscriptions.get(key) for key in keys):
            return
        progress = None if row["progress"] is None else round(row["progress"], 1)
        body = {
            "type": PROGRESS,
            "timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            "schema_version": PAYLOAD_VERSIONS[-1],
            "id": None,
            "data": {
                "media_id": row["media_id"] and ids.encode(ids.MEDIA, row["media_id"]),
                "job_id": ids.encode(ids.JOB, row["id"]),
                "stage": row["stage"],
                "progress": progress,
                "attempt": row["attempt"],
                "outputs": row["outputs"] or [],
            },
        }
        made = frame(PROGRESS, body)
        for key in keys:
            self._hand_out(key, made)

    def _hand_out(self, key: tuple[str, UUID | None], made: Frame) -> None:
        for subscription in self._subscriptions.get(key, ()):
            subscription.put(made)


def _keys(entry: Entry) -> list[tuple[str, UUID | None]]:
    """Under which topics an event is heard: its tenant, its media, and, about a job, that job."""
    keys: list[tuple[str, UUID | None]] = [(entry.tenant_id, None)]
    if entry.media_id is not None:
        keys.append((entry.tenant_id, entry.media_id))
    if entry.job_id is not None and entry.type.startswith("job."):
        keys.append((entry.tenant_id, entry.job_id))
    return keys

"""The port to the queue engine, PgQueuer: it hands out tickets and wakes workers, nothing else.

A ticket names a job. It is only a hint: the truth is the job's row. A ticket is taken, the job
claimed and the ticket removed in one transaction, so the engine never holds work that our rows do
not know. Publishing uses the caller's connection, so that a rollback leaves no ticket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import asyncpg
from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver
from pgqueuer.adapters.persistence import qb
from pgqueuer.adapters.persistence.queries import Queries
from pgqueuer.domain.settings import DBSettings, Durability
from pgqueuer.domain.types import Channel

from mediamill import db

# Every name is given here: PgQueuer would otherwise read them from variables such as CHANNEL.
_NAMES: Final = DBSettings(
    prefix="",
    db_schema=None,
    channel=Channel("mediamill_tickets"),
    function="mediamill_ticket_changed",
    statistics_table="mediamill_ticket_statistics",
    queue_status_type="mediamill_ticket_status",
    queue_table="mediamill_tickets",
    queue_table_log="mediamill_ticket_log",
    trigger="mediamill_ticket_changed",
    schedules_table="mediamill_ticket_schedules",
    durability=Durability.durable,
    widen_id=True,
)
CHANNEL: Final = "mediamill_tickets"
TABLE: Final = _NAMES.queue_table
_ENVIRONMENT: Final = qb.QueryBuilderEnvironment(settings=_NAMES)
_QUEUE_SQL: Final = qb.QueryQueueBuilder(settings=_NAMES)
_SCHEDULE_SQL: Final = qb.QuerySchedulerBuilder(settings=_NAMES)
_SQL: Final = db.load("queue")
_WORDS: Final = {
    "{queue}": _NAMES.queue_table,
    "{log}": _NAMES.queue_table_log,
    "{trigger}": _NAMES.trigger,
}


MAX_PRIORITY: Final = 9
"""Priorities run from -9 to 9; a higher one always goes first."""
# The engine orders by one 32-bit number: a band for each priority, within it whose turn it is. Past
# the end of a band, turns are equal and tickets go in the order of their birth.
_BAND: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class Ticket:
    """Says that a job may be claimable. It lies in the open lane of its queue, where every worker
    of the queue finds it, or in a `lane` of its own sort, where it is in nobody's way."""

    queue: str
    tenant_id: str
    job_id: UUID
    priority: int = 0
    turn: int = 0
    lane: str = ""

    @property
    def entrypoint(self) -> str:
        """What the engine calls it."""
        return entrypoint(self.queue, self.lane)

    @property
    def rank(self) -> int:
        """The engine's order: higher goes first."""
        return self.priority * _BAND - min(self.turn, _BAND - 1)

    @property
    def payload(self) -> bytes:
        return payload(self.tenant_id, self.job_id)


def entrypoint(queue: str, lane: str) -> str:
    """The engine's name for a lane of a queue; "" is the open one."""
    return f"{queue}/{lane}" if lane else queue


def payload(tenant_id: str, job_id: UUID) -> bytes:
    """What a ticket holds: `tenant/uuid`; sql/maintenance.sql builds the same."""
    return f"{tenant_id}/{job_id}".encode()


async def install(connection: db.Connection) -> None:
    """Create or upgrade the engine's tables. Run under the migration lock."""
    engine = _engine(connection)
    if await engine.schema_is_installed():
        await engine.apply_upgrade()
    else:
        await engine.install()
    for statement in (
        _SQL.index_payload,
        _SQL.take_function,
        _SQL.ring_for_new,
        _SQL.log_nothing,
        _SQL.log_nothing_at_insert,
        _SQL.vacuum_often,
    ):
        await connection.execute(fill(statement))


async def publish(connection: db.Connection, tickets: Sequence[Ticket]) -> None:
    """Hand over tickets inside the caller's transaction; listening workers wake at its commit."""
    if not tickets:
        return
    await _engine(connection).enqueue(
        [t.entrypoint for t in tickets], [t.payload for t in tickets], [t.rank for t in tickets]
    )


async def used_lanes(
    connection: db.Connection, queues: Iterable[str], lanes: Iterable[str]
) -> list[tuple[str, str]]:
    """Those of the lanes, of these queues, in which tickets lie, as (queue, lane)."""
    pairs = [(name, lane) for name in queues for lane in lanes]
    rows = await connection.fetch(
        fill(_SQL.used_lanes), [p[0] for p in pairs], [p[1] for p in pairs]
    )
    return [(row["queue"], row["lane"]) for row in rows]


async def take(
    connection: db.Connection,
    queues: Iterable[str],
    *,
    most: int | Mapping[str, int],
    lanes: Mapping[tuple[str, str], int] | None = None,
) -> list[Ticket]:
    """Take up to `most` tickets of each of these queues, best first, inside the caller's
    transaction: of the open lane, and of each (queue, lane) in `lanes` up to its number.

    They are gone when it commits and back when it rolls back or the process dies.
    """
    room = {name: most if isinstance(most, int) else most[name] for name in queues}
    places = {(name, ""): n for name, n in room.items()}
    places |= {place: n for place, n in (lanes or {}).items() if place[0] in room}
    rows = await connection.fetch(
        fill(_SQL.take),
        [name for name, _ in places],
        [entrypoint(*place) for place in places],
        [min(n, room[name]) for (name, _), n in places.items()],
        list(room),
        list(room.values()),
    )
    rows.sort(key=lambda row: (-row["priority"], row["id"]))
    tickets = []
    for row in rows:
        name, _, lane = row["entrypoint"].partition("/")
        tenant_id, _, job_id = (row["payload"] or b"").decode().rpartition("/")
        with suppress(ValueError):  # not one of ours: dropped with its row
            tickets.append(Ticket(name, tenant_id, UUID(job_id), lane=lane))
    return tickets


async def waiting(connection: db.Connection) -> dict[str, int]:
    """How many tickets wait, by queue and, where it is not the open one, lane: `queue/lane`."""
    return {r["entrypoint"]: r["tickets"] for r in await connection.fetch(fill(_SQL.waiting))}


class Bell:
    """Rings when new tickets were published, by LISTEN on a connection of its own.

    It is a hint: it may ring for nothing, and it is silent while the connection is down.
    """

    def __init__(self, dsn: str, ring: Callable[[], None]) -> None:
        self._dsn = dsn
        self._ring = ring

    async def run(self) -> None:
        """Listen until canceled; reconnect for ever, and ring after each reconnect."""
        while True:
            with suppress(db.Unavailable, asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                connection = await db.connect(self._dsn, application="mediamill bell")
                try:
                    lost = asyncio.Event()
                    connection.add_termination_listener(lambda _, lost=lost: lost.set())
                    await connection.add_listener(CHANNEL, self._heard)
                    self._ring()
                    await lost.wait()
                finally:
                    connection.terminate()
            await asyncio.sleep(0.5)

    def _heard(self, _connection: Any, _pid: int, _channel: str, message: object) -> None:
        self._ring()


def _engine(connection: db.Connection) -> Queries:
    return Queries(AsyncpgDriver(connection), _ENVIRONMENT, _QUEUE_SQL, _SCHEDULE_SQL)


def fill(statement: str) -> str:
    """A statement of sql/queue.sql with the names of the engine's tables."""
    for word, name in _WORDS.items():
        statement = statement.replace(word, name)
    return statement

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
from datetime import timedelta
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
    """Says that a job may be claimable. `delay_seconds` holds it back."""

    queue: str
    tenant_id: str
    job_id: UUID
    priority: int = 0
    turn: int = 0
    delay_seconds: float = 0.0

    @property
    def rank(self) -> int:
        """The engine's order: higher goes first."""
        return self.priority * _BAND - min(self.turn, _BAND - 1)

    @property
    def payload(self) -> bytes:
        return payload(self.tenant_id, self.job_id)


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
    delays = [timedelta(seconds=t.delay_seconds) if t.delay_seconds > 0 else None for t in tickets]
    await _engine(connection).enqueue(
        [t.queue for t in tickets],
        [t.payload for t in tickets],
        [t.rank for t in tickets],
        delays,
    )


async def take(
    connection: db.Connection, queues: Iterable[str], *, most: int | Mapping[str, int]
) -> list[Ticket]:
    """Take up to `most` due tickets of each of these queues, best first, inside the caller's
    transaction.

    They are gone when it commits and back when it rolls back or the process dies.
    """
    names = list(queues)
    room = [most if isinstance(most, int) else most[name] for name in names]
    rows = await connection.fetch(fill(_SQL.take), names, room)
    rows.sort(key=lambda row: (-row["priority"], row["id"]))
    tickets = []
    for row in rows:
        tenant_id, _, job_id = (row["payload"] or b"").decode().rpartition("/")
        with suppress(ValueError):  # not one of ours: dropped with its row
            tickets.append(Ticket(row["queue"], tenant_id, UUID(job_id)))
    return tickets


async def waiting(connection: db.Connection) -> dict[str, int]:
    """How many tickets wait, by queue."""
    return {r["queue"]: r["tickets"] for r in await connection.fetch(fill(_SQL.waiting))}


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

"""The status store: one function per move of a job, in life order. The row decides, not the caller.

A function that a worker calls names the fence it was given at the claim and raises LeaseLost when
the row no longer carries it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from mediamill import db, ids, queue
from mediamill.failures import Code, LeaseLost, Problem
from mediamill.queue import Ticket

_SQL: Final = db.load("jobs")

# Positions beyond this are told as "more than".
POSITION_CAP: Final = 10_000


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that this process holds, as it was when claimed."""

    tenant_id: str
    id: UUID
    kind: str
    queue: str
    role: str
    schema_version: int
    media_id: UUID | None
    recipe: str | None
    recipe_version: int | None
    generation: int | None
    payload: dict[str, Any]
    attempt: int
    max_attempts: int
    crashes: int
    resource_failures: int
    fence: int
    priority: int
    queued_at: datetime
    started_at: datetime

    @property
    def key(self) -> tuple[UUID, int]:
        """What the lease is held under: the job and this claim's fence."""
        return self.id, self.fence

    @property
    def public_id(self) -> str:
        return ids.encode(ids.JOB, self.id)


@dataclass(frozen=True, slots=True)
class Birth:
    """A job to be created with a media."""

    kind: str
    queue: str
    role: str
    priority: int = 0
    id: UUID = field(default_factory=ids.new)

    def ticket(self, tenant_id: str) -> Ticket:
        return Ticket(self.queue, tenant_id, self.id, self.priority)


@dataclass(frozen=True, slots=True)
class Record:
    """What an attempt leaves behind for a person: the last lines of its tools, and its commands."""

    log_tail: str | None = None
    commands: list[dict[str, Any]] | None = None


NO_RECORD: Final = Record()


async def claim(
    connection: db.Connection,
    tickets: Sequence[Ticket],
    *,
    worker: str,
    lease_seconds: float,
) -> list[Claim]:
    """Claim those jobs of `tickets` that are claimable now; a ticket for any other is worth
    nothing."""
    rows = await connection.fetch(
        _SQL.claim,
        [t.tenant_id for t in tickets],
        [t.job_id for t in tickets],
        worker,
        timedelta(seconds=lease_seconds),
        [t.queue for t in tickets],  # a ticket from before a reroute must not take a slot here
    )
    return [Claim(**dict(row)) for row in rows]


async def renew(
    connection: db.Connection, claims: Sequence[Claim], *, lease_seconds: float
) -> dict[tuple[UUID, int], bool]:
    """Renew all leases of this process; maps what is still held to whether a cancel was asked
    for."""
    rows = await connection.fetch(
        _SQL.renew,
        [c.tenant_id for c in claims],
        [c.id for c in claims],
        [c.fence for c in claims],
        timedelta(seconds=lease_seconds),
    )
    return {(row["id"], row["fence"]): row["cancel_requested"] for row in rows}


async def enter_stage(connection: db.Connection, held: Claim, stage: str) -> None:
    """Log that a stage of the attempt begins. Raises LeaseLost."""
    _held(await connection.fetchval(_SQL.enter_stage, held.tenant_id, held.id, held.fence, stage))


async def advance(connection: db.Connection, held: Claim, stage: str, percent: float) -> None:
    """Show progress (0 to 100), never falling within an attempt. Raises LeaseLost."""
    _held(
        await connection.fetchval(
            _SQL.advance, held.tenant_id, held.id, held.fence, stage, min(max(percent, 0.0), 100.0)
        )
    )


async def complete(
    connection: db.Connection,
    held: Claim,
    result: dict[str, Any],
    *,
    retention_seconds: float,
    record: Record = NO_RECORD,
) -> None:
    """processing → completed. Raises LeaseLost."""
    _held(
        await connection.fetchval(
            _SQL.complete,
            held.tenant_id,
            held.id,
            held.fence,
            result,
            timedelta(seconds=retention_seconds),
            record.log_tail,
            record.commands,
        )
    )


async def fail(
    connection: db.Connection,
    held: Claim,
    problem: Problem,
    *,
    dead_letter: bool,
    retention_seconds: float,
    crash: bool = False,
    resource: bool = False,
    outcome: str = "failed",
    record: Record = NO_RECORD,
) -> None:
    """processing → failed, and its media with it. Raises LeaseLost."""
    _held(
        await connection.fetchval(
            _SQL.fail,
            held.tenant_id,
            held.id,
            held.fence,
            problem.as_dict(),
            dead_letter,
            int(crash),
            int(resource),
            timedelta(seconds=retention_seconds),
            outcome,
            record.log_tail,
            record.commands,
        )
    )


async def requeue(
    connection: db.Connection,
    held: Claim,
    *,
    reason: str,
    outcome: str,
    problem: Problem | None = None,
    delay_seconds: float = 0.0,
    crash: bool = False,
    resource: bool = False,
    give_back_attempt: bool = False,
    to_queue: str | None = None,
    to_kind: str | None = None,
    record: Record = NO_RECORD,
) -> None:
    """processing → queued with a fresh ticket, in the caller's transaction. Raises LeaseLost."""
    row = await connection.fetchrow(
        _SQL.requeue,
        held.tenant_id,
        held.id,
        held.fence,
        problem.as_dict() if problem else None,
        timedelta(seconds=delay_seconds),
        int(crash),
        int(resource),
        int(give_back_attempt),
        to_queue,
        to_kind,
        reason,
        outcome,
        record.log_tail,
        record.commands,
    )
    _held(row)
    assert row is not None
    ticket = Ticket(row["queue"], held.tenant_id, held.id, row["priority"], delay_seconds)
    await queue.publish(connection, [ticket])


async def cancel(
    connection: db.Connection, tenant_id: str, job_id: UUID, *, retention_seconds: float
) -> bool:
    """Cancel a queued job now, or ask the worker that runs it to. False if it had ended before."""
    problem = Problem(Code.CANCELED).as_dict()
    retention = timedelta(seconds=retention_seconds)
    # A job may move between the two statements; each names the state it is for.
    for _ in range(3):
        if await connection.fetchval(_SQL.cancel_queued, tenant_id, job_id, problem, retention):
            return True
        if await connection.fetchval(_SQL.request_cancel, tenant_id, job_id):
            return True
    return False


async def settle_canceled(
    connection: db.Connection,
    held: Claim,
    *,
    retention_seconds: float,
    record: Record = NO_RECORD,
) -> None:
    """processing → canceled, by the worker that held it. Raises LeaseLost."""
    _held(
        await connection.fetchval(
            _SQL.cancel_processing,
            held.tenant_id,
            held.id,
            held.fence,
            Problem(Code.CANCELED).as_dict(),
            timedelta(seconds=retention_seconds),
            record.log_tail,
            record.commands,
        )
    )


async def cancel_of_media(
    connection: db.Connection, tenant_id: str, media_id: UUID, *, retention_seconds: float
) -> None:
    """Cancel every live job of a media."""
    for row in await connection.fetch(_SQL.cancel_of_media, tenant_id, media_id):
        await cancel(connection, tenant_id, row["id"], retention_seconds=retention_seconds)


async def replay(
    connection: db.Connection, tenant_id: str, job_id: UUID, *, generation: int | None
) -> bool:
    """failed → queued with a fresh ticket, attempts from zero and history kept; False if not
    failed."""
    row = await connection.fetchrow(_SQL.replay, tenant_id, job_id, generation)
    if row is not None:
        ticket = Ticket(row["queue"], tenant_id, job_id, row["priority"])
        await queue.publish(connection, [ticket])
    return row is not None


async def get(connection: db.Connection, tenant_id: str, job_id: UUID) -> db.Row | None:
    return await connection.fetchrow(_SQL.get, tenant_id, job_id)


async def attempts(connection: db.Connection, tenant_id: str, job_id: UUID) -> list[db.Row]:
    return await connection.fetch(_SQL.attempts, tenant_id, job_id)


async def position(connection: db.Connection, tenant_id: str, job_id: UUID) -> int:
    """How many jobs of its queue come first, counted up to POSITION_CAP."""
    ahead: int = await connection.fetchval(_SQL.position, tenant_id, job_id, POSITION_CAP)
    return ahead


def _held(row: object) -> None:
    if row is None:
        raise LeaseLost

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
from mediamill.config import QUEUES
from mediamill.failures import Code, LeaseLost, Problem
from mediamill.queue import Ticket

_SQL: Final = db.load("jobs")
_LINE_UP: Final = 500

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
    turn: int
    queued_at: datetime
    started_at: datetime
    parent_id: UUID | None
    timeout_seconds: float | None

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

    def ticket(self, tenant_id: str, turn: int) -> Ticket:
        return Ticket(self.queue, tenant_id, self.id, self.priority, turn)


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job as it is asked for. `delay_seconds` holds it back, `priority` is -9 to 9."""

    kind: str
    payload: dict[str, Any]
    queue: str
    schema_version: int = 1
    priority: int = 0
    delay_seconds: float = 0.0
    max_attempts: int = 5
    timeout_seconds: float | None = None
    dedup_key: str | None = None
    child_key: str | None = None
    weight: float = 1.0
    id: UUID = field(default_factory=ids.new)


@dataclass(frozen=True, slots=True)
class Filter:
    """Which dead letters are meant; None does not restrict."""

    code: str | None = None
    kind: str | None = None
    queue: str | None = None
    since: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """What an attempt leaves behind for a person: the last lines of its tools, and its commands."""

    log_tail: str | None = None
    commands: list[dict[str, Any]] | None = None


NO_RECORD: Final = Record()


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a job that has neither media nor parent."""

    held: Claim
    result: dict[str, Any]
    record: Record = NO_RECORD


async def enqueue(
    connection: db.Connection,
    tenant_id: str,
    wanted: Sequence[NewJob],
    *,
    parent_id: UUID | None = None,
) -> set[UUID]:
    """Create jobs with their tickets, in the caller's transaction; the ids that are new.

    One whose dedup key a live job holds, or that is already there as this child, is left as it is.
    """
    rows = await connection.fetch(
        _SQL.enqueue,
        tenant_id,
        [j.id for j in wanted],
        [j.kind for j in wanted],
        [j.schema_version for j in wanted],
        [j.queue for j in wanted],
        [db.to_json(j.payload) for j in wanted],
        [j.priority for j in wanted],
        [timedelta(seconds=j.delay_seconds) for j in wanted],
        [j.max_attempts for j in wanted],
        [j.timeout_seconds for j in wanted],
        [j.dedup_key for j in wanted],
        [j.child_key for j in wanted],
        [j.weight for j in wanted],
        parent_id,
    )
    held_back = {j.id for j in wanted if j.delay_seconds > 0}
    await queue.publish(
        connection,
        [
            Ticket(r["queue"], tenant_id, r["id"], r["priority"], r["turn"])
            for r in rows
            if r["id"] not in held_back
        ],
    )
    return {row["id"] for row in rows}


async def line_up(connection: db.Connection, queues: Sequence[str]) -> int:
    """Give turns and tickets to the jobs of these queues that held back and are due, in the
    caller's transaction; how many, at most 500 of each queue."""
    rows = await connection.fetch(_SQL.line_up, queues, _LINE_UP)
    await queue.publish(
        connection,
        [Ticket(r["queue"], r["tenant_id"], r["id"], r["priority"], r["turn"]) for r in rows],
    )
    return len(rows)


async def duplicate(
    connection: db.Connection, tenant_id: str, kind: str, dedup_key: str
) -> UUID | None:
    """The live job that holds a dedup key."""
    found: UUID | None = await connection.fetchval(_SQL.duplicate, tenant_id, kind, dedup_key)
    return found


async def claim(
    connection: db.Connection,
    tickets: Sequence[Ticket],
    *,
    worker: str,
    lease_seconds: float,
    kinds: Sequence[tuple[str, int]],
) -> list[Claim]:
    """Claim those jobs of `tickets` that are claimable now and of a kind and version in `kinds`.

    A ticket for a job that is not claimable is worth nothing. One for a job that waits, but is not
    for this worker, is set aside for others.
    """
    rows = await connection.fetch(
        _SQL.claim,
        [t.tenant_id for t in tickets],
        [t.job_id for t in tickets],
        worker,
        timedelta(seconds=lease_seconds),
        [t.queue for t in tickets],  # a ticket from before a reroute must not take a slot here
        [kind for kind, _ in kinds],
        [version for _, version in kinds],
    )
    claims = [Claim(**dict(row)) for row in rows]
    if len(claims) < len(tickets):
        claimed = {c.id for c in claims}
        await set_aside(connection, [t for t in tickets if t.job_id not in claimed])
    return claims


async def set_aside(connection: db.Connection, tickets: Sequence[Ticket]) -> None:
    """Publish again the tickets of jobs that still wait, each in the lane of its sort; the others
    are dropped."""
    rows = await connection.fetch(
        _SQL.unclaimed,
        [t.tenant_id for t in tickets],
        [t.job_id for t in tickets],
        [t.queue for t in tickets],
    )
    await queue.publish(
        connection,
        [
            Ticket(
                r["queue"],
                r["tenant_id"],
                r["id"],
                r["priority"],
                r["turn"],
                lane(r["kind"], r["schema_version"]),
            )
            for r in rows
        ],
    )


def lane(kind: str, version: int) -> str:
    """Where tickets of this sort of job lie aside: of a kind that runs as often as it may, or that
    the worker which met them does not know."""
    return f"{kind}/{version}"


async def running(
    connection: db.Connection, queues: Sequence[str], kinds: Sequence[str]
) -> list[db.Row]:
    """Jobs that hold a slot anywhere in the fleet, by queue and kind, of these queues or kinds."""
    return await connection.fetch(_SQL.running, queues, kinds)


async def lock_cap(connection: db.Connection, name: str) -> None:
    """Until the transaction ends, nobody else counts against this cap."""
    await connection.execute(_SQL.lock_cap, name)


async def kinds_of(connection: db.Connection, tickets: Sequence[Ticket]) -> dict[UUID, str]:
    """The kinds of the waiting jobs behind tickets."""
    rows = await connection.fetch(
        _SQL.kinds_of, [t.tenant_id for t in tickets], [t.job_id for t in tickets]
    )
    return {row["id"]: row["kind"] for row in rows}


@dataclass(frozen=True, slots=True)
class Renewal:
    """A job that is still held. One that is not `renewed` was locked by somebody just then."""

    renewed: bool
    cancel_requested: bool


async def renew(
    connection: db.Connection, claims: Sequence[Claim], *, lease_seconds: float
) -> dict[tuple[UUID, int], Renewal]:
    """Renew all leases of this process, without waiting for locks; what is still held."""
    rows = await connection.fetch(
        _SQL.renew,
        [c.tenant_id for c in claims],
        [c.id for c in claims],
        [c.fence for c in claims],
        timedelta(seconds=lease_seconds),
    )
    return {
        (row["id"], row["fence"]): Renewal(row["renewed"], row["cancel_requested"]) for row in rows
    }


async def enter_stage(connection: db.Connection, held: Claim, stage: str) -> None:
    """Log that a stage of the attempt begins. Raises LeaseLost."""
    _held(await connection.fetchval(_SQL.enter_stage, held.tenant_id, held.id, held.fence, stage))


async def advance(
    connection: db.Connection,
    held: Claim,
    stage: str,
    percent: float,
    detail: dict[str, Any] | None = None,
) -> None:
    """Show progress (0 to 100), never falling within an attempt, and how far its parts are. Raises
    LeaseLost."""
    _held(
        await connection.fetchval(
            _SQL.advance,
            held.tenant_id,
            held.id,
            held.fence,
            stage,
            min(max(percent, 0.0), 100.0),
            detail,
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
    """processing → completed; its parent counts down. Raises LeaseLost."""
    row = await connection.fetchrow(
        _SQL.complete,
        held.tenant_id,
        held.id,
        held.fence,
        result,
        timedelta(seconds=retention_seconds),
        record.log_tail,
        record.commands,
    )
    if row is None:
        raise LeaseLost
    await _child_ended(connection, held.tenant_id, row["parent_id"])


async def complete_many(
    connection: db.Connection, ended: Sequence[Completion], *, retention_seconds: float
) -> set[tuple[UUID, int]]:
    """processing → completed for many in one statement; the keys of those that were still held, and
    that nobody else had locked."""
    rows = await connection.fetch(
        _SQL.complete_many,
        [e.held.tenant_id for e in ended],
        [e.held.id for e in ended],
        [e.held.fence for e in ended],
        [e.result for e in ended],
        timedelta(seconds=retention_seconds),
        [e.record.log_tail for e in ended],
        [e.record.commands for e in ended],
    )
    return {(row["id"], row["fence"]) for row in rows}


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
    """processing → failed; its media and its parent with it. Raises LeaseLost."""
    row = await connection.fetchrow(
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
    if row is None:
        raise LeaseLost
    await _fail_parent(connection, held.tenant_id, row["parent_id"], problem, retention_seconds)


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
    """processing → queued, in the caller's transaction; one that need not hold back gets a ticket
    now, another from `line_up`. Raises LeaseLost."""
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
    if delay_seconds <= 0:
        ticket = Ticket(row["queue"], held.tenant_id, held.id, row["priority"], row["turn"])
        await queue.publish(connection, [ticket])


async def wait(
    connection: db.Connection,
    held: Claim,
    children: Sequence[NewJob],
    *,
    record: Record = NO_RECORD,
) -> None:
    """Suspend a job for its children, in the caller's transaction. Raises LeaseLost.

    Children are named by their `child_key`: those of an earlier run of the same job that completed
    are kept with their results, those that failed start anew, those that were or will be canceled
    are made again, and those that it no longer asks for do not count any more.
    """
    wanted = {c.child_key for c in children}
    known: dict[str | None, db.Row] = {}
    # Locked, so that none can end between being counted here and counting down there.
    for old in await connection.fetch(_SQL.lock_children, held.tenant_id, held.id):
        if old["child_key"] not in wanted or old["canceled"]:
            await connection.execute(_SQL.supersede_child, held.tenant_id, old["id"])
        else:
            known[old["child_key"]] = old
    await enqueue(
        connection,
        held.tenant_id,
        [c for c in children if c.child_key not in known],
        parent_id=held.id,
    )
    pending = 0
    for child in children:
        row = known.get(child.child_key)
        if row is not None and row["state"] == "failed":
            await restart(connection, held.tenant_id, row["id"])
        pending += row is None or row["state"] != "completed"
    _held(
        await connection.fetchval(
            _SQL.wait,
            held.tenant_id,
            held.id,
            held.fence,
            pending,
            record.log_tail,
            record.commands,
        )
    )
    if pending == 0:
        await _join(connection, held.tenant_id, held.id)


async def children_of(connection: db.Connection, tenant_id: str, job_id: UUID) -> list[db.Row]:
    """The children of a job with their states and results, in the order they were asked for."""
    return await connection.fetch(_SQL.children, tenant_id, job_id)


async def cancel(
    connection: db.Connection, tenant_id: str, job_id: UUID, *, retention_seconds: float
) -> bool:
    """Cancel a job that waits now, or ask the worker that runs it to. False if it had ended before.

    Its children follow by the duty that looks for orphans, its parent fails with it.
    """
    problem = Problem(Code.CANCELED)
    retention = timedelta(seconds=retention_seconds)
    # A job may move between the statements; each names the state it is for.
    for _ in range(3):
        row = await connection.fetchrow(
            _SQL.cancel_queued, tenant_id, job_id, problem.as_dict(), retention
        )
        if row is not None:
            await _fail_parent(connection, tenant_id, row["parent_id"], problem, retention_seconds)
            return True
        waiting = await connection.fetchrow(_SQL.waiting_parent, tenant_id, job_id)
        if waiting is not None and await _end_waiting(
            connection,
            tenant_id,
            job_id,
            waiting,
            problem=None,
            retention_seconds=retention_seconds,
        ):
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
    problem = Problem(Code.CANCELED)
    row = await connection.fetchrow(
        _SQL.cancel_processing,
        held.tenant_id,
        held.id,
        held.fence,
        problem.as_dict(),
        timedelta(seconds=retention_seconds),
        record.log_tail,
        record.commands,
    )
    if row is None:
        raise LeaseLost
    await _fail_parent(connection, held.tenant_id, row["parent_id"], problem, retention_seconds)


async def cancel_requested(connection: db.Connection, held: Claim) -> bool:
    """Whether the job should be canceled and not go on; settled until the transaction ends."""
    return bool(
        await connection.fetchval(_SQL.cancel_requested, held.tenant_id, held.id, held.fence)
    )


async def cancel_orphans(connection: db.Connection, *, most: int, retention_seconds: float) -> int:
    """Cancel children whose parent has ended; returns how many."""
    rows = await connection.fetch(_SQL.orphaned_children, most)
    for row in rows:
        await cancel(connection, row["tenant_id"], row["id"], retention_seconds=retention_seconds)
    return len(rows)


async def cancel_of_media(
    connection: db.Connection, tenant_id: str, media_id: UUID, *, retention_seconds: float
) -> None:
    """Cancel every live job of a media."""
    rows = await connection.fetch(_SQL.cancel_of_media, tenant_id, media_id)
    # Parents first: one whose child was canceled would fail.
    for row in sorted(rows, key=lambda row: row["parent_id"] is not None):
        await cancel(connection, tenant_id, row["id"], retention_seconds=retention_seconds)


async def restart(
    connection: db.Connection,
    tenant_id: str,
    job_id: UUID,
    *,
    generation: int | None = None,
    delay_seconds: float = 0.0,
) -> bool:
    """failed → queued, attempts from zero and history kept, with a ticket as for `requeue`; False
    if not failed."""
    row = await connection.fetchrow(
        _SQL.replay, tenant_id, job_id, generation, timedelta(seconds=delay_seconds)
    )
    if row is not None and delay_seconds <= 0:
        ticket = Ticket(row["queue"], tenant_id, job_id, row["priority"], row["turn"])
        await queue.publish(connection, [ticket])
    return row is not None


async def dead_letters(
    connection: db.Connection,
    tenant_id: str,
    wanted: Filter,
    *,
    before: UUID | None = None,
    limit: int,
) -> list[db.Row]:
    """Dead letters, newest first."""
    return await connection.fetch(
        _SQL.dead_letters,
        tenant_id,
        before,
        wanted.code,
        wanted.kind,
        wanted.queue,
        wanted.since,
        wanted.until,
        limit,
    )


async def dead_groups(connection: db.Connection, tenant_id: str) -> list[db.Row]:
    """Dead letters by code, the largest group first."""
    return await connection.fetch(_SQL.dead_groups, tenant_id)


async def figures(
    connection: db.Connection, tenant_id: str, *, back: timedelta, steps: int, most: int
) -> list[db.Row]:
    """What ended lately in so many equal steps, the oldest first; `most` rows of each queue are
    looked at."""
    return await connection.fetch(_SQL.figures, tenant_id, back, list(QUEUES), most, steps)


async def discard(connection: db.Connection, tenant_id: str, job_id: UUID) -> bool:
    """Take a dead letter off the list for good; the job stays failed, its history kept."""
    return bool(await connection.fetchval(_SQL.discard, tenant_id, job_id))


async def list_newest(
    connection: db.Connection,
    tenant_id: str,
    *,
    before: UUID | None,
    limit: int,
    states: Sequence[str] | None = None,
    kind: str | None = None,
    queue_name: str | None = None,
    error_code: str | None = None,
    created_after: datetime | None = None,
    created_before: datetime | None = None,
) -> list[db.Row]:
    """Newest first, below the cursor `before`; a filter that is None does not restrict."""
    first, last = ids.span(created_after, created_before)
    if before is not None:
        last = min(last, UUID(int=before.int - 1))
    return await connection.fetch(
        _SQL.list,
        tenant_id,
        last,
        states,
        kind,
        queue_name,
        error_code,
        created_after,
        created_before,
        limit,
        first,
    )


async def effect(
    connection: db.Connection, tenant_id: str, job_id: UUID, key: str
) -> db.Row | None:
    """What was recorded under this key, if it happened."""
    return await connection.fetchrow(_SQL.effect, tenant_id, job_id, key)


async def record_effect(connection: db.Connection, held: Claim, key: str, result: Any) -> bool:
    """Record that an effect happened; False if it was recorded before. Raises LeaseLost."""
    row = await connection.fetchval(
        _SQL.record_effect, held.tenant_id, held.id, held.fence, key, result
    )
    if row is None and await effect(connection, held.tenant_id, held.id, key) is None:
        raise LeaseLost
    return row is not None


async def still_hold(connection: db.Connection, held: Claim) -> None:
    """Keep the job ours until the transaction ends, which should be at once. Raises LeaseLost."""
    _held(await connection.fetchval(_SQL.still_hold, held.tenant_id, held.id, held.fence))


async def version(connection: db.Connection, tenant_id: str, job_id: UUID) -> db.Row | None:
    """The version of a job and what a waiting client must know: one indexed read."""
    return await connection.fetchrow(_SQL.version, tenant_id, job_id)


async def get(connection: db.Connection, tenant_id: str, job_id: UUID) -> db.Row | None:
    return await connection.fetchrow(_SQL.get, tenant_id, job_id)


async def attempts(connection: db.Connection, tenant_id: str, job_id: UUID) -> list[db.Row]:
    return await connection.fetch(_SQL.attempts, tenant_id, job_id)


async def position(connection: db.Connection, tenant_id: str, job_id: UUID) -> int:
    """How many jobs of its queue come first, counted up to POSITION_CAP."""
    ahead: int = await connection.fetchval(_SQL.position, tenant_id, job_id, POSITION_CAP)
    return ahead


async def attempts_in_full(connection: db.Connection, tenant_id: str, job_id: UUID) -> list[db.Row]:
    """Every attempt with its commands and the last words of its tools, for an operator."""
    return await connection.fetch(_SQL.attempts_in_full, tenant_id, job_id)


async def timeline(connection: db.Connection, tenant_id: str, job_id: UUID) -> list[db.Row]:
    """Every logged move and stage of a job, in order."""
    return await connection.fetch(_SQL.timeline, tenant_id, job_id)


async def _child_ended(connection: db.Connection, tenant_id: str, parent_id: UUID | None) -> None:
    """A child completed: the parent counts down, and the last one queues it to join."""
    if parent_id is None:
        return
    row = await connection.fetchrow(_SQL.child_ended, tenant_id, parent_id)
    if row is not None and row["pending_children"] == 0:
        await _join(connection, tenant_id, parent_id)


async def _join(connection: db.Connection, tenant_id: str, parent_id: UUID) -> None:
    row = await connection.fetchrow(_SQL.join, tenant_id, parent_id)
    if row is not None:
        ticket = Ticket(row["queue"], tenant_id, parent_id, row["priority"], row["turn"])
        await queue.publish(connection, [ticket])


async def _fail_parent(
    connection: db.Connection,
    tenant_id: str,
    parent_id: UUID | None,
    problem: Problem,
    retention_seconds: float,
) -> None:
    """A child failed for good: so does the parent that waits for it, with the child's code, and so
    on upward. Its other children are canceled by the duty that looks for orphans, so that no
    transaction locks a parent and then its children."""
    if parent_id is None:
        return
    waiting = await connection.fetchrow(_SQL.waiting_parent, tenant_id, parent_id)
    if waiting is not None:
        await _end_waiting(
            connection,
            tenant_id,
            parent_id,
            waiting,
            problem=problem,
            retention_seconds=retention_seconds,
        )


async def _end_waiting(
    connection: db.Connection,
    tenant_id: str,
    job_id: UUID,
    waiting: db.Row,
    *,
    problem: Problem | None,
    retention_seconds: float,
) -> bool:
    """End a job that waits for its children, as failed or, without a problem, as canceled."""
    retention = timedelta(seconds=retention_seconds)
    key = tenant_id, job_id, waiting["fence"]
    if problem is None:
        problem = Problem(Code.CANCELED)
        row = await connection.fetchrow(
            _SQL.cancel_processing, *key, problem.as_dict(), retention, None, None
        )
    else:
        row = await connection.fetchrow(
            _SQL.fail, *key, problem.as_dict(), False, 0, 0, retention, "failed", None, None
        )
    if row is not None:
        await _fail_parent(connection, tenant_id, waiting["parent_id"], problem, retention_seconds)
    return row is not None


def _held(row: object) -> None:
    if row is None:
        raise LeaseLost

"""The queue against a small model: whatever two workers, a person and the clock do, in any order.

The real functions run on a real database; the model is a dictionary. Leases never run out by
themselves here: `expire` sets one back, which is the fake clock. At the end of every example the
model is drained, each job must have ended, and the checker of tests/faults reads the history.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import asyncpg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests import rows
from tests.faults import checker

from mediamill import db, jobs, queue
from mediamill.attempt import settle_failure
from mediamill.failures import Code, LeaseLost, Problem
from mediamill.jobs import Claim, NewJob
from mediamill.maintenance import Maintenance

TENANT: Final = "default"
KEEP: Final = 3600.0
KINDS: Final = [("thing", 1)]
MAX_CRASHES: Final = 3
WORKERS: Final = ("ann", "bob")
FAILURES: Final = {
    "transient": Code.STORAGE_UNAVAILABLE,
    "resource": Code.MEMORY_LIMIT,
    "permanent": Code.CORRUPT_INPUT,
}


@dataclass(slots=True)
class Model:
    """A job as it should be."""

    id: UUID
    max_attempts: int
    state: str = "queued"
    attempt: int = 0
    fence: int = 0
    crashes: int = 0
    resource_failures: int = 0
    due: bool = True
    expired: bool = False
    dead_letter: bool = False
    cancel_requested: bool = False
    parent: Model | None = None
    waiting: bool = False
    children: list[Model] = field(default_factory=list)

    @property
    def live(self) -> bool:
        return self.state in ("queued", "processing")

    @property
    def pending(self) -> int:
        return sum(child.live for child in self.children)


class Queue(RuleBasedStateMachine):
    """One example: a fresh database's worth of jobs, and what happens to them."""

    claims: Bundle[Claim] = Bundle("claims")
    dsn = ""
    runner: asyncio.Runner
    connection: db.Connection
    pool: db.Pool
    folder: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[UUID, Model] = {}
        self.now = 0.0
        self.settings = rows.settings(self.folder, lease_seconds=0.2, self_stop_seconds=0.15,
                                      beat_seconds=0.1)  # fmt: skip
        store: Any = None
        self.duties = Maintenance(self.settings, self.pool, store, clock=lambda: self.now)

    def do(self, work: Any) -> Any:
        return self.runner.run(work)

    @initialize()
    def begin(self) -> None:
        self.do(_forget_all(self.connection))

    # --- A client

    @rule(
        count=st.integers(1, 3),
        max_attempts=st.integers(1, 4),
        priority=st.sampled_from([-1, 0, 5]),
    )
    def enqueue(self, count: int, max_attempts: int, priority: int) -> None:
        wanted = [
            NewJob("thing", {}, "default", priority=priority, max_attempts=max_attempts)
            for _ in range(count)
        ]
        made = self.do(jobs.enqueue(self.connection, TENANT, wanted))
        assert made == {w.id for w in wanted}
        for new in wanted:
            self.jobs[new.id] = Model(new.id, max_attempts)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        model = self.any_job(data)
        done = self.do(
            _in_transaction(
                self.connection,
                lambda: jobs.cancel(self.connection, TENANT, model.id, retention_seconds=KEEP),
            )
        )
        assert done == model.live
        if model.state == "processing" and not model.waiting:
            model.cancel_requested = True
        elif model.live:
            self.end(model, "canceled")

    @precondition(lambda self: any(j.state == "failed" for j in self.jobs.values()))
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        model = self.any_job(data, lambda j: j.state == "failed")
        assert self.do(jobs.restart(self.connection, TENANT, model.id))
        model.state, model.attempt, model.crashes, model.resource_failures = "queued", 0, 0, 0
        model.due, model.dead_letter, model.cancel_requested = True, False, False
        if model.parent is not None and not model.parent.live:
            pass  # the duty that looks for orphans will cancel it

    @precondition(lambda self: any(not j.live for j in self.jobs.values()))
    @rule(data=st.data())
    def replay_what_has_not_failed(self, data: st.DataObject) -> None:
        model = self.any_job(data, lambda j: j.state != "failed")
        if model is not None:
            assert not self.do(jobs.restart(self.connection, TENANT, model.id))

    @precondition(lambda self: any(j.dead_letter for j in self.jobs.values()))
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        model = self.any_job(data, lambda j: j.dead_letter)
        assert self.do(jobs.discard(self.connection, TENANT, model.id))
        model.dead_letter = False

    # --- Two workers

    @rule(target=claims, worker=st.sampled_from(WORKERS), most=st.integers(1, 3))
    def claim(self, worker: str, most: int) -> Any:
        claims = self.do(_claim(self.connection, worker, most))
        for held in claims:
            model = self.jobs[held.id]
            assert (model.state, model.due) == ("queued", True), "it was not claimable"
            model.state, model.expired, model.waiting = "processing", False, False
            model.attempt += 1
            model.fence += 1
            assert (held.attempt, held.fence) == (model.attempt, model.fence)
        return multiple(*claims)

    @precondition(lambda self: any(j.state == "processing" for j in self.jobs.values()))
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        """The clock goes past the lease of a job."""
        model = self.any_job(data, lambda j: j.state == "processing" and not j.waiting)
        if model is not None:
            self.do(
                self.connection.execute(
                    "UPDATE jobs SET lease_until = now() - interval '1 s' WHERE id = $1", model.id
                )
            )
            model.expired = True

    @rule(held=st.lists(claims, max_size=4))
    def renew(self, held: list[Claim]) -> None:
        renewed = self.do(jobs.renew(self.connection, held, lease_seconds=KEEP))
        wanted = {h.key for h in held if self.holds(h)}
        assert set(renewed) == wanted
        for key, renewal in renewed.items():
            model = self.jobs[key[0]]
            assert renewal.renewed
            assert renewal.cancel_requested == model.cancel_requested
            model.expired = model.expired and model.waiting

    @rule()
    def rescue(self) -> None:
        expired = [j for j in self.jobs.values() if j.state == "processing" and j.expired]
        self.do(self.duties.once(self.duties.duties[0]))
        for model in expired:
            if model.state != "processing":  # its child's death ended it
                continue
            if model.cancel_requested:
                self.end(model, "canceled")
                continue
            model.crashes += 1
            if model.crashes >= MAX_CRASHES or model.attempt >= model.max_attempts:
                self.end(model, "failed", dead=True)
            else:
                self.requeue(model, due=True)

    @rule(held=consumes(claims))
    def complete(self, held: Claim) -> None:
        if self.settles(
            held, lambda: jobs.complete(self.connection, held, {}, retention_seconds=KEEP)
        ):
            self.end(self.jobs[held.id], "completed")

    @rule(held=consumes(claims), others=st.lists(claims, max_size=3))
    def complete_together(self, held: Claim, others: list[Claim]) -> None:
        """The plainest ends, many in one statement."""
        batch = {h.key: h for h in (held, *others) if self.jobs[h.id].parent is None}
        kept = self.do(
            jobs.complete_many(
                self.connection,
                [jobs.Completion(h, {}) for h in batch.values()],
                retention_seconds=KEEP,
            )
        )
        assert kept == {key for key, h in batch.items() if self.holds(h)}
        for job_id, _ in kept:
            self.end(self.jobs[job_id], "completed")

    @rule(held=consumes(claims), why=st.sampled_from(sorted(FAILURES)))
    def fail(self, held: Claim, why: str) -> None:
        """An attempt fails, and what was asked for meanwhile is respected, as by a worker."""
        model = self.jobs[held.id]
        problem = Problem(FAILURES[why])

        async def settle() -> None:
            if await jobs.cancel_requested(self.connection, held):
                await jobs.settle_canceled(self.connection, held, retention_seconds=KEEP)
            else:
                await settle_failure(self.connection, self.settings, held, problem)

        if not self.settles(held, settle):
            return
        if model.cancel_requested:
            self.end(model, "canceled")
            return
        model.resource_failures += why == "resource"
        if why == "permanent":
            self.end(model, "failed")
        elif model.attempt >= model.max_attempts or model.resource_failures > 1:
            self.end(model, "failed", dead=True)
        else:
            self.requeue(model, due=False)

    @rule(held=consumes(claims))
    def release(self, held: Claim) -> None:
        """Handed back at shutdown: counts nothing."""
        model = self.jobs[held.id]

        async def settle() -> None:
            if await jobs.cancel_requested(self.connection, held):
                await jobs.settle_canceled(self.connection, held, retention_seconds=KEEP)
            else:
                await jobs.requeue(
                    self.connection,
                    held,
                    reason="released",
                    outcome="released",
                    give_back_attempt=True,
                )

        if self.settles(held, settle):
            if model.cancel_requested:
                self.end(model, "canceled")
            else:
                model.attempt -= 1
                self.requeue(model, due=True)

    @rule(held=claims, count=st.integers(0, 3))
    def wait(self, held: Claim, count: int) -> None:
        """It wants so many children first; what an earlier run had completed is kept."""
        model = self.jobs[held.id]
        if self.depth(model) >= 2:
            return
        wanted = [
            NewJob("thing", {}, "default", max_attempts=2, child_key=str(n)) for n in range(count)
        ]

        async def settle() -> None:
            if await jobs.cancel_requested(self.connection, held):
                await jobs.settle_canceled(self.connection, held, retention_seconds=KEEP)
            else:
                await jobs.wait(self.connection, held, wanted)

        if not self.settles(held, settle):
            return
        if model.cancel_requested:
            self.end(model, "canceled")
            return
        model.waiting, model.expired = True, False
        model.fence += 1
        self.adopt(model)
        if model.pending == 0:
            self.join(model)

    @rule()
    def cancel_orphans(self) -> None:
        self.do(
            _in_transaction(
                self.connection,
                lambda: jobs.cancel_orphans(self.connection, most=100, retention_seconds=KEEP),
            )
        )
        orphans = [
            j
            for j in self.jobs.values()
            if j.live
            and not j.cancel_requested
            and j.parent is not None
            and (not j.parent.live or j not in j.parent.children)
        ]
        for model in orphans:
            if model.state == "processing" and not model.waiting:
                model.cancel_requested = True
            elif model.live:
                self.end(model, "canceled")

    @rule()
    def time_passes(self) -> None:
        """Every retry is due."""
        self.do(_all_due(self.connection))
        for model in self.jobs.values():
            model.due = True

    # --- What must hold

    @invariant()
    def the_rows_are_the_model(self) -> None:
        found = self.do(self.connection.fetch("SELECT * FROM jobs"))
        assert {row["id"] for row in found} == set(self.jobs)
        for row in found:
            model = self.jobs[row["id"]]
            seen = {
                "state": row["state"],
                "attempt": row["attempt"],
                "fence": row["fence"],
                "crashes": row["crashes"],
                "dead_letter": row["dead_letter"],
                "waiting": row["state"] == "processing" and row["lease_until"] is None,
            }
            wanted = {
                "state": model.state,
                "attempt": model.attempt,
                "fence": model.fence,
                "crashes": model.crashes,
                "dead_letter": model.dead_letter,
                "waiting": model.state == "processing" and model.waiting,
            }
            assert seen == wanted
            if wanted["waiting"]:
                assert row["pending_children"] == model.pending > 0

    def teardown(self) -> None:
        """Everything comes to an end, and the history is sound."""
        for _ in range(60):
            live = [j for j in self.jobs.values() if j.live]
            if not live:
                break
            self.time_passes()
            for model in live:
                if model.state == "processing" and not model.waiting:
                    self.do(
                        self.connection.execute(
                            "UPDATE jobs SET lease_until = now() - interval '1 s' WHERE id = $1",
                            model.id,
                        )
                    )
                    model.expired = True
            self.rescue()
            self.cancel_orphans()
            claimed = self.do(_claim(self.connection, "last", 100))
            for held in claimed:
                model = self.jobs[held.id]
                model.state, model.expired, model.waiting = "processing", False, False
                model.attempt, model.fence = model.attempt + 1, model.fence + 1
                self.complete_now(held)
        assert [j.id for j in self.jobs.values() if j.live] == [], "some job never ends"
        self.the_rows_are_the_model()
        history = self.do(checker.collect(self.dsn))
        history.accepted = {str(j) for j in self.jobs}
        assert [str(v) for v in checker.violations(history)] == []

    def complete_now(self, held: Claim) -> None:
        if self.settles(
            held, lambda: jobs.complete(self.connection, held, {}, retention_seconds=KEEP)
        ):
            self.end(self.jobs[held.id], "completed")

    # --- The model's moves

    def any_job(self, data: st.DataObject, wanted: Any = None) -> Any:
        found = [j for j in self.jobs.values() if wanted is None or wanted(j)]
        return data.draw(st.sampled_from(found)) if found else None

    def holds(self, held: Claim) -> bool:
        model = self.jobs[held.id]
        return model.state == "processing" and not model.waiting and model.fence == held.fence

    def settles(self, held: Claim, work: Any) -> bool:
        """Run what ends an attempt; it must lose exactly if the claim is not the current one."""
        holds = self.holds(held)
        try:
            self.do(_in_transaction(self.connection, work))
        except LeaseLost:
            assert not holds, "a worker that holds the job was told that it lost it"
            return False
        assert holds, "a worker that lost the job could settle it"
        return True

    def end(self, model: Model, state: str, *, dead: bool = False) -> None:
        model.state, model.dead_letter, model.waiting = state, dead, False
        parent = model.parent
        if parent is None or not parent.waiting or model not in parent.children:
            return
        if state != "completed":
            self.end(parent, "failed")
        elif parent.pending == 0:
            self.join(parent)

    def requeue(self, model: Model, *, due: bool) -> None:
        model.state, model.due, model.expired = "queued", due, False

    def join(self, model: Model) -> None:
        model.state, model.waiting, model.due, model.expired = "queued", False, True, False
        model.attempt -= 1

    def adopt(self, parent: Model) -> None:
        """Children as the database has them now: which were kept, begun anew, or made."""
        found = self.do(
            self.connection.fetch(
                "SELECT id, max_attempts, state FROM jobs"
                " WHERE parent_id = $1 AND NOT superseded ORDER BY id",
                parent.id,
            )
        )
        before = {child.id: child for child in parent.children}
        parent.children = []
        for row in found:
            child = before.get(row["id"])
            if child is None:
                assert row["state"] == "queued"
                child = Model(row["id"], row["max_attempts"], parent=parent)
                self.jobs[child.id] = child
            elif child.state == "failed":
                child.state, child.attempt, child.crashes = "queued", 0, 0
                child.resource_failures, child.dead_letter, child.due = 0, False, True
                child.cancel_requested = False
            else:
                assert child.state == "completed" or (child.live and not child.cancel_requested)
            parent.children.append(child)

    def depth(self, model: Model) -> int:
        return 0 if model.parent is None else 1 + self.depth(model.parent)


async def _claim(connection: db.Connection, worker: str, most: int) -> list[Claim]:
    async with connection.transaction():
        await jobs.line_up(connection, ["default"])
        tickets = await queue.take(connection, ["default"], most=most)
        return await jobs.claim(connection, tickets, worker=worker, lease_seconds=KEEP, kinds=KINDS)


async def _in_transaction(connection: db.Connection, work: Any) -> Any:
    async with connection.transaction():
        return await work()


async def _all_due(connection: db.Connection) -> None:
    await connection.execute("UPDATE jobs SET run_at = now() WHERE state = 'queued'")
    await connection.execute(f"UPDATE {queue.TABLE} SET execute_after = now()")


async def _forget_all(connection: db.Connection) -> None:
    for table in ("effects", "attempts", "transitions", "events", queue.TABLE):
        await connection.execute(f"DELETE FROM {table}")
    await connection.execute("UPDATE jobs SET parent_id = NULL")
    await connection.execute("DELETE FROM jobs")


@pytest.mark.timeout(300)
def test_the_queue_does_what_the_model_says(database: str, tmp_path: Any) -> None:
    with asyncio.Runner() as runner:

        async def open_all() -> tuple[db.Connection, db.Pool]:
            connection = await db.connect(database)
            # Many small commits; what a crash would lose is tested elsewhere.
            await connection.execute("SET synchronous_commit = off")
            return connection, await db.open_pool(database, size=2)

        connection, pool = runner.run(open_all())

        class Machine(Queue):
            pass

        Machine.dsn, Machine.runner, Machine.folder = database, runner, tmp_path
        Machine.connection, Machine.pool = connection, pool
        try:
            run_state_machine_as_test(
                Machine,
                settings=settings(
                    max_examples=40,
                    stateful_step_count=40,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(_close(connection, pool))


async def _close(connection: db.Connection, pool: asyncpg.Pool) -> None:
    await connection.close()
    await rows.close(pool)

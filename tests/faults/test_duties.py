"""The periodic duties: run once however many run them, and safe to die in. F47."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import UUID

import pytest
from tests import rows
from tests.faults import checker
from tests.faults.lab import GENERIC, Lab, settings_of, thaw
from tests.stories.harness import until

from mediamill import db, jobs
from mediamill.jobs import NewJob
from mediamill.maintenance import Maintenance
from mediamill.queue import Ticket


@pytest.mark.timeout(180)
@pytest.mark.parametrize("action", ["kill9", "stop", "raise", "sleep"])
def test_a_process_that_stops_in_the_middle_of_the_rescue_keeps_nobody_from_it(
    lab: Lab, action: str
) -> None:
    """It holds the duty's lock and the rows of the jobs."""
    job_id = lab.enqueue("sleep", {"seconds": 1.0})
    doomed = lab.start_worker("default=1")
    until(lambda: lab.executions(job_id), seconds=30, why="it has not begun")
    lab.kill(doomed)
    first = lab.start_worker("maintenance=1", failpoint=f"maintenance.rescue:{action}:1")
    if action == "kill9":
        lab.await_death(first)
    elif action == "stop":
        lab.await_freeze(first)
    lab.start_worker(GENERIC)
    assert lab.await_job(job_id)["state"] == "completed"
    assert lab.outcomes(job_id) == ["lost", "completed"]
    if action == "stop":
        thaw(first)
        lab.name_of(first)  # it lives, and registers itself
    lab.kills.clear()  # the bound is not for a rescuer that dies as well
    lab.check()


@pytest.mark.timeout(120)
def test_the_erasure_of_a_media_survives_a_death_in_the_middle(lab: Lab) -> None:
    media_id = lab.picture()
    doomed = lab.start_worker("image=1,maintenance=1", failpoint="maintenance.erase:kill9:1")
    until(
        lambda: lab.value("SELECT state FROM media WHERE id = $1", media_id) == "ready",
        seconds=60,
        why="it is not ready",
    )
    lab.execute("UPDATE media SET expires_at = now() WHERE id = $1", media_id)
    lab.await_death(doomed, seconds=60)
    assert lab.value("SELECT count(*) FROM erasures") == 1
    lab.start_worker("maintenance=1")
    until(lambda: lab.value("SELECT count(*) FROM erasures") == 0, seconds=30, why="not erased")
    assert [p for area in ("media", "uploads") for p in lab.files(area)] == []
    assert lab.history().leftovers == []


@pytest.mark.anyio
@pytest.mark.timeout(120)
async def test_many_rescuers_rescue_each_job_once(lab: Lab) -> None:
    settings = settings_of(lab)
    wanted = [NewJob(kind="thing", payload={}, queue="default") for _ in range(150)]
    async with rows.pooled(lab.database, size=8) as pool:
        async with db.transaction(pool) as connection:
            await jobs.enqueue(connection, "default", wanted)
            claims = await jobs.claim(
                connection,
                [Ticket("default", "default", j.id) for j in wanted],
                worker="w",
                lease_seconds=60,
                kinds=[("thing", 1)],
            )
            assert len(claims) == 150
            await connection.execute("UPDATE jobs SET lease_until = now() - interval '1 s'")
        store: Any = None
        rescuers = [Maintenance(settings, pool, store, clock=lambda: 0.0) for _ in range(6)]
        for _ in range(6):
            await asyncio.gather(*(r.once(r.duties[0]) for r in rescuers))
        async with db.acquire(pool) as connection:
            counts = await connection.fetchrow(
                "SELECT count(*) FILTER (WHERE state = 'queued') AS queued,"
                " sum(crashes) AS crashes, (SELECT count(*) FROM attempts) AS attempts,"
                " (SELECT count(*) FROM transitions WHERE code = 'worker_crashed') AS moves"
                " FROM jobs"
            )
    assert counts is not None
    assert tuple(counts) == (150, 150, 150, 150)
    found = checker.violations(await checker.collect(lab.database))
    assert [str(v) for v in found] == []


@pytest.mark.anyio
@pytest.mark.timeout(120)
async def test_a_duty_that_one_process_runs_is_not_begun_by_another(lab: Lab) -> None:
    settings = settings_of(lab)
    store: Any = None
    async with rows.pooled(lab.database, size=4) as pool:
        duties = [Maintenance(settings, pool, store) for _ in range(2)]
        at_once = 0
        most = 0

        async def work(_: db.Connection) -> int:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.05)
            at_once -= 1
            return 1

        from dataclasses import replace

        ours = [replace(d.duties[0], work=work) for d in duties]
        done = await asyncio.gather(
            *(d.once(duty) for d, duty in zip(duties, ours, strict=True) for _ in range(4))
        )
    assert most == 1
    assert sum(done) < 8


@pytest.mark.anyio
@pytest.mark.timeout(120)
async def test_a_due_job_without_a_ticket_gets_one(lab: Lab) -> None:
    """Whatever became of the ticket: the row is the truth."""
    settings = settings_of(lab)
    job = NewJob(kind="thing", payload={}, queue="default")
    store: Any = None
    async with rows.pooled(lab.database) as pool:
        async with db.acquire(pool) as connection:
            await jobs.enqueue(connection, "default", [job])
            await connection.execute("DELETE FROM mediamill_tickets")
            await connection.execute(
                "UPDATE jobs SET run_at = run_at - interval '1 min',"
                " queued_at = queued_at - interval '1 min'"
            )
        duties = Maintenance(settings, pool, store)
        republish = next(d for d in duties.duties if d.name == "republish")
        assert await duties.once(republish) == 1
        assert await duties.once(republish) == 0, "it has a waiting ticket now"
        async with db.acquire(pool) as connection:
            assert await rows.tickets(connection, "default") == [job.id]


def test_a_frozen_fleet_that_wakes_is_given_time_to_renew(lab: Lab) -> None:
    """Everything on one machine slept; nobody's lease may be taken before it could renew."""
    worker = lab.start_worker(GENERIC)
    job_id: UUID = lab.enqueue("sleep", {"seconds": 4.0})
    until(lambda: lab.executions(job_id), seconds=30, why="it has not begun")
    import os
    import signal

    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(2.5)  # longer than its lease; its own sweep sleeps as well
    os.kill(worker.pid, signal.SIGCONT)
    lab.await_all()
    lab.check()

"""A cancel races with a claim, a completion, a retry and a wait; one of them wins. F46."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from tests import rows
from tests.faults import checker
from tests.faults.lab import GENERIC, Lab
from tests.stories.harness import until

from mediamill import config, db, jobs
from mediamill.attempt import settle_failure
from mediamill.failures import Code, LeaseLost, Problem
from mediamill.jobs import Claim, NewJob
from mediamill.queue import Ticket

TIMES = 200
KEEP = 3600.0
KINDS = [("thing", 1)]

pytestmark = pytest.mark.anyio


@pytest.fixture
def settings(tmp_path: Any) -> config.Settings:
    return rows.settings(tmp_path)


async def new(connection: db.Connection, **more: Any) -> UUID:
    job = NewJob(kind="thing", payload={}, queue="default", **more)
    await jobs.enqueue(connection, "default", [job])
    return job.id


async def claim(connection: db.Connection, job_id: UUID) -> Claim | None:
    found = await jobs.claim(
        connection,
        [Ticket("default", "default", job_id)],
        worker="w",
        lease_seconds=60,
        kinds=KINDS,
    )
    return found[0] if found else None


async def cancel(connection: db.Connection, job_id: UUID) -> bool:
    async with connection.transaction():
        return await jobs.cancel(connection, "default", job_id, retention_seconds=KEEP)


async def race(pool: db.Pool, *moves: Callable[[db.Connection], Awaitable[Any]]) -> list[Any]:
    """All at once, each on a connection of its own; exceptions are results."""
    barrier = asyncio.Barrier(len(moves))

    async def run(move: Callable[[db.Connection], Awaitable[Any]]) -> Any:
        async with db.acquire(pool) as connection:
            await barrier.wait()
            return await move(connection)

    return await asyncio.gather(*(run(m) for m in moves), return_exceptions=True)


async def settled(dsn: str) -> None:
    """The checker, and: nothing is claimed or staged after an end."""
    found = checker.violations(await checker.collect(dsn))
    assert [str(v) for v in found] == []


@pytest.fixture
def order() -> Iterator[int]:
    """Who of a race is sent first; alternates within a test."""
    return iter(range(10**6))


@pytest.mark.timeout(120)
async def test_a_cancel_and_a_claim_have_one_winner(database: str) -> None:
    seen: Counter[str] = Counter()
    async with rows.pooled(database, size=4) as pool:
        for turn in range(TIMES):
            async with db.acquire(pool) as connection:
                job_id = await new(connection)
            moves: list[Callable[[db.Connection], Awaitable[Any]]] = [
                partial(cancel, job_id=job_id),
                partial(claim, job_id=job_id),
            ]
            answers = await race(pool, *(moves if turn % 2 else moves[::-1]))
            canceled, held = answers if turn % 2 else answers[::-1]
            assert canceled is True
            async with db.acquire(pool) as connection:
                row = await jobs.get(connection, "default", job_id)
                assert row is not None
                if held is None:
                    assert row["state"] == "canceled"
                    assert await claim(connection, job_id) is None
                else:
                    assert (row["state"], row["cancel_requested"]) == ("processing", True)
                    await jobs.settle_canceled(connection, held, retention_seconds=KEEP)
            seen["canceled" if held is None else "claimed"] += 1
    await settled(database)
    print(seen)


@pytest.mark.timeout(120)
async def test_a_cancel_and_a_completion_have_one_winner(database: str) -> None:
    async with rows.pooled(database, size=4) as pool:
        for turn in range(TIMES):
            async with db.acquire(pool) as connection:
                job_id = await new(connection)
                held = await claim(connection, job_id)
            assert held is not None

            async def complete(connection: db.Connection, held: Claim = held) -> str:
                async with connection.transaction():
                    await jobs.complete(connection, held, {}, retention_seconds=KEEP)
                return "completed"

            async def both(connection: db.Connection, held: Claim = held) -> str:
                try:
                    await jobs.settle_canceled(connection, held, retention_seconds=KEEP)
                except LeaseLost:
                    return "lost"
                return "canceled"

            answers = await race(
                pool,
                partial(cancel, job_id=job_id),
                complete,
                both,
            )
            async with db.acquire(pool) as connection:
                row = await jobs.get(connection, "default", job_id)
            assert row is not None
            won = [a for a in answers[1:] if a in ("completed", "canceled")]
            assert won == [row["state"]], (turn, answers)
    await settled(database)


@pytest.mark.timeout(120)
async def test_a_cancel_and_a_retry_leave_nothing_that_goes_on(
    database: str, settings: config.Settings
) -> None:
    """Whoever is first: a job that was told to be canceled is not begun once more."""
    async with rows.pooled(database, size=4) as pool:
        for _ in range(TIMES):
            async with db.acquire(pool) as connection:
                job_id = await new(connection)
                held = await claim(connection, job_id)
            assert held is not None

            async def retry(connection: db.Connection, held: Claim = held) -> None:
                async with connection.transaction():  # as an attempt does
                    if await jobs.cancel_requested(connection, held):
                        await jobs.settle_canceled(connection, held, retention_seconds=KEEP)
                    else:
                        problem = Problem(Code.STORAGE_UNAVAILABLE)
                        await settle_failure(connection, settings, held, problem)

            answers = await race(
                pool,
                partial(cancel, job_id=job_id),
                retry,
            )
            assert answers == [True, None]
            async with db.acquire(pool) as connection:
                row = await jobs.get(connection, "default", job_id)
                assert row is not None
                assert row["state"] == "canceled"
                assert await claim(connection, job_id) is None
    await settled(database)


@pytest.mark.timeout(120)
async def test_a_cancel_and_a_wait_leave_nothing_that_waits(database: str) -> None:
    async with rows.pooled(database, size=4) as pool:
        for _ in range(TIMES):
            async with db.acquire(pool) as connection:
                job_id = await new(connection)
                held = await claim(connection, job_id)
            assert held is not None

            async def wait(connection: db.Connection, held: Claim = held) -> None:
                async with connection.transaction():
                    if await jobs.cancel_requested(connection, held):
                        await jobs.settle_canceled(connection, held, retention_seconds=KEEP)
                    else:
                        child = NewJob(kind="thing", payload={}, queue="default", child_key="0")
                        await jobs.wait(connection, held, [child])

            answers = await race(
                pool,
                partial(cancel, job_id=job_id),
                wait,
            )
            assert answers == [True, None]
            async with db.acquire(pool) as connection:
                row = await jobs.get(connection, "default", job_id)
                assert row is not None
                assert row["state"] == "canceled"
        async with db.transaction(pool) as connection:
            await jobs.cancel_orphans(connection, most=1000, retention_seconds=KEEP)
            left = await connection.fetchval(
                "SELECT count(*) FROM jobs WHERE state IN ('queued', 'processing')"
            )
        assert left == 0
    await settled(database)


@pytest.mark.timeout(120)
async def test_the_last_children_end_at_once_and_the_parent_joins_once(database: str) -> None:
    async with rows.pooled(database, size=6) as pool:
        for _ in range(TIMES // 4):
            async with db.acquire(pool) as connection:
                parent = await new(connection)
                held = await claim(connection, parent)
                assert held is not None
                children = [
                    NewJob(kind="thing", payload={}, queue="default", child_key=str(n))
                    for n in range(4)
                ]
                async with connection.transaction():
                    await jobs.wait(connection, held, children)
                claims = [await claim(connection, c.id) for c in children]

            def end(held: Claim | None) -> Callable[[db.Connection], Awaitable[None]]:
                async def work(connection: db.Connection) -> None:
                    assert held is not None
                    async with connection.transaction():
                        await jobs.complete(connection, held, {}, retention_seconds=KEEP)

                return work

            assert await race(pool, *(end(c) for c in claims)) == [None] * 4
            async with db.acquire(pool) as connection:
                row = await jobs.get(connection, "default", parent)
                assert row is not None
                assert (row["state"], row["pending_children"]) == ("queued", 0)
                again = await claim(connection, parent)
                assert again is not None
                assert again.attempt == 1, "joining is no attempt of its own"
                await jobs.complete(connection, again, {}, retention_seconds=KEEP)
    await settled(database)


@pytest.mark.timeout(180)
async def test_running_jobs_that_are_canceled_through_the_api_stop(lab: Lab) -> None:
    def play() -> None:
        lab.start_api()
        lab.start_worker("default=6,maintenance=1")
        running = lab.enqueue_many([("sleep", {"seconds": 60.0})] * 4)
        queued = lab.enqueue_many([("sleep", {"seconds": 60.0})] * 4)
        until(lambda: sum(map(lab.executions, running)) >= 4, seconds=30, why="not begun")
        listed = lab.http.get("/v1/jobs?limit=100").json()["data"]
        for body in listed:
            answer = lab.http.post(f"/v1/jobs/{body['id']}/cancel")
            assert answer.status_code in (200, 202), answer.text
        for job_id in (*running, *queued):
            assert lab.await_job(job_id, seconds=30)["state"] == "canceled"
        assert lab.http.post(f"/v1/jobs/{listed[0]['id']}/cancel").status_code == 200
        after = lab.enqueue("noop")
        assert lab.await_job(after)["state"] == "completed"
        lab.check()

    await asyncio.to_thread(play)
    assert GENERIC

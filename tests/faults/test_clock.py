"""Wall clocks jump; leases, retries and duties do not care. F21, with injected clocks."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests import rows

from mediamill import config, db, ids, jobs, maintenance
from mediamill.jobs import Claim, NewJob
from mediamill.lease import Leases, Stop
from mediamill.maintenance import Maintenance
from mediamill.queue import Ticket

pytestmark = pytest.mark.anyio


class Clock:
    """The monotonic clock of a process, in the test's hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def settings(tmp_path: Path) -> config.Settings:
    return rows.settings(tmp_path, lease_seconds=2.0, self_stop_seconds=1.2, beat_seconds=0.3)


async def held(connection: db.Connection, *, lease_seconds: float = 60.0) -> Claim:
    job = NewJob(kind="thing", payload={}, queue="default")
    await jobs.enqueue(connection, "default", [job])
    (claim,) = await jobs.claim(
        connection,
        [Ticket("default", "default", job.id)],
        worker="w",
        lease_seconds=lease_seconds,
        kinds=[("thing", 1)],
    )
    return claim


def fake_claim() -> Claim:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return Claim(
        "default", ids.new(), "thing", "default", "job", 1, None, None, None, None, {}, 1, 5, 0, 0,
        1, 0, 0, now, now, None, None,
    )  # fmt: skip


async def test_a_lease_is_given_up_by_the_monotonic_clock_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody answers; the wall clock jumps by a day and an hour in both directions."""
    clock, stopped = Clock(), list[tuple[UUID, Stop]]()
    leases = Leases(
        "postgresql://nobody@127.0.0.1:1/nothing",
        lease_seconds=7,
        beat_seconds=0.01,
        self_stop_seconds=5,
        on_stop=lambda claim, why: stopped.append((claim.id, why)),
        clock=clock,
    )
    claim = fake_claim()
    leases.hold(claim, clock.now)
    real = time.time
    for jump in (86_400, -86_400, 3_600, -3_600):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        clock.now += 1.1
        leases._give_up_unrenewed()
        assert stopped == []
    clock.now += 0.7
    leases._give_up_unrenewed()
    assert stopped == [(claim.id, Stop.UNRENEWED)]


async def test_a_beat_that_took_long_counts_from_when_it_was_sent(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    leases = Leases(
        database,
        lease_seconds=7,
        beat_seconds=1,
        self_stop_seconds=5,
        on_stop=lambda claim, why: None,
        clock=clock,
    )
    async with rows.connected(database) as connection:
        claim = await held(connection)
        leases.hold(claim, clock.now)
        clock.now += 3

        real = jobs.renew

        async def slow(*args: Any, **more: Any) -> Any:
            clock.now += 2  # on its way
            return await real(*args, **more)

        monkeypatch.setattr(jobs, "renew", slow)
        used = await leases._beat(None, [claim])
        assert used is not None
        await used.close()
    assert leases._held[claim.key][1] == 1003.0


async def test_a_broken_beat_does_not_end_the_beating(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a beat meets: the thread lives, and gives up what it cannot renew."""
    stopped = list[Stop]()
    told = threading.Event()

    def on_stop(_: Claim, why: Stop) -> None:
        stopped.append(why)
        told.set()

    leases = Leases(
        database,
        lease_seconds=2,
        beat_seconds=0.05,
        self_stop_seconds=0.5,
        on_stop=on_stop,
    )
    beats = 0

    async def broken(*_: Any, **__: Any) -> Any:
        nonlocal beats
        beats += 1
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(jobs, "renew", broken)
    leases.hold(fake_claim(), time.monotonic())
    leases.start()
    assert await asyncio.to_thread(told.wait, 20)
    assert stopped == [Stop.UNRENEWED]
    assert beats > 1
    assert leases._thread.is_alive()
    leases.stop()


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 86_400.0])
async def test_a_rescuer_whose_clock_jumps_takes_no_living_lease(
    database: str, settings: config.Settings, jump: float
) -> None:
    clock = Clock()
    store: Any = None
    async with rows.pooled(database) as pool:
        async with db.acquire(pool) as connection:
            claim = await held(connection)
        duties = Maintenance(settings, pool, store, clock=clock)
        for _ in range(3):
            assert await duties.once(duties.duties[0]) == 0
            clock.now += jump
        async with db.acquire(pool) as connection:
            row = await jobs.get(connection, "default", claim.id)
    assert row is not None
    assert (row["state"], row["fence"]) == ("processing", 1)


async def test_after_a_gap_of_its_own_the_rescuer_waits_for_one_lease(
    database: str, settings: config.Settings
) -> None:
    """The whole machine may have slept: whoever lives renews first."""
    clock = Clock()
    store: Any = None
    async with rows.pooled(database) as pool:
        duties = Maintenance(settings, pool, store, clock=clock)
        await server_is_old(pool, settings)
        rescue = duties.duties[0]
        assert await duties.once(rescue) == 0
        clock.now += 100.0
        async with db.acquire(pool) as connection:
            claim = await held(connection)
            await connection.execute("UPDATE jobs SET lease_until = now() - interval '1 s'")
        assert await duties.once(rescue) == 0, "it did not hold off after its gap"
        clock.now += settings.lease_seconds - 0.1
        assert await duties.once(rescue) == 0
        clock.now += 0.2
        assert await duties.once(rescue) == 1
        async with db.acquire(pool) as connection:
            row = await jobs.get(connection, "default", claim.id)
    assert row is not None
    assert (row["state"], row["crashes"]) == ("queued", 1)


async def test_the_server_restarting_makes_the_rescuer_wait_for_one_lease(
    database: str, settings: config.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    store: Any = None
    async with rows.pooled(database) as pool:
        async with db.acquire(pool) as connection:
            await held(connection)
            await connection.execute("UPDATE jobs SET lease_until = now() - interval '1 s'")
        duties = Maintenance(settings, pool, store, clock=clock)
        young = dict(maintenance._SQL.all) | {"server_age": "SELECT 0.5::float8"}
        monkeypatch.setattr(maintenance._SQL, "all", young)
        assert await duties.once(duties.duties[0]) == 0
        monkeypatch.undo()
        await server_is_old(pool, settings)
        clock.now += settings.lease_seconds - 0.5
        assert await duties.once(duties.duties[0]) == 0
        clock.now += 0.6
        assert await duties.once(duties.duties[0]) == 1


async def server_is_old(pool: db.Pool, settings: config.Settings) -> None:
    """The server of this run may have started a moment ago."""
    async with db.acquire(pool) as connection:
        age = await connection.fetchval(maintenance._SQL.server_age)
    await asyncio.sleep(max(0.0, settings.lease_seconds - age))

"""Following the log: in order, each event once, none left out, however transactions overlap."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator

import pytest
from tests import rows

from mediamill import db, events
from mediamill.events import Follower, Tail, Topic

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def shared(server: str, template: str) -> Iterator[str]:
    with rows.fresh_database(server, template) as dsn:
        yield dsn


@pytest.fixture
async def pool(shared: str) -> AsyncIterator[db.Pool]:
    async with rows.pooled(shared, size=10) as made:
        yield made


@pytest.fixture
async def tenant(pool: db.Pool) -> str:
    async with db.acquire(pool) as connection:
        return await rows.new_tenant(connection)


async def write(connection: db.Connection, tenant: str, type: str = "media.queued") -> int:
    number: int = await connection.fetchval(
        "INSERT INTO events (tenant_id, type) VALUES ($1, $2) RETURNING id", tenant, type
    )
    return number


async def test_a_late_commit_holds_back_what_was_numbered_after_it(
    pool: db.Pool, tenant: str
) -> None:
    async with db.acquire(pool) as reader, db.acquire(pool) as slow, db.acquire(pool) as quick:
        tail = Tail()
        await tail.start(reader)
        late = slow.transaction()
        await late.start()
        first = await write(slow, tenant)
        second = await write(quick, tenant)  # committed at once
        assert first < second
        for _ in range(3):
            assert await tail.read(reader) == []
        await late.commit()
        seen: list[int] = []
        while len(seen) < 2:
            seen += [e.id for e in await tail.read(reader)]
        assert seen == [first, second]


async def test_an_undone_event_holds_nothing_back(pool: db.Pool, tenant: str) -> None:
    async with db.acquire(pool) as reader, db.acquire(pool) as slow, db.acquire(pool) as quick:
        tail = Tail()
        await tail.start(reader)
        undone = slow.transaction()
        await undone.start()
        await write(slow, tenant)
        second = await write(quick, tenant)
        assert await tail.read(reader) == []
        await undone.rollback()
        assert [e.id for e in await tail.read(reader)] == [second]


async def test_a_later_transaction_does_not_hold_back_what_is_before_it(
    pool: db.Pool, tenant: str
) -> None:
    """One that writes events all the time must not stop the others."""
    async with db.acquire(pool) as reader, db.acquire(pool) as slow, db.acquire(pool) as quick:
        tail = Tail()
        await tail.start(reader)
        undone = quick.transaction()
        await undone.start()
        await write(quick, tenant)
        await undone.rollback()  # a gap that nobody will fill
        second = await write(quick, tenant)
        late = slow.transaction()
        await late.start()
        await write(slow, tenant)
        assert await tail.read(reader) == []  # it cannot tell yet whose the gap is
        seen = await tail.read(reader)
        await late.rollback()
        seen += await tail.read(reader)
        assert [e.id for e in seen] == [second]


async def test_a_tail_begins_only_when_nothing_before_it_can_come(
    pool: db.Pool, tenant: str
) -> None:
    async with db.acquire(pool) as reader, db.acquire(pool) as slow:
        late = slow.transaction()
        await late.start()
        await write(slow, tenant)
        async with db.acquire(pool) as quick:
            second = await write(quick, tenant)
        tail = Tail()
        begun = asyncio.create_task(tail.start(reader))
        await asyncio.sleep(0.1)
        assert not begun.done()
        await late.commit()
        await begun
        assert tail.horizon == second


async def test_many_writers_that_overlap_and_undo_lose_nothing(pool: db.Pool, tenant: str) -> None:
    chance = random.Random(7)
    written: set[int] = set()
    running = True

    async def writer() -> None:
        for _ in range(40):
            async with db.acquire(pool) as connection:
                move = connection.transaction()
                await move.start()
                mine = [await write(connection, tenant) for _ in range(chance.randint(1, 3))]
                await asyncio.sleep(chance.random() * 0.01)
                if chance.random() < 0.3:
                    await move.rollback()
                else:
                    await move.commit()
                    written.update(mine)

    seen: list[int] = []

    async def follow() -> None:
        async with db.acquire(pool) as connection:
            tail = Tail()
            await tail.start(connection)
            started.set()
            idle = 0
            while running or idle < 20:
                found = [e.id for e in await tail.read(connection)]
                seen.extend(found)
                idle = 0 if found or running else idle + 1
                await asyncio.sleep(0.002)

    started = asyncio.Event()
    follower = asyncio.create_task(follow())
    await started.wait()
    await asyncio.gather(*(writer() for _ in range(6)))
    running = False
    await follower
    assert seen == sorted(seen)
    assert set(seen) == written
    assert len(seen) == len(written)


async def test_a_follower_hands_out_by_topic(pool: db.Pool, tenant: str) -> None:
    follower = Follower(pool)
    async with db.acquire(pool) as connection:
        other = await rows.new_tenant(connection)
    all_of = await follower.subscribe(Topic(tenant))
    of_other = await follower.subscribe(Topic(other))
    async with db.acquire(pool) as connection:
        number = await write(connection, tenant, "media.ready")
    async with asyncio.timeout(5):
        await all_of.wake.wait()
    (made,) = all_of.take()
    assert made.type == "media.ready"
    assert made.data.startswith(f"id: {number}\nevent: media.ready\ndata: {{".encode())
    assert made.data.endswith(b"}\n\n")
    assert of_other.take() == []
    follower.leave(all_of)
    follower.leave(of_other)
    assert follower.count == 0
    await follower.close()


async def test_a_slow_subscriber_loses_its_backlog_and_is_told(pool: db.Pool, tenant: str) -> None:
    follower = Follower(pool)
    heard = await follower.subscribe(Topic(tenant))
    for _ in range(150):
        heard.put(events.frame("media.ready", {}, 1))
    assert heard.lost
    assert heard.take() == []
    progress = events.frame(events.PROGRESS, {"n": 2})
    quick = await follower.subscribe(Topic(tenant))
    for _ in range(150):
        quick.put(progress)  # each replaces the one before
    assert quick.take() == [progress]
    assert not quick.lost
    follower.leave(heard)
    follower.leave(quick)
    await follower.close()


async def test_a_follower_outlives_a_cut_connection(pool: db.Pool, tenant: str) -> None:
    follower = Follower(pool)
    heard = await follower.subscribe(Topic(tenant))
    async with db.acquire(pool) as connection:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND datname = current_database()"
        )
        await write(connection, tenant)
    async with asyncio.timeout(10):
        await heard.wake.wait()
    assert len(heard.take()) == 1
    follower.leave(heard)
    await follower.close()


async def test_without_a_database_nobody_is_left_waiting_for_ever(
    pool: db.Pool, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down(*_: object, **__: object) -> None:
        raise db.Unavailable

    monkeypatch.setattr(events, "_START_SECONDS", 0.1)
    follower = Follower(pool)
    with monkeypatch.context() as patched:
        patched.setattr(Tail, "start", down)
        with pytest.raises(db.Unavailable):
            await follower.subscribe(Topic(tenant))
    assert follower.count == 0
    monkeypatch.setattr(events, "_START_SECONDS", 10.0)
    follower.leave(await follower.subscribe(Topic(tenant)))  # it comes back by itself
    await follower.close()

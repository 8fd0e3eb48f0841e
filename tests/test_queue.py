"""The port to the queue engine: tickets are hints, but they keep these promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from uuid import UUID

import pytest
from tests import rows

from mediamill import db, ids, queue
from mediamill.queue import Bell, Ticket

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def dsn(server: str, template: str) -> Iterator[str]:
    with rows.fresh_database(server, template) as made:
        yield made


@pytest.fixture
async def connection(dsn: str) -> AsyncIterator[db.Connection]:
    async with rows.connected(dsn) as made:
        await rows.clear(made)
        yield made


def ticket(name: str = "image", priority: int = 0, lane: str = "") -> Ticket:
    return Ticket(name, "default", ids.new(), priority=priority, lane=lane)


async def take(connection: db.Connection, *queues: str, most: int = 100) -> list[UUID]:
    async with connection.transaction():
        found = await queue.take(connection, queues or ("image",), most=most)
    return [t.job_id for t in found]


async def test_a_ticket_comes_back_as_it_was_and_once(connection: db.Connection) -> None:
    given = ticket(priority=7)
    await queue.publish(connection, [given])
    async with connection.transaction():
        (taken,) = await queue.take(connection, ["image"], most=1)
    assert (taken.queue, taken.tenant_id, taken.job_id) == ("image", "default", given.job_id)
    assert await take(connection) == []
    assert await queue.waiting(connection) == {}


async def test_publishing_nothing_and_taking_from_nothing_is_fine(
    connection: db.Connection,
) -> None:
    await queue.publish(connection, [])
    assert await take(connection, "image", "video") == []


async def test_a_rolled_back_publication_leaves_no_ticket(connection: db.Connection) -> None:
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with connection.transaction():
            await queue.publish(connection, [ticket()])
            raise ZeroDivisionError
    assert await queue.waiting(connection) == {}


async def test_a_rolled_back_taking_gives_the_tickets_back(connection: db.Connection) -> None:
    given = [ticket(), ticket()]
    await queue.publish(connection, given)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with connection.transaction():
            assert len(await queue.take(connection, ["image"], most=2)) == 2
            raise ZeroDivisionError
    assert await take(connection) == [t.job_id for t in given]


async def test_a_taker_that_dies_gives_the_tickets_back(
    dsn: str, connection: db.Connection
) -> None:
    given = ticket()
    await queue.publish(connection, [given])
    dying = await db.connect(dsn)
    transaction = dying.transaction()
    await transaction.start()
    assert len(await queue.take(dying, ["image"], most=1)) == 1
    assert await take(connection) == []  # held by the other, not waited for
    dying.terminate()
    async with asyncio.timeout(5):
        while not (found := await take(connection)):  # noqa: ASYNC110  # nothing tells us
            await asyncio.sleep(0.01)
    assert found == [given.job_id]


async def test_a_ticket_that_an_older_version_delayed_is_not_due_before_its_time(
    connection: db.Connection,
) -> None:
    given = ticket()
    await queue.publish(connection, [given])
    await connection.execute("UPDATE mediamill_tickets SET execute_after = now() + interval '1 h'")
    assert await take(connection) == []
    await connection.execute("UPDATE mediamill_tickets SET execute_after = now()")
    assert await take(connection) == [given.job_id]


async def test_what_lies_aside_is_found_by_those_who_look_there(connection: db.Connection) -> None:
    aside, other, plain = ticket(lane="report/2"), ticket(lane="report/1"), ticket()
    await queue.publish(connection, [aside, other, plain, ticket("video", lane="report/2")])
    assert await queue.waiting(connection) == {
        "image": 1, "image/report/1": 1, "image/report/2": 1, "video/report/2": 1
    }  # fmt: skip
    assert await queue.used_lanes(connection, ["image", "audio"], ["report/2", "csv/1"]) == [
        ("image", "report/2")
    ]
    assert await take(connection) == [plain.job_id]
    async with connection.transaction():
        (taken,) = await queue.take(
            connection,
            ["image"],
            most=5,
            lanes={("image", "report/2"): 5, ("video", "report/2"): 5},
        )
    assert (taken.queue, taken.lane, taken.job_id) == ("image", "report/2", aside.job_id)


async def test_lanes_share_the_room_of_their_queue_and_the_better_goes_first(
    connection: db.Connection,
) -> None:
    aside = [ticket(lane="csv/1", priority=n) for n in (5, 1)]
    plain = [ticket(priority=n) for n in (4, 0)]
    await queue.publish(connection, [*aside, *plain])
    async with connection.transaction():
        taken = await queue.take(connection, ["image"], most=3, lanes={("image", "csv/1"): 3})
    assert [t.job_id for t in taken] == [aside[0].job_id, plain[0].job_id, aside[1].job_id]
    await queue.publish(connection, taken[:1])
    async with connection.transaction():
        taken = await queue.take(connection, ["image"], most=3, lanes={("image", "csv/1"): 0})
    assert [t.job_id for t in taken] == [plain[1].job_id]


async def test_higher_priority_comes_first_and_then_the_older(connection: db.Connection) -> None:
    low, high, old = ticket(priority=0), ticket(priority=9), ticket(priority=-1)
    await queue.publish(connection, [old])
    await queue.publish(connection, [low])
    second = ticket(priority=0)
    await queue.publish(connection, [second])
    await queue.publish(connection, [high])
    order = [(await take(connection, most=1))[0] for _ in range(4)]
    assert order == [high.job_id, low.job_id, second.job_id, old.job_id]


async def test_queues_are_apart_and_most_is_the_most(connection: db.Connection) -> None:
    images = [ticket("image") for _ in range(3)]
    videos = [ticket("video") for _ in range(2)]
    await queue.publish(connection, [*images, *videos])
    assert await queue.waiting(connection) == {"image": 3, "video": 2}
    assert await take(connection, "audio") == []
    assert len(await take(connection, "image", most=2)) == 2
    assert set(await take(connection, "video", "audio")) == {t.job_id for t in videos}
    assert await queue.waiting(connection) == {"image": 1}


async def test_of_many_takers_at_once_each_ticket_goes_to_one(
    dsn: str, connection: db.Connection
) -> None:
    given = [ticket() for _ in range(40)]
    await queue.publish(connection, given)

    async def taker() -> list[UUID]:
        async with rows.connected(dsn) as own:
            found: list[UUID] = []
            while more := await take(own, most=3):
                found += more
            return found

    taken = [job for found in await asyncio.gather(*(taker() for _ in range(6))) for job in found]
    taken += await take(connection)  # what a taker skipped because another held it
    assert sorted(taken) == sorted(t.job_id for t in given)


async def test_a_foreign_payload_is_dropped(connection: db.Connection) -> None:
    given = ticket()
    await queue.publish(connection, [given])
    await connection.execute(
        "INSERT INTO mediamill_tickets (status, entrypoint, payload, priority)"
        " VALUES ('queued', 'image', 'nonsense', 9), ('queued', 'image', NULL, 9)"
    )
    assert await take(connection) == [given.job_id]
    assert await queue.waiting(connection) == {}


async def test_nothing_is_left_picked(connection: db.Connection) -> None:
    """The engine's own recovery would hand out a picked ticket a second time."""
    await queue.publish(connection, [ticket() for _ in range(5)])
    await take(connection, most=3)
    states = await connection.fetch("SELECT DISTINCT status::text FROM mediamill_tickets")
    assert [row["status"] for row in states] == ["queued"]


async def test_the_engine_keeps_no_log_of_its_own(connection: db.Connection) -> None:
    await queue.publish(connection, [ticket() for _ in range(3)])
    await take(connection)
    assert await connection.fetchval("SELECT count(*) FROM mediamill_ticket_log") == 0


async def test_installing_again_changes_nothing(connection: db.Connection) -> None:
    given = ticket()
    await queue.publish(connection, [given])
    await queue.install(connection)
    assert await take(connection) == [given.job_id]


class Rings:
    def __init__(self) -> None:
        self.count = 0
        self._heard = asyncio.Event()

    def __call__(self) -> None:
        self.count += 1
        self._heard.set()

    async def next(self) -> None:
        async with asyncio.timeout(5):
            await self._heard.wait()
        self._heard.clear()


@pytest.fixture
async def bell(dsn: str, connection: db.Connection) -> AsyncIterator[Rings]:
    rings = Rings()
    task = asyncio.create_task(Bell(dsn, rings).run())
    await rings.next()  # it rings when it begins to listen
    yield rings
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)


async def test_the_bell_rings_at_the_commit_of_a_publication(
    bell: Rings, connection: db.Connection
) -> None:
    async with connection.transaction():
        await queue.publish(connection, [ticket()])
        await asyncio.sleep(0.1)
        assert bell.count == 1
    await bell.next()


async def test_the_bell_is_silent_when_tickets_are_taken(
    bell: Rings, connection: db.Connection
) -> None:
    await queue.publish(connection, [ticket()])
    await bell.next()
    before = bell.count
    assert len(await take(connection)) == 1
    await asyncio.sleep(0.2)
    assert bell.count <= before + 1  # picking is an update; only the removal is known for one


async def test_the_bell_listens_again_after_its_connection_was_lost(
    bell: Rings, connection: db.Connection
) -> None:
    await connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'mediamill bell' AND datname = current_database()"
    )
    await bell.next()  # for what may have been missed
    await queue.publish(connection, [ticket()])
    await bell.next()

"""The status store: each move of a job and its media, and that a lost lease can change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest
from tests import rows

from mediamill import db, ids, jobs, media, uploads
from mediamill.config import Settings
from mediamill.failures import Code, LeaseLost, Problem
from mediamill.jobs import Birth, Claim, NewJob, Record
from mediamill.media import Description
from mediamill.queue import Ticket

pytestmark = pytest.mark.anyio
KEEP = rows.KEEP_SECONDS
KINDS = rows.KINDS
PROBLEM = Problem(Code.STORAGE_UNAVAILABLE)


@pytest.fixture(scope="module")
def dsn(server: str, template: str) -> Iterator[str]:
    with rows.fresh_database(server, template) as made:
        yield made


@pytest.fixture
async def connection(dsn: str) -> AsyncIterator[db.Connection]:
    async with rows.connected(dsn) as made:
        yield made


@pytest.fixture
async def tenant(connection: db.Connection) -> str:
    return await rows.new_tenant(connection)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return rows.settings(tmp_path)


class Desk:
    """One tenant's queued media and its main job, and how to look at them."""

    def __init__(self, connection: db.Connection, tenant: str, media_id: UUID, birth: Birth):
        self.connection, self.tenant = connection, tenant
        self.media_id, self.birth = media_id, birth

    async def claim(self, **more: float) -> Claim:
        return await rows.claim(self.connection, self.tenant, self.birth, **more)  # type: ignore[arg-type]

    async def job(self, name: str) -> object:
        return await rows.column(self.connection, "jobs", name, self.tenant, self.birth.id)

    async def media(self, name: str) -> object:
        return await rows.column(self.connection, "media", name, self.tenant, self.media_id)

    async def states(self) -> tuple[object, object]:
        return await self.job("state"), await self.media("state")

    async def snapshot(self) -> list[object]:
        """Everything that a stale worker must not be able to change."""
        found: list[object] = []
        for table in ("jobs", "media", "attempts", "transitions", "events", "sets", "variants"):
            found.append(
                await self.connection.fetch(
                    f"SELECT * FROM {table} WHERE tenant_id = $1 ORDER BY 1, 2", self.tenant
                )
            )
        found.append(await rows.tickets(self.connection, self.tenant))
        return found


@pytest.fixture
async def desk(connection: db.Connection, tenant: str, settings: Settings) -> Desk:
    media_id, (birth,) = await rows.accepted(connection, tenant, settings)
    return Desk(connection, tenant, media_id, birth)


async def test_an_accepted_upload_has_its_jobs_tickets_and_events(
    connection: db.Connection, tenant: str, settings: Settings
) -> None:
    media_id, births = await rows.accepted(connection, tenant, settings, kind="video")
    assert [(b.kind, b.queue, b.role) for b in births] == [
        ("video", "video", "main"),
        ("preview", "image", "preview"),
    ]
    assert await rows.tickets(connection, tenant) == [b.id for b in births]
    assert await rows.moves(connection, tenant, "media", media_id) == [
        (None, "awaiting_upload"),
        ("awaiting_upload", "uploaded"),
        ("uploaded", "queued"),
    ]
    assert await rows.events(connection, tenant) == [
        "media.uploaded",
        "media.queued",
        "job.queued",
        "job.queued",
    ]
    again = await media.accept(
        connection,
        tenant,
        media_id,
        object_version="another",
        kind="video",
        births=uploads.births("video"),
        max_attempts=5,
    )
    assert again is None
    assert len(await rows.tickets(connection, tenant)) == 2
    assert await rows.column(connection, "media", "object_version", tenant, media_id) == "5-1-1"


async def test_a_rolled_back_acceptance_leaves_no_row_and_no_ticket(
    connection: db.Connection, tenant: str, settings: Settings
) -> None:
    slot = await rows.open_slot(connection, tenant, settings)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with connection.transaction():
            assert await media.accept(
                connection,
                tenant,
                slot.id,
                object_version="1",
                kind="image",
                births=uploads.births("image"),
                max_attempts=5,
            )
            raise ZeroDivisionError
    assert await rows.column(connection, "media", "state", tenant, slot.id) == "awaiting_upload"
    assert await connection.fetchval("SELECT count(*) FROM jobs WHERE tenant_id = $1", tenant) == 0
    assert await rows.tickets(connection, tenant) == []
    assert await rows.events(connection, tenant) == []


async def test_a_claim_is_one_attempt_with_a_fence_and_a_lease(desk: Desk) -> None:
    held = await desk.claim(lease_seconds=30.0)
    assert (held.attempt, held.fence, held.media_id) == (1, 1, desk.media_id)
    assert (held.recipe, held.recipe_version, held.generation) == ("web", 1, 1)
    assert await desk.states() == ("processing", "processing")
    assert await desk.job("worker") == "worker-1"
    left = await desk.connection.fetchval(
        "SELECT extract(epoch FROM lease_until - now())::float8 FROM jobs WHERE id = $1",
        desk.birth.id,
    )
    assert 28 < left <= 30
    assert (await rows.events(desk.connection, desk.tenant))[-2:] == [
        "job.processing",
        "media.processing",
    ]


async def test_of_ten_claims_at_once_one_gets_the_job(dsn: str, desk: Desk) -> None:
    async def claim(number: int) -> list[Claim]:
        async with rows.connected(dsn) as own:
            ticket = Ticket("image", desk.tenant, desk.birth.id)
            return await jobs.claim(
                own, [ticket], worker=f"w{number}", lease_seconds=60, kinds=KINDS
            )

    found = await asyncio.gather(*(claim(n) for n in range(10)))
    assert sum(len(claims) for claims in found) == 1
    assert (await desk.job("attempt"), await desk.job("fence")) == (1, 1)
    logged = await rows.moves(desk.connection, desk.tenant, "job", desk.birth.id)
    assert logged == [(None, "queued"), ("queued", "processing")]


async def test_only_what_is_due_queued_and_of_the_tickets_queue_is_claimed(desk: Desk) -> None:
    async def claim(queue: str, tenant: str, job_id: UUID) -> list[Claim]:
        return await jobs.claim(
            desk.connection,
            [Ticket(queue, tenant, job_id)],
            worker="w",
            lease_seconds=60,
            kinds=KINDS,
        )

    assert await claim("video", desk.tenant, desk.birth.id) == []
    assert await claim("image", "default", desk.birth.id) == []
    assert await claim("image", desk.tenant, desk.media_id) == []
    await desk.connection.execute(
        "UPDATE jobs SET run_at = now() + interval '1 s' WHERE id = $1", desk.birth.id
    )
    assert await claim("image", desk.tenant, desk.birth.id) == []
    await desk.connection.execute("UPDATE jobs SET run_at = now() WHERE id = $1", desk.birth.id)
    assert len(await claim("image", desk.tenant, desk.birth.id)) == 1
    assert await claim("image", desk.tenant, desk.birth.id) == []
    assert await jobs.claim(desk.connection, [], worker="w", lease_seconds=60, kinds=KINDS) == []


async def test_the_same_ticket_twice_in_one_claim_is_one_attempt(desk: Desk) -> None:
    ticket = Ticket("image", desk.tenant, desk.birth.id)
    found = await jobs.claim(
        desk.connection, [ticket, ticket], worker="w", lease_seconds=60, kinds=KINDS
    )
    assert len(found) == 1
    assert await desk.job("attempt") == 1


Write = Callable[[db.Connection, Claim], Awaitable[object]]
WRITES: dict[str, Write] = {
    "enter_stage": lambda c, held: jobs.enter_stage(c, held, "encode"),
    "advance": lambda c, held: jobs.advance(c, held, "encode", 50),
    "complete": lambda c, held: jobs.complete(c, held, {"a": 1}, retention_seconds=KEEP),
    "fail": lambda c, held: jobs.fail(c, held, PROBLEM, dead_letter=False, retention_seconds=KEEP),
    "requeue": lambda c, held: jobs.requeue(c, held, reason="x", outcome="retried"),
    "settle_canceled": lambda c, held: jobs.settle_canceled(c, held, retention_seconds=KEEP),
    "describe": lambda c, held: media.describe(c, held, Description(width=1)),
    "show_preview": lambda c, held: media.show_preview(c, held, {"hash": "x"}, Description()),
}


@pytest.mark.parametrize("loss", ["requeued", "claimed again", "completed", "failed", "canceled"])
async def test_a_worker_that_lost_the_job_can_change_nothing(desk: Desk, loss: str) -> None:
    held = await desk.claim()
    c = desk.connection
    match loss:
        case "requeued":
            await jobs.requeue(c, held, reason="lost", outcome="lost")
        case "claimed again":
            await jobs.requeue(c, held, reason="lost", outcome="lost")
            assert (await desk.claim()).fence == held.fence + 1
        case "completed":
            await jobs.complete(c, held, {}, retention_seconds=KEEP)
        case "failed":
            await jobs.fail(c, held, PROBLEM, dead_letter=True, retention_seconds=KEEP)
        case _:
            await jobs.settle_canceled(c, held, retention_seconds=KEEP)
    before = await desk.snapshot()
    for name, write in WRITES.items():
        with pytest.raises(LeaseLost):
            await write(c, held)
        assert await desk.snapshot() == before, name
    assert await jobs.renew(c, [held], lease_seconds=60) == {}
    assert await desk.snapshot() == before


async def test_a_claim_of_another_tenant_holds_nothing(desk: Desk) -> None:
    from dataclasses import replace

    held = await desk.claim()
    before = await desk.snapshot()
    for write in WRITES.values():
        with pytest.raises(LeaseLost):
            await write(desk.connection, replace(held, tenant_id="default"))
    assert await desk.snapshot() == before


async def test_renew_returns_what_is_still_held_and_who_asked_for_an_end(
    connection: db.Connection, tenant: str, settings: Settings
) -> None:
    held = []
    for _ in range(4):
        _, (birth,) = await rows.accepted(connection, tenant, settings)
        held.append(await rows.claim(connection, tenant, birth, lease_seconds=1.0))
    kept, asked, ended, requeued = held
    assert await jobs.cancel(connection, tenant, asked.id, retention_seconds=KEEP)
    await jobs.complete(connection, ended, {}, retention_seconds=KEEP)
    await jobs.requeue(connection, requeued, reason="x", outcome="lost")
    found = await jobs.renew(connection, held, lease_seconds=90)
    assert {key: r.cancel_requested for key, r in found.items()} == {
        kept.key: False,
        asked.key: True,
    }
    left = await connection.fetchval(
        "SELECT min(lease_until - now()) > interval '80 s' FROM jobs"
        " WHERE tenant_id = $1 AND state = 'processing'",
        tenant,
    )
    assert left is True
    assert await jobs.renew(connection, [], lease_seconds=1) == {}


async def test_a_renewal_does_not_change_the_version_that_clients_see(desk: Desk) -> None:
    held = await desk.claim()
    before = await desk.job("version"), await desk.media("version")
    await jobs.renew(desk.connection, [held], lease_seconds=60)
    assert (await desk.job("version"), await desk.media("version")) == before


async def test_progress_never_falls_within_an_attempt_and_starts_anew(desk: Desk) -> None:
    held = await desk.claim()
    seen = []
    for percent in (10.0, 40.0, 20.0, -5.0, 250.0, 99.0):
        await jobs.advance(desk.connection, held, "encode", percent)
        seen.append(await desk.job("progress"))
    assert seen == [10, 40, 40, 40, 100, 100]
    await jobs.requeue(desk.connection, held, reason="x", outcome="retried")
    assert (await desk.job("progress"), await desk.job("stage")) == (None, None)
    await desk.claim()
    assert await desk.job("progress") == 0


async def test_a_completed_job_keeps_its_result_and_its_record(desk: Desk) -> None:
    held = await desk.claim()
    await jobs.complete(
        desk.connection,
        held,
        {"set": "abc"},
        retention_seconds=100,
        record=Record("last words", [{"command": ["ffmpeg"]}]),
    )
    assert await desk.job("result") == {"set": "abc"}
    assert (await desk.job("lease_until"), await desk.job("progress")) == (None, 100)
    (tried,) = await jobs.attempts(desk.connection, desk.tenant, held.id)
    assert (tried["outcome"], tried["fence"]) == ("completed", 1)
    kept = await desk.connection.fetchrow(
        "SELECT log_tail, commands FROM attempts WHERE job_id = $1", held.id
    )
    assert kept is not None
    assert (kept["log_tail"], kept["commands"]) == ("last words", [{"command": ["ffmpeg"]}])


async def test_a_failure_takes_the_media_with_it_and_is_told(desk: Desk) -> None:
    held = await desk.claim()
    problem = Problem(Code.CORRUPT_INPUT, "The end is missing.")
    await jobs.fail(
        desk.connection, held, problem, dead_letter=True, retention_seconds=60, crash=True
    )
    assert await desk.states() == ("failed", "failed")
    assert await desk.job("error") == await desk.media("error") == problem.as_dict()
    assert (await desk.job("dead_letter"), await desk.job("crashes")) == (True, 1)
    assert (await rows.events(desk.connection, desk.tenant))[-3:] == [
        "job.failed",
        "job.dead_lettered",
        "media.failed",
    ]


async def test_a_preview_moves_nothing_but_itself(
    connection: db.Connection, tenant: str, settings: Settings
) -> None:
    media_id, (main, preview) = await rows.accepted(connection, tenant, settings, kind="video")
    held = await rows.claim(connection, tenant, preview)
    assert await rows.column(connection, "media", "state", tenant, media_id) == "queued"
    await jobs.fail(connection, held, PROBLEM, dead_letter=True, retention_seconds=KEEP)
    assert await rows.column(connection, "media", "state", tenant, media_id) == "queued"
    assert await rows.column(connection, "media", "error", tenant, media_id) is None
    await rows.claim(connection, tenant, main)
    assert await rows.column(connection, "media", "state", tenant, media_id) == "processing"


async def make(
    connection: db.Connection, tenant: str, queue: str, number: int, *, delay_seconds: float = 0.0
) -> list[UUID]:
    wanted = [
        NewJob(id=ids.new(), kind="thing", queue=queue, payload={}, delay_seconds=delay_seconds)
        for _ in range(number)
    ]
    async with connection.transaction():
        await jobs.enqueue(connection, tenant, wanted)
    return [j.id for j in wanted]


async def order(connection: db.Connection, queue: str) -> list[UUID]:
    found = await connection.fetch(
        "SELECT id FROM jobs WHERE queue = $1 AND state = 'queued' ORDER BY turn, id", queue
    )
    return [row["id"] for row in found]


async def due(connection: db.Connection, queue: str) -> int:
    await connection.execute("UPDATE jobs SET run_at = now() WHERE queue = $1", queue)
    async with connection.transaction():
        return await jobs.line_up(connection, [queue])


async def test_what_holds_back_has_no_ticket_until_it_is_due(
    connection: db.Connection, tenant: str
) -> None:
    queue = f"q-{tenant}"
    later = await make(connection, tenant, queue, 3, delay_seconds=60)
    (now,) = await make(connection, tenant, queue, 1)
    assert await rows.tickets(connection, tenant) == [now]
    async with connection.transaction():
        assert await jobs.line_up(connection, [queue]) == 0
    assert await due(connection, queue) == 3
    assert sorted(await rows.tickets(connection, tenant)) == sorted([now, *later])
    async with connection.transaction():
        assert await jobs.line_up(connection, [queue]) == 0
    assert await order(connection, queue) == [now, *later]


async def test_what_holds_back_lets_no_newcomer_pass_those_who_wait(
    connection: db.Connection, tenant: str
) -> None:
    """The line has moved on to turn 500; a job of turn 1 that holds back must not set it back."""
    queue, newcomer = f"q-{tenant}", await rows.new_tenant(connection)
    (early,) = await make(connection, tenant, queue, 1, delay_seconds=3600)
    waiting = await make(connection, tenant, queue, 3)
    await connection.execute(
        "UPDATE jobs SET turn = turn + 500 WHERE queue = $1 AND id <> $2", queue, early
    )
    new = await make(connection, newcomer, queue, 3)
    assert await order(connection, queue) == [
        *(job for pair in zip(waiting, new, strict=True) for job in pair),
        early,
    ]


async def test_a_retry_goes_on_from_its_place_and_what_is_new_from_the_end(
    connection: db.Connection, tenant: str
) -> None:
    queue = f"q-{tenant}"
    (first,) = await make(connection, tenant, queue, 1)
    claimed = await jobs.claim(
        connection,
        [Ticket(queue, tenant, first)],
        worker="w",
        lease_seconds=60,
        kinds=[("thing", 1)],
    )
    waiting = await make(connection, tenant, queue, 3)
    (delayed,) = await make(connection, tenant, queue, 1, delay_seconds=60)
    async with connection.transaction():
        await jobs.requeue(
            connection, claimed[0], reason="internal", outcome="retried", delay_seconds=60
        )
    assert await order(connection, queue) == [*waiting, first, delayed]
    assert await due(connection, queue) == 2
    assert await order(connection, queue) == [first, *waiting, delayed]


async def test_many_that_are_due_at_once_share_the_turns_with_others(
    connection: db.Connection, tenant: str
) -> None:
    queue, quiet = f"q-{tenant}", await rows.new_tenant(connection)
    await make(connection, tenant, queue, 50, delay_seconds=60)
    assert await due(connection, queue) == 50
    new = await make(connection, quiet, queue, 2)
    places = [(await order(connection, queue)).index(job) for job in new]
    assert places == [1, 3]


async def test_a_job_that_was_claimed_while_it_held_back_can_hold_back_again(
    connection: db.Connection, tenant: str
) -> None:
    """A ticket from before may claim it, once it is due, ahead of its place in the line."""
    queue = f"q-{tenant}"
    (job,) = await make(connection, tenant, queue, 1, delay_seconds=60)
    for _ in range(3):
        await connection.execute("UPDATE jobs SET run_at = now() WHERE id = $1", job)
        (held,) = await jobs.claim(
            connection,
            [Ticket(queue, tenant, job)],
            worker="w",
            lease_seconds=60,
            kinds=[("thing", 1)],
        )
        assert held.turn == 1
        async with connection.transaction():
            await jobs.requeue(
                connection, held, reason="internal", outcome="retried", delay_seconds=60,
                give_back_attempt=True,
            )  # fmt: skip


async def test_a_retry_waits_as_long_as_it_should_and_counts(desk: Desk) -> None:
    held = await desk.claim()
    async with desk.connection.transaction():
        await jobs.requeue(
            desk.connection,
            held,
            reason="storage_unavailable",
            outcome="retried",
            problem=PROBLEM,
            delay_seconds=30.0,
            resource=True,
        )
    assert await desk.states() == ("queued", "queued")
    assert await desk.job("error") == PROBLEM.as_dict()
    assert (await desk.job("attempt"), await desk.job("resource_failures")) == (1, 1)
    waits = await desk.connection.fetchval(
        "SELECT extract(epoch FROM run_at - now())::float8 FROM jobs WHERE id = $1", held.id
    )
    assert 29 < waits <= 30
    assert await rows.tickets(desk.connection, desk.tenant) == [held.id]  # that of its birth
    with pytest.raises(AssertionError, match="not claimable"):
        await desk.claim()


async def test_a_released_job_has_its_attempt_back(desk: Desk) -> None:
    for fence in range(1, 8):  # more often than there are attempts
        held = await desk.claim()
        assert (held.attempt, held.fence) == (1, fence)
        await jobs.requeue(
            desk.connection, held, reason="released", outcome="released", give_back_attempt=True
        )
    assert await desk.job("attempt") == 0
    tried = await jobs.attempts(desk.connection, desk.tenant, desk.birth.id)
    assert [row["outcome"] for row in tried] == ["released"] * 7


async def test_a_rerouted_job_is_another_queues(desk: Desk) -> None:
    held = await desk.claim()
    await jobs.requeue(
        desk.connection,
        held,
        reason="rerouted",
        outcome="rerouted",
        give_back_attempt=True,
        to_queue="video",
        to_kind="video",
    )
    with pytest.raises(AssertionError, match="not claimable"):
        await desk.claim()
    found = await jobs.claim(
        desk.connection,
        [Ticket("video", desk.tenant, held.id)],
        worker="w",
        lease_seconds=60,
        kinds=KINDS,
    )
    assert [(c.queue, c.kind, c.attempt) for c in found] == [("video", "video", 1)]


async def test_attempts_cannot_exceed_their_cap(
    connection: db.Connection, tenant: str, settings: Settings
) -> None:
    _, (birth,) = await rows.accepted(connection, tenant, settings, max_attempts=2)
    for number in (1, 2):
        held = await rows.claim(connection, tenant, birth)
        assert held.attempt == number
        await jobs.requeue(connection, held, reason="x", outcome="retried")
    with pytest.raises(asyncpg.CheckViolationError):
        await rows.claim(connection, tenant, birth)


async def test_a_rolled_back_requeue_leaves_the_job_held_and_no_ticket(desk: Desk) -> None:
    held = await desk.claim()
    before = await desk.snapshot()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with desk.connection.transaction():
            await jobs.requeue(desk.connection, held, reason="x", outcome="retried")
            raise ZeroDivisionError
    assert await desk.snapshot() == before
    await jobs.enter_stage(desk.connection, held, "encode")


async def test_a_canceled_queued_job_ends_at_once(desk: Desk) -> None:
    assert await jobs.cancel(desk.connection, desk.tenant, desk.birth.id, retention_seconds=KEEP)
    assert await desk.states() == ("canceled", "failed")
    assert (await rows.events(desk.connection, desk.tenant))[-2:] == [
        "job.canceled",
        "media.failed",
    ]
    with pytest.raises(AssertionError, match="not claimable"):
        await desk.claim()
    assert not await jobs.cancel(
        desk.connection, desk.tenant, desk.birth.id, retention_seconds=KEEP
    )


async def test_a_cancel_and_a_claim_at_once_end_in_one_of_two_ways(
    dsn: str, tenant: str, connection: db.Connection, settings: Settings
) -> None:
    for _ in range(10):
        _, (birth,) = await rows.accepted(connection, tenant, settings)

        async def claim(birth: Birth = birth) -> list[Claim]:
            async with rows.connected(dsn) as own:
                ticket = Ticket("image", tenant, birth.id)
                return await jobs.claim(own, [ticket], worker="w", lease_seconds=60, kinds=KINDS)

        claims, canceled = await asyncio.gather(
            claim(), jobs.cancel(connection, tenant, birth.id, retention_seconds=KEEP)
        )
        assert canceled
        row = await jobs.get(connection, tenant, birth.id)
        assert row is not None
        if claims:
            assert (row["state"], row["cancel_requested"]) == ("processing", True)
        else:
            assert row["state"] == "canceled"


async def test_a_replay_counts_from_zero_and_keeps_the_history(desk: Desk) -> None:
    for _ in range(2):
        held = await desk.claim()
        await jobs.requeue(
            desk.connection, held, reason="x", outcome="retried", crash=True, resource=True
        )
    held = await desk.claim()
    await jobs.fail(desk.connection, held, PROBLEM, dead_letter=True, retention_seconds=KEEP)
    row = await jobs.get(desk.connection, desk.tenant, held.id)
    assert row is not None
    async with desk.connection.transaction():
        assert await media.replay(desk.connection, desk.tenant, row)
    after = await jobs.get(desk.connection, desk.tenant, held.id)
    assert after is not None
    counts = ("attempt", "crashes", "resource_failures", "dead_letter", "generation")
    assert [after[name] for name in counts] == [0, 0, 0, False, 2]
    assert await desk.media("generation") == 2
    again = await desk.claim()
    assert (again.attempt, again.fence) == (1, 4)
    assert len(await jobs.attempts(desk.connection, desk.tenant, held.id)) == 4
    assert not await media.replay(desk.connection, desk.tenant, row)


async def test_of_many_replays_at_once_one_happens(dsn: str, desk: Desk) -> None:
    held = await desk.claim()
    await jobs.fail(desk.connection, held, PROBLEM, dead_letter=True, retention_seconds=KEEP)
    row = await jobs.get(desk.connection, desk.tenant, held.id)
    assert row is not None

    async def replay() -> bool:
        async with rows.connected(dsn) as own, own.transaction():
            return await media.replay(own, desk.tenant, row)

    assert sorted(await asyncio.gather(*(replay() for _ in range(5)))) == [False] * 4 + [True]
    assert await rows.tickets(desk.connection, desk.tenant) == [held.id, held.id]


async def test_one_generation_has_one_main_job(desk: Desk) -> None:
    with pytest.raises(asyncpg.UniqueViolationError):
        await media.add_job(
            desk.connection,
            desk.tenant,
            desk.media_id,
            Birth("image", "image", "main"),
            max_attempts=5,
        )


async def test_a_late_main_job_of_an_older_generation_moves_no_media(desk: Desk) -> None:
    """As when a canceled media was processed again while the old worker still ran."""
    held = await desk.claim()
    await desk.connection.execute(
        "UPDATE media SET generation = 2, state = 'processing' WHERE id = $1", desk.media_id
    )
    version = await desk.media("version")
    await jobs.advance(desk.connection, held, "encode", 10)
    assert not await media.publish(desk.connection, held, set_id="old", superseded_seconds=1)
    await jobs.fail(desk.connection, held, PROBLEM, dead_letter=False, retention_seconds=KEEP)
    assert await desk.states() == ("failed", "processing")
    assert (await desk.media("version"), await desk.media("set_id")) == (version, None)


async def test_nothing_is_published_for_a_deleted_media(desk: Desk) -> None:
    held = await desk.claim()
    await media.delete(desk.connection, desk.tenant, desk.media_id, reason="requested")
    with pytest.raises(LeaseLost):
        await media.describe(desk.connection, held, Description(width=1))
    await jobs.complete(desk.connection, held, {}, retention_seconds=KEEP)
    assert not await media.publish(desk.connection, held, set_id="s", superseded_seconds=1)
    assert "media.ready" not in await rows.events(desk.connection, desk.tenant)


async def test_a_probe_fills_in_what_it_knows_and_no_more(desk: Desk) -> None:
    held = await desk.claim()
    await media.describe(desk.connection, held, Description(width=640, kind="image"))
    await media.describe(desk.connection, held, Description(height=480, sha256="ab"))
    assert [await desk.media(n) for n in ("width", "height", "kind", "sha256", "info")] == [
        640,
        480,
        "image",
        "ab",
        None,
    ]
    await media.show_preview(desk.connection, held, {"hash": "x"}, Description(width=1))
    assert await desk.media("width") == 640  # the probe of the main job knows better
    assert await desk.media("preview") == {"hash": "x"}
    assert (await rows.events(desk.connection, desk.tenant))[-1] == "media.preview"


async def test_each_move_is_logged_once_and_the_log_is_a_legal_path(
    desk: Desk, settings: Settings, tmp_path: Path
) -> None:
    from mediamill import ids, signing
    from mediamill.storage.local import open_local

    store = open_local(
        settings.objects_dir, ids.new(), lambda: signing.Keyring({1: b"k"}), rows.PUBLIC_URL
    )
    c = desk.connection
    await jobs.requeue(c, await desk.claim(), reason="lost", outcome="lost", crash=True)
    held = await desk.claim()
    await jobs.enter_stage(c, held, "encode")
    await jobs.fail(c, held, PROBLEM, dead_letter=True, retention_seconds=KEEP)
    row = await jobs.get(c, desk.tenant, held.id)
    assert row is not None
    async with c.transaction():
        assert await media.replay(c, desk.tenant, row)
    await rows.publish(c, store, await desk.claim(), {"w8.webp": b"x"})
    job = await rows.moves(c, desk.tenant, "job", held.id)
    assert job == [
        (None, "queued"),
        ("queued", "processing"),
        ("processing", "queued"),
        ("queued", "processing"),
        ("processing", "failed"),
        ("failed", "queued"),
        ("queued", "processing"),
        ("processing", "completed"),
    ]
    rows.check_path(job, "job")
    of_media = await rows.moves(c, desk.tenant, "media", desk.media_id)
    assert [b for _, b in of_media] == [
        "awaiting_upload",
        "uploaded",
        "queued",
        "processing",
        "queued",
        "processing",
        "failed",
        "queued",
        "processing",
        "ready",
    ]
    rows.check_path(of_media, "media")
    said = await rows.events(c, desk.tenant)
    assert [e for e in said if e.startswith("media.")] == [
        "media.uploaded",
        "media.queued",
        "media.processing",
        "media.queued",
        "media.processing",
        "media.failed",
        "media.queued",
        "media.processing",
        "media.ready",
    ]
    ids_of_events = await c.fetch("SELECT event_id FROM events WHERE tenant_id = $1", desk.tenant)
    assert len({row["event_id"] for row in ids_of_events}) == len(said)
    assert {row["event_id"].version for row in ids_of_events} == {7}


async def test_positions_follow_priority_and_then_age(
    connection: db.Connection, tenant: str, settings: Settings
) -> None:
    births = []
    for priority in (0, 5, 0):
        birth = Birth("image", "webhook", "main", priority)  # a queue that nothing else uses here
        await rows.accepted(connection, tenant, settings, births=[birth])
        births.append(birth)
    found = [await jobs.position(connection, tenant, birth.id) for birth in births]
    assert found == [1, 0, 2]
    ticket = Ticket("webhook", tenant, births[1].id)
    await jobs.claim(connection, [ticket], worker="w", lease_seconds=60, kinds=KINDS)
    assert await jobs.position(connection, tenant, births[2].id) == 1

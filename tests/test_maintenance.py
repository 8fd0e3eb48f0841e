"""The periodic duties: each against rows and objects that the test lays out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from tests import rows

from mediamill import (
    db,
    failpoints,
    ids,
    jobs,
    media,
    queue,
    signing,
    tallies,
    uploads,
    variants,
)
from mediamill.config import Settings
from mediamill.failures import Code, Failure, LeaseLost, Problem
from mediamill.jobs import Birth, Claim
from mediamill.maintenance import Maintenance
from mediamill.storage.local import LocalStorage, open_local

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def dsn(server: str, template: str) -> Iterator[str]:
    with rows.fresh_database(server, template) as made:
        yield made


class Clock:
    """Time as this process sees it; the database has its own."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Mill:
    """An installation whose duties run when the test says."""

    pool: db.Pool
    settings: Settings
    store: LocalStorage
    clock: Clock
    duties: Maintenance
    tenant: str

    async def do(self, name: str) -> int:
        duty = next(duty for duty in self.duties.duties if duty.name == name)
        return await self.duties.once(duty)

    async def sql(self, statement: str, *values: object) -> list[db.Row]:
        return await self.pool.fetch(statement, *values)

    async def accepted(self, **more: object) -> tuple[UUID, Birth]:
        async with db.acquire(self.pool) as connection:
            media_id, births = await rows.accepted(
                connection,
                self.tenant,
                self.settings,
                **more,  # type: ignore[arg-type]
            )
        return media_id, births[0]

    async def claim(self, birth: Birth, lease_seconds: float = 60.0) -> Claim:
        async with db.acquire(self.pool) as connection:
            return await rows.claim(connection, self.tenant, birth, lease_seconds=lease_seconds)

    async def ready(self, **contents: bytes) -> tuple[UUID, str]:
        media_id, birth = await self.accepted()
        held = await self.claim(birth)
        async with db.acquire(self.pool) as connection:
            named = {f"{name}.webp": content for name, content in contents.items()}
            return media_id, await rows.publish(connection, self.store, held, named)

    async def job(self, birth: Birth) -> db.Row:
        (row,) = await self.sql("SELECT * FROM jobs WHERE id = $1", birth.id)
        return row

    async def tickets(self) -> list[UUID]:
        async with db.acquire(self.pool) as connection:
            return await rows.tickets(connection, self.tenant)

    async def swept(self, what: str) -> dict[str, int]:
        """What the metrics say of such leftovers."""
        async with db.acquire(self.pool) as connection:
            counted = await tallies.read(connection, tallies.SWEPT)
        assert {outcome for kind, outcome in counted if kind == what} <= set(
            tallies.LEFTOVERS[what]
        )
        return {outcome: count for (kind, outcome), count in counted.items() if kind == what}

    def files(self) -> list[str]:
        root = self.store.root
        return sorted(
            str(path.relative_to(root))
            for path in root.rglob("*")
            if path.is_file() and path.name != "mediamill-storage"
        )

    async def put(self, key: str, content: bytes = b"12345") -> None:
        source = self.store.root.parent / f"source-{ids.new()}"
        source.write_bytes(content)
        await self.store.put(key, source)
        source.unlink()


@pytest.fixture
async def mill(dsn: str, tmp_path: Path) -> AsyncIterator[Mill]:
    # A server of a test run is always young: the lease here is shorter than its age.
    settings = rows.settings(
        tmp_path, lease_seconds=0.3, self_stop_seconds=0.2, beat_seconds=0.1, max_crashes=3
    )
    store = open_local(
        settings.objects_dir, ids.new(), lambda: signing.Keyring({1: b"k"}), rows.PUBLIC_URL
    )
    clock = Clock()
    async with rows.pooled(dsn) as pool:
        async with db.acquire(pool) as connection:
            await rows.clear(connection)
            tenant = await rows.new_tenant(connection)
        yield Mill(
            pool, settings, store, clock, Maintenance(settings, pool, store, clock=clock), tenant
        )


# --- rescue


async def test_an_expired_lease_is_queued_again_with_a_crash_and_a_fresh_ticket(
    mill: Mill,
) -> None:
    _, birth = await mill.accepted()
    held = await mill.claim(birth, lease_seconds=-1)
    await mill.sql("DELETE FROM mediamill_tickets")
    assert await mill.do("rescue") == 1
    row = await mill.job(birth)
    assert (row["state"], row["attempt"], row["crashes"]) == ("queued", 1, 1)
    assert row["error"]["code"] == "worker_crashed"
    assert await mill.tickets() == [birth.id]
    async with db.acquire(mill.pool) as connection:
        (tried,) = await jobs.attempts(connection, mill.tenant, birth.id)
        assert tried["outcome"] == "lost"
        with pytest.raises(LeaseLost):
            await jobs.complete(connection, held, {}, retention_seconds=60)
    # The lease already cost its time: it can run at once.
    assert (await mill.claim(birth)).attempt == 2


async def test_a_living_lease_is_left_alone(mill: Mill) -> None:
    _, birth = await mill.accepted()
    held = await mill.claim(birth, lease_seconds=30)
    assert await mill.do("rescue") == 0
    async with db.acquire(mill.pool) as connection:
        renewed = await jobs.renew(connection, [held], lease_seconds=30)
        assert renewed[held.key].cancel_requested is False


async def test_the_third_death_buries_the_job(mill: Mill) -> None:
    media_id, birth = await mill.accepted()
    for _ in range(3):
        await mill.claim(birth, lease_seconds=-1)
        assert await mill.do("rescue") == 1
    row = await mill.job(birth)
    assert (row["state"], row["dead_letter"], row["crashes"]) == ("failed", True, 3)
    assert row["error"]["code"] == "worker_crashed"
    (shown,) = await mill.sql("SELECT state, error FROM media WHERE id = $1", media_id)
    assert (shown["state"], shown["error"]["code"]) == ("failed", "worker_crashed")
    assert await mill.do("rescue") == 0
    async with db.acquire(mill.pool) as connection:
        log = await rows.moves(connection, mill.tenant, "job", birth.id)
        assert len(log) == 1 + 3 * 2
        rows.check_path(log, "job")
        assert "job.dead_lettered" in await rows.events(connection, mill.tenant)


async def test_a_dead_worker_that_was_asked_to_stop_leaves_a_canceled_job(mill: Mill) -> None:
    _, birth = await mill.accepted()
    await mill.claim(birth, lease_seconds=-1)
    async with db.acquire(mill.pool) as connection:
        await jobs.cancel(connection, mill.tenant, birth.id, retention_seconds=60)
    assert await mill.do("rescue") == 1
    assert (await mill.job(birth))["state"] == "canceled"


async def test_after_an_outage_of_its_own_the_living_may_renew_first(mill: Mill) -> None:
    _, birth = await mill.accepted()
    await mill.do("rescue")
    await mill.claim(birth, lease_seconds=-1)
    mill.clock.now += 60  # this process was frozen
    assert await mill.do("rescue") == 0
    mill.clock.now += 0.2  # not yet one lease later
    assert await mill.do("rescue") == 0
    mill.clock.now += 0.2
    assert await mill.do("rescue") == 1


async def test_at_its_usual_pace_it_does_not_hold_off(mill: Mill) -> None:
    _, birth = await mill.accepted()
    await mill.do("rescue")
    await mill.claim(birth, lease_seconds=-1)
    mill.clock.now += mill.settings.sweep_seconds * 1.1 + 1.0
    assert await mill.do("rescue") == 1


async def test_after_a_restart_of_the_server_the_living_may_renew_first(
    mill: Mill, tmp_path: Path
) -> None:
    """A server younger than a lease counts as an outage: no worker could renew."""
    settings = rows.settings(tmp_path, lease_seconds=1e6, self_stop_seconds=5.0)
    duties = Maintenance(settings, mill.pool, mill.store, clock=mill.clock)
    _, birth = await mill.accepted()
    await mill.claim(birth, lease_seconds=-1)
    assert await duties.once(duties.duties[0]) == 0
    assert (await mill.job(birth))["state"] == "processing"


async def test_a_late_beat_against_the_sweep_has_one_winner(mill: Mill) -> None:
    _, birth = await mill.accepted()
    held = await mill.claim(birth, lease_seconds=-1)

    async def beat() -> bool:
        async with db.acquire(mill.pool) as connection:
            found = await jobs.renew(connection, [held], lease_seconds=30)
            return held.key in found and found[held.key].renewed

    renewed, rescued = await asyncio.gather(beat(), mill.do("rescue"))
    assert renewed == (rescued == 0)
    assert (await mill.job(birth))["state"] == ("processing" if renewed else "queued")


async def test_a_duty_runs_once_at_a_time(mill: Mill) -> None:
    _, birth = await mill.accepted()
    await mill.claim(birth, lease_seconds=-1)
    async with db.transaction(mill.pool) as connection:
        assert await connection.fetchval("SELECT pg_try_advisory_xact_lock($1)", 0x6D6D_0001)
        assert await mill.do("rescue") == 0
    others = [Maintenance(mill.settings, mill.pool, mill.store) for _ in range(4)]
    done = await asyncio.gather(*(m.once(m.duties[0]) for m in others))
    assert sum(done) == 1
    numbers = [duty.number for duty in mill.duties.duties]
    assert len(set(numbers)) == len(numbers)


# --- end_stalled


async def test_a_session_that_stands_still_within_a_statement_is_ended(
    mill: Mill, dsn: str
) -> None:
    """As a process leaves it that is frozen between the two halves of a statement."""
    _, birth = await mill.accepted()
    sessions: list[Any] = [
        await asyncpg.connect(dsn, server_settings={"application_name": name})
        for name in ("mediamill worker", "something else", "mediamill worker")
    ]
    ours, foreign, slow = sessions
    try:
        for stalled in (ours, foreign):
            await stalled.execute("BEGIN")
            await stalled.execute("SELECT 1 FROM jobs WHERE id = $1 FOR SHARE", birth.id)
            query = b"\0SELECT 1\0" + (0).to_bytes(2, "big")
            parse = b"P" + (4 + len(query)).to_bytes(4, "big") + query
            flush = b"H" + (4).to_bytes(4, "big")
            stalled._transport.pause_reading()
            stalled._transport.write(parse + flush)  # and no more: the server waits for the rest
        await slow.execute("BEGIN")
        long = asyncio.create_task(slow.execute("SELECT pg_sleep(2)"))
        await asyncio.sleep(2 * mill.settings.lease_seconds)
        assert await mill.do("end_stalled") == 1
        await long, "a statement that takes its time is let be"
        left = {r["pid"] for r in await mill.sql("SELECT pid FROM pg_stat_activity")}
        assert ours.get_server_pid() not in left
        assert foreign.get_server_pid() in left, "other programs' sessions are none of ours"
        assert await mill.do("end_stalled") == 0
    finally:
        for session in sessions:
            session.terminate()


# --- republish


async def test_a_due_job_without_a_ticket_gets_one(mill: Mill) -> None:
    _, lost = await mill.accepted()
    _, fine = await mill.accepted()
    _, young = await mill.accepted()
    _, later = await mill.accepted()
    await mill.sql(
        "DELETE FROM mediamill_tickets WHERE convert_from(payload, 'UTF8') NOT LIKE $1",
        f"%{fine.id}",
    )
    await mill.sql(
        "UPDATE jobs SET queued_at = queued_at - interval '10 s', run_at = run_at - interval '10 s'"
        " WHERE id <> $1",
        young.id,
    )
    await mill.sql("UPDATE jobs SET run_at = now() + interval '1 h' WHERE id = $1", later.id)
    assert await mill.do("republish") == 1
    assert await mill.tickets() == [fine.id, lost.id]
    assert await mill.do("republish") == 0
    async with db.transaction(mill.pool) as connection:
        taken = await queue.take(connection, ["image"], most=5)
        assert {t.job_id for t in taken} == {fine.id, lost.id}


async def test_a_picked_ticket_does_not_count(mill: Mill) -> None:
    _, birth = await mill.accepted()
    await mill.sql("UPDATE mediamill_tickets SET status = 'picked'")
    await mill.sql("UPDATE jobs SET queued_at = queued_at - interval '10 s',"
                   " run_at = run_at - interval '10 s'")  # fmt: skip
    assert await mill.do("republish") == 1
    assert await mill.tickets() == [birth.id]


async def test_a_running_job_needs_no_ticket(mill: Mill) -> None:
    _, birth = await mill.accepted()
    await mill.claim(birth)
    await mill.sql("DELETE FROM mediamill_tickets")
    await mill.sql("UPDATE jobs SET queued_at = queued_at - interval '10 s',"
                   " run_at = run_at - interval '10 s'")  # fmt: skip
    assert await mill.do("republish") == 0


# --- close_slots, expire_media


async def slot(mill: Mill, late_seconds: float) -> media.Slot:
    async with db.acquire(mill.pool) as connection:
        made = await rows.open_slot(connection, mill.tenant, mill.settings)
    await mill.sql(
        "UPDATE media SET upload_expires_at = now() - make_interval(secs => $2) WHERE id = $1",
        made.id,
        late_seconds,
    )
    return made


async def state(mill: Mill, media_id: UUID) -> str:
    (row,) = await mill.sql("SELECT state FROM media WHERE id = $1", media_id)
    found: str = row["state"]
    return found


async def test_a_slot_past_its_time_is_accepted_if_the_bytes_are_there_and_else_expires(
    mill: Mill,
) -> None:
    there, missing, short = [await slot(mill, 60) for _ in range(3)]
    in_grace, open_still = await slot(mill, 5), await slot(mill, -60)
    await mill.put(there.upload_key, b"12345")
    await mill.put(short.upload_key, b"123")
    assert await mill.do("close_slots") == 3
    assert await state(mill, there.id) == "queued"
    assert await state(mill, missing.id) == await state(mill, short.id) == "expired"
    assert await state(mill, in_grace.id) == "awaiting_upload"
    assert await state(mill, open_still.id) == "awaiting_upload"
    assert len(await mill.tickets()) == 1
    async with db.acquire(mill.pool) as connection:
        assert (await rows.events(connection, mill.tenant)).count("media.expired") == 2
    assert await mill.do("close_slots") == 0
    # What came for an expired slot is erased; the accepted one stays.
    assert await mill.do("erase") == 2
    assert mill.files() == [there.upload_key]


async def test_media_past_their_time_are_deleted_as_by_request(mill: Mill) -> None:
    old, _ = await mill.ready(w8=b"old")
    young, _ = await mill.ready(w8=b"young")
    await mill.sql("UPDATE media SET expires_at = now() - interval '1 s' WHERE id = $1", old)
    await mill.sql("UPDATE media SET expires_at = now() + interval '1 h' WHERE id = $1", young)
    assert await mill.do("expire_media") == 1
    assert await mill.do("expire_media") == 0
    assert await mill.do("erase") == 1
    assert [f.split("/")[2] for f in mill.files()] == [str(young)]
    (said,) = await mill.sql("SELECT data FROM events WHERE type = 'media.deleted'")
    assert said["data"] == {"reason": "expired"}


# --- erase


async def test_erasing_removes_every_byte_of_the_media_and_no_other(mill: Mill) -> None:
    one, _ = await mill.ready(w8=b"one")
    two, _ = await mill.ready(w8=b"two")
    for media_id in (one, two):
        await mill.put(f"{uploads.prefix(mill.tenant, media_id)}/n/original")
    async with db.transaction(mill.pool) as connection:
        assert await uploads.delete(connection, mill.settings, mill.tenant, one, reason="requested")
        assert not await uploads.delete(
            connection, mill.settings, mill.tenant, one, reason="requested"
        )
    assert await mill.do("erase") == 1
    assert {f.split("/")[2] for f in mill.files()} == {str(two)}
    assert await mill.sql("SELECT 1 FROM erasures") == []
    assert await mill.sql("SELECT 1 FROM variants WHERE media_id = $1", one) == []
    assert await mill.sql("SELECT 1 FROM sets WHERE media_id = $1", one) == []
    assert await mill.do("erase") == 0


async def test_erasing_waits_for_the_worker_that_still_runs(mill: Mill) -> None:
    media_id, birth = await mill.accepted()
    held = await mill.claim(birth, lease_seconds=60)
    await mill.put(f"{uploads.prefix(mill.tenant, media_id)}/n/original")
    async with db.transaction(mill.pool) as connection:
        await uploads.delete(connection, mill.settings, mill.tenant, media_id, reason="requested")
    assert await mill.do("erase") == 0
    async with db.acquire(mill.pool) as connection:
        renewed = await jobs.renew(connection, [held], lease_seconds=60)
        assert renewed[held.key].cancel_requested is True
        await jobs.settle_canceled(connection, held, retention_seconds=60)
    assert await mill.do("erase") == 1
    assert mill.files() == []


async def test_an_erasure_that_storage_refuses_is_tried_again(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    media_id, _ = await mill.ready(w8=b"x")
    async with db.transaction(mill.pool) as connection:
        await uploads.delete(connection, mill.settings, mill.tenant, media_id, reason="requested")

    async def refuses(_self: LocalStorage, _prefix: str) -> int:
        raise Failure(Code.STORAGE_UNAVAILABLE)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "delete", refuses)
        assert await mill.do("erase") == 0
    assert len(await mill.sql("SELECT 1 FROM erasures")) == 1
    assert await mill.do("erase") == 1
    assert await mill.swept("media") == {"failed": 1, "erased": 1}


async def test_the_preview_of_an_erased_media_is_forgotten_in_the_log(mill: Mill) -> None:
    media_id, birth = await mill.accepted()
    held = await mill.claim(birth)
    async with db.transaction(mill.pool) as connection:
        await media.show_preview(connection, held, {"hash": "face"}, media.Description())
        await jobs.fail(
            connection,
            held,
            Problem(Code.TOOL_FAILED),
            dead_letter=False,
            retention_seconds=60,
        )
        await uploads.delete(connection, mill.settings, mill.tenant, media_id, reason="requested")
    await mill.do("erase")
    kept = await mill.sql("SELECT data FROM events WHERE tenant_id = $1", mill.tenant)
    assert "face" not in str([row["data"] for row in kept])


# --- sweep_sets, sweep_staging


async def superseded(mill: Mill) -> tuple[UUID, str, str]:
    """A media with an old and a current set."""
    media_id, old = await mill.ready(w8=b"old")
    birth = Birth("image", "image", "main")
    async with db.transaction(mill.pool) as connection:
        await media.reprocess(
            connection,
            mill.tenant,
            media_id,
            recipe="web",
            recipe_version=1,
            birth=birth,
            max_attempts=5,
        )
    held = await mill.claim(birth)
    async with db.acquire(mill.pool) as connection:
        new = await rows.publish(connection, mill.store, held, {"w8.webp": b"new"})
    return media_id, old, new


async def test_a_superseded_set_goes_after_its_time_and_the_current_one_stays(mill: Mill) -> None:
    media_id, old, new = await superseded(mill)
    assert await mill.do("sweep_sets") == 0
    assert len(mill.files()) == 2
    await mill.sql("UPDATE sets SET expires_at = now() - interval '1 s' WHERE set_id = $1", old)
    assert await mill.do("sweep_sets") == 1
    assert [f.split("/")[4] for f in mill.files()] == [new]
    (row,) = await mill.sql("SELECT set_id FROM sets WHERE media_id = $1", media_id)
    assert row["set_id"] == new
    (variant,) = await mill.sql("SELECT set_id FROM variants WHERE media_id = $1", media_id)
    assert variant["set_id"] == new


async def test_a_set_that_is_published_again_while_it_is_swept_keeps_its_objects(
    mill: Mill,
) -> None:
    _, old, _ = await superseded(mill)
    await mill.sql("UPDATE sets SET expires_at = now() - interval '1 s' WHERE set_id = $1", old)
    async with db.acquire(mill.pool) as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(
            "UPDATE sets SET superseded_at = NULL, expires_at = NULL WHERE set_id = $1", old
        )
        sweeping = asyncio.create_task(mill.do("sweep_sets"))
        while not await mill.sql(  # noqa: ASYNC110  # nothing tells us
            "SELECT 1 FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"
        ):
            await asyncio.sleep(0.01)  # until the sweep waits for the row
        await transaction.commit()
        await sweeping
    assert len(await mill.sql("SELECT 1 FROM sets WHERE set_id = $1", old)) == 1
    assert any(old in file for file in mill.files())


async def test_a_set_that_was_only_reserved_is_swept(mill: Mill) -> None:
    """A crash between the reservation and the end of the attempt leaves objects and no manifest."""
    media_id, birth = await mill.accepted()
    held = await mill.claim(birth)
    async with db.acquire(mill.pool) as connection:
        await variants.reserve(connection, held, "0" * 20)
    prefix = variants.set_prefix(mill.tenant, media_id, "web", 1, "0" * 20)
    await mill.put(f"{prefix}/w8.webp")
    assert await mill.do("sweep_sets") == 0
    await mill.sql("UPDATE sets SET expires_at = now() - interval '1 s'")
    assert await mill.do("sweep_sets") == 1
    assert mill.files() == []


async def test_a_reservation_does_not_hide_the_set_that_is_served(mill: Mill) -> None:
    media_id, old, new = await superseded(mill)
    (row,) = await mill.sql(
        "SELECT id, fence FROM jobs WHERE media_id = $1 ORDER BY generation DESC LIMIT 1", media_id
    )
    birth = Birth("image", "image", "main")
    async with db.transaction(mill.pool) as connection:
        await media.reprocess(
            connection, mill.tenant, media_id, recipe="web", recipe_version=1, birth=birth,
            max_attempts=5,
        )  # fmt: skip
    held = await mill.claim(birth)
    assert row["id"] != held.id
    async with db.acquire(mill.pool) as connection:
        for set_id in (old, new, "1" * 20):
            await variants.reserve(connection, held, set_id)
        found = await variants.current(connection, mill.tenant, media_id, "w8.webp")
    assert found is not None
    assert new in found["key"]


async def test_staging_of_attempts_that_are_no_longer_at_work_is_swept(mill: Mill) -> None:
    _, birth = await mill.accepted()
    lost = await mill.claim(birth)
    await mill.put(f"{variants.stage_prefix(lost)}/w8.webp")
    async with db.acquire(mill.pool) as connection:
        await jobs.requeue(connection, lost, reason="lost", outcome="lost")
    held = await mill.claim(birth)
    await mill.put(f"{variants.stage_prefix(held)}/w8.webp")
    await mill.put(f"stage/{mill.tenant}/not-one-of-ours/x")
    await mill.put(f"stage/{mill.tenant}/{held.id}.x/x")
    await mill.put(f"stage/another-tenant/{held.id}.{held.fence}/x")
    assert await mill.do("sweep_staging") >= 3
    mine = [f for f in mill.files() if f.startswith(f"stage/{mill.tenant}/")]
    assert mine == [f"{variants.stage_prefix(held)}/w8.webp"]
    async with db.acquire(mill.pool) as connection:
        await jobs.complete(connection, held, {}, retention_seconds=60)
    await mill.do("sweep_staging")
    assert [f for f in mill.files() if f.startswith(f"stage/{mill.tenant}/")] == []


async def test_what_crashed_uploads_left_is_swept_after_a_day(mill: Mill) -> None:
    receivers = [await mill.store.receive(f"uploads/t/{n}") for n in range(2)]
    for receiver in receivers:
        await receiver.write(b"x")
    now = time.time()
    assert await mill.store.sweep(older_than_seconds=24 * 3600, now=now) == 0
    assert len(list((mill.store.root / ".incoming").iterdir())) == 2
    assert await mill.store.sweep(older_than_seconds=24 * 3600, now=now + 25 * 3600) == 2
    for receiver in receivers:
        await receiver.abort()


async def test_uploaded_bytes_that_no_media_wants_are_swept(mill: Mill) -> None:
    """The API died between the bytes and their row, or they came after a deletion."""
    accepted, _ = await mill.accepted()
    deleted, _ = await mill.accepted()
    async with db.transaction(mill.pool) as connection:
        await uploads.delete(connection, mill.settings, mill.tenant, deleted, reason="test")
    nobody = ids.new()
    for media_id in (accepted, deleted, nobody):
        await mill.put(f"{uploads.prefix(mill.tenant, media_id)}/x/original")
    async with db.acquire(mill.pool) as connection:
        assert await mill.duties.sweep_uploads(connection) == 0, "they are too young to tell"
        assert await mill.duties.sweep_uploads(connection, older_than_seconds=-60) == 2
    assert mill.files() == [f"{uploads.prefix(mill.tenant, accepted)}/x/original"]


# --- what all sweeps have in common


@dataclass(slots=True)
class Leftovers:
    """A few of everything that is swept out of a storage, beside one of each that stays."""

    mill: Mill
    wanted: list[str]

    @classmethod
    async def laid_out(cls, mill: Mill, count: int) -> Leftovers:
        media_id, birth = await mill.accepted()
        held = await mill.claim(birth)
        wanted = [
            f"{variants.stage_prefix(held)}/w8.webp",
            f"{uploads.prefix(mill.tenant, media_id)}/x/original",
        ]
        for key in wanted:
            await mill.put(key)
        for _ in range(count):
            await mill.put(f"stage/{mill.tenant}/{ids.new()}.1/w8.webp")
            await mill.put(f"{uploads.prefix(mill.tenant, ids.new())}/x/original")
        _, old, _ = await superseded(mill)
        await mill.sql("UPDATE sets SET expires_at = now() - interval '1 s' WHERE set_id = $1", old)
        kept = [f for f in mill.files() if f.startswith("media/") and old not in f]
        return cls(mill, sorted([*wanted, *kept]))

    async def sweep(self) -> None:
        for name in ("sweep_staging", "sweep_sets"):
            await self.mill.do(name)
        async with db.transaction(self.mill.pool) as connection:
            await self.mill.duties.sweep_uploads(connection, older_than_seconds=-60)


async def test_a_sweep_that_dies_half_way_is_finished_by_the_next(mill: Mill) -> None:
    """And loses nothing that is wanted, however often it dies, and at whichever step."""
    laid = await Leftovers.laid_out(mill, 4)
    before = len(mill.files())
    deaths = 0
    for nth in (3, 2, 1, 1, 1):
        failpoints.arm(f"maintenance.swept:raise:{nth}")
        try:
            await laid.sweep()
        except OSError:
            deaths += 1
        finally:
            failpoints.arm(None)
        assert set(laid.wanted) <= set(mill.files())
    assert deaths >= 3
    assert len(mill.files()) < before
    await laid.sweep()
    assert mill.files() == laid.wanted
    await laid.sweep()  # once more changes nothing
    assert mill.files() == laid.wanted


async def test_while_the_storage_is_out_every_sweep_waits_for_it(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid = await Leftovers.laid_out(mill, 8)
    before = mill.files()
    for gone in ("delete", "list"):  # sets are known without a listing
        with monkeypatch.context() as patch:

            async def out(_self: LocalStorage, _prefix: str) -> int:
                raise Failure(Code.STORAGE_UNAVAILABLE)

            patch.setattr(LocalStorage, gone, out)
            await laid.sweep()
        left = set(before) - set(mill.files())
        assert not any(gone == "delete" or not name.startswith("media/") for name in left)
    # A few refusals are enough for a round; a listing that fails is one.
    assert await mill.swept("staged") == {"failed": 6}
    assert await mill.swept("original") == {"failed": 6}
    assert await mill.swept("set") == {"failed": 1, "removed": 1}
    await laid.sweep()
    assert mill.files() == laid.wanted
    assert await mill.swept("staged") == {"failed": 6, "removed": 8}
    assert await mill.swept("original") == {"failed": 6, "removed": 8}


async def test_one_thing_that_cannot_be_removed_does_not_hold_the_others_up(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, free = [(await mill.ready(w8=content))[0] for content in (b"x", b"y")]
    for media_id in (stuck, free):
        async with db.transaction(mill.pool) as connection:
            await uploads.delete(connection, mill.settings, mill.tenant, media_id, reason="test")
    delete = LocalStorage.delete

    async def refuses_one(self: LocalStorage, prefix: str) -> int:
        if str(stuck) in prefix:
            raise Failure(Code.STORAGE_AUTH)
        return await delete(self, prefix)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "delete", refuses_one)
        assert await mill.do("erase") == 1
    assert all(str(stuck) in file for file in mill.files())
    assert await mill.do("erase") == 1
    assert mill.files() == []


async def test_a_round_is_bounded(mill: Mill) -> None:
    for number in range(105):
        await mill.put(f"stage/{mill.tenant}/{ids.new()}.{number}/x")
    assert await mill.do("sweep_staging") == 100
    assert await mill.do("sweep_staging") == 5
    assert await mill.swept("staged") == {"removed": 105}


async def test_slots_that_end_are_counted(mill: Mill) -> None:
    there, _ = [await slot(mill, 60) for _ in range(2)]
    await mill.put(there.upload_key, b"12345")
    await mill.do("close_slots")
    assert await mill.swept("slot") == {"accepted": 1, "expired": 1}


# --- forget


async def test_what_is_past_its_retention_is_forgotten(mill: Mill) -> None:
    shown, _ = await mill.ready(w8=b"x")
    deleted, _ = await mill.ready(w8=b"y")
    async with db.transaction(mill.pool) as connection:
        await uploads.delete(connection, mill.settings, mill.tenant, deleted, reason="requested")
    await mill.do("erase")
    await mill.sql("UPDATE jobs SET expires_at = now() - interval '1 s'")
    await mill.sql("UPDATE events SET at = now() - interval '31 days' WHERE media_id = $1", deleted)
    await mill.sql(
        "INSERT INTO idempotency (tenant_id, method, route, key, fingerprint, expires_at)"
        " VALUES ('t', 'POST', '/', 'old', '', now() - interval '1 s'),"
        " ('t', 'POST', '/', 'new', '', now() + interval '1 h')"
    )
    await mill.do("forget")
    left = {row["media_id"] for row in await mill.sql("SELECT media_id FROM jobs")}
    assert left == {shown}  # a media that is shown keeps its job
    assert len(await mill.sql("SELECT 1 FROM attempts")) == 1
    left = {row["media_id"] for row in await mill.sql("SELECT media_id FROM events")}
    assert left == {shown}
    assert [row["key"] for row in await mill.sql("SELECT key FROM idempotency")] == ["new"]
    assert len(await mill.sql("SELECT 1 FROM media")) == 2  # the tombstone stays


async def test_a_job_that_has_not_ended_is_never_forgotten(mill: Mill) -> None:
    media_id, birth = await mill.accepted()
    await mill.sql("UPDATE jobs SET expires_at = now() - interval '1 day' WHERE id = $1", birth.id)
    await mill.sql("UPDATE media SET deleted_at = now() WHERE id = $1", media_id)
    await mill.do("forget")
    assert (await mill.job(birth))["state"] == "queued"


async def test_a_duty_that_fails_does_not_stop_the_others(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_connection: db.Connection) -> int:
        raise ZeroDivisionError

    from dataclasses import replace

    rescue, republish = mill.duties.duties[:2]
    ran = asyncio.Event()

    async def runs(_connection: db.Connection) -> int:
        ran.set()
        return 0

    two = (
        replace(rescue, work=broken, every_seconds=0.01),
        replace(republish, work=runs, every_seconds=0.05),
    )
    monkeypatch.setattr(mill.duties, "duties", two)
    task = asyncio.create_task(mill.duties.run())
    for _ in range(2):
        async with asyncio.timeout(5):
            await ran.wait()
        ran.clear()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

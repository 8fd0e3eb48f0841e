"""Position and time left, against a history that the test writes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests import rows

from mediamill import controls, db, estimates, ids, installation
from mediamill.config import Settings
from mediamill.estimates import Estimate, Forecaster, Work

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


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return rows.settings(tmp_path)


async def finished(connection: db.Connection, settings: Settings, seconds: list[float]) -> None:
    """Completed image jobs that took this long."""
    tenant = await rows.new_tenant(connection)
    for took in seconds:
        _, (birth,) = await rows.accepted(connection, tenant, settings)
        await connection.execute(
            "UPDATE jobs SET state = 'completed', started_at = now() - $2::interval,"
            " finished_at = now() WHERE id = $1",
            birth.id,
            timedelta(seconds=took),
        )


async def serve(connection: db.Connection, **slots: int) -> None:
    name = f"w-{slots}"
    await installation.register_worker(connection, name, version="1", slots=slots, sandbox="strong")


async def ask(
    connection: db.Connection, ahead: int = 0, *, seconds_in: float | None = None,
    progress: float | None = None, kind: str = "image", recipe: str | None = "web",
) -> Estimate:  # fmt: skip
    now = datetime.now(UTC)
    return await Forecaster().estimate(
        connection,
        kind=kind,
        recipe=recipe,
        queue="image",
        ahead=ahead,
        started_at=None if seconds_in is None else now - timedelta(seconds=seconds_in),
        progress=progress,
        now=now,
    )


async def test_a_cold_start_says_so(connection: db.Connection, settings: Settings) -> None:
    await serve(connection, image=2)
    await finished(connection, settings, [1.0, 2.0])
    estimate = await ask(connection)
    assert (estimate.p50_seconds, estimate.p90_seconds) == (None, None)
    assert "too few" in estimate.basis
    assert "(2)" in estimate.basis


async def test_without_a_worker_there_is_no_promise(
    connection: db.Connection, settings: Settings
) -> None:
    await finished(connection, settings, [1.0, 2.0, 3.0])
    await serve(connection, video=3)
    estimate = await ask(connection)
    assert estimate.p50_seconds is None
    assert "no worker" in estimate.basis


async def test_those_before_it_share_the_slots(
    connection: db.Connection, settings: Settings
) -> None:
    await serve(connection, image=2)
    await serve(connection, image=2, video=1)
    await finished(connection, settings, [10.0] * 9 + [20.0])
    first, fifth = await ask(connection, 0), await ask(connection, 4)
    assert first.p50_seconds == pytest.approx(10)
    # Four before it on four slots: one round of 11 s, what a job takes on average.
    assert fifth.p50_seconds == pytest.approx(21)
    assert first.p90_seconds is not None
    assert 10 < first.p90_seconds <= 20
    assert first.basis == "the last 10 of its kind"  # nothing is known of this one's size
    assert first.as_dict() == {
        "p50_seconds": 10.0,
        "p90_seconds": round(first.p90_seconds, 1),
        "basis": first.basis,
    }


async def test_another_kind_or_recipe_is_another_history(
    connection: db.Connection, settings: Settings
) -> None:
    await serve(connection, image=1)
    await finished(connection, settings, [10.0] * 3)
    assert (await ask(connection)).p50_seconds is not None
    assert (await ask(connection, recipe="other")).p50_seconds is None
    assert (await ask(connection, kind="video")).p50_seconds is None


async def test_a_running_job_is_told_by_its_progress_or_by_what_is_left(
    connection: db.Connection, settings: Settings
) -> None:
    by_progress = await ask(connection, seconds_in=30.0, progress=75.0)
    assert by_progress.p50_seconds == pytest.approx(10, abs=0.1)
    assert by_progress.basis == "its own progress"
    await serve(connection, image=1)
    await finished(connection, settings, [10.0] * 3)
    early = await ask(connection, seconds_in=4.0, progress=0.0)
    assert early.p50_seconds == pytest.approx(6, abs=0.1)
    late = await ask(connection, seconds_in=400.0, progress=1.0)
    assert late.p50_seconds == 0  # late, but never negative


async def test_only_the_last_fifty_count(connection: db.Connection, settings: Settings) -> None:
    await serve(connection, image=1)
    await finished(connection, settings, [1000.0] * 10)
    await connection.execute("UPDATE jobs SET finished_at = finished_at - interval '1 day',"
                             " started_at = started_at - interval '1 day'")  # fmt: skip
    await finished(connection, settings, [2.0] * 50)
    estimate = await ask(connection)
    assert estimate.p50_seconds == pytest.approx(2, abs=0.1)
    assert estimate.p90_seconds == pytest.approx(2, abs=0.1)
    assert "50" in estimate.basis


async def sized(
    connection: db.Connection, settings: Settings, size: int, seconds: list[float]
) -> None:
    """Completed image jobs of files of this size."""
    await finished(connection, settings, seconds)
    await connection.execute("UPDATE media SET size = $1 WHERE size = 5", size)


async def test_the_most_similar_jobs_count(connection: db.Connection, settings: Settings) -> None:
    await serve(connection, image=1)
    await sized(connection, settings, 1000, [1.0] * 20)
    await sized(connection, settings, 1_000_000, [100.0] * 20)
    forecaster = Forecaster()

    async def of(size: int) -> Estimate:
        return await forecaster.estimate(
            connection, kind="image", recipe="web", queue="image", ahead=0, work=Work(bytes=size)
        )

    assert (await of(990)).p50_seconds == pytest.approx(1, abs=0.1)
    assert (await of(900_000)).p50_seconds == pytest.approx(100, abs=1)
    beyond = await of(3_000_000)
    assert beyond.p50_seconds == pytest.approx(300, abs=3)
    assert beyond.basis == "the 15 most similar of the last 40 of its kind"


async def test_a_paused_queue_and_a_later_start_are_told(
    connection: db.Connection, settings: Settings
) -> None:
    await serve(connection, image=4)
    await finished(connection, settings, [2.0] * 5)
    later = await Forecaster().estimate(
        connection, kind="image", recipe="web", queue="image", ahead=0, delay_seconds=60
    )
    assert later.p50_seconds == pytest.approx(62)
    await controls.set_paused(connection, "image", True)
    paused = await ask(connection)
    assert (paused.p50_seconds, paused.basis) == (None, "the queue is paused")
    await controls.set_paused(connection, "image", False)
    await controls.set_concurrency(connection, "image", 1)
    capped = await Forecaster().outlook(connection, "image")
    assert (capped.slots, capped.paused) == (1, False)
    await connection.execute("DELETE FROM queues")


async def test_forecasts_are_kept_and_correct_the_next_ones(
    connection: db.Connection, settings: Settings
) -> None:
    """Jobs that take twice as long as was said: later ones are told so, and the record shows it."""
    await serve(connection, image=4)
    await finished(connection, settings, [10.0] * 10)
    before = await ask(connection)
    assert before.raw_seconds == pytest.approx(10)
    tenant = await rows.new_tenant(connection)
    for n in range(30):
        _, (birth,) = await rows.accepted(connection, tenant, settings)
        await Forecaster().keep(connection, tenant, birth.id, before, ahead=0)
        await connection.execute(
            "UPDATE forecasts SET made_at = now() - $2::interval WHERE job_id = $1",
            birth.id,
            timedelta(seconds=20 + n / 10),
        )
        await connection.execute(
            "UPDATE jobs SET state = 'completed', started_at = now() - interval '10 s',"
            " finished_at = now() WHERE id = $1",
            birth.id,
        )
    after = await ask(connection)
    assert after.raw_seconds == pytest.approx(10)
    assert after.p50_seconds == pytest.approx(21.5, abs=0.5)
    assert after.p90_seconds == pytest.approx(22.6, abs=0.5)
    (kept,) = await estimates.record(connection, days=1)
    assert (kept.kind, kept.recipe, kept.jobs) == ("image", "web", 30)
    assert kept.held == 0.0
    assert kept.median_error == pytest.approx(0.53, abs=0.03)
    # Then some that are not even done, far beyond what was said: they count before they end.
    for _ in range(10):
        _, (birth,) = await rows.accepted(connection, tenant, settings)
        await Forecaster().keep(connection, tenant, birth.id, before, ahead=0)
        await connection.execute(
            "UPDATE forecasts SET made_at = now() - interval '60 s' WHERE job_id = $1", birth.id
        )
    late = await ask(connection)
    assert late.p90_seconds == pytest.approx(60, abs=1)


async def test_what_says_nothing_is_not_kept(connection: db.Connection, settings: Settings) -> None:
    tenant = await rows.new_tenant(connection)
    _, (birth,) = await rows.accepted(connection, tenant, settings)
    await Forecaster().keep(connection, tenant, birth.id, await ask(connection), ahead=0)
    assert await connection.fetchval("SELECT count(*) FROM forecasts") == 0


async def test_asking_again_waits_for_the_queue_to_drain(
    connection: db.Connection, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.monotonic()
    monkeypatch.setattr("mediamill.estimates.time.monotonic", lambda: clock)
    await serve(connection, image=2)
    await finished(connection, settings, [8.0] * 5)
    tenant = await rows.new_tenant(connection)
    for _ in range(9):
        await rows.accepted(connection, tenant, settings)
    forecaster = Forecaster()
    assert forecaster.stale
    await forecaster.outlook(connection, "image")
    assert not forecaster.stale
    first, fifth, far, other = (ids.new() for _ in range(4))

    def after(subject: UUID, **more: Any) -> float:
        given = {"kind": "image", "recipe": "web", "queue": "image", "waits": True} | more
        return forecaster.poll_after(subject, **given)

    forecaster.note(first, ahead=0)
    forecaster.note(fifth, ahead=5)
    forecaster.note(far, ahead=5000)
    # Two slots of 8 s: a turn every 4 s, once all of them are taken by those before it.
    assert after(first) == 2
    assert after(fifth) == 2 + 20
    assert after(far) == 60
    assert after(other) == 2 + 32  # not noted: all that wait are taken to be before it
    assert after(fifth, waits=False) == 2
    assert after(fifth, waits=False, left_seconds=40.0) == 10
    clock += 12  # three turns later
    assert after(fifth) == 2 + 8
    forecaster.note(first, ahead=0, delay_seconds=30.0)
    assert after(first) == 32
    assert after(other, queue="video") == 5  # nobody serves it just now
    clock += 30
    assert forecaster.stale


async def test_asking_again_at_a_cold_start_is_soon(connection: db.Connection) -> None:
    await serve(connection, image=1)
    forecaster = Forecaster()
    await forecaster.outlook(connection, "image")
    after = forecaster.poll_after(ids.new(), kind="image", recipe="web", queue="image", waits=True)
    assert after == 1


async def test_an_outlook_counts_depth_and_the_slots_of_live_workers(
    connection: db.Connection, settings: Settings
) -> None:
    tenant = await rows.new_tenant(connection)
    births = [(await rows.accepted(connection, tenant, settings))[1][0] for _ in range(3)]
    await rows.claim(connection, tenant, births[0])
    await serve(connection, image=3)
    await serve(connection, image=5)
    await connection.execute(
        "UPDATE workers SET seen_at = now() - interval '20 s' WHERE slots ->> 'image' = '5'"
    )
    outlook = await Forecaster().outlook(connection, "image")
    assert (outlook.queued, outlook.processing, outlook.slots) == (2, 1, 3)
    nothing = await Forecaster().outlook(connection, "audio")
    assert (nothing.queued, nothing.processing, nothing.slots) == (0, 0, 0)


async def test_those_who_join_between_two_looks_get_places_of_their_own(
    connection: db.Connection, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await rows.new_tenant(connection)
    await rows.accepted(connection, tenant, settings)
    forecaster = Forecaster()
    places = [await forecaster.joined(connection, "image") for _ in range(3)]
    assert places == [1, 2, 3]  # the first one is in the figures
    await rows.accepted(connection, tenant, settings)
    assert await forecaster.joined(connection, "image") == 4
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3)
    assert await forecaster.joined(connection, "image") == 2  # it looked again

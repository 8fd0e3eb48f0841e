"""Position and time left, against a history that the test writes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests import rows

from mediamill import db, installation
from mediamill.config import Settings
from mediamill.estimates import Estimate, Forecaster

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
    assert fifth.p50_seconds == pytest.approx(20)  # four before it on four slots: one round
    assert first.p90_seconds is not None
    assert 10 < first.p90_seconds <= 20
    assert first.basis == "the last 10 of its kind"
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
    assert places == [2, 3, 4]
    await rows.accepted(connection, tenant, settings)
    assert await forecaster.joined(connection, "image") == 5
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3)
    assert await forecaster.joined(connection, "image") == 3  # it looked again

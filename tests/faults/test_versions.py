"""Old and new releases side by side, and migrations under load. F40, F41."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import threading
import time
from typing import Any

import pytest
from tests.faults import app_new
from tests.faults.conftest import Make
from tests.faults.lab import GENERIC, Lab, decoded
from tests.stories.harness import Process

from mediamill import db, queue


@pytest.mark.timeout(180)
def test_a_version_that_a_worker_does_not_know_waits_untouched_for_one_that_does(
    lab: Lab,
) -> None:
    old = lab.start_worker("default=1,maintenance=1")
    first = lab.enqueue("greet", {"name": "Ada"})

    async def enqueue_new(connection: db.Connection) -> str:
        payload = {"first": "Ada", "last": "Lovelace"}
        return await app_new.mill.enqueue(connection, "greet", payload)

    second = decoded(lab.run(enqueue_new))
    lab.accepted.add(second)
    assert lab.await_job(first)["result"] == {"value": "hello Ada"}
    # The old worker sees its ticket again and again, and works on all that it knows.
    for number in range(3):
        lab.await_job(lab.enqueue("row", {"n": number}))
    row = lab.job(second)
    assert (row["state"], row["attempt"], row["fence"]) == ("queued", 0, 0)

    lab.start_worker("default=1", app_name="app_new")
    assert lab.await_job(second)["result"] == {"value": "hello Ada Lovelace"}
    third = lab.enqueue("greet", {"name": "Grace"})
    assert lab.await_job(third)["result"] == {"value": "hello Grace"}, "the new one does not know 1"
    lab.check()
    assert old.alive


class Load:
    """Jobs that are enqueued all the while, and how long each enqueue took."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.seconds: list[float] = []
        self.ids: list[str] = []
        self.error: BaseException | None = None

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    async def _run(self) -> None:
        from tests.faults import app

        try:
            connection = await db.connect(self._lab.database)
            while not self._stop.is_set():
                began = time.monotonic()
                self.ids.append(await app.mill.enqueue(connection, "row", {"n": len(self.ids)}))
                self.seconds.append(time.monotonic() - began)
                await asyncio.sleep(0.02)
            await connection.close()
        except BaseException as error:
            self.error = error


def migrate(lab: Lab) -> Process:
    process = lab._start("migrate", {})
    try:
        process.popen.wait(90)
    except subprocess.TimeoutExpired:
        process.kill()
    return process


@pytest.mark.timeout(240)
def test_migrating_an_up_to_date_database_under_load_disturbs_nobody(lab: Lab) -> None:
    """Every deployment runs it; somebody's long transaction is open, too."""
    worker = lab.start_worker(GENERIC)
    with (
        Load(lab) as load,
        lab.holding("SELECT count(*) FROM jobs, transitions, mediamill_tickets"),
    ):
        runs = [migrate(lab) for _ in range(2)]
    assert [r.popen.returncode for r in runs] == [0, 0], runs[0].log.read_text()[-2000:]
    assert load.error is None
    lab.accepted.update(decoded(i) for i in load.ids)
    lab.await_all()
    lab.check()
    assert worker.alive
    assert max(load.seconds) < 4, "enqueueing stood still"


@pytest.mark.timeout(240)
def test_a_new_migration_under_load_loses_no_claim(
    make_lab: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Add a column and an index while jobs flow and somebody reads for longer than a worker can do
    without its beat."""
    lab = make_lab(lease_seconds=7, beat_seconds=1.5, self_stop_seconds=5)
    worker = lab.start_worker("default=3,maintenance=1")
    long = lab.enqueue("sleep", {"seconds": 12.0})
    lab.await_job(long, "processing")
    known = db.migrations()
    column = "ALTER TABLE jobs ADD COLUMN note text"
    index = (
        "-- transaction: off\n"
        "CREATE INDEX CONCURRENTLY IF NOT EXISTS jobs_note ON jobs (note) WHERE note IS NOT NULL"
    )
    more = tuple(
        db.Migration(
            known[-1].version + n,
            f"later_{n}",
            sql,
            hashlib.sha256(sql.encode()).hexdigest(),
            not sql.startswith("-- transaction: off"),
        )
        for n, sql in enumerate((column, index), start=1)
    )
    monkeypatch.setattr(db, "migrations", lambda: known + more)

    async def hold_and_migrate() -> list[Any]:
        reader = await db.connect(lab.database)
        await reader.execute("BEGIN")
        await reader.fetch("SELECT count(*) FROM jobs")  # keeps ACCESS SHARE
        at_work = asyncio.create_task(db.migrate(lab.database, finish=queue.install))
        await asyncio.sleep(7.0)
        await reader.execute("COMMIT")
        applied = await at_work
        await reader.close()
        return applied

    with Load(lab) as load:
        applied = asyncio.run(hold_and_migrate())
    assert [m.name for m in applied] == ["later_1", "later_2"]
    assert load.error is None
    valid = "SELECT indisvalid FROM pg_index WHERE indexrelid = 'jobs_note'::regclass"
    assert lab.value(valid)
    lab.accepted.update(decoded(i) for i in load.ids)
    lab.await_all()
    lab.check()
    assert worker.alive
    assert lab.outcomes(long) == ["completed"], "it lost its lease to the migration"
    assert lab.value("SELECT count(*) FROM attempts WHERE outcome = 'lost'") == 0


@pytest.mark.timeout(60)
def test_a_migration_that_never_gets_its_lock_says_what_to_do(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "_PATIENCE_SECONDS", 0.5)
    known = db.migrations()
    later = db.Migration(
        known[-1].version + 1, "later", "ALTER TABLE jobs ADD COLUMN n int", "", True
    )
    monkeypatch.setattr(db, "migrations", lambda: (*known, later))
    with (
        lab.holding("SELECT count(*) FROM jobs"),
        pytest.raises(db.MigrationError, match="pg_stat_activity"),
    ):
        asyncio.run(db.migrate(lab.database, finish=queue.install))
    assert [m.name for m in asyncio.run(db.migrate(lab.database))] == ["later"]

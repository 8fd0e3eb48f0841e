"""PostgreSQL restarts, breaks connections, is cut off, or is slow. F09, F11, F12, F13."""

from __future__ import annotations

import time

import httpx2 as httpx
import pytest
from tests.faults.conftest import Make, Server
from tests.faults.lab import GENERIC, Lab, freeze, thaw
from tests.faults.proxy import Proxy
from tests.stories.harness import until

MIXED = [
    ("row", {"n": 1}),
    ("pay", {"n": 2}),
    ("parent", {"n": 2}),
    ("sleep", {"seconds": 0.4}),
    ("flaky", {"times": 1}),
]


def events(lab: Lab, *names: str) -> list[str]:
    """What the processes said, of these."""
    return [e["event"] for p in lab.processes for e in p.events() if e["event"] in names]


@pytest.mark.timeout(300)
def test_an_immediate_restart_of_the_database_under_load_loses_nothing(
    make_lab: Make, own_server: Server
) -> None:
    lab = make_lab(database=own_server.fresh_database())
    workers = [lab.start_worker(GENERIC), lab.start_worker(GENERIC)]
    for _ in range(3):
        lab.enqueue_many(MIXED * 3)
        time.sleep(0.3)  # not for synchronization: the crash should come at any moment
        own_server.restart_at_once()
    last = lab.enqueue("noop")
    assert lab.await_job(last, seconds=60)["state"] == "completed"
    lab.await_all(seconds=120)
    # A claim whose commit was answered with a crash is an attempt that nobody runs: it comes back
    # with its lease.
    lab.check()
    assert all(w.alive for w in workers), "a worker did not outlive the database"


@pytest.mark.timeout(300)
def test_an_idempotent_create_is_answered_with_one_job_through_restarts(
    make_lab: Make, own_server: Server
) -> None:
    lab = make_lab(database=own_server.fresh_database())
    lab.start_worker(GENERIC)
    lab.start_api()
    for number in range(12):
        if number % 4 == 2:
            own_server.restart_at_once()

        def create(number: int = number) -> str | None:
            try:
                answer = lab.http.post(
                    "/v1/jobs",
                    json={"kind": "row", "payload": {"n": number}},
                    headers={"Idempotency-Key": f"key-{number}"},
                )
            except httpx.HTTPError:
                return None
            assert answer.status_code in (202, 409, 500, 503), answer.text
            return str(answer.json()["id"]) if answer.status_code == 202 else None

        first = until(create, seconds=60, why="no answer", every_seconds=0.2)
        again = until(create, seconds=60, why="no answer", every_seconds=0.2)
        lab.by_key[f"key-{number}"] = [first, again]
    lab.await_all()
    lab.check()
    assert lab.value("SELECT count(*) FROM jobs") == 12


@pytest.mark.timeout(180)
def test_connections_that_the_server_ends_cost_no_job(lab: Lab) -> None:
    worker = lab.start_worker(GENERIC)
    jobs = lab.enqueue_many([*MIXED, ("sleep", {"seconds": 3.0})])
    long = jobs[-1]
    lab.await_job(long, "processing")
    for _ in range(6):
        lab.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        time.sleep(0.4)  # under the lease: the beat has the time to connect again
    lab.await_all()
    lab.check()
    assert lab.job(long)["state"] == "completed"
    assert lab.executions(long) == 1, "a worker that can reach the database lost its job"
    assert worker.alive


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["cut", "stall"])
def test_a_worker_cut_off_from_the_database_stops_before_its_lease_ends(
    lab: Lab, proxy: Proxy, how: str
) -> None:
    cut_off = lab.start_worker(GENERIC, database_url=proxy.dsn)
    job_id = lab.enqueue("sleep", {"seconds": 4.0})
    lab.await_job(job_id, "processing")
    until(lambda: lab.executions(job_id), seconds=20, why="it has not begun")
    proxy.cut() if how == "cut" else proxy.stall()
    heir = lab.start_worker(GENERIC)
    lab.await_job(job_id, "completed")
    lost = lab.rows("SELECT * FROM attempts WHERE job_id = $1 ORDER BY fence", job_id)
    assert [a["outcome"] for a in lost] == ["lost", "completed"]
    assert cut_off.alive
    # It gave up by itself: nobody could have told it.
    until(
        lambda: any(e["event"] == "attempt_lost" for e in cut_off.events()),
        seconds=30,
        why="it did not stop",
    )
    proxy.heal()
    heir.stop()
    again = lab.enqueue("noop")
    assert lab.await_job(again)["state"] == "completed"
    lab.await_all()
    lab.check()
    assert lab.executions(job_id) == 2


@pytest.mark.timeout(180)
def test_a_worker_cut_off_in_the_middle_of_a_transaction_keeps_no_lock(
    lab: Lab, proxy: Proxy
) -> None:
    """The ticket and the job that it holds would be nobody's, for as long as the server believes
    in it."""
    cut_off = lab.start_worker(GENERIC, database_url=proxy.dsn, failpoint="worker.taken:stop:1")
    job_id = lab.enqueue("row", {"n": 1})
    lab.await_freeze(cut_off)
    proxy.stall()
    thaw(cut_off)
    lab.start_worker(GENERIC)
    assert lab.await_job(job_id)["state"] == "completed"
    proxy.heal()
    lab.await_all()
    lab.check()


@pytest.mark.timeout(180)
def test_a_lock_that_somebody_holds_delays_its_job_and_no_other(lab: Lab) -> None:
    """F12: a person's open transaction on one job must not cost the leases of the others."""
    lab.start_worker("default=4,maintenance=1")
    blocked, *others = lab.enqueue_many([("sleep", {"seconds": 3.0}) for _ in range(3)])
    for job_id in (blocked, *others):
        lab.await_job(job_id, "processing")
    with lab.holding("SELECT 1 FROM jobs WHERE id = $1 FOR UPDATE", blocked):
        for job_id in others:
            lab.await_job(job_id, "completed")
        assert [lab.executions(j) for j in others] == [1, 1], "they lost their leases"
    lab.await_all()
    lab.check()


@pytest.mark.timeout(180)
def test_a_locked_table_stops_the_work_and_not_the_workers(lab: Lab) -> None:
    worker = lab.start_worker(GENERIC)
    jobs = lab.enqueue_many(MIXED)
    with lab.holding("LOCK TABLE jobs IN EXCLUSIVE MODE"):
        until(lambda: lab.waiting_for_locks() > 0, seconds=30, why="nobody waits")
        time.sleep(3.0)  # longer than a lease
    lab.await_all()
    lab.check()
    assert worker.alive
    assert {lab.job(j)["state"] for j in jobs} == {"completed"}


@pytest.mark.timeout(180)
def test_a_server_without_free_connections_is_an_outage_that_passes(
    make_lab: Make, own_server: Server
) -> None:
    lab = make_lab(database=own_server.fresh_database())
    worker = lab.start_worker(GENERIC)
    long = lab.enqueue("sleep", {"seconds": 2.0})
    lab.await_job(long, "processing")
    name = lab.value("SELECT current_database()")
    lab.execute(f"ALTER DATABASE {name} CONNECTION LIMIT 0")
    lab.execute(f"ALTER DATABASE {name} CONNECTION LIMIT 1")
    lab.enqueue_many(MIXED)
    lab.execute(f"ALTER DATABASE {name} CONNECTION LIMIT -1")
    lab.await_all()
    lab.check()
    assert worker.alive


@pytest.mark.timeout(180)
def test_a_frozen_worker_wakes_to_a_restarted_database_and_changes_nothing(
    make_lab: Make, own_server: Server
) -> None:
    lab = make_lab(database=own_server.fresh_database())
    frozen = lab.start_worker(GENERIC)
    job_id = lab.enqueue("sleep", {"seconds": 1.5})
    until(lambda: lab.executions(job_id), seconds=20, why="it has not begun")
    freeze(frozen)
    own_server.restart_at_once()
    heir = lab.start_worker(GENERIC)
    lab.await_job(job_id, "completed")
    before = lab.rows("SELECT * FROM transitions ORDER BY id")
    thaw(frozen)
    until(
        lambda: any(e["event"] == "attempt_lost" for e in frozen.events()),
        seconds=30,
        why="it has not seen that its lease is lost",
    )
    assert lab.rows("SELECT * FROM transitions ORDER BY id") == before
    lab.check()
    assert heir.alive

"""Workers are told to go. F38, F39, and the cases queue-01, queue-08 and queue-09."""

from __future__ import annotations

import signal
import time

import pytest
from tests.faults.conftest import Make
from tests.faults.lab import GENERIC, Lab
from tests.faults.proxy import Proxy
from tests.stories.harness import assert_gone, descendants, identities, until


@pytest.mark.timeout(180)
def test_a_stopping_worker_hands_back_at_once_what_it_cannot_finish(make_lab: Make) -> None:
    lab = make_lab(drain_seconds=1.0)
    worker = lab.start_worker(GENERIC)
    job_id = lab.enqueue("sleep", {"seconds": 6.0})
    until(lambda: lab.executions(job_id), seconds=30, why="it has not begun")
    began = time.monotonic()
    assert worker.stop(seconds=20) == 0
    assert time.monotonic() - began < 10
    row = lab.job(job_id)
    assert (row["state"], row["attempt"], row["crashes"]) == ("queued", 0, 0)
    lab.start_worker(GENERIC)
    assert lab.await_job(job_id)["state"] == "completed"
    assert lab.outcomes(job_id) == ["released", "completed"]
    lab.check()


@pytest.mark.timeout(180)
def test_a_stopping_worker_finishes_what_it_can_and_takes_nothing_new(make_lab: Make) -> None:
    lab = make_lab(drain_seconds=30.0)
    worker = lab.start_worker("default=1,maintenance=1")
    job_id = lab.enqueue("sleep", {"seconds": 1.5})
    until(lambda: lab.executions(job_id), seconds=30, why="it has not begun")
    waiting = lab.enqueue("noop")
    assert worker.stop(seconds=40) == 0
    assert lab.job(job_id)["state"] == "completed"
    assert lab.job(waiting)["attempt"] == 0
    lab.start_worker(GENERIC)
    lab.await_all()
    lab.check()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_loses_nothing(make_lab: Make, second: signal.Signals) -> None:
    lab = make_lab(drain_seconds=2.0)
    worker = lab.start_worker("default=1,image=1,maintenance=1")
    job_id = lab.enqueue("sleep", {"seconds": 5.0})
    until(lambda: lab.executions(job_id), seconds=30, why="it has not begun")
    lab.watch(worker)
    below = identities(descendants(worker.pid))
    worker.send(signal.SIGTERM)
    until(
        lambda: any(e["event"] == "worker_draining" for e in worker.events()),
        seconds=20,
        why="it does not drain",
    )
    worker.send(second)
    worker.popen.wait(30)
    assert_gone(below, seconds=10)
    lab.start_worker(GENERIC)
    assert lab.await_job(job_id)["state"] == "completed"
    lab.check()


@pytest.mark.timeout(180)
def test_a_long_job_is_run_once_for_many_times_its_lease(lab: Lab) -> None:
    """queue-01: it is never handed to a second worker while the first one works."""
    lab.start_worker(GENERIC)
    lab.start_worker(GENERIC)
    job_id = lab.enqueue("sleep", {"seconds": 8.0})
    row = lab.await_job(job_id)
    assert (row["state"], row["attempt"], row["fence"]) == ("completed", 1, 1)
    assert lab.executions(job_id) == 1
    lab.check()


@pytest.mark.timeout(180)
def test_a_draining_worker_without_a_database_leaves_its_jobs_to_their_leases(
    make_lab: Make,
) -> None:
    lab = make_lab(drain_seconds=1.0)
    proxy = Proxy(lab.database)
    worker = lab.start_worker(GENERIC, database_url=proxy.dsn)
    job_id = lab.enqueue("sleep", {"seconds": 3.0})
    until(lambda: lab.executions(job_id), seconds=30, why="it has not begun")
    proxy.cut()
    worker.send(signal.SIGTERM)
    assert worker.popen.wait(60) == 0
    proxy.close()
    lab.start_worker(GENERIC)
    assert lab.await_job(job_id)["state"] == "completed"
    lab.check()


@pytest.mark.timeout(180)
def test_a_worker_whose_supervisor_is_killed_hands_its_job_back(make_lab: Make) -> None:
    lab = make_lab(drain_seconds=1.0)
    supervisor = lab._start("supervised", {"slots": GENERIC})
    job_id = lab.enqueue("sleep", {"seconds": 4.0})
    until(lambda: lab.executions(job_id), seconds=40, why="it has not begun")
    below = identities(descendants(supervisor.pid))
    assert below
    supervisor.kill()
    assert_gone(below, seconds=20)
    row = lab.job(job_id)
    assert (row["state"], row["attempt"], row["crashes"]) == ("queued", 0, 0)
    lab.start_worker(GENERIC)
    assert lab.await_job(job_id)["state"] == "completed"
    lab.check()


@pytest.mark.timeout(180)
def test_an_operator_drains_a_worker_through_the_api(make_lab: Make) -> None:
    lab = make_lab(drain_seconds=30.0)
    lab.start_api()
    worker = lab.start_worker("default=1")
    job_id = lab.enqueue("sleep", {"seconds": 1.0})
    until(lambda: lab.executions(job_id), seconds=30, why="it has not begun")
    answer = lab.http.post(f"/v1/workers/{lab.name_of(worker)}/drain")
    assert answer.status_code == 202, answer.text
    assert worker.popen.wait(40) == 0
    assert lab.job(job_id)["state"] == "completed"
    lab.check()

"""Short work does not wait behind long work of another queue. F33, and the case queue-05."""

from __future__ import annotations

import pytest
from tests.faults.conftest import Make
from tests.faults.lab import Lab


@pytest.mark.timeout(180)
def test_pictures_pass_an_hour_of_long_jobs(lab: Lab) -> None:
    """A backlog that this worker would need an hour for; the pictures take their own slots."""
    lab.start_worker("default=1,image=1,maintenance=1")
    long = lab.enqueue_many([("sleep", {"seconds": 60.0})] * 60)
    lab.await_job(long[0], "processing")
    pictures = [lab.picture() for _ in range(5)]
    for media_id in pictures:
        lab.await_job(lab.job_of(media_id)["id"], "completed", seconds=60)
    waits = lab.rows(
        "SELECT extract(epoch FROM a.started_at - j.created_at) AS waited FROM jobs AS j"
        " JOIN attempts AS a ON a.job_id = j.id WHERE j.role = 'main'"
    )
    assert max(row["waited"] for row in waits) < 20
    assert lab.job(long[0])["state"] == "processing", "the long job goes on"
    assert lab.value("SELECT count(*) FROM jobs WHERE kind = 'sleep' AND attempt > 0") == 1


@pytest.mark.timeout(180)
def test_threefold_oversubscription_of_the_cores_loses_no_lease(make_lab: Make) -> None:
    """The short form of `OVERSUBSCRIBE=3 make soak`: processes that eat every core twice over."""
    import os

    cores = os.cpu_count() or 2
    lab = make_lab(lease_seconds=7, beat_seconds=1.5, self_stop_seconds=5, sweep_seconds=1)
    workers = [lab.start_worker("default=2,maintenance=1") for _ in range(max(3 * cores // 2, 2))]
    jobs = lab.enqueue_many([("busy", {"seconds": 12.0})] * (3 * cores))
    jobs += lab.enqueue_many([("sleep", {"seconds": 10.0})] * 2)
    lab.await_all(seconds=150)
    assert [lab.outcomes(j) for j in jobs] == [["completed"]] * len(jobs), "a lease was lost"
    assert {lab.executions(j) for j in jobs} == {1}
    assert all(w.alive for w in workers)
    lab.check()

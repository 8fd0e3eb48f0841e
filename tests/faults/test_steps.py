"""A worker dies, freezes or stumbles at every boundary between two steps; the work is done once.

F01–F04 and F07 of the fault catalogue, as a sweep of failpoints × actions.
"""

from __future__ import annotations

from uuid import UUID

import pytest
from tests.faults.conftest import Make
from tests.faults.lab import GENERIC, PICTURES, Lab, thaw
from tests.stories.harness import until

from mediamill import failpoints

STEPS = (
    "worker.taken",
    "worker.claimed",
    "app.effect",
    "attempt.settled",
    "lease.beat",
)
PICTURE_STEPS = (
    "attempt.fetched",
    "attempt.described",
    "attempt.staged",
    "attempt.reserved",
    "attempt.laid_out",
    "attempt.settled",
)
WAKING = ("attempt_lost", "attempt_ended", "claim_failed", "lease_beat_failed")
ELSEWHERE = {
    "api.accepted": "test_api_dies.py",
    "api.opened": "test_api_dies.py",
    "api.put": "test_api_dies.py",
    "attempt.tool": "below, with a clip",
    "attempt.published_early": "stories/test_streaming.py",
    "attempt.kept": "stories/test_streaming.py",
    "tus.part": "stories/test_resumable.py",
    "tus.stored": "stories/test_resumable.py",
    "tus.swept": "stories/test_s3.py",
    "maintenance.swept": "tests/test_maintenance.py",
    "pull.followed": "tests/test_event_pulls.py",
    "webhook.sent": "stories/test_telling.py",
    "maintenance.rescue": "test_duties.py",
    "maintenance.erase": "test_duties.py",
}


def test_every_failpoint_is_swept() -> None:
    assert {*STEPS, *PICTURE_STEPS, *ELSEWHERE} == failpoints.NAMES


def work(lab: Lab) -> list[UUID]:
    """One job of each kind that leaves something behind."""
    return lab.enqueue_many(
        [("pay", {"n": 7}), ("row", {"n": 3}), ("parent", {"n": 2}), ("sleep", {"seconds": 0.5})]
    )


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("step", "action"), [*((step, "kill9") for step in STEPS), ("worker.claimed", "exit")]
)
def test_a_worker_that_dies_between_two_steps_loses_and_doubles_nothing(
    lab: Lab, step: str, action: str
) -> None:
    jobs = work(lab)
    doomed = lab.start_worker(GENERIC, failpoint=f"{step}:{action}:1")
    lab.await_death(doomed)
    if step == "worker.taken":  # not committed: no attempt was begun
        assert {row["attempt"] for row in map(lab.job, jobs)} == {0}
        assert lab.rows("SELECT 1 FROM attempts") == []
    lab.start_worker(GENERIC)
    lab.await_all()
    lab.check()
    assert {row["state"] for row in map(lab.job, jobs)} == {"completed"}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("step", "action"), [*((step, "raise") for step in STEPS), ("lease.beat", "sleep")]
)
def test_a_step_that_stumbles_is_done_again(make_lab: Make, step: str, action: str) -> None:
    lab = make_lab()
    jobs = work(lab)
    first = lab.start_worker(GENERIC, failpoint=f"{step}:{action}:1")
    lab.start_worker(GENERIC)
    lab.await_all()
    lab.check()
    assert {row["state"] for row in map(lab.job, jobs)} == {"completed"}
    assert first.alive, "an error at one step must not end the worker"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("step", STEPS)
def test_a_worker_that_wakes_from_a_freeze_between_two_steps_changes_nothing(
    lab: Lab, step: str
) -> None:
    jobs = work(lab)
    frozen = lab.start_worker(GENERIC, failpoint=f"{step}:stop:1")
    lab.await_freeze(frozen)
    # Also when it holds tickets and rows in an open transaction: the server ends it.
    lab.start_worker(GENERIC)
    until(
        lambda: lab.value("SELECT count(*) FROM jobs WHERE state <> 'completed'") == 0,
        seconds=60,
        why="the heir has not done it all",
    )
    before = lab.rows("SELECT * FROM transitions ORDER BY id")
    seen = len(list(frozen.events()))
    thaw(frozen)
    until(
        lambda: any(e["event"] in WAKING for e in list(frozen.events())[seen:]),
        seconds=30,
        why="it has not seen that its leases are lost",
    )
    assert lab.rows("SELECT * FROM transitions ORDER BY id") == before
    lab.check()
    assert {row["state"] for row in map(lab.job, jobs)} == {"completed"}
    # It is of use again.
    others = [p for p in lab.processes if p is not frozen]
    for other in others:
        other.stop()
    again = lab.enqueue("noop")
    assert lab.await_job(again)["state"] == "completed"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("step", PICTURE_STEPS)
@pytest.mark.parametrize("action", ["kill9", "raise", "stop"])
def test_a_picture_is_published_once_whatever_step_breaks(lab: Lab, step: str, action: str) -> None:
    media_id = lab.picture()
    first = lab.start_worker(PICTURES, failpoint=f"{step}:{action}:1")
    if action == "kill9":
        lab.await_death(first)
    elif action == "stop":
        lab.await_freeze(first)
    if action != "raise":
        lab.start_worker(PICTURES)
    lab.await_all()
    if action == "stop":
        before = lab.rows("SELECT * FROM transitions ORDER BY id")
        thaw(first)
        until(
            lambda: any(e["event"] in ("attempt_lost", "attempt_ended") for e in first.events()),
            seconds=30,
            why="it has not seen that its lease is lost",
        )
        assert lab.rows("SELECT * FROM transitions ORDER BY id") == before
    if action == "kill9":
        lab.duty("sweep_staging")  # it comes by every half a minute
    lab.check()
    job = lab.job_of(media_id)
    assert job["state"] == "completed"
    assert lab.value("SELECT state FROM media WHERE id = $1", media_id) == "ready"
    if action == "raise" and step != "attempt.settled":
        assert lab.outcomes(job["id"]) == ["retried", "completed"]
    assert lab.value("SELECT count(*) FROM sets WHERE media_id = $1", media_id) == 1


@pytest.mark.timeout(120)
def test_a_worker_killed_while_it_decodes_leaves_no_process_and_no_scratch(lab: Lab) -> None:
    lab.picture()
    doomed = lab.start_worker(PICTURES, failpoint="attempt.described:stop:1")
    lab.await_freeze(doomed)
    assert lab.scratch(), "the attempt has no scratch to leave behind"
    lab.kill(doomed)
    lab.start_worker(PICTURES)
    lab.await_all()
    lab.check()

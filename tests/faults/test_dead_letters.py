"""Many dead letters are replayed while others run; discarded ones stay as they were. F45."""

from __future__ import annotations

import pytest
from tests.faults.lab import GENERIC, Lab, settings_of

from mediamill import db, jobs, queue
from mediamill.attempt import settle_failure
from mediamill.failures import Code, Problem

MANY = 2000


@pytest.mark.timeout(400)
def test_two_thousand_dead_letters_are_replayed_at_a_rate_while_others_run(lab: Lab) -> None:
    lab.start_api()
    bury(lab, MANY)
    other = lab.enqueue("crash", {"times": 0})
    lab.start_worker("default=8,maintenance=1")
    lab.start_worker("default=8,maintenance=1")
    assert lab.await_job(other)["state"] == "completed"
    (lab.folder / "mended").touch()
    kept = lab.enqueue("broken")
    lab.await_job(kept)

    body = {"filter": {"code": "internal", "kind": "hopeless"}, "rate_per_second": 400}
    answer = lab.http.post("/v1/dead-letters/replay", json=body, timeout=120)
    assert answer.status_code == 202, answer.text
    assert answer.json()["replayed"] == MANY
    assert answer.json()["seconds"] == MANY / 400
    again = lab.http.post("/v1/dead-letters/replay", json=body, timeout=120)
    assert again.json()["replayed"] == 0, "they were replayed twice"
    spread = lab.value(
        "SELECT extract(epoch FROM max(run_at) - min(run_at)) FROM jobs WHERE kind = 'hopeless'"
    )
    assert float(spread) > MANY / 400 - 1.5, "they all came at once"
    passing = lab.enqueue_many([("row", {"n": n}) for n in range(20)])
    for job_id in passing:
        lab.await_job(job_id)
    lab.await_all(seconds=200)
    assert (
        lab.value("SELECT count(*) FROM jobs WHERE kind = 'hopeless' AND state = 'completed'")
        == MANY
    )
    assert lab.job(kept)["state"] == "failed", "it was not meant"
    history = lab.history()
    starts = [m for m in history.transitions if m["code"] == "replayed"]
    assert len(starts) == MANY
    assert len([a for a in history.attempts if a["outcome"] == "failed"]) >= MANY, "history is gone"
    lab.check()


def bury(lab: Lab, count: int) -> None:
    """Jobs that failed for good, by the functions that a worker calls."""
    lab.enqueue_many([("hopeless", {"n": n}) for n in range(count)])

    async def fail_all(connection: db.Connection) -> None:
        while True:
            async with connection.transaction():
                tickets = await queue.take(connection, ["default"], most=200)
                claims = await jobs.claim(
                    connection, tickets, worker="w", lease_seconds=60, kinds=[("hopeless", 1)]
                )
                for held in claims:
                    problem = Problem(Code.INTERNAL)
                    await settle_failure(connection, settings_of(lab), held, problem)
            if not claims:
                return

    lab.run(fail_all)
    assert lab.value("SELECT count(*) FROM jobs WHERE dead_letter") == count


@pytest.mark.timeout(180)
def test_a_discarded_dead_letter_leaves_the_list_and_keeps_its_history(lab: Lab) -> None:
    lab.start_api()
    lab.start_worker(GENERIC)
    gone, stays = lab.enqueue_many([("hopeless", {"n": 1}), ("hopeless", {"n": 2})])
    for job_id in (gone, stays):
        lab.await_job(job_id)
    listed = lab.http.get("/v1/dead-letters").json()["data"]
    assert len(listed) == 2
    name = next(j["id"] for j in listed if j["payload"]["n"] == 1)
    assert lab.http.post(f"/v1/dead-letters/{name}/discard").status_code == 200
    assert lab.http.post(f"/v1/dead-letters/{name}/discard").status_code == 409
    assert [j["payload"]["n"] for j in lab.http.get("/v1/dead-letters").json()["data"]] == [2]
    assert lab.http.post("/v1/dead-letters/replay", json={}).json()["replayed"] == 1
    assert lab.job(gone)["state"] == "failed"
    full = lab.http.get(f"/v1/dead-letters/{name}").json()
    assert [a["outcome"] for a in full["attempts"]] == ["failed"]
    assert full["attempts"][0]["error"]["code"] == "internal"
    (lab.folder / "mended").touch()
    lab.await_all()
    lab.check()


@pytest.mark.timeout(180)
def test_a_dead_letter_replayed_from_many_places_runs_once(lab: Lab) -> None:
    lab.start_api()
    lab.start_worker("default=1,maintenance=1")
    job_id = lab.enqueue("hopeless", {"n": 3})
    lab.await_job(job_id)
    (lab.folder / "mended").touch()
    name = lab.http.get("/v1/dead-letters").json()["data"][0]["id"]
    answers = lab.many(8, lambda client: client.post(f"/v1/jobs/{name}/replay").status_code)
    assert sorted(answers) == [202, *[409] * 7]
    assert lab.await_job(job_id)["state"] == "completed"
    assert lab.outcomes(job_id) == ["failed", "completed"]
    lab.check()

"""The API dies between its commit and its answer; the client asks again. F05."""

from __future__ import annotations

import httpx2 as httpx
import pytest
from tests.faults.lab import GENERIC, PICTURES, Lab, tiny_picture
from tests.stories.harness import media_uuid, until


@pytest.mark.timeout(180)
@pytest.mark.parametrize("action", ["kill9", "exit"])
def test_a_create_whose_answer_was_lost_is_answered_again_with_the_same_job(
    lab: Lab, action: str
) -> None:
    worker = lab.start_worker(GENERIC)
    api = lab.start_api(failpoint=f"api.accepted:{action}:1")
    body = {"kind": "row", "payload": {"n": 5}}
    headers = {"Idempotency-Key": "only-once"}
    with pytest.raises(httpx.HTTPError):
        lab.http.post("/v1/jobs", json=body, headers=headers)
    until(lambda: not api.alive, seconds=20, why="the API did not meet its failpoint")
    lab.start_api()
    answers = [lab.http.post("/v1/jobs", json=body, headers=headers) for _ in range(3)]
    assert [a.status_code for a in answers] == [202, 202, 202]
    assert {a.headers.get("idempotent-replayed") for a in answers} == {"true"}
    lab.by_key["only-once"] = [a.json()["id"] for a in answers]
    assert lab.value("SELECT count(*) FROM jobs") == 1
    lab.await_all()
    lab.check()
    assert worker.alive


@pytest.mark.timeout(180)
def test_a_slot_and_a_completion_whose_answers_were_lost_make_one_media(lab: Lab) -> None:
    data = tiny_picture()
    lab.start_worker(PICTURES)
    api = lab.start_api(failpoint="api.opened:kill9:1")
    body = {"size": len(data), "filename": "p.jpg"}
    headers = {"Idempotency-Key": "slot"}
    with pytest.raises(httpx.HTTPError):
        lab.http.post("/v1/media", json=body, headers=headers)
    until(lambda: not api.alive, seconds=20, why="the API did not meet its failpoint")

    api = lab.start_api(failpoint="api.accepted:kill9:1")
    slot = lab.http.post("/v1/media", json=body, headers=headers)
    assert slot.status_code == 201, slot.text
    again = lab.http.post("/v1/media", json=body, headers=headers)
    assert again.json()["id"] == slot.json()["id"]
    assert lab.put(slot.json(), data).status_code == 200
    media_id = slot.json()["id"]
    with pytest.raises(httpx.HTTPError):
        lab.complete(media_id)
    until(lambda: not api.alive, seconds=20, why="the API did not meet its failpoint")

    lab.start_api()
    assert lab.complete(media_id).status_code in (200, 202)
    lab.accepted.add(media_uuid(media_id))
    lab.await_all()
    assert lab.value("SELECT count(*) FROM jobs WHERE role = 'main'") == 1
    lab.check()


@pytest.mark.timeout(180)
def test_an_upload_that_the_api_died_in_leaves_the_slot_open_and_no_bytes(lab: Lab) -> None:
    data = tiny_picture()
    lab.start_worker(PICTURES)
    api = lab.start_api(failpoint="api.put:kill9:1")
    slot = lab.open_slot(len(data), "p.jpg")
    with pytest.raises(httpx.HTTPError):
        lab.put(slot, data)
    until(lambda: not api.alive, seconds=20, why="the API did not meet its failpoint")
    lab.start_api()
    assert lab.complete(slot["id"]).status_code == 409
    assert lab.put(slot, data).status_code == 200
    assert lab.complete(slot["id"]).status_code == 202
    lab.accepted.add(media_uuid(slot["id"]))
    lab.await_all()
    lab.check(ignore=["P9"])  # half an upload of a dead API is kept for a day

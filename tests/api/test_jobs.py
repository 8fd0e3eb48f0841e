"""/v1/jobs: status, cancel, replay."""

from __future__ import annotations

import pytest
from tests import rows
from tests.api.conftest import Api, check_problem, media_uuid

from mediamill import db, ids, jobs, media, uploads
from mediamill.failures import Code, Problem

pytestmark = pytest.mark.anyio

FIELDS = {
    "schema_version",
    "id",
    "state",
    "kind",
    "queue",
    "role",
    "stage",
    "progress",
    "estimate",
    "poll_after_seconds",
    "position",
    "attempt",
    "max_attempts",
    "dead_letter",
    "cancel_requested",
    "media_id",
    "recipe",
    "recipe_version",
    "generation",
    "result",
    "error",
    "attempts",
    "run_at",
    "created_at",
    "started_at",
    "finished_at",
    "expires_at",
    "parent_id",
    "pending_children",
    "payload",
    "payload_version",
    "dedup_key",
    "priority",
}


async def fail(api: Api, held: jobs.Claim, *, dead_letter: bool = False) -> None:
    async with db.acquire(api.pool) as connection:
        await jobs.fail(
            connection,
            held,
            Problem(Code.TOOL_FAILED, "It gave up."),
            dead_letter=dead_letter,
            retention_seconds=60,
        )


async def test_a_job_is_a_200_in_every_state(api: Api) -> None:
    body = await api.queued()
    path = body["links"]["job"]
    first = await api.client.get(path)
    assert first.status_code == 200
    shown = first.json()
    assert set(shown) == FIELDS
    assert shown["schema_version"] == 1
    assert (shown["state"], shown["attempt"], shown["attempts"]) == ("queued", 0, [])
    assert shown["position"] >= 1
    assert shown["media_id"] == body["id"]
    assert first.headers["retry-after"] == str(round(shown["poll_after_seconds"]))
    assert first.headers["cache-control"] == "private, no-cache"

    held = await api.claimed(body)
    running = await api.client.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert running.status_code == 200
    assert running.json()["state"] == "processing"
    assert running.json()["position"] is None
    assert [a["outcome"] for a in running.json()["attempts"]] == [None]

    await fail(api, held, dead_letter=True)
    ended = await api.client.get(path)
    assert ended.status_code == 200
    assert "retry-after" not in ended.headers
    shown = ended.json()
    assert (shown["state"], shown["dead_letter"]) == ("failed", True)
    assert shown["error"] == Problem(Code.TOOL_FAILED, "It gave up.").as_dict()
    assert [(a["attempt"], a["worker"], a["outcome"]) for a in shown["attempts"]] == [
        (1, "worker-1", "failed")
    ]
    same = await api.client.get(path, headers={"If-None-Match": ended.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    assert same.headers["etag"] == ended.headers["etag"]


async def test_positions_count_the_queue(api: Api) -> None:
    """Every tenant's jobs, in the order in which they are claimed: what other tests left counts."""
    first, second = await api.queued(), await api.queued()
    positions = [
        (await api.client.get(body["links"]["job"])).json()["position"] for body in (first, second)
    ]
    line = await api.pool.fetch(
        "SELECT id FROM jobs WHERE queue = 'image' AND state = 'queued'"
        " ORDER BY priority DESC, turn, id"
    )
    places = {ids.encode(ids.JOB, row["id"]): n for n, row in enumerate(line, start=1)}
    assert positions == [places[body["job"]["id"]] for body in (first, second)]
    assert positions[0] < positions[1]


async def test_canceling_a_queued_job_ends_it_and_its_media_at_once(api: Api) -> None:
    body = await api.queued()
    path = f"{body['links']['job']}/cancel"
    for _ in range(2):  # to cancel is idempotent
        answer = await api.client.post(path)
        assert answer.status_code == 200
        assert answer.headers["location"] == body["links"]["job"]
        assert answer.json()["state"] == "canceled"
    after = await api.read(body["id"])
    assert (after["state"], after["error"]["code"]) == ("failed", "canceled")
    async with db.acquire(api.pool) as connection:
        job_id = ids.decode(ids.JOB, body["job"]["id"])
        assert job_id is not None
        logged = await rows.moves(connection, api.tenant, "job", job_id)
        assert logged == [(None, "queued"), ("queued", "canceled")]
    # The media can be processed again; the canceled job itself stays ended.
    check_problem(await api.client.post(f"{body['links']['job']}/replay"), 409, "wrong_state")
    answer = await api.client.post(f"/v1/media/{body['id']}/process", json={})
    assert answer.status_code == 202


async def test_canceling_a_running_job_asks_its_worker(api: Api) -> None:
    body = await api.queued()
    held = await api.claimed(body)
    answer = await api.client.post(f"{body['links']['job']}/cancel")
    assert answer.status_code == 202
    assert (answer.json()["state"], answer.json()["cancel_requested"]) == ("processing", True)
    async with db.acquire(api.pool) as connection:
        renewed = await jobs.renew(connection, [held], lease_seconds=60)
        assert renewed[held.key].cancel_requested
        await jobs.settle_canceled(connection, held, retention_seconds=60)
    answer = await api.client.post(f"{body['links']['job']}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (200, "canceled")


async def test_a_completed_job_cannot_be_canceled_or_replayed(api: Api) -> None:
    body = await api.ready()
    answer = await api.client.post(f"{body['links']['job']}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (200, "completed")
    check_problem(await api.client.post(f"{body['links']['job']}/replay"), 409, "wrong_state")
    assert (await api.read(body["id"]))["state"] == "ready"


async def test_a_replay_starts_a_failed_job_and_its_media_anew(api: Api) -> None:
    body = await api.queued()
    await fail(api, await api.claimed(body), dead_letter=True)
    answer = await api.client.post(f"{body['links']['job']}/replay")
    assert answer.status_code == 202
    assert answer.headers["location"] == body["links"]["job"]
    shown = answer.json()
    assert (shown["state"], shown["attempt"], shown["dead_letter"]) == ("queued", 0, False)
    assert shown["error"] is None
    after = await api.read(body["id"])
    assert (after["state"], after["generation"]) == ("queued", body["generation"] + 1)
    assert after["job"]["id"] == body["job"]["id"]
    history = (await api.client.get(body["links"]["job"])).json()["attempts"]
    assert [a["outcome"] for a in history] == ["failed"]
    check_problem(await api.client.post(f"{body['links']['job']}/replay"), 409, "wrong_state")
    held = await api.claimed(after)
    async with db.acquire(api.pool) as connection:
        await rows.publish(connection, api.store, held, {"w8.webp": b"at last"})
    assert (await api.read(body["id"]))["state"] == "ready"


async def test_a_replay_of_a_job_that_its_media_left_behind_is_refused(api: Api) -> None:
    body = await api.queued()
    await fail(api, await api.claimed(body))
    assert (await api.client.post(f"/v1/media/{body['id']}/process", json={})).status_code == 202
    problem = check_problem(
        await api.client.post(f"{body['links']['job']}/replay"), 409, "wrong_state"
    )
    assert "only a failed job" not in problem["detail"]  # it is a failed job


@pytest.mark.parametrize("role", ["main", "preview"])
async def test_a_replay_for_a_deleted_media_is_refused(api: Api, role: str) -> None:
    body = await api.queued()
    job_id = ids.decode(ids.JOB, body["job"]["id"])
    assert job_id is not None
    birth = uploads.preview_birth()
    async with db.transaction(api.pool) as connection:
        await media.add_job(connection, api.tenant, media_uuid(body), birth, max_attempts=5)
    async with db.acquire(api.pool) as connection:
        preview = await rows.claim(connection, api.tenant, birth)
    await fail(api, preview)
    await fail(api, await api.claimed(body))
    assert (await api.client.delete(f"/v1/media/{body['id']}")).status_code == 202
    found = ids.encode(ids.JOB, job_id if role == "main" else birth.id)
    check_problem(await api.client.post(f"/v1/jobs/{found}/replay"), 409, "wrong_state")


async def test_a_malformed_id_is_as_unknown_as_a_missing_one(api: Api) -> None:
    for job_id in ("x", "job_", "job_" + "z" * 26, "med_" + "0" * 26, "job_" + "0" * 26, "%00"):
        for method, path in (("GET", ""), ("POST", "/cancel"), ("POST", "/replay")):
            answer = await api.client.request(method, f"/v1/jobs/{job_id}{path}")
            check_problem(answer, 404, "not_found")


async def test_all_that_match_are_canceled_and_no_others(api: Api) -> None:
    waiting = [await api.queued() for _ in range(3)]
    running = await api.queued()
    await api.claimed(running)
    film = await api.queued(content_type="video/mp4")
    answer = await api.client.post("/v1/jobs/cancel", json={"filter": {"kind": "image"}})
    assert answer.status_code == 200
    assert answer.json() == {"schema_version": 1, "changed": 4, "next": None}
    for body in waiting:
        job = (await api.client.get(f"/v1/jobs/{body['job']['id']}")).json()
        assert job["state"] == "canceled"
    job = (await api.client.get(f"/v1/jobs/{running['job']['id']}")).json()
    assert (job["state"], job["cancel_requested"]) == ("processing", True)
    assert (await api.client.get(f"/v1/jobs/{film['job']['id']}")).json()["state"] == "queued"
    again = await api.client.post("/v1/jobs/cancel", json={"filter": {"kind": "image"}})
    assert again.json()["changed"] == 0


async def test_all_that_match_are_replayed_page_by_page(api: Api) -> None:
    for _ in range(3):
        await fail(api, await api.claimed(await api.queued()))
    other = {"filter": {"error_code": "corrupt_input"}}
    assert (await api.client.post("/v1/jobs/replay", json=other)).json()["changed"] == 0
    wanted = {"filter": {"error_code": "tool_failed"}, "limit": 2}
    first = (await api.client.post("/v1/jobs/replay", json=wanted)).json()
    assert first["changed"] == 2
    rest = await api.client.post("/v1/jobs/replay", json=wanted | {"before": first["next"]})
    assert rest.json() == {"schema_version": 1, "changed": 1, "next": None}
    listed = (await api.client.get("/v1/jobs?state=queued")).json()["data"]
    assert len(listed) == 3


async def test_a_bulk_that_says_nonsense_is_refused(api: Api) -> None:
    for body, pointer in (
        ({"before": "job_x"}, "/before"),
        ({"filter": {"state": "failed"}}, "/filter/state"),
        ({"filter": {"created_after": "2026-01-01T00:00:00"}}, "/filter/created_after"),
        ({"limit": 0}, "/limit"),
    ):
        problem = check_problem(
            await api.client.post("/v1/jobs/cancel", json=body), 422, "invalid_request"
        )
        assert [e["pointer"] for e in problem["errors"]] == [pointer]

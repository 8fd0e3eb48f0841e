"""Polling: what has not changed costs one read, and waiting for a change holds no connection."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx2 as httpx
import pytest
from tests import rows
from tests.api.conftest import Api, check_problem

from mediamill import db, ids, installation, jobs
from mediamill.estimates import Forecaster
from mediamill.jobs import NewJob
from mediamill.queue import Ticket

pytestmark = pytest.mark.anyio


async def publish(api: Api, body: dict[str, Any]) -> None:
    held = await api.claimed(body)
    async with db.acquire(api.pool) as connection:
        await rows.publish(connection, api.store, held, {"w8.webp": b"0123456789"})


async def test_what_has_not_changed_costs_one_indexed_read(
    api: Api, client: httpx.AsyncClient
) -> None:
    asked: list[str] = []

    def note(record: Any) -> None:
        if "UNLISTEN" not in record.query:  # the pool tidies a connection that is given back
            asked.append(record.query)

    bodies = (await api.queued(), await api.ready())
    async with api.pool.acquire() as connection:
        connection.add_query_logger(note)  # the pool hands out this very connection next
    for body in bodies:
        for path in (f"/v1/media/{body['id']}", body["links"]["job"]):
            first = await client.get(path)
            tag = first.headers["etag"]
            assert tag.startswith('W/"')
            asked.clear()
            for given in (tag, tag.removeprefix("W/"), f'"other", {tag}'):
                answer = await client.get(path, headers={"If-None-Match": given})
                assert answer.status_code == 304, path
                assert answer.content == b""
                assert answer.headers["etag"] == tag
                assert ("retry-after" in answer.headers) == (body["state"] == "queued")
            assert [q.split("\n")[-1] for q in asked] == ["WHERE tenant_id = $1 AND id = $2"] * 3


async def test_asking_again_is_told_from_the_queue_also_when_nothing_has_changed(
    api: Api, client: httpx.AsyncClient
) -> None:
    async with db.acquire(api.pool) as connection:
        await installation.register_worker(
            connection, "w", version="1", slots={"image": 1}, sandbox="strong"
        )
        for _ in range(3):
            body = await api.ready()
        await connection.execute(
            "UPDATE jobs SET finished_at = started_at + interval '8 seconds'"
            " WHERE state = 'completed' AND queue = 'image'"
        )
    first, last = [await api.queued() for _ in range(6)][0::5]
    api.services.forecaster = Forecaster()  # as after a restart
    for body, least, most in ((first, 1, 60), (last, 30, 60)):
        for path in (f"/v1/media/{body['id']}", body["links"]["job"]):
            answer = await client.get(path)
            after = answer.json()["poll_after_seconds"]
            assert answer.headers["retry-after"] == str(round(after))
            assert least <= after <= most
            tag = {"If-None-Match": answer.headers["etag"]}
            again = await client.get(path, headers=tag)
            assert again.status_code == 304
            assert after - 8 <= int(again.headers["retry-after"]) <= after
            api.services.forecaster = Forecaster()  # another process: its figures are read first
            again = await client.get(path, headers=tag)
            assert again.status_code == 304
            assert int(again.headers["retry-after"]) >= after - 8


async def test_another_tag_gets_the_body(api: Api, client: httpx.AsyncClient) -> None:
    body = await api.queued()
    answer = await client.get(f"/v1/media/{body['id']}", headers={"If-None-Match": 'W/"0"'})
    assert answer.status_code == 200
    answer = await client.get(f"/v1/media/{body['id']}", headers={"If-None-Match": "nonsense"})
    assert answer.status_code == 200


@pytest.mark.parametrize("how", ["header", "parameter"])
async def test_a_waiting_client_gets_the_change_when_it_happens(
    api: Api, client: httpx.AsyncClient, how: str
) -> None:
    body = await api.queued()
    path = f"/v1/media/{body['id']}"
    tag = (await client.get(path)).headers["etag"]
    headers = {"If-None-Match": tag} | ({"Prefer": "wait=20"} if how == "header" else {})
    query = {} if how == "header" else {"wait": "20"}
    waiting = asyncio.create_task(client.get(path, headers=headers, params=query))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    assert api.services.waiters == 1
    assert api.pool.get_idle_size() >= api.pool.get_size() - 1  # at most the follower's own look
    await publish(api, body)
    async with asyncio.timeout(5):
        answer = await waiting
    assert answer.status_code == 200
    assert answer.json()["state"] != "queued"
    assert answer.headers["preference-applied"] == "wait=20"
    assert api.services.waiters == 0
    assert api.services.follower.count == 0


async def test_without_a_tag_it_waits_for_the_end(api: Api, client: httpx.AsyncClient) -> None:
    body = await api.queued()
    waiting = asyncio.create_task(client.get(f"/v1/media/{body['id']}?wait=20"))
    await asyncio.sleep(0.2)
    await publish(api, body)
    async with asyncio.timeout(5):
        answer = await waiting
    assert answer.json()["state"] == "ready"
    assert len(answer.json()["variants"]) == 1


async def test_nothing_new_is_304_at_the_deadline(api: Api, client: httpx.AsyncClient) -> None:
    body = await api.queued()
    for path in (f"/v1/media/{body['id']}", body["links"]["job"]):
        tag = (await client.get(path)).headers["etag"]
        begun = time.monotonic()
        answer = await client.get(path, headers={"If-None-Match": tag, "Prefer": "wait=1"})
        assert answer.status_code == 304
        assert answer.headers["preference-applied"] == "wait=1"
        assert time.monotonic() - begun >= 1


async def test_too_many_who_wait_are_answered_at_once(api: Api, client: httpx.AsyncClient) -> None:
    body = await api.queued()
    api.services.waiters = api.services.settings.max_waiters
    begun = time.monotonic()
    answer = await client.get(f"/v1/media/{body['id']}?wait=20")
    assert answer.status_code == 200
    assert "preference-applied" not in answer.headers
    assert time.monotonic() - begun < 10
    api.services.waiters = 0


async def test_a_leaving_process_lets_them_go(api: Api, client: httpx.AsyncClient) -> None:
    body = await api.queued()
    waiting = asyncio.create_task(client.get(f"/v1/media/{body['id']}?wait=20"))
    await asyncio.sleep(0.3)
    api.services.shutting_down.set()
    api.services.follower.wake_all()
    async with asyncio.timeout(5):
        assert (await waiting).status_code == 200


async def test_preferences_that_are_not_known_are_no_error(
    api: Api, client: httpx.AsyncClient
) -> None:
    body = await api.queued()
    path = f"/v1/media/{body['id']}"
    for prefer in ("wait=x", "respond-async", "wait", "wait=-5", ";;=,", 'handling="lenient"'):
        assert (await client.get(path, headers={"Prefer": prefer})).status_code == 200
    for bad in ("x", "-1", "1.5", ""):
        check_problem(await client.get(path, params={"wait": bad}), 400, "unknown_parameter")
    check_problem(await client.get(f"{path}?waits=5"), 400, "unknown_parameter")


async def test_a_job_is_waited_for_when_it_is_made(api: Api, client: httpx.AsyncClient) -> None:
    async with db.acquire(api.pool) as connection:
        await connection.execute(
            "INSERT INTO kinds (kind, version, queue, max_attempts)"
            " VALUES ('test.wait', 1, 'default', 3) ON CONFLICT DO NOTHING"
        )
    making = asyncio.create_task(
        client.post("/v1/jobs", json={"kind": "test.wait"}, headers={"Prefer": "wait=20"})
    )
    async with db.acquire(api.pool) as connection:
        for _ in range(500):
            row = await connection.fetchrow("SELECT id FROM jobs WHERE kind = 'test.wait'")
            if row is not None:
                break
            await asyncio.sleep(0.01)
        assert row is not None
        (held,) = await jobs.claim(
            connection,
            [Ticket("default", api.tenant, row["id"])],
            worker="w",
            lease_seconds=60,
            kinds=[("test.wait", 1)],
        )
        await jobs.complete(connection, held, {"value": 7}, retention_seconds=60)
    async with asyncio.timeout(5):
        answer = await making
    assert answer.status_code == 200
    assert (answer.json()["state"], answer.json()["result"]) == ("completed", 7)
    assert answer.headers["location"] == f"/v1/jobs/{ids.encode(ids.JOB, row['id'])}"


async def test_an_upload_is_completed_and_waited_for(api: Api, client: httpx.AsyncClient) -> None:
    slot = await api.upload()
    path = f"/v1/media/{slot['id']}/complete"
    waiting = asyncio.create_task(client.post(path, headers={"Prefer": "wait=20"}))
    for _ in range(500):
        if (body := await api.read(slot["id"]))["state"] == "queued" and api.services.waiters:
            break
        await asyncio.sleep(0.01)
    async with db.acquire(api.pool) as connection:
        open_ = await connection.fetchval(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
        )
    assert open_ == 0  # accepted for good before it waits
    assert not waiting.done()
    await publish(api, body)
    async with asyncio.timeout(5):
        answer = await waiting
    assert answer.status_code == 200
    assert (answer.json()["state"], len(answer.json()["variants"])) == ("ready", 1)
    assert answer.headers["preference-applied"] == "wait=20"
    assert answer.headers["location"] == f"/v1/media/{slot['id']}"
    assert "retry-after" not in answer.headers
    again = await client.post(path, params={"wait": "20"})  # nothing to wait for
    assert (again.status_code, "preference-applied" in again.headers) == (200, False)
    assert api.services.waiters == 0


async def test_a_completed_upload_is_accepted_when_the_wait_is_over(
    api: Api, client: httpx.AsyncClient
) -> None:
    slot = await api.upload()
    answer = await client.post(f"/v1/media/{slot['id']}/complete?wait=1")
    assert (answer.status_code, answer.json()["state"]) == (202, "queued")
    assert answer.headers["preference-applied"] == "wait=1"
    assert int(answer.headers["retry-after"]) >= 1
    absent = await api.slot()
    begun = time.monotonic()
    answer = await client.post(f"/v1/media/{absent['id']}/complete?wait=20")
    assert answer.status_code == 409
    assert time.monotonic() - begun < 15


async def test_a_parent_changes_with_its_children(api: Api, client: httpx.AsyncClient) -> None:
    parent = NewJob("test.parent", {}, "default")
    child = NewJob("test.child", {}, "default", child_key="a")
    async with db.transaction(api.pool) as connection:
        await jobs.enqueue(connection, api.tenant, [parent])
        (held,) = await jobs.claim(
            connection,
            [Ticket("default", api.tenant, parent.id)],
            worker="w",
            lease_seconds=60,
            kinds=[("test.parent", 1)],
        )
        await jobs.enqueue(connection, api.tenant, [child], parent_id=parent.id)
        await connection.execute(
            "UPDATE jobs SET pending_children = 1, lease_until = NULL WHERE id = $1", parent.id
        )
    path = f"/v1/jobs/{ids.encode(ids.JOB, parent.id)}"
    tag = {"If-None-Match": (await client.get(path)).headers["etag"]}
    assert (await client.get(path, headers=tag)).status_code == 304
    async with db.acquire(api.pool) as connection:
        await connection.execute("UPDATE jobs SET version = version + 1 WHERE id = $1", child.id)
    assert (await client.get(path, headers=tag)).status_code == 200
    assert held


async def test_lists_take_filters_that_are_held_to_what_they_can_mean(
    api: Api, client: httpx.AsyncClient
) -> None:
    early = await api.queued()
    late = await api.ready(content_type="image/jpeg")
    async with db.acquire(api.pool) as connection:
        await connection.execute(
            "UPDATE media SET created_at = now() - interval '1 day',"
            ' error = \'{"code": "corrupt_input"}\' WHERE id = $1',
            ids.decode(ids.MEDIA, early["id"]),
        )
        await connection.execute(
            'UPDATE jobs SET error = \'{"code": "corrupt_input"}\' WHERE media_id = $1',
            ids.decode(ids.MEDIA, early["id"]),
        )
        middle = await connection.fetchval("SELECT (now() - interval '1 hour')")

    async def found(path: str, **query: str) -> list[str]:
        answer = await client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return [one["id"] for one in answer.json()["data"]]

    both = [late["id"], early["id"]]
    assert await found("/v1/media", kind="image", recipe="web") == both
    assert await found("/v1/media", kind="video") == []
    assert await found("/v1/media", created_after=middle.isoformat()) == [late["id"]]
    assert await found("/v1/media", created_before=middle.isoformat()) == [early["id"]]
    assert await found("/v1/media", error_code="corrupt_input") == [early["id"]]
    assert await found("/v1/jobs", error_code="corrupt_input") == [early["job"]["id"]]
    assert await found("/v1/jobs", queue="image", created_before="2020-01-01") == []
    bad = {"created_after": "yesterday", "kind": "", "recipe": "x" * 129, "error_code": "\0"}
    for name, value in bad.items():
        answer = await client.get("/v1/media", params={name: value})
        check_problem(answer, 400, "unknown_parameter")


async def test_no_route_takes_a_parameter_that_it_does_not_know(
    api: Api, client: httpx.AsyncClient
) -> None:
    body = await api.ready()
    media_path, job_path = f"/v1/media/{body['id']}", body["links"]["job"]
    for method, path in (
        ("GET", f"{media_path}/timeline"),
        ("GET", f"{media_path}/variants/w8.webp"),
        ("POST", f"{media_path}/complete"),
        ("POST", f"{media_path}/process"),
        ("DELETE", media_path),
        ("GET", f"{job_path}/timeline"),
        ("POST", f"{job_path}/cancel"),
        ("POST", f"{job_path}/replay"),
        ("POST", "/v1/dead-letters/replay"),
    ):
        answer = await client.request(method, path, params={"dry_run": "true"}, json={})
        check_problem(answer, 400, "unknown_parameter")
    assert (await client.get(media_path)).json()["state"] == "ready"

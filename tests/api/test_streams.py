"""Event streams through a real server: snapshot, resume, heartbeats, the end, and the way out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests import rows
from tests.api.conftest import Api, Served, check_problem, media_uuid, serving

from mediamill import db, ids, jobs, keys
from mediamill.api import streams
from mediamill.jobs import NewJob

pytestmark = pytest.mark.anyio


@pytest.fixture
async def served(shared_database: str, tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(shared_database, tmp_path) as made:
        yield made


@dataclass(slots=True)
class Heard:
    """What a stream has said so far."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    comments: int = 0
    closed: bool = False

    def types(self) -> list[str]:
        return [e["event"] for e in self.events]

    def ids(self) -> list[int]:
        return [int(e["id"]) for e in self.events if "id" in e]

    async def until(self, count: int, *, seconds: float = 10.0) -> None:
        for _ in range(int(seconds * 100)):
            if len(self.events) >= count:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"heard {self.types()}")

    async def end(self, *, seconds: float = 10.0) -> None:
        for _ in range(int(seconds * 100)):
            if self.closed:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the stream is still open")


@asynccontextmanager
async def hearing(
    client: httpx.AsyncClient, path: str, last: int | None = None
) -> AsyncIterator[Heard]:
    heard = Heard()
    headers = {} if last is None else {"Last-Event-ID": str(last)}

    async def read() -> None:
        async with client.stream("GET", path, headers=headers) as answer:
            heard.status, heard.headers = answer.status_code, dict(answer.headers)
            started.set()
            block: dict[str, Any] = {}
            async for line in answer.aiter_lines():
                if line.startswith(":"):
                    heard.comments += 1
                elif line:
                    name, _, value = line.partition(": ")
                    block[name] = json.loads(value) if name == "data" else value
                elif block:
                    if "data" in block:
                        heard.events.append(block)
                    block = {}
            heard.closed = True

    started = asyncio.Event()
    task = asyncio.create_task(read())
    try:
        async with asyncio.timeout(10):
            await started.wait()
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def publish(api: Api, body: dict[str, Any]) -> None:
    held = await api.claimed(body)
    async with db.acquire(api.pool) as connection:
        await rows.publish(connection, api.store, held, {"w8.webp": b"0123456789"})


async def test_a_media_is_told_from_its_snapshot_to_its_end(served: Served) -> None:
    api = served.api
    body = await api.queued()
    async with (
        served.client() as client,
        hearing(client, f"/v1/media/{body['id']}/events") as heard,
    ):
        await heard.until(1)
        assert heard.status == 200
        assert heard.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert "no-cache" in heard.headers["cache-control"]
        assert heard.headers["x-accel-buffering"] == "no"
        snapshot = heard.events[0]
        assert snapshot["event"] == "snapshot"
        assert snapshot["data"]["state"] == "queued"
        assert "version" not in snapshot["data"]
        await publish(api, body)
        await heard.end()
    assert heard.types()[-1] == "media.ready"
    assert heard.ids() == sorted(heard.ids())
    last = heard.events[-1]["data"]
    assert last["data"]["state"] == "ready"
    assert last["data"]["progress"] == 100
    assert [v["name"] for v in last["data"]["variants"]] == ["w8.webp"]
    assert last["id"].startswith("evt_")


async def test_who_comes_back_hears_what_it_missed_once_and_in_order(served: Served) -> None:
    api = served.api
    body = await api.queued()
    path = f"/v1/media/{body['id']}/events"
    async with served.client() as client:
        async with hearing(client, path) as heard:
            await heard.until(1)
            seen = heard.ids()[-1]
        await publish(api, body)
        async with hearing(client, path, seen) as heard:
            await heard.end()
            assert "snapshot" not in heard.types()
            assert heard.types()[-1] == "media.ready"
            assert heard.types().count("media.ready") == 1
            assert min(heard.ids()) > seen
            last = heard.ids()[-1]
        again = await client.get(path, headers={"Last-Event-ID": str(last)})
        assert again.status_code == 204  # an EventSource stops here
        async with hearing(client, path) as heard:  # without an id: the state, and the end
            await heard.end()
            assert heard.types() == ["snapshot"]
            assert heard.events[0]["data"]["state"] == "ready"


async def test_an_id_that_is_not_kept_or_not_ours_resets(served: Served) -> None:
    api = served.api
    body = await api.queued()
    path = f"/v1/media/{body['id']}/events"
    async with db.acquire(api.pool) as connection:
        newest = await connection.fetchval("SELECT max(id) FROM events")
        await connection.execute("DELETE FROM events WHERE id <= $1", newest)
    async with served.client() as client:
        for last in (0, max(newest - 5, 0), newest + 1_000_000):
            async with hearing(client, path, last) as heard:
                await heard.until(2)
                assert heard.types() == ["reset", "snapshot"]
        async with hearing(client, path, newest) as heard:  # nothing was missed
            await publish(api, body)
            await heard.end()
            assert "reset" not in heard.types()
        answer = await client.get(path, headers={"Last-Event-ID": "-1"})
        assert answer.status_code == 400


async def test_a_job_is_told_and_its_progress(served: Served) -> None:
    api = served.api
    async with db.transaction(api.pool) as connection:
        new = NewJob("x.test", {}, "default")
        await jobs.enqueue(connection, api.tenant, [new])
    path = f"/v1/jobs/{ids.encode(ids.JOB, new.id)}/events"
    async with served.client() as client, hearing(client, path) as heard:
        await heard.until(1)
        from mediamill.queue import Ticket

        async with db.acquire(api.pool) as connection:
            (held,) = await jobs.claim(
                connection,
                [Ticket("default", api.tenant, new.id)],
                worker="w",
                lease_seconds=60,
                kinds=[("x.test", 1)],
            )
            for percent in (10.0, 55.0):
                await jobs.advance(connection, held, "encode", percent)
                await asyncio.sleep(1.3)
            await jobs.complete(connection, held, {"value": 1}, retention_seconds=60)
        await heard.end()
    assert heard.types()[0] == "snapshot"
    assert heard.types()[-1] == "job.completed"
    told = [e for e in heard.events if e["event"] == "job.progress"]
    assert told
    assert all("id" not in e for e in told)
    percents = [e["data"]["data"]["progress"] for e in told]
    assert percents == sorted(percents)
    assert percents[-1] == 55.0


async def test_a_tenant_hears_of_its_own_and_by_type(served: Served) -> None:
    api = served.api
    async with db.acquire(api.pool) as connection:
        stranger = await rows.new_tenant(connection)
    token = await api.new_key(stranger)
    async with (
        served.client() as client,
        served.client(token) as other,
        hearing(client, "/v1/events") as all_,
        hearing(client, "/v1/events?types=media.ready,job.*") as some,
        hearing(other, "/v1/events") as foreign,
    ):
        body = await api.queued()
        await publish(api, body)
        await foreign.until(1)
        for heard in (all_, some):
            while "media.ready" not in heard.types():
                await heard.until(len(heard.events) + 1)
        assert {t.partition(".")[0] for t in some.types()} == {"snapshot", "job", "media"}
        assert "media.queued" not in some.types()
        assert foreign.types() == ["snapshot"]
        assert foreign.events[0]["data"]["media"] == []
        answer = await client.get("/v1/events?types=media.nonsense")
        assert answer.json()["code"] == "unknown_parameter"


async def test_a_browser_opens_a_signed_address(served: Served) -> None:
    api = served.api
    body = await api.queued()
    async with served.client() as client, served.client(None) as browser:
        answer = await client.post("/v1/stream-urls", json={"media_id": body["id"]})
        assert answer.status_code == 201
        url = answer.json()["url"].removeprefix(rows.PUBLIC_URL)
        async with hearing(browser, url) as heard:
            await heard.until(1)
            assert heard.events[0]["data"]["id"] == body["id"]
        other = await api.queued()
        moved = url.replace(body["id"], other["id"])
        assert (await browser.get(moved)).status_code == 403
        assert (await browser.get(url.replace("signature=", "signature=x"))).status_code == 403
        old = url.replace("expires=", "expires=1")
        assert (await browser.get(old)).status_code == 403
        assert (await browser.get(f"/v1/media/{body['id']}/events")).status_code == 401
        missing = {"media_id": ids.encode(ids.MEDIA, ids.new())}
        assert (await client.post("/v1/stream-urls", json=missing)).status_code == 404


async def test_heartbeats_go_on_and_end_with_the_key(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr("mediamill.keys._REMEMBER_SECONDS", 0.0)
    api = served.api
    token = await api.new_key(api.tenant, "media:read")
    async with served.client(token) as client, hearing(client, "/v1/events") as heard:
        await heard.until(1)
        for _ in range(200):
            if heard.comments >= 3:
                break
            await asyncio.sleep(0.01)
        assert heard.comments >= 3
        async with db.acquire(api.pool) as connection:
            await connection.execute(
                "UPDATE api_keys SET revoked_at = now() WHERE tenant_id = $1"
                " AND scopes = '{media:read}'",
                api.tenant,
            )
        await heard.end()


async def test_a_signed_stream_ends_with_the_key_that_signed_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr("mediamill.keys._REMEMBER_SECONDS", 0.0)
    api = served.api
    key_id = (token := await api.new_key(api.tenant, "media:read")).split("_")[2]
    async with served.client() as own, served.client(token) as client, served.client(None) as page:
        urls = [
            (await c.post("/v1/stream-urls", json={})).json()["url"].removeprefix(rows.PUBLIC_URL)
            for c in (client, own)
        ]
        assert f"api_key={key_id}" in urls[0]
        async with hearing(page, urls[0]) as heard, hearing(page, urls[1]) as other:
            await heard.until(1)
            await other.until(1)
            for _ in range(200):
                if heard.comments >= 2:
                    break
                await asyncio.sleep(0.01)
            assert heard.comments >= 2
            async with db.acquire(api.pool) as connection:
                assert await keys.revoke(connection, api.tenant, key_id)
            await heard.end()
            check_problem(await page.get(urls[0]), 401, "unauthenticated")
            lent = urls[0].replace(f"api_key={key_id}", f"api_key={api.token.split('_')[2]}")
            assert (await page.get(lent)).status_code == 403
            before = other.comments
            for _ in range(200):
                if other.comments > before + 1:
                    break
                await asyncio.sleep(0.01)
            assert other.comments > before + 1  # a key of its own: it goes on


async def test_dropped_streams_leave_nothing_behind(served: Served) -> None:
    follower = served.api.services.follower
    async with served.client() as client:
        for _ in range(5):
            async with hearing(client, "/v1/events") as one, hearing(client, "/v1/events") as two:
                await one.until(1)
                await two.until(1)
                assert follower.count == 2
            for _ in range(200):
                if follower.count == 0:
                    break
                await asyncio.sleep(0.01)
            assert follower.count == 0
    assert follower._subscriptions == {}


async def test_leaving_takes_less_than_a_second(served: Served) -> None:
    async with (
        served.client() as client,
        hearing(client, "/v1/events") as one,
        hearing(client, "/v1/events") as two,
    ):
        await one.until(1)
        await two.until(1)
        async with asyncio.timeout(1.0):
            await served.leave()
        await one.end()
        await two.end()


async def test_more_streams_than_allowed_are_asked_to_come_back(
    shared_database: str, tmp_path: Path
) -> None:
    async with (
        serving(shared_database, tmp_path, max_event_streams=1) as served,
        served.client() as client,
        hearing(client, "/v1/events") as heard,
    ):
        await heard.until(1)
        answer = await client.get("/v1/events")
        check_problem(answer, 503, "too_busy")
        assert 2 <= int(answer.headers["retry-after"]) <= 15


async def test_one_tenant_leaves_streams_to_the_others(
    shared_database: str, tmp_path: Path
) -> None:
    async with serving(shared_database, tmp_path, max_event_streams_per_tenant=2) as served:
        api = served.api
        async with db.acquire(api.pool) as connection:
            other = await rows.new_tenant(connection)
        token = await api.new_key(other)
        async with (
            served.client() as client,
            served.client(token) as stranger,
            hearing(client, "/v1/events") as one,
        ):
            await one.until(1)
            missing = ids.encode(ids.MEDIA, ids.new())
            for _ in range(3):  # what does not open does not count
                assert (await client.get(f"/v1/media/{missing}/events")).status_code == 404
            async with hearing(client, "/v1/events") as two, hearing(stranger, "/v1/events") as its:
                await two.until(1)
                await its.until(1)
                answer = await client.get("/v1/events")
                body = check_problem(answer, 429, "too_many_streams")
                assert body["limit"]["name"] == "event_streams_per_tenant"
                assert body["limit"]["allowed"] == 2
                assert 2 <= int(answer.headers["retry-after"]) <= 15
            for _ in range(200):
                if api.services.streams[api.tenant] == 1:
                    break
                await asyncio.sleep(0.01)
            async with hearing(client, "/v1/events") as again:
                await again.until(1)
        for _ in range(200):
            if not api.services.streams:
                break
            await asyncio.sleep(0.01)
        assert not api.services.streams


async def test_a_stream_of_nothing_and_of_a_deleted_media(served: Served) -> None:
    api = served.api
    body = await api.queued()
    async with served.client() as client:
        missing = ids.encode(ids.MEDIA, ids.new())
        check_problem(await client.get(f"/v1/media/{missing}/events"), 404, "not_found")
        path = f"/v1/media/{body['id']}/events"
        async with hearing(client, path) as heard:
            await heard.until(1)
            assert (await client.delete(f"/v1/media/{body['id']}")).status_code == 202
            await heard.end()
            assert heard.types()[-1] == "media.deleted"
        check_problem(await client.get(path), 410, "gone")
        assert served.api.services.follower.count == 0
        assert media_uuid(body)

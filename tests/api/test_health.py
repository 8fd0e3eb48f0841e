"""Liveness, readiness and figures."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import asyncpg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.api.conftest import Api, make_api

from mediamill import db, ids, installation
from mediamill.config import QUEUES
from mediamill.failures import Code, Failure

pytestmark = pytest.mark.anyio


async def test_a_live_and_ready_process_says_so_to_anyone(api: Api) -> None:
    async with api.stranger() as stranger:
        answer = await stranger.get("/livez")
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
        answer = await stranger.get("/readyz")
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json()["checks"]["database"]["status"] == "ok"


async def test_a_process_that_leaves_is_not_ready(api: Api) -> None:
    api.services.shutting_down.set()
    answer = await api.client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["status"] == "unavailable"
    assert (await api.client.get("/livez")).status_code == 200


async def test_it_is_not_ready_when_the_database_is_gone(
    server: str, database: str, tmp_path: Path
) -> None:
    async with make_api(database, tmp_path) as api:
        name = database.partition("?")[0].rpartition("/")[2]
        connection = await asyncpg.connect(server)
        await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await connection.close()
        for _ in range(2):  # the first finds its connection dead, the second finds no database
            answer = await api.client.get("/readyz")
            assert answer.status_code == 503
            assert answer.json()["checks"]["database"]["status"] != "ok"
        assert (await api.client.get("/livez")).status_code == 200


async def test_it_is_not_ready_when_the_database_does_not_answer_in_time(
    shared_database: str, tmp_path: Path
) -> None:
    async with make_api(shared_database, tmp_path, pool_size=2) as api:
        async with api.pool.acquire(), api.pool.acquire():  # as a frozen server would hold them
            began = time.monotonic()
            answer = await api.client.get("/readyz")
            assert time.monotonic() - began < 5
        assert answer.status_code == 503
        assert (await api.client.get("/readyz")).status_code == 200


async def test_it_is_not_ready_on_an_older_schema(database: str, tmp_path: Path) -> None:
    async with make_api(database, tmp_path) as api:
        async with db.acquire(api.pool) as connection:
            await connection.execute("UPDATE schema_migrations SET version = version - 1000")
        answer = await api.client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["checks"]["database"]["status"] == "MigrationError"


class Refusing:
    """A storage that refuses our credentials, or with `seconds` does not answer for so long."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.asked = 0
        self._seconds = seconds

    async def stat(self, _key: str) -> None:
        self.asked += 1
        await asyncio.sleep(self._seconds)
        raise Failure(Code.STORAGE_AUTH)


async def test_the_storage_is_asked_now_and_then_and_takes_nobody_out_of_service(
    shared_database: str, tmp_path: Path
) -> None:
    async with make_api(shared_database, tmp_path) as api:
        answer = await api.client.get("/readyz")
        assert answer.json()["checks"]["storage"]["status"] == "ok"
        for storage, said in (
            (Refusing(), "storage_auth"),
            (Refusing(seconds=30), "storage_unavailable"),
        ):
            api.app.state.storage_asked_at = float("-inf")
            api.services.storage = storage  # type: ignore[assignment]
            for _ in range(3):
                answer = await api.client.get("/readyz")
                assert (answer.status_code, answer.json()["status"]) == (200, "ok")
                assert answer.json()["checks"]["storage"]["status"] == said
            assert storage.asked == 1


async def test_the_metrics_parse_and_count(database: str, tmp_path: Path) -> None:
    async with make_api(database, tmp_path) as api:
        await api.queued()
        await api.claimed(await api.queued())
        async with db.acquire(api.pool) as connection:
            await installation.register_worker(
                connection, "w1", version="1", slots={"image": 3, "video": 1}, sandbox="strong"
            )
        await api.client.get(f"/v1/media/{ids.encode('med', ids.new())}")
        answer = await api.client.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        families = {f.name: f for f in text_string_to_metric_families(answer.text)}
        jobs = {
            (s.labels["queue"], s.labels["state"]): s.value
            for s in families["media_queue_jobs"].samples
        }
        assert jobs["image", "queued"] == 1
        assert jobs["image", "processing"] == 1
        assert {queue for queue, _ in jobs} == set(QUEUES)
        slots = {s.labels["queue"]: s.value for s in families["media_worker_slots"].samples}
        assert (slots["image"], slots["video"], slots["audio"]) == (3, 1, 0)
        routes = {
            (s.labels["route"], s.labels["status"])
            for s in families["http_server_request_duration_seconds"].samples
        }
        assert ("/v1/media/{media_id}", "404") in routes
        # No id, tenant or address is a label.
        assert api.tenant not in answer.text
        assert "med_" not in answer.text


async def test_odd_requests_do_not_make_new_labels(api: Api) -> None:
    for number in range(3):
        await api.client.get(f"/unheard/{number}")
        await api.client.request(f"VERB{number}", "/v1/media")
    text = (await api.client.get("/metrics")).text
    assert "unheard" not in text
    assert "VERB" not in text


async def test_public_answers_tell_no_settings(api: Api) -> None:
    async with api.stranger() as stranger:
        for path in ("/livez", "/readyz", "/metrics"):
            text = (await stranger.get(path)).text
            assert "postgres" not in text
            assert str(api.store.root) not in text

"""Every create takes an Idempotency-Key and is done once, however many repeats come at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.api.conftest import Api, check_problem, make_api
from tests.sink import LOCAL

from mediamill import db

pytestmark = pytest.mark.anyio

REPEATS = 50
Sent = tuple[str, dict[str, Any]]


@pytest.fixture
async def api(shared_database: str, tmp_path: Path) -> AsyncIterator[Api]:
    async with make_api(shared_database, tmp_path, egress_allow_networks=LOCAL) as made:
        yield made


async def slot(_: Api) -> Sent:
    return "/v1/media", {"json": {"size": 5, "content_type": "image/png"}}


async def form(_: Api) -> Sent:
    return "/v1/media", {"files": {"file": ("p.png", b"bytes", "image/png")}}


async def multipart(_: Api) -> Sent:
    return "/v1/uploads/multipart", {"json": {"size": 5, "content_type": "image/png"}}


async def tus(_: Api) -> Sent:
    return "/v1/uploads", {"headers": {"Tus-Resumable": "1.0.0", "Upload-Length": "5"}}


async def process(api: Api) -> Sent:
    body = await api.ready()
    return f"/v1/media/{body['id']}/process", {"json": {}}


async def job(api: Api) -> Sent:
    async with db.acquire(api.pool) as connection:
        await connection.execute(
            "INSERT INTO kinds (kind, version, queue, max_attempts)"
            " VALUES ('test.once', 1, 'default', 3) ON CONFLICT DO NOTHING"
        )
    return "/v1/jobs", {"json": {"kind": "test.once", "payload": {"n": 1}}}


async def endpoint(_: Api) -> Sent:
    return "/v1/webhook-endpoints", {"json": {"url": "http://127.0.0.1:9/in"}}


async def made_endpoint(api: Api) -> str:
    answer = await api.client.post("/v1/webhook-endpoints", json={"url": "http://127.0.0.1:9/"})
    path: str = answer.json()["links"]["self"]
    return path


async def secret(api: Api) -> Sent:
    return f"{await made_endpoint(api)}/rotate-secret", {"json": {}}


async def testing(api: Api) -> Sent:
    return f"{await made_endpoint(api)}/test", {"json": {}}


CREATES: dict[str, tuple[Callable[[Api], Awaitable[Sent]], str]] = {
    "slot": (slot, "SELECT count(*) FROM media WHERE tenant_id = $1"),
    "form": (form, "SELECT count(*) FROM media WHERE tenant_id = $1"),
    "multipart": (multipart, "SELECT count(*) FROM transfers WHERE tenant_id = $1"),
    "tus": (tus, "SELECT count(*) FROM transfers WHERE tenant_id = $1"),
    "process": (process, "SELECT max(generation) - 1 FROM media WHERE tenant_id = $1"),
    "job": (job, "SELECT count(*) FROM jobs WHERE tenant_id = $1"),
    "endpoint": (endpoint, "SELECT count(*) FROM endpoints WHERE tenant_id = $1"),
    "secret": (secret, "SELECT max(version) - 1 FROM endpoint_secrets WHERE tenant_id = $1"),
    "test": (testing, "SELECT count(*) FROM deliveries WHERE tenant_id = $1"),
}


@pytest.mark.parametrize("name", CREATES)
async def test_fifty_at_once_do_it_once(api: Api, name: str) -> None:
    prepare, counted = CREATES[name]
    path, sent = await prepare(api)
    headers = {"Idempotency-Key": f'"{name}-1"', **sent.pop("headers", {})}
    answers = await asyncio.gather(
        *(api.client.post(path, headers=headers, **sent) for _ in range(REPEATS))
    )
    done = [a for a in answers if a.status_code < 300]
    waited = [a for a in answers if a.status_code == 409]  # asked to come back in a second
    assert len(done) + len(waited) == REPEATS
    assert done
    assert all(a.json()["code"] == "idempotency_in_flight" for a in waited)
    assert len({(a.status_code, a.text) for a in done}) == 1
    assert sum("idempotent-replayed" not in a.headers for a in done) == 1
    async with db.acquire(api.pool) as connection:
        assert await connection.fetchval(counted, api.tenant) == 1
    # Later, too; and another request under the key is refused.
    again = await api.client.post(path, headers=headers, **sent)
    assert again.headers["idempotent-replayed"] == "true"
    assert again.text == done[0].text
    assert again.headers.get("location") == done[0].headers.get("location")
    if name in ("slot", "multipart", "job", "endpoint"):
        other = {"json": sent["json"] | {"schema_version": 1}}
        refused = await api.client.post(path, headers=headers, **other)
        check_problem(refused, 422, "idempotency_key_reused")


async def test_every_create_of_the_document_is_here(api: Api) -> None:
    """A route that makes something is in the list above, or says why it is not."""
    harmless = {
        "/v1/media/{media_id}/complete": "the state decides: a repeat finds it accepted",
        "/v1/uploads/{upload_id}/parts": "makes nothing",
        "/v1/uploads/{upload_id}/complete": "the state decides: a repeat finds it complete",
        "/v1/uploads/{upload_id}/abort": "the state decides",
        "/v1/upload-tokens": "makes nothing",
        "/v1/recipes/validate": "makes nothing",
        "/v1/recipes/dry-run": "makes nothing",
        "/v1/jobs/{job_id}/cancel": "the state decides",
        "/v1/jobs/{job_id}/replay": "the state decides: only a failed job",
        "/v1/jobs/cancel": "the state decides",
        "/v1/jobs/replay": "the state decides: only failed jobs",
        "/v1/dead-letters/replay": "a repeat goes on where the first one ended",
        "/v1/dead-letters/{job_id}/discard": "the state decides",
        "/v1/queues/{queue}/pause": "sets",
        "/v1/queues/{queue}/resume": "sets",
        "/v1/workers/{worker}/drain": "sets",
        "/v1/stream-urls": "makes nothing",
        "/v1/webhook-endpoints/{endpoint_id}/recover": "what was sent again is not sent twice",
        "/v1/deliveries/{delivery_id}/redeliver": "the receiver knows the id",
        "/v1/keys": "a kept answer would hold the key",
        "/v1/storage-checks": "removes what it makes",
        "/v1/inbox": "a receiver of webhooks knows the id",
    }
    here = {
        "/v1/media",
        "/v1/media/{media_id}/process",
        "/v1/uploads/multipart",
        "/v1/jobs",
        "/v1/webhook-endpoints",
        "/v1/webhook-endpoints/{endpoint_id}/rotate-secret",
        "/v1/webhook-endpoints/{endpoint_id}/test",
    }
    posts = {path for path, methods in api.app.openapi()["paths"].items() if "post" in methods}
    assert posts == here | set(harmless)

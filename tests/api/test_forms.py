"""Slots by a form with a length range: on a bucket that holds forms to it, and nowhere else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.api.conftest import Api, Body, check_problem, make_api, media_uuid
from tests.storage.google import Google, google
from tests.storage.seaweed import Seaweed, bucket_name
from tests.storage.test_inspection import Careless, careless_server

from mediamill import db, ids
from mediamill.maintenance import Maintenance
from mediamill.storage import gcs, s3
from mediamill.storage.bucket import Bucket

pytestmark = pytest.mark.anyio

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Google]:
    with google(tmp_path_factory.mktemp("google")) as running:
        yield running


@pytest.fixture(params=["s3", "gcs"])
async def api(
    request: pytest.FixtureRequest, shared_database: str, tmp_path: Path
) -> AsyncIterator[Api]:
    """An API on a bucket that holds forms to their length."""
    store: Bucket
    if request.param == "s3":
        server: Seaweed = request.getfixturevalue("s3_server")
        given = server.settings(bucket_name())
    else:
        played: Google = request.getfixturevalue("played")
        given = played.settings(played.new_bucket())
    async with make_api(shared_database, tmp_path, **given) as made:
        settings = made.services.settings
        if request.param == "s3":
            wire = s3.Wire(s3.place(settings))
            await wire.send("PUT", "")
            await wire.close()
            store = await s3.open_s3(s3.place(settings), ids.new())
        else:
            store = await gcs.open_gcs(gcs.place(settings), ids.new())
        made.services.use(store)
        yield made
        await store.close()


async def form(api: Api, **more: Any) -> Body:
    wanted = {"max_size": len(PNG), "content_type": "image/png", "filename": "a.png", **more}
    answer = await api.client.post("/v1/media", json=wanted)
    assert answer.status_code == 201, answer.text
    body: Body = answer.json()
    return body


async def send(slot: Body, data: bytes, **changes: str) -> int:
    upload = slot["upload"]
    async with httpx.AsyncClient() as stranger:
        answer = await stranger.request(
            upload["method"],
            upload["url"],
            data={**upload["fields"], **changes},
            files={"file": ("any.bin", data)},
        )
    return answer.status_code


async def test_a_form_takes_what_is_in_its_range_and_nothing_else(api: Api) -> None:
    slot = await form(api)
    assert (slot["state"], slot["size"], slot["upload"]["method"]) == ("awaiting_upload", 0, "POST")
    complete = f"/v1/media/{slot['id']}/complete"
    check_problem(await api.client.post(complete), 409, "source_missing")
    assert 400 <= await send(slot, PNG + b"x") < 500
    assert 400 <= await send(slot, b"") < 500
    other = slot["upload"]["fields"]["key"].replace("original", "other")
    assert await send(slot, PNG, key=other) == 403
    assert await send(slot, PNG, **{"Content-Type": "text/html"}) == 403
    check_problem(await api.client.post(complete), 409, "source_missing")
    assert await send(slot, PNG[:-5]) == 204
    body = (await api.client.post(complete)).json()
    assert (body["state"], body["size"]) == ("queued", len(PNG) - 5)
    again = await api.client.post(complete)
    assert again.status_code == 202
    assert await api.pool.fetchval(
        "SELECT count(*) FROM jobs WHERE media_id = $1", media_uuid(slot)
    ) == 1  # fmt: skip


async def test_the_reconciler_accepts_what_a_form_brought(api: Api) -> None:
    there, absent = await form(api), await form(api)
    assert await send(there, PNG) == 204
    await api.pool.execute(
        "UPDATE media SET upload_expires_at = now() - interval '1 hour' WHERE id = ANY($1)",
        [media_uuid(there), media_uuid(absent)],
    )
    maintenance = Maintenance(api.services.settings, api.pool, api.services.storage)
    async with db.acquire(api.pool) as connection:
        await maintenance.close_slots(connection)
    body = await api.read(there["id"])
    assert (body["state"], body["size"]) == ("queued", len(PNG))
    assert (await api.read(absent["id"]))["state"] == "expired"


async def test_what_was_stored_past_the_range_is_not_accepted(api: Api) -> None:
    """As by a bucket that was exchanged for one that looks at nothing."""
    slot = await form(api)
    key = slot["upload"]["fields"]["key"]
    store = api.services.storage
    assert isinstance(store, Bucket)
    await store.put_small(key, PNG + b"too long")
    problem = check_problem(
        await api.client.post(f"/v1/media/{slot['id']}/complete"), 409, "size_mismatch"
    )
    assert problem["limit"] == {
        "name": "size", "allowed": len(PNG), "seen": len(PNG) + 8, "unit": "bytes"
    }  # fmt: skip


async def test_a_form_is_refused_for_what_a_slot_is_refused_for(api: Api) -> None:
    for wanted, status, pointer in (
        ({"max_size": 0}, 422, "/max_size"),
        ({"max_size": 10, "size": 10}, 422, "/size"),
        ({"max_size": 1 << 50, "content_type": "image/png"}, 413, "/max_size"),
        ({"max_size": 10, "recipe": "none"}, 422, "/recipe"),
    ):
        answer = await api.client.post("/v1/media", json=wanted)
        assert answer.status_code == status, answer.text
        assert pointer in [error["pointer"] for error in answer.json()["errors"]]


async def test_repeats_get_the_same_form(api: Api) -> None:
    headers = {"Idempotency-Key": "once"}
    wanted = {"max_size": 10, "content_type": "image/png"}
    first, second = [
        (await api.client.post("/v1/media", json=wanted, headers=headers)).json() for _ in range(2)
    ]
    assert first == second


async def test_a_local_disk_offers_none(shared_database: str, tmp_path: Path) -> None:
    async with make_api(shared_database, tmp_path) as api:
        answer = await api.client.post("/v1/media", json={"max_size": 10})
        problem = check_problem(answer, 422, "invalid_request")
        assert problem["errors"] == [
            {"pointer": "/max_size", "detail": "is not offered here; send size"}
        ]
        assert (await api.client.get("/v1/media")).json()["data"] == []


async def test_a_bucket_that_looks_at_no_length_offers_none(
    shared_database: str, tmp_path: Path
) -> None:
    with careless_server(Careless) as (endpoint, objects):
        given: dict[str, Any] = {
            "storage": "s3",
            "s3_bucket": "b",
            "s3_endpoint": endpoint,
            "s3_access_key_id": "a",
            "s3_secret_access_key": "b",
        }
        async with make_api(shared_database, tmp_path, **given) as api:
            wire = s3.Wire(s3.place(api.services.settings))
            abilities = s3.Abilities(conditional_put=False, versioned=False)
            api.services.use(s3.S3Storage(wire, s3.data_plane(wire), abilities))
            for _ in range(2):
                answer = await api.client.post("/v1/media", json={"max_size": 10})
                check_problem(answer, 422, "invalid_request")
            await wire.close()
        assert objects == {}

"""/v1/webhook-endpoints and /v1/deliveries over HTTP."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from standardwebhooks.webhooks import Webhook
from tests import rows
from tests.api.conftest import Api, Body, check_problem, make_api
from tests.sink import LOCAL, answering, listening, saying

from mediamill import db, ids, sealing
from mediamill.webhooks import Courier

pytestmark = pytest.mark.anyio

PATH = "/v1/webhook-endpoints"


@pytest.fixture
async def api(shared_database: str, tmp_path: Path) -> AsyncIterator[Api]:
    """An API that may call this machine."""
    async with make_api(shared_database, tmp_path, egress_allow_networks=LOCAL) as made:
        yield made


@pytest.fixture
def client(api: Api) -> httpx.AsyncClient:
    return api.client


@pytest.fixture
async def courier(api: Api) -> Courier:
    return Courier(api.services.settings, api.pool, name="courier", slots=8)


async def deliver(courier: Courier) -> None:
    while await courier.once():
        await courier.settle()


async def made(client: httpx.AsyncClient, url: str, **more: Any) -> Body:
    answer = await client.post(PATH, json={"url": url, **more})
    assert answer.status_code == 201, answer.text
    body: Body = answer.json()
    assert answer.headers["location"] == body["links"]["self"]
    assert answer.headers["cache-control"] == "no-store"
    return body


async def test_a_secret_is_kept_nowhere_in_plain_and_told_again_to_the_same_request(
    shared_database: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"egress_allow_networks": LOCAL, "secrets_key": sealing.new_key()}
    async with make_api(shared_database, tmp_path, **options) as api:
        given = {"url": "http://127.0.0.1:9/in"}
        headers = {"Idempotency-Key": "once"}
        first = await api.client.post(PATH, json=given, headers=headers)
        again = await api.client.post(PATH, json=given, headers=headers)
        assert again.headers["idempotent-replayed"] == "true"
        secrets = [first.json()["secret"]]
        assert again.json() == first.json()
        path = f"{first.json()['links']['self']}/rotate-secret"
        rotated = await api.client.post(path, json={}, headers={"Idempotency-Key": "turn"})
        again = await api.client.post(path, json={}, headers={"Idempotency-Key": "turn"})
        assert again.json()["secret"] == rotated.json()["secret"] != secrets[0]
        secrets.append(rotated.json()["secret"])
        for secret in secrets:
            raw = base64.b64decode(secret.removeprefix("whsec_"))
            for table in ("endpoint_secrets", "idempotency"):
                async with db.acquire(api.pool) as connection:
                    kept = await connection.fetch(f"SELECT t::text AS row FROM {table} AS t")
                assert kept
                for row in kept:
                    assert secret not in row["row"]
                    assert raw.hex() not in row["row"]
                    assert base64.b64encode(secret.encode()).decode() not in row["row"]


async def test_an_endpoint_is_made_read_changed_and_deleted(client: httpx.AsyncClient) -> None:
    body = await made(client, "http://127.0.0.1:9/in", types=["media.*"], description="shop")
    assert body["secret"].startswith("whsec_")
    path = body["links"]["self"]
    answer = await client.get(path)
    shown = answer.json()
    assert "secret" not in shown
    assert shown["state"] == "enabled"
    changed = {"types": ["media.ready"], "payload": "thin", "description": None}
    check_problem(await client.patch(path, json=changed), 428, "precondition_required")
    stale = {"If-Match": 'W/"999"'}
    check_problem(await client.patch(path, json=changed, headers=stale), 412, "precondition_failed")
    tag = {"If-Match": answer.headers["etag"]}
    answer = await client.patch(path, json=changed, headers=tag)
    assert answer.status_code == 200
    assert answer.json()["types"] == ["media.ready"]
    assert answer.json()["description"] is None
    check_problem(await client.patch(path, json={}, headers=tag), 412, "precondition_failed")
    listed = (await client.get(PATH)).json()["data"]
    assert [e["id"] for e in listed] == [body["id"]]
    tag = {"If-Match": answer.headers["etag"]}
    assert (await client.delete(path, headers=tag)).status_code == 204
    check_problem(await client.get(path), 404, "not_found")
    assert (await client.get(PATH)).json()["data"] == []


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://10.0.0.1/",
        "https://user:pass@127.0.0.1/",
        "file:///etc/passwd",
        "https://does-not-exist.invalid/",
        "nonsense",
        "http://[fd00:ec2::254]/",
    ],
)
async def test_a_closed_address_is_refused_when_made_and_when_changed(
    client: httpx.AsyncClient, url: str
) -> None:
    body = check_problem(await client.post(PATH, json={"url": url}), 422, "source_not_allowed")
    assert body["errors"][0]["pointer"] == "/url"
    endpoint = await made(client, "http://127.0.0.1:9/in")
    path = endpoint["links"]["self"]
    tag = {"If-Match": (await client.get(path)).headers["etag"]}
    answer = await client.patch(path, json={"url": url}, headers=tag)
    check_problem(answer, 422, "source_not_allowed")


@pytest.mark.parametrize(
    ("more", "pointer"),
    [
        ({"types": ["media.unknown"]}, "/types/0"),
        ({"types": []}, "/types"),
        ({"payload": "huge"}, "/payload"),
        ({"payload_version": 2}, "/payload_version"),
        ({"signing": "md5"}, "/signing"),
        ({"secret": "whsec_eA=="}, "/secret"),
        ({"description": "\0"}, "/description"),
        ({"colour": "red"}, "/colour"),
    ],
)
async def test_each_fault_is_named(client: httpx.AsyncClient, more: Body, pointer: str) -> None:
    answer = await client.post(PATH, json={"url": "http://127.0.0.1:9/", **more})
    body = check_problem(answer, 422, "invalid_request")
    assert [e["pointer"] for e in body["errors"]] == [pointer]


async def test_fifty_repeats_of_one_key_make_one_endpoint(client: httpx.AsyncClient) -> None:
    wanted, key = {"url": "http://127.0.0.1:9/in"}, {"Idempotency-Key": "one"}
    answers = await asyncio.gather(
        *(client.post(PATH, json=wanted, headers=key) for _ in range(50))
    )
    assert {a.status_code for a in answers} == {201}
    assert len({a.json()["id"] for a in answers}) == 1
    assert len({a.json()["secret"] for a in answers}) == 1
    assert sum("idempotent-replayed" not in a.headers for a in answers) == 1
    assert len((await client.get(PATH)).json()["data"]) == 1


async def test_the_test_event_arrives_and_its_delivery_says_how(
    client: httpx.AsyncClient, courier: Courier
) -> None:
    async with listening() as sink, listening() as other:
        body = await made(client, sink.url, types=["media.ready"])
        await made(client, other.url)
        answer = await client.post(f"{body['links']['self']}/test")
        assert answer.status_code == 202
        await deliver(courier)
        headers, raw = sink.parsed()
        told = Webhook(body["secret"]).verify(raw, headers)
        assert told["type"] == "webhook.test"
        assert told["data"]["endpoint"] == body["id"]
        assert other.connections == 0
        shown = (await client.get(answer.headers["location"])).json()
        assert shown["state"] == "delivered"
        assert shown["body"] == raw.decode()
        assert shown["event_id"] == headers["webhook-id"]
        (attempt,) = shown["attempts"]
        assert attempt["status"] == 200
        assert attempt["response"] == "hello"
        assert "address" not in attempt["timings"]
        listed = (await client.get(f"{body['links']['deliveries']}?state=delivered")).json()
        assert [d["id"] for d in listed["data"]] == [shown["id"]]
        # Once more, by hand.
        again = await client.post(f"/v1/deliveries/{shown['id']}/redeliver")
        assert again.status_code == 202
        await deliver(courier)
        assert sink.parsed()[0]["webhook-id"] == headers["webhook-id"]
        assert sink.parsed()[1] == raw
        assert len(sink.requests) == 2


async def test_an_attempt_that_was_answered_with_nothing_can_be_read(
    client: httpx.AsyncClient, courier: Courier
) -> None:
    async with listening(saying(b"HTTP/1.1 204 No Content\r\n\r\n")) as sink:
        body = await made(client, sink.url)
        answer = await client.post(f"{body['links']['self']}/test")
        await deliver(courier)
        shown = await client.get(answer.headers["location"])
        assert shown.status_code == 200
        assert [(a["status"], a["response"]) for a in shown.json()["attempts"]] == [(204, "")]


async def test_rotation_answers_with_the_new_secret_and_when_the_old_one_ends(
    client: httpx.AsyncClient, courier: Courier
) -> None:
    async with listening() as sink:
        body = await made(client, sink.url)
        path = body["links"]["self"]
        answer = await client.post(f"{path}/rotate-secret", json={"overlap_seconds": 60})
        rotated = answer.json()
        assert rotated["secret"] != body["secret"]
        assert rotated["old_secret_until"] is not None
        await client.post(f"{path}/test")
        await deliver(courier)
        headers, raw = sink.parsed()
        for secret in (body["secret"], rotated["secret"]):
            Webhook(secret).verify(raw, headers)
        own = f"whsec_{base64.b64encode(b'k' * 32).decode()}"
        answer = await client.post(
            f"{path}/rotate-secret", json={"overlap_seconds": 0, "secret": own}
        )
        assert answer.json()["secret"] == own
        await client.post(f"{path}/test")
        await deliver(courier)
        assert len(sink.parsed()[0]["webhook-signature"].split()) == 1
        Webhook(own).verify(sink.parsed()[1], sink.parsed()[0])


async def test_what_happened_while_off_can_be_recovered(
    api: Api, client: httpx.AsyncClient, courier: Courier
) -> None:
    async with listening(answering(410, 200)) as sink:
        body = await made(client, sink.url, types=["media.uploaded"])
        path = body["links"]["self"]
        await api.queued()
        await deliver(courier)
        answer = await client.get(path)
        assert answer.json()["state"] == "disabled"
        assert "410" in answer.json()["reason"]
        check_problem(await client.post(f"{path}/test"), 409, "wrong_state")
        recover = {"since": (datetime.now(UTC) - timedelta(hours=1)).isoformat()}
        check_problem(await client.post(f"{path}/recover", json=recover), 409, "wrong_state")
        await api.queued()
        tag = {"If-Match": answer.headers["etag"]}
        answer = await client.patch(path, json={"state": "enabled"}, headers=tag)
        assert answer.json()["reason"] is None
        answer = await client.post(f"{path}/recover", json=recover)
        assert (answer.status_code, answer.json()["recovered"]) == (202, 2)
        await deliver(courier)
        told = sink.events()[-2:]
        assert len({e["data"]["media_id"] for e in told}) == 2
        assert len({e["id"] for e in told}) == 2


async def test_an_endpoint_that_is_deleted_gets_nothing_more(
    api: Api, client: httpx.AsyncClient, courier: Courier
) -> None:
    async with listening() as sink:
        body = await made(client, sink.url)
        await api.slot()
        await api.queued()
        path = body["links"]["self"]
        tag = {"If-Match": (await client.get(path)).headers["etag"]}
        await client.delete(path, headers=tag)
        await deliver(courier)
        assert sink.connections == 0


async def test_a_callback_goes_to_registered_origins_only(
    api: Api, client: httpx.AsyncClient, courier: Courier
) -> None:
    async with listening() as sink:
        wanted = {"size": 5, "content_type": "image/png", "callback_url": f"{sink.url}/mine"}
        answer = await client.post("/v1/media", json=wanted)
        body = check_problem(answer, 422, "source_not_allowed")
        assert body["errors"][0]["pointer"] == "/callback_url"
        assert (await client.get("/v1/media")).json()["data"] == []  # nothing was left behind
        endpoint = await made(client, sink.url, types=["job.failed"])
        queued = await api.queued(callback_url=f"{sink.url}/mine")
        await api.queued()  # without one
        await deliver(courier)
        lines = [raw.split(b"\r\n")[0] for raw in sink.requests]
        assert set(lines) == {b"POST /in/mine HTTP/1.1"}
        assert {e["type"] for e in sink.events()} == {"media.uploaded", "media.queued"}
        assert {e["data"]["media_id"] for e in sink.events()} == {queued["id"]}
        headers, raw = sink.parsed()
        Webhook(endpoint["secret"]).verify(raw, headers)


async def test_processing_again_takes_a_callback_of_its_own(
    api: Api, client: httpx.AsyncClient, courier: Courier
) -> None:
    async with listening() as sink:
        await made(client, sink.url, types=["endpoint.disabled"])
        first = await api.ready(callback_url=f"{sink.url}/first")
        await deliver(courier)
        sink.requests.clear()
        path = f"/v1/media/{first['id']}/process"
        answer = await client.post(path, json={"callback_url": "http://127.0.0.1:9/in"})
        body = check_problem(answer, 422, "source_not_allowed")
        assert body["errors"][0]["pointer"] == "/callback_url"
        assert (await api.read(first["id"]))["state"] == "ready"
        again = {"callback_url": f"{sink.url}/second"}
        answer = await client.post(path, json=again)
        assert answer.status_code == 202
        await deliver(courier)
        assert [raw.split(b"\r\n")[0] for raw in sink.requests] == [b"POST /in/second HTTP/1.1"]
        assert [e["type"] for e in sink.events()] == ["media.queued"]
        # Not while it is at work; and that changes nothing about who is told.
        busy = {"callback_url": f"{sink.url}/third"}
        check_problem(await client.post(path, json=busy), 409, "wrong_state")
        held = await api.claimed(answer.json())
        async with db.acquire(api.pool) as connection:
            await rows.publish(connection, api.store, held, {"w8.webp": b"0123456789"})
        await deliver(courier)
        assert {raw.split(b"\r\n")[0] for raw in sink.requests} == {b"POST /in/second HTTP/1.1"}
        assert "media.ready" in {e["type"] for e in sink.events()}


async def test_another_tenant_sees_and_moves_nothing(
    api: Api, client: httpx.AsyncClient, other: httpx.AsyncClient
) -> None:
    body = await made(client, "http://127.0.0.1:9/in")
    path = body["links"]["self"]
    test = (await client.post(f"{path}/test")).json()
    delivery = f"/v1/deliveries/{test['id']}"
    since = {"since": "2020-01-01T00:00:00Z"}
    for answer in (
        await other.get(path),
        await other.patch(path, json={}, headers={"If-Match": "*"}),
        await other.delete(path, headers={"If-Match": "*"}),
        await other.post(f"{path}/rotate-secret", json={}),
        await other.post(f"{path}/test"),
        await other.post(f"{path}/recover", json=since),
        await other.get(f"{path}/deliveries"),
        await other.get(delivery),
        await other.post(f"{delivery}/redeliver"),
    ):
        check_problem(answer, 404, "not_found")
    assert (await other.get(PATH)).json()["data"] == []


async def test_scopes_are_asked_for(api: Api) -> None:
    token = await api.new_key(api.tenant, "media:read")
    async with api.stranger(token) as reader:
        check_problem(await reader.get(PATH), 403, "missing_scope")
        path = f"/v1/deliveries/{ids.encode(ids.DELIVERY, ids.new())}"
        check_problem(await reader.get(path), 403, "missing_scope")


async def test_unknown_parameters_and_bodies_are_refused(client: httpx.AsyncClient) -> None:
    check_problem(await client.get(f"{PATH}?stat=x"), 400, "unknown_parameter")
    body = await made(client, "http://127.0.0.1:9/in")
    deliveries = body["links"]["deliveries"]
    check_problem(await client.get(f"{deliveries}?state=gone"), 400, "unknown_parameter")
    answer = await client.post(f"{body['links']['self']}/recover", json={"since": "yesterday"})
    check_problem(answer, 422, "invalid_request")

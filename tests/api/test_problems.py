"""What is wrong with a request is told in one shape (RFC 9457), and never as a 500."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests import rows
from tests.api.conftest import Api, Body, check_problem, make_api

from mediamill import db, ids, keys, webhooks
from mediamill.failures import Code
from mediamill.keys import Keychain
from mediamill.sealing import Vault

pytestmark = pytest.mark.anyio


async def post(api: Api, content: Any, content_type: str = "application/json") -> httpx.Response:
    return await api.client.post(
        "/v1/media", content=content, headers={"Content-Type": content_type}
    )


async def test_every_fault_of_a_body_is_named_with_its_pointer(api: Api) -> None:
    body = {
        "size": -1,
        "content_type": 7,
        "sha256": "XYZ",
        "ttl_seconds": 0,
        "metadata": {"a/b~c": [1], "fine": 1},
        "nonsense": True,
        "schema_version": 2,
    }
    problem = check_problem(await api.client.post("/v1/media", json=body), 422, "invalid_request")
    assert {e["pointer"] for e in problem["errors"]} == {
        "/size",
        "/content_type",
        "/sha256",
        "/ttl_seconds",
        "/metadata/a~1b~0c",
        "/nonsense",
        "/schema_version",
    }
    assert len(problem["errors"]) == 7  # one for each fault, and no more
    for error in problem["errors"]:
        assert error["code"]
        assert error["detail"]


async def test_a_missing_field_and_a_body_of_another_type_are_told(api: Api) -> None:
    problem = check_problem(await api.client.post("/v1/media", json={}), 422, "invalid_request")
    assert [e["pointer"] for e in problem["errors"]] == ["/size"]
    for body in (b"null", b"[]", b'"x"', b"5"):
        problem = check_problem(await post(api, body), 422, "invalid_request")
        assert [e["pointer"] for e in problem["errors"]] == [""]  # the whole document


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{'size': 1}",
        b'{"size": 1,}',
        b"\xff\xfe",
        b'{"size": 1, "filename": "\xff"}',
        b'{"size": 1, "filename": "\\ud800"}',
        b'{"size": 1, "metadata": {"\\ud800": 1}}',
        b"[" * 100_000,
        b'{"size":' * 5_000 + b"1" + b"}" * 5_000,
        b'{"size": 1} trailing',
    ],
    ids=lambda c: ascii(c)[:24],
)
async def test_a_body_that_is_not_json_is_a_400(api: Api, content: bytes) -> None:
    check_problem(await post(api, content), 400, "malformed_request")


@pytest.mark.parametrize(
    "content",
    [
        b'{"size": NaN}',
        b'{"size": Infinity}',
        b'{"size": 1e400}',
        b'{"size": 1.0}',
        b'{"size": "1"}',
        b'{"size": true}',
        b'{"size": 9007199254740993}',
        b'{"size": 1, "ttl_seconds": NaN}',
        b'{"size": 1, "ttl_seconds": Infinity}',
        b'{"size": 1, "metadata": {"a": NaN}}',
        b'{"size": 1, "metadata": {"a": -Infinity}}',
        b'{"size": 1, "metadata": {"a": 1e999}}',
        b'{"size": 1, "metadata": {"a": "\\u0000"}}',
        b'{"size": 1, "metadata": {"\\u0000": 1}}',
        b'{"size": 1, "metadata": {"a": {"b": 1}}}',
        b'{"size": 1, "metadata": {"%s": 1}}' % (b"k" * 65),
        b'{"size": 1, "recipe": "\\u0000"}',
        b'{"size": 1, "recipe": "../web"}',
        b'{"size": 1, "content_type": "image"}',
        b'{"size": 1, "content_type": "image/png\\r\\nX: y"}',
        b'{"size": 1, "content_type": "\\u0000/x"}',
        b'{"size": 1, "content_type": "image/%s"}' % (b"x" * 200),
        b'{"size": 0}',
    ],
    ids=lambda c: ascii(c)[:40],
)
async def test_a_body_that_is_json_but_not_valid_is_a_422(api: Api, content: bytes) -> None:
    answer = await post(api, content)
    assert answer.status_code == 422, answer.text
    problem = check_problem(answer, 422, answer.json()["code"])
    assert problem["code"] in ("invalid_request", "empty_input")
    assert problem["errors"]


@pytest.mark.parametrize(
    "content",
    [
        b'{"size": 1, "size": 2}',
        b'{"size": 1, "metadata": {"a": 1, "a": 2}}',
        b'{"size": 1, "metadata": {"a": 1e308, "b": -0.0, "c": 123456789012345678901234567890}}',
        b'{"size": 1, "metadata": {"a": 1%s}}' % (b"0" * 4000),
        b'{"size": 1, "metadata": {"a": 1%s}}' % (b"0" * 5000),
        b'\xef\xbb\xbf{"size": 1}',
        b' \n{"size": 1}\n ',
    ],
    ids=lambda c: ascii(c)[:40],
)
async def test_odd_json_is_answered_one_way_or_the_other(api: Api, content: bytes) -> None:
    answer = await post(api, content)
    assert answer.status_code in (201, 400, 422)
    if answer.status_code == 201:
        read = await api.client.get(answer.headers["location"])
        assert read.status_code == 200
        assert read.json()["metadata"] == answer.json()["metadata"]


async def test_a_body_of_more_than_a_mebibyte_is_a_413(api: Api) -> None:
    mebibyte = 1 << 20
    start = b'{"size": 5}'
    assert (await post(api, start + b" " * (mebibyte - len(start)))).status_code == 201
    check_problem(await post(api, start + b" " * mebibyte), 413, "payload_too_large")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 65536

    check_problem(await post(api, chunks()), 413, "payload_too_large")
    ready = await api.ready()
    answer = await api.client.post(
        f"/v1/media/{ready['id']}/process",
        content=b"{}" + b" " * mebibyte,
        headers={"Content-Type": "application/json"},
    )
    check_problem(answer, 413, "payload_too_large")


@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonx", "json"],
)
async def test_another_content_type_is_a_415(api: Api, content_type: str) -> None:
    check_problem(await post(api, b'{"size": 5}', content_type), 415, "unsupported_media_type")


async def test_a_content_type_may_carry_parameters(api: Api) -> None:
    answer = await post(api, b'{"size": 5}', "Application/JSON; charset=utf-8")
    assert answer.status_code == 201


async def test_a_file_that_is_too_large_is_refused_with_what_is_allowed(
    shared_database: str, tmp_path: Path
) -> None:
    async with make_api(shared_database, tmp_path, max_image_bytes=100, max_video_bytes=200) as api:
        for content_type, most in (("image/png", 100), ("video/mp4", 200), (None, 200)):
            body = {"size": most, "content_type": content_type}
            assert (await api.client.post("/v1/media", json=body)).status_code == 201
            problem = check_problem(
                await api.client.post("/v1/media", json=body | {"size": most + 1}),
                413,
                "payload_too_large",
            )
            assert problem["errors"][0]["pointer"] == "/size"
            assert problem["limit"] == {
                "name": "size",
                "allowed": most,
                "seen": most + 1,
                "unit": "bytes",
            }


async def operations(api: Api) -> list[tuple[str, str]]:
    return [
        (method.upper(), path)
        for path, methods in api.app.openapi()["paths"].items()
        for method in methods
        if (method, path) != ("post", "/v1/inbox")  # open to anybody who sends webhooks
    ]


BODIES: dict[str, Body] = {
    "PATCH": {},
    "process": {},
    "complete": {},
    "rotate-secret": {},
    "recover": {"since": "2026-01-01T00:00:00Z"},
}


async def endpoint(api: Api) -> tuple[str, str]:
    """A webhook endpoint of the tenant, and a delivery for it."""
    async with db.transaction(api.pool) as connection:
        wanted = webhooks.Wanted("http://127.0.0.1:9/")
        row, _ = await webhooks.add(
            connection, api.tenant, wanted, origin="-", most=10, vault=Vault()
        )
        delivery_id = await webhooks.test(connection, row)
    return ids.encode(ids.ENDPOINT, row["id"]), ids.encode(ids.DELIVERY, delivery_id)


async def test_other_tenants_ids_answer_404_on_every_route(
    api: Api, other: httpx.AsyncClient
) -> None:
    """A foreign id is as unknown as one that does not exist, with the very same words."""
    ready = await api.ready()
    queued = await api.queued()
    failed = await api.queued()
    missing = {prefix: ids.encode(prefix, ids.new()) for prefix in ("med", "job", "ep", "del")}
    endpoint_id, delivery_id = await endpoint(api)
    tried = 0
    for method, template in await operations(api):
        if "{" not in template or "{queue}" in template or "{worker}" in template:
            continue  # queues and workers belong to the installation
        for body in (ready, queued, failed):
            found = []
            for media_id, job_id, ep_id, del_id, key_id in (
                (body["id"], body["job"]["id"], endpoint_id, delivery_id, keys.id_of(api.token)),
                (missing["med"], missing["job"], missing["ep"], missing["del"], "missing0"),
            ):
                upload_id = media_id.replace("med_", "upl_")
                path = template.format(
                    language="en",
                    upload_id=upload_id,
                    media_id=media_id,
                    job_id=job_id,
                    endpoint_id=ep_id,
                    delivery_id=del_id,
                    key_id=key_id,
                    name="w8.webp",
                )
                last = path.rpartition("/")[2]
                body_of_it: Body | None = BODIES.get("PATCH" if method == "PATCH" else last)
                answer = await other.request(
                    method, path, json=body_of_it, headers={"If-Match": "*"}
                )
                problem = check_problem(answer, 404, "not_found")
                for name in ("instance", "request_id"):
                    del problem[name]
                assert body["id"] not in answer.text
                assert body["job"]["id"] not in answer.text
                found.append(problem)
            assert found[0] == found[1]
            tried += 1
    assert tried >= 3 * 9
    # Nothing of it had an effect.
    for body in (ready, queued, failed):
        assert await api.read(body["id"]) == body | {
            k: v for k, v in (await api.read(body["id"])).items() if k in ("job", "variants")
        }
    listed = (await other.get("/v1/media")).json()["data"]
    assert listed == []
    page = await api.client.get("/v1/media?limit=1")
    cursor = page.json()["next_cursor"]
    foreign = await other.get(f"/v1/media?cursor={cursor}")
    check_problem(foreign, 400, "unknown_parameter")


async def test_every_route_wants_a_key(api: Api) -> None:
    async with db.acquire(api.pool) as connection:
        expired = await api.new_key(api.tenant, ttl_seconds=-1)
        revoked = await api.new_key(api.tenant)
        key_id = revoked.split("_")[2]
        assert await keys.revoke(connection, api.tenant, key_id)
    good = api.token
    foreign = good[:-1] + ("0" if good[-1] != "0" else "1")  # the checksum is wrong
    headers = [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {good}"},
        {"Authorization": good},
        {"Authorization": f"Bearer {foreign}"},
        {"Authorization": f"Bearer {expired}"},
        {"Authorization": f"Bearer {revoked}"},
        {"Authorization": f"Bearer {good} {good}"},
    ]
    async with api.stranger() as stranger:
        for method, template in await operations(api):
            path = template.format(
                language="en",
                media_id=ids.encode("med", ids.new()),
                job_id=ids.encode("job", ids.new()),
                name="x",
                endpoint_id=ids.encode(ids.ENDPOINT, ids.new()),
                delivery_id=ids.encode(ids.DELIVERY, ids.new()),
                queue="image",
                worker="w",
                key_id="k",
                upload_id=ids.encode("upl", ids.new()),
            )
            for given in headers:
                answer = await stranger.request(method, path, headers=given)
                check_problem(answer, 401, "unauthenticated")
                assert answer.headers["www-authenticate"].startswith("Bearer")
        odd = b"Bearer mpk_live_\xe9\xff" + b"x" * 60
        answer = await stranger.get("/v1/media", headers=[(b"Authorization", odd)])
        check_problem(answer, 401, "unauthenticated")


async def test_the_scheme_is_read_in_any_case(api: Api) -> None:
    async with api.stranger() as stranger:
        answer = await stranger.get("/v1/media", headers={"Authorization": f"bearer {api.token}"})
        assert answer.status_code == 200


async def test_a_revoked_key_is_refused_within_seconds(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_REMEMBER_SECONDS", 0.0)
    api.services.keychain = Keychain(api.pool, api.services.installation.pepper)
    token = await api.new_key(api.tenant)
    async with api.stranger(token) as client:
        assert (await client.get("/v1/media")).status_code == 200
        async with db.acquire(api.pool) as connection:
            assert await keys.revoke(connection, api.tenant, token.split("_")[2])
        check_problem(await client.get("/v1/media"), 401, "unauthenticated")


SCOPES = {
    ("POST", "/v1/media"): "uploads:write",
    ("GET", "/v1/media"): "media:read",
    ("GET", "/v1/media/{media_id}"): "media:read",
    ("DELETE", "/v1/media/{media_id}"): "media:delete",
    ("POST", "/v1/media/{media_id}/complete"): "uploads:write",
    ("POST", "/v1/uploads/multipart"): "uploads:write",
    ("GET", "/v1/uploads/{upload_id}/parts"): "uploads:write",
    ("POST", "/v1/uploads/{upload_id}/parts"): "uploads:write",
    ("POST", "/v1/uploads/{upload_id}/complete"): "uploads:write",
    ("POST", "/v1/uploads/{upload_id}/abort"): "uploads:write",
    ("POST", "/v1/upload-tokens"): "uploads:write",
    ("GET", "/v1/media/{media_id}/timeline"): "media:read",
    ("POST", "/v1/media/{media_id}/process"): "media:write",
    ("GET", "/v1/media/{media_id}/original"): "media:read",
    ("GET", "/v1/media/{media_id}/variants/{name}"): "media:read",
    ("GET", "/v1/media/{media_id}/subtitles"): "media:read",
    ("PUT", "/v1/media/{media_id}/subtitles/{language}"): "uploads:write",
    ("DELETE", "/v1/media/{media_id}/subtitles/{language}"): "uploads:write",
    ("GET", "/v1/recipes"): "media:read",
    ("POST", "/v1/recipes/validate"): "media:read",
    ("POST", "/v1/recipes/dry-run"): "media:read",
    ("GET", "/v1/recipes/{name}"): "media:read",
    ("GET", "/v1/jobs/{job_id}"): "jobs:read",
    ("POST", "/v1/jobs/{job_id}/cancel"): "jobs:write",
    ("POST", "/v1/jobs/{job_id}/replay"): "jobs:write",
    ("POST", "/v1/jobs/cancel"): "jobs:write",
    ("POST", "/v1/jobs/replay"): "jobs:write",
    ("POST", "/v1/jobs"): "jobs:write",
    ("GET", "/v1/jobs"): "jobs:read",
    ("GET", "/v1/jobs/{job_id}/timeline"): "jobs:read",
    ("GET", "/v1/dead-letters"): "dlq:manage",
    ("POST", "/v1/dead-letters/replay"): "dlq:manage",
    ("GET", "/v1/dead-letters/groups"): "dlq:manage",
    ("GET", "/v1/figures"): "jobs:read",
    ("GET", "/v1/dead-letters/{job_id}"): "dlq:manage",
    ("POST", "/v1/dead-letters/{job_id}/discard"): "dlq:manage",
    ("GET", "/v1/media/{media_id}/events"): "media:read",
    ("GET", "/v1/jobs/{job_id}/events"): "jobs:read",
    ("GET", "/v1/events"): "media:read",
    ("POST", "/v1/stream-urls"): "media:read",
    ("POST", "/v1/webhook-endpoints"): "webhooks:manage",
    ("GET", "/v1/webhook-endpoints"): "webhooks:manage",
    ("GET", "/v1/webhook-endpoints/{endpoint_id}"): "webhooks:manage",
    ("PATCH", "/v1/webhook-endpoints/{endpoint_id}"): "webhooks:manage",
    ("DELETE", "/v1/webhook-endpoints/{endpoint_id}"): "webhooks:manage",
    ("POST", "/v1/webhook-endpoints/{endpoint_id}/rotate-secret"): "webhooks:manage",
    ("POST", "/v1/webhook-endpoints/{endpoint_id}/test"): "webhooks:manage",
    ("POST", "/v1/webhook-endpoints/{endpoint_id}/recover"): "webhooks:manage",
    ("GET", "/v1/webhook-endpoints/{endpoint_id}/deliveries"): "deliveries:read",
    ("GET", "/v1/deliveries/{delivery_id}"): "deliveries:read",
    ("POST", "/v1/deliveries/{delivery_id}/redeliver"): "webhooks:manage",
    ("GET", "/v1/inbox"): "webhooks:manage",
    ("GET", "/v1/queues"): "operate",
    ("POST", "/v1/queues/{queue}/pause"): "operate",
    ("POST", "/v1/queues/{queue}/resume"): "operate",
    ("PUT", "/v1/queues/{queue}/concurrency"): "operate",
    ("GET", "/v1/workers"): "operate",
    ("POST", "/v1/workers/{worker}/drain"): "operate",
    ("POST", "/v1/keys"): "admin",
    ("GET", "/v1/keys"): "admin",
    ("DELETE", "/v1/keys/{key_id}"): "admin",
    ("GET", "/v1/settings"): "operate",
    ("POST", "/v1/storage-checks"): "operate",
}
FOR_ANY_KEY = {("GET", "/v1/keys/self")}


async def test_every_route_wants_its_scope(api: Api) -> None:
    found = await operations(api)
    assert set(found) == set(SCOPES) | FOR_ANY_KEY
    ready = await api.ready()
    for operation, scope in SCOPES.items():
        # Not even an admin of a tenant may steer what serves all of them.
        others = [s for s in keys.SCOPES if s != scope and (s != "admin" or scope == "operate")]
        async with api.stranger(await api.new_key(api.tenant, *others)) as client:
            path = operation[1].format(
                language="en",
                media_id=ready["id"],
                job_id=ready["job"]["id"],
                name="w8.webp",
                endpoint_id=ids.encode(ids.ENDPOINT, ids.new()),
                delivery_id=ids.encode(ids.DELIVERY, ids.new()),
                queue="image",
                worker="w",
                key_id="k",
                upload_id=ids.encode("upl", ids.new()),
            )
            answer = await client.request(operation[0], path, json={})
            problem = check_problem(answer, 403, "missing_scope")
            assert scope in problem["detail"]
    async with api.stranger(await api.new_key(api.tenant, "media:read")) as client:
        assert (await client.get(f"/v1/media/{ready['id']}")).status_code == 200


async def test_an_unknown_address_and_method_speak_the_same_language(api: Api) -> None:
    check_problem(await api.client.get("/v1/nothing"), 404, "not_found")
    check_problem(await api.client.get("/"), 404, "not_found")
    media_id = ids.encode("med", ids.new())
    answer = await api.client.patch(f"/v1/media/{media_id}", json={})
    check_problem(answer, 405, "method_not_allowed")
    assert {m.strip() for m in answer.headers["allow"].split(",")} >= {"GET", "DELETE"}
    answer = await api.client.put("/v1/media")
    check_problem(answer, 405, "method_not_allowed")
    assert {m.strip() for m in answer.headers["allow"].split(",")} >= {"GET", "POST"}
    for method in ("PATCH", "DELETE", "HEAD"):  # not the upload of that id
        answer = await api.client.request(method, "/v1/uploads/multipart")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_every_answer_carries_a_request_id_that_the_client_may_choose(api: Api) -> None:
    for given, kept in [
        ("abcdefgh-1", True),
        ("short", False),
        ("x" * 65, False),
        ("has space", False),
        ("new\tline-abc", False),
    ]:
        for path in ("/v1/media", "/v1/nothing", "/livez"):
            answer = await api.client.get(path, headers={"X-Request-Id": given})
            found = answer.headers.get_list("x-request-id")
            assert len(found) == 1
            assert (found[0] == given) == kept


async def test_the_type_of_a_problem_leads_to_a_page(api: Api) -> None:
    async with api.stranger() as stranger:
        for code in Code:
            answer = await stranger.get(f"/problems/{code.code}")
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "text/markdown; charset=utf-8"
            assert code.title in answer.text
            assert code.advice in answer.text
            shown = await stranger.get(
                f"/problems/{code.code}", headers={"Accept": "text/html,*/*;q=0.8"}
            )
            assert shown.headers["content-type"] == "text/html; charset=utf-8"
            assert f"<h1>{code.code}</h1>" in shown.text
            assert "<h2>What to do</h2>" in shown.text
        assert (await stranger.get("/problems/unheard")).status_code == 404


async def test_an_error_of_ours_is_told_without_its_insides(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: str) -> None:
        raise RuntimeError("secret: /var/lib/mediamill SELECT * FROM media")

    monkeypatch.setattr(api.services.keychain, "identify", broken)
    transport = httpx.ASGITransport(app=api.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=rows.PUBLIC_URL) as client:
        answer = await client.get(
            "/v1/media", headers={"Authorization": "Bearer x", "X-Request-Id": "my-request-1"}
        )
    assert "secret" not in answer.text
    problem = check_problem(answer, 500, "internal")
    assert problem["request_id"] == "my-request-1"


async def test_a_lost_database_is_a_503_that_says_when_to_come_back(
    database: str, tmp_path: Path
) -> None:
    async with make_api(database, tmp_path) as api:
        slot = await api.slot()
        async with rows.connected(database) as connection:
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        answer = await api.client.get(f"/v1/media/{slot['id']}")
        if answer.status_code != 200:  # a dead connection may be noticed before it is used
            problem = check_problem(answer, 503, "database_unavailable")
            assert problem["retryable"] is True
            assert int(answer.headers["retry-after"]) >= 1
        assert (await api.client.get(f"/v1/media/{slot['id']}")).status_code == 200


async def test_problem_details_are_json_in_full(api: Api) -> None:
    """No NaN, no lone surrogate and no bytes get into a problem, whatever a client sends."""
    answer = await post(api, b'{"size": NaN, "recipe": "\\u0000\\u2028"}')
    parsed = json.loads(answer.content.decode("utf-8"), parse_constant=pytest.fail)
    assert parsed["status"] == 422


async def test_what_no_row_can_hold_is_unknown_or_refused(api: Api) -> None:
    token = await api.new_key(api.tenant, "admin", "operate")
    async with api.stranger(token) as client:
        for method, path, status in (
            ("DELETE", "/v1/keys/%00", 404),
            ("POST", "/v1/workers/%00/drain", 404),
            ("GET", "/v1/dead-letters?code=%00", 422),
            ("GET", "/v1/jobs?kind=%00", 400),
        ):
            assert (await client.request(method, path)).status_code == status, path
        for field in ("code", "kind", "queue"):
            body = {"filter": {field: "\0"}}
            answer = await client.post("/v1/dead-letters/replay", json=body)
            check_problem(answer, 422, "invalid_request")

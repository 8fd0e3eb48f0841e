"""/v1/media, from the slot to the tombstone."""

from __future__ import annotations

import asyncio
import json
import unicodedata
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests import rows
from tests.api.conftest import Api, check_problem, make_api, media_uuid

from mediamill import db, jobs
from mediamill.api.media import MediaBody, SlotBody
from mediamill.estimates import Forecaster
from mediamill.failures import Code, Problem

pytestmark = pytest.mark.anyio

# Case up-07: names that travel badly in headers, or come in two Unicode forms.
NAMES = [
    "caf\u00e9.jpg",
    "cafe\u0301.jpg",
    "\u65e5\u672c\u8a9e\u30ec\u30dd\u30fc\u30c8.png",
    "\u0438\u0437\u043e\u0431\u0440\u0430\u0436\u0435\u043d\u0438\u0435.jpg",
    "\U0001f600 smile.png",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 family.png",
    "\U0001fae8 newer than this Python.png",
    "a b+c%20d&e=f.jpg",
    'quote"and;semi.jpg',
    "x" * 236 + ".jpg",
    "\u3042" * 240,
    "no_extension",
    ".hidden.jpg",
    "two.dots.tar.jpg",
    None,
]


async def test_a_slot_answers_201_with_everything_that_the_upload_needs(api: Api) -> None:
    answer = await api.client.post(
        "/v1/media", json={"size": 7, "content_type": "image/jpeg", "filename": "a.jpg"}
    )
    assert answer.status_code == 201
    body = answer.json()
    assert answer.headers["location"] == f"/v1/media/{body['id']}" == body["links"]["self"]
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["etag"].startswith('W/"')
    assert set(body) == set(SlotBody.model_fields)
    SlotBody.model_validate(body)
    assert body["schema_version"] == 1
    assert body["state"] == "awaiting_upload"
    assert body["upload"]["method"] == "PUT"
    assert body["upload"]["headers"] == {"Content-Type": "image/jpeg", "Content-Length": "7"}
    left = datetime.fromisoformat(body["upload"]["expires_at"]) - datetime.fromisoformat(
        body["created_at"]
    )
    ttl = api.services.settings.upload_ttl_seconds
    assert ttl - 3 <= left.total_seconds() <= ttl


async def test_the_storage_key_is_ours_and_not_built_from_the_name(api: Api) -> None:
    body = await api.slot(filename="../../etc/passwd.png", metadata={"a": "../x"})
    async with db.acquire(api.pool) as connection:
        key = await rows.column(connection, "media", "upload_key", api.tenant, media_uuid(body))
    area, tenant, media_id, nonce, last = key.split("/")
    assert (area, tenant, media_id) == ("uploads", api.tenant, str(media_uuid(body)))
    assert len(nonce) == 16
    assert last == "original"
    assert body["filename"] == "passwd.png"


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
async def test_a_file_name_comes_back_as_it_was_after_nfc(api: Api, name: str | None) -> None:
    body = await api.slot(filename=name)
    expected = name and unicodedata.normalize("NFC", name)
    assert body["filename"] == expected
    assert (await api.read(body["id"]))["filename"] == expected


async def test_a_file_name_keeps_no_controls_and_no_reversed_writing(api: Api) -> None:
    body = await api.slot(filename="a\u0000b\u001b[31m\u202egpj.exe\n\u2066")
    assert body["filename"] == "ab[31mgpj.exe"


async def test_a_form_brings_names_in_every_script(api: Api) -> None:
    answer = await api.client.post(
        "/v1/media", files={"file": ("日本語 \U0001f600.png", b"\x89PNG\r\n\x1a\n" + b"0" * 40)}
    )
    assert answer.status_code == 202
    assert answer.json()["filename"] == "日本語 \U0001f600.png"


async def test_a_form_is_accepted_and_queued_in_one_request(api: Api) -> None:
    png = b"\x89PNG\r\n\x1a\n" + bytes(100)
    answer = await api.client.post(
        "/v1/media",
        data={"metadata": '{"order": 7, "tag": null}', "recipe": "web", "ttl_seconds": "3600"},
        files={"file": ("a.bin", png, "application/octet-stream")},
    )
    assert answer.status_code == 202, answer.text
    body = answer.json()
    assert answer.headers["location"] == f"/v1/media/{body['id']}"
    assert answer.headers["retry-after"].isdigit()
    assert (body["state"], body["size"], body["content_type"]) == ("queued", len(png), "image/png")
    assert body["metadata"] == {"order": 7, "tag": None}
    assert body["expires_at"] is not None
    assert body["job"]["position"] >= 1
    stored = api.files()
    assert len(stored) == 1
    assert (api.store.root / stored[0]).read_bytes() == png


async def test_a_form_without_a_file_or_with_odd_fields_leaves_nothing(api: Api) -> None:
    png = {"file": ("a.png", b"\x89PNG\r\n\x1a\n" + bytes(40))}
    deep = "[" * 50_000 + "]" * 50_000
    for data, files, status, code in [
        ({"recipe": "web"}, {"other": ("a", b"b")}, 422, "invalid_request"),
        ({"unheard": "of"}, png, 422, "invalid_request"),
        ({"metadata": "{"}, png, 422, "invalid_request"),
        ({"metadata": "[1]"}, png, 422, "invalid_request"),
        ({"metadata": '{"a": NaN}'}, png, 422, "invalid_request"),
        ({"metadata": '{"a": "\\ud800"}'}, png, 422, "invalid_request"),
        ({"metadata": '{"a": "\\u0000"}'}, png, 422, "invalid_request"),
        ({"metadata": deep}, png, 422, "invalid_request"),
        ({"sha256": "0" * 64}, png, 409, "checksum_mismatch"),
        ({"recipe": "unheard"}, png, 422, "invalid_request"),
        ({}, {"file": ("empty.png", b"")}, 422, "empty_input"),
    ]:
        answer = await api.client.post("/v1/media", data=data, files=files)
        check_problem(answer, status, code)
    assert api.files() == []


async def test_a_form_that_is_too_large_is_refused_announced_or_not(
    shared_database: str, tmp_path: Path
) -> None:
    async with make_api(shared_database, tmp_path, max_form_bytes=1000) as api:
        large = b"\x89PNG\r\n\x1a\n" + bytes((1 << 20) + 2000)
        answer = await api.client.post("/v1/media", files={"file": ("a.png", large)})
        check_problem(answer, 413, "payload_too_large")

        async def chunks() -> Any:
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            for _ in range(40):
                yield bytes(1 << 16)
            yield b"\r\n--b--\r\n"

        answer = await api.client.post(
            "/v1/media",
            content=chunks(),
            headers={"Content-Type": "multipart/form-data; boundary=b"},
        )
        check_problem(answer, 413, "payload_too_large")
        assert api.files() == []


async def test_a_broken_form_is_a_400(api: Api) -> None:
    for content_type, content in [
        ("multipart/form-data", b"no boundary"),
        ("multipart/form-data; boundary=b", b"--b\r\nnonsense"),
        ("multipart/form-data; boundary=b", b"--x\r\n\r\n"),
    ]:
        answer = await api.client.post(
            "/v1/media", content=content, headers={"Content-Type": content_type}
        )
        assert answer.status_code in (400, 422), answer.text
        assert answer.headers["content-type"] == "application/problem+json"


async def test_complete_queues_once_and_answers_the_same_afterwards(api: Api) -> None:
    slot = await api.upload()
    path = f"/v1/media/{slot['id']}/complete"
    first, *others = await asyncio.gather(*(api.client.post(path) for _ in range(4)))
    for answer in (first, *others):
        assert answer.status_code == 202
        assert answer.headers["location"] == f"/v1/media/{slot['id']}"
        assert int(answer.headers["retry-after"]) >= 1
        body = answer.json()
        assert set(body) == set(MediaBody.model_fields)
        MediaBody.model_validate(body)
        assert body["state"] == "queued"
        assert body["poll_after_seconds"] >= 1
        assert body["job"]["state"] == "queued"
        assert set(body["job"]["estimate"]) == {"p50_seconds", "p90_seconds", "basis"}
    assert len({a.json()["job"]["id"] for a in (first, *others)}) == 1
    async with db.acquire(api.pool) as connection:
        assert await rows.events(connection, api.tenant) == [
            "media.uploaded",
            "media.queued",
            "job.queued",
        ]
        assert len(await rows.tickets(connection, api.tenant)) == 1


async def test_complete_is_200_after_the_end(api: Api) -> None:
    body = await api.ready()
    answer = await api.client.post(f"/v1/media/{body['id']}/complete")
    assert answer.status_code == 200
    assert answer.json()["state"] == "ready"
    assert "retry-after" not in answer.headers


async def test_complete_without_the_bytes_leaves_the_slot_open(api: Api) -> None:
    slot = await api.slot()
    answer = await api.client.post(f"/v1/media/{slot['id']}/complete")
    check_problem(answer, 409, "source_missing")
    assert (await api.read(slot["id"]))["state"] == "awaiting_upload"
    assert (await api.put(slot, b"bytes")).status_code == 200
    assert (await api.client.post(f"/v1/media/{slot['id']}/complete")).status_code == 202


async def test_complete_compares_the_size(api: Api, tmp_path: Path) -> None:
    slot = await api.slot()
    async with db.acquire(api.pool) as connection:
        key = await rows.column(connection, "media", "upload_key", api.tenant, media_uuid(slot))
    (tmp_path / "other").write_bytes(b"not five")
    await api.store.put(key, tmp_path / "other")
    answer = await api.client.post(f"/v1/media/{slot['id']}/complete")
    problem = check_problem(answer, 409, "size_mismatch")
    assert (problem["limit"]["allowed"], problem["limit"]["seen"]) == (5, 8)
    assert (await api.read(slot["id"]))["state"] == "awaiting_upload"


async def test_an_expired_slot_answers_410_and_is_still_shown(api: Api) -> None:
    slot = await api.slot()
    async with db.acquire(api.pool) as connection:
        from mediamill import media

        assert await media.expire(connection, api.tenant, media_uuid(slot))
    answer = await api.client.post(f"/v1/media/{slot['id']}/complete")
    check_problem(answer, 410, "upload_expired")
    assert (await api.read(slot["id"]))["state"] == "expired"


async def test_the_status_carries_an_etag_and_a_304_has_no_body(api: Api) -> None:
    body = await api.queued()
    path = f"/v1/media/{body['id']}"
    first = await api.client.get(path)
    assert first.headers["cache-control"] == "private, no-cache"
    assert first.headers["retry-after"]
    etag = first.headers["etag"]
    for given in (etag, f'"other", {etag}'):
        same = await api.client.get(path, headers={"If-None-Match": given})
        assert same.status_code == 304
        assert same.content == b""
        assert same.headers["etag"] == etag
        assert same.headers["retry-after"] == first.headers["retry-after"]
    await api.claimed(body)
    changed = await api.client.get(path, headers={"If-None-Match": etag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != etag
    assert changed.json()["state"] == "processing"


async def test_progress_and_stage_are_visible_and_change_the_etag(api: Api) -> None:
    body = await api.queued()
    held = await api.claimed(body)
    before = (await api.client.get(f"/v1/media/{body['id']}")).headers["etag"]
    async with db.acquire(api.pool) as connection:
        await jobs.enter_stage(connection, held, "encode")
        await jobs.advance(connection, held, "encode", 41.26)
    answer = await api.client.get(f"/v1/media/{body['id']}")
    assert answer.headers["etag"] != before
    assert (answer.json()["stage"], answer.json()["progress"]) == ("encode", 41.3)


async def test_a_failed_media_is_a_200_with_the_stored_problem(api: Api) -> None:
    body = await api.queued()
    held = await api.claimed(body)
    async with db.acquire(api.pool) as connection:
        await jobs.fail(
            connection,
            held,
            Problem(Code.CORRUPT_INPUT, "The second frame is cut off."),
            dead_letter=False,
            retention_seconds=60,
        )
    answer = await api.client.get(f"/v1/media/{body['id']}")
    assert answer.status_code == 200
    shown = answer.json()
    assert shown["state"] == "failed"
    assert shown["error"] == Problem(Code.CORRUPT_INPUT, "The second frame is cut off.").as_dict()
    assert "retry-after" not in answer.headers
    variant = await api.client.get(f"/v1/media/{body['id']}/variants/w8.webp")
    check_problem(variant, 409, "wrong_state")


async def test_a_ready_media_lists_its_variants_with_addresses_that_work(api: Api) -> None:
    body = await api.ready({"w8.webp": b"0123456789", "w16.webp": b"abc"})
    assert (body["state"], body["progress"]) == ("ready", 100.0)
    assert [(v["name"], v["bytes"]) for v in body["variants"]] == [("w8.webp", 10), ("w16.webp", 3)]
    async with api.stranger() as stranger:
        got = await stranger.get(body["variants"][0]["url"])
    assert got.content == b"0123456789"
    redirect = await api.client.get(f"/v1/media/{body['id']}/variants/w16.webp")
    assert redirect.status_code == 307
    assert redirect.headers["cache-control"] == "no-store"
    async with api.stranger() as stranger:
        assert (await stranger.get(redirect.headers["location"])).content == b"abc"
    for name in ("w17.webp", "%00", "..%2fw8.webp", "x" * 3000):
        check_problem(
            await api.client.get(f"/v1/media/{body['id']}/variants/{name}"), 404, "not_found"
        )


async def test_processing_again_raises_the_generation_and_serves_the_old_set(api: Api) -> None:
    before = await api.ready({"w8.webp": b"old"})
    answer = await api.client.post(f"/v1/media/{before['id']}/process", json={})
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/v1/media/{before['id']}"
    again = answer.json()
    assert (again["state"], again["generation"]) == ("queued", before["generation"] + 1)
    assert again["job"]["id"] != before["job"]["id"]
    assert [v["sha256"] for v in again["variants"]] == [v["sha256"] for v in before["variants"]]
    refused = await api.client.post(f"/v1/media/{before['id']}/process", json={})
    check_problem(refused, 409, "wrong_state")
    held = await api.claimed(again)
    async with api.stranger() as stranger:
        assert (await stranger.get(before["variants"][0]["url"])).content == b"old"
        async with db.acquire(api.pool) as connection:
            await rows.publish(connection, api.store, held, {"w8.webp": b"new"})
        after = await api.read(before["id"])
        assert (after["state"], after["generation"]) == ("ready", again["generation"])
        assert (await stranger.get(after["variants"][0]["url"])).content == b"new"
        # An address that is out keeps its promise until its set is swept.
        assert (await stranger.get(before["variants"][0]["url"])).content == b"old"


async def test_a_failed_reprocess_keeps_the_old_set(api: Api) -> None:
    before = await api.ready({"w8.webp": b"old"})
    again = (await api.client.post(f"/v1/media/{before['id']}/process", json={})).json()
    held = await api.claimed(again)
    async with db.acquire(api.pool) as connection:
        await jobs.fail(
            connection, held, Problem(Code.TOOL_FAILED), dead_letter=False, retention_seconds=60
        )
    after = await api.read(before["id"])
    assert after["state"] == "failed"
    assert [v["name"] for v in after["variants"]] == ["w8.webp"]
    got = await api.client.get(f"/v1/media/{before['id']}/variants/w8.webp")
    assert got.status_code == 307


async def test_process_refuses_what_is_not_known(api: Api) -> None:
    body = await api.ready()
    path = f"/v1/media/{body['id']}/process"
    for given in ({"recipe": "unheard"}, {"recipe_version": 99}, {"recipe": 5}, {"x": 1}):
        check_problem(await api.client.post(path, json=given), 422, "invalid_request")
    slot = await api.slot()
    answer = await api.client.post(f"/v1/media/{slot['id']}/process", json={})
    check_problem(answer, 409, "wrong_state")


async def test_a_deleted_media_answers_410_and_forgets_the_person(api: Api) -> None:
    body = await api.ready(filename="alice-passport.png", metadata={"name": "Alice"})
    url = body["variants"][0]["url"]
    answer = await api.client.delete(f"/v1/media/{body['id']}")
    assert answer.status_code == 202
    assert answer.json() == {"schema_version": 1, "id": body["id"], "deleted": True}
    assert answer.headers["location"] == f"/v1/media/{body['id']}"
    for method, path in [
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/complete"),
        ("GET", "/variants/w8.webp"),
    ]:
        answer = await api.client.request(method, f"/v1/media/{body['id']}{path}")
        check_problem(answer, 410, "gone")
    answer = await api.client.post(f"/v1/media/{body['id']}/process", json={})
    check_problem(answer, 410, "gone")
    async with api.stranger() as stranger:
        assert (await stranger.get(url)).status_code == 404
    assert body["id"] not in (await api.client.get("/v1/media")).text
    async with db.acquire(api.pool) as connection:
        row = await connection.fetchrow(
            "SELECT * FROM media WHERE tenant_id = $1 AND id = $2", api.tenant, media_uuid(body)
        )
        events = await connection.fetch("SELECT data FROM events WHERE tenant_id = $1", api.tenant)
    assert row is not None
    kept = json.dumps([dict(row), [dict(e) for e in events]], default=str)
    assert "alice" not in kept.lower()
    assert (row["filename"], row["metadata"], row["preview"], row["info"]) == (None, {}, None, None)


async def test_deleting_forgets_the_answer_that_an_idempotency_key_remembers(api: Api) -> None:
    answer = await api.client.post(
        "/v1/media",
        json={"size": 5, "filename": "alice-passport.png"},
        headers={"Idempotency-Key": "k"},
    )
    assert (await api.client.delete(answer.headers["location"])).status_code == 202
    async with db.acquire(api.pool) as connection:
        bodies = await connection.fetch(
            "SELECT body FROM idempotency WHERE tenant_id = $1", api.tenant
        )
    assert "alice" not in "".join(row["body"] or "" for row in bodies)
    again = await api.client.post(
        "/v1/media",
        json={"size": 5, "filename": "alice-passport.png"},
        headers={"Idempotency-Key": "k"},
    )
    assert (again.status_code, again.json()["code"]) == (410, "gone")


async def test_deleting_cancels_what_is_queued(api: Api) -> None:
    body = await api.queued()
    assert (await api.client.delete(f"/v1/media/{body['id']}")).status_code == 202
    answer = await api.client.get(body["links"]["job"])
    assert answer.json()["state"] == "canceled"


async def test_the_timeline_tells_how_long_an_upload_lay_unreported(api: Api) -> None:
    body = await api.upload()
    await asyncio.sleep(0.3)
    answer = await api.client.post(f"/v1/media/{body['id']}/complete")
    assert answer.status_code == 202
    told = (await api.client.get(f"/v1/media/{body['id']}/timeline")).json()
    segments = {s["name"]: s["seconds"] for s in told["segments"]}
    assert [n for n in segments if n != "accepted"] == ["awaiting_upload", "event_lag", "queued"]
    assert segments["event_lag"] >= 0.2
    assert sum(segments.values()) == pytest.approx(told["total_seconds"], abs=1e-5)


async def test_the_timeline_tells_where_the_time_went(api: Api) -> None:
    body = await api.ready()
    answer = await api.client.get(f"/v1/media/{body['id']}/timeline")
    assert answer.status_code == 200
    told = answer.json()
    assert told["schema_version"] == 1
    assert next(s["name"] for s in told["segments"]) == "awaiting_upload"
    assert {"queued", "claimed"} <= {s["name"] for s in told["segments"]}
    for this, following in zip(told["segments"], told["segments"][1:], strict=False):
        assert this["end"] == following["start"]
    assert told["total_seconds"] == pytest.approx(sum(s["seconds"] for s in told["segments"]))
    assert told["sentence"].endswith("it is ready.")
    media = [(m["from"], m["to"]) for m in told["moves"] if m["subject"] == "media"]
    rows.check_path(media, "media")
    assert media[-1] == ("processing", "ready")


async def test_a_list_is_stable_while_rows_come_and_go(api: Api) -> None:
    made = [(await api.slot())["id"] for _ in range(7)]
    seen: list[str] = []
    path: str | None = "/v1/media?limit=2"
    while path:
        answer = await api.client.get(path)
        page = answer.json()
        assert page["schema_version"] == 1
        assert len(page["data"]) <= 2
        seen += [row["id"] for row in page["data"]]
        await api.slot()  # newer than the cursor: it must not shift the pages
        if len(seen) == 2:
            await api.client.delete(f"/v1/media/{seen[0]}")
            await api.client.delete(f"/v1/media/{made[0]}")
        link = answer.headers.get("link")
        assert (link is None) == (page["next_cursor"] is None)
        path = link and link.split(">")[0].removeprefix("<")
        assert path is None or "limit=2" in path
    assert seen == made[:0:-1]


async def test_a_list_filters_by_states(api: Api) -> None:
    await api.slot()
    queued = await api.queued()
    ready = await api.ready()
    answer = await api.client.get("/v1/media?state=queued,ready&limit=1")
    assert [row["id"] for row in answer.json()["data"]] == [ready["id"]]
    assert "state=queued%2Cready" in answer.headers["link"]
    cursor = answer.json()["next_cursor"]
    for other in (f"/v1/media?state=ready&cursor={cursor}", f"/v1/jobs?cursor={cursor}"):
        check_problem(await api.client.get(other), 400, "unknown_parameter")
    answer = await api.client.get(f"/v1/media?state=queued,ready&cursor={cursor}")
    assert [row["id"] for row in answer.json()["data"]] == [queued["id"]]
    assert answer.json()["next_cursor"] is None


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=-1",
        "limit=x",
        "limit=" + "9" * 5000,
        "limit=%C2%B2",
        "state=",
        "state=done",
        "state=ready,done",
        "cursor=",
        "cursor=cur_zzz",
        "cursor=%00",
        "cursor=med_01jd9k4z7e8v5r2m3n6p0q1s2t",
        "sate=ready",
        "offset=3",
    ],
)
async def test_a_bad_query_of_a_list_is_a_400(api: Api, query: str) -> None:
    problem = check_problem(await api.client.get(f"/v1/media?{query}"), 400, "unknown_parameter")
    assert problem["errors"][0]["parameter"] == query.partition("=")[0]


async def test_a_large_limit_is_clamped(api: Api) -> None:
    assert (await api.client.get("/v1/media?limit=100000")).status_code == 200


async def test_unknown_query_parameters_of_a_create_are_a_400(api: Api) -> None:
    answer = await api.client.post("/v1/media?dry_run=true", json={"size": 1})
    problem = check_problem(answer, 400, "unknown_parameter")
    assert problem["errors"] == [{"parameter": "dry_run", "detail": "is not known"}]


async def test_a_repeated_create_is_answered_again_and_not_done_again(api: Api) -> None:
    headers = {"Idempotency-Key": '"order-1"'}
    first = await api.client.post("/v1/media", json={"size": 5}, headers=headers)
    again = await api.client.post(
        "/v1/media", json={"size": 5}, headers={"Idempotency-Key": "order-1"}
    )
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert (again.status_code, again.json()) == (first.status_code, first.json())
    for name in ("location", "etag", "cache-control"):
        assert again.headers[name] == first.headers[name]
    assert len((await api.client.get("/v1/media")).json()["data"]) == 1


async def test_a_repeated_form_keeps_one_upload(api: Api) -> None:
    def send(content: bytes) -> Any:
        return api.client.post(
            "/v1/media",
            files={"file": ("a.png", b"\x89PNG\r\n\x1a\n" + content)},
            headers={"Idempotency-Key": "form-1"},
        )

    first, again = await send(bytes(40)), await send(bytes(40))
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json() == first.json()
    assert again.headers["idempotent-replayed"] == "true"
    assert len(api.files()) == 1
    check_problem(await send(bytes(41)), 422, "idempotency_key_reused")
    assert len(api.files()) == 1


async def test_a_key_with_another_body_is_a_422(api: Api) -> None:
    headers = {"Idempotency-Key": "order-2"}
    await api.client.post("/v1/media", json={"size": 5}, headers=headers)
    answer = await api.client.post("/v1/media", json={"size": 6}, headers=headers)
    check_problem(answer, 422, "idempotency_key_reused")


@pytest.mark.parametrize("key", ["", '""', "a b", "x" * 256, "k\u00e9y"])
async def test_a_bad_idempotency_key_is_a_400(api: Api, key: str) -> None:
    answer = await api.client.post(
        "/v1/media", json={"size": 5}, headers=[(b"Idempotency-Key", key.encode("latin-1"))]
    )
    check_problem(answer, 400, "idempotency_key_invalid")


async def test_an_expired_key_counts_as_new(api: Api) -> None:
    headers = {"Idempotency-Key": "order-3"}
    first = await api.client.post("/v1/media", json={"size": 5}, headers=headers)
    async with db.acquire(api.pool) as connection:
        await connection.execute(
            "UPDATE idempotency SET expires_at = now() - interval '1 s' WHERE tenant_id = $1",
            api.tenant,
        )
    again = await api.client.post("/v1/media", json={"size": 6}, headers=headers)
    assert again.status_code == 201
    assert "idempotent-replayed" not in again.headers
    assert again.json()["id"] != first.json()["id"]


async def test_a_key_belongs_to_its_tenant_and_its_route(
    api: Api, other: httpx.AsyncClient
) -> None:
    headers = {"Idempotency-Key": "order-4"}
    mine = await api.client.post("/v1/media", json={"size": 5}, headers=headers)
    theirs = await other.post("/v1/media", json={"size": 5}, headers=headers)
    assert theirs.status_code == 201
    assert theirs.json()["id"] != mine.json()["id"]
    ready = await api.ready()
    path = f"/v1/media/{ready['id']}/process"
    first = await api.client.post(path, json={}, headers=headers)
    again = await api.client.post(path, json={}, headers=headers)
    assert (first.status_code, again.status_code) == (202, 202)
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json()["generation"] == 2
    another = await api.ready()
    answer = await api.client.post(f"/v1/media/{another['id']}/process", json={}, headers=headers)
    check_problem(answer, 422, "idempotency_key_reused")


async def test_a_refused_request_uses_up_no_key(api: Api) -> None:
    headers = {"Idempotency-Key": "order-5"}
    refused = await api.client.post("/v1/media", json={"size": 0}, headers=headers)
    check_problem(refused, 422, "empty_input")
    answer = await api.client.post("/v1/media", json={"size": 5}, headers=headers)
    assert answer.status_code == 201


async def test_a_pool_of_two_serves_many_requests_at_once(
    shared_database: str, tmp_path: Path
) -> None:
    """No request may hold one connection while it waits for another."""
    async with make_api(shared_database, tmp_path, pool_size=2) as api:
        body = await api.queued()
        api.services.forecaster = Forecaster()  # it remembers nothing, so every request asks
        async with asyncio.timeout(10):
            answers = await asyncio.gather(
                *(api.client.get(f"/v1/media/{body['id']}") for _ in range(8))
            )
        assert {answer.status_code for answer in answers} == {200}


async def test_metadata_and_numbers_come_back_as_they_were(api: Api) -> None:
    given = {"a": "é\U0001f600", "b": 10**30, "c": -1.5, "d": True, "e": None, "": "empty name"}
    body = await api.slot(metadata=given)
    assert body["metadata"] == given
    assert (await api.read(body["id"]))["metadata"] == given


async def test_a_ready_media_does_not_answer_304_for_addresses_that_ran_out(
    shared_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that keeps its copy must get fresh signed addresses before the old ones end."""
    from datetime import UTC, timedelta

    from mediamill.api import media as routes

    async with make_api(shared_database, tmp_path) as api:
        body = await api.ready()
        path = f"/v1/media/{body['id']}"
        first = await api.client.get(path)
        ends = datetime.fromisoformat(first.json()["variants"][0]["url_expires_at"])

        class Later(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return ends.astimezone(UTC) + timedelta(minutes=1)

        monkeypatch.setattr(routes, "datetime", Later)
        again = await api.client.get(path, headers={"If-None-Match": first.headers["etag"]})
        assert again.status_code == 200


async def test_the_original_is_read_with_a_key_and_in_no_other_way(api: Api) -> None:
    content = b"<script>alert(1)</script>" * 1000
    body = await api.queued(content, filename='a"b\r\nc ü.png')
    path = f"/v1/media/{body['id']}/original"
    answer = await api.client.get(path)
    assert (answer.status_code, answer.content) == (200, content)
    assert answer.headers["content-disposition"].startswith("attachment; filename*=UTF-8''a%22b")
    assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert answer.headers["x-content-type-options"] == "nosniff"
    async with api.stranger() as stranger:
        check_problem(await stranger.get(path), 401, "unauthenticated")
    waiting = await api.slot()
    check_problem(await api.client.get(f"/v1/media/{waiting['id']}/original"), 409, "wrong_state")
    for file in api.store.root.glob("uploads/**/original"):
        file.unlink()
    check_problem(await api.client.get(path), 410, "gone")

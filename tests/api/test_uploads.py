"""tus 1.0 on the wire. docs/reference/tus.md says which test holds which line of the protocol."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from starlette.types import Message
from tests import rows
from tests.api.conftest import Api, check_problem, make_api

from mediamill import db, ids, tus
from mediamill.failures import Code, Failure, Refused
from mediamill.maintenance import Maintenance

pytestmark = pytest.mark.anyio

TUS = {"Tus-Resumable": "1.0.0"}
CHUNK = {**TUS, "Content-Type": "application/offset+octet-stream"}
TEN = b"abcdefghij"


def meta(**values: str) -> str:
    return ",".join(f"{k} {base64.b64encode(v.encode()).decode()}" for k, v in values.items())


async def create(api: Api, size: int | None = 10, **headers: str) -> str:
    """The address of a new upload."""
    length = {"Upload-Defer-Length": "1"} if size is None else {"Upload-Length": str(size)}
    given = {**TUS, **length, "Upload-Metadata": meta(filename="a.png"), **headers}
    answer = await api.client.post("/v1/uploads", headers=given)
    assert answer.status_code == 201, answer.text
    assert answer.headers["tus-resumable"] == "1.0.0"
    location: str = answer.headers["location"]
    return location


async def patch(api: Api, at: str, offset: int, data: bytes, **headers: str) -> httpx.Response:
    return await api.client.patch(
        at, content=data, headers={**CHUNK, "Upload-Offset": str(offset), **headers}
    )


async def offset(api: Api, at: str) -> int:
    answer = await api.client.head(at, headers=TUS)
    assert answer.status_code == 200, answer.headers
    return int(answer.headers["upload-offset"])


async def stored(api: Api, at: str) -> bytes:
    """The bytes of the object that an upload became."""
    async with db.acquire(api.pool) as connection:
        found = await tus.find(connection, api.tenant, upload_id(at))
    assert found.version is not None
    store = api.services.storage
    return b"".join([piece async for piece in store.read(found.key, found.version)])


def upload_id(at: str) -> Any:
    return ids.decode(ids.UPLOAD, at.rpartition("/")[2])


def media_path(at: str) -> str:
    return f"/v1/media/{ids.encode(ids.MEDIA, upload_id(at))}"


async def jobs_of(api: Api, at: str) -> int:
    statement = "SELECT count(*) FROM jobs WHERE media_id = $1 AND role = 'main'"
    return int(await api.pool.fetchval(statement, upload_id(at)))


async def test_the_ten_bytes_of_the_problem_case(both: Api) -> None:
    """up-01: whatever the client believes, the offset is what was received."""
    api = both
    at = await create(api)
    assert (await patch(api, at, 0, b"abcd")).headers["upload-offset"] == "4"
    check_problem(await patch(api, at, 0, b"abcd"), 409, "upload_offset_mismatch")
    check_problem(await patch(api, at, 7, b"xyz"), 409, "upload_offset_mismatch")
    head = await api.client.head(at, headers=TUS)
    assert head.status_code == 200
    assert head.headers["upload-offset"] == "4"
    assert head.headers["upload-length"] == "10"
    assert head.headers["cache-control"] == "no-store"
    plain = await patch(api, at, 4, b"efg", **{"Content-Type": "text/plain"})
    check_problem(plain, 415, "unsupported_media_type")
    assert await offset(api, at) == 4

    await cut_off(api, at, 4, b"ef", announced=3)
    now = await offset(api, at)
    assert 4 <= now <= 6
    rest = await patch(api, at, now, TEN[now:])
    assert (rest.status_code, rest.headers["upload-offset"]) == (204, "10")
    assert await jobs_of(api, at) == 1
    empty = await patch(api, at, 10, b"")
    assert (empty.status_code, empty.headers["upload-offset"]) == (204, "10")
    assert await jobs_of(api, at) == 1
    check_problem(await patch(api, at, 10, b"k"), 413, "payload_too_large")
    assert await stored(api, at) == TEN
    unknown = f"/v1/uploads/{ids.encode(ids.UPLOAD, ids.new())}"
    check_problem(await patch(api, unknown, 0, b"x"), 404, "not_found")
    body = (await api.client.get(media_path(at))).json()
    assert (body["state"], body["filename"], body["size"]) == ("queued", "a.png", 10)


async def cut_off(api: Api, at: str, start: int, data: bytes, *, announced: int) -> None:
    """A PATCH whose connection is lost after `data`."""
    messages: list[Message] = [
        {"type": "http.request", "body": data, "more_body": True},
        {"type": "http.disconnect"},
    ]
    headers = {
        **CHUNK,
        "Upload-Offset": str(start),
        "Content-Length": str(announced),
        "Authorization": f"Bearer {api.token}",
    }
    await api.raw("PATCH", at, headers=headers, messages=messages)


async def test_small_and_large_pieces_become_one_object(both: Api) -> None:
    """Pieces too small for the storage wait as a tail; a part is made as soon as there is one."""
    api = both
    step = 5 << 20
    whole = bytes(range(256)) * ((2 * step + 1000) // 256 + 1)
    at = await create(api, len(whole), **{"Upload-Metadata": meta(filename="a.mp4")})
    done = 0
    for size in (10, 1 << 20, step, 1, step - 7, len(whole)):
        piece = whole[done : done + size]
        answer = await patch(api, at, done, piece)
        assert answer.status_code == 204, answer.text
        done += len(piece)
        assert await offset(api, at) == done
    assert await stored(api, at) == whole
    assert await jobs_of(api, at) == 1
    if api.services.storage.least_part_bytes:
        prefix = f"uploads/{api.tenant}/{upload_id(at)}"
        (nonce,) = await api.services.storage.list(prefix)
        assert await api.services.storage.list(f"{prefix}/{nonce}") == ["original"], (
            "tails are left"
        )


async def test_a_size_that_was_not_known_is_said_later_and_once(both: Api) -> None:
    api = both
    at = await create(api, None)
    head = await api.client.head(at, headers=TUS)
    assert head.headers["upload-defer-length"] == "1"
    assert "upload-length" not in head.headers
    assert "mediamill-media" not in head.headers
    check_problem(await api.client.get(media_path(at)), 404, "not_found")
    await patch(api, at, 0, b"abcd")
    less = await patch(api, at, 4, b"e", **{"Upload-Length": "3"})
    check_problem(less, 422, "invalid_request")
    assert (await patch(api, at, 4, b"efg", **{"Upload-Length": "10"})).status_code == 204
    head = await api.client.head(at, headers=TUS)
    assert (head.headers["upload-length"], head.headers["upload-offset"]) == ("10", "7")
    assert "upload-defer-length" not in head.headers
    assert (await api.client.get(media_path(at))).json()["state"] == "awaiting_upload"
    check_problem(await patch(api, at, 7, b"h", **{"Upload-Length": "11"}), 422, "invalid_request")
    assert (await patch(api, at, 7, b"hij")).status_code == 204
    assert await stored(api, at) == TEN
    assert await jobs_of(api, at) == 1


async def test_an_upload_of_unknown_size_still_has_a_limit(
    tmp_path: Path, shared_database: str
) -> None:
    async with make_api(shared_database, tmp_path, max_image_bytes=8) as api:
        at = await create(api, None)
        check_problem(await patch(api, at, 0, TEN), 413, "payload_too_large")

        async def chunks() -> AsyncIterator[bytes]:
            for letter in TEN:
                yield bytes([letter])

        answer = await api.client.patch(
            at, content=chunks(), headers={**CHUNK, "Upload-Offset": "0"}
        )
        check_problem(answer, 413, "payload_too_large")
        assert await offset(api, at) <= 8
        too_large = await api.client.post(
            "/v1/uploads",
            headers={**TUS, "Upload-Length": "9", "Upload-Metadata": meta(filename="a.png")},
        )
        check_problem(too_large, 413, "payload_too_large")


async def test_bytes_may_come_with_the_creation(both: Api) -> None:
    api = both
    headers = {**CHUNK, "Upload-Length": "10", "Upload-Metadata": meta(filename="a.png")}
    part = await api.client.post("/v1/uploads", content=b"abcd", headers=headers)
    assert (part.status_code, part.headers["upload-offset"]) == (201, "4")
    assert await offset(api, part.headers["location"]) == 4
    whole = await api.client.post("/v1/uploads/", content=TEN, headers=headers)
    assert (whole.status_code, whole.headers["upload-offset"]) == (201, "10")
    assert await stored(api, whole.headers["location"]) == TEN
    assert await jobs_of(api, whole.headers["location"]) == 1
    wrong = await api.client.post(
        "/v1/uploads", content=TEN, headers={**headers, "Content-Type": "text/plain"}
    )
    check_problem(wrong, 415, "unsupported_media_type")
    too_many = await api.client.post("/v1/uploads", content=TEN + b"k", headers=headers)
    check_problem(too_many, 413, "payload_too_large")


@pytest.mark.parametrize("algorithm", ["sha1", "sha256"])
async def test_bytes_with_a_checksum_are_kept_whole_or_not_at_all(
    both: Api, algorithm: str
) -> None:
    api = both

    def checksum(data: bytes) -> dict[str, str]:
        digest = base64.b64encode(hashlib.new(algorithm, data).digest()).decode()
        return {"Upload-Checksum": f"{algorithm} {digest}"}

    at = await create(api)
    await patch(api, at, 0, b"ab", **checksum(b"ab"))
    wrong = await patch(api, at, 2, b"XX", **checksum(b"cd"))
    check_problem(wrong, 460, "chunk_corrupted")
    assert await offset(api, at) == 2
    await cut_off_with(api, at, 2, b"cd", checksum(b"cdef"))
    assert await offset(api, at) == 2, "a part of a checked request was kept"
    assert (await patch(api, at, 2, TEN[2:], **checksum(TEN[2:]))).status_code == 204
    assert await stored(api, at) == TEN


async def cut_off_with(api: Api, at: str, start: int, data: bytes, more: dict[str, str]) -> None:
    headers = {
        **CHUNK,
        **more,
        "Upload-Offset": str(start),
        "Content-Length": "8",
        "Authorization": f"Bearer {api.token}",
    }
    messages: list[Message] = [
        {"type": "http.request", "body": data, "more_body": True},
        {"type": "http.disconnect"},
    ]
    await api.raw("PATCH", at, headers=headers, messages=messages)


@pytest.mark.parametrize("text", ["crc32 AAAA", "sha1", "sha1 !!", "md5 AAAA", ""])
async def test_a_checksum_that_cannot_be_read_is_a_400(api: Api, text: str) -> None:
    at = await create(api)
    answer = await patch(api, at, 0, b"ab", **{"Upload-Checksum": text})
    code = "chunk_corrupted" if text == "sha1" else "malformed_request"
    check_problem(answer, 460 if text == "sha1" else 400, code)
    assert await offset(api, at) == 0


async def test_partial_uploads_are_joined_once(both: Api) -> None:
    api = both
    pieces = [b"abc", b"defg", b"hij"]
    parts = [await create(api, len(p), **{"Upload-Concat": "partial"}) for p in pieces]
    assert (await api.client.head(parts[0], headers=TUS)).headers["upload-concat"] == "partial"
    joined = f"final;{parts[0]} {rows.PUBLIC_URL}{parts[1]} {parts[2]}"
    final = {**TUS, "Upload-Concat": joined, "Upload-Metadata": meta(filename="a.png")}
    early = await api.client.post("/v1/uploads", headers=final)
    check_problem(early, 409, "wrong_state")
    for at, piece in zip(parts, pieces, strict=True):
        await patch(api, at, 0, piece)
        check_problem(await api.client.get(media_path(at)), 404, "not_found")
    answers = await asyncio.gather(
        *(api.client.post("/v1/uploads", headers=final) for _ in range(3))
    )
    made = {a.headers["location"] for a in answers if a.status_code == 201}
    assert {a.status_code for a in answers} <= {201, 409}, [a.text for a in answers]
    again = await api.client.post("/v1/uploads", headers=final)
    assert again.status_code == 201, again.text
    (at,) = made | {again.headers["location"]}
    assert await stored(api, at) == TEN
    assert await jobs_of(api, at) == 1
    head = await api.client.head(at, headers=TUS)
    assert head.headers["upload-concat"].startswith("final;/v1/uploads/upl_")
    assert head.headers["upload-length"] == "10"
    check_problem(await patch(api, at, 10, b"k"), 403, "upload_is_final")
    check_problem(await patch(api, at, 0, b"k"), 403, "upload_is_final")


async def test_uploads_of_others_are_not_joined(api: Api, other: httpx.AsyncClient) -> None:
    at = await create(api, 3, **{"Upload-Concat": "partial"})
    await patch(api, at, 0, b"abc")
    whole = await create(api, 3)
    await patch(api, whole, 0, b"abc")
    for sender, concat, status in (
        (other, f"final;{at}", 404),
        (api.client, f"final;{whole}", 422),
        (api.client, "final;", 400),
        (api.client, "final;/v1/media/x", 400),
        (api.client, f"final;{at} https://elsewhere.test/x", 400),
        (api.client, f"ultimate;{at}", 400),
        (api.client, "final;" + " ".join([at] * 101), 400),
    ):
        headers = {**TUS, "Upload-Concat": concat}
        assert (await sender.post("/v1/uploads", headers=headers)).status_code == status, concat


async def test_an_upload_that_is_ended_is_gone(both: Api) -> None:
    api = both
    at = await create(api)
    await patch(api, at, 0, b"abcd")
    assert (await api.client.delete(at, headers=TUS)).status_code == 204
    for answer in (
        await api.client.head(at, headers=TUS),
        await patch(api, at, 4, b"efghij"),
        await api.client.delete(at, headers=TUS),
    ):
        assert answer.status_code in (404, 410)
    check_problem(await api.client.get(media_path(at)), 410, "gone")
    assert await api.services.storage.list(f"uploads/{api.tenant}") == []
    done = await create(api)
    await patch(api, done, 0, TEN)
    check_problem(await api.client.delete(done, headers=TUS), 409, "wrong_state")
    assert await jobs_of(api, done) == 1


async def test_the_method_may_be_named_in_a_header(api: Api) -> None:
    at = await create(api)
    sent = await api.client.post(
        at,
        content=b"abcd",
        headers={**CHUNK, "Upload-Offset": "0", "X-HTTP-Method-Override": "PATCH"},
    )
    assert (sent.status_code, sent.headers["upload-offset"]) == (204, "4")
    head = await api.client.post(at, headers={**TUS, "X-HTTP-Method-Override": "HEAD"})
    assert head.headers["upload-offset"] == "4"
    stranger = api.stranger()
    async with stranger:
        refused = await stranger.post(at, headers={**TUS, "X-HTTP-Method-Override": "DELETE"})
    check_problem(refused, 401, "unauthenticated")
    gone = await api.client.post(at, headers={**TUS, "X-HTTP-Method-Override": "DELETE"})
    assert gone.status_code == 204
    check_problem(await api.client.post(at, headers=TUS), 405, "method_not_allowed")


async def test_another_version_of_the_protocol_is_refused_and_nothing_done(api: Api) -> None:
    at = await create(api)
    for version in (None, "0.2.2", "2.0.0"):
        given = {} if version is None else {"Tus-Resumable": version}
        for answer in (
            await api.client.post("/v1/uploads", headers={"Upload-Length": "10", **given}),
            await api.client.head(at, headers=given),
            await api.client.delete(at, headers=given),
            await api.client.patch(
                at,
                content=b"ab",
                headers={"Content-Type": CHUNK["Content-Type"], "Upload-Offset": "0", **given},
            ),
        ):
            assert answer.status_code == 412
            assert answer.headers["tus-version"] == "1.0.0"
            assert answer.headers["tus-resumable"] == "1.0.0"
    assert await offset(api, at) == 0


async def test_a_browser_may_ask_and_is_told_what_the_server_can(api: Api) -> None:
    async with api.stranger() as stranger:
        for path in ("/v1/uploads", "/v1/uploads/", await create(api)):
            answer = await stranger.options(path, headers={"Tus-Resumable": "9.9.9"})
            assert answer.status_code == 204
            assert answer.headers["tus-version"] == "1.0.0"
            assert answer.headers["tus-resumable"] == "1.0.0"
            assert set(answer.headers["tus-extension"].split(",")) >= {
                "creation",
                "creation-with-upload",
                "creation-defer-length",
                "expiration",
                "checksum",
                "termination",
                "concatenation",
            }
            assert "sha1" in answer.headers["tus-checksum-algorithm"].split(",")
            assert int(answer.headers["tus-max-size"]) == api.services.settings.max_video_bytes
            assert answer.headers["access-control-allow-origin"] == "*"
            allowed = answer.headers["access-control-allow-headers"].lower()
            assert "upload-offset" in allowed
            assert "authorization" in allowed
    refused = await api.client.post("/v1/uploads", headers=TUS)
    assert "Location" in refused.headers["access-control-expose-headers"]


async def test_what_expires_says_when_and_is_swept(both: Api) -> None:
    api = both
    at = await create(api)
    first = (await patch(api, at, 0, b"abcd")).headers["upload-expires"]
    assert re.fullmatch(r"\w{3}, \d{2} \w{3} \d{4} \d{2}:\d{2}:\d{2} GMT", first)
    partial = await create(api, 4, **{"Upload-Concat": "partial"})
    await patch(api, partial, 0, b"abcd")
    unknown = await create(api, None)
    await patch(api, unknown, 0, b"abcd")
    await api.pool.execute(
        "UPDATE transfers SET expires_at = now() - interval '1 hour' WHERE tenant_id = $1",
        api.tenant,
    )
    check_problem(await patch(api, at, 4, b"e"), 410, "upload_expired")
    assert (await api.client.head(at, headers=TUS)).status_code == 410
    duties = Maintenance(api.services.settings, api.pool, api.services.storage)
    for name in ("sweep_transfers", "erase", "sweep_transfers"):
        await duties.once(next(d for d in duties.duties if d.name == name))
    assert await api.services.storage.list(f"uploads/{api.tenant}") == []
    for address in (at, partial, unknown):
        assert (await api.client.head(address, headers=TUS)).status_code == 410
    assert (await api.client.get(media_path(at))).json()["state"] == "expired"
    if api.services.storage.least_part_bytes:
        assert await api.services.storage.sweep(older_than_seconds=0, now=9e9) == 0
    else:
        assert api.files() == []


async def test_an_upload_in_progress_survives_the_sweeps(both: Api) -> None:
    api = both
    at = await create(api)
    await patch(api, at, 0, b"abcd")
    unknown = await create(api, None)
    await patch(api, unknown, 0, b"abcd")
    duties = Maintenance(api.services.settings, api.pool, api.services.storage)
    for duty in duties.duties:
        await duties.once(duty)
    async with db.acquire(api.pool) as connection:
        await duties.sweep_uploads(connection, older_than_seconds=-60)
        keep = await tus.open_parts(connection)
    await api.services.storage.sweep(older_than_seconds=0, now=9e9, keep=keep)
    for address in (at, unknown):
        assert (await patch(api, address, 4, TEN[4:], **{"Upload-Length": "10"})).status_code == 204
        assert await stored(api, address) == TEN


async def test_a_deleted_media_takes_its_upload_with_it(both: Api) -> None:
    api = both
    at = await create(api)
    await patch(api, at, 0, b"abcd")
    assert (await api.client.delete(media_path(at))).status_code == 202
    check_problem(await patch(api, at, 4, b"e"), 410, "gone")
    duties = Maintenance(api.services.settings, api.pool, api.services.storage)
    await duties.once(next(d for d in duties.duties if d.name == "erase"))
    assert await api.services.storage.list(f"uploads/{api.tenant}") == []
    if not api.services.storage.least_part_bytes:
        assert api.files() == []


async def test_a_new_request_takes_over_from_one_that_hangs(both: Api) -> None:
    api = both
    at = await create(api)
    arrived, hold = asyncio.Event(), asyncio.Event()

    async def stalled() -> AsyncIterator[bytes]:
        yield b"abcd"
        arrived.set()
        await hold.wait()

    hanging = asyncio.create_task(
        api.client.patch(at, content=stalled(), headers={**CHUNK, "Upload-Offset": "0"})
    )
    await arrived.wait()
    assert await offset(api, at) == 4, "what came before is kept"
    hold.set()
    check_problem(await hanging, 409, "upload_taken_over")
    assert (await patch(api, at, 4, TEN[4:])).status_code == 204
    assert await stored(api, at) == TEN


async def test_a_writer_of_another_process_that_comes_back_changes_nothing(both: Api) -> None:
    """It was frozen between its last byte and its commit, while somebody else went on."""
    api = both
    transfers = api.services.transfers
    elsewhere = tus.Transfers(api.services.settings, api.pool, api.services.storage)
    at = await create(api)
    found = await transfers.get(api.tenant, upload_id(at))
    frozen, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"WRONG"
        frozen.set()
        await go_on.wait()
        yield b"BYTES"

    stale = asyncio.create_task(elsewhere.append(found, 0, slow(), length=10))
    await frozen.wait()
    assert await offset(api, at) == 0
    assert (await patch(api, at, 0, b"abcd")).status_code == 204
    go_on.set()
    with pytest.raises(Refused) as caught:
        await stale
    assert caught.value.code is Code.UPLOAD_TAKEN_OVER
    assert await offset(api, at) == 4
    assert (await patch(api, at, 4, TEN[4:])).status_code == 204
    assert await stored(api, at) == TEN
    assert await jobs_of(api, at) == 1


async def test_an_upload_whose_parts_the_storage_gave_up_is_gone(both: Api) -> None:
    """A lifecycle rule of the bucket was faster than we."""
    api = both
    at = await create(api)
    found = await api.services.transfers.get(api.tenant, upload_id(at))
    await api.services.storage.abort_parts(found.key, found.parts)
    check_problem(await patch(api, at, 0, TEN), 410, "upload_expired")


async def test_an_upload_whose_last_step_was_cut_off_is_finished_later(
    both: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API died after the last byte: the next question, or a duty, finishes the upload."""
    api = both
    for by_duty in (False, True):
        at = await create(api)

        async def dies(_self: tus.Transfers, _found: tus.Transfer) -> None:
            raise Failure(Code.STORAGE_UNAVAILABLE)

        with monkeypatch.context() as patched:
            patched.setattr(tus.Transfers, "finish", dies)
            check_problem(await patch(api, at, 0, TEN), 503, "storage_unavailable")
        assert await jobs_of(api, at) == 0
        if by_duty:
            duties = Maintenance(api.services.settings, api.pool, api.services.storage)
            assert await duties.once(next(d for d in duties.duties if d.name == "finish_uploads"))
        assert await offset(api, at) == 10
        assert await jobs_of(api, at) == 1
        assert await stored(api, at) == TEN


async def test_nothing_is_stored_before_the_key_is_checked(
    api: Api, other: httpx.AsyncClient
) -> None:
    at = await create(api)
    async with api.stranger() as stranger:
        headers = {**CHUNK, "Upload-Offset": "0"}
        check_problem(
            await stranger.patch(at, content=TEN, headers=headers), 401, "unauthenticated"
        )
        check_problem(
            await stranger.post(
                "/v1/uploads", content=TEN, headers={**CHUNK, "Upload-Length": "10"}
            ),
            401,
            "unauthenticated",
        )
    check_problem(await other.patch(at, content=TEN, headers=headers), 404, "not_found")
    assert (await other.head(at, headers=TUS)).status_code == 404
    check_problem(await other.delete(at, headers=TUS), 404, "not_found")
    reader = await api.new_key(api.tenant, "media:read")
    async with api.stranger(reader) as client:
        check_problem(await client.patch(at, content=TEN, headers=headers), 403, "missing_scope")
    assert await offset(api, at) == 0
    data = [f for f in api.files() if f.endswith("/data")]
    assert [(api.store.root / f).stat().st_size for f in data] == [0]


async def test_an_empty_file_is_refused_at_once(api: Api) -> None:
    """up-03: a clear answer, and nothing that waits for ever."""
    for headers in ({"Upload-Length": "0"}, {"Upload-Length": "0", "Upload-Concat": "partial"}):
        answer = await api.client.post("/v1/uploads", headers={**TUS, **headers})
        body = check_problem(answer, 422, "empty_input")
        assert body["retryable"] is False
    at = await create(api, None)
    answer = await patch(api, at, 0, b"", **{"Upload-Length": "0"})
    check_problem(answer, 422, "empty_input")
    slot = await api.client.post("/v1/media", json={"size": 0})
    check_problem(slot, 422, "empty_input")
    form = await api.client.post("/v1/media", files={"file": ("a.png", b"")})
    check_problem(form, 422, "empty_input")
    count = "SELECT count(*) FROM media WHERE tenant_id = $1"
    assert await api.pool.fetchval(count, api.tenant) == 0


@pytest.mark.parametrize(
    "name",
    ["café.jpg", "cafe\u0301.jpg", "日本語レポート.png", "изображение.jpg", "😀 smile.png",
     "a b+c%20d&e=f.jpg", 'quote"and;semi.jpg', "x" * 236 + ".jpg", "no_extension", ".hidden.jpg",
     "two.dots.tar.jpg"],
)  # fmt: skip
async def test_every_name_comes_through(api: Api, name: str) -> None:
    """up-07: by each way in, equal after NFC, and no part of a key."""
    import unicodedata

    at = await create(api, 10, **{"Upload-Metadata": meta(filename=name, filetype="image/jpeg")})
    await patch(api, at, 0, TEN)
    slot = await api.slot(TEN, filename=name)
    form = await api.client.post("/v1/media", files={"file": (name, TEN, "image/jpeg")})
    assert form.status_code == 202
    for path in (media_path(at), slot["links"]["self"], form.json()["links"]["self"]):
        shown = (await api.client.get(path)).json()["filename"]
        assert shown == unicodedata.normalize("NFC", name)
    assert all(re.fullmatch(r"[a-z0-9/_.-]+", key) for key in api.files())
    assert not any("jpg" in key or "smile" in key for key in api.files())


async def test_metadata_says_what_is_wanted(api: Api) -> None:
    text = meta(name="b.webm", type="video/webm", recipe="web", project="7")
    at = await create(api, 10, **{"Upload-Metadata": text})
    assert (await api.client.head(at, headers=TUS)).headers["upload-metadata"] == text
    body = (await api.client.get(media_path(at))).json()
    assert (body["filename"], body["content_type"]) == ("b.webm", "video/webm")
    assert (body["recipe"], body["metadata"], body["kind"]) == ("web", {"project": "7"}, "video")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("filename !!!", 400),
        ("filename YQ==,filename Yg==", 400),
        ("filename /w==", 400),
        ("é YQ==", 400),
        (" ,", 201),
        ("empty", 201),
        ("a " + "A" * 5000, 400),
        (meta(recipe="none"), 422),
        (meta(recipe_version="x"), 422),
        (meta(sha256="x"), 422),
        (meta(filetype="<script>"), 422),
        (",".join(meta(**{f"k{n}": "v"}) for n in range(33)), 422),
    ],
)
async def test_metadata_that_cannot_be_meant_is_refused(api: Api, text: str, status: int) -> None:
    answer = await api.raw(
        "POST",
        "/v1/uploads",
        headers={
            **TUS,
            "Upload-Length": "5",
            "Upload-Metadata": text,
            "Authorization": f"Bearer {api.token}",
        },
    )
    assert answer[0] == status, answer[2]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Upload-Length": "-1"},
        {"Upload-Length": "ten"},
        {"Upload-Length": "1" * 30},
        {"Upload-Defer-Length": "2"},
        {"Upload-Length": "5", "Upload-Defer-Length": "1"},
    ],
)
async def test_a_creation_without_a_usable_length_is_a_400(
    api: Api, headers: dict[str, str]
) -> None:
    answer = await api.client.post("/v1/uploads", headers={**TUS, **headers})
    check_problem(answer, 400, "malformed_request")


async def test_a_patch_without_a_usable_offset_is_a_400(api: Api) -> None:
    at = await create(api)
    for given in ({}, {"Upload-Offset": "-1"}, {"Upload-Offset": "x"}):
        answer = await api.client.patch(at, content=b"a", headers={**CHUNK, **given})
        check_problem(answer, 400, "malformed_request")


async def test_parallel_requests_at_one_offset_have_one_winner(both: Api) -> None:
    api = both
    at = await create(api)
    answers = await asyncio.gather(*(patch(api, at, 0, TEN) for _ in range(5)))
    assert {a.status_code for a in answers} <= {204, 409}
    assert any(a.status_code == 204 for a in answers)
    assert await stored(api, at) == TEN
    assert await jobs_of(api, at) == 1


# --- creation with an Idempotency-Key


async def test_a_creation_that_is_repeated_makes_one_upload_and_goes_on(api: Api) -> None:
    """The answer of the first was lost: the second learns where it stands."""
    meta = {"Upload-Metadata": f"filename {base64.b64encode(b'a.png').decode()}"}
    key = {"Idempotency-Key": "one", **TUS, "Upload-Length": "10", **meta}
    bytes_ = {"Content-Type": "application/offset+octet-stream"}
    first = await api.client.post("/v1/uploads", headers={**key, **bytes_}, content=b"abc")
    assert (first.status_code, first.headers["upload-offset"]) == (201, "3")
    assert "idempotent-replayed" not in first.headers
    for sent in ({"content": b"abc", "headers": {**key, **bytes_}}, {"headers": key}):
        again = await api.client.post("/v1/uploads", **sent)
        assert (again.status_code, again.headers["upload-offset"]) == (201, "3")
        assert again.headers["idempotent-replayed"] == "true"
        assert again.headers["location"] == first.headers["location"]
    at = first.headers["location"]
    assert (await patch(api, at, 3, b"defghij")).status_code == 204
    assert await stored(api, at) == b"abcdefghij"
    done = await api.client.post("/v1/uploads", headers=key)
    assert (done.headers["upload-offset"], done.headers["location"]) == ("10", at)
    assert await jobs_of(api, at) == 1


async def test_a_creation_whose_bytes_never_came_takes_them_the_second_time(api: Api) -> None:
    key = {"Idempotency-Key": "late", **TUS, "Upload-Length": "5"}
    first = await api.client.post("/v1/uploads", headers=key)
    bytes_ = {"Content-Type": "application/offset+octet-stream"}
    again = await api.client.post("/v1/uploads", headers={**key, **bytes_}, content=b"bytes")
    assert (again.status_code, again.headers["upload-offset"]) == (201, "5")
    assert again.headers["location"] == first.headers["location"]
    assert await jobs_of(api, first.headers["location"]) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"Upload-Length": "11"},
        {"Upload-Metadata": "filename Yg=="},
        {"Upload-Concat": "partial"},
        {"Upload-Length": None, "Upload-Defer-Length": "1"},
    ],
    ids=str,
)
async def test_another_creation_under_the_key_is_refused(
    api: Api, change: dict[str, str | None]
) -> None:
    key = {"Idempotency-Key": "same", **TUS, "Upload-Length": "10"}
    assert (await api.client.post("/v1/uploads", headers=key)).status_code == 201
    other = {name: value for name, value in {**key, **change}.items() if value is not None}
    refused = await api.client.post("/v1/uploads", headers=other)
    check_problem(refused, 422, "idempotency_key_reused")
    assert refused.headers["tus-resumable"] == "1.0.0"


async def test_the_key_of_an_upload_that_was_ended_answers_that_it_is_gone(api: Api) -> None:
    key = {"Idempotency-Key": "ended", **TUS, "Upload-Length": "10"}
    first = await api.client.post("/v1/uploads", headers=key)
    await api.client.delete(first.headers["location"], headers=TUS)
    again = await api.client.post("/v1/uploads", headers=key)
    check_problem(again, 410, "gone")


async def test_keys_of_two_tenants_and_two_protocols_do_not_meet(
    api: Api, other: httpx.AsyncClient
) -> None:
    key = {"Idempotency-Key": "shared", **TUS, "Upload-Length": "10"}
    first, second = [await who.post("/v1/uploads", headers=key) for who in (api.client, other)]
    assert first.headers["location"] != second.headers["location"]
    slot = {"size": 10, "content_type": "image/png"}
    body = await api.client.post("/v1/media", json=slot, headers={"Idempotency-Key": "shared"})
    assert body.status_code == 201

"""/storage: what a signed address lets in and out, and nothing else."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2 as httpx
import pytest
from starlette.types import Message
from tests import rows
from tests.api.conftest import Api, Body, check_problem, make_api, media_uuid

from mediamill import db, installation, signing

pytestmark = pytest.mark.anyio


def target(body: Body) -> tuple[str, dict[str, str]]:
    """Path and query of a slot's address."""
    parts = urlsplit(body["upload"]["url"])
    return parts.path, {name: values[0] for name, values in parse_qs(parts.query).items()}


def variant_url(body: Body) -> str:
    url: str = body["variants"][0]["url"]
    return url


async def send(
    api: Api, path: str, query: dict[str, str], content: Any, content_type: str = "image/png"
) -> httpx.Response:
    async with api.stranger() as stranger:
        return await stranger.put(
            path, params=query, content=content, headers={"Content-Type": content_type}
        )


async def test_a_put_as_signed_is_stored_once(api: Api) -> None:
    slot = await api.slot(b"hello")
    answer = await api.put(slot, b"hello")
    assert answer.status_code == 200
    assert answer.headers["etag"].startswith('"')
    (file,) = api.files()
    assert file.startswith(f"uploads/{api.tenant}/{media_uuid(slot)}/")
    assert (api.store.root / file).read_bytes() == b"hello"
    check_problem(await api.put(slot, b"hello"), 412, "already_written")
    check_problem(await api.put(slot, b"jello"), 412, "already_written")
    assert (api.store.root / file).read_bytes() == b"hello"


async def test_of_two_puts_at_once_one_wins_whole(api: Api) -> None:
    a, b = b"a" * 300_000, b"b" * 300_000
    slot = await api.slot(a)
    answers = await asyncio.gather(api.put(slot, a), api.put(slot, b), api.put(slot, a))
    assert sorted(answer.status_code for answer in answers) == [200, 412, 412]
    (file,) = api.files()
    assert (api.store.root / file).read_bytes() in (a, b)


async def test_a_put_without_a_length_is_a_411(api: Api) -> None:
    slot = await api.slot(b"hello")

    async def chunks() -> AsyncIterator[bytes]:
        yield b"hello"

    path, query = target(slot)
    check_problem(await send(api, path, query, chunks()), 411, "length_required")
    assert api.files() == []


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b"hell", "image/png"),
        (b"hello!", "image/png"),
        (b"", "image/png"),
        (b"hello", "image/jpeg"),
        (b"hello", "image/PNG"),
        (b"hello", "image/png; charset=utf-8"),
        (b"hello", ""),
    ],
)
async def test_another_length_or_type_is_a_403(api: Api, content: bytes, content_type: str) -> None:
    path, query = target(await api.slot(b"hello"))
    answer = await send(api, path, query, content, content_type)
    check_problem(answer, 403, "signature_invalid")
    assert api.files() == []


@pytest.mark.parametrize(
    "change",
    [
        {"signature": ""},
        {"signature": "A" * 43},
        {"signature": "\u00e9" * 43},
        {"expires": "99999999999"},
        {"expires": "0"},
        {"expires": "-1"},
        {"expires": "x"},
        {"expires": "9" * 5000},
        {"key_id": "999"},
        {"key_id": ""},
        {"key_id": "9" * 5000},
        {"key_id": "\u0661"},
        {"key_id": "01x"},
    ],
    ids=lambda change: ascii(change)[:30],
)
async def test_a_tampered_address_is_a_403(api: Api, change: dict[str, str]) -> None:
    path, query = target(await api.slot(b"hello"))
    answer = await send(api, path, query | change, b"hello")
    check_problem(answer, 403, "signature_invalid")
    get = urlsplit(variant_url(await api.ready()))
    query = {name: values[0] for name, values in parse_qs(get.query).items()}
    async with api.stranger() as stranger:
        check_problem(await stranger.get(get.path, params=query | change), 403, "signature_invalid")


async def test_a_missing_parameter_is_a_403(api: Api) -> None:
    path, query = target(await api.slot(b"hello"))
    for name in query:
        rest = {k: v for k, v in query.items() if k != name}
        check_problem(await send(api, path, rest, b"hello"), 403, "signature_invalid")


async def test_an_address_of_one_object_opens_no_other(api: Api) -> None:
    one, two = await api.slot(b"hello"), await api.slot(b"hello")
    _, query = target(one)
    path, _ = target(two)
    check_problem(await send(api, path, query, b"hello"), 403, "signature_invalid")


async def test_a_signed_method_is_that_method_only(api: Api) -> None:
    slot = await api.slot(b"hello")
    path, query = target(slot)
    ready = await api.ready()
    async with api.stranger() as stranger:
        check_problem(await stranger.get(path, params=query), 403, "signature_invalid")
        got = urlsplit(variant_url(ready))
        answer = await stranger.put(f"{got.path}?{got.query}", content=b"x")
        check_problem(answer, 403, "signature_invalid")
        for method in ("DELETE", "POST", "PATCH"):
            answer = await stranger.request(method, variant_url(ready))
            problem = check_problem(answer, 405, "method_not_allowed")
            assert "Allow" in problem["advice"]
            allowed = {m.strip() for m in answer.headers["allow"].split(",")}
            assert {"GET", "PUT", "HEAD"} <= allowed


async def test_an_expired_address_says_so(api: Api) -> None:
    grant = signing.Grant("PUT", "uploads/a/b", int(time.time()) - 2, "image/png", 5)
    path = f"/storage/{signing.sign(api.services.installation.keyring, grant)}"
    async with api.stranger() as stranger:
        answer = await stranger.put(path, content=b"hello", headers={"Content-Type": "image/png"})
        check_problem(answer, 403, "signature_expired")
        grant = signing.Grant("GET", "media/a/b", int(time.time()) - 2)
        path = f"/storage/{signing.sign(api.services.installation.keyring, grant)}"
        check_problem(await stranger.get(path), 403, "signature_expired")


@pytest.mark.parametrize(
    "messages",
    [
        [{"type": "http.request", "body": b"hel", "more_body": True}, {"type": "http.disconnect"}],
        [{"type": "http.request", "body": b"hel", "more_body": False}],
        [{"type": "http.disconnect"}],
        [{"type": "http.request", "body": b"hello, world", "more_body": False}],
    ],
    ids=["hangs up", "ends early", "sends nothing", "sends more"],
)
async def test_a_put_that_does_not_keep_its_word_leaves_nothing(
    api: Api, messages: list[Message]
) -> None:
    slot = await api.slot(b"hello")
    parts = urlsplit(slot["upload"]["url"])
    status, _, _ = await api.raw(
        "PUT",
        parts.path,
        query=parts.query.encode(),
        headers={"Content-Type": "image/png", "Content-Length": "5"},
        messages=messages,
    )
    assert status in (400, 403)
    assert api.files() == []
    assert (await api.put(slot, b"hello")).status_code == 200


async def test_a_full_disk_is_a_503_and_leaves_nothing(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = await api.slot(b"hello")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        answer = await api.put(slot, b"hello")
        check_problem(answer, 503, "scratch_full")
        assert answer.headers["retry-after"]
    assert api.files() == []
    assert (await api.put(slot, b"hello")).status_code == 200


ODD_PATHS = [
    "/storage/../../../etc/passwd",
    "/storage/media/../../x",
    "/storage/uploads/a/./b",
    "/storage//etc/passwd",
    "/storage/media//a",
    "/storage/",
    "/storage/media/a\x00b",
    "/storage/\x00",
    "/storage/MEDIA/A",
    "/storage/media/é",
    "/storage/media/a\nb",
    "/storage/media/a b",
    "/storage/.incoming/x",
    "/storage/mediamill-storage",
    "/storage/media/" + "a" * 5000,
    "/storage/" + "a/" * 3000,
    "/storage/media\\..\\x",
]


@pytest.mark.parametrize("path", ODD_PATHS, ids=lambda p: ascii(p)[:30])
@pytest.mark.parametrize("signed", [True, False])
async def test_odd_keys_never_leave_the_root(api: Api, path: str, signed: bool) -> None:
    """Not even one that we had signed ourselves."""
    before = api.files()
    outside = sorted(os.listdir(api.store.root.parent))
    key = path.removeprefix("/storage/")
    for method in ("GET", "HEAD", "PUT"):
        content_type, size = ("image/png", 5) if method == "PUT" else ("", None)
        query = "expires=9999999999&key_id=1&signature=x"
        if signed:
            verb = "GET" if method == "HEAD" else method
            grant = signing.Grant(verb, key, 9_999_999_999, content_type, size)
            query = signing.sign(api.services.installation.keyring, grant).rpartition("?")[2]
        status, headers, _ = await api.raw(
            method,
            path,
            query=query.encode(),
            headers={"Content-Type": "image/png", "Content-Length": "5"},
            messages=[{"type": "http.request", "body": b"hello", "more_body": False}],
        )
        assert status in (400, 403, 404, 405), method
        assert headers["content-type"] == "application/problem+json"
    assert api.files() == before
    assert sorted(os.listdir(api.store.root.parent)) == outside


async def test_nothing_is_readable_without_a_signature(api: Api) -> None:
    await api.ready()
    queued = await api.queued(b"private")
    async with api.stranger(api.token) as client:  # not even with the owner's key
        for file in api.files():
            for parent in (file, file.rpartition("/")[0], file.partition("/")[0], ""):
                for slash in ("", "/"):
                    answer = await client.get(f"/storage/{parent}{slash}")
                    assert answer.status_code in (403, 404)
                    assert b"private" not in answer.content
    assert queued["state"] == "queued"


@pytest.mark.parametrize("area", ["uploads", "stage"])
async def test_originals_and_staging_are_not_readable_even_when_signed(
    api: Api, area: str, tmp_path: Path
) -> None:
    slot = await api.upload(b"private")
    async with db.acquire(api.pool) as connection:
        key = await rows.column(connection, "media", "upload_key", api.tenant, media_uuid(slot))
    if area == "stage":
        key = f"stage/{api.tenant}/x.1/w8.webp"
        (tmp_path / "w8").write_bytes(b"private")
        await api.store.put(key, tmp_path / "w8")
    signed = api.store.sign_get(key, expires_at=datetime.now(UTC) + timedelta(hours=1))
    async with api.stranger() as stranger:
        check_problem(await stranger.get(signed.url), 404, "not_found")
        assert (await stranger.head(signed.url)).status_code == 404


async def test_what_is_served_has_the_type_and_hash_of_the_manifest(api: Api) -> None:
    body = await api.ready({"w8.webp": b"<script>alert(1)</script>"})
    async with api.stranger() as stranger:
        answer = await stranger.get(variant_url(body))
    assert answer.status_code == 200
    headers = answer.headers
    assert headers["content-type"] == "image/webp"
    assert headers["etag"] == f'"{body["variants"][0]["sha256"]}"'
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "private, max-age=31536000, immutable"
    assert headers["accept-ranges"] == "bytes"
    assert headers["content-length"] == "25"
    disposition = headers["content-disposition"]
    assert "filename*=UTF-8''w8.webp" in disposition  # RFC 8187
    assert 'filename="w8.webp"' in disposition  # for those who do not know it


@pytest.mark.parametrize(
    ("given", "status", "content", "content_range"),
    [
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"),
        ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=-2", 206, b"89", "bytes 8-9/10"),
        ("bytes=5-100", 206, b"56789", "bytes 5-9/10"),
        ("bytes=-100", 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=10-", 416, None, "bytes */10"),
        ("bytes=99-100", 416, None, "bytes */10"),
    ],
)
async def test_a_range_is_served(
    api: Api, given: str, status: int, content: bytes | None, content_range: str
) -> None:
    body = await api.ready()
    async with api.stranger() as stranger:
        answer = await stranger.get(variant_url(body), headers={"Range": given})
    assert answer.status_code == status
    assert answer.headers["content-range"] == content_range
    if content is not None:
        assert answer.content == content
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_a_head_tells_without_sending(api: Api) -> None:
    body = await api.ready()
    async with api.stranger() as stranger:
        answer = await stranger.head(variant_url(body))
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == "10"
    assert answer.headers["content-type"] == "image/webp"


async def test_a_copy_that_is_known_is_a_304(api: Api) -> None:
    body = await api.ready()
    async with api.stranger() as stranger:
        first = await stranger.get(variant_url(body))
        same = await stranger.get(
            variant_url(body), headers={"If-None-Match": first.headers["etag"]}
        )
        assert (same.status_code, same.content) == (304, b"")
        assert same.headers["etag"] == first.headers["etag"]
        answer = await stranger.get(variant_url(body), headers={"If-None-Match": '"another"'})
        assert answer.status_code == 200


async def test_a_rotated_key_leaves_old_addresses_good_for_the_overlap(
    database: str, tmp_path: Path
) -> None:
    async with make_api(database, tmp_path) as api:
        slot = await api.slot(b"hello")
        old = variant_url(await api.ready())
        async with db.acquire(api.pool) as connection:
            await installation.rotate_signing_key(connection, overlap_seconds=3600)
            await api.services.installation.refresh(connection)
        fresh = variant_url(await api.ready())
        assert "key_id=1" in old
        assert "key_id=2" in fresh
        assert (await api.put(slot, b"hello")).status_code == 200
        async with api.stranger() as stranger:
            assert (await stranger.get(old)).status_code == 200
            assert (await stranger.get(fresh)).status_code == 200
            async with db.acquire(api.pool) as connection:
                await connection.execute(
                    "UPDATE secrets SET retires_at = now() WHERE retires_at IS NOT NULL"
                )
                await api.services.installation.refresh(connection)
            check_problem(await stranger.get(old), 403, "signature_invalid")
            assert (await stranger.get(fresh)).status_code == 200


async def test_browsers_may_ask_first(api: Api) -> None:
    slot = await api.slot(b"hello")
    async with api.stranger() as stranger:
        answer = await stranger.options(
            slot["upload"]["url"],
            headers={"Origin": "https://shop.example", "Access-Control-Request-Method": "PUT"},
        )
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "PUT" in answer.headers["access-control-allow-methods"]
    assert "content-type" in answer.headers["access-control-allow-headers"].lower()


async def test_a_browser_may_read_the_answer_to_its_put(api: Api) -> None:
    """Otherwise a script sees a network error for an upload that went well."""
    slot = await api.slot(b"hello")
    answer = await api.put(slot, b"hello", Origin="https://shop.example")
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "etag" in answer.headers["access-control-expose-headers"].lower()


async def test_bytes_that_come_after_the_deletion_are_not_kept(api: Api) -> None:
    slot = await api.slot(b"hello")
    assert (await api.client.delete(f"/v1/media/{slot['id']}")).status_code == 202
    from mediamill.maintenance import Maintenance

    duties = Maintenance(api.services.settings, api.pool, api.store)
    erase = next(duty for duty in duties.duties if duty.name == "erase")
    await duties.once(erase)
    check_problem(await api.put(slot, b"hello"), 410, "gone")
    assert api.files() == []

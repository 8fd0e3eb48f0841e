"""The IETF's draft of resumable uploads, over the same rows as tus."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.api.conftest import Api, check_problem, make_api
from tests.api.test_uploads import TUS, create, jobs_of, media_path, stored

pytestmark = pytest.mark.anyio

TEN = b"abcdefghij"
PARTIAL = {"Content-Type": "application/partial-upload"}


@pytest.fixture
async def draft(shared_database: str, tmp_path: Path) -> AsyncIterator[Api]:
    async with make_api(shared_database, tmp_path, draft_resumable_uploads=True) as api:
        yield api


async def begin(api: Api, data: bytes, complete: str, **headers: str) -> httpx.Response:
    given = {"Upload-Complete": complete, "Content-Type": "image/png", **headers}
    return await api.client.post("/v1/uploads", content=data, headers=given)


async def patch(
    api: Api, at: str, offset: int, data: bytes, complete: str, **headers: str
) -> httpx.Response:
    given = {**PARTIAL, "Upload-Offset": str(offset), "Upload-Complete": complete, **headers}
    return await api.client.patch(at, content=data, headers=given)


async def head(api: Api, at: str) -> httpx.Response:
    return await api.client.head(at, headers={"Upload-Draft-Interop-Version": "8"})


async def test_one_request_is_an_upload(draft: Api) -> None:
    name = 'attachment; filename="a.png"'
    made = await begin(draft, TEN, "?1", **{"Content-Disposition": name})
    assert (made.status_code, made.headers["upload-complete"]) == (201, "?1")
    assert made.headers["upload-offset"] == "10"
    at = made.headers["location"]
    assert await stored(draft, at) == TEN
    body = (await draft.client.get(made.headers["mediamill-media"])).json()
    assert (body["state"], body["filename"], body["content_type"]) == (
        "queued", "a.png", "image/png",
    )  # fmt: skip


@pytest.mark.parametrize("known", [True, False])
async def test_an_upload_goes_on_where_it_stands(draft: Api, known: bool) -> None:
    length = {"Upload-Length": "10"} if known else {}
    made = await begin(draft, b"abc", "?0", **length)
    assert (made.status_code, made.headers["upload-complete"]) == (201, "?0")
    at = made.headers["location"]
    state = await head(draft, at)
    assert (state.status_code, state.headers["upload-offset"]) == (204, "3")
    assert state.headers["upload-complete"] == "?0"
    assert state.headers.get("upload-length") == ("10" if known else None)
    assert state.headers["cache-control"] == "no-store"
    assert "max-size=" in state.headers["upload-limit"]

    wrong = await patch(draft, at, 5, b"xyz", "?0")
    assert wrong.status_code == 409
    problem = wrong.json()
    assert problem["type"].endswith("#mismatching-upload-offset")
    assert (problem["expected-offset"], problem["provided-offset"]) == (3, 5)
    more = await patch(draft, at, 3, b"defg", "?0")
    assert (more.status_code, more.headers["upload-offset"]) == (204, "7")
    last = await patch(draft, at, 7, b"hij", "?1")
    assert (last.status_code, last.headers["upload-complete"]) == (200, "?1")
    assert await stored(draft, at) == TEN
    assert await jobs_of(draft, at) == 1


async def test_an_end_that_comes_too_soon_leaves_the_upload_open(draft: Api) -> None:
    made = await begin(draft, b"abc", "?0", **{"Upload-Length": "10"})
    at = made.headers["location"]

    async def unmeasured() -> AsyncIterator[bytes]:
        yield b"de"

    given = {**PARTIAL, "Upload-Offset": "3", "Upload-Complete": "?1"}
    soon = await draft.client.patch(at, content=unmeasured(), headers=given)
    check_problem(soon, 400, "malformed_request")
    assert (await head(draft, at)).headers["upload-offset"] == "5"
    assert (await patch(draft, at, 5, b"f" * 6, "?1")).status_code == 400
    check_problem(await patch(draft, at, 5, b"f" * 6, "?0"), 413, "payload_too_large")
    assert (await patch(draft, at, 5, TEN[5:], "?1")).status_code == 200
    assert await stored(draft, at) == TEN


async def test_what_cannot_be_meant_is_refused(draft: Api) -> None:
    made = await begin(draft, b"abc", "?0")
    at = made.headers["location"]
    check_problem(await patch(draft, at, 3, b"d", "1"), 400, "malformed_request")
    plain = await patch(draft, at, 3, b"d", "?0", **{"Content-Type": "text/plain"})
    check_problem(plain, 415, "unsupported_media_type")
    check_problem(await begin(draft, b"", "?1"), 422, "empty_input")
    async with draft.stranger() as stranger:
        answer = await stranger.post("/v1/uploads", headers={"Upload-Complete": "?1"})
        check_problem(answer, 401, "unauthenticated")
    gone = {"Upload-Complete": "?0"}
    assert (await draft.client.delete(at, headers=gone)).status_code == 204
    assert (await head(draft, at)).status_code == 410
    check_problem(await draft.client.get(media_path(at)), 404, "not_found")


async def test_tus_is_spoken_beside_it(draft: Api) -> None:
    at = await create(draft)
    assert (await draft.client.head(at, headers=TUS)).headers["tus-resumable"] == "1.0.0"
    state = await head(draft, at)
    assert (state.status_code, state.headers["upload-length"]) == (204, "10")


async def test_it_is_off_unless_it_is_wanted(api: Api) -> None:
    answer = await begin(api, TEN, "?1")
    check_problem(answer, 412, "precondition_failed")


async def test_a_creation_that_is_repeated_with_its_key_makes_one_upload(draft: Api) -> None:
    key = {"Idempotency-Key": "draft"}
    first = await begin(draft, TEN, "?1", **key)
    again = await begin(draft, TEN, "?1", **key)
    assert again.headers["idempotent-replayed"] == "true"
    for answer in (first, again):
        assert (answer.status_code, answer.headers["upload-complete"]) == (201, "?1")
    assert first.headers["location"] == again.headers["location"]
    assert await jobs_of(draft, first.headers["location"]) == 1
    check_problem(await begin(draft, TEN, "?0", **key), 422, "idempotency_key_reused")


async def test_more_for_a_complete_upload_is_refused_in_the_drafts_words(draft: Api) -> None:
    at = (await begin(draft, TEN, "?1")).headers["location"]
    for offset, data in ((10, b"x"), (0, TEN), (10, b"")):
        refused = await patch(draft, at, offset, data, "?1")
        assert refused.status_code == 400
        assert refused.json()["type"].endswith("#completed-upload")
    assert await stored(draft, at) == TEN
    assert await jobs_of(draft, at) == 1


async def test_lengths_that_do_not_fit_each_other_are_refused(draft: Api) -> None:
    made = await begin(draft, b"abc", "?1", **{"Upload-Length": "10"})
    assert made.status_code == 400
    assert made.json()["type"].endswith("#inconsistent-upload-length")
    assert "location" not in made.headers
    at = (await begin(draft, b"abc", "?0", **{"Upload-Length": "10"})).headers["location"]
    for data, complete, more in (
        (b"de", "?1", {}),
        (TEN[3:], "?1", {"Upload-Length": "11"}),
        (b"de", "?0", {"Upload-Length": "11"}),
    ):
        refused = await patch(draft, at, 3, data, complete, **more)
        assert refused.status_code == 400
        assert refused.json()["type"].endswith("#inconsistent-upload-length")
    state = await head(draft, at)
    assert (state.headers["upload-offset"], state.headers["upload-length"]) == ("3", "10")
    wrong = await patch(draft, at, 5, b"de", "?1", **{"Upload-Length": "11"})
    assert (wrong.status_code, wrong.json()["expected-offset"]) == (409, 3)
    assert (await patch(draft, at, 3, TEN[3:], "?1")).status_code == 200
    assert await stored(draft, at) == TEN


async def test_it_is_asked_about_and_ended_without_a_version(draft: Api) -> None:
    """As it will be when the draft is done."""
    at = (await begin(draft, b"abc", "?0")).headers["location"]
    state = await draft.client.head(at)
    assert (state.status_code, state.headers["upload-offset"]) == (204, "3")
    assert (await draft.client.delete(at)).status_code == 204
    assert (await draft.client.head(at)).status_code == 410

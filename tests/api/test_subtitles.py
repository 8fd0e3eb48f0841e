"""Subtitles beside a film by the API: taken, shown, replaced, taken away, refused with a reason."""

from __future__ import annotations

import httpx2 as httpx
import pytest
from tests import rows
from tests.api.conftest import Api, check_problem

from mediamill import db, ids, sidecars

pytestmark = pytest.mark.anyio

OLD_WINDOWS = b"1\r\n00:00:01,000 --> 00:00:03,000\r\nIt\x92s a caf\xe9\r\n"
TYPE = {"Content-Type": "application/x-subrip"}


async def test_a_file_is_taken_shown_replaced_and_taken_away(api: Api) -> None:
    slot = await api.slot()
    path = f"/v1/media/{slot['id']}/subtitles"
    answer = await api.client.put(f"{path}/EN", content=OLD_WINDOWS, headers=TYPE)
    assert answer.status_code == 200, answer.text
    first = answer.json()
    assert (first["language"], first["charset"]) == ("en", "windows-1252")
    assert (first["format"], first["cues"], first["label"]) == ("srt", 1, None)
    webvtt = "WEBVTT\n\n00:01.000 --> 00:02.000\nÀ\n\n00:03.000 --> 00:04.000\nB\n".encode()
    answer = await api.client.put(
        f"{path}/en?label=English%20(SDH)",
        content=webvtt,
        headers={"Content-Type": "text/vtt; charset=utf-8"},
    )
    assert (answer.json()["format"], answer.json()["cues"]) == ("webvtt", 2)
    listed = (await api.client.get(path)).json()["data"]
    assert [(s["language"], s["label"], s["bytes"]) for s in listed] == [
        ("en", "English (SDH)", len(webvtt))
    ]
    async with api.stranger(await api.new_key(await other_tenant(api))) as stranger:
        check_problem(await stranger.get(path), 404, "not_found")
        answer = await stranger.put(f"{path}/en", content=webvtt, headers=TYPE)
        check_problem(answer, 404, "not_found")
    assert (await api.client.delete(f"{path}/en")).status_code == 204
    check_problem(await api.client.delete(f"{path}/en"), 404, "not_found")
    assert (await api.client.get(path)).json()["data"] == []


async def other_tenant(api: Api) -> str:
    async with db.acquire(api.pool) as connection:
        return await rows.new_tenant(connection)


@pytest.mark.parametrize(
    ("content", "content_type", "status", "code"),
    [
        (b"", "text/vtt", 422, "empty_input"),
        (b"no cues", "text/plain", 422, "unsupported_format"),
        (OLD_WINDOWS, "application/json", 415, "unsupported_media_type"),
        (OLD_WINDOWS, "text/plain; charset=utf-8", 422, "unknown_encoding"),
        (OLD_WINDOWS, 'text/plain; charset="rot13"', 422, "unknown_encoding"),
        (OLD_WINDOWS.replace(b"caf\xe9", b"\xcf\xf0\xe8\xe2"), "text/srt", 422, "unknown_encoding"),
        (b"1" * (sidecars.MAX_BYTES + 1), "text/plain", 413, "payload_too_large"),
    ],
)
async def test_what_cannot_be_read_is_refused_at_the_door(
    api: Api, content: bytes, content_type: str, status: int, code: str
) -> None:
    path = f"/v1/media/{(await api.slot())['id']}/subtitles"
    answer = await api.client.put(
        f"{path}/en", content=content, headers={"Content-Type": content_type}
    )
    check_problem(answer, status, code)
    assert (await api.client.get(path)).json()["data"] == []


async def test_languages_labels_and_how_many_have_limits(api: Api) -> None:
    path = f"/v1/media/{(await api.slot())['id']}/subtitles"

    async def put(language: str, query: str = "") -> httpx.Response:
        return await api.client.put(f"{path}/{language}{query}", content=OLD_WINDOWS, headers=TYPE)

    for language in ("e", "en_US", "en-", "1", "x" * 40):
        check_problem(await put(language), 404, "not_found")
    for query in ("?label=", f"?label={'x' * 81}", "?label=a%0Ab", "?label=%00"):
        check_problem(await put("en", query), 422, "invalid_request")
    check_problem(await put("en", "?labels=x"), 400, "unknown_parameter")
    for number in range(sidecars.MAX_LANGUAGES):
        assert (await put(f"en-x{number:02}")).status_code == 200
    problem = check_problem(await put("en-zz"), 422, "resource_limit")
    assert problem["limit"]["allowed"] == sidecars.MAX_LANGUAGES
    assert (await put("en-x00")).status_code == 200  # in place of one that is there


async def test_they_go_with_the_media(api: Api) -> None:
    body = await api.ready()
    path = f"/v1/media/{body['id']}/subtitles"
    answer = await api.client.put(f"{path}/en", content=OLD_WINDOWS, headers=TYPE)
    assert answer.status_code == 200
    await api.client.delete(f"/v1/media/{body['id']}")
    async with db.acquire(api.pool) as connection:
        count = await connection.fetchval(
            "SELECT count(*) FROM sidecars WHERE media_id = $1", ids.decode(ids.MEDIA, body["id"])
        )
    assert count == 0
    answer = await api.client.put(f"{path}/en", content=OLD_WINDOWS, headers=TYPE)
    check_problem(answer, 410, "gone")
    check_problem(await api.client.get(path), 410, "gone")

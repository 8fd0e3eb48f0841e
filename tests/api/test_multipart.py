"""Multipart uploads, by our own API and by the routes of a Companion, as a browser sends them."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import httpx2 as httpx
import pytest
from tests import rows
from tests.api.conftest import Api, Body, check_problem

from mediamill import db, ids, signing, tus
from mediamill.maintenance import Maintenance

pytestmark = pytest.mark.anyio

PART = 5 << 20
WHOLE = b"a" * PART + b"b" * PART + b"the end"
PIECES = [WHOLE[:PART], WHOLE[PART : 2 * PART], WHOLE[2 * PART :]]
ORIGIN = {"Origin": "https://shop.test"}


async def opened(api: Api, size: int = len(WHOLE), **more: Any) -> Body:
    wanted = {"size": size, "filename": "a.mp4", **more}
    answer = await api.client.post("/v1/uploads/multipart", json=wanted)
    assert answer.status_code == 201, answer.text
    body: Body = answer.json()
    return body


async def send(api: Api, signed: Body, data: bytes, **headers: str) -> httpx.Response:
    """The signed request of a part, as a browser of another origin sends it."""
    given = {**signed.get("headers", {}), **ORIGIN, **headers}
    given.pop("Content-Length", None)
    if signed["url"].startswith(rows.PUBLIC_URL):
        async with api.stranger() as stranger:
            return await stranger.put(signed["url"], content=data, headers=given)
    async with httpx.AsyncClient() as client:
        return await client.put(signed["url"], content=data, headers=given)


async def sign(api: Api, body: Body, *numbers: int) -> list[Body]:
    answer = await api.client.post(body["links"]["parts"], json={"numbers": list(numbers)})
    assert answer.status_code == 200, answer.text
    signed: list[Body] = answer.json()["parts"]
    return signed


async def complete(api: Api, body: Body, etags: dict[int, str] | None) -> httpx.Response:
    parts = None if etags is None else [{"number": n, "etag": e} for n, e in etags.items()]
    return await api.client.post(body["links"]["complete"], json={"parts": parts})


async def stored(api: Api, upload: str) -> bytes:
    found_id = ids.decode(ids.UPLOAD, upload)
    assert found_id is not None
    async with db.acquire(api.pool) as connection:
        found = await tus.find(connection, api.tenant, found_id)
    assert found.version is not None
    store = api.services.storage
    return b"".join([piece async for piece in store.read(found.key, found.version)])


async def jobs_of(api: Api, upload: str) -> int:
    statement = "SELECT count(*) FROM jobs WHERE media_id = $1 AND role = 'main'"
    return int(await api.pool.fetchval(statement, ids.decode(ids.UPLOAD, upload)))


async def test_parts_in_any_order_become_one_original(both: Api) -> None:
    """up-05: a missing or wrong ETag names its part and leaves the upload open."""
    api = both
    body = await opened(api)
    assert (body["part_bytes"], body["part_count"], body["size"]) == (PART, 3, len(WHOLE))
    assert (await api.client.get(body["links"]["media"])).json()["state"] == "awaiting_upload"
    signed = {part["number"]: part for part in await sign(api, body, 3, 1, 2)}
    etags = {}
    for number in (3, 1):
        answer = await send(api, signed[number], PIECES[number - 1])
        assert answer.status_code == 200, answer.text
        assert "etag" in answer.headers["access-control-expose-headers"].lower()
        etags[number] = answer.headers["etag"]

    for wrong in (etags, {**etags, 2: '"00000000000000000000000000000000"'}, {}):
        refused = check_problem(await complete(api, body, wrong), 409, "part_mismatch")
        if wrong:
            assert [fault["pointer"] for fault in refused["errors"]] == ["/parts/2"]
    listed = (await api.client.get(body["links"]["parts"])).json()["parts"]
    assert [(part["number"], part["bytes"]) for part in listed] == [(1, PART), (3, 7)]
    assert {part["etag"] for part in listed} == set(etags.values())

    # A client that lost all it knew sends what is missing, and one part again.
    for number in (2, 1):
        answer = await send(api, signed[number], PIECES[number - 1])
        etags[number] = answer.headers["etag"]
    swapped = {**etags, 1: etags[2], 2: etags[1]}
    refused = check_problem(await complete(api, body, swapped), 409, "part_mismatch")
    assert [fault["pointer"] for fault in refused["errors"]] == ["/parts/1", "/parts/2"]
    done = await complete(api, body, etags)
    assert done.status_code == 202, done.text
    assert done.headers["location"] == body["links"]["media"]
    again = await complete(api, body, etags)
    assert (again.status_code, again.json()) == (202, done.json())
    assert await jobs_of(api, body["id"]) == 1
    assert await stored(api, body["id"]) == WHOLE
    late = await send(api, signed[1], PIECES[1])
    assert late.status_code in (404, 410), "a part came in after the end"
    check_problem(
        await api.client.post(body["links"]["parts"], json={"numbers": [1]}), 409, "wrong_state"
    )


async def test_a_part_has_exactly_the_length_that_was_signed(both: Api) -> None:
    api = both
    body = await opened(api)
    first, last = await sign(api, body, 1, 3)
    for signed, data in ((first, PIECES[0] + b"x"), (first, b"short"), (last, b"longer than 7")):
        assert (await send(api, signed, data)).status_code == 403
    assert (await api.client.get(body["links"]["parts"])).json()["parts"] == []
    other = {**first, "url": first["url"].replace("part=1", "part=2").replace(
        "partNumber=1", "partNumber=2")}  # fmt: skip
    assert (await send(api, other, PIECES[0])).status_code == 403
    for numbers in ([0], [4], [10_001]):
        answer = await api.client.post(body["links"]["parts"], json={"numbers": numbers})
        check_problem(answer, 422, "invalid_request")


async def test_many_completions_at_once_make_one_job(both: Api) -> None:
    api = both
    body = await opened(api, size=7)
    (signed,) = await sign(api, body, 1)
    await send(api, signed, b"the end")
    answers = await asyncio.gather(*(complete(api, body, None) for _ in range(8)))
    assert {answer.status_code for answer in answers} == {202}, [a.text for a in answers]
    assert await jobs_of(api, body["id"]) == 1
    assert await stored(api, body["id"]) == b"the end"


async def test_a_completion_whose_last_step_was_lost_is_repeated(
    both: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts are joined, and the API died before it said so."""
    api = both
    body = await opened(api, size=7)
    (signed,) = await sign(api, body, 1)
    etag = (await send(api, signed, b"the end")).headers["etag"]
    transfer = await api.services.multiparts.get(api.tenant, ids.decode(ids.UPLOAD, body["id"]))  # type: ignore[arg-type]
    parts = await api.services.multiparts.parts(transfer)
    await api.services.storage.complete_parts(transfer.key, transfer.parts, parts, size=7)
    assert await jobs_of(api, body["id"]) == 0
    assert (await complete(api, body, {1: etag})).status_code == 202
    assert await jobs_of(api, body["id"]) == 1


async def test_an_upload_that_is_given_up_leaves_no_part(both: Api) -> None:
    api = both
    for how in ("abort", "delete", "expire"):
        body = await opened(api, size=7)
        (signed,) = await sign(api, body, 1)
        await send(api, signed, b"the end")
        if how == "abort":
            answer = await api.client.post(f"{body['links']['self']}/abort")
            assert answer.status_code == 204, answer.text
        elif how == "delete":
            await api.client.delete(body["links"]["media"])
        else:
            await api.pool.execute(
                "UPDATE transfers SET expires_at = now() - interval '1 hour' WHERE id = $1",
                ids.decode(ids.UPLOAD, body["id"]),
            )
        duties = Maintenance(api.services.settings, api.pool, api.services.storage)
        for name in ("sweep_transfers", "erase"):
            await duties.once(next(d for d in duties.duties if d.name == name))
        assert await api.services.storage.sweep(older_than_seconds=0, now=9e9) == 0
        assert (await send(api, signed, b"the end")).status_code in (404, 410)
        assert (await complete(api, body, None)).status_code == 410
        assert await api.services.storage.list(f"uploads/{api.tenant}") == []
        assert await jobs_of(api, body["id"]) == 0


async def test_uploads_of_others_are_not_seen(api: Api, other: httpx.AsyncClient) -> None:
    body = await opened(api)
    tus_made = await api.client.post(
        "/v1/uploads", headers={"Tus-Resumable": "1.0.0", "Upload-Length": "5"}
    )
    for path in (body["links"]["self"], f"/v1/uploads/{ids.encode(ids.UPLOAD, ids.new())}"):
        check_problem(await other.get(f"{path}/parts"), 404, "not_found")
        check_problem(await other.post(f"{path}/abort"), 404, "not_found")
        for last, wanted in (("parts", {"numbers": [1]}), ("complete", {})):
            check_problem(await other.post(f"{path}/{last}", json=wanted), 404, "not_found")
    check_problem(await api.client.get(f"{tus_made.headers['location']}/parts"), 404, "not_found")
    async with api.stranger() as stranger:
        check_problem(await stranger.get(body["links"]["parts"]), 401, "unauthenticated")
    chunk = {
        "Tus-Resumable": "1.0.0",
        "Upload-Offset": "0",
        "Content-Type": "application/offset+octet-stream",
    }
    for answer in (
        await api.client.patch(body["links"]["self"], content=b"x", headers=chunk),
        await api.client.delete(body["links"]["self"], headers=chunk),
    ):
        check_problem(answer, 404, "not_found")
    assert (await api.client.head(body["links"]["self"], headers=chunk)).status_code == 404


# As Uppy's S3 plugin speaks to a Companion.


async def token(api: Api, **wanted: Any) -> str:
    answer = await api.client.post("/v1/upload-tokens", json=wanted)
    assert answer.status_code == 201, answer.text
    url: str = answer.json()["companion_url"]
    assert url.startswith(f"{rows.PUBLIC_URL}/uppy/")
    return url.removeprefix(rows.PUBLIC_URL)


async def test_a_browser_uploads_in_parts_with_a_token(both: Api) -> None:
    api = both
    base = f"{await token(api)}/s3"
    async with api.stranger() as browser:
        browser.headers.update(ORIGIN)
        asked = await browser.options(
            f"{base}/multipart",
            headers={"Access-Control-Request-Method": "POST"},
        )
        assert asked.status_code == 204
        assert asked.headers["access-control-allow-origin"] == "*"
        file = {"filename": "ä ö.mp4", "type": "video/mp4", "metadata": {"name": "x"}}
        made = (await browser.post(f"{base}/multipart", json=file)).json()
        at = f"{base}/multipart/{made['uploadId']}"
        key = {"key": made["key"]}
        parts = []
        for number, piece in enumerate(PIECES, start=1):
            signed = (await browser.get(f"{at}/{number}", params=key)).json()
            stored_part = await send(api, signed, piece)
            assert stored_part.status_code == 200, stored_part.text
            parts.append({"PartNumber": number, "ETag": stored_part.headers["etag"]})
        listed = (await browser.get(at, params=key)).json()
        assert [(p["PartNumber"], p["Size"]) for p in listed] == [(1, PART), (2, PART), (3, 7)]
        blind = [{k: v for k, v in part.items() if k != "ETag"} for part in parts]
        refused = await browser.post(f"{at}/complete", params=key, json={"parts": blind})
        assert refused.status_code == 409
        assert len(refused.json()["errors"]) == 3
        assert refused.headers["access-control-allow-origin"] == "*"
        done = await browser.post(f"{at}/complete", params=key, json={"parts": parts})
        assert done.status_code == 200, done.text
        assert done.json()["key"] == made["key"]
        again = await browser.post(f"{at}/complete", params=key, json={"parts": parts})
        assert again.json() == done.json()
        wrong_key = await browser.get(at, params={"key": "uploads/other"})
        assert wrong_key.status_code == 404
    shown = (await api.client.get(done.json()["location"])).json()
    assert (shown["filename"], shown["size"], shown["state"]) == ("ä ö.mp4", len(WHOLE), "queued")
    assert await stored(api, made["uploadId"]) == WHOLE
    assert await jobs_of(api, made["uploadId"]) == 1


async def test_a_browser_gives_up_and_nothing_is_left(both: Api) -> None:
    api = both
    base = f"{await token(api)}/s3"
    async with api.stranger() as browser:
        made = (await browser.post(f"{base}/multipart", json={"filename": "a.mp4"})).json()
        at = f"{base}/multipart/{made['uploadId']}"
        signed = (await browser.get(f"{at}/1")).json()
        assert (await send(api, signed, b"x")).status_code == 200
        assert (await browser.delete(at)).status_code == 200
        assert (await browser.get(at)).status_code == 410
    assert await api.services.storage.sweep(older_than_seconds=0, now=9e9) == 0


async def test_a_part_of_unknown_length_has_a_limit_where_we_store_it(api: Api) -> None:
    base = f"{await token(api)}/s3"
    async with api.stranger() as browser:
        made = (await browser.post(f"{base}/multipart", json={"filename": "a.mp4"})).json()
        signed = (await browser.get(f"{base}/multipart/{made['uploadId']}/1")).json()
    assert (await send(api, signed, b"x" * (PART + 1))).status_code == 403
    more = {**signed, "url": signed["url"].replace(f"most={PART}", f"most={2 * PART}")}
    assert (await send(api, more, b"x" * (PART + 1))).status_code == 403
    assert (await send(api, signed, b"x" * PART)).status_code == 200


async def test_a_small_file_of_a_browser_is_one_signed_put(both: Api) -> None:
    api = both
    base = f"{await token(api)}/s3"
    async with api.stranger() as browser:
        query = {"filename": "a.png", "type": "image/png"}
        unknown = await browser.get(f"{base}/params", params=query)
        assert (unknown.status_code, unknown.json()["code"]) == (422, "invalid_request")
        signed = (
            await browser.get(f"{base}/params", params={**query, "metadata[size]": "5"})
        ).json()
    assert signed["method"] == "PUT"
    assert (await send(api, signed, b"bytes")).status_code == 200
    done = await api.client.post(f"/v1/media/{signed['media']}/complete")
    assert done.status_code == 202


# As it speaks S3 itself, each request signed by us.


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, text
    return match[1]


async def signing_url(api: Api) -> str:
    answer = await api.client.post("/v1/upload-tokens", json={})
    url: str = answer.json()["sign_url"]
    return url.removeprefix(rows.PUBLIC_URL)


async def test_a_browser_that_speaks_s3_uploads_in_parts(both: Api) -> None:
    api = both
    at = await signing_url(api)
    async with api.stranger() as browser:
        browser.headers.update(ORIGIN)

        async def sign(method: str, **more: Any) -> Any:
            answer = await browser.post(at, json={"method": method, "expiresIn": 60, **more})
            assert answer.status_code == 200, answer.text
            assert answer.headers["access-control-allow-origin"] == "*"
            return answer.json()

        wish = "0b1d3c6e-6a3c-4a34-9f6b-b3a9d2f1c111-ä ö.mp4"
        begun = await sign("POST", key=wish)
        key = begun["key"]
        assert key.startswith("uploads/")
        for _ in range(2):  # its own retries make nothing new
            first = await browser.post(begun["url"], headers={"Content-Type": "video/mp4"})
            assert first.headers["content-type"] == "application/xml"
        upload = found("<UploadId>(upl_[0-9a-z]{26})</UploadId>", first.text)
        named = {"key": key, "uploadId": upload}
        etags = []
        for number, piece in enumerate(PIECES, start=1):
            signed = await sign("PUT", **named, partNumber=number)
            sent = await send(api, {"headers": {}, **signed}, piece)
            assert sent.status_code == 200, sent.text
            etags.append(sent.headers["etag"].strip('"'))
        listed = (await browser.get((await sign("GET", **named))["url"])).text
        assert re.findall("<PartNumber>([0-9]+)<", listed) == ["1", "2", "3"]

        def whole(*tags: str) -> str:
            parts = "".join(
                f"<Part><PartNumber>{n}</PartNumber><ETag>{tag}</ETag></Part>"
                for n, tag in enumerate(tags, start=1)
            )
            return f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>"

        end = (await sign("POST", **named))["url"]
        for body, status in (
            (whole(*etags[:2], "other"), 409),
            (whole(etags[0], etags[2]), 409),
            (whole(), 409),
            ("<CompleteMultipartUpload><Part/></CompleteMultipartUpload>", 400),
            ("<CompleteMultipartUpload>", 400),
            ('<!DOCTYPE x [<!ENTITY a "1">]>' + whole(*etags), 400),
            ("x" * (2 << 20), 413),
        ):
            refused = await browser.post(end, content=body)
            assert refused.status_code == status, refused.text
        spaced = whole(*etags).replace(
            "<CompleteMultipartUpload>",
            '<CompleteMultipartUpload xmlns="http://s3.amazonaws.com/doc/2006-03-01/">',
        )
        answers = [await browser.post(end, content=body) for body in (whole(*etags), spaced)]
        for done in answers:
            assert done.status_code == 200, done.text
            assert f"<Key>{key}</Key>" in done.text
    location = found("<Location>(.+)</Location>", answers[0].text)
    path = location.removeprefix(rows.PUBLIC_URL)
    shown = (await api.client.get(path)).json()
    assert (shown["filename"], shown["size"], shown["state"]) == ("ä ö.mp4", len(WHOLE), "queued")
    assert await stored(api, upload) == WHOLE
    assert await jobs_of(api, upload) == 1


async def test_a_browser_that_speaks_s3_gives_up(both: Api) -> None:
    api = both
    at = await signing_url(api)
    async with api.stranger() as browser:
        begun = (await browser.post(at, json={"method": "POST", "key": "a.mp4", "size": 9})).json()
        upload = found("(upl_[0-9a-z]{26})", begun["url"])
        named = {"key": begun["key"], "uploadId": upload}
        part = {"method": "PUT", **named, "partNumber": 1}
        signed = (await browser.post(at, json=part)).json()
        assert (await send(api, {"headers": {}, **signed}, b"123456789")).status_code == 200
        end = (await browser.post(at, json={"method": "DELETE", **named})).json()
        assert (await browser.delete(end["url"])).status_code == 204
        assert (await browser.get(end["url"])).status_code == 410


async def test_a_whole_file_is_signed_for_its_size(both: Api) -> None:
    api = both
    at = await signing_url(api)
    wish = {"method": "PUT", "key": "a.png", "contentType": "image/png"}
    async with api.stranger() as browser:
        unknown = await browser.post(at, json=wish)
        assert (unknown.status_code, unknown.json()["code"]) == (422, "invalid_request")
        empty = await browser.post(at, json={**wish, "size": 0})
        assert (empty.status_code, empty.json()["code"]) == (422, "empty_input")
        signed = (await browser.post(at, json={**wish, "size": 5})).json()
    assert (await send(api, signed, b"longer")).status_code == 403
    assert (await send(api, signed, b"bytes")).status_code == 200
    done = await api.client.post(f"/v1/media/{signed['media']}/complete")
    assert done.status_code == 202


@pytest.mark.parametrize(
    "asked",
    [
        {"method": "PATCH"},
        {"method": "GET"},
        {"method": "DELETE"},
        {"method": "PUT", "partNumber": 1},
        {"method": "POST", "partNumber": 1, "uploadId": "OWN"},
        {"method": "PUT", "partNumber": 0, "uploadId": "OWN"},
        {"method": "PUT", "partNumber": 10_001, "uploadId": "OWN"},
        {"method": "PUT", "partNumber": 1, "uploadId": "OWN", "key": "uploads/other"},
        {"method": "PUT", "partNumber": 1, "uploadId": "upl_" + "0" * 26},
        {"method": "GET", "uploadId": "x"},
        {"method": "POST", "key": ""},
        {"method": "POST", "key": 7},
        {},
    ],
    ids=str,
)
async def test_what_is_no_request_of_an_upload_is_not_signed(
    api: Api, asked: dict[str, Any]
) -> None:
    at = await signing_url(api)
    async with api.stranger() as browser:
        begun = (await browser.post(at, json={"method": "POST", "key": "a.mp4"})).json()
        upload = found("(upl_[0-9a-z]{26})", begun["url"])
        body = {"key": begun["key"], **asked}
        if asked.get("uploadId") == "OWN":
            body["uploadId"] = upload
        answer = await browser.post(at, json=body)
        assert answer.status_code in (404, 422), answer.text
        put = await browser.put(begun["url"])
        assert put.status_code == 405


async def test_another_tenants_upload_is_not_signed_for(api: Api, other: httpx.AsyncClient) -> None:
    theirs = (await other.post("/v1/upload-tokens", json={})).json()["sign_url"]
    at = await signing_url(api)
    async with api.stranger() as browser:
        begun = (await browser.post(theirs, json={"method": "POST", "key": "a.mp4"})).json()
        upload = found("(upl_[0-9a-z]{26})", begun["url"])
        part = {"method": "PUT", "key": begun["key"], "uploadId": upload, "partNumber": 1}
        assert (await browser.post(at, json=part)).status_code == 404
        assert (await browser.post(theirs, json=part)).status_code == 200
        here = begun["url"].split("?")[0].replace(theirs.split("/")[-3], at.split("/")[-3])
        assert (await browser.get(here)).status_code == 404


@pytest.mark.parametrize("change", ["forged", "expired", "cut", "foreign", "empty"])
async def test_a_token_that_is_not_ours_is_refused(api: Api, change: str) -> None:
    good = (await token(api)).rpartition("/")[2]
    keyring = api.services.installation.keyring

    def sealed(ring: signing.Keyring, **more: Any) -> str:
        content = {"t": api.tenant, "x": int(time.time()) + 60, "r": "web", "v": None, **more}
        return signing.seal(ring, json.dumps(content))

    version, content, signature = good.split(".")
    tokens = {
        "forged": f"{version}.{content[:-2]}AA.{signature}",
        "expired": sealed(keyring, x=int(time.time()) - 1),
        "cut": good[:-1],
        "foreign": sealed(signing.Keyring({1: b"x" * 32})),
        "empty": "x",
    }
    async with api.stranger() as browser:
        answer = await browser.post(f"/uppy/{tokens[change]}/s3/multipart", json={})
        assert answer.status_code == 403
        fine = await browser.post(f"/uppy/{sealed(keyring)}/s3/multipart", json={})
        assert fine.status_code == 200
        for method, path in (("GET", "x"), ("POST", "params"), ("GET", "multipart/a/b/c")):
            unknown = await browser.request(method, f"/uppy/{good}/s3/{path}", json={})
            assert unknown.status_code == 404
    check_problem(
        await api.client.post("/v1/upload-tokens", json={"recipe": "none"}), 422, "invalid_request"
    )

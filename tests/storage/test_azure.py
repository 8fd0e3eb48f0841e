"""A container of Azure: the common contract, and what its signatures do and do not bind."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx2 as httpx
import pytest
from tests.storage.azurite import ACCOUNT, ACCOUNT_KEY, Azurite
from tests.storage.conformance import BIG, Conformance, content, part, write

from mediamill import ids
from mediamill.failures import Code, Failure
from mediamill.storage import AlreadyStored, Storage, StorageRefused
from mediamill.storage.azure import AzureStorage, Place, Wire, open_azure

pytestmark = [pytest.mark.anyio, pytest.mark.extra, pytest.mark.timeout(240)]

INSTALLATION = ids.new()


def place(azure_server: Azurite) -> Place:
    return Place(azure_server.new_container(), ACCOUNT, ACCOUNT_KEY, endpoint=azure_server.endpoint)


@pytest.fixture
async def store(azure_server: Azurite) -> AsyncIterator[AzureStorage]:
    """The storage in a container of its own, which must be empty afterwards."""
    opened = await open_azure(place(azure_server), INSTALLATION)
    try:
        yield opened
        for area in ("uploads", "stage", "media"):
            await opened.delete(area)
        assert azure_server.everything(opened.wire.place.container) == ["mediamill-storage"]
    finally:
        await opened.close()


class TestConformance(Conformance):
    rounds = 1

    @pytest.fixture
    def store(self, store: AzureStorage) -> AzureStorage:
        return store

    async def test_parts_never_replace_an_object(self, store: Storage, tmp_path: Path) -> None:
        """The other writer comes with parts, too: to the emulator, a blob that has blocks only is
        there already for a plain write."""
        key = "uploads/t/a"
        one, two = [await store.begin_parts(key, content_type="video/mp4") for _ in range(2)]
        first = await part(store, key, one, 1, [b"first"])
        late = await part(store, key, two, 1, [b"later"])
        there = await store.complete_parts(key, one, [first], size=5)
        with pytest.raises(AlreadyStored):
            await store.complete_parts(key, two, [late], size=5)
        assert await store.stat(key) == there


def soon() -> datetime:
    return datetime.now(UTC) + timedelta(minutes=5)


async def test_a_slot_is_written_once_under_its_key_and_type(store: AzureStorage) -> None:
    signed = store.sign_put("uploads/t/a", content_type="image/png", size=5, expires_at=soon())
    headers = {k: v for k, v in signed.headers.items() if k != "Content-Length"}
    other = signed.url.replace("uploads/t/a", "uploads/t/b")
    assert httpx.put(other, headers=headers, content=b"hello").status_code == 403
    assert httpx.put(signed.url.partition("?")[0], headers=headers).status_code == 403
    late = store.sign_put(
        "uploads/t/a", content_type="image/png", size=5, expires_at=soon() - timedelta(hours=1)
    )
    assert httpx.put(late.url, headers=headers, content=b"hello").status_code == 403
    assert httpx.put(signed.url, headers=headers, content=b"hello").status_code == 201
    # Again: neither as told nor without the condition, since the signature grants creation only.
    again = {k: v for k, v in headers.items() if k != "If-None-Match"}
    for given in (headers, again):
        assert httpx.put(signed.url, headers=given, content=b"other").status_code in (403, 409)
    stored = await store.stat("uploads/t/a")
    assert stored is not None
    assert await content(store, "uploads/t/a", stored) == b"hello"
    # It reads nothing, deletes nothing and lists nothing.
    assert httpx.get(signed.url).status_code == 403
    assert httpx.delete(signed.url).status_code == 403


async def test_nothing_is_read_without_a_signature(store: AzureStorage, tmp_path: Path) -> None:
    await store.put("uploads/t/a", write(tmp_path, b"content"))
    for key in ("uploads/t/a", ""):
        address = store.wire.address(key, public=True)
        assert httpx.get(address).status_code in (400, 403, 404, 409)
        assert httpx.get(f"{address}?restype=container&comp=list").status_code in (
            400,
            403,
            404,
            409,
        )
    signed = store.sign_get(
        "uploads/t/a", expires_at=soon(), content_type="image/avif", filename='ä"b.avif'
    )
    answer = httpx.get(signed.url, headers={"Range": "bytes=1-2"})
    assert (answer.status_code, answer.content) == (206, b"on")
    whole = httpx.get(signed.url)
    assert whole.headers["content-type"] == "image/avif"
    assert whole.headers["content-disposition"].startswith('inline; filename="file"; filename*=')
    assert httpx.get(signed.url.replace("image/avif", "text/html")).status_code == 403


async def test_clients_store_parts_by_signed_requests(store: AzureStorage) -> None:
    key = "uploads/t/a"
    upload = await store.begin_parts(key, content_type="video/mp4")
    contents = [b"a" * BIG, b"end"]
    for number in (2, 1, 1):  # in any order, and again
        signed = store.sign_part(
            key, upload, number, offset=0, size=len(contents[number - 1]), most=BIG,
            expires_at=soon(),
        )  # fmt: skip
        assert httpx.put(signed.url, content=contents[number - 1]).status_code == 201
    parts = await store.list_parts(key, upload)
    assert [(p.number, p.size) for p in parts] == [(1, BIG), (2, 3)]
    stored = await store.complete_parts(key, upload, parts, size=BIG + 3)
    assert await content(store, key, stored) == b"".join(contents)
    answer = httpx.get(store.sign_get(key, expires_at=soon()).url)
    assert answer.headers["content-type"] == "video/mp4"


async def test_blocks_of_others_and_strange_names_are_no_parts(store: AzureStorage) -> None:
    key = "uploads/t/a"
    one = await store.begin_parts(key, content_type="video/mp4")
    two = await store.begin_parts(key, content_type="video/mp4")
    await part(store, key, one, 1, [b"one"])
    signed = store.wire.grant("PUT", key, "w", expires_at=soon(), query={
        "comp": "block", "blockid": base64.b64encode(b"\xff" * 39).decode()})  # fmt: skip
    assert httpx.put(signed.url, content=b"strange").status_code == 201
    assert await store.list_parts(key, two) == []
    assert [p.size for p in await store.list_parts(key, one)] == [3]


async def test_a_completion_whose_answer_was_lost_is_found_again(store: AzureStorage) -> None:
    """Before the object in parts was crossed off, and after it."""
    key = "uploads/t/a"
    upload = await store.begin_parts(key, content_type="video/mp4")
    only = await part(store, key, upload, 1, [b"only"])
    first = await store.complete_parts(key, upload, [only], size=4)
    marker = f"parts/{key}/{upload}"
    await store.put_small(marker, b"video/mp4")
    assert await store.complete_parts(key, upload, [only], size=4) == first
    assert await store.stat(marker) is None
    await store.put_small(marker, b"video/mp4")
    await store.abort_parts(key, upload)  # what is complete stays
    assert await store.stat(key) == first


async def test_a_container_that_cannot_be_used_says_why(azure_server: Azurite) -> None:
    made = place(azure_server)
    await (await open_azure(made, INSTALLATION)).close()
    wrong = base64.b64encode(b"wrong" * 8).decode()
    for changed, said in (
        (Place("none", ACCOUNT, ACCOUNT_KEY, azure_server.endpoint), "There is no such container"),
        (Place(made.container, ACCOUNT, wrong, azure_server.endpoint), "name or key is wrong"),
        (Place(made.container, ACCOUNT, "no key", azure_server.endpoint), "is not the key"),
    ):
        with pytest.raises(StorageRefused, match=said):
            await open_azure(changed, INSTALLATION)
    with pytest.raises(StorageRefused, match="belongs to installation"):
        await open_azure(made, ids.new())
    with pytest.raises(StorageRefused, match="lacks Mediamill's marker"):
        await open_azure(place(azure_server), INSTALLATION, may_be_new=False)


async def test_a_key_that_was_rotated_is_told_as_that(
    azure_server: Azurite, tmp_path: Path
) -> None:
    opened = await open_azure(place(azure_server), INSTALLATION)
    old = base64.b64encode(b"old" * 8).decode()
    opened.wire.place = replace(opened.wire.place, account_key=old)
    with pytest.raises(Failure) as caught:
        await opened.put("uploads/t/a", write(tmp_path, b"x"))
    assert caught.value.code is Code.STORAGE_AUTH
    await opened.close()


def test_signatures_name_the_public_address_and_the_account_s_own_without_one() -> None:
    wire = Wire(Place("c", "a", ACCOUNT_KEY))
    signed = wire.sign("PUT", "uploads/t/a", expires_at=soon())
    assert signed.url.startswith("https://a.blob.core.windows.net/c/uploads/t/a?")
    query = parse_qs(urlsplit(signed.url).query)
    assert (query["sp"], query["spr"], query["sr"]) == (["c"], ["https"], ["b"])
    wire = Wire(Place("c", "a", ACCOUNT_KEY, "http://inner.test", "https://outer.test"))
    assert wire.sign("GET", "k", expires_at=soon()).url.startswith("https://outer.test/c/k?")
    inner = wire.sign("GET", "k", expires_at=soon(), public=False)
    assert inner.url.startswith("http://inner.test/c/k?")

"""A bucket: the common contract, and what signatures, conditions and versions add to it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.storage.conformance import BIG, Conformance, content, part, write
from tests.storage.seaweed import ACCESS_KEY, SECRET_KEY, Seaweed, bucket_name

from mediamill import ids
from mediamill.storage import AlreadyStored, StorageRefused, s3
from mediamill.storage.bucket import Refusal
from mediamill.storage.s3 import Place, S3Storage, Wire, open_s3

pytestmark = pytest.mark.anyio

INSTALLATION = ids.new()


def place(server: Seaweed, bucket: str, **more: object) -> Place:
    given = {
        "endpoint": server.endpoint,
        "region": "us-east-1",
        "access_key_id": ACCESS_KEY,
        "secret_access_key": SECRET_KEY,
        **more,
    }
    return Place(bucket, **given)  # type: ignore[arg-type]


async def new_bucket(server: Seaweed, *, versioned: bool = False) -> Place:
    made = place(server, bucket_name())
    wire = Wire(made)
    await wire.send("PUT", "")
    if versioned:
        body = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
        await wire.send("PUT", "", query={"versioning": ""}, content=body)
    await wire.close()
    return made


@asynccontextmanager
async def opened_on(server: Seaweed, *, versioned: bool = False) -> AsyncIterator[S3Storage]:
    """The storage in a bucket of its own, which must be empty afterwards."""
    opened = await open_s3(await new_bucket(server, versioned=versioned), INSTALLATION)
    try:
        yield opened
        for area in ("uploads", "stage", "media"):
            await opened.delete(area)
        assert await everything(opened) == ["mediamill-storage"]
    finally:
        await opened.close()


async def everything(store: S3Storage) -> list[str]:
    """Every key with any version, marker or part of it, as the server lists them."""
    found = []
    for question in ("versions", "uploads"):
        page = await store.wire.send("GET", "", query={question: ""})
        found += re.findall("<Key>(.*?)</Key>", page.text)
    return sorted(found)


@pytest.fixture
async def store(s3_server: Seaweed) -> AsyncIterator[S3Storage]:
    async with opened_on(s3_server) as opened:
        yield opened


class TestConformance(Conformance):
    rounds = 1

    @pytest.fixture
    async def store(self, s3_server: Seaweed) -> AsyncIterator[S3Storage]:
        async with opened_on(s3_server) as opened:
            yield opened


class TestConformanceOfAVersionedBucket(Conformance):
    rounds = 1

    @pytest.fixture
    async def store(self, s3_server: Seaweed) -> AsyncIterator[S3Storage]:
        async with opened_on(s3_server, versioned=True) as opened:
            assert opened.abilities.versioned
            yield opened


async def test_a_server_that_knows_the_condition_for_plain_puts_only_is_served(
    store: S3Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then whoever copies or joins has looked before, and asks again without it."""
    send = Wire.send_once
    refused = 0

    async def picky(self: Wire, method: str, key: str, **more: Any) -> Any:
        nonlocal refused
        headers = more.get("headers") or {}
        plain = method == "PUT" and "x-amz-copy-source" not in headers
        if "If-None-Match" in headers and not plain:
            refused += 1
            raise Refusal(501, "NotImplemented")
        return await send(self, method, key, **more)

    monkeypatch.setattr(Wire, "send_once", picky)
    await store.put("stage/t/a", write(tmp_path, b"content"))
    await store.copy("stage/t/a", "media/t/a")
    with pytest.raises(AlreadyStored):
        await store.copy("stage/t/a", "media/t/a")
    upload = await store.begin_parts("media/t/b", content_type="video/mp4")
    one = await part(store, "media/t/b", upload, 1, [b"part"])
    await store.complete_parts("media/t/b", upload, [one], size=4)
    assert refused == 2


async def test_a_copy_that_is_too_large_for_one_request_goes_in_parts(
    store: S3Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_COPY_BYTES", BIG)
    monkeypatch.setattr(s3, "_COPY_PART_BYTES", BIG)
    whole = bytes(range(256)) * (BIG // 256) + b"more"
    await store.put("stage/t/a", write(tmp_path, whole))
    await store.copy("stage/t/a", "media/t/a")
    stored = await store.stat("media/t/a")
    assert stored is not None
    assert await content(store, "media/t/a", stored) == whole


async def test_a_bucket_of_another_installation_is_refused(s3_server: Seaweed) -> None:
    made = await new_bucket(s3_server)
    await (await open_s3(made, INSTALLATION)).close()
    with pytest.raises(StorageRefused, match="belongs to installation"):
        await open_s3(made, ids.new())
    other = await new_bucket(s3_server)
    with pytest.raises(StorageRefused, match="lacks Mediamill's marker"):
        await open_s3(other, INSTALLATION, may_be_new=False)


def test_signatures_bind_what_they_should_under_either_style_of_address() -> None:
    soon = datetime.now(UTC) + timedelta(minutes=5)
    for virtual, start in ((False, "https://s.test/b/k?"), (True, "https://b.s.test/k?")):
        wire = Wire(
            Place("b", "eu-west-1", "https://s.test", virtual_host=virtual,
                  access_key_id="a", secret_access_key="s", session_token="t")
        )  # fmt: skip
        headers = {"Content-Length": "5", "Content-Type": "image/png", "If-None-Match": "*"}
        signed = wire.sign("PUT", "k", expires_at=soon, headers=headers)
        assert signed.url.startswith(start)
        query = parse_qs(urlsplit(signed.url).query)
        assert set(query["X-Amz-SignedHeaders"][0].split(";")) == {
            "content-length", "content-type", "host", "if-none-match",
        }  # fmt: skip
        assert query["X-Amz-Security-Token"] == ["t"]
        assert 290 <= int(query["X-Amz-Expires"][0]) <= 300

"""A bucket: the common contract, and what signatures, conditions and versions add to it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.storage.conformance import Conformance
from tests.storage.seaweed import ACCESS_KEY, SECRET_KEY, Seaweed, bucket_name

from mediamill import ids
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

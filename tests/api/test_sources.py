"""Files that we fetch ourselves: from good servers, broken ones, and addresses that are a trap."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.api.conftest import Api, Body, check_problem, make_api, media_uuid

from mediamill import db, tus
from mediamill.egress import Egress, Policy
from mediamill.failures import Code, Problem
from mediamill.maintenance import Maintenance
from mediamill.sources import Fetcher

pytestmark = pytest.mark.anyio

FILE = bytes(range(256)) * 400


@dataclass(slots=True)
class Server:
    """A web server of one file. `cuts` are the sizes after which its answers break off."""

    port: int = 0
    ranges: bool = True
    length: bool = True
    status: int = 200
    location: str | None = None
    cuts: list[int] = field(default_factory=list)
    content: bytes = FILE
    asked: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}/photos/a%20b.png"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        start = 0
        for line in head.split("\r\n"):
            if line.lower().startswith("range: bytes="):
                start = int(line.partition("=")[2].rstrip("-"))
        self.asked.append(f"{start}")
        status, body, more = self.status, self.content, ""
        if self.location is not None:
            status, more, body = 302, f"Location: {self.location}\r\n", b""
        elif self.ranges and start and status == 200:
            size = len(self.content)
            status, body = 206, self.content[start:]
            more = f"Content-Range: bytes {start}-{size - 1}/{size}\r\n"
        if self.length:
            more += f"Content-Length: {len(body)}\r\n"
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: image/png\r\n{more}".encode())
        writer.write(b"Connection: close\r\n\r\n")
        writer.write(body[: self.cuts.pop(0)] if self.cuts else body)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def serving(**more: Any) -> AsyncIterator[Server]:
    server = Server(**more)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()


@pytest.fixture
async def open_api(shared_database: str, tmp_path: Path) -> AsyncIterator[Api]:
    """An API that may call this machine."""
    async with make_api(
        shared_database, tmp_path, egress_allow_networks=["127.0.0.0/8", "::1/128"]
    ) as api:
        yield api


async def wanted(api: Api, url: str, **more: Any) -> Body:
    answer = await api.client.post("/v1/media", json={"source": {"url": url}, **more})
    assert answer.status_code == 202, answer.text
    body: Body = answer.json()
    return body


async def fetch(api: Api, *, tries: int = 1) -> None:
    """What a worker does with what is due, `tries` times without the pauses."""
    egress = Egress(Policy.of(api.services.settings))
    fetcher = Fetcher(api.services.settings, api.services.transfers, egress)
    for _ in range(tries):
        await api.pool.execute(
            "UPDATE transfers SET due_at = now() WHERE tenant_id = $1 AND source IS NOT NULL",
            api.tenant,
        )
        for transfer in await api.services.transfers.claim_sources(most=50, hold_seconds=30):
            if transfer.tenant_id == api.tenant:
                await fetcher.fetch(transfer)
    egress.close()


async def stored(api: Api, body: Body) -> bytes:
    async with db.acquire(api.pool) as connection:
        found = await tus.find(connection, api.tenant, media_uuid(body))
    assert found.version is not None
    store = api.services.storage
    return b"".join([piece async for piece in store.read(found.key, found.version)])


async def test_a_file_is_fetched_and_queued(open_api: Api) -> None:
    async with serving() as server:
        body = await wanted(open_api, server.url)
        assert (body["state"], body["size"]) == ("awaiting_upload", 0)
        await fetch(open_api)
    shown = await open_api.read(body["id"])
    assert (shown["state"], shown["size"]) == ("queued", len(FILE))
    assert (shown["filename"], shown["content_type"]) == ("a b.png", "image/png")
    assert await stored(open_api, body) == FILE


@pytest.mark.parametrize("ranges", [True, False])
async def test_what_is_cut_off_is_gone_on_with(open_api: Api, ranges: bool) -> None:
    async with serving(ranges=ranges, cuts=[1000, 50_000] if ranges else [1000, 60_000]) as server:
        body = await wanted(open_api, server.url)
        await fetch(open_api, tries=3)
        assert server.asked[0] == "0"
        assert server.asked[1] == "1000"
    assert (await open_api.read(body["id"]))["state"] == "queued"
    assert await stored(open_api, body) == FILE


async def test_a_size_that_is_not_said_is_the_end_of_the_body(open_api: Api) -> None:
    async with serving(length=False) as server:
        body = await wanted(open_api, server.url, filename="named.png")
        await fetch(open_api)
    shown = await open_api.read(body["id"])
    assert (shown["state"], shown["size"], shown["filename"]) == (
        "queued", len(FILE), "named.png",
    )  # fmt: skip
    assert hashlib.sha256(await stored(open_api, body)).digest() == hashlib.sha256(FILE).digest()


@pytest.mark.parametrize(
    ("more", "code", "asked"),
    [
        ({"status": 404}, "source_missing", 1),
        ({"status": 503}, "target_unreachable", 5),
        ({"content": b""}, "empty_input", 1),
        ({"cuts": [10, 0, 0, 0, 0, 0]}, "target_unreachable", 5),
        ({"location": "http://169.254.169.254/latest/meta-data/"}, "source_not_allowed", 1),
        ({"location": "http://10.0.0.1/x"}, "source_not_allowed", 1),
        ({"location": "file:///etc/passwd"}, "source_not_allowed", 1),
    ],
)
async def test_what_cannot_be_fetched_expires_and_says_why(
    open_api: Api, more: dict[str, Any], code: str, asked: int
) -> None:
    async with serving(**more) as server:
        body = await wanted(open_api, server.url)
        await fetch(open_api, tries=7)
        assert len(server.asked) == asked
    shown = await open_api.read(body["id"])
    assert (shown["state"], shown["error"]["code"]) == ("expired", code)
    duties = Maintenance(open_api.services.settings, open_api.pool, open_api.services.storage)
    for name in ("sweep_transfers", "erase"):
        await duties.once(next(d for d in duties.duties if d.name == name))
    assert open_api.files() == []


async def test_a_file_that_is_too_large_is_not_taken(shared_database: str, tmp_path: Path) -> None:
    for length in (True, False):
        async with (
            make_api(
                shared_database,
                tmp_path / str(length),
                egress_allow_networks=["127.0.0.0/8", "::1/128"],
                max_image_bytes=1000,
            ) as api,
            serving(length=length) as server,
        ):
            body = await wanted(api, server.url)
            await fetch(api, tries=2)
            shown = await api.read(body["id"])
            assert (shown["state"], shown["error"]["code"]) == ("expired", "payload_too_large")


@pytest.mark.parametrize(
    "url",
    ["http://localhost/x", "https://127.0.0.1/x", "https://[::1]/x", "https://169.254.169.254/x",
     "http://2130706433/x", "https://user:pass@example.com/x", "ftp://example.com/x",
     "https://10.0.0.1/x", "file:///etc/passwd"],
)  # fmt: skip
async def test_an_address_that_may_not_be_called_is_refused_at_once(api: Api, url: str) -> None:
    answer = await api.client.post("/v1/media", json={"source": {"url": url}})
    body = check_problem(answer, 422, "source_not_allowed")
    assert body["errors"][0]["pointer"] == "/source/url"
    count = "SELECT count(*) FROM media WHERE tenant_id = $1"
    assert await api.pool.fetchval(count, api.tenant) == 0


async def test_a_body_with_a_source_is_checked_like_any_other(api: Api) -> None:
    bodies: list[dict[str, Any]] = [
        {"source": {}},
        {"source": "https://example.com"},
        {"source": {"url": "https://example.com/x"}, "size": 5},
        {"source": {"url": 7}},
    ]
    for body in bodies:
        check_problem(await api.client.post("/v1/media", json=body), 422, "invalid_request")


async def test_a_deleted_media_is_not_fetched(open_api: Api) -> None:
    async with serving() as server:
        body = await wanted(open_api, server.url)
        assert (await open_api.client.delete(f"/v1/media/{body['id']}")).status_code == 202
        await fetch(open_api)
    statement = "SELECT count(*) FROM jobs WHERE media_id = $1"
    assert await open_api.pool.fetchval(statement, media_uuid(body)) == 0


async def test_an_object_of_a_fetcher_that_died_before_it_could_say_so_is_accepted(
    open_api: Api, tmp_path: Path
) -> None:
    """Its heir stored the file in parts of its own, and finds the key taken."""
    (file := tmp_path / "theirs").write_bytes(FILE)
    async with serving() as server:
        body = await wanted(open_api, server.url)
        found = await open_api.services.transfers.get(open_api.tenant, media_uuid(body))
        await open_api.services.storage.put(found.key, file)
        await fetch(open_api)
    assert (await open_api.read(body["id"]))["state"] == "queued"
    assert await stored(open_api, body) == FILE


async def test_who_gives_up_on_what_another_has_completed_changes_nothing(open_api: Api) -> None:
    async with serving() as server:
        body = await wanted(open_api, server.url)
        found = await open_api.services.transfers.get(open_api.tenant, media_uuid(body))
        await fetch(open_api)
    await open_api.services.transfers.blame(found, Problem(Code.SOURCE_CHANGED))
    after = await open_api.read(body["id"])
    assert (after["state"], after["error"]) == ("queued", None)


async def test_two_fetchers_of_one_file_make_one_original(open_api: Api) -> None:
    async with serving() as server:
        body = await wanted(open_api, server.url)
        egress = Egress(Policy.of(open_api.services.settings))
        found = await open_api.services.transfers.get(open_api.tenant, media_uuid(body))
        fetchers = [
            Fetcher(
                open_api.services.settings,
                tus.Transfers(open_api.services.settings, open_api.pool, open_api.services.storage),
                egress,
            )
            for _ in range(3)
        ]
        await asyncio.gather(*(fetcher.fetch(found) for fetcher in fetchers))
        await fetch(open_api, tries=2)
        egress.close()
    assert (await open_api.read(body["id"]))["state"] == "queued"
    assert await stored(open_api, body) == FILE

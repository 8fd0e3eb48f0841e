"""The real application on a real database and folder, in this process, and two tenants."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2 as httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.types import Message
from tests import rows
from tests.storage.seaweed import Seaweed, bucket_name

from mediamill import db, ids, installation, keys, queue
from mediamill.api.app import create_app
from mediamill.api.services import Services
from mediamill.egress import Egress, Policy
from mediamill.estimates import Forecaster
from mediamill.events import Follower
from mediamill.jobs import Birth
from mediamill.keys import Keychain
from mediamill.queue import Ticket
from mediamill.storage import s3
from mediamill.storage.local import LocalStorage, open_local

Body = dict[str, Any]


@pytest.fixture(scope="module")
def shared_database(server: str, template: str) -> Iterator[str]:
    """One database for a module: its tests differ in their tenants."""
    with rows.fresh_database(server, template) as dsn:
        yield dsn


@dataclass(slots=True)
class Api:
    """One API process's insides, and one tenant with a key for everything."""

    app: FastAPI
    services: Services
    tenant: str
    token: str
    client: httpx.AsyncClient
    dsn: str

    @property
    def store(self) -> LocalStorage:
        assert isinstance(self.services.storage, LocalStorage)
        return self.services.storage

    @property
    def pool(self) -> db.Pool:
        return self.services.pool

    def files(self) -> list[str]:
        """Every object, and everything that is still on its way in."""
        root = self.store.root
        return sorted(
            str(path.relative_to(root))
            for path in root.rglob("*")
            if path.is_file() and path.name != "mediamill-storage"
        )

    async def new_key(self, tenant: str, *scopes: str, ttl_seconds: float | None = None) -> str:
        async with db.acquire(self.pool) as connection:
            return await keys.create(
                connection,
                self.services.installation.pepper,
                tenant_id=tenant,
                name="test",
                scopes=scopes or ("admin",),
                ttl_seconds=ttl_seconds,
            )

    async def slot(self, content: bytes = b"bytes", **more: Any) -> Body:
        """An open slot for this content."""
        wanted = {"size": len(content), "content_type": "image/png", **more}
        answer = await self.client.post("/v1/media", json=wanted)
        assert answer.status_code == 201, answer.text
        body: Body = answer.json()
        return body

    async def upload(self, content: bytes = b"bytes", **more: Any) -> Body:
        """A slot whose bytes are there."""
        body = await self.slot(content, **more)
        answer = await self.put(body, content)
        assert answer.status_code == 200, answer.text
        return body

    async def put(self, slot: Body, content: bytes, **headers: str) -> httpx.Response:
        """PUT without the API key: the signed address is enough."""
        given = slot["upload"]["headers"] | headers
        given.pop("Content-Length", None)
        async with self.stranger() as stranger:
            return await stranger.put(slot["upload"]["url"], content=content, headers=given)

    async def queued(self, content: bytes = b"bytes", **more: Any) -> Body:
        """A media whose upload was completed."""
        body = await self.upload(content, **more)
        answer = await self.client.post(f"/v1/media/{body['id']}/complete")
        assert answer.status_code == 202, answer.text
        found: Body = answer.json()
        return found

    async def claimed(self, body: Body) -> Any:
        """The main job of a queued media in the hands of a worker."""
        job_id = ids.decode(ids.JOB, body["job"]["id"])
        assert job_id is not None
        birth = Birth(body["kind"] or "image", body["job"]["queue"], "main", id=job_id)
        async with db.acquire(self.pool) as connection:
            return await rows.claim(connection, self.tenant, birth)

    async def ready(self, outputs: dict[str, bytes] | None = None, **more: Any) -> Body:
        """A media with published variants."""
        body = await self.queued(**more)
        held = await self.claimed(body)
        async with db.acquire(self.pool) as connection:
            await rows.publish(connection, self.store, held, outputs or {"w8.webp": b"0123456789"})
        return await self.read(body["id"])

    async def read(self, media_id: str) -> Body:
        answer = await self.client.get(f"/v1/media/{media_id}")
        assert answer.status_code == 200, answer.text
        body: Body = answer.json()
        return body

    def stranger(self, token: str | None = None) -> httpx.AsyncClient:
        """A client with another key, or none."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app),
            base_url=rows.PUBLIC_URL,
            headers=headers,
            timeout=30,
        )

    async def raw(
        self,
        method: str,
        path: str,
        *,
        query: bytes = b"",
        headers: dict[str, str] | None = None,
        messages: list[Message] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """A request as a server would hand it over, without a client that tidies it up first."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode("utf-8", "surrogatepass"),
            "query_string": query,
            "root_path": "",
            "headers": [
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in (headers or {}).items()
            ],
            "client": ("127.0.0.1", 1),
            "server": ("media.test", 80),
        }
        incoming = list(messages or [{"type": "http.request", "body": b"", "more_body": False}])
        status, found, body = 0, {}, bytearray()

        async def receive() -> Message:
            return incoming.pop(0) if incoming else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status, found
            if message["type"] == "http.response.start":
                status = message["status"]
                found = {k.decode().lower(): v.decode("latin-1") for k, v in message["headers"]}
            elif message["type"] == "http.response.body":
                body.extend(message.get("body", b""))

        await self.app(scope, receive, send)
        return status, found, bytes(body)


@pytest.fixture
async def api(shared_database: str, tmp_path: Path) -> AsyncIterator[Api]:
    async with make_api(shared_database, tmp_path) as made:
        yield made


class make_api:  # used as a function
    """An application of its own; `settings` are changes to the defaults."""

    def __init__(self, dsn: str, folder: Path, *, pool_size: int = 5, **settings: Any) -> None:
        self._dsn, self._folder, self._size = dsn, folder, pool_size
        self._changes = settings

    async def __aenter__(self) -> Api:
        settings = rows.settings(self._folder, database_url=self._dsn, **self._changes)
        pool = await db.open_pool(self._dsn, size=self._size)
        async with db.acquire(pool) as connection:
            installed = await installation.identify(connection)
            tenant = await rows.new_tenant(connection)
        store = open_local(
            settings.objects_dir, installed.id, lambda: installed.keyring, settings.base_url
        )
        services = Services(
            settings=settings,
            pool=pool,
            storage=store,
            installation=installed,
            keychain=Keychain(pool, installed.pepper),
            forecaster=Forecaster(),
            egress=Egress(Policy.of(settings)),
            follower=Follower(pool),
        )
        api = Api(create_app(services), services, tenant, "", httpx.AsyncClient(), self._dsn)
        api.token = await api.new_key(tenant)
        await api.client.aclose()
        api.client = api.stranger(api.token)
        self._api = api
        return api

    async def __aexit__(self, *_: object) -> None:
        await self._api.client.aclose()
        await self._api.services.follower.close()
        self._api.services.egress.close()
        await rows.close(self._api.pool)


@dataclass(slots=True)
class Served:
    """An API behind a real server on this machine."""

    api: Api
    server: uvicorn.Server
    url: str
    task: asyncio.Task[None]

    def client(self, token: str | None = "own") -> httpx.AsyncClient:
        chosen = self.api.token if token == "own" else token
        headers = {"Authorization": f"Bearer {chosen}"} if chosen else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30)

    async def leave(self) -> None:
        """As on SIGTERM."""
        self.api.services.shutting_down.set()
        self.api.services.follower.wake_all()
        self.server.should_exit = True
        await self.task


@asynccontextmanager
async def serving(
    dsn: str, folder: Path, *, own_address: bool = False, **settings: Any
) -> AsyncIterator[Served]:
    """A server; with `own_address` it signs addresses that lead to itself."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    if own_address:
        settings["public_url"] = url
    async with make_api(dsn, folder, pool_size=10, **settings) as api:
        config = uvicorn.Config(
            api.app, log_config=None, access_log=False, timeout_graceful_shutdown=5
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server._serve(sockets=[listener]))
        for _ in range(500):
            if server.started:
                break
            await asyncio.sleep(0.01)
        served = Served(api, server, url, task)
        try:
            yield served
        finally:
            if not task.done():
                await served.leave()


@pytest.fixture
def client(api: Api) -> httpx.AsyncClient:
    return api.client


@pytest.fixture
async def other(api: Api) -> AsyncIterator[httpx.AsyncClient]:
    """A second tenant's client, with a key for everything of its own."""
    async with db.acquire(api.pool) as connection:
        tenant = await rows.new_tenant(connection)
    async with api.stranger(await api.new_key(tenant)) as client:
        yield client


@pytest.fixture(params=["local", "s3"])
async def both(
    request: pytest.FixtureRequest, api: Api, server_of_both: Seaweed | None
) -> AsyncIterator[Api]:
    """The API on each kind of storage."""
    if request.param == "local":
        yield api
        return
    assert server_of_both is not None
    settings = rows.settings(
        api.services.settings.data_dir, **server_of_both.settings(bucket_name())
    )
    place = s3.place(settings)
    wire = s3.Wire(place)
    await wire.send("PUT", "")
    await wire.close()
    store = await s3.open_s3(place, ids.new())
    api.services.use(store)
    yield api
    await store.close()


@pytest.fixture
def server_of_both(request: pytest.FixtureRequest) -> Seaweed | None:
    callspec = getattr(request.node, "callspec", None)
    wants = callspec is not None and callspec.params.get("both") == "s3"
    found: Seaweed | None = request.getfixturevalue("s3_server") if wants else None
    return found


def check_problem(answer: httpx.Response, status: int, code: str) -> Body:
    """A problem document in full (RFC 9457), and the body for a closer look."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: Body = answer.json()
    assert body["code"] == code, body
    assert body["status"] == status
    assert body["type"] == f"{rows.PUBLIC_URL}/problems/{code}"
    assert body["request_id"] == answer.headers["x-request-id"]
    assert body["instance"] == f"urn:request:{body['request_id']}"
    for name in ("title", "detail", "advice"):
        assert body[name].strip()
    assert isinstance(body["retryable"], bool)
    assert body["schema_version"] == 1
    assert answer.headers["cache-control"] == "no-store"
    return body


async def take_all(connection: db.Connection, *queues: str) -> list[Ticket]:
    """Every due ticket of these queues."""
    async with connection.transaction():
        return await queue.take(connection, queues, most=100)


def media_uuid(body: Body) -> UUID:
    found = ids.decode(ids.MEDIA, body["id"])
    assert found is not None
    return found

"""The Python client against a real server: uploads, waiting, errors, pages, webhooks."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests import rows
from tests.api.conftest import Served, media_uuid, serving
from tests.sink import LOCAL

from mediamill import db, webhooks
from mediamill.client import (
    AsyncClient,
    Client,
    Conflict,
    ConnectionFailed,
    DownloadDamaged,
    Error,
    Event,
    Forbidden,
    Gone,
    InvalidRequest,
    NotFound,
    Problem,
    Progress,
    RateLimited,
    SignatureMismatch,
    Unauthenticated,
    Unavailable,
    WaitTimeout,
    WorkFailed,
    blocking,
    unwrap,
)
from mediamill.client.errors import AddressExpired, problem
from mediamill.failures import Code

pytestmark = pytest.mark.anyio

_MIB = 1 << 20


@pytest.fixture
async def served(database: str, tmp_path: Path) -> AsyncIterator[Served]:
    more = {"egress_allow_networks": LOCAL}
    async with serving(database, tmp_path, own_address=True, **more) as made:
        yield made


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A file of five parts."""
    path = tmp_path / "big.jpg"
    path.write_bytes(b"\xff\xd8\xff\xe0" + bytes(20 * _MIB))
    return path


class Faulty(httpx.HTTPTransport):
    """A network on which requests that `break_` chooses get no answer, after they were served."""

    def __init__(self, break_: Callable[[httpx.Request], bool]) -> None:
        super().__init__()
        self._break = break_
        self.seen: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(f"{request.method} {request.url.path}")
        answer = super().handle_request(request)
        if self._break(request):
            answer.read()
            answer.close()
            raise httpx.ReadError("the connection was cut")
        return answer


def _client(served: Served, **given: Any) -> Client:
    return Client(served.url, served.api.token, **given)


async def _publish(served: Served, media_id: str, outputs: dict[str, bytes]) -> None:
    body = await served.api.read(media_id)
    held = await served.api.claimed(body)
    async with db.acquire(served.api.pool) as connection:
        await rows.publish(connection, served.api.store, held, outputs)


def test_both_clients_have_the_same_names_and_signatures() -> None:
    with Client("http://127.0.0.1:9", "mpk_x") as one:
        other = AsyncClient("http://127.0.0.1:9", "mpk_x")
        groups = [name for name, value in vars(one).items() if isinstance(value, blocking._Part)]
        assert len(groups) == 7
        for name in ["", *groups]:
            here, there = (getattr(c, name) if name else c for c in (one, other))
            methods = {m for m in dir(here) if not m.startswith("_")}
            assert methods == {m for m in dir(there) if not m.startswith("_")}
            for method in methods:
                if callable(getattr(here, method)):
                    ours = inspect.signature(getattr(here, method))
                    theirs = inspect.signature(getattr(there, method))
                    assert ours.parameters == theirs.parameters, method
                    result = str(theirs.return_annotation).replace("AsyncIterator", "Iterator")
                    assert str(ours.return_annotation) == result, method
                    doc = inspect.getdoc(getattr(here, method))
                    assert doc == inspect.getdoc(getattr(there, method)), method


def test_every_failure_code_has_an_error_that_fits_its_status() -> None:
    kinds: dict[int, type[Problem]] = {
        400: InvalidRequest,
        401: Unauthenticated,
        403: Forbidden,
        404: NotFound,
        409: Conflict,
        410: Gone,
        412: Conflict,
        428: Conflict,
        500: Unavailable,
        503: Unavailable,
    }
    for code in Code:
        made = problem(code.status, {"code": code.code, "retryable": code.retryable})
        assert isinstance(made, kinds.get(code.status, Problem))
        assert made.retryable is code.retryable
    assert type(problem(403, {"code": "signature_expired"})) is AddressExpired
    limited = problem(429, {}, {"retry-after": "7"})
    assert isinstance(limited, RateLimited)
    assert (limited.retryable, limited.retry_after_seconds) == (True, 7.0)


def test_a_client_without_an_address_or_key_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEDIAMILL_URL", raising=False)
    monkeypatch.delenv("MEDIAMILL_API_KEY", raising=False)
    with pytest.raises(ValueError, match="MEDIAMILL_URL"):
        Client()
    with pytest.raises(ValueError, match="MEDIAMILL_API_KEY"):
        Client("http://127.0.0.1:9")


@pytest.mark.parametrize("way", ["direct", "multipart", "tus"])
async def test_a_file_is_uploaded_with_progress(served: Served, big: Path, way: Any) -> None:
    seen: list[Progress] = []

    def work() -> None:
        with _client(served) as client:
            media = client.media.submit(
                big, recipe="web", metadata={"album": "x"}, way=way, on_progress=seen.append
            )
            assert (media.state, media.size, media.metadata) == (
                "queued",
                20 * _MIB + 4,
                {"album": "x"},
            )
            assert media.filename == "big.jpg"

    await asyncio.to_thread(work)
    assert seen[-1] == Progress("upload", "upload", 100.0, 20 * _MIB + 4, 20 * _MIB + 4)
    assert [p.percent for p in seen] == sorted(p.percent for p in seen)  # type: ignore[type-var]


@pytest.mark.parametrize("way", ["multipart", "tus"])
async def test_another_process_goes_on_where_the_first_one_stopped(
    served: Served, big: Path, tmp_path: Path, way: Any
) -> None:
    state = tmp_path / "state" / "big.json"
    seen: list[Progress] = []

    def stop(progress: Progress) -> None:
        if progress.percent is not None and progress.percent > 90:
            raise KeyboardInterrupt

    def work() -> None:
        with _client(served) as client, pytest.raises(KeyboardInterrupt):
            client.media.submit(big, way=way, resume_from=state, on_progress=stop)
        assert state.exists()
        with _client(served) as client:
            media = client.media.submit(big, way=way, resume_from=state, on_progress=seen.append)
            assert media.state == "queued"
            assert len(list(client.media.list())) == 1
        assert not state.exists()

    await asyncio.to_thread(work)
    # What had arrived is not sent again: the first word is of what is beyond it.
    assert seen[0].done_bytes is not None
    assert seen[0].done_bytes >= 8 * _MIB


async def test_a_file_that_changed_is_uploaded_anew(
    served: Served, big: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"

    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    def work() -> None:
        with _client(served) as client:
            with pytest.raises(KeyboardInterrupt):
                client.media.submit(big, way="tus", resume_from=state, on_progress=stop)
            big.write_bytes(b"\xff\xd8\xff\xe0 another")
            media = client.media.submit(big, way="tus", resume_from=state)
            assert media.size == 12
            # One that is not known any more is begun anew too.
            with pytest.raises(KeyboardInterrupt):
                client.media.submit(big, way="tus", resume_from=state, on_progress=stop)
            text = state.read_text().replace("upl_", "upl_0")
            state.write_text(text)
            assert client.media.submit(big, way="tus", resume_from=state).state == "queued"

    await asyncio.to_thread(work)


async def test_lost_answers_make_nothing_twice(served: Served) -> None:
    lost: set[str] = set()

    def break_once(request: httpx.Request) -> bool:
        name = f"{request.method} {request.url.path.partition('/med_')[0]}"
        first = name not in lost
        lost.add(name)
        return first

    network = Faulty(break_once)

    def work() -> None:
        with _client(served, transport=network) as client:
            media = client.media.submit(b"\xff\xd8\xff\xe0 small", filename="a.jpg")
            assert media.state == "queued"
            assert [m.id for m in client.media.list()] == [media.id]

    await asyncio.to_thread(work)
    assert network.seen.count("POST /v1/media") == 2


async def test_a_slot_is_opened_for_somebody_else_to_fill(served: Served) -> None:
    def work() -> None:
        with _client(served) as client:
            slot = client.media.open(size=8, content_type="image/jpeg", metadata={"a": 1})
            assert (slot.state, slot.upload.method, slot.upload.fields) == (
                "awaiting_upload",
                "PUT",
                {},
            )
            with pytest.raises(Conflict):
                client.media.complete(slot)
            upload = slot.upload
            sent = httpx.put(upload.url, headers=upload.headers, content=b"\xff\xd8\xff\xe0 abc")
            assert sent.status_code == 200
            assert client.media.complete(slot).state == "queued"
            assert client.media.complete(slot.id).metadata == {"a": 1}
            with pytest.raises(InvalidRequest, match="no form"):
                client.media.open(max_size=8)

    await asyncio.to_thread(work)
    async with AsyncClient(served.url, served.api.token) as client:
        slot = await client.media.open(size=8, filename="a.png")
        assert slot.upload.headers["Content-Type"] == "image/png"
        with pytest.raises(Conflict):
            await client.media.complete(slot)


class OneCreation(httpx.HTTPTransport):
    """A storage that answers a second write as one that its signature does not grant; the answer
    to the first is lost if `stores`, else nothing is stored at all."""

    def __init__(self, *, stores: bool) -> None:
        super().__init__()
        self._stores = stores
        self._puts = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method != "PUT":
            return super().handle_request(request)
        self._puts += 1
        if self._stores and self._puts == 1:
            super().handle_request(request).read()
            raise httpx.ReadError("the connection was cut")
        return httpx.Response(403, text="AuthorizationPermissionMismatch")


@pytest.mark.parametrize("stores", [True, False])
async def test_a_second_write_that_is_not_granted_is_told_from_a_slot_that_is_refused(
    served: Served, stores: bool
) -> None:
    def work() -> None:
        with _client(served, transport=OneCreation(stores=stores)) as client:
            if stores:
                assert client.media.submit(b"\xff\xd8\xff\xe0 small").state == "queued"
            else:
                with pytest.raises(Forbidden, match="PermissionMismatch"):
                    client.media.submit(b"\xff\xd8\xff\xe0 small")

    await asyncio.to_thread(work)


async def test_no_answer_at_all_is_an_error_after_the_last_try(served: Served) -> None:
    network = Faulty(lambda _: True)

    def work() -> None:
        with _client(served, transport=network, max_retries=1) as client:
            with pytest.raises(ConnectionFailed, match="was cut"):
                client.recipes.list()
            with pytest.raises(ConnectionFailed):
                client.media.submit(b"x", way="tus")

    await asyncio.to_thread(work)
    assert network.seen[:2] == ["GET /v1/recipes"] * 2


@pytest.mark.parametrize("streams", [True, False])
async def test_waiting_ends_with_the_work_by_stream_or_long_poll(
    served: Served, streams: bool
) -> None:
    network = Faulty(lambda r: r.url.path.endswith("/events") and not streams)
    seen: list[Progress] = []
    body = await served.api.queued()

    def work() -> Any:
        with _client(served, transport=network) as client:
            return client.media.wait(body["id"], timeout_seconds=60, on_progress=seen.append)

    # A stream that ends is left in the middle by the cut: the broken network drains it first.
    waiting = asyncio.create_task(asyncio.to_thread(work))
    await asyncio.sleep(0.3)
    began = time.monotonic()
    await _publish(served, body["id"], {"w8.webp": b"0123456789"})
    media = await waiting
    assert media.state == "ready"
    assert media.variants[0].name == "w8.webp"
    assert time.monotonic() - began < 10
    assert (seen[0].phase, seen[0].stage) == ("process", "queued")
    events = [s for s in network.seen if s.endswith("/events")]
    assert events


async def test_a_wait_that_is_too_long_and_work_that_fails_are_told_apart(
    served: Served,
) -> None:
    body = await served.api.queued()
    job = body["job"]["id"]

    def work() -> None:
        with _client(served) as client:
            began = time.monotonic()
            with pytest.raises(WaitTimeout, match="still queued"):
                client.media.wait(body["id"], timeout_seconds=0.4)
            assert time.monotonic() - began < 5
            with pytest.raises(TimeoutError):
                client.jobs.wait(job, timeout_seconds=0)
            client.jobs.cancel(job)
            with pytest.raises(WorkFailed) as caught:
                client.media.wait(body["id"], timeout_seconds=5)
            assert caught.value.code == "canceled"
            assert caught.value.advice
            assert caught.value.retryable is False
            assert client.media.wait(body["id"], check=False).state == "failed"
            assert client.jobs.get(job).state == "canceled"

    await asyncio.to_thread(work)


async def test_lists_page_by_themselves_and_refusals_are_typed(served: Served) -> None:
    made = [(await served.api.queued())["id"] for _ in range(5)]

    def work() -> None:
        with _client(served) as client:
            assert [m.id for m in client.media.list(page_size=2)] == made[::-1]
            first = next(iter(client.media.list(page_size=1)))
            assert first.id == made[-1]
            assert {j.state for j in client.jobs.list(queue="image", page_size=3)} == {"queued"}
            assert client.media.timeline(made[0]).sentence
            with pytest.raises(InvalidRequest) as caught:
                list(client.media.list(state="redy"))
            assert caught.value.code == "unknown_parameter"
            assert caught.value.request_id
            assert caught.value.errors
            with pytest.raises(NotFound):
                client.media.get("med_../../livez")
            client.media.delete(made[0])
            with pytest.raises(Gone):
                client.media.get(made[0])
            with pytest.raises(Conflict):
                client.jobs.replay(next(client.jobs.list(state="queued")))
        with Client(served.url, "mpk_live_nonsense") as stranger, pytest.raises(Unauthenticated):
            stranger.recipes.list()

    await asyncio.to_thread(work)


async def test_a_download_is_what_the_manifest_says_or_nothing(
    served: Served, tmp_path: Path
) -> None:
    body = await served.api.ready({"w8.webp": b"0123456789"})
    bad = await served.api.ready({"w8.webp": b"9876543210"})
    async with db.acquire(served.api.pool) as connection:
        await connection.execute(
            "UPDATE variants SET sha256 = repeat('0', 64) WHERE media_id = $1",
            media_uuid(bad),
        )
    folder = tmp_path / "got"
    folder.mkdir()

    def work() -> None:
        with _client(served) as client:
            path = client.media.download(body["id"], "w8.webp", folder)
            assert path == folder / "w8.webp"
            assert path.read_bytes() == b"0123456789"
            with pytest.raises(Error, match=r"it has: w8\.webp"):
                client.media.download(body["id"], "w9.webp", folder)
            with pytest.raises(DownloadDamaged):
                client.media.download(bad["id"], "w8.webp", folder / "bad.webp")

    await asyncio.to_thread(work)
    assert [p.name for p in folder.iterdir()] == ["w8.webp"]


async def test_endpoints_are_made_changed_rotated_and_deleted(served: Served) -> None:
    def work() -> None:
        with _client(served) as client:
            made = client.webhooks.create("http://127.0.0.1:9/in", types=["media.*"])
            assert made.secret is not None
            assert client.webhooks.get(made).secret is None
            changed = client.webhooks.change(made, types=["media.ready"])
            assert changed.types == ["media.ready"]
            rotated = client.webhooks.rotate(made)
            assert rotated.secret not in (None, made.secret)
            delivery = client.webhooks.test(made)
            assert [d.id for d in client.webhooks.deliveries(made)] == [delivery.id]
            assert client.webhooks.delivery(delivery).type == "webhook.test"
            client.webhooks.delete(made)
            assert list(client.webhooks.list()) == []

    await asyncio.to_thread(work)


@pytest.mark.parametrize("signing", ["hmac", "ed25519"])
def test_a_webhook_is_unwrapped_only_if_its_signature_and_time_hold(signing: Any) -> None:
    value = webhooks.new_secret(signing)
    secret = webhooks.shown_secret(signing, value)
    body = b'{"type":"media.ready","id":"evt_1","timestamp":"2026-01-01T00:00:00Z","data":{"x":1}}'
    now = int(time.time())
    keys = [webhooks.new_secret(signing), value]
    headers = webhooks.sign(signing, keys, message_id="evt_1", timestamp=now, body=body)
    event = unwrap(body, headers, secret=secret)
    assert isinstance(event, Event)
    assert (event.type, event.id, event.data) == ("media.ready", "evt_1", {"x": 1})
    other = webhooks.shown_secret(signing, webhooks.new_secret(signing))
    wrongs: list[dict[str, Any]] = [
        {"secret": other},
        {"secret": "nonsense"},
        {"body": body + b" "},
        {"headers": headers | {"webhook-id": "evt_2"}},
        {"headers": {}},
    ]
    for wrong in wrongs:
        given: dict[str, Any] = {"body": body, "headers": headers, "secret": secret, **wrong}
        with pytest.raises(SignatureMismatch):
            unwrap(given["body"], given["headers"], secret=given["secret"])
    old = webhooks.sign(signing, keys, message_id="evt_1", timestamp=now - 3600, body=body)
    with pytest.raises(SignatureMismatch, match="too old"):
        unwrap(body, old, secret=secret)


async def test_the_client_for_asyncio_does_the_same(
    served: Served, big: Path, tmp_path: Path
) -> None:
    seen: list[Progress] = []
    async with AsyncClient(served.url, served.api.token) as client:
        media = await client.media.submit(big, way="multipart", on_progress=seen.append)
        assert seen[-1].percent == 100.0
        small = await client.media.submit(b"\xff\xd8\xff\xe0 small")
        waiting = asyncio.create_task(client.media.wait(small, timeout_seconds=60))
        await asyncio.sleep(0.2)
        await _publish(served, small.id, {"w8.webp": b"0123456789"})
        assert (await waiting).state == "ready"
        got = await client.media.download(small, "w8.webp", tmp_path / "x.webp")
        assert got.read_bytes() == b"0123456789"
        assert [m.id async for m in client.media.list(page_size=1)] == [small.id, media.id]
        heard = [event.type async for event in client.media.events(small)]
        assert heard == ["snapshot"]
        async for event in client.events(types="media.*"):
            assert event.type == "snapshot"
            break
        with pytest.raises(NotFound):
            await client.jobs.get("job_x")
        with pytest.raises(WaitTimeout):
            await client.media.wait(media, timeout_seconds=0.2)

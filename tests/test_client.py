"""The Python client against a real server: uploads, waiting, errors, pages, webhooks."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from pydantic import ValidationError
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
    twin,
    unwrap,
)
from mediamill.client.errors import AddressExpired, problem
from mediamill.failures import Code
from mediamill.reference import openapi

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
        assert len(groups) == 8
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


def test_the_blocking_client_is_what_its_twin_makes_of_it() -> None:
    formatted = subprocess.run(
        [Path(sys.executable).with_name("ruff"), "format", "--stdin-filename", "x.py", "-"],
        input=twin.blocking(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert Path(blocking.__file__).read_text("utf-8") == formatted, "run `make docs`"


def test_every_route_of_the_api_can_be_reached() -> None:
    """But for those that a caller gets an address to, or that only others call."""
    seen: set[tuple[str, str]] = set()

    def answer(request: httpx.Request) -> httpx.Response:
        seen.add((request.method, request.url.path))
        if request.method == "GET" and "webhook-endpoints" in request.url.path:
            return httpx.Response(200, json={}, headers={"ETag": '"1"'})
        if request.method == "GET" and request.url.path == "/v1/media/m":
            stamps = {"created_at": "2026-01-01T00:00:00Z", "updated_at": "2026-01-01T00:00:00Z"}
            return httpx.Response(200, json={"id": "m", "state": "ready"} | stamps)
        return httpx.Response(404, json={"code": "not_found"})

    now = datetime.now(UTC)
    with Client("http://x", "k", transport=httpx.MockTransport(answer)) as client:
        calls: list[Callable[[], Any]] = [
            lambda: list(client.events()),
            client.stream_url,
            client.figures,
            client.settings,
            client.check_storage,
            lambda: client.media.original("m", "x"),
            client.jobs.cancel_all,
            client.jobs.replay_all,
            client.dead_letters.groups,
            lambda: client.recipes.dry_run("m", "web"),
            lambda: client.keys.create("x", role="viewer"),
            client.keys.list,
            lambda: client.keys.revoke("k"),
            client.keys.own,
            lambda: client.media.submit(b"x"),
            lambda: client.media.submit(b"x", way="multipart"),
            lambda: client.media.submit(b"x", way="tus"),
            lambda: client.media.complete("m"),
            client.media.upload_token,
            lambda: client.media.get("m"),
            lambda: list(client.media.list()),
            lambda: client.media.process("m"),
            lambda: client.media.delete("m"),
            lambda: client.media.timeline("m"),
            lambda: client.media.add_subtitles("m", "de", "1"),
            lambda: client.media.subtitles("m"),
            lambda: client.media.remove_subtitles("m", "de"),
            lambda: list(client.media.events("m")),
            lambda: client.jobs.create("k"),
            lambda: client.jobs.get("j"),
            lambda: list(client.jobs.list()),
            lambda: client.jobs.cancel("j"),
            lambda: client.jobs.replay("j"),
            lambda: client.jobs.timeline("j"),
            lambda: list(client.jobs.events("j")),
            lambda: list(client.dead_letters.list()),
            lambda: client.dead_letters.get("j"),
            client.dead_letters.replay,
            lambda: client.dead_letters.discard("j"),
            client.queues.list,
            lambda: client.queues.pause("q"),
            lambda: client.queues.resume("q"),
            lambda: client.queues.cap("q", 1),
            client.workers.list,
            lambda: client.workers.drain("w"),
            client.recipes.list,
            lambda: client.recipes.get("r"),
            lambda: client.recipes.validate({}),
            lambda: client.webhooks.create("http://x"),
            lambda: list(client.webhooks.list()),
            lambda: client.webhooks.get("e"),
            lambda: client.webhooks.change("e", state="enabled"),
            lambda: client.webhooks.delete("e"),
            lambda: client.webhooks.rotate("e"),
            lambda: client.webhooks.test("e"),
            lambda: client.webhooks.recover("e", now),
            lambda: list(client.webhooks.deliveries("e")),
            lambda: client.webhooks.delivery("d"),
            lambda: client.webhooks.redeliver("d"),
            client.webhooks.inbox,
        ]
        for call in calls:
            with contextlib.suppress(NotFound, ValidationError, KeyError):
                call()
    unreached = {
        f"{method.upper()} {path}"
        for path, methods in openapi()["paths"].items()
        for method in methods
        if not any(
            method.upper() == m and re.fullmatch(re.sub(r"{\w+}", "[^/]+", path), p)
            for m, p in seen
        )
    }
    assert unreached == {
        "GET /v1/media/{media_id}/variants/{name}",  # a variant has its `url`
        "GET /v1/uploads/{upload_id}/parts",  # inside `submit`, after an answer
        "POST /v1/uploads/{upload_id}/parts",
        "POST /v1/uploads/{upload_id}/complete",
        "POST /v1/uploads/{upload_id}/abort",  # one that is forgotten ends by itself
        "POST /v1/inbox",  # where webhooks go
    }


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
    big.write_bytes(b"\xff\xd8\xff\xe0" + bytes(40 * _MIB))
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


class Meeting(httpx.HTTPTransport):
    """Lets PUTs go on only when several are under way."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self._met = threading.Barrier(parties, timeout=20)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PUT" and request.headers["content-length"] != "4":
            self._met.wait()
        return super().handle_request(request)


async def test_parts_are_sent_side_by_side_and_the_first_that_fails_ends_the_others(
    served: Served, big: Path
) -> None:
    seen: list[Progress] = []

    def work() -> None:
        with _client(served, transport=Meeting(2)) as client:
            media = client.media.submit(big, way="multipart", on_progress=seen.append)
            assert media.state == "queued"
        first = [True]
        lost = Faulty(lambda r: r.method == "PUT" and bool(first) and first.pop())
        with (
            _client(served, transport=lost, max_retries=0) as client,
            pytest.raises(ConnectionFailed, match="was cut"),
        ):
            client.media.submit(big, way="multipart")

    await asyncio.to_thread(work)
    percents = [p.percent for p in seen if p.percent is not None]
    assert percents == sorted(percents)
    assert percents[-1] == 100.0


async def test_a_slot_is_filled_by_somebody_else_and_an_address_is_fetched(
    served: Served,
) -> None:
    def work() -> None:
        with _client(served) as client:
            slot = client.media.open(12, filename="a.jpg", content_type="image/jpeg")
            assert slot.state == "awaiting_upload"
            with pytest.raises(Conflict):
                client.media.complete(slot)
            up = slot.upload
            httpx.request(
                up.method, up.url, headers=up.headers, content=b"\xff\xd8\xff\xe0 another"
            )
            assert client.media.complete(slot).state == "queued"
            assert client.media.complete(slot.id).state == "queued"
            fetched = client.media.fetch("http://127.0.0.1:9/film.mp4", recipe="web")
            assert (fetched.state, fetched.filename) == ("awaiting_upload", "film.mp4")
            with pytest.raises(InvalidRequest) as caught:
                client.media.fetch("http://169.254.169.254/")
            assert caught.value.errors[0]["pointer"] == "/source/url"
            token = client.media.upload_token(ttl_seconds=60)
            assert token.companion_url.endswith(token.token)
            for address in (
                client.stream_url(),
                client.media.stream_url(slot),
                client.jobs.stream_url(next(client.jobs.list())),
            ):
                with httpx.stream("GET", address.url, timeout=10) as stream:
                    assert stream.status_code == 200
            with pytest.raises(NotFound, match="inbox"):
                client.webhooks.inbox()

    await asyncio.to_thread(work)


async def test_keys_figures_and_bulk_calls_come_typed(served: Served, tmp_path: Path) -> None:
    bodies = [await served.api.queued() for _ in range(3)]
    ready = await served.api.ready({"w8.webp": b"0123456789"})
    operator = await served.api.new_key(served.api.tenant, "admin", "operate")

    def work() -> None:
        with _client(served) as client:
            made = client.keys.create("viewer of mine", role="viewer")
            assert made.api_key is not None
            with Client(served.url, made.api_key) as viewer:
                own = viewer.keys.own()
                assert (own.id, own.role) == (made.id, "viewer")
                with pytest.raises(Forbidden):
                    viewer.keys.list()
            assert {k.id for k in client.keys.list()} >= {made.id}
            client.keys.revoke(made)
            with pytest.raises(Conflict):
                client.keys.revoke(client.keys.own().id)
            assert client.jobs.cancel_all(queue="image") == len(bodies)
            assert client.jobs.replay_all(queue="image") == 0, "none has failed"
            assert client.dead_letters.groups() == []
            assert len(client.figures(minutes=5).steps) == 60
            path = client.media.original(ready["id"], tmp_path)
            assert path.stat().st_size == client.media.get(ready["id"]).size
            with pytest.raises(Conflict):
                client.media.original(client.media.open(5), tmp_path / "none")
            assert not (tmp_path / "none").exists()
        with Client(served.url, operator) as client:
            assert "port" in {s.name for s in client.settings()}
            assert client.check_storage()[0].ok

    await asyncio.to_thread(work)


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


def test_where_nothing_streams_or_waits_the_client_asks_at_the_pace_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A proxy that answers streams with an error and drops `Prefer`."""
    asked: list[str] = []
    pauses: list[float] = []
    left = 6

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal left
        asked.append(request.url.path.rpartition("/")[2])
        if asked[-1] == "events":
            return httpx.Response(502)
        left -= 1
        body = {"id": "med_1", "state": "ready" if left == 0 else "processing", "progress": 5.0}
        stamps = {"created_at": "2026-01-01T00:00:00Z", "updated_at": "2026-01-01T00:00:00Z"}
        headers = {"ETag": f'"{left > 0}"', "Retry-After": "7"}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return httpx.Response(304, headers=headers)
        return httpx.Response(200, json=body | stamps, headers=headers)

    monkeypatch.setattr(threading.Event, "wait", lambda _, seconds: pauses.append(seconds))
    with Client("http://x", "k", transport=httpx.MockTransport(answer)) as client:
        media = client.media.wait("med_1", timeout_seconds=600)
    assert media.state == "ready"
    assert asked.count("events") == 3, "streams are given up after three cuts"
    assert pauses == [7.0] * len(pauses)
    assert pauses


async def test_one_callback_hears_of_the_upload_and_of_the_work(served: Served) -> None:
    seen: list[Progress] = []
    at_work = asyncio.Event()

    def told(progress: Progress) -> None:
        seen.append(progress)
        if progress.phase == "process":
            at_work.set()

    async with AsyncClient(served.url, served.api.token) as client:
        waiting = asyncio.create_task(
            client.media.submit_and_wait(
                b"\xff\xd8\xff\xe0 small", timeout_seconds=60, on_progress=told
            )
        )
        await at_work.wait()
        (item,) = [m async for m in client.media.list()]
        await _publish(served, item.id, {"w8.webp": b"0123456789"})
        media = await waiting
    assert (media.id, media.state) == (item.id, "ready")
    assert [p.phase for p in seen] == sorted((p.phase for p in seen), reverse=True)
    assert {p.phase for p in seen} == {"upload", "process"}


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

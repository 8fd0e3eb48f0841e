"""What clients are told, through real processes: streams and webhooks, over deaths and outages."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import random
import re
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from standardwebhooks.webhooks import Webhook
from tests.stories.clips import Clips
from tests.stories.harness import Body, Platform, until

LOCAL = '["127.0.0.0/8"]'
QUICK: dict[str, object] = {
    "egress_allow_networks": LOCAL,
    "webhook_timeout_seconds": 1.0,
    "webhook_schedule_seconds": "[0.3, 0.3, 0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]",
    "webhook_breaker_seconds": 0.5,
}


def stream(
    platform: Platform, path: str, *, last: str | None = None
) -> Iterator[tuple[str | None, str, str]]:
    """The events of one stream as id, type and data, until it closes."""
    headers = {} if last is None else {"Last-Event-ID": last}
    with platform.http.stream("GET", path, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200
        fields: dict[str, str] = {}
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if line and name:
                fields[name] = value
            elif not line:
                if "data" in fields:
                    yield fields.get("id"), fields["event"], fields["data"]
                fields = {}


@dataclass(slots=True)
class Receiver:
    """A web server of somebody's own."""

    port: int = 0
    letters: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hooks"

    def bodies(self) -> list[Body]:
        return [json.loads(body) for _, body in list(self.letters)]


@contextmanager
def receiving(port: int = 0, status: Callable[[int], int] = lambda n: 204) -> Iterator[Receiver]:
    """`status` tells what the nth request is answered."""
    receiver = Receiver()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.letters.append(({k.lower(): v for k, v in self.headers.items()}, body))
            self.send_response(status(len(receiver.letters)))
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    receiver.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def register(platform: Platform, url: str, **more: object) -> Body:
    answer = platform.http.post("/v1/webhook-endpoints", json={"url": url, **more})
    assert answer.status_code == 201, answer.text
    body: Body = answer.json()
    return body


def told(platform: Platform) -> Counter[str]:
    """Every event of the log, by its public id."""
    from mediamill import ids

    rows = platform.rows("SELECT event_id FROM events")
    return Counter(ids.encode(ids.EVENT, row["event_id"]) for row in rows)


def test_stream_and_webhooks_tell_the_same_from_upload_to_ready(
    make_platform: Callable[..., Platform], clips: Clips
) -> None:
    platform = make_platform(**QUICK)
    api = platform.start_api()
    platform.start_worker("image=1,webhook=4,maintenance=1")
    with receiving() as receiver:
        endpoint = register(platform, receiver.url)
        slot = platform.open_slot(len(clips.large_photo), "photo.jpg")
        heard: list[tuple[str | None, str, Body]] = []

        def watch() -> None:
            for number, type_, data in stream(platform, f"{slot['links']['self']}/events"):
                heard.append((number, type_, json.loads(data)))

        watching = threading.Thread(target=watch)
        watching.start()
        until(lambda: heard, seconds=20, why="no snapshot came")
        platform.put(slot, clips.large_photo)
        platform.complete(slot["id"])
        platform.wait_for_state(slot["id"], "ready")
        watching.join(20)
        assert not watching.is_alive()
        wanted = told(platform)
        until(
            lambda: len(receiver.letters) >= wanted.total(),
            seconds=20,
            why=f"{len(receiver.letters)} of {wanted.total()} events came",
        )
        checker = Webhook(endpoint["secret"])
        for headers, body in receiver.letters:
            checker.verify(body, headers)
        by_webhook = {body["id"]: body for body in receiver.bodies()}
    assert Counter(body["id"] for body in receiver.bodies()) == wanted
    assert heard[0][1] == "snapshot"
    assert heard[-1][1] == "media.ready"
    streamed = [body for number, _, body in heard[1:] if number is not None]
    assert streamed
    for one in streamed:
        assert by_webhook[one["id"]] == one
    assert len(heard[-1][2]["data"]["variants"]) == 12
    percents = [b["data"]["progress"] for _, t, b in heard if t == "job.progress"]
    assert all(p is None or 0 <= p <= 100 for p in percents)
    known = [p for p in percents if p is not None]
    assert known == sorted(known)
    assert api.stop() in (0, -signal.SIGTERM)  # uvicorn ends by the signal that it was sent


def test_one_request_waits_for_the_end_and_the_time_line_tells_the_lag_before_it(
    make_platform: Callable[..., Platform], clips: Clips
) -> None:
    platform = make_platform(**QUICK)
    platform.start_api()
    platform.start_worker("image=1,webhook=4")
    with receiving() as receiver:
        register(platform, receiver.url, types=["endpoint.disabled"])
        slot = platform.open_slot(len(clips.large_photo), "photo.jpg")
        platform.put(slot, clips.large_photo)
        path = slot["links"]["self"]
        answer = platform.http.post(f"{path}/complete", headers={"Prefer": "wait=25"})
        assert (answer.status_code, answer.json()["state"]) == (200, "ready"), answer.text
        assert len(answer.json()["variants"]) == 12
        told = platform.http.get(f"{path}/timeline").json()
        names = [segment["name"] for segment in told["segments"]]
        assert names[:2] == ["awaiting_upload", "event_lag"]
        total = sum(segment["seconds"] for segment in told["segments"])
        assert abs(total - told["total_seconds"]) < 1e-5
        again = platform.http.post(f"{path}/process", json={"callback_url": f"{receiver.url}/2"})
        assert again.status_code == 202, again.text
        platform.wait_for_state(slot["id"], "ready")
        until(
            lambda: "media.ready" in {body["type"] for body in receiver.bodies()},
            seconds=20,
            why="the callback was not told",
        )


def test_a_courier_that_is_killed_after_sending_sends_again_under_the_same_id(
    make_platform: Callable[..., Platform],
) -> None:
    platform = make_platform(**QUICK)
    platform.start_api()
    with receiving() as receiver:
        register(platform, receiver.url, types=["media.uploaded", "media.queued"])
        first = platform.start_worker("webhook=2", failpoint="webhook.sent:kill9:1")
        platform.upload(b"no picture", "p.jpg")
        until(lambda: not first.alive, seconds=20, why="the worker did not meet its failpoint")
        sent = len(receiver.letters)
        assert sent >= 1
        assert platform.value("SELECT count(*) FROM deliveries WHERE state = 'pending'") == 2
        platform.start_worker("webhook=2")
        until(
            lambda: platform.value("SELECT count(*) FROM deliveries WHERE state = 'pending'") == 0,
            seconds=30,
            why="a delivery is still pending",
        )
    seen = Counter(headers["webhook-id"] for headers, _ in receiver.letters)
    assert len(seen) == 2
    assert seen.total() == 2 + sent
    for headers, body in receiver.letters:
        assert json.loads(body)["id"] == headers["webhook-id"]


def test_every_event_of_an_outage_arrives_or_is_given_up_and_can_be_recovered(
    make_platform: Callable[..., Platform],
) -> None:
    """The receiver is down, then answers 500 for a while; one endpoint never comes back."""
    platform = make_platform(**QUICK)
    platform.start_api()
    with receiving() as receiver:
        port = receiver.port
    alive = register(platform, f"http://127.0.0.1:{port}/hooks", types=["media.*"])
    dead = register(platform, "http://127.0.0.1:9/", types=["media.uploaded"])
    platform.start_worker("webhook=4")
    for _ in range(4):
        platform.upload(b"no picture", "p.jpg")
    count = "SELECT count(*) FROM delivery_attempts"
    until(lambda: platform.value(count) >= 6, seconds=30, why="nothing was tried")
    with receiving(port, lambda n: 500 if n <= 3 else 204) as receiver:
        until(
            lambda: (
                platform.value("SELECT count(*) FROM deliveries WHERE state = 'delivered'") == 8
            ),
            seconds=60,
            why="not everything was delivered",
        )
        ids = Counter(headers["webhook-id"] for headers, _ in receiver.letters)
        assert len(ids) == 8
        for headers, body in receiver.letters:
            Webhook(alive["secret"]).verify(body, headers)
    # The one that never comes back is switched off by its owner: what waits for it is given up.
    path = dead["links"]["self"]
    tag = {"If-Match": platform.http.get(path).headers["etag"]}
    answer = platform.http.patch(path, json={"state": "disabled"}, headers=tag)
    assert answer.status_code == 200
    pending = "SELECT count(*) FROM deliveries WHERE state = 'pending'"
    assert platform.value(pending) == 0
    states = Counter(row["state"] for row in platform.rows("SELECT state FROM deliveries"))
    assert states == {"delivered": 8, "exhausted": 4}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_ten_thousand_who_wait_come_back_spread_after_a_restart_and_miss_nothing(
    make_platform: Callable[..., Platform],
) -> None:
    """Half of them stream, half of them poll with a long wait; all do as they are told."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    half = min(5000, (hard - 1000) // 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * half + 1000)), hard))
    platform = make_platform(
        max_event_streams=2 * half, max_event_streams_per_tenant=half, max_waiters=half
    )
    api = platform.start_api()
    slot = platform.open_slot(10, "p.jpg")
    crowd = Crowd(platform, slot["links"]["self"], half)
    with crowd.waiting():
        until(
            lambda: crowd.check() and crowd.present == 2 * half, seconds=120, why=crowd.say("wait")
        )
        memory = [resident(api.pid)]
        api.send(signal.SIGTERM)
        assert api.popen.wait(20) is not None
        crowd.restarted()
        api = platform.start_api()
        until(
            lambda: crowd.check() and crowd.present == 2 * half,
            seconds=180,
            why=crowd.say("came back"),
        )
        memory.append(resident(api.pid))
        returns = crowd.returns
        busiest = max(Counter(int(at * 2) for at in returns).values())
        assert busiest < 0.35 * len(returns), (
            f"{busiest} of {len(returns)} came within half a second"
        )
        platform.http.delete(slot["links"]["self"]).raise_for_status()
        until(
            lambda: crowd.check() and crowd.told == 2 * half,
            seconds=120,
            why=crowd.say("heard of the end"),
        )
    each = (max(memory) - BASE_BYTES) / (2 * half)
    assert each < 64 << 10, f"{each / 1024:.0f} KiB for each who waits"


BASE_BYTES: Final = 150 << 20
"""Of an API process at rest, generously."""


def resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Crowd:
    """Clients that wait for one media, over plain sockets, in a thread with a loop of its own."""

    def __init__(self, platform: Platform, path: str, half: int) -> None:
        self._port, self._key, self._path, self._half = platform.port, platform.key, path, half
        self._connecting = asyncio.Semaphore(200)
        self._last: float | None = None
        self._over = False
        self.failures: list[str] = []
        self.present = 0
        self.told = 0
        self.returns: list[float] = []

    def say(self, what: str) -> str:
        return f"not all {2 * self._half} {what}"

    def check(self) -> bool:
        assert not self.failures, self.failures[:3]
        return True

    def restarted(self) -> None:
        """From now on attempts to connect count as returns."""
        self._last = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        thread = threading.Thread(target=asyncio.run, args=[self._all()])
        thread.start()
        try:
            yield
        finally:
            self._over = True
            thread.join(60)

    async def _all(self) -> None:
        clients = [self._stays(self._stream) for _ in range(self._half)]
        clients += [self._stays(self._poll) for _ in range(self._half)]
        everybody = [asyncio.create_task(client) for client in clients]
        while not self._over and any(not task.done() for task in everybody):
            await asyncio.sleep(0.1)
            self.failures += [
                repr(t.exception())
                for t in everybody
                if t.done() and not t.cancelled() and t.exception()
            ]
        for task in everybody:
            task.cancel()
        await asyncio.gather(*everybody, return_exceptions=True)

    async def _stays(self, once: Callable[[], Awaitable[float | None]]) -> None:
        """Again and again, with the pause that it was told, until it has heard of the end."""
        told = 0.0
        while True:
            try:
                pause = await once()
            except (OSError, EOFError):
                pause = told or random.uniform(2, 6)
            if pause is None:
                self.told += 1
                return
            told = pause
            await asyncio.sleep(pause)

    @asynccontextmanager
    async def _line(
        self, *headers: str, path: str
    ) -> AsyncIterator[tuple[str, asyncio.StreamReader]]:
        """The head of an answer, and where its body comes from."""
        if self._last is not None:
            self.returns.append(time.monotonic() - self._last)
        async with self._connecting:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=16384)
        try:
            lines = [
                f"GET {path} HTTP/1.1",
                "Host: localhost",
                f"Authorization: Bearer {self._key}",
            ]
            writer.write("\r\n".join([*lines, *headers, "", ""]).encode())
            self.present += 1
            try:
                yield (await reader.readuntil(b"\r\n\r\n")).decode().lower(), reader
            finally:
                self.present -= 1
        finally:
            writer.close()

    async def _stream(self) -> float | None:
        pause = 3.0
        async with self._line(path=f"{self._path}/events") as (head, reader):
            if " 503 " in head:
                return self._pause(head)
            assert " 200 " in head, head
            while line := await reader.readline():
                if line.startswith(b"retry: "):
                    pause = int(line.removeprefix(b"retry: ")) / 1000
                if line.startswith(b"event: media.deleted"):
                    return None
        return pause

    async def _poll(self) -> float | None:
        headers = ("Prefer: wait=60", "If-None-Match: " + self._tag, "Connection: close")
        async with self._line(*headers, path=self._path) as (head, _):
            if " 410 " in head:
                return None
            found = re.search(r"etag: (\S+)", head)
            if found:
                self._tag = found[1].upper() if found[1].startswith("w/") else found[1]
            return self._pause(head)

    @staticmethod
    def _pause(head: str) -> float:
        told = re.search(r"retry-after: (\d+)", head)
        return float(told[1]) if told else 0.0

    _tag = '"none"'


def test_streams_end_with_the_api_and_go_on_with_the_next_one(
    make_platform: Callable[..., Platform],
) -> None:
    platform = make_platform(**QUICK)
    api = platform.start_api()
    media_id = platform.upload(b"no picture", "p.jpg")
    heard: list[str | None] = []
    closed = threading.Event()

    def watch() -> None:
        for number, _, _ in stream(platform, "/v1/events"):
            heard.append(number)
        closed.set()

    watching = threading.Thread(target=watch)
    watching.start()
    until(lambda: heard, seconds=20, why="no snapshot came")
    api.send(signal.SIGTERM)
    assert closed.wait(1.0), "the stream outlived its process by a second"
    watching.join()
    api.popen.wait(10)
    last = heard[-1]
    platform.start_api()
    answer = platform.http.delete(f"/v1/media/{media_id}")
    assert answer.status_code == 202
    for _, type_, _ in stream(platform, "/v1/events", last=last):
        assert type_ != "snapshot"
        if type_ == "media.deleted":
            break

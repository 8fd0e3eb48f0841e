"""Telling clients: polls per core, idle streams, deliveries, one black hole, and the honest clock.

Everything runs on loopback through a real API and a real worker; the receivers of webhooks and the
ends of the streams live in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx2 as httpx
from benchmarks import harness
from benchmarks.harness import Report, Stand, percentile, say
from PIL import Image

from mediamill import AsyncClient, db, estimates, ids, media, tools, uploads, webhooks
from mediamill.sealing import Vault

_LOCAL: Final = ["127.0.0.0/8"]
_CLIENTS: Final = 16
_HEALTHY: Final = 50
_HOLE_EVENTS: Final = 1000
_PACE_SECONDS: Final = 0.45
"""Between two submissions, on average: two cores are about two thirds busy with them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each steady load")
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--jobs", type=int, default=400, help="of the calibration")
    parser.add_argument("--only", choices=["polls", "streams", "webhooks", "hole", "clock"])
    given = parser.parse_args()
    report = Report("telling")
    parts: dict[str, Callable[[Stand], None]] = {
        "polls": lambda here: polls(here, report, given.seconds),
        "streams": lambda here: streams(here, report, given.streams),
        "webhooks": lambda here: deliveries(here, report, given.seconds),
        "hole": lambda here: hole(here, report),
        "clock": lambda here: clock(here, report, given.jobs),
    }
    for name, part in parts.items():
        if given.only in (None, name):
            say(f"{name}:")
            with harness.stand(egress_allow_networks=_LOCAL) as here:
                part(here)
    report.close()


# ---------------------------------------------------------------- polling


def polls(here: Stand, report: Report, seconds: float) -> None:
    """The status of one media that does not change, over some connections."""
    with harness.service(here, "api") as api:
        path, tag = asyncio.run(_ready_media(here))
        before = harness.cpu_seconds(api)
        count = asyncio.run(_poll(here, path, tag, seconds))
        cpu = harness.cpu_seconds(api) - before
    report.figure("polls answered 304", count / seconds, "1/s")
    report.figure("polls per core of the API", count / cpu, "1/s")


async def _ready_media(here: Stand) -> tuple[str, str]:
    slot = uploads.slot(here.settings, harness.TENANT, uploads.Wanted(size=5))
    async with harness.database(here.dsn) as connection:
        await media.open_slot(connection, slot)
    path = f"/v1/media/{ids.encode(ids.MEDIA, slot.id)}"
    async with httpx.AsyncClient(base_url=here.settings.base_url) as client:
        answer = await client.get(path, headers=_key(here))
    return path, answer.headers["etag"]


async def _poll(here: Stand, path: str, tag: str, seconds: float) -> int:
    request = (
        f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {here.api_key}\r\n"
        f"If-None-Match: {tag}\r\n\r\n"
    ).encode()
    deadline = time.monotonic() + seconds

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.settings.port)
        done = 0
        while time.monotonic() < deadline:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 304"), head
            done += 1
        writer.close()
        return done

    return sum(await asyncio.gather(*(one() for _ in range(_CLIENTS))))


# ---------------------------------------------------------------- streams


def streams(here: Stand, report: Report, count: int) -> None:
    """Idle streams of one tenant, and one event for all of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(max(soft, count + 500), hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    count = min(count, wanted - 500)
    with harness.service(here, "api") as api:
        asyncio.run(_ready_media(here))
        empty = _rss(api)
        seconds, arrivals, full = asyncio.run(_hold(here, api, count))
        cpu = harness.cpu_seconds(api)
        time.sleep(5)
        idle = (harness.cpu_seconds(api) - cpu) / 5
    report.figure("streams", float(count))
    report.figure("opened", count / seconds, "1/s")
    report.figure("memory of each", (full - empty) / count / 1024, "KiB")
    report.figure("event to half of them", 1000 * percentile(arrivals, 0.5), "ms")
    report.figure("event to all of them", 1000 * max(arrivals), "ms")
    report.figure("processor after they left", idle, "cores")


async def _hold(here: Stand, api: int, count: int) -> tuple[float, list[float], float]:
    request = f"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {here.api_key}\r\n\r\n"
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    begun = time.monotonic()

    async def open_one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.settings.port)
        writer.write(request.encode())
        await reader.readuntil(b"event: snapshot")
        await reader.readuntil(b"\n\n")
        opened.append((reader, writer))

    for start in range(0, count, 100):
        await asyncio.gather(*(open_one() for _ in range(min(100, count - start))))
    seconds = time.monotonic() - begun
    full = _rss(api)

    async def hear(reader: asyncio.StreamReader) -> float:
        await reader.readuntil(b"event: media.ready")
        return time.monotonic()

    hearing = [asyncio.create_task(hear(reader)) for reader, _ in opened]
    await asyncio.sleep(0.5)
    async with harness.database(here.dsn) as connection:
        await _say_events(connection, "media.ready", 1)
        told = time.monotonic()
    heard = await asyncio.gather(*hearing)
    for _, writer in opened:
        writer.close()
    return seconds, [at - told for at in heard], full


def _rss(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return float(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS")


# ---------------------------------------------------------------- webhooks


@dataclass(slots=True)
class Sink:
    """Receivers on one port; the path tells them apart. `/hole` never answers."""

    port: int = 0
    arrived: dict[str, float] = field(default_factory=dict)
    hole_found: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            body = await reader.readexactly(length)
            if head.startswith(b"POST /hole"):
                self.hole_found.set()
                await asyncio.sleep(3600)
            self.arrived[json.loads(body)["id"]] = time.time()
            writer.write(b"HTTP/1.1 204 OK\r\nconnection: close\r\n\r\n")
            await writer.drain()
        writer.close()


async def _say_events(connection: db.Connection, type_: str, count: int) -> dict[str, float]:
    """Events as the status store writes them; when each was committed, by its id."""
    rows = await connection.fetch(
        "INSERT INTO events (tenant_id, type, data) SELECT $1, $2, $3 FROM generate_series(1, $4)"
        " RETURNING event_id",
        harness.TENANT,
        type_,
        {"state": "ready"},
        count,
    )
    now = time.time()
    return {ids.encode(ids.EVENT, row["event_id"]): now for row in rows}


async def _endpoint(connection: db.Connection, url: str, *types: str) -> None:
    wanted = webhooks.Wanted(url, types=list(types))
    await webhooks.add(connection, harness.TENANT, wanted, origin="-", most=10_000, vault=Vault())


def deliveries(here: Stand, report: Report, seconds: float) -> None:
    """A burst for its rate, then a trickle for the time from commit to the first attempt."""
    with harness.service(here, "worker", slots="webhook=16") as worker:
        harness.await_worker(here, worker)
        rate, late = asyncio.run(_deliver(here, seconds))
    report.figure("deliveries in a burst", rate, "1/s")
    report.figure("commit to first attempt, half", 1000 * percentile(late, 0.5), "ms")
    report.figure("commit to first attempt, p99", 1000 * percentile(late, 0.99), "ms")


async def _deliver(here: Stand, seconds: float) -> tuple[float, list[float]]:
    sink = Sink()
    server = await asyncio.start_server(sink.serve, "127.0.0.1", 0, backlog=512)
    sink.port = server.sockets[0].getsockname()[1]
    async with harness.database(here.dsn) as connection:
        for n in range(_HEALTHY):
            await _endpoint(connection, f"http://127.0.0.1:{sink.port}/{n}", "media.ready")
        begun = time.monotonic()
        await _say_events(connection, "media.ready", 40)
        while True:
            left = await connection.fetchval(
                "SELECT count(*) FROM deliveries WHERE state = 'pending'"
            )
            if not left:
                break
            await asyncio.sleep(0.05)
        rate = 40 * _HEALTHY / (time.monotonic() - begun)
        await connection.execute("UPDATE endpoints SET types = '{none}' WHERE url NOT LIKE '%/0'")
        said: dict[str, float] = {}
        for _ in range(int(seconds * 20)):
            said |= await _say_events(connection, "media.ready", 1)
            await asyncio.sleep(0.05)
        await asyncio.sleep(2)
    server.close()
    return rate, [sink.arrived[event] - at for event, at in said.items()]


def hole(here: Stand, report: Report) -> None:
    """An endpoint that never answers, with a thousand events, beside fifty that do."""
    with harness.service(here, "worker", slots="webhook=8") as worker:
        harness.await_worker(here, worker)
        late = asyncio.run(_beside_a_hole(here))
    report.figure("healthy deliveries beside it", float(len(late)))
    report.figure("healthy, half", 1000 * percentile(late, 0.5), "ms")
    report.aim("healthy p99 beside a black hole, s", percentile(late, 0.99), most=2.0)


async def _beside_a_hole(here: Stand) -> list[float]:
    sink = Sink()
    server = await asyncio.start_server(sink.serve, "127.0.0.1", 0, backlog=512)
    sink.port = server.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{sink.port}"
    late: list[float] = []
    async with harness.database(here.dsn) as connection:
        await _endpoint(connection, f"{url}/hole", "media.failed")
        await _say_events(connection, "media.failed", _HOLE_EVENTS)
        await sink.hole_found.wait()
        for n in range(_HEALTHY):
            await _endpoint(connection, f"{url}/{n}", f"media.{n}")
        said: dict[str, float] = {}
        for _ in range(20):
            for n in random.sample(range(_HEALTHY), 20):
                said |= await _say_events(connection, f"media.{n}", 1)
            await asyncio.sleep(1)
        await asyncio.sleep(3)
        late = [sink.arrived.get(event, at + 99) - at for event, at in said.items()]
    server.close()
    return late


# ---------------------------------------------------------------- the clock


def clock(here: Stand, report: Report, count: int) -> None:
    """Pictures, films, sounds and jobs of two kinds that arrive in bursts; as many again as a
    quarter of them warm it up."""
    samples = _samples(here.work)
    with (
        harness.service(here, "api"),
        harness.service(
            here,
            "worker",
            slots="default=4,image=2,video=1,audio=1",
            app="benchmarks.telling_app:mill",
        ) as worker,
    ):
        harness.await_worker(here, worker)
        records = asyncio.run(_submit(here, count, samples))
    jobs = sum(r.jobs for r in records)
    held = sum(r.held * r.jobs for r in records) / jobs
    report.figure("forecasts held against what came", float(jobs))
    for record in records:
        report.figure(f"p90 held, {record.kind}", record.held)
        report.figure(f"median error of p50, {record.kind}", record.median_error)
    report.aim("p90 held, at least", held, least=0.85)
    report.aim("p90 held, at most", held, most=0.95)


def _samples(folder: Path) -> dict[str, list[Path]]:
    """Some pictures, films and sounds of different sizes and lengths, by kind."""
    made: dict[str, list[Path]] = {"image": [], "video": [], "audio": []}
    for width in (320, 800, 1600, 3000):
        path = folder / f"{width}.jpg"
        noise = Image.effect_noise((width // 8, width // 12), 80).convert("RGB")
        noise.resize((width, width * 2 // 3)).save(path, quality=88)
        made["image"].append(path)
    ffmpeg = tools.resolve().ffmpeg
    inputs = ("-f", "lavfi", "-i", "testsrc2=s=320x180:r=25", "-f", "lavfi", "-i", "sine=r=48000")
    for kind, ending, seconds, codecs in (
        ("video", "mp4", (1, 3, 6), ("-c:v", "libx264", "-preset", "ultrafast", "-c:a", "aac")),
        ("audio", "wav", (5, 30, 90), ("-vn", "-c:a", "pcm_s16le")),
    ):
        for length in seconds:
            path = folder / f"{length}.{ending}"
            command = [ffmpeg, "-v", "error", *inputs, *codecs, "-t", str(length), str(path)]
            subprocess.run(command, check=True)
            made[kind].append(path)
    return made


async def _submit(
    here: Stand, count: int, samples: Mapping[str, Sequence[Path]]
) -> list[estimates.Record]:
    async with (
        harness.database(here.dsn) as connection,
        AsyncClient(here.settings.base_url, api_key=here.api_key) as client,
    ):
        await _arrive(client, count // 4, samples)
        await _drained(connection)
        warm: Any = await connection.fetchval("SELECT clock_timestamp()")
        await _arrive(client, count, samples)
        await _drained(connection)
        await connection.execute("DELETE FROM forecasts WHERE made_at < $1", warm)
        return await estimates.record(connection, days=1)


async def _arrive(client: AsyncClient, count: int, samples: Mapping[str, Sequence[Path]]) -> None:
    chance = random.Random(11)
    sent = 0
    while sent < count:
        burst = chance.choice([1, 1, 2, 3, 5, 8, 20])
        for _ in range(min(burst, count - sent)):
            (what,) = chance.choices(
                ["image", "audio", "video", "bench.quick", "bench.slow"], [5, 2, 1, 4, 1]
            )
            if what in samples:
                await client.media.submit(chance.choice(samples[what]))
            else:
                await client.jobs.create(what)
            sent += 1
        await asyncio.sleep(burst * _PACE_SECONDS * chance.uniform(0.5, 1.8))


async def _drained(connection: db.Connection) -> None:
    live = "SELECT count(*) FROM jobs WHERE state IN ('queued', 'processing')"
    while True:
        if not await connection.fetchval(live):
            return
        await asyncio.sleep(0.2)


def _key(here: Stand) -> dict[str, str]:
    return {"Authorization": f"Bearer {here.api_key}"}


if __name__ == "__main__":
    main()

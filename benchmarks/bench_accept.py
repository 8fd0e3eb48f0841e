"""Accepting a job, against a bare durable INSERT on the same PostgreSQL, in the same minutes.

Rounds of each contender follow each other in random order; every ratio is taken within a cycle. The
load comes from a process of its own (load.py) over 32 connections.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import floor, harness, load
from benchmarks.harness import Report, Stand, percentile, ratios, say, spread

from mediamill import ids, media, tools, uploads

HERE: Final = Path(__file__).resolve().parent
CONNECTIONS: Final = 32
CAPACITY_SHARE: Final = 0.4
_BATCH: Final = 250
_TINY: Final = 64
_BOUNDARY: Final = "mediamill-bench"


@dataclass(frozen=True, slots=True)
class Round:
    """One contender for some seconds. Processor time is in milliseconds for each answer."""

    rate: float
    p50_ms: float
    p99_ms: float
    server_cpu_ms: float
    postgres_cpu_ms: float
    answers: int
    latencies_ms: list[float]


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that takes requests: `repeats` again and again, or each of its own once."""

    name: str
    port: int
    pid: int
    status: int
    repeats: bytes | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="cycles of each comparison")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a round")
    parser.add_argument("--paced-rounds", type=int, default=6)
    parser.add_argument("--paced-seconds", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    report = Report("accept")
    chance = random.Random(options.seed)
    say(f"load average {harness.load_average():.2f} at the start")
    with harness.stand() as here:
        port = harness.free_port()
        floor_argv = [sys.executable, str(HERE / "floor.py"), str(port), here.dsn]
        floor_argv.append(str(here.settings.database_pool_size))
        with (
            harness.service(here, "api") as api,
            harness.process(floor_argv, env=None, log=here.work / "floor.log") as bare,
        ):
            harness.wait_until(lambda: _listens(port), seconds=30)
            ours = Contender("complete", here.settings.port, api, 202)
            base = Contender("floor", port, bare, 202, load.request("POST", floor.PATH))
            form = Contender("form", here.settings.port, api, 202, _form(here))
            capacity = _compare(here, report, [ours, base, form], options, chance)
            _busy(here, report, ours, capacity * CAPACITY_SHARE, options, chance)
    report.figure("load average at the end", harness.load_average())
    report.close()


# ---------------------------------------------------------------- requests/s


def _compare(
    here: Stand,
    report: Report,
    contenders: list[Contender],
    options: argparse.Namespace,
    chance: random.Random,
) -> float:
    """(a) to (c): as fast as 32 connections go. Returns the median requests/s of `complete`."""
    # Pools fill and statements are prepared, untimed; it also tells how many slots are needed.
    for contender in contenders:
        _measure(here, contender, _prepared(here, contender, 1000), seconds=1.5)
    first = _measure(here, contenders[0], _prepared(here, contenders[0], 2000), seconds=1.5)
    needed = int(first.rate * options.seconds * 1.6)
    stock = [
        _prepared(here, contenders[0], needed, name=f"complete-{n}") for n in range(options.rounds)
    ]
    asyncio.run(_settle(here))
    say(f"\n{CONNECTIONS} connections, closed loop, {options.rounds} × {options.seconds:g} s")
    found: dict[str, list[Round]] = defaultdict(list)
    for cycle in range(options.rounds):
        for contender in chance.sample(contenders, len(contenders)):
            requests = stock[cycle] if contender.repeats is None else _prepared(here, contender, 1)
            done = _measure(here, contender, requests, seconds=options.seconds)
            found[contender.name].append(done)
        say(
            f"  cycle {cycle + 1}, load {harness.load_average():.1f}: "
            + ", ".join(f"{name} {rounds[-1].rate:.0f}/s" for name, rounds in found.items())
        )
    for name, rounds in found.items():
        report.figure(f"{name}: requests/s", spread([r.rate for r in rounds]))
        report.figure(f"{name}: p50", spread([r.p50_ms for r in rounds]), "ms")
        report.figure(f"{name}: p99", spread([r.p99_ms for r in rounds]), "ms")
        report.figure(
            f"{name}: server CPU per request", spread([r.server_cpu_ms for r in rounds]), "ms"
        )
        report.figure(
            f"{name}: PostgreSQL CPU per request", spread([r.postgres_cpu_ms for r in rounds]), "ms"
        )
    rates = {name: [r.rate for r in rounds] for name, rounds in found.items()}
    ratio = ratios(rates["complete"], rates["floor"])
    report.figure("complete / floor, requests/s", ratio)
    report.figure("form / floor, requests/s", ratios(rates["form"], rates["floor"]))
    used = {n: [r.server_cpu_ms + r.postgres_cpu_ms for r in rounds] for n, rounds in found.items()}
    report.figure("complete / floor, CPU per request", ratios(used["complete"], used["floor"]))
    report.figure("form / floor, CPU per request", ratios(used["form"], used["floor"]))
    report.aim("complete / floor, requests/s", ratio.median, least=0.5)
    return spread(rates["complete"]).median


def _measure(
    here: Stand,
    contender: Contender,
    requests: Path,
    *,
    seconds: float,
    rate: float | None = None,
) -> Round:
    argv = [sys.executable, str(HERE / "load.py"), "127.0.0.1", str(contender.port), str(requests)]
    argv += ["--connections", str(CONNECTIONS), "--seconds", str(seconds)]
    argv += ["--rate", str(rate)] if rate is not None else []
    argv += ["--repeat"] if contender.repeats is not None else []
    before = harness.cpu_seconds(contender.pid), harness.cpu_seconds(here.postgres_pid)
    done = subprocess.run(argv, capture_output=True, check=False, timeout=seconds + 120)
    after = harness.cpu_seconds(contender.pid), harness.cpu_seconds(here.postgres_pid)
    requests.unlink()
    if done.returncode != 0:
        raise RuntimeError(f"the load generator failed: {done.stderr.decode()[-2000:]}")
    result = json.loads(done.stdout)
    strange = {s: n for s, n in result["statuses"].items() if int(s) != contender.status}
    if strange:
        raise RuntimeError(f"{contender.name} answered {strange}, not only {contender.status}")
    latencies = result["latencies_ms"]
    count = len(latencies)
    return Round(
        rate=count / result["seconds"],
        p50_ms=percentile(latencies, 0.5),
        p99_ms=percentile(latencies, 0.99),
        server_cpu_ms=1000 * (after[0] - before[0]) / count,
        postgres_cpu_ms=1000 * (after[1] - before[1]) / count,
        answers=count,
        latencies_ms=latencies,
    )


# ---------------------------------------------------------------- latency beside an encode


def _busy(
    here: Stand,
    report: Report,
    ours: Contender,
    rate: float,
    options: argparse.Namespace,
    chance: random.Random,
) -> None:
    """(d): p99 at a fixed pace, with and without a video slot at work. No image slot is served."""
    seconds = options.paced_seconds
    needed = int(rate * seconds) + 50
    say(
        f"\nopen loop at {rate:.0f}/s ({CAPACITY_SHARE:.0%} of the capacity above), "
        f"{options.paced_rounds} × {seconds:g} s"
    )
    clip = _clip(here.work / "long.mp4")
    stock = [
        _prepared(here, ours, needed, name=f"paced-{n}") for n in range(2 * options.paced_rounds)
    ]
    asyncio.run(_settle(here))
    found: dict[bool, list[Round]] = {True: [], False: []}
    with harness.service(here, "worker", slots="video=1") as worker:
        harness.await_worker(here, worker)
        video = _Video(here, clip)
        for cycle in range(options.paced_rounds):
            for busy in chance.sample([True, False], 2):
                if busy:
                    video.start()
                else:
                    time.sleep(1.0)
                used = harness.cpu_seconds(worker)
                done = _measure(here, ours, stock.pop(), seconds=seconds, rate=rate)
                used = harness.cpu_seconds(worker) - used
                found[busy].append(done)
                if busy:
                    video.stop()
                say(
                    f"  cycle {cycle + 1}, {'busy' if busy else 'idle'}, "
                    f"load {harness.load_average():.1f}: p50 {done.p50_ms:.1f} ms, "
                    f"p99 {done.p99_ms:.1f} ms, the worker used {used / seconds:.2f} cores"
                )
    for busy, name in ((False, "idle"), (True, "busy")):
        report.figure(f"paced, {name}: p50", spread([r.p50_ms for r in found[busy]]), "ms")
        report.figure(f"paced, {name}: p99", spread([r.p99_ms for r in found[busy]]), "ms")
    pooled = {
        busy: percentile([v for r in rounds for v in r.latencies_ms], 0.99)
        for busy, rounds in found.items()
    }
    report.figure("paced: requests/s offered", rate)
    ratio = ratios([r.p99_ms for r in found[True]], [r.p99_ms for r in found[False]])
    report.figure("p99 busy / idle, by round", ratio)
    report.figure("p99 busy / idle, all rounds together", pooled[True] / pooled[False])
    report.aim("p99 busy / idle", ratio.median, most=2.0)


class _Video:
    """One long video that is encoded again for each round."""

    def __init__(self, here: Stand, clip: Path) -> None:
        self._here = here
        self._clip = clip
        self._id = ""

    def start(self) -> None:
        """Return once its encoding has begun."""
        if not self._id:
            size = self._clip.stat().st_size
            wanted = {"size": size, "content_type": "video/mp4"}
            slot = _ask(self._here, "POST", "/v1/media", wanted)
            self._id = slot["id"]
            put = urllib.request.Request(
                slot["upload"]["url"],
                self._clip.read_bytes(),
                slot["upload"]["headers"],
                method="PUT",
            )
            with urllib.request.urlopen(put, timeout=60):
                pass
            _ask(self._here, "POST", f"/v1/media/{self._id}/complete")
        else:
            _ask(self._here, "POST", f"/v1/media/{self._id}/process", {})
        harness.wait_until(lambda: self._body()["stage"] == "encode", seconds=120)

    def stop(self) -> None:
        """It must still be encoding; it is canceled. Return once its slot is free."""
        body = self._body()
        if body["stage"] != "encode":
            raise RuntimeError(f"the video was not encoding for the whole round: {body['error']}")
        _ask(self._here, "POST", f"/v1/jobs/{body['job']['id']}/cancel")
        harness.wait_until(lambda: self._body()["state"] == "failed", seconds=60)

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = _ask(self._here, "GET", f"/v1/media/{self._id}")
        return body


def _clip(path: Path) -> Path:
    """Minutes of 1080p from the sample, made once and repeated without encoding."""
    ffmpeg = str(tools.resolve().ffmpeg)
    sample = Path(media.__file__).with_name("samples") / "video.mp4"
    quiet = [ffmpeg, "-hide_banner", "-nostdin", "-loglevel", "error", "-y", "-stream_loop", "-1"]
    part = path.with_suffix(".part.mp4")
    encode = ["-c:v", "libx264", "-preset", "ultrafast", "-crf", "30", "-c:a", "aac"]
    subprocess.run(
        [*quiet, "-i", sample, "-t", "10", "-vf", "scale=1920:1080,setsar=1", *encode, part],
        check=True,
    )
    subprocess.run([*quiet, "-i", part, "-t", "600", "-c", "copy", path], check=True)
    return path


# ---------------------------------------------------------------- what is sent


def _prepared(here: Stand, contender: Contender, count: int, *, name: str = "requests") -> Path:
    """A file of requests for one round; slots with their bytes in storage for `complete`."""
    path = here.work / f"{name}.bin"
    if contender.repeats is not None:
        load.write_requests(path, [contender.repeats])
        return path
    media_ids = asyncio.run(_slots(here, count))
    load.write_requests(path, _completes(here, media_ids))
    return path


def _completes(here: Stand, media_ids: Iterable[str]) -> Iterable[bytes]:
    headers = {"authorization": f"Bearer {here.api_key}"}
    for media_id in media_ids:
        yield load.request("POST", f"/v1/media/{media_id}/complete", headers=headers)


async def _slots(here: Stand, count: int) -> list[str]:
    """Open slots whose bytes are there, each with a tiny file of its own."""
    found: list[str] = []
    async with harness.database(here.dsn) as connection:
        while len(found) < count:
            slots = []
            async with connection.transaction():
                for _ in range(min(_BATCH, count - len(found))):
                    wanted = uploads.Wanted(size=_TINY, content_type="image/jpeg")
                    slot = uploads.slot(here.settings, harness.TENANT, wanted)
                    await media.open_slot(connection, slot)
                    slots.append(slot)
            for slot in slots:
                _put(here, slot)
            found += [ids.encode(ids.MEDIA, slot.id) for slot in slots]
    return found


def _put(here: Stand, slot: media.Slot) -> None:
    """A tiny file of its own under the slot's key. What makes it durable is left to `_settle`."""
    path = here.store.path(slot.upload_key)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xd8\xff\xe0" + slot.id.bytes.ljust(_TINY - 4, b"\0"))


async def _settle(here: Stand) -> None:
    """What the preparation left to do is done now and not in the first rounds."""
    os.sync()
    async with harness.database(here.dsn) as connection:
        await connection.execute("VACUUM ANALYZE")
        await connection.execute("CHECKPOINT")


def _form(here: Stand) -> bytes:
    """A one-request upload of a tiny photograph. Without an idempotency key each one is new."""
    from PIL import Image

    picture = io.BytesIO()
    Image.linear_gradient("L").resize((64, 48)).convert("RGB").save(picture, "JPEG")
    head = (
        f"--{_BOUNDARY}\r\n"
        'Content-Disposition: form-data; name="file"; filename="tiny.jpg"\r\n'
        "Content-Type: image/jpeg\r\n\r\n"
    )
    body = head.encode() + picture.getvalue() + f"\r\n--{_BOUNDARY}--\r\n".encode()
    headers = {
        "authorization": f"Bearer {here.api_key}",
        "content-type": f"multipart/form-data; boundary={_BOUNDARY}",
    }
    return load.request("POST", "/v1/media", headers=headers, body=body)


def _ask(here: Stand, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Authorization": f"Bearer {here.api_key}"}
    data = None
    if body is not None:
        data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
    request = urllib.request.Request(
        f"{here.settings.base_url}{path}", data, headers, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{method} {path}: {error.read().decode()}") from None


def _listens(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    main()

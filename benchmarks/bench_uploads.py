"""Files into the local storage, by a signed PUT and by tus, against a bare write loop.

The sender is as cheap as can be (sendfile from the page cache), so that what is measured is the API
process: bytes a second, processor time, memory, and how long after the last byte the job is queued.
Rounds of each contender follow each other in random order.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx2 as httpx
from benchmarks import harness
from benchmarks.harness import Report, Stand, ratios, say, spread

_MB: Final = 1e6
_PIECE: Final = 8 << 20
_CHUNK: Final = 1 << 20
_PARALLEL: Final = 200
_SMALL: Final = 256 << 10
_GROWTH_AIM: Final = 64.0
TUS: Final = {"Tus-Resumable": "1.0.0"}


@dataclass(frozen=True, slots=True)
class Run:
    """One file on its way: seconds in all, from the last byte to `queued`, of the processor."""

    seconds: float
    queued_seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Subject:
    here: Stand
    pid: int
    file: Path
    size: int

    @property
    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.here.api_key}"}
        return httpx.Client(base_url=self.here.settings.base_url, headers=headers, timeout=120)

    def by_put(self) -> tuple[float, float]:
        with self.http as http:
            wanted = {"size": self.size, "content_type": "video/mp4"}
            slot = http.post("/v1/media", json=wanted).raise_for_status().json()
            begun = time.perf_counter()
            upload = slot["upload"]
            sent = self.send("PUT", upload["url"], upload["headers"], 0, self.size)
            assert http.post(f"{slot['links']['self']}/complete").status_code == 202
            ended = time.perf_counter()
            http.delete(slot["links"]["self"])
        return ended - begun, ended - sent

    def by_tus(self, piece: int) -> tuple[float, float]:
        with self.http as http:
            headers = {**TUS, "Upload-Length": str(self.size)}
            made = http.post("/v1/uploads", headers=headers).raise_for_status()
            begun = sent = time.perf_counter()
            for offset in range(0, self.size, piece):
                length = min(piece, self.size - offset)
                headers = {
                    **TUS,
                    "Content-Type": "application/offset+octet-stream",
                    "Upload-Offset": str(offset),
                    "Authorization": f"Bearer {self.here.api_key}",
                    "Content-Length": str(length),
                }
                sent = self.send("PATCH", made.headers["location"], headers, offset, length)
            ended = time.perf_counter()
            body = http.get(made.headers["mediamill-media"]).json()
            assert body["state"] == "queued", body
            http.delete(made.headers["mediamill-media"])
        return ended - begun, ended - sent

    def send(
        self, method: str, url: str, headers: dict[str, str], offset: int, length: int
    ) -> float:
        """Send a piece of the file; when its last byte was handed over. The answer is a success."""
        parts = urlsplit(url)
        port = self.here.settings.port
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        lines = [f"{method} {target} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
            with self.file.open("rb") as file:
                connection.sendfile(file, offset, length)
            sent = time.perf_counter()
            answer = connection.recv(4096)
        assert answer.split(b" ", 2)[1] in (b"200", b"204"), answer
        return sent

    def bare(self) -> tuple[float, float]:
        """Read, write, sync, name: what a disk costs and nothing else."""
        target = self.here.work / "bare"
        begun = time.perf_counter()
        with self.file.open("rb") as source, target.open("wb", buffering=0) as out:
            while data := source.read(_CHUNK):
                out.write(data)
            os.fsync(out.fileno())
        ended = time.perf_counter()
        target.unlink()
        return ended - begun, 0.0


def memory_mb(pid: int, name: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1e3
    return 0.0


def measured(subject: Subject, work: Callable[[], tuple[float, float]], *, own: bool) -> Run:
    pid = os.getpid() if own else subject.pid
    before = harness.cpu_seconds(pid)
    seconds, queued = work()
    return Run(seconds, queued, harness.cpu_seconds(pid) - before)


async def parallel(here: Stand) -> Counter[str]:
    """Many small uploads at once, each in two pieces; what came of them."""
    data = os.urandom(_SMALL)
    outcomes: Counter[str] = Counter()
    headers = {"Authorization": f"Bearer {here.api_key}", **TUS}
    limits = httpx.Limits(max_connections=_PARALLEL)

    async def one(client: httpx.AsyncClient) -> None:
        made = await client.post("/v1/uploads", headers={"Upload-Length": str(_SMALL)})
        for offset in (0, _SMALL // 2):
            answer = await client.patch(
                made.headers["location"],
                content=data[offset : offset + _SMALL // 2],
                headers={
                    "Upload-Offset": str(offset),
                    "Content-Type": "application/offset+octet-stream",
                },
            )
            if answer.status_code != 204:
                outcomes[f"{answer.status_code}"] += 1
                return
        outcomes["done"] += 1

    async with httpx.AsyncClient(
        base_url=here.settings.base_url, headers=headers, timeout=120, limits=limits
    ) as client:
        await asyncio.gather(*(one(client) for _ in range(_PARALLEL)))
    return outcomes


def check_stored(here: Stand, digest: str) -> None:
    """What lies in the storage is what was sent."""
    for path in here.settings.objects_dir.glob("uploads/**/original"):
        with path.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == digest, path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    report = Report("uploads")
    with harness.stand() as here, harness.service(here, "api") as pid:
        file = here.work / "file"
        block = os.urandom(1 << 20)
        with file.open("wb") as out:
            for _ in range(given.megabytes):
                out.write(block)
        subject = Subject(here, pid, file, file.stat().st_size)
        contenders: dict[str, Callable[[], tuple[float, float]]] = {
            "bare write": subject.bare,
            "signed PUT": subject.by_put,
            "tus, one request": lambda: subject.by_tus(subject.size),
            "tus, 8 MiB pieces": lambda: subject.by_tus(_PIECE),
        }
        with file.open("rb") as source:
            digest = hashlib.file_digest(source, "sha256").hexdigest()
        runs: dict[str, list[Run]] = defaultdict(list)
        subject.by_put()  # the first request opens what all others use
        resting = memory_mb(pid, "VmRSS")
        for _ in range(given.rounds):
            for name in random.sample(list(contenders), len(contenders)):
                runs[name].append(measured(subject, contenders[name], own=name == "bare write"))
        check_stored(here, digest)
        growth = memory_mb(pid, "VmHWM") - resting
        gigabytes = subject.size / 1e9
        for name, found in runs.items():
            rates = [subject.size / _MB / run.seconds for run in found]
            report.figure(f"{name}: rate", spread(rates), "MB/s")
            report.figure(
                f"{name}: processor", spread([run.cpu_seconds / gigabytes for run in found]), "s/GB"
            )
            if name != "bare write":
                report.figure(
                    f"{name}: last byte to queued",
                    spread([1000 * run.queued_seconds for run in found]),
                    "ms",
                )
                bare = [run.seconds for run in runs["bare write"]]
                report.figure(
                    f"{name}: time against the bare write",
                    ratios([run.seconds for run in found], bare),
                )
        outcomes = asyncio.run(parallel(here))
        say(f"  {_PARALLEL} uploads at once: {json.dumps(outcomes)}")
        report.aim("parallel uploads without an error", outcomes["done"], least=_PARALLEL)
        report.aim("growth of the API's memory, MB", growth, most=_GROWTH_AIM)
    report.close()


if __name__ == "__main__":
    main()

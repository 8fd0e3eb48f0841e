"""How much memory a large file costs the process that takes it in, by each way in.

The file is sparse, so that only what is stored takes disk, and each copy is deleted before the next
one. A process's peak is reset before each way; growth is peak less what it held before.
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.bench_uploads import Subject, memory_mb
from benchmarks.harness import Report, Stand, say

_GROWTH_AIM: Final = 64.0
_UNITS: Final = {"": 1, "MB": 10**6, "GB": 10**9}


def size_of(text: str) -> int:
    """`5GB`, `256MB` or a number of bytes."""
    match = re.fullmatch(r"(\d+)(|MB|GB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} should read like 5GB")
    return int(match[1]) * _UNITS[match[2]]


def by_multipart(subject: Subject) -> None:
    with subject.http as http:
        wanted = {"size": subject.size, "content_type": "video/mp4"}
        plan = http.post("/v1/uploads/multipart", json=wanted).raise_for_status().json()
        for first in range(1, plan["part_count"] + 1, 100):
            numbers = list(range(first, min(first + 100, plan["part_count"] + 1)))
            asked = http.post(plan["links"]["parts"], json={"numbers": numbers})
            for part in asked.raise_for_status().json()["parts"]:
                offset = (part["number"] - 1) * plan["part_bytes"]
                length = min(plan["part_bytes"], subject.size - offset)
                subject.send("PUT", part["url"], part["headers"], offset, length)
        done = http.post(plan["links"]["complete"], json={}, timeout=900)
        assert done.status_code == 202, done.text
        http.delete(plan["links"]["media"])


def by_fetch(subject: Subject, url: str) -> None:
    with subject.http as http:
        made = http.post("/v1/media", json={"source": {"url": url}}).raise_for_status().json()
        state = "awaiting_upload"
        while state == "awaiting_upload":
            time.sleep(0.5)
            body = http.get(made["links"]["self"]).json()
            state = body["state"]
        assert (state, body["size"]) == ("queued", subject.size), body
        http.delete(made["links"]["self"])


@contextmanager
def offered(file: Path) -> Iterator[str]:
    """The file under an address on this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "video/mp4")
            self.send_header("Content-Length", str(file.stat().st_size))
            self.end_headers()
            with file.open("rb") as source:
                self.connection.sendfile(source)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/film.mp4"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def gone(here: Stand) -> bool:
    """Whether what was deleted has left the disk."""
    return not any(here.settings.objects_dir.glob("uploads/*/*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=size_of, default="1GB")
    given = parser.parse_args()
    report = Report("upload-memory")
    limits = {f"max_{kind}_bytes": given.size for kind in ("image", "video", "audio")}
    with (
        harness.stand(egress_allow_networks=["127.0.0.0/8"], **limits) as here,
        harness.service(here, "api") as api,
        harness.service(here, "worker", slots="maintenance=1") as worker,
    ):
        harness.await_worker(here, worker)
        small, large = here.work / "small", here.work / "file"
        for file, size in ((small, 20 << 20), (large, given.size)):
            with file.open("wb") as out:
                out.truncate(size)
        with offered(small) as little, offered(large) as url:
            ways: dict[str, Callable[[Subject], object]] = {
                "signed PUT": lambda of: of.by_put(),
                "tus": lambda of: of.by_tus(of.size),
                "multipart": by_multipart,
                "fetch": lambda of: by_fetch(of, url if of.file == large else little),
            }
            for name, way in ways.items():
                way(Subject(here, api, small, 20 << 20))  # what the first one opens stays open
                resting = {}
                for pid in (api, worker):
                    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
                    resting[pid] = memory_mb(pid, "VmRSS")
                begun = time.perf_counter()
                way(Subject(here, api, large, given.size))
                say(f"  {name}: {given.size / 1e9:g} GB in {time.perf_counter() - begun:.0f} s")
                for process, pid in (("API", api), ("worker", worker)):
                    growth = memory_mb(pid, "VmHWM") - resting[pid]
                    report.aim(f"{name}: growth of the {process}, MB", growth, most=_GROWTH_AIM)
                harness.wait_until(lambda: gone(here), seconds=120, pause_seconds=0.5)
    report.close()


if __name__ == "__main__":
    main()

"""`mediamill up`: one command, one process tree, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.stories.clips import Clips
from tests.stories.harness import (
    arguments,
    assert_gone,
    descendants,
    free_port,
    identities,
    until,
)

from mediamill.client import Client

_JOBS = """
from mediamill import Job, Mill

mill = Mill()

@mill.job("double")
def double(job: Job, payload: dict) -> int:
    return 2 * payload["n"]
"""


class Up:
    """One run of the command."""

    def __init__(self, folder: Path, port: int, *flags: str) -> None:
        self.port = port
        self._out = folder / f"up-{time.monotonic_ns()}.log"
        env = {k: v for k, v in os.environ.items() if not k.startswith("MEDIAMILL_")}
        env |= {
            "MEDIAMILL_DATA_DIR": str(folder / "data"),
            "MEDIAMILL_PORT": str(port),
            "MEDIAMILL_DRAIN_SECONDS": "2",
        }
        with self._out.open("wb") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", "from mediamill.cli import main; main()", "up", *flags],
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.key = until(self._key, seconds=40, why="it did not start").group(1)
        self._folder = folder

    def _key(self) -> re.Match[str] | None:
        assert self.popen.poll() is None, self.said
        return re.search(r"API key\s+(mpk_\w+)", self.said)

    @property
    def said(self) -> str:
        return self._out.read_text()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def service(self, name: str) -> int | None:
        """The process id of the API or the worker."""
        for pid in descendants(self.popen.pid):
            if name.encode() in arguments(pid).split(b"\0"):
                return pid
        return None

    def everything(self) -> list[tuple[int, str]]:
        """Every process of it, the database's included (it belongs to nobody's tree)."""
        postgres = self._folder / "data" / "postgres"
        supervisor = int((postgres / "supervisor.lock").read_text())
        pids = [self.popen.pid, supervisor]
        named = identities([*pids, *(d for pid in pids for d in descendants(pid))])
        assert len(named) > 8
        return named

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.terminate()
            self.popen.wait(30)
        print(self.said)
        for log in (self._folder / "data" / "logs").glob("*"):
            print(f"--- {log.name}\n{log.read_text()[-3000:]}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def started(folder: Path) -> Iterator[list[Up]]:
    ups: list[Up] = []
    try:
        yield ups
    finally:
        for up in ups:
            up.close()


@pytest.mark.timeout(120)
def test_up_heals_itself_stops_clean_and_keeps_its_data(
    folder: Path, started: list[Up], clips: Clips
) -> None:
    port = free_port()
    first = Up(folder, port)
    started.append(first)
    photo = folder / "photo.jpg"
    photo.write_bytes(clips.photo)
    with Client(first.url, first.key) as client:
        media_id = client.media.submit(photo).id
        client.media.wait(media_id, timeout_seconds=40)

    for name in ("api", "worker"):
        before = until(lambda name=name: first.service(name), seconds=5, why="none")  # type: ignore[misc]
        below = identities(descendants(before))
        os.kill(before, signal.SIGKILL)
        until(
            lambda name=name, before=before: (  # type: ignore[misc]
                first.service(name) not in (None, before)
            ),
            seconds=10,
            why=f"{name} is not started again",
        )
        assert_gone(below, seconds=2)
    until(lambda: _answers(first.url), seconds=20, why="the new API does not answer")
    with Client(first.url, first.key) as client:
        client.media.wait(client.media.submit(photo), timeout_seconds=40)

    everything = first.everything()
    first.popen.send_signal(signal.SIGINT)
    assert first.popen.wait(30) == 0
    assert_gone(everything, seconds=8)

    (folder / "my_jobs.py").write_text(_JOBS)
    second = Up(folder, port, "--app", "my_jobs:mill")
    started.append(second)
    assert second.key == first.key
    with Client(second.url, second.key) as client:
        kept = client.media.get(media_id)
        assert kept.state == "ready"
        assert client.media.download(kept, kept.variants[0].name, folder).stat().st_size
    with httpx.Client(headers={"Authorization": f"Bearer {second.key}"}) as http:
        answer = http.post(f"{second.url}/v1/jobs", json={"kind": "double", "payload": {"n": 21}})
        assert answer.status_code == 202, answer.text
        job = until(
            lambda: _ended(http.get(f"{second.url}{answer.headers['location']}").json()),
            seconds=20,
            why="the job of the application is not done",
        )
    assert (job["state"], job["result"]) == ("completed", 42)

    # Even a kill that nobody can catch takes everything along.
    everything = second.everything()
    second.popen.kill()
    second.popen.wait(10)
    assert_gone(everything, seconds=20)


@pytest.mark.timeout(90)
def test_a_taken_port_is_a_sentence_and_leaves_nothing(folder: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = {k: v for k, v in os.environ.items() if not k.startswith("MEDIAMILL_")}
        env |= {
            "MEDIAMILL_DATA_DIR": str(folder / "data"),
            "MEDIAMILL_PORT": str(taken.getsockname()[1]),
        }
        done = subprocess.run(
            [sys.executable, "-c", "from mediamill.cli import main; main()", "up"],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert "cannot listen on 127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr
    supervisor = int((folder / "data" / "postgres" / "supervisor.lock").read_text() or 0)
    assert_gone(identities([supervisor]), seconds=10)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _ended(job: dict[str, Any]) -> dict[str, Any] | None:
    return job if job["finished_at"] else None

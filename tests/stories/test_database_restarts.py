"""The database goes away and comes back; the work that was accepted goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.stories.clips import Clips
from tests.stories.conftest import Make
from tests.stories.harness import Platform, until

from mediamill import db, queue
from mediamill.embedded import Embedded

VIDEO = "image=1,video=1,maintenance=1"


class Server:
    """A PostgreSQL of this test's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._embedded = Embedded(folder)
        self.dsn = self._embedded.start()
        asyncio.run(db.migrate(self.dsn, finish=queue.install))

    @property
    def pid(self) -> int:
        """The process id of the postmaster."""
        return int((self._folder / "data" / "postmaster.pid").read_text().split()[0])

    def restart(self) -> None:
        """An immediate stop, as in a crash; its supervisor starts it again."""
        before = self.pid
        os.kill(before, signal.SIGQUIT)
        until(lambda: self._is_new(before), seconds=20, why="the server did not come back")

    def _is_new(self, before: int) -> bool:
        try:
            return self.pid != before
        except (FileNotFoundError, IndexError):
            return False

    def backends(self) -> list[int]:
        """The postmaster and the processes of its clients."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [self.pid, *map(int, children)]

    def close(self) -> None:
        self._embedded.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "postgres")
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def platform(own: Server, make_platform: Make) -> Platform:
    return make_platform(database=own.dsn)


@pytest.fixture
def patient(own: Server, make_platform: Make) -> Platform:
    """With leases that are longer than a restart takes on a busy machine."""
    return make_platform(database=own.dsn, lease_seconds=40, self_stop_seconds=30, beat_seconds=0.5)


@pytest.mark.timeout(120)
def test_a_restart_in_the_middle_of_a_job_loses_nothing(
    patient: Platform, own: Server, clips: Clips
) -> None:
    platform = patient
    platform.start_api()
    workers = platform.start_workers(2, VIDEO)
    media_id = platform.upload(clips.work, "work.mp4")
    busy = until(
        lambda: next((w for w in workers if platform.tools(w)), None),
        seconds=20,
        why="nobody works on it",
    )
    encoder = platform.freeze_encoder(busy)
    own.restart()
    until(lambda: _ready(platform), seconds=15, why="the API did not recover")
    assert all(p.alive for p in platform.processes)
    until(
        lambda: (
            platform.main_job(media_id)["lease_until"] is not None
            and platform.value("SELECT max(lease_until) > now() + '5 s' FROM jobs")
        ),
        seconds=15,
        why="the lease is not renewed after the restart",
    )
    os.kill(encoder, signal.SIGCONT)
    photo = platform.upload(clips.photo, "photo.jpg")
    body = platform.wait_for_state(media_id, "ready", seconds=60)
    assert body["job"]["attempt"] == 1, "the worker lived and kept its job"
    platform.wait_for_state(photo, "ready")
    assert all(p.alive for p in platform.processes)
    for each in (media_id, photo):
        platform.assert_path_is_legal(each)
        platform.assert_published_once(each)
    platform.assert_nothing_left()


@pytest.mark.timeout(120)
def test_restarts_in_a_burst_of_uploads_lose_no_accepted_file(
    platform: Platform, own: Server, clips: Clips
) -> None:
    """Each answer 202 ends well; a request that got no such answer may be repeated."""
    platform.start_api()
    platform.start_workers(2, "image=2,maintenance=1")
    accepted: list[str] = []
    refused: set[int] = set()
    for number in range(24):
        if number in (6, 14):
            before = own.pid
            os.kill(before, signal.SIGQUIT)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            answer = platform.http.post(
                "/v1/media",
                files={"file": (f"{number}.jpg", clips.red)},
                headers={"Idempotency-Key": f"upload-{number}"},
            )
            if answer.status_code == 202:
                accepted.append(answer.json()["id"])
                break
            refused.add(answer.status_code)
            time.sleep(0.1)
    assert len(accepted) == 24
    assert refused <= {503}, "an outage is told as what it is"
    for media_id in accepted:
        platform.wait_for_state(media_id, "ready", seconds=60)
        platform.assert_path_is_legal(media_id)
        platform.assert_published_once(media_id)
    assert len(set(accepted)) == 24
    assert platform.value("SELECT count(*) FROM media") == 24
    assert all(p.alive for p in platform.processes)
    assert len(platform.files("uploads")) == 24, "a form that was refused left its bytes"
    platform.assert_nothing_left()


@pytest.mark.timeout(120)
def test_a_database_that_hangs_is_told_and_survived(
    platform: Platform, own: Server, clips: Clips
) -> None:
    """It does not answer for longer than a lease, and does not refuse either."""
    platform.start_api()
    worker = platform.start_worker(VIDEO)
    media_id = platform.upload(clips.work, "work.mp4")
    platform.freeze_encoder(worker)
    frozen = own.backends()
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        told = httpx.get(f"{platform.url}/readyz", timeout=10)
        assert httpx.get(f"{platform.url}/livez", timeout=5).status_code == 200
        until(lambda: not platform.tools(worker), seconds=9, why="its tools outlive its lease")
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    assert told.status_code == 503
    until(lambda: _ready(platform), seconds=15, why="the API did not recover")
    platform.wait_for_state(media_id, "ready", seconds=60)
    assert worker.alive
    assert [a["outcome"] for a in platform.attempts(media_id)][-1] == "completed"
    platform.assert_path_is_legal(media_id)
    platform.assert_published_once(media_id)
    platform.assert_nothing_left()


def _ready(platform: Platform) -> bool:
    try:
        return httpx.get(f"{platform.url}/readyz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False

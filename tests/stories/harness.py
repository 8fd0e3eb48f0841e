"""An installation under test: real API and worker processes on a database and a folder of its own.

Nothing here looks into the program: it starts processes, speaks HTTP, and reads rows, files and
/proc. Processes are stopped by id; what they said is printed when a test fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import httpx2 as httpx

from mediamill import db, ids, installation, keys
from mediamill.states import JOB_MOVES, JOB_TERMINAL, MEDIA_MOVES, JobState, MediaState

T = TypeVar("T")
Body = dict[str, Any]
Row = asyncpg.Record

_COMMAND = (sys.executable, "-c", "from mediamill.cli import main; main()")
_ENDED = ("ready", "failed", "expired")


def until(
    look: Callable[[], T | None], *, seconds: float, why: str, every_seconds: float = 0.03
) -> T:
    """The first answer of `look` that says something; fails with `why` after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"after {seconds:g} s: {why}"
        time.sleep(every_seconds)


@dataclass(slots=True)
class Process:
    """One process of the installation, with its log."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to this process alone, not to its group."""
        self.popen.kill()
        self.popen.wait(10)

    def stop(self, *, seconds: float = 20.0) -> int:
        """SIGTERM; the exit code."""
        self.popen.terminate()
        return self.popen.wait(seconds)

    def events(self) -> Iterator[Body]:
        """The structured lines of its log."""
        for line in self.log.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    yield event

    def complaints(self) -> list[str]:
        """What it called an error, and what it said outside of its structured log."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                found.append(line)
                continue
            if event.get("level") in ("error", "critical"):
                found.append(line)
        return found


class Platform:
    """What a story plays on. `settings` are MEDIAMILL_ variables, by short name."""

    def __init__(self, database: str, folder: Path, **settings: object) -> None:
        self.database = database
        self.data = folder / "data"
        self.settings: dict[str, object] = {
            "database_url": database,
            "data_dir": self.data,
            "upload_ttl_seconds": 600,
            **settings,
        }
        self.processes: list[Process] = []
        self.errors_expected = False
        self.port = 0
        self._folder = folder
        self._runner = asyncio.Runner()
        self._connection: db.Connection | None = None
        self._http: httpx.Client | None = None
        self.key = ""

    # --- Processes

    def start_api(self, **settings: object) -> Process:
        """An API that answers. A second start takes the same port."""
        for _ in range(5):
            self.port = self.port or free_port()
            api = self._start("api", {**settings, "port": self.port})
            if self._answers(api):
                break
            assert "cannot listen" in api.log.read_text(), f"the API did not start: {api.log}"
            self.port = 0
        if not self.key:
            self.key = self.make_key(scopes=("admin", "operate"))
        return api

    def start_worker(self, slots: str | None = None, **settings: object) -> Process:
        """A worker that has registered itself."""
        given = {**settings, "slots": slots} if slots else settings
        worker = self._start("worker", given)
        until(
            lambda: not worker.alive or worker.pid in self._registered(),
            seconds=30,
            why="the worker has not registered",
        )
        assert worker.alive, f"the worker ended: {worker.log.read_text()[-2000:]}"
        return worker

    def start_workers(self, count: int, slots: str | None = None) -> list[Process]:
        return [self.start_worker(slots) for _ in range(count)]

    def _start(self, name: str, settings: dict[str, object]) -> Process:
        env = {k: v for k, v in os.environ.items() if not k.startswith("MEDIAMILL_")}
        given = {**self.settings, **settings}
        env |= {f"MEDIAMILL_{k.upper()}": str(v) for k, v in given.items()}
        log = self._folder / f"{len(self.processes)}-{name}.log"
        with log.open("wb") as file:
            popen = subprocess.Popen(
                [*_COMMAND, name],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        process = Process(name, popen, log)
        self.processes.append(process)
        return process

    def _answers(self, api: Process) -> bool:
        deadline = time.monotonic() + 30
        while api.alive and time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/readyz", timeout=2).status_code == 200:
                    return True
            time.sleep(0.03)
        return False

    def _registered(self) -> set[int]:
        return {row["pid"] for row in self.rows("SELECT pid FROM workers")}

    def close(self) -> None:
        """End every process, and print what they said (shown when the test failed)."""
        for process in self.processes:
            if process.alive:
                process.send(signal.SIGCONT)
                process.popen.terminate()
        deadline = time.monotonic() + 12
        for process in self.processes:
            try:
                process.popen.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"{process.name} {process.pid} had to be killed")
                process.kill()
        for process in self.processes:
            text = process.log.read_text(errors="replace")
            print(f"--- {process.log.name} (exit {process.popen.returncode})\n{text[-6000:]}")
        if self._http is not None:
            self._http.close()
        if self._connection is not None:
            self._connection.terminate()
        self._runner.close()

    # --- HTTP

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def http(self) -> httpx.Client:
        """A client with the API key."""
        if self._http is None:
            self._http = httpx.Client(
                base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=30
            )
        return self._http

    def many(self, count: int, call: Callable[[httpx.Client], T]) -> list[T]:
        """`call` from `count` threads at once, each with a client of its own."""

        ready = threading.Barrier(count)

        def one(_: int) -> T:
            headers = {"Authorization": f"Bearer {self.key}"}
            with httpx.Client(base_url=self.url, headers=headers, timeout=20) as client:
                ready.wait(20)
                return call(client)

        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(one, range(count)))

    def open_slot(self, size: int, filename: str, **more: object) -> Body:
        answer = self.http.post("/v1/media", json={"size": size, "filename": filename, **more})
        assert answer.status_code == 201, answer.text
        body: Body = answer.json()
        return body

    def put(self, slot: Body, data: bytes) -> httpx.Response:
        """The write-once request of a slot, sent without the API key."""
        upload = slot["upload"]
        return httpx.request(
            upload["method"], upload["url"], headers=upload["headers"], content=data, timeout=60
        )

    def complete(self, media_id: str) -> httpx.Response:
        return self.http.post(f"/v1/media/{media_id}/complete")

    def upload(self, data: bytes, filename: str, **more: object) -> str:
        """Slot, PUT, complete; the media's id."""
        slot = self.open_slot(len(data), filename, **more)
        stored = self.put(slot, data)
        assert stored.status_code == 200, stored.text
        accepted = self.complete(slot["id"])
        assert accepted.status_code == 202, accepted.text
        assert accepted.headers["location"] == f"/v1/media/{slot['id']}"
        media_id: str = slot["id"]
        return media_id

    def post_form(self, data: bytes, filename: str, **headers: str) -> httpx.Response:
        return self.http.post("/v1/media", files={"file": (filename, data)}, headers=headers)

    def get(self, media_id: str) -> Body:
        answer = self.http.get(f"/v1/media/{media_id}")
        assert answer.status_code == 200, answer.text
        body: Body = answer.json()
        return body

    def wait_for_state(self, media_id: str, *states: str, seconds: float = 40) -> Body:
        """Poll until the media is in one of `states`, or has ended in another one."""

        def look() -> Body | None:
            body = self.get(media_id)
            return body if body["state"] in (*states, *_ENDED) else None

        body = until(look, seconds=seconds, why=f"{media_id} did not become {states}")
        assert body["state"] in states, (body["state"], body["error"])
        return body

    def wait_for_stage(self, media_id: str, stage: str, *, seconds: float = 40) -> Body:
        """Poll until the media is at that stage of its processing."""

        def look() -> Body | None:
            body = self.get(media_id)
            assert body["state"] not in _ENDED, f"it ended before {stage}: {body['error']}"
            return body if body["stage"] == stage else None

        return until(look, seconds=seconds, why=f"{media_id} did not reach the stage {stage}")

    # --- Rows

    def rows(self, statement: str, *args: object) -> list[Row]:
        """What the database says, on a connection that comes back after an outage."""

        async def ask() -> list[Row]:
            for _ in range(100):
                try:
                    if self._connection is None or self._connection.is_closed():
                        self._connection = await db.connect(self.database)
                    return await self._connection.fetch(statement, *args)
                except (db.Unavailable, asyncpg.PostgresConnectionError, ConnectionError):
                    self._connection = None
                    await asyncio.sleep(0.1)
            raise AssertionError("the database did not come back")

        return self._runner.run(ask())

    def value(self, statement: str, *args: object) -> Any:
        return self.rows(statement, *args)[0][0]

    @contextmanager
    def holding(self, statement: str, *args: object) -> Iterator[None]:
        """The locks that a statement takes, held while the block runs."""

        async def begin() -> db.Connection:
            connection = await db.connect(self.database)
            await connection.execute("BEGIN")
            await connection.fetch(statement, *args)
            return connection

        connection = self._runner.run(begin())
        try:
            yield
        finally:
            self._runner.run(connection.close())

    def waiting_for_locks(self) -> int:
        return int(
            self.value(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        )

    def media_row(self, media_id: str) -> Row:
        return self.rows("SELECT * FROM media WHERE id = $1", media_uuid(media_id))[0]

    def jobs(self, media_id: str, role: str = "main") -> list[Row]:
        return self.rows(
            "SELECT * FROM jobs WHERE media_id = $1 AND role = $2 ORDER BY id",
            media_uuid(media_id),
            role,
        )

    def main_job(self, media_id: str) -> Row:
        (job,) = self.jobs(media_id)
        return job

    def attempts(self, media_id: str) -> list[Row]:
        """The attempts of the main job, in order."""
        return self.rows(
            "SELECT * FROM attempts WHERE job_id = $1 ORDER BY fence", self.main_job(media_id)["id"]
        )

    def transitions(self, media_id: str) -> list[Row]:
        return self.rows(
            "SELECT * FROM transitions WHERE media_id = $1 ORDER BY id", media_uuid(media_id)
        )

    def make_key(self, **more: Any) -> str:
        async def make() -> str:
            connection = await db.connect(self.database)
            try:
                pepper = (await installation.identify(connection)).pepper
                return await keys.create(
                    connection, pepper, tenant_id="default", name="story", **more
                )
            finally:
                await connection.close()

        return self._runner.run(make())

    # --- Files

    @property
    def objects(self) -> Path:
        return self.data / "objects"

    def files(self, area: str, media_id: str | None = None) -> list[Path]:
        """The objects in an area (uploads, media, stage, .incoming), of one media if named."""
        root = self.objects / area
        wanted = str(media_uuid(media_id)) if media_id else ""
        # By os.walk: folders may go while we look.
        found = (Path(at) / name for at, _, names in os.walk(root) for name in names)
        return sorted(p for p in found if wanted in str(p))

    def scratch(self) -> list[Path]:
        """The folders of attempts in every worker's scratch."""
        return sorted(p for p in self.data.glob("scratch/*/*") if p.name != ".lock")

    # --- What must hold

    def assert_path_is_legal(self, media_id: str) -> None:
        """Every logged move starts where the one before it ended, and is in the table."""
        at: dict[object, str | None] = {}
        for move in self.transitions(media_id):
            subject = move["job_id"] if move["subject"] == "job" else "media"
            source, target = move["from_state"], move["to_state"]
            assert at.get(subject) == source, f"{subject} jumped: {dict(move)}"
            at[subject] = target
            if source is None:
                first = "awaiting_upload" if subject == "media" else "queued"
                assert target == first
            elif source == target:
                assert move["stage"] is not None
            elif subject == "media":
                assert (MediaState(source), MediaState(target)) in MEDIA_MOVES
            else:
                assert (JobState(source), JobState(target)) in JOB_MOVES
        assert at["media"] == self.media_row(media_id)["state"]
        for job in [*self.jobs(media_id), *self.jobs(media_id, "preview")]:
            assert at[job["id"]] == job["state"]
            ends = [
                m
                for m in self.transitions(media_id)
                if m["job_id"] == job["id"]
                and m["subject"] == "job"
                and m["to_state"] in JOB_TERMINAL
            ]
            again = [
                m
                for m in self.transitions(media_id)
                if m["job_id"] == job["id"] and m["subject"] == "job" and m["code"] == "replayed"
            ]
            assert len(ends) <= 1 + len(again), "a run of a job ended twice"

    def assert_published_once(self, media_id: str) -> None:
        """One current set, and on disk exactly what its manifest lists."""
        sets = self.rows(
            "SELECT * FROM sets WHERE media_id = $1 AND superseded_at IS NULL", media_uuid(media_id)
        )
        assert len(sets) == 1
        listed = self.rows(
            "SELECT * FROM variants WHERE media_id = $1 AND set_id = $2",
            media_uuid(media_id),
            sets[0]["set_id"],
        )
        assert listed
        for variant in listed:
            data = (self.objects / variant["key"]).read_bytes()
            assert len(data) == variant["bytes"]
            assert hashlib.sha256(data).hexdigest() == variant["sha256"]
        reserved = {
            r["set_id"]
            for r in self.rows("SELECT set_id FROM sets WHERE media_id = $1", media_uuid(media_id))
        }
        for path in self.files("media", media_id):
            assert reserved & set(path.parts), f"nobody will ever remove {path}"
        ready = [
            m
            for m in self.transitions(media_id)
            if m["subject"] == "media" and m["to_state"] == "ready"
        ]
        generation = self.media_row(media_id)["generation"]
        assert 1 <= len(ready) <= generation, "it became ready more than once in a generation"

    def assert_nothing_left(self, *, seconds: float = 5.0) -> None:
        """Soon, no attempt's scratch, nothing staged, nothing half received, no tool at work."""

        def look() -> bool:
            return not (
                self.scratch() or self.files("stage") or self.files(".incoming") or self.tools()
            )

        deadline = time.monotonic() + seconds
        while not look() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.scratch() == []
        assert self.files("stage") == []
        assert self.files(".incoming") == []
        assert self.tools() == []

    # --- What runs

    def tools(self, worker: Process | None = None) -> list[int]:
        """Media tools at work for this installation (or one worker), by process id."""
        workers = [worker] if worker else [p for p in self.processes if p.name == "worker"]
        return sorted(
            pid
            for each in workers
            for pid in descendants(each.pid)
            if _command(pid).startswith("ff")
        )

    def encoders(self, worker: Process) -> list[int]:
        """The process ids of the encoders that the worker runs."""
        return [pid for pid in self.tools(worker) if b"libx264" in arguments(pid)]

    def encoder(self, worker: Process, *, seconds: float = 40) -> int:
        """The process id of the encoder that the worker runs."""
        found = until(
            lambda: self.encoders(worker),
            seconds=seconds,
            why="no encoder was seen",
            every_seconds=0.01,
        )
        return found[0]

    def freeze_encoder(self, worker: Process, *, seconds: float = 40) -> int:
        """Stop the encoder in the middle of its work, however fast this machine is."""
        pid = self.encoder(worker, seconds=seconds)
        os.kill(pid, signal.SIGSTOP)
        return pid


def media_uuid(media_id: str) -> UUID:
    value = ids.decode(ids.MEDIA, media_id)
    assert value is not None
    return value


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(int(entry))) is not None and stat[0] != "Z":
            children.setdefault(int(stat[1]), []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def identity(pid: int) -> tuple[int, str] | None:
    """Names a living process for good: its id and when it started. None once it is gone."""
    stat = _stat(pid)
    return None if stat is None or stat[0] == "Z" else (pid, stat[19])


def identities(pids: Sequence[int]) -> list[tuple[int, str]]:
    return [named for pid in pids if (named := identity(pid)) is not None]


def still_alive(named: Sequence[tuple[int, str]]) -> list[int]:
    return [pid for pid, started in named if identity(pid) == (pid, started)]


def assert_gone(named: Sequence[tuple[int, str]], *, seconds: float) -> None:
    """Those processes end within `seconds`."""
    deadline = time.monotonic() + seconds
    while still_alive(named) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = {pid: arguments(pid)[:120] for pid in still_alive(named)}
    assert left == {}


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/pid/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def arguments(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

"""An installation with short leases and a cheap application, for tests that break it on purpose.

It remembers what was accepted and who was killed when, and hands the whole history to the checker.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from tests import rows
from tests.faults import app, checker
from tests.faults.payments import Payments
from tests.make_media import save, texture
from tests.stories.harness import (
    Platform,
    Process,
    descendants,
    identities,
    still_alive,
    until,
)

from mediamill import config, db, ids, installation, media, uploads
from mediamill.maintenance import Maintenance
from mediamill.storage.local import LocalStorage, open_local

ROOT = Path(__file__).parents[2]
_COMMAND = (sys.executable, "-c", "from mediamill.cli import main; main()")
_SUPERVISOR = """
import os, subprocess, sys
program = "from mediamill.cli import main; main()"
bound = ["--bound-to", str(os.getpid())]
subprocess.run([sys.executable, "-c", program, *bound, "worker", "--app", sys.argv[1]])
"""
ENDED = ("completed", "failed", "canceled")
FAST: dict[str, object] = {
    "lease_seconds": 2.0,
    "beat_seconds": 0.3,
    "self_stop_seconds": 1.2,
    "sweep_seconds": 0.3,
    "drain_seconds": 2.0,
}
"""Short leases: a killed worker's job is taken up again after two seconds, not seven."""
GENERIC = "default=2,maintenance=1"
PICTURES = "image=1,maintenance=1"
RECOVERY_SECONDS = 12.0
"""Lease and sweep, and generous slack for a machine that is busy with other tests."""


class Lab(Platform):
    """A platform whose workers serve the application `tests.faults.app`."""

    def __init__(
        self, database: str, folder: Path, *, app_name: str = "app", **settings: object
    ) -> None:
        super().__init__(database, folder, **{**FAST, **settings})
        self.folder = folder
        self.app_name = app_name
        self.accepted: set[UUID] = set()
        self.by_key: dict[str, list[str]] = {}
        self.kills: dict[str, datetime] = {}
        self._below: list[tuple[int, str]] = []
        self._names: dict[int, str] = {}
        self.execute(app.TABLES)

    # --- Processes

    def _start(self, name: str, settings: dict[str, object]) -> Process:
        given = {**self.settings, **settings}
        app_name = str(given.pop("app_name", self.app_name))
        env = {k: v for k, v in os.environ.items() if not k.startswith("MEDIAMILL_")}
        env |= {f"MEDIAMILL_{k.upper()}": str(v) for k, v in given.items()}
        env["FAULTS_FOLDER"] = str(self.folder)
        command = [*_COMMAND, name]
        if name == "worker":
            command += ["--app", f"tests.faults.{app_name}:mill"]
        elif name == "supervised":  # a worker that is bound to the process which starts it
            command = [sys.executable, "-c", _SUPERVISOR, f"tests.faults.{app_name}:mill"]
        log = self.folder / f"{len(self.processes)}-{name}.log"
        with log.open("wb") as file:
            popen = subprocess.Popen(
                command,
                env=env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        process = Process(name, popen, log)
        self.processes.append(process)
        return process

    def start_worker(self, slots: str | None = GENERIC, **settings: object) -> Process:
        """A worker that has registered itself, or has met its failpoint before that was seen."""
        worker = self._start("worker", {**settings, "slots": slots})
        until(
            lambda: not worker.alive or self._named(worker) or state_of(worker.pid) == "T",
            seconds=60,
            why="the worker has not registered",
        )
        if "failpoint" not in settings:
            assert worker.alive, f"the worker ended: {worker.log.read_text()[-2000:]}"
        return worker

    def _named(self, worker: Process) -> bool:
        for row in self.rows("SELECT id, pid FROM workers"):
            self._names[row["pid"]] = row["id"]
        return worker.pid in self._names

    def name_of(self, worker: Process) -> str:
        """The worker's identity in the database."""
        until(lambda: self._named(worker), seconds=30, why="the worker is unknown")
        return self._names[worker.pid]

    def watch(self, worker: Process) -> None:
        """Remember what runs below a worker now: it must be gone after the worker is."""
        self._below += identities(descendants(worker.pid))

    def kill(self, worker: Process) -> None:
        """kill -9, with a note of when."""
        self.watch(worker)
        worker.kill()
        self.note_death(worker)

    def note_death(self, worker: Process) -> None:
        if worker.pid in self._names:
            self.kills[self._names[worker.pid]] = self.value("SELECT clock_timestamp()")

    def await_death(self, worker: Process, *, seconds: float = 60) -> None:
        """The worker dies of its failpoint."""
        until(
            lambda: not worker.alive, seconds=seconds, why="the worker did not meet its failpoint"
        )
        self.note_death(worker)

    def await_freeze(self, worker: Process, *, seconds: float = 60) -> None:
        until(
            lambda: not worker.alive or state_of(worker.pid) == "T",
            seconds=seconds,
            why="the worker did not meet its failpoint",
        )
        assert worker.alive, worker.log.read_text()[-2000:]

    def executions(self, job_id: UUID) -> int:
        """How often the function of a job was begun."""
        path = self.folder / "executions" / ids.encode(ids.JOB, job_id)
        return len(path.read_text().splitlines()) if path.exists() else 0

    # --- Work

    def execute(self, statement: str, *args: object) -> None:
        self.rows(statement, *args)

    def enqueue(self, kind: str, payload: Any = None, **more: Any) -> UUID:
        return self.enqueue_many([(kind, payload)], **more)[0]

    def enqueue_many(self, wanted: Sequence[tuple[str, Any]], **more: Any) -> list[UUID]:
        """Jobs of the application, in one transaction of its own."""

        async def work(connection: db.Connection) -> list[UUID]:
            made = []
            async with connection.transaction():
                for kind, payload in wanted:
                    job_id = await app.mill.enqueue(connection, kind, payload, **more)
                    made.append(decoded(job_id))
            return made

        made: list[UUID] = self.run(work)
        self.accepted.update(made)
        return made

    def run(self, work: Any) -> Any:
        """Run `work(connection)` on a connection of its own, over an outage if need be."""

        async def go() -> Any:
            for _ in range(200):
                try:
                    connection = await db.connect(self.database)
                except db.Unavailable:
                    await asyncio.sleep(0.1)
                    continue
                try:
                    return await work(connection)
                finally:
                    connection.terminate()
            raise AssertionError("the database did not come back")

        return self._runner.run(go())

    def picture(self, data: bytes | None = None, *, filename: str = "p.jpg") -> UUID:
        return self.accept("image", data or tiny_picture(), filename)

    def film(self, data: bytes) -> UUID:
        return self.accept("video", data, "clip.mp4")

    def accept(self, kind: str, data: bytes, filename: str) -> UUID:
        """An accepted media, without an API: the bytes stored, its jobs queued."""

        async def work(connection: db.Connection) -> UUID:
            settings = rows.settings(self.data)
            installed = await installation.identify(connection)
            store: LocalStorage = open_local(
                self.objects, installed.id, lambda: installed.keyring, settings.base_url
            )
            slot = await rows.open_slot(
                connection,
                "default",
                settings,
                size=len(data),
                content_type=f"{kind}/x-test",
                filename=filename,
            )
            source = self.folder / f"{slot.id}.source"
            source.write_bytes(data)
            stored = await store.put(slot.upload_key, source)
            source.unlink()
            async with connection.transaction():
                row = await media.accept(
                    connection,
                    "default",
                    slot.id,
                    object_version=stored.version,
                    kind=kind,
                    births=uploads.births(kind),
                    max_attempts=int(str(self.settings.get("max_attempts", 5))),
                )
            assert row is not None
            return slot.id

        media_id: UUID = self.run(work)
        self.accepted.add(media_id)
        return media_id

    def job(self, job_id: UUID) -> Any:
        return self.rows("SELECT * FROM jobs WHERE id = $1", job_id)[0]

    def job_of(self, media_id: UUID) -> Any:
        """The main job of a media."""
        return self.rows(
            "SELECT * FROM jobs WHERE media_id = $1 AND role = 'main' ORDER BY id DESC", media_id
        )[0]

    def outcomes(self, job_id: UUID) -> list[str]:
        found = self.rows("SELECT outcome FROM attempts WHERE job_id = $1 ORDER BY fence", job_id)
        return [row["outcome"] for row in found]

    def await_job(self, job_id: UUID, *states: str, seconds: float = 60) -> Any:
        """The row of a job once it is in one of these states (default: any end)."""

        def look() -> Any:
            row = self.job(job_id)
            return row if row["state"] in (states or ENDED) else None

        return until(look, seconds=seconds, why=f"job {job_id} is not {states or 'done'}")

    def await_all(self, *, seconds: float = 90) -> None:
        """Every accepted job and media, and every child, has ended."""
        until(
            lambda: (
                self.value(
                    "SELECT (SELECT count(*) FROM jobs WHERE state IN ('queued', 'processing'))"
                    " + (SELECT count(*) FROM media"
                    " WHERE state IN ('awaiting_upload', 'uploaded', 'queued', 'processing'))"
                )
                == 0
            ),
            seconds=seconds,
            why="some job has not ended",
            every_seconds=0.05,
        )

    # --- What must hold

    def history(self, *, settle_seconds: float = 8.0) -> checker.History:
        """Everything that is left. What is being tidied up gets a moment to go."""
        deadline = time.monotonic() + settle_seconds
        while True:
            history = self._collect()
            if not history.leftovers or time.monotonic() > deadline:
                return history
            time.sleep(0.1)

    def _collect(self) -> checker.History:
        live = [p for p in self.processes if p.name == "worker" and p.alive]
        names = [self._names[p.pid] for p in live if self._named(p)]
        alive = {d for p in live for d in descendants(p.pid)}
        orphans = [f"process {pid}" for pid in still_alive(self._below) if pid not in alive]

        async def work() -> checker.History:
            return await checker.collect(
                self.database,
                objects=self.objects,
                scratch=self.data / "scratch",
                live_workers=names,
                orphans=orphans,
            )

        history: checker.History = self._runner.run(work())
        history.accepted = {str(i) for i in self.accepted}
        history.by_key = self.by_key
        history.kills = self.kills
        history.recovery_seconds = RECOVERY_SECONDS
        history.one_row_kinds = frozenset({"row", "hold"})
        history.receipts = Payments(self.folder / "payments").receipts()
        return history

    def check(self, *, ignore: Iterable[str] = ()) -> checker.History:
        """The independent checker finds nothing to object to."""
        history = self.history()
        found = [str(v) for v in checker.violations(history) if v.promise not in set(ignore)]
        assert not found, "\n".join(found)
        return history

    def duty(self, name: str, **changes: Any) -> int:
        """Run one duty here and now; returns how much it did."""

        async def work(connection: db.Connection) -> int:
            installed = await installation.identify(connection)
            settings = settings_of(self, **changes)
            store = open_local(
                self.objects, installed.id, lambda: installed.keyring, settings.base_url
            )
            async with rows.pooled(self.database) as pool:
                duties = Maintenance(settings, pool, store)
                return await duties.once(next(d for d in duties.duties if d.name == name))

        done: int = self.run(work)
        return done

    def close(self) -> None:
        """What still runs is of no interest any more."""
        for process in self.processes:
            if process.alive:
                process.kill()
        super().close()


def decoded(job_id: str) -> UUID:
    value = ids.decode(ids.JOB, job_id)
    assert value is not None
    return value


def tiny_picture(seed: int = 1) -> bytes:
    return save(texture((64, 48), seed), "JPEG", quality=80)


def state_of(pid: int) -> str:
    """R, S, T (stopped), Z … of /proc; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def freeze(process: Process) -> None:
    process.send(signal.SIGSTOP)


def thaw(process: Process) -> None:
    process.send(signal.SIGCONT)


def stray(*marks: str) -> list[str]:
    """Processes of this machine whose command line has one of these marks."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, UnicodeDecodeError):
            continue
        if any(mark in line for mark in marks) and state_of(int(entry)) != "Z":
            found.append(f"{entry} {line}")
    return found


def settings_of(lab: Lab, **changes: Any) -> config.Settings:
    """The settings of the lab, for a duty that the test runs itself."""
    given = {k: v for k, v in FAST.items() if k != "drain_seconds"}
    return rows.settings(lab.data, **{**given, **changes})

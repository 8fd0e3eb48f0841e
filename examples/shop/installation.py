"""Mediamill for the demonstration: API and workers as the processes that they are in production."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2 as httpx

from mediamill import config, db, installation, keys, processes

ROOT: Final = Path(__file__).parents[2]
ENDED: Final = ("completed", "failed", "canceled")


@dataclass(slots=True)
class Worker:
    """A worker process with its log."""

    process: asyncio.subprocess.Process
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    async def died(self, *, seconds: float = 30) -> int:
        """Wait for its end; the exit code, negative for a signal."""
        async with asyncio.timeout(seconds):
            return await self.process.wait()


@dataclass(slots=True)
class Installation:
    """What runs, and how to speak to it."""

    http: httpx.AsyncClient
    env: dict[str, str]
    folder: Path
    workers: list[Worker] = field(default_factory=list)

    async def start_worker(
        self, app: str, *, cwd: Path = ROOT, slots: str = "default=2,maintenance=1", **env: str
    ) -> Worker:
        """A worker that serves the application; returns once it has registered."""
        log = self.folder / f"worker-{len(self.workers) + 1}.log"
        process = await _start(
            ["worker", "--app", app, "--slots", slots], self.env | env, log, cwd=cwd
        )
        worker = Worker(process, log)
        self.workers.append(worker)
        for _ in range(600):
            answer = await self.http.get("/v1/workers")
            if any(row["pid"] == process.pid for row in answer.json()["data"]):
                return worker
            if process.returncode is not None:
                break
            await asyncio.sleep(0.05)
        raise RuntimeError(f"The worker did not start: {log.read_text()[-2000:]}")

    async def submit(self, kind: str, payload: Mapping[str, Any], **more: Any) -> str:
        """POST /v1/jobs; the id."""
        body = {"kind": kind, "payload": payload, **more}
        answer = await self.http.post("/v1/jobs", json=body)
        answer.raise_for_status()
        job_id: str = answer.json()["id"]
        return job_id

    async def job(self, job_id: str) -> dict[str, Any]:
        answer = await self.http.get(f"/v1/jobs/{job_id}")
        answer.raise_for_status()
        body: dict[str, Any] = answer.json()
        return body

    async def ended(self, job_id: str, *, seconds: float = 40) -> dict[str, Any]:
        """Poll until the job has ended."""
        async with asyncio.timeout(seconds):
            while True:
                body = await self.job(job_id)
                if body["state"] in ENDED:
                    return body
                await asyncio.sleep(0.05)

    async def replay(self, job_id: str) -> None:
        (await self.http.post(f"/v1/jobs/{job_id}/replay")).raise_for_status()


@asynccontextmanager
async def running(
    database_url: str, folder: Path, *, env: Mapping[str, str], **settings: object
) -> AsyncIterator[Installation]:
    """An installation on a database, migrated and answering; stopped when the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = {"database_url": database_url, "data_dir": folder / "data", "port": port, **settings}
    key = await _prepare(config.load(**given))
    whole = {k: v for k, v in os.environ.items() if not k.startswith("MEDIAMILL_")}
    whole |= {f"MEDIAMILL_{name.upper()}": str(value) for name, value in given.items()} | dict(env)
    api = await _start(["api"], whole, folder / "api.log", cwd=ROOT)
    url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
        here = Installation(http, whole | {"API": url, "KEY": key}, folder)
        try:
            await _answers(http, api)
            yield here
        finally:
            for process in (*(worker.process for worker in here.workers), api):
                if process.returncode is None:
                    process.terminate()
                await process.wait()


async def _prepare(settings: config.Settings) -> str:
    """Bring the schema up to date; an API key."""
    await processes.migrate(settings)
    connection = await db.connect(processes.require_database(settings))
    try:
        installed = await installation.identify(connection)
        return await keys.create(
            connection,
            installed.pepper,
            tenant_id="default",
            name="shop",
            scopes=("admin", "operate"),  # it asks for the workers, and pauses queues
        )
    finally:
        await connection.close()


async def _start(
    command: list[str], env: Mapping[str, str], log: Path, *, cwd: Path
) -> asyncio.subprocess.Process:
    argv = [sys.executable, "-m", "mediamill", "--bound-to", str(os.getpid()), *command]
    with log.open("wb") as file:
        return await asyncio.create_subprocess_exec(
            *argv, env=env, cwd=cwd, stdin=asyncio.subprocess.DEVNULL, stdout=file, stderr=file
        )


async def _answers(http: httpx.AsyncClient, api: asyncio.subprocess.Process) -> None:
    for _ in range(600):
        if api.returncode is not None:
            raise RuntimeError(f"The API ended with {api.returncode}; see its log.")
        try:
            if (await http.get("/readyz")).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        await asyncio.sleep(0.05)
    raise RuntimeError("The API did not answer in 30 s.")

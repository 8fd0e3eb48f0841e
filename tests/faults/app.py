"""An application for the fault tests: cheap jobs that succeed, fail, hang, wait or kill.

What they do outside the database goes below FAULTS_FOLDER, where the tests read it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.faults.payments import Payments
from typing_extensions import TypedDict

from mediamill import Job, Mill
from mediamill.failures import Code, Failure
from mediamill.mill import Child, Wait

mill = Mill()

TABLES = "CREATE TABLE IF NOT EXISTS app_rows (job_id text NOT NULL, n int NOT NULL)"
"""The application's own table; nothing in it prevents a double row."""


class Seconds(TypedDict):
    seconds: float


class Number(TypedDict):
    n: int


class Times(TypedDict):
    times: int


def folder() -> Path:
    return Path(os.environ["FAULTS_FOLDER"])


def began(job: Job) -> int:
    """Leave a line for this execution; how many there are now."""
    path = folder() / "executions" / job.id
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{os.getpid()} {job.attempt} {time.time():.3f}\n")
    return len(path.read_text().splitlines())


@mill.job("noop")
async def noop(job: Job) -> str:
    return "done"


@mill.job("sleep", timeout="2m")
async def sleep(job: Job, payload: Seconds) -> None:
    began(job)
    until = time.monotonic() + payload["seconds"]
    while (left := until - time.monotonic()) > 0:
        job.progress(100 * (1 - left / payload["seconds"]))
        await asyncio.sleep(min(left, 0.1))


@mill.job("row", timeout="1m")
async def row(job: Job, payload: Number) -> int:
    """Exactly one row, whatever happens."""
    began(job)
    async with job.transaction("row") as connection:
        if connection is not None:
            await connection.execute(
                "INSERT INTO app_rows (job_id, n) VALUES ($1, $2)", job.id, payload["n"]
            )
    return payload["n"]


@mill.job("pay", timeout="1m")
async def pay(job: Job, payload: Number) -> Any:
    """Exactly one payment, since the other side honors the key."""
    began(job)
    payments = Payments(folder() / "payments")
    return await job.once("charge", lambda key: payments.charge(key, payload["n"]))


@mill.job("parent", timeout="1m")
async def parent(job: Job, payload: Number) -> int | Wait:
    """As many children as it is told, each with its row; the sum of what they return."""
    began(job)
    if job.results is None:
        return Wait(Child("row", {"n": n}) for n in range(payload["n"]))
    return int(sum(job.results.values()))


@mill.job("tree", timeout="1m")
async def tree(job: Job, payload: Number) -> int | Wait:
    """Two levels of children."""
    if job.results is None:
        return Wait(Child("parent", {"n": payload["n"]}) for _ in range(2))
    return int(sum(job.results.values()))


@mill.job("flaky", timeout="1m")
async def flaky(job: Job, payload: Times) -> int:
    """Fails so many times for a reason that passes."""
    if began(job) <= payload["times"]:
        raise Failure(Code.STORAGE_UNAVAILABLE)
    return job.attempt


@mill.job("broken")
async def broken(job: Job) -> None:
    """A failure that no repeat can mend."""
    began(job)
    raise Failure(Code.CORRUPT_INPUT)


@mill.job("hopeless", max_attempts=1)
async def hopeless(job: Job, payload: Number) -> int:
    """A dead letter at once, until the file `mended` is there."""
    if not (folder() / "mended").exists():
        raise Failure(Code.INTERNAL, "Not mended yet.")
    return payload["n"]


@mill.job("crash")
async def crash(job: Job, payload: Times) -> str:
    """Kills its worker so many times, as a decoder that damages memory would."""
    if began(job) <= payload["times"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


@mill.job("full")
async def full(job: Job) -> str:
    """The disk is full, until there is a file `room`."""
    began(job)
    if not (folder() / "room").exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return "stored"


@mill.job("deaf", timeout="1s", max_attempts=2)
async def deaf(job: Job) -> None:
    """Does not end when it is told to."""
    began(job)
    while not (folder() / "enough").exists():
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue


@mill.job("stuck", timeout="1s", max_attempts=2)
def stuck(job: Job) -> None:
    """A plain function that blocks its thread."""
    began(job)
    while not (folder() / "enough").exists():
        time.sleep(0.05)


@mill.job("hold", timeout="1m")
async def hold(job: Job, payload: Seconds) -> None:
    """A transaction of an effect that stays open for longer than a lease."""
    began(job)
    async with job.transaction("row") as connection:
        if connection is not None:
            await connection.execute("INSERT INTO app_rows (job_id, n) VALUES ($1, 1)", job.id)
            await connection.execute("SELECT pg_sleep($1)", payload["seconds"])


@mill.job("busy", timeout="2m")
def busy(job: Job, payload: Seconds) -> int:
    """Takes a core for that long."""
    began(job)
    until = time.monotonic() + payload["seconds"]
    rounds = 0
    while time.monotonic() < until and not job.stopping:
        sum(range(20_000))
        rounds += 1
    return rounds


@mill.job("greet", version=1)
async def greet(job: Job, payload: dict[str, Any]) -> str:
    return f"hello {payload['name']}"

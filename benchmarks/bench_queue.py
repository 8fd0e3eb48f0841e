"""No-op jobs through the whole engine, beside PgQueuer alone, Celery and Dramatiq on Redis.

Every contender drains a backlog that was there before its workers began, in interleaved rounds of
one run: compare within a round, and processor time per job, rather than rates of different days.
PgQueuer runs on the same PostgreSQL server as we do. Celery and Dramatiq are skipped unless
`redis-server` is there and BENCH_PYTHON names a Python that has them.

    QUICK=1       a short run, for trying it out
    ONLY=a,b      some parts of: drain, pickup, backlog, idle, full, burst
    ROUNDS, JOBS  rounds of the drain, and jobs in each
    SLOTS         slots of a worker of ours
    CELERY_SLOTS  concurrency of a Celery worker; more was not faster on two cores
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol

import asyncpg

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness, load
from benchmarks.harness import Report, Stand, percentile, ratios, say, spread
from benchmarks.queue_app import mill

from mediamill import db, ids, keys, queue
from mediamill.queue import Ticket

HERE: Final = Path(__file__).resolve().parent
QUICK: Final = bool(os.environ.get("QUICK"))
PARTS: Final = ("drain", "pickup", "backlog", "idle", "full", "burst")
ROUNDS: Final = int(os.environ.get("ROUNDS", "1" if QUICK else "4"))
JOBS: Final = int(os.environ.get("JOBS", "2000" if QUICK else "8000"))
SLOTS: Final = int(os.environ.get("SLOTS", "20"))
_CELERY_SLOTS: Final = os.environ.get("CELERY_SLOTS", "1")
WINDOW_SECONDS: Final = 5.0 if QUICK else 30.0
BACKLOGS: Final = (1_000, 20_000, 100_000) if QUICK else (1_000, 100_000, 1_000_000)
PICKUPS: Final = 60 if QUICK else 300
WATCH_SECONDS: Final = 8.0 if QUICK else 20.0
BURST_JOBS: Final = 2_000 if QUICK else 10_000
BURST_SECONDS: Final = 12.0 if QUICK else 60.0
_COPY_BATCH: Final = 50_000
_PATIENCE_SECONDS: Final = 600.0


def main() -> None:
    wanted = [p for p in os.environ.get("ONLY", ",".join(PARTS)).split(",") if p]
    report = Report("queue")
    say(f"load average {harness.load_average():.2f} at the start; {SLOTS} slots")
    with harness.stand() as here:
        if "drain" in wanted:
            _drain(here, report)
        if "pickup" in wanted:
            _pickup(here, report)
        if "idle" in wanted:
            _idle(here, report)
        if "full" in wanted:
            _full(here, report)
        if "burst" in wanted:
            _burst(here, report)
        if "backlog" in wanted:
            _backlog(here, report)
    report.figure("load average at the end", harness.load_average())
    report.close()


# ---------------------------------------------------------------- contenders


class Contender(Protocol):
    """Something that can be given a backlog and workers."""

    @property
    def name(self) -> str: ...
    @property
    def server_pid(self) -> int: ...

    def fill(self, number: int) -> None:
        """An empty queue, then a backlog of no-op jobs."""

    def worker(self, number: int) -> list[str]:
        """What starts the nth worker process."""

    def environment(self) -> dict[str, str]: ...

    def left(self) -> int:
        """Jobs that have not ended."""


@dataclass(slots=True)
class Ours:
    """The whole engine: durable, leased, fenced, logged."""

    here: Stand
    name: str = "mediamill"
    slots: str = f"default={SLOTS}"

    @property
    def server_pid(self) -> int:
        return self.here.postgres_pid

    def fill(self, number: int) -> None:
        async def run() -> None:
            async with harness.database(self.here.dsn) as connection:
                await _empty(connection)
                await _copy(connection, number, first=1)
                await _rest(connection)

        asyncio.run(run())

    def worker(self, number: int) -> list[str]:
        argv = [sys.executable, "-m", "mediamill", "--bound-to", str(os.getpid()), "worker"]
        return [*argv, "--app", "queue_app:mill", "--slots", self.slots]

    def environment(self) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("MEDIAMILL_")}
        given = self.here.settings.model_dump(mode="json", exclude_none=True)
        env |= {f"MEDIAMILL_{k.upper()}": str(v) for k, v in given.items()}
        path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        return env | {"PYTHONPATH": os.pathsep.join(path)}

    def left(self) -> int:
        return int(
            _fetchval(
                self.here.dsn,
                "SELECT (SELECT count(*) FROM jobs WHERE state = 'queued')"
                " + (SELECT count(*) FROM jobs WHERE state = 'processing')",
            )
        )


_PGQUEUER_WORKER: Final = """
import asyncio, signal, sys
import asyncpg, uvloop
from pgqueuer import PgQueuer
from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver

async def main():
    mill = PgQueuer(AsyncpgDriver(await asyncpg.connect(sys.argv[1])))

    @mill.entrypoint("noop")
    async def noop(job):
        pass

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, mill.shutdown.set)
    await mill.run()

uvloop.run(main())
"""


@dataclass(slots=True)
class BarePgQueuer:
    """The engine library alone, with its own tables and its own manager, as it comes."""

    here: Stand
    dsn: str
    script: Path
    name: str = "pgqueuer alone"

    @classmethod
    def on(cls, here: Stand) -> BarePgQueuer:
        async def run() -> str:
            async with harness.database(here.dsn) as connection:
                await connection.execute("CREATE DATABASE bare")
            head, mark, query = here.dsn.partition("?")
            dsn = f"{head.rpartition('/')[0]}/bare{mark}{query}"
            from pgqueuer.adapters.persistence.queries import Queries

            bare = await asyncpg.connect(dsn)
            await Queries.from_asyncpg_connection(bare).install()
            await bare.close()
            return dsn

        script = here.work / "bare_worker.py"
        script.write_text(_PGQUEUER_WORKER)
        return cls(here, asyncio.run(run()), script)

    @property
    def server_pid(self) -> int:
        return self.here.postgres_pid

    def fill(self, number: int) -> None:
        async def run() -> None:
            connection = await asyncpg.connect(self.dsn)
            await connection.execute("TRUNCATE pgqueuer, pgqueuer_log, pgqueuer_statistics")
            await connection.copy_records_to_table(
                "pgqueuer",
                records=((0, "queued", "noop") for _ in range(number)),
                columns=["priority", "status", "entrypoint"],
            )
            await connection.execute("VACUUM ANALYZE pgqueuer")
            await connection.execute("CHECKPOINT")
            await connection.close()

        asyncio.run(run())

    def worker(self, number: int) -> list[str]:
        return [sys.executable, str(self.script), self.dsn]

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def left(self) -> int:
        return int(_fetchval(self.dsn, "SELECT count(*) FROM pgqueuer"))


_CELERY_APP: Final = """
import os, sys
from celery import Celery

app = Celery("bench", broker=os.environ["BENCH_REDIS"])
app.conf.task_acks_late = True
app.conf.task_ignore_result = True

@app.task
def noop():
    pass

if __name__ == "__main__":
    with app.producer_pool.acquire(block=True) as producer:
        for _ in range(int(sys.argv[1])):
            noop.apply_async(producer=producer)
"""

_DRAMATIQ_APP: Final = """
import os, sys
import dramatiq
from dramatiq.brokers.redis import RedisBroker

dramatiq.set_broker(RedisBroker(url=os.environ["BENCH_REDIS"]))

@dramatiq.actor
def noop():
    pass

if __name__ == "__main__":
    for _ in range(int(sys.argv[1])):
        noop.send()
"""


@dataclass(slots=True)
class OnRedis:
    """A library on Redis, as it comes; with acknowledgement at the end, since ours is durable."""

    name: str
    server_pid: int
    python: str
    port: int
    script: Path
    argv: Sequence[str]
    counts: Sequence[tuple[str, ...]]
    """Redis commands whose answers add up to what is left."""

    def fill(self, number: int) -> None:
        _redis(self.port, "FLUSHALL")
        subprocess.run(
            [self.python, str(self.script), str(number)],
            env=self.environment(),
            cwd=self.script.parent,
            check=True,
        )

    def worker(self, number: int) -> list[str]:
        return [self.python, "-m", *self.argv, *(["-n", f"w{number}@bench"] * self._named)]

    @property
    def _named(self) -> bool:
        return self.name.startswith("celery")

    def environment(self) -> dict[str, str]:
        here = str(self.script.parent)
        return {
            **os.environ,
            "BENCH_REDIS": f"redis://127.0.0.1:{self.port}/0",
            "PYTHONPATH": here,
        }

    def left(self) -> int:
        return sum(_redis(self.port, *command) for command in self.counts)


@contextmanager
def _rivals(here: Stand) -> Iterator[list[Contender]]:
    """Those on Redis that this machine has."""
    python, server = os.environ.get("BENCH_PYTHON", sys.executable), shutil.which("redis-server")
    has = {name: _imports(python, name) for name in ("celery", "dramatiq")}
    for name, found in has.items():
        if server is None or not found:
            say(f"skipped {name}: {'no redis-server' if server is None else f'not in {python}'}")
    if server is None or not any(has.values()):
        yield []
        return
    port = harness.free_port()
    argv = [server, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(here.work)]
    argv += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
    with harness.process(argv, env=None, log=here.work / "redis.log") as pid:
        harness.wait_until(lambda: _answers(port), seconds=20)
        here_now: list[Contender] = []
        if has["celery"]:
            script = here.work / "celery_app.py"
            script.write_text(_CELERY_APP)
            start = ["celery", "-A", "celery_app", "worker", "-P", "prefork", "-c", _CELERY_SLOTS]
            counts = [("LLEN", "celery"), ("HLEN", "unacked")]
            here_now.append(OnRedis("celery on redis", pid, python, port, script, start, counts))
        if has["dramatiq"]:
            script = here.work / "dramatiq_app.py"
            script.write_text(_DRAMATIQ_APP)
            start = ["dramatiq", "dramatiq_app", "--processes", "1"]
            counts = [("HLEN", "dramatiq:default.msgs")]
            here_now.append(OnRedis("dramatiq on redis", pid, python, port, script, start, counts))
        yield here_now


def _imports(python: str, name: str) -> bool:
    argv = [python, "-c", f"import {name}, redis"]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def _answers(port: int) -> bool:
    try:
        return _redis(port, "DBSIZE") >= 0
    except OSError:
        return False


def _redis(port: int, *command: str) -> int:
    """One command whose answer is a number, or does not matter."""
    parts = [f"${len(word)}\r\n{word}\r\n" for word in command]
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(f"*{len(command)}\r\n{''.join(parts)}".encode())
        answer = line.recv(4096).decode()
    return int(answer[1:].split("\r\n")[0]) if answer.startswith(":") else 0


# ---------------------------------------------------------------- drain


@dataclass(frozen=True, slots=True)
class Drain:
    """A backlog drained. Processor time is in milliseconds for each job."""

    rate: float
    worker_cpu_ms: float
    server_cpu_ms: float


def _drain(here: Stand, report: Report) -> None:
    """Jobs a second and processor time for each, of a backlog, with one and two processes."""
    say(f"\ndrain of {JOBS} no-op jobs, {ROUNDS} rounds")
    found: dict[tuple[str, int], list[Drain]] = defaultdict(list)
    with _rivals(here) as rivals:
        contenders: list[Contender] = [Ours(here), BarePgQueuer.on(here), *rivals]
        for cycle in range(ROUNDS):
            turns = [(c, n) for c in contenders for n in (1, 2)]
            for contender, processes in random.sample(turns, len(turns)):
                done = _drained(contender, processes)
                found[contender.name, processes].append(done)
                say(
                    f"  round {cycle + 1}, load {harness.load_average():4.1f}: "
                    f"{contender.name}, {processes}: {done.rate:.0f}/s, CPU "
                    f"{done.worker_cpu_ms:.2f} + {done.server_cpu_ms:.2f} ms"
                )
    for (name, processes), drains in found.items():
        what = f"{name}, {processes} process{'es' * (processes > 1)}"
        report.figure(f"{what}: jobs/s", spread([d.rate for d in drains]))
        report.figure(f"{what}: worker CPU", spread([d.worker_cpu_ms for d in drains]), "ms/job")
        report.figure(f"{what}: server CPU", spread([d.server_cpu_ms for d in drains]), "ms/job")
    for (name, processes), drains in found.items():
        if name != "mediamill":
            ours = [d.rate for d in found["mediamill", processes]]
            ratio = ratios(ours, [d.rate for d in drains])
            report.figure(f"ours / {name}, {processes}: jobs/s", ratio)
            if name == "celery on redis" and processes == 1:
                report.aim("jobs/s, ours / celery on redis, one process", ratio.median, least=1.0)


def _drained(contender: Contender, processes: int) -> Drain:
    """From the moment a tenth is done (so that starting does not count) to the last job."""
    contender.fill(JOBS)
    with _workers(contender, processes) as pids:
        began = _await_left(contender, int(JOBS * 0.9))
        cpu = _cpu(pids), harness.cpu_seconds(contender.server_pid)
        left = contender.left()
        _await_left(contender, 0)
        seconds = time.monotonic() - began
        used = _cpu(pids) - cpu[0], harness.cpu_seconds(contender.server_pid) - cpu[1]
    return Drain(left / seconds, 1000 * used[0] / left, 1000 * used[1] / left)


@contextmanager
def _workers(contender: Contender, processes: int) -> Iterator[list[int]]:
    with ExitStack() as running:
        log = Path("/dev/null")
        if isinstance(contender, Ours):
            log = contender.here.work / "worker.log"
        elif isinstance(contender, OnRedis):
            log = contender.script.with_suffix(".log")
        yield [
            running.enter_context(
                harness.process(contender.worker(n), env=contender.environment(), log=log)
            )
            for n in range(processes)
        ]


def _await_left(contender: Contender, most: int) -> float:
    """Return once no more than this is left, with the time at which that was known."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while contender.left() > most:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{contender.name} did not get to {most} jobs left")
        time.sleep(0.05)
    return time.monotonic()


def _cpu(pids: Sequence[int]) -> float:
    return sum(harness.cpu_seconds(pid) for pid in pids)


# ---------------------------------------------------------------- pickup


def _pickup(here: Stand, report: Report) -> None:
    """From the commit of a job to the call of its function, by an idle worker."""
    ours = Ours(here)
    ours.fill(0)
    with _workers(ours, 1) as pids:
        harness.await_worker(here, pids[0])
        waits = asyncio.run(_stamped(here, PICKUPS))
    say(f"\npickup of {len(waits)} single jobs by an idle worker")
    report.figure("pickup p50", percentile(waits, 0.5), "ms")
    report.figure("pickup p99", percentile(waits, 0.99), "ms")
    report.aim("pickup p50, ms", percentile(waits, 0.5), most=25.0)


async def _stamped(here: Stand, number: int) -> list[float]:
    committed: dict[str, float] = {}
    async with harness.database(here.dsn) as connection:
        for _ in range(number):
            commit = connection.transaction()
            await commit.start()
            job = await mill.enqueue(connection, "bench.stamp")
            committed[job] = time.time()
            await commit.commit()
            await asyncio.sleep(random.uniform(0.05, 0.15))
        await asyncio.sleep(1.0)
        rows = await connection.fetch(
            "SELECT id, (result ->> 'value')::float8 AS called FROM jobs WHERE kind = 'bench.stamp'"
        )
    called = {ids.encode(ids.JOB, row["id"]): row["called"] for row in rows}
    return [1000 * (called[job] - at) for job, at in committed.items()]


# ---------------------------------------------------------------- idle and full


def _idle(here: Stand, report: Report) -> None:
    """What a worker costs that has nothing to do; the sweep apart, as the difference."""
    say(f"\nidle for {WATCH_SECONDS:g} s")
    without = _watched(here, f"default={SLOTS}", waiting=0)
    with_sweep = _watched(here, f"default={SLOTS},maintenance=1", waiting=0)
    report.figure("idle worker: CPU", without.worker_percent, "% of a core")
    report.figure("idle worker: PostgreSQL CPU", without.server_percent, "% of a core")
    report.figure("idle worker: transactions/s", without.transactions)
    report.figure("idle worker that sweeps: CPU", with_sweep.worker_percent, "% of a core")
    report.figure("idle worker that sweeps: PostgreSQL CPU", with_sweep.server_percent, "%")
    report.figure("sweep: transactions/s", with_sweep.transactions - without.transactions)
    report.aim("idle worker, % of a core", without.worker_percent, most=2.0)


def _full(here: Stand, report: Report) -> None:
    """Transactions of a worker whose slots are all taken while jobs wait, and of one that may run
    only one of them because of a cap; neither sweeps."""
    say(f"\nfull for {WATCH_SECONDS:g} s")
    for what, kind in (("full worker", "bench.sleep"), ("worker before a cap", "bench.capped")):
        seen = _watched(here, f"default={SLOTS}", waiting=10 * SLOTS, kind=kind)
        report.figure(f"{what}: CPU", seen.worker_percent, "% of a core")
        report.figure(f"{what}: PostgreSQL CPU", seen.server_percent, "% of a core")
        report.figure(f"{what}: transactions/s", seen.transactions)
        report.aim(f"{what}, transactions/s", seen.transactions, most=8.0)


@dataclass(frozen=True, slots=True)
class Watch:
    worker_percent: float
    server_percent: float
    transactions: float


def _watched(here: Stand, slots: str, *, waiting: int, kind: str = "bench.sleep") -> Watch:
    ours = Ours(here, slots=slots)
    ours.fill(0)
    if waiting:
        asyncio.run(_sleepers(here, waiting, kind))
    with _workers(ours, 1) as pids:
        harness.await_worker(here, pids[0])
        time.sleep(4.0)
        before = _transactions(here), _cpu(pids), harness.cpu_seconds(here.postgres_pid)
        time.sleep(WATCH_SECONDS)
        after = _transactions(here), _cpu(pids), harness.cpu_seconds(here.postgres_pid)
        if waiting:
            asyncio.run(_wake(here))
    count, worker, server = (b - a for a, b in zip(before, after, strict=True))
    share = 100 / WATCH_SECONDS
    return Watch(worker * share, server * share, count / WATCH_SECONDS)


def _transactions(here: Stand) -> float:
    """Of the whole database; our own look is one of them, and is told at the next."""
    return float(
        _fetchval(
            here.dsn,
            "SELECT xact_commit + xact_rollback FROM pg_stat_database"
            " WHERE datname = current_database()",
        )
    )


async def _sleepers(here: Stand, number: int, kind: str) -> None:
    async with harness.database(here.dsn) as connection:
        for _ in range(number):
            await mill.enqueue(connection, kind, {"seconds": 600.0})


async def _wake(here: Stand) -> None:
    """Cancel what sleeps, so that the worker need not be waited for."""
    async with harness.database(here.dsn) as connection:
        await connection.execute("DELETE FROM mediamill_tickets")
        await connection.execute(
            "UPDATE jobs SET cancel_requested = true WHERE state = 'processing'"
        )
    await asyncio.sleep(3.0)


# ---------------------------------------------------------------- backlog


def _backlog(here: Stand, report: Report) -> None:
    """Jobs a second while the backlog is held at a size by filling up what was done."""
    say(f"\n{WINDOW_SECONDS:g} s beside a backlog that is held at its size")
    ours = Ours(here)
    found: dict[int, list[Drain]] = defaultdict(list)
    # The smallest before and after, so that a drift of the machine shows in both.
    for size in (*BACKLOGS, BACKLOGS[0]):
        began = time.monotonic()
        ours.fill(size)
        filled = time.monotonic() - began
        with _workers(ours, 1) as pids:
            harness.await_worker(here, pids[0])
            done = asyncio.run(_window(here, pids, size))
        found[size].append(done)
        say(
            f"  {size:>9,} waiting (loaded in {filled:.0f} s), load {harness.load_average():.1f}: "
            f"{done.rate:.0f}/s, CPU {done.worker_cpu_ms:.2f} + {done.server_cpu_ms:.2f} ms"
        )
    for size, drains in found.items():
        report.figure(f"backlog {size:,}: jobs/s", spread([d.rate for d in drains]))
        cpu = spread([d.worker_cpu_ms + d.server_cpu_ms for d in drains])
        report.figure(f"backlog {size:,}: CPU, filling up included", cpu, "ms/job")
    small = statistics.mean(d.rate for d in found[BACKLOGS[0]])
    large = found[BACKLOGS[-1]][0].rate
    report.aim(f"jobs/s, backlog {BACKLOGS[-1]:,} / {BACKLOGS[0]:,}", large / small, least=0.9)


async def _window(here: Stand, pids: Sequence[int], size: int) -> Drain:
    counted = "SELECT count(*) FROM jobs WHERE kind = 'bench.noop' AND recipe IS NULL AND"
    counted += " state = 'completed' AND finished_at >= $1 AND finished_at < $2"
    async with harness.database(here.dsn) as connection:
        last = first = await _now(connection)
        turn = size + 1
        deadline, warm = time.monotonic() + WINDOW_SECONDS + 2.0, time.monotonic() + 2.0
        cpu: tuple[float, float] | None = None
        while time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            now = await _now(connection)
            done = await connection.fetchval(counted, last, now)
            await _copy(connection, done, first=turn)
            turn, last = turn + done, now
            if cpu is None and time.monotonic() >= warm:
                first = now
                cpu = _cpu(pids), harness.cpu_seconds(here.postgres_pid)
        end = await _now(connection)
        assert cpu is not None
        used = _cpu(pids) - cpu[0], harness.cpu_seconds(here.postgres_pid) - cpu[1]
        total = await connection.fetchval(counted, first, end)
    seconds = (end - first).total_seconds()
    return Drain(total / seconds, 1000 * used[0] / total, 1000 * used[1] / total)


async def _now(connection: db.Connection) -> datetime:
    now: datetime = await connection.fetchval("SELECT clock_timestamp()")
    return now


async def _empty(connection: db.Connection) -> None:
    await connection.execute(
        "TRUNCATE jobs, attempts, transitions, events, effects, mediamill_tickets,"
        " mediamill_ticket_log CASCADE"
    )


async def _copy(connection: db.Connection, number: int, *, first: int) -> None:
    """No-op jobs and their tickets, as the next in line."""
    for start in range(first, first + number, _COPY_BATCH):
        turns = range(start, min(start + _COPY_BATCH, first + number))
        born = [(ids.new(), turn) for turn in turns]
        async with connection.transaction():
            await connection.copy_records_to_table(
                "jobs",
                records=(
                    (harness.TENANT, job, "queued", "bench.noop", "default", "job", 5, 600.0, turn)
                    for job, turn in born
                ),
                columns=[
                    *("tenant_id", "id", "state", "kind", "queue", "role", "max_attempts"),
                    *("timeout_seconds", "turn"),
                ],
            )
            tickets = (Ticket("default", harness.TENANT, job, 0, turn) for job, turn in born)
            await connection.copy_records_to_table(
                queue.TABLE,
                records=((t.rank, "queued", t.queue, t.payload) for t in tickets),
                columns=["priority", "status", "entrypoint", "payload"],
            )


async def _rest(connection: db.Connection) -> None:
    """As it is after a while without load: vacuumed, analyzed, flushed."""
    await connection.execute("VACUUM ANALYZE jobs")
    await connection.execute(f"VACUUM ANALYZE {queue.TABLE}")
    await connection.execute("CHECKPOINT")


def _fetchval(dsn: str, statement: str) -> Any:
    async def run() -> Any:
        connection = await asyncpg.connect(dsn)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    return asyncio.run(run())


# ---------------------------------------------------------------- burst (F31)

_QUIET: Final = ("quiet-a", "quiet-b", "quiet-c")
_ABUSIVE: Final = "abusive"
_WORK: Final = {"kind": "bench.sleep", "payload": {"seconds": 0.15}}
_QUIET_PAUSE: Final = 0.25


def _burst(here: Stand, report: Report) -> None:
    """F31: what an abusive tenant does to three quiet ones, and to accepting (P11, P12)."""
    say(f"\nburst of {BURST_JOBS:,} jobs over {BURST_SECONDS:g} s, four tenants, one abusive")
    ours = Ours(here, slots=f"default={SLOTS},maintenance=1")
    ours.fill(0)
    with harness.service(here, "api"), _workers(ours, 1) as pids:
        harness.await_worker(here, pids[0])
        seen = asyncio.run(_storm(here))
    for name, waits in (("before", seen.waits_before), ("in the burst", seen.waits_burst)):
        for what, part in (("for its start", 0), ("until it is done", 1)):
            took = [wait[part] for wait in waits]
            report.figure(f"quiet job's wait {what} {name}, p50", percentile(took, 0.5), "ms")
            report.figure(f"quiet job's wait {what} {name}, p99", percentile(took, 0.99), "ms")
    for name, took in (("before", seen.accepts_before), ("in the burst", seen.accepts_burst)):
        report.figure(f"accepting {name}, p50", percentile(took, 0.5), "ms")
        report.figure(f"accepting {name}, p99", percentile(took, 0.99), "ms")
    rude = [wait[1] for wait in seen.waits_abusive]
    report.figure("abusive job's wait until it is done, p50", percentile(rude, 0.5), "ms")
    report.figure("burst: drained at", seen.rate, "jobs/s")
    report.aim("burst: jobs not completed", seen.unfinished, most=0)
    before, burst = ([w[1] for w in waits] for waits in (seen.waits_before, seen.waits_burst))
    # A wait is until the result is there. Nothing is interrupted, so a start waits for the next
    # slot that gets free, which alone is no wait at all: that ratio would say nothing.
    for name, quantile in (("p50", 0.5), ("p99", 0.99)):
        ratio = percentile(burst, quantile) / percentile(before, quantile)
        report.aim(f"quiet tenant's wait until done, burst / alone, {name}", ratio, most=2.0)
    report.aim("accepting in the burst, p99 ms", percentile(seen.accepts_burst, 0.99), most=250.0)


@dataclass(slots=True)
class Storm:
    accepts_before: list[float] = field(default_factory=list)
    accepts_burst: list[float] = field(default_factory=list)
    waits_before: list[tuple[float, float]] = field(default_factory=list)
    """From acceptance to the start and to the end, in milliseconds."""
    waits_burst: list[tuple[float, float]] = field(default_factory=list)
    waits_abusive: list[tuple[float, float]] = field(default_factory=list)
    unfinished: int = 0
    rate: float = 0.0


async def _storm(here: Stand) -> Storm:
    seen = Storm()
    async with harness.database(here.dsn) as connection:
        pepper = here.installed.pepper
        key = {
            tenant: await keys.create(connection, pepper, tenant_id=tenant, name="bench")
            for tenant in (*_QUIET, _ABUSIVE)
        }
        began = await _now(connection)
        alone = BURST_SECONDS / 2
        await asyncio.gather(
            *(_post(here, key[t], _QUIET_PAUSE, alone, seen.accepts_before) for t in _QUIET)
        )
        burst = await _now(connection)
        each = int(BURST_SECONDS / _QUIET_PAUSE)
        pause = BURST_SECONDS / (BURST_JOBS - len(_QUIET) * each)
        rude: list[float] = []
        await asyncio.gather(
            *(_post(here, key[t], _QUIET_PAUSE, BURST_SECONDS, seen.accepts_burst) for t in _QUIET),
            *(_post(here, key[_ABUSIVE], pause * 4, BURST_SECONDS, rude) for _ in range(4)),
        )
        deadline = time.monotonic() + _PATIENCE_SECONDS
        open_jobs = "SELECT count(*) FROM jobs WHERE state IN ('queued', 'processing')"
        while await connection.fetchval(open_jobs) and time.monotonic() < deadline:
            await connection.execute("SELECT pg_sleep(0.5)")
        rows = await connection.fetch(
            "SELECT tenant_id, state, created_at, started_at, finished_at FROM jobs"
            " WHERE kind = 'bench.sleep' AND created_at >= $1",
            began,
        )
    # The burst bites once every slot is taken and jobs wait.
    biting = burst.timestamp() + BURST_SECONDS * 0.2
    for row in rows:
        started, finished = (
            1000 * (row[when] - row["created_at"]).total_seconds()
            for when in ("started_at", "finished_at")
        )
        wait = started, finished
        created = row["created_at"].timestamp()
        if row["tenant_id"] == _ABUSIVE:
            seen.waits_abusive.append(wait)
        elif created < burst.timestamp():
            seen.waits_before.append(wait)
        elif created >= biting:
            seen.waits_burst.append(wait)
    seen.unfinished = sum(row["state"] != "completed" for row in rows)
    late = [r for r in rows if r["created_at"] >= burst]
    span = max(r["finished_at"] for r in late) - min(r["started_at"] for r in late)
    seen.rate = len(late) / span.total_seconds()
    say(f"  {len(rows):,} jobs accepted")
    return seen


async def _post(here: Stand, key: str, pause: float, seconds: float, took: list[float]) -> None:
    """Jobs over one connection at a pace that does not wait for slow answers to catch up."""
    body = json.dumps(_WORK).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = load.request("POST", "/v1/jobs", headers=headers, body=body)
    async with _line(here.settings.port) as (reader, writer):
        due = time.monotonic() + random.uniform(0, pause)
        end = time.monotonic() + seconds
        while due < end:
            await asyncio.sleep(max(due - time.monotonic(), 0))
            sent = time.monotonic()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 202"):
                raise RuntimeError(f"a job was not accepted: {head.decode()[:200]}")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            took.append(1000 * (time.monotonic() - sent))
            due += pause


@asynccontextmanager
async def _line(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


if __name__ == "__main__":
    main()

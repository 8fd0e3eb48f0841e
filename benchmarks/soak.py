"""Random faults against a running platform, from a printed seed; then the history is checked.

    make soak                 ten minutes with a fresh seed
    SECONDS=60 SEED=7 make soak
    OVERSUBSCRIBE=3 make soak three busy processes for each core, no other fault: no lease is lost

Workers are killed, frozen, cut off from the database, told to stop, and meet failpoints; the
database is stopped at once and comes back; all while generic jobs and small pictures flow. In the
end everything must come to rest, and the checker of tests/faults reads what is left. The last line
is one JSON object; the exit code is 1 if anything was lost, doubled or mixed.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2 as httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conftest import database_url
from tests.faults import checker
from tests.faults.lab import FAST, Lab, state_of, tiny_picture
from tests.faults.proxy import Proxy
from tests.stories.harness import Process

from mediamill import db, queue
from mediamill.embedded import Embedded

WORKERS: Final = 3
SLOTS: Final = "default=4,image=1,maintenance=1"
LIVE: Final = 40
"""Jobs that are under way at once, about."""
CALM_SECONDS: Final = 180.0
"""How long everything may take to come to rest after the last fault."""
FAILPOINTS: Final = (
    "worker.taken",
    "worker.claimed",
    "app.effect",
    "attempt.fetched",
    "attempt.described",
    "attempt.staged",
    "attempt.reserved",
    "attempt.laid_out",
    "attempt.settled",
    "lease.beat",
    "maintenance.rescue",
)
ACTIONS: Final = ("kill9", "raise", "sleep", "exit", "full")


@dataclass(slots=True)
class Seat:
    """A place for one worker; whoever dies in it is replaced."""

    proxy: Proxy
    worker: Process
    busy_until: float = 0.0


@dataclass(slots=True)
class Soak:
    """One run. Everything random comes from `chance`."""

    lab: Lab
    server: Embedded
    folder: Path
    chance: random.Random
    faults: Counter[str] = field(default_factory=Counter)
    seats: list[Seat] = field(default_factory=list)
    later: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    numbered: int = 0
    api: Process | None = None

    # --- The load

    def feed(self) -> None:
        """Keep about LIVE jobs under way."""
        live = self.lab.value(
            "SELECT count(*) FROM jobs WHERE state IN ('queued', 'processing')"
            " AND run_at < now() + interval '5 s'"
        )
        if live >= LIVE:
            return
        wanted = [self.job() for _ in range(10)]
        with suppress(Exception):  # an answer that was lost is none: it was not accepted
            self.lab.enqueue_many(wanted, priority=self.chance.choice([-1, 0, 0, 3]))
        if self.chance.random() < 0.5:
            with suppress(Exception):
                self.lab.picture(tiny_picture(self.chance.randrange(4)))
        self.post(*self.job())

    def job(self) -> tuple[str, Any]:
        n = self.chance.randrange(1000)
        return self.chance.choice(
            [
                ("row", {"n": n}),
                ("row", {"n": n}),
                ("pay", {"n": n}),
                ("parent", {"n": n % 4}),
                ("tree", {"n": n % 3}),
                ("sleep", {"seconds": n / 400}),
                ("flaky", {"times": n % 3}),
                ("broken", None),
                ("noop", None),
            ]
        )

    def post(self, kind: str, payload: Any) -> None:
        """A create through the API, under a key that is used again until it is answered."""
        self.numbered += 1
        self.keys[f"soak-{self.numbered}"] = {"kind": kind, "payload": payload or {}}
        for key, body in list(self.keys.items())[:5]:
            with suppress(httpx.HTTPError):
                answer = self.lab.http.post(
                    "/v1/jobs", json=body, headers={"Idempotency-Key": key}, timeout=5
                )
                if answer.status_code == 202:
                    answers = self.lab.by_key.setdefault(key, [])
                    answers.append(answer.json()["id"])
                    if len(answers) > 1 or self.chance.random() < 0.8:
                        del self.keys[key]

    # --- The faults

    def strike(self) -> None:
        """One fault, somewhere."""
        now = time.monotonic()
        quiet = [s for s in self.seats if s.busy_until < now and s.worker.alive]
        if not quiet:
            return
        seat = self.chance.choice(quiet)
        name, fault = self.chance.choice(
            [
                ("kill", self.kill),
                ("kill", self.kill),
                ("freeze", self.freeze),
                ("cut", self.cut),
                ("stall", self.stall),
                ("failpoint", self.failpoint),
                ("failpoint", self.failpoint),
                ("stop", self.stop),
                ("disconnect", self.disconnect),
                ("database", self.database),
                ("api", self.kill_api),
            ]
        )
        self.faults[name] += 1
        fault(seat)

    def kill(self, seat: Seat) -> None:
        self.lab.watch(seat.worker)
        seat.worker.kill()

    def freeze(self, seat: Seat) -> None:
        seconds = self.chance.uniform(0.5, 3) * float(str(FAST["lease_seconds"]))
        worker = seat.worker
        worker.send(signal.SIGSTOP)
        seat.busy_until = time.monotonic() + seconds + 1

        def thaw() -> None:
            if worker.alive:
                worker.send(signal.SIGCONT)

        self.in_a_while(seconds, thaw)

    def cut(self, seat: Seat) -> None:
        seat.proxy.cut()
        self.heal(seat)

    def stall(self, seat: Seat) -> None:
        seat.proxy.stall()
        self.heal(seat)

    def heal(self, seat: Seat) -> None:
        seconds = self.chance.uniform(0.3, 6)
        seat.busy_until = time.monotonic() + seconds + 1
        self.in_a_while(seconds, seat.proxy.heal)

    def failpoint(self, seat: Seat) -> None:
        """The next worker in this seat meets one, some time."""
        place, action = self.chance.choice(FAILPOINTS), self.chance.choice(ACTIONS)
        self.faults[f"failpoint {action}"] += 1
        seat.worker.send(signal.SIGTERM)
        old = seat.worker
        seat.worker = self.start(seat.proxy, f"{place}:{action}:{self.chance.randint(1, 6)}")
        self.in_a_while(8, lambda: old.kill() if old.alive else None)

    def stop(self, seat: Seat) -> None:
        seat.worker.send(signal.SIGTERM)
        seat.busy_until = time.monotonic() + 3

    def disconnect(self, _: Seat) -> None:
        with suppress(Exception):
            self.lab.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    def database(self, _: Seat) -> None:
        """Immediate stop; its supervisor starts it again."""
        with suppress(FileNotFoundError, IndexError, ProcessLookupError):
            pid = int((self.folder / "postgres/data/postmaster.pid").read_text().split()[0])
            os.kill(pid, signal.SIGQUIT)

    def kill_api(self, _: Seat) -> None:
        assert self.api is not None
        if self.api.alive:
            self.api.kill()

    def in_a_while(self, seconds: float, do: Callable[[], None]) -> None:
        self.numbered += 1
        heapq.heappush(self.later, (time.monotonic() + seconds, self.numbered, do))

    # --- Keeping it going

    def start(self, proxy: Proxy, failpoint: str | None = None) -> Process:
        more = {"failpoint": failpoint} if failpoint else {}
        return self.lab._start("worker", {"slots": SLOTS, "database_url": proxy.dsn, **more})

    def tend(self) -> None:
        """What is due happens, and whoever is gone is replaced."""
        while self.later and self.later[0][0] < time.monotonic():
            heapq.heappop(self.later)[2]()
        for seat in self.seats:
            if not seat.worker.alive:
                self.faults["deaths"] += 1
                seat.worker = self.start(seat.proxy)
        if self.api is None or not self.api.alive:
            self.api = self.lab._start("api", {"port": self.lab.port})

    def run(self, seconds: float) -> None:
        for _ in range(WORKERS):
            proxy = Proxy(self.lab.database)
            self.seats.append(Seat(proxy, self.start(proxy)))
        self.api = self.lab.start_api()
        began = time.monotonic()
        next_fault = began + 3
        while (now := time.monotonic()) < began + seconds:
            self.tend()
            with suppress(Exception):  # the database may be away
                self.feed()
            if now > next_fault:
                self.strike()
                next_fault = now + self.chance.uniform(0.3, 2.5)
            time.sleep(0.05)

    def calm(self) -> list[str]:
        """No more faults: everything heals, and what was accepted comes to its end."""
        for seat in self.seats:
            seat.proxy.heal()
        deadline = time.monotonic() + CALM_SECONDS
        left: Any = "?"
        while time.monotonic() < deadline:
            self.tend()
            for process in self.lab.processes:
                if process.alive and state_of(process.pid) == "T":
                    process.send(signal.SIGCONT)
            with suppress(Exception):
                left = self.lab.value(
                    "SELECT (SELECT count(*) FROM jobs WHERE state IN ('queued', 'processing'))"
                    " + (SELECT count(*) FROM media"
                    " WHERE state IN ('uploaded', 'queued', 'processing'))"
                )
                if left == 0 and self.answered():
                    return []
            time.sleep(0.1)
        return [f"{left} jobs and media, {len(self.keys)} creates did not come to an end"]

    def answered(self) -> bool:
        if self.keys:
            kind, payload = "noop", None
            self.post(kind, payload)
        return not self.keys

    def close(self) -> None:
        for seat in self.seats:
            seat.proxy.close()
        end(self.lab)


def main() -> int:
    seconds = float(os.environ.get("SECONDS", "600"))
    seed = int(os.environ.get("SEED") or secrets.randbelow(1_000_000))
    busy = int(os.environ.get("OVERSUBSCRIBE", "0"))
    folder = Path(tempfile.mkdtemp(prefix="mediamill-soak-"))
    folder.chmod(0o755)  # the server may run as another user
    server = Embedded(folder / "postgres")
    try:
        dsn = asyncio.run(fresh_database(server.start()))
        if busy:
            report = oversubscribe(dsn, folder, seconds, busy)
        else:
            report = soak(dsn, server, folder, seconds, seed)
    finally:
        server.close()
        if os.environ.get("KEEP"):
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    figures = report["figures"]
    print(json.dumps(report))
    bad = figures["lost"] or figures["doubled"] or figures["mixed_sets"] or figures["other"]
    return 1 if bad else 0


def soak(dsn: str, server: Embedded, folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """One run of random faults; its report."""
    print(f"soak: seed {seed}, {seconds:g} s (repeat with SEED={seed})", flush=True)
    lab = Lab(dsn, folder)
    run = Soak(lab, server, folder, random.Random(seed))
    began = time.monotonic()
    try:
        run.run(seconds)
        stuck = run.calm()
        rest = time.monotonic() - began - seconds
        for seat in run.seats:
            seat.worker.send(signal.SIGTERM)
        for process in lab.processes:
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(20)
        lab.start_worker("maintenance=1")  # sweeps the scratch of those that were killed
        lab.duty("sweep_staging")
        history = lab.history(settle_seconds=10)
        history.recovery_seconds = None  # the bound is not for several faults at once
        history.leftovers = [x for x in history.leftovers if not x.startswith(".incoming/")]
        found = [str(v) for v in checker.violations(history)]
        by_promise = checker.count(checker.violations(history))
    finally:
        run.close()
    for line in [*stuck, *found[:50]]:
        print(f"  {line}")
    kills = run.faults["kill"] + run.faults["failpoint kill9"]
    states = Counter(row["state"] for row in history.jobs)
    outcomes = Counter(row["outcome"] for row in history.attempts)
    figures = {
        "seed": seed,
        "seconds": round(seconds),
        "rest_seconds": round(rest, 1),
        "runs": len(history.attempts),
        "jobs": dict(states),
        "media": len(history.media),
        "attempts": dict(outcomes),
        "kills": kills,
        "faults": dict(run.faults),
        "lost": by_promise.get("P1", 0) + len(stuck),
        "doubled": by_promise.get("doubled", 0) + by_promise.get("P2", 0) + by_promise.get("P5", 0),
        "mixed_sets": by_promise.get("mixed", 0) + by_promise.get("P3", 0),
        "other": sum(by_promise.get(p, 0) for p in ("P4", "P7", "P8", "P9", "P10")),
    }
    return {"bench": "soak", "figures": figures}


def oversubscribe(dsn: str, folder: Path, seconds: float, busy: int) -> dict[str, Any]:
    """So many processes for each core that do nothing but compute, next to workers at default
    settings: no lease may be lost."""
    lab = Lab(dsn, folder)
    for name in FAST:  # at the shipped defaults
        del lab.settings[name]
    count = busy * (os.cpu_count() or 1)
    print(f"soak: {count} busy processes for {seconds:g} s", flush=True)
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    jobs = []
    try:
        workers = [lab.start_worker("default=2,image=1,maintenance=1") for _ in range(2)]
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            left = until - time.monotonic()
            jobs += lab.enqueue_many(
                [("busy", {"seconds": min(20.0, left + 5)}), ("sleep", {"seconds": 15.0})] * 2
            )
            lab.picture(tiny_picture(len(jobs)))
            lab.await_all(seconds=600)
        history = lab.history()
        history.recovery_seconds = None
        found = checker.violations(history)
        alive = sum(w.alive for w in workers)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
        end(lab)
    for violation in found:
        print(f"  {violation}")
    leases_lost = sum(row["outcome"] == "lost" for row in history.attempts)
    figures = {
        "seconds": round(seconds),
        "busy_processes": count,
        "runs": len(history.attempts),
        "leases_lost": leases_lost,
        "kills": 0,
        "faults": {"busy": count},
        "lost": sum(v.promise == "P1" for v in found),
        "doubled": sum(v.promise in ("doubled", "P2", "P5") for v in found),
        "mixed_sets": sum(v.promise in ("mixed", "P3") for v in found),
        "other": leases_lost + (2 - alive),
    }
    return {"bench": "soak", "figures": figures}


def end(lab: Lab) -> None:
    """Its processes end; what they said stays in its folder (KEEP=1 keeps that)."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        lab.close()


async def fresh_database(server: str) -> str:
    connection = await db.connect(server)
    await connection.execute("CREATE DATABASE soak")
    await connection.close()
    dsn = database_url(server, "soak")
    await db.migrate(dsn, finish=queue.install)
    return dsn


if __name__ == "__main__":
    sys.exit(main())

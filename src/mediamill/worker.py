"""The loop of a worker process: take tickets for free slots, run attempts, drain on request.

Slots belong to one queue each and never serve another. The loop sleeps while nothing is free or
waiting; the bell, a freed slot or a slow poll wakes it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import UUID

import asyncpg
import structlog

from mediamill import __version__, attempt, controls, db, failpoints, installation, jobs, queue
from mediamill.attempt import Attempt, Completions, Means
from mediamill.controls import Control
from mediamill.jobs import Claim
from mediamill.lease import Stop
from mediamill.queue import Ticket
from mediamill.sandbox import clear

log = structlog.get_logger()

_NEEDS_STORAGE: Final = frozenset({"image", "video", "audio"})
_POLL_SECONDS: Final = 1.0
_SEEN_SECONDS: Final = 5.0
_CONTROL_SECONDS: Final = 1.0
_SETTLE_SECONDS: Final = 5.0
# What a periodic statement may meet and must outlive: an outage, a lock held too long, a full disk.
_PASSING: Final = (db.Unavailable, asyncpg.PostgresError, OSError)


class Worker:
    """One process's share of the work. `stop_attempt` is what its leases call."""

    def __init__(
        self, means: Means, *, dsn: str, name: str, slots: Mapping[str, int], scratch: Path
    ) -> None:
        self._means = means
        self._dsn = dsn
        self._name = name
        self._slots = dict(slots)
        self._scratch = scratch
        self._busy: Counter[str] = Counter()
        self._running: dict[tuple[UUID, int], tuple[Attempt, asyncio.Task[None]]] = {}
        self._awake = asyncio.Event()
        self._draining = False
        self._loop = asyncio.get_running_loop()
        self._kinds = means.kinds
        self._completions = Completions(
            means.pool, retention_seconds=means.settings.job_retention_seconds
        )
        self._controls: dict[str, Control] = {}
        self._capped_kinds: dict[str, int] = {}
        self._used_lanes: list[tuple[str, str]] = []
        self._stop = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then drain: finish, or hand back what does not finish in
        time."""
        self._stop = stop
        async with db.acquire(self._means.pool) as connection:
            await controls.offer(connection, self._means.offer)
            self._controls, self._capped_kinds = await controls.limits(connection)
            await installation.register_worker(
                connection,
                self._name,
                version=__version__,
                slots=self._slots,
                sandbox=self._means.sandbox.level,
            )
        self._means.leases.start()
        helpers = [
            asyncio.create_task(queue.Bell(self._dsn, self._awake.set).run()),
            asyncio.create_task(self._be_seen()),
            asyncio.create_task(self._go_on_offering()),
            asyncio.create_task(self._follow_controls()),
        ]
        stopped = asyncio.create_task(stop.wait())
        stopped.add_done_callback(lambda _: self._awake.set())
        log.info("worker_started", worker=self._name, slots=self._slots)
        try:
            while not stop.is_set():
                if not await self._take_and_start():
                    await self._sleep()
        finally:
            for task in helpers:
                task.cancel()
            await self._drain()
            self._means.leases.stop()
            with suppress(db.Unavailable):
                async with db.acquire(self._means.pool) as connection:
                    await installation.forget_worker(connection, self._name)
            log.info("worker_stopped", worker=self._name)

    def stop_attempt(self, claim: Claim, why: Stop) -> None:
        """Kill an attempt's tools now, then let its task see why. Called from the lease thread."""
        owner = attempt.owner(claim)
        self._means.groups.kill(owner)
        self._means.images.kill(owner)
        with suppress(RuntimeError):  # the loop is closed: nothing is left to stop
            self._loop.call_soon_threadsafe(self._stop_here, claim, why)

    def _stop_here(self, claim: Claim, why: Stop) -> None:
        entry = self._running.get(claim.key)
        if entry is not None:
            entry[0].stop(why)

    async def _take_and_start(self) -> bool:
        """Claim for the free slots and start what was claimed; whether it is worth trying again."""
        free = {q: n - self._busy[q] for q, n in self._slots.items() if n > self._busy[q]}
        if not free:
            return False
        self._awake.clear()
        try:
            claims, claimed_at, more = await self._claim(free)
        except Exception as error:
            # The loop goes on whatever it is. What was claimed and is not known here runs out with
            # its lease.
            known = isinstance(error, (db.Unavailable, asyncpg.PostgresError))
            log.warning("claim_failed", error=type(error).__name__, exc_info=not known)
            await asyncio.sleep(0.5)
            return True
        for claim in claims:
            self._start(claim, claimed_at)
        return more

    async def _claim(self, free: Mapping[str, int]) -> tuple[list[Claim], float, bool]:
        claimed_at = time.monotonic()
        async with db.transaction(self._means.pool) as connection:
            room = await self._room(connection, free)
            if not room:
                return [], claimed_at, False
            lanes = await self._lanes(connection, room)
            taken = await queue.take(connection, room, most=room, lanes=lanes)
            if not taken:
                return [], claimed_at, False
            tickets = await self._within_caps(connection, taken)
            claims = await jobs.claim(
                connection,
                tickets,
                worker=self._name,
                lease_seconds=self._means.settings.lease_seconds,
                kinds=self._kinds,
            )
            failpoints.hit("worker.taken")
        failpoints.hit("worker.claimed")
        # A slot for which nothing was found hears the bell; one whose ticket was worth nothing does
        # not.
        return claims, claimed_at, len(claims) < len(taken)

    async def _lanes(
        self, connection: db.Connection, room: Mapping[str, int]
    ) -> dict[tuple[str, str], int]:
        """How many tickets to take from the lanes beside the open ones: as many as their kinds may
        still run."""
        lanes = {place: room[place[0]] for place in self._used_lanes if place[0] in room}
        kind_of = {jobs.lane(*sort): sort[0] for sort in self._kinds}
        capped = sorted({kind_of[lane] for _, lane in lanes} & self._capped_kinds.keys())
        if capped:
            left = {kind: self._capped_kinds[kind] for kind in capped}
            for row in await jobs.running(connection, [], capped):
                left[row["kind"]] -= row["jobs"]
            for (name, lane), most in lanes.items():
                lanes[name, lane] = min(most, left.get(kind_of[lane], most))
        return {place: most for place, most in lanes.items() if most > 0}

    async def _room(self, connection: db.Connection, free: Mapping[str, int]) -> dict[str, int]:
        """The free slots, less what is paused, capped over the whole fleet, or not worth beginning
        while the storage refuses us."""
        shut = frozenset() if self._means.gate.is_open else _NEEDS_STORAGE
        room = {q: n for q, n in free.items() if q not in shut and not self._control(q).paused}
        for name in sorted(room):  # in one order, so that two workers never wait for each other
            cap = self._control(name).concurrency
            if cap is not None:
                await jobs.lock_cap(connection, f"queue {name}")
                rows = await jobs.running(connection, [name], [])
                room[name] = min(room[name], cap - sum(r["jobs"] for r in rows))
        return {q: n for q, n in room.items() if n > 0}

    async def _within_caps(self, connection: db.Connection, tickets: list[Ticket]) -> list[Ticket]:
        """The tickets without those whose kind runs often enough; these are set aside."""
        capped = self._capped_kinds
        if not capped:
            return tickets
        kinds = await jobs.kinds_of(connection, tickets)
        concerned = sorted({k for k in kinds.values() if k in capped})
        for kind in concerned:
            await jobs.lock_cap(connection, f"kind {kind}")
        left = {kind: capped[kind] for kind in concerned}
        for row in await jobs.running(connection, [], concerned):
            left[row["kind"]] -= row["jobs"]
        kept, too_many = [], []
        for ticket in tickets:
            kind = kinds.get(ticket.job_id, "")
            if kind in left and left[kind] <= 0:
                too_many.append(ticket)
            else:
                kept.append(ticket)
                if kind in left:
                    left[kind] -= 1
        if too_many:
            await jobs.set_aside(connection, too_many)
        return kept

    def _control(self, name: str) -> Control:
        return self._controls.get(name, Control())

    async def _follow_controls(self) -> None:
        """Know within a second what an operator set, which jobs need not hold back any more, and
        where tickets lie aside that this worker could claim."""
        own = [jobs.lane(kind, version) for kind, version in self._kinds]
        while True:
            with suppress(*_PASSING):
                async with db.transaction(self._means.pool) as connection:
                    before = self._controls
                    self._controls, self._capped_kinds = await controls.limits(connection)
                    await jobs.line_up(connection, list(self._slots))
                    self._used_lanes = await queue.used_lanes(connection, self._slots, own)
                    if await installation.drain_requested(connection, self._name):
                        log.info("drain_requested")
                        self._stop.set()
                if self._controls != before:
                    self._awake.set()
            await asyncio.sleep(_CONTROL_SECONDS)

    def _start(self, claim: Claim, claimed_at: float) -> None:
        self._means.leases.hold(claim, claimed_at)
        scratch = self._scratch / f"{claim.id}.{claim.fence}"
        run = Attempt(self._means, claim, scratch, self._completions)
        self._busy[claim.queue] += 1
        task = asyncio.create_task(run.run())
        self._running[claim.key] = run, task
        task.add_done_callback(lambda _: self._ended(claim))

    def _ended(self, claim: Claim) -> None:
        del self._running[claim.key]
        self._busy[claim.queue] -= 1
        self._awake.set()

    async def _sleep(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL_SECONDS * random.uniform(0.8, 1.2)):  # noqa: S311
                await self._awake.wait()
        self._awake.clear()

    async def _be_seen(self) -> None:
        while True:
            with suppress(*_PASSING):
                async with db.acquire(self._means.pool) as connection:
                    await installation.see_worker(connection, self._name, stopping=self._draining)
            await asyncio.sleep(_SEEN_SECONDS)

    async def _go_on_offering(self) -> None:
        while True:
            await asyncio.sleep(controls.OFFER_SECONDS)
            with suppress(*_PASSING):
                async with db.acquire(self._means.pool) as connection:
                    await controls.offer(connection, self._means.offer)

    async def _drain(self) -> None:
        self._draining = True
        grace = self._means.settings.drain_seconds
        if self._running:
            log.info("worker_draining", jobs=len(self._running), grace_seconds=grace)
            await self._wait_for_all(grace)
        for run, _ in list(self._running.values()):
            self._means.groups.kill(attempt.owner(run.claim))
            run.stop(attempt.RELEASED)
        await self._wait_for_all(_SETTLE_SECONDS)
        # What could not even be handed back (no database) runs out with its lease.
        self._means.groups.kill_all()

    async def _wait_for_all(self, seconds: float) -> None:
        tasks = [task for _, task in self._running.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)


class ScratchFolder:
    """This process's own scratch folder, locked for as long as the process lives.

    The kernel drops the lock with the process, so a folder that can be locked belongs to a dead
    one.
    """

    def __init__(self, root: Path, worker: str) -> None:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = root / worker
        self._lock: int | None = None
        # A sweep may take the fresh folder for a dead one before it is locked: then once more.
        while self._lock is None or not (self.path / ".lock").exists():
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._lock = _lock(self.path)

    def remove(self) -> None:
        clear(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def sweep_scratch(root: Path) -> int:
    """Remove the scratch folders of processes that are gone."""
    swept = 0
    with suppress(FileNotFoundError):
        for entry in os.scandir(root):
            if (
                entry.is_dir(follow_symlinks=False)
                and (lock := _lock(Path(entry.path))) is not None
            ):
                clear(Path(entry.path))
                os.close(lock)
                swept += 1
    return swept


def _lock(folder: Path) -> int | None:
    """An exclusive lock on the folder's lock file, or None while somebody holds it."""
    try:
        fd = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd

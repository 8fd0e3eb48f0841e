"""Leases of one process: a thread of their own renews them, whatever the work is doing.

One batched UPDATE per beat, on a connection and an event loop that nothing else uses. A job that
the statement does not return is lost; a job that could not be renewed for `self_stop_seconds` by
this machine's monotonic clock is given up before its lease can end. Both stop the job's tools at
once, from this thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Final
from uuid import UUID

import asyncpg
import structlog

from mediamill import db, failpoints, jobs
from mediamill.jobs import Claim

log = structlog.get_logger()

Key = tuple[UUID, int]

_CONNECT_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.1


class Stop(StrEnum):
    """Why an attempt must end before its work is done."""

    LOST = "lost"
    """The row no longer carries our fence: somebody else has the job."""
    UNRENEWED = "unrenewed"
    """The database could not be reached for too long; the lease may be about to end."""
    CANCELED = "canceled"
    """A person asked for it."""


class Leases:
    """Holds leases from a thread. `on_stop` is called in that thread, once per claim."""

    def __init__(
        self,
        dsn: str,
        *,
        lease_seconds: float,
        beat_seconds: float,
        self_stop_seconds: float,
        on_stop: Callable[[Claim, Stop], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dsn = dsn
        self._lease_seconds = lease_seconds
        self._beat_seconds = beat_seconds
        self._self_stop_seconds = self_stop_seconds
        self._on_stop = on_stop
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[Key, tuple[Claim, float]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="leases", daemon=True)
        self.last_beat = clock()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop beating. Leases still held run out by themselves."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self._self_stop_seconds)

    def hold(self, claim: Claim, claimed_at: float) -> None:
        """Begin to renew. `claimed_at` is the clock before the claim was sent: when its lease
        began."""
        with self._lock:
            self._held[claim.key] = claim, claimed_at

    def release(self, claim: Claim) -> None:
        """The job is settled, or given up: renew it no more."""
        with self._lock:
            self._held.pop(claim.key, None)

    def _main(self) -> None:
        asyncio.run(self._beat_until_stopped())

    async def _beat_until_stopped(self) -> None:
        connection: db.Connection | None = None
        while not self._stopping.is_set():
            began = self._clock()
            claims = self._snapshot()
            if claims:
                beat = asyncio.create_task(self._beat(connection, claims))
                while not beat.done():  # a beat that hangs must not delay giving up
                    await asyncio.wait({beat}, timeout=_LOOK_SECONDS)
                    self._give_up_unrenewed()
                connection = beat.result()
            self._give_up_unrenewed()
            self.last_beat = self._clock()
            pause = self._beat_seconds - (self._clock() - began)
            await asyncio.sleep(max(pause, 0.05))
        if connection is not None:
            with suppress(Exception):
                await connection.close(timeout=1)

    def _snapshot(self) -> list[Claim]:
        with self._lock:
            return [claim for claim, _ in self._held.values()]

    async def _beat(
        self, connection: db.Connection | None, claims: list[Claim]
    ) -> db.Connection | None:
        """Renew all claims in one statement; returns the connection to use next, if it is good."""
        sent = self._clock()
        try:
            failpoints.hit("lease.beat")
            async with asyncio.timeout(_CONNECT_SECONDS):
                if connection is None or connection.is_closed():
                    connection = await db.connect(self._dsn, application="mediamill lease")
                held = await jobs.renew(connection, claims, lease_seconds=self._lease_seconds)
        except Exception as error:  # whatever it is, the next beat must come
            known = isinstance(
                error, (db.Unavailable, asyncpg.PostgresError, asyncpg.InterfaceError, OSError)
            )
            log.warning(
                "lease_beat_failed",
                error=type(error).__name__,
                jobs=len(claims),
                exc_info=not known,
            )
            if connection is not None:
                connection.terminate()
            return None
        for claim in claims:
            renewal = held.get(claim.key)
            if renewal is None:
                self._end(claim, Stop.LOST)
                continue
            if renewal.cancel_requested:
                self._tell(claim, Stop.CANCELED)
            if renewal.renewed:
                self._renewed(claim, sent)
        return connection

    def _renewed(self, claim: Claim, sent: float) -> None:
        with self._lock:
            if claim.key in self._held:
                self._held[claim.key] = claim, sent

    def _give_up_unrenewed(self) -> None:
        limit = self._clock() - self._self_stop_seconds
        with self._lock:
            late = [claim for claim, renewed_at in self._held.values() if renewed_at < limit]
        for claim in late:
            self._end(claim, Stop.UNRENEWED)

    def _end(self, claim: Claim, stop: Stop) -> None:
        with self._lock:
            known = self._held.pop(claim.key, None)
        if known is not None:
            self._on_stop(claim, stop)

    def _tell(self, claim: Claim, stop: Stop) -> None:
        """A cancel is told at every beat until the attempt has settled; its lease goes on."""
        with self._lock:
            known = claim.key in self._held
        if known:
            self._on_stop(claim, stop)

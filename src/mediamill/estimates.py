"""Position and time left, from what similar work really took here. A cold start says so."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from mediamill import db, installation

_SQL: Final = db.load("estimates")
_FIGURES: Final = db.load("maintenance")
_FRESH_SECONDS: Final = 2.0
_HISTORY: Final = 3


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds until the job is likely done: half of similar jobs by p50, nine in ten by p90."""

    p50_seconds: float | None
    p90_seconds: float | None
    basis: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "p50_seconds": _rounded(self.p50_seconds),
            "p90_seconds": _rounded(self.p90_seconds),
            "basis": self.basis,
        }


@dataclass(frozen=True, slots=True)
class Outlook:
    """The queue as it was a moment ago."""

    queued: int
    processing: int
    slots: int


class Forecaster:
    """Answers from figures that are at most some seconds old, so that an answer costs no scan.

    It asks on its caller's connection: requests that each hold one and wait for a second would wait
    for ever once all of the pool is held so.
    """

    def __init__(self) -> None:
        self._queues: tuple[float, dict[str, Outlook]] = (0.0, {})
        self._history: dict[tuple[str, str | None], tuple[float, int, float, float]] = {}
        self._since: dict[str, int] = {}

    async def outlook(self, connection: db.Connection, queue: str) -> Outlook:
        """Depth, running jobs and slots of a queue."""
        at, known = self._queues
        if time.monotonic() - at > _FRESH_SECONDS:
            rows = await connection.fetch(_FIGURES.queue_figures)
            slots = await installation.slots(connection)
            depths = {row["queue"]: (row["queued"], row["processing"]) for row in rows}
            known = {
                name: Outlook(*depths.get(name, (0, 0)), slots.get(name, 0))
                for name in {*depths, *slots}
            }
            self._queues = time.monotonic(), known
            self._since.clear()
        return known.get(queue, Outlook(0, 0, 0))

    async def joined(self, connection: db.Connection, queue: str) -> int:
        """The position of a job that joins the queue's end now, counted from 1."""
        outlook = await self.outlook(connection, queue)
        self._since[queue] = self._since.get(queue, 0) + 1
        return outlook.queued + self._since[queue]

    async def estimate(
        self,
        connection: db.Connection,
        *,
        kind: str,
        recipe: str | None,
        queue: str,
        ahead: int,
        started_at: datetime | None = None,
        progress: float | None = None,
        now: datetime | None = None,
    ) -> Estimate:
        """Time left for a job with `ahead` jobs before it, or for one that runs since
        `started_at`."""
        jobs, p50, p90 = await self._recent(connection, kind, recipe)
        if started_at is not None and now is not None and progress is not None and progress >= 5.0:
            elapsed = (now - started_at).total_seconds()
            left = elapsed * (100.0 - progress) / progress
            return Estimate(left, left * 1.5, "its own progress")
        if jobs < _HISTORY:
            return Estimate(None, None, f"too few finished jobs of this kind yet ({jobs})")
        outlook = await self.outlook(connection, queue)
        if outlook.slots == 0:
            return Estimate(None, None, "no worker serves this queue right now")
        if started_at is not None and now is not None:
            elapsed = (now - started_at).total_seconds()
            return Estimate(
                max(p50 - elapsed, 0.0), max(p90 - elapsed, 0.0), f"the last {jobs} of its kind"
            )
        # Everything before it shares the slots; the running ones are half done on average.
        before = ahead / outlook.slots + (0.5 if outlook.processing >= outlook.slots else 0.0)
        return Estimate(p50 * (before + 1), p90 * (before + 1), f"the last {jobs} of its kind")

    def poll_after(self, kind: str, recipe: str | None) -> float:
        """When asking again is worth it, in seconds, from what is in memory: 1 to 30."""
        remembered = self._history.get((kind, recipe))
        if remembered is None or remembered[1] < _HISTORY:
            return 1.0
        return min(max(round(remembered[2] / 4), 1.0), 30.0)

    async def _recent(
        self, connection: db.Connection, kind: str, recipe: str | None
    ) -> tuple[int, float, float]:
        key = kind, recipe
        remembered = self._history.get(key)
        if remembered is None or time.monotonic() - remembered[0] > _FRESH_SECONDS:
            row = await connection.fetchrow(_SQL.recent, kind, recipe)
            assert row is not None
            figures = row["jobs"], row["p50"] or 0.0, row["p90"] or 0.0
            self._history[key] = remembered = (time.monotonic(), *figures)
        return remembered[1:]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)

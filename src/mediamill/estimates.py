"""Position and time left, from what similar work really took here. A cold start says so.

A forecast is a point, from the jobs ahead and from the most similar finished jobs, spread by how
far earlier forecasts of the same kind of waiting were off. Each one that was given with an
acceptance is kept and held against what came.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from mediamill import controls, db, installation

_SQL: Final = db.load("estimates")
_FIGURES: Final = db.load("maintenance")
_FRESH_SECONDS: Final = 2.0
_HISTORY_SECONDS: Final = 5.0
_HISTORY: Final = 3
_REMEMBERED: Final = 10_000
_SIMILAR: Final = 15
_KNOWN_FORECASTS: Final = 20
_SLACK_SECONDS: Final = 0.3  # what counts as nothing: claiming, a beat of the loop
_WAIT_SPREAD: Final = 1.3
_PROGRESS_SPREAD: Final = 1.5
_FROM_PROGRESS: Final = 5.0
_STALE_SECONDS: Final = 30.0
_POLL_SECONDS: Final = (1.0, 60.0)
_POLL_STANDING_SECONDS: Final = 5.0  # a queue that stands may go on at any moment


@dataclass(frozen=True, slots=True)
class Work:
    """How much there is to do, as far as it is known: bytes before the probe, pixels (of a frame)
    and seconds after it."""

    bytes: int | None = None
    pixels: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, row: Any) -> Work:
        """From the row of a media."""
        size = row["width"], row["height"]
        pixels = size[0] * size[1] if None not in size else None
        return cls(row["size"], pixels, row["duration_seconds"])

    def compared(self, other: Work) -> tuple[float, float] | None:
        """Both as numbers of the best measure that both have."""
        if self.pixels and other.pixels and (self.seconds is None) == (other.seconds is None):
            return self.pixels * (self.seconds or 1.0), other.pixels * (other.seconds or 1.0)
        if self.bytes and other.bytes:
            return float(self.bytes), float(other.bytes)
        return None


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds until the job is likely done: half of similar jobs by p50, nine in ten by p90."""

    p50_seconds: float | None
    p90_seconds: float | None
    basis: str
    raw_seconds: float | None = None
    """The point before it was corrected; kept, to correct the next ones."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "p50_seconds": _rounded(self.p50_seconds),
            "p90_seconds": _rounded(self.p90_seconds),
            "basis": self.basis,
        }


@dataclass(frozen=True, slots=True)
class Outlook:
    """The queue as it was a moment ago. `job_seconds` is what a job of it takes on average."""

    queued: int
    processing: int
    slots: int
    paused: bool = False
    job_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a job stood when somebody asked; it could not be claimed for `delay_seconds`."""

    at: float
    ahead: int
    delay_seconds: float


@dataclass(frozen=True, slots=True)
class _Finished:
    """A finished job: how much it was, and how long it ran."""

    work: Work
    seconds: float


class Forecaster:
    """Answers from figures that are at most some seconds old, so that an answer costs no scan.

    It asks on its caller's connection: requests that each hold one and wait for a second would wait
    for ever once all of the pool is held so.
    """

    def __init__(self) -> None:
        self._queues: tuple[float, dict[str, Outlook]] = (0.0, {})
        self._history: dict[tuple[str, str | None], tuple[float, list[_Finished]]] = {}
        self._errors: dict[tuple[str, int], tuple[float, tuple[float, float] | None]] = {}
        self._since: dict[str, int] = {}
        self._places: dict[UUID, _Place] = {}

    async def outlook(self, connection: db.Connection, queue: str) -> Outlook:
        """Depth, running jobs and slots of a queue."""
        at, known = self._queues
        if time.monotonic() - at > _FRESH_SECONDS:
            rows = await connection.fetch(_FIGURES.queue_figures)
            slots = await installation.slots(connection)
            set_ = await controls.read(connection)
            means = {r["queue"]: r["seconds"] for r in await connection.fetch(_SQL.job_seconds)}
            depths = {row["queue"]: (row["queued"], row["processing"]) for row in rows}
            known = {}
            for name in {*depths, *slots}:
                control = set_.get(name, controls.Control())
                cap = slots.get(name, 0)
                if control.concurrency is not None:
                    cap = min(cap, control.concurrency)
                known[name] = Outlook(
                    *depths.get(name, (0, 0)), cap, control.paused, means.get(name)
                )
            self._queues = time.monotonic(), known
            self._since.clear()
        return known.get(queue, Outlook(0, 0, 0))

    async def joined(self, connection: db.Connection, queue: str) -> int:
        """The position of a job that this transaction has just put at the queue's end, from 1."""
        before = self._queues[0]
        outlook = await self.outlook(connection, queue)
        if self._queues[0] == before:
            self._since[queue] = self._since.get(queue, 0) + 1
        # Else the fresh figures have it in them.
        return max(outlook.queued + self._since.get(queue, 0), 1)

    async def estimate(
        self,
        connection: db.Connection,
        *,
        kind: str,
        recipe: str | None,
        queue: str,
        ahead: int,
        work: Work | None = None,
        delay_seconds: float = 0.0,
        started_at: datetime | None = None,
        progress: float | None = None,
        now: datetime | None = None,
    ) -> Estimate:
        """Time left for a job with `ahead` jobs before it, or for one that runs since
        `started_at`. `delay_seconds` is until it may be claimed at all."""
        if started_at is not None and now is not None and (progress or 0.0) >= _FROM_PROGRESS:
            assert progress is not None
            left = (now - started_at).total_seconds() * (100.0 - progress) / progress
            return Estimate(left, left * _PROGRESS_SPREAD, "its own progress")
        history = await self._recent(connection, kind, recipe)
        if len(history) < _HISTORY:
            return Estimate(None, None, f"too few finished jobs of this kind yet ({len(history)})")
        outlook = await self.outlook(connection, queue)
        if outlook.slots == 0:
            return Estimate(None, None, "no worker serves this queue right now")
        p50, p90, said = _similar(history, work or Work())
        if started_at is not None and now is not None:
            elapsed = (now - started_at).total_seconds()
            return Estimate(max(p50 - elapsed, 0.0), max(p90 - elapsed, 0.0), said)
        if outlook.paused:
            return Estimate(None, None, "the queue is paused")
        wait = _wait(outlook, ahead, outlook.job_seconds or p50)
        raw = max(wait, delay_seconds) + p50
        known = await self._error(connection, queue, ahead)
        if known is None:
            return Estimate(raw, max(wait * _WAIT_SPREAD, delay_seconds) + p90, said, raw)
        half, most = known
        middle = max((raw + _SLACK_SECONDS) * half - _SLACK_SECONDS, 0.0)
        return Estimate(
            middle, max((raw + _SLACK_SECONDS) * most - _SLACK_SECONDS, middle), said, raw
        )

    async def keep(
        self,
        connection: db.Connection,
        tenant_id: str,
        job_id: UUID,
        estimate: Estimate,
        *,
        ahead: int,
    ) -> None:
        """Remember what was said when a job was accepted; what says nothing is not kept."""
        if estimate.raw_seconds is not None:
            await connection.execute(
                _SQL.keep,
                tenant_id,
                job_id,
                _depth(ahead),
                estimate.raw_seconds,
                estimate.p50_seconds,
                estimate.p90_seconds,
            )

    def note(self, subject: UUID, *, ahead: int, delay_seconds: float = 0.0) -> None:
        """Remember the place of a job, under its id or that of its media, for those who ask what
        has changed."""
        if len(self._places) >= _REMEMBERED:
            self._places.clear()
        self._places[subject] = _Place(time.monotonic(), ahead, delay_seconds)

    @property
    def stale(self) -> bool:
        """Whether the figures are too old to answer from; `outlook` renews them."""
        return time.monotonic() - self._queues[0] > _STALE_SECONDS

    def poll_after(
        self,
        subject: UUID,
        *,
        kind: str,
        recipe: str | None,
        queue: str,
        waits: bool,
        left_seconds: float | None = None,
    ) -> float:
        """When asking again is worth it, in seconds, from what is in memory: 1 to 60. Not before
        the queue has drained of what is ahead; then, in quarters of what the job itself takes
        (`left_seconds`, when it is known)."""
        outlook = self._queues[1].get(queue, Outlook(0, 0, 0))
        if left_seconds is None:
            remembered = self._history.get((kind, recipe))
            if remembered is not None and len(remembered[1]) >= _HISTORY:
                left_seconds = _quantile([f.seconds for f in remembered[1]], 0.5)
            else:
                left_seconds = outlook.job_seconds or 0.0
        after = left_seconds / 4
        if waits:
            place = self._places.get(subject)
            if place is not None:
                gone = time.monotonic() - place.at
                after += max(place.delay_seconds - gone, 0.0)
            if outlook.paused or outlook.slots == 0:
                after = max(after, _POLL_STANDING_SECONDS)
            elif outlook.job_seconds is not None:
                ahead = self._ahead(place, outlook)
                after += _wait(outlook, ahead, outlook.job_seconds)
        return min(max(round(after), _POLL_SECONDS[0]), _POLL_SECONDS[1])

    def _ahead(self, place: _Place | None, outlook: Outlook) -> int:
        """How many are still before a job: fewer than when it was noted, by what has drained since.
        Of one that was not noted, all that wait."""
        waiting = max(outlook.queued - 1, 0)
        if place is None:
            return waiting
        assert outlook.job_seconds is not None
        drained = (time.monotonic() - place.at) * outlook.slots / max(outlook.job_seconds, 0.001)
        ahead = max(place.ahead - int(drained), 0)
        return min(ahead, waiting) if self._queues[0] > place.at else ahead

    async def _recent(
        self, connection: db.Connection, kind: str, recipe: str | None
    ) -> list[_Finished]:
        key = kind, recipe
        remembered = self._history.get(key)
        if remembered is None or time.monotonic() - remembered[0] > _HISTORY_SECONDS:
            rows = await connection.fetch(_SQL.recent, kind, recipe)
            found = [_Finished(Work.of(row), row["seconds"]) for row in rows]
            self._history[key] = remembered = (time.monotonic(), found)
        return remembered[1]

    async def _error(
        self, connection: db.Connection, queue: str, ahead: int
    ) -> tuple[float, float] | None:
        """By which factors earlier forecasts were off: half of them, and nine in ten, by less."""
        key = queue, _depth(ahead)
        remembered = self._errors.get(key)
        if remembered is None or time.monotonic() - remembered[0] > _HISTORY_SECONDS:
            row = await connection.fetchrow(_SQL.errors, *key, _SLACK_SECONDS)
            assert row is not None
            factors = (row["p50"], row["p90"]) if row["jobs"] >= _KNOWN_FORECASTS else None
            self._errors[key] = remembered = (time.monotonic(), factors)
        return remembered[1]


def _wait(outlook: Outlook, ahead: int, job_seconds: float) -> float:
    """Until a slot is free for a job with so many before it. Those take what is free; after that a
    slot comes free in turn, the first one late if all of them have just begun."""
    free = max(outlook.slots - outlook.processing, 0)
    turns = ahead + 1 - free
    if turns <= 0:
        return 0.0
    under_way = min(outlook.processing / outlook.slots, 1.0)
    first = job_seconds * (under_way / outlook.slots + 1.0 - under_way)
    return first + (turns - 1) * job_seconds / outlook.slots


def _similar(history: Sequence[_Finished], work: Work) -> tuple[float, float, str]:
    """p50 and p90 of the jobs that are most like this one, scaled when it is beyond all of them."""
    pairs = [(f, work.compared(f.work)) for f in history]
    comparable = [(f, both) for f, both in pairs if both is not None]
    if len(comparable) < _HISTORY:
        seconds = [f.seconds for f in history]
        said = f"the last {len(history)} of its kind"
        return _quantile(seconds, 0.5), _quantile(seconds, 0.9), said
    nearest = sorted(comparable, key=lambda p: max(p[1]) / min(p[1]))[:_SIMILAR]
    seconds = [f.seconds for f, _ in nearest]
    mine = nearest[0][1][0]
    largest = max(other for _, (_, other) in nearest)
    scale = max(mine / largest, 1.0)
    said = f"the {len(nearest)} most similar of the last {len(history)} of its kind"
    return _quantile(seconds, 0.5) * scale, _quantile(seconds, 0.9) * scale, said


def _quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share lies, between neighbours in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _depth(ahead: int) -> int:
    """Forecasts are corrected among their like: none ahead, a few, many."""
    return 0 if ahead == 0 else 1 if ahead <= 10 else 2


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


@dataclass(frozen=True, slots=True)
class Record:
    """How forecasts of one kind have held up. `error` is relative to what came."""

    kind: str
    recipe: str | None
    jobs: int
    held: float
    median_error: float
    median_seconds: float


async def record(connection: db.Connection, *, days: float) -> list[Record]:
    """By kind and recipe, over the forecasts of the last days whose jobs are completed."""
    rows = await connection.fetch(_SQL.record, days)
    return [Record(**dict(row)) for row in rows]

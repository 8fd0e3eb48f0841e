"""Why it took as long as it did: exclusive segments that tile the time from birth to end
exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from mediamill.states import JobState, MediaState

_ENDED: Final = frozenset({MediaState.READY, MediaState.FAILED, MediaState.EXPIRED})


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of time. `name` is what was going on, `detail` whatever else is worth saying."""

    name: str
    start: datetime
    end: datetime
    attempt: int | None = None
    worker: str | None = None
    detail: str | None = None

    @property
    def seconds(self) -> float:
        return (self.end - self.start).total_seconds()


def segments(
    moves: Sequence[Mapping[str, Any]], *, main_jobs: frozenset[Any], now: datetime
) -> list[Segment]:
    """Segments from the logged moves of a media and its main jobs, oldest first.

    Moves of other jobs (previews) run beside the work and are left out. Each segment ends where the
    next begins; the last one of a media that is still at work ends at `now`. A media that ended and
    was processed again has the time in between as `idle`.
    """
    relevant = [
        m
        for m in moves
        if (m["subject"] == "media" and m["to_state"] in _NAMES)
        or (m["subject"] == "job" and m["job_id"] in main_jobs and m["stage"] is not None)
    ]
    # Until when a job holds back is in its own move, which is logged with the media's.
    due = {
        (m["job_id"], m.get("fence")): _moment(m, "run_at")
        for m in moves
        if m["subject"] == "job" and m["to_state"] == JobState.QUEUED
    }
    found: list[Segment] = []
    for this, following in zip(relevant, [*relevant[1:], None], strict=True):
        ended = this["subject"] == "media" and this["to_state"] in _ENDED
        if following is None and ended:
            break
        end = now if following is None else following["at"]
        if end == this["at"] and this["stage"] is None and this["to_state"] == "uploaded":
            continue  # accepted and queued in one step
        name = this["stage"] or ("idle" if ended else _NAMES[this["to_state"]])
        run_at = due.get((this["job_id"], this.get("fence"))) if name == "queued" else None
        stored_at = _moment(following, "stored_at") if name == "awaiting_upload" else None
        if stored_at is not None and stored_at < end:
            found += _uploaded(_segment(this, name, end, None)[0], stored_at)
        else:
            found += _segment(this, name, end, run_at)
    return found


def job_segments(moves: Sequence[Mapping[str, Any]], *, now: datetime) -> list[Segment]:
    """Segments from the logged moves of one job, oldest first; the last one of a live job ends at
    `now`."""
    found: list[Segment] = []
    for this, following in zip(moves, [*moves[1:], None], strict=True):
        ended = this["to_state"] in _JOB_ENDED
        if following is None and ended:
            break
        name = "idle" if ended else this["stage"] or _JOB_NAMES[this["to_state"]]
        end = now if following is None else following["at"]
        found += _segment(this, name, end, _moment(this, "run_at") if name == "queued" else None)
    return found


def _moment(move: Mapping[str, Any] | None, name: str) -> datetime | None:
    """A time that a move tells beside its own: until when a queued job holds back (`run_at`), when
    the object of an accepted media was stored (`stored_at`)."""
    text = ((move or {}).get("details") or {}).get(name)
    return None if text is None else datetime.fromisoformat(text)


def _uploaded(whole: Segment, stored_at: datetime) -> list[Segment]:
    """The wait for an upload, and from then on how long nobody said that it was there. Clocks
    differ: what is stored before the slot is opened was stored at once."""
    there = max(stored_at, whole.start)
    lag = replace(whole, name="event_lag", start=there)
    return [lag] if there == whole.start else [replace(whole, end=there), lag]


def _segment(
    move: Mapping[str, Any], name: str, end: datetime, run_at: datetime | None
) -> list[Segment]:
    """One stretch, or two when the job held back for a while before it waited for a worker."""
    whole = Segment(
        name=name,
        start=move["at"],
        end=end,
        attempt=move["attempt"],
        worker=move["worker"],
        detail=move["code"],
    )
    if run_at is None or run_at <= whole.start:
        return [whole]
    if run_at >= end:
        return [replace(whole, name="backoff")]
    return [replace(whole, name="backoff", end=run_at), replace(whole, start=run_at)]


def sentence(found: Sequence[Segment], *, state: str) -> str:
    """One plain sentence: how long in all, and where most of it went."""
    total = sum(s.seconds for s in found)
    if not found:
        return f"It is {state}; nothing has happened yet."
    by_name: dict[str, float] = {}
    for segment in found:
        by_name[segment.name] = by_name.get(segment.name, 0.0) + segment.seconds
    longest = max(by_name, key=lambda name: by_name[name])
    where = _PHRASES.get(longest, longest)
    again = {s.detail: s.attempt for s in found if s.name in ("queued", "backoff") and s.attempt}
    tries = "".join(f", again after {why or 'a pause'} (attempt {n})" for why, n in again.items())
    return (
        f"{_say(total)} in all, of which {_say(by_name[longest])} {where}{tries}; "
        f"it is {state.replace('_', ' ')}."
    )


def _say(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


_JOB_ENDED: Final = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELED})
_JOB_NAMES: Final = {JobState.QUEUED: "queued", JobState.PROCESSING: "running"}
_NAMES: Final = {
    MediaState.AWAITING_UPLOAD: "awaiting_upload",
    MediaState.UPLOADED: "accepted",
    MediaState.QUEUED: "queued",
    MediaState.PROCESSING: "claimed",
    MediaState.READY: "idle",
    MediaState.FAILED: "idle",
    MediaState.EXPIRED: "idle",
}
_PHRASES: Final = {
    "awaiting_upload": "waiting for the upload",
    "event_lag": "stored, but not yet reported",
    "queued": "waiting in the queue",
    "backoff": "holding back after an error",
    "claimed": "getting started",
    "download": "fetching the original",
    "probe": "looking at the file",
    "running": "running",
    "waiting": "waiting for its children",
    "preview": "making the preview",
    "encode": "encoding",
    "verify": "checking the outputs",
    "publish": "publishing",
}

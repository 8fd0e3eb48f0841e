"""Every state and every legal move: the map. The SQL `WHERE state = …` is the judge.

Nothing here knows who moves or why. `tests/test_states.py` holds this table, the `moves:` comments
in `sql/` and the CHECKs of the schema together.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class MediaState(StrEnum):
    AWAITING_UPLOAD = "awaiting_upload"
    """A slot is open; no bytes are accepted yet."""
    UPLOADED = "uploaded"
    """The original is stored, verified and pinned."""
    QUEUED = "queued"
    """Its main job waits for a worker."""
    PROCESSING = "processing"
    """Its main job runs, or waits for its children."""
    READY = "ready"
    """Every listed variant exists, matches its size and hash, and decodes."""
    FAILED = "failed"
    """Its main job ended without a result; `error` says why."""
    EXPIRED = "expired"
    """The slot closed before the bytes came."""


class JobState(StrEnum):
    QUEUED = "queued"
    """Waits for a worker; a retry waits with a later `run_at`."""
    PROCESSING = "processing"
    """One worker holds its lease, or it waits for its children without one."""
    COMPLETED = "completed"
    """Its result is stored."""
    FAILED = "failed"
    """Ended without a result; may be replayed."""
    CANCELED = "canceled"
    """Ended by request."""


class DeliveryState(StrEnum):
    PENDING = "pending"
    """It waits for its first or next attempt, or is on its way."""
    DELIVERED = "delivered"
    """The endpoint has answered with success."""
    EXHAUSTED = "exhausted"
    """It was given up; it can be asked for again."""
    CANCELED = "canceled"
    """Its endpoint was deleted."""


class EndpointState(StrEnum):
    ENABLED = "enabled"
    """Events are noted for it and sent."""
    DISABLED = "disabled"
    """Switched off, by its owner or because it did not answer for long; `reason` says which."""
    DELETED = "deleted"
    """Kept until its deliveries are forgotten."""


MEDIA_MOVES: Final[frozenset[tuple[MediaState, MediaState]]] = frozenset(
    {
        (MediaState.AWAITING_UPLOAD, MediaState.UPLOADED),
        (MediaState.AWAITING_UPLOAD, MediaState.EXPIRED),
        (MediaState.UPLOADED, MediaState.QUEUED),
        (MediaState.QUEUED, MediaState.PROCESSING),
        (MediaState.QUEUED, MediaState.FAILED),  # its job was canceled before it ran
        (MediaState.PROCESSING, MediaState.QUEUED),
        (MediaState.PROCESSING, MediaState.READY),
        (MediaState.PROCESSING, MediaState.FAILED),
        (MediaState.READY, MediaState.QUEUED),
        (MediaState.FAILED, MediaState.QUEUED),
    }
)

JOB_MOVES: Final[frozenset[tuple[JobState, JobState]]] = frozenset(
    {
        (JobState.QUEUED, JobState.PROCESSING),
        (JobState.QUEUED, JobState.CANCELED),
        (JobState.PROCESSING, JobState.COMPLETED),
        (JobState.PROCESSING, JobState.FAILED),
        (JobState.PROCESSING, JobState.CANCELED),
        (JobState.PROCESSING, JobState.QUEUED),
        (JobState.FAILED, JobState.QUEUED),
    }
)

MEDIA_FOLLOWS_JOB: Final[dict[JobState, MediaState]] = {
    JobState.QUEUED: MediaState.QUEUED,
    JobState.PROCESSING: MediaState.PROCESSING,
    JobState.COMPLETED: MediaState.READY,
    JobState.FAILED: MediaState.FAILED,
    JobState.CANCELED: MediaState.FAILED,
}
"""Where a media goes when its main job moves. Only the main job of the current generation
counts."""

MEDIA_TERMINAL: Final = frozenset({MediaState.READY, MediaState.FAILED, MediaState.EXPIRED})
JOB_TERMINAL: Final = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELED})

"""What the API answers, typed. Fields that a newer server adds are kept and not in the way."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    def as_dict(self) -> dict[str, Any]:
        """As the API said it."""
        return self.model_dump(mode="json", exclude_unset=True, by_alias=True)


class OutputProgress(Model):
    """How far one output is that is being made just now; None where that is not known."""

    name: str
    percent: float | None = None
    speed: float | None = None
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an upload or its processing is. `phase` is `upload` or `process`; `outputs` are those
    that are being made just now."""

    phase: str
    stage: str | None
    percent: float | None
    done_bytes: int | None = None
    total_bytes: int | None = None
    outputs: tuple[OutputProgress, ...] = ()


class Estimate(Model):
    p50_seconds: float | None = None
    p90_seconds: float | None = None
    basis: str = ""


class JobSummary(Model):
    id: str
    state: str
    queue: str
    position: int | None = None
    stage: str | None = None
    attempt: int = 0
    max_attempts: int = 0
    estimate: Estimate | None = None
    outputs: list[OutputProgress] = []


class Variant(Model):
    """One output. `url` is signed and good until `url_expires_at`."""

    name: str
    content_type: str
    bytes: int
    sha256: str
    url: str
    url_expires_at: datetime
    width: int | None = None
    height: int | None = None
    duration_seconds: float | None = None
    seconds: float | None = None


class MediaItem(Model):
    """A media as lists show it."""

    id: str
    state: str
    kind: str | None = None
    filename: str | None = None
    content_type: str = ""
    size: int = 0
    width: int | None = None
    height: int | None = None
    duration_seconds: float | None = None
    recipe: str = ""
    recipe_version: int = 0
    generation: int = 0
    preview: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    created_at: datetime
    updated_at: datetime
    expires_at: datetime | None = None


class Media(MediaItem):
    """A media in full."""

    stage: str | None = None
    progress: float | None = None
    sha256: str | None = None
    info: dict[str, Any] | None = None
    metadata: dict[str, Any] = {}
    job: JobSummary | None = None
    variants: list[Variant] = []
    poll_after_seconds: float | None = None
    links: dict[str, str] = {}


class Upload(Model):
    """The one request that fills a slot, before `expires_at`: a PUT of the file with these headers,
    or a POST of these fields and then the file, as multipart/form-data under the name `file`."""

    method: str
    url: str
    headers: dict[str, str] = {}
    fields: dict[str, str] = {}
    expires_at: datetime


class Slot(Media):
    """A media whose bytes are awaited."""

    upload: Upload


class Subtitles(Model):
    """A file of subtitles beside a film; `charset` is what its bytes were taken for."""

    language: str
    label: str | None = None
    format: str
    charset: str
    cues: int
    bytes: int
    created_at: datetime


class UploadToken(Model):
    """Lets a browser upload; `companion_url` is what Uppy takes as its endpoint."""

    token: str
    expires_at: datetime
    companion_url: str


class StreamUrl(Model):
    """An address that opens as an event stream, without a key, until `expires_at`."""

    url: str
    expires_at: datetime


class Attempt(Model):
    """One run of a job; `log_tail` and `commands` are there for a dead letter read by itself."""

    attempt: int
    worker: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    outcome: str | None = None
    error: dict[str, Any] | None = None
    log_tail: str | None = None
    commands: Any = None


class Job(Model):
    id: str
    state: str
    kind: str
    queue: str
    role: str
    stage: str | None = None
    progress: float | None = None
    position: int | None = None
    estimate: Estimate | None = None
    attempt: int
    max_attempts: int
    dead_letter: bool
    media_id: str | None = None
    payload: dict[str, Any] | None = None
    recipe: str | None = None
    result: Any = None
    error: dict[str, Any] | None = None
    attempts: list[Attempt] = []
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    duplicate_of: str | None = None


class Output(Model):
    """How long one output took to make; those of one pass are made together and overlap."""

    name: str
    seconds: float


class Segment(Model):
    name: str
    start: datetime
    end: datetime
    seconds: float
    attempt: int | None = None
    worker: str | None = None
    reason: str | None = None
    outputs: list[Output] = []


class Timeline(Model):
    """Where the time went: the segments sum to `total_seconds`."""

    id: str
    state: str
    total_seconds: float
    sentence: str
    segments: list[Segment]
    moves: list[dict[str, Any]] = []


class Queue(Model):
    queue: str
    queued: int
    processing: int
    oldest_seconds: float
    rate_per_minute: float = 0.0
    slots: int
    paused: bool
    draining: bool
    concurrency: int | None = None


class Worker(Model):
    id: str
    host: str
    pid: int
    version: str
    slots: dict[str, int]
    sandbox: str | None = None
    started_at: datetime
    seen_at: datetime
    draining: bool


class Recipe(Model):
    name: str
    version: int
    built_in: bool
    versions: list[int]
    kinds: list[str]
    recipe: dict[str, Any]


class Verdict(Model):
    """Whether a recipe is valid, and if not, why; `recipe` has every default written out."""

    valid: bool
    errors: list[dict[str, Any]]
    recipe: dict[str, Any] | None = None


class Endpoint(Model):
    """A webhook endpoint. `secret` is told when it is made or rotated, and never again."""

    id: str
    url: str
    description: str | None = None
    types: list[str] | None = None
    payload: str
    signing: str
    state: str
    reason: str | None = None
    failures: int = 0
    secret: str | None = None
    created_at: datetime
    updated_at: datetime


class Delivery(Model):
    """One event for one endpoint; `body` and `attempts` when it is read by itself."""

    id: str
    endpoint_id: str
    event_id: str
    type: str
    state: str
    reason: str | None = None
    attempt: int
    status: int | None = None
    created_at: datetime
    finished_at: datetime | None = None
    body: str | None = None
    attempts: list[dict[str, Any]] = []


class Letter(Model):
    """A webhook that the inbox of the platform took."""

    received_at: datetime
    headers: dict[str, str]
    body: str


class Event(Model):
    """Something that happened. `cursor` goes on after it in a stream; `raw` are its bytes."""

    type: str
    data: dict[str, Any] = {}
    id: str | None = None
    timestamp: datetime | None = None
    cursor: str | None = None
    raw: bytes = b""


class Replayed(Model):
    """How many dead letters were queued again, and over how many seconds."""

    replayed: int
    seconds: float


class DeadLetters(Model):
    """The dead letters of one code; `newest` is the id of one to look at."""

    code: str | None
    count: int
    first_at: datetime
    last_at: datetime
    newest: str
    detail: str
    advice: str


class PlannedOutput(Model):
    """What a recipe would make; None where nobody can tell before it is made."""

    name: str
    type: str
    width: int | None = None
    height: int | None = None
    most_bytes: int | None = None
    note: str | None = None


class DryRun(Model):
    """What a recipe would make of a media, and how long the like of it has taken."""

    media_id: str
    kind: str
    recipe: str
    version: int
    outputs: list[PlannedOutput]
    estimate: Estimate


class Key(Model):
    """An API key; `api_key` is the key itself, told when it is made and never again."""

    id: str
    name: str
    scopes: list[str]
    role: str | None = None
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None
    api_key: str | None = None


class OwnKey(Model):
    """The key of this client; `may` holds every scope that it has or that is implied."""

    id: str
    tenant: str
    role: str | None = None
    may: list[str]


class Step(Model):
    """What ended from `at` to the next step. Seconds are from creation to completion."""

    at: datetime
    completed: int
    failed: int
    p50_seconds: float | None = None
    p95_seconds: float | None = None


class Figures(Model):
    """Throughput and latency, in steps of equal length; `whole` tells whether they go back as far
    as was asked for."""

    since: datetime
    until: datetime
    whole: bool
    steps: list[Step]


class Setting(Model):
    """A setting of the API process that answered; secrets read `***`."""

    name: str
    value: Any
    is_default: bool
    origin: str


class Check(Model):
    """Something that the storage enforces or does not; `ok` None is a note that is no fault."""

    name: str
    ok: bool | None
    detail: str
    remedy: str

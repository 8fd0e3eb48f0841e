"""/v1/dead-letters: jobs whose attempts are used up, until they are replayed or discarded."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from mediamill import db, ids, jobs, media
from mediamill.api.jobs import AttemptBody, JobBody, listed_job, shown_job
from mediamill.api.services import (
    Page,
    caller,
    iso_time,
    json_body,
    json_response,
    known_parameters,
    listed,
    parse_body,
    path_id,
    plain_text,
    services,
    shown_error,
)
from mediamill.failures import BY_NAME, Code, Refused

SCHEMA_VERSION: Final = 1
FILTERS: Final = ("code", "kind", "queue", "since", "until")
_MOST: Final = 10_000
_BATCH: Final = 500


class Which(BaseModel):
    """Which dead letters are meant; a field that is left out does not restrict."""

    model_config = ConfigDict(extra="forbid", strict=False)

    code: Annotated[str, Field(max_length=64), AfterValidator(plain_text)] | None = None
    kind: Annotated[str, Field(max_length=128), AfterValidator(plain_text)] | None = None
    queue: Annotated[str, Field(max_length=32), AfterValidator(plain_text)] | None = None
    since: datetime | None = None
    until: datetime | None = None

    def filter(self) -> jobs.Filter:
        return jobs.Filter(
            code=self.code,
            kind=self.kind,
            queue=self.queue,
            since=_aware(self.since),
            until=_aware(self.until),
        )


class ReplayMany(BaseModel):
    """Replay all that fit, so many a second."""

    model_config = ConfigDict(extra="forbid")

    filter: Which = Field(default_factory=Which)
    rate_per_second: float = Field(default=10.0, gt=0, le=10_000)
    limit: int = Field(default=_MOST, ge=1, le=_MOST)


class CommandBody(BaseModel):
    """A command that an attempt ran."""

    label: str
    command: list[str]
    exit: int | None = None
    stopped_for: str | None = None
    wall_seconds: float
    cpu_seconds: float | None = None
    max_rss_bytes: int | None = None


class FullAttempt(AttemptBody):
    """One run with what its tools were and said."""

    fence: int
    log_tail: str | None
    commands: list[CommandBody] | None


class FullJob(JobBody):
    """A job with every attempt in full."""

    attempts: list[FullAttempt]  # type: ignore[assignment]  # the same and more


class ReplayedBody(BaseModel):
    """How many are queued again, over how many seconds."""

    schema_version: Literal[1]
    replayed: int
    seconds: float


class Group(BaseModel):
    """Dead letters of one code."""

    code: str | None
    count: int
    first_at: datetime
    last_at: datetime
    newest: str = Field(description="The id of one, to look at.")
    detail: str
    advice: str


class GroupsBody(BaseModel):
    """The largest group first; 100 at most."""

    schema_version: Literal[1]
    data: list[Group]


async def list_groups(request: Request) -> Response:
    """Dead letters by code: how many, since when, and one to look at."""
    sender = await caller(request, "dlq:manage")
    known_parameters(request)
    async with db.acquire(services(request).pool) as connection:
        rows = await jobs.dead_groups(connection, sender.tenant_id)
    data = [
        {
            "code": row["code"],
            "count": row["jobs"],
            "first_at": iso_time(row["first_at"]),
            "last_at": iso_time(row["last_at"]),
            "newest": ids.encode(ids.JOB, row["newest"]),
            "detail": code.title if code else "",
            "advice": code.advice if code else "",
        }
        for row in rows
        for code in (BY_NAME.get(row["code"]),)
    ]
    return json_response({"schema_version": SCHEMA_VERSION, "data": data})


async def list_dead_letters(request: Request) -> Response:
    """Newest first, by `code`, `kind`, `queue`, `since` and `until` (RFC 3339)."""
    given = {n: request.query_params[n] for n in FILTERS if n in request.query_params}

    async def ask(connection: db.Connection, tenant_id: str, page: Page) -> list[db.Row]:
        which = parse_body(Which, json.dumps(given).encode())
        return await jobs.dead_letters(
            connection, tenant_id, which.filter(), before=page.before, limit=page.limit + 1
        )

    return await listed(request, "dlq:manage", FILTERS, ask, listed_job)


async def read_dead_letter(request: Request) -> Response:
    """A job, dead letter or not, with every attempt: its error, its commands and the last words of
    its tools."""
    sender = await caller(request, "dlq:manage")
    known_parameters(request)
    here = services(request)
    job_id = path_id(request, ids.JOB, "job_id")
    async with db.acquire(here.pool) as connection:
        row = await jobs.get(connection, sender.tenant_id, job_id)
        if row is None:
            raise Refused(Code.NOT_FOUND)
        tried = await jobs.attempts_in_full(connection, sender.tenant_id, job_id)
    body = shown_job(row, [], None) | {
        "attempts": [
            {
                "attempt": a["attempt"],
                "fence": a["fence"],
                "worker": a["worker"],
                "started_at": iso_time(a["started_at"]),
                "finished_at": iso_time(a["finished_at"]),
                "outcome": a["outcome"],
                "error": shown_error(a["error"]),
                "log_tail": a["log_tail"],
                "commands": a["commands"],
            }
            for a in tried
        ],
    }
    return json_response(body, 200, {"Cache-Control": "private, no-store"})


async def replay_dead_letters(request: Request) -> Response:
    """Replay every dead letter that fits the filter, at a rate: each is queued for its second."""
    sender = await caller(request, "dlq:manage")
    known_parameters(request)
    here = services(request)
    wanted = parse_body(ReplayMany, await json_body(request))
    replayed = 0
    before = None
    while replayed < wanted.limit:
        # In batches, so that no transaction is long; a repeat goes on where this one ended.
        async with db.transaction(here.pool) as connection:
            rows = await jobs.dead_letters(
                connection,
                sender.tenant_id,
                wanted.filter.filter(),
                before=before,
                limit=min(_BATCH, wanted.limit - replayed),
            )
            for row in rows:
                delay = replayed / wanted.rate_per_second
                if await media.replay(connection, sender.tenant_id, row, delay_seconds=delay):
                    replayed += 1
        if not rows:
            break
        before = rows[-1]["id"]
    body = {
        "schema_version": SCHEMA_VERSION,
        "replayed": replayed,
        "seconds": round(replayed / wanted.rate_per_second, 1),
    }
    return json_response(body, 202)


async def discard_dead_letter(request: Request) -> Response:
    """Take a dead letter off the list for good. The job stays failed; its history is kept."""
    sender = await caller(request, "dlq:manage")
    known_parameters(request)
    here = services(request)
    job_id = path_id(request, ids.JOB, "job_id")
    async with db.transaction(here.pool) as connection:
        row = await jobs.get(connection, sender.tenant_id, job_id)
        if row is None:
            raise Refused(Code.NOT_FOUND)
        if not await jobs.discard(connection, sender.tenant_id, job_id):
            raise Refused(Code.WRONG_STATE, "It is no dead letter.")
        row = await jobs.get(connection, sender.tenant_id, job_id)
        assert row is not None
    return json_response(listed_job(row))


def _aware(moment: datetime | None) -> datetime | None:
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment

"""/v1/jobs: one unit of background work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from mediamill import (
    controls,
    db,
    failpoints,
    idempotency,
    ids,
    jobs,
    media,
    mill,
    queue,
    timeline,
)
from mediamill.api.services import (
    CALLBACK,
    Callback,
    Failed,
    Page,
    Services,
    caller,
    common_filters,
    etags,
    idempotency_key,
    iso_time,
    json_body,
    json_response,
    json_text,
    known_parameters,
    listed,
    parse_body,
    path_id,
    plain_text,
    poll_after,
    services,
    shown_error,
    shown_timeline,
    wait_for,
    wait_seconds,
    waited_headers,
    worded,
)
from mediamill.estimates import Estimate
from mediamill.events import Topic
from mediamill.failures import Code, Refused
from mediamill.idempotency import Answer
from mediamill.states import JOB_TERMINAL, JobState

SCHEMA_VERSION: Final = 1
_BULK_MOST: Final = 10_000
_BULK_BATCH: Final = 200
_BULK_SECONDS: Final = 10.0
Word = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(plain_text)]
FILTERS: Final = ("state", "kind", "queue", "error_code", "created_after", "created_before")


class NewJob(BaseModel):
    """A job of a kind that a worker has offered."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    kind: str = Field(max_length=128, examples=["report.monthly"])
    schema_version: int | None = Field(
        default=None, ge=1, description="Version of the payload; default: the newest known."
    )
    payload: dict[str, Any] = Field(default_factory=dict)
    priority: int = Field(default=0, ge=-queue.MAX_PRIORITY, le=queue.MAX_PRIORITY)
    delay_seconds: float = Field(default=0.0, ge=0, le=365 * 86400)
    dedup_key: str | None = Field(default=None, min_length=1, max_length=255)
    max_attempts: int | None = Field(default=None, ge=1, le=100)
    callback_url: str | None = Field(default=None, max_length=2048, description=CALLBACK)


class EstimateBody(BaseModel):
    """Seconds that are left, as often half of the time and nine times in ten."""

    p50_seconds: float | None
    p90_seconds: float | None
    basis: str


class AttemptBody(BaseModel):
    """One run of a job."""

    attempt: int
    worker: str | None
    started_at: datetime | None
    finished_at: datetime | None
    outcome: str | None = Field(description="null while it runs.")
    error: Failed | None


class JobBody(BaseModel):
    """A job as the API shows it."""

    schema_version: Literal[1]
    id: str
    state: JobState
    kind: str
    queue: str
    role: str
    stage: str | None
    progress: float | None = Field(description="0 to 100; null when unknown.")
    position: int | None = Field(description="1 is next; null when it does not wait.")
    estimate: EstimateBody | None
    poll_after_seconds: float | None
    attempt: int
    max_attempts: int
    dead_letter: bool
    cancel_requested: bool
    media_id: str | None
    parent_id: str | None
    pending_children: int
    payload: dict[str, Any]
    payload_version: int
    dedup_key: str | None
    priority: int
    recipe: str | None
    recipe_version: int | None
    generation: int
    result: Any
    error: Failed | None
    attempts: list[AttemptBody] = Field(description="Empty in lists.")
    run_at: datetime | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    expires_at: datetime | None


class JobPage(BaseModel):
    """Newest first."""

    schema_version: Literal[1]
    data: list[JobBody]
    next_cursor: str | None


class Matching(BaseModel):
    """Which jobs are meant; a field that is left out does not restrict."""

    model_config = ConfigDict(extra="forbid")

    kind: Word | None = None
    queue: Word | None = None
    error_code: Word | None = None
    created_after: AwareDatetime | None = None
    created_before: AwareDatetime | None = None


class Bulk(BaseModel):
    """Do it to all that match, newest first."""

    model_config = ConfigDict(extra="forbid")

    filter: Matching = Field(default_factory=Matching)
    before: str | None = Field(
        default=None, max_length=64, description="The `next` of an answer: go on from there."
    )
    limit: int = Field(default=_BULK_MOST, ge=1, le=_BULK_MOST)


class BulkBody(BaseModel):
    """How many were changed. `next` is null when all that matched were looked at."""

    schema_version: Literal[1]
    changed: int
    next: str | None


async def create_job(request: Request) -> Response:
    """Queue a job. 202 with its id; 200 with `duplicate_of` when a live job holds the dedup key.

    With `Prefer: wait=N` (at most 25 s) the answer comes when the job has ended: 200, in full.
    """
    sender = await caller(request, "jobs:write")
    known_parameters(request, "wait")
    here = services(request)
    raw = await json_body(request)
    wanted = parse_body(NewJob, raw)
    key = idempotency_key(request, sender, idempotency.fingerprint("json", raw), route="/v1/jobs")
    callback = await Callback.of(here, wanted.callback_url)
    async with db.transaction(here.pool) as connection:

        async def work() -> Answer:
            kind = await _kind(connection, wanted)
            mill.check_json(wanted.payload, "the payload")
            new = mill.new_job(
                kind,
                wanted.payload,
                priority=wanted.priority,
                delay_seconds=wanted.delay_seconds,
                dedup_key=wanted.dedup_key,
                max_attempts=wanted.max_attempts,
            )
            await callback.register(connection, sender.tenant_id, new.id)
            made = await jobs.enqueue(connection, sender.tenant_id, [new])
            job_id, duplicate = new.id, not made
            if duplicate:
                assert wanted.dedup_key is not None
                known = await jobs.duplicate(
                    connection, sender.tenant_id, kind.kind, wanted.dedup_key
                )
                if known is None:  # it ended in between
                    raise Refused(Code.TOO_BUSY, "A job with this dedup key is just ending.")
                job_id = known
            row = await jobs.get(connection, sender.tenant_id, job_id)
            assert row is not None
            body = shown_job(row, [], None)
            estimate = None
            if not duplicate:
                place = await here.forecaster.joined(connection, row["queue"])
                estimate = await _estimate(here, connection, row, place)
                here.forecaster.note(job_id, ahead=place - 1, delay_seconds=wanted.delay_seconds)
                body |= {"position": place, "estimate": estimate.as_dict()}
                await here.forecaster.keep(
                    connection, sender.tenant_id, job_id, estimate, ahead=place - 1
                )
            if duplicate:
                body["duplicate_of"] = body["id"]
            body["poll_after_seconds"] = _poll_after(here, row, estimate)
            return Answer(
                200 if duplicate else 202, json_text(body), _location(job_id)["Location"], job_id
            )

        answer = await idempotency.once(
            connection, key, keep_seconds=here.settings.idempotency_seconds, work=work
        )
    failpoints.hit("api.accepted")
    after = json.loads(answer.body).get("poll_after_seconds") or 1.0  # an older answer
    headers = {"Location": answer.location, "Retry-After": str(round(after))}
    if answer.replayed:
        headers["Idempotent-Replayed"] = "true"
    ended = await _ended(here, sender.tenant_id, answer.about, wait_seconds(request))
    if ended is not None:
        del headers["Retry-After"]
        return json_response(ended, 200, headers)
    return json_response(answer.body, answer.status, headers)


async def _estimate(
    here: Services, connection: db.Connection, row: db.Row, position: int | None
) -> Estimate:
    """Time left for a job that waits or runs."""
    now = datetime.now(UTC)
    return await here.forecaster.estimate(
        connection,
        kind=row["kind"],
        recipe=row["recipe"],
        queue=row["queue"],
        ahead=(position or 1) - 1,
        delay_seconds=max((row["run_at"] - now).total_seconds(), 0.0),
        started_at=row["started_at"] if row["state"] == JobState.PROCESSING else None,
        progress=row["progress"],
        now=now,
    )


def _poll_after(here: Services, row: db.Row, estimate: Estimate | None) -> float:
    waits = row["state"] == JobState.QUEUED
    return here.forecaster.poll_after(
        row["id"],
        kind=row["kind"],
        recipe=row["recipe"],
        queue=row["queue"],
        waits=waits,
        left_seconds=None if waits or estimate is None else estimate.p50_seconds,
    )


async def _ended(
    here: Services, tenant_id: str, job_id: UUID, seconds: float
) -> dict[str, Any] | None:
    """The job in full, if it ends within so many seconds."""
    if seconds <= 0:
        return None

    async def done() -> bool:
        async with db.acquire(here.pool) as connection:
            light = await jobs.version(connection, tenant_id, job_id)
        return light is None or light["state"] in JOB_TERMINAL

    await wait_for(here, Topic(tenant_id, None, job_id), seconds, done)
    async with db.acquire(here.pool) as connection:
        row = await jobs.get(connection, tenant_id, job_id)
        if row is None or row["state"] not in JOB_TERMINAL:
            return None
        tried = await jobs.attempts(connection, tenant_id, job_id)
    return shown_job(row, tried, None)


async def _kind(connection: db.Connection, wanted: NewJob) -> controls.Kind:
    """The offered kind that a request names. Raises Refused with what is known."""
    offered = await controls.offered(connection, wanted.kind)
    for kind in offered:
        if wanted.schema_version in (None, kind.version):
            return kind
    if offered:
        known = ", ".join(str(kind.version) for kind in offered)
        raise Refused(
            Code.INVALID_REQUEST,
            f"{wanted.kind} is known in the versions {known}.",
            errors=[{"pointer": "/schema_version", "detail": f"must be one of {known}"}],
        )
    kinds = ", ".join(await controls.offered_kinds(connection)) or "none yet"
    raise Refused(
        Code.INVALID_REQUEST,
        f"No worker has offered {wanted.kind!r}. Known: {kinds}. Start a worker with --app.",
        errors=[{"pointer": "/kind", "detail": "is not known"}],
    )


async def list_jobs(request: Request) -> Response:
    """Newest first, by `state` (several with commas), `kind`, `queue`, `error_code`,
    `created_after` and `created_before` (RFC 3339)."""

    async def ask(connection: db.Connection, tenant_id: str, page: Page) -> list[db.Row]:
        return await jobs.list_newest(
            connection,
            tenant_id,
            before=page.before,
            limit=page.limit + 1,
            queue_name=worded(request, "queue"),
            **common_filters(request, JobState),
        )

    return await listed(request, "jobs:read", FILTERS, ask, listed_job)


async def read_job_timeline(request: Request) -> Response:
    """Every logged move and stage of a job."""
    sender = await caller(request, "jobs:read")
    known_parameters(request)
    here = services(request)
    job_id = path_id(request, ids.JOB, "job_id")
    async with db.acquire(here.pool) as connection:
        row = await jobs.get(connection, sender.tenant_id, job_id)
        if row is None:
            raise Refused(Code.NOT_FOUND)
        moves = await jobs.timeline(connection, sender.tenant_id, job_id)
        now = await connection.fetchval("SELECT clock_timestamp()")
    found = timeline.job_segments([dict(move) for move in moves], now=now)
    body = {
        "schema_version": SCHEMA_VERSION,
        "id": ids.encode(ids.JOB, job_id),
        **shown_timeline(found, moves, state=row["state"]),
    }
    return json_response(body, 200, {"Cache-Control": "private, no-cache"})


async def read_job(request: Request) -> Response:
    """The status of a job, in every state.

    With `If-None-Match`, 304 while nothing has changed. With `Prefer: wait=N` (or `wait=N`, at most
    25 s) the answer comes with the next change, or without a tag, when the job has ended.
    """
    sender = await caller(request, "jobs:read")
    known_parameters(request, "wait")
    here = services(request)
    job_id = path_id(request, ids.JOB, "job_id")
    seen = etags(request, "if-none-match")
    seconds = wait_seconds(request)
    light = None

    async def done() -> bool:
        nonlocal light
        async with db.acquire(here.pool) as connection:
            light = await jobs.version(connection, sender.tenant_id, job_id)
            if light is None:
                return True
            if not seen:
                return light["state"] in JOB_TERMINAL
            if light["pending_children"]:  # its version is theirs too
                row = await jobs.get(connection, sender.tenant_id, job_id)
                return row is None or _tag(row) not in seen
        return f'"{light["version"]}"' not in seen

    waited = 0.0
    if seen or seconds:
        waited = await wait_for(here, Topic(sender.tenant_id, None, job_id), seconds, done)
    applied = waited_headers(here, waited)
    if seen and not await done():
        assert light is not None
        tag = next(iter(seen)) if light["pending_children"] else f'"{light["version"]}"'
        headers = {"ETag": f"W/{tag}", "Cache-Control": "private, no-cache"}
        if light["state"] not in JOB_TERMINAL:
            headers |= await poll_after(
                here,
                job_id,
                kind=light["kind"],
                recipe=light["recipe"],
                queue=light["queue"],
                waits=light["state"] == JobState.QUEUED,
            )
        return Response(status_code=304, headers=headers | applied)
    async with db.acquire(here.pool) as connection:
        row = await jobs.get(connection, sender.tenant_id, job_id)
        if row is None:
            raise Refused(Code.NOT_FOUND)
        tried = await jobs.attempts(connection, sender.tenant_id, job_id)
        position = None
        if row["state"] == JobState.QUEUED:
            position = 1 + await jobs.position(connection, sender.tenant_id, job_id)
            delay = max((row["run_at"] - datetime.now(UTC)).total_seconds(), 0.0)
            here.forecaster.note(job_id, ahead=position - 1, delay_seconds=delay)
        estimate = None
        if row["state"] not in JOB_TERMINAL:
            estimate = await _estimate(here, connection, row, position)
    headers = {"ETag": f"W/{_tag(row)}", "Cache-Control": "private, no-cache"}
    body = shown_job(row, tried, position) | {"estimate": estimate and estimate.as_dict()}
    if row["state"] not in JOB_TERMINAL:
        body["poll_after_seconds"] = _poll_after(here, row, estimate)
        headers["Retry-After"] = str(round(body["poll_after_seconds"]))
    return json_response(body, 200, headers | applied)


def _tag(row: db.Row) -> str:
    """The entity tag, without the mark of a weak one."""
    return f'"{row["version"] + row["children_versions"]}"'


async def cancel_job(request: Request) -> Response:
    """Cancel a job. 202 while its worker is being told, 200 when it had ended already."""
    sender = await caller(request, "jobs:write")
    known_parameters(request)
    here = services(request)
    job_id = path_id(request, ids.JOB, "job_id")
    async with db.transaction(here.pool) as connection:
        if await jobs.get(connection, sender.tenant_id, job_id) is None:
            raise Refused(Code.NOT_FOUND)
        await jobs.cancel(
            connection,
            sender.tenant_id,
            job_id,
            retention_seconds=here.settings.job_retention_seconds,
        )
        row = await jobs.get(connection, sender.tenant_id, job_id)
        assert row is not None
    status = 200 if row["state"] in JOB_TERMINAL else 202
    return json_response(shown_job(row, [], None), status, _location(job_id))


async def replay_job(request: Request) -> Response:
    """Queue a failed job again, with its history kept. 409 when it is not failed."""
    sender = await caller(request, "jobs:write")
    known_parameters(request)
    here = services(request)
    job_id = path_id(request, ids.JOB, "job_id")
    async with db.transaction(here.pool) as connection:
        row = await jobs.get(connection, sender.tenant_id, job_id)
        if row is None:
            raise Refused(Code.NOT_FOUND)
        if not await media.replay(connection, sender.tenant_id, row):
            raise Refused(
                Code.WRONG_STATE,
                "A live job has its dedup key, or its media was deleted or processed again since."
                if row["state"] == JobState.FAILED
                else f"It is {row['state']}; only a failed job can be replayed.",
            )
        row = await jobs.get(connection, sender.tenant_id, job_id)
        assert row is not None
    return json_response(shown_job(row, [], None), 202, _location(job_id))


async def cancel_matching(request: Request) -> Response:
    """Cancel all queued and processing jobs that match, for some seconds; `next` says where to go
    on."""
    here = services(request)

    async def cancel(connection: db.Connection, tenant_id: str, row: db.Row) -> bool:
        if row["cancel_requested"]:
            return False
        return await jobs.cancel(
            connection,
            tenant_id,
            row["id"],
            retention_seconds=here.settings.job_retention_seconds,
        )

    return await _in_bulk(request, [JobState.QUEUED, JobState.PROCESSING], cancel)


async def replay_matching(request: Request) -> Response:
    """Replay all failed jobs that match, for some seconds; `next` says where to go on. One whose
    media is gone or went on is passed over."""

    async def replay(connection: db.Connection, tenant_id: str, row: db.Row) -> bool:
        now = await jobs.get(connection, tenant_id, row["id"])
        return now is not None and await media.replay(connection, tenant_id, now)

    return await _in_bulk(request, [JobState.FAILED], replay)


async def _in_bulk(
    request: Request,
    states: list[str],
    act: Callable[[db.Connection, str, db.Row], Awaitable[bool]],
) -> Response:
    sender = await caller(request, "jobs:write")
    known_parameters(request)
    here = services(request)
    wanted = parse_body(Bulk, await json_body(request))
    before = None if wanted.before is None else ids.decode(ids.JOB, wanted.before)
    if wanted.before is not None and before is None:
        raise Refused(
            Code.INVALID_REQUEST,
            "before is no id of a job.",
            errors=[{"pointer": "/before", "detail": "is no id of a job"}],
        )
    changed = looked = 0
    clock = asyncio.get_running_loop().time
    deadline = clock() + _BULK_SECONDS
    ended = False
    while not ended and looked < wanted.limit and clock() < deadline:
        async with db.acquire(here.pool) as connection:
            rows = await jobs.list_newest(
                connection,
                sender.tenant_id,
                before=before,
                limit=min(_BULK_BATCH, wanted.limit - looked),
                states=states,
                kind=wanted.filter.kind,
                queue_name=wanted.filter.queue,
                error_code=wanted.filter.error_code,
                created_after=wanted.filter.created_after,
                created_before=wanted.filter.created_before,
            )
        ended = not rows
        for row in rows:
            # One transaction each: locks of several jobs at once would wait for each other.
            async with db.transaction(here.pool) as connection:
                changed += await act(connection, sender.tenant_id, row)
            before, looked = row["id"], looked + 1
            if clock() >= deadline:
                break
    body = {
        "schema_version": SCHEMA_VERSION,
        "changed": changed,
        "next": None if ended or before is None else ids.encode(ids.JOB, before),
    }
    return json_response(body)


def _location(job_id: UUID) -> dict[str, str]:
    return {"Location": f"/v1/jobs/{ids.encode(ids.JOB, job_id)}"}


def _progress(row: db.Row) -> float | None:
    """Percent; of a job that waits, the weighted progress of its children."""
    own = row["progress"]
    if row["pending_children"] and row.get("children_progress") is not None:
        own = max(own or 0.0, row["children_progress"])
    return None if own is None else round(own, 1)


def _result(row: db.Row) -> Any:
    """What the function returned; media jobs have a small object of their own."""
    result = row["result"]
    return result["value"] if row["role"] == "job" and result and "value" in result else result


def listed_job(row: db.Row) -> dict[str, Any]:
    """A job without its attempts, as lists show it."""
    return shown_job(row, [], None)


def shown_job(row: db.Row, tried: list[db.Row], position: int | None) -> dict[str, Any]:
    waits = row["state"] == JobState.QUEUED
    return {
        "schema_version": SCHEMA_VERSION,
        "id": ids.encode(ids.JOB, row["id"]),
        "state": row["state"],
        "kind": row["kind"],
        "queue": row["queue"],
        "role": row["role"],
        "stage": row["stage"],
        "progress": _progress(row),
        "position": position,
        "estimate": None,
        "poll_after_seconds": None,
        "attempt": row["attempt"],
        "max_attempts": row["max_attempts"],
        "dead_letter": row["dead_letter"],
        "cancel_requested": row["cancel_requested"],
        "media_id": row["media_id"] and ids.encode(ids.MEDIA, row["media_id"]),
        "parent_id": row["parent_id"] and ids.encode(ids.JOB, row["parent_id"]),
        "pending_children": row["pending_children"],
        "payload": row["payload"],
        "payload_version": row["schema_version"],
        "dedup_key": row["dedup_key"],
        "priority": row["priority"],
        "recipe": row["recipe"],
        "recipe_version": row["recipe_version"],
        "generation": row["generation"],
        "result": _result(row),
        "error": shown_error(row["error"]),
        "attempts": [
            {
                "attempt": a["attempt"],
                "worker": a["worker"],
                "started_at": iso_time(a["started_at"]),
                "finished_at": iso_time(a["finished_at"]),
                "outcome": a["outcome"],
                "error": shown_error(a["error"]),
            }
            for a in tried
        ],
        "run_at": iso_time(row["run_at"]) if waits else None,
        "created_at": iso_time(row["created_at"]),
        "started_at": iso_time(row["started_at"]),
        "finished_at": iso_time(row["finished_at"]),
        "expires_at": iso_time(row["expires_at"]),
    }

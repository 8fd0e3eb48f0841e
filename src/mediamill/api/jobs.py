"""/v1/jobs: one unit of background work."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mediamill import db, ids, jobs, media
from mediamill.api.services import caller, iso_time, json_response, path_id, services, shown_error
from mediamill.failures import Code, Refused
from mediamill.states import JOB_TERMINAL, JobState

SCHEMA_VERSION: Final = 1

router = APIRouter(tags=["jobs"])


async def read_job(request: Request) -> Response:
    """The status of a job, in every state."""
    sender = await caller(request, "jobs:read")
    here = services(request)
    job_id = path_id(request, ids.JOB, "job_id")
    async with db.acquire(here.pool) as connection:
        row = await jobs.get(connection, sender.tenant_id, job_id)
        if row is None:
            raise Refused(Code.NOT_FOUND)
        tried = await jobs.attempts(connection, sender.tenant_id, job_id)
        position = None
        if row["state"] == JobState.QUEUED:
            position = 1 + await jobs.position(connection, sender.tenant_id, job_id)
    headers = {"ETag": f'W/"{row["version"]}"', "Cache-Control": "private, no-cache"}
    if row["state"] not in JOB_TERMINAL:
        headers["Retry-After"] = "1"
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return json_response(_shown(row, tried, position), 200, headers)


async def cancel_job(request: Request) -> Response:
    """Cancel a job. 202 while its worker is being told, 200 when it had ended already."""
    sender = await caller(request, "jobs:write")
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
    return json_response(_shown(row, [], None), status, _location(job_id))


async def replay_job(request: Request) -> Response:
    """Queue a failed job again, with its history kept. 409 when it is not failed."""
    sender = await caller(request, "jobs:write")
    here = services(request)
    job_id = path_id(request, ids.JOB, "job_id")
    async with db.transaction(here.pool) as connection:
        row = await jobs.get(connection, sender.tenant_id, job_id)
        if row is None:
            raise Refused(Code.NOT_FOUND)
        if not await media.replay(connection, sender.tenant_id, row):
            raise Refused(
                Code.WRONG_STATE,
                "Its media was deleted, or has been processed again since."
                if row["state"] == JobState.FAILED
                else f"It is {row['state']}; only a failed job can be replayed.",
            )
        row = await jobs.get(connection, sender.tenant_id, job_id)
        assert row is not None
    return json_response(_shown(row, [], None), 202, _location(job_id))


def _location(job_id: UUID) -> dict[str, str]:
    return {"Location": f"/v1/jobs/{ids.encode(ids.JOB, job_id)}"}


def _shown(row: db.Row, tried: list[db.Row], position: int | None) -> dict[str, Any]:
    waits = row["state"] == JobState.QUEUED
    return {
        "schema_version": SCHEMA_VERSION,
        "id": ids.encode(ids.JOB, row["id"]),
        "state": row["state"],
        "kind": row["kind"],
        "queue": row["queue"],
        "role": row["role"],
        "stage": row["stage"],
        "progress": None if row["progress"] is None else round(row["progress"], 1),
        "position": position,
        "attempt": row["attempt"],
        "max_attempts": row["max_attempts"],
        "dead_letter": row["dead_letter"],
        "cancel_requested": row["cancel_requested"],
        "media_id": row["media_id"] and ids.encode(ids.MEDIA, row["media_id"]),
        "recipe": row["recipe"],
        "recipe_version": row["recipe_version"],
        "generation": row["generation"],
        "result": row["result"],
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

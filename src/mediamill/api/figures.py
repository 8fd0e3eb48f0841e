"""/v1/figures: throughput and latency of a tenant, for a chart."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from mediamill import db, jobs
from mediamill.api.services import (
    caller,
    iso_time,
    json_response,
    known_parameters,
    services,
    whole_number,
)

SCHEMA_VERSION: Final = 1
_STEPS: Final = 60
_MOST_ROWS: Final = 10_000
_MOST_MINUTES: Final = 60 * 24 * 30


class Step(BaseModel):
    """What ended from `at` to the next step. Seconds are from creation to completion."""

    at: datetime
    completed: int
    failed: int
    p50_seconds: float | None
    p95_seconds: float | None


class FiguresBody(BaseModel):
    """Steps of equal length from `since` to `until`."""

    schema_version: Literal[1]
    since: datetime = Field(
        description="Later than asked for where more has ended than is looked at."
    )
    until: datetime
    whole: bool = Field(description="Whether `since` is as early as was asked for.")
    steps: list[Step]


async def read_figures(request: Request) -> Response:
    """What completed and failed in the last `minutes` (default 60, at most 30 days), in 60 steps.

    At most 10,000 jobs of each queue are looked at, so it costs the same on any table.
    """
    sender = await caller(request, "jobs:read")
    known_parameters(request, "minutes")
    minutes = whole_number(request, "minutes", default=60, most=_MOST_MINUTES)
    back = timedelta(minutes=minutes)
    async with db.acquire(services(request).pool) as connection:
        rows = await jobs.figures(
            connection, sender.tenant_id, back=back, steps=_STEPS, most=_MOST_ROWS
        )
    since, until = rows[0]["since"], rows[0]["until"]
    body = {
        "schema_version": SCHEMA_VERSION,
        "since": iso_time(since),
        "until": iso_time(until),
        "whole": until - since >= back,
        "steps": [
            {
                "at": iso_time(row["at"]),
                "completed": row["completed"],
                "failed": row["failed"],
                "p50_seconds": row["p50_seconds"],
                "p95_seconds": row["p95_seconds"],
            }
            for row in rows
        ],
    }
    return json_response(body, 200, {"Cache-Control": "private, max-age=5"})

"""/v1/queues and /v1/workers: what an operator sees and sets while everything runs."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from mediamill import controls, db, installation
from mediamill.api.services import (
    caller,
    iso_time,
    json_body,
    json_response,
    known_parameters,
    parse_body,
    path_word,
    services,
)
from mediamill.config import QUEUES
from mediamill.controls import Control
from mediamill.failures import Code, Refused

SCHEMA_VERSION: Final = 1
_FIGURES: Final = db.load("maintenance")


class Cap(BaseModel):
    """Running jobs of the queue at once, over all workers; null leaves it to their slots."""

    model_config = ConfigDict(extra="forbid", strict=True)

    concurrency: int | None = Field(ge=1, le=1_000_000)


class QueueBody(BaseModel):
    """A queue as it is. `draining`: paused, and its last jobs still run."""

    queue: str
    queued: int
    processing: int
    oldest_seconds: float
    rate_per_minute: float = Field(description="Completed in the last five minutes, on average.")
    slots: int
    paused: bool
    draining: bool
    concurrency: int | None


class OneQueue(QueueBody):
    schema_version: Literal[1]


class QueuesBody(BaseModel):
    """Every queue."""

    schema_version: Literal[1]
    data: list[QueueBody]


class WorkerBody(BaseModel):
    """A worker that was seen lately."""

    id: str
    host: str
    pid: int
    version: str
    slots: dict[str, int]
    sandbox: str | None
    started_at: datetime
    seen_at: datetime
    draining: bool


class WorkersBody(BaseModel):
    """The oldest first."""

    schema_version: Literal[1]
    data: list[WorkerBody]


async def list_queues(request: Request) -> Response:
    """Every queue with its depth, age, slots and settings."""
    await caller(request, "operate")
    known_parameters(request)
    async with db.acquire(services(request).pool) as connection:
        body = {"schema_version": SCHEMA_VERSION, "data": await _shown(connection)}
    return json_response(body)


async def pause_queue(request: Request) -> Response:
    """Claim no more jobs of a queue, everywhere within a second. Running jobs finish: it drains."""
    return await _set(request, paused=True)


async def resume_queue(request: Request) -> Response:
    """Go on."""
    return await _set(request, paused=False)


async def cap_queue(request: Request) -> Response:
    """Cap the running jobs of a queue over all workers."""
    await caller(request, "operate")
    known_parameters(request)
    wanted = parse_body(Cap, await json_body(request))
    name = _name(request)
    async with db.transaction(services(request).pool) as connection:
        await controls.set_concurrency(connection, name, wanted.concurrency)
        return json_response(await _one(connection, name))


async def list_workers(request: Request) -> Response:
    """The workers that were seen lately."""
    await caller(request, "operate")
    known_parameters(request)
    async with db.acquire(services(request).pool) as connection:
        rows = await installation.workers(connection)
    data = [
        {
            "id": row["id"],
            "host": row["host"],
            "pid": row["pid"],
            "version": row["version"],
            "slots": row["slots"],
            "sandbox": row["sandbox"],
            "started_at": iso_time(row["started_at"]),
            "seen_at": iso_time(row["seen_at"]),
            "draining": row["stopping"] or row["drain_requested"],
        }
        for row in rows
    ]
    return json_response({"schema_version": SCHEMA_VERSION, "data": data})


async def drain_worker(request: Request) -> Response:
    """Ask a worker to finish what it runs and leave."""
    await caller(request, "operate")
    known_parameters(request)
    name = path_word(request, "worker")
    async with db.transaction(services(request).pool) as connection:
        if not await installation.request_drain(connection, name):
            raise Refused(Code.NOT_FOUND)
    return json_response({"schema_version": SCHEMA_VERSION, "id": name, "draining": True}, 202)


async def _set(request: Request, *, paused: bool) -> Response:
    await caller(request, "operate")
    name = _name(request)
    async with db.transaction(services(request).pool) as connection:
        await controls.set_paused(connection, name, paused)
        return json_response(await _one(connection, name))


def _name(request: Request) -> str:
    name: str = request.path_params["queue"]
    if name not in QUEUES:
        raise Refused(Code.NOT_FOUND, f"The queues are {', '.join(QUEUES)}.")
    return name


async def _one(connection: db.Connection, name: str) -> dict[str, Any]:
    row = next(r for r in await _shown(connection) if r["queue"] == name)
    return {"schema_version": SCHEMA_VERSION, **row}


async def _shown(connection: db.Connection) -> list[dict[str, Any]]:
    figures = {row["queue"]: row for row in await connection.fetch(_FIGURES.queue_figures)}
    rates = {
        row["queue"]: row["rate"]
        for row in await connection.fetch(_FIGURES.queue_rates, list(QUEUES))
    }
    slots = await installation.slots(connection)
    settings = await controls.read(connection)
    shown = []
    for name in QUEUES:
        row, control = figures.get(name), settings.get(name, Control())
        processing = row["processing"] if row else 0
        shown.append(
            {
                "queue": name,
                "queued": row["queued"] if row else 0,
                "processing": processing,
                "oldest_seconds": round(row["oldest_seconds"], 1) if row else 0.0,
                "rate_per_minute": round(rates[name], 2),
                "slots": slots.get(name, 0),
                "paused": control.paused,
                "draining": control.paused and processing > 0,
                "concurrency": control.concurrency,
            }
        )
    return shown

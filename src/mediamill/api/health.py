"""Is it alive, can it work, what do its figures say."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, Final

import asyncpg
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from mediamill import controls, db, estimates, installation, tallies, webhooks
from mediamill.api.services import json_response, services
from mediamill.config import QUEUES
from mediamill.failures import Code, Failure
from mediamill.observability import Metrics
from mediamill.storage import MARKER

_SQL: Final = db.load("maintenance")
_FRESH_SECONDS: Final = 5.0
_STORAGE_SECONDS: Final = 1.0


async def livez(_request: Request) -> Response:
    """The process runs; nothing else is asked."""
    return json_response({"status": "ok"})


async def readyz(request: Request) -> Response:
    """Requests can be served: the database answers with a schema that we know, and we are not
    leaving. How the storage does is told, and takes no process out of service: all of them would
    go at once, and what needs no storage with them."""
    here = services(request)
    began = time.perf_counter()
    checks: dict[str, Any] = {}
    ready = not here.shutting_down.is_set()
    if not ready:
        checks["process"] = {"status": "shutting down"}
    try:
        async with asyncio.timeout(1), db.acquire(here.pool) as connection:
            await db.check_schema(connection)
        checks["database"] = {"status": "ok", "ms": round(1000 * (time.perf_counter() - began), 1)}
    except (db.Unavailable, db.MigrationError, TimeoutError, asyncpg.PostgresError) as error:
        ready = False
        checks["database"] = {"status": type(error).__name__}
    checks["storage"] = await _storage(request)
    body = {"status": "ok" if ready else "unavailable", "checks": checks}
    return json_response(body, 200 if ready else 503, {"Cache-Control": "no-store"})


async def _storage(request: Request) -> dict[str, Any]:
    """How the storage answers a question for one small object, asked every few seconds at most."""
    state = request.app.state
    now = time.monotonic()
    if now - state.storage_asked_at > _FRESH_SECONDS:
        state.storage_asked_at = now
        try:
            async with asyncio.timeout(_STORAGE_SECONDS):
                await services(request).storage.stat(MARKER)
            found = {"status": "ok", "ms": round(1000 * (time.monotonic() - now), 1)}
        except Failure as failure:
            found = {"status": failure.code.code}
        except TimeoutError:
            found = {"status": Code.STORAGE_UNAVAILABLE.code}
        state.storage_seen = found
    seen: dict[str, Any] = state.storage_seen
    return seen


async def metrics(request: Request) -> Response:
    """Prometheus text. The database is asked at most every few seconds."""
    found: Metrics = request.app.state.metrics
    here = services(request)
    found.streams.set(here.follower.count)
    now = time.monotonic()
    if now - request.app.state.measured_at > _FRESH_SECONDS:
        request.app.state.measured_at = now
        # Without the database the figures of this process are still worth having.
        with suppress(db.Unavailable, TimeoutError):
            async with asyncio.timeout(2), db.acquire(here.pool) as connection:
                await _measure(found, connection)
    return Response(generate_latest(found.registry), media_type=CONTENT_TYPE_LATEST)


async def _measure(found: Metrics, connection: db.Connection) -> None:
    figures = {row["queue"]: row for row in await connection.fetch(_SQL.queue_figures)}
    slots = await installation.slots(connection)
    settings = await controls.read(connection)
    for queue in QUEUES:
        row = figures.get(queue)
        found.queue_jobs.labels(queue, "queued").set(row["queued"] if row else 0)
        found.queue_jobs.labels(queue, "processing").set(row["processing"] if row else 0)
        found.oldest.labels(queue).set(row["oldest_seconds"] if row else 0)
        found.paused.labels(queue).set(queue in settings and settings[queue].paused)
        found.slots.labels(queue).set(slots.get(queue, 0))
    dead = await connection.fetchrow(_SQL.dead_letters)
    assert dead is not None
    found.dead_letters.set(dead["jobs"])
    found.dead_letter_age.set(dead["oldest_seconds"])
    letters = await webhooks.figures(connection)
    found.webhook_pending.set(letters["pending"])
    found.webhook_oldest.set(letters["oldest_seconds"])
    for state in ("enabled", "disabled"):
        found.webhook_endpoints.labels(state).set(letters[state])
    found.pulled.counted = await tallies.read(connection, tallies.PULLED)
    # All of them from the start, so that a rise is one from zero.
    nothing = {(what, how): 0 for what, hows in tallies.LEFTOVERS.items() for how in hows}
    found.swept.counted = nothing | await tallies.read(connection, tallies.SWEPT)
    for kind in await estimates.record(connection, days=1):
        if kind.recipe is None or kind.kind in ("image", "video", "audio"):
            found.estimates_held.labels(kind.kind).set(kind.held)
            found.estimate_error.labels(kind.kind).set(kind.median_error)

"""The floor: what one durable INSERT behind HTTP costs here, with nothing else around it.

A bare Starlette route on the server, event loop, driver and pool size that the API uses. Run as
`floor.py PORT DSN POOL_SIZE`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from uuid import uuid4

import asyncpg
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PATH: Final = "/floor"
TABLE: Final = """
CREATE TABLE IF NOT EXISTS floor (
    id uuid PRIMARY KEY, tenant_id text NOT NULL, state text NOT NULL, kind text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
)
"""
_INSERT: Final = "INSERT INTO floor (id, tenant_id, state, kind) VALUES ($1, $2, $3, $4)"


def create_app(dsn: str, *, pool_size: int) -> Starlette:
    """The route over a pool of its own."""

    async def accept(request: Request) -> Response:
        job_id = uuid4()
        async with request.app.state.pool.acquire() as connection:
            await connection.execute(_INSERT, job_id, "default", "queued", "image")
        body = json.dumps({"id": str(job_id), "state": "queued"}).encode()
        headers = {"Location": f"{PATH}/{job_id}", "Retry-After": "1"}
        return Response(body, 202, headers, "application/json")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with asyncpg.create_pool(dsn, min_size=1, max_size=pool_size) as pool:
            app.state.pool = pool
            async with pool.acquire() as connection:
                await connection.execute(TABLE)
            yield

    return Starlette(routes=[Route(PATH, accept, methods=["POST"])], lifespan=lifespan)


def main() -> None:
    port, dsn, pool_size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    uvicorn.run(
        create_app(dsn, pool_size=pool_size),
        host="127.0.0.1",
        port=port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        server_header=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()

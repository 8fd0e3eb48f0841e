"""Rows as the API and a worker would make them, for tests that need neither process."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg

from mediamill import config, db, jobs, media, states, uploads, variants
from mediamill.config import Settings
from mediamill.handlers import Output
from mediamill.jobs import Birth, Claim
from mediamill.queue import Ticket
from mediamill.storage.local import LocalStorage

PUBLIC_URL = "http://media.test"
KEEP_SECONDS = 3600.0


@contextmanager
def fresh_database(server: str, template: str) -> Iterator[str]:
    """A migrated database for several tests; what they must not share is their tenant."""
    name = f"test_{secrets.token_hex(6)}"

    async def run(statement: str) -> None:
        connection = await asyncpg.connect(server)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    asyncio.run(run(f"CREATE DATABASE {name} TEMPLATE {template}"))
    head, mark, query = server.partition("?")
    try:
        yield f"{head.rpartition('/')[0]}/{name}{mark}{query}"
    finally:
        if os.environ.get("MEDIAMILL_TEST_DATABASE_URL"):  # the run's own server goes as a whole
            asyncio.run(run(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))


async def clear(connection: db.Connection) -> None:
    """Forget all work of every tenant, for tests that look at all of it."""
    tables = (
        "deliveries endpoints forecasts attempts jobs variants sets erasures media transitions"
        " events idempotency workers mediamill_tickets transfer_parts transfers tallies"
    )
    await connection.execute(";".join(f"DELETE FROM {table}" for table in tables.split()))


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[db.Connection]:
    connection = await db.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def pooled(dsn: str, *, size: int = 5) -> AsyncIterator[db.Pool]:
    pool = await db.open_pool(dsn, size=size)
    try:
        yield pool
    finally:
        await close(pool)


async def close(pool: db.Pool) -> None:
    try:
        async with asyncio.timeout(5):
            await pool.close()
    finally:
        pool.terminate()
        await asyncio.sleep(0)  # lets the transports close


def settings(data_dir: Path, **changes: Any) -> Settings:
    """The shipped defaults, with a folder and an address of the test's own."""
    flags = {**config.defaults(), "data_dir": data_dir, "public_url": PUBLIC_URL, **changes}
    return Settings(**flags)


async def new_tenant(connection: db.Connection) -> str:
    tenant = f"t-{secrets.token_hex(5)}"
    await connection.execute("INSERT INTO tenants (tenant_id) VALUES ($1)", tenant)
    return tenant


async def open_slot(
    connection: db.Connection, tenant: str, settings: Settings, **wanted: Any
) -> media.Slot:
    wanted = {"size": 5, "content_type": "image/png", **wanted}
    slot = uploads.slot(settings, tenant, uploads.Wanted(**wanted))
    await media.open_slot(connection, slot)
    return slot


async def accepted(
    connection: db.Connection,
    tenant: str,
    settings: Settings,
    *,
    kind: str = "image",
    births: list[Birth] | None = None,
    max_attempts: int = 5,
    version: str = "5-1-1",
) -> tuple[UUID, list[Birth]]:
    """A media in `queued` with its jobs, as after an upload."""
    slot = await open_slot(connection, tenant, settings, content_type=f"{kind}/x-test")
    born = uploads.births(kind) if births is None else births
    async with connection.transaction():
        row = await media.accept(
            connection,
            tenant,
            slot.id,
            object_version=version,
            kind=kind,
            births=born,
            max_attempts=max_attempts,
        )
    assert row is not None
    return slot.id, born


KINDS = [(kind, 1) for kind in ("image", "video", "audio", "preview")]


async def claim(
    connection: db.Connection,
    tenant: str,
    birth: Birth,
    *,
    worker: str = "worker-1",
    lease_seconds: float = 60.0,
) -> Claim:
    """Claim a job past its ticket."""
    ticket = Ticket(birth.queue, tenant, birth.id)
    found = await jobs.claim(
        connection, [ticket], worker=worker, lease_seconds=lease_seconds, kinds=KINDS
    )
    assert len(found) == 1, "the job is not claimable"
    return found[0]


async def publish(
    connection: db.Connection, store: LocalStorage, held: Claim, contents: dict[str, bytes]
) -> str:
    """End a claimed main job with these variants, as an attempt does; returns the set."""
    assert held.media_id is not None
    assert held.recipe is not None
    assert held.recipe_version is not None
    folder = store.root.parent / f"scratch-{held.id}-{held.fence}"
    folder.mkdir()
    outputs = []
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        content_type = "image/webp" if name.endswith("webp") else "application/octet-stream"
        outputs.append(Output(name, folder / name, content_type, width=8, height=6))
    items = await variants.measure(outputs)
    set_id = variants.set_id(items)
    prefix = variants.set_prefix(
        held.tenant_id, held.media_id, held.recipe, held.recipe_version, set_id
    )
    await variants.stage(store, held, items)
    await variants.reserve(connection, held, set_id)
    await variants.lay_out(store, held, prefix, items)
    async with connection.transaction():
        await jobs.complete(connection, held, {"set": set_id}, retention_seconds=KEEP_SECONDS)
        await variants.record(connection, held, set_id, prefix, items)
        assert await media.publish(connection, held, set_id=set_id, superseded_seconds=3600.0)
    await store.delete(variants.stage_prefix(held))
    return set_id


async def column(
    connection: db.Connection, table: str, name: str, tenant: str, row_id: UUID
) -> Any:
    """One column of one row."""
    statement = f"SELECT {name} FROM {table} WHERE tenant_id = $1 AND id = $2"
    return await connection.fetchval(statement, tenant, row_id)


async def tickets(connection: db.Connection, tenant: str) -> list[UUID]:
    """The jobs of a tenant that waiting tickets name, oldest ticket first."""
    rows = await connection.fetch(
        "SELECT convert_from(payload, 'UTF8') AS payload FROM mediamill_tickets"
        " WHERE status = 'queued' ORDER BY id"
    )
    split = [row["payload"].rpartition("/") for row in rows]
    return [UUID(job) for owner, _, job in split if owner == tenant]


async def moves(
    connection: db.Connection, tenant: str, subject: str, row_id: UUID
) -> list[tuple[str | None, str]]:
    """The logged moves of a media or a job, without stages."""
    rows = await connection.fetch(
        "SELECT from_state, to_state FROM transitions WHERE tenant_id = $1 AND subject = $2"
        " AND stage IS NULL AND CASE $2 WHEN 'media' THEN media_id ELSE job_id END = $3"
        " ORDER BY id",
        tenant,
        subject,
        row_id,
    )
    return [(row["from_state"], row["to_state"]) for row in rows]


def check_path(path: list[tuple[str | None, str]], subject: str) -> None:
    """A log must begin with a birth, connect, and use only legal moves."""
    legal = {
        (str(a), str(b)) for a, b in (states.JOB_MOVES if subject == "job" else states.MEDIA_MOVES)
    }
    assert path[0][0] is None, path
    for (_, before), (origin, target) in itertools.pairwise(path):
        assert origin == before, path
        assert (origin, target) in legal, path


async def events(connection: db.Connection, tenant: str) -> list[str]:
    """The types of a tenant's events, in order."""
    rows = await connection.fetch(
        "SELECT type FROM events WHERE tenant_id = $1 ORDER BY id", tenant
    )
    return [row["type"] for row in rows]


async def all_done(*works: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run together; exceptions are results."""
    return await asyncio.gather(*works, return_exceptions=True)

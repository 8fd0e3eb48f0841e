"""One uploaded original and all that is known about it: one function per statement, in life
order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from mediamill import db, ids, jobs, queue
from mediamill.failures import LeaseLost
from mediamill.jobs import Birth, Claim

_SQL: Final = db.load("media")


@dataclass(frozen=True, slots=True)
class Slot:
    """What is written when a slot opens."""

    tenant_id: str
    id: UUID
    kind: str | None
    filename: str | None
    content_type: str
    size: int
    sha256: str | None
    upload_key: str
    upload_ttl_seconds: float
    recipe: str
    recipe_version: int
    metadata: dict[str, Any]
    ttl_seconds: float | None
    max_size: int | None = None
    """For a form: `size` is 0 until its object is there."""


@dataclass(frozen=True, slots=True)
class Original:
    """What an attempt needs to know of the media that it works on."""

    id: UUID
    kind: str | None
    filename: str | None
    content_type: str
    size: int
    sha256: str | None
    upload_key: str
    object_version: str | None
    detected_type: str | None
    recipe: str
    recipe_version: int
    generation: int
    preview: dict[str, Any] | None
    deleted_at: datetime | None
    state: str
    metadata: dict[str, Any] = field(default_factory=dict)
    set_id: str | None = None
    """The complete set that readers see; None before the first one."""
    max_size: int | None = None


@dataclass(frozen=True, slots=True)
class Description:
    """What is learned about an original, each None while unknown. Sizes are as shown, in pixels."""

    kind: str | None = None
    detected_type: str | None = None
    width: int | None = None
    height: int | None = None
    duration_seconds: float | None = None
    info: dict[str, Any] | None = None
    sha256: str | None = None


async def open_slot(connection: db.Connection, slot: Slot) -> None:
    """A new media in `awaiting_upload`."""
    await connection.fetchval(
        _SQL.open,
        slot.tenant_id,
        slot.id,
        slot.kind,
        slot.filename,
        slot.content_type,
        slot.size,
        slot.sha256,
        slot.upload_key,
        timedelta(seconds=slot.upload_ttl_seconds),
        slot.recipe,
        slot.recipe_version,
        slot.metadata,
        None if slot.ttl_seconds is None else timedelta(seconds=slot.ttl_seconds),
        slot.max_size,
    )


async def accept(
    connection: db.Connection,
    tenant_id: str,
    media_id: UUID,
    *,
    object_version: str,
    kind: str | None,
    births: Sequence[Birth],
    max_attempts: int,
    stored_at: datetime | None = None,
    size: int | None = None,
) -> db.Row | None:
    """awaiting_upload → uploaded → queued, with its jobs and their tickets; None if not first.

    `stored_at` is when the object was stored, and `size` what it has, where these are news. Run
    inside a transaction: the rows and the tickets come into being together.
    """
    row = await connection.fetchrow(
        _SQL.accept,
        tenant_id,
        media_id,
        object_version,
        kind,
        [b.id for b in births],
        [b.kind for b in births],
        [b.queue for b in births],
        [b.role for b in births],
        [b.priority for b in births],
        max_attempts,
        stored_at,
        size,
    )
    if row is not None:
        turns = row["turns"]
        await queue.publish(connection, [b.ticket(tenant_id, turns[str(b.id)]) for b in births])
    return row


async def add_job(
    connection: db.Connection, tenant_id: str, media_id: UUID, birth: Birth, *, max_attempts: int
) -> None:
    """One more job for an accepted media, with its ticket."""
    turn = await connection.fetchval(
        _SQL.add_jobs,
        tenant_id,
        media_id,
        birth.id,
        birth.kind,
        birth.queue,
        birth.role,
        birth.priority,
        max_attempts,
    )
    if turn is not None:
        await queue.publish(connection, [birth.ticket(tenant_id, turn)])


async def expire(connection: db.Connection, tenant_id: str, media_id: UUID) -> bool:
    """awaiting_upload → expired."""
    return bool(await connection.fetchval(_SQL.expire, tenant_id, media_id))


async def reprocess(
    connection: db.Connection,
    tenant_id: str,
    media_id: UUID,
    *,
    recipe: str,
    recipe_version: int,
    birth: Birth,
    max_attempts: int,
) -> int | None:
    """ready or failed → queued under a new generation; None if its state does not allow it."""
    row = await connection.fetchrow(
        _SQL.reprocess,
        tenant_id,
        media_id,
        birth.id,
        recipe,
        recipe_version,
        birth.kind,
        birth.queue,
        max_attempts,
    )
    if row is None:
        return None
    await queue.publish(connection, [birth.ticket(tenant_id, row["turn"])])
    return int(row["generation"])


async def replay(
    connection: db.Connection, tenant_id: str, job: db.Row, *, delay_seconds: float = 0.0
) -> bool:
    """Replay a failed job; its media goes with it into a new generation if it was the main one.

    False if the job is not failed, or the media has moved on or was deleted. Run inside a
    transaction.
    """
    generation = job["generation"]
    if job["media_deleted_at"] is not None:
        return False
    if job["role"] == "main":
        generation = await connection.fetchval(
            _SQL.replayed, tenant_id, job["media_id"], generation, job["id"]
        )
        if generation is None:
            return False
    return await jobs.restart(
        connection, tenant_id, job["id"], generation=generation, delay_seconds=delay_seconds
    )


async def describe(connection: db.Connection, held: Claim, found: Description) -> None:
    """Show what the probe found. Raises LeaseLost when the job is no longer held."""
    row = await connection.fetchval(
        _SQL.describe,
        held.tenant_id,
        held.media_id,
        held.id,
        held.fence,
        found.kind,
        found.detected_type,
        found.width,
        found.height,
        found.duration_seconds,
        found.info,
        found.sha256,
    )
    if row is None:
        raise LeaseLost


async def show_preview(
    connection: db.Connection, held: Claim, preview: dict[str, Any], found: Description
) -> None:
    """Show the placeholder and what it told about the size. Raises LeaseLost."""
    row = await connection.fetchval(
        _SQL.preview,
        held.tenant_id,
        held.media_id,
        held.id,
        held.fence,
        preview,
        found.width,
        found.height,
        found.duration_seconds,
    )
    if row is None:
        raise LeaseLost


async def publish(
    connection: db.Connection, held: Claim, *, set_id: str, superseded_seconds: float
) -> bool:
    """processing → ready with this set; False if the media was deleted or moved on meanwhile."""
    return bool(
        await connection.fetchval(
            _SQL.publish,
            held.tenant_id,
            held.media_id,
            held.generation,
            set_id,
            held.id,
            timedelta(seconds=superseded_seconds),
        )
    )


async def version(connection: db.Connection, tenant_id: str, media_id: UUID) -> db.Row | None:
    """The version of a media and what a waiting client must know: one indexed read."""
    return await connection.fetchrow(_SQL.version, tenant_id, media_id)


async def publish_early(
    connection: db.Connection,
    held: Claim,
    *,
    set_id: str,
    names: Sequence[str],
    superseded_seconds: float,
) -> bool:
    """Let readers see a first set while the media stays `processing`; False if it was deleted,
    moved on, or has a complete set."""
    return bool(
        await connection.fetchval(
            _SQL.publish_early,
            held.tenant_id,
            held.media_id,
            held.generation,
            set_id,
            held.id,
            timedelta(seconds=superseded_seconds),
            list(names),
        )
    )


async def get(connection: db.Connection, tenant_id: str, media_id: UUID) -> db.Row | None:
    """Everything that the status shows; also for a tombstone (`deleted_at` is set)."""
    return await connection.fetchrow(_SQL.get, tenant_id, media_id)


async def original(connection: db.Connection, tenant_id: str, media_id: UUID) -> Original | None:
    """What an attempt works on; None when the row is gone."""
    row = await connection.fetchrow(_SQL.for_work, tenant_id, media_id)
    return None if row is None else Original(**dict(row))


async def list_newest(
    connection: db.Connection,
    tenant_id: str,
    *,
    before: UUID | None,
    limit: int,
    states: Sequence[str] | None = None,
    kind: str | None = None,
    recipe: str | None = None,
    error_code: str | None = None,
    created_after: datetime | None = None,
    created_before: datetime | None = None,
) -> list[db.Row]:
    """Newest first, below the cursor `before`; a filter that is None does not restrict."""
    first, last = ids.span(created_after, created_before)
    if before is not None:
        last = min(last, UUID(int=before.int - 1))
    return await connection.fetch(
        _SQL.list,
        tenant_id,
        last,
        states,
        kind,
        recipe,
        error_code,
        created_after,
        created_before,
        limit,
        first,
    )


async def delete(connection: db.Connection, tenant_id: str, media_id: UUID, *, reason: str) -> bool:
    """Leave a tombstone and condemn the bytes; False if it was deleted before."""
    return bool(await connection.fetchval(_SQL.delete, tenant_id, media_id, reason))


async def timeline(connection: db.Connection, tenant_id: str, media_id: UUID) -> list[db.Row]:
    """Every logged move and stage of the media and its jobs, in order."""
    return await connection.fetch(_SQL.timeline, tenant_id, media_id)


async def main_jobs(connection: db.Connection, tenant_id: str, media_id: UUID) -> list[UUID]:
    """The jobs that moved or move the media, one per recipe version and generation."""
    return [row["id"] for row in await connection.fetch(_SQL.main_jobs, tenant_id, media_id)]

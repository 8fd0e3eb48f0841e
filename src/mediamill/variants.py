"""Results: from verified files in scratch to a published set that readers see whole or not at all.

Storage cannot check fences, so outputs are staged under the attempt's own prefix and copied to
keys that name their content; the manifest rows and the final state come last, in one transaction
that checks the fence. Whoever loses the lease in between has overwritten nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

from mediamill import db, ids, storage
from mediamill.failures import Code, Failure
from mediamill.handlers import Output
from mediamill.jobs import Claim

_SQL: Final = db.load("variants")
_SET_DIGITS: Final = 20


@dataclass(frozen=True, slots=True)
class Item:
    """An output with what is true of its bytes."""

    output: Output
    bytes: int
    sha256: str


def stage_prefix(claim: Claim) -> str:
    """Where one attempt stages; names the fence, so a sweep can tell whether it is still at
    work."""
    return f"{storage.STAGE}/{claim.tenant_id}/{claim.id}.{claim.fence}"


def media_prefix(tenant_id: str, media_id: UUID) -> str:
    return f"{storage.MEDIA}/{tenant_id}/{media_id}"


def set_prefix(
    tenant_id: str, media_id: UUID, recipe: str, recipe_version: int, set_id: str
) -> str:
    return f"{media_prefix(tenant_id, media_id)}/{recipe}-v{recipe_version}/{set_id}"


async def measure(outputs: Sequence[Output]) -> list[Item]:
    """Size and hash of each output, as it will be published."""

    def one(output: Output) -> Item:
        # A tool wrote it: what is no plain file of ours is not followed.
        fd = os.open(output.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Failure(Code.OUTPUT_INVALID, "An output is no file.")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return Item(output, os.fstat(fd).st_size, digest)

    return await asyncio.to_thread(lambda: [one(output) for output in outputs])


def set_id(items: Sequence[Item]) -> str:
    """A short digest of the outputs' names and hashes: the same outputs give the same keys."""
    lines = sorted(f"{item.output.name} {item.sha256}" for item in items)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_SET_DIGITS]


async def stage(store: storage.Storage, claim: Claim, items: Sequence[Item]) -> None:
    """Store the outputs under the attempt's own prefix."""
    prefix = stage_prefix(claim)
    await asyncio.gather(
        *(_put(store, f"{prefix}/{item.output.name}", item.output.path) for item in items)
    )


async def lay_out(store: storage.Storage, claim: Claim, prefix: str, items: Sequence[Item]) -> None:
    """Copy what is staged to its published keys. An object that is there must be the same one."""
    staged = stage_prefix(claim)

    async def copy(item: Item) -> None:
        key = f"{prefix}/{item.output.name}"
        try:
            await store.copy(f"{staged}/{item.output.name}", key)
        except storage.AlreadyStored:
            there = await store.stat(key)
            if there is None or there.size != item.bytes:
                raise Failure(
                    Code.OUTPUT_INVALID, "A published object differs from its name."
                ) from None

    await asyncio.gather(*(copy(item) for item in items))


async def reserve(connection: db.Connection, claim: Claim, set_: str) -> None:
    """Name the set before its objects are laid out, so that a sweep finds what a crash leaves."""
    await connection.execute(
        _SQL.reserve, claim.tenant_id, claim.media_id, claim.recipe, claim.recipe_version, set_
    )


def pieces_prefix(claim: Claim) -> str:
    """Where children leave files for their parent: beside the sets, so that they go with them."""
    assert claim.media_id is not None
    assert claim.recipe is not None
    assert claim.recipe_version is not None
    return set_prefix(
        claim.tenant_id, claim.media_id, claim.recipe, claim.recipe_version, _pieces(claim)
    )


async def reserve_pieces(connection: db.Connection, claim: Claim) -> None:
    """Name the place before anything is there; it goes some days later if the parent never does."""
    key = claim.tenant_id, claim.media_id, claim.recipe, claim.recipe_version
    await connection.execute(_SQL.reserve_pieces, *key, _pieces(claim))


async def forget_pieces(connection: db.Connection, claim: Claim) -> bool:
    """Whether the children of a job had left anything."""
    key = claim.tenant_id, claim.media_id, claim.recipe, claim.recipe_version
    return bool(await connection.fetchval(_SQL.forget_pieces, *key, _pieces(claim)))


def _pieces(claim: Claim) -> str:
    return f"pieces-{claim.parent_id or claim.id}"


async def withdraw(
    connection: db.Connection, store: storage.Storage, claim: Claim, set_: str, prefix: str
) -> None:
    """Remove what was laid out of a set that is in no row any more, in the caller's transaction.

    An attempt that lost its job may have laid it out after the media was deleted and erased.
    """
    key = claim.tenant_id, claim.media_id, claim.recipe, claim.recipe_version, set_
    if await connection.fetchval(_SQL.withdraw, *key):
        await store.delete(prefix)
        await connection.execute(_SQL.forget_withdrawn, *key)


async def record(
    connection: db.Connection, claim: Claim, set_: str, prefix: str, items: Sequence[Item]
) -> None:
    """Write the manifest: the set and its variants, in the order of the outputs."""
    await connection.execute(
        _SQL.add_set, claim.tenant_id, claim.media_id, claim.recipe, claim.recipe_version, set_
    )
    await connection.execute(
        _SQL.add_variants,
        claim.tenant_id,
        claim.media_id,
        claim.recipe,
        claim.recipe_version,
        set_,
        [ids.new() for _ in items],
        [item.output.name for item in items],
        [f"{prefix}/{item.output.name}" for item in items],
        [item.output.content_type for item in items],
        [item.bytes for item in items],
        [item.sha256 for item in items],
        [item.output.width for item in items],
        [item.output.height for item in items],
        [item.output.duration_seconds for item in items],
        [item.output.seconds for item in items],
    )


async def current(
    connection: db.Connection, tenant_id: str, media_id: UUID, name: str
) -> db.Row | None:
    """One variant of the set that readers see now."""
    return await connection.fetchrow(_SQL.current, tenant_id, media_id, name)


async def by_key(connection: db.Connection, key: str) -> db.Row | None:
    """The manifest row of a published key; None for anything that was never published or is
    deleted."""
    parts = key.split("/")
    if len(parts) < 6 or parts[0] != storage.MEDIA:
        return None
    try:
        media_id = UUID(parts[2])
    except ValueError:
        return None
    return await connection.fetchrow(_SQL.by_key, parts[1], media_id, key)


async def _put(store: storage.Storage, key: str, path: Path) -> None:
    try:
        await store.put(key, path)
    except storage.AlreadyStored:
        # The prefix is ours alone: an earlier try of this very attempt put it there.
        await store.delete(key)
        await store.put(key, path)

"""What an operator sets while everything runs (paused queues, caps over the whole fleet), and what
the workers offer to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from mediamill import db

_SQL: Final = db.load("queues")

OFFER_SECONDS: Final = 60.0
"""How often a worker says again what it offers."""
_OFFERED_NOW: Final = timedelta(seconds=5 * OFFER_SECONDS)
_KNOWN: Final = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Control:
    """One queue's settings. `concurrency` caps running jobs over all workers; None does not."""

    paused: bool = False
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of job in one version of its payload: where it waits and how it is run by default."""

    kind: str
    version: int
    queue: str
    max_attempts: int
    timeout_seconds: float | None = None
    concurrency: int | None = None


async def read(connection: db.Connection) -> dict[str, Control]:
    """The queues that anything was set for."""
    rows = await connection.fetch(_SQL.controls)
    return {row["queue"]: Control(row["paused"], row["concurrency"]) for row in rows}


async def set_paused(connection: db.Connection, queue: str, paused: bool) -> None:
    """Stop or go on to claim jobs of a queue, everywhere within a second; running jobs go on."""
    await connection.execute(_SQL.set_paused, queue, paused)


async def set_concurrency(connection: db.Connection, queue: str, most: int | None) -> None:
    """Cap the running jobs of a queue over all workers; None lifts the cap."""
    await connection.execute(_SQL.set_concurrency, queue, most)


async def offer(connection: db.Connection, kinds: Sequence[Kind]) -> None:
    """Tell what this worker can do, so that jobs of these kinds are accepted."""
    await connection.execute(
        _SQL.offer,
        [k.kind for k in kinds],
        [k.version for k in kinds],
        [k.queue for k in kinds],
        [k.max_attempts for k in kinds],
        [k.timeout_seconds for k in kinds],
        [k.concurrency for k in kinds],
    )


async def offered(connection: db.Connection, kind: str) -> list[Kind]:
    """The known versions of a kind, newest first."""
    return [Kind(**dict(row)) for row in await connection.fetch(_SQL.offered, kind)]


async def offered_kinds(connection: db.Connection) -> list[str]:
    """Every kind that a worker has offered in the last 30 days."""
    return [row["kind"] for row in await connection.fetch(_SQL.offered_kinds)]


async def limits(connection: db.Connection) -> tuple[dict[str, Control], dict[str, int]]:
    """The queues that anything was set for, and the kinds that are offered now with a cap over the
    whole fleet."""
    rows = await connection.fetch(_SQL.limits, _OFFERED_NOW)
    return (
        {r["queue"]: Control(r["paused"], r["concurrency"]) for r in rows if r["kind"] is None},
        {r["kind"]: r["concurrency"] for r in rows if r["kind"] is not None},
    )


async def forget(connection: db.Connection) -> None:
    """Drop the kinds that no worker has offered for 30 days."""
    await connection.execute(_SQL.forget_kinds, _KNOWN)

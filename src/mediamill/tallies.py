"""Counters of the whole installation: kept in the database, since only the API shows metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from mediamill import db

_SQL: Final = db.load("tallies")

SWEPT: Final = "media_swept_total"
PULLED: Final = "media_pulled_events_total"

LEFTOVERS: Final = {
    "slot": ("accepted", "expired", "failed"),
    "media": ("expired", "erased", "failed"),
    "set": ("removed", "failed"),
    "staged": ("removed", "failed"),
    "part": ("removed", "failed"),
    "original": ("removed", "failed"),
    "tus": ("removed", "failed"),
    "multipart": ("removed", "failed"),
    "fetch": ("removed", "failed"),
    "job": ("forgotten",),
    "event": ("forgotten",),
    "delivery": ("forgotten",),
    "endpoint": ("forgotten",),
    "idempotency_key": ("forgotten",),
}
"""What the duties sweep, and how it can go."""

Tally: TypeAlias = Mapping[tuple[str, str], int]
"""How many, by what and outcome."""


async def add(connection: db.Connection, name: str, counted: Tally) -> None:
    """Count on. Rows stay locked until the caller's transaction ends: keep it short."""
    found = [(what, outcome, count) for (what, outcome), count in counted.items() if count]
    if found:
        kinds, outcomes, counts = zip(*found, strict=True)
        await connection.execute(_SQL.add, name, kinds, outcomes, counts)


async def read(connection: db.Connection, name: str) -> dict[tuple[str, str], int]:
    """All that was counted under this name."""
    rows = await connection.fetch(_SQL.read, name)
    return {(row["what"], row["outcome"]): row["count"] for row in rows}

"""Counters of the whole installation: kept in the database, since only the API shows metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from mediamill import db

_SQL: Final = db.load("tallies")

SWEPT: Final = "media_swept_total"
PULLED: Final = "media_pulled_events_total"

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

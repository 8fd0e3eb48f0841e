"""The shop's own tables, in the same database as Mediamill's, and some orders to work on."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

import asyncpg

if TYPE_CHECKING:  # asyncpg's classes are generic in their stubs only
    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]
else:
    Connection = asyncpg.Connection

REGIONS: Final = ("north", "south", "west")
MONTH: Final = "2026-09"

# The ledger has no unique constraint on purpose: that each order stands in it once is the doing of
# `job.transaction`, and the demonstration counts.
_CREATE: Final = """
CREATE TABLE IF NOT EXISTS shop_orders (
    id int PRIMARY KEY, month text NOT NULL, region text NOT NULL, email text NOT NULL,
    cents int NOT NULL);
CREATE TABLE IF NOT EXISTS shop_closings (month text PRIMARY KEY, settlement text NOT NULL);
CREATE TABLE IF NOT EXISTS shop_ledger (
    order_id int NOT NULL, charge text NOT NULL, cents int NOT NULL, job text NOT NULL);
"""


async def create(connection: Connection, *, orders: int = 12) -> None:
    """Make the tables, with so many orders of one month."""
    await connection.execute(_CREATE)
    await connection.executemany(
        "INSERT INTO shop_orders VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING",
        [
            (n, MONTH, REGIONS[n % len(REGIONS)], f"customer{n}@example.org", 1000 + 25 * n)
            for n in range(1, orders + 1)
        ],
    )


@asynccontextmanager
async def connected() -> AsyncIterator[Connection]:
    """A connection of the shop's own, for what a job reads."""
    connection = await asyncpg.connect(os.environ["SHOP_DATABASE_URL"])
    try:
        yield connection
    finally:
        await connection.close()

"""The application that bench_queue.py runs: jobs that do nothing, or wait a little."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from mediamill import Job, Mill

mill = Mill()


@mill.job("bench.noop")
async def noop(job: Job) -> None:
    """Nothing at all: what is measured is the engine."""


@mill.job("bench.stamp")
async def stamp(job: Job) -> float:
    """When it was called, by this machine's clock."""
    return time.time()


@mill.job("bench.sleep")
async def sleep(job: Job, payload: dict[str, Any]) -> None:
    """Holds a slot for `seconds`, and uses nothing."""
    await asyncio.sleep(payload.get("seconds", 600.0))


@mill.job("bench.capped", concurrency=1)
async def capped(job: Job, payload: dict[str, Any]) -> None:
    """As `bench.sleep`, and one at a time in the whole fleet."""
    await asyncio.sleep(payload.get("seconds", 600.0))

"""Jobs that take a random time, for the calibration of forecasts."""

from __future__ import annotations

import asyncio
import random

from mediamill import Job, Mill

mill = Mill()


@mill.job("bench.quick")
async def quick(job: Job) -> None:
    await asyncio.sleep(random.lognormvariate(-2.0, 0.4))


@mill.job("bench.slow")
async def slow(job: Job) -> None:
    await asyncio.sleep(random.lognormvariate(-0.5, 0.6))

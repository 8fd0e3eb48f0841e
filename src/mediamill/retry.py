"""What happens after a failed attempt: one pure decision."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, assert_never

from mediamill.failures import Verdict

BASE_SECONDS: Final = 1.0
CAP_SECONDS: Final = 60.0
RESOURCE_RETRIES: Final = 1
HOLD_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Retry:
    """Queue the job again, to run no earlier than `delay_seconds` from now."""

    delay_seconds: float


@dataclass(frozen=True, slots=True)
class Hold:
    """The same, but the attempt does not count: nothing is wrong with the job."""

    delay_seconds: float


@dataclass(frozen=True, slots=True)
class Fail:
    """End the job as failed; `dead_letter` when it was its attempts that ran out."""

    dead_letter: bool


Decision = Retry | Hold | Fail


def decide(
    verdict: Verdict,
    *,
    attempt: int,
    max_attempts: int,
    crashes: int,
    max_crashes: int,
    resource_failures: int,
    uniform: Callable[[float, float], float] = random.uniform,
) -> Decision:
    """Decide about a job whose attempt number `attempt` (from 1) just failed.

    `crashes` and `resource_failures` count this attempt too.
    """
    match verdict:
        case Verdict.PERMANENT:
            return Fail(dead_letter=False)
        case Verdict.RESOURCE:
            if resource_failures > RESOURCE_RETRIES or attempt >= max_attempts:
                return Fail(dead_letter=True)
            return Retry(backoff(attempt, uniform))
        case Verdict.CRASH:
            if crashes >= max_crashes or attempt >= max_attempts:
                return Fail(dead_letter=True)
            return Retry(0.0)  # the lease already cost its time
        case Verdict.HELD:
            return Hold(uniform(0.5, 1.0) * HOLD_SECONDS)
        case Verdict.TRANSIENT:
            if attempt >= max_attempts:
                return Fail(dead_letter=True)
            return Retry(backoff(attempt, uniform))
        case _:
            assert_never(verdict)


def backoff(attempt: int, uniform: Callable[[float, float], float] = random.uniform) -> float:
    """uniform(0.5, 1) · min(2^(attempt−1), 60) seconds, for attempts from 1."""
    return uniform(0.5, 1.0) * min(BASE_SECONDS * 2.0 ** min(attempt - 1, 10), CAP_SECONDS)

"""How the handlers of video and sound run their tools: the limits, the meter, what an end means."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from mediamill import tools
from mediamill.failures import Code, Failure
from mediamill.handlers import Work
from mediamill.sandbox import Jail, Limits
from mediamill.tools import Command, Finished

T = TypeVar("T")

STALL_SECONDS: Final = 120.0
QUIET: Final = ("-hide_banner", "-nostdin", "-loglevel", "warning", "-y")
PROGRESS: Final = ("-nostats", "-progress", "pipe:1", "-stats_period", "0.5")
NO_METADATA: Final = (
    *("-sn", "-dn", "-map_metadata", "-1", "-map_chapters", "-1", "-fflags", "+bitexact"),
    *("-flags:v", "+bitexact", "-flags:a", "+bitexact"),
)
# An output of ours that a later step reads again, by its name in the scratch folder.
OWN_INPUT: Final = ("-protocol_whitelist", "file", "-format_whitelist", "mov,matroska,webm,ogg,mp3")


class Meter:
    """One progress for several runs. Each has a share of `total` and lies between 5 and 95 %."""

    def __init__(self, work: Work, total: float) -> None:
        self._work = work
        self._total = total or 1.0
        self._done = 0.0
        self._at_work: list[list[float]] = []

    def watch(self, share: float, seconds: float | None) -> Callable[[str], bool]:
        """Reads `-progress`: out_time against the expected seconds. Unknown lengths show no
        percent; the answer says whether it moved, for the stall clock."""
        last = 0
        run = [share, 0.0]
        self._at_work.append(run)

        def line(text: str) -> bool:
            nonlocal last
            name, _, value = text.partition("=")
            if name not in ("out_time_us", "frame", "total_size") or not value.isdigit():
                return False
            if name != "out_time_us" or int(value) <= last:
                return False
            last = int(value)
            if seconds:
                run[1] = share * min(last / 1e6 / seconds, 1.0)
                self._show()
            return True

        return line

    def finish(self, share: float) -> None:
        """A run of that share is over."""
        self._done += share
        run = next((run for run in self._at_work if run[0] == share), None)
        if run is not None:
            self._at_work.remove(run)
        self._show()

    def _show(self) -> None:
        done = self._done + sum(part for _, part in self._at_work)
        self._work.progress(5 + 90 * min(done / self._total, 1.0))


def jail(
    work: Work,
    *,
    wall_seconds: float,
    write: bool = False,
    file_bytes: int = 256 << 20,
    scratch_bytes: int | None = None,
) -> Jail:
    """Limits of one run; the wall clock is scaled by the operator's factor."""
    wall = wall_seconds * work.settings.time_limit_factor
    return Jail(
        Limits(
            memory_bytes=work.settings.tool_memory_bytes,
            cpu_seconds=int(wall * 8) + 10,  # threads: the wall clock is the real limit
            file_bytes=file_bytes,
            wall_seconds=wall,
            scratch_bytes=scratch_bytes,
        ),
        write=(work.out,) if write else (),
    )


async def run(work: Work, command: Command, confined: Jail, **watch: Any) -> Finished:
    """Run a tool that must succeed. Raises the Failure that its end stands for."""
    finished = await work.run_tool(command, confined, **watch)
    if finished.stopped_for is not None or finished.returncode != 0:
        raise failure(finished, command, confined)
    return finished


def failure(finished: Finished, command: Command, confined: Jail) -> Failure:
    """What the end of a run stands for."""
    known = tools.classify(finished, tool=command.tool, limits=confined.limits)
    return known or Failure(Code.TOOL_FAILED)


async def together(*works: Coroutine[Any, Any, T]) -> list[T]:
    """Run them at once. The first that fails ends the others, and is raised after they ended."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class Pace:
    """How fast this process encodes, learned from its own runs.

    The unit is work: pixels of output at the default preset of the default codec.
    """

    def __init__(self) -> None:
        self._rate = 20e6  # what one slow core does, until the first run has told

    def seconds(self, work: float) -> float:
        """How long that much work should take."""
        return work / self._rate

    def learn(self, work: float, seconds: float) -> None:
        """A run of that much work took so long."""
        if seconds >= 0.5 and work > 0:
            self._rate += 0.3 * (work / seconds - self._rate)

    def limit(self, work: float) -> float:
        """The wall clock for it, in seconds: generous, since a machine may be busy, and finite."""
        return 120 + 12 * self.seconds(work)


PACE: Final = Pace()

"""How the handlers of video and sound run their tools: the limits, the meter, what an end means."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from mediamill import tools
from mediamill.failures import Code, Failure
from mediamill.handlers import Work
from mediamill.sandbox import Jail, Limits
from mediamill.tools import Command, Finished

T = TypeVar("T")

STALL_SECONDS: Final = 120.0
_NICE: Final = 10
_PREVIEW_NICE: Final = 2
QUIET: Final = ("-hide_banner", "-nostdin", "-loglevel", "warning", "-y")
# More of it than that must decode; some errors are common in recordings, and told as a warning.
TOLERANT: Final = ("-max_error_rate", "0.1")
PROGRESS: Final = ("-nostats", "-progress", "pipe:1", "-stats_period", "0.5")
NO_METADATA: Final = (
    *("-sn", "-dn", "-map_metadata", "-1", "-map_chapters", "-1", "-fflags", "+bitexact"),
    *("-flags:v", "+bitexact", "-flags:a", "+bitexact"),
)
# An output of ours that a later step reads again, by its name in the scratch folder.
OWN_INPUT: Final = ("-protocol_whitelist", "file", "-format_whitelist", "mov,matroska,webm,ogg,mp3")


class Meter:
    """One progress for several runs, and how far each of them is. Each has a share of `total`; all
    lie between 5 and 95 %."""

    def __init__(self, work: Work, total: float) -> None:
        self._work = work
        self._total = total or 1.0
        self._done = 0.0
        self._runs: list[Run] = []

    def watch(self, names: Sequence[str], share: float, seconds: float | None) -> Run:
        """A run that makes these outputs begins; `seconds` is how long they will be, if known."""
        run = Run(self._show, tuple(names), share, seconds)
        self._runs.append(run)
        return run

    def finish(self, run: Run) -> None:
        """It is over."""
        self._runs.remove(run)
        self.skip(run.share)

    def skip(self, share: float) -> None:
        """That much is done, by others."""
        self._done += share
        self._show()

    def _show(self) -> None:
        done = self._done + sum(run.share * run.part for run in self._runs)
        outputs = [shown for run in self._runs for shown in run.as_dicts()]
        percent = 5 + 90 * min(done / self._total, 1.0)
        self._work.progress(percent, {"outputs": outputs})


class Run:
    """One run of ffmpeg: reads its `-progress`, line by line."""

    def __init__(
        self,
        show: Callable[[], None],
        names: tuple[str, ...],
        share: float,
        seconds: float | None,
    ) -> None:
        self.share = share
        self.part = 0.0
        self._show = show
        self._names = names
        self._seconds = seconds
        self._at = 0
        self._speed: float | None = None

    def line(self, text: str) -> bool:
        """Takes note of a line; whether it shows that the run moved, for the stall clock."""
        name, _, value = text.partition("=")
        if name == "speed":
            with suppress(ValueError):
                self._speed = float(value.strip().removesuffix("x"))
            return False
        if name != "out_time_us" or not value.isdigit() or int(value) <= self._at:
            return False
        # It is the furthest of all outputs: with sound it may be ahead, and never falls.
        self._at = int(value)
        if self._seconds:
            self.part = min(self._at / 1e6 / self._seconds, 1.0)
        self._show()
        return True

    def as_dicts(self) -> list[dict[str, Any]]:
        """How far each of its outputs is."""
        left = None
        if self._seconds and self._speed:
            left = round(max(self._seconds - self._at / 1e6, 0.0) / self._speed, 1)
        percent = round(100 * self.part, 1) if self._seconds else None
        return [
            {"name": name, "percent": percent, "speed": self._speed, "seconds_left": left}
            for name in self._names
        ]


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
        # Short, and somebody looks at a page that is still empty: before the encoders.
        nice=_PREVIEW_NICE if work.claim.role == "preview" else _NICE,
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


_DAMAGE: Final = re.compile(
    r"error while decoding|Invalid NAL|Packet corrupt|corrupt decoded frame|concealing \d+"
    r"|Invalid data found|missing picture|Error submitting packet|decode_slice_header error"
    r"|non-existing [PS]PS|Error splitting the input|invalid band type|channel element .* not"
)


def damaged(finished: Finished) -> bool:
    """Whether a run that ended well met data on its way that could not be decoded."""
    return _DAMAGE.search(finished.stderr_head + finished.stderr_tail) is not None


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
        self._rate = 40e6  # what one core does, until the first run has told

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

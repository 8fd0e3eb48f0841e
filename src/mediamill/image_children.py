"""Starts the image processes of a pool in a jail that shows them no file but their own runtime."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import Final

from mediamill.config import Settings
from mediamill.failures import Code, Failure
from mediamill.image_pool import DEFAULT_MAX_JOBS, Child, ImagePool
from mediamill.sandbox import Jail, Limits, Sandbox
from mediamill.tools import Command, Finished, ProcessGroups, Toolbox, classify, run

_DAY: Final = 86_400
_MAX_OUTPUT_BYTES: Final = 256 << 20
_LAST_WORDS: Final = 4096


class ImageChild:
    """One image process, as the pool sees it."""

    def __init__(self, name: str, groups: ProcessGroups, task: asyncio.Task[Finished]) -> None:
        self._name = name
        self._groups = groups
        self._task = task
        self.pid = 0  # known to the tool runner only

    @property
    def returncode(self) -> int | None:
        if not self._task.done():
            return None
        return -1 if self._task.cancelled() else self._task.result().returncode

    def kill(self) -> None:
        self._groups.kill(self._name)

    def explain(self, limits: Limits) -> Failure:
        """Why it died, as its starter saw it, with its last words as a note."""
        crashed = Failure(Code.TOOL_FAILED, "The decoder crashed on this file.")
        if not self._task.done() or self._task.cancelled() or self._task.exception():
            return crashed
        finished = self._task.result()
        failure = classify(finished, tool="python", limits=limits) or crashed
        failure.add_note(finished.stderr_tail[-_LAST_WORDS:].strip())
        return failure

    async def wait(self) -> int:
        try:
            return (await asyncio.shield(self._task)).returncode
        except Failure:
            return -1


def confined_pool(
    settings: Settings,
    toolbox: Toolbox,
    sandbox: Sandbox,
    groups: ProcessGroups,
    *,
    size: int,
    max_jobs: int = DEFAULT_MAX_JOBS,
) -> ImagePool:
    """The image processes of this worker, each in a jail of its own."""
    numbers = itertools.count(1)
    jail = Jail(
        Limits(
            memory_bytes=settings.image_memory_bytes,
            cpu_seconds=_DAY,  # it serves many pictures; each has a wall clock of its own
            file_bytes=_MAX_OUTPUT_BYTES,
            wall_seconds=_DAY,
        )
    )

    def explain(child: Child) -> Failure:
        assert isinstance(child, ImageChild)
        return child.explain(jail.limits)

    async def spawn(argv: list[str], fds: tuple[int, ...]) -> ImageChild:
        name = f"image-child-{next(numbers)}"
        # The process starts a moment after this returns, when the pool has closed its copy. Ours is
        # closed with the process, which also tells the pool of its end.
        (given,) = fds
        kept = os.dup(given)
        arguments = tuple(str(kept) if a == str(given) else a for a in argv[1:])
        command = Command("python", arguments, label=name, pass_fds=(kept,))
        run_ = run(
            command, jail=jail, toolbox=toolbox, sandbox=sandbox, registry=groups, owner=name
        )
        task = asyncio.create_task(run_, name=name)

        def ended(_: asyncio.Task[Finished]) -> None:
            os.close(kept)
            groups.forget(name)

        task.add_done_callback(ended)
        return ImageChild(name, groups, task)

    return ImagePool(spawn, size=size, max_jobs=max_jobs, explain=explain)

"""How outputs are made: one module per kind of media, all against the same small interface.

A handler is given `Work`, the attempt as it may see it, and returns an outcome. It knows nothing of
HTTP, SQL, leases or storage; it raises Failure when the work cannot be done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mediamill.config import Settings
from mediamill.jobs import Birth, Claim, NewJob
from mediamill.media import Description, Original
from mediamill.recipes import Recipe
from mediamill.sandbox import Jail
from mediamill.sidecars import Sidecar
from mediamill.tools import Command, Finished


@dataclass(frozen=True, slots=True)
class Output:
    """A finished and verified file in the attempt's scratch. Sizes in pixels, as shown."""

    name: str
    path: Path
    content_type: str
    width: int | None = None
    height: int | None = None
    duration_seconds: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The work is complete: publish these outputs as one set."""

    outputs: tuple[Output, ...] = ()
    result: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reroute:
    """The original is of another kind than announced: another queue and handler must do it."""

    kind: str
    queue: str
    births: tuple[Birth, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """These children first: the job is queued again when the last one has completed."""

    children: tuple[NewJob, ...]


Outcome = Done | Reroute | Wait


@dataclass(frozen=True, slots=True)
class Child:
    """A child that the job waited for, as it ended."""

    key: str
    state: str
    result: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kept:
    """A file that one job left in storage for another."""

    key: str
    version: str
    bytes: int


class Work(Protocol):
    """One attempt, as far as a handler may see and steer it. Every method may raise LeaseLost."""

    @property
    def claim(self) -> Claim: ...
    @property
    def original(self) -> Original: ...
    @property
    def recipe(self) -> Recipe: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def out(self) -> Path:
        """The folder that tools may write to; emptied with the attempt."""

    async def enter(self, stage: str) -> None:
        """A stage of the work begins (an open vocabulary)."""

    def progress(self, percent: float, detail: Mapping[str, Any] | None = None) -> None:
        """How far the whole attempt is, 0 to 100, and its parts. Cheap to call often."""

    async def fetch(self) -> Path:
        """The original, pinned to its accepted version, in a folder that no tool can write to."""

    async def publish_early(self, outputs: Sequence[Output]) -> bool:
        """Show these outputs as a set of their own while the work goes on; False if the media has a
        complete set, which stays."""

    async def children(self) -> list[Child]:
        """The children that it waited for, in the order in which it asked for them."""

    async def sidecars(self) -> list[Sidecar]:
        """The files of subtitles that lie beside the original, by language."""

    async def slots(self, queue: str) -> int:
        """How many jobs of a queue the workers seen lately run at once."""

    async def keep(self, path: Path) -> Kept:
        """Store a file of scratch for the parent job, until it has ended."""

    async def bring(self, kept: Kept, name: str) -> Path:
        """A kept file, into `out`. Raises Failure(SOURCE_MISSING)."""

    async def describe(self, found: Description) -> None:
        """Show what is known about the original, at once."""

    async def show_preview(self, preview: Mapping[str, Any], found: Description) -> None:
        """Show the placeholder, at once."""

    async def run_tool(
        self,
        command: Command,
        jail: Jail,
        *,
        on_line: Callable[[str], None] | None = None,
        stall_seconds: float | None = None,
    ) -> Finished:
        """Run a tool in the sandbox. Its command and last words are kept with the attempt."""

    async def imaging(
        self, request: Mapping[str, Any], fds: Sequence[int], *, wall_seconds: float
    ) -> dict[str, Any]:
        """Ask a warm image process. Raises the Failure that it answers."""


Handler = Callable[[Work], Awaitable[Outcome]]

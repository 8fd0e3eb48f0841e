"""The handlers of video and sound with the real tools in the jail: bytes in, checked files out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from mediamill import handlers, tools
from mediamill.config import Settings
from mediamill.failures import Code, Failure
from mediamill.handlers import Child, Done, Kept, Outcome, Output, Wait, pieces, video
from mediamill.image_pool import ImagePool
from mediamill.jobs import Claim
from mediamill.media import Description, Original
from mediamill.recipes import Recipe
from mediamill.sandbox import Jail, Sandbox
from mediamill.sidecars import Sidecar
from mediamill.tools import Command, Finished, Toolbox

CHILDREN = {"video.piece": pieces.handle, "video.sound": pieces.handle_sound}


@dataclass
class Desk:
    """A `Work` that keeps what it is told, in order."""

    claim: Claim
    original: Original
    recipe: Recipe
    settings: Settings
    out: Path
    source: Path
    store: Path
    pool: ImagePool
    toolbox: Toolbox
    sandbox: Sandbox
    ended: list[Child] = field(default_factory=list)
    told: list[tuple[str, Any]] = field(default_factory=list)
    early: list[dict[str, bytes]] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    beside: list[Sidecar] = field(default_factory=list)

    async def enter(self, stage: str) -> None:
        self.told.append(("stage", stage))

    def progress(self, percent: float, detail: Mapping[str, Any] | None = None) -> None:
        self.told.append(("progress", percent))
        if detail is not None:
            self.told.append(("detail", dict(detail)))

    async def fetch(self) -> Path:
        return self.source

    async def describe(self, found: Description) -> None:
        self.told.append(("description", found))

    async def show_preview(self, preview: Mapping[str, Any], found: Description) -> None:
        self.told.append(("preview", dict(preview)))

    async def publish_early(self, outputs: Sequence[Output]) -> bool:
        self.early.append({o.name: o.path.read_bytes() for o in outputs})
        return True

    async def children(self) -> list[Child]:
        return self.ended

    async def sidecars(self) -> list[Sidecar]:
        return self.beside

    async def slots(self, queue: str) -> int:
        return 2

    async def keep(self, path: Path) -> Kept:
        key = f"{uuid4().hex}-{path.name}"
        shutil.copyfile(path, self.store / key)
        return Kept(key, "1", path.stat().st_size)

    async def bring(self, kept: Kept, name: str) -> Path:
        if not (self.store / kept.key).exists():
            raise Failure(Code.SOURCE_MISSING)
        shutil.copyfile(self.store / kept.key, self.out / name)
        return self.out / name

    async def run_tool(
        self,
        command: Command,
        jail: Jail,
        *,
        on_line: Callable[[str], object] | None = None,
        stall_seconds: float | None = None,
    ) -> Finished:
        self.commands.append(command)
        return await tools.run(
            command,
            jail=jail,
            toolbox=self.toolbox,
            sandbox=self.sandbox,
            on_line=on_line,
            stall_seconds=stall_seconds,
        )

    async def imaging(
        self, request: Mapping[str, Any], fds: Sequence[int], *, wall_seconds: float
    ) -> dict[str, Any]:
        return await self.pool.request(request, fds, wall_seconds=wall_seconds, tenant="acme")

    def last(self, name: str) -> Any:
        return next(value for kind, value in reversed(self.told) if kind == name)


@dataclass
class Result:
    """What came of one original. `files` are the outputs by name, on disk."""

    desk: Desk
    outcome: Outcome
    files: dict[str, Path]

    @property
    def description(self) -> Description:
        found = self.desk.last("description")
        assert isinstance(found, Description)
        return found

    @property
    def info(self) -> dict[str, Any]:
        return self.description.info or {}

    @property
    def outputs(self) -> dict[str, Output]:
        assert isinstance(self.outcome, Done)
        return {output.name: output for output in self.outcome.outputs}


class Studio:
    """Handles originals one after the other, each in a folder of its own."""

    def __init__(
        self, pool: ImagePool, folder: Path, settings: Settings, toolbox: Toolbox, jail: Sandbox
    ) -> None:
        self._pool = pool
        self._folder = folder
        self._toolbox = toolbox
        self._sandbox = jail
        self.settings = settings

    async def handle(
        self,
        source: Path,
        wanted: Sequence[Mapping[str, Any]],
        *,
        handler: handlers.Handler = video.handle,
        kind: str = "video",
        pieces: bool | None = None,
        beside: Sequence[Sidecar] = (),
        **settings: Any,
    ) -> Result:
        """The whole of it, with what its children do, if it wants any."""
        desk = self.desk(source, {kind: [*wanted], "pieces": pieces}, **settings)
        desk.beside = list(beside)
        outcome = await handler(desk)
        if isinstance(outcome, Wait):
            ended = [await self._child(desk, job.kind, job.payload) for job in outcome.children]
            desk.ended = [
                Child(job.child_key or "", "completed", result)
                for job, result in zip(outcome.children, ended, strict=True)
            ]
            desk.claim = replace(desk.claim, fence=2)
            outcome = await handler(desk)
        files = {}
        if isinstance(outcome, Done):
            files = {output.name: output.path for output in outcome.outputs}
        return Result(desk, outcome, files)

    async def _child(self, parent: Desk, kind: str, payload: dict[str, Any]) -> Mapping[str, Any]:
        desk = replace(
            parent,
            claim=replace(parent.claim, role="job", kind=kind, payload=payload),
            out=parent.out.parent / uuid4().hex,
        )
        desk.out.mkdir()
        outcome = await CHILDREN[kind](desk)
        assert isinstance(outcome, Done)
        # As it comes back from the database.
        result: Mapping[str, Any] = json.loads(json.dumps(outcome.result))
        return result

    async def failure(
        self, source: Path, wanted: Sequence[Mapping[str, Any]], **more: Any
    ) -> Failure:
        with pytest.raises(Failure) as caught:
            await self.handle(source, wanted, **more)
        return caught.value

    def desk(self, source: Path, recipe: Mapping[str, Any], **settings: Any) -> Desk:
        """The work of a main job on an original."""
        folder = self._folder / uuid4().hex
        for name in ("out", "kept"):
            (folder / name).mkdir(parents=True)
        values = {
            "tenant_id": "acme",
            "id": uuid4(),
            "media_id": uuid4(),
            "fence": 1,
            "role": "main",
        }
        claim = Claim(**{n: values.get(n) for n in Claim.__dataclass_fields__})  # type: ignore[arg-type]
        original = Original(
            id=uuid4(),
            kind=None,
            filename=None,
            content_type="application/octet-stream",
            size=source.stat().st_size,
            sha256=None,
            upload_key="uploads/test",
            object_version="1",
            detected_type=None,
            recipe="test",
            recipe_version=1,
            generation=1,
            preview=None,
            deleted_at=None,
            state="processing",
        )
        return Desk(
            claim=replace(claim, priority=0),
            original=original,
            recipe=Recipe.model_validate_json(json.dumps({"name": "test", "version": 1, **recipe})),
            settings=self.settings.model_copy(update=settings),
            out=folder / "out",
            source=source,
            store=folder / "kept",
            pool=self._pool,
            toolbox=self._toolbox,
            sandbox=self._sandbox,
        )

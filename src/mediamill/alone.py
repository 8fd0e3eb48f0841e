"""One file through the recipe engine in this process: no server, database or storage.

The same handlers, tools and sandbox as in a worker, against a `Work` that keeps everything in a
folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from mediamill import handlers, ids, recipes, sandbox, sidecars, tools, uploads
from mediamill.config import Settings
from mediamill.failures import Code, Failure, limit_exceeded
from mediamill.handlers import Done, Output, Reroute
from mediamill.image_children import confined_pool
from mediamill.image_pool import ImagePool
from mediamill.jobs import Claim
from mediamill.media import Description, Original
from mediamill.processes import HANDLERS
from mediamill.recipes import Recipe
from mediamill.sandbox import Jail, Sandbox
from mediamill.sidecars import Sidecar
from mediamill.tools import Command, Finished, ProcessGroups, Toolbox

_TENANT: Final = "default"
_MOST_REROUTES: Final = 2
OnMove = Callable[[str, float, Sequence[Mapping[str, Any]]], None]


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a file: what is known about it, and the files that were written."""

    described: Mapping[str, Any]
    outputs: tuple[Mapping[str, Any], ...]
    warnings: tuple[str, ...]


async def process(
    settings: Settings,
    path: Path,
    into: Path,
    *,
    recipe: str,
    recipe_version: int | None = None,
    on_move: OnMove | None = None,
) -> Result:
    """Make every output of a recipe from a file; all of them are written, or none.

    `on_move` hears the stage, the percent, and how far the outputs are that are being made.
    Raises Failure, Refused (for a recipe or file that is not taken), OSError.
    """
    wanted = uploads.Wanted(
        size=path.stat().st_size, filename=path.name, recipe=recipe, recipe_version=recipe_version
    )
    slot = uploads.slot(settings, _TENANT, wanted)
    found = recipes.find(slot.recipe, slot.recipe_version, folder=settings.recipes_dir)
    assert found is not None
    confined = sandbox.detect()
    if settings.sandbox == "strong" and confined.level is sandbox.Level.LIMITS:
        raise Failure(Code.CAPABILITY_MISSING, f"This machine cannot confine it. {confined.detail}")
    toolbox = tools.resolve(settings.ffmpeg, settings.ffprobe, settings.packager)
    groups = ProcessGroups()
    images = confined_pool(settings, toolbox, confined, groups, size=1)
    with TemporaryDirectory(prefix="mediamill-run-") as folder:
        original = _original(slot.id, slot.kind, path, slot.content_type, found)
        kind = uploads.births(slot.kind)[0].kind
        work = _Work(
            settings,
            path,
            original=original,
            recipe=found,
            scratch=Path(folder),
            toolbox=toolbox,
            confined=confined,
            groups=groups,
            images=images,
            on_move=on_move,
        )
        try:
            done = await _handle(work, kind)
            return Result(
                work.described, tuple(_written(o, into) for o in done.outputs), _warnings(done)
            )
        finally:
            await images.close()
            groups.kill_all()


async def _handle(work: _Work, kind: str) -> Done:
    for _ in range(_MOST_REROUTES + 1):
        work.begin(kind)
        match await HANDLERS[kind](work):
            case Done() as done:
                return done
            case Reroute(kind=announced, queue=_):
                kind = announced
            case _:
                break
    raise Failure(Code.INTERNAL, "The file was sent from kind to kind.")


def _written(output: Output, into: Path) -> dict[str, Any]:
    target = into / output.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(output.path, target)
    data = target.read_bytes()
    return {
        "name": output.name,
        "path": str(target),
        "content_type": output.content_type,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "width": output.width,
        "height": output.height,
        "duration_seconds": output.duration_seconds,
    }


def _warnings(done: Done) -> tuple[str, ...]:
    return tuple(str(w) for w in done.result.get("warnings", ()))


def _original(
    media_id: Any, kind: str | None, path: Path, content_type: str, recipe: Recipe
) -> Original:
    return Original(
        id=media_id,
        kind=kind,
        filename=path.name,
        content_type=content_type,
        size=path.stat().st_size,
        sha256=None,
        upload_key="",
        object_version="",
        detected_type=None,
        recipe=recipe.name,
        recipe_version=recipe.version,
        generation=1,
        preview=None,
        deleted_at=None,
        state="processing",
    )


def _sidecars(path: Path) -> list[Sidecar]:
    """The subtitles next to a film: `film.srt` and `film.de.vtt` for `film.mp4`. Raises Failure."""
    found: dict[str, Sidecar] = {}
    for file in sorted(path.parent.iterdir()):
        language = file.stem.removeprefix(path.stem).removeprefix(".").lower() or "und"
        if (
            file.suffix not in (".srt", ".vtt")
            or file.stem not in (path.stem, f"{path.stem}.{language}")
            or not sidecars.LANGUAGE.fullmatch(language)
        ):
            continue
        if file.stat().st_size > sidecars.MAX_BYTES:
            raise limit_exceeded(
                "subtitles",
                allowed=sidecars.MAX_BYTES,
                seen=file.stat().st_size,
                unit="bytes",
            )
        text = sidecars.read(file.read_bytes(), language=language)
        found[language] = Sidecar(language, None, text.format, text.body)
    return list(found.values())


class _Work:
    """See handlers.Work."""

    def __init__(
        self,
        settings: Settings,
        source: Path,
        *,
        original: Original,
        recipe: Recipe,
        scratch: Path,
        toolbox: Toolbox,
        confined: Sandbox,
        groups: ProcessGroups,
        images: ImagePool,
        on_move: OnMove | None,
    ) -> None:
        self.settings = settings
        self.original = original
        self.recipe = recipe.model_copy(update={"pieces": False})  # there is nobody to share with
        self.out = scratch / "out"
        self.described: dict[str, Any] = {}
        self._scratch = scratch
        self._source = source
        self._toolbox = toolbox
        self._sandbox = confined
        self._groups = groups
        self._images = images
        self._on_move = on_move
        self._outputs: Sequence[Mapping[str, Any]] = ()
        self._stage = ""
        self._percent = 0.0

    def begin(self, kind: str) -> None:
        """As a handler of this kind finds it."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.out)
        self.out.mkdir()
        now = datetime.now(UTC)
        self.claim = Claim(
            tenant_id=_TENANT,
            id=ids.new(),
            kind=kind,
            queue=kind,
            role="main",
            schema_version=1,
            media_id=self.original.id,
            recipe=self.recipe.name,
            recipe_version=self.recipe.version,
            generation=1,
            payload={},
            attempt=1,
            max_attempts=1,
            crashes=0,
            resource_failures=0,
            fence=1,
            priority=0,
            turn=0,
            queued_at=now,
            started_at=now,
            parent_id=None,
            timeout_seconds=None,
        )
        self.original = replace(self.original, kind=kind)

    async def enter(self, stage: str) -> None:
        self._stage = stage
        self._moved()

    def progress(self, percent: float, detail: Mapping[str, Any] | None = None) -> None:
        self._percent = max(self._percent, min(percent, 100.0))
        if detail is not None:
            self._outputs = detail.get("outputs", ())
        self._moved()

    def _moved(self) -> None:
        if self._on_move is not None:
            self._on_move(self._stage, self._percent, self._outputs)

    async def fetch(self) -> Path:
        path = self._scratch / "in" / "original"
        if not path.exists():
            path.parent.mkdir()
            await asyncio.to_thread(shutil.copyfile, self._source, path)
        return path

    async def publish_early(self, outputs: Sequence[Output]) -> bool:
        return True  # the complete set holds them again

    async def children(self) -> list[handlers.Child]:
        return []

    async def sidecars(self) -> list[Sidecar]:
        return await asyncio.to_thread(_sidecars, self._source)

    async def slots(self, queue: str) -> int:
        return 1

    async def keep(self, path: Path) -> handlers.Kept:
        raise AssertionError("only pieces are kept, and there are none")

    async def bring(self, kept: handlers.Kept, name: str) -> Path:
        raise AssertionError("only pieces are brought, and there are none")

    async def describe(self, found: Description) -> None:
        names = ("kind", "detected_type", "width", "height", "duration_seconds", "info")
        known = {name: getattr(found, name) for name in names}
        self.described |= {name: value for name, value in known.items() if value is not None}

    async def show_preview(self, preview: Mapping[str, Any], found: Description) -> None:
        self.described["preview"] = dict(preview)

    async def run_tool(
        self,
        command: Command,
        jail: Jail,
        *,
        on_line: Callable[[str], None] | None = None,
        stall_seconds: float | None = None,
    ) -> Finished:
        return await tools.run(
            command,
            jail=jail,
            toolbox=self._toolbox,
            sandbox=self._sandbox,
            on_line=on_line,
            registry=self._groups,
            owner=str(self.claim.id),
            stall_seconds=stall_seconds,
        )

    async def imaging(
        self, request: Mapping[str, Any], fds: Sequence[int], *, wall_seconds: float
    ) -> dict[str, Any]:
        return await self._images.request(
            dict(request),
            fds,
            wall_seconds=wall_seconds,
            owner=str(self.claim.id),
            tenant=_TENANT,
        )

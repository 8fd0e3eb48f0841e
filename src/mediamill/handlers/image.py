"""Images: one decode, every width and format, each checked before it is shown to anyone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mediamill import uploads
from mediamill.failures import Code, Failure
from mediamill.handlers import Done, Outcome, Output, Reroute, Work, stills
from mediamill.media import Description
from mediamill.recipes import ImageFormat, ImageOutputs

# What a pixel costs by format, relative to each other: how progress is shared out.
_COST: Final = {"avif": 30.0, "webp": 4.0, "png": 4.0, "jpeg": 1.0}


@dataclass(frozen=True, slots=True)
class Planned:
    """One file to make: its name, format and exact size in pixels."""

    name: str
    width: int
    height: int
    format: ImageFormat
    background: str

    @property
    def cost(self) -> float:
        return self.width * self.height * _COST[self.format.format] + 10_000

    def wanted(self) -> dict[str, Any]:
        return {
            "format": self.format.format,
            "width": self.width,
            "height": self.height,
            "quality": self.format.quality,
            "effort": self.format.effort,
            "background": self.background,
        }


def plan(wanted: ImageOutputs, width: int, height: int) -> list[Planned]:
    """The files for a picture of this size: every wanted width up to its own, smallest first.

    Widths above the source are replaced by the source's own width, once: never enlarged.
    """
    widths = sorted({min(w, width) for w in wanted.widths})
    return [
        Planned(
            name=f"w{w}.{stills.EXTENSIONS[format.format]}",
            width=w,
            height=max(1, round(height * w / width)),
            format=format,
            background=wanted.background,
        )
        for w in widths
        for format in wanted.formats
    ]


async def handle(work: Work) -> Outcome:
    """Download, look, show the placeholder, make, verify."""
    await work.enter("download")
    path = await work.fetch()
    seen = stills.look(path)
    if seen is not None and seen.kind in ("video", "audio"):
        return reroute(seen.kind)
    if work.recipe.image is None:
        raise Failure(Code.UNSUPPORTED_FORMAT, "This recipe has no outputs for images.")
    await work.enter("probe")
    facts = await stills.inspect(work, path)
    width, height = facts["width"], facts["height"]
    found = Description(
        kind="image",
        detected_type=facts["type"],
        width=width,
        height=height,
        info=_info(facts),
    )
    await work.describe(found)
    await work.enter("preview")
    await work.show_preview(await stills.preview(work, path), found)
    await work.enter("encode")
    planned = plan(work.recipe.image, width, height)
    outputs, warnings = await _make(work, path, planned, width * height)
    await work.enter("verify")
    for output, made in zip(outputs, planned, strict=True):
        await stills.verify(work, output, format=made.format.format)
    return Done(tuple(outputs), {"outputs": len(outputs), "warnings": warnings})


def reroute(kind: str) -> Reroute:
    """The original is a video or sound after all; the preview of a video is born with the move."""
    match kind:
        case "video":
            return Reroute("video", "video", (uploads.preview_birth(),))
        case _:
            return Reroute("audio", "audio")


async def _make(
    work: Work, path: Path, planned: Sequence[Planned], source_pixels: int
) -> tuple[list[Output], list[str]]:
    raw = [work.out / f"{n}.part" for n in range(len(planned))]
    pixels = sum(p.width * p.height for p in planned if p.format.format == "avif")
    seconds = 60 + source_pixels / 250_000 + pixels / 50_000
    watch = asyncio.create_task(_watch(work, raw, planned))
    try:
        answer = await stills.make(work, path, [p.wanted() for p in planned], raw, seconds)
    finally:
        watch.cancel()
    outputs = []
    for part, made, want in zip(raw, answer["outputs"], planned, strict=True):
        target = work.out / want.name
        await asyncio.to_thread(stills.detach, part, target)
        outputs.append(
            Output(
                want.name,
                target,
                stills.CONTENT_TYPES[want.format.format],
                width=made["width"],
                height=made["height"],
                seconds=made["seconds"],
            )
        )
    return outputs, answer.get("warnings", [])


async def _watch(work: Work, files: Sequence[Path], planned: Sequence[Planned]) -> None:
    """Progress by what is written: the files are made in order, and begin when their turn comes."""
    total = sum(p.cost for p in planned)
    while True:
        await asyncio.sleep(0.5)
        written = [f.exists() and f.stat().st_size > 0 for f in files]
        done = sum(p.cost for p, w in zip(planned, written, strict=True) if w)
        work.progress(5 + 85 * done / total)


def _info(facts: dict[str, Any]) -> dict[str, Any]:
    shown = (
        "format",
        "stored_width",
        "stored_height",
        "orientation",
        "animated",
        "frames",
        "duration_ms",
        "has_alpha",
        "bit_depth",
        "icc_description",
        "hdr",
        "hdr_format",
        "warnings",
    )
    return {name: facts[name] for name in shown if name in facts}

"""Images: one decode, every output in every format, each checked before it is shown to anyone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mediamill import recipes, uploads
from mediamill.config import ImageLimits
from mediamill.failures import Code, Failure
from mediamill.handlers import Done, Outcome, Output, Reroute, Work, stills
from mediamill.handlers.grid import COST, Planned, plan
from mediamill.media import Description
from mediamill.recipes import FocalPoint, ImageOutputs


async def handle(work: Work) -> Outcome:
    """Download, look, show the placeholder, make, verify."""
    limits = _limits(work)
    await work.enter("download")
    if work.original.kind == "image":
        stills.check_bytes(work.original.size, limits)
    path = await work.fetch()
    seen = stills.look(path)
    if seen is not None and seen.kind in ("video", "audio"):
        return reroute(seen.kind)
    stills.check_bytes(work.original.size, limits)
    if work.recipe.image is None:
        raise Failure(Code.UNSUPPORTED_FORMAT, "This recipe has no outputs for images.")
    await work.enter("probe")
    drawing: dict[str, Any] | None = None
    if seen is not None and seen.format == "svg" and work.settings.allow_svg:
        drawn = work.out / "drawing.png"
        width, height = _largest(work.recipe.image)
        drawing = await stills.draw(work, path, drawn, width=width, height=height, limits=limits)
        path = drawn
    facts = await stills.inspect(work, path, limits)
    width, height = facts["width"], facts["height"]
    if drawing is not None:
        facts |= {"type": drawing["type"], "format": drawing["format"]}
    found = Description(
        kind="image",
        detected_type=facts["type"],
        width=drawing["width"] if drawing else width,
        height=drawing["height"] if drawing else height,
        info=_info(facts),
    )
    await work.describe(found)
    await work.enter("preview")
    await work.show_preview(await stills.preview(work, path, limits), found)
    await work.enter("encode")
    focal = uploads.focal_point(work.original.metadata)
    planned = plan(
        work.recipe.image,
        width,
        height,
        focal_point=None if focal is None else FocalPoint(x=focal[0], y=focal[1]),
    )
    outputs, answer = await _make(work, path, planned, width * height, limits)
    await work.enter("verify")
    for output, want, made in zip(outputs, planned, answer["outputs"], strict=True):
        await stills.verify(
            work, output, format=want.format.format, made=made, notice=answer.get("notice")
        )
    result = {"outputs": len(outputs), "warnings": answer.get("warnings", [])}
    if searched := _searched(planned, answer["outputs"]):
        result["searched"] = searched
    return Done(tuple(outputs), result)


def reroute(kind: str) -> Reroute:
    """The original is a video or sound after all; the preview of a video is born with the move."""
    match kind:
        case "video":
            return Reroute("video", "video", (uploads.preview_birth(),))
        case _:
            return Reroute("audio", "audio")


def _limits(work: Work) -> ImageLimits:
    image = work.recipe.image
    return work.settings.image_limits(work.claim.tenant_id, image.limits if image else None)


def _largest(wanted: ImageOutputs) -> tuple[int, int]:
    """The largest width and height that any output asks for."""
    widths = [*wanted.widths, *(o.width or 0 for o in wanted.outputs)]
    heights = [*wanted.heights, *(o.height or 0 for o in wanted.outputs)]
    return max(widths, default=0), max(heights, default=0)


async def _make(
    work: Work, path: Path, planned: Sequence[Planned], source_pixels: int, limits: ImageLimits
) -> tuple[list[Output], dict[str, Any]]:
    raw = [work.out / f"{n}.part" for n in range(len(planned))]
    slow = sum(p.cost / COST["avif"] for p in planned if p.format.format == "avif")
    slow += sum(p.cost / 20 for p in planned if p.format.target_quality is not None)
    seconds = 60 + source_pixels / 250_000 + slow / 50_000
    assert work.recipe.image is not None
    watch = asyncio.create_task(_watch(work, raw, planned))
    try:
        answer = await stills.make(
            work,
            path,
            [p.wanted() for p in planned],
            raw,
            seconds,
            limits=limits,
            keep_copyright=work.recipe.image.keep_copyright,
            pictures=_pictures(work, planned),
        )
    finally:
        watch.cancel()
    outputs = []
    for part, made, want in zip(raw, answer["outputs"], planned, strict=True):
        target = work.out / want.name
        await asyncio.to_thread(stills.detach, part, target)
        duration = made.get("duration_ms")
        outputs.append(
            Output(
                want.name,
                target,
                stills.CONTENT_TYPES[want.format.format],
                width=made["width"],
                height=made["height"],
                duration_seconds=duration and duration / 1000,
                seconds=made["seconds"],
            )
        )
    return outputs, answer


def _pictures(work: Work, planned: Iterable[Planned]) -> dict[str, Path]:
    """The watermarks that the plan needs. They were there when the process started."""
    names = {p.watermark.image for p in planned if p.watermark is not None}
    try:
        return {name: recipes.watermark(work.settings.recipes_dir, name) for name in sorted(names)}
    except ValueError as error:
        raise Failure(Code.CAPABILITY_MISSING, f"A watermark cannot be used: {error}.") from None


async def _watch(work: Work, files: Sequence[Path], planned: Sequence[Planned]) -> None:
    """Progress by what is written: the files are made in order, and begin when their turn comes."""
    total = sum(p.cost for p in planned)
    while True:
        await asyncio.sleep(0.5)
        written = [f.exists() and f.stat().st_size > 0 for f in files]
        done = sum(p.cost for p, w in zip(planned, written, strict=True) if w)
        work.progress(5 + 85 * done / total)


def _searched(
    planned: Sequence[Planned], made: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """What the search for a likeness came to, by file."""
    return {
        want.name: {name: told[name] for name in ("quality", "likeness", "encodes")}
        for want, told in zip(planned, made, strict=True)
        if want.format.target_quality is not None
    }


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

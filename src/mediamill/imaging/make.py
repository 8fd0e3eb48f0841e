"""Making the outputs of one picture: decoded once at the largest size that any of them needs, the
smaller ones made from that, each written in its formats. Nothing is enlarged, and nothing but
pixels goes into an output."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import pyvips

from mediamill.failures import Code, Failure, Refused
from mediamill.imaging.complaints import Complaints, decoding, encoding
from mediamill.imaging.decode import Picture, with_timing
from mediamill.imaging.facts import Facts
from mediamill.imaging.geometry import MAX_SIDE, Fit, Shape, shape

_TAKES_ALPHA: Final = {"webp", "avif", "png"}
_TAKES_ANIMATION: Final = {"webp"}
_QUALITY: Final = {"jpeg": 80, "webp": 75, "avif": 50, "png": 100}
_EFFORT: Final = {"jpeg": 0, "webp": 4, "avif": 3, "png": 6}
MAX_OUTPUT_SIDE: Final = 65_500


@dataclass(frozen=True, slots=True)
class Output:
    """One wanted file: `fd_index` says which of the request's descriptors it is written to."""

    fd_index: int
    format: str
    width: int | None = None
    height: int | None = None
    fit: Fit = Fit.INSIDE
    quality: int = 0
    effort: int = 0
    lossless: bool = False
    progressive: bool = False
    background: tuple[int, int, int] = (255, 255, 255)
    flatten: bool = False
    """Lay transparent parts on the background also where the format could keep them."""

    @classmethod
    def of(cls, wanted: Mapping[str, Any]) -> Self:
        """Read one output of a request. Raises `Refused` if it is not one."""
        try:
            format = wanted["format"]
            if format not in MAX_SIDE:
                raise ValueError(f"cannot write {format!r}")
            width, height = (
                None if wanted.get(side) is None else int(wanted[side])
                for side in ("width", "height")
            )
            for side in (width, height):
                if side is not None and not 1 <= side <= MAX_OUTPUT_SIDE:
                    raise ValueError("a side must be 1 to 65500")
            quality = int(wanted.get("quality") or _QUALITY[format])
            effort = _EFFORT[format] if wanted.get("effort") is None else int(wanted["effort"])
            if not 1 <= quality <= 100 or not 0 <= effort <= 9:
                raise ValueError("quality must be 1 to 100, effort 0 to 9")
            return cls(
                fd_index=int(wanted["fd_index"]),
                format=format,
                width=width,
                height=height,
                fit=Fit(wanted.get("fit") or "inside"),
                quality=quality,
                effort=effort,
                lossless=bool(wanted.get("lossless", False)),
                progressive=bool(wanted.get("progressive", False)),
                background=_rgb(wanted.get("background") or "#ffffff"),
                flatten=bool(wanted.get("flatten", False)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(Code.INVALID_REQUEST, f"an output cannot be read: {error}") from error


def _rgb(text: str) -> tuple[int, int, int]:
    if not re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        raise ValueError("background must look like #ffffff")
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def make(
    picture: Picture,
    outputs: Sequence[Output],
    fds: Sequence[int],
    *,
    keep_animation: bool,
    complaints: Complaints,
) -> tuple[list[dict[str, Any]], Any]:
    """Write every output; the answers, in order, and the decoded picture that served them."""
    facts = picture.facts
    size = (facts.width, facts.height)
    shapes = [
        shape(size, (wanted.width, wanted.height), wanted.fit, format=wanted.format)
        for wanted in outputs
    ]
    moving = keep_animation and picture.can_animate
    animated = [moving and wanted.format in _TAKES_ANIMATION for wanted in outputs]
    if facts.animated and not any(animated):
        picture.warnings.append(f"Only the first of {facts.frames:,} frames is shown.")
    if any(plan.reduced for plan in shapes):
        picture.warnings.append("Made smaller than asked: the format has a limit on its sides.")
    stills = _Stills(picture, [s for s, move in zip(shapes, animated, strict=True) if not move])
    answers = []
    for wanted, plan, move in zip(outputs, shapes, animated, strict=True):
        began, cpu = time.perf_counter(), time.process_time()
        fd = fds[wanted.fd_index]
        if move:
            with decoding(complaints):
                image = _lay_out_frames(picture.animation(*plan.scaled), wanted, plan, facts)
                frames, has_alpha = image.height // plan.height, bool(image.hasalpha())
                _write(image, wanted, fd)
        else:
            with encoding(complaints):
                image = _lay_out(stills.at(plan.scaled), wanted, plan)
                frames, has_alpha = 1, bool(image.hasalpha())
                _write(image, wanted, fd)
        answers.append(
            {
                "fd_index": wanted.fd_index,
                "format": wanted.format,
                "width": plan.width,
                "height": plan.height,
                "bytes": os.fstat(fd).st_size,
                "frames": frames,
                "duration_ms": sum(facts.delays_ms) if frames > 1 else None,
                "has_alpha": has_alpha,
                "reduced": plan.reduced,
                "seconds": round(time.perf_counter() - began, 4),
                "cpu_seconds": round(time.process_time() - cpu, 4),
            }
        )
    return answers, stills.largest


class _Stills:
    """The first frame at each wanted size, each size made once, all from one decode."""

    def __init__(self, picture: Picture, shapes: Sequence[Shape]) -> None:
        self.largest: Any = None
        self._sizes: dict[tuple[int, int], Any] = {}
        if shapes:
            width = max(plan.scaled[0] for plan in shapes)
            height = max(plan.scaled[1] for plan in shapes)
            self.largest = picture.still(width, height)
            self._sizes[(width, height)] = self.largest

    def at(self, size: tuple[int, int]) -> Any:
        if size not in self._sizes:
            made = self.largest.thumbnail_image(
                size[0], height=size[1], size="force", no_rotate=True
            )
            self._sizes[size] = made.copy_memory()
        return self._sizes[size]


def _lay_out(image: Any, wanted: Output, plan: Shape) -> Any:
    """Cut or lay out a resized picture to its final size, on a ground where one is needed."""
    if wanted.fit is Fit.COVER and (image.width, image.height) != (plan.width, plan.height):
        left, top = (image.width - plan.width) // 2, (image.height - plan.height) // 2
        image = image.crop(left, top, plan.width, plan.height)
    if image.hasalpha() and (
        wanted.flatten or wanted.format not in _TAKES_ALPHA or wanted.fit is Fit.CONTAIN
    ):
        image = image.flatten(background=list(wanted.background))
    if (image.width, image.height) != (plan.width, plan.height):
        image = image.gravity(
            "centre",
            plan.width,
            plan.height,
            extend="background",
            background=list(wanted.background),
        )
    return image


def _lay_out_frames(frames: Any, wanted: Output, plan: Shape, facts: Facts) -> Any:
    page = plan.scaled[1]
    if plan.scaled == (plan.width, plan.height) and not wanted.flatten:
        return frames
    whole = frames.copy_memory()
    laid = [
        _lay_out(whole.crop(0, top, whole.width, page), wanted, plan)
        for top in range(0, whole.height, page)
    ]
    return with_timing(pyvips.Image.arrayjoin(laid, across=1), facts, plan.height)


def _write(image: Any, wanted: Output, fd: int) -> None:
    os.lseek(fd, 0, os.SEEK_SET)
    os.ftruncate(fd, 0)
    target = pyvips.Target.new_to_descriptor(fd)
    quality, effort = wanted.quality, wanted.effort
    match wanted.format:
        case "jpeg":
            image.jpegsave_target(
                target,
                Q=quality,
                optimize_coding=True,
                interlace=wanted.progressive,
                keep="none",
            )
        case "webp":
            image.webpsave_target(
                target, Q=quality, effort=min(effort, 6), lossless=wanted.lossless, keep="none"
            )
        case "avif":
            image.heifsave_target(
                target,
                compression="av1",
                Q=quality,
                effort=effort,
                lossless=wanted.lossless,
                bitdepth=8,
                keep="none",
            )
        case "png":
            image.pngsave_target(
                target, compression=min(effort, 9), interlace=wanted.progressive, keep="none"
            )
        case _:
            raise Failure(Code.CAPABILITY_MISSING, f"{wanted.format} cannot be written.")

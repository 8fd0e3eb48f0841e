"""Making the outputs of one picture: decoded once at the largest size that any of them needs, the
smaller ones made from that, each laid out and written in its formats. Nothing is enlarged, and
nothing but pixels goes into an output, save a notice of copyright where it is asked for."""

from __future__ import annotations

import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import pyvips

from mediamill.failures import Code, Failure, Refused
from mediamill.imaging import likeness, notice
from mediamill.imaging.complaints import Complaints, decoding, encoding
from mediamill.imaging.decode import Picture, open_picture, with_timing
from mediamill.imaging.facts import Facts, Limits
from mediamill.imaging.geometry import MAX_SIDE, Fit, Shape, shape
from mediamill.imaging.notice import Notice

_TAKES_ALPHA: Final = {"webp", "avif", "png"}
_TAKES_ANIMATION: Final = {"webp"}
_QUALITY: Final = {"jpeg": 80, "webp": 75, "avif": 50, "png": 100}
_EFFORT: Final = {"jpeg": 0, "webp": 4, "avif": 3, "png": 6}
_SEARCHED: Final = {"jpeg": (20, 96), "webp": (10, 98), "avif": (10, 92)}
"""Between which qualities a target is looked for."""
_SLOW_EFFORT: Final = 4
"""From this effort on an AVIF encode is so dear that the search begins with quick ones."""
MAX_OUTPUT_SIDE: Final = 65_500
_MARK_LIMITS: Final = Limits(max_pixels=25_000_000, max_frames=1)


@dataclass(frozen=True, slots=True)
class Mark:
    """A picture laid over an output. Shares are of the output: `scale` of its sides, `margin` of
    the shorter one. Where it stands goes from 0 (left, top) to 1 in steps of a half."""

    fd_index: int
    across: float
    down: float
    opacity: float
    scale: float
    margin: float

    @classmethod
    def of(cls, wanted: Mapping[str, Any]) -> Self:
        position = str(wanted.get("position") or "bottom-right")
        words = set(position.split("-"))
        if not words <= {"top", "bottom", "left", "right", "center"}:
            raise ValueError("a watermark stands at no such position")
        return cls(
            fd_index=int(wanted["fd_index"]),
            across=0.0 if "left" in words else 1.0 if "right" in words else 0.5,
            down=0.0 if "top" in words else 1.0 if "bottom" in words else 0.5,
            opacity=_share(wanted.get("opacity", 1.0)),
            scale=_share(wanted.get("scale", 0.2)),
            margin=_share(wanted.get("margin", 0.0)),
        )


@dataclass(frozen=True, slots=True)
class Look:
    """What is done to the pixels between resizing and writing."""

    fit: Fit = Fit.INSIDE
    attention: bool = False
    """`cover` keeps the part that draws the eye; otherwise the middle."""
    focal_point: tuple[float, float] | None = None
    """What `cover` keeps before anything else, as fractions of the shown picture."""
    sharpen: float = 0.0
    background: tuple[int, int, int] = (255, 255, 255)
    flatten: bool = False
    """Lay transparent parts on the background also where the format could keep them."""
    mark: Mark | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One wanted file: `fd_index` says which of the request's descriptors it is written to."""

    fd_index: int
    format: str
    width: int | None = None
    height: int | None = None
    quality: int = 0
    target: float | None = None
    """The likeness to reach, in place of a quality: see likeness.py."""
    effort: int = 0
    lossless: bool = False
    progressive: bool = False
    animation: bool = False
    look: Look = Look()

    @classmethod
    def of(cls, wanted: Mapping[str, Any], *, animation: bool = False) -> Self:
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
            target = wanted.get("target_quality")
            mark, focal = wanted.get("watermark"), wanted.get("focal_point")
            return cls(
                fd_index=int(wanted["fd_index"]),
                format=format,
                width=width,
                height=height,
                quality=quality,
                target=None if target is None or format not in _SEARCHED else _share(target),
                effort=effort,
                lossless=bool(wanted.get("lossless", False)),
                progressive=bool(wanted.get("progressive", False)),
                animation=bool(wanted.get("animation", animation)),
                look=Look(
                    fit=Fit(wanted.get("fit") or "inside"),
                    attention=wanted.get("crop") == "attention",
                    focal_point=None if focal is None else (_share(focal["x"]), _share(focal["y"])),
                    sharpen=min(max(float(wanted.get("sharpen") or 0), 0.0), 10.0),
                    background=_rgb(wanted.get("background") or "#ffffff"),
                    flatten=bool(wanted.get("flatten", False)),
                    mark=None if mark is None else Mark.of(mark),
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(Code.INVALID_REQUEST, f"an output cannot be read: {error}") from error

    @property
    def fds(self) -> list[int]:
        mark = self.look.mark
        return [self.fd_index] if mark is None else [self.fd_index, mark.fd_index]


def _share(value: Any) -> float:
    if not 0 <= float(value) <= 1:
        raise ValueError("a share must be 0 to 1")
    return float(value)


def _rgb(text: str) -> tuple[int, int, int]:
    if not re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        raise ValueError("background must look like #ffffff")
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


@dataclass(slots=True)
class Made:
    """What `make` leaves: an answer for each output, in order, the decoded picture that served
    them, and the notice that was written into them."""

    answers: list[dict[str, Any]]
    decoded: Any
    notice: Notice


def make(
    picture: Picture,
    outputs: Sequence[Output],
    fds: Sequence[int],
    *,
    keep_copyright: bool = False,
    complaints: Complaints,
) -> Made:
    """Write every output."""
    facts = picture.facts
    size = (facts.width, facts.height)
    shapes = [
        shape(size, (wanted.width, wanted.height), wanted.look.fit, format=wanted.format)
        for wanted in outputs
    ]
    animated = [
        wanted.animation and picture.can_animate and wanted.format in _TAKES_ANIMATION
        for wanted in outputs
    ]
    if facts.animated and not any(animated):
        picture.warnings.append(f"Only the first of {facts.frames:,} frames is shown.")
    if any(plan.reduced for plan in shapes):
        picture.warnings.append("Made smaller than asked: the format has a limit on its sides.")
    said = notice.read(picture.exif, picture.xmp) if keep_copyright else Notice()
    stills = _Stills(picture, [s for s, move in zip(shapes, animated, strict=True) if not move])
    marks = _Marks(fds, complaints)
    answers = []
    for wanted, plan, move in zip(outputs, shapes, animated, strict=True):
        began, cpu = time.perf_counter(), time.process_time()
        fd = fds[wanted.fd_index]
        with (decoding if move else encoding)(complaints):
            if move:
                image = _frames(picture.animation(*plan.scaled), wanted, plan, facts, marks)
            else:
                image = stills.laid_out(wanted, plan, marks)
            frames, has_alpha = image.height // plan.height, bool(image.hasalpha())
            written = _write(image, wanted, fd, said, page_height=plan.height)
        if wanted.target is not None and written.likeness < wanted.target and not wanted.lossless:
            picture.warnings.append(
                f"The likeness {wanted.target:g} was not reached by any {wanted.format} quality."
            )
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
                "quality": written.quality,
                "likeness": round(written.likeness, 5) if written.likeness else None,
                "encodes": written.encodes,
                "seconds": round(time.perf_counter() - began, 4),
                "cpu_seconds": round(time.process_time() - cpu, 4),
            }
        )
    return Made(answers, stills.largest, said)


class _Stills:
    """The first frame at each wanted size, each size made once, all from one decode."""

    def __init__(self, picture: Picture, shapes: Sequence[Shape]) -> None:
        self.largest: Any = None
        self._sizes: dict[tuple[int, int], Any] = {}
        self._latest: tuple[object, Any] = (None, None)
        if shapes:
            width = max(plan.scaled[0] for plan in shapes)
            height = max(plan.scaled[1] for plan in shapes)
            self.largest = picture.still(width, height)
            self._sizes[(width, height)] = self.largest

    def laid_out(self, wanted: Output, plan: Shape, marks: _Marks) -> Any:
        """The picture as it is written. The formats of one output follow each other, so what was
        laid out last often serves again."""
        flat = wanted.format not in _TAKES_ALPHA
        key = (wanted.look, plan.scaled, plan.width, plan.height, flat)
        if self._latest[0] != key:
            self._latest = (key, _lay_out(self._at(plan.scaled), wanted, plan, marks))
        return self._latest[1]

    def _at(self, size: tuple[int, int]) -> Any:
        if size not in self._sizes:
            made = self.largest.thumbnail_image(
                size[0], height=size[1], size="force", no_rotate=True
            )
            self._sizes[size] = made.copy_memory()
        return self._sizes[size]


class _Marks:
    """The watermarks of a request, each opened once."""

    def __init__(self, fds: Sequence[int], complaints: Complaints) -> None:
        self._fds = fds
        self._complaints = complaints
        self._pictures: dict[int, Picture] = {}

    def at(self, mark: Mark, width: int, height: int) -> Any:
        """The watermark as large as it is to be on an output of this size, with its opacity."""
        if mark.fd_index not in self._pictures:
            self._pictures[mark.fd_index] = open_picture(
                self._fds[mark.fd_index], _MARK_LIMITS, self._complaints
            )
        picture = self._pictures[mark.fd_index]
        own = (picture.facts.width, picture.facts.height)
        box = (max(1, round(width * mark.scale)), max(1, round(height * mark.scale)))
        image = picture.still(*shape(own, box).scaled)
        image = image if image.hasalpha() else image.addalpha()
        if mark.opacity < 1:
            image = (image * [1, 1, 1, mark.opacity]).cast("uchar").copy(interpretation="srgb")
        return image


def _lay_out(
    image: Any,
    wanted: Output,
    plan: Shape,
    marks: _Marks,
    *,
    corner: tuple[int, int] | None = None,
) -> Any:
    """Cut, sharpen, lay on a ground where one is needed, and mark. `corner` is where to cut, if
    that is known from another frame."""
    look = wanted.look
    if look.fit is Fit.COVER and (image.width, image.height) != (plan.width, plan.height):
        left, top = corner or _corner(image, look, plan)
        image = image.crop(left, top, plan.width, plan.height)
    if look.sharpen:
        image = image.sharpen(sigma=look.sharpen)
    if image.hasalpha() and (
        look.flatten or wanted.format not in _TAKES_ALPHA or look.fit is Fit.CONTAIN
    ):
        image = image.flatten(background=list(look.background))
    if (image.width, image.height) != (plan.width, plan.height):
        image = image.gravity(
            "centre",
            plan.width,
            plan.height,
            extend="background",
            background=list(look.background),
        )
    if look.mark is not None:
        image = _marked(image, look.mark, marks)
    return image.copy_memory() if look.sharpen or look.mark else image


def _corner(image: Any, look: Look, plan: Shape) -> tuple[int, int]:
    """The left and upper edge of the part that `cover` keeps."""
    spare = (image.width - plan.width, image.height - plan.height)
    if look.focal_point is not None:
        x, y = look.focal_point
        wanted = (x * image.width - plan.width / 2, y * image.height - plan.height / 2)
        return (
            min(max(round(wanted[0]), 0), spare[0]),
            min(max(round(wanted[1]), 0), spare[1]),
        )
    if look.attention:
        # vips tells where a part was cut from by its offsets.
        part = image.smartcrop(plan.width, plan.height, interesting="attention")
        return -part.xoffset, -part.yoffset
    return spare[0] // 2, spare[1] // 2


def _marked(image: Any, mark: Mark, marks: _Marks) -> Any:
    width, height = image.width, image.height
    overlay = marks.at(mark, width, height)
    margin = round(min(width, height) * mark.margin)
    spare = (width - overlay.width - 2 * margin, height - overlay.height - 2 * margin)
    left = margin + round(mark.across * spare[0])
    top = margin + round(mark.down * spare[1])
    had_alpha = image.hasalpha()
    both = image.composite2(overlay, "over", x=left, y=top).cast("uchar")
    both = both.copy(interpretation="srgb")
    return both if had_alpha else both.extract_band(0, n=3)


def _frames(frames: Any, wanted: Output, plan: Shape, facts: Facts, marks: _Marks) -> Any:
    """Every frame laid out for itself, all of them cut at the same place."""
    look, page = wanted.look, plan.scaled[1]
    as_it_is = plan.scaled == (plan.width, plan.height)
    if as_it_is and not (look.flatten or look.sharpen or look.mark):
        return frames
    whole = frames.copy_memory()
    tops = range(0, whole.height, page)
    corner = None
    if look.fit is Fit.COVER and not as_it_is:
        corner = _corner(whole.crop(0, 0, whole.width, page), look, plan)
    laid = [
        _lay_out(whole.crop(0, top, whole.width, page), wanted, plan, marks, corner=corner)
        for top in tops
    ]
    return with_timing(pyvips.Image.arrayjoin(laid, across=1), facts, plan.height)


# --- Writing


@dataclass(frozen=True, slots=True)
class _Written:
    quality: int
    likeness: float = 0.0
    encodes: int = 1


def _write(image: Any, wanted: Output, fd: int, said: Notice, *, page_height: int) -> _Written:
    keep = "none"
    if said:
        image = image.copy()
        image.set_type(pyvips.GValue.blob_type, "xmp-data", said.packet())
        keep = "xmp"
    done = _Written(wanted.quality)
    if wanted.target is not None and not wanted.lossless:
        # Of an animation the first frame speaks for all.
        first = image if image.height == page_height else _first_page(image, page_height)
        done = _searched(first, wanted, wanted.target)
        wanted = replace(wanted, quality=done.quality)
    os.lseek(fd, 0, os.SEEK_SET)
    os.ftruncate(fd, 0)
    if said and wanted.format == "png":
        _write_whole(fd, _png_with(said, _to_bytes(image, wanted)))
    else:
        _save(image, wanted, keep)(pyvips.Target.new_to_descriptor(fd))
    return done


def _to_bytes(image: Any, wanted: Output) -> bytes:
    target = pyvips.Target.new_to_memory()
    _save(image, wanted, "none")(target)
    return bytes(target.get("blob"))


def _png_with(said: Notice, data: bytes) -> bytes:
    """The PNG with the notice where its standard puts it: in an iTXt chunk before the pixels."""
    body = b"iTXt" + b"XML:com.adobe.xmp\0\0\0\0\0" + said.packet()
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    after_header = 8 + 25
    return data[:after_header] + chunk + data[after_header:]


def _write_whole(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _first_page(image: Any, page_height: int) -> Any:
    page = image.copy_memory().crop(0, 0, image.width, page_height).copy()
    for name in ("page-height", "delay", "loop"):
        page.remove(name)
    return page


def _searched(image: Any, wanted: Output, target: float) -> _Written:
    """The lowest quality that reaches the target."""
    image = image.copy_memory()
    reference = likeness.Reference(image)
    lowest, highest = _SEARCHED[wanted.format]
    start, encodes = _QUALITY[wanted.format], 0

    def measured(effort: int) -> Callable[[int], float]:
        def measure(quality: int) -> float:
            data = _to_bytes(image, replace(wanted, quality=quality, effort=effort))
            return reference.likeness(pyvips.Image.new_from_buffer(data, ""))

        return measure

    if wanted.format == "avif" and wanted.effort >= _SLOW_EFFORT:
        quick = likeness.search(measured(0), target, lowest=lowest, highest=highest, start=start)
        start, encodes = quick.quality, quick.encodes
    found = likeness.search(
        measured(wanted.effort), target, lowest=lowest, highest=highest, start=start
    )
    return _Written(found.quality, found.likeness, encodes + found.encodes)


def _save(image: Any, wanted: Output, keep: str) -> Callable[[Any], None]:
    """How a picture is written in the wanted format."""
    quality, effort = wanted.quality, wanted.effort
    match wanted.format:
        case "jpeg":
            return lambda target: image.jpegsave_target(
                target,
                Q=quality,
                optimize_coding=True,
                interlace=wanted.progressive,
                keep=keep,
            )
        case "webp":
            return lambda target: image.webpsave_target(
                target, Q=quality, effort=min(effort, 6), lossless=wanted.lossless, keep=keep
            )
        case "avif":
            return lambda target: image.heifsave_target(
                target,
                compression="av1",
                Q=quality,
                effort=effort,
                lossless=wanted.lossless,
                bitdepth=8,
                keep=keep,
            )
        case "png":
            return lambda target: image.pngsave_target(
                target, compression=min(effort, 9), interlace=wanted.progressive, keep=keep
            )
        case _:
            raise Failure(Code.CAPABILITY_MISSING, f"{wanted.format} cannot be written.")

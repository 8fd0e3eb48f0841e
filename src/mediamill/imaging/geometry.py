"""Which size an output gets, and what is cut off or laid around. Pure; never enlarges."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_SIDE: Final = {"jpeg": 65_500, "webp": 16_383, "avif": 16_384, "png": 65_500}
"""What the encoder of a format can write. A larger picture is made smaller, ratio kept."""


class Fit(StrEnum):
    INSIDE = "inside"
    """As large as fits into the box, ratio kept, nothing cut. A side left open does not count."""
    COVER = "cover"
    """Fills the box, and what sticks out is cut. If the picture is smaller, the box shrinks."""
    CONTAIN = "contain"
    """As `inside`, then laid on a ground of exactly the box."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Resize to `scaled`, then cut or lay out to `width` × `height`."""

    scaled: tuple[int, int]
    width: int
    height: int
    reduced: bool = False
    """The format could not take the wanted size."""


def shape(
    picture: tuple[int, int],
    box: tuple[int | None, int | None],
    fit: Fit = Fit.INSIDE,
    *,
    format: str = "png",
) -> Shape:
    """Plan one output of a picture of the given shown size."""
    most = MAX_SIDE[format]
    width, height = picture
    if fit is Fit.COVER and None not in box:
        return _cover(picture, box, most)
    limit_w, limit_h = box[0] or width, box[1] or height
    reduced = min(limit_w, width) > most or min(limit_h, height) > most
    scale = min(1.0, min(limit_w, most) / width, min(limit_h, most) / height)
    scaled = (_scaled(width, scale), _scaled(height, scale))
    if fit is Fit.CONTAIN:
        return Shape(scaled, min(limit_w, most), min(limit_h, most), reduced)
    return Shape(scaled, *scaled, reduced)


def _cover(picture: tuple[int, int], box: tuple[int | None, int | None], most: int) -> Shape:
    (width, height), (box_w, box_h) = picture, box
    assert box_w is not None
    assert box_h is not None
    shrink = min(1.0, width / box_w, height / box_h, most / box_w, most / box_h)
    box_w, box_h = _scaled(box_w, shrink), _scaled(box_h, shrink)
    scale = min(1.0, max(box_w / width, box_h / height))
    # Rounding must not leave the picture a pixel short of the box.
    scaled = (max(_scaled(width, scale), box_w), max(_scaled(height, scale), box_h))
    return Shape(scaled, box_w, box_h)


def _scaled(length: int, scale: float) -> int:
    return max(1, int(length * scale + 0.5))

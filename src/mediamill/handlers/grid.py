"""Which files a picture of some size gives: from the recipe alone, nothing is looked at.

Pure: plans only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeVar

from mediamill.handlers import stills
from mediamill.recipes import FocalPoint, ImageFormat, ImageOutput, ImageOutputs, Watermark

T = TypeVar("T")

# What a pixel costs by format, relative to each other: how progress is shared out.
COST: Final = {"avif": 30.0, "webp": 4.0, "png": 4.0, "jpeg": 1.0}
_SEARCH_COST: Final = 5.0
"""Encodes, and comparisons, that looking for a quality takes."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One file to make: its name, the box that it fits into, and how it looks."""

    name: str
    format: ImageFormat
    width: int | None
    height: int | None
    pixels: int
    """About how many it will have."""
    fit: str = "inside"
    crop: str = "center"
    focal_point: FocalPoint | None = None
    background: str = "#ffffff"
    sharpen: float = 0.0
    watermark: Watermark | None = None
    animation: str = "first"

    @property
    def cost(self) -> float:
        search = _SEARCH_COST if self.format.target_quality is not None else 1.0
        return self.pixels * COST[self.format.format] * search + 10_000

    def wanted(self) -> dict[str, Any]:
        """As the image process takes it."""
        mark, focal = self.watermark, self.focal_point
        return {
            **self.format.model_dump(exclude_none=True),
            "width": self.width,
            "height": self.height,
            "fit": self.fit,
            "crop": self.crop,
            "focal_point": focal and focal.model_dump(),
            "background": self.background,
            "sharpen": self.sharpen,
            "watermark": mark and mark.model_dump(),
            "animation": self.animation == "keep",
        }


def plan(
    wanted: ImageOutputs, width: int, height: int, *, focal_point: FocalPoint | None = None
) -> list[Planned]:
    """The files for a picture of this size: the grid, smallest first, then the named outputs.

    Sides of the grid above the picture's are replaced by its own, once: never enlarged. A focal
    point that came with the media goes before the recipe's.
    """
    files = []
    for letter, side, whole, other in (
        ("w", wanted.widths, width, height),
        ("h", wanted.heights, height, width),
    ):
        for length in sorted({min(s, whole) for s in side}):
            files += [
                Planned(
                    name=f"{letter}{length}.{stills.EXTENSIONS[format.format]}",
                    format=format,
                    width=length if letter == "w" else None,
                    height=length if letter == "h" else None,
                    pixels=max(1, length * round(other * length / whole)),
                    background=wanted.background,
                    sharpen=wanted.sharpen,
                    watermark=wanted.watermark,
                    animation=wanted.animation,
                )
                for format in wanted.formats
            ]
    for output in wanted.outputs:
        box = (output.width or width, output.height or height)
        files += [
            Planned(
                name=f"{output.name}.{stills.EXTENSIONS[format.format]}",
                format=format,
                width=output.width,
                height=output.height,
                pixels=min(box[0], width) * min(box[1], height),
                fit=output.fit,
                crop=_own(output.crop, wanted.crop),
                focal_point=focal_point or _own(output.focal_point, wanted.focal_point),
                background=_own(output.background, wanted.background),
                sharpen=_own(output.sharpen, wanted.sharpen),
                watermark=_mark(output, wanted),
                animation=_own(output.animation, wanted.animation),
            )
            for format in output.formats or wanted.formats
        ]
    return files


def _own(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def _mark(output: ImageOutput, wanted: ImageOutputs) -> Watermark | None:
    said = "watermark" in output.model_fields_set
    return output.watermark if said else wanted.watermark

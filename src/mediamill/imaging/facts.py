"""What is known about a picture from its header, and the limits that are held against it before a
single pixel is decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from mediamill.failures import limit_exceeded

MAX_DELAYS_SHOWN: Final = 10_000


@dataclass(frozen=True, slots=True)
class Limits:
    """The operator's limits. A request states them; these are the values without a statement."""

    max_pixels: int = 100_000_000
    """Pixels of one frame."""
    max_side: int = 65_500
    max_frames: int = 1000
    max_total_pixels: int = 1_000_000_000
    """Pixels of all frames of an animation together."""
    max_interlaced_pixels: int = 60_000_000
    """Pixels of a progressive or interlaced picture, which a decoder must hold as a whole."""

    @classmethod
    def of(cls, wanted: Mapping[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        given = {name: wanted[name] for name in known & wanted.keys() if wanted[name] is not None}
        return cls(**{name: int(value) for name, value in given.items()})


@dataclass(frozen=True, slots=True)
class Facts:
    """A picture's header, read and understood. `width` and `height` are as shown to people."""

    type: str
    format: str
    width: int
    height: int
    stored_width: int
    stored_height: int
    largest_pixels: int
    orientation: int
    """The EXIF number that was applied, 1 to 8. HEIF and AVIF turn by themselves: always 1."""
    frames: int
    delays_ms: tuple[int, ...]
    plays: int
    """How often an animation is shown; 0 is for ever."""
    pages: int
    """Pages of a TIFF, pictures of a HEIF; only the first one is used."""
    has_alpha: bool
    bands: int
    bit_depth: int
    interpretation: str
    has_icc: bool
    icc_description: str | None
    hdr: str | None
    """`pq` or `hlg`, where the picture says so by number."""
    progressive: bool
    warnings: tuple[str, ...]

    @property
    def animated(self) -> bool:
        return self.frames > 1

    def as_answer(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "format": self.format,
            "width": self.width,
            "height": self.height,
            "stored_width": self.stored_width,
            "stored_height": self.stored_height,
            "orientation": self.orientation,
            "animated": self.animated,
            "frames": self.frames,
            "delays_ms": list(self.delays_ms[:MAX_DELAYS_SHOWN]) if self.animated else [],
            "duration_ms": sum(self.delays_ms) if self.animated else None,
            "loop": self.plays if self.animated else None,
            "pages": self.pages,
            "has_alpha": self.has_alpha,
            "bands": self.bands,
            "bit_depth": self.bit_depth,
            "interpretation": self.interpretation,
            "has_icc": self.has_icc,
            "icc_description": self.icc_description,
            "hdr": self.hdr is not None,
            "hdr_format": self.hdr,
            "progressive": self.progressive,
        }


def check(
    limits: Limits,
    *,
    width: int,
    height: int,
    largest_pixels: int = 0,
    frames: int = 1,
    progressive: bool = False,
) -> None:
    """Raise `resource_limit` for the first limit that the picture breaks. Both sides count: a
    picture of 1 × 65,500 is as hard on some decoders as a large one."""
    pixels = max(width * height, largest_pixels)
    rows = (
        ("max_side", limits.max_side, max(width, height)),
        ("max_pixels", limits.max_pixels, pixels),
        ("max_interlaced_pixels", limits.max_interlaced_pixels, pixels if progressive else 0),
        ("max_frames", limits.max_frames, frames),
        ("max_total_pixels", limits.max_total_pixels, pixels * frames),
    )
    for name, allowed, seen in rows:
        if seen > allowed:
            raise limit_exceeded(
                name,
                allowed=allowed,
                seen=seen,
                unit="frames" if name == "max_frames" else "pixels",
                advice=_ADVICE[name],
            )


_ADVICE: Final = {
    "max_side": "Make the longer side shorter, or cut the picture into parts.",
    "max_pixels": "Save the picture with fewer pixels.",
    "max_interlaced_pixels": "Save it as a baseline JPEG or without interlacing, or with fewer "
    "pixels.",
    "max_frames": "Shorten the animation, or send it as a video.",
    "max_total_pixels": "Shorten the animation or make it smaller, or send it as a video.",
}

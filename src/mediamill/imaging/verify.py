"""The check of one of our own outputs before anyone sees it: it is of the planned format and size,
it decodes to the last row, and nothing is written in it beside the pixels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mediamill.failures import Code, Failure
from mediamill.imaging import Data, by_pillow, color, structure
from mediamill.imaging.complaints import Complaints, decoding
from mediamill.imaging.decode import full_frames
from mediamill.imaging.notice import Notice
from mediamill.sniff import sniff


def verify(data: Data, wanted: Mapping[str, Any], complaints: Complaints) -> dict[str, Any]:
    """Raise `output_invalid` unless the file is what was planned and clean.

    `wanted` names the `format`, and as far as planned `width`, `height`, `pages`, `duration_ms`,
    `has_alpha`, and in `notice` the copyright and artist that it carries. Of an animation, `pages`
    is the most that there may be: encoders merge equal frames.
    """
    sniffed = sniff(data[:4096], len(data))
    if sniffed is None or sniffed.format != wanted["format"]:
        raise _invalid(f"It is not a {wanted['format']} file.")
    with _readable():
        seen = structure.read(sniffed.format, data)
    # Before anything is decoded: a child that was taken over could have left a bomb.
    _compare({"width": seen.width, "height": seen.height, "pages": seen.frames}, wanted)
    with _readable(), decoding(complaints):
        size, has_alpha, xmp = _decoded(sniffed.format, data, seen)
    found = {
        "width": size[0],
        "height": size[1] // seen.frames,
        "pages": seen.frames,
        "has_alpha": has_alpha,
    }
    if seen.frames > 1:
        found["duration_ms"] = sum(seen.delays_ms)
    _compare(found, wanted)
    _check_clean(seen, xmp, wanted.get("notice"))
    return {"ok": True, **found}


def _decoded(
    format: str, data: Data, seen: structure.Structure
) -> tuple[tuple[int, int], bool, bytes]:
    """Decode every row of every frame: the size of all of them, one below the other, whether there
    is transparency, and the XMP packet."""
    if format == "avif":
        # Another decoder than the one that comes with the encoder, and more than twice as fast.
        return by_pillow.decoded_avif(data)
    small = format == "webp" and seen.frames == 1
    # libwebp reads all of a picture that it is to shrink, but colors only what is left of it.
    image = full_frames(format, data, seen.frames, **({"scale": 1 / 8} if small else {}))
    # In order, a decoder comes to the last row through all the others.
    image.crop(0, image.height - 1, image.width, 1).min()
    size = (seen.width, seen.height) if small else (image.width, image.height)
    xmp = image.get("xmp-data") if image.get_typeof("xmp-data") else b""
    return size, bool(image.hasalpha()), xmp


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except Failure as failure:
        if failure.code is Code.MEMORY_LIMIT:
            raise
        reason = failure.problem.detail or failure.code.code
        raise _invalid(f"It cannot be read back ({reason}).") from failure


def _compare(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, value in found.items():
        if not _as_planned(name, value, wanted.get(name)):
            raise _invalid(f"{name} is {value}, planned was {wanted[name]}.")


def _as_planned(name: str, value: Any, planned: Any) -> bool:
    if planned is None:
        return True
    if name == "pages":
        # Encoders merge equal frames of an animation; its time stays.
        return bool(value == planned or 1 <= value < planned)
    if name == "duration_ms":
        return bool(abs(value - planned) <= 10)
    return bool(value == planned)


def _check_clean(seen: structure.Structure, xmp: bytes, planned: Mapping[str, str] | None) -> None:
    beside = set(seen.metadata)
    if planned:
        # Exactly the packet that we write for this notice, to the byte.
        packet = Notice(planned["copyright"], planned["artist"]).packet()
        if xmp != packet:
            raise _invalid("It does not carry the planned notice of copyright and nothing else.")
        beside.discard("xmp")
    if "icc" in beside and (color.profile_description(seen.profile) or "").startswith("sRGB"):
        beside.discard("icc")
    if beside:
        raise _invalid(f"It carries {', '.join(sorted(beside))}.")


def _invalid(detail: str) -> Failure:
    return Failure(Code.OUTPUT_INVALID, detail)

"""The first directory of a TIFF, read for two questions: is every part of the picture there, and
are its colors of a kind that the decoder gets right?"""

from __future__ import annotations

import struct
from typing import Final

from mediamill.failures import Code, Failure
from mediamill.imaging import Data

_STARTS_AND_LENGTHS: Final = ((273, 279), (324, 325))  # strips, tiles
_MAX_PARTS: Final = 1 << 20


def _truncated() -> Failure:
    return Failure(Code.TRUNCATED_INPUT, "The TIFF directory points behind the end of the file.")


def check(data: Data) -> None:
    """Raise `Failure` if the directory, or a strip or tile that it lists, lies behind the end of
    the file, or if the colors are of a kind that libvips would take for RGB. BigTIFF is left to
    the decoder."""
    order = "<" if data[:2] == b"II" else ">"
    magic, first = struct.unpack_from(order + "HI", data, 2)
    if magic != 42:
        return
    if first + 2 > len(data):
        raise _truncated()
    (count,) = struct.unpack_from(order + "H", data, first)
    if first + 2 + 12 * count > len(data):
        raise _truncated()
    entries = {}
    for number in range(count):
        at = first + 2 + 12 * number
        tag, kind, length = struct.unpack_from(order + "HHI", data, at)
        entries[tag] = (kind, length, at + 8)
    for starts_tag, lengths_tag in _STARTS_AND_LENGTHS:
        starts = _numbers(data, order, entries.get(starts_tag))
        lengths = _numbers(data, order, entries.get(lengths_tag))
        if any(a + b > len(data) for a, b in zip(starts, lengths, strict=False)):
            raise _truncated()
    photometric = _numbers(data, order, entries.get(262))[:1]
    compression = _numbers(data, order, entries.get(259))[:1]
    if photometric == (6,) and compression != (7,):
        raise Failure(Code.UNSUPPORTED_CODEC, "A TIFF in YCbCr colors without JPEG compression.")
    if photometric and photometric[0] in (8, 9, 10):
        raise Failure(Code.UNSUPPORTED_CODEC, "A TIFF in Lab colors.")


def _numbers(data: Data, order: str, entry: tuple[int, int, int] | None) -> tuple[int, ...]:
    if entry is None:
        return ()
    kind, length, at = entry
    if kind not in (3, 4) or length > _MAX_PARTS:
        return ()
    size = (2 if kind == 3 else 4) * length
    if size > 4:
        (at,) = struct.unpack_from(order + "I", data, at)
    if at + size > len(data):
        raise _truncated()
    return struct.unpack_from(f"{order}{length}{'HI'[kind - 3]}", data, at)

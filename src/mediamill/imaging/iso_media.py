"""The boxes of AVIF and HEIF files, as far as a gate needs them: is every box complete, how large
does any part claim to be, which codec, how many frames, which color numbers (nclx)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from mediamill.failures import Code, Failure
from mediamill.imaging import Data

MAX_BOXES: Final = 50_000
MAX_DELAYS: Final = 20_000
_TOP: Final = {b"ftyp", b"meta", b"moov", b"mdat", b"free", b"skip", b"uuid", b"idat"}
_CODECS: Final = {
    b"hvc1": "hevc",
    b"av01": "av1",
    b"avc1": "h264",
    b"j2k1": "jpeg2000",
    b"jpeg": "jpeg",
    b"vvc1": "vvc",
    b"unci": "uncompressed",
}


@dataclass(slots=True)
class Found:
    width: int = 0
    height: int = 0
    largest_pixels: int = 0
    bit_depth: int = 0
    codec: str = ""
    frames: int = 1
    delays_ms: list[int] = field(default_factory=list)
    primaries: int = 0
    transfer: int = 0
    metadata: set[str] = field(default_factory=set)
    profile: bytes = b""


@dataclass(slots=True)
class _Walk:
    """The tables of the `meta` box while they are being read."""

    primary: int = 0
    codecs: dict[int, bytes] = field(default_factory=dict)
    properties: list[tuple[bytes, bytes]] = field(default_factory=list)
    owned: dict[int, list[int]] = field(default_factory=dict)
    boxes: int = 0
    complete: bool = False
    """The box with the pictures' data was seen to its end."""


def read(data: Data) -> Found:
    """Walk the file. Raises `Failure` if a box is longer than the file or makes no sense."""
    found, walk = Found(), _Walk()
    for name, start, end in _boxes(data, 0, len(data), walk, top=True):
        walk.complete |= name == b"mdat"
        if name == b"meta":
            _meta(data, start + 4, end, walk)
        elif name == b"moov":
            _movie(data, start, end, walk, found)
    _conclude(walk, found)
    return found


def _boxes(
    data: Data, start: int, end: int, walk: _Walk, *, top: bool = False
) -> Iterator[tuple[bytes, int, int]]:
    at = start
    while at < end:
        walk.boxes += 1
        if walk.boxes > MAX_BOXES:
            raise Failure(Code.CORRUPT_INPUT, f"More than {MAX_BOXES:,} boxes.")
        head = data[at : min(at + 16, end)]
        size, name, used = int.from_bytes(head[:4], "big"), head[4:8], 8
        if len(head) >= 8 and size == 1:
            size, used = int.from_bytes(head[8:16], "big"), 16
        elif size == 0:
            size = end - at
        if top and walk.complete and name not in _TOP:
            return  # something was put behind the file; no reader minds
        if len(head) < used or (top and at + size > end):
            raise Failure(Code.TRUNCATED_INPUT, "The file stops in the middle of a box.")
        if size < used or at + size > end:
            raise Failure(Code.CORRUPT_INPUT, "A box is larger than the one around it.")
        yield name, at + used, at + size
        at += size


def _meta(data: Data, start: int, end: int, walk: _Walk) -> None:
    for name, at, stop in _boxes(data, start, end, walk):
        if name == b"pitm":
            walk.primary = int.from_bytes(data[at + 4 : at + (8 if data[at] else 6)], "big")
        elif name == b"iinf":
            entries = at + (8 if data[at] else 6)
            for kind, entry, _ in _boxes(data, entries, stop, walk):
                version = data[entry]
                if kind == b"infe" and version >= 2:
                    wide = 4 if version == 3 else 2
                    item = int.from_bytes(data[entry + 4 : entry + 4 + wide], "big")
                    walk.codecs[item] = data[entry + 6 + wide : entry + 10 + wide]
        elif name == b"iprp":
            for part, inner, last in _boxes(data, at, stop, walk):
                if part == b"ipco":
                    walk.properties += [
                        (kind, data[a : min(b, a + (1 << 22))])
                        for kind, a, b in _boxes(data, inner, last, walk)
                    ]
                elif part == b"ipma":
                    _associations(data[inner:last], walk)


def _associations(table: bytes, walk: _Walk) -> None:
    version, flags = table[0], table[3]
    count, at = int.from_bytes(table[4:8], "big"), 8
    id_bytes, index_bytes = (4 if version else 2), (2 if flags & 1 else 1)
    for _ in range(min(count, MAX_BOXES)):
        item = int.from_bytes(table[at : at + id_bytes], "big")
        at += id_bytes
        number = table[at]
        at += 1
        for _ in range(number):
            index = int.from_bytes(table[at : at + index_bytes], "big")
            at += index_bytes
            # The highest bit says "essential"; the numbers count from 1.
            walk.owned.setdefault(item, []).append(index & (0x7FFF if index_bytes == 2 else 0x7F))


def _conclude(walk: _Walk, found: Found) -> None:
    mine = [
        walk.properties[index - 1]
        for index in walk.owned.get(walk.primary, [])
        if 0 < index <= len(walk.properties)
    ]
    for kind, body in mine:
        if kind == b"ispe" and len(body) >= 12:
            found.width, found.height = struct.unpack(">II", body[4:12])
        elif kind == b"pixi" and len(body) >= 6:
            found.bit_depth = body[5]
    # A grid may leave the color to its tiles.
    for kind, body in (*walk.properties, *mine):
        if kind == b"colr" and body[:4] == b"nclx" and len(body) >= 10:
            found.primaries, found.transfer = struct.unpack(">HH", body[4:8])
        elif kind == b"colr" and body[:4] in (b"prof", b"rICC"):
            found.metadata.add("icc")
            found.profile = body[4:]
    for kind, body in walk.properties:
        if kind == b"ispe" and len(body) >= 12:
            width, height = struct.unpack(">II", body[4:12])
            found.largest_pixels = max(found.largest_pixels, width * height)
    kinds = set(walk.codecs.values())
    own = _CODECS.get(walk.codecs.get(walk.primary, b""))
    found.codec = found.codec or own or next((_CODECS[k] for k in _CODECS if k in kinds), "")
    if b"Exif" in kinds:
        found.metadata.add("exif")
    if b"mime" in kinds:
        found.metadata.add("xmp")


def _movie(data: Data, start: int, end: int, walk: _Walk, found: Found) -> None:
    """The first track of pictures of an animated AVIF: how many samples, each how long."""
    for name, at, stop in _boxes(data, start, end, walk):
        if name != b"trak" or found.delays_ms:
            continue
        scale, handler, samples = 1000, b"", 0
        runs: list[tuple[int, int]] = []
        for kind, a, b in _inside(data, at, stop, walk):
            if kind == b"mdhd":
                scale = int.from_bytes(data[a + (20 if data[a] else 12) :][:4], "big") or 1000
            elif kind == b"hdlr":
                handler = data[a + 8 : a + 12]
            elif kind == b"stsz":
                samples = int.from_bytes(data[a + 8 : a + 12], "big")
            elif kind == b"stts":
                count = min(int.from_bytes(data[a + 4 : a + 8], "big"), (b - a - 8) // 8)
                runs = [struct.unpack_from(">II", data, a + 8 + 8 * i) for i in range(count)]
        if handler not in (b"pict", b"vide"):
            continue
        found.frames = max(samples, 1)
        for number, ticks in runs:
            room = min(number, MAX_DELAYS - len(found.delays_ms))
            found.delays_ms += [ticks * 1000 // scale] * room


_CONTAINERS: Final = (b"mdia", b"minf", b"stbl")


def _inside(data: Data, start: int, end: int, walk: _Walk) -> Iterator[tuple[bytes, int, int]]:
    for name, at, stop in _boxes(data, start, end, walk):
        if name in _CONTAINERS:
            yield from _inside(data, at, stop, walk)
        else:
            yield name, at, stop

"""What the bytes of a picture say about themselves, read without any decoder.

Decoders keep silent about much that matters here: libvips fills the missing half of a JPEG with
gray, believes a color profile whose checksum is wrong, and shows one picture of an animated PNG.
So the containers are walked by our own code first: is the end there, how large does the picture
claim to be, how many frames, and what was written beside the pixels.

Every walk is bounded by the file's length and by a count of parts, so that a hostile file costs no
more than an honest one of its size.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from mediamill.failures import Code, Failure, limit_exceeded
from mediamill.imaging import Data, iso_media, tiff

MAX_JPEG_SEGMENTS: Final = 20_000
MAX_JPEG_SCANS: Final = 100
MAX_CHUNKS: Final = 400_000
MAX_GIF_BLOCKS: Final = 4_000_000


@dataclass(slots=True)
class Structure:
    """The walk's findings. Sizes are as stored, before orientation; 0 where the walk cannot say."""

    width: int = 0
    height: int = 0
    largest_pixels: int = 0
    """The most pixels that any part claims, also hidden ones; limits are held against this."""
    bit_depth: int = 0
    progressive: bool = False
    """A decoder has to keep the whole picture: progressive, interlaced, or in several scans."""
    codec: str = ""
    frames: int = 1
    delays_ms: list[int] = field(default_factory=list)
    still_apart: bool = False
    """An animated PNG whose still picture is not one of its frames."""
    plays: int = 0
    """How often the animation is shown; 0 is for ever."""
    primaries: int = 0
    transfer: int = 0
    """Color primaries and transfer by number (CICP, ITU-T H.273); 0 where nothing is said."""
    damaged_profile: bool = False
    """The color profile does not match its checksum and must not be used."""
    metadata: set[str] = field(default_factory=set)
    profile: bytes = b""
    """The color profile of a JPEG, WebP or AVIF; kept for the check of our own outputs."""
    warnings: list[str] = field(default_factory=list)


def read(format: str, data: Data) -> Structure:
    """Walk a picture of a sniffed format. Raises `Failure` if it is damaged or its end missing."""
    walk = _WALKS.get(format)
    if walk is None:
        return Structure()
    try:
        return walk(data)
    except (struct.error, IndexError) as error:
        # A walk that ran past the end without noticing it itself.
        raise truncated() from error


def truncated(detail: str = "") -> Failure:
    return Failure(Code.TRUNCATED_INPUT, detail)


def damaged(detail: str) -> Failure:
    return Failure(Code.CORRUPT_INPUT, detail)


# --- JPEG

# A marker is 0xFF and a byte that is neither stuffing (00), a restart (D0-D7) nor fill (FF).
_MARKER: Final = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
_SOF_KNOWN: Final = {0xC0, 0xC1, 0xC2, 0xC9, 0xCA}
_SOF_OTHER: Final = {0xC3, 0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF, 0xF7}
_SOI, _EOI, _SOS, _COM = 0xD8, 0xD9, 0xDA, 0xFE


def _jpeg(data: Data) -> Structure:
    seen = Structure()
    at, components, scans = 2, 0, 0
    profile: dict[int, bytes] = {}
    for _ in range(MAX_JPEG_SEGMENTS):
        found = _MARKER.search(data, at)
        if found is None:
            raise truncated("The JPEG data stops before its end marker.")
        marker, at = found[1][0], found.end()
        if marker == _EOI:
            break
        if marker == _SOI:
            # A second picture begins though the first one has not ended.
            raise truncated("The first picture of the file stops before its end marker.")
        if marker == 0x01:
            continue
        length = int.from_bytes(data[at : at + 2], "big")
        if at + max(length, 2) > len(data):
            raise truncated("The JPEG data stops in the middle of a segment.")
        if length < 2:
            raise damaged("A JPEG segment has an impossible length.")
        body = slice(at + 2, at + length)
        at += length
        if marker in _SOF_OTHER:
            raise Failure(
                Code.UNSUPPORTED_CODEC,
                "A lossless, hierarchical or JPEG-LS picture in a JPEG file.",
            )
        if marker in _SOF_KNOWN and not seen.width:
            head = data[body.start : body.start + 6]
            seen.bit_depth, seen.height, seen.width, components = struct.unpack(">BHHB", head)
            seen.progressive = marker in (0xC2, 0xCA)
            if seen.bit_depth != 8:
                raise Failure(
                    Code.UNSUPPORTED_CODEC,
                    f"A JPEG with {seen.bit_depth} bits per sample; only 8 can be decoded.",
                )
        elif marker == _SOS:
            scans += 1
            # Scans of single components are put together in memory, as in a progressive picture.
            seen.progressive |= data[body.start] < components
        else:
            _jpeg_metadata(marker, data, body, seen, profile)
    else:
        raise damaged(f"More than {MAX_JPEG_SEGMENTS:,} JPEG segments.")
    if scans > MAX_JPEG_SCANS:
        raise limit_exceeded("scans", allowed=MAX_JPEG_SCANS, seen=scans, unit="scans")
    if not scans or not seen.width or not seen.height:
        raise damaged("The JPEG data holds no picture.")
    seen.profile = b"".join(profile[number] for number in sorted(profile))
    seen.largest_pixels = seen.width * seen.height
    return seen


def _jpeg_metadata(
    marker: int, data: Data, body: slice, seen: Structure, profile: dict[int, bytes]
) -> None:
    if marker == _COM:
        seen.metadata.add("comment")
    if not 0xE0 <= marker <= 0xEF:
        return
    head = data[body.start : min(body.stop, body.start + 32)]
    if marker == 0xE1 and head.startswith(b"Exif\x00"):
        seen.metadata.add("exif")
    elif marker == 0xE1 and b"ns.adobe.com/x" in head:
        seen.metadata.add("xmp")
    elif marker == 0xE2 and head.startswith(b"ICC_PROFILE\x00"):
        seen.metadata.add("icc")
        profile[head[12]] = data[body.start + 14 : body.stop]
    elif marker == 0xED:
        seen.metadata.add("iptc")
    elif not head.startswith((b"JFIF\x00", b"Adobe\x00")):
        seen.metadata.add(f"app{marker - 0xE0}")


# --- PNG

_PNG_NOTES: Final = {
    b"eXIf": "exif",
    b"tEXt": "text",
    b"zTXt": "text",
    b"iTXt": "text",
    b"iCCP": "icc",
    b"tIME": "time",
}


_PNG_XMP: Final = b"XML:com.adobe.xmp\0"


def _png(data: Data) -> Structure:
    seen = Structure(frames=1)
    at, animated, ended, pixels = 8, 0, False, False
    for _ in range(MAX_CHUNKS):
        if at + 12 > len(data):
            break
        length, name = struct.unpack(">I4s", data[at : at + 8])
        if at == 8 and name == b"CgBI":
            raise Failure(Code.UNSUPPORTED_CODEC, "A PNG in Apple's own variant for its apps.")
        if (at == 8) != (name == b"IHDR"):
            raise damaged("The PNG header is not where it must be.")
        end = at + 12 + length
        if end > len(data):
            raise truncated("The PNG data stops in the middle of a chunk.")
        body = slice(at + 8, end - 4)
        sound = _png_checksum(data, at + 4, end)
        # The fifth bit of the first letter says that a reader may do without the chunk.
        if not sound and not name[0] & 0x20:
            raise damaged(f"The PNG chunk {name.decode('latin-1')} does not match its checksum.")
        at = end
        if name == b"IEND":
            ended = True
            break
        pixels = pixels or name == b"IDAT"
        if name in _PNG_NOTES:
            is_xmp = name == b"iTXt" and data[body.start : body.start + 18] == _PNG_XMP
            seen.metadata.add("xmp" if is_xmp else _PNG_NOTES[name])
        if name == b"iCCP" and not sound:
            seen.damaged_profile = True
            seen.warnings.append("The color profile is damaged and was left out.")
        if name == b"IHDR":
            seen.width, seen.height, seen.bit_depth = struct.unpack(
                ">IIB", data[body.start : body.start + 9]
            )
            seen.progressive = data[body.start + 12] == 1
        elif name == b"cICP" and sound and length == 4:
            seen.primaries, seen.transfer = data[body.start], data[body.start + 1]
        elif name == b"acTL" and sound and length == 8 and not pixels:
            animated, seen.plays = struct.unpack(">II", data[body])
        elif name == b"fcTL" and length == 26:
            number, base = struct.unpack(">HH", data[body.start + 20 : body.start + 24])
            seen.still_apart |= pixels and not seen.delays_ms
            seen.delays_ms.append(_delay(1000 * number // (base or 100)))
    if not ended:
        raise truncated("The PNG data stops before its end chunk.")
    if not pixels or not seen.width or not seen.height:
        raise damaged("The PNG data holds no picture.")
    if animated:
        # The count that is announced and the frames that are there: a reader may trust either.
        seen.frames = max(animated, len(seen.delays_ms), 1)
    else:
        seen.delays_ms.clear()
    seen.largest_pixels = seen.width * seen.height
    return seen


def _png_checksum(data: Data, start: int, end: int) -> bool:
    with memoryview(data) as view, view[start : end - 4] as part:
        return zlib.crc32(part) == int.from_bytes(data[end - 4 : end], "big")


# --- WebP


def _webp(data: Data) -> Structure:
    seen = Structure(bit_depth=8, frames=0)
    announced = int.from_bytes(data[4:8], "little") + 8
    if announced > len(data):
        raise truncated("The WebP data is shorter than its header says.")
    at, pixels, animated = 12, False, False
    for _ in range(MAX_CHUNKS):
        if at + 8 > announced:
            break
        name, length = struct.unpack("<4sI", data[at : at + 8])
        at += 8
        if at + length > announced:
            raise damaged("A WebP chunk is longer than the file.")
        head = data[at : at + min(length, 16)]
        if name == b"VP8X":
            seen.width = 1 + int.from_bytes(head[4:7], "little")
            seen.height = 1 + int.from_bytes(head[7:10], "little")
        elif name == b"ANIM":
            animated, seen.plays = True, int.from_bytes(head[4:6], "little")
        elif name == b"ANMF":
            pixels = True
            seen.frames += 1
            seen.delays_ms.append(_delay(int.from_bytes(head[12:15], "little")))
        elif name in (b"VP8 ", b"VP8L"):
            pixels = True
            width, height = _webp_size(name, head)
            seen.width, seen.height = seen.width or width, seen.height or height
            seen.largest_pixels = max(seen.largest_pixels, width * height)
        elif name in (b"EXIF", b"XMP ", b"ICCP"):
            seen.metadata.add({b"EXIF": "exif", b"XMP ": "xmp", b"ICCP": "icc"}[name])
            if name == b"ICCP":
                seen.profile = data[at : at + length]
        at += length + length % 2
    if not pixels or not seen.width or not seen.height:
        raise damaged("The WebP data holds no picture.")
    if not animated:
        seen.frames = 1
        seen.delays_ms.clear()
    seen.frames = max(seen.frames, 1)
    seen.largest_pixels = max(seen.largest_pixels, seen.width * seen.height)
    return seen


def _webp_size(name: bytes, head: bytes) -> tuple[int, int]:
    if name == b"VP8 ":
        if head[3:6] != b"\x9d\x01\x2a":
            raise damaged("The WebP picture does not begin with a key frame.")
        width, height = struct.unpack("<HH", head[6:10])
        return width & 0x3FFF, height & 0x3FFF
    if head[:1] != b"\x2f":
        raise damaged("The lossless WebP picture lacks its signature.")
    bits = int.from_bytes(head[1:5], "little")
    return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)


# --- GIF


def _gif(data: Data) -> Structure:
    seen = Structure(bit_depth=8, frames=0, plays=1)
    seen.width, seen.height, flags = struct.unpack("<HHB", data[6:11])
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    delay, blocks, ended = 0, 0, False
    while at < len(data):
        kind = data[at]
        if kind == 0x3B:
            ended = True
            break
        if kind == 0x21:
            label, start = data[at + 1], at + 2
            at, blocks = _gif_blocks(data, start, blocks)
            if label == 0xF9 and data[start] >= 4:
                delay = int.from_bytes(data[start + 2 : start + 4], "little") * 10
            elif label == 0xFF and data[start + 1 : start + 12] in (
                b"NETSCAPE2.0",
                b"ANIMEXTS1.0",
            ):
                times = int.from_bytes(data[start + 14 : start + 16], "little")
                seen.plays = times + 1 if times else 0
            elif label == 0xFF and data[start + 1 : start + 9] == b"XMP Data":
                seen.metadata.add("xmp")
            elif label == 0xFE:
                seen.metadata.add("comment")
        elif kind == 0x2C:
            left, top, width, height, flags = struct.unpack("<HHHHB", data[at + 1 : at + 10])
            at += 10 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
            at, blocks = _gif_blocks(data, at + 1, blocks)
            seen.largest_pixels = max(seen.largest_pixels, (left + width) * (top + height))
            if not seen.width or not seen.height:
                seen.width, seen.height = left + width, top + height
            seen.frames += 1
            seen.delays_ms.append(_delay(delay))
            delay = 0
        elif kind == 0:
            at += 1  # some writers leave a stray terminator
        else:
            raise damaged("The GIF data holds a block of no known kind.")
    if not seen.frames:
        raise truncated() if at >= len(data) else damaged("The GIF data holds no picture.")
    if not ended:
        seen.warnings.append("The GIF has no end mark; all of its pictures are complete.")
    if seen.frames == 1:
        seen.delays_ms.clear()
    seen.largest_pixels = max(seen.largest_pixels, seen.width * seen.height)
    return seen


def _gif_blocks(data: Data, at: int, blocks: int) -> tuple[int, int]:
    """Skip a chain of sub-blocks: a length byte and as many bytes, until a length of 0."""
    while True:
        if at >= len(data):
            raise truncated("The GIF data stops in the middle of a block.")
        length = data[at]
        at += 1 + length
        if not length:
            return at, blocks
        blocks += 1
        if blocks > MAX_GIF_BLOCKS:
            raise damaged(f"More than {MAX_GIF_BLOCKS:,} GIF blocks.")


def _delay(milliseconds: int) -> int:
    """As every browser does: a delay of 10 ms or less is a mistake and means 100 ms."""
    return milliseconds if milliseconds > 10 else 100


# --- AVIF and HEIF


def _heif(data: Data) -> Structure:
    found = iso_media.read(data)
    return Structure(
        width=found.width,
        height=found.height,
        largest_pixels=found.largest_pixels,
        bit_depth=found.bit_depth,
        codec=found.codec,
        frames=found.frames,
        delays_ms=[_delay(delay) for delay in found.delays_ms],
        primaries=found.primaries,
        transfer=found.transfer,
        metadata=found.metadata,
        profile=found.profile,
    )


# --- TIFF, BMP, ICO


def _tiff(data: Data) -> Structure:
    tiff.check(data)
    return Structure()


def _bmp(data: Data) -> Structure:
    seen = Structure()
    offset, header = struct.unpack("<II", data[10:18])
    compression = 0
    if header == 12:
        seen.width, seen.height, _, bits = struct.unpack("<HHHH", data[18:26])
    else:
        seen.width, seen.height, _, bits, compression = struct.unpack("<iiHHI", data[18:34])
    seen.width, seen.height = abs(seen.width), abs(seen.height)
    seen.bit_depth = 8
    seen.largest_pixels = seen.width * seen.height
    if not seen.largest_pixels:
        raise damaged("The BMP data holds no picture.")
    row = (seen.width * bits + 31) // 32 * 4
    if compression in (0, 3, 6) and offset + row * seen.height > len(data):
        raise truncated("The BMP data is shorter than its header says.")
    return seen


def _ico(data: Data) -> Structure:
    seen = Structure(bit_depth=8)
    for width, height, offset, length in _ico_entries(data):
        if offset + length > len(data):
            raise truncated("An icon's picture lies behind the end of the file.")
        size = (width or 256, height or 256)
        if data[offset : offset + 8] == b"\x89PNG\r\n\x1a\n":
            inner = _png(data[offset : offset + length])
            size = (inner.width, inner.height)
        if size[0] * size[1] > seen.largest_pixels:
            seen.width, seen.height = size
            seen.largest_pixels = size[0] * size[1]
    return seen


def _ico_entries(data: Data) -> Iterator[tuple[int, int, int, int]]:
    count = int.from_bytes(data[4:6], "little")
    for number in range(min(count, 256)):
        entry = data[6 + 16 * number : 22 + 16 * number]
        width, height, length, offset = struct.unpack("<BB6xII", entry)
        yield width, height, offset, length


_WALKS: Final[dict[str, Callable[[Data], Structure]]] = {
    "jpeg": _jpeg,
    "png": _png,
    "webp": _webp,
    "gif": _gif,
    "avif": _heif,
    "heic": _heif,
    "heif": _heif,
    "tiff": _tiff,
    "bmp": _bmp,
    "ico": _ico,
}

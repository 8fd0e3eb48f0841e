"""What a file is, told by its first bytes: one table of signatures. Names and headers of the client
are never asked. This is a gate in front of the decoders, not a parser: a file that passes can still
be damaged, and the decoders have the last word.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

HEAD_BYTES: Final = 4096
"""How much of a file `sniff` wants to see. Less will do; more is not looked at."""


class Kind(StrEnum):
    IMAGE = "image"
    VIDEO = "video"
    """A container that can hold moving pictures. Whether it does is for the probe to say."""
    AUDIO = "audio"
    DOCUMENT = "document"
    """Known, and nothing that this product decodes: text, archives, programs, office files."""
    PLAYLIST = "playlist"
    """A text that makes a player open other files or addresses. Never handed to a decoder."""


@dataclass(frozen=True, slots=True)
class Sniffed:
    """`type` is the media type to serve the bytes under, `format` our short name for it."""

    type: str
    kind: Kind
    format: str


def sniff(head: bytes, size: int | None = None) -> Sniffed | None:
    """Say what the file is that begins with `head`, or None if nothing is recognized.

    `size` is the length of the whole file where known; it settles the formats whose signature is
    so weak that the length must fit too.
    """
    head = bytes(head[:HEAD_BYTES])
    for offset, magic, found in _MAGICS:
        if head.startswith(magic, offset):
            return found
    for test in _TESTS:
        sniffed = test(head, size)
        if sniffed is not None:
            return sniffed
    return None


# Images.
JPEG: Final = Sniffed("image/jpeg", Kind.IMAGE, "jpeg")
PNG: Final = Sniffed("image/png", Kind.IMAGE, "png")
GIF: Final = Sniffed("image/gif", Kind.IMAGE, "gif")
WEBP: Final = Sniffed("image/webp", Kind.IMAGE, "webp")
AVIF: Final = Sniffed("image/avif", Kind.IMAGE, "avif")
HEIC: Final = Sniffed("image/heic", Kind.IMAGE, "heic")
HEIF: Final = Sniffed("image/heif", Kind.IMAGE, "heif")
TIFF: Final = Sniffed("image/tiff", Kind.IMAGE, "tiff")
BMP: Final = Sniffed("image/bmp", Kind.IMAGE, "bmp")
ICO: Final = Sniffed("image/vnd.microsoft.icon", Kind.IMAGE, "ico")
SVG: Final = Sniffed("image/svg+xml", Kind.IMAGE, "svg")
JXL: Final = Sniffed("image/jxl", Kind.IMAGE, "jxl")
JP2: Final = Sniffed("image/jp2", Kind.IMAGE, "jp2")
PSD: Final = Sniffed("image/vnd.adobe.photoshop", Kind.IMAGE, "psd")
RAW: Final = Sniffed("image/x-raw", Kind.IMAGE, "raw")

# Video and sound.
MP4: Final = Sniffed("video/mp4", Kind.VIDEO, "mp4")
MOV: Final = Sniffed("video/quicktime", Kind.VIDEO, "mov")
M4A: Final = Sniffed("audio/mp4", Kind.AUDIO, "m4a")
THREE_GP: Final = Sniffed("video/3gpp", Kind.VIDEO, "3gp")
THREE_G2: Final = Sniffed("video/3gpp2", Kind.VIDEO, "3g2")
MATROSKA: Final = Sniffed("video/x-matroska", Kind.VIDEO, "matroska")
WEBM: Final = Sniffed("video/webm", Kind.VIDEO, "webm")
AVI: Final = Sniffed("video/x-msvideo", Kind.VIDEO, "avi")
MPEG_TS: Final = Sniffed("video/mp2t", Kind.VIDEO, "mpegts")
MPEG_PS: Final = Sniffed("video/mpeg", Kind.VIDEO, "mpeg")
FLV: Final = Sniffed("video/x-flv", Kind.VIDEO, "flv")
ASF: Final = Sniffed("video/x-ms-asf", Kind.VIDEO, "asf")
REAL: Final = Sniffed("application/vnd.rn-realmedia", Kind.VIDEO, "rm")
OGG_VIDEO: Final = Sniffed("video/ogg", Kind.VIDEO, "ogg")
OGG_AUDIO: Final = Sniffed("audio/ogg", Kind.AUDIO, "ogg")
MP3: Final = Sniffed("audio/mpeg", Kind.AUDIO, "mp3")
FLAC: Final = Sniffed("audio/flac", Kind.AUDIO, "flac")
WAV: Final = Sniffed("audio/wav", Kind.AUDIO, "wav")
AAC: Final = Sniffed("audio/aac", Kind.AUDIO, "aac")
AIFF: Final = Sniffed("audio/aiff", Kind.AUDIO, "aiff")
AMR: Final = Sniffed("audio/amr", Kind.AUDIO, "amr")

# Texts that open other files.
HLS: Final = Sniffed("application/vnd.apple.mpegurl", Kind.PLAYLIST, "hls")
DASH: Final = Sniffed("application/dash+xml", Kind.PLAYLIST, "dash")
FFCONCAT: Final = Sniffed("text/x-ffconcat", Kind.PLAYLIST, "ffconcat")
SDP: Final = Sniffed("application/sdp", Kind.PLAYLIST, "sdp")
OTHER_PLAYLIST: Final = Sniffed("text/plain", Kind.PLAYLIST, "playlist")

# Known, and not ours.
PDF: Final = Sniffed("application/pdf", Kind.DOCUMENT, "pdf")
HTML: Final = Sniffed("text/html", Kind.DOCUMENT, "html")
XML: Final = Sniffed("application/xml", Kind.DOCUMENT, "xml")
TEXT: Final = Sniffed("text/plain", Kind.DOCUMENT, "text")
SCRIPT: Final = Sniffed("text/x-script", Kind.DOCUMENT, "script")
ZIP: Final = Sniffed("application/zip", Kind.DOCUMENT, "zip")
GZIP: Final = Sniffed("application/gzip", Kind.DOCUMENT, "gzip")
ARCHIVE: Final = Sniffed("application/octet-stream", Kind.DOCUMENT, "archive")
PROGRAM: Final = Sniffed("application/octet-stream", Kind.DOCUMENT, "program")
OFFICE: Final = Sniffed("application/octet-stream", Kind.DOCUMENT, "office")

# (offset, bytes, what it is): the signatures that need no second look.
_MAGICS: Final[tuple[tuple[int, bytes, Sniffed], ...]] = (
    (0, b"\xff\xd8\xff", JPEG),
    (0, b"\x89PNG\r\n\x1a\n", PNG),
    (0, b"GIF87a", GIF),
    (0, b"GIF89a", GIF),
    (0, b"II*\x00\x10\x00\x00\x00CR\x02", RAW),  # Canon CR2: a TIFF with a mark of its own
    (0, b"IIU\x00", RAW),  # Panasonic RW2
    (0, b"IIRO", RAW),  # Olympus ORF
    (0, b"FUJIFILMCCD-RAW", RAW),
    (0, b"II*\x00", TIFF),
    (0, b"MM\x00*", TIFF),
    (0, b"II+\x00\x08\x00\x00\x00", TIFF),  # BigTIFF
    (0, b"MM\x00+\x00\x08\x00\x00", TIFF),
    (0, b"\x00\x00\x00\x0cJXL \r\n\x87\n", JXL),
    (0, b"\xff\x0a", JXL),
    (0, b"\x00\x00\x00\x0cjP  \r\n\x87\n", JP2),
    (0, b"\xff\x4f\xff\x51", JP2),
    (0, b"8BPS\x00\x01", PSD),
    (0, b"8BPS\x00\x02", PSD),
    (0, b"FLV\x01", FLV),
    (0, bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c"), ASF),
    (0, b".RMF\x00\x00\x00", REAL),
    (0, b"\x00\x00\x01\xba", MPEG_PS),
    (0, b"\x00\x00\x01\xb3", MPEG_PS),
    (0, b"fLaC", FLAC),
    (0, b"#!AMR", AMR),
    (0, b"%PDF-", PDF),
    (0, b"PK\x03\x04", ZIP),
    (0, b"PK\x05\x06", ZIP),
    (0, b"\x1f\x8b", GZIP),
    (0, b"BZh", ARCHIVE),
    (0, b"\xfd7zXZ\x00", ARCHIVE),
    (0, b"\x28\xb5\x2f\xfd", ARCHIVE),
    (0, b"7z\xbc\xaf\x27\x1c", ARCHIVE),
    (0, b"Rar!\x1a\x07", ARCHIVE),
    (257, b"ustar", ARCHIVE),
    (0, b"\x7fELF", PROGRAM),
    (0, b"MZ", PROGRAM),
    (0, b"\xcf\xfa\xed\xfe", PROGRAM),
    (0, b"\xce\xfa\xed\xfe", PROGRAM),
    (0, b"\xca\xfe\xba\xbe", PROGRAM),
    (0, b"\x00asm", PROGRAM),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", OFFICE),
    (0, b"#!", SCRIPT),
)


def _riff(head: bytes, _size: int | None) -> Sniffed | None:
    if head[:4] not in (b"RIFF", b"RF64", b"RIFX", b"FORM"):
        return None
    return {
        b"WEBP": WEBP,
        b"AVI ": AVI,
        b"AVIX": AVI,
        b"WAVE": WAV,
        b"AIFF": AIFF,
        b"AIFC": AIFF,
    }.get(head[8:12])


_STILL_BRANDS: Final = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"}
_BRANDS: Final = {
    b"crx ": RAW,
    b"qt  ": MOV,
    b"M4A ": M4A,
    b"M4B ": M4A,
    b"M4P ": M4A,
    b"F4A ": M4A,
    **dict.fromkeys(_STILL_BRANDS, HEIC),
    **dict.fromkeys((b"mif1", b"mif2", b"msf1", b"miaf", b"avci", b"avcs", b"vvic"), HEIF),
}


def _iso_media(head: bytes, _size: int | None) -> Sniffed | None:
    """MP4 and its relatives: by brand, or by the boxes with which old QuickTime files begin."""
    length, name = int.from_bytes(head[:4], "big"), head[4:8]
    if name in (b"ftyp", b"styp"):
        others = head[16 : max(length, 16)]
        return _brand(head[8:12], {others[i : i + 4] for i in range(0, len(others) - 3, 4)})
    # Size 1 says that a 64-bit size follows, size 0 that the box runs to the end of the file.
    old = name in (b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")
    return MOV if old and (length in (0, 1) or length >= 8) else None


def _brand(major: bytes, others: set[bytes]) -> Sniffed:
    if (others | {major}) & {b"avif", b"avis"}:
        return AVIF
    found = _BRANDS.get(major)
    if found is HEIF and others & _STILL_BRANDS:
        return HEIC
    if found is not None:
        return found
    if major[:3] == b"3g2":
        return THREE_G2
    return THREE_GP if major[:2] == b"3g" else MP4


def _ebml(head: bytes, _size: int | None) -> Sniffed | None:
    if not head.startswith(b"\x1aE\xdf\xa3"):
        return None
    doctype = re.search(rb"\x42\x82[\x81-\x8f]([a-z]+)", head[:256])
    return WEBM if doctype and doctype[1] == b"webm" else MATROSKA


def _transport_stream(head: bytes, _size: int | None) -> Sniffed | None:
    """Packets of 188 bytes that begin with 0x47; Blu-ray and AVCHD put 4 bytes before each."""
    for start, step in ((0, 188), (4, 192)):
        marks = head[start::step]
        if len(marks) >= 2 and set(marks[:8]) == {0x47}:
            return MPEG_TS
    return None


def _ogg(head: bytes, _size: int | None) -> Sniffed | None:
    if not head.startswith(b"OggS"):
        return None
    # Every stream of the file begins on a page of its own before any data comes.
    video = (b"\x80theora", b"\x01video\x00\x00\x00", b"BBCD\x00", b"\x4fVP80")
    return OGG_VIDEO if any(mark in head for mark in video) else OGG_AUDIO


def _tagged(head: bytes, size: int | None) -> Sniffed | None:
    """An ID3 tag, and what comes after it: decoders skip the tag, so this looks behind it too."""
    if not head.startswith(b"ID3") or len(head) < 10 or max(head[6:10]) > 0x7F:
        return None
    length = 10 + (head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9])
    rest = head[length:].lstrip(b"\x00")
    if rest.startswith(b"ID3"):
        return MP3
    behind = sniff(rest, None if size is None else size - length) if len(rest) >= 16 else None
    return behind if behind is not None else MP3


def _frames_of_sound(head: bytes, size: int | None) -> Sniffed | None:
    """ADTS and MP3 have no signature, only a frame header of 11 or 12 set bits; so the next frame
    must begin where the first one ends."""
    for name, length_of in ((AAC, _adts_length), (MP3, _mp3_length)):
        first = length_of(head)
        if first is None:
            continue
        if first == size or length_of(head[first:]) is not None:
            return name
    return None


def _adts_length(frame: bytes) -> int | None:
    if len(frame) < 7 or frame[0] != 0xFF or frame[1] & 0xF6 != 0xF0:
        return None
    length = (frame[3] & 3) << 11 | frame[4] << 3 | frame[5] >> 5
    return length if frame[2] >> 2 & 15 < 13 and length > 7 else None


_MP3_RATES: Final = (44100, 48000, 32000)
_MP3_KBITS: Final = {
    # (MPEG 1?, layer): kbit/s by index
    (True, 1): (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}


def _mp3_length(frame: bytes) -> int | None:
    if len(frame) < 4 or frame[0] != 0xFF or frame[1] & 0xE0 != 0xE0:
        return None
    version, layer = frame[1] >> 3 & 3, 4 - (frame[1] >> 1 & 3)
    bitrate, rate = frame[2] >> 4, frame[2] >> 2 & 3
    if version == 1 or layer == 4 or bitrate in (0, 15) or rate == 3:
        return None
    hertz = _MP3_RATES[rate] >> {3: 0, 2: 1, 0: 2}[version]
    bits = _MP3_KBITS[(version == 3, layer)][bitrate] * 1000
    padding = frame[2] >> 1 & 1
    if layer == 1:
        return (12 * bits // hertz + padding) * 4
    samples = 72 if layer == 3 and version != 3 else 144
    return samples * bits // hertz + padding


def _bmp(head: bytes, size: int | None) -> Sniffed | None:
    """`BM` alone is the start of many a text; the length of the second header must be known."""
    if not head.startswith(b"BM") or len(head) < 26:
        return None
    offset, header = int.from_bytes(head[10:14], "little"), int.from_bytes(head[14:18], "little")
    fits = offset >= 14 + header and (size is None or offset <= size + 1024)
    return BMP if header in (12, 16, 40, 52, 56, 64, 108, 124) and fits else None


def _ico(head: bytes, size: int | None) -> Sniffed | None:
    if head[:4] not in (b"\x00\x00\x01\x00", b"\x00\x00\x02\x00") or len(head) < 22:
        return None
    count, offset = int.from_bytes(head[4:6], "little"), int.from_bytes(head[18:22], "little")
    if not 1 <= count <= 256 or head[9] != 0 or offset < 6 + 16 * count:
        return None
    return ICO if size is None or offset < size else None


_PLAYLISTS: Final = (
    (re.compile(rb"#EXTM3U"), HLS),
    (re.compile(rb"ffconcat version"), FFCONCAT),
    (re.compile(rb"v=0\r?\n(?:.*\r?\n)*?[oscm]="), SDP),
    (re.compile(rb"\[playlist\]|\[Reference\]|RTSPtext|<asx|<smil|<\?wpl|<\?zpl", re.I), None),
)
# What may stand before the root element: processing instructions, comments, a document type with
# its internal subset. Bounded by the length of the head.
_PROLOG: Final = re.compile(
    rb"(?:\s+|<\?.*?\?>|<!--.*?-->|<!DOCTYPE[^\[>]*(?:\[.*?\]\s*)?>)", re.I | re.S
)
_ROOT: Final = re.compile(rb"<(?:[A-Za-z_][\w.-]*:)?([A-Za-z_][\w.-]*)")
_ROOTS: Final = {
    b"svg": SVG,
    b"html": HTML,
    b"head": HTML,
    b"body": HTML,
    b"script": HTML,
    b"iframe": HTML,
    b"mpd": DASH,
    b"asx": OTHER_PLAYLIST,
    b"smil": OTHER_PLAYLIST,
    b"playlist": OTHER_PLAYLIST,
    b"smoothstreamingmedia": OTHER_PLAYLIST,
    b"compositionplaylist": OTHER_PLAYLIST,
}


def _text(head: bytes, _size: int | None) -> Sniffed | None:
    """Texts: the dangerous ones by their first words, the marked-up ones by their root element."""
    text = _as_ascii(head)
    if text is None:
        return None
    text = text.lstrip()
    for pattern, found in _PLAYLISTS:
        if pattern.match(text):
            return found or OTHER_PLAYLIST
    if text.startswith(b"<"):
        if text[:14].lower() == b"<!doctype html":
            return HTML
        declared = text.startswith(b"<?xml")
        at = 0
        while (part := _PROLOG.match(text, at)) is not None and part.end() > at:
            at = part.end()
        root = _ROOT.match(text, at)
        known = _ROOTS.get(root[1].lower()) if root else None
        if known is not None:
            return known
        # The root may lie behind the head; then a document type that names SVG tells.
        if root is None and re.search(rb"<!DOCTYPE\s+(?:\w+:)?svg", text, re.I):
            return SVG
        if declared:
            return XML
        return HTML if re.match(rb"</?[a-z!]", text, re.I) else TEXT
    return TEXT if text else None


def _as_ascii(head: bytes) -> bytes | None:
    """The head as bytes of text, or None if it is none. UTF-16 is read down to its ASCII part."""
    for mark, codec in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if head.startswith(mark):
            return head[2:].decode(codec, "ignore").encode("ascii", "replace")
    if head.startswith(b"<\x00"):
        return head.decode("utf-16-le", "ignore").encode("ascii", "replace")
    if head.startswith(b"\x00<"):
        return head.decode("utf-16-be", "ignore").encode("ascii", "replace")
    head = head.removeprefix(b"\xef\xbb\xbf")
    control = sum(byte < 32 and byte not in b"\t\n\r\f\x1b" for byte in head)
    # A truncated character at the end of the head is no reason to call a text binary, and neither
    # is an old 8-bit encoding; control characters are.
    return head if control == 0 else None


_TESTS: Final[tuple[Callable[[bytes, int | None], Sniffed | None], ...]] = (
    _riff,
    _iso_media,
    _ebml,
    _ogg,
    _tagged,
    _transport_stream,
    _bmp,
    _ico,
    _frames_of_sound,
    _text,
)

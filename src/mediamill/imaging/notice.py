"""Who made a picture and whose it is: read from the EXIF and XMP parts of an original, and written
as a small XMP packet of our own, which is all that an output may carry beside its pixels."""

from __future__ import annotations

import html
import re
import struct
from dataclasses import dataclass
from typing import Final

MAX_CHARACTERS: Final = 500
_COPYRIGHT, _ARTIST = 0x8298, 0x013B
_MAX_ENTRIES: Final = 500
_XMP_LOOK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Notice:
    """`copyright` and `artist` as plain text, empty where nothing is said."""

    copyright: str = ""
    artist: str = ""

    def __bool__(self) -> bool:
        return bool(self.copyright or self.artist)

    def packet(self) -> bytes:
        """The XMP packet, the same bytes for the same notice."""
        parts = []
        if self.copyright:
            text = html.escape(self.copyright, quote=False)
            parts.append(
                f'<dc:rights><rdf:Alt><rdf:li xml:lang="x-default">{text}</rdf:li></rdf:Alt>'
                "</dc:rights>"
            )
        if self.artist:
            text = html.escape(self.artist, quote=False)
            parts.append(f"<dc:creator><rdf:Seq><rdf:li>{text}</rdf:li></rdf:Seq></dc:creator>")
        return (
            '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'
            '<x:xmpmeta xmlns:x="adobe:ns:meta/">'
            '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
            '<rdf:Description rdf:about="" xmlns:dc="http://purl.org/dc/elements/1.1/">'
            f"{''.join(parts)}</rdf:Description></rdf:RDF></x:xmpmeta>"
            '<?xpacket end="r"?>'
        ).encode()


def read(exif: bytes, xmp: bytes) -> Notice:
    """The notice of an original; EXIF goes before XMP. What cannot be read is empty."""
    copyright_, artist = _from_exif(exif)
    return Notice(
        copyright_ or _from_xmp(xmp, "rights"),
        artist or _from_xmp(xmp, "creator"),
    )


def _from_exif(exif: bytes) -> tuple[str, str]:
    start = re.search(rb"II\*\x00|MM\x00\*", exif[:16])
    if start is None:
        return "", ""
    exif = exif[start.start() :]
    order = "<" if exif[:2] == b"II" else ">"
    found: dict[int, str] = {}
    try:
        (first,) = struct.unpack_from(order + "I", exif, 4)
        (count,) = struct.unpack_from(order + "H", exif, first)
        for number in range(min(count, _MAX_ENTRIES)):
            at = first + 2 + 12 * number
            tag, kind, length = struct.unpack_from(order + "HHI", exif, at)
            if tag in (_COPYRIGHT, _ARTIST) and kind in (2, 129):  # ASCII, and UTF-8 of EXIF 3
                at += 8
                if length > 4:
                    (at,) = struct.unpack_from(order + "I", exif, at)
                # Photographer and editor stand behind each other, each with a zero at its end.
                raw = exif[at : at + min(length, 4 * MAX_CHARACTERS)].replace(b"\0", b" ")
                found[tag] = _clean(_decoded(raw))
    except struct.error:
        pass
    return found.get(_COPYRIGHT, ""), found.get(_ARTIST, "")


def _from_xmp(xmp: bytes, name: str) -> str:
    text = xmp[:_XMP_LOOK_BYTES].decode("utf-8", "replace")
    part = re.search(rf"<dc:{name}\b[^>]*>(.{{0,20000}}?)</dc:{name}>", text, re.S)
    if part is None:
        return ""
    items = re.findall(r"<rdf:li\b[^>]*>([^<]*)</rdf:li>", part[1]) or re.findall(
        r"^[^<]*$", part[1]
    )
    return _clean("; ".join(html.unescape(item).strip() for item in items[:10]))


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _clean(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line[:MAX_CHARACTERS].strip()

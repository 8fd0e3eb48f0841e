"""SVG drawings: drawn into a PNG by a process that serves this one request and nothing else.

librsvg gets the drawing as bytes without an address, so that what it refers to cannot be found;
a drawing that refers to anything outside itself is refused before, since it would look wrong.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

import pyvips

from mediamill.failures import Code, Failure, limit_exceeded
from mediamill.imaging import Data
from mediamill.imaging.complaints import Complaints, decoding
from mediamill.imaging.facts import Limits, check
from mediamill.sniff import HEAD_BYTES, sniff

MAX_BYTES: Final = 4 << 20
MAX_DRAWN_SIDE: Final = 4096
_REACHES_OUT: Final = re.compile(
    rb"""<!ENTITY|<script|\son\w+\s*=|@import|url\((?!\s*['"]?\s*\#)|javascript:|<foreignObject
    |(?:href|src)\s*=\s*['"](?!\#)|<\?xml-stylesheet""",
    re.I | re.X,
)


def reaches_out(data: Data) -> bool:
    """Whether an SVG names anything outside itself, or carries script."""
    return _REACHES_OUT.search(data[:MAX_BYTES].replace(b"\x00", b"")) is not None


def unsafe() -> Failure:
    return Failure(
        Code.UNSAFE_CONTENT, "The SVG refers to other files or addresses, or has script."
    )


def draw(
    data: Data, request: Mapping[str, Any], fd: int, limits: Limits, complaints: Complaints
) -> dict[str, Any]:
    """Draw it so large that `width` and `height` (what outputs need) can be taken from it, at most
    MAX_DRAWN_SIDE and what the limits allow, and write a PNG. Answers with its own size too."""
    if len(data) > MAX_BYTES:
        raise limit_exceeded("max_svg_bytes", allowed=MAX_BYTES, seen=len(data), unit="bytes")
    sniffed = sniff(data[:HEAD_BYTES], len(data))
    if sniffed is None or sniffed.format != "svg":
        raise Failure(Code.UNSUPPORTED_FORMAT)
    if reaches_out(data):
        raise unsafe()
    text = bytes(data)
    with decoding(complaints):
        header = pyvips.Image.svgload_buffer(text)
        width, height = header.width, header.height
        check(limits, width=width, height=height)
        wanted = max(
            int(request.get("width") or 0) / width, int(request.get("height") or 0) / height
        )
        most = min(MAX_DRAWN_SIDE, limits.max_side) / max(width, height)
        most = min(most, (limits.max_pixels / (width * height)) ** 0.5)
        scale = max(min(max(wanted, 1.0), most), 1 / max(width, height))
        image = pyvips.Image.svgload_buffer(text, scale=scale)
        check(limits, width=image.width, height=image.height)
        image = image.copy_memory()
        image.pngsave_target(pyvips.Target.new_to_descriptor(fd), compression=1, keep="none")
    return {
        "type": sniffed.type,
        "format": sniffed.format,
        "width": width,
        "height": height,
        "drawn_width": image.width,
        "drawn_height": image.height,
        "bytes": os.fstat(fd).st_size,
    }

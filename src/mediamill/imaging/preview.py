"""What a page shows before the picture: hashes, colors and a thumbnail small enough to inline."""

from __future__ import annotations

import base64
from typing import Any, Final

from mediamill.imaging.complaints import Complaints, encoding
from mediamill.imaging.decode import Picture
from mediamill.imaging.geometry import shape
from mediamill.placeholders import (
    BLURHASH_SIDE,
    THUMBHASH_MAX_SIDE,
    Pixels,
    average_color,
    blurhash,
    components_for,
    dominant_color,
    thumbhash,
)

INLINE_BYTES: Final = 1024
_INLINE_TRIES: Final = ((64, 50), (48, 40), (32, 30), (16, 20))
"""(longest side, quality), until the thumbnail fits."""


def preview(picture: Picture, decoded: Any, complaints: Complaints) -> dict[str, Any]:
    """The preview of a picture. `decoded` spares a second decode where outputs were made before;
    without it the decoder is asked for the small size, which costs a fraction of a full decode."""
    facts = picture.facts
    size = _within(THUMBHASH_MAX_SIDE, facts.width, facts.height)
    with encoding(complaints):
        if decoded is None or decoded.width < size[0] or decoded.height < size[1]:
            small = picture.still(*size)
        else:
            small = _resized(decoded, size)
        tiny = _resized(small, _within(BLURHASH_SIDE, *size))
        pixels, few = _pixels(small), _pixels(tiny)
        inline = _inline(small)
    across, down = components_for(facts.width, facts.height)
    return {
        "blurhash": blurhash(few, (across, down)),
        "thumbhash": base64.b64encode(thumbhash(pixels)).decode(),
        "dominant_color": dominant_color(pixels),
        "average_color": average_color(few),
        "inline": inline,
    }


def _within(side: int, width: int, height: int) -> tuple[int, int]:
    return shape((width, height), (side, side)).scaled


def _resized(image: Any, size: tuple[int, int]) -> Any:
    if (image.width, image.height) == size:
        return image
    return image.thumbnail_image(size[0], height=size[1], size="force", no_rotate=True)


def _pixels(image: Any) -> Pixels:
    image = image if image.hasalpha() else image.addalpha()
    return Pixels(image.width, image.height, bytes(image.write_to_memory()))


def _inline(small: Any) -> dict[str, Any] | None:
    for side, quality in _INLINE_TRIES:
        image = _resized(small, _within(side, small.width, small.height))
        data = image.webpsave_buffer(Q=quality, effort=4, keep="none")
        if len(data) <= INLINE_BYTES:
            return {
                "type": "image/webp",
                "width": image.width,
                "height": image.height,
                "data": base64.b64encode(data).decode(),
            }
    return None

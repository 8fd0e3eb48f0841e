"""What a page shows before the picture has come: a BlurHash, a ThumbHash, a dominant color.

All of it is computed from a small copy of the picture (at most 100 pixels wide or high; BlurHash
from 32), in plain Python: the sums are separable, so a hash takes a few milliseconds.

Transparent pixels are laid over white before anything is counted. ThumbHash alone can say
"transparent" and keeps it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import mul
from typing import Final

THUMBHASH_MAX_SIDE: Final = 100
"""ThumbHash is defined for pictures of at most this many pixels on each side."""
BLURHASH_SIDE: Final = 32
"""More pixels than this do not change a BlurHash that one could see."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """A small picture: rows from the top, four bytes (red, green, blue, alpha) for each pixel."""

    width: int
    height: int
    rgba: bytes

    def __post_init__(self) -> None:
        if self.width < 1 or self.height < 1 or len(self.rgba) != self.width * self.height * 4:
            raise ValueError("the buffer does not fit the size")

    @property
    def opaque(self) -> bool:
        return self.rgba[3::4].count(255) == self.width * self.height

    def over_white(self) -> Pixels:
        """The same picture with every transparent pixel laid over white."""
        if self.opaque:
            return self
        alpha = self.rgba[3::4]
        flat = bytearray(b"\xff" * len(self.rgba))
        for band in range(3):
            flat[band::4] = bytes(
                (value * a + 255 * (255 - a) + 127) // 255
                for value, a in zip(self.rgba[band::4], alpha, strict=True)
            )
        return Pixels(self.width, self.height, bytes(flat))


# --- BlurHash


def components_for(width: int, height: int) -> tuple[int, int]:
    """How many waves to keep across and down: 4 × 3 for a usual photograph, never fewer than 2."""
    if width >= height:
        return 4, max(2, min(4, round(4 * height / width)))
    return max(2, min(4, round(4 * width / height))), 4


def blurhash(pixels: Pixels, components: tuple[int, int] | None = None) -> str:
    """The BlurHash of a picture, over white. `components` is (across, down), 1 to 9 each."""
    pixels = pixels.over_white()
    across, down = components or components_for(pixels.width, pixels.height)
    if not (1 <= across <= 9 and 1 <= down <= 9):
        raise ValueError("components must be 1 to 9 each")
    bands = [[_LINEAR[value] for value in pixels.rgba[band::4]] for band in range(3)]
    # BlurHash samples its waves at the left edge of each pixel, ThumbHash in the middle.
    waves = [_waves(band, pixels.width, pixels.height, across, down, shift=0.0) for band in bands]
    factors = [
        tuple(wave[y][x] * (1 if x == y == 0 else 2) for wave in waves)
        for y in range(down)
        for x in range(across)
    ]
    first, rest = factors[0], factors[1:]
    text = _base83(across - 1 + (down - 1) * 9, 1)
    largest = 1.0
    if rest:
        actual = max(abs(value) for value in chain.from_iterable(rest))
        quantized = max(0, min(82, math.floor(actual * 166 - 0.5)))
        largest = (quantized + 1) / 166
        text += _base83(quantized, 1)
    else:
        text += _base83(0, 1)
    red, green, blue = (_to_srgb(value) for value in first)
    text += _base83(red << 16 | green << 8 | blue, 4)
    for factor in rest:
        steps = [
            max(0, min(18, math.floor(_signed_root(value / largest) * 9 + 9.5))) for value in factor
        ]
        text += _base83((steps[0] * 19 + steps[1]) * 19 + steps[2], 2)
    return text


_BASE83: Final = (
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz#$%*+,-.:;=?@[]^_{|}~"
)


def _base83(value: int, digits: int) -> str:
    return "".join(_BASE83[value // 83**place % 83] for place in reversed(range(digits)))


def _signed_root(value: float) -> float:
    return math.copysign(math.sqrt(abs(value)), value)


def _linear(value: int) -> float:
    share = value / 255
    return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4


_LINEAR: Final = tuple(_linear(value) for value in range(256))


def _to_srgb(value: float) -> int:
    value = max(0.0, min(1.0, value))
    share = value * 12.92 if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055
    return int(share * 255 + 0.5)


# --- ThumbHash


def thumbhash(pixels: Pixels) -> bytes:
    """The ThumbHash of a picture of at most 100 × 100 pixels; it keeps transparency."""
    width, height = pixels.width, pixels.height
    if max(width, height) > THUMBHASH_MAX_SIDE:
        raise ValueError(f"ThumbHash is for pictures of at most {THUMBHASH_MAX_SIDE} pixels a side")
    count = width * height
    red, green, blue, alpha = ([v / 255 for v in pixels.rgba[band::4]] for band in range(4))
    weight = sum(alpha)
    has_alpha = weight < count
    # What shows through is the average of what is visible.
    average = [sum(map(mul, band, alpha)) / (weight or 1) for band in (red, green, blue)]
    r, g, b = (
        [mean * (1 - a) + a * value for value, a in zip(band, alpha, strict=True)]
        for mean, band in zip(average, (red, green, blue), strict=True)
    )
    light = [(x + y + z) / 3 for x, y, z in zip(r, g, b, strict=True)]
    yellow_blue = [(x + y) / 2 - z for x, y, z in zip(r, g, b, strict=True)]
    red_green = [x - y for x, y in zip(r, g, strict=True)]

    most = 5 if has_alpha else 7
    longer = max(width, height)
    across = max(1, _half_up(most * width / longer))
    down = max(1, _half_up(most * height / longer))
    l_dc, l_ac, l_scale = _channel(light, width, height, max(3, across), max(3, down))
    p_dc, p_ac, p_scale = _channel(yellow_blue, width, height, 3, 3)
    q_dc, q_ac, q_scale = _channel(red_green, width, height, 3, 3)

    landscape = width > height
    header24 = (
        _half_up(63 * l_dc)
        | _half_up(31.5 + 31.5 * p_dc) << 6
        | _half_up(31.5 + 31.5 * q_dc) << 12
        | _half_up(31 * l_scale) << 18
        | has_alpha << 23
    )
    header16 = (
        (down if landscape else across)
        | _half_up(63 * p_scale) << 3
        | _half_up(63 * q_scale) << 9
        | landscape << 15
    )
    hashed = bytearray(header24.to_bytes(3, "little") + header16.to_bytes(2, "little"))
    factors = [l_ac, p_ac, q_ac]
    if has_alpha:
        a_dc, a_ac, a_scale = _channel(alpha, width, height, 5, 5)
        hashed.append(_half_up(15 * a_dc) | _half_up(15 * a_scale) << 4)
        factors.append(a_ac)
    nibbles = [_half_up(15 * value) for value in chain.from_iterable(factors)]
    nibbles += [0] * (len(nibbles) % 2)
    hashed += bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True))
    return bytes(hashed)


def _channel(
    values: Sequence[float], width: int, height: int, across: int, down: int
) -> tuple[float, list[float], float]:
    """Mean, the waves of one triangle brought to 0…1, and the scale that brings them back."""
    waves = _waves(values, width, height, across, down, shift=0.5)
    kept = [
        waves[y][x]
        for y in range(down)
        for x in range(0 if y else 1, across)
        if x * down < across * (down - y)
    ]
    scale = max(map(abs, kept), default=0.0)
    # Below this there is only rounding noise of a flat picture, which must not be blown up.
    if scale > 1e-9:
        kept = [0.5 + 0.5 / scale * value for value in kept]
    return waves[0][0], kept, scale


def _half_up(value: float) -> int:
    return math.floor(value + 0.5)


# --- Colors


def dominant_color(pixels: Pixels) -> str:
    """The color that most of the picture has, as #rrggbb: the mean of the fullest of 512 cells.

    Almost transparent pixels are not counted, so the ground of a cut-out logo does not win; a
    picture that has nothing else is white.
    """
    seen = Counter(pixel for pixel in zip(*[iter(pixels.rgba)] * 4, strict=True) if pixel[3] >= 128)
    cells: dict[tuple[int, int, int], int] = {}
    for (red, green, blue, _alpha), count in seen.items():
        cell = (red >> 5, green >> 5, blue >> 5)
        cells[cell] = cells.get(cell, 0) + count
    if not cells:
        return "#ffffff"
    fullest = max(cells, key=lambda cell: (cells[cell], cell))
    sums, total = [0, 0, 0], cells[fullest]
    for pixel, count in seen.items():
        if (pixel[0] >> 5, pixel[1] >> 5, pixel[2] >> 5) == fullest:
            for band in range(3):
                sums[band] += pixel[band] * count
    return "#" + "".join(f"{round(value / total):02x}" for value in sums)


def average_color(pixels: Pixels) -> str:
    """The mean color over white, as #rrggbb. Light is averaged, not code values: it is what the
    BlurHash shows as its ground."""
    flat = pixels.over_white()
    count = flat.width * flat.height
    means = (sum(_LINEAR[v] for v in flat.rgba[band::4]) / count for band in range(3))
    return "#" + "".join(f"{_to_srgb(mean):02x}" for mean in means)


# --- The cosine transform that both hashes share


@lru_cache(maxsize=256)
def _cosines(length: int, wave: int, shift: float) -> tuple[float, ...]:
    return tuple(math.cos(math.pi / length * wave * (at + shift)) for at in range(length))


def _waves(
    values: Sequence[float], width: int, height: int, across: int, down: int, *, shift: float
) -> list[list[float]]:
    """The mean of `values` times each cosine wave, as [down][across]: rows first, then columns."""
    columns = [_cosines(width, x, shift) for x in range(across)]
    rows = [values[at : at + width] for at in range(0, width * height, width)]
    by_row = [[sum(map(mul, row, column)) for row in rows] for column in columns]
    scale = 1 / (width * height)
    return [
        [sum(map(mul, by_row[x], _cosines(height, y, shift))) * scale for x in range(across)]
        for y in range(down)
    ]

"""Hashes and colors of small pictures, held against other programs' hashes and read back by a
decoder written here from the published description."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mediamill.placeholders import (
    Pixels,
    average_color,
    blurhash,
    components_for,
    dominant_color,
    thumbhash,
)

RGBA = tuple[int, int, int, int]


def drawn(width: int, height: int, color: Callable[[int, int], RGBA]) -> Pixels:
    rows = (color(x, y) for y in range(height) for x in range(width))
    return Pixels(width, height, b"".join(bytes(pixel) for pixel in rows))


def pattern(width: int, height: int, *, alpha: bool = False) -> Pixels:
    """A picture with no symmetry, so that no wave is zero but for rounding."""

    def color(x: int, y: int) -> RGBA:
        u, v = x / width, y / height
        return (
            int(40 + 180 * u * u * (1 - v)),
            int(200 - 150 * v * u),
            (x * x * 3 + y * 29 + x * y) % 97 + int(90 * v * v),
            int(255 * min(1, 0.2 + u * v + 0.3 * v * v)) if alpha else 255,
        )

    return drawn(width, height, color)


# Made from these pixels by the public references (woltapp/blurhash: the C encoder, and its
# TypeScript package 2.0.5; evanw/thumbhash: the Rust crate, and its package 0.1.1); each pair
# agrees.
BLURHASHES = (
    ((32, 24), (4, 3), "LR9KSiHPxXXk.XIrr@WotQWEo0a|"),
    ((24, 32), (3, 4), "TR9A-^HPxp*4Iqr]t7WEo0o]Wpjt"),
    (
        (32, 24),
        (9, 9),
        "|R9KSiHPxXXkkUknbao{X5.XIrr@WojHfiayj?a#tQWEo0a|jbfjf6j[a#tfW:jsbHfPfjfRfia}oxWCjaa{f8fR"
        "fPfPf8o{W;j?bGfPfifQfjfRouWBjba}f6fPf6fRfQo{X7j?bFfPfkfQfifQouWCjba|f6fPfPfQfR",
    ),
    ((32, 24), (1, 1), "009KSi"),
    ((31, 7), (5, 2), "Df9m~fLGt2XjkC*6NIr[W:jZ"),
)
THUMBHASHES = (
    ((32, 24), False, "GkkFRZCmh4cMeHh6d4h3eYdvBnl3"),
    ((32, 24), True, "mViBJIgomocNead2h/hFoJc3dweJiHh3Bw=="),
    ((100, 75), False, "GUkFRZCmh4gNeXiKiIeHiIdvBnmH"),
    ((75, 100), True, "mViBJAgomteQh3p3iPhFoJc3dweJiHh3Bw=="),
    ((50, 100), False, "GUkFRBCmx5CniHiIiIeHbwZ5hw=="),
    ((16, 16), False, "WjkFRxClh4cMeHh7d4h3d3d4d/hmkHcH"),
    ((16, 16), True, "mViBJQgnqXcMeZl3Z4hfA3p5c3eQiIh3dw=="),
    ((100, 20), False, "WkkFQZClh4cNeKh4h28GeXc="),
)


@pytest.mark.parametrize(("size", "components", "wanted"), BLURHASHES)
def test_blurhash_agrees_with_the_c_encoder(
    size: tuple[int, int], components: tuple[int, int], wanted: str
) -> None:
    assert blurhash(pattern(*size), components) == wanted


@pytest.mark.parametrize(("size", "alpha", "wanted"), THUMBHASHES)
def test_thumbhash_agrees_with_the_rust_encoder(
    size: tuple[int, int], alpha: bool, wanted: str
) -> None:
    assert base64.b64encode(thumbhash(pattern(*size, alpha=alpha))).decode() == wanted


# --- BlurHash, read back

DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz#$%*+,-.:;=?@[]^_{|}~"


def number(text: str) -> int:
    value = 0
    for letter in text:
        value = value * 83 + DIGITS.index(letter)
    return value


def light(value: float) -> float:
    value /= 255
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def shade(value: float) -> float:
    value = min(1.0, max(0.0, value))
    value = value * 12.92 if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055
    return value * 255


def shown(text: str, u: float, v: float) -> tuple[float, ...]:
    """The color that a BlurHash shows at a place (0 to 1)."""
    size = number(text[0])
    across, down = size % 9 + 1, size // 9 + 1
    assert len(text) == 4 + 2 * across * down
    largest = (number(text[1]) + 1) / 166
    mean = number(text[2:6])
    waves = [[light(mean >> shift & 255) for shift in (16, 8, 0)]]
    for at in range(6, len(text), 2):
        value = number(text[at : at + 2])
        steps = (value // 361, value // 19 % 19, value % 19)
        waves.append([math.copysign(((s - 9) / 9) ** 2, s - 9) * largest for s in steps])
    return tuple(
        shade(
            sum(
                waves[y * across + x][band] * math.cos(math.pi * u * x) * math.cos(math.pi * v * y)
                for y in range(down)
                for x in range(across)
            )
        )
        for band in range(3)
    )


def test_blurhash_shows_roughly_the_picture() -> None:
    picture = drawn(32, 24, lambda x, y: (255 if x < 16 else 20, 40, 250 if y < 12 else 10, 255))
    text = blurhash(picture)
    assert len(text) == 28
    assert shown(text, 0.15, 0.2)[0] > 200
    assert shown(text, 0.85, 0.2)[0] < 110
    assert shown(text, 0.15, 0.15)[2] > 200
    assert shown(text, 0.15, 0.85)[2] < 110


def test_clear_pixels_count_as_white_in_a_blurhash() -> None:
    picture = drawn(
        40, 32, lambda x, y: (220, 30, 30, 255) if 10 <= x < 30 and 8 <= y < 24 else (0, 0, 0, 0)
    )
    mean = number(blurhash(picture)[2:6])
    for found, wanted in zip(
        (mean >> 16, mean >> 8 & 255, mean & 255), (247, 225, 225), strict=True
    ):
        assert abs(found - wanted) <= 3


@given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    components=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_every_picture_has_both_hashes(
    size: tuple[int, int], components: tuple[int, int], data: st.DataObject
) -> None:
    count = size[0] * size[1] * 4
    picture = Pixels(*size, data.draw(st.binary(min_size=count, max_size=count)))
    text = blurhash(picture, components)
    assert len(text) == 4 + 2 * components[0] * components[1]
    assert set(text) <= set(DIGITS)
    assert 5 <= len(thumbhash(picture)) <= 40
    assert len(dominant_color(picture)) == len(average_color(picture)) == 7


@pytest.mark.parametrize("color", [(0, 0, 0), (255, 255, 255), (200, 10, 90)])
def test_one_color_keeps_its_mean(color: tuple[int, int, int]) -> None:
    picture = drawn(20, 10, lambda _x, _y: (*color, 255))
    # BlurHash samples its waves at pixel edges, so even one color leaves small waves (as in the
    # original encoder); its mean is exact.
    assert number(blurhash(picture)[2:6]) == color[0] << 16 | color[1] << 8 | color[2]
    assert average_color(picture) == dominant_color(picture) == "#{:02x}{:02x}{:02x}".format(*color)
    header = int.from_bytes(thumbhash(picture)[:3], "little")
    assert header >> 18 & 31 == 0  # no light or dark anywhere


# --- ThumbHash, its header


def test_thumbhash_says_transparent_only_if_something_is() -> None:
    for alpha in (False, True):
        header = int.from_bytes(thumbhash(pattern(30, 20, alpha=alpha))[:3], "little")
        assert bool(header >> 23) is alpha
    clear = drawn(10, 10, lambda _x, _y: (0, 0, 0, 0))
    assert thumbhash(clear)[5] & 15 == 0  # the mean of transparency


@pytest.mark.parametrize(
    ("size", "ratio"), [((100, 50), 7 / 4), ((50, 100), 4 / 7), ((60, 60), 1.0)]
)
def test_thumbhash_knows_the_shape(size: tuple[int, int], ratio: float) -> None:
    header = int.from_bytes(thumbhash(pattern(*size))[3:5], "little")
    short, landscape = header & 7, header >> 15
    assert (7 / short if landscape else short / 7) == pytest.approx(ratio)


def test_thumbhash_is_for_small_pictures() -> None:
    with pytest.raises(ValueError, match="100"):
        thumbhash(pattern(101, 10))


# --- Colors and sizes


def test_the_dominant_color_is_the_one_most_pixels_have() -> None:
    picture = drawn(30, 10, lambda x, _y: (250, 240, 10, 255) if x < 18 else (5 * x, 0, 90, 255))
    assert dominant_color(picture) == "#faf00a"


def test_clear_ground_does_not_dominate() -> None:
    logo = drawn(30, 30, lambda x, y: (220, 30, 30, 255) if x < 8 and y < 8 else (0, 0, 0, 0))
    assert dominant_color(logo) == "#dc1e1e"
    assert dominant_color(drawn(4, 4, lambda _x, _y: (0, 0, 0, 0))) == "#ffffff"


@pytest.mark.parametrize(
    ("size", "components"),
    [
        ((1600, 1200), (4, 3)),
        ((1200, 1600), (3, 4)),
        ((1000, 1000), (4, 4)),
        ((4000, 500), (4, 2)),
        ((1, 9000), (2, 4)),
    ],
)
def test_more_waves_along_the_longer_side(
    size: tuple[int, int], components: tuple[int, int]
) -> None:
    assert components_for(*size) == components


def test_a_buffer_must_fit_its_size() -> None:
    with pytest.raises(ValueError, match="buffer"):
        Pixels(2, 2, b"\0" * 15)
    with pytest.raises(ValueError, match="components"):
        blurhash(pattern(4, 4), (10, 1))

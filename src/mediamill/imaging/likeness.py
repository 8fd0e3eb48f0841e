"""How alike two pictures are, and the search for the smallest file that is alike enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

_SIGMA: Final = 1.5
_LEAST_AMPLITUDE: Final = 0.002
"""Where the window ends: with this sigma it is 11 × 11 pixels."""
_C1: Final = (0.01 * 255) ** 2
_C2: Final = (0.03 * 255) ** 2
_LUMA: Final = (0.299, 0.587, 0.114)
MAX_ENCODES: Final = 8


class Reference:
    """A picture that others are compared with: what can be computed once is kept.

    The likeness is the mean structural similarity (SSIM) of Wang, Bovik, Sheikh and Simoncelli
    (2004) on the luma Y = 0.299 R + 0.587 G + 0.114 B of the sRGB code values, at full resolution:

        SSIM = (2 μx μy + C1)(2 σxy + C2) / ((μx² + μy² + C1)(σx² + σy² + C2))

    with C1 = (0.01 · 255)², C2 = (0.03 · 255)², and every μ and σ weighted by a Gaussian window of
    11 × 11 pixels with σ = 1.5. Transparent pixels are laid on white first. 1 is equal.
    """

    def __init__(self, image: Any) -> None:
        self._luma = _luma(image).copy_memory()
        self._mean = _blurred(self._luma).copy_memory()
        self._variance = (_blurred(self._luma * self._luma) - self._mean * self._mean).copy_memory()

    def likeness(self, image: Any) -> float:
        luma = _luma(image).copy_memory()
        mean = _blurred(luma)
        variance = _blurred(luma * luma) - mean * mean
        shared = _blurred(self._luma * luma) - self._mean * mean
        above = (self._mean * mean * 2 + _C1) * (shared * 2 + _C2)
        below = (self._mean * self._mean + mean * mean + _C1) * (self._variance + variance + _C2)
        return float((above / below).avg())


def _luma(image: Any) -> Any:
    if image.hasalpha():
        image = image.flatten(background=[255] * (image.bands - 1))
    if image.bands == 1:
        return image.cast("float")
    red, green, blue = image.bandsplit()[:3]
    return (red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2]).cast("float")


def _blurred(image: Any) -> Any:
    return image.gaussblur(_SIGMA, min_ampl=_LEAST_AMPLITUDE, precision="float")


@dataclass(frozen=True, slots=True)
class Found:
    """The end of a search."""

    quality: int
    likeness: float
    encodes: int


def search(
    measure: Callable[[int], float], target: float, *, lowest: int, highest: int, start: int
) -> Found:
    """The lowest quality in lowest … highest whose likeness is at least `target`; `highest` if
    none reaches it. At most MAX_ENCODES calls of `measure`, usually three or four.

    Likeness grows with quality. The logarithm of what is missing to 1 is nearly a straight line,
    so a secant says where to look next. It is held to where the tries that are left can still find
    the answer by halving, so a bent line costs tries but never the answer.
    """
    missing: dict[int, float] = {}  # by quality: how far from the target, on the bent scale
    tried: dict[int, float] = {}
    below, above = lowest - 1, highest + 1  # misses, reaches; both assumed at first
    guess, side = float(start), 0
    while above - below > 1 and len(tried) < MAX_ENCODES:
        reach = 1 << (MAX_ENCODES - len(tried) - 1)
        least, most = max(below + 1, above - reach), min(above - 1, below + reach)
        quality = min(max(math.ceil(guess), least), most)
        tried[quality] = measure(quality)
        missing[quality] = _bent(tried[quality]) - _bent(target)
        if tried[quality] >= target:
            above, other, now = quality, below, 1
        else:
            below, other, now = quality, above, -1
        if now == side and other in missing:
            missing[other] /= 2  # the line would creep towards an end that never moves
        guess, side = _guess(missing, below, above), now
    quality = min(above, highest)
    return Found(quality, tried[quality], len(tried))


def _guess(missing: dict[int, float], below: int, above: int) -> float:
    """Where the line through what is known crosses the target."""
    if below in missing and above in missing:
        low, high = missing[below], missing[above]
        return below + (above - below) * (low / (low - high) if low > high else 0.5)
    known = above if above in missing else below
    # One point only: about 25 steps of quality halve what is missing.
    stride = max(2.0, 25 / math.log(2) * abs(missing[known]))
    return known - stride if known == above else known + stride


def _bent(likeness: float) -> float:
    return math.log(max(1 - likeness, 1e-6))

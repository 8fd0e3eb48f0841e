"""Whatever a picture's numbers mean, they leave here as 8-bit sRGB, with or without transparency.

The steps run on the picture after it was made smaller: a hundredth of the work, and no difference
that one could see.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import pyvips

_PROFILE: Final = "icc-profile-data"
_SPACES: Final = {b"RGB ": (3, 4), b"GRAY": (1, 2), b"CMYK": (4, 5)}
P3: Final = 12
"""Color primaries of Display P3, by their number in ITU-T H.273."""
PROFILE_UNUSABLE: Final = "The color profile cannot be used and was left out."
TRANSFERS: Final = {16: "pq", 18: "hlg"}


def profile_problem(profile: bytes, bands: int, interpretation: str) -> str | None:
    """Why a profile cannot be used for a picture; None if it can."""
    if len(profile) < 132 or profile[36:40] != b"acsp":
        return "The color profile is damaged and was left out."
    wanted = _SPACES.get(profile[16:20])
    if wanted is None or bands not in wanted or (wanted[0] == 4) != (interpretation == "cmyk"):
        return "The color profile is for another kind of picture and was left out."
    return None


def profile_description(profile: bytes) -> str | None:
    """The name that a profile gives itself, from its `desc` tag."""
    try:
        (count,) = struct.unpack_from(">I", profile, 128)
        for number in range(min(count, 100)):
            name, offset, _ = struct.unpack_from(">4sII", profile, 132 + 12 * number)
            if name == b"desc":
                return _description(profile[offset:])
    except (struct.error, ValueError):
        pass
    return None


def _description(tag: bytes) -> str | None:
    if tag[:4] == b"desc":
        (length,) = struct.unpack_from(">I", tag, 8)
        text = tag[12 : 12 + min(length, 200)].split(b"\x00")[0].decode("ascii", "replace")
    elif tag[:4] == b"mluc":
        length, offset = struct.unpack_from(">II", tag, 20)
        text = tag[offset : offset + min(length, 400)].decode("utf-16-be", "replace")
    else:
        return None
    return "".join(c for c in text if c.isprintable()).strip()[:120] or None


def to_srgb(
    image: Any, *, warnings: list[str], ignore_profile: bool = False, primaries: int = 0
) -> Any:
    """sRGB, 8 bits, 3 or 4 bands. An unusable profile is left out with a warning."""
    if image.get_typeof(_PROFILE):
        image = image if ignore_profile else _apply(image, warnings)
    elif primaries == P3 and image.bands >= 3:
        image = image.icc_transform("srgb", input_profile="p3")
    if image.interpretation != "srgb" or image.bands < 3:
        image = image.colourspace("srgb")
    if image.bands > 4:
        # More than one extra channel: the first is transparency, the rest are masks and spots.
        image = image.extract_band(0, n=4)
    return image if image.format == "uchar" else image.cast("uchar")


def _apply(image: Any, warnings: list[str]) -> Any:
    profile = image.get(_PROFILE)
    problem = profile_problem(profile, image.bands, image.interpretation)
    if problem is None:
        # A profile that lcms cannot use shows only when pixels go through: try it on one, since
        # the picture itself may be readable just once.
        trial = pyvips.Image.black(1, 1, bands=image.bands).cast(image.format)
        trial = trial.copy(interpretation=image.interpretation)
        trial.set_type(pyvips.GValue.blob_type, _PROFILE, profile)
        try:
            _transformed(trial).avg()
            return _transformed(image)
        except pyvips.Error:
            problem = PROFILE_UNUSABLE
    warnings.append(problem)
    return image


def _transformed(image: Any) -> Any:
    return image.icc_transform(
        "srgb", embedded=True, intent="relative", black_point_compensation=True
    )


# --- High dynamic range

_REFERENCE_WHITE: Final = 203.0
"""The light of a white sheet in an HDR picture, in candela per square meter (ITU-R BT.2408)."""
_PEAK: Final = 1000.0
_GAIN: Final = 1.5
_BT2020_TO_SRGB: Final = (
    (1.660491, -0.587641, -0.072850),
    (-0.124550, 1.132900, -0.008349),
    (-0.018151, -0.100579, 1.118730),
)


def tone_map(image: Any, *, transfer: str, primaries: int) -> Any:
    """An HDR picture in 16 bits becomes an sRGB one in 8: bright parts are rolled off (Reinhard on
    the strongest channel, so that hues stay), and a white sheet stays nearly white."""
    alpha = image.extract_band(3) / 257 if image.bands > 3 else None
    image = image.extract_band(0, n=3) if image.bands >= 3 else image.bandjoin([image, image])
    codes = pyvips.Image.identity(ushort=True) / 65535
    light = _pq(codes) if transfer == "pq" else _hlg(codes)
    linear = image.cast("ushort").maplut(light * (_GAIN / _REFERENCE_WHITE))
    if primaries == 9:
        linear = linear.recomb(pyvips.Image.new_from_array([list(r) for r in _BT2020_TO_SRGB]))
    linear = (linear < 0).ifthenelse(0, linear)
    red, green, blue = linear.bandsplit()
    strongest = red.maxpair(green).maxpair(blue)
    white = _PEAK / _REFERENCE_WHITE * _GAIN
    rolled = (strongest / (white * white) + 1) / (strongest + 1)
    mapped = (linear * rolled).copy(interpretation="scrgb").colourspace("srgb")
    return mapped if alpha is None else mapped.bandjoin(alpha).cast("uchar")


def _pq(codes: Any) -> Any:
    """Candela per square meter for PQ code values 0…1 (SMPTE ST 2084)."""
    root = codes ** (1 / 78.84375)
    above = root - 0.8359375
    above = (above < 0).ifthenelse(0, above)
    return (above / (18.8515625 - 18.6875 * root)) ** (1 / 0.1593017578125) * 10_000


def _hlg(codes: Any) -> Any:
    """The same for HLG (ITU-R BT.2100), shown on a screen of 1000 candela. The system gamma is
    applied to each channel: near enough for a picture that is rolled off anyway."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    scene = (codes <= 0.5).ifthenelse(codes * codes / 3, (((codes - c) / a).exp() + b) / 12)
    return scene**1.2 * _PEAK

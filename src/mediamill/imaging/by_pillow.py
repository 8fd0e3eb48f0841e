"""The pictures that libvips cannot read here: HEIC and HEIF through pillow-heif; BMP, ICO, animated
AVIF and PNG, and GIFs with an odd canvas through Pillow. Their pixels go on to libvips."""

from __future__ import annotations

import io
import resource
from collections.abc import Iterator
from typing import Any, Final

import pyvips

from mediamill.failures import Code, Failure
from mediamill.imaging import Data, color
from mediamill.imaging.complaints import Complaints
from mediamill.imaging.decode import Picture, facts_of, hdr_still, with_timing
from mediamill.imaging.facts import Facts
from mediamill.imaging.structure import Structure
from mediamill.sniff import Sniffed

_PLUGINS: Final = {
    "bmp": ("BMP", "BmpImagePlugin"),
    "ico": ("ICO", "IcoImagePlugin"),
    "avif": ("AVIF", "AvifImagePlugin"),
    "png": ("PNG", "PngImagePlugin"),
    "gif": ("GIF", "GifImagePlugin"),
}


def open_picture(sniffed: Sniffed, seen: Structure, data: Data, complaints: Complaints) -> Picture:
    """Read the header. Nothing is decoded yet."""
    if sniffed.format in ("heic", "heif"):
        return _open_heif(sniffed, seen, data, complaints)
    image = _open(sniffed.format, data)
    profile = image.info.get("icc_profile")
    warnings = list(seen.warnings)
    has_alpha = image.has_transparency_data
    if profile and (problem := color.profile_problem(profile, 3, "srgb")):
        warnings.append(problem)
        profile = None
    facts = facts_of(
        sniffed,
        seen,
        size=image.size,
        has_alpha=has_alpha,
        bands=4 if has_alpha else 3,
        bits=8,
        interpretation="srgb",
        profile=profile,
        warnings=warnings,
    )
    picture = _PillowPicture(facts, data, complaints, seen, profile)
    picture.exif, picture.xmp = _beside(image.info)
    return picture


def _beside(info: dict[str, Any]) -> tuple[bytes, bytes]:
    exif, xmp = info.get("exif") or b"", info.get("xmp") or b""
    return exif if isinstance(exif, bytes) else b"", xmp if isinstance(xmp, bytes) else b""


def _open(format: str, data: Data) -> Any:
    import importlib

    from PIL import Image

    # The limits were checked by us, on the header.
    Image.MAX_IMAGE_PIXELS = None
    name, module = _PLUGINS[format]
    importlib.import_module(f"PIL.{module}")
    return Image.open(io.BytesIO(data), formats=(name,))


def decoded_avif(data: Data) -> tuple[tuple[int, int], bool, bytes]:
    """A still AVIF decoded whole: its size, whether it has transparency, its XMP packet."""
    from PIL import AvifImagePlugin

    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    image = _open("avif", data)
    image.load()
    return image.size, "A" in image.getbands(), _beside(image.info)[1]


def _frames(format: str, data: Data, numbers: range) -> Iterator[Any]:
    image = _open(format, data)
    for number in numbers:
        try:
            image.seek(number)
        except EOFError:
            # More frames were announced than there are.
            return
        yield _to_vips(image)


def _to_vips(image: Any) -> Any:
    mode = "RGBA" if image.has_transparency_data else "RGB"
    image = image if image.mode == mode else image.convert(mode)
    return _from_memory(image.tobytes(), image.width, image.height, len(mode), "uchar")


def _from_memory(data: bytes, width: int, height: int, bands: int, format: str) -> Any:
    wide = {"uchar": ("b-w", "srgb"), "ushort": ("grey16", "rgb16")}[format]
    image = pyvips.Image.new_from_memory(data, width, height, bands, format)
    return image.copy(interpretation=wide[bands >= 3])


def _small(
    image: Any, size: tuple[int, int], picture: Picture, profile: bytes | None, primaries: int
) -> Any:
    if profile:
        image = image.copy()
        image.set_type(pyvips.GValue.blob_type, "icc-profile-data", profile)
    small = image.thumbnail_image(size[0], height=size[1], size="force", no_rotate=True)
    return color.to_srgb(small, warnings=picture.warnings, primaries=primaries)


class _PillowPicture(Picture):
    def __init__(
        self,
        facts: Facts,
        data: Data,
        complaints: Complaints,
        seen: Structure,
        profile: bytes | None,
    ) -> None:
        super().__init__(facts, data, complaints)
        self._profile = profile
        self._primaries = seen.primaries
        self._still_apart = seen.still_apart

    @property
    def can_animate(self) -> bool:
        return self.facts.animated

    def _still(self, width: int, height: int) -> Any:
        first = next(_frames(self.facts.format, self.data, range(1)))
        return _small(first, (width, height), self, self._profile, self._primaries)

    def animation(self, width: int, height: int) -> Any:
        first = int(self._still_apart)
        numbers = range(first, first + self.facts.frames)
        # One at a time: only the small copies are kept.
        frames = [
            _small(frame, (width, height), self, self._profile, self._primaries).copy_memory()
            for frame in _frames(self.facts.format, self.data, numbers)
        ]
        bands = max(frame.bands for frame in frames)
        level = [frame if frame.bands == bands else frame.addalpha() for frame in frames]
        return with_timing(pyvips.Image.arrayjoin(level, across=1), self.facts, height)


# --- HEIF


def _open_heif(sniffed: Sniffed, seen: Structure, data: Data, complaints: Complaints) -> Picture:
    if seen.codec not in ("hevc", ""):
        raise Failure(
            Code.UNSUPPORTED_CODEC, f"A HEIF picture coded as {seen.codec} cannot be decoded."
        )
    file = _heif_file(data, eight_bits=True)
    bands, _ = _LAYOUTS.get(file.mode, (3, "uchar"))
    profile = file.info.get("icc_profile") or None
    warnings = list(seen.warnings)
    if profile and (problem := color.profile_problem(profile, bands, "srgb")):
        warnings.append(problem)
        profile = None
    facts = facts_of(
        sniffed,
        seen,
        size=file.size,
        pages=len(file),
        has_alpha=bands in (2, 4),
        bands=bands,
        bits=int(file.info.get("bit_depth", 8)),
        interpretation="srgb" if bands >= 3 else "b-w",
        profile=profile,
        warnings=warnings,
    )
    picture = _HeifPicture(facts, data, complaints, seen, profile)
    picture.exif, picture.xmp = _beside(file.info)
    return picture


def _heif_file(data: Data, *, eight_bits: bool) -> Any:
    import pillow_heif
    from pillow_heif import options

    options.THUMBNAILS = options.DEPTH_IMAGES = options.AUX_IMAGES = False
    options.DECODE_THREADS = 1
    return pillow_heif.open_heif(bytes(data), convert_hdr_to_8bit=eight_bits)


_LAYOUTS: Final = {
    "L": (1, "uchar"),
    "LA": (2, "uchar"),
    "RGB": (3, "uchar"),
    "RGBA": (4, "uchar"),
    "RGBa": (4, "uchar"),
    "I;16": (1, "ushort"),
    "L;16": (1, "ushort"),
    "RGB;16": (3, "ushort"),
    "RGBA;16": (4, "ushort"),
    "RGBa;16": (4, "ushort"),
}


class _HeifPicture(Picture):
    """The container turns the picture (irot, imir) and libheif has done so; an orientation in the
    EXIF part says the same a second time and is not looked at."""

    def __init__(
        self,
        facts: Facts,
        data: Data,
        complaints: Complaints,
        seen: Structure,
        profile: bytes | None,
    ) -> None:
        super().__init__(facts, data, complaints)
        self._profile = profile
        self._primaries = seen.primaries

    def _still(self, width: int, height: int) -> Any:
        file = _heif_file(self.data, eight_bits=self.facts.hdr is None)
        try:
            pixels = file.data
        except (ValueError, RuntimeError) as error:
            # What the HEVC decoder says when it is refused memory, and also on other occasions.
            if "did not give a decompressed image" in str(error) and self._short_of_memory():
                raise MemoryError from error
            raise
        bands, format = _LAYOUTS[file.mode]
        row = file.stride // (bands * (2 if format == "ushort" else 1))
        image = _from_memory(pixels, row, file.size[1], bands, format)
        if row > file.size[0]:
            image = image.crop(0, 0, *file.size)
        if file.mode.startswith("RGBa"):
            image = image.unpremultiply().cast(format).copy(interpretation=image.interpretation)
        if self.facts.hdr is not None and format == "ushort":
            return hdr_still(image, width, height, self.facts, self._primaries)
        return _small(image, (width, height), self, self._profile, self._primaries)

    def _short_of_memory(self) -> bool:
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        needed = self.facts.largest_pixels * (16 if self.facts.bit_depth > 8 else 8)
        return limit != resource.RLIM_INFINITY and needed > limit * 0.8

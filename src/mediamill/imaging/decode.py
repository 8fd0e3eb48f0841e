"""Opening a picture: what it is, whether it may be decoded, and its pixels at a wanted size.

libvips decodes nearly everything and shrinks while it loads. What its wheel cannot read comes
through Pillow and pillow-heif (by_pillow.py) and joins the same road right after the decoder.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any, Final

import pyvips

from mediamill.failures import Code, Failure
from mediamill.imaging import Data, color, drawing, structure
from mediamill.imaging.complaints import Complaints, decoding
from mediamill.imaging.facts import Facts, Limits, check
from mediamill.sniff import AVIF, HEAD_BYTES, HEIC, Kind, Sniffed, sniff

_LOADERS: Final[dict[str, Callable[..., Any]]] = {
    "jpeg": pyvips.Image.jpegload_source,
    "png": pyvips.Image.pngload_source,
    "webp": pyvips.Image.webpload_source,
    "gif": pyvips.Image.gifload_source,
    "tiff": pyvips.Image.tiffload_source,
    "avif": pyvips.Image.heifload_source,
}
_READ: Final = {*_LOADERS, "heic", "heif", "bmp", "ico"}
FORMATS: Final = tuple(sorted(_READ))
"""What this program can read, by the short names of sniff.py."""


def open_picture(fd: int, limits: Limits, complaints: Complaints) -> Picture:
    """Read the header and hold the limits against it. Raises `Failure` for what is no picture, is
    damaged or cut off, or is too large; nothing has been decoded by then."""
    data = mapped(fd)
    sniffed = sniff(data[:HEAD_BYTES], len(data))
    if sniffed is None or sniffed.kind is not Kind.IMAGE or sniffed.format not in _READ:
        raise _refusal(sniffed, data)
    seen = structure.read(sniffed.format, data)
    # Brands are a habit; which decoder can read the picture is for its codec to say.
    sniffed = {"av1": AVIF, "hevc": HEIC}.get(seen.codec, sniffed)
    # What the walk found is checked before any decoder has seen the file; what the decoder says of
    # the header is checked again below, in case the two differ.
    _check(limits, (seen.width, seen.height), seen)
    through_pillow = sniffed.format not in _LOADERS or (
        sniffed.format == "avif" and (seen.frames > 1 or data[8:12] == b"avis")
    )
    with decoding(complaints):
        if not through_pillow:
            picture = _open_with_vips(sniffed, seen, data, complaints)
        else:
            from mediamill.imaging import by_pillow

            picture = by_pillow.open_picture(sniffed, seen, data, complaints)
    facts = picture.facts
    _check(limits, (facts.stored_width, facts.stored_height), seen)
    return picture


def _check(limits: Limits, size: tuple[int, int], seen: structure.Structure) -> None:
    check(
        limits,
        width=size[0],
        height=size[1],
        largest_pixels=seen.largest_pixels,
        frames=seen.frames,
        progressive=seen.progressive,
    )


class Picture:
    """An opened picture. Its pixels come as 8-bit sRGB, turned upright, at exactly the size asked
    for; ask for no more than `facts.width` × `facts.height`.

    libvips reads `data` where it lies, so a picture must outlive every image that it gave and that
    was not copied into memory.
    """

    exif: bytes = b""
    xmp: bytes = b""
    """What was written beside the pixels, raw; read for a notice of copyright only."""

    def __init__(self, facts: Facts, data: Data, complaints: Complaints) -> None:
        self.facts = facts
        self.data = data
        self.complaints = complaints
        self.warnings: list[str] = list(facts.warnings)

    @property
    def can_animate(self) -> bool:
        return False

    def still(self, width: int, height: int) -> Any:
        """The first frame, decoded into memory."""
        with decoding(self.complaints):
            image = _drop_idle_alpha(self._still(width, height).copy_memory())
        if self.complaints.profile_unused and not any("profile" in w for w in self.warnings):
            self.warnings.append(color.PROFILE_UNUSABLE)
        return image

    def animation(self, width: int, height: int) -> Any:
        """All frames, one below the other, with `page-height`, `delay` and `loop`. Not decoded
        yet: write it inside `decoding`."""
        raise NotImplementedError

    def _still(self, width: int, height: int) -> Any:
        raise NotImplementedError


def mapped(fd: int) -> Data:
    size = os.fstat(fd).st_size
    if size == 0:
        raise Failure(Code.EMPTY_INPUT)
    return mmap.mmap(fd, size, access=mmap.ACCESS_READ)


# --- What is refused

_OTHER_IMAGES: Final = {
    "jxl": "JPEG XL pictures are not supported.",
    "jp2": "JPEG 2000 pictures are not supported.",
    "psd": "Photoshop documents are not supported; export a PNG or JPEG.",
    "raw": "Raw camera files are not supported; export a JPEG or TIFF.",
    "pdf": "PDF documents are not supported; export the page as a PNG or JPEG.",
}


def _refusal(sniffed: Sniffed | None, data: Data) -> Failure:
    if sniffed is None:
        return Failure(Code.UNSUPPORTED_FORMAT)
    if sniffed.kind is Kind.PLAYLIST:
        return Failure(Code.UNSAFE_CONTENT, "The file is a playlist: it only names other files.")
    if sniffed.format == "svg":
        if drawing.reaches_out(data):
            return drawing.unsafe()
        return Failure(Code.UNSUPPORTED_FORMAT, "SVG drawings are not supported; export a PNG.")
    if sniffed.format in _OTHER_IMAGES:
        return Failure(Code.UNSUPPORTED_FORMAT, _OTHER_IMAGES[sniffed.format])
    return Failure(Code.UNSUPPORTED_FORMAT, f"The file is no picture ({sniffed.type}).")


# --- libvips


def _open_with_vips(
    sniffed: Sniffed, seen: structure.Structure, data: Data, complaints: Complaints
) -> Picture:
    header = _LOADERS[sniffed.format](pyvips.Source.new_from_memory(data), access="sequential")
    facts = _facts_of(sniffed, seen, header)
    canvas = (seen.width, seen.height)
    if sniffed.format == "gif" and (facts.stored_width, facts.stored_height) != canvas:
        # libvips distrusts some canvas sizes and takes the first frame's; browsers do not.
        from mediamill.imaging import by_pillow

        return by_pillow.open_picture(sniffed, seen, data, complaints)
    picture = _VipsPicture(facts, data, complaints, sniffed, seen)
    picture.exif, picture.xmp = (_blob(header, f"{name}-data") for name in ("exif", "xmp"))
    if sniffed.format == "tiff":
        # A TIFF is itself of the form in which EXIF is written.
        picture.exif = data[: 1 << 20] if not picture.exif else picture.exif
    return picture


def _blob(header: Any, name: str) -> bytes:
    return bytes(header.get(name)) if header.get_typeof(name) else b""


def _facts_of(sniffed: Sniffed, seen: structure.Structure, header: Any) -> Facts:
    orientation = int(header.get("orientation")) if header.get_typeof("orientation") else 1
    if not 1 <= orientation <= 8 or sniffed.format == "avif":
        orientation = 1
    warnings = list(seen.warnings)
    profile = header.get("icc-profile-data") if header.get_typeof("icc-profile-data") else None
    if profile is not None and not seen.damaged_profile:
        problem = color.profile_problem(profile, header.bands, header.interpretation)
        if problem is not None:
            warnings.append(problem)
    pages = int(header.get("n-pages")) if header.get_typeof("n-pages") else 1
    return facts_of(
        sniffed,
        seen,
        size=(header.width, header.height),
        orientation=orientation,
        pages=pages if sniffed.format == "tiff" else 1,
        has_alpha=bool(header.hasalpha()),
        bands=header.bands,
        bits=16 if header.format == "ushort" else 8,
        interpretation=header.interpretation,
        profile=profile,
        warnings=warnings,
    )


def facts_of(
    sniffed: Sniffed,
    seen: structure.Structure,
    *,
    size: tuple[int, int],
    orientation: int = 1,
    pages: int = 1,
    has_alpha: bool,
    bands: int,
    bits: int,
    interpretation: str,
    profile: bytes | None,
    warnings: list[str],
) -> Facts:
    """Put together what the walk and the decoder's header say."""
    stored_w, stored_h = size
    width, height = (stored_h, stored_w) if orientation >= 5 else (stored_w, stored_h)
    hdr = color.TRANSFERS.get(seen.transfer)
    if hdr is not None:
        warnings.append(f"An HDR picture ({hdr.upper()}): brightness was fitted to usual screens.")
    return Facts(
        type=sniffed.type,
        format=sniffed.format,
        width=width,
        height=height,
        stored_width=stored_w,
        stored_height=stored_h,
        largest_pixels=max(seen.largest_pixels, stored_w * stored_h),
        orientation=orientation,
        frames=seen.frames,
        delays_ms=tuple(seen.delays_ms),
        plays=seen.plays,
        pages=pages,
        has_alpha=has_alpha,
        bands=bands,
        bit_depth=seen.bit_depth or bits,
        interpretation=interpretation,
        has_icc=profile is not None,
        icc_description=color.profile_description(profile) if profile else None,
        hdr=hdr,
        progressive=seen.progressive,
        warnings=tuple(warnings),
    )


class _VipsPicture(Picture):
    def __init__(
        self,
        facts: Facts,
        data: Data,
        complaints: Complaints,
        sniffed: Sniffed,
        seen: structure.Structure,
    ) -> None:
        super().__init__(facts, data, complaints)
        self._sniffed = sniffed
        self._seen = seen
        self._unusable_profile = seen.damaged_profile or any(
            "profile" in warning for warning in facts.warnings
        )

    @property
    def can_animate(self) -> bool:
        facts = self.facts
        # An animated PNG goes through Pillow, which neither turns pictures nor reads 16 bits well.
        plain = facts.orientation == 1 and facts.bit_depth <= 8
        return facts.animated and (facts.format in ("gif", "webp") or plain)

    def _still(self, width: int, height: int) -> Any:
        if self.facts.hdr is not None:
            return self._hdr_still(width, height)
        return self._in_srgb(self._thumbnail(width, height, "fail_on=error"))

    def animation(self, width: int, height: int) -> Any:
        if self.facts.format == "png":
            from mediamill.imaging import by_pillow

            return by_pillow.open_picture(
                self._sniffed, self._seen, self.data, self.complaints
            ).animation(width, height)
        frames = self._in_srgb(self._thumbnail(width, height, "n=-1,fail_on=error"))
        return with_timing(frames, self.facts, height)

    def _thumbnail(self, width: int, height: int, options: str) -> Any:
        # `fail_on` must go through the options: as an argument it does not reach the loader.
        return pyvips.Image.thumbnail_source(
            pyvips.Source.new_from_memory(self.data),
            width,
            height=height,
            size="force",
            option_string=f"[{options}]",
        )

    def _in_srgb(self, image: Any) -> Any:
        return color.to_srgb(
            image,
            warnings=self.warnings,
            # CMYK was brought to sRGB by `thumbnail` already, which resizes in a space with light.
            ignore_profile=self._unusable_profile or self.facts.interpretation == "cmyk",
            primaries=self._seen.primaries,
        )

    def _hdr_still(self, width: int, height: int) -> Any:
        loader = _LOADERS[self.facts.format]
        image = loader(pyvips.Source.new_from_memory(self.data), fail_on="error")
        if image.format == "uchar":
            image = image.cast("ushort") * 257
        return hdr_still(image.autorot(), width, height, self.facts, self._seen.primaries)


def hdr_still(image: Any, width: int, height: int, facts: Facts, primaries: int) -> Any:
    assert facts.hdr is not None
    small = image.resize(width / image.width, vscale=height / image.height).cast("ushort")
    return color.tone_map(small, transfer=facts.hdr, primaries=primaries)


def with_timing(frames: Any, facts: Facts, page_height: int) -> Any:
    """Set the frames' height, how long each is shown, and how often."""
    count = frames.height // page_height
    frames = frames.copy()
    frames.set_type(pyvips.GValue.gint_type, "page-height", page_height)
    frames.set_type(
        pyvips.GValue.array_int_type, "delay", [*facts.delays_ms, *[100] * count][:count]
    )
    frames.set_type(pyvips.GValue.gint_type, "loop", facts.plays)
    return frames


def _drop_idle_alpha(image: Any) -> Any:
    """Without the alpha band if every pixel is opaque: smaller files, and nothing to lay on."""
    if image.bands == 4 and image.extract_band(3).min() == 255:
        return image.extract_band(0, n=3)
    return image


def full_frames(format: str, data: Data, frames: int, **options: Any) -> Any:
    """Every row of every frame, as stored: for checking our own outputs. Not decoded yet."""
    options = {"n": -1, **options} if frames > 1 else options
    source = pyvips.Source.new_from_memory(data)
    return _LOADERS[format](source, access="sequential", fail_on="error", **options)

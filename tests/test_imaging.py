"""The image child, driven as the worker drives it: bytes in, files out. What comes out is read by
Pillow, so that no decoder is its own judge.

Spots are the mean of 5 × 5 pixels at a fraction of the shown width and height.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import os
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw
from tests import make_media as media
from tests.make_media import BLUE, CORNERS, GREEN, RED, RGB, save

from mediamill.failures import Code, Failure
from mediamill.image_pool import Child, ImagePool
from mediamill.imaging import likeness, structure
from mediamill.imaging.facts import Limits, check
from mediamill.imaging.geometry import Fit, shape

DATA = Path(__file__).parent / "data"
WHITE: RGB = (255, 255, 255)
ALL_FORMATS = ("jpeg", "webp", "avif", "png")

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def spawn(argv: list[str], fds: tuple[int, ...]) -> Child:
    return await asyncio.create_subprocess_exec(*argv, pass_fds=fds)


class Studio:
    """Sends bytes to a child and opens what comes back."""

    def __init__(self, pool: ImagePool) -> None:
        self.pool = pool

    async def ask(self, op: str, data: bytes, **fields: Any) -> dict[str, Any]:
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.flush()
            return await self.pool.request({"op": op, **fields}, [file.fileno()], wall_seconds=20)

    async def inspect(self, data: bytes, **fields: Any) -> dict[str, Any]:
        return await self.ask("inspect", data, **fields)

    async def make(
        self, data: bytes, *outputs: dict[str, Any], **fields: Any
    ) -> tuple[dict[str, Any], list[bytes]]:
        with ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(1 + len(outputs))]
            files[0].write(data)
            files[0].flush()
            wanted = [{"fd_index": n, **output} for n, output in enumerate(outputs, 1)]
            answer = await self.pool.request(
                {"op": "make", "outputs": wanted, **fields},
                [file.fileno() for file in files],
                wall_seconds=20,
            )
            made = []
            for file, told in zip(files[1:], answer["outputs"], strict=True):
                file.seek(0)
                made.append(file.read())
                assert len(made[-1]) == told["bytes"]
            return answer, made

    async def one(self, data: bytes, format: str = "png", **output: Any) -> Image.Image:
        """The picture that one output shows."""
        _, (made,) = await self.make(data, {"format": format, **output})
        return opened(made)

    async def failure(self, data: bytes, **fields: Any) -> Failure:
        with pytest.raises(Failure) as caught:
            await self.make(data, {"format": "jpeg", "width": 100}, **fields)
        return caught.value


@pytest.fixture(scope="module")
async def studio() -> AsyncIterator[Studio]:
    async with ImagePool(spawn, size=1, max_jobs=100_000) as pool:
        yield Studio(pool)


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def spot(image: Image.Image, x: float, y: float, mode: str = "RGB") -> tuple[float, ...]:
    width, height = image.size
    left, top = round(width * x) - 2, round(height * y) - 2
    box = image.convert(mode).crop((left, top, left + 5, top + 5))
    data = box.tobytes()
    return tuple(sum(data[band :: len(mode)]) / 25 for band in range(len(mode)))


def near(found: Sequence[float], wanted: Sequence[float], tolerance: float) -> bool:
    return all(abs(a - b) <= tolerance for a, b in zip(found, wanted, strict=True))


def shows_corners(image: Image.Image, colors: Sequence[RGB] = CORNERS) -> None:
    places = ((0.2, 0.2), (0.8, 0.2), (0.2, 0.8), (0.8, 0.8))
    for (x, y), color in zip(places, colors, strict=True):
        assert near(spot(image, x, y), color, 25), (x, y)


def clean(image: Image.Image) -> None:
    """Nothing but pixels: no EXIF, XMP, comment or profile."""
    assert not image.getexif()
    assert not {"exif", "xmp", "comment", "photoshop", "icc_profile"} & image.info.keys()


# --- Orientation


@pytest.mark.parametrize("number", range(1, 9))
async def test_a_jpeg_is_turned_once_as_its_orientation_says(studio: Studio, number: int) -> None:
    data = media.turned((240, 320), number, "JPEG", quality=92)
    answer, made = await studio.make(
        data, {"format": "jpeg"}, {"format": "webp", "width": 100}, {"format": "avif", "width": 60}
    )
    assert (answer["width"], answer["height"]) == (240, 320)
    stored = (320, 240) if number >= 5 else (240, 320)
    assert (answer["stored_width"], answer["stored_height"]) == stored
    assert answer["orientation"] == number
    assert [opened(m).size for m in made] == [(240, 320), (100, 133), (60, 80)]
    for output in made:
        shows_corners(opened(output))
        clean(opened(output))


async def test_an_orientation_that_does_not_exist_is_none(studio: Studio) -> None:
    data = media.turned((240, 320), 99, "JPEG")
    assert (await studio.inspect(data))["orientation"] == 1
    shows_corners(await studio.one(data))


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
async def test_other_formats_carry_an_orientation_too(studio: Studio, format: str) -> None:
    data = media.turned((140, 200), 8, format)
    answer = await studio.inspect(data)
    assert (answer["width"], answer["height"], answer["orientation"]) == (140, 200, 8)
    first = await studio.one(data, "png")
    shows_corners(first)
    clean(first)
    # Fed in again it stays as it is.
    shows_corners(await studio.one(save(first, "PNG")))


async def test_a_heic_that_says_turn_twice_is_turned_once(studio: Studio) -> None:
    data = (DATA / "turned-in-container-and-exif.heic").read_bytes()
    answer = await studio.inspect(data)
    assert (answer["type"], answer["width"], answer["height"]) == ("image/heic", 240, 320)
    turned = (GREEN, RED, CORNERS[3], BLUE)
    for output in ("jpeg", "webp"):
        shows_corners(await studio.one(data, output), turned)


async def test_a_turned_picture_is_not_squeezed_by_a_small_box(studio: Studio) -> None:
    image = await studio.one(media.turned((300, 900), 6, "JPEG"), width=60, height=60)
    assert image.size == (20, 60)
    shows_corners(image)


# --- Color


async def test_ink_stored_upside_down_is_not_shown_as_a_negative(studio: Studio) -> None:
    image = Image.new("CMYK", (240, 160), (0, 0, 0, 0))
    ImageDraw.Draw(image).rectangle((120, 0, 240, 160), fill=(0, 255, 255, 0))
    answer, (made,) = await studio.make(save(image, "JPEG", quality=95), {"format": "jpeg"})
    assert answer["interpretation"] == "cmyk"
    shown = opened(made)
    assert shown.mode == "RGB"
    assert near(spot(shown, 0.2, 0.5), WHITE, 12)
    assert near(spot(shown, 0.8, 0.5), (240, 20, 25), 45)


async def test_ink_with_a_profile_for_light_is_read_as_plain_ink(studio: Studio) -> None:
    image = Image.new("CMYK", (100, 60), (0, 255, 255, 0))
    data = save(image, "JPEG", quality=95, icc_profile=media.p3_profile())
    answer, (made,) = await studio.make(data, {"format": "png"})
    assert near(spot(opened(made), 0.5, 0.5), (240, 20, 25), 45)
    assert any("profile" in warning for warning in answer["warnings"])


@pytest.mark.parametrize(
    ("profile", "stored", "shown"),
    [
        (media.p3_profile(), (200, 90, 60), (217, 80, 45)),
        (media.adobe_rgb_profile(), (150, 160, 70), (147, 161, 60)),
    ],
)
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
async def test_wide_colors_are_brought_to_srgb(
    studio: Studio, profile: bytes, stored: RGB, shown: RGB, format: str
) -> None:
    every: dict[str, dict[str, Any]] = {"WEBP": {"lossless": True}, "JPEG": {"quality": 97}}
    options = every.get(format, {})
    data = save(media.flat((200, 200), stored), format, icc_profile=profile, **options)
    for output in ALL_FORMATS:
        image = await studio.one(data, output, width=120, quality=90)
        assert near(spot(image, 0.5, 0.5), shown, 8)
        assert not near(spot(image, 0.5, 0.5), stored, 2)
        clean(image)


async def test_a_profile_named_by_numbers_counts_as_well(studio: Studio) -> None:
    data = save(media.flat((64, 64), (200, 90, 60)), "AVIF", quality=95)
    at = data.index(b"nclx") + 4
    assert data[at + 4 : at + 6] == struct.pack(">H", 6)
    p3 = data[:at] + struct.pack(">HH", 12, 13) + data[at + 4 :]
    assert near(spot(await studio.one(p3), 0.5, 0.5), (217, 80, 45), 8)
    assert near(spot(await studio.one(data), 0.5, 0.5), (200, 90, 60), 5)


async def test_sixteen_bit_gray_is_scaled_and_not_clipped(studio: Studio) -> None:
    data = media.gray_bands_16((8192, 32768, 57344), (300, 90))
    answer, (made,) = await studio.make(data, {"format": "png"})
    assert answer["bit_depth"] == 16
    image = opened(made)
    for x, value in ((0.16, 32), (0.5, 128), (0.84, 224)):
        assert near(spot(image, x, 0.5), (value,) * 3, 6)


async def test_sixteen_bit_color_with_transparency_is_kept(studio: Studio) -> None:
    pixel = struct.pack(">HHHH", 51400, 20560, 10280, 32896)
    data = media.png((40, 40), [pixel * 40] * 40, depth=16, kind=6)
    image = await studio.one(data)
    assert near(spot(image, 0.5, 0.5, "RGBA"), (200, 80, 40, 128), 2)


async def test_a_gray_profile_is_applied(studio: Studio) -> None:
    gray = Image.new("L", (60, 60), 128)
    plain = await studio.one(save(gray, "PNG"))
    light = await studio.one(save(gray, "PNG", icc_profile=media.gray_profile(1.0)))
    assert near(spot(plain, 0.5, 0.5), (128,) * 3, 1)
    assert near(spot(light, 0.5, 0.5), (188,) * 3, 4)


@pytest.mark.parametrize(
    "profile",
    [media.foreign_profile(), media.rubbish_profile(), media.gray_profile(1.0), b"no profile" * 20],
    ids=["for ink", "rubbish", "for gray", "no profile at all"],
)
async def test_an_unusable_profile_is_dropped_with_a_warning(
    studio: Studio, profile: bytes
) -> None:
    color = (240, 140, 20)
    data = save(media.flat((160, 160), color), "JPEG", quality=95, icc_profile=profile)
    answer, (made,) = await studio.make(data, {"format": "png"})
    assert near(spot(opened(made), 0.5, 0.5), color, 4)
    assert any("profile" in warning for warning in answer["warnings"])


async def test_a_profile_with_a_wrong_checksum_is_not_believed(studio: Studio) -> None:
    color = (40, 200, 210)
    answer, (made,) = await studio.make(media.png_with_damaged_profile(color), {"format": "png"})
    assert near(spot(opened(made), 0.5, 0.5), color, 4)
    assert any("damaged" in warning for warning in answer["warnings"])


async def test_an_hdr_still_says_so_and_looks_right(studio: Studio) -> None:
    bands = media.pq_bands((203, 26, 1000, 0.1))
    for data, type in (
        ((DATA / "pq-patches.avif").read_bytes(), "image/avif"),
        (bands, "image/png"),
    ):
        answer = await studio.inspect(data)
        assert (answer["type"], answer["hdr"], answer["hdr_format"]) == (type, True, "pq")
        assert any("HDR" in warning for warning in answer["warnings"])
        image = await studio.one(data, "png")
        wanted = ((0.125, 170, 245), (0.375, 60, 165), (0.625, 225, 255), (0.875, 0, 30))
        for x, lowest, highest in wanted:
            red, green, blue = spot(image, x, 0.5)
            assert lowest <= red <= highest
            assert max(red, green, blue) - min(red, green, blue) <= 8


# --- Transparency


async def test_clear_parts_are_kept_or_laid_on_white(studio: Studio) -> None:
    data = save(media.clear_ground_with_square((200, 200), (60, 60, 140, 140)), "PNG")
    answer, made = await studio.make(data, *({"format": f} for f in ALL_FORMATS))
    assert answer["has_alpha"]
    for format, output in zip(ALL_FORMATS, made, strict=True):
        image = opened(output)
        if format == "jpeg":
            assert near(spot(image, 0.1, 0.1), WHITE, 8)
        else:
            assert spot(image, 0.1, 0.1, "RGBA")[3] == 0
            assert spot(image, 0.5, 0.5, "RGBA")[3] == 255
        assert near(spot(image, 0.5, 0.5), RED, 20)


async def test_the_ground_is_the_one_that_was_named(studio: Studio) -> None:
    data = save(media.clear_ground_with_square((100, 100), (30, 30, 70, 70)), "PNG")
    image = await studio.one(data, "jpeg", background="#1eb43c")
    assert near(spot(image, 0.1, 0.1), GREEN, 8)
    flat = await studio.one(data, "webp", background="#1eb43c", flatten=True)
    assert flat.mode == "RGB"
    assert near(spot(flat, 0.1, 0.1), GREEN, 8)


async def test_gray_with_transparency_becomes_a_jpeg(studio: Studio) -> None:
    image = Image.new("LA", (150, 100), (0, 0))
    ImageDraw.Draw(image).rectangle((50, 30, 100, 70), fill=(100, 255))
    shown = await studio.one(save(image, "PNG"), "jpeg")
    assert near(spot(shown, 0.05, 0.1), WHITE, 8)
    assert near(spot(shown, 0.5, 0.5), (100,) * 3, 10)


async def test_a_palette_with_a_clear_entry_is_transparent(studio: Studio) -> None:
    image = Image.new("P", (80, 60), 0)
    image.putpalette([0, 0, 0, *RED])
    ImageDraw.Draw(image).rectangle((20, 15, 60, 45), fill=1)
    for format in ("PNG", "GIF"):
        data = save(image, format, transparency=0)
        assert (await studio.inspect(data))["has_alpha"]
        shown = await studio.one(data, "webp", lossless=True)
        assert spot(shown, 0.1, 0.1, "RGBA")[3] == 0
        assert near(spot(shown, 0.5, 0.5, "RGBA"), (*RED, 255), 6)
        assert near(spot(await studio.one(data, "jpeg"), 0.1, 0.1), WHITE, 8)


async def test_hidden_black_does_not_bleed_into_the_edges(studio: Studio) -> None:
    image = Image.new("RGBA", (301, 301), (0, 0, 0, 0))
    ImageDraw.Draw(image).ellipse((20, 20, 280, 280), fill=(255, 255, 255, 255))
    small = await studio.one(save(image, "PNG"), "png", width=60)
    ground = Image.new("RGBA", small.size, (255, 255, 255, 255))
    darkest = min(Image.alpha_composite(ground, small).convert("L").tobytes())
    assert darkest >= 250


async def test_an_alpha_band_that_hides_nothing_is_dropped(studio: Studio) -> None:
    data = save(media.flat((50, 50), BLUE).convert("RGBA"), "PNG")
    answer, made = await studio.make(data, {"format": "webp"}, {"format": "png"})
    assert answer["has_alpha"]
    assert [output["has_alpha"] for output in answer["outputs"]] == [False, False]
    assert [opened(output).mode for output in made] == ["RGB", "RGB"]


# --- Files that are not what they seem, damaged or cut off


def _heic() -> bytes:
    return (DATA / "plain.heic").read_bytes()


async def test_content_wins_over_names(studio: Studio) -> None:
    answer, (made,) = await studio.make(_heic(), {"format": "jpeg"})
    assert (answer["type"], answer["width"], answer["height"]) == ("image/heic", 128, 96)
    assert near(spot(opened(made), 0.5, 0.5), (200, 40, 190), 30)


async def test_the_first_picture_of_several_is_shown(studio: Studio) -> None:
    answer, made = await studio.make(media.two_pictures(), {"format": "jpeg"}, {"format": "webp"})
    assert (answer["type"], answer["width"], answer["height"]) == ("image/jpeg", 200, 150)
    assert (answer["animated"], answer["frames"]) == (False, 1)
    for output in made:
        image = opened(output)
        assert image.format in ("JPEG", "WEBP")
        assert near(spot(image, 0.5, 0.5), BLUE, 20)
    assert made[0].count(b"\xff\xd8\xff") == 1


async def test_a_side_beyond_the_format_makes_the_output_smaller(studio: Studio) -> None:
    image = Image.new("RGB", (60, 17000), RED)
    answer, made = await studio.make(save(image, "PNG"), {"format": "webp"}, {"format": "avif"})
    assert (answer["width"], answer["height"]) == (60, 17000)
    for output, most in zip(made, (16383, 16384), strict=True):
        width, height = opened(output).size
        assert height == most
        assert abs(width / height / (60 / 17000) - 1) <= 0.02
    assert all(output["reduced"] for output in answer["outputs"])
    assert any("limit on its sides" in warning for warning in answer["warnings"])


_SVG = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 200"><rect width="9"/>%s</svg>'


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", Code.EMPTY_INPUT),
        (b"hello, world\n" * 20, Code.UNSUPPORTED_FORMAT),
        (bytes(range(1, 30)) * 40, Code.UNSUPPORTED_FORMAT),
        (_SVG % b"", Code.UNSUPPORTED_FORMAT),
        (_SVG % b'<image href="canary.png"/>', Code.UNSAFE_CONTENT),
        (_SVG % b"<style>@import 'http://127.0.0.1/x'</style>", Code.UNSAFE_CONTENT),
        (_SVG % b"<script>alert(1)</script>", Code.UNSAFE_CONTENT),
        (b"#EXTM3U\n#EXTINF:1,\ncanary.ts\n", Code.UNSAFE_CONTENT),
        (
            b"\x89PNG\r\n\x1a\n\0\0\0\r<html><body onload=alert(1)></body></html>",
            Code.CORRUPT_INPUT,
        ),
        (b"%PDF-1.7\n", Code.UNSUPPORTED_FORMAT),
        (b"\xff\x0a" + bytes(60), Code.UNSUPPORTED_FORMAT),
        (b"\0\0\0\x18ftypisom\0\0\0\0isommp42", Code.UNSUPPORTED_FORMAT),
        (b"GIF89a", Code.TRUNCATED_INPUT),
        (b"\xff\xd8\xff", Code.TRUNCATED_INPUT),
    ],
)
async def test_what_is_no_picture_is_refused_by_its_kind(
    studio: Studio, data: bytes, code: Code
) -> None:
    assert (await studio.failure(data)).code is code


async def test_a_picture_whose_head_is_ruined_is_refused(studio: Studio) -> None:
    good = save(media.texture((120, 90)), "JPEG")
    failure = await studio.failure(bytes((0, 1, 1, 0)) * 16 + good[64:])
    assert failure.code in (Code.CORRUPT_INPUT, Code.UNSUPPORTED_FORMAT)
    shows_corners(await studio.one(media.turned((120, 90), 1, "JPEG", quality=95)))


def _samples() -> dict[str, bytes]:
    image = media.texture((320, 240))
    moving = (RED, GREEN, BLUE)
    return {
        "jpeg": save(image, "JPEG", quality=90),
        "progressive jpeg": save(image, "JPEG", quality=90, progressive=True),
        "png": save(image, "PNG"),
        "webp": save(image, "WEBP", quality=80),
        "lossless webp": save(image, "WEBP", lossless=True),
        "gif": save(image, "GIF"),
        "tiff": save(image, "TIFF", compression="tiff_lzw"),
        "plain tiff": save(image, "TIFF"),
        "avif": save(image, "AVIF"),
        "bmp": save(image, "BMP"),
        "ico": save(image.resize((128, 128)), "ICO", sizes=[(64, 64), (128, 128)]),
        "heic": _heic(),
        "moving gif": media.frames("GIF", moving, (100, 300, 200)),
        "moving png": media.frames("PNG", moving, (100, 300, 200)),
        "moving webp": media.frames("WEBP", moving, (100, 300, 200)),
        "moving avif": media.frames("AVIF", moving, (100, 300, 200)),
    }


SAMPLES = _samples()


@pytest.mark.parametrize("name", SAMPLES)
async def test_a_missing_end_is_found_in_every_format(studio: Studio, name: str) -> None:
    whole = SAMPLES[name]
    assert (await studio.one(whole, width=40)).width == 40
    for part in (0.2, 0.55, 0.9, 0.99):
        assert (await studio.failure(whole[: int(len(whole) * part)])).code is Code.TRUNCATED_INPUT
    if name.endswith("gif"):
        # Only the end mark is gone: all of the picture is there.
        answer = await studio.inspect(whole[:-1])
        assert any("no end mark" in warning for warning in answer["warnings"])
    else:
        assert (await studio.failure(whole[:-1])).code is Code.TRUNCATED_INPUT


@pytest.mark.parametrize("name", SAMPLES)
async def test_bytes_behind_the_end_do_no_harm(studio: Studio, name: str) -> None:
    answer, made = await studio.make(SAMPLES[name] + b"PK\3\4<script>" * 9, {"format": "webp"})
    assert answer["outputs"][0]["bytes"] > 0
    assert b"<script>" not in made[0]


@pytest.mark.parametrize("name", ["jpeg", "progressive jpeg", "png", "gif", "tiff", "avif"])
async def test_a_hole_in_the_pixels_is_found(studio: Studio, name: str) -> None:
    whole = SAMPLES[name]
    at, length = len(whole) // 2, len(whole) // 5
    filling = (b"\xa5\x17\xe3\x4c\x91" * length)[:length]
    holed = whole[:at] + filling + whole[at + length :]
    assert (await studio.failure(holed)).code is Code.CORRUPT_INPUT


async def test_a_wrong_checksum_of_the_pixels_is_found(studio: Studio) -> None:
    whole = SAMPLES["png"]
    at = whole.index(b"IDAT") - 4
    end = at + 8 + struct.unpack(">I", whole[at : at + 4])[0]
    failure = await studio.failure(whole[:end] + b"\0\0\0\0" + whole[end + 4 :])
    assert failure.code is Code.CORRUPT_INPUT


@pytest.mark.parametrize(
    "data",
    [
        media.twelve_bit(SAMPLES["jpeg"]),
        SAMPLES["jpeg"].replace(b"\xff\xc0", b"\xff\xc3", 1),
        SAMPLES["jpeg"].replace(b"\xff\xc0", b"\xff\xf7", 1),
        b"\x89PNG\r\n\x1a\n" + media.chunk(b"CgBI", b"\0\0\0\0") + SAMPLES["png"][8:],
    ],
    ids=["12 bits", "lossless JPEG", "JPEG-LS", "Apple PNG"],
)
async def test_a_codec_that_nobody_here_knows_is_named_as_such(studio: Studio, data: bytes) -> None:
    failure = await studio.failure(data)
    assert failure.code is Code.UNSUPPORTED_CODEC
    assert failure.problem.detail


# --- Animation


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "AVIF"])
async def test_frames_and_their_times_are_told(studio: Studio, format: str) -> None:
    data = media.frames(format, (RED, GREEN, BLUE), (100, 300, 200))
    answer, (made,) = await studio.make(data, {"format": "jpeg"})
    assert answer["animated"]
    assert answer["frames"] == 3
    assert answer["delays_ms"] == [100, 300, 200]
    assert (answer["duration_ms"], answer["loop"]) == (600, 0)
    assert near(spot(opened(made), 0.5, 0.5), RED, 12)
    assert "Only the first of 3 frames is shown." in answer["warnings"]


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "AVIF"])
async def test_an_animation_is_kept_where_it_is_asked_for(studio: Studio, format: str) -> None:
    data = media.frames(format, (RED, GREEN, BLUE), (100, 300, 200))
    answer, (moving, still) = await studio.make(
        data, {"format": "webp", "width": 40}, {"format": "avif", "width": 40}, animation="keep"
    )
    assert [output["frames"] for output in answer["outputs"]] == [3, 1]
    image = Image.open(io.BytesIO(moving))
    assert (image.size, getattr(image, "n_frames", 1)) == ((40, 30), 3)
    seen = []
    for number, color in enumerate((RED, GREEN, BLUE)):
        image.seek(number)
        image.load()
        seen.append(image.info["duration"])
        assert near(spot(image, 0.5, 0.5), color, 15)
    assert seen == [100, 300, 200]
    assert near(spot(opened(still), 0.5, 0.5), RED, 15)
    assert "Only the first" not in str(answer["warnings"])


async def test_a_still_that_is_no_frame_of_its_animation_stays_out_of_it(studio: Studio) -> None:
    image, first, second = (media.flat((80, 60), c) for c in (BLUE, RED, GREEN))
    data = save(
        image,
        "PNG",
        save_all=True,
        default_image=True,
        append_images=[first, second],
        duration=[100, 200],
    )
    answer, (moving, still) = await studio.make(
        data, {"format": "webp"}, {"format": "png"}, animation="keep"
    )
    assert (answer["frames"], answer["delays_ms"]) == (2, [100, 200])
    shown = Image.open(io.BytesIO(moving))
    for number, color in enumerate((RED, GREEN)):
        shown.seek(number)
        assert near(spot(shown, 0.5, 0.5), color, 15)
    assert near(spot(opened(still), 0.5, 0.5), BLUE, 3)


async def test_a_brand_that_fits_no_codec_does_not_mislead(studio: Studio) -> None:
    avif, heic = save(media.flat((64, 48), RED), "AVIF"), _heic()
    assert avif[8:12] == b"avif"
    assert heic[8:12] == b"heic"
    for data, type in (
        (avif.replace(b"avif", b"mif1"), "image/avif"),
        (heic.replace(b"heic", b"mif1"), "image/heic"),
    ):
        answer, made = await studio.make(data, {"format": "png"})
        assert answer["type"] == type
        assert opened(made[0]).size == (answer["width"], answer["height"])


async def test_frames_that_hold_only_changes_are_put_together(studio: Studio) -> None:
    answer, (made,) = await studio.make(
        media.gif_of_changes(), {"format": "webp", "lossless": True}, animation="keep"
    )
    assert (answer["frames"], answer["duration_ms"]) == (3, 600)
    image = Image.open(io.BytesIO(made))
    for frame, at, color in (
        (1, (70, 50), BLUE),
        (1, (20, 20), RED),
        (2, (20, 20), RED),
        (2, (50, 20), BLUE),
        (2, (40, 10), GREEN),
    ):
        image.seek(frame)
        found = image.convert("RGB").getpixel(at)
        assert isinstance(found, tuple)
        assert near(found, color, 30)


async def test_equal_frames_may_merge_and_time_stays(studio: Studio) -> None:
    colors = (RED, RED, BLUE, GREEN, GREEN, GREEN)
    images = [media.flat((40, 40), color) for color in colors]
    data = save(images[0], "PNG", save_all=True, append_images=images[1:], duration=100)
    raw = media.frames("GIF", colors, [100] * 6)
    for source in (data, raw):
        answer, (made,) = await studio.make(source, {"format": "webp"}, animation="keep")
        image = Image.open(io.BytesIO(made))
        total = 0
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            image.load()
            total += image.info["duration"]
        assert total == answer["duration_ms"] == 600
        told = answer["outputs"][0]
        await studio.ask(
            "verify",
            made,
            format="webp",
            width=told["width"],
            height=told["height"],
            pages=told["frames"],
            duration_ms=told["duration_ms"],
        )


@pytest.mark.parametrize(("fit", "size"), [("cover", (20, 20)), ("contain", (50, 50))])
async def test_frames_are_cut_and_laid_out_each_for_itself(
    studio: Studio, fit: str, size: tuple[int, int]
) -> None:
    data = media.frames("GIF", (RED, GREEN), (100, 200))
    output = {"format": "webp", "width": size[0], "height": size[1], "fit": fit}
    _, (made,) = await studio.make(data, output, animation="keep")
    image = Image.open(io.BytesIO(made))
    assert (image.size, getattr(image, "n_frames", 1)) == (size, 2)
    for number, color in enumerate((RED, GREEN)):
        image.seek(number)
        assert near(spot(image, 0.5, 0.5), color, 15)
    if fit == "contain":
        assert near(spot(image, 0.5, 0.06), WHITE, 15)


async def test_a_delay_of_nothing_means_what_browsers_make_of_it(studio: Studio) -> None:
    data = media.frames("GIF", (RED, GREEN), (0, 20))
    assert (await studio.inspect(data))["delays_ms"] == [100, 20]


async def test_a_gif_that_stops_after_some_rounds_says_how_many(studio: Studio) -> None:
    data = media.frames("GIF", (RED, GREEN), (100, 100), loop=3)
    answer, (made,) = await studio.make(data, {"format": "webp"}, animation="keep")
    assert answer["loop"] == 4  # GIF counts the repetitions, we count the showings
    assert Image.open(io.BytesIO(made)).info["loop"] == 4


async def test_a_canvas_larger_than_its_frames_is_the_picture(studio: Studio) -> None:
    data = media.gif_of_dots((2500, 2400), 2)
    answer, (made,) = await studio.make(data, {"format": "png", "width": 100})
    assert (answer["width"], answer["height"]) == (2500, 2400)
    assert opened(made).size == (100, 96)


# --- How alike


async def test_a_likeness_that_no_quality_reaches_is_told(studio: Studio) -> None:
    data = save(media.texture((120, 90)), "PNG")
    for format in ("jpeg", "webp", "avif"):
        output = {"format": format, "target_quality": 1.0, "effort": 0}
        answer, _ = await studio.make(data, output)
        told = answer["outputs"][0]
        assert (told["quality"], told["likeness"] < 1) == (likeness_most(format), True)
        assert told["encodes"] <= likeness.MAX_ENCODES
        assert any("was not reached" in warning for warning in answer["warnings"])


def likeness_most(format: str) -> int:
    return {"jpeg": 96, "webp": 98, "avif": 92}[format]


@given(
    bend=st.floats(0.3, 3.0),
    floor=st.floats(0.2, 0.95),
    target=st.floats(0.7, 0.995),
    start=st.integers(1, 100),
)
@settings(max_examples=400, deadline=None)
def test_the_search_finds_the_lowest_quality_in_a_few_tries(
    bend: float, floor: float, target: float, start: int
) -> None:
    tries = []

    def measure(quality: int) -> float:
        tries.append(quality)
        return shape_of(quality)

    def shape_of(quality: int) -> float:
        return floor + (1 - floor) * math.pow(quality / 100, bend)

    found = likeness.search(measure, target, lowest=10, highest=98, start=start)
    assert found.encodes == len(tries) == len(set(tries)) <= likeness.MAX_ENCODES
    assert found.likeness == shape_of(found.quality)
    assert found.quality == next((q for q in range(10, 99) if shape_of(q) >= target), 98)


# --- What is written beside the pixels


async def test_place_camera_comment_and_old_thumbnail_are_gone(studio: Studio) -> None:
    data = media.jpeg_with_everything()
    answer, made = await studio.make(data, *({"format": f} for f in ALL_FORMATS), preview=True)
    told = json.dumps(answer)
    for format, output in zip(ALL_FORMATS, made, strict=True):
        image = opened(output)
        clean(image)
        assert near(spot(image, 0.5, 0.5), BLUE, 20)
        for word in (b"Exif", b"Example", b"GPS", b"8BIM", b"window", b"http://", b"ICC_PROFILE"):
            assert word not in output, format
    assert "Example" not in told
    assert "1,0N" not in told


async def test_a_place_goes_and_orientation_and_color_stay_right(studio: Studio) -> None:
    image = media.flat((160, 120), (200, 90, 60))
    exif = Image.Exif()
    exif[0x0112] = 6
    exif.get_ifd(0x8825).update({1: "N", 2: (1.0, 0.0, 0.0), 3: "E", 4: (2.0, 0.0, 0.0)})
    data = save(image, "JPEG", quality=95, exif=exif, icc_profile=media.p3_profile())
    shown = await studio.one(data, "webp", quality=95)
    assert shown.size == (120, 160)
    assert near(spot(shown, 0.5, 0.5), (217, 80, 45), 8)
    clean(shown)


async def test_script_in_a_comment_does_not_reach_an_output(studio: Studio) -> None:
    script = "<script>alert(1)</script>"
    gif = save(media.flat((40, 30), BLUE), "GIF", comment=script.encode())
    for data in (gif, media.png_with_text(script)):
        _, made = await studio.make(data, *({"format": f} for f in ALL_FORMATS))
        assert not any(b"script" in output for output in made)


# --- Verify


async def test_every_output_passes_its_own_check(studio: Studio) -> None:
    data = save(media.clear_ground_with_square((200, 120), (60, 40, 140, 80)), "PNG")
    answer, made = await studio.make(
        data, *({"format": f, "width": w} for f in ALL_FORMATS for w in (64, None))
    )
    for told, output in zip(answer["outputs"], made, strict=True):
        found = await studio.ask(
            "verify",
            output,
            format=told["format"],
            width=told["width"],
            height=told["height"],
            pages=1,
            has_alpha=told["has_alpha"],
        )
        assert found["ok"]


@pytest.mark.parametrize("format", ALL_FORMATS)
async def test_an_output_that_is_not_as_planned_is_invalid(studio: Studio, format: str) -> None:
    image = media.texture((100, 80))
    exif = Image.Exif()
    exif[0x010F] = "Example"
    name = format.upper()
    good = save(image, name)
    plan = {"format": format, "width": 100, "height": 80, "pages": 1}
    assert (await studio.ask("verify", good, **plan))["ok"]
    for data, fields in (
        (good[:-30], {}),
        (good, {"width": 99}),
        (good, {"format": "jpeg" if format != "jpeg" else "png"}),
        (good, {"has_alpha": True}),
        (save(image, name, exif=exif), {}),
        (save(image, name, icc_profile=media.p3_profile()), {}),
        (b"text", {}),
    ):
        with pytest.raises(Failure) as caught:
            await studio.ask("verify", data, **(plan | fields))
        assert caught.value.code is Code.OUTPUT_INVALID
        assert caught.value.problem.detail


# --- Preview


async def test_the_preview_counts_clear_pixels_as_white(studio: Studio) -> None:
    image = media.clear_ground_with_square((100, 80), (25, 20, 74, 59))
    preview = (await studio.ask("preview", save(image, "PNG")))["preview"]
    average = preview["average_color"]
    found = tuple(int(average[i : i + 2], 16) for i in (1, 3, 5))
    assert near(found, (247, 225, 225), 10)
    assert not near(found, (117, 11, 11), 40)
    assert preview["dominant_color"] == "#dc1e1e"
    inline = base64.b64decode(preview["inline"]["data"])
    assert len(inline) <= 1024
    assert opened(inline).size == (preview["inline"]["width"], preview["inline"]["height"])


async def test_a_large_picture_has_its_preview_at_once(studio: Studio) -> None:
    data = media.soft_gradient((6824, 5120))
    began = time.perf_counter()
    answer = await studio.ask("preview", data)
    assert time.perf_counter() - began < 2.0
    assert (answer["width"], answer["height"]) == (6824, 5120)
    preview = answer["preview"]
    assert len(preview["blurhash"]) == 4 + 2 * 4 * 3
    assert preview["thumbhash"]
    assert preview["inline"]["type"] == "image/webp"


async def test_make_can_bring_the_preview_along(studio: Studio) -> None:
    data = SAMPLES["jpeg"]
    alone = (await studio.ask("preview", data))["preview"]
    along, _ = await studio.make(data, {"format": "webp", "width": 300}, preview=True)
    assert along["preview"].keys() == alone.keys()
    assert along["preview"]["blurhash"][:2] == alone["blurhash"][:2]


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (3, 2)])
async def test_tiny_and_thin_pictures_have_everything(
    studio: Studio, size: tuple[int, int]
) -> None:
    data = save(media.flat(size, RED), "PNG")
    answer, made = await studio.make(
        data, *({"format": f, "width": 100} for f in ALL_FORMATS), preview=True
    )
    assert answer["preview"]["dominant_color"] == "#dc1e1e"
    assert all(near(spot(opened(m).resize((9, 9)), 0.5, 0.5), RED, 12) for m in made)


# --- Limits


async def test_a_small_file_that_claims_to_be_huge_is_refused_at_once(studio: Studio) -> None:
    data = media.resized_header(SAMPLES["jpeg"], (64250, 64250))
    began = time.perf_counter()
    failure = await studio.failure(data)
    assert time.perf_counter() - began < 2.0
    assert failure.code is Code.RESOURCE_LIMIT
    assert failure.problem.limit == {
        "name": "max_pixels",
        "allowed": 100_000_000,
        "seen": 64250**2,
        "unit": "pixels",
    }


@pytest.mark.parametrize(
    ("data", "limits", "name"),
    [
        (SAMPLES["jpeg"], {"max_pixels": 76_799}, "max_pixels"),
        (SAMPLES["jpeg"], {"max_side": 319}, "max_side"),
        (SAMPLES["progressive jpeg"], {"max_interlaced_pixels": 76_799}, "max_interlaced_pixels"),
        (SAMPLES["moving gif"], {"max_frames": 2}, "max_frames"),
        (SAMPLES["moving png"], {"max_total_pixels": 14_399}, "max_total_pixels"),
        (SAMPLES["moving webp"], {"max_frames": 2}, "max_frames"),
        (SAMPLES["moving avif"], {"max_frames": 2}, "max_frames"),
        (SAMPLES["heic"], {"max_side": 127}, "max_side"),
        (SAMPLES["bmp"], {"max_pixels": 76_799}, "max_pixels"),
        (SAMPLES["ico"], {"max_side": 127}, "max_side"),
        (SAMPLES["tiff"], {"max_pixels": 76_799}, "max_pixels"),
        (SAMPLES["avif"], {"max_pixels": 76_799}, "max_pixels"),
        (media.gif_of_dots((3000, 3000), 2000), {}, "max_frames"),
    ],
)
async def test_each_limit_holds_before_anything_is_decoded(
    studio: Studio, data: bytes, limits: dict[str, int], name: str
) -> None:
    with pytest.raises(Failure) as caught:
        await studio.inspect(data, limits=limits)
    assert caught.value.code is Code.RESOURCE_LIMIT
    limit = caught.value.problem.limit
    assert limit is not None
    assert limit["name"] == name
    assert limit["seen"] > limit["allowed"]


async def test_limits_let_through_what_is_just_as_large(studio: Studio) -> None:
    exact = {"max_pixels": 76_800, "max_side": 320, "max_interlaced_pixels": 76_800}
    for name in ("jpeg", "progressive jpeg", "png", "tiff", "webp"):
        assert (await studio.inspect(SAMPLES[name], limits=exact))["width"] == 320
    # A baseline picture does not have to be held as a whole.
    assert await studio.inspect(SAMPLES["jpeg"], limits={"max_interlaced_pixels": 1})


async def test_a_hidden_part_counts_as_much_as_the_shown_one(studio: Studio) -> None:
    data = _heic()
    at = data.index(b"ispe") + 8
    bomb = data[:at] + struct.pack(">II", 60_000, 60_000) + data[at + 8 :]
    assert (await studio.failure(bomb)).code is Code.RESOURCE_LIMIT


async def test_an_icon_with_a_large_picture_inside_is_measured(studio: Studio) -> None:
    inner = save(Image.new("1", (5000, 5000)), "PNG")
    icon = struct.pack("<HHH", 0, 1, 1) + struct.pack(
        "<BBBBHHII", 0, 0, 0, 0, 1, 32, len(inner), 22
    )
    with pytest.raises(Failure) as caught:
        await studio.inspect(icon + inner, limits={"max_side": 4096})
    assert caught.value.code is Code.RESOURCE_LIMIT


def test_both_sides_and_all_frames_count() -> None:
    limits = Limits.of({"max_side": 100, "max_total_pixels": 50, "unknown": 1})
    with pytest.raises(Failure, match="max_side"):
        check(limits, width=1, height=101)
    with pytest.raises(Failure, match="max_total_pixels"):
        check(limits, width=5, height=5, frames=3)
    check(limits, width=5, height=5, frames=2)


# --- Sizes


@pytest.mark.parametrize(
    ("picture", "box", "fit", "scaled", "final"),
    [
        ((4000, 3000), (320, None), "inside", (320, 240), (320, 240)),
        ((4000, 3000), (None, 300), "inside", (400, 300), (400, 300)),
        ((4000, 3000), (400, 400), "inside", (400, 300), (400, 300)),
        ((200, 100), (400, None), "inside", (200, 100), (200, 100)),
        ((4000, 3000), (None, None), "inside", (4000, 3000), (4000, 3000)),
        ((4000, 1), (40, None), "inside", (40, 1), (40, 1)),
        ((400, 300), (100, 100), "cover", (133, 100), (100, 100)),
        ((300, 400), (100, 50), "cover", (100, 133), (100, 50)),
        ((80, 60), (400, 400), "cover", (80, 60), (60, 60)),
        ((400, 300), (100, 100), "contain", (100, 75), (100, 100)),
        ((40, 30), (100, 100), "contain", (40, 30), (100, 100)),
    ],
)
def test_shapes(
    picture: tuple[int, int],
    box: tuple[int | None, int | None],
    fit: str,
    scaled: tuple[int, int],
    final: tuple[int, int],
) -> None:
    plan = shape(picture, box, Fit(fit))
    assert (plan.scaled, (plan.width, plan.height)) == (scaled, final)


sides = st.integers(1, 20_000)


@given(picture=st.tuples(sides, sides), box=st.tuples(sides, sides), fit=st.sampled_from(Fit))
def test_no_shape_enlarges_or_leaves_the_format(
    picture: tuple[int, int], box: tuple[int, int], fit: Fit
) -> None:
    plan = shape(picture, box, fit, format="webp")
    assert all(1 <= s <= p for s, p in zip(plan.scaled, picture, strict=True))
    assert 1 <= plan.width <= min(box[0], 16383)
    assert 1 <= plan.height <= min(box[1], 16383)
    if fit is Fit.COVER:
        assert plan.scaled[0] >= plan.width
        assert plan.scaled[1] >= plan.height
    if fit is Fit.CONTAIN:
        assert (plan.width, plan.height) == (min(box[0], 16383), min(box[1], 16383))


async def test_one_decode_serves_many_outputs(studio: Studio) -> None:
    data = media.turned((800, 600), 1, "JPEG", quality=95)
    widths = (320, 640, 1280, 160)
    wanted = [{"format": f, "width": w} for w in widths for f in ("jpeg", "webp")]
    answer, made = await studio.make(data, *wanted)
    for output, told, plan in zip(made, answer["outputs"], wanted, strict=True):
        image = opened(output)
        assert image.size == (told["width"], told["height"])
        assert image.width == min(int(str(plan["width"])), 800)
        assert told["seconds"] >= 0
        shows_corners(image)


async def test_outputs_are_cut_and_laid_out(studio: Studio) -> None:
    data = save(media.corners((300, 200)), "PNG")
    cover = await studio.one(data, "png", width=100, height=100, fit="cover")
    assert cover.size == (100, 100)
    shows_corners(cover)
    contain = await studio.one(
        data, "png", width=100, height=100, fit="contain", background="#000000"
    )
    assert contain.size == (100, 100)
    assert near(spot(contain, 0.5, 0.06), (0, 0, 0), 3)
    assert near(spot(contain, 0.2, 0.3), RED, 5)


@pytest.mark.parametrize(
    "output",
    [
        {"format": "bmp"},
        {"format": "jpeg", "width": 0},
        {"format": "jpeg", "quality": 101},
        {"format": "jpeg", "background": "white"},
        {"format": "jpeg", "fit": "stretch"},
        {"format": "jpeg", "fd_index": 7},
        {"format": "jpeg", "fd_index": 0},
        {"width": 10},
    ],
)
async def test_an_output_that_makes_no_sense_is_named_as_such(
    studio: Studio, output: dict[str, Any]
) -> None:
    with pytest.raises(Failure) as caught:
        await studio.make(SAMPLES["jpeg"], output)
    assert caught.value.code is Code.INVALID_REQUEST


# --- One process, many pictures


async def test_a_reused_place_never_shows_the_picture_before(studio: Studio) -> None:
    before = (await studio.pool.request({"op": "hello"}, (), wall_seconds=5))["open_fds"]
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target:
        for number in range(20):
            color = (RED, BLUE)[number % 2]
            source.seek(0)
            source.truncate()
            source.write(save(media.flat((64, 64), color), "PNG"))
            source.flush()
            output = {"fd_index": 1, "format": "png"}
            await studio.pool.request(
                {"op": "make", "outputs": [output]},
                [source.fileno(), target.fileno()],
                wall_seconds=5,
            )
            target.seek(0)
            assert near(spot(opened(target.read()), 0.5, 0.5), color, 2)
    after = (await studio.pool.request({"op": "hello"}, (), wall_seconds=5))["open_fds"]
    assert after == before


async def test_a_target_is_emptied_before_it_is_written(studio: Studio) -> None:
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target:
        source.write(SAMPLES["png"])
        source.flush()
        target.write(b"x" * 1_000_000)
        target.flush()
        output = {"fd_index": 1, "format": "webp", "width": 32}
        answer = await studio.pool.request(
            {"op": "make", "outputs": [output]},
            [source.fileno(), target.fileno()],
            wall_seconds=5,
        )
        assert os.fstat(target.fileno()).st_size == answer["outputs"][0]["bytes"] < 10_000


async def test_a_child_stays_the_same_over_failures_and_successes(studio: Studio) -> None:
    await studio.inspect(SAMPLES["png"])
    pids = studio.pool.pids
    for data in (b"text", SAMPLES["png"][:200], SAMPLES["jpeg"][:-9], b""):
        await studio.failure(data)
    await studio.inspect(SAMPLES["png"])
    assert studio.pool.pids == pids


# --- The walk over the bytes, alone


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_a_walk_over_damaged_bytes_ends_in_a_failure_or_an_answer(
    name: str, data: st.DataObject
) -> None:
    whole = bytearray(SAMPLES[name])
    format = name.rsplit(maxsplit=1)[-1]
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, min(len(whole), 1500) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(16, len(whole)))
    try:
        seen = structure.read(format, bytes(whole[:end]))
    except Failure:
        return
    assert seen.frames >= 1
    assert seen.largest_pixels >= seen.width * seen.height or format in ("avif", "heic")

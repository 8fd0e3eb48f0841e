"""The image handler with the real image processes in the jail: bytes in, checked files out. Every
picture here is one that some pipeline got wrong; the right values are next to them."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from PIL import Image, ImageDraw
from tests import make_media as media
from tests.make_media import BLUE, CORNERS, GREEN, RED, RGB, save
from tests.test_imaging import clean, near, opened, shows_corners, spot

from mediamill import config, recipes, sandbox, tools
from mediamill.config import Settings
from mediamill.failures import Code, Failure
from mediamill.handlers import Child, Done, Kept, Outcome, Output, Reroute, image
from mediamill.image_children import confined_pool
from mediamill.image_pool import ImagePool
from mediamill.imaging import likeness
from mediamill.jobs import Claim
from mediamill.media import Description, Original
from mediamill.recipes import Recipe
from mediamill.sandbox import Jail
from mediamill.sidecars import Sidecar
from mediamill.tools import Command, Finished

pytestmark = pytest.mark.anyio

DATA = Path(__file__).parent.parent / "data"
WHITE: RGB = (255, 255, 255)
EVERY_FORMAT: dict[str, Any] = {
    "widths": [16384],
    "formats": [
        {"format": "jpeg", "quality": 90},
        {"format": "webp", "quality": 90},
        {"format": "avif", "quality": 80, "effort": 0},
        {"format": "png"},
    ],
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Desk:
    """A `Work` that keeps what it is told, in order."""

    claim: Claim
    original: Original
    recipe: Recipe
    settings: Settings
    out: Path
    source: Path
    pool: ImagePool
    told: list[tuple[str, Any]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)

    async def enter(self, stage: str) -> None:
        self.told.append(("stage", stage))

    def progress(self, percent: float, detail: Mapping[str, Any] | None = None) -> None:
        self.told.append(("progress", percent))

    async def fetch(self) -> Path:
        return self.source

    async def describe(self, found: Description) -> None:
        self.told.append(("description", found))

    async def show_preview(self, preview: Mapping[str, Any], found: Description) -> None:
        self.told.append(("preview", dict(preview)))

    async def publish_early(self, outputs: Sequence[Output]) -> bool:
        raise AssertionError("a picture is published once")

    async def children(self) -> list[Child]:
        return []

    async def sidecars(self) -> list[Sidecar]:
        return []

    async def slots(self, queue: str) -> int:
        return 1

    async def keep(self, path: Path) -> Kept:
        raise AssertionError("it has no parent")

    async def bring(self, kept: Kept, name: str) -> Path:
        raise AssertionError("it has no children")

    async def run_tool(self, command: Command, jail: Jail, **_: Any) -> Finished:
        raise AssertionError(f"no tool is needed for a picture: {command}")

    async def imaging(
        self, request: Mapping[str, Any], fds: Sequence[int], *, wall_seconds: float
    ) -> dict[str, Any]:
        self.requests.append(dict(request))
        self.told.append(("op", request["op"]))
        return await self.pool.request(
            request, fds, wall_seconds=wall_seconds, tenant=self.claim.tenant_id
        )

    def last(self, name: str) -> Any:
        return next(value for kind, value in reversed(self.told) if kind == name)


@dataclass
class Result:
    """What came of one picture."""

    desk: Desk
    outcome: Outcome
    files: dict[str, bytes]

    @property
    def description(self) -> Description:
        found = self.desk.last("description")
        assert isinstance(found, Description)
        return found

    @property
    def size(self) -> tuple[int | None, int | None]:
        return self.description.width, self.description.height

    @property
    def info(self) -> dict[str, Any]:
        return self.description.info or {}

    @property
    def preview(self) -> dict[str, Any]:
        shown: dict[str, Any] = self.desk.last("preview")
        return shown

    @property
    def result(self) -> Mapping[str, Any]:
        assert isinstance(self.outcome, Done)
        return self.outcome.result

    def opened(self, name: str) -> Image.Image:
        return opened(self.files[name])

    def every(self) -> list[Image.Image]:
        return [opened(data) for data in self.files.values()]


class Bench:
    """Handles pictures one after the other, each in a folder of its own."""

    def __init__(self, pool: ImagePool, folder: Path, settings: Settings) -> None:
        self._pool = pool
        self._folder = folder
        self.settings = settings

    async def handle(
        self,
        data: bytes,
        wanted: dict[str, Any] | None = None,
        *,
        kind: str | None = "image",
        metadata: dict[str, Any] | None = None,
        tenant: str = "acme",
        **settings: Any,
    ) -> Result:
        folder = self._folder / uuid4().hex
        (folder / "out").mkdir(parents=True)
        source = folder / "original"
        source.write_bytes(data)
        recipe = Recipe.model_validate_json(
            json.dumps({"name": "test", "version": 1, "image": wanted or EVERY_FORMAT})
        )
        desk = Desk(
            claim=_claim(tenant),
            original=_original(len(data), kind, metadata or {}),
            recipe=recipe,
            settings=self.settings.model_copy(update=settings),
            out=folder / "out",
            source=source,
            pool=self._pool,
        )
        outcome = await image.handle(desk)
        files = {}
        if isinstance(outcome, Done):
            files = {output.name: output.path.read_bytes() for output in outcome.outputs}
        return Result(desk, outcome, files)

    async def failure(
        self, data: bytes, wanted: dict[str, Any] | None = None, **more: Any
    ) -> Failure:
        with pytest.raises(Failure) as caught:
            await self.handle(data, wanted, **more)
        return caught.value


def _claim(tenant: str) -> Claim:
    values = {"tenant_id": tenant, "id": uuid4(), "media_id": uuid4(), "kind": "image"}
    return Claim(**{name: values.get(name) for name in Claim.__dataclass_fields__})  # type: ignore[arg-type]


def _original(size: int, kind: str | None, metadata: dict[str, Any]) -> Original:
    return Original(
        id=uuid4(),
        kind=kind,
        filename=None,
        content_type="application/octet-stream",
        size=size,
        sha256=None,
        upload_key="uploads/test",
        object_version="1",
        detected_type=None,
        recipe="test",
        recipe_version=1,
        generation=1,
        preview=None,
        deleted_at=None,
        state="processing",
        metadata=metadata,
    )


@pytest.fixture(scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder = tmp_path_factory.mktemp("handled")
    settings = config.load(data_dir=folder / "data")
    groups = tools.ProcessGroups()
    toolbox = tools.resolve(None, None)
    confined = sandbox.detect()
    async with confined_pool(settings, toolbox, confined, groups, size=1, max_jobs=100_000) as pool:
        yield Bench(pool, folder, settings)
    groups.kill_all()


# --- Orientation


@pytest.mark.parametrize(
    ("format", "size", "number"),
    [
        ("JPEG", (240, 320), 6),
        ("PNG", (140, 200), 8),
        ("JPEG", (360, 200), 3),
        ("TIFF", (90, 60), 5),
    ],
)
async def test_a_picture_is_turned_once_and_says_no_more_about_it(
    bench: Bench, format: str, size: tuple[int, int], number: int
) -> None:
    options = {"quality": 95} if format == "JPEG" else {}
    done = await bench.handle(media.turned(size, number, format, **options))
    assert done.size == size
    assert done.info["orientation"] == number
    for shown in done.every():
        assert shown.size == size
        shows_corners(shown)
        clean(shown)
    # Fed in again it stays as it is.
    again = await bench.handle(done.files[f"w{size[0]}.png"])
    shows_corners(again.opened(f"w{size[0]}.jpg"))


async def test_a_heic_that_says_turn_twice_is_turned_once(bench: Bench) -> None:
    done = await bench.handle((DATA / "turned-in-container-and-exif.heic").read_bytes())
    assert (done.description.detected_type, done.size) == ("image/heic", (240, 320))
    for shown in done.every():
        shows_corners(shown, (GREEN, RED, CORNERS[3], BLUE))


# --- Color


def _cmyk() -> bytes:
    ink = Image.new("CMYK", (240, 160), (0, 0, 0, 0))
    ImageDraw.Draw(ink).rectangle((120, 0, 240, 160), fill=(0, 255, 255, 0))
    return save(ink, "JPEG", quality=95)


COLORS: dict[str, tuple[bytes, list[tuple[float, RGB, float]]]] = {
    "ink stored upside down": (_cmyk(), [(0.2, WHITE, 12), (0.8, (240, 20, 25), 45)]),
    "Display P3": (
        save(
            media.flat((200, 200), (200, 90, 60)),
            "JPEG",
            quality=97,
            icc_profile=media.p3_profile(),
        ),
        [(0.5, (217, 80, 45), 8)],
    ),
    "Adobe RGB": (
        save(media.flat((200, 200), (150, 160, 70)), "PNG", icc_profile=media.adobe_rgb_profile()),
        [(0.5, (147, 161, 60), 8)],
    ),
    "gray in 16 bits": (
        media.gray_bands_16((8192, 32768, 57344), (300, 90)),
        [(0.16, (32, 32, 32), 6), (0.5, (128, 128, 128), 6), (0.84, (224, 224, 224), 6)],
    ),
    "a profile for ink": (
        save(
            media.flat((160, 160), (240, 140, 20)),
            "JPEG",
            quality=95,
            icc_profile=media.foreign_profile(),
        ),
        [(0.5, (240, 140, 20), 10)],
    ),
    "a profile with a wrong checksum": (
        media.png_with_damaged_profile((40, 200, 210)),
        [(0.5, (40, 200, 210), 6)],
    ),
    "a brightness of 203 candela": (
        (DATA / "pq-patches.avif").read_bytes(),
        [(0.125, (208, 208, 208), 38), (0.875, (15, 15, 15), 15)],
    ),
}


@pytest.mark.parametrize("name", COLORS)
async def test_colors_look_as_they_should(bench: Bench, name: str) -> None:
    data, spots = COLORS[name]
    done = await bench.handle(data)
    assert len(done.files) == 4
    for shown in done.every():
        clean(shown)
        assert shown.mode == "RGB"
        for x, color, tolerance in spots:
            assert near(spot(shown, x, 0.5), color, tolerance)


async def test_an_unusable_profile_is_told(bench: Bench) -> None:
    done = await bench.handle(COLORS["a profile for ink"][0])
    assert any("profile" in warning for warning in done.result["warnings"])


# --- Transparency


async def test_clear_parts_are_kept_or_laid_on_the_ground_that_was_named(bench: Bench) -> None:
    data = save(media.clear_ground_with_square((200, 200), (60, 60, 140, 140)), "PNG")
    for background, ground in (("#ffffff", WHITE), ("#1eb43c", GREEN)):
        done = await bench.handle(data, {**EVERY_FORMAT, "background": background})
        assert done.info["has_alpha"]
        assert near(spot(done.opened("w200.jpg"), 0.1, 0.1), ground, 8)
        for name in ("w200.webp", "w200.avif", "w200.png"):
            assert spot(done.opened(name), 0.1, 0.1, "RGBA")[3] == 0
            assert near(spot(done.opened(name), 0.5, 0.5, "RGBA"), (*RED, 255), 20)
        # Over white, whatever ground the recipe names: a BlurHash knows no transparency.
        assert done.preview["average_color"] not in ("#000000", "#0b0b0b")


async def test_gray_with_transparency_has_every_format(bench: Bench) -> None:
    gray = Image.new("LA", (150, 100), (0, 0))
    ImageDraw.Draw(gray).rectangle((50, 30, 100, 70), fill=(100, 255))
    done = await bench.handle(save(gray, "PNG"))
    assert near(spot(done.opened("w150.jpg"), 0.05, 0.1), WHITE, 8)
    assert near(spot(done.opened("w150.jpg"), 0.5, 0.5), (100,) * 3, 10)


async def test_the_placeholder_of_a_clear_picture_is_seen_over_white(bench: Bench) -> None:
    data = save(media.clear_ground_with_square((100, 80), (25, 20, 74, 59)), "PNG")
    shown = (await bench.handle(data)).preview
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz#$%*+,-.:;=?@[]^_{|}~"
    mean = 0
    for letter in shown["blurhash"][2:6]:
        mean = mean * 83 + digits.index(letter)
    assert near((mean >> 16, mean >> 8 & 255, mean & 255), (247, 225, 225), 10)
    assert shown["dominant_color"] == "#dc1e1e"


# --- Files that are not what they seem


async def test_a_heic_named_as_a_jpeg_is_a_heic(bench: Bench) -> None:
    done = await bench.handle((DATA / "plain.heic").read_bytes())
    assert done.description.detected_type == "image/heic"
    assert done.size == (128, 96)
    for shown in done.every():
        assert near(spot(shown, 0.5, 0.5), (200, 40, 190), 30)


async def test_the_first_picture_of_several_is_the_picture(bench: Bench) -> None:
    done = await bench.handle(media.two_pictures())
    assert (done.description.detected_type, done.size) == ("image/jpeg", (200, 150))
    assert (done.info["animated"], done.info["frames"]) == (False, 1)
    assert near(spot(done.opened("w200.jpg"), 0.5, 0.5), BLUE, 20)
    assert done.files["w200.jpg"].count(b"\xff\xd8\xff") == 1


async def test_a_side_beyond_what_a_format_takes_is_still_ready(bench: Bench) -> None:
    tall = Image.new("RGB", (60, 17_000), RED)
    ImageDraw.Draw(tall).rectangle((0, 8500, 60, 17_000), fill=BLUE)
    web = json.loads((Path(recipes.__file__).parent / "web.v1.json").read_text())["image"]
    done = await bench.handle(save(tall, "PNG"), web)
    assert done.size == (60, 17_000)
    sizes = {name: done.opened(name).size for name in done.files}
    assert sizes["w60.jpg"] == (60, 17_000)
    for name in ("w60.webp", "w60.avif"):
        width, height = sizes[name]
        assert max(width, height) <= 16_384
        assert abs(width / height / (60 / 17_000) - 1) <= 0.02
        assert near(spot(done.opened(name), 0.5, 0.2), RED, 20)
    assert any("limit on its sides" in warning for warning in done.result["warnings"])


_SVG = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 200">%s</svg>'
REFUSED: dict[str, tuple[bytes, set[Code]]] = {
    "cut off": (
        save(media.texture((640, 480)), "JPEG", quality=90)[:30_000],
        {Code.TRUNCATED_INPUT},
    ),
    "head ruined": (
        bytes((0, 1, 1, 0)) * 16 + save(media.texture((120, 90)), "JPEG")[64:],
        {Code.CORRUPT_INPUT, Code.UNSUPPORTED_FORMAT},
    ),
    "a drawing": (_SVG % b"<rect width='9'/>", {Code.UNSUPPORTED_FORMAT}),
    "a drawing that reaches out": (_SVG % b'<image href="canary.png"/>', {Code.UNSAFE_CONTENT}),
    "a playlist": (b"#EXTM3U\n#EXTINF:1,\ncanary.ts\n", {Code.UNSAFE_CONTENT}),
    "the first bytes of a PNG, then a page": (
        b"\x89PNG\r\n\x1a\n\0\0\0\r<html><body onload=alert(1)></body></html>",
        {Code.CORRUPT_INPUT, Code.UNSUPPORTED_FORMAT},
    ),
    "JPEG XL": (b"\xff\x0a" + bytes(60), {Code.UNSUPPORTED_FORMAT}),
    "JPEG 2000": (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(60), {Code.UNSUPPORTED_FORMAT}),
    "PDF": (b"%PDF-1.7\n" + bytes(60), {Code.UNSUPPORTED_FORMAT}),
    "a claim of 64250 × 64250": (
        media.resized_header(save(media.texture((64, 64)), "JPEG"), (64_250, 64_250)),
        {Code.RESOURCE_LIMIT},
    ),
    "a billion pixels in one bit each": (
        media.png((32_000, 32_000), [bytes(4000)], depth=1, kind=0),
        {Code.RESOURCE_LIMIT},
    ),
    "2000 frames of 3000 × 3000": (media.gif_of_dots((3000, 3000), 2000), {Code.RESOURCE_LIMIT}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_a_picture_is_refused_with_its_reason(bench: Bench, name: str) -> None:
    data, codes = REFUSED[name]
    failure = await bench.failure(data)
    assert failure.code in codes
    assert not failure.code.retryable
    assert failure.problem.detail or failure.code.title
    # A good one behind it is done as usual.
    good = await bench.handle(media.turned((60, 40), 1, "JPEG", quality=95))
    shows_corners(good.opened("w60.png"))


async def test_a_usual_phone_picture_is_no_bomb(bench: Bench) -> None:
    small = {"widths": [320], "formats": [{"format": "jpeg"}]}
    done = await bench.handle(media.soft_gradient((6824, 5120)), small)
    assert done.size == (6824, 5120)
    assert done.opened("w320.jpg").size == (320, 240)
    assert 6 <= len(done.preview["blurhash"]) <= 4 + 2 * 81


async def test_script_in_a_comment_does_not_reach_an_output(bench: Bench) -> None:
    script = b"<script>alert(1)</script>"
    done = await bench.handle(save(media.flat((40, 30), BLUE), "GIF", comment=script))
    assert done.description.detected_type == "image/gif"
    assert not any(b"script" in data for data in done.files.values())


async def test_a_film_that_was_announced_as_a_picture_is_sent_on(bench: Bench) -> None:
    film = b"\0\0\0\x18ftypisom\0\0\0\0isommp42" + bytes(100)
    done = await bench.handle(film)
    assert isinstance(done.outcome, Reroute)
    assert done.outcome.queue == "video"


# --- Animation

MOVING = {"widths": [80], "formats": [{"format": "webp", "quality": 90}, {"format": "jpeg"}]}


async def _frames(data: bytes) -> list[tuple[float, Image.Image]]:
    moving = Image.open(io.BytesIO(data))
    found = []
    for number in range(getattr(moving, "n_frames", 1)):
        moving.seek(number)
        moving.load()
        found.append((moving.info.get("duration", 0), moving.convert("RGB")))
    return found


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "AVIF"])
async def test_an_animation_is_kept_or_its_first_frame_is_by_recipe(
    bench: Bench, format: str
) -> None:
    data = media.frames(format, (RED, GREEN, BLUE), (100, 300, 200))
    done = await bench.handle(data, {**MOVING, "animation": "keep"})
    assert (done.info["animated"], done.info["frames"]) == (True, 3)
    assert done.info["duration_ms"] == 600
    frames = await _frames(done.files["w80.webp"])
    assert [delay for delay, _ in frames] == [100, 300, 200]
    for (_, shown), color in zip(frames, (RED, GREEN, BLUE), strict=True):
        assert near(spot(shown, 0.5, 0.5), color, 15)
    assert isinstance(done.outcome, Done)
    assert [o.duration_seconds for o in done.outcome.outputs] == [0.6, None]
    assert near(spot(done.opened("w80.jpg"), 0.5, 0.5), RED, 15)

    still = await bench.handle(data, MOVING)
    assert len(await _frames(still.files["w80.webp"])) == 1
    assert "Only the first of 3 frames is shown." in still.result["warnings"]


async def test_frames_that_hold_only_changes_are_put_together(bench: Bench) -> None:
    lossless = {"widths": [80], "formats": [{"format": "webp", "lossless": True}]}
    done = await bench.handle(media.gif_of_changes(), {**lossless, "animation": "keep"})
    frames = await _frames(done.files["w80.webp"])
    for frame, at, color in (
        (1, (70, 50), BLUE),
        (1, (20, 20), RED),
        (2, (20, 20), RED),
        (2, (50, 20), BLUE),
        (2, (40, 10), GREEN),
    ):
        found = frames[frame][1].getpixel(at)
        assert isinstance(found, tuple)
        assert near(found, color, 30)


async def test_equal_frames_may_merge_and_their_time_stays(bench: Bench) -> None:
    data = media.frames("GIF", (RED, RED, BLUE, GREEN, GREEN, GREEN), [100] * 6)
    done = await bench.handle(data, {**MOVING, "animation": "keep"})
    frames = await _frames(done.files["w80.webp"])
    assert sum(delay for delay, _ in frames) == done.info["duration_ms"] == 600


async def test_every_frame_is_cut_at_the_same_place_and_marked(bench: Bench) -> None:
    images = []
    for number in range(3):
        frame = media.flat((300, 100), (20, 20, 20))
        left = 200 if number == 0 else 20 * number
        ImageDraw.Draw(frame).rectangle((left, 20, left + 60, 80), fill=RED)
        frame.putpixel((220 + number, 5), WHITE)  # so that no encoder merges them as equal
        images.append(frame)
    data = save(images[0], "GIF", save_all=True, append_images=images[1:], duration=100, loop=0)
    wanted = {
        "outputs": [{"name": "tile", "width": 100, "height": 100, "fit": "cover"}],
        "formats": [{"format": "webp", "lossless": True}],
        "crop": "attention",
        "animation": "keep",
    }
    frames = await _frames((await bench.handle(data, wanted)).files["tile.webp"])
    assert [shown.size for _, shown in frames] == [(100, 100)] * 3
    # The first frame says where to cut; the square of the others lies outside.
    assert near(spot(frames[0][1], 0.5, 0.5), RED, 40)
    assert all(not near(spot(shown, 0.5, 0.5), RED, 90) for _, shown in frames[1:])


# --- What is written beside the pixels


async def test_place_camera_comment_and_old_thumbnail_are_gone(bench: Bench) -> None:
    done = await bench.handle(media.jpeg_with_everything())
    for name, data in done.files.items():
        clean(opened(data))
        assert near(spot(opened(data), 0.5, 0.5), BLUE, 20)
        for word in (b"Exif", b"Example", b"GPS", b"8BIM", b"window", b"http://"):
            assert word not in data, name
    told = json.dumps([done.info, done.preview, dict(done.result)])
    assert "Example" not in told
    assert "1,0N" not in told


async def test_a_place_goes_while_orientation_and_color_stay_right(bench: Bench) -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "Example"
    exif.get_ifd(0x8825).update({1: "N", 2: (1.0, 0.0, 0.0), 3: "E", 4: (2.0, 0.0, 0.0)})
    photo = media.flat((160, 120), (200, 90, 60))
    data = save(photo, "JPEG", quality=95, exif=exif, icc_profile=media.p3_profile())
    done = await bench.handle(data)
    assert done.size == (120, 160)
    assert len(done.files) == 4
    for shown in done.every():
        clean(shown)
        assert shown.size == (120, 160)
        assert near(spot(shown, 0.5, 0.5), (217, 80, 45), 8)
    assert "GPS" not in json.dumps(done.info)


def _with_notice() -> bytes:
    exif = Image.Exif()
    copyright, author = ("© Åse Ærlig 2026".encode(), "Åse & <Co>".encode())
    # Pillow writes ASCII only, cameras write UTF-8: letters of the same length stand in for it.
    exif[0x010F], exif[0x8298], exif[0x013B] = "Example", "c" * len(copyright), "a" * len(author)
    exif.get_ifd(0x8825).update({1: "N", 2: (1.0, 0.0, 0.0), 3: "E", 4: (2.0, 0.0, 0.0)})
    data = exif.tobytes().replace(b"c" * len(copyright), copyright)
    data = data.replace(b"a" * len(author), author)
    return save(media.texture((160, 120)), "JPEG", exif=data, quality=90)


async def test_copyright_and_author_stay_where_the_recipe_says_so_and_nothing_else(
    bench: Bench,
) -> None:
    data = _with_notice()
    done = await bench.handle(data, {**EVERY_FORMAT, "keep_copyright": True})
    for file in done.files.values():
        shown = opened(file)
        xmp = shown.info["xmp"].decode()
        assert "© Åse Ærlig 2026" in xmp
        assert "Åse &amp; &lt;Co&gt;" in xmp
        assert not shown.getexif()
        assert b"GPS" not in file
        assert b"Example" not in file
    for file in (await bench.handle(data)).files.values():
        clean(opened(file))
    # From XMP where EXIF says nothing; also what we wrote ourselves.
    again = await bench.handle(done.files["w160.png"], {**EVERY_FORMAT, "keep_copyright": True})
    assert "© Åse Ærlig 2026" in again.opened("w160.avif").info["xmp"].decode()
    nothing = await bench.handle(
        save(media.flat((20, 20), RED), "PNG"), {**EVERY_FORMAT, "keep_copyright": True}
    )
    for shown in nothing.every():
        clean(shown)


@pytest.mark.extra
async def test_exiftool_finds_nothing_either(bench: Bench, tmp_path: Path) -> None:
    private = await bench.handle(media.jpeg_with_everything())
    noted = await bench.handle(_with_notice(), {**EVERY_FORMAT, "keep_copyright": True})
    for name, files in (("private", private.files), ("noted", noted.files)):
        for file, data in files.items():
            path = tmp_path / f"{name}-{file}"
            path.write_bytes(data)
            process = await asyncio.create_subprocess_exec(
                "exiftool", "-j", "-G1", "-a", "-u", str(path), stdout=asyncio.subprocess.PIPE
            )
            said, _ = await process.communicate()
            (tags,) = json.loads(said)
            allowed = ("System", "File", "ExifTool", "Composite", "JFIF", "PNG", "RIFF", "Meta")
            beside = {
                tag: value
                for tag, value in tags.items()
                if tag != "SourceFile"
                and not tag.startswith((*allowed, "QuickTime", "XMP-x:XMPToolkit"))
            }
            if name == "private":
                assert beside == {}, file
            else:
                assert beside == {
                    "XMP-dc:Rights": "© Åse Ærlig 2026",
                    "XMP-dc:Creator": "Åse & <Co>",
                }, file


# --- The placeholder comes first


async def test_the_preview_is_shown_before_anything_is_encoded(bench: Bench) -> None:
    done = await bench.handle(save(media.texture((640, 480)), "JPEG", quality=85))
    told = done.desk.told
    order = [value for kind, value in told if kind in ("stage", "op")]
    assert order.index("preview") < order.index("make")
    assert [kind for kind, _ in told].index("preview") < told.index(("op", "make"))
    shown = done.preview
    assert {"blurhash", "thumbhash", "dominant_color", "average_color"} <= shown.keys()
    assert len(shown["inline"]["data"]) * 3 // 4 <= 1024


# --- The recipe language


async def test_named_outputs_fit_as_they_are_told(bench: Bench) -> None:
    wanted = {
        "formats": [{"format": "png"}],
        "background": "#1eb43c",
        "outputs": [
            {"name": "inside", "width": 100, "height": 100},
            {"name": "cover", "width": 100, "height": 100, "fit": "cover"},
            {"name": "contain", "width": 100, "height": 100, "fit": "contain"},
            {"name": "wide", "width": 200, "formats": [{"format": "jpeg"}, {"format": "webp"}]},
            {"name": "tall", "height": 30},
            {"name": "whole"},
            {"name": "huge", "width": 4000, "height": 4000, "fit": "cover"},
        ],
    }
    done = await bench.handle(media.turned((400, 300), 1, "PNG"), wanted)
    sizes = {name: done.opened(name).size for name in done.files}
    assert sizes == {
        "inside.png": (100, 75),
        "cover.png": (100, 100),
        "contain.png": (100, 100),
        "wide.jpg": (200, 150),
        "wide.webp": (200, 150),
        "tall.png": (40, 30),
        "whole.png": (400, 300),
        "huge.png": (300, 300),  # never enlarged
    }
    assert near(spot(done.opened("contain.png"), 0.5, 0.05), GREEN, 2)
    shows_corners(done.opened("cover.png"))


async def test_a_grid_of_heights_and_widths_is_never_enlarged(bench: Bench) -> None:
    wanted = {"heights": [50, 900], "widths": [77, 5000], "formats": [{"format": "webp"}]}
    done = await bench.handle(save(media.texture((1000, 667)), "JPEG"), wanted)
    assert {name: done.opened(name).size for name in done.files} == {
        "w77.webp": (77, 51),
        "w1000.webp": (1000, 667),
        "h50.webp": (75, 50),
        "h667.webp": (1000, 667),
    }


@pytest.mark.parametrize("width", range(303, 323))
async def test_a_width_is_exactly_the_one_in_its_name(bench: Bench, width: int) -> None:
    wanted = {"widths": [width], "formats": [{"format": "webp", "effort": 0}]}
    done = await bench.handle(save(media.flat((1000, 667), RED), "PNG"), wanted)
    assert done.opened(f"w{width}.webp").width == width


def _eye_catcher() -> bytes:
    """A dull ground with something bright far right."""
    picture = media.flat((600, 200), (90, 95, 90))
    ImageDraw.Draw(picture).ellipse((450, 50, 550, 150), fill=RED)
    return save(picture, "PNG")


async def test_what_draws_the_eye_is_kept(bench: Bench) -> None:
    tile = {"name": "tile", "width": 100, "height": 100, "fit": "cover"}
    wanted = {"formats": [{"format": "png"}], "outputs": [tile], "crop": "attention"}
    found = (await bench.handle(_eye_catcher(), wanted)).opened("tile.png")
    assert near(spot(found, 0.5, 0.5), RED, 30)
    middle = await bench.handle(_eye_catcher(), {**wanted, "crop": "center"})
    assert near(spot(middle.opened("tile.png"), 0.5, 0.5), (90, 95, 90), 3)


async def test_a_focal_point_goes_before_attention_and_the_medias_before_the_recipes(
    bench: Bench,
) -> None:
    tile = {"name": "tile", "width": 50, "height": 50, "fit": "cover"}
    wanted = {
        "formats": [{"format": "png"}],
        "outputs": [tile],
        "crop": "attention",
        "focal_point": {"x": 0.1, "y": 0.5},
    }
    picture = media.flat((600, 200), GREEN)
    ImageDraw.Draw(picture).rectangle((200, 0, 399, 199), fill=RED)
    ImageDraw.Draw(picture).rectangle((400, 0, 599, 199), fill=BLUE)
    data = save(picture, "PNG")
    for metadata, color in (
        ({}, GREEN),
        ({"focal_point": "0.5,0.5"}, RED),
        ({"focal_point": "0.99,0"}, BLUE),
        ({"focal_point": "nonsense"}, GREEN),
    ):
        done = await bench.handle(data, wanted, metadata=metadata)
        assert near(spot(done.opened("tile.png"), 0.5, 0.5), color, 3)


async def test_a_focal_point_is_of_the_picture_as_it_is_shown(bench: Bench) -> None:
    tile = {"name": "tile", "width": 40, "height": 40, "fit": "cover"}
    wanted = {"formats": [{"format": "png"}], "outputs": [tile]}
    data = media.turned((120, 360), 6, "JPEG", quality=95)
    done = await bench.handle(data, wanted, metadata={"focal_point": "0.5,0.95"})
    shown = done.opened("tile.png")
    assert near(spot(shown, 0.2, 0.5), BLUE, 25)
    assert near(spot(shown, 0.8, 0.5), CORNERS[3], 25)


async def test_sharpening_raises_edges(bench: Bench) -> None:
    data = save(media.texture((800, 600)), "JPEG", quality=95)
    wanted: dict[str, Any] = {"widths": [400], "formats": [{"format": "png"}]}
    plain = (await bench.handle(data, wanted)).opened("w400.png").convert("L")
    sharp = (await bench.handle(data, {**wanted, "sharpen": 1.0})).opened("w400.png").convert("L")

    def edges(shown: Image.Image) -> float:
        values = shown.tobytes()
        pairs = itertools.pairwise(values)
        return sum(abs(a - b) for a, b in pairs) / len(values)

    assert edges(sharp) > edges(plain) * 1.03


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An operator's recipe folder with a watermark: half of it is clear."""
    logo = Image.new("RGBA", (200, 100), (0, 0, 0, 0))
    ImageDraw.Draw(logo).rectangle((0, 0, 99, 99), fill=(*RED, 255))
    (tmp_path / "logo.png").write_bytes(save(logo, "PNG"))
    return tmp_path


async def test_a_watermark_stands_where_it_is_told(bench: Bench, folder: Path) -> None:
    mark = {"image": "logo.png", "scale": 0.5, "margin": 0.1, "position": "top-left"}
    wanted = {
        "widths": [400],
        "formats": [{"format": "png"}, {"format": "jpeg", "quality": 95}],
        "watermark": mark,
        "outputs": [
            {"name": "low", "width": 100, "watermark": {**mark, "position": "bottom-right"}},
            {"name": "faint", "width": 400, "watermark": {**mark, "opacity": 0.5}},
            {"name": "bare", "width": 100, "watermark": None},
        ],
    }
    data = save(media.flat((400, 400), WHITE), "PNG")
    done = await bench.handle(data, wanted, recipes_dir=folder)
    for name in ("w400.png", "w400.jpg"):
        shown = done.opened(name)
        assert near(spot(shown, 0.2, 0.2), RED, 12)
        assert near(spot(shown, 0.45, 0.2), WHITE, 4)  # its clear half
        assert near(spot(shown, 0.05, 0.2), WHITE, 4)  # the margin
        assert near(spot(shown, 0.8, 0.8), WHITE, 4)
    assert near(spot(done.opened("low.png"), 0.5, 0.8), RED, 12)
    assert near(spot(done.opened("faint.png"), 0.2, 0.2), (238, 143, 143), 6)
    assert near(spot(done.opened("bare.png"), 0.2, 0.2), WHITE, 4)


async def test_a_watermark_lies_on_transparency_without_filling_it(
    bench: Bench, folder: Path
) -> None:
    wanted = {
        "widths": [300],
        "formats": [{"format": "png"}],
        "watermark": {"image": "logo.png", "position": "center", "scale": 0.5},
    }
    data = save(Image.new("RGBA", (300, 300), (0, 0, 0, 0)), "PNG")
    shown = (await bench.handle(data, wanted, recipes_dir=folder)).opened("w300.png")
    assert near(spot(shown, 0.4, 0.5, "RGBA"), (*RED, 255), 3)
    assert spot(shown, 0.1, 0.1, "RGBA")[3] == 0


async def test_a_watermark_that_is_gone_is_named(bench: Bench, folder: Path) -> None:
    wanted = {
        "widths": [300],
        "formats": [{"format": "png"}],
        "watermark": {"image": "other.png"},
    }
    failure = await bench.failure(
        save(media.flat((20, 20), RED), "PNG"), wanted, recipes_dir=folder
    )
    assert failure.code is Code.CAPABILITY_MISSING
    assert "other.png" in failure.problem.detail
    assert str(folder) not in failure.problem.detail


@pytest.mark.parametrize("format", ["jpeg", "webp", "avif"])
async def test_a_likeness_is_reached_by_the_smallest_quality_that_does(
    bench: Bench, format: str
) -> None:
    noise = Image.effect_noise((480, 360), 60).convert("RGB")
    data = save(Image.blend(media.texture((480, 360)), noise, 0.4), "PNG")
    sizes = []
    for target in (0.9, 0.97):
        style = {"format": format, "target_quality": target, "effort": 1}
        done = await bench.handle(data, {"widths": [240], "formats": [style]})
        ((name, found),) = done.result["searched"].items()
        assert found["likeness"] >= target
        assert found["encodes"] <= likeness.MAX_ENCODES
        sizes.append(len(done.files[name]))
        # One step less misses it: it is as small as it can be.
        lower = {"format": format, "quality": found["quality"] - 1, "effort": 1}
        less = await bench.handle(data, {"widths": [240], "formats": [lower]})
        assert len(less.files[name]) <= len(done.files[name])
        (reference,) = (
            await bench.handle(data, {"widths": [240], "formats": [{"format": "png"}]})
        ).files.values()
        assert _ssim(opened(reference), less.opened(name)) < target + 0.002
        assert _ssim(opened(reference), done.opened(name)) >= target - 0.002
    assert sizes[0] < sizes[1]


def _ssim(first: Image.Image, second: Image.Image) -> float:
    """The same measure by another route: plain sums over the Gaussian window, in Python."""
    import math

    a, b = (_luma(shown) for shown in (first, second))
    width, height = first.size
    window = [math.exp(-(d * d) / 4.5) for d in range(-5, 6)]
    window = [w / sum(window) for w in window]

    def blurred(values: list[float]) -> list[float]:
        rows = []
        for y in range(height):
            row = values[y * width : (y + 1) * width]
            row = [row[0]] * 5 + row + [row[-1]] * 5
            rows.append([sum(w * row[x + k] for k, w in enumerate(window)) for x in range(width)])
        rows = [rows[0]] * 5 + rows + [rows[-1]] * 5
        return [
            sum(w * rows[y + k][x] for k, w in enumerate(window))
            for y in range(height)
            for x in range(width)
        ]

    ma, mb = blurred(a), blurred(b)
    aa = blurred([x * x for x in a])
    bb = blurred([x * x for x in b])
    ab = blurred([x * y for x, y in zip(a, b, strict=True)])
    total = 0.0
    for m, n, p, q, r in zip(ma, mb, aa, bb, ab, strict=True):
        above = (2 * m * n + 6.5025) * (2 * (r - m * n) + 58.5225)
        total += above / ((m * m + n * n + 6.5025) * (p - m * m + q - n * n + 58.5225))
    return total / len(ma)


def _luma(shown: Image.Image) -> list[float]:
    data = shown.convert("RGB").tobytes()
    bands = zip(data[::3], data[1::3], data[2::3], strict=True)
    return [0.299 * r + 0.587 * g + 0.114 * b for r, g, b in bands]


async def test_lossless_and_progressive_are_what_they_say(bench: Bench) -> None:
    data = save(media.texture((200, 150)), "PNG")
    wanted = {
        "widths": [200],
        "formats": [
            {"format": "webp", "lossless": True},
            {"format": "png", "progressive": True},
            {"format": "jpeg", "progressive": True},
        ],
    }
    done = await bench.handle(data, wanted)
    original = opened(data).convert("RGB").tobytes()
    for name in ("w200.webp", "w200.png"):
        assert done.opened(name).convert("RGB").tobytes() == original
    assert done.opened("w200.jpg").info.get("progressive")
    assert done.opened("w200.png").info.get("interlace")


async def test_the_avatar_recipe_gives_squares(bench: Bench) -> None:
    avatar = json.loads((Path(recipes.__file__).parent / "avatar.v1.json").read_text())["image"]
    done = await bench.handle(save(media.texture((900, 600)), "JPEG", quality=90), avatar)
    sizes = {name: done.opened(name).size for name in done.files}
    assert sizes == {
        f"{name}.{ending}": (side, side)
        for name, side in (("small", 64), ("medium", 160), ("large", 512))
        for ending in ("webp", "jpg")
    }


# --- Limits


async def test_recipe_and_tenant_lower_limits_and_never_raise_them(bench: Bench) -> None:
    data = save(media.flat((400, 300), RED), "PNG")
    tenants = {"small": config.ImageLimits(max_pixels=100_000)}
    assert (await bench.handle(data, tenant_limits=tenants)).size == (400, 300)
    for more, limits, name, allowed in (
        ({"tenant": "small"}, {}, "max_pixels", 100_000),
        ({"tenant": "small"}, {"max_pixels": 50_000}, "max_pixels", 50_000),
        ({"tenant": "small"}, {"max_pixels": 10**9}, "max_pixels", 100_000),
        ({}, {"max_side": 399}, "max_side", 399),
        ({}, {"max_bytes": 100}, "max_bytes", 100),
        ({"max_pixels": 1000}, {"max_pixels": 10**9}, "max_pixels", 1000),
    ):
        wanted = {**EVERY_FORMAT, "limits": limits}
        failure = await bench.failure(data, wanted, tenant_limits=tenants, **more)
        assert failure.code is Code.RESOURCE_LIMIT
        assert failure.problem.limit is not None
        assert (failure.problem.limit["name"], failure.problem.limit["allowed"]) == (name, allowed)
        assert failure.problem.detail.count(".") >= 2  # what is wrong, and what would help


async def test_each_limit_has_its_name(bench: Bench) -> None:
    moving = media.frames("GIF", (RED, GREEN, BLUE), (100, 300, 200))
    laced = save(media.texture((300, 200)), "JPEG", progressive=True)
    for data, limits, name in (
        (moving, {"max_frames": 2}, "max_frames"),
        (moving, {"max_total_pixels": 10_000}, "max_total_pixels"),
        (laced, {"max_interlaced_pixels": 50_000}, "max_interlaced_pixels"),
    ):
        failure = await bench.failure(data, {**EVERY_FORMAT, "limits": limits})
        assert failure.code is Code.RESOURCE_LIMIT
        assert failure.problem.limit is not None
        assert failure.problem.limit["name"] == name
        assert failure.problem.limit["seen"] > failure.problem.limit["allowed"]


async def test_time_and_memory_are_limits_too(bench: Bench) -> None:
    large = media.soft_gradient((6000, 4000))
    wanted = {"widths": [4000], "formats": [{"format": "avif", "effort": 6}]}
    began = time.monotonic()
    failure = await bench.failure(large, {**wanted, "limits": {"max_seconds": 0.7}})
    assert failure.code is Code.TIME_LIMIT
    assert failure.problem.limit is not None
    assert failure.problem.limit["allowed"] == 0.7
    assert time.monotonic() - began < 20
    laced = save(opened(large), "JPEG", progressive=True, quality=60)
    tight = {"widths": [4000], "formats": [{"format": "png"}]}
    failure = await bench.failure(laced, {**tight, "limits": {"max_memory_bytes": 64 << 20}})
    assert failure.code is Code.MEMORY_LIMIT
    assert failure.problem.limit is not None
    assert failure.problem.limit["name"] == "max_memory_bytes"
    shows_corners((await bench.handle(media.turned((60, 40), 1, "PNG"))).opened("w60.png"))


# --- Drawings


async def test_a_drawing_is_drawn_as_large_as_it_is_needed(bench: Bench) -> None:
    half = b'<rect width="200" height="200" fill="#008080"/>'
    half += b'<rect x="200" width="200" height="200" fill="#ffffff"/>'
    wanted = {"widths": [100, 1000], "formats": [{"format": "png"}, {"format": "jpeg"}]}
    done = await bench.handle(_SVG % half, wanted, allow_svg=True)
    assert done.description.detected_type == "image/svg+xml"
    assert done.size == (400, 200)
    assert done.opened("w1000.png").size == (1000, 500)
    for shown in done.every():
        assert near(spot(shown, 0.25, 0.5), (0, 128, 128), 12)
        assert near(spot(shown, 0.75, 0.5), WHITE, 12)
    # The warm process that takes everybody's pictures has not learned to draw.
    failure = await bench.failure(_SVG % half, wanted)
    assert failure.code is Code.UNSUPPORTED_FORMAT


@pytest.mark.parametrize(
    "inside",
    [
        b'<image href="canary.png" width="9" height="9"/>',
        b'<image xlink:href="http://127.0.0.1:18999/x.png"/>',
        b"<style>@import url(http://127.0.0.1:18999/x.css);</style>",
        b"<style>rect{fill:url( 'http://127.0.0.1:18999/x' )}</style>",
        b"<script>alert(1)</script>",
        b'<rect onload="alert(1)" width="9" height="9"/>',
    ],
)
async def test_a_drawing_that_reaches_out_is_refused(bench: Bench, inside: bytes) -> None:
    failure = await bench.failure(_SVG % inside, allow_svg=True)
    assert failure.code is Code.UNSAFE_CONTENT


async def test_a_drawing_may_refer_to_its_own_parts(bench: Bench) -> None:
    inside = (
        b'<defs><linearGradient id="g"><stop stop-color="#dc1e1e"/></linearGradient></defs>'
        b'<rect width="400" height="200" fill="url(\'#g\')"/><use href="#g"/>'
    )
    done = await bench.handle(_SVG % inside, allow_svg=True)
    assert near(spot(done.opened("w4096.png"), 0.5, 0.5), RED, 4)


@pytest.mark.parametrize(
    ("data", "codes"),
    [
        (
            b'<svg xmlns="http://www.w3.org/2000/svg" width="200000" height="200000"/>',
            {Code.RESOURCE_LIMIT},
        ),
        (_SVG % (b"<!-- " + b"x" * (5 << 20) + b" -->"), {Code.RESOURCE_LIMIT}),
        (_SVG % b"<rect", {Code.CORRUPT_INPUT, Code.TRUNCATED_INPUT}),
    ],
    ids=["large", "long", "broken"],
)
async def test_a_drawing_has_limits(bench: Bench, data: bytes, codes: set[Code]) -> None:
    assert (await bench.failure(data, allow_svg=True)).code in codes


async def test_a_drawing_that_never_ends_is_stopped(bench: Bench) -> None:
    nested = b'<g id="a0"><rect width="9" height="9"/></g>' + b"".join(
        b'<g id="a%d">%s</g>' % (n, b'<use href="#a%d"/>' % (n - 1) * 10) for n in range(1, 12)
    )
    failure = await bench.failure(
        _SVG % nested, {**EVERY_FORMAT, "limits": {"max_seconds": 2.0}}, allow_svg=True
    )
    assert failure.code in (Code.TIME_LIMIT, Code.CORRUPT_INPUT, Code.RESOURCE_LIMIT)

"""What is wanted: recipes are data, named and versioned; a version never changes once shipped.

The built-in ones are the JSON files beside this module, `<name>.v<version>.json`; an operator's lie
in a folder of theirs under names of the same form. The models below are the language; `schema()` is
its JSON Schema; those of video and sound lie in video.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from mediamill.config import ConfigError, ImageLimits
from mediamill.recipes.fields import Name, Strict
from mediamill.recipes.video import AudioOutput, VideoOutput
from mediamill.sniff import HEAD_BYTES, sniff

T = TypeVar("T")


Side = Annotated[int, Field(ge=1, le=16384)]
Color = Annotated[str, Field(pattern=r"^#[0-9a-f]{6}$")]

MAX_IMAGE_FILES: Final = 48
MAX_WATERMARK_BYTES: Final = 4 << 20
_WATERMARK_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\.(png|webp|jpg|jpeg)$"
_WATERMARK_FORMATS: Final = ("png", "webp", "jpeg")


class ImageFormat(Strict):
    """One file format of an image output, and how well it is to look.

    Either `quality` (1 to 100, on the scale of the format's own encoder) or `target_quality`: the
    smallest file whose likeness to the picture (SSIM of the brightness, 1 is equal) is at least
    that. Without both: JPEG 80, WebP 75, AVIF 50.
    """

    format: Literal["avif", "webp", "jpeg", "png"]
    quality: int | None = Field(default=None, ge=1, le=100)
    target_quality: float | None = Field(default=None, ge=0.7, le=0.995)
    effort: int | None = Field(
        default=None,
        ge=0,
        le=9,
        description="Time for bytes: AVIF (3 if unset), WebP (4, at most 6), PNG (6).",
    )
    lossless: bool = Field(default=False, description="WebP and AVIF only; PNG always is.")
    progressive: bool = Field(default=False, description="JPEG and PNG only.")

    @field_validator("target_quality")
    @classmethod
    def _one_measure(cls, value: float | None, info: Any) -> float | None:
        if value is not None and info.data.get("quality") is not None:
            raise ValueError("give either quality or target_quality")
        if value is not None and info.data.get("format") == "png":
            raise ValueError("PNG is always lossless and has no target_quality")
        return value

    @field_validator("lossless")
    @classmethod
    def _can_be_lossless(cls, value: bool, info: Any) -> bool:
        if value and info.data.get("format") == "jpeg":
            raise ValueError("JPEG cannot be lossless; take webp, avif or png")
        for measure in ("quality", "target_quality"):
            if value and info.data.get(measure) is not None:
                raise ValueError(f"a lossless file has no {measure}")
        return value

    @field_validator("progressive")
    @classmethod
    def _can_be_progressive(cls, value: bool, info: Any) -> bool:
        if value and info.data.get("format") in ("webp", "avif"):
            raise ValueError("only jpeg and png can be progressive")
        return value


Formats = tuple[ImageFormat, ...]


class FocalPoint(Strict):
    """What must stay in the picture, as fractions of its shown width and height."""

    x: float = Field(ge=0, le=1)
    y: float = Field(ge=0, le=1)


class Watermark(Strict):
    """A picture of the operator's that is laid over an output. Never enlarged."""

    image: str = Field(
        pattern=_WATERMARK_NAME,
        description="A file in the operator's recipe folder.",
    )
    position: Literal[
        "top-left", "top", "top-right", "left", "center", "right", "bottom-left", "bottom",
        "bottom-right",
    ] = "bottom-right"  # fmt: skip
    opacity: float = Field(default=1.0, gt=0, le=1)
    scale: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="It fits into this share of the output's width and height.",
    )
    margin: float = Field(
        default=0.03, ge=0, le=0.4, description="As a share of the output's shorter side."
    )


Crop = Literal["center", "attention"]


class ImageOutput(Strict):
    """One named picture in one or more formats: `<name>.<ending of the format>`. What is left out
    is taken from the image part of the recipe. Never enlarged."""

    name: Name
    width: Side | None = None
    height: Side | None = None
    fit: Literal["inside", "cover", "contain"] = Field(
        default="inside",
        description="inside: as large as fits, nothing cut. cover: fills width and height, the "
        "rest is cut. contain: as inside, laid on a ground of exactly width and height.",
    )
    formats: Formats | None = Field(default=None, min_length=1, max_length=4)
    crop: Crop | None = None
    focal_point: FocalPoint | None = None
    background: Color | None = None
    sharpen: float | None = Field(default=None, ge=0, le=5)
    watermark: Watermark | None = Field(
        default=None, description="null takes away the one of the image part."
    )
    animation: Literal["first", "keep"] | None = None

    @field_validator("fit")
    @classmethod
    def _needs_a_box(cls, value: str, info: Any) -> str:
        sides = (info.data.get("width"), info.data.get("height"))
        if value != "inside" and None in sides:
            raise ValueError(f"{value} needs width and height")
        return value

    @field_validator("formats")
    @classmethod
    def _distinct(cls, value: Formats | None) -> Formats | None:
        return value and _each_once(value, [f.format for f in value], "formats")


class ImageOutputs(Strict):
    """The outputs of an image: a grid of widths (or heights) and formats, named outputs, or both.

    The grid gives `w320.avif`, `w320.jpg` …: never enlarged, sides above the source give its own.
    """

    widths: tuple[Side, ...] = Field(default=(), max_length=16)
    heights: tuple[Side, ...] = Field(default=(), max_length=16)
    formats: Formats = Field(
        default=(),
        max_length=4,
        description="Of the grid, and of every named output without its own.",
    )
    outputs: tuple[ImageOutput, ...] = Field(default=(), max_length=24)
    background: Color = Field(
        default="#ffffff",
        description="The ground under transparent parts in formats without transparency, and "
        "around a picture that is contained.",
    )
    crop: Crop = Field(
        default="center",
        description="What `cover` keeps. attention looks for the part that draws the eye; a focal "
        "point, here or with the media, goes before both.",
    )
    focal_point: FocalPoint | None = None
    sharpen: float = Field(
        default=0.0, ge=0, le=5, description="After resizing: the radius in pixels, 0 is none."
    )
    watermark: Watermark | None = None
    animation: Literal["first", "keep"] = Field(
        default="first", description="WebP keeps all frames; other formats show the first one."
    )
    keep_copyright: bool = Field(
        default=False,
        description="Write the copyright notice and the author of the original into the outputs. "
        "Everything else that is not pixels is always left out.",
    )
    limits: ImageLimits | None = Field(
        default=None, description="Lower limits than the operator's; higher ones have no effect."
    )

    @field_validator("widths", "heights")
    @classmethod
    def _sides_distinct(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return _each_once(value, value, "sides")

    @field_validator("formats")
    @classmethod
    def _formats_distinct(cls, value: Formats, info: Any) -> Formats:
        if not value and (info.data.get("widths") or info.data.get("heights")):
            raise ValueError("widths and heights need formats")
        return _each_once(value, [f.format for f in value], "formats")

    @field_validator("outputs")
    @classmethod
    def _names_distinct(cls, value: tuple[ImageOutput, ...], info: Any) -> tuple[ImageOutput, ...]:
        if info.data.get("formats") == () and any(o.formats is None for o in value):
            raise ValueError("outputs without formats need formats beside them")
        return _each_once(value, [o.name for o in value], "names of outputs")

    @model_validator(mode="after")
    def _something(self) -> ImageOutputs:
        sides = len(self.widths) + len(self.heights)
        files = sides * len(self.formats)
        files += sum(len(o.formats or self.formats) for o in self.outputs)
        if not files:
            raise ValueError("an image needs widths or heights with formats, or outputs")
        if files > MAX_IMAGE_FILES:
            raise ValueError(f"at most {MAX_IMAGE_FILES} files, these are {files}")
        grid = {f"w{n}" for n in self.widths} | {f"h{n}" for n in self.heights}
        if taken := grid & {o.name for o in self.outputs}:
            raise ValueError(f"an output may not be named as one of the grid: {min(taken)}")
        return self


def _each_once(value: T, names: Iterable[object], what: str) -> T:
    names = list(names)
    if len(set(names)) < len(names):
        raise ValueError(f"{what} must be distinct")
    return value


class Recipe(Strict):
    """A named list of wanted outputs, for one or more kinds of media."""

    schema_version: Literal[1] = 1
    name: Name
    version: int = Field(ge=1)
    image: ImageOutputs | None = None
    video: tuple[VideoOutput, ...] | None = Field(default=None, min_length=1, max_length=16)
    audio: tuple[AudioOutput, ...] | None = Field(default=None, min_length=1, max_length=16)

    pieces: bool | None = Field(
        default=None,
        description="Whether long video may be encoded in pieces by all workers; null leaves it to "
        "the setting piece_threshold_seconds.",
    )

    @model_validator(mode="after")
    def _something(self) -> Recipe:
        if self.image is None and self.video is None and self.audio is None:
            raise ValueError("a recipe needs outputs for at least one kind of media")
        for outputs in (self.video or (), self.audio or ()):
            if len({o.name for o in outputs}) < len(outputs):
                raise ValueError("the names of the outputs of one kind must be distinct")
        return self


@cache
def built_in() -> Mapping[tuple[str, int], Recipe]:
    """Every shipped recipe version."""
    found: dict[tuple[str, int], Recipe] = {}
    for file in resources.files("mediamill").joinpath("recipes").iterdir():
        if file.name.endswith(".json"):
            recipe = Recipe.model_validate_json(file.read_text("utf-8"))
            assert file.name == _file_name(recipe), file.name
            found[recipe.name, recipe.version] = recipe
    return found


@cache
def book(folder: Path | None = None) -> Mapping[tuple[str, int], Recipe]:
    """The built-in recipes and those of the operator's folder, read once for the process.

    Raises ConfigError for a folder or file that cannot be used, with every fault in it.
    """
    found = dict(built_in())
    if folder is None:
        return found
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == ".json")
        texts = [file.read_bytes() for file in files]
    except OSError as error:
        raise ConfigError(f"recipes_dir: cannot read {folder}: {error.strerror}") from None
    reserved = {name for name, _ in built_in()}
    for file, text in zip(files, texts, strict=True):
        recipe, faults = check(text, folder)
        if recipe is None:
            said = "; ".join(f"{pointer(fault['loc']) or '/'}: {fault['msg']}" for fault in faults)
            raise ConfigError(f"recipes_dir: {file.name} is no valid recipe: {said}")
        if recipe.name in reserved:
            raise ConfigError(
                f"recipes_dir: {file.name}: the name {recipe.name!r} is built in; choose another"
            )
        if file.name != _file_name(recipe):
            raise ConfigError(
                f"recipes_dir: {file.name} holds {recipe.name} version {recipe.version}; "
                f"name it {_file_name(recipe)}"
            )
        found[recipe.name, recipe.version] = recipe
    return found


def find(name: str, version: int | None = None, *, folder: Path | None = None) -> Recipe | None:
    """A recipe by name, in this version or the newest."""
    known = book(folder)
    if version is None:
        version = max((v for n, v in known if n == name), default=0)
    return known.get((name, version))


def check(text: bytes, folder: Path | None = None) -> tuple[Recipe | None, list[ErrorDetails]]:
    """A recipe from its JSON, or every fault in it. `folder` is where its watermarks must be.

    A fault's `loc` is its path in the JSON. What is no JSON at all has one fault, `json_invalid`.
    """
    try:
        recipe = Recipe.model_validate_json(text)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        if any(fault["type"] == "json_invalid" for fault in faults):
            return None, faults
        given = json.loads(text)
        # A list whose items are at fault counts as short as well; its items say it better.
        faults = [f for f in faults if f["type"] != "too_short" or not _has_inner(f, faults)]
        for fault in faults:
            fault["loc"] = _path(fault["loc"], given)
            fault["msg"] = fault["msg"].removeprefix("Value error, ")
        known = {fault["loc"] for fault in faults}
        faults += [f for f in _watermark_faults(given, folder) if f["loc"] not in known]
        return None, faults
    missing = _watermark_faults(json.loads(text), folder)
    return (None, missing) if missing else (recipe, [])


def pointer(path: Sequence[str | int]) -> str:
    """A path as a JSON pointer (RFC 6901)."""
    return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in path)


def watermark(folder: Path | None, image: str) -> Path:
    """The file of a watermark by the name in a recipe. Raises ValueError with what is wrong."""
    if folder is None:
        raise ValueError("watermarks need the operator's setting recipes_dir")
    path = folder / image
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            seen = sniff(file.read(HEAD_BYTES), size)
    except OSError:
        raise ValueError(f"there is no picture {image!r} in the recipe folder") from None
    if size > MAX_WATERMARK_BYTES:
        raise ValueError(f"{image!r} has more than {MAX_WATERMARK_BYTES:,} bytes")
    if seen is None or seen.format not in _WATERMARK_FORMATS:
        raise ValueError(f"{image!r} must be a PNG, WebP or JPEG")
    return path


def schema() -> dict[str, Any]:
    """The JSON Schema of a recipe."""
    return Recipe.model_json_schema()


def _file_name(recipe: Recipe) -> str:
    return f"{recipe.name}.v{recipe.version}.json"


def _has_inner(outer: ErrorDetails, faults: list[ErrorDetails]) -> bool:
    path = outer["loc"]
    return any(len(f["loc"]) > len(path) and f["loc"][: len(path)] == path for f in faults)


def _path(location: Sequence[str | int], given: Any) -> tuple[str | int, ...]:
    """Pydantic's path without the tags that it puts behind a choice between several shapes."""
    path: list[str | int] = []
    for part in location:
        if isinstance(given, dict):
            if part not in given and part == given.get("type"):
                continue
            given = given.get(str(part))
        elif isinstance(given, list) and isinstance(part, int) and part < len(given):
            given = given[part]
        path.append(part)
    return tuple(path)


def _watermark_faults(given: Any, folder: Path | None) -> list[ErrorDetails]:
    """Watermarks that are named in the recipe, valid or not, and cannot be used."""
    image = given.get("image") if isinstance(given, dict) else None
    if not isinstance(image, dict):
        return []
    places: list[tuple[tuple[str | int, ...], Any]] = [(("image",), image)]
    outputs = image.get("outputs")
    for number, output in enumerate(outputs if isinstance(outputs, list) else ()):
        places.append((("image", "outputs", number), output))
    faults: list[ErrorDetails] = []
    for path, place in places:
        mark = place.get("watermark") if isinstance(place, dict) else None
        name = mark.get("image") if isinstance(mark, dict) else None
        if isinstance(name, str) and re.fullmatch(_WATERMARK_NAME, name):
            try:
                watermark(folder, name)
            except ValueError as error:
                at = (*path, "watermark", "image")
                faults.append(ErrorDetails(type="watermark", loc=at, msg=str(error), input=name))
    return faults

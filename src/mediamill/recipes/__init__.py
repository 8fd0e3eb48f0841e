"""What is wanted: recipes are data, named and versioned; a version never changes once shipped.

The built-in ones are the JSON files beside this module, `<name>.v<version>.json`. The models below
are the language; `schema()` is its JSON Schema.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


class ImageFormat(_Strict):
    """One file format of an image output. `effort` trades time for bytes, AVIF and WebP only."""

    format: Literal["avif", "webp", "jpeg", "png"]
    quality: int = Field(default=80, ge=1, le=100)
    effort: int = Field(default=3, ge=0, le=9)


class ImageOutputs(_Strict):
    """An image in several widths and formats. Never enlarged: widths above the source give its
    own."""

    widths: tuple[Annotated[int, Field(ge=1, le=16384)], ...] = Field(min_length=1, max_length=16)
    formats: tuple[ImageFormat, ...] = Field(min_length=1, max_length=4)
    background: str = Field(
        default="#ffffff",
        pattern=r"^#[0-9a-f]{6}$",
        description="The ground under transparent parts in formats without transparency.",
    )

    @model_validator(mode="after")
    def _distinct(self) -> ImageOutputs:
        formats = [f.format for f in self.formats]
        if len(set(self.widths)) < len(self.widths) or len(set(formats)) < len(formats):
            raise ValueError("widths and formats must each be distinct")
        return self


class Mp4Output(_Strict):
    """A progressive H.264/AAC MP4 that plays while it loads. Never enlarged."""

    type: Literal["mp4"]
    name: Name = "video"
    short_side: int = Field(
        default=720, ge=96, le=4320, description="Pixels of the shorter side: 720 is 720p."
    )
    crf: int = Field(default=23, ge=10, le=40)
    preset: Literal["ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow"] = (
        "veryfast"
    )
    max_video_kbps: int = Field(default=4000, ge=100, le=100_000)
    audio_kbps: int = Field(default=128, ge=32, le=512)
    max_frame_rate: float = Field(default=60.0, ge=1, le=240)


class PosterOutput(_Strict):
    """A still of the video at a good frame, as JPEG."""

    type: Literal["poster"]
    name: Name = "poster"
    short_side: int = Field(default=720, ge=96, le=4320)
    quality: int = Field(default=82, ge=1, le=100)


class M4aOutput(_Strict):
    """The sound as AAC in an MP4 file that plays while it loads."""

    type: Literal["m4a"]
    name: Name = "audio"
    kbps: int = Field(default=128, ge=32, le=512)


VideoOutput = Annotated[Mp4Output | PosterOutput, Field(discriminator="type")]


class Recipe(_Strict):
    """A named list of wanted outputs, for one or more kinds of media."""

    schema_version: Literal[1] = 1
    name: Name
    version: int = Field(ge=1)
    image: ImageOutputs | None = None
    video: tuple[VideoOutput, ...] | None = Field(default=None, min_length=1, max_length=16)
    audio: tuple[M4aOutput, ...] | None = Field(default=None, min_length=1, max_length=16)

    @model_validator(mode="after")
    def _something(self) -> Recipe:
        if self.image is None and self.video is None and self.audio is None:
            raise ValueError("a recipe needs outputs for at least one kind of media")
        for outputs in (self.video or (), self.audio or ()):
            if len({o.name for o in outputs}) < len(outputs):
                raise ValueError("the names of the outputs of one kind must be distinct")
        return self


@cache
def built_in() -> dict[tuple[str, int], Recipe]:
    """Every shipped recipe version."""
    found: dict[tuple[str, int], Recipe] = {}
    for file in resources.files("mediamill").joinpath("recipes").iterdir():
        if file.name.endswith(".json"):
            recipe = Recipe.model_validate_json(file.read_text("utf-8"))
            assert file.name == f"{recipe.name}.v{recipe.version}.json", file.name
            found[recipe.name, recipe.version] = recipe
    return found


def find(name: str, version: int | None = None) -> Recipe | None:
    """A recipe by name, in this version or the newest."""
    if version is None:
        version = max((v for n, v in built_in() if n == name), default=0)
    return built_in().get((name, version))


def schema() -> dict[str, Any]:
    """The JSON Schema of a recipe."""
    return Recipe.model_json_schema()

"""What a recipe would make of a media, from what is known of both. Nothing is decoded or encoded.

Pure: plans only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mediamill.handlers import grid, picture, streaming
from mediamill.recipes import Recipe
from mediamill.recipes.video import (
    AnimationOutput,
    AudioOutput,
    CoverOutput,
    HlsOutput,
    Mp4Output,
    PosterOutput,
    SoundHlsOutput,
    StoryboardOutput,
    SubtitlesOutput,
    VideoOutput,
    WaveformOutput,
)

_ENDINGS = {"m4a": "m4a", "opus": "opus", "mp3": "mp3"}


@dataclass(frozen=True, slots=True)
class Sample:
    """A media as it is known. Sizes in pixels, as shown."""

    kind: str
    width: int | None = None
    height: int | None = None
    duration_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """One output that would be made. `most_bytes` is the highest that its rate allows; None where
    that cannot be told beforehand. `note` says what else matters."""

    name: str
    type: str
    width: int | None = None
    height: int | None = None
    most_bytes: int | None = None
    note: str | None = None


def plan(recipe: Recipe, sample: Sample) -> list[Planned]:
    """The outputs, in the order of the recipe; empty if it has none for this kind of media."""
    match sample.kind:
        case "image" if recipe.image is not None:
            return list(_pictures(recipe, sample))
        case "video":
            return [made for wanted in recipe.video or () for made in _of(wanted, sample)]
        case "audio":
            return [made for wanted in recipe.audio or () for made in _of(wanted, sample)]
    return []


def _pictures(recipe: Recipe, sample: Sample) -> Iterator[Planned]:
    assert recipe.image is not None
    width, height = sample.width or 1, sample.height or 1
    for file in grid.plan(recipe.image, width, height):
        target, quality = file.format.target_quality, file.format.quality
        yield Planned(
            file.name,
            f"image/{file.format.format}",
            *_shown(file, width, height),
            note=f"the smallest with likeness {target:g}"
            if target is not None
            else None
            if quality is None
            else f"quality {quality}",
        )


def _shown(file: grid.Planned, width: int, height: int) -> tuple[int, int]:
    """The size of a picture in its box; it is never enlarged."""
    box = (file.width or width, file.height or height)
    if file.fit == "contain":
        return box
    if file.fit == "cover":
        return min(box[0], width), min(box[1], height)
    wide = width if file.width is None else file.width
    high = height if file.height is None else file.height
    scale = min(1.0, wide / width, high / height)
    return max(1, round(width * scale)), max(1, round(height * scale))


def _of(wanted: VideoOutput | AudioOutput, sample: Sample) -> Iterator[Planned]:
    width, height = sample.width or 1, sample.height or 1
    match wanted:
        case Mp4Output():
            note = "taken over as it is, if it fits" if wanted.copy_if_fit else wanted.codec
            yield Planned(
                f"{wanted.name}.mp4",
                "video/mp4",
                *picture.fitted(width, height, wanted.short_side),
                _bytes(wanted.max_video_kbps + wanted.audio_kbps, sample),
                note,
            )
        case HlsOutput():
            for name, rung in streaming.rungs(wanted, width, height):
                yield Planned(
                    f"{wanted.name}/{name}",
                    "HLS and DASH",
                    *picture.fitted(width, height, rung.short_side),
                    _bytes(rung.max_video_kbps, sample),
                    wanted.codec,
                )
            yield Planned(
                f"{wanted.name}/audio",
                "HLS and DASH",
                most_bytes=_bytes(wanted.audio_kbps, sample),
                note="for each sound track",
            )
        case SoundHlsOutput():
            for kbps in wanted.ladder:
                yield Planned(
                    f"{wanted.name}/{kbps}k",
                    "HLS and DASH",
                    most_bytes=_bytes(kbps, sample),
                    note=f"{kbps} kbit/s for each sound track",
                )
        case PosterOutput():
            scale = min(1.0, wanted.short_side / min(width, height))
            size = (max(1, round(width * scale)), max(1, round(height * scale)))
            yield Planned(f"{wanted.name}.jpg", "image/jpeg", *size)
        case StoryboardOutput():
            yield Planned(f"{wanted.name}.jpg", "image/jpeg", note=f"at most {wanted.tiles} tiles")
            yield Planned(f"{wanted.name}.vtt", "text/vtt")
        case AnimationOutput():
            yield Planned(f"{wanted.name}.webp", "image/webp", wanted.width)
        case SubtitlesOutput():
            yield Planned(f"{wanted.name}-*.vtt", "text/vtt", note="one for each text track")
        case WaveformOutput():
            yield Planned(f"{wanted.name}.json", "application/json")
            yield Planned(f"{wanted.name}.png", "image/png", wanted.width, wanted.height)
        case CoverOutput():
            yield Planned(f"{wanted.name}.jpg", "image/jpeg", note="if the file has a cover")
        case _:
            yield Planned(
                f"{wanted.name}.{_ENDINGS[wanted.type]}",
                f"audio/{wanted.type}",
                most_bytes=_bytes(wanted.kbps, sample),
                note=f"{wanted.kbps} kbit/s",
            )


def _bytes(kbps: float, sample: Sample) -> int | None:
    seconds = sample.duration_seconds
    return None if seconds is None else round(kbps * 125 * seconds)

"""One good still of a video."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mediamill import probe
from mediamill.failures import Code, Failure
from mediamill.handlers import Output, Work, picture, running, stills
from mediamill.probe import MediaInfo, VideoStream
from mediamill.recipes.video import PosterOutput
from mediamill.tools import Command

_DARK: Final = 40


@dataclass(frozen=True, slots=True)
class Still:
    """A frame as PNG in scratch, and its placeholder."""

    path: Path
    preview: dict[str, Any]


def plan_still(
    video: VideoStream, width: int, height: int, file: str, *, at: float, frames: int
) -> tuple[str, ...]:
    """The most typical of `frames` frames from `at` seconds on, as PNG with square pixels."""
    steps = (f"thumbnail={frames}", *picture.straighten(video))
    return (
        *running.QUIET,
        *picture.decoder(video),
        *(("-ss", f"{at:.3f}") if at > 0 else ()),
        *probe.INPUT_GUARD,
        *("-i", "fd:", "-map", f"0:{video.index}", "-an", "-sn", "-dn"),
        *("-vf", ",".join((*steps, *picture.shrink(video, width, height, rgb=True)))),
        *("-frames:v", "1", "-pix_fmt", "rgb24", "-map_metadata", "-1"),
        *("-c:v", "png", "-f", "image2", "-update", "1", file),
    )


async def make(work: Work, wanted: PosterOutput, info: MediaInfo) -> Output:
    """The poster as JPEG. Raises Failure."""
    video = info.video
    assert video is not None
    path = await work.fetch()
    width, height = picture.still_size(video, wanted.short_side)
    still = await take(work, path, info, width, height, name=wanted.name)
    return await as_jpeg(
        work, still.path, wanted.name, width=width, height=height, quality=wanted.quality
    )


async def as_jpeg(
    work: Work, source: Path, name: str, *, width: int, height: int, quality: int
) -> Output:
    """A picture in scratch as a checked JPEG of that size. Raises Failure."""
    part, target = work.out / f"{name}.part", work.out / f"{name}.jpg"
    want = {"format": "jpeg", "width": width, "height": height, "quality": quality}
    answer = await stills.make(work, source, [want], [part], 60)
    stills.detach(part, target)
    made = answer["outputs"][0]
    output = Output(
        target.name, target, "image/jpeg", made["width"], made["height"], seconds=made["seconds"]
    )
    await stills.verify(work, output, format="jpeg")
    return output


async def take(
    work: Work,
    path: Path,
    info: MediaInfo,
    width: int,
    height: int,
    *,
    name: str,
    frames: int = 100,
) -> Still:
    """A good frame as PNG. Looks in from the beginning, then later if that was dark: a dark one is
    only taken when there is no better."""
    video = info.video
    assert video is not None
    duration = info.duration_seconds or 0.0
    best: tuple[float, Still] | None = None
    for number, at in enumerate((duration * 0.1 if duration > 20 else 0.0, duration * 0.5)):
        target = work.out / f"{name}.{number}.png"
        args = plan_still(video, width, height, target.name, at=at, frames=frames)
        command = Command("ffmpeg", args, path, f"{name} at {at:.1f} s")
        confined = running.jail(work, wall_seconds=120, write=True)
        finished = await work.run_tool(command, confined)
        if finished.returncode != 0 or not target.exists():
            # A spot that cannot be decoded is no reason to give up before the other was tried.
            if number == 0 and duration > 0:
                continue
            if best is None and finished.returncode != 0:
                raise running.failure(finished, command, confined)
            break
        still = Still(target, await stills.preview(work, target))
        light = _brightness(still.preview["average_color"])
        if best is None or light > best[0]:
            best = light, still
        if light >= _DARK:
            break
    if best is None:
        raise Failure(Code.CORRUPT_INPUT, "No frame of the video could be decoded.")
    return best[1]


def _brightness(color: str) -> float:
    """Luma of #rrggbb, 0 to 255 (BT.709 weights)."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

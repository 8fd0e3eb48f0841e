"""Many small stills on one sheet for the time line, and a short animation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mediamill import probe
from mediamill.failures import Code, Failure
from mediamill.handlers import Output, Work, picture, poster, running, stills
from mediamill.probe import MediaInfo
from mediamill.recipes.video import AnimationOutput, StoryboardOutput
from mediamill.tools import Command

_COLUMNS: Final = 10
_ALL_FRAMES_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Sheet:
    """Where which time is: tiles of one size, row by row, one every so many seconds."""

    every_seconds: float
    tiles: int
    columns: int
    width: int
    height: int

    @property
    def rows(self) -> int:
        return math.ceil(self.tiles / self.columns)

    def webvtt(self, image: str, seconds: float) -> str:
        """A cue for each tile."""
        lines = ["WEBVTT", ""]
        for tile in range(self.tiles):
            begin = tile * self.every_seconds
            end = seconds if tile == self.tiles - 1 else begin + self.every_seconds
            row, column = divmod(tile, self.columns)
            place = f"{column * self.width},{row * self.height},{self.width},{self.height}"
            lines += [f"{_clock(begin)} --> {_clock(end)}", f"{image}#xywh={place}", ""]
        return "\n".join(lines)


def sheet(wanted: StoryboardOutput, info: MediaInfo) -> Sheet:
    """The plan: as many tiles as wanted at most, none nearer to the next than wanted."""
    video, seconds = info.video, info.duration_seconds
    assert video is not None
    seconds = seconds or wanted.every_seconds
    every = max(wanted.every_seconds, seconds / wanted.tiles)
    tiles = max(1, math.ceil(round(seconds / every, 6)))
    width = min(wanted.tile_width, video.width)
    height = max(2, round(video.height * width / video.width))
    return Sheet(every, tiles, min(tiles, _COLUMNS), width, height)


async def make(
    work: Work, wanted: StoryboardOutput, info: MediaInfo, rung: Path | None
) -> list[Output]:
    """The sheet and its WebVTT. `rung` is a small rung of ours with frequent key frames, which is
    read in place of the original. Raises Failure."""
    video = info.video
    assert video is not None
    plan = sheet(wanted, info)
    seconds = info.duration_seconds or plan.every_seconds
    sparse = rung is not None or seconds > _ALL_FRAMES_SECONDS
    steps = (
        # The last frame stays for as long as its tile stands for.
        f"tpad=stop_mode=clone:stop_duration={plan.every_seconds:.6f}",
        f"fps=1/{plan.every_seconds:.6f}:start_time=0:round=near",
        *(picture.straighten(video) if rung is None else ()),
        *(
            picture.shrink(video, plan.width, plan.height, rgb=True)
            if rung is None
            else (f"scale={plan.width}:{plan.height}:flags=bicubic",)
        ),
        f"tile={plan.columns}x{plan.rows}",
    )
    source = work.out / f"{wanted.name}.png"
    args = (
        *running.QUIET,
        *(("-skip_frame", "nokey") if sparse else ()),
        *(picture.decoder(video) if rung is None else ()),
        *_input(rung, video.index),
        *("-vf", ",".join(steps), "-frames:v", "1", "-pix_fmt", "rgb24", "-map_metadata", "-1"),
        *("-an", "-sn", "-dn", "-c:v", "png", "-f", "image2", "-update", "1", source.name),
    )
    confined = running.jail(work, wall_seconds=120 + seconds, write=True, scratch_bytes=1 << 50)
    path = None if rung else await work.fetch()
    await running.run(work, Command("ffmpeg", args, path, wanted.name), confined)
    if not source.exists():
        raise Failure(Code.OUTPUT_INVALID, f"{wanted.name}: no frame came out.")
    image = await poster.as_jpeg(
        work,
        source,
        wanted.name,
        width=plan.width * plan.columns,
        height=plan.height * plan.rows,
        quality=wanted.quality,
    )
    text = work.out / f"{wanted.name}.vtt"
    text.write_text(plan.webvtt(image.name, seconds))
    return [Output(text.name, text, "text/vtt"), image]


async def animate(
    work: Work, wanted: AnimationOutput, info: MediaInfo, rung: Path | None
) -> Output:
    """Some seconds from a fifth of the way on, as WebP. Raises Failure."""
    video = info.video
    assert video is not None
    seconds = info.duration_seconds or 0.0
    begin = max(0.0, min(seconds * 0.2, seconds - wanted.seconds))
    width = min(wanted.width, video.width)
    height = max(2, round(video.height * width / video.width))
    fps = f"fps={wanted.frame_rate:g}"
    steps = (
        (*picture.straighten(video), fps, *picture.shrink(video, width, height, rgb=True))
        if rung is None
        else (fps, f"scale={width}:{height}:flags=bicubic")
    )
    target = work.out / f"{wanted.name}.webp"
    args = (
        *running.QUIET,
        *(picture.decoder(video) if rung is None else ()),
        *(("-ss", f"{begin:.3f}") if begin > 0 else ()),
        *_input(rung, video.index),
        *("-t", f"{wanted.seconds:.3f}", "-vf", ",".join(steps), "-an", "-sn", "-dn"),
        *("-map_metadata", "-1", "-c:v", "libwebp_anim", "-pix_fmt", "yuv420p", "-loop", "0"),
        *("-quality", str(wanted.quality), "-compression_level", "3", "-f", "webp", target.name),
    )
    confined = running.jail(work, wall_seconds=180, write=True)
    path = None if rung else await work.fetch()
    await running.run(work, Command("ffmpeg", args, path, wanted.name), confined)
    seen = await stills.inspect(work, target)
    output = Output(target.name, target, "image/webp", width, height)
    made = {"frames": seen["frames"], "duration_ms": seen["duration_ms"]}
    await stills.verify(work, output, format="webp", made=made)
    length = (seen["duration_ms"] or 0) / 1000
    expected = min(wanted.seconds, seconds) if seconds else None
    if expected is not None and abs(length - expected) > 0.5 + 2 / wanted.frame_rate:
        raise Failure(Code.OUTPUT_INVALID, f"{target.name}: it runs {length:.2f} s.")
    return Output(
        target.name, target, "image/webp", width, height, duration_seconds=round(length, 3)
    )


def _input(rung: Path | None, index: int) -> tuple[str, ...]:
    if rung is None:
        return (*probe.INPUT_GUARD, "-i", "fd:", "-map", f"0:{index}")
    return (*running.OWN_INPUT, "-i", rung.name, "-map", "0:v:0")


def _clock(seconds: float) -> str:
    whole = round(seconds * 1000)
    minutes, millis = divmod(whole, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{millis / 1000:06.3f}"

"""Sound: files of it, its loudness, its shape, and its cover."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mediamill import probe
from mediamill.failures import Code, Failure
from mediamill.handlers import Output, Work, checks, poster, running, stills
from mediamill.handlers.running import Meter
from mediamill.probe import AudioStream, MediaInfo
from mediamill.recipes.video import (
    CoverOutput,
    M4aOutput,
    Mp3Output,
    OpusOutput,
    SoundOutput,
    WaveformOutput,
)
from mediamill.tools import Command, Finished

SHARE: Final = 2e6
"""What encoding a second of sound costs, in the unit of `Coding.work`."""
_PEAK: Final = -1.0
_SILENCE: Final = -60.0
_WAVE_RATE: Final = 8000
_RATES: Final = {
    "aac": (22050, 32000, 44100, 48000),
    "libopus": (48000,),
    "libmp3lame": (32000, 44100, 48000),
}


@dataclass(frozen=True, slots=True)
class Loudness:
    """What was measured, in LUFS and dBTP, and the gain in dB that brings it to its target."""

    integrated: float
    peak: float
    gain: float

    def as_dict(self) -> dict[str, float]:
        return {
            "measured_lufs": self.integrated,
            "peak_dbtp": self.peak,
            "gain_db": round(self.gain, 2),
        }


def sample_rate(source: int, encoder: str = "aac") -> int:
    """The lowest rate that the encoder takes and that loses nothing."""
    rates = _RATES[encoder]
    return min((r for r in rates if r >= source), default=max(rates))


def shape(
    audio: AudioStream, loudness: Loudness | None, *, encoder: str = "aac", steady: bool = False
) -> tuple[str, ...]:
    """Channels, rate and gain. `steady` fills gaps with silence and begins at 0."""
    steps: list[str] = []
    rate = sample_rate(audio.sample_rate, encoder)
    if steady:
        steps.append("aresample=async=1000:first_pts=0")
    if loudness is not None and loudness.gain:
        steps.append(f"volume={loudness.gain:.2f}dB")
        if loudness.peak + loudness.gain > _PEAK:
            steps.append("alimiter=limit=0.84:level=0")
    return (
        *(("-af", ",".join(steps)) if steps else ()),
        *("-ac", str(min(audio.channels, 2)), "-ar", str(rate)),
    )


async def measure(
    work: Work, audio: AudioStream, target: float | None, seconds: float | None
) -> Loudness | None:
    """The first pass: how loud it is as it will be played. None without a target, or in silence.

    Raises Failure.
    """
    if target is None:
        return None
    channels = "stereo" if audio.channels > 1 else "mono"
    args = (
        *("-hide_banner", "-nostdin", "-loglevel", "info", "-nostats"),
        *probe.INPUT_GUARD,
        *("-i", "fd:", "-map", f"0:{audio.index}", "-vn", "-sn", "-dn"),
        *("-af", f"aformat=channel_layouts={channels},ebur128=peak=true:framelog=quiet"),
        *("-f", "null", "-"),
    )
    command = Command("ffmpeg", args, await work.fetch(), "loudness")
    confined = running.jail(work, wall_seconds=60 + (seconds or 3600))
    finished = await running.run(work, command, confined)
    loudness = read_loudness(finished.stderr_tail, target)
    return loudness if loudness is not None and loudness.integrated > _SILENCE else None


def read_loudness(said: str, target: float) -> Loudness | None:
    """The summary of ebur128; None where there is none."""
    summary = said.rpartition("Summary:")[2]
    integrated = re.search(r"I:\s+(-?[\d.]+|-inf) LUFS", summary)
    peak = re.search(r"Peak:\s+(-?[\d.]+|-inf) dBFS", summary)
    if integrated is None or peak is None or "inf" in integrated[1] + peak[1]:
        return None
    return Loudness(float(integrated[1]), float(peak[1]), target - float(integrated[1]))


def plan(
    encoder: str,
    kbps: int,
    audio: AudioStream,
    file: str,
    loudness: Loudness | None,
    *,
    limit_seconds: float,
    steady: bool = False,
) -> tuple[str, ...]:
    """One sound track to one file."""
    forms = {"aac": ("-movflags", "+faststart", "-f", "mp4"), "libopus": ("-f", "ogg")}
    return (
        *(*running.QUIET, *running.PROGRESS, *running.TOLERANT, *probe.INPUT_GUARD),
        *("-i", "fd:", "-map", f"0:{audio.index}", "-vn"),
        *("-c:a", encoder, "-b:a", f"{kbps}k"),
        *shape(audio, loudness, encoder=encoder, steady=steady),
        *running.NO_METADATA,
        *("-t", f"{limit_seconds:.3f}", *forms.get(encoder, ("-f", "mp3", "-write_xing", "1"))),
        file,
    )


async def encode(
    work: Work,
    args: tuple[str, ...],
    file: str,
    info: MediaInfo,
    meter: Meter | None = None,
) -> Finished:
    """Run a plan of this module. Raises Failure."""
    seconds = info.duration_seconds or work.settings.max_duration_seconds
    confined = running.jail(
        work,
        wall_seconds=120 + seconds,
        write=True,
        file_bytes=(64 << 20) + int(seconds * 100_000),
        scratch_bytes=1 << 50,
    )
    share = SHARE * (info.duration_seconds or 0)
    watched = meter.watch([file], share, info.duration_seconds) if meter else None
    finished = await running.run(
        work,
        Command("ffmpeg", args, await work.fetch(), file),
        confined,
        on_line=watched.line if watched else lambda _: None,
        stall_seconds=running.STALL_SECONDS,
    )
    if meter is not None and watched is not None:
        meter.finish(watched)
    return finished


async def make(
    work: Work, wanted: SoundOutput, info: MediaInfo, meter: Meter
) -> tuple[Output, dict[str, Any]]:
    """One file of the default sound track, checked, and what the status says of it.

    Raises Failure.
    """
    audio = info.audio
    assert audio is not None
    encoder, ending, content_type = {
        M4aOutput: ("aac", "m4a", "audio/mp4"),
        OpusOutput: ("libopus", "opus", "audio/ogg"),
        Mp3Output: ("libmp3lame", "mp3", "audio/mpeg"),
    }[type(wanted)]
    file = f"{wanted.name}.{ending}"
    loudness = await measure(work, audio, wanted.loudness, info.duration_seconds)
    limit = work.settings.max_duration_seconds
    args = plan(encoder, wanted.kbps, audio, file, loudness, limit_seconds=limit)
    finished = await encode(work, args, file, info, meter)
    path = work.out / file
    found = await checks.probe_output(work, path)
    if found.audio is None or found.video is not None:
        raise Failure(Code.OUTPUT_INVALID, f"{file}: it is not one sound track.")
    checks.length(found.duration_seconds, info)
    if encoder == "aac" and not checks.index_in_front(path):
        raise Failure(Code.OUTPUT_INVALID, f"{file}: its index is not in front.")
    await checks.decode(work, path, found.duration_seconds)
    output = Output(
        file,
        path,
        content_type,
        duration_seconds=found.duration_seconds,
        seconds=round(finished.wall_seconds, 3),
    )
    shown: dict[str, Any] = {"loudness": loudness.as_dict()} if loudness else {}
    return output, shown | ({"damaged": True} if running.damaged(finished) else {})


async def make_waveform(work: Work, wanted: WaveformOutput, info: MediaInfo) -> list[Output]:
    """The shape of the default sound track, as numbers and as a picture. Raises Failure."""
    audio = info.audio
    assert audio is not None
    raw = work.out / f"{wanted.name}.raw"
    args = (
        *(*running.QUIET, *probe.INPUT_GUARD, "-i", "fd:", "-map", f"0:{audio.index}", "-vn"),
        *("-ac", "1", "-ar", str(_WAVE_RATE), "-t", f"{work.settings.max_duration_seconds:.0f}"),
        *("-f", "s16le", raw.name),
    )
    await encode(work, args, raw.name, info)
    data = work.out / f"{wanted.name}.json"
    await asyncio.to_thread(_write_peaks, raw, data, wanted.points)
    image = work.out / f"{wanted.name}.png"
    draw = (
        *(*running.QUIET, "-protocol_whitelist", "file", "-f", "s16le", "-ar", str(_WAVE_RATE)),
        *("-ac", "1", "-i", raw.name, "-filter_complex"),
        f"showwavespic=s={wanted.width}x{wanted.height}:colors={wanted.color}",
        *("-frames:v", "1", "-c:v", "png", "-f", "image2", "-update", "1", image.name),
    )
    confined = running.jail(work, wall_seconds=120, write=True, scratch_bytes=1 << 50)
    await running.run(work, Command("ffmpeg", draw, None, image.name), confined)
    raw.unlink()
    shown = Output(image.name, image, "image/png", wanted.width, wanted.height)
    await stills.verify(work, shown, format="png")
    return [Output(data.name, data, "application/json"), shown]


def _write_peaks(raw: Path, target: Path, points: int) -> None:
    samples = raw.stat().st_size // 2
    if not samples:
        raise Failure(Code.CORRUPT_INPUT, "None of its sound could be decoded.")
    points = min(points, samples)
    peaks: list[int] = []
    with raw.open("rb") as file:
        for point in range(points):
            some = array("h")
            some.fromfile(file, (point + 1) * samples // points - point * samples // points)
            if sys.byteorder == "big":
                some.byteswap()
            peaks += (min(some) >> 8, max(some) >> 8)
    body = {
        "version": 2,
        "channels": 1,
        "sample_rate": _WAVE_RATE,
        "samples_per_pixel": samples / points,
        "bits": 8,
        "length": points,
        "data": peaks,
    }
    target.write_text(json.dumps(body, separators=(",", ":")))


async def make_cover(work: Work, wanted: CoverOutput, info: MediaInfo) -> Output | None:
    """The picture of the cover as JPEG; None where there is none that can be read."""
    if info.cover is None:
        return None
    source = work.out / f"{wanted.name}.png"
    args = (
        *(*running.QUIET, *probe.INPUT_GUARD, "-i", "fd:", "-map", f"0:{info.cover}"),
        *("-frames:v", "1", "-pix_fmt", "rgb24", "-map_metadata", "-1"),
        *("-c:v", "png", "-f", "image2", "-update", "1", source.name),
    )
    confined = running.jail(work, wall_seconds=60, write=True)
    finished = await work.run_tool(
        Command("ffmpeg", args, await work.fetch(), wanted.name), confined
    )
    if finished.returncode != 0 or not source.exists():
        return None
    seen = await stills.inspect(work, source)
    width, height = seen["width"], seen["height"]
    scale = min(1.0, wanted.short_side / min(width, height))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return await poster.as_jpeg(
        work, source, wanted.name, width=size[0], height=size[1], quality=wanted.quality
    )

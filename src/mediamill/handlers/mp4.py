"""Progressive MP4: encoded, taken over as it is, or put together from tracks that are there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mediamill import probe
from mediamill.failures import Code, Failure
from mediamill.handlers import Output, Work, checks, picture, running, sound
from mediamill.handlers.picture import Coding
from mediamill.handlers.sound import Loudness
from mediamill.probe import MediaInfo
from mediamill.recipes.video import Mp4Output
from mediamill.tools import Command

_TAGS: Final = {"h264": ("avc1",), "hevc": ("hvc1",), "vp9": ("vp09",), "av1": ("av01",)}
_COMPARED_FRAMES: Final = 8
_FRONT: Final = ("-movflags", "+faststart", "-f", "mp4")


@dataclass(frozen=True, slots=True)
class Way:
    """How an output came about, and why: what the status shows."""

    way: str
    reason: str

    def as_dict(self) -> dict[str, str]:
        return {"way": self.way, "reason": self.reason}


def coding(wanted: Mp4Output, info: MediaInfo) -> Coding:
    """How the picture of this output is to be coded."""
    video = info.video
    assert video is not None
    width, height = picture.fitted(video.width, video.height, wanted.short_side)
    kept = video.hdr if wanted.hdr == "keep" else None
    return Coding(
        width, height, wanted.codec, wanted.preset, wanted.crf, wanted.max_video_kbps, kept
    )


def misfit(wanted: Mp4Output, info: MediaInfo, size: int) -> str | None:
    """Why the source cannot be taken over as it is, in a few words; None if it fits."""
    video, audio = info.video, info.audio
    assert video is not None
    seconds = info.duration_seconds or 0.0
    kbps = (video.bit_rate or (size * 8 / seconds if seconds else 0)) / 1000
    ten_bits = wanted.hdr == "keep" and video.hdr is not None
    reasons = (
        (video.codec != wanted.codec, f"its picture is coded as {video.codec}"),
        (
            video.pixel_format not in (("yuv420p10le",) if ten_bits else ("yuv420p", "yuvj420p")),
            f"its pixels are {video.pixel_format}",
        ),
        (video.range == "pc" or video.pixel_format == "yuvj420p", "its colors are full range"),
        (video.hdr is not None and not ten_bits, "it is HDR"),
        (video.rotation != 0, "it is turned"),
        (not video.square, "its pixels are not square"),
        (bool(video.width % 2 or video.height % 2), "its size is odd"),
        (video.interlaced, "it is interlaced"),
        (video.has_alpha, "it has transparent parts"),
        (min(video.width, video.height) > wanted.short_side, "it is larger than wanted"),
        (
            video.frame_rate is None or video.frame_rate > wanted.max_frame_rate,
            "its frame rate is unknown or too high",
        ),
        (not seconds, "it does not say how long it is"),
        (kbps > wanted.max_video_kbps, f"it takes {kbps:.0f} kbit/s"),
        (abs(video.start_seconds) > 0.05, "its picture does not begin at 0"),
    )
    for holds, reason in reasons:
        if holds:
            return reason
    if audio is not None:
        if audio.codec != "aac" or audio.profile not in ("LC", ""):
            return f"its sound is coded as {audio.codec} {audio.profile}".strip()
        if audio.channels > 2:
            return f"its sound has {audio.channels} channels"
        if wanted.loudness is not None:
            return "its loudness is to be set"
        if abs(audio.start_seconds - video.start_seconds) > 0.05:
            return "its sound does not begin with its picture"
    return None


def plan_copy(wanted: Mp4Output, info: MediaInfo, file: str) -> tuple[str, ...]:
    """Picture and sound taken over as they are."""
    assert info.video is not None
    tag = _TAGS[wanted.codec][0]
    return (
        *(*running.QUIET, *running.PROGRESS, *probe.INPUT_GUARD, "-i", "fd:"),
        *("-map", f"0:{info.video.index}"),
        *(("-map", f"0:{info.audio.index}") if info.audio else ()),
        *("-c", "copy", "-tag:v", tag, *running.NO_METADATA),
        *(*_FRONT, file),
    )


def plan_encode(
    wanted: Mp4Output,
    info: MediaInfo,
    file: str,
    *,
    loudness: Loudness | None,
    limit_seconds: float,
) -> tuple[str, ...]:
    """Picture and sound encoded in one run; frames keep their own pace."""
    video = info.video
    assert video is not None
    made = coding(wanted, info)
    steps = list(picture.straighten(video))
    if video.frame_rate is not None and video.frame_rate > wanted.max_frame_rate:
        steps.append(f"fps={wanted.max_frame_rate:g}")
    steps += picture.shrink(video, made.width, made.height, hdr=made.hdr)
    heard: tuple[str, ...] = ("-an",)
    if info.audio is not None:
        heard = (
            *("-map", f"0:{info.audio.index}", "-c:a", "aac", "-b:a", f"{wanted.audio_kbps}k"),
            *sound.shape(info.audio, loudness),
        )
    return (
        *(*running.QUIET, *running.PROGRESS, *running.TOLERANT, *picture.decoder(video)),
        *probe.INPUT_GUARD,
        *("-i", "fd:", "-map", f"0:{video.index}", "-vf", ",".join(steps)),
        *picture.encoder(made),
        # Else times are rounded to the average rate, and frames that come faster are lost.
        *(("-enc_time_base:v", "filter") if video.variable_rate else ()),
        *heard,
        *running.NO_METADATA,
        *("-t", f"{limit_seconds:.3f}", "-max_muxing_queue_size", "4096", *_FRONT, file),
    )


async def join(work: Work, film: Path, heard: Path | None, file: str) -> Path:
    """A finished picture and a finished sound in one file. Raises Failure."""
    args = (
        *(*running.QUIET, *running.OWN_INPUT, "-i", film.name),
        *((*running.OWN_INPUT, "-i", heard.name) if heard else ()),
        *("-map", "0:v", *(("-map", "1:a") if heard else ())),
        *("-c", "copy", *running.NO_METADATA, *_FRONT, file),
    )
    size = film.stat().st_size + (heard.stat().st_size if heard else 0)
    confined = running.jail(
        work,
        wall_seconds=120 + size / 5e6,
        write=True,
        file_bytes=2 * size + (64 << 20),
        scratch_bytes=1 << 50,
    )
    await running.run(work, Command("ffmpeg", args, None, f"join {file}"), confined)
    return work.out / file


async def verify(
    work: Work,
    path: Path,
    made: Coding,
    info: MediaInfo,
    seconds: float,
    *,
    copied: bool = False,
    decoded: bool = False,
    damaged: bool = False,
) -> Output:
    """The file is what was planned and decodes from end to end, unless that was seen before. Raises
    Failure."""
    found = await checks.probe_output(work, path)

    def expect(holds: bool, what: str) -> None:
        if not holds:
            raise Failure(Code.OUTPUT_INVALID, f"{path.name}: {what}.")

    expect(found.video is not None, "it has no picture")
    assert found.video is not None
    if not copied:
        expect((found.video.width, found.video.height) == (made.width, made.height), "wrong size")
        expect(
            found.video.pixel_format == ("yuv420p10le" if made.hdr else "yuv420p"),
            "its pixel format is off",
        )
        checks.colors(path.name, found.video, made.hdr)
    expect((found.video.frames or 0) > 0, "it has no frames")
    expect(found.video.rotation == 0, "it is still turned")
    expect((found.audio is not None) == (info.audio is not None), "its sound is missing")
    length = found.duration_seconds
    checks.length(length, info)
    if found.audio is not None and info.audio is not None:
        await checks.hold_together(work, path, found, info, damaged=damaged)
    expect(checks.index_in_front(path), "its index is not in front")
    if not decoded:
        await checks.decode(work, path, length, picture=True)
    return Output(
        path.name,
        path,
        "video/mp4",
        width=found.video.width,
        height=found.video.height,
        duration_seconds=length,
        seconds=round(seconds, 3),
    )


async def compare(work: Work, info: MediaInfo, made: Coding, output: Output) -> float:
    """The lowest likeness (SSIM of small pictures, 1 is equal) of a file that keeps the pace of the
    source, at three places, or at its beginning.

    Raises Failure(OUTPUT_INVALID) below the floor.
    """
    seconds = info.picture_seconds or output.duration_seconds or 0.0

    async def at(place: float) -> float:
        found = await _likeness(work, info, made, output.path, at=seconds * place)
        checks.alike(output.name, found, at=seconds * place)
        return found

    # Without an index a seek may end behind the place that was meant.
    places = (0.1, 0.5, 0.9) if info.has_index else (0.0,)
    return round(min(await running.together(*(at(place) for place in places))), 4)


async def _likeness(work: Work, info: MediaInfo, made: Coding, path: Path, *, at: float) -> float:
    video = info.video
    assert video is not None
    source = (
        *picture.straighten(video),
        *picture.shrink(video, made.width, made.height, hdr=made.hdr),
    )
    seek = ("-ss", f"{at:.3f}") if at > 0 else ()
    graph = (
        f"[0:{video.index}]{','.join((*source, checks.SMALL))}[s];[1:v]{checks.SMALL}[o];"
        "[s][o]ssim@0=ts_sync_mode=nearest[d]"
    )
    args = (
        *("-hide_banner", "-nostdin", "-loglevel", "info", "-nostats"),
        *(*picture.decoder(video), *seek, *probe.INPUT_GUARD, "-i", "fd:"),
        *(*seek, *running.OWN_INPUT, "-i", path.name, "-filter_complex", graph),
        *("-map", "[d]", "-frames:v", str(_COMPARED_FRAMES), "-f", "null", "-"),
    )
    (found,) = await checks.likeness(work, args, 1, f"compare {path.name} at {at:.1f} s")
    return found

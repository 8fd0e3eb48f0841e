"""Video and sound: probe, plan (pure), run, and check every output before anyone sees it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from mediamill import probe, tools
from mediamill.failures import Code, Failure
from mediamill.handlers import Done, Outcome, Output, Reroute, Work, stills
from mediamill.media import Description
from mediamill.probe import MediaInfo, VideoStream
from mediamill.recipes import M4aOutput, Mp4Output, PosterOutput
from mediamill.sandbox import Jail, Limits
from mediamill.tools import Command, Finished

_STALL_SECONDS: Final = 120.0
_DARK: Final = 40
# PQ and HLG to ordinary video: linear light at 100 nit, into BT.709, highlights rolled off.
_TONE_MAP: Final = (
    "zscale=t=linear:npl=100,format=gbrpf32le,zscale=p=bt709,tonemap=hable:desat=0,"
    "zscale=t=bt709:m=bt709:r=tv"
)
_QUIET: Final = ("-hide_banner", "-nostdin", "-loglevel", "warning", "-y")
_NO_METADATA: Final = (
    "-sn",
    "-dn",
    "-map_metadata",
    "-1",
    "-map_chapters",
    "-1",
    "-fflags",
    "+bitexact",
    "-flags:v",
    "+bitexact",
    "-flags:a",
    "+bitexact",
)


@dataclass(frozen=True, slots=True)
class Encode:
    """One planned ffmpeg run and what its output must be. `share` is its part of the progress."""

    name: str
    file: str
    content_type: str
    args: tuple[str, ...]
    share: float
    width: int | None = None
    height: int | None = None
    has_audio: bool = False


def fitted(width: int, height: int, short_side: int) -> tuple[int, int]:
    """The size with at most `short_side` pixels on the shorter side, even, never enlarged."""
    scale = min(Fraction(1), Fraction(short_side, min(width, height)))
    return tuple(max(2, int(side * scale) // 2 * 2) for side in (width, height))  # type: ignore[return-value]


def plan_mp4(wanted: Mp4Output, info: MediaInfo, *, limit_seconds: float) -> Encode:
    """H.264 and AAC with the index in front."""
    video = info.video
    assert video is not None
    width, height = fitted(video.width, video.height, wanted.short_side)
    file = f"{wanted.name}.mp4"
    kbps = wanted.max_video_kbps
    sound: tuple[str, ...] = ("-an",)
    if info.audio is not None:
        sound = (
            *("-map", f"0:{info.audio.index}", "-c:a", "aac", "-b:a", f"{wanted.audio_kbps}k"),
            *("-ac", str(min(info.audio.channels, 2)), "-ar", _sample_rate(info.audio.sample_rate)),
        )
    args = (
        *_QUIET,
        *("-nostats", "-progress", "pipe:1", "-stats_period", "0.5"),
        *_decoder(video),
        *probe.INPUT_GUARD,
        *("-i", "fd:", "-map", f"0:{video.index}"),
        *("-vf", ",".join(_filters(video, width, height, wanted.max_frame_rate))),
        *("-c:v", "libx264", "-preset", wanted.preset, "-crf", str(wanted.crf)),
        *("-maxrate", f"{kbps}k", "-bufsize", f"{2 * kbps}k", "-profile:v", "high"),
        *("-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709"),
        *sound,
        *_NO_METADATA,
        *("-t", f"{limit_seconds:.3f}", "-max_muxing_queue_size", "4096"),
        *("-movflags", "+faststart", "-f", "mp4", file),
    )
    return Encode(wanted.name, file, "video/mp4", args, 1.0, width, height, info.audio is not None)


def plan_m4a(wanted: M4aOutput, info: MediaInfo, *, limit_seconds: float) -> Encode:
    """AAC with the index in front."""
    audio = info.audio
    assert audio is not None
    file = f"{wanted.name}.m4a"
    args = (
        *_QUIET,
        *("-nostats", "-progress", "pipe:1", "-stats_period", "0.5"),
        *probe.INPUT_GUARD,
        *("-i", "fd:", "-map", f"0:{audio.index}", "-vn"),
        *("-c:a", "aac", "-b:a", f"{wanted.kbps}k", "-ac", str(min(audio.channels, 2))),
        *("-ar", _sample_rate(audio.sample_rate)),
        *_NO_METADATA,
        *("-t", f"{limit_seconds:.3f}", "-movflags", "+faststart", "-f", "mp4", file),
    )
    return Encode(wanted.name, file, "audio/mp4", args, 1.0, has_audio=True)


def plan_still(
    video: VideoStream, width: int, height: int, file: str, *, at: float, frames: int
) -> tuple[str, ...]:
    """The most typical of `frames` frames from `at` seconds on, as PNG with square pixels."""
    return (
        *_QUIET,
        *_decoder(video),
        *(("-ss", f"{at:.3f}") if at > 0 else ()),
        *probe.INPUT_GUARD,
        *("-i", "fd:", "-map", f"0:{video.index}", "-an", "-sn", "-dn"),
        *("-vf", ",".join((f"thumbnail={frames}", *_filters(video, width, height, None)[:-1]))),
        *("-frames:v", "1", "-pix_fmt", "rgb24", "-map_metadata", "-1"),
        *("-c:v", "png", "-f", "image2", "-update", "1", file),
    )


async def handle(work: Work) -> Outcome:
    """A video, or what came as one: pictures and sounds are sent on to their own queues."""
    info = await look(work)
    if not isinstance(info, MediaInfo):
        return info
    if info.video is None:
        if work.recipe.audio is None:
            raise Failure(Code.NO_VIDEO_STREAM)
        return Reroute("audio", "audio")
    if work.recipe.video is None:
        raise Failure(Code.UNSUPPORTED_FORMAT, "This recipe has no outputs for video.")
    limit = work.settings.max_duration_seconds
    outputs: list[Output] = []
    posters = [o for o in work.recipe.video or () if isinstance(o, PosterOutput)]
    encodes = [
        plan_mp4(o, info, limit_seconds=limit)
        for o in work.recipe.video or ()
        if isinstance(o, Mp4Output)
    ]
    await work.enter("poster")
    posted = [await _poster(work, wanted, info) for wanted in posters]
    outputs = [*await _encode_all(work, encodes, info), *posted]
    return Done(tuple(outputs), {"outputs": len(outputs)})


async def handle_audio(work: Work) -> Outcome:
    """A sound file."""
    info = await look(work)
    if not isinstance(info, MediaInfo):
        return info
    if info.video is not None:
        return Reroute("video", "video")
    if work.recipe.audio is None:
        raise Failure(Code.NO_VIDEO_STREAM)
    limit = work.settings.max_duration_seconds
    encodes = [plan_m4a(o, info, limit_seconds=limit) for o in work.recipe.audio or ()]
    outputs = await _encode_all(work, encodes, info)
    return Done(tuple(outputs), {"outputs": len(outputs)})


async def look(work: Work) -> MediaInfo | Reroute:
    """Fetch and probe the original; the main job also scans it and shows what was found.

    Raises Failure.
    """
    await work.enter("download")
    path = await work.fetch()
    seen = stills.look(path)
    if seen is not None and seen.kind == "image":
        return Reroute("image", "image")
    if seen is not None and seen.kind == "playlist":
        raise Failure(Code.UNSAFE_CONTENT, "The file is a playlist that points to other files.")
    if seen is not None and seen.kind == "document":
        raise Failure(Code.UNSUPPORTED_FORMAT, f"The file is {seen.type}.")
    await work.enter("probe")
    info = await run_probe(work, path)
    if work.claim.role != "main":
        return info
    duration = await _scan(work, path, info)
    probe.check_duration(duration, work.settings)
    await work.describe(
        Description(
            kind=info.kind,
            detected_type=probe.detected_type(info, seen.type if seen else None),
            width=info.video.width if info.video else None,
            height=info.video.height if info.video else None,
            duration_seconds=duration,
            info=info.as_dict(),
        )
    )
    return replace(info, duration_seconds=duration)


async def run_probe(work: Work, path: Path) -> MediaInfo:
    """Ask ffprobe. Raises Failure."""
    command = Command("ffprobe", probe.ffprobe_args(), path, "probe")
    finished = await _run(work, command, _jail(work, wall_seconds=60))
    return probe.parse(finished.stdout, work.settings)


async def _scan(work: Work, path: Path, info: MediaInfo) -> float | None:
    scan = probe.Scan()
    size = work.original.size
    jail = _jail(work, wall_seconds=60 + size / 5_000_000)
    args = probe.scan_args(info, limit_seconds=work.settings.max_duration_seconds + 1)
    command = Command("ffmpeg", args, path, "scan")
    finished = await work.run_tool(command, jail, on_line=scan.line)
    if finished.stopped_for is not None:
        raise _failure(finished, command, jail)
    return probe.check_scan(info, scan, finished.stderr_head + finished.stderr_tail)


async def _encode_all(work: Work, encodes: Sequence[Encode], info: MediaInfo) -> list[Output]:
    await work.enter("encode")
    path = await work.fetch()
    outputs = []
    total = sum(e.share for e in encodes) or 1.0
    done = 0.0
    for encode in encodes:
        base, span = 5 + 90 * done / total, 90 * encode.share / total
        work.progress(base)
        finished = await _run(
            work,
            Command("ffmpeg", encode.args, path, encode.name),
            _encode_jail(work, info),
            on_line=_progress(work, info.duration_seconds, base, span),
            stall_seconds=_STALL_SECONDS,
        )
        outputs.append((encode, finished.wall_seconds))
        done += encode.share
    await work.enter("verify")
    return [await _verify(work, encode, info, seconds) for encode, seconds in outputs]


def _progress(
    work: Work, duration: float | None, base: float, span: float
) -> Callable[[str], bool]:
    """Reads `-progress`: out_time against the expected duration. Unknown lengths show no
    percent."""
    last = 0

    def line(text: str) -> bool:
        nonlocal last
        name, _, value = text.partition("=")
        if name not in ("out_time_us", "total_size", "frame") or not value.isdigit():
            return False
        moved = int(value) > last if name == "out_time_us" else False
        if name == "out_time_us":
            last = max(last, int(value))
            if duration:
                work.progress(base + span * min(last / 1e6 / duration, 1.0))
        return moved

    return line


async def _poster(work: Work, wanted: PosterOutput, info: MediaInfo) -> Output:
    """A still at a good frame, as JPEG: a dark one is only taken when there is no better."""
    video = info.video
    assert video is not None
    path = await work.fetch()
    width, height = still_size(video, wanted.short_side)
    png = await take_still(work, path, info, width, height, name=wanted.name)
    part, target = work.out / f"{wanted.name}.part", work.out / f"{wanted.name}.jpg"
    want = {"format": "jpeg", "width": width, "height": height, "quality": wanted.quality}
    answer = await stills.make(work, png, [want], [part], 60)
    stills.detach(part, target)
    made = answer["outputs"][0]
    output = Output(
        target.name, target, "image/jpeg", made["width"], made["height"], seconds=made["seconds"]
    )
    await stills.verify(work, output, format="jpeg")
    return output


def still_size(video: VideoStream, short_side: int) -> tuple[int, int]:
    """As `fitted`, but a still may have odd sides."""
    scale = min(1.0, short_side / min(video.width, video.height))
    return max(1, round(video.width * scale)), max(1, round(video.height * scale))


async def take_still(
    work: Work,
    path: Path,
    info: MediaInfo,
    width: int,
    height: int,
    *,
    name: str,
    frames: int = 100,
) -> Path:
    """A good frame as PNG. Looks in from the beginning, then later if that was dark."""
    video = info.video
    assert video is not None
    duration = info.duration_seconds or 0.0
    best: tuple[float, Path] | None = None
    for number, at in enumerate((duration * 0.1 if duration > 20 else 0.0, duration * 0.5)):
        target = work.out / f"{name}.{number}.png"
        args = plan_still(video, width, height, target.name, at=at, frames=frames)
        command = Command("ffmpeg", args, path, f"{name} at {at:.1f} s")
        jail = _jail(work, wall_seconds=120, write=True)
        finished = await work.run_tool(command, jail)
        if finished.returncode != 0 or not target.exists():
            # A spot that cannot be decoded is no reason to give up before the other was tried.
            if number == 0 and duration > 0:
                continue
            if best is None and finished.returncode != 0:
                raise _failure(finished, command, jail)
            break
        light = _brightness((await stills.preview(work, target))["average_color"])
        if best is None or light > best[0]:
            best = light, target
        if light >= _DARK:
            break
    if best is None:
        raise Failure(Code.CORRUPT_INPUT, "No frame of the video could be decoded.")
    return best[1]


def _brightness(color: str) -> float:
    """Luma of #rrggbb, 0 to 255 (BT.709 weights)."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


async def _verify(work: Work, encode: Encode, info: MediaInfo, seconds: float) -> Output:
    """The output is what was planned and decodes from end to end. Raises Failure."""
    path = work.out / encode.file
    made = await _probe_output(work, path)
    _hold(encode, made, info)
    if not _index_in_front(path):
        raise Failure(Code.OUTPUT_INVALID, "The index of the output is not in front.")
    args = (
        *("-hide_banner", "-nostdin", "-loglevel", "error", "-xerror", "-nostats"),
        *probe.INPUT_GUARD,
        *("-i", "fd:", "-map", "0", "-f", "null", "-"),
    )
    wall = 60 + 2 * (made.duration_seconds or 0)
    command = Command("ffmpeg", args, path, f"decode {encode.name}")
    jail = _jail(work, wall_seconds=wall)
    finished = await work.run_tool(command, jail)
    if finished.stopped_for is not None:
        raise _failure(finished, command, jail)
    if finished.returncode != 0 or finished.stderr_tail.strip():
        raise Failure(Code.OUTPUT_INVALID, f"The output {encode.file} does not decode cleanly.")
    return Output(
        encode.file,
        path,
        encode.content_type,
        width=encode.width,
        height=encode.height,
        duration_seconds=made.duration_seconds,
        seconds=round(seconds, 3),
    )


async def _probe_output(work: Work, path: Path) -> MediaInfo:
    finished = await work.run_tool(
        Command("ffprobe", probe.output_args(), path, "check"), _jail(work, wall_seconds=120)
    )
    if finished.returncode != 0:
        raise Failure(Code.OUTPUT_INVALID, "The output cannot be read.")
    return probe.parse(finished.stdout, work.settings)


def _hold(encode: Encode, made: MediaInfo, source: MediaInfo) -> None:
    """Compare an output with its plan and its source. Raises Failure."""

    def expect(holds: bool, what: str) -> None:
        if not holds:
            raise Failure(Code.OUTPUT_INVALID, f"{encode.file}: {what}.")

    if encode.width is not None:
        expect(made.video is not None, "it has no picture")
        assert made.video is not None
        expect(
            (made.video.width, made.video.height) == (encode.width, encode.height),
            "its size is off",
        )
        expect(made.video.pixel_format == "yuv420p", "its pixel format is off")
        expect((made.video.frames or 0) > 0, "it has no frames")
        expect(made.video.rotation == 0, "it is still turned")
    expect((made.audio is not None) == encode.has_audio, "its sound is missing")
    length, wanted = made.duration_seconds, source.duration_seconds
    expect(length is not None and length > 0, "it has no length")
    if wanted is not None and length is not None and wanted - length > max(0.5, 0.02 * wanted):
        raise Failure(
            Code.TRUNCATED_INPUT,
            f"The file says {wanted:.1f} s, but only {length:.1f} s of it could be decoded.",
        )


def _index_in_front(path: Path) -> bool:
    """Whether `moov` comes before `mdat` among the top-level boxes (ISO/IEC 14496-12)."""
    with path.open("rb") as file:
        while len(header := file.read(8)) == 8:
            size, name = struct.unpack(">I4s", header)
            if name in (b"moov", b"mdat"):
                return bool(name == b"moov")
            if size == 1:
                (size,) = struct.unpack(">Q", file.read(8))
                size -= 8
            if size < 8:
                return False
            file.seek(size - 8, 1)
    return False


def _filters(
    video: VideoStream, width: int, height: int, max_rate: float | None
) -> tuple[str, ...]:
    """The picture's way to ordinary, progressive, square-pixel video. ffmpeg turns it upright."""
    steps: list[str] = []
    if video.interlaced:
        steps.append("bwdif=mode=send_frame:deint=interlaced")
    if max_rate is not None and video.frame_rate is not None and video.frame_rate > max_rate:
        steps.append(f"fps={max_rate:g}")
    # An HDR frame is scaled first: tone mapping in floating point is the costly part.
    steps.append(f"scale={width}:{height}:flags=bicubic")
    if video.hdr is not None:
        steps.append(_TONE_MAP)
    steps += ["setsar=1", "format=yuv420p"]
    return tuple(steps)


def _decoder(video: VideoStream) -> tuple[str, ...]:
    # Only libvpx reads the side stream in which WebM keeps transparency.
    decoders = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
    if video.has_alpha and video.codec in decoders:
        return ("-c:v", decoders[video.codec])
    return ()


def _sample_rate(source: int) -> str:
    return str(min((r for r in (22050, 32000, 44100, 48000) if r >= source), default=48000))


def _encode_jail(work: Work, info: MediaInfo) -> Jail:
    """Limits by what the source is: a slow machine needs some minutes for each of megapixel-
    seconds."""
    duration = info.duration_seconds or work.settings.max_duration_seconds
    pixels = info.video.stored_width * info.video.stored_height if info.video else 100_000
    seconds = 120 + duration * max(1.0, pixels / 300_000) * 4
    size = 64 * 2**20 + int(duration * 4_000_000)
    return _jail(work, wall_seconds=seconds, write=True, file_bytes=size)


def _jail(
    work: Work, *, wall_seconds: float, write: bool = False, file_bytes: int = 256 << 20
) -> Jail:
    wall = wall_seconds * work.settings.time_limit_factor
    return Jail(
        Limits(
            memory_bytes=work.settings.tool_memory_bytes,
            cpu_seconds=int(wall * 8) + 10,  # threads: the wall clock is the real limit
            file_bytes=file_bytes,
            wall_seconds=wall,
        ),
        write=(work.out,) if write else (),
    )


async def _run(work: Work, command: Command, jail: Jail, **watch: Any) -> Finished:
    """Run a tool that must succeed. Raises the Failure that its end stands for."""
    finished = await work.run_tool(command, jail, **watch)
    if finished.stopped_for is not None or finished.returncode != 0:
        raise _failure(finished, command, jail)
    return finished


def _failure(finished: Finished, command: Command, jail: Jail) -> Failure:
    known = tools.classify(finished, tool=command.tool, limits=jail.limits)
    return known or Failure(Code.TOOL_FAILED)

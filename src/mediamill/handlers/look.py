"""The first look at a video or sound: what it is, how long it really is, whether its end is
there."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from mediamill import probe
from mediamill.failures import Code, Failure
from mediamill.handlers import Reroute, Work, checks, running, stills
from mediamill.media import Description
from mediamill.probe import MediaInfo
from mediamill.tools import Command

_SAMPLED_FRAMES: Final = 60
_TAIL_SECONDS: Final = 5.0
_MOST_INDEX_BYTES: Final = 64 << 20


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
    if work.claim.role == "preview":
        return info
    info = await _look_at_fields(work, path, info)
    if work.claim.role != "main":
        return info
    if info.video is not None and not info.has_index:
        info = replace(info, key_frames=await _key_frames(work, path, info))
    duration, seconds = await _scan(work, path, info)
    probe.check_duration(duration, work.settings)
    info = replace(info, duration_seconds=duration)
    if info.video is not None and info.audio is not None:
        tail = await checks.tail(work, path, info, seconds=_TAIL_SECONDS)
        info = replace(info, sound_after_picture=tail.sound_after_picture)
    if info.video is not None:
        info = replace(info, picture_seconds=seconds)
    await describe(work, info, seen.type if seen else None)
    return info


async def describe(work: Work, info: MediaInfo, sniffed: str | None, **more: object) -> None:
    """Show what is known, and `more` under `info`."""
    await work.describe(
        Description(
            kind=info.kind,
            detected_type=probe.detected_type(info, sniffed),
            width=info.video.width if info.video else None,
            height=info.video.height if info.video else None,
            duration_seconds=info.duration_seconds,
            info=info.as_dict() | more,
        )
    )


async def run_probe(work: Work, path: Path) -> MediaInfo:
    """Ask ffprobe. Raises Failure."""
    await asyncio.to_thread(_read_outline, path)
    command = Command("ffprobe", probe.ffprobe_args(), path, "probe")
    finished = await running.run(work, command, running.jail(work, wall_seconds=60))
    return probe.parse(finished.stdout, work.settings)


def _read_outline(path: Path) -> None:
    """Refuse what the tools would call by another name: an index that is cut, and encrypted samples
    (ISO/IEC 23001-7), which they hide behind the codec inside. Raises Failure."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(12)
        told = int.from_bytes(head[4:8], "little")
        if head[:4] == b"RIFF" and head[8:] in (b"WAVE", b"AVI ") and size - 8 < told < 0xFFFFFF00:
            raise Failure(
                Code.TRUNCATED_INPUT, f"The file says {told + 8:,} bytes, but has {size:,}."
            )
        file.seek(0)
        while len(header := file.read(8)) == 8:
            size, name = struct.unpack(">I4s", header)
            begin = 8
            if size == 1:
                (size,) = struct.unpack(">Q", file.read(8).rjust(8, b"\0"))
                begin = 16
            if name == b"moov":
                wanted = min(max(size - begin, 0), _MOST_INDEX_BYTES)
                index = file.read(wanted)
                if len(index) < wanted:
                    raise Failure(Code.TRUNCATED_INPUT, "The index of the file is cut.")
                if b"sinf" in index and (b"encv" in index or b"enca" in index):
                    raise Failure(Code.DRM_ENCRYPTED)
                return
            if size < begin or not name.isalnum():
                return
            file.seek(size - begin, 1)


async def _look_at_fields(work: Work, path: Path, info: MediaInfo) -> MediaInfo:
    """Whether frames are combed though the file does not say so."""
    video = info.video
    if video is None or not probe.may_be_interlaced(video):
        return info
    at = (info.duration_seconds or 0.0) * 0.2
    args = probe.sample_fields_args(video, at=at, frames=_SAMPLED_FRAMES)
    command = Command("ffmpeg", args, path, "fields")
    finished = await work.run_tool(command, running.jail(work, wall_seconds=60))
    if finished.returncode != 0 or not probe.looks_interlaced(finished.stderr_tail):
        return info
    return replace(info, video=replace(video, interlaced=True, interlaced_by="sampled"))


async def _key_frames(work: Work, path: Path, info: MediaInfo) -> tuple[float, ...]:
    assert info.video is not None
    found: list[float] = []

    def line(text: str) -> None:
        at, _, flags = text.partition(",")
        if "K" in flags:
            with suppress(ValueError):
                found.append(round(float(at) - info.start_seconds, 3))

    confined = running.jail(work, wall_seconds=60 + work.original.size / 5_000_000)
    command = Command("ffprobe", probe.key_frame_args(info.video), path, "key frames")
    finished = await work.run_tool(command, confined, on_line=line)
    if finished.stopped_for is not None:
        raise running.failure(finished, command, confined)
    return tuple(sorted(found))


async def _scan(work: Work, path: Path, info: MediaInfo) -> tuple[float | None, float | None]:
    """The real length, and that of the stream that was looked at, which may end before others."""
    scan = probe.Scan()
    confined = running.jail(work, wall_seconds=60 + work.original.size / 5_000_000)
    args = probe.scan_args(info, limit_seconds=work.settings.max_duration_seconds + 1)
    command = Command("ffmpeg", args, path, "scan")
    finished = await work.run_tool(command, confined, on_line=scan.line)
    if finished.stopped_for is not None:
        raise running.failure(finished, command, confined)
    real = probe.check_scan(info, scan, finished.stderr_head + finished.stderr_tail)
    return real, scan.seconds

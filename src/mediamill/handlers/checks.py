"""What must be true of every output before anybody sees it. A tool's exit code 0 is no proof."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path

from mediamill import probe
from mediamill.failures import Code, Failure
from mediamill.handlers import Work, running
from mediamill.probe import MediaInfo, VideoStream
from mediamill.tools import Command


async def probe_output(work: Work, path: Path, *, packets: bool = True) -> MediaInfo:
    """ffprobe on an output of ours. Raises Failure(OUTPUT_INVALID)."""
    finished = await work.run_tool(
        Command("ffprobe", probe.output_args(count=packets), path, f"check {path.name}"),
        running.jail(work, wall_seconds=120),
    )
    if finished.returncode != 0:
        raise Failure(Code.OUTPUT_INVALID, f"The output {path.name} cannot be read.")
    return probe.parse(finished.stdout, work.settings)


async def decode(work: Work, path: Path, seconds: float | None) -> None:
    """An output of ours decodes from end to end without a complaint. Raises Failure."""
    args = (
        *("-hide_banner", "-nostdin", "-loglevel", "error", "-xerror", "-nostats"),
        *probe.INPUT_GUARD,
        *("-i", "fd:", "-map", "0", "-f", "null", "-"),
    )
    command = Command("ffmpeg", args, path, f"decode {path.name}")
    confined = running.jail(work, wall_seconds=60 + 2 * (seconds or 0))
    finished = await work.run_tool(command, confined)
    if finished.stopped_for is not None:
        raise running.failure(finished, command, confined)
    if finished.returncode != 0 or finished.stderr_tail.strip():
        raise Failure(Code.OUTPUT_INVALID, f"The output {path.name} does not decode cleanly.")


def length(found: float | None, source: MediaInfo, *, picture: bool = False) -> None:
    """An output is as long as its source says. Raises Failure."""
    if not found:
        raise Failure(Code.OUTPUT_INVALID, "An output has no length.")
    wanted = source.picture_seconds if picture else source.duration_seconds
    if wanted is not None and wanted - found > max(0.5, 0.02 * wanted):
        raise Failure(
            Code.TRUNCATED_INPUT,
            f"The file says {wanted:.1f} s, but only {found:.1f} s of it could be decoded.",
        )


def hold_together(name: str, found: MediaInfo, source: MediaInfo) -> None:
    """Picture and sound begin as far from each other as in the source, within a frame. Raises
    Failure."""
    assert found.video is not None
    assert found.audio is not None
    assert source.video is not None
    assert source.audio is not None
    frame = 1 / float(found.video.frame_rate or Fraction(25))
    apart = found.audio.start_seconds - found.video.start_seconds
    was = source.audio.start_seconds - source.video.start_seconds
    if abs(apart - was) > max(frame, 0.045) and abs(apart) > max(frame, 0.045):
        raise Failure(
            Code.OUTPUT_INVALID,
            f"{name}: sound and picture begin {apart:.3f} s apart, in the source {was:.3f} s.",
        )


def colors(name: str, found: VideoStream, hdr: str | None) -> None:
    """An encoded picture says which colors it has. Raises Failure(OUTPUT_INVALID)."""
    transfer = {"pq": "smpte2084", "hlg": "arib-std-b67", None: "bt709"}[hdr]
    primaries = "bt709" if hdr is None else "bt2020"
    if (found.transfer, found.primaries) != (transfer, primaries):
        raise Failure(
            Code.OUTPUT_INVALID,
            f"{name}: its color tags are {found.primaries} {found.transfer}, not {primaries} "
            f"{transfer}.",
        )


def index_in_front(path: Path) -> bool:
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

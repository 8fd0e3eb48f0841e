"""What must be true of every output before anybody sees it. A tool's exit code 0 is no proof."""

from __future__ import annotations

import re
import struct
from fractions import Fraction
from pathlib import Path
from typing import Final

from mediamill import probe
from mediamill.failures import Code, Failure
from mediamill.handlers import Work, running
from mediamill.probe import MediaInfo, VideoStream
from mediamill.tools import Command

SMALL_SIDE: Final = 160
SMALL: Final = f"scale={SMALL_SIDE}:{SMALL_SIDE}:flags=area,format=yuv420p"
"""What is compared is made small, so that it tells wrong frames and colors from coarse coding."""
_LIKENESS: Final = 0.75
_SOUND_FRAME: Final = 1024
_TAIL_SECONDS: Final = 10.0
_ROUNDING: Final = 0.002  # of two containers that count in milliseconds


async def probe_output(work: Work, path: Path, *, packets: bool = True) -> MediaInfo:
    """ffprobe on an output of ours. Raises Failure(OUTPUT_INVALID)."""
    finished = await work.run_tool(
        Command("ffprobe", probe.output_args(count=packets), path, f"check {path.name}"),
        running.jail(work, wall_seconds=120),
    )
    if finished.returncode != 0:
        raise Failure(Code.OUTPUT_INVALID, f"The output {path.name} cannot be read.")
    return probe.parse(finished.stdout, work.settings)


async def tail(
    work: Work, path: Path, info: MediaInfo, *, seconds: float = _TAIL_SECONDS
) -> probe.Tail:
    """When picture and sound of a file end, as far as its last `seconds` show it. Raises Failure
    if it took too long."""
    found = probe.Tail(info)
    confined = running.jail(work, wall_seconds=120)
    command = Command("ffprobe", probe.tail_args(info, seconds), path, f"end of {path.name}")
    finished = await work.run_tool(command, confined, on_line=found.line)
    if finished.stopped_for is not None:
        raise running.failure(finished, command, confined)
    return found


async def decode(work: Work, path: Path, seconds: float | None, *, picture: bool = False) -> None:
    """An output of ours decodes from end to end without a complaint; `picture` says whether it has
    one. Raises Failure."""
    args = (
        *("-hide_banner", "-nostdin", "-loglevel", "error", "-xerror", "-nostats"),
        # What is smoothed after a block was read shows no fault, and costs a fifth.
        *(("-skip_loop_filter", "all") if picture else ()),
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


async def hold_together(
    work: Work, path: Path, found: MediaInfo, source: MediaInfo, *, damaged: bool
) -> None:
    """Picture and sound begin and end as far from each other as in the source. Where the source is
    damaged, what is missing at its end is told by its length. Raises Failure."""
    assert found.video is not None
    assert found.audio is not None
    assert source.video is not None
    assert source.audio is not None
    now = found.audio.start_seconds - found.video.start_seconds
    was = source.audio.start_seconds - source.video.start_seconds
    rate = found.video.frame_rate
    apart(path.name, "begin", now, was, source=source, rate=rate)
    if not damaged:
        ended = (await tail(work, path, found)).sound_after_picture
        apart(path.name, "end", ended, source.sound_after_picture, source=source, rate=rate)


def apart(
    name: str,
    where: str,
    now: float | None,
    was: float | None,
    *,
    source: MediaInfo,
    rate: Fraction | None,
) -> None:
    """Sound and picture `begin` or `end` as many seconds from each other as in the source, within
    a frame: of the picture, at its rate here or there, or of the sound, where that is longer.

    Raises Failure(OUTPUT_INVALID).
    """
    if was is None:
        return
    if now is None:
        raise Failure(Code.OUTPUT_INVALID, f"{name}: it is not to be seen where it {where}s.")
    assert source.video is not None
    assert source.audio is not None
    frame = max(1 / (r or Fraction(25)) for r in (rate, source.video.frame_rate))
    heard = Fraction(_SOUND_FRAME, source.audio.sample_rate)
    if abs(now - was) > max(frame, heard) + Fraction(_ROUNDING):
        raise Failure(
            Code.OUTPUT_INVALID,
            f"{name}: sound and picture {where} {now:.3f} s apart, in the source {was:.3f} s.",
        )


async def likeness(work: Work, args: tuple[str, ...], count: int, label: str) -> list[float]:
    """Run a comparison of the original, on standard input, with files of ours; what the filters
    `ssim@0`, `ssim@1` … found. Raises Failure."""
    confined = running.jail(work, wall_seconds=300, write=True, scratch_bytes=1 << 50)
    finished = await running.run(work, Command("ffmpeg", args, await work.fetch(), label), confined)
    found = re.findall(r"ssim@(\d+) @ .*SSIM .*All:(-?[\d.]+)", finished.stderr_tail)
    scores = {int(number): float(score) for number, score in found}
    if set(scores) != set(range(count)):
        raise Failure(Code.OUTPUT_INVALID, f"{label}: nothing could be compared.")
    return [scores[number] for number in range(count)]


def alike(name: str, found: float, *, at: float) -> None:
    """A likeness is above the floor. Raises Failure(OUTPUT_INVALID)."""
    if found < _LIKENESS:
        raise Failure(
            Code.OUTPUT_INVALID,
            f"{name}: at {at:.1f} s it does not look like the original (likeness {found:.2f}).",
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

"""Picture tracks on a grid: one decode, several sizes, frames at a constant rate, and key frames at
the same places in each.

A grid begins where the container begins and counts output frames, so that any stretch of it can be
made alone and joined with its neighbors: what is asked for is a first frame and the one after the
last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, Self

from mediamill import probe
from mediamill.failures import Code, Failure
from mediamill.handlers import Work, checks, picture, running
from mediamill.handlers.picture import Coding
from mediamill.handlers.running import PACE, Meter
from mediamill.probe import MediaInfo
from mediamill.tools import Command, Finished

_MARGIN_SECONDS: Final = 3.0
_BEFORE_SECONDS: Final = 0.5
_COMPARED_FRAMES: Final = 8


@dataclass(frozen=True, slots=True)
class Grid:
    """`frames` at `rate` from `start_seconds` of the source's clock, a key frame every `group`."""

    rate: Fraction
    start_seconds: float
    group: int
    frames: int | None
    """None where the source does not say how long it is."""
    key_frames: tuple[float, ...] = ()
    """As in `MediaInfo`."""

    def near(self, first: int) -> Grid:
        """The same for somebody who begins at that frame: with the key frame that he needs."""
        begin = self.seconds(first) - _BEFORE_SECONDS
        before = [key for key in self.key_frames if key <= begin]
        return replace(self, key_frames=(before[-1],) if before else self.key_frames[:1])

    @property
    def timescale(self) -> int:
        """Units of a second in which every frame begins at a whole number."""
        return self.rate.numerator * math.ceil(10_000 / self.rate.numerator)

    @property
    def tick(self) -> int:
        """Length of a frame in those units."""
        return int(self.timescale / self.rate)

    def seconds(self, frames: int) -> float:
        return float(frames / self.rate)

    def as_dict(self) -> dict[str, Any]:
        return {
            "rate": f"{self.rate.numerator}/{self.rate.denominator}",
            "start_seconds": self.start_seconds,
            "group": self.group,
            "frames": self.frames,
            "key_frames": list(self.key_frames),
        }

    @classmethod
    def of(cls, known: Mapping[str, Any]) -> Self:
        """From `as_dict`."""
        return cls(
            Fraction(known["rate"]),
            known["start_seconds"],
            known["group"],
            known["frames"],
            tuple(known["key_frames"]),
        )


@dataclass(frozen=True, slots=True)
class Track:
    """One size of the picture, as the file `<stem>.track.mp4` in scratch."""

    name: str
    coding: Coding
    stem: str

    @property
    def file(self) -> str:
        return f"{self.stem}.track.mp4"


def grid(info: MediaInfo, *, most_rate: float, group_seconds: float) -> Grid:
    """The grid of a source. Its clock begins with the container, as it does for the sound."""
    video = info.video
    assert video is not None
    rate = picture.steady_rate(video, most_rate)
    seconds = info.picture_seconds or info.duration_seconds
    group = max(1, round(rate * Fraction(group_seconds).limit_denominator(1000)))
    frames = None if seconds is None else max(1, round(seconds * rate))
    return Grid(rate, info.start_seconds, group, frames, info.key_frames)


def plan(
    info: MediaInfo,
    on: Grid,
    tracks: Sequence[Track],
    *,
    first: int = 0,
    after: int | None = None,
    limit_seconds: float,
    threads: int | None = None,
) -> tuple[str, ...]:
    """Frames `first` to `after` of every track in one run; `after` None goes to the end."""
    video = info.video
    assert video is not None
    graph = [
        ",".join((f"[0:{video.index}]null", *_on_grid(info, on, first, after)))
        + f",split={len(tracks)}"
        + "".join(f"[s{n}]" for n in range(len(tracks)))
    ]
    outputs: list[str] = []
    for number, track in enumerate(tracks):
        coding = track.coding
        steps = picture.shrink(video, coding.width, coding.height, hdr=coding.hdr)
        graph.append(f"[s{number}]{','.join(steps)}[v{number}]")
        outputs += [
            *("-map", f"[v{number}]", *picture.encoder(coding, group=on.group)),
            *(("-threads", str(threads)) if threads else ()),
            *("-fps_mode", "passthrough", "-video_track_timescale", str(on.timescale)),
            *("-t", f"{limit_seconds:.3f}", "-an", *running.NO_METADATA, "-f", "mp4", track.file),
        ]
    return (
        *(*running.QUIET, *running.PROGRESS, *running.TOLERANT, "-copyts"),
        *picture.decoder(video),
        *(*_seek(on, first), *probe.INPUT_GUARD, "-i", "fd:"),
        *("-filter_complex", ";".join(graph)),
        *outputs,
    )


def _seek(on: Grid, first: int) -> tuple[str, ...]:
    begin = on.seconds(first) - _MARGIN_SECONDS
    if on.key_frames:
        # Without an index a seek ends anywhere, and decoding begins at the next key frame.
        (key,) = on.near(first).key_frames
        begin = key - _BEFORE_SECONDS
    # From the key frame before: a picture that stays for long has its only frame far back.
    return ("-noaccurate_seek", "-ss", f"{begin:.3f}") if begin > 0 else ()


def _on_grid(info: MediaInfo, on: Grid, first: int, after: int | None) -> tuple[str, ...]:
    assert info.video is not None
    rate = f"{on.rate.numerator}/{on.rate.denominator}"
    beginning = ":start_time=0" if first == 0 else ""
    end = "" if after is None else f":end_pts={after}"
    return (
        *picture.straighten(info.video),
        f"setpts=PTS-({on.start_seconds:.6f})/TB",
        f"fps={rate}{beginning}",
        f"trim=start_pts={first}{end}",
        "setpts=PTS-STARTPTS",
    )


async def encode(
    work: Work,
    info: MediaInfo,
    on: Grid,
    tracks: Sequence[Track],
    meter: Meter,
    *,
    first: int = 0,
    after: int | None = None,
) -> Finished:
    """Run the plan. Raises Failure."""
    end = after if after is not None else on.frames
    seconds = on.seconds(end - first) if end is not None else work.settings.max_duration_seconds
    cost = sum(t.coding.work(on.rate, seconds) for t in tracks)
    most = max(t.coding.kbps for t in tracks) * 125 * seconds
    args = plan(
        info,
        on,
        tracks,
        first=first,
        after=after,
        limit_seconds=work.settings.max_duration_seconds,
    )
    confined = running.jail(
        work,
        wall_seconds=PACE.limit(cost),
        write=True,
        file_bytes=(64 << 20) + int(2 * most),
        scratch_bytes=1 << 50,
    )
    label = ", ".join(t.name for t in tracks)
    watched = meter.watch([t.stem for t in tracks], cost, seconds if end is not None else None)
    finished = await running.run(
        work,
        Command("ffmpeg", args, await work.fetch(), label),
        confined,
        on_line=watched.line,
        stall_seconds=running.STALL_SECONDS,
    )
    meter.finish(watched)
    PACE.learn(cost, finished.wall_seconds)
    return finished


class _Packets:
    """What ffprobe says of every packet of a track, line by line."""

    def __init__(self) -> None:
        self.count = self.total = self.last = 0
        self.first: int | None = None
        self.keys: list[int] = []

    def line(self, line: str) -> None:
        at, _, flags = line.partition(",")
        if not at.lstrip("-").isdigit():
            return
        pts = int(at)
        self.count += 1
        self.total += pts
        self.last = max(self.last, pts)
        self.first = pts if self.first is None else min(self.first, pts)
        if "K" in flags:
            self.keys.append(pts)


async def verify(
    work: Work, path: Path, on: Grid, *, frames: int | None = None, slack: int = 0
) -> int:
    """A track lies on its grid: no frame missing, none twice, key frames exactly where they are to
    be. Returns the number of its frames, which may differ from `frames` by `slack`.

    Raises Failure.
    """
    seen = _Packets()
    args = (
        *("-hide_banner", "-loglevel", "error", *probe.INPUT_GUARD, "-select_streams", "v:0"),
        *("-show_entries", "packet=pts,flags", "-of", "csv=p=0", "-i", "fd:"),
    )
    confined = running.jail(work, wall_seconds=600)
    await running.run(
        work, Command("ffprobe", args, path, f"frames of {path.name}"), confined, on_line=seen.line
    )

    def expect(holds: bool, what: str) -> None:
        if not holds:
            raise Failure(Code.OUTPUT_INVALID, f"{path.name}: {what}.")

    count, tick = seen.count, on.tick
    expect(count > 0 and seen.first == 0, f"it begins at {seen.first}")
    gapless = seen.total == tick * count * (count - 1) // 2 and seen.last == tick * (count - 1)
    expect(gapless, "its frames do not follow each other evenly")
    keys = list(range(0, count * tick, on.group * tick))
    expect(seen.keys == keys, "its key frames are not where they should be")
    if frames is not None:
        expect(abs(count - frames) <= slack, f"it has {count} frames, planned were {frames}")
    return count


async def join(work: Work, pieces: Sequence[Path], on: Grid, track: Track) -> Path:
    """Pieces of a track, in their order, as one. Raises Failure."""
    listing = work.out / f"{track.name}.txt"
    listing.write_text("".join(f"file '{piece.name}'\n" for piece in pieces))
    size = sum(piece.stat().st_size for piece in pieces)
    args = (
        *(*running.QUIET, "-protocol_whitelist", "file", "-f", "concat", "-safe", "0"),
        *("-i", listing.name, "-map", "0:v", "-c", "copy", *running.NO_METADATA),
        *("-video_track_timescale", str(on.timescale), "-f", "mp4", track.file),
    )
    confined = running.jail(
        work,
        wall_seconds=120 + size / 5e6,
        write=True,
        file_bytes=2 * size + (64 << 20),
        scratch_bytes=1 << 50,
    )
    await running.run(work, Command("ffmpeg", args, None, f"join {track.name}"), confined)
    return work.out / track.file


async def decode_seams(work: Work, path: Path, on: Grid, seams: Sequence[int]) -> None:
    """Decode from a group before each of these frames to a group after it. Raises Failure."""
    for seam in seams:
        begin = on.seconds(max(0, seam - on.group))
        args = (
            *("-hide_banner", "-nostdin", "-loglevel", "error", "-xerror", "-nostats"),
            *("-ss", f"{begin:.6f}", *probe.INPUT_GUARD, "-i", "fd:", "-map", "0:v"),
            *("-frames:v", str(2 * on.group), "-f", "null", "-"),
        )
        confined = running.jail(work, wall_seconds=120)
        finished = await running.run(
            work, Command("ffmpeg", args, path, f"seam of {path.name} at {seam}"), confined
        )
        if finished.stderr_tail.strip():
            raise Failure(Code.OUTPUT_INVALID, f"{path.name}: it does not decode at frame {seam}.")


async def compare(
    work: Work,
    info: MediaInfo,
    on: Grid,
    tracks: Sequence[Track],
    frames: int,
    *,
    places: Sequence[float],
) -> dict[str, float]:
    """By stem, the lowest likeness (SSIM, 1 is equal) of finished tracks and the source at some
    places, given as shares of their length.

    Raises Failure(OUTPUT_INVALID) below the floor.
    """
    groups = max(0, (frames - 1) // on.group)

    async def at(first: int) -> list[float]:
        found = await likeness(work, info, on, tracks, first=first, frames=_COMPARED_FRAMES)
        for track, score in zip(tracks, found, strict=True):
            checks.alike(track.name, score, at=on.seconds(first))
        return found

    firsts = {int(groups * place) * on.group for place in places}
    scores = await running.together(*(at(first) for first in sorted(firsts)))
    lowest = [min(of_track) for of_track in zip(*scores, strict=True)]
    return {track.stem: score for track, score in zip(tracks, lowest, strict=True)}


async def likeness(
    work: Work, info: MediaInfo, on: Grid, tracks: Sequence[Track], *, first: int, frames: int
) -> list[float]:
    """The likeness of each track from frame `first` on, from one decode of the source. Raises
    Failure."""
    video = info.video
    assert video is not None
    after = first + frames
    before = max(0, first // on.group * on.group)
    kinds = list(dict.fromkeys(track.coding.hdr for track in tracks))
    graph = [
        ",".join((f"[0:{video.index}]null", *_on_grid(info, on, first, after)))
        + f",split={len(kinds)}"
        + "".join(f"[k{n}]" for n in range(len(kinds)))
    ]
    for number, hdr in enumerate(kinds):
        mine = [n for n, track in enumerate(tracks) if track.coding.hdr == hdr]
        small = picture.shrink(video, checks.SMALL_SIDE, checks.SMALL_SIDE, hdr=hdr)
        graph.append(
            ",".join((f"[k{number}]null", *small, checks.SMALL, f"split={len(mine)}"))
            + "".join(f"[s{n}]" for n in mine)
        )
    ours = (
        f"trim=start_pts={first * on.tick}:end_pts={after * on.tick}",
        "setpts=PTS-STARTPTS",
        f"settb=1/{on.timescale}",
        checks.SMALL,
    )
    seek = ("-ss", f"{on.seconds(before):.6f}", "-noaccurate_seek") if before else ()
    inputs: list[str] = []
    outputs: list[str] = []
    for number, track in enumerate(tracks):
        inputs += [*seek, *running.OWN_INPUT, "-i", track.file]
        graph.append(f"[{number + 1}:v]{','.join(ours)}[o{number}]")
        graph.append(f"[s{number}][o{number}]ssim@{number}[d{number}]")
        outputs += ["-map", f"[d{number}]", "-f", "null", "-"]
    args = (
        *("-hide_banner", "-nostdin", "-loglevel", "info", "-nostats", "-copyts"),
        *(*picture.decoder(video), *_seek(on, first), *probe.INPUT_GUARD, "-i", "fd:"),
        *(*inputs, "-filter_complex", ";".join(graph), *outputs),
    )
    return await checks.likeness(work, args, len(tracks), f"compare at {first}")

"""Adaptive streaming of sound alone: a rung for each rate, a rendition for each language, in the
same files and playlists that a film has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from mediamill.failures import Code, Failure
from mediamill.handlers import Output, Work, checks, running, sound, streaming
from mediamill.handlers.running import Meter
from mediamill.handlers.streaming import MANIFEST, MASTER, Heard
from mediamill.probe import MediaInfo
from mediamill.recipes.video import SoundHlsOutput

_LATEST_START_SECONDS: Final = 0.045


async def make(
    work: Work, wanted: SoundHlsOutput, info: MediaInfo, meter: Meter
) -> tuple[list[Output], dict[str, Any]]:
    """Encode every rung, package them and check what came of it; and what the status says of it.

    Raises Failure.
    """
    rungs: dict[int, list[Heard]] = {kbps: [] for kbps in sorted(wanted.ladder)}
    shown: dict[str, Any] = {"way": "encoded", "reason": "adaptive streaming"}
    damaged = False
    spent = 0.0
    for name, label, language, audio in streaming.renditions(info.sounds):
        loudness = await sound.measure(work, audio, wanted.loudness, info.duration_seconds)
        if loudness is not None and audio == info.audio:
            shown["loudness"] = loudness.as_dict()
        for kbps, rung in rungs.items():
            file = f"{wanted.name}-{audio.index}-{kbps}.m4a"
            limit = work.settings.max_duration_seconds
            args = sound.plan("aac", kbps, audio, file, loudness, limit_seconds=limit, steady=True)
            finished = await sound.encode(work, args, file, info, meter)
            damaged = damaged or running.damaged(finished)
            spent += finished.wall_seconds
            default = audio == info.audio
            rung.append(Heard(f"{name}-{kbps}", label, language, work.out / file, default))
    streams = [
        rendition.stream(wanted.name, f"audio-{kbps}")
        for kbps, rung in rungs.items()
        for rendition in rung
    ]
    heard = [rendition.path for rung in rungs.values() for rendition in rung]
    await streaming.pack(work, streams, heard, wanted.name, seconds=wanted.segment_seconds)
    master = work.out / wanted.name / MASTER
    _in_order(master, [r for rung in rungs.values() for r in rung if r.default])
    outputs = await _verify(work, wanted, info, list(rungs.values()), seconds=spent)
    for path in heard:
        path.unlink()
    return outputs, shown | ({"damaged": True} if damaged else {})


def _in_order(master: Path, rungs: Sequence[Heard]) -> None:
    """One entry for each rung, lowest first, with its default rendition: the packager names every
    rendition of a rung as one."""
    lines = master.read_text().splitlines()
    tags = {uri: tag for tag, uri in pairwise(lines) if tag.startswith("#EXT-X-STREAM-INF:")}
    defaults = tuple(f'URI="{rung.name}.m3u8"' for rung in rungs)
    kept = [
        line.replace("DEFAULT=NO", "DEFAULT=YES") if any(d in line for d in defaults) else line
        for line in lines
        if line not in tags and not line.startswith("#EXT-X-STREAM-INF:")
    ]
    for rung in rungs:
        kept += [tags[f"{rung.name}.m3u8"], f"{rung.name}.m3u8"]
    master.write_text("\n".join(kept) + "\n")


async def _verify(
    work: Work,
    wanted: SoundHlsOutput,
    info: MediaInfo,
    rungs: Sequence[Sequence[Heard]],
    *,
    seconds: float,
) -> list[Output]:
    """Every rendition is whole and decodes, segments are as long as they say, and the master
    playlist names each rung once and says nothing of a picture. Raises Failure."""
    root = work.out / wanted.name

    def expect(holds: bool, what: str) -> None:
        if not holds:
            raise Failure(Code.OUTPUT_INVALID, f"{wanted.name}: {what}.")

    async def check(rendition: Heard) -> Output:
        path = root / f"{rendition.name}.mp4"
        found = await checks.probe_output(work, path)
        expect(found.video is None and found.audio is not None, f"{rendition.name} is no sound")
        assert found.audio is not None
        begins = abs(found.audio.start_seconds)
        expect(begins <= _LATEST_START_SECONDS, f"{rendition.name} begins late")
        checks.length(found.duration_seconds, info)
        streaming.check_segments(path, expect=expect)
        await checks.decode(work, path, found.duration_seconds)
        length = found.duration_seconds
        return Output(f"{wanted.name}/{path.name}", path, "audio/mp4", duration_seconds=length)

    made = await running.together(*(check(rendition) for rung in rungs for rendition in rung))
    lines = (root / MASTER).read_text().splitlines()
    named = [(tag, uri) for tag, uri in pairwise(lines) if tag.startswith("#EXT-X-STREAM-INF:")]
    defaults = [r.name for rung in rungs for r in rung if r.default]
    expect(
        [uri for _, uri in named] == [f"{name}.m3u8" for name in defaults],
        "the master playlist does not name each rung once",
    )
    for (tag, _), name in zip(named, defaults, strict=True):
        expect(re.search(r'CODECS="mp4a\.40\.2"', tag) is not None, f"{name} has no codec")
        streaming.check_bandwidth(tag, root / f"{name}.mp4", expect=expect)
        expect("RESOLUTION" not in tag and "FRAME-RATE" not in tag, f"{name} shows a picture")
    length = made[0].duration_seconds
    doors = [
        Output(
            f"{wanted.name}/{name}",
            root / name,
            streaming.TYPES[Path(name).suffix],
            duration_seconds=length,
            seconds=round(seconds, 3),
        )
        for name in (MASTER, MANIFEST)
    ]
    lists = [
        Output(f"{wanted.name}/{p.name}", p, streaming.TYPES[p.suffix])
        for p in sorted(root.glob("*.m3u8"))
        if p.name != MASTER
    ]
    expect(len(lists) == len(made), "a playlist is missing or too many")
    return [*doors, *made, *lists]

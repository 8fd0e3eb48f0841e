"""Text tracks as WebVTT; what cannot become text is told, and fails nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mediamill import probe
from mediamill.handlers import Output, Work, running
from mediamill.probe import MediaInfo, SubtitleStream
from mediamill.tools import Command

_MOST_BYTES: Final = 32 << 20
_CUE: Final = re.compile(
    r"^(?:\d{2,}:)?\d{2}:\d{2}\.\d{3} --> (?:\d{2,}:)?\d{2}:\d{2}\.\d{3}", re.M
)


@dataclass(frozen=True, slots=True)
class Track:
    """A text track as a WebVTT file in scratch."""

    stream: SubtitleStream
    path: Path


def names(base: str, streams: Sequence[SubtitleStream]) -> list[str]:
    """A file name for each, by language, without repeats."""
    given: list[str] = []
    for stream in streams:
        stem = f"{base}-{stream.language or 'und'}{'-forced' if stream.forced else ''}"
        name, number = stem, 2
        while f"{name}.vtt" in given:
            name, number = f"{stem}-{number}", number + 1
        given.append(f"{name}.vtt")
    return given


def labels(tracks: Sequence[Track]) -> list[str]:
    """What a player shows for each, without repeats."""
    given: list[str] = []
    for track in tracks:
        text = track.stream.title or track.stream.language or "Subtitles"
        label = base = re.sub(r"[^\w .()-]", " ", text)
        number = 2
        while label in given:
            label, number = f"{base} {number}", number + 1
        given.append(label)
    return given


async def extract(work: Work, base: str, info: MediaInfo) -> tuple[list[Track], list[str]]:
    """Every text track: those that lie beside the original, then its own, and what is to be said of
    the others."""
    notes = [
        f"Subtitle track {t.index} ({t.codec}) holds pictures, not text, and is left out."
        for t in info.subtitles
        if not t.is_text
    ]
    if info.captions:
        notes.append("Closed captions inside the picture (CEA-608 or 708) are left out.")
    sidecars = await work.sidecars()
    beside = [
        SubtitleStream(-1, s.format, True, None if s.language == "und" else s.language, s.label)
        for s in sidecars
    ]
    texts = [t for t in info.subtitles if t.is_text]
    given = names(base, [*beside, *texts])
    tracks: list[Track] = []
    for stream, sidecar, name in zip(beside, sidecars, given, strict=False):
        path = work.out / f"{name}.text"
        path.write_text(sidecar.body, "utf-8")
        guard = ("-protocol_whitelist", "fd", "-format_whitelist", sidecar.format)
        if not await _convert(work, path, (*guard, "-f", sidecar.format, "-i", "fd:"), name):
            notes.append(f"The subtitles beside it ({sidecar.language}) could not be read.")
        else:
            tracks.append(Track(stream, work.out / name))
        path.unlink()
    for stream, name in zip(texts, given[len(beside) :], strict=True):
        read = (*probe.INPUT_GUARD, "-i", "fd:", "-map", f"0:{stream.index}")
        if not await _convert(work, await work.fetch(), read, name):
            notes.append(f"Subtitle track {stream.index} ({stream.codec}) could not be read.")
        else:
            tracks.append(Track(stream, work.out / name))
    return tracks, notes


async def _convert(work: Work, source: Path, read: tuple[str, ...], name: str) -> bool:
    """Make WebVTT of a text track; whether it is some."""
    args = (
        *(*running.QUIET, *read),
        *("-map_metadata", "-1", "-map_chapters", "-1", "-c:s", "webvtt", "-f", "webvtt", name),
    )
    confined = running.jail(work, wall_seconds=120, write=True, file_bytes=_MOST_BYTES)
    finished = await work.run_tool(Command("ffmpeg", args, source, name), confined)
    path = work.out / name
    if finished.returncode == 0 and _is_webvtt(path):
        return True
    path.unlink(missing_ok=True)
    return False


def outputs(tracks: Sequence[Track], seconds: float | None) -> list[Output]:
    """The tracks as files of their own."""
    return [Output(t.path.name, t.path, "text/vtt", duration_seconds=seconds) for t in tracks]


def _is_webvtt(path: Path) -> bool:
    """Whether it is UTF-8, begins as WebVTT, and has at least one cue."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return text.startswith("WEBVTT") and "\0" not in text and _CUE.search(text) is not None

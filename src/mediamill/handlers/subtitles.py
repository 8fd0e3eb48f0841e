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


async def extract(work: Work, base: str, info: MediaInfo) -> tuple[list[Track], list[str]]:
    """Every text track of the original, and what is to be said of the others."""
    notes = [
        f"Subtitle track {t.index} ({t.codec}) holds pictures, not text, and is left out."
        for t in info.subtitles
        if not t.is_text
    ]
    if info.captions:
        notes.append("Closed captions inside the picture (CEA-608 or 708) are left out.")
    texts = [t for t in info.subtitles if t.is_text]
    tracks: list[Track] = []
    for stream, name in zip(texts, names(base, texts), strict=True):
        args = (
            *(*running.QUIET, *probe.INPUT_GUARD, "-i", "fd:", "-map", f"0:{stream.index}"),
            *("-map_metadata", "-1", "-map_chapters", "-1", "-c:s", "webvtt", "-f", "webvtt", name),
        )
        confined = running.jail(work, wall_seconds=120, write=True, file_bytes=_MOST_BYTES)
        command = Command("ffmpeg", args, await work.fetch(), name)
        finished = await work.run_tool(command, confined)
        path = work.out / name
        if finished.returncode != 0 or not _is_webvtt(path):
            path.unlink(missing_ok=True)
            notes.append(f"Subtitle track {stream.index} ({stream.codec}) could not be read.")
        else:
            tracks.append(Track(stream, path))
    return tracks, notes


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

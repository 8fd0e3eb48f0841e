"""Broken, hostile and oversized films: each fails with the code that helps its owner, with the
right verdict, and is never taken for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.handlers.films import Films, ffmpeg
from tests.handlers.studio import Studio

from mediamill.failures import Code, Verdict
from mediamill.handlers import Done, Reroute, video

pytestmark = pytest.mark.anyio

AAC = ("-c:a", "aac")
MP4 = {"type": "mp4", "preset": "ultrafast"}
ADVICE = {
    Code.UNSUPPORTED_FORMAT: "video in MP4",
    Code.UNSUPPORTED_CODEC: "common codec",
    Code.CORRUPT_INPUT: "export it again",
    Code.TRUNCATED_INPUT: "cut off",
    Code.DRM_ENCRYPTED: "copy protection",
    Code.NO_VIDEO_STREAM: "recipe for sound",
    Code.UNSAFE_CONTENT: "self-contained",
    Code.RESOURCE_LIMIT: "raise the limit",
    Code.MEMORY_LIMIT: "MEDIAMILL_TOOL_MEMORY_BYTES",
    Code.TIME_LIMIT: "MEDIAMILL_TIME_LIMIT_FACTOR",
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@dataclass(frozen=True)
class Broken:
    """How it is made, and what it must end with. `said` is a part of the detail."""

    make: Callable[[Films], Path]
    code: Code
    said: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    limit: str | None = None


def written(name: str, content: bytes) -> Callable[[Films], Path]:
    def make(films: Films) -> Path:
        path = films.folder / name
        path.write_bytes(content)
        return path

    return make


def whole(films: Films, name: str = "whole.mp4", *more: str) -> Path:
    return films.make(name, more=(*AAC, *more) if name.endswith((".mp4", ".mkv")) else more)


def front(films: Films) -> Path:
    return whole(films, "front.mp4", "-movflags", "+faststart")


def cut(make: Callable[[Films], Path], share: float) -> Callable[[Films], Path]:
    def cutting(films: Films) -> Path:
        source = make(films)
        data = source.read_bytes()
        path = source.with_name(f"cut-{source.name}")
        path.write_bytes(data[: int(len(data) * share)])
        return path

    return cutting


def replaced(old: bytes, new: bytes, name: str) -> Callable[[Films], Path]:
    def make(films: Films) -> Path:
        data = whole(films, f"whole{Path(name).suffix}").read_bytes()
        assert old in data
        return written(name, data.replace(old, new))(films)

    return make


def holed(films: Films) -> Path:
    data = bytearray(front(films).read_bytes())
    middle = data.index(b"mdat") + (len(data) - data.index(b"mdat")) // 3
    data[middle : middle + len(data) // 4] = bytes(len(data) // 4)
    return written("holed.mp4", bytes(data))(films)


def scrambled(films: Films) -> Path:
    data = bytearray(front(films).read_bytes())
    for at in range(data.index(b"mdat") + 2000, len(data), 97):
        data[at] ^= 0x5A
    return written("scrambled.mp4", bytes(data))(films)


def locked(films: Films) -> Path:
    return films.make(
        "locked.mp4",
        more=(
            *("-encryption_scheme", "cenc-aes-ctr", "-encryption_key", "00" * 16),
            *("-encryption_kid", "11" * 16),
        ),
    )


def spoken(films: Films) -> Path:
    return films.make("spoken.m4a", picture=None)


def crowded(films: Films) -> Path:
    path = films.folder / "crowded.mkv"
    ffmpeg(
        *("-v", "error", "-i", whole(films), *(("-map", "0:a") * 9), "-map", "0:v", "-c", "copy"),
        path,
    )
    return path


def ending(suffix: str, *more: str) -> Callable[[Films], Path]:
    return lambda films: films.make(f"ending{suffix}", more=more)


SDP = b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n"
F, T, C, U = (
    Code.UNSUPPORTED_FORMAT,
    Code.TRUNCATED_INPUT,
    Code.CORRUPT_INPUT,
    Code.UNSAFE_CONTENT,
)
CASES: dict[str, Broken] = {
    "random bytes": Broken(written("random", bytes(range(256)) * 64), F),
    "text": Broken(written("text", b"hello\n" * 100), F),
    "html": Broken(written("html", b"<!doctype html><html><script>alert(1)</script></html>"), F),
    "pdf": Broken(written("pdf", b"%PDF-1.7\n" + b"0" * 500), F),
    "a program": Broken(written("elf", b"\x7fELF" + bytes(600)), F),
    "an archive": Broken(written("zip", b"PK\x03\x04" + bytes(600)), F),
    "text named as sound": Broken(written("text.mp3", b"this is no sound\n" * 50), F),
    "a playlist": Broken(written("list.m3u8", b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n"), U),
    "a list of files": Broken(written("list", b"ffconcat version 1.0\nfile /etc/passwd\n"), U),
    "only its head": Broken(lambda f: written("head", front(f).read_bytes()[:32])(f), T),
    "index at the end, cut": Broken(cut(whole, 0.9), T, "index"),
    "index cut in the middle": Broken(
        lambda f: written("half", front(f).read_bytes()[:600])(f), T, "index"
    ),
    "index in front, cut": Broken(cut(front, 0.6), T),
    "matroska, cut": Broken(cut(ending(".mkv"), 0.6), T),
    "webm, cut": Broken(cut(ending(".webm", "-c:v", "libvpx", "-c:a", "libopus"), 0.6), T),
    "avi, cut": Broken(cut(ending(".avi"), 0.6), T),
    "flv, cut": Broken(cut(ending(".flv", "-ar", "44100"), 0.6), T),
    "wave, cut": Broken(cut(lambda f: f.make("wave.wav", picture=None), 0.4), T, "bytes"),
    "a hole of a quarter": Broken(holed, C),
    "flipped bits all over": Broken(scrambled, C),
    "a picture nobody decodes": Broken(
        replaced(b"avc1", b"apv1", "apv1.mp4"), Code.UNSUPPORTED_CODEC, "apv1"
    ),
    "a sound nobody decodes": Broken(
        replaced(b"A_AAC", b"A_XYZ", "xyz.mkv"), Code.UNSUPPORTED_CODEC, "sound"
    ),
    "encrypted": Broken(locked, Code.DRM_ENCRYPTED),
    "sound alone, a film is wanted": Broken(spoken, Code.NO_VIDEO_STREAM),
    "frames too large": Broken(
        whole, Code.RESOURCE_LIMIT, settings={"max_pixels": 1000}, limit="pixels of a frame"
    ),
    "too long": Broken(
        whole, Code.RESOURCE_LIMIT, settings={"max_duration_seconds": 2.0}, limit="duration"
    ),
    "too many streams": Broken(
        crowded, Code.RESOURCE_LIMIT, settings={"max_streams": 4}, limit="streams"
    ),
    "more memory than allowed": Broken(
        whole, Code.MEMORY_LIMIT, settings={"tool_memory_bytes": 20 << 20}, limit="memory"
    ),
    "slower than allowed": Broken(
        whole, Code.TIME_LIMIT, settings={"time_limit_factor": 1e-5}, limit="time"
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_what_is_broken_says_how(studio: Studio, films: Films, name: str) -> None:
    case = CASES[name]
    failure = await studio.failure(case.make(films), [MP4], **case.settings)
    assert failure.code is case.code, failure
    resource = case.code in (Code.MEMORY_LIMIT, Code.TIME_LIMIT)
    assert failure.code.verdict is (Verdict.RESOURCE if resource else Verdict.PERMANENT)
    assert ADVICE[failure.code] in failure.code.advice
    assert case.said in failure.problem.detail
    assert str(films.folder) not in failure.problem.detail
    if case.limit is not None:
        limit = failure.problem.limit
        assert limit is not None
        assert limit["name"] == case.limit
        assert limit["seen"] >= limit["allowed"] or case.code is Code.MEMORY_LIMIT


async def test_a_list_of_addresses_is_refused_by_one_name_or_the_other(
    studio: Studio, films: Films
) -> None:
    failure = await studio.failure(written("sdp", SDP)(films), [MP4])
    assert failure.code in (Code.UNSAFE_CONTENT, Code.UNSUPPORTED_FORMAT)


async def test_the_bytes_decide_and_not_the_name(studio: Studio, films: Films) -> None:
    still = films.folder / "still.mp4"
    ffmpeg("-v", "error", "-f", "lavfi", "-i", "testsrc", "-frames:v", "1", "-f", "mjpeg", still)
    outcome = (await studio.handle(still, [MP4])).outcome
    assert outcome == Reroute("image", "image")
    film = films.folder / "film.jpg"
    film.write_bytes(whole(films).read_bytes())
    assert isinstance((await studio.handle(film, [MP4])).outcome, Done)
    tune = films.folder / "tune.mp4"
    ffmpeg("-v", "error", "-f", "lavfi", "-i", "sine=d=1", "-f", "mp3", tune)
    done = await studio.handle(tune, [{"type": "m4a"}], kind="audio", handler=video.handle_audio)
    assert done.info["audio_codec"] == "mp3"


async def test_a_cut_recording_without_an_end_to_miss_is_taken(
    studio: Studio, films: Films
) -> None:
    """A transport stream says nowhere how long it is."""
    source = cut(ending(".ts"), 0.6)(films)
    done = await studio.handle(source, [MP4])
    assert isinstance(done.outcome, Done)
    assert 1.0 < (done.description.duration_seconds or 0) < 2.9

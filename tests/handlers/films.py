"""Small films, made when asked for, and how to look at what came of them."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from mediamill import tools

RGB = tuple[int, int, int]


@cache
def toolbox() -> tools.Toolbox:
    return tools.resolve()


def ffmpeg(*args: str | Path) -> subprocess.CompletedProcess[bytes]:
    """Run it; it must succeed."""
    command = [toolbox().ffmpeg, "-hide_banner", "-nostdin", "-y", *args]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")[-2000:]
    return done


def probe(path: Path, *more: str) -> dict[str, Any]:
    """What an ffprobe without any of our options says."""
    done = subprocess.run(
        [
            toolbox().ffprobe,
            "-v",
            "error",
            "-of",
            "json",
            "-show_format",
            "-show_streams",
            *more,
            path,
        ],
        capture_output=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def stream(path: Path, kind: str, *more: str) -> dict[str, Any]:
    """The one stream of that kind."""
    (found,) = [s for s in probe(path, *more)["streams"] if s["codec_type"] == kind]
    assert isinstance(found, dict)
    return found


def packets(path: Path, select: str = "v:0") -> list[dict[str, Any]]:
    """Packets in the order in which they are shown."""
    found = probe(path, "-show_packets", "-select_streams", select)["packets"]
    return sorted(found, key=lambda p: p["pts"])


def pixels(path: Path, at: float, size: tuple[int, int]) -> bytes:
    """The frame shown at `at` seconds, as RGB."""
    width, height = size
    vf = f"scale={width}:{height}:flags=area,format=rgb24"
    done = ffmpeg(
        "-v", "error", "-ss", f"{at:.3f}", "-i", path, "-frames:v", "1", "-vf", vf,
        "-f", "rawvideo", "-",
    )  # fmt: skip
    return done.stdout


def spot(path: Path, x: float, y: float, *, at: float = 0.0) -> RGB:
    """The color at a place given in shares of the shown size, five pixels wide in a hundred."""
    side = 40
    data = pixels(path, at, (side, side))
    found = [0, 0, 0]
    column, row = min(int(x * side), side - 1), min(int(y * side), side - 1)
    for channel in range(3):
        found[channel] = data[(row * side + column) * 3 + channel]
    return found[0], found[1], found[2]


def near(found: RGB, wanted: RGB, by: float) -> None:
    assert all(abs(a - b) <= by for a, b in zip(found, wanted, strict=True)), (found, wanted)


class Films:
    """One folder of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(
        self,
        name: str,
        *,
        picture: str | None = "testsrc2=s=320x180:r=25",
        sound: str | None = "sine=frequency=440:sample_rate=48000",
        seconds: float = 3.0,
        more: tuple[str | Path, ...] = (),
        codec: tuple[str, ...] = ("-c:v", "libx264", "-preset", "ultrafast", "-pix_fmt", "yuv420p"),
    ) -> Path:
        """A film of that name, made once."""
        path = self.folder / name
        if path.exists():
            return path
        inputs: list[str] = []
        for source in (picture, sound):
            if source is not None:
                inputs += ["-f", "lavfi", "-i", source]
        ffmpeg(
            "-v", "error", *inputs, "-t", f"{seconds}", *(codec if picture else ()), *more, path
        )  # fmt: skip
        return path

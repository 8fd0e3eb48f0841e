"""Small media files for the stories, made when first asked for and kept for the whole run."""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
from functools import cached_property
from pathlib import Path

import imageio_ffmpeg
from PIL import Image
from tests.make_media import BLUE, RED, flat, png, save, soft_gradient, texture


class Clips:
    """One folder of them; workers of pytest-xdist share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def photo(self) -> bytes:
        return save(texture((640, 480)), "JPEG", quality=85)

    @cached_property
    def large_photo(self) -> bytes:
        """Large enough that its placeholder is seen long before its variants."""
        return soft_gradient((4000, 3000))

    @cached_property
    def red(self) -> bytes:
        return save(flat((320, 240), RED), "JPEG", quality=90)

    @cached_property
    def blue(self) -> bytes:
        return save(flat((320, 240), BLUE), "JPEG", quality=90)

    @cached_property
    def bomb(self) -> bytes:
        """A PNG of some bytes that claims a billion pixels."""
        return png((32000, 32000), [bytes(4000)], depth=1, kind=0)

    @cached_property
    def clip(self) -> bytes:
        """3 seconds with sound, index at the end."""
        return self._film("clip.mp4", "testsrc2=s=320x180:r=25", 3)

    @cached_property
    def clip_index_first(self) -> bytes:
        return self._film("first.mp4", "testsrc2=s=320x180:r=25", 3, "-movflags", "+faststart")

    @cached_property
    def work(self) -> bytes:
        """A clip whose encode is long enough to be caught in the act."""
        return self._film("work.mp4", "testsrc2=s=640x360:r=25,noise=alls=15:allf=t", 4)

    @cached_property
    def long_work(self) -> bytes:
        """A clip whose encode shows some progress on its way."""
        return self._film("long.mp4", "testsrc2=s=960x540:r=25,noise=alls=20:allf=t", 8)

    def _film(self, name: str, source: str, seconds: int, *more: str) -> bytes:
        path = self._folder / name
        with (self._folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                part = self._folder / f"part-{os.getpid()}-{name}"
                subprocess.run(
                    [
                        *(imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y"),
                        *("-f", "lavfi", "-i", f"{source},format=yuv420p"),
                        *("-f", "lavfi", "-i", "sine=frequency=440:sample_rate=44100"),
                        *("-t", str(seconds), "-c:v", "libx264", "-preset", "ultrafast"),
                        *("-g", "50", "-c:a", "aac", "-b:a", "64k", *more, str(part)),
                    ],
                    check=True,
                )
                part.rename(path)
        return path.read_bytes()


def cut(data: bytes, share: float) -> bytes:
    """The beginning of a file."""
    return data[: int(len(data) * share)]


def size_of(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data)) as image:
        return image.size

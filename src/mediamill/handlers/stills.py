"""Pictures by way of the warm image processes: they get open files, never paths."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from mediamill.config import Settings
from mediamill.handlers import Output, Work
from mediamill.sniff import HEAD_BYTES, Sniffed, sniff

CONTENT_TYPES: Final = {
    "avif": "image/avif",
    "webp": "image/webp",
    "jpeg": "image/jpeg",
    "png": "image/png",
}
EXTENSIONS: Final = {"avif": "avif", "webp": "webp", "jpeg": "jpg", "png": "png"}


def look(path: Path) -> Sniffed | None:
    """What the file is by its first bytes."""
    with path.open("rb") as file:
        return sniff(file.read(HEAD_BYTES), path.stat().st_size)


def limits(settings: Settings) -> dict[str, int]:
    """The operator's limits, as the image process takes them."""
    return {
        "max_pixels": settings.max_pixels,
        "max_side": settings.max_side,
        "max_frames": settings.max_frames,
        "max_total_pixels": settings.max_total_pixels,
        "max_interlaced_pixels": settings.max_interlaced_pixels,
    }


async def inspect(work: Work, path: Path) -> dict[str, Any]:
    """The header, held against the limits, without decoding."""
    request = {"op": "inspect", "limits": limits(work.settings)}
    with _opened(path) as fd:
        return await work.imaging(request, [fd], wall_seconds=_wall(work, 20))


async def preview(work: Work, path: Path) -> dict[str, Any]:
    """Placeholder hashes, colors and the inline thumbnail."""
    request = {"op": "preview", "limits": limits(work.settings)}
    with _opened(path) as fd:
        answer = await work.imaging(request, [fd], wall_seconds=_wall(work, 60))
    shown: dict[str, Any] = answer["preview"]
    return shown


async def make(
    work: Work,
    path: Path,
    wanted: Sequence[dict[str, Any]],
    targets: Sequence[Path],
    seconds: float,
) -> dict[str, Any]:
    """Every output from one decode. `wanted` are the outputs as the image process takes them."""
    with ExitStack() as stack:
        fds = [stack.enter_context(_opened(path))]
        for target in targets:
            fds.append(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            stack.callback(os.close, fds[-1])
        outputs = [{"fd_index": n, **want} for n, want in enumerate(wanted, start=1)]
        request = {"op": "make", "outputs": outputs, "limits": limits(work.settings)}
        return await work.imaging(request, fds, wall_seconds=_wall(work, seconds))


async def verify(work: Work, output: Output, *, format: str) -> None:
    """Decode one of our outputs to its last row. Raises Failure(OUTPUT_INVALID)."""
    request = {
        "op": "verify",
        "format": format,
        "width": output.width,
        "height": output.height,
        "pages": 1,
    }
    with _opened(output.path) as fd:
        await work.imaging(request, [fd], wall_seconds=_wall(work, 60))


def detach(path: Path, target: Path) -> None:
    """Copy a file to a fresh one: the process that wrote the first may still hold it open."""
    shutil.copyfile(path, target)
    path.unlink()


def _wall(work: Work, seconds: float) -> float:
    return seconds * work.settings.time_limit_factor


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)

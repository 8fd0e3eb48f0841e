"""Pictures by way of the warm image processes: they get open files, never paths."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from mediamill.config import ImageLimits
from mediamill.failures import Code, Failure, limit_exceeded
from mediamill.handlers import Output, Work
from mediamill.sniff import HEAD_BYTES, Sniffed, sniff

CONTENT_TYPES: Final = {
    "avif": "image/avif",
    "webp": "image/webp",
    "jpeg": "image/jpeg",
    "png": "image/png",
}
EXTENSIONS: Final = {"avif": "avif", "webp": "webp", "jpeg": "jpg", "png": "png"}
_OPEN_FOR_WRITING: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def look(path: Path) -> Sniffed | None:
    """What the file is by its first bytes."""
    with path.open("rb") as file:
        return sniff(file.read(HEAD_BYTES), path.stat().st_size)


def check_bytes(size: int, limits: ImageLimits) -> None:
    """Hold the size of the file against the limits, before anything of it is read."""
    if limits.max_bytes is not None and size > limits.max_bytes:
        raise limit_exceeded(
            "max_bytes",
            allowed=limits.max_bytes,
            seen=size,
            unit="bytes",
            advice="Save the picture smaller or with a lower quality.",
        )


async def inspect(work: Work, path: Path, limits: ImageLimits | None = None) -> dict[str, Any]:
    """The header, held against the limits, without decoding."""
    with _opened(path) as fd:
        return await _ask(work, {"op": "inspect"}, [fd], limits, 20)


async def preview(work: Work, path: Path, limits: ImageLimits | None = None) -> dict[str, Any]:
    """Placeholder hashes, colors and the inline thumbnail."""
    with _opened(path) as fd:
        answer = await _ask(work, {"op": "preview"}, [fd], limits, 60)
    shown: dict[str, Any] = answer["preview"]
    return shown


async def draw(
    work: Work, path: Path, target: Path, *, width: int, height: int, limits: ImageLimits
) -> dict[str, Any]:
    """An SVG as a PNG that is large enough for outputs of this size, as far as limits allow."""
    request = {"op": "draw", "width": width, "height": height}
    with _opened(path) as fd, _created(target) as out:
        return await _ask(work, request, [fd, out], limits, 30)


async def make(
    work: Work,
    path: Path,
    wanted: Sequence[dict[str, Any]],
    targets: Sequence[Path],
    seconds: float,
    *,
    limits: ImageLimits | None = None,
    keep_copyright: bool = False,
    pictures: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Every output from one decode. `wanted` are the outputs as the image process takes them, but
    that a watermark's `image` is a key of `pictures`."""
    with ExitStack() as stack:
        fds = [stack.enter_context(_opened(path))]
        fds += [stack.enter_context(_created(target)) for target in targets]
        places: dict[str, int] = {}
        for name, picture in (pictures or {}).items():
            places[name] = len(fds)
            fds.append(stack.enter_context(_opened(picture)))
        outputs = []
        for number, want in enumerate(wanted, start=1):
            output = {**want, "fd_index": number}
            if (mark := want.get("watermark")) is not None:
                output["watermark"] = {**mark, "fd_index": places[mark["image"]]}
            outputs.append(output)
        request = {"op": "make", "outputs": outputs, "keep_copyright": keep_copyright}
        return await _ask(work, request, fds, limits, seconds)


async def verify(
    work: Work,
    output: Output,
    *,
    format: str,
    made: Mapping[str, Any] | None = None,
    notice: Mapping[str, str] | None = None,
) -> None:
    """Decode one of our outputs to its last row. `made` is what was answered when it was made.

    Raises Failure(OUTPUT_INVALID).
    """
    known = made or {}
    request = {
        "op": "verify",
        "format": format,
        "width": output.width,
        "height": output.height,
        "pages": known.get("frames", 1),
        "duration_ms": known.get("duration_ms"),
        "notice": notice,
    }
    with _opened(output.path) as fd:
        await work.imaging(request, [fd], wall_seconds=60 * work.settings.time_limit_factor)


def detach(path: Path, target: Path) -> None:
    """Copy a file to a fresh one: the process that wrote the first may still hold it open."""
    shutil.copyfile(path, target)
    path.unlink()


async def _ask(
    work: Work,
    request: dict[str, Any],
    fds: Sequence[int],
    limits: ImageLimits | None,
    seconds: float,
) -> dict[str, Any]:
    """Ask under these limits, else under the operator's."""
    held = limits or work.settings.image_limits(work.claim.tenant_id)
    wall = seconds * work.settings.time_limit_factor
    if held.max_seconds is not None:
        wall = min(wall, held.max_seconds)
    given = held.model_dump(exclude_none=True, exclude={"max_bytes", "max_seconds"})
    try:
        return await work.imaging({**request, "limits": given}, fds, wall_seconds=wall)
    except Failure as failure:
        if failure.code is not Code.MEMORY_LIMIT:
            raise
        most = min(held.max_memory_bytes or 1 << 62, work.settings.image_memory_bytes)
        limit = {"name": "max_memory_bytes", "allowed": most, "seen": most, "unit": "bytes"}
        detail = failure.problem.detail or f"The picture needs more than {most:,} bytes of memory."
        raise Failure(Code.MEMORY_LIMIT, detail, limit=limit) from failure


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    with _closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        yield fd


@contextmanager
def _created(path: Path) -> Iterator[int]:
    with _closing(os.open(path, _OPEN_FOR_WRITING, 0o600)) as fd:
        yield fd


@contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)

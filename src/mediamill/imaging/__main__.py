"""The loop of the image child. See the package for the protocol."""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from mediamill.failures import Code, Failure, Refused
from mediamill.imaging import wire

if TYPE_CHECKING:
    from mediamill.imaging.complaints import Complaints


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mediamill.imaging")
    parser.add_argument("--fd", type=int, required=True, help="the socket to the worker")
    parser.add_argument("--concurrency", type=int, default=1, help="threads for one picture")
    parser.add_argument("--drawings", action="store_true", help="draw one SVG, and nothing else")
    options = parser.parse_args(arguments)
    complaints = _set_up(options.concurrency, drawings=options.drawings)
    with socket.socket(fileno=options.fd) as connection:
        while (received := wire.receive_request(connection)) is not None:
            request, fds = received
            try:
                answer = _answer(request, fds, complaints, drawings=options.drawings)
            finally:
                wire.close_all(fds)
            connection.sendall(wire.pack(answer, limit=wire.MAX_ANSWER_BYTES))
            if request.get("op") not in ("inspect", "verify"):
                _give_back()  # while the worker reads
    return 0


def _set_up(concurrency: int, *, drawings: bool) -> Complaints:
    """Put libvips into the state that hostile files are met in, and load it."""
    _tame_malloc()
    os.environ["VIPS_CONCURRENCY"] = str(max(1, concurrency))
    os.environ["VIPS_BLOCK_UNTRUSTED"] = "1"
    # No scratch files: the jail has no place for them, and limits on pixels are set for memory.
    # libvips knows k, m and g only, and takes any other unit for bytes.
    os.environ["VIPS_DISC_THRESHOLD"] = "1024g"
    import pyvips

    from mediamill.imaging.complaints import Complaints

    # Nothing of a picture may outlive its request, and a cache by name or content would.
    pyvips.cache_set_max(0)
    pyvips.block_untrusted_set(True)
    pyvips.operation_block_set("VipsForeignLoad", True)
    readable = ("Svg",) if drawings else ("Jpeg", "Png", "Webp", "Nsgif", "Tiff", "Heif")
    for loader in readable:
        pyvips.operation_block_set(f"VipsForeignLoad{loader}", False)
    complaints = Complaints()
    complaints.listen()
    return complaints


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES: Final = 64 << 20
_TRACEBACK_LINES: Final = 40
_NEARLY_ALL: Final = 0.8


def _tame_malloc() -> None:
    """Let encoders reuse their buffers within a request: taking each from the system and giving it
    back costs a tenth of all processor time. `_give_back` follows after the large ones."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        # Set, these no longer grow by what one odd picture needed.
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES // 2)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _give_back() -> None:
    """Give what is free to the system, so that a process that serves hundreds of pictures does not
    stay as large as the largest of them made it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _answer(
    request: dict[str, Any], fds: list[int], complaints: Complaints, *, drawings: bool
) -> dict[str, Any]:
    """Do what is asked, and put every way it can end into an answer."""
    complaints.lines.clear()
    began, cpu = time.perf_counter(), time.process_time()
    try:
        with _within_memory((request.get("limits") or {}).get("max_memory_bytes")):
            answer = _do(request, fds, complaints, drawings=drawings)
    except (Failure, Refused) as error:
        problem = error.problem
        unknown = problem.code is Code.TOOL_FAILED and _short_of_memory()
        answer = {
            "failure": {
                "code": (Code.MEMORY_LIMIT if unknown else problem.code).code,
                "detail": problem.detail,
                "limit": problem.limit,
            }
        }
    except MemoryError:
        answer = {"failure": {"code": Code.MEMORY_LIMIT.code, "detail": "", "limit": None}}
    except Exception:
        code = Code.MEMORY_LIMIT if _short_of_memory() else Code.TOOL_FAILED
        complaints.lines.extend(traceback.format_exc().splitlines()[-_TRACEBACK_LINES:])
        answer = {"failure": {"code": code.code, "detail": "", "limit": None}}
    answer["log"] = list(complaints.lines)
    answer["seconds"] = round(time.perf_counter() - began, 4)
    answer["cpu_seconds"] = round(time.process_time() - cpu, 4)
    return answer


def _short_of_memory() -> bool:
    """Libraries hide a failed allocation behind other errors; the peak does not hide."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return soft != resource.RLIM_INFINITY and _peak_bytes() >= _NEARLY_ALL * soft


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def _within_memory(most: int | None) -> Iterator[None]:
    """Hold this process to less memory than its jail allows, for one request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if most is None or (soft != resource.RLIM_INFINITY and soft <= most):
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (int(most), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _do(
    request: dict[str, Any], fds: list[int], complaints: Complaints, *, drawings: bool
) -> dict[str, Any]:
    operation = request.get("op")
    if operation == "hello":
        return _hello()
    if not fds:
        raise Refused(Code.INVALID_REQUEST, "a request needs its input as a descriptor")
    from mediamill.imaging import decode, drawing, make, preview, verify
    from mediamill.imaging.facts import Limits

    if (operation == "draw") is not drawings:
        raise Refused(Code.INVALID_REQUEST, "drawings have a process of their own")
    if operation == "draw":
        if len(fds) != 2:
            raise Refused(Code.INVALID_REQUEST, "a drawing needs two descriptors")
        limits = Limits.of(request.get("limits") or {})
        return drawing.draw(decode.mapped(fds[0]), request, fds[1], limits, complaints)
    if operation == "verify":
        return verify.verify(decode.mapped(fds[0]), request, complaints)
    limits = Limits.of(request.get("limits") or {})
    picture = decode.open_picture(fds[0], limits, complaints)
    answer = picture.facts.as_answer()
    match operation:
        case "inspect":
            pass
        case "preview":
            answer["preview"] = preview.preview(picture, None, complaints)
        case "make":
            moving = request.get("animation", "first") == "keep"
            outputs = [
                make.Output.of(wanted, animation=moving) for wanted in request.get("outputs") or ()
            ]
            if not all(0 < fd < len(fds) for output in outputs for fd in output.fds):
                raise Refused(Code.INVALID_REQUEST, "fd_index names no descriptor")
            made = make.make(
                picture,
                outputs,
                fds,
                keep_copyright=bool(request.get("keep_copyright")),
                complaints=complaints,
            )
            answer["outputs"] = made.answers
            if made.notice:
                answer["notice"] = asdict(made.notice)
            if request.get("preview"):
                answer["preview"] = preview.preview(picture, made.decoded, complaints)
        case _:
            raise Refused(Code.INVALID_REQUEST, "no such operation")
    answer["warnings"] = list(dict.fromkeys(picture.warnings))
    return answer


def _hello() -> dict[str, Any]:
    import pyvips

    from mediamill.imaging import decode
    from mediamill.imaging.geometry import MAX_SIDE

    return {
        "ready": True,
        "libvips": ".".join(str(pyvips.version(part)) for part in range(3)),
        "reads": list(decode.FORMATS),
        "writes": sorted(MAX_SIDE),
        "open_fds": sum(map(_is_open, range(256))),
        "max_rss_bytes": _peak_bytes(),
    }


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())

"""What decoders say when something is wrong, and which failure that is: one table of patterns."""

from __future__ import annotations

import logging
import re
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from mediamill.failures import Code, Failure

_FAILURES: Final[tuple[tuple[re.Pattern[str], Code, str], ...]] = tuple(
    (re.compile(pattern, re.I), code, detail)
    for pattern, code, detail in (
        (r"file too large", Code.OUTPUT_LIMIT, ""),
        (r"no space left", Code.SCRATCH_FULL, ""),
        (
            r"out of memory|(?:unable|cannot|failed) to allocate|bad_alloc|insufficient memory"
            r"|memory allocation|allocating \d+ bytes failed"
            r"|creating thread: resource temporarily unavailable|can't start new thread",
            Code.MEMORY_LIMIT,
            "",
        ),
        (
            r"has not been built in|unsupported (?:codec|feature|image type|compression)"
            r"|compression.*not (?:supported|configured)|unsupported bmp|arithmetic.*not",
            Code.UNSUPPORTED_CODEC,
            "The picture is coded in a way that no decoder here can read.",
        ),
        (
            r"security limit|exceeds? (?:the )?(?:maximum|limit)|too many|dimensions? too large",
            Code.RESOURCE_LIMIT,
            "The decoder refused the picture as too large.",
        ),
        (
            r"premature end|not enough data|unexpected end|end of file|truncated"
            r"|got \d+ bytes, expected|insufficient input",
            Code.TRUNCATED_INPUT,
            "The decoder met the end of the data before the picture was complete.",
        ),
    )
)

# libjpeg and the GIF reader go on after damage and only mention it. A few stray bytes between two
# JPEG segments are the mark of a careless writer, not of damage, and so is an odd header.
_DAMAGE: Final = re.compile(
    r"bad huffman code|bad arithmetic code|premature end of data segment|instead of rst"
    r"|invalid frame data|(?P<stray>\d+) extraneous bytes",
    re.I,
)
_STRAY_BYTES: Final = 256


# Pillow and pillow-heif raise nearly anything on hostile bytes. Not in the list are the errors that
# only a mistake of ours makes (names, types, attributes): they must not be blamed on the file.
_RAISED_BY_PILLOW: Final = (
    OSError,
    ValueError,
    RuntimeError,
    EOFError,
    SyntaxError,
    LookupError,
    ArithmeticError,
    struct.error,
    zlib.error,
)


# What libvips logs when it takes plain sRGB in place of a profile that it cannot use.
_PROFILE_UNUSED: Final = re.compile(
    r"profile (?:does not support|incompatible)|unable to load .*profile|corrupt profile", re.I
)


class Complaints(logging.Handler):
    """Collects what libvips logs while one request is worked on. Attach it once per process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: deque[str] = deque(maxlen=40)

    def emit(self, record: logging.LogRecord) -> None:
        for line in record.getMessage().removeprefix("VIPS: ").splitlines():
            if line.strip() and not line.startswith("error in tile"):
                self.lines.append(printable(line.strip()))

    def listen(self) -> None:
        logger = logging.getLogger("pyvips")
        logger.addHandler(self)
        logger.setLevel(logging.WARNING)
        logger.propagate = False

    @property
    def profile_unused(self) -> bool:
        return any(_PROFILE_UNUSED.match(line) for line in self.lines)

    def raise_damage(self) -> None:
        """Raise `corrupt_input` if a decoder mentioned damage and went on."""
        for line in self.lines:
            found = _DAMAGE.search(line)
            if found and (found["stray"] is None or int(found["stray"]) >= _STRAY_BYTES):
                raise Failure(Code.CORRUPT_INPUT, "Part of the picture cannot be decoded.")


@contextmanager
def decoding(complaints: Complaints) -> Iterator[None]:
    """Turn whatever a decoder raises into a `Failure`; also raise for damage it passed over."""
    import pyvips

    # libvips appends to its error text for as long as nobody takes it.
    pyvips.vips_lib.vips_error_clear()
    try:
        yield
    except MemoryError as error:
        raise Failure(Code.MEMORY_LIMIT) from error
    except (pyvips.Error, *_RAISED_BY_PILLOW) as error:
        complaints.lines.append(printable(f"{type(error).__name__}: {error}"))
        raise failure_of(str(error)) from error
    complaints.raise_damage()


@contextmanager
def encoding(complaints: Complaints) -> Iterator[None]:
    """The same for writing, where a failure is never the fault of the file."""
    import pyvips

    try:
        yield
    except pyvips.Error as error:
        complaints.lines.append(printable(str(error)))
        raise failure_of(str(error), otherwise=Code.TOOL_FAILED) from error
    except MemoryError as error:
        raise Failure(Code.MEMORY_LIMIT) from error


def failure_of(text: str, *, otherwise: Code = Code.CORRUPT_INPUT) -> Failure:
    for pattern, code, detail in _FAILURES:
        if pattern.search(text) and (
            otherwise is Code.CORRUPT_INPUT or code not in (Code.TRUNCATED_INPUT,)
        ):
            return Failure(code, detail)
    return Failure(otherwise)


def printable(text: str) -> str:
    """One line of at most 300 characters that is safe to show and to store."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in line)[:300]

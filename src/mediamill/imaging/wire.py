"""How worker and image child talk: a length, a JSON object, and file descriptors beside it.

One request is in flight at a time, so a message is never followed by another one in the stream.
The side of the worker takes nothing the child says on trust: answers are capped, and descriptors
that a child might send are dropped by the kernel, because the worker reads with plain `recv`.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from typing import Any, Final

MAX_FDS: Final = 60
"""Descriptors in one request. The kernel would take 253."""
MAX_REQUEST_BYTES: Final = 1 << 18
MAX_ANSWER_BYTES: Final = 1 << 20
LENGTH: Final = struct.Struct(">I")


class BrokenMessage(Exception):
    """The other side does not keep to the protocol; the connection is of no further use."""


def pack(message: dict[str, Any], *, limit: int) -> bytes:
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > limit:
        raise BrokenMessage(f"a message of {len(body)} bytes, at most {limit} are allowed")
    return LENGTH.pack(len(body)) + body


def body_length(header: bytes, *, limit: int) -> int:
    (length,) = LENGTH.unpack(header)
    if length > limit:
        raise BrokenMessage(f"a message of {length} bytes, at most {limit} are allowed")
    return int(length)


def unpack(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise BrokenMessage("not JSON") from error
    if not isinstance(message, dict):
        raise BrokenMessage("not an object")
    return message


def receive_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request with its descriptors, which the caller closes; None when the worker left."""
    fds: list[int] = []
    try:
        data = b""
        wanted = LENGTH.size
        while len(data) < wanted:
            part = _receive(connection, fds)
            if not part:
                if data:
                    raise BrokenMessage("the worker left in the middle of a message")
                return None
            data += part
            if wanted == LENGTH.size and len(data) >= wanted:
                header = data[: LENGTH.size]
                wanted += body_length(header, limit=MAX_REQUEST_BYTES)
        return unpack(data[LENGTH.size :]), fds
    except BaseException:
        close_all(fds)
        raise


def _receive(connection: socket.socket, fds: list[int]) -> bytes:
    size = array.array("i").itemsize
    data, ancillary, flags, _ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(MAX_FDS * size))
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            got = array.array("i")
            got.frombytes(payload[: len(payload) // size * size])
            fds.extend(got)
    if flags & socket.MSG_CTRUNC:
        raise BrokenMessage(f"more than {MAX_FDS} descriptors")
    return data


def close_all(fds: list[int]) -> None:
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass
    fds.clear()

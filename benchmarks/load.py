"""A load generator as cheap as Python allows, run as a process of its own.

It speaks HTTP/1.1 over kept-alive connections and reads no more of an answer than its status and
its length. The requests are made before the clock starts. It prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, Final

_LENGTH: Final = struct.Struct(">I")
_HEAD_END: Final = b"\r\n\r\n"
_LENGTH_HEADER: Final = b"content-length:"


def request(
    method: str, path: str, *, headers: dict[str, str] | None = None, body: bytes = b""
) -> bytes:
    """The bytes of one request."""
    lines = [f"{method} {path} HTTP/1.1", "host: bench", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode() + _HEAD_END + body


def write_requests(path: Path, requests: Iterable[bytes]) -> None:
    """A file of requests, as this program reads it."""
    with path.open("wb") as file:
        for each in requests:
            file.write(_LENGTH.pack(len(each)) + each)


def read_requests(path: Path) -> list[bytes]:
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        found.append(data[at : at + length])
        at += length
    return found


class _Run:
    """One run: what is left to send, and what came back."""

    def __init__(self, requests: Iterator[bytes], rate: float | None, seconds: float) -> None:
        self.rate = rate
        self.seconds = seconds
        self.statuses: Counter[int] = Counter()
        self.latencies: list[float] = []
        self.waited = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.began = self.last = 0.0
        self._requests = requests
        self._idle: list[_Connection] = []
        self._due: deque[float] = deque()
        self._busy = 0
        self._over = False

    def begin(self, connections: list[_Connection]) -> None:
        self.began = self.last = time.perf_counter()
        self._idle = list(connections)
        if self.rate is None:
            for connection in connections:
                self._next(connection, time.perf_counter())
        else:
            self._tick(0)

    def answered(self, connection: _Connection, status: int, began: float) -> None:
        now = self.last = time.perf_counter()
        self.latencies.append(now - began)
        self.statuses[status] += 1
        self._busy -= 1
        self._idle.append(connection)
        if self.rate is None:
            self._next(connection, now)
        elif self._due:
            self._next(connection, self._due.popleft())
        if self._over and not self._busy and not self._due:
            self.stop()

    def stop(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _next(self, connection: _Connection, began: float) -> None:
        """Send the next request on an idle connection; its latency counts from `began`."""
        following = None
        # An open loop sends whatever fell due in time, however late a connection gets free for it.
        if self.rate is not None or time.perf_counter() - self.began < self.seconds:
            following = next(self._requests, None)
        if following is None:
            self._over = True
            self._due.clear()
            if not self._busy:
                self.stop()
            return
        self._busy += 1
        self._idle.remove(connection)
        connection.send(following, began)

    def _tick(self, sent: int) -> None:
        """Open loop: what is due is sent, or waits for a connection with its clock running."""
        assert self.rate is not None
        now = time.perf_counter()
        while sent < (now - self.began) * self.rate and sent < self.seconds * self.rate:
            sent += 1
            if self._idle:
                self._next(self._idle[0], now)
            else:
                self.waited += 1
                self._due.append(now)
        if sent >= self.seconds * self.rate or self._over:
            self._over = True
            if not self._busy and not self._due:
                self.stop()
            return
        asyncio.get_running_loop().call_later(1 / self.rate, self._tick, sent)


class _Connection(asyncio.Protocol):
    def __init__(self, run: _Run) -> None:
        self._run = run
        self._transport: Any = None
        self._buffer = b""
        self._began = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self, data: bytes, began: float) -> None:
        self._began = began
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer = self._buffer + data if self._buffer else data
        end = buffer.find(_HEAD_END)
        if end < 0:
            return
        head = buffer[:end].lower()
        at = head.find(_LENGTH_HEADER)
        length = int(head[at + len(_LENGTH_HEADER) :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(buffer) < end + len(_HEAD_END) + length:
            return
        self._buffer = b""
        self._run.answered(self, int(buffer[9:12]), self._began)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._run.ended.done():
            self._run.ended.set_exception(ConnectionError("the server closed a connection"))

    def close(self) -> None:
        self._transport.close()


async def run(
    host: str,
    port: int,
    requests: Iterator[bytes],
    *,
    connections: int,
    seconds: float,
    rate: float | None = None,
) -> dict[str, Any]:
    """Send for `seconds`, at `rate` per second or each as soon as the one before is answered."""
    loop = asyncio.get_running_loop()
    this = _Run(requests, rate, seconds)
    made = [
        (await loop.create_connection(lambda: _Connection(this), host, port))[1]
        for _ in range(connections)
    ]
    this.begin(made)
    async with asyncio.timeout(seconds + 60):
        await this.ended
    for connection in made:
        connection.close()
    return {
        "seconds": this.last - this.began,
        "statuses": {str(status): count for status, count in this.statuses.items()},
        "waited_for_a_connection": this.waited,
        "latencies_ms": [round(1000 * latency, 3) for latency in this.latencies],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("requests", type=Path, help="a file made by write_requests")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rate", type=float, help="requests per second; otherwise closed loop")
    parser.add_argument("--repeat", action="store_true", help="begin again at the end of the file")
    options = parser.parse_args()
    found = read_requests(options.requests)
    requests = cycle(found) if options.repeat else iter(found)
    work = run(
        options.host,
        options.port,
        requests,
        connections=options.connections,
        seconds=options.seconds,
        rate=options.rate,
    )
    try:
        import uvloop
    except ImportError:
        result = asyncio.run(work)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(work)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()

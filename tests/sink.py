"""A server on this machine that notes who calls, and answers as a test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

LOCAL: Final = ["127.0.0.0/8", "::1/128"]
"""What `egress_allow_networks` must hold for calls to a sink."""

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Listener:
    """A server on both loopback addresses that counts who comes."""

    port: int = 0
    connections: int = 0
    requests: list[bytes] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/in"

    def parsed(self, number: int = -1) -> tuple[dict[str, str], bytes]:
        """Headers and body of a request that came."""
        head, _, body = self.requests[number].partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")[1:]
        return {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}, body

    def events(self) -> list[dict[str, Any]]:
        """The events that came, in order."""
        return [json.loads(self.parsed(n)[1]) for n in range(len(self.requests))]

    async def heard(self, count: int, *, seconds: float = 5.0) -> None:
        """Return once so many requests came."""
        for _ in range(int(seconds * 100)):
            if len(self.requests) >= count:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{len(self.requests)} requests of {count} came")


@asynccontextmanager
async def listening(answer: Answer | None = None) -> AsyncIterator[Listener]:
    seen = Listener()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.connections += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                ),
                0,
            )
            seen.requests.append(head + await reader.readexactly(length))
            if answer:
                await answer(reader, writer)
            else:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    first = await asyncio.start_server(serve, "127.0.0.1", 0)
    seen.port = first.sockets[0].getsockname()[1]
    servers = [first]
    try:
        servers.append(await asyncio.start_server(serve, "::1", seen.port))
    except OSError:  # no IPv6 on this machine, or the port is taken there
        pass
    try:
        yield seen
    finally:
        for server in servers:
            server.close()


def saying(raw: bytes) -> Answer:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    return answer


def answering(*statuses: int | bytes) -> Answer:
    """These answers in turn, the last one for ever: a status, or raw bytes."""
    left = list(statuses)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        one = left.pop(0) if len(left) > 1 else left[0]
        raw = one if isinstance(one, bytes) else f"HTTP/1.1 {one} X\r\n\r\n".encode()
        writer.write(raw)

    return answer


async def silence(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take the request and never answer."""
    await asyncio.sleep(3600)

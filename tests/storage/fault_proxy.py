"""A proxy in front of an S3 server that answers wrongly, late, half or not at all, on demand."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx2 as httpx

_DROPPED = {"connection", "transfer-encoding", "content-length"}


@dataclass(slots=True)
class Request:
    """A request as it came, before it is passed on."""

    method: str
    target: str


@dataclass(slots=True)
class FaultProxy:
    """`fault` names what happens to a request: None, "slow_down", "lost", "hang", "cut", "denied",
    "refused". `seen` counts requests, by method and fault."""

    upstream: str
    port: int = 0
    fault: Callable[[Request], str | None] = lambda _: None
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    _open: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def for_times(self, count: int, fault: str, method: str | None = None) -> None:
        """The next `count` requests (of a method) meet the fault, those after it none."""
        left = count

        def choose(request: Request) -> str | None:
            nonlocal left
            if left > 0 and method in (None, request.method):
                left -= 1
                return fault
            return None

        self.fault = choose

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, httpx.HTTPError):
                await self._one(reader, writer)
        finally:
            self._open.discard(task)
            writer.close()

    async def close(self) -> None:
        """End what still hangs."""
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await asyncio.sleep(0)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip("\r\n").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = dict(line.split(": ", 1) for line in lines)
        lower = {name.lower(): value for name, value in headers.items()}
        body = await reader.readexactly(int(lower.get("content-length", 0)))
        fault = self.fault(Request(method, target))
        self.seen.append((method, fault))
        match fault:
            case "refused":
                return
            case "hang":
                await asyncio.sleep(3600)
            case "slow_down":
                text = b"<Error><Code>SlowDown</Code></Error>"
                writer.write(b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(text), text))
                await writer.drain()
                return
            case "denied":
                text = b"<Error><Code>RequestTimeTooSkewed</Code></Error>"
                writer.write(b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n" % len(text))
                writer.write(b"" if method == "HEAD" else text)
                await writer.drain()
                return
        sent = {k: v for k, v in headers.items() if k.lower() != "connection"}
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            request = client.build_request(
                method, f"{self.upstream}{target}", headers=sent, content=body
            )
            request.headers["host"] = headers.get("Host") or headers["host"]
            answer = await client.send(request)
        if fault == "lost":
            return
        content = b"" if method == "HEAD" else answer.content
        length = answer.headers.get("content-length", str(len(content)))
        writer.write(f"HTTP/1.1 {answer.status_code} X\r\nConnection: close\r\n".encode())
        for name, value in answer.headers.multi_items():
            if name.lower() not in _DROPPED:
                writer.write(f"{name}: {value}\r\n".encode("latin-1"))
        writer.write(f"Content-Length: {length}\r\n\r\n".encode())
        match fault:
            case "cut":
                content = content[: len(content) // 2]
            case "stall":
                writer.write(content[: len(content) // 2])
                await writer.drain()
                await asyncio.sleep(3600)
            case "flip" if content:
                place = secrets.randbelow(len(content))
                content = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        writer.write(content)
        await writer.drain()


@asynccontextmanager
async def fault_proxy(upstream: str) -> AsyncIterator[FaultProxy]:
    proxy = FaultProxy(upstream)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 20)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()

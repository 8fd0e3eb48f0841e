"""A payment provider that honors idempotency keys: just enough HTTP for a demonstration."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any


class PaymentsStub:
    """Listens on a free port of this machine while the block runs.

    A request with a key that it knows is answered as the first time and changes nothing. `charges`
    and `closings` hold what really happened; `requests` counts what was asked. While `books_open`
    is false, closing a month answers 503. `on_charge` is called with the number of a charge that
    was made and not yet answered.
    """

    def __init__(self) -> None:
        self.charges: list[dict[str, Any]] = []
        self.closings: list[dict[str, Any]] = []
        self.requests = 0
        self.books_open = True
        self.on_charge: Callable[[int], None] = lambda number: None
        self.url = ""
        self._answered: dict[str, dict[str, Any]] = {}
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> PaymentsStub:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {
                name.strip().lower(): value.strip()
                for name, _, value in (line.partition(":") for line in head[1:])
            }
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            status, answer = self._answer(head[0].split()[1], headers["idempotency-key"], body)
            shown = json.dumps(answer).encode()
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(shown)}\r\nConnection: close\r\n\r\n".encode()
                + shown
            )
            await writer.drain()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    def _answer(self, path: str, key: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.requests += 1
        if key in self._answered:
            return "200 OK", self._answered[key]
        if path == "/closings" and not self.books_open:
            return "503 Service Unavailable", {"error": "the books are not open yet"}
        kept = self.charges if path == "/charges" else self.closings
        self._answered[key] = {"id": f"{path[1:3]}_{len(kept) + 1}", **body}
        kept.append(self._answered[key])
        if kept is self.charges:
            self.on_charge(len(kept))
        return "200 OK", self._answered[key]

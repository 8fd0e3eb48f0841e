"""A mail server that keeps what it gets: just enough SMTP for a demonstration."""

from __future__ import annotations

import asyncio
import email
from collections import Counter
from contextlib import suppress
from types import TracebackType


class SmtpSink:
    """Listens on a free port of this machine while the block runs.

    `refused` holds addresses that are turned away for now. `received` counts deliveries by
    Message-ID: one that comes a second time is the same mail again, and a mailbox that looks at the
    id shows it once.
    """

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()
        self.refused: set[str] = set()
        self.address = ""
        self._server: asyncio.Server | None = None

    @property
    def deliveries(self) -> int:
        return self.received.total()

    @property
    def mails(self) -> int:
        return len(self.received)

    async def __aenter__(self) -> SmtpSink:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
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
            await self._talk(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 sink\r\n")
        while line := await reader.readline():
            command = line.decode("ascii", "replace").strip()
            match command[:4].upper():
                case "RCPT" if command.partition("<")[2].partition(">")[0] in self.refused:
                    writer.write(b"450 mailbox busy, try again later\r\n")
                case "DATA":
                    writer.write(b"354 go on\r\n")
                    data = await reader.readuntil(b"\r\n.\r\n")
                    self.received[email.message_from_bytes(data)["Message-ID"]] += 1
                    writer.write(b"250 kept\r\n")
                case "QUIT":
                    writer.write(b"221 bye\r\n")
                    return
                case _:
                    writer.write(b"250 ok\r\n")
            await writer.drain()

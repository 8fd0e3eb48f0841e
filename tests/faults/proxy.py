"""A TCP proxy in front of a PostgreSQL socket, which can be cut or stalled: a partition without
privileges. It runs in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from enum import Enum, auto
from urllib.parse import parse_qs, quote, unquote, urlsplit

_CHUNK = 65536


class Mode(Enum):
    PASS = auto()
    CUT = auto()
    """Connections are reset, new ones too."""
    STALL = auto()
    """Connections stay, new ones are taken, and no byte moves in either direction."""


class Proxy:
    """Give `dsn` to whoever must be cut off; everybody else keeps the server's own address."""

    def __init__(self, server_dsn: str) -> None:
        parts = urlsplit(server_dsn)
        query = parse_qs(parts.query)
        self._socket = f"{unquote(query['host'][0])}/.s.PGSQL.{query['port'][0]}"
        self._user, self._database = parts.username or "mediamill", parts.path.lstrip("/")
        self._mode = Mode.PASS
        self._open: set[asyncio.StreamWriter] = set()
        self._moves: asyncio.Event | None = None
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._main, name="proxy", daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    @property
    def dsn(self) -> str:
        user = quote(self._user)
        return f"postgresql://{user}@127.0.0.1:{self.port}/{self._database}?sslmode=disable"

    def cut(self) -> None:
        self._set(Mode.CUT)

    def stall(self) -> None:
        self._set(Mode.STALL)

    def heal(self) -> None:
        """Bytes move again; what was held back during a stall arrives late."""
        self._set(Mode.PASS)

    def close(self) -> None:
        if self._thread.is_alive():
            self.cut()
            self._loop.call_soon_threadsafe(self._listener.close)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    def _set(self, mode: Mode) -> None:
        done = threading.Event()

        def change() -> None:
            assert self._moves is not None
            self._mode = mode
            if mode is Mode.STALL:
                self._moves.clear()
            else:
                self._moves.set()
            if mode is Mode.CUT:
                for writer in list(self._open):
                    writer.transport.abort()
            done.set()

        self._loop.call_soon_threadsafe(change)
        assert done.wait(10)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._ready.set()
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _listen(self) -> None:
        self._moves = asyncio.Event()
        self._moves.set()
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._moves is not None
        self._open.add(writer)
        behind: asyncio.StreamWriter | None = None
        try:
            await self._moves.wait()
            if self._mode is Mode.CUT:
                return
            answers, behind = await asyncio.open_unix_connection(self._socket)
            self._open.add(behind)
            await asyncio.gather(self._pump(reader, behind), self._pump(answers, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for end in (writer, behind):
                if end is not None:
                    self._open.discard(end)
                    end.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        assert self._moves is not None
        with suppress(OSError):
            while data := await source.read(_CHUNK):
                await self._moves.wait()
                target.write(data)
                await target.drain()
        # The end of one direction is the end of the connection.
        for end in (target,):
            end.close()

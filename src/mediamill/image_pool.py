"""Warm image children: started when needed, asked one picture at a time, replaced when they age,
crash, hang or change hands.

A child has met hostile bytes, so the pool believes nothing it says beyond the protocol, and never
lets it serve a second tenant: what one tenant's file may have done to it cannot reach another's.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from mediamill.failures import BY_NAME, Code, Failure
from mediamill.imaging import wire

DEFAULT_MAX_JOBS: Final = 200
DEFAULT_MAX_CPU_SECONDS: Final = 900.0
START_SECONDS: Final = 30.0
_LAST_BREATH_SECONDS: Final = 2.0
_DETAIL_CHARACTERS: Final = 500
_LOG_CHARACTERS: Final = 16_000


class Child(Protocol):
    """A started process; `asyncio.subprocess.Process` is one. Killing it when it is gone does no
    harm."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def kill(self) -> None: ...
    async def wait(self) -> int: ...


Spawn = Callable[[list[str], tuple[int, ...]], Awaitable[Child]]
"""Starts `argv` with the given descriptors inherited, in a jail if it knows one."""


@dataclass(slots=True, eq=False)
class _Worker:
    process: Child
    connection: socket.socket
    tenant: object
    """Whose pictures it has seen. A new child has seen nobody's."""
    owner: str | None = None
    """Who waits for its answer now."""
    jobs: int = 0
    cpu_seconds: float = 0.0
    killed: bool = False
    """By us, so that its death says nothing about the picture."""

    def kill(self) -> None:
        self.killed = True
        with suppress(ProcessLookupError):
            self.process.kill()


_NOBODY: Final = object()
# After these the child may be short of memory or confused: a fresh one is cheap.
_UNSOUND: Final = {Code.MEMORY_LIMIT.code, Code.TOOL_FAILED.code, Code.OUTPUT_LIMIT.code}


class ImagePool:
    """Up to `size` image children at once. Use it as a context manager, or `close` it.

    A child is replaced after `max_jobs` pictures or `max_cpu_seconds` of its own processor time. A
    jail's limit on processor time counts from the child's start, so it must leave room above that.
    """

    def __init__(
        self,
        spawn: Spawn,
        *,
        size: int,
        max_jobs: int = DEFAULT_MAX_JOBS,
        max_cpu_seconds: float = DEFAULT_MAX_CPU_SECONDS,
        concurrency: int = 1,
        python: str = sys.executable,
        explain: Callable[[Child], Failure] | None = None,
    ) -> None:
        """`explain` says why a child that died by itself did so; by default, its signal does."""
        if size < 1 or max_jobs < 1:
            raise ValueError("size and max_jobs must be at least 1")
        self._spawn = spawn
        self._size = size
        self._max_jobs = max_jobs
        self._max_cpu_seconds = max_cpu_seconds
        self._explain = explain or _death
        self._argv = [python, "-I", "-m", "mediamill.imaging", "--concurrency", str(concurrency)]
        self._slots = asyncio.Semaphore(size)
        self._starting = 0
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._funerals: set[asyncio.Future[Any]] = set()
        self._closed = False

    async def __aenter__(self) -> ImagePool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pids(self) -> list[int]:
        """The children alive now, idle or busy."""
        return [worker.process.pid for worker in (*self._idle, *self._busy)]

    async def warm(self, count: int = 1) -> dict[str, Any]:
        """Start children ahead of need, wait until one answers, and return what it can do."""
        missing = min(count, self._size) - self._alive
        for worker in await asyncio.gather(*(self._start() for _ in range(max(0, missing)))):
            self._idle.append(worker)
        return await self.request({"op": "hello"}, (), wall_seconds=START_SECONDS)

    async def request(
        self,
        op: Mapping[str, Any],
        fds: Sequence[int],
        *,
        wall_seconds: float,
        owner: str | None = None,
        tenant: object = None,
    ) -> dict[str, Any]:
        """Ask a child, and return its answer; raise `Failure` for a failure that it answers.

        A failure has what the libraries said as a note. The descriptors stay the caller's
        to close. A child is reused for the same `tenant` only; `owner` is the name under
        which `kill` finds this request. A drawing (`draw`) gets a child of its own, which
        ends with it. The child is killed, and gone when this returns, if it does not answer
        within `wall_seconds` (`time_limit`), dies (`tool_failed`; `memory_limit` if that
        was the reason), breaks the protocol, or if the waiting task is canceled.
        """
        message = wire.pack(dict(op), limit=wire.MAX_REQUEST_BYTES)
        if len(fds) > wire.MAX_FDS:
            raise ValueError(f"at most {wire.MAX_FDS} descriptors")
        async with self._slots:
            alone = op.get("op") == "draw"
            worker = await self._take(_NOBODY if op.get("op") == "hello" else tenant, alone=alone)
            worker.owner = owner
            sound = False
            try:
                async with asyncio.timeout(wall_seconds):
                    answer = await _exchange(worker.connection, message, fds)
                sound = _sound(answer) and not alone
                worker.cpu_seconds += _number(answer.get("cpu_seconds"))
            except TimeoutError:
                raise Failure(
                    Code.TIME_LIMIT,
                    f"The picture took more than {wall_seconds:g} seconds.",
                    limit={
                        "name": "image_seconds",
                        "allowed": round(wall_seconds, 1),
                        "seen": round(wall_seconds, 1),
                        "unit": "seconds",
                    },
                ) from None
            except wire.BrokenMessage as error:
                raise Failure(Code.TOOL_FAILED, "The decoder gave no usable answer.") from error
            except (OSError, EOFError) as error:
                raise await self._obituary(worker) from error
            finally:
                await self._give_back(worker, sound=sound)
        if "failure" in answer:
            failure = _failure(answer["failure"])
            failure.add_note(_lines(answer.get("log")))
            raise failure
        return answer

    def kill(self, owner: str) -> int:
        """Kill the children that work for `owner` now; how many. May be called from any thread;
        the requests then end with `canceled`."""
        mine = [worker for worker in tuple(self._busy) if worker.owner == owner]
        for worker in mine:
            worker.kill()
        return len(mine)

    async def close(self) -> None:
        """Kill every child, also those at work, and wait until they are gone."""
        self._closed = True
        for worker in self._busy:
            # Its request notices and buries it; the socket is still being waited on there.
            worker.kill()
        while self._idle:
            await self._bury(self._idle.pop())
        for _ in range(self._size):
            await self._slots.acquire()
        for _ in range(self._size):
            self._slots.release()
        while self._funerals:
            await asyncio.gather(*self._funerals, return_exceptions=True)

    # The life of a child.

    @property
    def _alive(self) -> int:
        return len(self._idle) + len(self._busy) + self._starting

    async def _take(self, tenant: object, *, alone: bool) -> _Worker:
        """A child for this tenant: one of its own, or a fresh one; always fresh if `alone`."""
        if self._closed:
            raise _shutting_down()
        for worker in [w for w in self._idle if _is_lost(w)]:
            self._idle.remove(worker)  # while idle, which says nothing about this picture
            self._remember(asyncio.ensure_future(self._bury(worker)))
        mine = [w for w in self._idle if tenant is _NOBODY or w.tenant in (tenant, _NOBODY)]
        if mine and not alone:
            # Its own before a fresh one, so that fresh ones are there for others.
            worker = min(reversed(mine), key=lambda w: w.tenant is _NOBODY)
            self._idle.remove(worker)
        else:
            # A slot is held, so whatever fills the pool beyond the busy ones is idle or starting.
            evicted = self._idle.pop(0) if self._idle and self._alive >= self._size else None
            self._starting += 1
            try:
                if evicted is not None:
                    await self._bury(evicted)
                worker = await self._start(*(("--drawings",) if alone else ()))
            finally:
                self._starting -= 1
            if self._closed:
                await self._bury(worker)
                raise _shutting_down()
        if tenant is not _NOBODY:
            worker.tenant = tenant
        self._busy.add(worker)
        return worker

    async def _give_back(self, worker: _Worker, *, sound: bool) -> None:
        worker.owner = None
        worker.jobs += 1
        fresh = worker.jobs < self._max_jobs and worker.cpu_seconds < self._max_cpu_seconds
        if sound and fresh and not worker.killed and not self._closed:
            self._idle.append(worker)
            self._busy.discard(worker)
            return
        try:
            await self._bury(worker)
        finally:
            self._busy.discard(worker)

    async def _start(self, *more: str) -> _Worker:
        starting = asyncio.ensure_future(self._spawned(*more))
        try:
            async with asyncio.timeout(START_SECONDS):
                return await asyncio.shield(starting)
        except BaseException as error:
            self._remember(asyncio.ensure_future(self._discard(starting)))
            if isinstance(error, TimeoutError):
                raise Failure(Code.INTERNAL, "An image process did not start.") from error
            raise

    async def _spawned(self, *more: str) -> _Worker:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # Theirs must stay open until the child has inherited it, whoever stops waiting meanwhile.
        with theirs:
            try:
                ours.setblocking(False)
                fd = theirs.fileno()
                process = await self._spawn([*self._argv, *more, "--fd", str(fd)], (fd,))
            except BaseException:
                ours.close()
                raise
        return _Worker(process, ours, _NOBODY)

    async def _discard(self, starting: asyncio.Future[_Worker]) -> None:
        with suppress(Exception):
            await self._bury(await starting)

    async def _bury(self, worker: _Worker) -> int:
        """Kill a child and wait until it is gone. Being canceled meanwhile does not stop it."""
        worker.connection.close()
        if worker.process.returncode is None:
            worker.kill()
        funeral = asyncio.ensure_future(worker.process.wait())
        self._remember(funeral)
        return await asyncio.shield(funeral)

    def _remember(self, funeral: asyncio.Future[Any]) -> None:
        self._funerals.add(funeral)
        funeral.add_done_callback(self._funerals.discard)

    async def _obituary(self, worker: _Worker) -> Failure:
        """Why a child is gone. It closed its end, so it is dead or about to be."""
        if not worker.killed:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_BREATH_SECONDS):
                    await worker.process.wait()
        if self._closed:
            return _shutting_down()
        if worker.killed:
            return Failure(Code.CANCELED)
        return self._explain(worker.process)


def _is_lost(worker: _Worker) -> bool:
    """Whether an idle child has died, which its socket tells before it has been reaped, or has
    spoken unasked, which would be taken for the answer to the next request."""
    if worker.process.returncode is not None:
        return True
    try:
        worker.connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


async def _exchange(
    connection: socket.socket, message: bytes, fds: Sequence[int]
) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    # The child has read everything before it answered, so its buffer is empty and takes a part of
    # any message at once; the descriptors travel with that first part.
    sent = socket.send_fds(connection, [message], list(fds)) if fds else connection.send(message)
    if sent < len(message):
        await loop.sock_sendall(connection, message[sent:])
    header = await _read(loop, connection, wire.LENGTH.size)
    length = wire.body_length(header, limit=wire.MAX_ANSWER_BYTES)
    return wire.unpack(await _read(loop, connection, length))


async def _read(loop: asyncio.AbstractEventLoop, connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = await loop.sock_recv(connection, length - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


# --- What an answer or a death means

# GLib ends the process with SIGTRAP when it cannot allocate; a SIGKILL that is not ours is the
# kernel's, for want of memory; SIGXCPU is the limit on processor time.
_DEATHS: Final = {
    signal.SIGKILL: Code.MEMORY_LIMIT,
    signal.SIGTRAP: Code.MEMORY_LIMIT,
    signal.SIGXCPU: Code.TIME_LIMIT,
    signal.SIGXFSZ: Code.OUTPUT_LIMIT,
}


def _shutting_down() -> Failure:
    return Failure(Code.INTERNAL, "The image processes are being shut down.")


def _death(child: Child) -> Failure:
    returncode = child.returncode
    if returncode is not None:
        # A launcher that stays in between reports a signal as 128 + its number.
        number = -returncode if returncode < 0 else returncode - 128
        for name, code in _DEATHS.items():
            if number == name:
                return Failure(code)
    return Failure(Code.TOOL_FAILED, "The decoder crashed on this file.")


def _sound(answer: Mapping[str, Any]) -> bool:
    """Whether the child that gave this answer may be asked again."""
    failure = answer.get("failure")
    return not (isinstance(failure, dict) and failure.get("code") in _UNSOUND)


def _lines(answered: object) -> str:
    """What the libraries said, for the log of the attempt."""
    lines = answered if isinstance(answered, list) else []
    return "\n".join(str(line) for line in lines)[-_LOG_CHARACTERS:]


def _number(answered: object) -> float:
    return float(answered) if isinstance(answered, int | float) and answered > 0 else 0.0


def _failure(answered: object) -> Failure:
    """The failure that a child answered, with nothing in it that we did not check."""
    if not isinstance(answered, dict):
        return Failure(Code.TOOL_FAILED, "The decoder gave no usable answer.")
    code = BY_NAME.get(str(answered.get("code")), Code.TOOL_FAILED)
    detail = str(answered.get("detail") or "")[:_DETAIL_CHARACTERS]
    return Failure(code, detail, limit=_limit(answered.get("limit")))


def _limit(answered: object) -> dict[str, Any] | None:
    if not isinstance(answered, dict):
        return None
    name, unit = answered.get("name"), answered.get("unit")
    allowed, seen = answered.get("allowed"), answered.get("seen")
    if not (isinstance(name, str) and isinstance(unit, str)):
        return None
    if not (isinstance(allowed, int | float) and isinstance(seen, int | float)):
        return None
    return {"name": name[:60], "allowed": allowed, "seen": seen, "unit": unit[:20]}

"""Take the steps of a call over HTTP: one driver that blocks, one for asyncio."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AsyncExitStack, ExitStack, aclosing, closing
from typing import Any, Final, TypeVar

import httpx2 as httpx

from mediamill.client.errors import ConnectionFailed
from mediamill.client.steps import (
    Answer,
    Emit,
    Fetch,
    Fetched,
    Flow,
    Frames,
    Next,
    Open,
    Pause,
    Send,
    Slice,
    Together,
)

T = TypeVar("T")
_SILENCE_SECONDS: Final = 45.0  # a stream gives a sign of life every 15 s
_ERROR_BYTES: Final = 1 << 16


class _Stopped(Exception):
    """A call beside this one has failed."""


class Driver:
    """Blocks until each step is done. Safe to use from several threads."""

    def __init__(self, url: str, key: str, seconds: float, transport: Any = None) -> None:
        self._key = key
        self._http = httpx.Client(base_url=url, timeout=seconds, transport=transport)

    def close(self) -> None:
        self._http.close()

    def run(self, flow: Flow[T], *, stop: threading.Event | None = None) -> T:
        steps = self.iterate(flow, stop=stop)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: T = end.value
                return result

    def iterate(
        self, flow: Flow[T], *, stop: threading.Event | None = None
    ) -> Generator[Any, None, T]:
        """The items that a call emits. The generator returns what the call returns."""
        stop = stop or threading.Event()
        value: Any = None

        def read(body: Slice) -> Iterator[bytes]:
            for data in body:
                if stop.is_set():
                    raise _Stopped
                yield data

        fault: Exception | None = None
        with closing(flow), ExitStack() as stack:
            lines: Iterator[str] = iter(())
            frames = Frames()
            while True:
                try:
                    step = flow.send(value) if fault is None else flow.throw(fault)
                except StopIteration as end:
                    ended: T = end.value
                    return ended
                value = fault = None
                try:
                    match step:
                        case Emit(item):
                            yield item
                        case Pause(seconds):
                            if stop.wait(seconds):
                                raise _Stopped
                        case Together(flows, at_once):
                            value = self._together(flows, at_once)
                        case Send():
                            answer = self._http.request(**_request(step, self._key, read))
                            value = _answer(answer, answer.content)
                        case Open(send):
                            stack.close()
                            request = _request(send, self._key, read, silence=_SILENCE_SECONDS)
                            answer = stack.enter_context(self._http.stream(**request))
                            content = b""
                            if answer.status_code >= 400:
                                content = answer.read()
                            lines, frames = answer.iter_lines(), Frames()
                            value = _answer(answer, content)
                        case Next():
                            for line in lines:
                                value = frames.feed(line)
                                if value is not None:
                                    break
                        case Fetch():
                            value = self._fetch(step)
                except httpx.TransportError as error:
                    fault = ConnectionFailed(str(error) or type(error).__name__)

    def _together(self, flows: Sequence[Flow[Any]], at_once: int) -> list[Any]:
        stop = threading.Event()
        with ThreadPoolExecutor(at_once, "mediamill-part") as threads:
            running = [threads.submit(self.run, flow, stop=stop) for flow in flows]
            try:
                for one in as_completed(running):
                    one.result()
            except BaseException:  # Ctrl-C too
                stop.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return [one.result() for one in running]

    def _fetch(self, step: Fetch) -> Fetched:
        digest, size = hashlib.sha256(), 0
        request = _request(Send("GET", step.url), self._key, iter)
        with self._http.stream(**request) as answer:
            if answer.status_code >= 400:
                return Fetched(answer.status_code, 0, "", answer.read()[:_ERROR_BYTES])
            with step.into.open("wb") as file:
                for data in answer.iter_bytes():
                    file.write(data)
                    digest.update(data)
                    size += len(data)
            return Fetched(answer.status_code, size, digest.hexdigest(), b"")


class AsyncDriver:
    """The same steps, awaited."""

    def __init__(self, url: str, key: str, seconds: float, transport: Any = None) -> None:
        self._key = key
        self._http = httpx.AsyncClient(base_url=url, timeout=seconds, transport=transport)

    async def close(self) -> None:
        await self._http.aclose()

    async def run(self, flow: Flow[T]) -> T:
        result: list[T] = []
        async with aclosing(self.iterate(_returning(flow, result))) as steps:
            async for _ in steps:
                pass
        return result[0]

    async def iterate(self, flow: Flow[Any]) -> AsyncGenerator[Any, None]:
        """The items that a call emits."""
        value: Any = None
        fault: Exception | None = None
        with closing(flow):
            async with AsyncExitStack() as stack:
                lines: AsyncIterator[str] | None = None
                frames = Frames()
                while True:
                    try:
                        step = flow.send(value) if fault is None else flow.throw(fault)
                    except StopIteration:
                        return
                    value = fault = None
                    try:
                        match step:
                            case Emit(item):
                                yield item
                            case Pause(seconds):
                                await asyncio.sleep(seconds)
                            case Together(flows, at_once):
                                value = await self._together(flows, at_once)
                            case Send():
                                answer = await self._http.request(
                                    **_request(step, self._key, aiter)
                                )
                                value = _answer(answer, answer.content)
                            case Open(send):
                                await stack.aclose()
                                request = _request(send, self._key, aiter, silence=_SILENCE_SECONDS)
                                answer = await stack.enter_async_context(
                                    self._http.stream(**request)
                                )
                                content = b""
                                if answer.status_code >= 400:
                                    content = await answer.aread()
                                lines, frames = answer.aiter_lines(), Frames()
                                value = _answer(answer, content)
                            case Next():
                                assert lines is not None
                                async for line in lines:
                                    value = frames.feed(line)
                                    if value is not None:
                                        break
                            case Fetch():
                                value = await self._fetch(step)
                    except httpx.TransportError as error:
                        fault = ConnectionFailed(str(error) or type(error).__name__)

    async def _together(self, flows: Sequence[Flow[Any]], at_once: int) -> list[Any]:
        turns = asyncio.Semaphore(at_once)

        async def one(flow: Flow[Any]) -> Any:
            async with turns:
                return await self.run(flow)

        running = [asyncio.ensure_future(one(flow)) for flow in flows]
        try:
            return await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _fetch(self, step: Fetch) -> Fetched:
        digest, size = hashlib.sha256(), 0
        request = _request(Send("GET", step.url), self._key, aiter)
        async with self._http.stream(**request) as answer:
            if answer.status_code >= 400:
                return Fetched(answer.status_code, 0, "", (await answer.aread())[:_ERROR_BYTES])
            with step.into.open("wb") as file:
                async for data in answer.aiter_bytes():
                    file.write(data)
                    digest.update(data)
                    size += len(data)
            return Fetched(answer.status_code, size, digest.hexdigest(), b"")


def _returning(flow: Flow[T], result: list[T]) -> Flow[None]:
    """The same call; what it returns goes into the list, since an async generator returns
    nothing."""
    result.append((yield from flow))


def _request(send: Send, key: str, reader: Any, *, silence: float | None = None) -> dict[str, Any]:
    """The arguments of the HTTP library for a step."""
    headers = dict(send.headers)
    if send.url.startswith("/"):
        headers["Authorization"] = f"Bearer {key}"
    found: dict[str, Any] = {"method": send.method, "url": send.url, "headers": headers}
    if send.query:
        found["params"] = {k: v for k, v in send.query.items() if v is not None}
    if send.json is not None:
        found["json"] = send.json
    if send.body is not None:
        found["content"] = reader(send.body)
        headers.setdefault("Content-Length", str(send.body.length))
    seconds = silence or send.seconds
    if seconds is not None:
        found["timeout"] = seconds
    return found


def _answer(answer: httpx.Response, content: bytes) -> Answer:
    return Answer(answer.status_code, {k.lower(): v for k, v in answer.headers.items()}, content)

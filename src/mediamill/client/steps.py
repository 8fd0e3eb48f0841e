"""How every call is made, without making it: a call is a generator of steps, and a driver takes
them with a blocking or an asynchronous HTTP library. So both clients share one behaviour."""

from __future__ import annotations

import hashlib
import json
import random
import secrets
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from mediamill.client.errors import ConnectionFailed, Problem, problem
from mediamill.client.models import Event

T = TypeVar("T")
Flow = Generator[Any, Any, T]

_CHUNK: Final = 1 << 18
_LONGEST_PAUSE_SECONDS: Final = 60.0
_TRANSIENT: Final = frozenset({408, 429, 502, 503, 504})


class Source:
    """The bytes to upload: a file, or what is in memory."""

    def __init__(self, content: str | Path | bytes, filename: str | None = None) -> None:
        self._path = None if isinstance(content, bytes) else Path(content)
        self._bytes = content if isinstance(content, bytes) else b""
        self.filename = filename or (self._path.name if self._path else None)
        self.size = self._path.stat().st_size if self._path else len(self._bytes)

    @property
    def fingerprint(self) -> list[Any]:
        """What must be the same for an upload to go on in another process."""
        if self._path is None:
            return [hashlib.sha256(self._bytes).hexdigest()]
        stat = self._path.stat()
        return [str(self._path.resolve()), stat.st_size, stat.st_mtime_ns]

    def read(self, offset: int, length: int) -> Iterator[bytes]:
        """These bytes in pieces. Raises OSError when the file has become shorter."""
        if self._path is None:
            yield self._bytes[offset : offset + length]
            return
        with self._path.open("rb") as file:
            file.seek(offset)
            while length:
                data = file.read(min(_CHUNK, length))
                if not data:
                    raise OSError(f"{self._path} has become shorter while it was sent")
                length -= len(data)
                yield data


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of a source as the body of a request; says where it began and how many bytes of it
    are sent."""

    source: Source
    offset: int
    length: int
    on_sent: Callable[[int, int], None] | None = None

    def __iter__(self) -> Iterator[bytes]:
        sent = 0
        for data in self.source.read(self.offset, self.length):
            yield data
            sent += len(data)
            if self.on_sent is not None:
                self.on_sent(self.offset, sent)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for data in self:
            yield data


# Steps.


@dataclass(frozen=True, slots=True)
class Send:
    """One request; the driver answers with an Answer, or throws ConnectionFailed.

    An address that begins with `/` is the API's and gets the key; a signed one gets none.
    """

    method: str
    url: str
    query: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    json: Any = None
    body: Slice | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Open:
    """Open an event stream; answers with its status and, of a refusal, the content."""

    send: Send


@dataclass(frozen=True, slots=True)
class Next:
    """The next event of the open stream; None when it has closed."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Write what is at an address into a file; answers with status, size and digest."""

    url: str
    into: Path


@dataclass(frozen=True, slots=True)
class Fetched:
    status: int
    size: int
    sha256: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Together:
    """Take several calls side by side, at most so many at once; answers when all are done. The
    first that fails ends the others, and is thrown."""

    flows: Sequence[Flow[Any]]
    at_once: int


@dataclass(frozen=True, slots=True)
class Emit:
    """One item for the caller of an iterating call."""

    item: Any


# The parts that calls are made of.


def call(send: Send, *, retries: int) -> Flow[Answer]:
    """An answer below 400, after as many tries as it takes. Raises Problem, ConnectionFailed.

    A POST carries one Idempotency-Key over all tries, so that a lost answer makes nothing twice.
    """
    if send.method == "POST" and send.url.startswith("/"):
        key = {"Idempotency-Key": f"auto-{secrets.token_hex(16)}"}
        send = replace(send, headers=key | send.headers)
    tried = 0
    while True:
        try:
            answer: Answer = yield send
        except ConnectionFailed:
            if tried >= retries:
                raise
            after = None
        else:
            if answer.status < 400:
                return answer
            refusal = refused(answer)
            again = answer.status in _TRANSIENT or (refusal.retryable and answer.status >= 500)
            again = again or refusal.code == "idempotency_in_flight"
            if not again or tried >= retries:
                raise refusal
            after = refusal.retry_after_seconds
        yield Pause(pause(tried, after))
        tried += 1


def pause(tried: int, after: float | None) -> float:
    """Seconds before another try: as the server asks, else longer each time, and spread."""
    if after is not None:
        return min(after, _LONGEST_PAUSE_SECONDS)
    return min(0.5 * 2.0**tried, 8.0) * random.uniform(0.5, 1.0)  # noqa: S311


def refused(answer: Answer | Fetched) -> Problem:
    headers = answer.headers if isinstance(answer, Answer) else {}
    try:
        body = json.loads(answer.content)
    except ValueError:
        body = {"detail": answer.content[:200].decode("utf-8", "replace")}
    if not isinstance(body, dict):
        body = {"detail": str(body)[:200]}
    return problem(answer.status, body, headers)


class Frames:
    """Events out of the lines of a stream."""

    def __init__(self) -> None:
        self._cursor: str | None = None
        self._type, self._data = "message", ""

    def feed(self, line: str) -> Event | None:
        """An event that this line completes. A sign of life is one of type `alive`."""
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "id":
                self._cursor = value
            case "event":
                self._type = value
            case "data":
                self._data += value
            case "" if line:
                return Event(type="alive")
            case "":
                type_, data, cursor = self._type, self._data, self._cursor
                self._type, self._data, self._cursor = "message", "", None
                if data:
                    return told(type_, data, cursor)
        return None


def told(type_: str, data: str, cursor: str | None) -> Event:
    """An event from its JSON. A snapshot or reset has no envelope: its body is the data."""
    body = json.loads(data)
    raw = data.encode()
    if "type" in body and isinstance(body.get("data"), dict):
        return Event.model_validate(body | {"cursor": cursor, "raw": raw})
    return Event(type=type_, data=body, cursor=cursor, raw=raw)

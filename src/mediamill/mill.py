"""Jobs of your own: the small interface that an application sees.

    from mediamill import Job, Mill

    mill = Mill()

    @mill.job("report.monthly", version=1, timeout="10m")
    async def monthly_report(job: Job, payload: MonthlyReport) -> dict:
        ...

A worker is pointed at it with `mediamill worker --app shop.jobs:mill`. The payload's annotation (a
Pydantic model, a dataclass, a TypedDict, or nothing) is what is accepted; a function may be async,
or plain and then runs in a thread. It returns what JSON can hold, or `Wait([...])`, or raises
`Failure`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import re
import threading
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from mediamill import db, ids, jobs, queue
from mediamill.config import QUEUES
from mediamill.controls import Kind
from mediamill.failures import Code, Failure
from mediamill.jobs import Claim, NewJob

F = TypeVar("F", bound=Callable[..., Any])

MAX_JSON_BYTES: Final = 256 * 1024
"""The most that a payload, a result or an effect's result may have as JSON."""
_KIND: Final = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")
_NUL: Final = re.compile(r"(?<!\\)(\\\\)*\\u0000")  # JSON may say it, PostgreSQL keeps none
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_GRACE_SECONDS: Final = 1.0
RESERVED_KINDS: Final = frozenset({"image", "video", "audio", "preview"})


@dataclass(frozen=True, slots=True)
class Child:
    """A job that its parent waits for. `key` names it within the parent: a replayed parent finds
    the results of the children that completed under their keys. By default, its place in the list.
    `weight` is its part of the parent's progress."""

    kind: str
    payload: Any = None
    key: str | None = None
    version: int | None = None
    weight: float = 1.0
    priority: int | None = None

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError("the weight of a child must be more than nothing")


@dataclass(frozen=True, slots=True)
class Wait:
    """Returned by a job that wants its children done first. It holds no slot while it waits, and is
    called again when the last one completed: `job.results` then holds what they returned."""

    children: tuple[Child, ...]

    def __init__(self, children: Iterable[Child]) -> None:
        object.__setattr__(self, "children", tuple(children))


class Running(Protocol):
    """What `Job` needs of the attempt that it stands for."""

    @property
    def claim(self) -> Claim: ...
    @property
    def pool(self) -> db.Pool: ...
    @property
    def log(self) -> Any: ...
    async def enter(self, stage: str) -> None: ...
    def progress(self, percent: float) -> None: ...
    def stopping(self) -> bool: ...


class Job:
    """One attempt of a job, as its function sees it."""

    def __init__(self, running: Running, results: Mapping[str, Any] | None) -> None:
        self._running = running
        self.results = results
        """What the children returned, by their keys; None before the job has waited."""

    @property
    def id(self) -> str:
        return self._running.claim.public_id

    @property
    def attempt(self) -> int:
        """Counted from 1."""
        return self._running.claim.attempt

    @property
    def tenant_id(self) -> str:
        return self._running.claim.tenant_id

    @property
    def log(self) -> Any:
        """A structlog logger with the job's id in every line."""
        return self._running.log

    @property
    def stopping(self) -> bool:
        """The lease is lost, the job is canceled or handed back. A plain function should look now
        and then: its thread cannot be stopped from outside."""
        return self._running.stopping()

    def progress(self, percent: float) -> None:
        """How far it is, 0 to 100. Cheap to call often; written at most once a second. May be
        called from the thread of a plain function."""
        self._running.progress(percent)

    async def stage(self, name: str) -> None:
        """A new stage of the work begins: it shows in the status and in the timeline."""
        await self._running.enter(name)

    async def once(self, key: str, effect: Callable[[str], Any]) -> Any:
        """Do an outside effect unless this job has done it before, in whatever attempt.

        `effect` is called with an idempotency key that is the same in every attempt, and its
        result (JSON) is recorded and given again to a repeat. Between the effect and its record
        the process may die; a repeat then calls again with the same key. So the effect happens at
        least once, and exactly once if the other side honours the key. Raises LeaseLost.
        """
        claim = self._running.claim
        async with db.acquire(self._running.pool) as connection:
            known = await jobs.effect(connection, claim.tenant_id, claim.id, key)
        if known is not None:
            return known["result"]
        result = await _call(effect, self.idempotency_key(key))
        from mediamill import failpoints

        failpoints.hit("app.effect")
        check_json(result, "the result of an effect")
        async with db.transaction(self._running.pool) as connection:
            await jobs.record_effect(connection, claim, key, result)
            await jobs.still_hold(connection, claim)
        return result

    @asynccontextmanager
    async def transaction(self, key: str) -> AsyncIterator[db.Connection | None]:
        """A transaction of our database in which an effect happens exactly once.

        Gives the connection, or None if it happened before. What is done on the connection and the
        record of it are one commit, guarded by the fence. Its statements may take as long as they
        must; a pause between two of them that is longer than a lease ends it, since the server
        cannot tell it from a process that is frozen. Raises LeaseLost.
        """
        claim = self._running.claim
        async with db.transaction(self._running.pool) as connection:
            if await jobs.record_effect(connection, claim, key, None):
                yield connection
                await jobs.still_hold(connection, claim)
            else:
                yield None

    def idempotency_key(self, key: str) -> str:
        """A key for the other side of an effect: stable over attempts, different for every job."""
        return f"{self.id}:{key}"


@dataclass(frozen=True, slots=True)
class JobKind:
    """A registered function, and how it reads its payload."""

    kind: Kind
    function: Callable[..., Any]
    payload: TypeAdapter[Any] | None
    """None takes the JSON object as it is."""
    parameters: int
    """How many of (job, payload) the function takes."""

    def read(self, payload: dict[str, Any]) -> Any:
        """The typed payload. Raises Failure(INVALID_REQUEST)."""
        if self.payload is None:
            return payload
        try:
            return self.payload.validate_python(payload)
        except ValidationError as error:
            faults = "; ".join(
                f"{'/'.join(map(str, f['loc'])) or 'payload'}: {f['msg']}" for f in error.errors()
            )
            raise Failure(Code.INVALID_REQUEST, faults[:500]) from None


@dataclass(slots=True)
class Mill:
    """The jobs of an application, by kind and version."""

    kinds: dict[tuple[str, int], JobKind] = field(default_factory=dict)

    def job(
        self,
        kind: str,
        *,
        version: int = 1,
        queue: str = "default",
        timeout: str | float | None = "10m",
        max_attempts: int = 5,
        concurrency: int | None = None,
    ) -> Callable[[F], F]:
        """Register a function for a kind of job.

        `version` names the shape of the payload: a worker leaves versions that it does not know to
        others. `timeout` is for one attempt, as seconds or text such as "90s" or "10m";
        `concurrency` caps running jobs of the kind over all workers.
        """
        if not _KIND.fullmatch(kind) or kind in RESERVED_KINDS:
            raise ValueError(f"{kind!r} is no name for a kind; use one such as report.monthly")
        if queue not in QUEUES:
            raise ValueError(f"{queue!r} is no queue; the queues are {', '.join(QUEUES)}")
        if version < 1 or max_attempts < 1 or (concurrency is not None and concurrency < 1):
            raise ValueError("version, max_attempts and concurrency count from 1")
        if (kind, version) in self.kinds:
            raise ValueError(f"{kind} version {version} is registered twice")

        def register(function: F) -> F:
            row = Kind(kind, version, queue, max_attempts, seconds(timeout), concurrency)
            parameters = len(inspect.signature(function).parameters)
            self.kinds[kind, version] = JobKind(row, function, _payload_of(function), parameters)
            return function

        return register

    async def enqueue(
        self,
        connection: db.Connection,
        kind: str,
        payload: Any = None,
        *,
        tenant_id: str = "default",
        version: int | None = None,
        priority: int = 0,
        delay_seconds: float = 0.0,
        dedup_key: str | None = None,
    ) -> str:
        """Enqueue inside your own asyncpg transaction: the job exists if it commits, and only then.

        The connection may be any asyncpg connection to Mediamill's database; the id is returned,
        that of the live job if `dedup_key` names one. Raises ValueError for a kind that is not
        registered or a payload that does not fit.
        """
        found = self.find(kind, version)
        new = new_job(
            found.kind,
            dump(found, payload),
            priority=priority,
            delay_seconds=delay_seconds,
            dedup_key=dedup_key,
        )
        while not await jobs.enqueue(connection, tenant_id, [new]):
            assert dedup_key is not None
            known = await jobs.duplicate(connection, tenant_id, kind, dedup_key)
            if known is not None:
                return ids.encode(ids.JOB, known)
            # The job that held the key ended between the two statements: the key is free.
        return ids.encode(ids.JOB, new.id)

    def find(self, kind: str, version: int | None = None) -> JobKind:
        """A registered kind in this version or the newest. Raises ValueError."""
        if version is None:
            version = max((v for k, v in self.kinds if k == kind), default=0)
        try:
            return self.kinds[kind, version]
        except KeyError:
            raise ValueError(f"{kind} version {version} is not registered") from None


def new_job(
    kind: Kind,
    payload: dict[str, Any],
    *,
    priority: int = 0,
    delay_seconds: float = 0.0,
    dedup_key: str | None = None,
    max_attempts: int | None = None,
    child: Child | None = None,
    child_key: str | None = None,
) -> NewJob:
    """A job of a known kind with its defaults."""
    if not -queue.MAX_PRIORITY <= priority <= queue.MAX_PRIORITY:
        raise ValueError(f"priority goes from -{queue.MAX_PRIORITY} to {queue.MAX_PRIORITY}")
    return NewJob(
        kind=kind.kind,
        payload=payload,
        queue=kind.queue,
        schema_version=kind.version,
        priority=priority,
        delay_seconds=delay_seconds,
        max_attempts=max_attempts or kind.max_attempts,
        timeout_seconds=kind.timeout_seconds,
        dedup_key=dedup_key,
        child_key=child_key,
        weight=child.weight if child else 1.0,
    )


async def run(kind: JobKind, running: Running, children: list[db.Row] | None) -> Any:
    """Call the function of a claimed job; what it returns. Raises Failure, also for its timeout."""
    claim = running.claim
    payload = kind.read(claim.payload)
    results = (
        None
        if children is None
        else {row["child_key"]: (row["result"] or {}).get("value") for row in children}
    )
    job = Job(running, results)
    # A task of its own, so that a function which ignores its end does not hold up ours.
    work = asyncio.create_task(_call(kind.function, *(job, payload)[: kind.parameters]))
    try:
        await asyncio.wait({work}, timeout=claim.timeout_seconds)
    except asyncio.CancelledError:
        await _end(work, running)
        raise
    if not work.done():
        await _end(work, running)
        raise Failure(
            Code.TIME_LIMIT,
            f"It ran longer than {claim.timeout_seconds:g} s.",
            limit={
                "name": "timeout",
                "allowed": claim.timeout_seconds,
                "seen": claim.timeout_seconds,
                "unit": "s",
            },
        )
    if work.cancelled():
        raise Failure(Code.INTERNAL, "The function was canceled from within.")
    returned = work.result()
    if not isinstance(returned, Wait):
        check_json(returned, "the result")
    return returned


def dump(kind: JobKind, payload: Any) -> dict[str, Any]:
    """A payload as the JSON object that is stored. Raises ValueError if it does not fit its
    kind."""
    if kind.payload is not None and not isinstance(payload, dict):
        payload = kind.payload.dump_python(payload, mode="json")
    shown: dict[str, Any] = {} if payload is None else payload
    try:
        kind.read(shown)
    except Failure as failure:
        raise ValueError(failure.problem.detail) from None
    check_json(shown, "the payload")
    return shown


def check_json(value: Any, what: str) -> None:
    """Raise Failure(INVALID_REQUEST) for what JSON cannot hold, or too much of it."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        size = len(text.encode())
    except (TypeError, ValueError) as error:
        raise Failure(Code.INVALID_REQUEST, f"{what} cannot be stored as JSON: {error}") from None
    if _NUL.search(text):
        raise Failure(Code.INVALID_REQUEST, f"{what} cannot be stored: it has a NUL character.")
    if size > MAX_JSON_BYTES:
        raise Failure(
            Code.RESOURCE_LIMIT,
            f"{what} has {size:,} bytes as JSON, at most {MAX_JSON_BYTES:,} are stored.",
            limit={"name": what, "allowed": MAX_JSON_BYTES, "seen": size, "unit": "bytes"},
        )


def seconds(duration: str | float | None) -> float | None:
    """Seconds from a number or text such as "500ms", "90s", "10m", "2h". Raises ValueError."""
    if duration is None or isinstance(duration, int | float):
        value = None if duration is None else float(duration)
    else:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)", duration.strip())
        if found is None:
            raise ValueError(f"{duration!r} is no duration; write it as 90s or 10m")
        value = float(found[1]) * _UNITS[found[2]]
    if value is not None and value <= 0:
        raise ValueError("a duration must be more than nothing")
    return value


def _payload_of(function: Callable[..., Any]) -> TypeAdapter[Any] | None:
    """How the second parameter is annotated."""
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) < 2:
        return None
    hints = typing.get_type_hints(function)
    hint = hints.get(parameters[1].name, dict)
    return None if hint in (dict, Any) or typing.get_origin(hint) is dict else TypeAdapter(hint)


async def _end(work: asyncio.Task[Any], running: Running) -> None:
    """Cancel the function, and wait a moment for it to tidy up; it may go on, without the job."""
    work.cancel()
    await asyncio.wait({work}, timeout=_GRACE_SECONDS)
    if not work.done():
        running.log.error("function_ignores_its_end")
    elif not work.cancelled():
        work.exception()  # of no interest any more


async def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call an async function here, a plain one in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    returned = await _in_thread(function, *arguments)
    return await returned if isinstance(returned, Awaitable) else returned


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a thread of its own: one that hangs takes no other's place, nor does the process
    wait for it at its end."""
    loop = asyncio.get_running_loop()
    returned: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if returned.done():  # nobody waits any more
            return
        if error is None:
            returned.set_result(value)
        else:
            returned.set_exception(error)

    def main() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = context.run(function, *arguments)
        except StopIteration as stopped:  # a future takes it for something else
            error = RuntimeError(repr(stopped))
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=main, name="mill job", daemon=True).start()
    return await returned

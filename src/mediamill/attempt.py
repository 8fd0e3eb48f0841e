"""One run of a job by this process: what its handler sees, how it ends, what it leaves behind."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import asyncpg
import structlog

from mediamill import (
    db,
    failpoints,
    handlers,
    installation,
    jobs,
    media,
    mill,
    originals,
    recipes,
    retry,
    sandbox,
    sidecars,
    variants,
)
from mediamill.config import Settings
from mediamill.controls import Kind
from mediamill.failures import Code, Failure, LeaseLost, Problem, Verdict
from mediamill.handlers import Done, Outcome, Reroute, Wait
from mediamill.image_pool import ImagePool
from mediamill.jobs import Claim
from mediamill.lease import Leases, Stop
from mediamill.media import Description, Original
from mediamill.mill import Mill
from mediamill.originals import Originals
from mediamill.recipes import Recipe
from mediamill.sandbox import Jail, Sandbox
from mediamill.sidecars import Sidecar
from mediamill.storage import Storage
from mediamill.tools import Command, Finished, ProcessGroups, Toolbox
from mediamill.tools import run as run_tool

log = structlog.get_logger()
T = TypeVar("T")

RELEASED: Final = "released"
_OUTAGE_SECONDS: Final = 20.0  # a longer one ends the attempt through its lease
_LOG_TAIL: Final = 8192
_PROGRESS_SECONDS: Final = 1.0
_COMPLETIONS: Final = 50


@dataclass(slots=True)
class Gate:
    """Shut for a while after the storage refused our credentials; nothing that needs it is begun
    then."""

    _until: float = float("-inf")

    def shut(self) -> None:
        self._until = time.monotonic() + retry.HOLD_SECONDS / 2

    @property
    def is_open(self) -> bool:
        return time.monotonic() >= self._until


@dataclass(frozen=True, slots=True)
class Means:
    """What every attempt of a worker shares."""

    settings: Settings
    pool: db.Pool
    storage: Storage
    originals: Originals
    toolbox: Toolbox
    sandbox: Sandbox
    groups: ProcessGroups
    images: ImagePool
    leases: Leases
    handlers: Mapping[str, handlers.Handler]
    mill: Mill
    gate: Gate = field(default_factory=Gate)

    @property
    def offer(self) -> list[Kind]:
        """The application's kinds, for the API to accept."""
        return [known.kind for known in self.mill.kinds.values()]

    @property
    def kinds(self) -> list[tuple[str, int]]:
        """The kinds and payload versions that this worker knows."""
        return [*((kind, 1) for kind in self.handlers), *self.mill.kinds]


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A `Done` whose objects lie under their published keys; the manifest is still to be
    written."""

    done: Done
    set_id: str
    prefix: str
    items: Sequence[variants.Item]


Ending = Outcome | LaidOut | Failure | Stop | str
"""How the work of an attempt ended, before it is settled."""


def owner(claim: Claim) -> str:
    """The name under which an attempt's processes are known."""
    return f"{claim.id}.{claim.fence}"


class Completions:
    """Settles the plainest of ends, a result and nothing else, many in one statement.

    None waits for company: what ends while a statement is under way goes with the next one.
    """

    def __init__(self, pool: db.Pool, *, retention_seconds: float) -> None:
        self._pool = pool
        self._retention_seconds = retention_seconds
        self._waiting: list[tuple[jobs.Completion, asyncio.Future[bool]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def settle(self, ended: jobs.Completion) -> None:
        """Returns when it is committed. Raises LeaseLost, Unavailable, or what the statement met,
        which another job in it may have caused."""
        held: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((ended, held))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        if not await held:
            raise LeaseLost

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_COMPLETIONS], self._waiting[_COMPLETIONS:]
            try:
                async with db.acquire(self._pool) as connection:
                    kept = await jobs.complete_many(
                        connection,
                        [ended for ended, _ in batch],
                        retention_seconds=self._retention_seconds,
                    )
            except Exception as error:
                for _, held in batch:
                    if not held.done():
                        held.set_exception(error)
            else:
                for ended, held in batch:
                    if not held.done():
                        held.set_result(ended.held.key in kept)


class Attempt:
    """The `Work` of one claim. `run` never raises; whatever happens is settled or left to the
    lease."""

    def __init__(self, means: Means, claim: Claim, scratch: Path, completions: Completions) -> None:
        self._means = means
        self._scratch = scratch
        self._completions = completions
        self._left_files = False
        self._stopped: Stop | str | None = None
        self._task: asyncio.Task[Outcome | LaidOut] | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._stage = ""
        self._percent = 0.0
        self._detail: dict[str, Any] | None = None
        self._written_at = 0.0
        self._writing: asyncio.Task[None] | None = None
        self._fetched: Path | None = None
        self._reading: originals.Name | None = None
        self._lingers = claim.parent_id is not None  # the next piece may be ours as well
        self._laid_out: tuple[str, str] | None = None
        self._original: Original | None = None
        self._recipe: Recipe | None = None
        self._commands: list[dict[str, Any]] = []
        self._log: list[str] = []
        self.claim = claim
        self.log = log.bind(
            job_id=claim.public_id, kind=claim.kind, attempt=claim.attempt, fence=claim.fence
        )

    # How the worker sees it.

    def stop(self, why: Stop | str) -> None:
        """End it as soon as possible. The first reason holds, but losing the lease overrides."""
        if self._stopped is None or why in (Stop.LOST, Stop.UNRENEWED):
            self._stopped = why
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        began = time.monotonic()
        self.log.info("attempt_started")
        try:
            outcome = await self._work()
            await self._settle(outcome)
            self._laid_out = None
            if isinstance(outcome, LaidOut):
                await self._drop_pieces()
            self._lingers = self._lingers or isinstance(outcome, Wait)
            failpoints.hit("attempt.settled")
            self.log.info(
                "attempt_ended",
                outcome=outcome if isinstance(outcome, str) else type(outcome).__name__,
                seconds=round(time.monotonic() - began, 3),
            )
        except LeaseLost:
            self.log.warning("attempt_lost")
        except Exception:
            # The row stays as it is; the lease runs out and the job is taken up again.
            self.log.exception("attempt_unsettled")
        finally:
            self._means.leases.release(self.claim)
            await self._clean_up()

    async def _work(self) -> Ending:
        """The handler's outcome, the failure it met, or why it was stopped."""
        self._task = asyncio.create_task(self._handle())
        if self._stopped is not None:  # stopped before the task existed
            self._task.cancel()
        try:
            return await self._task
        except asyncio.CancelledError:
            if self._stopped is None:  # this coroutine itself was canceled
                self._task.cancel()
                raise
            return self._stopped
        except LeaseLost:
            return Stop.LOST
        except Failure as failure:
            if failure.code is Code.STORAGE_AUTH:
                self.log.warning("storage_refuses_us")
                self._means.gate.shut()
            # A tool that was killed because of a stop may report a failure first.
            return self._stopped or failure
        except db.Unavailable:
            return self._stopped or Failure(Code.DATABASE_UNAVAILABLE)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                return self._stopped or Failure(Code.SCRATCH_FULL)
            self.log.exception("handler_failed")
            self._log.append(traceback.format_exc())
            return self._stopped or Failure(Code.INTERNAL)

    async def _handle(self) -> Outcome | LaidOut:
        handler = self._means.handlers.get(self.claim.kind)
        if handler is None:
            return await self._call_application()
        self._left_files = True
        await asyncio.to_thread(self.out.mkdir, parents=True)
        if self.claim.media_id is not None:
            await self._load()
        outcome = await handler(self)
        if isinstance(outcome, Done) and outcome.outputs:
            return await self._publish(outcome)
        return outcome

    async def _call_application(self) -> Outcome:
        """Run a function of the application's; what it returned is the job's result."""
        known = self._means.mill.kinds[self.claim.kind, self.claim.schema_version]
        rows: list[db.Row] = []
        if self.claim.fence > 1:  # at its first claim a job has no children yet
            rows = await self._outlast(
                lambda pool: jobs.children_of(pool, self.claim.tenant_id, self.claim.id)
            )
        done = bool(rows) and all(row["state"] == "completed" for row in rows)
        returned = await mill.run(known, self, rows if done else None)
        if isinstance(returned, mill.Wait) and not returned.children and not done:
            done = True  # no row would say later that it has waited
            returned = await mill.run(known, self, [])
        if not isinstance(returned, mill.Wait):
            return Done(result={"value": returned})
        if done:
            raise Failure(Code.INTERNAL, "It waited for its children a second time.")
        children = tuple(self._child(n, child) for n, child in enumerate(returned.children))
        if len({child.child_key for child in children}) < len(children):
            raise Failure(Code.INVALID_REQUEST, "Two of its children have the same key.")
        return Wait(children)

    def _child(self, number: int, child: mill.Child) -> jobs.NewJob:
        try:
            known = self._means.mill.find(child.kind, child.version)
            return mill.new_job(
                known.kind,
                mill.dump(known, child.payload),
                priority=self.claim.priority if child.priority is None else child.priority,
                child=child,
                child_key=child.key or str(number),
            )
        except ValueError as error:
            raise Failure(Code.INVALID_REQUEST, str(error)) from None

    async def _load(self) -> None:
        assert self.claim.media_id is not None
        media_id = self.claim.media_id
        original = await self._outlast(
            lambda pool: media.original(pool, self.claim.tenant_id, media_id)
        )
        if original is None or original.deleted_at is not None:
            raise Failure(Code.SOURCE_MISSING, "The media was deleted.")
        recipe = recipes.find(
            self.claim.recipe or "", self.claim.recipe_version, folder=self.settings.recipes_dir
        )
        if recipe is None:
            raise Failure(
                Code.CAPABILITY_MISSING,
                f"This worker does not know recipe {self.claim.recipe} "
                f"version {self.claim.recipe_version}.",
            )
        self._original, self._recipe = original, recipe

    # How its handler sees it: see handlers.Work.

    @property
    def original(self) -> Original:
        assert self._original is not None
        return self._original

    @property
    def recipe(self) -> Recipe:
        assert self._recipe is not None
        return self._recipe

    @property
    def pool(self) -> db.Pool:
        return self._means.pool

    def stopping(self) -> bool:
        """Whether somebody wants this attempt to end."""
        return self._stopped is not None

    @property
    def settings(self) -> Settings:
        return self._means.settings

    @property
    def out(self) -> Path:
        return self._scratch / "out"

    async def enter(self, stage: str) -> None:
        self._stage = stage
        await self._outlast(lambda pool: jobs.enter_stage(pool, self.claim, stage))

    def progress(self, percent: float, detail: Mapping[str, Any] | None = None) -> None:
        if threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(self.progress, percent, detail)
            return
        self._detail = dict(detail) if detail is not None else self._detail
        self._percent = max(self._percent, min(percent, 100.0))
        now = time.monotonic()
        idle = self._writing is None or self._writing.done()
        if idle and now - self._written_at >= _PROGRESS_SECONDS:
            self._written_at = now
            self._writing = asyncio.create_task(self._write_progress())

    async def _write_progress(self) -> None:
        try:
            async with db.acquire(self._means.pool) as connection:
                await jobs.advance(connection, self.claim, self._stage, self._percent, self._detail)
        except LeaseLost:
            self.stop(Stop.LOST)
        except db.Unavailable:
            pass  # the next one tells more anyway

    async def fetch(self) -> Path:
        if self._fetched is None:
            original = self.original
            if original.object_version is None:
                raise Failure(Code.SOURCE_MISSING)
            name = original.upload_key, original.object_version
            path, digest = await self._means.originals.take(*name, sha256=original.sha256)
            self._reading = name
            if original.sha256 is None and self.claim.role == "main":
                await self.describe(Description(sha256=digest))
            self._fetched = path
            failpoints.hit("attempt.fetched")
        return self._fetched

    async def describe(self, found: Description) -> None:
        await self._outlast(lambda pool: media.describe(pool, self.claim, found))
        failpoints.hit("attempt.described")

    async def publish_early(self, outputs: Sequence[handlers.Output]) -> bool:
        claim = self.claim
        if self.original.set_id is not None:
            return False
        laid = await self._publish(Done(tuple(outputs)))
        async with db.transaction(self._means.pool) as connection:
            await jobs.still_hold(connection, claim)
            shown = await media.publish_early(
                connection,
                claim,
                set_id=laid.set_id,
                names=[item.output.name for item in laid.items],
                superseded_seconds=self.settings.superseded_set_seconds,
            )
            if shown:
                await variants.record(connection, claim, laid.set_id, laid.prefix, laid.items)
        if shown:
            self._laid_out = None
        failpoints.hit("attempt.published_early")
        return shown

    async def children(self) -> list[handlers.Child]:
        rows = await self._outlast(
            lambda pool: jobs.children_of(pool, self.claim.tenant_id, self.claim.id)
        )
        return [handlers.Child(row["child_key"], row["state"], row["result"] or {}) for row in rows]

    async def sidecars(self) -> list[Sidecar]:
        claim, media_id = self.claim, self.claim.media_id
        assert media_id is not None
        found: list[Sidecar] = await self._outlast(
            lambda pool: sidecars.texts(pool, claim.tenant_id, media_id)
        )
        return found

    async def slots(self, queue: str) -> int:
        known: dict[str, int] = await self._outlast(installation.slots)
        return known.get(queue, 0)

    async def keep(self, path: Path) -> handlers.Kept:
        await self._outlast(lambda pool: variants.reserve_pieces(pool, self.claim))
        # The fence keeps an earlier try of the same job apart: what it stored may be another file.
        key = f"{variants.pieces_prefix(self.claim)}/{self.claim.id}.{self.claim.fence}/{path.name}"
        stored = await self._means.storage.put(key, path)
        failpoints.hit("attempt.kept")
        return handlers.Kept(key, stored.version, stored.size)

    async def bring(self, kept: handlers.Kept, name: str) -> Path:
        path = self.out / name
        await self._means.storage.fetch(kept.key, kept.version, path)
        return path

    async def show_preview(self, preview: Mapping[str, Any], found: Description) -> None:
        await self._outlast(lambda pool: media.show_preview(pool, self.claim, dict(preview), found))

    async def run_tool(
        self,
        command: Command,
        jail: Jail,
        *,
        on_line: Callable[[str], None] | None = None,
        stall_seconds: float | None = None,
    ) -> Finished:
        finished = await run_tool(
            command,
            jail=jail,
            toolbox=self._means.toolbox,
            sandbox=self._means.sandbox,
            on_line=on_line,
            registry=self._means.groups,
            owner=owner(self.claim),
            stall_seconds=stall_seconds,
        )
        self._remember(command, finished)
        failpoints.hit("attempt.tool")
        return finished

    def _remember(self, command: Command, finished: Finished) -> None:
        self._commands.append(
            {
                "label": command.label,
                "command": [command.tool, *command.args],
                "exit": finished.returncode,
                "stopped_for": finished.stopped_for,
                "wall_seconds": round(finished.wall_seconds, 3),
                "cpu_seconds": round(finished.cpu_seconds, 3),
                "max_rss_bytes": finished.max_rss_bytes,
            }
        )
        if finished.stderr_tail.strip():
            self._log.append(f"[{command.label}]\n{finished.stderr_tail.strip()}")

    async def imaging(
        self, request: Mapping[str, Any], fds: Sequence[int], *, wall_seconds: float
    ) -> dict[str, Any]:
        began = time.monotonic()
        try:
            return await self._means.images.request(
                dict(request),
                fds,
                wall_seconds=wall_seconds,
                owner=owner(self.claim),
                tenant=self.claim.tenant_id,
            )
        except Failure as failure:
            said = "\n".join(filter(None, getattr(failure, "__notes__", ())))
            if said:
                self._log.append(f"[{request['op']}]\n{said}")
            raise
        finally:
            self._commands.append(
                {
                    "label": request["op"],
                    "command": ["imaging", request["op"]],
                    "wall_seconds": round(time.monotonic() - began, 3),
                }
            )

    # How it ends.

    async def _publish(self, done: Done) -> LaidOut:
        """Stage the outputs and lay out the set; what is left for `_settle` is one transaction."""
        await self.enter("publish")
        items = await variants.measure(done.outputs)
        set_id = variants.set_id(items)
        claim = self.claim
        assert claim.media_id is not None
        assert claim.recipe is not None
        assert claim.recipe_version is not None
        prefix = variants.set_prefix(
            claim.tenant_id, claim.media_id, claim.recipe, claim.recipe_version, set_id
        )
        await _to_the_end(variants.stage(self._means.storage, claim, items))
        failpoints.hit("attempt.staged")
        await self._outlast(lambda pool: variants.reserve(pool, claim, set_id))
        failpoints.hit("attempt.reserved")
        self._laid_out = set_id, prefix
        await _to_the_end(variants.lay_out(self._means.storage, claim, prefix, items))
        failpoints.hit("attempt.laid_out")
        return LaidOut(done, set_id, prefix, items)

    async def _settle(self, outcome: Ending) -> None:
        if self._writing is not None:
            if outcome in (Stop.LOST, Stop.UNRENEWED):
                self._writing.cancel()  # not awaited: its connection may hang
                raise LeaseLost
            with suppress(asyncio.CancelledError, Exception):
                await self._writing
        match outcome:
            case Stop.LOST | Stop.UNRENEWED:
                raise LeaseLost
            case Done() if self.claim.media_id is None and self.claim.parent_id is None:
                ended = jobs.Completion(self.claim, dict(outcome.result), self._record())
                try:
                    await db.outlast(
                        lambda: self._completions.settle(ended), seconds=_OUTAGE_SECONDS
                    )
                except (LeaseLost, asyncpg.PostgresError):
                    # Perhaps because of another job, or of somebody's lock: alone, then.
                    await db.outlast(lambda: self._commit(outcome), seconds=_OUTAGE_SECONDS)
            case _:
                await db.outlast(lambda: self._commit(outcome), seconds=_OUTAGE_SECONDS)

    async def _commit(self, outcome: Ending) -> None:
        """Everything that the end of the attempt changes, in one transaction that checks the
        fence."""
        settings, claim = self._means.settings, self.claim
        keep = settings.job_retention_seconds
        async with db.transaction(self._means.pool) as connection:
            if not isinstance(outcome, LaidOut | Done) and await jobs.cancel_requested(
                connection, claim
            ):
                outcome = Stop.CANCELED
            match outcome:
                case LaidOut():
                    await jobs.complete(
                        connection,
                        claim,
                        dict(outcome.done.result) | {"set": outcome.set_id},
                        retention_seconds=keep,
                        record=self._record(),
                    )
                    await variants.record(
                        connection, claim, outcome.set_id, outcome.prefix, outcome.items
                    )
                    await media.publish(
                        connection,
                        claim,
                        set_id=outcome.set_id,
                        superseded_seconds=settings.superseded_set_seconds,
                    )
                case Done():
                    await jobs.complete(
                        connection,
                        claim,
                        dict(outcome.result),
                        retention_seconds=keep,
                        record=self._record(),
                    )
                case Wait():
                    await jobs.wait(connection, claim, outcome.children, record=self._record())
                case Reroute():
                    await jobs.requeue(
                        connection,
                        claim,
                        reason="rerouted",
                        outcome="rerouted",
                        give_back_attempt=True,
                        to_queue=outcome.queue,
                        to_kind=outcome.kind,
                        record=self._record(),
                    )
                    for birth in outcome.births:
                        assert claim.media_id is not None
                        await media.add_job(
                            connection,
                            claim.tenant_id,
                            claim.media_id,
                            birth,
                            max_attempts=settings.max_attempts,
                        )
                case Failure():
                    await settle_failure(
                        connection, settings, claim, outcome.problem, record=self._record()
                    )
                case Stop.CANCELED:
                    await jobs.settle_canceled(
                        connection, claim, retention_seconds=keep, record=self._record()
                    )
                case _:
                    await jobs.requeue(
                        connection,
                        claim,
                        reason=RELEASED,
                        outcome=RELEASED,
                        give_back_attempt=True,
                        record=self._record(),
                    )

    def _record(self) -> jobs.Record:
        tail = "\n".join(self._log).replace("\x00", "�")[-_LOG_TAIL:]
        return jobs.Record(tail or None, self._commands or None)

    async def _clean_up(self) -> None:
        self._means.groups.kill(owner(self.claim))
        self._means.groups.forget(owner(self.claim))
        if self._reading is not None:
            self._means.originals.leave(*self._reading, linger=self._lingers)
        if not self._left_files:
            return
        await asyncio.to_thread(sandbox.clear, self._scratch)
        try:
            await self._means.storage.delete(variants.stage_prefix(self.claim))
        except Failure:
            self.log.warning("staging_left")  # the sweep finds it
        if self._laid_out is not None:
            await self._withdraw(*self._laid_out)

    async def _withdraw(self, set_id: str, prefix: str) -> None:
        """What was laid out and not published belongs to a reserved set, or goes."""
        try:
            async with db.transaction(self._means.pool) as connection:
                await variants.withdraw(connection, self._means.storage, self.claim, set_id, prefix)
        except (db.Unavailable, asyncpg.PostgresError, Failure):
            self.log.warning("set_left", set=set_id)

    async def _drop_pieces(self) -> None:
        """What its children kept is in the published set now. What stays here is swept later."""
        with suppress(Failure, db.Unavailable, asyncpg.PostgresError):
            async with db.acquire(self._means.pool) as connection:
                if await variants.forget_pieces(connection, self.claim):
                    await self._means.storage.delete(variants.pieces_prefix(self.claim))

    async def _outlast(self, work: Callable[[db.Connection], Any]) -> Any:
        """Run a short statement on the pool, through an outage that our lease can survive."""

        async def once() -> Any:
            async with db.acquire(self._means.pool) as connection:
                return await work(connection)

        return await db.outlast(once, seconds=_OUTAGE_SECONDS)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end even if this task is canceled: its threads cannot be stopped, and what
    cleans up after them must come later."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # taken note of: the cancellation is what the caller hears
        raise


async def settle_failure(
    connection: db.Connection,
    settings: Settings,
    claim: Claim,
    problem: Problem,
    *,
    outcome: str | None = None,
    record: jobs.Record = jobs.NO_RECORD,
) -> retry.Decision:
    """Retry, hold back, fail or bury a job whose attempt failed, in the caller's transaction.
    Raises LeaseLost."""
    verdict = problem.code.verdict
    crash, resource = verdict is Verdict.CRASH, verdict is Verdict.RESOURCE
    decision = retry.decide(
        verdict,
        attempt=claim.attempt,
        max_attempts=claim.max_attempts,
        crashes=claim.crashes + crash,
        max_crashes=settings.max_crashes,
        resource_failures=claim.resource_failures + resource,
    )
    match decision:
        case retry.Retry():
            await jobs.requeue(
                connection,
                claim,
                reason=problem.code.code,
                outcome=outcome or "retried",
                problem=problem,
                delay_seconds=decision.delay_seconds,
                crash=crash,
                resource=resource,
                record=record,
            )
        case retry.Hold():
            await jobs.requeue(
                connection,
                claim,
                reason=problem.code.code,
                outcome=RELEASED,
                problem=problem,
                delay_seconds=decision.delay_seconds,
                give_back_attempt=True,
                record=record,
            )
        case retry.Fail():
            await jobs.fail(
                connection,
                claim,
                problem,
                dead_letter=decision.dead_letter,
                retention_seconds=settings.job_retention_seconds,
                crash=crash,
                resource=resource,
                outcome=outcome or "failed",
                record=record,
            )
    return decision

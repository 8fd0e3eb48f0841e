"""The periodic duties. However many processes run them, each duty runs once at a time.

A duty is a function of a connection that holds the duty's lock; it does a bounded amount and
returns how much it did. All decisions are made on database time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from uuid import UUID

import asyncpg
import structlog

from mediamill import (
    controls,
    db,
    failpoints,
    ids,
    jobs,
    media,
    queue,
    storage,
    tallies,
    tus,
    uploads,
    variants,
)
from mediamill.attempt import settle_failure
from mediamill.config import QUEUES, Settings
from mediamill.failures import Code, Failure, LeaseLost, Problem
from mediamill.jobs import Claim
from mediamill.storage import Storage

log = structlog.get_logger()

_SQL: Final = db.load("maintenance")
_LOCK_BASE: Final = 0x6D6D_0000
_BATCH: Final = 100
_STORE_SECONDS: Final = 300.0
_OWN_GAP_SECONDS: Final = 3.0
# A due job that no worker had a free slot for keeps its ticket; only a missing one is an orphan.
_ORPHAN_SECONDS: Final = 5.0
_SLOT_GRACE_SECONDS: Final = 10.0
_ORPHAN_UPLOAD_SECONDS: Final = 3600.0
_LOOKED_UP: Final = 1000
_INCOMING_SECONDS: Final = 24 * 3600.0
_MOST_REFUSALS: Final = 5  # of the storage's in one round, before a duty lets it be
_FORGOTTEN: Final = 5000  # rows of one kind in one round


@dataclass(frozen=True, slots=True)
class Duty:
    """A named duty and how often it is looked at. `number` is its lock; `stores` says that it talks
    to the storage in between, which may take its time."""

    number: int
    name: str
    every_seconds: float
    work: Callable[[db.Connection], Awaitable[int]]
    stores: bool = False


class Maintenance:
    """All duties of one process."""

    def __init__(
        self,
        settings: Settings,
        pool: db.Pool,
        store: Storage,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._store = store
        self._clock = clock
        self._transfers = tus.Transfers(settings, pool, store)
        self._swept_at: float | None = None
        self._hold_until = 0.0
        self.duties = (
            Duty(1, "rescue", settings.sweep_seconds, self.rescue),
            Duty(2, "republish", 5.0, self.republish),
            Duty(3, "close_slots", 5.0, self.close_slots, stores=True),
            Duty(4, "expire_media", 5.0, self.expire_media),
            Duty(5, "erase", 1.0, self.erase, stores=True),
            Duty(6, "sweep_sets", 30.0, self.sweep_sets, stores=True),
            Duty(7, "sweep_staging", 30.0, self.sweep_staging, stores=True),
            Duty(10, "sweep_uploads", 300.0, self.sweep_uploads, stores=True),
            Duty(21, "finish_uploads", 5.0, self.finish_uploads, stores=True),
            Duty(22, "sweep_transfers", 30.0, self.sweep_transfers, stores=True),
            Duty(8, "forget", 60.0, self.forget),
            Duty(9, "cancel_orphans", 1.0, self.cancel_orphans),
            Duty(11, "end_stalled", settings.lease_seconds / 2, self.end_stalled),
        )

    async def run(self) -> None:
        """Run every duty at its pace until canceled."""
        async with asyncio.TaskGroup() as group:
            for duty in self.duties:
                group.create_task(self._repeat(duty))

    async def _repeat(self, duty: Duty) -> None:
        while True:
            try:
                done = await self.once(duty)
                if done:
                    log.info("duty_done", duty=duty.name, count=done)
            except (db.Unavailable, asyncpg.PostgresError) as error:
                log.warning("duty_failed", duty=duty.name, error=type(error).__name__)
            except Exception:
                log.exception("duty_failed", duty=duty.name)
            await asyncio.sleep(duty.every_seconds * random.uniform(0.9, 1.1))  # noqa: S311

    async def once(self, duty: Duty) -> int:
        """Run a duty now unless another process is at it; returns how much it did."""
        async with db.transaction(self._pool) as connection:
            if not await connection.fetchval(_SQL.lock, _LOCK_BASE + duty.number):
                return 0
            if duty.stores:
                await db.may_idle(connection, _STORE_SECONDS)
            return await duty.work(connection)

    async def end_stalled(self, connection: db.Connection) -> int:
        """Sessions that a frozen process left in the middle of a statement; their locks go with
        them."""
        silent = timedelta(seconds=self._settings.lease_seconds)
        ended: int = await connection.fetchval(_SQL.end_stalled, silent)
        return ended

    async def rescue(self, connection: db.Connection) -> int:
        """Jobs whose lease ran out: queued again with a fresh ticket, or buried.

        Holds off for one lease after an outage of the server or of this process, so that the
        workers that live can renew first.
        """
        now = self._clock()
        gap = 0.0 if self._swept_at is None else now - self._swept_at
        self._swept_at = now
        age: float = await connection.fetchval(_SQL.server_age)
        if (
            age < self._settings.lease_seconds
            or gap > self._settings.sweep_seconds + _OWN_GAP_SECONDS
        ):
            self._hold_until = now + self._settings.lease_seconds
        if now < self._hold_until:
            return 0
        rescued = 0
        failpoints.hit("maintenance.rescue")
        for row in await connection.fetch(_SQL.expired_leases, _BATCH):
            values = dict(row)
            worker, canceled = values.pop("worker"), values.pop("cancel_requested")
            claim = Claim(**values)
            try:
                if canceled:
                    await jobs.settle_canceled(
                        connection, claim, retention_seconds=self._settings.job_retention_seconds
                    )
                else:
                    problem = Problem(Code.WORKER_CRASHED)
                    await settle_failure(connection, self._settings, claim, problem, outcome="lost")
            except LeaseLost:  # it was renewed or settled before we had its row
                continue
            rescued += 1
            log.warning("lease_expired", job_id=claim.public_id, worker=worker, fence=claim.fence)
        return rescued

    async def republish(self, connection: db.Connection) -> int:
        """Due jobs without a waiting ticket get a new one."""
        rows = await connection.fetch(
            _SQL.orphans, list(QUEUES), timedelta(seconds=_ORPHAN_SECONDS), _BATCH
        )
        tickets = [
            queue.Ticket(r["queue"], r["tenant_id"], r["id"], r["priority"], r["turn"])
            for r in rows
        ]
        await queue.publish(connection, tickets)
        return len(tickets)

    async def cancel_orphans(self, connection: db.Connection) -> int:
        """Children whose parent has failed or was canceled need not be done."""
        return await jobs.cancel_orphans(
            connection, most=_BATCH, retention_seconds=self._settings.job_retention_seconds
        )

    async def close_slots(self, connection: db.Connection) -> int:
        """Slots past their time: accepted after all if the bytes are there, else expired."""
        rows = await connection.fetch(
            _SQL.closed_slots, timedelta(seconds=_SLOT_GRACE_SECONDS), _BATCH
        )
        round_ = _Round("slot")
        for row in rows:
            with round_.one():
                stored = await self._store.stat(row["upload_key"])
                if stored is not None and uploads.fits(stored.size, row["size"], row["max_size"]):
                    await media.accept(
                        connection,
                        row["tenant_id"],
                        row["id"],
                        object_version=stored.version,
                        stored_at=stored.at,
                        size=stored.size,
                        kind=row["kind"],
                        births=uploads.births(row["kind"]),
                        max_attempts=self._settings.max_attempts,
                    )
                    round_.count("accepted")
                else:
                    await media.expire(connection, row["tenant_id"], row["id"])
                    round_.count("expired")
            if round_.is_over:
                break
        return await round_.end(connection)

    async def finish_uploads(self, _connection: db.Connection) -> int:
        """Resumable uploads whose bytes are all there, but whose API died before the last step."""
        return await self._transfers.finish_stranded(most=_BATCH)

    async def sweep_transfers(self, connection: db.Connection) -> int:
        """Remove what is left of uploads in parts that were not completed in time."""
        counted = await tus.sweep(
            connection, self._store, grace_seconds=_SLOT_GRACE_SECONDS, most=_BATCH
        )
        await tallies.add(connection, tallies.SWEPT, counted)
        return sum(counted.values())

    async def expire_media(self, connection: db.Connection) -> int:
        """Media past their time are deleted as by request."""
        rows = await connection.fetch(_SQL.expired_media, _BATCH)
        for row in rows:
            await uploads.delete(
                connection, self._settings, row["tenant_id"], row["id"], reason="expired"
            )
        await tallies.add(connection, tallies.SWEPT, {("media", "expired"): len(rows)})
        return len(rows)

    async def erase(self, connection: db.Connection) -> int:
        """Remove the bytes of deleted media; the row stays until they are gone."""
        round_ = _Round("media")
        for row in await connection.fetch(_SQL.erasable, _BATCH):
            with round_.one():
                tenant, media_id = row["tenant_id"], row["media_id"]
                await tus.abort_of_media(connection, self._store, tenant, media_id)
                await self._store.delete(uploads.prefix(tenant, media_id))
                await self._store.delete(variants.media_prefix(tenant, media_id))
                failpoints.hit("maintenance.erase")
                await connection.fetchval(_SQL.erased, tenant, media_id)
                round_.count("erased")
            if round_.is_over:
                break
        return await round_.end(connection)

    async def sweep_sets(self, connection: db.Connection) -> int:
        """Remove sets that were replaced long ago, or were never published."""
        round_ = _Round("set")
        for row in await connection.fetch(_SQL.expired_sets, _BATCH):
            with round_.one():
                # The row goes first and keeps a new attempt at the same set waiting until we
                # commit; a set that was published again meanwhile stays. What the storage does
                # not remove keeps its row.
                async with connection.transaction():
                    if await connection.fetchval(_SQL.forget_set, *row.values()):
                        await self._store.delete(variants.set_prefix(*row.values()))
                        round_.count("removed")
                failpoints.hit("maintenance.swept")
            if round_.is_over:
                break
        return await round_.end(connection)

    async def sweep_staging(self, connection: db.Connection) -> int:
        """Remove what attempts staged that are no longer at work, and what came in and was never
        made an object."""
        round_ = _Round("staged")
        with round_.one():
            async for tenant, some in self._below(storage.STAGE):
                parsed = [(name, *_staged(name)) for name in some]
                rows = await connection.fetch(
                    _SQL.staging_holders,
                    [tenant] * len(parsed),
                    [job_id for _, job_id, _ in parsed],
                    [fence for _, _, fence in parsed],
                )
                at_work = {(row["id"], row["fence"]) for row in rows}
                for name, job_id, fence in parsed:
                    if (job_id, fence) not in at_work:
                        await self._remove(round_, f"{storage.STAGE}/{tenant}/{name}")
                if round_.is_over:
                    break
        wanted = await tus.open_parts(connection)
        parts = _Round("part")
        with parts.one():
            swept = await self._store.sweep(
                older_than_seconds=_INCOMING_SECONDS, now=time.time(), keep=wanted
            )
            parts.count("removed", swept)
        return await round_.end(connection) + await parts.end(connection)

    async def sweep_uploads(
        self, connection: db.Connection, *, older_than_seconds: float = _ORPHAN_UPLOAD_SECONDS
    ) -> int:
        """Remove uploaded bytes that no media wants: the API died between them and their row, or
        they came after a deletion. The id tells how old they can be."""
        round_ = _Round("original")
        limit = time.time() - older_than_seconds
        with round_.one():
            async for tenant, some in self._below(storage.UPLOADS):
                found = {
                    media_id
                    for name in some
                    if (media_id := _uuid(name)) is not None and ids.born(media_id) < limit
                }
                rows = await connection.fetch(_SQL.wanted_uploads, tenant, list(found))
                for media_id in sorted(found - {row["id"] for row in rows}):
                    await self._remove(round_, uploads.prefix(tenant, media_id))
                if round_.is_over:
                    break
        return await round_.end(connection)

    async def _below(self, area: str) -> AsyncIterator[tuple[str, list[str]]]:
        """What lies in an area, tenant by tenant, a bounded number at a time."""
        for tenant in await self._store.list(area):
            names = await self._store.list(f"{area}/{tenant}")
            for start in range(0, len(names), _LOOKED_UP):
                yield tenant, list(names[start : start + _LOOKED_UP])

    async def _remove(self, round_: _Round, prefix: str) -> None:
        if round_.is_over:
            return
        with round_.one():
            await self._store.delete(prefix)
            round_.count("removed")
            failpoints.hit("maintenance.swept")

    async def forget(self, connection: db.Connection) -> int:
        """Ended jobs, events, deliveries, endpoints and idempotency keys past their retention."""
        retention = timedelta(seconds=self._settings.job_retention_seconds)
        gone: Counter[tuple[str, str]] = Counter()
        for what, statement, *values in (
            ("job", _SQL.forget_jobs),
            ("event", _SQL.forget_events, retention),
            ("delivery", _SQL.forget_deliveries, retention),
            ("endpoint", _SQL.forget_endpoints, retention),
            ("idempotency_key", _SQL.forget_keys),
        ):
            said = await connection.execute(statement, *values, _FORGOTTEN)
            gone[what, "forgotten"] = int(said.rpartition(" ")[2])
        await controls.forget(connection)
        await tallies.add(connection, tallies.SWEPT, gone)
        return gone.total()


class _Round:
    """One round of a duty that removes things from the storage. What the storage refuses is left
    for the next round and holds nothing else up; after a few refusals it is let be."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._counted: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around each thing."""
        try:
            yield
        except Failure as failure:
            self._counted[self._what, "failed"] += 1
            log.warning("not_swept", what=self._what, code=failure.code.code)

    def count(self, outcome: str, number: int = 1) -> None:
        self._counted[self._what, outcome] += number

    @property
    def is_over(self) -> bool:
        """Whether enough was done, or refused, for one round."""
        failed = self._counted[self._what, "failed"]
        return failed >= _MOST_REFUSALS or self._counted.total() >= _BATCH

    async def end(self, connection: db.Connection) -> int:
        """Note the round in the metrics; how much was done."""
        await tallies.add(connection, tallies.SWEPT, self._counted)
        return self._counted.total() - self._counted[self._what, "failed"]


def _uuid(name: str) -> UUID | None:
    try:
        return UUID(name)
    except ValueError:
        return None


def _staged(name: str) -> tuple[UUID, int]:
    """The job and fence that a staging folder names; a foreign name is nobody's."""
    job_id, _, fence = name.partition(".")
    try:
        return UUID(job_id), int(fence)
    except ValueError:
        return UUID(int=0), -1

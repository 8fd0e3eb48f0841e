"""Resumable uploads, whatever the wire calls them: bytes are appended at an offset that is durable.

An upload is a row and an object in parts. A request that brings bytes is a writer: it takes the
upload over from whoever wrote before (whose connection may be dead without anybody knowing), stores
parts, and moves the offset only behind what is durable. When all bytes are there the object is made
and accepted like any other original.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import structlog

from mediamill import db, failpoints, media, uploads
from mediamill.config import Settings
from mediamill.failures import Code, Failure, Problem, Refused
from mediamill.states import MediaState
from mediamill.storage import AlreadyStored, Part, PartReceiver, Storage
from mediamill.uploads import Minted, Wanted

log = structlog.get_logger()

_MOST_REFUSALS: Final = 5  # of the storage's in one round of the sweep
_SQL: Final = db.load("transfers")
PROTOCOL: Final = "tus"
ALGORITHMS: Final = ("sha1", "sha256")
"""Checksums of one request's bytes."""
_PART_BYTES: Final = 16 << 20
_PARTS: Final = 4000  # leaves numbers for requests that are cut off
_TAKEOVER_SECONDS: Final = 10.0
_WRITE_BYTES: Final = 1 << 20


class Cut(Exception):
    """The sender is gone; what came before is kept."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """What the bytes of one request must hash to."""

    algorithm: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """An upload in parts as its row says."""

    tenant_id: str
    id: UUID
    protocol: str
    role: str
    key: str
    parts: str
    size: int | None
    received: int
    tail_key: str | None
    tail_bytes: int
    next_part: int
    part_bytes: int
    fence: int
    writing: bool
    wanted: dict[str, Any]
    metadata: str | None
    joins: str | None
    version: str | None
    source: str | None
    due_at: datetime | None
    tries: int
    created_at: datetime
    expires_at: datetime
    completed_at: datetime | None
    swept_at: datetime | None
    expired: bool = False
    media_state: str | None = None
    deleted_at: datetime | None = None

    @property
    def whole(self) -> bool:
        """Whether every byte is there."""
        return self.received == self.size


@dataclass(slots=True)
class _Turn:
    """A writer of this process. It may be stopped while it waits for bytes, never while it stores
    some."""

    task: asyncio.Task[Any]
    stopped: bool = False
    waiting: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            if self.waiting:
                self.task.cancel()


class Transfers:
    """The resumable uploads of an installation, as one process serves them."""

    def __init__(self, settings: Settings, pool: db.Pool, store: Storage) -> None:
        self._settings = settings
        self._pool = pool
        self._store = store
        self._turns: dict[tuple[str, UUID], _Turn] = {}

    async def open(
        self,
        tenant_id: str,
        wanted: Wanted,
        *,
        size: int | None,
        metadata: str | None = None,
        role: str = "whole",
        joins: str | None = None,
        protocol: str = PROTOCOL,
        part_bytes: int | None = None,
        source: str | None = None,
        connection: db.Connection | None = None,
    ) -> Transfer:
        """A new upload; its media awaits it as soon as the size is known.

        `wanted.size` counts only when `size` is given. With a connection it comes into being with
        the caller's transaction. Raises Refused.
        """
        minted = uploads.mint(tenant_id)
        # Without a size the rest is checked as if it were the smallest.
        known = uploads.slot(
            self._settings, tenant_id, _sized(wanted, 1 if size is None else size), minted
        )
        parts = await self._store.begin_parts(minted.key, content_type=known.content_type)
        try:
            own = db.transaction(self._pool) if connection is None else nullcontext(connection)
            async with own as used:
                row = await used.fetchrow(
                    _SQL.open,
                    tenant_id,
                    minted.id,
                    protocol,
                    role,
                    minted.key,
                    parts,
                    size,
                    part_bytes or self._part_bytes(size),
                    _kept(wanted),
                    metadata,
                    joins,
                    timedelta(seconds=self._settings.resumable_ttl_seconds),
                    source,
                )
                if source is not None:  # its media is seen from the start, without a size
                    await media.open_slot(used, dataclasses.replace(known, size=0))
                elif row is not None and role != "partial" and size is not None:
                    await self._await(used, tenant_id, wanted, minted, size)
        except BaseException:
            await self._store.abort_parts(minted.key, parts)
            raise
        if row is None:  # the same partial uploads were joined before
            await self._store.abort_parts(minted.key, parts)
            async with db.acquire(self._pool) as used:
                known_id = await used.fetchval(_SQL.joined, tenant_id, joins)
            return await self.get(tenant_id, known_id)
        return Transfer(**dict(row))

    async def get(self, tenant_id: str, transfer_id: UUID) -> Transfer:
        """An upload that can go on, or is complete. Raises Refused."""
        async with db.acquire(self._pool) as connection:
            return await find(connection, tenant_id, transfer_id)

    async def settled(self, tenant_id: str, transfer_id: UUID) -> Transfer:
        """The upload at an offset that no writer moves any more: the one at work is stopped, since
        whoever asks has given it up. Raises Refused."""
        await self._stop_writer(tenant_id, transfer_id)
        async with db.acquire(self._pool) as connection:
            await connection.execute(_SQL.evict, tenant_id, transfer_id)
        found = await self.get(tenant_id, transfer_id)
        if found.whole and found.completed_at is None:  # cut off before its last step
            await self.finish(found)
            found = await self.get(tenant_id, transfer_id)
        return found

    async def declare_size(
        self, transfer: Transfer, size: int, *, content_type: str | None = None
    ) -> Transfer:
        """Say how large an upload is that began without saying so. `content_type` counts where its
        client named none. Raises Refused."""
        if transfer.size == size:
            return transfer
        if transfer.size is not None or size < transfer.received:
            raise Refused(Code.INVALID_REQUEST, "The length of an upload is said once.")
        wanted = Wanted(**{"size": size, **transfer.wanted})
        if wanted.content_type is None and content_type is not None:
            wanted = dataclasses.replace(wanted, content_type=content_type)
        minted = Minted(transfer.id, transfer.key)
        async with db.transaction(self._pool) as connection:
            slot = uploads.slot(self._settings, transfer.tenant_id, _sized(wanted, size), minted)
            settled = await connection.fetchval(
                _SQL.settle_size, transfer.tenant_id, transfer.id, size
            )
            if settled and transfer.source is not None:
                await connection.execute(
                    _SQL.size_known,
                    transfer.tenant_id,
                    transfer.id,
                    size,
                    slot.content_type,
                    slot.kind,
                )
            elif settled and transfer.role == "whole":
                await self._await(connection, transfer.tenant_id, wanted, minted, size)
        return await self.get(transfer.tenant_id, transfer.id)

    async def append(
        self,
        transfer: Transfer,
        offset: int,
        chunks: AsyncIterator[bytes],
        *,
        length: int | None,
        checksum: Checksum | None = None,
    ) -> Transfer:
        """Take the bytes of one request in from `offset`. `length` is what it announces.

        What was stored stays, also when the sender is gone (Cut) or the storage fails; bytes with a
        checksum are all kept, or none. Raises Refused, Failure, Cut.
        """
        room = self.room(transfer)
        if length is not None and length > room:
            raise _too_long(room, length)
        await self._stop_writer(transfer.tenant_id, transfer.id)
        async with self._turn(transfer) as turn:
            async with db.acquire(self._pool) as connection:
                row = await connection.fetchrow(_SQL.take, transfer.tenant_id, transfer.id, offset)
            if row is None:
                now = await self.get(transfer.tenant_id, transfer.id)
                if now.completed_at is not None and offset == now.received and not length:
                    return now
                raise Refused(
                    Code.UPLOAD_OFFSET_MISMATCH,
                    f"It is at {now.received:,}, the request begins at {offset:,}.",
                )
            writer = _Writer(
                Transfer(**dict(row)), self._pool, self._store, self._settings, checksum
            )
            try:
                cut = await writer.take_in(chunks, room, turn)
            except Failure as failure:
                if failure.code not in (Code.SOURCE_CHANGED, Code.SOURCE_MISSING):
                    raise
                # What it wrote to is another's now, or complete; or the storage gave it up.
                now = await self.get(transfer.tenant_id, transfer.id)
                ours = now.fence == row["fence"] and now.completed_at is None
                lost = ours and failure.code is Code.SOURCE_MISSING
                raise Refused(Code.UPLOAD_EXPIRED if lost else Code.UPLOAD_TAKEN_OVER) from failure
            found = await self.get(transfer.tenant_id, transfer.id)
            if found.whole and found.completed_at is None:
                await self.finish(found)
                found = await self.get(transfer.tenant_id, transfer.id)
        if cut:
            raise Cut
        if turn.stopped and not found.whole:
            raise Refused(Code.UPLOAD_TAKEN_OVER)
        return found

    def room(self, transfer: Transfer) -> int:
        """How many bytes are still taken."""
        if transfer.size is not None:
            return transfer.size - transfer.received
        kind = uploads.kind_of(
            uploads.content_type_of(
                transfer.wanted.get("content_type"), transfer.wanted.get("filename")
            )
        )
        return self._settings.max_bytes(kind or "video") - transfer.received

    async def finish(self, transfer: Transfer, parts: Sequence[Part] | None = None) -> None:
        """Make the object of an upload whose bytes are all there, and accept it. Safe to repeat.

        `parts` are those that the row does not know of.
        """
        assert transfer.size is not None
        tenant_id, transfer_id = transfer.tenant_id, transfer.id
        if parts is None:
            async with db.acquire(self._pool) as connection:
                rows = await connection.fetch(_SQL.parts, tenant_id, transfer_id)
            parts = [Part(**dict(row)) for row in rows]
        try:
            stored = await self._store.complete_parts(
                transfer.key, transfer.parts, parts, size=transfer.size
            )
        except AlreadyStored:
            # Only we write to this key: another writer of this upload was first, and may have died
            # before it could say so.
            there = await self._store.stat(transfer.key)
            if there is None or there.size != transfer.size:
                raise Failure(Code.SOURCE_CHANGED) from None
            stored = there
        failpoints.hit("tus.stored")
        async with db.transaction(self._pool) as connection:
            await connection.fetchval(_SQL.complete, tenant_id, transfer_id, stored.version)
            if transfer.role != "partial":
                original = await media.original(connection, tenant_id, transfer_id)
                if original is not None:
                    await media.accept(
                        connection,
                        tenant_id,
                        transfer_id,
                        object_version=stored.version,
                        stored_at=stored.at,
                        kind=original.kind,
                        births=uploads.births(original.kind),
                        max_attempts=self._settings.max_attempts,
                    )
        if transfer.tail_key is not None:
            with suppress(Failure):
                await self._store.delete(transfer.tail_key)

    async def finish_stranded(self, *, most: int) -> int:
        """Finish uploads whose bytes are all there and whose last step was cut off; how many."""
        async with db.acquire(self._pool) as connection:
            rows = await connection.fetch(_SQL.unfinished, most)
            found = [Transfer(**dict(row)) for row in rows]
        for transfer in found:
            await self.finish(transfer)
        return len(found)

    async def end(self, transfer: Transfer) -> None:
        """Give an upload up: its bytes go, and its media with it. Raises Refused."""
        await self._stop_writer(transfer.tenant_id, transfer.id)
        async with db.transaction(self._pool) as connection:
            if not await connection.fetchval(_SQL.end, transfer.tenant_id, transfer.id):
                raise Refused(Code.WRONG_STATE, "It is complete; delete its media instead.")
            await uploads.delete(
                connection, self._settings, transfer.tenant_id, transfer.id, reason="terminated"
            )
        await self._store.abort_parts(transfer.key, transfer.parts)
        await self._store.delete(uploads.prefix(transfer.tenant_id, transfer.id))

    async def join(
        self, tenant_id: str, partial: Sequence[UUID], wanted: Wanted, metadata: str | None
    ) -> Transfer:
        """One upload of several complete partial ones, in this order. The same ones joined again
        give the same upload. Raises Refused."""
        found = [await self.get(tenant_id, each) for each in partial]
        for each in found:
            if each.role != "partial":
                raise Refused(Code.INVALID_REQUEST, "Only partial uploads are joined.")
            if each.completed_at is None or each.size is None:
                raise Refused(Code.WRONG_STATE, "A partial upload is not complete yet.")
        size = sum(each.size or 0 for each in found)
        joins = " ".join(str(each.id) for each in found)
        made = await self.open(
            tenant_id, wanted, size=size, metadata=metadata, role="final", joins=joins
        )
        if made.completed_at is not None:
            return made
        async with aclosing(self._bytes_of(found, made.received)) as chunks:
            return await self.append(made, made.received, chunks, length=None)

    async def claim_sources(self, *, most: int, hold_seconds: float) -> list[Transfer]:
        """Files that are to be fetched now; nobody else is given them for `hold_seconds`."""
        async with db.acquire(self._pool) as connection:
            rows = await connection.fetch(_SQL.claim_sources, most, timedelta(seconds=hold_seconds))
        return [Transfer(**dict(row)) for row in rows]

    async def put_off(self, transfer: Transfer, *, seconds: float) -> None:
        """Nobody is given this file before that."""
        async with db.acquire(self._pool) as connection:
            await connection.execute(
                _SQL.put_off, transfer.tenant_id, transfer.id, timedelta(seconds=seconds)
            )

    async def blame(self, transfer: Transfer, problem: Problem) -> None:
        """Give a file up that cannot be fetched: its media expires, and says why."""
        tenant_id, transfer_id = transfer.tenant_id, transfer.id
        async with db.transaction(self._pool) as connection:
            # The upload before its media, as everywhere. Another may have completed it by now.
            if await connection.fetchval(_SQL.end, tenant_id, transfer_id):
                await connection.execute(_SQL.blame, tenant_id, transfer_id, problem.as_dict())
                await media.expire(connection, tenant_id, transfer_id)

    async def _bytes_of(
        self, transfers: Sequence[Transfer], skipped: int
    ) -> AsyncGenerator[bytes, None]:
        for each in transfers:
            size = each.size or 0
            if skipped >= size:
                skipped -= size
                continue
            async with aclosing(self._store.read(each.key, each.version or "")) as chunks:
                async for chunk in chunks:
                    if skipped < len(chunk):
                        yield chunk[skipped:]
                    skipped = max(0, skipped - len(chunk))

    def stop(self) -> None:
        """Let every writer of this process store what it has and end; its client can go on with
        another process."""
        for turn in list(self._turns.values()):
            turn.stop()

    async def _await(
        self, connection: db.Connection, tenant_id: str, wanted: Wanted, minted: Minted, size: int
    ) -> None:
        slot = uploads.slot(
            self._settings,
            tenant_id,
            _sized(wanted, size),
            minted,
            upload_ttl_seconds=self._settings.resumable_ttl_seconds,
        )
        await media.open_slot(connection, slot)

    def _part_bytes(self, size: int | None) -> int:
        largest = self._settings.max_video_bytes if size is None else size
        return max(_PART_BYTES, self._store.least_part_bytes, -(-largest // _PARTS))

    async def _stop_writer(self, tenant_id: str, transfer_id: UUID) -> None:
        """Let the writer of this process, if there is one, store what it has and end."""
        turn = self._turns.get((tenant_id, transfer_id))
        if turn is not None:
            turn.stop()
            with suppress(TimeoutError):  # the fence holds it off in any case
                async with asyncio.timeout(_TAKEOVER_SECONDS):
                    await turn.done.wait()

    @asynccontextmanager
    async def _turn(self, transfer: Transfer) -> AsyncIterator[_Turn]:
        task = asyncio.current_task()
        assert task is not None
        key = transfer.tenant_id, transfer.id
        turn = self._turns[key] = _Turn(task)
        try:
            yield turn
        finally:
            turn.done.set()
            if self._turns.get(key) is turn:
                del self._turns[key]


async def sweep(
    connection: db.Connection, store: Storage, *, grace_seconds: float, most: int
) -> Counter[tuple[str, str]]:
    """Remove what is left of uploads past their time, and the pieces of those that were joined;
    how many, by protocol and outcome."""
    grace = timedelta(seconds=grace_seconds)
    rows = await connection.fetch(_SQL.expired, grace, most)
    counted: Counter[tuple[str, str]] = Counter()
    refusals = 0
    for row in rows:
        await media.expire(connection, row["tenant_id"], row["id"])
        try:
            await store.abort_parts(row["key"], row["parts"])
            if row["unwanted"]:
                await store.delete(uploads.prefix(row["tenant_id"], row["id"]))
        except Failure as failure:  # it stays until the storage can do it
            log.warning("transfer_not_swept", transfer=str(row["id"]), code=failure.code.code)
            counted[row["protocol"], "failed"] += 1
            refusals += 1
            if refusals >= _MOST_REFUSALS:
                break
            continue
        failpoints.hit("tus.swept")
        await connection.execute(_SQL.swept, row["tenant_id"], row["id"])
        counted[row["protocol"], "removed"] += 1
    await connection.execute(_SQL.forget, most)
    return counted


async def abort_of_media(
    connection: db.Connection, store: Storage, tenant_id: str, media_id: UUID
) -> None:
    """Remove the parts of a media that is erased before its upload was complete."""
    for row in await connection.fetch(_SQL.of_media, tenant_id, media_id):
        await store.abort_parts(row["key"], row["parts"])


async def open_parts(connection: db.Connection) -> set[str]:
    """The storage's names for the objects in parts that are still wanted."""
    return {row["parts"] for row in await connection.fetch(_SQL.open_parts)}


class _Writer:
    """One request's bytes on their way into the parts of an upload."""

    def __init__(
        self,
        transfer: Transfer,
        pool: db.Pool,
        store: Storage,
        settings: Settings,
        checksum: Checksum | None,
    ) -> None:
        self._transfer = transfer
        self._pool = pool
        self._store = store
        self._ttl = timedelta(seconds=settings.resumable_ttl_seconds)
        self._checksum = checksum
        self._digest = hashlib.new(checksum.algorithm) if checksum else None
        self._number = transfer.next_part
        self._received = transfer.received
        self._tail_key = transfer.tail_key
        self._tail_bytes = transfer.tail_bytes
        self._old_tail = transfer.tail_key
        self._part: PartReceiver | None = None
        self._unnoted: list[Part] = []

    async def take_in(self, chunks: AsyncIterator[bytes], room: int, turn: _Turn) -> bool:
        """Store what comes, until the end, or until it is cut off or stopped; whether it was cut.

        Raises Refused, Failure.
        """
        cut = False
        try:
            buffer = bytearray()
            while not turn.stopped:
                try:
                    chunk = await _next(chunks, turn)
                except Cut:
                    cut = True
                    break
                if chunk is None:
                    break
                room -= len(chunk)
                if room < 0:
                    raise _too_long(0, -room)
                buffer += chunk
                if len(buffer) >= _WRITE_BYTES:
                    await self._write(bytes(buffer))
                    buffer.clear()
            if buffer:
                await self._write(bytes(buffer))
            if self._checksum is not None and (cut or turn.stopped or not self._matches()):
                await self._advance(clean=True)
                if not cut and not turn.stopped:
                    raise Refused(Code.CHUNK_CORRUPTED)
                return cut
            await self._close()
        finally:
            if self._part is not None:
                self._part.abort()
        return cut

    def _matches(self) -> bool:
        assert self._checksum is not None
        assert self._digest is not None
        return hmac.compare_digest(self._digest.digest(), self._checksum.digest)

    async def _write(self, data: bytes) -> None:
        if self._digest is not None:
            self._digest.update(data)
        view = memoryview(data)
        while view:
            if self._part is None:
                self._part = await self._begin()
            step = view[: self._transfer.part_bytes - self._part.written]
            await self._part.write(bytes(step))
            self._received += len(step)
            view = view[len(step) :]
            if self._part.written >= self._transfer.part_bytes:
                await self._store_part()
                if self._checksum is None:
                    await self._advance(clean=False)

    async def _begin(self) -> PartReceiver:
        """The next part; it begins with the tail that an earlier request left."""
        part = await self._store.open_part(
            self._transfer.key,
            self._transfer.parts,
            self._number,
            offset=self._received - self._tail_bytes,
            fence=self._transfer.fence,
        )
        try:
            if self._tail_key is not None:
                tail = await self._store.stat(self._tail_key)
                if tail is None or tail.size != self._tail_bytes:
                    raise Failure(Code.SOURCE_MISSING, "The storage lost bytes of this upload.")
                async with aclosing(self._store.read(self._tail_key, tail.version)) as chunks:
                    async for chunk in chunks:
                        await part.write(chunk)
        except BaseException:
            part.abort()
            raise
        return part

    async def _store_part(self) -> None:
        assert self._part is not None
        self._unnoted.append(await self._part.commit())
        self._part = None
        self._number += 1
        self._tail_key, self._tail_bytes = None, 0

    async def _close(self) -> None:
        """Store what is left: as a part if it is large enough or the last, else as a tail."""
        if self._part is not None:
            last = self._received == self._transfer.size
            if last or self._part.written >= max(1, self._store.least_part_bytes):
                await self._store_part()
            else:
                folder = self._transfer.key.rpartition("/")[0]
                key, size = f"{folder}/tail-{self._transfer.fence}", self._part.written
                await self._part.set_aside(key)
                self._part = None
                self._tail_key, self._tail_bytes = key, size
        await self._advance(clean=True, received=self._received)

    async def _advance(self, *, clean: bool, received: int | None = None) -> None:
        """Move the offset behind what is durable. Raises Refused(UPLOAD_TAKEN_OVER)."""
        failpoints.hit("tus.part")
        before = self._transfer
        if received is None and clean:  # what came is not kept; only the numbers are used up
            received, parts = before.received, []
            tail_key, tail_bytes = before.tail_key, before.tail_bytes
        else:
            received, parts = self._received, self._unnoted
            tail_key, tail_bytes = self._tail_key, self._tail_bytes
        # A storage with one file for all parts needs no account of them.
        noted = parts if self._store.least_part_bytes else []
        async with db.transaction(self._pool) as connection:
            kept = await connection.fetchval(
                _SQL.advance,
                before.tenant_id,
                before.id,
                before.fence,
                received,
                self._number,
                [part.number for part in noted],
                [part.size for part in noted],
                [part.etag for part in noted],
                tail_key,
                tail_bytes,
                clean,
                self._ttl,
            )
        if kept is None:
            raise Refused(Code.UPLOAD_TAKEN_OVER)
        self._unnoted = []
        if self._old_tail is not None and tail_key != self._old_tail:
            with suppress(Failure):  # it lies under the media's prefix and goes with it
                await self._store.delete(self._old_tail)
            self._old_tail = None


async def find(connection: db.Connection, tenant_id: str, transfer_id: UUID) -> Transfer:
    """An upload that can go on, or is complete. Raises Refused."""
    row = await connection.fetchrow(_SQL.get, tenant_id, transfer_id)
    if row is None:
        raise Refused(Code.NOT_FOUND)
    found = Transfer(**dict(row))
    if found.deleted_at is not None or found.swept_at is not None:
        raise Refused(Code.GONE if found.deleted_at is not None else Code.UPLOAD_EXPIRED)
    if found.completed_at is None and (
        found.expired or found.media_state not in (None, MediaState.AWAITING_UPLOAD)
    ):
        raise Refused(Code.UPLOAD_EXPIRED)
    return found


async def _next(chunks: AsyncIterator[bytes], turn: _Turn) -> bytes | None:
    """The next bytes; None at the end, or when the turn is over. Raises Cut."""
    turn.waiting = True
    try:
        return await anext(chunks)
    except StopAsyncIteration:
        return None
    except asyncio.CancelledError:
        if not turn.stopped or turn.task.uncancel():
            raise
        return None
    finally:
        turn.waiting = False


def _sized(wanted: Wanted, size: int) -> Wanted:
    return Wanted(**{**_kept(wanted), "size": size})


def _kept(wanted: Wanted) -> dict[str, Any]:
    """What a client said about a file, but for its size."""
    return {
        "content_type": wanted.content_type,
        "filename": wanted.filename,
        "sha256": wanted.sha256,
        "recipe": wanted.recipe,
        "recipe_version": wanted.recipe_version,
        "metadata": wanted.metadata,
        "ttl_seconds": wanted.ttl_seconds,
    }


def _too_long(room: int, length: int) -> Refused:
    return Refused(
        Code.PAYLOAD_TOO_LARGE,
        "More bytes came than the upload has room for.",
        limit={"name": "upload", "allowed": room, "seen": length, "unit": "bytes"},
    )

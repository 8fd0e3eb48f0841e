"""Large files straight to storage: parts that clients send by signed requests, joined by us.

The plan is ours (each part has its place and its length), so that a signature can name exactly what
may be stored. Parts may come in any order, again, and from a client that lost all it knew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from mediamill import db
from mediamill.failures import Code, Failure, Refused
from mediamill.storage import Part, SignedRequest, Storage
from mediamill.tus import Transfer, Transfers, find
from mediamill.uploads import Wanted

PROTOCOL: Final = "multipart"
_PART_BYTES: Final = 5 << 20  # what browser clients send unless told otherwise
_SIGNED_SECONDS: Final = 3600.0


class Multiparts:
    """The multipart uploads of an installation, as one process serves them."""

    def __init__(self, transfers: Transfers, pool: db.Pool, store: Storage) -> None:
        self._transfers = transfers
        self._pool = pool
        self._store = store

    async def open(
        self,
        tenant_id: str,
        wanted: Wanted,
        *,
        size: int | None,
        connection: db.Connection | None = None,
    ) -> Transfer:
        """A new upload, whose size may be left open; in the caller's transaction, if there is one.
        Raises Refused."""
        part_bytes = max(_PART_BYTES, -(-(size or 0) // self._store.most_parts))
        return await self._transfers.open(
            tenant_id,
            wanted,
            size=size,
            protocol=PROTOCOL,
            part_bytes=part_bytes,
            connection=connection,
        )

    async def get(self, tenant_id: str, transfer_id: UUID) -> Transfer:
        """Raises Refused."""
        async with db.acquire(self._pool) as connection:
            found = await find(connection, tenant_id, transfer_id)
        if found.protocol != PROTOCOL:
            raise Refused(Code.NOT_FOUND)
        return found

    def sign(self, transfer: Transfer, number: int) -> SignedRequest:
        """The request that stores one part. Raises Refused for a part that the plan does not
        have."""
        offset = (number - 1) * transfer.part_bytes
        last = self._store.most_parts if transfer.size is None else part_count(transfer)
        if transfer.completed_at is not None:
            raise Refused(Code.WRONG_STATE, "It is complete.")
        if not 1 <= number <= last:
            raise Refused(
                Code.INVALID_REQUEST,
                f"It has the parts 1 to {last}.",
                errors=[{"pointer": "/number", "detail": f"{number} is none of them"}],
            )
        size = None
        if transfer.size is not None:
            size = min(transfer.part_bytes, transfer.size - offset)
        expires_at = min(
            transfer.expires_at,
            datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=_SIGNED_SECONDS),
        )
        return self._store.sign_part(
            transfer.key,
            transfer.parts,
            number,
            offset=offset,
            size=size,
            most=transfer.part_bytes,
            expires_at=expires_at,
        )

    async def parts(self, transfer: Transfer) -> list[Part]:
        """The parts that are there, one of each number. Raises Refused."""
        if transfer.completed_at is not None:
            raise Refused(Code.WRONG_STATE, "It is complete.")
        try:
            listed = await self._store.list_parts(transfer.key, transfer.parts)
        except Failure as failure:
            if failure.code is not Code.SOURCE_MISSING:
                raise
            raise Refused(Code.UPLOAD_EXPIRED) from None
        return list({part.number: part for part in listed}.values())

    async def complete(self, transfer: Transfer, given: Mapping[int, str] | None) -> Transfer:
        """Join the parts and accept the original. `given` are the ETags that the client has seen,
        by number; None takes what is there. Safe to repeat. Raises Refused; the upload stays open.
        """
        if transfer.completed_at is not None:
            return transfer
        try:
            listed = await self._store.list_parts(transfer.key, transfer.parts)
        except Failure as failure:
            if failure.code is not Code.SOURCE_MISSING:
                raise
            # Joined before, but the last step was cut off.
            stored = await self._store.stat(transfer.key)
            if stored is None or transfer.size not in (None, stored.size):
                raise Refused(Code.UPLOAD_EXPIRED) from None
            listed = [Part(1, stored.size, "")]
            given = None
        chosen = self._chosen(transfer, listed, given)
        total = sum(part.size for part in chosen)
        if transfer.size is None:
            transfer = await self._transfers.declare_size(transfer, total)
        elif total != transfer.size:
            raise Refused(
                Code.SIZE_MISMATCH,
                f"{transfer.size:,} bytes were announced, the parts have {total:,}.",
                limit={"name": "size", "allowed": transfer.size, "seen": total, "unit": "bytes"},
            )
        await self._transfers.finish(transfer, chosen)
        return await self.get(transfer.tenant_id, transfer.id)

    def _chosen(
        self, transfer: Transfer, listed: Sequence[Part], given: Mapping[int, str] | None
    ) -> list[Part]:
        """The stored parts that are meant. Raises Refused, which names every part at fault."""
        stored = {(part.number, part.etag.strip('"')): part for part in listed}
        newest = {part.number: part for part in listed}
        if given is None:
            given = {number: part.etag for number, part in newest.items()}
        faults = {}
        for number in range(1, max([len(given), *given], default=0) + 1):
            etag = given.get(number)
            part = stored.get((number, (etag or "").strip('"')))
            if etag is None:
                faults[number] = "is missing"
            elif number not in newest:
                faults[number] = "was not stored"
            elif part is None:
                faults[number] = "has another ETag in storage"
            elif self._out_of_place(transfer, part, last=number == max(given)):
                faults[number] = f"must have {transfer.part_bytes} bytes"
        if faults or not given:
            raise Refused(
                Code.PART_MISMATCH,
                errors=[
                    {"pointer": f"/parts/{number}", "detail": fault}
                    for number, fault in faults.items()
                ],
            )
        return [stored[number, given[number].strip('"')] for number in sorted(given)]

    def _out_of_place(self, transfer: Transfer, part: Part, *, last: bool) -> bool:
        """A part that is not the last must be large enough, and fill its place where it has one."""
        if last:
            return False
        if self._store.least_part_bytes:
            return part.size < self._store.least_part_bytes
        return part.size != transfer.part_bytes

    async def abort(self, transfer: Transfer) -> None:
        """Give it up. Raises Refused."""
        await self._transfers.end(transfer)


def part_count(transfer: Transfer) -> int:
    """How many parts an upload of known size has."""
    assert transfer.size is not None
    return -(-transfer.size // transfer.part_bytes)

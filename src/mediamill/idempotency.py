"""Idempotency-Key: a create that is repeated with its key is answered again, not done again.

The key's row lives in the transaction of what it guards, so an API that dies between the commit
and the answer has still remembered it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from uuid import UUID

import asyncpg

from mediamill import db
from mediamill.failures import Code, Refused

_SQL: Final = db.load("idempotency")
_WAIT: Final = "SET LOCAL lock_timeout = '5s'"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a create answers. `body` is the exact JSON text."""

    status: int
    body: str
    location: str
    about: UUID
    """What was made; when it is deleted, the answer is forgotten with it."""
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Key:
    """A key in its scope, and the fingerprint of the request that came with it."""

    tenant_id: str
    method: str
    route: str
    key: str
    fingerprint: bytes

    @property
    def scope(self) -> tuple[str, str, str, str]:
        return self.tenant_id, self.method, self.route, self.key


def parse(header: str) -> str:
    """The key in a header: bare, or a quoted structured-field string. Raises Refused."""
    text = header.strip()
    if len(text) >= 2 and text[0] == text[-1] == '"':
        text = text[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    if not 1 <= len(text) <= 255 or not all("!" <= c <= "~" for c in text):
        raise Refused(Code.IDEMPOTENCY_KEY_INVALID)
    return text


def fingerprint(*parts: str | bytes) -> bytes:
    """A digest of everything that makes two requests the same."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()


async def once(
    connection: db.Connection,
    key: Key | None,
    *,
    keep_seconds: float,
    work: Callable[[], Awaitable[Answer]],
) -> Answer:
    """Do `work` in the caller's transaction, or give the answer that this key had before.

    A concurrent request with the same key is waited for, up to 5 s. Raises
    Refused(IDEMPOTENCY_KEY_REUSED) for another request under the key, and
    Refused(IDEMPOTENCY_IN_FLIGHT) when the wait is over.
    """
    if key is None:
        return await work()
    await connection.execute(_WAIT)
    keep = timedelta(seconds=keep_seconds)
    try:
        await connection.execute(_SQL.renew_expired, *key.scope)
        first = await connection.fetchval(_SQL.claim, *key.scope, key.fingerprint, keep)
    except asyncpg.LockNotAvailableError:
        raise Refused(Code.IDEMPOTENCY_IN_FLIGHT, headers={"Retry-After": "1"}) from None
    if not first:
        row = await connection.fetchrow(_SQL.get, *key.scope)
        if row is None:  # it was purged in between
            raise Refused(Code.IDEMPOTENCY_IN_FLIGHT, headers={"Retry-After": "1"})
        if row["fingerprint"] != key.fingerprint:
            raise Refused(Code.IDEMPOTENCY_KEY_REUSED)
        if row["body"] is None:
            raise Refused(Code.GONE)
        return Answer(row["status"], row["body"], row["location"], row["about"], replayed=True)
    answer = await work()
    await connection.execute(
        _SQL.store, *key.scope, answer.status, answer.body, answer.location, answer.about
    )
    return answer

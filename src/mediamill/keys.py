"""API keys: `mpk_live_<id>_<secret><checksum>`.

Only an HMAC of the secret is stored. The checksum refuses a typo without asking the database, and
the fixed beginning lets secret scanners find a leaked key.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from mediamill import db

_SQL: Final = db.load("installation")
_ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_PREFIX: Final = "mpk_live_"
_ID_LENGTH: Final = 8
_SECRET_LENGTH: Final = 43  # 62^43 > 2^256
_CHECK_LENGTH: Final = 6
_REMEMBER_SECONDS: Final = 5.0
_REMEMBER_MOST: Final = 10_000

SCOPES: Final = (
    "uploads:write",
    "media:read",
    "media:write",
    "media:delete",
    "jobs:read",
    "jobs:write",
    "dlq:manage",
    "webhooks:manage",
    "deliveries:read",
    "admin",
    "operate",
)
"""What a key may be allowed to do. `admin` implies the rest, but for `operate`: queues and workers
serve all tenants, so seeing and steering them is not a tenant's right."""

_VIEWER: Final = ("media:read", "jobs:read", "deliveries:read")
_OPERATOR: Final = (
    *_VIEWER,
    "uploads:write",
    "media:write",
    "jobs:write",
    "dlq:manage",
    "webhooks:manage",
)
ROLES: Final = {"viewer": _VIEWER, "operator": _OPERATOR, "admin": ("admin",)}
"""Scopes by the role of a person in a tenant, the lowest role first. `operate` is in none of them:
it is given beside a role."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, and what it may do."""

    tenant_id: str
    key_id: str
    scopes: frozenset[str]

    def may(self, scope: str) -> bool:
        return _allows(self.scopes, scope)


def role_of(scopes: Collection[str]) -> str | None:
    """The highest role of which these scopes allow everything."""
    held = [r for r, wanted in ROLES.items() if all(_allows(scopes, scope) for scope in wanted)]
    return held[-1] if held else None


def _allows(scopes: Collection[str], scope: str) -> bool:
    return scope in scopes or ("admin" in scopes and scope != "operate")


async def create(
    connection: db.Connection,
    pepper: bytes,
    *,
    tenant_id: str,
    name: str,
    scopes: Sequence[str] = ("admin",),
    ttl_seconds: float | None = None,
) -> str:
    """A new key, in the only form that is ever shown. The tenant is made if it is new."""
    unknown = set(scopes) - set(SCOPES)
    if unknown:
        raise ValueError(f"unknown scope {', '.join(sorted(unknown))}; known: {', '.join(SCOPES)}")
    key_id = _random(_ID_LENGTH)
    secret = _random(_SECRET_LENGTH)
    await connection.execute(_SQL.add_tenant, tenant_id)
    await connection.execute(
        _SQL.add_key,
        tenant_id,
        key_id,
        name,
        _digest(pepper, secret),
        secret[-4:],
        list(scopes),
        None if ttl_seconds is None else timedelta(seconds=ttl_seconds),
    )
    return f"{_PREFIX}{key_id}_{secret}{_checksum(key_id + secret)}"


async def revoke(connection: db.Connection, tenant_id: str, key_id: str) -> bool:
    """The key is refused from now on (within seconds on other processes)."""
    return bool(await connection.fetchval(_SQL.revoke_key, tenant_id, key_id))


def id_of(token: str) -> str:
    """The id in a well-formed key. Raises ValueError for anything else."""
    parsed = _parse(token)
    if parsed is None:
        raise ValueError("this is no key")
    return parsed[0]


async def get(connection: db.Connection, tenant_id: str, key_id: str) -> db.Row | None:
    """A key of this tenant, without what it is made of."""
    return await connection.fetchrow(_SQL.get_key, tenant_id, key_id)


async def list_of(connection: db.Connection, tenant_id: str) -> list[db.Row]:
    return await connection.fetch(_SQL.list_keys, tenant_id)


async def belongs(connection: db.Connection, pepper: bytes, token: str) -> bool:
    """Whether this key is good here and now."""
    parsed = _parse(token)
    if parsed is None:
        return False
    row = await connection.fetchrow(_SQL.find_key, parsed[0])
    return row is not None and hmac.compare_digest(row["digest"], _digest(pepper, parsed[1]))


class Keychain:
    """Tells whose key a token is, remembering an answer for some seconds."""

    def __init__(self, pool: db.Pool, pepper: bytes) -> None:
        self._pool = pool
        self._pepper = pepper
        self._known: dict[bytes, tuple[float, Caller]] = {}
        self._standing: dict[tuple[str, str], float] = {}

    async def identify(self, token: str) -> Caller | None:
        """The caller behind a token, or None. Costs no database read for a token just seen."""
        parsed = _parse(token)
        if parsed is None:
            return None
        key_id, secret = parsed
        digest = _digest(self._pepper, secret)
        remembered = self._known.get(digest)
        now = time.monotonic()
        if remembered is not None and remembered[0] > now and remembered[1].key_id == key_id:
            return remembered[1]
        async with db.acquire(self._pool) as connection:
            row = await connection.fetchrow(_SQL.find_key, key_id)
            if row is None or not hmac.compare_digest(row["digest"], digest):
                self._known.pop(digest, None)
                return None
            await connection.execute(_SQL.use_key, key_id)
        caller = Caller(row["tenant_id"], key_id, frozenset(row["scopes"]))
        if len(self._known) >= _REMEMBER_MOST:
            self._known.clear()
        self._known[digest] = now + _REMEMBER_SECONDS, caller
        return caller

    def forget(self, key_id: str) -> None:
        """Ask the database about this key from now on, in this process."""
        self._known = {d: known for d, known in self._known.items() if known[1].key_id != key_id}
        self._standing = {k: until for k, until in self._standing.items() if k[1] != key_id}

    async def stands(self, tenant_id: str, key_id: str) -> bool:
        """Whether a key of this tenant is neither revoked nor expired, for what was granted by
        it."""
        now = time.monotonic()
        if self._standing.get((tenant_id, key_id), 0.0) > now:
            return True
        async with db.acquire(self._pool) as connection:
            row = await connection.fetchrow(_SQL.find_key, key_id)
        if row is None or row["tenant_id"] != tenant_id:
            self._standing.pop((tenant_id, key_id), None)
            return False
        if len(self._standing) >= _REMEMBER_MOST:
            self._standing.clear()
        self._standing[tenant_id, key_id] = now + _REMEMBER_SECONDS
        return True


def _parse(token: str) -> tuple[str, str] | None:
    body = token.removeprefix(_PREFIX)
    key_id, _, rest = body.partition("_")
    secret, checksum = rest[:-_CHECK_LENGTH], rest[-_CHECK_LENGTH:]
    well_formed = (
        token.startswith(_PREFIX)
        and len(key_id) == _ID_LENGTH
        and len(secret) == _SECRET_LENGTH
        and token.isascii()
        and _checksum(key_id + secret) == checksum
    )
    return (key_id, secret) if well_formed else None


def _digest(pepper: bytes, secret: str) -> bytes:
    # The secret is random enough that a fast hash is right; a password hash would only cost time.
    return hmac.new(pepper, secret.encode(), hashlib.sha256).digest()


def _checksum(text: str) -> str:
    number = zlib.crc32(text.encode())
    digits = []
    for _ in range(_CHECK_LENGTH):
        number, digit = divmod(number, 62)
        digits.append(_ALPHABET[digit])
    return "".join(digits)


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))

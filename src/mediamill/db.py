"""The database at arm's length: pools, named SQL statements, migrations.

Statements live in `sql/<aggregate>.sql`; every one takes the connection from its caller, so that
transactions belong to the caller.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import asyncpg

if TYPE_CHECKING:  # asyncpg's classes are generic in their stubs only
    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]
    Pool: TypeAlias = asyncpg.Pool[asyncpg.Record]
else:
    Connection, Pool = asyncpg.Connection, asyncpg.Pool
Row: TypeAlias = asyncpg.Record
T = TypeVar("T")

# What a lost or restarting server looks like in the middle of a statement.
_LOST: Final = (
    ConnectionError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.InsufficientResourcesError,  # too many connections, no disk or memory left
    asyncpg.IdleInTransactionSessionTimeoutError,
)
_RELEASE_SECONDS: Final = 3.0


class Unavailable(Exception):
    """The database cannot be reached, or was lost; what was not committed is not done.

    A commit whose answer was lost may have happened.
    """


_MIGRATION_LOCK: Final = 0x6D65_6469_616D  # "mediam"
_LOCK_MILLISECONDS: Final = 1000  # far below the time after which a worker gives its jobs up
_PAUSE_SECONDS: Final = 2.0
_PATIENCE_SECONDS: Final = 120.0
SCHEMA_VERSION: Final = 10
"""The newest migration this code knows; processes refuse an older database."""


class MigrationError(Exception):
    """The database and this code do not fit; the message says what to run."""


class Statements:
    """The named statements of one SQL file, as attributes."""

    def __init__(self, aggregate: str, statements: dict[str, str]) -> None:
        self._aggregate = aggregate
        self.all = statements

    def __getattr__(self, name: str) -> str:
        try:
            return self.all[name]
        except KeyError:
            raise AttributeError(f"no statement {name!r} in sql/{self._aggregate}.sql") from None


@cache
def load(aggregate: str) -> Statements:
    """Read `sql/<aggregate>.sql`: each statement starts with a line `-- name: its_name`."""
    text = resources.files("mediamill").joinpath("sql", f"{aggregate}.sql").read_text("utf-8")
    parts = re.split(r"^-- name: (\w+)[ \t]*$", text, flags=re.MULTILINE)
    names, bodies = parts[1::2], parts[2::2]
    assert len(set(names)) == len(names), f"a name is used twice in sql/{aggregate}.sql"
    return Statements(
        aggregate, {n: b.strip().rstrip(";") for n, b in zip(names, bodies, strict=True)}
    )


async def connect(dsn: str, *, application: str = "mediamill") -> Connection:
    """One connection with our JSON codec and settings. Raises Unavailable."""
    with _translated(OSError):
        connection = await asyncpg.connect(dsn, server_settings=_server_settings(application))
        await prepare(connection)
    return connection


async def open_pool(
    dsn: str, *, size: int, application: str = "mediamill", idle_seconds: float = 0.0
) -> Pool:
    """A pool of at most `size` connections; the first one is opened now, so that errors show
    here.

    The server ends a transaction that says nothing for `idle_seconds` (0: never), so that a process
    which is frozen or cut off in the middle of one does not keep its locks from the others.
    """
    with _translated(OSError):
        pool = await asyncpg.create_pool(
            dsn,
            min_size=1,
            max_size=size,
            init=prepare,
            command_timeout=60,
            max_inactive_connection_lifetime=300,
            server_settings=_server_settings(application)
            | {"idle_in_transaction_session_timeout": f"{idle_seconds * 1000:.0f}"},
        )
    assert pool is not None
    return pool


@asynccontextmanager
async def acquire(pool: Pool) -> AsyncIterator[Connection]:
    """A connection of the pool, outside any transaction. Raises Unavailable."""
    with _translated(OSError):
        connection = await pool.acquire()
    try:
        with _translated():
            yield connection  # type: ignore[misc]  # the pool's proxy behaves as the connection
    finally:
        # One that cannot be reset in time is thrown away by the pool; what was done on it stands.
        with suppress(*_LOST):
            await pool.release(connection, timeout=_RELEASE_SECONDS)


@asynccontextmanager
async def transaction(pool: Pool) -> AsyncIterator[Connection]:
    """A connection of the pool inside one transaction. Raises Unavailable."""
    async with acquire(pool) as connection, connection.transaction():
        yield connection


async def may_idle(connection: Connection, seconds: float) -> None:
    """This transaction may say nothing for that long: it talks to somebody else in between."""
    await connection.execute(
        f"SET LOCAL idle_in_transaction_session_timeout = {seconds * 1000:.0f}"
    )


@contextmanager
def _translated(*more: type[Exception]) -> Iterator[None]:
    lost: tuple[type[Exception], ...] = (*_LOST, *more)
    try:
        yield
    except lost as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from error


async def outlast(
    work: Callable[[], Awaitable[T]], *, seconds: float, pause_seconds: float = 0.2
) -> T:
    """Repeat `work` through a database outage of up to `seconds`, and after a deadlock.

    Other errors pass through.

    Only for work that is safe to repeat: a commit whose answer was lost may have happened.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            return await work()
        except (Unavailable, asyncpg.DeadlockDetectedError):
            if asyncio.get_running_loop().time() >= deadline:
                raise
            await asyncio.sleep(pause_seconds)


def _server_settings(application: str) -> dict[str, str]:
    # JIT costs more than it brings on statements of milliseconds.
    return {"application_name": application, "jit": "off", "timezone": "UTC"}


async def prepare(connection: Any) -> None:
    """Teach a connection the JSON codec that our statements speak."""
    for name in ("json", "jsonb"):
        await connection.set_type_codec(
            name, encoder=to_json, decoder=json.loads, schema="pg_catalog"
        )


def to_json(value: Any) -> str:
    """JSON as our jsonb columns take it. Raises ValueError for NaN and infinities."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, slots=True)
class Migration:
    """One forward step. `digest` guards against an edited file that was already applied."""

    version: int
    name: str
    sql: str
    digest: str
    transactional: bool


@cache
def migrations() -> tuple[Migration, ...]:
    """All migrations in order, from `sql/migrations/NNNN_name.sql`."""
    folder = resources.files("mediamill").joinpath("sql", "migrations")
    found = []
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if match := re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name):
            sql = file.read_text("utf-8")
            digest = hashlib.sha256(sql.encode()).hexdigest()
            transactional = not sql.startswith("-- transaction: off")
            found.append(Migration(int(match[1]), match[2], sql, digest, transactional))
    return tuple(found)


async def migrate(
    dsn: str, *, finish: Callable[[Connection], Awaitable[None]] | None = None
) -> list[Migration]:
    """Bring the schema up to date; returns what was applied. Many processes may run it at once.

    `finish` runs under the same lock after our own steps (the queue engine installs itself there).
    """
    connection = await connect(dsn, application="mediamill migrate")
    try:
        # A session lock: `CREATE INDEX CONCURRENTLY` steps cannot share one transaction.
        await connection.execute("SELECT pg_advisory_lock($1)", _MIGRATION_LOCK)
        await connection.execute(f"SET lock_timeout = '{_LOCK_MILLISECONDS}ms'")
        await connection.execute(
            "CREATE TABLE IF NOT EXISTS schema_migrations (version int PRIMARY KEY,"
            " name text NOT NULL, digest text NOT NULL,"
            " applied_at timestamptz NOT NULL DEFAULT now())"
        )
        applied = await _pending(connection)
        for step in applied:
            await _patiently(partial(_apply, connection, step))
        if finish is not None:
            await _patiently(partial(finish, connection))
        return applied
    finally:
        await connection.close()


async def _patiently(work: Callable[[], Awaitable[None]]) -> None:
    """Do it again later if it did not get its lock at once: while it waits, everybody else waits
    behind it, the beats of the workers too."""
    deadline = asyncio.get_running_loop().time() + _PATIENCE_SECONDS
    while True:
        try:
            return await work()
        except asyncpg.LockNotAvailableError:
            if asyncio.get_running_loop().time() >= deadline:
                raise MigrationError(
                    f"A table was in use for {_PATIENCE_SECONDS:g} s. End the long transactions "
                    "(pg_stat_activity shows them), then run `mediamill migrate` again."
                ) from None
            await asyncio.sleep(_PAUSE_SECONDS)


async def check_schema(connection: Connection) -> None:
    """Raise MigrationError unless the database is at least at the version that this code needs."""
    try:
        version = await connection.fetchval("SELECT max(version) FROM schema_migrations")
    except asyncpg.UndefinedTableError:
        version = None
    if (version or 0) < SCHEMA_VERSION:
        raise MigrationError(
            f"The database schema is at version {version or 0}, this program needs "
            f"{SCHEMA_VERSION}. Run `mediamill migrate` first."
        )


async def _pending(connection: Connection) -> list[Migration]:
    rows = await connection.fetch("SELECT version, digest FROM schema_migrations")
    done = {row["version"]: row["digest"] for row in rows}
    for step in migrations():
        if done.get(step.version, step.digest) != step.digest:
            raise MigrationError(
                f"Migration {step.version:04d}_{step.name} was changed after it was applied. "
                "Migrations are forward-only: restore the file and add a new one."
            )
    return [step for step in migrations() if step.version not in done]


async def _apply(connection: Connection, step: Migration) -> None:
    record = "INSERT INTO schema_migrations (version, name, digest) VALUES ($1, $2, $3)"
    if step.transactional:
        async with connection.transaction():
            await connection.execute(step.sql)
            await connection.execute(record, step.version, step.name, step.digest)
    else:
        # An index that is built concurrently waits for old transactions and keeps nobody waiting;
        # one that gave up in between would stay behind, invalid.
        await connection.execute("SET lock_timeout = 0")
        for statement in filter(None, (part.strip() for part in step.sql.split(";\n"))):
            await connection.execute(statement)
        await connection.execute(record, step.version, step.name, step.digest)
        await connection.execute(f"SET lock_timeout = '{_LOCK_MILLISECONDS}ms'")


async def wait_until_up(dsn: str, *, seconds: float) -> None:
    """Return once the server takes connections; raises Unavailable after `seconds`."""

    async def probe() -> None:
        with _translated(OSError):
            connection = await asyncpg.connect(dsn, timeout=5)
            await connection.close()

    await outlast(probe, seconds=seconds, pause_seconds=0.1)

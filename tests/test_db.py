"""The database at arm's length: migrations, statements, and what a lost server looks like."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import asyncpg
import pytest
from tests import rows

from mediamill import db, queue

pytestmark = pytest.mark.anyio


@pytest.fixture
async def empty(server: str) -> AsyncIterator[str]:
    """A database without a schema."""
    name = "empty_" + format(time.monotonic_ns(), "x")
    connection = await asyncpg.connect(server)
    await connection.execute(f"CREATE DATABASE {name}")
    head, mark, query = server.partition("?")
    yield f"{head.rpartition('/')[0]}/{name}{mark}{query}"
    await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await connection.close()


async def test_five_migrations_at_once_apply_each_step_once(empty: str) -> None:
    finished = []

    async def finish(connection: db.Connection) -> None:
        await queue.install(connection)
        finished.append(1)

    applied = await asyncio.gather(*(db.migrate(empty, finish=finish) for _ in range(5)))
    assert sorted(len(steps) for steps in applied) == [0, 0, 0, 0, len(db.migrations())]
    assert len(finished) == 5
    async with rows.connected(empty) as connection:
        await db.check_schema(connection)
        versions = await connection.fetch("SELECT version FROM schema_migrations ORDER BY 1")
        assert [row["version"] for row in versions] == [m.version for m in db.migrations()]


async def test_an_applied_migration_may_not_be_changed(
    empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await db.migrate(empty)
    edited = (replace(db.migrations()[0], digest="another"), *db.migrations()[1:])
    monkeypatch.setattr(db, "migrations", lambda: edited)
    with pytest.raises(db.MigrationError, match=r"0001_first was changed"):
        await db.migrate(empty)


async def test_a_step_that_fails_leaves_nothing_of_itself(
    empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = db.Migration(1, "good", "CREATE TABLE a (b int)", "1", transactional=True)
    broken = db.Migration(2, "bad", "CREATE TABLE c (d int); SELECT nonsense", "2", True)
    monkeypatch.setattr(db, "migrations", lambda: (first, broken))
    with pytest.raises(asyncpg.UndefinedColumnError):
        await db.migrate(empty)
    async with rows.connected(empty) as connection:
        tables = await connection.fetch(
            "SELECT relname FROM pg_class WHERE relkind = 'r'"
            " AND relnamespace = 'public'::regnamespace ORDER BY 1"
        )
        assert [row["relname"] for row in tables] == ["a", "schema_migrations"]
    mended = replace(broken, sql="CREATE INDEX CONCURRENTLY x ON a (b);\nSELECT 1",
                     transactional=False)  # fmt: skip
    monkeypatch.setattr(db, "migrations", lambda: (first, mended))
    assert await db.migrate(empty) == [mended]


async def test_a_program_refuses_an_older_schema(empty: str) -> None:
    async with rows.connected(empty) as connection:
        with pytest.raises(db.MigrationError, match="Run `mediamill migrate` first"):
            await db.check_schema(connection)


def test_migrations_are_numbered_without_gaps() -> None:
    assert [m.version for m in db.migrations()] == list(range(1, db.SCHEMA_VERSION + 1))


def test_a_statement_that_is_not_there_is_told_by_name() -> None:
    with pytest.raises(AttributeError, match=r"no statement 'nonsense' in sql/jobs\.sql"):
        _ = db.load("jobs").nonsense


async def test_json_goes_in_and_out_as_it_is(database: str) -> None:
    async with rows.connected(database) as connection:
        values: list[Any] = [{"é": [1, None, True, "\U0001f600"]}, [], "text", 5, None]
        for value in values:
            assert await connection.fetchval("SELECT $1::jsonb", value) == value
            assert await connection.fetchval("SELECT $1::json", value) == value
        with pytest.raises(asyncpg.DataError):
            await connection.fetchval("SELECT $1::jsonb", float("nan"))
        assert await connection.fetchval("SHOW timezone") == "UTC"


async def test_a_transaction_commits_or_leaves_nothing(database: str) -> None:
    async with rows.pooled(database) as pool:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with db.transaction(pool) as connection:
                await rows.new_tenant(connection)
                raise ZeroDivisionError
        async with db.acquire(pool) as connection:
            assert await connection.fetchval("SELECT count(*) FROM tenants") == 1
        async with db.transaction(pool) as connection:
            await rows.new_tenant(connection)
        async with db.acquire(pool) as connection:
            assert await connection.fetchval("SELECT count(*) FROM tenants") == 2


NOBODY = "postgresql://mediamill@/x?host=/nonexistent&port=1"


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(db.Unavailable):
        await db.connect(NOBODY)
    with pytest.raises(db.Unavailable):
        await db.open_pool(NOBODY, size=2)
    with pytest.raises(db.Unavailable):
        await db.wait_until_up(NOBODY, seconds=0.3)


async def test_a_connection_that_is_cut_is_unavailable_and_the_pool_recovers(
    database: str,
) -> None:
    async with rows.pooled(database, size=2) as pool:
        with pytest.raises(db.Unavailable):  # noqa: PT012
            async with db.transaction(pool) as connection:
                pid = await connection.fetchval("SELECT pg_backend_pid()")
                async with rows.connected(database) as killer:
                    await killer.execute("SELECT pg_terminate_backend($1)", pid)
                await connection.fetchval("SELECT pg_sleep(1)")
        async with db.acquire(pool) as connection:
            assert await connection.fetchval("SELECT 1") == 1


async def test_other_errors_are_not_an_outage(database: str) -> None:
    async with rows.pooled(database) as pool:
        with pytest.raises(asyncpg.UniqueViolationError):
            async with db.acquire(pool) as connection:
                await connection.execute("INSERT INTO tenants VALUES ('default')")
        with pytest.raises(ZeroDivisionError):
            async with db.acquire(pool):
                raise ZeroDivisionError


async def test_outlast_repeats_through_an_outage_and_gives_up_after_its_time() -> None:
    tries = 0

    async def back_at_the_third() -> str:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise db.Unavailable("gone")
        return "back"

    assert await db.outlast(back_at_the_third, seconds=5, pause_seconds=0.01) == "back"
    assert tries == 3

    async def never() -> None:
        raise db.Unavailable("gone")

    began = time.monotonic()
    with pytest.raises(db.Unavailable):
        await db.outlast(never, seconds=0.1, pause_seconds=0.01)
    assert 0.1 <= time.monotonic() - began < 2

    async def broken() -> None:
        nonlocal tries
        tries += 1
        raise ZeroDivisionError

    tries = 0
    with pytest.raises(ZeroDivisionError):
        await db.outlast(broken, seconds=5)
    assert tries == 1

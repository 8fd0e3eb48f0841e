"""One PostgreSQL for the run, a migrated template, and a fresh database for each test that asks."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest
from tests.storage.seaweed import Seaweed, seaweed

from mediamill import db, queue
from mediamill.embedded import Embedded

if TYPE_CHECKING:
    from tests.storage.azurite import Azurite

_TEMPLATE = "template_mediamill"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a PostgreSQL of this run; MEDIAMILL_TEST_DATABASE_URL names another one."""
    given = os.environ.get("MEDIAMILL_TEST_DATABASE_URL")
    if given:
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix="mediamill-test-"))
    embedded = Embedded(folder / "postgres")
    try:
        yield embedded.start()
    finally:
        embedded.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def template(server: str) -> str:
    """A database with the schema in it, to copy from."""

    async def make() -> None:
        name = f"{_TEMPLATE}_{os.getpid()}"
        connection = await asyncpg.connect(server)
        await connection.execute(f"DROP DATABASE IF EXISTS {name}")
        await connection.execute(f"CREATE DATABASE {name}")
        await connection.close()
        await db.migrate(database_url(server, name), finish=queue.install)

    asyncio.run(make())
    return f"{_TEMPLATE}_{os.getpid()}"


@pytest.fixture
def database(server: str, template: str) -> Iterator[str]:
    """The address of a fresh, migrated database."""
    name = f"test_{secrets.token_hex(6)}"

    async def run(statement: str) -> None:
        connection = await asyncpg.connect(server)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    asyncio.run(run(f"CREATE DATABASE {name} TEMPLATE {template}"))
    try:
        yield database_url(server, name)
    finally:
        # The run's own server goes as a whole; a drop costs a checkpoint.
        if os.environ.get("MEDIAMILL_TEST_DATABASE_URL"):
            asyncio.run(run(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))


def database_url(server: str, name: str) -> str:
    """The address of another database on the same server."""
    head, mark, query = server.partition("?")
    return f"{head.rpartition('/')[0]}/{name}{mark}{query}"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """An S3 server of this process, for the tests that need one."""
    with seaweed(tmp_path_factory.mktemp("seaweed")) as running:
        yield running


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    """Azure's emulator, for the tests that need it."""
    from tests.storage.azurite import azurite

    with azurite(tmp_path_factory.mktemp("azurite")) as running:
        yield running

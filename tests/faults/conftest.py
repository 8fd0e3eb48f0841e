"""A lab for each test, on a database of its own; some tests have a server of their own to break."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
import pytest
from tests.conftest import database_url
from tests.faults.lab import Lab
from tests.faults.proxy import Proxy
from tests.stories.harness import until

from mediamill import db, queue
from mediamill.embedded import Embedded

Make = Callable[..., Lab]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The campaign takes minutes: `make test-long` runs it."""
    for item in items:
        if "/faults/" in item.nodeid and "test_checker" not in item.nodeid:
            item.add_marker(pytest.mark.long)


@pytest.fixture
def make_lab(database: str, tmp_path: Path) -> Iterator[Make]:
    """Makes the installation of this test; its processes end with the test."""
    made: list[Lab] = []

    def make(**settings: object) -> Lab:
        address = str(settings.pop("database", database))
        lab = Lab(address, tmp_path, **settings)  # type: ignore[arg-type]
        made.append(lab)
        return lab

    try:
        yield make
    finally:
        for lab in made:
            lab.close()


@pytest.fixture
def lab(make_lab: Make) -> Lab:
    """An installation with short leases; the test starts its processes."""
    return make_lab()


@dataclass(slots=True)
class Server:
    """A PostgreSQL that a test may break."""

    folder: Path
    embedded: Embedded
    dsn: str
    proxies: list[Proxy] = field(default_factory=list)

    def fresh_database(self) -> str:
        name = f"test_{secrets.token_hex(6)}"

        async def make() -> None:
            connection = await asyncpg.connect(self.dsn)
            await connection.execute(f"CREATE DATABASE {name}")
            await connection.close()
            await db.migrate(database_url(self.dsn, name), finish=queue.install)

        asyncio.run(make())
        return database_url(self.dsn, name)

    def proxy(self, dsn: str) -> Proxy:
        proxy = Proxy(dsn)
        self.proxies.append(proxy)
        return proxy

    def restart_at_once(self) -> None:
        """Immediate stop, as in a crash: no checkpoint, connections broken; then up again."""
        pid = self.postmaster()
        os.kill(pid, signal.SIGQUIT)
        until(
            lambda: self.postmaster() not in (pid, 0), seconds=60, why="the server did not restart"
        )
        self.embedded.ensure()

    def postmaster(self) -> int:
        try:
            return int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        except (FileNotFoundError, IndexError):
            return 0


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="mediamill-faults-"))
    folder.chmod(0o755)  # the server may run as another user
    embedded = Embedded(folder / "postgres")
    server = Server(folder / "postgres", embedded, embedded.start())
    try:
        yield server
    finally:
        for proxy in server.proxies:
            proxy.close()
        embedded.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def proxy(database: str) -> Iterator[Proxy]:
    """A way to this test's database that can be cut."""
    proxy = Proxy(database)
    try:
        yield proxy
    finally:
        proxy.close()

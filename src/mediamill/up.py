"""`mediamill up`: the whole platform on one machine, as one process tree.

The processes are the same that run apart in a fleet. One that dies is started again; when this
process is told to stop, or dies itself, all of them go.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from mediamill import (
    __version__,
    db,
    embedded,
    installation,
    keys,
    observability,
    processes,
    sealing,
)
from mediamill.config import Settings

_READY_SECONDS: Final = 60.0
_TICK_SECONDS: Final = 0.2
_BACKOFF_SECONDS: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
_STEADY_SECONDS: Final = 30.0
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
_ENSURE_SECONDS: Final = 2.0


class CannotStart(Exception):
    """The platform cannot start; the message says what to do."""


@dataclass(slots=True)
class Service:
    """One process of the platform, kept alive."""

    name: str
    argv: list[str]
    env: dict[str, str]
    log: IO[str]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    restarts: int = 0
    due_at: float = 0.0

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.argv,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,  # Ctrl-C is ours to pass on, in order
        )
        self.started_at = time.monotonic()


@dataclass(slots=True)
class Platform:
    """What is running, and how to reach it."""

    settings: Settings
    dsn: str
    api_key: str
    services: list[Service]
    server: embedded.Embedded | None = None
    timings: dict[str, float] = field(default_factory=dict)

    _ensured_at: float = field(default_factory=time.monotonic)

    @property
    def url(self) -> str:
        return self.settings.base_url

    def _ensure(self) -> None:
        """The embedded server comes back even if its own supervisor was killed."""
        assert self.server is not None
        try:
            self.server.ensure()
        except embedded.EmbeddedError as error:
            _say(str(error))

    def tend(self) -> None:
        """Start what is due to be started again. Call it every fraction of a second."""
        now = time.monotonic()
        if self.server is not None and now - self._ensured_at > _ENSURE_SECONDS:
            self._ensured_at = now
            threading.Thread(target=self._ensure, name="database", daemon=True).start()
        for service in self.services:
            if service.process is None:
                if now >= service.due_at:
                    service.start()
            elif service.process.poll() is not None:
                if now - service.started_at > _STEADY_SECONDS:
                    service.restarts = 0
                pause = _BACKOFF_SECONDS[min(service.restarts, len(_BACKOFF_SECONDS) - 1)]
                _say(f"{service.name} ended ({service.process.returncode}); starting it again")
                service.process, service.due_at = None, now + pause
                service.restarts += 1


def run(settings: Settings, app: str | None = None) -> int:
    """Run the platform until SIGINT or SIGTERM; the exit code. `app` names the jobs of an
    application that its worker does too."""
    stopping = stop_flag()
    try:
        with platform(settings, app, stopping=stopping) as running:
            _banner(running)
            while not stopping():
                running.tend()
                time.sleep(_TICK_SECONDS)
            _say("stopping")
    except CannotStart as error:
        print(f"mediamill: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def platform(
    settings: Settings, app: str | None = None, *, stopping: Callable[[], bool] = lambda: False
) -> Iterator[Platform]:
    """The platform, started and answering; stopped when the block ends. Raises CannotStart."""
    began = time.perf_counter()
    if settings.public_url is None and settings.host in _LOOPBACK:
        settings = settings.model_copy(update={"dashboard_sign_in": True})
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    server: embedded.Embedded | None = None
    services: list[Service] = []
    try:
        if settings.database_url is None:
            server = embedded.Embedded(
                settings.data_dir / "postgres", bin_dir=settings.postgres_bin_dir
            )
            dsn = server.start()
        else:
            dsn = settings.database_url
        database_seconds = time.perf_counter() - began
        if settings.secrets_key is None and not settings.secrets_key_file.exists():
            _write_private(settings.secrets_key_file, f"{sealing.new_key()}\n")
        api_key = asyncio.run(_prepare(settings, dsn))
        commands = (["api"], ["worker", *(["--app", app] if app else [])])
        services = [_service(settings, dsn, command) for command in commands]
        for service in services:
            service.start()
        running = Platform(settings, dsn, api_key, services, server)
        running.timings["database"] = database_seconds
        _await_ready(running, stopping)
        running.timings["ready"] = time.perf_counter() - began
        yield running
    except (embedded.EmbeddedError, db.MigrationError, db.Unavailable, OSError) as error:
        raise CannotStart(str(error)) from None
    finally:
        _stop(services, settings.drain_seconds + 10)
        if server is not None:
            server.close()


async def _prepare(settings: Settings, dsn: str) -> str:
    """Migrate, and make the first API key; it is kept for the next start."""
    await db.wait_until_up(dsn, seconds=30)
    await processes.migrate(settings.model_copy(update={"database_url": dsn}))
    connection = await db.connect(dsn, application="mediamill up")
    try:
        installed = await installation.identify(connection)
        path = settings.key_file
        with suppress(FileNotFoundError):
            known = path.read_text().strip()
            if await keys.belongs(connection, installed.pepper, known):
                return known
        key = await keys.create(
            connection,
            installed.pepper,
            tenant_id="default",
            name="mediamill up",
            scopes=("admin", "operate"),
        )
        _write_private(path, f"{key}\n")
        return key
    finally:
        await connection.close()


def _service(settings: Settings, dsn: str, command: list[str]) -> Service:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MEDIAMILL_")}
    given = settings.model_dump(mode="json", exclude_none=True)
    env |= {
        f"MEDIAMILL_{k.upper()}": json.dumps(v) if isinstance(v, (dict, list)) else str(v)
        for k, v in given.items()
    }
    env["MEDIAMILL_DATABASE_URL"] = dsn
    if "MEDIAMILL_FAILPOINT" in os.environ:
        env["MEDIAMILL_FAILPOINT"] = os.environ["MEDIAMILL_FAILPOINT"]
    # A child that outlives this process would work on unseen: it is bound to it first.
    argv = [sys.executable, "-m", "mediamill", "--bound-to", str(os.getpid())]
    if settings.database_url is None:
        argv += ["--keep-database", str(settings.data_dir / "postgres")]
    argv += command
    name = command[0]
    return Service(name, argv, env, observability.open_log(settings.logs_dir, name))


def _await_ready(running: Platform, stopping: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    waiting = ["api", "worker"]
    while waiting:
        if stopping():
            raise CannotStart("stopped before it was ready")
        for service in running.services:
            code = service.process.poll() if service.process else None
            if code is not None:
                raise CannotStart(
                    f"the {service.name} did not start: {_last_words(Path(service.log.name))}\n"
                    f"Its log is {service.log.name}"
                )
        if time.monotonic() > deadline:
            raise CannotStart(
                f"{' and '.join(waiting)} did not get ready in {_READY_SECONDS:.0f} s"
            )
        if "api" in waiting and _answers(f"{_own_url(running.settings)}/readyz"):
            waiting.remove("api")
        if "api" not in waiting and "worker" in waiting and _has_worker(running):
            waiting.remove("worker")
        time.sleep(0.05)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310  # our own address
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _has_worker(running: Platform) -> bool:
    pids = {s.process.pid for s in running.services if s.name == "worker" and s.process}

    async def ask() -> bool:
        connection = await db.connect(running.dsn, application="mediamill up")
        try:
            return bool(await installation.worker_pids(connection) & pids)
        finally:
            await connection.close()

    return asyncio.run(ask())


def _own_url(settings: Settings) -> str:
    """The API as this machine reaches it, whatever address clients use."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _stop(services: list[Service], seconds: float) -> None:
    """SIGTERM to all, the worker drains; then SIGKILL to what is still there."""
    living = [s for s in services if s.process is not None and s.process.poll() is None]
    for service in living:
        assert service.process is not None
        with suppress(ProcessLookupError):
            service.process.terminate()
    deadline = time.monotonic() + seconds
    for service in living:
        assert service.process is not None
        try:
            service.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            service.process.kill()
            service.process.wait()
    for service in services:
        service.log.close()


def stop_flag() -> Callable[[], bool]:
    """Whether SIGINT or SIGTERM has come."""
    came: list[int] = []

    def note(number: int, _frame: object) -> None:
        came.append(number)

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    return lambda: bool(came)


def _banner(running: Platform) -> None:
    settings = running.settings
    where = "MEDIAMILL_DATABASE_URL" if settings.database_url else "embedded PostgreSQL"
    print(
        f"mediamill {__version__}   ready in {running.timings['ready']:.1f} s\n"
        f"  Dashboard  {running.url}/ui\n"
        f"  API        {running.url}/v1      schema {running.url}/openapi.json\n"
        f"  API key    {running.api_key}\n"
        f"  Database   {where}\n"
        f"  Data       {settings.data_dir}\n"
        f"  Logs       {settings.logs_dir}\n"
        "  Ctrl-C stops everything; a second start keeps your data.",
        flush=True,
    )


def _say(text: str) -> None:
    print(f"mediamill: {text}", file=sys.stderr, flush=True)


def _last_words(log: Path) -> str:
    """The last error of a service's log, for a person."""
    with suppress(OSError):
        for line in reversed(log.read_text(errors="replace").splitlines()[-50:]):
            if line.startswith("Error: "):
                return line.removeprefix("Error: ")
            with suppress(ValueError):
                event = json.loads(line)
                if event.get("level") in ("error", "critical"):
                    return str(event.get("event"))
    return "see its log"


def _write_private(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        os.fchmod(fd, 0o600)
        file.write(text)

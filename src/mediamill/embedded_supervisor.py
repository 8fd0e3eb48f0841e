"""The process that owns an embedded PostgreSQL server: makes, starts, restarts and stops it.

There is one per folder, detached from whoever started it. It restarts a server that dies, and ends
when no process holds the users' lock. It runs as a program, by its file's name and with nothing but
the standard library.

    users.lock        shared by the users; the supervisor takes it alone in order to end
    supervisor.lock   held for the supervisor's life; names its process
    data/             the cluster (data.new/ while it is being made)
    socket/           the only way in; elsewhere if the folder's name is too long for a socket
    log/              postgres.log, written by the server and by the supervisor
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import locale
import os
import pwd
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

NAME: Final = "mediamill"  # of the role and of the database
PORT: Final = 5432  # of no network: it is part of the socket's file name
READY: Final = b"ready"
OR_URL: Final = "or set MEDIAMILL_DATABASE_URL to a PostgreSQL server of your own"
UP: Final = ("", "53300")  # answers of a server that works; the second has too many connections
_NO_DATABASE: Final = "3D000"

_TICK_SECONDS: Final = 0.25
_GRACE_SECONDS: Final = 1.5  # a platform that restarts within this time finds its server running
_STEADY_SECONDS: Final = 2.0  # a server that was ready for this long starts with a clean record
_MOST_DEATHS: Final = 6  # in a row, with 3 seconds of pauses between them
_STOP_SECONDS: Final = 60.0
_LOG_BYTES: Final = 16 * 2**20


class EmbeddedError(Exception):
    """The server cannot run here; the message says what a person can do about it."""


def _main(folder: Path, bin_dir: Path, lock: int) -> None:
    """The supervisor: becomes a process of its own and tells its starter how the server does."""
    if os.fork() != 0:  # the starter waits for the parent, and the child belongs to nobody
        return
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # a handler, as an ignored signal would be inherited
    os.umask(0o077)
    os.set_inheritable(lock, False)
    starter = _Starter()
    try:
        if os.geteuid() == 0:
            _drop_root(folder, bin_dir)
        elif not (folder / "data").exists():
            _need_a_name()
        _open_log(folder)
        try:
            _supervise(folder, bin_dir, lock, starter)
        except (EmbeddedError, OSError) as error:
            _log(str(error))
            raise
    except EmbeddedError as error:
        starter.tell(str(error).encode(errors="replace"))
    except OSError as error:
        starter.tell(cannot_use(folder, error).encode(errors="replace"))


def _supervise(folder: Path, bin_dir: Path, lock: int, starter: _Starter) -> None:
    """Runs the server, over and over, until it is no longer wanted."""
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    end = _End(folder)
    _check_version(folder, bin_dir)
    if not (folder / "data" / "PG_VERSION").exists():
        _create(folder, bin_dir)
    (folder / "data").chmod(0o700)  # a copy may have lost it, and the server insists
    deaths = 0
    while not end.has_come():
        ready_seconds = _live(folder, bin_dir, end, starter)
        if ready_seconds is None:
            return
        deaths = 1 if ready_seconds > _STEADY_SECONDS else deaths + 1
        if deaths == _MOST_DEATHS:
            raise EmbeddedError(
                f"PostgreSQL in {folder} ended {deaths} times in a row, the last time with: "
                f"{_log_tail(folder)}"
            )
        pause = 0.05 * 2**deaths
        _log(f"the server ended by itself; it is started again in {pause:g} s")
        time.sleep(pause)


class _Starter:
    """The process that waits for our word, at the other end of what is our standard output."""

    def __init__(self) -> None:
        self._pipe: int | None = os.dup(1)

    def tell(self, word: bytes) -> None:
        """Says one word, the first; the starter does not listen to more."""
        if self._pipe is not None:
            with contextlib.suppress(OSError):  # it may have been killed
                os.write(self._pipe, word + b"\0")
            os.close(self._pipe)
            self._pipe = None


def _log(text: str) -> None:
    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    with contextlib.suppress(OSError):
        os.write(2, f"{moment} [{os.getpid()}] supervisor: {text}\n".encode(errors="replace"))


def _open_log(folder: Path) -> None:
    (folder / "log").mkdir(mode=0o700, exist_ok=True)
    path = folder / "log" / "postgres.log"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    _shorten_log(folder)


def _shorten_log(folder: Path) -> None:
    """Keeps the last pages as postgres.log.1; the writers append, so they can go on meanwhile."""
    if os.fstat(2).st_size > _LOG_BYTES:
        path = folder / "log" / "postgres.log"
        with contextlib.suppress(OSError):  # a full disk is no reason to end
            shutil.copyfile(path, path.with_suffix(".log.1"))
        os.ftruncate(2, 0)


def _log_tail(folder: Path) -> str:
    with (folder / "log" / "postgres.log").open("rb") as log:
        log.seek(max(0, os.fstat(2).st_size - 2000))
        return " | ".join(log.read().decode(errors="replace").splitlines()[-6:])


class _End:
    """Knows when the server is no longer wanted."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "users.lock"
        self._lock = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        self._free_since: float | None = None
        self._told = False
        signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, *_: object) -> None:
        self._told = True

    def has_come(self) -> bool:
        """Told to end, the folder is gone, or no user for a while; then new users have to wait."""
        if self._told or not is_file(self._lock, self._path):
            return True
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._free_since = None
            return False
        now = time.monotonic()
        self._free_since = now if self._free_since is None else self._free_since
        if now - self._free_since >= _GRACE_SECONDS:
            return True  # and keeps the lock: whoever comes now is served by the next supervisor
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        return False

    def folder_is_replaced(self) -> bool:
        """Another folder has its name now, perhaps with another supervisor."""
        return self._path.exists() and not is_file(self._lock, self._path)


def _check_version(folder: Path, bin_dir: Path) -> None:
    program = bin_dir / "postgres"
    try:
        done = subprocess.run([program, "--version"], capture_output=True, check=False)
        said = (done.stdout + done.stderr).decode(errors="replace")
    except OSError as error:
        said = str(error)
    installed = said.partition("(PostgreSQL) ")[2].partition(".")[0]  # postgres (PostgreSQL) 18.6
    if not installed.isdigit():
        raise EmbeddedError(
            f"{program} does not run on this machine ({said.strip()}): the wheel needs macOS or "
            f"Linux with glibc 2.28 or newer. Choose another machine, {OR_URL}."
        )
    if int(installed) < 17:
        raise EmbeddedError(f"{program} is PostgreSQL {installed}; 17 or newer is needed.")
    data = folder / "data"
    if not data.exists() or not os.listdir(data):
        return
    try:
        made_by = (data / "PG_VERSION").read_text("utf-8").strip()
    except FileNotFoundError:
        raise EmbeddedError(f"{data} holds something that is not a PostgreSQL cluster.") from None
    if made_by != installed:
        raise EmbeddedError(
            f"{data} was made by PostgreSQL {made_by} and the server installed here is {installed}."
            f" Install {made_by} again, or dump the data with it and load them into a new folder."
        )


def _create(folder: Path, bin_dir: Path) -> None:
    """Makes the cluster beside its place, so that an interrupted attempt is never taken for one."""
    new = folder / "data.new"
    for _ in range(100):  # the children of a killed initdb take a moment to end
        shutil.rmtree(new, ignore_errors=True)
        if not new.exists():
            break
        time.sleep(0.05)
    command = [str(bin_dir / "initdb"), "-D", str(new), "-U", NAME]
    command += ["--encoding=UTF8", "--data-checksums"]
    command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8", f"--locale={_locale()}"]
    command += ["--auth-local=trust", "--auth-host=reject", "--no-instructions"]
    command += ["-c", "huge_pages=off"]  # where they are half configured, initdb dies of SIGBUS
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        preexec_fn=_die_with_parent(signal.SIGKILL),
    )
    os.write(2, done.stdout)
    if done.returncode != 0:
        raise EmbeddedError(
            f"PostgreSQL could not create its files in {folder}: {_log_tail(folder)}"
        )
    os.rename(new, folder / "data")
    # Rows that are acknowledged later must not be lost with the new name.
    place = os.open(folder, os.O_RDONLY)
    os.fsync(place)
    os.close(place)


def _locale() -> str:
    """For what PostgreSQL leaves to the C library; collations and case are its own C.UTF-8."""
    try:
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    except locale.Error:
        return "C"
    return "C.UTF-8"


def _live(folder: Path, bin_dir: Path, end: _End, starter: _Starter) -> float | None:
    """Runs the server; None if we stopped it, or for how long it was ready before it died."""
    directory = _private_dir(socket_dir(folder))
    told = _end_leftovers(folder / "data", directory)
    server = subprocess.Popen(
        [bin_dir / "postgres", *_options(folder / "data", directory)],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **told},
        preexec_fn=_die_with_parent(signal.SIGINT),  # noqa: PLW1509 - there is one thread
    )
    ready_at: float | None = None
    try:
        while server.poll() is None:
            if end.has_come():
                return None
            if ready_at is None and _is_ready(folder, directory):
                ready_at = time.monotonic()
                starter.tell(READY)
            _shorten_log(folder)
            time.sleep(0.02 if ready_at is None else _TICK_SECONDS)
        return 0.0 if ready_at is None else time.monotonic() - ready_at
    finally:
        if server.poll() is None:
            if end.folder_is_replaced():
                server.kill()  # one that ends in order would remove the new server's socket
                server.wait()
            else:
                _stop(server)
                shutil.rmtree(directory, ignore_errors=True)


def _private_dir(path: Path) -> Path:
    """Makes a folder that only we can enter; one that a stranger made may be a trap."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise EmbeddedError(f"{path} is in the way: remove it, or use a folder with a short name.")
    path.chmod(0o700)
    return path


def _options(data: Path, directory: Path) -> list[str]:
    quoted = str(directory).replace('"', '""')
    settings = {
        "listen_addresses": "",
        "port": PORT,
        "unix_socket_directories": f'"{quoted}"',
        "unix_socket_permissions": "0700",
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "max_connections": 200,
        "shared_buffers": "128MB",
        "huge_pages": "off",
        # Nobody replicates from here. A backup is a pg_dump or a copy of the stopped folder.
        "wal_level": "minimal",
        "max_wal_senders": 0,
        "random_page_cost": 1.1,
        # Statements here are short; and workers need more /dev/shm than containers have.
        "max_parallel_workers_per_gather": 0,
        "timezone": "UTC",
        "log_timezone": "UTC",
        "logging_collector": "off",
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    return ["-D", str(data), *options]


def _is_ready(folder: Path, directory: Path) -> bool:
    if is_starting(folder):
        return False
    answer = ask(directory, NAME)
    if answer == _NO_DATABASE:
        ask(directory, "postgres", f"CREATE DATABASE {NAME}")
        answer = ask(directory, NAME)
    return answer in UP


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Fast shutdown: breaks off what runs, saves what is committed; force only after a minute."""
    for number, seconds in ((signal.SIGINT, _STOP_SECONDS), (signal.SIGQUIT, 10.0)):
        server.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(seconds)
            return
    server.kill()
    server.wait()


def _end_leftovers(data: Path, directory: Path) -> dict[str, str]:
    """Ends what outlived a killed supervisor or server; returns what the next server must be told.

    A `postmaster.pid` may also name a zombie, or after a restart of a container a stranger, and
    PostgreSQL would refuse to start. We hold the supervisor's lock and have looked, so we tell the
    server to take that process for its own grandparent. The file stays, because with it the server
    still checks that no old process holds the shared memory.
    """
    try:
        named = int((data / "postmaster.pid").read_text("utf-8").split()[0])
    except (FileNotFoundError, IndexError, ValueError):
        named = 0
    began = time.monotonic()
    while found := _leftovers(data, directory, named):
        waited = time.monotonic() - began
        if named in found:  # it ends its children
            found = [named]
            number = signal.SIGINT if waited < _STOP_SECONDS else signal.SIGQUIT
        else:
            number = signal.SIGQUIT if waited < 5.0 else signal.SIGKILL
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.05)
    for name in (f".s.PGSQL.{PORT}", f".s.PGSQL.{PORT}.lock"):
        (directory / name).unlink(missing_ok=True)
    return {"PG_GRANDPARENT_PID": str(named)} if named > 1 else {}


def _leftovers(data: Path, directory: Path, named: int) -> list[int]:
    """The server processes that work on `data`; elsewhere than on Linux, at most the named one."""
    if sys.platform != "linux":
        return [named] if named > 1 and ask(directory, NAME) is not None else []
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # gone, a zombie, or somebody else's
            program = os.readlink(f"/proc/{entry}/exe").removesuffix(" (deleted)")
            if program.endswith("/postgres") and os.path.samefile(f"/proc/{entry}/cwd", data):
                found.append(int(entry))
    return found


# What both sides know: where the socket is, and how to ask the server.


def socket_dir(folder: Path) -> Path:
    """In the folder, or in a short one of its own when clients could not take that name."""
    inside = folder / "socket"
    too_long = len(os.fsencode(inside / f".s.PGSQL.{PORT}")) > 103  # 103 on macOS, 107 on Linux
    if not too_long and "," not in str(inside):  # clients read a comma as a list of hosts
        return inside
    # Not $TMPDIR, which may differ between the users of one folder.
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return Path("/tmp") / f"mediamill-{digest}"  # noqa: S108 - its owner is checked on both sides


def is_starting(folder: Path) -> bool:
    """What the server says in its pid file; asking it too early would only fill its log."""
    try:
        lines = (folder / "data" / "postmaster.pid").read_bytes().splitlines()
    except FileNotFoundError:
        return True
    return len(lines) < 8 or lines[7].strip() != b"ready"


def ask(
    directory: Path, database: str, statement: str = "", *, timeout_seconds: float = 10.0
) -> str | None:
    """The server's answer: "" for yes, an SQLSTATE for no, None if nobody answers."""
    names = f"user\0{NAME}\0database\0{database}\0\0".encode()
    hello = struct.pack("!II", len(names) + 8, 3 << 16) + names
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as talk:
        talk.settimeout(timeout_seconds)
        try:
            talk.connect(str(directory / f".s.PGSQL.{PORT}"))
            stream = talk.makefile("rb")
            talk.sendall(hello)
            answer = _answer(stream)
            if answer == "" and statement:
                text = statement.encode() + b"\0"
                talk.sendall(b"Q" + struct.pack("!I", len(text) + 4) + text)
                answer = _answer(stream)
        except OSError:
            return None
        with contextlib.suppress(OSError):  # after a refusal the server has hung up already
            talk.sendall(b"X" + struct.pack("!I", 4))
    return answer


def _answer(stream: BinaryIO) -> str | None:
    while len(head := stream.read(5)) == 5:
        body = stream.read(int.from_bytes(head[1:], "big") - 4)
        match head[:1]:
            case b"Z":
                return ""
            case b"E":
                fields = body.split(b"\0")
                return next((field[1:].decode() for field in fields if field[:1] == b"C"), None)
    return None


def is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def cannot_use(folder: Path, error: OSError) -> str:
    return (
        f"Cannot use {folder} for PostgreSQL ({error}): choose a folder on a local disk that this "
        f"user may write to and that no other user made, {OR_URL}."
    )


# Linux: children that end with us, and a user who is not root but can reach what root installed.

_CLONE_NEWUSER: Final = 0x10000000
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_KEEPCAPS: Final = 8
_PR_SET_SECUREBITS: Final = 28
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_RAISE: Final = 2
_SECBIT_NO_SETUID_FIXUP: Final = 1 << 2
_CAP_DAC_OVERRIDE: Final = 1 << 1
_CAP_DAC_READ_SEARCH: Final = 1 << 2
_CAP_SETPCAP: Final = 1 << 8


def _drop_root(folder: Path, bin_dir: Path) -> None:
    """Becomes the folder's owner, with one capability more if that user cannot reach the files.

    PostgreSQL refuses to run as root, and only as root. Below a folder such as /root its user gets
    the right to pass and to read what it does not own (or, if even that is too little, to ignore
    file permissions): less than root had, and no folder is opened to other users.
    """
    owner = folder.stat()
    linux = sys.platform == "linux"
    try:
        if owner.st_uid == 0:
            _be_called_nobody()
            return
        had = _capabilities() if linux else 0
        if linux:
            _prctl(_PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setgid(owner.st_gid)
        os.setuid(owner.st_uid)
    except (OSError, KeyError, AttributeError) as error:
        raise EmbeddedError(
            "PostgreSQL does not run as root, and here root cannot become another user "
            f"({error}): start Mediamill as an ordinary user, {OR_URL}."
        ) from error
    if _reaches(folder, bin_dir):
        if linux:
            _set_capabilities(0, 0, 0)
        return
    for one in (_CAP_DAC_READ_SEARCH, _CAP_DAC_OVERRIDE) if linux else ():
        with contextlib.suppress(OSError):  # a container may not have it
            _set_capabilities(one | _CAP_SETPCAP, had, one)
            _prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP)  # access(2) heeds it only then
            _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, one.bit_length() - 1)  # over execve
            _set_capabilities(one, had, one)
            if _reaches(folder, bin_dir):
                _set_capabilities(one, one, one)
                return
    raise EmbeddedError(
        f"User {owner.st_uid}, who runs PostgreSQL for root, cannot reach {folder} or {bin_dir}: "
        "move them to where every user may pass, start Mediamill as an ordinary user, "
        f"{OR_URL}."
    )


def _need_a_name() -> None:
    """A container may run as a user that its /etc/passwd does not know, and initdb looks there."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        try:
            _be_called_nobody()
        except (OSError, KeyError, AttributeError) as error:
            raise EmbeddedError(
                f"User {os.geteuid()} has no name, and PostgreSQL's initdb insists on one: add a "
                f"line to /etc/passwd for the first start, {OR_URL}."
            ) from error


def _be_called_nobody() -> None:
    """Changes the number, and keeps the rights: in a user namespace of its own, on Linux.

    For users without a name, and for a root that may not give files away, as in a sandbox.
    """
    uid, gid, nobody = os.geteuid(), os.getegid(), pwd.getpwnam("nobody")
    _check(_libc().unshare(_CLONE_NEWUSER), "unshare")
    Path("/proc/self/setgroups").write_text("deny", "utf-8")
    Path("/proc/self/uid_map").write_text(f"{nobody.pw_uid} {uid} 1", "utf-8")
    Path("/proc/self/gid_map").write_text(f"{nobody.pw_gid} {gid} 1", "utf-8")


def _reaches(folder: Path, bin_dir: Path) -> bool:
    programs = (bin_dir / "postgres", bin_dir / "initdb")
    return os.access(folder, os.R_OK | os.W_OK | os.X_OK) and all(
        os.access(program, os.R_OK | os.X_OK) for program in programs
    )


def _capabilities() -> int:
    for line in Path("/proc/self/status").read_text("utf-8").splitlines():
        if line.startswith("CapPrm:"):
            return int(line.split()[1], 16)
    return 0


def _set_capabilities(effective: int, permitted: int, inheritable: int) -> None:
    sets = (effective, permitted, inheritable)
    halves = [part & 0xFFFFFFFF for part in sets] + [part >> 32 for part in sets]
    header = struct.pack("=Ii", 0x20080522, 0)  # version 3; this process
    _check(_libc().capset(header, struct.pack("=6I", *halves)), "capset")


def _prctl(option: int, *arguments: int) -> None:
    values = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    _check(_libc().prctl(option, *values), "prctl")


def _die_with_parent(number: signal.Signals) -> Callable[[], None]:
    """What a child does before exec: the kernel sends it the signal when this process is gone."""
    parent = os.getpid()
    libc = _libc()

    def between_fork_and_exec() -> None:
        if sys.platform == "linux":
            libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number))
            if os.getppid() != parent:
                os._exit(1)

    return between_fork_and_exec


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))

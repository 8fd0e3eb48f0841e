"""Real tools in real jails: how they run, how they are stopped, and what their ends mean."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mediamill import jail as launcher
from mediamill import sandbox, tools
from mediamill.failures import Code, Failure
from mediamill.sandbox import Jail, Level, Limits, Sandbox
from mediamill.tools import Command, Finished, ProcessGroups, StopReason, Toolbox

linux = pytest.mark.skipif(sys.platform != "linux", reason="the layers are Linux's")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def toolbox() -> Toolbox:
    return tools.resolve()


@pytest.fixture(scope="module")
def strong() -> Sandbox:
    return sandbox.detect()


@pytest.fixture(params=["strong", "portable"])
def either(request: pytest.FixtureRequest) -> Sandbox:
    return sandbox.portable() if request.param == "portable" else sandbox.detect()


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Neither one that runs nor one that nobody reaped."""
    before = children()
    yield
    assert children() <= before


def children() -> set[str]:
    found: set[str] = set()
    for listed in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that ended meanwhile
            found.update(listed.read_text().split())
    return found


class Bench:
    """Runs tools with generous limits, in a scratch of its own."""

    def __init__(self, toolbox: Toolbox, where: Sandbox, folder: Path) -> None:
        self.toolbox, self.where, self.folder = toolbox, where, folder
        folder.mkdir()

    def jail(self, **limits: Any) -> Jail:
        return Jail(
            Limits(
                **{
                    "memory_bytes": 2 << 30,
                    "cpu_seconds": 40,
                    "file_bytes": 256 << 20,
                    "wall_seconds": 50.0,
                    **limits,
                }
            ),
            read=self.read,
            write=(self.folder,),
        )

    read: tuple[Path, ...] = ()

    async def python(self, code: str, *arguments: str, **options: Any) -> Finished:
        limits = options.pop("limits", {})
        command = Command("python", ("-I", "-c", code, *arguments), **options.pop("command", {}))
        return await self(command, limits, **options)

    async def ffmpeg(self, *arguments: str, **options: Any) -> Finished:
        limits, given = options.pop("limits", {}), options.pop("command", {})
        fixed = ("-hide_banner", "-nostdin", "-v", "error")
        return await self(Command("ffmpeg", (*fixed, *arguments), **given), limits, **options)

    async def ffprobe(self, *arguments: str, stdin: Path) -> Finished:
        return await self(Command("ffprobe", ("-v", "error", *arguments), stdin=stdin), {})

    async def __call__(self, command: Command, limits: dict[str, Any], **options: Any) -> Finished:
        where = options.pop("where", self.where)
        return await tools.run(
            command, jail=self.jail(**limits), toolbox=self.toolbox, sandbox=where, **options
        )


@pytest.fixture
def bench(toolbox: Toolbox, strong: Sandbox, tmp_path: Path) -> Bench:
    return Bench(toolbox, strong, tmp_path / "scratch")


def clip(toolbox: Toolbox, path: Path, *arguments: str) -> Path:
    """A second of test picture and tone, made without a jail."""
    sources = ["-f", "lavfi", "-i", "testsrc=d=1:s=160x120:r=25", "-f", "lavfi", "-i", "sine=d=1"]
    subprocess.run(
        [toolbox.ffmpeg, "-v", "error", "-nostdin", *sources, *arguments, path], check=True
    )
    return path


def picture(toolbox: Toolbox, path: Path) -> None:
    source = ["-f", "lavfi", "-i", "testsrc2=s=640x480", "-frames:v", "1"]
    subprocess.run([toolbox.ffmpeg, "-v", "error", "-nostdin", *source, path], check=True)


async def wait_for(condition: Callable[[], object]) -> None:
    """Wait, with patience for a loaded machine."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# ---------------------------------------------------------------- tools at work


@pytest.mark.anyio
async def test_ffmpeg_encodes_and_ffprobe_reads_in_the_jail(bench: Bench) -> None:
    made = await bench.ffmpeg(
        *["-f", "lavfi", "-i", "testsrc=d=1:s=320x240:r=25", "-f", "lavfi", "-i", "sine=d=1"],
        *["-c:v", "libx264", "-preset", "ultrafast", "-c:a", "aac"],
        *["-movflags", "+faststart", "out.mp4"],
    )
    assert (made.returncode, made.stderr_tail, made.stopped_for) == (0, "", None)
    out = bench.folder / "out.mp4"
    head = out.read_bytes()[:4096]
    assert 0 < head.find(b"moov") < head.find(b"mdat", 0) or b"mdat" not in head
    assert out.stat().st_mode & 0o777 == 0o600
    seen = await bench.ffprobe("-i", "fd:", "-of", "compact", "-show_streams", stdin=out)
    assert b"codec_name=h264" in seen.stdout
    assert b"nb_frames=25" in seen.stdout
    assert 0 < seen.cpu_seconds < 20
    assert 1 << 20 < seen.max_rss_bytes < 1 << 30


@pytest.mark.anyio
async def test_a_file_with_its_index_at_the_end_is_read_by_descriptor(
    bench: Bench, tmp_path: Path
) -> None:
    """`fd:` seeks; `pipe:` could not. The tool sees no path at all."""
    source = clip(bench.toolbox, tmp_path / "in.mp4")
    ended = await bench.ffmpeg(
        *["-protocol_whitelist", "fd", "-i", "fd:"],
        *["-vf", "scale=80:60", "-frames:v", "1", "poster.png"],
        command={"stdin": source},
    )
    assert ended.returncode == 0, ended.stderr_tail
    assert (bench.folder / "poster.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.anyio
async def test_vips_makes_thumbnails_in_the_jail(bench: Bench, tmp_path: Path) -> None:
    if importlib.util.find_spec("pyvips") is None:
        pytest.skip("the wheels are not installed")
    picture(bench.toolbox, tmp_path / "in.png")
    bench.read = (tmp_path / "in.png",)
    code = """
import sys, pyvips
image = pyvips.Image.thumbnail(sys.argv[1], 160, fail_on="error").copy_memory()
for name in ("t.jpg", "t.webp", "t.avif"):
    image.write_to_file(name, keep="none")
import mediamill.failures
"""
    ended = await bench.python(
        code,
        str(tmp_path / "in.png"),
        limits={"memory_bytes": 400 << 20},
        command={"env": {"VIPS_CONCURRENCY": "1", "VIPS_BLOCK_UNTRUSTED": "1"}},
    )
    assert ended.returncode == 0, ended.stderr_tail
    kinds = {path.suffix: path.read_bytes()[:12] for path in bench.folder.iterdir()}
    assert kinds[".jpg"].startswith(b"\xff\xd8")
    assert kinds[".webp"].startswith(b"RIFF")
    assert kinds[".avif"][4:] == b"ftypavif"


@pytest.mark.anyio
async def test_capabilities_are_what_the_tools_say(toolbox: Toolbox, strong: Sandbox) -> None:
    found = await tools.capabilities(toolbox, strong)
    assert re.match(r"n?\d+\.", found.ffmpeg_version)
    assert re.match(r"n?\d+\.", found.ffprobe_version)
    found.require(
        encoders=["libx264", "aac"], decoders=["h264"], filters=["scale"], protocols=["fd", "pipe"]
    )
    with pytest.raises(Failure) as caught:
        found.require(encoders=["aac", "nosuch"], filters=["nothere"])
    assert caught.value.code is Code.CAPABILITY_MISSING
    assert caught.value.problem.detail == (
        "The installed ffmpeg has no encoder nosuch, no filter nothere."
    )


@pytest.mark.anyio
async def test_a_wrapper_script_is_no_tool(
    toolbox: Toolbox, strong: Sandbox, tmp_path: Path
) -> None:
    wrapper = tmp_path / "ffmpeg"
    wrapper.write_text(f"#!/bin/sh\nexec {toolbox.ffmpeg} $*\n")
    wrapper.chmod(0o755)
    if strong.level is Level.LIMITS:
        pytest.skip("plain limits start anything")
    wrapped = Toolbox(ffmpeg=wrapper, ffprobe=toolbox.ffprobe, python=toolbox.python)
    with pytest.raises(Failure) as caught:
        await tools.capabilities(wrapped, strong)
    assert caught.value.code is Code.CAPABILITY_MISSING


def test_a_setting_comes_before_the_wheel_and_the_wheel_before_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("set", "path"):
        (tmp_path / folder).mkdir()
        for name in ("ffmpeg", "ffprobe"):
            (tmp_path / folder / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    bundled = tools.resolve()
    chosen = tools.resolve(ffmpeg=str(tmp_path / "set" / "ffmpeg"), ffprobe="ffprobe")
    assert chosen.ffmpeg == tmp_path / "set" / "ffmpeg"
    assert chosen.ffprobe == tmp_path / "path" / "ffprobe"
    assert tmp_path not in bundled.ffmpeg.parents
    monkeypatch.setattr(tools, "_package", lambda _: [])
    assert tools.resolve().ffmpeg == tmp_path / "path" / "ffmpeg"
    monkeypatch.setenv("PATH", str(tmp_path))
    for wanted in ({}, {"ffmpeg": str(tmp_path / "nowhere")}):
        with pytest.raises(Failure) as caught:
            tools.resolve(**wanted)
        assert caught.value.code is Code.CAPABILITY_MISSING
        assert str(tmp_path) not in str(caught.value)


# ---------------------------------------------------------------- hostile media


@pytest.mark.anyio
@linux
async def test_a_playlist_reaches_no_neighbor_even_without_a_whitelist(
    bench: Bench, tmp_path: Path
) -> None:
    """The flags of every ffmpeg call forbid it too; here the jail stands alone."""
    if bench.where.level is Level.LIMITS:
        pytest.skip("plain limits hide nothing")
    neighbor = clip(bench.toolbox, tmp_path / "neighbor.ts")
    attacks = {
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{neighbor}\n#EXT-X-ENDLIST\n",
        "concat": f"ffconcat version 1.0\nfile {neighbor}\n",
    }
    for kind, text in attacks.items():
        hostile = tmp_path / f"upload-{kind}.m3u8"
        hostile.write_text(text)
        options = ("-safe", "0") if kind == "concat" else ()
        bench.read = (hostile,)
        arguments = ("-f", kind, *options, "-i", str(hostile), "-c", "copy", "-f", "mpegts", "out")
        ended = await bench.ffmpeg(*arguments)
        assert ended.returncode != 0
        assert not (bench.folder / "out").exists()
        bench.read = (hostile, neighbor)
        allowed = await bench.ffmpeg(*arguments)
        assert allowed.returncode == 0, "the attack would work if the neighbor could be read"
        (bench.folder / "out").unlink()


@pytest.mark.anyio
async def test_the_environment_is_the_commands_and_nothing_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    ended = await bench.python(
        "import os; os.environ.pop('LC_CTYPE', 0); print(dict(os.environ))",
        command={"env": {"VIPS_CONCURRENCY": "1"}},
    )
    assert ended.stdout == b"{'VIPS_CONCURRENCY': '1'}\n"


# ---------------------------------------------------------------- limits and stops


@pytest.mark.anyio
async def test_a_tool_that_hangs_is_killed_at_its_wall_clock(bench: Bench, either: Sandbox) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    ended = await bench.python(code, limits={"wall_seconds": 0.5}, where=either)
    assert (ended.returncode, ended.stopped_for) == (-signal.SIGKILL, StopReason.TIME)
    assert 0.5 <= ended.wall_seconds < 20


@pytest.mark.anyio
async def test_the_wall_clock_holds_while_the_loop_is_busy(bench: Bench) -> None:
    running = asyncio.create_task(bench.python("input()", limits={"wall_seconds": 0.3}))
    # Without a standard input it ends by itself at once, so give it something to wait for.
    waiting = asyncio.create_task(
        bench.python("import time; time.sleep(60)", limits={"wall_seconds": 0.3})
    )
    await asyncio.sleep(0.05)
    time.sleep(1.5)  # noqa: ASYNC251
    ended = await waiting
    assert ended.stopped_for is StopReason.TIME
    assert ended.wall_seconds < 1.4
    await running


@pytest.mark.anyio
async def test_processor_time_ends_even_a_tool_that_catches_the_signal(bench: Bench) -> None:
    ended = await bench.ffmpeg(
        *["-f", "lavfi", "-i", "testsrc2=s=1280x720:d=3600", "-f", "null", "-"],
        limits={"cpu_seconds": 1},
    )
    failure = tools.classify(ended, tool="ffmpeg", limits=bench.jail(cpu_seconds=1).limits)
    assert failure is not None
    assert failure.code is Code.TIME_LIMIT


@pytest.mark.anyio
async def test_too_much_memory_is_a_memory_limit(bench: Bench) -> None:
    for tool, ended in (
        ("python", await bench.python("x = b'x' * (1 << 30)", limits={"memory_bytes": 200 << 20})),
        (
            "ffmpeg",
            await bench.ffmpeg(
                *["-f", "lavfi", "-i", "testsrc2=s=1920x1080:d=9", "-c:v", "libx264", "x.mp4"],
                limits={"memory_bytes": 150 << 20},
            ),
        ),
    ):
        limits = bench.jail(memory_bytes=150 << 20).limits
        failure = tools.classify(ended, tool=tool, limits=limits)  # type: ignore[arg-type]
        assert failure is not None
        assert failure.code is Code.MEMORY_LIMIT, ended


@pytest.mark.anyio
@linux
async def test_memory_that_the_kernel_does_not_count_is_counted(bench: Bench) -> None:
    """Without the filter of system calls, shared memory passes by RLIMIT_DATA."""
    code = (
        "import mmap, time\n"
        "shared = mmap.mmap(-1, 200 << 20)\n"
        "for _ in range(200): shared.write(bytes(1 << 20))\n"
        "time.sleep(60)"
    )
    limits = {"memory_bytes": 100 << 20, "wall_seconds": 30}
    ended = await bench.python(code, limits=limits, where=Sandbox(Level.LIMITS, ""))
    assert ended.stopped_for is StopReason.MEMORY


@pytest.mark.anyio
@linux
async def test_a_thread_bomb_is_stopped(bench: Bench) -> None:
    code = (
        "import threading, time\n"
        "threading.stack_size(65536)\n"
        "while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    ended = await bench.python(code, limits={"threads": 100, "wall_seconds": 30})
    assert ended.stopped_for is StopReason.THREADS
    told(ended, "resource_limit", "threads", 100, "threads")


@pytest.mark.anyio
@linux
async def test_a_fork_bomb_is_stopped_with_all_of_it(bench: Bench) -> None:
    """Where no filter of system calls forbids the first fork."""
    code = (
        "import os, time\n"
        "for _ in range(300):\n"
        "    if os.fork() == 0: time.sleep(60)\n"
        "time.sleep(60)"
    )
    limits = {"processes": 20, "wall_seconds": 30}
    ended = await bench.python(code, limits=limits, where=Sandbox(Level.LIMITS, ""))
    assert ended.stopped_for is StopReason.PROCESSES
    told(ended, "resource_limit", "processes", 20, "processes")


def told(ended: Finished, code: str, name: str, allowed: float, unit: str) -> None:
    """The failure says which limit it was, what was allowed, and that more was seen."""
    failure = tools.classify(ended, tool="python", limits=LIMITS)
    assert failure is not None
    assert failure.code.code == code
    limit = failure.problem.limit
    assert limit is not None
    assert (limit["name"], limit["allowed"], limit["unit"]) == (name, allowed, unit)
    assert limit["seen"] >= allowed


@pytest.mark.anyio
async def test_every_limit_tells_what_was_allowed_and_seen(bench: Bench) -> None:
    sleep = "import time; time.sleep(60)"
    told(await bench.python(sleep, limits={"wall_seconds": 0.5}), "time_limit", "time", 0.5, "s")
    chatter = "import sys\nwhile True: sys.stdout.write('x' * 4096)"
    printed = await bench.python(chatter, output_bytes=1 << 16)
    told(printed, "output_limit", "printed", 1 << 16, "bytes")
    hoard = "x = [bytearray(1 << 20) for _ in range(400)]; import time; time.sleep(60)"
    ended = await bench.python(hoard, limits={"memory_bytes": 100 << 20, "wall_seconds": 30})
    failure = tools.classify(ended, tool="python", limits=bench.jail(memory_bytes=100 << 20).limits)
    assert failure is not None
    assert failure.problem.limit is not None
    assert failure.problem.limit["allowed"] == 100 << 20


@pytest.mark.anyio
async def test_a_file_that_grows_too_large_is_an_output_limit(bench: Bench) -> None:
    ended = await bench.ffmpeg(
        *["-f", "lavfi", "-i", "testsrc2=s=640x480:d=60", "-c:v", "rawvideo", "x.avi"],
        limits={"file_bytes": 1 << 20},
    )
    failure = tools.classify(ended, tool="ffmpeg", limits=bench.jail().limits)
    assert failure is not None
    assert failure.code is Code.OUTPUT_LIMIT
    assert failure.problem.limit is not None
    assert failure.problem.limit["allowed"] == bench.jail().limits.file_bytes
    assert (bench.folder / "x.avi").stat().st_size <= 1 << 20


@pytest.mark.anyio
async def test_many_files_together_have_a_limit(bench: Bench) -> None:
    code = (
        "import time\nfor n in range(40): open(str(n), 'wb').write(bytes(100_000))\ntime.sleep(60)"
    )
    for limits in ({"scratch_bytes": 1 << 20}, {"scratch_files": 20}):
        ended = await bench.python(code, limits=limits)
        assert ended.stopped_for is StopReason.SCRATCH
        ((name, most),) = limits.items()
        told(ended, "output_limit", "output", most, name.removeprefix("scratch_"))


@pytest.mark.anyio
async def test_captured_output_has_a_cap(bench: Bench) -> None:
    code = "import os\nwhile True: os.write(1, bytes(65536))"
    ended = await bench.python(code, output_bytes=100_000)
    assert ended.stopped_for is StopReason.OUTPUT
    assert len(ended.stdout) == 100_000


@pytest.mark.anyio
async def test_output_below_the_cap_arrives_whole(bench: Bench) -> None:
    code = "import sys; sys.stdout.write('x' * 3_000_000); sys.stdout.flush(); print('end')"
    ended = await bench.python(code)
    assert (ended.returncode, len(ended.stdout), ended.stdout[-4:]) == (0, 3_000_004, b"end\n")


@pytest.mark.anyio
async def test_a_flood_on_stderr_blocks_nothing_and_keeps_both_ends(bench: Bench) -> None:
    code = (
        "import sys\n"
        "sys.stderr.write('the cause\\n')\n"
        "for n in range(300): sys.stderr.write('x' * 9_999 + '\\n')\n"
        "sys.stderr.write('the end\\n'); print('done')"
    )
    ended = await bench.python(code)
    assert (ended.returncode, ended.stdout) == (0, b"done\n")
    assert ended.stderr_head.startswith("the cause\n")
    assert ended.stderr_tail.endswith("the end\n")
    assert len(ended.stderr_head) == 4096
    assert len(ended.stderr_tail) == 65536


@pytest.mark.anyio
async def test_lines_arrive_while_the_tool_runs(bench: Bench) -> None:
    lines: list[str] = []
    ended = await bench.ffmpeg(
        *["-progress", "pipe:1", "-nostats", "-stats_period", "0.05"],
        *["-f", "lavfi", "-i", "testsrc2=s=640x480:d=4"],
        *["-c:v", "libx264", "-preset", "ultrafast", "x.mp4"],
        on_line=lines.append,
    )
    assert (ended.returncode, ended.stdout) == (0, b"")
    assert lines[-1] == "progress=end"
    assert sum(line.startswith("out_time_us=") for line in lines) >= 1


@pytest.mark.anyio
async def test_every_line_arrives_once_and_in_order(bench: Bench) -> None:
    lines: list[str] = []
    code = "for n in range(100_000): print(n)\nprint('no newline at the end', end='')"
    ended = await bench.python(code, on_line=lines.append)
    assert ended.returncode == 0
    assert lines == [*map(str, range(100_000)), "no newline at the end"]


@pytest.mark.anyio
async def test_a_line_without_an_end_is_not_kept(bench: Bench) -> None:
    code = "import os\nwhile True: os.write(1, b'x' * 65536)"
    ended = await bench.python(code, on_line=lambda line: None)
    assert ended.stopped_for is StopReason.OUTPUT


@pytest.mark.anyio
async def test_an_error_of_the_listener_ends_the_run(bench: Bench) -> None:
    def listen(line: str) -> None:
        raise ValueError(line)

    code = "import time; print('first', flush=True); time.sleep(60)"
    with pytest.raises(ValueError, match="first"):
        await bench.python(code, on_line=listen)


@pytest.mark.anyio
async def test_a_tool_without_progress_is_stalled(bench: Bench) -> None:
    """Lines alone are no progress if the listener says so."""
    code = "import time\nfor _ in range(600): print('frame=7', flush=True); time.sleep(0.1)"
    ended = await bench.python(code, on_line=lambda line: False, stall_seconds=0.8)
    assert ended.stopped_for is StopReason.STALLED
    silent = await bench.python("import time; time.sleep(60)", stall_seconds=0.5)
    assert silent.stopped_for is StopReason.STALLED
    told(silent, "time_limit", "time without progress", 0.5, "s")


@pytest.mark.anyio
async def test_a_tool_that_moves_is_not_stalled(bench: Bench) -> None:
    code = "import time\nfor n in range(30): print(n, flush=True); time.sleep(0.1)"
    ended = await bench.python(code, on_line=lambda line: None, stall_seconds=2.5)
    assert (ended.returncode, ended.stopped_for) == (0, None)


# ---------------------------------------------------------------- cancellation and other threads


@pytest.mark.anyio
async def test_a_canceled_run_leaves_no_process(bench: Bench, either: Sandbox) -> None:
    pids: list[int] = []
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    running = asyncio.create_task(
        bench.python(code, on_line=lambda line: pids.append(int(line)), where=either)
    )
    await wait_for(lambda: pids)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    # The leader is reaped by now. Below a launcher, the tool is reaped by init, in its own time.
    await wait_for(lambda: gone(pids[0]))


@pytest.mark.anyio
async def test_a_run_canceled_before_it_began_starts_nothing(bench: Bench) -> None:
    code = "open('started', 'w')"
    for pause in (0, 0.001):
        running = asyncio.create_task(bench.python(code + "\nimport time; time.sleep(60)"))
        await asyncio.sleep(pause)
        running.cancel()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


@pytest.mark.anyio
async def test_a_timeout_around_a_run_works_as_usual(bench: Bench) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await bench.python("import time; time.sleep(60)")


@pytest.mark.anyio
async def test_another_thread_kills_one_owners_tools(bench: Bench) -> None:
    groups = ProcessGroups()
    mine, other = (
        asyncio.create_task(
            bench.python("import time; time.sleep(60)", registry=groups, owner=owner)
        )
        for owner in ("mine", "other")
    )
    await wait_for(lambda: groups.running() == 2)
    # The loop does not run meanwhile: the lease thread depends on nobody.
    killer = threading.Thread(target=groups.kill, args=("mine",))
    killer.start()
    killer.join()
    ended = await mine
    assert (ended.returncode, ended.stopped_for) == (-signal.SIGKILL, StopReason.CANCELED)
    assert groups.running("other") == 1
    assert groups.kill_all() == 1
    assert (await other).stopped_for is StopReason.CANCELED
    assert groups.running() == 0


@pytest.mark.anyio
async def test_a_killed_owner_starts_nothing_more(bench: Bench) -> None:
    groups = ProcessGroups()
    assert groups.kill("mine") == 0
    ended = await bench.python("open('started', 'w')", registry=groups, owner="mine")
    assert ended.stopped_for is StopReason.CANCELED
    assert list(bench.folder.iterdir()) == []
    groups.forget("mine")
    ended = await bench.python("open('started', 'w')", registry=groups, owner="mine")
    assert (ended.returncode, ended.stopped_for) == (0, None)


@pytest.mark.anyio
async def test_many_runs_at_once_end_each_in_its_own_way(bench: Bench) -> None:
    ends = await asyncio.gather(
        *(bench.python(f"print({n}); raise SystemExit({n})") for n in range(12))
    )
    assert [ended.returncode for ended in ends] == list(range(12))
    assert [ended.stdout for ended in ends] == [b"%d\n" % n for n in range(12)]


def test_it_works_on_uvloop_as_well(bench: Bench) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def story() -> None:
        lines: list[str] = []
        ended = await bench.python("print('a'); print('b')", on_line=lines.append)
        assert (ended.returncode, lines) == (0, ["a", "b"])
        running = asyncio.create_task(bench.python("import time; time.sleep(60)"))
        await asyncio.sleep(0.2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())


@pytest.mark.anyio
async def test_where_death_cannot_be_seen_it_is_looked_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has neither pidfd nor, before Python 3.13, waitid."""
    monkeypatch.setattr(tools, "_death_notice", lambda pid: -1)
    monkeypatch.setattr(tools, "_can_peek", False)
    ended = await bench.python("print('x'); raise SystemExit(7)", where=sandbox.portable())
    assert (ended.returncode, ended.stdout) == (7, b"x\n")
    hanging = await bench.python("import time; time.sleep(60)", limits={"wall_seconds": 0.3})
    assert hanging.stopped_for is StopReason.TIME


@pytest.mark.anyio
@linux
async def test_what_a_tool_leaves_behind_goes_with_it(bench: Bench) -> None:
    """Plain limits cannot forbid a fork; the group ends with its leader."""
    code = (
        "import os, time\n"
        "pid = os.fork()\n"
        "if pid: print(pid, flush=True); os._exit(0)\n"
        "time.sleep(60)"
    )
    ended = await bench.python(code, where=Sandbox(Level.LIMITS, ""))
    assert ended.returncode == 0
    await wait_for(lambda: gone(int(ended.stdout)))


WORKER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from mediamill import sandbox, tools
where = sandbox.portable() if sys.argv[2] == 'portable' else sandbox.detect()
code = 'import os, time; print(os.getpid(), flush=True); time.sleep(50)'
asyncio.run(tools.run(
    tools.Command('python', ('-I', '-S', '-c', code)),
    jail=sandbox.Jail(sandbox.Limits(1 << 30, 60, 1 << 20), write=(Path(sys.argv[3]),)),
    toolbox=tools.resolve(), sandbox=where, on_line=lambda line: print(line, flush=True)))
"""


@pytest.mark.parametrize("kind", ["strong", "portable"])
def test_a_tool_does_not_outlive_a_worker_that_is_killed(kind: str, tmp_path: Path) -> None:
    folder = str(Path(tools.__file__).parent.parent)
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, folder, kind, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with worker:
        assert worker.stdout is not None
        tool = int(worker.stdout.readline().split()[-1])
        assert not gone(tool)
        worker.kill()
    asyncio.run(wait_for(lambda: gone(tool)))


@pytest.mark.anyio
async def test_a_tool_that_cannot_be_started_is_our_failure(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(Failure) as caught:
        await bench.ffprobe("-i", "fd:", stdin=tmp_path / "nowhere")
    assert caught.value.code is Code.INTERNAL
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.anyio
async def test_a_jail_that_cannot_be_built_is_our_failure(bench: Bench, tmp_path: Path) -> None:
    if bench.where.level is Level.LIMITS:
        pytest.skip("plain limits grant nothing")
    bench.read = (tmp_path / "nowhere",)
    ended = await bench.python("print('started')")
    assert ended.stdout == b""
    failure = tools.classify(ended, tool="python", limits=bench.jail().limits)
    assert failure is not None
    assert failure.code is Code.INTERNAL
    assert str(tmp_path) not in str(failure)


# ---------------------------------------------------------------- what an end means

LIMITS = Limits(1 << 30, 20, 1 << 20, wall_seconds=30.0)


def end(returncode: int = 1, said: str = "", **fields: Any) -> Finished:
    return Finished(
        **{
            "returncode": returncode,
            "stdout": b"",
            "stderr_tail": said,
            "stderr_head": "",
            "wall_seconds": 1.0,
            "cpu_seconds": 1.0,
            "max_rss_bytes": 1 << 20,
            **fields,
        }
    )


def code_of(ended: Finished, tool: str = "ffmpeg") -> Code | None:
    failure = tools.classify(ended, tool=tool, limits=LIMITS)  # type: ignore[arg-type]
    return failure.code if failure else None


@pytest.mark.parametrize("row", range(len(tools.SIGNS)))
def test_each_sign_is_found_in_what_a_tool_really_said(row: int) -> None:
    sign = tools.SIGNS[row]
    for tool in sign.tools:
        ended = end(said=f"something before\n{sign.sample}\nsomething after")
        assert code_of(ended, tool) is sign.code
        flooded = end(stderr_head=sign.sample, said="x\n" * 100)
        assert code_of(flooded, tool) is sign.code


@pytest.mark.parametrize(
    ("ended", "tool", "expected"),
    [
        (end(0), "ffmpeg", None),
        (end(-9, stopped_for=StopReason.TIME), "ffmpeg", Code.TIME_LIMIT),
        (end(-9, stopped_for=StopReason.STALLED), "ffmpeg", Code.TIME_LIMIT),
        (end(-9, stopped_for=StopReason.CANCELED), "ffmpeg", Code.CANCELED),
        (end(0, stopped_for=StopReason.OUTPUT), "ffmpeg", Code.OUTPUT_LIMIT),
        (end(-9, stopped_for=StopReason.MEMORY), "python", Code.MEMORY_LIMIT),
        (end(-9, stopped_for=StopReason.THREADS), "python", Code.RESOURCE_LIMIT),
        (end(-9, stopped_for=StopReason.PROCESSES), "python", Code.RESOURCE_LIMIT),
        # our own reasons come before what it said
        (end(-9, "moov atom not found", stopped_for=StopReason.TIME), "ffmpeg", Code.TIME_LIMIT),
        (end(-signal.SIGXFSZ), "ffmpeg", Code.OUTPUT_LIMIT),
        (end(-signal.SIGXCPU), "python", Code.TIME_LIMIT),
        (end(-9, cpu_seconds=20.9), "python", Code.TIME_LIMIT),
        (end(255, cpu_seconds=20.1), "ffmpeg", Code.TIME_LIMIT),
        (end(-9), "ffmpeg", Code.MEMORY_LIMIT),
        (end(-signal.SIGSEGV), "ffmpeg", Code.TOOL_FAILED),
        (end(-signal.SIGABRT), "python", Code.TOOL_FAILED),
        (end(-signal.SIGABRT, "what():  std::bad_alloc"), "python", Code.MEMORY_LIMIT),
        (end(-signal.SIGSEGV, max_rss_bytes=1 << 30), "ffmpeg", Code.MEMORY_LIMIT),
        (end(-signal.SIGSYS), "ffmpeg", Code.TOOL_FAILED),
        (end(-signal.SIGTERM), "ffmpeg", Code.INTERNAL),
        (end(228), "ffmpeg", Code.SCRATCH_FULL),
        (end(244), "ffmpeg", Code.MEMORY_LIMIT),
        (end(183), "ffmpeg", Code.CORRUPT_INPUT),
        (end(69), "ffmpeg", Code.CORRUPT_INPUT),
        (end(8), "ffmpeg", Code.CAPABILITY_MISSING),
        (end(187, "Generic error in an external library"), "ffmpeg", Code.TOOL_FAILED),
        (end(187, "Generic error", max_rss_bytes=1 << 30), "ffmpeg", Code.MEMORY_LIMIT),
        (end(1, "something new"), "ffprobe", Code.TOOL_FAILED),
        (end(launcher.Exit.LANDLOCK, f"{launcher.PREFIX}no"), "ffmpeg", Code.INTERNAL),
        (end(1, "bwrap: No permissions to create a namespace"), "ffmpeg", Code.INTERNAL),
        (end(2, "/usr/bin/python: can't open file '/x/jail.pyc'"), "ffmpeg", Code.INTERNAL),
        (end(1, "RuntimeError: Bad magic number in .pyc file"), "ffprobe", Code.INTERNAL),
        (end(launcher.Exit.LANDLOCK, "by chance"), "ffmpeg", Code.TOOL_FAILED),
    ],
)
def test_an_end_means(ended: Finished, tool: str, expected: Code | None) -> None:
    assert code_of(ended, tool) is expected


def test_details_tell_nothing_about_the_machine() -> None:
    for sign in tools.SIGNS:
        assert "/" not in sign.detail
        assert "0x" not in sign.detail


@pytest.mark.anyio
@linux
async def test_bubblewrap_tells_the_same_ends(bench: Bench) -> None:
    try:
        bench.where = sandbox.detect(level=Level.BUBBLEWRAP)
    except Failure:
        pytest.skip("no working bubblewrap on this machine")
    for code, expected in (
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(183)", 183),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
        ("import os; os.abort()", -signal.SIGABRT),
    ):
        assert (await bench.python(code)).returncode == expected
    busy = await bench.ffmpeg(
        *["-f", "lavfi", "-i", "testsrc2=s=1280x720:d=3600", "-f", "null", "-"],
        limits={"cpu_seconds": 2},
    )
    failure = tools.classify(busy, tool="ffmpeg", limits=bench.jail(cpu_seconds=2).limits)
    assert failure is not None
    assert failure.code is Code.TIME_LIMIT
    stopped = await bench.python("import time; time.sleep(60)", limits={"wall_seconds": 0.5})
    assert (stopped.returncode, stopped.stopped_for) == (-signal.SIGKILL, StopReason.TIME)


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\na.ts\n#EXT-X-ENDLIST\n"


@pytest.mark.anyio
async def test_broken_files_get_the_code_that_helps_their_owner(
    bench: Bench, tmp_path: Path
) -> None:
    whole = clip(bench.toolbox, tmp_path / "whole.mp4").read_bytes()
    cases: dict[str, tuple[bytes, Code]] = {
        "cut": (whole[: len(whole) * 6 // 10], Code.TRUNCATED_INPUT),
        "text": (b"hello " * 500, Code.UNSUPPORTED_FORMAT),
        "concat": (b"ffconcat version 1.0\nfile a.ts\n", Code.UNSAFE_CONTENT),
        "playlist": (PLAYLIST, Code.UNSAFE_CONTENT),
    }
    for name, (content, expected) in cases.items():
        (tmp_path / name).write_bytes(content)
        ended = await bench.ffprobe(
            *["-format_whitelist", "mov,matroska", "-protocol_whitelist", "fd", "-i", "fd:"],
            stdin=tmp_path / name,
        )
        assert code_of(ended, "ffprobe") is expected, ended.stderr_tail
    (tmp_path / "codec").write_bytes(whole.replace(b"avc1", b"zzzz"))
    ended = await bench.ffmpeg(
        *["-i", "fd:", "-map", "0:v:0", "-f", "null", "-"], command={"stdin": tmp_path / "codec"}
    )
    assert code_of(ended) is Code.UNSUPPORTED_CODEC, ended.stderr_tail
    (tmp_path / "sound").write_bytes(clip(bench.toolbox, tmp_path / "a.m4a", "-vn").read_bytes())
    ended = await bench.ffmpeg(
        *["-i", "fd:", "-map", "0:v:0", "-f", "null", "-"], command={"stdin": tmp_path / "sound"}
    )
    assert code_of(ended) is Code.NO_VIDEO_STREAM, ended.stderr_tail

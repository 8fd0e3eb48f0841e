"""Attacks from inside a jail, each by a real process that is as free as a taken-over decoder."""

from __future__ import annotations

import array
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from mediamill import jail, sandbox
from mediamill.failures import Code, Failure
from mediamill.sandbox import Jail, Level, Limits, Sandbox

linux = pytest.mark.skipif(sys.platform != "linux", reason="the layers are Linux's")
PYTHON = os.path.realpath(sys.executable)
LIMITS = Limits(1 << 30, 20, 64 << 20)


@pytest.fixture(scope="module")
def strong() -> Sandbox:
    found = sandbox.detect()
    if found.level is Level.LIMITS:
        pytest.skip(f"this machine confines nothing: {found.detail}")
    return found


@pytest.fixture(scope="module")
def bubblewrap() -> Sandbox:
    try:
        return sandbox.detect(level=Level.BUBBLEWRAP)
    except Failure:
        pytest.skip("no working bubblewrap on this machine")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "canary").write_text("another job's secret")
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def start(
    where: Sandbox,
    code: str,
    *arguments: str,
    scratch: Path,
    limits: Limits = LIMITS,
    read: tuple[Path, ...] = (),
    env: dict[str, str] | None = None,
    pass_fds: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:
    command, fds = where.command(
        [PYTHON, "-I", "-S", "-c", code, *arguments],
        Jail(limits, read=read, write=(scratch,)),
        env=env,
        pass_fds=pass_fds,
    )
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        pass_fds=fds,
        start_new_session=True,
    )


def say(process: subprocess.Popen[bytes]) -> str:
    """Wait for its end; what it printed, or its error and its code."""
    out, err = process.communicate(timeout=50)
    if process.returncode:
        return f"{out.decode()}{err.decode().strip()} ({process.returncode})"
    return out.decode().strip()


def attempt(where: Sandbox, code: str, *arguments: str, scratch: Path) -> str:
    """Run the attack; "worked", or the error that stopped it."""
    indented = code.strip().replace("\n", "\n    ")
    wrapped = f"{HELP}\ntry:\n    {indented}\n    print('worked')\n"
    wrapped += "except OSError as error:\n    print(error.__class__.__name__, error.errno)"
    return say(start(where, wrapped, *arguments, scratch=scratch))


# What an attacker brings along: system calls by number, addresses, and the numbers of this machine.
HELP = f"""
import ctypes, os, sys, _socket as socket
sys.path.insert(0, {str(Path(jail.__file__).parent)!r})
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.mmap.restype = ctypes.c_void_p
X86 = os.uname().machine == 'x86_64'
def call(x86, arm, *values):
    number = x86 if X86 else arm
    wide = [ctypes.c_long(v) if isinstance(v, int) else v for v in values]
    result = libc.syscall(ctypes.c_long(number), *wide)
    if result < 0:
        raise OSError(ctypes.get_errno(), 'refused')
    return result
worker = int(sys.argv[2]) if len(sys.argv) > 2 else 0
canary = sys.argv[1] if len(sys.argv) > 1 else ''
"""

ATTACKS = {
    # network and local sockets
    "a TCP socket": "socket.socket(socket.AF_INET, socket.SOCK_STREAM)",
    "a UDP socket": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "an IPv6 socket": "socket.socket(socket.AF_INET6, socket.SOCK_STREAM)",
    "a unix socket": "socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)",
    "a netlink socket": "socket.socket(16, socket.SOCK_RAW, 0)",
    "a vsock": "socket.socket(40, socket.SOCK_STREAM)",
    "io_uring, which makes sockets too": "call(425, 425, 8, ctypes.create_string_buffer(120))",
    # reading
    "another job's file": "open(canary).read()",
    "another job's file by ..": "open('../canary').read()",
    "another job's file by a doubled root": "open('//proc/self/root' + canary).read()",
    "another job's file by a link": "os.link(canary, 'mine'); open('mine').read()",
    "another job's file by a symbolic link": "os.symlink(canary, 'mine'); open('mine').read()",
    "another job's file by moving it": "os.rename(canary, 'mine'); open('mine').read()",
    "the names of another job's files": "os.listdir('..')",
    "/etc/passwd": "open('/etc/passwd').read()",
    "the worker's environment": "open(f'/proc/{worker}/environ').read()",
    "the worker's memory": "open(f'/proc/{worker}/mem', 'rb').read(1)",
    "the worker's open files": "os.listdir(f'/proc/{worker}/fd')",
    "its own process's files": "open('/proc/self/maps').read()",
    "the list of processes": "os.listdir('/proc')",
    "the disks": "open('/dev/vda', 'rb')",
    "a file by its handle": "call(304, 265, -100, ctypes.create_string_buffer(64), 0)",
    "openat2, which the filter cannot read": (
        "call(437, 437, -100, canary.encode(), ctypes.create_string_buffer(24), 24)"
    ),
    "watching another job's folder": "call(294, 26, 0)",
    # writing
    "a file outside": "open(canary + '.new', 'w')",
    "a file outside by ..": "open('../new', 'w')",
    "another job's file for appending": "open(canary, 'a')",
    "emptying another job's file": "os.truncate(canary, 0)",
    "emptying it while opening to read": "os.open(canary, os.O_RDONLY | os.O_TRUNC)",
    "removing another job's file": "os.unlink(canary)",
    "the mode of another job's file": "os.chmod(canary, 0o777)",
    "the times of another job's file": "os.utime(canary, (0, 0))",
    "the owner of another job's file": "os.chown(canary, os.getuid(), os.getgid())",
    "attributes of another job's file": "os.setxattr(canary, 'user.x', b'1')",
    "a folder outside": "os.mkdir('../folder')",
    "a program with root's rights in its scratch": "os.open('x', os.O_CREAT | os.O_WRONLY, 0o4755)",
    "the library it runs on": "open(os.__file__, 'a')",
    "/tmp": "open('/tmp/mediamill-attack', 'w')",
    "/dev/shm": "open('/dev/shm/mediamill-attack', 'w')",
    # traps for the worker, who opens what is in the scratch
    "a symbolic link in its scratch": "os.symlink('/etc/passwd', 'poster.jpg')",
    "a pipe in its scratch": "os.mkfifo('poster.jpg')",
    "a device in its scratch": "os.mknod('poster.jpg', 0o20600, os.makedev(1, 3))",
    # processes
    "fork": "os.fork() or os._exit(0)",
    "vfork": "call(58, 220, *((0, 0, 0, 0, 0) if X86 else (0x4111, 0, 0, 0, 0))) or os._exit(0)",
    "clone": "call(56, 220, 17, 0, 0, 0, 0) or os._exit(0)",
    "clone3": "call(435, 435, ctypes.create_string_buffer(88), 88) or os._exit(0)",
    "clone into a new user namespace": "call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "a thread in a new namespace": "call(56, 220, 0x10000 | 0x800 | 0x100 | 0x20000, 0, 0, 0, 0)",
    "another program": "os.execve('/bin/sh', ['sh', '-c', ':'], {})",
    "itself once more": "os.execve(sys.executable, [sys.executable, '-c', ''], {})",
    "a program without a file": "call(319, 279, b'x', 0)",
    "execveat": "call(322, 281, -100, sys.executable.encode(), 0, 0, 0)",
    "another session": "os.setsid()",
    "another process group": "os.setpgid(0, 0)",
    # the worker and the machine
    "a signal to the worker": "os.kill(worker, 0)",
    "a signal to everybody": "os.kill(-1, 0)",
    "a signal to the group": "os.killpg(os.getpgrp(), 0)",
    "a signal to a worker's thread": "call(234, 131, worker, worker, 0)",
    "a handle of the worker": "os.pidfd_open(worker)",
    "the worker's limits": "import resource; resource.prlimit(worker, resource.RLIMIT_NOFILE)",
    "the worker's priority": "os.setpriority(os.PRIO_PROCESS, worker, 19)",
    "the worker's processors": "os.sched_setaffinity(worker, {0})",
    "tracing the worker": "call(101, 117, 16, worker, 0, 0)",
    "reading the worker's memory": "call(310, 270, worker, 0, 0, 0, 0, 0)",
    "signals by a pipe's owner": "import fcntl; fcntl.fcntl(os.pipe()[0], 8, worker)",
    "no longer dying with the worker": "call(157, 167, 1, 0, 0, 0, 0)",
    "a namespace": "call(272, 97, 0x10000000)",
    "a mount": "call(165, 40, b'none', b'/tmp', b'tmpfs', 0, 0)",
    "chroot": "os.chroot('.')",
    "another user": "os.setuid(12345)" if os.getuid() == 0 else "os.setuid(0)",
    "bpf": "call(321, 280, 0, 0, 0)",
    "perf events": "call(298, 241, 0, 0, 0, 0, 0)",
    "userfaultfd": "call(323, 282, 1)",
    "the kernel's keys": "call(250, 219, 0, -3, 0)",
    "a call of the future": "call(500, 500)",
    # memory that no limit counts
    "shared anonymous memory": (
        "if libc.mmap(None, 1 << 20, 3, 0x21, -1, 0) in (None, 2**64 - 1):\n"
        "    raise OSError(ctypes.get_errno(), 'refused')"
    ),
    "a stack that grows without a limit": (
        "if libc.mmap(None, 1 << 20, 3, 0x122, -1, 0) in (None, 2**64 - 1):\n"
        "    raise OSError(ctypes.get_errno(), 'refused')"
    ),
    "shared memory that outlives it": "call(29, 194, 0, 4096, 0o1600)",
    "a message queue": "call(240, 180, b'x', 0o102, 0o600, 0)",
}


@linux
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_jail_stops(attack: str, strong: Sandbox, scratch: Path) -> None:
    canary = scratch.parent / "canary"
    answer = attempt(strong, ATTACKS[attack], str(canary), str(os.getpid()), scratch=scratch)
    assert re.fullmatch(r"\w+Error \d+", answer), answer
    assert canary.read_text() == "another job's secret"
    assert sorted(os.listdir(scratch.parent)) == ["canary", "scratch"]
    assert os.listdir(scratch) == []


@linux
def test_the_attacks_above_do_work_without_a_jail(scratch: Path) -> None:
    """Else they would prove nothing. Those that need root, or would hurt, are left out."""
    works = [
        "a TCP socket",
        "a UDP socket",
        "a unix socket",
        "another job's file",
        "another job's file by ..",
        "another job's file by a doubled root",
        "/etc/passwd",
        "the worker's environment",
        "the mode of another job's file",
        "the times of another job's file",
        "a symbolic link in its scratch",
        "fork",
        "clone",
        "itself once more",
        "another process group",
        "a signal to the worker",
        "the worker's limits",
        "no longer dying with the worker",
        "shared anonymous memory",
        "a stack that grows without a limit",
    ]
    canary = str(scratch.parent / "canary")
    answers = {}
    for name in works:
        indented = ATTACKS[name].strip().replace("\n", "\n    ")
        code = f"{HELP}\ntry:\n    {indented}\nexcept OSError as error:\n    sys.exit(str(error))"
        ran = subprocess.run(
            [PYTHON, "-I", "-S", "-c", code, canary, str(os.getpid())],
            cwd=scratch,
            capture_output=True,
            check=False,
        )
        answers[name] = ran.stderr.decode() if ran.returncode else "worked"
    assert answers == dict.fromkeys(works, "worked")


@linux
def test_another_architectures_calls_kill(strong: Sandbox, scratch: Path) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("only x86_64 has two more doors to the kernel")
    x32 = start(strong, HELP + "libc.syscall(ctypes.c_long(0x40000000 + 39))", scratch=scratch)
    x32.communicate(timeout=50)
    assert x32.returncode == -signal.SIGSYS
    # int 0x80 with eax = 20, getpid of the 32-bit table: mov eax, 20; int 0x80; ret
    code = HELP + (
        "page = libc.mmap(None, 4096, 7, 0x22, -1, 0)\n"
        "ctypes.memmove(page, bytes.fromhex('b814000000cd80c3'), 8)\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(page)()\n"
    )
    i386 = start(strong, code, scratch=scratch)
    i386.communicate(timeout=50)
    assert i386.returncode == -signal.SIGSYS


@linux
def test_a_jail_lets_a_tool_work(strong: Sandbox, scratch: Path) -> None:
    """Threads, folders, renaming, seeking, signals to itself and a given file are all there."""
    given = scratch.parent / "given"
    given.write_text("input")
    code = """
import os, signal, sys, threading, time
threads = [threading.Thread(target=time.sleep, args=(0.01,)) for _ in range(20)]
for thread in threads: thread.start()
for thread in threads: thread.join()
os.mkdir('a'); os.mkdir('b')
with open('a/x.tmp', 'w+') as file:
    file.write('12345'); file.seek(1); assert file.read() == '2345'; file.truncate(2)
os.rename('a/x.tmp', 'a/x'); os.unlink('a/x'); os.rmdir('b')
assert open(sys.argv[1]).read() == 'input'
try: open(sys.argv[1], 'a')
except PermissionError: pass
else: raise SystemExit('wrote its input')
open('/dev/null', 'w').write('x')
caught = []
signal.signal(signal.SIGUSR1, lambda *_: caught.append(1))
os.kill(os.getpid(), signal.SIGUSR1); assert caught
signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1); assert len(caught) == 2
print(os.getcwd(), os.environ.get('X'), len(os.environ), os.getpriority(0, 0), oct(os.umask(0)))
"""
    answer = say(
        start(strong, code, str(given), scratch=scratch, read=(given,), env={"X": "y=z"})
    ).split()
    # An interpreter in the C locale sets LC_CTYPE for itself.
    assert answer[:2] == [str(scratch), "y=z"]
    assert answer[2] in {"1", "2"}
    assert answer[3:] == [str(min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)), "0o77"]


def test_nothing_of_the_workers_environment_arrives(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for where in (sandbox.detect(), sandbox.portable()):
        answer = say(start(where, "import os; print(sorted(os.environ))", scratch=scratch))
        assert answer in {"[]", "['LC_CTYPE']"}


def test_only_passed_descriptors_arrive(scratch: Path) -> None:
    code = (
        "import os\n"
        "def seen(fd):\n"
        "    try: os.fstat(fd)\n"
        "    except OSError: return False\n"
        "    return True\n"
        "print([fd for fd in range(256) if seen(fd)])"
    )
    with open(scratch.parent / "canary", "rb") as secret, open(__file__, "rb") as passed:
        os.set_inheritable(secret.fileno(), True)
        for where in (sandbox.detect(), sandbox.portable()):
            answer = say(start(where, code, scratch=scratch, pass_fds=(passed.fileno(),)))
            assert answer == str([0, 1, 2, passed.fileno()])


@linux
def test_root_in_a_jail_is_nobody_special(strong: Sandbox, scratch: Path) -> None:
    code = (
        "import ctypes, resource\n"
        "libc = ctypes.CDLL(None)\n"
        "print(*(libc.prctl(option, value, 0, 0, 0)"
        " for option, value in ((39, 0), (21, 0), *((23, c) for c in range(41)))))\n"
        "header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()\n"
        "libc.capget(header, data)\n"
        "print(*data)\n"
        "print(resource.getrlimit(resource.RLIMIT_CORE))\n"
    )
    rights, capabilities, core = say(start(strong, code, scratch=scratch)).splitlines()
    no_new_privileges, seccomp, *bounding = rights.split()
    assert (no_new_privileges, seccomp) == ("1", "2")
    assert capabilities == "0 0 0 0 0 0"
    assert core == "(1, 1)"
    if os.getuid() == 0:
        assert set(bounding) == {"0"}


@linux
def test_an_inherited_socket_still_carries_files(strong: Sandbox, scratch: Path) -> None:
    """The warm image children get their inputs this way."""
    code = """
import _socket, array, os, sys
server = _socket.socket(fileno=int(sys.argv[1]))
data, control, flags, _ = server.recvmsg(100, _socket.CMSG_SPACE(4))
fds = array.array('i'); fds.frombytes(control[0][2][:4])
server.send(data + b':' + os.read(fds[0], 100))
"""
    ours, theirs = socket.socketpair()
    with ours, theirs, open(scratch.parent / "canary", "rb") as file:
        child = start(
            strong, code, str(theirs.fileno()), scratch=scratch, pass_fds=(theirs.fileno(),)
        )
        rights = array.array("i", [file.fileno()])
        ours.sendmsg([b"take"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        ours.settimeout(30)
        assert ours.recv(100) == b"take:another job's secret"
        assert say(child) == ""


def test_a_socket_that_leads_out_is_not_passed(scratch: Path) -> None:
    where = sandbox.detect()
    with socket.socket() as tcp, pytest.raises(ValueError, match="unix sockets"):
        start(where, "", scratch=scratch, pass_fds=(tcp.fileno(),))
    ours, theirs = socket.socketpair(type=socket.SOCK_DGRAM)
    with ours, theirs, pytest.raises(ValueError, match="unix sockets"):
        start(where, "", scratch=scratch, pass_fds=(theirs.fileno(),))


@linux
def test_memory_has_a_limit(strong: Sandbox, scratch: Path) -> None:
    code = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    limits = Limits(200 << 20, 20, 1 << 20)
    child = start(strong, code, scratch=scratch, limits=limits)
    _, err = child.communicate(timeout=50)
    assert b"MemoryError" in err


def test_a_file_has_a_largest_size(scratch: Path) -> None:
    code = "import _signal; _signal.signal(25, 0); open('x', 'wb').write(bytes(1 << 20))"
    for where in (sandbox.detect(), sandbox.portable()):
        child = start(where, code, scratch=scratch, limits=Limits(1 << 30, 20, 100_000))
        child.communicate(timeout=50)
        assert child.returncode == -signal.SIGXFSZ
        assert (scratch / "x").stat().st_size <= 100_000


def test_processor_time_has_a_limit_that_cannot_be_ignored(scratch: Path) -> None:
    code = "import _signal; _signal.signal(24, 1)\nwhile True: pass"  # SIGXCPU
    child = start(sandbox.detect(), code, scratch=scratch, limits=Limits(1 << 30, 1, 1 << 20))
    child.communicate(timeout=50)
    assert child.returncode == -signal.SIGKILL


def test_exit_codes_and_signals_arrive_as_they_were(scratch: Path) -> None:
    for where in (sandbox.detect(), sandbox.portable()):
        for code, expected in (
            ("raise SystemExit(0)", 0),
            ("raise SystemExit(183)", 183),
            ("import os; os.abort()", -signal.SIGABRT),
            ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
        ):
            child = start(where, code, scratch=scratch)
            child.communicate(timeout=50)
            assert child.returncode == expected, (where.level, code)


def test_a_scratch_is_cleared_whatever_was_made_of_it(strong: Sandbox, scratch: Path) -> None:
    """A nest of folders too deep for a path, a name that is no text, a mode without rights."""
    code = (
        "import os\n"
        "os.mkdir('kept'); open('kept/file', 'w')\n"
        "open(b'\\xff\\n', 'w'); os.close(os.open('x', os.O_CREAT, 0))\n"
        "os.mkdir('closed', 0)\n"
        "for _ in range(4000): os.mkdir('d'); os.chdir('d')\n"
        "open('deep', 'w')"
    )
    assert say(start(strong, code, scratch=scratch)) == ""
    assert (scratch / "d").is_dir()
    sandbox.clear(scratch)
    sandbox.clear(scratch)
    assert os.listdir(scratch.parent) == ["canary"]


# ---------------------------------------------------------------- dying with the worker

WORKER = """
import os, subprocess, sys
sys.path.insert(0, sys.argv[1])
from mediamill import sandbox
from pathlib import Path
kind, scratch, code = sys.argv[2:5]
where = sandbox.portable() if kind == 'portable' else sandbox.detect()
command, fds = where.command(
    [sys.executable, '-I', '-S', '-c', code],
    sandbox.Jail(sandbox.Limits(1 << 30, 60, 1 << 20), write=(Path(scratch),)),
)
subprocess.run(command, env={}, pass_fds=fds, start_new_session=True)
"""


def orphan(kind: str, scratch: Path, code: str = "") -> bool:
    """Whether a tool whose worker was killed is gone soon after."""
    tool = f"{code}\nimport os, time; print(os.getpid(), flush=True); time.sleep(50)"
    folder = str(Path(sandbox.__file__).parent.parent)
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, folder, kind, str(scratch), tool], stdout=subprocess.PIPE
    )
    with worker:
        assert worker.stdout is not None
        assert int(worker.stdout.readline())
        worker.kill()
        # The pipe ends when the last process that holds it is gone.
        ready, _, _ = select.select([worker.stdout], [], [], 20)
        return bool(ready) and worker.stdout.read() == b""


@linux
def test_a_tool_dies_with_its_worker(strong: Sandbox, scratch: Path) -> None:
    assert orphan("strong", scratch)


def test_a_tool_dies_with_its_worker_where_only_a_pipe_tells(scratch: Path) -> None:
    assert orphan("portable", scratch)


@linux
def test_a_tool_cannot_refuse_to_die_with_its_worker(strong: Sandbox, scratch: Path) -> None:
    """It ignores every signal, disowns its parent, and tries to exec from a thread."""
    code = (
        HELP
        + """
import threading, _signal
for number in range(1, 65):
    try: _signal.signal(number, 1)
    except (OSError, ValueError): pass
def flee():
    for escape in (lambda: call(157, 167, 1, 0, 0, 0, 0), os.setsid,
                   lambda: os.execv(sys.executable, [sys.executable, '-c', 'input()'])):
        try: escape()
        except OSError: pass
thread = threading.Thread(target=flee); thread.start(); thread.join()
sys.argv[1:] = []
"""
    )
    assert orphan("strong", scratch, code)


def test_a_launcher_whose_worker_is_gone_starts_nothing(scratch: Path) -> None:
    where = sandbox.detect()
    command, fds = where.command(
        [PYTHON, "-I", "-S", "-c", "print('started')"], Jail(LIMITS, write=(scratch,))
    )
    if where.bwrap is not None or where.portable:
        pytest.skip("the lifeline is looked at there")
    strangers = [item.replace(f"parent={os.getpid()}", "parent=1") for item in command]
    ran = subprocess.run(strangers, env={}, pass_fds=fds, capture_output=True, check=False)
    assert ran.returncode == jail.Exit.PARENT_GONE
    assert ran.stdout == b""
    assert ran.stderr.startswith(jail.PREFIX.encode())


# ---------------------------------------------------------------- never less than demanded


@linux
@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        ("landlock=99", jail.Exit.LANDLOCK),
        ("read=/nowhere/at/all", jail.Exit.PATH),
        ("cwd=/nowhere/at/all", jail.Exit.BAD_SPECIFICATION),  # given twice
        ("what=1", jail.Exit.BAD_SPECIFICATION),
        ("nonsense", jail.Exit.BAD_SPECIFICATION),
    ],
)
def test_a_demand_that_cannot_be_met_ends_the_launcher(
    demand: str, expected: int, strong: Sandbox, scratch: Path
) -> None:
    if not strong.landlock:
        pytest.skip("the demands here are Landlock's")
    command, fds = strong.command(
        [PYTHON, "-I", "-S", "-c", "print('started')"], Jail(LIMITS, write=(scratch,))
    )
    key = demand.partition("=")[0]
    cut = command.index("--")
    kept = [item for item in command[:cut] if key != "landlock" or not item.startswith("landlock=")]
    changed = [*kept, demand, *command[cut:]]
    ran = subprocess.run(
        changed, env={}, pass_fds=fds, capture_output=True, start_new_session=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (expected, b"")
    assert ran.stderr.startswith(jail.PREFIX.encode())


def test_a_level_that_is_not_there_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_find_bubblewrap", lambda: None)
    with pytest.raises(Failure) as caught:
        sandbox.detect(level=Level.BUBBLEWRAP)
    assert caught.value.code is Code.CAPABILITY_MISSING


@linux
def test_detection_goes_down_a_step_when_a_mechanism_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail_first(candidate: Sandbox) -> str:
        tried.append(candidate.level)
        return "" if len(tried) > 1 else "no such thing here"

    monkeypatch.setattr(sandbox, "_try", fail_first)
    found = sandbox.detect()
    assert found.level is tried[1]
    assert "no such thing here" in found.detail


def test_the_weakest_level_says_so() -> None:
    found = sandbox.detect(level=Level.LIMITS)
    assert found.level is Level.LIMITS
    assert "can read what the worker can read" in found.detail


@linux
def test_plain_limits_still_filter_calls(scratch: Path) -> None:
    if os.uname().machine not in jail.ARCHITECTURES:
        pytest.skip("no table for this machine")
    found = sandbox.detect(level=Level.LIMITS)
    answer = attempt(found, "socket.socket()", scratch=scratch)
    assert answer == "PermissionError 1"


# ---------------------------------------------------------------- the tables and the parts


@linux
def test_call_numbers_are_those_of_the_kernels_headers() -> None:
    x86 = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    generic = Path("/usr/include/asm-generic/unistd.h")
    if not x86.exists() or not generic.exists():
        pytest.skip("the kernel's headers are not installed")
    defined = re.compile(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", re.MULTILINE)
    headers = []
    for path in (x86, generic):
        numbers: dict[str, int] = {}
        for name, number in defined.findall(path.read_text()):
            numbers.setdefault(name, int(number))
        headers.append(numbers)
    ours = jail._NEVER | jail._UNKNOWN | jail._LOOKED_AT
    newer = {"fchmodat2", "statmount", "listmount"}  # than the headers of Debian 12
    for name, columns in ours.items():
        for number, numbers in zip(columns, headers, strict=True):
            if name not in numbers and name in newer:
                continue
            assert numbers.get(name) == number, name


def test_no_call_is_in_two_tables() -> None:
    names = [*jail._NEVER, *jail._UNKNOWN, *jail._LOOKED_AT]
    assert len(names) == len(set(names))
    for column in (0, 1):
        numbers = [
            columns[column]
            for table in (jail._NEVER, jail._UNKNOWN, jail._LOOKED_AT)
            for columns in table.values()
            if columns[column] is not None
        ]
        assert len(numbers) == len(set(numbers))


def evaluate(program: bytes, number: int, arguments: tuple[int, ...], architecture: int) -> int:
    """What the kernel would answer: the few instructions of BPF that the filter uses."""
    data = struct.pack(
        "<IIQ6Q", number, architecture, 0, *(*arguments, *(0,) * (6 - len(arguments)))
    )
    steps = list(struct.iter_unpack("=HBBI", program))
    accumulator = at = 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, value)
            case 0x54:
                accumulator &= value
            case 0x15:
                at += yes if accumulator == value else no
            case 0x25:
                at += yes if accumulator > value else no
            case 0x35:
                at += yes if accumulator >= value else no
            case 0x45:
                at += yes if accumulator & value else no
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(hex(code))


ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_answers_as_the_tables_say(machine: str) -> None:
    """Both machines' filters are run here by a small interpreter, whatever this machine is."""
    column, architecture = jail.ARCHITECTURES[machine]
    address, pid = 0x12_3456_7890, 4321
    program = jail.filter_program(machine, pid, address, signals_scoped=False)
    scoped = jail.filter_program(machine, pid, address, signals_scoped=True)
    assert len(program) // 8 < 4096

    def ask(name_or_number: str | int, *arguments: int, code: bytes = program) -> int:
        number = name_or_number
        if isinstance(number, str):
            found = jail._LOOKED_AT[number][column]
            assert found is not None
            number = found
        return evaluate(code, number, arguments, architecture)

    for table, expected in ((jail._NEVER, EPERM), (jail._UNKNOWN, ENOSYS)):
        for columns in table.values():
            if (number := columns[column]) is not None:
                assert ask(number) == expected
    read, write, futex = {"x86_64": (0, 1, 202), "aarch64": (63, 64, 98)}[machine]
    assert [ask(read), ask(write), ask(futex), ask(448 + 1)] == [ALLOW] * 4
    assert [ask(463), ask(10_000)] == [ENOSYS] * 2
    assert evaluate(program, read, (), 0x40000003) == KILL
    assert ask(0x40000000 + 1) == (KILL if machine == "x86_64" else ENOSYS)

    thread = 0x3D0F00  # what pthread_create asks for
    assert ask("clone", thread) == ALLOW
    assert [ask("clone", flags) for flags in (17, 0x4111, thread | 0x20000000)] == [EPERM] * 3
    assert ask("execve", address) == ALLOW
    assert ask("execve", address + (1 << 32)) == ask("execve", address + 1) == EPERM
    for name in ("kill", "tgkill"):
        assert [ask(name, pid), ask(name, 1), ask(name, 0)] == [ALLOW, EPERM, EPERM]
    assert ask("kill", 2**64 - 1) == EPERM
    assert (ask("tkill", pid), ask("tkill", 9), ask("tkill", 9, code=scoped)) == (
        ALLOW,
        EPERM,
        ALLOW,
    )
    for name in ("prlimit64", "sched_setaffinity", "sched_setscheduler"):
        assert [ask(name, 0), ask(name, pid), ask(name, 1)] == [ALLOW, ALLOW, EPERM]
    assert ask("sendto", 3, 1, 1, 0, 0) == ALLOW
    assert ask("sendto", 3, 1, 1, 0, 1 << 40) == EPERM
    assert ask("mmap", 0, 1, 3, 0x22) == ask("mmap", 0, 1, 3, 0x01) == ALLOW
    assert ask("mmap", 0, 1, 3, 0x21) == ask("mmap", 0, 1, 3, 0x122) == EPERM
    assert [ask("prctl", 15), ask("prctl", 1), ask("prctl", 0x59616D61)] == [ALLOW, EPERM, EPERM]
    assert [ask("fcntl", 0, 2), ask("fcntl", 0, 8), ask("fcntl", 0, 1024)] == [ALLOW, EPERM, EPERM]
    assert [ask("ioctl", 0, 0x5401), ask("ioctl", 0, 0x5412)] == [ALLOW, EPERM]
    o_rdonly_trunc, o_wronly_trunc = 0o1000, 0o1001
    assert ask("openat", 0, 0, o_wronly_trunc) == ALLOW
    assert ask("openat", 0, 0, o_rdonly_trunc) == EPERM
    assert ask("openat", 0, 0, 0o101, 0o666) == ask("openat", 0, 0, 0, 0o4000) == ALLOW
    for flags in (0o101, 0o20200001):  # O_CREAT, O_TMPFILE
        assert ask("openat", 0, 0, flags, 0o4755) == ask("openat", 0, 0, flags, 0o2600) == EPERM
    if machine == "x86_64":
        assert ask("open", 0, o_rdonly_trunc) == EPERM
        assert [ask("creat", 0, 0o666), ask("creat", 0, 0o4755)] == [ALLOW, EPERM]


@linux
def test_a_static_program_gets_no_libraries(tmp_path: Path) -> None:
    runtime = sandbox.runtime_of(Path(PYTHON))
    assert runtime.execute[0] == PYTHON
    assert any("ld-" in path for path in runtime.execute[1:])
    plain = tmp_path / "program"
    plain.write_bytes(b"#!/bin/sh\n")
    assert not [path for path in sandbox.runtime_of(plain).read if "lib" in path]


def test_a_program_is_named_by_its_path() -> None:
    with pytest.raises(ValueError, match="absolute"):
        sandbox.detect().command(["ffmpeg"], Jail(LIMITS))


def test_the_self_test_passes_on_a_strong_level(strong: Sandbox) -> None:
    assert [check for check in sandbox.self_test(strong) if not check.ok] == []


def test_the_self_test_tells_what_plain_limits_do_not_stop() -> None:
    failed = {check.name for check in sandbox.self_test(sandbox.portable()) if not check.ok}
    assert "reads another job's file" in failed
    assert "survives its worker" not in failed


# ---------------------------------------------------------------- bubblewrap


@linux
def test_bubblewrap_stops_what_landlock_stops(bubblewrap: Sandbox, scratch: Path) -> None:
    assert [check for check in sandbox.self_test(bubblewrap) if not check.ok] == []
    code = "import os; print(os.path.exists('/proc'), os.listdir('/'))"
    answer = say(start(bubblewrap, code, scratch=scratch))
    assert answer.startswith("False")
    seen_but_empty = {"the names of another job's files"}  # only its own folder is there to list
    for attack in sorted(ATTACKS.keys() - seen_but_empty):
        canary = str(scratch.parent / "canary")
        answer = attempt(bubblewrap, ATTACKS[attack], canary, str(os.getpid()), scratch=scratch)
        assert re.fullmatch(r"\w+Error \d+", answer), (attack, answer)
    assert os.listdir(scratch) == []


def test_the_command_for_bubblewrap_grants_and_hides(tmp_path: Path) -> None:
    where = Sandbox(Level.BUBBLEWRAP, "", bwrap=Path("/usr/bin/bwrap"), seccomp=True, lifeline=9)
    given, work = tmp_path / "given", tmp_path / "work"
    command, fds = where.command([PYTHON, "x"], Jail(LIMITS, read=(given,), write=(work,)))
    text = " ".join(command)
    assert command[0] == "/usr/bin/bwrap"
    assert {"--unshare-all", "--die-with-parent"} <= set(command)
    assert f"--ro-bind {given} {given}" in text
    assert f"--bind {work} {work} --remount-ro / --" in text
    assert "/proc" not in command
    assert fds == (9,)


def test_bubblewrap_is_found_in_its_wheel_or_on_the_path() -> None:
    found = sandbox._find_bubblewrap()
    assert found is None or shutil.which(str(found))

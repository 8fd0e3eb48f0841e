"""Processes that stop in the middle of a step, and wake when the world has moved on."""

from __future__ import annotations

import os
import signal
import time

from tests.stories.clips import Clips
from tests.stories.conftest import Make
from tests.stories.harness import identities, media_uuid, still_alive, until


def test_one_locked_job_does_not_cost_a_worker_its_other_jobs(
    make_platform: Make, clips: Clips
) -> None:
    """Somebody holds one row for longer than a lease: a frozen API, a person at a console."""
    platform = make_platform(lease_seconds=3, self_stop_seconds=2, beat_seconds=0.5)
    platform.start_api()
    worker = platform.start_worker("image=1,video=2,maintenance=1")
    locked = platform.upload(clips.work, "locked.mp4")
    first = platform.freeze_encoder(worker)
    other = platform.upload(clips.work, "other.mp4")
    second = until(
        lambda: next((p for p in platform.encoders(worker) if p != first), None),
        seconds=20,
        why="the second video does not start",
    )
    os.kill(second, signal.SIGSTOP)
    named = identities([second])
    job = platform.main_job(locked)["id"]
    until_then = platform.value("SELECT now() + '4 s'")
    with platform.holding("SELECT 1 FROM jobs WHERE id = $1 FOR UPDATE", job):
        until(
            lambda: (
                platform.value("SELECT now() > $1::timestamptz", until_then)
                or not still_alive(named)
            ),
            seconds=10,
            why="time stands still",
        )
        assert still_alive(named), "its tools were stopped for another job's lock"
        assert platform.main_job(other)["lease_until"] > until_then, "its lease was not renewed"
    for pid in (first, second):
        if os.path.exists(f"/proc/{pid}"):
            os.kill(pid, signal.SIGCONT)
    platform.wait_for_state(other, "ready")
    assert platform.main_job(other)["attempt"] == 1
    platform.wait_for_state(locked, "ready")


def test_a_worker_that_wakes_after_a_deletion_brings_no_bytes_back(
    make_platform: Make, clips: Clips
) -> None:
    """It slept after it had reserved its set and before it laid the set out."""
    platform = make_platform(lease_seconds=2, self_stop_seconds=1.5, beat_seconds=0.4)
    platform.start_api()
    platform.start_worker("maintenance=1")  # swept the staging now, and will in half a minute
    frozen = platform.start_worker("image=1")
    # It has prepared its statements, so that a lock meets the one that reserves while it runs.
    platform.wait_for_state(platform.upload(clips.photo, "first.jpg"), "ready")
    with platform.holding("LOCK TABLE sets IN EXCLUSIVE MODE"):
        media_id = platform.upload(clips.photo, "photo.jpg")
        until(lambda: platform.waiting_for_locks() > 0, seconds=20, why="it reserves no set")
        frozen.send(signal.SIGSTOP)
    until(
        lambda: platform.rows("SELECT 1 FROM sets WHERE media_id = $1", media_uuid(media_id)),
        seconds=5,
        why="no set is reserved",
    )
    assert platform.http.delete(f"/v1/media/{media_id}").status_code == 202
    until(lambda: not platform.rows("SELECT 1 FROM erasures"), seconds=15, why="not erased")
    assert platform.files("media", media_id) == []

    # Its beat has to wait, so that it does not hear of the loss before it has laid the set out.
    with platform.holding("LOCK TABLE jobs IN EXCLUSIVE MODE"):
        frozen.send(signal.SIGCONT)
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline and not platform.files("media", media_id):
            time.sleep(0.05)
    until(
        lambda: any(e["event"] == "attempt_lost" for e in frozen.events()),
        seconds=10,
        why="it has not seen that its lease is lost",
    )
    until(
        lambda: not platform.files("media", media_id),
        seconds=5,
        why="bytes came back after the deletion",
    )
    platform.assert_nothing_left(seconds=35)

"""Workers are killed, frozen and told to go in the middle of their work; the work is done once."""

from __future__ import annotations

import os
import signal
import time

import pytest
from tests.stories.clips import Clips
from tests.stories.conftest import Make
from tests.stories.harness import (
    Platform,
    assert_gone,
    descendants,
    identities,
    media_uuid,
    open_files,
    until,
)

VIDEO = "image=1,video=1,maintenance=1"


@pytest.mark.timeout(120)
def test_a_killed_workers_job_runs_again_within_ten_seconds(
    platform: Platform, clips: Clips
) -> None:
    platform.start_api()
    doomed = platform.start_worker(VIDEO)
    media_id = platform.upload(clips.work, "work.mp4")
    platform.freeze_encoder(doomed)
    heir = platform.start_worker(VIDEO)
    below = identities(descendants(doomed.pid))
    assert below
    left = next(p for p in platform.scratch() if p.parent.name.split(".")[1] == str(doomed.pid))

    killed_at = time.monotonic()
    doomed.kill()
    assert_gone(below, seconds=2)
    until(
        lambda: platform.main_job(media_id)["fence"] == 2,
        seconds=10 - (time.monotonic() - killed_at),
        why="nobody took the job up",
    )
    assert platform.main_job(media_id)["attempt"] == 2
    assert platform.wait_for_state(media_id, "ready", seconds=60)
    attempts = platform.attempts(media_id)
    assert [a["outcome"] for a in attempts] == ["lost", "completed"]
    assert [a["attempt"] for a in attempts] == [1, 2]
    assert attempts[0]["worker"] != attempts[1]["worker"]
    assert attempts[0]["finished_at"] <= attempts[1]["started_at"], "two held the lease"
    assert platform.main_job(media_id)["crashes"] == 1
    platform.assert_path_is_legal(media_id)
    platform.assert_published_once(media_id)

    assert left.exists(), "a dead worker cannot tidy up"
    platform.start_worker("image=1")
    assert not left.parent.exists(), "the next start did not sweep"
    platform.assert_nothing_left()
    assert heir.alive


def test_a_stopping_worker_hands_its_job_back_without_counting_the_attempt(
    make_platform: Make, clips: Clips
) -> None:
    platform = make_platform(drain_seconds=1)
    platform.start_api()
    leaving = platform.start_worker(VIDEO)
    media_id = platform.upload(clips.work, "work.mp4")
    platform.freeze_encoder(leaving)
    below = identities(descendants(leaving.pid))

    assert leaving.stop(seconds=8) == 0
    assert_gone(below, seconds=0.5)
    job = platform.main_job(media_id)
    assert (job["state"], job["attempt"], job["crashes"]) == ("queued", 0, 0)
    assert platform.get(media_id)["state"] == "queued"
    assert platform.rows("SELECT 1 FROM workers") == []
    platform.assert_nothing_left(seconds=0)
    assert list(platform.data.glob("scratch/*")) == []

    platform.start_worker(VIDEO)
    body = platform.wait_for_state(media_id, "ready")
    assert body["job"]["attempt"] == 1
    assert [a["outcome"] for a in platform.attempts(media_id)] == ["released", "completed"]
    platform.assert_path_is_legal(media_id)
    platform.assert_published_once(media_id)
    timeline = platform.http.get(f"/v1/media/{media_id}/timeline").json()
    assert "released" in [s["reason"] for s in timeline["segments"]], "the wait is not explained"


def test_a_stopping_worker_finishes_what_it_can(platform: Platform, clips: Clips) -> None:
    platform.start_api()
    leaving = platform.start_worker(VIDEO)
    media_id = platform.upload(clips.clip, "clip.mp4")
    platform.encoder(leaving)
    waiting = platform.upload(clips.clip, "next.mp4")
    assert leaving.stop() == 0
    assert platform.get(media_id)["state"] == "ready"
    assert platform.main_job(waiting)["state"] == "queued", "a draining worker took a new job"
    assert platform.main_job(waiting)["attempt"] == 0


def test_a_worker_that_wakes_from_a_long_freeze_changes_nothing(
    make_platform: Make, clips: Clips
) -> None:
    platform = make_platform(lease_seconds=2, self_stop_seconds=1.5, beat_seconds=0.4)
    platform.start_api()
    frozen = platform.start_worker(VIDEO)
    media_id = platform.upload(clips.work, "work.mp4")
    platform.encoder(frozen)
    below = identities(descendants(frozen.pid))
    frozen.send(signal.SIGSTOP)  # its encoder goes on, and ends, while it sleeps
    heir = platform.start_worker(VIDEO)
    until(lambda: platform.main_job(media_id)["fence"] == 2, seconds=15, why="nobody took over")
    platform.encoder(heir)
    before = platform.transitions(media_id)

    frozen.send(signal.SIGCONT)
    until(
        lambda: any(e["event"] == "attempt_lost" for e in frozen.events()),
        seconds=10,
        why="it has not seen that its lease is lost",
    )
    fences = [m["fence"] for m in platform.transitions(media_id)[len(before) :]]
    assert set(fences) <= {2}, "the old worker wrote after it had lost the lease"
    platform.wait_for_state(media_id, "ready")
    assert platform.main_job(media_id)["fence"] == 2
    assert [a["outcome"] for a in platform.attempts(media_id)] == ["lost", "completed"]
    platform.assert_path_is_legal(media_id)
    platform.assert_published_once(media_id)
    platform.assert_nothing_left()
    assert_gone([b for b in below if b[0] in platform.tools(frozen)], seconds=1)

    # It is of use again.
    heir.stop()
    photo = platform.upload(clips.photo, "photo.jpg")
    platform.wait_for_state(photo, "ready")
    assert platform.attempts(photo)[0]["worker"].split(".")[-2] == str(frozen.pid)


def test_a_job_that_kills_every_worker_is_buried_after_three_deaths_and_can_be_replayed(
    make_platform: Make, clips: Clips
) -> None:
    platform = make_platform(lease_seconds=1.5, self_stop_seconds=1.2, beat_seconds=0.3)
    platform.start_api()
    media_id = platform.upload(clips.work, "work.mp4")
    platform.start_worker("maintenance=1")
    for _ in range(3):
        worker = platform.start_worker("video=1")
        platform.encoder(worker)
        worker.kill()
    body = platform.wait_for_state(media_id, "failed")
    assert body["error"]["code"] == "worker_crashed"
    job = platform.main_job(media_id)
    assert (job["dead_letter"], job["attempt"], job["crashes"]) == (True, 3, 3)
    assert [a["outcome"] for a in platform.attempts(media_id)] == ["lost", "lost", "lost"]

    replayed = platform.http.post(f"/v1/jobs/{body['job']['id']}/replay")
    assert replayed.status_code == 202
    platform.start_worker("video=1")
    again = platform.wait_for_state(media_id, "ready")
    assert again["generation"] == 2
    assert again["error"] is None
    assert len(platform.attempts(media_id)) == 4, "its history is gone"
    platform.assert_path_is_legal(media_id)
    platform.assert_published_once(media_id)
    platform.assert_nothing_left()


def test_a_worker_killed_while_it_publishes_shows_nothing_half_done(
    make_platform: Make, clips: Clips
) -> None:
    """Its objects lie under their final names already, and the manifest is not written yet."""
    platform = make_platform(lease_seconds=2, self_stop_seconds=1.5, beat_seconds=0.4)
    platform.start_api()
    doomed = platform.start_worker("image=1,maintenance=1")
    media_id = platform.upload(clips.photo, "photo.jpg")
    platform.wait_for_state(media_id, "ready")
    with platform.holding("LOCK TABLE variants IN EXCLUSIVE MODE"):
        second = platform.upload(clips.photo, "again.jpg")
        until(lambda: platform.files("media", second), seconds=20, why="it does not publish")
        until(lambda: platform.waiting_for_locks() > 0, seconds=10, why="nobody waits")
        laid_out = platform.files("media", second)
        doomed.kill()
    assert laid_out
    body = platform.get(second)
    assert body["state"] in ("processing", "queued")
    assert body["variants"] == []
    platform.start_worker("image=1,maintenance=1")
    platform.wait_for_state(second, "ready")
    assert [a["outcome"] for a in platform.attempts(second)] == ["lost", "completed"]
    platform.assert_path_is_legal(second)
    platform.assert_published_once(second)
    platform.start_worker("maintenance=1")  # sweeps what is staged at once, not after half a minute
    platform.assert_nothing_left(seconds=10)


def test_two_workers_never_share_a_job(make_platform: Make, clips: Clips) -> None:
    platform = make_platform()
    platform.start_api()
    platform.start_workers(2, "image=3,maintenance=1")
    sent = [platform.upload(clips.red, f"{n}.jpg") for n in range(24)]
    for media_id in sent:
        platform.wait_for_state(media_id, "ready")
        assert platform.main_job(media_id)["fence"] == 1
        platform.assert_path_is_legal(media_id)
        platform.assert_published_once(media_id)
    workers = {row["worker"] for row in platform.rows("SELECT worker FROM attempts")}
    assert len(workers) == 2, "one of them did everything"
    platform.assert_nothing_left()


def test_one_worker_mixes_up_no_pictures_and_keeps_no_file_open(
    platform: Platform, clips: Clips
) -> None:
    platform.start_api()
    worker = platform.start_worker("image=1,maintenance=1")
    opened: list[int] = []
    for turn in range(20):
        red = platform.upload(clips.red, "picture.jpg")
        blue = platform.upload(clips.blue, "picture.jpg")
        for media_id, color in ((red, "red"), (blue, "blue")):
            body = platform.wait_for_state(media_id, "ready")
            average = body["preview"]["average_color"]
            channels = [int(average[n : n + 2], 16) for n in (1, 3, 5)]
            strongest = ("red", "green", "blue")[channels.index(max(channels))]
            assert strongest == color, f"turn {turn}: {average}"
        if turn >= 2:
            opened.append(open_files(worker.pid))
    assert max(opened[-5:]) <= max(opened[:5]) + 2, f"open files grow: {opened}"
    same = platform.rows("SELECT count(DISTINCT set_id) FROM media WHERE state = 'ready'")
    assert same[0][0] == 2, "the same picture gave different outputs"
    platform.assert_nothing_left()
    assert os.path.exists(f"/proc/{worker.pid}")
    assert media_uuid(red) != media_uuid(blue)

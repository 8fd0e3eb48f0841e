"""People change their minds: what is canceled stops, what is deleted is gone."""

from __future__ import annotations

import os
import signal
import threading

import httpx2 as httpx
from tests.stories.clips import Clips
from tests.stories.harness import (
    Platform,
    assert_gone,
    identities,
    media_uuid,
    until,
)


def test_a_canceled_job_stops_its_tools(platform: Platform, clips: Clips) -> None:
    platform.start_api()
    worker = platform.start_worker("image=1,video=1,maintenance=1")
    media_id = platform.upload(clips.work, "work.mp4")
    encoder = identities([platform.freeze_encoder(worker)])
    job = platform.get(media_id)["job"]["id"]

    asked = platform.http.post(f"/v1/jobs/{job}/cancel")
    assert asked.status_code == 202
    assert asked.json()["cancel_requested"] is True
    body = platform.wait_for_state(media_id, "failed", seconds=10)
    assert body["error"]["code"] == "canceled"
    assert_gone(encoder, seconds=1)
    assert platform.main_job(media_id)["state"] == "canceled"
    assert [a["outcome"] for a in platform.attempts(media_id)] == ["canceled"]
    again = platform.http.post(f"/v1/jobs/{job}/cancel")
    assert (again.status_code, again.json()["state"]) == (200, "canceled")
    platform.assert_path_is_legal(media_id)
    platform.assert_nothing_left()
    assert platform.files("media", media_id) == []

    # One that waits is canceled on the spot, and its media can be processed again.
    blocker = platform.upload(clips.work, "blocker.mp4")
    held = platform.freeze_encoder(worker)
    waiting = platform.upload(clips.clip, "waiting.mp4")
    queued = platform.get(waiting)["job"]["id"]
    assert platform.http.post(f"/v1/jobs/{queued}/cancel").json()["state"] == "canceled"
    assert platform.get(waiting)["error"]["code"] == "canceled"
    os.kill(held, signal.SIGCONT)
    platform.wait_for_state(blocker, "ready")
    assert platform.main_job(waiting)["attempt"] == 0
    restarted = platform.http.post(f"/v1/media/{waiting}/process", json={})
    assert restarted.status_code == 202, restarted.text
    until(lambda: platform.get(waiting)["state"] == "ready", seconds=30, why="it is not processed")
    platform.assert_path_is_legal(waiting)
    platform.assert_nothing_left()


def test_a_deleted_media_is_gone_while_it_is_processed_and_after(
    platform: Platform, clips: Clips
) -> None:
    platform.start_api()
    worker = platform.start_worker("image=1,video=1,maintenance=1")
    ready = platform.upload(clips.photo, "photo.jpg")
    body = platform.wait_for_state(ready, "ready")
    url = body["variants"][0]["url"]
    assert httpx.get(url).status_code == 200
    busy = platform.upload(clips.work, "work.mp4")
    encoder = identities([platform.freeze_encoder(worker)])

    for media_id in (ready, busy):
        answer = platform.http.delete(f"/v1/media/{media_id}")
        assert answer.status_code == 202
        for path in ("", "/variants/w320.jpg", "/variants/video.mp4"):
            gone = platform.http.get(f"/v1/media/{media_id}{path}")
            assert (gone.status_code, gone.json()["code"]) == (410, "gone")
        assert platform.complete(media_id).status_code == 410
        assert platform.http.delete(f"/v1/media/{media_id}").status_code == 410
    assert httpx.get(url).status_code == 404
    assert_gone(encoder, seconds=5)
    for media_id in (ready, busy):
        until(
            lambda media_id=media_id: (
                not any(  # type: ignore[misc]
                    platform.files(area, media_id) for area in ("uploads", "media", "stage")
                )
            ),
            seconds=10,
            why="bytes are left",
        )
        row = platform.media_row(media_id)
        assert (row["filename"], row["preview"], row["info"], row["sha256"]) == (None,) * 4
        platform.assert_path_is_legal(media_id)
    until(
        lambda: not platform.rows("SELECT 1 FROM erasures"),
        seconds=10,
        why="the erasures are not settled",
    )
    assert platform.main_job(busy)["state"] == "canceled"
    listed = platform.http.get("/v1/media").json()["data"]
    assert listed == []
    platform.assert_nothing_left()
    assert platform.files("uploads") == []
    assert platform.files("media") == []


def test_a_deletion_and_a_worker_that_want_the_same_rows_both_succeed(
    platform: Platform, clips: Clips
) -> None:
    """The worker holds its job and wants the media; the other way round is a deadlock."""
    platform.start_api()
    worker = platform.start_worker("image=1,video=1,maintenance=1")
    media_id = platform.upload(clips.work, "work.mp4")
    encoder = platform.freeze_encoder(worker)
    job_id = platform.main_job(media_id)["id"]
    answers: list[httpx.Response] = []
    with platform.holding("SELECT 1 FROM jobs WHERE id = $1 FOR UPDATE", job_id):
        os.kill(encoder, signal.SIGCONT)
        until(
            lambda: platform.rows(
                "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                " AND application_name = 'mediamill worker' AND datname = current_database()"
            ),
            seconds=20,
            why="the worker wants nothing of its job",
        )
        delete = threading.Thread(
            target=lambda: answers.append(platform.http.delete(f"/v1/media/{media_id}"))
        )
        delete.start()
        until(
            lambda: platform.rows(
                "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                " AND application_name = 'mediamill api' AND datname = current_database()"
            ),
            seconds=10,
            why="the deletion does not wait for the job",
        )
    delete.join(20)
    assert [a.status_code for a in answers] == [202]
    until(
        lambda: platform.main_job(media_id)["state"] in ("canceled", "completed"),
        seconds=15,
        why="the job goes on",
    )
    assert len(platform.attempts(media_id)) == 1
    until(lambda: not platform.rows("SELECT 1 FROM erasures"), seconds=10, why="bytes are left")
    platform.assert_path_is_legal(media_id)
    platform.assert_nothing_left()


def test_a_media_with_a_time_to_live_deletes_itself(platform: Platform, clips: Clips) -> None:
    platform.start_api()
    platform.start_worker("image=1,maintenance=1")
    kept = platform.upload(clips.photo, "kept.jpg")
    passing = platform.upload(clips.photo, "passing.jpg", ttl_seconds=4)
    unused = platform.open_slot(100, "unused.jpg", ttl_seconds=1)["id"]
    assert platform.get(passing)["expires_at"] is not None
    for media_id in (passing, unused):
        until(
            lambda media_id=media_id: (  # type: ignore[misc]
                platform.http.get(f"/v1/media/{media_id}").status_code == 410
            ),
            seconds=20,
            why="it is still there",
        )
    until(lambda: not platform.rows("SELECT 1 FROM erasures"), seconds=10, why="bytes are left")
    assert platform.files("uploads", passing) == []
    assert platform.files("media", passing) == []
    platform.wait_for_state(kept, "ready")
    platform.assert_published_once(kept)
    reason = platform.value(
        "SELECT data ->> 'reason' FROM events WHERE media_id = $1 AND type = 'media.deleted'",
        media_uuid(passing),
    )
    assert reason == "expired"
    platform.assert_nothing_left()

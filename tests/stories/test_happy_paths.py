"""From the first byte to the last variant, as a client sees it."""

from __future__ import annotations

import os
import signal
from datetime import datetime
from itertools import pairwise
from typing import Any

import httpx2 as httpx
from tests.stories.clips import Clips, size_of
from tests.stories.harness import Body, Platform, media_uuid, until


def test_an_image_shows_its_placeholder_first_and_then_every_variant(
    platform: Platform, clips: Clips
) -> None:
    platform.start_api()
    platform.start_worker()
    media_id = platform.upload(clips.large_photo, "large.jpg")

    early = until(lambda: _with_preview(platform, media_id), seconds=20, why="no placeholder")
    assert early["state"] == "processing", "the placeholder came with the variants"
    assert (early["width"], early["height"]) == (4000, 3000)
    assert early["variants"] == []
    assert early["preview"]["blurhash"]
    assert early["poll_after_seconds"] >= 1

    body = platform.wait_for_state(media_id, "ready")
    assert body["progress"] == 100
    names = {v["name"] for v in body["variants"]}
    assert names == {f"w{w}.{e}" for w in (320, 640, 1280, 1920) for e in ("avif", "webp", "jpg")}
    _assert_served_safely(platform, body)
    platform.assert_path_is_legal(media_id)
    platform.assert_published_once(media_id)
    platform.assert_nothing_left()
    _assert_timeline_tiles(platform, media_id)
    assert platform.main_job(media_id)["attempt"] == 1


def _with_preview(platform: Platform, media_id: str) -> Body | None:
    body = platform.get(media_id)
    assert body["state"] != "failed", body["error"]
    return body if body["preview"] else None


def _assert_served_safely(platform: Platform, body: Body) -> None:
    variant = next(v for v in body["variants"] if v["name"] == "w640.jpg")
    with httpx.Client(timeout=20) as anyone:
        whole = anyone.get(variant["url"])
        assert whole.status_code == 200
        assert whole.headers["content-type"] == "image/jpeg"
        assert whole.headers["x-content-type-options"] == "nosniff"
        assert "sandbox" in whole.headers["content-security-policy"]
        assert len(whole.content) == variant["bytes"]
        assert size_of(whole.content) == (640, 480)
        etag = whole.headers["etag"]
        assert variant["sha256"] in etag

        part = anyone.get(variant["url"], headers={"Range": "bytes=10-19"})
        assert part.status_code == 206
        assert part.content == whole.content[10:20]
        assert part.headers["content-range"] == f"bytes 10-19/{variant['bytes']}"
        assert part.headers["x-content-type-options"] == "nosniff"
        beyond = anyone.get(variant["url"], headers={"Range": f"bytes={variant['bytes']}-"})
        assert beyond.status_code == 416
        same = anyone.get(variant["url"], headers={"If-None-Match": etag})
        assert (same.status_code, same.content) == (304, b"")

        bent = variant["url"].replace("w640.jpg", "w320.jpg")
        assert anyone.get(bent).status_code == 403, "the signature covers the name"
        assert anyone.get(variant["url"].partition("?")[0]).status_code == 403
    aside = platform.http.get(f"/v1/media/{body['id']}/variants/w640.jpg", follow_redirects=True)
    assert aside.content == whole.content
    status = platform.http.get(f"/v1/media/{body['id']}")
    again = platform.http.get(
        f"/v1/media/{body['id']}", headers={"If-None-Match": status.headers["etag"]}
    )
    assert again.status_code == 304


def _assert_timeline_tiles(platform: Platform, media_id: str) -> None:
    timeline: dict[str, Any] = platform.http.get(f"/v1/media/{media_id}/timeline").json()
    segments = timeline["segments"]
    for this, following in pairwise(segments):
        assert this["end"] == following["start"]
    row = platform.media_row(media_id)
    first, last = (datetime.fromisoformat(segments[n][e]) for n, e in ((0, "start"), (-1, "end")))
    assert abs((first - row["created_at"]).total_seconds()) < 0.5
    assert abs((last - row["state_at"]).total_seconds()) < 0.5
    assert abs(timeline["total_seconds"] - (last - first).total_seconds()) < 1e-3
    assert all(s["seconds"] >= 0 for s in segments)
    assert timeline["sentence"].endswith("it is ready.")
    told = {o["name"]: o["seconds"] for s in segments for o in s["outputs"]}
    made = {v["name"] for v in platform.get(media_id)["variants"]}
    assert told, "no output says how long it took"
    assert told.keys() <= made
    assert all(seconds > 0 for seconds in told.values())


def test_a_video_shows_its_preview_and_its_progress_and_holds_up_no_image(
    platform: Platform, clips: Clips
) -> None:
    platform.start_api()
    worker = platform.start_worker()
    media_id = platform.upload(clips.long_work, "holiday.mp4")
    shown: list[float] = []
    encoder = platform.freeze_encoder(worker)
    try:
        seen = until(
            lambda: _with_preview(platform, media_id), seconds=30, why="the preview did not come"
        )
        assert seen["state"] == "processing"
        assert (seen["width"], seen["height"]) == (960, 540)
        photo = platform.upload(clips.photo, "photo.jpg")
        platform.wait_for_state(photo, "ready")
        assert platform.get(media_id)["state"] == "processing"
    finally:
        os.kill(encoder, signal.SIGCONT)

    def look() -> Body | None:
        body = platform.get(media_id)
        assert body["state"] in ("processing", "ready"), body["error"]
        shown.append(body["progress"])
        return body if body["state"] == "ready" else None

    body = until(look, seconds=50, why="the video is not ready")
    assert shown == sorted(shown)
    assert len({p for p in shown if 5 < p < 100}) >= 2, f"no progress to see: {shown}"
    assert abs(body["duration_seconds"] - 8) < 0.1
    by_name = {v["name"]: v for v in body["variants"]}
    assert set(by_name) == {"video.mp4", "poster.jpg"}
    video = httpx.get(by_name["video.mp4"]["url"]).content
    assert video.index(b"moov") < video.index(b"mdat"), "the index is not in front"
    assert b"mp4a" in video[: video.index(b"mdat")], "its sound is missing"
    assert abs(by_name["video.mp4"]["duration_seconds"] - 8) < 0.1
    poster = httpx.get(by_name["poster.jpg"]["url"]).content
    assert size_of(poster) == (960, 540)
    (preview,) = platform.jobs(media_id, "preview")
    assert preview["state"] == "completed"
    assert platform.main_job(media_id)["attempt"] == 1
    for each in (media_id, photo):
        platform.assert_path_is_legal(each)
        platform.assert_published_once(each)
    platform.assert_nothing_left()
    _assert_timeline_tiles(platform, media_id)


def test_slots_are_not_shared_images_and_previews_pass_busy_video_slots(
    platform: Platform, clips: Clips
) -> None:
    platform.start_api()
    worker = platform.start_worker("image=1,video=1,maintenance=1")
    first = platform.upload(clips.work, "first.mp4")
    encoder = platform.freeze_encoder(worker)
    try:
        second = platform.upload(clips.clip, "second.mp4")
        photo = platform.upload(clips.photo, "photo.jpg")
        platform.wait_for_state(photo, "ready")
        preview = until(
            lambda: _with_preview(platform, second), seconds=20, why="its preview waits"
        )
        assert preview["state"] == "queued", "the second video took a slot that is not its own"
        assert preview["job"]["position"] == 1
        assert platform.get(first)["state"] == "processing"
        busy = platform.rows("SELECT queue FROM jobs WHERE state = 'processing'")
        assert [row["queue"] for row in busy] == ["video"]
    finally:
        os.kill(encoder, signal.SIGCONT)
    for media_id in (first, second):
        platform.wait_for_state(media_id, "ready")
        platform.assert_path_is_legal(media_id)
    ran = platform.rows(
        "SELECT started_at, finished_at FROM jobs WHERE queue = 'video' ORDER BY started_at"
    )
    assert ran[0]["finished_at"] <= ran[1]["started_at"], "two videos shared one slot"
    assert platform.jobs(photo)[0]["finished_at"] < ran[0]["finished_at"]
    platform.assert_nothing_left()


def test_a_file_is_what_its_bytes_say_whatever_it_was_announced_as(
    platform: Platform, clips: Clips
) -> None:
    """A video that comes as an image, and an image that comes as a video, end as what they are."""
    platform.start_api()
    platform.start_worker()
    film = platform.upload(clips.clip, "film.jpg")
    photo = platform.upload(clips.photo, "photo.mp4")
    assert platform.wait_for_state(film, "ready")["kind"] == "video"
    assert platform.wait_for_state(photo, "ready")["kind"] == "image"
    for media_id in (film, photo):
        assert platform.main_job(media_id)["attempt"] == 1, "a change of queue is no failure"
        assert [a["outcome"] for a in platform.attempts(media_id)] == ["rerouted", "completed"]
        platform.assert_path_is_legal(media_id)
        platform.assert_published_once(media_id)
    assert platform.media_row(film)["preview"] is not None
    assert platform.value("SELECT count(*) FROM media WHERE id = $1", media_uuid(film)) == 1
    platform.assert_nothing_left()


def test_what_is_published_stays_served_while_it_is_made_again_and_if_that_fails(
    platform: Platform, clips: Clips
) -> None:
    platform.start_api()
    worker = platform.start_worker("image=1,maintenance=1")
    media_id = platform.upload(clips.photo, "photo.jpg")
    first = platform.wait_for_state(media_id, "ready")["variants"]
    worker.stop()

    again = platform.http.post(f"/v1/media/{media_id}/process", json={})
    assert again.status_code == 202
    assert platform.http.post(f"/v1/media/{media_id}/process", json={}).status_code == 409
    body = platform.get(media_id)
    assert (body["state"], body["generation"]) == ("queued", 2)
    _assert_serves(platform, body, first)
    platform.start_worker("image=1,maintenance=1")
    platform.wait_for_state(media_id, "ready")
    platform.assert_path_is_legal(media_id)
    platform.assert_published_once(media_id)

    platform.files("uploads", media_id)[0].unlink()
    platform.http.post(f"/v1/media/{media_id}/process", json={})
    body = platform.wait_for_state(media_id, "failed")
    assert (body["error"]["code"], body["generation"]) == ("source_missing", 3)
    _assert_serves(platform, body, first)
    assert [j["state"] for j in platform.jobs(media_id)] == ["completed", "completed", "failed"]
    platform.assert_path_is_legal(media_id)
    platform.assert_nothing_left()


def _assert_serves(platform: Platform, body: Body, expected: list[Body]) -> None:
    assert [v["sha256"] for v in body["variants"]] == [v["sha256"] for v in expected]
    for variant in body["variants"]:
        assert len(httpx.get(variant["url"]).content) == variant["bytes"]

"""A file that cannot be processed ends at its first attempt with its reason, and leaves nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from tests.stories.clips import Clips, cut
from tests.stories.harness import Platform

Broken = Callable[[Clips], bytes]
CASES: dict[str, tuple[str, Broken, set[str]]] = {
    "text": ("notes.jpg", lambda c: b"These are my notes.\n" * 50, {"unsupported_format"}),
    "jpeg": ("cut.jpg", lambda c: cut(c.photo, 0.6), {"truncated_input"}),
    "mp4-without-index": (
        "cut.mp4",
        lambda c: cut(c.clip, 0.7),
        {"truncated_input", "corrupt_input"},
    ),
    "mp4-index-first": (
        "first.mp4",
        lambda c: cut(c.clip_index_first, 0.6),
        {"truncated_input", "corrupt_input"},
    ),
    "bomb": ("bomb.png", lambda c: c.bomb, {"resource_limit"}),
    "noise": ("noise.mp4", lambda c: bytes(range(256)) * 64, {"unsupported_format"}),
    "playlist": (
        "list.mp4",
        lambda c: b"#EXTM3U\n#EXT-X-VERSION:3\n#EXTINF:5,\n/etc/passwd\n#EXT-X-ENDLIST\n",
        {"unsafe_content"},
    ),
}


def test_each_broken_file_fails_once_with_its_reason(platform: Platform, clips: Clips) -> None:
    platform.start_api()
    platform.start_worker()
    sent = {
        case: platform.upload(make(clips), filename) for case, (filename, make, _) in CASES.items()
    }
    for case, media_id in sent.items():
        body = platform.wait_for_state(media_id, "failed")
        assert body["error"]["code"] in CASES[case][2], (case, body["error"])
        assert body["error"]["advice"]
        assert body["error"]["retryable"] is False
        assert body["variants"] == []
        job = platform.main_job(media_id)
        assert (job["attempt"], job["state"], job["dead_letter"]) == (1, "failed", False)
        assert "failed" in [a["outcome"] for a in platform.attempts(media_id)]
        platform.assert_path_is_legal(media_id)
    limit = platform.get(sent["bomb"])["error"]["limit"]
    assert limit["allowed"] < limit["seen"]
    assert limit["seen"] in (32000, 32000**2)
    shown = platform.get(sent["playlist"])["error"]
    assert "passwd" not in str(shown), "what the file says is not repeated"

    # The worker is as good as new.
    platform.wait_for_state(platform.upload(clips.photo, "photo.jpg"), "ready")
    assert platform.rows("SELECT 1 FROM jobs WHERE state IN ('queued', 'processing')") == []
    platform.assert_nothing_left()


def test_bytes_that_are_not_the_announced_ones_or_change_later_are_refused(
    platform: Platform, clips: Clips
) -> None:
    platform.start_api()
    other = platform.upload(clips.photo, "photo.jpg", sha256=hashlib.sha256(b"").hexdigest())
    changed = platform.upload(clips.red, "red.jpg")
    (stored,) = platform.files("uploads", changed)
    stored.chmod(0o644)
    stored.write_bytes(clips.red[::-1])
    missing = platform.upload(clips.blue, "blue.jpg")
    platform.files("uploads", missing)[0].unlink()
    platform.start_worker("image=1,maintenance=1")
    for media_id, code in (
        (other, "checksum_mismatch"),
        (changed, "source_changed"),
        (missing, "source_missing"),
    ):
        assert platform.wait_for_state(media_id, "failed")["error"]["code"] == code
        assert platform.main_job(media_id)["attempt"] == 1
        platform.assert_path_is_legal(media_id)
    platform.assert_nothing_left()


def test_an_empty_file_is_refused_at_the_door(platform: Platform) -> None:
    platform.start_api()
    slot = platform.http.post("/v1/media", json={"size": 0, "filename": "a.jpg"})
    form = platform.post_form(b"", "a.jpg")
    for answer in (slot, form):
        assert answer.status_code == 422
        assert answer.json()["code"] == "empty_input"
        assert answer.headers["content-type"] == "application/problem+json"
    assert platform.rows("SELECT 1 FROM media") == []
    assert platform.files("uploads") == []
    assert platform.files(".incoming") == []


def test_asking_for_a_failed_media_does_not_try_it_again(platform: Platform, clips: Clips) -> None:
    platform.start_api()
    platform.start_worker()
    media_id = platform.upload(cut(clips.photo, 0.5), "cut.jpg")
    platform.wait_for_state(media_id, "failed")
    before = platform.attempts(media_id), platform.transitions(media_id)
    for _ in range(50):
        assert platform.get(media_id)["state"] == "failed"
        assert platform.complete(media_id).status_code == 200
    assert (platform.attempts(media_id), platform.transitions(media_id)) == before
    assert platform.value("SELECT count(*) FROM mediamill_tickets") == 0
    assert len(platform.jobs(media_id)) == 1

"""A film as a player meets it: playlists and manifests under one signed grant, the smallest size
before the others, and a long encode shared by workers that may die."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx2 as httpx
import m3u8
import pytest
from tests.stories.clips import Clips
from tests.stories.conftest import Make
from tests.stories.harness import Body, Platform, Process, media_uuid, until

from mediamill import tools

LADDER = [
    {"short_side": 180, "max_video_kbps": 400},
    {"short_side": 96, "max_video_kbps": 150},
]


def recipe(folder: Path, name: str, *video: dict[str, Any], **more: Any) -> None:
    """An operator's recipe."""
    folder.mkdir(exist_ok=True)
    body = {"name": name, "version": 1, "video": list(video), **more}
    (folder / f"{name}.v1.json").write_text(json.dumps(body))


@pytest.fixture
def film(make_platform: Make, tmp_path: Path) -> Platform:
    recipes = tmp_path / "recipes"
    hls = {"type": "hls", "ladder": LADDER, "preset": "ultrafast", "segment_seconds": 2.0}
    mp4 = {"type": "mp4", "short_side": 180, "preset": "ultrafast", "max_video_kbps": 400}
    recipe(recipes, "film", hls, {"type": "poster"}, {"type": "storyboard"})
    recipe(recipes, "shared", {**hls, "smallest_first": False}, mp4, pieces=True)
    return make_platform(recipes_dir=recipes, piece_seconds=2)


def _decoded(url: str) -> tuple[int, float]:
    """Frames and seconds that a player gets from an address, read as any player would."""
    player = tools.resolve().ffmpeg
    if ".m3u8" in url:
        # The release that encodes plays the first only of several byte ranges of one file over
        # HTTP; the older one that comes beside ffprobe plays all.
        beside = tools.resolve().ffprobe
        player = beside.with_name(beside.name.replace("ffprobe", "ffmpeg"))
    done = subprocess.run(
        [
            *(player, "-v", "error", "-nostdin", "-xerror"),
            *("-i", url, "-map", "0:v:0", "-progress", "pipe:1", "-f", "null", "-"),
        ],
        capture_output=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    said = dict(line.split("=") for line in done.stdout.decode().split() if "=" in line)
    return int(said["frame"]), int(said["out_time_us"]) / 1e6


@pytest.mark.timeout(120)
def test_a_player_needs_one_address_and_sees_the_smallest_size_first(
    film: Platform, clips: Clips
) -> None:
    film.start_api()
    worker = film.start_worker()
    media_id = film.upload(clips.clip, "film.mp4", recipe="film")

    early = until(lambda: _with_master(film, media_id), seconds=40, why="nothing plays early")
    if early["state"] == "processing":
        assert {v["name"] for v in early["variants"]} >= {"hls/master.m3u8", "hls/96p.mp4"}
        assert not [v for v in early["variants"] if v["name"] == "hls/180p.mp4"]
    body = film.wait_for_state(media_id, "ready")
    ready_early = film.value(
        "SELECT count(*) FROM events WHERE media_id = $1 AND type = 'variant.ready'",
        media_uuid(media_id),
    )
    assert ready_early == 1
    by_name = {v["name"]: v for v in body["variants"]}
    assert {"hls/180p.mp4", "hls/96p.mp4", "hls/audio-und.mp4", "poster.jpg"} <= set(by_name)

    master_url = by_name["hls/master.m3u8"]["url"]
    with httpx.Client(timeout=20, follow_redirects=True) as anyone:
        master = m3u8.loads(anyone.get(master_url).text, uri=master_url)
        sizes = [p.stream_info.resolution for p in master.playlists]
        assert sizes == [(170, 96), (320, 180), None]
        assert [p.stream_info.frame_rate for p in master.playlists] == [25.0, 25.0, None]
        for playlist in master.playlists:
            uri = urljoin(master_url, playlist.uri)
            segments = m3u8.loads(anyone.get(uri).text, uri=uri)
            assert segments.is_endlist
            assert abs(sum(s.duration for s in segments.segments) - 3.0) < 0.1
            first = anyone.get(
                urljoin(uri, segments.segments[0].uri), headers={"Range": "bytes=0-99"}
            )
            assert first.status_code == 206
            assert first.headers["access-control-allow-origin"] == "*"
        assert anyone.get(by_name["storyboard.vtt"]["url"]).text.startswith("WEBVTT")
        _assert_grant_is_narrow(anyone, master_url)
    frames, seconds = _decoded(master_url)
    assert (frames, round(seconds, 1)) == (75, 3.0)
    assert _decoded(by_name["hls/manifest.mpd"]["url"])[0] == 75
    aside = film.http.get(f"/v1/media/{media_id}/variants/hls/master.m3u8")
    assert aside.status_code == 307
    assert "/play/" in aside.headers["location"]
    film.assert_path_is_legal(media_id)
    film.assert_published_once(media_id)
    film.assert_nothing_left()
    assert worker.alive


def test_the_status_tells_how_far_each_output_is(film: Platform, clips: Clips) -> None:
    film.start_api()
    worker = film.start_worker()
    media_id = film.upload(clips.long_work, "film.mp4", recipe="film")

    def look() -> list[Body] | None:
        body = film.get(media_id)
        if body["state"] == "ready":
            raise AssertionError("it was never seen")
        outputs = [o for o in body["job"]["outputs"] if o["percent"]]
        return outputs or None

    encoder = film.encoder(worker)
    outputs = until(look, seconds=40, why="no output says how far it is", every_seconds=0.02)
    assert encoder
    assert {o["name"] for o in outputs} <= {"hls-96p", "hls-180p", "sound-1-128.m4a"}
    assert all(0 < o["percent"] <= 100 for o in outputs)
    body = film.wait_for_state(media_id, "ready")
    assert body["job"]["outputs"] == []


def _with_master(film: Platform, media_id: str) -> Body | None:
    body = film.get(media_id)
    assert body["state"] != "failed", body["error"]
    names = {v["name"] for v in body["variants"]}
    return body if "hls/master.m3u8" in names else None


def _assert_grant_is_narrow(anyone: httpx.Client, url: str) -> None:
    head, _, tail = url.partition("/play/")
    token, _, path = tail.partition("/")
    tenant, _, rest = path.partition("/")
    assert anyone.get(f"{head}/play/{token}/other/{rest}").status_code == 403
    assert anyone.get(f"{head}/play/{token}x/{path}").status_code == 403
    later = f"{int(token.split('.')[0]) + 60}.{token.partition('.')[2]}"
    assert anyone.get(f"{head}/play/{later}/{path}").status_code == 403
    assert anyone.get(f"{head}/play/{token}/{tenant}/x").status_code == 404
    assert anyone.get(url.replace("master.m3u8", "nothing.m3u8")).status_code == 404
    assert anyone.get(url.replace("hls/master.m3u8", "../master.m3u8")).status_code in (403, 404)


@pytest.mark.timeout(180)
def test_a_long_film_is_shared_and_a_killed_worker_costs_a_piece(
    film: Platform, clips: Clips
) -> None:
    film.start_api()
    workers = [film.start_worker("image=1,video=1"), film.start_worker("video=1")]
    film.start_worker("maintenance=1")
    media_id = film.upload(clips.long_work, "film.mp4", recipe="shared")
    until(lambda: _pieces_done(film, media_id) >= 1, seconds=40, why="no piece was made")
    victim, encoder = _busy(film, workers)
    film.errors_expected = True
    victim.kill()
    shown: list[float] = []

    def look() -> Body | None:
        body = film.get(media_id)
        assert body["state"] in ("processing", "ready"), body["error"]
        shown.append(body["progress"])
        return body if body["state"] == "ready" else None

    body = until(look, seconds=100, why="the film is not ready")
    assert shown == sorted(shown)
    assert any(20 < percent < 90 for percent in shown), "it does not tell how far the pieces are"
    assert encoder
    by_name = {v["name"]: v for v in body["variants"]}
    frames, seconds = _decoded(by_name["hls/master.m3u8"]["url"])
    assert (frames, round(seconds, 1)) == (200, 8.0)
    assert _decoded(by_name["video.mp4"]["url"])[0] == 200

    (parent,) = film.jobs(media_id)
    children = film.jobs(media_id, "job")
    pieces = [c for c in children if c["kind"] == "video.piece"]
    assert len(pieces) == 4
    assert [c["kind"] for c in children].count("video.sound") == 1
    assert {c["state"] for c in children} == {"completed"}
    assert {c["worker"] for c in children} <= {w["worker"] for w in _attempts(film, media_id)}
    lost = [a for a in _attempts(film, media_id) if a["outcome"] == "lost"]
    assert len(lost) == 1, "the others keep what they have"
    assert len(_attempts(film, media_id)) == len(children) + 1
    assert parent["attempt"] == 1
    kept = [p for p in film.files("media", media_id) if "pieces-" in str(p)]
    assert kept == [], "the pieces stay though they are joined"
    film.assert_path_is_legal(media_id)
    film.assert_published_once(media_id)
    film.start_worker("image=1")  # clears what the killed one left
    film.assert_nothing_left()


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_killed_join_encodes_nothing_again(film: Platform, clips: Clips) -> None:
    film.start_api()
    film.start_worker("image=1,maintenance=1")
    worker = film.start_worker("video=1")
    media_id = film.upload(clips.long_work, "film.mp4", recipe="shared")
    until(
        lambda: film.get(media_id)["stage"] in ("join", "package"),
        seconds=50,
        why="nothing was joined",
        every_seconds=0.02,
    )
    film.errors_expected = True
    worker.kill()
    film.start_worker("video=1")
    film.wait_for_state(media_id, "ready", seconds=50)
    assert {a["outcome"] for a in _attempts(film, media_id)} == {"completed"}
    assert [a["outcome"] for a in film.attempts(media_id)] == ["waiting", "lost", "completed"]
    film.assert_path_is_legal(media_id)
    film.assert_published_once(media_id)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("action", ["kill9", "raise"])
@pytest.mark.parametrize(
    ("name", "step"), [("film", "attempt.published_early"), ("shared", "attempt.kept")]
)
def test_a_film_is_published_once_whatever_step_breaks(
    film: Platform, clips: Clips, name: str, step: str, action: str
) -> None:
    film.errors_expected = True
    film.start_api()
    film.start_worker("image=1,maintenance=1")
    doomed = film.start_worker("video=1", failpoint=f"{step}:{action}:1")
    media_id = film.upload(clips.clip, "film.mp4", recipe=name)
    if action == "kill9":
        until(lambda: not doomed.alive, seconds=60, why="it did not die")
        film.start_worker("video=1")
    film.wait_for_state(media_id, "ready", seconds=90)
    film.assert_path_is_legal(media_id)
    film.assert_published_once(media_id)
    film.start_worker("image=1")
    film.assert_nothing_left(seconds=60)  # what the dead have staged is swept within a minute


def _pieces_done(film: Platform, media_id: str) -> int:
    return sum(
        job["kind"] == "video.piece" and job["state"] == "completed"
        for job in film.jobs(media_id, "job")
    )


def _attempts(film: Platform, media_id: str) -> list[Any]:
    return film.rows(
        "SELECT a.* FROM attempts AS a JOIN jobs AS j ON (j.tenant_id, j.id) = (a.tenant_id,"
        " a.job_id) WHERE j.media_id = $1 AND j.parent_id IS NOT NULL",
        media_uuid(media_id),
    )


def _busy(film: Platform, workers: list[Process]) -> tuple[Process, int]:
    """A worker in the middle of a piece."""

    def look() -> tuple[Process, int] | None:
        for worker in workers:
            for pid in film.encoders(worker):
                return worker, pid
        return None

    return until(look, seconds=40, why="no worker encodes", every_seconds=0.01)


@pytest.mark.timeout(120)
def test_a_deleted_film_leaves_no_piece_behind(film: Platform, clips: Clips) -> None:
    film.start_api()
    film.start_worker("image=1,video=1,maintenance=1")
    media_id = film.upload(clips.long_work, "film.mp4", recipe="shared")
    until(lambda: _pieces_done(film, media_id) >= 1, seconds=40, why="no piece was made")
    assert film.http.delete(f"/v1/media/{media_id}").status_code == 202
    until(lambda: not film.files("media", media_id), seconds=20, why="bytes remain")
    states = {j["state"] for j in [*film.jobs(media_id), *film.jobs(media_id, "job")]}
    assert states <= {"completed", "canceled"}
    film.assert_path_is_legal(media_id)
    film.assert_nothing_left()


def test_subtitles_beside_a_film_are_renditions_in_what_encoding_they_ever_were(
    make_platform: Make, clips: Clips, tmp_path: Path
) -> None:
    recipes = tmp_path / "recipes"
    hls = {"type": "hls", "ladder": LADDER[1:], "preset": "ultrafast"}
    recipe(recipes, "spoken", hls, {"type": "subtitles"})
    platform = make_platform(recipes_dir=recipes)
    platform.start_api()
    platform.start_worker()
    slot = platform.open_slot(len(clips.clip), "film.mp4", recipe="spoken")
    platform.put(slot, clips.clip)
    old = b"1\r\n00:00:01,000 --> 00:00:03,000\r\nIt\x92s a caf\xe9\r\n"
    path = f"/v1/media/{slot['id']}/subtitles/en"
    answer = platform.http.put(path, content=old, headers={"Content-Type": "application/x-subrip"})
    assert answer.status_code == 200, answer.text
    assert platform.http.post(f"/v1/media/{slot['id']}/complete").status_code == 202
    body = platform.wait_for_state(slot["id"], "ready")
    urls = {v["name"]: v["url"] for v in body["variants"]}
    with httpx.Client(timeout=20, follow_redirects=True) as anyone:
        text = anyone.get(urls["subtitles-en.vtt"]).content.decode("utf-8")
        master = m3u8.loads(anyone.get(urls["hls/master.m3u8"]).text)
    assert text.startswith("WEBVTT")
    assert "00:01.000 --> 00:03.000\nIt\u2019s a caf\u00e9" in text
    (rendition,) = [m for m in master.media if m.type == "SUBTITLES"]
    assert (rendition.language, rendition.uri) == ("en", "subtitles-en.m3u8")

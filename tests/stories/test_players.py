"""A real browser plays what the platform publishes: hls.js in Chromium, from the address in the
status alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.stories.clips import Clips
from tests.stories.conftest import Make
from tests.stories.test_streaming import LADDER, recipe

from mediamill import tools

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

PAGE = """<!doctype html><video id=v muted playsinline></video><script src=/hls.js></script><script>
const said = {errors: [], levels: [], frames: 0};
const video = document.getElementById('v');
const tell = why => {
  said.why = why; said.seconds = video.currentTime; said.duration = video.duration;
  said.size = [video.videoWidth, video.videoHeight];
  said.frames = video.getVideoPlaybackQuality().totalVideoFrames;
  fetch('/told', {method: 'POST', body: JSON.stringify(said)});
};
const hls = new Hls({startLevel: 0});
hls.on(Hls.Events.ERROR, (_, e) => { said.errors.push(e.details); if (e.fatal) tell('fatal'); });
hls.on(Hls.Events.MANIFEST_PARSED, (_, m) => {
  said.levels = m.levels.map(l => [l.width, l.height, l.codecSet]);
  said.audio = m.audioTracks.length; video.play();
});
hls.on(Hls.Events.FRAG_BUFFERED, (_, f) => { said.last = f.frag.sn; });
video.addEventListener('ended', () => tell('ended'));
setTimeout(() => tell('late'), 60000);
hls.loadSource(%s); hls.attachMedia(video);
</script>"""


@contextmanager
def page(source: str, script: bytes) -> Iterator[tuple[str, threading.Event, dict[str, Any]]]:
    """A page of another origin that plays the source and tells how it went."""
    told: dict[str, Any] = {}
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = script if self.path == "/hls.js" else (PAGE % json.dumps(source)).encode()
            kind = "text/javascript" if self.path == "/hls.js" else "text/html"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            told.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()
            done.set()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", done, told
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def hls_js(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm on this machine")
    folder = tmp_path_factory.mktemp("npm")
    install = [npm, "install", "--no-audit", "--no-fund", "--silent", "hls.js@1.7.4"]
    subprocess.run(install, cwd=folder, check=True, timeout=120)
    return (folder / "node_modules/hls.js/dist/hls.min.js").read_bytes()


@pytest.fixture
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("there is no Chromium on this machine")
    return found


def play(chromium: str, source: str, hls_js: bytes) -> dict[str, Any]:
    """What the page told when it had played the source to its end, or could not."""
    with page(source, hls_js) as (url, done, told), tempfile.TemporaryDirectory() as profile:
        browser = subprocess.Popen(
            [
                *(chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--mute-audio"),
                *("--autoplay-policy=no-user-gesture-required", "--no-first-run"),
                *(f"--user-data-dir={profile}", "--remote-debugging-port=0", url),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert done.wait(90), "the page said nothing"
        finally:
            browser.kill()
            browser.wait()
    return told


def test_a_browser_plays_a_film_to_its_end(
    make_platform: Make, clips: Clips, tmp_path: Path, chromium: str, hls_js: bytes
) -> None:
    recipes = tmp_path / "recipes"
    recipe(recipes, "film", {"type": "hls", "ladder": LADDER, "segment_seconds": 2.0})
    platform = make_platform(recipes_dir=recipes)
    platform.start_api()
    platform.start_worker()
    media_id = platform.upload(clips.clip, "film.mp4", recipe="film")
    body = platform.wait_for_state(media_id, "ready")
    (source,) = [v["url"] for v in body["variants"] if v["name"] == "hls/master.m3u8"]
    told = play(chromium, source, hls_js)
    assert (told["why"], told["errors"]) == ("ended", [])
    assert [level[:2] for level in told["levels"]] == [[170, 96], [320, 180]]
    assert told["audio"] == 1
    assert told["seconds"] == pytest.approx(3.0, abs=0.15)
    assert told["duration"] == pytest.approx(3.0, abs=0.15)
    assert told["frames"] >= 60


def test_a_browser_plays_a_stream_of_sound_to_its_end(
    make_platform: Make, tmp_path: Path, chromium: str, hls_js: bytes
) -> None:
    talk = tmp_path / "talk.flac"
    make = ("-f", "lavfi", "-i", "sine=f=440:r=48000", "-t", "5", talk)
    subprocess.run([tools.resolve().ffmpeg, "-v", "error", *make], check=True)
    platform = make_platform()
    platform.start_api()
    platform.start_worker()
    media_id = platform.upload(talk.read_bytes(), "talk.flac", recipe="stream")
    body = platform.wait_for_state(media_id, "ready")
    (source,) = [v["url"] for v in body["variants"] if v["name"] == "hls/master.m3u8"]
    told = play(chromium, source, hls_js)
    assert (told["why"], told["errors"]) == ("ended", [])
    assert [level[2] for level in told["levels"]] == ["mp4a", "mp4a"]
    assert (told["size"], told["frames"]) == ([0, 0], 0)
    assert told["seconds"] == pytest.approx(5.0, abs=0.15)

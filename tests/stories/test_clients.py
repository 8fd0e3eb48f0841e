"""Upload clients that other people wrote: tus-js-client in Node, Uppy's plugins in a real browser.

They come from npm with the versions of tests/clients/package.json.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.storage.seaweed import Seaweed
from tests.stories.clips import Clips
from tests.stories.conftest import Make
from tests.stories.harness import Platform
from tests.stories.test_s3 import Bucket

from mediamill import ids

pytestmark = pytest.mark.timeout(240)
SIZE = 12_000_000


@pytest.fixture(scope="session")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clients, installed."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm on this machine")
    folder = tmp_path_factory.mktemp("clients")
    for file in (Path(__file__).parents[1] / "clients").iterdir():
        shutil.copy(file, folder)
    ran(folder, "npm", "install", "--no-audit", "--no-fund", "--silent")
    ran(folder, "npx", "esbuild", "page.js", "--bundle", "--outfile=bundle.js", "--log-level=error")
    (folder / "index.html").write_text('<meta charset="utf-8"><script src="bundle.js"></script>')
    return folder


@pytest.fixture
def page(clients: Path) -> Iterator[str]:
    """The page, on an origin of its own."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(clients)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/index.html"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(params=["local", "s3"])
def platform(request: pytest.FixtureRequest, make_platform: Make) -> Platform:
    if request.param == "local":
        return make_platform()
    server: Seaweed = request.getfixturevalue("s3_server")
    return make_platform(**server.settings(Bucket(server).name))


def ran(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return done.stdout


@pytest.mark.extra
@pytest.mark.parametrize("mode", ["whole", "chunks", "parallel", "deferred"])
def test_tus_js_client_uploads_in_every_mode(
    platform: Platform, clients: Path, clips: Clips, tmp_path: Path, mode: str
) -> None:
    platform.start_api()
    platform.start_worker("image=1,maintenance=1")
    file = tmp_path / "photo.jpg"
    file.write_bytes(clips.photo)
    endpoint = f"{platform.url}/v1/uploads/"
    said = ran(clients, "node", "tus.mjs", endpoint, platform.key, str(file), mode)
    url = json.loads(said)["url"]
    answer = platform.http.head(url, headers={"Tus-Resumable": "1.0.0"})
    media_id = answer.headers["mediamill-media"].rpartition("/")[2]
    body = platform.wait_for_state(media_id, "ready")
    assert body["sha256"] == hashlib.sha256(clips.photo).hexdigest()
    assert body["filename"] == "node ä.jpg"
    assert len(platform.jobs(media_id)) == 1


@pytest.mark.browser
@pytest.mark.parametrize("plugin", ["s3", "signed", "signed-whole", "tus"])
def test_uppy_uploads_from_a_browser(
    platform: Platform, clients: Path, page: str, plugin: str
) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no Chromium on this machine")
    platform.start_api()
    options: dict[str, Any] = {"size": SIZE}
    token = platform.http.post("/v1/upload-tokens", json={}).json()
    if plugin == "s3":
        options["companion"] = token["companion_url"]
    elif plugin.startswith("signed"):
        options |= {"sign": token["sign_url"], "parts": plugin == "signed"}
    else:
        options |= {"tus": f"{platform.url}/v1/uploads/", "key": platform.key}
    said = ran(clients, "node", "browser.mjs", page, chromium, json.dumps(options))
    result = json.loads(said)
    assert result["failed"] == [], result
    if plugin == "signed-whole":  # nobody but the page's own server says that it is there
        media_id = ids.encode(ids.MEDIA, platform.value("SELECT id FROM media"))
        assert platform.http.post(f"/v1/media/{media_id}/complete").status_code == 202
    (row,) = platform.rows("SELECT * FROM media")
    assert (row["state"], row["size"]) == ("queued", SIZE)
    assert row["filename"].startswith("by ")
    if plugin != "s3":
        assert row["filename"].endswith("ä.mp4")
    stored = _stored(platform, row["upload_key"])
    if stored is not None:
        assert hashlib.sha256(stored).hexdigest() == result["sha256"]
    jobs = "SELECT count(*) FROM jobs WHERE role = 'main'"
    assert platform.value(jobs) == 1


def _stored(platform: Platform, key: str) -> bytes | None:
    """The original's bytes where they lie on this machine's disk."""
    path = platform.objects / key
    return path.read_bytes() if path.exists() else None

"""The example applications, as processes of their own beside a real platform."""

from __future__ import annotations

import html
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.stories.clips import Clips
from tests.stories.conftest import Make
from tests.stories.harness import Platform, free_port, until
from tests.stories.test_dashboard import browser

pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def platform(make_platform: Make) -> Platform:
    made = make_platform(
        egress_allow_networks='["127.0.0.0/8"]', webhook_schedule_seconds="[0.3, 0.5, 1, 1]"
    )
    made.start_api()
    made.start_worker("image=1,webhook=2,maintenance=1")
    return made


@contextmanager
def running(
    platform: Platform, folder: Path, argv: list[str], port: int, **env: str
) -> Iterator[httpx.Client]:
    """The application, until the block ends; a client that acts like a browser."""
    given = {
        **{k: v for k, v in os.environ.items() if not k.startswith("MEDIAMILL_")},
        "MEDIAMILL_URL": platform.url,
        "MEDIAMILL_API_KEY": platform.key,
        "GALLERY_DATABASE": str(folder / "gallery.sqlite3"),
        **env,
    }
    with (folder / "gallery.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *argv],
            cwd=ROOT,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as page:

            def answers() -> bool:
                assert process.poll() is None, (folder / "gallery.log").read_text()
                with suppress(httpx.TransportError):
                    return page.get("/").status_code == 200
                return False

            until(answers, seconds=40, why="the gallery does not answer", every_seconds=0.1)
            yield page
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:  # Django's server for development can miss it
            process.kill()
            process.wait(5)
        print((folder / "gallery.log").read_text()[-4000:])


def registered(platform: Platform, port: int, *types: str) -> str:
    """Register the gallery's address; the secret."""
    answer = platform.http.post(
        "/v1/webhook-endpoints",
        json={"url": f"http://127.0.0.1:{port}/hooks", "types": list(types)},
    )
    assert answer.status_code == 201, answer.text
    secret: str = answer.json()["secret"]
    return secret


def page_with(page: httpx.Client, path: str, text: str) -> str:
    """Reload a page until it says so."""
    return until(
        lambda: found if text in (found := page.get(path).text) else None,
        seconds=40,
        why=f"{path} never said {text!r}",
        every_seconds=0.1,
    )


@pytest.mark.long
def test_the_gallery_on_fastapi_shows_what_was_sent_past_it(
    platform: Platform, clips: Clips, tmp_path: Path
) -> None:
    port = free_port()
    secret = registered(platform, port, "media.*")
    argv = ["uvicorn", "examples.gallery_fastapi.app:app", "--port", str(port)]
    with running(platform, tmp_path, argv, port, GALLERY_WEBHOOK_SECRET=secret) as page:
        script = page.get("/").text
        assert "upload.headers" in script  # what is done by hand below is what the page does

        def send(data: bytes, name: str) -> str:
            wanted = {"name": name, "size": len(data), "content_type": "image/jpeg"}
            opened = page.post("/pictures", json=wanted)
            assert opened.status_code == 201, opened.text
            upload = opened.json()["upload"]
            asked = httpx.options(
                upload["url"],
                headers={"Origin": "http://x", "Access-Control-Request-Method": "PUT"},
            )
            assert asked.headers["access-control-allow-origin"] == "*"
            stored = httpx.request(
                upload["method"], upload["url"], headers=upload["headers"], content=data
            )
            assert stored.status_code == 200, stored.text
            id_: str = opened.json()["id"]
            assert page.post(f"/pictures/{id_}/uploaded").status_code == 202
            return f"/pictures/{id_}"

        shown = page_with(page, send(clips.photo, "a <b>.jpg"), "<picture>")
        assert "a &lt;b&gt;.jpg" in shown
        sources = re.findall(r'<source type="(.+?)" srcset="(.+?)">', shown)
        assert {kind for kind, _ in sources} == {"image/avif", "image/webp"}
        image = re.search(r'<img src="(.+?)"', shown)
        assert image is not None
        for address in [*(src for _, src in sources), image[1]]:
            assert httpx.get(html.unescape(address)).status_code == 200

        page_with(page, send(b"no picture", "fake.jpg"), "This file type is not supported.")
        assert page.get("/").text.count("/pictures/med_") == 2
        refused = page.post("/pictures", json={"name": "x", "size": 1 << 50})
        assert refused.status_code == 400
        assert refused.json()["advice"]
        assert page.post("/hooks", json={"type": "media.ready"}).status_code == 401
        assert page.get("/pictures/med_nonsense").status_code == 404


@pytest.mark.long
def test_the_gallery_on_django_takes_a_form_and_is_called_back(
    platform: Platform, clips: Clips, tmp_path: Path
) -> None:
    port = free_port()
    env = {
        "GALLERY_WEBHOOK_SECRET": registered(platform, port, "media.deleted"),
        "GALLERY_CALLBACK_URL": f"http://127.0.0.1:{port}/hooks",
        "DJANGO_SETTINGS_MODULE": "examples.gallery_django.settings",
    }
    database = {"GALLERY_DATABASE": str(tmp_path / "gallery.sqlite3")}
    subprocess.run(
        [sys.executable, "-m", "django", "migrate", "-v", "0"],
        cwd=ROOT,
        env=os.environ | env | database,
        check=True,
        timeout=60,
    )
    argv = ["django", "runserver", "--noreload", str(port)]
    with running(platform, tmp_path, argv, port, **env) as page:

        def send(data: bytes, name: str) -> httpx.Response:
            form = page.get("/")
            token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', form.text)
            assert token is not None
            return page.post(
                "/", data={"csrfmiddlewaretoken": token[1]}, files={"file": (name, data)}
            )

        sent = send(clips.photo, "photo.jpg")
        assert sent.status_code == 302, sent.text
        shown = page_with(page, sent.headers["location"], "w320.avif")
        assert "photo.jpg" in shown
        assert "refresh" not in shown
        addresses = re.findall(r'<a href="(http.+?)">w320\.', shown)
        assert len(addresses) == 3
        for address in addresses:
            assert httpx.get(html.unescape(address)).status_code == 200

        failed = send(b"no picture", "fake.jpg")
        page_with(page, failed.headers["location"], "This file type is not supported.")
        assert send(b"", "empty.jpg").status_code == 400
        assert page.post("/hooks", json={"type": "media.ready"}).status_code == 401
        assert page.post("/").status_code == 403  # no token of the form


@pytest.mark.browser
def test_a_browser_sends_a_picture_past_the_gallery_and_shows_it(
    platform: Platform, clips: Clips, tmp_path: Path
) -> None:
    """The page's own script: slot, upload to another origin, status page that reloads itself."""
    port = free_port()
    secret = registered(platform, port, "media.*")
    argv = ["uvicorn", "examples.gallery_fastapi.app:app", "--port", str(port)]
    faults: list[str] = []
    with (
        running(platform, tmp_path, argv, port, GALLERY_WEBHOOK_SECRET=secret),
        browser() as chromium,
    ):
        page = chromium.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(f"http://127.0.0.1:{port}/")
        page.get_by_label("A picture").set_input_files(
            {"name": "photo.jpg", "mimeType": "image/jpeg", "buffer": clips.photo}
        )
        page.wait_for_url("**/pictures/med_*", timeout=30_000)
        image = page.locator("picture img")
        image.wait_for(timeout=60_000)
        shown = image.evaluate("async (i) => { await i.decode(); return i.naturalWidth }")
        assert shown == 640
        assert image.evaluate("(i) => i.currentSrc").count(".avif") == 1
        page.goto(f"http://127.0.0.1:{port}/")
        page.get_by_label("A picture").set_input_files(
            {"name": "nothing.jpg", "mimeType": "image/jpeg", "buffer": b""}
        )
        page.get_by_role("status").filter(has_text="greater than 0").wait_for(timeout=10_000)
    assert faults == []

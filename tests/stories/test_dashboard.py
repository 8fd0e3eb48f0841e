"""The dashboard in a real browser against a real installation. Screenshots are kept with the test's
folder, or where MEDIAMILL_TEST_SCREENSHOTS names."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.stories.clips import Clips
from tests.stories.harness import Platform, free_port

from mediamill import db, ids

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

PAGES = {
    "": "Overview",
    "jobs": "Jobs",
    "media": "Media",
    "uploads": "Uploads",
    "dead-letters": "Dead letters",
    "queues": "Queues",
    "workers": "Workers",
    "webhooks": "Webhooks",
    "recipes": "Recipes",
    "settings": "Settings",
}
SLOW = 60_000  # milliseconds
ALIKE = re.compile(r"likeness (0\.9|1\.0)")


@contextmanager
def browser() -> Iterator[Browser]:
    """Chromium. What needs an event loop of its own comes before or after: this one holds one."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no Chromium on this machine")
    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def installation(platform: Platform) -> Platform:
    platform.start_api()
    platform.start_worker("image=1,video=1")
    return platform


def _open(browser: Browser, faults: list[str], *, width: int = 1280, dark: bool = False) -> Page:
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light"
    )
    page = context.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    return page


def _sign_in(page: Page, installation: Platform) -> str:
    url = f"http://127.0.0.1:{installation.port}/ui/"
    page.goto(url)
    page.get_by_label("API key").fill("mpk_live_nonsense")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_label("API key").fill(installation.key)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    return url


def _shot(page: Page, folder: Path, name: str) -> None:
    target = Path(os.environ.get("MEDIAMILL_TEST_SCREENSHOTS", folder))
    page.screenshot(path=target / f"{name}.png", full_page=True)


def _until(page: Page, condition: str) -> None:
    """Wait for something on the page; its policy lets no string be run as script by the page."""
    for _ in range(SLOW // 100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"not within {SLOW} ms: {condition}")


def test_files_are_dropped_watched_and_played(
    installation: Platform, clips: Clips, tmp_path: Path
) -> None:
    faults: list[str] = []
    with browser() as chromium:
        page = _open(chromium, faults)
        url = _sign_in(page, installation)
        faults.clear()  # the refused key was told on the console too
        photo, clip, junk = tmp_path / "photo.jpg", tmp_path / "clip.mp4", tmp_path / "junk.jpg"
        photo.write_bytes(clips.photo)
        clip.write_bytes(clips.clip)
        junk.write_bytes(b"no picture")
        page.keyboard.press("g")
        page.keyboard.press("u")
        page.set_input_files("input[type=file]", [photo, junk])
        expect(page.get_by_role("link", name="See it")).to_have_count(2, timeout=SLOW)
        page.get_by_label("Recipe").select_option("stream")
        page.set_input_files("input[type=file]", clip)
        expect(page.get_by_role("link", name="See it")).to_have_count(3, timeout=SLOW)
        page.get_by_text("Its API calls").first.click()
        expect(page.locator("pre").first).to_contain_text("POST /v1/uploads/ → 201")
        _shot(page, tmp_path, "uploads")
        page.get_by_role("link", name="See it").first.click()  # the newest stands first

        # It becomes ready under our eyes, and plays.
        expect(page.get_by_role("heading", name="clip.mp4")).to_be_visible()
        expect(page.locator(".state").first).to_have_text("ready", timeout=3 * SLOW)
        expect(page.locator("video")).to_be_visible()
        _until(page, "document.querySelector('video').readyState >= 2")
        page.evaluate("document.querySelector('video').play()")
        _until(page, "document.querySelector('video').currentTime > 0.3")
        assert page.evaluate("document.querySelector('video').src").startswith("blob:")  # by hls.js
        expect(page.get_by_role("heading", name="Timeline")).to_be_visible()
        expect(page.locator("media-play-button")).to_be_visible()
        violations = Axe().run(page).response["violations"]
        assert [v for v in violations if v["impact"] in ("serious", "critical")] == []
        _shot(page, tmp_path, "media-stream")

        # Its progressive file against the original, frame by frame.
        page.get_by_role("button", name="video.mp4", exact=True).click()
        page.get_by_text("Compare with the original").click()
        caption = page.locator(".compare figcaption")
        expect(caption).to_contain_text(ALIKE, timeout=SLOW)
        page.get_by_role("button", name="Play both").click()
        expect(caption).to_contain_text("pause to compare")
        page.get_by_role("button", name="Pause both").click()
        expect(caption).to_contain_text(ALIKE, timeout=SLOW)
        _shot(page, tmp_path, "media-compared")

        page.goto(f"{url}media")
        expect(page.get_by_role("link", name="photo.jpg")).to_be_visible()
        _shot(page, tmp_path, "media")
        page.get_by_role("link", name="photo.jpg").click()
        expect(page.locator(".state").first).to_have_text("ready", timeout=SLOW)
        page.get_by_role("button", name="w320.webp").click()
        _until(page, "document.querySelector('img.player').naturalWidth > 0")
        # Against the original: how much smaller, and how alike.
        page.get_by_text("Compare with the original").click()
        caption = page.locator(".compare figcaption")
        expect(caption).to_contain_text("likeness 0.", timeout=SLOW)
        expect(caption).to_contain_text("saved")
        divider = page.get_by_label("Original ↔ w320.webp")
        divider.press("ArrowRight")
        assert page.evaluate("document.querySelector('.both').style.getPropertyValue('--at')") == (
            "51%"
        )
        assert Axe().run(page).response["violations"] == []
        _shot(page, tmp_path, "media-photo")

        # What a recipe would make of it is what it made.
        made = page.locator("[aria-label=Variants] tbody td:first-child").all_inner_texts()
        page.goto(f"{url}recipes/web")
        page.get_by_label("Sample").select_option(label="photo.jpg (image)")
        page.get_by_role("button", name="Check and run dry").click()
        planned = page.locator("[aria-label=Outputs] tbody td:first-child")
        expect(planned).to_have_count(len(made))
        assert sorted(planned.all_inner_texts()) == sorted(made)
        page.get_by_label("Recipe").fill('{"name": "x", "version": 0}')
        page.get_by_role("button", name="Check and run dry").click()
        expect(page.locator("li.fault").first).to_contain_text("/version")
        _shot(page, tmp_path, "recipe")

        # The one that failed says why, and can be replayed.
        page.goto(f"{url}jobs?state=failed")
        page.locator("tbody a").first.click()
        expect(page.locator(".why").first).to_contain_text("unsupported_format")
        page.get_by_role("button", name="Replay").click()
        attempts = page.locator("summary").filter(has_text="· failed ·")
        expect(attempts).to_have_count(2, timeout=SLOW)
        page.get_by_text("JSON", exact=True).click()
        expect(page.locator("pre").last).to_contain_text('"kind": "image"')
        _shot(page, tmp_path, "job")
        assert faults == []


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("dark", [False, True])
def test_every_page_is_accessible_wide_and_narrow_light_and_dark(
    installation: Platform, clips: Clips, tmp_path: Path, width: int, dark: bool
) -> None:
    installation.wait_for_state(installation.upload(clips.photo, "photo.jpg"), "ready")
    faults: list[str] = []
    with browser() as chromium:
        page = _open(chromium, faults, width=width, dark=dark)
        url = _sign_in(page, installation)
        faults.clear()
        for path, name in PAGES.items():
            page.goto(f"{url}{path}")
            expect(page.get_by_role("heading", name=name, level=1)).to_be_visible()
            page.wait_for_load_state("load")
            found = Axe().run(page).response["violations"]
            serious = [f for f in found if f["impact"] in ("serious", "critical")]
            assert serious == [], (path, serious)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            _shot(page, tmp_path, f"{path or 'overview'}-{width}-{'dark' if dark else 'light'}")
        assert faults == []


def test_an_operator_pauses_a_queue_and_the_overview_says_so(installation: Platform) -> None:
    faults: list[str] = []
    with browser() as chromium:
        page = _open(chromium, faults)
        url = _sign_in(page, installation)
        expect(page.locator(".health")).to_contain_text("Healthy")
        page.goto(f"{url}queues")
        page.get_by_role("button", name="Pause video").click()
        expect(page.get_by_role("button", name="Resume video")).to_be_visible()
        page.goto(url)
        expect(page.locator(".health")).to_contain_text("Degraded: the queue video is paused")
        page.goto(f"{url}queues")
        page.get_by_role("button", name="Resume video").click()
        expect(page.get_by_role("button", name="Pause video")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("API key")).to_be_visible()


def test_a_secret_is_rotated_and_both_sign_what_arrives_in_the_inbox(
    make_platform: Callable[..., Platform], tmp_path: Path
) -> None:
    port = free_port()
    installation = make_platform(
        inbox=True,
        egress_allow_http=True,
        egress_ports=f"[{port}]",
        egress_allow_networks='["127.0.0.0/8"]',
    )
    installation.port = port
    installation.start_api()
    installation.start_worker("webhook=1")
    faults: list[str] = []
    with browser() as chromium:
        page = _open(chromium, faults)
        page.on("dialog", lambda dialog: dialog.accept())
        url = _sign_in(page, installation)
        faults.clear()
        page.goto(f"{url}webhooks")
        page.get_by_text("Register an endpoint").click()
        page.get_by_role("button", name="Use the inbox").click()
        page.get_by_role("button", name="Register", exact=True).click()
        first = page.locator(".once code").inner_text()
        page.get_by_role("link", name="/v1/inbox").click()
        page.get_by_role("button", name="Rotate the secret").click()
        second = page.locator(".once code").inner_text()
        assert first.startswith("whsec_")
        assert second.startswith("whsec_")
        assert first != second
        expect(page.locator(".once")).to_contain_text("signs beside it until")
        page.get_by_role("button", name="Send a test event").click()
        delivery = page.locator("details").first
        expect(delivery.locator(".state")).to_have_text("delivered", timeout=SLOW)
        delivery.locator("summary").click()
        expect(delivery).to_contain_text("Attempt 1")
        expect(delivery).to_contain_text("204 after")
        page.get_by_role("button", name="Resend").click()
        expect(delivery).to_contain_text("Attempt 2", timeout=SLOW)
        _shot(page, tmp_path, "endpoint")
        assert Axe().run(page).response["violations"] == []

        page.goto(f"{url}webhooks")
        page.get_by_text("Inbox", exact=True).click()
        letter = page.locator("details details").filter(has_text="webhook.test").first
        letter.locator("summary").click()
        expect(letter.locator("pre")).to_contain_text("webhook-signature: v1,")
        text = letter.locator("pre").inner_text()
        signatures = next(
            line.partition(": ")[2] for line in text.splitlines() if "webhook-signature" in line
        )
        assert len(signatures.split()) == 2  # the old secret and the new one

        page.get_by_role("link", name="/v1/inbox").first.click()
        page.get_by_role("button", name="Disable").click()
        expect(page.locator(".state").first).to_have_text("disabled")
        expect(page.get_by_role("button", name="Send a test event")).to_have_count(0)
        page.get_by_role("button", name="Enable").click()
        expect(page.locator(".state").first).to_have_text("enabled")
        page.get_by_role("button", name="Delete").click()
        expect(page.get_by_text("No address of yours")).to_be_visible()
        assert faults == []


def test_a_viewer_sees_what_his_key_may_and_is_told_what_is_missing(
    platform: Platform, tmp_path: Path
) -> None:
    platform.start_api()
    faults: list[str] = []
    with browser() as chromium:
        page = _open(chromium, faults)
        page.on("dialog", lambda dialog: dialog.accept())
        url = _sign_in(page, platform)
        faults.clear()
        page.goto(f"{url}settings")
        page.get_by_text("Make a key").click()
        page.get_by_label("Name").fill("wall screen")
        page.get_by_role("button", name="Make it").click()
        key = page.locator(".once code").inner_text()
        page.get_by_role("button", name="Check the storage").click()
        expect(page.locator(".checks")).to_contain_text("local disk")
        _shot(page, tmp_path, "settings-keys")
        assert Axe().run(page).response["violations"] == []

        page.get_by_role("button", name="Sign out").click()
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_text("viewer", exact=False)).to_be_visible()
        for path, lacks in (
            ("", 0),
            ("jobs", 0),
            ("media", 0),
            ("recipes", 0),
            ("uploads", 1),
            ("dead-letters", 1),
            ("queues", 1),
            ("workers", 1),
            ("webhooks", 1),
            ("settings", 2),
        ):
            page.goto(f"{url}{path}")
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            expect(page.locator(".lacks")).to_have_count(lacks)
            page.wait_for_load_state("networkidle")
            assert page.get_by_role("alert").count() == 0, path

        page.get_by_role("button", name="Sign out").click()
        page.get_by_label("API key").fill(platform.key)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("button", name="Revoke wall screen").click()
        expect(page.locator("td .fault")).to_contain_text("revoked")
        assert faults == []


MANY = 10_000


async def _fill(installation: Platform) -> None:
    """Ten thousand jobs that ended, of which every tenth failed, a hundred of those by one code."""
    now = datetime.now(UTC)
    lines = io.StringIO()
    for n in range(MANY):
        failed = n % 10 == 0
        code = "corrupt_input" if n % 100 == 0 else "tool_failed"
        at = now - timedelta(seconds=n)
        csv.writer(lines).writerow(
            (
                "default",
                ids.new(),
                "failed" if failed else "completed",
                "film.cut" if n % 2 else "film.join",
                "default",
                "job",
                1,
                5,
                at - timedelta(seconds=1 + n % 7),
                at,
                json.dumps({"code": code, "detail": ""}) if failed else "",
            )
        )
    columns = (
        "tenant_id id state kind queue role attempt max_attempts created_at finished_at error"
    ).split()
    connection = await db.connect(installation.database)
    try:
        await connection.copy_to_table(
            "jobs", source=io.BytesIO(lines.getvalue().encode()), columns=columns, format="csv"
        )
    finally:
        await connection.close()


def test_ten_thousand_jobs_are_filtered_and_those_that_match_are_replayed(
    platform: Platform, tmp_path: Path
) -> None:
    platform.start_api()
    asyncio.run(_fill(platform))
    faults: list[str] = []
    with browser() as chromium:
        page = _open(chromium, faults)
        page.on("dialog", lambda dialog: dialog.accept())
        url = _sign_in(page, platform)
        faults.clear()
        page.goto(f"{url}jobs")
        expect(page.locator("tbody tr")).to_have_count(50)
        page.keyboard.press("/")
        page.keyboard.type("code:corrupt_input kind:film.join since:30d")
        page.get_by_role("button", name="Filter", exact=True).click()
        assert "code=corrupt_input" in page.url
        assert "since=30d" in page.url
        expect(page.locator("tbody td:last-child").first).to_have_text("corrupt_input")
        page.get_by_role("button", name="More").click()
        expect(page.locator("tbody tr")).to_have_count(MANY // 100)
        assert set(page.locator("tbody td:last-child").all_inner_texts()) == {"corrupt_input"}
        page.reload()  # the address says it all
        expect(page.locator("tbody td:last-child").first).to_have_text("corrupt_input")
        page.get_by_role("link", name="failed", exact=True).click()
        _shot(page, tmp_path, "jobs-filtered")
        page.get_by_role("button", name="Replay all that match").click()
        expect(page.get_by_role("status")).to_have_text(
            f"{MANY // 100} queued again.", timeout=SLOW
        )
        expect(page.get_by_text("There is nothing here.")).to_be_visible()
        page.get_by_label("Filter").fill("colour:red")
        page.get_by_role("button", name="Filter", exact=True).click()
        expect(page.get_by_role("alert")).to_contain_text("is no filter")

        page.goto(url)
        page.get_by_label("The last").select_option("day")
        expect(
            page.get_by_text(f"{MANY * 9 // 10} completed and {MANY // 10 - 100} failed")
        ).to_be_visible()
        expect(page.locator("canvas")).to_have_count(2)
        _shot(page, tmp_path, "overview-figures")
        assert faults == []
    queued = platform.value("SELECT count(*) FROM jobs WHERE state = 'queued'")
    assert queued == MANY // 100


def test_a_dead_letter_is_replayed_as_a_canary_once_its_cause_is_gone(
    make_platform: Callable[..., Platform], clips: Clips, tmp_path: Path
) -> None:
    installation = make_platform(max_attempts=1)
    installation.start_api()
    media_id = installation.upload(clips.photo, "photo.jpg")
    (original,) = installation.files("uploads", media_id)
    aside = tmp_path / "aside"
    original.rename(aside)
    original.mkdir()  # the storage is there but cannot give the bytes
    installation.start_worker("image=1")
    installation.wait_for_state(media_id, "failed")
    original.rmdir()
    aside.rename(original)
    faults: list[str] = []
    with browser() as chromium:
        page = _open(chromium, faults)
        page.on("dialog", lambda dialog: dialog.accept())
        url = _sign_in(page, installation)
        faults.clear()
        expect(page.locator(".health")).to_contain_text("1 dead letter")
        page.goto(f"{url}dead-letters")
        expect(page.get_by_role("heading", level=2)).to_contain_text("storage_unavailable")
        assert Axe().run(page).response["violations"] == []
        _shot(page, tmp_path, "dead-letter")
        page.get_by_role("button", name="Canary of 1").click()
        expect(page.get_by_role("status")).to_have_text(
            "storage_unavailable: Canary: 1 of 1 completed; the rest may follow.", timeout=SLOW
        )
        expect(page.get_by_text("There are none.")).to_be_visible(timeout=SLOW)
        assert faults == []
    assert installation.wait_for_state(media_id, "ready")["variants"]

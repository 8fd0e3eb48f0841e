"""/ui: what is served there, and who is signed in by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.api.conftest import Api, check_problem, serving

from mediamill.api import dashboard

pytestmark = pytest.mark.anyio


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a dashboard in it."""
    folder = tmp_path / "package" / "dashboard"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<title>page</title>")
    (folder / "assets" / "x.js").write_text("1")
    monkeypatch.setattr("mediamill.api.dashboard.resources.files", lambda _: folder.parent)
    dashboard._files.cache_clear()
    yield folder
    dashboard._files.cache_clear()


async def test_pages_and_files_are_served_with_strict_headers(built: Path, api: Api) -> None:
    async with api.stranger() as browser:
        for path in ("/ui", "/ui/", "/ui/jobs", "/ui/media/med_x"):
            page = await browser.get(path)
            assert (page.status_code, page.text) == (200, "<title>page</title>")
            assert page.headers["cache-control"] == "no-cache"
            assert "script-src 'self';" in page.headers["content-security-policy"]
        script = await browser.get("/ui/assets/x.js")
        assert script.headers["content-type"].startswith("text/javascript")
        assert "immutable" in script.headers["cache-control"]
        for path in ("/ui/assets/y.js", "/ui/assets/../../config.py"):
            answer = await browser.get(path)
            assert "config" not in answer.text
        check_problem(await browser.get("/ui/assets/y.js"), 404, "not_found")


async def test_an_installation_without_it_says_how_to_get_it(built: Path, api: Api) -> None:
    (built / "index.html").unlink()
    (built / "assets" / "x.js").unlink()
    async with api.stranger() as browser:
        answer = await browser.get("/ui/")
    assert answer.status_code == 404
    assert "npm run build" in answer.text


async def test_only_a_page_of_ours_on_this_machine_is_signed_in(
    shared_database: str, tmp_path: Path
) -> None:
    async def ask(url: str, **headers: str) -> httpx.Response:
        async with httpx.AsyncClient() as browser:
            return await browser.post(f"{url}/ui/session", headers=headers)

    given: dict[str, Any] = {"dashboard_sign_in": True}
    async with serving(shared_database, tmp_path, **given) as served:
        check_problem(await ask(served.url), 401, "unauthenticated")  # there is no key yet
        served.api.services.settings.key_file.write_text("mpk_live_x\n")
        answer = await ask(served.url, origin=served.url)
        assert answer.json()["api_key"] == "mpk_live_x"
        assert answer.headers["cache-control"] == "no-store"
        for headers in (
            {"host": "evil.example"},
            {"origin": "http://evil.example"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
            {"x-forwarded-for": "127.0.0.1"},
            {"forwarded": "for=127.0.0.1"},
        ):
            check_problem(await ask(served.url, **headers), 401, "unauthenticated")
    async with serving(shared_database, tmp_path) as served:
        check_problem(await ask(served.url), 401, "unauthenticated")

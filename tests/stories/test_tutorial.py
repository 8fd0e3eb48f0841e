"""The tutorial and the page of the client, run as they stand."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.stories.clips import Clips
from tests.stories.conftest import Make
from tests.stories.harness import Platform

_DOCS = Path(__file__).parents[2] / "docs"
_SEPARATOR = "=== next block ==="


@pytest.mark.long
@pytest.mark.timeout(180)
def test_every_block_of_the_tutorial_runs_and_answers_as_it_says(
    platform: Platform,
    clips: Clips,
    tmp_path: Path,
) -> None:
    platform.start_api()
    platform.start_worker("image=1,video=1,maintenance=1")
    folder = tmp_path / "here"
    (folder / ".mediamill").mkdir(parents=True)
    (folder / ".mediamill" / "api-key").write_text(platform.key + "\n")
    (folder / "holiday.jpg").write_bytes(clips.photo)
    (folder / "clip.mp4").write_bytes(clips.clip)
    page = (_DOCS / "tutorial.md").read_text()
    page = page.replace("http://127.0.0.1:8080", platform.url)
    blocks = re.findall(r"^```(sh|json|python)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    script = f"\necho; echo '{_SEPARATOR}'\n".join(text for kind, text in blocks if kind == "sh")
    env = {k: v for k, v in os.environ.items() if not k.startswith("MEDIAMILL_")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"

    def ran(argv: list[str], **more: str) -> str:
        done = subprocess.run(
            argv,
            cwd=folder,
            env=env | more,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    answers = ran(["bash", "-euc", script]).split(_SEPARATOR)
    assert len(answers) == sum(kind == "sh" for kind, _ in blocks)
    checked = 0
    for (kind, text), (next_kind, shown) in itertools.pairwise(blocks):
        if kind == "sh":
            answer = answers.pop(0)
            if next_kind == "json":
                assert_shown(json.loads(answer.strip()), json.loads(shown), text)
                checked += 1
    assert checked == sum(kind == "json" for kind, _ in blocks)
    assert len(list((folder / "out").rglob("*.avif"))) >= 1

    (python,) = (text for kind, text in blocks if kind == "python")
    said = ran(
        [sys.executable, "-c", python],
        MEDIAMILL_URL=platform.url,
        MEDIAMILL_API_KEY=platform.key,
    )
    assert "stage='ready'" in said
    assert f" {platform.url}/" in said


@pytest.mark.long
@pytest.mark.timeout(180)
def test_every_block_of_the_page_of_the_client_runs(
    make_platform: Make, clips: Clips, tmp_path: Path
) -> None:
    platform = make_platform(egress_allow_networks='["127.0.0.0/8"]')
    platform.start_api()
    platform.start_worker("image=1,video=1")  # nobody fetches: that example is an address outside
    page = (_DOCS / "client.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    page_of_ours = "http://127.0.0.1:9/film.mp4"
    script = "\n".join(blocks).replace("https://example.com/film.mp4", page_of_ours)
    folder = tmp_path / "here"
    (folder / "out").mkdir(parents=True)
    (folder / "holiday.mov").write_bytes(clips.clip)
    env = os.environ | {"MEDIAMILL_URL": platform.url, "MEDIAMILL_API_KEY": platform.key}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for text in ("phase='upload'", "stage='ready'", "holiday.mov 3.0", "PUT http", "not_found req"):
        assert text in done.stdout, done.stdout
    assert "unsupported_format Send a JPEG" in done.stdout
    assert {path.name for path in (folder / "out").iterdir()} >= {"video.mp4", "poster.jpg"}


def assert_shown(answer: Any, shown: Any, where: str) -> None:
    """What the page shows is in the answer; an ellipsis stands for anything."""
    match shown:
        case dict():
            for name, value in shown.items():
                assert name in answer, (where, name)
                assert_shown(answer[name], value, where)
        case list():
            assert_shown(answer[0], shown[0], where)
        case str() if "…" in shown:
            pattern = ".*".join(re.escape(piece) for piece in shown.split("…"))
            assert re.fullmatch(pattern, str(answer), re.DOTALL), (where, shown, answer)
        case _:
            assert answer == shown, (where, shown, answer)

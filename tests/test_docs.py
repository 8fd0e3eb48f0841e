"""The documentation: generated pages are fresh, and links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
import yaml
from docs import build_site
from docs.build_site import ROOT

from mediamill import cli, failure_pages, reference
from mediamill.config import Settings
from mediamill.failures import Code, Verdict


def test_the_reference_is_what_the_code_says() -> None:
    folder = ROOT / "docs" / "reference"
    stale = [
        name
        for name, text in reference.pages().items()
        if not (folder / name).exists() or (folder / name).read_text("utf-8") != text
    ]
    assert stale == [], "run `make docs`"
    kept = {path.name for path in (folder / "failures").iterdir()}
    assert kept == {f"{code.code}.md" for code in Code}


@pytest.mark.parametrize("code", list(Code), ids=lambda c: c.code)
def test_every_code_says_what_brings_it_about(code: Code) -> None:
    cause = failure_pages.CAUSES[code]
    assert cause.why.endswith(".")
    assert cause.why not in (code.title, code.advice)
    assert "  " not in cause.why
    text = failure_pages.markdown(code)
    assert code.advice in text
    example = json.loads(re.findall(r"```json\n(.*?)```", text, re.DOTALL)[0])
    assert example["code"] == code.code
    helps = re.findall(r"## Does trying again help\?\n\n(\w+)", text)[0]
    assert (helps == "No") == (code.verdict is Verdict.PERMANENT)


def test_every_link_leads_somewhere_and_every_page_is_in_the_site(tmp_path: Path) -> None:
    pages = build_site.gather(tmp_path / "docs")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    said = build_site.summary(pages, settings)
    listed = set(re.findall(r"\]\((.+?\.md)\)", said))
    assert listed == set(pages)
    by_itself = {page for page in pages if "/failures/" not in page}
    navigation = json.dumps(settings["nav"])
    assert {page for page in by_itself if f'"{page}"' not in navigation} == set()
    assert (tmp_path / "docs" / "reference" / "openapi.json").exists()
    assert "](examples/shop/index.md)" in pages["index.md"]
    assert "](../../reference/failures.md)" in build_site.outside_fences(
        "[x](y)\n```\n[x](y)\n```\n", lambda _: "[x](../../reference/failures.md)"
    )


def test_a_link_that_leads_nowhere_stops_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "README.md").write_text("# A\n\n[b](b.md) [c](c.md#no-heading) [d](c.md#a-heading)\n")
    (docs / "c.md").write_text("# C\n\n## A heading\n\n```\n[e](nowhere.md)\n```\n")
    monkeypatch.setattr(build_site, "ROOT", tmp_path)
    with pytest.raises(build_site.Broken) as caught:
        build_site.gather(tmp_path / "out")
    assert str(caught.value).splitlines() == [
        "docs/README.md: b.md leads nowhere",
        "docs/README.md: c.md#no-heading has no such heading",
    ]


def test_the_readme_names_only_what_is_there() -> None:
    """Its links, the targets of make, and the commands of the command line."""
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(((?!http)[^)#]+)", text):
        assert (ROOT / target).exists(), target
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)`", text)) <= targets


PAGES = [
    ROOT / "README.md",
    *(p for p in (ROOT / "docs").rglob("*.md") if "reference" not in p.parts),
    *ROOT.glob("examples/*/README.md"),
    ROOT / "deploy" / "README.md",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_names_only_commands_settings_and_routes_that_there_are(page: Path) -> None:
    text = page.read_text("utf-8")
    for words in re.findall(r"mediamill((?: [a-z][\w-]+)+)", text):
        assert is_command(words.split()) or words == " import", f"mediamill{words}"
    fields = set(Settings.model_fields) | {"url", "api_key", "config", "failpoint"}
    for name in re.findall(r"MEDIAMILL_([A-Z0-9_]+)", text):
        assert name.lower() in fields, name
    known = [re.sub(r"{[\w:]+}", "[^/]+", path) for path in reference.openapi()["paths"]]
    known += [r"/v1/uploads/?", "/v1/uploads/[^/]+"]
    for route in re.findall(r"(?:GET|POST|PUT|PATCH|DELETE) `?(/v1/[\w{}/…-]+)", text):
        assert any(re.fullmatch(path, route) for path in known), route


def is_command(words: list[str]) -> bool:
    """Whether the words begin with a command, and with one below it if it has some."""
    command: click.Command | None = cli.main
    for word in words:
        if not isinstance(command, click.Group):
            return True
        command = command.get_command(click.Context(command), word)
        if command is None:
            return False
    return True

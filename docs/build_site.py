"""Gathers the pages of the documentation and builds the site; `make docs` runs it.

A page may link to anything in the repository: other pages it leads to become part of the site, and
other files are copied beside it. A link that leads nowhere stops the build. Each page is there as
Markdown too, and llms.txt lists them for readers that are programs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Final

import yaml

ROOT: Final = Path(__file__).parents[1]
GATHERED: Final = ROOT / "build" / "docs"
SITE: Final = ROOT / "build" / "site"
_FENCE: Final = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_HEADING: Final = re.compile(r"^#+ (.+?)\s*$", re.MULTILINE)


class Broken(Exception):
    """Links that lead nowhere, a line each."""


def gather(into: Path) -> dict[str, str]:
    """Write every page and file of the site; the pages by place. Raises Broken."""
    pages: dict[str, str] = {}
    faults: list[str] = []
    todo = sorted((ROOT / "docs").rglob("*.md"))
    files = set((ROOT / "docs").rglob("*.json"))
    seen = set(todo)
    while todo:
        page = todo.pop(0)
        here = place(page)

        def lead(found: re.Match[str], page: Path = page, here: str = here) -> str:
            text, target = found[1], found[2]
            if re.match(r"[a-z]+:", target):
                return found[0]
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if not path.exists() or not path.is_relative_to(ROOT):
                faults.append(f"{page.relative_to(ROOT)}: {target} leads nowhere")
                return found[0]
            if path.is_dir():
                path = path / "README.md" if (path / "README.md").exists() else path
            if path.suffix == ".md":
                if anchor and anchor not in anchors(path):
                    faults.append(f"{page.relative_to(ROOT)}: {target} has no such heading")
                if path not in seen:
                    seen.add(path)
                    todo.append(path)
            elif path.is_file():
                files.add(path)
            else:
                return text  # a folder is no page
            there = os.path.relpath(place(path), PurePosixPath(here).parent)
            return f"[{text}]({there}{'#' + anchor if anchor else ''})"

        pages[here] = outside_fences(page.read_text("utf-8"), lead)
    if faults:
        raise Broken("\n".join(faults))
    shutil.rmtree(into, ignore_errors=True)
    for here, text in pages.items():
        (into / here).parent.mkdir(parents=True, exist_ok=True)
        (into / here).write_text(text, "utf-8")
    for path in files:
        (into / place(path)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, into / place(path))
    return pages


def place(path: Path) -> str:
    """Where a file of the repository stands in the site."""
    inside = path.relative_to(ROOT)
    if inside.parts[0] == "docs":
        inside = inside.relative_to("docs")
    return (inside.with_name("index.md") if inside.name == "README.md" else inside).as_posix()


def outside_fences(text: str, lead: object) -> str:
    """Change the links of a page, and leave its blocks of code alone."""
    done, at = [], 0
    for fence in _FENCE.finditer(text):
        done += [_LINK.sub(lead, text[at : fence.start()]), fence[0]]  # type: ignore[call-overload]
        at = fence.end()
    return "".join([*done, _LINK.sub(lead, text[at:])])  # type: ignore[call-overload]


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as the site makes them."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", page.read_text("utf-8"))):
        words = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", words))
    return found


def summary(pages: dict[str, str], settings: dict[str, object]) -> str:
    """llms.txt: the pages in the order of the navigation, with their first sentence."""
    lines = [f"# {settings['site_name']}", "", f"> {settings['site_description']}", ""]
    listed: set[str] = set()

    def walk(items: object, title: str | None = None) -> None:
        assert isinstance(items, list)
        for item in items:
            ((name, target),) = item.items()
            if isinstance(target, list):
                lines.extend(["", f"## {name}", ""])
                walk(target, name)
            else:
                listed.add(target)
                lines.append(f"- [{name}]({target}): {first_sentence(pages[target])}")

    walk(settings["nav"])
    rest = sorted(set(pages) - listed)
    lines += ["", "## Optional", ""]
    lines += [f"- [{heading(pages[p])}]({p}): {first_sentence(pages[p])}" for p in rest]
    return "\n".join(lines) + "\n"


def heading(text: str) -> str:
    found = _HEADING.search(text)
    return found[1] if found else ""


def first_sentence(text: str) -> str:
    """The first sentence of the first paragraph, without its links."""
    prose = re.sub(r"<!--.*?-->", "", _FENCE.sub("", text), flags=re.DOTALL)
    for block in re.split(r"\n\s*\n", prose):
        line = " ".join(block.split())
        if line and line[0] not in "#|*>-<":
            plain = _LINK.sub(r"\1", line)
            return re.split(r"(?<=[.!?]) (?=[A-Z`(])", plain)[0]
    return heading(text)


def build() -> None:
    """The whole site. Raises Broken, CalledProcessError."""
    pages = gather(GATHERED)
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    shutil.rmtree(SITE, ignore_errors=True)
    tool = Path(sys.executable).with_name("zensical")
    subprocess.run([tool, "build", "--clean", "--strict"], cwd=ROOT, check=True)
    for here in pages:
        shutil.copyfile(GATHERED / here, SITE / here)
    (SITE / "llms.txt").write_text(summary(pages, settings), "utf-8")


if __name__ == "__main__":
    try:
        build()
    except Broken as error:
        sys.exit(str(error))

"""Writes the reference pages from the tables they describe; `make docs` runs it."""

from __future__ import annotations

import inspect
import json
import re
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, cast

from mediamill import events, recipes
from mediamill.api.app import create_app
from mediamill.api.services import Services
from mediamill.failures import Code
from mediamill.states import JOB_MOVES, MEDIA_FOLLOWS_JOB, MEDIA_MOVES, JobState, MediaState

_GENERATED = "<!-- Written by `make docs` from the code; change it there. -->\n"


def pages() -> dict[str, str]:
    """Every generated page by file name."""
    return {
        "failures.md": failures(),
        "settings.md": settings(),
        "states.md": states(),
        "events.md": events_(),
        "recipe.schema.json": json.dumps(recipes.schema(), indent=2) + "\n",
        "openapi.json": json.dumps(openapi(), indent=1, sort_keys=True) + "\n",
    }


def failures() -> str:
    """The table of codes."""
    rows = [
        f"| `{c.code}` | {c.status} | {c.verdict} | {c.title} | {_escaped(c.advice)} |"
        for c in Code
    ]
    return "\n".join(
        [
            "# Failure codes",
            "",
            _GENERATED,
            "One vocabulary for HTTP problems, the `error` of a media or job, events and dead "
            "letters. A code is never renamed or reused.",
            "",
            "*Verdict* says what the engine does about a failed attempt: `permanent` fails at "
            "once, `transient` is tried again with growing delays, `resource` once more, `crash` "
            "counts the deaths of workers, `held` waits until an operator has mended something and "
            "counts nothing.",
            "",
            "| code | HTTP status | verdict | what it says | advice |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def openapi() -> dict[str, Any]:
    """The document of the HTTP API, as /openapi.json serves it."""
    return create_app(cast(Services, None)).openapi()  # its routes are described, not served


def events_() -> str:
    """The types of events."""
    return "\n".join(
        [
            "# Events",
            "",
            _GENERATED,
            "What webhooks and streams tell. `job.progress` is told to streams of one media or job "
            "only, and not kept.",
            "",
            "| type | when |",
            "|---|---|",
            *(f"| `{name}` | {_escaped(says)} |" for name, says in events.TYPES.items()),
            "",
        ]
    )


def settings() -> str:
    """The settings with their defaults and what the defaults file says about them."""
    text = resources.files("mediamill").joinpath("config.default.toml").read_text("utf-8")
    rows: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        found = re.fullmatch(r"(# )?(\w+) = (.+)", line)
        if found and not (found[1] and not _is_toml(found[2], found[3])):
            default = "unset" if found[1] else f"`{found[3]}`"
            said = " ".join(comment)
            rows.append(
                f"| `{found[2]}` | `MEDIAMILL_{found[2].upper()}` | {default} | {_escaped(said)} |"
            )
            continue
        if line.startswith("# "):
            comment.append(line[2:])
        elif not line:
            comment = []
    return "\n".join(
        [
            "# Settings",
            "",
            _GENERATED,
            "A flag goes before the environment, the environment before the TOML file named by "
            "`MEDIAMILL_CONFIG`, and that before the defaults. An unknown variable that begins "
            "with `MEDIAMILL_` is an error.",
            "",
            "| setting | variable | default | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def states() -> str:
    """States with their sentences, and the legal moves as diagrams."""
    lines = ["# States", "", _GENERATED]
    for title, states_, moves in (
        ("Media", MediaState, MEDIA_MOVES),
        ("Job", JobState, JOB_MOVES),
    ):
        lines += [f"## {title}", "", "| state | meaning |", "|---|---|"]
        lines += [f"| `{s}` | {_sentence(states_, s)} |" for s in states_]
        lines += ["", "```mermaid", "stateDiagram-v2"]
        order = list(states_)
        pairs = sorted((order.index(a), order.index(b)) for a, b in moves)
        lines += [f"    {order[a]} --> {order[b]}" for a, b in pairs]
        lines += ["```", ""]
    lines += [
        "## A media follows its main job",
        "",
        "| the job moves to | the media moves to |",
        "|---|---|",
        *(f"| `{job}` | `{media}` |" for job, media in MEDIA_FOLLOWS_JOB.items()),
        "",
    ]
    return "\n".join(lines)


def _sentence(states_: Any, state: str) -> str:
    """The string that follows a member in the source."""
    source = inspect.getsource(states_)
    found = re.search(rf'= "{state}"\n\s+"""(.+?)"""', source, re.DOTALL)
    return _escaped(" ".join(found[1].split())) if found else ""


def _is_toml(name: str, value: str) -> bool:
    try:
        tomllib.loads(f"{name} = {value}")
    except tomllib.TOMLDecodeError:
        return False
    return True


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

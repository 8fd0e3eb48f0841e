"""Writes the reference pages from the tables they describe; `make docs` runs it."""

from __future__ import annotations

import inspect
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Final, cast

import click

from mediamill import cli, events, failure_pages, listen, recipes
from mediamill.api.app import create_app
from mediamill.api.services import Services
from mediamill.failures import Code
from mediamill.observability import Metrics
from mediamill.states import JOB_MOVES, MEDIA_FOLLOWS_JOB, MEDIA_MOVES, JobState, MediaState

_GENERATED = "<!-- Written by `make docs` from the code; change it there. -->\n"


def pages() -> dict[str, str]:
    """Every generated page by file name."""
    return {
        "failures.md": failures(),
        "settings.md": settings(),
        "states.md": states(),
        "events.md": events_(),
        "metrics.md": metrics(),
        "command-line.md": command_line(),
        "http.md": http(),
        **{f"failures/{code.code}.md": failure_pages.markdown(code) for code in Code},
        "recipe.schema.json": json.dumps(recipes.schema(), indent=2) + "\n",
        "openapi.json": json.dumps(openapi(), indent=1, sort_keys=True) + "\n",
    }


def failures() -> str:
    """The table of codes."""
    rows = [
        f"| [`{c.code}`](failures/{c.code}.md) | {c.status} | {c.verdict} | {c.title} "
        f"| {_escaped(c.advice)} |"
        for c in Code
    ]
    return "\n".join(
        [
            "# Failure codes",
            "",
            _GENERATED,
            "One vocabulary for HTTP problems, the `error` of a media or job, events and dead "
            "letters. A code is never renamed or reused. Each has a page with what brings it about "
            "and how it looks; the `type` of a problem leads to the same page at your API.",
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


def metrics() -> str:
    """The metrics, from the registry that exposes them."""
    found = sorted(Metrics().registry.collect(), key=lambda family: family.name)
    labels = {m._name: m._labelnames for m in vars(Metrics()).values() if hasattr(m, "_labelnames")}
    rows = []
    for family in found:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        told = ", ".join(f"`{label}`" for label in labels[family.name])
        rows.append(f"| `{name}` | {family.type} | {told} | {_escaped(family.documentation)} |")
    return "\n".join(
        [
            "# Metrics",
            "",
            _GENERATED,
            "Prometheus text at `GET /metrics` of each API process. No label ever holds a tenant, "
            "an id or an address. [What to watch](../../deploy/README.md) has alert rules.",
            "",
            "| metric | type | labels | what it says |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def command_line() -> str:
    """Every command with its options, as `--help` has them."""
    lines = [
        "# Commands",
        "",
        _GENERATED,
        "What `--help` says. [The command line](../commands.md) tells what they are for, and the "
        "exit codes.",
        "",
    ]
    for path, command in _commands(cli.main, "mediamill"):
        with click.Context(command, info_name=path) as context:
            usage = " ".join([path, *command.collect_usage_pieces(context)])
            says = inspect.cleandoc(command.help or "").replace("\n", " ").replace("  ", "\n\n")
            lines += [f"## {path}", "", "```", usage, "```", "", says, ""]
            rows = [
                record
                for parameter in command.params
                if isinstance(parameter, click.Option)
                and not parameter.hidden
                and (record := parameter.get_help_record(context)) is not None
            ]
            if rows:
                lines += ["| option | |", "|---|---|"]
                lines += [f"| `{_escaped(o)}` | {_escaped(says)} |" for o, says in rows]
                lines.append("")
    return "\n".join(lines)


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    with click.Context(command, info_name=path) as context:
        for name in sorted(command.list_commands(context)):
            below = command.get_command(context, name)
            assert below is not None
            yield from _commands(below, f"{path} {name}")


def http() -> str:
    """The routes of the API, with what each needs and answers."""
    document = openapi()
    lines = [
        "# HTTP API",
        "",
        _GENERATED,
        "Every request carries `Authorization: Bearer <key>`. Bodies are JSON; refusals are "
        "[problems](failures.md). The whole contract is [openapi.json](openapi.json), which an "
        "installation also serves at `/openapi.json`; uploads by tus are described "
        "[line by line](tus.md).",
        "",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            says = inspect.cleandoc(operation["description"])
            lines += [f"## {method.upper()} {path}", "", says, ""]
            given = [f"`{p['name']}`" for p in operation.get("parameters", []) if p["in"] != "path"]
            fields = _fields(operation)
            done = [c for c in operation["responses"] if c.startswith(("2", "3"))]
            lines += [f"Parameters: {', '.join(given)}.", ""] if given else []
            lines += [f"Body: {fields}.", ""] if fields else []
            lines += [f"Answers {', '.join(done)}.", ""]
    return "\n".join(lines)


def _fields(operation: dict[str, Any]) -> str:
    """The fields of a JSON body, those that must be there in bold."""
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    must = schema.get("required", [])
    return ", ".join(
        f"**`{name}`**" if name in must else f"`{name}`"
        for name in schema.get("properties", {})
        if name != "schema_version"
    )


def openapi() -> dict[str, Any]:
    """The document of the HTTP API, as /openapi.json serves it."""
    return create_app(cast(Services, None)).openapi()  # its routes are described, not served


def events_() -> str:
    """The types of events, what one holds, and how some look."""
    lines = [
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
        "## What one holds",
        "",
        "Around it are `type`, `timestamp` (of when it happened), `schema_version` and `id` (the "
        "same on every repeat: skip what you have seen). The rest is `data`; what there is depends "
        "on the type, and new fields may come. `payload: thin` leaves out all but the ids, "
        "`sequence`, `state` and `reason`.",
        "",
        "| field of `data` | |",
        "|---|---|",
        *(f"| `{name}` | {_escaped(says)} |" for name, says in _EVENT_FIELDS.items()),
        "",
    ]
    for name in ("media.preview", "media.ready", "media.failed", "job.completed"):
        lines += [f"## {name}", "", "```json", _sample(name), "```", ""]
    return "\n".join(lines)


_EVENT_FIELDS: Final = {
    "media_id": "The media that it is about, if it is about one.",
    "job_id": "The job that it is about, or that did it.",
    "sequence": "Grows with each event of one media or job: an older one can be dropped.",
    "state": "The state that it moved to.",
    "reason": "Why, in one word, where there is more than one way to get there.",
    "error": "Of what failed: the [failure](failures.md), as the API shows it.",
    "preview": "Placeholder, dominant color and small picture, as soon as they are known.",
    "variants": "What was published, without addresses: fetch the media for signed ones.",
    "recipe": "And `recipe_version`: what the variants were made by.",
    "metadata": "Yours, of the media; `size` beside it.",
    "kind": "And `width`, `height`, `duration_seconds`: once it was looked at.",
    "progress": "Percent, of what is done and of `job.progress`.",
    "outputs": "Of `job.progress`: how far each output is that is being made.",
    "stage": "Of `job.progress`: what is being done just now; `attempt` beside it.",
    "endpoint": "Of `endpoint.disabled`: the endpoint.",
    "truncated": "True when the payload was too large and was sent thin.",
}


def _sample(type_: str) -> str:
    """An event about things that do not exist, with ids and time that stay the same."""
    text = json.dumps(json.loads(listen.sample(type_)), indent=2, ensure_ascii=False)
    text = re.sub(r'"(\w+)_01[0-9a-z]{24}"', r'"\1_01k…"', text)
    return re.sub(r'("timestamp": ")[^"]+', r"\g<1>2026-11-29T20:15:00Z", text)


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
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

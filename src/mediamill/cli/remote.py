"""What every command has that asks the API: where it is, how to show the answer, how to end."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from mediamill.cli.installed import own_key, settings

if TYPE_CHECKING:
    from mediamill.client import Client
    from mediamill.client.models import Model

F = TypeVar("F", bound=Callable[..., Any])


class Exit(IntEnum):
    """How a command ends. Scripts may rely on the numbers."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    NOT_FOUND = 3
    NOT_ALLOWED = 4
    TEMPORARY = 5
    CONFLICT = 6
    TIMEOUT = 7
    FAILED = 8
    FAILED_FOR_NOW = 9
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_MEANINGS = {
    Exit.OK: "done",
    Exit.UNEXPECTED: "something unexpected",
    Exit.USAGE: "the command or request is wrong; change it",
    Exit.NOT_FOUND: "there is no such thing, or it was deleted",
    Exit.NOT_ALLOWED: "no key, or one that may not do this",
    Exit.TEMPORARY: "no answer, or too busy; the same command may work later",
    Exit.CONFLICT: "its state does not allow that",
    Exit.TIMEOUT: "--timeout is over; the work goes on",
    Exit.FAILED: "the work failed for good",
    Exit.FAILED_FOR_NOW: "the work failed in a way that a replay may mend",
    Exit.INTERRUPTED: "Ctrl-C; the work goes on",
}


def say(text: str) -> None:
    """Talk: stdout is for data alone."""
    click.echo(text, err=True)


class Row(dict[str, Any]):
    """What a command shows that does not come from the API."""

    def as_dict(self) -> dict[str, Any]:
        return dict(self)


@dataclass(frozen=True, slots=True)
class Out:
    """Where the data of a command goes, in the form that was asked for."""

    form: str

    def many(
        self, items: Iterable[Model | Row], columns: Mapping[str, Callable[[Any], Any]]
    ) -> None:
        """A list. `jsonl` and `ids` are written as they come."""
        match self.form:
            case "json":
                click.echo(json.dumps([i.as_dict() for i in items], indent=2, ensure_ascii=False))
            case "jsonl":
                for item in items:
                    click.echo(json.dumps(item.as_dict(), ensure_ascii=False))
            case "ids":
                for item in items:
                    click.echo(_id(item))
            case _:
                rows = [[_text(show(item)) for show in columns.values()] for item in items]
                table(list(columns), rows)

    def one(self, item: Model | Row) -> None:
        match self.form:
            case "json":
                click.echo(json.dumps(item.as_dict(), indent=2, ensure_ascii=False))
            case "jsonl":
                click.echo(json.dumps(item.as_dict(), ensure_ascii=False))
            case "ids":
                click.echo(_id(item))
            case _:
                shown = item.as_dict()
                width = max(map(len, shown), default=0)
                for name, value in shown.items():
                    text = (
                        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                    )
                    click.echo(f"{name:{width}}  {'-' if value is None else text}")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns; nothing at all but the titles when there are no rows."""
    widths = [max(len(c) for c in column) for column in zip(titles, *rows, strict=True)]
    for row in [[t.upper() for t in titles], *rows]:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())


def first(items: Iterator[Any], limit: int) -> Iterator[Any]:
    """At most so many of a list that pages by itself."""
    return islice(items, limit)


limited = click.option(
    "--limit", type=click.IntRange(1), default=50, show_default=True, help="At most so many."
)


def shaped(command: F) -> F:
    """Let a command be asked for the form of its output; it gets an `Out` for it, by name."""

    @click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json", "jsonl", "ids"]),
        default="table",
        show_default=True,
    )
    @functools.wraps(command)
    def run(*args: Any, output: str, **given: Any) -> None:
        command(*args, out=Out(output), **given)

    return run  # type: ignore[return-value]


def remote(command: F) -> F:
    """Give a command a client, and a way to show things; end it with the right exit code."""

    @click.option("--url", envvar="MEDIAMILL_URL", help="The API; default: this machine's.")
    @click.option("--api-key", envvar="MEDIAMILL_API_KEY", help="Default: the key that `up` made.")
    @shaped
    @functools.wraps(command)
    def run(*args: Any, url: str | None, api_key: str | None, out: Out, **given: Any) -> None:
        with connected(url, api_key) as client:
            command(client, out, *args, **given)

    return run  # type: ignore[return-value]


@contextmanager
def connected(url: str | None, api_key: str | None) -> Iterator[Client]:
    """A client; what goes wrong inside becomes a sentence and an exit code."""
    from mediamill.client import Client

    try:
        with Client(*place(url, api_key)) as client:
            yield client
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
    except Exception as error:
        end(error)


def place(url: str | None, api_key: str | None) -> tuple[str, str]:
    """Where the API is and the key for it; what is not named is this machine's."""
    if not url or not api_key:
        found = settings()
        url = url or found.base_url
        api_key = api_key or own_key(found)
    return url, api_key


def end(error: Exception) -> NoReturn:
    """Say what is wrong, and leave with its exit code. Raises what is not of the client."""
    from mediamill.client import Error, Problem

    if not isinstance(error, (Error, OSError)):
        raise error
    say(f"Error: {error}")
    if isinstance(error, Problem):
        for fault in error.errors:
            say(f"  {fault.get('pointer') or fault.get('parameter')}: {fault.get('detail')}")
    advice = getattr(error, "advice", "")
    if advice:
        say(f"  {advice}")
    sys.exit(exit_code(error))


def exit_code(error: Exception) -> Exit:
    """Whether, and how, trying again could help."""
    from mediamill import client

    match error:
        case client.WaitTimeout():
            return Exit.TIMEOUT
        case client.WorkFailed():
            return Exit.FAILED_FOR_NOW if error.retryable else Exit.FAILED
        case client.NotFound() | client.Gone():
            return Exit.NOT_FOUND
        case client.Unauthenticated() | client.Forbidden():
            return Exit.NOT_ALLOWED
        case client.ConnectionFailed() | client.RateLimited() | client.Unavailable():
            return Exit.TEMPORARY
        case client.Conflict():
            return Exit.CONFLICT
        case client.Problem():
            return Exit.TEMPORARY if error.retryable else Exit.USAGE
        case _:
            return Exit.UNEXPECTED


def _id(item: Model | Row) -> str:
    shown = item.as_dict()
    return str(
        next((shown[name] for name in ("id", "queue", "name", "language") if shown.get(name)), "")
    )


def _text(value: Any) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:,.1f}"
        case _:
            return str(value).replace("\n", " ")


def ago(moment: Any) -> str:
    """How long ago, in one word."""
    from datetime import UTC, datetime

    seconds = max(0, int((datetime.now(UTC) - moment).total_seconds()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"

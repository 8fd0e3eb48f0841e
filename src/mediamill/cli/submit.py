"""`mediamill submit`: files up, and if wanted their results watched."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mediamill.cli.offers import offered
from mediamill.cli.remote import Exit, Out, exit_code, remote, say

if TYPE_CHECKING:
    from mediamill.client import Client, Media, OutputProgress, Progress

_PLAIN_SECONDS: Final = 5.0
COLUMNS: Final[dict[str, Any]] = {
    "id": lambda m: m.id,
    "state": lambda m: m.state,
    "file": lambda m: m.filename,
    "recipe": lambda m: f"{m.recipe}@{m.recipe_version}",
    "variants": lambda m: len(getattr(m, "variants", [])),
    "error": lambda m: (m.error or {}).get("code"),
}


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE…", type=click.Path(allow_dash=True))
@click.option("--recipe", default="web", show_default=True, shell_complete=offered("recipes"))
@click.option("--recipe-version", type=int, help="Default: the newest.")
@click.option("--metadata", multiple=True, metavar="NAME=VALUE", help="Kept with the media.")
@click.option(
    "--way",
    type=click.Choice(["auto", "direct", "multipart", "tus"]),
    default="auto",
    show_default=True,
)
@click.option("--watch", is_flag=True, help="Show progress until the end.")
@click.option("--wait", is_flag=True, help="Wait for the end, quietly.")
@click.option("--timeout", type=float, help="Wait no longer than so many seconds for each.")
@click.option("--download", type=click.Path(file_okay=False, path_type=Path), help="Into here.")
@remote
def submit(
    client: Client,
    out: Out,
    *,
    files: tuple[str, ...],
    recipe: str,
    recipe_version: int | None,
    metadata: tuple[str, ...],
    way: Any,
    watch: bool,
    wait: bool,
    timeout: float | None,
    download: Path | None,
) -> None:
    """Upload files and queue them; `-` is stdin, a folder stands for the files in it, and a file
    at an https address is fetched by the server.

    An upload that is interrupted goes on with the same command. Ctrl-C later leaves the work
    running.
    """
    notes = _pairs(metadata)
    names = list(_expanded(files))
    found: list[Media] = []
    worst = Exit.OK
    wanted: dict[str, Any] = {
        "recipe": recipe,
        "recipe_version": recipe_version,
        "metadata": notes,
    }
    for name in names:
        if _is_address(name):
            found.append(client.media.fetch(name, **wanted))
            continue
        source = sys.stdin.buffer.read() if name == "-" else Path(name)
        state = None if isinstance(source, bytes) else state_file(source, recipe)
        try:
            with _bar(name, shown=watch) as moved:
                media = client.media.submit(
                    source, **wanted, way=way, resume_from=state, on_progress=moved
                )
        except KeyboardInterrupt:
            say("\nStopped while sending; large files go on with the same command.")
            for done in found:
                say(f"  mediamill media wait {done.id}")
            sys.exit(Exit.INTERRUPTED)
        found.append(media)
    if watch or wait or download is not None:
        found, worst = _to_the_end(client, found, timeout, download, watch=watch)
    out.many(found, COLUMNS)
    sys.exit(worst)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--recipe", default="web", show_default=True, shell_complete=offered("recipes"))
@click.option("--recipe-version", type=int, help="Default: the newest.")
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where outputs go; default: a folder named after the file and recipe.",
)
@click.option("--quiet", is_flag=True, help="Show no progress.")
def run(
    *, file: Path, recipe: str, recipe_version: int | None, into: Path | None, quiet: bool
) -> None:
    """Process a file here and now: the same engine and sandbox, and no server or database.

    What was made goes to stdout as JSON.
    """
    import asyncio

    from mediamill import alone, observability
    from mediamill.cli.installed import settings
    from mediamill.client import OutputProgress, Progress
    from mediamill.failures import Failure, Refused

    observability.configure_logs("run", level="error")
    target = into or Path(f"{file.stem}.{recipe}")
    with _bar(file.name, shown=not quiet) as moved:

        def told(stage: str, percent: float, outputs: Sequence[Mapping[str, Any]]) -> None:
            if moved is not None:
                parts = tuple(OutputProgress.model_validate(part) for part in outputs)
                moved(Progress("process", stage, percent, outputs=parts))

        try:
            made = asyncio.run(
                alone.process(
                    settings(),
                    file,
                    target,
                    recipe=recipe,
                    recipe_version=recipe_version,
                    on_move=told,
                )
            )
        except (Failure, Refused) as error:
            say(f"Error: {error}")
            say(f"  {error.problem.code.advice}")
            wrong = Exit.USAGE if isinstance(error, Refused) else Exit.FAILED
            sys.exit(Exit.FAILED_FOR_NOW if error.code.retryable else wrong)
        except KeyboardInterrupt:
            sys.exit(Exit.INTERRUPTED)
    for warning in made.warnings:
        say(f"Note: {warning}")
    click.echo(
        json.dumps(
            {"media": made.described, "variants": made.outputs}, indent=2, ensure_ascii=False
        )
    )


def _to_the_end(
    client: Client,
    found: list[Media],
    timeout: float | None,
    download: Path | None,
    *,
    watch: bool,
) -> tuple[list[Media], Exit]:
    """Each at its end, and the exit code of the first that has none."""
    from mediamill.client import WaitTimeout, WorkFailed

    ended, worst = [], Exit.OK
    for number, media in enumerate(found):
        try:
            with (
                come_back([m.id for m in found[number:]]),
                _bar(media.filename or media.id, shown=watch) as moved,
            ):
                last = client.media.wait(media.id, timeout_seconds=timeout, on_progress=moved)
            if download is not None:
                folder = download / media.id
                for variant in last.variants:
                    target = folder / variant.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    client.media.download(last, variant.name, target)
        except (WaitTimeout, WorkFailed) as error:
            say(f"Error: {error}")
            if isinstance(error, WorkFailed) and error.advice:
                say(f"  {error.advice}")
            worst = worst or exit_code(error)
            last = client.media.get(media)
        ended.append(last)
    return ended, worst


@contextmanager
def come_back(left: Sequence[str]) -> Iterator[None]:
    """Ctrl-C leaves the work running; say how to come back to it. Outside of any bar, since a bar
    is drawn over what is said inside."""
    try:
        yield
    except KeyboardInterrupt:
        say("\nIt goes on without you. Come back with:")
        for each in left:
            kind = "jobs" if each.startswith("job_") else "media"
            say(f"  mediamill {kind} wait {each}")
        sys.exit(Exit.INTERRUPTED)


def state_file(path: Path, recipe: str) -> Path:
    """Where an upload of this file remembers how far it came."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    name = hashlib.sha256(f"{path.resolve()}\n{recipe}".encode()).hexdigest()[:24]
    return Path(home) / "mediamill" / "uploads" / f"{name}.json"


@contextmanager
def _bar(name: str, *, shown: bool) -> Iterator[Any]:
    """Show progress: a bar on a terminal, else a line every few seconds."""
    if not shown:
        yield None
        return
    if not (sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and "CI" not in os.environ):
        yield _Lines(name)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:24.24}"),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>4.0f} %  {task.fields[stage]:<12}"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(name, total=100, stage="")
        parts: dict[str, Any] = {}

        def moved(seen: Progress) -> None:
            bars.update(task, completed=seen.percent or 0, stage=seen.stage or "")
            for output in seen.outputs:
                if output.name not in parts:
                    parts[output.name] = bars.add_task(f"  {output.name}", total=100, stage="")
                bars.update(parts[output.name], completed=output.percent or 0, stage=_speed(output))
            under_way = {output.name for output in seen.outputs}
            if not under_way and seen.stage in ("encode", "processing"):
                return  # not every word about it tells the outputs
            for ended in parts.keys() - under_way:  # it is made, and is being checked
                bars.update(parts[ended], completed=100, stage="")

        yield moved


def _speed(output: OutputProgress) -> str:
    """How fast it is made, and how long it will still take."""
    speed = f"{output.speed:.1f}×" if output.speed else ""
    left = f" {output.seconds_left:.0f} s" if output.seconds_left else ""
    return speed + left


class _Lines:
    """Progress in plain lines: at each new stage, and now and then."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stage: str | None = None
        self._said_at = 0.0

    def __call__(self, seen: Progress) -> None:
        now = time.monotonic()
        if seen.stage != self._stage or now - self._said_at >= _PLAIN_SECONDS:
            percent = "" if seen.percent is None else f" {seen.percent:.0f} %"
            parts = ", ".join(
                f"{o.name} {o.percent:.0f} %" for o in seen.outputs if o.percent is not None
            )
            say(f"{self._name}: {seen.stage}{percent}{f' ({parts})' if parts else ''}")
            self._stage, self._said_at = seen.stage, now


def _expanded(files: tuple[str, ...]) -> Iterator[str]:
    for name in files:
        path = Path(name)
        if name == "-" or _is_address(name) or path.is_file():
            yield name
        elif path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.is_file() and p.name[0] != ".")
            if not inside:
                raise click.UsageError(f"There is no file in {name}.")
            yield from map(str, inside)
        else:
            raise click.UsageError(f"There is no file {name}.")


def _is_address(name: str) -> bool:
    return name.startswith(("https://", "http://"))


def _pairs(given: tuple[str, ...]) -> dict[str, str]:
    for text in given:
        if "=" not in text:
            raise click.UsageError(f"--metadata {text} should read NAME=VALUE.")
    return {name: value for name, _, value in (text.partition("=") for text in given)}

"""Commands about recipes."""

from __future__ import annotations

import json
import sys
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mediamill.cli.offers import offered
from mediamill.cli.remote import Exit, Out, remote, say

if TYPE_CHECKING:
    from mediamill.client import Client

_COLUMNS: Final[dict[str, Any]] = {
    "name": lambda r: r.name,
    "version": lambda r: r.version,
    "kinds": lambda r: ",".join(r.kinds),
    "from": lambda r: "built in" if r.built_in else "operator",
}
_PLANNED_COLUMNS: Final[dict[str, Any]] = {
    "name": lambda o: o.name,
    "type": lambda o: o.type,
    "width": lambda o: o.width,
    "height": lambda o: o.height,
    "most bytes": lambda o: o.most_bytes,
    "note": lambda o: o.note,
}


@click.group()
def recipes() -> None:
    """Named lists of wanted outputs."""


@recipes.command("list")
@remote
def recipes_list(client: Client, out: Out) -> None:
    """List the newest version of every recipe."""
    out.many(client.recipes.list(), _COLUMNS)


@recipes.command("show")
@click.argument("name", shell_complete=offered("recipes"))
@click.option("--version", type=int, help="Default: the newest.")
@remote
def recipes_show(client: Client, out: Out, *, name: str, version: int | None) -> None:
    """Show a recipe with every default written out."""
    found = client.recipes.get(name, version=version)
    if out.form == "table":
        click.echo(_text(found.recipe))
    else:
        out.one(found)


@recipes.command("diff")
@click.argument("name", shell_complete=offered("recipes"))
@click.argument("old", type=int)
@click.argument("new", type=int)
@remote
def recipes_diff(client: Client, out: Out, *, name: str, old: int, new: int) -> None:
    """Compare two versions of a recipe."""
    before, after = (client.recipes.get(name, version=v) for v in (old, new))
    lines = unified_diff(
        _text(before.recipe).splitlines(),
        _text(after.recipe).splitlines(),
        f"{name}@{old}",
        f"{name}@{new}",
        lineterm="",
    )
    for line in lines:
        click.echo(line)


@recipes.command("validate")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@remote
def recipes_validate(client: Client, out: Out, *, file: Path) -> None:
    """Check a recipe file (JSON); every fault at once."""
    try:
        given = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise click.UsageError(f"{file} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise click.UsageError(f"{file} should hold a JSON object.")
    verdict = client.recipes.validate(given)
    if out.form in ("json", "jsonl"):
        out.one(verdict)
    for fault in verdict.errors:
        say(f"{fault['pointer'] or '/'}: {fault['detail']}")
    if not verdict.valid:
        sys.exit(Exit.USAGE)
    say("valid")


@recipes.command("dry-run")
@click.argument("media", shell_complete=offered("media"))
@click.argument("recipe", metavar="NAME|FILE", shell_complete=offered("recipes"))
@click.option("--version", type=int, help="Of a recipe that is named; default: the newest.")
@remote
def recipes_dry_run(
    client: Client, out: Out, *, media: str, recipe: str, version: int | None
) -> None:
    """Show what a recipe, by name or in a JSON file, would make of a media that is there."""
    file = Path(recipe)
    given: Any = recipe
    if file.suffix == ".json":
        try:
            given = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise click.UsageError(f"{file}: {error}") from None
    found = client.recipes.dry_run(media, given, version=version)
    if out.form in ("json", "jsonl"):
        out.one(found)
        return
    out.many(found.outputs, _PLANNED_COLUMNS)
    expected = found.estimate.p50_seconds
    if expected is not None:
        say(f"The like of it took {expected:.1f} s, half of the time.")


def _text(recipe: dict[str, Any]) -> str:
    return json.dumps(recipe, indent=2, ensure_ascii=False)

"""Commands for who runs the installation: queues, workers, and a view of all."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from mediamill.cli.offers import offered
from mediamill.cli.remote import Out, Row, ago, first, remote, say, shaped

if TYPE_CHECKING:
    from mediamill.client import Client

_QUEUE_COLUMNS: Final[dict[str, Any]] = {
    "queue": lambda q: q.queue,
    "queued": lambda q: q.queued,
    "processing": lambda q: q.processing,
    "oldest s": lambda q: q.oldest_seconds,
    "per min": lambda q: q.rate_per_minute,
    "slots": lambda q: q.slots,
    "cap": lambda q: q.concurrency,
    "state": lambda q: "draining" if q.draining else "paused" if q.paused else "open",
}
_WORKER_COLUMNS: Final[dict[str, Any]] = {
    "id": lambda w: w.id,
    "host": lambda w: w.host,
    "version": lambda w: w.version,
    "slots": lambda w: ",".join(f"{k}={v}" for k, v in w.slots.items()),
    "sandbox": lambda w: w.sandbox,
    "up": lambda w: ago(w.started_at),
    "seen": lambda w: ago(w.seen_at),
    "state": lambda w: "draining" if w.draining else "working",
}


@click.group()
def queues() -> None:
    """Where jobs wait."""


@queues.command("list")
@remote
def queues_list(client: Client, out: Out) -> None:
    """Show every queue: depth, age, slots, settings."""
    out.many(client.queues.list(), _QUEUE_COLUMNS)


@queues.command("pause")
@click.argument("name", shell_complete=offered("queues"))
@remote
def queues_pause(client: Client, out: Out, *, name: str) -> None:
    """Claim no more of a queue; what runs finishes."""
    out.many([client.queues.pause(name)], _QUEUE_COLUMNS)


@queues.command("resume")
@click.argument("name", shell_complete=offered("queues"))
@remote
def queues_resume(client: Client, out: Out, *, name: str) -> None:
    """Go on."""
    out.many([client.queues.resume(name)], _QUEUE_COLUMNS)


@queues.command("cap")
@click.argument("name", shell_complete=offered("queues"))
@click.argument("most", metavar="NUMBER|none")
@remote
def queues_cap(client: Client, out: Out, *, name: str, most: str) -> None:
    """Run at most so many of a queue at once, over all workers."""
    if most != "none" and not (most.isascii() and most.isdigit()):
        raise click.UsageError("Give a number, or `none`.")
    wanted = None if most == "none" else int(most)
    out.many([client.queues.cap(name, wanted)], _QUEUE_COLUMNS)


@click.group()
def workers() -> None:
    """Who works."""


@workers.command("list")
@remote
def workers_list(client: Client, out: Out) -> None:
    """Show the workers that were seen lately."""
    out.many(client.workers.list(), _WORKER_COLUMNS)


@workers.command("drain")
@click.argument("id", shell_complete=offered("workers"))
@remote
def workers_drain(client: Client, out: Out, *, id: str) -> None:
    """Ask a worker to finish what it runs and leave."""
    client.workers.drain(id)
    say(f"{id} finishes and leaves")


@click.command()
@click.option("--every", type=click.FloatRange(0.2), default=2.0, show_default=True)
@click.option("--once", is_flag=True, help="Show it once.")
@remote
def top(client: Client, out: Out, *, every: float, once: bool) -> None:
    """Watch queues, workers and what runs now, until Ctrl-C."""
    live = sys.stdout.isatty() and not once
    while True:
        now = datetime.now(UTC)
        queues, workers = client.queues.list(), client.workers.list()
        running = list(first(client.jobs.list(state="processing", page_size=20), 20))
        if out.form == "ids":
            out.many(running, _RUNNING_COLUMNS)
        elif out.form != "table":
            out.one(
                Row(
                    at=now.isoformat(),
                    queues=[q.as_dict() for q in queues],
                    workers=[w.as_dict() for w in workers],
                    running=[j.as_dict() for j in running],
                )
            )
        else:
            if live:
                click.clear()
            click.echo(f"{now:%H:%M:%S} UTC")
            shown: tuple[tuple[Any, Any], ...] = (
                (queues, _QUEUE_COLUMNS),
                (workers, _WORKER_COLUMNS),
                (running, _RUNNING_COLUMNS),
            )
            for items, columns in shown:
                click.echo()
                out.many(items, columns)
        if once:
            return
        time.sleep(every)


_RUNNING_COLUMNS: Final[dict[str, Any]] = {
    "job": lambda j: j.id,
    "kind": lambda j: j.kind,
    "stage": lambda j: j.stage,
    "%": lambda j: j.progress,
    "attempt": lambda j: f"{j.attempt}/{j.max_attempts}",
    "age": lambda j: ago(j.created_at),
}


@click.group()
def config() -> None:
    """The settings of this machine."""


@config.command("show")
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@shaped
def config_show(*, out: Out, origin: bool) -> None:
    """Show the settings as they hold; secrets are not shown."""
    from mediamill import config as configuration
    from mediamill.cli.installed import settings

    found = settings()
    origins = configuration.origins()
    rows = (
        Row(name=name, value="-" if value is None else str(value), origin=origins[name])
        for name, value in configuration.shown(found).items()
    )
    columns = {"setting": lambda r: r["name"], "value": lambda r: r["value"]}
    out.many(rows, columns | ({"from": lambda r: r["origin"]} if origin else {}))


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completions(shell: str) -> None:
    """Print what completes this command in a shell; put it where your shell reads such things."""
    from click.shell_completion import get_completion_class

    from mediamill.cli import main

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "mediamill", "_MEDIAMILL_COMPLETE").source())

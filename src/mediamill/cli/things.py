"""Commands about media, jobs and dead letters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mediamill.cli.offers import offered
from mediamill.cli.remote import Out, ago, first, limited, remote, say, table
from mediamill.cli.submit import COLUMNS as MEDIA_COLUMNS
from mediamill.cli.submit import come_back

if TYPE_CHECKING:
    from mediamill.client import Client, Timeline

_JOB_COLUMNS: Final[dict[str, Any]] = {
    "id": lambda j: j.id,
    "state": lambda j: "dead letter" if j.dead_letter else j.state,
    "kind": lambda j: j.kind,
    "queue": lambda j: j.queue,
    "stage": lambda j: j.stage,
    "%": lambda j: j.progress,
    "attempt": lambda j: f"{j.attempt}/{j.max_attempts}",
    "age": lambda j: ago(j.created_at),
    "error": lambda j: (j.error or {}).get("code"),
}
_GROUP_COLUMNS: Final[dict[str, Any]] = {
    "code": lambda g: g.code,
    "jobs": lambda g: g.count,
    "since": lambda g: ago(g.first_at),
    "newest": lambda g: g.newest,
    "advice": lambda g: g.advice,
}
_SUBTITLES_COLUMNS: Final[dict[str, Any]] = {
    "language": lambda s: s.language,
    "label": lambda s: s.label,
    "format": lambda s: s.format,
    "charset": lambda s: s.charset,
    "cues": lambda s: s.cues,
}
_CANARIES: Final = (1, 10)
_CANARY_SECONDS: Final = 3600.0


@click.group()
def media() -> None:
    """Uploads and what came of them."""


@media.command("list")
@click.option("--state", help="Only these, such as failed,expired.")
@click.option("--kind", help="image, video or audio.")
@click.option("--recipe", shell_complete=offered("recipes"))
@click.option("--code", shell_complete=offered("failure codes"), help="Why it failed.")
@limited
@remote
def media_list(
    client: Client,
    out: Out,
    *,
    state: str | None,
    kind: str | None,
    recipe: str | None,
    code: str | None,
    limit: int,
) -> None:
    """List media, newest first."""
    items = client.media.list(
        state=state, kind=kind, recipe=recipe, error_code=code, page_size=min(limit, 200)
    )
    columns = {k: v for k, v in MEDIA_COLUMNS.items() if k != "variants"}
    out.many(first(items, limit), columns | {"age": lambda m: ago(m.created_at)})


@media.command("get")
@click.argument("id", shell_complete=offered("media"))
@remote
def media_get(client: Client, out: Out, *, id: str) -> None:
    """Show a media in full."""
    out.one(client.media.get(id))


@media.command("wait")
@click.argument("id", shell_complete=offered("media"))
@click.option("--timeout", type=float, help="Seconds; exit code 7 when they are over.")
@remote
def media_wait(client: Client, out: Out, *, id: str, timeout: float | None) -> None:
    """Wait until a media is at its end; the exit code says which."""
    with come_back([id]):
        out.one(client.media.wait(id, timeout_seconds=timeout))


@media.command("download")
@click.argument("id", shell_complete=offered("media"))
@click.argument("names", nargs=-1, metavar="[VARIANT]…")
@click.option("--into", type=click.Path(file_okay=False, path_type=Path), default=".")
@remote
def media_download(
    client: Client, out: Out, *, id: str, names: tuple[str, ...], into: Path
) -> None:
    """Download variants (default: all), each checked against the manifest."""
    for name in names or [v.name for v in client.media.get(id).variants]:
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        path = client.media.download(id, name, target)
        if out.form in ("json", "jsonl"):
            click.echo(json.dumps({"name": name, "path": str(path)}, ensure_ascii=False))
        else:
            click.echo(path)


@media.command("original")
@click.argument("id", shell_complete=offered("media"))
@click.option("--into", type=click.Path(path_type=Path), default=".", help="A file or folder.")
@remote
def media_original(client: Client, out: Out, *, id: str, into: Path) -> None:
    """Download the original, checked against what was accepted."""
    click.echo(client.media.original(id, into))


@media.command("process")
@click.argument("id", shell_complete=offered("media"))
@click.option("--recipe", shell_complete=offered("recipes"), help="Default: the same again.")
@click.option("--recipe-version", type=int)
@remote
def media_process(
    client: Client, out: Out, *, id: str, recipe: str | None, recipe_version: int | None
) -> None:
    """Process a media again."""
    out.one(client.media.process(id, recipe=recipe, recipe_version=recipe_version))


@media.command("delete")
@click.argument("ids", nargs=-1, required=True, metavar="ID…", shell_complete=offered("media"))
@click.option("--yes", is_flag=True, help="Do not ask.")
@remote
def media_delete(client: Client, out: Out, *, ids: tuple[str, ...], yes: bool) -> None:
    """Delete media with all their bytes."""
    if not yes:
        click.confirm(f"Delete {len(ids)} media for good?", abort=True, err=True)
    for id in ids:
        client.media.delete(id)
        say(f"{id} is deleted")


@media.group("subtitles")
def media_subtitles() -> None:
    """Files of subtitles beside a film."""


@media_subtitles.command("list")
@click.argument("id", shell_complete=offered("media"))
@remote
def media_subtitles_list(client: Client, out: Out, *, id: str) -> None:
    """List them, by language."""
    out.many(client.media.subtitles(id), _SUBTITLES_COLUMNS)


@media_subtitles.command("add")
@click.argument("id", shell_complete=offered("media"))
@click.argument("language")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--label", help="What a player shows for them.")
@remote
def media_subtitles_add(
    client: Client, out: Out, *, id: str, language: str, file: Path, label: str | None
) -> None:
    """Lay a file (SubRip or WebVTT) beside a film; the next processing publishes it."""
    made = client.media.add_subtitles(id, language, file.read_bytes(), label=label)
    out.many([made], _SUBTITLES_COLUMNS)


@media_subtitles.command("remove")
@click.argument("id", shell_complete=offered("media"))
@click.argument("language")
@remote
def media_subtitles_remove(client: Client, out: Out, *, id: str, language: str) -> None:
    """Take one away."""
    client.media.remove_subtitles(id, language)
    say(f"{language} is removed")


@media.command("timeline")
@click.argument("id", shell_complete=offered("media"))
@remote
def media_timeline(client: Client, out: Out, *, id: str) -> None:
    """Show where the time went."""
    _timeline(out, client.media.timeline(id))


@click.group()
def jobs() -> None:
    """Units of background work."""


@jobs.command("list")
@click.option("--state", help="Only these, such as queued,processing.")
@click.option("--kind")
@click.option("--queue", shell_complete=offered("queues"))
@click.option("--code", shell_complete=offered("failure codes"), help="Why it failed.")
@limited
@remote
def jobs_list(
    client: Client,
    out: Out,
    *,
    state: str | None,
    kind: str | None,
    queue: str | None,
    code: str | None,
    limit: int,
) -> None:
    """List jobs, newest first."""
    items = client.jobs.list(
        state=state, kind=kind, queue=queue, error_code=code, page_size=min(limit, 200)
    )
    out.many(first(items, limit), _JOB_COLUMNS)


@jobs.command("create")
@click.argument("kind")
@click.option("--payload", default="{}", help="JSON, or @FILE.")
@click.option("--delay", type=float, default=0.0, help="Seconds before it may run.")
@click.option("--dedup-key")
@remote
def jobs_create(
    client: Client, out: Out, *, kind: str, payload: str, delay: float, dedup_key: str | None
) -> None:
    """Queue a job of a kind that a worker has offered."""
    text = Path(payload[1:]).read_text("utf-8") if payload.startswith("@") else payload
    try:
        given = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--payload is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise click.UsageError("--payload should be a JSON object.")
    out.one(client.jobs.create(kind, given, delay_seconds=delay, dedup_key=dedup_key))


@jobs.command("get")
@click.argument("id", shell_complete=offered("jobs"))
@remote
def jobs_get(client: Client, out: Out, *, id: str) -> None:
    """Show a job in full."""
    out.one(client.jobs.get(id))


@jobs.command("wait")
@click.argument("id", shell_complete=offered("jobs"))
@click.option("--timeout", type=float, help="Seconds; exit code 7 when they are over.")
@remote
def jobs_wait(client: Client, out: Out, *, id: str, timeout: float | None) -> None:
    """Wait until a job has ended; the exit code says how."""
    with come_back([id]):
        out.one(client.jobs.wait(id, timeout_seconds=timeout))


@jobs.command("cancel")
@click.argument("ids", nargs=-1, required=True, metavar="ID…", shell_complete=offered("jobs"))
@remote
def jobs_cancel(client: Client, out: Out, *, ids: tuple[str, ...]) -> None:
    """Cancel jobs."""
    out.many((client.jobs.cancel(id) for id in ids), _JOB_COLUMNS)


@jobs.command("replay")
@click.argument("ids", nargs=-1, required=True, metavar="ID…", shell_complete=offered("jobs"))
@remote
def jobs_replay(client: Client, out: Out, *, ids: tuple[str, ...]) -> None:
    """Queue failed jobs again."""
    out.many((client.jobs.replay(id) for id in ids), _JOB_COLUMNS)


@jobs.command("timeline")
@click.argument("id", shell_complete=offered("jobs"))
@remote
def jobs_timeline(client: Client, out: Out, *, id: str) -> None:
    """Show where the time went."""
    _timeline(out, client.jobs.timeline(id))


@click.group()
def dlq() -> None:
    """Dead letters: jobs whose attempts are used up."""


@dlq.command("list")
@click.option("--code", shell_complete=offered("failure codes"))
@click.option("--kind")
@click.option("--queue", shell_complete=offered("queues"))
@limited
@remote
def dlq_list(
    client: Client,
    out: Out,
    *,
    code: str | None,
    kind: str | None,
    queue: str | None,
    limit: int,
) -> None:
    """List dead letters, newest first."""
    items = client.dead_letters.list(code=code, kind=kind, queue=queue, page_size=min(limit, 200))
    out.many(first(items, limit), _JOB_COLUMNS)


@dlq.command("groups")
@remote
def dlq_groups(client: Client, out: Out) -> None:
    """Dead letters by code: how many, since when, what to do."""
    out.many(client.dead_letters.groups(), _GROUP_COLUMNS)


@dlq.command("show")
@click.argument("id", shell_complete=offered("dead letters"))
@remote
def dlq_show(client: Client, out: Out, *, id: str) -> None:
    """Show a dead letter with every attempt, its commands and the last words of its tools."""
    out.one(client.dead_letters.get(id))


@dlq.command("replay")
@click.argument("ids", nargs=-1, metavar="[ID]…", shell_complete=offered("dead letters"))
@click.option("--all", "everything", is_flag=True, help="All that fit the filters.")
@click.option("--canary", is_flag=True, help="One first, then ten, then the rest.")
@click.option("--code", shell_complete=offered("failure codes"))
@click.option("--kind")
@click.option("--queue", shell_complete=offered("queues"))
@click.option("--rate", type=float, default=10.0, show_default=True, help="So many a second.")
@remote
def dlq_replay(
    client: Client,
    out: Out,
    *,
    ids: tuple[str, ...],
    everything: bool,
    canary: bool,
    code: str | None,
    kind: str | None,
    queue: str | None,
    rate: float,
) -> None:
    """Queue dead letters again: these, or all that fit the filters.

    With --canary the first one and then ten more must succeed before the rest is replayed.
    """
    if bool(ids) == (everything or canary):
        raise click.UsageError("Name ids, or give --all or --canary with filters.")
    if ids:
        out.many((client.jobs.replay(id) for id in ids), _JOB_COLUMNS)
        return
    which: dict[str, Any] = {"code": code, "kind": kind, "queue": queue}
    if canary:
        for count in _CANARIES:
            _try_some(client, count, which)
    done = client.dead_letters.replay(**which, rate_per_second=rate)
    say(f"{done.replayed} are queued again, over {done.seconds:g} s")


def _try_some(client: Client, count: int, which: dict[str, Any]) -> None:
    """Replay so many and wait for them. Raises WorkFailed for the first that fails again."""
    some = list(first(client.dead_letters.list(**which, page_size=count), count))
    for job in some:
        client.jobs.replay(job)
    for job in some:
        client.jobs.wait(job, timeout_seconds=_CANARY_SECONDS)
    if some:
        say(f"{len(some)} went well")


@dlq.command("discard")
@click.argument(
    "ids", nargs=-1, required=True, metavar="ID…", shell_complete=offered("dead letters")
)
@remote
def dlq_discard(client: Client, out: Out, *, ids: tuple[str, ...]) -> None:
    """Take dead letters off the list for good."""
    out.many((client.dead_letters.discard(id) for id in ids), _JOB_COLUMNS)


def _timeline(out: Out, found: Timeline) -> None:
    if out.form != "table":
        out.one(found)
        return
    rows = [
        [s.name, f"{s.seconds:.3f} s", str(s.attempt or "-"), s.worker or "-", s.reason or "-"]
        for s in found.segments
    ]
    table(["what", "seconds", "attempt", "worker", "reason"], rows)
    say(found.sentence)

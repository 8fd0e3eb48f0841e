"""What a shell is offered where a command takes an id or a name: what the server has just now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import click

from mediamill.cli.remote import place

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from mediamill.client import Client

_MOST: Final = 100
_SECONDS: Final = 2.0

# Each gives the newest values, with a word about every one.
_SOURCES: Final[dict[str, Callable[[Client], Iterable[tuple[str, str]]]]] = {
    "media": lambda c: ((m.id, f"{m.state} {m.filename or ''}") for m in c.media.list()),
    "jobs": lambda c: ((j.id, f"{j.state} {j.kind}") for j in c.jobs.list()),
    "dead letters": lambda c: (
        (j.id, f"{(j.error or {}).get('code')} {j.kind}") for j in c.dead_letters.list()
    ),
    "queues": lambda c: ((q.queue, f"{q.queued} queued") for q in c.queues.list()),
    "workers": lambda c: ((w.id, w.host) for w in c.workers.list()),
    "recipes": lambda c: ((r.name, ",".join(r.kinds)) for r in c.recipes.list()),
    "endpoints": lambda c: ((e.id, e.url) for e in c.webhooks.list()),
    "failure codes": lambda _: _codes(),
}
Complete = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def offered(source: str) -> Complete:
    """What completes a parameter. Whatever goes wrong, a shell is offered nothing and told
    nothing."""

    def complete(context: click.Context, _: click.Parameter, begun: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from mediamill.client import Client

        given: dict[str, Any] = context.params
        try:
            where = place(given.get("url"), given.get("api_key"))
            with Client(*where, timeout_seconds=_SECONDS, max_retries=0) as client:
                found = islice(_SOURCES[source](client), _MOST)
                return [CompletionItem(v, help=says) for v, says in found if v.startswith(begun)]
        except Exception:
            return []

    return complete


def _codes() -> Iterable[tuple[str, str]]:
    from mediamill.failures import Code

    return ((code.code, code.title) for code in Code)

"""Commands about webhooks: endpoints, deliveries, and trying them out on this machine."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mediamill.cli.installed import own_key, settings
from mediamill.cli.offers import offered
from mediamill.cli.remote import Exit, Out, ago, end, first, limited, remote, say

if TYPE_CHECKING:
    from mediamill.client import Client

_ENDPOINT_COLUMNS: Final[dict[str, Any]] = {
    "id": lambda e: e.id,
    "state": lambda e: e.state,
    "url": lambda e: e.url,
    "types": lambda e: ",".join(e.types) if e.types else "all",
    "failures": lambda e: e.failures,
    "reason": lambda e: e.reason,
}
_DELIVERY_COLUMNS: Final[dict[str, Any]] = {
    "id": lambda d: d.id,
    "state": lambda d: d.state,
    "type": lambda d: d.type,
    "attempt": lambda d: d.attempt,
    "status": lambda d: d.status,
    "age": lambda d: ago(d.created_at),
    "reason": lambda d: d.reason,
}
_LETTER_COLUMNS: Final[dict[str, Any]] = {
    "age": lambda m: ago(m.received_at),
    "id": lambda m: m.headers.get("webhook-id"),
    "body": lambda m: m.body[:80],
}


@click.group()
def webhooks() -> None:
    """Where you want to be told, and how that went."""


@webhooks.command("list")
@remote
def webhooks_list(client: Client, out: Out) -> None:
    """List endpoints, newest first."""
    out.many(client.webhooks.list(), _ENDPOINT_COLUMNS)


@webhooks.command("add")
@click.argument("address", metavar="URL")
@click.option("--types", help="Such as media.ready,job.*; default: all.")
@click.option("--description")
@click.option("--thin", is_flag=True, help="Send ids and the state only.")
@remote
def webhooks_add(
    client: Client,
    out: Out,
    *,
    address: str,
    types: str | None,
    description: str | None,
    thin: bool,
) -> None:
    """Register an endpoint. Its secret is shown this once."""
    out.one(
        client.webhooks.create(
            address,
            types=types.split(",") if types else None,
            description=description,
            payload="thin" if thin else "full",
        )
    )


@webhooks.command("get")
@click.argument("id", shell_complete=offered("endpoints"))
@remote
def webhooks_get(client: Client, out: Out, *, id: str) -> None:
    """Show an endpoint."""
    out.one(client.webhooks.get(id))


@webhooks.command("change")
@click.argument("id", shell_complete=offered("endpoints"))
@click.option("--to", "address", help="The address to send to from now on.")
@click.option("--types", help="Such as media.ready,job.*; `all` for every type.")
@click.option("--description")
@click.option("--payload", type=click.Choice(["full", "thin"]))
@remote
def webhooks_change(
    client: Client,
    out: Out,
    *,
    id: str,
    address: str | None,
    types: str | None,
    description: str | None,
    payload: str | None,
) -> None:
    """Change an endpoint."""
    changes: dict[str, Any] = {"url": address, "description": description, "payload": payload}
    changes = {name: value for name, value in changes.items() if value is not None}
    if types is not None:
        changes["types"] = None if types == "all" else types.split(",")
    if not changes:
        raise click.UsageError("Name what to change.")
    out.one(client.webhooks.change(id, **changes))


@webhooks.command("enable")
@click.argument("id", shell_complete=offered("endpoints"))
@remote
def webhooks_enable(client: Client, out: Out, *, id: str) -> None:
    """Switch an endpoint on again."""
    out.one(client.webhooks.change(id, state="enabled"))


@webhooks.command("disable")
@click.argument("id", shell_complete=offered("endpoints"))
@remote
def webhooks_disable(client: Client, out: Out, *, id: str) -> None:
    """Send nothing more to an endpoint."""
    out.one(client.webhooks.change(id, state="disabled"))


@webhooks.command("test")
@click.argument("id", shell_complete=offered("endpoints"))
@remote
def webhooks_test(client: Client, out: Out, *, id: str) -> None:
    """Send a `webhook.test` event now."""
    out.many([client.webhooks.test(id)], _DELIVERY_COLUMNS)


@webhooks.command("rotate")
@click.argument("id", shell_complete=offered("endpoints"))
@click.option("--overlap", type=float, default=86400.0, show_default=True, help="Seconds.")
@remote
def webhooks_rotate(client: Client, out: Out, *, id: str, overlap: float) -> None:
    """Make a new secret; the old one signs beside it for a while."""
    out.one(client.webhooks.rotate(id, overlap_seconds=overlap))


@webhooks.command("delete")
@click.argument("id", shell_complete=offered("endpoints"))
@remote
def webhooks_delete(client: Client, out: Out, *, id: str) -> None:
    """Forget an endpoint."""
    client.webhooks.delete(id)
    say(f"{id} is deleted")


@webhooks.command("deliveries")
@click.argument("id", shell_complete=offered("endpoints"))
@click.option("--state", help="Only these, such as pending,exhausted.")
@limited
@remote
def webhooks_deliveries(
    client: Client, out: Out, *, id: str, state: str | None, limit: int
) -> None:
    """List what was sent to an endpoint, newest first."""
    items = client.webhooks.deliveries(id, state=state, page_size=min(limit, 200))
    out.many(first(items, limit), _DELIVERY_COLUMNS)


@webhooks.command("delivery")
@click.argument("id")
@remote
def webhooks_delivery(client: Client, out: Out, *, id: str) -> None:
    """Show a delivery with what was sent and every attempt."""
    out.one(client.webhooks.delivery(id))


@webhooks.command("resend")
@click.argument("ids", nargs=-1, required=True, metavar="DELIVERY…")
@remote
def webhooks_resend(client: Client, out: Out, *, ids: tuple[str, ...]) -> None:
    """Send deliveries again, under the same webhook-id."""
    out.many((client.webhooks.redeliver(id) for id in ids), _DELIVERY_COLUMNS)


@webhooks.command("inbox")
@remote
def webhooks_inbox(client: Client, out: Out) -> None:
    """Show what the platform's own inbox took, newest first (for development)."""
    out.many(client.webhooks.inbox(), _LETTER_COLUMNS)


@webhooks.command("recover")
@click.argument("id", shell_complete=offered("endpoints"))
@click.option("--since", type=click.DateTime(), required=True, help="UTC.")
@remote
def webhooks_recover(client: Client, out: Out, *, id: str, since: datetime) -> None:
    """Deliver again what has not arrived since a moment."""
    count = client.webhooks.recover(id, since.replace(tzinfo=UTC))
    say(f"{count} are delivered again")


@click.command()
@click.option("--forward-to", required=True, help="Where to send them, such as localhost:3000/in.")
@click.option("--types", help="Only these, such as media.ready,job.*; default: all.")
@click.option("--secret", help="whsec_… to sign with; default: a new one, which is printed.")
@click.option("--record", type=click.Path(dir_okay=False, path_type=Path), help="Note them here.")
@click.option(
    "--replay",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="Send what was recorded here, and end.",
)
@click.option("--url", envvar="MEDIAMILL_URL", help="The API; default: the one of this machine.")
@click.option("--api-key", envvar="MEDIAMILL_API_KEY", help="Default: the key that `up` made.")
def listen(
    *,
    forward_to: str,
    types: str | None,
    secret: str | None,
    record: Path | None,
    replay: Path | None,
    url: str | None,
    api_key: str | None,
) -> None:
    """Send webhooks to a server on this machine, over the event stream: no tunnel is needed."""
    from mediamill import listen as forwarding
    from mediamill import webhooks
    from mediamill.client import Client, Error

    found = settings()
    chosen = secret or forwarding.fresh_secret()
    try:
        webhooks.read_secret(chosen)
    except ValueError as error:
        raise click.ClickException(f"--secret {error}") from None
    address = _address(forward_to)
    forwarder = forwarding.Forwarder(address, chosen, say, record)
    if secret is None:
        say(f"signing with {chosen}")
    try:
        if replay is not None:
            say(f"{forwarding.replay(replay, forwarder)} sent")
            return
        with Client(url or found.base_url, api_key or own_key(found)) as client:
            say(f"forwarding to {address}; Ctrl-C ends")
            forwarding.listen(client, forwarder, types=types)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    except Error as error:
        end(error)
    except KeyboardInterrupt:
        sys.exit(130)


def _events(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    from mediamill.events import TYPES

    return [name for name in TYPES if name.startswith(begun)]


@click.command()
@click.argument("type", metavar="EVENT", shell_complete=_events)
@click.option("--forward-to", required=True, help="Where to send it, such as localhost:3000/in.")
@click.option("--secret", help="whsec_… to sign with; default: a new one, which is printed.")
@click.option("--code", help="The failure code of a failed media or job.")
def trigger(*, type: str, forward_to: str, secret: str | None, code: str | None) -> None:
    """Send an event of your choice to a server on this machine, signed like a real one.

    Nothing happens but that: the media and job that it names do not exist.
    """
    from mediamill import listen as forwarding
    from mediamill import webhooks

    try:
        body = forwarding.sample(type, code)
        chosen = secret or forwarding.fresh_secret()
        webhooks.read_secret(chosen)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if secret is None:
        say(f"signing with {chosen}")
    status = forwarding.Forwarder(_address(forward_to), chosen, say).forward(body)
    click.echo(body.decode())
    if status is None or status >= 300:
        sys.exit(Exit.TEMPORARY if status is None else Exit.UNEXPECTED)


def _address(text: str) -> str:
    return text if "://" in text else f"http://{text}"

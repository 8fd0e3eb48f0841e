"""Commands that start the platform or work on it directly: its processes, database and storage."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from mediamill.cli.installed import settings as _settings
from mediamill.cli.remote import Out, Row, shaped

_KEY_COLUMNS: Final[dict[str, Any]] = {
    "id": lambda k: k["id"],
    "state": lambda k: k["state"],
    "scopes": lambda k: ",".join(k["scopes"]),
    "name": lambda k: k["name"],
}
_RECORD_COLUMNS: Final[dict[str, Any]] = {
    "kind": lambda r: r["kind"],
    "recipe": lambda r: r["recipe"],
    "jobs": lambda r: r["jobs"],
    "p90 held": lambda r: f"{r['held']:.1%}",
    "median error of p50": lambda r: f"{r['median_error']:.1%}",
    "median s": lambda r: r["median_seconds"],
}

if TYPE_CHECKING:
    import asyncio

    from mediamill.config import Settings


def _serve(service: str, settings: Settings, run: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Run one process of the platform; a start that cannot work ends with a sentence."""
    from mediamill import config, db, failpoints, observability, storage
    from mediamill.failures import Failure
    from mediamill.processes import NoApplication, SandboxTooWeak

    observability.configure_logs(service, level=settings.log_level)
    failpoints.arm(os.environ.get("MEDIAMILL_FAILPOINT"))
    known = (
        config.ConfigError,
        db.MigrationError,
        db.Unavailable,
        storage.StorageRefused,
        NoApplication,
        SandboxTooWeak,
        Failure,
        OSError,
    )
    try:
        with _runner() as runner:
            runner.run(run())
    except known as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        sys.exit(130)


def _runner() -> asyncio.Runner:
    import asyncio

    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


@click.command()
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on; 0 takes a free one.")
@click.option("--slots", help="Slots of the worker, such as image=4,video=1.")
@click.option("--data-dir", type=click.Path(file_okay=False), help="Where everything local lives.")
@click.option("--app", help="The application's jobs, such as shop.jobs:mill.")
def up(app: str | None, **flags: Any) -> None:
    """Start everything on this machine, with an embedded PostgreSQL unless MEDIAMILL_DATABASE_URL
    is set."""
    from mediamill import up as platform

    sys.exit(platform.run(_settings(**flags), app))


@click.command()
@click.option("--once", is_flag=True, help="Stop after the demonstration; write demo-result.json.")
@click.option("--port", type=int, help="Port to listen on.")
def demo(once: bool, port: int | None) -> None:
    """Start everything, process a photograph and a video, and show what came out."""
    from mediamill import demo as demonstration

    sys.exit(demonstration.run(_settings(port=port), once=once))


@click.command()
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on.")
def api(**flags: Any) -> None:
    """Serve the HTTP API."""
    from mediamill import processes

    settings = _settings(**flags)
    _serve("api", settings, lambda: processes.serve_api(settings))


@click.command()
@click.option("--slots", help="Slots per queue, such as image=4,video=1.")
@click.option("--app", help="The application's jobs, such as shop.jobs:mill.")
def worker(app: str | None, **flags: Any) -> None:
    """Work on jobs; SIGTERM finishes or hands back what runs."""
    from mediamill import processes

    settings = _settings(**flags)
    _serve("worker", settings, lambda: processes.serve_worker(settings, app))


@click.command()
def migrate() -> None:
    """Bring the database schema up to date."""
    from mediamill import processes

    settings = _settings()

    async def run() -> None:
        for step in await processes.migrate(settings):
            click.echo(f"applied {step.version:04d} {step.name}")

    _serve("migrate", settings, run)


@click.command()
@shaped
def doctor(*, out: Out) -> None:
    """Check what this machine can do, and say what to mend. Exits 1 if something must be."""
    import asyncio

    from mediamill import doctor as checks
    from mediamill import observability

    observability.configure_logs("doctor", level="warning")
    sys.exit(asyncio.run(checks.run(_settings(), form=out.form)))


@click.command()
@click.argument("id")
@click.option("--tenant", default="default", show_default=True)
def explain(id: str, tenant: str) -> None:
    """Say why a media or job took as long as it did."""

    async def run(connection: Any) -> None:
        from mediamill import explain

        try:
            click.echo(await explain.explain(connection, tenant, id))
        except explain.Unknown as error:
            raise click.ClickException(str(error)) from None

    _with_database(run)


@click.group()
def estimates() -> None:
    """Forecasts of when work is done."""


@estimates.command("report")
@click.option("--days", type=float, default=7.0, show_default=True, help="Look back so far.")
@shaped
def estimates_report(*, out: Out, days: float) -> None:
    """Show how often p90 held, and the median error of p50, of the forecasts given at first."""

    async def run(connection: Any) -> None:
        from mediamill import estimates

        rows = await estimates.record(connection, days=days)
        if not rows:
            click.echo("No forecast of that time has a completed job.", err=True)
        out.many((Row(asdict(row)) for row in rows), _RECORD_COLUMNS)

    _with_database(run)


@click.group()
def storage() -> None:
    """Where the bytes live."""


@storage.command("doctor")
@click.option("--origin", help="The origin of a page that uploads; default: the public URL.")
@shaped
def storage_doctor(*, out: Out, origin: str | None) -> None:
    """Find out what the bucket really enforces, and say what to mend. Exits 1 if something must
    be."""
    import asyncio

    from mediamill import doctor as checks
    from mediamill import observability

    observability.configure_logs("doctor", level="error")
    sys.exit(asyncio.run(checks.run_storage(_settings(), origin, form=out.form)))


@click.group()
def keys() -> None:
    """API keys."""


@keys.command("create")
@click.option("--tenant", default="default", show_default=True)
@click.option("--name", default="command line", show_default=True, help="What it is for.")
@click.option("--scope", "scopes", multiple=True, default=("admin",), show_default=True)
@click.option("--ttl-seconds", type=float, help="Refused after this many seconds.")
@shaped
def keys_create(
    *, out: Out, tenant: str, name: str, scopes: tuple[str, ...], ttl_seconds: float | None
) -> None:
    """Make an API key and print it, once."""

    async def run(connection: Any) -> None:
        from mediamill import installation, keys

        installed = await installation.identify(connection)
        try:
            key = await keys.create(
                connection,
                installed.pepper,
                tenant_id=tenant,
                name=name,
                scopes=scopes,
                ttl_seconds=ttl_seconds,
            )
        except ValueError as error:
            raise click.ClickException(str(error)) from None
        if out.form in ("json", "jsonl"):
            out.one(Row(key=key, tenant=tenant, name=name, scopes=list(scopes)))
        else:
            click.echo(key)

    _with_database(run)


@keys.command("list")
@click.option("--tenant", default="default", show_default=True)
@shaped
def keys_list(*, out: Out, tenant: str) -> None:
    """List a tenant's API keys; the keys themselves are not kept."""

    async def run(connection: Any) -> None:
        from mediamill import keys

        found = await keys.list_of(connection, tenant)
        out.many((_key(dict(row)) for row in found), _KEY_COLUMNS)

    _with_database(run)


def _key(row: dict[str, Any]) -> Row:
    moments = ("created_at", "last_used_at", "expires_at", "revoked_at")
    told = {n: row[n].isoformat() if row[n] else None for n in moments if n in row}
    return Row(
        id=str(row["id"]),
        state="revoked" if row["revoked_at"] else "active",
        scopes=list(row["scopes"]),
        name=row["name"],
        **told,
    )


@keys.command("revoke")
@click.argument("key_id")
@click.option("--tenant", default="default", show_default=True)
def keys_revoke(key_id: str, tenant: str) -> None:
    """Refuse a key from now on."""

    async def run(connection: Any) -> None:
        from mediamill import keys

        if not await keys.revoke(connection, tenant, key_id):
            raise click.ClickException(f"There is no active key {key_id} of tenant {tenant}.")

    _with_database(run)


def _with_database(run: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    """Run against the configured database, or the embedded one of the data folder."""
    import asyncio

    settings = _settings()

    async def connected(dsn: str) -> None:
        from mediamill import db

        connection = await db.connect(dsn, application="mediamill cli")
        try:
            await db.check_schema(connection)
            await run(connection)
        finally:
            await connection.close()

    from mediamill import db, embedded

    try:
        if settings.database_url is not None:
            asyncio.run(connected(settings.database_url))
            return
        server = embedded.Embedded(
            settings.data_dir / "postgres", bin_dir=settings.postgres_bin_dir
        )
        dsn = server.start()
        try:
            asyncio.run(connected(dsn))
        finally:
            server.close()
    except (db.MigrationError, db.Unavailable, embedded.EmbeddedError, OSError) as error:
        raise click.ClickException(str(error)) from None

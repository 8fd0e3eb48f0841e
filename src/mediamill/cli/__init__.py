"""The command line. Data goes to stdout, talk to stderr; exit codes are in remote.py.

These modules import what is heavy where it is used, so that `--help` comes at once.
"""

from __future__ import annotations

from pathlib import Path

import click

from mediamill.cli import hooks, operate, recipes, server, submit, things


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="mediamill", prog_name="mediamill")
@click.option("--bound-to", type=int, hidden=True, help="End with the process of this id.")
@click.option("--keep-database", hidden=True, type=click.Path(), help="Use this embedded server.")
def main(bound_to: int | None, keep_database: str | None) -> None:
    """Asynchronous media processing behind a durable queue."""
    if bound_to is not None:
        from mediamill import processes

        processes.bind_to(bound_to)
    if keep_database is not None:
        from mediamill import embedded

        # It stops when nobody uses it: a worker that drains still does.
        server = embedded.Embedded(Path(keep_database))
        server.start()
        click.get_current_context().call_on_close(server.close)


for command in (
    server.up,
    server.demo,
    server.api,
    server.worker,
    server.migrate,
    server.doctor,
    server.storage,
    server.keys,
    server.explain,
    server.estimates,
    submit.submit,
    submit.run,
    things.media,
    things.jobs,
    things.dlq,
    recipes.recipes,
    operate.queues,
    operate.workers,
    operate.top,
    operate.config,
    operate.completions,
    hooks.webhooks,
    hooks.listen,
    hooks.trigger,
):
    main.add_command(command)

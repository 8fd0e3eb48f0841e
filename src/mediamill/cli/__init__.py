"""The command line. Data goes to stdout, talk to stderr; exit codes are in remote.py.

A command's module is imported when the command is used, and imports what is heavy where it is used,
so that `--help` comes at once.
"""

from __future__ import annotations

import click

# Each command: the module it is in, and what `--help` says in one line, as its own help begins.
COMMANDS = {
    "api": ("server", "Serve the HTTP API."),
    "completions": ("operate", "Print what completes this command in a shell."),
    "config": ("operate", "The settings of this machine."),
    "demo": ("server", "Start everything, process two files, and show what came out."),
    "dlq": ("things", "Dead letters: jobs whose attempts are used up."),
    "doctor": ("server", "Check what this machine can do, and say what to mend."),
    "estimates": ("server", "Forecasts of when work is done."),
    "explain": ("server", "Say why a media or job took as long as it did."),
    "jobs": ("things", "Units of background work."),
    "keys": ("server", "API keys."),
    "listen": ("hooks", "Send webhooks to a server on this machine."),
    "media": ("things", "Uploads and what came of them."),
    "migrate": ("server", "Bring the database schema up to date."),
    "queues": ("operate", "Where jobs wait."),
    "recipes": ("recipes", "Named lists of wanted outputs."),
    "run": ("submit", "Process a file here and now, without a server."),
    "storage": ("server", "Where the bytes live."),
    "submit": ("submit", "Upload files and queue them."),
    "top": ("operate", "Watch queues, workers and what runs now."),
    "trigger": ("hooks", "Send an event of your choice to a server on this machine."),
    "up": ("server", "Start everything on this machine."),
    "webhooks": ("hooks", "Where you want to be told, and how that went."),
    "worker": ("server", "Work on jobs."),
    "workers": ("operate", "Who works."),
}


# The libraries of the extra `server`, as they are imported.
SERVER = frozenset(
    {
        "asyncpg",
        "cryptography",
        "fastapi",
        "httptools",
        "pgqueuer",
        "prometheus_client",
        "pydantic_settings",
        "python_multipart",
        "starlette",
        "structlog",
        "uuid_utils",
        "uvicorn",
        "uvloop",
    }
)


class Commands(click.Group):
    """The commands of COMMANDS, each imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        from importlib import import_module

        module = import_module(f"{__name__}.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name not in SERVER:
                raise
            raise click.ClickException(
                f"This needs {error.name}, which comes with the server: pip install "
                "'mediamill[server]', or name a server that runs with --url and --api-key."
            ) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, says) for name, (_, says) in COMMANDS.items()])


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="mediamill", prog_name="mediamill")
@click.option("--bound-to", type=int, hidden=True, help="End with the process of this id.")
@click.option("--keep-database", hidden=True, type=click.Path(), help="Use this embedded server.")
def main(bound_to: int | None, keep_database: str | None) -> None:
    """Asynchronous media processing behind a durable queue."""
    if bound_to is not None:
        from mediamill import processes

        processes.bind_to(bound_to)
    if keep_database is not None:
        from pathlib import Path

        from mediamill import embedded

        # It stops when nobody uses it: a worker that drains still does.
        server = embedded.Embedded(Path(keep_database))
        server.start()
        click.get_current_context().call_on_close(server.close)

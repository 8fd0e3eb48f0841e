"""The installation on this machine: its settings and the key that it made for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mediamill.config import Settings


def settings(**flags: Any) -> Settings:
    """The settings, checked together with the operator's recipes."""
    from mediamill import config, recipes

    try:
        found = config.load(**flags)
        recipes.book(found.recipes_dir)  # a fault in the operator's recipes stops the start
    except config.ConfigError as error:
        raise click.ClickException(str(error)) from None
    return found


def own_key(found: Settings) -> str:
    """The key that `mediamill up` keeps beside its data."""
    try:
        return found.key_file.read_text("utf-8").strip()
    except OSError:
        raise click.ClickException("Give --api-key, or set MEDIAMILL_API_KEY.") from None

"""Mediamill: asynchronous media processing behind a durable queue."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mediamill.client import AsyncClient, Client
    from mediamill.failures import Failure
    from mediamill.mill import Child, Job, Mill, Wait

    __version__: str

__all__ = ["AsyncClient", "Child", "Client", "Failure", "Job", "Mill", "Wait", "__version__"]

_HOMES = {"AsyncClient": "client", "Client": "client", "Failure": "failures"}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are asked for: the command line starts without them."""
    if name == "__version__":
        from importlib.metadata import version

        return version("mediamill")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'mill')}"), name)

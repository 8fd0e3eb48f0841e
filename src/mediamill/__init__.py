"""Mediamill: asynchronous media processing behind a durable queue."""

from importlib.metadata import version

__version__ = version("mediamill")

__all__ = ["__version__"]

"""Where bytes live: the contract that every storage keeps (tests/storage/conformance.py).

Keys are minted by us from `[a-z0-9/_.-]` and begin with one of the areas below. An object is
written once and never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

UPLOADS: Final = "uploads"
"""Originals: uploads/<tenant>/<media>/<nonce>/original"""
STAGE: Final = "stage"
"""Outputs of one attempt before they are published: stage/<tenant>/<job>.<fence>/<name>"""
MEDIA: Final = "media"
"""Published sets: media/<tenant>/<media>/<recipe>-v<version>/<set>/<name>"""


class StorageRefused(Exception):
    """This storage does not belong to this installation, or cannot be used; the message says
    why."""


class AlreadyStored(Exception):
    """The key is taken. Nothing was written."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as it is: its size in bytes and the version that names exactly these bytes."""

    size: int
    version: str


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """A request that its holder may send as it stands, until it expires."""

    method: str
    url: str
    headers: Mapping[str, str]
    expires_at: datetime


class Storage(Protocol):
    """Every method may raise Failure(STORAGE_UNAVAILABLE), and SCRATCH_FULL when the disk is
    full."""

    async def stat(self, key: str) -> Stored | None:
        """The object under `key`, or None."""

    async def fetch(self, key: str, version: str, destination: Path) -> str:
        """Bring exactly this version to the new file `destination`; returns its SHA-256 in hex.

        Raises Failure(SOURCE_MISSING) or Failure(SOURCE_CHANGED).
        """

    async def put(self, key: str, source: Path) -> Stored:
        """Store a file durably under a new key. Raises AlreadyStored."""

    async def copy(self, source: str, key: str) -> None:
        """Copy an object durably to a new key. Raises AlreadyStored, Failure(SOURCE_MISSING)."""

    async def delete(self, prefix: str) -> int:
        """Remove every object below `prefix` (a whole path segment), or the object of that name.

        Returns how many there were. Missing ones are no error.
        """

    async def list(self, prefix: str) -> list[str]:
        """The names of the direct children of `prefix`."""

    def sign_put(
        self, key: str, *, content_type: str, size: int, expires_at: datetime
    ) -> SignedRequest:
        """A write-once request for exactly this key, type and length."""

    def sign_get(self, key: str, *, expires_at: datetime) -> SignedRequest:
        """A read of exactly this key; Range is allowed."""

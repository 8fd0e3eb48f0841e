"""Where bytes live: the contract that every storage keeps (tests/storage/conformance.py).

Keys are minted by us from `[a-z0-9/_.-]` and begin with one of the areas below. An object is
written once and never changed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

UPLOADS: Final = "uploads"
"""Originals: uploads/<tenant>/<media>/<nonce>/original"""
STAGE: Final = "stage"
"""Outputs of one attempt before they are published: stage/<tenant>/<job>.<fence>/<name>"""
MEDIA: Final = "media"
"""Published sets: media/<tenant>/<media>/<recipe>-v<version>/<set>/<name>"""


MARKER: Final = "mediamill-storage"
"""The object that names the installation to which a folder or bucket belongs."""


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
    at: datetime | None = field(default=None, compare=False)
    """When it was stored, by the storage's own clock, where that is known."""


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """A request that its holder may send as it stands, until it expires."""

    method: str
    url: str
    headers: Mapping[str, str]
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class SignedForm:
    """A form whose holder may store one object with it, until it expires. It is sent by POST as
    multipart/form-data: the fields as they stand, then the file under the name `file`."""

    url: str
    fields: Mapping[str, str]
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Part:
    """A stored piece of an object that is not complete yet. Numbers begin at 1."""

    number: int
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One property of a storage. `ok` None: good to have, or not to be told. `remedy` is for the
    operator."""

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""


class Receiver(Protocol):
    """An object on its way in. Write, then commit; abort is safe at any time."""

    written: int

    async def write(self, data: bytes) -> None: ...

    async def commit(self) -> Stored:
        """Make it an object. Raises AlreadyStored if another writer was first."""

    async def abort(self) -> None:
        """Leave nothing of it behind, unless it was committed."""


class PartReceiver(Protocol):
    """A part on its way in. It holds a bounded amount in memory."""

    written: int

    async def write(self, data: bytes) -> None: ...

    async def commit(self) -> Part:
        """Store it durably; a part of the same number is replaced."""

    async def set_aside(self, key: str) -> None:
        """Store what came as an object of its own, and not as a part."""

    def abort(self) -> None:
        """Give it up; safe at any time."""


class Storage(Protocol):
    """Every method may raise Failure(STORAGE_UNAVAILABLE), STORAGE_AUTH when the storage refuses
    our credentials, and SCRATCH_FULL when the disk is full."""

    least_part_bytes: int
    """Every part but the last has at least this size."""
    most_parts: int
    """Part numbers end here."""

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

    def read(self, key: str, version: str) -> AsyncGenerator[bytes, None]:
        """The bytes of exactly this version, in pieces. Raises as `fetch` does."""

    async def receive(self, key: str) -> Receiver:
        """Begin to take in an object; raises AlreadyStored if its key is taken."""

    async def close(self) -> None:
        """Let connections go."""

    async def sweep(
        self, *, older_than_seconds: float, now: float, keep: Collection[str] = ()
    ) -> int:
        """Remove what crashed writers and deletions left behind, and objects in parts that nobody
        completed, but for the named ones; returns how much there was. `now` is in Unix seconds."""

    # Objects in parts.

    async def begin_parts(self, key: str, *, content_type: str) -> str:
        """Begin an object in parts; returns the storage's name for it."""

    async def open_part(
        self, key: str, upload: str, number: int, *, offset: int, fence: int = 0
    ) -> PartReceiver:
        """Begin to take in a part whose first byte is number `offset` of the object.

        A writer that commits parts under a lower fence than one seen before is refused with
        Failure(SOURCE_CHANGED), where parts of two writers could mix. Raises
        Failure(SOURCE_MISSING) for an object that was not begun, or is complete.
        """

    async def list_parts(self, key: str, upload: str) -> Sequence[Part]:
        """The parts that are there, by number; one that was replaced may stand beside its
        replacement. Raises Failure(SOURCE_MISSING)."""

    async def complete_parts(
        self, key: str, upload: str, parts: Sequence[Part], *, size: int
    ) -> Stored:
        """Make these parts the object, of `size` bytes. Repeating it returns the same object.

        Raises AlreadyStored, Failure(SOURCE_MISSING).
        """

    async def abort_parts(self, key: str, upload: str) -> None:
        """Give an object in parts up, with all its parts. Missing ones are no error."""

    # Requests for others to send.

    def sign_put(
        self,
        key: str,
        *,
        content_type: str,
        size: int,
        expires_at: datetime,
        sha256: str | None = None,
    ) -> SignedRequest:
        """A write-once request for exactly this key, type and length. A storage that can compare
        it holds the bytes against `sha256` (hex)."""

    async def sign_form(
        self, key: str, *, content_type: str, most: int, expires_at: datetime
    ) -> SignedForm | None:
        """A form for exactly this key and type, and for 1 to `most` bytes; None where a storage
        takes none, or was found not to look at the length."""

    def sign_get(
        self,
        key: str,
        *,
        expires_at: datetime,
        content_type: str | None = None,
        filename: str | None = None,
    ) -> SignedRequest:
        """A read of exactly this key, shown under this type and name; Range is allowed."""

    def sign_part(
        self,
        key: str,
        upload: str,
        number: int,
        *,
        offset: int,
        size: int | None,
        most: int,
        expires_at: datetime,
    ) -> SignedRequest:
        """A request that stores one part of exactly this length, or of an unknown one up to `most`
        where the storage can say so; its answer has the ETag."""


_KEY_LENGTH: Final = 1024
_PART_LENGTH: Final = 255  # a longer name fits no directory
_KEY_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789/_.-")


def checked_key(key: str) -> str:
    """The key itself. Raises ValueError for one that we would never mint."""
    parts = key.split("/")
    if (
        not key
        or len(key) > _KEY_LENGTH
        or any(p in ("", ".", "..") or len(p) > _PART_LENGTH for p in parts)
        or not _KEY_CHARACTERS.issuperset(key)
    ):
        raise ValueError("not a storage key")
    return key

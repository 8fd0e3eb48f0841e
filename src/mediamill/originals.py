"""Originals that several attempts of one worker read at once, or one after the other: one copy.

A copy lives in the scratch of its worker, outside of what tools can write to, for as long as
somebody reads it, and a moment longer where more readers are to be expected.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mediamill.failures import Code, Failure
from mediamill.sandbox import clear
from mediamill.storage import Storage

_LINGER_SECONDS: Final = 2.0
Name = tuple[str, str]
"""The key of an object and its version."""


@dataclass(slots=True)
class _Copy:
    folder: Path
    fetching: asyncio.Task[str]
    readers: int = 0
    leaving: asyncio.TimerHandle | None = None

    @property
    def path(self) -> Path:
        return self.folder / "original"


class Originals:
    """The copies of one worker. Everything happens in its loop."""

    def __init__(self, storage: Storage, folder: Path) -> None:
        self._storage = storage
        self._folder = folder
        self._copies: dict[Name, _Copy] = {}
        self._numbers = itertools.count()
        self._clearing: set[asyncio.Future[None]] = set()

    async def take(self, key: str, version: str, *, sha256: str | None = None) -> tuple[Path, str]:
        """The file and its SHA-256, which is held against the one that is known, fetched unless it
        is there; `leave` must follow, unless this raises. Raises Failure."""
        name = key, version
        copy = self._copies.get(name)
        if copy is None:
            folder = self._folder / f"original-{next(self._numbers)}"
            copy = _Copy(folder, asyncio.create_task(self._fetch(folder, name, sha256)))
            self._copies[name] = copy
        if copy.leaving is not None:
            copy.leaving.cancel()
            copy.leaving = None
        copy.readers += 1
        try:
            # One reader that is stopped stops no other.
            digest = await asyncio.shield(copy.fetching)
            if sha256 is not None and digest != sha256:
                # Fetched for one that knew no digest yet; the next attempt fetches it anew.
                raise Failure(Code.STORAGE_UNAVAILABLE, "The original came with wrong bytes.")
            return copy.path, digest
        except BaseException:
            self._left(name, copy, linger=False)
            raise

    def leave(self, key: str, version: str, *, linger: bool) -> None:
        """One reader less. With `linger` the copy stays for a moment after the last one."""
        copy = self._copies.get((key, version))
        if copy is not None:
            self._left((key, version), copy, linger=linger)

    def _left(self, name: Name, copy: _Copy, *, linger: bool) -> None:
        copy.readers -= 1
        if copy.readers > 0 or self._copies.get(name) is not copy:
            return
        if linger:
            loop = asyncio.get_running_loop()
            copy.leaving = loop.call_later(_LINGER_SECONDS, self._drop, name, copy)
        else:
            self._drop(name, copy)

    def _drop(self, name: Name, copy: _Copy) -> None:
        if self._copies.get(name) is copy:
            del self._copies[name]
        clearing = asyncio.ensure_future(self._clear(copy))
        self._clearing.add(clearing)
        clearing.add_done_callback(self._clearing.discard)

    async def _fetch(self, folder: Path, name: Name, sha256: str | None) -> str:
        await asyncio.to_thread(folder.mkdir, parents=True)
        return await fetch_original(self._storage, *name, folder / "original", sha256=sha256)

    async def _clear(self, copy: _Copy) -> None:
        copy.fetching.cancel()
        with suppress(Exception, asyncio.CancelledError):
            await copy.fetching
        await asyncio.to_thread(clear, copy.folder)


async def fetch_original(
    store: Storage, key: str, version: str, path: Path, *, sha256: str | None
) -> str:
    """Bring the original to `path` and return its digest.

    Bytes with another digest than `sha256` are fetched once more: only when they come out the same
    are they what is stored, and not a bit that fell over on the way. Raises Failure.
    """
    digest = await store.fetch(key, version, path)
    if sha256 is None or digest == sha256:
        return digest
    path.unlink()
    again = await store.fetch(key, version, path)
    if again == digest:
        raise Failure(Code.CHECKSUM_MISMATCH)
    if again != sha256:
        raise Failure(Code.STORAGE_UNAVAILABLE, "The storage gives other bytes each time.")
    return again

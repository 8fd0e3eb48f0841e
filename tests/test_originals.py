"""One copy of an original for all that read it at the same time in one worker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mediamill import originals
from mediamill.failures import Code, Failure
from mediamill.originals import Originals

pytestmark = pytest.mark.anyio


class Store:
    """A storage that counts, and waits until it may go on."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.go = asyncio.Event()
        self.failing = False

    async def fetch(self, key: str, version: str, path: Path) -> str:
        self.fetched.append(f"{key} {version}")
        await self.go.wait()
        if self.failing:
            raise Failure(Code.SOURCE_MISSING)
        path.write_text(key)
        return f"digest of {key}"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def store() -> Store:
    return Store()


@pytest.fixture
async def copies(store: Store, tmp_path: Path) -> Originals:
    return Originals(store, tmp_path)  # type: ignore[arg-type]


async def empty(folder: Path) -> None:
    async with asyncio.timeout(10):
        while list(folder.iterdir()):  # noqa: ASYNC110  # nothing tells us
            await asyncio.sleep(0.01)


async def test_readers_share_a_fetch_and_the_last_one_takes_it_away(
    copies: Originals, store: Store, tmp_path: Path
) -> None:
    some = [asyncio.create_task(copies.take("a", "1")) for _ in range(3)]
    other = asyncio.create_task(copies.take("a", "2"))
    await asyncio.sleep(0)
    store.go.set()
    found = [await task for task in some]
    assert len(set(found)) == 1
    path, digest = found[0]
    assert (path.read_text(), digest) == ("a", "digest of a")
    assert (await other)[0] != path
    assert sorted(store.fetched) == ["a 1", "a 2"]
    for _ in range(2):
        copies.leave("a", "1", linger=False)
    await asyncio.sleep(0.05)
    assert path.exists()
    copies.leave("a", "1", linger=False)
    copies.leave("a", "2", linger=False)
    await empty(tmp_path)
    assert (await copies.take("a", "1"))[0].exists()
    assert sorted(store.fetched) == ["a 1", "a 1", "a 2"]


async def test_a_copy_lingers_for_the_next_piece_and_no_longer(
    copies: Originals, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(originals, "_LINGER_SECONDS", 0.3)
    store.go.set()
    path, _ = await copies.take("a", "1")
    copies.leave("a", "1", linger=True)
    await asyncio.sleep(0.05)
    assert (await copies.take("a", "1"))[0] == path
    await asyncio.sleep(0.5)
    assert path.exists()  # somebody reads it
    copies.leave("a", "1", linger=True)
    await empty(tmp_path)
    assert store.fetched == ["a 1"]


async def test_a_reader_that_is_stopped_stops_no_other(
    copies: Originals, store: Store, tmp_path: Path
) -> None:
    first, second = (asyncio.create_task(copies.take("a", "1")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    store.go.set()
    assert (await second)[0].exists()
    copies.leave("a", "1", linger=False)
    await empty(tmp_path)
    alone = asyncio.create_task(copies.take("b", "1"))
    store.go.clear()
    await asyncio.sleep(0.05)
    alone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await alone
    await empty(tmp_path)


async def test_a_fetch_that_fails_is_tried_anew_by_the_next(
    copies: Originals, store: Store, tmp_path: Path
) -> None:
    store.failing = True
    store.go.set()
    failed: list[Any] = await asyncio.gather(
        *(copies.take("a", "1") for _ in range(2)), return_exceptions=True
    )
    assert [failure.code for failure in failed] == [Code.SOURCE_MISSING] * 2
    await empty(tmp_path)
    store.failing = False
    assert (await copies.take("a", "1"))[0].exists()


async def test_a_copy_with_wrong_bytes_is_given_to_nobody_who_knows_better(
    copies: Originals, store: Store
) -> None:
    store.go.set()
    _, digest = await copies.take("a", "1")
    with pytest.raises(Failure) as caught:
        await copies.take("a", "1", sha256="0" * 64)
    assert caught.value.code is Code.STORAGE_UNAVAILABLE
    assert (await copies.take("a", "1", sha256=digest))[1] == digest

"""What every storage must do. A backend's test class inherits this and gives a `store`."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from mediamill.failures import Code, Failure
from mediamill.storage import AlreadyStored, Storage, Stored


class Conformance:
    """Inherit, and define the fixture `store`."""

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def store(self) -> Storage:
        raise NotImplementedError

    async def test_what_was_put_is_there_and_comes_back(
        self, store: Storage, tmp_path: Path
    ) -> None:
        content = bytes(range(256)) * 5000
        stored = await store.put("uploads/t/m/n/original", write(tmp_path, content))
        assert stored.size == len(content)
        assert await store.stat("uploads/t/m/n/original") == stored
        destination = tmp_path / "fetched"
        digest = await store.fetch("uploads/t/m/n/original", stored.version, destination)
        assert destination.read_bytes() == content
        assert digest == hashlib.sha256(content).hexdigest()

    async def test_an_empty_object_is_an_object(self, store: Storage, tmp_path: Path) -> None:
        stored = await store.put("media/t/empty", write(tmp_path, b""))
        assert stored.size == 0
        assert await store.stat("media/t/empty") == stored

    @pytest.mark.parametrize("key", ["media/t/none", "media", "nothing/at/all", "media/t/a/b/c"])
    async def test_what_was_never_put_is_absent(
        self, store: Storage, tmp_path: Path, key: str
    ) -> None:
        await store.put("media/t/a/b", write(tmp_path, b"x"))
        assert await store.stat("media/t/a/b/c") is None  # below an object there is nothing
        assert key == "media" or await store.stat(key) is None
        with pytest.raises(Failure) as caught:
            await store.fetch("media/t/none", "1-1-1", tmp_path / "fetched")
        assert caught.value.code is Code.SOURCE_MISSING
        assert not (tmp_path / "fetched").exists()

    async def test_a_key_is_written_once(self, store: Storage, tmp_path: Path) -> None:
        first = await store.put("media/t/a", write(tmp_path, b"first"))
        with pytest.raises(AlreadyStored):
            await store.put("media/t/a", write(tmp_path, b"other"))
        with pytest.raises(AlreadyStored):
            await store.put("media/t/a", write(tmp_path, b"first"))
        assert await store.stat("media/t/a") == first
        await store.fetch("media/t/a", first.version, tmp_path / "fetched")
        assert (tmp_path / "fetched").read_bytes() == b"first"

    async def test_of_many_puts_of_one_key_one_wins_whole(
        self, store: Storage, tmp_path: Path
    ) -> None:
        files = [write(tmp_path, bytes([n]) * 100_000) for n in range(8)]
        results = await asyncio.gather(
            *(store.put("media/t/raced", file) for file in files), return_exceptions=True
        )
        won = [r for r in results if isinstance(r, Stored)]
        assert len(won) == 1
        assert all(isinstance(r, Stored | AlreadyStored) for r in results)
        assert await store.stat("media/t/raced") == won[0]
        await store.fetch("media/t/raced", won[0].version, tmp_path / "fetched")
        content = (tmp_path / "fetched").read_bytes()
        assert content == content[:1] * 100_000

    async def test_a_source_may_be_changed_or_removed_after_the_put(
        self, store: Storage, tmp_path: Path
    ) -> None:
        source = write(tmp_path, b"kept")
        stored = await store.put("media/t/a", source)
        source.unlink()
        assert await store.stat("media/t/a") == stored

    async def test_another_version_is_not_handed_out(self, store: Storage, tmp_path: Path) -> None:
        old = await store.put("uploads/t/a", write(tmp_path, b"12345"))
        await store.delete("uploads/t/a")
        new = await store.put("uploads/t/a", write(tmp_path, b"54321"))  # as long as the old one
        assert new.version != old.version
        with pytest.raises(Failure) as caught:
            await store.fetch("uploads/t/a", old.version, tmp_path / "fetched")
        assert caught.value.code is Code.SOURCE_CHANGED
        assert not (tmp_path / "fetched").exists()

    async def test_a_copy_is_an_object_of_its_own(self, store: Storage, tmp_path: Path) -> None:
        await store.put("stage/t/j.1/a", write(tmp_path, b"output"))
        await store.copy("stage/t/j.1/a", "media/t/m/a")
        await store.delete("stage/t/j.1")
        stored = await store.stat("media/t/m/a")
        assert stored is not None
        assert stored.size == 6
        await store.fetch("media/t/m/a", stored.version, tmp_path / "fetched")
        assert (tmp_path / "fetched").read_bytes() == b"output"

    async def test_a_copy_never_overwrites_and_needs_its_source(
        self, store: Storage, tmp_path: Path
    ) -> None:
        await store.put("stage/t/a", write(tmp_path, b"new"))
        there = await store.put("media/t/a", write(tmp_path, b"old"))
        with pytest.raises(AlreadyStored):
            await store.copy("stage/t/a", "media/t/a")
        assert await store.stat("media/t/a") == there
        with pytest.raises(Failure) as caught:
            await store.copy("stage/t/none", "media/t/b")
        assert caught.value.code is Code.SOURCE_MISSING
        assert await store.stat("media/t/b") is None

    async def test_delete_takes_everything_below_and_nothing_beside(
        self, store: Storage, tmp_path: Path
    ) -> None:
        for key in ("media/a/b/1", "media/a/b/c/2", "media/a/bc/3", "media/a/b.x", "media/a/a"):
            await store.put(key, write(tmp_path, b"x"))
        assert await store.delete("media/a/b") == 2
        assert await store.stat("media/a/b/1") is None
        assert await store.stat("media/a/b/c/2") is None
        for key in ("media/a/bc/3", "media/a/b.x", "media/a/a"):
            assert await store.stat(key) is not None
        assert await store.delete("media/a/b.x") == 1
        assert await store.stat("media/a/bc/3") is not None

    async def test_to_delete_what_is_not_there_is_no_error(
        self, store: Storage, tmp_path: Path
    ) -> None:
        await store.put("media/a/b", write(tmp_path, b"x"))
        for prefix in ("media/none", "uploads/none/at/all", "media/a/b/c"):
            assert await store.delete(prefix) == 0
        assert await store.stat("media/a/b") is not None

    async def test_a_key_can_be_put_again_after_its_deletion(
        self, store: Storage, tmp_path: Path
    ) -> None:
        for content in (b"one", b"two!"):
            stored = await store.put("stage/t/j.1/a", write(tmp_path, content))
            assert stored.size == len(content)
            assert await store.delete("stage/t/j.1") == 1

    async def test_list_names_the_children(self, store: Storage, tmp_path: Path) -> None:
        for key in ("stage/t/j1.1/a", "stage/t/j1.1/b", "stage/t/j2.4/a", "stage/u/j3.1/a"):
            await store.put(key, write(tmp_path, b"x"))
        assert await store.list("stage") == ["t", "u"]
        assert await store.list("stage/t") == ["j1.1", "j2.4"]
        assert await store.list("stage/t/j1.1") == ["a", "b"]
        assert await store.list("stage/none") == []
        assert await store.list("media") == []

    async def test_nothing_empty_is_listed_after_a_deletion(
        self, store: Storage, tmp_path: Path
    ) -> None:
        await store.put("stage/t/j1.1/a", write(tmp_path, b"x"))
        await store.put("stage/u/j2.1/a", write(tmp_path, b"x"))
        await store.delete("stage/t/j1.1")
        assert await store.list("stage") == ["u"]
        await store.delete("stage/u/j2.1/a")
        assert await store.list("stage") == []

    async def test_puts_and_deletes_of_one_folder_do_not_trip_over_each_other(
        self, store: Storage, tmp_path: Path
    ) -> None:
        file = write(tmp_path, b"x")

        async def put(number: int) -> None:
            await store.put(f"stage/t/j.1/{number}", file)

        for _ in range(10):  # whether they meet is a matter of luck
            await asyncio.gather(
                *(put(n) for n in range(20)), *(store.delete("stage/t/j.1") for _ in range(20))
            )
            await store.delete("stage/t/j.1")
            assert await store.list("stage") == []

    @pytest.mark.parametrize(
        "key",
        ["", "/", "a/", "/a", "a//b", "../a", "a/../../b", ".", "a/./b", "A", "a b", "a\\b", "é",
         "a\0b", "a\n", "x" * 300, "a/" * 600 + "a"],
    )  # fmt: skip
    async def test_a_key_that_we_would_never_mint_is_refused(
        self, store: Storage, tmp_path: Path, key: str
    ) -> None:
        file = write(tmp_path, b"x")
        for call in (store.stat(key), store.put(key, file), store.delete(key), store.list(key)):
            with pytest.raises(ValueError, match="key"):
                await call


def write(folder: Path, content: bytes) -> Path:
    """A new file with this content."""
    number = sum(1 for _ in folder.iterdir())
    path = folder / f"source-{number}"
    path.write_bytes(content)
    return path

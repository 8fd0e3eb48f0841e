"""What every storage must do. A backend's test class inherits this and gives a `store`."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path

import pytest

from mediamill.failures import Code, Failure
from mediamill.storage import AlreadyStored, Part, Storage, Stored

BIG = 5 << 20
"""The least that S3 takes as a part that is not the last."""
REFUSED = (
    *("", "/", "a/", "/a", "a//b", "../a", "a/../../b", ".", "a/./b", "A", "a b", "a\\b", "é"),
    *("a\0b", "a\n", "x" * 300, "a/" * 600 + "a"),
)
"""Keys that we would never mint."""
OTHER_VERSION = '"00000000000000000000000000000000"'


class Conformance:
    """Inherit, and define the fixture `store`."""

    pytestmark = pytest.mark.anyio
    rounds = 10
    """How often what depends on luck is tried."""

    @pytest.fixture
    def store(self) -> Storage:
        raise NotImplementedError

    async def test_what_was_put_is_there_and_comes_back(
        self, store: Storage, tmp_path: Path
    ) -> None:
        content = bytes(range(256)) * 5000
        stored = await store.put("uploads/t/m/n/original", write(tmp_path, content))
        assert stored.size == len(content)
        found = await store.stat("uploads/t/m/n/original")
        assert found == stored
        assert found is not None
        assert found.at is not None
        assert abs(found.at.timestamp() - time.time()) < 300
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

        for _ in range(self.rounds):  # whether they meet is a matter of luck
            await asyncio.gather(
                *(put(n) for n in range(20)), *(store.delete("stage/t/j.1") for _ in range(20))
            )
            await store.delete("stage/t/j.1")
            assert await store.list("stage") == []

    # Reading and taking in, piece by piece.

    async def test_what_is_read_in_pieces_is_exactly_one_version(
        self, store: Storage, tmp_path: Path
    ) -> None:
        content = bytes(range(251)) * 20_000
        stored = await store.put("uploads/t/a", write(tmp_path, content))
        assert b"".join([piece async for piece in store.read("uploads/t/a", stored.version)]) == (
            content
        )
        for key, version, code in (
            ("uploads/t/none", stored.version, Code.SOURCE_MISSING),
            ("uploads/t/a", OTHER_VERSION, Code.SOURCE_CHANGED),
        ):
            with pytest.raises(Failure) as caught:
                async for _ in store.read(key, version):
                    pass
            assert caught.value.code is code

    async def test_what_is_received_is_there_after_the_commit_only(self, store: Storage) -> None:
        receiver = await store.receive("uploads/t/a")
        await receiver.write(b"half")
        assert await store.stat("uploads/t/a") is None
        await receiver.write(b" and half")
        stored = await receiver.commit()
        await receiver.abort()
        assert stored == await store.stat("uploads/t/a")
        assert stored.size == receiver.written == 13
        with pytest.raises(AlreadyStored):
            await store.receive("uploads/t/a")

    async def test_what_is_given_up_leaves_nothing(self, store: Storage) -> None:
        receiver = await store.receive("uploads/t/a")
        await receiver.write(b"half")
        await receiver.abort()
        await receiver.abort()
        assert await store.stat("uploads/t/a") is None
        assert await store.list("uploads") == []

    async def test_of_two_receivers_of_one_key_one_wins(self, store: Storage) -> None:
        one, two = await store.receive("uploads/t/a"), await store.receive("uploads/t/a")
        await one.write(b"one")
        await two.write(b"two!")
        stored = await one.commit()
        with pytest.raises(AlreadyStored):
            await two.commit()
        await two.abort()
        assert await store.stat("uploads/t/a") == stored

    # Objects in parts.

    async def test_parts_become_one_object_in_order(self, store: Storage) -> None:
        contents = [b"a" * BIG, b"b" * BIG, b"end"]
        upload = await store.begin_parts("uploads/t/a", content_type="video/mp4")
        parts = []
        for number in (2, 1, 3):  # they may come in any order
            parts.append(await part(store, "uploads/t/a", upload, number, contents))
        assert await store.list_parts("uploads/t/a", upload) == sorted(
            parts, key=lambda one: one.number
        )
        assert await store.stat("uploads/t/a") is None
        stored = await store.complete_parts("uploads/t/a", upload, parts, size=2 * BIG + 3)
        assert stored == await store.stat("uploads/t/a")
        assert await content(store, "uploads/t/a", stored) == b"".join(contents)
        # A repeat, as after a lost answer, finds the same object.
        again = await store.complete_parts("uploads/t/a", upload, parts, size=2 * BIG + 3)
        assert again == stored
        await store.abort_parts("uploads/t/a", upload)
        assert await store.stat("uploads/t/a") == stored

    async def test_a_part_that_is_sent_again_replaces_the_first(self, store: Storage) -> None:
        upload = await store.begin_parts("uploads/t/a", content_type="video/mp4")
        first = await part(store, "uploads/t/a", upload, 1, [b"first"])
        second = await part(store, "uploads/t/a", upload, 1, [b"other"])
        assert first.etag != second.etag
        assert second in await store.list_parts("uploads/t/a", upload)
        stored = await store.complete_parts("uploads/t/a", upload, [second], size=5)
        assert await content(store, "uploads/t/a", stored) == b"other"

    async def test_what_is_set_aside_is_an_object_and_no_part(self, store: Storage) -> None:
        upload = await store.begin_parts("uploads/t/a/original", content_type="video/mp4")
        receiver = await store.open_part("uploads/t/a/original", upload, 1, offset=0, fence=1)
        await receiver.write(b"too few for a part")
        await receiver.set_aside("uploads/t/a/tail-1")
        receiver.abort()
        stored = await store.stat("uploads/t/a/tail-1")
        assert stored is not None
        assert await content(store, "uploads/t/a/tail-1", stored) == b"too few for a part"
        assert await store.list_parts("uploads/t/a/original", upload) == []
        await store.abort_parts("uploads/t/a/original", upload)

    async def test_parts_that_are_given_up_are_gone(self, store: Storage) -> None:
        upload = await store.begin_parts("uploads/t/a", content_type="video/mp4")
        await part(store, "uploads/t/a", upload, 1, [b"first"])
        await store.abort_parts("uploads/t/a", upload)
        await store.abort_parts("uploads/t/a", upload)
        for call in (
            store.list_parts("uploads/t/a", upload),
            part(store, "uploads/t/a", upload, 1, [b"late"]),
            store.complete_parts("uploads/t/a", upload, [Part(1, 5, '"x"')], size=5),
        ):
            with pytest.raises(Failure) as caught:
                await call
            assert caught.value.code is Code.SOURCE_MISSING
        assert await store.stat("uploads/t/a") is None

    async def test_parts_never_replace_an_object(self, store: Storage, tmp_path: Path) -> None:
        upload = await store.begin_parts("uploads/t/a", content_type="video/mp4")
        one = await part(store, "uploads/t/a", upload, 1, [b"parts"])
        there = await store.put("uploads/t/a", write(tmp_path, b"first"))
        with pytest.raises(AlreadyStored):
            await store.complete_parts("uploads/t/a", upload, [one], size=5)
        assert await store.stat("uploads/t/a") == there

    async def test_parts_of_nobody_are_swept_by_their_age(self, store: Storage) -> None:
        upload = await store.begin_parts("uploads/t/a", content_type="video/mp4")
        await part(store, "uploads/t/a", upload, 1, [b"first"])
        now = time.time()
        assert await store.sweep(older_than_seconds=3600, now=now) == 0
        assert len(await store.list_parts("uploads/t/a", upload)) == 1
        assert await store.sweep(older_than_seconds=3600, now=now + 4000) == 1
        with pytest.raises(Failure):
            await store.list_parts("uploads/t/a", upload)

    async def test_a_key_that_we_would_never_mint_is_refused(
        self, store: Storage, tmp_path: Path
    ) -> None:
        file = write(tmp_path, b"x")
        for key in REFUSED:
            for call in (store.stat(key), store.put(key, file), store.delete(key), store.list(key)):
                with pytest.raises(ValueError, match="key"):
                    await call


async def part(store: Storage, key: str, upload: str, number: int, contents: list[bytes]) -> Part:
    """Store one of these contents as the part of that number."""
    offset = sum(map(len, contents[: number - 1]))
    receiver = await store.open_part(key, upload, number, offset=offset)
    data = contents[number - 1]
    half = len(data) // 2
    await receiver.write(data[:half])
    await receiver.write(data[half:])
    return await receiver.commit()


async def content(store: Storage, key: str, stored: Stored) -> bytes:
    return b"".join([piece async for piece in store.read(key, stored.version)])


def write(folder: Path, content: bytes) -> Path:
    """A new file with this content."""
    number = sum(1 for _ in folder.iterdir())
    path = folder / f"source-{number}"
    path.write_bytes(content)
    return path

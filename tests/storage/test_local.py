"""The local storage: the common contract, and what is special about a disk."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import shutil
import stat
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.storage.conformance import Conformance, write

from mediamill import ids, signing
from mediamill.failures import Code, Failure
from mediamill.storage import AlreadyStored, StorageRefused
from mediamill.storage.local import LocalStorage, open_local

KEYRING = signing.Keyring({1: b"k" * 32})
INSTALLATION = ids.new()
MARKER = "mediamill-storage"


def open_at(root: Path, **more: Any) -> LocalStorage:
    return open_local(root, INSTALLATION, lambda: KEYRING, "http://media.test", **more)


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return open_at(tmp_path / "objects")


def files(store: LocalStorage) -> list[str]:
    return sorted(str(p.relative_to(store.root)) for p in store.root.rglob("*") if p.name != MARKER)


class TestConformance(Conformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStorage:
        return open_at(tmp_path / "objects")

    @pytest.fixture
    def tmp_path(self, tmp_path: Path) -> Path:
        """The sources lie beside the storage and not in it."""
        (tmp_path / "work").mkdir()
        return tmp_path / "work"


def test_a_fresh_folder_gets_the_marker_of_its_installation(tmp_path: Path) -> None:
    store = open_at(tmp_path / "new" / "objects")
    assert (store.root / MARKER).read_text().strip() == str(INSTALLATION)
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    open_at(store.root)  # and is opened again by the same one
    assert os.listdir(store.root / ".incoming") == []


def test_a_folder_of_another_installation_is_refused(store: LocalStorage) -> None:
    with pytest.raises(StorageRefused, match="belongs to installation"):
        open_local(store.root, ids.new(), lambda: KEYRING, "http://media.test")


def test_a_folder_with_files_but_no_marker_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(StorageRefused, match="marker"):
        open_at(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["photos"]


def test_an_empty_folder_is_refused_when_the_database_knows_objects(tmp_path: Path) -> None:
    """What a disk looks like that is not mounted."""
    (tmp_path / "objects").mkdir()
    with pytest.raises(StorageRefused, match="mounted"):
        open_at(tmp_path / "objects", may_be_new=False)
    assert os.listdir(tmp_path / "objects") == []


def test_a_folder_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for root in (tmp_path / "file", tmp_path / "file" / "objects"):
        with pytest.raises(StorageRefused, match=r"file|Not a directory"):
            open_at(root)


@pytest.mark.anyio
async def test_the_folder_for_what_comes_in_is_made_again(
    store: LocalStorage, tmp_path: Path
) -> None:
    """Backups leave empty folders out."""
    shutil.rmtree(store.root / ".incoming")
    again = open_at(store.root)
    await again.put("media/t/a", write(tmp_path, b"x"))


@pytest.mark.anyio
async def test_objects_are_read_only_and_private(store: LocalStorage, tmp_path: Path) -> None:
    await store.put("media/t/a", write(tmp_path, b"x"))
    receiver = await store.receive("uploads/t/a")
    await receiver.write(b"x")
    await receiver.commit()
    for key in ("media/t/a", "uploads/t/a"):
        mode = stat.S_IMODE((store.root / key).stat().st_mode)
        assert mode & 0o222 == 0


@pytest.mark.anyio
async def test_an_object_is_synced_before_it_has_its_name_and_its_folder_after(
    store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, str]] = []
    fsync, link = os.fsync, os.link

    def watched_fsync(fd: int) -> None:
        steps.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def watched_link(source: Any, target: Any, **more: Any) -> None:
        link(source, target, **more)
        steps.append(("link", str(target)))

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "link", watched_link)
    receiver = await store.receive("uploads/t/a")
    await receiver.write(b"x")
    await receiver.commit()
    object_at = store.root / "uploads/t/a"
    link_step = steps.index(("link", str(object_at)))
    incoming = [p for what, p in steps[:link_step] if what == "fsync"]
    assert any(".incoming" in p for p in incoming)
    assert ("fsync", str(object_at.parent)) in steps[link_step:]


@pytest.mark.anyio
async def test_nothing_can_be_seen_before_the_commit(store: LocalStorage) -> None:
    receiver = await store.receive("uploads/t/a")
    await receiver.write(b"half")
    assert await store.stat("uploads/t/a") is None
    assert await store.list("uploads") == []
    await receiver.abort()
    await receiver.abort()
    assert os.listdir(store.root / ".incoming") == []


@pytest.mark.anyio
async def test_of_two_receivers_the_second_to_commit_loses(store: LocalStorage) -> None:
    one, two = await store.receive("uploads/t/a"), await store.receive("uploads/t/a")
    await one.write(b"one")
    await two.write(b"two")
    await two.commit()
    with pytest.raises(AlreadyStored):
        await one.commit()
    with pytest.raises(AlreadyStored):
        await store.receive("uploads/t/a")
    assert (store.root / "uploads/t/a").read_bytes() == b"two"
    assert os.listdir(store.root / ".incoming") == []


@pytest.mark.anyio
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_a_full_disk_is_told_as_one_and_leaves_nothing(
    store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(number, "full")

    for name in ("link", "fsync"):
        receiver = await store.receive("uploads/t/a")
        await receiver.write(b"x")
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(Failure) as caught:
                await store.put("media/t/a", write(tmp_path, b"x"))
            assert caught.value.code is Code.SCRATCH_FULL
            with pytest.raises(Failure) as caught:
                await receiver.commit()
            assert caught.value.code is Code.SCRATCH_FULL
        assert await store.stat("media/t/a") is None
        assert os.listdir(store.root / ".incoming") == []


@pytest.mark.anyio
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_a_write_that_finds_the_disk_full_says_so(store: LocalStorage) -> None:
    receiver = await store.receive("uploads/t/a")
    receiver._file.close()
    receiver._file = io.FileIO("/dev/full", "w")
    with pytest.raises(Failure) as caught:
        await receiver.write(b"x")
    assert caught.value.code is Code.SCRATCH_FULL
    await receiver.abort()


@pytest.mark.anyio
async def test_another_disk_error_is_worth_a_retry(
    store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "link", broken)
    with pytest.raises(Failure) as caught:
        await store.put("media/t/a", write(tmp_path, b"x"))
    assert caught.value.code is Code.STORAGE_UNAVAILABLE
    assert str(store.root) not in str(caught.value)


@pytest.mark.anyio
async def test_a_source_on_another_disk_is_copied(
    store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link
    source = write(tmp_path, b"from elsewhere")

    def across(origin: Any, target: Any, **more: Any) -> None:
        if Path(origin) == source or "fetched" in str(target):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        link(origin, target, **more)

    monkeypatch.setattr(os, "link", across)
    stored = await store.put("media/t/a", source)
    source.write_bytes(b"changed afterwards")
    await store.fetch("media/t/a", stored.version, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == b"from elsewhere"


@pytest.mark.anyio
async def test_a_reader_that_is_canceled_while_it_opens_leaves_nothing_open(
    store: LocalStorage, tmp_path: Path
) -> None:
    await store.put("media/t/a", write(tmp_path, b"x"))
    stored = await store.stat("media/t/a")
    assert stored is not None
    before = len(os.listdir("/dev/fd"))
    for turn in range(200):
        reader = store.read("media/t/a", stored.version)
        reading = asyncio.ensure_future(anext(reader))
        for _ in range(turn % 3):
            await asyncio.sleep(0)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        await reader.aclose()
        writing = asyncio.ensure_future(store.receive(f"media/t/{turn}"))
        await asyncio.sleep(0)
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await (await writing).abort()
    await asyncio.to_thread(lambda: None)
    deadline = time.monotonic() + 10
    while len(os.listdir("/dev/fd")) > before or os.listdir(store.root / ".incoming"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.anyio
async def test_only_what_crashed_writers_and_deletions_left_long_ago_is_swept(
    store: LocalStorage, tmp_path: Path
) -> None:
    await store.put("media/t/a", write(tmp_path, b"x"))
    left = await store.receive("uploads/t/a")
    await left.write(b"half")
    half_removed = store.root / ".incoming" / "folder"
    half_removed.mkdir()
    (half_removed / "object").write_bytes(b"x")
    now = time.time()
    assert await store.sweep(older_than_seconds=60, now=now) == 0
    assert await store.sweep(older_than_seconds=60, now=now + 120) == 2
    assert os.listdir(store.root / ".incoming") == []
    assert await store.stat("media/t/a") is not None
    await left.abort()


@pytest.mark.anyio
async def test_a_file_that_a_writer_still_lays_into_a_removed_folder_goes_with_it(
    store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had found the folder just before that was moved out of the way."""
    await store.put("media/t/m/1/a", write(tmp_path, b"a"))
    rmdir, late = os.rmdir, [b"one", b"two"]

    def meets(path: Any, **options: Any) -> None:
        at = options.get("dir_fd")
        if late and str(path) == "1":
            fd = os.open("1", os.O_RDONLY, dir_fd=at)
            os.close(os.open("late", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
            os.close(fd)
            late.pop()
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", meets)
    assert await store.delete("media/t/m") == 1
    assert late == []
    assert files(store) == [".incoming", "media"]


@pytest.mark.anyio
async def test_empty_folders_are_pruned_but_the_areas_stay(
    store: LocalStorage, tmp_path: Path
) -> None:
    await store.put("media/t/m/web-v1/set/a", write(tmp_path, b"x"))
    await store.put("media/u/m/web-v1/set/a", write(tmp_path, b"x"))
    await store.delete("media/t/m/web-v1/set")
    assert "media/t" not in files(store)
    assert "media/u/m/web-v1/set/a" in files(store)
    await store.delete("media/u/m")
    assert files(store) == [".incoming", "media"]


def test_signed_requests_carry_all_that_was_signed(store: LocalStorage) -> None:
    expires_at = datetime.now(UTC).replace(microsecond=0) + timedelta(minutes=5)
    put = store.sign_put("uploads/t/a", content_type="image/png", size=7, expires_at=expires_at)
    assert (put.method, put.expires_at) == ("PUT", expires_at)
    assert put.headers == {"Content-Type": "image/png", "Content-Length": "7"}
    parts = urlsplit(put.url)
    assert f"{parts.scheme}://{parts.netloc}{parts.path}" == (
        "http://media.test/storage/uploads/t/a"
    )
    query = parse_qs(parts.query)
    assert query["expires"] == [str(int(expires_at.timestamp()))]
    signing.verify(
        KEYRING,
        signing.Grant("PUT", "uploads/t/a", int(expires_at.timestamp()), "image/png", 7),
        key_id=query["key_id"][0],
        signature=query["signature"][0],
        now=time.time(),
    )
    assert store.sign_get("media/t/a", expires_at=expires_at).headers == {}

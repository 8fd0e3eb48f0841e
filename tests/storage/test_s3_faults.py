"""A bucket that is slow, silent, cut off or refuses: what is done is done, the rest is told as what
it is, and wrong bytes never come through."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.storage.conformance import BIG, content, write
from tests.storage.fault_proxy import FaultProxy, fault_proxy
from tests.storage.seaweed import Seaweed
from tests.storage.test_s3 import INSTALLATION, new_bucket

from mediamill.failures import Code, Failure, Verdict
from mediamill.originals import fetch_original
from mediamill.storage import Storage, bucket
from mediamill.storage.s3 import S3Storage, open_s3

pytestmark = [pytest.mark.anyio, pytest.mark.long, pytest.mark.timeout(120)]
Faulty = tuple[S3Storage, FaultProxy]


@pytest.fixture
async def faulty(s3_server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Faulty]:
    """A storage behind the proxy, which does nothing wrong until it is told to."""
    monkeypatch.setattr(bucket, "_IDLE_SECONDS", 0.5)
    monkeypatch.setattr(bucket, "_RETRY_SECONDS", 2.0)
    monkeypatch.setattr(bucket, "_PAUSE_SECONDS", 0.02)
    made = await new_bucket(s3_server)
    async with fault_proxy(s3_server.endpoint) as proxy:
        store = await open_s3(replace(made, endpoint=proxy.endpoint), INSTALLATION)
        yield store, proxy
        proxy.fault = lambda _: None
        await store.close()


async def everything(store: Storage, folder: Path, name: str) -> None:
    """Every operation once, on keys of its own."""
    key = f"uploads/t/{name}"
    stored = await store.put(f"{key}/a", write(folder, b"content"))
    assert await store.stat(f"{key}/a") == stored
    await store.fetch(f"{key}/a", stored.version, folder / f"fetched-{name}")
    assert (folder / f"fetched-{name}").read_bytes() == b"content"
    await store.copy(f"{key}/a", f"{key}/b")
    upload = await store.begin_parts(f"{key}/c", content_type="video/mp4")
    receiver = await store.open_part(f"{key}/c", upload, 1, offset=0)
    await receiver.write(b"part")
    part = await receiver.commit()
    assert await store.list_parts(f"{key}/c", upload) == [part]
    await store.complete_parts(f"{key}/c", upload, [part], size=4)
    assert await store.list(key) == ["a", "b", "c"]
    assert await store.delete(key) <= 3  # a deletion that is asked for twice finds nothing then
    assert await store.list(key) == []


@pytest.mark.parametrize("fault", ["slow_down", "refused"])
async def test_every_operation_outlasts_a_short_fault(
    faulty: Faulty, tmp_path: Path, fault: str
) -> None:
    store, proxy = faulty
    turn = 0

    def every_other(_: object) -> str | None:
        nonlocal turn
        turn += 1
        return fault if turn % 2 else None

    proxy.fault = every_other
    await everything(store, tmp_path, fault.replace("_", "-"))
    assert sum(1 for _, met in proxy.seen if met == fault) >= 8


CALLS: dict[str, Callable[[Storage, Path], Awaitable[object]]] = {
    "stat": lambda store, _: store.stat("uploads/t/there"),
    "put": lambda store, folder: store.put("uploads/t/new", write(folder, b"x")),
    "fetch": lambda store, folder: store.fetch("uploads/t/there", '"x"', folder / "f"),
    "copy": lambda store, _: store.copy("uploads/t/there", "uploads/t/copy"),
    "list": lambda store, _: store.list("uploads"),
    "delete": lambda store, _: store.delete("uploads/t"),
    "begin": lambda store, _: store.begin_parts("uploads/t/p", content_type="a/b"),
    "complete": lambda store, _: store.complete_parts("uploads/t/p", "x", [], size=1),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("fault", "code"),
    [("slow_down", Code.STORAGE_UNAVAILABLE), ("hang", Code.STORAGE_UNAVAILABLE),
     ("denied", Code.STORAGE_AUTH)],
)  # fmt: skip
async def test_a_long_fault_is_told_as_what_it_is_and_in_time(
    faulty: Faulty, tmp_path: Path, call: str, fault: str, code: Code
) -> None:
    store, proxy = faulty
    proxy.fault = lambda _: fault
    began = time.monotonic()
    with pytest.raises(Failure) as caught:
        await CALLS[call](store, tmp_path)
    assert caught.value.code is code
    assert code.verdict in (Verdict.TRANSIENT, Verdict.HELD)
    assert time.monotonic() - began < 30
    assert not (tmp_path / "f").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tmp")] == []


async def test_an_answer_that_is_lost_is_no_failure(faulty: Faulty, tmp_path: Path) -> None:
    """What was done although nobody heard of it is found, and not done twice."""
    store, proxy = faulty
    proxy.for_times(1, "lost", "PUT")
    stored = await store.put("uploads/t/a", write(tmp_path, b"once"))
    assert await store.stat("uploads/t/a") == stored
    assert [method for method, _ in proxy.seen[-4:]].count("PUT") == 2

    upload = await store.begin_parts("uploads/t/b", content_type="video/mp4")
    receiver = await store.open_part("uploads/t/b", upload, 1, offset=0)
    await receiver.write(b"part")
    proxy.for_times(1, "lost", "PUT")
    part = await receiver.commit()
    proxy.for_times(1, "lost", "POST")
    done = await store.complete_parts("uploads/t/b", upload, [part], size=4)
    assert await store.stat("uploads/t/b") == done
    assert await content(store, "uploads/t/b", done) == b"part"


async def test_a_large_file_outlasts_faults_in_its_parts(
    faulty: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, proxy = faulty
    monkeypatch.setattr(bucket, "_PART_BYTES", BIG)
    whole = bytes(range(256)) * (2 * BIG // 256 + 1)
    count = 0

    def sometimes(_: object) -> str | None:
        nonlocal count
        count += 1
        return {2: "slow_down", 4: "lost", 6: "refused"}.get(count)

    proxy.fault = sometimes
    stored = await store.put("uploads/t/large", write(tmp_path, whole))
    assert stored.size == len(whole) > 2 * bucket._PART_BYTES
    assert await content(store, "uploads/t/large", stored) == whole


async def test_bytes_that_are_cut_short_are_fetched_again_or_refused(
    faulty: Faulty, tmp_path: Path
) -> None:
    store, proxy = faulty
    whole = bytes(range(256)) * (BIG // 256)
    stored = await store.put("uploads/t/a", write(tmp_path, whole))
    proxy.for_times(1, "cut", "GET")
    caught: list[Code] = []
    try:
        await store.fetch("uploads/t/a", stored.version, tmp_path / "fetched")
    except Failure as failure:
        caught.append(failure.code)
    assert caught in ([], [Code.STORAGE_UNAVAILABLE])
    if caught:
        assert not (tmp_path / "fetched").exists()
    else:
        assert (tmp_path / "fetched").read_bytes() == whole
    proxy.fault = lambda _: "cut"
    with pytest.raises(Failure, match="storage_unavailable"):
        await store.fetch("uploads/t/a", stored.version, tmp_path / "again")
    assert not (tmp_path / "again").exists()


async def test_a_body_that_stalls_is_given_up_in_time(faulty: Faulty, tmp_path: Path) -> None:
    store, proxy = faulty
    whole = bytes(range(256)) * (BIG // 256)
    stored = await store.put("uploads/t/a", write(tmp_path, whole))
    proxy.fault = lambda request: "stall" if request.method == "GET" else None
    began = time.monotonic()
    with pytest.raises(Failure) as caught:
        await store.fetch("uploads/t/a", stored.version, tmp_path / "fetched")
    assert caught.value.code is Code.STORAGE_UNAVAILABLE
    assert time.monotonic() - began < 30
    assert not (tmp_path / "fetched").exists()
    proxy.fault = lambda _: None
    await store.fetch("uploads/t/a", stored.version, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == whole


async def test_a_bit_that_fell_over_on_the_way_is_no_verdict_on_the_file(
    faulty: Faulty, tmp_path: Path
) -> None:
    store, proxy = faulty
    whole = bytes(range(256)) * (BIG // 256)
    stored = await store.put("uploads/t/a", write(tmp_path, whole))
    sha256 = hashlib.sha256(whole).hexdigest()
    to = tmp_path / "fetched"
    proxy.for_times(1, "flip", "GET")
    found = await fetch_original(store, "uploads/t/a", stored.version, to, sha256=sha256)
    assert found == sha256
    assert to.read_bytes() == whole
    proxy.fault = lambda request: "flip" if request.method == "GET" else None
    with pytest.raises(Failure, match="storage_unavailable"):
        await fetch_original(store, "uploads/t/a", stored.version, to, sha256=sha256)
    proxy.fault = lambda _: None
    other = hashlib.sha256(b"").hexdigest()
    with pytest.raises(Failure, match="checksum_mismatch"):
        await fetch_original(store, "uploads/t/a", stored.version, to, sha256=other)


async def test_credentials_that_work_again_are_enough(faulty: Faulty, tmp_path: Path) -> None:
    store, proxy = faulty
    proxy.fault = lambda _: "denied"
    with pytest.raises(Failure):
        await store.put("uploads/t/a", write(tmp_path, b"x"))
    proxy.fault = lambda _: None
    await store.put("uploads/t/a", write(tmp_path, b"x"))

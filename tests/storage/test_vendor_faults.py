"""Google and Azure when they are slow, silent, refuse, or their answers are lost."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.storage.conformance import BIG, content, write
from tests.storage.fault_proxy import FaultProxy, Request, fault_proxy
from tests.storage.google import google
from tests.storage.test_s3_faults import CALLS, everything

from mediamill import ids
from mediamill.failures import Code, Failure
from mediamill.storage import Storage, azure, bucket, gcs

pytestmark = [pytest.mark.anyio, pytest.mark.long, pytest.mark.timeout(240)]
Faulty = tuple[Storage, FaultProxy]


@pytest.fixture(params=["gcs", pytest.param("azure", marks=pytest.mark.extra)])
async def faulty(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Faulty]:  # fmt: skip
    """A storage behind the proxy, which does nothing wrong until it is told to."""
    monkeypatch.setattr(bucket, "_IDLE_SECONDS", 10.0)
    monkeypatch.setattr(bucket, "_RETRY_SECONDS", 2.0)
    monkeypatch.setattr(bucket, "_PAUSE_SECONDS", 0.02)
    store: Storage
    if request.param == "gcs":
        with google(tmp_path_factory.mktemp("google")) as played:
            async with fault_proxy(played.endpoint) as proxy:
                there = gcs.Place(played.new_bucket(), played.credentials_file, proxy.endpoint)
                store = await gcs.open_gcs(there, ids.new())
                yield store, proxy
                proxy.fault = lambda _: None
                await store.close()
        return
    from tests.storage.azurite import ACCOUNT, ACCOUNT_KEY, Azurite

    server: Azurite = request.getfixturevalue("azure_server")
    made = azure.Place(server.new_container(), ACCOUNT, ACCOUNT_KEY)
    async with fault_proxy(server.endpoint.removesuffix(f"/{ACCOUNT}")) as proxy:
        store = await azure.open_azure(
            replace(made, endpoint=f"{proxy.endpoint}/{ACCOUNT}"), ids.new()
        )
        yield store, proxy
        proxy.fault = lambda _: None
        await store.close()


@pytest.mark.parametrize("fault", ["slow_down", "refused"])
async def test_every_operation_outlasts_a_short_fault(
    faulty: Faulty, tmp_path: Path, fault: str
) -> None:
    store, proxy = faulty
    proxy.fault = first_time(fault)
    await everything(store, tmp_path, fault.replace("_", "-"))
    assert sum(1 for _, met in proxy.seen if met == fault) >= 8


def first_time(fault: str) -> Callable[[Request], str | None]:
    """Each request meets the fault once, and passes when it is sent again."""
    seen: set[tuple[str, str]] = set()

    def choose(request: Request) -> str | None:
        told = request.method, request.target.partition("?")[0]
        again = told in seen
        seen.add(told)
        return None if again else fault

    return choose


@pytest.mark.parametrize("call", sorted(CALLS))
@pytest.mark.parametrize(
    ("fault", "code"),
    [("slow_down", Code.STORAGE_UNAVAILABLE), ("denied", Code.STORAGE_AUTH)],
)
async def test_a_long_fault_is_told_as_what_it_is_and_in_time(
    faulty: Faulty, tmp_path: Path, call: str, fault: str, code: Code
) -> None:
    store, proxy = faulty
    proxy.fault = lambda _: fault
    began = time.monotonic()
    with pytest.raises(Failure) as caught:
        await CALLS[call](store, tmp_path)
    assert caught.value.code is code
    assert time.monotonic() - began < 30
    assert not (tmp_path / "f").exists()


async def test_answers_that_are_lost_are_no_failure(faulty: Faulty, tmp_path: Path) -> None:
    """Each request is served, and heard of only when it is sent again."""
    store, proxy = faulty
    proxy.fault = first_time("lost")
    stored = await store.put("uploads/t/a", write(tmp_path, b"once"))
    assert await store.stat("uploads/t/a") == stored
    upload = await store.begin_parts("uploads/t/b", content_type="video/mp4")
    receiver = await store.open_part("uploads/t/b", upload, 1, offset=0)
    await receiver.write(b"part")
    part = await receiver.commit()
    done = await store.complete_parts("uploads/t/b", upload, [part], size=4)
    assert await store.stat("uploads/t/b") == done
    assert await content(store, "uploads/t/b", done) == b"part"
    assert await store.delete("uploads") in (0, 1, 2)  # who hears of a deletion twice counts none
    assert await store.list("uploads") == []


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
        return {2: "slow_down", 5: "lost", 7: "refused"}.get(count)

    proxy.fault = sometimes
    stored = await store.put("uploads/t/large", write(tmp_path, whole))
    assert await content(store, "uploads/t/large", stored) == whole


async def test_bytes_that_are_cut_short_never_pass_for_a_file(
    faulty: Faulty, tmp_path: Path
) -> None:
    store, proxy = faulty
    whole = bytes(range(256)) * (BIG // 256)
    stored = await store.put("uploads/t/a", write(tmp_path, whole))
    proxy.fault = lambda _: "cut"
    with pytest.raises(Failure, match="storage_unavailable"):
        await store.fetch("uploads/t/a", stored.version, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()

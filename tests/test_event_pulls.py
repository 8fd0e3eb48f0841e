"""Events that wait in a queue: followed, then taken off; nothing is lost, nothing goes round for
ever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests import rows
from tests.api.conftest import Api, Body, make_api, media_uuid
from tests.senders import ACCOUNT, pem, private_key
from tests.test_storage_events import eventbridge, pubsub, records, s3, sns
from tests.waiting import QueueHost, queue_host

from mediamill import db, event_pulls, failpoints, storage_events
from mediamill.config import ConfigError
from mediamill.event_pulls import Puller
from mediamill.failures import Code, Failure

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def shared_database(server: str, template: str) -> Iterator[str]:
    with rows.fresh_database(server, template) as dsn:
        yield dsn


@dataclass(slots=True)
class Pulled:
    """An API whose bucket tells a queue, and the puller of that queue."""

    api: Api
    host: QueueHost
    puller: Puller
    queue: str

    def event(self, key: str, kind: str = "ObjectCreated:Put") -> Any:
        if self.queue == "sqs":
            return records(s3(key, kind))
        return pubsub(key, "OBJECT_FINALIZE" if "Created" in kind else "OBJECT_DELETE")

    async def uploaded(self) -> tuple[Body, str]:
        slot = await self.api.upload()
        key = await self.api.pool.fetchval(
            "SELECT upload_key FROM media WHERE id = $1", media_uuid(slot)
        )
        return slot, key

    async def jobs(self, slot: Body) -> int:
        found = await self.api.pool.fetchval(
            "SELECT count(*) FROM jobs WHERE media_id = $1", media_uuid(slot)
        )
        return int(found)

    async def counted(self) -> dict[str, int]:
        lines = (await self.api.client.get("/metrics")).text.splitlines()
        start = "media_pulled_events_total{"
        found = [line for line in lines if line.startswith(start)]
        assert all(f'queue="{self.queue}"' in line for line in found)
        return {line.split('"')[1]: int(float(line.split()[-1])) for line in found}


@pytest.fixture(params=["sqs", "pubsub"])
async def pulled(
    request: pytest.FixtureRequest, shared_database: str, tmp_path: Path
) -> AsyncIterator[Pulled]:
    async with queue_host() as host:
        where = {
            "sqs": {"sqs_queue_url": f"{host.url}/1/uploads"},
            "pubsub": {
                "pubsub_subscription": "projects/p/subscriptions/uploads",
                "pubsub_endpoint": host.url,
            },
        }[request.param]
        # The objects lie on a local disk; the bucket has a name all the same.
        settings: dict[str, Any] = {
            "storage": "s3",
            "s3_bucket": "media",
            "s3_region": "eu-west-1",
            "s3_access_key_id": "test-key",
            "s3_secret_access_key": "secret",
            **where,
        }
        async with make_api(shared_database, tmp_path, **settings) as api:
            await api.pool.execute("DELETE FROM tallies")
            here = api.services
            (queue,) = event_pulls.queues(here.settings)
            puller = Puller(here.settings, here.pool, here.storage, queue)
            yield Pulled(api, host, puller, request.param)
            await queue.close()


async def test_an_event_is_followed_and_taken_off(pulled: Pulled) -> None:
    slot, key = await pulled.uploaded()
    pulled.host.send(pulled.event(key))
    assert await pulled.puller.once() == 1
    assert await pulled.jobs(slot) == 1
    assert pulled.host.waiting == []
    assert await pulled.puller.once() == 0
    assert await pulled.counted() == {"accepted": 1}


@pytest.mark.parametrize("pulled", ["sqs"], indirect=True)
async def test_every_envelope_comes_through_sqs(pulled: Pulled) -> None:
    for wrap in (lambda key: sns(records(s3(key))), eventbridge):
        slot, key = await pulled.uploaded()
        pulled.host.send(wrap(key))
        await pulled.puller.once()
        assert await pulled.jobs(slot) == 1
    assert pulled.host.waiting == []


async def test_copies_and_strangers_and_deletions_make_nothing(pulled: Pulled) -> None:
    slot, key = await pulled.uploaded()
    for each in (
        *[pulled.event(key)] * 20,
        pulled.event(key, "ObjectRemoved:Delete"),
        pulled.event("uploads/somebody/else"),
        pulled.event(key.replace("/original", "/tail")),
    ):
        pulled.host.send(each)
    for _ in range(3):
        await pulled.puller.once()
    assert pulled.host.waiting == []
    assert await pulled.jobs(slot) == 1
    counted = await pulled.counted()
    assert counted == {"accepted": 1, "known": 19, "ignored": 1, "foreign": 2}


@pytest.mark.parametrize("body", ["not JSON", '{"new": "form"}'])
async def test_what_nobody_can_read_is_taken_off_and_holds_nothing_up(
    pulled: Pulled, body: str
) -> None:
    slot, key = await pulled.uploaded()
    if pulled.queue == "sqs":
        pulled.host.send(body)
    else:
        pulled.host.send({"message": {"attributes": {"eventType": "OBJECT_FINALIZE"}}})
    pulled.host.send(pulled.event(key))
    assert await pulled.puller.once() == 2
    assert pulled.host.waiting == []
    assert await pulled.jobs(slot) == 1
    assert await pulled.counted() == {"unreadable": 1, "accepted": 1}


async def test_an_event_waits_out_an_outage_of_the_storage(
    pulled: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, key = await pulled.uploaded()
    pulled.host.send(pulled.event(key))

    async def down(_: str) -> Any:
        raise Failure(Code.STORAGE_UNAVAILABLE)

    with monkeypatch.context() as patch:
        patch.setattr(type(pulled.api.store), "stat", lambda _, key: down(key))
        with pytest.raises(Failure):
            await pulled.puller.once()
    (waiting,) = pulled.host.waiting  # hidden for a while, still there
    assert await pulled.puller.once() == 0
    pulled.host.show_again()
    assert await pulled.puller.once() == 1
    assert waiting.taken == 2
    assert await pulled.jobs(slot) == 1
    assert await pulled.counted() == {"put_off": 1, "accepted": 1}


async def test_an_event_that_is_older_than_any_open_slot_is_given_up(
    pulled: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reconciler has looked at the slot by then, and does it again while the storage is out."""
    _, key = await pulled.uploaded()

    async def down(_: str) -> Any:
        raise Failure(Code.STORAGE_AUTH)

    monkeypatch.setattr(type(pulled.api.store), "stat", lambda _, key: down(key))
    settings = pulled.api.services.settings
    longest = max(settings.upload_ttl_seconds, settings.resumable_ttl_seconds)
    pulled.host.send(pulled.event(key), age_seconds=longest - 30)
    pulled.host.send(pulled.event(key), age_seconds=longest + 30)
    with pytest.raises(Failure):
        await pulled.puller.once()
    assert len(pulled.host.waiting) == 1
    assert await pulled.counted() == {"put_off": 1, "given_up": 1}


async def test_an_event_that_trips_us_up_goes_round_once(
    pulled: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison, key = await pulled.uploaded()
    slot, good = await pulled.uploaded()
    follow = storage_events.follow

    async def tripping(pool: Any, store: Any, settings: Any, hint: Any) -> str:
        if hint.key == key:
            raise ZeroDivisionError
        return await follow(pool, store, settings, hint)

    monkeypatch.setattr(storage_events, "follow", tripping)
    pulled.host.send(pulled.event(key))
    pulled.host.send(pulled.event(good))
    assert await pulled.puller.once() == 2
    assert pulled.host.waiting == []
    assert (await pulled.jobs(poison), await pulled.jobs(slot)) == (0, 1)
    assert await pulled.counted() == {"failed": 1, "accepted": 1}


async def test_a_death_between_the_commit_and_the_queue_makes_nothing_twice(
    pulled: Pulled,
) -> None:
    slot, key = await pulled.uploaded()
    pulled.host.send(pulled.event(key))
    failpoints.arm("pull.followed:raise:1")
    try:
        with pytest.raises(OSError, match="failpoint"):
            await pulled.puller.once()
    finally:
        failpoints.arm(None)
    assert await pulled.jobs(slot) == 1
    assert len(pulled.host.waiting) == 1
    pulled.host.show_again()
    await pulled.puller.once()
    assert await pulled.jobs(slot) == 1
    assert pulled.host.waiting == []


@pytest.mark.parametrize("status", [403, 500])
async def test_an_outage_of_the_queue_is_waited_out_with_growing_pauses(
    pulled: Pulled, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    slot, key = await pulled.uploaded()
    pulled.host.send(pulled.event(key))
    pulled.host.answer = status
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def counted(seconds: float) -> None:
        if seconds >= 1:
            pauses.append(seconds)
            if len(pauses) == 5:
                pulled.host.answer = 200
            seconds = 0
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", counted)
    running = asyncio.create_task(pulled.puller.run())
    for _ in range(1000):
        if await pulled.jobs(slot) and not pulled.host.waiting:
            break
        await sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await pulled.jobs(slot) == 1
    for number, pause in enumerate(pauses, start=1):
        assert 0.5 * 2**number <= pause <= 2**number


async def test_a_long_poll_ends_with_the_process(pulled: Pulled) -> None:
    pulled.host.wait_seconds = 30
    running = asyncio.create_task(pulled.puller.run())
    await pulled.host.called.wait()
    running.cancel()
    async with asyncio.timeout(2):
        with pytest.raises(asyncio.CancelledError):
            await running
    pulled.host.wait_seconds = 0


async def test_without_the_database_nothing_is_taken_off(
    pulled: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, key = await pulled.uploaded()
    pulled.host.send(pulled.event(key))

    async def gone(*_: Any) -> str:
        raise db.Unavailable("gone")

    with monkeypatch.context() as patch:
        patch.setattr(storage_events, "follow", gone)
        with pytest.raises(db.Unavailable):
            await pulled.puller.once()
    pulled.host.show_again()
    await pulled.puller.once()
    assert await pulled.jobs(slot) == 1
    assert pulled.host.waiting == []


async def test_pubsub_is_shown_a_token_of_this_machines_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never over a connection without TLS, where only an emulator can be."""
    async with queue_host() as host:
        file = tmp_path / "account.json"
        account = {
            "type": "service_account",
            "client_email": ACCOUNT,
            "private_key": pem(private_key(1)).decode(),
            "token_uri": f"{host.url}/token",
        }
        file.write_text(json.dumps(account))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        name = "projects/p/subscriptions/uploads"
        plain = rows.settings(tmp_path, pubsub_subscription=name, pubsub_endpoint=host.url)
        (queue,) = event_pulls.queues(plain)
        assert await queue.take() == []
        assert host.tokens == [""]
        await queue.close()

        (queue,) = event_pulls.queues(rows.settings(tmp_path, pubsub_subscription=name))
        assert isinstance(queue, event_pulls.PubSub)
        monkeypatch.setattr(queue, "_base", f"{host.url}/v1/{name}")
        for _ in range(3):
            assert await queue.take() == []
        assert host.tokens[1:] == ["Bearer a-token"] * 3
        assert host.calls.count("token") == 1
        await queue.close()

        account["token_uri"] = "http://127.0.0.1:9/token"
        file.write_text(json.dumps(account))
        (queue,) = event_pulls.queues(rows.settings(tmp_path, pubsub_subscription=name))
        with pytest.raises(Failure) as failed:
            await queue.take()
        assert failed.value.code in (Code.TARGET_UNREACHABLE, Code.STORAGE_AUTH)
        await queue.close()


def test_the_region_is_read_off_the_address(tmp_path: Path) -> None:
    keys = {"s3_access_key_id": "k", "s3_secret_access_key": "s", "s3_region": "us-west-2"}
    for url, region in (
        ("https://sqs.eu-central-1.amazonaws.com/1/q", "eu-central-1"),
        ("https://sqs.cn-north-1.amazonaws.com.cn/1/q", "cn-north-1"),
        ("http://queues.internal:9324/1/q", "us-west-2"),
    ):
        (queue,) = event_pulls.queues(rows.settings(tmp_path, sqs_queue_url=url, **keys))
        assert isinstance(queue, event_pulls.Sqs)
        assert queue._region == region


@pytest.mark.parametrize(
    ("setting", "value", "module", "extra"),
    [
        ("sqs_queue_url", "https://sqs.eu-west-1.amazonaws.com/1/q", "botocore.session", "s3"),
        (
            "pubsub_subscription",
            "projects/p/subscriptions/s",
            "google.auth.transport.requests",
            "gcs",
        ),
    ],
)
def test_a_missing_library_is_a_clear_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    value: str,
    module: str,
    extra: str,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ConfigError, match=rf"{setting} needs .*mediamill\[{extra}\]"):
        event_pulls.queues(rows.settings(tmp_path, **{setting: value}))

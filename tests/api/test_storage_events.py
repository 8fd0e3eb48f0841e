"""Bucket events at the door: who may bring them, and how many jobs come of any number of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.api.conftest import Api, Body, check_problem, make_api, media_uuid
from tests.senders import ACCOUNT, AUDIENCE, TOPIC, KeyHost, google_token, key_host, signed
from tests.storage.seaweed import Seaweed, bucket_name
from tests.test_storage_events import (
    event_grid,
    eventbridge,
    pubsub,
    records,
    s3,
    seaweedfs,
)

from mediamill import ids
from mediamill.config import EventToken
from mediamill.event_senders import Senders
from mediamill.maintenance import Maintenance
from mediamill.storage import s3 as s3_storage
from mediamill.storage.s3 import S3Storage, Wire, open_s3

pytestmark = pytest.mark.anyio

SECRET = "sixteen-characters-or-more"


@dataclass(slots=True)
class Told:
    """An API on a bucket that tells what happens in it."""

    api: Api
    store: S3Storage
    bucket: str
    host: KeyHost

    async def tell(
        self, body: Any, *, secret: str | None = SECRET, source: str = "bucket"
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        path = f"/internal/storage-events/{source}"
        async with self.api.stranger() as sender:
            return await sender.post(path, json=body, headers=headers)

    async def uploaded(self, content: bytes = b"bytes") -> tuple[Body, str]:
        """A slot whose bytes lie in the bucket, and their key; nobody has said so yet."""
        slot = await self.api.slot(content)
        async with httpx.AsyncClient() as client:
            answer = await client.put(
                slot["upload"]["url"], content=content, headers=slot["upload"]["headers"]
            )
        assert answer.status_code == 200, answer.text
        return slot, await self.key(slot)

    async def key(self, slot: Body) -> str:
        found: str = await self.api.pool.fetchval(
            "SELECT upload_key FROM media WHERE id = $1", media_uuid(slot)
        )
        return found

    async def jobs(self, slot: Body) -> int:
        return int(
            await self.api.pool.fetchval(
                "SELECT count(*) FROM jobs WHERE media_id = $1", media_uuid(slot)
            )
        )

    def record(self, key: str, name: str = "ObjectCreated:Put") -> Any:
        found = s3(key, name)
        found["s3"]["bucket"]["name"] = self.bucket
        return found


@pytest.fixture
async def told(
    s3_server: Seaweed, shared_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Told]:
    bucket = bucket_name()
    token = EventToken(audience=AUDIENCE, service_account=ACCOUNT)
    given = s3_server.settings(
        bucket,
        storage_event_secrets={"bucket": SECRET, "topic": SECRET, "google": SECRET},
        storage_event_topics={"topic": TOPIC},
        storage_event_tokens={"google": token},
    )
    async with (
        key_host(tmp_path, monkeypatch) as host,
        make_api(shared_database, tmp_path, **given) as api,
    ):
        api.services.senders = Senders(api.services.settings, host.egress)
        place = s3_storage.place(api.services.settings)
        wire = Wire(place)
        await wire.send("PUT", "")
        await wire.close()
        store = await open_s3(place, ids.new())
        api.services.use(store)
        yield Told(api, store, bucket, host)
        await store.close()


async def test_an_event_completes_an_upload(told: Told) -> None:
    slot, key = await told.uploaded()
    answer = await told.tell(records(told.record(key)))
    assert (answer.status_code, answer.json()["accepted"]) == (200, 1)
    assert (await told.api.read(slot["id"]))["state"] == "queued"
    assert await told.jobs(slot) == 1
    shown = (await told.api.client.get("/metrics")).text
    assert 'media_storage_events_total{outcome="accepted",provider="s3"} 1.0' in shown


async def test_every_form_completes_an_upload(told: Told) -> None:
    def renamed(body: Any) -> Any:
        text = str(body)
        assert "media" in text
        return body

    for make in (
        lambda key: signed({"Message": json.dumps(records(told.record(key)))}),
        lambda key: (
            renamed(eventbridge(key))
            | {"detail": {**eventbridge(key)["detail"], "bucket": {"name": told.bucket}}}
        ),
        lambda key: seaweedfs(f"/buckets/{told.bucket}/{key}"),
        lambda key: {
            "message": {
                **pubsub(key)["message"],
                "attributes": {**pubsub(key)["message"]["attributes"], "bucketId": told.bucket},
            }
        },
        lambda key: [
            {
                **event_grid(key),
                "data": {
                    **event_grid(key)["data"],
                    "url": f"https://account.blob.core.test/{told.bucket}/{key}",
                },
            }
        ],
    ):
        slot, key = await told.uploaded()
        assert (await told.tell(make(key))).json()["accepted"] == 1
        assert await told.jobs(slot) == 1


async def test_the_sequences_of_the_problem_case(told: Told) -> None:
    """event-03: twice, by two rules, with `complete`, out of order, and what is none of ours."""
    slot, key = await told.uploaded()
    put, done = told.record(key), told.record(key, "ObjectCreated:CompleteMultipartUpload")
    for _ in range(2):
        await told.tell(records(put))
    await told.tell(records(put, done))
    assert await told.jobs(slot) == 1

    slot, key = await told.uploaded()
    await told.tell(records(told.record(key)))
    complete = await told.api.client.post(f"/v1/media/{slot['id']}/complete")
    assert complete.status_code == 202
    assert await told.jobs(slot) == 1

    slot, key = await told.uploaded()
    await told.store.delete(key)
    await told.tell(records(told.record(key, "ObjectRemoved:Delete")))
    gone = await told.tell(records(told.record(key)))
    assert gone.json()["refused"] == 1
    assert await told.jobs(slot) == 0
    assert (await told.api.read(slot["id"]))["state"] == "awaiting_upload"

    slot, key = await told.uploaded()
    for body, outcome in (
        (records(told.record("uploads/dir/")), "foreign"),
        (records(told.record(f"media/{key}")), "foreign"),
        (records(told.record(key.replace("/original", "/tail-1"))), "foreign"),
        (records(told.record(f"uploads/{ids.new()}/../x")), "foreign"),
        (records(s3(key)), "foreign"),  # another bucket
        (records(told.record(key.replace(slot["id"][4:6], "zz"))), None),
        ({"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": told.bucket}, None),
    ):
        answer = await told.tell(body)
        assert answer.status_code == 200, answer.text
        assert outcome is None or answer.json()[outcome] == 1
    unknown = key.replace(str(media_uuid(slot)), str(ids.new()))
    assert (await told.tell(records(told.record(unknown)))).json()["refused"] == 1


async def test_any_number_of_events_from_all_sides_makes_one_job(told: Told) -> None:
    """Copies by the hundred, `complete`, and the reconciler, at the same instant."""
    slot, key = await told.uploaded()
    await told.api.pool.execute(
        "UPDATE media SET upload_expires_at = now() - interval '1 hour' WHERE id = $1",
        media_uuid(slot),
    )
    duties = Maintenance(told.api.services.settings, told.api.pool, told.store)
    closing = next(duty for duty in duties.duties if duty.name == "close_slots")
    answers = await asyncio.gather(
        *(told.tell(records(*[told.record(key)] * 10)) for _ in range(10)),
        *(told.api.client.post(f"/v1/media/{slot['id']}/complete") for _ in range(3)),
        duties.once(closing),
    )
    codes = {a.status_code for a in answers if isinstance(a, httpx.Response)}
    assert codes <= {200, 202}
    assert await told.jobs(slot) == 1
    moves = await told.api.pool.fetch(
        "SELECT to_state FROM transitions WHERE media_id = $1 AND subject = 'media' ORDER BY id",
        media_uuid(slot),
    )
    assert [m["to_state"] for m in moves] == ["awaiting_upload", "uploaded", "queued"]


async def test_events_of_what_is_done_make_nothing_new(told: Told) -> None:
    """In any order, and whatever they say of the object now."""
    slot, key = await told.uploaded()
    await told.tell(records(told.record(key)))
    await told.api.pool.execute("UPDATE media SET state = 'ready' WHERE id = $1", media_uuid(slot))
    body = [told.record(key, f"ObjectCreated:{how}") for how in ("Put", "Copy")]
    gone = told.record(key, "ObjectRemoved:Delete")
    for sent in ([gone, *body], [*body, gone], body * 50):
        assert (await told.tell(records(*sent))).status_code == 200
    assert await told.jobs(slot) == 1
    assert (await told.api.read(slot["id"]))["state"] == "ready"


async def test_late_events_do_nothing(told: Told) -> None:
    expired, expired_key = await told.uploaded()
    deleted, deleted_key = await told.uploaded()
    await told.api.pool.execute(
        "UPDATE media SET state = 'expired' WHERE id = $1", media_uuid(expired)
    )
    await told.api.client.delete(f"/v1/media/{deleted['id']}")
    for slot, key in ((expired, expired_key), (deleted, deleted_key)):
        assert (await told.tell(records(told.record(key)))).json()["refused"] == 1
        assert await told.jobs(slot) == 0


async def test_a_stranger_is_refused_before_anything_is_looked_at(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, key = await told.uploaded()
    looked: list[str] = []
    stat = S3Storage.stat

    async def watched(self: S3Storage, asked: str) -> Any:
        looked.append(asked)
        return await stat(self, asked)

    monkeypatch.setattr(S3Storage, "stat", watched)
    for secret in (None, "", "wrong", SECRET + "x"):
        answer = await told.tell(records(told.record(key)), secret=secret)
        check_problem(answer, 401, "unauthenticated")
    async with told.api.stranger() as sender:
        for path in ("other", "bucket?token=wrong", "bucket?token=%C3%BC"):
            answer = await sender.post(
                f"/internal/storage-events/{path}", json=records(told.record(key))
            )
            check_problem(answer, 401, "unauthenticated")
        assert looked == []
        # What is known, foreign or deleted costs the storage nothing either.
        by_query = await sender.post(
            f"/internal/storage-events/bucket?token={SECRET}", json=records(told.record(key))
        )
        assert by_query.json()["accepted"] == 1
    assert looked == [key]
    await told.tell(records(*[told.record(key)] * 50))
    assert looked == [key]
    assert await told.jobs(slot) == 1


async def test_bodies_that_nobody_sends_are_refused(told: Told) -> None:
    check_problem(await told.tell({"nonsense": 1}), 422, "invalid_request")
    check_problem(await told.tell({"x": "y" * 300_000}), 413, "payload_too_large")


async def test_handshakes_are_answered(told: Told) -> None:
    grid = {
        "eventType": "Microsoft.EventGrid.SubscriptionValidationEvent",
        "data": {"validationCode": "512d38b6"},
    }
    answer = await told.tell([grid])
    assert (answer.status_code, answer.json()) == (200, {"validationResponse": "512d38b6"})
    async with told.api.stranger() as sender:
        asked = await sender.options(
            f"/internal/storage-events/bucket?token={SECRET}",
            headers={"WebHook-Request-Origin": "eventgrid.azure.net"},
        )
        assert asked.status_code == 200
        assert asked.headers["webhook-allowed-origin"] == "eventgrid.azure.net"
        assert (await sender.options("/internal/storage-events/bucket")).status_code == 401


async def test_a_subscription_is_confirmed_at_its_own_sender_only(told: Told) -> None:
    good = "https://sns.eu-west-1.amazonaws.com/?Action=ConfirmSubscription&Token=1"
    for url, status in (
        (good, 200),
        ("https://sns.eu-west-1.amazonaws.com.evil.test/?Token=1", 422),
        ("http://sns.eu-west-1.amazonaws.com/?Token=1", 422),
        ("https://evil.test/?x=https://sns.eu-west-1.amazonaws.com/?", 422),
        ("https://sns.eu-west-1.amazonaws.com@evil.test/?", 422),
        ("https://sns.eu-west-1.amazonaws.com/?Token=1 x", 422),
    ):
        body = {"Type": "SubscriptionConfirmation", "SubscribeURL": url}
        assert (await told.tell(signed(body))).status_code == status, url
        check_problem(await told.tell(signed(body, number=2)), 401, "unauthenticated")
        check_problem(await told.tell([signed(body)]), 422, "invalid_request")
    assert [asked for asked in told.host.asked if not asked.endswith(".pem")] == [good]


async def test_a_message_that_sns_did_not_sign_stores_nothing(told: Told) -> None:
    slot, key = await told.uploaded()
    message = {"Message": json.dumps(records(told.record(key)))}
    for body, source in (
        ({"Type": "Notification", **message}, "bucket"),
        (signed(message, number=2), "bucket"),
        ({**signed({"Message": "{}"}), **message}, "bucket"),
        (signed({**message, "TopicArn": "arn:aws:sns:eu-west-1:1:other"}), "topic"),
        (records(told.record(key)), "topic"),
    ):
        check_problem(await told.tell(body, source=source), 401, "unauthenticated")
    assert await told.jobs(slot) == 0
    assert (await told.api.read(slot["id"]))["state"] == "awaiting_upload"
    told.host.down = True
    told.api.services.senders = Senders(told.api.services.settings, told.host.egress)
    check_problem(await told.tell(signed(message)), 502, "target_unreachable")
    told.host.down = False
    for version in ("1", "2"):
        answer = await told.tell(signed(message, version=version), source="topic")
        assert answer.status_code == 200, answer.text
    assert await told.jobs(slot) == 1


async def test_a_push_shows_its_token_and_its_secret(told: Told) -> None:
    slot, key = await told.uploaded()
    body = pubsub(key)
    body["message"]["attributes"]["bucketId"] = told.bucket

    async def push(token: str | None, secret: str = SECRET) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        path = f"/internal/storage-events/google?token={secret}"
        async with told.api.stranger() as sender:
            return await sender.post(path, json=body, headers=headers)

    for token, secret in (
        (None, SECRET),
        (SECRET, SECRET),
        (google_token(), "wrong"),
        (google_token(number=2), SECRET),
        (google_token(email="other@project.iam.gserviceaccount.com"), SECRET),
        (google_token(aud="https://other.test"), SECRET),
        (google_token(exp=1), SECRET),
    ):
        check_problem(await push(token, secret), 401, "unauthenticated")
    assert await told.jobs(slot) == 0
    assert (await push(google_token())).json()["accepted"] == 1
    assert await told.jobs(slot) == 1

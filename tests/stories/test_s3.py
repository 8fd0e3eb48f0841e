"""The same installation on a bucket: what clients see, what the bucket holds, what is left."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from tests.storage.seaweed import ACCESS_KEY, SECRET_KEY, Seaweed, bucket_name, seaweed
from tests.stories.clips import Clips
from tests.stories.conftest import Make
from tests.stories.harness import Body, Platform, free_port, until
from tests.test_storage_events import pubsub as pubsub_event
from tests.test_storage_events import s3 as s3_record
from tests.waiting import queue_host_apart

from mediamill.storage.s3 import Place, Wire


class Bucket:
    """A bucket as its owner sees it."""

    def __init__(self, server: Seaweed) -> None:
        self.server = server
        self.name = bucket_name()
        self._wire = Wire(
            Place(
                self.name,
                "us-east-1",
                endpoint=server.endpoint,
                access_key_id=ACCESS_KEY,
                secret_access_key=SECRET_KEY,
            )
        )
        assert self.ask("PUT", "").status_code == 200

    def ask(
        self, method: str, key: str, *, content: bytes = b"", query: Mapping[str, str] | None = None
    ) -> httpx.Response:
        soon = datetime.now(UTC) + timedelta(minutes=5)
        signed = self._wire.sign(method, key, expires_at=soon, query=query)
        return httpx.request(method, signed.url, content=content or None)

    def everything(self) -> list[str]:
        """Every key, with parts that are not complete."""
        found = []
        for question in ("versions", "uploads"):
            found += re.findall("<Key>(.*?)</Key>", self.ask("GET", "", query={question: ""}).text)
        return sorted(found)


@pytest.fixture
def bucket(s3_server: Seaweed) -> Bucket:
    return Bucket(s3_server)


@pytest.fixture
def platform(make_platform: Make, bucket: Bucket) -> Platform:
    """An installation whose clients reach the bucket under another name than its processes."""
    public = f"http://localhost:{bucket.server.port}"
    return make_platform(**bucket.server.settings(bucket.name, s3_public_endpoint=public))


def send(slot: Body, data: bytes, **changes: str | None) -> httpx.Response:
    """The request of a slot, with some of its headers changed or left out."""
    headers = {k: v for k, v in {**slot["upload"]["headers"], **changes}.items() if v is not None}
    return httpx.put(slot["upload"]["url"], headers=headers, content=data)


def test_a_photograph_goes_through_a_bucket_and_leaves_nothing_there(
    platform: Platform, bucket: Bucket, clips: Clips
) -> None:
    platform.start_api()
    platform.start_worker("image=1,maintenance=1")
    digest = hashlib.sha256(clips.photo).hexdigest()
    slot = platform.open_slot(len(clips.photo), "photo.jpg", sha256=digest)
    assert urlsplit(slot["upload"]["url"]).netloc == f"localhost:{bucket.server.port}"
    assert slot["upload"]["headers"]["If-None-Match"] == "*"

    # The bucket takes exactly what was signed, once.
    assert send(slot, clips.photo, **{"Content-Type": "text/html"}).status_code == 403
    assert send(slot, clips.photo, **{"Content-Type": None}).status_code == 403
    assert send(slot, clips.photo, **{"If-None-Match": None}).status_code == 403
    for data in (clips.photo[:-1], clips.photo + b"x"):
        assert send(slot, data, **{"Content-Length": str(len(data))}).status_code == 403
    other = bytes(reversed(clips.photo))
    assert send(slot, other).status_code == 400, "the checksum was signed"
    assert platform.complete(slot["id"]).json()["code"] == "source_missing"
    assert bucket.everything() == ["mediamill-storage"]
    assert send(slot, clips.photo).status_code == 200
    assert send(slot, clips.photo).status_code == 412
    (_, upload) = bucket.everything()
    assert upload.startswith("uploads/default/")

    # Nobody reads it without a signature.
    for host in ("localhost", "127.0.0.1"):
        address = f"http://{host}:{bucket.server.port}/{bucket.name}"
        assert httpx.get(f"{address}/{upload}").status_code == 403
        assert httpx.get(address).status_code == 403

    assert platform.complete(slot["id"]).status_code == 202
    body = platform.wait_for_state(slot["id"], "ready")
    assert body["sha256"] == digest
    assert len(body["variants"]) >= 3
    for variant in body["variants"]:
        assert urlsplit(variant["url"]).netloc == f"localhost:{bucket.server.port}"
        answer = httpx.get(variant["url"])
        assert answer.status_code == 200
        assert answer.headers["content-type"] == variant["content_type"]
        assert f'filename="{variant["name"]}"' in answer.headers["content-disposition"]
        assert hashlib.sha256(answer.content).hexdigest() == variant["sha256"]
        ranged = httpx.get(variant["url"], headers={"Range": "bytes=0-3"})
        assert (ranged.status_code, ranged.content) == (206, answer.content[:4])
        assert httpx.get(variant["url"].partition("?")[0]).status_code == 403
    assert not platform.files("", slot["id"]), "bytes are on the local disk"
    areas = {key.partition("/")[0] for key in bucket.everything()}
    assert areas == {"mediamill-storage", "uploads", "media"}
    platform.assert_path_is_legal(slot["id"])

    # After a deletion the bucket holds no byte of it.
    assert platform.http.delete(f"/v1/media/{slot['id']}").status_code == 202
    until(lambda: bucket.everything() == ["mediamill-storage"], seconds=15, why="bytes are left")


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_form_ends_in_the_bucket(platform: Platform, bucket: Bucket, clips: Clips) -> None:
    platform.start_api()
    platform.start_worker("image=1,maintenance=1")
    answer = platform.post_form(clips.photo, "photo.jpg")
    assert answer.status_code == 202, answer.text
    body = platform.wait_for_state(answer.json()["id"], "ready")
    assert body["sha256"] == hashlib.sha256(clips.photo).hexdigest()


def test_an_original_that_is_replaced_after_its_acceptance_is_refused(
    platform: Platform, bucket: Bucket, clips: Clips
) -> None:
    platform.start_api()
    slot = platform.open_slot(len(clips.photo), "photo.jpg")
    assert send(slot, clips.photo).status_code == 200
    assert platform.complete(slot["id"]).status_code == 202
    gone = platform.open_slot(len(clips.photo), "gone.jpg")
    assert send(gone, clips.photo).status_code == 200
    assert platform.complete(gone["id"]).status_code == 202
    keys = {key.split("/")[2]: key for key in bucket.everything() if "/" in key}
    replaced = bytes(reversed(clips.photo))
    rows = {m: str(platform.media_row(m)["id"]) for m in (slot["id"], gone["id"])}
    assert bucket.ask("PUT", keys[rows[slot["id"]]], content=replaced).status_code == 200
    assert bucket.ask("DELETE", keys[rows[gone["id"]]]).status_code == 204
    platform.start_worker("image=1,maintenance=1")
    for media_id, code in ((slot["id"], "source_changed"), (gone["id"], "source_missing")):
        body = platform.wait_for_state(media_id, "failed")
        assert body["error"]["code"] == code
        assert platform.main_job(media_id)["attempt"] == 1


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_bucket_that_cannot_be_used_stops_the_start_with_a_sentence(
    make_platform: Make, s3_server: Seaweed, bucket: Bucket
) -> None:
    for changes, said in (
        ({"s3_bucket": "no-such-bucket"}, "There is no such bucket"),
        ({"s3_secret_access_key": "wrong"}, "The secret key is wrong"),
        ({"s3_access_key_id": "wrong"}, "The access key is not known there"),
        ({"s3_endpoint": "http://127.0.0.1:9"}, "storage_unavailable"),
    ):
        platform = make_platform(**{**s3_server.settings(bucket.name), **changes})
        platform.errors_expected = True
        api = platform._start("api", {"port": 0})
        assert api.popen.wait(30) == 1
        assert said in api.log.read_text()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_bucket_says_itself_that_an_upload_is_there(
    make_platform: Make, clips: Clips, tmp_path: Path
) -> None:
    """A real server posts its events, noise and all; nobody calls `complete`."""
    secret, port = "a-secret-of-the-bucket", free_port()
    tell = f"http://127.0.0.1:{port}/internal/storage-events/weed", secret
    with seaweed(tmp_path / "weed", tell=tell) as server:
        bucket = Bucket(server)
        given = server.settings(bucket.name, storage_event_secrets=json.dumps({"weed": secret}))
        platform = make_platform(**given)
        platform.port = port
        platform.start_api()
        platform.start_worker("image=1,maintenance=1")
        slot = platform.open_slot(len(clips.photo), "photo.jpg")
        assert send(slot, clips.photo).status_code == 200
        platform.wait_for_state(slot["id"], "ready")
        assert len(platform.jobs(slot["id"])) == 1
        shown = platform.http.get("/metrics").text
        assert 'media_storage_events_total{outcome="accepted",provider="seaweedfs"} 1.0' in shown
        platform.close()


def test_a_worker_pulls_what_waits_in_both_kinds_of_queues(
    make_platform: Make, bucket: Bucket, clips: Clips
) -> None:
    """Nobody calls in, and nobody calls `complete`; the worker asks by itself."""
    with queue_host_apart() as sqs, queue_host_apart() as pubsub:
        sqs.access_key, sqs.region = ACCESS_KEY, "us-east-1"
        given = bucket.server.settings(
            bucket.name,
            sqs_queue_url=f"{sqs.url}/1/uploads",
            pubsub_subscription="projects/p/subscriptions/uploads",
            pubsub_endpoint=pubsub.url,
        )
        platform = make_platform(**given)
        platform.start_api()
        worker = platform.start_worker("image=1,maintenance=1")
        slots = [platform.open_slot(len(clips.photo), name) for name in ("a.jpg", "b.jpg")]
        for slot in slots:
            assert send(slot, clips.photo).status_code == 200
        keys = [str(platform.media_row(slot["id"])["upload_key"]) for slot in slots]
        record = s3_record(keys[0])
        record["s3"]["bucket"]["name"] = bucket.name
        sqs.send("not JSON")
        sqs.send({"Records": [record]})
        event = pubsub_event(keys[1])
        event["message"]["attributes"]["bucketId"] = bucket.name
        pubsub.send(event)
        for slot in slots:
            platform.wait_for_state(slot["id"], "ready")
            assert len(platform.jobs(slot["id"])) == 1
        until(lambda: not sqs.waiting and not pubsub.waiting, seconds=10, why="not taken off")
        counted = platform.rows("SELECT * FROM tallies WHERE name = 'media_pulled_events_total'")
        assert {(row["what"], row["outcome"]): row["count"] for row in counted} == {
            ("sqs", "accepted"): 1,
            ("sqs", "unreadable"): 1,
            ("pubsub", "accepted"): 1,
        }
        sqs.wait_seconds = 20  # a long poll does not keep the process
        began = time.monotonic()
        worker.stop()
        assert time.monotonic() - began < 10
        sqs.wait_seconds = 0
        platform.close()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_deletions_that_are_cut_off_half_way_are_finished(
    make_platform: Make, bucket: Bucket, clips: Clips
) -> None:
    """The sweeper dies between the bytes and the row, of a deletion and of an expired upload."""
    platform = make_platform(**bucket.server.settings(bucket.name))
    platform.start_api()
    platform.start_worker("image=1,maintenance=0")
    media_id = platform.post_form(clips.photo, "photo.jpg").json()["id"]
    platform.wait_for_state(media_id, "ready")
    headers = {"Tus-Resumable": "1.0.0", "Upload-Length": "100"}
    begun = platform.http.post("/v1/uploads", headers=headers).headers["location"]
    chunk = {
        "Tus-Resumable": "1.0.0",
        "Upload-Offset": "0",
        "Content-Type": "application/offset+octet-stream",
    }
    assert platform.http.patch(begun, content=b"x" * 10, headers=chunk).status_code == 204
    platform.rows("UPDATE transfers SET expires_at = now() - interval '1 hour'")
    for place in ("tus.swept", "maintenance.erase"):
        if place == "maintenance.erase":
            assert platform.http.delete(f"/v1/media/{media_id}").status_code == 202
        dying = platform.start_worker("maintenance=1", failpoint=f"{place}:kill9")
        assert dying.popen.wait(60) == -9, f"it did not reach {place}"
        if place == "tus.swept":
            assert platform.rows("SELECT 1 FROM transfers WHERE swept_at IS NULL")
    platform.start_worker("maintenance=1")
    until(
        lambda: (
            bucket.everything() == ["mediamill-storage"]
            and not platform.rows("SELECT 1 FROM erasures")
            and not platform.rows("SELECT 1 FROM transfers WHERE swept_at IS NULL")
        ),
        seconds=60,
        why="something is left",
    )

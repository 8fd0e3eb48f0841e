"""The same installation on the storages of Azure and Google, each by what plays it."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.storage.google import google
from tests.stories.clips import Clips
from tests.stories.conftest import Make
from tests.stories.harness import Platform, until

from mediamill.client import Client

if TYPE_CHECKING:
    from tests.storage.azurite import Azurite

pytestmark = pytest.mark.timeout(300)


@pytest.mark.extra
def test_a_container_of_azure(
    make_platform: Make, azure_server: Azurite, clips: Clips, tmp_path: Path
) -> None:
    container = azure_server.new_container()
    platform = make_platform(**azure_server.settings(container))
    platform.start_api()
    slot = platform.open_slot(len(clips.photo), "photo.jpg")
    assert slot["upload"]["headers"]["x-ms-blob-type"] == "BlockBlob"
    assert slot["upload"]["headers"]["If-None-Match"] == "*"
    assert platform.put(slot, clips.photo).status_code == 201
    assert platform.put(slot, clips.photo).status_code == 403
    # The signature binds no length: that is looked at before anything is accepted.
    wrong = platform.open_slot(len(clips.photo) - 1, "photo.jpg")
    headers = {k: v for k, v in wrong["upload"]["headers"].items() if k != "Content-Length"}
    assert httpx.put(wrong["upload"]["url"], headers=headers, content=clips.photo).is_success
    assert platform.complete(wrong["id"]).json()["code"] == "size_mismatch"
    assert platform.http.delete(f"/v1/media/{wrong['id']}").status_code == 202
    root = f"{azure_server.endpoint}/{container}"
    every_door(platform, slot, clips, tmp_path, azure_server, container, root)


@pytest.mark.long
def test_a_bucket_of_google(make_platform: Make, clips: Clips, tmp_path: Path) -> None:
    with google(tmp_path) as played:
        bucket = played.new_bucket()
        platform = make_platform(**played.settings(bucket))
        platform.start_api()
        slot = platform.open_slot(len(clips.photo), "photo.jpg")
        assert slot["upload"]["headers"]["x-goog-if-generation-match"] == "0"
        headers = {k: v for k, v in slot["upload"]["headers"].items() if k != "Content-Length"}
        longer = httpx.put(slot["upload"]["url"], headers=headers, content=clips.photo + b"x")
        assert longer.status_code == 400
        assert platform.put(slot, clips.photo).status_code == 200
        assert platform.put(slot, clips.photo).status_code == 412
        every_door(platform, slot, clips, tmp_path, played, bucket, f"{played.endpoint}/{bucket}")
        platform.close()


@pytest.mark.long
def test_jobs_wait_until_the_storage_takes_our_credentials_again(
    make_platform: Make, clips: Clips, tmp_path: Path
) -> None:
    """The account's key is exchanged at the vendor's, and comes back."""
    with google(tmp_path) as played:
        platform = make_platform(**played.settings(played.new_bucket()))
        platform.start_api()
        worker = platform.start_worker("image=2,maintenance=1")
        with Client(platform.url, platform.key) as client:
            client.queues.pause("image")
            found = [platform.upload(clips.photo, f"{n}.jpg") for n in range(6)]
            ours, played.key = played.key, rsa.generate_private_key(65537, 2048)
            client.queues.resume("image")
            until(
                lambda: platform.rows(
                    "SELECT 1 FROM transitions WHERE to_state = 'queued' AND code = 'storage_auth'"
                ),
                seconds=20,
                why="no job was held back",
            )
            time.sleep(3)
            (held,) = platform.rows(
                "SELECT count(*) AS jobs, max(attempt) AS attempts, bool_or(dead_letter) AS dead,"
                " bool_and(state = 'queued') AS queued FROM jobs"
            )
            assert tuple(held) == (6, 0, False, True)
            # The worker does not go through all of them to be refused six times.
            assert platform.value("SELECT count(*) FROM attempts") <= 3
            assert "storage_refuses_us" in [event["event"] for event in worker.events()]
            answer = platform.http.get("/readyz")
            assert answer.status_code == 200
            assert answer.json()["checks"]["storage"]["status"] == "storage_auth"
            told = platform.rows(
                "SELECT data FROM events WHERE type = 'media.queued'"
                " AND data ->> 'reason' = 'storage_auth'"
            )
            assert told
            slot = platform.open_slot(len(clips.photo), "late.jpg")
            assert platform.complete(slot["id"]).json()["code"] == "storage_auth"
            played.key = ours
            for media_id in found:
                platform.wait_for_state(media_id, "ready", seconds=90)
                assert platform.main_job(media_id)["attempt"] == 1
        platform.close()


def every_door(
    platform: Platform,
    slot: dict[str, Any],
    clips: Clips,
    tmp_path: Path,
    server: Any,
    bucket: str,
    root: str,
) -> None:
    """A slot that was filled, a form, and the client by each of its ways; all of it is served by
    signed addresses only, and after the deletions no byte is left."""
    platform.start_worker("image=1,maintenance=1")
    large = tmp_path / "large.jpg"
    large.write_bytes(clips.photo + bytes(11 << 20))  # three parts
    assert platform.complete(slot["id"]).status_code == 202
    found = [slot["id"], platform.post_form(clips.photo, "photo.jpg").json()["id"]]
    with Client(platform.url, platform.key) as client:
        for way in ("direct", "multipart", "tus"):
            found.append(client.media.submit(large, way=way).id)
    digests = [hashlib.sha256(file).hexdigest() for file in (clips.photo, large.read_bytes())]
    for number, media_id in enumerate(found):
        body = platform.wait_for_state(media_id, "ready")
        assert body["sha256"] == digests[number > 1]
        for variant in body["variants"]:
            answer = httpx.get(variant["url"])
            assert hashlib.sha256(answer.content).hexdigest() == variant["sha256"]
            assert not httpx.get(variant["url"].partition("?")[0]).is_success
    for address in (root, *(f"{root}/{key}" for key in server.everything(bucket))):
        assert not httpx.get(address).is_success
    for media_id in found:
        assert platform.http.delete(f"/v1/media/{media_id}").status_code == 202
    until(
        lambda: server.everything(bucket) == ["mediamill-storage"],
        seconds=30,
        why="bytes are left",
    )

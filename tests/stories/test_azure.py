"""The same installation on a container of Azure, played by Azure's emulator."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.storage.azurite import Azurite
from tests.stories.clips import Clips
from tests.stories.conftest import Make
from tests.stories.harness import until

from mediamill.client import Client

pytestmark = [pytest.mark.extra, pytest.mark.timeout(300)]


def test_a_photograph_goes_through_a_container_by_every_door_and_leaves_nothing_there(
    make_platform: Make, azure_server: Azurite, clips: Clips, tmp_path: Path
) -> None:
    container = azure_server.new_container()
    platform = make_platform(**azure_server.settings(container))
    platform.start_api()
    platform.start_worker("image=1,maintenance=1")

    slot = platform.open_slot(len(clips.photo), "photo.jpg")
    assert slot["upload"]["headers"]["x-ms-blob-type"] == "BlockBlob"
    assert slot["upload"]["headers"]["If-None-Match"] == "*"
    assert platform.complete(slot["id"]).json()["code"] == "source_missing"
    assert platform.put(slot, clips.photo).status_code == 201
    assert platform.put(slot, clips.photo).status_code == 403
    assert platform.complete(slot["id"]).status_code == 202
    # The signature binds no length: that is looked at before anything is accepted.
    wrong = platform.open_slot(len(clips.photo) - 1, "photo.jpg")
    headers = {k: v for k, v in wrong["upload"]["headers"].items() if k != "Content-Length"}
    assert httpx.put(wrong["upload"]["url"], headers=headers, content=clips.photo).is_success
    assert platform.complete(wrong["id"]).json()["code"] == "size_mismatch"
    platform.http.delete(f"/v1/media/{wrong['id']}")

    large = tmp_path / "large.jpg"
    large.write_bytes(clips.photo + bytes(11 << 20))  # three parts
    with Client(platform.url, platform.key) as client:
        found = [slot["id"], platform.post_form(clips.photo, "photo.jpg").json()["id"]]
        for way in ("direct", "multipart", "tus"):
            found.append(client.media.submit(large, way=way).id)
    digests = [hashlib.sha256(file).hexdigest() for file in (clips.photo, large.read_bytes())]
    for number, media_id in enumerate(found):
        body = platform.wait_for_state(media_id, "ready")
        assert body["sha256"] == digests[number > 1]
        for variant in body["variants"]:
            assert (
                hashlib.sha256(httpx.get(variant["url"]).content).hexdigest() == (variant["sha256"])
            )
            assert not httpx.get(variant["url"].partition("?")[0]).is_success
    root = f"{azure_server.endpoint}/{container}"
    for address in (root, *(f"{root}/{key}" for key in azure_server.everything(container))):
        assert not httpx.get(address).is_success

    for media_id in found:
        assert platform.http.delete(f"/v1/media/{media_id}").status_code == 202
    until(
        lambda: azure_server.everything(container) == ["mediamill-storage"],
        seconds=30,
        why="bytes are left",
    )

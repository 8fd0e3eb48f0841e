"""Uploads that survive: a real client, real connections that break, an API that is killed."""

from __future__ import annotations

import hashlib
import io
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2 as httpx
import pytest
from tests.storage.seaweed import Seaweed
from tests.stories.clips import Clips
from tests.stories.conftest import Make
from tests.stories.harness import Platform, until
from tests.stories.test_s3 import Bucket
from tusclient.client import TusClient

TUS = {"Tus-Resumable": "1.0.0"}


@pytest.fixture(params=["local", "s3"])
def each_platform(request: pytest.FixtureRequest, make_platform: Make) -> Platform:
    """An installation on each kind of storage."""
    if request.param == "local":
        return make_platform()
    server: Seaweed = request.getfixturevalue("s3_server")
    return make_platform(**server.settings(Bucket(server).name))


def client(platform: Platform) -> TusClient:
    return TusClient(
        f"{platform.url}/v1/uploads/", headers={"Authorization": f"Bearer {platform.key}"}
    )


def media_of(platform: Platform, url: str) -> str:
    answer = platform.http.head(url, headers=TUS)
    path: str = answer.headers["mediamill-media"]
    return path.rpartition("/")[2]


class Sender:
    """A PATCH whose bytes are sent piece by piece over a connection of its own."""

    def __init__(self, platform: Platform, url: str, offset: int, length: int) -> None:
        lines = [
            f"PATCH {url} HTTP/1.1",
            f"Host: 127.0.0.1:{platform.port}",
            f"Authorization: Bearer {platform.key}",
            "Tus-Resumable: 1.0.0",
            "Content-Type: application/offset+octet-stream",
            f"Upload-Offset: {offset}",
            f"Content-Length: {length}",
        ]
        self.socket = socket.create_connection(("127.0.0.1", platform.port), timeout=20)
        self.socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def close(self) -> None:
        self.socket.close()


def create(platform: Platform, size: int) -> str:
    answer = platform.http.post("/v1/uploads", headers={**TUS, "Upload-Length": str(size)})
    assert answer.status_code == 201, answer.text
    location: str = answer.headers["location"]
    return location


def offset(platform: Platform, url: str) -> int:
    answer = platform.http.head(url, headers=TUS)
    assert answer.status_code == 200
    return int(answer.headers["upload-offset"])


def finish(platform: Platform, url: str, whole: bytes) -> str:
    """Send what is missing; the media, which must be ready with exactly these bytes."""
    at = offset(platform, url)
    headers = {
        **TUS,
        "Upload-Offset": str(at),
        "Content-Type": "application/offset+octet-stream",
    }
    answer = platform.http.patch(url, content=whole[at:], headers=headers)
    assert answer.status_code == 204, answer.text
    media_id = media_of(platform, url)
    body = platform.wait_for_state(media_id, "ready")
    assert body["sha256"] == hashlib.sha256(whole).hexdigest()
    assert len(platform.jobs(media_id)) == 1
    platform.assert_path_is_legal(media_id)
    return media_id


def test_the_python_client_uploads_in_chunks_with_checksums(
    each_platform: Platform, clips: Clips
) -> None:
    platform = each_platform
    platform.start_api()
    platform.start_worker("image=1,maintenance=1")
    uploader = client(platform).uploader(
        file_stream=io.BytesIO(clips.photo),
        chunk_size=5000,
        metadata={"filename": "photo.jpg", "filetype": "image/jpeg"},
        upload_checksum=True,
    )
    uploader.upload(stop_at=12_000)
    assert uploader.url is not None
    # Another process of the client goes on where this one ended.
    again = client(platform).uploader(
        file_stream=io.BytesIO(clips.photo), chunk_size=9000, url=uploader.url
    )
    again.upload()
    body = platform.wait_for_state(media_of(platform, uploader.url), "ready")
    assert body["filename"] == "photo.jpg"
    assert body["sha256"] == hashlib.sha256(clips.photo).hexdigest()
    assert len(platform.jobs(body["id"])) == 1
    platform.assert_nothing_left()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_an_api_killed_in_the_middle_loses_nothing_that_it_confirmed(
    platform: Platform, clips: Clips
) -> None:
    """At every step: while bytes come, when they are durable, when the object is made."""
    photo = clips.photo
    platform.start_worker("image=1,maintenance=0")
    api = platform.start_api()
    url = create(platform, len(photo))
    first = Sender(platform, url, 0, len(photo))
    first.send(photo[:7000])
    time.sleep(0.3)
    api.kill()
    first.close()
    platform.start_api()
    assert offset(platform, url) <= 7000
    finish(platform, url, photo)
    for place in ("tus.part", "tus.stored"):
        for process in platform.processes:
            if process.name == "api" and process.alive:
                process.kill()
        platform.start_api(failpoint=f"{place}:kill9")
        url = create(platform, len(photo))
        headers = {
            **TUS,
            "Upload-Offset": "0",
            "Content-Type": "application/offset+octet-stream",
        }
        with pytest.raises(httpx.HTTPError):
            platform.http.patch(url, content=photo, headers=headers)
        platform.start_api()
        assert offset(platform, url) in (0, len(photo))
        finish(platform, url, photo)


def test_a_connection_that_is_cut_keeps_what_came(each_platform: Platform, clips: Clips) -> None:
    platform = each_platform
    photo = clips.photo
    platform.start_api()
    platform.start_worker("image=1,maintenance=1")
    url = create(platform, len(photo))
    sender = Sender(platform, url, 0, len(photo))
    sender.send(photo[:6000])
    time.sleep(0.2)
    sender.close()
    until(lambda: offset(platform, url) == 6000, seconds=5, why="bytes that came were lost")
    # One that stalls is taken over from; what it held counts.
    stalled = Sender(platform, url, 6000, len(photo) - 6000)
    stalled.send(photo[6000:9000])
    time.sleep(0.2)
    assert offset(platform, url) == 9000
    finish(platform, url, photo)
    stalled.close()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_an_api_that_is_told_to_stop_keeps_what_came(platform: Platform, clips: Clips) -> None:
    photo = clips.photo
    api = platform.start_api()
    platform.start_worker("image=1,maintenance=1")
    url = create(platform, len(photo))
    sender = Sender(platform, url, 0, len(photo))
    sender.send(photo[:6000])
    time.sleep(0.2)
    api.send(signal.SIGTERM)
    api.popen.wait(20)
    sender.close()
    platform.start_api()
    assert offset(platform, url) <= 6000
    finish(platform, url, photo)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_file_is_fetched_from_its_address(make_platform: Make, clips: Clips) -> None:
    """The worker that fetches it is killed in between; another one goes on."""
    asked: list[str] = []

    class Photo(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
            asked.append(str(start))
            size = len(clips.photo)
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(size - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
            self.end_headers()
            if len(asked) == 1:
                self.wfile.write(clips.photo[:4000])
                time.sleep(3)
            else:
                self.wfile.write(clips.photo[start:])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Photo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    platform = make_platform(egress_allow_networks='["127.0.0.0/8", "::1/128"]')
    platform.start_api()
    first = platform.start_worker("image=1,maintenance=1")
    url = f"http://localhost:{server.server_port}/photo.jpg"
    body = platform.http.post("/v1/media", json={"source": {"url": url}}).json()
    until(lambda: asked, seconds=10, why="nobody asks for it")
    first.kill()
    platform.rows("UPDATE transfers SET due_at = now()")
    platform.start_worker("image=1,maintenance=1")
    done = platform.wait_for_state(body["id"], "ready")
    assert done["sha256"] == hashlib.sha256(clips.photo).hexdigest()
    assert done["filename"] == "photo.jpg"
    platform.assert_path_is_legal(body["id"])
    server.shutdown()
    server.server_close()

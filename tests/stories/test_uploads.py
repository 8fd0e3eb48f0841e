"""Bytes come in, or do not: the slot is a promise that neither side can break by accident."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from urllib.parse import urlsplit

import httpx2 as httpx
from tests.stories.clips import Clips
from tests.stories.conftest import Make
from tests.stories.harness import Body, Platform, until


def test_a_slot_stays_open_until_the_right_bytes_are_there(
    platform: Platform, clips: Clips
) -> None:
    platform.start_api()
    slot = platform.open_slot(len(clips.photo), "photo.jpg")
    early = platform.complete(slot["id"])
    assert (early.status_code, early.json()["code"]) == (409, "source_missing")
    assert platform.get(slot["id"])["state"] == "awaiting_upload"

    assert platform.put(slot, clips.photo).status_code == 200
    assert platform.put(slot, clips.photo).status_code == 412, "an address takes one file"
    (stored,) = platform.files("uploads", slot["id"])
    stored.chmod(0o644)
    os.truncate(stored, 1000)
    short = platform.complete(slot["id"])
    assert (short.status_code, short.json()["code"]) == (409, "size_mismatch")
    assert short.json()["limit"] == {
        "name": "size",
        "allowed": len(clips.photo),
        "seen": 1000,
        "unit": "bytes",
    }
    assert platform.get(slot["id"])["state"] == "awaiting_upload"
    assert platform.jobs(slot["id"]) == []

    stored.unlink()
    assert platform.put(slot, clips.photo).status_code == 200
    assert platform.complete(slot["id"]).status_code == 202
    platform.start_worker("image=1,maintenance=1")
    platform.wait_for_state(slot["id"], "ready")
    done = platform.complete(slot["id"])
    assert done.status_code == 200
    assert done.headers["location"] == f"/v1/media/{slot['id']}"
    platform.assert_path_is_legal(slot["id"])
    platform.assert_published_once(slot["id"])
    platform.assert_nothing_left()


def test_twenty_completions_at_once_make_one_job(platform: Platform, clips: Clips) -> None:
    platform.start_api()
    slot = platform.open_slot(len(clips.photo), "photo.jpg")
    platform.put(slot, clips.photo)
    answers = platform.many(20, lambda http: http.post(f"/v1/media/{slot['id']}/complete"))
    assert Counter(a.status_code for a in answers) == {202: 20}
    assert {a.headers["location"] for a in answers} == {f"/v1/media/{slot['id']}"}
    assert len(platform.jobs(slot["id"])) == 1
    assert platform.value("SELECT count(*) FROM mediamill_tickets") == 1
    moves = [m["to_state"] for m in platform.transitions(slot["id"]) if m["subject"] == "media"]
    assert moves == ["awaiting_upload", "uploaded", "queued"]


def test_more_clients_than_database_connections_are_all_answered(
    platform: Platform, clips: Clips
) -> None:
    """Each request may need figures that another query brings; nobody waits for ever."""
    platform.start_api()
    slots = [platform.open_slot(len(clips.photo), f"{n}.jpg") for n in range(25)]
    for slot in slots:
        platform.put(slot, clips.photo)
    waiting = [slot["id"] for slot in slots]
    answers = platform.many(25, lambda http: http.post(f"/v1/media/{waiting.pop()}/complete"))
    assert Counter(a.status_code for a in answers) == {202: 25}


def test_more_requests_than_database_connections_are_all_answered(
    platform: Platform, clips: Clips
) -> None:
    """All of them hold a connection while they need figures that another query brings."""
    platform.start_api()
    media_id = platform.upload(clips.photo, "photo.jpg")
    answers: list[httpx.Response] = []
    with platform.holding("LOCK TABLE media IN ACCESS EXCLUSIVE MODE"):
        asking = threading.Thread(
            target=lambda: answers.extend(
                platform.many(25, lambda http: http.get(f"/v1/media/{media_id}"))
            )
        )
        asking.start()
        until(lambda: platform.waiting_for_locks() >= 10, seconds=10, why="no pool is full")
        time.sleep(2.1)  # the figures that the API remembers are old now
    asking.join(30)
    assert Counter(a.status_code for a in answers) == {200: 25}
    assert httpx.get(f"{platform.url}/readyz").status_code == 200


def test_a_create_that_is_repeated_with_its_key_is_answered_again(
    platform: Platform, clips: Clips
) -> None:
    platform.start_api()
    wanted = {"size": len(clips.photo), "filename": "photo.jpg"}
    key = {"Idempotency-Key": "order-17"}
    with _posted(platform, json.dumps(wanted), key):  # and nobody reads the answer
        until(lambda: platform.rows("SELECT 1 FROM media"), seconds=10, why="it was not created")

    again = platform.http.post("/v1/media", content=json.dumps(wanted), headers=_json(key))
    assert again.status_code == 201
    assert again.headers["idempotent-replayed"] == "true"
    third = platform.http.post("/v1/media", content=json.dumps(wanted), headers=_json(key))
    assert third.json() == again.json()
    assert platform.value("SELECT count(*) FROM media") == 1
    other = platform.http.post("/v1/media", json={"size": 5}, headers=key)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")

    # The address in the repeated answer is as good as the first.
    slot: Body = again.json()
    assert platform.put(slot, clips.photo).status_code == 200
    assert platform.complete(slot["id"]).status_code == 202


def _json(headers: dict[str, str]) -> dict[str, str]:
    return {"Content-Type": "application/json", **headers}


def _posted(platform: Platform, body: str, headers: dict[str, str]) -> socket.socket:
    """A request that is sent; its connection."""
    lines = [
        "POST /v1/media HTTP/1.1",
        f"Host: 127.0.0.1:{platform.port}",
        f"Authorization: Bearer {platform.key}",
        *(f"{name}: {value}" for name, value in _json(headers).items()),
        f"Content-Length: {len(body)}",
    ]
    client = socket.create_connection(("127.0.0.1", platform.port))
    client.sendall(("\r\n".join(lines) + "\r\n\r\n" + body).encode())
    return client


def test_twenty_repeats_at_once_make_one_media(platform: Platform, clips: Clips) -> None:
    platform.start_api()
    slots = platform.many(
        20,
        lambda http: http.post("/v1/media", json={"size": 9}, headers={"Idempotency-Key": "a"}),
    )
    assert Counter(a.status_code for a in slots) == {201: 20}
    assert len({a.json()["id"] for a in slots}) == 1
    assert Counter("idempotent-replayed" in a.headers for a in slots) == {True: 19, False: 1}

    forms = platform.many(
        20,
        lambda http: http.post(
            "/v1/media",
            files={"file": ("photo.jpg", clips.photo)},
            headers={"Idempotency-Key": "b"},
        ),
    )
    assert Counter(a.status_code for a in forms) == {202: 20}
    (media_id,) = {a.json()["id"] for a in forms}
    assert len(platform.files("uploads")) == 1, "a repeat left its bytes behind"
    assert len(platform.jobs(media_id)) == 1
    assert platform.value("SELECT count(*) FROM media") == 2


def test_a_slot_that_is_not_used_expires(make_platform: Make, clips: Clips) -> None:
    platform = make_platform(upload_ttl_seconds=10)
    platform.start_api()
    platform.start_worker("image=1,maintenance=1")
    unused = platform.open_slot(100, "unused.jpg")
    short = platform.open_slot(len(clips.photo), "short.jpg")
    assert platform.put(short, clips.photo).status_code == 200
    (stored,) = platform.files("uploads", short["id"])
    stored.chmod(0o644)
    os.truncate(stored, 10)
    forgotten = platform.open_slot(len(clips.photo), "forgotten.jpg")
    assert platform.put(forgotten, clips.photo).status_code == 200
    _expire_slots(platform)

    # Bytes that are there are accepted, although nobody said that they are complete.
    platform.wait_for_state(forgotten["id"], "ready")
    assert platform.complete(forgotten["id"]).status_code == 200
    for slot in (unused, short):
        platform.wait_for_state(slot["id"], "expired")
        late = platform.complete(slot["id"])
        assert (late.status_code, late.json()["code"]) == (410, "upload_expired")
        platform.assert_path_is_legal(slot["id"])
    assert platform.jobs(unused["id"]) == []
    until(lambda: not platform.files("uploads", short["id"]), seconds=5, why="its bytes are left")
    assert [p.name for p in platform.files("uploads")] == ["original"]
    platform.assert_nothing_left()


def _expire_slots(platform: Platform) -> None:
    platform.rows("UPDATE media SET upload_expires_at = now() - interval '1 minute'")


def test_an_api_killed_while_bytes_come_in_leaves_the_slot_open(
    platform: Platform, clips: Clips
) -> None:
    api = platform.start_api()
    slot = platform.open_slot(len(clips.photo), "photo.jpg")
    with _Trickle(platform, slot) as client:
        client.send(clips.photo[:5000])
        until(lambda: platform.files(".incoming"), seconds=5, why="nothing comes in")
        api.kill()
    platform.start_api()
    assert platform.complete(slot["id"]).json()["code"] == "source_missing"
    assert platform.put(slot, clips.photo).status_code == 200
    assert platform.complete(slot["id"]).status_code == 202

    # What the dead API left is an object to nobody; it goes by its age, which is tested elsewhere.
    (left,) = platform.files(".incoming")
    left.unlink()
    platform.start_worker()
    platform.wait_for_state(slot["id"], "ready")
    platform.assert_published_once(slot["id"])
    platform.assert_nothing_left()


def test_a_client_that_goes_away_leaves_nothing_half_received(
    platform: Platform, clips: Clips
) -> None:
    platform.start_api()
    slot = platform.open_slot(len(clips.photo), "photo.jpg")
    with _Trickle(platform, slot) as client:
        client.send(clips.photo[:5000])
        until(lambda: platform.files(".incoming"), seconds=5, why="nothing comes in")
    until(lambda: not platform.files(".incoming"), seconds=5, why="half a file is left")
    assert platform.put(slot, clips.photo).status_code == 200


def test_an_api_that_is_told_to_stop_lets_an_upload_end(platform: Platform, clips: Clips) -> None:
    api = platform.start_api()
    slot = platform.open_slot(len(clips.photo), "photo.jpg")
    with _Trickle(platform, slot) as client:
        client.send(clips.photo[:5000])
        until(lambda: platform.files(".incoming"), seconds=5, why="nothing comes in")
        api.send(signal.SIGTERM)
        client.send(clips.photo[5000:])
        assert client.status() == 200
    api.popen.wait(10)
    platform.start_api()
    assert platform.complete(slot["id"]).status_code == 202


class _Trickle:
    """A PUT whose bytes are sent piece by piece."""

    def __init__(self, platform: Platform, slot: Body) -> None:
        url = urlsplit(slot["upload"]["url"])
        headers = slot["upload"]["headers"]
        lines = [
            f"PUT {url.path}?{url.query} HTTP/1.1",
            f"Host: {url.netloc}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self._socket = socket.create_connection(("127.0.0.1", platform.port), timeout=20)
        self.send(("\r\n".join(lines) + "\r\n\r\n").encode())

    def __enter__(self) -> _Trickle:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def status(self) -> int:
        """The status of the answer."""
        answer = b""
        while b"\r\n" not in answer:
            part = self._socket.recv(4096)
            assert part, "the connection was closed without an answer"
            answer += part
        return int(answer.split()[1])


def test_bytes_that_come_after_the_deletion_do_not_stay(platform: Platform, clips: Clips) -> None:
    """A signed address outlives its media by minutes."""
    platform.start_api()
    platform.start_worker("image=1,maintenance=1")
    never_used = platform.open_slot(len(clips.photo), "a.jpg")
    used = platform.open_slot(len(clips.photo), "b.jpg")
    platform.put(used, clips.photo)
    platform.complete(used["id"])
    platform.wait_for_state(used["id"], "ready")
    for slot in (never_used, used):
        assert platform.http.delete(f"/v1/media/{slot['id']}").status_code == 202
    until(lambda: not platform.rows("SELECT 1 FROM erasures"), seconds=10, why="nothing is erased")
    assert platform.files("uploads") == []
    for slot in (never_used, used):
        assert platform.put(slot, clips.photo).status_code == 410
    until(lambda: not platform.files("uploads"), seconds=10, why="bytes stay after the deletion")


def test_bytes_that_come_after_the_slot_expired_do_not_stay(
    platform: Platform, clips: Clips
) -> None:
    """An upload that began in time may end after its slot was given up."""
    platform.start_api()
    platform.start_worker("image=1,maintenance=1")
    slot = platform.open_slot(len(clips.photo), "slow.jpg")
    with _Trickle(platform, slot) as client:
        client.send(clips.photo[:5000])
        until(lambda: platform.files(".incoming"), seconds=5, why="nothing comes in")
        _expire_slots(platform)
        platform.wait_for_state(slot["id"], "expired")
        until(lambda: not platform.rows("SELECT 1 FROM erasures"), seconds=10, why="not erased")
        client.send(clips.photo[5000:])
        assert client.status() == 410
    assert platform.media_row(slot["id"])["state"] == "expired"
    until(lambda: not platform.files("uploads"), seconds=10, why="bytes stay after the expiry")

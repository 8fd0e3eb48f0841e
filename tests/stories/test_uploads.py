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
import pytest
from tests.stories.clips import Clips
from tests.stories.conftest import Make
from tests.stories.harness import Body, Platform, media_uuid, until


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

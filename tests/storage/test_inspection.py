"""`mediamill storage doctor`: a store that checks, and one that checks nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.storage.google import google
from tests.storage.seaweed import Seaweed
from tests.storage.test_s3 import everything, new_bucket, opened_on

from mediamill.storage.s3 import Wire

if TYPE_CHECKING:
    from tests.storage.azurite import Azurite

pytestmark = pytest.mark.anyio


class Careless(BaseHTTPRequestHandler):
    """Keeps whatever comes, for whoever asks: no signature, condition or checksum is looked at."""

    objects: dict[str, bytes]

    def do_PUT(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.objects[self.path.partition("?")[0]] = self.rfile.read(length)
        self._answer(200, b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(204, b"")

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if "versioning" in query or "lifecycle" in query:
            self._answer(404, b"")
            return
        self._answer(200, self.objects.get(path, b"<ListBucketResult/>"))

    def do_HEAD(self) -> None:
        there = self.path.partition("?")[0] in self.objects
        self.send_response(200 if there else 404)
        self.send_header("Content-Length", "0")
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", "Sun, 29 Nov 2026 12:00:00 GMT")
        self.end_headers()

    def do_DELETE(self) -> None:
        self.objects.pop(self.path.partition("?")[0], None)
        self._answer(204, b"")

    def do_OPTIONS(self) -> None:
        self._answer(403, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def careless_server(handler: type[Careless]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Where one of these listens, and what it has."""
    objects: dict[str, bytes] = {}
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Handler", (handler,), {"objects": objects})
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", objects
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def careless() -> Iterator[tuple[str, dict[str, bytes]]]:
    with careless_server(Careless) as running:
        yield running


def doctor(tmp_path: Path, **settings: object) -> tuple[int, dict[str, str]]:
    """The exit code, and the mark of each line."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("MEDIAMILL_")}
    given = {"data_dir": tmp_path, **settings}
    env |= {f"MEDIAMILL_{k.upper()}": str(v) for k, v in given.items()}
    done = subprocess.run(
        [sys.executable, "-m", "mediamill", "storage", "doctor", "--origin", "https://shop.test"],
        env=env,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    marks = {line[4:31].strip(): line[2] for line in done.stdout.splitlines() if line[2:3] in "✓✗·"}
    assert marks, done.stderr
    return done.returncode, marks


async def test_a_store_that_checks_is_told_as_one(s3_server: Seaweed, tmp_path: Path) -> None:
    place = await new_bucket(s3_server)
    code, marks = doctor(tmp_path, **s3_server.settings(place.bucket))
    assert code == 0
    for name in ("reachable", "private by default", "exact length", "exact type", "write once",
                 "checksum", "POST policy", "ranges", "versions"):  # fmt: skip
        assert marks[name] == "✓", name
    assert marks["lifecycle"] == "·"


@pytest.mark.extra
@pytest.mark.timeout(240)
def test_azure_binds_neither_length_nor_type(azure_server: Azurite, tmp_path: Path) -> None:
    container = azure_server.new_container()
    settings = azure_server.settings(container)
    code, marks = doctor(tmp_path, **settings)
    assert code == 0
    for name in ("reachable", "private by default", "write once", "ranges", "lifecycle"):
        assert marks[name] == "✓", name
    for name in ("exact length", "exact type", "checksum", "POST policy", "CORS", "versions"):
        assert marks[name] == "·", name
    assert azure_server.everything(container) == []
    properties = (
        "<StorageServiceProperties><Cors><CorsRule><AllowedOrigins>https://shop.test</AllowedOrigins>"
        "<AllowedMethods>GET,PUT</AllowedMethods><AllowedHeaders>*</AllowedHeaders>"
        "<ExposedHeaders>ETag</ExposedHeaders><MaxAgeInSeconds>60</MaxAgeInSeconds></CorsRule></Cors>"
        "<DeleteRetentionPolicy><Enabled>true</Enabled><Days>5</Days></DeleteRetentionPolicy>"
        "</StorageServiceProperties>"
    )
    answer = azure_server.ask("PUT", "?restype=service&comp=properties", content=properties)
    assert answer.status_code == 202, answer.text
    code, marks = doctor(tmp_path, **settings)
    assert (code, marks["CORS"], marks["versions"]) == (1, "✓", "✗")
    answer = azure_server.ask(
        "PUT",
        "?restype=service&comp=properties",
        content=properties.replace("<Enabled>true", "<Enabled>false").replace("<Days>5</Days>", ""),
    )
    assert answer.status_code == 202, answer.text


def test_a_bucket_of_google_is_told_as_what_it_is(tmp_path: Path) -> None:
    with google(tmp_path) as played:
        bucket = played.new_bucket()
        code, marks = doctor(tmp_path, **played.settings(bucket))
        assert code == 0
        for name in ("reachable", "private by default", "exact length", "exact type", "write once",
                     "POST policy", "ranges", "versions"):  # fmt: skip
            assert marks[name] == "✓", name
        for name in ("checksum", "CORS", "lifecycle"):
            assert marks[name] == "·", name
        assert played.everything(bucket) == []
        played.cors = "https://shop.test"
        played.described = {
            "softDeletePolicy": {"retentionDurationSeconds": "604800"},
            "lifecycle": {
                "rule": [{"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {}}]
            },
        }
        code, marks = doctor(tmp_path, **played.settings(bucket))
        assert code == 1
        assert [marks[name] for name in ("CORS", "lifecycle", "versions")] == ["✓", "✓", "✗"]


async def test_a_rule_for_browsers_and_one_for_unfinished_parts_are_seen(
    s3_server: Seaweed, tmp_path: Path
) -> None:
    """The rules as the doctor prints them."""
    place = await new_bucket(s3_server)
    wire = Wire(place)
    cors = (
        "<CORSConfiguration><CORSRule><AllowedOrigin>https://shop.test</AllowedOrigin>"
        "<AllowedMethod>GET</AllowedMethod><AllowedMethod>PUT</AllowedMethod>"
        "<AllowedHeader>content-type</AllowedHeader><AllowedHeader>if-none-match</AllowedHeader>"
        "<ExposeHeader>ETag</ExposeHeader></CORSRule></CORSConfiguration>"
    )
    lifecycle = (
        "<LifecycleConfiguration><Rule><ID>parts</ID><Status>Enabled</Status><Filter/>"
        "<AbortIncompleteMultipartUpload><DaysAfterInitiation>8</DaysAfterInitiation>"
        "</AbortIncompleteMultipartUpload></Rule></LifecycleConfiguration>"
    )
    await wire.send("PUT", "", query={"cors": ""}, content=cors.encode())
    await wire.send("PUT", "", query={"lifecycle": ""}, content=lifecycle.encode())
    await wire.close()
    code, marks = doctor(tmp_path, **s3_server.settings(place.bucket))
    assert code == 0
    assert (marks["CORS"], marks["lifecycle"]) == ("✓", "✓")


@pytest.mark.parametrize("versioned", [False, True])
async def test_the_doctor_leaves_nothing_behind(
    s3_server: Seaweed, tmp_path: Path, versioned: bool
) -> None:
    async with opened_on(s3_server, versioned=versioned) as store:
        doctor(tmp_path, **s3_server.settings(store.wire.place.bucket))
        assert await everything(store) == ["mediamill-storage"]


def test_a_store_that_checks_nothing_is_found_out(
    careless: tuple[str, dict[str, bytes]], tmp_path: Path
) -> None:
    endpoint, objects = careless
    code, marks = doctor(
        tmp_path,
        storage="s3",
        s3_bucket="b",
        s3_endpoint=endpoint,
        s3_access_key_id="a",
        s3_secret_access_key="b",
    )
    assert code == 1
    assert marks["reachable"] == "✓"
    for name in ("private by default", "exact length", "exact type"):
        assert marks[name] == "✗", name
    for name in ("write once", "checksum", "POST policy", "ranges", "CORS", "lifecycle"):
        assert marks[name] == "·", name
    assert objects == {}, "it left something behind"


def test_a_local_disk_has_nothing_to_be_found_out(tmp_path: Path) -> None:
    code, marks = doctor(tmp_path)
    assert (code, marks) == (0, {"local disk": "✓"})


def test_a_bucket_that_is_not_there_is_a_finding(s3_server: Seaweed, tmp_path: Path) -> None:
    code, marks = doctor(tmp_path, **s3_server.settings("no-such-bucket"))
    assert (code, marks) == (1, {"reachable": "✗"})

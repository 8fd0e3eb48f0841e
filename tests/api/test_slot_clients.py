"""Slots as plain clients fill them: curl from a shell, and boto3, whose ideas of signatures are the
measure for ours."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.api.conftest import Body, Served, serving
from tests.storage.seaweed import ACCESS_KEY, SECRET_KEY, Seaweed, bucket_name

from mediamill import ids
from mediamill.storage import s3

pytestmark = pytest.mark.anyio

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)


@dataclass(slots=True)
class Door:
    """A server, and where its files go: `bucket` is None on a local disk."""

    served: Served
    folder: Path
    bucket: str | None

    async def slot(self, **wanted: Any) -> Body:
        given = {"size": len(PNG), "content_type": "image/jpeg", "filename": "a.jpg", **wanted}
        async with self.served.client() as client:
            answer = await client.post("/v1/media", json=given)
        assert answer.status_code == 201, answer.text
        body: Body = answer.json()
        return body

    async def complete(self, slot: Body) -> Body:
        async with self.served.client() as client:
            answer = await client.post(f"/v1/media/{slot['id']}/complete")
        assert answer.status_code == 202, answer.text
        body: Body = answer.json()
        return body

    async def curl(self, *args: str, data: bytes = PNG) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body; the file to send is `file` in the folder."""
        (self.folder / "file").write_bytes(data)
        command = ["curl", "-sS", "--max-time", "20", "-D", "headers", "-o", "body", *args]
        # The configuration of whoever runs this test is not ours.
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder)}
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=self.folder, env=environment, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        blocks = (self.folder / "headers").read_text().strip().split("\n\n")
        first, *lines = blocks[-1].splitlines()
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        body = self.folder / "body"
        return int(first.split()[1]), headers, body.read_bytes() if body.exists() else b""


@pytest.fixture(params=["local", "s3"])
async def door(
    request: pytest.FixtureRequest, shared_database: str, tmp_path: Path
) -> AsyncIterator[Door]:
    if request.param == "local":
        async with serving(shared_database, tmp_path, own_address=True) as served:
            yield Door(served, tmp_path, None)
        return
    server: Seaweed = request.getfixturevalue("s3_server")
    # Clients know the bucket's server by another name than our processes.
    public = server.endpoint.replace("127.0.0.1", "localhost")
    given = server.settings(bucket_name(), s3_public_endpoint=public)
    async with serving(shared_database, tmp_path, **given) as served:
        place = s3.place(served.api.services.settings)
        wire = s3.Wire(place)
        await wire.send("PUT", "")
        await wire.close()
        store = await s3.open_s3(place, ids.new())
        served.api.services.use(store)
        yield Door(served, tmp_path, place.bucket)
        await store.close()


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")


def told(slot: Body, **changes: str | None) -> list[str]:
    """The headers of a slot as arguments, some of them changed or left out; curl itself says the
    length, and a type where none is given unless it is told not to."""
    headers = {**slot["upload"]["headers"], **changes}
    headers.pop("Content-Length", None)
    return [part for k, v in headers.items() for part in ("-H", f"{k}: {v}" if v else f"{k}:")]


@needs_curl
async def test_curl_sends_what_it_was_told_and_nothing_else_is_taken(door: Door) -> None:
    slot = await door.slot()
    upload = slot["upload"]
    assert {"method", "url", "headers", "expires_at"} <= set(upload)
    if door.bucket is not None:
        assert urlsplit(upload["url"]).hostname == "localhost"
    for wrong in (
        told(slot, **{"Content-Type": "text/html"}),
        told(slot, **{"Content-Type": None}),
    ):
        status, _, _ = await door.curl("-T", "file", *wrong, upload["url"])
        assert status == 403
    status, _, _ = await door.curl("-T", "file", *told(slot), upload["url"], data=PNG + b"x")
    assert status == 403
    status, headers, _ = await door.curl("-T", "file", *told(slot), upload["url"])
    assert status == 200
    assert headers["etag"]
    status, _, _ = await door.curl("-T", "file", *told(slot), upload["url"])
    assert status == 412
    body = await door.complete(slot)
    assert body["state"] == "queued"
    # Raw uploads are for nobody to read, with the address or without its signature.
    for address in (upload["url"], upload["url"].partition("?")[0]):
        status, _, content = await door.curl(address)
        assert status in (403, 404, 405)
        assert PNG not in content


@needs_curl
async def test_curl_fills_a_form_where_there_are_forms(door: Door) -> None:
    if door.bucket is None:
        async with door.served.client() as client:
            answer = await client.post("/v1/media", json={"max_size": 100})
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/max_size")
        return
    async with door.served.client() as client:
        answer = await client.post(
            "/v1/media", json={"max_size": len(PNG), "content_type": "image/png"}
        )
    slot = answer.json()
    fields = [part for k, v in slot["upload"]["fields"].items() for part in ("-F", f"{k}={v}")]
    status, _, _ = await door.curl(
        *fields, "-F", "file=@file", slot["upload"]["url"], data=PNG + b"x"
    )
    assert 400 <= status < 500
    status, _, _ = await door.curl(*fields, "-F", "file=@file", slot["upload"]["url"])
    assert status == 204
    assert (await door.complete(slot))["size"] == len(PNG)


@needs_curl
async def test_curl_uploads_in_one_request_and_by_parts(door: Door) -> None:
    key = ["-H", f"Authorization: Bearer {door.served.api.token}"]
    url = door.served.url
    status, headers, body = await door.curl(
        *key, "-F", "file=@file;filename=a.png", f"{url}/v1/media"
    )
    assert (status, headers["location"]) == (202, f"/v1/media/{json.loads(body)['id']}")

    content = PNG + bytes(6 << 20)
    wanted = json.dumps({"size": len(content), "content_type": "image/png"})
    json_type = ["-H", "Content-Type: application/json"]
    _, _, body = await door.curl(*key, *json_type, "-d", wanted, f"{url}/v1/uploads/multipart")
    links = json.loads(body)["links"]
    step = json.loads(body)["part_bytes"]
    _, _, body = await door.curl(
        *key, *json_type, "-d", '{"numbers": [1, 2]}', f"{url}{links['parts']}"
    )
    for part in json.loads(body)["parts"]:
        offset = (part["number"] - 1) * step
        data = content[offset : offset + step]
        status, headers, _ = await door.curl("-T", "file", part["url"], data=data)
        assert status == 200
        assert headers["etag"]
    status, _, body = await door.curl(*key, *json_type, "-d", "{}", f"{url}{links['complete']}")
    assert status == 202
    assert json.loads(body)["completed"] is True


@pytest.mark.extra
@pytest.mark.timeout(120)
async def test_boto3_signs_the_same_and_sees_what_was_stored(door: Door) -> None:
    """Its own signature for the same request binds the same headers; its HTTP stack fills our
    slot; its client finds the object with the announced type and the pinned ETag."""
    boto3 = pytest.importorskip("boto3")
    from botocore.awsrequest import AWSRequest
    from botocore.config import Config
    from botocore.httpsession import URLLib3Session

    digest = hashlib.sha256(PNG).hexdigest()
    slot = await door.slot(sha256=digest)
    upload = slot["upload"]

    def send(data: bytes) -> int:
        request = AWSRequest("PUT", upload["url"], headers=upload["headers"], data=data)
        return int(URLLib3Session().send(request.prepare()).status_code)

    assert await asyncio.to_thread(send, PNG[::-1]) in ((400,) if door.bucket else (200,))
    if door.bucket is None:  # a local disk leaves the checksum to the worker
        return
    assert await asyncio.to_thread(send, PNG) == 200
    await door.complete(slot)
    client = boto3.client(
        "s3",
        endpoint_url=door.served.api.services.settings.s3_public_endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
    )
    key = await door.served.api.pool.fetchval(
        "SELECT upload_key FROM media WHERE id = $1", ids.decode(ids.MEDIA, slot["id"])
    )
    found = await asyncio.to_thread(client.head_object, Bucket=door.bucket, Key=key)
    version = await door.served.api.pool.fetchval(
        "SELECT object_version FROM media WHERE upload_key = $1", key
    )
    assert (found["ContentType"], found["ContentLength"]) == ("image/jpeg", len(PNG))
    assert found["ETag"] == version
    theirs = client.generate_presigned_url(
        "put_object",
        Params={
            "Bucket": door.bucket,
            "Key": key,
            "ContentType": "image/jpeg",
            "ContentLength": len(PNG),
            "IfNoneMatch": "*",
            "ChecksumSHA256": base64.b64encode(bytes.fromhex(digest)).decode(),
        },
        ExpiresIn=600,
    )
    asked, signed = [parse_qs(urlsplit(url).query) for url in (theirs, upload["url"])]
    assert urlsplit(theirs).path == urlsplit(upload["url"]).path
    bound = [set(query["X-Amz-SignedHeaders"][0].split(";")) for query in (asked, signed)]
    in_query = {name for name in asked if not name.startswith("X-Amz-")}
    assert bound[1] >= {"content-length", "content-type", "host", "if-none-match"}
    assert bound[0] <= bound[1] | {"x-amz-sdk-checksum-algorithm"}
    assert in_query <= {"x-amz-checksum-sha256", "x-amz-sdk-checksum-algorithm", "x-id"}
    form = client.generate_presigned_post(
        door.bucket,
        "uploads/t/form",
        Fields={"Content-Type": "image/png"},
        Conditions=[{"Content-Type": "image/png"}, ["content-length-range", 1, 9]],
    )
    store = door.served.api.services.storage
    assert isinstance(store, s3.S3Storage)
    ours = await store.sign_form(
        "uploads/t/form",
        content_type="image/png",
        most=9,
        expires_at=datetime.now(UTC) + timedelta(hours=1),
    )
    assert ours is not None
    assert form["fields"].keys() == ours.fields.keys()
    policies = [
        json.loads(base64.b64decode(fields["policy"]))["conditions"]
        for fields in (form["fields"], ours.fields)
    ]
    wanted, given = [
        {json.dumps(one) for one in policy if "x-amz-date" not in one} for policy in policies
    ]
    assert wanted == given

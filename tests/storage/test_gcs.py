"""A bucket of Google Cloud Storage: the common contract, and what its signatures bind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx2 as httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from google.cloud.storage import Client
from google.oauth2 import service_account
from tests.storage.conformance import BIG, Conformance, content, part, write
from tests.storage.google import Google, google

from mediamill import ids
from mediamill.failures import Code, Failure
from mediamill.storage import AlreadyStored, StorageRefused
from mediamill.storage.bucket import Refusal
from mediamill.storage.gcs import GcsStorage, Place, Wire, open_gcs

pytestmark = pytest.mark.anyio

INSTALLATION = ids.new()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Google]:
    with google(tmp_path_factory.mktemp("google")) as running:
        yield running


def place(played: Google) -> Place:
    return Place(played.new_bucket(), played.credentials_file, played.endpoint)


@pytest.fixture
async def store(played: Google) -> AsyncIterator[GcsStorage]:
    """The storage in a bucket of its own, which must be empty afterwards."""
    opened = await open_gcs(place(played), INSTALLATION)
    try:
        yield opened
        for area in ("uploads", "stage", "media"):
            await opened.delete(area)
        assert played.everything(opened.wire.place.bucket) == ["mediamill-storage"]
    finally:
        await opened.close()


class TestConformance(Conformance):
    rounds = 2

    @pytest.fixture
    def store(self, store: GcsStorage) -> GcsStorage:
        return store


def soon() -> datetime:
    return datetime.now(UTC) + timedelta(minutes=5)


async def test_a_slot_binds_key_type_length_and_is_written_once(store: GcsStorage) -> None:
    signed = store.sign_put("uploads/t/a", content_type="image/png", size=5, expires_at=soon())
    headers = {k: v for k, v in signed.headers.items() if k != "Content-Length"}

    def put(
        url: str = signed.url, body: bytes = b"hello", changes: dict[str, str | None] | None = None
    ) -> int:
        given = {k: v for k, v in {**headers, **(changes or {})}.items() if v is not None}
        return httpx.put(url, headers=given, content=body).status_code

    assert put(signed.url.replace("uploads/t/a", "uploads/t/b")) == 403
    assert put(signed.url.partition("?")[0]) == 403
    assert put(changes={"Content-Type": "text/html"}) == 403
    assert put(changes={"Content-Type": None}) == 403
    assert put(changes={"x-goog-if-generation-match": None}) == 403
    assert put(changes={"x-goog-content-length-range": "1,100"}) == 403
    for body in (b"hell", b"hello!", b""):
        assert put(body=body) == 400
    assert await store.stat("uploads/t/a") is None
    assert put() == 200
    assert put(body=b"other") == 412
    stored = await store.stat("uploads/t/a")
    assert stored is not None
    assert await content(store, "uploads/t/a", stored) == b"hello"
    assert httpx.get(signed.url).status_code == 403
    assert httpx.delete(signed.url).status_code == 403
    late = store.sign_put("uploads/t/c", content_type="image/png", size=5, expires_at=soon())
    aged = late.url.replace(datetime.now(UTC).strftime("X-Goog-Date=%Y%m%d"), "X-Goog-Date=2020")
    assert put(aged) == 403


async def test_signatures_are_those_of_the_vendor_s_library(
    store: GcsStorage, played: Google
) -> None:
    """The same request signed by plain calls of the library: every parameter, but for the second
    in which it was signed."""
    credentials = service_account.Credentials.from_service_account_file(  # type: ignore[no-untyped-call]
        str(played.credentials_file)
    )
    client = Client(project="x", credentials=credentials)
    blob = client.bucket(store.wire.place.bucket).blob("uploads/t/ä b")
    headers = {"Content-Type": "image/png", "x-goog-if-generation-match": "0"}
    expires_at = soon()
    theirs = blob.generate_signed_url(
        expires_at, played.endpoint, "PUT", headers=dict(headers), version="v4"
    )
    ours = store.wire.sign("PUT", "uploads/t/ä b", expires_at=expires_at, headers=headers).url
    first, second = urlsplit(theirs), urlsplit(ours)
    assert (first.netloc, first.path) == (second.netloc, second.path)
    asked, signed = parse_qs(first.query), parse_qs(second.query)
    assert asked.keys() == signed.keys()
    for name in ("X-Goog-Algorithm", "X-Goog-Credential", "X-Goog-SignedHeaders"):
        assert asked[name] == signed[name]
    assert signed["X-Goog-SignedHeaders"] == ["content-type;host;x-goog-if-generation-match"]


async def test_nothing_is_read_without_a_signature(store: GcsStorage, tmp_path: Path) -> None:
    await store.put("uploads/t/a", write(tmp_path, b"content"))
    for key in ("uploads/t/a", ""):
        assert httpx.get(store.wire.address(key, public=True)).status_code == 403
    signed = store.sign_get(
        "uploads/t/a", expires_at=soon(), content_type="image/avif", filename="a.avif"
    )
    answer = httpx.get(signed.url, headers={"Range": "bytes=1-2"})
    assert (answer.status_code, answer.content) == (206, b"on")
    assert answer.headers["content-type"] == "image/avif"
    assert answer.headers["content-disposition"].startswith('inline; filename="a.avif"')
    assert httpx.get(signed.url.replace("image%2Favif", "text%2Fhtml")).status_code == 403


async def test_clients_store_parts_by_signed_requests(store: GcsStorage) -> None:
    key = "uploads/t/a"
    upload = await store.begin_parts(key, content_type="video/mp4")
    contents = [b"a" * BIG, b"end"]
    for number in (2, 1, 1):  # in any order, and again
        signed = store.sign_part(
            key, upload, number, offset=0, size=len(contents[number - 1]), most=BIG,
            expires_at=soon(),
        )  # fmt: skip
        answer = httpx.put(signed.url, content=contents[number - 1])
        assert answer.status_code == 200
        assert answer.headers["etag"]
    parts = await store.list_parts(key, upload)
    stored = await store.complete_parts(key, upload, parts, size=BIG + 3)
    assert await content(store, key, stored) == b"".join(contents)
    assert httpx.get(store.sign_get(key, expires_at=soon()).url).headers["content-type"] == (
        "video/mp4"
    )


async def test_a_completion_is_finished_wherever_it_was_cut_off(
    store: GcsStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between joining and copying, and between copying and tidying up."""
    for cut in ("PUT", "DELETE"):
        key = f"uploads/t/{cut.lower()}"
        upload = await store.begin_parts(key, content_type="video/mp4")
        only = await part(store, key, upload, 1, [b"only"])
        send = Wire.send

        async def cut_off(self: Wire, method: str, *given: object, **more: object) -> object:
            if method == cut:  # noqa: B023
                raise Failure(Code.STORAGE_UNAVAILABLE)
            return await send(self, method, *given, **more)  # type: ignore[arg-type]  # noqa: B023

        monkeypatch.setattr(Wire, "send", cut_off)
        with pytest.raises(Failure):
            await store.complete_parts(key, upload, [only], size=4)
        monkeypatch.undo()
        stored = await store.complete_parts(key, upload, [only], size=4)
        assert await content(store, key, stored) == b"only"
        assert await store.complete_parts(key, upload, [only], size=4) == stored


async def test_what_was_joined_for_nobody_is_swept(store: GcsStorage, played: Google) -> None:
    key = "uploads/t/a"
    upload = await store.begin_parts(key, content_type="video/mp4")
    only = await part(store, key, upload, 1, [b"only"])
    nonce, _, name = upload.partition("~")
    body = f"<Part><PartNumber>1</PartNumber><ETag>{only.etag}</ETag></Part>".encode()
    await store.wire.send("POST", f"parts/{key}/{nonce}", query={"uploadId": name}, content=body)
    now = datetime.now(UTC).timestamp()
    assert await store.sweep(older_than_seconds=3600, now=now) == 0
    assert await store.sweep(older_than_seconds=3600, now=now + 4000) == 1
    assert played.everything(store.wire.place.bucket) == ["mediamill-storage"]


async def test_two_that_join_parts_under_one_key_do_not_mix(store: GcsStorage) -> None:
    key = "uploads/t/a"
    one, two = [await store.begin_parts(key, content_type="video/mp4") for _ in range(2)]
    first = await part(store, key, one, 1, [b"first"])
    later = await part(store, key, two, 1, [b"later"])
    there = await store.complete_parts(key, one, [first], size=5)
    with pytest.raises(AlreadyStored):
        await store.complete_parts(key, two, [later], size=5)
    assert await store.stat(key) == there
    await store.abort_parts(key, two)


async def test_a_bucket_that_cannot_be_used_says_why(
    played: Google, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = place(played)
    await (await open_gcs(made, INSTALLATION)).close()
    other = Google(tmp_path, played.port)
    other.write_account(rsa.generate_private_key(public_exponent=65537, key_size=2048))
    (tmp_path / "user.json").write_text('{"type": "authorized_user", "client_id": "a", '
                                        '"client_secret": "b", "refresh_token": "c"}')  # fmt: skip
    for changed, said in (
        (replace(made, bucket="none"), "There is no such bucket"),
        (replace(made, credentials_file=other.credentials_file), "The secret key is wrong"),
        (replace(made, credentials_file=tmp_path / "none"), "There are no credentials"),
    ):
        with pytest.raises(StorageRefused, match=said):
            await open_gcs(changed, INSTALLATION)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "user.json"))
    with pytest.raises(StorageRefused, match="cannot sign"):
        await open_gcs(replace(made, credentials_file=None), INSTALLATION)
    with pytest.raises(StorageRefused, match="belongs to installation"):
        await open_gcs(made, ids.new())
    with pytest.raises(StorageRefused, match="lacks Mediamill's marker"):
        await open_gcs(place(played), INSTALLATION, may_be_new=False)


async def test_the_player_is_as_strict_as_these_tests_need(store: GcsStorage) -> None:
    """What the real one refuses and a careless emulator lets through."""
    upload = await store.begin_parts("uploads/t/a", content_type="video/mp4")
    only = await part(store, "uploads/t/a", upload, 1, [b"only"])
    nonce, _, name = upload.partition("~")
    body = f"<Part><PartNumber>1</PartNumber><ETag>{only.etag}</ETag></Part>".encode()
    with pytest.raises(Refusal, match="NotImplemented"):
        await store.wire.send(
            "POST", f"parts/uploads/t/a/{nonce}", query={"uploadId": name},
            headers={"x-goog-if-generation-match": "0"}, content=body,
        )  # fmt: skip
    await store.abort_parts("uploads/t/a", upload)

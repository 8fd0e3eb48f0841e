"""Every dialect of bucket events becomes one form, and nothing else does."""

from __future__ import annotations

import base64
import json
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediamill.storage_events import Handshake, Hint, Unreadable, read

NAME = "uploads/a b+c é %2F.png"


def s3(key: str, name: str = "ObjectCreated:Put", source: str = "aws:s3", **more: Any) -> Any:
    return {
        "eventVersion": "2.1",
        "eventSource": source,
        "eventName": name,
        "eventTime": "2026-01-02T03:04:05.678Z",
        "s3": {
            "bucket": {"name": "media"},
            "object": {"key": key, "size": 1000, "eTag": "d41d8", "sequencer": "0055AE", **more},
        },
    }


def records(*found: Any) -> Any:
    return {"Records": list(found)}


def sns(message: Any) -> Any:
    return {"Type": "Notification", "MessageId": "1", "Message": json.dumps(message)}


def eventbridge(key: str, kind: str = "Object Created") -> Any:
    thing = {"key": key, "size": 1000, "etag": "d41d8", "sequencer": "0055AE"}
    return {
        "version": "0",
        "id": "e1",
        "detail-type": kind,
        "source": "aws.s3",
        "time": "2026-01-02T03:04:05Z",
        "detail": {"version": "0", "bucket": {"name": "media"}, "object": thing},
    }


def seaweedfs(path: str, kind: str = "create", **entry: Any) -> Any:
    attributes = {"file_size": 1000, "mtime": 1}
    return {
        "event_type": kind,
        "key": path,
        "message": {"new_entry": {"name": "x", "attributes": attributes, **entry}},
    }


def pubsub(key: str, kind: str = "OBJECT_FINALIZE") -> Any:
    data = base64.b64encode(json.dumps({"size": "1000", "etag": "d41d8"}).encode()).decode()
    attributes = {
        "eventType": kind,
        "bucketId": "media",
        "objectId": key,
        "objectGeneration": "17",
        "payloadFormat": "JSON_API_V1",
    }
    return {"message": {"attributes": attributes, "data": data, "messageId": "9"}}


def event_grid(key: str, kind: str = "Microsoft.Storage.BlobCreated") -> Any:
    return {
        "id": "g1",
        "subject": "/blobServices/default/containers/media/blobs/whatever",
        "eventType": kind,
        "eventTime": "2026-01-02T03:04:05Z",
        "data": {
            "api": "PutBlob",
            "url": f"https://account.blob.core.test/media/{quote(key)}",
            "eTag": "d41d8",
            "contentLength": 1000,
            "sequencer": "0055AE",
        },
    }


def cloud_event(key: str) -> Any:
    return {
        "specversion": "1.0",
        "type": "Microsoft.Storage.BlobCreated",
        "id": "c1",
        "time": "2026-01-02T03:04:05Z",
        "data": event_grid(key)["data"],
    }


FORMS = {
    "s3": records(s3(quote_plus(NAME, safe="/"))),
    "minio": {
        "EventName": "s3:ObjectCreated:Put",
        "Key": f"media/{NAME}",
        "Records": [s3(quote_plus(NAME), "s3:ObjectCreated:Put", "minio:s3")],
    },
    "ceph": records(s3(NAME, source="ceph:s3")),
    "sns": sns(records(s3(quote_plus(NAME)))),
    "eventbridge": eventbridge(NAME),
    "seaweedfs": seaweedfs(f"/buckets/media/{NAME}"),
    "gcs": pubsub(NAME),
    "azure": [event_grid(NAME)],
    "azure as CloudEvent": cloud_event(NAME),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_hard_name_comes_through_every_form(form: str) -> None:
    (hint,) = read(json.dumps(FORMS[form]).encode())
    assert isinstance(hint, Hint)
    assert (hint.bucket, hint.key, hint.created) == ("media", NAME, True)
    assert hint.size == 1000
    assert hint.provider == {"sns": "s3", "azure as CloudEvent": "azure"}.get(form, form)


@pytest.mark.parametrize(
    "key",
    ["uploads/a.jpg", "uploads/red flower.jpg", "uploads/a+b.jpg", "uploads/100%25.jpg",
     "uploads/café/日本.png", "uploads/a&b=c.jpg", "uploads/x%2Fy.jpg"],
)  # fmt: skip
@pytest.mark.parametrize("slash", ["/", ""], ids=["aws", "minio"])
def test_keys_are_decoded_exactly_once(key: str, slash: str) -> None:
    """event-01: form encoding with a slash kept or encoded; a key that holds %2F stays right."""
    record = s3(quote_plus(key, safe=slash), "s3:ObjectCreated:Put", "minio:s3")
    (hint,) = read(json.dumps(records(record)).encode())
    assert isinstance(hint, Hint)
    assert hint.key == key


@pytest.mark.parametrize(
    "body",
    [
        {"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "media"},
        sns({"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "media"}),
        {"Type": "UnsubscribeConfirmation"},
        records(),
        [],
        records(s3("a", "ObjectTagging:Put"), s3("a", "s3:ObjectAccessed:Get")),
        eventbridge("a", "Object Tags Added"),
        seaweedfs("/buckets/media/dir", is_directory=True),
        seaweedfs("/etc/iam/identity.json"),
        seaweedfs("/buckets/media"),
        pubsub("a", "OBJECT_METADATA_UPDATE"),
        [event_grid("a", "Microsoft.Storage.BlobTierChanged")],
    ],
    ids=str,
)
def test_what_is_no_news_of_an_object_is_no_hint(body: Any) -> None:
    assert read(json.dumps(body).encode()) == []


def test_deletions_and_several_records_keep_their_order() -> None:
    body = records(
        s3("a", size=0, versionId="null"),
        s3("b", "ObjectRemoved:DeleteMarkerCreated"),
        s3("c", "ObjectCreated:CompleteMultipartUpload", unknown={"new": "field"}),
    )
    found = [hint for hint in read(json.dumps(body).encode()) if isinstance(hint, Hint)]
    assert [(hint.key, hint.created) for hint in found] == [("a", True), ("b", False), ("c", True)]
    assert (found[0].size, found[0].version) == (0, "null")


def test_versions_of_the_form_that_we_know_are_taken() -> None:
    for version, known in (("2.0", True), ("2.9", True), ("3.0", False)):
        body = json.dumps(records({**s3("a"), "eventVersion": version})).encode()
        if known:
            assert len(read(body)) == 1
        else:
            with pytest.raises(Unreadable):
                read(body)


def test_handshakes_are_told_apart() -> None:
    grid = {
        "eventType": "Microsoft.EventGrid.SubscriptionValidationEvent",
        "data": {"validationCode": "512d38b6", "validationUrl": "https://x.test"},
    }
    assert read(json.dumps([grid]).encode()) == [
        Handshake("azure", {"validationResponse": "512d38b6"})
    ]
    confirm = {"Type": "SubscriptionConfirmation", "SubscribeURL": "https://sns.test/?Token=1"}
    assert read(json.dumps(confirm).encode()) == [Handshake("sns", {}, "https://sns.test/?Token=1")]


@pytest.mark.parametrize(
    "body",
    [b"", b"x", b"[", b"null", b"{}", b"7", b'"Records"', b'{"Records": 7}', b'{"Records": [7]}',
     b'{"Records": [{}]}', b"\xff\xfe", b"[" * 100_000, b'{"message": {"attributes": {}}}',
     json.dumps(records(*[s3("a")] * 1001)).encode(),
     json.dumps(sns(sns(sns(sns(records(s3("a"))))))).encode()],
    ids=lambda body: ascii(body)[:30],
)  # fmt: skip
def test_what_nobody_writes_is_unreadable(body: bytes) -> None:
    with pytest.raises(Unreadable):
        read(body)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["Records", "s3", "bucket", "object", "key", "name", "message", "Type",
                         "attributes", "eventType", "data", "url", "Message", "eventName"]),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(anything)
def test_no_body_does_more_than_be_unreadable(given_body: Any) -> None:
    try:
        found = read(json.dumps(given_body).encode())
    except Unreadable:
        return
    assert all(isinstance(each, Hint | Handshake) for each in found)

"""What buckets say about their objects, in every dialect, as one form.

An event is a hint and no more: it may be late, doubled, out of order or forged. It leads to the
same guarded acceptance as `complete`, which looks at the object itself; so any number of them makes
one job.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, unquote_plus, urlsplit
from uuid import UUID

from mediamill import db, storage, uploads
from mediamill.config import Settings
from mediamill.failures import Refused
from mediamill.storage import Storage, checked_key

MOST_RECORDS: Final = 1000
_DEPTH: Final = 3  # an envelope in an envelope, and no further


class Unreadable(Exception):
    """The body is not one that any known sender writes."""


@dataclass(frozen=True, slots=True)
class Hint:
    """Something may have happened to an object. Only provider, bucket, key and kind are always
    known."""

    provider: str
    bucket: str
    key: str
    created: bool
    size: int | None = None
    etag: str | None = None
    version: str | None = None
    sequencer: str | None = None
    event_time: str | None = None
    delivery_id: str | None = None


@dataclass(frozen=True, slots=True)
class Handshake:
    """The sender wants to be sure of us first. `answer` is the body that it wants to see."""

    provider: str
    answer: dict[str, str]
    confirm_url: str | None = None


PROVIDERS: Final = (
    "s3", "minio", "ceph", "sns", "eventbridge", "seaweedfs", "gcs", "azure",
)  # fmt: skip
OUTCOMES: Final = ("accepted", "known", "foreign", "ignored", "refused")


def read(body: bytes) -> list[Hint | Handshake]:
    """Every hint in a body, whoever sent it. Raises Unreadable."""
    try:
        found = list(_read(_loaded(body), depth=0))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Unreadable(f"{type(error).__name__} in a known form") from None
    if len(found) > MOST_RECORDS:
        raise Unreadable(f"more than {MOST_RECORDS} records")
    return found


def _loaded(body: bytes | str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Unreadable("not JSON") from None


def _read(given: Any, *, depth: int) -> Iterator[Hint | Handshake]:
    if depth > _DEPTH:
        raise Unreadable("envelopes in envelopes")
    match given:
        case list():  # Event Grid, and several EventBridge or CloudEvents in one request
            for each in given:
                yield from _read(each, depth=depth + 1)
        case {"Records": list(records)}:
            for record in records:
                yield from _s3_record(record)
        case {"Event": "s3:TestEvent"}:
            return
        # Only the outermost of SNS: that one's signature is checked by whoever takes it in.
        case {"Type": "Notification", "Message": str(message)} if depth == 0:
            yield from _read(_loaded(message), depth=depth + 1)
        case {"Type": "SubscriptionConfirmation", "SubscribeURL": str(url)} if depth == 0:
            yield Handshake("sns", {}, url)
        case {"Type": "UnsubscribeConfirmation"}:
            return
        case {"source": "aws.s3", "detail-type": str(kind), "detail": dict(detail)}:
            yield from _eventbridge(given, kind, detail)
        case {"event_type": str(kind), "key": str(path)}:
            yield from _seaweedfs(given, kind, path)
        case {"message": {"attributes": dict(attributes)} as message}:
            yield from _pubsub(message, attributes)
        case {"eventType": "Microsoft.EventGrid.SubscriptionValidationEvent", "data": dict(data)}:
            yield Handshake("azure", {"validationResponse": str(data["validationCode"])})
        case {"eventType": str(kind), "data": {"url": str(url)} as data} | {
            "type": str(kind),
            "specversion": str(),
            "data": {"url": str(url)} as data,
        }:
            yield from _event_grid(given, kind, url, data)
        case _:
            raise Unreadable("no known form")


def _s3_record(record: dict[str, Any]) -> Iterator[Hint]:
    source = record.get("eventSource", "")
    provider = {"minio:s3": "minio", "ceph:s3": "ceph"}.get(source, "s3")
    if str(record.get("eventVersion", "2")).partition(".")[0] != "2":
        raise Unreadable("an event version that is not 2")
    name = str(record["eventName"]).removeprefix("s3:")
    if not name.startswith(("ObjectCreated:", "ObjectRemoved:")):
        return
    thing = record["s3"]["object"]
    # Ceph sends the key as it is; the others encode it like a form field, once.
    decode: Callable[[str], str] = str if provider == "ceph" else unquote_plus
    yield Hint(
        provider,
        bucket=str(record["s3"]["bucket"]["name"]),
        key=decode(str(thing["key"])),
        created=name.startswith("ObjectCreated:"),
        size=_int(thing.get("size")),
        etag=_str(thing.get("eTag")),
        version=_str(thing.get("versionId")),
        sequencer=_str(thing.get("sequencer")),
        event_time=_str(record.get("eventTime")),
        delivery_id=_str(record.get("eventId")),
    )


def _eventbridge(event: dict[str, Any], kind: str, detail: dict[str, Any]) -> Iterator[Hint]:
    if kind not in ("Object Created", "Object Deleted"):
        return
    thing = detail["object"]
    yield Hint(
        "eventbridge",
        bucket=str(detail["bucket"]["name"]),
        key=str(thing["key"]),  # not encoded
        created=kind == "Object Created",
        size=_int(thing.get("size")),
        etag=_str(thing.get("etag")),
        version=_str(thing.get("version-id")),
        sequencer=_str(thing.get("sequencer")),
        event_time=_str(event.get("time")),
        delivery_id=_str(event.get("id")),
    )


def _seaweedfs(event: dict[str, Any], kind: str, path: str) -> Iterator[Hint]:
    _, area, bucket, key = ([*path.split("/", 3), "", "", ""])[:4]
    message = event.get("message") or {}
    entry = message.get("new_entry") or {}
    if area != "buckets" or not key or kind not in ("create", "update", "delete", "rename"):
        return
    if kind != "delete" and entry.get("is_directory"):
        return
    attributes = entry.get("attributes") or {}
    yield Hint(
        "seaweedfs",
        bucket=bucket,
        key=key,  # not encoded
        created=kind != "delete",
        size=_int(attributes.get("file_size")),
        event_time=_str(attributes.get("mtime")),
    )


def _pubsub(message: dict[str, Any], attributes: dict[str, Any]) -> Iterator[Hint]:
    kind = attributes["eventType"]
    if kind not in ("OBJECT_FINALIZE", "OBJECT_DELETE"):
        return
    payload: dict[str, Any] = {}
    if attributes.get("payloadFormat") == "JSON_API_V1" and message.get("data"):
        with suppress(ValueError):
            payload = json.loads(base64.b64decode(message["data"]))
    generation = _str(attributes.get("objectGeneration"))
    yield Hint(
        "gcs",
        bucket=str(attributes["bucketId"]),
        key=str(attributes["objectId"]),  # not encoded
        created=kind == "OBJECT_FINALIZE",
        size=_int(payload.get("size")),  # a text there
        etag=_str(payload.get("etag")),
        version=generation,
        sequencer=generation,
        event_time=_str(attributes.get("eventTime")),
        delivery_id=_str(message.get("messageId")),
    )


def _event_grid(event: dict[str, Any], kind: str, url: str, data: dict[str, Any]) -> Iterator[Hint]:
    if kind not in ("Microsoft.Storage.BlobCreated", "Microsoft.Storage.BlobDeleted"):
        return
    # The subject has the name as it is and as it is not; the address is encoded, once.
    _, bucket, key = urlsplit(url).path.split("/", 2)
    yield Hint(
        "azure",
        bucket=unquote(bucket),
        key=unquote(key),
        created=kind == "Microsoft.Storage.BlobCreated",
        size=_int(data.get("contentLength")),
        etag=_str(data.get("eTag")),
        sequencer=_str(data.get("sequencer")),
        event_time=_str(event.get("eventTime") or event.get("time")),
        delivery_id=_str(event.get("id")),
    )


async def follow(pool: db.Pool, store: Storage, settings: Settings, hint: Hint) -> str:
    """Look at what a hint names, and accept the original if it is there; one of OUTCOMES.

    Costs nothing but a glance at our own row unless an upload is awaited there. Raises Failure when
    the storage does not answer, so that the sender comes again.
    """
    if not hint.created:
        return "ignored"  # what is missing is found when it is fetched
    named = _original(hint.key)
    if hint.bucket != settings.bucket or named is None:
        return "foreign"
    try:
        async with db.transaction(pool) as connection:
            first = await uploads.complete(connection, store, settings, *named)
    except Refused:
        return "refused"  # deleted, expired, not there any more, or not what was announced
    return "accepted" if first else "known"


def _original(key: str) -> tuple[str, UUID] | None:
    """The media whose original this key is; None for a key that we did not mint."""
    with suppress(ValueError):
        area, tenant, media_id, _, name = checked_key(key).split("/")
        if area == storage.UPLOADS and name == "original":
            return tenant, UUID(media_id)
    return None


def _int(value: Any) -> int | None:
    with suppress(ValueError, TypeError):
        return int(value)
    return None


def _str(value: Any) -> str | None:
    return None if value is None else str(value)

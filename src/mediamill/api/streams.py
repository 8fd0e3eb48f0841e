"""Server-sent events for a media, a job or a tenant: a snapshot first, then the log as it grows.

A stream ends with the event that ends its media or job. A client that comes back with
`Last-Event-ID` hears everything in between, once and in order; if that is not kept any more it is
told `reset` and gets a snapshot.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mediamill import db, events, ids, jobs, media, signing
from mediamill.api.jobs import shown_job
from mediamill.api.media import list_item, shown_media
from mediamill.api.services import (
    Services,
    bearer,
    caller,
    iso_time,
    json_body,
    json_response,
    known_parameters,
    parse_body,
    path_id,
    services,
)
from mediamill.events import ENDS_JOB, ENDS_MEDIA, Subscription, Topic
from mediamill.failures import Code, Refused
from mediamill.states import JOB_TERMINAL, MEDIA_TERMINAL

SCHEMA_VERSION: Final = 1
_HEARTBEAT_SECONDS: Final = 15.0
_RETRY_MILLISECONDS: Final = (2000, 6000)
_RECENT: Final = 50
_REPLAY_MOST: Final = 1000
_FUTURE: Final = 2**63 - 1
_SIGNED_SECONDS: Final = 300
_STREAM: Final = "STREAM"
_SIGNED: Final = ("tenant", "api_key", "expires", "key_id", "signature")
_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}

Snapshot = Callable[[db.Connection], Awaitable[tuple[dict[str, Any], bool]]]


class NewStreamUrl(BaseModel):
    """What a browser wants to watch; one of the two, or neither for all of the tenant."""

    model_config = ConfigDict(extra="forbid", strict=True)

    media_id: str | None = Field(default=None, max_length=64)
    job_id: str | None = Field(default=None, max_length=64)


class StreamUrl(BaseModel):
    """An address that a browser can open as an EventSource, without a key."""

    schema_version: int
    url: str
    expires_at: datetime


async def media_events(request: Request) -> Response:
    """Everything that happens to a media, until it is ready, failed, expired or deleted."""
    here = services(request)
    tenant_id = await _watcher(request, "media:read")
    media_id = path_id(request, ids.MEDIA, "media_id")

    async def snapshot(connection: db.Connection) -> tuple[dict[str, Any], bool]:
        body = await shown_media(here, connection, tenant_id, media_id)
        body.pop("version")
        return body, body["state"] in MEDIA_TERMINAL

    return await _open(request, Topic(tenant_id, media_id=media_id), snapshot, ENDS_MEDIA)


async def job_events(request: Request) -> Response:
    """Everything that happens to a job, until it has ended."""
    tenant_id = await _watcher(request, "jobs:read")
    job_id = path_id(request, ids.JOB, "job_id")

    async def snapshot(connection: db.Connection) -> tuple[dict[str, Any], bool]:
        row = await jobs.get(connection, tenant_id, job_id)
        if row is None:
            raise Refused(Code.NOT_FOUND)
        tried = await jobs.attempts(connection, tenant_id, job_id)
        return shown_job(row, tried, None), row["state"] in JOB_TERMINAL

    return await _open(request, Topic(tenant_id, job_id=job_id), snapshot, ENDS_JOB)


async def tenant_events(request: Request) -> Response:
    """Everything that happens to all media and jobs of the tenant; it does not end.

    The snapshot holds the newest media. `types` restricts it, as for webhooks."""
    tenant_id = await _watcher(request, "media:read", "types")

    async def snapshot(connection: db.Connection) -> tuple[dict[str, Any], bool]:
        rows = await media.list_newest(connection, tenant_id, before=None, limit=_RECENT)
        return {
            "schema_version": SCHEMA_VERSION,
            "media": [list_item(row) for row in rows],
        }, False

    return await _open(request, Topic(tenant_id), snapshot, frozenset())


async def create_stream_url(request: Request) -> Response:
    """An address for an EventSource, which cannot send a key. It opens for five minutes; what it
    opened ends with the key that asked for it."""
    sender = await caller(request, "media:read")
    known_parameters(request)
    here = services(request)
    wanted = parse_body(NewStreamUrl, await json_body(request))
    path = "/v1/events"
    async with db.acquire(here.pool) as connection:
        if wanted.media_id is not None:
            media_id = ids.decode(ids.MEDIA, wanted.media_id)
            if media_id is None or not await media.version(connection, sender.tenant_id, media_id):
                raise Refused(Code.NOT_FOUND)
            path = f"/v1/media/{wanted.media_id}/events"
        elif wanted.job_id is not None:
            job_id = ids.decode(ids.JOB, wanted.job_id)
            if job_id is None or not await jobs.version(connection, sender.tenant_id, job_id):
                raise Refused(Code.NOT_FOUND)
            path = f"/v1/jobs/{wanted.job_id}/events"
    expires = int(time.time()) + _SIGNED_SECONDS
    grant = _grant(sender.tenant_id, sender.key_id, path, expires)
    query = signing.sign(here.installation.keyring, grant).partition("?")[2]
    whose = {"tenant": sender.tenant_id, "api_key": sender.key_id}
    body = {
        "schema_version": SCHEMA_VERSION,
        "url": f"{here.settings.base_url}{path}?{urlencode(whose)}&{query}",
        "expires_at": iso_time(datetime.fromtimestamp(expires, UTC)),
    }
    return json_response(body, 201, {"Cache-Control": "no-store"})


def _grant(tenant_id: str, key_id: str, path: str, expires: int) -> signing.Grant:
    return signing.Grant(_STREAM, f"{tenant_id}/{key_id}{path}", expires)


async def _watcher(request: Request, scope: str, *more: str) -> str:
    """The tenant whose events are asked for, by key or by a signed address."""
    known_parameters(request, "last_event_id", *_SIGNED, *more)
    query = dict(parse_qsl(request.url.query))
    if "signature" not in query:
        return (await caller(request, scope)).tenant_id
    expires = query.get("expires", "")
    if not expires.isascii() or not expires.isdigit() or len(expires) > 12:
        raise Refused(Code.SIGNATURE_INVALID)
    tenant_id, key_id = query.get("tenant", ""), query.get("api_key", "")
    here = services(request)
    signing.verify(
        here.installation.keyring,
        _grant(tenant_id, key_id, request.url.path, int(expires)),
        key_id=query.get("key_id", ""),
        signature=query["signature"],
        now=time.time(),
    )
    if not await here.keychain.stands(tenant_id, key_id):
        raise Refused(Code.UNAUTHENTICATED)
    return tenant_id


async def _open(
    request: Request, topic: Topic, snapshot: Snapshot, ends: frozenset[str]
) -> Response:
    here = services(request)
    last = _last_event_id(request)
    wanted = _types(request)
    _admit(here, topic.tenant_id)
    here.streams[topic.tenant_id] += 1
    try:
        subscription = await here.follower.subscribe(topic)
    except BaseException:
        _forget(here, topic.tenant_id)
        raise
    try:
        first, over = await _begin(
            here, subscription, snapshot, ends=ends, last=last, wanted=wanted
        )
    except BaseException:
        _leave(here, subscription)
        raise
    if over and not first:
        _leave(here, subscription)
        return Response(status_code=204)  # an EventSource does not come back after this
    return _Stream(request, here, subscription, first, over=over, ends=ends, wanted=wanted)


def _admit(here: Services, tenant_id: str) -> None:
    """Raises Refused when this process, or this tenant in it, has as many streams as it may."""
    later = {"Retry-After": str(random.randint(2, 15))}  # noqa: S311
    most = here.settings.max_event_streams_per_tenant
    if here.streams[tenant_id] >= most:
        raise Refused(
            Code.TOO_MANY_STREAMS,
            f"At most {most} streams of a tenant are open at a time.",
            limit={
                "name": "event_streams_per_tenant",
                "allowed": most,
                "seen": most + 1,
                "unit": "streams",
            },
            headers=later,
        )
    if here.follower.count >= here.settings.max_event_streams:
        raise Refused(Code.TOO_BUSY, headers=later)


def _leave(here: Services, subscription: Subscription) -> None:
    here.follower.leave(subscription)
    _forget(here, subscription.topic.tenant_id)


def _forget(here: Services, tenant_id: str) -> None:
    here.streams[tenant_id] -= 1
    if here.streams[tenant_id] <= 0:
        del here.streams[tenant_id]


async def _begin(
    here: Services,
    subscription: Subscription,
    snapshot: Snapshot,
    *,
    ends: frozenset[str],
    last: int | None,
    wanted: frozenset[str] | None,
) -> tuple[list[bytes], bool]:
    """What a stream says at once, and whether that is all."""
    topic, horizon = subscription.topic, subscription.start
    frames: list[bytes] = []
    async with db.acquire(here.pool) as connection:
        body, ended = await snapshot(connection)
        if last is not None:
            kept = await events.oldest(connection)
            numbers = await events.since(connection, topic, last, horizon, limit=_REPLAY_MOST)
            if kept - 1 <= last <= horizon and len(numbers) < _REPLAY_MOST:
                rows = await events.told(connection, numbers)
                made = [events.frame(r["type"], events.shown(r), r["id"]) for r in rows]
                frames = [f.data for f in made if wanted is None or f.type in wanted]
                if not ended:
                    return frames, False
                if rows:
                    return frames, any(r["type"] in ends for r in rows)
                # It has ended, and the client has heard all of it, unless the end is so fresh that
                # it is still to come.
                fresh = await events.since(connection, topic, last, _FUTURE, limit=1)
                return [], not fresh
            reset = {"schema_version": SCHEMA_VERSION, "reason": "not kept any more"}
            frames.append(events.frame("reset", reset).data)
    frames.append(events.frame("snapshot", body, horizon).data)
    return frames, ended


def _last_event_id(request: Request) -> int | None:
    text = request.headers.get("last-event-id") or request.query_params.get("last_event_id")
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise Refused(Code.MALFORMED_REQUEST, "Last-Event-ID is not one that a stream gave out.")
    return int(text)


def _types(request: Request) -> frozenset[str] | None:
    text = request.query_params.get("types")
    if text is None:
        return None
    found: set[str] = set()
    for name in text.split(","):
        these = {t for t in events.TYPES if t == name or name == f"{t.partition('.')[0]}.*"}
        if not these:
            raise Refused(
                Code.UNKNOWN_PARAMETER,
                f"types takes {', '.join(events.TYPES)}, or prefixes such as media.*.",
                errors=[{"parameter": "types", "detail": f"{name!r} is not one of them"}],
            )
        found |= these
    return frozenset(found)


class _Stream(Response):
    """The open stream. One task sends, another waits for the client to leave."""

    def __init__(
        self,
        request: Request,
        here: Services,
        subscription: Subscription,
        first: list[bytes],
        *,
        over: bool,
        ends: frozenset[str],
        wanted: frozenset[str] | None,
    ) -> None:
        super().__init__(status_code=200)
        self._here = here
        self._subscription = subscription
        self._first = first
        self._over = over
        self._ends = ends
        self._wanted = wanted
        self._token = bearer(request)
        self._signed = "signature" in request.query_params
        self._key_id = request.query_params.get("api_key", "")
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive))
        try:
            headers = [(k.lower().encode(), v.encode()) for k, v in _HEADERS.items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in self._data():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if not self._gone:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            _leave(self._here, self._subscription)
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._subscription.wake.set()

    async def _data(self) -> AsyncIterator[bytes]:
        # Spread, so that streams cut by a restart do not all come back in the same moment.
        pause = random.randint(*_RETRY_MILLISECONDS)  # noqa: S311
        yield b"retry: %d\n\n" % pause + b"".join(self._first)
        self._first = []
        if self._over:
            return
        heard = self._subscription
        while not self._gone:
            try:
                async with asyncio.timeout(_HEARTBEAT_SECONDS):
                    await heard.wake.wait()
            except TimeoutError:
                if not await self._still_allowed():
                    return
                yield b": still here\n\n"
                continue
            if self._here.shutting_down.is_set():
                return
            frames = heard.take()
            if heard.lost:
                reset = {"schema_version": SCHEMA_VERSION, "reason": "too slow"}
                yield events.frame("reset", reset).data
                return
            if said := [f.data for f in frames if self._wanted is None or f.type in self._wanted]:
                yield b"".join(said)
            if any(f.type in self._ends for f in frames):
                return

    async def _still_allowed(self) -> bool:
        """Whether the key is still good, by which the stream or its signed address was opened."""
        keychain = self._here.keychain
        try:
            if self._signed:
                return await keychain.stands(self._subscription.topic.tenant_id, self._key_id)
            return self._token is not None and await keychain.identify(self._token) is not None
        except db.Unavailable:
            return True

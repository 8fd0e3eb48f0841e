"""/v1/media: slots and uploads in, status and variants out."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote, unquote, urlsplit
from uuid import UUID

from fastapi import APIRouter
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from mediamill import (
    db,
    failpoints,
    idempotency,
    ids,
    jobs,
    media,
    recipes,
    timeline,
    uploads,
    variants,
)
from mediamill.api import play
from mediamill.api.services import (
    CALLBACK,
    Callback,
    Failed,
    Page,
    Services,
    caller,
    common_filters,
    etags,
    idempotency_key,
    iso_time,
    json_body,
    json_response,
    json_text,
    known_parameters,
    listed,
    parse_body,
    path_id,
    path_word,
    plain_text,
    pointers,
    poll_after,
    services,
    shown_error,
    shown_timeline,
    wait_for,
    wait_seconds,
    waited_headers,
    worded,
)
from mediamill.egress import Unreachable
from mediamill.estimates import Work
from mediamill.events import Topic
from mediamill.failures import Code, Failure, Refused
from mediamill.idempotency import Answer
from mediamill.keys import Caller
from mediamill.sniff import sniff
from mediamill.sources import PROTOCOL
from mediamill.states import JobState, MediaState

SCHEMA_VERSION: Final = 1
FILTERS: Final = ("state", "kind", "recipe", "error_code", "created_after", "created_before")
_LIVE: Final = frozenset({MediaState.UPLOADED, MediaState.QUEUED, MediaState.PROCESSING})
_MOVING: Final = _LIVE | {MediaState.AWAITING_UPLOAD}
_FORM_OVERHEAD: Final = 1 << 20
_SNIFF_BYTES: Final = 4096
_COPY_BYTES: Final = 1 << 20
_DOUBT_SECONDS: Final = 5.0
_PLAY_FACTOR: Final = 2.0

router = APIRouter(tags=["media"])


def _scalar(value: Any) -> Any:
    match value:
        case str():
            return plain_text(value)
        case None | bool() | int():
            return value
        case float() if math.isfinite(value):
            return value
    raise PydanticCustomError("scalar", "must be text, a finite number, true, false or null")


# One validator and not a union, so that a wrong value is one fault under its own name.
Scalar = Annotated[
    Any,
    PlainValidator(_scalar),
    WithJsonSchema({"type": ["string", "number", "boolean", "null"]}),
]
Metadata = dict[Annotated[str, Field(max_length=64), AfterValidator(plain_text)], Scalar]


class NewMedia(BaseModel):
    """A file that the client wants to upload. `size` is exact: the signed address takes no
    other."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    schema_version: Literal[1] = 1
    size: int = Field(ge=0, le=2**53, description="Exact size in bytes.")
    content_type: str | None = Field(default=None, max_length=255, examples=["image/jpeg"])
    filename: str | None = Field(default=None, max_length=1024)
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    recipe: str = Field(default="web", max_length=63)
    recipe_version: int | None = Field(default=None, ge=1, description="Default: the newest.")
    metadata: Metadata = Field(default_factory=dict, max_length=32)
    ttl_seconds: float | None = Field(
        default=None, gt=0, le=10 * 365 * 86400, description="Deleted this long after creation."
    )
    callback_url: str | None = Field(default=None, max_length=2048, description=CALLBACK)

    def wanted(self) -> uploads.Wanted:
        return uploads.Wanted(**self.model_dump(exclude={"schema_version", "callback_url"}))


class NewMediaUpTo(BaseModel):
    """A file whose size is not known yet: it comes by a form (POST), which takes up to
    `max_size` bytes. Offered where the storage holds forms to their length."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    schema_version: Literal[1] = 1
    max_size: int = Field(ge=1, le=2**53, description="At most so many bytes.")
    content_type: str | None = Field(default=None, max_length=255, examples=["image/jpeg"])
    filename: str | None = Field(default=None, max_length=1024)
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    recipe: str = Field(default="web", max_length=63)
    recipe_version: int | None = Field(default=None, ge=1, description="Default: the newest.")
    metadata: Metadata = Field(default_factory=dict, max_length=32)
    ttl_seconds: float | None = Field(
        default=None, gt=0, le=10 * 365 * 86400, description="Deleted this long after creation."
    )
    callback_url: str | None = Field(default=None, max_length=2048, description=CALLBACK)

    def wanted(self) -> uploads.Wanted:
        given = self.model_dump(exclude={"schema_version", "callback_url"})
        return uploads.Wanted(size=0, **given)


class Source(BaseModel):
    """Where a file is fetched from."""

    model_config = ConfigDict(extra="forbid", strict=True)

    url: str = Field(min_length=8, max_length=2048)


class NewFetch(BaseModel):
    """A file that we fetch ourselves; its size is what its address says."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    schema_version: Literal[1] = 1
    source: Source
    content_type: str | None = Field(default=None, max_length=255)
    filename: str | None = Field(default=None, max_length=1024)
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    recipe: str = Field(default="web", max_length=63)
    recipe_version: int | None = Field(default=None, ge=1)
    metadata: Metadata = Field(default_factory=dict, max_length=32)
    ttl_seconds: float | None = Field(default=None, gt=0, le=10 * 365 * 86400)
    callback_url: str | None = Field(default=None, max_length=2048, description=CALLBACK)

    def wanted(self) -> uploads.Wanted:
        """What is known now. A name that was not given is the address's last part."""
        given = self.model_dump(exclude={"schema_version", "source", "callback_url"})
        last = unquote(urlsplit(self.source.url).path.rpartition("/")[2])
        return uploads.Wanted(size=0, **given | {"filename": self.filename or last or None})


class NewForm(BaseModel):
    """The fields beside `file` in a multipart upload."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    recipe: str = Field(default="web", max_length=63)
    recipe_version: int | None = Field(default=None, ge=1)
    metadata: Metadata = Field(default_factory=dict, max_length=32)
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    ttl_seconds: float | None = Field(default=None, gt=0, le=10 * 365 * 86400)
    callback_url: str | None = Field(default=None, max_length=2048, description=CALLBACK)


class Process(BaseModel):
    """Process a media again, with the same or another recipe."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: Literal[1] = 1
    recipe: str | None = Field(default=None, max_length=63)
    recipe_version: int | None = Field(default=None, ge=1)
    callback_url: str | None = Field(
        default=None, max_length=2048, description=f"{CALLBACK} It replaces an earlier one."
    )


class Estimate(BaseModel):
    p50_seconds: float | None
    p90_seconds: float | None
    basis: str


class OutputProgress(BaseModel):
    name: str
    percent: float | None = Field(description="0 to 100; null where the length is not known.")
    speed: float | None = Field(
        description="Seconds of the original in each second; 1 is real time."
    )
    seconds_left: float | None


class JobSummary(BaseModel):
    id: str
    state: str
    queue: str
    position: int | None = Field(description="1 is next; null when it does not wait.")
    stage: str | None
    attempt: int
    max_attempts: int
    run_at: datetime | None
    estimate: Estimate | None
    outputs: list[OutputProgress] = Field(
        description="What is being made just now, while it is processing."
    )


class Variant(BaseModel):
    name: str
    content_type: str
    bytes: int
    sha256: str
    width: int | None
    height: int | None
    duration_seconds: float | None
    seconds: float | None
    url: str
    url_expires_at: datetime


class Upload(BaseModel):
    """The request to send next: a PUT of the file with these headers, or a POST of these fields
    and then the file, as multipart/form-data under the name `file`."""

    method: Literal["PUT", "POST"]
    url: str
    headers: dict[str, str]
    fields: dict[str, str] = Field(default_factory=dict, description="Of a form; else absent.")
    expires_at: datetime


class MediaBody(BaseModel):
    """A media as the API shows it."""

    schema_version: Literal[1]
    id: str
    state: MediaState
    stage: str | None
    progress: float | None = Field(description="0 to 100; null when unknown.")
    kind: str | None
    filename: str | None
    content_type: str
    detected_type: str | None
    size: int
    sha256: str | None
    width: int | None
    height: int | None
    duration_seconds: float | None
    info: dict[str, Any] | None
    preview: dict[str, Any] | None
    recipe: str
    recipe_version: int
    generation: int
    metadata: dict[str, Any]
    job: JobSummary | None
    variants: list[Variant]
    error: Failed | None
    poll_after_seconds: float | None
    created_at: datetime
    updated_at: datetime
    expires_at: datetime | None
    links: dict[str, str]


class MediaItem(BaseModel):
    """A media in a list."""

    id: str
    state: MediaState
    kind: str | None
    filename: str | None
    content_type: str
    detected_type: str | None
    size: int
    width: int | None
    height: int | None
    duration_seconds: float | None
    recipe: str
    recipe_version: int
    generation: int
    preview: dict[str, Any] | None
    error: Failed | None
    created_at: datetime
    updated_at: datetime
    expires_at: datetime | None


class MediaPage(BaseModel):
    """Newest first."""

    schema_version: Literal[1]
    data: list[MediaItem]
    next_cursor: str | None


class SlotBody(MediaBody):
    upload: Upload


async def create_media(request: Request) -> Response:
    """Open an upload slot (JSON), or upload a small file in one request (multipart/form-data).

    A slot answers 201 with a signed write-once `upload` request; a form answers 202: the file is
    accepted and queued. With `source.url` in place of a size the file is fetched (202); with
    `max_size` the slot is a form with a length range, where the storage holds forms to it.
    """
    sender = await caller(request, "uploads:write")
    known_parameters(request)
    essence = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if essence == "multipart/form-data":
        return await _upload_form(request, sender)
    return await _open_slot(request, sender)


async def _open_slot(request: Request, sender: Caller) -> Response:
    here = services(request)
    raw = await json_body(request)
    if names(raw, "source"):
        return await _fetch(request, sender, raw)
    by_form = names(raw, "max_size")
    asked = parse_body(NewMediaUpTo, raw) if by_form else parse_body(NewMedia, raw)
    wanted = asked.wanted()
    if wanted.max_size is not None:  # what the bucket makes of forms is found out, once
        await uploads.sign_form(here.storage, uploads.slot(here.settings, sender.tenant_id, wanted))
    key = idempotency_key(request, sender, idempotency.fingerprint("json", raw), route="/v1/media")
    callback = await Callback.of(here, asked.callback_url)

    async with db.transaction(here.pool) as connection:

        async def work() -> Answer:
            slot = uploads.slot(here.settings, sender.tenant_id, wanted)
            await media.open_slot(connection, slot)
            await callback.register(connection, sender.tenant_id, slot.id)
            body = await shown_media(here, connection, sender.tenant_id, slot.id)
            body["upload"] = await _signed(here, slot)
            return Answer(201, json_text(body), _path(slot.id), slot.id)

        answer = await idempotency.once(
            connection, key, keep_seconds=here.settings.idempotency_seconds, work=work
        )
    failpoints.hit("api.opened")
    return _answered(answer)


def names(raw: bytes, member: str) -> bool:
    """Whether a body has this member, which says what kind of slot it asks for."""
    with suppress(ValueError, RecursionError):
        given = json.loads(raw)
        return isinstance(given, dict) and member in given
    return False


async def _signed(here: Services, slot: media.Slot) -> dict[str, Any]:
    """The request that the client sends next. Raises Refused."""
    if slot.max_size is not None:
        form = await uploads.sign_form(here.storage, slot)
        return {
            "method": "POST",
            "url": form.url,
            "headers": {},
            "fields": dict(form.fields),
            "expires_at": iso_time(form.expires_at),
        }
    signed = uploads.sign(here.storage, slot)
    return {
        "method": signed.method,
        "url": signed.url,
        "headers": dict(signed.headers),
        "expires_at": iso_time(signed.expires_at),
    }


async def _fetch(request: Request, sender: Caller, raw: bytes) -> Response:
    """Take the address in; a worker fetches it. What may not be called is refused now."""
    here = services(request)
    given = parse_body(NewFetch, raw)
    wanted = given.wanted()
    key = idempotency_key(request, sender, idempotency.fingerprint("json", raw), route="/v1/media")
    try:
        await here.egress.check(given.source.url)
    except Unreachable:
        pass  # it may answer later
    except Failure as failure:
        raise Refused(
            failure.code,
            failure.problem.detail,
            errors=[{"pointer": "/source/url", "detail": failure.problem.detail}],
        ) from None
    callback = await Callback.of(here, given.callback_url)
    async with db.transaction(here.pool) as connection:

        async def work() -> Answer:
            made = await here.transfers.open(
                sender.tenant_id,
                wanted,
                size=None,
                protocol=PROTOCOL,
                source=given.source.url,
                connection=connection,
            )
            await callback.register(connection, sender.tenant_id, made.id)
            body = await shown_media(here, connection, sender.tenant_id, made.id)
            return Answer(202, json_text(body), _path(made.id), made.id)

        answer = await idempotency.once(
            connection, key, keep_seconds=here.settings.idempotency_seconds, work=work
        )
    return _answered(answer)


async def _upload_form(request: Request, sender: Caller) -> Response:
    here = services(request)
    _limit_form(request, here.settings.max_form_bytes)
    try:
        async with request.form(max_files=1, max_fields=16) as form:
            file, fields = _form_parts(form)
            return await _accept_form(request, here, sender, file, fields)
    except MultiPartException as error:
        raise Refused(Code.MALFORMED_REQUEST, error.message) from None


async def _accept_form(
    request: Request, here: Services, sender: Caller, file: UploadFile, fields: NewForm
) -> Response:
    size = file.size or 0
    head = await file.read(_SNIFF_BYTES)
    seen = sniff(head)
    announced = file.content_type
    wanted = uploads.Wanted(
        size=size,
        content_type=seen.type if seen and seen.kind in ("image", "video", "audio") else announced,
        filename=_sent_name(file.filename),
        **fields.model_dump(exclude={"callback_url"}),
    )
    callback = await Callback.of(here, fields.callback_url)
    slot = uploads.slot(here.settings, sender.tenant_id, wanted)
    receiver = await here.storage.receive(slot.upload_key)
    settled = False
    try:
        digest = hashlib.sha256()
        data = head
        while data:
            digest.update(data)
            await receiver.write(data)
            data = await file.read(_COPY_BYTES)
        if wanted.sha256 is not None and digest.hexdigest() != wanted.sha256:
            raise Refused(Code.CHECKSUM_MISMATCH)
        # The boundary differs between repeats; what counts is the file and the fields.
        key = idempotency_key(
            request,
            sender,
            idempotency.fingerprint(
                "form", digest.digest(), file.filename or "", fields.model_dump_json()
            ),
            route="/v1/media",
        )
        stored = await receiver.commit()
        async with db.transaction(here.pool) as connection:

            async def work() -> Answer:
                await media.open_slot(connection, slot)
                await callback.register(connection, sender.tenant_id, slot.id)
                await media.accept(
                    connection,
                    sender.tenant_id,
                    slot.id,
                    object_version=stored.version,
                    kind=slot.kind,
                    births=uploads.births(slot.kind),
                    max_attempts=here.settings.max_attempts,
                )
                body = await shown_media(here, connection, sender.tenant_id, slot.id, joining=True)
                return Answer(202, json_text(body), _path(slot.id), slot.id)

            answer = await idempotency.once(
                connection, key, keep_seconds=here.settings.idempotency_seconds, work=work
            )
        settled = not answer.replayed
    except db.Unavailable:
        # The answer to the commit may be lost: only a look at the row tells whether it happened.
        settled = await _happened(here, sender.tenant_id, slot.id)
        raise
    finally:
        await receiver.abort()
        if not settled:
            await here.storage.delete(slot.upload_key)
    return _answered(answer)


async def _happened(here: Services, tenant_id: str, media_id: UUID) -> bool:
    """Whether a media came into being. In doubt, yes: bytes too many are better than too few."""

    async def look() -> bool:
        async with db.acquire(here.pool) as connection:
            return await media.original(connection, tenant_id, media_id) is not None

    try:
        return await db.outlast(look, seconds=_DOUBT_SECONDS)
    except db.Unavailable:
        return True


async def complete_media(request: Request) -> Response:
    """Say that the upload is done: it is verified, accepted and queued. Safe to repeat.

    202 while there is work ahead, 200 after it. 409 when the object is absent or differs from what
    was announced: the slot stays open. With `Prefer: wait=N` (at most 25 s) the answer comes when
    the media is at its end.
    """
    sender = await caller(request, "uploads:write")
    known_parameters(request, "wait")
    here = services(request)
    media_id = path_id(request, ids.MEDIA, "media_id")
    seconds = wait_seconds(request)
    async with db.transaction(here.pool) as connection:
        first = await uploads.complete(
            connection, here.storage, here.settings, sender.tenant_id, media_id
        )
        body = await shown_media(here, connection, sender.tenant_id, media_id, joining=first)
    failpoints.hit("api.accepted")

    async def done() -> bool:
        async with db.acquire(here.pool) as connection:
            row = await media.version(connection, sender.tenant_id, media_id)
        return row is None or row["deleted_at"] is not None or row["state"] not in _LIVE

    waited = await wait_for(here, Topic(sender.tenant_id, media_id), seconds, done)
    if waited:
        async with db.acquire(here.pool) as connection:
            body = await shown_media(here, connection, sender.tenant_id, media_id)
    headers = _headers(body) | {"Location": _path(media_id)}
    if waited:
        headers |= waited_headers(here, waited)
    return json_response(body, 202 if body["state"] in _LIVE else 200, headers)


async def read_media(request: Request) -> Response:
    """The status of a media, with its variants and signed addresses once it is ready.

    With `If-None-Match`, 304 while nothing has changed. With `Prefer: wait=N` (or `wait=N`, at most
    25 s) the answer comes with the next change, or without a tag, when the media is at its end.
    """
    sender = await caller(request, "media:read")
    known_parameters(request, "wait")
    here = services(request)
    media_id = path_id(request, ids.MEDIA, "media_id")
    seen = etags(request, "if-none-match")
    seconds = wait_seconds(request)
    row = None

    async def done() -> bool:
        nonlocal row
        async with db.acquire(here.pool) as connection:
            row = await media.version(connection, sender.tenant_id, media_id)
        if row is None or row["deleted_at"] is not None:
            return True
        return _tag(here, row) not in seen if seen else row["state"] not in _MOVING

    waited = 0.0
    if seen or seconds:
        waited = await wait_for(here, Topic(sender.tenant_id, media_id), seconds, done)
        if row is None:  # nothing was looked at yet: it does not wait
            await done()
    applied = waited_headers(here, waited)
    if seen and row is not None and row["deleted_at"] is None and (tag := _tag(here, row)) in seen:
        headers = {"ETag": f"W/{tag}", "Cache-Control": "private, no-cache"}
        if row["state"] in _LIVE:
            kind = row["kind"] or "image"
            headers |= await poll_after(
                here,
                media_id,
                kind=kind,
                recipe=row["recipe"],
                queue=uploads.births(kind)[0].queue,
                waits=row["state"] != MediaState.PROCESSING,
            )
        return Response(status_code=304, headers=headers | applied)
    async with db.acquire(here.pool) as connection:
        body = await shown_media(here, connection, sender.tenant_id, media_id)
    headers = _headers(body) | applied
    del headers["Location"]
    return json_response(body, 200, headers)


def _tag(here: Services, row: db.Row) -> str:
    """The entity tag, without the mark of a weak one. A copy with signed addresses is good for as
    long as they are."""
    if row["set_id"] is None:
        return f'"{row["version"]}"'
    return f'"{row["version"]}.{_url_expiry(here):%H%M}"'


async def list_media(request: Request) -> Response:
    """Newest first, by `state` (several with commas), `kind`, `recipe`, `error_code`,
    `created_after` and `created_before` (RFC 3339); `cursor` goes on where a page ended."""

    async def ask(connection: db.Connection, tenant_id: str, page: Page) -> list[db.Row]:
        return await media.list_newest(
            connection,
            tenant_id,
            before=page.before,
            limit=page.limit + 1,
            recipe=worded(request, "recipe"),
            **common_filters(request, MediaState),
        )

    return await listed(request, "media:read", FILTERS, ask, list_item)


async def read_timeline(request: Request) -> Response:
    """Where the time went: exclusive segments that sum to the total, and one plain sentence."""
    sender = await caller(request, "media:read")
    known_parameters(request)
    here = services(request)
    media_id = path_id(request, ids.MEDIA, "media_id")
    async with db.acquire(here.pool) as connection:
        row = await media.get(connection, sender.tenant_id, media_id)
        if row is None:
            raise Refused(Code.NOT_FOUND)
        moves = await media.timeline(connection, sender.tenant_id, media_id)
        main = await media.main_jobs(connection, sender.tenant_id, media_id)
        now = await connection.fetchval("SELECT clock_timestamp()")
    found = timeline.segments([dict(move) for move in moves], main_jobs=frozenset(main), now=now)
    state = "deleted" if row["deleted_at"] else row["state"]
    body = {
        "schema_version": SCHEMA_VERSION,
        "id": ids.encode(ids.MEDIA, media_id),
        **shown_timeline(found, moves, state=state, outputs=row["variants"] or ()),
    }
    return json_response(body, 200, {"Cache-Control": "private, no-cache"})


async def process_media(request: Request) -> Response:
    """Process a media again under a new generation; what is published stays served meanwhile."""
    sender = await caller(request, "media:write")
    known_parameters(request)
    here = services(request)
    media_id = path_id(request, ids.MEDIA, "media_id")
    raw = await json_body(request)
    wanted = parse_body(Process, raw)
    route = "/v1/media/{media_id}/process"
    key = idempotency_key(
        request, sender, idempotency.fingerprint("json", str(media_id), raw), route=route
    )
    callback = await Callback.of(here, wanted.callback_url)
    async with db.transaction(here.pool) as connection:

        async def work() -> Answer:
            original = await media.original(connection, sender.tenant_id, media_id)
            if original is None:
                raise Refused(Code.NOT_FOUND)
            if original.deleted_at is not None:
                raise Refused(Code.GONE)
            name = wanted.recipe or original.recipe
            recipe = recipes.find(name, wanted.recipe_version, folder=here.settings.recipes_dir)
            if recipe is None:
                raise Refused(
                    Code.INVALID_REQUEST,
                    f"There is no recipe {name!r} in that version.",
                    errors=[{"pointer": "/recipe", "detail": "is not known"}],
                )
            await callback.register(connection, sender.tenant_id, media_id)
            generation = await media.reprocess(
                connection,
                sender.tenant_id,
                media_id,
                recipe=recipe.name,
                recipe_version=recipe.version,
                birth=uploads.births(original.kind)[0],
                max_attempts=here.settings.max_attempts,
            )
            if generation is None:
                raise Refused(
                    Code.WRONG_STATE, f"It is {original.state}; it must be ready or failed."
                )
            body = await shown_media(here, connection, sender.tenant_id, media_id, joining=True)
            return Answer(202, json_text(body), _path(media_id), media_id)

        answer = await idempotency.once(
            connection, key, keep_seconds=here.settings.idempotency_seconds, work=work
        )
    return _answered(answer)


async def delete_media(request: Request) -> Response:
    """Delete a media: its address answers 410 at once, its bytes are gone within seconds."""
    sender = await caller(request, "media:delete")
    known_parameters(request)
    here = services(request)
    media_id = path_id(request, ids.MEDIA, "media_id")
    async with db.transaction(here.pool) as connection:
        original = await media.original(connection, sender.tenant_id, media_id)
        if original is None:
            raise Refused(Code.NOT_FOUND)
        deleted = await uploads.delete(
            connection, here.settings, sender.tenant_id, media_id, reason="requested"
        )
    if not deleted:
        raise Refused(Code.GONE)
    body = {
        "schema_version": SCHEMA_VERSION,
        "id": ids.encode(ids.MEDIA, media_id),
        "deleted": True,
    }
    return json_response(body, 202, {"Location": _path(media_id)})


async def read_variant(request: Request) -> Response:
    """Redirect to the signed address of a variant in the set that is current now."""
    sender = await caller(request, "media:read")
    known_parameters(request)
    here = services(request)
    media_id = path_id(request, ids.MEDIA, "media_id")
    name = path_word(request, "name")
    async with db.acquire(here.pool) as connection:
        original = await media.original(connection, sender.tenant_id, media_id)
        if original is None:
            raise Refused(Code.NOT_FOUND)
        if original.deleted_at is not None:
            raise Refused(Code.GONE)
        row = await variants.current(
            connection,
            sender.tenant_id,
            media_id,
            name,
        )
    if row is None:
        if original.state == MediaState.FAILED:
            raise Refused(Code.WRONG_STATE, "It failed; there are no variants.")
        raise Refused(Code.NOT_FOUND)
    url, _ = _read_address(here, dict(row), _url_expiry(here))
    return Response(status_code=307, headers={"Location": url, "Cache-Control": "no-store"})


async def read_original(request: Request) -> Response:
    """The bytes of the original, as an attachment. No address is signed for it."""
    sender = await caller(request, "media:read")
    known_parameters(request)
    here = services(request)
    media_id = path_id(request, ids.MEDIA, "media_id")
    async with db.acquire(here.pool) as connection:
        original = await media.original(connection, sender.tenant_id, media_id)
    if original is None:
        raise Refused(Code.NOT_FOUND)
    if original.deleted_at is not None:
        raise Refused(Code.GONE)
    if original.object_version is None:
        raise Refused(Code.WRONG_STATE, f"It is {original.state}; its bytes are not here yet.")
    stream = here.storage.read(original.upload_key, original.object_version)
    try:
        first = await anext(stream, b"")
    except Failure as failure:
        if failure.code is Code.SOURCE_MISSING:
            raise Refused(Code.GONE, "The original is no longer kept.") from None
        raise

    async def body() -> AsyncIterator[bytes]:
        async with aclosing(stream):
            yield first
            async for chunk in stream:
                yield chunk

    name = quote(original.filename or "original", safe="")
    headers = {
        "Content-Length": str(original.size),
        "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
        "Content-Security-Policy": "default-src 'none'; sandbox",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "private, no-store",
    }
    kind = original.detected_type or "application/octet-stream"
    return StreamingResponse(body(), 200, headers, kind)


async def shown_media(
    here: Services,
    connection: db.Connection,
    tenant_id: str,
    media_id: UUID,
    *,
    joining: bool = False,
) -> dict[str, Any]:
    """The body of a media. Raises Refused(NOT_FOUND or GONE)."""
    row = await media.get(connection, tenant_id, media_id)
    if row is None:
        raise Refused(Code.NOT_FOUND)
    if row["deleted_at"] is not None:
        raise Refused(Code.GONE)
    job = await _job(here, connection, row, joining=joining)
    live = row["state"] in _LIVE
    expires_at = _url_expiry(here)
    return {
        "schema_version": SCHEMA_VERSION,
        "id": ids.encode(ids.MEDIA, row["id"]),
        "state": row["state"],
        "stage": row["stage"] if live else None,
        "progress": _progress(row),
        "kind": row["kind"],
        "filename": row["filename"],
        "content_type": row["content_type"],
        "detected_type": row["detected_type"],
        "size": row["size"],
        "sha256": row["sha256"],
        "width": row["width"],
        "height": row["height"],
        "duration_seconds": row["duration_seconds"],
        "info": row["info"],
        "preview": row["preview"],
        "recipe": row["recipe"],
        "recipe_version": row["recipe_version"],
        "generation": row["generation"],
        "metadata": row["metadata"],
        "job": job,
        "variants": [_variant(here, v, expires_at) for v in row["variants"]],
        "error": shown_error(row["error"]),
        "poll_after_seconds": _poll_after(here, row, job) if live else None,
        "created_at": iso_time(row["created_at"]),
        "updated_at": iso_time(row["state_at"]),
        "expires_at": iso_time(row["expires_at"]),
        "links": {
            "self": _path(row["id"]),
            "timeline": f"{_path(row['id'])}/timeline",
            "events": f"{_path(row['id'])}/events",
            **({"job": f"/v1/jobs/{job['id']}"} if job else {}),
        },
        "version": _tag(here, row),
    }


async def _job(
    here: Services, connection: db.Connection, row: db.Row, *, joining: bool
) -> dict[str, Any] | None:
    if row["job_id"] is None:
        return None
    state = row["job_state"]
    position = estimate = None
    if state in (JobState.QUEUED, JobState.PROCESSING):
        if state == JobState.QUEUED:
            # A job that just joined stands at the end: that costs no count.
            position = (
                await here.forecaster.joined(connection, row["queue"])
                if joining
                else 1 + await jobs.position(connection, row["tenant_id"], row["job_id"])
            )
        now = datetime.now(UTC)
        ahead = (position or 1) - 1
        delay = max((row["run_at"] - now).total_seconds(), 0.0)
        if state == JobState.QUEUED:
            here.forecaster.note(row["id"], ahead=ahead, delay_seconds=delay)
        estimate = await here.forecaster.estimate(
            connection,
            kind=row["kind"] or "image",
            recipe=row["recipe"],
            queue=row["queue"],
            ahead=ahead,
            work=Work.of(row),
            delay_seconds=delay,
            started_at=row["started_at"] if state == JobState.PROCESSING else None,
            progress=row["progress"],
            now=now,
        )
        if joining:
            await here.forecaster.keep(
                connection, row["tenant_id"], row["job_id"], estimate, ahead=ahead
            )
    processing = state == JobState.PROCESSING
    return {
        "id": ids.encode(ids.JOB, row["job_id"]),
        "state": state,
        "queue": row["queue"],
        "position": position,
        "stage": row["stage"],
        "attempt": row["attempt"],
        "max_attempts": row["max_attempts"],
        "run_at": iso_time(row["run_at"]) if state == JobState.QUEUED else None,
        "estimate": estimate and estimate.as_dict(),
        "outputs": (row["detail"] or {}).get("outputs", []) if processing else [],
    }


def _variant(here: Services, variant: dict[str, Any], expires_at: datetime) -> dict[str, Any]:
    url, expires_at = _read_address(here, variant, expires_at)
    shown = {k: variant[k] for k in Variant.model_fields if k in variant}
    return shown | {"url": url, "url_expires_at": iso_time(expires_at)}


def _read_address(
    here: Services, variant: Mapping[str, Any], expires_at: datetime
) -> tuple[str, datetime]:
    """Where a variant is read, and until when. A playlist must be read where the relative addresses
    in it hold, for as long as it plays, with some pauses; a file comes from storage."""
    if variant["content_type"] in play.PLAYLISTS:
        expires_at += timedelta(
            seconds=math.ceil(_PLAY_FACTOR * (variant["duration_seconds"] or 0))
        )
        return play.address(here, variant["key"], expires_at), expires_at
    signed = here.storage.sign_get(
        variant["key"],
        expires_at=expires_at,
        content_type=variant["content_type"],
        filename=variant["name"],
    )
    return signed.url, expires_at


def list_item(row: db.Row) -> dict[str, Any]:
    return {
        "id": ids.encode(ids.MEDIA, row["id"]),
        "state": row["state"],
        "kind": row["kind"],
        "filename": row["filename"],
        "content_type": row["content_type"],
        "detected_type": row["detected_type"],
        "size": row["size"],
        "width": row["width"],
        "height": row["height"],
        "duration_seconds": row["duration_seconds"],
        "recipe": row["recipe"],
        "recipe_version": row["recipe_version"],
        "generation": row["generation"],
        "preview": row["preview"],
        "error": shown_error(row["error"]),
        "created_at": iso_time(row["created_at"]),
        "updated_at": iso_time(row["state_at"]),
        "expires_at": iso_time(row["expires_at"]),
    }


def _progress(row: db.Row) -> float | None:
    if row["state"] == MediaState.READY:
        return 100.0
    return None if row["progress"] is None else round(row["progress"], 1)


def _poll_after(here: Services, row: db.Row, job: dict[str, Any] | None) -> float:
    kind = row["kind"] or "image"
    runs = job is not None and job["state"] == JobState.PROCESSING
    estimate = job["estimate"] if job is not None and runs else None
    return here.forecaster.poll_after(
        row["id"],
        kind=kind,
        recipe=row["recipe"],
        queue=row["queue"] or uploads.births(kind)[0].queue,
        waits=not runs,
        left_seconds=estimate["p50_seconds"] if estimate else None,
    )


def _headers(body: dict[str, Any]) -> dict[str, str]:
    headers = {
        "ETag": f"W/{body.pop('version')}",
        "Cache-Control": "private, no-cache",
        "Location": body["links"]["self"],
    }
    if body["poll_after_seconds"] is not None:
        headers["Retry-After"] = str(round(body["poll_after_seconds"]))
    return headers


def _answered(answer: Answer) -> Response:
    body = json.loads(answer.body)
    headers = _headers(body) | {"Location": answer.location}
    if answer.status == 201:
        headers["Cache-Control"] = "no-store"  # it holds a signed address
    if answer.replayed:
        headers["Idempotent-Replayed"] = "true"
    return json_response(body, answer.status, headers)


def _limit_form(request: Request, most: int) -> None:
    """Refuse a form that is too large, by its announced length or as it comes in."""
    refused = Refused(
        Code.PAYLOAD_TOO_LARGE,
        f"A form takes files of up to {most:,} bytes; open a slot for larger ones.",
        limit={"name": "form", "allowed": most, "seen": None, "unit": "bytes"},
    )
    announced = request.headers.get("content-length", "")
    if not announced.isascii() or not announced.isdigit():
        announced = "0"  # unknown: it is counted below
    if len(announced) > 18 or int(announced) > most + _FORM_OVERHEAD:
        raise refused
    seen = 0
    receive = request._receive

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > most + _FORM_OVERHEAD:
            raise refused
        return message

    request._receive = counted


def _form_parts(form: FormData) -> tuple[UploadFile, NewForm]:
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise Refused(
            Code.INVALID_REQUEST,
            "The form needs a part named `file` with a file name.",
            errors=[{"pointer": "/file", "detail": "is missing"}],
        )
    fields: dict[str, Any] = {name: value for name, value in form.items() if name != "file"}
    try:
        if "metadata" in fields:
            fields["metadata"] = json.loads(fields["metadata"])
        return file, NewForm.model_validate(fields)
    except ValidationError as error:
        raise Refused(
            Code.INVALID_REQUEST, "The form is not valid.", errors=pointers(error.errors())
        ) from None
    except (ValueError, TypeError, RecursionError):
        raise Refused(
            Code.INVALID_REQUEST,
            "`metadata` must be JSON.",
            errors=[{"pointer": "/metadata", "detail": "must be a JSON object"}],
        ) from None


def _sent_name(name: str | None) -> str | None:
    """A file name as a form carries it: a quotation mark, and nothing else, is escaped (WHATWG)."""
    return name and name.replace("%22", '"')


def _url_expiry(here: Services) -> datetime:
    """Rounded up to the minute, so that one response's addresses, and repeats, are the same."""
    ttl = here.settings.read_url_ttl_seconds
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    return now + timedelta(seconds=ttl, minutes=1)


def _path(media_id: UUID) -> str:
    return f"/v1/media/{ids.encode(ids.MEDIA, media_id)}"

"""What every route uses, and who may use it."""

from __future__ import annotations

import asyncio
import hmac
import json
import random
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlencode
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from mediamill import db, idempotency, ids, timeline, webhooks
from mediamill.config import Settings
from mediamill.egress import Egress
from mediamill.estimates import Forecaster
from mediamill.event_senders import Senders
from mediamill.events import Follower, Topic
from mediamill.failures import BY_NAME, Code, Problem, Refused
from mediamill.installation import Installation
from mediamill.keys import Caller, Keychain
from mediamill.multipart import Multiparts
from mediamill.sealing import Vault
from mediamill.storage import Storage
from mediamill.tus import Transfers

M = TypeVar("M", bound=BaseModel)

JSON: Final = "application/json"
MAX_JSON_BYTES: Final = 1 << 20


@dataclass(slots=True)
class Services:
    """The outside world of one API process."""

    settings: Settings
    pool: db.Pool
    storage: Storage
    installation: Installation
    keychain: Keychain
    forecaster: Forecaster
    egress: Egress
    follower: Follower
    vault: Vault = field(init=False)
    shutting_down: asyncio.Event = field(default_factory=asyncio.Event)
    waiters: int = 0
    streams: Counter[str] = field(default_factory=Counter)
    """Open event streams by tenant."""
    transfers: Transfers = field(init=False)
    multiparts: Multiparts = field(init=False)
    senders: Senders = field(init=False)

    def __post_init__(self) -> None:
        self.senders = Senders(self.settings, self.egress)
        self.use(self.storage)
        self.vault = Vault.of(self.settings)

    def use(self, store: Storage) -> None:
        """Take uploads to this storage."""
        self.storage = store
        self.transfers = Transfers(self.settings, self.pool, store)
        self.multiparts = Multiparts(self.transfers, self.pool, store)


CALLBACK: Final = (
    "Told of what becomes of this, beside the registered endpoints. One of those must be enabled "
    "and have the same origin; it signs."
)


@dataclass(frozen=True, slots=True)
class Callback:
    """An address for the events of one media or job, checked before any transaction."""

    url: str | None
    origin: str = ""

    @classmethod
    async def of(cls, here: Services, url: str | None) -> Callback:
        """Raises Refused for an address that may not be called."""
        if url is None:
            return cls(None)
        return cls(url, await webhooks.origin(here.egress, url, pointer="/callback_url"))

    async def register(self, connection: db.Connection, tenant_id: str, subject: UUID) -> None:
        """Raises Refused for an origin that no enabled endpoint of the tenant has."""
        if self.url is not None:
            await webhooks.call_back(connection, tenant_id, subject, self.url, origin=self.origin)


def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


def bearer(request: Request) -> str | None:
    """The key that came with the request."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


async def caller(request: Request, scope: str | None) -> Caller:
    """Who sends this, if the key may do `scope`; None asks for a good key and no more. Raises
    Refused before any of the body is read."""
    token, known = bearer(request), None
    if token is not None:
        known = await services(request).keychain.identify(token)
    if known is None:
        raise Refused(Code.UNAUTHENTICATED)
    if scope is not None and not known.may(scope):
        raise Refused(Code.MISSING_SCOPE, f"The key needs the scope {scope}.")
    return known


def path_id(request: Request, prefix: str, name: str) -> UUID:
    """The id in the path. A malformed one is as unknown as one that does not exist."""
    value = ids.decode(prefix, request.path_params[name])
    if value is None:
        raise Refused(Code.NOT_FOUND)
    return value


def path_word(request: Request, name: str) -> str:
    """A word in the path. One that no row could hold is as unknown as one that does not exist."""
    value: str = request.path_params[name]
    if "\0" in value:
        raise Refused(Code.NOT_FOUND)
    return value


async def json_body(request: Request) -> bytes:
    """The raw body of a JSON request. Raises Refused for another type or too much of it."""
    essence = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if essence != JSON:
        raise Refused(Code.UNSUPPORTED_MEDIA_TYPE, f"Send {JSON}.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_JSON_BYTES:
            raise Refused(
                Code.PAYLOAD_TOO_LARGE, f"A JSON body has at most {MAX_JSON_BYTES} bytes."
            )
    return bytes(body)


def json_text(body: dict[str, Any]) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def json_response(
    body: dict[str, Any] | str, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    text = body if isinstance(body, str) else json_text(body)
    return Response(text.encode(), status, headers, JSON)


_WAIT_MOST: Final = 25.0
_LOOK_SECONDS: Final = 5.0
_LOOKS_PER_SECOND: Final = 100
_COME_BACK_SECONDS: Final = (2, 10)


def wait_seconds(request: Request) -> float:
    """How long the client would wait: `Prefer: wait=N` or `?wait=N`, at most 25 s; else 0.

    A preference that cannot be read is no error (RFC 7240). Raises Refused for a bad parameter.
    """
    text = request.query_params.get("wait")
    if text is not None:
        if not text.isascii() or not text.isdigit() or len(text) > 9:
            raise _bad_parameter("wait", "must be a number of seconds")
        return min(float(text), _WAIT_MOST)
    for preference in ",".join(request.headers.getlist("prefer")).split(","):
        name, _, value = preference.partition("=")
        value = value.partition(";")[0].strip().strip('"')
        if name.strip().lower() == "wait" and value.isascii() and value.isdigit():
            return min(float(value[:9]), _WAIT_MOST)
    return 0.0


async def wait_for(
    here: Services, topic: Topic, seconds: float, done: Callable[[], Awaitable[bool]]
) -> float:
    """Return once `done` says so, or after `seconds`; how long it may have taken at most.

    No database connection is held between two looks. With too many waiting already it returns at
    once.
    """
    if seconds <= 0 or here.waiters >= here.settings.max_waiters or await done():
        return 0.0
    here.waiters += 1
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    try:
        subscription = await here.follower.subscribe(topic)
        try:
            while not here.shutting_down.is_set() and not await done():
                left = deadline - clock()
                if left <= 0:
                    break
                with suppress(TimeoutError):
                    # A look is for what the log did not tell; many waiters look less often.
                    look = _LOOK_SECONDS * max(
                        1.0, here.waiters / _LOOKS_PER_SECOND / _LOOK_SECONDS
                    )
                    async with asyncio.timeout(min(left, look)):
                        await subscription.wake.wait()
                subscription.take()
        finally:
            here.follower.leave(subscription)
    finally:
        here.waiters -= 1
    return seconds


def waited_headers(here: Services, waited: float) -> dict[str, str]:
    """What an answer tells about a wait of so many seconds. When this process ends, all who wait
    are answered in one moment: their return is spread over the next seconds."""
    headers = {"Preference-Applied": f"wait={waited:g}"} if waited else {}
    if waited and here.shutting_down.is_set():
        headers["Retry-After"] = str(random.randint(*_COME_BACK_SECONDS))  # noqa: S311
    return headers


async def poll_after(
    here: Services, subject: UUID, *, kind: str, recipe: str | None, queue: str, waits: bool
) -> dict[str, str]:
    """`Retry-After` for what has not changed: from memory, but for a look now and then."""
    if here.forecaster.stale:
        async with db.acquire(here.pool) as connection:
            await here.forecaster.outlook(connection, queue)
    after = here.forecaster.poll_after(subject, kind=kind, recipe=recipe, queue=queue, waits=waits)
    return {"Retry-After": str(round(after))}


def known_parameters(request: Request, *names: str) -> None:
    """A query parameter that we do not know is an error: a misspelt filter must not be ignored."""
    unknown = [name for name in request.query_params if name not in names]
    if unknown:
        raise Refused(
            Code.UNKNOWN_PARAMETER,
            f"Known here: {', '.join(names) or 'none'}.",
            errors=[{"parameter": name, "detail": "is not known"} for name in unknown],
        )


class Failed(BaseModel):
    """Why something failed."""

    code: str
    title: str
    detail: str
    advice: str
    retryable: bool
    limit: dict[str, Any] | None = Field(
        default=None, description="What was allowed and what was seen."
    )


class OutputBody(BaseModel):
    """How long one output took; those of one pass are made together and overlap."""

    name: str
    seconds: float


class SegmentBody(BaseModel):
    """A stretch of time; together they are the whole."""

    name: str
    start: datetime
    end: datetime
    seconds: float
    attempt: int | None
    worker: str | None
    reason: str | None
    outputs: list[OutputBody] = Field(description="What the last encode made; empty elsewhere.")


class MoveBody(BaseModel):
    """A logged change of state, or the beginning of a stage."""

    model_config = ConfigDict(serialize_by_alias=True)

    subject: str
    job: str | None
    from_: str | None = Field(alias="from")
    to: str
    stage: str | None
    at: datetime
    attempt: int | None
    worker: str | None
    reason: str | None


class TimelineBody(BaseModel):
    """Where the time went. The segments sum to the total."""

    schema_version: Literal[1]
    id: str
    state: str
    total_seconds: float
    sentence: str
    segments: list[SegmentBody]
    moves: list[MoveBody]


def shown_error(stored: dict[str, Any] | None) -> dict[str, Any] | None:
    """A stored failure in today's words: the code is what was stored, its sentence is the
    table's."""
    if stored is None or stored.get("code") not in BY_NAME:
        return stored
    code = BY_NAME[stored["code"]]
    return Problem(code, stored.get("detail", ""), stored.get("limit")).as_dict()


def iso_time(value: datetime | None) -> str | None:
    """RFC 3339 in UTC."""
    return None if value is None else value.astimezone(UTC).isoformat().replace("+00:00", "Z")


def parse_body(model: type[M], raw: bytes) -> M:
    """A JSON body by its model. Raises Refused with every fault and its path."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        faults = error.errors()
        if any(fault["type"] == "json_invalid" for fault in faults):
            raise Refused(Code.MALFORMED_REQUEST, "The body is not JSON.") from None
        raise Refused(
            Code.INVALID_REQUEST,
            f"{len(faults)} field(s) are not valid.",
            errors=pointers(faults),
        ) from None


def pointers(faults: Iterable[Any]) -> list[dict[str, str]]:
    """Pydantic's faults as JSON pointers with a sentence each."""
    return [
        {
            "pointer": "".join(
                f"/{_escaped(p)}" for p in fault["loc"] if p not in ("body", "[key]")
            ),
            "code": fault["type"],
            "detail": fault["msg"],
        }
        for fault in faults
    ]


def _escaped(part: object) -> str:
    return str(part).replace("~", "~0").replace("/", "~1")  # RFC 6901


def idempotency_key(
    request: Request, sender: Caller, fingerprint: bytes, *, route: str
) -> idempotency.Key | None:
    """The Idempotency-Key of a create in its scope. Raises Refused."""
    header = request.headers.get("idempotency-key")
    if header is None:
        return None
    key = idempotency.parse(header)
    return idempotency.Key(sender.tenant_id, request.method, route, key, fingerprint)


def plain_text(value: str) -> str:
    """What PostgreSQL and UTF-8 can hold; a validator for Pydantic."""
    if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
        raise PydanticCustomError("text", "must not contain U+0000 or half of a surrogate pair")
    return value


def etags(request: Request, header: str) -> set[str]:
    """The tags of If-None-Match or If-Match, compared weakly: without what marks them weak."""
    return {
        tag.strip().removeprefix("W/") for tag in request.headers.get(header, "").split(",") if tag
    }


def if_match(request: Request, etag: str) -> None:
    """Raise Refused unless the client has seen the present state of what it changes."""
    given = etags(request, "if-match")
    if not given:
        raise Refused(Code.PRECONDITION_REQUIRED)
    if etag.removeprefix("W/") not in given and "*" not in given:
        raise Refused(Code.PRECONDITION_FAILED)


def chosen(request: Request, name: str, known: type[StrEnum]) -> list[str] | None:
    """Values of a filter that takes several, separated by commas. Raises Refused."""
    text = request.query_params.get(name)
    if text is None:
        return None
    values = text.split(",")
    unknown = [v for v in values if v not in set(known)]
    if unknown:
        raise Refused(
            Code.UNKNOWN_PARAMETER,
            f"{name} takes {', '.join(known)}.",
            errors=[{"parameter": name, "detail": f"{v!r} is not one of them"} for v in unknown],
        )
    return values


def whole_number(request: Request, name: str, *, default: int, most: int) -> int:
    """A parameter that takes a number from 1, lowered to `most`. Raises Refused."""
    text = request.query_params.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        raise _bad_parameter(name, "must be a number from 1")
    return min(int(text), most)


def worded(request: Request, name: str) -> str | None:
    """A filter that takes one word. Raises Refused for what no row could hold."""
    text = request.query_params.get(name)
    if text is not None and (not 0 < len(text) <= 128 or "\0" in text):
        raise _bad_parameter(name, "must be a word of at most 128 characters")
    return text


def moment(request: Request, name: str) -> datetime | None:
    """A filter that takes a time, RFC 3339; without an offset it is UTC. Raises Refused."""
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        # A plus sign that was not escaped arrives as a space.
        found = datetime.fromisoformat(text.strip().replace(" ", "+"))
    except ValueError:
        raise _bad_parameter(name, "must be a time such as 2026-01-31T12:00:00Z") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list, newest first: ids sort by time, so a cursor is where a page ended.

    A cursor is sealed, so that nobody comes to rely on what is in it, and good only for the list,
    the tenant and the filters that it was given out with.
    """

    limit: int
    before: UUID | None
    _seal: AESSIV
    _about: list[bytes]

    @classmethod
    def of(cls, request: Request, tenant_id: str) -> Page:
        """From `limit` (default 50, at most 200) and `cursor`. Raises Refused."""
        limit = whole_number(request, "limit", default=50, most=200)
        filters = sorted(
            (k, v) for k, v in request.query_params.items() if k not in ("cursor", "limit")
        )
        about = [tenant_id.encode(), request.url.path.encode(), urlencode(filters).encode()]
        key = hmac.digest(services(request).installation.pepper, b"cursor", "sha256")
        seal = AESSIV(key)
        text = request.query_params.get("cursor")
        before = None
        if text is not None:
            try:
                before = UUID(bytes=seal.decrypt(urlsafe_b64decode(text + "=" * 3), about))
            except (InvalidTag, ValueError):
                raise _bad_parameter(
                    "cursor", "is not one that this list gave out with these filters"
                ) from None
        return cls(limit, before, seal, about)

    def response(
        self, request: Request, rows: Sequence[Any], shown: Sequence[dict[str, Any]]
    ) -> Response:
        """The page; `rows` holds one more than the limit when there is a next one."""
        cursor = None
        headers = {"Cache-Control": "private, no-cache"}
        if len(rows) > self.limit:
            last: UUID = rows[self.limit - 1]["id"]
            sealed = self._seal.encrypt(last.bytes, self._about)
            cursor = urlsafe_b64encode(sealed).rstrip(b"=").decode()
            kept = {k: v for k, v in request.query_params.items() if k != "cursor"}
            query = urlencode({**kept, "cursor": cursor})
            headers["Link"] = f'<{request.url.path}?{query}>; rel="next"'
        body = {
            "schema_version": 1,
            "data": list(shown[: self.limit]),
            "next_cursor": cursor,
        }
        return json_response(body, 200, headers)


Ask = Callable[[db.Connection, str, Page], Awaitable[list[db.Row]]]


async def listed(
    request: Request,
    scope: str,
    filters: Sequence[str],
    ask: Ask,
    show: Callable[[db.Row], dict[str, Any]],
) -> Response:
    """One page of a list. `ask` gets the connection, the tenant and the page, and reads one row
    more than the page holds. Raises Refused."""
    sender = await caller(request, scope)
    known_parameters(request, "limit", "cursor", *filters)
    page = Page.of(request, sender.tenant_id)
    async with db.acquire(services(request).pool) as connection:
        rows = await ask(connection, sender.tenant_id, page)
    return page.response(request, rows, [show(row) for row in rows])


def common_filters(request: Request, states: type[StrEnum]) -> dict[str, Any]:
    """What lists of media and jobs are both filtered by. Raises Refused."""
    return {
        "states": chosen(request, "state", states),
        "kind": worded(request, "kind"),
        "error_code": worded(request, "error_code"),
        "created_after": moment(request, "created_after"),
        "created_before": moment(request, "created_before"),
    }


def shown_timeline(
    found: Sequence[timeline.Segment],
    moves: Sequence[db.Row],
    *,
    state: str,
    outputs: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Segments, their sum, one sentence, and the moves that they come from.

    The last encode tells how long each of the `outputs` took in it. What one pass makes is made
    together, so these may overlap.
    """
    encode = max((n for n, s in enumerate(found) if s.name == "encode"), default=None)
    made = [
        {"name": o["name"], "seconds": round(o["seconds"], 6)}
        for o in outputs
        if o["seconds"] is not None
    ]
    return {
        "state": state,
        "total_seconds": round(sum(s.seconds for s in found), 6),
        "sentence": timeline.sentence(found, state=state),
        "segments": [
            {
                "name": s.name,
                "start": iso_time(s.start),
                "end": iso_time(s.end),
                "seconds": round(s.seconds, 6),
                "attempt": s.attempt,
                "worker": s.worker,
                "reason": s.detail,
                "outputs": made if n == encode else [],
            }
            for n, s in enumerate(found)
        ],
        "moves": [
            {
                "subject": m["subject"],
                "job": m["job_id"] and ids.encode(ids.JOB, m["job_id"]),
                "from": m["from_state"],
                "to": m["to_state"],
                "stage": m["stage"],
                "at": iso_time(m["at"]),
                "attempt": m["attempt"],
                "worker": m["worker"],
                "reason": m["code"],
            }
            for m in moves
        ],
    }


def _bad_parameter(name: str, detail: str) -> Refused:
    return Refused(
        Code.UNKNOWN_PARAMETER,
        f"{name} {detail}.",
        errors=[{"parameter": name, "detail": detail}],
    )

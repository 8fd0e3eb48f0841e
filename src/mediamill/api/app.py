"""The application: routes, their documentation, and the thin layer around every request."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, Final
from uuid import uuid4

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mediamill import __version__, failure_pages
from mediamill.api import (
    dashboard,
    dead_letters,
    document,
    figures,
    health,
    inbox,
    jobs,
    keys,
    media,
    multipart,
    play,
    problems,
    queues,
    recipes,
    resumable,
    settings,
    storage,
    storage_events,
    streams,
    subtitles,
    webhooks,
)
from mediamill.api.services import Services, TimelineBody
from mediamill.failures import BY_NAME, Code, Refused
from mediamill.observability import Metrics
from mediamill.recipes import Recipe

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9_-]{8,64}")
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class _Route:
    """One route of /v1: `status` of success, `model` of its body, `more` for the schema."""

    path: str
    method: str
    endpoint: Endpoint
    status: int = 200
    model: Any = None
    more: dict[str, Any] = field(default_factory=dict)


class _UploadId(StringConvertor):
    """An upload's id, which is not the name of the collection beside it."""

    regex = "(?!multipart$)[^/]+"


register_url_convertor("upload", _UploadId())


def create_app(services: Services) -> FastAPI:
    """The API over these services; the caller owns and closes them."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield

    app = FastAPI(
        title="Mediamill",
        version=__version__,
        summary="Asynchronous media processing behind a durable queue.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        exception_handlers=problems.HANDLERS,
    )
    app.state.services = services
    app.state.letters = inbox.Letters(maxlen=inbox.KEPT)
    app.state.metrics = Metrics()
    app.state.measured_at = float("-inf")
    app.state.storage_asked_at = float("-inf")
    app.state.storage_seen = {"status": "unknown"}
    for route in _ROUTES:
        _add(app, route)
    for path, endpoint, methods in _PLAIN:
        app.router.routes.append(Route(path, endpoint, methods=methods))
    app.add_middleware(_Around, metrics=app.state.metrics)
    app.openapi = partial(document.describe, app)  # type: ignore[method-assign]
    return app


async def _problem_page(request: Request) -> Response:
    """What a problem's `type` leads to: its page, as HTML for a browser and else as Markdown."""
    code = BY_NAME.get(request.path_params["code"])
    if code is None:
        raise Refused(Code.NOT_FOUND)
    headers = {"Cache-Control": "public, max-age=3600", "Vary": "Accept"}
    if "text/html" in request.headers.get("accept", ""):
        headers["Content-Security-Policy"] = "default-src 'none'; style-src 'unsafe-inline'"
        return HTMLResponse(failure_pages.page(code), headers=headers)
    text = failure_pages.markdown(code)
    return Response(text, media_type="text/markdown; charset=utf-8", headers=headers)


def _slot_schema() -> dict[str, Any]:
    """What opens a slot: an exact size, or for a form the most that it takes."""
    schema = media.NewMedia.model_json_schema()
    most = media.NewMediaUpTo.model_json_schema()["properties"]["max_size"]
    return {
        **schema,
        "properties": {**schema["properties"], "max_size": most},
        "required": [],
        "oneOf": [{"required": ["size"]}, {"required": ["max_size"]}],
    }


_CREATE_BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _slot_schema()},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
                        **media.NewForm.model_json_schema()["properties"],
                    },
                }
            },
        },
    }
}


def _query(*filters: str) -> dict[str, Any]:
    """The parameters of a list in the schema: its page and its filters."""
    names = [("limit", "integer"), ("cursor", "string"), *((name, "string") for name in filters)]
    return {
        "parameters": [
            {"name": name, "in": "query", "schema": {"type": kind}} for name, kind in names
        ]
    }


def _stream(*names: str) -> dict[str, Any]:
    """The parameters of an event stream in the schema, and what it answers."""
    return {
        "parameters": [
            {"name": name, "in": "query", "schema": {"type": "string"}}
            for name in (*names, "tenant", "expires", "key_id", "signature")
        ]
        + [{"name": "Last-Event-ID", "in": "header", "schema": {"type": "string"}}],
        "responses": {
            "200": {
                "description": "Events as they happen; each `data` is the body of a webhook.",
                "content": {"text/event-stream": {}},
            },
            "204": {"description": "It has ended, and the client has heard so."},
        },
    }


def _body(model: type[BaseModel]) -> dict[str, Any]:
    """A JSON body in the schema, for a route that reads it by itself."""
    content = {"application/json": {"schema": _inlined(model.model_json_schema())}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without `$defs`: inside an OpenAPI document its references would lead nowhere.

    Discriminators go too, since OpenAPI allows them over referenced schemas only.
    """
    away = {"$defs", "discriminator"}
    named = schema.get("$defs", {})

    def inline(part: Any) -> Any:
        match part:
            case {"$ref": str(name)}:
                return inline(named[name.rpartition("/")[2]])
            case dict():
                return {key: inline(value) for key, value in part.items() if key not in away}
            case list():
                return [inline(value) for value in part]
            case _:
                return part

    inlined: dict[str, Any] = inline(schema)
    return inlined


def _header(name: str, says: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": says, "schema": {"type": "string"}}


_WAIT: Final[dict[str, Any]] = {
    "parameters": [
        {
            "name": "wait",
            "in": "query",
            "description": "Seconds to wait for a change, at most 25.",
            "schema": {"type": "integer", "minimum": 0, "maximum": 999_999_999},
        },
        _header("Prefer", "`wait=N` is the same as the parameter."),
        _header("If-None-Match", "The ETag of the last answer: 304 while nothing has changed."),
    ],
    "responses": {"304": {"description": "Nothing has changed."}},
}


def _also(status: int, says: str) -> dict[str, Any]:
    """Another success, for the schema."""
    return {"responses": {str(status): {"description": says}}}


_IF_MATCH: Final = {
    "parameters": [_header("If-Match", "The ETag of what is changed; without it 428.")],
    "responses": {
        "412": {"description": "It was changed by somebody else."},
        "428": {"description": "If-Match is missing."},
    },
}
_SUBTITLES: Final[dict[str, Any]] = {
    "parameters": [
        {
            "name": "label",
            "in": "query",
            "description": "What a player shows for them.",
            "schema": {"type": "string", "maxLength": 80},
        }
    ],
    "requestBody": {
        "required": True,
        "content": {kind: {"schema": {"type": "string"}} for kind in subtitles.TYPES},
    },
}
_WAIT_ONLY: Final = {"parameters": _WAIT["parameters"][:2]}
_ONCE: Final = _header(
    "Idempotency-Key", "A repeat with the same key is answered again and not done again."
)
# Creates. Others of POST are safe to repeat by what they do.
_KEYED: Final = frozenset(
    {
        media.create_media,
        media.process_media,
        jobs.create_job,
        webhooks.create_endpoint,
        webhooks.rotate_secret,
        webhooks.test_endpoint,
    }
)
_ROUTES: Final[tuple[_Route, ...]] = (
    _Route(
        "/v1/media",
        "POST",
        media.create_media,
        201,
        media.SlotBody,
        {**_CREATE_BODY, **_also(202, "The file of a form is accepted and queued.")},
    ),
    _Route("/v1/media", "GET", media.list_media, 200, media.MediaPage, _query(*media.FILTERS)),
    _Route("/v1/media/{media_id}", "GET", media.read_media, 200, media.MediaBody, _WAIT),
    _Route("/v1/media/{media_id}", "DELETE", media.delete_media, 202),
    _Route(
        "/v1/media/{media_id}/complete",
        "POST",
        media.complete_media,
        202,
        media.MediaBody,
        {**_WAIT_ONLY, **_also(200, "There is no work ahead of it any more.")},
    ),
    _Route("/v1/media/{media_id}/timeline", "GET", media.read_timeline, 200, TimelineBody),
    _Route(
        "/v1/media/{media_id}/process",
        "POST",
        media.process_media,
        202,
        media.MediaBody,
        _body(media.Process),
    ),
    _Route(
        "/v1/media/{media_id}/original",
        "GET",
        media.read_original,
        more={
            "responses": {
                "200": {
                    "description": "The bytes.",
                    "content": {"application/octet-stream": {"schema": {"type": "string"}}},
                }
            }
        },
    ),
    _Route("/v1/media/{media_id}/variants/{name:path}", "GET", media.read_variant, 307),
    _Route("/v1/media/{media_id}/subtitles", "GET", subtitles.list_subtitles),
    _Route(
        "/v1/media/{media_id}/subtitles/{language}",
        "PUT",
        subtitles.put_subtitles,
        200,
        subtitles.SubtitlesBody,
        _SUBTITLES,
    ),
    _Route("/v1/media/{media_id}/subtitles/{language}", "DELETE", subtitles.delete_subtitles, 204),
    _Route(
        "/v1/media/{media_id}/events", "GET", streams.media_events, more=_stream("last_event_id")
    ),
    _Route(
        "/v1/uploads/multipart",
        "POST",
        multipart.open_multipart,
        201,
        None,
        _body(media.NewMedia),
    ),
    _Route("/v1/uploads/{upload_id}/parts", "GET", multipart.list_parts),
    _Route(
        "/v1/uploads/{upload_id}/parts",
        "POST",
        multipart.sign_parts,
        200,
        None,
        _body(multipart.PartNumbers),
    ),
    _Route(
        "/v1/uploads/{upload_id}/complete",
        "POST",
        multipart.complete_multipart,
        202,
        None,
        _body(multipart.Completed),
    ),
    _Route("/v1/uploads/{upload_id}/abort", "POST", multipart.abort_multipart, 204),
    _Route(
        "/v1/upload-tokens", "POST", multipart.create_token, 201, None, _body(multipart.NewToken)
    ),
    _Route("/v1/recipes", "GET", recipes.list_recipes, 200, recipes.RecipesBody),
    _Route(
        "/v1/recipes/validate",
        "POST",
        recipes.validate_recipe,
        200,
        recipes.Verdict,
        _body(Recipe),
    ),
    _Route(
        "/v1/recipes/dry-run",
        "POST",
        recipes.dry_run,
        200,
        recipes.DryRunBody,
        _body(recipes.DryRun),
    ),
    _Route(
        "/v1/recipes/{name}",
        "GET",
        recipes.read_recipe,
        200,
        recipes.RecipeBody,
        {"parameters": [{"name": "version", "in": "query", "schema": {"type": "integer"}}]},
    ),
    _Route(
        "/v1/jobs",
        "POST",
        jobs.create_job,
        202,
        jobs.JobBody,
        {
            **_body(jobs.NewJob),
            **_WAIT_ONLY,
            **_also(200, "A live job has its dedup key, or it ended while the client waited."),
        },
    ),
    _Route("/v1/jobs", "GET", jobs.list_jobs, 200, jobs.JobPage, _query(*jobs.FILTERS)),
    _Route("/v1/jobs/cancel", "POST", jobs.cancel_matching, 200, jobs.BulkBody, _body(jobs.Bulk)),
    _Route("/v1/jobs/replay", "POST", jobs.replay_matching, 200, jobs.BulkBody, _body(jobs.Bulk)),
    _Route("/v1/jobs/{job_id}", "GET", jobs.read_job, 200, jobs.JobBody, _WAIT),
    _Route("/v1/jobs/{job_id}/timeline", "GET", jobs.read_job_timeline, 200, TimelineBody),
    _Route("/v1/jobs/{job_id}/events", "GET", streams.job_events, more=_stream("last_event_id")),
    _Route(
        "/v1/jobs/{job_id}/cancel",
        "POST",
        jobs.cancel_job,
        202,
        jobs.JobBody,
        _also(200, "It had ended already."),
    ),
    _Route("/v1/jobs/{job_id}/replay", "POST", jobs.replay_job, 202, jobs.JobBody),
    _Route("/v1/events", "GET", streams.tenant_events, more=_stream("last_event_id", "types")),
    _Route(
        "/v1/stream-urls",
        "POST",
        streams.create_stream_url,
        201,
        streams.StreamUrl,
        _body(streams.NewStreamUrl),
    ),
    _Route(
        "/v1/dead-letters",
        "GET",
        dead_letters.list_dead_letters,
        200,
        jobs.JobPage,
        _query(*dead_letters.FILTERS),
    ),
    _Route(
        "/v1/dead-letters/replay",
        "POST",
        dead_letters.replay_dead_letters,
        202,
        dead_letters.ReplayedBody,
        _body(dead_letters.ReplayMany),
    ),
    _Route(
        "/v1/dead-letters/{job_id}", "GET", dead_letters.read_dead_letter, 200, dead_letters.FullJob
    ),
    _Route(
        "/v1/dead-letters/groups", "GET", dead_letters.list_groups, 200, dead_letters.GroupsBody
    ),
    _Route(
        "/v1/dead-letters/{job_id}/discard",
        "POST",
        dead_letters.discard_dead_letter,
        200,
        jobs.JobBody,
    ),
    _Route("/v1/queues", "GET", queues.list_queues, 200, queues.QueuesBody),
    _Route("/v1/queues/{queue}/pause", "POST", queues.pause_queue, 200, queues.OneQueue),
    _Route("/v1/queues/{queue}/resume", "POST", queues.resume_queue, 200, queues.OneQueue),
    _Route(
        "/v1/queues/{queue}/concurrency",
        "PUT",
        queues.cap_queue,
        200,
        queues.OneQueue,
        _body(queues.Cap),
    ),
    _Route(
        "/v1/webhook-endpoints",
        "POST",
        webhooks.create_endpoint,
        201,
        webhooks.NewEndpointBody,
        _body(webhooks.NewEndpoint),
    ),
    _Route(
        "/v1/webhook-endpoints",
        "GET",
        webhooks.list_endpoints,
        200,
        webhooks.EndpointPage,
        _query(),
    ),
    _Route(
        "/v1/webhook-endpoints/{endpoint_id}",
        "GET",
        webhooks.read_endpoint,
        200,
        webhooks.EndpointBody,
    ),
    _Route(
        "/v1/webhook-endpoints/{endpoint_id}",
        "PATCH",
        webhooks.change_endpoint,
        200,
        webhooks.EndpointBody,
        {**_body(webhooks.EndpointChange), **_IF_MATCH},
    ),
    _Route(
        "/v1/webhook-endpoints/{endpoint_id}",
        "DELETE",
        webhooks.delete_endpoint,
        204,
        more=_IF_MATCH,
    ),
    _Route(
        "/v1/webhook-endpoints/{endpoint_id}/rotate-secret",
        "POST",
        webhooks.rotate_secret,
        200,
        webhooks.RotatedBody,
        _body(webhooks.Rotation),
    ),
    _Route(
        "/v1/webhook-endpoints/{endpoint_id}/test",
        "POST",
        webhooks.test_endpoint,
        202,
        webhooks.DeliveryBody,
    ),
    _Route(
        "/v1/webhook-endpoints/{endpoint_id}/recover",
        "POST",
        webhooks.recover_endpoint,
        202,
        webhooks.RecoveredBody,
        _body(webhooks.Recovery),
    ),
    _Route(
        "/v1/webhook-endpoints/{endpoint_id}/deliveries",
        "GET",
        webhooks.list_deliveries,
        200,
        webhooks.DeliveryPage,
        _query("state"),
    ),
    _Route(
        "/v1/deliveries/{delivery_id}", "GET", webhooks.read_delivery, 200, webhooks.FullDelivery
    ),
    _Route(
        "/v1/deliveries/{delivery_id}/redeliver",
        "POST",
        webhooks.redeliver,
        202,
        webhooks.DeliveryBody,
    ),
    _Route("/v1/inbox", "POST", inbox.receive, 204),
    _Route("/v1/inbox", "GET", inbox.read, 200, inbox.LettersBody),
    _Route(
        "/v1/figures",
        "GET",
        figures.read_figures,
        200,
        figures.FiguresBody,
        {
            "parameters": [
                {"name": "minutes", "in": "query", "schema": {"type": "integer", "minimum": 1}}
            ]
        },
    ),
    _Route("/v1/keys", "POST", keys.create_key, 201, keys.NewKeyBody, _body(keys.NewKey)),
    _Route("/v1/keys", "GET", keys.list_keys, 200, keys.KeysBody),
    _Route("/v1/keys/self", "GET", keys.read_self, 200, keys.SelfBody),
    _Route("/v1/keys/{key_id}", "DELETE", keys.revoke_key, 204),
    _Route("/v1/settings", "GET", settings.list_settings, 200, settings.SettingsBody),
    _Route("/v1/storage-checks", "POST", settings.check_storage, 200, settings.ChecksBody),
    _Route("/v1/workers", "GET", queues.list_workers, 200, queues.WorkersBody),
    _Route("/v1/workers/{worker}/drain", "POST", queues.drain_worker, 202),
)
_PLAIN: Final[tuple[tuple[str, Endpoint, list[str]], ...]] = (
    ("/storage/{key:path}", storage.put_object, ["PUT"]),
    ("/storage/{key:path}", storage.get_object, ["GET"]),
    ("/storage/{key:path}", storage.preflight, ["OPTIONS"]),
    ("/v1/uploads", resumable.collection, ["POST", "OPTIONS"]),
    ("/v1/uploads/", resumable.collection, ["POST", "OPTIONS"]),
    (
        "/v1/uploads/{upload_id:upload}",
        resumable.upload,
        ["HEAD", "PATCH", "DELETE", "POST", "OPTIONS"],
    ),
    ("/uppy/{token}/s3/{rest:path}", multipart.uppy, ["GET", "POST", "DELETE", "OPTIONS"]),
    ("/internal/storage-events/{source}", storage_events.receive, ["POST"]),
    ("/internal/storage-events/{source}", storage_events.may_send, ["OPTIONS"]),
    ("/play/{token}/{key:path}", play.get, ["GET"]),
    ("/play/{token}/{key:path}", play.preflight, ["OPTIONS"]),
    ("/ui/session", dashboard.sign_in, ["POST"]),
    ("/ui", dashboard.get, ["GET"]),
    ("/ui/{path:path}", dashboard.get, ["GET"]),
    ("/problems/{code}", _problem_page, ["GET"]),
    ("/livez", health.livez, ["GET"]),
    ("/readyz", health.readyz, ["GET"]),
    ("/metrics", health.metrics, ["GET"]),
)
_TEMPLATES: Final[dict[Any, str]] = {
    **{route.endpoint: route.path for route in _ROUTES},
    **{endpoint: path for path, endpoint, _ in _PLAIN},
}
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_REFUSALS: Final = (400, 401, 403, 404, 409, 410, 413, 415, 422, 503)


def _add(app: FastAPI, route: _Route) -> None:
    """Serve a route by Starlette alone, and document it by FastAPI under the same path.

    The plain route comes first and answers; FastAPI's per-route machinery would double its cost.
    """
    app.router.routes.insert(0, Route(route.path, route.endpoint, methods=[route.method]))
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)", route.path)
    ] + route.more.get("parameters", [])
    if route.endpoint in _KEYED:
        parameters.append(_ONCE)
    problem = {"description": "A problem document (RFC 9457)."}
    app.add_api_route(
        route.path.replace(":path}", "}"),
        route.endpoint,
        methods=[route.method],
        status_code=route.status,
        response_model=route.model,
        responses=dict.fromkeys(_REFUSALS, problem),
        description=route.endpoint.__doc__,
        tags=[route.path.split("/")[2]],
        openapi_extra=route.more | ({"parameters": parameters} if parameters else {}),
    )


class _Around:
    """A request id on every answer, and its time in the metrics under the route's template."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{uuid4().hex}".encode()
        scope["mediamill.request_id"] = request_id.decode()
        began = time.perf_counter()
        status = HTTPStatus.INTERNAL_SERVER_ERROR.value

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            template = _TEMPLATES.get(scope.get("endpoint"), "unknown")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.requests.labels(template, method, str(status)).observe(
                time.perf_counter() - began
            )

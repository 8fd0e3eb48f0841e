"""RFC 9457 problem documents, all from the one table of failures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import structlog
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from mediamill import db
from mediamill.api.services import pointers
from mediamill.failures import Code, Failure, Problem, Refused

log = structlog.get_logger()

MEDIA_TYPE: Final = "application/problem+json"
_RETRY_AFTER_SECONDS: Final = "2"
_BY_STATUS: Final = {
    400: Code.MALFORMED_REQUEST,
    401: Code.UNAUTHENTICATED,
    404: Code.NOT_FOUND,
    405: Code.METHOD_NOT_ALLOWED,
    413: Code.PAYLOAD_TOO_LARGE,
    415: Code.UNSUPPORTED_MEDIA_TYPE,
    416: Code.RANGE_NOT_SATISFIABLE,
    422: Code.INVALID_REQUEST,
}


def problem_response(
    request: Request,
    problem: Problem,
    *,
    errors: list[dict[str, str]] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The answer to a request that cannot be honoured."""
    code = problem.code
    request_id = request.scope.get("mediamill.request_id", "")
    base = request.app.state.services.settings.base_url
    body: dict[str, Any] = {
        "type": f"{base}/problems/{code.code}",
        "title": code.title,
        "status": code.status,
        "detail": problem.detail or code.title,
        "instance": f"urn:request:{request_id}",
        "code": code.code,
        "advice": code.advice,
        "retryable": code.retryable,
        "request_id": request_id,
        "schema_version": 1,
    }
    if problem.limit is not None:
        body["limit"] = problem.limit
    if errors:
        body["errors"] = errors
    given = dict(headers or {})
    if code is Code.UNAUTHENTICATED:
        given.setdefault("WWW-Authenticate", "Bearer")
    if code.status == HTTPStatus.SERVICE_UNAVAILABLE:
        given.setdefault("Retry-After", _RETRY_AFTER_SECONDS)
    given["Cache-Control"] = "no-store"
    if request.scope["path"].startswith("/storage/"):
        given["Access-Control-Allow-Origin"] = "*"  # else a script cannot tell 403 from no network
    return Response(json.dumps(body), code.status, given, MEDIA_TYPE)


async def refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return problem_response(request, error.problem, errors=error.errors, headers=error.headers)


async def failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, Failure)
    return problem_response(request, error.problem)


async def unavailable(request: Request, error: Exception) -> Response:
    log.warning("database_unavailable", error=type(error).__name__)
    return problem_response(request, Problem(Code.DATABASE_UNAVAILABLE))


async def invalid(request: Request, error: Exception) -> Response:
    """Every fault of a body, each with its path; malformed JSON is a 400."""
    assert isinstance(error, RequestValidationError)
    faults = error.errors()
    if any(fault["type"] == "json_invalid" for fault in faults):
        return problem_response(request, Problem(Code.MALFORMED_REQUEST, "The body is not JSON."))
    return problem_response(
        request,
        Problem(Code.INVALID_REQUEST, f"{len(faults)} field(s) are not valid."),
        errors=pointers(faults),
    )


async def http_error(request: Request, error: Exception) -> Response:
    """The framework's own 404 and 405 in our vocabulary."""
    assert isinstance(error, HTTPException)
    code = _BY_STATUS.get(error.status_code, Code.INTERNAL)
    headers = dict(error.headers or {})
    if code is Code.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_allowed(request))  # the framework names one route's only
    return problem_response(request, Problem(code), headers=headers)


def _allowed(request: Request) -> list[str]:
    """Every method that some route takes under this address."""
    routes = [r for r in request.app.routes if isinstance(r, Route)]
    here = [r for r in routes if r.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in here for method in route.methods or ()})


async def unexpected(request: Request, error: Exception) -> Response:
    log.error("unhandled", exc_info=error, path=request.scope.get("path"))
    # This answer is sent around the layer that puts the id on every other one.
    headers = {"X-Request-Id": request.scope.get("mediamill.request_id", "")}
    return problem_response(request, Problem(Code.INTERNAL), headers=headers)


async def gone_away(_request: Request, _error: Exception) -> Response:
    """The client hung up while sending; nobody reads this answer."""
    return Response(status_code=400)


HANDLERS: Final[dict[int | type[Exception], Any]] = {
    Refused: refused,
    Failure: failed,
    RequestValidationError: invalid,
    HTTPException: http_error,
    ClientDisconnect: gone_away,
    db.Unavailable: unavailable,
    Exception: unexpected,
}

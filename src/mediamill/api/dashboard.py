"""/ui: the dashboard's files, and the key that a browser on this machine may have.

The pages are a client of the public API alone. They are built when the package is installed; an
installation without them says how to get them.
"""

from __future__ import annotations

import mimetypes
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from ipaddress import ip_address
from pathlib import PurePosixPath
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from mediamill.api.services import json_response, services
from mediamill.failures import Code, Refused

_START: Final = "index.html"
_YEAR: Final = "public, max-age=31536000, immutable"
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
# Variants and uploads may lie in a bucket of any name; scripts are our own files alone. The
# player's controls have their styles in their shadow trees, which counts as inline.
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src * data: blob:; media-src * blob:; connect-src *; worker-src blob:; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_NOT_BUILT: Final = (
    "The dashboard is not in this installation. With Node.js: npm ci and npm run build in the "
    "folder dashboard/ of the source. A wheel has it."
)


async def get(request: Request) -> Response:
    """A file of the dashboard; every other address below /ui is one of its pages."""
    path = request.path_params.get("path", "")
    found = _files().get(path)
    if found is None and PurePosixPath(path).parts[:1] == ("assets",):
        raise Refused(Code.NOT_FOUND)
    found = found or _files().get(_START)
    if found is None:
        return Response(_NOT_BUILT, 404, _HEADERS, "text/plain; charset=utf-8")
    content_type, data = found
    caching = _YEAR if path.startswith("assets/") else "no-cache"
    return Response(data, 200, {**_HEADERS, "Cache-Control": caching}, content_type)


async def sign_in(request: Request) -> Response:
    """The key that `mediamill up` made, for a browser on this machine, where that is allowed.

    Only for a page of ours that was reached under a local name: neither another site nor a name
    that was made to point here gets it.
    """
    here = services(request)
    path = here.settings.key_file
    if not here.settings.dashboard_sign_in or not _from_here(request) or not path.exists():
        raise Refused(Code.UNAUTHENTICATED, "Sign in with an API key.")
    body = {"schema_version": 1, "api_key": path.read_text("utf-8").strip()}
    return json_response(body, 200, {"Cache-Control": "no-store"})


def _from_here(request: Request) -> bool:
    if any(name in request.headers for name in ("forwarded", "x-forwarded-for", "via")):
        return False
    if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return False
    origin = request.headers.get("origin")
    if origin is not None and origin != f"{request.url.scheme}://{request.url.netloc}":
        return False
    host = request.client.host if request.client else ""
    try:
        local = ip_address(host).is_loopback
    except ValueError:
        local = False
    return local and request.url.hostname in _LOCAL_NAMES


@cache
def _files() -> dict[str, tuple[str, bytes]]:
    """Every file of the dashboard with its type: some hundred kilobytes."""
    found: dict[str, tuple[str, bytes]] = {}

    def add(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                add(entry, f"{prefix}{entry.name}/")
            else:
                kind = mimetypes.guess_type(entry.name)[0] or "application/octet-stream"
                found[prefix + entry.name] = (kind, entry.read_bytes())

    built: Any = resources.files("mediamill").joinpath("dashboard")
    if built.is_dir():
        add(built, "")
    return found

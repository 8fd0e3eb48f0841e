"""/play: playlists and what they name, for players that know relative addresses and no API keys.

The signed part stands in the path, before the name, and covers a whole set: whatever a playlist
names beside itself is reached under the same grant. Playlists come from here; a file of sound or
picture is a redirect to its own signed address in storage.
"""

from __future__ import annotations

import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from mediamill import db, signing, storage, variants
from mediamill.api.services import Services, services
from mediamill.failures import Code, Refused

PLAYLISTS: Final = frozenset({"application/vnd.apple.mpegurl", "application/dash+xml", "text/vtt"})
_MOST_BYTES: Final = 8 << 20
_PARTS: Final = 5
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Cross-Origin-Resource-Policy": "cross-origin",
    "Referrer-Policy": "no-referrer",
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Expose-Headers": "ETag",
}


def address(here: Services, key: str, expires_at: datetime) -> str:
    """Where a player finds the published object `key`, and all that stands beside it in its set."""
    keyring = here.installation.keyring
    token = signing.token(keyring, _grant(key, int(expires_at.timestamp())))
    return f"{here.settings.base_url}/play/{token}/{quote(key.removeprefix('media/'))}"


async def get(request: Request) -> Response:
    """Serve a playlist, or lead to a file, under a grant for its set."""
    here = services(request)
    key = f"{storage.MEDIA}/{request.path_params['key']}"
    expires, _, rest = request.path_params["token"].partition(".")
    key_id, _, signature = rest.partition(".")
    until = int(expires) if expires.isascii() and expires.isdigit() and len(expires) < 12 else 0
    try:
        grant = _grant(key, until)
    except ValueError:
        raise Refused(Code.NOT_FOUND) from None
    signing.verify(
        here.installation.keyring, grant, key_id=key_id, signature=signature, now=time.time()
    )
    async with db.acquire(here.pool) as connection:
        row = await variants.by_key(connection, key)
    if row is None:
        raise Refused(Code.NOT_FOUND)
    left = max(0, int(until - time.time()))
    if row["content_type"] not in PLAYLISTS or row["bytes"] > _MOST_BYTES:
        signed = here.storage.sign_get(
            key,
            expires_at=datetime.fromtimestamp(until, UTC),
            content_type=row["content_type"],
            filename=row["name"],
        )
        headers = {**_HEADERS, "Location": signed.url, "Cache-Control": f"private, max-age={left}"}
        return Response(status_code=302, headers=headers)
    etag = f'"{row["sha256"]}"'
    headers = {**_HEADERS, "ETag": etag, "Cache-Control": f"private, max-age={left}, immutable"}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(await _read(here, key), 200, headers, row["content_type"])


async def preflight(request: Request) -> Response:
    """Browsers ask before they send a Range to another origin."""
    return Response(
        status_code=204,
        headers={
            "Access-Control-Allow-Origin": "*",
            "Access-Control-Allow-Methods": "GET, HEAD",
            "Access-Control-Allow-Headers": "range, if-none-match",
            "Access-Control-Max-Age": "7200",
        },
    )


async def _read(here: Services, key: str) -> bytes:
    stored = await here.storage.stat(key)
    if stored is None:
        raise Refused(Code.NOT_FOUND)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "playlist"
        await here.storage.fetch(key, stored.version, path)
        return path.read_bytes()


def _grant(key: str, expires: int) -> signing.Grant:
    """A grant for the set that holds the key. Raises ValueError for a key that is in none."""
    parts = key.split("/")
    if len(parts) <= _PARTS or any(part in ("", ".", "..") for part in parts):
        raise ValueError(key)
    return signing.Grant("PLAY", "/".join(parts[:_PARTS]), expires)

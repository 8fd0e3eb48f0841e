"""A small client of the HTTP API: what the command line and the demonstration use.

It needs an HTTP library and nothing else of this package.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx

Body = dict[str, Any]
_CHUNK = 1 << 18


class Problem(Exception):
    """The API refused a request; `body` is its problem document."""

    def __init__(self, status: int, body: Body) -> None:
        super().__init__(f"{body.get('code', status)}: {body.get('detail', '')}")
        self.status = status
        self.body = body


class Client:
    """Speaks to one installation with one API key."""

    def __init__(self, url: str, api_key: str, *, timeout_seconds: float = 30.0) -> None:
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=timeout_seconds,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def upload(
        self,
        path: Path,
        *,
        content_type: str | None = None,
        recipe: str = "web",
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Body:
        """Open a slot, send the file straight to storage, and complete. Raises Problem."""
        size = path.stat().st_size
        wanted: Body = {"size": size, "filename": path.name, "recipe": recipe}
        if content_type is not None:
            wanted["content_type"] = content_type
        slot = self._ask("POST", "/v1/media", json=wanted)
        upload = slot["upload"]

        def chunks() -> Iterator[bytes]:
            sent = 0
            with path.open("rb") as file:
                while data := file.read(_CHUNK):
                    yield data
                    sent += len(data)
                    if on_progress is not None:
                        on_progress(sent, size)

        # The signed address is the authority; the API key does not go there.
        with httpx.Client(timeout=None) as storage:
            answer = storage.request(
                upload["method"], upload["url"], headers=upload["headers"], content=chunks()
            )
        _raise_for_problem(answer)
        return self._ask("POST", f"{slot['links']['self']}/complete")

    def media(self, media_id: str) -> Body:
        return self._ask("GET", f"/v1/media/{media_id}")

    def timeline(self, media_id: str) -> Body:
        return self._ask("GET", f"/v1/media/{media_id}/timeline")

    def stream(
        self, path: str, *, types: str | None = None, last: str | None = None
    ) -> Iterator[tuple[str | None, str, bytes]]:
        """The events of a stream as id, type and data, until it closes. Raises Problem."""
        query = {} if types is None else {"types": types}
        headers = {} if last is None else {"Last-Event-ID": last}
        with self._http.stream("GET", path, params=query, headers=headers, timeout=60) as answer:
            if answer.status_code >= 400:
                answer.read()
            _raise_for_problem(answer)
            number, type_, data = None, "message", ""
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    number = value
                elif name == "event":
                    type_ = value
                elif name == "data":
                    data = value
                elif not line:
                    if data:
                        yield number, type_, data.encode()
                    number, type_, data = None, "message", ""

    def wait(
        self,
        media_id: str,
        *,
        timeout_seconds: float,
        poll_seconds: float = 0.2,
        on_change: Callable[[Body], None] | None = None,
    ) -> Body:
        """Ask until the media is at an end. Raises TimeoutError; the work goes on."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            body = self.media(media_id)
            if on_change is not None:
                on_change(body)
            if body["state"] in ("ready", "failed", "expired"):
                return body
            if time.monotonic() > deadline:
                raise TimeoutError(f"{media_id} is still {body['state']}")
            time.sleep(poll_seconds)

    def download(self, variant: Body) -> bytes:
        """The bytes of a variant, by its signed address."""
        with httpx.Client(timeout=60) as storage:
            answer = storage.get(variant["url"])
        _raise_for_problem(answer)
        return answer.content

    def _ask(self, method: str, path: str, **given: Any) -> Body:
        answer = self._http.request(method, path, **given)
        _raise_for_problem(answer)
        body: Body = answer.json()
        return body


def _raise_for_problem(answer: httpx.Response) -> None:
    if answer.status_code < 400:
        return
    try:
        body = answer.json()
    except ValueError:
        body = {"detail": answer.text[:200]}
    raise Problem(answer.status_code, body)

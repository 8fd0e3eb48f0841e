"""`mediamill listen`: webhooks for a server on a developer's machine, over the event stream.

No tunnel is needed: the events come over a connection that this process opens, and are signed here
and sent on to the address that the developer names.
"""

from __future__ import annotations

import base64
import json
import random
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx2 as httpx

from mediamill import events, ids, webhooks
from mediamill.client import Client, ConnectionFailed, Problem
from mediamill.failures import BY_NAME

_PAUSE_SECONDS: Final = (1.0, 4.0)
_SKIPPED: Final = frozenset({"snapshot", "reset"})

Say = Callable[[str], None]


def fresh_secret() -> str:
    """A secret for one session."""
    return f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"


@dataclass(slots=True)
class Forwarder:
    """Signs events and sends them on; notes each one if there is a file for it."""

    url: str
    secret: str
    say: Say
    record: Path | None = None

    def forward(self, body: bytes) -> int | None:
        """Sign and send one event; the status of the answer, None if there was none."""
        told: dict[str, Any] = json.loads(body)
        headers = webhooks.sign(
            "hmac",
            [webhooks.read_secret(self.secret)],
            message_id=told["id"],
            timestamp=int(time.time()),
            body=body,
        )
        headers["content-type"] = "application/json"
        if self.record is not None:
            with self.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"body": body.decode()}, ensure_ascii=False) + "\n")
        begun = time.monotonic()
        try:
            answer = httpx.post(self.url, content=body, headers=headers, timeout=15.0)
        except httpx.HTTPError as error:
            self.say(f"{told['type']:20} {told['id']}  no answer: {error}")
            return None
        took = (time.monotonic() - begun) * 1000
        self.say(f"{told['type']:20} {told['id']}  {answer.status_code} in {took:.0f} ms")
        return answer.status_code


def listen(
    client: Client, forwarder: Forwarder, *, types: str | None = None, most: int | None = None
) -> int:
    """Forward every event of the tenant as it happens, until interrupted or `most` were; how many.

    Comes back after a cut where it was. Raises Problem when the key is refused.
    """
    last: str | None = None
    count = 0
    while True:
        try:
            for event in client.events(types=types, after=last):
                last = event.cursor or last
                if event.type in _SKIPPED or event.cursor is None:
                    continue
                forwarder.forward(event.raw)
                count += 1
                if most is not None and count >= most:
                    return count
        except Problem as problem:
            if not problem.retryable:
                raise
            forwarder.say(str(problem))
        except ConnectionFailed as error:
            forwarder.say(f"cut off ({error}); coming back")
        time.sleep(random.uniform(*_PAUSE_SECONDS))  # noqa: S311


def sample(type_: str, code: str | None = None) -> bytes:
    """An event of a type as a webhook tells it, about things that do not exist. Raises ValueError
    for a type or code that there is none of."""
    if type_ not in events.TYPES:
        raise ValueError(f"{type_} is no event; there are {', '.join(events.TYPES)}")
    subject, _, state = type_.partition(".")
    failed = state in ("failed", "dead_lettered")
    if code is not None and (code not in BY_NAME or not failed):
        raise ValueError(f"--code {code} is no failure code, or {type_} has none")
    said = _SAID.get(type_, {"state": state})
    if failed:
        said = {"state": "failed", "error": {"code": code or "corrupt_input"}}
    row: dict[str, Any] = {
        "id": 1,
        "type": type_,
        "event_id": ids.new(),
        "at": datetime.now(UTC),
        "media_id": ids.new() if subject in ("media", "variant") else None,
        "job_id": ids.new() if subject not in ("endpoint", "webhook") else None,
        "data": said,
        "media_state": None if type_ == "media.deleted" else said.get("state", "processing"),
        "variants": _VARIANTS if type_ in ("media.ready", "variant.ready") else None,
        **_SAMPLE,
    }
    return webhooks.encoded(events.shown(row))


# What events say beyond a state of their name.
_SAID: Final[dict[str, dict[str, Any]]] = {
    "media.preview": {
        "preview": {
            "blurhash": "LEHV6nWB2yk8pyo0adR*.7kCMdnj",
            "thumbhash": "3OcRJYB4d3h/iIeHeEh3eIhw+j3A",
            "dominant_color": "#7a8b99",
            "average_color": "#8093a1",
            "inline": "data:image/webp;base64,…",
        }
    },
    "media.deleted": {"reason": "requested"},
    "variant.ready": {"state": "processing"},
    "endpoint.disabled": {"endpoint": "ep_sample", "reason": "it answered 410 Gone"},
    "webhook.test": {"endpoint": "ep_sample"},
}
_VARIANTS: Final = [
    {
        "name": "w320.webp",
        "content_type": "image/webp",
        "bytes": 12_600,
        "sha256": "0" * 64,
        "width": 320,
        "height": 213,
        "duration_seconds": None,
    }
]
_SAMPLE: Final = {
    "kind": "image",
    "set_recipe": "web",
    "set_recipe_version": 1,
    "metadata": {},
    "size": 120_000,
    "width": 1200,
    "height": 800,
    "duration_seconds": None,
}


def replay(file: Path, forwarder: Forwarder) -> int:
    """Send what was recorded again, in order, signed anew; how many. Raises ValueError for a file
    that is no record."""
    count = 0
    for body in _recorded(file):
        forwarder.forward(body)
        count += 1
    return count


def _recorded(file: Path) -> Iterator[bytes]:
    for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1):
        try:
            body: str = json.loads(line)["body"]
            json.loads(body)["id"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file}: line {number} is no recorded event") from None
        yield body.encode()

"""What a bucket really enforces: found by trying, with objects that are removed again.

Nothing here is a table of vendors: each probe sends what a careless or hostile client would, with
the requests that clients are given, and looks at the answer. What cannot be tried (how long deleted
bytes stay, what the bucket tidies up by itself) the vendor's module asks for.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final

import httpx2 as httpx

from mediamill.failures import Failure
from mediamill.storage import Finding, SignedRequest
from mediamill.storage.bucket import Bucket, Refusal

_AREA: Final = "uploads/mediamill-doctor"
_BODY: Final = b"mediamill storage doctor\n"
_TYPE: Final = "image/png"
_SECONDS: Final = 10.0
_UNCHECKED: Final = (
    "This store does not check it. Originals are checked again when they are accepted, but a "
    "client can store what it likes; take another store for untrusted clients."
)


class Inspection:
    """Probes of one bucket, for browsers that come from `origin`."""

    def __init__(self, bucket: Bucket, origin: str) -> None:
        self._bucket = bucket
        self._origin = origin
        self._prefix = f"{_AREA}/{secrets.token_hex(8)}"
        self._client = httpx.AsyncClient(timeout=_SECONDS, trust_env=False)

    async def run(self) -> AsyncIterator[Finding]:
        """Every finding; the objects of the probes are gone afterwards."""
        probes: tuple[tuple[str, Callable[[], Awaitable[Finding]]], ...] = (
            ("reachable", self._reachable),
            ("private by default", self._private),
            ("exact length", self._exact_length),
            ("exact type", self._exact_type),
            ("write once", self._write_once),
            ("checksum", self._checksum),
            ("POST policy", self._post_policy),
            ("ranges", self._ranges),
            ("CORS", self._cors),
            ("versions", self._versions),
            ("lifecycle", self._lifecycle),
        )
        try:
            for name, probe in probes:
                finding = await self._outcome(name, probe)
                yield finding
                if name == "reachable" and not finding.ok:
                    return
        finally:
            await self._clean_up()
            await self._client.aclose()

    async def _clean_up(self) -> None:
        for name in ("a", "length", "type", "once", "checksum"):
            with suppress(Failure, Refusal):
                await self._bucket.take_back(f"{self._prefix}/{name}")

    async def _outcome(self, name: str, probe: Callable[[], Awaitable[Finding]]) -> Finding:
        try:
            return await probe()
        except Refusal as refusal:
            return Finding(name, None, f"could not be found out: {refusal}")
        except (Failure, httpx.HTTPError) as error:
            return Finding(
                name, False, f"no answer: {type(error).__name__}", "Look at the network."
            )

    async def _reachable(self) -> Finding:
        remedy = "Check the endpoint, the bucket's name, the keys and the clock."
        wire = self._bucket.wire
        try:
            await wire.send("GET", "", query=wire.list_query)
            await wire.send("PUT", f"{self._prefix}/a", headers=wire.object_headers, content=_BODY)
            read = await wire.send("GET", f"{self._prefix}/a")
        except Refusal as refusal:
            return Finding("reachable", False, str(refusal), remedy)
        except Failure as failure:
            return Finding("reachable", False, failure.problem.code.title, remedy)
        return Finding("reachable", read.content == _BODY, "written, read back and listed", remedy)

    async def _private(self) -> Finding:
        seen = []
        for key, what in ((f"{self._prefix}/a", "an object"), ("", "the list of objects")):
            wire = self._bucket.wire
            asked = {} if key else dict(wire.list_query)
            answer = await self._client.get(wire.address(key, public=True), params=asked)
            if answer.status_code < 300:
                seen.append(what)
        return Finding(
            "private by default",
            not seen,
            f"anybody reads {' and '.join(seen)}"
            if seen
            else "nothing is read without a signature",
            "Remove public access from the bucket: raw uploads must not be readable.",
        )

    async def _exact_length(self) -> Finding:
        answer = await self._put(self._slot("length"), _BODY + b"x")
        return Finding(
            "exact length",
            answer.status_code >= 400 or self._judged("exact length"),
            f"another one is answered {answer.status_code}",
            _UNCHECKED,
        )

    async def _exact_type(self) -> Finding:
        answer = await self._put(self._slot("type"), _BODY, **{"Content-Type": "text/html"})
        return Finding(
            "exact type",
            answer.status_code >= 400 or self._judged("exact type"),
            f"another one is answered {answer.status_code}",
            _UNCHECKED,
        )

    def _judged(self, name: str) -> bool | None:
        """What it means that a probe was let through: False, where the signature claims to bind
        it; None, where none of this vendor's can."""
        return None if name in self._bucket.wire.unbound else False

    async def _write_once(self) -> Finding:
        slot = self._slot("once")
        first = await self._put(slot, _BODY)
        again = await self._put(slot, _BODY)
        held = first.is_success and again.status_code >= 400
        return Finding(
            "write once",
            held or None,
            "an address takes one file" if held else "an address takes a second file",
            "A signed address can be used twice until it expires. What was accepted is pinned, so "
            "the worker refuses what came later.",
        )

    async def _checksum(self) -> Finding:
        wrong = hashlib.sha256(b"other").hexdigest()
        answer = await self._put(self._slot("checksum", sha256=wrong), _BODY)
        held = answer.status_code >= 400
        return Finding(
            "checksum",
            held or None,
            "a wrong SHA-256 is refused" if held else "a wrong SHA-256 is accepted",
            "The worker hashes what it reads, so wrong bytes are found then.",
        )

    async def _post_policy(self) -> Finding:
        tried = await self._bucket.try_form()
        detail = f"right answered {tried.right}, too long {tried.longer}"
        if tried.held:
            detail = "a form with a length range is enforced"
        elif not tried.right:
            detail = "there are no forms here"
        return Finding(
            "POST policy",
            tried.held or None,
            detail,
            "Slots are signed PUTs of an exact length; those that ask for `max_size` are refused.",
        )

    async def _ranges(self) -> Finding:
        signed = self._bucket.sign_get(f"{self._prefix}/a", expires_at=_soon())
        answer = await self._client.get(signed.url, headers={"Range": "bytes=2-4"})
        good = (answer.status_code, answer.content) == (206, _BODY[2:5])
        return Finding(
            "ranges",
            good or None,
            f"a range is answered {answer.status_code}",
            "Players cannot seek in videos that are served from this bucket.",
        )

    async def _cors(self) -> Finding:
        slot = self._slot("cors")
        sent = sorted({name.lower() for name in slot.headers} - {"content-length"})
        asked = {
            "Origin": self._origin,
            "Access-Control-Request-Method": "PUT",
            "Access-Control-Request-Headers": ",".join(sent),
        }
        answer = await self._client.request("OPTIONS", slot.url, headers=asked)
        allowed = answer.headers.get("access-control-allow-origin") in ("*", self._origin)
        signed = self._bucket.sign_get(f"{self._prefix}/a", expires_at=_soon())
        read = await self._client.get(signed.url, headers={"Origin": self._origin})
        exposed = "etag" in read.headers.get("access-control-expose-headers", "").lower()
        return Finding(
            "CORS",
            (allowed and exposed) or None,
            f"PUT from {self._origin} is {'' if allowed else 'not '}allowed, "
            f"ETag is {'' if exposed else 'not '}exposed",
            "Only needed for uploads from browsers: put this rule on the bucket, with the origins "
            f"of your pages: {self._bucket.cors_rule(self._origin, sent)}",
        )

    async def _versions(self) -> Finding:
        kept = await self._bucket.kept_after_deletion()
        return Finding("versions", *kept)

    async def _lifecycle(self) -> Finding:
        tidied = await self._bucket.tidies_up()
        return Finding(
            "lifecycle",
            tidied or None,
            "unfinished parts expire" if tidied else "no rule for unfinished parts",
            "As a safety net, let the bucket abort incomplete multipart uploads after 8 days; the "
            "sweeps do it sooner.",
        )

    def _slot(self, name: str, *, sha256: str | None = None) -> SignedRequest:
        """What a client is given to store the body with."""
        return self._bucket.sign_put(
            f"{self._prefix}/{name}",
            content_type=_TYPE,
            size=len(_BODY),
            expires_at=_soon(),
            sha256=sha256,
        )

    async def _put(self, slot: SignedRequest, body: bytes, **changes: str) -> httpx.Response:
        headers = {**slot.headers, **changes, "Content-Length": str(len(body))}
        return await self._client.put(slot.url, headers=headers, content=body)


def _soon() -> datetime:
    return datetime.now(UTC) + timedelta(minutes=5)

"""What a bucket really enforces: found by trying, with objects that are removed again.

Nothing here is a table of vendors: each probe sends what a careless or hostile client would, and
looks at the answer.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final

import httpx2 as httpx
from botocore.auth import S3SigV4PostAuth
from botocore.awsrequest import AWSRequest

from mediamill.failures import Failure
from mediamill.storage import Finding
from mediamill.storage.s3 import Refusal, Wire, is_versioned, keeps_objects

_AREA: Final = "uploads/mediamill-doctor"
_BODY: Final = b"mediamill storage doctor\n"
_TYPE: Final = "image/png"
_SECONDS: Final = 10.0


class Inspection:
    """Probes of one bucket."""

    def __init__(self, wire: Wire, origin: str) -> None:
        self._wire = wire
        self._origin = origin
        self._prefix = f"{_AREA}/{secrets.token_hex(8)}"
        self._client = httpx.AsyncClient(timeout=_SECONDS, trust_env=False)

    async def run(self) -> AsyncIterator[Finding]:
        """Every finding; the objects of the probes are gone afterwards."""
        probes: tuple[Callable[[], Awaitable[Finding]], ...] = (
            self._reachable,
            self._private,
            self._bound("exact length", "Content-Length", _BODY + b"x"),
            self._bound("exact type", "Content-Type", _BODY),
            self._write_once,
            self._checksum,
            self._post_policy,
            self._ranges,
            self._cors,
            self._versions,
            self._lifecycle,
        )
        try:
            for probe in probes:
                finding = await self._outcome(probe)
                yield finding
                if probe == self._reachable and finding.ok is False:
                    return
        finally:
            await self._clean_up()
            await self._client.aclose()

    async def _outcome(self, probe: Callable[[], Awaitable[Finding]]) -> Finding:
        name = probe.__name__.strip("_").replace("_", " ")
        try:
            return await probe()
        except Refusal as refusal:
            return Finding(name, None, f"could not be found out: {refusal}")
        except (Failure, httpx.HTTPError) as error:
            return Finding(
                name, False, f"no answer: {type(error).__name__}", "Look at the network."
            )

    async def _reachable(self) -> Finding:
        remedy = "Check MEDIAMILL_S3_ENDPOINT, the bucket's name, the keys and the clock."
        try:
            await self._wire.send("GET", "", query={"list-type": "2", "max-keys": "1"})
            await self._wire.send("PUT", f"{self._prefix}/a", content=_BODY)
            read = await self._wire.send("GET", f"{self._prefix}/a")
        except Refusal as refusal:
            return Finding("reachable", False, str(refusal), remedy)
        return Finding("reachable", read.content == _BODY, "written and read back", remedy)

    async def _private(self) -> Finding:
        seen = []
        for key, what in ((f"{self._prefix}/a", "an object"), ("", "the list of objects")):
            answer = await self._client.get(self._wire.address(key, public=True))
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

    def _bound(self, name: str, header: str, body: bytes) -> Callable[[], Awaitable[Finding]]:
        """Whether another value of a signed header is refused."""

        async def probe() -> Finding:
            key = f"{self._prefix}/{header.lower()}"
            given = {"Content-Type": _TYPE, "Content-Length": str(len(_BODY))}
            wrong = (
                {"Content-Type": "text/html"}
                if header == "Content-Type"
                else {"Content-Length": str(len(body))}
            )
            answer = await self._put(key, given, {**given, **wrong}, body)
            return Finding(
                name,
                answer.status_code >= 400,
                f"another one is answered {answer.status_code}",
                "This store does not check what was signed. Originals are checked again when they "
                "are accepted, but a client can store what it likes; take another store for "
                "untrusted clients.",
            )

        return probe

    async def _write_once(self) -> Finding:
        held = await keeps_objects(self._wire, f"{self._prefix}/a", _BODY)
        return Finding(
            "write once",
            held or None,
            "If-None-Match is honored" if held else "If-None-Match is ignored",
            "A signed address can be used twice until it expires. What was accepted is pinned, so "
            "the worker refuses what came later.",
        )

    async def _checksum(self) -> Finding:
        wrong = base64.b64encode(hashlib.sha256(b"other").digest()).decode()
        given = {
            "Content-Type": _TYPE,
            "Content-Length": str(len(_BODY)),
            "x-amz-checksum-sha256": wrong,
        }
        answer = await self._put(f"{self._prefix}/checksum", given, given, _BODY)
        held = answer.status_code >= 400
        return Finding(
            "checksum",
            held or None,
            "a wrong SHA-256 is refused" if held else "a wrong SHA-256 is accepted",
            "The worker hashes what it reads, so wrong bytes are found then.",
        )

    async def _post_policy(self) -> Finding:
        large = await self._post(_BODY * 100)
        right = await self._post(_BODY)
        held = large >= 400 and right < 300
        return Finding(
            "POST policy",
            held or None,
            "a form with a length range is enforced"
            if held
            else f"right answered {right}, too long {large}",
            "Not needed: slots are signed PUTs of an exact length.",
        )

    async def _post(self, body: bytes) -> int:
        key = f"{self._prefix}/post-{len(body)}"
        place = self._wire.place
        expires = (datetime.now(UTC) + timedelta(minutes=5)).strftime("%Y-%m-%dT%H:%M:%SZ")
        request = AWSRequest(method="POST", url=self._wire.address("", public=True))
        request.context["s3-presign-post-fields"] = {}
        request.context["s3-presign-post-policy"] = {
            "expiration": expires,
            "conditions": [
                {"bucket": place.bucket},
                {"key": key},
                ["content-length-range", 1, len(_BODY)],
            ],
        }
        frozen = self._wire.credentials.get_frozen_credentials()
        S3SigV4PostAuth(frozen, "s3", place.region).add_auth(request)
        fields = {"key": key, **request.context["s3-presign-post-fields"]}
        answer = await self._client.post(
            request.url, data=fields, files={"file": ("a.png", body, _TYPE)}
        )
        return answer.status_code

    async def _ranges(self) -> Finding:
        signed = self._wire.sign("GET", f"{self._prefix}/a", expires_at=_soon())
        answer = await self._client.get(signed.url, headers={"Range": "bytes=2-4"})
        good = (answer.status_code, answer.content) == (206, _BODY[2:5])
        return Finding(
            "ranges",
            good or None,
            f"a range is answered {answer.status_code}",
            "Players cannot seek in videos that are served from this bucket.",
        )

    async def _cors(self) -> Finding:
        address = self._wire.address(f"{self._prefix}/a", public=True)
        asked = {
            "Origin": self._origin,
            "Access-Control-Request-Method": "PUT",
            "Access-Control-Request-Headers": "content-type,if-none-match",
        }
        answer = await self._client.request("OPTIONS", address, headers=asked)
        allowed = answer.headers.get("access-control-allow-origin") in ("*", self._origin)
        signed = self._wire.sign("GET", f"{self._prefix}/a", expires_at=_soon())
        read = await self._client.get(signed.url, headers={"Origin": self._origin})
        exposed = "etag" in read.headers.get("access-control-expose-headers", "").lower()
        rule = {
            "AllowedOrigins": [self._origin],
            "AllowedMethods": ["GET", "HEAD", "PUT", "POST"],
            "AllowedHeaders": ["content-type", "if-none-match", "x-amz-*"],
            "ExposeHeaders": ["ETag"],
            "MaxAgeSeconds": 7200,
        }
        return Finding(
            "CORS",
            (allowed and exposed) or None,
            f"PUT from {self._origin} is {'' if allowed else 'not '}allowed, "
            f"ETag is {'' if exposed else 'not '}exposed",
            "Only needed for uploads from browsers: put this rule on the bucket, with the origins "
            f"of your pages: {json.dumps({'CORSRules': [rule]})}",
        )

    async def _versions(self) -> Finding:
        kept = await is_versioned(self._wire)
        return Finding(
            "versions",
            None if kept else True,
            "old versions are kept; deletions remove them too" if kept else "none are kept",
        )

    async def _lifecycle(self) -> Finding:
        rules = ""
        with suppress(Refusal):
            rules = (await self._wire.send("GET", "", query={"lifecycle": ""})).text
        return Finding(
            "lifecycle",
            ("AbortIncompleteMultipartUpload" in rules) or None,
            "unfinished parts expire"
            if "AbortIncompleteMultipartUpload" in rules
            else "no rule for unfinished parts",
            "As a safety net, let the bucket abort incomplete multipart uploads after 8 days; the "
            "sweeps do it sooner.",
        )

    async def _put(
        self, key: str, signed: dict[str, str], sent: dict[str, str], body: bytes
    ) -> httpx.Response:
        request = self._wire.sign("PUT", key, expires_at=_soon(), headers=signed)
        return await self._client.put(request.url, headers=sent, content=body)

    async def _clean_up(self) -> None:
        names = ("a", "content-length", "content-type", "checksum")
        for name in (*names, f"post-{len(_BODY)}", f"post-{len(_BODY) * 100}"):
            with suppress(Failure, Refusal):
                await self._wire.send("DELETE", f"{self._prefix}/{name}")


def _soon() -> datetime:
    return datetime.now(UTC) + timedelta(minutes=5)

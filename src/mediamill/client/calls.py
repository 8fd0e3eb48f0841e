"""What the API can do, each call as a flow of steps (see steps.py)."""

from __future__ import annotations

import json
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from urllib.parse import quote

from mediamill.client.errors import (
    Conflict,
    ConnectionFailed,
    DownloadDamaged,
    Error,
    Forbidden,
    Gone,
    NotFound,
    Problem,
    Unavailable,
    WaitTimeout,
    WorkFailed,
    seconds,
)
from mediamill.client.models import Event, Job, Media, Model, OutputProgress, Progress
from mediamill.client.steps import (
    Answer,
    Emit,
    Fetch,
    Fetched,
    Flow,
    Next,
    Open,
    Pause,
    Send,
    Slice,
    Source,
    Together,
    call,
    pause,
    refused,
)

M = TypeVar("M", bound=Model)
Body = dict[str, Any]
Way = Literal["auto", "direct", "multipart", "tus"]
OnProgress = Callable[[Progress], None]

ENDED: Final = {
    "media": frozenset({"ready", "failed", "expired"}),
    "jobs": frozenset({"completed", "failed", "canceled"}),
}
_GOOD: Final = frozenset({"ready", "completed"})
_DIRECT_BYTES: Final = 64 << 20  # above, a broken connection would cost too much
_PARTS_AT_ONCE: Final = 4
_TUS_CHUNK: Final = 16 << 20
_UPLOAD_SECONDS: Final = 600.0
_POLL_SECONDS: Final = 25.0
_STREAM_SECONDS: Final = 20.0  # with less time left a long poll keeps the deadline better
_CUTS: Final = 3
_TUS: Final = {"Tus-Resumable": "1.0.0"}


@dataclass(frozen=True, slots=True)
class Calls:
    """Every call, with as many repeats as the client wants."""

    retries: int

    def ask(self, method: str, path: str, **given: Any) -> Flow[Answer]:
        return call(Send(method, path, **given), retries=self.retries)

    def one(self, model: type[M], method: str, path: str, **given: Any) -> Flow[M]:
        answer = yield from self.ask(method, path, **given)
        return model.model_validate(answer.json())

    def all(self, model: type[M], path: str, *, method: str = "GET") -> Flow[list[M]]:
        """A list that has no pages."""
        answer = yield from self.ask(method, path)
        return [model.model_validate(item) for item in answer.json()["data"]]

    def pages(self, model: type[M], path: str, **query: Any) -> Flow[None]:
        """Emit every item; the next page is asked for when the caller gets there."""
        cursor = None
        while True:
            answer = yield from self.ask("GET", path, query={**query, "cursor": cursor})
            page = answer.json()
            for item in page["data"]:
                yield Emit(model.model_validate(item))
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def matched(self, method: str, path: str, **given: Any) -> Flow[Answer]:
        """Change what is there now, whatever it is: GET for the tag, then the change."""
        seen = yield from self.ask("GET", path)
        return (
            yield from self.ask(method, path, headers={"If-Match": seen.headers["etag"]}, **given)
        )

    def changed(self, model: type[M], path: str, changes: Body) -> Flow[M]:
        answer = yield from self.matched("PATCH", path, json=changes)
        return model.model_validate(answer.json())

    def recover(self, path: str, since: str) -> Flow[int]:
        answer = yield from self.ask("POST", path, json={"since": since})
        return int(answer.json()["recovered"])

    def bulk(self, path: str, which: Body) -> Flow[int]:
        """Do it to all that match, in as many requests as it takes; how many were changed."""
        changed, before = 0, None
        while True:
            wanted = {"filter": which, "before": before}
            answer = (yield from self.ask("POST", path, json=wanted)).json()
            changed += int(answer["changed"])
            before = answer["next"]
            if before is None:
                return changed

    # Uploads.

    def submit(
        self,
        source: Source,
        wanted: Body,
        *,
        way: Way,
        state_file: Path | None,
        on_progress: OnProgress | None,
    ) -> Flow[Media]:
        """The media, accepted and queued. Raises Problem, ConnectionFailed, OSError."""
        if way == "auto":
            way = "direct" if source.size <= _DIRECT_BYTES else "multipart"
        wanted = given(**wanted, size=source.size)
        if source.filename is not None:
            wanted.setdefault("filename", source.filename)
        if way == "direct":
            sent = _Sent(source.size, on_progress)
            return (yield from self._direct(source, wanted, sent))
        memory = _Memory(state_file, way, source, wanted)
        one = self._multipart if way == "multipart" else self._tus
        while True:
            resumed = memory.address is not None
            try:
                media = yield from one(source, wanted, _Sent(source.size, on_progress), memory)
            except (NotFound, Gone):
                if not resumed:
                    raise
                memory.forget()  # it has run out of time: begin anew
                continue
            memory.forget()
            return media

    def _direct(self, source: Source, wanted: Body, sent: _Sent) -> Flow[Media]:
        answer = yield from self.ask("POST", "/v1/media", json=wanted)
        slot = answer.json()
        body = Slice(source, 0, source.size, sent)
        refusal = None
        try:
            yield from self._put(slot["upload"], body)
        except _AlreadyWritten:
            pass
        except Forbidden as error:  # so say storages whose signature grants one creation
            refusal = error
        try:
            return (yield from self.one(Media, "POST", f"{slot['links']['self']}/complete"))
        except Conflict as error:
            raise refusal or error from None

    def _put(self, signed: Body, body: Slice) -> Flow[Answer]:
        headers = {k: v for k, v in signed["headers"].items() if k.lower() != "content-length"}
        send = Send(signed["method"], signed["url"], headers=headers, body=body)
        try:
            return (yield from call(_patient(send), retries=self.retries))
        except Conflict as error:
            if error.status == 412:  # an earlier try came through, and its answer did not
                raise _AlreadyWritten from None
            raise

    def _multipart(self, source: Source, wanted: Body, sent: _Sent, memory: _Memory) -> Flow[Media]:
        if memory.address is None:
            made = yield from self.ask("POST", "/v1/uploads/multipart", json=wanted)
            memory.keep(made.json()["links"]["self"])
        path = memory.address
        plan = (yield from self.ask("GET", f"{path}/parts")).json()
        if not plan["completed"]:
            size = plan["part_bytes"]
            there = {p["number"] for p in plan["parts"]}
            missing = []
            for number in range(1, plan["part_count"] + 1):
                offset = (number - 1) * size
                body = Slice(source, offset, min(size, source.size - offset), sent)
                if number in there:
                    sent.had(body.length)
                else:
                    missing.append(self._part(path, number, body))
            yield Together(missing, _PARTS_AT_ONCE)
            yield from self.ask("POST", f"{path}/complete", json={})
        return (yield from self.one(Media, "GET", plan["links"]["media"]))

    def _part(self, path: str | None, number: int, body: Slice) -> Flow[None]:
        signed = yield from self.ask("POST", f"{path}/parts", json={"numbers": [number]})
        with suppress(_AlreadyWritten):
            yield from self._put(signed.json()["parts"][0], body)

    def _tus(self, source: Source, wanted: Body, sent: _Sent, memory: _Memory) -> Flow[Media]:
        if memory.address is None:
            metadata = {**wanted.get("metadata", {})}
            for name in ("filename", "recipe", "recipe_version", "sha256"):
                if name in wanted:
                    metadata[name] = wanted[name]
            if "content_type" in wanted:
                metadata["filetype"] = wanted["content_type"]
            headers = {
                **_TUS,
                "Upload-Length": str(source.size),
                "Upload-Metadata": ",".join(
                    f"{k} {b64encode(str(v).encode()).decode()}" for k, v in metadata.items()
                ),
            }
            made = yield from self.ask("POST", "/v1/uploads", headers=headers)
            memory.keep(made.headers["location"])
        assert memory.address is not None
        at = yield from self.ask("HEAD", memory.address, headers=_TUS)
        offset, cuts = int(at.headers["upload-offset"]), 0
        sent(0, offset)

        def up_to(offset: int, done: int) -> None:
            sent(0, offset + done)

        while offset < source.size:
            length = min(_TUS_CHUNK, source.size - offset)
            headers = {
                **_TUS,
                "Upload-Offset": str(offset),
                "Content-Type": "application/offset+octet-stream",
            }
            send = Send("PATCH", memory.address, headers=headers)
            body = Slice(source, offset, length, up_to)
            try:
                at = yield from call(_patient(send, body), retries=0)
            except (ConnectionFailed, Conflict, Unavailable):
                # The server knows how far it came; only a row of cuts without progress ends it.
                if cuts >= self.retries:
                    raise
                yield Pause(pause(cuts, None))
                at = yield from self.ask("HEAD", memory.address, headers=_TUS)
                cuts = cuts + 1 if int(at.headers["upload-offset"]) <= offset else 0
            offset = int(at.headers["upload-offset"])
        sent(0, offset)
        return (yield from self.one(Media, "GET", at.headers["mediamill-media"]))

    # Waiting.

    def wait(
        self,
        kind: Literal["media", "jobs"],
        subject: str,
        model: type[M],
        *,
        timeout_seconds: float | None,
        on_progress: OnProgress | None,
        check: bool,
    ) -> Flow[M]:
        """The media or job at its end. Raises WaitTimeout, and WorkFailed if `check`."""
        path = f"/v1/{kind}/{quote(subject, safe='')}"
        until = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
        cuts = 0
        answer = yield from self.ask("GET", path)
        while (body := answer.json())["state"] not in ENDED[kind]:
            _tell(on_progress, body)
            left = until - time.monotonic()
            if left <= 0:
                raise WaitTimeout(f"{subject} is still {body['state']}; its work goes on")
            if cuts < _CUTS and left > _STREAM_SECONDS:
                heard = yield from self._listen(path, until - _STREAM_SECONDS, on_progress)
                cuts = 0 if heard else cuts + 1
                answer = yield from self.ask("GET", path)
            else:
                answer = yield from self._poll(path, answer, left)
        _tell(on_progress, body)
        found = model.model_validate(body)
        if check and body["state"] not in _GOOD:
            raise WorkFailed(found)
        return found

    def _listen(self, path: str, until: float, on_progress: OnProgress | None) -> Flow[bool]:
        """Follow the stream to its end or `until`; whether it could be followed at all."""
        try:
            answer: Answer = yield Open(Send("GET", f"{path}/events"))
            if answer.status != 200:
                return False
            while time.monotonic() < until:
                event: Event | None = yield Next()
                if event is None:
                    return True
                if event.type == "job.progress" or event.type.endswith(".processing"):
                    _tell(on_progress, event.data)
        except ConnectionFailed:
            return False
        return True

    def _poll(self, path: str, seen: Answer, left: float) -> Flow[Answer]:
        """The next change, by one long poll; a server or proxy that does not wait is asked at the
        pace that it names."""
        wait = max(1, int(min(left, _POLL_SECONDS)))
        headers = {"Prefer": f"wait={wait}"}
        if "etag" in seen.headers:
            headers["If-None-Match"] = seen.headers["etag"]
        began = time.monotonic()
        answer = yield from self.ask("GET", path, headers=headers, seconds=wait + 15.0)
        if time.monotonic() - began < 0.5 and (
            answer.status == 304 or answer.content == seen.content
        ):
            after = seconds(answer.headers.get("retry-after")) or 1.0
            yield Pause(max(0.05, min(after, left)))
        return seen if answer.status == 304 else answer

    def follow(self, path: str, *, types: str | None, after: str | None) -> Flow[None]:
        """Emit every event of a stream, over cuts and restarts, until the server ends it."""
        tried = 0
        while True:
            headers = {} if after is None else {"Last-Event-ID": after}
            send = Send("GET", path, query={"types": types}, headers=headers)
            try:
                answer: Answer = yield Open(send)
                if answer.status == 204:
                    return
                if answer.status >= 400:
                    raise refused(answer)
                while (event := (yield Next())) is not None:
                    tried = 0
                    if event.type == "alive":
                        continue
                    after = event.cursor or after
                    yield Emit(event)
            except ConnectionFailed:
                if tried >= self.retries:
                    raise
            except Problem as error:
                if not error.retryable or tried >= self.retries:
                    raise
            yield Pause(pause(tried + 1, None))
            tried += 1

    # Variants.

    def download(self, media_id: str, name: str, into: Path) -> Flow[Path]:
        """The file, checked against the manifest; nothing is left behind when it does not fit."""
        media = yield from self.one(Media, "GET", f"/v1/media/{quote(media_id, safe='')}")
        variant = next((v for v in media.variants if v.name == name), None)
        if variant is None:
            known = ", ".join(v.name for v in media.variants) or "none"
            raise Error(f"{media_id} has no variant {name!r}; it has: {known}")
        target = into / Path(name).name if into.is_dir() else into
        playlist = variant.content_type.endswith("mpegurl")  # signed anew for each reader
        wanted = None if playlist else (variant.bytes, variant.sha256)
        return (yield from self._fetched(variant.url, target, f"{name} of {media_id}", wanted))

    def original(self, media_id: str, into: Path) -> Flow[Path]:
        """The original into a file, checked against what was accepted."""
        path = f"/v1/media/{quote(media_id, safe='')}"
        media = yield from self.one(Media, "GET", path)
        name = Path(media.filename or "original").name
        target = into / name if into.is_dir() else into
        wanted = None if media.sha256 is None else (media.size, media.sha256)
        of = f"the original of {media_id}"
        return (yield from self._fetched(f"{path}/original", target, of, wanted))

    def _fetched(
        self, url: str, into: Path, what: str, wanted: tuple[int, str] | None
    ) -> Flow[Path]:
        """A file from an address, of this size and digest. Raises DownloadDamaged."""
        part = into.with_name(f"{into.name}.part")
        try:
            tried = 0
            while True:
                try:
                    got: Fetched = yield Fetch(url, part)
                    if got.status < 400:
                        break
                    refusal = refused(got)
                    if not refusal.retryable or tried >= self.retries:
                        raise refusal
                except ConnectionFailed:
                    if tried >= self.retries:
                        raise
                yield Pause(pause(tried, None))
                tried += 1
            if wanted is not None and (got.size, got.sha256) != wanted:
                raise DownloadDamaged(f"{what} differs from what was stored")
            part.replace(into)
        finally:
            part.unlink(missing_ok=True)
        return into


class _AlreadyWritten(Exception):
    """The bytes are there already."""


@dataclass(slots=True)
class _Sent:
    """Tells how much was sent: never less than before, and one word at a time, also when parts go
    side by side and one is begun again."""

    total: int
    on_progress: OnProgress | None
    _before: int = 0
    _of: dict[int, int] = field(default_factory=dict)
    _told: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def had(self, done: int) -> None:
        """So much had arrived before."""
        self._before += done

    def __call__(self, offset: int, done: int) -> None:
        """So much of the stretch that begins there is sent."""
        if self.on_progress is None:
            return
        with self._lock:
            self._of[offset] = done
            now = min(self._before + sum(self._of.values()), self.total)
            if now > self._told:
                self._told = now
                percent = 100.0 * now / self.total if self.total else 100.0
                self.on_progress(Progress("upload", "upload", percent, now, self.total))


@dataclass(slots=True)
class _Memory:
    """Where an upload stands, in a file that another process can go on from."""

    file: Path | None
    way: str
    source: Source
    wanted: Body
    address: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.file is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):
                known = json.loads(self.file.read_text("utf-8"))
                if known["about"] == json.loads(json.dumps(self._about())):
                    self.address = str(known["address"])

    def _about(self) -> list[Any]:
        return [self.way, self.wanted, self.source.fingerprint]

    def keep(self, address: str) -> None:
        self.address = address
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"about": self._about(), "address": address})
            self.file.write_text(text, "utf-8")

    def forget(self) -> None:
        self.address = None
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def _patient(send: Send, body: Slice | None = None) -> Send:
    return Send(
        send.method,
        send.url,
        headers=send.headers,
        body=body or send.body,
        seconds=_UPLOAD_SECONDS,
    )


def _tell(on_progress: OnProgress | None, said: Mapping[str, Any]) -> None:
    if on_progress is not None:
        stage = said.get("stage") or said.get("state")
        parts = said.get("outputs") or (said.get("job") or {}).get("outputs") or ()
        outputs = tuple(OutputProgress.model_validate(part) for part in parts)
        on_progress(Progress("process", stage, said.get("progress"), outputs=outputs))


def given(**fields: Any) -> Body:
    """The fields of a request that the caller named."""
    return {name: value for name, value in fields.items() if value is not None}


def reference(subject: str | Model) -> str:
    """The id of what was given: an id, or a thing that has one."""
    return subject if isinstance(subject, str) else str(getattr(subject, "id", ""))


def path(kind: str, subject: str | Media | Job | Model, *rest: str) -> str:
    parts = [quote(part, safe="") for part in (reference(subject), *rest)]
    return "/".join(["/v1", kind, *parts])

"""The client that blocks. Written by `make docs` from its twin for asyncio, awaited.py."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from mediamill.client import unwrap
from mediamill.client.calls import Calls, OnProgress, Way, given, path, reference
from mediamill.client.drivers import Driver
from mediamill.client.models import (
    Check,
    DeadLetters,
    Delivery,
    DryRun,
    Endpoint,
    Event,
    Figures,
    Job,
    Key,
    Letter,
    Media,
    MediaItem,
    OwnKey,
    Queue,
    Recipe,
    Replayed,
    Setting,
    Slot,
    StreamUrl,
    Subtitles,
    Timeline,
    UploadToken,
    Verdict,
    Worker,
)
from mediamill.client.place import place
from mediamill.client.steps import Slice, Source


class Client:
    """Speaks to one installation with one API key.

    `url` and `api_key` default to MEDIAMILL_URL and MEDIAMILL_API_KEY. What may succeed later is
    tried again, at most `max_retries` times, under one Idempotency-Key.

        with Client() as client:
            media = client.media.submit_and_wait("holiday.mov", on_progress=print)
            client.media.download(media, "video.mp4", "holiday.mp4")
            for item in client.media.list(state="failed"):
                print(item.id, item.error)
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        timeout_seconds: float = 30.0,
        max_retries: int = 4,
        transport: Any = None,
    ) -> None:
        """Raises ValueError without an address or a key."""
        self._driver = Driver(*place(url, api_key), timeout_seconds, transport)
        call = Calls(max_retries)
        self.media = MediaCalls(self._driver, call)
        self.jobs = JobCalls(self._driver, call)
        self.dead_letters = DeadLetterCalls(self._driver, call)
        self.queues = QueueCalls(self._driver, call)
        self.workers = WorkerCalls(self._driver, call)
        self.recipes = RecipeCalls(self._driver, call)
        self.webhooks = WebhookCalls(self._driver, call)
        self.keys = KeyCalls(self._driver, call)
        self._call = call

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._driver.close()

    def events(self, *, types: str | None = None, after: str | None = None) -> Iterator[Event]:
        """Everything that happens to the tenant, from now or after a `cursor`, over cuts."""
        return self._driver.iterate(self._call.follow("/v1/events", types=types, after=after))

    def figures(self, *, minutes: int = 60) -> Figures:
        """What completed and failed in the last minutes, and how long it took."""
        return self._driver.run(
            self._call.one(Figures, "GET", "/v1/figures", query={"minutes": minutes})
        )

    def settings(self) -> list[Setting]:
        """The settings of the installation. Needs the scope `operate`."""
        return self._driver.run(self._call.all(Setting, "/v1/settings"))

    def check_storage(self) -> list[Check]:
        """What the storage enforces, found out by trying. Needs the scope `operate`."""
        return self._driver.run(self._call.all(Check, "/v1/storage-checks", method="POST"))

    def stream_url(self) -> StreamUrl:
        """A short-lived address at which a browser follows everything of the tenant."""
        return self._driver.run(self._call.one(StreamUrl, "POST", "/v1/stream-urls", json={}))


class _Part:
    def __init__(self, driver: Driver, call: Calls) -> None:
        self._driver = driver
        self._call = call


class MediaCalls(_Part):
    """Uploads, their status and what came of them."""

    def submit(
        self,
        file: str | Path | bytes,
        *,
        recipe: str = "web",
        recipe_version: int | None = None,
        filename: str | None = None,
        content_type: str | None = None,
        sha256: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        ttl_seconds: float | None = None,
        callback_url: str | None = None,
        way: Way = "auto",
        resume_from: str | Path | None = None,
        on_progress: OnProgress | None = None,
    ) -> Media:
        """Upload a file (or bytes) and queue it; large ones go in parts.

        With `resume_from`, a file that remembers how far it came, another process goes on where
        this one was stopped; for `multipart` and `tus`. `callback_url` and `ttl_seconds` go with
        `direct` and `multipart`. Raises Problem, ConnectionFailed, OSError.
        """
        wanted = {
            "recipe": recipe,
            "recipe_version": recipe_version,
            "content_type": content_type,
            "sha256": sha256,
            "metadata": dict(metadata or {}),
            "ttl_seconds": ttl_seconds,
            "callback_url": callback_url,
        }
        return self._driver.run(
            self._call.submit(
                Source(file, filename),
                wanted,
                way=way,
                state_file=None if resume_from is None else Path(resume_from),
                on_progress=on_progress,
            )
        )

    def submit_and_wait(
        self,
        file: str | Path | bytes,
        *,
        recipe: str = "web",
        recipe_version: int | None = None,
        filename: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        ttl_seconds: float | None = None,
        way: Way = "auto",
        resume_from: str | Path | None = None,
        timeout_seconds: float | None = None,
        on_progress: OnProgress | None = None,
        check: bool = True,
    ) -> Media:
        """Upload a file and wait for what comes of it; one callback hears of both.

        `timeout_seconds` is for the work, once the file is there. Raises what `submit` and `wait`
        raise.
        """
        media = self.submit(
            file,
            recipe=recipe,
            recipe_version=recipe_version,
            filename=filename,
            metadata=metadata,
            ttl_seconds=ttl_seconds,
            way=way,
            resume_from=resume_from,
            on_progress=on_progress,
        )
        return self.wait(
            media, timeout_seconds=timeout_seconds, on_progress=on_progress, check=check
        )

    def open(
        self,
        size: int | None = None,
        *,
        max_size: int | None = None,
        recipe: str = "web",
        recipe_version: int | None = None,
        filename: str | None = None,
        content_type: str | None = None,
        sha256: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        ttl_seconds: float | None = None,
        callback_url: str | None = None,
    ) -> Slot:
        """A slot for a file of exactly so many bytes; `upload` is the one request that fills it.
        With `max_size` instead it is a form for so many at most, where the storage takes forms.

        For what somebody else uploads, such as a browser: hand it `slot.upload`, and call
        `complete` when it says that it is done.
        """
        wanted = given(
            size=size,
            max_size=max_size,
            recipe=recipe,
            recipe_version=recipe_version,
            filename=filename,
            content_type=content_type,
            sha256=sha256,
            metadata=metadata and dict(metadata),
            ttl_seconds=ttl_seconds,
            callback_url=callback_url,
        )
        return self._driver.run(self._call.one(Slot, "POST", "/v1/media", json=wanted))

    def complete(self, media: str | Media) -> Media:
        """Say that a slot's bytes are there; safe to repeat. Raises Conflict when they are not."""
        return self._driver.run(self._call.one(Media, "POST", path("media", media, "complete")))

    def fetch(
        self,
        url: str,
        *,
        recipe: str = "web",
        recipe_version: int | None = None,
        filename: str | None = None,
        content_type: str | None = None,
        sha256: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        ttl_seconds: float | None = None,
        callback_url: str | None = None,
    ) -> Media:
        """Have the platform fetch a file from an address. Raises Problem for one it may not call;
        what cannot be had makes the media `expired`, which `wait` tells."""
        wanted = given(
            source={"url": url},
            recipe=recipe,
            recipe_version=recipe_version,
            filename=filename,
            content_type=content_type,
            sha256=sha256,
            metadata=metadata and dict(metadata),
            ttl_seconds=ttl_seconds,
            callback_url=callback_url,
        )
        return self._driver.run(self._call.one(Media, "POST", "/v1/media", json=wanted))

    def upload_token(
        self, *, recipe: str = "web", recipe_version: int | None = None, ttl_seconds: int = 900
    ) -> UploadToken:
        """What lets a browser (Uppy) upload for some minutes, and do nothing else."""
        wanted = given(recipe=recipe, recipe_version=recipe_version, ttl_seconds=ttl_seconds)
        return self._driver.run(
            self._call.one(UploadToken, "POST", "/v1/upload-tokens", json=wanted)
        )

    def stream_url(self, media: str | Media) -> StreamUrl:
        """A short-lived address at which a browser follows it (an EventSource), without a key."""
        wanted = {"media_id": reference(media)}
        return self._driver.run(self._call.one(StreamUrl, "POST", "/v1/stream-urls", json=wanted))

    def get(self, media: str | Media) -> Media:
        return self._driver.run(self._call.one(Media, "GET", path("media", media)))

    def list(
        self,
        *,
        state: str | None = None,
        kind: str | None = None,
        recipe: str | None = None,
        error_code: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        page_size: int = 50,
    ) -> Iterator[MediaItem]:
        """Newest first, page by page as you go; `state` takes several with commas."""
        return self._driver.iterate(
            self._call.pages(
                MediaItem,
                "/v1/media",
                state=state,
                kind=kind,
                recipe=recipe,
                error_code=error_code,
                created_after=created_after and created_after.isoformat(),
                created_before=created_before and created_before.isoformat(),
                limit=page_size,
            )
        )

    def wait(
        self,
        media: str | Media,
        *,
        timeout_seconds: float | None = None,
        on_progress: OnProgress | None = None,
        check: bool = True,
    ) -> Media:
        """The media at its end: by its event stream, else by long polls, else by asking again.

        Raises WaitTimeout (the work goes on), and WorkFailed unless `check` is false.
        """
        return self._driver.run(
            self._call.wait(
                "media",
                reference(media),
                Media,
                timeout_seconds=timeout_seconds,
                on_progress=on_progress,
                check=check,
            )
        )

    def process(
        self,
        media: str | Media,
        *,
        recipe: str | None = None,
        recipe_version: int | None = None,
        callback_url: str | None = None,
    ) -> Media:
        """Process it again; what is published stays served meanwhile."""
        wanted = given(recipe=recipe, recipe_version=recipe_version, callback_url=callback_url)
        return self._driver.run(
            self._call.one(Media, "POST", path("media", media, "process"), json=wanted)
        )

    def delete(self, media: str | Media) -> None:
        self._driver.run(self._call.ask("DELETE", path("media", media)))

    def timeline(self, media: str | Media) -> Timeline:
        """Where the time went."""
        return self._driver.run(self._call.one(Timeline, "GET", path("media", media, "timeline")))

    def events(self, media: str | Media, *, after: str | None = None) -> Iterator[Event]:
        """What happens to it, until it is at an end."""
        return self._driver.iterate(
            self._call.follow(path("media", media, "events"), types=None, after=after)
        )

    def add_subtitles(
        self,
        media: str | Media,
        language: str,
        text: str | bytes,
        *,
        label: str | None = None,
    ) -> Subtitles:
        """Lay a file of subtitles (SubRip or WebVTT) beside a film, in place of an earlier one of
        that language (BCP 47, such as `pt-br`). The next processing publishes it.

        Bytes may be in the old code page of the language. Raises Problem.
        """
        raw = text.encode() if isinstance(text, str) else text
        charset = "; charset=utf-8" if isinstance(text, str) else ""
        return self._driver.run(
            self._call.one(
                Subtitles,
                "PUT",
                path("media", media, "subtitles", language),
                query={"label": label},
                headers={"Content-Type": f"text/plain{charset}"},
                body=Slice(Source(raw), 0, len(raw)),
            )
        )

    def subtitles(self, media: str | Media) -> builtins.list[Subtitles]:
        """The files of subtitles beside a film, by language."""
        return self._driver.run(self._call.all(Subtitles, path("media", media, "subtitles")))

    def remove_subtitles(self, media: str | Media, language: str) -> None:
        """Take one away; what was published from it stays until the next processing."""
        self._driver.run(self._call.ask("DELETE", path("media", media, "subtitles", language)))

    def download(self, media: str | Media, name: str, into: str | Path) -> Path:
        """Write a variant to a file (or into a folder), checked against the manifest."""
        return self._driver.run(self._call.download(reference(media), name, Path(into)))

    def original(self, media: str | Media, into: str | Path) -> Path:
        """Write the original to a file (or into a folder), checked against what was accepted."""
        return self._driver.run(self._call.original(reference(media), Path(into)))


class JobCalls(_Part):
    """Units of background work."""

    def create(
        self,
        kind: str,
        payload: Mapping[str, Any] | None = None,
        *,
        schema_version: int | None = None,
        priority: int = 0,
        delay_seconds: float = 0.0,
        dedup_key: str | None = None,
        max_attempts: int | None = None,
        callback_url: str | None = None,
    ) -> Job:
        """Queue a job of a kind that a worker has offered; `duplicate_of` tells that the dedup key
        has a live job already."""
        wanted = {
            "kind": kind,
            "payload": dict(payload or {}),
            "schema_version": schema_version,
            "priority": priority,
            "delay_seconds": delay_seconds,
            "dedup_key": dedup_key,
            "max_attempts": max_attempts,
            "callback_url": callback_url,
        }
        return self._driver.run(self._call.one(Job, "POST", "/v1/jobs", json=wanted))

    def get(self, job: str | Job) -> Job:
        return self._driver.run(self._call.one(Job, "GET", path("jobs", job)))

    def list(
        self,
        *,
        state: str | None = None,
        kind: str | None = None,
        queue: str | None = None,
        error_code: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        page_size: int = 50,
    ) -> Iterator[Job]:
        """Newest first, page by page as you go; `state` takes several with commas."""
        return self._driver.iterate(
            self._call.pages(
                Job,
                "/v1/jobs",
                state=state,
                kind=kind,
                queue=queue,
                error_code=error_code,
                created_after=created_after and created_after.isoformat(),
                created_before=created_before and created_before.isoformat(),
                limit=page_size,
            )
        )

    def wait(
        self,
        job: str | Job,
        *,
        timeout_seconds: float | None = None,
        on_progress: OnProgress | None = None,
        check: bool = True,
    ) -> Job:
        """The job at its end. Raises WaitTimeout, and WorkFailed unless `check` is false."""
        return self._driver.run(
            self._call.wait(
                "jobs",
                reference(job),
                Job,
                timeout_seconds=timeout_seconds,
                on_progress=on_progress,
                check=check,
            )
        )

    def cancel(self, job: str | Job) -> Job:
        return self._driver.run(self._call.one(Job, "POST", path("jobs", job, "cancel")))

    def replay(self, job: str | Job) -> Job:
        """Queue a failed job again. Raises Conflict when it is not failed."""
        return self._driver.run(self._call.one(Job, "POST", path("jobs", job, "replay")))

    def cancel_all(
        self,
        *,
        kind: str | None = None,
        queue: str | None = None,
        error_code: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
    ) -> int:
        """Cancel every queued and processing job that fits; how many."""
        which = given(
            kind=kind,
            queue=queue,
            error_code=error_code,
            created_after=created_after and created_after.isoformat(),
            created_before=created_before and created_before.isoformat(),
        )
        return self._driver.run(self._call.bulk("/v1/jobs/cancel", which))

    def replay_all(
        self,
        *,
        kind: str | None = None,
        queue: str | None = None,
        error_code: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
    ) -> int:
        """Replay every failed job that fits; how many. One whose media went on is passed over."""
        which = given(
            kind=kind,
            queue=queue,
            error_code=error_code,
            created_after=created_after and created_after.isoformat(),
            created_before=created_before and created_before.isoformat(),
        )
        return self._driver.run(self._call.bulk("/v1/jobs/replay", which))

    def timeline(self, job: str | Job) -> Timeline:
        return self._driver.run(self._call.one(Timeline, "GET", path("jobs", job, "timeline")))

    def events(self, job: str | Job, *, after: str | None = None) -> Iterator[Event]:
        return self._driver.iterate(
            self._call.follow(path("jobs", job, "events"), types=None, after=after)
        )

    def stream_url(self, job: str | Job) -> StreamUrl:
        """A short-lived address at which a browser follows it (an EventSource), without a key."""
        wanted = {"job_id": reference(job)}
        return self._driver.run(self._call.one(StreamUrl, "POST", "/v1/stream-urls", json=wanted))


class DeadLetterCalls(_Part):
    """Jobs whose attempts are used up."""

    def groups(self) -> builtins.list[DeadLetters]:
        """By code, the largest group first."""
        return self._driver.run(self._call.all(DeadLetters, "/v1/dead-letters/groups"))

    def list(
        self,
        *,
        code: str | None = None,
        kind: str | None = None,
        queue: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        page_size: int = 50,
    ) -> Iterator[Job]:
        return self._driver.iterate(
            self._call.pages(
                Job,
                "/v1/dead-letters",
                code=code,
                kind=kind,
                queue=queue,
                since=since and since.isoformat(),
                until=until and until.isoformat(),
                limit=page_size,
            )
        )

    def get(self, job: str | Job) -> Job:
        """With every attempt: its commands and the last words of its tools."""
        return self._driver.run(self._call.one(Job, "GET", path("dead-letters", job)))

    def replay(
        self,
        *,
        code: str | None = None,
        kind: str | None = None,
        queue: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        rate_per_second: float = 10.0,
        limit: int = 10_000,
    ) -> Replayed:
        """Replay all that fit, at a rate."""
        wanted = {
            "filter": {
                "code": code,
                "kind": kind,
                "queue": queue,
                "since": since and since.isoformat(),
                "until": until and until.isoformat(),
            },
            "rate_per_second": rate_per_second,
            "limit": limit,
        }
        return self._driver.run(
            self._call.one(Replayed, "POST", "/v1/dead-letters/replay", json=wanted)
        )

    def discard(self, job: str | Job) -> Job:
        """Take it off the list for good; it stays failed."""
        return self._driver.run(self._call.one(Job, "POST", path("dead-letters", job, "discard")))


class QueueCalls(_Part):
    """Where jobs wait. Needs the scope `operate`."""

    def list(self) -> list[Queue]:
        return self._driver.run(self._call.all(Queue, "/v1/queues"))

    def pause(self, queue: str) -> Queue:
        """Claim no more of it, everywhere; what runs finishes."""
        return self._driver.run(self._call.one(Queue, "POST", path("queues", queue, "pause")))

    def resume(self, queue: str) -> Queue:
        return self._driver.run(self._call.one(Queue, "POST", path("queues", queue, "resume")))

    def cap(self, queue: str, concurrency: int | None) -> Queue:
        """At most so many at once over all workers; None leaves it to their slots."""
        wanted = {"concurrency": concurrency}
        return self._driver.run(
            self._call.one(Queue, "PUT", path("queues", queue, "concurrency"), json=wanted)
        )


class WorkerCalls(_Part):
    """Who works. Needs the scope `operate`."""

    def list(self) -> list[Worker]:
        return self._driver.run(self._call.all(Worker, "/v1/workers"))

    def drain(self, worker: str | Worker) -> None:
        """Ask it to finish what it runs and leave."""
        self._driver.run(self._call.ask("POST", path("workers", worker, "drain")))


class RecipeCalls(_Part):
    """Named lists of wanted outputs."""

    def list(self) -> list[Recipe]:
        return self._driver.run(self._call.all(Recipe, "/v1/recipes"))

    def get(self, name: str, *, version: int | None = None) -> Recipe:
        query = {"version": version}
        return self._driver.run(self._call.one(Recipe, "GET", path("recipes", name), query=query))

    def validate(self, recipe: Mapping[str, Any]) -> Verdict:
        """Every fault of a recipe, without keeping it."""
        wanted = dict(recipe)
        return self._driver.run(
            self._call.one(Verdict, "POST", "/v1/recipes/validate", json=wanted)
        )

    def dry_run(
        self, media: str | Media, recipe: str | Mapping[str, Any], *, version: int | None = None
    ) -> DryRun:
        """What a recipe, named or as data, would make of a media that is here."""
        named = recipe if isinstance(recipe, str) else dict(recipe)
        wanted = given(media_id=reference(media), recipe=named, version=version)
        return self._driver.run(self._call.one(DryRun, "POST", "/v1/recipes/dry-run", json=wanted))


class KeyCalls(_Part):
    """Who may do what. Needs the scope `admin`."""

    def create(
        self,
        name: str,
        *,
        role: str | None = None,
        scopes: Sequence[str] = (),
        ttl_seconds: float | None = None,
    ) -> Key:
        """A key with a role (`viewer`, `operator`, `admin`), scopes, or both; `api_key` is shown
        this once."""
        wanted = given(name=name, role=role, scopes=[*scopes], ttl_seconds=ttl_seconds)
        return self._driver.run(self._call.one(Key, "POST", "/v1/keys", json=wanted))

    def list(self) -> list[Key]:
        """The oldest first, also those that are revoked."""
        return self._driver.run(self._call.all(Key, "/v1/keys"))

    def revoke(self, key: str | Key) -> None:
        """Refuse a key from now on. Raises Conflict for the one of this client."""
        self._driver.run(self._call.ask("DELETE", path("keys", key)))

    def own(self) -> OwnKey:
        """The key of this client. Any key may ask."""
        return self._driver.run(self._call.one(OwnKey, "GET", "/v1/keys/self"))


class WebhookCalls(_Part):
    """Where a tenant wants to be told, and how that went."""

    unwrap = staticmethod(unwrap.unwrap)

    def create(
        self,
        url: str,
        *,
        types: list[str] | None = None,
        description: str | None = None,
        payload: str = "full",
        signing: str = "hmac",
    ) -> Endpoint:
        """The endpoint, with the `secret` that is shown this once."""
        wanted = {
            "url": url,
            "types": types,
            "description": description,
            "payload": payload,
            "signing": signing,
        }
        return self._driver.run(
            self._call.one(Endpoint, "POST", "/v1/webhook-endpoints", json=wanted)
        )

    def inbox(self) -> list[Letter]:
        """The newest webhooks that the platform's own inbox took (for development)."""
        return self._driver.run(self._call.all(Letter, "/v1/inbox"))

    def list(self, *, page_size: int = 50) -> Iterator[Endpoint]:
        return self._driver.iterate(
            self._call.pages(Endpoint, "/v1/webhook-endpoints", limit=page_size)
        )

    def get(self, endpoint: str | Endpoint) -> Endpoint:
        return self._driver.run(
            self._call.one(Endpoint, "GET", path("webhook-endpoints", endpoint))
        )

    def change(self, endpoint: str | Endpoint, **changes: Any) -> Endpoint:
        """Change url, description, types, payload, payload_version or state."""
        return self._driver.run(
            self._call.changed(Endpoint, path("webhook-endpoints", endpoint), changes)
        )

    def delete(self, endpoint: str | Endpoint) -> None:
        self._driver.run(self._call.matched("DELETE", path("webhook-endpoints", endpoint)))

    def rotate(self, endpoint: str | Endpoint, *, overlap_seconds: float = 86400.0) -> Endpoint:
        """A new `secret`; the old one signs beside it for the overlap."""
        wanted = {"overlap_seconds": overlap_seconds}
        return self._driver.run(
            self._call.one(
                Endpoint, "POST", path("webhook-endpoints", endpoint, "rotate-secret"), json=wanted
            )
        )

    def test(self, endpoint: str | Endpoint) -> Delivery:
        return self._driver.run(
            self._call.one(Delivery, "POST", path("webhook-endpoints", endpoint, "test"))
        )

    def recover(self, endpoint: str | Endpoint, since: datetime) -> int:
        """Deliver again what has not arrived since; how many."""
        return self._driver.run(
            self._call.recover(path("webhook-endpoints", endpoint, "recover"), since.isoformat())
        )

    def deliveries(
        self, endpoint: str | Endpoint, *, state: str | None = None, page_size: int = 50
    ) -> Iterator[Delivery]:
        return self._driver.iterate(
            self._call.pages(
                Delivery,
                path("webhook-endpoints", endpoint, "deliveries"),
                state=state,
                limit=page_size,
            )
        )

    def delivery(self, delivery: str | Delivery) -> Delivery:
        """With what was sent and every attempt."""
        return self._driver.run(self._call.one(Delivery, "GET", path("deliveries", delivery)))

    def redeliver(self, delivery: str | Delivery) -> Delivery:
        """Send it again now, under the same `webhook-id`."""
        return self._driver.run(
            self._call.one(Delivery, "POST", path("deliveries", delivery, "redeliver"))
        )

"""The client for asyncio. Its blocking twin has the same names and signatures (by test)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mediamill.client import unwrap
from mediamill.client.calls import Calls, OnProgress, Way, path, reference
from mediamill.client.drivers import AsyncDriver
from mediamill.client.models import (
    Delivery,
    Endpoint,
    Event,
    Job,
    Media,
    MediaItem,
    Queue,
    Recipe,
    Replayed,
    Slot,
    Timeline,
    Verdict,
    Worker,
)
from mediamill.client.place import place
from mediamill.client.steps import Source


class AsyncClient:
    """Speaks to one installation with one API key.

    `url` and `api_key` default to MEDIAMILL_URL and MEDIAMILL_API_KEY. What may succeed later is
    tried again, at most `max_retries` times, under one Idempotency-Key.

        async with AsyncClient() as client:
            media = await client.media.submit("holiday.mov", recipe="web", on_progress=print)
            media = await client.media.wait(media, on_progress=print)
            async for item in client.media.list(state="failed"):
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
        self._driver = AsyncDriver(*place(url, api_key), timeout_seconds, transport)
        call = Calls(max_retries)
        self.media = MediaCalls(self._driver, call)
        self.jobs = JobCalls(self._driver, call)
        self.dead_letters = DeadLetterCalls(self._driver, call)
        self.queues = QueueCalls(self._driver, call)
        self.workers = WorkerCalls(self._driver, call)
        self.recipes = RecipeCalls(self._driver, call)
        self.webhooks = WebhookCalls(self._driver, call)
        self._call = call

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._driver.close()

    def events(self, *, types: str | None = None, after: str | None = None) -> AsyncIterator[Event]:
        """Everything that happens to the tenant, from now or after a `cursor`, over cuts."""
        return self._driver.iterate(self._call.follow("/v1/events", types=types, after=after))


class _Part:
    def __init__(self, driver: AsyncDriver, call: Calls) -> None:
        self._driver = driver
        self._call = call


class MediaCalls(_Part):
    """Uploads, their status and what came of them."""

    async def submit(
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
        return await self._driver.run(
            self._call.submit(
                Source(file, filename),
                wanted,
                way=way,
                state_file=None if resume_from is None else Path(resume_from),
                on_progress=on_progress,
            )
        )

    async def open(
        self,
        *,
        size: int | None = None,
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
        """A slot for somebody else to fill, such as a browser: `upload` is what it sends. Of an
        exact `size`, or with `max_size` a form, where the storage takes forms; then `complete` it.
        """
        wanted = {
            "size": size,
            "max_size": max_size,
            "recipe": recipe,
            "recipe_version": recipe_version,
            "filename": filename,
            "content_type": content_type,
            "sha256": sha256,
            "metadata": dict(metadata or {}),
            "ttl_seconds": ttl_seconds,
            "callback_url": callback_url,
        }
        given = {k: v for k, v in wanted.items() if v is not None}
        return await self._driver.run(self._call.one(Slot, "POST", "/v1/media", json=given))

    async def complete(self, media: str | Media) -> Media:
        """Say that a slot was filled; it is queued. Safe to repeat."""
        return await self._driver.run(
            self._call.one(Media, "POST", path("media", media, "complete"))
        )

    async def get(self, media: str | Media) -> Media:
        return await self._driver.run(self._call.one(Media, "GET", path("media", media)))

    def list(self, *, state: str | None = None, page_size: int = 50) -> AsyncIterator[MediaItem]:
        """Newest first, page by page as you go; `state` takes several with commas."""
        return self._driver.iterate(
            self._call.pages(MediaItem, "/v1/media", state=state, limit=page_size)
        )

    async def wait(
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
        return await self._driver.run(
            self._call.wait(
                "media",
                reference(media),
                Media,
                timeout_seconds=timeout_seconds,
                on_progress=on_progress,
                check=check,
            )
        )

    async def process(
        self, media: str | Media, *, recipe: str | None = None, recipe_version: int | None = None
    ) -> Media:
        """Process it again; what is published stays served meanwhile."""
        wanted = {"recipe": recipe, "recipe_version": recipe_version}
        return await self._driver.run(
            self._call.one(Media, "POST", path("media", media, "process"), json=wanted)
        )

    async def delete(self, media: str | Media) -> None:
        await self._driver.run(self._call.ask("DELETE", path("media", media)))

    async def timeline(self, media: str | Media) -> Timeline:
        """Where the time went."""
        return await self._driver.run(
            self._call.one(Timeline, "GET", path("media", media, "timeline"))
        )

    def events(self, media: str | Media, *, after: str | None = None) -> AsyncIterator[Event]:
        """What happens to it, until it is at an end."""
        return self._driver.iterate(
            self._call.follow(path("media", media, "events"), types=None, after=after)
        )

    async def download(self, media: str | Media, name: str, into: str | Path) -> Path:
        """Write a variant to a file (or into a folder), checked against the manifest."""
        return await self._driver.run(self._call.download(reference(media), name, Path(into)))


class JobCalls(_Part):
    """Units of background work."""

    async def create(
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
        return await self._driver.run(self._call.one(Job, "POST", "/v1/jobs", json=wanted))

    async def get(self, job: str | Job) -> Job:
        return await self._driver.run(self._call.one(Job, "GET", path("jobs", job)))

    def list(
        self,
        *,
        state: str | None = None,
        kind: str | None = None,
        queue: str | None = None,
        page_size: int = 50,
    ) -> AsyncIterator[Job]:
        """Newest first, page by page as you go; `state` takes several with commas."""
        return self._driver.iterate(
            self._call.pages(Job, "/v1/jobs", state=state, kind=kind, queue=queue, limit=page_size)
        )

    async def wait(
        self,
        job: str | Job,
        *,
        timeout_seconds: float | None = None,
        on_progress: OnProgress | None = None,
        check: bool = True,
    ) -> Job:
        """The job at its end. Raises WaitTimeout, and WorkFailed unless `check` is false."""
        return await self._driver.run(
            self._call.wait(
                "jobs",
                reference(job),
                Job,
                timeout_seconds=timeout_seconds,
                on_progress=on_progress,
                check=check,
            )
        )

    async def cancel(self, job: str | Job) -> Job:
        return await self._driver.run(self._call.one(Job, "POST", path("jobs", job, "cancel")))

    async def replay(self, job: str | Job) -> Job:
        """Queue a failed job again. Raises Conflict when it is not failed."""
        return await self._driver.run(self._call.one(Job, "POST", path("jobs", job, "replay")))

    async def timeline(self, job: str | Job) -> Timeline:
        return await self._driver.run(
            self._call.one(Timeline, "GET", path("jobs", job, "timeline"))
        )

    def events(self, job: str | Job, *, after: str | None = None) -> AsyncIterator[Event]:
        return self._driver.iterate(
            self._call.follow(path("jobs", job, "events"), types=None, after=after)
        )


class DeadLetterCalls(_Part):
    """Jobs whose attempts are used up."""

    def list(
        self,
        *,
        code: str | None = None,
        kind: str | None = None,
        queue: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        page_size: int = 50,
    ) -> AsyncIterator[Job]:
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

    async def get(self, job: str | Job) -> Job:
        """With every attempt: its commands and the last words of its tools."""
        return await self._driver.run(self._call.one(Job, "GET", path("dead-letters", job)))

    async def replay(
        self,
        *,
        code: str | None = None,
        kind: str | None = None,
        queue: str | None = None,
        rate_per_second: float = 10.0,
        limit: int = 10_000,
    ) -> Replayed:
        """Replay all that fit, at a rate."""
        wanted = {
            "filter": {"code": code, "kind": kind, "queue": queue},
            "rate_per_second": rate_per_second,
            "limit": limit,
        }
        return await self._driver.run(
            self._call.one(Replayed, "POST", "/v1/dead-letters/replay", json=wanted)
        )

    async def discard(self, job: str | Job) -> Job:
        """Take it off the list for good; it stays failed."""
        return await self._driver.run(
            self._call.one(Job, "POST", path("dead-letters", job, "discard"))
        )


class QueueCalls(_Part):
    """Where jobs wait. Needs the scope `operate`."""

    async def list(self) -> list[Queue]:
        return await self._driver.run(self._call.all(Queue, "/v1/queues"))

    async def pause(self, queue: str) -> Queue:
        """Claim no more of it, everywhere; what runs finishes."""
        return await self._driver.run(self._call.one(Queue, "POST", path("queues", queue, "pause")))

    async def resume(self, queue: str) -> Queue:
        return await self._driver.run(
            self._call.one(Queue, "POST", path("queues", queue, "resume"))
        )

    async def cap(self, queue: str, concurrency: int | None) -> Queue:
        """At most so many at once over all workers; None leaves it to their slots."""
        wanted = {"concurrency": concurrency}
        return await self._driver.run(
            self._call.one(Queue, "PUT", path("queues", queue, "concurrency"), json=wanted)
        )


class WorkerCalls(_Part):
    """Who works. Needs the scope `operate`."""

    async def list(self) -> list[Worker]:
        return await self._driver.run(self._call.all(Worker, "/v1/workers"))

    async def drain(self, worker: str | Worker) -> None:
        """Ask it to finish what it runs and leave."""
        await self._driver.run(self._call.ask("POST", path("workers", worker, "drain")))


class RecipeCalls(_Part):
    """Named lists of wanted outputs."""

    async def list(self) -> list[Recipe]:
        return await self._driver.run(self._call.all(Recipe, "/v1/recipes"))

    async def get(self, name: str, *, version: int | None = None) -> Recipe:
        query = {"version": version}
        return await self._driver.run(
            self._call.one(Recipe, "GET", path("recipes", name), query=query)
        )

    async def validate(self, recipe: Mapping[str, Any]) -> Verdict:
        """Every fault of a recipe, without keeping it."""
        wanted = dict(recipe)
        return await self._driver.run(
            self._call.one(Verdict, "POST", "/v1/recipes/validate", json=wanted)
        )


class WebhookCalls(_Part):
    """Where a tenant wants to be told, and how that went."""

    unwrap = staticmethod(unwrap.unwrap)

    async def create(
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
        return await self._driver.run(
            self._call.one(Endpoint, "POST", "/v1/webhook-endpoints", json=wanted)
        )

    def list(self, *, page_size: int = 50) -> AsyncIterator[Endpoint]:
        return self._driver.iterate(
            self._call.pages(Endpoint, "/v1/webhook-endpoints", limit=page_size)
        )

    async def get(self, endpoint: str | Endpoint) -> Endpoint:
        return await self._driver.run(
            self._call.one(Endpoint, "GET", path("webhook-endpoints", endpoint))
        )

    async def change(self, endpoint: str | Endpoint, **changes: Any) -> Endpoint:
        """Change url, description, types, payload, payload_version or state."""
        return await self._driver.run(
            self._call.changed(Endpoint, path("webhook-endpoints", endpoint), changes)
        )

    async def delete(self, endpoint: str | Endpoint) -> None:
        await self._driver.run(self._call.matched("DELETE", path("webhook-endpoints", endpoint)))

    async def rotate(
        self, endpoint: str | Endpoint, *, overlap_seconds: float = 86400.0
    ) -> Endpoint:
        """A new `secret`; the old one signs beside it for the overlap."""
        wanted = {"overlap_seconds": overlap_seconds}
        return await self._driver.run(
            self._call.one(
                Endpoint, "POST", path("webhook-endpoints", endpoint, "rotate-secret"), json=wanted
            )
        )

    async def test(self, endpoint: str | Endpoint) -> Delivery:
        return await self._driver.run(
            self._call.one(Delivery, "POST", path("webhook-endpoints", endpoint, "test"))
        )

    async def recover(self, endpoint: str | Endpoint, since: datetime) -> int:
        """Deliver again what has not arrived since; how many."""
        return await self._driver.run(
            self._call.recover(path("webhook-endpoints", endpoint, "recover"), since.isoformat())
        )

    def deliveries(
        self, endpoint: str | Endpoint, *, state: str | None = None, page_size: int = 50
    ) -> AsyncIterator[Delivery]:
        return self._driver.iterate(
            self._call.pages(
                Delivery,
                path("webhook-endpoints", endpoint, "deliveries"),
                state=state,
                limit=page_size,
            )
        )

    async def delivery(self, delivery: str | Delivery) -> Delivery:
        """With what was sent and every attempt."""
        return await self._driver.run(self._call.one(Delivery, "GET", path("deliveries", delivery)))

    async def redeliver(self, delivery: str | Delivery) -> Delivery:
        """Send it again now, under the same `webhook-id`."""
        return await self._driver.run(
            self._call.one(Delivery, "POST", path("deliveries", delivery, "redeliver"))
        )

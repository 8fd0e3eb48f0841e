"""Events of a bucket that wait in a queue: SQS of Amazon, or a pull subscription of Pub/Sub.

A message is a hint as any other. It is taken off its queue once what it led to is committed; what
cannot be followed now comes again by itself, until no slot can be open that it could be about.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import asyncpg
import httpx2 as httpx
import structlog

from mediamill import db, failpoints, storage_events, tallies
from mediamill.config import ConfigError, Settings
from mediamill.failures import Code, Failure
from mediamill.storage import Storage
from mediamill.storage_events import Hint, Unreadable

log = structlog.get_logger()

_MOST: Final = 10  # messages at once; SQS gives no more
_WAIT_SECONDS: Final = 20  # for the first message; SQS takes no more
_HOLD_SECONDS: Final = 120  # that nobody else gets them
_AT_ONCE: Final = 4
_TIMEOUT: Final = httpx.Timeout(30.0, connect=3.0, read=100.0)  # Pub/Sub keeps us for up to 90 s
_LONGEST_PAUSE_SECONDS: Final = 60.0
_SCOPE: Final = "https://www.googleapis.com/auth/pubsub"


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `receipt` is what takes it off the queue; `sent_at` may not be known."""

    body: bytes
    receipt: str
    sent_at: datetime | None


class Queue(Protocol):
    """Where messages wait."""

    name: str

    async def take(self) -> list[Message]:
        """Messages as soon as there are any, or none after a while. Raises Failure."""

    async def done(self, messages: Sequence[Message]) -> None:
        """Take these off. What was not told in time comes again. Raises Failure."""

    async def close(self) -> None: ...


def queues(settings: Settings) -> list[Queue]:
    """The queues that the settings name. Raises ConfigError when what one needs is not
    installed."""
    wanted: list[tuple[str, str, Callable[[Settings], Queue]]] = []
    if settings.sqs_queue_url is not None:
        wanted.append(("sqs_queue_url", "s3", Sqs))
    if settings.pubsub_subscription is not None:
        wanted.append(("pubsub_subscription", "gcs", PubSub))
    found = []
    for setting, extra, make in wanted:
        try:
            found.append(make(settings))
        except ImportError as error:
            raise ConfigError(
                f"{setting} needs {error.name}: pip install 'mediamill[{extra}]'"
            ) from None
    return found


class Puller:
    """One process's share of what waits in one queue."""

    def __init__(self, settings: Settings, pool: db.Pool, store: Storage, queue: Queue) -> None:
        self._settings = settings
        self._pool = pool
        self._store = store
        self._queue = queue
        # A slot that a message is about was open when it was sent, so it is closed after this; the
        # reconciler has looked at it then.
        self._worth_seconds = max(settings.upload_ttl_seconds, settings.resumable_ttl_seconds)

    async def run(self) -> None:
        """Follow what comes until canceled. Pauses grow while something is down."""
        failed = 0
        try:
            while True:
                try:
                    await self.once()
                    failed = 0
                except (Failure, db.Unavailable, asyncpg.PostgresError) as error:
                    failed += 1
                    log.warning(
                        "pull_failed", queue=self._queue.name, error=str(error)[:300], times=failed
                    )
                except Exception:
                    failed += 1
                    log.exception("pull_failed", queue=self._queue.name)
                if failed:
                    longest = min(_LONGEST_PAUSE_SECONDS, 2.0 ** min(failed, 10))
                    await asyncio.sleep(random.uniform(0.5, 1) * longest)  # noqa: S311
        finally:
            await self._queue.close()

    async def once(self) -> int:
        """Take what waits, follow it, and take off what is settled; how many came.

        Raises Failure, db.Unavailable or a database error if something has to wait.
        """
        messages = await self._queue.take()
        room = asyncio.Semaphore(_AT_ONCE)

        async def settled(message: Message) -> Exception | None:
            async with room:
                return await self._settle(message, counted)

        counted: Counter[tuple[str, str]] = Counter()
        troubles = await asyncio.gather(*map(settled, messages))
        if counted:
            async with db.transaction(self._pool) as connection:
                await tallies.add(connection, tallies.PULLED, counted)
        failpoints.hit("pull.followed")
        pairs = zip(messages, troubles, strict=True)
        if done := [message for message, trouble in pairs if trouble is None]:
            await self._queue.done(done)
        for trouble in filter(None, troubles):
            raise trouble
        return len(messages)

    async def _settle(
        self, message: Message, counted: Counter[tuple[str, str]]
    ) -> Exception | None:
        """Follow one message; why it has to come again, or None if it is done with."""

        def count(outcome: str) -> None:
            counted[self._queue.name, outcome] += 1

        try:
            for hint in storage_events.read(message.body):
                if isinstance(hint, Hint):
                    count(
                        await storage_events.follow(self._pool, self._store, self._settings, hint)
                    )
        except Unreadable as error:
            log.warning("storage_event_unreadable", source=self._queue.name, why=str(error))
            count("unreadable")
        except (Failure, db.Unavailable, asyncpg.PostgresError) as error:
            if isinstance(error, Failure) and not error.code.retryable:
                count("refused")
            elif self._is_old(message):
                log.warning("storage_event_given_up", source=self._queue.name)
                count("given_up")
            else:
                count("put_off")
                return error
        except Exception:
            # It would fail the same way again, and the reconciler finds what it is about.
            log.exception("storage_event_failed", source=self._queue.name)
            count("failed")
        return None

    def _is_old(self, message: Message) -> bool:
        return (
            message.sent_at is not None
            and (datetime.now(UTC) - message.sent_at).total_seconds() > self._worth_seconds
        )


class Sqs:
    """A queue of SQS, spoken to in its JSON protocol; botocore signs."""

    name = "sqs"

    def __init__(self, settings: Settings) -> None:
        from botocore.credentials import Credentials
        from botocore.session import Session

        assert settings.sqs_queue_url is not None
        self._queue_url = settings.sqs_queue_url
        parts = urlsplit(self._queue_url)
        self._endpoint = f"{parts.scheme}://{parts.netloc}/"
        # sqs.eu-west-1.amazonaws.com; other hosts are asked as if they were where the bucket is.
        labels = (parts.hostname or "").split(".")
        ours = labels[0] == "sqs" and len(labels) > 3
        self._region = labels[1] if ours else settings.s3_region
        if settings.s3_access_key_id is not None:
            self._credentials = Credentials(
                settings.s3_access_key_id, settings.s3_secret_access_key
            )
        else:
            self._credentials = Session().get_credentials()
        if self._credentials is None:
            raise ConfigError(
                "sqs_queue_url: there are no credentials for the queue; set s3_access_key_id and "
                "s3_secret_access_key, or give this machine a role"
            )
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False)

    async def take(self) -> list[Message]:
        answer = await self._call(
            "ReceiveMessage",
            MaxNumberOfMessages=_MOST,
            WaitTimeSeconds=_WAIT_SECONDS,
            VisibilityTimeout=_HOLD_SECONDS,
            AttributeNames=["SentTimestamp"],
        )
        return [
            Message(
                body=str(each["Body"]).encode("utf-8", "replace"),
                receipt=str(each["ReceiptHandle"]),
                sent_at=_from_milliseconds(each.get("Attributes", {}).get("SentTimestamp")),
            )
            for each in answer.get("Messages") or ()
        ]

    async def done(self, messages: Sequence[Message]) -> None:
        entries = [
            {"Id": str(number), "ReceiptHandle": message.receipt}
            for number, message in enumerate(messages)
        ]
        answer = await self._call("DeleteMessageBatch", Entries=entries)
        if failed := answer.get("Failed"):  # they come again, and make nothing new
            log.warning("pull_not_taken_off", queue=self.name, count=len(failed))

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(self, action: str, **parameters: Any) -> dict[str, Any]:
        from botocore.auth import SigV4Auth
        from botocore.awsrequest import AWSRequest

        content = json.dumps({"QueueUrl": self._queue_url, **parameters}).encode()
        headers = {
            "Content-Type": "application/x-amz-json-1.0",
            "X-Amz-Target": f"AmazonSQS.{action}",
        }
        # A role's keys may have to be fetched again.
        keys = await asyncio.to_thread(self._credentials.get_frozen_credentials)
        request = AWSRequest("POST", self._endpoint, data=content, headers=headers)
        SigV4Auth(keys, "sqs", self._region).add_auth(request)
        headers = dict(request.headers.items())
        return await _json(
            self.name, self._client.post(self._endpoint, content=content, headers=headers)
        )


class PubSub:
    """A pull subscription of Pub/Sub, by its REST form; google-auth has the credentials."""

    name = "pubsub"

    def __init__(self, settings: Settings) -> None:
        assert settings.pubsub_subscription is not None
        self._base = f"{settings.pubsub_endpoint}/v1/{settings.pubsub_subscription}"
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False)
        # An address without TLS is an emulator's; no token goes there.
        self._account = _Account() if settings.pubsub_endpoint.startswith("https:") else None

    async def take(self) -> list[Message]:
        answer = await self._call("pull", {"maxMessages": _MOST})
        messages = [
            Message(
                body=json.dumps({"message": each["message"]}).encode(),
                receipt=str(each["ackId"]),
                sent_at=_from_rfc3339(each["message"].get("publishTime")),
            )
            for each in answer.get("receivedMessages") or ()
        ]
        if messages:
            receipts = [message.receipt for message in messages]
            await self._call(
                "modifyAckDeadline", {"ackIds": receipts, "ackDeadlineSeconds": _HOLD_SECONDS}
            )
        return messages

    async def done(self, messages: Sequence[Message]) -> None:
        await self._call("acknowledge", {"ackIds": [message.receipt for message in messages]})

    async def close(self) -> None:
        await self._client.aclose()
        if self._account is not None:
            self._account.close()

    async def _call(self, verb: str, content: Mapping[str, Any]) -> dict[str, Any]:
        headers = {}
        if self._account is not None:
            headers["Authorization"] = f"Bearer {await self._account.token()}"
        return await _json(
            self.name,
            self._client.post(f"{self._base}:{verb}", json=dict(content), headers=headers),
        )


class _Account:
    """This machine's account at Google, as google-auth finds it."""

    def __init__(self) -> None:
        from google.auth.transport.requests import Request

        self._request = Request()
        self._credentials: Any = None
        self._turn = asyncio.Lock()

    async def token(self) -> str:
        """A token that is still good for a while. Raises Failure."""
        async with self._turn:
            if self._credentials is None or not self._credentials.valid:
                await asyncio.to_thread(self._renew)
            return str(self._credentials.token)

    def close(self) -> None:
        self._request.session.close()

    def _renew(self) -> None:
        import google.auth
        from google.auth.exceptions import GoogleAuthError, TransportError

        try:
            if self._credentials is None:
                self._credentials, _ = google.auth.default(scopes=[_SCOPE])
            self._credentials.refresh(self._request)
        except TransportError:
            raise Failure(Code.TARGET_UNREACHABLE, "Google's token host did not answer.") from None
        except GoogleAuthError as error:
            raise Failure(Code.STORAGE_AUTH, f"No token for Pub/Sub: {error}"[:200]) from None


async def _json(who: str, call: Awaitable[httpx.Response]) -> dict[str, Any]:
    """The answer's body. Raises Failure."""
    try:
        answer = await call
    except httpx.HTTPError as error:
        raise Failure(Code.TARGET_UNREACHABLE, f"{who}: {type(error).__name__}.") from None
    if answer.status_code in (401, 403):
        raise Failure(Code.STORAGE_AUTH, _said(who, answer))
    if answer.status_code != HTTPStatus.OK:
        raise Failure(Code.TARGET_UNREACHABLE, _said(who, answer))
    try:
        body = answer.json() if answer.content else {}
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Failure(Code.TARGET_UNREACHABLE, f"{who} did not answer with a JSON object.")
    return body


def _said(who: str, answer: httpx.Response) -> str:
    return f"{who} answered {answer.status_code}: {answer.text[:200]}"


def _from_milliseconds(value: Any) -> datetime | None:
    with suppress(TypeError, ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(int(value) / 1000, UTC)
    return None


def _from_rfc3339(value: Any) -> datetime | None:
    with suppress(TypeError, ValueError):
        return datetime.fromisoformat(str(value)).astimezone(UTC)
    return None

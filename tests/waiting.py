"""Stand-ins for queues of events: SQS in its JSON protocol, and Pub/Sub in its REST form."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Thread
from typing import Any
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


@dataclass(slots=True)
class Waiting:
    """A message. It is hidden until `hidden_until`, on the clock of this machine."""

    content: Any
    sent_at: float
    hidden_until: float = 0.0
    receipt: str = ""
    taken: int = 0


@dataclass(slots=True)
class QueueHost:
    """Both kinds on one port, over the same messages."""

    url: str = ""
    waiting: list[Waiting] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: list[str] = field(default_factory=list)
    access_key: str = "test-key"
    region: str = "eu-west-1"
    answer: int = 200
    """Anything but 200 is what every call gets."""
    wait_seconds: float = 0.2
    """In place of the long poll."""

    def send(self, content: Any, *, age_seconds: float = 0.0) -> None:
        self.waiting.append(Waiting(content, time.time() - age_seconds))

    def show_again(self) -> None:
        """As after the time for which a taken message is hidden."""
        for each in self.waiting:
            each.hidden_until = 0.0

    async def take(self, most: int, hide_seconds: float) -> list[Waiting]:
        began = time.time()
        while True:
            now = time.time()
            found = [each for each in self.waiting if each.hidden_until <= now][:most]
            if found or now >= began + self.wait_seconds:
                break
            await asyncio.sleep(0.01)
        for each in found:
            each.hidden_until, each.receipt = now + hide_seconds, uuid4().hex
            each.taken += 1
        return found

    def take_off(self, receipts: list[str]) -> None:
        self.waiting = [each for each in self.waiting if each.receipt not in receipts]

    async def sqs(self, request: Request) -> Response:
        action = request.headers["x-amz-target"].removeprefix("AmazonSQS.")
        assert request.headers["content-type"] == "application/x-amz-json-1.0"
        assert re.fullmatch(
            rf"AWS4-HMAC-SHA256 Credential={self.access_key}/[0-9]+/{self.region}/sqs/"
            r"aws4_request, SignedHeaders=\S+x-amz-target, Signature=[0-9a-f]{64}",
            request.headers["authorization"],
        )
        self.calls.append(action)
        if self.answer != 200:
            return JSONResponse({"__type": "com.amazonaws.sqs#Broken"}, self.answer)
        given = await request.json()
        assert given["QueueUrl"] == f"{self.url}/1/uploads"
        if action == "DeleteMessageBatch":
            self.take_off([entry["ReceiptHandle"] for entry in given["Entries"]])
            return JSONResponse(
                {"Successful": [{"Id": e["Id"]} for e in given["Entries"]], "Failed": []}
            )
        assert action == "ReceiveMessage"
        self.called.set()
        found = await self.take(given["MaxNumberOfMessages"], given["VisibilityTimeout"])
        messages = [
            {
                "MessageId": uuid4().hex,
                "ReceiptHandle": each.receipt,
                "Body": each.content if isinstance(each.content, str) else json.dumps(each.content),
                "Attributes": {"SentTimestamp": str(int(each.sent_at * 1000))},
            }
            for each in found
        ]
        return JSONResponse({"Messages": messages} if messages else {})

    async def pubsub(self, request: Request) -> Response:
        verb = request.path_params["rest"].rpartition(":")[2]
        self.calls.append(verb)
        self.tokens.append(request.headers.get("authorization", ""))
        if self.answer != 200:
            return JSONResponse({"error": {"status": "UNAVAILABLE"}}, self.answer)
        given = await request.json()
        match verb:
            case "pull":
                self.called.set()
                found = await self.take(given["maxMessages"], 10)
                messages = [
                    {
                        "ackId": each.receipt,
                        "message": each.content["message"]
                        | {
                            "publishTime": datetime.fromtimestamp(each.sent_at, UTC)
                            .isoformat()
                            .replace("+00:00", "123Z")
                        },
                    }
                    for each in found
                ]
                return JSONResponse({"receivedMessages": messages} if messages else {})
            case "modifyAckDeadline":
                for each in self.waiting:
                    if each.receipt in given["ackIds"]:
                        each.hidden_until = time.time() + given["ackDeadlineSeconds"]
            case "acknowledge":
                self.take_off(given["ackIds"])
            case _:
                raise AssertionError(verb)
        return JSONResponse({})

    async def token(self, request: Request) -> Response:
        form = dict(pair.split("=", 1) for pair in (await request.body()).decode().split("&"))
        assert form["assertion"].count(".") == 2
        self.calls.append("token")
        return JSONResponse({"access_token": "a-token", "expires_in": 3600})


@asynccontextmanager
async def queue_host() -> AsyncIterator[QueueHost]:
    host = QueueHost()
    app = Starlette(
        routes=[
            Route("/", host.sqs, methods=["POST"]),
            Route("/v1/{rest:path}", host.pubsub, methods=["POST"]),
            Route("/token", host.token, methods=["POST"]),
        ]
    )
    listener = socket.create_server(("127.0.0.1", 0))
    host.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve(sockets=[listener]))
    try:
        yield host
    finally:
        server.should_exit = True
        await task


@contextmanager
def queue_host_apart() -> Iterator[QueueHost]:
    """The same on a thread of its own, for tests that drive processes."""
    started: Future[tuple[QueueHost, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with queue_host() as host:
            ended = asyncio.Event()
            started.set_result((host, asyncio.get_running_loop(), ended))
            await ended.wait()

    thread = Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    host, loop, ended = started.result(timeout=10)
    try:
        yield host
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()

"""Files that we fetch ourselves, from addresses that clients name, through the guarded way out.

A fetch is an upload whose client we are: it goes on where it was cut off, whoever takes it up, and
ends in the same acceptance. How long it may take is the upload's time to live; each stretch has a
limit of its own.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Final

import structlog

from mediamill import db
from mediamill.config import Settings
from mediamill.egress import Caps, Egress, Reply
from mediamill.failures import Code, Failure, Problem, Refused, Verdict
from mediamill.tus import Cut, Transfer, Transfers

log = structlog.get_logger()

PROTOCOL: Final = "fetch"
_AT_ONCE: Final = 4
_POLL_SECONDS: Final = 1.0
_HOLD_SECONDS: Final = 30.0
_STRETCH_SECONDS: Final = 3600.0
_REDIRECTS: Final = 5
_TRIES: Final = 5
_BUSY: Final = frozenset({408, 425, 429})
_RANGE: Final = re.compile(r"bytes (\d{1,16})-\d{1,16}/(\d{1,16}|\*)")
_TYPE: Final = re.compile(r"(image|video|audio)/[a-z0-9.+-]{1,80}")


class Fetcher:
    """One process's share of the fetching."""

    def __init__(self, settings: Settings, transfers: Transfers, egress: Egress) -> None:
        self._settings = settings
        self._transfers = transfers
        self._egress = egress
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Fetch what is due until canceled; what runs then is taken up by others."""
        try:
            while True:
                try:
                    await self.begin()
                except db.Unavailable as error:
                    log.warning("fetch_failed", error=type(error).__name__)
                await asyncio.sleep(_POLL_SECONDS * random.uniform(0.8, 1.2))  # noqa: S311
        finally:
            for task in list(self._running):
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def begin(self) -> int:
        """Start what is due and has room; how many."""
        room = _AT_ONCE - len(self._running)
        if room <= 0:
            return 0
        claimed = await self._transfers.claim_sources(most=room, hold_seconds=_HOLD_SECONDS)
        for transfer in claimed:
            task = asyncio.create_task(self.fetch(transfer))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return len(claimed)

    async def fetch(self, transfer: Transfer) -> None:
        """Bring one file in as far as it goes, and settle what comes of it."""
        said = log.bind(upload=str(transfer.id), attempt=transfer.tries)
        holding = asyncio.create_task(self._hold(transfer))
        try:
            await self._bring(transfer)
            said.info("fetched")
        except Refused as refused:
            if refused.code in (Code.UPLOAD_TAKEN_OVER, Code.UPLOAD_EXPIRED, Code.GONE):
                return
            await self._end(transfer, refused.problem)
        except Failure as failure:
            final = failure.code.verdict is Verdict.PERMANENT or transfer.tries >= _TRIES
            said.warning("fetch_failed", code=failure.code.code, final=final)
            if final:
                await self._end(transfer, failure.problem)
            else:
                delay = random.uniform(0.5, 1) * 2 ** (transfer.tries - 1)  # noqa: S311
                await self._transfers.put_off(transfer, seconds=delay)
        except db.Unavailable:
            said.warning("fetch_interrupted")
        except Exception:
            said.exception("fetch_failed")
        finally:
            holding.cancel()

    async def _end(self, transfer: Transfer, problem: Problem) -> None:
        with suppress(db.Unavailable):
            await self._transfers.blame(transfer, problem)

    async def _hold(self, transfer: Transfer) -> None:
        """Keep others from taking it up while we are at it."""
        while True:
            await asyncio.sleep(_HOLD_SECONDS / 3)
            with suppress(db.Unavailable):
                await self._transfers.put_off(transfer, seconds=_HOLD_SECONDS)

    async def _bring(self, transfer: Transfer) -> None:
        assert transfer.source is not None
        headers = {"Accept": "image/*, video/*, audio/*, */*;q=0.5"}
        if transfer.received:
            headers["Range"] = f"bytes={transfer.received}-"
        largest = max(
            self._settings.max_video_bytes,
            self._settings.max_image_bytes,
            self._settings.max_audio_bytes,
        )
        caps = Caps(total_seconds=_STRETCH_SECONDS, body_bytes=largest + 1, redirects=_REDIRECTS)
        call = self._egress.call("GET", transfer.source, headers=headers, caps=caps)
        async with call as reply:
            skipped, size = _offered(reply, transfer.received)
            if size is not None:
                transfer = await self._transfers.declare_size(
                    transfer, size, content_type=_content_type(reply)
                )
            try:
                async with aclosing(_rest(reply, skipped)) as chunks:
                    transfer = await self._transfers.append(
                        transfer, transfer.received, chunks, length=None
                    )
            except Cut:
                raise Failure(Code.TARGET_UNREACHABLE, "The connection was cut.") from None
            if size is None:
                transfer = await self._transfers.declare_size(
                    transfer, transfer.received, content_type=_content_type(reply)
                )
                await self._transfers.finish(transfer)
            elif not transfer.whole:
                raise Failure(Code.TARGET_UNREACHABLE, "It ended before the length that it said.")


def _offered(reply: Reply, received: int) -> tuple[int, int | None]:
    """How many bytes of the answer we have already, and the size of the file. Raises Failure."""
    length = reply.headers.get("content-length", "")
    if reply.status == 206:
        match = _RANGE.fullmatch(reply.headers.get("content-range", ""))
        if match is None or int(match[1]) != received:
            raise Failure(Code.SOURCE_CHANGED, "The address answers with another range.")
        return 0, None if match[2] == "*" else int(match[2])
    if reply.status == 200:
        return received, int(length) if length.isascii() and length.isdigit() else None
    if reply.status == 416:
        raise Failure(Code.SOURCE_CHANGED, "The file became shorter while it was fetched.")
    if reply.status >= 500 or reply.status in _BUSY:
        raise Failure(Code.TARGET_UNREACHABLE, f"The address answered {reply.status}.")
    raise Failure(Code.SOURCE_MISSING, f"The address answered {reply.status}.")


async def _rest(reply: Reply, skipped: int) -> AsyncGenerator[bytes, None]:
    """The body without what we have already. Where it breaks off, what came before it counts."""
    try:
        async for chunk in reply.chunks():
            if skipped < len(chunk):
                yield chunk[skipped:]
            skipped = max(0, skipped - len(chunk))
    except Exception as error:  # the connection's own kinds, which only the caller can tell apart
        raise Cut from error


def _content_type(reply: Reply) -> str | None:
    """The type that the address says, if it says one that helps."""
    essence = reply.headers.get("content-type", "").partition(";")[0].strip().lower()
    return essence if _TYPE.fullmatch(essence) else None

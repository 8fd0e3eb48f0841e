"""The shop's jobs, with a worker killed in the middle: `python -m examples.shop.demo`.

Starts a mail sink, a payment stub, an API and workers, on the PostgreSQL that
MEDIAMILL_DATABASE_URL names or on an embedded one. It ends with an error unless every count is what
the guarantees say.
"""

# ruff: noqa: T201  # it tells what it does
from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import asyncpg
from examples.shop import tables
from examples.shop.installation import Installation, Worker, running
from examples.shop.jobs import close_month
from examples.shop.payments_stub import PaymentsStub
from examples.shop.smtp_sink import SmtpSink

from mediamill.embedded import Embedded

APP: Final = "examples.shop.jobs:mill"
ORDERS: Final = 12


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="shop-") as name:
        folder = Path(name)
        given = os.environ.get("MEDIAMILL_DATABASE_URL")
        if given is not None:
            asyncio.run(show(given, folder, sink=SmtpSink(), payments=PaymentsStub()))
            return
        server = Embedded(folder / "postgres")
        try:
            url = server.start()
            asyncio.run(show(url, folder, sink=SmtpSink(), payments=PaymentsStub()))
        finally:
            server.close()


async def show(
    database_url: str, folder: Path, *, sink: SmtpSink, payments: PaymentsStub, **settings: object
) -> None:
    """The whole demonstration. Raises SystemExit as soon as something is not as promised."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(sink)
        await stack.enter_async_context(payments)
        database = await asyncpg.connect(database_url)
        stack.push_async_callback(database.close)
        await tables.create(database, orders=ORDERS)
        env = {
            "SHOP_DATABASE_URL": database_url,
            "SHOP_EXPORTS": str(folder),
            "SHOP_SMTP": sink.address,
            "SHOP_PAYMENTS": payments.url,
        }
        here = await stack.enter_async_context(running(database_url, folder, env=env, **settings))
        first = await here.start_worker(APP, MEDIAMILL_FAILPOINT="app.effect:kill9:5")
        print(f"API {here.http.base_url}, worker {first.pid}, {ORDERS} orders in {tables.MONTH}\n")
        await report(here)
        await export(here, folder)
        second = await mails(here, sink, first)
        await settle(here, payments, database, second)
        print("\nEvery count is as promised.")


async def report(here: Installation) -> None:
    body = await here.ended(await here.submit("report.monthly", {"month": tables.MONTH}))
    print("1. A report: one child for each region, joined")
    regions = {region: row["cents"] for region, row in sorted(body["result"]["regions"].items())}
    print(f"   {body['state']}: {body['result']['cents']} cents, of which {regions}")
    _check(body["result"]["cents"], sum(1000 + 25 * n for n in range(1, ORDERS + 1)))


async def export(here: Installation, folder: Path) -> None:
    body = await here.ended(await here.submit("export.orders", {"month": tables.MONTH}))
    lines = (folder / body["result"]["file"]).read_text().splitlines()
    print("2. A CSV export")
    print(f"   {body['state']}: {body['result']}; the file has {len(lines)} lines")
    _check(len(lines), 1 + ORDERS)


async def mails(here: Installation, sink: SmtpSink, first: Worker) -> Worker:
    """The first worker dies with the fifth mail sent and not recorded; one address is refused.
    Returns the worker that took over."""
    print(f"3. A mail to each of {ORDERS} customers; one mailbox is busy")
    sink.refused.add("customer3@example.org")
    job_id = await here.submit("mail.newsletter", {"subject": "News", "text": "There is some."})
    await _killed(first, "right after the 5th mail, before it could record it")
    second = await here.start_worker(APP)
    body = await here.ended(job_id)
    _tell(body, second)
    print(f"   deliveries {sink.deliveries}, mails {sink.mails}: the 5th came twice, under one id")
    _check((sink.deliveries, sink.mails), (ORDERS, ORDERS - 1))
    sink.refused.clear()
    await here.replay(job_id)
    body = await here.ended(job_id)
    print(f"   the mailbox is free; replayed whole: {body['state']} {body['result']}")
    print(f"   deliveries {sink.deliveries}, mails {sink.mails}: only the missing one was sent")
    _check((sink.deliveries, sink.mails), (ORDERS + 1, ORDERS))
    return second


async def settle(
    here: Installation, payments: PaymentsStub, database: tables.Connection, second: Worker
) -> None:
    """Killed at the fifth charge, fails at the end while the books are closed, replayed."""
    print(f"4. A settlement of {ORDERS} orders; the books are not open yet")
    payments.books_open = False
    payments.on_charge = lambda number: second.process.kill() if number == 5 else None
    job_id = await close_month(database, tables.MONTH)
    await _killed(second, "when the 5th charge was made and not answered")
    third = await here.start_worker(APP)
    body = await here.ended(job_id)
    _tell(body, third)
    before = await _figures(payments, database)
    print(f"   {before}")
    _check((len(payments.charges), before["ledger rows"]), (ORDERS, ORDERS))
    payments.books_open = True
    await here.replay(job_id)
    body = await here.ended(job_id)
    after = await _figures(payments, database)
    print(f"   the books are open; replayed whole: {body['state']} {body['result']}")
    print(f"   {after}: nobody was charged again")
    _check(after, before | {"closings": 1, "requests": before["requests"] + 1})


async def _killed(worker: Worker, when: str) -> None:
    code = await worker.died()
    print(f"   worker {worker.pid} was killed (signal {-code}) {when}")
    _check(code, -9)


def _tell(body: dict[str, Any], worker: Worker) -> None:
    """How the attempts ended, and how long the job was without a worker."""
    print(f"   worker {worker.pid} takes over; the attempts so far:")
    for tried in body["attempts"]:
        why = tried["error"]["code"] if tried["error"] else ""
        print(f"     {tried['attempt']}  {tried['outcome']:8}  {why}")
    dead = ", a dead letter" if body["dead_letter"] else ""
    print(f"   {body['state']}{dead}: {body['error'] and body['error']['detail']}")


async def _figures(payments: PaymentsStub, database: tables.Connection) -> dict[str, int]:
    return {
        "requests": payments.requests,
        "charges": len(payments.charges),
        "ledger rows": await database.fetchval("SELECT count(*) FROM shop_ledger"),
        "closings": len(payments.closings),
    }


def _check(found: object, expected: object) -> None:
    if found != expected:
        sys.exit(f"Not as promised: {found!r} and not {expected!r}")


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"{time.monotonic() - began:.1f} s")

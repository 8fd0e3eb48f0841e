"""The shop's background work, as jobs of Mediamill.

    mediamill worker --app examples.shop.jobs:mill

Each job may run more than once: its worker can die at any line. What it does outside of its own row
therefore goes through `job.once` (mails, charges) or `job.transaction` (rows of this database), or
is harmless to repeat (the report, the export, which replaces its file).
"""

from __future__ import annotations

import csv
import hashlib
import os
import smtplib
from email.message import EmailMessage
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx2 as httpx
from examples.shop.tables import REGIONS, Connection, connected
from pydantic import BaseModel, Field

from mediamill import Child, Failure, Job, Mill, Wait
from mediamill.failures import Code

mill: Final = Mill()

_TIMEOUT_SECONDS: Final = 10.0


class Month(BaseModel):
    """Which month is meant."""

    month: str = Field(pattern=r"^\d{4}-\d{2}$")


class MonthlyReport(Month):
    regions: tuple[str, ...] = REGIONS


class Region(Month):
    region: str


class Newsletter(BaseModel):
    subject: str
    text: str


@mill.job("report.monthly", timeout="5m")
async def monthly_report(job: Job, payload: MonthlyReport) -> Wait | dict[str, Any]:
    """One child for each region; their results joined into one."""
    if job.results is None:
        return Wait(
            Child("report.region", {"month": payload.month, "region": region}, key=region)
            for region in payload.regions
        )
    total = sum(row["cents"] for row in job.results.values())
    return {"month": payload.month, "regions": dict(job.results), "cents": total}


@mill.job("report.region", timeout="2m")
async def regional_report(_job: Job, payload: Region) -> dict[str, int]:
    async with connected() as connection:
        row = await connection.fetchrow(
            "SELECT count(*) AS orders, coalesce(sum(cents), 0) AS cents FROM shop_orders"
            " WHERE month = $1 AND region = $2",
            payload.month,
            payload.region,
        )
    assert row is not None
    return {"orders": row["orders"], "cents": row["cents"]}


@mill.job("export.orders", timeout="10m")
async def export_orders(job: Job, payload: Month) -> dict[str, Any]:
    """A CSV file. It is written beside its place and moved there, so that a repeat replaces it and
    nobody ever reads half of one."""
    folder = Path(os.environ["SHOP_EXPORTS"])
    path = folder / f"orders-{payload.month}.csv"
    unfinished = folder / f".{path.name}.{job.id}.{job.attempt}"
    await job.stage("export")
    async with connected() as connection, connection.transaction():
        count = await connection.fetchval(
            "SELECT count(*) FROM shop_orders WHERE month = $1", payload.month
        )
        with unfinished.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("id", "region", "email", "cents"))
            written = 0
            async for row in connection.cursor(
                "SELECT id, region, email, cents FROM shop_orders WHERE month = $1 ORDER BY id",
                payload.month,
            ):
                writer.writerow(row)
                written += 1
                job.progress(100 * written / count)
    unfinished.replace(path)
    return {"file": path.name, "rows": written}


@mill.job("mail.newsletter", timeout="1h", max_attempts=3)
async def newsletter(job: Job, payload: Newsletter) -> dict[str, int]:
    """One mail to each customer. A refused address does not stop the others; the job tries those
    that are left again, and only those."""
    async with connected() as connection:
        rows = await connection.fetch("SELECT DISTINCT email FROM shop_orders ORDER BY email")
    refused = []
    for number, row in enumerate(rows, start=1):
        address = row["email"]
        try:
            await job.once(f"mail:{address}", partial(send, payload, address))
        except smtplib.SMTPRecipientsRefused:
            job.log.warning("mail_refused", number=number)
            refused.append(address)
        job.progress(100 * number / len(rows))
    if refused:
        raise Failure(Code.INTERNAL, f"{len(refused)} of {len(rows)} addresses were refused.")
    return {"mails": len(rows)}


def send(payload: Newsletter, address: str, key: str) -> None:
    """Hand one mail to the server. Its Message-ID is the same in every attempt, so that whoever
    gets it twice can tell."""
    message = EmailMessage()
    message["From"] = "shop@example.org"
    message["To"] = address
    message["Subject"] = payload.subject
    message["Message-ID"] = f"<{hashlib.sha256(key.encode()).hexdigest()[:32]}@shop.example.org>"
    message.set_content(payload.text)
    host, _, port = os.environ["SHOP_SMTP"].rpartition(":")
    with smtplib.SMTP(host, int(port), timeout=_TIMEOUT_SECONDS) as server:
        server.send_message(message)


@mill.job("settlement.month", timeout="1h", max_attempts=3, concurrency=1)
async def settlement(job: Job, payload: Month) -> dict[str, int]:
    """Charge every order of a month, write each charge to the ledger, close the month."""
    async with connected() as connection:
        orders = await connection.fetch(
            "SELECT id, cents FROM shop_orders WHERE month = $1 ORDER BY id", payload.month
        )
    async with httpx.AsyncClient(
        base_url=os.environ["SHOP_PAYMENTS"], timeout=_TIMEOUT_SECONDS
    ) as payments:

        async def post(path: str, body: dict[str, Any], key: str) -> dict[str, Any]:
            answer = await payments.post(path, json=body, headers={"Idempotency-Key": key})
            answer.raise_for_status()
            answered: dict[str, Any] = answer.json()
            return answered

        for number, order in enumerate(orders, start=1):
            body = {"order": order["id"], "cents": order["cents"]}
            charge = await job.once(f"charge:{order['id']}", partial(post, "/charges", body))
            async with job.transaction(f"ledger:{order['id']}") as ours:
                if ours is not None:  # None: this line was written by an earlier attempt
                    await ours.execute(
                        "INSERT INTO shop_ledger VALUES ($1, $2, $3, $4)",
                        order["id"],
                        charge["id"],
                        charge["cents"],
                        job.id,
                    )
            job.progress(100 * number / len(orders))
        await job.once("close", partial(post, "/closings", {"month": payload.month}))
    return {"orders": len(orders), "cents": sum(order["cents"] for order in orders)}


async def close_month(connection: Connection, month: str) -> str:
    """Close a month and have it settled: one transaction of the shop's, both or nothing."""
    async with connection.transaction():
        job_id = await mill.enqueue(
            connection, "settlement.month", {"month": month}, dedup_key=month
        )
        await connection.execute("INSERT INTO shop_closings VALUES ($1, $2)", month, job_id)
    return job_id

"""The example application and the documentation's own code, run for real."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest
from examples.shop import demo, tables
from examples.shop.installation import ROOT, Installation, running
from examples.shop.jobs import close_month
from examples.shop.payments_stub import PaymentsStub
from examples.shop.smtp_sink import SmtpSink

QUICK = {
    "lease_seconds": 2.5,
    "beat_seconds": 0.5,
    "self_stop_seconds": 1.8,
    "sweep_seconds": 0.3,
}


@pytest.mark.timeout(120)
def test_mails_charges_and_ledger_rows_outlive_a_kill_between_effect_and_record(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole demonstration: a worker dies with a mail sent and not recorded, another with a
    charge made and not recorded; both jobs end as dead letters and are replayed whole.

    Mails come at least once under a stable Message-ID, charges once thanks to the key, ledger rows
    once by the transaction."""
    sink, payments = SmtpSink(), PaymentsStub()
    asyncio.run(demo.show(database, tmp_path, sink=sink, payments=payments, **QUICK))

    assert sink.mails == demo.ORDERS
    assert sorted(sink.received.values()) == [1] * (demo.ORDERS - 1) + [2]
    assert sorted(c["order"] for c in payments.charges) == list(range(1, demo.ORDERS + 1))
    assert payments.requests == demo.ORDERS + 1 + 3, "one charge asked twice, three closings"
    assert len(payments.closings) == 1

    async def ledger() -> list[asyncpg.Record]:
        connection = await asyncpg.connect(database)
        try:
            return await connection.fetch("SELECT order_id, charge FROM shop_ledger ORDER BY 1")
        finally:
            await connection.close()

    rows = asyncio.run(ledger())
    assert [row["order_id"] for row in rows] == list(range(1, demo.ORDERS + 1))
    assert {row["charge"] for row in rows} == {charge["id"] for charge in payments.charges}
    assert len((tmp_path / "orders-2026-09.csv").read_text().splitlines()) == 1 + demo.ORDERS
    assert list(tmp_path.glob(".orders*")) == []
    assert capsys.readouterr().out.endswith("Every count is as promised.\n")


def test_a_job_enqueued_in_a_transaction_that_rolls_back_never_was(database: str) -> None:
    async def story() -> None:
        connection = await asyncpg.connect(database)
        try:
            await tables.create(connection)
            transaction = connection.transaction()
            await transaction.start()
            await close_month(connection, tables.MONTH)
            assert await connection.fetchval("SELECT count(*) FROM jobs") == 1
            await transaction.rollback()
            for table in ("jobs", "mediamill_tickets", "shop_closings"):
                assert await connection.fetchval(f"SELECT count(*) FROM {table}") == 0, table
        finally:
            await connection.close()

    asyncio.run(story())


AWKWARD = """
import asyncio
from mediamill import Child, Mill, Wait
mill = Mill()

@mill.job("long.transaction")
async def long_transaction(job, payload):
    async with job.transaction("x") as tx:
        await tx.execute("SELECT pg_sleep(4)")

@mill.job("bystander")
async def bystander(job, payload):
    await asyncio.sleep(5)

@mill.job("no.children")
async def no_children(job, payload):
    return Wait([]) if job.results is None else job.results

@mill.job("same.keys")
async def same_keys(job, payload):
    return Wait([Child("bystander", key="a"), Child("bystander", key="a")])

@mill.job("own.timeout", max_attempts=1)
async def own_timeout(job, payload):
    raise TimeoutError("a server did not answer")

@mill.job("nul")
async def nul(job, payload):
    return {"text": "a" + chr(0)}
"""


@pytest.mark.timeout(120)
def test_awkward_jobs_end_and_leave_the_others_alone(database: str, tmp_path: Path) -> None:
    """A transaction longer than a lease, nothing to wait for, a key twice, an error of its own
    that looks like our timeout, a result that the database cannot hold."""
    (tmp_path / "awkward.py").write_text(AWKWARD)

    async def story() -> None:
        async with running(database, tmp_path, env={}, **QUICK) as here:
            await here.start_worker("awkward:mill", cwd=tmp_path, slots="default=6,maintenance=1")
            kinds = (
                "long.transaction",
                "bystander",
                "no.children",
                "same.keys",
                "own.timeout",
                "nul",
            )
            ids = {kind: await here.submit(kind, {}) for kind in kinds}
            ended = {kind: await here.ended(job_id) for kind, job_id in ids.items()}
        assert {
            kind: (body["error"] or body)["code" if body["error"] else "state"]
            for kind, body in ended.items()
        } == {
            "long.transaction": "completed",
            "bystander": "completed",
            "no.children": "completed",
            "same.keys": "invalid_request",
            "own.timeout": "internal",
            "nul": "invalid_request",
        }
        assert {body["attempt"] for body in ended.values()} == {1}
        assert ended["no.children"]["result"] == {}

    asyncio.run(story())


@pytest.mark.timeout(120)
def test_every_block_of_the_page_about_jobs_runs(database: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "jobs.md").read_text()
    (tmp_path / "my_jobs.py").write_text("\n".join(blocks(page, "python")))
    (tmp_path / "page.sh").write_text("\n".join(["set -eu", *blocks(page, "sh")]))
    (tmp_path / "close.py").write_text(
        "import asyncio, asyncpg, sys\n"
        "import my_jobs\n"
        "async def main():\n"
        "    connection = await asyncpg.connect(sys.argv[1])\n"
        "    await connection.execute('CREATE TABLE closed_months (month text)')\n"
        "    await connection.execute('CREATE TABLE ledger (charge text, cents int)')\n"
        "    print(await my_jobs.close_month(connection, '2026-11'))\n"
        "    await connection.close()\n"
        "asyncio.run(main())\n"
    )

    async def story() -> None:
        async with running(database, tmp_path, env={}, **QUICK) as here:
            await here.start_worker("my_jobs:mill", cwd=tmp_path)
            said = await run(["bash", "page.sh"], here)
            assert '"replayed":1' in said
            assert '"duplicate_of"' in (tmp_path / "twice.json").read_text()
            job_id = (await run([sys.executable, "close.py", database], here)).strip()
            assert (await here.ended(job_id))["result"] == {"month": "2026-11", "orders": 12}
            settled = await here.ended(await here.submit("order.settle", {"cents": 500}))
            assert settled["result"] == "ch_500"
            rebuilt = await here.ended(await here.submit("thumbs.rebuild", {"count": 3}))
            assert rebuilt["result"] == 3
            second = await here.ended(
                await here.submit(
                    "report.monthly", {"month": "2026-09", "currency": "EUR"}, schema_version=2
                )
            )
            assert second["result"]["currency"] == "EUR"

    async def run(argv: list[str], here: Installation) -> str:
        done = await asyncio.to_thread(
            subprocess.run,
            argv,
            cwd=tmp_path,
            env=here.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
        return done.stdout

    asyncio.run(story())


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def test_every_metric_of_the_alert_rules_is_exposed(database: str, tmp_path: Path) -> None:
    rules = (ROOT / "deploy" / "alerts.yml").read_text()
    expressions = re.findall(r"expr: (?:>\n)?((?:.+\n)(?: {12}.+\n| {10}(?!\w+:).+\n)*)", rules)
    assert len(expressions) == rules.count("- alert:")
    used = set(re.findall(r"\b(?:media|http)_\w+", "\n".join(expressions)))

    async def story() -> str:
        async with running(database, tmp_path, env={}) as here:
            await here.http.get("/v1/jobs")  # so that one request has been counted
            return (await here.http.get("/metrics")).text

    shown = asyncio.run(story())
    assert used
    assert used <= set(re.findall(r"^(\w+)[ {]", shown, flags=re.MULTILINE))
    table = (ROOT / "deploy" / "README.md").read_text()
    told = set(re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE))
    exposed = set(re.findall(r"^# TYPE (\w+?) ", shown, flags=re.MULTILINE))
    assert told == {name for name in exposed if not name.endswith("_created")}


def test_every_test_that_the_guarantees_name_is_there() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    if not (ROOT / "tests" / "test_jobs.py").exists():
        pytest.skip("the tests of main are not merged in yet")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 30
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
    ]
    assert missing == []

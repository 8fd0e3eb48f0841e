"""/v1/figures and /v1/dead-letters/groups: what ended, counted."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.api.conftest import Api, check_problem

from mediamill import db, jobs
from mediamill.jobs import NewJob

pytestmark = pytest.mark.anyio


async def ended(
    api: Api,
    state: str,
    at: Iterable[float],
    *,
    code: str = "tool_failed",
    queue: str = "default",
) -> None:
    """Jobs that ended so many seconds ago, each two seconds after it was made."""
    for seconds in at:
        new = NewJob("test.count", {}, queue)
        finished = datetime.now(UTC) - timedelta(seconds=seconds)
        async with db.transaction(api.pool) as connection:
            await jobs.enqueue(connection, api.tenant, [new])
            await connection.execute(
                "UPDATE jobs SET state = $3, created_at = $4, finished_at = $5, error = $6,"
                " dead_letter = $7, started_at = $4 WHERE tenant_id = $1 AND id = $2",
                api.tenant,
                new.id,
                state,
                finished - timedelta(seconds=2),
                finished,
                {"code": code} if state == "failed" else None,
                state == "failed",
            )


async def figures(api: Api, minutes: int) -> dict[str, Any]:
    answer = await api.client.get(f"/v1/figures?minutes={minutes}")
    assert answer.status_code == 200
    body: dict[str, Any] = answer.json()
    return body


async def test_what_ended_is_counted_in_the_step_where_it_did(api: Api) -> None:
    await ended(api, "completed", [5, 10, 600, 7200])
    await ended(api, "failed", [15])
    body = await figures(api, 60)
    assert body["whole"] is True
    assert len(body["steps"]) == 60
    assert sum(s["completed"] for s in body["steps"]) == 3
    last = body["steps"][-1]
    assert (last["completed"], last["failed"]) == (2, 1)
    assert last["p50_seconds"] == pytest.approx(2)
    assert body["steps"][0]["p50_seconds"] is None
    assert sum(s["completed"] for s in (await figures(api, 180))["steps"]) == 4


async def test_where_too_much_has_ended_the_steps_begin_later(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mediamill.api.figures._MOST_ROWS", 3)
    await ended(api, "completed", [10, 20, 30, 600], queue="audio")
    body = await figures(api, 60)
    assert body["whole"] is False
    assert sum(s["completed"] for s in body["steps"]) == 3
    covered = datetime.fromisoformat(body["until"]) - datetime.fromisoformat(body["since"])
    assert covered < timedelta(seconds=60)


async def test_figures_of_nothing_and_of_nonsense(api: Api) -> None:
    body = await figures(api, 10**8)
    assert sum(s["completed"] + s["failed"] for s in body["steps"]) == 0
    for text in ("0", "-1", "x", "1.5", ""):
        check_problem(await api.client.get(f"/v1/figures?minutes={text}"), 400, "unknown_parameter")


async def test_dead_letters_are_grouped_by_code_with_one_to_look_at(api: Api) -> None:
    await ended(api, "failed", [30, 10, 20], code="tool_failed")
    await ended(api, "failed", [5], code="corrupt_input")
    groups = (await api.client.get("/v1/dead-letters/groups")).json()["data"]
    assert [(g["code"], g["count"]) for g in groups] == [("tool_failed", 3), ("corrupt_input", 1)]
    newest = (await api.client.get(f"/v1/dead-letters/{groups[0]['newest']}")).json()
    assert newest["finished_at"] == groups[0]["last_at"]
    assert groups[0]["detail"]
    assert groups[0]["advice"]


async def test_queues_tell_how_many_they_complete_a_minute(api: Api) -> None:
    """Of every tenant, as they are of every tenant; the webhook queue is of this test alone."""
    await ended(api, "completed", [5, 60, 200, 290, 400], queue="webhook")
    await ended(api, "failed", [7], queue="webhook")
    token = await api.new_key(api.tenant, "operate")
    async with api.stranger(token) as client:
        answer = await client.get("/v1/queues")
    rates = {row["queue"]: row["rate_per_minute"] for row in answer.json()["data"]}
    assert rates["webhook"] == pytest.approx(4 / 5)
    assert rates["maintenance"] == 0.0

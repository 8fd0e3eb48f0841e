"""The checker objects to every kind of broken history, and to nothing in a sound one."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from PIL import Image
from tests.faults import checker
from tests.faults.checker import History, Published, Row, violations

ROW, FLAKY, MAIN, MEDIA = (UUID(int=n) for n in (1, 2, 3, 4))
T0 = datetime(2026, 1, 1, tzinfo=UTC)
KEY = f"media/default/{MEDIA}/web-v1/abc123/w64.png"


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def job(job_id: UUID, kind: str, state: str, **more: Any) -> Row:
    return {
        "tenant_id": "default", "id": job_id, "kind": kind, "state": state, "role": "job",
        "media_id": None, "generation": None, "attempt": 1, "max_attempts": 5, "fence": 1,
        "payload": {"n": 1}, "dedup_key": None, **more,
    }  # fmt: skip


def move(job_id: UUID, origin: str | None, target: str, **more: Any) -> Row:
    return {
        "subject": "job", "job_id": job_id, "media_id": None, "from_state": origin,
        "to_state": target, "stage": None, "code": None, "fence": None, "worker": None,
        "at": at(0), **more,
    }  # fmt: skip


def moved(origin: str | None, target: str, **more: Any) -> Row:
    return {**move(MAIN, origin, target, **more), "subject": "media", "media_id": MEDIA}


def attempt(job_id: UUID, fence: int, outcome: str | None, **more: Any) -> Row:
    return {
        "job_id": job_id, "fence": fence, "attempt": fence, "worker": f"w{fence}",
        "started_at": at(10 * fence), "outcome": outcome, "error": None,
        "finished_at": at(10 * fence + 5), **more,
    }  # fmt: skip


def sound() -> History:
    """A job with a row, one that was lost once and then completed, and a ready picture."""
    data = io.BytesIO()
    Image.new("RGB", (8, 8)).save(data, "PNG")
    png = data.getvalue()
    digest = hashlib.sha256(png).hexdigest()
    set_ = {
        "tenant_id": "default", "media_id": MEDIA, "recipe": "web", "recipe_version": 1,
        "set_id": "abc123",
    }  # fmt: skip
    return History(
        jobs=[
            job(ROW, "row", "completed"),
            job(FLAKY, "flaky", "completed", attempt=2, fence=2),
            job(MAIN, "image", "completed", role="main", media_id=MEDIA, generation=1),
        ],
        media=[
            {
                "id": MEDIA, "state": "ready", "set_id": "abc123", "generation": 1,
                "deleted_at": None,
            }
        ],
        transitions=[
            *(
                line
                for job_id in (ROW, MAIN)
                for line in (
                    move(job_id, None, "queued"),
                    move(job_id, "queued", "processing", fence=1, worker="w1", at=at(10)),
                    move(job_id, "processing", "processing", stage="probe", fence=1, worker="w1"),
                    move(job_id, "processing", "completed", fence=1, worker="w1"),
                )
            ),
            move(FLAKY, None, "queued"),
            move(FLAKY, "queued", "processing", fence=1, worker="w1", at=at(10)),
            move(FLAKY, "processing", "queued", fence=1, worker="w1"),
            move(FLAKY, "queued", "processing", fence=2, worker="w2", at=at(20)),
            move(FLAKY, "processing", "completed", fence=2, worker="w2"),
            moved(None, "awaiting_upload"),
            moved("awaiting_upload", "uploaded"),
            moved("uploaded", "queued"),
            moved("queued", "processing"),
            moved("processing", "ready"),
        ],
        attempts=[
            attempt(ROW, 1, "completed"),
            attempt(FLAKY, 1, "lost", finished_at=at(14)),
            attempt(FLAKY, 2, "completed"),
            attempt(MAIN, 1, "completed"),
        ],
        events=[{"type": "job.completed", "job_id": j} for j in (ROW, FLAKY, MAIN)],
        effects=[{"job_id": ROW, "key": "row", "fence": 1, "at": at(11)}],
        sets=[{**set_, "superseded_at": None, "expires_at": None}],
        variants=[
            {
                **set_, "key": KEY, "content_type": "image/png", "bytes": len(png),
                "sha256": digest,
            }
        ],
        published={KEY: Published(len(png), digest, True)},
        accepted={str(i) for i in (ROW, FLAKY, MEDIA)},
        by_key={"k1": [str(ROW), str(ROW)]},
        kills={"w1": at(12)},
        recovery_seconds=10,
        rows_by_job=Counter({checker.public_id(str(ROW)): 1}),
        one_row_kinds=frozenset({"row"}),
    )  # fmt: skip


def test_a_sound_history_is_accepted() -> None:
    history = sound()
    history.kills = {"w1": at(12)}
    # w1 also held the other jobs, which it settled later: only what it really lost counts.
    for row in history.attempts:
        if row["outcome"] == "completed" and row["fence"] == 1:
            row["finished_at"] = at(11)
    assert [str(v) for v in violations(history)] == []


def break_with(change: Callable[[History], object]) -> set[str]:
    history = sound()
    history.kills = {}
    assert violations(history) == []
    change(history)
    return {v.promise for v in violations(history)}


def drop(rows: list[Row], **wanted: Any) -> Row:
    found = next(r for r in rows if all(r[k] == v for k, v in wanted.items()))
    rows.remove(found)
    return found


def edit(rows: list[Row], number: int, **changes: Any) -> Row:
    rows[number] = {**rows[number], **changes}
    return rows[number]


def by_log(history: History, job_id: UUID, *more: Row) -> None:
    history.transitions += more
    assert any(r["id"] == job_id for r in history.jobs)


CORRUPTIONS: dict[str, tuple[str, Callable[[History], object]]] = {
    "an accepted job that is gone": ("P1", lambda h: h.accepted.add(str(UUID(int=99)))),
    "an accepted job that has not ended": (
        "P1",
        lambda h: (
            edit(h.jobs, 0, state="processing"),
            drop(h.transitions, job_id=ROW, to_state="completed"),
            drop(h.events, job_id=ROW),
            edit(h.attempts, 0, finished_at=None, outcome=None),
        ),
    ),
    "an accepted media that is stuck": (
        "P1",
        lambda h: (edit(h.media, 0, state="processing"), h.transitions.pop()),
    ),
    "a completed job without its row": ("P1", lambda h: h.rows_by_job.clear()),
    "a second terminal transition": (
        "P2",
        lambda h: by_log(h, ROW, move(ROW, "completed", "failed", fence=1, worker="w1")),
    ),
    "the same end twice": (
        "P2",
        lambda h: by_log(h, ROW, move(ROW, "processing", "completed", fence=1, worker="w1")),
    ),
    "a stage after the end": (
        "P2",
        lambda h: by_log(
            h, ROW, move(ROW, "completed", "completed", stage="probe", fence=1, worker="w1")
        ),
    ),
    "a jump in the log": (
        "P2",
        lambda h: drop(h.transitions, job_id=ROW, from_state="queued", to_state="processing"),
    ),
    "a state that the log does not say": ("P2", lambda h: edit(h.jobs, 1, state="failed")),
    "a log of a job that does not exist": (
        "P2",
        lambda h: h.transitions.append(move(UUID(int=77), None, "queued")),
    ),
    "an end that nobody was told": ("P2", lambda h: drop(h.events, job_id=ROW)),
    "an end told twice": (
        "P2",
        lambda h: h.events.append({"type": "job.completed", "job_id": ROW}),
    ),
    "a media that does not follow its job": (
        "P2",
        lambda h: (
            edit(h.media, 0, state="failed"),
            edit(h.transitions, -1, to_state="failed"),
        ),
    ),
    "a fence that does not grow": (
        "P5",
        lambda h: (
            edit(h.transitions, 11, fence=1),
            edit(h.transitions, 12, fence=1, worker="w2"),
        ),
    ),
    "a write by an old fence after a newer claim": (
        "P5",
        lambda h: h.transitions.insert(
            12, move(FLAKY, "processing", "processing", stage="probe", fence=1, worker="w1")
        ),
    ),
    "a write in another worker's name": (
        "P5",
        lambda h: edit(h.transitions, 12, worker="w1"),
    ),
    "an attempt without a claim": (
        "P5",
        lambda h: h.attempts.append(attempt(FLAKY, 3, "completed")),
    ),
    "an effect recorded after the lease was lost": (
        "P5",
        lambda h: h.effects.append({"job_id": FLAKY, "key": "late", "fence": 1, "at": at(21)}),
    ),
    "two attempts at once": (
        "P10",
        lambda h: edit(h.attempts, 1, finished_at=at(22)),
    ),
    "an attempt that never ended": (
        "P10",
        lambda h: edit(h.attempts, 1, finished_at=None, outcome=None),
    ),
    "a killed worker's job that ran again too late": (
        "P10",
        lambda h: (
            h.kills.update(w1=at(13)),
            [edit(h.attempts, n, finished_at=at(12)) for n in (0, 3)],
            edit(h.attempts, 2, started_at=at(40), finished_at=at(41)),
        ),
    ),
    "a waiting parent that was taken for dead": (
        "P10",
        lambda h: h.transitions.insert(
            10, move(FLAKY, "processing", "processing", stage="waiting", fence=1, worker="w1")
        ),
    ),
    "more attempts than allowed": ("P8", lambda h: edit(h.jobs, 1, max_attempts=1)),
    "a repeat after a permanent failure": (
        "P8",
        lambda h: edit(h.attempts, 1, outcome="retried", error={"code": "corrupt_input"}),
    ),
    "a ready media whose object is missing": ("P3", lambda h: h.published.clear()),
    "an object that is not what the manifest says": (
        "P3",
        lambda h: h.published.update({KEY: Published(1, "0" * 64, True)}),
    ),
    "an object that does not decode": (
        "P3",
        lambda h: h.published.update(
            {KEY: Published(h.published[KEY].size, h.published[KEY].sha256, False)}
        ),
    ),
    "a ready media that lists nothing": ("P3", lambda h: h.variants.clear()),
    "a ready media that shows another set": (
        "P3",
        lambda h: edit(h.media, 0, set_id="fff"),
    ),
    "two current sets": ("mixed", lambda h: h.sets.append({**h.sets[0], "set_id": "def456"})),
    "a variant that lies in another set": (
        "mixed",
        lambda h: (
            edit(h.variants, 0, key=KEY.replace("abc123", "def456")),
            h.published.update({KEY.replace("abc123", "def456"): h.published.pop(KEY)}),
        ),
    ),
    "an object outside every manifest": (
        "P4",
        lambda h: h.published.update({f"{KEY}.bak": h.published[KEY]}),
    ),
    "an idempotency key with two answers": ("P7", lambda h: h.by_key["k1"].append("other")),
    "two main jobs of one generation": (
        "P7",
        lambda h: h.jobs.append({**h.jobs[2], "id": UUID(int=9)}),
    ),
    "two live jobs with one dedup key": (
        "P7",
        lambda h: h.jobs.extend(
            job(UUID(int=n), "row", "queued", dedup_key="d", fence=0) for n in (20, 21)
        ),
    ),
    "a doubled row": (
        "doubled",
        lambda h: h.rows_by_job.update([checker.public_id(str(ROW))]),
    ),
    "something left behind": ("P9", lambda h: h.leftovers.append("stage/default/x")),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_broken_history_is_objected_to(name: str) -> None:
    promise, change = CORRUPTIONS[name]
    assert promise in break_with(change)


def test_what_a_crash_reserved_is_no_stray_object() -> None:
    history = sound()
    history.kills = {}
    history.sets.append(
        {**history.sets[0], "set_id": "def456", "superseded_at": at(1), "expires_at": at(3600)}
    )
    history.published[KEY.replace("abc123", "def456")] = history.published[KEY]
    assert violations(history) == []


def test_a_replayed_job_may_end_again() -> None:
    history = sound()
    history.kills = {}
    history.jobs.append(job(UUID(int=5), "flaky", "completed", fence=2))
    history.transitions += [
        move(UUID(int=5), None, "queued"),
        move(UUID(int=5), "queued", "processing", fence=1, worker="w1"),
        move(UUID(int=5), "processing", "failed", fence=1, worker="w1"),
        move(UUID(int=5), "failed", "queued", fence=1),
        move(UUID(int=5), "queued", "processing", fence=2, worker="w2"),
        move(UUID(int=5), "processing", "completed", fence=2, worker="w2"),
    ]
    history.attempts += [
        attempt(UUID(int=5), 1, "failed", error={"code": "corrupt_input"}),
        attempt(UUID(int=5), 2, "completed"),
    ]
    history.events += [
        {"type": f"job.{state}", "job_id": UUID(int=5)} for state in ("failed", "completed")
    ]
    assert violations(history) == []


def test_leftovers_are_found_on_disk(tmp_path: Path) -> None:
    for name in ("objects/stage/t/j.1/w64.png", "objects/.incoming/x", "scratch/live/j.1/out/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "scratch/dead").mkdir()
    (tmp_path / "scratch/live/.lock").touch()
    found = [
        *checker.left_in_storage(tmp_path / "objects"),
        *checker.left_in_scratch(tmp_path / "scratch", {"live"}),
    ]
    assert found == ["stage/t/j.1/w64.png", ".incoming/x", "scratch/dead", "scratch/live/j.1"]


def test_a_public_id_is_the_programs_own() -> None:
    from mediamill import ids

    value = ids.new()
    assert checker.public_id(str(value)) == ids.encode(ids.JOB, value)

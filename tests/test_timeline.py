"""Where the time went: segments that tile it without gap or overlap."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mediamill import timeline
from mediamill.states import MEDIA_MOVES, MEDIA_TERMINAL, MediaState

unhurried = settings(deadline=None)
START = datetime(2026, 1, 1, tzinfo=UTC)
MAIN = "main-job"


def move(to: str, at: float, **more: Any) -> dict[str, Any]:
    base = {"subject": "media", "job_id": None, "stage": None, "attempt": None, "worker": None}
    return {**base, "code": None, "to_state": to, "at": START + timedelta(seconds=at), **more}


def stage(name: str, at: float, job: str = MAIN) -> dict[str, Any]:
    return move("processing", at, subject="job", job_id=job, stage=name, attempt=1, worker="w1")


def run(moves: list[dict[str, Any]], now: float) -> list[timeline.Segment]:
    return timeline.segments(moves, main_jobs=frozenset({MAIN}), now=START + timedelta(seconds=now))


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[dict[str, Any]], float]:
    """A media's log along the map, with stages, other jobs' moves and equal times in between."""
    at, state = 0.0, MediaState.AWAITING_UPLOAD
    moves = [move(state, at)]
    for _ in range(draw(st.integers(0, 12))):
        at += draw(st.sampled_from([0.0, 0.000001, 0.5, 60.0, 4000.0]))
        following = sorted(b for a, b in MEDIA_MOVES if a == state)
        if state is MediaState.PROCESSING and draw(st.booleans()):
            moves.append(stage(draw(st.sampled_from(["download", "encode"])), at))
        elif draw(st.booleans()):
            moves.append(stage("preview", at, job="another job"))
            moves.append(move("completed", at, subject="job", job_id=MAIN))
        elif following:
            state = draw(st.sampled_from(following))
            moves.append(move(state, at, code=draw(st.sampled_from([None, "reprocess"]))))
    return moves, at + draw(st.sampled_from([0.0, 3.25]))


@unhurried
@given(lives())
def test_segments_tile_the_time_from_the_first_move_to_the_last(
    life: tuple[list[dict[str, Any]], float],
) -> None:
    moves, now = life
    found = run(moves, now)
    told = [m for m in moves if m["subject"] == "media" or (m["job_id"] == MAIN and m["stage"])]
    last = told[-1]
    ended = last["subject"] == "media" and last["to_state"] in MEDIA_TERMINAL
    end = last["at"] if ended else START + timedelta(seconds=now)
    if not found:
        assert end == START
        return
    assert found[0].start == START
    assert found[-1].end == end
    for this, following in itertools.pairwise(found):
        assert this.end == following.start
    assert all(s.seconds >= 0 for s in found)
    assert abs(sum(s.seconds for s in found) - (end - START).total_seconds()) < 1e-6
    assert not any(s.name == "preview" for s in found)


def test_a_whole_life_reads_well() -> None:
    found = run(
        [
            move("awaiting_upload", 0),
            move("uploaded", 3),
            move("queued", 3),
            stage("preview", 3.5, job="another job"),
            move("processing", 5, attempt=1, worker="w1"),
            stage("download", 6),
            stage("encode", 8),
            move("ready", 98),
        ],
        now=500,
    )
    assert [(s.name, s.seconds) for s in found] == [
        ("awaiting_upload", 3),
        ("queued", 2),
        ("claimed", 1),
        ("download", 2),
        ("encode", 90),
    ]
    assert found[-1].worker == "w1"
    assert timeline.sentence(found, state="ready") == (
        "1 min 38 s in all, of which 1 min 30 s encoding; it is ready."
    )


def test_what_was_stored_but_not_reported_is_told_apart() -> None:
    def lag(stored: float) -> list[tuple[str, float]]:
        at = (START + timedelta(seconds=stored)).isoformat()
        moves = [
            move("awaiting_upload", 0),
            move("uploaded", 10, details={"stored_at": at}),
            move("queued", 10),
        ]
        found = run(moves, 12)
        assert sum(s.seconds for s in found) == 12
        return [(s.name, s.seconds) for s in found]

    assert lag(4) == [("awaiting_upload", 4), ("event_lag", 6), ("queued", 2)]
    # The clocks of storage and database need not agree.
    assert lag(-3) == [("event_lag", 10), ("queued", 2)]
    assert lag(10) == lag(11) == [("awaiting_upload", 10), ("queued", 2)]


def test_time_between_an_end_and_the_next_run_is_idle() -> None:
    found = run([move("failed", 0), move("queued", 100, code="replayed")], now=107)
    assert [(s.name, s.seconds, s.detail) for s in found] == [
        ("idle", 100, None),
        ("queued", 7, "replayed"),
    ]


def test_a_fresh_slot_says_that_it_waits() -> None:
    found = run([move("awaiting_upload", 0)], now=7300)
    assert timeline.sentence(found, state="awaiting_upload") == (
        "2 h 1 min in all, of which 2 h 1 min waiting for the upload; it is awaiting upload."
    )
    assert "nothing has happened" in timeline.sentence([], state="queued")


def test_every_media_state_has_a_name() -> None:
    for state in MediaState:
        assert run([move(state, 0), move("queued", 1)], now=2)[0].seconds == 1


def test_holding_back_and_waiting_after_it_are_two_stretches() -> None:
    due = (START + timedelta(seconds=14)).isoformat()
    lost = {"job_id": MAIN, "fence": 1, "attempt": 1, "code": "storage_unavailable"}
    moves = [
        move("queued", 0),
        move("processing", 2, job_id=MAIN, fence=1, attempt=1),
        move("queued", 10, subject="job", details={"run_at": due}, **lost),
        move("queued", 10, **lost),
        move("processing", 17, job_id=MAIN, fence=2, attempt=2),
        move("ready", 20),
    ]
    found = run(moves, 30)
    assert [(s.name, s.seconds) for s in found] == [
        ("queued", 2),
        ("claimed", 8),
        ("backoff", 4),
        ("queued", 3),
        ("claimed", 3),
    ]
    said = timeline.sentence(found, state="ready")
    assert "again after storage_unavailable (attempt 1)" in said
    early = run(moves[:4], 12)
    assert [(s.name, s.seconds) for s in early][-1] == ("backoff", 2)
    alone = timeline.job_segments([moves[2]], now=START + timedelta(seconds=16))
    assert [(s.name, s.seconds) for s in alone] == [("backoff", 4), ("queued", 2)]

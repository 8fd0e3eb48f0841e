"""The map of states: sane in itself, and the media's part of it follows the job's."""

from __future__ import annotations

from enum import StrEnum

import pytest

from mediamill.states import (
    JOB_MOVES,
    JOB_TERMINAL,
    MEDIA_FOLLOWS_JOB,
    MEDIA_MOVES,
    MEDIA_TERMINAL,
    JobState,
    MediaState,
)

TABLES = [
    pytest.param(MediaState, MEDIA_MOVES, MEDIA_TERMINAL, MediaState.AWAITING_UPLOAD, id="media"),
    pytest.param(JobState, JOB_MOVES, JOB_TERMINAL, JobState.QUEUED, id="job"),
]


@pytest.mark.parametrize(("states", "moves", "terminal", "first"), TABLES)
def test_every_state_can_be_reached_and_can_reach_an_end(
    states: type[StrEnum],
    moves: frozenset[tuple[StrEnum, StrEnum]],
    terminal: frozenset[StrEnum],
    first: StrEnum,
) -> None:
    def beyond(start: StrEnum) -> set[StrEnum]:
        found = {start}
        while more := {b for a, b in moves if a in found} - found:
            found |= more
        return found

    assert beyond(first) == set(states)
    for state in states:
        assert beyond(state) & terminal
    assert all(a != b for a, b in moves)


@pytest.mark.parametrize(("states", "moves", "terminal", "first"), TABLES)
def test_what_is_not_terminal_moves_on_and_only_requeueing_leaves_an_end(
    states: type[StrEnum],
    moves: frozenset[tuple[StrEnum, StrEnum]],
    terminal: frozenset[StrEnum],
    first: StrEnum,
) -> None:
    origins = {a for a, _ in moves}
    assert set(states) - terminal <= origins
    assert {b.value for a, b in moves if a in terminal} == {"queued"}


def test_expired_completed_and_canceled_are_for_good() -> None:
    assert not [b for a, b in MEDIA_MOVES if a is MediaState.EXPIRED]
    assert not [b for a, b in JOB_MOVES if a in (JobState.COMPLETED, JobState.CANCELED)]


def test_where_a_main_job_moves_its_media_can_follow() -> None:
    assert set(MEDIA_FOLLOWS_JOB) == set(JobState)
    for origin, target in JOB_MOVES:
        here, there = MEDIA_FOLLOWS_JOB[origin], MEDIA_FOLLOWS_JOB[target]
        assert here == there or (here, there) in MEDIA_MOVES, (origin, target)
    for state in JOB_TERMINAL:
        assert MEDIA_FOLLOWS_JOB[state] in MEDIA_TERMINAL

"""What follows a failed attempt: the formula, the caps, and that every job ends."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mediamill.failures import Verdict
from mediamill.retry import CAP_SECONDS, HOLD_SECONDS, Decision, Fail, Hold, Retry, backoff, decide

unhurried = settings(deadline=None)


def test_the_delays_are_those_of_the_design() -> None:
    assert [backoff(n, lambda _low, high: high) for n in range(1, 9)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        60,
        60,
    ]
    assert [backoff(n, lambda low, _high: low) for n in (1, 2, 9)] == [0.5, 1, 30]


@unhurried
@given(st.integers(1, 10_000))
def test_a_delay_lies_between_half_and_all_of_the_capped_power(attempt: int) -> None:
    full = min(2.0 ** min(attempt - 1, 60), CAP_SECONDS)
    assert full / 2 <= backoff(attempt) <= full <= 60


@unhurried
@given(
    st.sampled_from(list(Verdict)), st.integers(1, 100), st.integers(0, 100), st.integers(0, 100)
)
def test_a_permanent_failure_is_final_at_once(
    verdict: Verdict, attempt: int, crashes: int, resource: int
) -> None:
    decision = decide(
        verdict,
        attempt=attempt,
        max_attempts=100,
        crashes=crashes,
        max_crashes=100,
        resource_failures=resource,
    )
    if verdict is Verdict.PERMANENT:
        assert decision == Fail(dead_letter=False)
    elif isinstance(decision, Fail):
        assert decision.dead_letter  # it was tried until something was used up


@unhurried
@given(
    st.lists(st.sampled_from(sorted({*Verdict} - {Verdict.HELD})), min_size=30, max_size=30),
    st.integers(1, 30),
    st.integers(1, 30),
)
def test_attempts_and_crashes_never_exceed_their_caps(
    verdicts: list[Verdict], max_attempts: int, max_crashes: int
) -> None:
    """Play a job's life with these failures until it ends."""
    crashes = resource = 0
    for attempt, verdict in enumerate(verdicts, start=1):
        assert attempt <= max_attempts
        crashes += verdict is Verdict.CRASH
        resource += verdict is Verdict.RESOURCE
        decision = decide(
            verdict,
            attempt=attempt,
            max_attempts=max_attempts,
            crashes=crashes,
            max_crashes=max_crashes,
            resource_failures=resource,
        )
        assert crashes <= max_crashes
        assert resource <= 2
        if isinstance(decision, Fail):
            return
        assert 0 <= decision.delay_seconds <= CAP_SECONDS
    raise AssertionError("it never ended")


@unhurried
@given(st.integers(1, 100), st.integers(0, 100), st.integers(0, 100))
def test_what_an_operator_has_to_mend_buries_no_job(
    attempt: int, crashes: int, resource: int
) -> None:
    decision = decide(
        Verdict.HELD,
        attempt=attempt,
        max_attempts=1,
        crashes=crashes,
        max_crashes=1,
        resource_failures=resource,
    )
    assert isinstance(decision, Hold)
    assert HOLD_SECONDS / 2 <= decision.delay_seconds <= HOLD_SECONDS


def test_the_resource_class_gets_one_more_attempt() -> None:
    def after(failures: int) -> Decision:
        return decide(
            Verdict.RESOURCE,
            attempt=failures,
            max_attempts=5,
            crashes=0,
            max_crashes=3,
            resource_failures=failures,
            uniform=lambda _low, high: high,
        )

    assert after(1) == Retry(1.0)
    assert after(2) == Fail(dead_letter=True)


def test_the_third_death_is_final_and_the_others_wait_no_longer_than_their_lease_did() -> None:
    def after(crashes: int) -> Decision:
        return decide(
            Verdict.CRASH,
            attempt=crashes,
            max_attempts=5,
            crashes=crashes,
            max_crashes=3,
            resource_failures=0,
        )

    assert [after(n) for n in (1, 2, 3)] == [Retry(0.0), Retry(0.0), Fail(dead_letter=True)]

"""Public ids: one text for each UUID, and back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from mediamill import ids

unhurried = settings(deadline=None)
UUIDS = st.uuids() | st.sampled_from([UUID(int=0), UUID(int=2**128 - 1)])


@unhurried
@given(UUIDS)
def test_an_id_comes_back(value: UUID) -> None:
    assert ids.decode("med", ids.encode("med", value)) == value


@unhurried
@given(UUIDS, UUIDS)
def test_ids_sort_as_their_uuids(a: UUID, b: UUID) -> None:
    assert (ids.encode("job", a) < ids.encode("job", b)) == (a < b)


@unhurried
@given(
    st.text(max_size=40)
    | st.text("0123456789abcdefgz", min_size=26, max_size=26).map("med_".__add__)
)
def test_a_text_is_an_id_only_in_its_one_spelling(text: str) -> None:
    value = ids.decode("med", text)
    assert value is None or ids.encode("med", value) == text


def test_what_is_not_an_id_with_this_prefix_is_none() -> None:
    good = ids.encode("med", ids.new())
    for text in (
        "",
        "med",
        "med_",
        good.replace("med_", "job_"),
        good.upper(),
        good[:-1],
        good + "0",
        good[:-1] + "u",  # not in Crockford's alphabet
        good[:-1] + "١",
        "med_8" + "0" * 25,  # 2^128
        f" {good}",
        good.replace("_", "-"),
    ):
        assert ids.decode("med", text) is None


def test_new_ids_are_version_7_and_rise() -> None:
    made = [ids.new() for _ in range(1000)]
    assert {value.version for value in made} == {7}
    assert len(set(made)) == 1000
    assert made == sorted(made)


def test_what_was_created_in_between_lies_within_the_span() -> None:
    made = ids.new()
    now = datetime.now(UTC)
    for minutes in (0, 59):  # clocks disagree
        first, last = ids.span(now + timedelta(minutes=minutes), now - timedelta(minutes=minutes))
        assert first <= made <= last
    first, _ = ids.span(now + timedelta(hours=2), None)
    _, last = ids.span(None, now - timedelta(hours=2))
    assert last < made < first
    assert ids.span(None, None) == (UUID(int=0), UUID(int=2**128 - 1))
    extremes = ids.span(
        datetime.max.replace(tzinfo=UTC) - timedelta(days=1), datetime(1, 1, 2, tzinfo=UTC)
    )
    assert extremes[0] > made > extremes[1]

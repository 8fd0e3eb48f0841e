"""Idempotency-Key: done once, answered as often as it is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import rows

from mediamill import db, idempotency
from mediamill.failures import Code, Refused
from mediamill.idempotency import Answer, Key

KEY = Key("t", "POST", "/v1/media", "k1", b"print")


@pytest.fixture(scope="module")
def dsn(server: str, template: str) -> Iterator[str]:
    with rows.fresh_database(server, template) as made:
        yield made


@pytest.fixture
async def pool(dsn: str) -> AsyncIterator[db.Pool]:
    async with rows.pooled(dsn) as made:
        yield made
        await made.execute("DELETE FROM idempotency")


class Work:
    """Counts how often it was done."""

    def __init__(self) -> None:
        self.done = 0

    async def __call__(self) -> Answer:
        self.done += 1
        return Answer(
            201, f'{{"number":{self.done}}}', f"/v1/things/{self.done}", UUID(int=self.done)
        )


async def once(pool: db.Pool, work: Any, key: Key | None = KEY, keep: float = 3600) -> Answer:
    async with db.transaction(pool) as connection:
        return await idempotency.once(connection, key, keep_seconds=keep, work=work)


@pytest.mark.anyio
async def test_the_second_time_gives_the_first_answer(pool: db.Pool) -> None:
    work = Work()
    first, again = await once(pool, work), await once(pool, work)
    assert work.done == 1
    assert not first.replayed
    assert again == Answer(first.status, first.body, first.location, first.about, replayed=True)


@pytest.mark.anyio
async def test_without_a_key_it_is_done_each_time(pool: db.Pool) -> None:
    work = Work()
    assert not (await once(pool, work, None)).replayed
    assert not (await once(pool, work, None)).replayed
    assert work.done == 2


@pytest.mark.anyio
@pytest.mark.parametrize(
    "other",
    [
        Key("u", "POST", "/v1/media", "k1", b"print"),
        Key("t", "PUT", "/v1/media", "k1", b"print"),
        Key("t", "POST", "/v1/jobs", "k1", b"print"),
        Key("t", "POST", "/v1/media", "K1", b"print"),
    ],
)
async def test_another_scope_is_another_key(pool: db.Pool, other: Key) -> None:
    work = Work()
    await once(pool, work)
    assert not (await once(pool, work, other)).replayed
    assert work.done == 2


@pytest.mark.anyio
async def test_another_request_under_the_key_is_refused(pool: db.Pool) -> None:
    work = Work()
    await once(pool, work)
    with pytest.raises(Refused) as caught:
        await once(pool, work, Key("t", "POST", "/v1/media", "k1", b"other"))
    assert caught.value.code is Code.IDEMPOTENCY_KEY_REUSED
    assert work.done == 1


@pytest.mark.anyio
async def test_a_failure_uses_up_nothing(pool: db.Pool) -> None:
    async def fails() -> Answer:
        raise Refused(Code.INVALID_REQUEST)

    with pytest.raises(Refused):
        await once(pool, fails)
    work = Work()
    assert not (await once(pool, work)).replayed


@pytest.mark.anyio
async def test_an_expired_key_is_new(pool: db.Pool) -> None:
    work = Work()
    await once(pool, work, keep=-1)
    again = await once(pool, work)
    assert (again.replayed, work.done) == (False, 2)
    assert (await once(pool, work)).body == again.body


@pytest.mark.anyio
async def test_many_at_once_do_it_once(pool: db.Pool) -> None:
    work = Work()

    async def slow() -> Answer:
        answer = await work()
        await asyncio.sleep(0.05)
        return answer

    answers = await asyncio.gather(*(once(pool, slow) for _ in range(5)))
    assert work.done == 1
    assert sorted(answer.replayed for answer in answers) == [False, True, True, True, True]
    assert len({answer.body for answer in answers}) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("expired", [False, True])
async def test_a_request_that_takes_long_makes_its_double_wait_and_then_refuses_it(
    pool: db.Pool, monkeypatch: pytest.MonkeyPatch, expired: bool
) -> None:
    """Also when the key had expired, and the first request is replacing it."""
    monkeypatch.setattr(idempotency, "_WAIT", "SET LOCAL lock_timeout = '300ms'")
    if expired:
        await once(pool, Work(), keep=-1)
    waited = []

    async def first() -> Answer:
        began = time.monotonic()
        with pytest.raises(Refused) as caught:
            await once(pool, Work())
        waited.append(time.monotonic() - began)
        assert caught.value.code is Code.IDEMPOTENCY_IN_FLIGHT
        assert caught.value.headers == {"Retry-After": "1"}
        return Answer(201, "{}", "/v1/things/1", UUID(int=1))

    await once(pool, first)
    assert 0.25 < waited[0] < 5


def test_the_wait_is_the_documented_one() -> None:
    assert idempotency._WAIT == "SET LOCAL lock_timeout = '5s'"


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("abc", "abc"),
        ('"abc"', "abc"),
        ("  abc ", "abc"),
        ('"a\\"b"', 'a"b'),
        ('"a\\\\b"', "a\\b"),
        ('"', '"'),
        ("x" * 255, "x" * 255),
    ],
)
def test_a_key_is_read_bare_or_quoted(header: str, key: str) -> None:
    assert idempotency.parse(header) == key


@pytest.mark.parametrize("header", ["", " ", '""', "a b", "a\tb", "x" * 256, "é", "a\x7f", "\0"])
def test_a_bad_key_is_refused(header: str) -> None:
    with pytest.raises(Refused) as caught:
        idempotency.parse(header)
    assert caught.value.code is Code.IDEMPOTENCY_KEY_INVALID


PARTS = st.lists(st.text(max_size=4) | st.binary(max_size=4), max_size=4)


@settings(deadline=None)
@given(PARTS, PARTS)
def test_different_parts_have_different_fingerprints(
    one: list[str | bytes], two: list[str | bytes]
) -> None:
    """Where one part ends and the next begins counts too."""

    def flat(parts: list[str | bytes]) -> list[bytes]:
        return [p.encode() if isinstance(p, str) else p for p in parts]

    same = idempotency.fingerprint(*one) == idempotency.fingerprint(*two)
    assert same == (flat(one) == flat(two))

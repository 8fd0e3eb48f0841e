"""A signature opens exactly what was signed, for as long as was said."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mediamill import signing
from mediamill.failures import Code, Refused
from mediamill.signing import Grant, Keyring

unhurried = settings(deadline=None)
KEYS = {1: b"1" * 32, 2: b"2" * 32}
GRANTS = st.builds(
    Grant,
    method=st.sampled_from(["PUT", "GET"]),
    key=st.from_regex(r"[a-c]{1,3}(/[ab_.0-9-]{1,4}){0,3}", fullmatch=True),
    expires=st.integers(10, 2**40),
    content_type=st.sampled_from(["", "image/png", "video/mp4", "a\nb"]),
    size=st.none() | st.integers(0, 2**53),
)


def query_of(signed: str) -> tuple[str, str, int]:
    query = parse_qs(urlsplit(signed).query)
    return query["key_id"][0], query["signature"][0], int(query["expires"][0])


def verify(keyring: Keyring, grant: Grant, key_id: str, signature: str, now: float = 0) -> None:
    signing.verify(keyring, grant, key_id=key_id, signature=signature, now=now)


@unhurried
@given(GRANTS)
def test_what_was_signed_is_good_until_it_expires(grant: Grant) -> None:
    signed = signing.sign(Keyring(KEYS), grant)
    key_id, signature, expires = query_of(signed)
    assert (key_id, expires) == ("2", grant.expires)
    assert unquote(urlsplit(signed).path) == grant.key
    verify(Keyring(KEYS), grant, key_id, signature, now=grant.expires)
    with pytest.raises(Refused) as caught:
        verify(Keyring(KEYS), grant, key_id, signature, now=grant.expires + 1)
    assert caught.value.code is Code.SIGNATURE_EXPIRED


@unhurried
@given(GRANTS, GRANTS)
def test_any_other_grant_is_refused(grant: Grant, other: Grant) -> None:
    """Whole grants, and the same grant with any one field of the other."""
    key_id, signature, _ = query_of(signing.sign(Keyring(KEYS), grant))
    changed = [other] + [
        replace(grant, **{name: getattr(other, name)})
        for name in ("method", "key", "expires", "content_type", "size")
    ]
    for candidate in changed:
        if candidate == grant:
            continue
        with pytest.raises(Refused) as caught:
            verify(Keyring(KEYS), candidate, key_id, signature)
        assert caught.value.code is Code.SIGNATURE_INVALID


@unhurried
@given(GRANTS, st.text(max_size=60), st.text(max_size=12))
def test_any_other_signature_or_key_is_refused(grant: Grant, signature: str, key_id: str) -> None:
    right_id, right, _ = query_of(signing.sign(Keyring(KEYS), grant))
    for given_id, given_signature in [(key_id, right), (right_id, signature), (key_id, signature)]:
        if (given_id.lstrip("0"), given_signature) == (right_id, right):
            continue
        with pytest.raises(Refused) as caught:
            verify(Keyring(KEYS), grant, given_id, given_signature)
        assert caught.value.code is Code.SIGNATURE_INVALID


def test_a_signature_with_the_stand_in_for_an_unknown_key_is_refused() -> None:
    """Whoever reads this source knows that stand-in."""
    grant = Grant("GET", "media/a", 100)
    _, signature, _ = query_of(signing.sign(Keyring({9: b"unknown"}), grant))
    with pytest.raises(Refused):
        verify(Keyring(KEYS), grant, "9", signature)


def test_a_rotation_has_an_overlap() -> None:
    grant = Grant("GET", "media/a", 100)
    old = query_of(signing.sign(Keyring({1: KEYS[1]}), grant))
    verify(Keyring(KEYS), grant, old[0], old[1])
    assert query_of(signing.sign(Keyring(KEYS), grant))[0] == "2"
    with pytest.raises(Refused):
        verify(Keyring({2: KEYS[2]}), grant, old[0], old[1])

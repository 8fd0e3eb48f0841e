"""Secrets at rest: what is kept tells nothing, and opens only for whom it was sealed."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from tests import rows

from mediamill import sealing
from mediamill.config import Settings, parse_secrets_keys
from mediamill.sealing import CannotOpen, Vault

A, B = (bytes([n]) * 32 for n in (1, 2))
SECRET = b"what signs our webhooks"


def test_what_is_sealed_tells_nothing_and_opens_again() -> None:
    vault = Vault([A])
    kept = [vault.seal(SECRET, about=b"endpoint") for _ in range(2)]
    assert kept[0] != kept[1], "the same secret must not look the same"
    assert all(SECRET not in k and A not in k for k in kept)
    assert {vault.open(k, about=b"endpoint") for k in kept} == {SECRET}


def test_it_opens_for_nothing_else_and_not_when_it_was_changed() -> None:
    vault = Vault([A])
    kept = vault.seal(SECRET, about=b"endpoint")
    with pytest.raises(CannotOpen):
        vault.open(kept, about=b"another endpoint")
    for n in range(len(kept)):
        changed = bytes([*kept[:n], kept[n] ^ 1, *kept[n + 1 :]])
        try:
            assert vault.open(changed, about=b"endpoint") == changed, "taken for plain"
        except CannotOpen:
            continue
        assert n < len(sealing._MARK)


def test_the_first_key_seals_and_all_of_them_open() -> None:
    old = Vault([A]).seal(SECRET, about=b"")
    both = Vault([B, A])
    assert both.open(old, about=b"") == SECRET
    new = both.seal(SECRET, about=b"")
    assert Vault([B]).open(new, about=b"") == SECRET
    with pytest.raises(CannotOpen, match=sealing.name(B).hex()):
        Vault([A]).open(new, about=b"")


def test_without_a_key_it_is_kept_in_plain_and_still_read_when_there_is_one() -> None:
    assert not Vault().locks
    kept = Vault().seal(SECRET, about=b"")
    assert kept == SECRET
    assert Vault([A]).open(kept, about=b"") == SECRET


def settings(tmp_path: Path, key: str | None) -> Settings:
    return rows.settings(tmp_path).model_copy(update={"secrets_key": key})


def test_the_keys_are_those_of_the_settings_else_the_one_in_the_data_folder(tmp_path: Path) -> None:
    assert not Vault.of(settings(tmp_path, None)).locks
    one, two = sealing.new_key(), sealing.new_key()
    path = settings(tmp_path, None).secrets_key_file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{one}\n")
    in_folder = Vault.of(settings(tmp_path, None)).seal(SECRET, about=b"")
    given = Vault.of(settings(tmp_path, f"{two}, {one}"))
    assert given.open(in_folder, about=b"") == SECRET
    with pytest.raises(CannotOpen):
        Vault.of(settings(tmp_path, None)).open(given.seal(SECRET, about=b""), about=b"")


@pytest.mark.parametrize("text", ["", "secret", base64.b64encode(b"short").decode(), "ä" * 44])
def test_a_key_that_is_none_is_refused_with_the_way_to_make_one(text: str) -> None:
    with pytest.raises(ValueError, match="openssl rand -base64 32"):
        parse_secrets_keys(text)

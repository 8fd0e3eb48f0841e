"""Secrets at rest: AES-256-GCM (NIST SP 800-38D) under a key that the database does not hold, so
that a dump or a backup of it signs nothing."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Sequence
from typing import Final, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mediamill.config import SECRETS_KEY_BYTES, Settings, parse_secrets_keys

_MARK: Final = b"\x00mediamill\x01"
"""Begins what is sealed. What does not begin so was kept in plain."""
_NAME_BYTES: Final = 8
_NONCE_BYTES: Final = 12


class CannotOpen(Exception):
    """It was sealed under a key that this process does not have, or for something else."""


class Vault:
    """Seals under the first of its keys, 32 bytes each, and opens under all of them. Without a key
    it keeps things in plain."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._ciphers = {name(key): AESGCM(key) for key in keys}

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """With the keys of the settings; else with the one that `mediamill up` made in this data
        folder, if it did. Raises ValueError."""
        text = settings.secrets_key
        if text is None:
            try:
                text = settings.secrets_key_file.read_text("ascii")
            except FileNotFoundError:
                return cls()
        return cls(parse_secrets_keys(text))

    @property
    def locks(self) -> bool:
        """Whether it has a key."""
        return bool(self._ciphers)

    def seal(self, value: bytes, *, about: bytes) -> bytes:
        """What may be kept. It opens for the same `about` only, so it cannot be moved elsewhere."""
        if not self._ciphers:
            return value
        first, cipher = next(iter(self._ciphers.items()))
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _MARK + first + nonce + cipher.encrypt(nonce, value, about)

    def open(self, kept: bytes, *, about: bytes) -> bytes:
        """The value again. Raises CannotOpen."""
        if not kept.startswith(_MARK):
            return kept
        rest = kept[len(_MARK) :]
        key_name, rest = rest[:_NAME_BYTES], rest[_NAME_BYTES:]
        if (cipher := self._ciphers.get(key_name)) is None:
            raise CannotOpen(f"sealed under key {key_name.hex()}, which this process does not have")
        try:
            return cipher.decrypt(rest[:_NONCE_BYTES], rest[_NONCE_BYTES:], about)
        except InvalidTag:
            raise CannotOpen("it was sealed for something else, or it was changed") from None


def new_key() -> str:
    """A fresh key as the setting takes it."""
    return base64.b64encode(secrets.token_bytes(SECRETS_KEY_BYTES)).decode()


def name(key: bytes) -> bytes:
    """Names a key without telling it."""
    return hashlib.sha256(b"mediamill secrets key\x00" + key).digest()[:_NAME_BYTES]

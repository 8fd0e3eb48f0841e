"""Signed addresses of the local storage: HMAC-SHA256 over all that the holder may not change.

The keys live in the database, newest first: the first one signs, all of them verify, so that a
rotation has an overlap.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from mediamill.failures import Code, Refused


@dataclass(frozen=True, slots=True)
class Keyring:
    """Signing keys by version; the highest version signs."""

    keys: Mapping[int, bytes]

    @property
    def newest(self) -> int:
        return max(self.keys)


@dataclass(frozen=True, slots=True)
class Grant:
    """What a signature covers. `content_type` and `size` are given for a PUT only, `part` (upload,
    number, offset, and the most bytes where `size` is open) for a PUT of a part."""

    method: str
    key: str
    expires: int
    content_type: str = ""
    size: int | None = None
    part: tuple[str | int, ...] | None = None

    def message(self, version: int) -> bytes:
        parts = (
            "mediamill-1",
            str(version),
            self.method,
            self.key,
            str(self.expires),
            self.content_type,
            "" if self.size is None else str(self.size),
            *(str(value) for value in self.part or ()),
        )
        return "\n".join(parts).encode()


def sign(keyring: Keyring, grant: Grant) -> str:
    """The path and query, below the storage root, under which the grant can be used."""
    version = keyring.newest
    names = ("upload", "part", "offset", "most")
    query = {
        **dict(zip(names, grant.part or (), strict=False)),
        "expires": grant.expires,
        "key_id": version,
        "signature": _signature(keyring.keys[version], grant.message(version)),
    }
    return f"{quote(grant.key)}?{urlencode(query)}"


def token(keyring: Keyring, grant: Grant) -> str:
    """The grant as one segment of a path: when it ends, by which key, and the signature."""
    version = keyring.newest
    signature = _signature(keyring.keys[version], grant.message(version))
    return f"{grant.expires}.{version}.{signature}"


def verify(keyring: Keyring, grant: Grant, *, key_id: str, signature: str, now: float) -> None:
    """Raise Refused(SIGNATURE_INVALID or SIGNATURE_EXPIRED) unless the grant was signed by us."""
    version = int(key_id) if key_id.isascii() and key_id.isdigit() and len(key_id) < 10 else -1
    # An unknown key id does the same work as a known one.
    secret = keyring.keys.get(version, b"unknown")
    expected = _signature(secret, grant.message(version))
    good = hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace"))
    if not good or version not in keyring.keys:
        raise Refused(
            Code.SIGNATURE_INVALID,
            "The signature does not cover this method, address, type and length.",
        )
    if grant.expires < now:
        raise Refused(Code.SIGNATURE_EXPIRED)


def seal(keyring: Keyring, content: str) -> str:
    """A token that carries `content` for all to read, and for nobody to change."""
    version = keyring.newest
    signature = _signature(keyring.keys[version], f"mediamill-token-1\n{content}".encode())
    return f"{version}.{urlsafe_b64encode(content.encode()).rstrip(b'=').decode()}.{signature}"


def unseal(keyring: Keyring, token: str) -> str | None:
    """What a token carries; None if it was not sealed by us."""
    version, _, rest = token.partition(".")
    encoded, _, signature = rest.partition(".")
    number = int(version) if version.isascii() and version.isdigit() and len(version) < 10 else -1
    secret = keyring.keys.get(number)
    if secret is None or not token.isascii():
        return None
    try:
        content = urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
    except ValueError:
        return None
    expected = _signature(secret, f"mediamill-token-1\n{content}".encode())
    return content if hmac.compare_digest(expected, signature) else None


def _signature(secret: bytes, message: bytes) -> str:
    digest = hmac.new(secret, message, hashlib.sha256).digest()
    return urlsafe_b64encode(digest).rstrip(b"=").decode()

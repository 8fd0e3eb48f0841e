"""Checking webhooks (Standard Webhooks): who sent it, when, and what it says."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Mapping
from typing import Final

from mediamill.client.errors import SignatureMismatch
from mediamill.client.models import Event
from mediamill.client.steps import told

_TOLERANCE_SECONDS: Final = 300.0


def unwrap(
    body: bytes | str,
    headers: Mapping[str, str],
    *,
    secret: str,
    tolerance_seconds: float = _TOLERANCE_SECONDS,
) -> Event:
    """The event of a webhook, once its signature and time hold. Raises SignatureMismatch.

    `body` are the bytes as they came, before any parsing; `secret` is the endpoint's `whsec_…`, or
    its public key `whpk_…` (that needs the `cryptography` library).
    """
    raw = body.encode() if isinstance(body, str) else body
    given = {name.lower(): value for name, value in headers.items()}
    try:
        number, stamp = given["webhook-id"], given["webhook-timestamp"]
        marks = given["webhook-signature"].split()
        at = int(stamp)
    except (KeyError, ValueError):
        raise SignatureMismatch("the headers of Standard Webhooks are missing") from None
    if abs(time.time() - at) > tolerance_seconds:
        raise SignatureMismatch("it is too old, or from the future: compare the clocks")
    signed = f"{number}.{stamp}.".encode() + raw
    if not any(_holds(mark, signed, secret) for mark in marks):
        raise SignatureMismatch("no signature fits this secret and these bytes")
    return told("message", raw.decode(), None)


def _holds(mark: str, signed: bytes, secret: str) -> bool:
    version, _, encoded = mark.partition(",")
    try:
        signature = base64.b64decode(encoded, validate=True)
        key = base64.b64decode(secret.partition("_")[2], validate=True)
    except ValueError:
        return False
    if version == "v1" and secret.startswith("whsec_"):
        return hmac.compare_digest(hmac.digest(key, signed, hashlib.sha256), signature)
    if version == "v1a" and secret.startswith("whpk_"):
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signature, signed)
        except (InvalidSignature, ValueError):
            return False
        return True
    return False

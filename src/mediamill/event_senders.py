"""Who may bring events of a bucket: signatures of SNS and tokens of Google, beside each secret.

The keys that both are checked with are fetched from the sender's own hosts, through the guarded way
out, and kept for a while.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from mediamill.config import ConfigError, EventToken, Settings
from mediamill.egress import Egress
from mediamill.failures import Code, Failure, Refused

_SNS_HOST: Final = r"https://sns\.[a-z0-9-]{1,40}\.amazonaws\.com(?:\.cn)?"
_SNS_KEY: Final = re.compile(_SNS_HOST + r"/[A-Za-z0-9_.-]{1,128}\.pem")
_SNS_CONFIRM: Final = re.compile(_SNS_HOST + r"/\?[\x21-\x7e]+")
_SNS_HASHES: Final[Mapping[str, hashes.HashAlgorithm]] = {
    "1": hashes.SHA1(),  # noqa: S303  # the sender's older form, which topics still have by default
    "2": hashes.SHA256(),
}
_SNS_NOTICE: Final = ("Message", "MessageId", "Subject", "Timestamp", "TopicArn", "Type")
_SNS_REQUEST: Final = (
    "Message", "MessageId", "SubscribeURL", "Timestamp", "Token", "TopicArn", "Type",
)  # fmt: skip
_SNS_SIGNED: Final = {
    "Notification": _SNS_NOTICE,
    "SubscriptionConfirmation": _SNS_REQUEST,
    "UnsubscribeConfirmation": _SNS_REQUEST,
}
_GOOGLE_KEYS: Final = "https://www.googleapis.com/oauth2/v1/certs"
_GOOGLE_ISSUERS: Final = frozenset({"accounts.google.com", "https://accounts.google.com"})
_SKEW_SECONDS: Final = 60
_KEY_SECONDS: Final = 24 * 3600.0
_MOST_KEYS: Final = 16
_AGAIN_SECONDS: Final = 60.0  # before keys are fetched again for a name that is not among them


class Senders:
    """Checks who sends, under one process's settings."""

    def __init__(
        self,
        settings: Settings,
        egress: Egress,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError when what a setting needs is not installed."""
        self._topics = settings.storage_event_topics or {}
        self._tokens = settings.storage_event_tokens or {}
        self._egress = egress
        self._clock = clock
        self._sns_keys: dict[str, tuple[float, RSAPublicKey]] = {}
        self._google_keys: dict[str, str] = {}
        self._google_at = -_KEY_SECONDS
        self._fetching = asyncio.Lock()
        if self._tokens:
            try:
                import google.auth.jwt  # noqa: F401
            except ImportError as error:
                raise ConfigError(
                    f"storage_event_tokens needs {error.name}: pip install 'mediamill[gcs]'"
                ) from None

    def wants_token(self, source: str) -> bool:
        """Whether this source shows a token of Google's, and its secret in the address."""
        return source in self._tokens

    async def check_token(self, source: str, token: str | None) -> None:
        """Hold the token of a source that must show one against the settings. Raises Refused,
        Failure when the keys cannot be had."""
        wanted = self._tokens.get(source)
        if wanted is None:
            return
        if not token:
            raise _refused("The token of this source is missing.")
        from google.auth import jwt

        name = _key_name(token)
        fresh = self._clock() - self._google_at < _KEY_SECONDS
        if not fresh or name not in self._google_keys:
            await self._fetch_google_keys()
        try:
            claims = jwt.decode(
                token,
                certs=self._google_keys,
                audience=wanted.audience,
                clock_skew_in_seconds=_SKEW_SECONDS,
            )
        except Exception as error:  # the library raises several kinds for what is only a bad token
            raise _refused("The token of this source is not valid.") from error
        _check_claims(claims, wanted)

    async def check_message(self, source: str, body: bytes) -> None:
        """Hold the signature of a message of SNS, which each of them carries, against its key.

        A source with a topic in the settings brings nothing but signed messages of that topic.
        Raises Refused, Failure when the key cannot be had.
        """
        message = _sns_message(body)
        topic = self._topics.get(source)
        if message is None:
            if topic is not None:
                raise _refused("Only signed messages of its topic come from this source.")
            return
        if topic is not None and message.get("TopicArn") != topic:
            raise _refused("The message is of another topic.")
        algorithm = _SNS_HASHES.get(str(message.get("SignatureVersion")))
        address = message.get("SigningCertURL")
        if algorithm is None or not isinstance(address, str) or not _SNS_KEY.fullmatch(address):
            raise _refused("The message is not signed by SNS.")
        try:
            signature = base64.b64decode(str(message.get("Signature")), validate=True)
        except ValueError:
            raise _refused("The message is not signed by SNS.") from None
        key = await self._sns_key(address)
        try:
            key.verify(signature, _signed_text(message), PKCS1v15(), algorithm)
        except InvalidSignature:
            raise _refused("The signature does not fit the message.") from None

    async def confirm(self, url: str) -> None:
        """Call the address that confirms a subscription, if it is one of SNS. Raises Refused,
        Failure."""
        if not _SNS_CONFIRM.fullmatch(url):
            raise Refused(Code.SOURCE_NOT_ALLOWED, "SubscribeURL is not an address of SNS.")
        await self._get(url, "SNS")

    async def _sns_key(self, address: str) -> RSAPublicKey:
        known = self._sns_keys.get(address)
        if known is not None and self._clock() - known[0] < _KEY_SECONDS:
            return known[1]
        text = await self._get(address, "SNS")
        try:
            certificate = x509.load_pem_x509_certificate(text)
            key = certificate.public_key()
        except ValueError:
            raise Failure(Code.TARGET_UNREACHABLE, "SNS sent no certificate.") from None
        now = datetime.now(UTC)
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise _refused("The certificate of the signature is not valid now.")
        if not isinstance(key, RSAPublicKey):
            raise _refused("The certificate of the signature has a key of another kind.")
        if len(self._sns_keys) >= _MOST_KEYS:
            self._sns_keys.pop(min(self._sns_keys, key=lambda name: self._sns_keys[name][0]))
        self._sns_keys[address] = self._clock(), key
        return key

    async def _fetch_google_keys(self) -> None:
        """Google's keys anew, unless they came a moment ago: a token that names an unknown key
        does not make us ask each time."""
        async with self._fetching:
            if self._clock() - self._google_at < _AGAIN_SECONDS:
                return
            try:
                found = json.loads(await self._get(_GOOGLE_KEYS, "Google"))
                self._google_keys = {name: str(key) for name, key in found.items()}
            except (ValueError, AttributeError):
                raise Failure(Code.TARGET_UNREACHABLE, "Google sent no keys.") from None
            self._google_at = self._clock()

    async def _get(self, url: str, who: str) -> bytes:
        async with self._egress.call("GET", url) as reply:
            if reply.status != HTTPStatus.OK:
                raise Failure(Code.TARGET_UNREACHABLE, f"{who} answered {reply.status}.")
            return await reply.read()


def _sns_message(body: bytes) -> dict[str, Any] | None:
    """The envelope of SNS, if this is one."""
    with suppress(ValueError, RecursionError):
        given = json.loads(body)
        if isinstance(given, dict) and given.get("Type") in tuple(_SNS_SIGNED):
            return given
    return None


def _signed_text(message: Mapping[str, Any]) -> bytes:
    """What SNS signs: names and values of certain fields, each on a line of its own."""
    names = _SNS_SIGNED[message["Type"]]
    lines = [f"{name}\n{message[name]}\n" for name in names if message.get(name) is not None]
    return "".join(lines).encode("utf-8", "surrogatepass")


def _key_name(token: str) -> str | None:
    """The key that a token says it is signed with; None for what is no token."""
    from google.auth import jwt

    with suppress(Exception):
        return str(jwt.decode_header(token)["kid"])
    return None


def _check_claims(claims: Mapping[str, Any], wanted: EventToken) -> None:
    if claims.get("iss") not in _GOOGLE_ISSUERS:
        raise _refused("The token of this source was not issued by Google.")
    if claims.get("email") != wanted.service_account or claims.get("email_verified") is not True:
        raise _refused("The token of this source belongs to another account.")


def _refused(detail: str) -> Refused:
    return Refused(Code.UNAUTHENTICATED, detail)

"""Who may bring events: signatures of SNS and tokens of Google, checked with keys of our own."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests import rows
from tests.senders import (
    ACCOUNT,
    AUDIENCE,
    GOOGLE_HOST,
    SNS_HOST,
    SNS_KEY_URL,
    TOPIC,
    KeyHost,
    certificate,
    google_token,
    key_host,
    signed,
)

from mediamill.config import ConfigError, EventToken
from mediamill.event_senders import Senders
from mediamill.failures import Code, Failure, Refused

pytestmark = pytest.mark.anyio

SECRETS = {"plain": "s" * 16, "topic": "s" * 16, "google": "s" * 16}


@pytest.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KeyHost]:
    async with key_host(tmp_path, monkeypatch) as running:
        yield running


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def senders(host: KeyHost, tmp_path: Path, clock: Clock) -> Senders:
    settings = rows.settings(
        tmp_path,
        storage_event_secrets=SECRETS,
        storage_event_topics={"topic": TOPIC},
        storage_event_tokens={"google": EventToken(audience=AUDIENCE, service_account=ACCOUNT)},
    )
    return Senders(settings, host.egress, clock=clock)


async def takes(senders: Senders, source: str, body: Any) -> str | None:
    """None if the message passes, else how it is refused."""
    try:
        await senders.check_message(source, json.dumps(body).encode())
    except Refused as refused:
        return f"{refused.code.code}: {refused.problem.detail}"
    return None


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("source", ["plain", "topic"])
async def test_a_signed_message_passes_and_its_key_is_fetched_once(
    senders: Senders, host: KeyHost, clock: Clock, version: str, source: str
) -> None:
    for message in (
        {"Message": "{}"},
        {"Message": "é\n", "Subject": "Amazon S3 Notification"},
        {"Type": "SubscriptionConfirmation", "SubscribeURL": f"https://{SNS_HOST}/?Token=1"},
        {"Type": "UnsubscribeConfirmation", "SubscribeURL": f"https://{SNS_HOST}/?Token=1"},
    ):
        assert await takes(senders, source, signed(message, version=version)) is None
    assert host.asked == [SNS_KEY_URL]
    clock.now += 25 * 3600
    assert await takes(senders, source, signed({"Message": "{}"}, version=version)) is None
    assert host.asked == [SNS_KEY_URL] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"Message": "other"},
        {"MessageId": "other"},
        {"Subject": "other"},
        {"Timestamp": "2027-01-02T03:04:05.678Z"},
        {"Signature": base64.b64encode(b"x" * 256).decode()},
        {"Signature": ""},
        {"Signature": "?"},
        {"Signature": None},
        {"SignatureVersion": "1"},
        {"SignatureVersion": "3"},
        {"SignatureVersion": None},
        {"Type": "UnsubscribeConfirmation"},
    ],
    ids=str,
)
async def test_what_was_changed_on_the_way_does_not_pass(
    senders: Senders, change: dict[str, Any]
) -> None:
    assert await takes(senders, "plain", {**signed({"Message": "{}"}), **change})


async def test_another_key_does_not_pass(senders: Senders) -> None:
    assert await takes(senders, "plain", signed({"Message": "{}"}, number=2))
    unsigned = {"Type": "Notification", "Message": "{}", "TopicArn": TOPIC}
    assert await takes(senders, "plain", unsigned)


@pytest.mark.parametrize(
    "address",
    [
        "http://sns.eu-west-1.amazonaws.com/x.pem",
        "https://sns.eu-west-1.amazonaws.com.evil.test/x.pem",
        "https://sns.eu-west-1.amazonaws.com@evil.test/x.pem",
        "https://sns.eu-west-1.amazonaws.com:8443/x.pem",
        "https://sns.eu-west-1.amazonaws.com/../x.pem",
        "https://sns.eu-west-1.amazonaws.com/?x.pem",
        "https://evil.test/sns.eu-west-1.amazonaws.com/x.pem",
        "https://my-bucket.s3.amazonaws.com/x.pem",
        "https://sns.eu-west-1.amazonaws.com/x.pem\n",
        "https://sns.evil.test/.amazonaws.com/x.pem",
        7,
        None,
    ],
)
async def test_a_key_from_another_host_is_not_even_asked_for(
    senders: Senders, host: KeyHost, address: Any
) -> None:
    forged = signed({"Message": "{}"}, SigningCertURL=address)
    assert (
        await takes(senders, "plain", forged)
        == "unauthenticated: The message is not signed by SNS."
    )
    assert host.asked == []


async def test_a_key_that_is_over_or_none_does_not_pass(senders: Senders, host: KeyHost) -> None:
    page = "/SimpleNotificationService-1.pem"
    body = json.dumps(signed({"Message": "{}"})).encode()
    host.pages[page] = certificate(1, "sns", ended=True)
    with pytest.raises(Refused):
        await senders.check_message("plain", body)
    host.pages[page] = b"no certificate"
    with pytest.raises(Failure) as failed:
        await senders.check_message("plain", body)
    assert failed.value.code is Code.TARGET_UNREACHABLE
    host.down = True
    with pytest.raises(Failure):
        await senders.check_message("plain", body)
    host.down, host.pages[page] = False, certificate(1, "sns")
    await senders.check_message("plain", body)


async def test_a_source_of_one_topic_brings_nothing_else(senders: Senders) -> None:
    other = signed({"Message": "{}", "TopicArn": TOPIC + "2"})
    assert await takes(senders, "topic", other)
    assert await takes(senders, "plain", other) is None
    raw: dict[str, Any] = {"Records": []}
    assert await takes(senders, "topic", raw)
    assert await takes(senders, "plain", raw) is None


async def token_fault(senders: Senders, token: str | None) -> str | None:
    try:
        await senders.check_token("google", token)
    except Refused as refused:
        return f"{refused.code.code}: {refused.problem.detail}"
    return None


async def test_a_token_of_the_subscription_passes(senders: Senders, host: KeyHost) -> None:
    for _ in range(3):
        assert await token_fault(senders, google_token()) is None
    assert await token_fault(senders, google_token(iss="accounts.google.com")) is None
    assert host.asked == [f"https://{GOOGLE_HOST}/oauth2/v1/certs"]
    await senders.check_token("plain", None)  # this one shows none


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://evil.test"},
        {"aud": "https://other.test"},
        {"aud": [AUDIENCE, "other"]},
        {"email": "other@project.iam.gserviceaccount.com"},
        {"email": None},
        {"email_verified": False},
        {"email_verified": "true"},
        {"exp": 1},
        {"iat": 4_000_000_000, "exp": 4_000_003_600},
    ],
    ids=str,
)
async def test_a_token_that_says_something_else_does_not_pass(
    senders: Senders, claims: dict[str, Any]
) -> None:
    assert await token_fault(senders, google_token(**claims))


async def test_a_forged_token_does_not_pass(senders: Senders, host: KeyHost, clock: Clock) -> None:
    good = google_token()
    head, payload, signature = good.split(".")
    none = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').decode().rstrip("=")
    symmetric = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"key-1"}').decode().rstrip("=")
    for token in (
        None,
        "",
        "x",
        "a.b.c",
        "é.é.é",
        f"{none}.{payload}.",
        f"{none}.{payload}.{signature}",
        f"{symmetric}.{payload}.{signature}",
        f"{head}.{payload}.{signature[:-8]}AAAAAAAA",
        google_token(number=2),
        google_token(number=2, name="key-2"),
    ):
        assert await token_fault(senders, token), token
    # Unknown keys make us ask again, once in a while and no oftener.
    asked = len(host.asked)
    for _ in range(20):
        assert await token_fault(senders, google_token(number=2, name="key-2"))
    assert len(host.asked) == asked == 1
    clock.now += 61
    keys = {"key-2": certificate(2, "g").decode()}
    host.pages["/oauth2/v1/certs"] = json.dumps(keys).encode()
    assert await token_fault(senders, google_token(number=2, name="key-2")) is None
    assert await token_fault(senders, google_token())  # the old key is gone
    assert len(host.asked) == 2


@pytest.mark.parametrize("page", [None, b"[", b"[]", b'"x"', b"7"])
async def test_without_googles_keys_the_sender_is_told_to_come_again(
    senders: Senders, host: KeyHost, page: bytes | None
) -> None:
    if page is None:
        host.down = True
    else:
        host.pages["/oauth2/v1/certs"] = page
    with pytest.raises(Failure) as failed:
        await senders.check_token("google", google_token())
    assert failed.value.code is Code.TARGET_UNREACHABLE


async def test_a_missing_library_is_a_clear_error(
    host: KeyHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "google.auth.jwt", None)
    token = EventToken(audience=AUDIENCE, service_account=ACCOUNT)
    settings = rows.settings(
        tmp_path, storage_event_secrets=SECRETS, storage_event_tokens={"google": token}
    )
    with pytest.raises(ConfigError, match=r"mediamill\[gcs\]"):
        Senders(settings, host.egress)


def test_a_check_without_a_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no secret for bucket"):
        rows.settings(tmp_path, storage_event_topics={"bucket": TOPIC})

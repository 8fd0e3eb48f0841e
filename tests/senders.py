"""Stand-ins for who signs events of buckets: keys of our own, and the hosts that show them."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final

import httpcore2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.x509.oid import NameOID
from google.auth import crypt, jwt

from mediamill.egress import Egress, Policy

SNS_HOST: Final = "sns.eu-west-1.amazonaws.com"
GOOGLE_HOST: Final = "www.googleapis.com"
SNS_KEY_URL: Final = f"https://{SNS_HOST}/SimpleNotificationService-1.pem"
TOPIC: Final = "arn:aws:sns:eu-west-1:123456789012:uploads"
AUDIENCE: Final = "https://media.test/events"
ACCOUNT: Final = "push@project.iam.gserviceaccount.com"


@cache
def private_key(number: int) -> RSAPrivateKey:
    return generate_private_key(65537, 2048)


def pem(key: RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def certificate(number: int, *names: str, ended: bool = False) -> bytes:
    """A certificate of one of our keys, signed by itself."""
    key = private_key(number)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stand-in")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=2))
        .not_valid_after(now + timedelta(hours=-1 if ended else 1))
        .add_extension(x509.SubjectAlternativeName(list(map(x509.DNSName, names))), critical=False)
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


def signed(message: dict[str, Any], *, version: str = "2", number: int = 1, **more: Any) -> Any:
    """A message of SNS as SNS sends it, signed with one of our keys."""
    whole = {
        "Type": "Notification",
        "MessageId": "22b80b92",
        "TopicArn": TOPIC,
        "Timestamp": "2026-01-02T03:04:05.678Z",
        **message,
    }
    if whole["Type"] != "Notification":
        whole = {"Token": "2336412f37", "Message": "You have chosen to subscribe.", **whole}
    names = sorted(set(whole) - {"Signature", "SignatureVersion", "SigningCertURL"})
    text = "".join(f"{name}\n{whole[name]}\n" for name in names)
    algorithm = hashes.SHA1() if version == "1" else hashes.SHA256()
    signature = private_key(number).sign(text.encode(), PKCS1v15(), algorithm)
    return {
        **whole,
        "SignatureVersion": version,
        "Signature": base64.b64encode(signature).decode(),
        "SigningCertURL": SNS_KEY_URL,
        "UnsubscribeURL": f"https://{SNS_HOST}/?Action=Unsubscribe",
        **more,
    }


def google_token(*, number: int = 1, name: str = "key-1", **claims: Any) -> str:
    """A token as a push subscription shows it."""
    now = int(time.time())
    payload = {
        "iss": "https://accounts.google.com",
        "aud": AUDIENCE,
        "email": ACCOUNT,
        "email_verified": True,
        "iat": now,
        "exp": now + 3600,
        **claims,
    }
    signer = crypt.RSASigner.from_string(pem(private_key(number)), key_id=name)
    return str(jwt.encode(signer, payload), "ascii")


@dataclass(slots=True)
class KeyHost:
    """SNS and Google in one: it shows keys, takes confirmations, and notes what was asked."""

    egress: Egress
    asked: list[str] = field(default_factory=list)
    pages: dict[str, bytes] = field(default_factory=dict)
    down: bool = False


@asynccontextmanager
async def key_host(folder: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[KeyHost]:
    """The hosts on this machine, and a way out that finds them under their names, over TLS. Only
    the port differs, which is not ours to take."""
    chain, secret = folder / "hosts.pem", folder / "hosts.key"
    chain.write_bytes(certificate(0, SNS_HOST, GOOGLE_HOST))
    secret.write_bytes(pem(private_key(0)))
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(chain, secret)
    host: KeyHost

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        name = next(line[6:] for line in head.split("\r\n") if line.startswith("host: "))
        host.asked.append(f"https://{name}{path}")
        page = None if host.down else host.pages.get(path.partition("?")[0])
        if page is None:
            writer.write(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(page) + page)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=theirs)
    port = server.sockets[0].getsockname()[1]
    connect = httpcore2.AnyIOBackend.connect_tcp

    async def to_ours(self: Any, address: str, at: int, **more: Any) -> Any:
        return await connect(self, address, port if at == 443 else at, **more)

    patch.setattr(httpcore2.AnyIOBackend, "connect_tcp", to_ours)

    async def names(_: str, __: int) -> list[str]:
        return ["127.0.0.1"]

    egress = Egress(
        Policy(allow_networks=(ip_network("127.0.0.0/8"),)),
        resolver=names,
        tls=ssl.create_default_context(cafile=str(chain)),
    )
    host = KeyHost(egress)
    host.pages["/SimpleNotificationService-1.pem"] = certificate(1, "sns")
    host.pages["/oauth2/v1/certs"] = json.dumps({"key-1": certificate(1, "g").decode()}).encode()
    host.pages["/"] = b"<ConfirmSubscriptionResponse/>"
    try:
        async with server:
            yield host
    finally:
        egress.close()

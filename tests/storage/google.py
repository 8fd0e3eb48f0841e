"""A bucket of Google Cloud Storage, played in this process: its XML API as documented.

The emulators to be had look at no signature, no condition and no list of this API. This one
verifies V4 signatures and tokens against the key of its service account, by code of its own, and
refuses what the real one refuses: a header of Google's that was not signed, a length out of range,
a condition on the joining of parts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import google_crc32c
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from python_multipart.multipart import parse_options_header

EMAIL = "mediamill@test.iam.example"
LEAST_PART = 5 << 20
_GENERATIONS = count(1_700_000_000_000_000)


class Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


@dataclass(slots=True)
class Thing:
    """An object."""

    data: bytes
    content_type: str
    generation: int = field(default_factory=lambda: next(_GENERATIONS))
    at: float = field(default_factory=time.time)

    @property
    def headers(self) -> dict[str, str]:
        crc = base64.b64encode(google_crc32c.value(self.data).to_bytes(4, "big")).decode()
        return {
            "ETag": f'"{hashlib.md5(self.data).hexdigest()}"',
            "x-goog-generation": str(self.generation),
            "x-goog-hash": f"crc32c={crc}",
            "Content-Type": self.content_type,
            "Last-Modified": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(self.at)),
        }


@dataclass(slots=True)
class Google:
    """The server: its buckets, its account, and what it was told to do."""

    folder: Path
    port: int = 0
    buckets: dict[str, dict[str, Thing]] = field(default_factory=dict)
    uploads: dict[str, tuple[str, str, str, dict[int, bytes], float]] = field(default_factory=dict)
    described: dict[str, Any] = field(default_factory=dict)
    """What the JSON API says of a bucket."""
    cors: str | None = None
    """The origin that may come from a browser."""
    key: rsa.RSAPrivateKey = field(
        default_factory=lambda: rsa.generate_private_key(public_exponent=65537, key_size=2048)
    )
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def credentials_file(self) -> Path:
        return self.folder / "account.json"

    def new_bucket(self) -> str:
        name = f"test-{len(self.buckets)}"
        self.buckets[name] = {}
        return name

    def everything(self, bucket: str) -> list[str]:
        """Every object, and every object in parts."""
        begun = [key for place, key, *_ in self.uploads.values() if place == bucket]
        return sorted([*self.buckets[bucket], *begun])

    def write_account(self, key: rsa.RSAPrivateKey) -> None:
        """The key file of the account, as the console would give it."""
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode()
        account = {
            "type": "service_account",
            "project_id": "test",
            "private_key_id": "k1",
            "private_key": pem,
            "client_email": EMAIL,
            "client_id": "1",
            "token_uri": f"{self.endpoint}/token",
        }
        self.credentials_file.write_text(json.dumps(account))

    def settings(self, bucket: str, **more: Any) -> dict[str, Any]:
        """Settings of an installation on a bucket of this server."""
        return {
            "storage": "gcs",
            "gcs_bucket": bucket,
            "gcs_credentials_file": self.credentials_file,
            "gcs_endpoint": self.endpoint,
            **more,
        }

    def verify(self, message: bytes, signature: bytes) -> None:
        try:
            self.key.public_key().verify(signature, message, padding.PKCS1v15(), hashes.SHA256())
        except InvalidSignature:
            raise Refused(403, "SignatureDoesNotMatch") from None


class Handler(BaseHTTPRequestHandler):
    google: Google
    protocol_version = "HTTP/1.1"

    def handle_one(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.body = self.rfile.read(length)
        parts = urlsplit(self.path)
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        self.bucket, _, key = parts.path.removeprefix("/").partition("/")
        self.bucket, self.key = unquote(self.bucket), unquote(key)
        try:
            with self.google.lock:
                status, headers, body = self.answer(parts.path)
        except Refused as refusal:
            xml = f"<Error><Code>{refusal.code}</Code></Error>".encode()
            status, headers, body = refusal.status, {}, xml
        if self.google.cors and self.headers.get("Origin") == self.google.cors:
            headers["Access-Control-Allow-Origin"] = self.google.cors
            headers["Access-Control-Expose-Headers"] = "ETag"
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_OPTIONS = handle_one

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if self.command == "OPTIONS":
            return (200 if self.headers.get("Origin") == self.google.cors else 403), {}, b""
        if path == "/token":
            token = {"access_token": "a-token", "expires_in": 3600, "token_type": "Bearer"}
            return 200, {"Content-Type": "application/json"}, json.dumps(token).encode()
        if path.startswith("/storage/v1/b/"):
            if self.headers.get("Authorization") != "Bearer a-token":
                raise Refused(401, "AuthenticationRequired")
            name = path.rsplit("/", 1)[1]
            said = json.dumps({"name": name, **self.google.described}).encode()
            return 200, {"Content-Type": "application/json"}, said
        form = self.command == "POST" and not self.key and "policy" in self.body.decode("latin-1")
        if form:
            return self.form()
        self.authorize(path)
        if self.bucket not in self.google.buckets:
            raise Refused(404, "NoSuchBucket")
        if not self.key:
            return self.list_uploads() if "uploads" in self.query else self.list()
        if "uploadId" in self.query or "uploads" in self.query:
            return self.in_parts()
        return getattr(self, self.command.lower())()  # type: ignore[no-any-return]

    # Who asks.

    def authorize(self, path: str) -> None:
        bearer = self.headers.get("Authorization", "")
        if bearer.startswith("Bearer ") and bearer.count(".") == 2:
            message, _, signature = bearer.removeprefix("Bearer ").rpartition(".")
            padded = signature + "=" * (-len(signature) % 4)
            self.google.verify(message.encode(), base64.urlsafe_b64decode(padded))
            return
        if "X-Goog-Signature" not in self.query:
            raise Refused(403, "AccessDenied")
        names = self.query["X-Goog-SignedHeaders"].split(";")
        unsigned = {h.lower() for h in self.headers if h.lower().startswith("x-goog-")} - {*names}
        if unsigned:
            raise Refused(400, "MalformedSecurityHeader")
        pairs = sorted((k, v) for k, v in self.query.items() if k != "X-Goog-Signature")
        asked = "&".join(f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in pairs)
        told = "".join(f"{name}:{self.headers.get(name, '').strip()}\n" for name in names)
        lines = [self.command, path, asked, told, ";".join(names), "UNSIGNED-PAYLOAD"]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        at = self.query["X-Goog-Date"]
        email, scope = self.query["X-Goog-Credential"].split("/", 1)
        if email != EMAIL or scope != f"{at[:8]}/auto/storage/goog4_request":
            raise Refused(403, "SignatureDoesNotMatch")
        message = "\n".join([self.query["X-Goog-Algorithm"], at, scope, digest])
        with suppress(ValueError):
            self.google.verify(message.encode(), bytes.fromhex(self.query["X-Goog-Signature"]))
            began = datetime.strptime(at, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
            if datetime.now(UTC) > began + timedelta(seconds=int(self.query["X-Goog-Expires"])):
                raise Refused(400, "ExpiredToken")
            return
        raise Refused(403, "SignatureDoesNotMatch")

    def form(self) -> tuple[int, dict[str, str], bytes]:
        _, options = parse_options_header(self.headers["Content-Type"])
        fields: dict[str, bytes] = {}
        for piece in self.body.split(b"--" + options[b"boundary"])[1:-1]:
            head, _, value = piece.removeprefix(b"\r\n").partition(b"\r\n\r\n")
            named = re.search(rb'name="([^"]+)"', head)
            assert named is not None
            fields[named[1].decode()] = value.removesuffix(b"\r\n")
        self.google.verify(fields["policy"], bytes.fromhex(fields["x-goog-signature"].decode()))
        policy = json.loads(base64.b64decode(fields["policy"]))
        if datetime.fromisoformat(policy["expiration"]) < datetime.now(UTC):
            raise Refused(403, "AccessDenied")
        given = {k: v.decode("latin-1") for k, v in fields.items() if k != "file"}
        given["bucket"] = self.bucket
        free = {"policy", "x-goog-signature", "bucket"}
        for condition in policy["conditions"]:
            match condition:
                case ["content-length-range", int(least), int(most)]:
                    size = len(fields["file"])
                    if not least <= size <= most:
                        raise Refused(400, "EntityTooLarge" if size > most else "EntityTooSmall")
                case dict():
                    for name, value in condition.items():
                        free.add(name)
                        if given.get(name) != value:
                            raise Refused(403, "AccessDenied")
        if set(given) - free:
            raise Refused(403, "AccessDenied")
        thing = Thing(fields["file"], given.get("Content-Type", "binary/octet-stream"))
        self.google.buckets[self.bucket][given["key"]] = thing
        return 204, thing.headers, b""

    # What is asked.

    @property
    def things(self) -> dict[str, Thing]:
        return self.google.buckets[self.bucket]

    def list(self) -> tuple[int, dict[str, str], bytes]:
        prefix, after = self.query.get("prefix", ""), self.query.get("continuation-token", "")
        names = sorted(k for k in self.things if k.startswith(prefix) and k > after)
        most = int(self.query.get("max-keys", 1000))
        page = ""
        for name in names[:most]:
            thing = self.things[name]
            at = datetime.fromtimestamp(thing.at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            page += (
                f"<Contents><Key>{escape(name)}</Key><LastModified>{at}</LastModified>"
                f"<ETag>{escape(thing.headers['ETag'])}</ETag><Size>{len(thing.data)}</Size>"
                "</Contents>"
            )
        if len(names) > most:
            page += f"<NextContinuationToken>{names[most - 1]}</NextContinuationToken>"
        return 200, {}, f"<ListBucketResult>{page}</ListBucketResult>".encode()

    def list_uploads(self) -> tuple[int, dict[str, str], bytes]:
        page = ""
        for name, (bucket, key, _, _, began) in self.google.uploads.items():
            if bucket == self.bucket and key.startswith(self.query.get("prefix", "")):
                at = datetime.fromtimestamp(began, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
                page += f"<Upload><Key>{escape(key)}</Key><UploadId>{name}</UploadId>"
                page += f"<Initiated>{at}</Initiated></Upload>"
        return 200, {}, f"<ListMultipartUploadsResult>{page}</ListMultipartUploadsResult>".encode()

    def in_parts(self) -> tuple[int, dict[str, str], bytes]:
        if "x-goog-if-generation-match" in self.headers:
            raise Refused(400, "NotImplemented")
        if "uploads" in self.query:
            name = f"ABPnz-{next(_GENERATIONS)}_x"
            kind = self.headers.get("Content-Type", "")
            self.google.uploads[name] = self.bucket, self.key, kind, {}, time.time()
            return 200, {}, f"<R><UploadId>{name}</UploadId></R>".encode()
        name = self.query["uploadId"]
        bucket, key, kind, parts, _ = self.google.uploads.get(name, ("", "", "", {}, 0.0))
        if (bucket, key) != (self.bucket, self.key):
            raise Refused(404, "NoSuchUpload")
        tags = {n: f'"{hashlib.md5(data).hexdigest()}"' for n, data in parts.items()}
        match self.command:
            case "PUT":
                number = int(self.query["partNumber"])
                parts[number] = self.body
                return 200, {"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'}, b""
            case "GET":
                page = "".join(
                    f"<Part><PartNumber>{n}</PartNumber><ETag>{escape(tags[n])}</ETag>"
                    f"<Size>{len(parts[n])}</Size></Part>"
                    for n in sorted(parts)
                )
                return 200, {}, f"<ListPartsResult>{page}</ListPartsResult>".encode()
            case "DELETE":
                del self.google.uploads[name]
                return 204, {}, b""
        found = re.findall(
            "<PartNumber>(.*?)</PartNumber><ETag>(.*?)</ETag>", self.body.decode(), re.DOTALL
        )
        chosen = [(int(number), tag) for number, tag in found]
        for number, tag in chosen:
            if tags.get(number) != tag:
                raise Refused(400, "InvalidPart")
        if any(len(parts[number]) < LEAST_PART for number, _ in chosen[:-1]):
            raise Refused(400, "EntityTooSmall")
        del self.google.uploads[name]
        thing = Thing(b"".join(parts[number] for number, _ in chosen), kind)
        self.things[self.key] = thing  # whatever was there
        return 200, {"x-goog-generation": str(thing.generation)}, b"<Done/>"

    def put(self) -> tuple[int, dict[str, str], bytes]:
        if self.headers.get("x-goog-if-generation-match") == "0" and self.key in self.things:
            raise Refused(412, "PreconditionFailed")
        span = self.headers.get("x-goog-content-length-range")
        if span is not None:
            least, most = map(int, span.split(","))
            if not least <= len(self.body) <= most:
                too = "EntityTooLarge" if len(self.body) > most else "EntityTooSmall"
                raise Refused(400, too)
        source = self.headers.get("x-goog-copy-source")
        if source is not None:
            bucket, _, key = unquote(source).removeprefix("/").partition("/")
            copied = self.google.buckets.get(bucket, {}).get(key)
            if copied is None:
                raise Refused(404, "NoSuchKey")
            thing = Thing(copied.data, copied.content_type)
        else:
            thing = Thing(self.body, self.headers.get("Content-Type", "binary/octet-stream"))
        self.things[self.key] = thing
        return 200, thing.headers, b"<CopyObjectResult/>" if source else b""

    def get(self) -> tuple[int, dict[str, str], bytes]:
        thing = self.things.get(self.key)
        if thing is None or self.query.get("generation", str(thing.generation)) != str(
            thing.generation
        ):
            raise Refused(404, "NoSuchKey")
        if self.headers.get("If-Match", thing.headers["ETag"]) != thing.headers["ETag"]:
            raise Refused(412, "PreconditionFailed")
        headers = dict(thing.headers)
        for name in ("content-type", "content-disposition", "cache-control"):
            if f"response-{name}" in self.query:
                headers[name.title()] = self.query[f"response-{name}"]
        if self.command == "HEAD":
            return 200, {**headers, "Content-Length": str(len(thing.data))}, b""
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            return 200, headers, thing.data
        start, end = int(span[1]), int(span[2] or len(thing.data) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(thing.data)}"
        return 206, headers, thing.data[start : end + 1]

    head = get

    def delete(self) -> tuple[int, dict[str, str], bytes]:
        if self.things.pop(self.key, None) is None:
            raise Refused(404, "NoSuchKey")
        return 204, {}, b""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def google(folder: Path) -> Iterator[Google]:
    """A running server; its account's key file lies in `folder`."""
    played = Google(folder)
    handler = type("Handler", (Handler,), {"google": played})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    played.port = server.server_port
    played.write_account(played.key)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield played
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""A SeaweedFS of the test run's own: an S3 server that checks what it should."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key-0123456789"


@dataclass(frozen=True, slots=True)
class Seaweed:
    """Where it listens. Buckets are made by who needs one."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def settings(self, bucket: str, **more: Any) -> dict[str, Any]:
        """Settings of an installation on a bucket of this server."""
        return {
            "storage": "s3",
            "s3_bucket": bucket,
            "s3_endpoint": self.endpoint,
            "s3_region": "us-east-1",
            "s3_access_key_id": ACCESS_KEY,
            "s3_secret_access_key": SECRET_KEY,
            **more,
        }


@contextmanager
def seaweed(folder: Path, *, tell: tuple[str, str] | None = None) -> Iterator[Seaweed]:
    """A running server that keeps its data in `folder`. `tell` is an address that hears of every
    object, and the token that it is shown."""
    folder.mkdir(parents=True, exist_ok=True)
    if tell is not None:
        (folder / "notification.toml").write_text(
            f'[notification.webhook]\nenabled = true\nendpoint = "{tell[0]}"\n'
            f'bearer_token = "{tell[1]}"\n'
        )
    config = folder / "s3.json"
    key = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "test", "credentials": [key], "actions": actions}
    config.write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir(exist_ok=True)
    # Each bucket takes volumes of its own: one at a time, so that they do not run out.
    (folder / "master.toml").write_text("[master.volume_growth]\ncopy_1 = 1\n")
    names = ["master", "volume", "filer", "s3"]
    ports = free_ports(2 * len(names))
    port = dict(zip(names, ports, strict=False))
    flags = [f"-{name}.port={number}" for name, number in port.items()]
    flags += [f"-{name}.port.grpc={ports[len(names) + n]}" for n, name in enumerate(names)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "weed"),
                "server",
                "-s3",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
                f"-dir={folder / 'data'}",
                f"-s3.config={config}",
                "-volume.max=300",
                "-master.volumeSizeLimitMB=64",
                "-master.telemetry=false",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                *flags,
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
        )
    found = Seaweed(port["s3"], process)
    try:
        _await(found, port["master"], folder / "log")
        yield found
    finally:
        process.kill()  # an orderly end takes it ten seconds
        process.wait()


def bucket_name() -> str:
    return f"test-{secrets.token_hex(6)}"


def _await(server: Seaweed, master: int, log: Path) -> None:
    """Until it answers, and has a volume to write to."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.process.poll() is None, log.read_text(errors="replace")[-2000:]
        with suppress(httpx.HTTPError):
            assigned = httpx.get(f"http://127.0.0.1:{master}/dir/assign", timeout=5)
            writes = assigned.status_code == 200 and "fid" in assigned.json()
            if writes and httpx.get(server.endpoint, timeout=5).status_code == 403:
                return
        time.sleep(0.1)
    raise AssertionError(log.read_text(errors="replace")[-2000:])


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]

"""An Azurite of the test run's own: Azure's emulator, which checks signatures and permissions."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas
from tests.storage.seaweed import free_ports

ACCOUNT = "mediaexample"
ACCOUNT_KEY = "dGhpcyBpcyBhIGtleSBmb3IgdGVzdHMgYW5kIG5vdGhpbmcgZWxzZSEhISEhIQ=="
_PACKAGE = "azurite@3.35.0"


@dataclass(frozen=True, slots=True)
class Azurite:
    """Where it listens. Containers are made by who needs one."""

    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}"

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        """A request with all rights of the account; `path` may carry a query."""
        token = generate_account_sas(
            ACCOUNT,
            ACCOUNT_KEY,
            ResourceTypes(service=True, container=True, object=True),
            AccountSasPermissions(
                read=True, write=True, delete=True, list=True, add=True, create=True, process=True
            ),
            datetime.now(UTC) + timedelta(minutes=10),
        )
        mark = "&" if "?" in path else "?"
        return httpx.request(method, f"{self.endpoint}/{path}{mark}{token}", **more)

    def new_container(self) -> str:
        name = f"test-{secrets.token_hex(6)}"
        assert self.ask("PUT", f"{name}?restype=container").status_code == 201
        return name

    def everything(self, container: str) -> list[str]:
        """Every blob, also those that have blocks only, as the server lists them."""
        include = "uncommittedblobs,snapshots,deleted"
        page = self.ask("GET", f"{container}?restype=container&comp=list&include={include}").text
        return sorted(part.partition("</Name>")[0] for part in page.split("<Name>")[1:])

    def settings(self, container: str, **more: Any) -> dict[str, Any]:
        """Settings of an installation on a container of this server."""
        return {
            "storage": "azure",
            "azure_container": container,
            "azure_account": ACCOUNT,
            "azure_account_key": ACCOUNT_KEY,
            "azure_endpoint": self.endpoint,
            **more,
        }


@contextmanager
def azurite(folder: Path) -> Iterator[Azurite]:
    """A running server that keeps its data in `folder`; it is installed there first."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("there is no npm on this machine")
    install = [npm, "install", "--no-audit", "--no-fund", "--silent", _PACKAGE]
    subprocess.run(install, cwd=folder, check=True, timeout=180)
    (port,) = free_ports(1)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                node,
                str(folder / "node_modules/azurite/dist/src/blob/main.js"),
                f"--location={folder / 'data'}",
                "--blobHost=127.0.0.1",
                f"--blobPort={port}",
                "--skipApiVersionCheck",
                "--disableTelemetry",
                "--silent",
            ],
            env={"PATH": "/usr/bin:/bin", "AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            with suppress(httpx.HTTPError):
                httpx.get(f"http://127.0.0.1:{port}/", timeout=2)
                break
            time.sleep(0.1)
        yield Azurite(port)
    finally:
        process.kill()
        process.wait()

"""Generated requests against the running API: no 500, and no answer that is not documented."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.api.conftest import serving
from tests.sink import LOCAL

from mediamill import db, ids, webhooks
from mediamill.api import streams
from mediamill.sealing import Vault

pytestmark = [pytest.mark.anyio, pytest.mark.extra, pytest.mark.timeout(600)]

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,unsupported_method"
)


async def test_generated_requests_find_nothing(
    shared_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mediamill.api.services._WAIT_MOST", 0.1)
    begin = streams._begin

    async def at_once(*args: Any, **options: Any) -> tuple[list[bytes], bool]:
        """A stream that ends after what there is at once: the others would be read for ever."""
        first, _ = await begin(*args, **options)
        return first, True

    monkeypatch.setattr(streams, "_begin", at_once)
    async with serving(
        shared_database, tmp_path, egress_allow_networks=LOCAL, inbox=True
    ) as served:
        api = served.api
        body = await api.queued()
        async with db.transaction(api.pool) as connection:
            wanted = webhooks.Wanted("http://127.0.0.1:9/")
            row, _ = await webhooks.add(
                connection, api.tenant, wanted, origin="-", most=10, vault=Vault()
            )
            delivery_id = await webhooks.test(connection, row)
        key = await api.new_key(api.tenant, "admin", "operate")
        config = tmp_path / "schemathesis.toml"
        known = {
            "media_id": body["id"],
            "job_id": body["job"]["id"],
            "endpoint_id": ids.encode(ids.ENDPOINT, row["id"]),
            "delivery_id": ids.encode(ids.DELIVERY, delivery_id),
        }
        lines = [f'"path.{name}" = "{value}"' for name, value in known.items()]
        config.write_text("[parameters]\n" + "\n".join(lines) + "\n")
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "schemathesis"),
            "--config-file",
            str(config),
            "run",
            f"{served.url}/openapi.json",
            *("--header", f"Authorization: Bearer {key}"),
            *("--max-examples", "20"),
            *("--phases", "examples,coverage,fuzzing"),
            *("--checks", CHECKS),
            *("--request-timeout", "30"),
            "--no-color",
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()[-6000:]

"""/v1/settings and /v1/storage-checks: what an operator sees of the installation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.api.conftest import Api, make_api

from mediamill import config

pytestmark = pytest.mark.anyio


@pytest.fixture
async def api(shared_database: str, tmp_path: Path) -> AsyncIterator[Api]:
    async with make_api(
        shared_database,
        tmp_path,
        storage_event_secrets={"bucket": "a very secret secret"},
        s3_access_key_id="id",
        s3_secret_access_key="hidden-key",
        s3_endpoint="https://me:hidden-word@s3.test",
    ) as made:
        yield made


async def test_every_setting_is_shown_with_its_origin_and_no_secret(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDIAMILL_PORT", "1234")
    token = await api.new_key(api.tenant, "operate")
    async with api.stranger(token) as operator:
        answer = await operator.get("/v1/settings")
    assert answer.status_code == 200
    found = {s["name"]: s for s in answer.json()["data"]}
    assert found.keys() == config.Settings.model_fields.keys()
    assert found["port"]["origin"] == "MEDIAMILL_PORT"
    assert found["max_side"]["origin"] == "default"
    assert found["max_side"]["is_default"] is True
    assert found["database_url"]["is_default"] is False
    for secret in ("secret secret", "hidden"):
        assert secret not in answer.text
    assert found["s3_secret_access_key"]["value"] == "***"
    assert found["s3_endpoint"]["value"] == "https://me:***@s3.test"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me@db/x", "postgresql://me@db/x"),
        ("postgresql://me:pw@db/x", "postgresql://me:***@db/x"),
        ("postgresql://me:p/w@x@db/x", "postgresql://me:***@db/x"),
        ("postgresql://db/x?user=me&password=pw&a=1", "postgresql://db/x?user=me&password=***&a=1"),
        ("host=db password=pw user=me", "host=db password=*** user=me"),
        (None, None),
    ],
)
def test_a_password_in_an_address_is_masked(url: str | None, shown: str | None) -> None:
    assert config.shown(config.load(database_url=url))["database_url"] == shown


async def test_the_storage_is_checked(api: Api) -> None:
    token = await api.new_key(api.tenant, "operate")
    async with api.stranger(token) as operator:
        answer = await operator.post("/v1/storage-checks")
    assert answer.status_code == 200
    body = answer.json()
    assert body["storage"] == "local"
    assert [(c["name"], c["ok"]) for c in body["data"]] == [("local disk", True)]

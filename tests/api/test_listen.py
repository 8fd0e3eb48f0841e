"""`mediamill listen`, the inbox, and the command line around them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from standardwebhooks.webhooks import Webhook
from tests.api.conftest import Served, check_problem, make_api, serving
from tests.sink import LOCAL, answering, listening

from mediamill import listen
from mediamill.cli import main
from mediamill.client import Client, Problem
from mediamill.webhooks import Courier

pytestmark = pytest.mark.anyio


@pytest.fixture
async def served(shared_database: str, tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(shared_database, tmp_path) as made:
        yield made


async def test_events_are_signed_forwarded_recorded_and_sent_again(
    served: Served, tmp_path: Path
) -> None:
    said: list[str] = []
    record = tmp_path / "events.jsonl"
    secret = listen.fresh_secret()
    async with listening(answering(500, 200)) as sink:
        forwarder = listen.Forwarder(sink.url, secret, said.append, record)
        with Client(served.url, served.api.token) as client:
            running = asyncio.create_task(
                asyncio.to_thread(
                    listen.listen, client, forwarder, types="media.uploaded,media.queued", most=4
                )
            )
            for _ in range(500):
                if served.api.services.follower.count:
                    break
                await asyncio.sleep(0.01)
            await served.api.queued()
            await served.api.queued()
            async with asyncio.timeout(10):
                assert await running == 4
        for number in range(4):
            headers, body = sink.parsed(number)
            Webhook(secret).verify(body, headers)
        assert {e["type"] for e in sink.events()} == {"media.uploaded", "media.queued"}
        assert sum("500 in" in line for line in said) == 1
        assert sum("200 in" in line for line in said) == 3
        before = [e["id"] for e in sink.events()]
        again = listen.Forwarder(sink.url, secret, said.append)
        assert await asyncio.to_thread(listen.replay, record, again) == 4
        assert [e["id"] for e in sink.events()[4:]] == before
        headers, body = sink.parsed()
        Webhook(secret).verify(body, headers)


async def test_a_server_that_is_not_there_is_told_and_a_bad_key_ends(
    served: Served, tmp_path: Path
) -> None:
    said: list[str] = []
    forwarder = listen.Forwarder("http://127.0.0.1:9/", listen.fresh_secret(), said.append)
    event = json.dumps({"id": "evt_1", "type": "media.ready"}).encode()
    assert await asyncio.to_thread(forwarder.forward, event) is None
    assert "no answer" in said[-1]
    with Client(served.url, "mpk_live_nonsense") as client, pytest.raises(Problem):
        await asyncio.to_thread(listen.listen, client, forwarder)
    wrong = tmp_path / "x.jsonl"
    wrong.write_text('{"body": "{}"}\n')
    with pytest.raises(ValueError, match="line 1"):
        listen.replay(wrong, forwarder)


def test_the_command_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDIAMILL_DATA_DIR", str(tmp_path))
    runner = CliRunner()
    result = runner.invoke(main, ["listen", "--forward-to", "localhost:1", "--secret", "short"])
    assert result.exit_code == 1
    assert "whsec_" in result.output
    result = runner.invoke(main, ["listen", "--forward-to", "localhost:1"])
    assert result.exit_code == 1
    assert "--api-key" in result.output


async def test_the_inbox_shows_what_arrived_and_is_closed_by_default(
    shared_database: str, tmp_path: Path
) -> None:
    async with make_api(shared_database, tmp_path / "closed") as api:
        check_problem(await api.client.post("/v1/inbox", json={}), 404, "not_found")
        check_problem(await api.client.get("/v1/inbox"), 404, "not_found")
    settings: dict[str, Any] = {"inbox": True, "egress_allow_networks": LOCAL}
    async with serving(shared_database, tmp_path, **settings) as served, served.client() as client:
        wanted = {"url": f"{served.url}/v1/inbox"}
        made = (await client.post("/v1/webhook-endpoints", json=wanted)).json()
        await client.post(f"{made['links']['self']}/test")
        courier = Courier(served.api.services.settings, served.api.pool, name="c", slots=2)
        await courier.once()
        await courier.settle()
        (letter,) = (await client.get("/v1/inbox")).json()["data"]
        told = Webhook(made["secret"]).verify(letter["body"], letter["headers"])
        assert told["type"] == "webhook.test"
        async with served.client(None) as stranger:
            check_problem(await stranger.get("/v1/inbox"), 401, "unauthenticated")
            big = await stranger.post("/v1/inbox", content=b"x" * 300_000)
            check_problem(big, 413, "payload_too_large")

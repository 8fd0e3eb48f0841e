"""Webhooks: what is sent, to whom, how often, and what a bad receiver costs the others."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook, WebhookVerificationError
from svix.webhooks import Webhook as SvixWebhook
from tests import rows
from tests.sink import LOCAL, answering, listening, saying, silence

from mediamill import db, events, ids, sealing, webhooks
from mediamill.config import Settings, defaults
from mediamill.egress import Egress, Policy
from mediamill.sealing import Vault
from mediamill.states import DeliveryState
from mediamill.webhooks import Courier, Outcome, decide

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def shared(server: str, template: str) -> Iterator[str]:
    with rows.fresh_database(server, template) as dsn:
        yield dsn


@dataclass(slots=True)
class World:
    """A tenant, a courier, and hands to move both."""

    pool: db.Pool
    settings: Settings
    tenant: str
    courier: Courier

    async def endpoint(self, url: str, **wanted: Any) -> tuple[db.Row, bytes]:
        async with db.transaction(self.pool) as connection:
            return await webhooks.add(
                connection,
                self.tenant,
                webhooks.Wanted(url=url, **wanted),
                origin=url.rsplit("/", 1)[0],
                most=1000,
                vault=Vault(),
            )

    async def happens(self, count: int = 1, *, type: str = "media.failed", **data: Any) -> None:
        """Events, as the statements of the status store write them."""
        async with db.acquire(self.pool) as connection:
            await connection.execute(
                "INSERT INTO events (tenant_id, type, data)"
                " SELECT $1, $2, $3 FROM generate_series(1, $4)",
                self.tenant,
                type,
                {"state": "failed", **data},
                count,
            )

    async def deliver(self) -> int:
        """One look for due deliveries, with everything that was claimed brought to its end."""
        taken = await self.courier.once()
        await self.courier.settle()
        return taken

    async def deliver_all(self, *, seconds: float = 10.0) -> None:
        """Until nothing is pending."""
        async with asyncio.timeout(seconds):
            while await self.count("pending"):
                if not await self.deliver():
                    await asyncio.sleep(0.02)

    async def fetch(self, statement: str, *values: Any) -> list[db.Row]:
        async with db.acquire(self.pool) as connection:
            return await connection.fetch(statement, *values)

    async def count(self, state: str) -> int:
        found = await self.fetch(
            "SELECT count(*) FROM deliveries WHERE tenant_id = $1 AND state = $2",
            self.tenant,
            state,
        )
        number: int = found[0][0]
        return number

    async def attempts(self) -> list[db.Row]:
        return await self.fetch(
            "SELECT * FROM delivery_attempts WHERE tenant_id = $1 ORDER BY at", self.tenant
        )

    async def now(self, endpoint: db.Row) -> db.Row:
        """The endpoint as it is now."""
        return (await self.fetch("SELECT * FROM endpoints WHERE id = $1", endpoint["id"]))[0]


@asynccontextmanager
async def world(dsn: str, folder: Path, *, slots: int = 8, **settings: Any) -> AsyncIterator[World]:
    quick = {
        "webhook_schedule_seconds": [0.05, 0.05, 0.05],
        "webhook_breaker_seconds": 0.1,
        "webhook_timeout_seconds": 1.0,
        "egress_allow_networks": LOCAL,
    }
    chosen = rows.settings(folder, **(quick | settings))
    async with rows.pooled(dsn) as pool:
        async with db.acquire(pool) as connection:
            await connection.execute("DELETE FROM deliveries; DELETE FROM endpoints")
            tenant = await rows.new_tenant(connection)
        courier = Courier(chosen, pool, name="courier-1", slots=slots)
        yield World(pool, chosen, tenant, courier)


@pytest.fixture
async def here(shared: str, tmp_path: Path) -> AsyncIterator[World]:
    async with world(shared, tmp_path) as made:
        yield made


async def test_a_delivery_is_signed_for_the_reference_libraries(here: World) -> None:
    async with listening() as sink:
        _, secret = await here.endpoint(sink.url)
        await here.happens(note="ü \u2028")
        await here.deliver_all()
        headers, body = sink.parsed()
    shown = webhooks.shown_secret("hmac", secret)
    assert Webhook(shown).verify(body, headers)["type"] == "media.failed"
    SvixWebhook(shown).verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(shown).verify(body.replace(b"failed", b"ready!"), headers)
    with pytest.raises(WebhookVerificationError):  # the bytes count, not what they mean
        Webhook(shown).verify(json.dumps(json.loads(body)).encode(), headers)
    said = json.loads(body)
    assert headers["webhook-id"] == said["id"]
    assert headers["content-type"] == "application/json"
    assert headers["user-agent"].startswith("Mediamill/")
    assert int(headers["content-length"]) == len(body)
    assert said["schema_version"] == 1
    assert said["data"]["state"] == "failed"


async def test_ed25519_signatures_check_with_the_public_key_alone(here: World) -> None:
    async with listening() as sink:
        _, secret = await here.endpoint(sink.url, signing="ed25519")
        await here.happens()
        await here.deliver_all()
        headers, body = sink.parsed()
    shown = webhooks.shown_secret("ed25519", secret)
    assert shown.startswith("whpk_")
    public = Ed25519PublicKey.from_public_bytes(base64.b64decode(shown.removeprefix("whpk_")))
    version, _, mark = headers["webhook-signature"].partition(",")
    assert version == "v1a"
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    public.verify(base64.b64decode(mark), signed)
    with pytest.raises(InvalidSignature):
        public.verify(base64.b64decode(mark), signed + b" ")


async def test_a_sealed_secret_signs_and_one_without_its_key_waits_for_it(
    shared: str, tmp_path: Path
) -> None:
    async with (
        listening() as sink,
        world(shared, tmp_path, secrets_key=sealing.new_key()) as here,
    ):
        async with db.transaction(here.pool) as connection:
            _, secret = await webhooks.add(
                connection,
                here.tenant,
                webhooks.Wanted(url=sink.url),
                origin=sink.url.rsplit("/", 1)[0],
                most=10,
                vault=Vault.of(here.settings),
            )
        await here.happens()
        stranger = here.settings.model_copy(update={"secrets_key": sealing.new_key()})
        lost = Courier(stranger, here.pool, name="courier-2", slots=1)
        assert await lost.once() == 1
        await lost.settle()
        (tried,) = await here.fetch(
            "SELECT failure FROM delivery_attempts WHERE tenant_id = $1", here.tenant
        )
        assert "does not have" in tried["failure"]
        assert sink.connections == 0
        await here.deliver_all()
        headers, body = sink.parsed()
        Webhook(webhooks.shown_secret("hmac", secret)).verify(body, headers)


async def test_while_a_secret_is_rotated_both_sign(here: World) -> None:
    """Also what was tried before the rotation and is tried again after it."""
    async with listening(answering(500, 200)) as sink:
        row, old = await here.endpoint(sink.url)
        await here.happens()
        await here.deliver()
        async with db.transaction(here.pool) as connection:
            new = await webhooks.rotate(connection, row, overlap_seconds=3600, vault=Vault())
        await here.deliver_all()
        first, _ = sink.parsed(0)
        headers, body = sink.parsed(1)
        assert first["webhook-id"] == headers["webhook-id"]
        assert len(headers["webhook-signature"].split()) == 2
        for secret in (old, new):
            Webhook(webhooks.shown_secret("hmac", secret)).verify(body, headers)
        # Past the overlap, the new one alone.
        await here.fetch(
            "UPDATE endpoint_secrets SET retires_at = now() WHERE endpoint_id = $1"
            " AND retires_at IS NOT NULL",
            row["id"],
        )
        await here.happens()
        await here.deliver_all()
        headers, body = sink.parsed(2)
        Webhook(webhooks.shown_secret("hmac", new)).verify(body, headers)
        with pytest.raises(WebhookVerificationError):
            Webhook(webhooks.shown_secret("hmac", old)).verify(body, headers)


async def test_an_event_reaches_those_who_want_it_and_only_them(here: World) -> None:
    async with listening() as all_, listening() as media, listening() as jobs:
        await here.endpoint(all_.url)
        await here.endpoint(media.url, types=["media.*"])
        await here.endpoint(jobs.url, types=["job.completed", "webhook.test"])
        await here.happens(type="media.ready")
        await here.happens(type="job.completed")
        await here.happens(type="job.failed")
        await here.deliver_all()
        names = [sorted(e["type"] for e in sink.events()) for sink in (all_, media, jobs)]
        assert names == [
            ["job.completed", "job.failed", "media.ready"],
            ["media.ready"],
            ["job.completed"],
        ]


async def test_an_event_that_is_undone_is_not_told(here: World) -> None:
    async with listening() as sink:
        await here.endpoint(sink.url)
        async with db.acquire(here.pool) as connection:
            undone = connection.transaction()
            await undone.start()
            await connection.execute(
                "INSERT INTO events (tenant_id, type) VALUES ($1, 'media.ready')", here.tenant
            )
            await undone.rollback()
        await here.deliver()
        assert sink.connections == 0


async def test_a_refusing_receiver_is_tried_on_schedule_and_then_given_up(here: World) -> None:
    """500, a refused connection, a redirect: all the same, under one id."""
    onward = b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\n\r\n"
    async with listening(answering(500, onward, 404, 500)) as sink:
        await here.endpoint(sink.url)
        await here.happens()
        await here.deliver_all()
        assert len(sink.requests) == 4  # at once and after each of three pauses
        assert len({e["id"] for e in sink.events()}) == 1
        bodies = {sink.parsed(n)[1] for n in range(4)}
        assert len(bodies) == 1
        times = [int(sink.parsed(n)[0]["webhook-timestamp"]) for n in range(4)]
        assert times == sorted(times)
    assert await here.count("exhausted") == 1
    tried = await here.attempts()
    assert [a["status"] for a in tried] == [500, 302, 404, 500]
    assert [a["attempt"] for a in tried] == [1, 2, 3, 4]


async def test_a_receiver_that_was_down_gets_what_it_missed_under_the_same_id(here: World) -> None:
    async with listening() as sink:
        port = sink.port
    row, _ = await here.endpoint(f"http://127.0.0.1:{port}/in")
    await here.happens()
    await here.deliver()
    (attempt,) = await here.attempts()
    assert attempt["status"] is None
    assert attempt["failure"].startswith("connect: ")
    assert (await here.now(row))["failures"] == 1
    async with listening() as sink:
        await here.fetch("UPDATE endpoints SET url = $2 WHERE id = $1", row["id"], sink.url)
        await here.deliver_all()
        assert len(sink.requests) == 1
    assert (await here.now(row))["failures"] == 0


async def test_410_switches_an_endpoint_off_and_tells_the_others(here: World) -> None:
    async with listening(answering(410)) as gone, listening() as other:
        row, _ = await here.endpoint(gone.url, types=["media.*"])
        await here.endpoint(other.url, types=["endpoint.disabled"])
        await here.happens(3)
        await here.deliver_all()
        assert len(gone.requests) <= 2  # what was on its way at once
        (told,) = other.events()
    assert told["data"]["endpoint"] == ids.encode(ids.ENDPOINT, row["id"])
    assert "410" in told["data"]["reason"]
    now = await here.now(row)
    assert (now["state"], now["reason"]) == ("disabled", "it answered 410 Gone")
    await here.happens()  # nothing is noted for it any more
    assert await here.count("pending") == 0
    assert await here.count("exhausted") == 3


async def test_later_is_honoured_and_does_not_count_as_a_failure(here: World) -> None:
    busy = b"HTTP/1.1 429 Slow down\r\nretry-after: 3600\r\n\r\n"
    async with listening(answering(busy)) as sink:
        row, _ = await here.endpoint(sink.url)
        await here.happens(2)
        await here.deliver()
        assert len(sink.requests) == 2
        await here.happens()
        assert await here.deliver() == 0  # the endpoint as a whole is left alone
    now = await here.now(row)
    assert now["failures"] == 0
    (left,) = await here.fetch("SELECT $1::timestamptz - now() AS left", now["open_until"])
    assert 3500 < left["left"].total_seconds() <= 3600
    waiting = await here.fetch(
        "SELECT due_at - now() AS left FROM deliveries WHERE tenant_id = $1 AND attempt > 0",
        here.tenant,
    )
    assert all(3500 < row["left"].total_seconds() <= 3600 for row in waiting)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (silence, "timeout"),
        (saying(b"HTTP/1.1 200 OK\r\n" + b"x-a: " + b"b" * 100_000), "too_large"),
        (saying(b"nonsense\r\n\r\n"), "protocol"),
    ],
)
async def test_a_hostile_receiver_costs_one_attempt(here: World, answer: Any, kind: str) -> None:
    async with listening(answer) as sink:
        await here.endpoint(sink.url)
        await here.happens()
        await here.deliver()
    (attempt,) = await here.attempts()
    assert attempt["failure"].startswith(f"{kind}: ")
    assert attempt["duration_ms"] < 5000


async def test_an_endless_answer_is_read_no_further_than_its_excerpt(here: World) -> None:
    async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n<script>")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    async with listening(endless) as sink:
        await here.endpoint(sink.url)
        await here.happens()
        await here.deliver_all()
    (attempt,) = await here.attempts()
    assert attempt["status"] == 200
    assert len(attempt["response"]) == 4096


async def test_one_black_hole_does_not_delay_the_others(shared: str, tmp_path: Path) -> None:
    """300 events for a receiver that never answers, then one for each of 20 good ones."""
    async with (
        world(shared, tmp_path, webhook_timeout_seconds=5.0) as here,
        listening(silence) as hole,
        listening() as good,
    ):
        await here.endpoint(hole.url, types=["media.failed"])
        await here.happens(300)
        running = asyncio.create_task(here.courier.run())
        await hole.heard(2)
        for n in range(20):
            await here.endpoint(f"{good.url}/{n}", types=["media.ready"])
        begun = time.monotonic()
        await here.happens(type="media.ready")
        await good.heard(20)
        assert time.monotonic() - begun < 4  # less than one of the hole's attempts takes
        assert hole.connections == 2  # never more at once
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_new_endpoints_that_hang_leave_slots_to_other_tenants(
    shared: str, tmp_path: Path
) -> None:
    """Twenty of one tenant, none of which has failed yet, and then one event of another."""
    async with (
        world(shared, tmp_path, slots=8, webhook_timeout_seconds=30.0) as here,
        listening(silence) as hole,
        listening() as good,
    ):
        for n in range(20):
            await here.endpoint(f"{hole.url}/{n}")
        await here.happens(3)
        running = asyncio.create_task(here.courier.run())
        await hole.heard(6)
        async with db.acquire(here.pool) as connection:
            tenant = await rows.new_tenant(connection)
        other = World(here.pool, here.settings, tenant, here.courier)
        await other.endpoint(good.url)
        begun = time.monotonic()
        await other.happens(4)
        await good.heard(4)
        assert time.monotonic() - begun < 25  # no attempt at the others has ended yet
        assert await here.attempts() == []
        assert hole.connections == 6  # three quarters of the slots
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_the_breaker_leaves_one_probe_and_closes_with_its_success(here: World) -> None:
    async with listening(answering(*([500] * 6), 200)) as sink:
        row, _ = await here.endpoint(sink.url)
        await here.happens(10)
        for _ in range(3):
            await here.deliver()  # two at a time
        now = await here.now(row)
        assert now["failures"] >= 5
        assert now["open_until"] is not None
        assert len(sink.requests) == 6
        assert await here.deliver() == 0  # open
        await asyncio.sleep(0.25)
        assert await here.deliver() == 1  # half open: one
        assert (await here.now(row))["failures"] == 0
        await here.deliver_all()
    assert await here.count("delivered") == 10


async def test_an_endpoint_without_success_for_long_is_switched_off(
    shared: str, tmp_path: Path
) -> None:
    async with (
        world(
            shared, tmp_path, webhook_breaker_failures=1000, webhook_disable_seconds=0.01
        ) as here,
        listening(answering(500)) as sink,
    ):
        row, _ = await here.endpoint(sink.url)
        await here.happens(30)
        await here.deliver_all()
        assert (await here.now(row))["state"] == "disabled"
        assert 20 <= len(sink.requests) <= 22
        assert await here.count("exhausted") == 30
        # Switched on again, it gets all of it.
        async with db.transaction(here.pool) as connection:
            await here.happens(type="media.ready")  # while it is off
            again = await webhooks.change(
                connection, await here.now(row), {"state": "enabled", "url": sink.url}
            )
            since = await connection.fetchval("SELECT now() - interval '1 hour'")
        async with db.transaction(here.pool) as connection:
            assert await webhooks.recover(connection, again, since) == 32  # and endpoint.disabled
        assert await here.count("pending") == 32


async def test_a_courier_that_dies_after_sending_sends_again_under_the_same_id(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(name: str) -> None:
        if name == "webhook.sent":
            raise Killed

    async with listening() as sink:
        await here.endpoint(sink.url)
        await here.happens()
        with monkeypatch.context() as patched:
            patched.setattr("mediamill.failpoints.hit", die)
            (parcel,) = await here.courier._claim(1)
            with pytest.raises(Killed):
                await here.courier._deliver(parcel)
        assert await here.deliver() == 0  # its lease still runs
        await here.fetch("UPDATE deliveries SET leased_until = now() - interval '1 s'")
        await here.deliver_all()
        ids_seen = [sink.parsed(n)[0]["webhook-id"] for n in range(2)]
        assert ids_seen[0] == ids_seen[1]
        assert sink.parsed(0)[1] == sink.parsed(1)[1]
    assert await here.count("delivered") == 1


async def test_a_late_result_of_another_attempt_changes_nothing(here: World) -> None:
    async with listening() as sink:
        await here.endpoint(sink.url)
        await here.happens()
        (late,) = await here.courier._claim(1)
        await here.fetch("UPDATE deliveries SET leased_until = now() - interval '1 s'")
        await here.deliver_all()
        bad = Outcome(1.0, {}, status=500)
        decision = decide(bad, tried=1, schedule=[1.0], spread=0)
        await here.courier._record(late, bad, decision)
    assert await here.count("delivered") == 1


async def test_an_address_that_turned_inward_is_not_called(shared: str, tmp_path: Path) -> None:
    async with (
        world(shared, tmp_path, egress_allow_networks=[], egress_allow_http=True) as here,
        listening() as sink,
    ):
        await here.endpoint(sink.url)
        await here.happens()
        await here.deliver()
        (attempt,) = await here.attempts()
        assert attempt["failure"].startswith("source_not_allowed: ")
        assert sink.connections == 0


async def test_thin_payloads_and_those_too_large_say_only_what_and_where(here: World) -> None:
    async with listening() as thin, listening() as full:
        await here.endpoint(thin.url, payload="thin")
        await here.endpoint(full.url)
        problem = {"code": "corrupt_input", "detail": "cut"}
        await here.happens(error=problem)
        await here.happens(error=problem | {"detail": "x" * 100_000})
        await here.deliver_all()
        assert all("error" not in e["data"] for e in thin.events())
        small, large = sorted(full.events(), key=lambda e: e["data"]["sequence"])
        assert small["data"]["error"]["detail"] == "cut"
        assert small["data"]["error"]["title"]
        assert large["data"]["truncated"] is True
        assert "error" not in large["data"]
        assert len(full.parsed()[1]) < 65536


async def test_ready_tells_the_variants_and_no_address(here: World, tmp_path: Path) -> None:
    from mediamill import installation
    from mediamill.storage.local import open_local

    async with listening() as sink:
        await here.endpoint(sink.url, types=["media.ready"])
        async with db.acquire(here.pool) as connection:
            media_id, births = await rows.accepted(connection, here.tenant, here.settings)
            held = await rows.claim(connection, here.tenant, births[0])
            installed = await installation.identify(connection)
            store = open_local(
                here.settings.objects_dir,
                installed.id,
                lambda: installed.keyring,
                rows.PUBLIC_URL,
            )
            await rows.publish(connection, store, held, {"w8.webp": b"0123456789"})
        await here.deliver_all()
        (told,) = sink.events()
    assert told["data"]["media_id"] == ids.encode(ids.MEDIA, media_id)
    (variant,) = told["data"]["variants"]
    assert (variant["name"], variant["bytes"]) == ("w8.webp", 10)
    assert "key" not in variant
    assert "http" not in json.dumps(told)


@given(
    status=st.sampled_from([None, 200, 204, 302, 400, 404, 410, 429, 500, 503]),
    tried=st.integers(1, 30),
    retry_after=st.none() | st.floats(0, 86400),
    spread=st.floats(-1, 1),
)
def test_every_outcome_leads_somewhere(
    status: int | None, tried: int, retry_after: float | None, spread: float
) -> None:
    schedule: Sequence[float] = defaults()["webhook_schedule_seconds"]
    outcome = Outcome(
        1.0, {}, status=status, failure=None if status else "x: y", retry_after=retry_after
    )
    found = decide(outcome, tried=tried, schedule=schedule, spread=spread)
    if status in (200, 204):
        assert found.state is DeliveryState.DELIVERED
    elif status == 410:
        assert found.disable
        assert found.state is DeliveryState.EXHAUSTED
    elif tried > len(schedule):
        assert found.state is DeliveryState.EXHAUSTED
        assert found.reason
    else:
        assert found.state is DeliveryState.PENDING
        assert found.delay_seconds >= 0.8 * schedule[tried - 1]
        assert found.delay_seconds >= (retry_after or 0)
        assert found.delay_seconds <= max(1.2 * schedule[tried - 1], retry_after or 0)
    assert (found.record == "later") == (status in (429, 503))


def test_the_schedule_takes_about_three_days() -> None:
    schedule = defaults()["webhook_schedule_seconds"]
    assert len(schedule) + 1 == 10
    assert 2.5 * 86400 < sum(schedule) < 3.6 * 86400


async def test_a_secret_of_ones_own_must_be_long_enough() -> None:
    good = f"whsec_{base64.b64encode(b'x' * 24).decode()}"
    assert webhooks.read_secret(good) == b"x" * 24
    for bad in ("x", "whsec_", "whsec_!!", f"whsec_{base64.b64encode(b'x' * 23).decode()}"):
        with pytest.raises(ValueError):
            webhooks.read_secret(bad)


async def test_every_type_that_the_statements_write_is_described() -> None:
    import re
    from importlib import resources

    folder = resources.files("mediamill").joinpath("sql")
    text = "".join(f.read_text() for f in folder.iterdir() if f.name.endswith(".sql"))
    written = set(re.findall(r"'((?:media|job|variant|endpoint|webhook)\.[a-z_]+)'", text))
    assert written <= set(events.TYPES)


async def test_egress_of_the_courier_follows_the_settings(here: World) -> None:
    way = Egress(Policy.of(here.settings))
    assert [str(n) for n in way.policy.allow_networks] == LOCAL
    way.close()

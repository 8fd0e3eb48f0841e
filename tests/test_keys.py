"""API keys: shown once, stored as a digest, refused by checksum, date and revocation."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest
from tests import rows

from mediamill import db, installation, keys
from mediamill.keys import SCOPES, Caller, Keychain

pytestmark = pytest.mark.anyio
PEPPER = b"p" * 32


@pytest.fixture(scope="module")
def dsn(server: str, template: str) -> Iterator[str]:
    with rows.fresh_database(server, template) as made:
        yield made


@pytest.fixture
async def pool(dsn: str) -> AsyncIterator[db.Pool]:
    async with rows.pooled(dsn) as made:
        yield made


@pytest.fixture
async def tenant(pool: db.Pool) -> str:
    async with db.acquire(pool) as connection:
        return await rows.new_tenant(connection)


async def create(pool: db.Pool, tenant: str, **more: object) -> str:
    async with db.acquire(pool) as connection:
        return await keys.create(
            connection,
            PEPPER,
            tenant_id=tenant,
            name="test",
            **more,  # type: ignore[arg-type]
        )


async def test_a_key_names_its_tenant_and_scopes(pool: db.Pool, tenant: str) -> None:
    token = await create(pool, tenant, scopes=["media:read", "jobs:read"])
    assert re.fullmatch(r"mpk_live_[0-9A-Za-z]{8}_[0-9A-Za-z]{49}", token)
    found = await Keychain(pool, PEPPER).identify(token)
    assert found == Caller(tenant, token.split("_")[2], frozenset({"media:read", "jobs:read"}))
    assert found.may("media:read")
    assert not found.may("media:delete")
    async with db.acquire(pool) as connection:
        assert await keys.belongs(connection, PEPPER, token)
        assert not await keys.belongs(connection, b"another" * 5, token)


async def test_admin_may_do_everything_within_its_tenant(pool: db.Pool, tenant: str) -> None:
    found = await Keychain(pool, PEPPER).identify(await create(pool, tenant))
    assert found is not None
    assert all(found.may(scope) for scope in SCOPES if scope != "operate")
    assert not found.may("operate")


async def test_the_secret_is_stored_nowhere(pool: db.Pool, tenant: str) -> None:
    token = await create(pool, tenant)
    secret = token.split("_")[3][:43]
    async with db.acquire(pool) as connection:
        row = await connection.fetchrow("SELECT * FROM api_keys WHERE tenant_id = $1", tenant)
        assert row is not None
        assert secret not in str(dict(row))
        assert secret.encode() not in row["digest"]
        assert row["last4"] == secret[-4:]
        (listed,) = await keys.list_of(connection, tenant)
        assert "digest" not in dict(listed)
        assert listed["name"] == "test"


async def test_a_typo_is_refused_without_asking_the_database(pool: db.Pool, tenant: str) -> None:
    token = await create(pool, tenant)
    chain = Keychain(pool, PEPPER)
    await pool.close()  # whoever asks now fails
    for position in range(len("mpk_live_"), len(token)):
        other = "1" if token[position] != "1" else "2"
        assert await chain.identify(token[:position] + other + token[position + 1 :]) is None
    for text in ("", "mpk_live_", "mpk_test_" + token[9:], token + "0", token[:-1], token.lower()):
        assert await chain.identify(text) is None
    for text in (token.replace("live", "liv\u00e9"), token[:-1] + "\u0660", "\0" * 67):
        assert await chain.identify(text) is None


async def test_an_unknown_key_with_a_right_checksum_is_refused(pool: db.Pool) -> None:
    made = "A" * 8 + "B" * 43
    token = f"mpk_live_{made[:8]}_{made[8:]}{keys._checksum(made)}"
    assert await Keychain(pool, PEPPER).identify(token) is None


async def test_the_right_id_with_another_secret_is_refused(pool: db.Pool, tenant: str) -> None:
    key_id = (await create(pool, tenant)).split("_")[2]
    made = key_id + "C" * 43
    token = f"mpk_live_{key_id}_{made[8:]}{keys._checksum(made)}"
    assert await Keychain(pool, PEPPER).identify(token) is None


async def test_a_remembered_secret_opens_no_other_id(pool: db.Pool, tenant: str) -> None:
    chain = Keychain(pool, PEPPER)
    token = await create(pool, tenant)
    assert await chain.identify(token)
    made = "Z" * 8 + token.split("_")[3][:43]
    assert await chain.identify(f"mpk_live_{made[:8]}_{made[8:]}{keys._checksum(made)}") is None


async def test_a_key_ends_by_date_and_by_revocation(pool: db.Pool, tenant: str) -> None:
    chain = Keychain(pool, PEPPER)
    assert await chain.identify(await create(pool, tenant, ttl_seconds=-1.0)) is None
    assert await chain.identify(await create(pool, tenant, ttl_seconds=60.0)) is not None
    token = await create(pool, tenant)
    async with db.acquire(pool) as connection:
        assert await keys.revoke(connection, tenant, token.split("_")[2])
        assert not await keys.revoke(connection, tenant, token.split("_")[2])
    assert await chain.identify(token) is None


async def test_only_its_own_tenant_can_revoke_a_key(pool: db.Pool, tenant: str) -> None:
    token = await create(pool, tenant)
    async with db.acquire(pool) as connection:
        other = await rows.new_tenant(connection)
        assert not await keys.revoke(connection, other, token.split("_")[2])
    assert await Keychain(pool, PEPPER).identify(token) is not None


async def test_an_answer_is_remembered_for_a_moment_only(
    pool: db.Pool, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Keychain(pool, PEPPER)
    token = await create(pool, tenant)
    assert await chain.identify(token) is not None
    async with db.acquire(pool) as connection:
        await keys.revoke(connection, tenant, token.split("_")[2])
    assert await chain.identify(token) is not None  # within the seconds that are promised
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + keys._REMEMBER_SECONDS + 0.1)
    assert await chain.identify(token) is None


async def test_the_last_use_is_kept_coarsely(pool: db.Pool, tenant: str) -> None:
    token = await create(pool, tenant)

    async def used() -> object:
        async with db.acquire(pool) as connection:
            return (await keys.list_of(connection, tenant))[0]["last_used_at"]

    assert await used() is None
    await Keychain(pool, PEPPER).identify(token)
    first = await used()
    assert first is not None
    await Keychain(pool, PEPPER).identify(token)
    assert await used() == first


async def test_unknown_scopes_and_bad_tenants_are_refused(pool: db.Pool, tenant: str) -> None:
    with pytest.raises(ValueError, match="media:reed"):
        await create(pool, tenant, scopes=["media:reed"])
    for bad in ("", "Upper", "a/b", "a_b", "-a", "x" * 64):
        with pytest.raises(asyncpg.CheckViolationError):
            await create(pool, bad)


async def test_an_installation_is_made_once_by_many_at_once(database: str) -> None:
    async with rows.pooled(database, size=6) as pool:

        async def identify() -> installation.Installation:
            async with db.acquire(pool) as connection:
                return await installation.identify(connection)

        found = await rows.all_done(*(identify() for _ in range(6)))
        assert len({f.id for f in found}) == 1
        assert len({f.pepper for f in found}) == 1
        assert {f.keyring.newest for f in found} == {1}

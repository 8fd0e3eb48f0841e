"""/v1/keys: roles, what a key may give, and its end."""

from __future__ import annotations

import pytest
from tests.api.conftest import Api, check_problem

from mediamill import keys

pytestmark = pytest.mark.anyio


async def test_a_key_is_made_shown_once_used_and_revoked(api: Api) -> None:
    answer = await api.client.post("/v1/keys", json={"name": "phone", "role": "viewer"})
    assert answer.status_code == 201
    assert answer.headers["cache-control"] == "no-store"
    made = answer.json()
    assert (made["name"], made["role"]) == ("phone", "viewer")
    async with api.stranger(made["api_key"]) as viewer:
        assert (await viewer.get("/v1/jobs")).status_code == 200
        check_problem(await viewer.post("/v1/media", json={"size": 1}), 403, "missing_scope")
        mine = (await viewer.get("/v1/keys/self")).json()
        assert (mine["id"], mine["tenant"], mine["role"]) == (made["id"], api.tenant, "viewer")
        assert set(mine["may"]) == set(keys.ROLES["viewer"])
        listed = await api.client.get("/v1/keys")
        assert made["api_key"] not in listed.text
        assert made["id"] in [k["id"] for k in listed.json()["data"]]
        assert (await api.client.delete(f"/v1/keys/{made['id']}")).status_code == 204
        check_problem(await viewer.get("/v1/jobs"), 401, "unauthenticated")  # at once, here
    assert (await api.client.delete(f"/v1/keys/{made['id']}")).status_code == 204
    revoked = next(
        k for k in (await api.client.get("/v1/keys")).json()["data"] if k["id"] == made["id"]
    )
    assert revoked["revoked_at"] is not None


async def test_a_key_gives_no_more_than_it_has(api: Api) -> None:
    token = await api.new_key(api.tenant, "admin")
    async with api.stranger(token) as admin:
        problem = check_problem(
            await admin.post(
                "/v1/keys", json={"name": "x", "role": "admin", "scopes": ["operate"]}
            ),
            403,
            "missing_scope",
        )
        assert "operate" in problem["detail"]
    both = await api.new_key(api.tenant, "admin", "operate")
    async with api.stranger(both) as owner:
        answer = await owner.post(
            "/v1/keys", json={"name": "x", "role": "operator", "scopes": ["operate"]}
        )
        assert set(answer.json()["scopes"]) == {*keys.ROLES["operator"], "operate"}
        assert answer.json()["role"] == "operator"


async def test_what_a_key_cannot_be_is_told(api: Api) -> None:
    for body, pointer in (
        ({"name": "x"}, ""),
        ({"name": "", "role": "viewer"}, "/name"),
        ({"name": "x", "role": "king"}, "/role"),
        ({"name": "x", "scopes": ["everything"]}, "/scopes/0"),
        ({"name": "x", "role": "viewer", "ttl_seconds": 0}, "/ttl_seconds"),
    ):
        problem = check_problem(
            await api.client.post("/v1/keys", json=body), 422, "invalid_request"
        )
        assert [e["pointer"] for e in problem["errors"]] == [pointer]


async def test_nobody_locks_himself_out_or_revokes_for_others(api: Api) -> None:
    mine = (await api.client.get("/v1/keys/self")).json()["id"]
    check_problem(await api.client.delete(f"/v1/keys/{mine}"), 409, "wrong_state")
    check_problem(await api.client.delete("/v1/keys/unheard0"), 404, "not_found")
    stranger = await api.new_key("another-tenant", "admin")
    async with api.stranger(stranger) as other:
        check_problem(await other.delete(f"/v1/keys/{mine}"), 404, "not_found")


def test_every_role_may_do_what_the_lower_ones_may() -> None:
    assert [keys.role_of(keys.ROLES[role]) for role in keys.ROLES] == list(keys.ROLES)
    assert keys.role_of(["media:read"]) is None
    assert keys.role_of(["admin", "operate"]) == "admin"
    assert keys.role_of([*keys.ROLES["viewer"], "operate"]) == "viewer"

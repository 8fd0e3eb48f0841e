"""/v1/keys: who may do what, and what the key that asks may do itself."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from mediamill import db, keys
from mediamill.api.services import (
    caller,
    iso_time,
    json_body,
    json_response,
    known_parameters,
    parse_body,
    path_word,
    plain_text,
    services,
)
from mediamill.failures import Code, Refused

SCHEMA_VERSION: Final = 1
Role = Literal["viewer", "operator", "admin"]


def _scope(value: str) -> str:
    if value not in keys.SCOPES:
        raise PydanticCustomError("scope", "must be a scope: " + ", ".join(keys.SCOPES))
    return value


class NewKey(BaseModel):
    """A key by its role, its scopes, or both: it may then do what either of them allows."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=100), AfterValidator(plain_text)]
    role: Role | None = None
    scopes: list[Annotated[str, AfterValidator(_scope)]] = Field(
        default_factory=list, max_length=len(keys.SCOPES)
    )
    ttl_seconds: float | None = Field(
        default=None, gt=0, le=10 * 365 * 86400, description="Refused after so long."
    )

    @model_validator(mode="after")
    def _allows_something(self) -> NewKey:
        if self.role is None and not self.scopes:
            raise PydanticCustomError("scopes", "give a role or scopes")
        return self

    @property
    def wanted(self) -> frozenset[str]:
        return frozenset(self.scopes).union(keys.ROLES[self.role] if self.role else ())


class KeyBody(BaseModel):
    """A key as the API shows it: without what it is made of."""

    schema_version: Literal[1]
    id: str
    name: str
    last4: str
    scopes: list[str]
    role: Role | None = Field(description="The highest one of which it may do everything.")
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class NewKeyBody(KeyBody):
    api_key: str = Field(description="Shown here only.")


class KeysBody(BaseModel):
    """The oldest first."""

    schema_version: Literal[1]
    data: list[KeyBody]


class SelfBody(BaseModel):
    """The key that asks: `may` holds every scope that it has or that is implied."""

    schema_version: Literal[1]
    id: str
    tenant: str
    role: Role | None
    may: list[str]


async def create_key(request: Request) -> Response:
    """Make a key for this tenant. It may do no more than the key that asks.

    An `Idempotency-Key` has no effect here: an answer that is kept would hold the key.
    """
    sender = await caller(request, "admin")
    known_parameters(request)
    here = services(request)
    wanted = parse_body(NewKey, await json_body(request))
    for scope in sorted(wanted.wanted):
        if not sender.may(scope):
            raise Refused(Code.MISSING_SCOPE, f"To give {scope}, a key needs {scope} itself.")
    async with db.transaction(here.pool) as connection:
        token = await keys.create(
            connection,
            here.installation.pepper,
            tenant_id=sender.tenant_id,
            name=wanted.name,
            scopes=sorted(wanted.wanted),
            ttl_seconds=wanted.ttl_seconds,
        )
        row = await keys.get(connection, sender.tenant_id, keys.id_of(token))
        assert row is not None
    body = _shown(row) | {"api_key": token}
    headers = {"Location": f"/v1/keys/{row['id']}", "Cache-Control": "no-store"}
    return json_response(body, 201, headers)


async def list_keys(request: Request) -> Response:
    """Every key of this tenant, the oldest first, also those that are revoked."""
    sender = await caller(request, "admin")
    known_parameters(request)
    async with db.acquire(services(request).pool) as connection:
        rows = await keys.list_of(connection, sender.tenant_id)
    body = {"schema_version": SCHEMA_VERSION, "data": [_shown(row) for row in rows]}
    return json_response(body, 200, {"Cache-Control": "private, no-store"})


async def revoke_key(request: Request) -> Response:
    """Refuse a key from now on; other processes follow within seconds."""
    sender = await caller(request, "admin")
    known_parameters(request)
    here = services(request)
    key_id = path_word(request, "key_id")
    if key_id == sender.key_id:
        raise Refused(Code.WRONG_STATE, "It is the key that asks. Revoke it with another one.")
    async with db.transaction(here.pool) as connection:
        row = await keys.get(connection, sender.tenant_id, key_id)
        if row is None:
            raise Refused(Code.NOT_FOUND)
        await keys.revoke(connection, sender.tenant_id, key_id)
    here.keychain.forget(key_id)
    return Response(status_code=204)


async def read_self(request: Request) -> Response:
    """What the key that asks may do. Any key may ask."""
    sender = await caller(request, None)
    known_parameters(request)
    body = {
        "schema_version": SCHEMA_VERSION,
        "id": sender.key_id,
        "tenant": sender.tenant_id,
        "role": keys.role_of(sender.scopes),
        "may": [scope for scope in keys.SCOPES if sender.may(scope)],
    }
    return json_response(body, 200, {"Cache-Control": "private, no-store"})


def _shown(row: db.Row) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "id": row["id"],
        "name": row["name"],
        "last4": row["last4"],
        "scopes": row["scopes"],
        "role": keys.role_of(row["scopes"]),
        "created_at": iso_time(row["created_at"]),
        "expires_at": iso_time(row["expires_at"]),
        "revoked_at": iso_time(row["revoked_at"]),
        "last_used_at": iso_time(row["last_used_at"]),
    }

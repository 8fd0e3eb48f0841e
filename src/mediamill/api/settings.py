"""/v1/settings and /v1/storage-checks: how this installation is set up, for its operator."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from mediamill import config
from mediamill.api.services import caller, json_response, known_parameters, services
from mediamill.failures import Code, Refused
from mediamill.storage import StorageRefused
from mediamill.storage.choice import inspect

SCHEMA_VERSION: Final = 1
_PRIVATE: Final = {"Cache-Control": "private, no-store"}


class Setting(BaseModel):
    """One setting as it holds."""

    name: str
    value: Any = Field(description="Secrets read `***`.")
    is_default: bool
    origin: str = Field(description="Its variable, the operator's file, or `default`.")


class SettingsBody(BaseModel):
    """The settings of the API process that answers."""

    schema_version: Literal[1]
    data: list[Setting]


class Check(BaseModel):
    """`ok` null is a note that is no fault. `remedy` says what to do."""

    name: str
    ok: bool | None
    detail: str
    remedy: str


class ChecksBody(BaseModel):
    """What the storage enforces, and what it does not."""

    schema_version: Literal[1]
    storage: str
    data: list[Check]


async def list_settings(request: Request) -> Response:
    """The settings as they hold, each with where it comes from. Secrets are not shown."""
    await caller(request, "operate")
    known_parameters(request)
    settings = services(request).settings
    origins, defaults, held = config.origins(), config.defaults(), settings.model_dump(mode="json")
    data = [
        {
            "name": name,
            "value": value,
            "is_default": held[name] == defaults.get(name),
            "origin": origins[name],
        }
        for name, value in config.shown(settings).items()
    ]
    return json_response({"schema_version": SCHEMA_VERSION, "data": data}, 200, _PRIVATE)


async def check_storage(request: Request) -> Response:
    """Find out what the storage really enforces, by trying with objects that it removes."""
    await caller(request, "operate")
    known_parameters(request)
    settings = services(request).settings
    try:
        data = [
            {"name": f.name, "ok": f.ok, "detail": f.detail, "remedy": f.remedy}
            async for f in inspect(settings, settings.base_url)
        ]
    except StorageRefused as error:
        raise Refused(Code.STORAGE_UNAVAILABLE, str(error)) from None
    body = {"schema_version": SCHEMA_VERSION, "storage": settings.storage, "data": data}
    return json_response(body, 200, _PRIVATE)

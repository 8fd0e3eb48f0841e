"""What the OpenAPI document says beside the routes: how to show a key, and the webhooks."""

from __future__ import annotations

from typing import Any, Final, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field

from mediamill import events

_WITHOUT_KEY: Final = frozenset({"/v1/inbox"})


class EventData(BaseModel):
    """What an event says. Beyond the first three, what there is depends on its type."""

    media_id: str | None
    job_id: str | None
    sequence: int = Field(description="Grows with each event of one media or job.")
    state: str | None = None
    reason: str | None = None
    endpoint: str | None = None
    error: dict[str, Any] | None = None
    preview: dict[str, Any] | None = None
    variants: list[dict[str, Any]] | None = None
    progress: float | None = None
    truncated: bool | None = Field(default=None, description="It was too large to be told in full.")


class Event(BaseModel):
    """An event, as webhooks and streams tell it."""

    type: str
    timestamp: str
    schema_version: Literal[1]
    id: str = Field(description="The same on every repeat: skip what you have seen.")
    data: EventData


def describe(app: FastAPI) -> dict[str, Any]:
    """The document, made once. It is what /openapi.json serves."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            summary=app.summary,
            openapi_version="3.1.0",
            routes=app.routes,
        )
        components = document.setdefault("components", {})
        models = Event.model_json_schema(ref_template="#/components/schemas/{model}")
        nested = models.pop("$defs")
        components.setdefault("schemas", {}).update({"Event": models, **nested})
        components["securitySchemes"] = {
            "key": {
                "type": "http",
                "scheme": "bearer",
                "description": "An API key, from `mediamill keys create`.",
            }
        }
        document["security"] = [{"key": []}]
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                if path in _WITHOUT_KEY and method == "post":
                    operation["security"] = []
        document["webhooks"] = {name: _webhook(name, says) for name, says in events.TYPES.items()}
        app.openapi_schema = document
    return app.openapi_schema


def _webhook(name: str, says: str) -> dict[str, Any]:
    headers = {
        "webhook-id": "The event's id, the same on every repeat.",
        "webhook-timestamp": "When this attempt was made, in Unix seconds.",
        "webhook-signature": "One signature for each secret that is valid now.",
    }
    return {
        "post": {
            "summary": says,
            "security": [],
            "parameters": [
                {
                    "name": header,
                    "in": "header",
                    "required": True,
                    "description": text,
                    "schema": {"type": "string"},
                }
                for header, text in headers.items()
            ],
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {
                        "schema": {
                            "allOf": [
                                {"$ref": "#/components/schemas/Event"},
                                {"type": "object", "properties": {"type": {"const": name}}},
                            ]
                        }
                    }
                },
            },
            "responses": {
                "2XX": {"description": "It has arrived."},
                "410": {"description": "Nobody wants it here any more: the endpoint is disabled."},
            },
        }
    }

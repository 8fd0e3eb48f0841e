"""The OpenAPI document is valid, and says what the API does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route
from tests.api.conftest import Api

from mediamill import db, ids, installation, webhooks
from mediamill.api.media import FILTERS, MediaBody, NewMedia, NewMediaUpTo, Process
from mediamill.sealing import Vault

pytestmark = pytest.mark.anyio

# What is spoken here is tus, whose own document describes it.
TUS = {"/v1/uploads", "/v1/uploads/", "/v1/uploads/{upload_id:upload}"}


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def schemas(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "schema":
                yield value
            yield from schemas(value)
    elif isinstance(node, list):
        for value in node:
            yield from schemas(value)


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "$ref":
                yield value
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


async def test_it_is_served_and_has_the_shape_of_3_1(api: Api) -> None:
    answer = await api.client.get("/openapi.json")
    assert answer.status_code == 200
    document = answer.json()
    assert re.fullmatch(r"3\.1\.\d+", document["openapi"])
    assert set(document) <= {
        "openapi",
        "info",
        "servers",
        "paths",
        "webhooks",
        "components",
        "security",
        "tags",
        "externalDocs",
        "jsonSchemaDialect",
    }
    assert document["info"]["title"]
    assert document["info"]["version"]
    for path, method, operation in operations(document):
        assert path.startswith("/")
        assert method in ("get", "put", "post", "delete", "patch", "head", "options")
        assert operation["responses"], (method, path)
        for status, response in operation["responses"].items():
            assert re.fullmatch(r"[1-5]\d\d|default", status)
            assert response["description"]
        for parameter in operation.get("parameters", ()):
            assert parameter["in"] in ("path", "query", "header", "cookie")
            assert ("schema" in parameter) != ("content" in parameter)


async def test_every_schema_in_it_is_one(api: Api) -> None:
    document = api.app.openapi()
    found = [*schemas(document), *document["components"]["schemas"].values()]
    assert len(found) > 10
    for schema in found:
        Draft202012Validator.check_schema(schema)
    for reference in references(document):
        node: Any = document
        assert reference.startswith("#/")
        for part in reference[2:].split("/"):
            node = node[part]


async def test_every_path_parameter_is_declared(api: Api) -> None:
    for path, method, operation in operations(api.app.openapi()):
        declared = [p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"]
        assert sorted(declared) == sorted(re.findall(r"{(\w+)}", path)), (method, path)
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "path":
                assert parameter["required"] is True


async def test_every_route_of_v1_is_documented_once(api: Api) -> None:
    document = api.app.openapi()
    documented = {(method.upper(), path) for path, method, _ in operations(document)}
    served = {
        (method, route.path.replace(":path}", "}"))
        for route in api.app.routes
        if isinstance(route, Route) and route.path.startswith("/v1/")
        for method in route.methods or ()
        if method != "HEAD" and route.path not in TUS
    }
    assert documented == served
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(names)) == len(names)
    for path, method, operation in operations(document):
        assert operation["description"].strip(), (method, path)
        assert operation["tags"], (method, path)


async def test_the_query_of_the_list_is_declared(api: Api) -> None:
    operation = api.app.openapi()["paths"]["/v1/media"]["get"]
    declared = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"}
    assert declared == {"limit", "cursor", *FILTERS}


async def test_the_bodies_that_it_shows_are_those_that_are_taken(api: Api) -> None:
    paths = api.app.openapi()["paths"]
    create = paths["/v1/media"]["post"]["requestBody"]["content"]
    assert set(create) == {"application/json", "multipart/form-data"}
    schema = create["application/json"]["schema"]
    assert set(schema["properties"]) == set(NewMedia.model_fields) | set(NewMediaUpTo.model_fields)
    validator = Draft202012Validator(schema)
    assert validator.is_valid({"size": 5, "filename": "a", "metadata": {"a": 1}})
    assert not validator.is_valid({"size": 5, "nonsense": 1})
    assert validator.is_valid({"max_size": 5})
    assert not validator.is_valid({"max_size": 5, "size": 5})
    assert not validator.is_valid({})
    process = paths["/v1/media/{media_id}/process"]["post"]["requestBody"]["content"]
    schema = process["application/json"]["schema"]
    assert set(schema["properties"]) == set(Process.model_fields)


async def test_a_real_answer_fits_its_schema(api: Api) -> None:
    document = api.app.openapi()
    schema = {
        "$ref": "#/components/schemas/MediaBody",
        "components": document["components"],
    }
    validator = Draft202012Validator(schema)
    for body in (await api.ready(), await api.queued()):
        assert [error.message for error in validator.iter_errors(body)] == []
        assert set(body) == set(MediaBody.model_fields)


async def test_every_response_of_success_is_the_one_that_is_given(api: Api) -> None:
    document = api.app.openapi()
    ready = await api.ready()
    async with db.transaction(api.pool) as connection:
        wanted = webhooks.Wanted("http://127.0.0.1:9/")
        row, _ = await webhooks.add(
            connection, api.tenant, wanted, origin="-", most=10, vault=Vault()
        )
        delivery_id = await webhooks.test(connection, row)
    opened = await api.client.post("/v1/uploads/multipart", json={"size": 5})
    known = {
        "upload_id": opened.json()["id"],
        "media_id": ready["id"],
        "job_id": ready["job"]["id"],
        "endpoint_id": ids.encode(ids.ENDPOINT, row["id"]),
        "delivery_id": ids.encode(ids.DELIVERY, delivery_id),
    }
    for path, method, operation in operations(document):
        if "{" not in path or method != "get":
            continue
        name = "web" if "/recipes/" in path else "w8.webp"
        address = path.format(**known, name=name)
        answer = await api.client.get(address)
        assert str(answer.status_code) in operation["responses"], path
        assert answer.status_code < 400
        _fits(document, operation, answer)


async def test_every_list_fits_its_schema(api: Api) -> None:
    """With something in it, and nothing that the schema does not name."""
    document = api.app.openapi()
    await api.ready()
    async with db.transaction(api.pool) as connection:
        wanted = webhooks.Wanted("http://127.0.0.1:9/")
        await webhooks.add(connection, api.tenant, wanted, origin="-", most=10, vault=Vault())
        await installation.register_worker(
            connection, installation.worker_id(), version="1", slots={"image": 1}, sandbox="strong"
        )
    token = await api.new_key(api.tenant, "admin", "operate")
    checked = set()
    async with api.stranger(token) as client:
        for path, method, operation in operations(document):
            if "{" in path or method != "get" or path in ("/v1/inbox", "/v1/events"):
                continue
            answer = await client.get(path)
            assert answer.status_code == 200, path
            _fits(document, operation, answer)
            checked.add(path)
    assert {"/v1/jobs", "/v1/media", "/v1/queues", "/v1/keys", "/v1/workers"} <= checked


def _fits(document: dict[str, Any], operation: dict[str, Any], answer: Any) -> None:
    response = operation["responses"].get(str(answer.status_code), {})
    schema = response.get("content", {}).get("application/json", {}).get("schema")
    if schema:
        closed = {
            name: {"additionalProperties": False, **part} if "properties" in part else part
            for name, part in document["components"]["schemas"].items()
        }
        whole = {**schema, "components": {"schemas": closed}}
        faults = [e.message for e in Draft202012Validator(whole).iter_errors(answer.json())]
        assert faults == []

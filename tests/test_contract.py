"""The HTTP API may grow and may not break: the document of the last release is kept here."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.contract import breaking

from mediamill import events, listen, reference
from mediamill.states import MediaState

GOLDEN = Path(__file__).parent / "golden"
RELEASED = GOLDEN / "openapi-v1.json"
Document = dict[str, Any]


@pytest.fixture(scope="module")
def current() -> Document:
    return reference.openapi()


def test_nothing_breaks_against_the_last_release(current: Document) -> None:
    assert breaking(json.loads(RELEASED.read_text()), current) == []


def test_the_committed_document_is_the_one_that_is_served(current: Document) -> None:
    path = Path(__file__).parent.parent / "docs/reference/openapi.json"
    assert json.loads(path.read_text()) == current, "run `make docs`"


def body(document: Document, path: str) -> Any:
    return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def parts(document: Document) -> Any:
    return document["components"]["schemas"]


BREAKS: dict[str, Callable[[Document], Any]] = {
    "DELETE /v1/media/{media_id} is gone": lambda d: d["paths"]["/v1/media/{media_id}"].pop(
        "delete"
    ),
    "the parameter cursor is gone": lambda d: d["paths"]["/v1/media"]["get"]["parameters"].pop(1),
    "/size: the type": lambda d: body(d, "/v1/media")["properties"]["size"].update(type="string"),
    "filename is gone": lambda d: body(d, "/v1/media")["properties"].pop("filename"),
    "recipe has become required": lambda d: body(d, "/v1/media")["required"].append("recipe"),
    "/recipe: maxLength has become 5": lambda d: body(d, "/v1/media")["properties"][
        "recipe"
    ].update(maxLength=5),
    "progress is gone": lambda d: parts(d)["MediaBody"]["properties"].pop("progress"),
    "may be ['paused'] now": lambda d: parts(d)["MediaState"]["enum"].append("paused"),
    "the webhook media.ready is gone": lambda d: d["webhooks"].pop("media.ready"),
    "Event: id is gone": lambda d: parts(d)["Event"]["properties"].pop("id"),
    "the parameter limit has become required": lambda d: d["paths"]["/v1/jobs"]["get"][
        "parameters"
    ][0].update(required=True),
}


@pytest.mark.parametrize("said", BREAKS)
def test_a_break_is_seen(current: Document, said: str) -> None:
    changed = copy.deepcopy(current)
    BREAKS[said](changed)
    assert any(said in one for one in breaking(current, changed)), breaking(current, changed)


def test_growing_is_no_break(current: Document) -> None:
    grown = copy.deepcopy(current)
    grown["paths"]["/v1/new"] = {"get": {"responses": {}}}
    grown["webhooks"]["media.new"] = {}
    body(grown, "/v1/media")["properties"]["colour"] = {"type": "string"}
    parts(grown)["MediaBody"]["properties"]["colour"] = {"type": "string"}
    assert breaking(current, grown) == []


def test_the_document_says_how_to_show_a_key_and_what_is_told(current: Document) -> None:
    assert current["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert current["security"] == [{"key": []}]
    assert set(current["webhooks"]) == set(events.TYPES)
    assert set(parts(current)["MediaState"]["enum"]) == set(MediaState)


EVENTS = sorted(GOLDEN.glob("event-v*.json"))


@pytest.mark.parametrize("file", EVENTS, ids=lambda f: f.stem)
def test_every_version_of_an_event_is_told_as_ever(file: Path) -> None:
    """Golden files of each version stay for ever: an endpoint has its version pinned."""
    for case in json.loads(file.read_text()):
        version = int(file.stem.removeprefix("event-v"))
        assert version in events.PAYLOAD_VERSIONS
        assert events.shown(stored(case["stored"]), version=version) == case["told"]
        assert events.shown(stored(case["stored"]), version=version, thin=True) == case["thin"]


def test_every_version_has_its_golden_file() -> None:
    assert [f.stem for f in EVENTS] == [f"event-v{v}" for v in events.PAYLOAD_VERSIONS]


def stored(row: dict[str, Any]) -> Any:
    """A row of the log as the database gives it."""
    from datetime import datetime
    from uuid import UUID

    given = dict(row)
    given["at"] = datetime.fromisoformat(row["at"])
    for name in ("event_id", "media_id", "job_id"):
        given[name] = row[name] and UUID(row[name])
    return given


def test_a_sample_has_the_fields_of_a_real_event() -> None:
    """What `trigger` sends, against the events that are kept as examples."""
    newest = json.loads(EVENTS[-1].read_text())
    real = {e["told"]["type"]: e["told"]["data"] for e in newest}
    for type_ in events.TYPES:
        said = json.loads(listen.sample(type_))["data"]
        assert {"media_id", "job_id", "sequence"} <= set(said)
        if type_ in real:
            assert set(said) - {"reason"} == set(real[type_]) - {"reason"}, type_
            assert said.get("state") == real[type_].get("state"), type_

"""Recipes: data in a language with a schema."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from mediamill import recipes
from mediamill.recipes import Recipe

FILES = [
    file
    for file in resources.files("mediamill").joinpath("recipes").iterdir()
    if file.name.endswith(".json")
]
WEB = json.loads(next(f for f in FILES if f.name == "web.v1.json").read_text("utf-8"))


def changed(path: str, value: Any) -> dict[str, Any]:
    """The `web` recipe with one thing changed."""
    body: dict[str, Any] = json.loads(json.dumps(WEB))
    *parents, last = path.split(".")
    node: Any = body
    for part in parents:
        node = node[int(part)] if part.isdigit() else node[part]
    if isinstance(node, list):
        node[int(last)] = value
    else:
        node[last] = value
    return body


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(recipes.schema())


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_every_shipped_recipe_is_valid_by_the_schema_and_by_the_models(file: Any) -> None:
    body = json.loads(file.read_text("utf-8"))
    assert [e.message for e in Draft202012Validator(recipes.schema()).iter_errors(body)] == []
    recipe = Recipe.model_validate_json(file.read_text("utf-8"))
    assert recipes.find(recipe.name, recipe.version) == recipe


def test_the_newest_version_is_the_default_and_what_is_not_there_is_none() -> None:
    newest = max(version for name, version in recipes.built_in() if name == "web")
    found = recipes.find("web")
    assert found is not None
    assert found.version == newest
    assert recipes.find("web", newest + 1) is None
    assert recipes.find("unheard") is None
    assert recipes.find("") is None


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("name", "Web", "name"),
        ("name", "../web", "name"),
        ("name", "", "name"),
        ("version", 0, "version"),
        ("version", "1", "version"),
        ("schema_version", 2, "schema_version"),
        ("nonsense", 1, "nonsense"),
        ("image.widths", [], "image.widths"),
        ("image.widths.1", 0, "image.widths.1"),
        ("image.widths.1", 20000, "image.widths.1"),
        ("image.widths.1", 640.5, "image.widths.1"),
        ("image.formats.0.format", "bmp", "image.formats.0.format"),
        ("image.formats.1.quality", 101, "image.formats.1.quality"),
        ("image.formats.1.speed", 1, "image.formats.1.speed"),
        ("image.background", "white", "image.background"),
        ("video.0.type", "flv", "video.0"),
        ("video.0.crf", 99, "video.0.mp4.crf"),
        ("video.0.name", "a/b", "video.0.mp4.name"),
        ("video.1.short_side", 10, "video.1.poster.short_side"),
        ("audio.0.kbps", 1, "audio.0.kbps"),
    ],
)
def test_a_fault_is_refused_by_both_and_named_with_its_path(
    path: str, value: Any, fault: str
) -> None:
    body = changed(path, value)
    with pytest.raises(ValidationError) as caught:
        Recipe.model_validate_json(json.dumps(body))
    assert fault in {".".join(map(str, e["loc"])) for e in caught.value.errors()}
    assert not Draft202012Validator(recipes.schema()).is_valid(body)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("image.widths", [320, 320], "distinct"),
        ("image.formats", [{"format": "webp"}, {"format": "webp"}], "distinct"),
        ("video", [{"type": "mp4"}, {"type": "poster", "name": "video"}], "distinct"),
    ],
)
def test_outputs_must_not_collide(path: str, value: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Recipe.model_validate_json(json.dumps(changed(path, value)))


def test_a_recipe_wants_something() -> None:
    with pytest.raises(ValidationError, match="at least one kind"):
        Recipe.model_validate({"name": "empty", "version": 1})


def test_every_fault_is_told_at_once() -> None:
    body = changed("image.widths", [0, -1]) | {"version": 0, "more": 1}
    with pytest.raises(ValidationError) as caught:
        Recipe.model_validate_json(json.dumps(body))
    named = {".".join(map(str, e["loc"])) for e in caught.value.errors()}
    assert {"image.widths.0", "image.widths.1", "version", "more"} <= named


def test_recipes_cannot_be_changed() -> None:
    found = recipes.find("web")
    assert found is not None
    with pytest.raises(ValidationError, match="frozen"):
        setattr(found, "version", 9)  # noqa: B010  # mypy knows too

"""/v1/recipes: which recipes there are, and whether one that you wrote is valid."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from mediamill import recipes
from mediamill.api.services import caller, json_body, json_response, known_parameters, services
from mediamill.failures import Code, Refused
from mediamill.recipes import Recipe

SCHEMA_VERSION: Final = 1
_MAX_VERSION_DIGITS: Final = 9


class Fault(BaseModel):
    pointer: str
    code: str
    detail: str


class Verdict(BaseModel):
    """What `validate` answers. `recipe` is the recipe with every default written out."""

    schema_version: int
    valid: bool
    errors: list[Fault]
    recipe: dict[str, Any] | None


class RecipeBody(BaseModel):
    """One version of a recipe. `recipe` is its data, with every default written out."""

    schema_version: int
    name: str
    version: int
    built_in: bool
    versions: list[int]
    kinds: list[str]
    recipe: dict[str, Any]


async def list_recipes(request: Request) -> Response:
    """The newest version of every recipe, the built-in ones and the operator's."""
    await caller(request, "media:read")
    known_parameters(request)
    book = recipes.book(services(request).settings.recipes_dir)
    newest = {name: version for name, version in sorted(book)}  # noqa: C416  # the last one wins
    data = [_shown(request, book[item]) for item in newest.items()]
    return json_response({"schema_version": SCHEMA_VERSION, "data": data})


async def read_recipe(request: Request) -> Response:
    """A recipe by name, in the newest version or the one that `version` names."""
    await caller(request, "media:read")
    known_parameters(request, "version")
    asked = request.query_params.get("version")
    if asked is not None and not (
        asked.isascii() and asked.isdigit() and len(asked) <= _MAX_VERSION_DIGITS
    ):
        raise Refused(
            Code.UNKNOWN_PARAMETER,
            "version must be a number.",
            errors=[{"parameter": "version", "detail": "must be a number"}],
        )
    folder = services(request).settings.recipes_dir
    name = request.path_params["name"]
    found = recipes.find(name, None if asked is None else int(asked), folder=folder)
    if found is None:
        raise Refused(Code.NOT_FOUND)
    return json_response(_shown(request, found))


async def validate_recipe(request: Request) -> Response:
    """Check a recipe without keeping it: every fault at once, each with its JSON pointer."""
    await caller(request, "media:read")
    known_parameters(request)
    text = await json_body(request)
    recipe, faults = recipes.check(text, services(request).settings.recipes_dir)
    if any(fault["type"] == "json_invalid" for fault in faults):
        raise Refused(Code.MALFORMED_REQUEST, "The body is not JSON.")
    errors = [
        {"pointer": recipes.pointer(f["loc"]), "code": f["type"], "detail": f["msg"]}
        for f in faults
    ]
    body = {
        "schema_version": SCHEMA_VERSION,
        "valid": recipe is not None,
        "errors": errors,
        "recipe": recipe and recipe.model_dump(mode="json", exclude_none=True),
    }
    return json_response(body)


def _shown(request: Request, recipe: Recipe) -> dict[str, Any]:
    book = recipes.book(services(request).settings.recipes_dir)
    kinds = [kind for kind in ("image", "video", "audio") if getattr(recipe, kind) is not None]
    return {
        "schema_version": SCHEMA_VERSION,
        "name": recipe.name,
        "version": recipe.version,
        "built_in": (recipe.name, recipe.version) in recipes.built_in(),
        "versions": sorted(version for name, version in book if name == recipe.name),
        "kinds": kinds,
        "recipe": recipe.model_dump(mode="json", exclude_none=True),
    }

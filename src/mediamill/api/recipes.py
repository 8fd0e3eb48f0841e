"""/v1/recipes: which recipes there are, and whether one that you wrote is valid."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from mediamill import db, ids, media, recipes
from mediamill.api.services import (
    caller,
    json_body,
    json_response,
    known_parameters,
    parse_body,
    services,
)
from mediamill.estimates import Work
from mediamill.failures import Code, Refused
from mediamill.handlers.dry_run import Sample, plan
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


class RecipesBody(BaseModel):
    """The newest version of each."""

    schema_version: Literal[1]
    data: list[RecipeBody]


def _named_or_whole(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise PydanticCustomError("recipe", "must be the name of a recipe, or a recipe")
    return value


class DryRun(BaseModel):
    """A media that is here, and a recipe: by name, or as data that you are still writing."""

    model_config = ConfigDict(extra="forbid")

    media_id: str = Field(max_length=64)
    recipe: Annotated[str | dict[str, Any], BeforeValidator(_named_or_whole)] = Field(
        description="As `validate` takes it, if it is not a name."
    )
    version: int | None = Field(
        default=None, ge=1, description="Of a recipe that is named; default: the newest."
    )


class PlannedOutput(BaseModel):
    """What would be made. `most_bytes` is what its rate allows at most, null where nobody can
    tell."""

    name: str
    type: str
    width: int | None
    height: int | None
    most_bytes: int | None
    note: str | None


class TimeNeeded(BaseModel):
    p50_seconds: float | None
    p90_seconds: float | None
    basis: str


class DryRunBody(BaseModel):
    """What a recipe would make of a media, and how long the like of it has taken."""

    schema_version: Literal[1]
    media_id: str
    kind: str
    recipe: str
    version: int
    outputs: list[PlannedOutput]
    estimate: TimeNeeded


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


async def dry_run(request: Request) -> Response:
    """Plan what a recipe would make of a media, with an estimate. Nothing is made or kept."""
    sender = await caller(request, "media:read")
    known_parameters(request)
    here = services(request)
    wanted = parse_body(DryRun, await json_body(request))
    media_id = ids.decode(ids.MEDIA, wanted.media_id)
    recipe = _meant(wanted, here.settings.recipes_dir)
    async with db.acquire(here.pool) as connection:
        row = None if media_id is None else await media.get(connection, sender.tenant_id, media_id)
        if row is None or row["deleted_at"] is not None:
            raise _fault("/media_id", "is no media of yours")
        if row["kind"] is None or (row["kind"] != "audio" and row["width"] is None):
            raise Refused(Code.WRONG_STATE, "Its size is not known yet; take one that is ready.")
        sample = Sample(row["kind"], row["width"], row["height"], row["duration_seconds"])
        outputs = plan(recipe, sample)
        estimate = await here.forecaster.estimate(
            connection,
            kind=row["kind"],
            recipe=recipe.name,
            queue=row["kind"],
            ahead=0,
            work=Work.of(row),
        )
    if not outputs:
        raise _fault("/recipe", f"has no outputs for {row['kind']}")
    body = {
        "schema_version": SCHEMA_VERSION,
        "media_id": wanted.media_id,
        "kind": row["kind"],
        "recipe": recipe.name,
        "version": recipe.version,
        "outputs": [asdict(output) for output in outputs],
        "estimate": estimate.as_dict(),
    }
    return json_response(body)


def _meant(wanted: DryRun, folder: Path | None) -> Recipe:
    if not isinstance(wanted.recipe, str):
        written, faults = recipes.check(json.dumps(wanted.recipe).encode(), folder)
        if written is None:
            raise Refused(
                Code.INVALID_REQUEST,
                f"The recipe has {len(faults)} fault(s).",
                errors=[
                    {
                        "pointer": f"/recipe{recipes.pointer(f['loc'])}",
                        "code": f["type"],
                        "detail": f["msg"],
                    }
                    for f in faults
                ],
            )
        return written
    found = recipes.find(wanted.recipe, wanted.version, folder=folder)
    if found is None:
        raise _fault("/recipe", "is not known in this version" if wanted.version else "is unknown")
    return found


def _fault(pointer: str, detail: str) -> Refused:
    return Refused(
        Code.INVALID_REQUEST,
        f"{pointer[1:]} {detail}.",
        errors=[{"pointer": pointer, "detail": detail}],
    )


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

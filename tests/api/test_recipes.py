"""/v1/recipes: what there is, and what is wrong with one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.conftest import Api, make_api

pytestmark = pytest.mark.anyio

MINE = {
    "name": "shop",
    "version": 2,
    "image": {"widths": [320], "formats": [{"format": "webp", "target_quality": 0.95}]},
}


@pytest.fixture
async def shop(shared_database: str, tmp_path: Path) -> AsyncIterator[Api]:
    """An API whose operator has a recipe of their own."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "shop.v1.json").write_text(json.dumps({**MINE, "version": 1}))
    (folder / "shop.v2.json").write_text(json.dumps(MINE))
    tenants = {"other": {"max_bytes": 1}}
    async with make_api(
        shared_database, tmp_path, recipes_dir=folder, tenant_limits=tenants
    ) as made:
        yield made


async def test_every_recipe_is_listed_in_its_newest_version(shop: Api) -> None:
    answer = await shop.client.get("/v1/recipes")
    assert answer.status_code == 200
    found = {r["name"]: r for r in answer.json()["data"]}
    assert {"web", "avatar", "shop"} <= found.keys()
    assert (found["shop"]["version"], found["shop"]["versions"]) == (2, [1, 2])
    assert (found["shop"]["built_in"], found["web"]["built_in"]) == (False, True)
    assert found["web"]["kinds"] == ["image", "video", "audio"]
    assert found["shop"]["recipe"]["image"]["background"] == "#ffffff"


async def test_one_recipe_is_read_by_name_and_version(shop: Api) -> None:
    for query, version in (("", 2), ("?version=1", 1)):
        answer = await shop.client.get(f"/v1/recipes/shop{query}")
        assert (answer.status_code, answer.json()["version"]) == (200, version)
    for path, status in (
        ("/v1/recipes/nothing", 404),
        ("/v1/recipes/shop?version=9", 404),
        ("/v1/recipes/shop?version=x", 400),
        ("/v1/recipes/shop?versions=1", 400),
    ):
        assert (await shop.client.get(path)).status_code == status


async def validate(api: Api, body: Any) -> dict[str, Any]:
    answer = await api.client.post("/v1/recipes/validate", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_good_recipe_is_valid_and_shown_whole(api: Api) -> None:
    found = await validate(api, MINE)
    assert (found["valid"], found["errors"]) == (True, [])
    assert found["recipe"]["image"]["crop"] == "center"


async def test_every_fault_has_its_pointer(api: Api) -> None:
    image = {"widths": [0], "formats": [{"format": "webp", "quality": 900}], "tilt": 1}
    found = await validate(api, {"name": "shop", "version": 1, "image": image})
    assert found["valid"] is False
    assert found["recipe"] is None
    assert sorted(fault["pointer"] for fault in found["errors"]) == [
        "/image/formats/0/quality",
        "/image/tilt",
        "/image/widths/0",
    ]
    assert all(fault["detail"] and fault["code"] for fault in found["errors"])
    assert [fault["pointer"] for fault in (await validate(api, [1]))["errors"]] == [""]


async def test_what_is_no_json_is_refused(api: Api) -> None:
    answer = await api.client.post(
        "/v1/recipes/validate", content=b"{", headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed_request")


async def test_a_key_is_needed(api: Api) -> None:
    async with api.stranger() as stranger:
        for method, path in (
            ("GET", "/v1/recipes"),
            ("GET", "/v1/recipes/web"),
            ("POST", "/v1/recipes/validate"),
        ):
            assert (await stranger.request(method, path)).status_code == 401


async def test_an_upload_names_the_recipes_of_the_operator(shop: Api) -> None:
    body = await shop.slot(recipe="shop")
    assert (body["recipe"], body["recipe_version"]) == ("shop", 2)
    wanted = {"size": 5, "content_type": "image/png", "recipe": "shops"}
    answer = await shop.client.post("/v1/media", json=wanted)
    assert answer.status_code == 422
    assert "shop" in answer.json()["detail"]


async def test_a_recipe_lowers_the_size_that_is_taken(api: Api) -> None:
    for size, status in ((20_971_520, 201), (20_971_521, 413)):
        wanted = {"size": size, "content_type": "image/png", "recipe": "avatar"}
        answer = await api.client.post("/v1/media", json=wanted)
        assert answer.status_code == status, answer.text
    assert answer.json()["limit"]["allowed"] == 20_971_520


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("0.5,0.25", 201),
        (" 1 , 0 ", 201),
        (".5,1.0", 201),
        ("1.5,0", 422),
        ("0.5", 422),
        ("-0.1,0.5", 422),
        ("a,b", 422),
        (0.5, 422),
    ],
)
async def test_a_focal_point_is_two_fractions(api: Api, value: object, status: int) -> None:
    wanted = {"size": 5, "content_type": "image/png", "metadata": {"focal_point": value}}
    answer = await api.client.post("/v1/media", json=wanted)
    assert answer.status_code == status, answer.text
    if status == 422:
        assert answer.json()["errors"][0]["pointer"] == "/metadata/focal_point"

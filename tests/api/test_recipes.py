"""/v1/recipes: what there is, and what is wrong with one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.conftest import Api, make_api

from mediamill import db, ids

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


async def sample(api: Api, **facts: Any) -> str:
    """A media of which so much is known."""
    media_id: str = (await api.slot())["id"]
    columns = ", ".join(f"{name} = ${n}" for n, name in enumerate(facts, 2))
    async with db.acquire(api.pool) as connection:
        await connection.execute(
            f"UPDATE media SET {columns} WHERE id = $1",
            ids.decode(ids.MEDIA, media_id),
            *facts.values(),
        )
    return media_id


async def test_a_dry_run_says_what_would_be_made_of_a_media(shop: Api) -> None:
    picture = await sample(shop, kind="image", width=1000, height=500)
    answer = await shop.client.post(
        "/v1/recipes/dry-run", json={"media_id": picture, "recipe": "shop", "version": 1}
    )
    assert answer.status_code == 200
    body = answer.json()
    assert (body["recipe"], body["version"], body["kind"]) == ("shop", 1, "image")
    assert [(o["name"], o["width"], o["height"]) for o in body["outputs"]] == [
        ("w320.webp", 320, 160)
    ]
    assert body["outputs"][0]["note"] == "the smallest with likeness 0.95"
    assert body["estimate"]["basis"]

    film = await sample(shop, kind="video", width=1280, height=720, duration_seconds=10.0)
    recipe = {
        "name": "draft",
        "version": 1,
        "video": [{"type": "hls"}, {"type": "mp4", "short_side": 480}, {"type": "poster"}],
    }
    answer = await shop.client.post(
        "/v1/recipes/dry-run", json={"media_id": film, "recipe": recipe}
    )
    outputs = {o["name"]: o for o in answer.json()["outputs"]}
    assert list(outputs) == [
        "hls/360p",
        "hls/480p",
        "hls/720p",  # not 1080p: never enlarged
        "hls/audio",
        "video.mp4",
        "poster.jpg",
    ]
    assert (outputs["video.mp4"]["width"], outputs["video.mp4"]["height"]) == (852, 480)
    assert outputs["hls/720p"]["most_bytes"] == 2800 * 125 * 10


async def test_a_dry_run_without_a_sample_or_outputs_says_which(shop: Api) -> None:
    picture = await sample(shop, kind="image", width=10, height=10)
    sound = await sample(shop, kind="audio", duration_seconds=1.0)
    unknown = (await shop.slot())["id"]
    gone = ids.encode(ids.MEDIA, ids.new())
    for body, status, pointer in (
        ({"media_id": picture, "recipe": 5}, 422, "/recipe"),
        ({"media_id": picture, "recipe": {**MINE, "version": 0}}, 422, "/recipe/version"),
        ({"media_id": picture, "recipe": "nothing"}, 422, "/recipe"),
        ({"media_id": picture, "recipe": "web", "version": 99}, 422, "/recipe"),
        ({"media_id": sound, "recipe": "shop"}, 422, "/recipe"),
        ({"media_id": gone, "recipe": "web"}, 422, "/media_id"),
        ({"media_id": "nonsense", "recipe": "web"}, 422, "/media_id"),
        ({"media_id": unknown, "recipe": "web"}, 409, None),
    ):
        answer = await shop.client.post("/v1/recipes/dry-run", json=body)
        assert answer.status_code == status, body
        if pointer:
            assert [e["pointer"] for e in answer.json()["errors"]] == [pointer]

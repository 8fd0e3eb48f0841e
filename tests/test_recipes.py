"""The recipe language: what is taken, what is refused and where the fault is said to be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError
from tests.make_media import RED, flat, save

from mediamill import config, recipes
from mediamill.config import ConfigError, ImageLimits
from mediamill.handlers import grid
from mediamill.recipes import FocalPoint, Recipe

FOLDER = Path(recipes.__file__).parent
WEB = json.loads((FOLDER / "web.v1.json").read_text())


def of(wanted: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"name": "shop", "version": 1, "image": wanted, **more}).encode()


def pointers(text: bytes, folder: Path | None = None) -> list[str]:
    recipe, faults = recipes.check(text, folder)
    assert (recipe is None) == bool(faults)
    return [recipes.pointer(fault["loc"]) for fault in faults]


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


def test_shipped_recipes_hold_to_the_published_schema() -> None:
    schema = recipes.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    names = set()
    for file in FOLDER.glob("*.json"):
        jsonschema.validate(json.loads(file.read_text()), schema)
        names.add(file.name)
    assert {"web.v1.json", "avatar.v1.json"} <= names
    assert {f"{n}.v{v}.json" for n, v in recipes.built_in()} == names


def test_the_first_version_of_web_means_what_it_meant() -> None:
    web = recipes.find("web", 1)
    assert web is not None
    assert web.image is not None
    files = grid.plan(web.image, 1000, 667)
    assert [f.name for f in files] == [
        f"w{width}.{ending}" for width in (320, 640, 1000) for ending in ("avif", "webp", "jpg")
    ]
    wanted = files[0].wanted()
    assert (wanted["format"], wanted["quality"], wanted["effort"]) == ("avif", 50, 2)
    assert (wanted["width"], wanted["height"], wanted["fit"]) == (320, None, "inside")
    assert (wanted["sharpen"], wanted["watermark"], wanted["animation"]) == (0.0, None, False)
    assert files[2].wanted()["quality"] == 80


@pytest.mark.parametrize(
    ("wanted", "pointer"),
    [
        ({}, "/image"),
        ({"widths": [320]}, "/image"),
        ({"widths": [], "formats": [{"format": "webp"}]}, "/image"),
        ({"widths": [0], "formats": [{"format": "webp"}]}, "/image/widths/0"),
        ({"widths": [9, 9], "formats": [{"format": "webp"}]}, "/image/widths"),
        ({"widths": [9], "formats": [{"format": "jxl"}]}, "/image/formats/0/format"),
        ({"widths": [9], "formats": [{"format": "webp"}] * 2}, "/image/formats"),
        (
            {"widths": [9], "formats": [{"format": "webp", "quality": 80, "target_quality": 0.9}]},
            "/image/formats/0/target_quality",
        ),
        (
            {"widths": [9], "formats": [{"format": "png", "target_quality": 0.9}]},
            "/image/formats/0/target_quality",
        ),
        (
            {"widths": [9], "formats": [{"format": "jpeg", "lossless": True}]},
            "/image/formats/0/lossless",
        ),
        (
            {"widths": [9], "formats": [{"format": "avif", "progressive": True}]},
            "/image/formats/0/progressive",
        ),
        (
            {"widths": [9], "formats": [{"format": "webp", "a/b~c": 1}]},
            "/image/formats/0/a~1b~0c",
        ),
        ({"outputs": [{"name": "a"}]}, "/image/outputs"),
        (
            {"outputs": [{"name": "a", "fit": "cover", "width": 9}], "formats": []},
            "/image/outputs/0/fit",
        ),
        (
            {"outputs": [{"name": "A b"}], "formats": [{"format": "webp"}]},
            "/image/outputs/0/name",
        ),
        (
            {"outputs": [{"name": "a"}, {"name": "a"}], "formats": [{"format": "webp"}]},
            "/image/outputs",
        ),
        (
            {"outputs": [{"name": "w9"}], "widths": [9], "formats": [{"format": "webp"}]},
            "/image",
        ),
        (
            {"widths": [9], "formats": [{"format": "webp"}], "focal_point": {"x": 2, "y": 0}},
            "/image/focal_point/x",
        ),
        (
            {"widths": [9], "formats": [{"format": "webp"}], "background": "white"},
            "/image/background",
        ),
        (
            {"widths": [9], "formats": [{"format": "webp"}], "limits": {"max_pixels": 0}},
            "/image/limits/max_pixels",
        ),
        (
            {
                "widths": [9],
                "formats": [{"format": "webp"}],
                "watermark": {"image": "../../etc/passwd"},
            },
            "/image/watermark/image",
        ),
        (
            {"widths": [9], "formats": [{"format": "webp"}], "watermark": {"image": "no.png"}},
            "/image/watermark/image",
        ),
        (
            {"outputs": [{"name": f"n{n}"} for n in range(25)], "formats": [{"format": "webp"}]},
            "/image/outputs",
        ),
    ],
)
def test_a_fault_is_found_where_it_is(wanted: dict[str, Any], pointer: str, tmp_path: Path) -> None:
    found = pointers(of(wanted), tmp_path)
    assert pointer in found


def test_every_fault_is_found_at_once_and_none_is_made_up() -> None:
    text = json.dumps(
        {
            "name": "No",
            "version": 0,
            "image": {
                "widths": [0],
                "formats": [{"format": "gif"}],
                "watermark": {"image": "gone.png"},
            },
            "video": [{"type": "mp4", "crf": 1}, {"type": "poster", "quality": 101}],
            "extra": True,
        }
    ).encode()
    assert sorted(pointers(text)) == [
        "/extra",
        "/image/formats/0/format",
        "/image/watermark/image",
        "/image/widths/0",
        "/name",
        "/version",
        "/video/0/crf",
        "/video/1/quality",
    ]


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
        ("audio.0.kbps", 1, "audio.0.m4a.kbps"),
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


def test_recipes_cannot_be_changed() -> None:
    found = recipes.find("web")
    assert found is not None
    with pytest.raises(ValidationError, match="frozen"):
        setattr(found, "version", 9)  # noqa: B010  # mypy knows too


def test_what_is_no_json_is_no_recipe() -> None:
    recipe, faults = recipes.check(b"{")
    assert recipe is None
    assert [fault["type"] for fault in faults] == ["json_invalid"]


def test_an_output_takes_what_it_does_not_say_from_the_image_part() -> None:
    recipe = Recipe.model_validate_json(
        of(
            {
                "formats": [{"format": "webp"}],
                "background": "#112233",
                "sharpen": 1.5,
                "crop": "attention",
                "animation": "keep",
                "focal_point": {"x": 0.2, "y": 0.3},
                "outputs": [
                    {"name": "plain", "width": 10, "height": 10, "fit": "cover"},
                    {
                        "name": "own",
                        "width": 10,
                        "background": "#445566",
                        "sharpen": 0,
                        "crop": "center",
                        "animation": "first",
                        "focal_point": {"x": 0.9, "y": 0.9},
                        "formats": [{"format": "png"}],
                    },
                ],
            }
        )
    )
    assert recipe.image is not None
    plain, own = (f.wanted() for f in grid.plan(recipe.image, 100, 100))
    assert (plain["background"], plain["sharpen"], plain["crop"]) == ("#112233", 1.5, "attention")
    assert (plain["animation"], plain["focal_point"]) == (True, {"x": 0.2, "y": 0.3})
    assert (own["background"], own["sharpen"], own["crop"]) == ("#445566", 0, "center")
    assert (own["animation"], own["format"]) == (False, "png")
    assert own["focal_point"] == {"x": 0.9, "y": 0.9}
    told = grid.plan(recipe.image, 100, 100, focal_point=FocalPoint(x=0.0, y=1.0))
    assert {str(f.focal_point) for f in told} == {"x=0.0 y=1.0"}


# --- The operator's folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logo.png").write_bytes(save(flat((20, 10), RED), "PNG"))
    return tmp_path


GOOD = {
    "widths": [320],
    "formats": [{"format": "webp"}],
    "watermark": {"image": "logo.png", "opacity": 0.5},
}


def test_recipes_of_the_operator_stand_beside_the_built_in_ones(folder: Path) -> None:
    (folder / "shop.v1.json").write_bytes(of(GOOD))
    (folder / "shop.v2.json").write_bytes(of(GOOD, version=2))
    (folder / "notes.txt").write_text("not a recipe")
    found = recipes.find("shop", folder=folder)
    assert found is not None
    assert found.version == 2
    assert recipes.find("shop", 1, folder=folder) is not None
    assert recipes.find("web", folder=folder) == recipes.find("web")
    assert recipes.find("shop") is None
    assert recipes.find("shop", 3, folder=folder) is None


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("shop.v1.json", b"{", "shop.v1.json"),
        ("shop.v1.json", of({"widths": [0], "formats": []}), "/image/widths/0"),
        ("shop.json", of(GOOD), "shop.v1.json"),
        ("web.v7.json", of(GOOD, name="web", version=7), "built in"),
        ("shop.v1.json", of({**GOOD, "watermark": {"image": "gone.png"}}), "gone.png"),
        ("shop.v1.json", of({**GOOD, "watermark": {"image": "text.png"}}), "must be a PNG"),
    ],
)
def test_a_bad_file_stops_the_start_with_a_sentence(
    folder: Path, name: str, text: bytes, said: str
) -> None:
    (folder / "text.png").write_text("hello")
    (folder / name).write_bytes(text)
    with pytest.raises(ConfigError, match="recipes_dir") as caught:
        recipes.book(folder)
    assert said in str(caught.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        recipes.book(tmp_path / "nowhere")


def test_a_watermark_without_a_folder_is_a_fault() -> None:
    assert pointers(of(GOOD)) == ["/image/watermark/image"]


def test_a_watermark_has_a_size_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "MAX_WATERMARK_BYTES", 10)
    assert pointers(of(GOOD), folder) == ["/image/watermark/image"]


# --- Limits


def test_the_lowest_of_each_limit_holds() -> None:
    settings = config.load(
        max_pixels=1000,
        max_frames=50,
        tenant_limits={"small": {"max_pixels": 500, "max_frames": 80, "max_seconds": 3}},
    )
    everyone = settings.image_limits("other")
    assert (everyone.max_pixels, everyone.max_frames, everyone.max_seconds) == (1000, 50, None)
    small = settings.image_limits("small", ImageLimits(max_pixels=700, max_memory_bytes=1 << 28))
    assert (small.max_pixels, small.max_frames, small.max_seconds) == (500, 50, 3)
    assert small.max_memory_bytes == 1 << 28


def test_limits_of_tenants_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDIAMILL_TENANT_LIMITS", '{"small": {"max_pixels": 500}}')
    assert config.load().image_limits("small").max_pixels == 500
    monkeypatch.setenv("MEDIAMILL_TENANT_LIMITS", '{"small": {"max_pixel": 500}}')
    with pytest.raises(ConfigError, match="max_pixel"):
        config.load()


# --- The guide


def _examples(name: str = "images") -> list[str]:
    guide = Path(__file__).parent.parent / "docs" / f"{name}.md"
    return re.findall(r"```json\n(.*?)```", guide.read_text("utf-8"), re.S)


@pytest.mark.parametrize("text", [*_examples(), *_examples("video")])
def test_the_examples_of_the_guide_are_valid(text: str, folder: Path) -> None:
    assert pointers(text.encode(), folder) == []


def test_the_guide_names_every_limit_and_fit() -> None:
    guide = (Path(__file__).parent.parent / "docs" / "images.md").read_text("utf-8")
    assert len(_examples()) >= 5
    for name in (*ImageLimits.model_fields, *recipes.ImageOutput.model_fields):
        assert f"`{name}`" in guide or f'"{name}"' in guide, name


def test_the_guide_names_every_output_of_video_and_sound() -> None:
    guide = (Path(__file__).parent.parent / "docs" / "video.md").read_text("utf-8")
    definitions = recipes.schema()["$defs"].values()
    kinds = {d["properties"]["type"].get("const") for d in definitions if "type" in d["properties"]}
    assert len(kinds) >= 11
    for kind in kinds:
        assert f"`{kind}`" in guide, kind


@pytest.mark.parametrize(
    ("output", "fault"),
    [
        ({"type": "hls", "hdr": "keep"}, "hdr keep needs codec"),
        ({"type": "hls", "segment_seconds": 1.0}, "segment_seconds must not be below"),
        (
            {"type": "hls", "ladder": [{"short_side": 360, "max_video_kbps": 500}] * 2},
            "the sizes of a ladder must be distinct",
        ),
        ({"type": "hls", "ladder": []}, "at least 1 item"),
        ({"type": "m4a", "loudness": 0}, "less than or equal to -5"),
        ({"type": "waveform", "color": "blue"}, "should match pattern"),
        ({"type": "cover"}, "cover"),
    ],
)
def test_a_video_output_that_makes_no_sense_is_refused(output: dict[str, Any], fault: str) -> None:
    body = {"name": "test", "version": 1, "video": [output]}
    recipe, faults = recipes.check(json.dumps(body).encode())
    assert recipe is None
    assert any(fault in f["msg"] for f in faults), faults

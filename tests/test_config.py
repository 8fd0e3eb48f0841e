"""Settings: one object, one documented file of defaults, and errors that name the setting."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from mediamill import config
from mediamill.config import QUEUES, ConfigError, Settings, parse_slots

DEFAULTS = resources.files("mediamill").joinpath("config.default.toml").read_text("utf-8")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.upper().startswith("MEDIAMILL_")]:
        monkeypatch.delenv(name)


def test_the_file_of_defaults_lists_exactly_the_settings() -> None:
    set_here = set(config.defaults())
    unset = set(re.findall(r"^# (\w+) = ", DEFAULTS, re.MULTILINE))
    assert not set_here & unset
    assert set_here | unset == set(Settings.model_fields)
    optional = {n for n, f in Settings.model_fields.items() if not f.is_required()}
    assert unset == optional  # what has no default is commented out


def test_every_setting_is_explained() -> None:
    """Each name stands in a block of lines that begins with a comment."""
    for block in re.split(r"\n\n+", DEFAULTS.strip()):
        assert block.startswith("# "), block


def test_the_defaults_are_valid_and_settings_cannot_be_changed() -> None:
    settings = config.load()
    assert settings.lease_seconds == 7.0
    assert settings.data_dir.is_absolute()
    with pytest.raises(ValueError, match="frozen"):
        setattr(settings, "port", 1)  # noqa: B010  # mypy knows too


def test_a_flag_beats_the_environment_beats_the_file_beats_the_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "mediamill.toml"
    file.write_text("port = 1111\nmax_attempts = 11\nmax_crashes = 11\n")
    monkeypatch.setenv("MEDIAMILL_CONFIG", str(file))
    monkeypatch.setenv("MEDIAMILL_PORT", "2222")
    monkeypatch.setenv("MEDIAMILL_MAX_ATTEMPTS", "22")
    settings = config.load(port=3333, host=None)
    assert settings.port == 3333
    assert settings.max_attempts == 22
    assert settings.max_crashes == 11
    assert settings.host == "127.0.0.1"


def test_a_misspelt_variable_is_refused_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEDIAMILL_DATABSE_URL", "postgresql://x")
    with pytest.raises(ConfigError, match="did you mean MEDIAMILL_DATABASE_URL"):
        config.load()
    monkeypatch.delenv("MEDIAMILL_DATABSE_URL")
    monkeypatch.setenv("MEDIAMILL_QQQQQQQQQQQQQQQQQQQQQQQQQQQQQQ", "1")
    with pytest.raises(
        ConfigError, match=r"^MEDIAMILL_QQQQQQQQQQQQQQQQQQQQQQQQQQQQQQ is not a setting$"
    ):
        config.load()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"port": 70000}, "port"),
        ({"port": "x"}, "port"),
        ({"sandbox": "none"}, "sandbox"),
        ({"log_level": "loud"}, "log_level"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"lease_seconds": float("nan")}, "lease_seconds"),
        ({"lease_seconds": 5.0}, "self_stop_seconds < lease_seconds"),
        ({"self_stop_seconds": 7.0}, "self_stop_seconds < lease_seconds"),
        ({"beat_seconds": 5.0}, "beat_seconds < self_stop_seconds"),
        ({"superseded_set_seconds": 60}, "superseded_set_seconds"),
        ({"slots": "images=1"}, "'images' is no queue; the queues are image, video"),
        ({"slots": "image"}, "image=NUMBER"),
        ({"slots": "image=-1"}, "image=NUMBER"),
        ({"slots": "image=1.5"}, "image=NUMBER"),
        ({"slots": "image="}, "image=NUMBER"),
    ],
)
def test_a_bad_value_is_an_error_that_names_it(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        config.load(**flags)


def test_every_bad_value_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"port: .*; max_attempts: "):
        config.load(port=-1, max_attempts=0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("port = ", "not valid TOML"),
        ("prot = 1", "prot"),
        (None, "cannot read"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None, said: str
) -> None:
    file = tmp_path / "mediamill.toml"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("MEDIAMILL_CONFIG", str(file))
    with pytest.raises(ConfigError, match=said):
        config.load()


def test_slots() -> None:
    assert parse_slots("image=2, video=1,") == {"image": 2, "video": 1}
    assert parse_slots("image=2,video=0") == {"image": 2}
    assert parse_slots("") == {}
    unset = parse_slots(None)
    assert unset["image"] == (os.cpu_count() or 1)
    assert unset["video"] == 1
    assert set(unset) <= set(QUEUES)


def test_addresses_and_limits() -> None:
    settings = config.load(public_url="https://media.example/", port=8081)
    assert settings.base_url == "https://media.example"
    assert config.load(port=8081).base_url == "http://127.0.0.1:8081"
    assert settings.max_bytes("image") == settings.max_image_bytes
    assert settings.max_bytes("audio") == settings.max_audio_bytes
    assert settings.max_bytes("video") == settings.max_video_bytes

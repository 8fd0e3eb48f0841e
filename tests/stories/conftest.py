"""An installation for each story, and a few small media files for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.stories.clips import Clips
from tests.stories.harness import Platform

Make = Callable[..., Platform]


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Clips:
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "clips"
    folder.mkdir(exist_ok=True)
    return Clips(folder)


@pytest.fixture
def make_platform(database: str, tmp_path: Path) -> Iterator[Make]:
    """Makes the installation of this test; its processes end with the test."""
    made: list[Platform] = []

    def make(**settings: object) -> Platform:
        platform = Platform(str(settings.pop("database", database)), tmp_path, **settings)
        made.append(platform)
        return platform

    try:
        yield make
    finally:
        for platform in made:
            platform.close()
    for platform in made:
        for process in platform.processes:
            said = process.complaints()
            assert platform.errors_expected or said == [], f"{process.name}: {said[0]}"


@pytest.fixture
def platform(make_platform: Make) -> Platform:
    """An installation at its default settings; the story starts its processes."""
    return make_platform()

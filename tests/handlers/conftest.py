"""One studio and one folder of films for all tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.handlers.films import Films
from tests.handlers.studio import Studio

from mediamill import config, sandbox, tools
from mediamill.image_children import confined_pool


@pytest.fixture(scope="module")
async def studio(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Studio]:
    folder = tmp_path_factory.mktemp("studio")
    settings = config.load(data_dir=folder / "data")
    groups = tools.ProcessGroups()
    toolbox, confined = tools.resolve(), sandbox.detect()
    async with confined_pool(settings, toolbox, confined, groups, size=1, max_jobs=100_000) as pool:
        yield Studio(pool, folder, settings, toolbox, confined)
    groups.kill_all()


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Films:
    return Films(tmp_path_factory.mktemp("films"))

"""`mediamill explain` and `mediamill estimates report`, as an operator sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests import rows

from mediamill import db, explain, ids, jobs, media
from mediamill.cli import main
from mediamill.config import Settings
from mediamill.estimates import Estimate, Forecaster
from mediamill.failures import Code, Problem

pytestmark = pytest.mark.anyio


@pytest.fixture
async def connection(database: str) -> AsyncIterator[db.Connection]:
    async with rows.connected(database) as made:
        yield made


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return rows.settings(tmp_path)


async def test_a_failed_media_is_explained_with_who_was_ahead(
    connection: db.Connection, settings: Settings
) -> None:
    tenant = await rows.new_tenant(connection)
    other = await rows.new_tenant(connection)
    media_id, (birth,) = await rows.accepted(connection, tenant, settings)
    forecast = Estimate(1.0, 2.0, "", 1.0)
    await Forecaster().keep(connection, tenant, birth.id, forecast, ahead=0)
    for whose in (tenant, other, other):
        _, (ahead,) = await rows.accepted(connection, whose, settings)
        held = await rows.claim(connection, whose, ahead)
        await jobs.complete(connection, held, {}, retention_seconds=60)
    held = await rows.claim(connection, tenant, birth)
    await jobs.enter_stage(connection, held, "probe")
    await jobs.fail(
        connection,
        held,
        Problem(Code.CORRUPT_INPUT, "cut"),
        dead_letter=False,
        retention_seconds=60,
    )
    text = await explain.explain(connection, tenant, ids.encode(ids.MEDIA, media_id))
    lines = text.splitlines()
    assert lines[0].endswith("it is failed.")
    names = [line.split()[0] for line in lines[2:] if " s  █" in line]
    assert names == ["awaiting_upload", "accepted", "queued", "claimed", "probe"]
    assert "behind     2 × image of other tenants, 1 × image (2 of others)" in lines
    assert any(line.startswith("forecast   half by 1.0 s, nine in ten by 2.0 s") for line in lines)
    assert "error      corrupt_input: cut" in lines
    of_job = await explain.explain(connection, tenant, ids.encode(ids.JOB, birth.id))
    assert "queued" in of_job
    row = await media.get(connection, tenant, media_id)
    assert row is not None
    for wrong in ("nonsense", ids.encode(ids.MEDIA, ids.new()), ids.encode(ids.JOB, ids.new())):
        with pytest.raises(explain.Unknown):
            await explain.explain(connection, tenant, wrong)


def test_the_command_line_speaks_in_sentences(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDIAMILL_DATABASE_URL", database)
    runner = CliRunner()
    result = runner.invoke(main, ["explain", "nonsense"])
    assert result.exit_code == 1
    assert "no id of a media" in result.output
    result = runner.invoke(main, ["estimates", "report"])
    assert result.exit_code == 0
    assert "No forecast" in result.output

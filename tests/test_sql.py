"""The SQL files: every statement prepares, is used, and moves as states.py says."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

import mediamill
from mediamill import db, queue
from mediamill.states import JOB_MOVES, MEDIA_MOVES, JobState, MediaState

AGGREGATES = sorted(
    file.name.removesuffix(".sql")
    for file in resources.files("mediamill").joinpath("sql").iterdir()
    if file.name.endswith(".sql")
)
STATEMENTS = [(a, name) for a in AGGREGATES for name in db.load(a).all]
SOURCE = "\n".join(p.read_text() for p in Path(mediamill.__file__).parent.rglob("*.py"))


@pytest.mark.anyio
async def test_every_statement_prepares(database: str) -> None:
    connection = await db.connect(database)
    faults = []
    for aggregate, name in STATEMENTS:
        text = queue.fill(db.load(aggregate).all[name])
        if text.startswith("CREATE"):
            continue
        try:
            await connection.prepare(text)
        except Exception as error:
            faults.append(f"{aggregate}.{name}: {error}")
    await connection.close()
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(("aggregate", "name"), STATEMENTS)
def test_every_statement_is_used(aggregate: str, name: str) -> None:
    assert re.search(rf"_(SQL|FIGURES)\.{name}\b", SOURCE), f"{aggregate}.{name} is used nowhere"


def test_every_move_in_the_comments_is_in_the_table_and_the_other_way_round() -> None:
    """Each moving statement names its moves; together they are exactly the table."""
    said = {"job": set(), "media": set()}  # type: dict[str, set[tuple[str, str]]]
    for aggregate, name in STATEMENTS:
        text = resources.files("mediamill").joinpath("sql", f"{aggregate}.sql").read_text()
        block = text.split(f"-- name: {name}\n", 1)[1].split("-- name: ", 1)[0]
        for line in re.findall(r"^-- moves: (.+)$", block, re.MULTILINE):
            for subject, origin, target in re.findall(r"(job|media) (?:(\w+) )?-> (\w+)", line):
                if origin:
                    said[subject].add((origin, target))
    assert said["job"] == {(str(a), str(b)) for a, b in JOB_MOVES}
    assert said["media"] == {(str(a), str(b)) for a, b in MEDIA_MOVES}


@pytest.mark.anyio
@pytest.mark.parametrize(("table", "states"), [("jobs", JobState), ("media", MediaState)])
async def test_the_check_of_the_schema_is_the_enum(
    database: str, table: str, states: type[JobState] | type[MediaState]
) -> None:
    connection = await db.connect(database)
    definition = await connection.fetchval(
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint"
        " WHERE conrelid = $1::regclass AND conname = $2",
        table,
        f"{table}_state_check",
    )
    await connection.close()
    assert set(re.findall(r"'(\w+)'", definition)) == {str(state) for state in states}


@pytest.mark.anyio
async def test_every_table_of_a_tenant_is_keyed_by_it(database: str) -> None:
    """Only the installation's own tables, and the queue engine's, have no tenant."""
    connection = await db.connect(database)
    rows = await connection.fetch(
        "SELECT c.relname AS name, array_agg(a.attname::text) AS key"
        " FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid"
        " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY(i.indkey)"
        " WHERE i.indisprimary AND c.relnamespace = 'public'::regnamespace GROUP BY c.relname"
    )
    await connection.close()
    without = {row["name"] for row in rows if "tenant_id" not in row["key"]}
    installation_wide = {
        "instance",
        "secrets",
        "tallies",
        "workers",
        "queues",
        "kinds",
        "schema_migrations",
    }
    assert {n for n in without if not n.startswith("mediamill_ticket")} == installation_wide

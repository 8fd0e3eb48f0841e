"""The table of the protocol names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_line_of_the_protocol_names_tests_that_exist() -> None:
    table = (ROOT / "docs/reference/tus.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| ") and "a server" not in line]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        where = re.search(r"`(tests/[\w/.]+)`", row)
        source = (ROOT / (where[1] if where else "tests/api/test_uploads.py")).read_text()
        for name in named:
            assert re.search(rf"def {name}\(", source), f"{name} is nowhere"

"""A short `make soak`, so that the long one is known to work."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.faults.lab import ROOT


@pytest.mark.timeout(400)
def test_a_short_soak_loses_doubles_and_mixes_nothing() -> None:
    env = os.environ | {"SECONDS": "15", "SEED": "3"}
    ended = subprocess.run(
        [sys.executable, "benchmarks/soak.py"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    report = json.loads(ended.stdout.splitlines()[-1])
    assert report["bench"] == "soak"
    figures = report["figures"]
    assert figures["runs"] > 20
    assert sum(figures["faults"].values()) > 3
    assert (figures["lost"], figures["doubled"], figures["mixed_sets"]) == (0, 0, 0)

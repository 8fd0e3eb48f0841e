"""From an interpreter to `mediamill --help`, against a bare click group of as many commands.

Both are started one after the other, many times; every ratio is taken within such a pair.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Report, ratios, spread

from mediamill.cli import COMMANDS

_MOST_AIM = 1.5
_OURS = "from mediamill.cli import main; main(['--help'])"
_BARE = (
    "import click\n"
    f"names = {sorted(COMMANDS)!r}\n"
    "commands = {n: click.Command(n, help='Do it.') for n in names}\n"
    "click.Group('bare', help='Bare.', commands=commands)(['--help'])"
)


def seconds(code: str) -> float:
    """From the start of the interpreter to its end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    report = Report("start")
    for code in (_BARE, _OURS):
        seconds(code)  # so that every file is in the cache, and compiled
    ours: list[float] = []
    bare: list[float] = []
    for number in range(given.rounds):
        for code, found in ((_BARE, bare), (_OURS, ours))[:: 1 if number % 2 else -1]:
            found.append(seconds(code))
    ratio = ratios(ours, bare)
    report.figure("bare click --help", spread([1000 * value for value in bare]), "ms")
    report.figure("mediamill --help", spread([1000 * value for value in ours]), "ms")
    report.figure("ratio", ratio)
    report.aim("start against bare click", ratio.median, most=_MOST_AIM)
    report.close()


if __name__ == "__main__":
    main()

"""Places at which a test can make a process die, freeze or fail: MEDIAMILL_FAILPOINT.

`name:action[:nth]`, several separated by commas. The action happens at the nth time (from 1) that
the process passes the place, and at every time when nth is left out. Without the variable, passing
a place costs one look at an empty table.

    kill9   SIGKILL to this process        stop   SIGSTOP        exit   exit code 70
    sleep   one second, blocking           raise  OSError("failpoint")
    full    OSError(ENOSPC), as from a full disk
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

NAMES: Final = frozenset(
    {
        "api.accepted",  # committed, not yet answered
        "api.opened",  # the same for a new slot
        "api.put",  # a chunk of an upload was written
        "tus.part",  # bytes of a resumable upload are durable, the offset is not moved
        "tus.stored",  # the object of a resumable upload is made, nothing committed
        "tus.swept",  # an expired upload's bytes removed, row not yet
        "worker.taken",  # tickets taken and jobs claimed, not committed
        "worker.claimed",  # committed, the attempt not begun
        "attempt.fetched",  # the original is in scratch
        "attempt.described",  # what the probe found is shown
        "attempt.tool",  # a tool has ended
        "attempt.staged",  # every output is staged
        "attempt.reserved",  # the set has a name, its objects are not laid out
        "attempt.laid_out",  # objects under their final keys, nothing committed
        "attempt.published_early",  # a first set is shown, the work goes on
        "attempt.kept",  # a piece is in storage, its job not complete
        "attempt.settled",  # committed, not cleaned up
        "lease.beat",  # before a beat is sent
        "maintenance.rescue",  # leases found expired, not settled
        "maintenance.erase",  # bytes of one media removed, row not yet
        "maintenance.swept",  # a leftover removed, nothing committed
        "pull.followed",  # events that waited in a queue are followed, not taken off it
        "webhook.sent",  # a delivery was answered, nothing recorded
        "app.effect",  # an outside effect happened, not recorded
    }
)
_ACTIONS: Final = frozenset({"kill9", "stop", "sleep", "raise", "full", "exit"})


class BadFailpoint(Exception):
    """MEDIAMILL_FAILPOINT cannot be read; the message says why."""


def parse(text: str) -> dict[str, tuple[str, int | None]]:
    """The places that are set, with action and count. Raises BadFailpoint."""
    found: dict[str, tuple[str, int | None]] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, rest = part.partition(":")
        action, _, nth = rest.partition(":")
        if name not in NAMES:
            raise BadFailpoint(f"{name!r} is no failpoint; there are {', '.join(sorted(NAMES))}")
        if action not in _ACTIONS or (nth and not nth.isdigit()):
            raise BadFailpoint(f"{part!r} should read name:action[:nth]")
        found[name] = action, int(nth) if nth else None
    return found


_set: Mapping[str, tuple[str, int | None]] = {}
_passed: Counter[str] = Counter()


def arm(text: str | None) -> None:
    """Set the failpoints of this process. Called once, by the command line."""
    global _set  # noqa: PLW0603  # a process has one table of failpoints, set before it starts
    _set = parse(text or "")
    _passed.clear()


def hit(name: str) -> None:
    """Pass a place."""
    if not _set:
        return
    armed = _set.get(name)
    if armed is None:
        return
    action, nth = armed
    _passed[name] += 1
    if nth is not None and _passed[name] != nth:
        return
    match action:
        case "kill9":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(1.0)
        case "raise":
            raise OSError("failpoint")
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case _:
            os._exit(70)

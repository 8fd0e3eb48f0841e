"""The blocking client, written from the one for asyncio: `make docs` keeps blocking.py so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_FIRST: Final = (
    '"""The client for asyncio. Its blocking twin has the same names and signatures (by test)."""'
)
_HEAD: Final = (
    '"""The client that blocks. Written by `make docs` from its twin for asyncio, awaited.py."""'
)
_RULES: Final = (
    (r"\bAsync(Client|Driver|Iterator)\b", r"\1"),
    (r"\b__a(enter|exit)__\b", r"__\1__"),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
)


def blocking() -> str:
    """The source of blocking.py, before it is formatted."""
    text = Path(__file__).with_name("awaited.py").read_text("utf-8")
    assert text.startswith(_FIRST)
    text = _HEAD + text.removeprefix(_FIRST)
    for pattern, into in _RULES:
        text = re.sub(pattern, into, text)
    return text


if __name__ == "__main__":
    Path(__file__).with_name("blocking.py").write_text(blocking(), "utf-8")

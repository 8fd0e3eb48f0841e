"""Public ids: a type prefix and a UUIDv7 in Crockford base32 (the TypeID text form).

`med_01h…` sorts by time, is safe in a URL and says what it names. The database stores the UUID.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from uuid_utils.compat import uuid7

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_VALUES: Final = {char: value for value, char in enumerate(_ALPHABET)}
_LENGTH: Final = 26
_MOST: Final = 2**128
_SPARE: Final = timedelta(hours=1)

MEDIA: Final = "med"
UPLOAD: Final = "upl"
JOB: Final = "job"
VARIANT: Final = "var"
EVENT: Final = "evt"
ENDPOINT: Final = "ep"
DELIVERY: Final = "del"


def new() -> UUID:
    """A fresh UUIDv7."""
    return uuid7()


def encode(prefix: str, value: UUID) -> str:
    """The text form, for instance `job_01jd9k4z7e8v5r2m3n6p0q1s2t`."""
    number = value.int
    digits = []
    for _ in range(_LENGTH):
        digits.append(_ALPHABET[number & 31])
        number >>= 5
    return f"{prefix}_{''.join(reversed(digits))}"


def decode(prefix: str, text: str) -> UUID | None:
    """The UUID behind `text`, or None if it is not an id with this prefix."""
    head, _, tail = text.partition("_")
    if head != prefix or len(tail) != _LENGTH:
        return None
    number = 0
    for char in tail:
        value = _VALUES.get(char)
        if value is None:
            return None
        number = number << 5 | value
    return UUID(int=number) if number < _MOST else None


def span(after: datetime | None, before: datetime | None) -> tuple[UUID, UUID]:
    """The first and the last id that what was created in between can have, with an hour to spare
    for clocks that disagree: ids sort by time, so a list need not read what lies outside."""
    first, last = 0, _MOST - 1
    if after is not None:
        first = max(int((after - _SPARE).timestamp() * 1000), 0) << 80
    if before is not None:
        last = (max(int((before + _SPARE).timestamp() * 1000), 0) + 1 << 80) - 1
    return UUID(int=min(first, _MOST - 1)), UUID(int=min(last, _MOST - 1))


def born(value: UUID) -> float:
    """When a UUIDv7 was made, in Unix seconds (RFC 9562 §5.7)."""
    return (value.int >> 80) / 1000

"""The next release of the application: it knows a second version of `greet`, and no longer the
first."""

from __future__ import annotations

from typing_extensions import TypedDict

from mediamill import Job, Mill

mill = Mill()


class Person(TypedDict):
    first: str
    last: str


@mill.job("greet", version=2)
async def greet(job: Job, payload: Person) -> str:
    return f"hello {payload['first']} {payload['last']}"

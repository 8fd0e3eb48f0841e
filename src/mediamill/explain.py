"""`mediamill explain`: why a media or job took as long as it did, for an operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from mediamill import db, ids, jobs, media, timeline
from mediamill.timeline import Segment

_SQL: Final = db.load("explain")
_BAR: Final = 40


class Unknown(Exception):
    """There is nothing under this id."""


async def explain(connection: db.Connection, tenant_id: str, public_id: str) -> str:
    """Text for a terminal: a sentence, the segments with bars, what was ahead, what was forecast,
    and when the first webhook arrived. Raises Unknown."""
    now = await connection.fetchval("SELECT clock_timestamp()")
    media_id = ids.decode(ids.MEDIA, public_id)
    job_id = ids.decode(ids.JOB, public_id)
    if media_id is not None:
        row = await media.get(connection, tenant_id, media_id)
        if row is None:
            raise Unknown(f"There is no media {public_id} of tenant {tenant_id}.")
        moves = await media.timeline(connection, tenant_id, media_id)
        main = await media.main_jobs(connection, tenant_id, media_id)
        found = timeline.segments([dict(m) for m in moves], main_jobs=frozenset(main), now=now)
        state, job_id = row["state"], row["job_id"]
        error = row["error"]
    elif job_id is not None:
        row = await jobs.get(connection, tenant_id, job_id)
        if row is None:
            raise Unknown(f"There is no job {public_id} of tenant {tenant_id}.")
        moves = await jobs.timeline(connection, tenant_id, job_id)
        found = timeline.job_segments([dict(m) for m in moves], now=now)
        state, error = row["state"], row["error"]
    else:
        raise Unknown(f"{public_id} is no id of a media (med_…) or a job (job_…).")
    lines = [timeline.sentence(found, state=state), ""]
    lines += _bars(found)
    if job_id is not None:
        lines += [line async for line in _around(connection, tenant_id, job_id, found)]
    for output in _outputs(row):
        lines.append(output)
    if error is not None:
        lines.append(f"error      {error.get('code')}: {error.get('detail')}")
    told = await connection.fetchrow(_SQL.first_delivery, tenant_id, media_id or job_id)
    if told is not None:
        lines.append(
            f"told       {told['type']} delivered {told['seconds']:.1f} s after it happened"
        )
    return "\n".join(lines)


def _bars(found: Sequence[Segment]) -> Iterator[str]:
    total = sum(s.seconds for s in found) or 1.0
    for segment in found:
        bar = "█" * max(round(_BAR * segment.seconds / total), 1)
        about = " ".join(
            filter(
                None,
                [
                    f"attempt {segment.attempt}" if segment.attempt else "",
                    segment.detail or "",
                    segment.worker or "",
                ],
            )
        )
        yield f"{segment.name:16} {segment.seconds:10.3f} s  {bar:{_BAR}} {about}".rstrip()
    yield f"{'total':16} {sum(s.seconds for s in found):10.3f} s"


async def _around(
    connection: db.Connection, tenant_id: str, job_id: UUID, found: Sequence[Segment]
) -> Any:
    """Who was ahead while it waited, and what it was told."""
    waits = [s for s in found if s.name == "queued"]
    if waits:
        begun, ended = _span(waits)
        rows = await connection.fetch(_SQL.ahead, tenant_id, job_id, begun, ended)
        others = sum(r["jobs"] for r in rows if not r["own"])
        said = ", ".join(
            f"{r['jobs']} × {r['kind']}" + ("" if r["own"] else " of other tenants") for r in rows
        )
        yield ""
        yield f"behind     {said or 'nobody'}" + (f" ({others} of others)" if others else "")
    forecast = await connection.fetchrow(_SQL.forecast, tenant_id, job_id)
    if forecast is not None:
        yield (
            f"forecast   half by {forecast['p50_seconds']:.1f} s, nine in ten by "
            f"{forecast['p90_seconds']:.1f} s"
            + (f"; it took {forecast['seconds']:.1f} s" if forecast["seconds"] is not None else "")
        )


def _span(waits: Sequence[Segment]) -> tuple[datetime, datetime]:
    longest = max(waits, key=lambda s: s.seconds)
    return longest.start, longest.end


def _outputs(row: db.Row) -> Iterator[str]:
    for variant in row.get("variants") or ():
        if variant["seconds"] is not None:
            yield f"output     {variant['name']} in {variant['seconds']:.2f} s"

"""Holds the promises of docs/guarantees.md against the history that an installation leaves behind.

It is independent of the program: it reads rows with plain SQL, files from disk and processes from
/proc, and of the code it knows the table of states alone. `collect` gathers a `History`;
`violations` is a pure function of it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
from PIL import Image

from mediamill.states import (
    JOB_MOVES,
    JOB_TERMINAL,
    MEDIA_FOLLOWS_JOB,
    MEDIA_MOVES,
    MEDIA_TERMINAL,
    JobState,
)

Row = dict[str, Any]

MAX_CRASHES = 3
# Written out here on purpose: the checker does not ask the program what it thinks of a code.
PASSING = {"storage_unavailable", "database_unavailable", "internal", "too_busy"}
RESOURCE = {"time_limit", "memory_limit", "output_limit", "scratch_full", "output_invalid"}
NOT_PERMANENT = PASSING | RESOURCE | {"worker_crashed", "canceled"}
UNCOUNTED = {"released", "rerouted", "waiting"}
"""Outcomes of attempts that cost nothing."""
DECODED = {"image/jpeg", "image/png", "image/webp", "image/avif", "image/gif"}


@dataclass(slots=True)
class Published:
    """An object below media/."""

    size: int
    sha256: str
    decodes: bool


@dataclass(slots=True)
class History:
    """What is left of a run. Rows are dictionaries, in the order of their ids."""

    jobs: list[Row] = field(default_factory=list)
    media: list[Row] = field(default_factory=list)
    transitions: list[Row] = field(default_factory=list)
    attempts: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    effects: list[Row] = field(default_factory=list)
    sets: list[Row] = field(default_factory=list)
    variants: list[Row] = field(default_factory=list)
    now: datetime | None = None
    published: dict[str, Published] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    """Staged objects, scratch, half received bytes and processes that nobody owns any more."""
    accepted: set[str] = field(default_factory=set)
    """Ids of jobs and media that a client was told were accepted."""
    by_key: dict[str, list[str]] = field(default_factory=dict)
    """What each idempotency key was answered with."""
    kills: dict[str, datetime] = field(default_factory=dict)
    """When (database time) each killed worker died."""
    recovery_seconds: float | None = None
    """A killed worker's job runs again within this."""
    rows_by_job: Counter[str] = field(default_factory=Counter)
    """The application's rows, of which each job that ended well must have left exactly one."""
    one_row_kinds: frozenset[str] = frozenset()
    receipts: Mapping[str, int] | None = None
    """What the payment service holds, by key; None when there was none."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was not kept, and how."""

    promise: str
    what: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.what}"


def violations(history: History) -> list[Violation]:
    """Everything in a history that breaks a promise; empty when all were kept."""
    jobs = {str(row["id"]): row for row in history.jobs}
    logs = _logs(history.transitions)
    attempts: dict[str, list[Row]] = defaultdict(list)
    for row in history.attempts:
        attempts[str(row["job_id"])].append(row)
    told: dict[str, Counter[str]] = defaultdict(Counter)
    for row in history.events:
        if row["job_id"] is not None and row["type"].startswith("job."):
            told[str(row["job_id"])][row["type"].removeprefix("job.")] += 1
    found = [
        *_nothing_lost(history, jobs),
        *_unknown_subjects(history, jobs),
        *_attempts_agree_with_claims(logs, attempts),
        *_media(history, jobs, logs),
        *_published(history),
        *_effects(history, logs, jobs),
        *_keys(history),
        *_recovery(history, attempts, jobs),
        *(Violation("P9", f"left behind: {what}") for what in history.leftovers),
    ]
    for job_id, row in jobs.items():
        log = logs.get(("job", job_id), [])
        found += _path(
            f"job {job_id}",
            log,
            row["state"],
            legal=JOB_MOVES,
            terminal=JOB_TERMINAL,
            first="queued",
        )
        found += _fences(job_id, log, row)
        found += _attempts(job_id, row, log, attempts[job_id])
        found += _told(job_id, log, told[job_id])
    return found


def count(found: Iterable[Violation]) -> dict[str, int]:
    """Violations by promise."""
    return dict(Counter(v.promise for v in found))


# --- P1


def _nothing_lost(history: History, jobs: Mapping[str, Row]) -> Iterator[Violation]:
    media = {str(row["id"]): row for row in history.media}
    for accepted in sorted(history.accepted):
        row, ends = jobs.get(accepted), {str(s) for s in JOB_TERMINAL}
        if row is None:
            row, ends = media.get(accepted), {str(s) for s in MEDIA_TERMINAL}
        if row is None:
            yield Violation("P1", f"{accepted} was accepted and is not there")
        elif row["state"] not in ends:
            yield Violation("P1", f"{accepted} was accepted and is still {row['state']}")


# --- P2 and P5: the log


def _logs(transitions: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    logs: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in transitions:
        subject = row["job_id"] if row["subject"] == "job" else row["media_id"]
        logs[row["subject"], str(subject)].append(row)
    return logs


def _unknown_subjects(history: History, jobs: Mapping[str, Row]) -> Iterator[Violation]:
    for row in history.transitions:
        if row["subject"] == "job" and str(row["job_id"]) not in jobs:
            yield Violation("P2", f"the log moves job {row['job_id']}, which does not exist")


def _path(
    name: str,
    log: list[Row],
    state: str,
    *,
    legal: frozenset[tuple[Any, Any]],
    terminal: frozenset[Any],
    first: str,
) -> Iterator[Violation]:
    """The log is a path of the table, and no run of it ends twice."""
    moves = {(str(a), str(b)) for a, b in legal}
    ends = {str(s) for s in terminal}
    at: str | None = None
    waits = False
    for row in log:
        origin, target = row["from_state"], row["to_state"]
        if origin != at:
            yield Violation("P2", f"{name} jumped: it was {at} and left {origin} for {target}")
        if origin is None:
            if target != first:
                yield Violation("P2", f"{name} began as {target}")
        elif origin == target:
            if row["stage"] is None:
                yield Violation("P2", f"{name} moved from {origin} to itself without a stage")
            if origin in ends and row["stage"] != "discarded":
                yield Violation("P2", f"{name} went on with {row['stage']} after it was {origin}")
        elif (origin, target) not in moves:
            yield Violation("P2", f"{name} moved from {origin} to {target}")
        elif waits and target == "queued" and row["code"] != "children_done":
            yield Violation(
                "P10", f"{name} waited for its children and was taken up: {row['code']}"
            )
        waits = origin == target and row["stage"] == "waiting"
        at = target
    if not log:
        yield Violation("P2", f"{name} has no log")
    elif at != state:
        yield Violation("P2", f"{name} is {state}, its log says {at}")


def _fences(job_id: str, log: list[Row], row: Row) -> Iterator[Violation]:
    """Each claim has a higher fence; after it nothing is written under a lower one."""
    highest = 0
    holder: str | None = None
    for move in log:
        fence, claim = (
            move["fence"],
            (move["from_state"], move["to_state"])
            == (
                "queued",
                "processing",
            ),
        )
        if claim:
            if fence is None or fence <= highest:
                yield Violation(
                    "P5", f"job {job_id} was claimed with fence {fence} after {highest}"
                )
            highest, holder = max(highest, fence or 0), move["worker"]
        elif fence is not None:
            if fence < highest:
                yield Violation(
                    "P5", f"job {job_id}: {move['to_state']} by fence {fence} after claim {highest}"
                )
            if fence == highest and move["worker"] not in (holder, None):
                yield Violation("P5", f"job {job_id}: {move['worker']} wrote for {holder}")
            highest = max(highest, fence)
    if row["fence"] < highest:
        yield Violation("P5", f"job {job_id} has fence {row['fence']}, its log {highest}")


# --- P8 and P10: attempts


def _attempts_agree_with_claims(
    logs: Mapping[tuple[str, str], list[Row]], attempts: Mapping[str, list[Row]]
) -> Iterator[Violation]:
    for (subject, job_id), log in logs.items():
        if subject != "job":
            continue
        claims = [
            m["fence"] for m in log if (m["from_state"], m["to_state"]) == ("queued", "processing")
        ]
        tried = [a["fence"] for a in attempts.get(job_id, [])]
        if claims != tried:
            yield Violation("P5", f"job {job_id} was claimed as {claims}, attempts are {tried}")


def _runs(log: list[Row]) -> list[list[Row]]:
    """The log of a job, cut where it was replayed."""
    runs: list[list[Row]] = []
    for move in log:
        if not runs or (move["from_state"], move["to_state"]) == ("failed", "queued"):
            runs.append([])
        runs[-1].append(move)
    return runs


def _with_next(rows: list[Row]) -> Iterator[tuple[Row, Row | None]]:
    """Each row with the one after it."""
    yield from zip(rows, [*rows[1:], None][: len(rows)], strict=True)


def _attempts(job_id: str, row: Row, log: list[Row], tried: list[Row]) -> Iterator[Violation]:
    by_fence = {a["fence"]: a for a in tried}
    ended = {"completed", "failed", "canceled"}
    for run in _runs(log):
        terminal = [
            m for m in run if m["to_state"] in ended and m["from_state"] not in (*ended, None)
        ]
        if len(terminal) > 1:
            yield Violation("P2", f"a run of job {job_id} ended {len(terminal)} times")
        mine = [
            by_fence[m["fence"]]
            for m in run
            if (m["from_state"], m["to_state"]) == ("queued", "processing")
            and m["fence"] in by_fence
        ]
        counted = [a for a in mine if a["outcome"] not in UNCOUNTED]
        if len(counted) > row["max_attempts"]:
            yield Violation(
                "P8", f"job {job_id} used {len(counted)} attempts of {row['max_attempts']}"
            )
        lost = sum(a["outcome"] == "lost" for a in mine)
        if lost > MAX_CRASHES:
            yield Violation("P8", f"job {job_id} took {lost} workers with it")
        for attempt, following in _with_next(mine):
            code = (attempt["error"] or {}).get("code")
            if (
                attempt["outcome"] in ("failed", "retried")
                and code is not None
                and code not in NOT_PERMANENT
                and following is not None
            ):
                yield Violation("P8", f"job {job_id} was tried again after {code}")
    for attempt, following in _with_next(tried):
        done = attempt["finished_at"]
        if done is None and (following is not None or row["state"] in ended):
            yield Violation("P10", f"attempt {attempt['fence']} of job {job_id} never ended")
        if done is not None and following is not None and following["started_at"] < done:
            yield Violation("P10", f"two attempts of job {job_id} held the lease at once")
    if row["attempt"] > row["max_attempts"]:
        yield Violation("P8", f"job {job_id} counts {row['attempt']} attempts")


def _recovery(
    history: History, attempts: Mapping[str, list[Row]], jobs: Mapping[str, Row]
) -> Iterator[Violation]:
    """What a killed worker held runs again, or is settled, in time."""
    if history.recovery_seconds is None:
        return
    bound = timedelta(seconds=history.recovery_seconds)
    for job_id, tried in attempts.items():
        for attempt, following in _with_next(tried):
            died = history.kills.get(attempt["worker"])
            if died is None or attempt["started_at"] > died:
                continue
            done = attempt["finished_at"]
            if done is not None and done <= died:
                continue
            again = following["started_at"] if following is not None else done
            if again is None or again - died > bound:
                late = "never" if again is None else f"after {(again - died).total_seconds():.1f} s"
                yield Violation("P10", f"job {job_id} of {attempt['worker']} ran again {late}")


# --- Events


def _told(job_id: str, log: list[Row], told: Counter[str]) -> Iterator[Violation]:
    """Each end of a job was told once."""
    moved = Counter(
        m["to_state"] for m in log if m["from_state"] != m["to_state"] and m["from_state"]
    )
    for state in ("completed", "failed", "canceled"):
        if moved[state] != told[state]:
            yield Violation("P2", f"job {job_id} {state} {moved[state]}×, told {told[state]}×")


# --- P3 and P4: what is published


def _media(
    history: History, jobs: Mapping[str, Row], logs: Mapping[tuple[str, str], list[Row]]
) -> Iterator[Violation]:
    mains: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for job in jobs.values():
        if job["role"] == "main":
            mains[str(job["media_id"]), job["generation"]].append(job)
    for (media_id, generation), rows in mains.items():
        if len(rows) > 1:
            yield Violation("P7", f"media {media_id} has {len(rows)} main jobs in {generation}")
    for row in history.media:
        media_id = str(row["id"])
        yield from _path(
            f"media {media_id}",
            logs.get(("media", media_id), []),
            row["state"],
            legal=MEDIA_MOVES,
            terminal=MEDIA_TERMINAL,
            first="awaiting_upload",
        )
        for job in mains.get((media_id, row["generation"]), []):
            follows = MEDIA_FOLLOWS_JOB[JobState(job["state"])]
            joins = job["state"] == "queued" and row["state"] == "processing"  # its children ended
            if row["state"] != follows and not joins and row["deleted_at"] is None:
                yield Violation(
                    "P2", f"media {media_id} is {row['state']}, its job is {job['state']}"
                )


def _published(history: History) -> Iterator[Violation]:
    listed = {v["key"] for v in history.variants}
    by_set: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for variant in history.variants:
        by_set[_set_key(variant)].append(variant)
    current: dict[str, list[Row]] = defaultdict(list)
    reserved: set[tuple[Any, ...]] = set()
    for row in history.sets:
        if row["superseded_at"] is None:
            current[str(row["media_id"])].append(row)
        elif row["expires_at"] is not None:
            reserved.add(_set_key(row))
    for media in history.media:
        media_id = str(media["id"])
        mine = current.get(media_id, [])
        if len(mine) > 1:
            yield Violation("mixed", f"media {media_id} shows {len(mine)} sets at once")
        if media["state"] != "ready":
            continue
        if [s["set_id"] for s in mine] != [media["set_id"]]:
            yield Violation("P3", f"media {media_id} is ready without its set")
            continue
        variants = by_set[_set_key(mine[0])]
        if not variants:
            yield Violation("P3", f"media {media_id} is ready and lists nothing")
        for variant in variants:
            if variant["set_id"] != variant["key"].split("/")[-2]:
                yield Violation("mixed", f"{variant['key']} is of another set")
            yield from _same(variant, history.published.get(variant["key"]))
    for key in history.published:
        parts = key.split("/")
        recipe, _, version = parts[3].rpartition("-v") if len(parts) == 6 else ("", "", "0")
        owner = (parts[1], parts[2], recipe, int(version or 0), parts[4]) if recipe else ()
        if key not in listed and owner not in reserved:
            yield Violation("P4", f"{key} is in no manifest, and nobody will remove it")


def _same(variant: Row, found: Published | None) -> Iterator[Violation]:
    key = variant["key"]
    if found is None:
        yield Violation("P3", f"{key} is listed and does not exist")
        return
    if found.size != variant["bytes"] or found.sha256 != variant["sha256"]:
        yield Violation("P3", f"{key} is not what the manifest says")
    if not found.decodes:
        yield Violation("P3", f"{key} does not decode")


def _set_key(row: Row) -> tuple[Any, ...]:
    return (
        row["tenant_id"],
        str(row["media_id"]),
        row["recipe"],
        row["recipe_version"],
        row["set_id"],
    )


# --- Effects and keys


def _effects(
    history: History, logs: Mapping[tuple[str, str], list[Row]], jobs: Mapping[str, Row]
) -> Iterator[Violation]:
    seen: Counter[tuple[str, str]] = Counter()
    for effect in history.effects:
        job_id = str(effect["job_id"])
        seen[job_id, effect["key"]] += 1
        for move in logs.get(("job", job_id), []):
            claimed = (move["from_state"], move["to_state"]) == ("queued", "processing")
            if claimed and move["fence"] > effect["fence"] and move["at"] < effect["at"]:
                yield Violation(
                    "P5", f"job {job_id} recorded {effect['key']} after it had lost the lease"
                )
    for (job_id, key), times in seen.items():
        if times > 1:
            yield Violation("doubled", f"job {job_id} did {key} {times} times")
    names = {public_id(job_id): row for job_id, row in jobs.items()}
    for name, times in history.rows_by_job.items():
        if times > 1:
            yield Violation("doubled", f"{name} left {times} rows")
    for name, row in names.items():
        if (
            row["kind"] in history.one_row_kinds
            and row["state"] == "completed"
            and not history.rows_by_job[name]
        ):
            yield Violation("P1", f"{name} completed without its row")
    if history.receipts is not None:
        for name, row in names.items():
            if row["kind"] == "pay" and row["state"] == "completed":
                paid = history.receipts.get(f"{name}:charge")
                if paid != row["payload"]["n"]:
                    yield Violation("P1", f"{name} completed and paid {paid}")


def _keys(history: History) -> Iterator[Violation]:
    for key, answers in history.by_key.items():
        if len(set(answers)) > 1:
            yield Violation("P7", f"key {key} was answered with {sorted(set(answers))}")
    live: Counter[tuple[str, str, str]] = Counter()
    for row in history.jobs:
        if row.get("dedup_key") is not None and row["state"] in ("queued", "processing"):
            live[row["tenant_id"], row["kind"], row["dedup_key"]] += 1
    for name, times in live.items():
        if times > 1:
            yield Violation("P7", f"{times} live jobs hold the dedup key {name}")


# --- Gathering


async def collect(
    dsn: str,
    *,
    objects: Path | None = None,
    scratch: Path | None = None,
    live_workers: Iterable[str] = (),
    orphans: Iterable[str] = (),
) -> History:
    """Read the database, and what lies on disk below `objects` and `scratch`.

    `live_workers` may have scratch folders; `orphans` names processes that should be gone.
    """
    connection = await asyncpg.connect(dsn)
    try:
        history = History()
        await connection.set_type_codec(
            "jsonb", encoder=str, decoder=json.loads, schema="pg_catalog", format="text"
        )
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            for table in ("jobs", "media", "sets", "variants", "effects"):
                setattr(history, table, await _rows(connection, f"SELECT * FROM {table}"))
            for table in ("transitions", "events"):
                ordered = await _rows(connection, f"SELECT * FROM {table} ORDER BY id")
                setattr(history, table, ordered)
            history.attempts = await _rows(
                connection,
                "SELECT tenant_id, job_id, fence, attempt, worker, started_at, finished_at,"
                " outcome, error FROM attempts ORDER BY job_id, fence",
            )
            history.now = await connection.fetchval("SELECT now()")
            if await connection.fetchval("SELECT to_regclass('app_rows') IS NOT NULL"):
                for row in await connection.fetch("SELECT job_id FROM app_rows"):
                    history.rows_by_job[row["job_id"]] += 1
    finally:
        await connection.close()
    if objects is not None:
        types = {v["key"]: v["content_type"] for v in history.variants}
        history.published = published(objects, types)
        history.leftovers += left_in_storage(objects)
    if scratch is not None:
        history.leftovers += left_in_scratch(scratch, set(live_workers))
    history.leftovers += orphans
    return history


def published(objects: Path, types: Mapping[str, str]) -> dict[str, Published]:
    """Every object below media/, read in full."""
    found = {}
    for path in _files(objects / "media"):
        data = path.read_bytes()
        key = str(path.relative_to(objects))
        found[key] = Published(
            len(data), hashlib.sha256(data).hexdigest(), _decodes(data, types.get(key, ""))
        )
    return found


def left_in_storage(objects: Path) -> list[str]:
    return [
        str(path.relative_to(objects))
        for area in ("stage", ".incoming")
        for path in _files(objects / area)
    ]


def left_in_scratch(scratch: Path, live_workers: set[str]) -> list[str]:
    """Folders of attempts, and folders of workers that are gone."""
    found = []
    for worker in sorted(scratch.glob("*")):
        if worker.name not in live_workers:
            found.append(f"scratch/{worker.name}")
        found += [f"scratch/{worker.name}/{p.name}" for p in worker.glob("*") if p.name != ".lock"]
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(Path(place) / name for place, _, names in os.walk(folder) for name in names)


def _decodes(data: bytes, content_type: str) -> bool:
    if content_type not in DECODED:
        return bool(data)
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except Exception:
        return False
    return True


async def _rows(connection: Any, statement: str) -> list[Row]:
    return [dict(row) for row in await connection.fetch(statement)]


def public_id(job_id: str) -> str:
    """The id that the application sees: the UUID in Crockford's base 32, after its prefix."""
    number, digits = int(job_id.replace("-", ""), 16), ""
    for _ in range(26):
        number, digit = divmod(number, 32)
        digits = "0123456789abcdefghjkmnpqrstvwxyz"[digit] + digits
    return f"job_{digits}"

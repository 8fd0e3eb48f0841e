"""Jobs of an application: how kinds are declared, and what running them guarantees.

A worker runs in the test's own process, so that a test can define the functions it needs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from pydantic import BaseModel
from tests import rows
from typing_extensions import TypedDict

from mediamill import Job, Mill, controls, db, failpoints, ids, installation, jobs, sandbox, tools
from mediamill import mill as mill_module
from mediamill.attempt import Means
from mediamill.config import Settings
from mediamill.controls import Kind, offered, set_concurrency, set_paused
from mediamill.failures import Code, Failure
from mediamill.image_children import confined_pool
from mediamill.jobs import Claim
from mediamill.lease import Leases, Stop
from mediamill.maintenance import Maintenance
from mediamill.mill import Child, Wait
from mediamill.originals import Originals
from mediamill.storage.local import open_local
from mediamill.worker import Worker

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
ENDED = ("completed", "failed", "canceled")


@dataclass(slots=True)
class Crew:
    """A database with workers in this process."""

    dsn: str
    pool: db.Pool
    folder: Path

    def settings(self, **changes: Any) -> Settings:
        fast = {
            "lease_seconds": 5.0,
            "beat_seconds": 0.3,
            "self_stop_seconds": 3.0,
            "sweep_seconds": 0.3,
            "drain_seconds": 0.5,
        }
        return rows.settings(self.folder, **{**fast, **changes})

    @asynccontextmanager
    async def worker(
        self,
        mill: Mill,
        slots: dict[str, int] | None = None,
        *,
        name: str = "worker-1",
        **changes: Any,
    ) -> AsyncIterator[asyncio.Event]:
        """A worker at work during the block, with the duties; gives what makes it stop."""
        settings = self.settings(**changes)
        stop = asyncio.Event()
        async with db.acquire(self.pool) as connection:
            installed = await installation.identify(connection)
        store = open_local(
            settings.objects_dir, installed.id, lambda: installed.keyring, settings.base_url
        )
        toolbox, confined, groups = tools.resolve(), sandbox.detect(), tools.ProcessGroups()
        worker: Worker | None = None

        def on_stop(claim: Claim, why: Stop) -> None:
            assert worker is not None
            worker.stop_attempt(claim, why)

        async with rows.pooled(self.dsn, size=6) as pool:
            means = Means(
                settings=settings,
                pool=pool,
                storage=store,
                originals=Originals(store, settings.scratch_dir),
                toolbox=toolbox,
                sandbox=confined,
                groups=groups,
                images=confined_pool(settings, toolbox, confined, groups, size=1),
                leases=Leases(
                    self.dsn,
                    lease_seconds=settings.lease_seconds,
                    beat_seconds=settings.beat_seconds,
                    self_stop_seconds=settings.self_stop_seconds,
                    on_stop=on_stop,
                ),
                handlers={},
                mill=mill,
            )
            worker = Worker(
                means,
                dsn=self.dsn,
                name=name,
                slots=slots or {"default": 2},
                scratch=self.folder / f"scratch-{name}",
            )
            duties = asyncio.create_task(Maintenance(settings, pool, store).run())
            running = asyncio.create_task(worker.run(stop))
            try:
                yield stop
            finally:
                stop.set()
                await running
                duties.cancel()
                with suppress(asyncio.CancelledError):
                    await duties

    async def enqueue(self, mill: Mill, kind: str, payload: Any = None, **more: Any) -> UUID:
        async with db.transaction(self.pool) as connection:
            return uuid_of(await mill.enqueue(connection, kind, payload, **more))

    async def job(self, job_id: UUID, tenant: str = "default") -> db.Row:
        async with db.acquire(self.pool) as connection:
            row = await jobs.get(connection, tenant, job_id)
        assert row is not None
        return row

    async def ended(self, job_id: UUID, *, seconds: float = 40) -> db.Row:
        return await self.reaches(job_id, lambda row: row["state"] in ENDED, seconds=seconds)

    async def reaches(
        self, job_id: UUID, look: Callable[[db.Row], bool], *, seconds: float = 40
    ) -> db.Row:
        deadline = time.monotonic() + seconds
        while not look(row := await self.job(job_id)):
            assert time.monotonic() < deadline, f"{row['kind']} is {row['state']}, {row['error']}"
            await asyncio.sleep(0.03)
        return row

    async def fetch(self, statement: str, *args: Any) -> list[db.Row]:
        async with db.acquire(self.pool) as connection:
            return await connection.fetch(statement, *args)

    async def outcomes(self, job_id: UUID) -> list[str]:
        found = await self.fetch(
            "SELECT outcome FROM attempts WHERE job_id = $1 ORDER BY fence", job_id
        )
        return [row["outcome"] for row in found]


@pytest.fixture
async def crew(database: str, tmp_path: Path) -> AsyncIterator[Crew]:
    async with rows.pooled(database, size=8) as pool:
        yield Crew(database, pool, tmp_path)


@pytest.fixture
def armed() -> Iterator[Callable[[str], None]]:
    """Set failpoints of this process for the length of a test."""
    yield failpoints.arm
    failpoints.arm(None)


def uuid_of(job_id: str) -> UUID:
    value = ids.decode(ids.JOB, job_id)
    assert value is not None
    return value


# --- Declaring


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("Report", {}, "no name for a kind"),
        ("report..monthly", {}, "no name for a kind"),
        ("image", {}, "no name for a kind"),
        ("report", {"queue": "reports"}, "no queue"),
        ("report", {"version": 0}, "count from 1"),
        ("report", {"max_attempts": 0}, "count from 1"),
        ("report", {"concurrency": 0}, "count from 1"),
        ("report", {"timeout": "soon"}, "no duration"),
        ("report", {"timeout": "0s"}, "more than nothing"),
    ],
)
def test_a_wrong_declaration_is_refused_where_it_stands(
    kind: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Mill().job(kind, **options)(lambda job: None)


def test_a_kind_is_registered_once_per_version() -> None:
    mill = Mill()
    mill.job("report", version=1)(lambda job: None)
    mill.job("report", version=2)(lambda job: None)
    with pytest.raises(ValueError, match="registered twice"):
        mill.job("report", version=2)(lambda job: None)
    assert mill.find("report").kind.version == 2
    with pytest.raises(ValueError, match="version 3 is not registered"):
        mill.find("report", 3)


@pytest.mark.parametrize(
    ("text", "value"),
    [("90s", 90.0), ("10m", 600.0), ("2h", 7200.0), ("500ms", 0.5), (3, 3.0), (None, None)],
)
def test_a_timeout_is_read_as_a_person_writes_it(text: Any, value: float | None) -> None:
    assert mill_module.seconds(text) == value


def test_a_childs_weight_must_be_more_than_nothing() -> None:
    with pytest.raises(ValueError, match="weight"):
        Child("row", weight=0)


# --- Payloads


class Model(BaseModel):
    n: int
    when: str = "today"


@dataclass
class Record:
    n: int


class Typed(TypedDict):
    n: int


async def test_each_shape_of_payload_arrives_as_what_was_declared(crew: Crew) -> None:
    mill = Mill()
    seen: dict[str, Any] = {}

    @mill.job("model")
    async def model(job: Job, payload: Model) -> None:
        seen["model"] = payload

    @mill.job("record")
    async def record(job: Job, payload: Record) -> None:
        seen["record"] = payload

    @mill.job("typed")
    async def typed(job: Job, payload: Typed) -> None:
        seen["typed"] = payload

    @mill.job("plain")
    async def plain(job: Job, payload: dict[str, Any]) -> None:
        seen["plain"] = payload

    @mill.job("none")
    async def none(job: Job) -> None:
        seen["none"] = job.id

    async with crew.worker(mill):
        for kind, payload in [
            ("model", Model(n=1)),
            ("record", Record(n=2)),
            ("typed", {"n": 3}),
            ("plain", {"a": [1, None]}),
            ("none", None),
        ]:
            assert (await crew.ended(await crew.enqueue(mill, kind, payload)))["error"] is None
    assert seen.pop("none").startswith("job_")
    assert seen == {
        "model": Model(n=1),
        "record": Record(n=2),
        "typed": {"n": 3},
        "plain": {"a": [1, None]},
    }


async def test_a_payload_that_does_not_fit_is_refused_and_never_half_read(crew: Crew) -> None:
    mill = Mill()
    called = []

    @mill.job("model")
    async def model(job: Job, payload: Model) -> None:
        called.append(payload)

    for payload in ({"n": "many"}, {}, {"n": 1, "when": 5}):
        with pytest.raises(ValueError, match=r"n:|when:"):
            await crew.enqueue(mill, "model", payload)
    assert await crew.fetch("SELECT 1 FROM jobs") == []
    # One that came in by another door fails at its first attempt.
    async with db.transaction(crew.pool) as connection:
        wrong = mill_module.new_job(mill.find("model").kind, {"n": "many"})
        await jobs.enqueue(connection, "default", [wrong])
    async with crew.worker(mill):
        row = await crew.ended(wrong.id)
    assert (row["state"], row["error"]["code"], row["dead_letter"]) == (
        "failed",
        "invalid_request",
        False,
    )
    assert called == []
    assert await crew.outcomes(wrong.id) == ["failed"]


@pytest.mark.parametrize("payload", [{"x": "a" * 300_000}, {"x": float("nan")}, {"x": "a\x00b"}])
async def test_a_payload_that_cannot_be_stored_is_refused(
    crew: Crew, payload: dict[str, Any]
) -> None:
    mill = Mill()
    mill.job("plain")(lambda job, payload: None)
    with pytest.raises(Failure):
        await crew.enqueue(mill, "plain", payload)
    assert await crew.fetch("SELECT 1 FROM jobs") == []


async def test_an_unknown_version_is_left_untouched(crew: Crew) -> None:
    old, new = Mill(), Mill()
    old.job("greet", version=1)(lambda job, payload: "old")
    new.job("greet", version=1)(lambda job, payload: "new 1")
    new.job("greet", version=2)(lambda job, payload: "new 2")
    newer = await crew.enqueue(new, "greet", {"a": 1})
    async with crew.worker(old):
        older = await crew.enqueue(old, "greet", {"a": 1})
        assert (await crew.ended(older))["result"] == {"value": "old"}
        await asyncio.sleep(1.5)  # long enough for its ticket to be seen more than once
    row = await crew.job(newer)
    assert (row["state"], row["attempt"], row["fence"], row["payload"]) == (
        "queued",
        0,
        0,
        {"a": 1},
    )
    async with crew.worker(new):
        assert (await crew.ended(newer))["result"] == {"value": "new 2"}


# --- Running


async def test_plain_functions_run_beside_each_other_and_the_loop(crew: Crew) -> None:
    mill = Mill()
    meet = threading.Barrier(3)

    @mill.job("meet")
    def wait(job: Job) -> str:
        meet.wait(30)
        job.progress(50)
        return threading.current_thread().name

    async with crew.worker(mill, {"default": 3}):
        wanted = [await crew.enqueue(mill, "meet") for _ in range(3)]
        states = [(await crew.ended(w))["state"] for w in wanted]
    assert states == ["completed"] * 3


@pytest.mark.parametrize("how", ["async", "plain", "deaf"])
async def test_a_timeout_ends_the_attempt(crew: Crew, how: str) -> None:
    mill = Mill()
    enough = threading.Event()

    @mill.job("async", timeout="300ms", max_attempts=1)
    async def slow(job: Job) -> None:
        await asyncio.sleep(60)

    @mill.job("plain", timeout="300ms", max_attempts=1)
    def slow_thread(job: Job) -> None:
        enough.wait(60)

    @mill.job("deaf", timeout="300ms", max_attempts=1)
    async def deaf(job: Job) -> None:
        while not enough.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    mill.job("noop")(lambda job: 1)
    async with crew.worker(mill, {"default": 1}):
        row = await crew.ended(await crew.enqueue(mill, how))
        assert (row["state"], row["error"]["code"]) == ("failed", "time_limit")
        assert row["error"]["limit"]["allowed"] == 0.3
        after = await crew.ended(await crew.enqueue(mill, "noop"))
        assert after["state"] == "completed", "its slot is still taken"
    enough.set()


async def test_a_timeout_of_the_functions_own_is_no_time_limit(crew: Crew) -> None:
    mill = Mill()

    @mill.job("remote", max_attempts=1, timeout=None)
    async def remote(job: Job) -> None:
        raise TimeoutError("the other side did not answer")

    async with crew.worker(mill):
        row = await crew.ended(await crew.enqueue(mill, "remote"))
    assert row["error"]["code"] == "internal"


@pytest.mark.parametrize(
    ("raised", "state", "tries"),
    [
        (Failure(Code.CORRUPT_INPUT), "failed", 1),
        (Failure(Code.STORAGE_UNAVAILABLE), "completed", 2),
        (RuntimeError("a bug"), "completed", 2),
        (StopIteration(), "completed", 2),
        (asyncio.CancelledError(), "completed", 2),
        (asyncpg.UniqueViolationError("twice"), "completed", 2),
        (OSError(28, "No space left on device"), "completed", 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
async def test_what_a_function_raises_decides_whether_it_is_tried_again(
    crew: Crew, raised: BaseException, state: str, tries: int
) -> None:
    mill = Mill()

    def sometimes(job: Job) -> str:
        if job.attempt == 1:
            raise raised
        return "done"

    mill.job("plain")(sometimes)

    @mill.job("async")
    async def in_the_loop(job: Job) -> str:
        if isinstance(raised, StopIteration):
            return "done"  # Python itself turns it into another error
        return sometimes(job)

    async with crew.worker(mill):
        row = await crew.ended(await crew.enqueue(mill, "plain"))
        assert (row["state"], row["attempt"]) == (state, tries)
        row = await crew.ended(await crew.enqueue(mill, "async"))
        assert row["state"] == state


async def test_a_failed_attempt_keeps_its_traceback_for_the_operator(crew: Crew) -> None:
    mill = Mill()

    @mill.job("buggy", max_attempts=1)
    async def buggy(job: Job) -> None:
        raise KeyError("price")

    async with crew.worker(mill):
        job_id = await crew.enqueue(mill, "buggy")
        row = await crew.ended(job_id)
    assert "price" not in str(row["error"]), "the client is told of internals"
    (attempt,) = await crew.fetch("SELECT log_tail FROM attempts WHERE job_id = $1", job_id)
    assert "KeyError: 'price'" in attempt["log_tail"]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (object(), "invalid_request"),
        (float("inf"), "invalid_request"),
        ("x" * 300_000, "resource_limit"),
    ],
)
async def test_a_result_that_cannot_be_stored_fails_the_job_at_once(
    crew: Crew, value: Any, code: str
) -> None:
    mill = Mill()
    mill.job("big")(lambda job: value)
    async with crew.worker(mill):
        row = await crew.ended(await crew.enqueue(mill, "big"))
    assert (row["state"], row["error"]["code"], row["attempt"]) == ("failed", code, 1)


async def test_progress_and_stages_are_shown_while_it_runs(crew: Crew) -> None:
    mill = Mill()
    go_on = asyncio.Event()

    @mill.job("long")
    async def long(job: Job) -> None:
        await job.stage("collect")
        job.progress(40)
        job.progress(10)  # never falls
        await go_on.wait()

    async with crew.worker(mill):
        job_id = await crew.enqueue(mill, "long")
        row = await crew.reaches(job_id, lambda r: bool(r["progress"]))
        assert (row["stage"], row["progress"]) == ("collect", 40)
        go_on.set()
        assert (await crew.ended(job_id))["progress"] == 100


# --- Effects


async def test_an_effect_happens_once_over_all_attempts(crew: Crew) -> None:
    mill = Mill()
    sent: Counter[str] = Counter()

    @mill.job("mail", max_attempts=4)
    async def mail(job: Job) -> Any:
        def send(key: str) -> dict[str, str]:
            sent[key] += 1
            return {"receipt": key}

        receipt = await job.once("mail:1", send)
        if job.attempt < 3:
            raise Failure(Code.STORAGE_UNAVAILABLE)
        return receipt

    async with crew.worker(mill):
        job_id = await crew.enqueue(mill, "mail")
        row = await crew.ended(job_id)
    key = f"{ids.encode(ids.JOB, job_id)}:mail:1"
    assert row["attempt"] == 3
    assert sent == {key: 1}
    assert row["result"] == {"value": {"receipt": key}}


async def test_a_crash_between_an_effect_and_its_record_repeats_it_under_the_same_key(
    crew: Crew, armed: Callable[[str], None]
) -> None:
    mill = Mill()
    sent: list[str] = []

    @mill.job("mail")
    async def mail(job: Job) -> Any:
        async def send(key: str) -> str:
            sent.append(key)
            return "sent"

        return await job.once("mail:1", send)

    armed("app.effect:raise:1")
    async with crew.worker(mill):
        row = await crew.ended(await crew.enqueue(mill, "mail"))
    assert (row["state"], row["attempt"]) == ("completed", 2)
    assert len(sent) == 2, "at least once"
    assert len(set(sent)) == 1, "the other side could not know that it is a repeat"


async def test_an_effect_in_our_database_happens_exactly_once(crew: Crew) -> None:
    await crew.fetch("CREATE TABLE ledger (job_id text, n int)")
    mill = Mill()
    given: list[bool] = []

    @mill.job("book", max_attempts=4)
    async def book(job: Job) -> None:
        if job.attempt == 1:
            with suppress(RuntimeError):
                async with job.transaction("entry") as connection:
                    assert connection is not None
                    await connection.execute("INSERT INTO ledger VALUES ($1, 1)", job.id)
                    raise RuntimeError("before the commit")
            raise Failure(Code.STORAGE_UNAVAILABLE)
        async with job.transaction("entry") as connection:
            given.append(connection is not None)
            if connection is not None:
                await connection.execute("INSERT INTO ledger VALUES ($1, 2)", job.id)
        if job.attempt < 4:
            raise Failure(Code.STORAGE_UNAVAILABLE)

    async with crew.worker(mill):
        row = await crew.ended(await crew.enqueue(mill, "book"))
    assert row["state"] == "completed"
    assert given == [True, False, False]
    assert [r["n"] for r in await crew.fetch("SELECT n FROM ledger")] == [2]


async def test_a_worker_that_lost_the_job_commits_no_effect(crew: Crew) -> None:
    await crew.fetch("CREATE TABLE ledger (attempt int)")
    mill = Mill()
    inside, go_on = asyncio.Event(), asyncio.Event()

    @mill.job("book")
    async def book(job: Job) -> None:
        async with job.transaction("entry") as connection:
            assert connection is not None
            await connection.execute("INSERT INTO ledger VALUES ($1)", job.attempt)
            if job.attempt == 1:
                inside.set()
                await go_on.wait()

    # Its lease is taken while its transaction is open: nobody renews for so long.
    async with crew.worker(mill, beat_seconds=4.0, self_stop_seconds=4.5):
        job_id = await crew.enqueue(mill, "book")
        await inside.wait()
        await crew.fetch("UPDATE jobs SET lease_until = now() - interval '1 s'")
        await crew.reaches(job_id, lambda r: r["crashes"] == 1)
        go_on.set()
        row = await crew.ended(job_id)
    assert row["state"] == "completed"
    assert [r["attempt"] for r in await crew.fetch("SELECT attempt FROM ledger")] == [2]
    assert await crew.outcomes(job_id) == ["lost", "completed"]


async def test_a_long_transaction_of_an_effect_keeps_its_lease_and_that_of_others(
    crew: Crew,
) -> None:
    mill = Mill()
    runs: Counter[str] = Counter()

    @mill.job("hold")
    async def hold(job: Job) -> None:
        runs["hold"] += 1
        async with job.transaction("entry") as connection:
            if connection is not None:
                await connection.execute("SELECT pg_sleep(3)")

    @mill.job("other")
    async def other(job: Job) -> None:
        runs["other"] += 1
        await asyncio.sleep(3)

    async with crew.worker(mill, lease_seconds=1.5, beat_seconds=0.2, self_stop_seconds=1.0):
        wanted = [await crew.enqueue(mill, kind) for kind in ("hold", "other")]
        rows_ = [await crew.ended(w) for w in wanted]
    assert [(r["state"], r["attempt"]) for r in rows_] == [("completed", 1)] * 2
    assert runs == {"hold": 1, "other": 1}


# --- Enqueueing from an application


async def test_a_job_enqueued_in_a_transaction_exists_if_it_commits_and_only_then(
    crew: Crew,
) -> None:
    mill = Mill()
    mill.job("noop")(lambda job: None)
    mine = await asyncpg.connect(crew.dsn)
    try:
        undone = mine.transaction()
        await undone.start()
        lost = await mill.enqueue(mine, "noop")
        await undone.rollback()
        async with mine.transaction():
            kept = await mill.enqueue(mine, "noop")
            assert await crew.fetch("SELECT 1 FROM jobs") == [], "seen before the commit"
    finally:
        await mine.close()
    found = await crew.fetch("SELECT id FROM jobs")
    assert [ids.encode(ids.JOB, r["id"]) for r in found] == [kept]
    assert lost != kept
    async with crew.worker(mill):
        assert (await crew.ended(uuid_of(kept)))["state"] == "completed"


async def test_enqueueing_leaves_the_connection_of_the_application_as_it_is(crew: Crew) -> None:
    mill = Mill()
    mill.job("keep")(lambda job, payload: payload)
    mine = await asyncpg.connect(crew.dsn)
    try:
        await mine.set_type_codec(
            "jsonb", schema="pg_catalog", encoder=lambda v: f'"{v}"', decoder=lambda v: ("mine", v)
        )
        made = await mill.enqueue(mine, "keep", {"name": "Žofie"}, dedup_key="one")
        assert await mill.enqueue(mine, "keep", {"name": "other"}, dedup_key="one") == made
        assert await mine.fetchval("SELECT '1'::jsonb") == ("mine", "1")
    finally:
        await mine.close()
    async with crew.worker(mill):
        assert (await crew.ended(uuid_of(made)))["result"] == {"value": {"name": "Žofie"}}


async def test_a_dedup_key_gives_the_live_job_and_is_free_after_its_end(crew: Crew) -> None:
    mill = Mill()
    mill.job("noop")(lambda job: None)
    first = await crew.enqueue(mill, "noop", dedup_key="daily")
    assert await crew.enqueue(mill, "noop", dedup_key="daily") == first
    assert await crew.enqueue(mill, "noop", dedup_key="other") != first
    async with crew.worker(mill):
        await crew.ended(first)
        again = await crew.enqueue(mill, "noop", dedup_key="daily")
        assert again != first
        assert (await crew.ended(again))["state"] == "completed"


async def test_a_hundred_at_once_with_one_dedup_key_make_one_job(crew: Crew) -> None:
    mill = Mill()
    mill.job("noop")(lambda job: None)
    made = await asyncio.gather(*(crew.enqueue(mill, "noop", dedup_key="one") for _ in range(100)))
    assert len(set(made)) == 1
    assert len(await crew.fetch("SELECT 1 FROM jobs")) == 1


async def test_an_id_that_enqueue_returns_is_always_that_of_a_job(crew: Crew) -> None:
    """The job that held the key may end between the two statements of the enqueue."""
    mill = Mill()
    mill.job("noop")(lambda job: None)
    async with crew.worker(mill, {"default": 4}):
        made: list[UUID] = []
        for _ in range(60):
            made += await asyncio.gather(
                *(crew.enqueue(mill, "noop", dedup_key="hot") for _ in range(3))
            )
        for job_id in set(made):
            assert (await crew.ended(job_id))["state"] == "completed"


async def test_delays_and_priorities_are_kept(crew: Crew) -> None:
    mill = Mill()
    order: list[int] = []

    @mill.job("step")
    async def step(job: Job, payload: dict[str, int]) -> None:
        order.append(payload["n"])

    later = await crew.enqueue(mill, "step", {"n": 9}, delay_seconds=1.0, priority=9)
    made = [
        await crew.enqueue(mill, "step", {"n": n}, priority=priority)
        for n, priority in ((3, -1), (2, 0), (1, 5))
    ]
    with pytest.raises(ValueError, match="priority"):
        await crew.enqueue(mill, "step", {"n": 0}, priority=10)
    async with crew.worker(mill, {"default": 1}):
        for job_id in made:
            await crew.ended(job_id)
        row = await crew.ended(later)
    assert row["started_at"] >= row["run_at"]
    assert [n for n in order if n != 9] == [1, 2, 3]


# --- Children


def family(mill: Mill) -> Counter[str]:
    """`leaf` and `sum`, which counts its leaves; how often each leaf ran."""
    runs: Counter[str] = Counter()

    @mill.job("leaf")
    async def leaf(job: Job, payload: dict[str, Any]) -> int:
        runs[str(payload["n"])] += 1
        if payload.get("fails") and not payload.get("mended", lambda: False)():
            raise Failure(Code.CORRUPT_INPUT)
        return int(payload["n"])

    @mill.job("sum")
    async def total(job: Job, payload: dict[str, Any]) -> Any:
        if job.results is None:
            return Wait(Child("leaf", {"n": n}) for n in range(payload["n"]))
        return sum(job.results.values())

    @mill.job("grand")
    async def grand(job: Job) -> Any:
        if job.results is None:
            return Wait(Child("sum", {"n": n}, key=f"to {n}") for n in (2, 3))
        return dict(job.results)

    return runs


async def test_a_parent_joins_its_children_with_one_slot(crew: Crew) -> None:
    """No slot is held while it waits: parent and children share the only one."""
    mill = Mill()
    runs = family(mill)
    async with crew.worker(mill, {"default": 1}):
        job_id = await crew.enqueue(mill, "sum", {"n": 4})
        row = await crew.ended(job_id)
    assert (row["result"], row["attempt"]) == ({"value": 6}, 1)
    assert runs == {"0": 1, "1": 1, "2": 1, "3": 1}
    assert await crew.outcomes(job_id) == ["waiting", "completed"]


async def test_children_may_have_children(crew: Crew) -> None:
    mill = Mill()
    family(mill)
    async with crew.worker(mill, {"default": 1}):
        row = await crew.ended(await crew.enqueue(mill, "grand"))
    assert row["result"] == {"value": {"to 2": 1, "to 3": 3}}


async def test_a_parent_without_children_joins_at_once(crew: Crew) -> None:
    mill = Mill()
    family(mill)
    async with crew.worker(mill):
        row = await crew.ended(await crew.enqueue(mill, "sum", {"n": 0}))
    assert (row["state"], row["result"]) == ("completed", {"value": 0})


async def test_a_parent_shows_the_weighted_progress_of_its_children(crew: Crew) -> None:
    mill = Mill()
    go_on = asyncio.Event()

    @mill.job("part")
    async def part(job: Job, payload: dict[str, Any]) -> None:
        if payload["slow"]:
            job.progress(50)
            await go_on.wait()

    @mill.job("whole")
    async def whole(job: Job) -> Any:
        if job.results is None:
            return Wait(
                [
                    Child("part", {"slow": True}, weight=3),
                    Child("part", {"slow": False}, weight=1),
                ]
            )
        return "joined"

    async with crew.worker(mill):
        job_id = await crew.enqueue(mill, "whole")
        row = await crew.reaches(job_id, lambda r: (r["children_progress"] or 0) > 60, seconds=30)
        assert row["children_progress"] == pytest.approx((3 * 50 + 1 * 100) / 4)
        go_on.set()
        assert (await crew.ended(job_id))["result"] == {"value": "joined"}


async def test_a_child_that_fails_fails_its_parent_and_cancels_its_siblings(crew: Crew) -> None:
    mill = Mill()
    stopped = asyncio.Event()

    @mill.job("bad")
    async def bad(job: Job) -> None:
        raise Failure(Code.CORRUPT_INPUT, "unreadable")

    @mill.job("endless")
    async def endless(job: Job) -> None:
        try:
            await asyncio.sleep(600)
        finally:
            stopped.set()

    @mill.job("parent")
    async def parent(job: Job) -> Any:
        return Wait([Child("endless"), Child("endless", priority=-5), Child("bad")])

    async with crew.worker(mill, {"default": 2}):
        job_id = await crew.enqueue(mill, "parent")
        row = await crew.ended(job_id)
        assert (row["state"], row["error"]["code"]) == ("failed", "corrupt_input")
        await asyncio.wait_for(stopped.wait(), 30)
        deadline = time.monotonic() + 30
        while (
            states := {
                r["state"]
                for r in await crew.fetch("SELECT state FROM jobs WHERE kind = 'endless'")
            }
        ) != {"canceled"}:
            assert time.monotonic() < deadline, states
            await asyncio.sleep(0.05)


async def test_a_waiting_parent_that_is_canceled_takes_its_children_with_it(crew: Crew) -> None:
    mill = Mill()

    @mill.job("endless")
    async def endless(job: Job) -> None:
        await asyncio.sleep(600)

    @mill.job("parent")
    async def parent(job: Job) -> Any:
        return Wait([Child("endless"), Child("endless")])

    async with crew.worker(mill, {"default": 1}):
        job_id = await crew.enqueue(mill, "parent")
        await crew.reaches(job_id, lambda r: r["pending_children"] == 2)
        async with db.transaction(crew.pool) as connection:
            assert await jobs.cancel(connection, "default", job_id, retention_seconds=60)
        assert (await crew.ended(job_id))["state"] == "canceled"
        deadline = time.monotonic() + 30
        while await crew.fetch("SELECT 1 FROM jobs WHERE state IN ('queued', 'processing')"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


async def test_a_replayed_parent_keeps_the_children_that_completed(crew: Crew) -> None:
    mill = Mill()
    runs: Counter[int] = Counter()
    mended = False

    @mill.job("part")
    async def part(job: Job, payload: dict[str, int]) -> int:
        runs[payload["n"]] += 1
        if payload["n"] == 2 and not mended:
            raise Failure(Code.CORRUPT_INPUT)
        return payload["n"]

    @mill.job("whole")
    async def whole(job: Job) -> Any:
        if job.results is None:
            return Wait(Child("part", {"n": n}) for n in range(3))
        return sum(job.results.values())

    async with crew.worker(mill, {"default": 1}):
        job_id = await crew.enqueue(mill, "whole")
        assert (await crew.ended(job_id))["state"] == "failed"
        mended = True
        async with db.transaction(crew.pool) as connection:
            assert await jobs.restart(connection, "default", job_id)
        row = await crew.ended(job_id)
    assert row["result"] == {"value": 3}
    assert runs == {0: 1, 1: 1, 2: 2}, "what had completed was done again"


async def test_a_parent_that_is_replayed_while_a_sibling_is_being_canceled_still_completes(
    crew: Crew,
) -> None:
    """The sibling's late end belongs to the run before; it must not fail or block this one."""
    mill = Mill()
    mended = False
    runs: Counter[str] = Counter()

    @mill.job("bad")
    async def bad(job: Job) -> str:
        if not mended:
            raise Failure(Code.CORRUPT_INPUT)
        return "good"

    @mill.job("slow")
    async def slow(job: Job) -> str:
        runs["slow"] += 1
        if not mended:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(600)
            await asyncio.sleep(0.5)  # takes a moment to tidy up
        return "slow"

    @mill.job("parent")
    async def parent(job: Job) -> Any:
        if job.results is None:
            return Wait([Child("slow", key="slow"), Child("bad", key="bad")])
        return dict(job.results)

    async with crew.worker(mill, {"default": 3}):
        job_id = await crew.enqueue(mill, "parent")
        assert (await crew.ended(job_id))["state"] == "failed"
        deadline = time.monotonic() + 30
        while not await crew.fetch("SELECT 1 FROM jobs WHERE kind = 'slow' AND cancel_requested"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        mended = True
        async with db.transaction(crew.pool) as connection:
            assert await jobs.restart(connection, "default", job_id)
        row = await crew.ended(job_id)
    assert row["result"] == {"value": {"slow": "slow", "bad": "good"}}


async def test_a_parent_that_no_longer_asks_for_a_failed_child_completes(crew: Crew) -> None:
    mill = Mill()
    wanted = ["good", "bad"]

    @mill.job("part")
    async def part(job: Job, payload: dict[str, str]) -> str:
        if payload["name"] == "bad":
            raise Failure(Code.CORRUPT_INPUT)
        return payload["name"]

    @mill.job("whole")
    async def whole(job: Job) -> Any:
        if job.results is None:
            return Wait(Child("part", {"name": name}, key=name) for name in wanted)
        return dict(job.results)

    async with crew.worker(mill, {"default": 1}):
        job_id = await crew.enqueue(mill, "whole")
        assert (await crew.ended(job_id))["state"] == "failed"
        wanted.remove("bad")
        async with db.transaction(crew.pool) as connection:
            assert await jobs.restart(connection, "default", job_id)
        row = await crew.ended(job_id)
    assert row["result"] == {"value": {"good": "good"}}


@pytest.mark.parametrize(
    "children",
    [
        [Child("leaf", {"n": 1}, key="x"), Child("leaf", {"n": 2}, key="x")],
        [Child("leaf", {"n": 1}), Child("leaf", {"n": 2}, key="0")],
        [Child("nothing")],
        [Child("typed", {"n": "many"})],
        [Child("leaf", {"n": 1}, priority=99)],
    ],
    ids=["one key twice", "a key that is a place", "unknown kind", "wrong payload", "priority"],
)
async def test_children_that_cannot_be_are_the_parents_failure(
    crew: Crew, children: list[Child]
) -> None:
    mill = Mill()
    family(mill)
    mill.job("typed")(typed_leaf)
    mill.job("parent")(lambda job: Wait(children))
    async with crew.worker(mill):
        row = await crew.ended(await crew.enqueue(mill, "parent"))
    assert (row["state"], row["error"]["code"]) == ("failed", "invalid_request")
    assert await crew.fetch("SELECT 1 FROM jobs WHERE parent_id IS NOT NULL") == []


def typed_leaf(job: Job, payload: Typed) -> None:
    pass


async def test_waiting_twice_is_a_failure(crew: Crew) -> None:
    mill = Mill()
    family(mill)
    mill.job("parent", max_attempts=1)(lambda job: Wait([Child("leaf", {"n": 1})]))
    async with crew.worker(mill):
        row = await crew.ended(await crew.enqueue(mill, "parent"))
    assert row["state"] == "failed"


# --- Queues


async def test_a_quiet_tenant_does_not_wait_behind_a_burst(crew: Crew) -> None:
    mill = Mill()
    order: list[str] = []

    @mill.job("noop")
    async def noop(job: Job) -> None:
        order.append(job.tenant_id)

    async with db.transaction(crew.pool) as connection:
        for tenant in ("loud", "quiet"):
            await connection.execute("INSERT INTO tenants (tenant_id) VALUES ($1)", tenant)
        for _ in range(200):
            await mill.enqueue(connection, "noop", tenant_id="loud")
    async with db.transaction(crew.pool) as connection:
        for _ in range(5):
            await mill.enqueue(connection, "noop", tenant_id="quiet")
    async with crew.worker(mill, {"default": 1}):
        deadline = time.monotonic() + 60
        while len(order) < 205:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
    places = [n for n, tenant in enumerate(order) if tenant == "quiet"]
    assert places[0] <= 4, places
    assert places[-1] <= 14, f"the quiet tenant's five came at {places}"


async def running_at_once(
    crew: Crew, mill: Mill, count: int, *, kind_cap: int | None = None, queue_cap: int | None = None
) -> int:
    """The most jobs of the kind `work` that two workers of two slots ran at once."""
    at_once, most = 0, 0

    @mill.job("work", concurrency=kind_cap)
    async def work(job: Job) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.2)
        at_once -= 1

    async with db.transaction(crew.pool) as connection:
        await set_concurrency(connection, "default", queue_cap)
        for _ in range(count):
            await mill.enqueue(connection, "work")
    async with (
        crew.worker(mill, {"default": 2}, name="worker-1"),
        crew.worker(mill, {"default": 2}, name="worker-2"),
    ):
        deadline = time.monotonic() + 90
        while await crew.fetch("SELECT 1 FROM jobs WHERE state <> 'completed'"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
    return most


async def test_without_a_cap_all_slots_of_two_workers_are_used(crew: Crew) -> None:
    assert await running_at_once(crew, Mill(), 30) == 4


async def test_a_queues_cap_holds_over_two_workers(crew: Crew) -> None:
    """Three at once take both of them."""
    assert await running_at_once(crew, Mill(), 30, queue_cap=3) == 3


async def test_a_kinds_cap_holds_over_two_workers_and_holds_up_no_other_kind(crew: Crew) -> None:
    mill = Mill()
    mill.job("other")(lambda job: None)
    others = [await crew.enqueue(mill, "other") for _ in range(5)]
    assert await running_at_once(crew, mill, 30, kind_cap=3) == 3
    assert {(await crew.job(o))["state"] for o in others} == {"completed"}


async def tickets_at_rest(crew: Crew) -> list[db.Row]:
    """The waiting tickets once nobody has touched them for a second and a half."""
    look = "SELECT id, entrypoint FROM mediamill_tickets ORDER BY id"
    deadline = time.monotonic() + 60
    seen = await crew.fetch(look)
    while True:
        assert time.monotonic() < deadline, "tickets are taken and put back for ever"
        await asyncio.sleep(1.5)
        before, seen = seen, await crew.fetch(look)
        if before == seen:
            return seen


async def test_what_a_worker_does_not_know_is_set_aside_once_and_holds_up_nobody(
    crew: Crew,
) -> None:
    knows_more, mill = Mill(), Mill()
    for knowing in (knows_more, mill):
        knowing.job("noop")(lambda job: None)
    knows_more.job("strange")(lambda job: None)
    strange = [await crew.enqueue(knows_more, "strange") for _ in range(50)]
    behind = await crew.enqueue(mill, "noop")
    async with crew.worker(mill, {"default": 2}):
        assert (await crew.ended(behind))["state"] == "completed"
        assert {r["entrypoint"] for r in await tickets_at_rest(crew)} == {"default/strange/1"}
    async with crew.worker(knows_more, {"default": 2}):
        for job_id in strange:
            assert (await crew.ended(job_id))["attempt"] == 1


async def test_what_waits_for_a_cap_lies_aside_and_goes_on_in_order(crew: Crew) -> None:
    mill = Mill()
    order: list[int] = []
    go_on = asyncio.Event()

    @mill.job("report", concurrency=1)
    async def report(job: Job, payload: dict[str, int]) -> None:
        await go_on.wait()
        order.append(payload["n"])

    made = [await crew.enqueue(mill, "report", {"n": n}) for n in range(40)]
    async with crew.worker(mill, {"default": 4}):
        assert {r["entrypoint"] for r in await tickets_at_rest(crew)} == {"default/report/1"}
        go_on.set()
        for job_id in made:
            await crew.ended(job_id)
    assert order == list(range(40))


async def test_a_paused_queue_takes_nothing_new_until_it_goes_on(crew: Crew) -> None:
    mill = Mill()
    go_on = asyncio.Event()

    @mill.job("long")
    async def long(job: Job) -> None:
        await go_on.wait()

    mill.job("noop")(lambda job: None)
    async with crew.worker(mill, {"default": 2, "video": 1}):
        running = await crew.enqueue(mill, "long")
        await crew.reaches(running, lambda r: r["state"] == "processing")
        async with db.acquire(crew.pool) as connection:
            await set_paused(connection, "default", True)
        await asyncio.sleep(2.5)  # it is known within a second or so
        waiting = await crew.enqueue(mill, "noop")
        go_on.set()
        assert (await crew.ended(running))["state"] == "completed", "what runs goes on"
        await asyncio.sleep(1.5)
        assert (await crew.job(waiting))["state"] == "queued"
        async with db.acquire(crew.pool) as connection:
            await set_paused(connection, "default", False)
        assert (await crew.ended(waiting))["state"] == "completed"


async def test_a_worker_that_is_asked_to_drain_finishes_and_leaves(crew: Crew) -> None:
    mill = Mill()
    go_on = asyncio.Event()

    @mill.job("long")
    async def long(job: Job) -> None:
        await go_on.wait()

    async with crew.worker(mill, drain_seconds=30.0) as stop:
        job_id = await crew.enqueue(mill, "long")
        await crew.reaches(job_id, lambda r: r["state"] == "processing")
        async with db.acquire(crew.pool) as connection:
            assert await installation.request_drain(connection, "worker-1")
            assert not await installation.request_drain(connection, "worker-9")
        await asyncio.wait_for(stop.wait(), 20)
        later = await crew.enqueue(mill, "long")
        go_on.set()
        assert (await crew.ended(job_id))["state"] == "completed"
        assert (await crew.job(later))["attempt"] == 0


async def test_a_worker_tells_what_it_can_do(crew: Crew) -> None:
    mill = Mill()
    mill.job("report", version=3, queue="audio", timeout="2m", max_attempts=7, concurrency=2)(
        lambda job: None
    )
    async with crew.worker(mill):
        deadline = time.monotonic() + 20
        while not (known := await offered_kinds(crew)):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
    (kind,) = known
    assert (kind.queue, kind.version, kind.max_attempts) == ("audio", 3, 7)
    assert (kind.timeout_seconds, kind.concurrency) == (120.0, 2)


async def test_the_cap_of_a_kind_is_that_of_its_newest_version_on_offer(crew: Crew) -> None:
    def kind(version: int, concurrency: int | None) -> Kind:
        return Kind("report", version, "default", 5, None, concurrency)

    async def caps() -> dict[str, int]:
        return (await controls.limits(connection))[1]

    async with db.acquire(crew.pool) as connection:
        await controls.offer(connection, [kind(1, 2)])
        assert await caps() == {"report": 2}
        await controls.offer(connection, [kind(2, 3)])
        assert await caps() == {"report": 3}
        await controls.offer(connection, [kind(3, None)])
        assert await caps() == {}
        # The deploy is taken back: after a while only the old version is on offer.
        await connection.execute(
            "UPDATE kinds SET seen_at = now() - interval '1 hour' WHERE version > 1"
        )
        assert await caps() == {"report": 2}
        await connection.execute(
            "UPDATE kinds SET seen_at = now() - interval '31 days' WHERE version = 2"
        )
        await controls.forget(connection)
        assert [k.version for k in await offered(connection, "report")] == [3, 1]


async def offered_kinds(crew: Crew) -> list[Any]:
    async with db.acquire(crew.pool) as connection:
        return list(await offered(connection, "report"))


async def test_a_canceled_job_hears_of_it(crew: Crew) -> None:
    mill = Mill()
    heard: list[str] = []

    @mill.job("async")
    async def waits(job: Job) -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            heard.append("async")
            raise

    @mill.job("plain")
    def looks(job: Job) -> None:
        while not job.stopping:
            time.sleep(0.01)
        heard.append("plain")

    async with crew.worker(mill):
        for kind in ("async", "plain"):
            job_id = await crew.enqueue(mill, kind)
            await crew.reaches(job_id, lambda r: r["state"] == "processing")
            async with db.transaction(crew.pool) as connection:
                assert await jobs.cancel(connection, "default", job_id, retention_seconds=60)
            assert (await crew.ended(job_id))["state"] == "canceled"
    assert heard == ["async", "plain"]

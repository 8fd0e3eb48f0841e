"""The pool that keeps image children: real processes, and stand-ins that misbehave on purpose."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests import make_media as media
from tests.make_media import save

from mediamill.failures import Code, Failure
from mediamill.image_pool import Child, ImagePool
from mediamill.imaging import wire

pytestmark = pytest.mark.anyio

# A child that does what the request says, to be started in place of the real one.
STAND_IN = """
import json, os, resource, signal, socket, struct, sys, time
connection = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
seen = []
while True:
    data, fds, _, _ = socket.recv_fds(connection, 1 << 20, 60)
    if not data:
        break
    (length,) = struct.unpack(">I", data[:4])
    while len(data) < 4 + length:
        data += connection.recv(1 << 20)
    request = json.loads(data[4:])
    seen.append(request.get("name"))
    for fd in fds:
        os.close(fd)
    match request["op"]:
        case "hang":
            time.sleep(60)
        case "die":
            os.kill(os.getpid(), request["signal"])
        case "leave":
            sys.exit(request["code"])
        case "babble":
            connection.sendall(bytes.fromhex(request["bytes"]))
            continue
        case "slow":
            time.sleep(request["seconds"])
    answer = {"fds": len(fds), "seen": seen, **request.get("answer", {})}
    body = json.dumps(answer).encode()
    connection.sendall(struct.pack(">I", len(body)) + body)
"""


async def spawn_real(argv: list[str], fds: tuple[int, ...]) -> Child:
    return await asyncio.create_subprocess_exec(*argv, pass_fds=fds)


async def spawn_stand_in(argv: list[str], fds: tuple[int, ...]) -> Child:
    rest = argv[argv.index("mediamill.imaging") + 1 :]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", STAND_IN, *rest, pass_fds=fds
    )


@pytest.fixture
async def pool() -> AsyncIterator[ImagePool]:
    async with ImagePool(spawn_stand_in, size=2) as started:
        yield started


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def ask(pool: ImagePool, op: str, seconds: float = 10, **fields: Any) -> dict[str, Any]:
    more = {name: fields.pop(name) for name in ("owner", "tenant") if name in fields}
    return await pool.request({"op": op, **fields}, (), wall_seconds=seconds, **more)


async def busy_pid(pool: ImagePool) -> int:
    for _ in range(500):
        if pool.pids:
            return pool.pids[0]
        await asyncio.sleep(0.01)
    raise AssertionError("no child was started")


async def test_a_warm_child_is_asked_again_and_again() -> None:
    async with ImagePool(spawn_real, size=1) as pool:
        hello = await pool.warm()
        assert hello["ready"]
        assert {"jpeg", "heic", "avif"} <= set(hello["reads"])
        pids = pool.pids
        for color in (media.RED, media.BLUE):
            with tempfile.TemporaryFile() as file:
                file.write(save(media.flat((30, 20), color), "PNG"))
                file.flush()
                answer = await pool.request({"op": "inspect"}, [file.fileno()], wall_seconds=10)
                assert (answer["width"], answer["height"]) == (30, 20)
        assert pool.pids == pids
    assert all(gone(pid) for pid in pids)


async def test_children_start_when_needed_and_no_more_than_allowed(pool: ImagePool) -> None:
    assert pool.pids == []
    most = 0

    async def one() -> None:
        nonlocal most
        await pool.request({"op": "slow", "seconds": 0.05}, (), wall_seconds=10)
        most = max(most, len(pool.pids))

    await asyncio.gather(*(one() for _ in range(8)))
    assert most == len(pool.pids) == 2


async def test_a_child_is_replaced_when_it_has_done_its_share() -> None:
    async with ImagePool(spawn_stand_in, size=1, max_jobs=3) as pool:
        done = [len((await ask(pool, "work"))["seen"]) for _ in range(7)]
        assert done == [1, 2, 3, 1, 2, 3, 1]


async def test_a_child_is_replaced_when_it_has_used_its_processor_time() -> None:
    async with ImagePool(spawn_stand_in, size=1, max_cpu_seconds=10) as pool:
        await ask(pool, "work", answer={"cpu_seconds": 6})
        first = pool.pids
        assert first
        await ask(pool, "work", answer={"cpu_seconds": 6})
        assert pool.pids == []
        assert gone(first[0])


@pytest.mark.parametrize(
    ("number", "code"),
    [(11, Code.TOOL_FAILED), (6, Code.TOOL_FAILED), (9, Code.MEMORY_LIMIT), (24, Code.TIME_LIMIT)],
    ids=["SIGSEGV", "SIGABRT", "SIGKILL", "SIGXCPU"],
)
async def test_a_child_that_dies_is_a_failure_and_the_next_one_works(
    pool: ImagePool, number: int, code: Code
) -> None:
    with pytest.raises(Failure) as caught:
        await ask(pool, "die", signal=number)
    assert caught.value.code is code
    assert pool.pids == []
    assert (await ask(pool, "work", name="next"))["seen"] == ["next"]


@pytest.mark.parametrize(
    ("returncode", "code"),
    [(1, Code.TOOL_FAILED), (0, Code.TOOL_FAILED), (128 + 9, Code.MEMORY_LIMIT)],
)
async def test_a_child_that_leaves_without_an_answer_is_a_failure(
    pool: ImagePool, returncode: int, code: Code
) -> None:
    with pytest.raises(Failure) as caught:
        await ask(pool, "leave", code=returncode)
    assert caught.value.code is code


async def test_a_failure_brings_what_the_libraries_said(pool: ImagePool) -> None:
    answer = {"failure": {"code": "corrupt_input"}, "log": ["png: bad CRC", "second line"]}
    with pytest.raises(Failure) as caught:
        await ask(pool, "work", answer=answer)
    assert caught.value.code is Code.CORRUPT_INPUT
    assert caught.value.__notes__ == ["png: bad CRC\nsecond line"]


async def test_who_started_a_child_may_know_why_it_died() -> None:
    def explain(child: Child) -> Failure:
        assert child.returncode == -signal.SIGSEGV
        return Failure(Code.MEMORY_LIMIT)

    async with ImagePool(spawn_stand_in, size=1, explain=explain) as pool:
        with pytest.raises(Failure) as caught:
            await ask(pool, "die", signal=signal.SIGSEGV)
        assert caught.value.code is Code.MEMORY_LIMIT


async def test_a_child_that_hangs_is_killed_in_time(pool: ImagePool) -> None:
    began = time.monotonic()
    asking = asyncio.ensure_future(ask(pool, "hang", seconds=0.5))
    pid = await busy_pid(pool)
    with pytest.raises(Failure) as caught:
        await asking
    assert caught.value.code is Code.TIME_LIMIT
    assert time.monotonic() - began < 5
    assert gone(pid)
    assert await ask(pool, "work")


async def test_a_canceled_request_takes_its_child_along(pool: ImagePool) -> None:
    asking = asyncio.ensure_future(ask(pool, "hang"))
    pid = await busy_pid(pool)
    await asyncio.sleep(0.1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert gone(pid)
    assert pool.pids == []
    assert await ask(pool, "work")


async def test_waiting_for_a_child_can_be_canceled_too() -> None:
    async with ImagePool(spawn_stand_in, size=1) as pool:
        first = asyncio.ensure_future(
            pool.request({"op": "slow", "seconds": 0.3}, (), wall_seconds=9)
        )
        await busy_pid(pool)
        second = asyncio.ensure_future(ask(pool, "work"))
        await asyncio.sleep(0.05)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        await first
        assert await ask(pool, "work")


async def test_a_start_that_nobody_waits_for_leaves_no_process() -> None:
    started: list[Child] = []

    async def slowly(argv: list[str], fds: tuple[int, ...]) -> Child:
        await asyncio.sleep(0.2)
        started.append(await spawn_stand_in(argv, fds))
        return started[-1]

    async with ImagePool(slowly, size=1) as pool:
        asking = asyncio.ensure_future(ask(pool, "work"))
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert [gone(child.pid) for child in started] == [True]


async def test_a_request_is_killed_by_its_owner_from_another_thread(pool: ImagePool) -> None:
    asking = asyncio.ensure_future(ask(pool, "hang", owner="job.1"))
    pid = await busy_pid(pool)
    await asyncio.sleep(0.1)
    assert pool.kill("job.2") == 0
    killed: list[int] = []
    thread = threading.Thread(target=lambda: killed.append(pool.kill("job.1")))
    thread.start()
    with pytest.raises(Failure) as caught:
        await asking
    thread.join()
    assert killed == [1]
    assert caught.value.code is Code.CANCELED
    assert gone(pid)
    assert await ask(pool, "work", owner="job.1")


async def test_a_child_never_serves_two_tenants() -> None:
    async with ImagePool(spawn_stand_in, size=1) as pool:
        pids = []
        for tenant in ("a", "a", "b", "a"):
            answer = await ask(pool, "work", name=tenant, tenant=tenant)
            assert set(answer["seen"]) == {tenant}
            pids.append(pool.pids[0])
        assert pids[0] == pids[1]
        assert len(set(pids)) == 3


async def test_two_tenants_keep_a_child_each_where_there_is_room(pool: ImagePool) -> None:
    first = [await ask(pool, "work", name=t, tenant=t) for t in ("a", "b", "a", "b")]
    assert [answer["seen"] for answer in first[2:]] == [["a", "a"], ["b", "b"]]
    # A third one takes the place of the one that has waited longest.
    await ask(pool, "work", name="c", tenant="c")
    assert (await ask(pool, "work", name="b", tenant="b"))["seen"] == ["b"] * 3


@pytest.mark.parametrize(
    "bytes_",
    [b"\0\0\0\x04[1]\n", b"\0\0\0\x03abc", b"\xff\xff\xff\xff{}", b"\0\0\0\x02\xff\xfe"],
    ids=["no object", "no JSON", "a gigantic answer", "no text"],
)
async def test_an_answer_that_breaks_the_protocol_ends_the_child(
    pool: ImagePool, bytes_: bytes
) -> None:
    with pytest.raises(Failure) as caught:
        await ask(pool, "babble", bytes=bytes_.hex())
    assert caught.value.code is Code.TOOL_FAILED
    assert pool.pids == []
    assert await ask(pool, "work")


@pytest.mark.parametrize(
    ("answered", "code", "limit"),
    [
        ({"code": "corrupt_input", "detail": "torn", "limit": None}, Code.CORRUPT_INPUT, None),
        (
            {
                "code": "resource_limit",
                "detail": "large",
                "limit": {"name": "max_side", "allowed": 1, "seen": 2, "unit": "pixels", "x": 1},
            },
            Code.RESOURCE_LIMIT,
            {"name": "max_side", "allowed": 1, "seen": 2, "unit": "pixels"},
        ),
        ({"code": "no_such_code", "detail": "x" * 9000}, Code.TOOL_FAILED, None),
        ("what", Code.TOOL_FAILED, None),
        ({"code": "resource_limit", "limit": {"name": 1}}, Code.RESOURCE_LIMIT, None),
    ],
)
async def test_a_failure_that_is_answered_is_raised_and_nothing_else_of_it(
    pool: ImagePool, answered: object, code: Code, limit: dict[str, Any] | None
) -> None:
    with pytest.raises(Failure) as caught:
        await ask(pool, "work", answer={"failure": answered})
    assert caught.value.code is code
    assert caught.value.problem.limit == limit
    assert len(caught.value.problem.detail) <= 500


async def test_a_child_short_of_memory_is_not_asked_again(pool: ImagePool) -> None:
    with pytest.raises(Failure):
        await ask(pool, "work", answer={"failure": {"code": "memory_limit"}})
    assert pool.pids == []


async def test_a_long_request_with_many_descriptors_arrives_whole(pool: ImagePool) -> None:
    before = len(os.listdir("/dev/fd"))
    with tempfile.TemporaryFile() as file:
        answer = await pool.request(
            {"op": "work", "padding": "x" * 250_000},
            [file.fileno()] * wire.MAX_FDS,
            wall_seconds=10,
        )
        assert answer["fds"] == wire.MAX_FDS
        with pytest.raises(ValueError, match="at most"):
            await pool.request(
                {"op": "work"}, [file.fileno()] * (wire.MAX_FDS + 1), wall_seconds=10
            )
    with pytest.raises(wire.BrokenMessage):
        await pool.request({"op": "x" * (1 << 19)}, (), wall_seconds=10)
    await pool.close()
    assert len(os.listdir("/dev/fd")) <= before


async def test_a_child_that_died_while_idle_is_passed_over(pool: ImagePool) -> None:
    await ask(pool, "work")
    os.kill(pool.pids[0], 9)
    # Its end is seen on the socket at once; nobody may have reaped it yet.
    assert await asyncio.to_thread(select.select, [pool._idle[0].connection], [], [], 10)
    assert (await ask(pool, "work", name="b"))["seen"] == ["b"]


async def test_a_child_that_speaks_unasked_is_not_asked_again(pool: ImagePool) -> None:
    answer = json.dumps({"seen": ["first"]}).encode()
    whole = len(answer).to_bytes(4, "big") + answer
    forged = whole + whole.replace(b"first", b"false")
    assert (await ask(pool, "babble", bytes=forged.hex()))["seen"] == ["first"]
    assert (await ask(pool, "work", name="b"))["seen"] == ["b"]


async def test_closing_ends_requests_at_work_as_something_to_try_again(pool: ImagePool) -> None:
    asking = asyncio.ensure_future(ask(pool, "hang"))
    pid = await busy_pid(pool)
    await asyncio.sleep(0.1)
    await pool.close()
    with pytest.raises(Failure) as caught:
        await asking
    assert caught.value.code is Code.INTERNAL
    assert gone(pid)
    with pytest.raises(Failure) as caught:
        await ask(pool, "work")
    assert caught.value.code is Code.INTERNAL


async def test_a_child_leaves_when_its_worker_does() -> None:
    pool = ImagePool(spawn_real, size=1)
    await pool.warm()
    (worker,) = pool._idle
    worker.connection.close()
    assert await asyncio.wait_for(worker.process.wait(), 10) == 0
    await pool.close()

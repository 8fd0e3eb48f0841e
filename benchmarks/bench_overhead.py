"""One photograph and one clip through the platform, against the same tool commands run bare.

The commands are not written down here: the handlers are run once against a `Work` that notes what
they ask for (`Notes`), and the notes are then repeated, one after the other, without sandbox,
database, queue or storage. Rounds of each contender follow each other in random order.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.harness import Report, Spread, Stand, ratios, say, spread

from mediamill import handlers, ids, recipes, tools
from mediamill.config import Settings
from mediamill.failures import Failure
from mediamill.handlers import Child, Done, Kept, Output, image, preview, video
from mediamill.imaging import wire
from mediamill.jobs import Claim
from mediamill.media import Description, Original
from mediamill.recipes import Recipe
from mediamill.sandbox import Jail
from mediamill.sidecars import Sidecar
from mediamill.tools import Command, Finished, Toolbox

SAMPLES: Final = Path(tools.__file__).with_name("samples")
# Making outputs, as opposed to looking at the original and checking what was made.
_MAKING: Final = frozenset({"poster", "encode"})
_SOON_SECONDS: Final = 0.015
_LATER_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class Subject:
    """What is processed, and how often."""

    name: str
    path: Path
    content_type: str
    handler: handlers.Handler
    rounds: int
    aim: float
    poll_seconds: float


@dataclass(frozen=True, slots=True)
class Through:
    """One run through the platform, in seconds."""

    total: float
    opening: float
    putting: float
    completing: float
    segments: dict[str, float]
    tools: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image-rounds", type=int, default=5)
    parser.add_argument("--video-rounds", type=int, default=3)
    parser.add_argument("--only", choices=("image", "video"))
    parser.add_argument("--keep", type=Path, help="keep the generated files here, and reuse them")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    report = Report("overhead")
    say(f"load average {harness.load_average():.2f} at the start")
    with harness.stand() as here:
        source = options.keep or here.work
        source.mkdir(parents=True, exist_ok=True)
        subjects = [
            Subject(
                "image",
                _photograph(source / "photograph-12mp.jpg"),
                "image/jpeg",
                image.handle,
                options.image_rounds,
                1.3,
                _SOON_SECONDS,
            ),
            Subject(
                "video",
                _clip(source / "clip-30s.mp4"),
                "video/mp4",
                video.handle,
                options.video_rounds,
                1.05,
                _LATER_SECONDS,
            ),
        ]
        with harness.service(here, "api"), harness.service(here, "worker") as worker:
            harness.await_worker(here, worker)
            for subject in subjects:
                if options.only in (None, subject.name):
                    _compare(here, report, subject, random.Random(options.seed))
    report.figure("load average at the end", harness.load_average())
    report.close()


def _compare(here: Stand, report: Report, subject: Subject, chance: random.Random) -> None:
    say(f"\n{subject.name}: {subject.path.name}, {subject.path.stat().st_size / 1e6:.1f} MB")
    notes = asyncio.run(_noted(here, subject))
    beside = asyncio.run(_noted(here, subject, preview.handle)) if subject.name == "video" else None
    _through(here, subject)  # everything is warm, untimed
    found: dict[str, list[Any]] = defaultdict(list)
    for cycle in range(subject.rounds):
        for contender in chance.sample(["platform", "bare", "niced"], 3):
            match contender:
                case "platform":
                    found[contender].append(_through(here, subject))
                case "bare":
                    found[contender].append(notes.repeat())
                    if beside is not None:
                        found["beside"].append(beside.repeat())
                case "niced":
                    found[contender].append(notes.repeat(nice=10))
        say(
            f"  cycle {cycle + 1}, load {harness.load_average():.1f}: "
            f"platform {found['platform'][-1].total:.2f} s, "
            f"bare {sum(found['bare'][-1].values()):.2f} s, "
            f"bare and niced {sum(found['niced'][-1].values()):.2f} s"
        )
    _tell(report, subject, notes, found)


def _tell(
    report: Report, subject: Subject, notes: Notes, found: Mapping[str, Sequence[Any]]
) -> None:
    name = subject.name
    platform = [run.total for run in found["platform"]]
    bare = [sum(run.values()) for run in found["bare"]]
    making = [sum(s for n, s in run.items() if notes.makes(n)) for run in found["bare"]]
    report.figure(f"{name}: platform", spread(platform), "s")
    report.figure(f"{name}: bare with checks", spread(bare), "s")
    report.figure(f"{name}: bare without checks", spread(making), "s")
    ratio = ratios(platform, bare)
    report.figure(f"{name}: platform / bare with checks", ratio)
    report.figure(f"{name}: platform / bare without checks", ratios(platform, making))
    report.figure(
        f"{name}: platform / bare with checks, niced",
        ratios(platform, [sum(run.values()) for run in found["niced"]]),
    )
    starting = [run.get(Notes.START, 0.0) for run in found["bare"]]
    report.figure(
        f"{name}: platform / bare with checks, image process already up",
        ratios(platform, [b - s for b, s in zip(bare, starting, strict=True)]),
    )
    if "beside" in found:
        both = [b + sum(p.values()) for b, p in zip(bare, found["beside"], strict=True)]
        report.figure(f"{name}: platform / bare with checks and preview", ratios(platform, both))
    say(f"  where the time goes, in seconds ({name}):")
    for part in ("opening", "putting", "completing"):
        report.figure(f"{name}: {part}", spread([getattr(run, part) for run in found["platform"]]))
    for stage, seconds in _by_name([run.segments for run in found["platform"]]).items():
        report.figure(f"{name}: timeline, {stage}", seconds)
    for stage, seconds in _by_name([notes.by_stage(run) for run in found["bare"]]).items():
        report.figure(f"{name}: bare, {stage}", seconds)
    report.figure(f"{name}: tools inside", spread([run.tools for run in found["platform"]]))
    report.figure(
        f"{name}: outside of tools", spread([run.total - run.tools for run in found["platform"]])
    )
    report.aim(f"{name}: platform / bare with checks", ratio.median, most=subject.aim)


def _by_name(runs: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: spread([run.get(name, 0.0) for run in runs]) for name in names}


# ---------------------------------------------------------------- through the platform


def _through(here: Stand, subject: Subject) -> Through:
    """Open a slot, put, complete, and ask until it is ready."""
    with _Connection(here) as api:
        began = time.perf_counter()
        size = subject.path.stat().st_size
        slot = api.ask("POST", "/v1/media", {"size": size, "content_type": subject.content_type})
        opened = time.perf_counter()
        api.put(slot["upload"], subject.path)
        put = time.perf_counter()
        body = api.ask("POST", f"{slot['links']['self']}/complete")
        completed = time.perf_counter()
        while body["state"] not in ("ready", "failed"):
            # Often only towards the end: asking costs the platform time too.
            late = body["stage"] in ("verify", "publish")
            time.sleep(_SOON_SECONDS if late else subject.poll_seconds)
            body = api.ask("GET", slot["links"]["self"])
        ready = time.perf_counter()
        if body["state"] != "ready":
            raise RuntimeError(f"the {subject.name} is {body['state']}: {body['error']}")
        told = api.ask("GET", slot["links"]["timeline"])
        segments: dict[str, float] = defaultdict(float)
        for segment in told["segments"]:
            segments[segment["name"]] += segment["seconds"]
        used = asyncio.run(_tool_seconds(here, body["job"]["id"]))
        if subject.name == "video":  # its preview may still be at work; the next run starts alone
            harness.wait_until(lambda: asyncio.run(_quiet(here)), seconds=60)
    return Through(
        total=ready - began,
        opening=opened - began,
        putting=put - opened,
        completing=completed - put,
        segments=dict(segments),
        tools=used,
    )


async def _tool_seconds(here: Stand, job: str) -> float:
    """What the commands of a job's attempt took, by the worker's own watch."""
    async with harness.database(here.dsn) as connection:
        commands = await connection.fetchval(
            "SELECT commands FROM attempts WHERE job_id = $1", ids.decode(ids.JOB, job)
        )
    return float(sum(command["wall_seconds"] for command in commands))


async def _quiet(here: Stand) -> bool:
    async with harness.database(here.dsn) as connection:
        waiting = "SELECT count(*) FROM jobs WHERE state IN ('queued', 'processing')"
        return bool(await connection.fetchval(waiting) == 0)


class _Connection:
    """One kept-alive connection to the API, with as little of a client around it as possible."""

    def __init__(self, here: Stand) -> None:
        self._authorization = {"Authorization": f"Bearer {here.api_key}"}
        self._http = http.client.HTTPConnection("127.0.0.1", here.settings.port, timeout=60)

    def __enter__(self) -> _Connection:
        self._http.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = dict(self._authorization)
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body), "application/json"
        return json.loads(self._request(method, path, data, headers))

    def put(self, signed: Mapping[str, Any], path: Path) -> None:
        address = urlsplit(signed["url"])
        with path.open("rb") as file:
            self._request("PUT", f"{address.path}?{address.query}", file, signed["headers"])

    def _request(self, method: str, path: str, data: Any, headers: Mapping[str, str]) -> bytes:
        self._http.request(method, path, data, headers)
        answer = self._http.getresponse()
        read = answer.read()
        if answer.status >= 400:
            raise RuntimeError(f"{method} {path}: {read.decode()}")
        return read


# ---------------------------------------------------------------- bare


@dataclass(frozen=True, slots=True)
class Step:
    """One tool run or one question to an image process, as a handler asked for it."""

    stage: str
    argv: tuple[str, ...] = ()
    stdin: Path | None = None
    request: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[tuple[Path, int], ...] = ()
    """Each with the flags that it was opened with."""


class Notes:
    """What a handler asks for, noted while it is done; it can be repeated without the handler.

    It is the `Work` of the handler, without anything of the platform behind it.
    """

    START: Final = "start"
    """The name of the start of the image process among the steps."""

    def __init__(self, settings: Settings, subject: Subject, folder: Path, *, role: str) -> None:
        self._toolbox: Toolbox = tools.resolve(settings.ffmpeg, settings.ffprobe)
        self._path = subject.path
        self._stage = ""
        self._steps: dict[str, Step] = {}
        self._child: _ImageProcess | None = None
        self.settings = settings
        self.out = folder
        self.claim = _claim(subject, role)
        self.original = _original(subject)
        recipe = recipes.find("web")
        assert recipe is not None
        self.recipe: Recipe = recipe

    def repeat(self, *, nice: int = 0) -> dict[str, float]:
        """Do all of it again, one step after the other; the seconds of each."""
        seconds: dict[str, float] = {}
        child: _ImageProcess | None = None
        try:
            for name, step in self._steps.items():
                if step.argv:
                    began = time.perf_counter()
                    _run(step.argv, step.stdin, self.out, nice=nice)
                    seconds[name] = time.perf_counter() - began
                    continue
                if child is None:
                    began = time.perf_counter()
                    child = _ImageProcess(nice=nice)
                    child.ask({"op": "hello"}, ())
                    seconds[Notes.START] = time.perf_counter() - began
                began = time.perf_counter()
                with _opened(step.files) as fds:
                    child.ask(step.request, fds)
                seconds[name] = time.perf_counter() - began
        finally:
            if child is not None:
                child.close()
        return seconds

    def makes(self, name: str) -> bool:
        """Whether a step makes an output, as opposed to looking and checking."""
        step = self._steps.get(name)
        if step is None:
            return name == Notes.START
        return step.stage in _MAKING and step.request.get("op") not in ("preview", "verify")

    def by_stage(self, seconds: Mapping[str, float]) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for name, took in seconds.items():
            found[self._steps[name].stage if name in self._steps else name] += took
        return dict(found)

    # What a handler sees.

    async def enter(self, stage: str) -> None:
        self._stage = stage

    def progress(self, percent: float, detail: Mapping[str, Any] | None = None) -> None:
        pass

    async def fetch(self) -> Path:
        return self._path

    async def describe(self, found: Description) -> None:
        pass

    async def show_preview(self, preview: Mapping[str, Any], found: Description) -> None:
        pass

    async def publish_early(self, outputs: Sequence[Output]) -> bool:
        raise AssertionError("its recipe has no stages")

    async def children(self) -> list[Child]:
        return []

    async def sidecars(self) -> list[Sidecar]:
        return []

    async def slots(self, queue: str) -> int:
        return 1

    async def keep(self, path: Path) -> Kept:
        raise AssertionError("it has no parent")

    async def bring(self, kept: Kept, name: str) -> Path:
        raise AssertionError("it has no children")

    async def run_tool(
        self,
        command: Command,
        jail: Jail,
        *,
        on_line: Callable[[str], None] | None = None,
        stall_seconds: float | None = None,
    ) -> Finished:
        argv = (str(self._toolbox.program(command.tool)), *command.args)
        self._note(command.label, Step(self._stage, argv=argv, stdin=command.stdin))
        began = time.monotonic()
        done = _run(argv, command.stdin, self.out)
        for line in done.stdout.decode().splitlines() if on_line is not None else ():
            on_line(line)  # type: ignore[misc]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return Finished(
            returncode=done.returncode,
            stdout=b"" if on_line else done.stdout,
            stderr_tail=done.stderr.decode("utf-8", "replace"),
            stderr_head="",
            wall_seconds=time.monotonic() - began,
            cpu_seconds=used.ru_utime + used.ru_stime,
            max_rss_bytes=used.ru_maxrss * 1024,
        )

    async def imaging(
        self, request: Mapping[str, Any], fds: Sequence[int], *, wall_seconds: float
    ) -> dict[str, Any]:
        files = tuple((Path(os.readlink(f"/proc/self/fd/{fd}")), _flags(fd)) for fd in fds)
        self._note(request["op"], Step(self._stage, request=dict(request), files=files))
        if self._child is None:
            self._child = _ImageProcess()
        return self._child.ask(request, fds)

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _note(self, label: str, step: Step) -> None:
        self._steps[f"{len(self._steps) + 1} {label}"] = step


async def _noted(here: Stand, subject: Subject, handler: handlers.Handler | None = None) -> Notes:
    """Run a handler once, for its notes. The files that it leaves are what the checks look at."""
    role = "main" if handler is None else "preview"
    folder = here.work / f"bare-{subject.name}-{role}"
    folder.mkdir()
    notes = Notes(here.settings, subject, folder, role=role)
    try:
        outcome = await (handler or subject.handler)(notes)
    finally:
        notes.close()
    if not isinstance(outcome, Done):
        raise RuntimeError(f"the {subject.name} is no {subject.name}: {outcome}")
    return notes


def _run(
    argv: Sequence[str], stdin: Path | None, folder: Path, *, nice: int = 0
) -> subprocess.CompletedProcess[bytes]:
    prefix = ["nice", "-n", str(nice)] if nice else []
    with (stdin or Path(os.devnull)).open("rb") as source:
        done = subprocess.run(
            [*prefix, *argv], stdin=source, capture_output=True, cwd=folder, check=False
        )
    if done.returncode != 0:
        raise RuntimeError(f"{argv} failed: {done.stderr.decode('utf-8', 'replace')[-2000:]}")
    return done


class _ImageProcess:
    """`python -m mediamill.imaging` without a pool or a jail around it."""

    def __init__(self, *, nice: int = 0) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        prefix = ["nice", "-n", str(nice)] if nice else []
        with theirs:
            fd = theirs.fileno()
            argv = [*prefix, sys.executable, "-I", "-m", "mediamill.imaging", "--fd", str(fd)]
            self._process = subprocess.Popen(argv, pass_fds=(fd,), stdin=subprocess.DEVNULL)

    def ask(self, request: Mapping[str, Any], fds: Sequence[int]) -> dict[str, Any]:
        message = wire.pack(dict(request), limit=wire.MAX_REQUEST_BYTES)
        socket.send_fds(self._connection, [message], list(fds))
        length = wire.body_length(self._read(wire.LENGTH.size), limit=wire.MAX_ANSWER_BYTES)
        answer = wire.unpack(self._read(length))
        if "failure" in answer:
            raise RuntimeError(f"{request} failed: {answer['failure']}")
        return answer

    def close(self) -> None:
        self._connection.close()
        self._process.wait(10)

    def _read(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = self._connection.recv(length - len(data))
            if not part:
                raise RuntimeError("the image process ended")
            data += part
        return data


@contextmanager
def _opened(files: Sequence[tuple[Path, int]]) -> Iterator[list[int]]:
    fds: list[int] = []
    try:
        for path, flags in files:
            fds.append(os.open(path, flags | os.O_CREAT if flags & os.O_RDWR else flags, 0o600))
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def _flags(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE


def _claim(subject: Subject, role: str) -> Claim:
    now = datetime.now(UTC)
    return Claim(
        tenant_id=harness.TENANT,
        id=ids.new(),
        kind=subject.name,
        queue=subject.name,
        role=role,
        schema_version=1,
        media_id=ids.new(),
        recipe="web",
        recipe_version=1,
        generation=1,
        payload={},
        attempt=1,
        max_attempts=5,
        crashes=0,
        resource_failures=0,
        fence=1,
        priority=0,
        turn=0,
        queued_at=now,
        started_at=now,
        parent_id=None,
        timeout_seconds=None,
    )


def _original(subject: Subject) -> Original:
    return Original(
        id=ids.new(),
        kind=subject.name,
        filename=subject.path.name,
        content_type=subject.content_type,
        size=subject.path.stat().st_size,
        sha256=None,
        upload_key="uploads/default/bench/original",
        object_version="1",
        detected_type=None,
        recipe="web",
        recipe_version=1,
        generation=1,
        preview=None,
        deleted_at=None,
        state="processing",
    )


# ---------------------------------------------------------------- what is processed


def _photograph(path: Path) -> Path:
    """12 megapixels like a camera's: the sample enlarged, its own fine detail laid over, and noise.

    An enlarged picture alone would be smooth, and far too easy for encoders.
    """
    if path.exists():
        return path
    import pyvips

    width, height = 4000, 3000
    small = pyvips.Image.new_from_file(str(SAMPLES / "photograph.jpg"))
    large = small.thumbnail_image(width, height=height, crop="centre", size="both")
    fine = small.cast("float") - small.gaussblur(3.0).cast("float")
    pair = pyvips.Image.arrayjoin([fine, fine.fliphor()], across=2)
    tile = pyvips.Image.arrayjoin([pair, pair.flipver()], across=1)
    across, down = -(-width // tile.width), -(-height // tile.height)
    detail = tile.replicate(across, down).crop(0, 0, width, height)
    noise = pyvips.Image.gaussnoise(width, height, sigma=3.0, mean=0.0, seed=1)
    part = path.with_suffix(".part.jpg")
    (large + detail * 0.6 + noise).cast("uchar").copy(interpretation="srgb").jpegsave(
        str(part), Q=92
    )
    return part.rename(path)


def _clip(path: Path) -> Path:
    """30 seconds of 720p with sound: the sample from the beginning as often as it takes."""
    if path.exists():
        return path
    ffmpeg = str(tools.resolve().ffmpeg)
    part = path.with_suffix(".part.mp4")
    subprocess.run(
        [
            *(ffmpeg, "-hide_banner", "-nostdin", "-loglevel", "error", "-y"),
            *("-stream_loop", "-1", "-i", str(SAMPLES / "video.mp4"), "-t", "30"),
            *("-vf", "scale=1280:720,setsar=1", "-c:v", "libx264", "-preset", "fast"),
            *("-crf", "20", "-c:a", "aac", "-b:a", "128k", "-movflags", "+faststart", str(part)),
        ],
        check=True,
    )
    return part.rename(path)


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        sys.exit(f"the handler failed: {failure.problem}")

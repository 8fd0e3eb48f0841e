"""Video: through the platform against bare ffmpeg, a ladder in one run against one run for each
size, two pinned workers against one, what a killed worker costs, memory over length, honest
progress, and how soon a preview shows while every video slot is busy.

Contenders of one part follow each other in the same run; compare within it.

    QUICK=1      short sources, for trying it out
    ONLY=a,b     some parts of: bare, ladder, shared, killed, memory, progress, preview
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx2 as httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.harness import Report, Stand, say

from mediamill import config, probe, tools
from mediamill.handlers import streaming, tracks
from mediamill.handlers.tracks import Track
from mediamill.probe import MediaInfo
from mediamill.recipes.video import HlsOutput

QUICK: Final = bool(os.environ.get("QUICK"))
PARTS: Final = ("bare", "ladder", "shared", "killed", "memory", "progress", "preview")
BARE_SECONDS: Final = 10 if QUICK else 60
BARE_SIZE: Final = "960x540" if QUICK else "1920x1080"
SHARED_SECONDS: Final = 80 if QUICK else 300
SHARED_SIZE: Final = "640x360" if QUICK else "1280x720"
MEMORY_MINUTES: Final = (1, 5) if QUICK else (1, 60)
PREVIEWS: Final = 20 if QUICK else 100
_PATIENCE_SECONDS: Final = 3600.0
_KIB: Final = 1024

LADDER: Final = [
    {"short_side": 1080, "max_video_kbps": 5000},
    {"short_side": 720, "max_video_kbps": 2800},
    {"short_side": 480, "max_video_kbps": 1400},
    {"short_side": 360, "max_video_kbps": 800},
]
HLS: Final[dict[str, Any]] = {"type": "hls", "ladder": LADDER, "smallest_first": False}


@dataclass(frozen=True, slots=True)
class Ended:
    """One film through the platform."""

    body: dict[str, Any]
    seconds: float
    shown: list[tuple[float, float]]
    """Seconds since it was accepted, and the percent told then."""


def main() -> None:
    wanted = [p for p in os.environ.get("ONLY", ",".join(PARTS)).split(",") if p]
    report = Report("video")
    with harness.stand() as bare_stand:
        here = _with_recipes(bare_stand)
        for part in wanted:
            say(f"{part} (load {harness.load_average():.1f})")
            _PARTS[part](here, report)
    report.close()


# ---------------------------------------------------------------- the parts


def against_bare(here: Stand, report: Report) -> None:
    """Accepted to ready, against one ffmpeg command that makes the same outputs unchecked."""
    source = film(here, "bare.mp4", BARE_SIZE, BARE_SECONDS)
    ours, theirs = [], []
    with running(here, "image=1,video=1,maintenance=1"):
        for _ in range(1 if QUICK else 2):
            theirs.append(_bare(here, source))
            ours.append(through(here, source, "ladder").seconds)
    report.figure("bare: ffmpeg alone", harness.spread(theirs), "s")
    report.figure("bare: accepted to ready", harness.spread(ours), "s")
    report.aim("wall time against bare ffmpeg", harness.ratios(ours, theirs).median, most=1.05)


def _bare(here: Stand, source: Path) -> float:
    """The recipe of the ladder as one would write it down for ffmpeg."""
    info = _info(here, source)
    rungs = streaming.ladder(HlsOutput.model_validate_json(json.dumps(HLS)), info)
    target = here.work / "bare"
    target.mkdir(exist_ok=True)
    split = f"[0:v]split={len(rungs)}" + "".join(f"[s{n}]" for n in range(len(rungs)))
    graph = [split]
    args: list[str] = []
    for n, rung in enumerate(rungs):
        coding = rung.coding
        graph.append(f"[s{n}]scale={coding.width}:{coding.height},format=yuv420p[v{n}]")
        args += [
            *("-map", f"[v{n}]", f"-maxrate:v:{n}", f"{coding.kbps}k"),
            *(f"-bufsize:v:{n}", f"{2 * coding.kbps}k"),
        ]
    names = " ".join(f"v:{n},agroup:a" for n in range(len(rungs)))
    began = time.monotonic()
    subprocess.run(
        [
            *(_toolbox().ffmpeg, "-v", "error", "-nostdin", "-y", "-i", source),
            *("-filter_complex", ";".join(graph), *args, "-map", "0:a:0"),
            *("-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-g", "60"),
            *("-keyint_min", "60", "-sc_threshold", "0", "-c:a", "aac", "-b:a", "128k"),
            *("-f", "hls", "-hls_time", "6", "-hls_playlist_type", "vod"),
            *("-hls_segment_type", "fmp4", "-master_pl_name", "master.m3u8"),
            *("-var_stream_map", f"{names} a:0,agroup:a,default:yes"),
            *("-hls_segment_filename", "v%v_%03d.m4s", "-hls_fmp4_init_filename", "init_%v.mp4"),
            "v%v.m3u8",
        ],
        cwd=target,
        check=True,
    )
    return time.monotonic() - began


def one_run_against_four(here: Stand, report: Report) -> None:
    """Processor time of the ladder in one run, and in a run for each size."""
    source = film(here, "bare.mp4", BARE_SIZE, BARE_SECONDS)
    info = _info(here, source)
    wanted = HlsOutput.model_validate_json(json.dumps(HLS))
    rungs = streaming.ladder(wanted, info)
    grid = tracks.grid(info, most_rate=60, group_seconds=2)
    together, apart = [], []
    for _ in range(1 if QUICK else 3):
        together.append(_encode(here, source, info, grid, rungs))
        apart.append(sum(_encode(here, source, info, grid, [rung]) for rung in rungs))
    report.figure("ladder: one run", harness.spread(together), "CPU s")
    report.figure(f"ladder: {len(rungs)} runs", harness.spread(apart), "CPU s")
    report.aim(
        "ladder in one run against several", harness.ratios(together, apart).median, most=0.9
    )


def _encode(
    here: Stand, source: Path, info: MediaInfo, grid: tracks.Grid, some: Sequence[Track]
) -> float:
    args = tracks.plan(info, grid, some, limit_seconds=3600)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with source.open("rb") as file:
        subprocess.run(
            [_toolbox().ffmpeg, *args],
            stdin=file,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=here.work,
            check=True,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def shared(here: Stand, report: Report) -> None:
    """Two workers of one core each against one of them, on the same film."""
    source = film(here, "shared.mp4", SHARED_SIZE, SHARED_SECONDS)
    with ExitStack() as stack:
        stack.enter_context(harness.service(here, "api"))
        stack.enter_context(harness.service(here, "worker", slots="image=1,maintenance=1"))
        found: dict[int, tuple[float, float, float]] = {}
        for count in (1, 2):
            with pinned(here, range(count)):
                ended = through(here, source, "single" if count == 1 else "shared")
            found[count] = (ended.seconds, _encode_seconds(here, ended), _cpu(here, ended))
    for count, (wall, encode, cpu) in found.items():
        report.figure(f"shared: {count} worker(s)", wall, "s")
        report.figure(f"shared: {count} worker(s), encode stage", encode, "s")
        report.figure(f"shared: {count} worker(s), processor time", cpu, "CPU s")
    report.aim("two workers, faster by", found[1][0] / found[2][0], least=1.6)
    report.figure("two workers, encode stage faster by", found[1][1] / found[2][1])
    report.aim("two workers, processor time against one", found[2][2] / found[1][2], most=1.2)


def killed(here: Stand, report: Report) -> None:
    """A worker is killed when nine tenths are encoded: what was lost, against everything."""
    source = film(here, "shared.mp4", SHARED_SIZE, SHARED_SECONDS)
    with ExitStack() as stack:
        stack.enter_context(harness.service(here, "api"))
        stack.enter_context(harness.service(here, "worker", slots="image=1,maintenance=1"))
        with pinned(here, [0]) as pids:
            media_id = upload(here, source, "shared")
            total = _wait_for_share(here, media_id, 0.9)
            os.kill(pids[0], signal.SIGKILL)
        with pinned(here, [0]):
            ended = wait(here, media_id)
    lost = [
        (row["ended"] - row["started_at"]).total_seconds()
        for row in rows(
            here,
            "SELECT a.started_at, least(coalesce(a.finished_at, now()), a.started_at +"
            " interval '10 minutes') AS ended FROM attempts AS a JOIN jobs AS j"
            " ON (j.tenant_id, j.id) = (a.tenant_id, a.job_id)"
            " WHERE j.kind = 'video.piece' AND a.outcome = 'lost' AND j.media_id = $1",
            _uuid(ended.body["id"]),
        )
    ]
    report.figure("killed: pieces", float(total))
    report.aim("killed: pieces encoded twice", float(len(lost)), most=1)
    report.figure("killed: lost with the lease", sum(lost), "s at most")
    report.figure("killed: all encoding", _cpu(here, ended), "CPU s")


def memory(here: Stand, report: Report) -> None:
    """The largest tool and the worker itself, over a short film and a long one."""
    peaks = []
    for minutes in MEMORY_MINUTES:
        source = film(here, f"memory-{minutes}.mp4", "160x90", minutes * 60, rate=10)
        with running(here, "image=1,video=1,maintenance=1") as worker:
            ended = through(here, source, "small")
            status = Path(f"/proc/{worker}/status").read_text()
        own = int(status.split("VmHWM:")[1].split()[0]) * _KIB
        largest = max(c["max_rss_bytes"] for c in _commands(here, ended) if "max_rss_bytes" in c)
        peaks.append((largest, own))
        report.figure(f"memory: {minutes} min, largest tool", largest / _KIB**2, "MiB")
        report.figure(f"memory: {minutes} min, worker", own / _KIB**2, "MiB")
    report.aim("memory, long against short: tool", peaks[1][0] / peaks[0][0], most=1.2)
    report.aim("memory, long against short: worker", peaks[1][1] / peaks[0][1], most=1.2)


def progress(here: Stand, report: Report) -> None:
    """How far the percent told is from the share of time that has passed."""
    source = film(here, "bare.mp4", BARE_SIZE, BARE_SECONDS)
    with running(here, "image=1,video=1,maintenance=1"):
        ended = through(here, source, "ladder")
    errors = [abs(told / 100 - at / ended.seconds) for at, told in ended.shown]
    assert [told for _, told in ended.shown] == sorted(told for _, told in ended.shown)
    report.figure("progress: times asked", float(len(errors)))
    report.figure("progress: mean error", sum(errors) / len(errors), "of the whole")


def preview(here: Stand, report: Report) -> None:
    """From the answer to `complete` to the placeholder in the status, while the one video slot is
    at work on something long, and then on the films before."""
    busy = film(here, "shared.mp4", SHARED_SIZE, SHARED_SECONDS)
    short = film(here, "short.mp4", "1280x720", 6)
    told = []
    with running(here, "image=2,video=1,maintenance=1"), _client(here) as client:
        occupied = upload(here, busy, "single")
        _await(client, occupied, lambda body: body["state"] == "processing")
        _await(client, occupied, lambda body: body["preview"] is not None)
        for _ in range(PREVIEWS):
            media_id = upload(here, short, "single")
            began = time.monotonic()
            _await(client, media_id, lambda body: body["preview"] is not None)
            told.append(time.monotonic() - began)
        last = client.get(f"/v1/media/{media_id}").json()
    assert last["job"]["state"] == "queued", "there was a free slot for its encode"
    report.aim("preview: p50 after complete", harness.percentile(told, 0.5), most=1.0)
    report.aim("preview: p99 after complete", harness.percentile(told, 0.99), most=3.0)


def _await(client: httpx.Client, media_id: str, holds: Callable[[dict[str, Any]], bool]) -> None:
    harness.wait_until(
        lambda: holds(client.get(f"/v1/media/{media_id}").json()), seconds=120, pause_seconds=0.02
    )


_PARTS: Final = {
    "bare": against_bare,
    "ladder": one_run_against_four,
    "shared": shared,
    "killed": killed,
    "memory": memory,
    "progress": progress,
    "preview": preview,
}


# ---------------------------------------------------------------- the platform


def _with_recipes(bare_stand: Stand) -> Stand:
    folder = bare_stand.work / "recipes"
    folder.mkdir()
    low = {**HLS, "ladder": [{"short_side": 96, "max_video_kbps": 100}], "preset": "ultrafast"}
    for name, hls, pieces in (
        ("ladder", HLS, False),
        ("single", HLS, False),
        ("shared", HLS, True),
        ("small", low, False),
    ):
        body = {"name": name, "version": 1, "video": [hls], "pieces": pieces}
        (folder / f"{name}.v1.json").write_text(json.dumps(body))
    changed = {"recipes_dir": folder, "piece_seconds": 20.0}
    return replace(bare_stand, settings=bare_stand.settings.model_copy(update=changed))


@contextmanager
def running(here: Stand, slots: str) -> Iterator[int]:
    """An API and a worker; the worker's process id."""
    with harness.service(here, "api"), harness.service(here, "worker", slots=slots) as worker:
        harness.await_worker(here, worker)
        yield worker


@contextmanager
def pinned(here: Stand, cores: Sequence[int] | range) -> Iterator[list[int]]:
    """Workers for video alone, each on one core and with one slot; their process ids."""
    allowed = os.sched_getaffinity(0)
    with ExitStack() as stack:
        pids = []
        for core in cores:
            os.sched_setaffinity(0, {core})
            try:
                pids.append(stack.enter_context(harness.service(here, "worker", slots="video=1")))
            finally:
                os.sched_setaffinity(0, allowed)
            harness.await_worker(here, pids[-1])
        yield pids


def upload(here: Stand, source: Path, recipe: str) -> str:
    with _client(here) as client:
        slot = client.post(
            "/v1/media",
            json={"size": source.stat().st_size, "filename": source.name, "recipe": recipe},
        ).json()
        wanted = slot["upload"]
        put = httpx.put(
            wanted["url"], headers=wanted["headers"], content=source.read_bytes(), timeout=600
        )
        assert put.status_code == 200, put.text
        assert client.post(f"/v1/media/{slot['id']}/complete").status_code == 202
        media_id: str = slot["id"]
        return media_id


def wait(here: Stand, media_id: str) -> Ended:
    began = time.monotonic()
    shown: list[tuple[float, float]] = []
    with _client(here) as client:
        while time.monotonic() - began < _PATIENCE_SECONDS:
            body = client.get(f"/v1/media/{media_id}").json()
            at = time.monotonic() - began
            if body["state"] == "ready":
                return Ended(body, at, shown)
            assert body["state"] != "failed", body["error"]
            if body["progress"] is not None:
                shown.append((at, body["progress"]))
            time.sleep(0.25)
    raise TimeoutError(media_id)


def through(here: Stand, source: Path, recipe: str) -> Ended:
    return wait(here, upload(here, source, recipe))


def _client(here: Stand) -> httpx.Client:
    headers = {"Authorization": f"Bearer {here.api_key}"}
    return httpx.Client(base_url=here.settings.base_url, headers=headers, timeout=60)


def _wait_for_share(here: Stand, media_id: str, share: float) -> int:
    """Return when that share of the pieces is encoded; how many there are."""
    statement = (
        "SELECT count(*) AS pieces, count(*) FILTER (WHERE state = 'completed') AS done,"
        " count(*) FILTER (WHERE state = 'processing') AS at_work"
        " FROM jobs WHERE media_id = $1 AND kind = 'video.piece'"
    )
    while True:
        (row,) = rows(here, statement, _uuid(media_id))
        done = row["pieces"] and row["done"] >= int(share * row["pieces"])
        if done and row["at_work"]:
            time.sleep(1.0)  # into the piece
            return int(row["pieces"])
        time.sleep(0.1)


def rows(here: Stand, statement: str, *args: object) -> list[Any]:
    async def ask() -> list[Any]:
        async with harness.database(here.dsn) as connection:
            return list(await connection.fetch(statement, *args))

    return asyncio.run(ask())


def _commands(here: Stand, ended: Ended) -> list[dict[str, Any]]:
    """Every tool that ran for a media, with what it used."""
    found = rows(
        here,
        "SELECT a.commands FROM attempts AS a JOIN jobs AS j"
        " ON (j.tenant_id, j.id) = (a.tenant_id, a.job_id)"
        " WHERE j.media_id = $1 AND j.role <> 'preview'",
        _uuid(ended.body["id"]),
    )
    return [command for row in found for command in row["commands"] or ()]


def _cpu(here: Stand, ended: Ended) -> float:
    return float(sum(c.get("cpu_seconds", 0.0) for c in _commands(here, ended)))


def _encode_seconds(here: Stand, ended: Ended) -> float:
    """From the first encode to the end of the last one."""
    (row,) = rows(
        here,
        "SELECT min(at) FILTER (WHERE stage = 'encode') AS began,"
        " max(at) FILTER (WHERE stage IN ('join', 'package')) AS ended"
        " FROM transitions WHERE media_id = $1 AND subject = 'job'",
        _uuid(ended.body["id"]),
    )
    return float((row["ended"] - row["began"]).total_seconds())


def _uuid(media_id: str) -> Any:
    from mediamill import ids

    return ids.decode(ids.MEDIA, media_id)


# ---------------------------------------------------------------- films


def film(here: Stand, name: str, size: str, seconds: int, *, rate: int = 30) -> Path:
    """A moving picture with some noise and a tone, made once."""
    path = here.work / name
    if not path.exists():
        noise = "" if size == "160x90" else ",noise=alls=6:allf=t"
        subprocess.run(
            [
                *(_toolbox().ffmpeg, "-v", "error", "-nostdin"),
                *("-f", "lavfi", "-i", f"testsrc2=s={size}:r={rate}{noise},format=yuv420p"),
                *("-f", "lavfi", "-i", "sine=frequency=330:sample_rate=48000"),
                *("-t", str(seconds), "-c:v", "libx264", "-preset", "ultrafast", "-crf", "22"),
                *("-g", str(rate * 4), "-c:a", "aac", path),
            ],
            check=True,
        )
    return path


def _info(here: Stand, path: Path) -> MediaInfo:
    with path.open("rb") as file:
        done = subprocess.run(
            [_toolbox().ffprobe, *probe.ffprobe_args()], stdin=file, capture_output=True, check=True
        )
    return probe.parse(done.stdout, config.load(data_dir=here.work))


def _toolbox() -> tools.Toolbox:
    return tools.resolve()


if __name__ == "__main__":
    main()

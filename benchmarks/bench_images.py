"""Pictures through the whole platform: against plain loops over libraries, how soon a placeholder
is there, how memory behaves, how fast a bomb is refused.

Contenders take turns, and every ratio is of neighbours in time, so that what else the machine does
disturbs both. All of them run at the same niceness, in as many processes as there are cores.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx2 as httpx
from benchmarks import harness, image_contenders
from benchmarks.harness import Report, Stand, percentile, ratios, say, spread
from PIL import Image, ImageDraw
from tests import make_media

from mediamill import observability, sandbox, tools
from mediamill.failures import Code, Failure
from mediamill.image_children import confined_pool

HERE: Final = Path(__file__).resolve().parent
CORES: Final = os.cpu_count() or 1
NICENESS: Final = 10
Body = dict[str, Any]
PHOTOGRAPH: Final = HERE.parent / "src" / "mediamill" / "samples" / "photograph.jpg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument("--images", type=int, default=4 * CORES, help="pictures in a round")
    parser.add_argument("--previews", type=int, default=100)
    parser.add_argument("--mixed", type=int, default=1000, help="pictures of the memory run")
    parser.add_argument("--sharp", type=Path, help="a folder in which `npm install sharp` was run")
    parser.add_argument("--only", default="throughput,preview,memory,bomb")
    options = parser.parse_args()
    observability.configure_logs("bench", level="warning")
    report = Report("images")
    parts = options.only.split(",")
    say(f"{CORES} cores, load average {harness.load_average():.2f} at the start")
    with tempfile.TemporaryDirectory(prefix="mediamill-bench-recipes-") as folder:
        _write_recipe(Path(folder))
        os.environ["MEDIAMILL_RECIPES_DIR"] = folder
        with harness.stand() as here:
            if "bomb" in parts:
                asyncio.run(bomb(here, report))
            with harness.service(here, "api"):
                if "throughput" in parts:
                    throughput(here, report, options.rounds, options.images, options.sharp)
                if "preview" in parts:
                    previews(here, report, options.previews)
                if "memory" in parts:
                    memory(here, report, options.mixed)
    report.close()


def _write_recipe(folder: Path) -> None:
    """One small output: what is measured is the way to it."""
    wanted = {
        "name": "bench",
        "version": 1,
        "image": {"widths": [320], "formats": [{"format": "webp", "effort": 2}]},
        "video": [{"type": "mp4", "short_side": 1080, "preset": "slow"}],
    }
    (folder / "bench.v1.json").write_text(json.dumps(wanted))


# --- (a), (b) Throughput


def throughput(here: Stand, report: Report, rounds: int, count: int, sharp: Path | None) -> None:
    say(f"\nthroughput: {count} photographs of 12 megapixels, recipe web (12 files each)")
    sources = _photographs(here.work / "sources", count)
    contenders = ["platform", "libvips", *_others(sharp)]
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    used: dict[str, list[float]] = {name: [] for name in contenders}
    with _worker(here, f"image={CORES}") as pid, _client(here) as client:
        _through(here, client, sources[:CORES])  # warm
        for number in range(rounds):
            for name in random.Random(number).sample(contenders, len(contenders)):
                began, cpu = time.perf_counter(), _cpu(name, pid)
                if name == "platform":
                    seconds = _through(here, client, sources)
                else:
                    _loops(name, here.work / "made", sources, sharp)
                    seconds = time.perf_counter() - began
                rates[name].append(count / seconds)
                used[name].append((_cpu(name, pid) - cpu) / count)
    for name in contenders:
        report.figure(f"{name}_images_per_second", spread(rates[name]), "images/s")
        report.figure(f"{name}_cpu_seconds_per_image", spread(used[name]), "s")
    # Says the same without what other programs of this machine take; checks of outputs included.
    report.figure("bare_libvips_cpu_to_platform", ratios(used["libvips"], used["platform"]))
    share = ratios(rates["platform"], rates["libvips"])
    report.figure("platform_to_bare_libvips", share)
    report.aim("platform_to_bare_libvips", share.median, least=0.9)
    for name in contenders[2:]:
        share = ratios(rates["platform"], rates[name])
        report.figure(f"platform_to_{name}", share)
        report.aim(f"platform_to_{name}", share.median, least=1.0)


def _cpu(name: str, worker: int) -> float:
    """Processor time so far, of the worker and its processes or of the loops that have ended."""
    if name == "platform":
        return harness.cpu_seconds(worker)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def _others(sharp: Path | None) -> list[str]:
    found = ["pillow"]
    if shutil.which("vipsthumbnail"):
        found.append("vipsthumbnail")
    else:
        say("  vipsthumbnail is not installed (apt install libvips-tools): left out")
    if sharp is not None and (sharp / "node_modules" / "sharp").is_dir() and shutil.which("node"):
        found.append("sharp")
    else:
        say("  sharp is not here (npm install sharp, then --sharp FOLDER): left out")
    return found


def _photographs(folder: Path, count: int) -> list[Path]:
    """Photographs as phones write them: stored lying, wide colors, each a little different."""
    folder.mkdir(parents=True, exist_ok=True)
    base = Image.open(PHOTOGRAPH).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    made = []
    for number in range(count):
        left = 7 * number % 100
        photo = base.crop((left, 0, left + 900, 675)).resize((4000, 3000), Image.Resampling.BICUBIC)
        path = folder / f"{number}.jpg"
        photo.save(path, quality=90, exif=exif, icc_profile=make_media.p3_profile())
        made.append(path)
    return made


def _through(
    here: Stand, client: httpx.Client, sources: Sequence[Path], recipe: str = "web"
) -> float:
    """Seconds from the first `complete` until every picture is ready."""
    slots = [_upload(client, path, recipe) for path in sources]
    began = time.perf_counter()
    for slot in slots:
        client.post(f"{slot['links']['self']}/complete").raise_for_status()
    asyncio.run(_ended(here, [slot["id"] for slot in slots]))
    seconds = time.perf_counter() - began
    states = {_media(client, slot)["state"] for slot in slots}
    assert states == {"ready"}, states
    return seconds


def _media(client: httpx.Client, slot: Body) -> Body:
    body: Body = client.get(slot["links"]["self"]).raise_for_status().json()
    return body


def _upload(
    client: httpx.Client, path: Path, recipe: str, content_type: str = "image/jpeg"
) -> Body:
    """A slot with its bytes in it, not completed yet."""
    data = path.read_bytes()
    wanted = {"size": len(data), "content_type": content_type, "recipe": recipe}
    slot: Body = client.post("/v1/media", json=wanted).raise_for_status().json()
    upload = slot["upload"]
    httpx.put(upload["url"], headers=upload["headers"], content=data).raise_for_status()
    return slot


async def _ended(here: Stand, media: Sequence[str]) -> None:
    from mediamill import ids

    keys = [ids.decode(ids.MEDIA, one) for one in media]
    async with harness.database(here.dsn) as connection:
        while await connection.fetchval(  # noqa: ASYNC110  # the bare loops are not told either
            "SELECT count(*) FROM media WHERE id = ANY($1) AND state NOT IN ('ready', 'failed')",
            keys,
        ):
            await asyncio.sleep(0.02)


def _loops(name: str, out: Path, sources: Sequence[Path], sharp: Path | None) -> None:
    """A contender in as many processes as there are cores, each with its share of the pictures."""
    running = []
    for number in range(CORES):
        folder = out / f"{name}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        mine = [str(path) for path in sources[number::CORES]]
        env = {**os.environ, "VIPS_CONCURRENCY": "1"}
        if name == "sharp":
            assert sharp is not None
            script = sharp / "mediamill-bench.cjs"
            script.write_text(image_contenders.SHARP)
            argv = ["node", str(script), str(folder), *mine]
            env["UV_THREADPOOL_SIZE"] = "1"
        else:
            argv = [sys.executable, str(HERE / "image_contenders.py"), name, str(folder), *mine]
        running.append(
            subprocess.Popen(["nice", "-n", str(NICENESS), *argv], env=env, start_new_session=True)
        )
    assert [process.wait() for process in running] == [0] * CORES, name


# --- (c) How soon the placeholder is there


def previews(here: Stand, report: Report, count: int) -> None:
    say(f"\nplaceholder: {count} photographs, one after the other, from `complete` to the hash")
    sources = _photographs(here.work / "previews", 5)
    with _worker(here, f"image={CORES},video=1"), _client(here) as client:
        for _ in range(3):
            _time_to_hash(client, sources[0])
        idle = [_time_to_hash(client, sources[n % 5]) for n in range(count)]
        film = _upload(client, _film(here), "bench", "video/mp4")
        client.post(f"{film['links']['self']}/complete").raise_for_status()
        while _media(client, film)["stage"] != "encode":
            time.sleep(0.1)
        busy = [_time_to_hash(client, sources[n % 5]) for n in range(count)]
        state = _media(client, film)["state"]
        if state != "processing":
            say(f"  the film was {state} before the end: make it longer")
        client.delete(film["links"]["self"]).raise_for_status()
    for name, seconds in (("idle", idle), ("videos_busy", busy)):
        for share, most in ((0.5, 0.3), (0.99, 1.0)):
            title = f"complete_to_hash_{name}_p{share * 100:.0f}_seconds"
            report.figure(title, percentile(seconds, share), "s")
            report.aim(title, percentile(seconds, share), most=most)


def _time_to_hash(client: httpx.Client, path: Path) -> float:
    slot = _upload(client, path, "bench")
    began = time.perf_counter()
    body: Body = client.post(f"{slot['links']['self']}/complete").raise_for_status().json()
    while not (body["preview"] or {}).get("blurhash"):
        assert body["state"] != "failed", body["error"]
        time.sleep(0.005)
        body = _media(client, slot)
    seconds = time.perf_counter() - began
    while _media(client, slot)["state"] not in ("ready", "failed"):
        time.sleep(0.02)
    return seconds


def _film(here: Stand) -> Path:
    """Two minutes of noise, which is enough work for as long as this takes."""
    short, film = here.work / "short.mp4", here.work / "film.mp4"
    ffmpeg = [str(tools.resolve(None, None).ffmpeg), "-v", "error", "-y"]
    source = "testsrc2=s=1920x1080:r=30,noise=alls=20:allf=t"
    coded = ["-c:v", "libx264", "-preset", "ultrafast", "-pix_fmt", "yuv420p"]
    subprocess.run(
        [*ffmpeg, "-f", "lavfi", "-i", source, "-t", "2", *coded, str(short)], check=True
    )
    subprocess.run(
        [*ffmpeg, "-stream_loop", "59", "-i", str(short), "-c", "copy", str(film)], check=True
    )
    return film


# --- (d) Memory over many pictures


def memory(here: Stand, report: Report, count: int) -> None:
    say(f"\nmemory: {count} mixed pictures through one worker")
    mixed = _mixed(here.work / "mixed")
    batch = 50
    with _worker(here, f"image={CORES}") as pid, _client(here) as client, _watched(pid) as seen:
        peaks, settled = [], []
        for start in range(0, count, batch):
            seen.peak = 0
            chance = random.Random(start)
            sources = [chance.choice(mixed) for _ in range(min(batch, count - start))]
            _through(here, client, sources, "bench")
            peaks.append(seen.peak / 1e6)
            settled.append(_pss(pid) / 1e6)
    early, late = peaks[1 : 1 + len(peaks) // 3], peaks[-(len(peaks) // 3 or 1) :]
    report.figure("memory_peaks_mb", spread(peaks), "MB, worker and its image processes:")
    say("    " + " ".join(f"{value:.0f}" for value in peaks))
    report.figure("memory_worker_alone_mb", spread(settled), "MB between batches, first to last:")
    say("    " + " ".join(f"{value:.0f}" for value in settled))
    growth = percentile(late, 0.5) / percentile(early or peaks, 0.5)
    report.figure("memory_last_third_to_first", growth)
    report.aim("memory_last_third_to_first", growth, most=1.1)


def _mixed(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    photo = Image.open(PHOTOGRAPH).convert("RGB")
    drawn = Image.new("RGBA", (900, 700), (0, 0, 0, 0))
    ImageDraw.Draw(drawn).ellipse((50, 50, 800, 600), fill=(200, 30, 30, 200))
    large = photo.resize((4000, 3000))
    data = Path(HERE.parent / "tests" / "data")
    files = {
        "photo.jpg": make_media.save(photo, "JPEG", quality=88),
        "laced.jpg": make_media.save(photo, "JPEG", quality=88, progressive=True),
        "ink.jpg": make_media.save(photo.convert("CMYK"), "JPEG", quality=88),
        "large.jpg": make_media.save(large, "JPEG", quality=85),
        "drawn.png": make_media.save(drawn, "PNG"),
        "gray16.png": make_media.gray_bands_16((8192, 32768, 57344), (900, 700)),
        "moving.gif": make_media.frames("GIF", [make_media.RED, make_media.BLUE] * 5, [100] * 10),
        "photo.webp": make_media.save(photo, "WEBP", quality=80),
        "photo.avif": make_media.save(photo, "AVIF", quality=60),
        "photo.tiff": make_media.save(photo, "TIFF", compression="tiff_lzw"),
        "photo.bmp": make_media.save(photo, "BMP"),
        "phone.heic": (data / "turned-in-container-and-exif.heic").read_bytes(),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in files]


@dataclass
class _Watch:
    peak: int = 0


@contextmanager
def _watched(root: int) -> Iterator[_Watch]:
    """The most memory that a process and its descendants held together, shared pages once."""
    watch, stop = _Watch(), threading.Event()

    def look() -> None:
        while not stop.wait(0.1):
            watch.peak = max(watch.peak, sum(map(_pss, harness.descendants(root))))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


# --- (e) A bomb


async def bomb(here: Stand, report: Report) -> None:
    """A PNG of 30,000 × 30,000 pixels in one bit each, to a warm image process in its jail."""
    data = _huge_png(30_000)
    say(f"\nbomb: 900 megapixels in {len(data):,} bytes")
    groups = tools.ProcessGroups()
    toolbox, confined = tools.resolve(None, None), sandbox.detect()
    request = {"op": "make", "outputs": [{"fd_index": 1, "format": "jpeg", "width": 320}]}
    limits = here.settings.image_limits("default").model_dump(exclude={"max_bytes"})
    async with confined_pool(here.settings, toolbox, confined, groups, size=1) as pool:
        await pool.warm()
        child = max(harness.descendants(os.getpid()), key=_image_process)
        before, seconds = _status(child, "VmRSS"), []
        for _ in range(5):
            with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as out:
                file.write(data)
                file.flush()
                began = time.perf_counter()
                try:
                    await pool.request(
                        {**request, "limits": limits},
                        [file.fileno(), out.fileno()],
                        wall_seconds=60,
                        tenant="bench",
                    )
                    raise AssertionError("the bomb was taken")
                except Failure as failure:
                    if failure.code is not Code.RESOURCE_LIMIT:
                        raise
                seconds.append(time.perf_counter() - began)
        grown = (_status(child, "VmHWM") - before) / 1e6
    groups.kill_all()
    report.figure("bomb_refused_seconds", spread(seconds), "s")
    report.aim("bomb_refused_seconds", max(seconds), most=0.2)
    report.figure("bomb_memory_mb", max(grown, 0.0), "MB more than the idle process")
    report.aim("bomb_memory_mb", max(grown, 0.0), most=50)


def _image_process(pid: int) -> int:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return 0
    return _status(pid, "VmRSS") if b"mediamill.imaging" in line else 0


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _huge_png(side: int) -> bytes:
    packer, packed = zlib.compressobj(9), io.BytesIO()
    row = b"\0" * (1 + side // 8)
    for _ in range(side):
        packed.write(packer.compress(row))
    packed.write(packer.flush())
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", packed.getvalue()), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(make_media.chunk(*chunk) for chunk in chunks)


# --- Services


@contextmanager
def _worker(here: Stand, slots: str) -> Iterator[int]:
    with harness.service(here, "worker", slots=slots) as pid:
        harness.await_worker(here, pid)
        yield pid


@contextmanager
def _client(here: Stand) -> Iterator[Any]:
    headers = {"Authorization": f"Bearer {here.api_key}"}
    with httpx.Client(base_url=here.settings.base_url, headers=headers, timeout=30) as client:
        yield client


if __name__ == "__main__":
    main()

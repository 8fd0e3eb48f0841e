"""`mediamill demo`: start everything, process a photograph and a video, and show what came out."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mediamill import up
from mediamill.client import Client, DownloadDamaged, Error, Media
from mediamill.client import Progress as Moved
from mediamill.config import Settings

RESULT: Final = Path("demo-result.json")
_TIMEOUT_SECONDS: Final = 300.0
SAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "photograph.jpg": tuple(f"w{w}.{e}" for w in (320, 640, 1000) for e in ("avif", "webp", "jpg")),
    "video.mp4": ("video.mp4", "poster.jpg"),
}
"""The sample files, and every variant that must come of them."""


@dataclass(slots=True)
class Report:
    """What the demonstration saw, as it is written to demo-result.json."""

    url: str
    started_seconds: float
    samples: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "url": self.url,
            "started_seconds": round(self.started_seconds, 2),
            "samples": self.samples,
            "faults": self.faults,
        }


def run(settings: Settings, *, once: bool) -> int:
    """Run the demonstration; 0 only if every expected variant is ready and verified."""
    console = Console()
    stopping = up.stop_flag()
    try:
        with up.platform(settings, stopping=stopping) as running:
            console.print(f"Mediamill is up after {running.timings['ready']:.1f} s.")
            report = Report(running.url, running.timings["ready"])
            try:
                _process(console, running, report)
            except (Error, OSError) as error:
                report.faults.append(str(error))
            _show(console, running, report)
            if once:
                RESULT.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
                console.print(f"Result: {RESULT}")
            else:
                console.print("\nIt stays up until Ctrl-C.")
                while not stopping():
                    running.tend()
                    time.sleep(0.2)
    except up.CannotStart as error:
        print(f"mediamill: {error}", file=sys.stderr)
        return 1
    return 0 if report.ok else 1


def _process(console: Console, running: up.Platform, report: Report) -> None:
    folder = resources.files("mediamill").joinpath("samples")
    columns = (
        TextColumn("{task.description:16}"),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>4.0f} %  {task.fields[stage]:<12}"),
        TimeElapsedColumn(),
    )
    with (
        Client(running.url, running.api_key) as client,
        Progress(*columns, console=console) as progress,
    ):
        sent: dict[str, tuple[str, Any, float]] = {}
        for name in SAMPLES:
            task = progress.add_task(name, total=100, stage="upload")
            with resources.as_file(folder.joinpath(name)) as path:
                began = time.monotonic()
                media = client.media.submit(path)
            sent[name] = media.id, task, began
        for name, (media_id, task, began) in sent.items():

            def moved(seen: Moved, task: Any = task) -> None:
                progress.update(task, completed=seen.percent or 0, stage=seen.stage)

            media = client.media.wait(
                media_id, timeout_seconds=_TIMEOUT_SECONDS, on_progress=moved, check=False
            )
            progress.update(task, completed=100, stage=media.state)
            report.samples[name] = _checked(client, name, media, time.monotonic() - began, report)


def _checked(
    client: Client, name: str, media: Media, seconds: float, report: Report
) -> dict[str, Any]:
    """Download every variant and hold it against its manifest."""
    if media.state != "ready":
        report.faults.append(f"{name} is {media.state}: {media.error}")
    blurhash = (media.preview or {}).get("blurhash")
    if not blurhash and name.startswith("photograph"):
        report.faults.append(f"{name} has no placeholder")
    shown = {v.name: v.as_dict() | {"verified": False} for v in media.variants}
    for missing in set(SAMPLES[name]) - set(shown):
        report.faults.append(f"{name}: {missing} is missing")
    with TemporaryDirectory(prefix="mediamill-demo-") as folder:
        for variant in media.variants:
            try:
                path = client.media.download(media, variant.name, folder)
            except DownloadDamaged as error:
                report.faults.append(f"{name}: {error}")
                continue
            shown[variant.name]["verified"] = path.stat().st_size == variant.bytes
    return {
        "id": media.id,
        "state": media.state,
        "seconds": round(seconds, 2),
        "size": media.size,
        "width": media.width,
        "height": media.height,
        "duration_seconds": media.duration_seconds,
        "blurhash": blurhash,
        "explained": client.media.timeline(media).sentence,
        "variants": [
            {k: v[k] for k in ("name", "bytes", "width", "height", "seconds", "verified", "url")}
            for v in shown.values()
        ],
    }


def _show(console: Console, running: up.Platform, report: Report) -> None:
    for name, sample in report.samples.items():
        table = Table(title=f"{name}  ·  {sample['explained']}", title_justify="left", box=None)
        table.add_column("variant")
        for column in ("size", "pixels", "made in"):
            table.add_column(column, justify="right")
        for variant in sample["variants"]:
            table.add_row(
                variant["name"],
                f"{variant['bytes'] / 1000:,.1f} kB",
                f"{variant['width']} × {variant['height']}",
                f"{variant['seconds'] or 0:.2f} s",
            )
        console.print()
        console.print(table)
    for fault in report.faults:
        console.print(f"✗ {fault}", style="red")
    count = sum(len(s["variants"]) for s in report.samples.values())
    if report.ok:
        console.print(f"\n✓ {count} variants are ready, and each one is what its manifest says.")
    console.print(
        f"\n  Look     {running.url}/ui\n"
        f"  API      {running.url}/v1\n"
        f"  API key  {running.api_key}\n"
        f"  Logs     {running.settings.logs_dir}",
        highlight=False,
    )

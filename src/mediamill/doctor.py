"""`mediamill doctor`: what this machine can do, each line with what to do about it."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict

import click

from mediamill import __version__, db, embedded, sandbox, tools
from mediamill.config import Settings
from mediamill.failures import Failure
from mediamill.sealing import Vault
from mediamill.storage import Finding, StorageRefused
from mediamill.storage.choice import inspect

_FREE_BYTES = 2 << 30
_NEEDED_ENCODERS = ("libx264", "aac", "png")
_NEEDED_FILTERS = ("scale", "thumbnail", "bwdif", "fps")
_WANTED_FILTERS = ("zscale", "tonemap")


async def run(settings: Settings, *, form: str = "table") -> int:
    """Print every finding; 1 if something must be mended."""
    title = f"mediamill {__version__}   Python {platform.python_version()}   {platform.platform()}"
    return _report(title, [finding async for finding in _findings(settings)], form)


async def run_storage(settings: Settings, origin: str | None, *, form: str = "table") -> int:
    """Print what the bucket enforces; 1 if it must not be used like this."""
    try:
        found = [f async for f in inspect(settings, origin or settings.base_url)]
    except StorageRefused as error:
        raise click.ClickException(str(error)) from None
    return _report(f"bucket {settings.bucket}" if settings.bucket else "", found, form)


def _report(title: str, findings: Sequence[Finding], form: str) -> int:
    """Print findings for people, or as `json`, `jsonl`, or the names of what is at fault."""
    match form:
        case "json":
            click.echo(json.dumps([asdict(f) for f in findings], indent=2, ensure_ascii=False))
        case "jsonl":
            for finding in findings:
                click.echo(json.dumps(asdict(finding), ensure_ascii=False))
        case "ids":
            for finding in findings:
                if finding.ok is False:
                    click.echo(finding.name)
        case _:
            if title:
                click.echo(title)
            for finding in findings:
                mark = {True: "✓", False: "✗", None: "·"}[finding.ok]
                click.echo(f"  {mark} {finding.name:<26} {finding.detail}")
                if finding.ok is not True and finding.remedy:
                    click.echo(f"      → {finding.remedy}")
    return int(any(finding.ok is False for finding in findings))


async def _findings(settings: Settings) -> AsyncIterator[Finding]:
    yield _disk(settings)
    yield _secrets(settings)
    yield _python()
    confined = await asyncio.to_thread(sandbox.detect)
    strong = confined.level is not sandbox.Level.LIMITS
    yield Finding(
        "sandbox",
        strong or settings.sandbox == "limits",
        f"{confined.level}: {confined.detail}",
        "Use a Linux kernel with Landlock (5.13 or newer) or install bubblewrap; "
        "MEDIAMILL_SANDBOX=limits accepts the risk.",
    )
    for check in await asyncio.to_thread(sandbox.self_test, confined):
        yield Finding(f"sandbox: {check.name}", check.ok, check.detail)
    async for finding in _tools(settings, confined):
        yield finding
    async for finding in _database(settings):
        yield finding


def _disk(settings: Settings) -> Finding:
    folder = settings.data_dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return Finding(
        "disk",
        free >= _FREE_BYTES and os.access(folder, os.W_OK),
        f"{free / 2**30:.1f} GiB free under {settings.data_dir}",
        "Free some disk, or point MEDIAMILL_DATA_DIR to a folder that can be written to.",
    )


def _secrets(settings: Settings) -> Finding:
    sealed = Vault.of(settings).locks
    where = "MEDIAMILL_SECRETS_KEY" if settings.secrets_key else str(settings.secrets_key_file)
    return Finding(
        "webhook secrets",
        sealed or None,
        f"sealed in the database, by {where}"
        if sealed
        else "kept in plain in the database: "
        "set MEDIAMILL_SECRETS_KEY (`openssl rand -base64 32`); `mediamill up` makes one",
    )


def _python() -> Finding:
    return Finding("python", sys.version_info >= (3, 11), sys.executable)


async def _tools(settings: Settings, confined: sandbox.Sandbox) -> AsyncIterator[Finding]:
    remedy = "pip install 'mediamill[tools]', or set MEDIAMILL_FFMPEG and MEDIAMILL_FFPROBE."
    try:
        toolbox = tools.resolve(settings.ffmpeg, settings.ffprobe, settings.packager)
        can = await tools.capabilities(toolbox, confined)
    except Failure as failure:
        yield Finding("ffmpeg", False, failure.problem.detail, remedy)
        return
    yield Finding("ffmpeg", True, f"{can.ffmpeg_version}  {toolbox.ffmpeg}")
    yield Finding("ffprobe", True, f"{can.ffprobe_version}  {toolbox.ffprobe}")
    for name, wanted, have in (
        ("encoders", _NEEDED_ENCODERS, can.encoders),
        ("filters", _NEEDED_FILTERS, can.filters),
        ("protocols", ("fd",), can.protocols),
    ):
        missing = [w for w in wanted if w not in have]
        said = f"missing: {', '.join(missing)}" if missing else ", ".join(wanted)
        yield Finding(f"ffmpeg {name}", not missing, said, remedy)
    packager = toolbox.packager
    yield Finding("streaming", packager is not None or None, str(packager or "no Shaka Packager"))
    tone = all(f in can.filters for f in _WANTED_FILTERS)
    yield Finding("HDR to SDR", tone or None, "zscale and tonemap" if tone else "not possible")
    from importlib.util import find_spec

    for module, what in (("pyvips", "libvips"), ("pillow_heif", "HEIC")):
        yield Finding(what, find_spec(module) is not None, module, remedy)


async def _database(settings: Settings) -> AsyncIterator[Finding]:
    if settings.database_url is None:
        try:
            where = embedded.find_binaries(settings.postgres_bin_dir)
            yield Finding("database", True, f"embedded PostgreSQL, {where}")
        except embedded.EmbeddedError as error:
            yield Finding("database", False, str(error))
        return
    try:
        connection = await db.connect(settings.database_url)
    except db.Unavailable as error:
        yield Finding("database", False, str(error), "Check MEDIAMILL_DATABASE_URL.")
        return
    try:
        version = await connection.fetchval("SHOW server_version_num")
        yield Finding(
            "database",
            int(version) >= 150000,
            f"PostgreSQL {int(version) // 10000}",
            "Mediamill needs PostgreSQL 15 or newer.",
        )
        await db.check_schema(connection)
        yield Finding("database schema", True, f"version {db.SCHEMA_VERSION}")
    except db.MigrationError as error:
        yield Finding("database schema", False, str(error), "Run `mediamill migrate`.")
    finally:
        await connection.close()

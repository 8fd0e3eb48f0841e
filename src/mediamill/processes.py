"""The processes of an installation: what each opens, in which order, and how it leaves."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import FrameType
from typing import Any, Final

import structlog
import uvicorn

from mediamill import db, event_pulls, installation, queue, sandbox, tools
from mediamill.api.app import create_app
from mediamill.api.services import Services
from mediamill.attempt import Means
from mediamill.config import Settings, parse_slots
from mediamill.egress import Egress, Policy
from mediamill.estimates import Forecaster
from mediamill.event_pulls import Puller
from mediamill.events import Follower
from mediamill.handlers import image, pieces, preview, video
from mediamill.image_children import confined_pool
from mediamill.installation import Installation
from mediamill.jobs import Claim
from mediamill.keys import Keychain
from mediamill.lease import Leases, Stop
from mediamill.maintenance import Maintenance
from mediamill.mill import Mill
from mediamill.originals import Originals
from mediamill.sources import Fetcher
from mediamill.storage import Storage
from mediamill.storage.choice import open_storage
from mediamill.tus import Transfers
from mediamill.webhooks import Courier
from mediamill.worker import ScratchFolder, Worker, sweep_scratch

log = structlog.get_logger()

HANDLERS: Final = {
    "image": image.handle,
    "video": video.handle,
    "audio": video.handle_audio,
    "video.piece": pieces.handle,
    "video.sound": pieces.handle_sound,
    "preview": preview.handle,
}
_REFRESH_SECONDS: Final = 30.0
_STREAM_SECONDS: Final = 5


class SandboxTooWeak(Exception):
    """This machine cannot confine the media tools as the settings demand."""


class NoApplication(Exception):
    """The application that the worker was pointed at cannot be used; the message says why."""


def load_mill(app: str) -> Mill:
    """The `Mill` that `module:name` names. Raises NoApplication."""
    module, _, name = app.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name or "mill")
    except (ImportError, AttributeError) as error:
        raise NoApplication(f"--app {app}: {error}. It should read package.module:mill.") from None
    if not isinstance(found, Mill):
        raise NoApplication(f"--app {app} is a {type(found).__name__}, not a Mill.")
    return found


async def migrate(settings: Settings) -> list[db.Migration]:
    """Bring the database up to date, the queue engine included."""
    return await db.migrate(require_database(settings), finish=queue.install)


def require_database(settings: Settings) -> str:
    if settings.database_url is None:
        raise db.MigrationError(
            "MEDIAMILL_DATABASE_URL is not set. `mediamill up` brings an embedded PostgreSQL; "
            "single processes need the address of one."
        )
    return settings.database_url


async def serve_api(settings: Settings) -> None:
    """The API, until SIGTERM or SIGINT."""
    async with _base(settings, "api") as (pool, installed, store):
        services = Services(
            settings=settings,
            pool=pool,
            storage=store,
            installation=installed,
            keychain=Keychain(pool, installed.pepper),
            forecaster=Forecaster(),
            egress=Egress(Policy.of(settings)),
            follower=Follower(pool),
        )
        config = uvicorn.Config(
            create_app(services),
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_STREAM_SECONDS,
            timeout_keep_alive=15,
        )
        follow = asyncio.create_task(_follow_keys(pool, installed))
        farewell = asyncio.create_task(_end_writers(services))
        try:
            await _Server(config, services).serve(sockets=[_listen(settings)])
        finally:
            follow.cancel()
            farewell.cancel()
            await services.follower.close()
            services.egress.close()


async def serve_worker(settings: Settings, app: str | None = None) -> None:
    """A worker, until SIGTERM or SIGINT; then it drains. `app` names a `Mill`, as module:name."""
    await _serve_worker(settings, app)
    deaf = await _deaf_tasks()
    if deaf:
        # Functions of the application that ignore their end would keep the process for ever.
        log.error("worker_leaves_deaf_functions", count=len(deaf))
        os._exit(0)


async def _deaf_tasks() -> set[asyncio.Task[Any]]:
    """Tasks that go on although they were canceled."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    return (await asyncio.wait(others, timeout=1.0))[1] if others else set()


async def _serve_worker(settings: Settings, app: str | None) -> None:
    mill = load_mill(app) if app else Mill()
    confined = sandbox.detect()
    if settings.sandbox == "strong" and confined.level is sandbox.Level.LIMITS:
        raise SandboxTooWeak(
            f"{confined.detail} Set MEDIAMILL_SANDBOX=limits to accept hostile files with process "
            "limits only."
        )
    stop = _stop_on_signals()
    slots = parse_slots(settings.slots)
    waiting = event_pulls.queues(settings) if slots.get("maintenance") else []
    async with _base(settings, "worker") as (pool, _, store):
        name = installation.worker_id()
        swept = sweep_scratch(settings.scratch_dir)
        if swept:
            log.info("scratch_swept", folders=swept)
        scratch = ScratchFolder(settings.scratch_dir, name)
        toolbox = tools.resolve(settings.ffmpeg, settings.ffprobe, settings.packager)
        groups = tools.ProcessGroups()
        dsn = require_database(settings)
        worker: Worker | None = None

        def on_stop(claim: Claim, why: Stop) -> None:
            if worker is not None:
                worker.stop_attempt(claim, why)

        leases = Leases(
            dsn,
            lease_seconds=settings.lease_seconds,
            beat_seconds=settings.beat_seconds,
            self_stop_seconds=settings.self_stop_seconds,
            on_stop=on_stop,
        )
        size = slots.get("image", 0) + slots.get("video", 0)
        images = confined_pool(settings, toolbox, confined, groups, size=max(size, 1))
        means = Means(
            settings=settings,
            pool=pool,
            storage=store,
            originals=Originals(store, scratch.path),
            toolbox=toolbox,
            sandbox=confined,
            groups=groups,
            images=images,
            leases=leases,
            handlers=HANDLERS,
            mill=mill,
        )
        worker = Worker(means, dsn=dsn, name=name, slots=slots, scratch=scratch.path)
        duties = asyncio.create_task(_maintain(settings, pool, store, slots, waiting))
        letters = asyncio.create_task(_deliver(settings, pool, name, slots))
        try:
            if slots.get("image"):
                await images.warm()
            await worker.run(stop)
        finally:
            for task in (duties, letters):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await images.close()
            groups.kill_all()
            scratch.remove()


async def _maintain(
    settings: Settings,
    pool: db.Pool,
    store: Storage,
    slots: dict[str, int],
    waiting: list[event_pulls.Queue],
) -> None:
    if slots.get("maintenance", 0) <= 0:
        return
    egress = Egress(Policy.of(settings))
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(Maintenance(settings, pool, store).run())
            fetcher = Fetcher(settings, Transfers(settings, pool, store), egress)
            group.create_task(fetcher.run())
            for each in waiting:
                group.create_task(Puller(settings, pool, store, each).run())
    finally:
        egress.close()


async def _deliver(settings: Settings, pool: db.Pool, name: str, slots: dict[str, int]) -> None:
    if slots.get("webhook", 0) > 0:
        await Courier(settings, pool, name=name, slots=slots["webhook"]).run()


@asynccontextmanager
async def _base(
    settings: Settings, service: str
) -> AsyncIterator[tuple[db.Pool, Installation, Storage]]:
    """What every process opens: the database at a schema that we know, and the storage that fits
    it."""
    dsn = require_database(settings)
    await db.wait_until_up(dsn, seconds=30)
    pool = await db.open_pool(
        dsn,
        size=settings.database_pool_size,
        application=f"mediamill {service}",
        idle_seconds=settings.lease_seconds,
    )
    try:
        async with db.acquire(pool) as connection:
            await db.check_schema(connection)
            installed = await installation.identify(connection)
            may_be_new = not await installation.holds_objects(connection)
        store = await open_storage(
            settings, installed.id, lambda: installed.keyring, may_be_new=may_be_new
        )
        try:
            yield pool, installed, store
        finally:
            await store.close()
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await pool.close()
        pool.terminate()


async def _end_writers(services: Services) -> None:
    await services.shutting_down.wait()
    services.transfers.stop()


async def _follow_keys(pool: db.Pool, installed: Installation) -> None:
    while True:
        await asyncio.sleep(_REFRESH_SECONDS)
        with suppress(db.Unavailable):
            async with db.acquire(pool) as connection:
                await installed.refresh(connection)


def _listen(settings: Settings) -> socket.socket:
    """Bound before anything is announced, so that a taken port is a clear error."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"
        ) from None
    listener.listen(2048)
    listener.set_inheritable(True)
    return listener


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


class _Server(uvicorn.Server):
    """Tells open streams that the end is near, before it waits for them to close.

    uvicorn runs the application's shutdown only after connections have closed, so a stream that
    waits for an event would never hear of it.
    """

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self._services = services

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._services.shutting_down.set()
        self._services.follower.wake_all()
        super().handle_exit(sig, frame)


def bind_to(parent: int) -> None:
    """From now on this process ends when `parent`, which started it, ends in whatever way."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # include/uapi/linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the call above
            sys.exit(1)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()

"""What all processes of one installation share through the database: its id, its secrets, its
workers."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from uuid import UUID

from mediamill import db, ids, signing

_SQL: Final = db.load("installation")
_SIGNING: Final = "signing"
_PEPPER: Final = "pepper"


@dataclass(slots=True)
class Installation:
    """Identity and secrets, read at start. `keyring` follows a rotation through `refresh`."""

    id: UUID
    pepper: bytes
    keyring: signing.Keyring

    async def refresh(self, connection: db.Connection) -> None:
        """Read the signing keys again, so that a rotation by another process arrives here."""
        self.keyring = await _keyring(connection)


async def identify(connection: db.Connection) -> Installation:
    """This database's installation; made at the first call."""
    async with connection.transaction():
        installation_id = await connection.fetchval(_SQL.identify, ids.new())
        if (
            installation_id is None
        ):  # another process made it between the two halves of the statement
            installation_id = await connection.fetchval(_SQL.identify, ids.new())
        for purpose in (_SIGNING, _PEPPER):
            await connection.execute(_SQL.add_first_secret, purpose, secrets.token_bytes(32))
    pepper = (await connection.fetch(_SQL.secrets, _PEPPER))[0]["value"]
    return Installation(installation_id, pepper, await _keyring(connection))


async def holds_objects(connection: db.Connection) -> bool:
    """Whether the storage must hold something."""
    return bool(await connection.fetchval(_SQL.holds_objects))


async def rotate_signing_key(connection: db.Connection, *, overlap_seconds: float) -> None:
    """Sign with a new key from now on; addresses signed before stay good for the overlap."""
    overlap = timedelta(seconds=overlap_seconds)
    await connection.execute(_SQL.add_secret, _SIGNING, secrets.token_bytes(32), overlap)


async def _keyring(connection: db.Connection) -> signing.Keyring:
    rows = await connection.fetch(_SQL.secrets, _SIGNING)
    return signing.Keyring({row["version"]: row["value"] for row in rows})


def worker_id() -> str:
    """A new identity for each process start: host, pid and a random part."""
    return f"{socket.gethostname()[:40]}.{os.getpid()}.{secrets.token_hex(4)}"


async def register_worker(
    connection: db.Connection, worker: str, *, version: str, slots: dict[str, int], sandbox: str
) -> None:
    await connection.execute(
        _SQL.register_worker, worker, socket.gethostname(), os.getpid(), version, slots, sandbox
    )


async def see_worker(connection: db.Connection, worker: str, *, stopping: bool) -> None:
    await connection.execute(_SQL.see_worker, worker, stopping)


async def forget_worker(connection: db.Connection, worker: str) -> None:
    """Remove this worker's row, and those of workers that nobody has seen for an hour."""
    await connection.execute(_SQL.forget_worker, worker)


async def slots(connection: db.Connection) -> dict[str, int]:
    """Slots per queue of the workers that were seen lately."""
    return {row["queue"]: row["slots"] for row in await connection.fetch(_SQL.slots)}


async def drain_requested(connection: db.Connection, worker: str) -> bool:
    """Whether an operator asked this worker to finish and leave."""
    return bool(await connection.fetchval(_SQL.drain_requested, worker))


async def request_drain(connection: db.Connection, worker: str) -> bool:
    """Ask a worker to finish what it runs and leave; False if there is none of this name."""
    return bool(await connection.fetchval(_SQL.request_drain, worker))


async def workers(connection: db.Connection) -> list[db.Row]:
    """The workers that were seen lately."""
    return await connection.fetch(_SQL.workers)


async def worker_pids(connection: db.Connection) -> set[int]:
    """Process ids of the live workers of this host."""
    rows = await connection.fetch(_SQL.worker_pids, socket.gethostname())
    return {row["pid"] for row in rows}

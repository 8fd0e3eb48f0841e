"""Bytes come in: slots, signed addresses, and the one guarded way to accept an original.

`complete`, the reconciler and (later) storage events all go through `accept`; whoever is first
makes the jobs, the others find that it is done.
"""

from __future__ import annotations

import mimetypes
import re
import secrets
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from mediamill import db, ids, jobs, media, recipes, storage
from mediamill.config import Settings
from mediamill.failures import Code, Refused
from mediamill.jobs import Birth
from mediamill.recipes import Recipe
from mediamill.states import MediaState
from mediamill.storage import SignedForm, SignedRequest, Storage, Stored

PREVIEW_PRIORITY: Final = 5
_NAME_BYTES: Final = 1024
_FRACTION: Final = r"\s*(0?\.\d{1,9}|[01](?:\.0{1,9})?)\s*"
_FOCAL_POINT: Final = re.compile(f"{_FRACTION},{_FRACTION}")
# Bidirectional embeddings, overrides and isolates: "a\u202egpj.exe" reads as "aexe.jpg". Joiners
# stay, since emoji and several scripts need them.
_REORDERING: Final = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client announces about a file. `ttl_seconds` None means the installation's default."""

    size: int
    content_type: str | None = None
    filename: str | None = None
    sha256: str | None = None
    recipe: str = "web"
    recipe_version: int | None = None
    metadata: dict[str, Any] | None = None
    ttl_seconds: float | None = None
    max_size: int | None = None
    """In place of the size, which is 0 then: the file comes by a form."""


def prefix(tenant_id: str, media_id: UUID) -> str:
    """Everything uploaded for a media lies below this."""
    return f"{storage.UPLOADS}/{tenant_id}/{media_id}"


@dataclass(frozen=True, slots=True)
class Minted:
    """The name of a media to be, and the key of its original."""

    id: UUID
    key: str


def mint(tenant_id: str) -> Minted:
    media_id = ids.new()
    return Minted(media_id, f"{prefix(tenant_id, media_id)}/{secrets.token_hex(8)}/original")


def slot(
    settings: Settings,
    tenant_id: str,
    wanted: Wanted,
    minted: Minted | None = None,
    *,
    upload_ttl_seconds: float | None = None,
) -> media.Slot:
    """Check what is announced and mint the media. Raises Refused with the field at fault."""
    filename = clean_name(wanted.filename)
    content_type = content_type_of(wanted.content_type, filename)
    kind = kind_of(content_type)
    name, largest = (
        ("size", wanted.size) if wanted.max_size is None else ("max_size", wanted.max_size)
    )
    if largest == 0:
        raise Refused(Code.EMPTY_INPUT, errors=[_field(f"/{name}", "must be at least 1")])
    recipe = recipes.find(wanted.recipe, wanted.recipe_version, folder=settings.recipes_dir)
    if recipe is None:
        known = ", ".join(sorted({name for name, _ in recipes.book(settings.recipes_dir)}))
        raise Refused(
            Code.INVALID_REQUEST,
            f"There is no recipe {wanted.recipe!r} in that version; known: {known}.",
            errors=[_field("/recipe", "is not known")],
        )
    allowed = _max_bytes(settings, tenant_id, kind, recipe)
    if largest > allowed:
        raise Refused(
            Code.PAYLOAD_TOO_LARGE,
            f"At most {allowed:,} bytes are taken for {kind or 'a file'}; this one has "
            f"{largest:,}.",
            limit={"name": "size", "allowed": allowed, "seen": largest, "unit": "bytes"},
            errors=[_field(f"/{name}", f"must be at most {allowed}")],
        )
    if focal_point(wanted.metadata) is None and "focal_point" in (wanted.metadata or {}):
        raise Refused(
            Code.INVALID_REQUEST,
            'metadata.focal_point must read like "0.5,0.25".',
            errors=[_field("/metadata/focal_point", "must be two fractions such as 0.5,0.25")],
        )
    minted = minted or mint(tenant_id)
    return media.Slot(
        tenant_id=tenant_id,
        id=minted.id,
        kind=kind,
        filename=filename,
        content_type=content_type,
        size=wanted.size,
        sha256=wanted.sha256,
        upload_key=minted.key,
        upload_ttl_seconds=upload_ttl_seconds or settings.upload_ttl_seconds,
        recipe=recipe.name,
        recipe_version=recipe.version,
        metadata=wanted.metadata or {},
        ttl_seconds=(
            wanted.ttl_seconds if wanted.ttl_seconds is not None else settings.media_ttl_seconds
        ),
        max_size=wanted.max_size,
    )


def _max_bytes(settings: Settings, tenant_id: str, kind: str | None, recipe: Recipe) -> int:
    if kind != "image":
        return settings.max_bytes(kind or "video")
    limits = settings.image_limits(tenant_id, recipe.image.limits if recipe.image else None)
    return limits.max_bytes or settings.max_image_bytes


def focal_point(metadata: Mapping[str, Any] | None) -> tuple[float, float] | None:
    """The focal point of an image as its metadata names it (`focal_point`: "x,y", fractions of the
    shown width and height); None if it names none that can be read."""
    text = (metadata or {}).get("focal_point")
    found = _FOCAL_POINT.fullmatch(text) if isinstance(text, str) else None
    return (float(found[1]), float(found[2])) if found else None


def sign(store: Storage, opened: media.Slot) -> SignedRequest:
    """The write-once request that the client sends next."""
    return store.sign_put(
        opened.upload_key,
        content_type=opened.content_type,
        size=opened.size,
        expires_at=_end(opened),
        sha256=opened.sha256,
    )


async def sign_form(store: Storage, opened: media.Slot) -> SignedForm:
    """The form that the client sends next. Raises Refused where the storage holds no form to its
    length."""
    assert opened.max_size is not None
    form = await store.sign_form(
        opened.upload_key,
        content_type=opened.content_type,
        most=opened.max_size,
        expires_at=_end(opened),
    )
    if form is None:
        raise Refused(
            Code.INVALID_REQUEST,
            "The storage of this installation takes no form with a length range: send the exact "
            "`size`, or upload with tus, which needs none.",
            errors=[_field("/max_size", "is not offered here; send size")],
        )
    return form


def _end(opened: media.Slot) -> datetime:
    return datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=opened.upload_ttl_seconds)


def births(kind: str | None) -> list[Birth]:
    """The jobs that an accepted original begins with.

    A video gets its preview from a job of its own on the image queue, so that it does not wait
    behind other videos. What is not announced as video begins on the image queue and is sent on if
    it is not an image after all.
    """
    match kind:
        case "video":
            return [Birth("video", "video", "main"), preview_birth()]
        case "audio":
            return [Birth("audio", "audio", "main")]
        case _:
            return [Birth("image", "image", "main")]


def preview_birth() -> Birth:
    return Birth("preview", "image", "preview", PREVIEW_PRIORITY)


async def complete(
    connection: db.Connection,
    store: Storage,
    settings: Settings,
    tenant_id: str,
    media_id: UUID,
) -> bool:
    """Accept the uploaded original; True if this call did it, False if it was accepted before.

    Raises Refused: NOT_FOUND, GONE, UPLOAD_EXPIRED, SOURCE_MISSING or SIZE_MISMATCH; in the last
    two the slot stays open. Run inside a transaction.
    """
    original = await media.original(connection, tenant_id, media_id)
    if original is None:
        raise Refused(Code.NOT_FOUND)
    if original.deleted_at is not None:
        raise Refused(Code.GONE)
    if original.state == MediaState.EXPIRED:
        raise Refused(Code.UPLOAD_EXPIRED)
    if original.state != MediaState.AWAITING_UPLOAD:
        return False
    stored = check_stored(await store.stat(original.upload_key), original.size, original.max_size)
    accepted = await media.accept(
        connection,
        tenant_id,
        media_id,
        object_version=stored.version,
        stored_at=stored.at,
        size=stored.size,
        kind=original.kind,
        births=births(original.kind),
        max_attempts=settings.max_attempts,
    )
    return accepted is not None


def check_stored(stored: Stored | None, size: int, max_size: int | None = None) -> Stored:
    """What lies in storage must be what was announced. Raises Refused."""
    if stored is None:
        raise Refused(Code.SOURCE_MISSING)
    if not fits(stored.size, size, max_size):
        allowed = size if max_size is None else max_size
        announced = f"{allowed:,} bytes" if max_size is None else f"1 to {allowed:,} bytes"
        raise Refused(
            Code.SIZE_MISMATCH,
            f"{announced} were announced, {stored.size:,} are stored.",
            limit={"name": "size", "allowed": allowed, "seen": stored.size, "unit": "bytes"},
        )
    return stored


def fits(stored: int, size: int, max_size: int | None) -> bool:
    """Whether so many bytes are what a slot was opened for."""
    return 0 < stored == size if max_size is None else 1 <= stored <= max_size


async def wanted_still(connection: db.Connection, key: str) -> bool:
    """Whether the media of an upload's key still takes its bytes: not deleted, not expired."""
    _, tenant_id, media_id, *_ = key.split("/")
    original = await media.original(connection, tenant_id, UUID(media_id))
    return (
        original is not None
        and original.deleted_at is None
        and original.state != MediaState.EXPIRED
    )


async def delete(
    connection: db.Connection, settings: Settings, tenant_id: str, media_id: UUID, *, reason: str
) -> bool:
    """Delete a media: a tombstone at once, its jobs canceled, its bytes erased soon after."""
    keep = settings.job_retention_seconds
    # Jobs before their media, as a worker locks them; then those that were accepted in between.
    await jobs.cancel_of_media(connection, tenant_id, media_id, retention_seconds=keep)
    deleted = await media.delete(connection, tenant_id, media_id, reason=reason)
    if deleted:
        await jobs.cancel_of_media(connection, tenant_id, media_id, retention_seconds=keep)
    return deleted


def clean_name(name: str | None) -> str | None:
    """A file name as metadata: the last path segment, NFC, without what could disguise it."""
    if name is None:
        return None
    last = name.replace("\\", "/").rpartition("/")[2]
    shown = "".join(
        c
        for c in unicodedata.normalize("NFC", last)
        if unicodedata.category(c) not in ("Cc", "Cs") and c not in _REORDERING
    )
    while len(shown.encode()) > _NAME_BYTES:
        shown = shown[:-1]
    return shown.strip() or None


def content_type_of(announced: str | None, filename: str | None) -> str:
    """The announced type, else what the name suggests. Raises Refused for a malformed one."""
    if announced is None or announced == "application/octet-stream":
        guessed = mimetypes.guess_type(filename or "", strict=False)[0]
        return guessed or "application/octet-stream"
    essence = announced.partition(";")[0].strip().lower()
    major, slash, minor = essence.partition("/")
    token = set("abcdefghijklmnopqrstuvwxyz0123456789!#$&^_.+-")
    if (
        not slash
        or not major
        or not minor
        or not token.issuperset(major + minor)
        or len(essence) > 127
    ):
        raise Refused(
            Code.INVALID_REQUEST,
            "content_type must read like image/jpeg.",
            errors=[_field("/content_type", "must be a media type such as image/jpeg")],
        )
    return essence


def kind_of(content_type: str) -> str | None:
    """The kind that a type announces; None when it says nothing. The bytes decide later."""
    major = content_type.partition("/")[0]
    return major if major in ("image", "video", "audio") else None


def _field(pointer: str, detail: str) -> dict[str, str]:
    return {"pointer": pointer, "detail": detail}

"""Long encodes shared by the whole fleet: cut on the grid of output frames, encoded by any worker,
joined by the job that asked. A killed worker costs a piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from mediamill.failures import Code, Failure
from mediamill.handlers import (
    Child,
    Done,
    Kept,
    Outcome,
    Wait,
    Work,
    checks,
    film,
    look,
    running,
    tracks,
)
from mediamill.handlers.film import Film, Made, Piece
from mediamill.handlers.running import PACE, Meter
from mediamill.handlers.sound import Loudness
from mediamill.handlers.tracks import Grid
from mediamill.jobs import NewJob
from mediamill.probe import MediaInfo

_LEAST_SECONDS: Final = 20.0
_MOST_PIECES: Final = 400
_ALONE_FACTOR: Final = 5.0
_SOUND_KEY: Final = "sound"


def cut(grid: Grid, piece_seconds: float, *, least_seconds: float) -> list[tuple[int, int | None]]:
    """The pieces as first frame and the one after the last. All but the last end with a group, and
    none is much shorter than wanted; the last has no end, as lengths are rarely told to the
    frame."""
    assert grid.frames is not None
    wish = max(piece_seconds, least_seconds, grid.seconds(grid.frames) / _MOST_PIECES)
    number = max(1, round(grid.seconds(grid.frames) / wish))
    groups = -(-grid.frames // grid.group)
    edges = sorted({groups * n // number * grid.group for n in range(number)})
    return [*zip(edges, [*edges[1:], None], strict=True)]


async def worthwhile(work: Work, planned: Film, info: MediaInfo) -> bool:
    """Whether the encode is long enough to be shared: what it would take one worker, against the
    setting, and against more where only one slot would do all the pieces."""
    if work.recipe.pieces is False or planned.grid.frames is None or not planned.tracks:
        return False
    if len(_cut(work, planned.grid)) < 2:
        return False
    if work.recipe.pieces:
        return True
    factor = 1.0 if await work.slots("video") > 1 else _ALONE_FACTOR
    return PACE.seconds(planned.work(info)) > factor * work.settings.piece_threshold_seconds


def children(work: Work, planned: Film, *, anew: bool = False) -> Wait:
    """A job for each piece, and one for all sound; `anew` in place of those that have ended."""
    suffix = f"-{work.claim.fence}" if anew else ""
    common: dict[str, Any] = {
        "queue": "video",
        "priority": work.claim.priority,
        "max_attempts": work.settings.max_attempts,
    }
    jobs = [
        NewJob(
            "video.piece",
            {"first": first, "after": after, "grid": planned.grid.near(first).as_dict()},
            child_key=f"piece-{first}-{after or 'end'}{suffix}",
            **common,
        )
        for first, after in _cut(work, planned.grid)
    ]
    if planned.sounds:
        jobs.insert(
            0,
            NewJob(
                "video.sound",
                {"grid": planned.grid.near(0).as_dict()},
                child_key=_SOUND_KEY + suffix,
                **common,
            ),
        )
    return Wait(tuple(jobs))


def _cut(work: Work, grid: Grid) -> list[tuple[int, int | None]]:
    wish = work.settings.piece_seconds
    return cut(grid, wish, least_seconds=min(wish, _LEAST_SECONDS))


async def handle(work: Work) -> Outcome:
    """Encode one piece of every track and keep it for the parent."""
    info, planned = await _prepared(work)
    first, after = work.claim.payload["first"], work.claim.payload["after"]
    grid = planned.grid
    assert grid.frames is not None
    end = after if after is not None else grid.frames
    cost = sum(t.coding.work(grid.rate, grid.seconds(end - first)) for t in planned.tracks)
    await work.enter("encode")
    meter = Meter(work, cost)
    finished = await tracks.encode(
        work, info, grid, planned.tracks, meter, first=first, after=after
    )
    # Without an index it began in the middle of a group, where nothing can be decoded yet.
    damaged = running.damaged(finished) and not (first and grid.key_frames)
    await work.enter("verify")
    files: dict[str, Any] = {}
    for track in planned.tracks:
        path = work.out / track.file
        # The last piece ends where the source really ends.
        slack = 0 if after is not None else film.slack(grid)
        await tracks.verify(work, path, grid, frames=end - first, slack=slack)
        # Here and not where they are joined, so that this is shared as well.
        await checks.decode(work, path, grid.seconds(end - first), picture=True)
        files[track.stem] = _shown(await work.keep(path))
    return Done(
        result={"first": first, "after": after, "grid": grid.as_dict(), "files": files,
                "seconds": round(finished.wall_seconds, 3), "damaged": damaged}
    )  # fmt: skip


async def handle_sound(work: Work) -> Outcome:
    """Encode every sound track from end to end and keep them for the parent."""
    info, planned = await _prepared(work)
    await work.enter("encode")
    made = Made()
    await film.encode_sounds(work, planned, info, made, Meter(work, 1.0))
    files = {s.file: _shown(await work.keep(work.out / s.file)) for s in planned.sounds}
    loudness = {
        name: [found.integrated, found.peak, found.gain]
        for name, found in made.loudness.items()
        if found is not None
    }
    return Done(result={"files": files, "loudness": loudness, "damaged": made.damaged})


async def _prepared(work: Work) -> tuple[MediaInfo, Film]:
    """The original and the plan, on the grid that the parent found."""
    info = await look.look(work)
    if not isinstance(info, MediaInfo) or info.video is None:
        raise Failure(Code.INTERNAL, "The original is not what it was when the job was cut.")
    grid = Grid.of(work.claim.payload["grid"])
    if grid.frames is not None:
        info = replace(info, duration_seconds=grid.seconds(grid.frames))
    planned = film.plan(work.recipe, info, work.original.size, in_pieces=True)
    return info, replace(planned, grid=grid)


async def join(
    work: Work, planned: Film, info: MediaInfo, ended: Sequence[Child], made: Made
) -> Film:
    """Bring and join what the children made; the plan on their grid. Raises Failure."""
    results = [child.result for child in ended]
    for heard in (result for result in results if "first" not in result):
        for name, kept in heard["files"].items():
            await work.bring(_kept(kept), name)
        for name, values in heard["loudness"].items():
            made.loudness[name] = Loudness(*values)
    made.damaged = any(child.result["damaged"] for child in ended)
    results = sorted((r for r in results if "first" in r), key=lambda result: result["first"])
    grid = replace(Grid.of(results[0]["grid"]), key_frames=planned.grid.key_frames)
    planned = replace(planned, grid=grid)
    some = [
        Piece(r["first"], r["after"], {stem: _kept(kept) for stem, kept in r["files"].items()})
        for r in results
    ]
    for track in planned.tracks:
        made.seconds[track.stem] = sum(r["seconds"] for r in results)
    await film.join_pieces(work, planned, info, some, made)
    return planned


def _shown(kept: Kept) -> dict[str, Any]:
    return {"key": kept.key, "version": kept.version, "bytes": kept.bytes}


def _kept(shown: Mapping[str, Any]) -> Kept:
    return Kept(shown["key"], shown["version"], shown["bytes"])

"""Everything that moves in a recipe for video, planned together and made together.

A picture of one size and coding is encoded once, whatever it is used in; sound is encoded apart,
once for each track. The steps are the same whether this job encodes or its children did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from mediamill.handlers import Kept, Output, Work, mp4, running, sound, streaming, subtitles, tracks
from mediamill.handlers.mp4 import Way
from mediamill.handlers.picture import Coding
from mediamill.handlers.running import Meter
from mediamill.handlers.sound import Loudness
from mediamill.handlers.streaming import Heard
from mediamill.handlers.tracks import Grid, Track
from mediamill.probe import AudioStream, MediaInfo
from mediamill.recipes import Recipe
from mediamill.recipes.video import HlsOutput, Mp4Output
from mediamill.tools import Command

_GROUP_SECONDS: Final = 2.0
_SLACK_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Film:
    """What is to be made, and of what. `alone` are encoded in one run, at their own pace."""

    grid: Grid
    tracks: tuple[Track, ...]
    streams: tuple[tuple[HlsOutput, tuple[Track, ...]], ...]
    joined: tuple[tuple[Mp4Output, Track], ...]
    alone: tuple[Mp4Output, ...]
    copied: tuple[Mp4Output, ...]
    ways: Mapping[str, Way]
    sounds: tuple[Sound, ...]

    def work(self, info: MediaInfo) -> float:
        """What encoding the pictures costs, in the unit of `Coding.work`."""
        seconds = info.duration_seconds or 0.0
        cost = sum(t.coding.work(self.grid.rate, seconds) for t in self.tracks)
        assert info.video is not None
        for output in self.alone:
            cost += mp4.coding(output, info).work(info.video.frame_rate, seconds)
        return cost


@dataclass(frozen=True, slots=True)
class Sound:
    """One sound track as AAC in a file of scratch: of which stream, how dense, how loud."""

    audio: AudioStream
    kbps: int
    target: float | None

    @property
    def file(self) -> str:
        loud = "" if self.target is None else f"-{abs(self.target):g}"
        return f"sound-{self.audio.index}-{self.kbps}{loud}.m4a"


@dataclass(slots=True)
class Made:
    """What is there already, in scratch: frames of each track by its stem, and what was measured of
    each sound file by its name."""

    frames: dict[str, int] = field(default_factory=dict)
    loudness: dict[str, Loudness | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    likeness: dict[str, float] = field(default_factory=dict)
    decoded: set[str] = field(default_factory=set)
    """Stems of tracks of which every piece was decoded where it was made, and every seam here."""
    damaged: bool = False
    """Whether parts of the original could not be decoded."""


def plan(recipe: Recipe, info: MediaInfo, size: int, *, in_pieces: bool = False) -> Film:
    """The plan, from what the probe and the recipe say alone. `size` is that of the original."""
    wanted = recipe.video or ()
    streams = [o for o in wanted if isinstance(o, HlsOutput)]
    files = [o for o in wanted if isinstance(o, Mp4Output)]
    grid = tracks.grid(
        info,
        most_rate=min((o.max_frame_rate for o in (*streams, *files)), default=60.0),
        group_seconds=min((o.key_frame_seconds for o in streams), default=_GROUP_SECONDS),
    )
    known: dict[Coding, Track] = {}
    laddered = []
    for stream in streams:
        rungs = []
        for track in streaming.ladder(stream, info):
            known.setdefault(track.coding, track)
            rungs.append(Track(track.name, track.coding, known[track.coding].stem))
        laddered.append((stream, tuple(rungs)))
    copied, joined, alone = [], [], []
    ways: dict[str, Way] = {}
    for output in files:
        why = mp4.misfit(output, info, size) if output.copy_if_fit else None
        coding = mp4.coding(output, info)
        if output.copy_if_fit and why is None:
            copied.append(output)
            ways[output.name] = Way("copied", "the original already fits")
        elif coding in known or in_pieces:
            track = known.setdefault(coding, Track(output.name, coding, output.name))
            joined.append((output, track))
            ways[output.name] = Way("encoded", why or "the recipe asks for it")
        else:
            alone.append(output)
            ways[output.name] = Way("encoded", why or "the recipe asks for it")
    sounds: dict[str, Sound] = {}
    for stream in streams:
        for _, _, _, audio in streaming.renditions(info.sounds):
            heard = Sound(audio, stream.audio_kbps, stream.loudness)
            sounds[heard.file] = heard
    for output, _ in joined:
        if info.audio is not None:
            heard = Sound(info.audio, output.audio_kbps, output.loudness)
            sounds[heard.file] = heard
    by_size = sorted(known.values(), key=lambda t: t.coding.width * t.coding.height)
    return Film(
        grid,
        tuple(by_size),
        tuple(laddered),
        tuple(joined),
        tuple(alone),
        tuple(copied),
        ways,
        tuple(sounds.values()),
    )


def slack(grid: Grid) -> int:
    """How many frames more or less than told the last piece may have: how long the last frame stays
    is known for sure only when it was decoded."""
    return 2 + int(grid.rate * Fraction(_SLACK_SECONDS))


async def encode_sounds(work: Work, film: Film, info: MediaInfo, made: Made, meter: Meter) -> None:
    """Every sound track that the pictures are put together with. Raises Failure."""
    limit = work.settings.max_duration_seconds
    for wanted in film.sounds:
        loudness = await sound.measure(work, wanted.audio, wanted.target, info.duration_seconds)
        args = sound.plan(
            "aac",
            wanted.kbps,
            wanted.audio,
            wanted.file,
            loudness,
            limit_seconds=limit,
            steady=True,
        )
        finished = await sound.encode(work, args, wanted.file, info, meter)
        made.damaged = made.damaged or running.damaged(finished)
        made.loudness[wanted.file] = loudness


async def encode_tracks(
    work: Work,
    film: Film,
    info: MediaInfo,
    some: Sequence[Track],
    *,
    made: Made,
    meter: Meter,
) -> None:
    """These tracks from end to end, in one run, and checked. Raises Failure."""
    finished = await tracks.encode(work, info, film.grid, some, meter)
    made.damaged = made.damaged or running.damaged(finished)
    made.seconds |= dict.fromkeys((t.stem for t in some), finished.wall_seconds)
    await check_tracks(work, film, info, some, made)


async def check_tracks(
    work: Work, film: Film, info: MediaInfo, some: Sequence[Track], made: Made
) -> None:
    """Whole tracks lie on the grid and look like the original. Raises Failure."""
    grid = film.grid

    async def check(track: Track) -> int:
        return await tracks.verify(work, work.out / track.file, grid)

    counts = await running.together(*(check(track) for track in some))
    made.frames |= {track.stem: count for track, count in zip(some, counts, strict=True)}
    found = await tracks.compare(work, info, grid, some, min(counts), places=(0.1, 0.5, 0.9))
    made.likeness |= {stem: round(score, 4) for stem, score in found.items()}


async def make_alone(
    work: Work, film: Film, info: MediaInfo, made: Made, meter: Meter
) -> list[Output]:
    """The files that are encoded in a run of their own, or taken over. Raises Failure."""
    video = info.video
    assert video is not None
    outputs = []
    path = await work.fetch()
    limit = work.settings.max_duration_seconds
    seconds = info.duration_seconds
    for wanted in (*film.copied, *film.alone):
        file = f"{wanted.name}.mp4"
        coding = mp4.coding(wanted, info)
        copied = wanted in film.copied
        cost = coding.work(video.frame_rate, seconds or limit)
        if copied:
            args = mp4.plan_copy(wanted, info, file)
            wall = 120 + work.original.size / 5e6
        else:
            loudness = None
            if info.audio is not None:
                loudness = await sound.measure(work, info.audio, wanted.loudness, seconds)
            args = mp4.plan_encode(wanted, info, file, loudness=loudness, limit_seconds=limit)
            wall = running.PACE.limit(cost)
            made.loudness[wanted.name] = loudness
        rate = (wanted.max_video_kbps + wanted.audio_kbps) * 125
        confined = running.jail(
            work,
            wall_seconds=wall,
            write=True,
            file_bytes=(64 << 20) + max(2 * work.original.size, int(2 * rate * (seconds or limit))),
            scratch_bytes=1 << 50,
        )
        watched = meter.watch([wanted.name], 0 if copied else cost, seconds)
        finished = await running.run(
            work,
            Command("ffmpeg", args, path, wanted.name),
            confined,
            on_line=watched.line,
            stall_seconds=running.STALL_SECONDS,
        )
        meter.finish(watched)
        made.damaged = made.damaged or running.damaged(finished)
        if not copied:
            running.PACE.learn(cost, finished.wall_seconds)
        output = await mp4.verify(
            work,
            work.out / file,
            coding,
            info,
            finished.wall_seconds,
            copied=copied,
            damaged=made.damaged,
        )
        if not copied and not made.damaged:
            made.likeness[wanted.name] = await mp4.compare(work, info, coding, output)
        outputs.append(output)
    return outputs


async def make_joined(work: Work, film: Film, info: MediaInfo, made: Made) -> list[Output]:
    """The files whose picture is a track that is there. Raises Failure."""
    outputs = []
    for wanted, track in film.joined:
        heard = info.audio and Sound(info.audio, wanted.audio_kbps, wanted.loudness)
        path = await mp4.join(
            work,
            work.out / track.file,
            work.out / heard.file if heard else None,
            f"{wanted.name}.mp4",
        )
        seconds = made.seconds.get(track.stem, 0.0)
        outputs.append(
            await mp4.verify(
                work,
                path,
                track.coding,
                info,
                seconds,
                decoded=track.stem in made.decoded,
                damaged=made.damaged,
            )
        )
    return outputs


async def make_stream(
    work: Work,
    film: Film,
    info: MediaInfo,
    wanted: HlsOutput,
    some: Sequence[Track],
    *,
    texts: Sequence[subtitles.Track],
    made: Made,
    folder: str,
) -> list[Output]:
    """These rungs of a ladder, packaged in a folder of scratch. Raises Failure."""
    heard = []
    for name, label, language, audio in streaming.renditions(info.sounds):
        file = Sound(audio, wanted.audio_kbps, wanted.loudness).file
        default = audio == info.audio
        heard.append(Heard(name, label, language, work.out / file, default))
    shown = list(texts) if wanted.subtitles else []
    await streaming.package(work, wanted, film.grid, some, heard=heard, texts=shown, folder=folder)
    counts = {t.name: made.frames[t.stem] for t in some}
    seconds = max((made.seconds.get(t.stem, 0.0) for t in some), default=0.0)
    return await streaming.verify(
        work,
        wanted,
        info,
        film.grid,
        counts=counts,
        decoded={t.name for t in some if t.stem in made.decoded},
        heard=heard,
        texts=shown,
        seconds=seconds,
        folder=folder,
        damaged=made.damaged,
    )


def described(film: Film, made: Made) -> dict[str, Any]:
    """How each output came about: what the status shows under `info.outputs`."""
    shown: dict[str, Any] = {name: way.as_dict() for name, way in film.ways.items()}
    for name, loudness in made.loudness.items():
        if loudness is not None and name in shown:
            shown[name]["loudness"] = loudness.as_dict()
    for output in film.alone:
        shown[output.name]["likeness"] = made.likeness.get(output.name)
    for stream, rungs in film.streams:
        shown[stream.name] = {
            "way": "encoded",
            "reason": "adaptive streaming needs key frames on a grid",
            "frame_rate": str(film.grid.rate),
            "likeness": {t.name: made.likeness.get(t.stem) for t in rungs},
        }
    return shown


def smallest(film: Film, work: Work) -> Path | None:
    """The smallest track that is there, to take stills from."""
    if not film.tracks or film.tracks[0].coding.hdr is not None:
        return None
    return work.out / film.tracks[0].file


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the grid and where its tracks are kept, by their stems."""

    first: int
    after: int | None
    files: Mapping[str, Kept]


async def join_pieces(
    work: Work, film: Film, info: MediaInfo, pieces: Sequence[Piece], made: Made
) -> None:
    """Put the pieces of every track together and hold them against the plan. Raises Failure."""
    for track in film.tracks:
        some = []
        for number, piece in enumerate(pieces):
            some.append(await work.bring(piece.files[track.stem], f"{track.stem}.{number:04}.mp4"))
        path = await tracks.join(work, some, film.grid, track)
        for file in some:
            file.unlink()
        await tracks.verify(work, path, film.grid, frames=film.grid.frames, slack=slack(film.grid))
        await tracks.decode_seams(work, path, film.grid, [p.first for p in pieces if p.first])
        made.decoded.add(track.stem)
    await check_tracks(work, film, info, film.tracks, made)

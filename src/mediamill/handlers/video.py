"""Video and sound: look, plan, run, and check every output before anyone sees it.

The plans are pure and lie in the modules beside this one, one for each kind of output; here is the
order in which they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mediamill.failures import Code, Failure
from mediamill.handlers import (
    Done,
    Outcome,
    Output,
    Reroute,
    Work,
    film,
    look,
    pieces,
    poster,
    running,
    sound,
    sound_stream,
    storyboard,
    subtitles,
)
from mediamill.handlers.film import Film, Made
from mediamill.handlers.running import Meter
from mediamill.handlers.tracks import Track
from mediamill.probe import MediaInfo
from mediamill.recipes.video import (
    AnimationOutput,
    CoverOutput,
    HlsOutput,
    M4aOutput,
    Mp3Output,
    OpusOutput,
    PosterOutput,
    SoundHlsOutput,
    StoryboardOutput,
    SubtitlesOutput,
    WaveformOutput,
)

DAMAGED: Final = "Parts of it are damaged and could not be decoded."
_Sounds = (M4aOutput, OpusOutput, Mp3Output)


async def handle(work: Work) -> Outcome:
    """A video, or what came as one: pictures and sounds are sent on to their own queues."""
    info = await look.look(work)
    if not isinstance(info, MediaInfo):
        return info
    if info.video is None:
        if work.recipe.audio is None:
            raise Failure(Code.NO_VIDEO_STREAM)
        return Reroute("audio", "audio")
    if work.recipe.video is None:
        raise Failure(Code.UNSUPPORTED_FORMAT, "This recipe has no outputs for video.")
    size = work.original.size
    ended = await work.children() if work.claim.fence > 1 else []
    shared = bool(ended) and all(child.state == "completed" for child in ended)
    planned = film.plan(work.recipe, info, size, in_pieces=shared)
    if not shared:
        in_pieces = film.plan(work.recipe, info, size, in_pieces=True)
        if await pieces.worthwhile(work, in_pieces, info):
            await _posters_early(work, info)
            return pieces.children(work, in_pieces)
    making = _Making(work, info, planned)
    if shared:
        try:
            await making.join(ended)
        except Failure as failure:
            if failure.code is not Code.SOURCE_MISSING:
                raise
            # The original is there: what children made long ago has been swept.
            return pieces.children(work, planned, anew=True)
    else:
        await making.encode()
    outputs = await making.finish()
    return Done(tuple(outputs), {"outputs": len(outputs), "warnings": making.notes})


async def handle_audio(work: Work) -> Outcome:
    """A sound file."""
    info = await look.look(work)
    if not isinstance(info, MediaInfo):
        return info
    if info.video is not None:
        return Reroute("video", "video")
    if work.recipe.audio is None:
        raise Failure(Code.NO_VIDEO_STREAM)
    wanted = work.recipe.audio
    outputs: list[Output] = []
    shown: dict[str, Any] = {}
    notes: list[str] = []
    files = sum(isinstance(o, _Sounds) for o in wanted)
    rungs = sum(len(o.ladder) for o in wanted if isinstance(o, SoundHlsOutput))
    files += rungs * len(info.sounds)
    meter = Meter(work, sound.SHARE * (info.duration_seconds or 1) * files)
    await work.enter("encode")
    for output in wanted:
        match output:
            case WaveformOutput():
                outputs += await sound.make_waveform(work, output, info)
            case CoverOutput():
                cover = await sound.make_cover(work, output, info)
                if cover is not None:
                    outputs.append(cover)
                elif info.cover is not None:
                    notes.append("The picture of the cover could not be read.")
            case SoundHlsOutput():
                streamed, shown[output.name] = await sound_stream.make(work, output, info, meter)
                outputs += streamed
            case _:
                made, shown[output.name] = await sound.make(work, output, info, meter)
                outputs.append(made)
    damaged = [told.pop("damaged", False) for told in shown.values()]
    if any(damaged):
        notes.append(DAMAGED)
    await look.describe(work, info, _sniffed(work), outputs=shown, warnings=notes)
    return Done(tuple(outputs), {"outputs": len(outputs), "warnings": notes})


async def _posters_early(work: Work, info: MediaInfo) -> None:
    """Something to show while the pieces are made."""
    wanted = [o for o in work.recipe.video or () if isinstance(o, PosterOutput)]
    await work.enter("poster")
    made = [await poster.make(work, output, info) for output in wanted]
    if made:
        await work.publish_early(made)


class _Making:
    """The outputs of one video on their way, as far as they have come."""

    def __init__(self, work: Work, info: MediaInfo, planned: Film) -> None:
        self.notes: list[str] = []
        self._work = work
        self._info = info
        self._planned = planned
        self._made = Made()
        self._texts: Sequence[subtitles.Track] | None = None
        self._done: dict[str, list[Output]] = {}
        wanted = work.recipe.video or ()
        sounds = sum(isinstance(o, _Sounds) for o in wanted) * bool(info.audio)
        seconds = info.duration_seconds or work.settings.max_duration_seconds
        share = sound.SHARE * seconds * (sounds + len(planned.sounds))
        self._meter = Meter(work, planned.work(info) + share)

    async def encode(self) -> None:
        """Posters, sound, and every picture; the smallest size of a ladder first, if wanted."""
        work, info, planned = self._work, self._info, self._planned
        await work.enter("poster")
        for wanted in work.recipe.video or ():
            if isinstance(wanted, PosterOutput):
                self._done[wanted.name] = [await poster.make(work, wanted, info)]
        await work.enter("encode")
        sounds = film.encode_sounds(work, planned, info, self._made, self._meter)
        rest = list(planned.tracks)
        early = next((s for s in planned.streams if s[0].smallest_first and len(s[1]) > 1), None)
        if early is not None and work.original.set_id is None:
            wanted_stream, rungs = early
            first = rungs[0]
            track = next(t for t in rest if t.stem == first.stem)
            rest.remove(track)
            await running.together(sounds, self._encode([track]))
            outputs = await film.make_stream(
                work,
                planned,
                info,
                wanted_stream,
                [first],
                texts=await self._subtitles(),
                made=self._made,
                folder=wanted_stream.name,
            )
            stills_made = [o for made in self._done.values() for o in made]
            await work.publish_early([*outputs, *stills_made])
            for output in outputs:
                output.path.unlink()
            await work.enter("encode")
            await self._encode(rest)
        else:
            await running.together(sounds, self._encode(rest))
        for output in await film.make_alone(work, planned, info, self._made, self._meter):
            self._done[output.name.removesuffix(".mp4")] = [output]

    async def _encode(self, some: Sequence[Track]) -> None:
        if some:
            made, meter = self._made, self._meter
            await film.encode_tracks(
                self._work, self._planned, self._info, some, made=made, meter=meter
            )

    async def join(self, ended: Sequence[Any]) -> None:
        """What the children encoded, and what they did not."""
        work, info = self._work, self._info
        await work.enter("join")
        self._meter.skip(self._planned.work(info))
        self._planned = await pieces.join(work, self._planned, info, ended, self._made)
        for wanted in work.recipe.video or ():
            if isinstance(wanted, PosterOutput):
                self._done[wanted.name] = [await poster.make(work, wanted, info)]
        for output in await film.make_alone(work, self._planned, info, self._made, self._meter):
            self._done[output.name.removesuffix(".mp4")] = [output]

    async def finish(self) -> list[Output]:
        """Package what is encoded, make the small things, and show how each came about."""
        work, info, planned = self._work, self._info, self._planned
        await work.enter("package")
        for output in await film.make_joined(work, planned, info, self._made):
            self._done[output.name.removesuffix(".mp4")] = [output]
        for stream, rungs in planned.streams:
            self._done[stream.name] = await film.make_stream(
                work,
                planned,
                info,
                stream,
                rungs,
                texts=await self._subtitles(),
                made=self._made,
                folder=stream.name,
            )
        shown = film.described(planned, self._made)
        for wanted in work.recipe.video or ():
            if wanted.name not in self._done:
                self._done[wanted.name] = await self._make_small(wanted, shown)
        if self._made.damaged:
            self.notes.append(DAMAGED)
        if info.video is not None and info.video.has_alpha:
            self.notes.append("Its transparent parts were laid on white.")
        await look.describe(work, info, _sniffed(work), outputs=shown, warnings=self.notes)
        return [o for wanted in work.recipe.video or () for o in self._done[wanted.name]]

    async def _make_small(self, wanted: Any, shown: dict[str, Any]) -> list[Output]:
        work, info = self._work, self._info
        rung = film.smallest(self._planned, work)
        match wanted:
            case StoryboardOutput():
                return await storyboard.make(work, wanted, info, rung)
            case AnimationOutput():
                return [await storyboard.animate(work, wanted, info, rung)]
            case SubtitlesOutput():
                found = await self._subtitles(wanted.name)
                return subtitles.outputs(found, info.duration_seconds)
            case WaveformOutput() if info.audio is not None:
                return await sound.make_waveform(work, wanted, info)
            case M4aOutput() | OpusOutput() | Mp3Output() if info.audio is not None:
                made, shown[wanted.name] = await sound.make(work, wanted, info, self._meter)
                self._made.damaged |= shown[wanted.name].pop("damaged", False)
                return [made]
        return []

    async def _subtitles(self, base: str = "subtitles") -> Sequence[subtitles.Track]:
        wants = any(
            isinstance(o, SubtitlesOutput) or (isinstance(o, HlsOutput) and o.subtitles)
            for o in self._work.recipe.video or ()
        )
        if self._texts is None:
            self._texts = []
            if wants:
                self._texts, notes = await subtitles.extract(self._work, base, self._info)
                self.notes += notes
        return self._texts


def _sniffed(work: Work) -> str | None:
    return work.original.detected_type

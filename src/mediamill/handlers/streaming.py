"""Adaptive streaming: a ladder of tracks, packaged once for HLS and for DASH.

Each rendition is one file; the playlists name byte ranges in it. So a film is some dozen objects
and not thousands, and both kinds of players read the same bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Final

from mediamill.failures import Code, Failure
from mediamill.handlers import Output, Work, checks, picture, running, subtitles
from mediamill.handlers.picture import Coding
from mediamill.handlers.tracks import Grid, Track
from mediamill.probe import AudioStream, MediaInfo
from mediamill.recipes.video import HlsOutput, Rung
from mediamill.tools import Command

MASTER: Final = "master.m3u8"
MANIFEST: Final = "manifest.mpd"
TYPES: Final = {
    ".m3u8": "application/vnd.apple.mpegurl",
    ".mpd": "application/dash+xml",
    ".vtt": "text/vtt",
}
_MOST_SOUNDS: Final = 8
_EXTINF_SLACK: Final = 0.001


@dataclass(frozen=True, slots=True)
class Heard:
    """One sound rendition: a file in scratch and what it is called."""

    name: str
    label: str
    language: str | None
    path: Path
    default: bool

    def stream(self, folder: str, group: str) -> str:
        """What the packager is to make of it, in a group of renditions."""
        return (
            f"in={self.path.name},stream=audio,output={folder}/{self.name}.mp4,"
            f"playlist_name={self.name}.m3u8,hls_group_id={group},hls_name={self.label},"
            f"dash_label={self.label}{_language(self.language)}"
        )


def ladder(wanted: HlsOutput, info: MediaInfo) -> list[Track]:
    """The tracks, smallest first. Sizes above the source are left out; if it is smaller than all,
    one of its own size is made."""
    video = info.video
    assert video is not None
    kept = video.hdr if wanted.hdr == "keep" else None
    found = []
    for name, rung in rungs(wanted, video.width, video.height):
        width, height = picture.fitted(video.width, video.height, rung.short_side)
        coding = Coding(
            width, height, wanted.codec, wanted.preset, wanted.crf, rung.max_video_kbps, kept
        )
        found.append(Track(name, coding, f"{wanted.name}-{name}"))
    return found


def rungs(wanted: HlsOutput, width: int, height: int) -> list[tuple[str, Rung]]:
    """The sizes that a picture of this size gets, and what they are called."""
    by_size = sorted(wanted.ladder, key=lambda rung: rung.short_side)
    side = min(width, height)
    fitting = [rung for rung in by_size if rung.short_side <= side] or by_size[:1]
    return [(f"{min(rung.short_side, side)}p", rung) for rung in fitting]


def segment_frames(wanted: HlsOutput, on: Grid) -> int:
    """Frames of a segment: whole groups, as near to the wanted length as they come."""
    wish = Fraction(wanted.segment_seconds).limit_denominator(1000) * on.rate
    return on.group * max(1, round(wish / on.group))


def renditions(sounds: Sequence[AudioStream]) -> list[tuple[str, str, str | None, AudioStream]]:
    """Name, label and language of each sound track, all distinct."""
    found: list[tuple[str, str, str | None, AudioStream]] = []
    for sound in sounds[:_MOST_SOUNDS]:
        stem = name = f"audio-{sound.language or 'und'}"
        label = base = sound.title or (sound.language or "Audio")
        number = 2
        while any(name == f[0] or label == f[1] for f in found):
            name, label, number = f"{stem}-{number}", f"{base} {number}", number + 1
        found.append((name, re.sub(r"[^\w .()-]", " ", label), sound.language, sound))
    return found


async def package(
    work: Work,
    wanted: HlsOutput,
    on: Grid,
    tracks: Sequence[Track],
    *,
    heard: Sequence[Heard],
    texts: Sequence[subtitles.Track],
    folder: str,
) -> None:
    """Write the renditions and playlists into `folder` of scratch. Raises Failure."""
    target = work.out / folder
    streams = []
    for track in tracks:
        streams.append(
            f"in={track.file},stream=video,output={folder}/{track.name}.mp4,"
            f"playlist_name={track.name}.m3u8"
        )
    streams += [rendition.stream(folder, "audio") for rendition in heard]
    for text, label in zip(texts, subtitles.labels(texts), strict=True):
        streams.append(
            f"in={text.path.name},stream=text,output={folder}/{text.path.name},"
            f"playlist_name={text.path.stem}.m3u8,hls_group_id=subtitles,hls_name={label}"
            f"{_language(text.stream.language)}"
        )
    files = [work.out / t.file for t in tracks] + [r.path for r in heard]
    await pack(work, streams, files, folder, seconds=on.seconds(segment_frames(wanted, on)))
    if heard:
        first = next((r for r in heard if r.default), heard[0])
        _make_default(target / MASTER, first)
        if wanted.audio_only:
            _add_audio_only(target / MASTER, first, target)


async def pack(
    work: Work, streams: Sequence[str], files: Sequence[Path], folder: str, *, seconds: float
) -> None:
    """Run the packager on `files`, of which `streams` say what becomes of them, with segments of
    about that length. Raises Failure."""
    target = work.out / folder
    target.mkdir(parents=True, exist_ok=True)
    args = (
        *streams,
        *("--segment_duration", f"{seconds:.9f}", "--fragment_duration", f"{seconds:.9f}"),
        *("--hls_master_playlist_output", f"{folder}/{MASTER}", "--hls_playlist_type", "VOD"),
        *("--mpd_output", f"{folder}/{MANIFEST}", "--temp_dir", "."),
        "--quiet",
        "--single_threaded",  # else the order of the streams in the manifest is left to chance
    )
    size = sum(file.stat().st_size for file in files)
    confined = running.jail(
        work,
        wall_seconds=120 + size / 5e6,
        write=True,
        file_bytes=2 * size + (64 << 20),
        scratch_bytes=1 << 50,
    )
    finished = await work.run_tool(Command("packager", args, None, "package"), confined)
    if finished.stopped_for is not None or finished.returncode != 0:
        known = running.failure(finished, Command("packager", args), confined)
        if known.code is Code.TOOL_FAILED:  # it was given files of ours only
            raise Failure(Code.OUTPUT_INVALID, "The renditions could not be packaged.")
        raise known
    for file in target.glob("*.mp4"):
        _forget_time(file)
    for file in target.glob("*.m3u8"):
        lines = file.read_text().splitlines()
        file.write_text("\n".join(x for x in lines if x and not x.startswith("## ")) + "\n")
    _raise_bandwidths(target)
    manifest = target / MANIFEST
    manifest.write_text(re.sub(r"<!--.*?-->\n?", "", manifest.read_text(), flags=re.DOTALL))


def _raise_bandwidths(folder: Path) -> None:
    """Have every entry of the master playlist tell at least its peak, with the costliest sound that
    may go with it. The packager leaves short last segments out."""
    master = folder / MASTER
    lines = master.read_text().splitlines()
    sounds: dict[str, dict[str, float]] = {}
    for line in lines:
        if line.startswith("#EXT-X-MEDIA:TYPE=AUDIO"):
            uri, group = _attribute(line, "URI"), _attribute(line, "GROUP-ID")
            sounds.setdefault(group, {})[uri] = _peak(_index((folder / uri).with_suffix(".mp4")))
    for number, (tags, uri) in enumerate(pairwise(lines)):
        if tags.startswith("#EXT-X-STREAM-INF:"):
            heard = sounds.get(_attribute(tags, "AUDIO"), {})
            peak = _peak(_index((folder / uri).with_suffix(".mp4")))
            if uri not in heard:
                peak += max(heard.values(), default=0.0)
            told = int(re.findall(r"[:,]BANDWIDTH=(\d+)", tags)[0])
            most = max(told, int(peak) + 1)
            lines[number] = re.sub(r"([:,]BANDWIDTH=)\d+", rf"\g<1>{most}", tags, count=1)
    master.write_text("\n".join(lines) + "\n")


def _attribute(line: str, name: str) -> str:
    """A quoted attribute of a line of a playlist, or nothing."""
    found = re.search(rf'[:,]{name}="([^"]*)"', line)
    return found[1] if found else ""


def _forget_time(path: Path) -> None:
    """Take the time of packaging out of the headers, so that the same input gives the same file."""
    with path.open("r+b") as file:
        head = file.read(64 << 10)
        for name in (b"mvhd", b"tkhd", b"mdhd"):
            at = head.find(name)
            while at >= 0:
                wide = head[at + 4] == 1  # version: times of 64 bits
                file.seek(at + 8)
                file.write(bytes(16 if wide else 8))
                at = head.find(name, at + 4)


# What the packager takes of ISO 639-1; codes of three letters it takes all.
_TWO_LETTERS: Final = frozenset(
    "aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv"
    " cy da de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho"
    " hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku"
    " kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn"
    " no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm"
    " sn so sq sr ss st su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi"
    " vo wa wo xh yi yo za zh zu".split()
)


def _language(tag: str | None) -> str:
    """A language that the packager takes, as a part of a stream's description."""
    main = (tag or "").partition("-")[0]
    known = len(main) == 3 or main in _TWO_LETTERS
    return f",language={tag}" if known else ""


def _make_default(master: Path, rendition: Heard) -> None:
    lines = master.read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith("#EXT-X-MEDIA:") and f'URI="{rendition.name}.m3u8"' in line:
            lines[number] = line.replace("DEFAULT=NO", "DEFAULT=YES")
    master.write_text("\n".join(lines) + "\n")


def _add_audio_only(master: Path, rendition: Heard, folder: Path) -> None:
    """A rung without a picture, from the sound that is there."""
    segments = _index(folder / f"{rendition.name}.mp4")
    peak = _peak(segments)
    average = sum(size for _, size in segments) * 8 / sum(seconds for seconds, _ in segments)
    codec = re.search(r'CODECS="[^"]*?(mp4a[^",]*)', master.read_text())
    assert codec is not None
    with master.open("a") as file:
        file.write(
            f"#EXT-X-STREAM-INF:BANDWIDTH={int(peak) + 1},AVERAGE-BANDWIDTH={int(average) + 1},"
            f'CODECS="{codec[1]}",AUDIO="audio",CLOSED-CAPTIONS=NONE\n{rendition.name}.m3u8\n'
        )


def _segments(playlist: str) -> list[tuple[float, int]]:
    """Seconds and bytes of each segment of a playlist of byte ranges."""
    found: list[tuple[float, int]] = []
    seconds = 0.0
    for line in playlist.splitlines():
        if line.startswith("#EXTINF:"):
            seconds = float(line.removeprefix("#EXTINF:").rstrip(",").split(",")[0])
        elif line.startswith("#EXT-X-BYTERANGE:"):
            size = int(line.removeprefix("#EXT-X-BYTERANGE:").partition("@")[0])
            found.append((seconds, size))
    return found


async def verify(
    work: Work,
    wanted: HlsOutput,
    info: MediaInfo,
    on: Grid,
    *,
    counts: Mapping[str, int],
    decoded: Collection[str],
    heard: Sequence[Heard],
    texts: Sequence[subtitles.Track],
    seconds: float,
    folder: str,
    damaged: bool,
) -> list[Output]:
    """The package is what was planned: every segment begins at the same frame in every size and is
    as long as it says, and everything decodes. `counts` are the frames of each track by name,
    `decoded` those that were decoded before they were packaged.

    Raises Failure.
    """
    root = work.out / folder

    def expect(holds: bool, what: str) -> None:
        if not holds:
            raise Failure(Code.OUTPUT_INVALID, f"{folder}: {what}.")

    frames = segment_frames(wanted, on)
    hdr = info.video.hdr if info.video is not None and wanted.hdr == "keep" else None

    expect(len(set(counts.values())) == 1, "its sizes have different numbers of frames")
    length = on.seconds(next(iter(counts.values())))

    async def picture_of(name: str, count: int) -> Output:
        path = root / f"{name}.mp4"
        expected = [on.seconds(min(frames, count - at)) for at in range(0, count, frames)]
        said = [s for s, _ in _segments((root / f"{name}.m3u8").read_text())]
        expect(_equal(said, expected), f"the segments of {name} are not as long as planned")
        check_segments(path, expect=expect)
        found = await checks.probe_output(work, path)
        expect(found.video is not None and found.video.frames == count, f"{name} lost frames")
        assert found.video is not None
        expect(found.audio is None, f"{name} has sound")
        checks.colors(name, found.video, hdr)
        if name not in decoded:
            await checks.decode(work, path, on.seconds(count), picture=True)
        size = found.video.width, found.video.height
        return Output(f"{folder}/{path.name}", path, "video/mp4", *size, on.seconds(count))

    async def sound_of(rendition: Heard) -> Output:
        path = root / f"{rendition.name}.mp4"
        found = await checks.probe_output(work, path)
        expect(found.audio is not None, f"{rendition.name} has no sound")
        assert found.audio is not None
        # Encoders begin with some silence of their own, which players leave out.
        begins = abs(found.audio.start_seconds)
        expect(begins <= max(1 / float(on.rate), 0.045), f"{rendition.name} begins late")
        check_segments(path, expect=expect)
        if rendition.default and not damaged:
            ended = (await checks.tail(work, path, found)).sound
            late = None if ended is None else ended - length
            was = info.sound_after_picture
            checks.apart(rendition.name, "end", late, was, source=info, rate=on.rate)
        await checks.decode(work, path, found.duration_seconds)
        seconds = found.duration_seconds
        return Output(f"{folder}/{path.name}", path, "audio/mp4", duration_seconds=seconds)

    outputs = await running.together(
        *(picture_of(name, count) for name, count in counts.items()),
        *(sound_of(rendition) for rendition in heard),
    )
    checks.length(length, info, picture=True)
    _check_master(root / MASTER, counts, bool(heard), expect=expect)
    known = {output.path for output in outputs}
    others = [p for p in sorted(root.iterdir()) if p not in known]
    expect(len(others) == 2 + len(known) + 2 * len(texts), "a file is missing or too many")
    outputs += [Output(f"{folder}/{p.name}", p, TYPES[p.suffix]) for p in others]
    # The first ones are what a player is given.
    outputs.sort(key=lambda o: (o.path.name != MASTER, o.path.name != MANIFEST))
    top = max((o for o in outputs if o.width), key=lambda o: o.width or 0)
    for number, doorway in enumerate(outputs[:2]):
        outputs[number] = replace(
            doorway,
            width=top.width,
            height=top.height,
            duration_seconds=length,
            seconds=round(seconds, 3),
        )
    return outputs


def _check_master(
    master: Path,
    counts: Mapping[str, int],
    has_sound: bool,
    *,
    expect: Callable[[bool, str], None],
) -> None:
    lines = master.read_text().splitlines()
    rungs = {
        uri.removesuffix(".m3u8"): tags
        for tags, uri in pairwise(lines)
        if tags.startswith("#EXT-X-STREAM-INF:")
    }
    for name in counts:
        tags = rungs.get(name, "")
        codecs = (re.search(r'CODECS="([^"]+)"', tags) or ["", ""])[1].split(",")
        expect(len(codecs) == 1 + has_sound, f"the master playlist names {codecs} for {name}")
        for wanted in ("BANDWIDTH=", "RESOLUTION=", "FRAME-RATE="):
            expect(wanted in tags, f"the master playlist has no {wanted[:-1]} for {name}")
        check_bandwidth(tags, master.parent / f"{name}.mp4", expect=expect)


def check_bandwidth(tags: str, path: Path, *, expect: Callable[[bool, str], None]) -> None:
    """The bandwidth told in the master playlist covers the costliest stretch of a file."""
    told = re.search(r"[:,]BANDWIDTH=(\d+)", tags)
    high_enough = told is not None and int(told[1]) >= int(_peak(_index(path)))
    expect(high_enough, f"the bandwidth of {path.stem} is too low")


def _peak(segments: Sequence[tuple[float, int]]) -> float:
    """The peak segment bit rate (RFC 8216, 4.3.4.2): of segments in a row that are together between
    half and one and a half times as long as the longest. So a last one of a frame says nothing."""
    longest = max(seconds for seconds, _ in segments)
    found = []
    for first in range(len(segments)):
        seconds = 0.0
        size = 0
        for more, bytes_more in segments[first:]:
            seconds, size = seconds + more, size + bytes_more
            if seconds > 1.5 * longest:
                break
            if seconds >= 0.5 * longest:
                found.append(size * 8 / seconds)
    return max(found)


def check_segments(path: Path, *, expect: Callable[[bool, str], None]) -> None:
    """Every segment in the playlist beside a file is one that the file's index (`sidx`) has, with
    the same bytes and, to a millisecond, the same length."""
    told = _segments(path.with_suffix(".m3u8").read_text())
    real = _index(path)
    expect(
        [size for _, size in told] == [size for _, size in real]
        and _equal([seconds for seconds, _ in told], [seconds for seconds, _ in real]),
        f"the segments of {path.stem} are not as long as they say",
    )


def _equal(some: Sequence[float], others: Sequence[float]) -> bool:
    return len(some) == len(others) and all(
        abs(a - b) <= _EXTINF_SLACK for a, b in zip(some, others, strict=True)
    )


def _index(path: Path) -> list[tuple[float, int]]:
    """Seconds and bytes of each segment, from the `sidx` box (ISO/IEC 14496-12); empty if there is
    none."""
    with path.open("rb") as file:
        while len(header := file.read(8)) == 8:
            size, name = struct.unpack(">I4s", header)
            if size < 8:
                return []
            if name == b"sidx":
                body = file.read(size - 8)
                break
            file.seek(size - 8, 1)
        else:
            return []
    (timescale,) = struct.unpack_from(">I", body, 8)
    at = 22 if body[0] == 0 else 30
    (count,) = struct.unpack_from(">H", body, at)
    entries = struct.iter_unpack(">III", body[at + 2 : at + 2 + 12 * count])
    return [(length / timescale, size & 0x7FFFFFFF) for size, length, _ in entries]

"""Films that some pipeline got wrong, through the handler and the real tools; the right values are
next to them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import m3u8
import pytest
from PIL import Image
from tests.handlers.films import (
    RGB,
    Films,
    ffmpeg,
    near,
    packets,
    probe,
    spot,
    stream,
)
from tests.handlers.studio import Result, Studio

from mediamill import sidecars
from mediamill.failures import Code
from mediamill.handlers import (
    Child,
    Done,
    Reroute,
    Wait,
    mp4,
    preview,
    running,
    sound,
    video,
)
from mediamill.sidecars import Sidecar

pytestmark = pytest.mark.anyio

RED, GREEN, BLUE, YELLOW = (220, 30, 30), (30, 180, 60), (40, 60, 210), (235, 215, 40)
QUARTERS = (
    "color=c=0xdc1e1e:s={w}x{h}:r=10,drawbox=x=iw/2:w=iw/2:h=ih/2:c=0x1eb43c:t=fill,"
    "drawbox=y=ih/2:w=iw/2:h=ih/2:c=0x283cd2:t=fill,"
    "drawbox=x=iw/2:y=ih/2:w=iw/2:h=ih/2:c=0xebd728:t=fill"
)
MP4: dict[str, Any] = {"type": "mp4", "preset": "ultrafast"}
POSTER = {"type": "poster"}
LADDER = [
    {"short_side": 180, "max_video_kbps": 600},
    {"short_side": 96, "max_video_kbps": 300},
]
HLS: dict[str, Any] = {"type": "hls", "ladder": LADDER, "preset": "ultrafast"}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def corners(path: Path, wanted: tuple[RGB, RGB, RGB, RGB], by: float = 45) -> None:
    """Top left, top right, bottom left, bottom right, as any program shows them that knows nothing
    of rotation."""
    at = ((0.2, 0.2), (0.8, 0.2), (0.2, 0.8), (0.8, 0.8))
    for (x, y), color in zip(at, wanted, strict=True):
        near(spot(path, x, y), color, by)


def shown(result: Result) -> tuple[int | None, int | None]:
    return result.description.width, result.description.height


def master(result: Result, folder: str = "hls") -> m3u8.M3U8:
    path = result.files[f"{folder}/master.m3u8"]
    return m3u8.loads(path.read_text(), uri=f"{path.parent}/")


def media(result: Result, name: str, folder: str = "hls") -> m3u8.M3U8:
    return m3u8.loads(result.files[f"{folder}/{name}.m3u8"].read_text())


def segment(result: Result, name: str, number: int, folder: str = "hls") -> bytes:
    """The header and one segment, as a player puts them together."""
    playlist = media(result, name, folder)
    data = result.files[f"{folder}/{name}.mp4"].read_bytes()
    head = int(playlist.segments[0].init_section.byterange.partition("@")[0])
    offset = 0
    for n, part in enumerate(playlist.segments):
        size, _, at = part.byterange.partition("@")
        offset = int(at) if at else offset
        if n == number:
            return data[:head] + data[offset : offset + int(size)]
        offset += int(size)
    raise AssertionError(f"{name} has no segment {number}")


# --- The picture


@pytest.mark.parametrize(
    ("name", "degrees", "codec", "wanted"),
    [
        ("quarter.mp4", 90, "libx264", (GREEN, YELLOW, RED, BLUE)),
        ("three.mov", 270, "libx265", (BLUE, RED, YELLOW, GREEN)),
        ("half.mp4", 180, "libx264", (YELLOW, BLUE, GREEN, RED)),
    ],
)
async def test_a_turned_film_is_turned_once(
    studio: Studio, films: Films, name: str, degrees: int, codec: str, wanted: Any
) -> None:
    flat = films.make(
        f"flat-{codec}{Path(name).suffix}",
        picture=QUARTERS.format(w=320, h=180),
        sound=None,
        seconds=1,
        codec=("-c:v", codec, "-pix_fmt", "yuv420p"),
    )
    turned = films.folder / name
    ffmpeg("-v", "error", "-display_rotation", str(degrees), "-i", flat, "-c", "copy", turned)
    done = await studio.handle(turned, [MP4, POSTER])
    size = (320, 180) if degrees == 180 else (180, 320)
    assert shown(done) == size
    made = stream(done.files["video.mp4"], "video")
    assert (made["width"], made["height"]) == size
    assert not made.get("side_data_list")
    corners(done.files["video.mp4"], wanted)
    corners(done.files["poster.jpg"], wanted)


async def test_odd_sizes_become_even_without_an_edge(studio: Studio, films: Films) -> None:
    source = films.make(
        "odd.webm",
        picture="color=c=0xebd728:s=317x239:r=10",
        sound=None,
        seconds=1,
        codec=("-c:v", "libvpx"),
    )
    done = await studio.handle(source, [MP4, POSTER])
    assert shown(done) == (317, 239)
    made = stream(done.files["video.mp4"], "video")
    assert (made["width"], made["height"]) == (316, 238)
    for x, y in ((0.99, 0.5), (0.5, 0.99), (0.99, 0.99), (0.5, 0.5)):
        near(spot(done.files["video.mp4"], x, y), YELLOW, 20)


async def test_pixels_become_square(studio: Studio, films: Films) -> None:
    source = films.make(
        "wide.mp4",
        picture=f"{QUARTERS.format(w=360, h=288)},setsar=16/11",
        sound=None,
        seconds=1,
    )
    done = await studio.handle(source, [MP4, POSTER, HLS])
    assert shown(done) == (524, 288)
    made = stream(done.files["video.mp4"], "video")
    assert (made["width"], made["height"]) == (524, 288)
    assert made["sample_aspect_ratio"] == "1:1"
    with Image.open(done.files["poster.jpg"]) as poster:
        assert poster.size == (524, 288)
    assert [p.stream_info.resolution for p in master(done).playlists] == [(174, 96), (326, 180)]


async def test_an_h264_that_no_browser_plays_is_made_one_that_all_do(
    studio: Studio, films: Films
) -> None:
    source = films.make("444.mp4", codec=("-c:v", "libx264", "-pix_fmt", "yuv444p"), seconds=1)
    done = await studio.handle(source, [{**MP4, "copy_if_fit": True}])
    made = stream(done.files["video.mp4"], "video")
    assert (made["codec_name"], made["pix_fmt"]) == ("h264", "yuv420p")
    assert (made["color_space"], made["color_transfer"]) == ("bt709", "bt709")
    shown = done.info["outputs"]["video"]
    assert (shown["way"], shown["reason"]) == ("encoded", "its pixels are yuv444p")


@pytest.mark.parametrize("flagged", [True, False])
async def test_combs_are_removed_told_or_not(studio: Studio, films: Films, flagged: bool) -> None:
    name = "combed-flagged.ts" if flagged else "combed.mkv"
    codec: tuple[str, ...] = ("-c:v", "mpeg2video", "-q:v", "3", "-flags", "+ildct+ilme")
    if not flagged:
        codec = ("-c:v", "libx264", "-preset", "ultrafast", "-x264-params", "interlaced=0")
    source = films.make(
        name,
        picture="testsrc2=s=720x480:r=50,drawbox=x='mod(t*600,680)':w=40:h=480:c=white:t=fill,"
        "tinterlace=interleave_top" + (",setfield=tff" if flagged else ",setfield=prog"),
        sound=None,
        seconds=1.6,
        codec=codec,
    )
    done = await studio.handle(source, [MP4])
    assert done.info["interlaced"] is True
    assert done.info["interlaced_by"] == ("flag" if flagged else "sampled")
    said = ffmpeg("-i", done.files["video.mp4"], "-vf", "idet", "-f", "null", "-").stderr.decode()
    counted = re.findall(r"Multi frame detection: TFF:\s*(\d+) BFF:\s*(\d+)", said)[-1]
    before = ffmpeg("-i", source, "-vf", "idet", "-f", "null", "-").stderr.decode()
    combed = re.findall(r"Multi frame detection: TFF:\s*(\d+)", before)[-1]
    assert int(combed) >= 30
    assert sum(map(int, counted)) <= 6, counted


async def test_transparent_parts_are_laid_on_white_and_that_is_said(
    studio: Studio, films: Films
) -> None:
    source = films.make(
        "clear.webm",
        picture="color=c=black@0:s=160x120:r=10,format=yuva420p,"
        "drawbox=x=40:y=30:w=80:h=60:c=red@1:t=fill:replace=1",
        sound=None,
        seconds=1,
        codec=("-c:v", "libvpx-vp9", "-pix_fmt", "yuva420p"),
    )
    done = await studio.handle(source, [MP4, POSTER])
    assert done.info["has_alpha"] is True
    assert done.info["warnings"] == ["Its transparent parts were laid on white."]
    for file in ("poster.jpg", "video.mp4"):
        near(spot(done.files[file], 0.1, 0.1), (255, 255, 255), 25)
        found = spot(done.files[file], 0.5, 0.5)
        assert found[0] > 180 > 90 > found[1]


async def test_hdr_is_shown_on_ordinary_screens_or_kept(studio: Studio, films: Films) -> None:
    # Patches of 203, 26 and 1000 nit, as PQ code values of ten bits in limited range.
    levels = (573, 375, 722)
    boxes = ",".join(
        f"geq=lum='if(between(X,{n * 64},{n * 64 + 63}),{level},lum(X,Y))':cb=512:cr=512"
        for n, level in enumerate(levels)
    )
    source = films.make(
        "hdr.mp4",
        picture=f"color=c=black:s=192x108:r=10,format=yuv420p10le,{boxes},setparams="
        "color_primaries=bt2020:color_trc=smpte2084:colorspace=bt2020nc:range=tv",
        sound=None,
        seconds=1,
        codec=("-c:v", "libx265", "-preset", "ultrafast", "-pix_fmt", "yuv420p10le"),
    )
    kept = {**MP4, "name": "kept", "codec": "hevc", "hdr": "keep"}
    done = await studio.handle(source, [MP4, POSTER, kept])
    assert (done.info["hdr"], done.info["hdr_format"]) == (True, "pq")
    made = stream(done.files["video.mp4"], "video")
    assert (made["pix_fmt"], made["color_transfer"]) == ("yuv420p", "bt709")
    for file in ("video.mp4", "poster.jpg"):
        grays = [spot(done.files[file], x, 0.5) for x in (0.17, 0.5, 0.83)]
        assert all(max(gray) - min(gray) <= 8 for gray in grays), grays
        assert 170 <= grays[0][1] <= 245, grays
        assert 65 <= grays[1][1] <= 165, grays
        assert grays[2][1] >= 225, grays
    made = stream(done.files["kept.mp4"], "video")
    assert (made["pix_fmt"], made["color_transfer"]) == ("yuv420p10le", "smpte2084")
    assert (made["color_primaries"], made["codec_tag_string"]) == ("bt2020", "hvc1")


# --- Containers


async def test_lengths_are_real_where_the_file_tells_none(studio: Studio, films: Films) -> None:
    piped = films.folder / "piped.webm"
    whole = films.make("whole.webm", codec=("-c:v", "libvpx", "-deadline", "realtime"), seconds=2)
    done = ffmpeg("-v", "error", "-i", whole, "-c", "copy", "-f", "webm", "pipe:1")
    piped.write_bytes(done.stdout)
    fragmented = films.make(
        "fragmented.mp4", seconds=2, more=("-movflags", "empty_moov+frag_keyframe", "-g", "25")
    )
    for source in (piped, fragmented):
        made = await studio.handle(source, [MP4, POSTER])
        assert made.description.duration_seconds == pytest.approx(2.0, abs=0.15), source
        assert set(made.files) == {"video.mp4", "poster.jpg"}
        percents = [value for kind, value in made.desk.told if kind == "progress"]
        assert all(0 <= percent <= 100 for percent in percents)


async def test_other_tracks_and_places_are_left_out(studio: Studio, films: Films) -> None:
    source = films.make(
        "camera.mov",
        seconds=1,
        more=("-timecode", "01:00:00:00", "-metadata", "location=+03.0000+004.0000/"),
    )
    assert {s["codec_type"] for s in probe(source)["streams"]} == {"video", "audio", "data"}
    for copy in (True, False):
        done = await studio.handle(source, [{**MP4, "copy_if_fit": copy, "max_video_kbps": 50000}])
        found = probe(done.files["video.mp4"])
        assert [s["codec_type"] for s in found["streams"]] == ["video", "audio"]
        assert '"location' not in json.dumps(found)
        assert b"+03.0000" not in done.files["video.mp4"].read_bytes()
        assert done.info["outputs"]["video"]["way"] == ("copied" if copy else "encoded")


async def test_what_fits_is_taken_over_and_what_does_not_says_why(
    studio: Studio, films: Films
) -> None:
    wanted = {**MP4, "copy_if_fit": True, "max_video_kbps": 20000}
    plain = films.make("plain.mp4", more=("-c:a", "aac"))
    done = await studio.handle(plain, [wanted])
    assert done.info["outputs"]["video"] == {
        "way": "copied",
        "reason": "the original already fits",
    }
    source, made = packets(plain), packets(done.files["video.mp4"])
    assert [p["size"] for p in source] == [p["size"] for p in made]
    head = done.files["video.mp4"].read_bytes()
    assert head.index(b"moov") < head.index(b"mdat")
    for more, reason in (
        ({"short_side": 96}, "it is larger than wanted"),
        ({"loudness": -16.0}, "its loudness is to be set"),
        ({"max_frame_rate": 20.0}, "its frame rate is unknown or too high"),
    ):
        done = await studio.handle(plain, [{**wanted, **more}])
        assert done.info["outputs"]["video"]["reason"] == reason
    vorbis = films.make("vorbis.mkv", more=("-c:a", "libvorbis"), seconds=1)
    done = await studio.handle(vorbis, [wanted])
    assert done.info["outputs"]["video"]["reason"] == "its sound is coded as vorbis"


# --- Time


async def test_a_varying_pace_is_kept_in_a_file_and_made_steady_in_a_stream(
    studio: Studio, films: Films
) -> None:
    """10 frames in the first second, 30 in the second, 5 in the third: red, green, blue."""
    parts = []
    for n, (rate, color) in enumerate(((10, "red"), (30, "lime"), (5, "blue"))):
        part = films.make(
            f"pace-{n}.mp4",
            picture=f"color=c={color}:s=320x180:r={rate}",
            sound=None,
            seconds=1,
            more=("-video_track_timescale", "30000", "-bf", "0"),
        )
        parts.append(f"file '{part.name}'\n")
    listing = films.folder / "pace.txt"
    listing.write_text("".join(parts))
    source = films.folder / "pace.mp4"
    ffmpeg(
        *("-v", "error", "-f", "concat", "-i", listing, "-f", "lavfi", "-i", "sine=d=3"),
        *("-c:v", "copy", "-c:a", "aac", "-shortest", source),
    )
    done = await studio.handle(source, [MP4, HLS])
    assert done.info["variable_frame_rate"] is True
    assert done.description.duration_seconds == pytest.approx(3.0, abs=0.2)
    for file in ("video.mp4", "hls/180p.mp4"):
        for at, channel in ((0.5, 0), (0.9, 0), (1.1, 1), (1.5, 1), (1.9, 1), (2.12, 2), (2.5, 2)):
            found = spot(done.files[file], 0.5, 0.5, at=at)
            assert max(range(3), key=lambda c: found[c]) == channel, (file, at, found)
    assert len(packets(done.files["video.mp4"])) == 45
    steady = [p["pts"] for p in packets(done.files["hls/180p.mp4"])]
    assert {b - a for a, b in pairwise(steady)} == {steady[1]}
    streams = probe(done.files["video.mp4"])["streams"]
    assert abs(float(streams[0]["duration"]) - float(streams[1]["duration"])) <= 0.25


async def test_a_clock_that_begins_late_and_black_is_set_to_zero(
    studio: Studio, films: Films
) -> None:
    source = films.make(
        "late.ts",
        picture="testsrc2=s=320x180:r=25,drawbox=c=black:t=fill:enable='lt(t,0.4)'",
        seconds=4,
        more=("-output_ts_offset", "3600", "-g", "25"),
    )
    assert float(probe(source)["format"]["start_time"]) > 3000
    done = await studio.handle(source, [MP4, POSTER, HLS])
    assert done.description.duration_seconds == pytest.approx(4.0, abs=0.2)
    with Image.open(done.files["poster.jpg"]) as poster:
        assert sum(poster.convert("L").resize((1, 1)).tobytes()) > 40
    for file in ("video.mp4", "hls/180p.mp4", "hls/audio-und.mp4"):
        assert abs(float(probe(done.files[file])["format"]["start_time"])) <= 0.1, file
    assert max(spot(done.files["hls/180p.mp4"], 0.5, 0.5, at=0.2)) < 40
    assert max(spot(done.files["hls/180p.mp4"], 0.5, 0.5, at=0.6)) > 60


async def test_an_edit_list_is_honored(studio: Studio, films: Films) -> None:
    """The first second is red and is to be left out; decoding must begin with it all the same."""
    whole = films.make(
        "red-then-blue.mp4",
        picture="color=c=red:s=192x108:r=25,drawbox=c=blue:t=fill:enable='gte(t,1)'",
        seconds=3,
        more=("-g", "250", "-c:a", "aac"),
    )
    source = films.folder / "edited.mp4"
    ffmpeg("-v", "error", "-ss", "1.2", "-i", whole, "-c", "copy", source)
    assert b"elst" in source.read_bytes()
    done = await studio.handle(source, [MP4, HLS, POSTER])
    assert done.description.duration_seconds == pytest.approx(1.8, abs=0.1)
    for file in ("video.mp4", "hls/96p.mp4", "poster.jpg"):
        color = spot(done.files[file], 0.5, 0.5)
        assert color[2] > 180 > 80 > color[0], (file, color)
    assert len(packets(done.files["hls/96p.mp4"])) == pytest.approx(45, abs=1)


async def test_the_same_film_gives_the_same_files(studio: Studio, films: Films) -> None:
    source = films.make("plain.mp4", more=("-c:a", "aac"))
    wanted = [{**HLS, "ladder": LADDER[1:]}, {**MP4, "short_side": 96}]
    one, two = [await studio.handle(source, wanted) for _ in range(2)]
    assert set(one.files) == set(two.files)
    for name, path in one.files.items():
        assert path.read_bytes() == two.files[name].read_bytes(), name


@pytest.mark.parametrize(
    ("rate", "frames"), [("30000/1001", 60), ("24000/1001", 150), ("10", 20), ("60000/1001", 90)]
)
async def test_no_frame_is_lost_or_doubled(
    studio: Studio, films: Films, rate: str, frames: int
) -> None:
    number = float(Fraction(rate))
    source = films.make(
        f"rate-{frames}.mkv",
        picture=f"testsrc2=s=192x108:r={rate}",
        seconds=frames / number,
        more=("-frames:v", str(frames)),
    )
    done = await studio.handle(source, [MP4, {**HLS, "segment_seconds": 2.0}])
    assert len(packets(done.files["video.mp4"])) == frames
    made = packets(done.files["hls/96p.mp4"])
    assert len(made) == frames
    playlist = media(done, "96p")
    total = sum(s.duration for s in playlist.segments)
    assert total == pytest.approx(frames / number, abs=0.001 * len(playlist.segments))
    group = round(number * 2)
    first = 0
    for part in playlist.segments:
        count = min(group, frames - first)
        assert part.duration == pytest.approx(count / number, abs=0.001)
        first += count
    assert float(stream(done.files["hls/96p.mp4"], "video")["duration"]) == pytest.approx(
        frames / number, abs=0.001
    )


# --- Streams


async def test_segments_line_up_though_the_source_has_one_key_frame(
    studio: Studio, films: Films
) -> None:
    source = films.make(
        "slow.mp4",
        picture="color=c=gray:s=320x180:r=10,fade=in:0:120",
        sound=None,
        seconds=12,
        more=("-g", "500", "-sc_threshold", "0"),
    )
    done = await studio.handle(source, [{**HLS, "segment_seconds": 4.0}])
    starts = []
    for name in ("96p", "180p"):
        playlist = media(done, name)
        assert playlist.is_endlist
        assert playlist.playlist_type == "vod"
        lengths = [s.duration for s in playlist.segments]
        assert lengths == [4.0, 4.0, 4.0]
        assert all(round(s) <= playlist.target_duration for s in lengths)
        starts.append([sum(lengths[:n]) for n in range(len(lengths))])
        for number in range(3):
            alone = films.folder / f"{name}-{number}.mp4"
            alone.write_bytes(segment(done, name, number))
            first = probe(alone, "-show_packets", "-select_streams", "v:0")["packets"][0]
            assert first["flags"].startswith("K"), "a segment begins without a key frame"
            assert float(first["pts_time"]) == pytest.approx(4.0 * number, abs=0.001)
            ffmpeg("-v", "error", "-xerror", "-i", alone, "-f", "null", "-")
    assert starts[0] == starts[1]


async def test_nothing_is_enlarged(studio: Studio, films: Films) -> None:
    source = films.make("upright.mp4", picture="testsrc2=s=108x192:r=25", seconds=1)
    done = await studio.handle(source, [{"type": "hls", "preset": "ultrafast"}, MP4, POSTER])
    (rung, audio_only) = master(done).playlists
    assert rung.stream_info.resolution == (108, 192)
    assert audio_only.stream_info.resolution is None
    made = stream(done.files["video.mp4"], "video")
    assert (made["width"], made["height"]) == (108, 192)


async def test_a_silent_film_promises_no_sound(studio: Studio, films: Films) -> None:
    source = films.make("silent.mp4", sound=None, seconds=2)
    done = await studio.handle(source, [HLS, MP4])
    assert done.info["has_audio"] is False
    found = master(done)
    assert len(found.playlists) == 2
    for playlist in found.playlists:
        assert re.fullmatch(r"avc1\.[0-9a-f]{6}", playlist.stream_info.codecs)
        assert playlist.stream_info.audio is None
    assert found.media == []
    assert [s["codec_type"] for s in probe(done.files["video.mp4"])["streams"]] == ["video"]


async def test_the_master_playlist_says_what_the_segments_are(studio: Studio, films: Films) -> None:
    """With sound of 22 kHz in AAC-LC, which players take for HE-AAC when it is guessed."""
    source = films.make(
        "low.mp4",
        sound="sine=frequency=300:sample_rate=22050",
        seconds=4,
        more=("-c:a", "aac", "-ac", "1"),
    )
    done = await studio.handle(source, [{**HLS, "segment_seconds": 2.0}])
    found = master(done)
    for playlist, name in zip(found.playlists, ("96p", "180p"), strict=False):
        video, audio = playlist.stream_info.codecs.split(",")
        assert audio == "mp4a.40.2"
        box = done.files[f"hls/{name}.mp4"].read_bytes()
        at = box.index(b"avcC")
        assert video == f"avc1.{box[at + 5 : at + 8].hex()}"
        made = stream(done.files[f"hls/{name}.mp4"], "video")
        assert playlist.stream_info.resolution == (made["width"], made["height"])
        assert playlist.stream_info.frame_rate == 25.0
        peaks = []
        for number, part in enumerate(media(done, name).segments):
            sound = media(done, "audio-und").segments
            size = int(part.byterange.partition("@")[0])
            extra = int(sound[min(number, len(sound) - 1)].byterange.partition("@")[0])
            peaks.append((size + extra) * 8 / part.duration)
        assert playlist.stream_info.bandwidth >= max(peaks) * 0.999
        assert playlist.stream_info.average_bandwidth <= playlist.stream_info.bandwidth
    lengths = [
        float(stream(done.files[f"hls/{name}.mp4"], kind)["duration"])
        for name, kind in (("180p", "video"), ("audio-und", "audio"))
    ]
    assert abs(lengths[0] - lengths[1]) <= 0.1, "sound and picture do not end together"
    (rendition,) = found.media
    assert (rendition.type, rendition.default, rendition.channels) == ("AUDIO", "YES", "1")
    manifest = done.files["hls/manifest.mpd"]
    for option in ("0:v:0", "0:v:1", "0:a:0"):
        ffmpeg("-v", "error", "-xerror", "-i", manifest, "-map", option, "-f", "null", "-")


async def test_languages_and_subtitles_are_renditions_of_their_own(
    studio: Studio, films: Films
) -> None:
    words = films.folder / "words.srt"
    words.write_text("1\n00:00:00,500 --> 00:00:01,500\nIt’s a café\n", encoding="utf-8")
    source = films.folder / "languages.mkv"
    ffmpeg(
        *("-v", "error", "-f", "lavfi", "-i", "testsrc2=s=320x180:r=25:d=2"),
        *("-f", "lavfi", "-i", "sine=300:d=2", "-f", "lavfi", "-i", "sine=900:d=2", "-i", words),
        *("-map", "0", "-map", "1", "-map", "2", "-map", "3", "-c:v", "libx264", "-c:s", "srt"),
        *("-metadata:s:a:0", "language=deu", "-metadata:s:a:1", "language=fra"),
        *("-metadata:s:s:0", "language=eng", "-disposition:a:1", "default"),
        *("-disposition:a:0", "0", source),
    )
    done = await studio.handle(source, [HLS, {"type": "subtitles"}])
    found = master(done)
    sounds = {m.language: m for m in found.media if m.type == "AUDIO"}
    assert set(sounds) == {"de", "fr"}
    assert [sounds[language].default for language in ("de", "fr")] == ["NO", "YES"]
    (text,) = [m for m in found.media if m.type == "SUBTITLES"]
    assert text.language == "en"
    assert all(p.stream_info.subtitles for p in found.playlists if p.stream_info.resolution)
    vtt = done.files["subtitles-eng.vtt"].read_text("utf-8")
    assert re.search(r"00:00\.500 --> (00:)?00:01\.500\nIt’s a café", vtt)
    assert "It’s a café" in done.files["hls/subtitles-eng.vtt"].read_text("utf-8")
    assert done.info["subtitles"] == [
        {"codec": "subrip", "text": True, "language": "eng", "forced": False}
    ]


async def test_pictures_of_text_are_left_out_and_that_is_said(studio: Studio, films: Films) -> None:
    source = films.folder / "pictures.mkv"
    sup = films.folder / "pictures.sup"
    sup.write_bytes(_pgs())
    film = films.make("plain.mp4", more=("-c:a", "aac"))
    ffmpeg("-v", "error", "-i", film, "-i", sup, "-map", "0", "-map", "1", "-c", "copy", source)
    done = await studio.handle(source, [MP4, {"type": "subtitles"}, HLS])
    (warning,) = done.info["warnings"]
    assert "hdmv_pgs_subtitle" in warning
    assert "left out" in warning
    assert not [name for name in done.files if name.endswith(".vtt")]


def _pgs() -> bytes:
    """One white box of 8 by 8 pixels for a second, in the format of Blu-ray discs."""

    def part(kind: int, at: int, body: bytes) -> bytes:
        times = at.to_bytes(4, "big") + bytes(4)
        return b"PG" + times + bytes([kind]) + len(body).to_bytes(2, "big") + body

    def screen(at: int, number: int, *, shows: bool) -> bytes:
        head = bytes.fromhex("014000b410") + number.to_bytes(2, "big")
        objects = bytes.fromhex("0000000000100010") if shows else b""
        return part(0x16, at, head + bytes([0x80 if shows else 0, 0, 0, int(shows)]) + objects)

    window = part(0x17, 0, bytes.fromhex("01000010001000080008"))
    palette = part(0x14, 0, bytes.fromhex("000001eb8080ff"))
    rows = (b"\x01" * 8 + b"\x00\x00") * 8
    head = bytes.fromhex("000000c0") + (len(rows) + 4).to_bytes(3, "big")
    picture = part(0x15, 0, head + bytes.fromhex("00080008") + rows)
    end = part(0x80, 0, b"")
    gone = screen(90_000, 1, shows=False) + part(
        0x17, 90_000, bytes.fromhex("01000010001000080008")
    )
    return screen(0, 0, shows=True) + window + palette + picture + end + gone + end


async def test_the_smallest_size_is_shown_before_the_others(studio: Studio, films: Films) -> None:
    done = await studio.handle(films.make("plain.mp4", more=("-c:a", "aac")), [HLS, POSTER])
    (early,) = done.desk.early
    assert {"hls/96p.mp4", "hls/master.m3u8", "hls/audio-und.mp4", "poster.jpg"} <= set(early)
    assert b"RESOLUTION=170x96" in early["hls/master.m3u8"]
    assert b"RESOLUTION=320x180" not in early["hls/master.m3u8"]
    assert early["hls/96p.mp4"] == done.files["hls/96p.mp4"].read_bytes(), "it was made twice"


@pytest.mark.parametrize("codec", ["hevc", "vp9", "av1"])
async def test_other_codecs_keep_the_grid(studio: Studio, films: Films, codec: str) -> None:
    source = films.make("plain.mp4", more=("-c:a", "aac"))
    wanted = {"type": "hls", "codec": codec, "ladder": LADDER[1:], "crf": 40}
    done = await studio.handle(source, [{**wanted, "preset": "ultrafast", "segment_seconds": 2.0}])
    assert [s.duration for s in media(done, "96p").segments] == [2.0, 1.0]
    codecs = master(done).playlists[0].stream_info.codecs.split(",")[0]
    assert codecs.startswith({"hevc": "hvc1.", "vp9": "vp09.", "av1": "av01."}[codec])


# --- Pieces


@pytest.mark.parametrize("kind", ["mp4", "ts", "mkv"])
async def test_pieces_joined_are_what_one_run_makes(
    studio: Studio, films: Films, kind: str
) -> None:
    """A constant rate, a transport stream that begins late, and a varying pace with long stills."""
    picture = "testsrc2=s=192x108:r=25"
    more: tuple[str | Path, ...] = ("-g", "250", "-c:a", "aac")
    if kind == "ts":
        more = (*more, "-output_ts_offset", "100", "-bf", "3")
    if kind == "mkv":
        picture += ",select='lt(mod(t,5),1)+eq(mod(n,125),60)'"
        more = (*more, "-fps_mode", "vfr")
    source = films.make(f"shared.{kind}", picture=picture, seconds=13, more=more)
    wanted = [{**HLS, "ladder": LADDER[1:], "smallest_first": False}]
    shared = await studio.handle(source, wanted, pieces=True, piece_seconds=4.0)
    single = await studio.handle(source, wanted, pieces=False)
    assert len(shared.desk.ended) == 4
    assert shared.info["warnings"] == single.info["warnings"] == []
    frames = [
        ffmpeg(
            *("-v", "error", "-i", r.files["hls/96p.mp4"], "-vf", "scale=32:18,format=gray"),
            *("-f", "rawvideo", "-"),
        ).stdout
        for r in (shared, single)
    ]
    assert len(frames[0]) == len(frames[1])
    size = 32 * 18
    worst = max(
        sum(
            abs(a - b)
            for a, b in zip(frames[0][n : n + size], frames[1][n : n + size], strict=True)
        )
        for n in range(0, len(frames[0]), size)
    )
    assert worst / size < 6, "a frame is not where it was"
    assert shared.info["outputs"]["hls"]["likeness"]["96p"] > 0.9
    sounds = [r.files["hls/audio-und.mp4"].read_bytes() for r in (shared, single)]
    assert sounds[0] == sounds[1]


async def test_seams_are_as_good_as_their_neighborhood(studio: Studio, films: Films) -> None:
    source = films.make(
        "seams.mp4", picture="testsrc2=s=192x108:r=25", seconds=12, more=("-c:a", "aac")
    )
    done = await studio.handle(
        source,
        [{**MP4, "short_side": 108, "max_video_kbps": 300}],
        pieces=True,
        piece_seconds=4.0,
    )
    stats = films.folder / "seams.log"
    ffmpeg(
        *("-i", done.files["video.mp4"], "-i", source, "-lavfi", f"ssim=stats_file={stats}"),
        *("-f", "null", "-"),
    )
    scores = [float(x) for x in re.findall(r"All:([\d.]+)", stats.read_text())]
    assert len(scores) == 300
    for seam in (100, 200):
        around = scores[seam - 50 : seam - 5] + scores[seam + 5 : seam + 50]
        at = scores[seam - 3 : seam + 3]
        assert min(at) >= min(around) - 0.03, (seam, min(at), min(around))


async def test_pieces_that_are_gone_are_made_again(studio: Studio, films: Films) -> None:
    """As after a replay, weeks later."""
    source = films.make("plain.mp4", more=("-c:a", "aac"))
    recipe = {"video": [{**MP4, "short_side": 96}], "pieces": True}
    desk = studio.desk(source, recipe, piece_seconds=2.0)
    first = await video.handle(desk)
    assert isinstance(first, Wait)
    kept = {"key": "gone", "version": "1", "bytes": 1}
    grid = first.children[-1].payload["grid"]
    ended = {"first": 0, "after": None, "grid": grid, "files": {"video": kept}, "seconds": 1.0}
    sound = {"files": {"sound-1-128.m4a": kept}, "loudness": {}, "damaged": False}
    desk.ended = [
        Child("sound", "completed", sound),
        Child("piece-0-end", "completed", {**ended, "damaged": False}),
    ]
    desk.claim = replace(desk.claim, fence=5)
    again = await video.handle(desk)
    assert isinstance(again, Wait)
    before, after = ({c.child_key for c in w.children} for w in (first, again))
    assert len(before) == len(after) == 3
    assert not before & after


async def test_a_short_film_runs_as_one_and_a_recipe_can_say_never(
    studio: Studio, films: Films
) -> None:
    source = films.make("plain.mp4", more=("-c:a", "aac"))
    done = await studio.handle(source, [MP4])
    assert done.desk.ended == []
    done = await studio.handle(source, [MP4], piece_threshold_seconds=0.001, piece_seconds=4.0)
    assert done.desk.ended == [], "one piece is no pieces"
    longer = films.make("seams.mp4", picture="testsrc2=s=192x108:r=25", seconds=12)
    limits: dict[str, Any] = {"piece_threshold_seconds": 0.001, "piece_seconds": 4.0}
    assert (await studio.handle(longer, [MP4], **limits)).desk.ended
    assert not (await studio.handle(longer, [MP4], pieces=False, **limits)).desk.ended


# --- Small things


async def test_a_storyboard_shows_what_is_on_at_each_time(studio: Studio, films: Films) -> None:
    source = films.make(
        "colors.mp4",
        picture="color=c=red:s=320x180:r=10,drawbox=c=lime:t=fill:enable='between(t,4,7.99)',"
        "drawbox=c=blue:t=fill:enable='gte(t,8)'",
        seconds=12,
    )
    wanted = {"type": "storyboard", "tile_width": 80}
    for outputs in ([wanted], [HLS, wanted]):  # from the original, and from the smallest size
        done = await studio.handle(source, outputs)
        cues = re.findall(
            r"00:(\d\d):([\d.]+) --> 00:\d\d:([\d.]+)\nstoryboard\.jpg#xywh=(\d+),(\d+),80,45",
            done.files["storyboard.vtt"].read_text(),
        )
        assert [float(begin) for _, begin, *_ in cues] == [0, 2, 4, 6, 8, 10]
        assert float(cues[-1][2]) == pytest.approx(12.0, abs=0.1)
        with Image.open(done.files["storyboard.jpg"]) as sheet:
            for (_, _begin, _end, x, y), channel in zip(cues, (0, 0, 1, 1, 2, 2), strict=True):
                pixel = sheet.convert("RGB").getpixel((int(x) + 40, int(y) + 22))
                assert isinstance(pixel, tuple)
                assert max(range(3), key=lambda c: pixel[c]) == channel, (outputs, x, pixel)


async def test_an_animation_moves_and_repeats(studio: Studio, films: Films) -> None:
    wanted = {"type": "animation", "seconds": 2.0, "width": 160}
    done = await studio.handle(films.make("plain.mp4", more=("-c:a", "aac")), [wanted])
    with Image.open(done.files["animation.webp"]) as animation:
        assert animation.size == (160, 90)
        assert getattr(animation, "n_frames", 1) >= 15
        assert animation.info["loop"] == 0


# --- What ends badly


def _cut(path: Path, target: Path, share: float) -> Path:
    data = path.read_bytes()
    target.write_bytes(data[: int(len(data) * share)])
    return target


async def test_a_little_damage_is_told_and_does_not_fail(studio: Studio, films: Films) -> None:
    source = films.make("long.mp4", seconds=8, more=("-c:a", "aac", "-g", "25"))
    data = bytearray(source.read_bytes())
    at = packets(source)[60]
    begin = int(at["pos"]) + int(at["size"]) // 2
    data[begin : begin + 40] = bytes(40)
    scratched = films.folder / "scratched.mp4"
    scratched.write_bytes(data)
    for shared in (False, True):
        done = await studio.handle(
            scratched, [{**HLS, "ladder": LADDER[1:]}, MP4], pieces=shared, piece_seconds=4.0
        )
        assert done.info["warnings"] == ["Parts of it are damaged and could not be decoded."]
        assert len(packets(done.files["hls/96p.mp4"])) == 200
    assert (await studio.handle(source, [HLS])).info["warnings"] == []


async def test_sizes_lengths_and_streams_have_limits_that_say_what_was_seen(
    studio: Studio, films: Films
) -> None:
    source = films.make("plain.mp4", more=("-c:a", "aac"))
    for setting, name, seen in (
        ({"max_duration_seconds": 2.0}, "duration", 3.0),
        ({"max_pixels": 1000}, "pixels of a frame", 320 * 180),
        ({"max_streams": 1}, "streams", 2),
    ):
        failure = await studio.failure(source, [MP4], **setting)
        assert failure.code is Code.RESOURCE_LIMIT
        limit = failure.problem.limit or {}
        assert (limit["name"], limit["seen"]) == (name, pytest.approx(seen, abs=0.1))
        assert limit["allowed"] == next(iter(setting.values()))


async def test_a_gap_in_its_clock_makes_no_endless_film(studio: Studio, films: Films) -> None:
    """Two seconds of frames, hours apart: a constant rate would fill what lies between them."""
    for hours, code in ((10, Code.RESOURCE_LIMIT), (1, None)):
        source = films.make(
            f"gap-{hours}.mkv",
            picture=f"testsrc2=s=192x108:r=5,setpts=PTS+gte(N\\,5)*{hours * 3600}/TB",
            sound=None,
            seconds=hours * 3600 + 2,
            more=("-fps_mode", "passthrough"),
        )
        assert source.stat().st_size < 100_000
        wanted = [{**HLS, "ladder": LADDER[1:]}]
        limits: dict[str, Any] = {"max_duration_seconds": 7200.0, "time_limit_factor": 0.02}
        failure = await studio.failure(source, wanted, pieces=False, **limits)
        assert failure.code in (code, Code.TIME_LIMIT, Code.OUTPUT_LIMIT), failure
        if failure.code is Code.TIME_LIMIT:
            limit = failure.problem.limit or {}
            assert limit["allowed"] <= limit["seen"]


async def test_every_look_at_an_original_is_guarded(studio: Studio, films: Films) -> None:
    """No tool may open another file or address, nor a container that names some."""
    wanted = [
        *(HLS, MP4, POSTER, {"type": "storyboard"}, {"type": "animation"}, {"type": "subtitles"}),
        *({"type": "waveform"}, {"type": "m4a", "loudness": -16.0}),
    ]
    done = await studio.handle(films.make("plain.mp4", more=("-c:a", "aac")), wanted)
    looked = [c for c in done.desk.commands if c.stdin == done.desk.source]
    assert len(looked) > 10
    for command in looked:
        args = command.args
        assert args[args.index("-protocol_whitelist") + 1] == "fd", command.label
        assert args[args.index("-format_whitelist") + 1].startswith("mov,matroska"), command.label
        inputs = [args[n + 1] for n, arg in enumerate(args) if arg == "-i"]
        assert inputs[0] == "fd:", command.label
        assert len(inputs) <= 2
    ours = [c for c in done.desk.commands if c.stdin != done.desk.source]
    assert all("-protocol_whitelist" in c.args for c in ours if c.tool in ("ffmpeg", "ffprobe"))


async def test_sound_alone_goes_to_its_own_queue(studio: Studio, films: Films) -> None:
    voice = films.make("voice.webm", picture=None, seconds=2, more=("-c:a", "libopus"))
    recipe = [{**MP4}]
    failure = await studio.failure(voice, recipe)
    assert failure.code is Code.NO_VIDEO_STREAM
    done = await studio.handle(
        films.make("plain.mp4"), [{"type": "m4a"}], kind="audio", handler=video.handle_audio
    )
    assert done.outcome == Reroute("video", "video")


async def test_an_output_that_lost_a_frame_is_never_published(
    studio: Studio, films: Films, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mediamill.handlers import tracks

    whole = tracks.plan

    def careless(*args: Any, **options: Any) -> tuple[str, ...]:
        said = whole(*args, **options)
        return tuple(a.replace("trim=start_pts=0", "select='not(eq(n,40))'") for a in said)

    monkeypatch.setattr(tracks, "plan", careless)
    failure = await studio.failure(films.make("plain.mp4", more=("-c:a", "aac")), [HLS])
    assert failure.code is Code.OUTPUT_INVALID
    assert "do not follow each other" in (failure.problem.detail or "")


async def test_an_output_that_shows_something_else_is_never_published(
    studio: Studio, films: Films, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mediamill.handlers import tracks

    whole = tracks.plan

    def careless(*args: Any, **options: Any) -> tuple[str, ...]:
        said = whole(*args, **options)
        return tuple(a.replace("split=", "negate,split=") for a in said)

    monkeypatch.setattr(tracks, "plan", careless)
    failure = await studio.failure(films.make("plain.mp4", more=("-c:a", "aac")), [HLS])
    assert failure.code is Code.OUTPUT_INVALID
    assert "does not look like the original" in (failure.problem.detail or "")


async def test_a_last_segment_of_one_costly_frame_counts_for_what_it_is(
    studio: Studio, films: Films
) -> None:
    """Its rate by itself is far above the rung's, and says nothing about how fast it loads."""
    still = "color=gray:s=320x180:r=25:d=4"
    noise = "color=gray:s=320x180:r=25:d=0.04,noise=alls=100:allf=t"
    source = films.make("flash.mp4", picture=f"{still}[a];{noise}[b];[a][b]concat", seconds=4.04)
    hls = {**HLS, "ladder": [{"short_side": 180, "max_video_kbps": 400}], "segment_seconds": 2.0}
    done = await studio.handle(source, [hls])
    rung = master(done).playlists[0].stream_info
    last = media(done, "180p").segments[-1]
    size = int(last.byterange.partition("@")[0])
    assert (last.duration, size * 8 / last.duration > 2 * rung.bandwidth) == (0.04, True)


async def test_subtitles_beside_a_film_become_webvtt_and_renditions(
    studio: Studio, films: Films
) -> None:
    old = b"1\r\n00:00:01,000 --> 00:00:03,000\r\nIt\x92s a <b>caf\xe9</b>\r\n"
    english = sidecars.read(old, language="en")
    german = sidecars.read(b"WEBVTT\n\n00:01.000 --> 00:02.000\nEin Caf\xc3\xa9\n", language="de")
    beside = [
        Sidecar("de", "Deutsch", german.format, german.body),
        Sidecar("en", None, english.format, english.body),
        Sidecar("und", "Deutsch", "srt", "no cue at all"),
    ]
    source = films.folder / "spoken.mkv"
    words = films.folder / "spoken.srt"
    words.write_text("1\n00:00:00,500 --> 00:00:01,500\nIts own\n")
    ffmpeg(
        *("-v", "error", "-i", films.make("plain.mp4", more=("-c:a", "aac")), "-i", words),
        *("-map", "0", "-map", "1", "-c", "copy", "-c:s", "srt"),
        *("-metadata:s:s:0", "language=en", source),
    )
    done = await studio.handle(source, [HLS, {"type": "subtitles"}], beside=beside)
    vtt = done.files["subtitles-en.vtt"].read_text("utf-8")
    assert "It’s a <b>café</b>" in vtt
    assert re.search(r"00:01\.000 --> (00:)?00:03\.000", vtt)
    assert "Its own" in done.files["subtitles-en-2.vtt"].read_text("utf-8")
    assert "Ein Café" in done.files["subtitles-de.vtt"].read_text("utf-8")
    texts = {m.name: m.language for m in master(done).media if m.type == "SUBTITLES"}
    assert texts == {"Deutsch": "de", "en": "en", "en 2": "en"}
    assert done.info["warnings"] == ["The subtitles beside it (und) could not be read."]


@pytest.mark.parametrize("wanted", [MP4, HLS, {**MP4, "name": "joined"}])
async def test_sound_that_drifts_from_its_picture_is_never_published(
    studio: Studio, films: Films, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any]
) -> None:
    source = films.make("plain.mp4", more=("-c:a", "aac"))
    shape = sound.shape

    def slower(*args: Any, **more: Any) -> tuple[str, ...]:
        name, chain, *rest = ("-af", "volume=1", *shape(*args, **more))
        if rest[0] == "-af":
            chain, rest = rest[1], rest[2:]
        return (name, f"{chain},asetrate=48000*0.98,aresample=48000", *rest)

    monkeypatch.setattr(sound, "shape", slower)
    outputs = [wanted] if wanted["type"] == "hls" or "name" not in wanted else [HLS, wanted]
    failure = await studio.failure(source, outputs)
    assert failure.code is Code.OUTPUT_INVALID
    assert "end 0.0" in failure.problem.detail
    assert "in the source" in failure.problem.detail


async def test_a_file_that_shows_something_else_is_never_published(
    studio: Studio, films: Films, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = films.make("plain.mp4", more=("-c:a", "aac"))
    plan = mp4.plan_encode

    def spoiled(*args: Any, **more: Any) -> tuple[str, ...]:
        return tuple(a.replace("setsar=1", "setsar=1,negate") for a in plan(*args, **more))

    monkeypatch.setattr(mp4, "plan_encode", spoiled)
    failure = await studio.failure(source, [MP4])
    assert failure.code is Code.OUTPUT_INVALID
    assert "does not look like the original" in failure.problem.detail


async def test_a_file_tells_how_like_it_is(studio: Studio, films: Films) -> None:
    source = films.make("sixty.mp4", picture="testsrc2=s=320x180:r=60", more=("-c:a", "aac"))
    done = await studio.handle(source, [MP4])
    assert done.info["outputs"]["video"]["likeness"] > 0.95


async def test_a_preview_goes_before_encoders(studio: Studio, films: Films) -> None:
    desk = studio.desk(films.make("plain.mp4", more=("-c:a", "aac")), {"video": [MP4]})
    encoder = running.jail(desk, wall_seconds=1)
    desk.claim = replace(desk.claim, role="preview")
    assert running.jail(desk, wall_seconds=1).nice < encoder.nice
    outcome = await preview.handle(desk)
    assert outcome == Done(result={"preview": True})
    assert desk.last("preview")["blurhash"]

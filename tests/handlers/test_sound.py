"""Sound through the handler and the real tools: what comes out is as loud, as long and as full as
it should be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import m3u8
import pytest
from PIL import Image
from tests.handlers.films import Films, ffmpeg, probe, stream
from tests.handlers.studio import Result, Studio

from mediamill.failures import Code, Failure
from mediamill.handlers import Reroute, sound, streaming, video

pytestmark = pytest.mark.anyio

ALL = [{"type": "m4a"}, {"type": "opus"}, {"type": "mp3"}]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def handle(studio: Studio, source: Path, wanted: list[dict[str, Any]]) -> Result:
    return await studio.handle(source, wanted, kind="audio", handler=video.handle_audio)


def levels(path: Path) -> list[float]:
    """The loudness of each channel in dB (RMS over all of it)."""
    said = ffmpeg("-i", path, "-af", "astats=measure_overall=none", "-f", "null", "-").stderr
    return [float(x) for x in re.findall(r"RMS level dB: (-?[\d.]+|-inf)", said.decode())]


def loudness(path: Path) -> float:
    said = ffmpeg("-i", path, "-af", "ebur128=framelog=quiet", "-f", "null", "-").stderr.decode()
    return float(re.findall(r"I:\s+(-?[\d.]+) LUFS", said)[-1])


def peak(path: Path) -> float:
    said = ffmpeg("-i", path, "-af", "ebur128=peak=true:framelog=quiet", "-f", "null", "-").stderr
    return float(re.findall(r"Peak:\s+(-?[\d.]+) dBFS", said.decode())[-1])


async def test_the_center_channel_stays_in_stereo(studio: Studio, films: Films) -> None:
    source = films.make(
        "surround.mp4",
        sound="sine=frequency=1000:sample_rate=48000,volume=4,pan=5.1|FC=c0",
        seconds=2,
        more=("-c:a", "aac", "-b:a", "256k"),
    )
    assert stream(source, "audio")["channels"] == 6
    done = await studio.handle(
        source, [{"type": "mp4", "preset": "ultrafast"}, {"type": "m4a"}, {"type": "opus"}]
    )
    for name in ("video.mp4", "audio.m4a", "audio-opus.opus"):
        path = done.files[name]
        assert stream(path, "audio")["channels"] == 2
        left, right = levels(path)
        assert left >= -26, name
        assert abs(left - right) <= 1.0, name


async def test_every_format_is_whole(studio: Studio, films: Films) -> None:
    source = films.make("song.flac", picture=None, seconds=3, more=("-ac", "2"))
    done = await handle(studio, source, ALL)
    assert (done.description.kind, done.info["has_video"]) == ("audio", False)
    kinds = {"audio.m4a": "aac", "audio-opus.opus": "opus", "audio-mp3.mp3": "mp3"}
    assert set(done.files) == set(kinds)
    for name, codec in kinds.items():
        made = probe(done.files[name])
        assert [s["codec_name"] for s in made["streams"]] == [codec]
        assert float(made["format"]["duration"]) == pytest.approx(3.0, abs=0.1)
        assert not (set(made["format"].get("tags", {})) & {"title", "artist", "location"})
    head = done.files["audio.m4a"].read_bytes()
    assert head.index(b"moov") < head.index(b"mdat")


@pytest.mark.parametrize(("volume", "target"), [(0.05, -16.0), (1.0, -23.0), (8.0, -14.0)])
async def test_loudness_comes_to_its_target(
    studio: Studio, films: Films, volume: float, target: float
) -> None:
    source = films.make(
        f"loud-{volume}.wav",
        picture=None,
        sound=f"anoisesrc=d=6:c=pink:a=0.2:seed=5,tremolo=f=0.7:d=0.6,volume={volume}",
        seconds=6,
    )
    before = loudness(source)
    done = await handle(studio, source, [{"type": "m4a", "loudness": target}])
    path = done.files["audio.m4a"]
    assert loudness(path) == pytest.approx(target, abs=1.0)
    assert peak(path) <= -0.5
    told = done.info["outputs"]["audio"]["loudness"]
    assert told["measured_lufs"] == pytest.approx(before, abs=0.6)
    assert told["gain_db"] == pytest.approx(target - told["measured_lufs"], abs=0.01)


async def test_silence_is_not_made_loud(studio: Studio, films: Films) -> None:
    source = films.make("silence.wav", picture=None, sound="anullsrc", seconds=2)
    done = await handle(studio, source, [{"type": "m4a", "loudness": -16.0}])
    assert "loudness" not in done.info["outputs"]["audio"]
    assert set(done.files) == {"audio.m4a"}


def test_a_summary_that_says_nothing_is_no_measurement() -> None:
    assert sound.read_loudness("", -16) is None
    assert sound.read_loudness("Summary:\n I: -inf LUFS\n Peak: -inf dBFS", -16) is None
    found = sound.read_loudness("Summary:\n I: -20.5 LUFS\n Peak: -3.0 dBFS", -16)
    assert found == sound.Loudness(-20.5, -3.0, 4.5)


async def test_the_waveform_has_the_shape_of_the_sound(studio: Studio, films: Films) -> None:
    source = films.make(
        "shape.wav",
        picture=None,
        sound="sine=frequency=200:sample_rate=44100,volume=8,volume=0.1:enable='gt(t,2)'",
        seconds=4,
    )
    wanted = {"type": "waveform", "points": 100, "width": 200, "height": 50}
    done = await handle(studio, source, [wanted])
    shape = json.loads(done.files["waveform.json"].read_text())
    assert (shape["length"], len(shape["data"]), shape["bits"]) == (100, 200, 8)
    highs = shape["data"][1::2]
    assert min(highs[5:45]) > 4 * max(highs[55:95]) > 0
    assert min(shape["data"][0:90:2]) == pytest.approx(-max(highs), abs=2)
    seconds = shape["samples_per_pixel"] * shape["length"] / shape["sample_rate"]
    assert seconds == pytest.approx(4.0, abs=0.01)
    with Image.open(done.files["waveform.png"]) as picture:
        assert picture.size == (200, 50)
        alpha = picture.convert("RGBA").getchannel("A")
        drawn = [sum(v > 0 for v in alpha.crop((x, 0, x + 1, 50)).tobytes()) for x in (40, 160)]
        assert drawn[0] > 3 * drawn[1] > 0


async def test_a_cover_is_a_picture_and_no_film(studio: Studio, films: Films) -> None:
    cover = films.folder / "cover.png"
    Image.new("RGB", (300, 300), (200, 40, 40)).save(cover)
    source = films.folder / "covered.mp3"
    ffmpeg(
        *("-v", "error", "-f", "lavfi", "-i", "sine=d=2", "-i", cover, "-map", "0", "-map", "1"),
        *("-c:v", "mjpeg", "-disposition:v", "attached_pic", "-id3v2_version", "3", source),
    )
    wanted: list[dict[str, Any]] = [{"type": "m4a"}, {"type": "cover", "short_side": 200}]
    done = await handle(studio, source, wanted)
    assert (done.description.kind, done.info["cover_art"]) == ("audio", True)
    with Image.open(done.files["cover.jpg"]) as picture:
        assert picture.size == (200, 200)
        pixel = picture.convert("RGB").getpixel((100, 100))
        assert isinstance(pixel, tuple)
        assert pixel[0] > 180 > 70 > pixel[1]
    assert [s["codec_type"] for s in probe(done.files["audio.m4a"])["streams"]] == ["audio"]
    plain = films.make("bare.mp3", picture=None, seconds=1)
    assert set((await handle(studio, plain, wanted)).files) == {"audio.m4a"}


async def test_a_voice_note_that_says_video_is_sound(studio: Studio, films: Films) -> None:
    source = films.make("voice.webm", picture=None, seconds=2, more=("-c:a", "libopus"))
    done = await handle(studio, source, [{"type": "m4a"}])
    assert done.description.kind == "audio"
    assert done.description.duration_seconds == pytest.approx(2.0, abs=0.1)
    # A recipe for both sends it on from the queue of video.
    desk = studio.desk(source, {"video": [{"type": "mp4"}], "audio": [{"type": "m4a"}]})
    assert await video.handle(desk) == Reroute("audio", "audio")


async def test_sound_that_is_cut_or_no_sound_at_all_fails(studio: Studio, films: Films) -> None:
    whole = films.make("whole.m4a", picture=None, seconds=3)
    cut = films.folder / "cut.m4a"
    cut.write_bytes(whole.read_bytes()[:-1000])
    wave = films.make("whole.wav", picture=None, seconds=3)
    half = films.folder / "half.wav"
    half.write_bytes(wave.read_bytes()[:100_000])
    text = films.folder / "text.mp3"
    text.write_bytes(b"this is no sound\n" * 50)
    for source, codes in (
        (cut, {Code.TRUNCATED_INPUT}),
        (half, {Code.TRUNCATED_INPUT}),
        (text, {Code.UNSUPPORTED_FORMAT, Code.CORRUPT_INPUT}),
    ):
        failure = await studio.failure(source, ALL, kind="audio", handler=video.handle_audio)
        assert failure.code in codes, (source, failure)


def playlists(done: Result) -> m3u8.M3U8:
    return m3u8.loads(done.files["hls/master.m3u8"].read_text())


async def test_a_stream_of_sound_has_a_rung_for_each_rate_and_no_picture(
    studio: Studio, films: Films
) -> None:
    source = films.make("talk.wav", picture=None, sound="anoisesrc=r=44100:a=0.3:d=11", seconds=11)
    done = await handle(
        studio,
        source,
        [{"type": "hls", "ladder": [96, 48], "segment_seconds": 4.0, "loudness": -20.0}],
    )
    master = playlists(done)
    assert [p.uri for p in master.playlists] == ["audio-und-48.m3u8", "audio-und-96.m3u8"]
    for playlist in master.playlists:
        told = playlist.stream_info
        assert (told.codecs, told.resolution, told.frame_rate) == ("mp4a.40.2", None, None)
        path = done.files[f"hls/{playlist.uri.replace('.m3u8', '.mp4')}"]
        segments = m3u8.loads(done.files[f"hls/{playlist.uri}"].read_text())
        assert segments.is_endlist
        assert len(segments.segments) == 3
        sizes = [int(s.byterange.partition("@")[0]) for s in segments.segments]
        rates = [z * 8 / s.duration for z, s in zip(sizes, segments.segments, strict=True)][:-1]
        assert 0.999 * max(rates) <= told.bandwidth <= 1.6 * max(rates)
        assert told.average_bandwidth <= told.bandwidth
        # Segments hold whole packets.
        ends, total = [], 0.0
        for length in (s.duration for s in segments.segments):
            total += length
            ends.append(total)
        frame = 1024 / 44100
        assert total == pytest.approx(11.0, abs=2 * frame)
        assert all(abs(end / frame - round(end / frame)) < 0.1 for end in ends[:-1])
        assert [s["codec_name"] for s in probe(path)["streams"]] == ["aac"]
        assert loudness(path) == pytest.approx(-20.0, abs=0.7)
    media_types = {o.name: (o.content_type, o.width) for o in done.outputs.values()}
    assert media_types["hls/audio-und-48.mp4"] == ("audio/mp4", None)
    assert next(iter(media_types)) == "hls/master.m3u8"
    assert "video" not in done.files["hls/manifest.mpd"].read_text()
    assert done.info["outputs"]["hls"]["loudness"]["measured_lufs"] > -20


async def test_each_language_is_a_rendition_of_each_rung(studio: Studio, films: Films) -> None:
    source = films.folder / "languages.mka"
    ffmpeg(
        *("-f", "lavfi", "-i", "sine=f=300", "-f", "lavfi", "-i", "sine=f=900", "-t", "3"),
        *("-map", "0", "-map", "1", "-c:a", "libopus", "-metadata:s:0", "language=eng"),
        *("-metadata:s:1", "language=deu", "-disposition:1", "default", "-disposition:0", "0"),
        source,
    )
    done = await handle(studio, source, [{"type": "hls", "ladder": [64, 96]}])
    master = playlists(done)
    assert [p.uri for p in master.playlists] == ["audio-deu-64.m3u8", "audio-deu-96.m3u8"]
    for rate, playlist in zip((64, 96), master.playlists, strict=True):
        group = [m for m in master.media if m.group_id == playlist.stream_info.audio]
        assert {(m.language, m.default) for m in group} == {("en", "NO"), ("de", "YES")}
        assert {m.uri for m in group} == {f"audio-{name}-{rate}.m3u8" for name in ("eng", "deu")}


async def test_a_stream_of_cut_sound_is_never_published(
    studio: Studio, films: Films, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = films.make("talk.flac", picture=None, seconds=6)
    pack = streaming.pack

    async def spoil(work: Any, *args: Any, **more: Any) -> None:
        await pack(work, *args, **more)
        listed = work.out / "hls" / "audio-und-64.m3u8"
        listed.write_text(re.sub(r"#EXTINF:2", "#EXTINF:1", listed.read_text(), count=1))

    monkeypatch.setattr(streaming, "pack", spoil)
    with pytest.raises(Failure) as caught:
        await handle(studio, source, [{"type": "hls", "ladder": [64], "segment_seconds": 2.0}])
    assert caught.value.code is Code.OUTPUT_INVALID
    assert "as long as they say" in str(caught.value)

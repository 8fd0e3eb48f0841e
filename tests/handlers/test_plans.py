"""What is planned from a probe and a recipe, without any tool."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediamill import probe
from mediamill.failures import Code, Failure
from mediamill.handlers import (
    checks,
    film,
    mp4,
    picture,
    pieces,
    running,
    storyboard,
    streaming,
    tracks,
)
from mediamill.handlers.running import Meter
from mediamill.handlers.tracks import Grid
from mediamill.probe import AudioStream, MediaInfo, VideoStream
from mediamill.recipes import Recipe
from mediamill.recipes.video import HlsOutput, Mp4Output, StoryboardOutput

VIDEO = VideoStream(
    index=0,
    codec="h264",
    width=1920,
    height=1080,
    stored_width=1920,
    stored_height=1080,
    rotation=0,
    frame_rate=Fraction(30),
    pixel_format="yuv420p",
    interlaced=False,
    hdr=None,
    has_alpha=False,
    frames=300,
    nominal_rate=Fraction(30),
)
AUDIO = AudioStream(index=1, codec="aac", channels=2, sample_rate=48000, profile="LC")
INFO = MediaInfo(
    container="mov,mp4,m4a,3gp,3g2,mj2",
    duration_seconds=600.0,
    start_seconds=0.0,
    video=VIDEO,
    audio=AUDIO,
    streams=2,
    sounds=(AUDIO,),
)
RATES = (Fraction(24000, 1001), Fraction(25), Fraction(30000, 1001), Fraction(60), Fraction(10))


def of_size(width: int, height: int) -> MediaInfo:
    size: dict[str, Any] = {
        "width": width,
        "height": height,
        "stored_width": width,
        "stored_height": height,
    }
    return replace(INFO, video=replace(VIDEO, **size))


# --- The grid and its pieces


@given(
    rate=st.sampled_from(RATES),
    frames=st.integers(1, 2_000_000),
    wish=st.floats(2, 120),
)
def test_pieces_cover_the_grid_once_and_begin_with_a_key_frame(
    rate: Fraction, frames: int, wish: float
) -> None:
    grid = Grid(rate, 0.0, round(rate * 2), frames)
    found = pieces.cut(grid, wish, least_seconds=min(wish, 20.0))
    assert found[0][0] == 0
    assert found[-1][1] is None
    for (_, after), (first, _) in pairwise(found):
        assert after == first
        assert first % grid.group == 0
    assert len(found) <= 401
    lengths = [grid.seconds((after or frames) - first) for first, after in found]
    assert all(length > 0 for length in lengths)
    if len(found) > 1:
        assert min(lengths[:-1]) >= wish / 2 - grid.seconds(grid.group)


@given(rate=st.sampled_from(RATES))
def test_every_frame_of_a_grid_is_a_whole_number_of_units_long(rate: Fraction) -> None:
    grid = Grid(rate, 0.0, 48, 100)
    assert Fraction(grid.timescale) / rate == grid.tick
    assert grid.timescale >= 10_000
    assert Grid.of(json.loads(json.dumps(grid.as_dict()))) == grid


def test_without_an_index_a_piece_begins_at_the_key_frame_before_it() -> None:
    grid = Grid(Fraction(25), 100.0, 50, 5000, (0.0, 9.96, 20.0, 30.0))
    assert grid.near(0).key_frames == (0.0,)
    assert grid.near(500).key_frames == (9.96,), "a moment is left for what comes out of order"
    assert grid.near(750).key_frames == (20.0,)
    assert grid.near(4000).key_frames == (30.0,)
    args = tracks.plan(
        INFO, grid.near(750), streaming.ladder(_hls(), INFO), first=750, limit_seconds=9.0
    )
    assert args[args.index("-ss") + 1] == "19.500"


@pytest.mark.parametrize(
    ("rate", "nominal", "most", "steady"),
    [
        (Fraction(25), Fraction(25), 60, Fraction(25)),
        (Fraction(2997, 100), Fraction(2997, 100), 60, Fraction(30000, 1001)),
        (Fraction(4050000, 254999), Fraction(30), 60, Fraction(30)),
        (Fraction(1760000, 70537), Fraction(25), 60, Fraction(25)),
        (Fraction(30000, 1001), Fraction(30), 60, Fraction(30000, 1001)),
        (Fraction(29), Fraction(1000), 60, Fraction(30000, 1001)),
        (Fraction(60), Fraction(60), 30, Fraction(30)),
        (Fraction(240), Fraction(240), 60, Fraction(60)),
        (Fraction(60000, 1001), Fraction(60000, 1001), 30, Fraction(30000, 1001)),
        (Fraction(1, 2), Fraction(1, 2), 60, Fraction(1)),
        (None, None, 60, Fraction(30)),
    ],
)
def test_a_steady_rate_shows_every_frame(
    rate: Fraction | None, nominal: Fraction | None, most: float, steady: Fraction
) -> None:
    video = replace(VIDEO, frame_rate=rate, nominal_rate=nominal)
    assert picture.steady_rate(video, most) == steady


@given(width=st.integers(2, 8192), height=st.integers(2, 8192), side=st.integers(96, 4320))
def test_a_fitted_size_is_even_and_never_larger(width: int, height: int, side: int) -> None:
    found = picture.fitted(width, height, side)
    assert all(n >= 2 and n % 2 == 0 for n in found)
    assert found[0] <= max(width, 2)
    assert found[1] <= max(height, 2)
    assert min(found) <= max(side, 2)


# --- The ladder


def _hls(**more: Any) -> HlsOutput:
    return HlsOutput.model_validate({"type": "hls", **more}, strict=False)


@pytest.mark.parametrize(
    ("size", "names"),
    [
        ((1920, 1080), ["360p", "480p", "720p", "1080p"]),
        ((1080, 1920), ["360p", "480p", "720p", "1080p"]),
        ((1280, 720), ["360p", "480p", "720p"]),
        ((900, 500), ["360p", "480p"]),
        ((180, 320), ["180p"]),
        ((3840, 2160), ["360p", "480p", "720p", "1080p"]),
    ],
)
def test_a_ladder_never_goes_above_its_source(size: tuple[int, int], names: list[str]) -> None:
    found = streaming.ladder(_hls(), of_size(*size))
    assert [track.name for track in found] == names
    for track in found:
        assert track.coding.width <= size[0]
        assert track.coding.height <= size[1]


def test_what_is_the_same_is_encoded_once() -> None:
    recipe = Recipe.model_validate_json(
        json.dumps(
            {
                "name": "both",
                "version": 1,
                "video": [
                    {"type": "hls"},
                    {"type": "mp4", "short_side": 720, "max_video_kbps": 2800},
                    {"type": "mp4", "name": "other", "short_side": 720, "crf": 30},
                ],
            }
        )
    )
    planned = film.plan(recipe, INFO, 10**8)
    assert len(planned.tracks) == 4
    assert [(o.name, t.name) for o, t in planned.joined] == [("video", "720p")]
    assert [o.name for o in planned.alone] == ["other"]
    shared = film.plan(recipe, INFO, 10**8, in_pieces=True)
    assert len(shared.tracks) == 5
    assert [o.name for o, _ in shared.joined] == ["video", "other"]
    assert shared.alone == ()


def test_renditions_have_names_of_their_own() -> None:
    sounds = (
        replace(AUDIO, language="de"),
        replace(AUDIO, index=2, language="de", title='Kommentar, "laut"'),
        replace(AUDIO, index=3),
        replace(AUDIO, index=4),
    )
    found = streaming.renditions(sounds)
    assert [name for name, *_ in found] == ["audio-de", "audio-de-2", "audio-und", "audio-und-2"]
    labels = [label for _, label, *_ in found]
    assert len(set(labels)) == 4
    assert not any(sign in label for label in labels for sign in '",=')


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"codec": "vp9"}, "its picture is coded as vp9"),
        ({"pixel_format": "yuv422p"}, "its pixels are yuv422p"),
        ({"range": "pc"}, "its colors are full range"),
        ({"rotation": 90}, "it is turned"),
        ({"stored_width": 1440}, "its pixels are not square"),
        ({"interlaced": True}, "it is interlaced"),
        ({"hdr": "pq"}, "it is HDR"),
        ({"bit_rate": 9_000_000}, "it takes 9000 kbit/s"),
        ({"start_seconds": 0.5}, "its picture does not begin at 0"),
        ({"frame_rate": Fraction(120)}, "its frame rate is unknown or too high"),
    ],
)
def test_a_source_fits_or_it_is_told_why_not(change: dict[str, Any], reason: str | None) -> None:
    video = replace(VIDEO, bit_rate=3_000_000)
    wanted = Mp4Output(type="mp4", short_side=1080)
    info = replace(INFO, video=replace(video, **change))
    assert mp4.misfit(wanted, info, 10**8) == reason


@given(seconds=st.floats(0.1, 40_000), tiles=st.integers(1, 400), every=st.floats(0.5, 600))
def test_a_sheet_has_a_tile_for_every_time(seconds: float, tiles: int, every: float) -> None:
    wanted = StoryboardOutput(type="storyboard", tiles=tiles, every_seconds=every)
    sheet = storyboard.sheet(wanted, replace(INFO, duration_seconds=seconds))
    assert 1 <= sheet.tiles <= tiles
    assert sheet.every_seconds >= every
    assert (
        (sheet.tiles - 1) * sheet.every_seconds
        < seconds
        <= (sheet.tiles * sheet.every_seconds * (1 + 1e-6))
    )
    assert sheet.columns * (sheet.rows - 1) < sheet.tiles <= sheet.columns * sheet.rows


# --- Looking


@pytest.mark.parametrize(
    ("said", "combed"),
    [
        ("Multi frame detection: TFF:    30 BFF:     0 Progressive:     1 Undetermined: 0", True),
        ("Multi frame detection: TFF:     0 BFF:    20 Progressive:     2 Undetermined: 9", True),
        ("Multi frame detection: TFF:     2 BFF:     0 Progressive:    50 Undetermined: 0", False),
        ("Multi frame detection: TFF:    15 BFF:    14 Progressive:     3 Undetermined: 0", False),
        ("Multi frame detection: TFF:     4 BFF:     0 Progressive:     0 Undetermined: 9", False),
        ("nothing", False),
    ],
)
def test_combs_are_told_from_motion(said: str, combed: bool) -> None:
    assert probe.looks_interlaced(said) is combed


# --- Progress


class _Told:
    def __init__(self) -> None:
        self.percents: list[float] = []
        self.detail: dict[str, Any] = {}

    def progress(self, percent: float, detail: dict[str, Any]) -> None:
        self.percents.append(percent)
        self.detail = detail


def test_progress_is_of_all_runs_and_each_says_how_far_it_is() -> None:
    told = _Told()
    meter = Meter(told, 100.0)  # type: ignore[arg-type]
    one = meter.watch(["360p", "720p"], 80.0, 10.0)
    two = meter.watch(["audio"], 20.0, None)
    assert one.line("out_time_us=N/A") is False
    assert one.line("speed=N/A") is False
    assert one.line("speed=2.5x") is False
    assert one.line("out_time_us=5000000") is True
    assert one.line("out_time_us=5000000") is False, "it stood still"
    assert one.line("out_time_us=4000000") is False
    assert told.percents[-1] == pytest.approx(5 + 90 * 0.4)
    assert told.detail["outputs"] == [
        {"name": "360p", "percent": 50.0, "speed": 2.5, "seconds_left": 2.0},
        {"name": "720p", "percent": 50.0, "speed": 2.5, "seconds_left": 2.0},
        {"name": "audio", "percent": None, "speed": None, "seconds_left": None},
    ]
    two.line("out_time_us=1000000")
    meter.finish(two)
    assert told.percents[-1] == pytest.approx(5 + 90 * 0.6)
    one.line("out_time_us=90000000")
    assert told.percents[-1] == pytest.approx(95)
    meter.finish(one)
    assert told.percents == sorted(told.percents)
    assert told.detail == {"outputs": []}


def test_a_pace_is_learned_and_its_limits_stay_generous() -> None:
    pace = running.Pace()
    first = pace.seconds(1e9)
    for _ in range(50):
        pace.learn(1e9, 10.0)
    assert pace.seconds(1e9) == pytest.approx(10.0, rel=0.01)
    assert pace.limit(1e9) > 200
    pace.learn(1.0, 0.01)  # too short to say anything
    assert pace.seconds(1e9) == pytest.approx(10.0, rel=0.01)
    assert first > 0


def test_what_fails_first_ends_the_others() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.append("slow")

    async def bad() -> None:
        await asyncio.sleep(0)
        raise ValueError("bad")

    async def both() -> None:
        await running.together(slow(), bad())

    with pytest.raises(ValueError, match="bad"):
        asyncio.run(both())
    assert ended == ["slow"]


def test_sound_and_picture_end_together_within_a_frame() -> None:
    def check(now: float | None, was: float | None, rate: Fraction) -> None:
        checks.apart("x", "end", now, was, source=INFO, rate=rate)

    check(0.03, 0.0, Fraction(30))
    check(7.0, None, Fraction(30))  # not known of the source
    check(2.48, 2.5, Fraction(60))  # within a frame of sound
    for now, was in ((0.08, 0.0), (-0.08, 0.0), (0.0, 0.5), (None, 0.0)):
        with pytest.raises(Failure) as caught:
            check(now, was, Fraction(60))
        assert caught.value.code is Code.OUTPUT_INVALID

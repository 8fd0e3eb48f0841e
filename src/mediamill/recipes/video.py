"""The outputs of video and sound."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from mediamill.recipes.fields import Name, Strict

T = TypeVar("T")

Codec = Literal["h264", "hevc", "vp9", "av1"]
Preset = Literal["ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow"]
Loudness = Annotated[
    float,
    Field(
        ge=-40,
        le=-5,
        description="Integrated loudness in LUFS (EBU R128): -23 for broadcast, -16 for phones. "
        "Measured first, then set by one gain; peaks stay below -1 dBTP.",
    ),
]

MAX_RUNGS: Final = 8


class _Picture(Strict):
    """What every moving output can say of its picture."""

    codec: Codec = "h264"
    preset: Preset = "veryfast"
    max_frame_rate: float = Field(default=60.0, ge=1, le=240)
    hdr: Literal["tone_map", "keep"] = Field(
        default="tone_map",
        description="keep: HDR stays HDR in 10 bits; needs hevc, vp9 or av1. Ordinary video "
        "stays ordinary.",
    )

    @model_validator(mode="after")
    def _hdr_needs_ten_bits(self) -> _Picture:
        if self.hdr == "keep" and self.codec == "h264":
            raise ValueError("hdr keep needs codec hevc, vp9 or av1")
        return self


class Mp4Output(_Picture):
    """A progressive MP4 with AAC that plays while it loads. Never enlarged."""

    type: Literal["mp4"]
    name: Name = "video"
    short_side: int = Field(
        default=720, ge=96, le=4320, description="Pixels of the shorter side: 720 is 720p."
    )
    crf: int = Field(default=23, ge=10, le=60)
    max_video_kbps: int = Field(default=4000, ge=100, le=100_000)
    audio_kbps: int = Field(default=128, ge=32, le=512)
    loudness: Loudness | None = None
    copy_if_fit: bool = Field(
        default=False,
        description="Take over picture and sound as they are when they already fit this output, "
        "in place of encoding them again. The status says which it was, and why.",
    )


class Rung(Strict):
    """One size of a ladder."""

    short_side: int = Field(ge=96, le=4320)
    max_video_kbps: int = Field(ge=100, le=100_000)


_LADDER: Final = (
    Rung(short_side=1080, max_video_kbps=5000),
    Rung(short_side=720, max_video_kbps=2800),
    Rung(short_side=480, max_video_kbps=1400),
    Rung(short_side=360, max_video_kbps=800),
)


class HlsOutput(_Picture):
    """Adaptive streaming: `<name>/master.m3u8` for HLS and `<name>/manifest.mpd` for DASH, over the
    same CMAF files, one for each size and each language. Never enlarged.

    Frames come at a constant rate, and every size has its key frames at the same places.
    """

    type: Literal["hls"]
    name: Name = "hls"
    ladder: tuple[Rung, ...] = Field(default=_LADDER, min_length=1, max_length=MAX_RUNGS)
    crf: int = Field(default=23, ge=10, le=60)
    audio_kbps: int = Field(default=128, ge=32, le=512)
    loudness: Loudness | None = None
    key_frame_seconds: float = Field(default=2.0, ge=0.5, le=10)
    segment_seconds: float = Field(default=6.0, ge=1, le=30)
    audio_only: bool = Field(default=True, description="A rung of sound alone, for poor networks.")
    subtitles: bool = Field(default=True, description="Text tracks as WebVTT renditions.")
    smallest_first: bool = Field(
        default=True,
        description="Publish the smallest size as soon as it is made, before the others.",
    )

    @field_validator("ladder")
    @classmethod
    def _distinct(cls, value: tuple[Rung, ...]) -> tuple[Rung, ...]:
        if len({rung.short_side for rung in value}) < len(value):
            raise ValueError("the sizes of a ladder must be distinct")
        return value

    @model_validator(mode="after")
    def _whole_groups(self) -> HlsOutput:
        if self.segment_seconds < self.key_frame_seconds:
            raise ValueError("segment_seconds must not be below key_frame_seconds")
        return self


class PosterOutput(Strict):
    """A still of the video at a good frame, as JPEG."""

    type: Literal["poster"]
    name: Name = "poster"
    short_side: int = Field(default=720, ge=96, le=4320)
    quality: int = Field(default=82, ge=1, le=100)


class StoryboardOutput(Strict):
    """Small stills in one JPEG, `<name>.jpg`, and a WebVTT file that says which time is where,
    `<name>.vtt`: what players show above their time line."""

    type: Literal["storyboard"]
    name: Name = "storyboard"
    tile_width: int = Field(default=160, ge=32, le=640)
    tiles: int = Field(default=60, ge=1, le=400, description="At most so many.")
    every_seconds: float = Field(
        default=2.0, ge=0.5, le=600, description="At least so far from each other."
    )
    quality: int = Field(default=70, ge=1, le=100)


class AnimationOutput(Strict):
    """A short animated WebP of the video, without sound, that repeats."""

    type: Literal["animation"]
    name: Name = "animation"
    width: int = Field(default=320, ge=32, le=1280)
    seconds: float = Field(default=3.0, ge=0.5, le=15)
    frame_rate: float = Field(default=10.0, ge=1, le=30)
    quality: int = Field(default=60, ge=1, le=100)


class SubtitlesOutput(Strict):
    """Every text track as WebVTT: `<name>-<language>.vtt`."""

    type: Literal["subtitles"]
    name: Name = "subtitles"


class _Sound(Strict):
    kbps: int = Field(default=128, ge=16, le=512)
    loudness: Loudness | None = None


class M4aOutput(_Sound):
    """The sound as AAC in an MP4 file that plays while it loads."""

    type: Literal["m4a"]
    name: Name = "audio"
    kbps: int = Field(default=128, ge=32, le=512)


class OpusOutput(_Sound):
    """The sound as Opus in Ogg."""

    type: Literal["opus"]
    name: Name = "audio-opus"
    kbps: int = Field(default=96, ge=16, le=512)


class Mp3Output(_Sound):
    """The sound as MP3."""

    type: Literal["mp3"]
    name: Name = "audio-mp3"
    kbps: int = Field(default=160, ge=32, le=320)


class WaveformOutput(Strict):
    """The shape of the sound: `<name>.json` with the lowest and highest sample of each of `points`
    stretches of equal length (8 bits, all channels mixed), and `<name>.png` that shows it."""

    type: Literal["waveform"]
    name: Name = "waveform"
    points: int = Field(default=800, ge=10, le=8192)
    width: int = Field(default=800, ge=32, le=4096)
    height: int = Field(default=120, ge=16, le=1024)
    color: str = Field(default="#4477aa", pattern=r"^#[0-9a-f]{6}$")


class CoverOutput(Strict):
    """The picture of the cover, where the file has one, as JPEG."""

    type: Literal["cover"]
    name: Name = "cover"
    short_side: int = Field(default=600, ge=32, le=4320)
    quality: int = Field(default=85, ge=1, le=100)


class SoundHlsOutput(Strict):
    """Adaptive streaming of a sound file: `<name>/master.m3u8` for HLS and `<name>/manifest.mpd`
    for DASH, over the same CMAF files, one for each rate and each language."""

    type: Literal["hls"]
    name: Name = "hls"
    ladder: tuple[Annotated[int, Field(ge=32, le=512)], ...] = Field(
        default=(64, 128), min_length=1, max_length=4, description="The rates in kbit/s (AAC)."
    )
    loudness: Loudness | None = None
    segment_seconds: float = Field(default=6.0, ge=1, le=30)

    @field_validator("ladder")
    @classmethod
    def _distinct(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) < len(value):
            raise ValueError("the rates of a ladder must be distinct")
        return value


SoundOutput = M4aOutput | OpusOutput | Mp3Output
VideoOutput = Annotated[
    Mp4Output
    | HlsOutput
    | PosterOutput
    | StoryboardOutput
    | AnimationOutput
    | SubtitlesOutput
    | M4aOutput
    | OpusOutput
    | Mp3Output
    | WaveformOutput,
    Field(discriminator="type"),
]
AudioOutput = Annotated[
    M4aOutput | OpusOutput | Mp3Output | SoundHlsOutput | WaveformOutput | CoverOutput,
    Field(discriminator="type"),
]

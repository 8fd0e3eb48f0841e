"""What is it: the commands that ask ffprobe and ffmpeg about a file, and how to read them.

Pure: nothing here starts a program. Every command reads an open file (`fd:`) and nothing else, and
takes only containers that cannot name other files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from mediamill.config import Settings
from mediamill.failures import Code, Failure, limit_exceeded

# Demuxers that read one self-contained file. Playlists, concat scripts, SDP and pictures are not
# here.
CONTAINERS: Final = (
    "mov,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,mp3,wav,w64,flac,aac,aiff,amr,caf,rm"
)
INPUT_GUARD: Final = ("-protocol_whitelist", "fd", "-format_whitelist", CONTAINERS)
_MAX_PIXELS: Final = 16384 * 8192

# What may be decoded. A codec that is not here is refused by name: each decoder is an attack
# surface.
VIDEO_CODECS: Final = frozenset(
    "h264 hevc vp8 vp9 av1 mpeg1video mpeg2video mpeg4 msmpeg4v1 msmpeg4v2 msmpeg4v3 h261"
    " h263 h263p h263i flv1 wmv1 wmv2 wmv3 vc1 theora mjpeg mjpegb prores dnxhd dvvideo ffv1"
    " huffyuv ffvhuff rawvideo png qtrle cinepak svq1 svq3 vp6 vp6a vp6f vp3 rv10 rv20 rv30"
    " rv40 utvideo magicyuv jpeg2000 hap cfhd v210 gif apng webp tscc zmbv flashsv".split()
)
AUDIO_CODECS: Final = frozenset(
    "aac aac_latm mp1 mp2 mp3 opus vorbis flac alac ac3 eac3 dts truehd mlp speex wmav1 wmav2"
    " wmapro wmalossless wmavoice amr_nb amr_wb cook ra_144 ra_288 sipr atrac3 atrac3p"
    " nellymoser qdm2 qcelp gsm gsm_ms ilbc tta wavpack ape adpcm_ms adpcm_ima_wav"
    " adpcm_ima_qt adpcm_swf adpcm_yamaha adpcm_g722 adpcm_g726".split()
)

_HDR: Final = {"smpte2084": "pq", "arib-std-b67": "hlg"}
_TYPES: Final = {  # ffmpeg's name of a container: media type with and without a moving picture
    "matroska,webm": ("video/x-matroska", "audio/x-matroska"),
    "mov,mp4,m4a,3gp,3g2,mj2": ("video/mp4", "audio/mp4"),
    "avi": ("video/x-msvideo", "video/x-msvideo"),
    "mpegts": ("video/mp2t", "video/mp2t"),
    "mpeg": ("video/mpeg", "video/mpeg"),
    "flv": ("video/x-flv", "audio/x-flv"),
    "asf": ("video/x-ms-asf", "audio/x-ms-wma"),
    "ogg": ("video/ogg", "audio/ogg"),
}


@dataclass(frozen=True, slots=True)
class VideoStream:
    """The moving picture. `width` and `height` are as shown: after rotation, with square pixels."""

    index: int
    codec: str
    width: int
    height: int
    stored_width: int
    stored_height: int
    rotation: int
    frame_rate: Fraction | None
    pixel_format: str
    interlaced: bool
    hdr: str | None
    """`pq` or `hlg`."""
    has_alpha: bool
    frames: int | None
    nominal_rate: Fraction | None = None
    """The rate of which all time stamps are multiples, where the container knows one."""
    profile: str = ""
    level: int | None = None
    bit_rate: int | None = None
    start_seconds: float = 0.0
    primaries: str = ""
    transfer: str = ""
    matrix: str = ""
    range: str = ""
    dolby_vision: int | None = None
    """The profile. Its base layer is what is decoded."""
    interlaced_by: str | None = None
    """How it is known: by the `flag` of the file, or `sampled`."""

    @property
    def variable_rate(self) -> bool:
        """Whether the frames come at a varying pace."""
        if self.frame_rate is None or self.nominal_rate is None:
            return self.frame_rate is None
        return abs(self.nominal_rate / self.frame_rate - 1) > Fraction(1, 100)

    @property
    def square(self) -> bool:
        """Whether the frames are stored as they are shown."""
        return (self.width, self.height) == (self.stored_width, self.stored_height)


@dataclass(frozen=True, slots=True)
class AudioStream:
    index: int
    codec: str
    channels: int
    sample_rate: int
    language: str | None = None
    """As the file says it, lower case: `de`, `deu`."""
    title: str | None = None
    layout: str = ""
    profile: str = ""
    default: bool = False
    start_seconds: float = 0.0
    duration_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class SubtitleStream:
    """Subtitles; `is_text` is False for pictures of text."""

    index: int
    codec: str
    is_text: bool
    language: str | None = None
    title: str | None = None
    forced: bool = False


@dataclass(frozen=True, slots=True)
class MediaInfo:
    """A container and what matters in it. Durations in seconds; None where the file does not
    say."""

    container: str
    duration_seconds: float | None
    start_seconds: float
    video: VideoStream | None
    audio: AudioStream | None
    streams: int
    sounds: tuple[AudioStream, ...] = ()
    """Every sound track; `audio` is the one that plays by default."""
    subtitles: tuple[SubtitleStream, ...] = ()
    cover: int | None = None
    """The stream that holds a picture of the cover."""
    attachments: int = 0
    bit_rate: int | None = None
    captions: bool = False
    """Whether closed captions (CEA-608 or 708) lie inside the picture."""
    picture_seconds: float | None = None
    """From the beginning of the container to the end of the last frame, once that was looked up."""
    key_frames: tuple[float, ...] = ()
    """Seconds from the beginning at which decoding can begin, where the container has no index."""
    sound_after_picture: float | None = None
    """Seconds by which the sound ends later than the picture, once that was looked up."""

    @property
    def has_index(self) -> bool:
        """Whether a seek finds the key frame before a time. Live recordings have none."""
        indexed = self.container.startswith(("mov", "matroska"))
        return indexed and self.duration_seconds is not None

    @property
    def kind(self) -> str:
        return "video" if self.video else "audio"

    def as_dict(self) -> dict[str, Any]:
        """What the API shows as `info`."""
        shown: dict[str, Any] = {
            "container": self.container,
            "streams": self.streams,
            "has_audio": self.audio is not None,
            "has_video": self.video is not None,
            "subtitles": [
                {"codec": t.codec, "text": t.is_text, "language": t.language, "forced": t.forced}
                for t in self.subtitles
            ],
            "closed_captions": self.captions,
            "cover_art": self.cover is not None,
            "attachments": self.attachments,
        }
        if self.video is not None:
            rate = self.video.frame_rate
            shown |= {
                "video_codec": self.video.codec,
                "frame_rate": f"{rate.numerator}/{rate.denominator}" if rate else None,
                "pixel_format": self.video.pixel_format,
                "interlaced": self.video.interlaced,
                "interlaced_by": self.video.interlaced_by,
                "rotation": self.video.rotation,
                "hdr": self.video.hdr is not None,
                "hdr_format": self.video.hdr,
                "dolby_vision_profile": self.video.dolby_vision,
                "color": {
                    "primaries": self.video.primaries or None,
                    "transfer": self.video.transfer or None,
                    "matrix": self.video.matrix or None,
                    "range": self.video.range or None,
                },
                "variable_frame_rate": self.video.variable_rate,
                "has_alpha": self.video.has_alpha,
                "stored_width": self.video.stored_width,
                "stored_height": self.video.stored_height,
            }
        if self.audio is not None:
            shown |= {
                "audio_codec": self.audio.codec,
                "audio_channels": self.audio.channels,
                "audio_sample_rate": self.audio.sample_rate,
                "audio_layout": self.audio.layout or None,
                "audio_languages": [sound.language for sound in self.sounds],
            }
        return shown


def ffprobe_args() -> tuple[str, ...]:
    """ffprobe on descriptor 0: container and streams as JSON."""
    return (
        "-hide_banner",
        "-loglevel",
        "warning",
        *INPUT_GUARD,
        "-max_streams",
        "256",
        "-print_format",
        "json",
        "-show_format",
        "-show_streams",
        "-i",
        "fd:",
    )


def output_args(*, count: bool = True) -> tuple[str, ...]:
    """ffprobe on an output of ours: also the number of packets."""
    return (*ffprobe_args(), *(("-count_packets",) if count else ()))


def scan_args(info: MediaInfo, *, limit_seconds: float) -> tuple[str, ...]:
    """ffmpeg through the whole file without decoding: real length, and whether the end is there."""
    stream = info.video or info.audio
    assert stream is not None
    return (
        "-hide_banner",
        "-nostdin",
        "-loglevel",
        "warning",
        "-nostats",
        "-progress",
        "pipe:1",
        *INPUT_GUARD,
        "-i",
        "fd:",
        "-map",
        f"0:{stream.index}",
        "-c",
        "copy",
        "-t",
        f"{limit_seconds:.3f}",
        "-f",
        "null",
        "-",
    )


def may_be_interlaced(video: VideoStream) -> bool:
    """Whether it is worth to look: an interlaced size and codec, and no word of the file's."""
    return (
        not video.interlaced
        and video.stored_height in (480, 486, 576, 1080)
        and video.codec in ("mpeg2video", "h264", "vc1", "dvvideo", "mpeg4", "prores", "rawvideo")
        and (video.frame_rate is None or video.frame_rate <= 30)
    )


def sample_fields_args(video: VideoStream, *, at: float, frames: int) -> tuple[str, ...]:
    """ffmpeg on some frames: what their fields look like."""
    return (
        *("-hide_banner", "-nostdin", "-loglevel", "info", "-nostats"),
        *(("-ss", f"{at:.3f}") if at > 0 else ()),
        *INPUT_GUARD,
        *("-i", "fd:", "-map", f"0:{video.index}", "-frames:v", str(frames)),
        *("-vf", "idet", "-an", "-sn", "-dn", "-f", "null", "-"),
    )


_FIELDS: Final = re.compile(
    r"Multi frame detection: TFF:\s*(\d+) BFF:\s*(\d+) Progressive:\s*(\d+)"
)


def looks_interlaced(stderr: str) -> bool:
    """Whether far more of the sampled frames are combed than not, and all the same way round."""
    counted = _FIELDS.findall(stderr)
    if not counted:
        return False
    top, bottom, whole = map(int, counted[-1])
    combed = max(top, bottom)
    return combed >= 10 and combed > 3 * (whole + min(top, bottom))


def parse(text: bytes, settings: Settings) -> MediaInfo:
    """Read ffprobe's answer, and hold the limits against it. Raises Failure."""
    try:
        found = json.loads(text)
        streams = found["streams"]
        container = found["format"]["format_name"]
    except (ValueError, KeyError, TypeError):
        raise Failure(Code.CORRUPT_INPUT, "Nothing in the file could be read.") from None
    if not streams:
        raise Failure(Code.CORRUPT_INPUT, "The file is a container with nothing in it.")
    if len(streams) > settings.max_streams:
        raise limit_exceeded(
            "streams", allowed=settings.max_streams, seen=len(streams), unit="streams"
        )
    if any(_encrypted(s) for s in streams):
        raise Failure(Code.DRM_ENCRYPTED)
    pictures = [s for s in streams if s.get("codec_type") == "video"]
    moving = [s for s in pictures if not _disposition(s, "attached_pic")]
    sounds = [s for s in streams if s.get("codec_type") == "audio"]
    video = _video(_preferred(moving), settings) if moving else None
    audio = _audio(_preferred(sounds)) if sounds else None
    covers = [int(s["index"]) for s in pictures if _disposition(s, "attached_pic")]
    if video is None and audio is None:
        raise Failure(Code.CORRUPT_INPUT, "The file holds neither picture nor sound.")
    info = MediaInfo(
        container=container,
        duration_seconds=_duration(found["format"], streams),
        start_seconds=_number(found["format"].get("start_time")) or 0.0,
        video=video,
        audio=audio,
        streams=len(streams),
        sounds=tuple(_audio(s) for s in sounds if s is _preferred(sounds) or _is_sound(s)),
        subtitles=tuple(_subtitle(s) for s in streams if s.get("codec_type") == "subtitle"),
        cover=covers[0] if covers else None,
        attachments=sum(s.get("codec_type") == "attachment" for s in streams),
        bit_rate=_integer(found["format"].get("bit_rate")),
        captions=any(_integer(s.get("closed_captions")) for s in moving),
    )
    check_duration(info.duration_seconds, settings)
    return info


def check_duration(seconds: float | None, settings: Settings) -> None:
    """Raise Failure(RESOURCE_LIMIT) for what is too long."""
    if seconds is not None and seconds > settings.max_duration_seconds:
        raise limit_exceeded(
            "duration", allowed=settings.max_duration_seconds, seen=round(seconds, 1), unit="s"
        )


def detected_type(info: MediaInfo, sniffed: str | None) -> str:
    """The media type of the whole file; the signature knows some containers more exactly."""
    guess = _TYPES.get(info.container)
    if sniffed is not None and guess is not None:
        minor = sniffed.partition("/")[2]
        if minor in ("webm", "x-matroska", "mp4", "ogg"):
            return f"{info.kind}/{minor}"
    if sniffed is not None:
        return sniffed
    return guess[info.video is None] if guess else "application/octet-stream"


def key_frame_args(video: VideoStream) -> tuple[str, ...]:
    """ffprobe through the whole file: the time and flags of every packet of the picture."""
    return (
        *("-hide_banner", "-loglevel", "error", *INPUT_GUARD),
        *("-select_streams", str(video.index), "-show_entries", "packet=pts_time,flags"),
        *("-of", "csv=p=0", "-i", "fd:"),
    )


def tail_args(info: MediaInfo, seconds: float) -> tuple[str, ...]:
    """ffprobe on the last `seconds`: stream, time and length of every packet."""
    at = info.start_seconds + max((info.duration_seconds or 0.0) - seconds, 0.0)
    return (
        *("-hide_banner", "-loglevel", "error", *INPUT_GUARD),
        *(("-read_intervals", f"{at:.3f}%") if info.duration_seconds else ()),
        *("-show_entries", "packet=stream_index,pts_time,duration_time", "-of", "csv=p=0"),
        *("-i", "fd:"),
    )


class Tail:
    """When picture and sound end, from what ffprobe says of their last packets, line by line."""

    def __init__(self, info: MediaInfo) -> None:
        self._ends: dict[int, float] = {}
        self._picture = info.video.index if info.video else -1
        self._sound = info.audio.index if info.audio else -1

    def line(self, line: str) -> None:
        index, _, rest = line.partition(",")
        begin, _, length = rest.partition(",")
        end = _number(begin)
        stays = _number(length.rstrip(","))
        if not index.isdigit() or end is None or stays is None:
            return
        end += stays
        self._ends[int(index)] = max(self._ends.get(int(index), end), end)

    @property
    def picture(self) -> float | None:
        """Seconds on the clock of the file; None where there is none, or it ended long before."""
        return self._ends.get(self._picture)

    @property
    def sound(self) -> float | None:
        """As `picture`, of the sound that plays by default."""
        return self._ends.get(self._sound)

    @property
    def sound_after_picture(self) -> float | None:
        """By how much the sound ends later; None where that is not known."""
        if self.sound is None or self.picture is None:
            return None
        return round(self.sound - self.picture, 6)


class Scan:
    """Collects what the scan says on its progress pipe, line by line."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.frames: int | None = None

    def line(self, line: str) -> None:
        name, _, value = line.partition("=")
        if name == "out_time_us" and value.lstrip("-").isdigit():
            self.seconds = max(self.seconds or 0.0, int(value) / 1e6)
        elif name == "frame" and value.isdigit():
            self.frames = int(value)


# What ffmpeg says at warning level when the end of a file is missing or its middle is damaged.
_TRUNCATED: Final = re.compile(
    r"File ended prematurely|partial file|moov atom not found|Truncating packet"
    r"|stream \d+, offset 0x[0-9a-f]+: partial",
    re.IGNORECASE,
)


def check_scan(info: MediaInfo, scan: Scan, stderr: str) -> float | None:
    """The real duration in seconds; raises Failure(TRUNCATED_INPUT) when the end is missing."""
    claimed, real = info.duration_seconds, scan.seconds
    short = (
        claimed is not None
        and real is not None
        and claimed - real > max(0.5, 0.02 * claimed)
        and info.container.startswith(("mov", "matroska", "avi", "flv", "wav"))
    )
    if _TRUNCATED.search(stderr) or (short and "rror" in stderr):
        detail = "The end of the file is missing."
        if claimed and real is not None and short:
            detail = f"The file says {claimed:.1f} s, but only {real:.1f} s of it are there."
        raise Failure(Code.TRUNCATED_INPUT, detail)
    return real if claimed is None else claimed


def _video(stream: Mapping[str, Any], settings: Settings) -> VideoStream:
    codec = str(stream.get("codec_name", "unknown"))
    if codec not in VIDEO_CODECS:
        raise Failure(
            Code.UNSUPPORTED_CODEC,
            f"The picture is coded as {_coding(stream)}, which is not taken.",
        )
    width, height = int(stream.get("width") or 0), int(stream.get("height") or 0)
    if width < 1 or height < 1:
        raise Failure(Code.CORRUPT_INPUT, "The picture has no size.")
    if width * height > min(settings.max_pixels, _MAX_PIXELS):
        raise limit_exceeded(
            "pixels of a frame",
            allowed=min(settings.max_pixels, _MAX_PIXELS),
            seen=width * height,
            unit="pixels",
        )
    rate = _fraction(stream.get("avg_frame_rate")) or _fraction(stream.get("r_frame_rate"))
    rotation = _rotation(stream)
    shown = _shown_size(width, height, _fraction(stream.get("sample_aspect_ratio"), ":"), rotation)
    transfer = str(stream.get("color_transfer", ""))
    interlaced = stream.get("field_order") in ("tt", "bb", "tb", "bt")
    pixel_format = str(stream.get("pix_fmt", "unknown"))
    tags = {str(k).lower(): v for k, v in (stream.get("tags") or {}).items()}
    return VideoStream(
        index=int(stream["index"]),
        codec=codec,
        width=shown[0],
        height=shown[1],
        stored_width=width,
        stored_height=height,
        rotation=rotation,
        frame_rate=rate,
        pixel_format=pixel_format,
        interlaced=interlaced,
        interlaced_by="flag" if interlaced else None,
        hdr=_HDR.get(transfer),
        has_alpha="yuva" in pixel_format
        or pixel_format in ("rgba", "bgra", "argb", "abgr")
        or str(tags.get("alpha_mode")) == "1",
        frames=_integer(stream.get("nb_read_packets") or stream.get("nb_frames")),
        nominal_rate=_fraction(stream.get("r_frame_rate")),
        profile=str(stream.get("profile", "")),
        level=_integer(stream.get("level")),
        bit_rate=_integer(stream.get("bit_rate")),
        start_seconds=_number(stream.get("start_time")) or 0.0,
        primaries=str(stream.get("color_primaries", "")),
        transfer=transfer,
        matrix=str(stream.get("color_space", "")),
        range=str(stream.get("color_range", "")),
        dolby_vision=next(
            (
                _integer(side.get("dv_profile"))
                for side in stream.get("side_data_list") or ()
                if "DOVI" in str(side.get("side_data_type"))
            ),
            None,
        ),
    )


def _is_sound(stream: Mapping[str, Any]) -> bool:
    codec = str(stream.get("codec_name", "unknown"))
    return codec in AUDIO_CODECS or codec.startswith("pcm_")


def _audio(stream: Mapping[str, Any]) -> AudioStream:
    codec = str(stream.get("codec_name", "unknown"))
    if not _is_sound(stream):
        raise Failure(
            Code.UNSUPPORTED_CODEC, f"The sound is coded as {_coding(stream)}, which is not taken."
        )
    return AudioStream(
        index=int(stream["index"]),
        codec=codec,
        channels=_integer(stream.get("channels")) or 2,
        sample_rate=_integer(stream.get("sample_rate")) or 48000,
        language=_tag(stream, "language"),
        title=_tag(stream, "title"),
        layout=str(stream.get("channel_layout", "")),
        profile=str(stream.get("profile", "")),
        default=_disposition(stream, "default"),
        start_seconds=_number(stream.get("start_time")) or 0.0,
        duration_seconds=_number(stream.get("duration")),
    )


_PICTURES_OF_TEXT: Final = frozenset(
    ("hdmv_pgs_subtitle", "dvd_subtitle", "dvb_subtitle", "xsub", "dvb_teletext", "eia_608")
)


def _subtitle(stream: Mapping[str, Any]) -> SubtitleStream:
    codec = str(stream.get("codec_name", "unknown"))
    return SubtitleStream(
        index=int(stream["index"]),
        codec=codec,
        is_text=codec not in _PICTURES_OF_TEXT and codec != "unknown",
        language=_tag(stream, "language"),
        title=_tag(stream, "title"),
        forced=_disposition(stream, "forced"),
    )


def _tag(stream: Mapping[str, Any], name: str) -> str | None:
    """A short tag as far as it can be printed; languages in lower case."""
    tags = {str(k).lower(): str(v) for k, v in (stream.get("tags") or {}).items()}
    text = "".join(c for c in tags.get(name, "") if c.isprintable())[:80].strip()
    if name == "language":
        text = text.lower()
        if not re.fullmatch(r"[a-z]{2,3}(-[a-z0-9]{2,8})*", text) or text == "und":
            return None
    return text or None


def _preferred(streams: list[Any]) -> Any:
    """The one that the file calls its default, else the first."""
    return next((s for s in streams if _disposition(s, "default")), streams[0])


def _disposition(stream: Mapping[str, Any], name: str) -> bool:
    return bool((stream.get("disposition") or {}).get(name))


def _shown_size(
    width: int, height: int, pixel_shape: Fraction | None, rotation: int
) -> tuple[int, int]:
    # Stretch the narrow side of a pixel, so that nothing is lost; absurd shapes count as square.
    if pixel_shape is not None and Fraction(1, 16) <= pixel_shape <= 16 and pixel_shape != 1:
        width = max(1, round(width * pixel_shape))
    return (height, width) if rotation in (90, 270) else (width, height)


def _rotation(stream: Mapping[str, Any]) -> int:
    """Clockwise quarter turns in degrees: 0, 90, 180 or 270."""
    for side in stream.get("side_data_list") or ():
        if side.get("side_data_type") == "Display Matrix":
            turned = _number(side.get("rotation"))
            if turned is not None:
                return -round(turned / 90) * 90 % 360
    return 0


def _encrypted(stream: Mapping[str, Any]) -> bool:
    tag = str(stream.get("codec_tag_string", ""))
    sides = [str(s.get("side_data_type", "")) for s in stream.get("side_data_list") or ()]
    return tag in ("encv", "enca", "drms", "drmi") or any("ncryption" in side for side in sides)


def _duration(container: Mapping[str, Any], streams: list[Any]) -> float | None:
    seconds = [_number(container.get("duration")), *(_number(s.get("duration")) for s in streams)]
    real = [s for s in seconds if s is not None and s > 0]
    return real[0] if real else None


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _integer(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _fraction(value: Any, sign: str = "/") -> Fraction | None:
    above, _, below = str(value).partition(sign)
    if not above.isdigit() or not below.isdigit() or int(below) == 0 or int(above) == 0:
        return None
    return Fraction(int(above), int(below))


def _coding(stream: Mapping[str, Any]) -> str:
    """The codec and its tag, as far as they can be printed."""
    names = (stream.get("codec_name"), stream.get("codec_tag_string"))
    shown = [
        "".join(c if c.isascii() and c.isprintable() else "?" for c in str(n)) for n in names if n
    ]
    return " / ".join(dict.fromkeys(name[:24] for name in shown)) or "something unknown"

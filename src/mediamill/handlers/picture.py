"""From a picture as the file has it to an ordinary one: size, pace, color, and the encoder's words.

Pure: plans only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from mediamill.probe import VideoStream
from mediamill.recipes.video import Codec, Preset

# PQ and HLG to ordinary video: linear light at 100 nit, into BT.709, highlights rolled off.
_TONE_MAP: Final = (
    "zscale=t=linear:npl=100,format=gbrpf32le,zscale=p=bt709,tonemap=hable:desat=0,"
    "zscale=t=bt709:m=bt709:r=tv"
)
# Transparent parts are laid on white.
_ON_WHITE: Final = (
    "split[top][size];[size]drawbox=c=white:t=fill:replace=1[white];[white][top]overlay"
)
_COMMON_RATES: Final = tuple(
    Fraction(n, d)
    for n, d in (
        (24000, 1001), (24, 1), (25, 1), (30000, 1001), (30, 1), (48, 1), (50, 1), (60000, 1001),
        (60, 1), (5, 1), (10, 1), (12, 1), (15, 1), (20, 1), (100, 1), (120, 1),
    )
)  # fmt: skip
_TRANSFERS: Final = {"pq": "smpte2084", "hlg": "arib-std-b67"}
# What the frames say of themselves is what the encoder writes; its own options say nothing then.
_ORDINARY: Final = "setparams=range=tv:color_primaries=bt709:color_trc=bt709:colorspace=bt709"

# Work for a pixel, against H.264 at `veryfast`.
_PRESET_COST: Final[dict[Preset, float]] = {
    "ultrafast": 0.35,
    "superfast": 0.6,
    "veryfast": 1.0,
    "faster": 1.4,
    "fast": 1.9,
    "medium": 2.5,
    "slow": 4.0,
}
_CODEC_COST: Final[dict[Codec, float]] = {"h264": 1.0, "hevc": 4.0, "vp9": 5.0, "av1": 3.0}


@dataclass(frozen=True, slots=True)
class Coding:
    """How a picture is to be coded. `kbps` is the highest rate, held over two seconds."""

    width: int
    height: int
    codec: Codec
    preset: Preset
    crf: int
    kbps: int
    hdr: str | None = None
    """`pq` or `hlg` if it is kept."""

    def work(self, rate: Fraction | None, seconds: float) -> float:
        """What encoding so many seconds of it costs, in pixels at the default preset."""
        cost = _PRESET_COST[self.preset] * _CODEC_COST[self.codec]
        return self.width * self.height * float(rate or 30) * seconds * cost


def fitted(width: int, height: int, short_side: int) -> tuple[int, int]:
    """The size with at most `short_side` pixels on the shorter side, even, never enlarged."""
    scale = min(Fraction(1), Fraction(short_side, min(width, height)))
    return tuple(max(2, int(side * scale) // 2 * 2) for side in (width, height))  # type: ignore[return-value]


def still_size(video: VideoStream, short_side: int) -> tuple[int, int]:
    """As `fitted`, but a still may have odd sides."""
    scale = min(1.0, short_side / min(video.width, video.height))
    return max(1, round(video.width * scale)), max(1, round(video.height * scale))


def steady_rate(video: VideoStream, most: float) -> Fraction:
    """The constant rate that shows every frame of the source, halved until it is at most `most`."""
    rate = video.frame_rate or Fraction(30)
    nominal = video.nominal_rate
    if not video.variable_rate and nominal is not None and not _is_common(rate):
        rate = nominal  # the average of a file that misses a frame, or counts its last one longer
    if video.variable_rate:
        if nominal is not None and rate <= nominal <= 120:
            rate = nominal
        else:
            rate = min((r for r in _COMMON_RATES if r >= rate and r >= 24), default=Fraction(60))
    rate = min(_COMMON_RATES, key=lambda r: abs(r - rate)) if _is_common(rate) else rate
    rate = max(rate, Fraction(1))
    while rate > most and rate > 1:
        rate /= 2
    return rate.limit_denominator(1001)


def _is_common(rate: Fraction) -> bool:
    return any(abs(r / rate - 1) < Fraction(1, 2000) for r in _COMMON_RATES)


def straighten(video: VideoStream) -> tuple[str, ...]:
    """The first steps, at the size of the source: transparency onto white, progressive frames.
    ffmpeg turns the picture upright before them."""
    steps: list[str] = []
    if video.has_alpha:
        steps.append(_ON_WHITE)
    if video.interlaced:
        # What was found by looking is not flagged in the frames.
        which = "interlaced" if video.interlaced_by == "flag" else "all"
        steps.append(f"bwdif=mode=send_frame:deint={which}")
    return tuple(steps)


def shrink(
    video: VideoStream, width: int, height: int, *, hdr: str | None = None, rgb: bool = False
) -> tuple[str, ...]:
    """The last steps: size, ordinary color, square pixels. `hdr` is what is kept of it."""
    # An HDR frame is scaled first: tone mapping in floating point is the costly part.
    scale = f"scale={width}:{height}:flags=bicubic"
    unknown = video.matrix in ("", "unknown", "unspecified", "reserved", "gbr")
    if video.hdr is None:
        if unknown and video.stored_height >= 720 and video.matrix != "gbr":
            scale += ":in_color_matrix=bt709"
        if not rgb:
            scale += ":out_color_matrix=bt709:out_range=tv"
        return (scale, "setsar=1", *(() if rgb else ("format=yuv420p", _ORDINARY)))
    if hdr is not None:
        kept = f"color_primaries=bt2020:color_trc={_TRANSFERS[hdr]}:colorspace=bt2020nc"
        return (scale, "setsar=1", "format=yuv420p10le", f"setparams=range=tv:{kept}")
    return (scale, _TONE_MAP, "setsar=1", *(() if rgb else ("format=yuv420p", _ORDINARY)))


def decoder(video: VideoStream) -> tuple[str, ...]:
    """Options in front of the input."""
    # Only libvpx reads the side stream in which WebM keeps transparency.
    decoders = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
    if video.has_alpha and video.codec in decoders:
        return ("-c:v", decoders[video.codec])
    return ()


def encoder(coding: Coding, *, group: int | None = None) -> tuple[str, ...]:
    """The encoder with its settings; with `group`, a key frame at exactly every so many frames."""
    rate = ("-maxrate", f"{coding.kbps}k", "-bufsize", f"{2 * coding.kbps}k")
    grid: tuple[str, ...] = ()
    if group is not None:
        grid = ("-g", str(group), "-keyint_min", str(group))
    match coding.codec:
        case "h264":
            args: Sequence[str] = (
                *("-c:v", "libx264", "-preset", coding.preset, "-crf", str(coding.crf)),
                *(*rate, "-profile:v", "high"),
                *((*grid, "-sc_threshold", "0", "-flags:v", "+cgop+bitexact") if group else ()),
            )
        case "hevc":
            params = "log-level=error"
            if group is not None:
                params += f":keyint={group}:min-keyint={group}:scenecut=0:open-gop=0"
            args = (
                *("-c:v", "libx265", "-preset", coding.preset, "-crf", str(coding.crf)),
                *(*rate, "-tag:v", "hvc1", "-x265-params", params),
            )
        case "vp9":
            args = (
                *("-c:v", "libvpx-vp9", "-deadline", "good", "-cpu-used", "4", "-row-mt", "1"),
                *("-crf", str(coding.crf), "-b:v", f"{coding.kbps}k", *grid),
            )
        case "av1":
            args = (
                *("-c:v", "libsvtav1", "-preset", "8", "-crf", str(coding.crf)),
                *("-maxrate", f"{coding.kbps}k", "-bufsize", f"{2 * coding.kbps}k"),
                *(("-g", str(group), "-svtav1-params", "scd=0") if group else ()),
            )
    if group is not None and coding.codec != "h264":
        args = (*args, "-force_key_frames", f"expr:eq(mod(n,{group}),0)")
    return tuple(args)

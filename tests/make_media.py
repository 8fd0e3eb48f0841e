"""Small pictures for the tests, drawn and laid out byte by byte. Each function returns a file."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw, PngImagePlugin

RGB = tuple[int, int, int]

RED: RGB = (220, 30, 30)
GREEN: RGB = (30, 180, 60)
BLUE: RGB = (40, 60, 210)
YELLOW: RGB = (235, 215, 40)
CORNERS: tuple[RGB, RGB, RGB, RGB] = (RED, GREEN, BLUE, YELLOW)
"""Top left, top right, bottom left, bottom right, as shown."""

# How a picture must be stored so that the EXIF number turns it upright again.
_UNDO = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def save(image: Image.Image, format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def flat(size: tuple[int, int], color: RGB) -> Image.Image:
    return Image.new("RGB", size, color)


def corners(size: tuple[int, int]) -> Image.Image:
    """Four quarters, one color each."""
    width, height = size
    image = Image.new("RGB", size)
    draw = ImageDraw.Draw(image)
    for number, color in enumerate(CORNERS):
        left, top = number % 2 * width // 2, number // 2 * height // 2
        draw.rectangle((left, top, left + width // 2, top + height // 2), fill=color)
    return image


def texture(size: tuple[int, int], seed: int = 1) -> Image.Image:
    """A picture with something in every part of it, so that a cut or a flipped bit is felt."""
    noise = bytearray()
    state = seed
    for _ in range(64 * 48 * 3):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        noise.append(state >> 16 & 0xFF)
    return Image.frombytes("RGB", (64, 48), bytes(noise)).resize(size, Image.Resampling.BICUBIC)


def turned(size: tuple[int, int], number: int, format: str, **options: Any) -> bytes:
    """`corners` of the shown size, stored turned, with an EXIF orientation that says so."""
    image = corners(size)
    if number in _UNDO:
        image = image.transpose(_UNDO[number])
    exif = Image.Exif()
    exif[0x0112] = number
    exif[0x010F], exif[0x0110] = "Example", "Camera 1"
    return save(image, format, exif=exif, **options)


# --- Color profiles

_P3 = ((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))
_ADOBE = ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457))
_WHITE = (0.9642, 1.0, 0.8249)


def p3_profile() -> bytes:
    return _profile("Example P3", _P3)


def adobe_rgb_profile() -> bytes:
    return _profile("Example Adobe", _ADOBE)


def gray_profile(gamma: float) -> bytes:
    return _profile("Example Gray", None, gamma=gamma, space=b"GRAY")


def foreign_profile() -> bytes:
    """A profile for RGB whose header says CMYK."""
    return _profile("Example Odd", _P3, space=b"CMYK")


def rubbish_profile() -> bytes:
    """The header is that of an RGB profile, and nothing it lists can be used."""
    whole = p3_profile()
    return whole[:132] + bytes(len(whole) - 132)


def _profile(
    name: str,
    primaries: Sequence[Sequence[float]] | None,
    *,
    gamma: float = 2.2,
    space: bytes = b"RGB ",
) -> bytes:
    def xyz(values: Sequence[float]) -> bytes:
        return b"XYZ \0\0\0\0" + b"".join(struct.pack(">i", round(v * 65536)) for v in values)

    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"
    text = name.encode() + b"\0"
    described = b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + bytes(79)
    tags = [(b"desc", described), (b"wtpt", xyz(_WHITE)), (b"cprt", b"text\0\0\0\0CC0\0")]
    if primaries is None:
        tags.append((b"kTRC", curve))
    else:
        for letter, values in zip((b"r", b"g", b"b"), primaries, strict=True):
            tags += [(letter + b"XYZ", xyz(values)), (letter + b"TRC", curve)]
    table, body = struct.pack(">I", len(tags)), b""
    start = 128 + 4 + 12 * len(tags)
    for tag, data in tags:
        table += struct.pack(">4sII", tag, start + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    head = bytearray(128)
    head[0:4] = struct.pack(">I", start + len(body))
    head[8:12] = bytes.fromhex("02400000")
    head[12:24] = b"mntr" + space + b"XYZ "
    head[36:40] = b"acsp"
    head[68:80] = xyz(_WHITE)[8:]
    return bytes(head) + table + body


# --- PNG, chunk by chunk


def chunk(name: bytes, data: bytes) -> bytes:
    crc = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", crc)


def png(
    size: tuple[int, int],
    rows: Sequence[bytes],
    *,
    depth: int = 8,
    kind: int = 2,
    extra: Sequence[bytes] = (),
) -> bytes:
    """A PNG of the given rows (no filter). `extra` chunks stand before the pixels."""
    header = struct.pack(">IIBBBBB", *size, depth, kind, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    body = chunk(b"IHDR", header) + b"".join(extra) + chunk(b"IDAT", pixels)
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


def gray_bands_16(values: Sequence[int], size: tuple[int, int]) -> bytes:
    """A 16-bit gray PNG of upright bands."""
    width, height = size
    row = b"".join(struct.pack(">H", values[x * len(values) // width]) for x in range(width))
    return png(size, [row] * height, depth=16, kind=0)


def png_with_damaged_profile(color: RGB) -> bytes:
    """A sound PNG but for the checksum of its color profile."""
    good = save(flat((96, 64), color), "PNG", icc_profile=p3_profile())
    at = good.index(b"iCCP")
    length = struct.unpack(">I", good[at - 4 : at])[0]
    end = at + 4 + length
    return good[:end] + bytes(b ^ 0xFF for b in good[end : end + 4]) + good[end + 4 :]


def pq_bands(nits: Sequence[float]) -> bytes:
    """A 16-bit PNG of gray bands that says BT.2020 and PQ in a cICP chunk."""

    def code(light: float) -> int:
        y = (light / 10_000) ** 0.1593017578125
        return int(((0.8359375 + 18.8515625 * y) / (1 + 18.6875 * y)) ** 78.84375 * 65535 + 0.5)

    row = b"".join(struct.pack(">H", code(n)) * 3 * 40 for n in nits)
    cicp = chunk(b"cICP", bytes((9, 16, 0, 1)))
    return png((40 * len(nits), 60), [row] * 60, depth=16, kind=2, extra=[cicp])


# --- Particular pictures


def clear_ground_with_square(size: tuple[int, int], box: tuple[int, int, int, int]) -> Image.Image:
    """A red square on a clear ground that hides black."""
    image = Image.new("RGBA", size, (0, 0, 0, 0))
    ImageDraw.Draw(image).rectangle(box, fill=(*RED, 255))
    return image


def jpeg_with_everything() -> bytes:
    """A blue JPEG with a place in EXIF, XMP and IPTC, a comment, and an old EXIF thumbnail of
    another picture (red)."""
    exif = Image.Exif()
    exif[0x010F], exif[0x0110] = "Example", "Camera 1"
    gps = exif.get_ifd(0x8825)
    gps.update({1: "N", 2: (1.0, 0.0, 0.0), 3: "E", 4: (2.0, 0.0, 0.0)})
    plain = save(flat((160, 120), BLUE), "JPEG", quality=90, exif=exif)
    xmp = (
        b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><exif:GPSLatitude>1,0N</exif:GPSLatitude></x:xmpmeta>'
    )
    iptc = b"Photoshop 3.0\x008BIM\x04\x04\0\0\0\0\0\x12\x1c\x02\x5a\0\x0cExampleville\0"
    thumbnail = save(flat((80, 60), RED), "JPEG")
    segments = (
        (0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp),
        (0xED, iptc),
        (0xFE, b"seen from the window of Example street 1"),
        (0xE1, b"Exif\0\0" + _exif_with_thumbnail(thumbnail)),
    )
    extra = b"".join(struct.pack(">BBH", 0xFF, m, len(d) + 2) + d for m, d in segments)
    return plain[:2] + extra + plain[2:]


def _exif_with_thumbnail(picture: bytes) -> bytes:
    first = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", 0) + struct.pack("<I", 14)
    start = 14 + 2 + 2 * 12 + 4
    second = struct.pack("<H", 2)
    second += struct.pack("<HHII", 0x0201, 4, 1, start)
    second += struct.pack("<HHII", 0x0202, 4, 1, len(picture)) + struct.pack("<I", 0)
    return first + second + picture


def frames(format: str, colors: Sequence[RGB], delays: Sequence[int], **options: Any) -> bytes:
    """An animation of flat frames, each with a mark so that no encoder drops it as equal."""
    images = [flat((80, 60), color) for color in colors]
    for number, image in enumerate(images):
        image.putpixel((number, 0), (255, 255, 255))
    return save(
        images[0],
        format,
        save_all=True,
        append_images=images[1:],
        duration=list(delays),
        **({"loop": 0} | options),
    )


def gif_of_dots(canvas: tuple[int, int], count: int) -> bytes:
    """A GIF with a large canvas and many frames of one pixel each."""
    head = b"GIF89a" + struct.pack("<HHBBB", *canvas, 0x80, 0, 0) + bytes((0, 0, 0, *RED))
    loop = b"\x21\xff\x0bNETSCAPE2.0\x03\x01\0\0\0"
    frame = b"\x21\xf9\x04\0\x05\0\0\0" + b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0)
    return head + loop + (frame + b"\x02\x02\x4c\x01\0") * count + b"\x3b"


def gif_of_changes() -> bytes:
    """Three frames: all blue; a red box laid over it; a box that is clear but for a green edge."""
    first = flat((80, 60), BLUE)
    second = first.copy()
    ImageDraw.Draw(second).rectangle((10, 10, 29, 29), fill=RED)
    third = second.copy()
    ImageDraw.Draw(third).rectangle((40, 10, 59, 29), outline=GREEN)
    return save(first, "GIF", save_all=True, append_images=[second, third], duration=200, loop=0)


def resized_header(jpeg: bytes, size: tuple[int, int]) -> bytes:
    """The same JPEG, but its frame header claims another size."""
    at = jpeg.index(b"\xff\xc0")
    return jpeg[: at + 5] + struct.pack(">HH", size[1], size[0]) + jpeg[at + 9 :]


def twelve_bit(jpeg: bytes) -> bytes:
    """The same JPEG, but its frame header claims 12 bits per sample."""
    at = jpeg.index(b"\xff\xc0")
    return jpeg[: at + 4] + b"\x0c" + jpeg[at + 5 :]


def two_pictures() -> bytes:
    """A multi-picture JPEG, as phones write it: a blue picture and a small red one behind it."""
    first, second = flat((200, 150), BLUE), flat((100, 75), RED)
    return save(first, "MPO", save_all=True, append_images=[second], quality=90)


def png_with_text(text: str) -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", text)
    return save(flat((40, 30), BLUE), "PNG", pnginfo=info)


def soft_gradient(size: tuple[int, int]) -> bytes:
    """A large JPEG that is quickly made."""
    ramp = Image.linear_gradient("L").resize((64, 64))
    image = Image.merge("RGB", (ramp, ramp.rotate(90), ramp.rotate(180)))
    return save(image.resize(size, Image.Resampling.BILINEAR), "JPEG", quality=60)

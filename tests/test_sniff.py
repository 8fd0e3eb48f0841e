"""What a file is, by its first bytes. The heads are laid out here, or come from Pillow."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests import make_media as media
from tests.make_media import save

from mediamill.sniff import HEAD_BYTES, Kind, sniff


def ftyp(major: bytes, *others: bytes) -> bytes:
    body = b"ftyp" + major + b"\0\0\0\0" + b"".join(others)
    return struct.pack(">I", len(body) + 4) + body + b"\0\0\0\x08free"


def ebml(doctype: bytes) -> bytes:
    inner = b"\x42\x86\x81\x01" + b"\x42\x82" + bytes((0x80 | len(doctype),)) + doctype
    return b"\x1a\x45\xdf\xa3" + bytes((0x80 | len(inner),)) + inner


def packets(size: int, start: int) -> bytes:
    packet = bytearray(size)
    packet[start] = 0x47
    return bytes(packet) * 10


def mp3_frames(count: int) -> bytes:
    # MPEG 1 layer 3, 128 kbit/s, 44.1 kHz: 417 bytes
    return (b"\xff\xfb\x90\x00" + bytes(413)) * count


def adts_frames(count: int) -> bytes:
    length = 300
    head = bytes((0xFF, 0xF1, 0x50, 0x80 | length >> 11, length >> 3 & 0xFF, (length & 7) << 5, 0))
    return (head + bytes(length - 7)) * count


def id3(length: int) -> bytes:
    size = bytes((length >> 21 & 127, length >> 14 & 127, length >> 7 & 127, length & 127))
    return b"ID3\x04\0\0" + size + bytes(length)


SMALL = media.flat((16, 16), media.RED)

HEADS = {
    "jpeg": (save(SMALL, "JPEG"), "image/jpeg", Kind.IMAGE),
    "multi-picture jpeg": (media.two_pictures(), "image/jpeg", Kind.IMAGE),
    "png": (save(SMALL, "PNG"), "image/png", Kind.IMAGE),
    "animated png": (
        media.frames("PNG", (media.RED, media.BLUE), (90, 90)),
        "image/png",
        Kind.IMAGE,
    ),
    "gif": (save(SMALL, "GIF"), "image/gif", Kind.IMAGE),
    "webp": (save(SMALL, "WEBP"), "image/webp", Kind.IMAGE),
    "avif": (save(SMALL, "AVIF"), "image/avif", Kind.IMAGE),
    "animated avif": (
        media.frames("AVIF", (media.RED, media.BLUE), (90, 90)),
        "image/avif",
        Kind.IMAGE,
    ),
    "avif of mif1": (ftyp(b"mif1", b"mif1", b"avif"), "image/avif", Kind.IMAGE),
    "heic": (ftyp(b"heic", b"mif1", b"heic"), "image/heic", Kind.IMAGE),
    "heic of mif1": (ftyp(b"mif1", b"mif1", b"heic"), "image/heic", Kind.IMAGE),
    "ten-bit heic": (ftyp(b"heix", b"mif1"), "image/heic", Kind.IMAGE),
    "heif": (ftyp(b"mif1", b"mif1"), "image/heif", Kind.IMAGE),
    "tiff, little end first": (save(SMALL, "TIFF"), "image/tiff", Kind.IMAGE),
    "tiff, big end first": (b"MM\0*\0\0\0\x08" + bytes(20), "image/tiff", Kind.IMAGE),
    "big tiff": (b"II+\0\x08\0\0\0" + bytes(20), "image/tiff", Kind.IMAGE),
    "bmp": (save(SMALL, "BMP"), "image/bmp", Kind.IMAGE),
    "ico": (save(SMALL, "ICO", sizes=[(16, 16)]), "image/vnd.microsoft.icon", Kind.IMAGE),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "image/svg+xml", Kind.IMAGE),
    "svg after a prolog": (
        b'\xef\xbb\xbf\n<?xml version="1.0"?>\n<!-- <html> -->\n'
        b'<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "x" [ <!ENTITY a "b"> ]>\n<svg:svg>',
        "image/svg+xml",
        Kind.IMAGE,
    ),
    "svg in utf-16": (
        b"\xff\xfe" + '<?xml version="1.0"?><svg/>'.encode("utf-16-le"),
        "image/svg+xml",
        Kind.IMAGE,
    ),
    "svg behind a long comment": (
        b"<!DOCTYPE svg><!--" + b"x" * HEAD_BYTES + b"--><svg/>",
        "image/svg+xml",
        Kind.IMAGE,
    ),
    "jxl": (b"\xff\x0a" + bytes(20), "image/jxl", Kind.IMAGE),
    "jxl in boxes": (b"\0\0\0\x0cJXL \r\n\x87\n", "image/jxl", Kind.IMAGE),
    "jp2": (b"\0\0\0\x0cjP  \r\n\x87\n", "image/jp2", Kind.IMAGE),
    "psd": (b"8BPS\0\x01" + bytes(20), "image/vnd.adobe.photoshop", Kind.IMAGE),
    "canon raw": (b"II*\0\x10\0\0\0CR\x02\0", "image/x-raw", Kind.IMAGE),
    "canon raw 3": (ftyp(b"crx ", b"crx ", b"isom"), "image/x-raw", Kind.IMAGE),
    "mp4": (ftyp(b"isom", b"isom", b"avc1", b"mp41"), "video/mp4", Kind.VIDEO),
    "mp4 of an unknown brand": (ftyp(b"XAVC", b"mp42"), "video/mp4", Kind.VIDEO),
    "mov": (ftyp(b"qt  ", b"qt  "), "video/quicktime", Kind.VIDEO),
    "m4a": (ftyp(b"M4A ", b"isom"), "audio/mp4", Kind.AUDIO),
    "3gp": (ftyp(b"3gp5", b"isom"), "video/3gpp", Kind.VIDEO),
    "3g2": (ftyp(b"3g2a", b"isom"), "video/3gpp2", Kind.VIDEO),
    "old mov, moov first": (b"\0\0\x10\0moov" + bytes(9), "video/quicktime", Kind.VIDEO),
    "old mov, wide first": (b"\0\0\0\x08wide\0\0\0\0mdat", "video/quicktime", Kind.VIDEO),
    "old mov, huge mdat first": (b"\0\0\0\x01mdat" + bytes(9), "video/quicktime", Kind.VIDEO),
    "matroska": (ebml(b"matroska"), "video/x-matroska", Kind.VIDEO),
    "webm": (ebml(b"webm"), "video/webm", Kind.VIDEO),
    "avi": (b"RIFF\0\0\0\0AVI LIST", "video/x-msvideo", Kind.VIDEO),
    "wav": (b"RIFF\0\0\0\0WAVEfmt ", "audio/wav", Kind.AUDIO),
    "aiff": (b"FORM\0\0\0\0AIFFCOMM", "audio/aiff", Kind.AUDIO),
    "mpeg ts": (packets(188, 0), "video/mp2t", Kind.VIDEO),
    "mpeg ts with timecodes": (packets(192, 4), "video/mp2t", Kind.VIDEO),
    "mpeg ps": (b"\0\0\x01\xba\x44" + bytes(20), "video/mpeg", Kind.VIDEO),
    "flv": (b"FLV\x01\x05\0\0\0\x09", "video/x-flv", Kind.VIDEO),
    "asf": (bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c"), "video/x-ms-asf", Kind.VIDEO),
    "ogg video": (b"OggS" + bytes(24) + b"\x80theora", "video/ogg", Kind.VIDEO),
    "ogg audio": (b"OggS" + bytes(24) + b"OpusHead", "audio/ogg", Kind.AUDIO),
    "mp3": (mp3_frames(2), "audio/mpeg", Kind.AUDIO),
    "mp3 behind a tag": (id3(300) + mp3_frames(3), "audio/mpeg", Kind.AUDIO),
    "mp3 behind a large tag": (id3(9000) + mp3_frames(3), "audio/mpeg", Kind.AUDIO),
    "aac": (adts_frames(2), "audio/aac", Kind.AUDIO),
    "aac behind a tag": (id3(60) + adts_frames(2), "audio/aac", Kind.AUDIO),
    "flac": (b"fLaC\0\0\0\x22", "audio/flac", Kind.AUDIO),
    "flac behind a tag": (id3(20) + b"fLaC\0\0\0\x22" + bytes(16), "audio/flac", Kind.AUDIO),
    "amr": (b"#!AMR\n\x3c", "audio/amr", Kind.AUDIO),
    "hls": (
        b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/a.ts",
        "application/vnd.apple.mpegurl",
        Kind.PLAYLIST,
    ),
    "hls behind a mark": (b"\xef\xbb\xbf#EXTM3U\n", "application/vnd.apple.mpegurl", Kind.PLAYLIST),
    "hls behind a tag": (
        id3(40) + b"#EXTM3U\n#EXTINF:1,\na.ts\n",
        "application/vnd.apple.mpegurl",
        Kind.PLAYLIST,
    ),
    "dash": (b'<?xml version="1.0"?>\n<MPD xmlns="x">', "application/dash+xml", Kind.PLAYLIST),
    "ffconcat": (b"ffconcat version 1.0\nfile a.mp4\n", "text/x-ffconcat", Kind.PLAYLIST),
    "sdp": (b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\n", "application/sdp", Kind.PLAYLIST),
    "asx": (b'<ASX version="3.0">', "text/plain", Kind.PLAYLIST),
    "pdf": (b"%PDF-1.7\n", "application/pdf", Kind.DOCUMENT),
    "html": (b"<!DOCTYPE html><html><body>", "text/html", Kind.DOCUMENT),
    "html without a head": (b"<script>alert(1)</script>", "text/html", Kind.DOCUMENT),
    "xml": (b'<?xml version="1.0"?><feed/>', "application/xml", Kind.DOCUMENT),
    "text": (b"Dear Mr. G\xc3\xb6del,\n", "text/plain", Kind.DOCUMENT),
    "text that begins with BM": (b"BMW and others\n" * 9, "text/plain", Kind.DOCUMENT),
    "zip": (b"PK\x03\x04" + bytes(20), "application/zip", Kind.DOCUMENT),
    "elf": (b"\x7fELF\x02\x01\x01", "application/octet-stream", Kind.DOCUMENT),
    "script": (b"#!/bin/sh\n", "text/x-script", Kind.DOCUMENT),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_file_is_known_by_its_first_bytes(name: str) -> None:
    head, type, kind = HEADS[name]
    sniffed = sniff(head, len(head))
    assert sniffed is not None
    assert (sniffed.type, sniffed.kind) == (type, kind)
    # The size only settles weak cases, and more bytes change nothing.
    assert sniff(head) == sniffed
    if len(head) > HEAD_BYTES:
        assert sniff(head[:HEAD_BYTES]) == sniffed


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\0" * 100,
        bytes((0, 1, 1, 0)) * 16,
        b"\xff\xfb\x90\x00" + bytes(600),  # one frame of sound and then nothing
        b"\0\0\x01\0" + bytes(40),  # an icon of no pictures
        b"RIFF\0\0\0\0ABCD",
    ],
)
def test_what_nobody_knows_is_nothing(head: bytes) -> None:
    assert sniff(head, len(head)) is None


def test_one_frame_of_sound_is_enough_if_it_is_the_whole_file() -> None:
    frame = mp3_frames(1)
    found = sniff(frame, len(frame))
    assert found is not None
    assert found.format == "mp3"
    assert sniff(frame, len(frame) + 5) is None


def test_a_signature_hidden_further_back_does_not_count() -> None:
    picture = save(Image.new("L", (8, 8)), "PNG")
    found = sniff(picture + b"<html><script>" + b"#EXTM3U", None)
    assert found is not None
    assert found.format == "png"


@given(st.binary(max_size=600), st.sampled_from([head for head, _, _ in HEADS.values()]))
def test_any_bytes_are_taken(noise: bytes, head: bytes) -> None:
    for data in (noise, head[: len(noise)], head[:40] + noise, noise + head[:100]):
        found = sniff(data, len(data))
        assert found is None or found.type.count("/") == 1

"""What the bytes of a file of subtitles are, and what is refused before anybody sees it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediamill import sidecars
from mediamill.failures import Code, Failure

OLD_WINDOWS = b"1\r\n00:00:01,000 --> 00:00:03,000\r\nIt\x92s a caf\xe9\r\n"
CUE = "1\n00:00:01,000 --> 00:00:03,000\n{}\n"


def test_an_old_western_file_is_read_as_what_it_is() -> None:
    for language in ("en", "und", "fr-ca"):
        found = sidecars.read(OLD_WINDOWS, language=language)
        assert "It’s a café" in found.body
        assert (found.charset, found.format, found.cues) == ("windows-1252", "srt", 1)
        assert "\r" not in found.body


@pytest.mark.parametrize(
    ("language", "words", "page"),
    [
        ("pl", "Zażółć gęślą jaźń", "windows-1250"),
        ("ru", "Съешь ещё этих булок", "windows-1251"),
        ("el", "Καλημέρα κόσμε", "windows-1253"),
        ("tr", "Iğdır’da şişe", "windows-1254"),
        ("he", "שלום עולם", "windows-1255"),
        ("ar", "مرحبا", "windows-1256"),
        ("lt", "Ąžuolas", "windows-1257"),
        ("ja", "こんにちは", "cp932"),
        ("ko", "안녕하세요", "cp949"),
        ("zh", "你好", "gb18030"),
        ("zh-tw", "你好", "big5"),
        ("de", "Größe, „Straße“ – ja…", "windows-1252"),
        ("fr", "L’œuvre créée à Noël : «ça»", "windows-1252"),
        ("es", "¿Qué? ¡Mañana, señor! 20 €", "windows-1252"),
    ],
)
def test_the_language_tells_the_old_page(language: str, words: str, page: str) -> None:
    found = sidecars.read(CUE.format(words).encode(page), language=language)
    assert words in found.body
    assert found.charset == page


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_unicode_needs_no_word_of_anybody(encoding: str) -> None:
    found = sidecars.read(CUE.format("Съешь це 你").encode(encoding), language="en")
    assert "Съешь це 你" in found.body
    assert not found.body.startswith("\ufeff")


def test_what_the_client_says_holds() -> None:
    data = CUE.format("Добрый день").encode("koi8-r")
    assert "Добрый день" in sidecars.read(data, language="und", charset="KOI8-R").body
    with pytest.raises(Failure, match="byte") as caught:
        sidecars.read(OLD_WINDOWS, language="en", charset="utf-8")
    assert caught.value.code is Code.UNKNOWN_ENCODING


@pytest.mark.parametrize("charset", ["rot13", "unicode_escape", "utf-7", "hex", "nonsense", "\0"])
def test_a_charset_that_is_no_text_encoding_is_refused(charset: str) -> None:
    with pytest.raises(Failure) as caught:
        sidecars.read(OLD_WINDOWS, language="en", charset=charset)
    assert caught.value.code is Code.UNKNOWN_ENCODING


@pytest.mark.parametrize(
    ("words", "page", "language"),
    [
        ("Съешь ещё этих мягких булок", "windows-1251", "und"),
        ("Съешь ещё этих мягких булок", "windows-1251", "en"),
        ("Καλημέρα κόσμε", "windows-1253", "und"),
        ("Zażółć gęślą jaźń", "windows-1250", "und"),
        ("Příliš žluťoučký kůň", "windows-1250", "en"),
        ("こんにちは世界", "cp932", "de"),
        ("你好，世界", "gb18030", "fr"),
        ("naïve", "cp850", "fr"),
        ("สวัสดี", "cp874", "th"),
    ],
)
def test_broken_characters_are_never_taken_for_words(words: str, page: str, language: str) -> None:
    with pytest.raises(Failure) as caught:
        sidecars.read(CUE.format(words).encode(page), language=language)
    assert caught.value.code is Code.UNKNOWN_ENCODING
    assert "UTF-8" in caught.value.problem.detail


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", Code.EMPTY_INPUT),
        (b" \r\n", Code.EMPTY_INPUT),
        (b"hello", Code.UNSUPPORTED_FORMAT),
        (b"WEBVTT\n\nno cue", Code.UNSUPPORTED_FORMAT),
        (b"1\n00:00:01,000 --> 00:00:03,000\nA\0B\n", Code.UNSUPPORTED_FORMAT),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), Code.UNKNOWN_ENCODING),
    ],
)
def test_what_is_no_text_with_cues_is_refused(data: bytes, code: Code) -> None:
    with pytest.raises(Failure) as caught:
        sidecars.read(data, language="en")
    assert caught.value.code is code


@given(st.binary(max_size=200), st.sampled_from(["en", "und", "ru", "zh", "th"]))
def test_any_bytes_are_read_or_refused(data: bytes, language: str) -> None:
    code = None
    try:
        found = sidecars.read(CUE.format("").encode() + data, language=language)
    except Failure as failure:
        code = failure.code
    else:
        found.body.encode("utf-8")
        assert "\0" not in found.body
    assert code in (None, Code.UNKNOWN_ENCODING, Code.UNSUPPORTED_FORMAT)

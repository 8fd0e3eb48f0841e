"""Subtitles that come as files of their own beside a film: SubRip or WebVTT, one for each language.

Such files are often in an old code page and do not say which. What they are is decided once, when
they come in, so that nobody sees broken characters later.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from typing import Final, Literal
from uuid import UUID

from mediamill import db
from mediamill.failures import Code, Failure

_SQL: Final = db.load("sidecars")
MAX_BYTES: Final = 2 << 20
MAX_LANGUAGES: Final = 32
LANGUAGE: Final = re.compile(r"[a-z]{2,3}(-[a-z0-9]{2,8})*")

# Languages by the Windows code page in which their subtitles were written before UTF-8.
_WESTERN: Final = "windows-1252"
_PAGES: Final[dict[str, str]] = {
    language: page
    for page, languages in (
        ("windows-1250", "pl cs sk hu sl hr bs ro sq"),
        ("windows-1251", "ru uk be bg mk sr"),
        (_WESTERN, "und en de fr es pt it nl sv da no nb nn fi is ga ca gl eu af id ms sw"),
        ("windows-1253", "el"),
        ("windows-1254", "tr az"),
        ("windows-1255", "he yi"),
        ("windows-1256", "ar fa ur"),
        ("windows-1257", "lt lv et"),
        ("cp932", "ja"),
        ("cp949", "ko"),
        ("gb18030", "zh zh-hans zh-cn"),
        ("big5", "zh-hant zh-tw zh-hk"),
    )
    for language in languages.split()
}
_KNOWN: Final = frozenset(
    codecs.lookup(name).name
    for name in (
        *("utf-8", "utf-16", "utf-16-le", "utf-16-be", "koi8-r", "koi8-u", "mac-roman", "big5"),
        *("cp932", "shift_jis", "euc-jp", "iso2022-jp", "cp949", "euc-kr", "gbk", "gb18030"),
        *(f"cp{number}" for number in (437, 850, 852, 866, 874, *range(1250, 1259))),
        *(f"iso8859-{number}" for number in (*range(1, 11), 11, 13, 14, 15, 16)),
    )
)
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_CUE: Final = re.compile(
    r"^\s*(?:\d+:)?\d{1,2}:\d{2}[.,]\d{1,3}[ \t]+-->[ \t]+(?:\d+:)?\d{1,2}:\d{2}[.,]\d{1,3}",
    re.MULTILINE,
)
# What no text of the western page has: control characters, signs that are no letters in the middle
# of a word, and many accented letters in a row. It is then a text of another page.
_NOT_WESTERN: Final = re.compile(
    r"[\x7f-\x9f\u0192\u02c6\u2021\u2030\xa4-\xa6\xac\xaf\xb6\xb8\xbc-\xbe\xd7\xf7]"
    r"|(?<=[A-Za-z\xc0-\xff])[\xa1-\xa9\xab-\xac\xae-\xb1\xb4-\xb6\xb8-\xb9\xbb-\xbf"
    r"\u201a\u201c-\u201e\u2020-\u2022\u2039\u203a\u20ac\u2122](?=[A-Za-z\xc0-\xff])"
    r"|[\xc0-\xff]{3}"
)


@dataclass(frozen=True, slots=True)
class Text:
    """Subtitles as read: `charset` is what the bytes were."""

    format: Literal["srt", "webvtt"]
    charset: str
    cues: int
    body: str


@dataclass(frozen=True, slots=True)
class Sidecar:
    """Subtitles beside a film, for its job."""

    language: str
    label: str | None
    format: str
    body: str


def read(data: bytes, *, language: str, charset: str | None = None) -> Text:
    """Subtitles from bytes. `charset` is what the client said; else a byte order mark tells, else
    UTF-8 is tried, else the old code page of the language.

    Raises Failure for what is no such text, or whose encoding is not known.
    """
    if not data.strip():
        raise Failure(Code.EMPTY_INPUT)
    text, name = _decoded(data, language, charset)
    if "\0" in text:
        raise Failure(Code.UNSUPPORTED_FORMAT, "It is no text.")
    body = text.replace("\r\n", "\n").replace("\r", "\n")
    cues = len(_CUE.findall(body))
    if not cues:
        raise Failure(Code.UNSUPPORTED_FORMAT, "It has no cue of SubRip or WebVTT.")
    return Text("webvtt" if body.startswith("WEBVTT") else "srt", name, cues, body)


def _decoded(data: bytes, language: str, charset: str | None) -> tuple[str, str]:
    for mark, name in _MARKS:
        if data.startswith(mark):
            return _strictly(data.removeprefix(mark), name), name
    if charset is not None:
        try:
            known = codecs.lookup(charset).name
        except (LookupError, ValueError):
            known = ""
        if known not in _KNOWN:
            raise Failure(Code.UNKNOWN_ENCODING, "The charset that it was sent with is not known.")
        return _strictly(data, known), charset.lower()
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        pass
    page = _PAGES.get(language) or _PAGES.get(language.partition("-")[0])
    if page is None:
        raise Failure(Code.UNKNOWN_ENCODING, f"It is not UTF-8, and {language} has no old page.")
    try:
        text = data.decode(page)
    except UnicodeDecodeError:
        raise Failure(
            Code.UNKNOWN_ENCODING, f"It is neither UTF-8 nor {page}, the old page of {language}."
        ) from None
    if page == _WESTERN and _NOT_WESTERN.search(text):
        raise Failure(
            Code.UNKNOWN_ENCODING,
            f"It is not UTF-8, and as {page}, the old page of {language}, it has broken words.",
        )
    return text, page


def _strictly(data: bytes, name: str) -> str:
    try:
        return data.decode(name)
    except UnicodeError as error:
        at = getattr(error, "start", 0)
        raise Failure(
            Code.UNKNOWN_ENCODING, f"It is not {name}: byte {at:,} does not fit."
        ) from None


async def put(
    connection: db.Connection,
    tenant_id: str,
    media_id: UUID,
    language: str,
    text: Text,
    *,
    label: str | None,
) -> db.Row | None:
    """Keep subtitles in place of those of the same language; None if the media takes none."""
    return await connection.fetchrow(
        _SQL.put,
        tenant_id,
        media_id,
        language,
        label,
        text.format,
        text.charset,
        text.cues,
        text.body,
        MAX_LANGUAGES,
    )


async def listed(connection: db.Connection, tenant_id: str, media_id: UUID) -> list[db.Row]:
    """What there is, by language, without the text."""
    return await connection.fetch(_SQL.list, tenant_id, media_id)


async def texts(connection: db.Connection, tenant_id: str, media_id: UUID) -> list[Sidecar]:
    """What a job makes renditions of, by language."""
    rows = await connection.fetch(_SQL.texts, tenant_id, media_id)
    return [Sidecar(**dict(row)) for row in rows]


async def remove(connection: db.Connection, tenant_id: str, media_id: UUID, language: str) -> bool:
    """Whether there were any."""
    return bool(await connection.fetchval(_SQL.remove, tenant_id, media_id, language))

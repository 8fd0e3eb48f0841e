"""A page for every failure code: what brings it about, what to do, whether trying again helps, and
how it looks. The API serves them where the `type` of a problem leads; the reference holds them too.
"""

from __future__ import annotations

import html
import json
from typing import Final, NamedTuple

from mediamill.failures import Code, Problem, Verdict


class Cause(NamedTuple):
    """What brings a code about, and a `detail` as it may read."""

    why: str
    detail: str


CAUSES: Final[dict[Code, Cause]] = {
    Code.UNSUPPORTED_FORMAT: Cause(
        "The first bytes are of no kind that is taken: a document, an archive, a program, or text. "
        "The name of the file and its announced type play no part. Or the recipe has no outputs "
        "for this kind of file.",
        "The file is application/pdf.",
    ),
    Code.UNSUPPORTED_CODEC: Cause(
        "The container could be read, but its picture or sound is coded in a way that the "
        "installation's ffmpeg cannot decode.",
        "The picture is coded as hap1, which cannot be decoded here.",
    ),
    Code.CORRUPT_INPUT: Cause(
        "The decoder met bytes that make no sense, and too many for the result to be trusted.",
        "No frame of the video could be decoded.",
    ),
    Code.TRUNCATED_INPUT: Cause(
        "The file says that it is longer than it is. Recordings that lost power and uploads that "
        "were cut before they came to us look like this.",
        "The file says 62.0 s, but only 31.4 s of it could be decoded.",
    ),
    Code.EMPTY_INPUT: Cause("An upload of size 0 was asked for, or was stored.", ""),
    Code.TYPE_MISMATCH: Cause(
        "The announced type is one thing and the bytes are another, and the difference is not one "
        "that can be overlooked, such as a video announced as a picture to a recipe for pictures.",
        "It was announced as image/png and is video/mp4.",
    ),
    Code.SIZE_MISMATCH: Cause(
        "The slot was opened for one size and the storage holds another.",
        "4,096 bytes were announced, 3,071 are stored.",
    ),
    Code.CHECKSUM_MISMATCH: Cause(
        "The slot named a `sha256`, and the stored bytes have another one.", ""
    ),
    Code.NO_VIDEO_STREAM: Cause(
        "The recipe makes films or posters, and the file has sound alone. A cover picture does not "
        "count.",
        "",
    ),
    Code.NO_AUDIO_STREAM: Cause("The recipe makes sound, and the file has none.", ""),
    Code.DRM_ENCRYPTED: Cause(
        "The container marks its streams as encrypted. That is found before anything is decoded.",
        "",
    ),
    Code.UNSAFE_CONTENT: Cause(
        "The file is a playlist, or a drawing that refers to files, addresses or scripts. "
        "Following such references would let a file read what its owner may not.",
        "The file is a playlist that points to other files.",
    ),
    Code.UNKNOWN_ENCODING: Cause(
        "A file of subtitles is not UTF-8, does not say what it is, and does not read as the old "
        "code page of its language either.",
        "It is neither UTF-8 nor windows-1251, the old page of ru.",
    ),
    Code.RESOURCE_LIMIT: Cause(
        "The file has more pixels, frames, seconds, streams or bytes than the settings or the "
        "recipe allow. That is found before it is decoded, so that a bomb costs nothing.",
        "pixels: at most 100,000,000 pixels, this file has 1,024,000,000.",
    ),
    Code.TIME_LIMIT: Cause(
        "A tool worked longer than is allowed for a file like this one; the limit is computed from "
        "its length and size. Or a function of your own ran into its `timeout`.",
        "It ran longer than 600 s.",
    ),
    Code.MEMORY_LIMIT: Cause(
        "A tool was stopped at its limit of memory, or could not get more.",
        "At most 2,147,483,648 bytes of memory are allowed.",
    ),
    Code.OUTPUT_LIMIT: Cause(
        "A tool wrote more bytes than an output of this kind can sensibly have.", ""
    ),
    Code.SCRATCH_FULL: Cause("The disk under the worker's data folder is full.", ""),
    Code.OUTPUT_INVALID: Cause(
        "What a tool made was looked at before it was published, and is not what was planned: "
        "another length, size, count of frames or color, or it does not decode.",
        "video.mp4: sound and picture begin 0.412 s apart, in the source 0.000 s.",
    ),
    Code.TOOL_FAILED: Cause(
        "ffmpeg, ffprobe or libvips ended with an error that no row of our table of messages "
        "knows. Its last words stand in the attempt's log.",
        "",
    ),
    Code.CAPABILITY_MISSING: Cause(
        "The build of ffmpeg or libvips on the worker lacks the decoder, encoder or filter that "
        "this needs, or the machine cannot confine its tools.",
        "This machine's ffmpeg has no encoder for AV1.",
    ),
    Code.WORKER_CRASHED: Cause(
        "Several workers died while they had this job. Deaths are counted apart from other "
        "failures, so that a file that kills its worker does not go round for ever.",
        "",
    ),
    Code.STORAGE_UNAVAILABLE: Cause(
        "The bucket or disk did not answer, or answered that it cannot just now.", ""
    ),
    Code.STORAGE_AUTH: Cause(
        "The storage knows our credentials no more, or does not allow what was asked: a changed "
        "key, a changed policy, or a clock that is off.",
        "",
    ),
    Code.DATABASE_UNAVAILABLE: Cause(
        "PostgreSQL is away: a restart, a failover, or all its connections are taken.", ""
    ),
    Code.SOURCE_MISSING: Cause(
        "`complete` was called before the file was sent, or somebody deleted the stored object.", ""
    ),
    Code.SOURCE_CHANGED: Cause(
        "The stored object has another version than the one that was accepted: somebody wrote into "
        "the bucket beside us.",
        "",
    ),
    Code.SOURCE_NOT_ALLOWED: Cause(
        "An address that a client named (a source, a webhook, a callback) is not https, is not "
        "public, has a port that is not allowed, or leads to such a one.",
        "The address 10.0.0.7 is not public.",
    ),
    Code.TARGET_UNREACHABLE: Cause(
        "An address that a client named did not answer in time, broke off, or answered with an "
        "error.",
        "It answered 404.",
    ),
    Code.CANCELED: Cause("Somebody canceled the job, or a job that it belonged to.", ""),
    Code.INTERNAL: Cause(
        "A fault of ours, or an exception from a function of your own. The log of the process has "
        "it under the request or job id.",
        "ValueError: month must be given as YYYY-MM",
    ),
    Code.MALFORMED_REQUEST: Cause(
        "The body is not JSON in UTF-8, a form is cut off, or a header cannot be parsed.",
        "The body is not JSON.",
    ),
    Code.INVALID_REQUEST: Cause(
        "A field is missing, unknown, or of a value that is not allowed.",
        "1 field(s) are not valid.",
    ),
    Code.UNKNOWN_PARAMETER: Cause(
        "A query parameter is misspelt, or a filter has a value that does not exist. Ignoring it "
        "would answer another question.",
        "Known here: limit, cursor, state, kind, recipe.",
    ),
    Code.UNAUTHENTICATED: Cause(
        "There is no `Authorization` header, or its key was never made, was revoked or has run "
        "out.",
        "",
    ),
    Code.MISSING_SCOPE: Cause(
        "The key is valid, but was made for other things.", "The key needs the scope operate."
    ),
    Code.SIGNATURE_INVALID: Cause(
        "The request differs from the one that was signed: another method, type, length or name. "
        "Proxies that add or change headers do that too.",
        "More bytes come than were signed for.",
    ),
    Code.SIGNATURE_EXPIRED: Cause(
        "The address was used after its time. Addresses to read are good for an hour, slots for a "
        "quarter of one, unless the settings say otherwise.",
        "",
    ),
    Code.NOT_FOUND: Cause(
        "The id was never given out, belongs to another tenant, or the path is misspelt.", ""
    ),
    Code.METHOD_NOT_ALLOWED: Cause("The path is right and the method is not.", ""),
    Code.WRONG_STATE: Cause(
        "What was asked for makes no sense in the state that it is in, such as replaying a job "
        "that has not failed.",
        "It is processing; only a failed job can be replayed.",
    ),
    Code.IDEMPOTENCY_KEY_INVALID: Cause("The header is empty, too long, or has spaces in it.", ""),
    Code.IDEMPOTENCY_KEY_REUSED: Cause(
        "The same key came with another body. One of the two requests has the wrong key.", ""
    ),
    Code.IDEMPOTENCY_IN_FLIGHT: Cause(
        "A client that had no answer in time repeated its request while the first one was at work.",
        "",
    ),
    Code.UPLOAD_EXPIRED: Cause(
        "No byte came, or `complete` was not called, within `upload_ttl_seconds` (in parts: "
        "`resumable_ttl_seconds`).",
        "",
    ),
    Code.GONE: Cause("It was deleted by a request or by its `ttl_seconds`.", ""),
    Code.UPLOAD_OFFSET_MISMATCH: Cause(
        "The client and the server disagree on how much has arrived, mostly after a connection was "
        "cut.",
        "It is at 8,388,608, the request begins at 4,194,304.",
    ),
    Code.UPLOAD_TAKEN_OVER: Cause(
        "A client came back while its first request still seemed to be at work; the newer one "
        "wins.",
        "",
    ),
    Code.UPLOAD_IS_FINAL: Cause("Bytes were sent to an upload that joins others.", ""),
    Code.CHUNK_CORRUPTED: Cause(
        "The request carried `Upload-Checksum`, and its bytes have another one.", ""
    ),
    Code.PART_MISMATCH: Cause(
        "`complete` names a part that is not stored, or under another ETag.",
        "1 part(s) do not fit.",
    ),
    Code.LENGTH_REQUIRED: Cause(
        "The file was sent without a length, as `Transfer-Encoding: chunked` does.", ""
    ),
    Code.ALREADY_WRITTEN: Cause(
        "A second PUT to the same address, mostly a repeat after a lost answer: then the file is "
        "there, and `complete` will say so.",
        "",
    ),
    Code.PRECONDITION_FAILED: Cause(
        "It was changed since the ETag in `If-Match` was given out.", ""
    ),
    Code.PRECONDITION_REQUIRED: Cause("A PATCH or DELETE came without `If-Match`.", ""),
    Code.PAYLOAD_TOO_LARGE: Cause(
        "A body is larger than this way in takes, or a file is larger than its kind may be.",
        "A form takes files of up to 104,857,600 bytes; open a slot for larger ones.",
    ),
    Code.UNSUPPORTED_MEDIA_TYPE: Cause(
        "`Content-Type` is missing or names another type.", "Send application/json."
    ),
    Code.RANGE_NOT_SATISFIABLE: Cause("`Range` begins beyond the end of the file.", ""),
    Code.TOO_MANY_STREAMS: Cause(
        "The tenant has as many event streams open as one process allows it.",
        "At most 5000 streams of a tenant are open at a time.",
    ),
    Code.TOO_BUSY: Cause(
        "A process has as many streams open as it can keep, is just stopping, or two requests met "
        "at the same place.",
        "",
    ),
}

_VERDICTS: Final[dict[Verdict, str]] = {
    Verdict.TRANSIENT: "Yes. A job is tried again by itself, after growing pauses; a request may "
    "be repeated as it is, after the seconds in `Retry-After` if there are any.",
    Verdict.RESOURCE: "Once. A job is tried one more time by itself, since the machine may have "
    "been at fault; then it stays failed.",
    Verdict.CRASH: "Up to a limit. A job is tried again by itself until so many workers have died "
    "on it (`max_crashes`); then it is a dead letter, which can be replayed.",
    Verdict.HELD: "By itself. The job waits until an operator has mended what is at fault, and no "
    "attempt of it is counted.",
    Verdict.PERMANENT: "No. The same request or file will fail in the same way; change it first.",
}


def markdown(code: Code) -> str:
    """The page of a code."""
    cause = CAUSES[code]
    shown = json.dumps(example(code), indent=2, ensure_ascii=False)
    return f"""# {code.code}

{code.title}

| HTTP status | verdict |
|---|---|
| {code.status} | `{code.verdict}` |

## Cause

{cause.why}

## What to do

{code.advice}

## Does trying again help?

{_VERDICTS[code.verdict]}

## How it looks

```json
{shown}
```

It stands like this in the `error` of a media or job, in events and dead letters; a refused request
is answered with the same fields and those of [RFC 9457](https://www.rfc-editor.org/rfc/rfc9457).
"""


def page(code: Code) -> str:
    """The same for a browser, complete in itself."""
    cause, shown = CAUSES[code], json.dumps(example(code), indent=2, ensure_ascii=False)
    parts = (
        ("Cause", cause.why),
        ("What to do", code.advice),
        ("Does trying again help?", _VERDICTS[code.verdict]),
    )
    body = "".join(f"<h2>{title}</h2><p>{_text(text)}</p>" for title, text in parts)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" '
        f'content="light dark"><title>{code.code}</title>'
        "<style>body{max-width:40rem;margin:2rem auto;padding:0 1rem;font:1rem/1.5 system-ui}"
        "pre{overflow:auto}</style>"
        f"<h1>{code.code}</h1><p>{_text(code.title)}</p>"
        f"<p>HTTP status {code.status}, verdict <code>{code.verdict}</code></p>{body}"
        f"<h2>How it looks</h2><pre>{html.escape(shown, quote=False)}</pre></html>\n"
    )


def example(code: Code) -> dict[str, object]:
    """A problem with this code, as the API shows it."""
    return Problem(code, CAUSES[code].detail).as_dict()


def _text(text: str) -> str:
    """Prose as HTML: what stands between backticks is code."""
    pieces = html.escape(text, quote=False).split("`")
    return "".join(f"<code>{p}</code>" if n % 2 else p for n, p in enumerate(pieces))

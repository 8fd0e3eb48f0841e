"""Every way a request or a job can fail: one row per public code.

A code is never renamed and never reused. The same object reaches the client by HTTP (RFC 9457), by
polling, in events and in the dead-letter list, so a reader learns one vocabulary.

    Exception
    ├── Failure      work could not be done; carries a code of this table
    ├── Refused      a request cannot be honoured; carries a code of this table
    └── LeaseLost    this worker no longer holds the job; it stops and writes nothing
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Final


class Verdict(StrEnum):
    """What the engine does about a failed attempt."""

    TRANSIENT = "transient"
    """Something around the work failed; try again after a growing delay."""
    RESOURCE = "resource"
    """The attempt ran out of time, memory or disk; one more attempt, then final."""
    CRASH = "crash"
    """The worker died on it; counted apart, three deaths are final."""
    HELD = "held"
    """An operator has to mend something; the job waits until then, and nothing is counted."""
    PERMANENT = "permanent"
    """The input or the request is at fault; the same attempt would fail the same way."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `title` and `advice` are read by people who own the file."""

    verdict: Verdict
    status: int
    title: str
    advice: str


_T, _R, _C, _H, _P = (
    Verdict.TRANSIENT,
    Verdict.RESOURCE,
    Verdict.CRASH,
    Verdict.HELD,
    Verdict.PERMANENT,
)


class Code(Enum):
    """The public failure codes. `Code.X.value` is its row, `Code.X.code` its stable name."""

    # The file.
    UNSUPPORTED_FORMAT = Row(
        _P,
        422,
        "This file type is not supported.",
        "Send a JPEG, PNG, GIF, WebP, AVIF, HEIC, TIFF or BMP image, or a video in MP4, MOV, WebM, "
        "Matroska, AVI, MPEG-TS or a similar container.",
    )
    UNSUPPORTED_CODEC = Row(
        _P,
        422,
        "The container is known, but what is inside it cannot be decoded.",
        "Export the file again with a common codec such as H.264, HEVC, VP9 or AV1.",
    )
    CORRUPT_INPUT = Row(
        _P,
        422,
        "The file is damaged.",
        "Open the original on the device that made it and export it again.",
    )
    TRUNCATED_INPUT = Row(
        _P,
        422,
        "The end of the file is missing.",
        "The upload or the recording was cut off. Send the complete file again.",
    )
    EMPTY_INPUT = Row(
        _P, 422, "The file has no bytes.", "Check that the file was saved, then send it again."
    )
    TYPE_MISMATCH = Row(
        _P,
        422,
        "The announced type and the bytes differ in a way that is not allowed.",
        "Announce the type that the file really has.",
    )
    SIZE_MISMATCH = Row(
        _P,
        409,
        "The stored size differs from the announced one.",
        "Upload the file again in full, or open a new upload with the right size.",
    )
    CHECKSUM_MISMATCH = Row(
        _P,
        409,
        "The stored bytes do not have the announced checksum.",
        "The file changed on its way. Upload it again.",
    )
    NO_VIDEO_STREAM = Row(
        _P,
        422,
        "The file holds no moving picture.",
        "Send it with a recipe for sound, or send a file that has a video track.",
    )
    NO_AUDIO_STREAM = Row(
        _P, 422, "The file holds no sound.", "Send a file that has an audio track."
    )
    DRM_ENCRYPTED = Row(
        _P,
        422,
        "The file is encrypted (DRM).",
        "Send a copy without copy protection; Mediamill has no keys and asks for none.",
    )
    UNSAFE_CONTENT = Row(
        _P,
        422,
        "The file refers to other files or addresses, or carries script.",
        "Export it as a plain picture or a self-contained video.",
    )
    UNKNOWN_ENCODING = Row(
        _P,
        422,
        "The encoding of the text is not known.",
        "Save it as UTF-8, or say in Content-Type what it is, such as charset=windows-1251.",
    )
    RESOURCE_LIMIT = Row(
        _P,
        422,
        "The file needs more than this service allows.",
        "The detail says what was allowed and what was seen. Send a smaller version, or ask the "
        "operator to raise the limit.",
    )

    # The attempt.
    TIME_LIMIT = Row(
        _R,
        422,
        "A step ran past its hard time limit.",
        "The file is unusually costly to decode. Send a simpler version; an operator can raise "
        "MEDIAMILL_TIME_LIMIT_FACTOR.",
    )
    MEMORY_LIMIT = Row(
        _R,
        422,
        "A step needed more memory than it is allowed.",
        "Send a smaller version; an operator can raise MEDIAMILL_TOOL_MEMORY_BYTES.",
    )
    OUTPUT_LIMIT = Row(
        _R,
        422,
        "A step wrote more than it is allowed.",
        "The file expands beyond all expectation. Send a simpler version.",
    )
    SCRATCH_FULL = Row(
        _R,
        503,
        "The worker ran out of disk for its scratch files.",
        "Nothing is wrong with the file. An operator should free or add disk under "
        "MEDIAMILL_DATA_DIR.",
    )
    OUTPUT_INVALID = Row(
        _R,
        500,
        "An output did not pass its check and was not published.",
        "Nothing was published. If it repeats, report it with the job id.",
    )
    TOOL_FAILED = Row(
        _P,
        422,
        "The media tool gave up on the file for a reason we do not know yet.",
        "Look at the attempt's log. If other players open the file, report it with the job id.",
    )
    CAPABILITY_MISSING = Row(
        _P,
        422,
        "No tool on this installation can make or read this.",
        "Run `mediamill doctor` on the worker: it lists what its ffmpeg and libvips can do.",
    )
    WORKER_CRASHED = Row(
        _C,
        500,
        "The worker died while it had this job, up to the limit.",
        "The file may crash a decoder. Look at the attempts; replay it after an update.",
    )
    STORAGE_UNAVAILABLE = Row(
        _T,
        503,
        "Storage did not answer in time.",
        "Nothing to do: it is tried again by itself.",
    )
    STORAGE_AUTH = Row(
        _H,
        503,
        "Storage refused this installation's credentials.",
        "Nothing is wrong with the file, and it goes on by itself once they are accepted. An "
        "operator should look at the keys, the bucket's policy and the clock: `mediamill storage "
        "doctor` says what is refused.",
    )
    DATABASE_UNAVAILABLE = Row(
        _T,
        503,
        "The database did not answer in time.",
        "Try again in a moment.",
    )
    SOURCE_MISSING = Row(
        _P,
        409,
        "The uploaded object is not there.",
        "Upload the file first (PUT to the address in `upload`), then complete.",
    )
    SOURCE_CHANGED = Row(
        _P,
        409,
        "The uploaded object changed after it was accepted.",
        "Upload the file under a new id; an accepted original never changes.",
    )
    SOURCE_NOT_ALLOWED = Row(
        _P,
        422,
        "The address is not one that this service may call.",
        "Use a public https address, or ask the operator to allow the network.",
    )
    TARGET_UNREACHABLE = Row(
        _T,
        502,
        "The address did not answer as it should.",
        "The detail says what went wrong. Check that its server is up and open to this service.",
    )
    CANCELED = Row(_P, 409, "The job was canceled.", "Process the media again, if needed.")
    INTERNAL = Row(
        _T,
        500,
        "Something unexpected happened on our side.",
        "It is tried again by itself. If it stays, report it with the request or job id.",
    )

    # The request.
    MALFORMED_REQUEST = Row(
        _P, 400, "The request cannot be read.", "Send well-formed JSON in UTF-8."
    )
    INVALID_REQUEST = Row(
        _P, 422, "The request is well formed but not valid.", "`errors` names each field."
    )
    UNKNOWN_PARAMETER = Row(
        _P, 400, "A query parameter is not known here.", "`errors` names it; check its spelling."
    )
    UNAUTHENTICATED = Row(
        _P,
        401,
        "The API key is missing or not valid.",
        "Send `Authorization: Bearer mpk_…`; make a key with `mediamill keys create`.",
    )
    MISSING_SCOPE = Row(
        _P, 403, "This API key may not do that.", "Use a key that has the scope named in `detail`."
    )
    SIGNATURE_INVALID = Row(
        _P,
        403,
        "The signed address does not fit this request.",
        "Send exactly the method, headers and length that were signed.",
    )
    SIGNATURE_EXPIRED = Row(
        _P, 403, "The signed address has expired.", "Ask for a new one: GET the media again."
    )
    NOT_FOUND = Row(
        _P, 404, "There is nothing under this address.", "Check the id and the API key's tenant."
    )
    METHOD_NOT_ALLOWED = Row(
        _P, 405, "This address does not take that method.", "See `Allow` in the answer."
    )
    WRONG_STATE = Row(
        _P,
        409,
        "The state it is in does not allow that.",
        "GET it to see its state; `detail` says which states would do.",
    )
    IDEMPOTENCY_KEY_INVALID = Row(
        _P,
        400,
        "The Idempotency-Key is not valid.",
        "Send 1 to 255 visible ASCII characters.",
    )
    IDEMPOTENCY_KEY_REUSED = Row(
        _P,
        422,
        "This Idempotency-Key was used with another request.",
        "Use a new key for a new request, or repeat the first one unchanged.",
    )
    IDEMPOTENCY_IN_FLIGHT = Row(
        _T,
        409,
        "The first request with this Idempotency-Key is still being handled.",
        "Repeat it in a second.",
    )
    UPLOAD_EXPIRED = Row(
        _P, 410, "The upload was not completed in time.", "Open a new upload: POST /v1/media."
    )
    GONE = Row(_P, 410, "It was deleted.", "Only its tombstone is kept; upload the file again.")
    UPLOAD_OFFSET_MISMATCH = Row(
        _P,
        409,
        "The upload does not continue at this offset.",
        "Ask for its offset (HEAD), then send the bytes from there.",
    )
    UPLOAD_TAKEN_OVER = Row(
        _T,
        409,
        "Another request has taken this upload over.",
        "Ask for its offset (HEAD), then send the bytes from there.",
    )
    UPLOAD_IS_FINAL = Row(
        _P,
        403,
        "A final upload is made of others and takes no bytes of its own.",
        "Send the bytes to partial uploads, then join them.",
    )
    CHUNK_CORRUPTED = Row(
        _T,
        460,
        "The bytes of this request do not have the announced checksum.",
        "Nothing of them was kept. Send them again from the same offset.",
    )
    PART_MISMATCH = Row(
        _P,
        409,
        "A part is missing, or is not the one that was stored.",
        "`errors` names the parts. Send them again, then complete; the upload stays open.",
    )
    LENGTH_REQUIRED = Row(
        _P, 411, "The upload needs a Content-Length.", "Send the file with its exact length."
    )
    ALREADY_WRITTEN = Row(
        _P,
        412,
        "This upload address was used already.",
        "An address takes one file. Complete the upload, or open a new one.",
    )
    PRECONDITION_FAILED = Row(
        _P, 412, "A precondition of the request does not hold.", "GET it again, then repeat."
    )
    PRECONDITION_REQUIRED = Row(
        _P,
        428,
        "A change here needs If-Match.",
        "GET it first, and send its ETag as If-Match, so that nobody's change is lost.",
    )
    PAYLOAD_TOO_LARGE = Row(
        _P,
        413,
        "The file is too large for this way in.",
        "Open an upload slot (POST /v1/media as JSON) for files above the limit in `detail`.",
    )
    UNSUPPORTED_MEDIA_TYPE = Row(
        _P,
        415,
        "The body is not of a type that this address takes.",
        "The detail names the types that are taken.",
    )
    RANGE_NOT_SATISFIABLE = Row(
        _P, 416, "The file has no such range.", "`Content-Range` names the length."
    )
    TOO_MANY_STREAMS = Row(
        _T,
        429,
        "Too many event streams of this tenant are open.",
        "Close those that nobody listens to, or watch all in one stream of /v1/events.",
    )
    TOO_BUSY = Row(
        _T,
        503,
        "The service cannot take this right now.",
        "Try again after the seconds in `Retry-After`.",
    )

    @property
    def code(self) -> str:
        """The stable public name, in snake_case."""
        return self.name.lower()

    @property
    def verdict(self) -> Verdict:
        return self.value.verdict

    @property
    def retryable(self) -> bool:
        """Whether the same thing may succeed later without a change by the client."""
        return self.value.verdict is not Verdict.PERMANENT

    @property
    def status(self) -> int:
        return self.value.status

    @property
    def title(self) -> str:
        return self.value.title

    @property
    def advice(self) -> str:
        return self.value.advice


BY_NAME: Final[dict[str, Code]] = {code.code: code for code in Code}


@dataclass(frozen=True, slots=True)
class Problem:
    """One failure as it is stored and shown. `limit` is {"name", "allowed", "seen", "unit"}."""

    code: Code
    detail: str = ""
    limit: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "code": self.code.code,
            "title": self.code.title,
            "detail": self.detail or self.code.title,
            "advice": self.code.advice,
            "retryable": self.code.retryable,
        }
        if self.limit is not None:
            shown["limit"] = self.limit
        return shown


class _Coded(Exception):
    def __init__(
        self, code: Code, detail: str = "", *, limit: dict[str, Any] | None = None
    ) -> None:
        super().__init__(f"{code.code}: {detail or code.title}")
        self.problem = Problem(code, detail, limit)

    @property
    def code(self) -> Code:
        return self.problem.code


class Failure(_Coded):
    """An attempt could not do its work. `detail` is read by the owner of the file: no paths."""


class Refused(_Coded):
    """A request cannot be honoured. `errors` lists the fields at fault, `headers` go out with
    it."""

    def __init__(
        self,
        code: Code,
        detail: str = "",
        *,
        limit: dict[str, Any] | None = None,
        errors: list[dict[str, str]] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(code, detail, limit=limit)
        self.errors = errors or []
        self.headers = headers or {}


class LeaseLost(Exception):
    """This worker no longer holds the job: its tools are stopped and nothing is written."""


def limit_exceeded(
    name: str, *, allowed: float, seen: float, unit: str, advice: str = ""
) -> Failure:
    """A `resource_limit` failure that says what was allowed, what was seen, and what would help."""
    detail = f"{name}: at most {allowed:,.10g} {unit}, this file has {seen:,.10g}. {advice}".strip()
    return Failure(
        Code.RESOURCE_LIMIT,
        detail,
        limit={"name": name, "allowed": allowed, "seen": seen, "unit": unit},
    )

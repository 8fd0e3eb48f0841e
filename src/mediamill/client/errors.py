"""What can go wrong for a caller.

Error
├── ConnectionFailed      no answer came; the same call may work later
├── Problem               the API refused: `status`, `code`, `detail`, `advice`, `retryable`
│   ├── InvalidRequest        a field or parameter is wrong: `errors` names each
│   ├── Unauthenticated       no key, or one that is not valid
│   ├── Forbidden             the key may not do that
│   │   └── AddressExpired        a signed address is too old
│   ├── NotFound
│   ├── Gone                  deleted, or its upload ran out of time
│   ├── Conflict              the state, a precondition or an earlier request is against it
│   ├── TooLarge
│   ├── RateLimited
│   └── Unavailable           the service cannot take it right now
├── WorkFailed            a media or job ended without a result: `code`, `retryable`, `subject`
├── WaitTimeout           it is still at work (a TimeoutError too)
├── DownloadDamaged       the bytes differ from the manifest
└── SignatureMismatch     a webhook was not signed by this secret
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Body = dict[str, Any]


class Error(Exception):
    """Anything that this client raises."""


class ConnectionFailed(Error):
    """No answer came."""


class Problem(Error):
    """The API refused a request; `body` is its problem document (RFC 9457)."""

    def __init__(self, status: int, body: Body, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{body.get('code', status)}: {body.get('detail', '')}")
        self.status = status
        self.body = body
        self.code: str = body.get("code", "")
        self.detail: str = body.get("detail", "")
        self.advice: str = body.get("advice", "")
        self.retryable: bool = body.get("retryable", status in (408, 429) or status >= 500)
        self.request_id: str | None = body.get("request_id")
        self.errors: list[Body] = body.get("errors", [])
        self.retry_after_seconds = seconds((headers or {}).get("retry-after"))


class InvalidRequest(Problem): ...


class Unauthenticated(Problem): ...


class Forbidden(Problem): ...


class AddressExpired(Forbidden): ...


class NotFound(Problem): ...


class Gone(Problem): ...


class Conflict(Problem): ...


class TooLarge(Problem): ...


class RateLimited(Problem): ...


class Unavailable(Problem): ...


class WorkFailed(Error):
    """A media or job ended without a result; `subject` is what the API shows of it."""

    def __init__(self, subject: Any) -> None:
        error: Body = subject.error or {}
        self.subject = subject
        self.code: str = error.get("code", subject.state)
        self.detail: str = error.get("detail", "")
        self.advice: str = error.get("advice", "")
        self.retryable: bool = error.get("retryable", False)
        super().__init__(f"{subject.id} {subject.state}: {self.code} {self.detail}".rstrip())


class WaitTimeout(Error, TimeoutError):
    """The wait is over and the work is not; it goes on."""


class DownloadDamaged(Error):
    """The bytes that came are not those of the manifest; nothing was kept."""


class SignatureMismatch(Error):
    """A webhook's signature or time does not hold: do not act on it."""


_BY_CODE: Final[dict[str, type[Problem]]] = {
    "signature_expired": AddressExpired,
    "idempotency_key_reused": Conflict,
    "source_missing": Conflict,
    "too_busy": Unavailable,
}
_BY_STATUS: Final[dict[int, type[Problem]]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    408: Unavailable,
    409: Conflict,
    410: Gone,
    412: Conflict,
    413: TooLarge,
    428: Conflict,
    429: RateLimited,
}


def problem(status: int, body: Body, headers: Mapping[str, str] | None = None) -> Problem:
    """The error for a refused request, by its code and else its status."""
    kind = _BY_CODE.get(body.get("code", "")) or _BY_STATUS.get(status)
    if kind is None:
        kind = Unavailable if status >= 500 else InvalidRequest
    return kind(status, body, headers)


def seconds(text: str | None) -> float | None:
    """A Retry-After in seconds; None for a date or nothing."""
    return float(text) if text and text.isascii() and text.isdigit() else None

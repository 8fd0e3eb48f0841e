"""The client of the HTTP API, blocking and for asyncio: what the command line uses too.

It needs an HTTP library and Pydantic, and nothing else of this package.
"""

from mediamill.client.awaited import AsyncClient
from mediamill.client.blocking import Client
from mediamill.client.errors import (
    AddressExpired,
    Conflict,
    ConnectionFailed,
    DownloadDamaged,
    Error,
    Forbidden,
    Gone,
    InvalidRequest,
    NotFound,
    Problem,
    RateLimited,
    SignatureMismatch,
    TooLarge,
    Unauthenticated,
    Unavailable,
    WaitTimeout,
    WorkFailed,
)
from mediamill.client.models import (
    Delivery,
    Endpoint,
    Event,
    Job,
    Media,
    MediaItem,
    Progress,
    Queue,
    Recipe,
    Slot,
    Timeline,
    Variant,
    Worker,
)
from mediamill.client.unwrap import unwrap

__all__ = [
    "AddressExpired",
    "AsyncClient",
    "Client",
    "Conflict",
    "ConnectionFailed",
    "Delivery",
    "DownloadDamaged",
    "Endpoint",
    "Error",
    "Event",
    "Forbidden",
    "Gone",
    "InvalidRequest",
    "Job",
    "Media",
    "MediaItem",
    "NotFound",
    "Problem",
    "Progress",
    "Queue",
    "RateLimited",
    "Recipe",
    "SignatureMismatch",
    "Slot",
    "Timeline",
    "TooLarge",
    "Unauthenticated",
    "Unavailable",
    "Variant",
    "WaitTimeout",
    "WorkFailed",
    "Worker",
    "unwrap",
]

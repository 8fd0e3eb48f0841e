"""Every setting in one frozen object; nothing else in the package reads the environment.

`config.default.toml` lists each setting with its default and what it means.
"""

from __future__ import annotations

import base64
import os
import re
import tomllib
from functools import cache
from importlib import resources
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

QUEUES: Final = ("image", "video", "audio", "default", "webhook", "maintenance")
"""The closed set of queues; a slot of one never serves another."""


_NEEDED: Final = {
    "local": (),
    "s3": ("s3_bucket",),
    "gcs": ("gcs_bucket",),
    "azure": ("azure_container", "azure_account", "azure_account_key"),
}
"""What each storage cannot do without."""


class ConfigError(Exception):
    """The configuration cannot be used; the message names the setting and what it takes."""


class ImageLimits(BaseModel):
    """Limits of one image that a recipe or a tenant may set. They only lower the operator's."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_bytes: int | None = Field(default=None, ge=1, description="Size of the file.")
    max_pixels: int | None = Field(default=None, ge=1, description="Pixels of one frame.")
    max_side: int | None = Field(default=None, ge=1, description="Pixels of the longer side.")
    max_frames: int | None = Field(default=None, ge=1)
    max_total_pixels: int | None = Field(
        default=None, ge=1, description="Pixels of all frames together."
    )
    max_interlaced_pixels: int | None = Field(
        default=None, ge=1, description="Pixels of a progressive or interlaced picture."
    )
    max_seconds: float | None = Field(
        default=None, gt=0, description="Time for one step: the preview, or all outputs together."
    )
    max_memory_bytes: int | None = Field(
        default=None, ge=64 << 20, description="Memory of the process that decodes."
    )

    def lowered(self, *others: ImageLimits | None) -> ImageLimits:
        """The lowest of each limit."""
        both: dict[str, Any] = self.model_dump()
        for other in filter(None, others):
            for name, value in other.model_dump(exclude_none=True).items():
                both[name] = value if both[name] is None else min(both[name], value)
        return ImageLimits(**both)


class EventToken(BaseModel):
    """What a token of Google's must say when a push subscription brings events."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    audience: str = Field(min_length=1)
    service_account: str = Field(min_length=1)


class Settings(BaseSettings):
    """The effective settings of one process."""

    model_config = SettingsConfigDict(
        env_prefix="MEDIAMILL_", frozen=True, extra="forbid", validate_default=False
    )

    data_dir: Path = Field()
    database_url: str | None = None
    postgres_bin_dir: Path | None = None
    host: str = Field()
    port: int = Field(ge=0, le=65535)
    public_url: str | None = None
    storage: Literal["local", "s3", "gcs", "azure"] = Field()
    s3_bucket: str | None = None
    s3_region: str = Field()
    s3_endpoint: str | None = None
    s3_public_endpoint: str | None = None
    s3_virtual_host: bool = Field()
    s3_access_key_id: str | None = None
    s3_secret_access_key: str | None = None
    gcs_bucket: str | None = None
    gcs_credentials_file: Path | None = None
    gcs_endpoint: str | None = None
    gcs_public_endpoint: str | None = None
    azure_container: str | None = None
    azure_account: str | None = None
    azure_account_key: str | None = None
    azure_endpoint: str | None = None
    azure_public_endpoint: str | None = None
    storage_event_secrets: dict[str, str] | None = None
    secrets_key: str | None = None
    storage_event_topics: dict[str, str] | None = None
    storage_event_tokens: dict[str, EventToken] | None = None
    sqs_queue_url: str | None = Field(default=None, pattern="^https?://[^/]+/.")
    pubsub_subscription: str | None = Field(
        default=None, pattern="^projects/[^/]+/subscriptions/[^/]+$"
    )
    pubsub_endpoint: str = Field(pattern="^https?://[^/]+")
    database_pool_size: int = Field(ge=2, le=200)
    slots: str | None = None
    drain_seconds: float = Field(ge=0)
    lease_seconds: float = Field(gt=0)
    beat_seconds: float = Field(gt=0)
    self_stop_seconds: float = Field(gt=0)
    sweep_seconds: float = Field(gt=0)
    max_attempts: int = Field(ge=1, le=100)
    max_crashes: int = Field(ge=1, le=100)
    upload_ttl_seconds: int = Field(ge=10, le=3600 * 24 * 7)
    resumable_ttl_seconds: int = Field(ge=60, le=3600 * 24 * 7)
    draft_resumable_uploads: bool = Field()
    read_url_ttl_seconds: int = Field(ge=10, le=3600 * 24 * 7)
    max_image_bytes: int = Field(ge=1)
    max_video_bytes: int = Field(ge=1)
    max_audio_bytes: int = Field(ge=1)
    max_form_bytes: int = Field(ge=1)
    max_pixels: int = Field(ge=1)
    max_side: int = Field(ge=1)
    max_frames: int = Field(ge=1)
    max_total_pixels: int = Field(ge=1)
    max_interlaced_pixels: int = Field(ge=1)
    tenant_limits: dict[str, ImageLimits] | None = None
    recipes_dir: Path | None = None
    allow_svg: bool = Field()
    max_duration_seconds: float = Field(gt=0)
    max_streams: int = Field(ge=1)
    max_frame_rate: float = Field(gt=0)
    image_memory_bytes: int = Field(ge=64 << 20)
    tool_memory_bytes: int = Field(ge=64 << 20)
    time_limit_factor: float = Field(gt=0)
    ffmpeg: str | None = None
    ffprobe: str | None = None
    packager: str | None = None
    piece_threshold_seconds: float = Field(gt=0)
    piece_seconds: float = Field(ge=2)
    sandbox: Literal["strong", "limits"] = Field()
    egress_allow_http: bool = Field()
    egress_ports: list[int] = Field()
    egress_allow_networks: list[str] = Field()
    egress_deny_networks: list[str] = Field()
    webhook_schedule_seconds: list[float] = Field()
    webhook_timeout_seconds: float = Field(gt=0, le=60)
    webhook_breaker_failures: int = Field(ge=1)
    webhook_breaker_seconds: float = Field(gt=0)
    webhook_disable_seconds: float = Field(gt=0)
    max_endpoints: int = Field(ge=1)
    max_event_streams: int = Field(ge=1)
    max_event_streams_per_tenant: int = Field(ge=1)
    max_waiters: int = Field(ge=0)
    inbox: bool = Field()
    dashboard_sign_in: bool = Field()
    media_ttl_seconds: int | None = Field(default=None, ge=1)
    job_retention_seconds: int = Field(ge=1)
    superseded_set_seconds: int = Field(ge=1)
    idempotency_seconds: int = Field(ge=60)
    log_level: Literal["debug", "info", "warning", "error"] = Field()

    @field_validator("data_dir", "recipes_dir", "gcs_credentials_file")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return value and value.expanduser().absolute()

    @field_validator(
        "public_url",
        "s3_endpoint",
        "s3_public_endpoint",
        "gcs_endpoint",
        "gcs_public_endpoint",
        "azure_endpoint",
        "azure_public_endpoint",
        "pubsub_endpoint",
    )
    @classmethod
    def _no_trailing_slash(cls, value: str | None) -> str | None:
        return value.rstrip("/") if value else value

    @field_validator("webhook_schedule_seconds")
    @classmethod
    def _pauses(cls, value: list[float]) -> list[float]:
        if not all(0 <= seconds <= 7 * 86400 for seconds in value):
            raise ValueError("a pause is 0 to 604800 seconds")
        return value

    @field_validator("secrets_key")
    @classmethod
    def _keys(cls, value: str | None) -> str | None:
        if value is not None:
            parse_secrets_keys(value)
        return value

    @field_validator("egress_ports")
    @classmethod
    def _ports(cls, value: list[int]) -> list[int]:
        if not all(1 <= port <= 65535 for port in value):
            raise ValueError("a port is a number from 1 to 65535")
        return value

    @field_validator("egress_allow_networks", "egress_deny_networks")
    @classmethod
    def _networks(cls, value: list[str]) -> list[str]:
        return [str(ip_network(text)) for text in value]

    @model_validator(mode="after")
    def _lease_order(self) -> Settings:
        if not self.beat_seconds < self.self_stop_seconds < self.lease_seconds:
            raise ValueError("beat_seconds < self_stop_seconds < lease_seconds must hold")
        if self.superseded_set_seconds < self.read_url_ttl_seconds:
            raise ValueError("superseded_set_seconds must not be below read_url_ttl_seconds")
        parse_slots(self.slots)
        return self

    @model_validator(mode="after")
    def _whole_storage(self) -> Settings:
        for name in _NEEDED[self.storage]:
            if not getattr(self, name):
                raise ValueError(f"storage = {self.storage} needs {name}")
        for name, secret in (self.storage_event_secrets or {}).items():
            if not re.fullmatch("[a-z0-9-]{1,63}", name) or len(secret) < 16:
                raise ValueError(
                    "storage_event_secrets: a name has letters, digits and dashes, a secret at "
                    "least 16 characters"
                )
        checked = {*(self.storage_event_topics or ()), *(self.storage_event_tokens or ())}
        if strangers := sorted(checked - set(self.storage_event_secrets or ())):
            raise ValueError(f"storage_event_secrets has no secret for {', '.join(strangers)}")
        if (self.s3_access_key_id is None) != (self.s3_secret_access_key is None):
            raise ValueError("s3_access_key_id and s3_secret_access_key go together")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (
            init_settings,
            env_settings,
            InitSettingsSource(settings_cls, _operator_file()),
            InitSettingsSource(settings_cls, dict(defaults())),
        )

    @property
    def base_url(self) -> str:
        """The address that clients use, without a trailing slash."""
        return self.public_url or f"http://{self.host}:{self.port}"

    @property
    def bucket(self) -> str | None:
        """The bucket or container that objects live in; None on a local disk."""
        match self.storage:
            case "s3":
                return self.s3_bucket
            case "gcs":
                return self.gcs_bucket
            case "azure":
                return self.azure_container
            case _:
                return None

    @property
    def objects_dir(self) -> Path:
        return self.data_dir / "objects"

    @property
    def key_file(self) -> Path:
        """The key that `mediamill up` made, for whoever may read it."""
        return self.data_dir / "api-key"

    @property
    def secrets_key_file(self) -> Path:
        """What `mediamill up` seals webhook secrets with."""
        return self.data_dir / "secrets.key"

    @property
    def scratch_dir(self) -> Path:
        return self.data_dir / "scratch"

    @property
    def logs_dir(self) -> Path:
        return self.data_dir / "logs"

    def max_bytes(self, kind: str) -> int:
        """The largest file taken for this kind of media."""
        match kind:
            case "image":
                return self.max_image_bytes
            case "audio":
                return self.max_audio_bytes
            case _:
                return self.max_video_bytes

    def image_limits(self, tenant_id: str, recipe: ImageLimits | None = None) -> ImageLimits:
        """What holds for an image of this tenant under a recipe: the lowest of each limit."""
        own = ImageLimits(
            max_bytes=self.max_image_bytes,
            max_pixels=self.max_pixels,
            max_side=self.max_side,
            max_frames=self.max_frames,
            max_total_pixels=self.max_total_pixels,
            max_interlaced_pixels=self.max_interlaced_pixels,
        )
        return own.lowered((self.tenant_limits or {}).get(tenant_id), recipe)


def load(**flags: Any) -> Settings:
    """Read and check the settings. Flags that are None count as not given.

    Raises ConfigError, which names every setting at fault.
    """
    _refuse_unknown_variables()
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings(**given)
    except SettingsError as error:
        raise ConfigError(f"{error}; it takes JSON") from None
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors()
        ]
        raise ConfigError("; ".join(lines)) from None


def origins() -> dict[str, str]:
    """Where each setting comes from: its variable, the operator's file, or the defaults."""
    file = _operator_file()
    names = {name: f"MEDIAMILL_{name.upper()}" for name in Settings.model_fields}
    return {
        name: variable
        if variable in os.environ
        else os.environ["MEDIAMILL_CONFIG"]
        if name in file
        else "default"
        for name, variable in names.items()
    }


SECRETS_KEY_BYTES: Final = 32


def parse_secrets_keys(text: str) -> list[bytes]:
    """Keys of 32 bytes in base64, with commas between them. Raises ValueError."""
    keys = []
    for part in text.split(","):
        try:
            key = base64.b64decode(part.strip(), validate=True)
        except ValueError:
            key = b""
        if len(key) != SECRETS_KEY_BYTES:
            raise ValueError("secrets_key: a key is 32 bytes in base64 (openssl rand -base64 32)")
        keys.append(key)
    return keys


def shown(settings: Settings) -> dict[str, Any]:
    """The settings by name, as JSON, for people: secrets and passwords read `***`."""
    return {
        name: _masked(name, value)
        for name, value in sorted(settings.model_dump(mode="json").items())
    }


def _masked(name: str, value: Any) -> Any:
    if value is None:
        return None
    if any(word in name for word in ("secret", "password", "token", "account_key")):
        return "***"
    if isinstance(value, str) and name.endswith(("url", "endpoint")):
        value = re.sub(r"(?<=://)([^:/@\s]*):\S*@", r"\1:***@", value)
        return re.sub(r"(?i)(password=)[^&\s]*", r"\1***", value)
    return value


def parse_slots(text: str | None) -> dict[str, int]:
    """`image=4,video=1` as a mapping; None gives the defaults for this machine.

    Raises ValueError for an unknown queue or a number below 0.
    """
    if text is None:
        return {
            "image": os.cpu_count() or 1,
            "video": 1,
            "audio": 1,
            "default": 1,
            "webhook": 8,
            "maintenance": 1,
        }
    slots: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        queue, _, number = part.partition("=")
        if queue not in QUEUES:
            raise ValueError(f"slots: {queue!r} is no queue; the queues are {', '.join(QUEUES)}")
        if not number.isdigit():
            raise ValueError(f"slots: {part!r} should read {queue}=NUMBER")
        slots[queue] = int(number)
    return {queue: number for queue, number in slots.items() if number > 0}


@cache
def defaults() -> dict[str, Any]:
    """The shipped defaults, by setting."""
    text = resources.files("mediamill").joinpath("config.default.toml").read_text("utf-8")
    return tomllib.loads(text)


def _operator_file() -> dict[str, Any]:
    path = os.environ.get("MEDIAMILL_CONFIG")
    if not path:
        return {}
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"MEDIAMILL_CONFIG: cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"MEDIAMILL_CONFIG: {path} is not valid TOML: {error}") from None


# Variables with our prefix that are not settings.
_OTHER_VARIABLES: Final = frozenset(
    {
        "MEDIAMILL_API_KEY",
        "MEDIAMILL_CONFIG",
        "MEDIAMILL_FAILPOINT",
        "MEDIAMILL_TEST_DATABASE_URL",
        "MEDIAMILL_URL",
    }
)


def _refuse_unknown_variables() -> None:
    """A misspelt variable is an error, with the nearest name, and not silently ignored."""
    from difflib import get_close_matches

    known = {f"MEDIAMILL_{name.upper()}" for name in Settings.model_fields} | _OTHER_VARIABLES
    for name in os.environ:
        if name.startswith("MEDIAMILL_") and name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{name} is not a setting{hint}")

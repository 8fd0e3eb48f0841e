"""Logs and metrics: one JSON line per event, and the fixed metric names of the documentation."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final, TextIO

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily

_SECRETS: Final = re.compile(
    r"(mpk_\w+?_\w{4})\w+|((?:signature|sig|token|password)=)[^&\s\"']+|(whsec_)\S+"
    r"|(//[^:/@\s]+:)[^@\s/]+(?=@)",
    re.IGNORECASE,
)
_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


def configure_logs(service: str, *, level: str, stream: TextIO | None = None) -> None:
    """Send every log line of this process, ours and the libraries', to `stream` as JSON."""
    target = stream or sys.stderr
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        lambda _logger, _name, event: {"service": service, **event},
    ]
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            *shared,
            structlog.processors.format_exc_info,
            redact,
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=target),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                redact,
                structlog.processors.JSONRenderer(ensure_ascii=False),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(number, logging.WARNING))


def open_log(folder: Path, service: str) -> TextIO:
    """The log file of a service, appended to; a large one is moved aside first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{service}.log"
    if path.exists() and path.stat().st_size > 32 << 20:
        path.replace(path.with_suffix(".log.1"))
    return path.open("a", buffering=1, encoding="utf-8")


def redact(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Keys, signatures and passwords never reach a log line."""
    return {k: _clean(v) if isinstance(v, str) else v for k, v in event.items()}


def _clean(text: str) -> str:
    return _SECRETS.sub(lambda m: next(filter(None, m.groups()), "") + "[redacted]", text)


class Metrics:
    """The API process's metrics. Label sets are closed: no tenant, id or address is ever a
    label."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Histogram(
            "http_server_request_duration_seconds",
            "Time to answer.",
            ["route", "method", "status"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.queue_jobs = Gauge(
            "media_queue_jobs",
            "Jobs by queue and state.",
            ["queue", "state"],
            registry=self.registry,
        )
        self.oldest = Gauge(
            "media_queue_oldest_age_seconds",
            "Age of the oldest due job.",
            ["queue"],
            registry=self.registry,
        )
        self.paused = Gauge(
            "media_queue_paused",
            "1 for a queue that an operator paused, else 0.",
            ["queue"],
            registry=self.registry,
        )
        self.slots = Gauge(
            "media_worker_slots", "Slots of live workers.", ["queue"], registry=self.registry
        )
        self.dead_letters = Gauge("media_dlq_jobs", "Dead letters.", registry=self.registry)
        self.dead_letter_age = Gauge(
            "media_dlq_oldest_age_seconds", "Age of the oldest one.", registry=self.registry
        )
        self.webhook_pending = Gauge(
            "media_webhook_pending", "Deliveries that are not done.", registry=self.registry
        )
        self.webhook_oldest = Gauge(
            "media_webhook_oldest_pending_seconds",
            "Age of the oldest one.",
            registry=self.registry,
        )
        self.webhook_endpoints = Gauge(
            "media_webhook_endpoints", "Endpoints by state.", ["state"], registry=self.registry
        )
        self.streams = Gauge(
            "media_sse_streams", "Open event streams and waiting requests.", registry=self.registry
        )
        self.estimates_held = Gauge(
            "media_estimate_p90_held_ratio",
            "Share of jobs of the last day that were done within p90 of their first forecast.",
            ["kind"],
            registry=self.registry,
        )
        self.estimate_error = Gauge(
            "media_estimate_median_error_ratio",
            "Median error of p50 of the first forecast, relative to what came.",
            ["kind"],
            registry=self.registry,
        )
        self.accepted = Counter(
            "media_uploads_total",
            "Uploads by way and outcome.",
            ["method", "outcome"],
            registry=self.registry,
        )
        self.storage_events = Counter(
            "media_storage_events_total",
            "Events of buckets by sender and what came of them.",
            ["provider", "outcome"],
            registry=self.registry,
        )
        self.pulled = Tally(
            "media_pulled_events_total",
            "Events that waited in a queue, by queue and what came of them.",
            ("queue", "outcome"),
        )
        self.swept = Tally(
            "media_swept_total",
            "Leftovers by what they were and how removing them went.",
            ("what", "outcome"),
        )
        for tally in (self.pulled, self.swept):
            self.registry.register(tally)


class Tally:
    """A counter of the whole installation: it shows what was read from the database last."""

    def __init__(self, name: str, documentation: str, labels: tuple[str, str]) -> None:
        # Named as the library names its own, for those who list them all.
        self._name, self._documentation = name.removesuffix("_total"), documentation
        self._labelnames = labels
        self.counted: Mapping[tuple[str, str], int] = {}

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Its name, without figures; the registry asks once."""
        yield CounterMetricFamily(self._name, self._documentation, labels=self._labelnames)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Its figures, as the registry wants them."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for labels, count in self.counted.items():
            family.add_metric(labels, count)
        yield family

"""What the environment asks of OpenTelemetry. Importing this is free; the SDK, about 30 MiB, is loaded only when asked for.

The variables are OpenTelemetry's own. Those not read here (headers, certificates, compression) its exporters read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from api.ports import Unavailable
from exporters.families import About

if TYPE_CHECKING:
    from exporters.otlp import OtelSink

PREFIX = "OTEL_EXPORTER_OTLP_"
TIMEOUT_MS, METRICS_EVERY_MS, SPANS_EVERY_MS = 5_000, 60_000, 5_000
MIN_MS, MAX_MS = 100, 86_400_000


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Where to send, and how often; an endpoint that is None means that this signal is not sent."""

    metrics_to: str | None
    traces_to: str | None
    metrics_every_s: float
    spans_every_s: float
    metrics_timeout_s: float
    traces_timeout_s: float
    service: str


def start(environ: Mapping[str, str], about: Callable[[], About] = About) -> OtelSink | None:
    """The sink that the environment asks for, running; None where it names no endpoint. Raises Unavailable with a remedy."""
    settings = read(environ)
    if settings is None:
        return None
    from exporters.otlp import OtelSink  # noqa: PLC0415 - most agents never need it

    return OtelSink(settings, about)


def read(environ: Mapping[str, str]) -> Settings | None:
    """None where no endpoint is named or OTEL_SDK_DISABLED is true. Raises Unavailable that names a wrong variable."""
    everything_to = environ.get(f"{PREFIX}ENDPOINT")
    metrics_to = environ.get(f"{PREFIX}METRICS_ENDPOINT") or everything_to or None
    traces_to = environ.get(f"{PREFIX}TRACES_ENDPOINT") or everything_to or None
    if not (metrics_to or traces_to) or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    protocol = environ.get(f"{PREFIX}PROTOCOL") or "grpc"
    if protocol != "grpc":
        raise Unavailable(f"{PREFIX}PROTOCOL is {protocol!r}, and only grpc is spoken", "set it to grpc")
    timeout_ms = _milliseconds(environ, f"{PREFIX}TIMEOUT", TIMEOUT_MS)
    return Settings(
        metrics_to=metrics_to,
        traces_to=traces_to,
        metrics_every_s=_milliseconds(environ, "OTEL_METRIC_EXPORT_INTERVAL", METRICS_EVERY_MS) / 1000,
        spans_every_s=_milliseconds(environ, "OTEL_BSP_SCHEDULE_DELAY", SPANS_EVERY_MS) / 1000,
        metrics_timeout_s=_milliseconds(environ, f"{PREFIX}METRICS_TIMEOUT", timeout_ms) / 1000,
        traces_timeout_s=_milliseconds(environ, f"{PREFIX}TRACES_TIMEOUT", timeout_ms) / 1000,
        service=environ.get("OTEL_SERVICE_NAME") or "dioptase",
    )


def _milliseconds(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit() and MIN_MS <= int(text) <= MAX_MS):
        raise Unavailable(f"{name} is {text!r}", f"write milliseconds, from {MIN_MS} to {MAX_MS}")
    return int(text)

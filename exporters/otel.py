"""What the environment asks of OpenTelemetry. Importing this is free; the SDK, about 30 MiB, is loaded only when asked for.

The variables are OpenTelemetry's own, each also in its form for one signal (`OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`). Those
not read here (headers, TLS certificates and keys) the exporters of its SDK read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from api import VERSION
from api.ports import Seen, Unavailable
from exporters.families import About
from exporters.otel_settings import GRPC, HTTP, Settings, Signal
from exporters.resource import detect

if TYPE_CHECKING:
    from exporters.otlp import OtelSink

PREFIX = "OTEL_EXPORTER_OTLP_"
TIMEOUT_MS, METRICS_EVERY_MS, SPANS_EVERY_MS = 5_000, 60_000, 5_000
MIN_MS, MAX_MS = 100, 86_400_000
COMPRESSIONS = ("none", "gzip")
EXPORTERS = ("otlp", "none")
FIXED = (
    (f"{PREFIX}METRICS_TEMPORALITY_PREFERENCE", "cumulative"),
    (f"{PREFIX}METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "explicit_bucket_histogram"),
)
"""What has one way here: the counts are the kernel's and the probes', and are sent as these keep them."""
FILES = ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")


def start(environ: Mapping[str, str], about: Callable[[], About] = About) -> OtelSink | None:
    """The sink that the environment asks for, running; None where it names no endpoint. Raises Unavailable with a remedy."""
    settings = read(environ)
    if settings is None:
        return None
    try:
        from exporters.otlp import OtelSink  # noqa: PLC0415 - most agents never need it

        return OtelSink(settings, about)
    except Unavailable:
        raise
    except ImportError as error:
        raise Unavailable(f"OpenTelemetry is asked for and not installed: {error}", "install dioptase anew") from error
    except Exception as error:
        # The SDK reads variables of its own, some when it is imported, and raises what it likes.
        raise Unavailable(f"OpenTelemetry cannot start: {error}", "correct that variable, or unset it") from error


class Refused:
    """In the place of the sink, where the environment asks for one that cannot be: a source that says why, every round."""

    name, form = "opentelemetry", "off"
    lost_events = None

    def __init__(self, why: Unavailable) -> None:
        self._why = why

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:  # noqa: ARG002 - as every source is asked
        raise Unavailable(self._why.reason, self._why.remedy)

    def problem(self) -> Unavailable | None:
        """What `read` does not say already: nothing."""
        return None

    def close(self) -> None:
        """There is nothing to close."""


def read(environ: Mapping[str, str]) -> Settings | None:
    """None where no endpoint is named or OTEL_SDK_DISABLED is true. Raises Unavailable that names a wrong variable."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    metrics = _signal(environ, "METRICS", ("OTEL_METRIC_EXPORT_INTERVAL", METRICS_EVERY_MS))
    for variable, only in FIXED if metrics is not None else ():
        _one_of(environ, (variable,), (only,))
    traces = _signal(environ, "TRACES", ("OTEL_BSP_SCHEDULE_DELAY", SPANS_EVERY_MS))
    if metrics is None and traces is None:
        return None
    return Settings(metrics=metrics, traces=traces, resource=detect(environ, VERSION))


def _signal(environ: Mapping[str, str], name: str, every: tuple[str, int]) -> Signal | None:
    own, common = environ.get(f"{PREFIX}{name}_ENDPOINT"), environ.get(f"{PREFIX}ENDPOINT")
    endpoint = own or common
    exporter = _one_of(environ, (f"OTEL_{name}_EXPORTER",), EXPORTERS)
    if not endpoint or exporter == "none":
        return None
    protocol = _one_of(environ, (f"{PREFIX}{name}_PROTOCOL", f"{PREFIX}PROTOCOL"), (GRPC, HTTP))
    if protocol == HTTP:
        if not endpoint.startswith(("http://", "https://")):
            variable = f"{PREFIX}{name}_ENDPOINT" if own else f"{PREFIX}ENDPOINT"
            raise Unavailable(f"{variable} is {endpoint!r}", "write it as in http://collector:4318")
        if not own:
            endpoint = f"{endpoint.rstrip('/')}/v1/{name.lower()}"
    for kind in FILES:
        for variable in (f"{PREFIX}{name}_{kind}", f"{PREFIX}{kind}"):
            path = environ.get(variable)
            if path and not os.access(Path(path), os.R_OK):
                raise Unavailable(f"{variable} names {path!r}, which cannot be read", "correct the path, or unset it")
    common_ms = _milliseconds(environ, f"{PREFIX}TIMEOUT", TIMEOUT_MS)
    return Signal(
        endpoint=endpoint,
        protocol=protocol,
        compression=_one_of(environ, (f"{PREFIX}{name}_COMPRESSION", f"{PREFIX}COMPRESSION"), COMPRESSIONS),
        every_s=_milliseconds(environ, *every) / 1000,
        timeout_s=_milliseconds(environ, f"{PREFIX}{name}_TIMEOUT", common_ms) / 1000,
        certificate=bool(environ.get(f"{PREFIX}{name}_CERTIFICATE") or environ.get(f"{PREFIX}CERTIFICATE")),
    )


def _one_of(environ: Mapping[str, str], variables: tuple[str, ...], known: tuple[str, ...]) -> str:
    """What the first variable that is set says. The first of the known values is the default."""
    for variable in variables:
        value = environ.get(variable, "").strip().lower()
        if value and value not in known:
            raise Unavailable(f"{variable} is {value!r}", f"set it to {' or '.join(known)}")
        if value:
            return value
    return known[0]


def _milliseconds(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit() and MIN_MS <= int(text) <= MAX_MS):
        raise Unavailable(f"{name} is {text!r}", f"write milliseconds, from {MIN_MS} to {MAX_MS}")
    return int(text)

"""Starts the OpenTelemetry sink if the environment names an endpoint; importing it does not load the SDK.
The SDK costs about 30 MiB, so it is imported inside `start_otel`. Raises Unavailable with a remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from api.interfaces import Unavailable
from exporters.otel.environment import read_otlp_settings
from exporters.prometheus.families import AgentInfo

if TYPE_CHECKING:
    from exporters.otel.sink import OtelSink


def start_otel(environ: Mapping[str, str], about: Callable[[], AgentInfo] = AgentInfo) -> OtelSink | None:
    """Start the sink; return None if the environment names no endpoint. Raises Unavailable with a remedy."""
    settings = read_otlp_settings(environ)
    if settings is None:
        return None
    try:
        from exporters.otel.sink import OtelSink  # noqa: PLC0415 - most agents never need it

        return OtelSink(settings, about)
    except Unavailable:
        raise
    except ImportError as error:
        raise Unavailable(f"OpenTelemetry is configured and not installed: {error}", "reinstall dioptase") from error
    except Exception as error:
        # The SDK reads variables of its own, some at import, and raises any exception.
        raise Unavailable(f"OpenTelemetry cannot start: {error}", "correct that variable, or unset it") from error


class OtelUnavailable:
    """Replaces a sink that cannot start: a HealthReporter of the reason."""

    name, form = "opentelemetry", "off"
    lost_events = None

    def __init__(self, reason: Unavailable) -> None:
        self._reason = reason

    def problem(self) -> Unavailable | None:
        """Return why the sink could not start."""
        return self._reason

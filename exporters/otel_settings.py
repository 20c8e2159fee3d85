"""What otel.py reads from the environment and otlp.py sends by."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

GRPC, HTTP = "grpc", "http/protobuf"


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """How one kind of data is sent."""

    endpoint: str
    """For HTTP with the path."""
    protocol: str
    compression: str
    every_s: float
    timeout_s: float
    """For one export, retries included."""
    certificate: bool = False
    """Whether a file with the authorities to trust is named."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Where to send, and how often; a signal that is None is not sent."""

    metrics: Signal | None
    traces: Signal | None
    resource: Mapping[str, str] = {}

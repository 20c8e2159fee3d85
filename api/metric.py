"""What a metric is: a row of the catalogues."""

from __future__ import annotations

import msgspec


class Metric(msgspec.Struct, frozen=True):
    """One row. `name` is complete, unit and `_total` included; `kind` is counter, gauge or histogram.

    `since` says when a counter or histogram was zero: at `boot` where the kernel counts, when the `agent` started where
    the agent or its probes do. Gauges do not look at it.
    """

    name: str
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    since: str = "agent"

    @property
    def otel_name(self) -> str:
        """OpenTelemetry spells names with dots and keeps unit and `_total` out of them."""
        stem = self.name.removesuffix("_total").removesuffix(f"_{self.unit}")
        return stem.replace("_", ".")

"""Base class of components that take no measurements and only report their health."""

from __future__ import annotations

from collections.abc import Mapping

from api.interfaces import ProbeReading


class HealthReporter:
    """Implements the measuring half of api.interfaces.Probe with nothing; subclasses add `name`, `form` and `problem`."""

    @property
    def lost_events(self) -> int | None:
        """Number of events lost since the start; None, because none can be lost."""
        return None

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - Probe's signature
        """Return an empty reading."""
        return ProbeReading()

    def close(self) -> None:
        """Release nothing: tasks end by cancellation, and their owner closes the connections."""

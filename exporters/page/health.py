"""Answers `/healthz` and `/readyz`: whether cycles finish at all, and whether the agent does its work in them.
Raises a refusal with status 503 and a remedy. The bodies are also decoded by the CLI. Must not import aiohttp.
"""

from __future__ import annotations

import time

import msgspec

from api.decision import Cycle
from api.snapshot import ORIGINALS
from api.units import NS_PER_S
from common.http.request_guard import HttpRefused


class FailedSource(msgspec.Struct, frozen=True):
    """A source that failed in the latest cycle."""

    source: str
    error: str
    remedy: str


class HealthStatus(msgspec.Struct, frozen=True):
    """Body of a successful `/healthz` or `/readyz`."""

    age_s: float
    failed: tuple[FailedSource, ...]
    startup_warnings: tuple[str, ...] = msgspec.field(name="banner")


STALE_S = 5.0
"""Age from which on the latest cycle is too old, in seconds. If three intervals are longer, the agent uses these instead."""
REQUIRED_SOURCES = ("pods", "topology", "node", "cgroups", "advisor", "actuator", ORIGINALS)
"""Sources without which the agent cannot do its work (agent/sensors/snapshot.py, agent/loop.py). Other sources only add to
it."""


class CycleHealth:
    """Times of the latest finished and the latest published cycle."""

    def __init__(self, stale_s: float) -> None:
        self._stale_s = stale_s
        self._cycle_at_ns: int | None = None
        self._published_at_ns: int | None = None
        self._failed: tuple[FailedSource, ...] = ()
        self._startup_warnings: tuple[str, ...] = ()

    def record_cycle(self, finished: Cycle) -> None:
        """Record a finished cycle."""
        self._cycle_at_ns, self._startup_warnings = time.monotonic_ns(), finished.startup_warnings
        self._failed = tuple(FailedSource(s.name, s.error, s.remedy) for s in finished.snapshot.sources if not s.ok)

    def record_published(self) -> None:
        """Record that the latest cycle was published."""
        self._published_at_ns = self._cycle_at_ns

    def liveness(self) -> HealthStatus:
        """Return the health of the process: cycles finish, whatever failed in them. Raises HttpRefused if none do.

        A failed source is no reason to restart the process, which would lose what the policies have learned.
        """
        return HealthStatus(self._age_s(self._cycle_at_ns), self._failed, self._startup_warnings)

    def readiness(self) -> HealthStatus:
        """Return whether the agent measures, decides, acts and publishes. Raises HttpRefused with every reason against it."""
        age_s = self._age_s(self._published_at_ns)
        if missing := [source for source in self._failed if source.source in REQUIRED_SOURCES]:
            error = "; ".join(f"{source.source}: {source.error}" for source in missing)
            raise HttpRefused(503, error, "; ".join(dict.fromkeys(source.remedy for source in missing)))
        return HealthStatus(age_s, self._failed, self._startup_warnings)

    def _age_s(self, at_ns: int | None) -> float:
        if at_ns is None:
            raise HttpRefused(
                503, "no cycle has finished yet", "wait a second; if this persists, check the agent's log"
            )
        age_s = (time.monotonic_ns() - at_ns) / NS_PER_S
        if age_s >= self._stale_s:
            raise HttpRefused(
                503, f"the latest cycle finished {age_s:.1f} s ago", "check the agent's log; restart the agent"
            )
        return round(age_s, 3)

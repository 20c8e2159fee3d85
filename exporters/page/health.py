"""Answers `/healthz` and `/readyz`: whether cycles come at all, and whether the agent does its work in them.
Raises a refusal with status 503 and a remedy. The bodies are also decoded by the CLI. Must not import aiohttp.
"""

from __future__ import annotations

import time

import msgspec

from api.decision import Cycle
from api.metrics import NS_PER_S
from common.http.request_guard import HttpRefused


class FailedSource(msgspec.Struct, frozen=True):
    """A source that gave nothing in the latest round."""

    source: str
    error: str
    remedy: str


class HealthStatus(msgspec.Struct, frozen=True):
    """Body of `/healthz` and `/readyz` while all is well."""

    age_s: float
    failed: tuple[FailedSource, ...]
    startup_warnings: tuple[str, ...] = msgspec.field(name="banner")


STALE_S = 5.0
"""Of rounds a second apart; an older one means that the agent has stopped seeing."""
REQUIRED_SOURCES = ("pods", "topology", "node", "cgroups", "advisor", "actuator")
"""Sources without which the agent does not do its work: it does not see who is here, or changed nothing in the latest round
(agent/sensors/snapshot.py, agent/loop.py). Without any other it does less."""


class CycleHealth:
    """The rounds as they come: each is told with `turned`, and once it could be shown with `shown`."""

    def __init__(self, stale_s: float) -> None:
        self._stale_s = stale_s
        self._turned_at_ns: int | None = None
        self._shown_at_ns: int | None = None
        self._failed: tuple[FailedSource, ...] = ()
        self._banner: tuple[str, ...] = ()

    def turned(self, finished: Cycle) -> None:
        """A round is over."""
        self._turned_at_ns, self._banner = time.monotonic_ns(), finished.startup_warnings
        self._failed = tuple(FailedSource(s.name, s.error, s.remedy) for s in finished.snapshot.sources if not s.ok)

    def shown(self) -> None:
        """And whoever asks is told of it."""
        self._shown_at_ns = self._turned_at_ns

    def alive(self) -> HealthStatus:
        """Rounds come, whatever failed in them: a new process would fare no better there, and had to learn anew. Raises
        Refused where none do."""
        return HealthStatus(self._age_s(self._turned_at_ns), self._failed, self._banner)

    def ready(self) -> HealthStatus:
        """The agent sees its node and its pods, decides, acts, and shows that. Raises Refused with all that keeps it from
        that."""
        age_s = self._age_s(self._shown_at_ns)
        if ails := [one for one in self._failed if one.source in REQUIRED_SOURCES]:
            error = "; ".join(f"{one.source}: {one.error}" for one in ails)
            raise HttpRefused(503, error, "; ".join(dict.fromkeys(one.remedy for one in ails)))
        return HealthStatus(age_s, self._failed, self._banner)

    def _age_s(self, at_ns: int | None) -> float:
        if at_ns is None:
            raise HttpRefused(503, "no round has finished yet", "wait a second; if it stays, look at the agent's log")
        age_s = (time.monotonic_ns() - at_ns) / NS_PER_S
        if age_s >= self._stale_s:
            raise HttpRefused(503, f"the last round is {age_s:.1f} s old", "look at the agent's log; restart the agent")
        return round(age_s, 3)

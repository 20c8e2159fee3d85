"""What `/healthz` and `/readyz` answer: whether rounds come at all, and whether the agent does its work in them."""

from __future__ import annotations

import time

from api.catalogue import NS_PER_S
from api.decisions import Round
from exporters.health import Failed, Health
from exporters.problems import Refused

STALE_S = 5.0
"""Of rounds a second apart; an older one means that the agent has stopped seeing."""
NEEDED = ("pods", "topology", "node", "cgroups", "advisor", "actuator")
"""Sources without which the agent does not do its work: it does not see who is here, or changed nothing in the latest round
(agent/sense/sensor.py, agent/loop.py). Without any other it does less."""


class Pulse:
    """The rounds as they come: each is told with `turned`, and once it could be shown with `shown`."""

    def __init__(self, stale_s: float) -> None:
        self._stale_s = stale_s
        self._turned_at_ns: int | None = None
        self._shown_at_ns: int | None = None
        self._failed: tuple[Failed, ...] = ()
        self._banner: tuple[str, ...] = ()

    def turned(self, finished: Round) -> None:
        """A round is over."""
        self._turned_at_ns, self._banner = time.monotonic_ns(), finished.banner
        self._failed = tuple(Failed(s.name, s.error, s.remedy) for s in finished.snapshot.sources if not s.ok)

    def shown(self) -> None:
        """And whoever asks is told of it."""
        self._shown_at_ns = self._turned_at_ns

    def alive(self) -> Health:
        """Rounds come, whatever failed in them: a new process would fare no better there, and had to learn anew. Raises
        Refused where none do."""
        return Health(self._age_s(self._turned_at_ns), self._failed, self._banner)

    def ready(self) -> Health:
        """The agent sees its node and its pods, decides, acts, and shows that. Raises Refused with all that keeps it from
        that."""
        age_s = self._age_s(self._shown_at_ns)
        if ails := [one for one in self._failed if one.source in NEEDED]:
            error = "; ".join(f"{one.source}: {one.error}" for one in ails)
            raise Refused(503, error, "; ".join(dict.fromkeys(one.remedy for one in ails)))
        return Health(age_s, self._failed, self._banner)

    def _age_s(self, at_ns: int | None) -> float:
        if at_ns is None:
            raise Refused(503, "no round has finished yet", "wait a second; if it stays, look at the agent's log")
        age_s = (time.monotonic_ns() - at_ns) / NS_PER_S
        if age_s >= self._stale_s:
            raise Refused(503, f"the last round is {age_s:.1f} s old", "look at the agent's log; restart the agent")
        return round(age_s, 3)

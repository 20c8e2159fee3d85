"""Which knobs the kernel has for each cgroup: asked now and then, for they come and go with controllers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from agent.qrm.knobs import KnobFiles
from agent.qrm.table import LACKS, ONCE_FILES, TABLE
from api.knobs import Knob

ASK_EVERY = 60
"""Rounds after which every cgroup is asked again,"""
ASK_LACKING_EVERY = 5
"""and those that lack a knob which others have."""


class Offered:
    """What was found when it was last asked."""

    def __init__(self, files: KnobFiles) -> None:
        self._files = files
        self._asked = 0
        self._known: dict[str, frozenset[Knob]] = {}

    def of(self, cgroups: Collection[str]) -> Mapping[str, frozenset[Knob]]:
        """The knobs of each of these cgroups."""
        self._asked += 1
        known = {} if self._asked % ASK_EVERY == 0 else self._known
        most = max(map(len, known.values()), default=0)
        again = self._asked % ASK_LACKING_EVERY == 0
        self._known = {
            cgroup: known[cgroup]
            if cgroup in known and (len(known[cgroup]) == most or not again)
            else self._available(cgroup)
            for cgroup in cgroups
        }
        return self._known

    def _available(self, cgroup: str) -> frozenset[Knob]:
        possible = (knob for knob in (*TABLE, *ONCE_FILES) if (knob, self._files.version) not in LACKS)
        return frozenset(knob for knob in possible if self._files.available(knob, cgroup))

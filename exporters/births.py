"""Since when the counters of each cgroup count: OpenTelemetry sends that with every number. Pure.

A cgroup that is made again under its path begins at zero, and by a start time that did not change it would look as if its
counters had run backwards. Its id is another one then, and the kernel gives none twice.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from api.samples import Snapshot

MOST_REMEMBERED = 4096
"""Cgroups, those that are gone included: one that no round shows for a while has not been made anew."""


class Births(msgspec.Struct, frozen=True, kw_only=True):
    """What all rounds so far say about it."""

    known: Mapping[int, int | None] = {}
    """By id: the instant of the last round that did not have it yet, when all its counters were zero (nanoseconds of
    CLOCK_REALTIME); None if the first round had it."""
    looked_at_ns: int | None = None

    def after(self, snapshot: Snapshot) -> Births:
        """The same with one more round; the old value stays as it is for whoever is rendering it."""
        if not snapshot.cgroups:
            return self
        here = [sample.id for sample in snapshot.cgroups.values()]
        known = self.known
        if new := [each for each in here if each not in known]:
            if len(known) + len(new) > MOST_REMEMBERED:
                known = {each: known[each] for each in here if each in known}
            known = {**known, **dict.fromkeys(new, self.looked_at_ns)}
        return Births(known=known, looked_at_ns=snapshot.wall_time_ns)

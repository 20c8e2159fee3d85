"""Decides from which scrape on a counter has a series, so that a profile can leave out those that have counted nothing.
A counter that is zero in one scrape and appears with 5 in the next looks to Prometheus as if it had always been 5: `rate()`
and `increase()` miss these 5. So a series that begins late is zero for START_S, in which every scraper sees it once, and
has its value from then on. It stays as long as its cgroup.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from api.units import NS_PER_S
from exporters.prometheus.metric_family import Labels

START_S = 60
"""Time for which a late series is zero: the default scrape interval of Prometheus, longer than the chart's."""
LateSeriesKey = tuple[str, Labels]
"""Name of the metric, and the labels after those of the cgroup."""


class SeriesPhase(Enum):
    """What a series of a late metric shows."""

    ABSENT = "absent"
    ZERO = "zero"
    VALUE = "value"


class LateSeries:
    """The series of late metrics that have started, by id of the cgroup. Not thread-safe: one renderer owns it."""

    def __init__(self) -> None:
        self._first_ns: dict[int, int] = {}
        self._starts_ns: dict[int, dict[LateSeriesKey, int]] = {}

    def keep_only(self, cgroup_ids: Collection[int], now_ns: int) -> None:
        """Register the cgroups of a scrape and forget those that are gone."""
        first = self._first_ns
        self._first_ns = {number: first.get(number, now_ns) for number in cgroup_ids}
        self._starts_ns = {number: starts for number, starts in self._starts_ns.items() if number in self._first_ns}

    def phase(self, cgroup_id: int, key: LateSeriesKey, now_ns: int, *, counted: bool) -> SeriesPhase:
        """Return what the series shows in the scrape at `now_ns`; `counted` says whether it is not zero."""
        starts = self._starts_ns.get(cgroup_id)
        start_ns = None if starts is None else starts.get(key)
        if start_ns is None:
            if not counted:
                return SeriesPhase.ABSENT
            # A cgroup that is new to the exporter has values that no earlier scrape could show: its counters appear as
            # those of every new container do. That includes all cgroups after a restart of the agent, where a zero
            # would look like a reset of the counter.
            is_new = now_ns - self._first_ns.get(cgroup_id, now_ns) < START_S * NS_PER_S
            start_ns = now_ns if is_new else now_ns + START_S * NS_PER_S
            self._starts_ns.setdefault(cgroup_id, {})[key] = start_ns
        return SeriesPhase.VALUE if now_ns >= start_ns else SeriesPhase.ZERO

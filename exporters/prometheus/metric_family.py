"""Defines metric families, points, histograms and exemplars, independent of any exposition format. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

from api.metrics import AGENT_METRICS_BY_NAME, RUNQ_LATENCY_BOUNDS_S, Metric
from api.snapshot import Durations
from api.text import encodable
from api.units import NS_PER_S

MetricNumber = int | float
Labels = tuple[str, ...]


class Exemplar(NamedTuple):
    """Labels of the trace of one observation."""

    labels: tuple[tuple[str, str], ...]
    value: MetricNumber
    at_ns: int
    """Time of the observation, CLOCK_REALTIME."""


class MetricPoint(NamedTuple):
    """One number of a counter or gauge. Its label values, in the order of the metric's names, are `owner` and then `own`.

    `owner` has the values that many points share (`CGROUP_LABELS`), so that their text is formatted once.
    """

    owner: Labels
    own: Labels
    value: MetricNumber
    exemplar: Exemplar | None = None

    @property
    def labels(self) -> Labels:
        return self.owner + self.own


class MetricDistribution(NamedTuple):
    """One histogram: cumulative counts, one per inclusive upper bound and a last one for everything."""

    owner: Labels
    own: Labels
    bounds_s: tuple[float, ...]
    cumulative: tuple[int, ...]
    sum_s: float
    exemplars: Mapping[int, Exemplar] = {}
    """Exemplars by index in `cumulative`."""

    @property
    def labels(self) -> Labels:
        return self.owner + self.own


class MetricFamily(NamedTuple):
    """One metric of the catalogue with its points or distributions, by its kind."""

    metric: Metric
    points: tuple[MetricPoint, ...] = ()
    distributions: tuple[MetricDistribution, ...] = ()


def point_family(name: str, samples: Iterable[tuple[Labels, MetricNumber | None]]) -> MetricFamily:
    """Return a family without cgroup labels; a value of None gets no point."""
    shown = (MetricPoint((), tuple(map(encodable, own)), value) for own, value in samples if value is not None)
    return MetricFamily(AGENT_METRICS_BY_NAME[name], points=tuple(shown))


def ns_to_seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / NS_PER_S


class BucketLayout:
    """The buckets of a histogram: upper bounds in seconds, and their slots."""

    def __init__(self, slots: tuple[int, ...]) -> None:
        self.slots = slots
        self.bounds_s = tuple(RUNQ_LATENCY_BOUNDS_S[slot] for slot in slots)

    def bucket_of(self, slot: int) -> int:
        """Return the index of the first bucket that includes a slot."""
        return bisect_left(self.slots, slot)


def slot_distribution(
    owner: Labels,
    own: Labels,
    durations: Durations,
    layout: BucketLayout,
    exemplars: Mapping[int, Exemplar] | None = None,
) -> MetricDistribution:
    """Return a histogram with the buckets of `layout`; `exemplars` by slot.

    Its count is the sum of the slots, because the kernel's count is read at another time.
    """
    sum_s = durations.sum_ns / NS_PER_S
    if durations.slots is None:
        return MetricDistribution(owner, own, (), (durations.count,), sum_s)
    counts = tuple(accumulate(durations.slots))
    cumulative = (*(counts[slot] for slot in layout.slots), counts[-1])
    by_bucket = {layout.bucket_of(slot): exemplar for slot, exemplar in exemplars.items()} if exemplars else {}
    return MetricDistribution(owner, own, layout.bounds_s, cumulative, sum_s, by_bucket)


def zero_distribution(shown: MetricDistribution) -> MetricDistribution:
    """Return the same histogram without observations."""
    return shown._replace(cumulative=(0,) * len(shown.cumulative), sum_s=0.0, exemplars={})

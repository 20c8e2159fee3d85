"""Compares the run-queue latency of intervals with and without a quota, and tests whether the difference exceeds the noise.
Pure. The compared number is the excess of an interval: how far its worst cycle was above the target. Waits of one interval
depend on each other, because a burst delays many tasks at once. So the interval is the unit of observation, and the noise is
the variance between intervals, but at least that of the histogram's resolution (docs/adr/0010-quota-trials.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import msgspec

from api.histogram import quantile_ns
from api.units import NS_PER_S

_RESOLUTION_VARIANCE = 1 / 12
"""Variance of a value that is anywhere within a slot of the histogram, which spans a factor of 2."""
_T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""One-sided 95 % quantiles of Student's t distribution with 1 to 10 degrees of freedom. The last one is also used for more than
10."""


class LatencyInterval(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive cycles: the waits of all online containers that ended in them."""

    limited: bool
    """Whether the CPU quota limited reclaimed pods in all of these cycles; False if no quota did in any of them."""
    started_ns: int
    """CLOCK_MONOTONIC."""
    duration_ns: int
    slots: tuple[int, ...]
    """Log2 histogram, as in api.histogram."""
    excess: float = 0.0
    """Binary logarithm of the worst cycle's latency divided by the target: 1 is twice the target; 0 without a breach."""


class LatencyComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Latency without and with the quota."""

    without_quota_ns: float
    """Quantile of the waits without the quota."""
    with_quota_ns: float
    without_quota_s: float
    """Length of the intervals without the quota."""
    with_quota_s: float
    excess_without_quota: float
    """Mean excess without the quota."""
    difference: float
    """Mean excess without the quota minus mean excess with it."""
    error: float
    """Standard error of the difference."""
    required_statistic: float
    """Value of `statistic` that noise alone exceeds in 5 % of such comparisons."""

    @property
    def statistic(self) -> float:
        """The difference in standard errors."""
        return self.difference / self.error

    @property
    def improved(self) -> bool:
        """Whether latency was lower with the quota, by more than the noise."""
        return self.statistic > self.required_statistic

    @property
    def upper_difference(self) -> float:
        """The largest difference that the noise leaves possible."""
        return self.difference + self.required_statistic * self.error


def compare_latency(intervals: Sequence[LatencyInterval], quantile: float) -> LatencyComparison | None:
    """Compare intervals without and with the quota by Welch's t test; None if one kind has fewer than two intervals. Intervals
    without waits do not count."""
    kinds = [[i for i in intervals if i.limited is limited and any(i.slots)] for limited in (False, True)]
    if any(len(kind) < 2 for kind in kinds):
        return None
    (without, error_without), (limited, error_with) = map(_mean_excess, kinds)
    error = error_without + error_with
    freedom = error**2 / (error_without**2 / (len(kinds[0]) - 1) + error_with**2 / (len(kinds[1]) - 1))
    merged = [merge_slots(kind) for kind in kinds]
    return LatencyComparison(
        without_quota_ns=quantile_ns(merged[0], quantile) or 0.0,
        with_quota_ns=quantile_ns(merged[1], quantile) or 0.0,
        without_quota_s=sum(interval.duration_ns for interval in kinds[0]) / NS_PER_S,
        with_quota_s=sum(interval.duration_ns for interval in kinds[1]) / NS_PER_S,
        excess_without_quota=without,
        difference=without - limited,
        error=sqrt(error),
        required_statistic=_T_95[min(max(int(freedom + 1e-9), 1), len(_T_95)) - 1],
    )


def merge_slots(intervals: Sequence[LatencyInterval]) -> list[int]:
    """Return the histogram of all waits of these intervals; there is at least one."""
    return [sum(counts) for counts in zip(*(interval.slots for interval in intervals), strict=True)]


def _mean_excess(intervals: Sequence[LatencyInterval]) -> tuple[float, float]:
    """Return the mean excess, and the square of its standard error."""
    count = len(intervals)
    mean = sum(interval.excess for interval in intervals) / count
    variance = sum((interval.excess - mean) ** 2 for interval in intervals) / (count - 1)
    return mean, max(variance, _RESOLUTION_VARIANCE) / count

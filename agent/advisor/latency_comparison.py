"""Compares run-queue latency of intervals with and without a quota, beyond the noise of histograms and of time. Pure.
The compared number is the share of waits above the quantile of all intervals together. Waits of one interval depend on
each other: a burst delays many tasks at once. So the interval is the unit of observation, and the error of a share is
the larger of the variance between intervals and that of a binomial count (docs/adr/0010-quota-trials.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import msgspec

from api.histogram import count_above, quantile_ns
from api.units import NS_PER_S

MIN_LONG_WAITS = 3
"""With few waits a lower quantile separates long from short ones, so that on average an interval has this many."""
MIN_WAITS = 100
"""Fewer waits are not compared."""
_T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""One-sided 95 % quantiles of Student's t distribution with 1 to 10 degrees of freedom. Ten stand for more."""


class LatencyInterval(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive cycles: the waits of all online containers that ended in them."""

    limited: bool
    """Whether the CPU quota limited reclaimed pods in all of these cycles; False if no quota did in any of them."""
    started_ns: int
    """CLOCK_MONOTONIC."""
    duration_ns: int
    slots: tuple[int, ...]
    """Log2 histogram, as in api.histogram."""


class LatencyComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Latency without and with the quota."""

    without_quota_ns: float
    """Quantile of the waits without the quota."""
    with_quota_ns: float
    without_quota_s: float
    """Length of the intervals without the quota."""
    with_quota_s: float
    statistic: float
    """Difference of the shares of long waits (without minus with quota) in standard errors."""
    required_statistic: float
    """Value that noise alone exceeds in 5 % of such comparisons."""

    @property
    def improved(self) -> bool:
        """Whether latency was lower with the quota, by more than the noise."""
        return self.statistic > self.required_statistic and self.with_quota_ns < self.without_quota_ns


def compare_latency(intervals: Sequence[LatencyInterval], quantile: float) -> LatencyComparison | None:
    """Compare intervals without and with the quota; None with fewer than two of a kind, or than MIN_WAITS waits.

    Welch's t test of two ratio estimates: an interval counts by its number of waits.
    """
    kinds = [[i for i in intervals if i.limited is limited and any(i.slots)] for limited in (False, True)]
    if any(len(kind) < 2 for kind in kinds):
        return None
    merged = [merge_slots(kind) for kind in kinds]
    everything = [a + b for a, b in zip(*merged, strict=True)]
    total, count = sum(everything), sum(map(len, kinds))
    if total < MIN_WAITS:
        return None
    q = max(min(quantile, 1 - MIN_LONG_WAITS * count / total), 0.5)
    threshold_ns = quantile_ns(everything, q) or 0.0
    (share_without, error_without), (share_with, error_with) = (_share_above(kind, threshold_ns) for kind in kinds)
    error = error_without + error_with
    freedom = error**2 / (error_without**2 / (len(kinds[0]) - 1) + error_with**2 / (len(kinds[1]) - 1))
    return LatencyComparison(
        without_quota_ns=quantile_ns(merged[0], quantile) or 0.0,
        with_quota_ns=quantile_ns(merged[1], quantile) or 0.0,
        without_quota_s=sum(interval.duration_ns for interval in kinds[0]) / NS_PER_S,
        with_quota_s=sum(interval.duration_ns for interval in kinds[1]) / NS_PER_S,
        statistic=(share_without - share_with) / sqrt(error),
        required_statistic=_T_95[min(max(int(freedom), 1), len(_T_95)) - 1],
    )


def merge_slots(intervals: Sequence[LatencyInterval]) -> list[int]:
    """Return the histogram of all waits of these intervals; there is at least one."""
    return [sum(counts) for counts in zip(*(interval.slots for interval in intervals), strict=True)]


def _share_above(intervals: Sequence[LatencyInterval], threshold_ns: float) -> tuple[float, float]:
    """Return the share of waits above the threshold, and the square of its standard error."""
    above = [count_above(interval.slots, threshold_ns) for interval in intervals]
    counts = [sum(interval.slots) for interval in intervals]
    total, long = sum(counts), sum(above)
    share = long / total
    residuals = sum((x - share * n) ** 2 for x, n in zip(above, counts, strict=True))
    between = residuals / total**2 * len(intervals) / (len(intervals) - 1)
    # Without a single long wait the variance is not zero: Laplace's rule of succession.
    rare = (long + 1) / (total + 2)
    return share, max(between, rare * (1 - rare) / total)

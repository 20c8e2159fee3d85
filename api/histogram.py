"""Log2 histograms of nanoseconds as the BPF programs fill them; the only definition of what a slot means.
Slot 0 holds durations up to 1 us, slot k those above 2^(k-1) us up to 2^k us; the last slot has no upper bound.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SLOT_COUNT = 27
"""2^25 us is 34 s; longer waits fall into the last, open slot. probes/*.bpf.c are compiled with this number."""
BOUNDS_NS: tuple[int, ...] = tuple(1000 << k for k in range(SLOT_COUNT - 1))
"""Inclusive upper bound of every slot but the last, whose bound is +Inf."""
COARSE_SLOTS: tuple[int, ...] = tuple(range(4, SLOT_COUNT - 1, 2))
"""Every second slot from 16 us on: sufficient resolution for millisecond events with a third of the series."""


def slot_of(wait_ns: int) -> int:
    """Slot of a duration; the BPF programs compute the same as log2 of the microseconds, rounded up."""
    return min((max(wait_ns - 1, 0) // 1000).bit_length(), SLOT_COUNT - 1)


def quantile_ns(slots: Sequence[int], q: float) -> float | None:
    """The q-quantile (0 < q <= 1) in nanoseconds, interpolated inside its slot like Prometheus' histogram_quantile.

    None if the histogram is empty. A quantile in the open last slot is given as the slot's lower bound.
    """
    total = sum(slots)
    if total == 0:
        return None
    rank, below = q * total, 0
    for k, count in enumerate(slots):
        if count and below + count >= rank:
            low = 0 if k == 0 else BOUNDS_NS[k - 1]
            if k == SLOT_COUNT - 1:
                return float(low)
            return low + (BOUNDS_NS[k] - low) * (rank - below) / count
        below += count
    return float(BOUNDS_NS[-1])


def count_above(slots: Sequence[int], threshold_ns: float) -> float:
    """Number of waits longer than the threshold, interpolated inside the slot that contains it."""
    if threshold_ns <= 0:
        return float(sum(slots))
    # The slot that contains the threshold, or has it as its upper bound.
    k = bisect_left(BOUNDS_NS, threshold_ns, hi=SLOT_COUNT - 1)
    longer = float(sum(slots[k + 1 :]))
    if k < SLOT_COUNT - 1 and slots[k]:
        low = 0 if k == 0 else BOUNDS_NS[k - 1]
        longer += slots[k] * (BOUNDS_NS[k] - threshold_ns) / (BOUNDS_NS[k] - low)
    return longer

"""How long pods take to answer, from the histograms that they publish of themselves. Pure.

The 99th percentile of the requests of the last five to ten seconds: a single round of a quiet pod has too few of them. What is
old, too little or began anew is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import msgspec

from agent.advisor.inference import Prediction, Predictions
from api.pods import Pod
from api.profiles import REQUEST_P99_MS, Target
from api.samples import Indicator

NS_PER_S = 1_000_000_000
WINDOW_S, STALE_S, LEAST_REQUESTS = 5.0, 5.0, 20
QUANTILE, MS_PER_S = 0.99, 1000.0


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod had answered when the last two windows began."""

    base: Indicator
    next: Indicator


def remember_requests(
    indicators: Mapping[str, Indicator], known: Mapping[str, Requests], now_ns: int
) -> dict[str, Requests]:
    """Where the windows of the next round begin, by pod; `indicators` are those of this round."""
    kept = {}
    for pod, now in indicators.items():
        before = known.get(pod)
        if before is None or _answered(before.next, now) is None or not _fresh(before.next, now_ns, 3 * WINDOW_S):
            kept[pod] = Requests(base=now, next=now)
        elif now.sampled_at_ns - before.next.sampled_at_ns >= WINDOW_S * NS_PER_S:
            kept[pod] = Requests(base=before.next, next=now)
        else:
            kept[pod] = before
    return kept


def request_p99_ms(
    indicators: Mapping[str, Indicator], known: Mapping[str, Requests], now_ns: int
) -> dict[str, dict[str, float]]:
    """By pod: the indicator, where it is known. `known` is what was remembered in the round before."""
    found = {}
    for pod, now in indicators.items():
        before = known.get(pod)
        if before is None or not _fresh(now, now_ns, STALE_S) or not _fresh(before.base, now_ns, 3 * WINDOW_S):
            continue
        answered = _answered(before.base, now)
        if answered is not None and answered[-1] >= LEAST_REQUESTS:
            found[pod] = {REQUEST_P99_MS: quantile_s(now.bounds_s, answered, QUANTILE) * MS_PER_S}
    return found


def predictions(pods: tuple[Pod, ...], measured: Mapping[str, Mapping[str, float]], now_ns: int) -> Predictions | None:
    """What the inference's slots are chosen by where no model is asked: measured latency over its target, 1 on target."""
    by_pod = {}
    for pod in pods:
        goal, current = pod.profile.targets.get(REQUEST_P99_MS), measured.get(pod.key, {}).get(REQUEST_P99_MS)
        bound = None if goal is None else bound_of(goal)
        if bound is not None and current is not None:
            by_pod[pod.key] = {"": Prediction(value=current / bound)}
    return Predictions(at_ns=now_ns, by_pod=by_pod) if by_pod else None


def bound_of(goal: Target) -> float | None:
    """Where the indicator should be; the upper bound goes before the lower one."""
    return goal.lower if goal.upper is None else goal.upper


def quantile_s(bounds_s: tuple[float, ...], cumulative: tuple[int, ...], quantile: float) -> float:
    """Linear within its bucket, as Prometheus has it; of what is above the last bound, that bound."""
    rank, low, below = quantile * cumulative[-1], 0.0, 0
    for bound, count in zip(bounds_s, cumulative, strict=False):
        if count >= rank:
            return low + (bound - low) * (rank - below) / (count - below) if count > below else bound
        low, below = bound, count
    return bounds_s[-1]


def _answered(before: Indicator, now: Indicator) -> tuple[int, ...] | None:
    """Cumulative counts of the requests between two answers; None where the pod began to count anew."""
    if before.bounds_s != now.bounds_s or now.sampled_at_ns < before.sampled_at_ns:
        return None
    counts = tuple(after - then for then, after in zip(before.buckets, now.buckets, strict=True))
    return None if counts[0] < 0 or any(high < low for low, high in pairwise(counts)) else counts


def _fresh(seen: Indicator, now_ns: int, most_s: float) -> bool:
    return 0 <= now_ns - seen.sampled_at_ns <= most_s * NS_PER_S

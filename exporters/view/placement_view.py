"""Builds the view of what concerns the scheduler: indicators of harm, and the reclaimed pods that it placed here last. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest

import msgspec

from api.cycle_harm import harm_indicators
from api.decision import Cycle
from api.katalyst.harm import HARM_LIMITS
from api.placement import placement_score
from api.pod import Pod
from api.qos import QoSLevel

MAX_PLACEMENTS = 8
"""Number of placements in a view, the latest ones."""


class HarmIndicatorView(msgspec.Struct, frozen=True, kw_only=True):
    """One indicator of harm to online pods, in the unit of its name in the CustomNodeResource."""

    name: str
    value: float
    limit: float
    """Value at which the scheduler scores 0, unless its settings have another one."""


class PlacementView(msgspec.Struct, frozen=True, kw_only=True):
    """A reclaimed pod of this node."""

    pod: str
    placed_at_ms: int
    """CLOCK_REALTIME at which it got the node."""
    score: float | None
    """Score of the node for this pod, 0 to 100, if the scheduler extender bound it."""


def harm_views(finished: Cycle) -> tuple[HarmIndicatorView, ...]:
    """Return the measured indicators of harm, the largest share of its limit first."""
    values = harm_indicators(finished)
    views = [
        HarmIndicatorView(name=name, value=values[name], limit=limit)
        for name, limit in HARM_LIMITS.items()
        if name in values
    ]
    return tuple(sorted(views, key=lambda view: -view.value / view.limit))


def placement_views(pods: Iterable[Pod]) -> tuple[PlacementView, ...]:
    """Return the reclaimed pods that were placed here last, the latest first."""
    times = [(pod.placed_s, pod) for pod in pods if pod.qos is QoSLevel.RECLAIMED and pod.placed_s is not None]
    latest = nlargest(MAX_PLACEMENTS, times, key=lambda item: (item[0], item[1].key))
    return tuple(
        PlacementView(pod=pod.key, placed_at_ms=int(placed_s * 1000), score=placement_score(pod.annotations))
        for placed_s, pod in latest
    )

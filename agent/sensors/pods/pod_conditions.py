"""Conditions of a pod as the kubelet lists them: whether a resize is pending, and when the pod got its node. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import msgspec

from kube.objects import parse_timestamp

RESIZE_PENDING = "PodResizePending"
"""Condition of a pod whose resize the kubelet defers or refuses (KEP-1287)."""
POD_SCHEDULED = "PodScheduled"


class KubeletPodCondition(msgspec.Struct, frozen=True):
    type: str = ""
    status: str = ""
    since: str | None = msgspec.field(name="lastTransitionTime", default=None)


def is_resize_pending(conditions: Iterable[KubeletPodCondition]) -> bool:
    """Return whether the kubelet defers or refuses a resize of the pod."""
    return any(condition.type == RESIZE_PENDING and condition.status == "True" for condition in conditions)


def placement_time_s(conditions: Iterable[KubeletPodCondition]) -> float | None:
    """Return the time at which the pod got its node, in seconds since the epoch; None if the kubelet does not report it."""
    for condition in conditions:
        if condition.type == POD_SCHEDULED and condition.status == "True" and condition.since is not None:
            with suppress(ValueError):
                return parse_timestamp(condition.since)
    return None

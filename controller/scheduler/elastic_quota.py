"""Elastic quotas for reclaimed resources: a namespace may borrow what others do not use, up to its maximum. Pure.
The objects are ElasticQuotas of the scheduler-plugins project, which Koordinator uses too (scheduling.sigs.k8s.io): `min` is
guaranteed, `max` is a limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from controller.scheduler.node_arrays import FloatArray, NodeArrays
from controller.scheduler.plugin_chain import ReasonNumbers, RejectionReason, Rows
from controller.scheduler.scheduler_kinds import ElasticQuota
from controller.scheduler.scheduling_pod import Amounts, SchedulingPod, quantity_units

RESOURCES = (RECLAIMED_CPU, RECLAIMED_MEMORY)
UNLIMITED = 1 << 62


class NamespaceQuota(NamedTuple):
    """Guaranteed and maximum amounts of a namespace."""

    guaranteed: Amounts = Amounts()
    limit: Amounts = Amounts(UNLIMITED, UNLIMITED)


NO_QUOTA = NamespaceQuota()


class ElasticQuotas:
    """Quotas by namespace, and the plugin that compares them with what the namespaces' pods request."""

    name = "ElasticQuota"
    weight = 0.0
    reasons: Sequence[RejectionReason] = (
        *(RejectionReason(f"the namespace's quota: {name} is at its max", preemptible=False) for name in RESOURCES),
        *(
            RejectionReason(f"the namespace borrows: free {name} is guaranteed to others", preemptible=False)
            for name in RESOURCES
        ),
    )

    def __init__(self, requested: Mapping[str, Amounts]) -> None:
        """`requested` has the reclaimed resources that the pods of each namespace request, assumed pods included."""
        self._requested = requested
        self._objects: dict[str, ElasticQuota] = {}
        self._by_namespace: dict[str, NamespaceQuota] = {}
        self.problems: dict[str, str] = {}
        """Reasons why quotas do not count, by key."""
        self.problem_changes = 0
        """Number of changes of `problems`, or more."""

    def apply(self, key: str, quota: ElasticQuota | None) -> None:
        """Apply a new version of a quota, or its deletion. If a namespace has several, the first by name counts."""
        self._objects.pop(key, None)
        self.problems.pop(key, None)
        self.problem_changes += 1
        if quota is not None:
            self._objects[key] = quota
        namespace = key.partition("/")[0]
        self._by_namespace.pop(namespace, None)
        first = min((each for each in self._objects if each.partition("/")[0] == namespace), default=None)
        if first is None:
            return
        try:
            self._by_namespace[namespace] = _parse_quota(self._objects[first])
        except ValueError as error:
            # An invalid quota neither guarantees nor limits anything; the problem is exported and logged.
            self.problems[first] = str(error)

    def filter(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> ReasonNumbers | None:  # noqa: ARG002
        """Reject a pod on every node if its namespace would exceed its maximum, or if only guarantees of others are free."""
        if not self._by_namespace or pod.reclaimed == (0, 0):
            return None
        number = self._rejection(pod, nodes)
        return np.full(len(rows), number, np.int16) if number else None

    def score(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> FloatArray | None:  # noqa: ARG002
        """Score nothing: a quota is the same on every node."""
        return None

    def describe(self, pod: SchedulingPod, nodes: NodeArrays, row: int, now_s: float) -> str:  # noqa: ARG002
        """Return request, use and bounds of the namespace."""
        namespace = pod.key.partition("/")[0]
        quota, used = self._by_namespace.get(namespace), self._requested.get(namespace, Amounts())
        if quota is None:
            return f"namespace {namespace} has no quota and uses {used.millicpu} millicores"
        limits = ["no max" if limit == UNLIMITED else f"max {limit}" for limit in quota.limit]
        return "; ".join(
            f"{name.rpartition('/')[2]}: requests {request}, namespace {namespace} uses {use}, min {least}, {limit}"
            for name, request, use, least, limit in zip(
                RESOURCES, pod.reclaimed, used, quota.guaranteed, limits, strict=True
            )
        )

    def _rejection(self, pod: SchedulingPod, nodes: NodeArrays) -> int:
        namespace = pod.key.partition("/")[0]
        quota, used = self._by_namespace.get(namespace, NO_QUOTA), self._requested.get(namespace, Amounts())
        for column, request in enumerate(pod.reclaimed):
            if request and used[column] + request > quota.limit[column]:
                return column + 1
        for column, request in enumerate(pod.reclaimed):
            if not request or used[column] + request <= quota.guaranteed[column]:
                continue
            # Any user can name a node in a pod, so that a node may have more pods than it offers, or not exist.
            free = int(np.maximum(nodes.allocatable[:, column] - nodes.requested[:, column], 0).sum())
            unused_guarantees = sum(
                max(other.guaranteed[column] - self._requested.get(name, Amounts())[column], 0)
                for name, other in self._by_namespace.items()
                if name != namespace
            )
            own = max(quota.guaranteed[column] - used[column], 0)
            # What the namespace still has of its own guarantee is not borrowed.
            if request - own > free - own - unused_guarantees:
                return len(RESOURCES) + column + 1
        return 0


def _parse_quota(quota: ElasticQuota) -> NamespaceQuota:
    least, most = quota.spec.min or {}, quota.spec.max or {}
    return NamespaceQuota(
        Amounts(*(_amount("min", least, name, 0) for name in RESOURCES)),
        Amounts(*(_amount("max", most, name, UNLIMITED) for name in RESOURCES)),
    )


def _amount(field: str, listed: Mapping[str, Any], name: str, default: int) -> int:
    if name not in listed:
        return default
    try:
        return quantity_units(listed[name])
    except (ValueError, TypeError) as error:
        raise ValueError(f"spec.{field}.{name}: {error}") from None

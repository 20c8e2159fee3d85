"""Taints of CustomNodeResources, which apply to pods of one QoS level. Pure.
Katalyst's controllers and agents write them (pkg/controller/lifecycle), but its scheduler does not read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from controller.scheduler.node_arrays import FloatArray, NodeArrays
from controller.scheduler.plugin_chain import ReasonNumbers, RejectionReason, Rows
from controller.scheduler.scheduler_kinds import CnrTaint
from controller.scheduler.scheduling_pod import SchedulingPod

HARD_EFFECTS = ("NoSchedule", "NoExecute")
SOFT_EFFECTS = ("PreferNoSchedule",)


class QosTaints:
    """Keeps pods off nodes whose CustomNodeResource has a taint for their level that they do not tolerate."""

    name = "QoSTaints"
    reasons: Sequence[RejectionReason] = (
        RejectionReason("node(s) had a CustomNodeResource taint for the pod's QoS level", preemptible=False),
    )

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def filter(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> ReasonNumbers | None:  # noqa: ARG002
        """Reject nodes with a taint of effect NoSchedule or NoExecute."""
        by_set = np.array([len(untolerated(pod, taints, HARD_EFFECTS)) > 0 for taints in nodes.taint_sets], np.int16)
        return by_set[nodes.taint_set[rows]] if by_set.any() else None

    def score(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> FloatArray | None:  # noqa: ARG002
        """Score 100 for a node without untolerated taints of effect PreferNoSchedule, and 0 for the one with most of them."""
        by_set = np.array([len(untolerated(pod, taints, SOFT_EFFECTS)) for taints in nodes.taint_sets], np.float64)
        counts: FloatArray = by_set[nodes.taint_set[rows]]
        highest = counts.max(initial=0)
        return (1 - counts / highest) * 100 if highest else None

    def describe(self, pod: SchedulingPod, nodes: NodeArrays, row: int, now_s: float) -> str:  # noqa: ARG002
        """Return the taints that the pod does not tolerate."""
        taints = untolerated(pod, nodes.taint_sets[nodes.taint_set[row]], (*HARD_EFFECTS, *SOFT_EFFECTS))
        listed = ", ".join(f"{taint.key}={taint.value}:{taint.effect}" for taint in taints)
        return f"not tolerated for {pod.level}: {listed}" if listed else f"no taint for {pod.level}"


def untolerated(pod: SchedulingPod, taints: Iterable[CnrTaint], effects: Sequence[str]) -> list[CnrTaint]:
    """Return the taints with one of these effects that apply to the pod's level and that it does not tolerate."""
    return [
        taint
        for taint in taints
        if taint.effect in effects
        and taint.qos_level == pod.level.value
        and not any(each.matches(taint.key, taint.value, taint.effect) for each in pod.tolerations)
    ]

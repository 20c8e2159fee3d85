"""Katalyst's NodeOvercommitment as a plugin of the chain: it filters, and explains with numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from controller.scheduler.node_arrays import CPU_COLUMN, FloatArray, NodeArrays
from controller.scheduler.node_overcommitment import (
    MAX_MILLICPU,
    RATIO_ONE,
    CpuDemand,
    OvercommittedNodes,
    available_m,
    explain_rejection,
    filter_overcommitted,
    needed_m,
)
from controller.scheduler.plugin_chain import ReasonNumbers, RejectionReason, Rows
from controller.scheduler.scheduling_pod import SchedulingPod


class OvercommitmentFilter:
    """Keeps pods off nodes whose overcommitted CPU or memory the kubelet has pinned."""

    name = "NodeOvercommitment"
    weight = 0.0
    reasons: Sequence[RejectionReason] = (
        RejectionReason("node(s) with overcommitted memory that the kubelet's memory manager pins", preemptible=False),
        # kube-scheduler's own fit does not see pinned CPUs, so that it cannot select the victims.
        RejectionReason("Insufficient overcommitted cpu that is not pinned", preemptible=False),
    )

    def filter(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> ReasonNumbers | None:  # noqa: ARG002
        """Reject overcommitted nodes by OvercommitRejection; a pod without a CPU request fits everywhere."""
        special = np.flatnonzero(nodes.aligned_slot[rows])
        if not len(special):
            return None
        numbers = np.zeros(len(rows), np.int16)
        numbers[special] = filter_overcommitted(_overcommitted(nodes, rows[special]), _demand(pod))
        return numbers

    def score(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> FloatArray | None:  # noqa: ARG002
        """Score no pod."""
        return None

    def describe(self, pod: SchedulingPod, nodes: NodeArrays, row: int, now_s: float) -> str:  # noqa: ARG002
        """Return what the pod takes of the overcommitted CPU, and what is free."""
        node, demand = _overcommitted(nodes, np.array([row], np.intp)), _demand(pod)
        if problem := explain_rejection(node, demand, 0):
            return problem
        if not (node.static_cpu[0] and node.cpu_ratio_ppm[0] > RATIO_ONE):
            return "the kubelet pins nothing that is overcommitted"
        free = max(int(available_m(node)[0]), 0)
        return f"the pod takes {needed_m(node, demand)[0]}m of overcommitted CPU, {free}m are free"


def _demand(pod: SchedulingPod) -> CpuDemand:
    return CpuDemand(pod.native.millicpu, 0 if pod.alignment is None else pod.alignment.pinned_cpus)


def _overcommitted(nodes: NodeArrays, rows: Rows) -> OvercommittedNodes:
    slots, arrays = nodes.aligned_slot[rows], nodes.aligned
    original = arrays.original_allocatable_m[slots]
    return OvercommittedNodes(
        allocatable_m=np.where(
            original > 0, original, np.minimum(nodes.native_allocatable[rows, CPU_COLUMN], MAX_MILLICPU)
        ),
        requested_m=nodes.native_requested[rows, CPU_COLUMN],
        guaranteed_m=np.maximum(arrays.reported_pinned_cpus[slots], arrays.pinned_cpus[slots]) * 1000,
        cpu_ratio_ppm=arrays.cpu_ratio_ppm[slots],
        memory_ratio_ppm=arrays.memory_ratio_ppm[slots],
        static_cpu=arrays.static_cpu[slots],
        static_memory=arrays.static_memory[slots],
    )

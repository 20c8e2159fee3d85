"""Katalyst's plugin NodeOvercommitment: filters nodes whose CPU or memory is overcommitted although the kubelet pins it. Pure.

kube-scheduler's NodeResourcesFit compares requests with the overcommitted allocatable CPU of the Node. If the kubelet's CPU
manager is static, the CPUs that it pins to Guaranteed pods cannot be shared. So each pinned CPU takes as much of the
overcommitted amount as a real CPU offers: `ratio` CPUs. The memory manager pins memory likewise, so that memory cannot be
overcommitted.

The caller gives arrays over all nodes (`OvercommittedNodes`), and for each pod `CpuDemand`:
- ratios from the Node's annotations by `api.overcommit.effective_ratio`, so that recommended ratios count; without a ratio 1.
- managers from the annotations of the CustomNodeResource. Clear them when the annotation or the object is deleted; Katalyst's
  cache does not.
- `guaranteed_m`: the larger one of the annotation guaranteed_cpus and of the sum of `guaranteed_cpus` over the node's assigned
  and assumed pods, because the agent reports a pod only after the kubelet has pinned its CPUs.
- `requested_m`: over assigned and assumed pods, this one excluded.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from controller.scheduler.aligned_arrays import RATIO_ONE
from controller.scheduler.node_arrays import CPU_COLUMN, BoolArray, FloatArray, IntArray, NodeArrays
from controller.scheduler.plugin_chain import ReasonNumbers, RejectionReason, Rows
from controller.scheduler.scheduling_pod import SchedulingPod

CodeArray: TypeAlias = NDArray[np.int8]
MAX_MILLICPU = 1 << 33
"""With MAX_RATIO_PPM of node_alignment, products of the two fit in 64 bits."""


class OvercommitRejection(IntEnum):
    """Why a node is rejected."""

    NONE = 0
    MEMORY_MANAGER = 1
    CPU = 2


class OvercommittedNodes(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Overcommitment of N nodes; all arrays have N elements. CPU is in milli-CPUs, ratios are in millionths (at least 1)."""

    allocatable_m: IntArray
    """Before overcommitment: annotation original_allocatable_cpu, without it the allocatable CPU of the Node."""
    requested_m: IntArray
    guaranteed_m: IntArray
    """CPUs that are pinned, or will be."""
    cpu_ratio_ppm: IntArray
    memory_ratio_ppm: IntArray
    static_cpu: BoolArray
    """Whether the kubelet's CPU manager is `static`."""
    static_memory: BoolArray
    """Whether the kubelet's memory manager is `Static`."""


class CpuDemand(msgspec.Struct, frozen=True):
    """CPU of one pod: its request, and the part of it that a static CPU manager pins."""

    request_m: int
    """Milli-CPUs, as in the stock scheduler: the larger one of all containers and each init container, plus overhead."""
    guaranteed_cpus: int = 0


class OvercommitmentFilter:
    """Keeps pods off nodes whose overcommitted CPU or memory the kubelet has pinned."""

    name = "NodeOvercommitment"
    weight = 0.0
    reasons: Sequence[RejectionReason] = (
        RejectionReason("node(s) with overcommitted memory that the kubelet's memory manager pins", preemptible=False),
        # kube-scheduler's own fit does not count pinned CPUs, so it cannot select victims that free them.
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


def filter_overcommitted(nodes: OvercommittedNodes, pod: CpuDemand) -> CodeArray:
    """Return an OvercommitRejection for each node; 0 where the pod fits. A pod without a CPU request fits everywhere."""
    rejections = np.zeros(len(nodes.allocatable_m), np.int8)
    if pod.request_m <= 0 and pod.guaranteed_cpus <= 0:
        return rejections
    counts = nodes.static_cpu & (nodes.cpu_ratio_ppm > RATIO_ONE)
    rejections[counts & (needed_m(nodes, pod) > available_m(nodes))] = OvercommitRejection.CPU
    rejections[nodes.static_memory & (nodes.memory_ratio_ppm > RATIO_ONE)] = OvercommitRejection.MEMORY_MANAGER
    return rejections


def available_m(nodes: OvercommittedNodes) -> IntArray:
    """Return the overcommitted milli-CPUs of each node that are neither pinned nor requested.

    (allocatable - pinned) x ratio - (requested - pinned). If the agent has not reported the end of a pod yet, more CPUs
    are pinned than pods request; these do not count as free.
    """
    pinned = np.minimum(nodes.guaranteed_m, nodes.allocatable_m)
    shared = np.maximum(nodes.requested_m - pinned, 0)
    return np.asarray((nodes.allocatable_m - pinned) * nodes.cpu_ratio_ppm // RATIO_ONE - shared, np.int64)


def needed_m(nodes: OvercommittedNodes, pod: CpuDemand) -> IntArray:
    """Return the overcommitted milli-CPUs that the pod takes on each node. Katalyst counts the pinned CPUs alone; here
    containers of the same pod that share CPUs take their requests too."""
    pinned = pod.guaranteed_cpus * 1000
    return np.asarray(pinned * nodes.cpu_ratio_ppm // RATIO_ONE + max(pod.request_m - pinned, 0), np.int64)


def explain_rejection(nodes: OvercommittedNodes, pod: CpuDemand, node: int) -> str:
    """Return why the node at this index rejects the pod, with the numbers and the remedy; empty if it fits."""
    rejection = filter_overcommitted(nodes, pod)[node]
    if rejection == OvercommitRejection.MEMORY_MANAGER:
        return (
            f"its memory is overcommitted by {nodes.memory_ratio_ppm[node] / RATIO_ONE:g} although the kubelet's memory manager"
            " pins it; set the memory ratio of its NodeOvercommitConfig to 1"
        )
    if rejection == OvercommitRejection.CPU:
        return (
            f"insufficient overcommitted CPU: the pod takes {needed_m(nodes, pod)[node]}m,"
            f" {max(available_m(nodes)[node], 0)}m are free (ratio"
            f" {nodes.cpu_ratio_ppm[node] / RATIO_ONE:g}, {nodes.guaranteed_m[node]}m pinned); reduce the request"
        )
    return ""


def _demand(pod: SchedulingPod) -> CpuDemand:
    return CpuDemand(pod.native.millicpu, 0 if pod.alignment is None else pod.alignment.pinned_cpus)


def _overcommitted(nodes: NodeArrays, rows: Rows) -> OvercommittedNodes:
    slots, arrays = nodes.aligned_slot[rows], nodes.aligned
    return OvercommittedNodes(
        allocatable_m=np.minimum(nodes.native_allocatable[rows, CPU_COLUMN], MAX_MILLICPU),
        requested_m=nodes.native_requested[rows, CPU_COLUMN],
        guaranteed_m=np.maximum(arrays.reported_pinned_cpus[slots], arrays.pinned_cpus[slots]) * 1000,
        cpu_ratio_ppm=arrays.cpu_ratio_ppm[slots],
        memory_ratio_ppm=arrays.memory_ratio_ppm[slots],
        static_cpu=arrays.static_cpu[slots],
        static_memory=arrays.static_memory[slots],
    )

"""Filters nodes whose CPU or memory is overcommitted although the kubelet pins it (Katalyst's plugin NodeOvercommitment). Pure.

The stock fit of the scheduler counts with the overcommitted allocatable CPU of the Node. Where the kubelet's CPU manager is
static, the CPUs that it pins to Guaranteed pods cannot be shared, so a whole-numbered Guaranteed CPU takes as much of the
overcommitted amount as a real CPU offers: `ratio` CPUs. The memory manager pins memory likewise, and excludes overcommitment.

The caller gives arrays over all nodes (`OvercommittedNodes`), and for each pod `CpuDemand`:
- ratios from the Node's annotations by `api.overcommit.effective_ratio`, so that recommended ratios count; without a ratio 1.
- managers from the annotations of the CustomNodeResource. They have to be cleared if the annotation or the object goes, which
  Katalyst's cache does not.
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

IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]
CodeArray: TypeAlias = NDArray[np.int8]
RATIO_ONE = 1_000_000
"""A ratio of 1 in `cpu_ratio_ppm`."""
MAX_PINNED_CPUS = 1 << 20
"""Pinned CPUs of a node, and of a pod, above which more make no difference."""
MAX_RATIO_PPM = 1000 * RATIO_ONE
MAX_MILLICPU = 1 << 33
"""With MAX_RATIO_PPM, products of the two fit in 64 bits."""


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


class ContainerCpu(msgspec.Struct, frozen=True):
    """CPU of one container of a pod."""

    request_m: int
    init: bool = False


def cpu_demand(containers: Sequence[ContainerCpu], overhead_m: int = 0, *, guaranteed: bool) -> CpuDemand:
    """Return the CPU of a pod. `guaranteed` is whether its Kubernetes QoS class is Guaranteed.

    The kubelet pins the CPUs of each container whose request is a whole number (pkg/kubelet/cm/cpumanager/policy_static.go,
    guaranteedCPUs). CPUs of init containers are reused by the other containers.
    """
    apps = [container.request_m for container in containers if not container.init]
    inits = [container.request_m for container in containers if container.init]
    pinned = sum(request // 1000 for request in apps if request % 1000 == 0) if guaranteed else 0
    return CpuDemand(max(sum(apps), *inits, 0) + overhead_m, min(pinned, MAX_PINNED_CPUS))


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

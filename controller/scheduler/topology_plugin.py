"""Katalyst's NodeResourceTopology as a plugin of the chain: settings, filter, score, and the numbers of an explanation. Pure.
CPU and memory are aligned; devices are not, because pods are decoded without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from controller.scheduler.node_arrays import FloatArray, NodeArrays
from controller.scheduler.node_zones import ALIGNED_RESOURCES
from controller.scheduler.numa_topology import (
    PluginPolicy,
    ScoringStrategy,
    TopologyPod,
    TopologyPolicy,
    TopologyRules,
    explain_topology,
    filter_topology,
    is_aligned,
    score_topology,
)
from controller.scheduler.plugin_chain import ReasonNumbers, RejectionReason, Rows
from controller.scheduler.resource_fit import PluginWeight, Weight
from controller.scheduler.scheduling_pod import SchedulingPod

UNITS = ("milli-CPUs", "bytes of memory")


class TopologySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Placement by NUMA nodes. Names in brackets are those of Katalyst's NodeResourceTopologyArgs."""

    enabled: bool = False
    """Read the zones of CustomNodeResources, and reject nodes whose zones cannot hold a pod that the kubelet aligns."""
    plugin_policy: Literal["native", "dynamic"] = "dynamic"
    """[resourcePluginPolicy] `native` aligns Guaranteed pods with whole CPUs, as the kubelet's managers do; `dynamic` aligns
    dedicated_cores pods with numa_binding, as the agent does."""
    aligned_resources: tuple[Literal["cpu", "memory"], ...] = ("cpu", "memory")
    """[alignedResources] Resources that a node with a Numeric policy takes from the same NUMA nodes."""
    strategy: Literal["MostAllocated", "LeastAllocated", "BalancedAllocation", "LeastNUMANodes"] = "MostAllocated"
    """[scoringStrategy.type] Which NUMA nodes are preferred."""
    cpu_weight: Weight = 1
    """[scoringStrategy.resources] Weight of CPU in the score."""
    memory_weight: Weight = 1
    """[scoringStrategy.resources] Weight of memory in the score."""
    weight: PluginWeight = 1.0
    """Weight of this score among the scores of all plugins; 0 leaves it out."""


def topology_rules(settings: TopologySettings) -> TopologyRules | None:
    """Return the rules of these settings; None if the plugin is off."""
    if not settings.enabled:
        return None
    return TopologyRules(
        plugin=PluginPolicy(settings.plugin_policy),
        aligned=np.array([name in settings.aligned_resources for name in ALIGNED_RESOURCES]),
        required=np.ones(len(ALIGNED_RESOURCES), np.bool_),
        weights=np.array((settings.cpu_weight, settings.memory_weight), np.int64),
        strategy=ScoringStrategy(settings.strategy),
    )


class NumaTopology:
    """Rejects nodes that align the pod and have no set of NUMA nodes that can hold it."""

    name = "NodeResourceTopology"
    reasons: Sequence[RejectionReason] = (
        # The verb preempt cannot tell whether victims would free the right NUMA node, so none is removed for this.
        RejectionReason("node(s) whose NUMA nodes cannot hold the pod", preemptible=False),
    )

    def __init__(self, rules: TopologyRules, weight: float) -> None:
        self._rules, self.weight = rules, weight

    def filter(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> ReasonNumbers | None:  # noqa: ARG002
        """Reject nodes whose zones cannot hold the pod; nodes without zones, and with the policy None, accept every pod."""
        if (aligned := self._aligned(pod)) is None:
            return None
        slots = nodes.aligned_slot[rows]
        return np.where(filter_topology(nodes.aligned.zone_state(slots), aligned, self._rules), 0, 1).astype(np.int16)

    def score(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> FloatArray | None:  # noqa: ARG002
        """Score the zones that the pod would get; 0 for nodes that do not align. Pods that no kubelet aligns get no score."""
        if (aligned := self._aligned(pod)) is None:
            return None
        state = nodes.aligned.zone_state(nodes.aligned_slot[rows])
        return score_topology(state, aligned, self._rules).astype(np.float64)

    def describe(self, pod: SchedulingPod, nodes: NodeArrays, row: int, now_s: float) -> str:  # noqa: ARG002
        """Return what is free in each NUMA node, or why none holds the pod."""
        if (aligned := self._aligned(pod)) is None:
            return "the pod is not aligned with NUMA nodes"
        state = nodes.aligned.zone_state(nodes.aligned_slot[row : row + 1])
        if state.policies[0] == TopologyPolicy.NONE:
            return "the node aligns no pods: its CustomNodeResource reports no NUMA nodes, or the topology policy None"
        if problem := explain_topology(state, aligned, self._rules, 0, UNITS):
            return problem
        free = np.maximum(state.allocatable - state.allocated - state.assumed, 0)[0][state.zones[0]]
        listed = [f"{', '.join(map(str, free[:, column]))} {unit}" for column, unit in enumerate(UNITS)]
        return f"free by NUMA node: {'; '.join(listed)}"

    def _aligned(self, pod: SchedulingPod) -> TopologyPod | None:
        """Return the pod as the kubelets place it; None if they do not align it."""
        parsed = None if pod.alignment is None else pod.alignment.topology_pod()
        return parsed if parsed is not None and is_aligned(parsed, self._rules) else None

"""Pods, nodes and CustomNodeResources for tests of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.scheduler_kinds import SchedulerCnr, SchedulerNode
from controller.scheduler.scheduling_pod import ScheduledPod

UNIT = 84 << 20
"""Unit of memory in Katalyst's table tests."""
NOW_S = 1_800_000_000.0


def a_pod(
    name: str = "p", millicpu: Any = None, memory: Any = None, *, node: str = "", level: str = "reclaimed_cores",
    **fields: Any,
) -> ScheduledPod:  # fmt: skip
    """Return a pod with one container that requests reclaimed resources; `fields` are further fields of its spec."""
    amounts = {
        key: value for key, value in ((RECLAIMED_CPU, millicpu), (RECLAIMED_MEMORY, memory)) if value is not None
    }
    spec = {"containers": [{"name": "main", "resources": {"requests": amounts, "limits": amounts}}], "nodeName": node}
    return pod_of(name, {**spec, **fields}, level)


def pod_of(name: str, spec: Mapping[str, Any], level: str = "", phase: str = "Pending") -> ScheduledPod:
    """Return a pod with this spec."""
    annotations = {"katalyst.kubewharf.io/qos_level": level} if level else {}
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "annotations": annotations}
    return msgspec.convert({"metadata": metadata, "spec": spec, "status": {"phase": phase}}, ScheduledPod)


def a_cnr(
    name: str, millicpu: Any = None, memory: Any = None, *, taints: Any = (), usage: Any = None, at: str = ""
) -> SchedulerCnr:
    """Return a CustomNodeResource; without amounts it offers nothing."""
    amounts = {
        key: value for key, value in ((RECLAIMED_CPU, millicpu), (RECLAIMED_MEMORY, memory)) if value is not None
    }
    status: dict[str, Any] = {"resources": {"allocatable": amounts}} if amounts else {}
    if usage is not None:
        status["nodeMetricStatus"] = {"updateTime": at, "nodeMetric": {"genericUsage": usage}}
    return msgspec.convert(
        {"metadata": {"name": name}, "spec": {"taints": list(taints)}, "status": status}, SchedulerCnr
    )


def a_node(name: str, cpu: str = "16", memory: str = "64Gi") -> SchedulerNode:
    """Return a Node with its allocatable resources."""
    document = {"metadata": {"name": name}, "status": {"allocatable": {"cpu": cpu, "memory": memory, "pods": "110"}}}
    return msgspec.convert(document, SchedulerNode)


def a_state(*nodes: tuple[str, Any, Any]) -> ClusterState:
    """Return a state with nodes that offer these amounts of reclaimed resources."""
    state = ClusterState()
    for name, millicpu, memory in nodes:
        state.apply_node(name, a_node(name))
        state.apply_cnr(name, a_cnr(name, millicpu, memory))
    return state

"""Reclaimed pods with numa_binding: bound to a NUMA node whose headroom holds them.

The headroom of a node counts for the pods bound to it, or, while there are none, for those that are bound to no node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.placing.layout import Layout
from agent.qrm.placing.state import CpuState, bound_of, requested
from api.knobs import Verdict
from api.pods import Pod
from api.qos import QoSLevel


def bind_reclaimed(
    pods: Sequence[Pod], layout: Layout, state: CpuState, config: CpuPlacementConfig
) -> tuple[dict[str, tuple[int, ...]], dict[str, Verdict]]:
    """NUMA node of each such pod by uid, and why others have none, by pod key.

    Where the headroom of nodes is not known nobody is bound anew; those that are bound stay.
    """
    nodes, asked, unbound = _promised(pods, layout, state)
    rejected: dict[str, Verdict] = {}
    for pod in (pod for pod in pods if pod.qos is QoSLevel.RECLAIMED and pod.enhancements.numa_binding):
        if pod.uid in nodes:
            continue
        cores = cores_of_reclaimed(pod)
        left = _left(layout, state.numa_headroom, asked, unbound)
        fitting = [node for node, room in left.items() if room >= cores]
        if not fitting:
            rejected[pod.key] = _rejection(pod, cores, left, state.numa_headroom)
            unbound += cores
            continue
        sign = 1 if config.numa_hint == "packing" else -1
        node = min(fitting, key=lambda node: (sign * left[node], node))
        nodes[pod.uid] = (node,)
        asked[node] = asked.get(node, 0.0) + cores
    return nodes, rejected


def room_for_reclaimed(pods: Sequence[Pod], layout: Layout, state: CpuState) -> Mapping[int, float]:
    """Cores of each NUMA node that one more pod can be bound to, beside these."""
    _nodes, asked, unbound = _promised(pods, layout, state)
    return _left(layout, state.numa_headroom, asked, unbound)


def cores_of_reclaimed(pod: Pod) -> float:
    """What all containers of the pod ask for."""
    return sum(requested(pod, container) or 0.0 for container in pod.containers)


def _promised(
    pods: Sequence[Pod], layout: Layout, state: CpuState
) -> tuple[dict[str, tuple[int, ...]], dict[int, float], float]:
    """The node of each pod that has one, by uid, the cores that those ask for by node, and those of unbound pods."""
    nodes: dict[str, tuple[int, ...]] = {}
    asked: dict[int, float] = {}
    unbound = 0.0
    for pod in pods:
        if pod.qos is not QoSLevel.RECLAIMED:
            continue
        if not pod.enhancements.numa_binding:
            unbound += cores_of_reclaimed(pod)
            continue
        bound = bound_of(pod, state) or pod.bound_numa
        if len(bound) == 1 and bound[0] in layout.numa:
            nodes[pod.uid] = bound
            asked[bound[0]] = asked.get(bound[0], 0.0) + cores_of_reclaimed(pod)
    return nodes, asked, unbound


def _left(
    layout: Layout, headroom: Mapping[int, float], asked: Mapping[int, float], unbound: float
) -> Mapping[int, float]:
    """Cores of each node that a pod can still be bound to; a node becomes one for bound pods only if the rest still fits."""
    free = {node: headroom[node] for node in layout.numa if node in headroom and node not in asked}
    spare = sum(free.values()) - unbound
    left = {node: headroom[node] - cores for node, cores in asked.items() if node in headroom}
    return left | {node: cores for node, cores in free.items() if spare >= cores}


def _rejection(pod: Pod, cores: float, left: Mapping[int, float], headroom: Mapping[int, float]) -> Verdict:
    if not headroom:
        text = f"{pod.key} cannot be bound to a NUMA node: what each can lend is not known."
        return Verdict(rule="numa_headroom_unknown", text=text)
    rooms = ", ".join(f"{node}: {max(room, 0.0):g}" for node, room in sorted(left.items())) or "none"
    return Verdict(
        rule="numa_headroom_too_small",
        text=f"{pod.key} asks for {cores:g} reclaimed CPUs on one NUMA node; left to bind to on node: {rooms}.",
        inputs={"request_cores": cores, **{f"left_on_{node}": room for node, room in left.items()}},
    )

"""Nodes and pods of the topology tests, and a slow, obvious evaluation of one node to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import msgspec
import numpy as np

from controller.scheduler.numa_topology import (
    PluginPolicy,
    ScoringStrategy,
    TopologyPod,
    TopologyPolicy,
    TopologyRules,
    ZoneState,
    parse_topology_policy,
)

GI = 1 << 30
NAMES = ("cpu", "memory", "gpu", "a/b")
CPU, MEMORY, GPU, OTHER = range(4)
Amounts = tuple[int, ...]


class NumaNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node: for each zone its socket, what it offers and what is allocated; amounts by resource."""

    sockets: tuple[int, ...]
    capacity: tuple[Amounts, ...]
    allocated: tuple[Amounts, ...]
    assumed: tuple[Amounts, ...] = ()
    reported: tuple[bool, ...] = (True, True, True, False)


def amounts(cpus: float = 0, gi: float = 0, gpu: int = 0, other: int = 0) -> Amounts:
    return round(cpus * 1000), round(gi * GI), gpu, other


def numa_node(sockets: Sequence[int], zone: Amounts, used: dict[int, Amounts] | None = None) -> NumaNode:
    """Return a node with equal zones. Nodes without GPUs do not report them."""
    allocated = tuple((used or {}).get(number, (0, 0, 0, 0)) for number in range(len(sockets)))
    reported = (True, True, zone[GPU] > 0, False)
    return NumaNode(sockets=tuple(sockets), capacity=(zone,) * len(sockets), allocated=allocated, reported=reported)


A = numa_node((0, 0), amounts(4, 8, 4))
B = numa_node((0, 0), amounts(2, 4, 2))
C = numa_node((0, 0), amounts(4, 8, 4), {1: amounts(1, 2, 2)})
D = numa_node((0, 0, 1, 1), amounts(2, 4), {1: amounts(1, 2), 2: amounts(1, 2)})
E = numa_node((0, 0, 1, 1), amounts(2, 4), {2: amounts(1, 2), 3: amounts(1, 2)})
C_SCORED = numa_node((0, 0), amounts(4, 8, 4), {0: amounts(1, 2), 1: amounts(3, 6)})
D_SCORED = numa_node((0, 0, 1, 1), amounts(2, 4))


def zone_state(nodes: Sequence[NumaNode], policies: Sequence[str], zone_count: int = 0) -> ZoneState:
    """Return the arrays of these nodes, padded to `zone_count` zones."""
    width = max(zone_count, *(len(node.sockets) for node in nodes))
    shape = (len(nodes), width, len(NAMES))
    # Padding must not matter, so it is not zero.
    arrays = {name: np.full(shape, 10**15, np.int64) for name in ("capacity", "allocatable", "allocated", "assumed")}
    arrays["allocated"][:] = arrays["assumed"][:] = 0
    zones, sockets = np.zeros(shape[:2], np.bool_), np.full(shape[:2], 7, np.int64)
    for row, node in enumerate(nodes):
        used = slice(0, len(node.sockets))
        arrays["capacity"][row, used] = arrays["allocatable"][row, used] = node.capacity
        arrays["allocated"][row, used] = node.allocated
        if node.assumed:
            arrays["assumed"][row, used] = node.assumed
        zones[row, used], sockets[row, used] = True, node.sockets
    parsed = [parse_topology_policy(text) for text in policies]
    return ZoneState(
        **arrays, zones=zones, sockets=sockets, reported=np.array([node.reported for node in nodes]),
        policies=np.array([policy for policy, _ in parsed], np.int64), pod_level=np.array([level for _, level in parsed]),
    )  # fmt: skip


def topology_rules(
    plugin: PluginPolicy, aligned: Sequence[int] = (CPU, MEMORY), strategy: ScoringStrategy = ScoringStrategy.MOST
) -> TopologyRules:
    mask = np.isin(np.arange(len(NAMES)), list(aligned))
    required = np.isin(np.arange(len(NAMES)), [CPU, MEMORY])
    weights = np.ones(len(NAMES), np.int64)
    return TopologyRules(plugin=plugin, aligned=mask, required=required, weights=weights, strategy=strategy)


def topology_pod(*containers: Amounts, **fields: Any) -> TopologyPod:
    requests = np.array(containers, np.int64)
    return TopologyPod(containers=requests, effective=requests.sum(axis=0), **fields)


def guaranteed_pod(*containers: Amounts) -> TopologyPod:
    """Return a pod that the native policy aligns, if its CPUs are whole."""
    return topology_pod(
        *containers, guaranteed=True, whole_cpus=all(container[CPU] % 1000 == 0 for container in containers)
    )


def dedicated_pod(*containers: Amounts, **fields: Any) -> TopologyPod:
    """Return a pod that the dynamic policy aligns."""
    return topology_pod(*containers, dedicated=True, **{"binding": True, **fields})


def obvious_fit(node: NumaNode, policy: str, pod: TopologyPod, rules: TopologyRules) -> bool:
    """Return whether the node holds the pod, by trying every set of zones one after another."""
    kind, pod_level = parse_topology_policy(policy)
    dynamic = rules.plugin is PluginPolicy.DYNAMIC
    aligned = pod.dedicated and pod.binding if dynamic else pod.guaranteed and pod.whole_cpus
    ignored = kind in (TopologyPolicy.NONE, TopologyPolicy.BEST_EFFORT)
    if not aligned or ignored or (kind is TopologyPolicy.NUMERIC and not dynamic):
        return True
    assumed = node.assumed or tuple((0,) * len(NAMES) for _ in node.sockets)
    free = [
        [max(total - used - new, 0) for total, used, new in zip(*zone, strict=True)]
        for zone in zip(node.capacity, node.allocated, assumed, strict=True)
    ]
    idle = [not any(used) and not any(new) for used, new in zip(node.allocated, assumed, strict=True)]
    requests = [pod.effective] if pod_level else [pod.containers[pod.main]] if dynamic else list(pod.containers)
    return all(_take(node, kind, pod, rules, free, idle, [int(amount) for amount in request]) for request in requests)


def _take(
    node: NumaNode, kind: TopologyPolicy, pod: TopologyPod, rules: TopologyRules, free: list[list[int]], idle: list[bool],
    request: list[int],
) -> bool:  # fmt: skip
    """Take a request from the first set of zones that holds it; return whether there is one."""
    dynamic = rules.plugin is PluginPolicy.DYNAMIC
    exclusive = pod.exclusive and dynamic
    everywhere = range(len(node.sockets))
    counted = [
        index for index, amount in enumerate(request) if amount and (node.reported[index] or rules.required[index])
    ]
    numeric = kind is TopologyPolicy.NUMERIC
    inside = [index for index in counted if not numeric or rules.aligned[index]]
    outside = [index for index in counted if index not in inside]
    needed = {
        index: next(
            (
                count
                for count in everywhere
                if sum(sorted((zone[index] for zone in node.capacity), reverse=True)[: count + 1]) >= request[index]
            ),
            len(node.sockets),
        )
        + 1
        for index in inside
    }
    size = 1 if kind is TopologyPolicy.SINGLE else max(needed.values(), default=1)
    if kind is TopologyPolicy.RESTRICTED and len(set(needed.values())) > 1:
        return False
    if size > 1 and dynamic and not exclusive:
        return False
    if any(sum(zone[index] for zone in free) < request[index] for index in outside):
        return False
    per_socket = len(node.sockets) // len(set(node.sockets))
    for zones in combinations(everywhere, size):
        crosses = len({node.sockets[zone] for zone in zones}) > 1
        if dynamic and numeric and crosses and size <= per_socket:
            continue
        if exclusive and not all(idle[zone] for zone in zones):
            continue
        if all(sum(free[zone][index] for zone in zones) >= request[index] for index in inside):
            for index in counted:
                left = request[index]
                for zone in zones if index in inside else everywhere:
                    part = min(free[zone][index], left)
                    free[zone][index] -= part
                    left -= part
            return True
    return False

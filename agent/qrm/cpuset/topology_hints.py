"""Computes the sets of NUMA nodes that can hold a pod, and selects the best one. Pure.
The rules are those of Katalyst's topology hints and of its hint optimizers (packing, spreading, dynamic packing).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import ceil

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.cpuset.topology_layout import CpuLayout
from api.qos import Enhancements

LARGE_NUMA_COUNT = 8
"""From this number of NUMA nodes on, only sets of the minimum size and one more are considered."""


@dataclass(frozen=True)
class TopologyHint:
    """A set of NUMA nodes that can hold the request."""

    nodes: tuple[int, ...]
    preferred: bool


@dataclass(frozen=True)
class NumaRequest:
    """Request of a pod to be bound."""

    cores: float
    enhancements: Enhancements
    several: bool
    """Whether the pod may span nodes without naming them or their number (numa_exclusive)."""


class NoTopologyHint(Exception):
    """No set of NUMA nodes fits; the text says why."""


def fewest_nodes(cores: float, layout: CpuLayout) -> int:
    """Return how many empty NUMA nodes hold this many cores. Raises NoTopologyHint if all do not."""
    total = 0
    for count, cpus in enumerate(sorted(map(len, layout.numa.values()), reverse=True), 1):
        total += cpus
        if total >= cores:
            return count
    raise NoTopologyHint(f"requests {cores:g} CPUs, the node has {total}")


def topology_hints(
    request: NumaRequest, available: Mapping[int, float], free: Collection[int], layout: CpuLayout
) -> tuple[TopologyHint, ...]:
    """Return every set of NUMA nodes that can hold the request, smallest first. Raises NoTopologyHint if none can.
    `available` are the unallocated cores of each node, `free` the CPUs that no dedicated container has."""
    enhancements = request.enhancements
    min_nodes = fewest_nodes(request.cores, layout)
    nodes_specified = enhancements.numa_ids is not None or enhancements.numa_number is not None
    if min_nodes > 1 and not request.several and not nodes_specified:
        raise NoTopologyHint(f"requests {request.cores:g} CPUs, more than one NUMA node has: set numa_exclusive")
    if enhancements.numa_ids is not None and not set(enhancements.numa_ids) <= set(layout.numa):
        raise NoTopologyHint(
            f"requests NUMA nodes {_format_list(enhancements.numa_ids)}, the machine has {_format_list(layout.numa)}"
        )
    per_socket = max(Counter(socket for sockets in layout.sockets.values() for socket in sockets).values())
    hints = []
    for nodes in _numa_masks(request, min_nodes, layout):
        available_cores = [available.get(node, 0.0) for node in nodes]
        # A node without available CPUs may be owned by another pod, so no set includes it.
        if min(available_cores) <= 0 or sum(available_cores) < request.cores:
            continue
        crosses = len(layout.sockets_of(nodes)) > 1
        if enhancements.numa_ids is None and crosses and len(nodes) <= per_socket:
            continue
        if _satisfies_enhancements(request, nodes, available, free, layout):
            hints.append(
                TopologyHint(nodes=nodes, preferred=len(nodes) == (_requested_numa_count(enhancements) or min_nodes))
            )
    if not hints:
        listed = ", ".join(f"{node}: {available.get(node, 0.0):g}" for node in layout.numa)
        raise NoTopologyHint(
            f"requests {request.cores:g} CPUs{_describe_conditions(enhancements)}; "
            f"no NUMA nodes have them (left on node {listed})"
        )
    return tuple(hints)


def select_hint(
    hints: Collection[TopologyHint], available: Mapping[int, float], layout: CpuLayout, config: CpuPlacementConfig
) -> TopologyHint:
    """Return the best hint: a preferred one, then one of fewest nodes, then the one with the most (`spreading`) or the
    fewest available cores (`packing`)."""
    candidates, spreads = hints, config.numa_hint == "spreading"
    if config.numa_hint == "dynamic-packing":
        above_threshold = [
            hint for hint in hints if _free_ratio(hint, available, layout) >= config.numa_hint_low_threshold
        ]
        candidates, spreads = above_threshold or hints, not above_threshold
    return min(
        candidates,
        key=lambda hint: (
            not hint.preferred,
            len(hint.nodes),
            sum(available.get(node, 0.0) for node in hint.nodes) * (-1 if spreads else 1),
            hint.nodes,
        ),
    )


def _free_ratio(hint: TopologyHint, available: Mapping[int, float], layout: CpuLayout) -> float:
    return min(available.get(node, 0.0) / len(layout.numa[node]) for node in hint.nodes)


def _numa_masks(request: NumaRequest, min_nodes: int, layout: CpuLayout) -> Iterator[tuple[int, ...]]:
    nodes = tuple(layout.numa)
    if request.enhancements.numa_ids is not None:
        yield tuple(sorted(set(request.enhancements.numa_ids)))
        return
    number = request.enhancements.numa_number
    if number is not None:
        if number < min_nodes:
            raise NoTopologyHint(f"requests {request.cores:g} CPUs on {number} NUMA nodes, and needs {min_nodes}")
        counts = range(number, min(number, len(nodes)) + 1)
    elif not request.several:
        counts = range(1, 2)
    else:
        counts = range(min_nodes, (min_nodes + 1 if len(nodes) > LARGE_NUMA_COUNT else len(nodes)) + 1)
    for count in counts:
        yield from combinations(nodes, count)


def _satisfies_enhancements(
    request: NumaRequest,
    nodes: tuple[int, ...],
    available: Mapping[int, float],
    free: Collection[int],
    layout: CpuLayout,
) -> bool:
    """Return whether the nodes satisfy the pod's enhancements beyond the number of cores."""
    enhancements = request.enhancements
    if enhancements.align_by_socket:
        per_socket = len(layout.order) / len(layout.sockets_of(layout.numa))
        if len(layout.sockets_of(nodes)) != ceil(request.cores / per_socket):
            return False
    if enhancements.distribute_evenly:
        each, rest = divmod(request.cores, len(nodes))
        if rest or any(available.get(node, 0.0) < each for node in nodes):
            return False
    if enhancements.full_cores:
        return len(layout.whole_cores(layout.on(nodes) & frozenset(free))) >= ceil(request.cores / layout.threads)
    return True


def _requested_numa_count(enhancements: Enhancements) -> int | None:
    return len(set(enhancements.numa_ids)) if enhancements.numa_ids is not None else enhancements.numa_number


def _describe_conditions(enhancements: Enhancements) -> str:
    conditions = []
    if enhancements.numa_ids is not None:
        conditions.append(f"on nodes {_format_list(enhancements.numa_ids)}")
    elif enhancements.numa_number is not None:
        conditions.append(f"on {enhancements.numa_number} nodes")
    conditions += ["aligned by socket"] if enhancements.align_by_socket else []
    conditions += ["the same number on each node"] if enhancements.distribute_evenly else []
    conditions += ["in whole physical cores"] if enhancements.full_cores else []
    conditions += ["on exclusive nodes"] if enhancements.numa_exclusive else []
    return "".join(f", {text}" for text in conditions)


def _format_list(nodes: Collection[int]) -> str:
    return ",".join(map(str, sorted(nodes)))

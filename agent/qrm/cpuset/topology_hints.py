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
"""From so many NUMA nodes on only masks of the fewest that hold the request, and one more, are looked at."""


@dataclass(frozen=True)
class TopologyHint:
    """A set of NUMA nodes that holds the request."""

    nodes: tuple[int, ...]
    preferred: bool


@dataclass(frozen=True)
class NumaRequest:
    """What a bound pod wants."""

    cores: float
    wants: Enhancements
    several: bool
    """Whether it may have more than one node without naming them or their number: numa_exclusive alone."""


class NoTopologyHint(Exception):
    """No set of NUMA nodes fits; the text says why."""


def fewest_nodes(cores: float, layout: CpuLayout) -> int:
    """How many NUMA nodes hold so many cores, if nothing else was on them. Raises NoHint where all do not."""
    total = 0
    for count, size in enumerate(sorted(map(len, layout.numa.values()), reverse=True), 1):
        total += size
        if total >= cores:
            return count
    raise NoTopologyHint(f"asks for {cores:g} CPUs, the node has {total}")


def topology_hints(
    ask: NumaRequest, available: Mapping[int, float], free: Collection[int], layout: CpuLayout
) -> tuple[TopologyHint, ...]:
    """Every set of NUMA nodes that holds the request, smallest first. Raises NoHint where none does.

    `available` are the cores of each node that are not promised to others, `free` the CPUs that nobody has for himself.
    """
    wants = ask.wants
    fewest = fewest_nodes(ask.cores, layout)
    named = wants.numa_ids is not None or wants.numa_number is not None
    if fewest > 1 and not ask.several and not named:
        raise NoTopologyHint(
            f"asks for {ask.cores:g} CPUs, more than one NUMA node has, and not for nodes of its own (numa_exclusive)"
        )
    if wants.numa_ids is not None and not set(wants.numa_ids) <= set(layout.numa):
        raise NoTopologyHint(
            f"asks for NUMA nodes {_format_list(wants.numa_ids)}, the node has {_format_list(layout.numa)}"
        )
    per_socket = max(Counter(socket for sockets in layout.sockets.values() for socket in sockets).values())
    found = []
    for nodes in _numa_masks(ask, fewest, layout):
        left = [available.get(node, 0.0) for node in nodes]
        # A node that has nothing is no part of a set, even where the others hold it all: it may be somebody's own.
        if min(left) <= 0 or sum(left) < ask.cores:
            continue
        crosses = len(layout.sockets_of(nodes)) > 1
        if wants.numa_ids is None and crosses and len(nodes) <= per_socket:
            continue
        if _satisfies_enhancements(ask, nodes, available, free, layout):
            found.append(TopologyHint(nodes=nodes, preferred=len(nodes) == (_requested_numa_count(wants) or fewest)))
    if not found:
        rooms = ", ".join(f"{node}: {available.get(node, 0.0):g}" for node in layout.numa)
        raise NoTopologyHint(
            f"asks for {ask.cores:g} CPUs{_describe_conditions(wants)}, no NUMA nodes have them (left on node {rooms})"
        )
    return tuple(found)


def select_hint(
    found: Collection[TopologyHint], available: Mapping[int, float], layout: CpuLayout, config: CpuPlacementConfig
) -> TopologyHint:
    """The best of several: preferred ones, then as few nodes as possible, then those with the most or the least left."""
    candidates, spreads = found, config.numa_hint == "spreading"
    if config.numa_hint == "dynamic-packing":
        roomy = [hint for hint in found if _free_ratio(hint, available, layout) >= config.numa_hint_low_threshold]
        candidates, spreads = roomy or found, not roomy
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


def _numa_masks(ask: NumaRequest, fewest: int, layout: CpuLayout) -> Iterator[tuple[int, ...]]:
    nodes = tuple(layout.numa)
    if ask.wants.numa_ids is not None:
        yield tuple(sorted(set(ask.wants.numa_ids)))
        return
    number = ask.wants.numa_number
    if number is not None:
        if number < fewest:
            raise NoTopologyHint(f"asks for {ask.cores:g} CPUs on {number} NUMA nodes, which takes {fewest}")
        counts = range(number, min(number, len(nodes)) + 1)
    elif not ask.several:
        counts = range(1, 2)
    else:
        counts = range(fewest, (fewest + 1 if len(nodes) > LARGE_NUMA_COUNT else len(nodes)) + 1)
    for count in counts:
        yield from combinations(nodes, count)


def _satisfies_enhancements(
    ask: NumaRequest, nodes: tuple[int, ...], available: Mapping[int, float], free: Collection[int], layout: CpuLayout
) -> bool:
    """What the pod asks for beyond room."""
    wants = ask.wants
    if wants.align_by_socket:
        per_socket = len(layout.order) / len(layout.sockets_of(layout.numa))
        if len(layout.sockets_of(nodes)) != ceil(ask.cores / per_socket):
            return False
    if wants.distribute_evenly:
        each, rest = divmod(ask.cores, len(nodes))
        if rest or any(available.get(node, 0.0) < each for node in nodes):
            return False
    if wants.full_cores:
        return len(layout.whole_cores(layout.on(nodes) & frozenset(free))) >= ceil(ask.cores / layout.threads)
    return True


def _requested_numa_count(wants: Enhancements) -> int | None:
    return len(set(wants.numa_ids)) if wants.numa_ids is not None else wants.numa_number


def _describe_conditions(wants: Enhancements) -> str:
    named = (
        ("on nodes " + _format_list(wants.numa_ids) if wants.numa_ids is not None else "", wants.numa_ids is not None),
        (f"on {wants.numa_number} nodes", wants.numa_number is not None and wants.numa_ids is None),
        ("aligned by socket", wants.align_by_socket),
        ("the same number on each node", wants.distribute_evenly),
        ("in whole physical cores", wants.full_cores),
        ("on nodes for itself", wants.numa_exclusive),
    )
    return "".join(f", {text}" for text, asked in named if asked)


def _format_list(nodes: Collection[int]) -> str:
    return ",".join(map(str, sorted(nodes)))

"""Which CPUs and NUMA nodes a container would have that is about to be admitted, and where it could be. Pure.

The decisions are `place`'s, with the pod among those that run; nothing here decides differently from the agent's rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from math import ceil
from typing import NamedTuple

import msgspec

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.placing.binding import cores_of
from agent.qrm.placing.ceiling import Ceiling, below, ceiling_of
from agent.qrm.placing.hints import Ask as Wanted
from agent.qrm.placing.hints import Hint, NoHint, hints
from agent.qrm.placing.layout import layout
from agent.qrm.placing.place import bindings, place
from agent.qrm.placing.reclaimed import cores_of_reclaimed, room_for_reclaimed
from agent.qrm.placing.state import Allocation, CpuState, bound_of, own_pool, with_bindings
from agent.qrm.protocol.asked import MEMORY, Ask
from api.advice import PoolSize
from api.cpus import Topology
from api.pods import Pod
from api.qos import QoSLevel
from api.samples import Snapshot


class NoFit(Exception):
    """The container cannot be admitted; the text says why, with the numbers."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What runs on the node."""

    topology: Topology
    """Of CPUs that pods may have."""
    pods: tuple[Pod, ...] = ()
    """Those that are listed, and those that were admitted and are not listed yet."""
    sizes: tuple[PoolSize, ...] = ()
    state: CpuState = CpuState()
    config: CpuPlacementConfig = CpuPlacementConfig()
    memory_by_numa: Mapping[int, int] = {}
    """Bytes of each NUMA node that pods may have; empty where that is not known."""
    now_ns: int = 0


def situation_of(
    snapshot: Snapshot,
    sizes: tuple[PoolSize, ...],
    state: CpuState,
    config: CpuPlacementConfig,
    ceiling: Ceiling | None = None,
) -> Situation:
    """What a round saw, and what it left to remember; `ceiling` was in force before."""
    inside = below(snapshot, ceiling_of(snapshot, ceiling))
    totals = {numa: node.meminfo.get("MemTotal", 0) for numa, node in sorted(snapshot.node.numa.items())}
    return Situation(
        topology=inside.topology,
        pods=with_bindings(snapshot.pods, state),
        sizes=sizes,
        state=state,
        config=config,
        memory_by_numa={numa: size for numa, size in totals.items() if size},
        now_ns=snapshot.taken_at_ns,
    )


class Given(NamedTuple):
    """What a container got."""

    entry: Allocation
    mems: tuple[int, ...]


def cpu_hints(ask: Ask, seen: Situation) -> tuple[Hint, ...] | None:
    """NUMA nodes that could hold the pod; None where it may be anywhere. Raises NoFit."""
    pod, wants = ask.pod, ask.pod.enhancements
    if not _binds(pod, seen.config):
        return None
    if bound := bound_of(pod, seen.state):
        return (Hint(bound, preferred=True),)
    others = tuple(one for one in seen.pods if one.uid != pod.uid)
    node = layout(seen.topology)
    if pod.qos is QoSLevel.RECLAIMED:
        cores = cores_of_reclaimed(pod)
        room = room_for_reclaimed(others, node, seen.state)
        found = tuple(Hint((numa,), preferred=True) for numa, left in sorted(room.items()) if left >= cores)
        if not found:
            rooms = ", ".join(f"{numa}: {left:g}" for numa, left in sorted(room.items())) or "not known"
            raise NoFit(f"{pod.key} asks for {cores:g} reclaimed CPUs on one NUMA node; left to bind to: {rooms}")
        return found
    ledger = bindings(others, seen.topology, seen.state, seen.config, seen.now_ns).ledger
    alone = wants.numa_exclusive or not wants.numa_share
    dedicated = pod.qos is QoSLevel.DEDICATED
    cores = float(ceil(cores_of(pod, seen.config))) if dedicated else cores_of(pod, seen.config)
    try:
        wanted = Wanted(cores=cores, wants=wants, several=dedicated and wants.numa_exclusive)
        return hints(wanted, ledger.available(alone=alone), ledger.free, node)
    except NoHint as error:
        raise NoFit(f"{pod.key} {error}") from None


def memory_hints(ask: Ask, seen: Situation) -> tuple[Hint, ...] | None:
    """The same by memory: every set of nodes, smallest first, whose unpromised memory holds the request."""
    pod, wants = ask.pod, ask.pod.enhancements
    if not _binds(pod, seen.config) or not seen.memory_by_numa:
        return None
    if bound := bound_of(pod, seen.state):
        return (Hint(bound, preferred=True),)
    left = dict(seen.memory_by_numa)
    for other in seen.pods:
        nodes = bound_of(other, seen.state)
        for numa in nodes if other.uid != pod.uid else ():
            left[numa] = left.get(numa, 0) - memory_of(other) // len(nodes)
    several = pod.qos is QoSLevel.DEDICATED and wants.numa_exclusive
    found = [nodes for nodes in _sets(tuple(left), several=several) if sum(left[numa] for numa in nodes) >= ask.amount]
    if not found:
        rooms = ", ".join(f"{numa}: {max(size, 0)}" for numa, size in sorted(left.items()))
        raise NoFit(f"{pod.key} asks for {ask.amount:.0f} bytes on NUMA nodes of its own choice; left on node {rooms}")
    fewest = wants.numa_number or min(map(len, found))
    return tuple(Hint(nodes, preferred=len(nodes) == fewest) for nodes in found)


def allocate(ask: Ask, seen: Situation) -> Given:
    """What the container gets, which is what it had where it runs already. Raises NoFit."""
    known = seen.state.pod(ask.pod.uid).get(ask.container.name)
    if known is not None:
        return Given(known, mems_of(known, seen))
    if ask.resource == MEMORY and ask.container.cpu_request_cores is None and ask.container.reclaimed_cpu_cores is None:
        return _memory_alone(ask, seen)
    pods = (*(one for one in seen.pods if one.uid != ask.pod.uid), ask.pod)
    placement, state = place(seen.sizes, pods, seen.topology, seen.state, seen.config, seen.now_ns)
    if (verdict := placement.rejected.get(ask.pod.key)) is not None:
        raise NoFit(verdict.text)
    entry = state.pod(ask.pod.uid)[ask.container.name]
    if ask.hint and entry.bound_numa and entry.bound_numa != ask.hint:
        raise NoFit(
            f"{ask.pod.key} was to have NUMA nodes {ask.hint}, which do not hold it any more; ask for hints again"
        )
    return Given(entry, placement.mems[ask.container.cgroup])


def _memory_alone(ask: Ask, seen: Situation) -> Given:
    """Memory of a container whose CPU nobody has asked for yet: by what it is bound to, or would be."""
    pod = ask.pod
    nodes = pod.bound_numa if _binds(pod, seen.config) else ()
    if _binds(pod, seen.config) and not nodes:
        found = memory_hints(ask, seen) or ()
        nodes = next((hint.nodes for hint in found if hint.preferred), ())
    entry = Allocation(
        pod_uid=pod.uid,
        container_name=ask.container.name,
        owner_pool_name=own_pool(pod, nodes),
        qos_level=pod.qos.value,
        allocation_result="",
        bound_numa=nodes,
    )
    return Given(entry, mems_of(entry, seen))


def mems_of(entry: Allocation, seen: Situation) -> tuple[int, ...]:
    """NUMA nodes whose memory a container may use, as `place` has it: its own where it is bound; else, with those of its CPUs,
    all that are nobody's own, and for shared pods none that online pods are bound to."""
    if entry.bound_numa:
        return entry.bound_numa
    node = layout(seen.topology)
    others = [one for its in seen.state.pod_entries.values() for one in its.values() if one.bound_numa]
    taken = {numa for one in others if one.exclusive for numa in one.bound_numa}
    if entry.qos_level == QoSLevel.SHARED:
        online = {level.value for level in QoSLevel if level.online}
        taken |= {numa for one in others if one.qos_level in online for numa in one.bound_numa}
    here = node.nodes_of(entry.cpus & frozenset(node.order))
    return tuple(sorted((set(node.numa) - taken).union(here)))


def memory_of(pod: Pod) -> int:
    """Bytes that the pod asks for."""
    return sum(one.reclaimed_memory_bytes or one.memory_request_bytes or 0 for one in pod.containers)


def _binds(pod: Pod, config: CpuPlacementConfig) -> bool:
    if config.policy != "dynamic" or not pod.enhancements.numa_binding or pod.qos is QoSLevel.SYSTEM:
        return False
    return pod.qos is not QoSLevel.RECLAIMED or config.enable_reclaim_numa_binding


def _sets(nodes: tuple[int, ...], *, several: bool) -> Iterator[tuple[int, ...]]:
    # Masks of many nodes are too many to try: the fewest that can hold it come first, and are enough.
    for count in range(1, min(len(nodes), 8 if several else 1) + 1):
        yield from combinations(sorted(nodes), count)

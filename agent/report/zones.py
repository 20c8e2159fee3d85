"""The node as the tree of zones of CustomNodeResource: sockets, their NUMA nodes, and caches that some CPUs share. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from agent.report.amounts import bytes_of, cores_of, promised
from api.advice import Headroom
from api.cpus import Cpu, format_cpu_list
from api.crds.meta import ResourceList
from api.crds.node import Allocation, Attribute, Resources, Sibling, TopologyZone
from api.decisions import Round
from api.facts import NumaNode
from api.pods import RECLAIMED_CPU, RECLAIMED_MEMORY, Pod
from api.qos import QoSLevel

SOCKET, NUMA, L3 = "Socket", "Numa", "L3CacheGroup"
DISTANCE, RESERVED, CPUS = "numa_distance", "reserved_cpu_list", "cpu_lists"
"""Names of attributes, as Katalyst has them."""
_OUR_OWN = ("reserve", "interrupt")
"""Pools that no pod is ever given CPUs of."""


def zones(finished: Round, advertised: Headroom | None) -> tuple[TopologyZone, ...]:
    """All sockets. Only pods that are bound to NUMA nodes have allocations: the others are nowhere in particular."""
    snapshot = finished.snapshot
    reserved = reserved_cpus(finished)
    bound = bindings(finished)
    by_numa: dict[int, list[Cpu]] = {}
    for cpu in snapshot.topology.cpus:
        by_numa.setdefault(cpu.numa, []).append(cpu)
    sockets: dict[int, list[TopologyZone]] = {}
    for numa, cpus in sorted(by_numa.items()):
        # A NUMA node that spans sockets, as interleaving firmware makes it, is shown below its first one.
        zone = _numa(numa, cpus, snapshot.node.numa, reserved, advertised)
        given = tuple(_allocation(pod, nodes) for pod, nodes in bound if numa in nodes)
        sockets.setdefault(min(cpu.socket for cpu in cpus), []).append(_with(zone, given))
    return tuple(
        TopologyZone(type=SOCKET, name=str(socket), children=tuple(children))
        for socket, children in sorted(sockets.items())
    )


def reserved_cpus(finished: Round) -> frozenset[int]:
    """CPUs that pods are never given."""
    pools = () if finished.advice is None else finished.advice.pools
    return frozenset(cpu for pool in pools if pool.name in _OUR_OWN for cpu in pool.cpus)


def bindings(finished: Round) -> tuple[tuple[Pod, tuple[int, ...]], ...]:
    """Pods with the NUMA nodes that they are bound to: as they were told, or as the advisor provides for them."""
    placed: dict[str, tuple[int, ...]] = {}
    if finished.advice is not None:
        for one in finished.advice.cpu.regions:
            if one.region.bound:
                placed |= dict.fromkeys(one.region.pods, one.region.numa_nodes)
    found = ((pod, pod.bound_numa or placed.get(pod.key, ())) for pod in finished.snapshot.pods)
    return tuple(sorted(((pod, nodes) for pod, nodes in found if nodes), key=lambda one: one[0].key))


def requests(pod: Pod, parts: int = 1) -> ResourceList:
    """What a pod asked for, or its part on each of so many NUMA nodes."""
    lent = pod.qos is QoSLevel.RECLAIMED
    cores = _sum(c.reclaimed_cpu_cores if lent else c.cpu_request_cores for c in pod.containers)
    memory = _sum(c.reclaimed_memory_bytes if lent else c.memory_request_bytes for c in pod.containers)
    found: dict[str, str | int] = {}
    if cores is not None:
        found[RECLAIMED_CPU if lent else "cpu"] = str(int(cores * 1000 / parts)) if lent else cores_of(cores / parts)
    if memory is not None:
        found[RECLAIMED_MEMORY if lent else "memory"] = bytes_of(memory / parts)
    return found


def _numa(
    numa: int,
    cpus: Collection[Cpu],
    nodes: Mapping[int, NumaNode],
    reserved: Collection[int],
    advertised: Headroom | None,
) -> TopologyZone:
    node = nodes.get(numa, NumaNode())
    own = sorted(cpu.id for cpu in cpus if cpu.id in reserved)
    capacity: dict[str, str | int] = {"cpu": cores_of(len(cpus))}
    if total := node.meminfo.get("MemTotal"):
        capacity["memory"] = bytes_of(total)
    lent = {}
    if advertised is not None:
        lent = promised(advertised.cores_by_numa.get(numa), advertised.memory_by_numa.get(numa))
    return TopologyZone(
        type=NUMA,
        name=str(numa),
        resources=Resources(
            capacity={**capacity, **lent}, allocatable={**capacity, "cpu": cores_of(len(cpus) - len(own)), **lent}
        ),
        attributes=(Attribute(name=RESERVED, value=format_cpu_list(own)),) if own else None,
        children=_caches(cpus, reserved),
        siblings=tuple(
            Sibling(type=NUMA, name=str(other), attributes=(Attribute(name=DISTANCE, value=str(distance)),))
            for other, distance in sorted(node.distances.items())
            if other != numa
        )
        or None,
    )


def _caches(cpus: Iterable[Cpu], reserved: Collection[int]) -> tuple[TopologyZone, ...] | None:
    """Third-level caches, where a NUMA node has several: one alone says nothing that the NUMA node does not."""
    by_cache: dict[int, list[int]] = {}
    for cpu in cpus:
        by_cache.setdefault(cpu.l3, []).append(cpu.id)
    if len(by_cache) < 2:
        return None
    return tuple(
        TopologyZone(
            type=L3,
            name=str(number),
            resources=Resources(
                capacity={"cpu": cores_of(len(ids))},
                allocatable={"cpu": cores_of(sum(cpu not in reserved for cpu in ids))},
            ),
            attributes=(Attribute(name=CPUS, value=format_cpu_list(ids)),),
        )
        for number, ids in sorted(by_cache.items())
    )


def _allocation(pod: Pod, nodes: Collection[int]) -> Allocation:
    consumer = f"{pod.namespace}/{pod.name}/{pod.uid}"
    return Allocation(consumer=consumer, requests=requests(pod, len(nodes)) or None)


def _with(zone: TopologyZone, given: tuple[Allocation, ...]) -> TopologyZone:
    return TopologyZone(
        type=zone.type,
        name=zone.name,
        resources=zone.resources,
        attributes=zone.attributes,
        allocations=given or None,
        children=zone.children,
        siblings=zone.siblings,
    )


def _sum(amounts: Iterable[float | None]) -> float | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known else None

"""Builds the tree of topology zones of the CustomNodeResource: sockets, NUMA nodes, caches and allocations.
It is pure. A NUMA node that spans several sockets is listed below the first one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from agent.reporter.cnr_inputs import CnrInputs, bytes_quantity, cores_quantity, reclaimed_allocatable
from api.advice import Headroom
from api.cpu import Cpu, format_cpu_list, parse_cpu_list
from api.decision import Cycle
from api.katalyst.cnr import TopologyZone, ZoneAllocation, ZoneAttribute, ZoneResources, ZoneSibling
from api.katalyst.meta import Quantity, ResourceList
from api.measurements import NumaNode
from api.node_resources import DeviceAllocation, PodAllocation, TopologyLevel, TopologyQuantity, TopologyResource
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY, Pod
from api.qos import QoSLevel
from api.snapshot import Snapshot

SOCKET, NUMA, L3 = "Socket", "Numa", "L3CacheGroup"
NUMA_DISTANCE, RESERVED_CPU_LIST, CPU_LISTS = "numa_distance", "reserved_cpu_list", "cpu_lists"
"""Names of attributes, as Katalyst has them."""
_RESERVED_POOLS = ("reserve", "interrupt")
"""Pools that no pod is ever given CPUs of."""


def topology_zones(finished: Cycle, reported_headroom: Headroom | None) -> tuple[TopologyZone, ...]:
    """All sockets. Only pods that are bound to NUMA nodes have allocations: the others are nowhere in particular."""
    snapshot = finished.snapshot
    reserved = reserved_cpus(finished)
    bound = numa_bindings(finished)
    by_numa: dict[int, list[Cpu]] = {}
    for cpu in snapshot.topology.cpus:
        by_numa.setdefault(cpu.numa, []).append(cpu)
    sockets: dict[int, list[TopologyZone]] = {}
    for numa, cpus in sorted(by_numa.items()):
        # A NUMA node that spans sockets, as interleaving firmware makes it, is shown below its first one.
        zone = _numa_zone(numa, cpus, snapshot.node.numa, reserved, reported_headroom)
        given = tuple(_allocation(pod, nodes) for pod, nodes in bound if numa in nodes)
        sockets.setdefault(min(cpu.socket for cpu in cpus), []).append(_with_allocations(zone, given))
    return tuple(
        TopologyZone(type=SOCKET, name=str(socket), children=tuple(children))
        for socket, children in sorted(sockets.items())
    )


def reserved_cpus(finished: Cycle) -> frozenset[int]:
    """CPUs that pods are never given."""
    pools = () if finished.advice is None else finished.advice.pools
    return frozenset(cpu for pool in pools if pool.name in _RESERVED_POOLS for cpu in pool.cpus)


def numa_bindings(finished: Cycle) -> tuple[tuple[Pod, tuple[int, ...]], ...]:
    """Pods with the NUMA nodes that they are bound to: as they were told, or as the advisor provides for them."""
    placed: dict[str, tuple[int, ...]] = {}
    if finished.advice is not None:
        for one in finished.advice.cpu.regions:
            if one.region.bound:
                placed |= dict.fromkeys(one.region.pods, one.region.numa_nodes)
    found = ((pod, pod.bound_numa or placed.get(pod.key, ())) for pod in finished.snapshot.pods)
    return tuple(sorted(((pod, nodes) for pod, nodes in found if nodes), key=lambda one: one[0].key))


def pod_requests(pod: Pod, parts: int = 1) -> ResourceList:
    """What a pod asked for, or its part on each of so many NUMA nodes."""
    lent = pod.qos is QoSLevel.RECLAIMED
    cores = _sum_known(c.reclaimed_cpu_cores if lent else c.cpu_request_cores for c in pod.containers)
    memory = _sum_known(c.reclaimed_memory_bytes if lent else c.memory_request_bytes for c in pod.containers)
    found: dict[str, str | int] = {}
    if cores is not None:
        found[RECLAIMED_CPU if lent else "cpu"] = (
            str(int(cores * 1000 / parts)) if lent else cores_quantity(cores / parts)
        )
    if memory is not None:
        found[RECLAIMED_MEMORY if lent else "memory"] = bytes_quantity(memory / parts)
    return found


def _numa_zone(
    numa: int,
    cpus: Collection[Cpu],
    nodes: Mapping[int, NumaNode],
    reserved: Collection[int],
    reported_headroom: Headroom | None,
) -> TopologyZone:
    node = nodes.get(numa, NumaNode())
    own = sorted(cpu.id for cpu in cpus if cpu.id in reserved)
    capacity: dict[str, str | int] = {"cpu": cores_quantity(len(cpus))}
    if total := node.meminfo.get("MemTotal"):
        capacity["memory"] = bytes_quantity(total)
    lent = {}
    if reported_headroom is not None:
        lent = reclaimed_allocatable(
            reported_headroom.cores_by_numa.get(numa), reported_headroom.memory_by_numa.get(numa)
        )
    return TopologyZone(
        type=NUMA,
        name=str(numa),
        resources=ZoneResources(
            capacity={**capacity, **lent}, allocatable={**capacity, "cpu": cores_quantity(len(cpus) - len(own)), **lent}
        ),
        attributes=(ZoneAttribute(name=RESERVED_CPU_LIST, value=format_cpu_list(own)),) if own else None,
        children=_l3_zones(cpus, reserved),
        siblings=tuple(
            ZoneSibling(
                type=NUMA, name=str(other), attributes=(ZoneAttribute(name=NUMA_DISTANCE, value=str(distance)),)
            )
            for other, distance in sorted(node.distances.items())
            if other != numa
        )
        or None,
    )


def _l3_zones(cpus: Iterable[Cpu], reserved: Collection[int]) -> tuple[TopologyZone, ...] | None:
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
            resources=ZoneResources(
                capacity={"cpu": cores_quantity(len(ids))},
                allocatable={"cpu": cores_quantity(sum(cpu not in reserved for cpu in ids))},
            ),
            attributes=(ZoneAttribute(name=CPU_LISTS, value=format_cpu_list(ids)),),
        )
        for number, ids in sorted(by_cache.items())
    )


def _allocation(pod: Pod, nodes: Collection[int]) -> ZoneAllocation:
    consumer = f"{pod.namespace}/{pod.name}/{pod.uid}"
    return ZoneAllocation(consumer=consumer, requests=pod_requests(pod, len(nodes)) or None)


def _with_allocations(zone: TopologyZone, given: tuple[ZoneAllocation, ...]) -> TopologyZone:
    return TopologyZone(
        type=zone.type,
        name=zone.name,
        resources=zone.resources,
        attributes=zone.attributes,
        allocations=given or None,
        children=zone.children,
        siblings=zone.siblings,
    )


def _sum_known(amounts: Iterable[float | None]) -> float | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known else None


SOCKET_ZONE, NUMA_ZONE = "Socket", "Numa"
RESERVED_ATTRIBUTE = "reserved_cpu_list"
ZoneKey = tuple[str, str, str, str]
"""Of a zone: its parent's type and name, and its own; of a socket or a NUMA node its own twice."""
ZoneAmounts = dict[str, Quantity]


class _ZoneResources:
    """By zone: what it has, what can be had of it, and who has some."""

    def __init__(self) -> None:
        self.capacity: dict[ZoneKey, dict[str, float]] = {}
        self.allocatable: dict[ZoneKey, dict[str, float]] = {}
        self.given: dict[ZoneKey, dict[str, dict[str, float]]] = {}
        self.attributes: dict[ZoneKey, dict[str, str]] = {}

    def has(self, key: ZoneKey, name: str, amount: float, whole: float | None = None) -> None:
        _add_amount(self.allocatable.setdefault(key, {}), name, amount)
        _add_amount(self.capacity.setdefault(key, {}), name, amount if whole is None else whole)

    def add_allocation(self, key: ZoneKey, consumer: str, name: str, amount: float) -> None:
        _add_amount(self.given.setdefault(key, {}).setdefault(consumer, {}), name, amount)


class _ZoneDevices(NamedTuple):
    zone: ZoneKey
    amount: int


def add_pod_resources(
    zones: tuple[TopologyZone, ...], snapshot: Snapshot, inputs: CnrInputs
) -> tuple[TopologyZone, ...]:
    """The tree with it; as it came where nobody was asked, or nothing is known."""
    if inputs.node is None:
        return zones
    found = _ZoneResources()
    types = inputs.zone_types
    for device in inputs.node.devices:
        for zone, amount in _devices(device, types):
            found.has(zone, device.resource, amount)
    for memory in inputs.node.memory:
        if memory.numa_nodes:
            found.has(_numa_key(memory.numa_nodes[0]), memory.kind, memory.bytes)
    for resource in inputs.node.resources:
        _add_topology_resource(found, resource)
    uids = {pod.key: f"{pod.namespace}/{pod.name}/{pod.uid}" for pod in snapshot.pods}
    numa_of = {cpu.id: cpu.numa for cpu in snapshot.topology.cpus}
    for pod in inputs.pods:
        # Of a pod that is not listed nobody knows the uid: it has just come, or just gone.
        if pod.key in uids:
            _add_pod(found, pod, uids[pod.key], numa_of, types)
    free = set(inputs.node.cpus)
    return tuple(_complete_zone(zone, None, found, free, snapshot) for zone in zones)


def _add_pod(
    found: _ZoneResources, pod: PodAllocation, consumer: str, numa_of: Mapping[int, int], types: Mapping[str, str]
) -> None:
    for container in pod.containers:
        for cpu in container.cpus:
            if cpu in numa_of:
                found.add_allocation(_numa_key(numa_of[cpu]), consumer, "cpu", 1)
        for memory in container.memory:
            # What is given of several nodes at once is not told apart.
            for numa in memory.numa_nodes:
                found.add_allocation(_numa_key(numa), consumer, memory.kind, memory.bytes / len(memory.numa_nodes))
        for device in container.devices:
            for zone, amount in _devices(device, types):
                found.add_allocation(zone, consumer, device.resource, amount)
        for resource in container.resources:
            for part in resource.parts:
                found.add_allocation(_zone_of(part), consumer, resource.name, part.value)


def _devices(device: DeviceAllocation, types: Mapping[str, str]) -> Iterator[_ZoneDevices]:
    if not device.numa_nodes:
        return
    near = str(device.numa_nodes[0])
    if device.resource in types:
        yield from (_ZoneDevices((NUMA_ZONE, near, types[device.resource], name), 1) for name in device.ids)
    else:
        yield _ZoneDevices(_numa_key(device.numa_nodes[0]), len(device.ids))


def _add_topology_resource(found: _ZoneResources, resource: TopologyResource) -> None:
    whole = {_zone_of(part): part.value for part in resource.capacity_parts}
    for part in resource.parts:
        zone = _zone_of(part)
        found.has(zone, resource.name, part.value, whole.get(zone))
        if part.kind:
            found.attributes.setdefault(zone, {}).update(part.annotations)


def _zone_of(part: TopologyQuantity) -> ZoneKey:
    near = NUMA_ZONE if part.level is TopologyLevel.NUMA else SOCKET_ZONE
    return (near, str(part.node), part.kind, part.name) if part.kind else (near, str(part.node), near, str(part.node))


def _complete_zone(
    zone: TopologyZone, parent: TopologyZone | None, found: _ZoneResources, free: set[int], snapshot: Snapshot
) -> TopologyZone:
    own = zone.type in (SOCKET_ZONE, NUMA_ZONE)
    key = (
        (zone.type, zone.name, zone.type, zone.name)
        if own or parent is None
        else (parent.type, parent.name, zone.type, zone.name)
    )
    children = [_complete_zone(child, zone, found, free, snapshot) for child in zone.children or ()]
    if own:
        there = {(child.type, child.name) for child in children}
        new = {key_[2:] for key_ in found.allocatable if key_[:2] == key[:2] and key_[2:] != key[2:]}
        children += [
            _complete_zone(TopologyZone(type=kind, name=name), zone, found, free, snapshot)
            for kind, name in sorted(new - there)
        ]
    zone = msgspec.structs.replace(
        zone,
        resources=_merge_resources(zone.resources, found.capacity.get(key, {}), found.allocatable.get(key, {})),
        allocations=_merge_allocations(zone.allocations or (), found.given.get(key, {})) or None,
        attributes=_merge_attributes(zone.attributes or (), found.attributes.get(key, {})) or None,
        children=tuple(children) or None,
    )
    return _without_reserved_cpus(zone, snapshot, free) if zone.type == NUMA_ZONE and free else zone


def _without_reserved_cpus(zone: TopologyZone, snapshot: Snapshot, free: set[int]) -> TopologyZone:
    """Without the CPUs that the kubelet gives to nobody, beside those that we keep."""
    cpus = {cpu.id for cpu in snapshot.topology.cpus if str(cpu.numa) == zone.name}
    said = {one.name: one.value for one in zone.attributes or ()}
    kept = cpus - free | set(_parse_cpus(said.get(RESERVED_ATTRIBUTE, "")))
    if not kept:
        return zone
    resources = zone.resources or ZoneResources()
    allocatable = {**(resources.allocatable or {}), "cpu": cores_quantity(len(cpus - kept))}
    attributes = {**said, RESERVED_ATTRIBUTE: format_cpu_list(sorted(kept))}
    return msgspec.structs.replace(
        zone,
        resources=msgspec.structs.replace(resources, allocatable=allocatable),
        attributes=tuple(ZoneAttribute(name=name, value=value) for name, value in attributes.items()),
    )


def _parse_cpus(listed: str) -> tuple[int, ...]:
    return parse_cpu_list(listed) if listed else ()


def _merge_resources(
    there: ZoneResources | None, capacity: Mapping[str, float], allocatable: Mapping[str, float]
) -> ZoneResources | None:
    if not allocatable:
        return there
    there = there or ZoneResources()
    return msgspec.structs.replace(
        there,
        # The memory manager lists what is left of a node's memory: its capacity is the machine's word.
        capacity={**_quantities(capacity), **(there.capacity or {})},
        allocatable={**(there.allocatable or {}), **_quantities(allocatable)},
    )


def _merge_allocations(
    there: Iterable[ZoneAllocation], given: Mapping[str, Mapping[str, float]]
) -> tuple[ZoneAllocation, ...]:
    """What somebody was really given is more than what he asked for."""
    by_consumer = {one.consumer: dict(one.requests or {}) for one in there}
    for consumer, amounts in given.items():
        by_consumer.setdefault(consumer, {}).update(_quantities(amounts))
    return tuple(
        ZoneAllocation(consumer=consumer, requests=by_consumer[consumer] or None) for consumer in sorted(by_consumer)
    )


def _merge_attributes(there: Iterable[ZoneAttribute], new: Mapping[str, str]) -> tuple[ZoneAttribute, ...]:
    said = {**{one.name: one.value for one in there}, **new}
    return tuple(ZoneAttribute(name=name, value=value) for name, value in said.items())


def _quantities(found: Mapping[str, float]) -> ZoneAmounts:
    return {
        name: bytes_quantity(amount) if name == "memory" or name.startswith("hugepages-") else cores_quantity(amount)
        for name, amount in sorted(found.items())
    }


def _numa_key(number: int) -> ZoneKey:
    return NUMA_ZONE, str(number), NUMA_ZONE, str(number)


def _add_amount(amounts: dict[str, float], name: str, amount: float) -> None:
    amounts[name] = amounts.get(name, 0) + amount

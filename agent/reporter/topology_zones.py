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
from api.node_resources import DeviceAllocation, PodAllocation, TopologyLevel, TopologyQuantity, TopologyResource
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY, Pod
from api.qos import QoSLevel
from api.snapshot import NumaNode, Snapshot

SOCKET, NUMA, L3 = "Socket", "Numa", "L3CacheGroup"
NUMA_DISTANCE, RESERVED_CPU_LIST, CPU_LISTS = "numa_distance", "reserved_cpu_list", "cpu_lists"
"""Attribute names of Katalyst."""
_RESERVED_POOLS = ("reserve", "interrupt")
"""Pools whose CPUs no pod gets."""


def topology_zones(cycle: Cycle, reported_headroom: Headroom | None) -> tuple[TopologyZone, ...]:
    """Return one zone per socket. Only pods bound to NUMA nodes have allocations, because others have no fixed place."""
    snapshot = cycle.snapshot
    reserved = reserved_cpus(cycle)
    bound = numa_bindings(cycle)
    by_numa: dict[int, list[Cpu]] = {}
    for cpu in snapshot.topology.cpus:
        by_numa.setdefault(cpu.numa, []).append(cpu)
    sockets: dict[int, list[TopologyZone]] = {}
    for numa, cpus in sorted(by_numa.items()):
        # With memory interleaving, firmware reports one NUMA node that spans several sockets.
        zone = _numa_zone(numa, cpus, snapshot.node.numa, reserved, reported_headroom)
        allocations = tuple(_allocation(pod, nodes) for pod, nodes in bound if numa in nodes) or None
        zone = msgspec.structs.replace(zone, allocations=allocations)
        sockets.setdefault(min(cpu.socket for cpu in cpus), []).append(zone)
    return tuple(
        TopologyZone(type=SOCKET, name=str(socket), children=tuple(children))
        for socket, children in sorted(sockets.items())
    )


def reserved_cpus(cycle: Cycle) -> frozenset[int]:
    """Return the CPUs of pools that no pod gets."""
    pools = () if cycle.advice is None else cycle.advice.pools
    return frozenset(cpu for pool in pools if pool.name in _RESERVED_POOLS for cpu in pool.cpus)


def numa_bindings(cycle: Cycle) -> tuple[tuple[Pod, tuple[int, ...]], ...]:
    """Return pods with the NUMA nodes that they are bound to, by their annotation or by the advisor's regions."""
    by_region: dict[str, tuple[int, ...]] = {}
    if cycle.advice is not None:
        for advised in cycle.advice.cpu.regions:
            if advised.region.bound:
                by_region |= dict.fromkeys(advised.region.pods, advised.region.numa_nodes)
    bindings = ((pod, pod.bound_numa or by_region.get(pod.key, ())) for pod in cycle.snapshot.pods)
    return tuple(sorted(((pod, nodes) for pod, nodes in bindings if nodes), key=lambda binding: binding[0].key))


def pod_requests(pod: Pod, parts: int = 1) -> ResourceList:
    """Return the requests of a pod, divided by `parts` NUMA nodes."""
    reclaimed = pod.qos is QoSLevel.RECLAIMED
    cores = _sum_known(c.reclaimed_cpu_cores if reclaimed else c.cpu_request_cores for c in pod.containers)
    memory = _sum_known(c.reclaimed_memory_bytes if reclaimed else c.memory_request_bytes for c in pod.containers)
    amounts: dict[str, str | int] = {}
    if cores is not None:
        amounts[RECLAIMED_CPU if reclaimed else "cpu"] = (
            str(int(cores * 1000 / parts)) if reclaimed else cores_quantity(cores / parts)
        )
    if memory is not None:
        amounts[RECLAIMED_MEMORY if reclaimed else "memory"] = bytes_quantity(memory / parts)
    return amounts


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
    reclaimable = {}
    if reported_headroom is not None:
        reclaimable = reclaimed_allocatable(
            reported_headroom.cores_by_numa.get(numa), reported_headroom.memory_by_numa.get(numa)
        )
    return TopologyZone(
        type=NUMA,
        name=str(numa),
        resources=ZoneResources(
            capacity={**capacity, **reclaimable},
            allocatable={**capacity, "cpu": cores_quantity(len(cpus) - len(own)), **reclaimable},
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
    """Return the L3 caches of a NUMA node with several; None otherwise, because a single one equals the NUMA node."""
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


def _consumer(pod: Pod) -> str:
    return f"{pod.namespace}/{pod.name}/{pod.uid}"


def _allocation(pod: Pod, nodes: Collection[int]) -> ZoneAllocation:
    return ZoneAllocation(consumer=_consumer(pod), requests=pod_requests(pod, len(nodes)) or None)


def _sum_known(amounts: Iterable[float | None]) -> float | None:
    present = [amount for amount in amounts if amount is not None]
    return sum(present) if present else None


ZoneKey = tuple[str, str, str, str]
"""Parent type, parent name, type and name of a zone; sockets and NUMA nodes repeat their own type and name."""
ZoneAmounts = dict[str, Quantity]


class _PodResources:
    """Capacity, allocatable, allocations by consumer, and attributes of zones, from the pod-resources service."""

    def __init__(self) -> None:
        self.capacity: dict[ZoneKey, dict[str, float]] = {}
        self.allocatable: dict[ZoneKey, dict[str, float]] = {}
        self.allocations: dict[ZoneKey, dict[str, dict[str, float]]] = {}
        self.attributes: dict[ZoneKey, dict[str, str]] = {}

    def add(self, key: ZoneKey, name: str, amount: float, capacity: float | None = None) -> None:
        _add_amount(self.allocatable.setdefault(key, {}), name, amount)
        _add_amount(self.capacity.setdefault(key, {}), name, amount if capacity is None else capacity)

    def add_allocation(self, key: ZoneKey, consumer: str, name: str, amount: float) -> None:
        _add_amount(self.allocations.setdefault(key, {}).setdefault(consumer, {}), name, amount)


class _ZoneDevices(NamedTuple):
    zone: ZoneKey
    amount: int


def add_pod_resources(
    zones: tuple[TopologyZone, ...], snapshot: Snapshot, inputs: CnrInputs
) -> tuple[TopologyZone, ...]:
    """Return the tree with devices, memory and allocations of the pod-resources service; unchanged without its answer."""
    if inputs.node is None:
        return zones
    resources = _PodResources()
    types = inputs.zone_types
    for device in inputs.node.devices:
        for zone, amount in _devices(device, types):
            resources.add(zone, device.resource, amount)
    for memory in inputs.node.memory:
        if memory.numa_nodes:
            resources.add(_numa_key(memory.numa_nodes[0]), memory.kind, memory.bytes)
    for resource in inputs.node.resources:
        _add_topology_resource(resources, resource)
    consumers = {pod.key: _consumer(pod) for pod in snapshot.pods}
    numa_of = {cpu.id: cpu.numa for cpu in snapshot.topology.cpus}
    for pod in inputs.pods:
        # The service does not report uids: a pod that was just created or deleted is not in the snapshot.
        if pod.key in consumers:
            _add_pod(resources, pod, consumers[pod.key], numa_of, types)
    free = set(inputs.node.cpus)
    return tuple(_complete_zone(zone, None, resources, free, snapshot) for zone in zones)


def _add_pod(
    resources: _PodResources, pod: PodAllocation, consumer: str, numa_of: Mapping[int, int], types: Mapping[str, str]
) -> None:
    for container in pod.containers:
        for cpu in container.cpus:
            if cpu in numa_of:
                resources.add_allocation(_numa_key(numa_of[cpu]), consumer, "cpu", 1)
        for memory in container.memory:
            # The service reports one amount for several NUMA nodes: assume equal parts.
            for numa in memory.numa_nodes:
                resources.add_allocation(_numa_key(numa), consumer, memory.kind, memory.bytes / len(memory.numa_nodes))
        for device in container.devices:
            for zone, amount in _devices(device, types):
                resources.add_allocation(zone, consumer, device.resource, amount)
        for resource in container.resources:
            for part in resource.parts:
                resources.add_allocation(_zone_of(part), consumer, resource.name, part.value)


def _devices(device: DeviceAllocation, types: Mapping[str, str]) -> Iterator[_ZoneDevices]:
    if not device.numa_nodes:
        return
    numa = device.numa_nodes[0]
    if device.resource in types:
        yield from (_ZoneDevices((NUMA, str(numa), types[device.resource], name), 1) for name in device.ids)
    else:
        yield _ZoneDevices(_numa_key(numa), len(device.ids))


def _add_topology_resource(resources: _PodResources, resource: TopologyResource) -> None:
    capacity = {_zone_of(part): part.value for part in resource.capacity_parts}
    for part in resource.parts:
        zone = _zone_of(part)
        resources.add(zone, resource.name, part.value, capacity.get(zone))
        if part.kind:
            resources.attributes.setdefault(zone, {}).update(part.annotations)


def _zone_of(part: TopologyQuantity) -> ZoneKey:
    level, number = NUMA if part.level is TopologyLevel.NUMA else SOCKET, str(part.node)
    return (level, number, part.kind, part.name) if part.kind else (level, number, level, number)


def _complete_zone(
    zone: TopologyZone, parent: TopologyZone | None, resources: _PodResources, free: set[int], snapshot: Snapshot
) -> TopologyZone:
    """Return the zone with its pod resources and with child zones that exist only there, such as devices."""
    own = zone.type in (SOCKET, NUMA)
    above = zone if own or parent is None else parent
    key = (above.type, above.name, zone.type, zone.name)
    children = [_complete_zone(child, zone, resources, free, snapshot) for child in zone.children or ()]
    if own:
        present = {(child.type, child.name) for child in children}
        reported = {other[2:] for other in resources.allocatable if other[:2] == key[:2] and other[2:] != key[2:]}
        children += [
            _complete_zone(TopologyZone(type=kind, name=name), zone, resources, free, snapshot)
            for kind, name in sorted(reported - present)
        ]
    zone = msgspec.structs.replace(
        zone,
        resources=_merge_resources(zone.resources, resources.capacity.get(key, {}), resources.allocatable.get(key, {})),
        allocations=_merge_allocations(zone.allocations or (), resources.allocations.get(key, {})) or None,
        attributes=_merge_attributes(zone.attributes or (), resources.attributes.get(key, {})) or None,
        children=tuple(children) or None,
    )
    return _without_reserved_cpus(zone, snapshot, free) if zone.type == NUMA and free else zone


def _without_reserved_cpus(zone: TopologyZone, snapshot: Snapshot, free: set[int]) -> TopologyZone:
    """Return the zone without the CPUs that the kubelet or the agent reserves."""
    cpus = {cpu.id for cpu in snapshot.topology.cpus if str(cpu.numa) == zone.name}
    attributes = {attribute.name: attribute.value for attribute in zone.attributes or ()}
    reserved = cpus - free | set(_parse_cpus(attributes.get(RESERVED_CPU_LIST, "")))
    if not reserved:
        return zone
    resources = zone.resources or ZoneResources()
    allocatable = {**(resources.allocatable or {}), "cpu": cores_quantity(len(cpus - reserved))}
    reserved_list = {RESERVED_CPU_LIST: format_cpu_list(sorted(reserved))}
    return msgspec.structs.replace(
        zone,
        resources=msgspec.structs.replace(resources, allocatable=allocatable),
        attributes=_merge_attributes(zone.attributes or (), reserved_list),
    )


def _parse_cpus(listed: str) -> tuple[int, ...]:
    return parse_cpu_list(listed) if listed else ()


def _merge_resources(
    current: ZoneResources | None, capacity: Mapping[str, float], allocatable: Mapping[str, float]
) -> ZoneResources | None:
    if not allocatable:
        return current
    current = current or ZoneResources()
    return msgspec.structs.replace(
        current,
        # The kubelet's memory manager lists the allocatable memory of a NUMA node; its capacity comes from /sys.
        capacity={**_quantities(capacity), **(current.capacity or {})},
        allocatable={**(current.allocatable or {}), **_quantities(allocatable)},
    )


def _merge_allocations(
    current: Iterable[ZoneAllocation], added: Mapping[str, Mapping[str, float]]
) -> tuple[ZoneAllocation, ...]:
    """Return allocations by consumer; amounts that were really allocated replace requested ones."""
    by_consumer = {allocation.consumer: dict(allocation.requests or {}) for allocation in current}
    for consumer, amounts in added.items():
        by_consumer.setdefault(consumer, {}).update(_quantities(amounts))
    return tuple(
        ZoneAllocation(consumer=consumer, requests=by_consumer[consumer] or None) for consumer in sorted(by_consumer)
    )


def _merge_attributes(current: Iterable[ZoneAttribute], added: Mapping[str, str]) -> tuple[ZoneAttribute, ...]:
    values = {**{attribute.name: attribute.value for attribute in current}, **added}
    return tuple(ZoneAttribute(name=name, value=value) for name, value in values.items())


def _quantities(amounts: Mapping[str, float]) -> ZoneAmounts:
    return {
        name: bytes_quantity(amount) if name == "memory" or name.startswith("hugepages-") else cores_quantity(amount)
        for name, amount in sorted(amounts.items())
    }


def _numa_key(number: int) -> ZoneKey:
    return NUMA, str(number), NUMA, str(number)


def _add_amount(amounts: dict[str, float], name: str, amount: float) -> None:
    amounts[name] = amounts.get(name, 0) + amount

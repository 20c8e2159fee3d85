"""What the pod-resources service says, laid into the tree of zones: devices, huge pages, CPUs that one container has alone.

Amounts of a NUMA node are those of what is near it alone; what is near several is at the first of them, as its zone is. What is
near none belongs to no zone, and is the Node's to count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from agent.report.amounts import bytes_of, cores_of
from agent.report.beside import Beside
from api.cpus import format_cpu_list, parse_cpu_list
from api.crds.meta import Quantity
from api.crds.node import Allocation, Attribute, Resources, TopologyZone
from api.pod_resources import DeviceShare, Level, PodShare, TopologyQuantity, TopologyResource
from api.samples import Snapshot

SOCKET, NUMA = "Socket", "Numa"
RESERVED = "reserved_cpu_list"
Key = tuple[str, str, str, str]
"""Of a zone: its parent's type and name, and its own; of a socket or a NUMA node its own twice."""
Amounts = dict[str, Quantity]


class _Found:
    """By zone: what it has, what can be had of it, and who has some."""

    def __init__(self) -> None:
        self.capacity: dict[Key, dict[str, float]] = {}
        self.allocatable: dict[Key, dict[str, float]] = {}
        self.given: dict[Key, dict[str, dict[str, float]]] = {}
        self.attributes: dict[Key, dict[str, str]] = {}

    def has(self, key: Key, name: str, amount: float, whole: float | None = None) -> None:
        _add(self.allocatable.setdefault(key, {}), name, amount)
        _add(self.capacity.setdefault(key, {}), name, amount if whole is None else whole)

    def gave(self, key: Key, consumer: str, name: str, amount: float) -> None:
        _add(self.given.setdefault(key, {}).setdefault(consumer, {}), name, amount)


class _Device(NamedTuple):
    zone: Key
    amount: int


def with_shares(zones: tuple[TopologyZone, ...], snapshot: Snapshot, beside: Beside) -> tuple[TopologyZone, ...]:
    """The tree with it; as it came where nobody was asked, or nothing is known."""
    if beside.node is None:
        return zones
    found = _Found()
    types = beside.zone_types
    for device in beside.node.devices:
        for zone, amount in _devices(device, types):
            found.has(zone, device.resource, amount)
    for memory in beside.node.memory:
        if memory.numa_nodes:
            found.has(_node(memory.numa_nodes[0]), memory.kind, memory.bytes)
    for resource in beside.node.resources:
        _parts(found, resource)
    uids = {pod.key: f"{pod.namespace}/{pod.name}/{pod.uid}" for pod in snapshot.pods}
    numa_of = {cpu.id: cpu.numa for cpu in snapshot.topology.cpus}
    for pod in beside.pods:
        # Of a pod that is not listed nobody knows the uid: it has just come, or just gone.
        if pod.key in uids:
            _pod(found, pod, uids[pod.key], numa_of, types)
    free = set(beside.node.cpus)
    return tuple(_zone(zone, None, found, free, snapshot) for zone in zones)


def _pod(found: _Found, pod: PodShare, consumer: str, numa_of: Mapping[int, int], types: Mapping[str, str]) -> None:
    for container in pod.containers:
        for cpu in container.cpus:
            if cpu in numa_of:
                found.gave(_node(numa_of[cpu]), consumer, "cpu", 1)
        for memory in container.memory:
            # What is given of several nodes at once is not told apart.
            for numa in memory.numa_nodes:
                found.gave(_node(numa), consumer, memory.kind, memory.bytes / len(memory.numa_nodes))
        for device in container.devices:
            for zone, amount in _devices(device, types):
                found.gave(zone, consumer, device.resource, amount)
        for resource in container.resources:
            for part in resource.parts:
                found.gave(_place(part), consumer, resource.name, part.value)


def _devices(device: DeviceShare, types: Mapping[str, str]) -> Iterator[_Device]:
    if not device.numa_nodes:
        return
    near = str(device.numa_nodes[0])
    if device.resource in types:
        yield from (_Device((NUMA, near, types[device.resource], name), 1) for name in device.ids)
    else:
        yield _Device(_node(device.numa_nodes[0]), len(device.ids))


def _parts(found: _Found, resource: TopologyResource) -> None:
    whole = {_place(part): part.value for part in resource.whole_parts}
    for part in resource.parts:
        zone = _place(part)
        found.has(zone, resource.name, part.value, whole.get(zone))
        if part.kind:
            found.attributes.setdefault(zone, {}).update(part.annotations)


def _place(part: TopologyQuantity) -> Key:
    near = NUMA if part.level is Level.NUMA else SOCKET
    return (near, str(part.node), part.kind, part.name) if part.kind else (near, str(part.node), near, str(part.node))


def _zone(
    zone: TopologyZone, parent: TopologyZone | None, found: _Found, free: set[int], snapshot: Snapshot
) -> TopologyZone:
    own = zone.type in (SOCKET, NUMA)
    key = (
        (zone.type, zone.name, zone.type, zone.name)
        if own or parent is None
        else (parent.type, parent.name, zone.type, zone.name)
    )
    children = [_zone(child, zone, found, free, snapshot) for child in zone.children or ()]
    if own:
        there = {(child.type, child.name) for child in children}
        new = {key_[2:] for key_ in found.allocatable if key_[:2] == key[:2] and key_[2:] != key[2:]}
        children += [
            _zone(TopologyZone(type=kind, name=name), zone, found, free, snapshot) for kind, name in sorted(new - there)
        ]
    zone = msgspec.structs.replace(
        zone,
        resources=_resources(zone.resources, found.capacity.get(key, {}), found.allocatable.get(key, {})),
        allocations=_allocations(zone.allocations or (), found.given.get(key, {})) or None,
        attributes=_attributes(zone.attributes or (), found.attributes.get(key, {})) or None,
        children=tuple(children) or None,
    )
    return _reserved(zone, snapshot, free) if zone.type == NUMA and free else zone


def _reserved(zone: TopologyZone, snapshot: Snapshot, free: set[int]) -> TopologyZone:
    """Without the CPUs that the kubelet gives to nobody, beside those that we keep."""
    cpus = {cpu.id for cpu in snapshot.topology.cpus if str(cpu.numa) == zone.name}
    said = {one.name: one.value for one in zone.attributes or ()}
    kept = cpus - free | set(_cpus(said.get(RESERVED, "")))
    if not kept:
        return zone
    resources = zone.resources or Resources()
    allocatable = {**(resources.allocatable or {}), "cpu": cores_of(len(cpus - kept))}
    attributes = {**said, RESERVED: format_cpu_list(sorted(kept))}
    return msgspec.structs.replace(
        zone,
        resources=msgspec.structs.replace(resources, allocatable=allocatable),
        attributes=tuple(Attribute(name=name, value=value) for name, value in attributes.items()),
    )


def _cpus(listed: str) -> tuple[int, ...]:
    return parse_cpu_list(listed) if listed else ()


def _resources(
    there: Resources | None, capacity: Mapping[str, float], allocatable: Mapping[str, float]
) -> Resources | None:
    if not allocatable:
        return there
    there = there or Resources()
    return msgspec.structs.replace(
        there,
        # The memory manager lists what is left of a node's memory: its capacity is the machine's word.
        capacity={**_amounts(capacity), **(there.capacity or {})},
        allocatable={**(there.allocatable or {}), **_amounts(allocatable)},
    )


def _allocations(there: Iterable[Allocation], given: Mapping[str, Mapping[str, float]]) -> tuple[Allocation, ...]:
    """What somebody was really given is more than what he asked for."""
    by_consumer = {one.consumer: dict(one.requests or {}) for one in there}
    for consumer, amounts in given.items():
        by_consumer.setdefault(consumer, {}).update(_amounts(amounts))
    return tuple(
        Allocation(consumer=consumer, requests=by_consumer[consumer] or None) for consumer in sorted(by_consumer)
    )


def _attributes(there: Iterable[Attribute], new: Mapping[str, str]) -> tuple[Attribute, ...]:
    said = {**{one.name: one.value for one in there}, **new}
    return tuple(Attribute(name=name, value=value) for name, value in said.items())


def _amounts(found: Mapping[str, float]) -> Amounts:
    return {
        name: bytes_of(amount) if name == "memory" or name.startswith("hugepages-") else cores_of(amount)
        for name, amount in sorted(found.items())
    }


def _node(number: int) -> Key:
    return NUMA, str(number), NUMA, str(number)


def _add(amounts: dict[str, float], name: str, amount: float) -> None:
    amounts[name] = amounts.get(name, 0) + amount

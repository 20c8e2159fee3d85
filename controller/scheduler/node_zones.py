"""NUMA nodes of one node as its CustomNodeResource reports them: amounts, sockets, and the pods that have them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from api.text import quote
from controller.scheduler.numa_topology import TopologyPolicy, parse_topology_policy
from controller.scheduler.scheduler_kinds import CnrZone
from controller.scheduler.scheduling_pod import CPU, MEMORY, Amounts, amounts_of

MAX_ZONES = 8
"""A kubelet does not align on machines with more NUMA nodes (pkg/kubelet/cm/topologymanager, maxAllowableNUMANodes)."""
MAX_DEPTH = 8
NUMA_TYPE, SOCKET_TYPE = "Numa", "Socket"
ALIGNED_RESOURCES = (CPU, MEMORY)


class ZoneShare(NamedTuple):
    """Part of a zone that one pod has."""

    zone: int
    amounts: Amounts


class NodeZones(NamedTuple):
    """Zones of one node, in the order of their numbers."""

    capacity: tuple[Amounts, ...]
    allocatable: tuple[Amounts, ...]
    sockets: tuple[int, ...]
    reported: tuple[bool, bool]
    """Whether some zone reports CPU, and memory."""
    consumers: dict[str, list[ZoneShare]]
    """What pods have, by their uid."""
    policy: TopologyPolicy
    pod_level: bool


def parse_node_zones(zones: Sequence[CnrZone], policy: str) -> NodeZones | None:
    """Return the NUMA nodes among the zones; None without any. Raises ValueError that names the field."""
    numa_zones = sorted(_numa_zones(zones, 0, 0), key=lambda each: each.number)
    if not numa_zones:
        return None
    numbers = [number for number, _, _ in numa_zones]
    if len(set(numbers)) < len(numbers) or len(numbers) > MAX_ZONES:
        raise ValueError(
            f"status.topologyZone: has the NUMA nodes {numbers[:20]}; at most {MAX_ZONES} different ones are supported"
        )
    capacity, allocatable, consumers = list[Amounts](), list[Amounts](), dict[str, list[ZoneShare]]()
    listed: set[str] = set()
    for index, (_, _, zone) in enumerate(numa_zones):
        offers = {} if zone.resources is None else dict(zone.resources.allocatable or {})
        total = offers if zone.resources is None or not zone.resources.capacity else zone.resources.capacity
        listed.update(total)
        allocatable.append(_amounts(zone, "allocatable", offers))
        capacity.append(_amounts(zone, "capacity", total))
        for allocation in zone.allocations or ():
            # namespace/name/uid (pkg/util/native/object.go, GenerateUniqObjectUIDKey)
            uid = allocation.consumer.rpartition("/")[2]
            share = ZoneShare(index, _amounts(zone, "allocations", allocation.requests or {}))
            consumers.setdefault(uid, []).append(share)
    kind, pod_level = parse_topology_policy(policy)
    return NodeZones(
        tuple(capacity), tuple(allocatable), tuple(socket for _, socket, _ in numa_zones),
        (CPU in listed, MEMORY in listed), consumers, kind, pod_level,
    )  # fmt: skip


class _NumaZone(NamedTuple):
    number: int
    socket: int
    zone: CnrZone


def _numa_zones(zones: Iterable[CnrZone], socket: int, depth: int) -> Iterator[_NumaZone]:
    if depth > MAX_DEPTH:
        return
    for zone in zones:
        if zone.type == NUMA_TYPE:
            yield _NumaZone(_number(zone), socket, zone)
        elif zone.children:
            inside = _number(zone) if zone.type == SOCKET_TYPE else socket
            yield from _numa_zones(zone.children, inside, depth + 1)


def _number(zone: CnrZone) -> int:
    if not (zone.name.isascii() and zone.name.isdigit() and len(zone.name) <= 6):
        raise ValueError(
            f"status.topologyZone: {zone.type} {quote(zone.name)}: its name is no number; write one such as 0"
        )
    return int(zone.name)


def _amounts(zone: CnrZone, field: str, listed: Mapping[str, Any]) -> Amounts:
    try:
        return amounts_of(listed, *ALIGNED_RESOURCES, 1000)
    except (ValueError, TypeError) as error:
        raise ValueError(f"status.topologyZone: {zone.type} {zone.name}: {field}: {error}") from None

"""The pod-resources service of a kubelet or of Katalyst's ORM, asked: who has which CPUs, memory and devices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agent.rpc import NotOffered, Peer, Refused
from api.cpus import MAX_CPU
from api.pod_resources import (
    ContainerShare,
    DeviceShare,
    Level,
    MemoryShare,
    NodeShare,
    PodShare,
    TopologyQuantity,
    TopologyResource,
)
from api.ports import Unavailable
from api.proto import pod_resources_pb2 as wire

KUBELET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
MAX_NODE = 1023
"""MAX_NUMNODES of the largest kernels, less one."""
_LEVELS = {wire.NUMA: Level.NUMA, wire.SOCKET: Level.SOCKET}


class PodResources:
    """One such service."""

    def __init__(self, path: Path = KUBELET) -> None:
        self._path = path
        self._peer = Peer(path, wire.DESCRIPTOR.services_by_name["PodResourcesLister"])

    async def pods(self) -> tuple[PodShare, ...]:
        """Every pod that has something. Raises Unavailable where that cannot be had now, or makes no sense."""
        answer = await self._peer.call("List", wire.ListPodResourcesRequest())
        return tuple(self._pod(pod, f"pod_resources[{index}]") for index, pod in enumerate(answer.pod_resources))

    async def node(self) -> NodeShare | None:
        """What the node can give; None of a kubelet that does not say (its feature is off). Raises as `pods`."""
        try:
            answer = await self._peer.call("GetAllocatableResources", wire.AllocatableResourcesRequest())
        except (NotOffered, Refused):
            return None
        return NodeShare(
            cpus=self._cpus(answer.cpu_ids, "cpu_ids"),
            memory=self._memory(answer.memory, "memory"),
            devices=self._devices(answer.devices, "devices"),
            resources=tuple(self._allocatable(one, f"resources[{i}]") for i, one in enumerate(answer.resources)),
        )

    async def close(self) -> None:
        """Idempotent."""
        await self._peer.close()

    def _pod(self, pod: Any, field: str) -> PodShare:
        return PodShare(
            namespace=pod.namespace,
            name=pod.name,
            role=pod.pod_role,
            kind=pod.pod_type,
            labels=dict(pod.labels),
            annotations=dict(pod.annotations),
            containers=tuple(self._container(one, f"{field}.containers[{i}]") for i, one in enumerate(pod.containers)),
        )

    def _container(self, container: Any, field: str) -> ContainerShare:
        return ContainerShare(
            name=container.name,
            cpus=self._cpus(container.cpu_ids, f"{field}.cpu_ids"),
            memory=self._memory(container.memory, f"{field}.memory"),
            devices=self._devices(container.devices, f"{field}.devices"),
            resources=tuple(self._given(one, f"{field}.resources[{i}]") for i, one in enumerate(container.resources)),
        )

    def _cpus(self, ids: Iterable[int], field: str) -> tuple[int, ...]:
        cpus = tuple(sorted(set(ids)))
        if cpus and not 0 <= cpus[0] <= cpus[-1] <= MAX_CPU:
            raise self._nonsense(field, f"CPU {cpus[0] if cpus[0] < 0 else cpus[-1]}")
        return cpus

    def _memory(self, listed: Iterable[Any], field: str) -> tuple[MemoryShare, ...]:
        return tuple(
            MemoryShare(kind=one.memory_type, bytes=one.size, numa_nodes=self._nodes(one.topology, field))
            for one in listed
        )

    def _devices(self, listed: Iterable[Any], field: str) -> tuple[DeviceShare, ...]:
        return tuple(
            DeviceShare(
                resource=one.resource_name, ids=tuple(one.device_ids), numa_nodes=self._nodes(one.topology, field)
            )
            for one in listed
        )

    def _nodes(self, topology: Any, field: str) -> tuple[int, ...]:
        nodes = tuple(sorted({node.ID for node in topology.nodes}))
        if nodes and not 0 <= nodes[0] <= nodes[-1] <= MAX_NODE:
            raise self._nonsense(f"{field}.topology", f"NUMA node {nodes[0] if nodes[0] < 0 else nodes[-1]}")
        return nodes

    def _given(self, one: Any, field: str) -> TopologyResource:
        return TopologyResource(
            name=one.resource_name,
            total=self._number(one.aggregated_quantity, field),
            parts=self._parts(one.topology_aware_quantity_list, field),
            whole_total=self._number(one.original_aggregated_quantity, field),
            whole_parts=self._parts(one.original_topology_aware_quantity_list, field),
            node_resource=one.is_node_resource,
            scalar=one.is_scalar_resource,
        )

    def _allocatable(self, one: Any, field: str) -> TopologyResource:
        return TopologyResource(
            name=one.resource_name,
            total=self._number(one.aggregated_allocatable_quantity, field),
            parts=self._parts(one.topology_aware_allocatable_quantity_list, field),
            whole_total=self._number(one.aggregated_capacity_quantity, field),
            whole_parts=self._parts(one.topology_aware_capacity_quantity_list, field),
            node_resource=one.is_node_resource,
            scalar=one.is_scalar_resource,
        )

    def _parts(self, listed: Iterable[Any], field: str) -> tuple[TopologyQuantity, ...]:
        found = []
        for one in listed:
            if one.node > MAX_NODE or one.topology_level not in _LEVELS:
                raise self._nonsense(field, f"node {one.node} of topology_level {one.topology_level}")
            found.append(
                TopologyQuantity(
                    value=self._number(one.resource_value, field),
                    node=one.node,
                    level=_LEVELS[one.topology_level],
                    name=one.name,
                    kind=one.type,
                    annotations=dict(one.annotations),
                )
            )
        return tuple(found)

    def _number(self, value: float, field: str) -> float:
        if not math.isfinite(value) or value < 0:
            raise self._nonsense(field, repr(value))
        return value

    def _nonsense(self, field: str, what: str) -> Unavailable:
        return Unavailable(f"{self._path}: {field} says {what}", "see which version serves that socket")

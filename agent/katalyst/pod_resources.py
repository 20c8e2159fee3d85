"""Client and server of the pod-resources service: CPUs, memory and devices of each pod by NUMA node.
The client queries a kubelet or Katalyst's ORM. The server replaces the ORM and includes the devices that the kubelet
reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from agent.katalyst.messages import CPU, MEMORY
from agent.katalyst.resource_plugin import ResourcePluginServer
from api.cpu import MAX_CPU
from api.interfaces import Unavailable
from api.node_resources import (
    ContainerAllocation,
    DeviceAllocation,
    MemoryAllocation,
    NodeAllocatable,
    PodAllocation,
    TopologyLevel,
    TopologyQuantity,
    TopologyResource,
)
from api.proto import pod_resources_pb2 as wire
from api.text import quote
from common.grpc_unix import CallRefused, GrpcClient, GrpcService, MethodNotOffered

KUBELET_POD_RESOURCES = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
MAX_NUMA_NODE = 1023
"""Highest node number of a kernel with the largest MAX_NUMNODES (NODES_SHIFT 10)."""
_LEVELS = {wire.NUMA: TopologyLevel.NUMA, wire.SOCKET: TopologyLevel.SOCKET}


class PodResourcesListerClient:
    """Client of one pod-resources socket."""

    def __init__(self, path: Path = KUBELET_POD_RESOURCES) -> None:
        self._path = path
        self._peer = GrpcClient(path, wire.DESCRIPTOR.services_by_name["PodResourcesLister"])

    async def pods(self) -> tuple[PodAllocation, ...]:
        """Return the pods with allocations. Raises Unavailable if the call fails or the answer is invalid."""
        answer = await self._peer.call("List", wire.ListPodResourcesRequest())
        return tuple(self._pod(pod, f"pod_resources[{index}]") for index, pod in enumerate(answer.pod_resources))

    async def node(self) -> NodeAllocatable | None:
        """Return allocatable resources; None if the kubelet does not offer the call. Raises Unavailable like `pods`."""
        try:
            answer = await self._peer.call("GetAllocatableResources", wire.AllocatableResourcesRequest())
        except (MethodNotOffered, CallRefused):
            return None
        return NodeAllocatable(
            cpus=self._cpus(answer.cpu_ids, "cpu_ids"),
            memory=self._memory(answer.memory, "memory"),
            devices=self._devices(answer.devices, "devices"),
            resources=tuple(self._allocatable(item, f"resources[{i}]") for i, item in enumerate(answer.resources)),
        )

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        await self._peer.close()

    def _pod(self, pod: Any, field: str) -> PodAllocation:
        return PodAllocation(
            namespace=pod.namespace,
            name=pod.name,
            role=pod.pod_role,
            kind=pod.pod_type,
            labels=dict(pod.labels),
            annotations=dict(pod.annotations),
            containers=tuple(
                self._container(item, f"{field}.containers[{i}]") for i, item in enumerate(pod.containers)
            ),
        )

    def _container(self, container: Any, field: str) -> ContainerAllocation:
        return ContainerAllocation(
            name=container.name,
            cpus=self._cpus(container.cpu_ids, f"{field}.cpu_ids"),
            memory=self._memory(container.memory, f"{field}.memory"),
            devices=self._devices(container.devices, f"{field}.devices"),
            resources=tuple(
                self._allocation(item, f"{field}.resources[{i}]") for i, item in enumerate(container.resources)
            ),
        )

    def _cpus(self, ids: Iterable[int], field: str) -> tuple[int, ...]:
        cpus = tuple(sorted(set(ids)))
        if cpus and not 0 <= cpus[0] <= cpus[-1] <= MAX_CPU:
            raise self._nonsense(field, f"CPU {cpus[0] if cpus[0] < 0 else cpus[-1]}")
        return cpus

    def _memory(self, listed: Iterable[Any], field: str) -> tuple[MemoryAllocation, ...]:
        return tuple(
            MemoryAllocation(kind=item.memory_type, bytes=item.size, numa_nodes=self._nodes(item.topology, field))
            for item in listed
        )

    def _devices(self, listed: Iterable[Any], field: str) -> tuple[DeviceAllocation, ...]:
        return tuple(
            DeviceAllocation(
                resource=item.resource_name, ids=tuple(item.device_ids), numa_nodes=self._nodes(item.topology, field)
            )
            for item in listed
        )

    def _nodes(self, topology: Any, field: str) -> tuple[int, ...]:
        nodes = tuple(sorted({node.ID for node in topology.nodes}))
        if nodes and not 0 <= nodes[0] <= nodes[-1] <= MAX_NUMA_NODE:
            raise self._nonsense(f"{field}.topology", f"NUMA node {nodes[0] if nodes[0] < 0 else nodes[-1]}")
        return nodes

    def _allocation(self, item: Any, field: str) -> TopologyResource:
        return TopologyResource(
            name=item.resource_name,
            total=self._number(item.aggregated_quantity, field),
            parts=self._parts(item.topology_aware_quantity_list, field),
            capacity_total=self._number(item.original_aggregated_quantity, field),
            capacity_parts=self._parts(item.original_topology_aware_quantity_list, field),
        )

    def _allocatable(self, item: Any, field: str) -> TopologyResource:
        return TopologyResource(
            name=item.resource_name,
            total=self._number(item.aggregated_allocatable_quantity, field),
            parts=self._parts(item.topology_aware_allocatable_quantity_list, field),
            capacity_total=self._number(item.aggregated_capacity_quantity, field),
            capacity_parts=self._parts(item.topology_aware_capacity_quantity_list, field),
        )

    def _parts(self, listed: Iterable[Any], field: str) -> tuple[TopologyQuantity, ...]:
        parts = []
        for item in listed:
            if item.node > MAX_NUMA_NODE or item.topology_level not in _LEVELS:
                raise self._nonsense(field, f"node {item.node} of topology_level {item.topology_level}")
            parts.append(
                TopologyQuantity(
                    value=self._number(item.resource_value, field),
                    node=item.node,
                    level=_LEVELS[item.topology_level],
                    name=item.name,
                    kind=item.type,
                    annotations=dict(item.annotations),
                )
            )
        return tuple(parts)

    def _number(self, value: float, field: str) -> float:
        if not math.isfinite(value) or value < 0:
            raise self._nonsense(field, quote(value))
        return value

    def _nonsense(self, field: str, what: str) -> Unavailable:
        return Unavailable(
            f"{self._path}: {field} is invalid: {what}", "check the version of the server of that socket"
        )


_LISTER = wire.DESCRIPTOR.services_by_name["PodResourcesLister"]
_KUBELET_TIMEOUT_S = 2.0
"""Deadline of a call to the kubelet; clients of this service poll every few seconds."""


class PodResourcesServer:
    """Answers from the latest cycle, which `plugin` holds."""

    def __init__(self, plugin: ResourcePluginServer, kubelet: Path = KUBELET_POD_RESOURCES) -> None:
        self._plugin, self._kubelet = plugin, kubelet
        self.problem: Unavailable | None = None
        """Why devices are unknown; None if the kubelet answers or has no socket."""

    def service(self) -> GrpcService:
        return GrpcService(_LISTER, {"List": self._list, "GetAllocatableResources": self._node})

    async def _list(self, _request: Any, _metadata: Mapping[str, str]) -> Any:
        answer = wire.ListPodResourcesResponse()
        pods = self._plugin.listed()
        from_kubelet = await self._query("List", wire.ListPodResourcesRequest(), wire.ListPodResourcesResponse)
        devices = {
            (pod.namespace, pod.name, container.name): container.devices
            for pod in from_kubelet.pod_resources
            for container in pod.containers
        }
        for pod in pods:
            entry = answer.pod_resources.add(name=pod.name, namespace=pod.namespace)
            entry.labels.update(pod.labels)
            entry.annotations.update(pod.annotations)
            for container in pod.containers:
                resources = entry.containers.add(name=container.name)
                resources.devices.extend(devices.get((pod.namespace, pod.name, container.name), ()))
                for resource in (CPU, MEMORY):
                    amounts = self._plugin.allocated(resource, pod.uid, container.name)
                    if amounts is not None:
                        resources.resources.append(_copy_amounts(amounts, wire.TopologyAwareResource, resource))
        return answer

    async def _node(self, _request: Any, _metadata: Mapping[str, str]) -> Any:
        resources = [
            _copy_amounts(self._plugin.allocatable(resource), wire.AllocatableTopologyAwareResource, resource)
            for resource in (CPU, MEMORY)
        ]
        from_kubelet = await self._query(
            "GetAllocatableResources", wire.AllocatableResourcesRequest(), wire.AllocatableResourcesResponse
        )
        return wire.AllocatableResourcesResponse(devices=from_kubelet.devices, resources=resources)

    async def _query(self, method: str, request: Any, empty: Callable[[], Any]) -> Any:
        """Return the kubelet's answer, or an empty one if it cannot be reached."""
        if not self._kubelet.exists():
            self.problem = None
            return empty()
        client = GrpcClient(self._kubelet, _LISTER, timeout_s=_KUBELET_TIMEOUT_S)
        try:
            answer = await client.call(method, request)
        except Unavailable as error:
            self.problem = error
            return empty()
        finally:
            await client.close()
        self.problem = None
        return answer


def _copy_amounts(amounts: Any, kind: Callable[..., Any], resource: str) -> Any:
    """Copy amounts to the other protocol, which has the same field names, and add the resource name."""
    copy = kind(resource_name=resource)
    for field, value in amounts.ListFields():
        if field.is_repeated:
            for item in value:
                getattr(copy, field.name).add(resource_value=item.resource_value, node=item.node)
        else:
            setattr(copy, field.name, value)
    return copy

"""Client and server of the pod-resources service: CPUs, memory and devices of each pod by NUMA node.
The client asks a kubelet or Katalyst's ORM. The server stands in for the ORM and repeats the devices that the
kubelet reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from agent.katalyst.admission import CPU, MEMORY
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
from common.grpc_unix import CallRefused, GrpcClient, GrpcService, MethodNotOffered

KUBELET_POD_RESOURCES = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
MAX_NUMA_NODE = 1023
"""MAX_NUMNODES of the largest kernels, less one."""
_LEVELS = {wire.NUMA: TopologyLevel.NUMA, wire.SOCKET: TopologyLevel.SOCKET}


class PodResourcesListerClient:
    """One such service."""

    def __init__(self, path: Path = KUBELET_POD_RESOURCES) -> None:
        self._path = path
        self._peer = GrpcClient(path, wire.DESCRIPTOR.services_by_name["PodResourcesLister"])

    async def pods(self) -> tuple[PodAllocation, ...]:
        """Every pod that has something. Raises Unavailable where that cannot be had now, or makes no sense."""
        answer = await self._peer.call("List", wire.ListPodResourcesRequest())
        return tuple(self._pod(pod, f"pod_resources[{index}]") for index, pod in enumerate(answer.pod_resources))

    async def node(self) -> NodeAllocatable | None:
        """What the node can give; None of a kubelet that does not say (its feature is off). Raises as `pods`."""
        try:
            answer = await self._peer.call("GetAllocatableResources", wire.AllocatableResourcesRequest())
        except (MethodNotOffered, CallRefused):
            return None
        return NodeAllocatable(
            cpus=self._cpus(answer.cpu_ids, "cpu_ids"),
            memory=self._memory(answer.memory, "memory"),
            devices=self._devices(answer.devices, "devices"),
            resources=tuple(self._allocatable(one, f"resources[{i}]") for i, one in enumerate(answer.resources)),
        )

    async def close(self) -> None:
        """Idempotent."""
        await self._peer.close()

    def _pod(self, pod: Any, field: str) -> PodAllocation:
        return PodAllocation(
            namespace=pod.namespace,
            name=pod.name,
            role=pod.pod_role,
            kind=pod.pod_type,
            labels=dict(pod.labels),
            annotations=dict(pod.annotations),
            containers=tuple(self._container(one, f"{field}.containers[{i}]") for i, one in enumerate(pod.containers)),
        )

    def _container(self, container: Any, field: str) -> ContainerAllocation:
        return ContainerAllocation(
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

    def _memory(self, listed: Iterable[Any], field: str) -> tuple[MemoryAllocation, ...]:
        return tuple(
            MemoryAllocation(kind=one.memory_type, bytes=one.size, numa_nodes=self._nodes(one.topology, field))
            for one in listed
        )

    def _devices(self, listed: Iterable[Any], field: str) -> tuple[DeviceAllocation, ...]:
        return tuple(
            DeviceAllocation(
                resource=one.resource_name, ids=tuple(one.device_ids), numa_nodes=self._nodes(one.topology, field)
            )
            for one in listed
        )

    def _nodes(self, topology: Any, field: str) -> tuple[int, ...]:
        nodes = tuple(sorted({node.ID for node in topology.nodes}))
        if nodes and not 0 <= nodes[0] <= nodes[-1] <= MAX_NUMA_NODE:
            raise self._nonsense(f"{field}.topology", f"NUMA node {nodes[0] if nodes[0] < 0 else nodes[-1]}")
        return nodes

    def _given(self, one: Any, field: str) -> TopologyResource:
        return TopologyResource(
            name=one.resource_name,
            total=self._number(one.aggregated_quantity, field),
            parts=self._parts(one.topology_aware_quantity_list, field),
            capacity_total=self._number(one.original_aggregated_quantity, field),
            capacity_parts=self._parts(one.original_topology_aware_quantity_list, field),
        )

    def _allocatable(self, one: Any, field: str) -> TopologyResource:
        return TopologyResource(
            name=one.resource_name,
            total=self._number(one.aggregated_allocatable_quantity, field),
            parts=self._parts(one.topology_aware_allocatable_quantity_list, field),
            capacity_total=self._number(one.aggregated_capacity_quantity, field),
            capacity_parts=self._parts(one.topology_aware_capacity_quantity_list, field),
        )

    def _parts(self, listed: Iterable[Any], field: str) -> tuple[TopologyQuantity, ...]:
        found = []
        for one in listed:
            if one.node > MAX_NUMA_NODE or one.topology_level not in _LEVELS:
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


_LISTER = wire.DESCRIPTOR.services_by_name["PodResourcesLister"]
_KUBELET_TIMEOUT_S = 2.0
"""For a kubelet; whoever asks here does so every few seconds."""


class PodResourcesServer:
    """Answers from what rounds saw, which `desk` has."""

    def __init__(self, desk: ResourcePluginServer, kubelet: Path = KUBELET_POD_RESOURCES) -> None:
        self._desk, self._kubelet = desk, kubelet
        self.problem: Unavailable | None = None
        """Why devices are not known; None where they are, or where there is no kubelet."""

    def service(self) -> GrpcService:
        return GrpcService(_LISTER, {"List": self._list, "GetAllocatableResources": self._node})

    async def _list(self, _request: Any, _words: Mapping[str, str]) -> Any:
        answer = wire.ListPodResourcesResponse()
        pods = self._desk.listed()
        said = await self._ask("List", wire.ListPodResourcesRequest(), wire.ListPodResourcesResponse)
        devices = {
            (pod.namespace, pod.name, container.name): container.devices
            for pod in said.pod_resources
            for container in pod.containers
        }
        for pod in pods:
            made = answer.pod_resources.add(name=pod.name, namespace=pod.namespace)
            made.labels.update(pod.labels)
            made.annotations.update(pod.annotations)
            for container in pod.containers:
                its = made.containers.add(name=container.name)
                its.devices.extend(devices.get((pod.namespace, pod.name, container.name), ()))
                for resource in (CPU, MEMORY):
                    held = self._desk.held(resource, pod.uid, container.name)
                    if held is not None:
                        its.resources.append(_copy_amounts(held, wire.TopologyAwareResource, resource))
        return answer

    async def _node(self, _request: Any, _words: Mapping[str, str]) -> Any:
        resources = [
            _copy_amounts(self._desk.allocatable(resource), wire.AllocatableTopologyAwareResource, resource)
            for resource in (CPU, MEMORY)
        ]
        said = await self._ask(
            "GetAllocatableResources", wire.AllocatableResourcesRequest(), wire.AllocatableResourcesResponse
        )
        return wire.AllocatableResourcesResponse(devices=said.devices, resources=resources)

    async def _ask(self, method: str, request: Any, empty: Callable[[], Any]) -> Any:
        """What the kubelet says; nothing where it does not."""
        if not self._kubelet.exists():
            self.problem = None
            return empty()
        peer = GrpcClient(self._kubelet, _LISTER, timeout_s=_KUBELET_TIMEOUT_S)
        try:
            said = await peer.call(method, request)
        except Unavailable as error:
            self.problem = error
            return empty()
        finally:
            await peer.close()
        self.problem = None
        return said


def _copy_amounts(amounts: Any, kind: Callable[..., Any], resource: str) -> Any:
    """The same amounts in the other protocol, which has the same fields by the same names, and the resource's beside them."""
    made = kind(resource_name=resource)
    for field, value in amounts.ListFields():
        if field.is_repeated:
            for one in value:
                getattr(made, field.name).add(resource_value=one.resource_value, node=one.node)
        else:
            setattr(made, field.name, value)
    return made

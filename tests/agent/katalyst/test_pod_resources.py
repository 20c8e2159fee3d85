"""The pod-resources client over a real socket, against the bytes that a kubelet's Go code writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.katalyst.pod_resources import PodResourcesListerClient
from api.interfaces import Unavailable
from api.node_resources import MemoryAllocation, TopologyLevel
from api.proto import pod_resources_pb2 as wire
from common.grpc_unix import GrpcService, HandlerRefusal, serve_on_socket

GOLDEN = json.loads((Path(__file__).resolve().parents[2] / "golden" / "protocols.json").read_text())
LISTER = wire.DESCRIPTOR.services_by_name["PodResourcesLister"]


def service(listed: Any, allocatable: Any = None) -> GrpcService:
    async def pods(_request: Any, _words: Mapping[str, str]) -> Any:
        return listed

    async def node(_request: Any, _words: Mapping[str, str]) -> Any:
        if allocatable is None:
            raise HandlerRefusal("Pod Resources API GetAllocatableResources disabled")
        return allocatable

    return GrpcService(LISTER, {"List": pods, "GetAllocatableResources": node})


async def test_a_kubewharf_kubelet_is_understood(tmp_path: Path) -> None:
    listed = wire.ListPodResourcesResponse.FromString(bytes.fromhex(GOLDEN["v1.ListPodResourcesResponse"]))
    allocatable = wire.AllocatableResourcesResponse.FromString(bytes.fromhex(GOLDEN["v1.AllocatableResourcesResponse"]))
    server = await serve_on_socket(tmp_path / "kubelet.sock", (service(listed, allocatable),))
    lister = PodResourcesListerClient(server.path)
    (pod,) = await lister.pods()
    assert (pod.key, pod.role, pod.kind, pod.annotations) == ("ns/web", "r", "t", {"c": "d"})
    (container,) = pod.containers
    assert container.cpus == (2, 3, 300)
    assert container.memory == (MemoryAllocation(kind="memory", bytes=1 << 40, numa_nodes=(1,)),)
    assert (container.devices[0].resource, container.devices[0].ids, container.devices[0].numa_nodes) == (
        "nvidia.com/gpu", ("g0",), (1,)
    )  # fmt: skip
    (resource,) = container.resources
    assert (resource.total, resource.capacity_total, resource.parts[0].level) == (2.5, 3.0, TopologyLevel.SOCKET)
    assert (resource.parts[0].name, resource.parts[0].kind, resource.parts[0].node) == ("eth0", "NIC", 1)
    node = await lister.node()
    assert node is not None
    assert (node.cpus, node.resources[0].total, node.resources[0].capacity_total) == ((0, 1), 46.0, 48.0)
    await lister.close()
    await server.stop()


async def test_a_stock_kubelet_without_allocatable_resources(tmp_path: Path) -> None:
    server = await serve_on_socket(tmp_path / "kubelet.sock", (service(wire.ListPodResourcesResponse()),))
    lister = PodResourcesListerClient(server.path)
    assert await lister.pods() == ()
    assert await lister.node() is None
    await lister.close()
    await server.stop()
    missing = PodResourcesListerClient(tmp_path / "kubelet.sock")
    with pytest.raises(Unavailable, match=r"PodResourcesLister\.List: no server answers"):
        await missing.pods()
    with pytest.raises(Unavailable, match="no server answers"):
        await missing.node()
    await missing.close()


def _cpu(container: Any) -> None:
    container.cpu_ids.append(-1)


def _many(container: Any) -> None:
    container.cpu_ids.append(1 << 40)


def _node(container: Any) -> None:
    container.memory.add().topology.nodes.add(ID=5000)


def _infinite(container: Any) -> None:
    container.resources.add(aggregated_quantity=float("inf"))


def _level(container: Any) -> None:
    container.resources.add().topology_aware_quantity_list.add(topology_level=7)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_cpu, r"pod_resources\[0\]\.containers\[0\]\.cpu_ids is invalid: CPU -1"),
        (_many, "cpu_ids is invalid: CPU 1099511627776"),
        (_node, r"memory\.topology is invalid: NUMA node 5000"),
        (_infinite, r"resources\[0\] is invalid: inf"),
        (_level, "node 0 of topology_level 7"),
    ],
)
async def test_an_invalid_answer_names_its_field(tmp_path: Path, spoil: Any, text: str) -> None:
    listed = wire.ListPodResourcesResponse()
    spoil(listed.pod_resources.add().containers.add())
    server = await serve_on_socket(tmp_path / "kubelet.sock", (service(listed),))
    lister = PodResourcesListerClient(server.path)
    with pytest.raises(Unavailable, match=text):
        await lister.pods()
    await lister.close()
    await server.stop()

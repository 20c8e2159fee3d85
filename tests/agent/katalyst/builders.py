"""Pods, sizes and requests of plugins for tests of the protocols."""

from __future__ import annotations

from typing import Any

from api.cpu import Cpu, Topology
from api.pod import Pod
from api.proto import cpu_advisor_pb2 as cpu
from api.proto import resource_plugin_pb2 as plugin
from api.qos import Enhancements, QoSLevel
from tests.builders import pods


def node(numas: int = 2, each: int = 24) -> Topology:
    """One socket for each NUMA node, two threads a core."""
    half = each // 2
    return Topology(
        cpus=tuple(
            Cpu(id=numa * each + cpu, core=cpu % half, socket=numa, numa=numa)
            for numa in range(numas)
            for cpu in range(each)
        )
    )


def pod(
    name: str, qos: QoSLevel = QoSLevel.SHARED, cores: float = 2.0, bound: tuple[int, ...] = (), **enhancements: Any
) -> Pod:
    """Return a pod with one container named `main`; `enhancements` are fields of Enhancements."""
    return pods.pod(
        name,
        qos,
        namespace="ns",
        uid=f"u-{name}",
        cgroup=f"/kubepods/{name}",
        container="main",
        cpu_request=cores,
        memory_request=1 << 30,
        enhancements=Enhancements(numa_binding=bool(bound), **enhancements),
        bound_numa=bound,
    )


def put(
    request: Any,
    pod_: Pod,
    owner: str,
    assigned: dict[int, str] | None = None,
    container: str = "main",
    ramp_up: bool = False,
) -> None:
    """Have the plugin have given this to a container."""
    entry = request.entries[pod_.uid].entries[container]
    entry.metadata.pod_uid, entry.metadata.pod_namespace, entry.metadata.pod_name = pod_.uid, pod_.namespace, pod_.name
    entry.metadata.container_name, entry.metadata.qos_level = container, pod_.qos.value
    entry.metadata.container_type = plugin.MAIN if container == "main" else plugin.SIDECAR
    entry.metadata.requestMilliQuantity, entry.metadata.useMilliQuantity = 2000, True
    if pod_.enhancements.numa_binding:
        entry.metadata.annotations["numa_binding"] = "true"
    entry.allocation_info.owner_pool_name, entry.allocation_info.ramp_up = owner, ramp_up
    for numa, text in (assigned or {}).items():
        entry.allocation_info.topology_aware_assignments[numa] = text


def put_pool(request: Any, name: str, assigned: dict[int, str]) -> None:
    info = request.entries[name].entries[""].allocation_info
    info.owner_pool_name = name
    for numa, text in assigned.items():
        info.topology_aware_assignments[numa] = text


def blocks(answer: Any, entry: str, container: str = "") -> dict[int, list[int]]:
    """Sizes of an entry's blocks by NUMA node."""
    info = answer.entries[entry].entries[container]
    return {
        numa: [block.result for block in part.blocks]
        for numa, part in sorted(info.calculation_results_by_numas.items())
    }


def request() -> Any:
    return cpu.GetAdviceRequest()

"""Checks settings against the node they are for, and derives cgroup paths from the kubelet's. Pure. A setting that
reserves more than the node has is an error; an unknown amount limits nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from agent.config.qrm import CpuPlacementConfig
from agent.sensors.cgroup.pod_cgroup_paths import (
    BEST_EFFORT,
    BURSTABLE,
    CgroupDriver,
    CgroupExists,
    kubepods_path,
    qos_class_path,
)
from api.cpu import Topology, format_cpu_list, parse_cpu_list
from api.units import MIB

KATALYST_OFFLINE_CGROUPS = "offline-besteffort-*"
"""Katalyst's own cgroups next to those of the kubelet's QoS classes."""


def kubelet_root_settings(root: str, exists: CgroupExists) -> Mapping[str, Any]:
    """Return the settings that follow from the kubelet's cgroup root, for what the settings file does not set. `exists`
    returns whether a cgroup exists."""
    drivers = [driver for driver in CgroupDriver if exists(kubepods_path(root, driver))]
    memory: dict[str, Any] = {}
    if drivers:
        memory["reclaimRoot"] = qos_class_path(root, BEST_EFFORT, drivers[0])
    if root != "/":
        burstable = [
            qos_class_path(root, BURSTABLE, driver) for driver in (CgroupDriver.CGROUPFS, CgroupDriver.SYSTEMD)
        ]
        offline = f"{kubepods_path(root, CgroupDriver.CGROUPFS)}/{KATALYST_OFFLINE_CGROUPS}"
        memory["offloading"] = {"dyingCgroups": [burstable[0], offline, burstable[1]]}
        return {"memory": memory, "eviction": {"systemMemory": {"psiRoots": burstable}}}
    return {"memory": memory}


def check_against_node(
    config: AgentConfig, topology: Topology, memory_bytes: int | None, numa_bytes: Mapping[int, int]
) -> str:
    """Return the first setting that this node cannot hold, with the remedy; empty if it can hold all.

    `memory_bytes` and `numa_bytes` are the memory of the node and of each NUMA node; unknown amounts limit nothing.
    """
    return next(_node_misfits(config, topology, memory_bytes, numa_bytes), "")


def _node_misfits(
    config: AgentConfig, topology: Topology, memory_bytes: int | None, numa_bytes: Mapping[int, int]
) -> Iterator[str]:
    cpus = len(topology.cpus)
    yield from _check_cpu_placement(config.placing, topology)
    pod_cpus = _cpus_for_pods(config.placing, topology)
    # Pods without a NUMA node do not run on nodes with a quota: it would be headroom that no pod can use.
    has_numa_quota = config.advisor.provision.quota and len(topology.numa_nodes) > 1
    if has_numa_quota and not config.placing.enable_reclaim_numa_binding:
        yield (
            "advisor.provision.quota: on several NUMA nodes only reclaimed pods that are bound to one may use its quota; "
            "set placing.enableReclaimNumaBinding to true"
        )
    yield from _check_advisor("advisor", config.advisor, topology, pod_cpus)
    if config.shadow is not None:
        yield from _check_advisor("shadow", config.shadow, topology, pod_cpus)
    yield from _check_maximum("report.minCores", config.report.min_cores, cpus, "CPUs")
    yield from _check_maximum("report.reservedCores", config.report.reserved_cores, cpus, "CPUs")
    yield from _check_maximum("knobs.suppress.reservedCores", config.knobs.suppress.reserved_cores, cpus, "CPUs")
    yield from _check_maximum(
        "memory.reservedForAllocateBytes", config.memory.reserved_for_allocate_bytes, memory_bytes, "bytes"
    )
    mebibytes = None if memory_bytes is None else memory_bytes // MIB
    yield from _check_maximum("report.minMemoryMib", config.report.min_memory_mib, mebibytes, "MiB")
    yield from _check_maximum("report.reservedMemoryMib", config.report.reserved_memory_mib, mebibytes, "MiB")
    if numa_bytes:
        numa, smallest = min(numa_bytes.items(), key=lambda item: item[1])
        watermark = config.memory.min_critical_watermark_bytes
        yield from _check_maximum("memory.minCriticalWatermarkBytes", watermark, smallest, "bytes", f"NUMA node {numa}")


def _check_cpu_placement(config: CpuPlacementConfig, topology: Topology) -> Iterator[str]:
    online = set(topology.ids)
    for name, text in (("reservedCpuList", config.reserved_cpu_list), ("interruptCpuList", config.interrupt_cpu_list)):
        listed = set(parse_cpu_list(text))
        if missing := listed - online:
            online_text = format_cpu_list(online)
            absent = format_cpu_list(missing)
            yield f"placing.{name}: CPU {absent} is not online on this node, CPUs {online_text} are; remove it"
    left = _cpus_for_pods(config, topology)
    if left < 1:
        name = (
            "reservedCpuList"
            if config.reserved_cpu_list
            else "reservedCpus"
            if config.reserved_cpus
            else "interruptCpuList"
        )
        yield f"placing.{name}: of {len(online)} CPUs none would be left to pods; reserve fewer"
    yield from _check_maximum("placing.minReclaimedCpus", config.min_reclaimed_cpus, left, "CPUs", "pods on this node")


def _cpus_for_pods(config: CpuPlacementConfig, topology: Topology) -> int:
    """Return the number of CPUs that are neither reserved nor for interrupts."""
    excluded = {*parse_cpu_list(config.reserved_cpu_list), *parse_cpu_list(config.interrupt_cpu_list)}
    return len(set(topology.ids) - excluded) - (0 if config.reserved_cpu_list else config.reserved_cpus)


def _check_advisor(section: str, config: AdvisorConfig, topology: Topology, left: int) -> Iterator[str]:
    cpus = len(topology.cpus)
    yield from _check_maximum(f"{section}.reservedForAllocateCores", config.reserved_for_allocate_cores, cpus, "CPUs")
    yield from _check_maximum(
        f"{section}.minReclaimedCores", config.min_reclaimed_cores, left, "CPUs", "pods on this node"
    )
    if config.provision.numa_min_reclaimed_ratio:
        sizes = {numa: sum(cpu.numa == numa for cpu in topology.cpus) for numa in topology.numa_nodes}
        numa, smallest = min(sizes.items(), key=lambda item: item[1])
        name = f"{section}.provision.numaMinReclaimedCores"
        yield from _check_maximum(
            name, config.provision.numa_min_reclaimed_cores, smallest, "CPUs", f"NUMA node {numa}"
        )


def _check_maximum(
    name: str, configured: float | None, available: int | None, unit: str, where: str = "this node"
) -> Iterator[str]:
    if configured is not None and available is not None and configured > available:
        yield f"{name}: {configured:.12g} is more than the {available} {unit} of {where}; lower it"

"""Settings held against the node that they are for: what is kept back must be there. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agent.config import AdvisorConfig, Config
from agent.config.headroom import MIB
from agent.config.qrm import CpuPlacementConfig
from api.cpus import Topology, format_cpu_list, parse_cpu_list


def misfit(config: Config, topology: Topology, memory_bytes: int | None, numa_bytes: Mapping[int, int]) -> str:
    """The first setting that this node cannot hold, and what to do; empty where all can be held.

    `memory_bytes` and `numa_bytes` are the memory of the node and of each NUMA node; what is not known limits nothing.
    """
    return next(_misfits(config, topology, memory_bytes, numa_bytes), "")


def _misfits(
    config: Config, topology: Topology, memory_bytes: int | None, numa_bytes: Mapping[int, int]
) -> Iterator[str]:
    cpus = len(topology.cpus)
    yield from _placing(config.placing, topology)
    left = _left(config.placing, topology)
    # Whoever is bound to no node stays off those with a quota: it would count, and nobody could use it.
    several = config.advisor.provision.quota and len(topology.numa_nodes) > 1
    if several and not config.placing.enable_reclaim_numa_binding:
        yield (
            "advisor.provision.quota: on several NUMA nodes only reclaimed pods that are bound to one may use its quota; "
            "set placing.enableReclaimNumaBinding to true"
        )
    yield from _advisor("advisor", config.advisor, topology, left)
    if config.shadow is not None:
        yield from _advisor("shadow", config.shadow, topology, left)
    yield from _beyond("report.minCores", config.report.min_cores, cpus, "CPUs")
    yield from _beyond("report.reservedCores", config.report.reserved_cores, cpus, "CPUs")
    yield from _beyond("knobs.suppress.reservedCores", config.knobs.suppress.reserved_cores, cpus, "CPUs")
    yield from _beyond(
        "memory.reservedForAllocateBytes", config.memory.reserved_for_allocate_bytes, memory_bytes, "bytes"
    )
    mebibytes = None if memory_bytes is None else memory_bytes // MIB
    yield from _beyond("report.minMemoryMib", config.report.min_memory_mib, mebibytes, "MiB")
    yield from _beyond("report.reservedMemoryMib", config.report.reserved_memory_mib, mebibytes, "MiB")
    if numa_bytes:
        numa, smallest = min(numa_bytes.items(), key=lambda item: item[1])
        wanted = config.memory.min_critical_watermark_bytes
        yield from _beyond("memory.minCriticalWatermarkBytes", wanted, smallest, "bytes", f"NUMA node {numa}")


def _placing(config: CpuPlacementConfig, topology: Topology) -> Iterator[str]:
    online = set(topology.ids)
    for name, text in (("reservedCpuList", config.reserved_cpu_list), ("interruptCpuList", config.interrupt_cpu_list)):
        listed = set(parse_cpu_list(text))
        if missing := listed - online:
            has = format_cpu_list(online)
            yield f"placing.{name}: CPU {format_cpu_list(missing)} is not online here, CPUs {has} are; take it out"
    left = _left(config, topology)
    if left < 1:
        name = (
            "reservedCpuList"
            if config.reserved_cpu_list
            else "reservedCpus"
            if config.reserved_cpus
            else "interruptCpuList"
        )
        yield f"placing.{name}: of {len(online)} CPUs none would be left to pods; take fewer"
    yield from _beyond("placing.minReclaimedCpus", config.min_reclaimed_cpus, left, "CPUs", "pods on this node")


def _left(config: CpuPlacementConfig, topology: Topology) -> int:
    """CPUs that pods may have: neither reserved nor for interrupts."""
    taken = {*parse_cpu_list(config.reserved_cpu_list), *parse_cpu_list(config.interrupt_cpu_list)}
    return len(set(topology.ids) - taken) - (0 if config.reserved_cpu_list else config.reserved_cpus)


def _advisor(section: str, config: AdvisorConfig, topology: Topology, left: int) -> Iterator[str]:
    cpus = len(topology.cpus)
    yield from _beyond(f"{section}.reservedForAllocateCores", config.reserved_for_allocate_cores, cpus, "CPUs")
    yield from _beyond(f"{section}.minReclaimedCores", config.min_reclaimed_cores, left, "CPUs", "pods on this node")
    if config.provision.numa_min_reclaimed_ratio:
        sizes = {numa: sum(cpu.numa == numa for cpu in topology.cpus) for numa in topology.numa_nodes}
        numa, smallest = min(sizes.items(), key=lambda item: item[1])
        name = f"{section}.provision.numaMinReclaimedCores"
        yield from _beyond(name, config.provision.numa_min_reclaimed_cores, smallest, "CPUs", f"NUMA node {numa}")


def _beyond(name: str, wanted: float | None, there: int | None, unit: str, where: str = "this node") -> Iterator[str]:
    if wanted is not None and there is not None and wanted > there:
        yield f"{name}: {wanted:.12g} is more than the {there} {unit} of {where}; lower it"

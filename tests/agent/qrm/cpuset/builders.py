"""Machines, pods and pool sizes for tests of allocation, by name or drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.cpuset.allocate import allocate_cpusets
from agent.qrm.cpuset.state import CpusetAllocation, CpusetState
from api.advice import NOT_NUMA_BOUND, PoolSize
from api.cpu import Cpu, Topology, format_cpu_list
from api.pod import Container, Pod
from api.qos import Enhancements, QoSLevel
from tests.builders import pods

S = 1_000_000_000
CONFIG = CpuPlacementConfig()


def machine(sockets: int, nodes: int, caches: int, cores: int, threads: int) -> Topology:
    """Return CPUs with these counts, each per unit of the one before, numbered as on x86: one thread of every core first."""
    total = sockets * nodes * caches * cores
    return Topology(
        cpus=tuple(
            Cpu(
                id=thread * total + core,
                core=core,
                socket=core // (nodes * caches * cores),
                numa=core // (caches * cores),
                l3=core // cores,
            )
            for thread in range(threads)
            for core in range(total)
        )
    )


def pod(
    name: str,
    qos: QoSLevel = QoSLevel.SHARED,
    cores: float | None = None,
    wants: Enhancements | None = None,
    **fields: Any,
) -> Pod:
    """Return a pod with one container, whose cgroup is its name; `fields` are of Pod."""
    values = {"uid": f"u-{name}", "enhancements": wants or Enhancements(), **fields}
    return pods.pod(name, qos, container="c", cpu_request=cores, **values)


def bound(name: str, cores: float, **wants: object) -> Pod:
    """A shared pod with numa_binding."""
    return pod(name, cores=cores, wants=Enhancements(numa_binding=True, **wants))


def dedicated(name: str, cores: float, **wants: object) -> Pod:
    """A dedicated pod with numa_binding."""
    return pod(name, QoSLevel.DEDICATED, cores, Enhancements(numa_binding=True, **wants))


def reclaimed(name: str, cores: float | None = 1.0, **wants: object) -> Pod:
    return pod(name, QoSLevel.RECLAIMED, cores, Enhancements(**wants))


def size(pool: str, cpus: int, numa: int = NOT_NUMA_BOUND, **overlap: int) -> PoolSize:
    """Overlap with `share_NUMA1` stands for `share-NUMA1`."""
    return PoolSize(pool=pool, numa=numa, cpus=cpus, overlap={k.replace("_", "-"): n for k, n in overlap.items()})


def run(
    sizes: Sequence[PoolSize],
    pods: Sequence[Pod],
    topology: Topology,
    state: CpusetState | None = None,
    config: CpuPlacementConfig = CONFIG,
    at_s: float = 0.0,
) -> tuple[CpusetAllocation, CpusetState]:
    return allocate_cpusets(sizes, pods, topology, state or CpusetState(), config, round(at_s * S))


def pools(placement: CpusetAllocation) -> dict[str, str]:
    return {pool.name: format_cpu_list(pool.cpus) for pool in placement.pools}


def counts(placement: CpusetAllocation) -> dict[str, int]:
    return {pool.name: len(pool.cpus) for pool in placement.pools}


def cpus(placement: CpusetAllocation) -> dict[str, str]:
    return {cgroup: format_cpu_list(given) for cgroup, given in placement.cpus.items()}


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Draw up to 256 CPUs, 8 NUMA nodes and 2 threads per core, some with offline CPUs."""
    sockets, nodes, caches = (
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2, 4])),
    )
    threads = draw(st.sampled_from([1, 2]))
    cores = draw(st.integers(1, max(256 // (sockets * nodes * caches * threads), 1)))
    all_cpus = machine(sockets, nodes, caches, min(cores, 16), threads)
    offline = draw(st.sets(st.sampled_from(all_cpus.ids), max_size=len(all_cpus.ids) // 4))
    return Topology(cpus=tuple(cpu for cpu in all_cpus.cpus if cpu.id not in offline))


CORES = st.sampled_from([None, 0.1, 0.5, 1.0, 2.0, 3.0, 7.5, 8.0, 30.0])


@st.composite
def some_pods(draw: st.DrawFn) -> tuple[Pod, ...]:
    """Draw pods of every QoS level with every enhancement that allocation reads."""
    result = []
    for number in range(draw(st.integers(0, 12))):
        qos = draw(st.sampled_from([*QoSLevel, QoSLevel.SHARED, QoSLevel.DEDICATED]))
        wants = Enhancements(
            numa_binding=draw(st.booleans()),
            numa_exclusive=draw(st.integers(0, 3)) == 0,
            numa_share=draw(st.integers(0, 4)) > 0,
            align_by_socket=draw(st.integers(0, 4)) == 0,
            distribute_evenly=draw(st.integers(0, 4)) == 0,
            full_cores=draw(st.integers(0, 2)) == 0,
            numa_number=draw(st.sampled_from([None, None, None, 1, 2])),
            numa_ids=draw(st.sampled_from([None, None, None, (0,), (1,), (0, 1)])),
            cpuset_pool=draw(st.sampled_from(["", "", "batch", "flink", "reserve", "share-NUMA1", "dedicated-x"])),
        )
        new_pod = pod(f"p{number}", qos, draw(CORES), wants)
        if draw(st.booleans()):
            extra = Container(name="s", cgroup=f"/{new_pod.name}-s", sidecar=draw(st.booleans()), cpu_request_cores=1.0)
            new_pod = msgspec.structs.replace(new_pod, containers=(*new_pod.containers, extra))
        result.append(new_pod)
    return tuple(result)


@st.composite
def some_sizes(draw: st.DrawFn) -> tuple[PoolSize, ...]:
    """Draw pool sizes, also too large ones, of pools without pods and of missing NUMA nodes."""
    names = draw(
        st.sets(st.sampled_from(["share", "batch", "share-NUMA0", "share-NUMA1", "reclaim", "isolation-default/p0"]))
    )
    result = []
    for name in sorted(names):
        numa = int(name[-1]) if "NUMA" in name else NOT_NUMA_BOUND
        overlap = (
            draw(st.dictionaries(st.sampled_from(["share", "batch"]), st.integers(0, 9))) if name == "reclaim" else {}
        )
        result.append(PoolSize(pool=name, numa=numa, cpus=draw(st.integers(0, 80)), overlap=overlap))
    return tuple(result)


CONFIGS = st.builds(
    CpuPlacementConfig,
    reserved_cpus=st.integers(0, 12),
    interrupt_cpu_list=st.sampled_from(["", "", "1", "0-2"]),
    numa_hint=st.sampled_from(["spreading", "packing", "dynamic-packing"]),
    enable_reclaim_numa_binding=st.booleans(),
)

"""Machines, cgroups and latencies for every test: `topology`, `cgroup_sample` and `run_queue_latency`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.cpu import Cpu, Topology
from api.histogram import SLOT_COUNT, slot_of
from api.snapshot import CgroupSample, CpuTimes, NodeSample, RunqLatency

S = 1_000_000_000


def topology(cpus: int, *, sockets: int = 1, numa: int = 0, threads: int = 1) -> Topology:
    """Return CPUs numbered as Linux does on x86: first one thread of every core, then their siblings. `numa` nodes in all,
    one per socket by default; cores are divided evenly."""
    cores, nodes = cpus // threads, numa or sockets
    return Topology(
        cpus=tuple(
            Cpu(id=i, core=i % cores, socket=(i % cores) * sockets // cores, numa=(i % cores) * nodes // cores)
            for i in range(cpus)
        )
    )


def run_queue_latency(counts_by_us: Mapping[int, int]) -> RunqLatency:
    """Return cumulative waits: the number of waits by their duration in microseconds."""
    slots = [0] * SLOT_COUNT
    for wait_us, count in counts_by_us.items():
        slots[slot_of(wait_us * 1000)] += count
    total_ns = sum(wait_us * 1000 * count for wait_us, count in counts_by_us.items())
    return RunqLatency(sum_ns=total_ns, count=sum(slots), slots=tuple(slots))


def cgroup_sample(path: str, *, id: int = 100, cpu_usage_s: float | None = None, **fields: Any) -> CgroupSample:  # noqa: A002
    """Return a sample; `cpu_usage_s` is cumulative CPU time in seconds, `fields` are of CgroupSample."""
    return CgroupSample(
        path=path, id=id, cpu_usage_ns=None if cpu_usage_s is None else round(cpu_usage_s * S), **fields
    )


def node_sample(machine: Topology, at_s: float, *, idle: bool = True) -> NodeSample:
    """Return the counters of CPUs that have been idle, or busy, for `at_s` seconds."""
    busy_ns, idle_ns = (0, round(at_s * S)) if idle else (round(at_s * S), 0)
    times = CpuTimes(
        user_ns=busy_ns, nice_ns=0, system_ns=0, idle_ns=idle_ns, iowait_ns=0, irq_ns=0, softirq_ns=0, steal_ns=0
    )
    return NodeSample(per_cpu=dict.fromkeys(machine.ids, times))


def cpu_times(busy_s: float, total_s: float) -> CpuTimes:
    """Return cumulative times of one or more CPUs: user time and idle time alone."""
    busy_ns = round(busy_s * S)
    return CpuTimes(
        user_ns=busy_ns, nice_ns=0, system_ns=0, idle_ns=round(total_s * S) - busy_ns,
        iowait_ns=0, irq_ns=0, softirq_ns=0, steal_ns=0,
    )  # fmt: skip

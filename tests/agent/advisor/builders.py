"""Builders of small snapshots: a node with some CPUs, pods with one container each, their waits and CPU use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from api.cpu import Cpu, Topology
from api.histogram import SLOT_COUNT, slot_of
from api.measurements import CpuTimes, RunqLatency
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.snapshot import CgroupSample, NodeSample, Snapshot

S = 1_000_000_000


def topology(cpus: int, *, numa: int = 1, threads: int = 1) -> Topology:
    """CPUs numbered as Linux does on x86: first one thread of every core, then their siblings."""
    cores = cpus // threads
    return Topology(
        cpus=tuple(
            Cpu(id=i, core=i % cores, socket=(i % cores) * numa // cores, numa=(i % cores) * numa // cores)
            for i in range(cpus)
        )
    )


def pod(name: str, qos: QoSLevel, *, request: float | None = None, limit: float | None = None) -> Pod:
    container = Container(name=name, cgroup=f"/{name}", cpu_request_cores=request, cpu_limit_cores=limit)
    return Pod(uid=f"default/{name}", namespace="default", name=name, qos=qos, containers=(container,))


def waits(counts: Mapping[int, int]) -> RunqLatency:
    """Return cumulative waits: counts by microseconds."""
    slots = [0] * SLOT_COUNT
    for wait_us, count in counts.items():
        slots[slot_of(wait_us * 1000)] += count
    return RunqLatency(
        sum_ns=sum(us * 1000 * n for us, n in counts.items()), count=sum(counts.values()), slots=tuple(slots)
    )


def snapshot(
    at_s: float,
    pods: Sequence[Pod],
    *,
    cpus: int | Topology = 2,
    usage_s: Mapping[str, float] | None = None,
    wait: Mapping[str, RunqLatency] | None = None,
    ids: Mapping[str, int] | None = None,
    idle_cpus: bool = True,
) -> Snapshot:
    """Return a snapshot taken at `at_s`; `usage_s` is cumulative CPU seconds by pod name, `wait` cumulative waits."""
    nodes = topology(cpus) if isinstance(cpus, int) else cpus
    idle = round(at_s * S) if idle_cpus else 0
    times = CpuTimes(
        user_ns=round(at_s * S) - idle, nice_ns=0, system_ns=0, idle_ns=idle, iowait_ns=0, irq_ns=0, softirq_ns=0, steal_ns=0
    )  # fmt: skip
    cgroups = {
        f"/{p.name}": CgroupSample(
            path=f"/{p.name}",
            id=(ids or {}).get(p.name, 100 + index),
            cpu_usage_ns=None if usage_s is None or p.name not in usage_s else round(usage_s[p.name] * S),
            wait=(wait or {}).get(p.name),
        )
        for index, p in enumerate(pods)
    }
    cgroups["/"] = CgroupSample(path="/", id=1)
    return Snapshot(
        seq=round(at_s * 10) + 1,
        taken_at_ns=round(at_s * S) + S,
        wall_time_ns=round(at_s * S),
        boot_id="b",
        topology=nodes,
        node=NodeSample(per_cpu=dict.fromkeys(nodes.ids, times)),
        cgroups=cgroups,
        pods=tuple(pods),
    )

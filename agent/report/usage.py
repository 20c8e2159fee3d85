"""What the node and its pods use, as CustomNodeResource's nodeMetricStatus has it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from agent.report.amounts import bytes_of, cores_of
from api.crds.meta import ResourceList
from api.crds.node import GroupMetric, NodeMetric, NodeMetricStatus, NumaUsage
from api.decisions import Round
from api.pods import Pod
from api.qos import QoSLevel
from api.rates import Rates, rates
from api.samples import Snapshot
from kube.moments import stamp


def usage(finished: Round) -> NodeMetricStatus:
    """Of the node, of each NUMA node, and of the pods of each level that has some."""
    snapshot = finished.snapshot
    change = None if finished.previous is None else rates(finished.previous, snapshot)
    node, per_cpu = snapshot.node, {} if change is None else change.node.per_cpu_busy_ratio
    memory = None
    if node.memory_total_bytes is not None and node.memory_available_bytes is not None:
        memory = node.memory_total_bytes - node.memory_available_bytes
    busy_cores = None if change is None else change.node.busy_cores
    by_numa = []
    for numa in snapshot.topology.numa_nodes:
        meminfo = node.numa[numa].meminfo if numa in node.numa else {}
        used = meminfo["MemTotal"] - meminfo["MemFree"] if meminfo.keys() >= {"MemTotal", "MemFree"} else None
        known = [per_cpu[cpu.id] for cpu in snapshot.topology.cpus if cpu.numa == numa and cpu.id in per_cpu]
        if amounts := _amounts(sum(known) if known else None, used):
            by_numa.append(NumaUsage(numa_id=numa, usage=amounts))
    return NodeMetricStatus(
        update_time=stamp(snapshot.wall_time_ns / 1e9),
        node_metric=NodeMetric(generic_usage=_amounts(busy_cores, memory) or None, numa_usage=tuple(by_numa) or None),
        group_metric=tuple(
            GroupMetric(
                qos_level=level,
                generic_usage=_pods(pods, snapshot, change) or None,
                pod_list=tuple(sorted(pod.key for pod in pods)),
            )
            for level in QoSLevel
            if (pods := [pod for pod in snapshot.pods if pod.qos is level])
        )
        or None,
    )


def _pods(pods: Iterable[Pod], snapshot: Snapshot, change: Rates | None) -> ResourceList:
    cores = memory = None
    for path in (container.cgroup for pod in pods for container in pod.containers):
        own = change.cgroups[path].cpu_cores if change is not None and path in change.cgroups else None
        size = snapshot.cgroups[path].memory_bytes if path in snapshot.cgroups else None
        cores = cores if own is None else (cores or 0.0) + own
        memory = memory if size is None else (memory or 0) + size
    return _amounts(cores, memory)


def _amounts(cores: float | None, memory: float | None) -> ResourceList:
    found: dict[str, str | int] = {}
    if cores is not None:
        found["cpu"] = cores_of(cores)
    if memory is not None:
        found["memory"] = bytes_of(memory)
    return found

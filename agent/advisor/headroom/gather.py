"""From a snapshot to what the sums of headroom and overcommitment look at: use by NUMA node, by pod, by the system."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from agent.advisor.containers import ContainerMemory
from agent.advisor.estimation import container_cores
from agent.advisor.headroom.exclusion import DisableLevel, Tenant
from agent.advisor.headroom.koordinator import Budget, Demand, Tier
from agent.advisor.overcommit import PodLoad
from agent.advisor.regions import bound_nodes, share_pool
from agent.advisor.reporter import Capacity
from agent.config import AdvisorConfig
from agent.config.headroom import GIB
from api.advice import UNBOUND
from api.pods import Pod
from api.qos import QoSLevel
from api.rates import Rates
from api.samples import CgroupSample, Snapshot

_QOS_CLASS, _PRIORITY_CLASS = "koordinator.sh/qosClass", "koordinator.sh/priority-class"
_BY_PRIORITY = ((9000, 9999, Tier.PROD), (7000, 7999, Tier.MID), (5000, 5999, Tier.BATCH), (3000, 3999, Tier.FREE))
_TIERS: Mapping[str | None, Tier] = {tier.value: tier for tier in Tier}
_RESIDENT = ("anon", "total_rss", "rss")
"""Resident memory in memory.stat: of version 2, and of version 1 with and without all cgroups below."""
_NOT_CACHE = (
    ("total_inactive_anon", "total_active_anon", "total_unevictable"),  # version 1, all cgroups below included
    ("inactive_anon", "active_anon", "unevictable"),
)
"""What Koordinator counts as memory in use: everything but the page cache."""

_PEAK_MARGIN = 1.1
"""[safetyMarginPercent of koordlet's prediction] what is used now may grow by a tenth."""


def reclaimed_use(snapshot: Snapshot, change: Rates | None, bound: Collection[int]) -> dict[int, float | None]:
    """CPU that reclaimed pods use, of each bound NUMA node and of UNBOUND; None where some of it is not known."""
    used: dict[int, float | None] = dict.fromkeys((*bound, UNBOUND), None if change is None else 0.0)
    for pod in snapshot.pods:
        if pod.qos is not QoSLevel.RECLAIMED:
            continue
        key = pod.bound_numa[0] if len(pod.bound_numa) == 1 and pod.bound_numa[0] in bound else UNBOUND
        own, so_far = _cpu_used(pod, snapshot, change, absent=0.0), used[key]
        used[key] = None if own is None or so_far is None else so_far + own
    return used


def pod_loads(
    snapshot: Snapshot, change: Rates | None, containers: Mapping[str, ContainerMemory]
) -> tuple[PodLoad, ...]:
    """What every pod requests and uses, for `overcommit`; load counts as use where the advisor remembers it."""
    return tuple(
        PodLoad(
            pod=pod.key,
            cpu_request_cores=_total(c.cpu_request_cores for c in pod.containers if c.cpu_request_cores is not None),
            cpu_used_cores=_loaded(pod, snapshot, change, containers),
            memory_request_bytes=_total(
                c.memory_request_bytes for c in pod.containers if c.memory_request_bytes is not None
            ),
            memory_used_bytes=_all(_resident(snapshot.cgroups.get(c.cgroup)) for c in pod.containers),
        )
        for pod in snapshot.pods
    )


def capacity(snapshot: Snapshot) -> Capacity:
    """What the node has. Memory by NUMA node is left out where it is not known of all of them."""
    node, nodes = snapshot.node, snapshot.topology.numa_nodes
    cores = dict.fromkeys(nodes, 0.0)
    for cpu in snapshot.topology.cpus:
        cores[cpu.numa] += 1
    sizes = {numa: part.meminfo["MemTotal"] for numa, part in node.numa.items() if "MemTotal" in part.meminfo}
    return Capacity(
        cores_by_numa=cores,
        memory_bytes=node.memory_total_bytes,
        memory_by_numa={numa: float(sizes[numa]) for numa in sorted(sizes)} if set(nodes) <= set(sizes) else {},
    )


def tenants(snapshot: Snapshot, cpus_by_cgroup: Mapping[str, tuple[int, ...]]) -> tuple[Tenant, ...]:
    """Online pods as far as they decide what may be lent around them: those that are to be bound to NUMA nodes, and of the
    others those that reach farther than to themselves."""
    nodes = snapshot.topology.numa_nodes
    numa_of = {cpu.id: cpu.numa for cpu in snapshot.topology.cpus}
    found = []
    for pod in snapshot.pods:
        level = DisableLevel(pod.profile.disable_reclaim_level or DisableLevel.POD)
        binding = pod.enhancements.numa_binding
        if not pod.qos.online or not (binding or level is not DisableLevel.POD):
            continue
        cpus = (cpu for c in pod.containers for cpu in cpus_by_cgroup.get(c.cgroup, ()))
        bound = bound_nodes(pod, nodes)
        found.append(
            Tenant(
                pod=pod.key,
                numa_nodes=bound or tuple(sorted({numa_of[cpu] for cpu in cpus if cpu in numa_of})),
                reclaimable=pod.profile.lends,
                level=level,
                exclusive=binding and pod.enhancements.numa_exclusive,
                bound_pool=share_pool(pod, nodes) if bound and pod.qos is QoSLevel.SHARED else "",
            )
        )
    return tuple(found)


def cpu_budget(
    snapshot: Snapshot, change: Rates | None, reserved_cores: float, prod_reclaimable_cores: float | None = None
) -> Budget:
    """CPU of the node for Koordinator's sums. What pods that are not measured use counts as the system's."""
    busy = None if change is None else change.node.busy_cores
    used = [(pod, _cpu_used(pod, snapshot, change, absent=None)) for pod in snapshot.pods]
    demands = [
        _demand(
            pod,
            _total(c.cpu_request_cores for c in pod.containers if c.cpu_request_cores is not None),
            cores,
            exclusive=pod.labels.get(_QOS_CLASS) == "LSE",
        )
        for pod, cores in used
    ]
    return Budget(
        capacity=float(len(snapshot.topology.cpus)),
        system_used=None if busy is None else max(busy - sum(cores or 0.0 for _, cores in used), 0.0),
        reserved=reserved_cores,
        demands=demands,
        prod_reclaimable=prod_reclaimable_cores,
        node_used=busy,
    )


def memory_budget(snapshot: Snapshot, prod_reclaimable_bytes: float | None = None) -> Budget | None:
    """The same of memory, page cache left out; None where not even the node's memory is known."""
    total, available = snapshot.node.memory_total_bytes, snapshot.node.memory_available_bytes
    if total is None:
        return None
    busy = None if available is None else float(total - available)
    used = [(pod, _all(not_cache(snapshot.cgroups.get(c.cgroup)) for c in pod.containers)) for pod in snapshot.pods]
    demands = [
        _demand(
            pod, _total(c.memory_request_bytes for c in pod.containers if c.memory_request_bytes is not None), space
        )
        for pod, space in used
    ]
    return Budget(
        capacity=float(total),
        system_used=None if busy is None else max(busy - sum(space or 0.0 for _, space in used), 0.0),
        demands=demands,
        per_unit=float(GIB),
        unit=" GiB",
        prod_reclaimable=prod_reclaimable_bytes,
        node_used=busy,
    )


def _demand(pod: Pod, request: float | None, used: float | None, *, exclusive: bool = False) -> Demand:
    """A pod as Koordinator's sums have it; one that lends nothing uses what it requested, in them."""
    if used is not None and not pod.profile.lends:
        used = max(used, request or 0.0)
    return Demand(tier=tier_of(pod), request=request, used=used, exclusive=exclusive)


def prod_spare_cores(
    snapshot: Snapshot, change: Rates | None, needs: Mapping[str, ContainerMemory], config: AdvisorConfig
) -> float | None:
    """CPU that prod pods asked for and will not need, by the estimate of each; one that is not measured, or that lends nothing,
    spares nothing.

    Koordinator has a predictor for it; None in the first round.
    """
    if change is None:
        return None
    return sum(
        max(container.cpu_request_cores - container_cores(container, needs.get(container.cgroup), config), 0.0)
        for pod in snapshot.pods
        if tier_of(pod) is Tier.PROD and pod.profile.lends
        for container in pod.containers
        if container.cpu_request_cores is not None
    )


def prod_spare_bytes(snapshot: Snapshot) -> float:
    """The same of memory: what the requests are above what is used, page cache left out, with Koordinator's margin."""
    spare = 0.0
    for pod in snapshot.pods:
        if tier_of(pod) is Tier.PROD and pod.profile.lends:
            for container in pod.containers:
                used = not_cache(snapshot.cgroups.get(container.cgroup))
                if used is not None and container.memory_request_bytes is not None:
                    spare += max(container.memory_request_bytes - used * _PEAK_MARGIN, 0.0)
    return spare


def idle_bytes(snapshot: Snapshot) -> float:
    """Memory that pods which lend nothing requested and do not use, page cache left out; what is not measured is idle."""
    idle = 0.0
    for pod in snapshot.pods:
        if pod.qos.online and not pod.profile.lends:
            requested = sum(container.memory_request_bytes or 0 for container in pod.containers)
            used = sum(not_cache(snapshot.cgroups.get(container.cgroup)) or 0.0 for container in pod.containers)
            idle += max(requested - used, 0.0)
    return idle


def tier_of(pod: Pod) -> Tier:
    """Koordinator's class of a pod: by label, by priority, else batch for reclaimed_cores and prod for all others."""
    label = pod.labels.get(_PRIORITY_CLASS)
    if label in _TIERS:
        return _TIERS[label]
    for low, high, tier in _BY_PRIORITY:
        if low <= pod.priority <= high:
            return tier
    return Tier.BATCH if pod.qos is QoSLevel.RECLAIMED else Tier.PROD


def _cpu_used(pod: Pod, snapshot: Snapshot, change: Rates | None, *, absent: float | None) -> float | None:
    """CPU of a pod's containers; `absent` is what one without a cgroup counts for."""
    if change is None:
        return None
    cores = []
    for container in pod.containers:
        rate = change.cgroups.get(container.cgroup)
        if rate is not None:
            cores.append(rate.cpu_cores)
        else:
            cores.append(None if container.cgroup in snapshot.cgroups else absent)
    return _all(cores)


def _loaded(
    pod: Pod, snapshot: Snapshot, change: Rates | None, containers: Mapping[str, ContainerMemory]
) -> float | None:
    """Use of a pod, or its load over one or five minutes where that is more."""
    known = [containers[c.cgroup] for c in pod.containers if c.cgroup in containers]
    sums = [
        _cpu_used(pod, snapshot, change, absent=None),
        _total(memory.load1 for memory in known if memory.load1 is not None),
        _total(memory.load5 for memory in known if memory.load5 is not None),
    ]
    return None if sums[0] is None else max(value for value in sums if value is not None)


def _resident(sample: CgroupSample | None) -> float | None:
    if sample is None:
        return None
    return next((float(sample.memory_stat[name]) for name in _RESIDENT if name in sample.memory_stat), None)


def not_cache(sample: CgroupSample | None) -> float | None:
    """Memory of a cgroup but for its page cache, in bytes; None where it is not known."""
    if sample is None:
        return None
    for names in _NOT_CACHE:
        if names[0] in sample.memory_stat:
            return float(sum(sample.memory_stat.get(name, 0) for name in names))
    return None


def _all(values: Iterable[float | None]) -> float | None:
    """Their sum, or None where one is not known."""
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _total(values: Iterable[float]) -> float | None:
    """Their sum, or None where there are none."""
    found = list(values)
    return float(sum(found)) if found else None

"""NUMA nodes, cores and bytes that are excluded from reclaim because of pods that are not reclaimable.
It implements Katalyst's disableReclaimLevel of a service profile and disableReclaimSharePools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum

import msgspec

from agent.advisor.advisor_state import AdvisorState
from agent.advisor.cpu_estimate import estimate_pod_cores, is_pod_reclaimable, numa_share
from agent.advisor.pod_usage import non_cache_bytes
from agent.advisor.provision.regions import pod_bound_nodes, share_pool_name
from agent.config.advisor import AdvisorConfig
from api.cpu import Topology
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import Snapshot


class DisableReclaimLevel(StrEnum):
    """How far it reaches that reclaim is off for a pod (the service profile's disableReclaimLevel)."""

    POD = "Pod"
    """Its own NUMA nodes where it has them for itself, none otherwise."""
    NUMA = "NUMA"
    SOCKET = "Socket"
    NODE = "Node"


class ReclaimConstraint(msgspec.Struct, frozen=True, kw_only=True):
    """An online pod as far as it decides what may be lent around it."""

    pod: str
    """`namespace/name`."""
    numa_nodes: tuple[int, ...] = ()
    """Where its CPUs are; empty where that is not known."""
    reclaimable: bool = True
    """False where its service profile says that it fares badly, or forbids it."""
    level: DisableReclaimLevel = DisableReclaimLevel.POD
    exclusive: bool = False
    """numa_exclusive."""
    bound_pool: str = ""
    """Name of its share pool where that is bound to its NUMA nodes."""


class ReclaimableNodes(msgspec.Struct, frozen=True, kw_only=True):
    """NUMA nodes that may be lent, and by node why the others may not."""

    numa_nodes: tuple[int, ...]
    refused: Mapping[int, str] = {}
    unknown: tuple[str, ...] = ()
    """Pods that keep others away from somewhere, but nobody knows from where: then nothing can be said of any node."""


def apply_constraints(
    topology: Topology, constraints: Sequence[ReclaimConstraint], disabled_pools: Collection[str]
) -> ReclaimableNodes:
    """The NUMA nodes that no tenant takes out of reclaim."""
    sockets: dict[int, set[int]] = {}
    socket_of: dict[int, int] = {}
    for cpu in topology.cpus:
        sockets.setdefault(cpu.socket, set()).add(cpu.numa)
        socket_of[cpu.numa] = cpu.socket
    refused: dict[int, str] = {}
    unknown = []
    for tenant in constraints:
        for reach, why in _excluded_reaches(tenant, disabled_pools):
            if reach is DisableReclaimLevel.NODE:
                nodes = set(socket_of)
            elif not tenant.numa_nodes:
                unknown.append(tenant.pod)
                continue
            else:
                nodes = set(tenant.numa_nodes)
                if reach is DisableReclaimLevel.SOCKET:
                    nodes = {n for own in nodes if own in socket_of for n in sockets[socket_of[own]]}
            for numa in nodes:
                refused.setdefault(numa, why)
    return ReclaimableNodes(
        numa_nodes=tuple(numa for numa in topology.numa_nodes if numa not in refused),
        refused={numa: refused[numa] for numa in sorted(refused) if numa in socket_of},
        unknown=tuple(sorted(set(unknown))),
    )


def _excluded_reaches(
    tenant: ReclaimConstraint, disabled_pools: Collection[str]
) -> list[tuple[DisableReclaimLevel, str]]:
    """How far a tenant takes NUMA nodes out of reclaim, and why; twice where both reasons hold."""
    claims: list[tuple[DisableReclaimLevel, str]] = []
    if not tenant.reclaimable and (tenant.level is not DisableReclaimLevel.POD or tenant.exclusive):
        reach = DisableReclaimLevel.NUMA if tenant.level is DisableReclaimLevel.POD else tenant.level
        claims.append((reach, f"reclaim is off for {tenant.pod} at level {tenant.level}"))
    pool = tenant.bound_pool.partition("-NUMA")[0]
    if pool and pool in disabled_pools:
        claims.append((DisableReclaimLevel.SOCKET, f"share pool {pool} of {tenant.pod} must not be lent from"))
    return claims


def numa_nodes_of_bound_pods(
    pods: Sequence[Pod], cpus_by_cgroup: Mapping[str, tuple[int, ...]], topology: Topology
) -> tuple[int, ...]:
    """NUMA nodes that some pod is bound to: by its result, or, for dedicated_cores, by where its CPUs are."""
    numa_of = {cpu.id: cpu.numa for cpu in topology.cpus}
    bound: set[int] = set()
    for pod in pods:
        if pod.qos is QoSLevel.DEDICATED:
            for container in pod.containers:
                bound.update(numa_of[cpu] for cpu in cpus_by_cgroup.get(container.cgroup, ()) if cpu in numa_of)
        elif pod.qos is not QoSLevel.SYSTEM:
            bound.update(pod.bound_numa)
    return tuple(sorted(bound & set(numa_of.values())))


def build_constraints(
    snapshot: Snapshot, cpus_by_cgroup: Mapping[str, tuple[int, ...]]
) -> tuple[ReclaimConstraint, ...]:
    """Online pods as far as they decide what may be lent around them: those that are to be bound to NUMA nodes, and of the
    others those that reach farther than to themselves."""
    nodes = snapshot.topology.numa_nodes
    numa_of = {cpu.id: cpu.numa for cpu in snapshot.topology.cpus}
    found = []
    for pod in snapshot.pods:
        level = DisableReclaimLevel(pod.profile.disable_reclaim_level or DisableReclaimLevel.POD)
        binding = pod.enhancements.numa_binding
        if not pod.qos.online or not (binding or level is not DisableReclaimLevel.POD):
            continue
        cpus = (cpu for c in pod.containers for cpu in cpus_by_cgroup.get(c.cgroup, ()))
        bound = pod_bound_nodes(pod, nodes)
        found.append(
            ReclaimConstraint(
                pod=pod.key,
                numa_nodes=bound or tuple(sorted({numa_of[cpu] for cpu in cpus if cpu in numa_of})),
                reclaimable=pod.profile.reclaimable,
                level=level,
                exclusive=binding and pod.enhancements.numa_exclusive,
                bound_pool=share_pool_name(pod, nodes) if bound and pod.qos is QoSLevel.SHARED else "",
            )
        )
    return tuple(found)


def unreclaimable_idle_bytes(snapshot: Snapshot) -> float:
    """Memory that pods which lend nothing requested and do not use, page cache left out; what is not measured is idle."""
    idle = 0.0
    for pod in snapshot.pods:
        if pod.qos.online and not pod.profile.reclaimable:
            requested = sum(container.memory_request_bytes or 0 for container in pod.containers)
            used = sum(non_cache_bytes(snapshot.cgroups.get(container.cgroup)) or 0.0 for container in pod.containers)
            idle += max(requested - used, 0.0)
    return idle


def reclaimable_nodes(snapshot: Snapshot, memory: AdvisorState, config: AdvisorConfig) -> ReclaimableNodes:
    """NUMA nodes that may be lent, by where the pods are that keep others away."""
    disabled = config.provision.disable_reclaim_share_pools
    asked = disabled or any(not pod.profile.reclaimable for pod in snapshot.pods)
    return apply_constraints(snapshot.topology, build_constraints(snapshot, memory.cpus) if asked else (), disabled)


def max_reclaimable_cores(
    snapshot: Snapshot, where: ReclaimableNodes, memory: AdvisorState, config: AdvisorConfig
) -> float | None:
    """CPU that may be lent at most: of the NUMA nodes that may be, all but what pods requested that lend nothing.

    None where every pod lends. Where pods are whose place is not known, it is no more than before.
    """
    if all(is_pod_reclaimable(pod, config) for pod in snapshot.pods if pod.qos.online):
        return None
    sizes = numa_cpu_counts(snapshot.topology)

    def requested(pod: Pod) -> float:
        return (
            0.0
            if is_pod_reclaimable(pod, config)
            else estimate_pod_cores(pod, snapshot, memory.containers, config, reclaimable=False)
        )

    kept = online_cores_by_numa(snapshot, memory, requested)
    most = sum(max(sizes[numa] - kept[numa], 0.0) for numa in where.numa_nodes)
    return min(most, memory.reclaimable_cores) if where.unknown and memory.reclaimable_cores is not None else most


def unreclaimable_idle_cores(snapshot: Snapshot, memory: AdvisorState, config: AdvisorConfig) -> float:
    """CPU that pods which lend nothing requested and do not use; what is not measured is idle."""
    idle = 0.0
    for pod in snapshot.pods:
        if pod.qos.online and not is_pod_reclaimable(pod, config):
            known = (memory.containers.get(container.cgroup) for container in pod.containers)
            used = sum(one.usage_cores or 0.0 for one in known if one is not None)
            idle += max(estimate_pod_cores(pod, snapshot, memory.containers, config, reclaimable=False) - used, 0.0)
    return idle


def online_cores_by_numa(
    snapshot: Snapshot, memory: AdvisorState, cores_of: Callable[[Pod], float]
) -> dict[int, float]:
    """Cores of the online pods by NUMA node: as a bound pod's CPUs are spread; of one that is bound to none, of all alike."""
    sizes = numa_cpu_counts(snapshot.topology)
    numa_of = {cpu.id: cpu.numa for cpu in snapshot.topology.cpus}
    found, anywhere = dict.fromkeys(sizes, 0.0), 0.0
    for pod in snapshot.pods:
        if not pod.qos.online:
            continue
        cores = cores_of(pod)
        bound = [numa for numa in pod.bound_numa if numa in sizes]
        if not bound:
            anywhere += cores
            continue
        assigned = Counter(numa_of.get(cpu) for c in pod.containers for cpu in memory.cpus.get(c.cgroup, ()))
        at = {numa: assigned[numa] for numa in bound}
        for numa in bound:
            found[numa] += cores * numa_share(numa, bound, at)
    share = anywhere / sum(sizes.values()) if sizes else 0.0
    return {numa: cores + share * sizes[numa] for numa, cores in found.items()}


def numa_cpu_counts(topology: Topology) -> dict[int, int]:
    """Number of CPUs by NUMA node."""
    return dict(sorted(Counter(cpu.numa for cpu in topology.cpus).items()))

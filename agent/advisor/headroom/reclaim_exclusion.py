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
from agent.advisor.provision.regions import cpus_per_numa_node, pod_bound_nodes, share_pool_name
from agent.config.advisor import AdvisorConfig
from api.cpu import Topology
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import Snapshot


class DisableReclaimLevel(StrEnum):
    """Extent to which a pod disables reclaim (the service profile's disableReclaimLevel)."""

    POD = "Pod"
    """Its own NUMA nodes if it is exclusive there, none otherwise."""
    NUMA = "NUMA"
    SOCKET = "Socket"
    NODE = "Node"


class ReclaimConstraint(msgspec.Struct, frozen=True, kw_only=True):
    """An online pod's constraints on what is reclaimable around it."""

    pod: str
    """`namespace/name`."""
    numa_nodes: tuple[int, ...] = ()
    """NUMA nodes of its CPUs; empty if they are not known."""
    reclaimable: bool = True
    """False if its service profile reports a problem or forbids reclaim."""
    level: DisableReclaimLevel = DisableReclaimLevel.POD
    exclusive: bool = False
    """Whether the pod is numa_exclusive."""
    bound_pool: str = ""
    """Name of its share pool if that is bound to its NUMA nodes."""


class ReclaimableNodes(msgspec.Struct, frozen=True, kw_only=True):
    """Reclaimable NUMA nodes, and by node the reasons why the others are not."""

    numa_nodes: tuple[int, ...]
    refused: Mapping[int, str] = {}
    unknown: tuple[str, ...] = ()
    """Pods that disable reclaim on NUMA nodes that are not known: then no headroom is computed for any node."""


def apply_constraints(
    topology: Topology, constraints: Sequence[ReclaimConstraint], disabled_pools: Collection[str]
) -> ReclaimableNodes:
    """Return the NUMA nodes that no constraint excludes."""
    sockets: dict[int, set[int]] = {}
    socket_of: dict[int, int] = {}
    for cpu in topology.cpus:
        sockets.setdefault(cpu.socket, set()).add(cpu.numa)
        socket_of[cpu.numa] = cpu.socket
    refused: dict[int, str] = {}
    unknown = []
    for constraint in constraints:
        for reach, why in _excluded_reaches(constraint, disabled_pools):
            if reach is DisableReclaimLevel.NODE:
                nodes = set(socket_of)
            elif not constraint.numa_nodes:
                unknown.append(constraint.pod)
                continue
            else:
                nodes = set(constraint.numa_nodes)
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
    constraint: ReclaimConstraint, disabled_pools: Collection[str]
) -> list[tuple[DisableReclaimLevel, str]]:
    """How far a pod disables reclaim, and why; twice if both reasons hold."""
    reaches: list[tuple[DisableReclaimLevel, str]] = []
    if not constraint.reclaimable and (constraint.level is not DisableReclaimLevel.POD or constraint.exclusive):
        reach = DisableReclaimLevel.NUMA if constraint.level is DisableReclaimLevel.POD else constraint.level
        reaches.append((reach, f"reclaim is disabled for {constraint.pod} at level {constraint.level}"))
    pool = constraint.bound_pool.partition("-NUMA")[0]
    if pool and pool in disabled_pools:
        reaches.append((DisableReclaimLevel.SOCKET, f"reclaim is disabled for share pool {pool} of {constraint.pod}"))
    return reaches


def numa_nodes_of_bound_pods(
    pods: Sequence[Pod], cpus_by_cgroup: Mapping[str, tuple[int, ...]], topology: Topology
) -> tuple[int, ...]:
    """Return the NUMA nodes that some pod is bound to: by its result, or by its CPUs for dedicated_cores."""
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
    """Return the constraints of online pods that are bound to NUMA nodes or reach further than themselves."""
    nodes = snapshot.topology.numa_nodes
    numa_of = {cpu.id: cpu.numa for cpu in snapshot.topology.cpus}
    result = []
    for pod in snapshot.pods:
        level = DisableReclaimLevel(pod.profile.disable_reclaim_level or DisableReclaimLevel.POD)
        binding = pod.enhancements.numa_binding
        if not pod.qos.online or not (binding or level is not DisableReclaimLevel.POD):
            continue
        cpus = (cpu for c in pod.containers for cpu in cpus_by_cgroup.get(c.cgroup, ()))
        bound = pod_bound_nodes(pod, nodes)
        result.append(
            ReclaimConstraint(
                pod=pod.key,
                numa_nodes=bound or tuple(sorted({numa_of[cpu] for cpu in cpus if cpu in numa_of})),
                reclaimable=pod.profile.reclaimable,
                level=level,
                exclusive=binding and pod.enhancements.numa_exclusive,
                bound_pool=share_pool_name(pod, nodes) if bound and pod.qos is QoSLevel.SHARED else "",
            )
        )
    return tuple(result)


def unreclaimable_idle_bytes(snapshot: Snapshot) -> float:
    """Return the memory that pods which are not reclaimable request and do not use, page cache excluded.

    Memory that is not measured counts as idle.
    """
    idle = 0.0
    for pod in snapshot.pods:
        if pod.qos.online and not pod.profile.reclaimable:
            requested = sum(container.memory_request_bytes or 0 for container in pod.containers)
            used = sum(non_cache_bytes(snapshot.cgroups.get(container.cgroup)) or 0.0 for container in pod.containers)
            idle += max(requested - used, 0.0)
    return idle


def reclaimable_nodes(snapshot: Snapshot, state: AdvisorState, config: AdvisorConfig) -> ReclaimableNodes:
    """Return the reclaimable NUMA nodes, by the constraints of the pods."""
    disabled = config.provision.disable_reclaim_share_pools
    needed = disabled or any(not pod.profile.reclaimable for pod in snapshot.pods)
    return apply_constraints(snapshot.topology, build_constraints(snapshot, state.cpus) if needed else (), disabled)


def max_reclaimable_cores(
    snapshot: Snapshot, nodes: ReclaimableNodes, state: AdvisorState, config: AdvisorConfig
) -> float | None:
    """Return the maximum of reclaimable CPU: the reclaimable NUMA nodes less the requests of pods that are not
    reclaimable.

    None if every pod is reclaimable. While the nodes of a pod are unknown, it does not grow.
    """
    if all(is_pod_reclaimable(pod, config) for pod in snapshot.pods if pod.qos.online):
        return None
    sizes = cpus_per_numa_node(snapshot.topology)

    def requested(pod: Pod) -> float:
        return (
            0.0
            if is_pod_reclaimable(pod, config)
            else estimate_pod_cores(pod, snapshot, state.containers, config, reclaimable=False)
        )

    required = online_cores_by_numa(snapshot, state, requested)
    maximum = sum(max(sizes[numa] - required[numa], 0.0) for numa in nodes.numa_nodes)
    return min(maximum, state.reclaimable_cores) if nodes.unknown and state.reclaimable_cores is not None else maximum


def unreclaimable_idle_cores(snapshot: Snapshot, state: AdvisorState, config: AdvisorConfig) -> float:
    """Return the CPU that pods which are not reclaimable request and do not use; CPU that is not measured counts as idle."""
    idle = 0.0
    for pod in snapshot.pods:
        if pod.qos.online and not is_pod_reclaimable(pod, config):
            demands = (state.containers.get(container.cgroup) for container in pod.containers)
            used = sum(demand.usage_cores or 0.0 for demand in demands if demand is not None)
            idle += max(estimate_pod_cores(pod, snapshot, state.containers, config, reclaimable=False) - used, 0.0)
    return idle


def online_cores_by_numa(snapshot: Snapshot, state: AdvisorState, cores_of: Callable[[Pod], float]) -> dict[int, float]:
    """Return cores of online pods by NUMA node: bound pods as their CPUs are spread, unbound ones in proportion to all CPUs."""
    sizes = cpus_per_numa_node(snapshot.topology)
    numa_of = {cpu.id: cpu.numa for cpu in snapshot.topology.cpus}
    by_numa, unbound = dict.fromkeys(sizes, 0.0), 0.0
    for pod in snapshot.pods:
        if not pod.qos.online:
            continue
        cores = cores_of(pod)
        bound = [numa for numa in pod.bound_numa if numa in sizes]
        if not bound:
            unbound += cores
            continue
        assigned = Counter(numa_of.get(cpu) for c in pod.containers for cpu in state.cpus.get(c.cgroup, ()))
        at = {numa: assigned[numa] for numa in bound}
        for numa in bound:
            by_numa[numa] += cores * numa_share(numa, bound, at)
    share = unbound / sum(sizes.values()) if sizes else 0.0
    return {numa: cores + share * sizes[numa] for numa, cores in by_numa.items()}

"""Groups online pods into Katalyst's regions and computes the bounds of each region, per NUMA node.
A region is the shared pods of one pool, one dedicated pod on one NUMA node, or one isolated pod.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from math import ceil
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from agent.config.advisor import AdvisorConfig, ProvisionConfig
from api.advice import Region, RegionKind
from api.cpu import Topology
from api.pod import Container, Pod
from api.qos import QoSLevel

SHARE_POOL = "share"


class NumaCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs by NUMA node."""

    cpus: Mapping[int, int]
    available: Mapping[int, int]
    """Without the reserve pool and the CPUs that no pool of pods may have."""
    reserved_for_reclaim: Mapping[int, int]
    """CPUs of those available that reclaimed pods always keep."""


class RegionMembers(NamedTuple):
    """A region and its pods."""

    region: Region
    pods: tuple[Pod, ...]


class RegionBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a region's requirement, and the reserves added to it, in cores."""

    upper: float
    lower: float
    reserved_for_allocate: float = 0.0
    reserved_for_reclaim: float = 0.0


def build_numa_capacity(
    topology: Topology,
    reserve: Mapping[int, int],
    forbidden: Mapping[int, int],
    advisor: AdvisorConfig,
    config: ProvisionConfig,
) -> NumaCapacity:
    """Return the CPUs of each NUMA node and how many of them are available."""
    cpus = cpus_per_numa_node(topology)
    reserved = reserve_for_reclaim(cpus, advisor, config)
    available = {numa: max(size - reserve.get(numa, 0) - forbidden.get(numa, 0), 0) for numa, size in cpus.items()}
    return NumaCapacity(
        cpus=cpus,
        available=available,
        reserved_for_reclaim={numa: min(reserved[numa], available[numa]) for numa in cpus},
    )


def reserve_for_reclaim(cpus: Mapping[int, int], advisor: AdvisorConfig, config: ProvisionConfig) -> dict[int, int]:
    """Return the CPUs reserved for reclaimed pods on each NUMA node: a ratio, or a number spread evenly, at least one each."""
    if config.numa_min_reclaimed_ratio:
        return {
            numa: max(config.numa_min_reclaimed_cores, ceil(round(config.numa_min_reclaimed_ratio * size, 6)))
            for numa, size in cpus.items()
        }
    total = advisor.reclaim_reserve_cores(sum(cpus.values()), len(cpus))
    return {numa: max(total // len(cpus), 1) for numa in cpus}


def cpus_per_numa_node(topology: Topology) -> dict[int, int]:
    """Return the number of CPUs by NUMA node."""
    return dict(sorted(Counter(cpu.numa for cpu in topology.cpus).items()))


def build_regions(
    pods: Sequence[Pod],
    numa_nodes: Collection[int],
    isolated: Collection[str],
    assigned_nodes: Callable[[Pod], tuple[int, ...]],
    reclaimable: Callable[[Pod, str], bool],
) -> tuple[RegionMembers, ...]:
    """Return the regions in the order of their first pod. `reclaimable` receives a pod and the name of its pool."""
    regions: dict[str, Region] = {}
    members: dict[str, list[Pod]] = {}
    for pod in pods:
        for region in _pod_regions(pod, numa_nodes, isolated, assigned_nodes, reclaimable):
            regions.setdefault(region.name, region)
            members.setdefault(region.name, []).append(pod)
    free = unbound_numa_nodes(regions.values(), numa_nodes)
    result = []
    for name, region in regions.items():
        region_pods = tuple(members[name])
        complete = replace(
            region,
            numa_nodes=region.numa_nodes or free,
            containers=tuple(container.cgroup for pod in region_pods for container in pod.containers),
            pods=tuple(pod.key for pod in region_pods),
        )
        result.append(RegionMembers(complete, region_pods))
    return tuple(result)


def _pod_regions(
    pod: Pod,
    numa_nodes: Collection[int],
    isolated: Collection[str],
    assigned_nodes: Callable[[Pod], tuple[int, ...]],
    reclaimable: Callable[[Pod, str], bool],
) -> Iterable[Region]:
    bound = pod_bound_nodes(pod, numa_nodes)
    if pod.qos is QoSLevel.DEDICATED:
        pool = f"dedicated-{pod.key}"
        is_reclaimable = reclaimable(pod, "")
        if not bound:
            yield Region(
                name=pool,
                kind=RegionKind.DEDICATED,
                pool=pool,
                numa_nodes=assigned_nodes(pod),
                reclaimable=is_reclaimable,
            )
        for numa in bound:
            yield Region(
                name=f"{pool}-NUMA{numa}",
                kind=RegionKind.DEDICATED,
                pool=pool,
                numa_nodes=(numa,),
                bound=True,
                exclusive=pod.enhancements.numa_exclusive,
                reclaimable=is_reclaimable,
            )
    elif pod.qos is QoSLevel.SHARED:
        base = pod.enhancements.cpuset_pool or SHARE_POOL
        suffix = f"-NUMA{bound[0]}" if bound else ""
        isolated_pod = pod.key in isolated
        name = f"isolation-{pod.key}{suffix}" if isolated_pod else f"{base}{suffix}"
        yield Region(
            name=name,
            kind=RegionKind.ISOLATION if isolated_pod else RegionKind.SHARE,
            pool=name,
            numa_nodes=bound,
            bound=bool(bound),
            reclaimable=not isolated_pod and reclaimable(pod, base),
        )


def pod_bound_nodes(pod: Pod, numa_nodes: Collection[int]) -> tuple[int, ...]:
    """Return the NUMA nodes of this machine that a pod is bound to; a shared pod is bound to one or none."""
    if not pod.enhancements.numa_binding:
        return ()
    bound = tuple(sorted(set(pod.bound_numa) & set(numa_nodes)))
    return () if pod.qos is QoSLevel.SHARED and len(bound) != 1 else bound


def share_pool_name(pod: Pod, numa_nodes: Collection[int]) -> str:
    """Return the name of the pool of a shared pod that is not isolated."""
    bound = pod_bound_nodes(pod, numa_nodes)
    return f"{pod.enhancements.cpuset_pool or SHARE_POOL}{f'-NUMA{bound[0]}' if bound else ''}"


def unbound_numa_nodes(regions: Iterable[Region], numa_nodes: Collection[int]) -> tuple[int, ...]:
    """Return the NUMA nodes for unbound regions: those without bound regions, else those without exclusive pods, else all."""
    bound_nodes: set[int] = set()
    exclusive: set[int] = set()
    for region in regions:
        if region.bound:
            bound_nodes.update(region.numa_nodes)
        if region.exclusive:
            exclusive.update(region.numa_nodes)
    all_nodes = sorted(numa_nodes)
    for excluded in (bound_nodes, exclusive):
        if nodes := tuple(numa for numa in all_nodes if numa not in excluded):
            return nodes
    return tuple(all_nodes)


def compute_bounds(
    members: Sequence[RegionMembers], node: NumaCapacity, advisor: AdvisorConfig, config: ProvisionConfig
) -> dict[str, RegionBounds]:
    """Return the bounds of every region, by name."""
    sharing = Counter(
        numa
        for region, _ in members
        if region.bound or region.kind is not RegionKind.ISOLATION
        for numa in region.numa_nodes
    )
    reserve = advisor.reserve_cores(sum(node.cpus.values()))
    result = {}
    for member in members:
        region = member.region
        # Fractions, because three binary thirds of the reserve may exceed it and would be rounded up to a further CPU.
        parts = {numa: Fraction(1, max(sharing[numa], 1)) for numa in region.numa_nodes}
        upper, lower = _region_limits(member, node, advisor, config)
        result[region.name] = RegionBounds(
            upper=upper,
            lower=min(lower, upper),
            reserved_for_allocate=reserve * float(sum(parts.values(), Fraction()) / len(node.cpus)),
            reserved_for_reclaim=float(
                sum((node.reserved_for_reclaim[numa] * part for numa, part in parts.items()), Fraction())
            ),
        )
    return result


def _region_limits(
    member: RegionMembers, node: NumaCapacity, advisor: AdvisorConfig, config: ProvisionConfig
) -> tuple[float, float]:
    region = member.region
    if region.kind is RegionKind.ISOLATION:
        size = max(1.0, max_region_cores(member, sidecars=config.isolation.include_sidecars))
        return size, size
    if region.kind is RegionKind.DEDICATED and not region.exclusive:
        return max(1.0, max_region_cores(member, sidecars=True)), config.min_dedicated_cores
    room = sum(node.available[numa] - node.reserved_for_reclaim[numa] for numa in region.numa_nodes)
    smallest = config.min_dedicated_cores if region.kind is RegionKind.DEDICATED else advisor.min_share_cores
    if region.kind is RegionKind.SHARE and region.pool.partition("-NUMA")[0] != SHARE_POOL:
        # A pool that pods named has at most their requests (agent/qrm/cpuset/fair_shares.py), so a larger size would hold
        # CPUs that neither other pools nor reclaimed pods get.
        room = min(room, ceil(round(requested_cores(member), 6)))
    return max(float(room), 1.0), smallest


def max_region_cores(member: RegionMembers, *, sidecars: bool) -> float:
    """Return the maximum use of the pods: limits, or requests if there is no limit or a lower one."""
    return sum(
        max_container_cores(container)
        for pod in member.pods
        for container in pod.containers
        if sidecars or not container.sidecar
    )


def max_container_cores(container: Container) -> float:
    """Return the limit of a container, or its request if that is higher."""
    return max(container.cpu_limit_cores or 0.0, container.cpu_request_cores or 0.0)


def requested_cores(member: RegionMembers) -> float:
    """Return the sum of the pods' requests; a pod bound to several NUMA nodes has an equal part on each."""
    total = sum(container.cpu_request_cores or 0.0 for pod in member.pods for container in pod.containers)
    if member.region.kind is RegionKind.DEDICATED and member.region.bound:
        return total / max(len(member.pods[0].bound_numa), 1)
    return total

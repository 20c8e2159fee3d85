"""Estimates the CPU that online containers need: Katalyst's canonical estimate, load by run-queue latency.
A container needs max(1.25 x use, load1, load5) cores; its request while it ramps up or is not measured; the
configured fallback (4 cores) if it has no request. Load is the mean number of runnable tasks (Little's law),
averaged exponentially over one and five minutes like the kernel's load average. Latency caused by the
container's own quota counts as load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import exp

from agent.advisor.advisor_state import AdvisorState, ContainerDemand
from agent.advisor.provision.regions import SHARE_POOL
from agent.config.advisor import AdvisorConfig
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.rates import CgroupRates, Rates
from api.snapshot import Snapshot
from api.units import NS_PER_S

MISSING_CONTAINER_S = 30.0
"""A listed container whose cgroup is missing for this long needs nothing; until then it keeps its demand. If the tree
could not be read, a missing cgroup carries no information."""
USAGE_WINDOW_S = 5.0
"""Use is averaged over Katalyst's metric interval, so that one-second cycles are as stable as its five-second ones."""


def online_containers(snapshot: Snapshot) -> tuple[Container, ...]:
    """Return the containers of shared and dedicated pods, whose unused CPU is reclaimable."""
    return tuple(container for pod in snapshot.pods if pod.qos.online for container in pod.containers)


def update_demand(
    snapshot: Snapshot, change: Rates | None, state: AdvisorState, config: AdvisorConfig
) -> dict[str, ContainerDemand]:
    """Return the demand of every online container, updated by the rates of this interval."""
    result, readable = {}, "/" in snapshot.cgroups
    for container in online_containers(snapshot):
        sample = snapshot.cgroups.get(container.cgroup)
        before = state.containers.get(container.cgroup)
        if sample is None:
            if before is not None and (
                not readable or snapshot.taken_at_ns - before.last_seen_ns < MISSING_CONTAINER_S * NS_PER_S
            ):
                result[container.cgroup] = before
            continue
        if before is None or before.cgroup_id != sample.id:
            before = ContainerDemand(
                cgroup_id=sample.id,
                first_seen_ns=snapshot.taken_at_ns,
                last_seen_ns=snapshot.taken_at_ns,
                ramping=state.previous is not None,
            )
        result[container.cgroup] = _update_container_demand(
            before, change.cgroups.get(container.cgroup) if change else None, snapshot.taken_at_ns, config
        )
    return result


def _update_container_demand(
    before: ContainerDemand, rate: CgroupRates | None, now_ns: int, config: AdvisorConfig
) -> ContainerDemand:
    usage, load1, load5, load_at_ns = before.usage_cores, before.load1, before.load5, before.load_at_ns
    if rate is not None and rate.cpu_cores is not None:
        seconds = rate.interval_ns / NS_PER_S
        usage = exponential_average(usage, rate.cpu_cores, seconds, USAGE_WINDOW_S)
        if rate.wait_cores is not None:
            load1 = exponential_average(load1, rate.cpu_cores + rate.wait_cores, seconds, 60.0)
            load5 = exponential_average(load5, rate.cpu_cores + rate.wait_cores, seconds, 300.0)
            load_at_ns = now_ns
    return ContainerDemand(
        cgroup_id=before.cgroup_id,
        first_seen_ns=before.first_seen_ns,
        last_seen_ns=now_ns,
        ramping=before.ramping and now_ns - before.first_seen_ns < config.ramp_up_s * NS_PER_S,
        usage_cores=usage,
        load1=load1,
        load5=load5,
        load_at_ns=load_at_ns,
    )


def exponential_average(before: float | None, value: float, seconds: float, window_s: float) -> float:
    """Return the next value of an exponential average; without a previous value, the first one."""
    if before is None:
        return value
    return value + (before - value) * exp(-seconds / window_s)


def estimate_container_cores(container: Container, demand: ContainerDemand | None, config: AdvisorConfig) -> float:
    """Return the estimated need of one container in cores."""
    fallback = config.fallback_cores if container.cpu_request_cores is None else container.cpu_request_cores
    if demand is None or demand.ramping or demand.usage_cores is None:
        return fallback
    return max(demand.usage_cores * config.usage_margin, demand.load1 or 0.0, demand.load5 or 0.0)


def estimate_online_cores(snapshot: Snapshot, state: AdvisorState, config: AdvisorConfig) -> float:
    """Return the estimated need in cores of all online containers that exist, or existed a moment ago."""
    return sum(estimate_pod_need(pod, snapshot, state.containers, config) for pod in snapshot.pods if pod.qos.online)


def estimate_pod_need(
    pod: Pod, snapshot: Snapshot, needs: Mapping[str, ContainerDemand], config: AdvisorConfig
) -> float:
    """Return the estimated need of an online pod, and at least its requests if it is not reclaimable."""
    estimate = estimate_pod_cores(pod, snapshot, needs, config, reclaimable=True)
    return (
        estimate
        if is_pod_reclaimable(pod, config)
        else max(estimate, estimate_pod_cores(pod, snapshot, needs, config, reclaimable=False))
    )


def is_pod_reclaimable(pod: Pod, config: AdvisorConfig) -> bool:
    """Return whether unused CPU of an online pod is reclaimable, by its service profile and its share pool."""
    pool = pod.enhancements.cpuset_pool or SHARE_POOL
    disabled = pod.qos is QoSLevel.SHARED and pool in config.provision.disable_reclaim_share_pools
    return pod.profile.reclaimable and not disabled


def estimate_pod_cores(
    pod: Pod, snapshot: Snapshot, needs: Mapping[str, ContainerDemand], config: AdvisorConfig, *, reclaimable: bool
) -> float:
    """Return the estimated need of an online pod, or its requests if `reclaimable` is False. A container without a request
    counts with its estimated use: a pod must not withhold CPU that it does not request from reclaiming."""
    return sum(
        estimate_container_cores(
            container,
            needs.get(container.cgroup) if reclaimable or container.cpu_request_cores is None else None,
            config,
        )
        for container in pod.containers
        if _is_counted(container, snapshot, needs)
    )


def _is_counted(container: Container, snapshot: Snapshot, needs: Mapping[str, ContainerDemand]) -> bool:
    """Whether the container exists, existed a moment ago, or may exist because the tree could not be read."""
    return container.cgroup in snapshot.cgroups or container.cgroup in needs or "/" not in snapshot.cgroups


def numa_share(numa: int, bound: Collection[int], assigned: Mapping[int, int]) -> float:
    """Return the part of a bound pod's need that falls on one of its NUMA nodes, by the distribution of its CPUs.

    `assigned` counts its CPUs by NUMA node; without CPUs on its bound nodes, every node gets an equal part.
    """
    total = sum(assigned.get(node, 0) for node in bound)
    return assigned.get(numa, 0) / total if total else 1 / len(bound)

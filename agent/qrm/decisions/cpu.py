"""Turns CPU advice into decisions on cpusets, quotas, `cpu.idle` and weights (Katalyst's QRM CPU policy).
Pure. Online pods are changed only where cpusets separate the pools. Reclaimed pods share the reclaimable CPU, or
the quota of their NUMA nodes, in proportion to their requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import msgspec

from agent.qrm.cpuset.state import RECLAIM, CpusetAllocation
from api.advice import NOT_NUMA_BOUND, ControlKnob, PoolSize
from api.cpu import format_cpu_list
from api.decision import Advice, Decision
from api.knobs import Knob, Reason
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.snapshot import Snapshot


def numa_quota_cores(sizes: Sequence[PoolSize]) -> dict[int, float]:
    """By NUMA node: what reclaimed pods may use of it together, in cores, where a quota says so."""
    return {
        size.numa: size.quota_cores
        for size in sizes
        if size.pool == RECLAIM and size.numa != NOT_NUMA_BOUND and size.quota_cores is not None
    }


def split_numa_quotas(
    limits: Mapping[int, float], claims: Mapping[str, float], cpus: Mapping[str, Counter[int]]
) -> dict[str, float]:
    """Cores of each container that runs on a limited node; of each such node all together have its limit.

    One that runs on several claims a part of each, as large as that node's part in their limits. What it may use of a node
    without a limit are its CPUs there. `claims` and `cpus`, a number for each NUMA node, are by container.
    """
    parts = {}
    for container, claim in claims.items():
        room = {numa: limits[numa] for numa in cpus[container] if numa in limits}
        whole = sum(room.values())
        if room:
            parts[container] = {numa: claim * (limit / whole if whole else 1.0) for numa, limit in room.items()}
    total: dict[int, float] = {}
    for mine in parts.values():
        for numa, part in mine.items():
            total[numa] = total.get(numa, 0.0) + part
    free = {container: sum(n for numa, n in cpus[container].items() if numa not in limits) for container in parts}
    return {
        container: free[container]
        + sum(limits[numa] * part / total[numa] for numa, part in mine.items() if total[numa] > 0)
        for container, mine in parts.items()
    }


QUOTA_PERIODS_US = (100_000, 200_000, 500_000, 1_000_000)
"""Periods of quotas: the kernel's default where it can be, up to the kernel's longest where the share is small."""
MIN_QUOTA_US = 1_000
"""The kernel's smallest quota, 1 ms: in the longest period a thousandth of a CPU, below which no share can be held."""
YIELD_REASON = Reason(
    rule="yield_to_online",
    text="Reclaimed pods run only where nobody else wants to: the scheduler gives way to online pods at every wakeup.",
)
"""Why a reclaimed cgroup has the lowest priority: not a measurement but what reclaimed_cores means."""
MIN_WEIGHT = "1"
"""Where the kernel has no cpu.idle: a hundredth of the default weight, which is 10 shares on version 1."""


def decide_cpu(
    advice: Advice,
    snapshot: Snapshot,
    knobs: Mapping[str, Collection[Knob]],
    placement: CpusetAllocation | None = None,
) -> tuple[Decision, ...]:
    """Every knob of every managed container that the advice says something about, whatever its value is now.

    `knobs` are those that the kernel has for each cgroup; what none of them has is not decided, what only this one lacks
    is, so that its refusal is seen. The actuator drops what changes nothing. A cpuset is decided only of who may not use
    the whole node.
    """
    known = frozenset[Knob]().union(*knobs.values())
    quotas = _node_wide_quotas(advice, snapshot) if advice.idle else _numa_quotas(advice, snapshot, placement)
    reasons = {cgroup: one.reason for one in advice.cpu.regions for cgroup in one.region.containers}
    cpus, nodes = tuple(sorted(snapshot.topology.ids)), tuple(sorted(snapshot.topology.numa_nodes))
    decisions: list[Decision] = []
    for pod in snapshot.pods:
        for container in pod.containers:
            sample = snapshot.cgroups.get(container.cgroup)
            if sample is None:
                continue
            values: dict[Knob, tuple[str, Reason]] = {}
            if pod.qos is QoSLevel.RECLAIMED:
                values = _reclaimed_values(advice, quotas.get(container.cgroup), knobs.get(container.cgroup, ()))
            if placement is not None:
                why = reasons.get(container.cgroup, advice.reason)
                values |= _cpuset_values(placement, container.cgroup, cpus, nodes, why)
            decisions.extend(
                Decision(
                    cgroup=container.cgroup,
                    cgroup_id=sample.id,
                    pod=pod.key,
                    knob=knob,
                    value=value,
                    reason=verdict,
                )
                for knob, (value, verdict) in values.items()
                if knob in known
            )
    return tuple(decisions)


def _cpuset_values(
    placement: CpusetAllocation, cgroup: str, all_cpus: tuple[int, ...], all_nodes: tuple[int, ...], why: Reason
) -> dict[Knob, tuple[str, Reason]]:
    """CPUs and NUMA nodes of a container that may not use all of them; why its pool is so large, and that it has these."""
    cpus, mems = placement.cpus.get(cgroup, ()), placement.mems.get(cgroup, ())
    narrow, bound = cpus and cpus != all_cpus, mems and mems != all_nodes
    if not narrow and not bound:
        return {}
    found = placement.reasons.get(cgroup, why)
    both = msgspec.structs.replace(why, text=f"{why.text} {found.text}", inputs={**why.inputs, **found.inputs})
    values = {Knob.CPUSET: (_cpu_list_text(cpus), both)} if narrow else {}
    return values | ({Knob.MEMS: (_cpu_list_text(mems), both)} if bound else {})


@lru_cache(maxsize=512)
def _cpu_list_text(numbers: tuple[int, ...]) -> str:
    # All containers of a pool have the same.
    return format_cpu_list(numbers)


def _weighted_reason(why: Reason, advice: Advice, cgroup: str) -> Reason:
    """Why a reclaimed container has this part of what is lent."""
    claim = advice.claims.get(cgroup)
    if claim is None:
        return why
    text = f"{why.text} This one made online pods wait: {claim:.0%} of its claim counts."
    return msgspec.structs.replace(why, text=text, inputs={**why.inputs, "claim": round(claim, 3)})


def lowest_priority(knobs: Collection[Knob]) -> tuple[Knob, str]:
    """What makes a cgroup give way to its siblings, with these knobs: before Linux 5.15 there is only the smallest weight."""
    return (Knob.IDLE, "1") if Knob.IDLE in knobs else (Knob.WEIGHT, MIN_WEIGHT)


def _reclaimed_values(
    advice: Advice, quota: tuple[str, Reason] | None, knobs: Collection[Knob]
) -> dict[Knob, tuple[str, Reason]]:
    """Priority and limit of one reclaimed container."""
    values = {}
    if advice.idle:
        knob, value = lowest_priority(knobs)
        values[knob] = (value, YIELD_REASON)
    return values if quota is None else values | {Knob.QUOTA: quota}


def reclaimed_containers(snapshot: Snapshot) -> list[Container]:
    """Those of reclaimed pods that are there."""
    return [
        container
        for pod in snapshot.pods
        if pod.qos is QoSLevel.RECLAIMED
        for container in pod.containers
        if container.cgroup in snapshot.cgroups
    ]


def _node_wide_quotas(advice: Advice, snapshot: Snapshot) -> Mapping[str, tuple[str, Reason]]:
    """What each reclaimed container may use: the lent CPU in proportion to requests, never above its own limit; those that
    made online pods wait have less of a claim.

    A small share gets a longer period instead of the kernel's smallest quota in the usual one, so that all of them
    together are what is lent; its burst is then longer too.
    """
    containers = reclaimed_containers(snapshot)
    unlimited = advice.reclaimable_cores >= len(snapshot.topology.cpus)
    claims = {c.cgroup: request_weight(c) * advice.claims.get(c.cgroup, 1.0) for c in containers}
    total = sum(claims.values())
    result = {}
    for container in containers:
        cgroup = container.cgroup
        cores = _limited_cores(container, None if unlimited else advice.reclaimable_cores * claims[cgroup] / total)
        value = f"max {QUOTA_PERIODS_US[0]}" if cores is None else format_quota(cores)
        result[cgroup] = (value, _weighted_reason(advice.reason, advice, cgroup))
    return result


def _numa_quotas(
    advice: Advice, snapshot: Snapshot, placement: CpusetAllocation | None
) -> Mapping[str, tuple[str, Reason]]:
    """The same where CPUs limit reclaimed pods, and a quota those on some NUMA nodes; others have none."""
    limits = numa_quota_cores(advice.cpu.sizes)
    if not limits or placement is None:
        return {}
    numa_of = {cpu.id: cpu.numa for cpu in snapshot.topology.cpus}
    known: dict[tuple[int, ...], Counter[int]] = {}
    containers, cpus = reclaimed_containers(snapshot), {}
    for container in containers:
        its = placement.cpus.get(container.cgroup, ())
        if its not in known:
            known[its] = Counter(numa_of[cpu] for cpu in its if cpu in numa_of)
        cpus[container.cgroup] = known[its]
    found = split_numa_quotas(limits, {container.cgroup: request_weight(container) for container in containers}, cpus)
    result = {}
    for container in containers:
        cores = _limited_cores(container, found.get(container.cgroup))
        if cores is not None and container.cgroup in found:
            nodes = [numa for numa in sorted(cpus[container.cgroup]) if numa in limits]
            result[container.cgroup] = (format_quota(cores), _numa_quota_reason(advice, limits, nodes, cores))
    return result


def _numa_quota_reason(advice: Advice, limits: Mapping[int, float], nodes: list[int], cores: float) -> Reason:
    """Why a reclaimed container on these NUMA nodes has this quota."""
    together = " and ".join(f"{limits[numa]:.2f} cores of NUMA node {numa}" for numa in nodes)
    whys = [
        one.reason.text
        for one in advice.cpu.regions
        if ControlKnob.RECLAIM_QUOTA in one.controls and set(nodes) & set(one.region.numa_nodes)
    ]
    text = f"Reclaimed pods may use {together} together, and this one {cores:.2f} by its claim."
    inputs = {f"quota_numa{numa}_cores": round(limits[numa], 3) for numa in nodes}
    return Reason(
        rule="reclaim_quota", text=" ".join((text, *whys)), threshold=sum(limits[numa] for numa in nodes), inputs=inputs
    )


def _limited_cores(container: Container, cores: float | None) -> float | None:
    limit = container.cpu_limit_cores
    if limit is None or cores is None:
        return limit if cores is None else cores
    return min(cores, limit)


def format_quota(cores: float) -> str:
    """A quota of so much CPU; a small one in a longer period, for no quota is below the kernel's smallest."""
    period_us = next(
        (period for period in QUOTA_PERIODS_US if round(cores * period) >= MIN_QUOTA_US), QUOTA_PERIODS_US[-1]
    )
    return f"{round(cores * period_us)} {period_us}"


def request_weight(container: Container) -> float:
    """By which reclaimed containers share what is lent."""
    return container.reclaimed_cpu_cores or container.cpu_request_cores or 1.0


def managed_cgroups(pods: tuple[Pod, ...]) -> frozenset[str]:
    """The cgroups that the agent may ever write to: those of listed pods, and no other."""
    return frozenset(container.cgroup for pod in pods for container in pod.containers)

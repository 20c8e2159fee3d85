"""Advice on CPU into decisions on cgroups (QRM's CPU policy). Pure.

Online pods are touched only where cpusets keep the pools apart; where priority does, their cgroups stay as they are.
Reclaimed pods have a quota each where priority alone does not hold them back: of what is lent, or of what a NUMA node's
quota allows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from functools import lru_cache

import msgspec

from agent.qrm.placing.state import Placement
from agent.qrm.quotas import limited_nodes, shares
from api.advice import Control
from api.cpus import format_cpu_list
from api.decisions import Advice, Decision
from api.knobs import Knob, Verdict
from api.pods import Container, Pod
from api.qos import QoSLevel
from api.samples import Snapshot

PERIODS_US = (100_000, 200_000, 500_000, 1_000_000)
"""Periods of quotas: the kernel's default where it can be, up to the kernel's longest where the share is small."""
MIN_QUOTA_US = 1_000
"""The kernel's smallest quota, 1 ms: in the longest period a thousandth of a CPU, below which no share can be held."""
YIELD = Verdict(
    rule="yield_to_online",
    text="Reclaimed pods run only where nobody else wants to: the scheduler gives way to online pods at every wakeup.",
)
"""Why a reclaimed cgroup has the lowest priority: not a measurement but what reclaimed_cores means."""
MIN_WEIGHT = "1"
"""Where the kernel has no cpu.idle: a hundredth of the default weight, which is 10 shares on version 1."""


def decide(
    advice: Advice,
    snapshot: Snapshot,
    knobs: Mapping[str, Collection[Knob]],
    placement: Placement | None = None,
) -> tuple[Decision, ...]:
    """Every knob of every managed container that the advice says something about, whatever its value is now.

    `knobs` are those that the kernel has for each cgroup; what none of them has is not decided, what only this one lacks
    is, so that its refusal is seen. The actuator drops what changes nothing. A cpuset is decided only of who may not use
    the whole node.
    """
    known = frozenset[Knob]().union(*knobs.values())
    quotas = _lent(advice, snapshot) if advice.idle else _by_node(advice, snapshot, placement)
    reasons = {cgroup: one.verdict for one in advice.cpu.regions for cgroup in one.region.containers}
    cpus, nodes = tuple(sorted(snapshot.topology.ids)), tuple(sorted(snapshot.topology.numa_nodes))
    decisions: list[Decision] = []
    for pod in snapshot.pods:
        for container in pod.containers:
            sample = snapshot.cgroups.get(container.cgroup)
            if sample is None:
                continue
            values: dict[Knob, tuple[str, Verdict]] = {}
            if pod.qos is QoSLevel.RECLAIMED:
                values = _reclaimed(advice, quotas.get(container.cgroup), knobs.get(container.cgroup, ()))
            if placement is not None:
                why = reasons.get(container.cgroup, advice.verdict)
                values |= _placed(placement, container.cgroup, cpus, nodes, why)
            decisions.extend(
                Decision(
                    cgroup=container.cgroup,
                    cgroup_id=sample.id,
                    pod=pod.key,
                    knob=knob,
                    value=value,
                    verdict=verdict,
                )
                for knob, (value, verdict) in values.items()
                if knob in known
            )
    return tuple(decisions)


def _placed(
    placement: Placement, cgroup: str, all_cpus: tuple[int, ...], all_nodes: tuple[int, ...], why: Verdict
) -> dict[Knob, tuple[str, Verdict]]:
    """CPUs and NUMA nodes of a container that may not use all of them; why its pool is so large, and that it has these."""
    cpus, mems = placement.cpus.get(cgroup, ()), placement.mems.get(cgroup, ())
    narrow, bound = cpus and cpus != all_cpus, mems and mems != all_nodes
    if not narrow and not bound:
        return {}
    found = placement.verdicts.get(cgroup, why)
    both = msgspec.structs.replace(why, text=f"{why.text} {found.text}", inputs={**why.inputs, **found.inputs})
    values = {Knob.CPUSET: (_listed(cpus), both)} if narrow else {}
    return values | ({Knob.MEMS: (_listed(mems), both)} if bound else {})


@lru_cache(maxsize=512)
def _listed(numbers: tuple[int, ...]) -> str:
    # All containers of a pool have the same.
    return format_cpu_list(numbers)


def _claimed(why: Verdict, advice: Advice, cgroup: str) -> Verdict:
    """Why a reclaimed container has this part of what is lent."""
    claim = advice.claims.get(cgroup)
    if claim is None:
        return why
    text = f"{why.text} This one made online pods wait: {claim:.0%} of its claim counts."
    return msgspec.structs.replace(why, text=text, inputs={**why.inputs, "claim": round(claim, 3)})


def yielding(knobs: Collection[Knob]) -> tuple[Knob, str]:
    """What makes a cgroup give way to its siblings, with these knobs: before Linux 5.15 there is only the smallest weight."""
    return (Knob.IDLE, "1") if Knob.IDLE in knobs else (Knob.WEIGHT, MIN_WEIGHT)


def _reclaimed(
    advice: Advice, quota: tuple[str, Verdict] | None, knobs: Collection[Knob]
) -> dict[Knob, tuple[str, Verdict]]:
    """Priority and limit of one reclaimed container."""
    values = {}
    if advice.idle:
        knob, value = yielding(knobs)
        values[knob] = (value, YIELD)
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


def _lent(advice: Advice, snapshot: Snapshot) -> Mapping[str, tuple[str, Verdict]]:
    """What each reclaimed container may use: the lent CPU in proportion to requests, never above its own limit; those that
    made online pods wait have less of a claim.

    A small share gets a longer period instead of the kernel's smallest quota in the usual one, so that all of them
    together are what is lent; its burst is then longer too.
    """
    containers = reclaimed_containers(snapshot)
    unlimited = advice.lent_cores >= len(snapshot.topology.cpus)
    claims = {c.cgroup: claim(c) * advice.claims.get(c.cgroup, 1.0) for c in containers}
    total = sum(claims.values())
    result = {}
    for container in containers:
        cgroup = container.cgroup
        cores = _at_most(container, None if unlimited else advice.lent_cores * claims[cgroup] / total)
        value = f"max {PERIODS_US[0]}" if cores is None else quota_of(cores)
        result[cgroup] = (value, _claimed(advice.verdict, advice, cgroup))
    return result


def _by_node(advice: Advice, snapshot: Snapshot, placement: Placement | None) -> Mapping[str, tuple[str, Verdict]]:
    """The same where CPUs limit reclaimed pods, and a quota those on some NUMA nodes; others have none."""
    limits = limited_nodes(advice.cpu.sizes)
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
    found = shares(limits, {container.cgroup: claim(container) for container in containers}, cpus)
    result = {}
    for container in containers:
        cores = _at_most(container, found.get(container.cgroup))
        if cores is not None and container.cgroup in found:
            nodes = [numa for numa in sorted(cpus[container.cgroup]) if numa in limits]
            result[container.cgroup] = (quota_of(cores), _node_limit(advice, limits, nodes, cores))
    return result


def _node_limit(advice: Advice, limits: Mapping[int, float], nodes: list[int], cores: float) -> Verdict:
    """Why a reclaimed container on these NUMA nodes has this quota."""
    together = " and ".join(f"{limits[numa]:.2f} cores of NUMA node {numa}" for numa in nodes)
    whys = [
        one.verdict.text
        for one in advice.cpu.regions
        if Control.RECLAIM_QUOTA in one.controls and set(nodes) & set(one.region.numa_nodes)
    ]
    text = f"Reclaimed pods may use {together} together, and this one {cores:.2f} by its claim."
    inputs = {f"quota_numa{numa}_cores": round(limits[numa], 3) for numa in nodes}
    return Verdict(
        rule="reclaim_quota", text=" ".join((text, *whys)), threshold=sum(limits[numa] for numa in nodes), inputs=inputs
    )


def _at_most(container: Container, cores: float | None) -> float | None:
    limit = container.cpu_limit_cores
    if limit is None or cores is None:
        return limit if cores is None else cores
    return min(cores, limit)


def quota_of(cores: float) -> str:
    """A quota of so much CPU; a small one in a longer period, for no quota is below the kernel's smallest."""
    period_us = next((period for period in PERIODS_US if round(cores * period) >= MIN_QUOTA_US), PERIODS_US[-1])
    return f"{round(cores * period_us)} {period_us}"


def claim(container: Container) -> float:
    """By which reclaimed containers share what is lent."""
    return container.reclaimed_cpu_cores or container.cpu_request_cores or 1.0


def managed(pods: tuple[Pod, ...]) -> frozenset[str]:
    """The cgroups that the agent may ever write to: those of listed pods, and no other."""
    return frozenset(container.cgroup for pod in pods for container in pod.containers)

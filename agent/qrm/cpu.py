"""Advice on CPU into decisions on cgroups (QRM's CPU policy). Pure.

Online pods are touched only where cpusets keep the pools apart; where priority does, their cgroups stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

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


def decide(advice: Advice, snapshot: Snapshot, knobs: Mapping[str, Collection[Knob]]) -> tuple[Decision, ...]:
    """Every knob of every managed container that the advice says something about, whatever its value is now.

    `knobs` are those that the kernel has for each cgroup; what none of them has is not decided, what only this one lacks
    is, so that its refusal is seen. The actuator drops what changes nothing.
    """
    known = frozenset[Knob]().union(*knobs.values())
    pools = {pool.name: pool.cpus for pool in advice.pools}
    apart = not set(pools["share"]) & set(pools["reclaim"])
    quotas = _quotas(advice, snapshot)
    decisions: list[Decision] = []
    for pod in snapshot.pods:
        for container in pod.containers:
            sample = snapshot.cgroups.get(container.cgroup)
            if sample is None:
                continue
            values: dict[Knob, str] = {}
            if pod.qos is QoSLevel.RECLAIMED:
                values = _reclaimed(advice, quotas[container.cgroup], knobs.get(container.cgroup, ()))
                # No CPU of its own is no cpuset: an empty one would mean all of them on version 2.
                if apart and pools["reclaim"]:
                    values[Knob.CPUSET] = format_cpu_list(pools["reclaim"])
            elif pod.qos is QoSLevel.SHARED and apart and pools["share"]:
                values[Knob.CPUSET] = format_cpu_list(pools["share"])
            decisions.extend(
                Decision(
                    cgroup=container.cgroup,
                    cgroup_id=sample.id,
                    pod=pod.key,
                    knob=knob,
                    value=value,
                    verdict=_why(knob, advice, container.cgroup),
                )
                for knob, value in values.items()
                if knob in known
            )
    return tuple(decisions)


def _why(knob: Knob, advice: Advice, cgroup: str) -> Verdict:
    if knob in (Knob.IDLE, Knob.WEIGHT):
        return YIELD
    claim = advice.claims.get(cgroup) if knob is Knob.QUOTA else None
    if claim is None:
        return advice.verdict
    why = advice.verdict
    text = f"{why.text} This one made online pods wait: {claim:.0%} of its claim counts."
    return msgspec.structs.replace(why, text=text, inputs={**why.inputs, "claim": round(claim, 3)})


def _reclaimed(advice: Advice, quota: str, knobs: Collection[Knob]) -> dict[Knob, str]:
    """Priority and limit of one reclaimed container."""
    if not advice.idle:
        return {}
    priority = {Knob.IDLE: "1"} if Knob.IDLE in knobs else {Knob.WEIGHT: MIN_WEIGHT}
    return {**priority, Knob.QUOTA: quota}


def _quotas(advice: Advice, snapshot: Snapshot) -> Mapping[str, str]:
    """What each reclaimed container may use: the lent CPU in proportion to requests, never above its own limit; those that
    made online pods wait have less of a claim.

    A small share gets a longer period instead of the kernel's smallest quota in the usual one, so that all of them
    together are what is lent; its burst is then longer too.
    """
    containers = [
        container
        for pod in snapshot.pods
        if pod.qos is QoSLevel.RECLAIMED
        for container in pod.containers
        if container.cgroup in snapshot.cgroups
    ]
    unlimited = advice.lent_cores >= len(snapshot.topology.cpus)
    claims = {c.cgroup: _claim(c) * advice.claims.get(c.cgroup, 1.0) for c in containers}
    total = sum(claims.values())
    result = {}
    for container in containers:
        cores = None if unlimited else advice.lent_cores * claims[container.cgroup] / total
        if container.cpu_limit_cores is not None:
            cores = container.cpu_limit_cores if cores is None else min(cores, container.cpu_limit_cores)
        result[container.cgroup] = f"max {PERIODS_US[0]}" if cores is None else _quota(cores)
    return result


def _quota(cores: float) -> str:
    period_us = next((period for period in PERIODS_US if round(cores * period) >= MIN_QUOTA_US), PERIODS_US[-1])
    return f"{round(cores * period_us)} {period_us}"


def _claim(container: Container) -> float:
    return container.reclaimed_cpu_cores or container.cpu_request_cores or 1.0


def managed(pods: tuple[Pod, ...]) -> frozenset[str]:
    """The cgroups that the agent may ever write to: those of listed pods, and no other."""
    return frozenset(container.cgroup for pod in pods for container in pod.containers)

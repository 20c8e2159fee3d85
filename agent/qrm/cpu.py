"""Advice on CPU into decisions on cgroups (QRM's CPU policy). Pure.

Online pods are touched only where cpusets keep the pools apart; where priority does, their cgroups stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from api.cpus import format_cpu_list
from api.decisions import Advice, Decision, Knob, Verdict
from api.pods import Container, Pod
from api.qos import QoSLevel
from api.samples import Snapshot

PERIOD_US = 100_000
YIELD = Verdict(
    rule="yield_to_online",
    text="Reclaimed pods run only where nobody else wants to: the scheduler gives way to online pods at every wakeup.",
)
"""Why a reclaimed cgroup has the lowest priority: not a measurement but what reclaimed_cores means."""
MIN_WEIGHT = "1"
"""Where the kernel has no cpu.idle: a hundredth of the default weight, which is 10 shares on version 1."""


def decide(advice: Advice, snapshot: Snapshot, knobs: Collection[Knob]) -> tuple[Decision, ...]:
    """Every knob of every managed container that the advice says something about, whatever its value is now.

    `knobs` are those that this kernel has; the actuator drops what changes nothing.
    """
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
                values = _reclaimed(advice, quotas[container.cgroup], knobs)
                if apart:
                    values[Knob.CPUSET] = format_cpu_list(pools["reclaim"])
            elif pod.qos is QoSLevel.SHARED and apart:
                values[Knob.CPUSET] = format_cpu_list(pools["share"])
            decisions.extend(
                Decision(
                    cgroup=container.cgroup,
                    cgroup_id=sample.id,
                    pod=pod.key,
                    knob=knob,
                    value=value,
                    verdict=YIELD if knob in (Knob.IDLE, Knob.WEIGHT) else advice.verdict,
                )
                for knob, value in values.items()
                if knob in knobs
            )
    return tuple(decisions)


def _reclaimed(advice: Advice, quota: str, knobs: Collection[Knob]) -> dict[Knob, str]:
    """Priority and limit of one reclaimed container."""
    if not advice.idle:
        return {}
    priority = {Knob.IDLE: "1"} if Knob.IDLE in knobs else {Knob.WEIGHT: MIN_WEIGHT}
    return {**priority, Knob.QUOTA: quota}


def _quotas(advice: Advice, snapshot: Snapshot) -> Mapping[str, str]:
    """What each reclaimed container may use: the lent CPU in proportion to requests, never above its own limit."""
    containers = [
        container
        for pod in snapshot.pods
        if pod.qos is QoSLevel.RECLAIMED
        for container in pod.containers
        if container.cgroup in snapshot.cgroups
    ]
    unlimited = advice.lent_cores >= len(snapshot.topology.cpus)
    total = sum(_claim(container) for container in containers)
    result = {}
    for container in containers:
        cores = None if unlimited else advice.lent_cores * _claim(container) / total
        if container.cpu_limit_cores is not None:
            cores = container.cpu_limit_cores if cores is None else min(cores, container.cpu_limit_cores)
        result[container.cgroup] = f"max {PERIOD_US}" if cores is None else f"{round(cores * PERIOD_US)} {PERIOD_US}"
    return result


def _claim(container: Container) -> float:
    return container.cpu_request_cores or 1.0


def managed(pods: tuple[Pod, ...]) -> frozenset[str]:
    """The cgroups that the agent may ever write to: those of listed pods, and no other."""
    return frozenset(container.cgroup for pod in pods for container in pod.containers)

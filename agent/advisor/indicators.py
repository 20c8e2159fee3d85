"""Where the indicators of a region are and where they should be, for the policies that follow them. Pure.

What is not known is left out: an indicator without a value is not followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from agent.advisor.provision.situation import Situation
from agent.advisor.regions import Members
from agent.advisor.requests import bound_of
from agent.config.provision import TargetsConfig
from api.advice import RegionKind, Signal
from api.facts import CpuCounters, Wait
from api.profiles import REQUEST_P99_MS, Target
from api.rates import delta

NS_PER_US = 1000
Value = TypeVar("Value")


class Indicators:
    """Current values in one situation. Caches what all regions look at; the situation never changes."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation

    def signals(self, member: Members, config: TargetsConfig) -> tuple[Signal, ...]:
        """The indicators of a region that have a target and a current value, both above 0."""
        targets = _targets(member, config)
        result = []
        for name, default in targets.items():
            if name == REQUEST_P99_MS:
                continue
            current = self._current(name, member)
            goal = target(name, default, self._of(self._situation.targets, member), config)
            if current is not None and current > 0 and goal > 0:
                result.append(Signal(name=name, current=current, target=goal))
        worst = self._worst_request(member, targets.get(REQUEST_P99_MS))
        return (*result, worst) if worst is not None else tuple(result)

    def unknown(self, member: Members, config: TargetsConfig) -> frozenset[str]:
        """The indicators of a region that have a target, and whose value nobody knows; one that is 0 is known."""
        targets = _targets(member, config)
        found = {name for name in targets if name != REQUEST_P99_MS and self._current(name, member) is None}
        measured, own = (self._of(by, member) for by in (self._situation.indicators, self._situation.targets))
        wanted = REQUEST_P99_MS in targets or any(REQUEST_P99_MS in profile for profile in own)
        if wanted and not any(REQUEST_P99_MS in values for values in measured):
            found.add(REQUEST_P99_MS)
        return frozenset(found)

    def _current(self, name: str, member: Members) -> float | None:
        elsewhere = [values[name] for values in self._of(self._situation.indicators, member) if name in values]
        return _mean(elsewhere) if elsewhere else self._measured(name, member)

    def _of(self, by_pod: Mapping[str, Mapping[str, Value]], member: Members) -> list[Mapping[str, Value]]:
        return [by_pod.get(pod.key, {}) for pod in member.pods]

    def _worst_request(self, member: Members, default: float | None) -> Signal | None:
        """Of the pod that is furthest above its target: pods of one region need not have the same, and a mean of them is
        nobody's. Followed of every pod that has a target of its own, and of all where the settings have one."""
        found = []
        for measured, own in zip(
            self._of(self._situation.indicators, member), self._of(self._situation.targets, member), strict=True
        ):
            current, goal = measured.get(REQUEST_P99_MS), _own(own.get(REQUEST_P99_MS), default)
            if current is not None and goal is not None and current > 0:
                found.append(Signal(name=REQUEST_P99_MS, current=current, target=goal))
        return max(found, key=lambda signal: signal.current / signal.target, default=None)

    def _measured(self, name: str, member: Members) -> float | None:
        if name == "cpi":
            return self._cpi(member) if member.region.kind is RegionKind.DEDICATED else None
        if name == "cpu_usage_ratio":
            change = self._situation.change
            busy = change.node.per_cpu_busy_ratio if change else {}
            return _mean([busy[cpu] for cpu in self._cpus(member) if cpu in busy])
        if name == "cpu_sched_wait" and member.region.kind is RegionKind.SHARE:
            waits = self._waits_us
            return _mean([waits[cpu] for cpu in self._cpus(member) if cpu in waits])
        return None

    def _cpus(self, member: Members) -> Sequence[int]:
        """CPUs of a share region's pool; of a dedicated pod, those that it has on the region's NUMA nodes."""
        if member.region.kind is RegionKind.SHARE:
            return self._situation.pools.get(member.region.pool, ())
        numa = {cpu.id: cpu.numa for cpu in self._situation.snapshot.topology.cpus}
        given = {cpu for path in member.region.containers for cpu in self._situation.assigned.get(path, ())}
        return sorted(cpu for cpu in given if numa.get(cpu) in member.region.numa_nodes)

    @cached_property
    def _waits_us(self) -> Mapping[int, float]:
        """By CPU: mean time that a task waited for it, of those that got it since the round before; 0 where none did."""
        now, before = self._situation.snapshot.node, self._situation.previous
        if before is None or self._situation.change is None:
            return {}
        if now.cpu_waits and before.node.cpu_waits:
            return _mean_waits_us(before.node.cpu_waits, now.cpu_waits)
        return _mean_waits_us(
            _as_waits(before.node.run_delay_ns, before.node.timeslices), _as_waits(now.run_delay_ns, now.timeslices)
        )

    def _cpi(self, member: Members) -> float | None:
        """Mean cycles per instruction of the main containers."""
        before, now = self._situation.previous, self._situation.snapshot
        if before is None or self._situation.change is None:
            return None
        values = []
        for pod in member.pods:
            for container in pod.containers:
                then, after = before.cgroups.get(container.cgroup), now.cgroups.get(container.cgroup)
                if container.sidecar or then is None or after is None or then.id != after.id:
                    continue
                value = _ratio(then.counters, after.counters)
                if value is not None:
                    values.append(value)
        return _mean(values)


def _targets(member: Members, config: TargetsConfig) -> Mapping[str, float]:
    return config.share if member.region.kind is RegionKind.SHARE else config.dedicated


def target(name: str, default: float, profiles: Sequence[Mapping[str, Target]], config: TargetsConfig) -> float:
    """Where an indicator should be, given the profiles of the region's pods; the default for a pod that has none."""
    getter = config.getters.get(name, config.getter)
    if getter == "metric-threshold":
        threshold = config.thresholds.get(name)
        return default if threshold is None else threshold * config.expand_factors.get(name, 1.0)
    own = [_own(profile.get(name), default) or default for profile in profiles] or [default]
    return min(own) if getter == "spd-min" else sum(own) / len(own)


def _own(profile: Target | None, default: float | None) -> float | None:
    bound = None if profile is None else bound_of(profile)
    return default if bound is None else bound


def _as_waits(delay_ns: Mapping[int, int], slices: Mapping[int, int]) -> dict[int, Wait]:
    return {cpu: Wait(sum_ns=ns, count=slices[cpu]) for cpu, ns in delay_ns.items() if cpu in slices}


def _mean_waits_us(before: Mapping[int, Wait], after: Mapping[int, Wait]) -> dict[int, float]:
    result = {}
    for cpu, wait in after.items():
        then = before.get(cpu)
        if then is None:
            continue
        waited, count = delta(then.sum_ns, wait.sum_ns), delta(then.count, wait.count)
        if waited is not None and count is not None:
            result[cpu] = waited / count / NS_PER_US if count else 0.0
    return result


def _ratio(before: CpuCounters | None, after: CpuCounters | None) -> float | None:
    if before is None or after is None:
        return None
    cycles, instructions = delta(before.cycles, after.cycles), delta(before.instructions, after.instructions)
    return None if cycles is None or not instructions else cycles / instructions


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

"""Current values and targets of a region's indicators: CPI, CPU usage, run-queue latency, request latency.
An indicator without a value is omitted. Latency predictions move the usage target as Katalyst's borwein
regression does. Request latency is the p99 of the last five to ten seconds, from histograms that the pods
publish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from math import isfinite
from typing import TypeVar

import msgspec

from agent.advisor.advisor_state import LatencyPrediction, LatencyPredictions, ProvisionInputs, RequestWindow
from agent.advisor.provision.regions import RegionMembers
from agent.config.advisor import IndicatorTargetsConfig, InferenceConfig
from api.advice import IndicatorState, RegionKind
from api.annotations import REQUEST_P99_MS, IndicatorTarget
from api.knobs import Reason
from api.measurements import CpuCounters, RunqLatency
from api.pod import Pod
from api.rates import delta
from api.snapshot import RequestLatency

CPU_USAGE_RATIO = "cpu_usage_ratio"
_NS_PER_S = 1_000_000_000
_MINUTES_PER_DAY = 24 * 60


def adjust_targets(
    signals: Sequence[IndicatorState],
    pods: Sequence[str],
    predictions: LatencyPredictions | None,
    config: InferenceConfig,
    now_ns: int,
    minute_of_day: int,
) -> tuple[tuple[IndicatorState, ...], Reason]:
    """A region's indicators with the target of cpu_usage_ratio moved. `pods` are the region's, by the predictions' keys."""
    same = tuple(signals)
    if config.strategy == "none":
        return same, Reason(rule="inference_off", text="No strategy follows predictions.")
    if predictions is None or not 0 <= now_ns - predictions.at_ns <= config.stale_s * _NS_PER_S:
        text = f"There is no prediction of the last {config.stale_s:g} s: targets are what they are without."
        return same, Reason(rule="inference_stale", text=text, threshold=config.stale_s)
    values = [
        prediction.value
        for pod in pods
        for prediction in predictions.by_pod.get(pod, {}).values()
        if not prediction.ignore and isfinite(prediction.value)
    ]
    if not values:
        return same, Reason(
            rule="inference_nothing", text="The model says nothing of these pods: targets are unchanged."
        )
    mean = sum(values) / len(values)
    offset, why = _slot_offset(mean, config, minute_of_day % _MINUTES_PER_DAY)
    moved = tuple(
        msgspec.structs.replace(signal, target=_adjusted_target(signal.target, offset, config))
        if signal.name == CPU_USAGE_RATIO
        else signal
        for signal in same
    )
    before = next((signal.target for signal in same if signal.name == CPU_USAGE_RATIO), None)
    after = next((signal.target for signal in moved if signal.name == CPU_USAGE_RATIO), None)
    text = f"Predictions of {len(values)} containers have a mean of {mean:g}: {why}, so the target is {after}, not {before}."
    return moved, Reason(
        rule=config.strategy,
        text=text,
        threshold=after,
        inputs={"prediction": mean, "containers": len(values), "offset": offset, "target_before": before},
    )


def _slot_offset(mean: float, config: InferenceConfig, minute: int) -> tuple[float, str]:
    """The offset that applies, and the words for it; a special time counts more than any slot."""
    for special in config.special_times:
        if special.covers(minute):
            return special.offset, f"it is between {special.start} and {special.end}, with {special.offset:+g}"
    slot = next((slot for slot in config.slots if mean < slot.below), config.slots[-1])
    return slot.offset, f"the slot below {slot.below:g} has {slot.offset:+g}"


def _adjusted_target(target: float, offset: float, config: InferenceConfig) -> float:
    if config.strategy == "borwein_v2":
        target += min(max(offset, config.offset_min), config.offset_max)
    else:
        target = offset
    return round(min(max(target, config.target_min), config.target_max), 6)


NS_PER_S = 1_000_000_000
REQUEST_WINDOW_S, REQUEST_STALE_S, MIN_REQUESTS = 5.0, 5.0, 20
QUANTILE, MS_PER_S = 0.99, 1000.0


def update_request_windows(
    indicators: Mapping[str, RequestLatency], windows: Mapping[str, RequestWindow], now_ns: int
) -> dict[str, RequestWindow]:
    """Where the windows of the next round begin, by pod; `indicators` are those of this round."""
    kept = {}
    for pod, now in indicators.items():
        before = windows.get(pod)
        if (
            before is None
            or _requests_between(before.next, now) is None
            or not _is_recent(before.next, now_ns, 3 * REQUEST_WINDOW_S)
        ):
            kept[pod] = RequestWindow(base=now, next=now)
        elif now.sampled_at_ns - before.next.sampled_at_ns >= REQUEST_WINDOW_S * NS_PER_S:
            kept[pod] = RequestWindow(base=before.next, next=now)
        else:
            kept[pod] = before
    return kept


def request_p99_ms(
    indicators: Mapping[str, RequestLatency], windows: Mapping[str, RequestWindow], now_ns: int
) -> dict[str, dict[str, float]]:
    """By pod: the indicator, where it is known. `known` is what was remembered in the round before."""
    found = {}
    for pod, now in indicators.items():
        before = windows.get(pod)
        if (
            before is None
            or not _is_recent(now, now_ns, REQUEST_STALE_S)
            or not _is_recent(before.base, now_ns, 3 * REQUEST_WINDOW_S)
        ):
            continue
        answered = _requests_between(before.base, now)
        if answered is not None and answered[-1] >= MIN_REQUESTS:
            found[pod] = {REQUEST_P99_MS: quantile_s(now.bounds_s, answered, QUANTILE) * MS_PER_S}
    return found


def predict_from_requests(
    pods: tuple[Pod, ...], measured: Mapping[str, Mapping[str, float]], now_ns: int
) -> LatencyPredictions | None:
    """What the inference's slots are chosen by where no model is asked: measured latency over its target, 1 on target."""
    by_pod = {}
    for pod in pods:
        goal, current = pod.profile.targets.get(REQUEST_P99_MS), measured.get(pod.key, {}).get(REQUEST_P99_MS)
        bound = None if goal is None else target_bound(goal)
        if bound is not None and current is not None:
            by_pod[pod.key] = {"": LatencyPrediction(value=current / bound)}
    return LatencyPredictions(at_ns=now_ns, by_pod=by_pod) if by_pod else None


def target_bound(goal: IndicatorTarget) -> float | None:
    """Where the indicator should be; the upper bound goes before the lower one."""
    return goal.lower if goal.upper is None else goal.upper


def quantile_s(bounds_s: tuple[float, ...], cumulative: tuple[int, ...], quantile: float) -> float:
    """Linear within its bucket, as Prometheus has it; of what is above the last bound, that bound."""
    rank, low, below = quantile * cumulative[-1], 0.0, 0
    for bound, count in zip(bounds_s, cumulative, strict=False):
        if count >= rank:
            return low + (bound - low) * (rank - below) / (count - below) if count > below else bound
        low, below = bound, count
    return bounds_s[-1]


def _requests_between(before: RequestLatency, now: RequestLatency) -> tuple[int, ...] | None:
    """Cumulative counts of the requests between two answers; None where the pod began to count anew."""
    if before.bounds_s != now.bounds_s or now.sampled_at_ns < before.sampled_at_ns:
        return None
    counts = tuple(after - then for then, after in zip(before.buckets, now.buckets, strict=True))
    return None if counts[0] < 0 or any(high < low for low, high in pairwise(counts)) else counts


def _is_recent(seen: RequestLatency, now_ns: int, max_s: float) -> bool:
    return 0 <= now_ns - seen.sampled_at_ns <= max_s * NS_PER_S


NS_PER_US = 1000
Value = TypeVar("Value")


class ProvisionIndicators:
    """Current values in one situation. Caches what all regions look at; the situation never changes."""

    def __init__(self, inputs: ProvisionInputs) -> None:
        self._situation = inputs

    def signals(self, member: RegionMembers, config: IndicatorTargetsConfig) -> tuple[IndicatorState, ...]:
        """The indicators of a region that have a target and a current value, both above 0."""
        targets = _default_targets(member, config)
        result = []
        for name, default in targets.items():
            if name == REQUEST_P99_MS:
                continue
            current = self._current(name, member)
            goal = indicator_target(name, default, self._of(self._situation.targets, member), config)
            if current is not None and current > 0 and goal > 0:
                result.append(IndicatorState(name=name, current=current, target=goal))
        worst = self._worst_request(member, targets.get(REQUEST_P99_MS))
        return (*result, worst) if worst is not None else tuple(result)

    def unknown(self, member: RegionMembers, config: IndicatorTargetsConfig) -> frozenset[str]:
        """The indicators of a region that have a target, and whose value nobody knows; one that is 0 is known."""
        targets = _default_targets(member, config)
        found = {name for name in targets if name != REQUEST_P99_MS and self._current(name, member) is None}
        measured, own = (self._of(by, member) for by in (self._situation.indicators, self._situation.targets))
        wanted = REQUEST_P99_MS in targets or any(REQUEST_P99_MS in profile for profile in own)
        if wanted and not any(REQUEST_P99_MS in values for values in measured):
            found.add(REQUEST_P99_MS)
        return frozenset(found)

    def _current(self, name: str, member: RegionMembers) -> float | None:
        elsewhere = [values[name] for values in self._of(self._situation.indicators, member) if name in values]
        return _mean(elsewhere) if elsewhere else self._measured(name, member)

    def _of(self, by_pod: Mapping[str, Mapping[str, Value]], member: RegionMembers) -> list[Mapping[str, Value]]:
        return [by_pod.get(pod.key, {}) for pod in member.pods]

    def _worst_request(self, member: RegionMembers, default: float | None) -> IndicatorState | None:
        """Of the pod that is furthest above its target: pods of one region need not have the same, and a mean of them is
        nobody's. Followed of every pod that has a target of its own, and of all where the settings have one."""
        found = []
        for measured, own in zip(
            self._of(self._situation.indicators, member), self._of(self._situation.targets, member), strict=True
        ):
            current, goal = measured.get(REQUEST_P99_MS), _profile_target(own.get(REQUEST_P99_MS), default)
            if current is not None and goal is not None and current > 0:
                found.append(IndicatorState(name=REQUEST_P99_MS, current=current, target=goal))
        return max(found, key=lambda signal: signal.current / signal.target, default=None)

    def _measured(self, name: str, member: RegionMembers) -> float | None:
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

    def _cpus(self, member: RegionMembers) -> Sequence[int]:
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
            return _mean_latency_us(before.node.cpu_waits, now.cpu_waits)
        return _mean_latency_us(
            _schedstat_latency(before.node.run_delay_ns, before.node.timeslices),
            _schedstat_latency(now.run_delay_ns, now.timeslices),
        )

    def _cpi(self, member: RegionMembers) -> float | None:
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
                value = _cycles_per_instruction(then.counters, after.counters)
                if value is not None:
                    values.append(value)
        return _mean(values)


def _default_targets(member: RegionMembers, config: IndicatorTargetsConfig) -> Mapping[str, float]:
    return config.share if member.region.kind is RegionKind.SHARE else config.dedicated


def indicator_target(
    name: str, default: float, profiles: Sequence[Mapping[str, IndicatorTarget]], config: IndicatorTargetsConfig
) -> float:
    """Where an indicator should be, given the profiles of the region's pods; the default for a pod that has none."""
    getter = config.getters.get(name, config.getter)
    if getter == "metric-threshold":
        threshold = config.thresholds.get(name)
        return default if threshold is None else threshold * config.expand_factors.get(name, 1.0)
    own = [_profile_target(profile.get(name), default) or default for profile in profiles] or [default]
    return min(own) if getter == "spd-min" else sum(own) / len(own)


def _profile_target(profile: IndicatorTarget | None, default: float | None) -> float | None:
    bound = None if profile is None else target_bound(profile)
    return default if bound is None else bound


def _schedstat_latency(delay_ns: Mapping[int, int], slices: Mapping[int, int]) -> dict[int, RunqLatency]:
    return {cpu: RunqLatency(sum_ns=ns, count=slices[cpu]) for cpu, ns in delay_ns.items() if cpu in slices}


def _mean_latency_us(before: Mapping[int, RunqLatency], after: Mapping[int, RunqLatency]) -> dict[int, float]:
    result = {}
    for cpu, wait in after.items():
        then = before.get(cpu)
        if then is None:
            continue
        waited, count = delta(then.sum_ns, wait.sum_ns), delta(then.count, wait.count)
        if waited is not None and count is not None:
            result[cpu] = waited / count / NS_PER_US if count else 0.0
    return result


def _cycles_per_instruction(before: CpuCounters | None, after: CpuCounters | None) -> float | None:
    if before is None or after is None:
        return None
    cycles, instructions = delta(before.cycles, after.cycles), delta(before.instructions, after.instructions)
    return None if cycles is None or not instructions else cycles / instructions


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

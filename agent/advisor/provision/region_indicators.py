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

from msgspec.structs import replace

from agent.advisor.advisor_state import LatencyPrediction, LatencyPredictions, ProvisionInputs, RequestWindow
from agent.advisor.provision.regions import RegionMembers
from agent.config.advisor import IndicatorTargetsConfig, InferenceConfig
from api.advice import IndicatorState, RegionKind
from api.annotations import REQUEST_P99_MS, IndicatorTarget
from api.knobs import Reason
from api.pod import Pod
from api.quantity import format_count
from api.rates import delta
from api.snapshot import CpuCounters, RequestLatency, RunqLatency
from api.units import NS_PER_S, NS_PER_US

CPU_USAGE_RATIO = "cpu_usage_ratio"
_MINUTES_PER_DAY = 24 * 60


def adjust_targets(
    signals: Sequence[IndicatorState],
    pods: Sequence[str],
    predictions: LatencyPredictions | None,
    config: InferenceConfig,
    now_ns: int,
    minute_of_day: int,
) -> tuple[tuple[IndicatorState, ...], Reason]:
    """Return a region's indicators with an adjusted target of cpu_usage_ratio. `pods` are keys of the predictions."""
    same = tuple(signals)
    if config.strategy == "none":
        return same, Reason(rule="inference_off", text="Inference is disabled.")
    if predictions is None or not 0 <= now_ns - predictions.at_ns <= config.stale_s * NS_PER_S:
        text = f"There is no prediction of the last {config.stale_s:g} s: targets are unchanged."
        return same, Reason(rule="inference_stale", text=text, threshold=config.stale_s)
    values = [
        prediction.value
        for pod in pods
        for prediction in predictions.by_pod.get(pod, {}).values()
        if not prediction.ignore and isfinite(prediction.value)
    ]
    if not values:
        return same, Reason(
            rule="inference_nothing", text="The model has no prediction for these pods: targets are unchanged."
        )
    mean = sum(values) / len(values)
    offset, why = _slot_offset(mean, config, minute_of_day % _MINUTES_PER_DAY)
    moved = tuple(
        replace(signal, target=_adjusted_target(signal.target, offset, config))
        if signal.name == CPU_USAGE_RATIO
        else signal
        for signal in same
    )
    before = next((signal.target for signal in same if signal.name == CPU_USAGE_RATIO), None)
    after = next((signal.target for signal in moved if signal.name == CPU_USAGE_RATIO), None)
    text = f"The mean prediction of {format_count(len(values), 'container')} is {mean:g}: {why},"
    text += f" so the target is {after} instead of {before}."
    return moved, Reason(
        rule=config.strategy,
        text=text,
        threshold=after,
        inputs={"prediction": mean, "containers": len(values), "offset": offset, "target_before": before},
    )


def _slot_offset(mean: float, config: InferenceConfig, minute: int) -> tuple[float, str]:
    """The offset that applies, and its description; a special time takes precedence over every slot."""
    for special in config.special_times:
        if special.covers(minute):
            return special.offset, f"the special time from {special.start} to {special.end} has {special.offset:+g}"
    slot = next((slot for slot in config.slots if mean < slot.below), config.slots[-1])
    return slot.offset, f"the slot below {slot.below:g} has {slot.offset:+g}"


def _adjusted_target(target: float, offset: float, config: InferenceConfig) -> float:
    if config.strategy == "borwein_v2":
        target += min(max(offset, config.offset_min), config.offset_max)
    else:
        target = offset
    return round(min(max(target, config.target_min), config.target_max), 6)


REQUEST_WINDOW_S, REQUEST_STALE_S, MIN_REQUESTS = 5.0, 5.0, 20
QUANTILE, MS_PER_S = 0.99, 1000.0


def update_request_windows(
    indicators: Mapping[str, RequestLatency], windows: Mapping[str, RequestWindow], now_ns: int
) -> dict[str, RequestWindow]:
    """Return the windows of the next cycle, by pod."""
    next_windows = {}
    for pod, now in indicators.items():
        before = windows.get(pod)
        if (
            before is None
            or _requests_between(before.next, now) is None
            or not _is_recent(before.next, now_ns, 3 * REQUEST_WINDOW_S)
        ):
            next_windows[pod] = RequestWindow(base=now, next=now)
        elif now.sampled_at_ns - before.next.sampled_at_ns >= REQUEST_WINDOW_S * NS_PER_S:
            next_windows[pod] = RequestWindow(base=before.next, next=now)
        else:
            next_windows[pod] = before
    return next_windows


def request_p99_ms(
    indicators: Mapping[str, RequestLatency], windows: Mapping[str, RequestWindow], now_ns: int
) -> dict[str, dict[str, float]]:
    """Return the request latency of every pod with enough requests; `windows` are those of the previous cycle."""
    result = {}
    for pod, now in indicators.items():
        before = windows.get(pod)
        if (
            before is None
            or not _is_recent(now, now_ns, REQUEST_STALE_S)
            or not _is_recent(before.base, now_ns, 3 * REQUEST_WINDOW_S)
        ):
            continue
        requests = _requests_between(before.base, now)
        if requests is not None and requests[-1] >= MIN_REQUESTS:
            result[pod] = {REQUEST_P99_MS: quantile_s(now.bounds_s, requests, QUANTILE) * MS_PER_S}
    return result


def predict_from_requests(
    pods: tuple[Pod, ...], measured: Mapping[str, Mapping[str, float]], now_ns: int
) -> LatencyPredictions | None:
    """Return predictions for the inference slots without a model: measured latency over its target, so that 1 is on target."""
    by_pod = {}
    for pod in pods:
        target, current = pod.profile.targets.get(REQUEST_P99_MS), measured.get(pod.key, {}).get(REQUEST_P99_MS)
        bound = None if target is None else target_bound(target)
        if bound is not None and current is not None:
            by_pod[pod.key] = {"": LatencyPrediction(value=current / bound)}
    return LatencyPredictions(at_ns=now_ns, by_pod=by_pod) if by_pod else None


def target_bound(target: IndicatorTarget) -> float | None:
    """Return the value that the indicator should have; the upper bound takes precedence over the lower one."""
    return target.lower if target.upper is None else target.upper


def quantile_s(bounds_s: tuple[float, ...], cumulative: tuple[int, ...], quantile: float) -> float:
    """Return the quantile, linear within its bucket as in Prometheus; above the last bound, that bound."""
    rank, low, lower_count = quantile * cumulative[-1], 0.0, 0
    for bound, count in zip(bounds_s, cumulative, strict=False):
        if count >= rank:
            return low + (bound - low) * (rank - lower_count) / (count - lower_count) if count > lower_count else bound
        low, lower_count = bound, count
    return bounds_s[-1]


def _requests_between(before: RequestLatency, now: RequestLatency) -> tuple[int, ...] | None:
    """Cumulative counts of the requests between two samples; None if the pod restarted its counters."""
    if before.bounds_s != now.bounds_s or now.sampled_at_ns < before.sampled_at_ns:
        return None
    counts = tuple(after - earlier for earlier, after in zip(before.buckets, now.buckets, strict=True))
    return None if counts[0] < 0 or any(high < low for low, high in pairwise(counts)) else counts


def _is_recent(sample: RequestLatency, now_ns: int, max_s: float) -> bool:
    return 0 <= now_ns - sample.sampled_at_ns <= max_s * NS_PER_S


Value = TypeVar("Value")


class ProvisionIndicators:
    """Current values of indicators in one cycle; values that regions share are cached."""

    def __init__(self, inputs: ProvisionInputs) -> None:
        self._inputs = inputs

    def signals(self, member: RegionMembers, config: IndicatorTargetsConfig) -> tuple[IndicatorState, ...]:
        """Return the indicators of a region that have a target and a current value, both above 0."""
        targets = _default_targets(member, config)
        result = []
        for name, default in targets.items():
            if name == REQUEST_P99_MS:
                continue
            current = self._current(name, member)
            target = indicator_target(name, default, self._of(self._inputs.targets, member), config)
            if current is not None and current > 0 and target > 0:
                result.append(IndicatorState(name=name, current=current, target=target))
        worst = self._worst_request(member, targets.get(REQUEST_P99_MS))
        return (*result, worst) if worst is not None else tuple(result)

    def unknown(self, member: RegionMembers, config: IndicatorTargetsConfig) -> frozenset[str]:
        """Return the indicators of a region that have a target but no value; 0 is a value."""
        targets = _default_targets(member, config)
        result = {name for name in targets if name != REQUEST_P99_MS and self._current(name, member) is None}
        measured, own = (self._of(by, member) for by in (self._inputs.indicators, self._inputs.targets))
        expected = REQUEST_P99_MS in targets or any(REQUEST_P99_MS in profile for profile in own)
        if expected and not any(REQUEST_P99_MS in values for values in measured):
            result.add(REQUEST_P99_MS)
        return frozenset(result)

    def _current(self, name: str, member: RegionMembers) -> float | None:
        reported = [values[name] for values in self._of(self._inputs.indicators, member) if name in values]
        return _mean(reported) if reported else self._measured(name, member)

    def _of(self, by_pod: Mapping[str, Mapping[str, Value]], member: RegionMembers) -> list[Mapping[str, Value]]:
        return [by_pod.get(pod.key, {}) for pod in member.pods]

    def _worst_request(self, member: RegionMembers, default: float | None) -> IndicatorState | None:
        """The request latency of the pod furthest above its target: pods of a region may have different targets.

        A pod counts if it has a target of its own or the settings have a default.
        """
        result = []
        for measured, own in zip(
            self._of(self._inputs.indicators, member), self._of(self._inputs.targets, member), strict=True
        ):
            current, target = measured.get(REQUEST_P99_MS), _profile_target(own.get(REQUEST_P99_MS), default)
            if current is not None and target is not None and current > 0:
                result.append(IndicatorState(name=REQUEST_P99_MS, current=current, target=target))
        return max(result, key=lambda signal: signal.current / signal.target, default=None)

    def _measured(self, name: str, member: RegionMembers) -> float | None:
        if name == "cpi":
            return self._cpi(member) if member.region.kind is RegionKind.DEDICATED else None
        if name == CPU_USAGE_RATIO:
            change = self._inputs.change
            busy = change.node.per_cpu_busy_ratio if change else {}
            return _mean([busy[cpu] for cpu in self._cpus(member) if cpu in busy])
        if name == "cpu_sched_wait" and member.region.kind is RegionKind.SHARE:
            waits = self._waits_us
            return _mean([waits[cpu] for cpu in self._cpus(member) if cpu in waits])
        return None

    def _cpus(self, member: RegionMembers) -> Sequence[int]:
        """CPUs of a share region's pool; of a dedicated pod, its CPUs on the region's NUMA nodes."""
        if member.region.kind is RegionKind.SHARE:
            return self._inputs.pools.get(member.region.pool, ())
        numa = {cpu.id: cpu.numa for cpu in self._inputs.snapshot.topology.cpus}
        given = {cpu for path in member.region.containers for cpu in self._inputs.assigned.get(path, ())}
        return sorted(cpu for cpu in given if numa.get(cpu) in member.region.numa_nodes)

    @cached_property
    def _waits_us(self) -> Mapping[int, float]:
        """By CPU: mean run-queue latency of the tasks that got it since the previous cycle; 0 without such tasks."""
        now, before = self._inputs.snapshot.node, self._inputs.previous
        if before is None or self._inputs.change is None:
            return {}
        if now.cpu_waits and before.node.cpu_waits:
            return _mean_latency_us(before.node.cpu_waits, now.cpu_waits)
        return _mean_latency_us(
            _schedstat_latency(before.node.run_delay_ns, before.node.timeslices),
            _schedstat_latency(now.run_delay_ns, now.timeslices),
        )

    def _cpi(self, member: RegionMembers) -> float | None:
        before, now = self._inputs.previous, self._inputs.snapshot
        if before is None or self._inputs.change is None:
            return None
        values = []
        for pod in member.pods:
            for container in pod.containers:
                earlier, after = before.cgroups.get(container.cgroup), now.cgroups.get(container.cgroup)
                if container.sidecar or earlier is None or after is None or earlier.id != after.id:
                    continue
                value = _cycles_per_instruction(earlier.counters, after.counters)
                if value is not None:
                    values.append(value)
        return _mean(values)


def _default_targets(member: RegionMembers, config: IndicatorTargetsConfig) -> Mapping[str, float]:
    return config.share if member.region.kind is RegionKind.SHARE else config.dedicated


def indicator_target(
    name: str, default: float, profiles: Sequence[Mapping[str, IndicatorTarget]], config: IndicatorTargetsConfig
) -> float:
    """Return the target of an indicator by the profiles of the region's pods; a pod without one has the default."""
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
        earlier = before.get(cpu)
        if earlier is None:
            continue
        waited, count = delta(earlier.sum_ns, wait.sum_ns), delta(earlier.count, wait.count)
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

"""Tests whether the CPU quota of reclaimed pods shortens the run-queue latency of online pods, and lifts a quota that does not.
The policy sets the quota at once, and the trial compares latency afterwards. Both kinds of intervals, with the quota and
without it, begin while latency is below its target and end after five seconds or with the first cycle in which latency rises,
so that they differ in nothing but the quota (latency_comparison.py). If latency rises in an interval without the quota, the
policy sets it in the same cycle. A verdict holds for one set of online workloads and a limited time. Pure: the state is passed
in and returned (agent/journal/quota_verdict_file.py saves the verdicts).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from math import log2

import msgspec
from msgspec.structs import replace

from agent.advisor.advisor_state import QuotaRelease, QuotaTrialState
from agent.advisor.latency import LatencyResult, find_breaches, max_latency, min_quota_cores, round_quota_cores
from agent.advisor.latency_comparison import LatencyComparison, LatencyInterval, compare_latency
from agent.config.advisor import LatencyConfig
from api.advice import QUOTA_HELPED, QuotaVerdict
from api.histogram import SLOT_COUNT
from api.knobs import Reason
from api.pod import Pod
from api.rates import sum_runq_latencies
from api.snapshot import RunqLatency
from api.units import NS_PER_MS, NS_PER_S

INTERVAL_NS = 5 * NS_PER_S
"""Longest interval: bursts of online work are shorter, so that intervals hardly depend on each other."""
SETTLE_NS = 2 * NS_PER_S
"""Time with low latency before an interval, so that the end of the burst that led to the quota does not count."""
COMPARED_AFTER = (4, 8, 12, 16, 24, 32)
"""Numbers of intervals of each kind after which they are compared. If the last comparison shows no help, the verdict is that
the quota does not help."""
MAX_INTERVALS = COMPARED_AFTER[-1]
RELEVANT_RATIO = 0.25
"""A quota that removes less than this share of the excess has no relevant effect: if a comparison shows that, the trial ends
early."""
MAX_AGE_NS = 1800 * NS_PER_S
"""Age up to which intervals are compared: load changes over time."""
MEMORY_NS = 3600 * NS_PER_S
"""Time for which a verdict holds."""
MAX_VERDICTS = 64
BUSY_CORES = 0.05
"""Reclaimed pods that use fewer cores than this do not compete with online pods."""
LIMITED_RATIO = 0.5
"""Only a quota of at most this share of the reclaimable CPU is compared with no quota. An interval with the quota counts if
reclaimed pods use at least this share of it."""
WORST_FACTOR = 2.0
"""A verdict does not hold for latency above this multiple of the highest latency that the trial has measured."""
MAX_NAMES = 3
QUOTA_TRIAL, QUOTA_TRIAL_ENDED, QUOTA_DID_NOT_HELP = "quota_trial", "quota_trial_ended", "quota_did_not_help"
_CALM_RULES = frozenset(("wait_below_target", "not_calm_yet", "wait_is_own", "wait_near_by_others"))
"""Rules of the policy while no online latency calls for a quota."""
_LATENCY_RULES = _CALM_RULES | {"wait_near_target", "wait_above_target", "wait_far_above_target", "wait_by_others"}
"""Rules by measured latency. Under all other rules (latency or pods unknown, reclaiming disabled) the trial does not change the
result of the policy."""


class QuotaTrialInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Measured inputs of one cycle."""

    now_ns: int
    """CLOCK_MONOTONIC."""
    wall_time_ns: int
    elapsed_ns: int
    """Time since the previous cycle; 0 in the first one."""
    node_cpus: int
    maximum_cores: float
    """Reclaimable CPU without a quota by latency."""
    in_force_cores: float | None
    """CPU that reclaimed pods could use since the previous cycle; None in the first one."""
    used_cores: float | None
    """CPU that they used since the previous cycle; None if unknown."""
    waits: Mapping[str, RunqLatency | None]
    """By online container's cgroup: waits that ended since the previous cycle; None if they are not measured."""
    key: str
    """Digest of the online workloads."""
    workloads: str


def online_workloads(pods: Iterable[Pod]) -> tuple[str, str]:
    """Return a digest of the online workloads of a node, and the first of their names. A rollout or restart does not change
    it."""
    online = (pod for pod in pods if pod.qos.online and pod.containers)
    names = sorted({f"{pod.namespace}/{_workload_name(pod)}" for pod in online})
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return blake2b("\n".join(names).encode(), digest_size=8).hexdigest(), ", ".join(names[:MAX_NAMES]) + more


def _workload_name(pod: Pod) -> str:
    """Return the pod's name without the parts by which its controller distinguishes the pods of a workload."""
    # A ReplicaSet of a Deployment is NAME-HASH, its pods NAME-HASH-RANDOM. Pods of a DaemonSet are NAME-RANDOM, those of a
    # StatefulSet NAME-NUMBER; both have this label (pkg/controller in kubernetes).
    name, _, rest = pod.name.rpartition(f"-{pod.labels.get('pod-template-hash', '')}-")
    if name and rest and "pod-template-hash" in pod.labels:
        return name
    return pod.name.rpartition("-")[0] or pod.name if "controller-revision-hash" in pod.labels else pod.name


def current_verdict(state: QuotaTrialState, key: str, wall_time_ns: int) -> QuotaVerdict | None:
    """Return the verdict for these workloads; None if there is none, if it has expired, or if the clock was set back."""
    for verdict in state.verdicts:
        if verdict.key == key and verdict.wall_time_ns <= wall_time_ns < verdict.expires_wall_ns:
            return verdict
    return None


def run_quota_trial(
    inputs: QuotaTrialInputs, result: LatencyResult, state: QuotaTrialState, config: LatencyConfig
) -> tuple[LatencyResult, QuotaTrialState]:
    """Return the policy's result, changed where a trial or its verdict says so, and the next state.

    A quota that the policy sets in this cycle stays, unless a verdict for these workloads shows that it does not help.
    """
    if state.key != inputs.key:
        result = _end_control_interval(inputs, result, state, config)
        state = QuotaTrialState(key=inputs.key, verdicts=state.verdicts)
    verdict = current_verdict(state, inputs.key, inputs.wall_time_ns)
    if verdict is not None and not verdict.helped and _is_beyond(verdict, inputs, config):
        state = replace(state, verdicts=tuple(v for v in state.verdicts if v.key != inputs.key))
        verdict = None
    if verdict is not None:
        return (result if verdict.helped else _lift_quota(inputs, result, verdict, config)), state
    finished = state.intervals
    # A wait is measured when it ends. If none ends, online tasks may be idle, or wait for reclaimed pods all the time.
    has_waits = any(wait is not None and wait.count for wait in inputs.waits.values())
    is_calm = result.reason.rule in _CALM_RULES and has_waits
    state = _measure_cycle(inputs, state, config, is_calm=is_calm)
    if state.intervals is not finished:
        comparison, is_final = _compare(state, config)
        if comparison is not None and (comparison.improved or is_final):
            if comparison.improved and not is_calm:
                result = _end_control_interval(inputs, result, state, config)
            return _conclude(inputs, result, state, config, comparison)
    return _select_quota(inputs, result, state, config, is_calm=is_calm)


def measures_limit(state: QuotaTrialState) -> bool:
    """Return whether an interval with the quota is being measured. It must end with the same latency alarm as one without."""
    return state.current is not None and state.current.limited


def _is_maximum(inputs: QuotaTrialInputs) -> bool:
    return inputs.in_force_cores is not None and inputs.in_force_cores >= inputs.maximum_cores


def _is_beyond(verdict: QuotaVerdict, inputs: QuotaTrialInputs, config: LatencyConfig) -> bool:
    """Return whether latency is far above what the trial measured: then the policy acts, and a new trial begins."""
    limit_ns = max(WORST_FACTOR * verdict.worst_ns, config.gross_breach_factor * config.target_wait_ms * NS_PER_MS)
    return bool(find_breaches(inputs.waits, dict.fromkeys(inputs.waits, limit_ns), config))


def _kind_of_cycle(inputs: QuotaTrialInputs, state: QuotaTrialState) -> bool | None:
    """Return whether the quota limited reclaimed pods since the previous cycle; None if neither kind is certain.

    The measured use shows whether the quota is in force: in a dry run, or if its file cannot be written, it limits nothing.
    """
    quota, used = inputs.in_force_cores, inputs.used_cores
    if quota is None or used is None:
        return None
    if quota >= inputs.maximum_cores:
        return False if used >= max(BUSY_CORES, state.limited_cores) else None
    is_limit = LIMITED_RATIO * quota <= used <= 1.2 * quota + BUSY_CORES
    return True if quota <= LIMITED_RATIO * inputs.maximum_cores and is_limit else None


def _measure_cycle(
    inputs: QuotaTrialInputs, state: QuotaTrialState, config: LatencyConfig, *, is_calm: bool
) -> QuotaTrialState:
    """Return the state with the waits since the previous cycle in the current interval, which may end. An interval whose
    quota or measurement changes is dropped."""
    since = None
    if is_calm:
        since = inputs.now_ns if state.calm_since_ns is None else state.calm_since_ns
    state, current = replace(state, calm_since_ns=since, current=None), state.current
    waits = [wait for wait in inputs.waits.values() if wait is not None and wait.slots is not None]
    if (
        current is None
        or current.limited is not _kind_of_cycle(inputs, state)
        or not waits
        or len(waits) < len(inputs.waits)
    ):
        return state
    slots = sum_runq_latencies(waits).slots
    assert slots is not None
    merged = tuple(map(sum, zip(current.slots, slots, strict=True)))
    target_ns = config.target_wait_ms * NS_PER_MS
    worst = max_latency(find_breaches(inputs.waits, dict.fromkeys(inputs.waits, target_ns), config), config)
    worst_ns = target_ns if worst is None else worst[1]
    current = replace(
        current,
        duration_ns=current.duration_ns + inputs.elapsed_ns,
        slots=merged,
        excess=max(current.excess, log2(worst_ns / target_ns)),
    )
    state = replace(state, worst_ns=max(state.worst_ns, worst_ns))
    if is_calm and current.duration_ns + inputs.elapsed_ns // 2 < INTERVAL_NS:
        return replace(state, current=current)
    intervals = _latest_intervals((*state.intervals, current), inputs.now_ns)
    return replace(state, intervals=intervals, limit_is_measured=current.limited)


def _latest_intervals(intervals: tuple[LatencyInterval, ...], now_ns: int) -> tuple[LatencyInterval, ...]:
    recent = [interval for interval in intervals if now_ns - interval.started_ns <= MAX_AGE_NS]
    same = [interval for interval in recent if interval.limited is intervals[-1].limited]
    return tuple(i for i in recent if len(same) <= MAX_INTERVALS or i is not same[0])


def _compare(state: QuotaTrialState, config: LatencyConfig) -> tuple[LatencyComparison | None, bool]:
    """Return the comparison of the intervals so far, and whether it is the last one; None if it is too early."""
    limited = sum(interval.limited for interval in state.intervals)
    same = limited if state.intervals[-1].limited else len(state.intervals) - limited
    least = min(limited, len(state.intervals) - limited)
    # With a comparison after every interval, noise would look like an effect sooner or later.
    if same > least or least not in COMPARED_AFTER:
        return None, False
    comparison = compare_latency(state.intervals, config.quantile)
    if comparison is None:
        return None, False
    is_small = comparison.upper_difference < RELEVANT_RATIO * comparison.excess_without_quota
    return comparison, is_small or least == COMPARED_AFTER[-1]


def _conclude(
    inputs: QuotaTrialInputs,
    result: LatencyResult,
    state: QuotaTrialState,
    config: LatencyConfig,
    comparison: LatencyComparison,
) -> tuple[LatencyResult, QuotaTrialState]:
    """Remember the verdict. The quota is lifted, or it stays and the reason of this cycle says how it helped."""
    verdict = QuotaVerdict(
        key=inputs.key,
        workloads=inputs.workloads,
        helped=comparison.improved,
        quantile=config.quantile,
        without_quota_ns=comparison.without_quota_ns,
        with_quota_ns=comparison.with_quota_ns,
        without_quota_s=comparison.without_quota_s,
        with_quota_s=comparison.with_quota_s,
        statistic=comparison.statistic,
        required_statistic=comparison.required_statistic,
        worst_ns=state.worst_ns,
        wall_time_ns=inputs.wall_time_ns,
        expires_wall_ns=inputs.wall_time_ns + MEMORY_NS,
    )
    others = tuple(v for v in state.verdicts if v.key != inputs.key and v.expires_wall_ns > inputs.wall_time_ns)
    state = QuotaTrialState(key=inputs.key, verdicts=(*others, verdict)[-MAX_VERDICTS:])
    if not verdict.helped:
        return _lift_quota(inputs, result, verdict, config, always=True), state
    reason = replace(
        result.reason,
        rule=QUOTA_HELPED,
        text=f"{result.reason.text} {verdict.text}",
        inputs={**result.reason.inputs, **_verdict_inputs(verdict)},
    )
    return replace(result, reason=reason), state


def _verdict_inputs(verdict: QuotaVerdict) -> dict[str, float | int | str | None]:
    return {
        "without_quota_ms": round(verdict.without_quota_ns / NS_PER_MS, 3),
        "with_quota_ms": round(verdict.with_quota_ns / NS_PER_MS, 3),
        "without_quota_s": round(verdict.without_quota_s, 1),
        "with_quota_s": round(verdict.with_quota_s, 1),
        "statistic": round(verdict.statistic, 2),
        "required_statistic": round(verdict.required_statistic, 2),
        "workloads": verdict.workloads,
    }


def _lift_quota(
    inputs: QuotaTrialInputs,
    result: LatencyResult,
    verdict: QuotaVerdict,
    config: LatencyConfig,
    *,
    always: bool = False,
) -> LatencyResult:
    """Return the result with the quota of the policy lifted. If the policy sets no quota by latency, return its result
    unchanged, unless `always`: then the result has the reason of the verdict."""
    rule = result.reason.rule
    if rule not in _LATENCY_RULES or (not always and _is_maximum(inputs) and result.action != "shrink"):
        return result
    text = verdict.text
    if rule not in _CALM_RULES:
        text = f"{result.reason.text.partition(': ')[0]}: no quota is set. {text}"
    lifted = _with_quota(inputs, result, inputs.maximum_cores, config, (QUOTA_DID_NOT_HELP, text))
    return replace(lifted, reason=replace(lifted.reason, inputs={**lifted.reason.inputs, **_verdict_inputs(verdict)}))


def _with_quota(
    inputs: QuotaTrialInputs, result: LatencyResult, cores: float, config: LatencyConfig, why: tuple[str, str]
) -> LatencyResult:
    """Return the result with another quota and the rule and text of its reason."""
    minimum = min_quota_cores(inputs.node_cpus, config)
    after = round_quota_cores(cores, minimum)
    before = round_quota_cores(result.level_cores if inputs.in_force_cores is None else inputs.in_force_cores, minimum)
    return replace(
        result,
        reclaimable_cores=after,
        level_cores=cores,
        action="grow" if after > before else "shrink" if after < before else "hold",
        reason=Reason(
            rule=why[0],
            text=why[1],
            threshold=config.target_wait_ms,
            inputs={**result.reason.inputs, "lent_before_cores": before, "lent_cores": after},
        ),
    )


def _select_quota(
    inputs: QuotaTrialInputs, result: LatencyResult, state: QuotaTrialState, config: LatencyConfig, *, is_calm: bool
) -> tuple[LatencyResult, QuotaTrialState]:
    """Begin the next interval, and hold or lift the quota for it. What the policy does against latency stays as it is."""
    if state.release is not None:
        if not is_calm:
            return _end_control_interval(inputs, result, state, config), replace(state, release=None)
        # If latency stays low, the policy itself needs no quota.
        state = replace(state, release=None) if inputs.now_ns >= state.release.ends_ns else state
    if not is_calm or result.action == "shrink":
        return result, replace(state, current=None)
    is_settled = inputs.now_ns - (state.calm_since_ns or inputs.now_ns) >= SETTLE_NS
    if state.current is None:
        if not is_settled:
            return result, state
        if result.level_cores >= inputs.maximum_cores:
            return result, _begin_interval(inputs, state, limited=False)
        if state.limit_is_measured:
            return _begin_control_interval(inputs, result, state, config)
        if not _kind_of_cycle(inputs, state):
            return result, state
        state = replace(_begin_interval(inputs, state, limited=True), limited_cores=inputs.in_force_cores or 0.0)
    if not measures_limit(state) or result.action != "grow":
        return result, state
    text = "The CPU quota of reclaimed pods does not grow while it is compared with no quota."
    return _with_quota(inputs, result, inputs.in_force_cores or 0.0, config, (QUOTA_TRIAL, text)), state


def _begin_interval(inputs: QuotaTrialInputs, state: QuotaTrialState, *, limited: bool) -> QuotaTrialState:
    empty = LatencyInterval(limited=limited, started_ns=inputs.now_ns, duration_ns=0, slots=(0,) * SLOT_COUNT)
    return replace(state, current=empty)


def _begin_control_interval(
    inputs: QuotaTrialInputs, result: LatencyResult, state: QuotaTrialState, config: LatencyConfig
) -> tuple[LatencyResult, QuotaTrialState]:
    text = (
        f"The CPU quota of reclaimed pods is lifted for {INTERVAL_NS / NS_PER_S:g} s at most, because run-queue latency is "
        "below its target: latency with and without the quota is compared."
    )
    release = QuotaRelease(ends_ns=inputs.now_ns + INTERVAL_NS, level_cores=inputs.in_force_cores or 0.0)
    lifted = _with_quota(inputs, result, inputs.maximum_cores, config, (QUOTA_TRIAL, text))
    return lifted, replace(_begin_interval(inputs, state, limited=False), release=release)


def _end_control_interval(
    inputs: QuotaTrialInputs, result: LatencyResult, state: QuotaTrialState, config: LatencyConfig
) -> LatencyResult:
    """Return the result with the quota from before a control interval, if there is one and the policy sets none."""
    if state.release is None or result.level_cores <= state.release.level_cores:
        return result
    text = f"The test without the CPU quota is over: {result.reason.text}"
    return _with_quota(inputs, result, state.release.level_cores, config, (QUOTA_TRIAL_ENDED, text))

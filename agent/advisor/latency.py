"""Policy `latency`: run-queue latency of online pods sets the CPU quota of reclaimed pods.
The quota grows slowly and shrinks at once. Reclaimed pods run on all CPUs. Online tasks that wake up
interrupt them where decisions/cpu_priority.py could write the priority; the quota bounds what remains. A breach of
the target halves what reclaimed pods use, a gross breach reduces it to the minimum. Latency that remains while the
quota is at its minimum is the container's baseline and is not held against reclaimed pods. Latency is measured when a task gets
a CPU: a container with runnable threads and no sample blocks growth. If blame is measured, reclaimed pods lose quota only
for latency in which they had the CPU for at least `least_blame_ratio` of the time, and the pods that had it lose weight
(interference.py). Time in which a container's own quota throttled it is not latency (api/rates.py); the alarm between
two cycles does not subtract it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from agent.advisor.advisor_state import AdvisorState
from agent.advisor.interference import Interference
from agent.config.advisor import LatencyConfig
from api.histogram import count_above, quantile_ns
from api.knobs import Reason, ReasonInputs
from api.rates import Rates, cgroup_runq_latency, cgroups_by_container, runq_latency_delta
from api.snapshot import RunqLatency, Snapshot
from api.units import NS_PER_MS, NS_PER_S


def max_latency(waits: Mapping[str, RunqLatency | None], config: LatencyConfig) -> tuple[str, float, int] | None:
    """Return the container with the highest quantile as (cgroup, latency in ns, number of waits); None without any
    wait."""
    latencies = [
        (wait_ns, cgroup, wait.count)
        for cgroup, wait in waits.items()
        if wait is not None and (wait_ns := latency_quantile_ns(wait, config.quantile)) is not None
    ]
    if not latencies:
        return None
    wait_ns, cgroup, count = max(latencies)
    return cgroup, wait_ns, count


def latency_quantile_ns(wait: RunqLatency, quantile: float) -> float | None:
    """Return the quantile in ns; if only the sum is known, the quantile of an exponential distribution of the same
    mean."""
    if wait.slots is not None:
        return quantile_ns(wait.slots, quantile)
    return wait.sum_ns / wait.count * -log(1 - quantile) if wait.count else None


def find_breaches(
    waits: Mapping[str, RunqLatency | None], limits_ns: Mapping[str, float], config: LatencyConfig
) -> dict[str, RunqLatency]:
    """Return the containers that breach their limits, by cgroup."""
    return {
        cgroup: wait
        for cgroup, wait in waits.items()
        if wait is not None and is_breach(wait, limits_ns[cgroup], config)
    }


def is_breach(wait: RunqLatency, limit_ns: float, config: LatencyConfig) -> bool:
    """Return whether more waits exceed the limit than the quantile allows, and at least `min_waits_above`."""
    if wait.slots is None:
        value = latency_quantile_ns(wait, config.quantile)
        return value is not None and value > limit_ns and wait.count >= config.min_waits_above
    longer = count_above(wait.slots, limit_ns)
    return longer >= config.min_waits_above and longer > (1 - config.quantile) * wait.count


def is_latency_alarm(
    before: Mapping[str, RunqLatency],
    after: Mapping[str, RunqLatency],
    limits_ns: Mapping[str, float],
    config: LatencyConfig,
) -> bool:
    """Return whether the waits between two polls, a fraction of a cycle apart, are a breach already."""
    # A breach implies at least half of this total: most polls end here.
    minimum = config.min_waits_above / 2
    changes = {
        cgroup: runq_latency_delta(then, wait)
        for cgroup, wait in after.items()
        if (then := before.get(cgroup)) is not None and wait.sum_ns - then.sum_ns >= minimum * limits_ns[cgroup]
    }
    return bool(find_breaches(changes, limits_ns, config))


_MIN_STARVED_THREADS = 0.5
"""Threads without CPU from which a container is starved: a thread that always runs is charged slightly less than a
core."""


class StarvedContainer(NamedTuple):
    """An online container with runnable threads and no wait that ended: the length of its waits is not known yet."""

    runnable: int
    """Number of runnable threads at the time of the snapshot."""
    cores: float
    """CPU use since the previous cycle."""


def find_starved(
    waits: Mapping[str, RunqLatency | None], snapshot: Snapshot, change: Rates | None, previous: Snapshot | None
) -> dict[str, StarvedContainer]:
    """Return by cgroup the containers with more runnable threads than CPU use and no wait that ended since the previous
    cycle.

    Throttled containers are omitted. Nothing is returned if runnable threads are not counted.
    """
    quiet = [cgroup for cgroup, wait in waits.items() if wait is not None and not wait.count]
    if change is None or not quiet:
        return {}
    runnable = {
        path: sample.threads_by_state.runnable
        for path, sample in snapshot.cgroups.items()
        if sample.threads_by_state is not None and sample.threads_by_state.runnable
    }
    starved = {}
    for cgroup, paths in cgroups_by_container({*quiet, *runnable}, quiet).items():
        threads = sum(runnable.get(path, 0) for path in paths)
        rates_of = [rate for path in paths if (rate := change.cgroups.get(path)) is not None]
        ended = [
            cgroup_runq_latency(snapshot.cgroups[path], change, previous) for path in paths if path in snapshot.cgroups
        ]
        if any(wait is not None and wait.count for wait in ended) or any(rate.throttled_periods for rate in rates_of):
            continue
        own = change.cgroups.get(cgroup)
        cores = (own.cpu_cores if own is not None else None) or 0.0
        if threads - cores >= _MIN_STARVED_THREADS:
            starved[cgroup] = StarvedContainer(threads, cores)
    return starved


_CAUTION_BAND, _CAUTION_FACTOR = (0.75, 1.1), 0.1
"""Around the CPU use of the last breach, as factors of it, the quota grows at a tenth of its rate."""
_BASELINE_BREACH_FACTOR, _BASELINE_NEAR_FACTOR = 1.25, 1.1
"""Latency of a container with a baseline is a breach above the first multiple of it, and stops growth above the second.
"""
_BASELINE_DECAY = 0.9
"""Factor by which a container's baseline decays in every cycle in which it is measured again."""
_STEPS_PER_CORE = 20
"""The quota moves in twentieths of a core: a smaller change is noise, and each change costs a write."""
PODS_UNKNOWN = "pods_unknown"
NO_JOURNAL = "journal_unavailable"
NO_JOURNAL_TEXT = "original values cannot be journalled: the CPU of reclaimed pods does not grow"


class LatencyResult(msgspec.Struct, frozen=True, kw_only=True):
    """Reclaimable CPU from now on, and the state to keep for the next cycle."""

    reclaimable_cores: float
    """Rounded down to a step that is worth a write."""
    level_cores: float
    """The value before rounding, from which growth continues."""
    action: str
    reason: Reason
    harmful_cores: float | None
    baseline_latency_ns: Mapping[str, float]
    minimum_since_ns: int | None
    last_breach_ns: int | None
    last_wait_ns: int | None


class LatencyInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Measured inputs of the policy."""

    now_ns: int
    elapsed_ns: int
    """Time since the previous cycle; 0 in the first one."""
    node_cpus: int
    waits: Mapping[str, RunqLatency | None]
    """By online container's cgroup: waits that ended since the previous cycle; None if they are not measured."""
    reclaimed_use_cores: float | None
    requirement_cores: float
    enable_reclaim: bool = True
    blames: Mapping[str, Interference | None] = {}
    """By online container above half the target: the cgroups that had the CPU meanwhile; None if not measured."""
    starved: Mapping[str, StarvedContainer] = {}
    """By cgroup: online containers whose waits have not ended yet."""
    max_cores: float | None = None
    """Upper bound because of pods that are not reclaimable; None without such pods."""
    pods_fresh: bool = True
    """Whether the list of pods is up to date; a stale list may miss new pods."""
    can_journal: bool = True
    """Whether original values can be journalled; otherwise new reclaimed pods cannot be limited."""


def evaluate_latency(inputs: LatencyInputs, state: AdvisorState, config: LatencyConfig) -> LatencyResult:
    """Return how much CPU reclaimed pods may use from now on, with the reason."""
    node, maximum = float(inputs.node_cpus), max_quota_cores(inputs, config)
    previous = node if state.reclaimable_cores is None else min(state.reclaimable_cores, node)
    reclaimable = min(previous, maximum)
    minimum = min_quota_cores(inputs.node_cpus, config)
    since = None
    if reclaimable <= minimum:
        since = inputs.now_ns if state.minimum_since_ns is None else state.minimum_since_ns
    baselines = _baseline_latency(inputs, state, config, since)
    # A baseline excuses no latency that is attributed to reclaimed pods in this cycle.
    excused = {c: ns for c, ns in baselines.items() if not _caused_by_reclaimed(inputs.blames.get(c), config)}
    rule = _select_rule(inputs, replace(state, baseline_latency_ns=excused), config, reclaimable)
    level = min(max(rule.reclaimable_cores, minimum), maximum)
    before, after = round_quota_cores(previous, minimum), round_quota_cores(level, minimum)
    text = rule.text
    if level == maximum < node:
        text += (
            f" At most {maximum:.3g} of {node:g} cores are reclaimable: pods that are not reclaimable hold the rest."
        )
    held = "freeze" if rule.rule.startswith(("wait_unknown", PODS_UNKNOWN, NO_JOURNAL)) else "hold"
    # A new baseline may have been mistaken for a breach by reclaimed pods.
    harmful = None if baselines.keys() - state.baseline_latency_ns.keys() else state.harmful_cores
    measured = _all_latency_known(inputs) or state.last_wait_ns is None
    return LatencyResult(
        reclaimable_cores=after,
        level_cores=level,
        action="shrink" if after < before else "grow" if after > before else held,
        reason=Reason(
            rule=rule.rule,
            text=text,
            threshold=rule.threshold,
            inputs={
                **_latency_reason_inputs(rule.cgroup, inputs, baselines, config),
                "lent_before_cores": before,
                "lent_cores": after,
            },
        ),
        harmful_cores=_used_cores(inputs, reclaimable) if rule.breach else harmful,
        baseline_latency_ns=baselines,
        minimum_since_ns=since,
        last_breach_ns=inputs.now_ns if rule.restarts_calm else state.last_breach_ns,
        last_wait_ns=inputs.now_ns if measured else state.last_wait_ns,
    )


def _latency_reason_inputs(
    cgroup: str | None, inputs: LatencyInputs, baselines: Mapping[str, float], config: LatencyConfig
) -> ReasonInputs:
    """Observed inputs of the reason: those of `cgroup`, or of the container with the highest latency."""
    if cgroup is None and (highest := max_latency(inputs.waits, config)) is not None:
        cgroup = highest[0]
    wait = baseline_ns = blame = starved = wait_ns = None
    if cgroup is not None:
        wait, blame = inputs.waits[cgroup], inputs.blames.get(cgroup)
        baseline_ns, starved = baselines.get(cgroup), inputs.starved.get(cgroup)
        wait_ns = None if wait is None else latency_quantile_ns(wait, config.quantile)
    return {
        "wait_ms": None if wait_ns is None else round(wait_ns / NS_PER_MS, 3),
        "waits": None if wait is None else wait.count,
        "cgroup": cgroup,
        "quantile": config.quantile,
        "reclaimed_use_cores": _round_to_milli(inputs.reclaimed_use_cores),
        "requirement_cores": _round_to_milli(inputs.requirement_cores),
        "runnable": None if starved is None else starved.runnable,
        "own_wait_ms": None if baseline_ns is None else round(baseline_ns / NS_PER_MS, 3),
        "blame_ratio": None if blame is None else round(blame.reclaimed_ratio, 3),
        "other_culprit": None if blame is None else blame.other,
    }


class _LatencyRule(NamedTuple):
    """The rule that applies and the quota that it proposes, before bounds and rounding."""

    reclaimable_cores: float
    rule: str
    text: str
    threshold: float | None
    restarts_calm: bool = False
    """Whether growth has to wait for `calm_s` again."""
    breach: bool = False
    cgroup: str | None = None
    """Cgroup that the rule is about, if it is not the one with the highest latency."""


def _baseline_latency(
    inputs: LatencyInputs, state: AdvisorState, config: LatencyConfig, minimum_since_ns: int | None
) -> dict[str, float]:
    """Latency that online containers cause themselves: measured after reclaimed pods were at their minimum for
    `calm_s`.

    A container has no baseline before that, nor after its latency fell below half the target, nor for latency that is
    attributed to reclaimed pods.
    """
    low = minimum_since_ns is not None and inputs.now_ns - minimum_since_ns >= config.calm_s * NS_PER_S
    own = {}
    for cgroup, wait in inputs.waits.items():
        baseline_ns = state.baseline_latency_ns.get(cgroup, 0.0)
        if wait is not None and not is_breach(wait, config.target_wait_ms * NS_PER_MS / 2, config):
            continue
        if wait is not None and low and not _caused_by_reclaimed(inputs.blames.get(cgroup), config):
            baseline_ns = max(_BASELINE_DECAY * baseline_ns, latency_quantile_ns(wait, config.quantile) or 0.0)
        if baseline_ns:
            own[cgroup] = baseline_ns
    return own


def latency_limits_ns(
    cgroups: Iterable[str], baseline_latency_ns: Mapping[str, float], config: LatencyConfig
) -> dict[str, float]:
    """Return by container the latency above which reclaimed pods are throttled: the target, or 1.25 times its baseline."""
    target_ns = config.target_wait_ms * NS_PER_MS
    return {
        cgroup: max(target_ns, _BASELINE_BREACH_FACTOR * baseline_latency_ns.get(cgroup, 0.0)) for cgroup in cgroups
    }


def _select_rule(inputs: LatencyInputs, state: AdvisorState, config: LatencyConfig, reclaimable: float) -> _LatencyRule:
    target_ms, baselines = config.target_wait_ms, state.baseline_latency_ns
    maximum = max_quota_cores(inputs, config)
    latency = f"Run-queue latency p{config.quantile * 100:g}"
    if not inputs.enable_reclaim:
        text = "Reclaiming is disabled: reclaimed pods keep the minimum."
        return _LatencyRule(0.0, "reclaim_disabled", text, None)
    if not inputs.waits:
        return _grow_quota(inputs, state, config, reclaimable, ("nothing_online", "No online pod runs on this node"))
    limits = latency_limits_ns(inputs.waits, baselines, config)
    if breaches := find_breaches(inputs.waits, limits, config):
        return _handle_breach(breaches, inputs, state, config, reclaimable)
    if not _all_latency_known(inputs):
        return _handle_unknown_latency(inputs, state, config, reclaimable)
    near_limits = {
        c: max(target_ms * NS_PER_MS / 2, _BASELINE_NEAR_FACTOR * baselines.get(c, 0.0)) for c in inputs.waits
    }
    near = find_breaches(inputs.waits, near_limits, config)
    if not all(_caused_by_reclaimed(inputs.blames.get(cgroup), config) is False for cgroup in near):
        text = f"{latency} is above half the target of {target_ms:g} ms: the CPU quota of reclaimed pods does not grow."
        return _LatencyRule(reclaimable, "wait_near_target", text, target_ms, restarts_calm=True)
    if inputs.starved:
        return _hold_for_pending_latency(inputs.starved, config, reclaimable)
    rule, state_text = "wait_below_target", f"below half the target of {target_ms:g} ms"
    if near:
        # Throttling reclaimed pods does not shorten latency that they did not cause.
        rule = "wait_near_by_others"
        state_text = f"below the target of {target_ms:g} ms and not caused by reclaimed pods"
    if baselines:
        cgroup = max(baselines, key=lambda each: baselines[each])
        rule = "wait_is_own"
        state_text = (
            f"not above the baseline of {cgroup}, {baselines[cgroup] / NS_PER_MS:.3g} ms without reclaimed pods"
        )
    text = f"{latency} is {state_text}"
    if not baselines and max_latency(inputs.waits, config) is None:
        text = "No online pod finished waiting for a CPU in this cycle"
    if reclaimable >= maximum:
        extent = "the whole node" if maximum >= inputs.node_cpus else "all CPU that may be reclaimed"
        return _LatencyRule(maximum, rule, f"{text}: reclaimed pods may use {extent}.", target_ms)
    since = state.last_breach_ns
    if since is not None and inputs.now_ns - since < config.calm_s * NS_PER_S:
        text = f"{latency} has been low for less than {config.calm_s:g} s: the CPU quota of reclaimed pods does not grow yet."
        return _LatencyRule(reclaimable, "not_calm_yet", text, config.calm_s)
    return _grow_quota(inputs, state, config, reclaimable, (rule, text))


def _grow_quota(
    inputs: LatencyInputs, state: AdvisorState, config: LatencyConfig, reclaimable: float, why: tuple[str, str]
) -> _LatencyRule:
    """Grow by one step, by a smaller step near the use of the last breach, and not at all while the list of pods is
    stale."""
    rule, text = why
    if not inputs.pods_fresh:
        text = f"{text}, but the list of pods is stale and may miss new pods: the CPU quota of reclaimed pods does not grow."
        return _LatencyRule(reclaimable, PODS_UNKNOWN, text, None)
    if not inputs.can_journal:
        return _LatencyRule(reclaimable, NO_JOURNAL, f"{text}, but {NO_JOURNAL_TEXT}.", None)
    step = config.grow_ratio_per_s * inputs.node_cpus * inputs.elapsed_ns / NS_PER_S
    harmful = state.harmful_cores
    if harmful is not None and _CAUTION_BAND[0] * harmful <= reclaimable <= _CAUTION_BAND[1] * harmful:
        step *= _CAUTION_FACTOR
    new = min(reclaimable + step, max_quota_cores(inputs, config))
    threshold = None if rule == "nothing_online" else config.target_wait_ms
    rounded = round_quota_cores(new, min_quota_cores(inputs.node_cpus, config))
    text = f"{text}: reclaimed pods may use {rounded:.3g} of {inputs.node_cpus} cores."
    return _LatencyRule(new, rule, text, threshold)


def _handle_breach(
    breaches: Mapping[str, RunqLatency],
    inputs: LatencyInputs,
    state: AdvisorState,
    config: LatencyConfig,
    reclaimable: float,
) -> _LatencyRule:
    """Handle latency above its limit: it is attributed to reclaimed pods unless another aggressor was measured."""
    attributed = {
        cgroup: wait
        for cgroup, wait in breaches.items()
        if _caused_by_reclaimed(inputs.blames.get(cgroup), config) is not False
    }
    limits = latency_limits_ns(breaches, state.baseline_latency_ns, config)
    latencies = {
        cgroup: latency_quantile_ns(wait, config.quantile) or 0.0 for cgroup, wait in (attributed or breaches).items()
    }
    # Limits differ by container: the worst is the one furthest above its own limit.
    cgroup = max(latencies, key=lambda each: (latencies[each] / limits[each], each))
    wait_ns, baseline_ns = latencies[cgroup], state.baseline_latency_ns.get(cgroup)
    text = f"Run-queue latency p{config.quantile * 100:g} of {cgroup} is {wait_ns / NS_PER_MS:.3g} ms"
    text += f", target {config.target_wait_ms:g} ms"
    if baseline_ns is not None:
        text += f", without reclaimed pods {baseline_ns / NS_PER_MS:.3g} ms"
    if attributed:
        gross = wait_ns >= config.gross_breach_factor * limits[cgroup]
        return _shrink_quota(text, inputs, config, reclaimable, gross=gross)._replace(cgroup=cgroup)
    blame = inputs.blames[cgroup]
    assert blame is not None
    other = "its own tasks" if blame.other == cgroup else blame.other
    text = (
        f"{text}; reclaimed pods had the CPU for {blame.reclaimed_ratio:.0%} of that time, {other} for "
        f"{blame.other_ns / blame.total_ns:.0%}: the CPU quota of reclaimed pods stays as it is."
    )
    return _LatencyRule(reclaimable, "wait_by_others", text, config.target_wait_ms, restarts_calm=True, cgroup=cgroup)


def _hold_for_pending_latency(
    starved: Mapping[str, StarvedContainer], config: LatencyConfig, reclaimable: float
) -> _LatencyRule:
    """Hold the quota: latency is measured when a task gets a CPU, so a task that still waits is in no quantile."""
    cgroup = max(starved, key=lambda each: (starved[each].runnable - starved[each].cores, each))
    runnable, cores = starved[cgroup]
    text = (
        f"{cgroup} has {runnable} runnable threads, used {cores:.2f} cores and finished no wait for a CPU in this cycle: "
        "the CPU quota of reclaimed pods does not grow."
    )
    return _LatencyRule(reclaimable, "wait_under_way", text, config.target_wait_ms, cgroup=cgroup)


def _caused_by_reclaimed(interference: Interference | None, config: LatencyConfig) -> bool | None:
    """Whether reclaimed pods had the CPU for a relevant part of the latency; None if that was not measured."""
    if interference is None or interference.total_ns <= 0:
        return None
    return interference.reclaimed_ratio >= config.least_blame_ratio


def _shrink_quota(
    measured: str, inputs: LatencyInputs, config: LatencyConfig, reclaimable: float, *, gross: bool
) -> _LatencyRule:
    target_ms, rule = config.target_wait_ms, "wait_far_above_target" if gross else "wait_above_target"
    minimum = min_quota_cores(inputs.node_cpus, config)
    if reclaimable <= minimum:
        text = f"{measured}: reclaimed pods are at their minimum of {minimum:g} cores already."
        return _LatencyRule(minimum, rule, text, target_ms, restarts_calm=True)
    if gross:
        text = f"{measured}: far above, so reclaimed pods are reduced to their minimum of {minimum:g} cores."
        return _LatencyRule(0.0, rule, text, target_ms, restarts_calm=True, breach=True)
    used = _used_cores(inputs, reclaimable)
    text = f"{measured}: the CPU quota of reclaimed pods is set to half of what they use."
    return _LatencyRule(used / 2, rule, text, target_ms, restarts_calm=True, breach=True)


def _used_cores(inputs: LatencyInputs, reclaimable: float) -> float:
    return reclaimable if inputs.reclaimed_use_cores is None else min(reclaimable, inputs.reclaimed_use_cores)


def round_quota_cores(cores: float, minimum: float) -> float:
    """Return the quota rounded down to a step that is worth a write, and at least the minimum."""
    return max(int(cores * _STEPS_PER_CORE + 1e-6) / _STEPS_PER_CORE, minimum)


def min_quota_cores(node_cpus: int, config: LatencyConfig) -> float:
    """Return the minimum CPU quota of reclaimed pods: a pod that never runs can neither finish nor be measured."""
    return max(config.min_reclaimable_ratio * node_cpus, 1 / _STEPS_PER_CORE)


def max_quota_cores(inputs: LatencyInputs, config: LatencyConfig) -> float:
    """Return the maximum quota: the node, less what pods that are not reclaimable hold, and never below the minimum."""
    node = float(inputs.node_cpus)
    if inputs.max_cores is None:
        return node
    return max(min(inputs.max_cores, node), min_quota_cores(inputs.node_cpus, config))


def can_shrink_quota(state: AdvisorState, node_cpus: int, config: LatencyConfig) -> bool:
    """Return whether a cycle on a latency alarm could shrink the quota: at the minimum it would only cost CPU."""
    return state.reclaimable_cores is not None and state.reclaimable_cores > min_quota_cores(node_cpus, config)


def _all_latency_known(inputs: LatencyInputs) -> bool:
    return all(wait is not None for wait in inputs.waits.values())


def _handle_unknown_latency(
    inputs: LatencyInputs, state: AdvisorState, config: LatencyConfig, reclaimable: float
) -> _LatencyRule:
    """Latency of some online container is missing: stop growth, and after `stale_s` fall back to the estimated need."""
    since = state.last_wait_ns
    if since is None or inputs.now_ns - since < config.stale_s * NS_PER_S:
        state_text = "is measured from this first cycle on" if since is None else "is not measured"
        text = f"Run-queue latency {state_text}: the CPU quota of reclaimed pods stays as it is."
        return _LatencyRule(reclaimable, "wait_unknown", text, None)
    left = max(inputs.node_cpus - inputs.requirement_cores, 0.0)
    text = (
        f"Run-queue latency has not been measured for {config.stale_s:g} s: "
        "reclaimed pods keep at most what the estimated need of online pods leaves."
    )
    return _LatencyRule(min(reclaimable, left), "wait_unknown_long", text, config.stale_s, restarts_calm=True)


def _round_to_milli(value: float | None) -> float | None:
    return None if value is None else round(value, 3)

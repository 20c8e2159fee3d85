"""Policy `latency`: run-queue latency of online pods sets the CPU quota of reclaimed pods.
The quota grows slowly and shrinks at once. Reclaimed pods run on all CPUs with cpu.idle, so the scheduler
yields to online tasks at every wakeup; the quota bounds what remains. A breach of the target halves what
reclaimed pods use, a gross breach reduces it to the minimum. Latency that remains while the quota is at its
minimum is the container's baseline and is not held against reclaimed pods. Latency is measured when a task gets
a CPU: a container with runnable threads and no sample blocks growth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from agent.advisor.advisor_state import AdvisorState
from agent.advisor.interference import Interference
from agent.advisor.runq_latency import (
    StarvedContainer,
    find_breaches,
    is_breach,
    latency_quantile_ns,
    max_latency,
)
from agent.config.advisor import LatencyConfig
from api.knobs import Reason
from api.measurements import RunqLatency
from api.runq_latency import NS_PER_MS

NS_PER_S = 1_000_000_000
_CAUTION_BAND, _CAUTION_FACTOR = (0.75, 1.1), 0.1
"""Between these parts of what was harmful the last time, lending grows at a tenth of its pace."""
_BASELINE_BREACH_FACTOR, _BASELINE_NEAR_FACTOR = 1.25, 1.1
"""Waits so many times a container's own are harm, and are too near to it to lend more."""
_BASELINE_DECAY = 0.9
"""What a container was seen to wait by itself goes down so in every round in which it is measured again."""
_STEPS_PER_CORE = 20
"""Lent CPU moves in twentieths of a core: smaller changes are noise that would cost a write each."""
PODS_UNKNOWN = "pods_unknown"


class LatencyResult(msgspec.Struct, frozen=True, kw_only=True):
    """How much to lend from now on, and what the policy must remember of it."""

    reclaimable_cores: float
    """In steps that are worth a write."""
    level_cores: float
    """The same before it was cut to steps: where growth goes on from."""
    action: str
    reason: Reason
    harmful_cores: float | None
    baseline_latency_ns: Mapping[str, float]
    minimum_since_ns: int | None
    last_breach_ns: int | None
    last_wait_ns: int | None


class LatencyInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy judges, already measured."""

    now_ns: int
    elapsed_ns: int
    """Time since the previous round; 0 in the first."""
    node_cpus: int
    waits: Mapping[str, RunqLatency | None]
    """By online container's cgroup: waits that ended since the previous round; None where they are not known."""
    reclaimed_use_cores: float | None
    requirement_cores: float
    enable_reclaim: bool = True
    blames: Mapping[str, Interference | None] = {}
    """By online container whose waits are above half the target: who had the CPU meanwhile; None where nobody knows."""
    starved: Mapping[str, StarvedContainer] = {}
    """Online containers whose waits are still under way, by cgroup."""
    max_cores: float | None = None
    """What may be lent at most, because there are pods that lend nothing; None where there are none."""
    pods_fresh: bool = True
    """Whether whoever lists the pods answers: if not, some may be here that nobody knows of."""


def evaluate_latency(situation: LatencyInputs, memory: AdvisorState, config: LatencyConfig) -> LatencyResult:
    """Decide how much CPU reclaimed pods may use from now on."""
    node, most = float(situation.node_cpus), max_quota_cores(situation, config)
    known = node if memory.reclaimable_cores is None else min(memory.reclaimable_cores, node)
    lent = min(known, most)
    minimum = min_quota_cores(situation.node_cpus, config)
    since = None
    if lent <= minimum:
        since = situation.now_ns if memory.minimum_since_ns is None else memory.minimum_since_ns
    found = max_latency(situation.waits, config)
    own = _baseline_latency(situation, memory, config, since)
    # Nothing that a container makes by itself excuses what batch work is seen to make of its waits now.
    excused = {c: ns for c, ns in own.items() if not _caused_by_batch(situation.blames.get(c), config)}
    ruling = _select_rule(situation, msgspec.structs.replace(memory, baseline_latency_ns=excused), config, lent)
    level = min(max(ruling.reclaimable_cores, minimum), most)
    before, new = _round_to_step(known, minimum), _round_to_step(level, minimum)
    text = ruling.text
    if level == most < node:
        text += f" No more than {most:.3g} of {node:g} cores may be lent: the rest is of pods that lend nothing."
    cgroup = ruling.cgroup or (None if found is None else found[0])
    wait = None if cgroup is None else situation.waits[cgroup]
    wait_ns = None if wait is None else latency_quantile_ns(wait, config.quantile)
    blamed, own_ns = (None, None) if cgroup is None else (situation.blames.get(cgroup), own.get(cgroup))
    starved = None if cgroup is None else situation.starved.get(cgroup)
    inputs: dict[str, float | int | str | None] = {
        "wait_ms": None if wait_ns is None else round(wait_ns / NS_PER_MS, 3),
        "waits": None if wait is None else wait.count,
        "cgroup": cgroup,
        "quantile": config.quantile,
        "reclaimed_use_cores": _round_to_milli(situation.reclaimed_use_cores),
        "requirement_cores": _round_to_milli(situation.requirement_cores),
        "lent_before_cores": before,
        "lent_cores": new,
        "runnable": None if starved is None else starved.runnable,
        "own_wait_ms": None if own_ns is None else round(own_ns / NS_PER_MS, 3),
        "blame_ratio": None if blamed is None else round(blamed.reclaimed_ratio, 3),
        "other_culprit": None if blamed is None else blamed.other,
    }
    # What was learnt just now may have been what was taken for harm.
    harmful = None if own.keys() - memory.baseline_latency_ns.keys() else memory.harmful_cores
    held = "freeze" if ruling.rule.startswith(("wait_unknown", PODS_UNKNOWN)) else "hold"
    return LatencyResult(
        reclaimable_cores=new,
        level_cores=level,
        action="shrink" if new < before else "grow" if new > before else held,
        reason=Reason(rule=ruling.rule, text=text, threshold=ruling.threshold, inputs=inputs),
        harmful_cores=_used_cores(situation, lent) if ruling.breach else harmful,
        baseline_latency_ns=own,
        minimum_since_ns=since,
        last_breach_ns=situation.now_ns if ruling.restarts_calm else memory.last_breach_ns,
        last_wait_ns=situation.now_ns
        if _all_latency_known(situation) or memory.last_wait_ns is None
        else memory.last_wait_ns,
    )


class _LatencyRule(NamedTuple):
    """Which rule fired and what it asks for, before bounds and steps."""

    reclaimable_cores: float
    rule: str
    text: str
    threshold: float | None
    restarts_calm: bool = False
    """Whether calm has to be waited for again."""
    breach: bool = False
    cgroup: str | None = None
    """Whose wait it is about, where that is not the longest."""


def _baseline_latency(
    inputs: LatencyInputs, memory: AdvisorState, config: LatencyConfig, minimum_since_ns: int | None
) -> dict[str, float]:
    """What online containers wait because of themselves: what was seen after batch work had been down to its minimum for a
    while, and nobody knows that they waited for it all the same. Of none until then, nor once its waits are short."""
    low = minimum_since_ns is not None and inputs.now_ns - minimum_since_ns >= config.calm_s * NS_PER_S
    own = {}
    for cgroup, wait in inputs.waits.items():
        known = memory.baseline_latency_ns.get(cgroup, 0.0)
        if wait is not None and not is_breach(wait, config.target_wait_ms * NS_PER_MS / 2, config):
            continue
        if wait is not None and low and not _caused_by_batch(inputs.blames.get(cgroup), config):
            known = max(_BASELINE_DECAY * known, latency_quantile_ns(wait, config.quantile) or 0.0)
        if known:
            own[cgroup] = known
    return own


def latency_limits_ns(
    cgroups: Iterable[str], baseline_latency_ns: Mapping[str, float], config: LatencyConfig
) -> dict[str, float]:
    """By container, above which waits are held against batch work: the target, or more than what it makes by itself."""
    target_ns = config.target_wait_ms * NS_PER_MS
    return {
        cgroup: max(target_ns, _BASELINE_BREACH_FACTOR * baseline_latency_ns.get(cgroup, 0.0)) for cgroup in cgroups
    }


def _select_rule(inputs: LatencyInputs, memory: AdvisorState, config: LatencyConfig, lent: float) -> _LatencyRule:
    target_ms, own = config.target_wait_ms, memory.baseline_latency_ns
    most = max_quota_cores(inputs, config)
    what = f"p{config.quantile * 100:g} run-queue wait"
    if not inputs.enable_reclaim:
        return _LatencyRule(0.0, "reclaim_disabled", "Reclaiming is switched off: only the minimum is lent.", None)
    if not inputs.waits:
        return _grow_quota(inputs, memory, config, lent, ("nothing_online", "No online pod runs here"))
    limits = latency_limits_ns(inputs.waits, own, config)
    if harmed := find_breaches(inputs.waits, limits, config):
        return _handle_breach(harmed, inputs, memory, config, lent)
    if not _all_latency_known(inputs):
        return _handle_unknown_latency(inputs, memory, config, lent)
    nearly = {c: max(target_ms * NS_PER_MS / 2, _BASELINE_NEAR_FACTOR * own.get(c, 0.0)) for c in inputs.waits}
    near = find_breaches(inputs.waits, nearly, config)
    if not all(_caused_by_others(inputs.blames.get(cgroup), config) for cgroup in near):
        text = f"{what} is above half the target of {target_ms:g} ms: nothing more is lent."
        return _LatencyRule(lent, "wait_near_target", text, target_ms, restarts_calm=True)
    if inputs.starved:
        return _hold_for_pending_latency(inputs.starved, config, lent)
    rule, state = "wait_below_target", f"below half the target of {target_ms:g} ms"
    if near:
        # Holding back work that had no part in it would starve it for what online pods do to themselves.
        rule, state = "wait_near_by_others", f"below the target of {target_ms:g} ms, and others than batch work made it"
    if own:
        cgroup = max(own, key=lambda each: own[each])
        shown = f"{own[cgroup] / NS_PER_MS:.3g} ms that {cgroup} waited without batch work"
        rule, state = "wait_is_own", f"no longer than the {shown}"
    said, stayed = f"{what} is {state}", f"{what} has stayed {state}"
    if not own and max_latency(inputs.waits, config) is None:
        said = stayed = "No wait of an online pod for a CPU ended in this round"
    if lent >= most:
        whole = "the whole node" if most >= inputs.node_cpus else "all that may be"
        return _LatencyRule(most, rule, f"{said}: {whole} is lent.", target_ms)
    since = memory.last_breach_ns
    if since is not None and inputs.now_ns - since < config.calm_s * NS_PER_S:
        text = f"{what} has been short for less than {config.calm_s:g} s: nothing more is lent yet."
        return _LatencyRule(lent, "not_calm_yet", text, config.calm_s)
    return _grow_quota(inputs, memory, config, lent, (rule, stayed))


def _grow_quota(
    inputs: LatencyInputs, memory: AdvisorState, config: LatencyConfig, lent: float, why: tuple[str, str]
) -> _LatencyRule:
    """A step more, never a jump; a small step around what was harmful the last time. None for pods that nobody lists."""
    rule, text = why
    if not inputs.pods_fresh:
        text = f"{text}, but the list of pods is not up to date: some may be new, and nothing more is lent."
        return _LatencyRule(lent, PODS_UNKNOWN, text, None)
    step = config.grow_ratio_per_s * inputs.node_cpus * inputs.elapsed_ns / NS_PER_S
    harmful = memory.harmful_cores
    if harmful is not None and _CAUTION_BAND[0] * harmful <= lent <= _CAUTION_BAND[1] * harmful:
        step *= _CAUTION_FACTOR
    new = min(lent + step, max_quota_cores(inputs, config))
    threshold = None if rule == "nothing_online" else config.target_wait_ms
    told = _round_to_step(new, min_quota_cores(inputs.node_cpus, config))
    return _LatencyRule(new, rule, f"{text}: {told:.3g} of {inputs.node_cpus} cores are lent.", threshold)


def _handle_breach(
    breaches: Mapping[str, RunqLatency], inputs: LatencyInputs, memory: AdvisorState, config: LatencyConfig, lent: float
) -> _LatencyRule:
    """Some container waited too long. If nobody else is known to have made it, batch work did."""
    ours = {
        cgroup: wait for cgroup, wait in breaches.items() if not _caused_by_others(inputs.blames.get(cgroup), config)
    }
    limits = latency_limits_ns(breaches, memory.baseline_latency_ns, config)
    waited = {cgroup: latency_quantile_ns(wait, config.quantile) or 0.0 for cgroup, wait in (ours or breaches).items()}
    # One may be used to wait longer than another suffers.
    cgroup = max(waited, key=lambda each: (waited[each] / limits[each], each))
    wait_ns, own_ns = waited[cgroup], memory.baseline_latency_ns.get(cgroup)
    seen = f"p{config.quantile * 100:g} run-queue wait of {cgroup} is {wait_ns / NS_PER_MS:.3g} ms"
    seen += f", the target is {config.target_wait_ms:g} ms"
    if own_ns is not None:
        seen += f", and without batch work it was {own_ns / NS_PER_MS:.3g} ms"
    if ours:
        gross = wait_ns >= config.gross_breach_factor * limits[cgroup]
        return _shrink_quota(seen, inputs, config, lent, gross=gross)._replace(cgroup=cgroup)
    blamed = inputs.blames[cgroup]
    assert blamed is not None
    other = "its own tasks" if blamed.other == cgroup else blamed.other
    text = (
        f"{seen}; batch work had the CPU for {blamed.reclaimed_ratio:.0%} of that time, and {other} for "
        f"{blamed.other_ns / blamed.total_ns:.0%}: nothing is taken from batch work, and nothing more is lent."
    )
    return _LatencyRule(lent, "wait_by_others", text, config.target_wait_ms, restarts_calm=True, cgroup=cgroup)


def _hold_for_pending_latency(
    starved: Mapping[str, StarvedContainer], config: LatencyConfig, lent: float
) -> _LatencyRule:
    """A wait counts once it ends: who waited all the time is in no quantile, and nothing is known of how long it will be."""
    cgroup = max(starved, key=lambda each: (starved[each].runnable - starved[each].cores, each))
    runnable, cores = starved[cgroup]
    text = (
        f"No wait of {cgroup} for a CPU ended in this round, but it has {runnable} runnable threads and used "
        f"{cores:.2f} cores: nothing more is lent."
    )
    return _LatencyRule(lent, "wait_under_way", text, config.target_wait_ms, cgroup=cgroup)


def _caused_by_others(found: Interference | None, config: LatencyConfig) -> bool:
    return found is not None and found.total_ns > 0 and found.reclaimed_ratio < config.least_blame_ratio


def _caused_by_batch(found: Interference | None, config: LatencyConfig) -> bool:
    return found is not None and found.total_ns > 0 and found.reclaimed_ratio >= config.least_blame_ratio


def _shrink_quota(seen: str, inputs: LatencyInputs, config: LatencyConfig, lent: float, *, gross: bool) -> _LatencyRule:
    target_ms, rule = config.target_wait_ms, "wait_far_above_target" if gross else "wait_above_target"
    minimum = min_quota_cores(inputs.node_cpus, config)
    if lent <= minimum:
        text = f"{seen}: batch work has no more than its minimum of {minimum:g} cores already."
        return _LatencyRule(minimum, rule, text, target_ms, restarts_calm=True)
    if gross:
        text = f"{seen}: far above, so all but the minimum of {minimum:g} cores is taken back."
        return _LatencyRule(0.0, rule, text, target_ms, restarts_calm=True, breach=True)
    used = _used_cores(inputs, lent)
    text = f"{seen}: half of what batch work uses is taken back."
    return _LatencyRule(used / 2, rule, text, target_ms, restarts_calm=True, breach=True)


def _used_cores(inputs: LatencyInputs, lent: float) -> float:
    return lent if inputs.reclaimed_use_cores is None else min(lent, inputs.reclaimed_use_cores)


def _round_to_step(cores: float, minimum: float) -> float:
    return max(int(cores * _STEPS_PER_CORE + 1e-6) / _STEPS_PER_CORE, minimum)


def min_quota_cores(node_cpus: int, config: LatencyConfig) -> float:
    """What is lent at least: work that never runs can neither finish nor be measured."""
    return max(config.min_lent_ratio * node_cpus, 1 / _STEPS_PER_CORE)


def max_quota_cores(inputs: LatencyInputs, config: LatencyConfig) -> float:
    """What may be lent at most: the node, or less of it where there are pods that lend nothing; the minimum in any case."""
    node = float(inputs.node_cpus)
    if inputs.max_cores is None:
        return node
    return max(min(inputs.max_cores, node), min_quota_cores(inputs.node_cpus, config))


def can_shrink_quota(memory: AdvisorState, node_cpus: int, config: LatencyConfig) -> bool:
    """Whether a round on an alarm could take anything back; at the minimum it would only burn CPU."""
    return memory.reclaimable_cores is not None and memory.reclaimable_cores > min_quota_cores(node_cpus, config)


def _all_latency_known(inputs: LatencyInputs) -> bool:
    return all(wait is not None for wait in inputs.waits.values())


def _handle_unknown_latency(
    inputs: LatencyInputs, memory: AdvisorState, config: LatencyConfig, lent: float
) -> _LatencyRule:
    """Waits are missing for some online container: lend no more, and soon no more than its estimated need leaves."""
    since = memory.last_wait_ns
    if since is None:
        text = "Run-queue waits are counted from this first round on: lending stays as it is."
        return _LatencyRule(lent, "wait_unknown", text, None)
    if inputs.now_ns - since < config.stale_s * NS_PER_S:
        return _LatencyRule(lent, "wait_unknown", "Run-queue waits are not known: lending stays as it is.", None)
    left = max(inputs.node_cpus - inputs.requirement_cores, 0.0)
    text = f"Run-queue waits have been unknown for {config.stale_s:g} s: no more is lent than estimated need leaves."
    return _LatencyRule(min(lent, left), "wait_unknown_long", text, config.stale_s, restarts_calm=True)


def _round_to_milli(value: float | None) -> float | None:
    return None if value is None else round(value, 3)

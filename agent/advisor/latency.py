"""Policy `latency`: what online pods wait for a CPU decides how much CPU is lent. Grows slowly, shrinks at once.

Reclaimed pods run everywhere with cpu.idle, so the scheduler itself gives way to online tasks at every wakeup; what it
cannot see (waits that add up although it gives way, kernels without cpu.idle) is held in check by a quota on the
reclaimed pods. The quota is the node (no limit) while waits are short; a breach halves what the reclaimed pods really
use, a gross one takes it down to a minimum at once; calm gives it back step by step.

The worst-waiting container speaks for all. To the kernel a throttled task is a runnable one, so time for which its own
quota held a container back is taken out of its waits first (`contention`); between rounds the alarm does not know of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import NamedTuple

import msgspec

from agent.advisor.memory import Memory
from agent.config import LatencyConfig
from api.decisions import Verdict
from api.facts import Wait
from api.histograms import BOUNDS_NS, above, quantile_ns, slot_of
from api.rates import wait_delta

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
_CAREFUL, _CAREFUL_PACE = (0.75, 1.1), 0.1
"""Between these parts of what was harmful the last time, lending grows at a tenth of its pace."""
_STEPS_PER_CORE = 20
"""Lent CPU moves in twentieths of a core: smaller changes are noise that would cost a write each."""


class Lending(msgspec.Struct, frozen=True, kw_only=True):
    """How much to lend from now on, and what the policy must remember of it."""

    lent_cores: float
    """In steps that are worth a write."""
    level_cores: float
    """The same before it was cut to steps: where growth goes on from."""
    action: str
    verdict: Verdict
    harmful_cores: float | None
    last_breach_ns: int | None
    last_wait_ns: int | None


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy judges, already measured."""

    now_ns: int
    elapsed_ns: int
    """Time since the previous round; 0 in the first."""
    node_cpus: int
    waits: Mapping[str, Wait | None]
    """By online container's cgroup: waits that ended since the previous round; None where they are not known."""
    reclaimed_use_cores: float | None
    requirement_cores: float
    enable_reclaim: bool = True


def contention(wait: Wait, throttled_ns: int) -> Wait:
    """The waits that are left when the cgroup's own throttling is taken out: that is its owner's doing, not batch work's.

    The kernel counts throttled time as waiting. Throttles are the longest waits of a period, so they are taken from the
    longest slots first, at each slot's lower bound, until the throttled time is used up. Waits below a millisecond stay.
    """
    if wait.slots is None:
        return Wait(sum_ns=max(wait.sum_ns - throttled_ns, 0), count=wait.count)
    slots, left = list(wait.slots), throttled_ns
    for k in range(len(slots) - 1, slot_of(NS_PER_MS), -1):
        taken = min(slots[k], left // BOUNDS_NS[k - 1])
        slots[k] -= taken
        left -= taken * BOUNDS_NS[k - 1]
    return Wait(sum_ns=max(wait.sum_ns - throttled_ns, 0), count=sum(slots), slots=tuple(slots))


def worst(waits: Mapping[str, Wait | None], config: LatencyConfig) -> tuple[str, float, int] | None:
    """The container that waited longest at the quantile: (cgroup, wait in ns, number of waits); None if none waited."""
    seen = [
        (wait_ns, cgroup, wait.count)
        for cgroup, wait in waits.items()
        if wait is not None and (wait_ns := wait_at(wait, config.quantile)) is not None
    ]
    if not seen:
        return None
    wait_ns, cgroup, count = max(seen)
    return cgroup, wait_ns, count


def wait_at(wait: Wait, quantile: float) -> float | None:
    """The quantile of a set of waits in ns; where only their sum is known, that of an exponential of the same mean."""
    if wait.slots is not None:
        return quantile_ns(wait.slots, quantile)
    return wait.sum_ns / wait.count * -log(1 - quantile) if wait.count else None


def breached(waits: Mapping[str, Wait | None], limit_ns: float, config: LatencyConfig) -> bool:
    """Whether some container had more waits above the limit than the quantile allows, and at least min_waits_above."""
    return any(wait is not None and _breaches(wait, limit_ns, config) for wait in waits.values())


def _breaches(wait: Wait, limit_ns: float, config: LatencyConfig) -> bool:
    if wait.slots is None:
        value = wait_at(wait, config.quantile)
        return value is not None and value > limit_ns and wait.count >= config.min_waits_above
    longer = above(wait.slots, limit_ns)
    return longer >= config.min_waits_above and longer > (1 - config.quantile) * wait.count


def alarmed(before: Mapping[str, Wait], after: Mapping[str, Wait], config: LatencyConfig) -> bool:
    """Whether the waits between two looks, a fraction of a round apart, are a breach already."""
    changes = {cgroup: wait_delta(before.get(cgroup), wait) for cgroup, wait in after.items()}
    return breached(changes, config.target_wait_ms * NS_PER_MS, config)


def lend(situation: Situation, memory: Memory, config: LatencyConfig) -> Lending:
    """Decide how much CPU reclaimed pods may use from now on."""
    node = float(situation.node_cpus)
    lent = node if memory.lent_cores is None else min(memory.lent_cores, node)
    ruling = _judge(situation, memory, config, lent)
    minimum = minimum_cores(situation.node_cpus, config)
    level = min(max(ruling.lent_cores, minimum), node)
    before, new = _stepped(lent, minimum), _stepped(level, minimum)
    found = worst(situation.waits, config)
    inputs: dict[str, float | int | str | None] = {
        "wait_ms": None if found is None else round(found[1] / NS_PER_MS, 3),
        "waits": None if found is None else found[2],
        "cgroup": None if found is None else found[0],
        "quantile": config.quantile,
        "reclaimed_use_cores": _rounded(situation.reclaimed_use_cores),
        "requirement_cores": _rounded(situation.requirement_cores),
        "lent_before_cores": before,
        "lent_cores": new,
    }
    held = "freeze" if ruling.rule.startswith("wait_unknown") else "hold"
    return Lending(
        lent_cores=new,
        level_cores=level,
        action="shrink" if new < before else "grow" if new > before else held,
        verdict=Verdict(rule=ruling.rule, text=ruling.text, threshold=ruling.threshold, inputs=inputs),
        harmful_cores=_used(situation, lent) if ruling.breach and lent > minimum else memory.harmful_cores,
        last_breach_ns=situation.now_ns if ruling.uneasy else memory.last_breach_ns,
        last_wait_ns=situation.now_ns if _measured(situation) or memory.last_wait_ns is None else memory.last_wait_ns,
    )


class _Ruling(NamedTuple):
    """Which rule fired and what it asks for, before bounds and steps."""

    lent_cores: float
    rule: str
    text: str
    threshold: float | None
    uneasy: bool = False
    """Whether calm has to be waited for again."""
    breach: bool = False


def _judge(situation: Situation, memory: Memory, config: LatencyConfig, lent: float) -> _Ruling:
    target_ms, target_ns = config.target_wait_ms, config.target_wait_ms * NS_PER_MS
    node = float(situation.node_cpus)
    what = f"p{config.quantile * 100:g} run-queue wait"
    if not situation.enable_reclaim:
        return _Ruling(0.0, "reclaim_disabled", "Reclaiming is switched off: only the minimum is lent.", None)
    if not situation.waits:
        return _grow(situation, memory, config, lent, ("nothing_online", "No online pod runs here"))
    if breached(situation.waits, target_ns, config):
        return _take_back(situation, config, lent, what)
    if not _measured(situation):
        return _unknown(situation, memory, config, lent)
    if breached(situation.waits, target_ns / 2, config):
        text = f"{what} is above half the target of {target_ms:g} ms: nothing more is lent."
        return _Ruling(lent, "wait_near_target", text, target_ms, uneasy=True)
    if lent >= node:
        text = f"{what} is below half the target of {target_ms:g} ms: the whole node is lent."
        return _Ruling(node, "wait_below_target", text, target_ms)
    since = memory.last_breach_ns
    if since is not None and situation.now_ns - since < config.calm_s * NS_PER_S:
        text = f"{what} has been short for less than {config.calm_s:g} s: nothing more is lent yet."
        return _Ruling(lent, "not_calm_yet", text, config.calm_s)
    calm = f"{what} has stayed below half the target of {target_ms:g} ms"
    return _grow(situation, memory, config, lent, ("wait_below_target", calm))


def _grow(situation: Situation, memory: Memory, config: LatencyConfig, lent: float, why: tuple[str, str]) -> _Ruling:
    """A step more, never a jump; a small step around what was harmful the last time."""
    rule, text = why
    step = config.grow_ratio_per_s * situation.node_cpus * situation.elapsed_ns / NS_PER_S
    harmful = memory.harmful_cores
    if harmful is not None and _CAREFUL[0] * harmful <= lent <= _CAREFUL[1] * harmful:
        step *= _CAREFUL_PACE
    new = min(lent + step, float(situation.node_cpus))
    threshold = config.target_wait_ms if rule == "wait_below_target" else None
    return _Ruling(new, rule, f"{text}: {new:.3g} of {situation.node_cpus} cores are lent.", threshold)


def _take_back(situation: Situation, config: LatencyConfig, lent: float, what: str) -> _Ruling:
    found = worst(situation.waits, config)
    assert found is not None
    cgroup, wait_ns, _ = found
    target_ms = config.target_wait_ms
    seen = f"{what} of {cgroup} is {wait_ns / NS_PER_MS:.3g} ms, the target is {target_ms:g} ms"
    rule = (
        "wait_far_above_target"
        if wait_ns >= config.gross_breach_factor * target_ms * NS_PER_MS
        else "wait_above_target"
    )
    minimum = minimum_cores(situation.node_cpus, config)
    if lent <= minimum:
        text = f"{seen}: batch work has no more than its minimum of {minimum:g} cores already."
        return _Ruling(minimum, rule, text, target_ms, uneasy=True)
    if rule == "wait_far_above_target":
        text = f"{seen}: far above, so all but the minimum of {minimum:g} cores is taken back."
        return _Ruling(0.0, rule, text, target_ms, uneasy=True, breach=True)
    used = _used(situation, lent)
    text = f"{seen}: half of what batch work uses is taken back."
    return _Ruling(used / 2, rule, text, target_ms, uneasy=True, breach=True)


def _used(situation: Situation, lent: float) -> float:
    return lent if situation.reclaimed_use_cores is None else min(lent, situation.reclaimed_use_cores)


def _stepped(cores: float, minimum: float) -> float:
    return max(int(cores * _STEPS_PER_CORE + 1e-6) / _STEPS_PER_CORE, minimum)


def minimum_cores(node_cpus: int, config: LatencyConfig) -> float:
    """What is lent at least: work that never runs can neither finish nor be measured."""
    return max(config.min_lent_ratio * node_cpus, 1 / _STEPS_PER_CORE)


def can_shrink(memory: Memory, node_cpus: int, config: LatencyConfig) -> bool:
    """Whether a round on an alarm could take anything back; at the minimum it would only burn CPU."""
    return memory.lent_cores is not None and memory.lent_cores > minimum_cores(node_cpus, config)


def _measured(situation: Situation) -> bool:
    return all(wait is not None for wait in situation.waits.values())


def _unknown(situation: Situation, memory: Memory, config: LatencyConfig, lent: float) -> _Ruling:
    """Waits are missing for some online container: lend no more, and soon no more than its estimated need leaves."""
    since = memory.last_wait_ns
    if since is None:
        text = "Run-queue waits are counted from this first round on: lending stays as it is."
        return _Ruling(lent, "wait_unknown", text, None)
    if situation.now_ns - since < config.stale_s * NS_PER_S:
        return _Ruling(lent, "wait_unknown", "Run-queue waits are not known: lending stays as it is.", None)
    left = max(situation.node_cpus - situation.requirement_cores, 0.0)
    text = f"Run-queue waits have been unknown for {config.stale_s:g} s: no more is lent than estimated need leaves."
    return _Ruling(min(lent, left), "wait_unknown_long", text, config.stale_s, uneasy=True)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)

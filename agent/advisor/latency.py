"""Policy `latency`: what online pods wait for a CPU decides how much CPU is lent. Grows slowly, shrinks at once.

Reclaimed pods run everywhere with cpu.idle, so the scheduler itself gives way to online tasks at every wakeup; what it
cannot see (waits that add up although it gives way, kernels without cpu.idle) is held in check by a quota on the
reclaimed pods. The quota is the node (no limit) while waits are short; a breach halves what the reclaimed pods really
use, a gross one takes it down to a minimum at once; calm gives it back step by step.

The worst-waiting container speaks for all. What is not batch work's doing is not held against it: time for which its own
quota held a container back is taken out of its waits (`waits.contention`; the alarm between rounds does not know of it),
and a container's waits that stay when batch work has been down to its minimum for `calm_s` are its own queueing: from then
on they are what is expected of it, and only more than that is harm, until they fall below half the target again. Not so
while the kernel says that it is batch work, even at its minimum, that it waits for.

A wait is measured when it ends. A container none of whose waits ended, and that has runnable threads which do not run, is
not taken for one that waits little: nothing more is lent until it is known.

Where the kernel tells who had the CPU meanwhile (`culprits`), nobody takes from batch work what others did: a wait in which
it had less than `least_blame_ratio` of the time stops growth and names the culprit. What is taken back, is taken from those
reclaimed containers that had the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from agent.advisor.culprits import Blamed
from agent.advisor.measured import Starved
from agent.advisor.state import Memory
from agent.advisor.waits import NS_PER_MS, breaches, breaching, wait_at, worst
from agent.config import LatencyConfig
from api.facts import Wait
from api.knobs import Verdict

NS_PER_S = 1_000_000_000
_CAREFUL, _CAREFUL_PACE = (0.75, 1.1), 0.1
"""Between these parts of what was harmful the last time, lending grows at a tenth of its pace."""
_OWN_BREACH, _OWN_NEAR = 1.25, 1.1
"""Waits so many times a container's own are harm, and are too near to it to lend more."""
_FORGETTING = 0.9
"""What a container was seen to wait by itself goes down so in every round in which it is measured again."""
_STEPS_PER_CORE = 20
"""Lent CPU moves in twentieths of a core: smaller changes are noise that would cost a write each."""
PODS_UNKNOWN = "pods_unknown"


class Lending(msgspec.Struct, frozen=True, kw_only=True):
    """How much to lend from now on, and what the policy must remember of it."""

    lent_cores: float
    """In steps that are worth a write."""
    level_cores: float
    """The same before it was cut to steps: where growth goes on from."""
    action: str
    verdict: Verdict
    harmful_cores: float | None
    own_waits_ns: Mapping[str, float]
    minimum_since_ns: int | None
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
    blames: Mapping[str, Blamed | None] = {}
    """By online container whose waits are above half the target: who had the CPU meanwhile; None where nobody knows."""
    starved: Mapping[str, Starved] = {}
    """Online containers whose waits are still under way, by cgroup."""
    most_cores: float | None = None
    """What may be lent at most, because there are pods that lend nothing; None where there are none."""
    pods_known: bool = True
    """Whether whoever lists the pods answers: if not, some may be here that nobody knows of."""


def lend(situation: Situation, memory: Memory, config: LatencyConfig) -> Lending:
    """Decide how much CPU reclaimed pods may use from now on."""
    node, most = float(situation.node_cpus), most_cores(situation, config)
    known = node if memory.lent_cores is None else min(memory.lent_cores, node)
    lent = min(known, most)
    minimum = minimum_cores(situation.node_cpus, config)
    since = None
    if lent <= minimum:
        since = situation.now_ns if memory.minimum_since_ns is None else memory.minimum_since_ns
    found = worst(situation.waits, config)
    own = _own_waits_ns(situation, memory, config, since)
    # Nothing that a container makes by itself excuses what batch work is seen to make of its waits now.
    excused = {c: ns for c, ns in own.items() if not _batch_did(situation.blames.get(c), config)}
    ruling = _judge(situation, msgspec.structs.replace(memory, own_waits_ns=excused), config, lent)
    level = min(max(ruling.lent_cores, minimum), most)
    before, new = _stepped(known, minimum), _stepped(level, minimum)
    text = ruling.text
    if level == most < node:
        text += f" No more than {most:.3g} of {node:g} cores may be lent: the rest is of pods that lend nothing."
    cgroup = ruling.cgroup or (None if found is None else found[0])
    wait = None if cgroup is None else situation.waits[cgroup]
    wait_ns = None if wait is None else wait_at(wait, config.quantile)
    blamed, own_ns = (None, None) if cgroup is None else (situation.blames.get(cgroup), own.get(cgroup))
    starved = None if cgroup is None else situation.starved.get(cgroup)
    inputs: dict[str, float | int | str | None] = {
        "wait_ms": None if wait_ns is None else round(wait_ns / NS_PER_MS, 3),
        "waits": None if wait is None else wait.count,
        "cgroup": cgroup,
        "quantile": config.quantile,
        "reclaimed_use_cores": _rounded(situation.reclaimed_use_cores),
        "requirement_cores": _rounded(situation.requirement_cores),
        "lent_before_cores": before,
        "lent_cores": new,
        "runnable": None if starved is None else starved.runnable,
        "own_wait_ms": None if own_ns is None else round(own_ns / NS_PER_MS, 3),
        "blame_ratio": None if blamed is None else round(blamed.reclaimed_ratio, 3),
        "other_culprit": None if blamed is None else blamed.other,
    }
    # What was learnt just now may have been what was taken for harm.
    harmful = None if own.keys() - memory.own_waits_ns.keys() else memory.harmful_cores
    held = "freeze" if ruling.rule.startswith(("wait_unknown", PODS_UNKNOWN)) else "hold"
    return Lending(
        lent_cores=new,
        level_cores=level,
        action="shrink" if new < before else "grow" if new > before else held,
        verdict=Verdict(rule=ruling.rule, text=text, threshold=ruling.threshold, inputs=inputs),
        harmful_cores=_used(situation, lent) if ruling.breach else harmful,
        own_waits_ns=own,
        minimum_since_ns=since,
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
    cgroup: str | None = None
    """Whose wait it is about, where that is not the longest."""


def _own_waits_ns(
    situation: Situation, memory: Memory, config: LatencyConfig, minimum_since_ns: int | None
) -> dict[str, float]:
    """What online containers wait because of themselves: what was seen after batch work had been down to its minimum for a
    while, and nobody knows that they waited for it all the same. Of none until then, nor once its waits are short."""
    low = minimum_since_ns is not None and situation.now_ns - minimum_since_ns >= config.calm_s * NS_PER_S
    own = {}
    for cgroup, wait in situation.waits.items():
        known = memory.own_waits_ns.get(cgroup, 0.0)
        if wait is not None and not breaches(wait, config.target_wait_ms * NS_PER_MS / 2, config):
            continue
        if wait is not None and low and not _batch_did(situation.blames.get(cgroup), config):
            known = max(_FORGETTING * known, wait_at(wait, config.quantile) or 0.0)
        if known:
            own[cgroup] = known
    return own


def limits_ns(cgroups: Iterable[str], own_waits_ns: Mapping[str, float], config: LatencyConfig) -> dict[str, float]:
    """By container, above which waits are held against batch work: the target, or more than what it makes by itself."""
    target_ns = config.target_wait_ms * NS_PER_MS
    return {cgroup: max(target_ns, _OWN_BREACH * own_waits_ns.get(cgroup, 0.0)) for cgroup in cgroups}


def _judge(situation: Situation, memory: Memory, config: LatencyConfig, lent: float) -> _Ruling:
    target_ms, own = config.target_wait_ms, memory.own_waits_ns
    most = most_cores(situation, config)
    what = f"p{config.quantile * 100:g} run-queue wait"
    if not situation.enable_reclaim:
        return _Ruling(0.0, "reclaim_disabled", "Reclaiming is switched off: only the minimum is lent.", None)
    if not situation.waits:
        return _grow(situation, memory, config, lent, ("nothing_online", "No online pod runs here"))
    limits = limits_ns(situation.waits, own, config)
    if harmed := breaching(situation.waits, limits, config):
        return _breach(harmed, situation, memory, config, lent)
    if not _measured(situation):
        return _unknown(situation, memory, config, lent)
    nearly = {c: max(target_ms * NS_PER_MS / 2, _OWN_NEAR * own.get(c, 0.0)) for c in situation.waits}
    near = breaching(situation.waits, nearly, config)
    if not all(_others_did(situation.blames.get(cgroup), config) for cgroup in near):
        text = f"{what} is above half the target of {target_ms:g} ms: nothing more is lent."
        return _Ruling(lent, "wait_near_target", text, target_ms, uneasy=True)
    if situation.starved:
        return _under_way(situation.starved, config, lent)
    rule, state = "wait_below_target", f"below half the target of {target_ms:g} ms"
    if near:
        # Holding back work that had no part in it would starve it for what online pods do to themselves.
        rule, state = "wait_near_by_others", f"below the target of {target_ms:g} ms, and others than batch work made it"
    if own:
        cgroup = max(own, key=lambda each: own[each])
        shown = f"{own[cgroup] / NS_PER_MS:.3g} ms that {cgroup} waited without batch work"
        rule, state = "wait_is_own", f"no longer than the {shown}"
    said, stayed = f"{what} is {state}", f"{what} has stayed {state}"
    if not own and worst(situation.waits, config) is None:
        said = stayed = "No wait of an online pod for a CPU ended in this round"
    if lent >= most:
        whole = "the whole node" if most >= situation.node_cpus else "all that may be"
        return _Ruling(most, rule, f"{said}: {whole} is lent.", target_ms)
    since = memory.last_breach_ns
    if since is not None and situation.now_ns - since < config.calm_s * NS_PER_S:
        text = f"{what} has been short for less than {config.calm_s:g} s: nothing more is lent yet."
        return _Ruling(lent, "not_calm_yet", text, config.calm_s)
    return _grow(situation, memory, config, lent, (rule, stayed))


def _grow(situation: Situation, memory: Memory, config: LatencyConfig, lent: float, why: tuple[str, str]) -> _Ruling:
    """A step more, never a jump; a small step around what was harmful the last time. None for pods that nobody lists."""
    rule, text = why
    if not situation.pods_known:
        text = f"{text}, but the list of pods is not up to date: some may be new, and nothing more is lent."
        return _Ruling(lent, PODS_UNKNOWN, text, None)
    step = config.grow_ratio_per_s * situation.node_cpus * situation.elapsed_ns / NS_PER_S
    harmful = memory.harmful_cores
    if harmful is not None and _CAREFUL[0] * harmful <= lent <= _CAREFUL[1] * harmful:
        step *= _CAREFUL_PACE
    new = min(lent + step, most_cores(situation, config))
    threshold = None if rule == "nothing_online" else config.target_wait_ms
    told = _stepped(new, minimum_cores(situation.node_cpus, config))
    return _Ruling(new, rule, f"{text}: {told:.3g} of {situation.node_cpus} cores are lent.", threshold)


def _breach(
    harmed: Mapping[str, Wait], situation: Situation, memory: Memory, config: LatencyConfig, lent: float
) -> _Ruling:
    """Some container waited too long. If nobody else is known to have made it, batch work did."""
    ours = {cgroup: wait for cgroup, wait in harmed.items() if not _others_did(situation.blames.get(cgroup), config)}
    limits = limits_ns(harmed, memory.own_waits_ns, config)
    waited = {cgroup: wait_at(wait, config.quantile) or 0.0 for cgroup, wait in (ours or harmed).items()}
    # One may be used to wait longer than another suffers.
    cgroup = max(waited, key=lambda each: (waited[each] / limits[each], each))
    wait_ns, own_ns = waited[cgroup], memory.own_waits_ns.get(cgroup)
    seen = f"p{config.quantile * 100:g} run-queue wait of {cgroup} is {wait_ns / NS_PER_MS:.3g} ms"
    seen += f", the target is {config.target_wait_ms:g} ms"
    if own_ns is not None:
        seen += f", and without batch work it was {own_ns / NS_PER_MS:.3g} ms"
    if ours:
        gross = wait_ns >= config.gross_breach_factor * limits[cgroup]
        return _take_back(seen, situation, config, lent, gross=gross)._replace(cgroup=cgroup)
    blamed = situation.blames[cgroup]
    assert blamed is not None
    other = "its own tasks" if blamed.other == cgroup else blamed.other
    text = (
        f"{seen}; batch work had the CPU for {blamed.reclaimed_ratio:.0%} of that time, and {other} for "
        f"{blamed.other_ns / blamed.total_ns:.0%}: nothing is taken from batch work, and nothing more is lent."
    )
    return _Ruling(lent, "wait_by_others", text, config.target_wait_ms, uneasy=True, cgroup=cgroup)


def _under_way(starved: Mapping[str, Starved], config: LatencyConfig, lent: float) -> _Ruling:
    """A wait counts once it ends: who waited all the time is in no quantile, and nothing is known of how long it will be."""
    cgroup = max(starved, key=lambda each: (starved[each].runnable - starved[each].cores, each))
    runnable, cores = starved[cgroup]
    text = (
        f"No wait of {cgroup} for a CPU ended in this round, but it has {runnable} runnable threads and used "
        f"{cores:.2f} cores: nothing more is lent."
    )
    return _Ruling(lent, "wait_under_way", text, config.target_wait_ms, cgroup=cgroup)


def _others_did(found: Blamed | None, config: LatencyConfig) -> bool:
    return found is not None and found.total_ns > 0 and found.reclaimed_ratio < config.least_blame_ratio


def _batch_did(found: Blamed | None, config: LatencyConfig) -> bool:
    return found is not None and found.total_ns > 0 and found.reclaimed_ratio >= config.least_blame_ratio


def _take_back(seen: str, situation: Situation, config: LatencyConfig, lent: float, *, gross: bool) -> _Ruling:
    target_ms, rule = config.target_wait_ms, "wait_far_above_target" if gross else "wait_above_target"
    minimum = minimum_cores(situation.node_cpus, config)
    if lent <= minimum:
        text = f"{seen}: batch work has no more than its minimum of {minimum:g} cores already."
        return _Ruling(minimum, rule, text, target_ms, uneasy=True)
    if gross:
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


def most_cores(situation: Situation, config: LatencyConfig) -> float:
    """What may be lent at most: the node, or less of it where there are pods that lend nothing; the minimum in any case."""
    node = float(situation.node_cpus)
    if situation.most_cores is None:
        return node
    return max(min(situation.most_cores, node), minimum_cores(situation.node_cpus, config))


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

"""cpu-pressure-suppression-plugin: reclaimed pods get far less CPU than they requested. Pure.

Requests over supply, for the pods of each NUMA node and for those that are bound to none, may be what a pod says it bears
(suppression_tolerance_rate), at most 5, and for 300 s more than that. Each victim's request is taken off before the next is
judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil

import msgspec

from agent.config.eviction_cpu import SuppressionConfig
from agent.eviction.judgement import Candidate, Finding, judged, missing, not_met
from agent.eviction.situation import NS_PER_S, Situation, reclaimed, reclaimed_cores
from api.advice import UNBOUND
from api.evictions import Met
from api.pods import Pod

NAME = "cpu-pressure-suppression-plugin"
SCOPE = "reclaimed_cpu_suppression"
POOL = "reclaim"


class SuppressionMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Since when each pod has borne more than it should, CLOCK_MONOTONIC."""

    since_ns: Mapping[str, int] = {}


def judge(
    situation: Situation, memory: SuppressionMemory, config: SuppressionConfig
) -> tuple[tuple[Finding, ...], SuppressionMemory]:
    """One finding for each NUMA node with bound pods, and one for the pods that are bound to none.

    Time in which the pool is not known counts for nobody: all begin anew after it.
    """
    pods = reclaimed(situation.staying)
    if not pods:
        return (not_met(NAME, "no_reclaimed_pods", "There are no reclaimed pods.", SCOPE),), SuppressionMemory()
    if POOL not in situation.pools:
        return (missing(NAME, "the reclaim pool", SCOPE),), SuppressionMemory()
    groups: dict[int, list[Pod]] = {}
    for pod in pods:
        groups.setdefault(pod.bound_numa[0] if len(pod.bound_numa) == 1 else UNBOUND, []).append(pod)
    since: dict[str, int] = {}
    findings = []
    for numa, group in sorted(groups.items()):
        supply = _supply(situation, numa, frozenset(groups) - {UNBOUND})
        if supply <= 0:
            findings.append(
                not_met(
                    NAME, "no_supply", "The reclaim pool is empty: there is nothing to compare.", SCOPE, _subject(numa)
                )
            )
            continue
        finding, kept = _group(situation, memory, group, (_subject(numa), supply), config)
        findings.append(finding)
        since.update(kept)
    return tuple(findings), SuppressionMemory(since_ns=since)


def _supply(situation: Situation, numa: int, bound: frozenset[int]) -> float:
    """CPUs of the reclaim pool on that NUMA node, or on those without bound pods, and not more than the quotas there."""
    numa_of = {cpu.id: cpu.numa for cpu in situation.snapshot.topology.cpus}
    every = Counter(numa_of.get(cpu, UNBOUND) for cpu in situation.pools[POOL])
    here = {node: n for node, n in every.items() if (node not in bound if numa == UNBOUND else node == numa)}
    if numa == UNBOUND and not here:
        here = every
    sizes = situation.advice.sizes if situation.advice is not None else ()
    quotas = {each.numa: each.quota_cores for each in sizes if each.pool == POOL and each.quota_cores is not None}
    # The quota of UNBOUND is that of all nodes that have none of their own: these have a part of it, as of their CPUs.
    others = quotas.pop(UNBOUND, None)
    free = float(sum(n for node, n in here.items() if node not in quotas))
    if others is not None and free:
        free = min(free, others * free / sum(n for node, n in every.items() if node not in quotas))
    return free + sum(min(n, quotas[node]) for node, n in here.items() if node in quotas)


def _subject(numa: int) -> str:
    return "" if numa == UNBOUND else f"numa{numa}"


def _group(
    situation: Situation,
    memory: SuppressionMemory,
    pods: Sequence[Pod],
    supplied: tuple[str, float],
    config: SuppressionConfig,
) -> tuple[Finding, dict[str, int]]:
    subject, supply = supplied
    total = sum(reclaimed_cores(pod) for pod in pods)
    worst = ceil(round(total, 6)) / supply
    since: dict[str, int] = {}
    victims, met = [], False
    for pod in sorted(pods, key=lambda each: (-reclaimed_cores(each), each.priority, each.key)):
        rate, bears = ceil(round(total, 6)) / supply, _bears(pod, config)
        if rate <= bears:
            continue
        began = since[pod.key] = memory.since_ns.get(pod.key, situation.now_ns)
        if situation.now_ns - began <= config.min_tolerance_s * NS_PER_S:
            continue
        met = True
        # Who cannot be made to leave goes on requesting what it does, and bearing too much.
        if pod.key not in situation.stuck:
            text = (
                f"Reclaimed pods requested {rate:.2f} times the {supply:g} cores that they have; this one bears {bears:.2f} "
                f"(current pool suppression rate {rate:.2f} is over than the pod suppression tolerance rate {bears:.2f})."
            )
            victims.append(Candidate(pod=pod, text=text, grace_s=config.grace_s))
            total -= reclaimed_cores(pod)
    text = f"Reclaimed pods requested {worst:.2f} times the {supply:g} cores that they have; {len(since)} bear less."
    threshold = judged(
        NAME, Met.SOFT if met else Met.NOT_MET, SCOPE, subject=subject, value=config.max_tolerance_rate, observed=worst,
        text=text, inputs={"supply_cores": supply, "pods": len(pods), "suppressed": len(since)},
    )  # fmt: skip
    return Finding(threshold=threshold, candidates=tuple(victims), direct=True, kind="cpu"), since


def _bears(pod: Pod, config: SuppressionConfig) -> float:
    own = pod.enhancements.suppression_tolerance_rate
    return config.max_tolerance_rate if own is None else min(own, config.max_tolerance_rate)

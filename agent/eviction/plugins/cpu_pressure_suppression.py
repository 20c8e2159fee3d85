"""Plugin cpu-pressure-suppression-plugin: reclaimed pods receive far less CPU than they requested.
It is pure. The ratio of requests to supply may be the pod's `suppression_tolerance_rate`, at most 5, and is
exceeded for 300 s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil

import msgspec

from agent.config.eviction import CpuSuppressionEvictionConfig
from agent.eviction.eviction_inputs import EvictionInputs, reclaimed_pods, requested_reclaimed_cores
from agent.eviction.finding import (
    EvictionCandidate,
    EvictionFinding,
    make_threshold,
    missing_input_finding,
    not_met_finding,
)
from api.advice import NOT_NUMA_BOUND
from api.eviction import ThresholdMet
from api.pod import Pod
from api.units import NS_PER_S

NAME = "cpu-pressure-suppression-plugin"
SCOPE = "reclaimed_cpu_suppression"
RECLAIM_POOL = "reclaim"


class CpuSuppressionState(msgspec.Struct, frozen=True, kw_only=True):
    """Since when each pod exceeds its tolerance (CLOCK_MONOTONIC)."""

    since_ns: Mapping[str, int] = {}


def evaluate_cpu_suppression(
    inputs: EvictionInputs, state: CpuSuppressionState, config: CpuSuppressionEvictionConfig
) -> tuple[tuple[EvictionFinding, ...], CpuSuppressionState]:
    """Return one finding per NUMA node with bound pods, and one for the pods that are bound to none.

    Without the pool's size all timers start again.
    """
    pods = reclaimed_pods(inputs.running_pods)
    if not pods:
        return (
            not_met_finding(NAME, "no_reclaimed_pods", "There are no reclaimed pods.", SCOPE),
        ), CpuSuppressionState()
    if RECLAIM_POOL not in inputs.pools:
        return (missing_input_finding(NAME, "the reclaim pool", SCOPE),), CpuSuppressionState()
    groups: dict[int, list[Pod]] = {}
    for pod in pods:
        groups.setdefault(pod.bound_numa[0] if len(pod.bound_numa) == 1 else NOT_NUMA_BOUND, []).append(pod)
    since: dict[str, int] = {}
    findings = []
    for numa, group in sorted(groups.items()):
        supply = _pool_supply(inputs, numa, frozenset(groups) - {NOT_NUMA_BOUND})
        if supply <= 0:
            findings.append(
                not_met_finding(
                    NAME, "no_supply", "The reclaim pool is empty: there is nothing to compare.", SCOPE, _subject(numa)
                )
            )
            continue
        finding, retained = _group_finding(inputs, state, group, (_subject(numa), supply), config)
        findings.append(finding)
        since.update(retained)
    return tuple(findings), CpuSuppressionState(since_ns=since)


def _pool_supply(inputs: EvictionInputs, numa: int, bound: frozenset[int]) -> float:
    """Return the CPUs of the reclaim pool on that NUMA node, or on those without bound pods, limited by the quotas there."""
    numa_of = {cpu.id: cpu.numa for cpu in inputs.snapshot.topology.cpus}
    every = Counter(numa_of.get(cpu, NOT_NUMA_BOUND) for cpu in inputs.pools[RECLAIM_POOL])
    here = {node: n for node, n in every.items() if (node not in bound if numa == NOT_NUMA_BOUND else node == numa)}
    if numa == NOT_NUMA_BOUND and not here:
        here = every
    sizes = inputs.advice.sizes if inputs.advice is not None else ()
    quotas = {
        each.numa: each.quota_cores for each in sizes if each.pool == RECLAIM_POOL and each.quota_cores is not None
    }
    # The quota of UNBOUND covers all NUMA nodes without a quota of their own, in proportion to their CPUs.
    others = quotas.pop(NOT_NUMA_BOUND, None)
    free = float(sum(n for node, n in here.items() if node not in quotas))
    if others is not None and free:
        free = min(free, others * free / sum(n for node, n in every.items() if node not in quotas))
    return free + sum(min(n, quotas[node]) for node, n in here.items() if node in quotas)


def _subject(numa: int) -> str:
    return "" if numa == NOT_NUMA_BOUND else f"numa{numa}"


def _group_finding(
    inputs: EvictionInputs,
    state: CpuSuppressionState,
    pods: Sequence[Pod],
    supplied: tuple[str, float],
    config: CpuSuppressionEvictionConfig,
) -> tuple[EvictionFinding, dict[str, int]]:
    subject, supply = supplied
    total = sum(requested_reclaimed_cores(pod) for pod in pods)
    worst = ceil(round(total, 6)) / supply
    since: dict[str, int] = {}
    victims, met = [], False
    for pod in sorted(pods, key=lambda each: (-requested_reclaimed_cores(each), each.priority, each.key)):
        rate, bears = ceil(round(total, 6)) / supply, _tolerance_rate(pod, config)
        if rate <= bears:
            continue
        began = since[pod.key] = state.since_ns.get(pod.key, inputs.now_ns)
        if inputs.now_ns - began <= config.min_tolerance_s * NS_PER_S:
            continue
        met = True
        # A stuck pod still requests CPU and is still suppressed, so its timer goes on.
        if pod.key not in inputs.stuck:
            text = (
                f"Reclaimed pods requested {rate:.2f} times the {supply:g} cores that they have; this pod tolerates "
                f"{bears:.2f} (current pool suppression rate {rate:.2f} is over than the pod suppression "
                f"tolerance rate {bears:.2f})."
            )
            victims.append(EvictionCandidate(pod=pod, text=text, grace_s=config.grace_s))
            total -= requested_reclaimed_cores(pod)
    text = (
        f"Reclaimed pods requested {worst:.2f} times the {supply:g} cores that they have; "
        f"{len(since)} of {len(pods)} pods tolerate less."
    )
    threshold = make_threshold(
        NAME, ThresholdMet.SOFT if met else ThresholdMet.NOT_MET, SCOPE, subject=subject,
        value=config.max_tolerance_rate, observed=worst,
        text=text, inputs={"supply_cores": supply, "pods": len(pods), "suppressed": len(since)},
    )  # fmt: skip
    return EvictionFinding(threshold=threshold, candidates=tuple(victims), direct=True, kind="cpu"), since


def _tolerance_rate(pod: Pod, config: CpuSuppressionEvictionConfig) -> float:
    own = pod.enhancements.suppression_tolerance_rate
    return config.max_tolerance_rate if own is None else min(own, config.max_tolerance_rate)

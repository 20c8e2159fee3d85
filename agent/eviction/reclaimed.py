"""reclaimed-resource-pressure-eviction-plugin, and the same by NUMA node: reclaimed pods requested more than is promised.

What is promised shrinks with the load of online pods; requests stay. Katalyst evicts the largest request when they are five
times what is promised. From 1.5 and 1.2 times on it means to tell those pods that ask to be told
(pod_soft_evict_notify), but never reads those settings: here they count. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent.config.eviction_memory import ReclaimedConfig
from agent.eviction.choosing import asks_to_be_told
from agent.eviction.judgement import Candidate, Finding, judged, missing, not_met
from agent.eviction.situation import Situation, reclaimed, reclaimed_cores, reclaimed_memory
from api.evictions import Met, size
from api.pods import Pod

NAME = "reclaimed-resource-pressure-eviction-plugin"
NUMA_NAME = "reclaimed-numa-resource-pressure-eviction-plugin"
CPU = "resource.katalyst.kubewharf.io/reclaimed_millicpu"
MEMORY = "resource.katalyst.kubewharf.io/reclaimed_memory"

Request = Callable[[Pod], float]


def judge(situation: Situation, config: ReclaimedConfig) -> tuple[Finding, ...]:
    """One finding for CPU and one for memory."""
    pods, headroom = reclaimed(situation.staying), situation.headroom
    if not pods:
        return (not_met(NAME, "no_reclaimed_pods", "There are no reclaimed pods."),)
    if headroom is None:
        return (missing(NAME, "what is promised to reclaimed pods"),)
    return (
        _resource(NAME, CPU, CPU, pods, headroom.cores, config),
        _resource(NAME, MEMORY, MEMORY, pods, headroom.memory_bytes, config),
    )


def judge_numa(situation: Situation, config: ReclaimedConfig) -> tuple[Finding, ...]:
    """The same for the reclaimed pods that are bound to a NUMA node, and what is promised there."""
    pods, headroom = [pod for pod in reclaimed(situation.staying) if pod.bound_numa], situation.headroom
    if not pods:
        return (not_met(NUMA_NAME, "no_bound_pods", "No reclaimed pod is bound to a NUMA node."),)
    if headroom is None:
        return (missing(NUMA_NAME, "what is promised to reclaimed pods by NUMA node"),)
    findings = []
    for node in sorted({node for pod in pods for node in pod.bound_numa}):
        here = [pod for pod in pods if node in pod.bound_numa]
        cores, memory = headroom.cores_by_numa.get(node), headroom.memory_by_numa.get(node)
        findings.append(_resource(NUMA_NAME, f"zone{node}|{CPU}", CPU, here, cores, config))
        findings.append(_resource(NUMA_NAME, f"zone{node}|{MEMORY}", MEMORY, here, memory, config))
    return tuple(findings)


def _resource(
    plugin: str, scope: str, resource: str, pods: Sequence[Pod], promised: float | None, config: ReclaimedConfig
) -> Finding:
    if promised is None:
        return missing(plugin, "what is promised to reclaimed pods", scope)
    cpu = resource == CPU
    request = _milli if cpu else reclaimed_memory
    total = promised * 1000 if cpu else promised
    hard, soft = (
        (config.cpu_threshold, config.cpu_soft_threshold)
        if cpu
        else (config.memory_threshold, config.memory_soft_threshold)
    )
    shares = {pod.key: _share(pod, request, scope) for pod in pods}
    used = sum(shares.values())
    shown = (f"{used:.0f}m", f"{total:.0f}m") if cpu else (size(used), size(total))
    if total <= 0:
        text = f"Reclaimed pods requested {shown[0]}; nothing is promised, and that alone evicts nobody."
        return not_met(plugin, "nothing_promised", text, scope)
    met = Met.HARD if used > hard * total else Met.SOFT if used > soft * total else Met.NOT_MET
    factor = soft if met is Met.SOFT else hard
    ranked = sorted((pod for pod in pods if shares[pod.key] > 0), key=lambda pod: (-shares[pod.key], pod.key))
    text = f"Reclaimed pods requested {shown[0]}; {shown[1]} are promised, and {factor:g} times that is the threshold."
    if met is not Met.HARD:
        ranked = [pod for pod in ranked if met is Met.SOFT and asks_to_be_told(pod)]
    if met is Met.SOFT:
        text += f" {len(ranked)} of {len(pods)} pods ask to be told."
    return Finding(
        threshold=judged(
            plugin,
            met,
            scope,
            value=factor * total,
            observed=used,
            tolerance_s=config.soft_tolerance_s if met is Met.SOFT else config.tolerance_s,
            text=text,
            inputs={"requested": used, "promised": total, "factor": factor, "pods": len(pods)},
        ),
        candidates=tuple(Candidate(pod=pod, grace_s=config.grace_s) for pod in ranked),
        kind="cpu" if cpu else "memory",
    )


def _milli(pod: Pod) -> float:
    return reclaimed_cores(pod) * 1000


def _share(pod: Pod, request: Request, scope: str) -> float:
    """What a pod asks of one NUMA node: one that is bound to several asks the same of each."""
    return request(pod) / len(pod.bound_numa) if scope.startswith("zone") else request(pod)

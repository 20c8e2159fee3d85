"""Plugin reclaimed-resource-pressure-eviction-plugin: requests exceed a multiple of the headroom.
The soft thresholds apply to pods that request notices; Katalyst defines those settings and never reads them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent.config.eviction import ReclaimedPressureConfig
from agent.eviction.eviction_inputs import (
    EvictionInputs,
    reclaimed_pods,
    requested_reclaimed_cores,
    requested_reclaimed_memory,
)
from agent.eviction.finding import (
    EvictionFinding,
    make_threshold,
    missing_input_finding,
    not_met_finding,
    rank_candidates,
)
from agent.eviction.victims import wants_soft_eviction_notice
from api.eviction import ThresholdMet
from api.pod import Pod
from api.quantity import format_bytes

NAME = "reclaimed-resource-pressure-eviction-plugin"
CPU = "resource.katalyst.kubewharf.io/reclaimed_millicpu"
MEMORY = "resource.katalyst.kubewharf.io/reclaimed_memory"

RequestAmount = Callable[[Pod], float]


def evaluate_reclaimed(inputs: EvictionInputs, config: ReclaimedPressureConfig) -> tuple[EvictionFinding, ...]:
    """Return one finding for CPU and one for memory."""
    pods, headroom = reclaimed_pods(inputs.running_pods), inputs.headroom
    if not pods:
        return (not_met_finding(NAME, "no_reclaimed_pods", "There are no reclaimed pods."),)
    if headroom is None:
        return (missing_input_finding(NAME, "The headroom of reclaimed pods"),)
    return (
        evaluate_resource(NAME, CPU, CPU, pods, headroom.cores, config),
        evaluate_resource(NAME, MEMORY, MEMORY, pods, headroom.memory_bytes, config),
    )


def evaluate_resource(
    plugin: str, scope: str, resource: str, pods: Sequence[Pod], headroom: float | None, config: ReclaimedPressureConfig
) -> EvictionFinding:
    """Return the finding of one plugin and resource, on the node or on the NUMA node that `scope` names."""
    if headroom is None:
        return missing_input_finding(plugin, "The headroom of reclaimed pods", scope)
    cpu = resource == CPU
    request = _requested_millicores if cpu else requested_reclaimed_memory
    total = headroom * 1000 if cpu else headroom
    hard, soft = (
        (config.cpu_threshold, config.cpu_soft_threshold)
        if cpu
        else (config.memory_threshold, config.memory_soft_threshold)
    )
    shares = {pod.key: _numa_share(pod, request, scope) for pod in pods}
    used = sum(shares.values())
    shown = (f"{used:.0f}m", f"{total:.0f}m") if cpu else (format_bytes(used), format_bytes(total))
    if total <= 0:
        text = f"Reclaimed pods requested {shown[0]}; the headroom is 0. A headroom of 0 evicts no pod."
        return not_met_finding(plugin, "nothing_promised", text, scope)
    met = (
        ThresholdMet.HARD if used > hard * total else ThresholdMet.SOFT if used > soft * total else ThresholdMet.NOT_MET
    )
    factor = soft if met is ThresholdMet.SOFT else hard
    evictable = [pod for pod in pods if shares[pod.key] > 0]
    text = (
        f"Reclaimed pods requested {shown[0]}; the headroom is {shown[1]}, and {factor:g} times that is the threshold."
    )
    if met is not ThresholdMet.HARD:
        evictable = [pod for pod in evictable if met is ThresholdMet.SOFT and wants_soft_eviction_notice(pod)]
    if met is ThresholdMet.SOFT:
        text += f" {len(evictable)} of {len(pods)} pods opted in to soft eviction."
    return EvictionFinding(
        threshold=make_threshold(
            plugin,
            met,
            scope,
            value=factor * total,
            observed=used,
            tolerance_s=config.soft_tolerance_s if met is ThresholdMet.SOFT else config.tolerance_s,
            text=text,
            inputs={"requested": used, "promised": total, "factor": factor, "pods": len(pods)},
        ),
        candidates=rank_candidates(evictable, lambda pod: -shares[pod.key], config.grace_s),
        kind="cpu" if cpu else "memory",
    )


def _requested_millicores(pod: Pod) -> float:
    return requested_reclaimed_cores(pod) * 1000


def _numa_share(pod: Pod, request: RequestAmount, scope: str) -> float:
    """Return a pod's request on one NUMA node; a pod on several nodes requests the same of each."""
    return request(pod) / len(pod.bound_numa) if scope.startswith("zone") else request(pod)

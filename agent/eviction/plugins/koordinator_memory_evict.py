"""Plugin koordinator-memory-evict: Koordinator's rule for the memory of the node.
It is pure. It releases a computed amount at once, from the lowest priority up, and then cools down.
"""

from __future__ import annotations

from agent.config.eviction import KoordinatorMemoryConfig
from agent.eviction.eviction_inputs import EvictionInputs, unreclaimable_bytes
from agent.eviction.finding import EvictionFinding, candidates_until_released, make_threshold, missing_input_finding
from agent.eviction.plugins.koordinator_cpu_evict import DEFAULT_RELEASE_MARGIN
from api.eviction import ThresholdMet
from api.qos import QoSLevel
from api.quantity import format_bytes

NAME = "koordinator-memory-evict"
SCOPE = "node-memory"


def evaluate_koordinator_memory(inputs: EvictionInputs, config: KoordinatorMemoryConfig) -> tuple[EvictionFinding, ...]:
    """Evaluate memory in use against the node's memory; memory of terminating pods counts as free."""
    meminfo = inputs.snapshot.node.meminfo
    total, available = meminfo.get("MemTotal"), meminfo.get("MemAvailable")
    going = [unreclaimable_bytes(inputs, pod) for pod in inputs.terminating_pods]
    freed = [size for size in going if size is not None]
    if not total or available is None or len(freed) < len(going):
        return (missing_input_finding(NAME, "memory in use, or the part of it that terminating pods hold,", SCOPE),)
    in_use = total - available - sum(freed)
    observed = in_use / total
    lower = config.threshold - DEFAULT_RELEASE_MARGIN if config.lower is None else config.lower
    pods = [pod for pod in inputs.running_pods if pod.qos is QoSLevel.RECLAIMED or not config.reclaimed_only]
    sizes = {pod.key: unreclaimable_bytes(inputs, pod) for pod in pods}
    ranked = sorted(
        (pod for pod in pods if pod.key not in inputs.stuck),
        key=lambda pod: (pod.qos is not QoSLevel.RECLAIMED, pod.priority, -(sizes[pod.key] or 0.0), pod.key),
    )
    met = observed >= config.threshold
    used = f"{format_bytes(in_use)} of {format_bytes(total)} memory is in use, {observed:.1%}"
    text = f"{used}; the threshold is {config.threshold:.0%}."
    release = in_use - lower * total if met else 0.0
    victims = candidates_until_released(release, ranked, lambda pod: sizes[pod.key], config.grace_s)
    threshold = make_threshold(
        NAME, ThresholdMet.HARD if met else ThresholdMet.NOT_MET, SCOPE, value=config.threshold, observed=observed, text=text,
        inputs={"victims": len(victims)},
    )  # fmt: skip
    return (
        EvictionFinding(
            threshold=threshold,
            candidates=victims,
            direct=True,
            forced=True,
            kind="memory",
            cool_down_s=config.cool_down_s,
        ),
    )

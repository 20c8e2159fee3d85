"""Plugin rss-overuse-eviction-plugin: evicts pods whose RSS exceeds a multiple of their memory request.
It is pure.
"""

from __future__ import annotations

from agent.config.eviction import RssOveruseConfig
from agent.eviction.eviction_inputs import EvictionInputs, rss_bytes
from agent.eviction.finding import EvictionCandidate, EvictionFinding, make_threshold, not_met_finding
from api.eviction import ThresholdMet
from api.pod import Pod
from api.qos import QoSLevel
from api.quantity import format_bytes

NAME = "rss-overuse-eviction-plugin"
SCOPE = "rss"
QOS_LEVELS = (QoSLevel.SHARED, QoSLevel.RECLAIMED)


def evaluate_rss_overuse(inputs: EvictionInputs, config: RssOveruseConfig) -> tuple[EvictionFinding, ...]:
    """Return one soft finding with every pod above its bound. A pod with a container without a memory request has no bound."""
    over: list[tuple[float, EvictionCandidate]] = []
    looked = 0
    for pod in inputs.running_pods:
        if pod.qos not in QOS_LEVELS or any(pod.labels.get(key) != value for key, value in config.labels.items()):
            continue
        request, rss = _memory_request(pod), rss_bytes(inputs, pod)
        if request is None or rss is None:
            continue
        looked += 1
        own = pod.enhancements.rss_overuse_threshold
        ratio = config.ratio if own is None else own
        if rss > ratio * request:
            text = (
                f"Resident memory is {format_bytes(rss)}, above {ratio:g} times the {format_bytes(request)} that were "
                f"requested (hit rss overuse policy, threshold is {ratio:.2f})."
            )
            over.append((rss / request, EvictionCandidate(pod=pod, text=text, grace_s=config.grace_s)))
    if not looked:
        return (not_met_finding(NAME, "no_pods", "No pod has both a request and a known use of memory.", SCOPE),)
    worst = max((ratio for ratio, _ in over), default=0.0)
    text = (
        f"{len(over)} of {looked} pods have more resident memory than allowed; the highest use is {worst:.2f} times "
        "the request."
    )
    threshold = make_threshold(
        NAME, ThresholdMet.SOFT if over else ThresholdMet.NOT_MET, SCOPE, value=config.ratio, observed=worst, text=text,
        inputs={"pods": looked, "over": len(over)},
    )  # fmt: skip
    return (
        EvictionFinding(threshold=threshold, candidates=tuple(each for _, each in over), direct=True, kind="memory"),
    )


def _memory_request(pod: Pod) -> int | None:
    total = 0
    for container in pod.containers:
        request = container.memory_request_bytes or container.reclaimed_memory_bytes
        if not request and container.memory_request_bytes is None:
            return None
        total += request or 0
    return total or None

"""rss-overuse-eviction-plugin: pods whose resident memory is more than they requested. Pure."""

from __future__ import annotations

from agent.config.eviction_memory import RssConfig
from agent.eviction.judgement import Candidate, Finding, judged, not_met
from agent.eviction.situation import Situation, rss_bytes
from api.evictions import Met, size
from api.pods import Pod
from api.qos import QoSLevel

NAME = "rss-overuse-eviction-plugin"
SCOPE = "rss"
LEVELS = (QoSLevel.SHARED, QoSLevel.RECLAIMED)


def judge(situation: Situation, config: RssConfig) -> tuple[Finding, ...]:
    """Every over-user, put forward softly; one that requests no memory, in one of its containers, is none."""
    over: list[tuple[float, Candidate]] = []
    looked = 0
    for pod in situation.staying:
        if pod.qos not in LEVELS or any(pod.labels.get(key) != value for key, value in config.labels.items()):
            continue
        request, rss = _request(pod), rss_bytes(situation, pod)
        if request is None or rss is None:
            continue
        looked += 1
        own = pod.enhancements.rss_overuse_threshold
        ratio = config.ratio if own is None else own
        if rss > ratio * request:
            text = (
                f"Resident memory is {size(rss)}, above {ratio:g} times the {size(request)} that were requested "
                f"(hit rss overuse policy, threshold is {ratio:.2f})."
            )
            over.append((rss / request, Candidate(pod=pod, text=text, grace_s=config.grace_s)))
    if not looked:
        return (not_met(NAME, "no_pods", "No pod has both a request and a known use of memory.", SCOPE),)
    worst = max((ratio for ratio, _ in over), default=0.0)
    text = f"{len(over)} of {looked} pods use more memory than they may, the worst {worst:.2f} times its request."
    threshold = judged(
        NAME, Met.SOFT if over else Met.NOT_MET, SCOPE, value=config.ratio, observed=worst, text=text,
        inputs={"pods": looked, "over": len(over)},
    )  # fmt: skip
    return (Finding(threshold=threshold, candidates=tuple(each for _, each in over), direct=True, kind="memory"),)


def _request(pod: Pod) -> int | None:
    total = 0
    for container in pod.containers:
        asked = container.memory_request_bytes or container.reclaimed_memory_bytes
        if not asked and container.memory_request_bytes is None:
            return None
        total += asked or 0
    return total or None

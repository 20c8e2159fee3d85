"""numa-memory-balancer: memory of a NUMA node is slow, and moving pages away cannot help. The largest pod there leaves. Pure.

The memory advisor judges that (its latency and bandwidth bounds, and whom it could move); here it only has its consequence.
"""

from __future__ import annotations

from agent.eviction.judgement import Candidate, Finding, judged, not_met
from agent.eviction.situation import Situation, numa_anon_bytes
from api.evictions import Met

NAME = "numa-memory-balancer"
SCOPE = "NumaMemoryBalance"


def judge(situation: Situation) -> tuple[Finding, ...]:
    """One pod for each crowded NUMA node, softly."""
    if not situation.crowded:
        return (not_met(NAME, "balanced", "No NUMA node's memory is slow beyond what moving pages can mend.", SCOPE),)
    findings = []
    for node, why in sorted(situation.crowded.items()):
        sizes = [
            (size, pod) for pod in situation.staying if (size := numa_anon_bytes(situation, pod, node)) is not None
        ]
        size, largest = max(sizes, key=lambda each: (each[0], each[1].key), default=(0.0, None))
        text = f"NUMA node {node}: {why}"
        threshold = judged(
            NAME,
            Met.SOFT,
            SCOPE,
            subject=f"numa{node}",
            value=0.0,
            observed=size,
            text=text,
            inputs={"numa": node, "largest_bytes": size},
        )
        chosen = () if largest is None or not size else (Candidate(pod=largest, text=text),)
        findings.append(Finding(threshold=threshold, candidates=chosen, direct=True, kind="memory", waits=True))
    return tuple(findings)

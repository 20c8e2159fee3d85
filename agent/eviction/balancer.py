"""numa-memory-balancer: memory of a NUMA node is slow, and moving pages away cannot help. Pure.

The memory advisor judges that (its latency and bandwidth bounds, and whom it could move) and says which reclaimed pod has most
there; here it only has its consequence.
"""

from __future__ import annotations

from agent.eviction.judgement import Candidate, Finding, judged, missing, not_met
from agent.eviction.situation import Situation, reclaimed
from api.evictions import Met

NAME = "numa-memory-balancer"
SCOPE = "NumaMemoryBalance"


def judge(situation: Situation) -> tuple[Finding, ...]:
    """One pod for each crowded NUMA node, softly: the one that was named, and no other."""
    if situation.crowded is None:
        return (missing(NAME, "how slow the memory of each NUMA node is", SCOPE),)
    if not situation.crowded:
        return (
            not_met(
                NAME,
                "balanced",
                "The memory advisor names nobody: no NUMA node is slow beyond what moving pages can mend.",
                SCOPE,
            ),
        )
    findings = []
    for numa, named in sorted(situation.crowded.items()):
        text = f"NUMA node {numa}: {named.verdict.text}"
        threshold = judged(
            NAME,
            Met.SOFT,
            SCOPE,
            subject=f"numa{numa}",
            value=0.0,
            observed=float(named.verdict.inputs.get("bytes") or 0),
            text=text,
            inputs={"numa": numa, "pod": named.pod},
        )
        chosen = tuple(Candidate(pod=pod, text=text) for pod in reclaimed(situation.staying) if pod.key == named.pod)
        findings.append(Finding(threshold=threshold, candidates=chosen, direct=True, kind="memory", waits=True))
    return tuple(findings)

"""node_power_pressure: the node has to draw less power, and the power advisor says how many reclaimed pods that takes. Pure.

They are chosen once for each answer of the advisor and leave as fast as the burst allows; the next answer counts anew who is
still there. Katalyst chooses at random; here those of least priority go first, of these the largest request.
"""

from __future__ import annotations

import msgspec

from agent.eviction.judgement import Candidate, Finding, judged, not_met
from agent.eviction.situation import Situation, reclaimed, reclaimed_cores
from api.evictions import Met
from api.node_advice import PowerKind

NAME = "node_power_pressure"
SCOPE = "NodePower"
REASON = "host under power pressure"


class PowerEvictMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Who was chosen for the answer that stands."""

    answer_ns: int | None = None
    chosen: tuple[str, ...] = ()
    """By uid."""


def judge(situation: Situation, memory: PowerEvictMemory) -> tuple[tuple[Finding, ...], PowerEvictMemory]:
    """One finding with all that have to leave."""
    power = situation.power
    if power is None:
        text = "Nobody answers power alerts here: power.enable is off."
        return (not_met(NAME, "power_off", text, SCOPE),), PowerEvictMemory()
    if power.kind is not PowerKind.EVICT:
        return (not_met(NAME, power.verdict.rule, power.verdict.text, SCOPE),), PowerEvictMemory()
    here = reclaimed(situation.staying)
    pods = [pod for pod in here if pod.key not in situation.stuck]
    if power.at_ns != memory.answer_ns:
        first = sorted(pods, key=lambda pod: (pod.priority, -reclaimed_cores(pod), pod.key))[: power.count]
        memory = PowerEvictMemory(answer_ns=power.at_ns, chosen=tuple(pod.uid for pod in first))
    left = [pod for pod in pods if pod.uid in memory.chosen]
    # Also while a budget keeps who was chosen: the trouble is not over by that.
    met = any(pod.uid in memory.chosen for pod in here)
    text = f"{REASON}: {power.verdict.text}"
    threshold = judged(
        NAME, Met.HARD if met else Met.NOT_MET, SCOPE, value=power.verdict.threshold or 0.0,
        observed=float(power.current_watts), text=text, inputs=power.verdict.inputs,
    )  # fmt: skip
    candidates = tuple(Candidate(pod=pod, text=text) for pod in sorted(left, key=lambda p: memory.chosen.index(p.uid)))
    return (Finding(threshold=threshold, candidates=candidates, direct=True, forced=True, kind="cpu"),), memory

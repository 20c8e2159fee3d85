"""Plugin node_power_pressure: evicts as many reclaimed pods as the power advisor requests to reduce power draw.
It is pure. The pods are chosen once per response of the advisor, lowest priority and largest request first;
Katalyst chooses at random.
"""

from __future__ import annotations

import msgspec

from agent.eviction.eviction_inputs import EvictionInputs, reclaimed_pods, requested_reclaimed_cores
from agent.eviction.finding import EvictionCandidate, EvictionFinding, make_threshold, not_met_finding
from api.advice import PowerActionKind
from api.eviction import ThresholdMet

NAME = "node_power_pressure"
SCOPE = "NodePower"
REASON = "host under power pressure"


class NodePowerEvictionState(msgspec.Struct, frozen=True, kw_only=True):
    """The victims of the power response that is in force."""

    answer_ns: int | None = None
    chosen: tuple[str, ...] = ()
    """Uids of the victims."""


def evaluate_node_power(
    inputs: EvictionInputs, state: NodePowerEvictionState
) -> tuple[tuple[EvictionFinding, ...], NodePowerEvictionState]:
    """Return one finding with all victims of the power response."""
    power = inputs.power
    if power is None:
        text = "The agent does not respond to power alerts: set power.enable."
        return (not_met_finding(NAME, "power_off", text, SCOPE),), NodePowerEvictionState()
    if power.kind is not PowerActionKind.EVICT:
        return (not_met_finding(NAME, power.reason.rule, power.reason.text, SCOPE),), NodePowerEvictionState()
    here = reclaimed_pods(inputs.running_pods)
    pods = [pod for pod in here if pod.key not in inputs.stuck]
    if power.at_ns != state.answer_ns:
        first = sorted(pods, key=lambda pod: (pod.priority, -requested_reclaimed_cores(pod), pod.key))[: power.count]
        state = NodePowerEvictionState(answer_ns=power.at_ns, chosen=tuple(pod.uid for pod in first))
    left = [pod for pod in pods if pod.uid in state.chosen]
    # Also while a budget blocks a victim, because the power alert is still in force.
    met = any(pod.uid in state.chosen for pod in here)
    text = f"{REASON}: {power.reason.text}"
    threshold = make_threshold(
        NAME, ThresholdMet.HARD if met else ThresholdMet.NOT_MET, SCOPE, value=power.reason.threshold or 0.0,
        observed=float(power.current_watts), text=text, inputs=power.reason.inputs,
    )  # fmt: skip
    candidates = tuple(
        EvictionCandidate(pod=pod, text=text) for pod in sorted(left, key=lambda p: state.chosen.index(p.uid))
    )
    return (EvictionFinding(threshold=threshold, candidates=candidates, direct=True, forced=True, kind="cpu"),), state

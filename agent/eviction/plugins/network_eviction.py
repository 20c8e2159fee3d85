"""Plugin network-eviction-plugin: an interface with pods has had no bandwidth for minutes.
It is pure.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.config.eviction import NicEvictionConfig
from agent.eviction.eviction_inputs import EvictionInputs
from agent.eviction.finding import EvictionCandidate, EvictionFinding, make_threshold, missing_input_finding
from api.eviction import ThresholdMet
from api.qos import NIC_SELECTION_KEY
from api.units import NS_PER_S

NAME = "network-eviction-plugin"
SCOPE = "net_bandwidth"
NIC_ANNOTATION = NIC_SELECTION_KEY


class NetworkEvictionState(msgspec.Struct, frozen=True, kw_only=True):
    """Since when each network card has had no bandwidth (CLOCK_MONOTONIC)."""

    down_since_ns: Mapping[str, int] = {}


def evaluate_network(
    inputs: EvictionInputs, state: NetworkEvictionState, config: NicEvictionConfig
) -> tuple[tuple[EvictionFinding, ...], NetworkEvictionState]:
    """Return one finding per network card. The timer of a card that is not listed any more starts again."""
    if not inputs.nics or not inputs.node_files_fresh:
        return (missing_input_finding(NAME, "bandwidth of the network cards", SCOPE),), NetworkEvictionState()
    down = {
        nic: state.down_since_ns.get(nic, inputs.now_ns) for nic, bandwidth in inputs.nics.items() if bandwidth <= 0
    }
    findings = []
    for nic in sorted(inputs.nics):
        for_s = (inputs.now_ns - down[nic]) / NS_PER_S if nic in down else 0.0
        met = nic in down and for_s >= config.tolerance_s
        text = f"{nic} has had no free bandwidth for {for_s:.0f} s; the threshold is {config.tolerance_s:g} s."
        pods = [pod for pod in inputs.running_pods if pod.annotations.get(NIC_ANNOTATION) == nic] if met else []
        threshold = make_threshold(
            NAME, ThresholdMet.SOFT if met else ThresholdMet.NOT_MET, SCOPE, subject=nic,
            value=config.tolerance_s, observed=for_s, text=text,
            inputs={"nic": nic, "bandwidth_mbps": inputs.nics[nic], "pods": len(pods)},
        )  # fmt: skip
        candidates = tuple(EvictionCandidate(pod=pod, text=text, grace_s=config.grace_s) for pod in pods)
        findings.append(EvictionFinding(threshold=threshold, candidates=candidates, direct=True))
    return tuple(findings), NetworkEvictionState(down_since_ns=down)

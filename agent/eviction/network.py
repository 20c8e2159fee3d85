"""network-eviction-plugin: a network card has had no bandwidth to give for minutes, and pods were put on it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.config.eviction_memory import NetworkConfig
from agent.eviction.judgement import Candidate, Finding, judged, missing
from agent.eviction.situation import NS_PER_S, Situation
from api.evictions import Met
from api.qos import NIC_SELECTION_KEY

NAME = "network-eviction-plugin"
SCOPE = "net_bandwidth"
SELECTED = NIC_SELECTION_KEY


class NetworkMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Since when each card has had nothing to give, CLOCK_MONOTONIC."""

    down_ns: Mapping[str, int] = {}


def judge(
    situation: Situation, memory: NetworkMemory, config: NetworkConfig
) -> tuple[tuple[Finding, ...], NetworkMemory]:
    """One finding for each card; one that is not listed any more has no past, and none has where no card is known."""
    if not situation.nics or not situation.node_files_fresh:
        return (missing(NAME, "bandwidth of the network cards", SCOPE),), NetworkMemory()
    down = {
        nic: memory.down_ns.get(nic, situation.now_ns) for nic, bandwidth in situation.nics.items() if bandwidth <= 0
    }
    findings = []
    for nic in sorted(situation.nics):
        for_s = (situation.now_ns - down[nic]) / NS_PER_S if nic in down else 0.0
        met = nic in down and for_s >= config.tolerance_s
        text = f"{nic} has had no bandwidth to give for {for_s:.0f} s; the threshold is {config.tolerance_s:g} s."
        pods = [pod for pod in situation.staying if pod.annotations.get(SELECTED) == nic] if met else []
        threshold = judged(
            NAME, Met.SOFT if met else Met.NOT_MET, SCOPE, subject=nic, value=config.tolerance_s, observed=for_s, text=text,
            inputs={"nic": nic, "bandwidth_mbps": situation.nics[nic], "pods": len(pods)},
        )  # fmt: skip
        candidates = tuple(Candidate(pod=pod, text=text, grace_s=config.grace_s) for pod in pods)
        findings.append(Finding(threshold=threshold, candidates=candidates, direct=True))
    return tuple(findings), NetworkMemory(down_ns=down)

"""numa-cpu-pressure-plugin: the shared pods that are bound to a NUMA node use too much of it, for a minute. Pure.

Sampled every 15 s; overloaded where use was above the threshold of such CPUs, times 1.1, in 70 % of the last four samples. Of
the worst node the pod with the best score leaves. Only when all nodes are overloaded do new pods stay away: else there is
room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from agent.config.eviction_cpu import NumaCpuConfig
from agent.eviction.cpu_use import CpuSample, due, sampled, used
from agent.eviction.judgement import Candidate, Finding, judged, mean, missing, not_met
from agent.eviction.rings import Ring, grown, part_above, recent
from agent.eviction.scores import usage_score
from agent.eviction.situation import Situation
from api.evictions import Met
from api.facts import Machine
from api.pods import Pod
from api.qos import QoSLevel

NAME = "numa-cpu-pressure-plugin"
SCOPE = "cpu.usage.container"
CONDITION = "NumaCPUPressure"
THRESHOLDS: Mapping[str, tuple[float, float]] = {
    "Intel_CascadeLake": (0.55, 0.54),
    "Intel_EmeraldRapids": (0.6, 0.6),
    "Intel_SapphireRapids": (0.59, 0.59),
    "Intel_IceLake": (0.57, 0.54),
    "Intel_SkyLake": (0.53, 0.53),
    "Intel_Broadwell": (0.47, 0.6),
    "AMD_K19Zen4": (0.55, 0.55),
    "AMD_K19Zen3": (0.55, 0.55),
    "AMD_K17Zen2": (0.51, 0.6),
}
"""Katalyst's, by code name: of a physical machine and of a virtual one."""
OTHERS = 0.6


class NumaCpuMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The last samples: parts of the NUMA node."""

    sample: CpuSample | None = None
    numa: Mapping[int, Ring] = {}
    pods: Mapping[str, Ring] = {}


def judge(
    situation: Situation, memory: NumaCpuMemory, config: NumaCpuConfig
) -> tuple[tuple[Finding, ...], NumaCpuMemory]:
    """One finding, of the worst NUMA node."""
    pods = {
        node: [pod for pod in situation.staying if pod.qos is QoSLevel.SHARED and pod.bound_numa == (node,)]
        for node in situation.snapshot.topology.numa_nodes
    }
    if not any(pods.values()):
        return (not_met(NAME, "no_bound_pods", "No shared pod is bound to a NUMA node.", SCOPE),), NumaCpuMemory()
    if due(memory.sample, situation, config.sample_s):
        memory = _sampled(situation, memory, pods, config)
    age_s = situation.stale_s + config.sample_s
    memory = msgspec.structs.replace(
        memory,
        numa=recent(memory.numa, situation.now_ns, age_s),
        pods=recent(memory.pods, situation.now_ns, age_s),
    )
    if not memory.numa:
        return (missing(NAME, "CPU use of the pods that are bound to NUMA nodes", SCOPE),), memory
    return (_finding(situation, memory, pods, config),), memory


def _sampled(
    situation: Situation, memory: NumaCpuMemory, pods: Mapping[int, list[Pod]], config: NumaCpuConfig
) -> NumaCpuMemory:
    after = sampled(situation)
    sizes = {node: sum(cpu.numa == node for cpu in situation.snapshot.topology.cpus) for node in pods}
    numa, rings = dict(memory.numa), {}
    for node, group in pods.items():
        parts = {
            pod.key: use.total / sizes[node] for pod in group if (use := used(pod, memory.sample, after)) is not None
        }
        if parts or (not group and memory.sample is not None):
            numa[node] = grown(memory.numa.get(node), sum(parts.values()), config.ring_size, after.at_ns)
        for pod in group:
            before = memory.pods.get(pod.key)
            if pod.key in parts:
                rings[pod.key] = grown(before, parts[pod.key], config.ring_size, after.at_ns)
            elif before is not None:
                rings[pod.key] = before
    return NumaCpuMemory(sample=after, numa=numa, pods=rings)


def threshold_of(machine: Machine, config: NumaCpuConfig) -> float:
    """Use over size of a NUMA node that such CPUs bear, before it is expanded."""
    if config.usage_threshold is not None:
        return config.usage_threshold
    physical, virtual = THRESHOLDS.get(machine.codename, (OTHERS, OTHERS))
    return virtual if machine.is_vm else physical


def _finding(
    situation: Situation, memory: NumaCpuMemory, pods: Mapping[int, list[Pod]], config: NumaCpuConfig
) -> Finding:
    base = threshold_of(situation.snapshot.node.machine, config)
    bound = base * config.expand_factor
    parts = {node: part_above(ring, bound, config.ring_size) for node, ring in memory.numa.items()}
    over = [node for node, part in parts.items() if part >= config.threshold_met_percentage]
    worst = max(parts, key=lambda node: (parts[node], mean(memory.numa[node].values), -node))
    average = mean(memory.numa[worst].values)
    candidates = _ranked(memory, pods[worst], average - base, config) if over else ()
    met = Met.HARD if over and candidates else Met.NOT_MET
    text = (
        f"Shared pods of NUMA node {worst} use {average:.2f} of it; above {bound:.3f} in {parts[worst]:.0%} of the last "
        f"{config.ring_size} samples (threshold {config.threshold_met_percentage:.0%}); {len(over)} of {len(parts)} nodes are."
    )
    threshold = judged(
        NAME, met, SCOPE, value=config.threshold_met_percentage, observed=parts[worst],
        condition=CONDITION if len(over) == len(parts) else "", text=text,
        inputs={"numa": worst, "use": round(average, 4), "bound": round(bound, 4), "overloaded": len(over)},
    )  # fmt: skip
    # The samples before a victim left say nothing of the node without it.
    cool_down_s = config.ring_size * config.sample_s
    return Finding(threshold=threshold, candidates=candidates, kind="cpu", waits=True, cool_down_s=cool_down_s)


def _ranked(memory: NumaCpuMemory, pods: Sequence[Pod], gap: float, config: NumaCpuConfig) -> tuple[Candidate, ...]:
    scored = []
    for pod in pods:
        ring = memory.pods.get(pod.key)
        if ring is None:
            continue
        scored.append((-usage_score(mean(ring.values), gap), pod.key, pod))
    return tuple(Candidate(pod=pod, grace_s=config.grace_s) for _, _, pod in sorted(scored, key=lambda each: each[:2]))

"""numa-sys-cpu-pressure-plugin: a NUMA node is busy, and most of it in the kernel. Pure.

Sampled every 10 s, the last four samples count. Soft: no new pods. Hard: of the pods that spend 30 % or more of their own
time in the kernel, the one with the most of it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from agent.config.eviction_cpu import NumaSysConfig
from agent.eviction.cpu_use import CpuSample, Use, due, sampled, used
from agent.eviction.judgement import Candidate, Finding, judged, mean, missing, not_met
from agent.eviction.rings import Ring, grown, part_above, recent
from agent.eviction.situation import Situation
from api.evictions import Met
from api.pods import Pod

NAME = "numa-sys-cpu-pressure-plugin"
SCOPE = "cpu.usage.sys.container"
CONDITION = "NumaSysCPUPressure"


class NumaSysMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The last samples: parts of the NUMA node, and cores of each pod in the latest interval, all and in the kernel."""

    sample: CpuSample | None = None
    usage: Mapping[int, Ring] = {}
    system: Mapping[int, Ring] = {}
    pods: Mapping[str, tuple[float, float]] = {}


class _State(NamedTuple):
    node: int
    met: Met
    ratio: float
    usage: float


def judge(
    situation: Situation, memory: NumaSysMemory, config: NumaSysConfig
) -> tuple[tuple[Finding, ...], NumaSysMemory]:
    """One finding, of the NUMA node with the largest part in the kernel among those that are met."""
    nodes = situation.snapshot.topology.numa_nodes
    pods = {node: [pod for pod in situation.staying if node in pod.bound_numa] for node in nodes}
    if not any(pods.values()):
        return (not_met(NAME, "no_bound_pods", "No pod is bound to a NUMA node.", SCOPE),), NumaSysMemory()
    if due(memory.sample, situation, config.sample_s):
        memory = _sampled(situation, memory, pods, config)
    age_s = situation.stale_s + config.sample_s
    usage, system = (recent(each, situation.now_ns, age_s) for each in (memory.usage, memory.system))
    memory = msgspec.structs.replace(memory, usage=usage, system=system)
    states = [_state(node, memory, config) for node in nodes if node in usage and node in system]
    if not states:
        return (missing(NAME, "CPU use in the kernel of pods that are bound to NUMA nodes", SCOPE),), memory
    worst = max(states, key=lambda each: ((Met.NOT_MET, Met.SOFT, Met.HARD).index(each.met), each.ratio, -each.node))
    return (_finding(worst, memory, pods[worst.node], config),), memory


def _sampled(
    situation: Situation, memory: NumaSysMemory, pods: Mapping[int, list[Pod]], config: NumaSysConfig
) -> NumaSysMemory:
    after = sampled(situation)
    usage, system, latest = dict(memory.usage), dict(memory.system), {}
    for node, group in pods.items():
        size = sum(cpu.numa == node for cpu in situation.snapshot.topology.cpus)
        known: list[tuple[Pod, Use]] = []
        for pod in group:
            use = used(pod, memory.sample, after)
            if use is not None and use.system is not None:
                known.append((pod, use))
                latest[pod.key] = (use.total, use.system)
        if known:
            # A pod of several nodes counts in each with its part.
            total = sum(use.total / len(pod.bound_numa) for pod, use in known) / size
            kernel = sum((use.system or 0.0) / len(pod.bound_numa) for pod, use in known) / size
            usage[node] = grown(usage.get(node), total, config.ring_size, after.at_ns)
            system[node] = grown(system.get(node), kernel, config.ring_size, after.at_ns)
    return NumaSysMemory(sample=after, usage=usage, system=system, pods=latest)


def _state(node: int, memory: NumaSysMemory, config: NumaSysConfig) -> _State:
    ring, usage = memory.usage[node], mean(memory.usage[node].values)
    ratio = mean(memory.system[node].values) / usage if usage > 0 else 0.0
    part = config.threshold_met_percentage
    hard = part_above(ring, config.usage_hard, config.ring_size) >= part and ratio >= config.system_hard
    soft = part_above(ring, config.usage_soft, config.ring_size) >= part and ratio >= config.system_soft
    return _State(node, Met.HARD if hard else Met.SOFT if soft else Met.NOT_MET, ratio, usage)


def _finding(state: _State, memory: NumaSysMemory, pods: list[Pod], config: NumaSysConfig) -> Finding:
    value = config.system_soft if state.met is Met.SOFT else config.system_hard
    text = (
        f"Pods of NUMA node {state.node} use {state.usage:.2f} of it, {state.ratio:.0%} of that in the kernel; threshold "
        f"{value:.0%} of {config.usage_soft if state.met is Met.SOFT else config.usage_hard:g}."
    )
    threshold = judged(
        NAME, state.met, SCOPE, value=value, observed=state.ratio, condition=CONDITION, text=text,
        inputs={"numa": state.node, "use": round(state.usage, 4), "system_ratio": round(state.ratio, 4)},
    )  # fmt: skip
    candidates: tuple[Candidate, ...] = ()
    if state.met is Met.HARD:
        heavy = []
        for pod in pods:
            total, kernel = memory.pods.get(pod.key, (0.0, 0.0))
            if total > 0 and kernel / total >= config.victim_system:
                heavy.append((-kernel, pod.key, pod))
        ranked = sorted(heavy, key=lambda each: each[:2])
        candidates = tuple(Candidate(pod=pod, grace_s=config.grace_s) for _, _, pod in ranked)
    # The samples before a victim left say nothing of the node without it.
    cool_down_s = config.ring_size * config.sample_s
    return Finding(threshold=threshold, candidates=candidates, kind="cpu", waits=True, cool_down_s=cool_down_s)

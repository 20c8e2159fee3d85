"""Plugin numa-sys-cpu-pressure-plugin: a NUMA node is busy and spends most of that time in the kernel.
It is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from agent.config.eviction import NumaSysConfig
from agent.eviction.eviction_inputs import EvictionInputs
from agent.eviction.finding import (
    EvictionCandidate,
    EvictionFinding,
    make_threshold,
    mean,
    missing_input_finding,
    not_met_finding,
)
from agent.eviction.sample_window import (
    CpuSample,
    PodCpuUse,
    SampleWindow,
    append_sample,
    is_sample_due,
    pod_cpu_use,
    ratio_above,
    read_cpu_counters,
    recent_windows,
)
from api.eviction import ThresholdMet
from api.pod import Pod

NAME = "numa-sys-cpu-pressure-plugin"
SCOPE = "cpu.usage.sys.container"
CONDITION = "NumaSysCPUPressure"


class NumaSysCpuState(msgspec.Struct, frozen=True, kw_only=True):
    """The last samples: parts of the NUMA node, and cores of each pod in the latest interval, all and in the kernel."""

    sample: CpuSample | None = None
    usage: Mapping[int, SampleWindow] = {}
    system: Mapping[int, SampleWindow] = {}
    pods: Mapping[str, tuple[float, float]] = {}


class _NumaSysReading(NamedTuple):
    node: int
    met: ThresholdMet
    ratio: float
    usage: float


def evaluate_numa_sys_cpu(
    situation: EvictionInputs, memory: NumaSysCpuState, config: NumaSysConfig
) -> tuple[tuple[EvictionFinding, ...], NumaSysCpuState]:
    """One finding, of the NUMA node with the largest part in the kernel among those that are met."""
    nodes = situation.snapshot.topology.numa_nodes
    pods = {node: [pod for pod in situation.running_pods if node in pod.bound_numa] for node in nodes}
    if not any(pods.values()):
        return (not_met_finding(NAME, "no_bound_pods", "No pod is bound to a NUMA node.", SCOPE),), NumaSysCpuState()
    if is_sample_due(memory.sample, situation, config.sample_s):
        memory = _add_samples(situation, memory, pods, config)
    age_s = situation.stale_s + config.sample_s
    usage, system = (recent_windows(each, situation.now_ns, age_s) for each in (memory.usage, memory.system))
    memory = msgspec.structs.replace(memory, usage=usage, system=system)
    states = [_numa_reading(node, memory, config) for node in nodes if node in usage and node in system]
    if not states:
        return (
            missing_input_finding(NAME, "CPU use in the kernel of pods that are bound to NUMA nodes", SCOPE),
        ), memory
    worst = max(
        states,
        key=lambda each: (
            (ThresholdMet.NOT_MET, ThresholdMet.SOFT, ThresholdMet.HARD).index(each.met),
            each.ratio,
            -each.node,
        ),
    )
    return (_finding(worst, memory, pods[worst.node], config),), memory


def _add_samples(
    situation: EvictionInputs, memory: NumaSysCpuState, pods: Mapping[int, list[Pod]], config: NumaSysConfig
) -> NumaSysCpuState:
    after = read_cpu_counters(situation)
    usage, system, latest = dict(memory.usage), dict(memory.system), {}
    for node, group in pods.items():
        size = sum(cpu.numa == node for cpu in situation.snapshot.topology.cpus)
        known: list[tuple[Pod, PodCpuUse]] = []
        for pod in group:
            use = pod_cpu_use(pod, memory.sample, after)
            if use is not None and use.system is not None:
                known.append((pod, use))
                latest[pod.key] = (use.total, use.system)
        if known:
            # A pod of several nodes counts in each with its part.
            total = sum(use.total / len(pod.bound_numa) for pod, use in known) / size
            kernel = sum((use.system or 0.0) / len(pod.bound_numa) for pod, use in known) / size
            usage[node] = append_sample(usage.get(node), total, config.ring_size, after.at_ns)
            system[node] = append_sample(system.get(node), kernel, config.ring_size, after.at_ns)
    return NumaSysCpuState(sample=after, usage=usage, system=system, pods=latest)


def _numa_reading(node: int, memory: NumaSysCpuState, config: NumaSysConfig) -> _NumaSysReading:
    ring, usage = memory.usage[node], mean(memory.usage[node].values)
    ratio = mean(memory.system[node].values) / usage if usage > 0 else 0.0
    part = config.threshold_met_percentage
    hard = ratio_above(ring, config.usage_hard, config.ring_size) >= part and ratio >= config.system_hard
    soft = ratio_above(ring, config.usage_soft, config.ring_size) >= part and ratio >= config.system_soft
    return _NumaSysReading(
        node, ThresholdMet.HARD if hard else ThresholdMet.SOFT if soft else ThresholdMet.NOT_MET, ratio, usage
    )


def _finding(
    state: _NumaSysReading, memory: NumaSysCpuState, pods: list[Pod], config: NumaSysConfig
) -> EvictionFinding:
    value = config.system_soft if state.met is ThresholdMet.SOFT else config.system_hard
    text = (
        f"Pods of NUMA node {state.node} use {state.usage:.2f} of it, {state.ratio:.0%} of that in the kernel; threshold "
        f"{value:.0%} of {config.usage_soft if state.met is ThresholdMet.SOFT else config.usage_hard:g}."
    )
    threshold = make_threshold(
        NAME, state.met, SCOPE, value=value, observed=state.ratio, condition=CONDITION, text=text,
        inputs={"numa": state.node, "use": round(state.usage, 4), "system_ratio": round(state.ratio, 4)},
    )  # fmt: skip
    candidates: tuple[EvictionCandidate, ...] = ()
    if state.met is ThresholdMet.HARD:
        heavy = []
        for pod in pods:
            total, kernel = memory.pods.get(pod.key, (0.0, 0.0))
            if total > 0 and kernel / total >= config.victim_system:
                heavy.append((-kernel, pod.key, pod))
        ranked = sorted(heavy, key=lambda each: each[:2])
        candidates = tuple(EvictionCandidate(pod=pod, grace_s=config.grace_s) for _, _, pod in ranked)
    # The samples before a victim left say nothing of the node without it.
    cool_down_s = config.ring_size * config.sample_s
    return EvictionFinding(threshold=threshold, candidates=candidates, kind="cpu", waits=True, cool_down_s=cool_down_s)

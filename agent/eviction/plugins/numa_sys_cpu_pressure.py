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
    rank_candidates,
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
    """The latest samples as fractions of the NUMA node, and each pod's latest use in cores, in total and in the kernel."""

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
    inputs: EvictionInputs, state: NumaSysCpuState, config: NumaSysConfig
) -> tuple[tuple[EvictionFinding, ...], NumaSysCpuState]:
    """Return one finding, of the NUMA node with the largest kernel fraction among those that are met."""
    nodes = inputs.snapshot.topology.numa_nodes
    pods = {node: [pod for pod in inputs.running_pods if node in pod.bound_numa] for node in nodes}
    if not any(pods.values()):
        return (not_met_finding(NAME, "no_bound_pods", "No pod is bound to a NUMA node.", SCOPE),), NumaSysCpuState()
    if is_sample_due(state.sample, inputs, config.sample_s):
        state = _add_samples(inputs, state, pods, config)
    age_s = inputs.stale_s + config.sample_s
    usage, system = (recent_windows(each, inputs.now_ns, age_s) for each in (state.usage, state.system))
    state = msgspec.structs.replace(state, usage=usage, system=system)
    states = [_numa_reading(node, state, config) for node in nodes if node in usage and node in system]
    if not states:
        return (
            missing_input_finding(NAME, "CPU use in the kernel of pods that are bound to NUMA nodes", SCOPE),
        ), state
    worst = max(
        states,
        key=lambda each: (
            (ThresholdMet.NOT_MET, ThresholdMet.SOFT, ThresholdMet.HARD).index(each.met),
            each.ratio,
            -each.node,
        ),
    )
    return (_finding(worst, state, pods[worst.node], config),), state


def _add_samples(
    inputs: EvictionInputs, state: NumaSysCpuState, pods: Mapping[int, list[Pod]], config: NumaSysConfig
) -> NumaSysCpuState:
    after = read_cpu_counters(inputs)
    usage, system, latest = dict(state.usage), dict(state.system), {}
    for node, group in pods.items():
        size = sum(cpu.numa == node for cpu in inputs.snapshot.topology.cpus)
        samples: list[tuple[Pod, PodCpuUse]] = []
        for pod in group:
            use = pod_cpu_use(pod, state.sample, after)
            if use is not None and use.system is not None:
                samples.append((pod, use))
                latest[pod.key] = (use.total, use.system)
        if samples:
            # A pod on several NUMA nodes counts on each with its share.
            total = sum(use.total / len(pod.bound_numa) for pod, use in samples) / size
            kernel = sum((use.system or 0.0) / len(pod.bound_numa) for pod, use in samples) / size
            usage[node] = append_sample(usage.get(node), total, config.ring_size, after.at_ns)
            system[node] = append_sample(system.get(node), kernel, config.ring_size, after.at_ns)
    return NumaSysCpuState(sample=after, usage=usage, system=system, pods=latest)


def _numa_reading(node: int, state: NumaSysCpuState, config: NumaSysConfig) -> _NumaSysReading:
    window, usage = state.usage[node], mean(state.usage[node].values)
    ratio = mean(state.system[node].values) / usage if usage > 0 else 0.0
    part = config.threshold_met_percentage
    hard = ratio_above(window, config.usage_hard, config.ring_size) >= part and ratio >= config.system_hard
    soft = ratio_above(window, config.usage_soft, config.ring_size) >= part and ratio >= config.system_soft
    return _NumaSysReading(
        node, ThresholdMet.HARD if hard else ThresholdMet.SOFT if soft else ThresholdMet.NOT_MET, ratio, usage
    )


def _finding(
    reading: _NumaSysReading, state: NumaSysCpuState, pods: list[Pod], config: NumaSysConfig
) -> EvictionFinding:
    value = config.system_soft if reading.met is ThresholdMet.SOFT else config.system_hard
    text = (
        f"Pods use {reading.usage:.2f} of the CPUs of NUMA node {reading.node}, {reading.ratio:.0%} of that in the kernel; the "
        f"thresholds are {config.usage_soft if reading.met is ThresholdMet.SOFT else config.usage_hard:g} and {value:.0%}."
    )
    threshold = make_threshold(
        NAME, reading.met, SCOPE, value=value, observed=reading.ratio, condition=CONDITION, text=text,
        inputs={"numa": reading.node, "use": round(reading.usage, 4), "system_ratio": round(reading.ratio, 4)},
    )  # fmt: skip
    candidates: tuple[EvictionCandidate, ...] = ()
    if reading.met is ThresholdMet.HARD:
        kernel = {
            key: kernel
            for key, (total, kernel) in state.pods.items()
            if total > 0 and kernel / total >= config.victim_system
        }
        heavy = [pod for pod in pods if pod.key in kernel]
        candidates = rank_candidates(heavy, lambda pod: -kernel[pod.key], config.grace_s)
    # Samples from before an eviction do not apply to the node without the victim.
    cool_down_s = config.ring_size * config.sample_s
    return EvictionFinding(
        threshold=threshold, candidates=candidates, kind="cpu", awaits_termination=True, cool_down_s=cool_down_s
    )

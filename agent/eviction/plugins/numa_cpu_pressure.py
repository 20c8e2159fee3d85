"""Plugin numa-cpu-pressure-plugin: shared pods that are bound to a NUMA node overuse its CPUs for a minute.
It is pure. The thresholds depend on the CPU model, as in Katalyst; the pod with the highest score of Katalyst's
scoring is evicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor

import msgspec

from agent.config.eviction import NumaCpuConfig
from agent.eviction.eviction_inputs import EvictionInputs, PodEvictionRecord
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
    SampleWindow,
    append_pod_samples,
    append_sample,
    is_sample_due,
    pod_cpu_use,
    ratio_above,
    read_cpu_counters,
    recent_windows,
)
from api.eviction import ThresholdMet
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import Machine
from api.units import NS_PER_S

MAX_SCORE = 100.0
EXCLUDED_SCORE = -1000.0
USAGE_WEIGHT, USAGE_DISTANCE, MIN_USAGE_GAP_RATIO = 0.6, 0.3, 0.4
TOP_PART = 0.9
"""Part of the score that a workload keeps below the lowest limit of evictions per hour."""
FREQUENCY_LIMITS = (0.15, 0.3, 0.5)
"""Katalyst's limits of the part of a workload's pods that is evicted per hour."""
FREQUENCY_WINDOWS_S = (1800, 3600, 7200)
"""Windows of Katalyst's scorer (cpueviction/rules)."""
NAME = "numa-cpu-pressure-plugin"
SCOPE = "cpu.usage.container"
CONDITION = "NumaCPUPressure"
DEFAULT_THRESHOLD = 0.6


def usage_score(use: float, gap: float) -> int:
    """Return Katalyst's score: 60 for a pod that uses exactly the excess, 0 at a difference of 0.3, -1000 for tiny pods.

    `use` of the pod and the excess `gap` of the node above its threshold are fractions of the NUMA node.
    """
    if use <= MIN_USAGE_GAP_RATIO * gap:
        return round(EXCLUDED_SCORE)
    distance = abs(use - abs(gap))
    return (
        _round_half_away(USAGE_WEIGHT * MAX_SCORE * (1 - distance / USAGE_DISTANCE)) if distance < USAGE_DISTANCE else 0
    )


def evicted_per_hour(record: PodEvictionRecord, now_s: float) -> dict[float, float]:
    """Return the part of the workload's pods that was evicted per hour, by window in hours; empty without buckets.

    Of a bucket that began before the window the part in it counts, as in Katalyst. Without a disruption budget the number of
    pods is not known, and the part is 0.
    """
    if not record.buckets:
        return {}
    ratios = {}
    for window_s in FREQUENCY_WINDOWS_S:
        start_s, count = now_s - window_s, 0
        for bucket in record.buckets:
            inside_s = min(bucket.time_s + bucket.duration_s - start_s, bucket.duration_s)
            count += _round_half_away(bucket.count * max(inside_s, 0) / bucket.duration_s)
        hours = window_s / 3600
        ratios[hours] = count / record.expected_pods / hours if record.expected_pods else 0.0
    return ratios


def frequency_score(ratios: Mapping[float, float]) -> int:
    """Return 100 for a workload of which no pod was evicted lately, and -10000 times the part evicted per hour if it is at
    least the highest limit; 0 without ratios. `ratios` is by window in hours; short windows weigh more."""
    weights = sum(1 / window for window in ratios)
    if not weights:
        return 0
    return _round_half_away(sum(_window_score(ratio) / window for window, ratio in ratios.items()) / weights)


def _window_score(ratio: float) -> float:
    low, middle, high = FREQUENCY_LIMITS
    if ratio >= high:
        return EXCLUDED_SCORE * 10 * ratio
    if ratio >= middle:
        return (1 - (ratio - middle) / (high - middle)) * (1 - TOP_PART) * MAX_SCORE
    if ratio >= low:
        return (TOP_PART / 2 + (1 - (ratio - low) / (middle - low)) * (1 - TOP_PART)) * MAX_SCORE
    return (TOP_PART + (1 - ratio / low) * (1 - TOP_PART)) * MAX_SCORE


def _round_half_away(value: float) -> int:
    """Round half away from zero, as Go does."""
    return floor(value + 0.5) if value >= 0 else -floor(-value + 0.5)


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
"""Katalyst's thresholds by CPU code name: of a physical machine and of a virtual one."""


class NumaCpuState(msgspec.Struct, frozen=True, kw_only=True):
    """The latest samples, as fractions of the NUMA node."""

    sample: CpuSample | None = None
    numa: Mapping[int, SampleWindow] = {}
    pods: Mapping[str, SampleWindow] = {}


def evaluate_numa_cpu(
    inputs: EvictionInputs, state: NumaCpuState, config: NumaCpuConfig
) -> tuple[tuple[EvictionFinding, ...], NumaCpuState]:
    """Return one finding, of the worst NUMA node."""
    pods = {
        node: [pod for pod in inputs.running_pods if pod.qos is QoSLevel.SHARED and pod.bound_numa == (node,)]
        for node in inputs.snapshot.topology.numa_nodes
    }
    if not any(pods.values()):
        return (
            not_met_finding(NAME, "no_bound_pods", "No shared pod is bound to a NUMA node.", SCOPE),
        ), NumaCpuState()
    if is_sample_due(state.sample, inputs, config.sample_s):
        state = _add_samples(inputs, state, pods, config)
    age_s = inputs.stale_s + config.sample_s
    state = msgspec.structs.replace(
        state,
        numa=recent_windows(state.numa, inputs.now_ns, age_s),
        pods=recent_windows(state.pods, inputs.now_ns, age_s),
    )
    if not state.numa:
        return (missing_input_finding(NAME, "CPU use of the pods that are bound to NUMA nodes", SCOPE),), state
    return (_finding(inputs, state, pods, config),), state


def _add_samples(
    inputs: EvictionInputs, state: NumaCpuState, pods: Mapping[int, list[Pod]], config: NumaCpuConfig
) -> NumaCpuState:
    after = read_cpu_counters(inputs)
    sizes = {node: sum(cpu.numa == node for cpu in inputs.snapshot.topology.cpus) for node in pods}
    numa, uses = dict(state.numa), dict[str, float]()
    for node, group in pods.items():
        parts = {
            pod.key: use.total / sizes[node]
            for pod in group
            if (use := pod_cpu_use(pod, state.sample, after)) is not None
        }
        if parts or (not group and state.sample is not None):
            numa[node] = append_sample(state.numa.get(node), sum(parts.values()), config.ring_size, after.at_ns)
        uses |= parts
    bound = [pod for group in pods.values() for pod in group]
    windows = append_pod_samples(state.pods, bound, uses, config.ring_size, after.at_ns)
    return NumaCpuState(sample=after, numa=numa, pods=windows)


def usage_threshold(machine: Machine, config: NumaCpuConfig) -> float:
    """Return the threshold of this CPU model, use over size of a NUMA node, before the expansion factor."""
    if config.usage_threshold is not None:
        return config.usage_threshold
    physical, virtual = THRESHOLDS.get(machine.codename, (DEFAULT_THRESHOLD, DEFAULT_THRESHOLD))
    return virtual if machine.is_vm else physical


def _finding(
    inputs: EvictionInputs, state: NumaCpuState, pods: Mapping[int, list[Pod]], config: NumaCpuConfig
) -> EvictionFinding:
    base = usage_threshold(inputs.snapshot.node.machine, config)
    bound = base * config.expand_factor
    parts = {node: ratio_above(ring, bound, config.ring_size) for node, ring in state.numa.items()}
    over = [node for node, part in parts.items() if part >= config.threshold_met_percentage]
    worst = max(parts, key=lambda node: (parts[node], mean(state.numa[node].values), -node))
    average = mean(state.numa[worst].values)
    candidates = _rank_candidates(inputs, state, pods[worst], average - base, config) if over else ()
    met = ThresholdMet.HARD if over and candidates else ThresholdMet.NOT_MET
    text = (
        f"Shared pods use {average:.2f} of the CPUs of NUMA node {worst}, and used more than {bound:.3f} in {parts[worst]:.0%} "
        f"of the last {config.ring_size} samples; the threshold is {config.threshold_met_percentage:.0%}. "
        f"{len(over)} of {len(parts)} NUMA nodes exceed it."
    )
    threshold = make_threshold(
        NAME, met, SCOPE, value=config.threshold_met_percentage, observed=parts[worst],
        condition=CONDITION if len(over) == len(parts) else "", text=text,
        inputs={"numa": worst, "use": round(average, 4), "bound": round(bound, 4), "overloaded": len(over)},
    )  # fmt: skip
    # Samples from before an eviction do not apply to the node without the victim.
    cool_down_s = config.ring_size * config.sample_s
    return EvictionFinding(
        threshold=threshold, candidates=candidates, kind="cpu", awaits_termination=True, cool_down_s=cool_down_s
    )


def _rank_candidates(
    inputs: EvictionInputs, state: NumaCpuState, pods: Sequence[Pod], gap: float, config: NumaCpuConfig
) -> tuple[EvictionCandidate, ...]:
    """Return the sampled pods in the order of their total score; a pod without a record has no frequency score."""

    def score(pod: Pod) -> int:
        total = usage_score(mean(state.pods[pod.key].values), gap) if "Usage" in config.scorers else 0
        if "WorkloadEvictionFrequency" in config.scorers and pod.uid in inputs.records:
            ratios = evicted_per_hour(inputs.records[pod.uid], inputs.snapshot.wall_time_ns / NS_PER_S)
            total += frequency_score(ratios)
        return total

    return rank_candidates((pod for pod in pods if pod.key in state.pods), lambda pod: -score(pod), config.grace_s)

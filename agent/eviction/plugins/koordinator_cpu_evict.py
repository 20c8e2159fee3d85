"""Plugin koordinator-cpu-evict: Koordinator's rules for the CPU of reclaimed pods and of the node.
It is pure. A rule releases a computed amount at once, from the lowest priority up, and then cools down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import msgspec

from agent.config.eviction import KoordinatorCpuConfig
from agent.eviction.eviction_inputs import EvictionInputs, reclaimed_pods, requested_reclaimed_cores
from agent.eviction.finding import (
    EvictionCandidate,
    EvictionFinding,
    candidates_until_released,
    make_threshold,
    mean,
    missing_input_finding,
    not_met_finding,
)
from agent.eviction.sample_window import CpuSample, is_sample_due, pod_cpu_use, read_cpu_counters
from api.advice import NOT_NUMA_BOUND
from api.eviction import ThresholdMet
from api.pod import Pod
from api.rates import delta
from api.units import NS_PER_S

NAME = "koordinator-cpu-evict"
SATISFACTION, ALLOCATABLE, NODE = "be-satisfaction", "cpu-allocatable", "node-cpu"
RECLAIM = "reclaim"
SMALL_CORES = 1.0
"""Cores below which the CPU of reclaimed pods counts as used up."""
DEFAULT_RELEASE_MARGIN = 0.02
"""Koordinator releases down to two percent below a threshold, unless a lower bound is configured."""
MAX_SATISFACTION = 0.6
SAMPLE_S = 1.0
MIN_WINDOW_RATIO = 1 / 3


class ReclaimedCpuSample(msgspec.Struct, frozen=True, array_like=True):
    """Cores at one time; None if not available."""

    at_ns: int
    used: float | None
    """Cores that reclaimed pods use."""
    allowed_cores: float | None
    """Cores that reclaimed pods may use: their pool, or its quota."""
    node: float | None
    """Cores that the whole node uses."""


class KoordinatorCpuState(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of the window, and the cores that each reclaimed pod used in the latest one."""

    sample: CpuSample | None = None
    node_busy_ns: int | None = None
    window: tuple[ReclaimedCpuSample, ...] = ()
    pods: Mapping[str, float] = {}


def evaluate_koordinator_cpu(
    inputs: EvictionInputs, state: KoordinatorCpuState, config: KoordinatorCpuConfig
) -> tuple[tuple[EvictionFinding, ...], KoordinatorCpuState]:
    """Return one finding per rule."""
    if is_sample_due(state.sample, inputs, SAMPLE_S):
        state = _add_sample(inputs, state, config)
    left = list(reclaimed_pods(inputs.running_pods))
    if not left:
        return (not_met_finding(NAME, "no_reclaimed_pods", "There are no reclaimed pods."),), state
    findings = []
    for rule in (_evaluate_satisfaction, _evaluate_allocatable, _evaluate_node_cpu):
        finding = rule(inputs, state, left, config)
        chosen = {candidate.pod.key for candidate in finding.candidates}
        left = [pod for pod in left if pod.key not in chosen]
        findings.append(finding)
    return tuple(findings), state


def _add_sample(
    inputs: EvictionInputs, state: KoordinatorCpuState, config: KoordinatorCpuConfig
) -> KoordinatorCpuState:
    after, before = read_cpu_counters(inputs), state.sample
    times = inputs.snapshot.node.cpu
    busy_ns = None if times is None else times.busy_ns
    grown, elapsed = delta(state.node_busy_ns, busy_ns), after.at_ns - before.at_ns if before is not None else 0
    pods = reclaimed_pods(inputs.running_pods)
    uses = {pod.key: use.total for pod in pods if (use := pod_cpu_use(pod, before, after)) is not None}
    window = tuple(each for each in state.window if 0 < after.at_ns - each.at_ns < config.window_s * NS_PER_S)
    if elapsed > 0:
        total = sum(uses.values()) if uses and len(uses) == len(pods) else None
        node = None if grown is None else grown / elapsed
        window = (*window, ReclaimedCpuSample(after.at_ns, total, _allowed_cores(inputs), node))
    return KoordinatorCpuState(sample=after, node_busy_ns=busy_ns, window=window, pods=uses)


def _allowed_cores(inputs: EvictionInputs) -> float | None:
    """Return the cores of the latency policy, or the sum over NUMA nodes of the reclaim pool's CPUs within their quota."""
    cpus = inputs.pools.get(RECLAIM)
    if cpus is None:
        return None
    if inputs.reclaimable_cores is not None:
        return min(float(len(cpus)), inputs.reclaimable_cores)
    sizes = inputs.advice.sizes if inputs.advice is not None else ()
    quotas = {
        each.numa: inf if each.quota_cores is None else each.quota_cores for each in sizes if each.pool == RECLAIM
    }
    nodes = {cpu.id: cpu.numa for cpu in inputs.snapshot.topology.cpus}
    # A size for no NUMA node in particular applies to the nodes without a size of their own.
    unsized = Counter(numa if (numa := nodes.get(cpu, NOT_NUMA_BOUND)) in quotas else NOT_NUMA_BOUND for cpu in cpus)
    return sum(min(float(count), quotas.get(numa, inf)) for numa, count in unsized.items())


def _has_enough_samples(samples: Sequence[ReclaimedCpuSample], state: KoordinatorCpuState, window_s: float) -> bool:
    """Return whether the window holds the latest sample and one that is at least a third of the window older."""
    if not samples or samples[-1] is not state.window[-1]:
        return False
    return samples[-1].at_ns - samples[0].at_ns >= window_s * NS_PER_S * MIN_WINDOW_RATIO


def _evaluate_satisfaction(
    inputs: EvictionInputs, state: KoordinatorCpuState, pods: Sequence[Pod], config: KoordinatorCpuConfig
) -> EvictionFinding:
    samples = [each for each in state.window if each.used is not None and each.allowed_cores is not None]
    request = sum(requested_reclaimed_cores(pod) for pod in pods)
    if not _has_enough_samples(samples, state, config.window_s) or request <= 0:
        return missing_input_finding(NAME, "CPU that reclaimed pods use, may use and requested", SATISFACTION)
    pairs = [(each.used or 0.0, each.allowed_cores or 0.0) for each in samples]
    views = [(mean([use for use, _ in pairs]), mean([may for _, may in pairs])), pairs[-1]]
    busy = all(may < SMALL_CORES or use / may >= config.usage_ratio for use, may in views)
    observed = max(may / request for _, may in views)
    lower = min(config.satisfaction_lower, MAX_SATISFACTION)
    met = busy and observed <= lower
    text = (
        f"Reclaimed pods may use {observed:.0%} of the {request:.2f} cores that they requested, and they "
        f"{'use nearly all of this CPU' if busy else 'leave some of this CPU idle'}; the threshold is {lower:.0%}."
    )
    victims: tuple[EvictionCandidate, ...] = ()
    if met:
        ranked = sorted(
            _evictable_pods(inputs, pods), key=lambda pod: (pod.priority, -_request_use_ratio(state, pod), pod.key)
        )
        release = request * (config.satisfaction_upper - observed)
        victims = candidates_until_released(release, ranked, requested_reclaimed_cores, config.grace_s)
    return _finding(SATISFACTION, _ThresholdNumbers(lower, observed, met, below=True), text, victims, config)


def _evictable_pods(inputs: EvictionInputs, pods: Sequence[Pod]) -> list[Pod]:
    """Return the candidates without stuck pods, which release nothing."""
    return [pod for pod in pods if pod.key not in inputs.stuck]


def _request_use_ratio(state: KoordinatorCpuState, pod: Pod) -> float:
    """Return the fraction of its request that a pod uses."""
    request = requested_reclaimed_cores(pod)
    return state.pods.get(pod.key, 0.0) / request if request > 0 else 0.0


def _evaluate_allocatable(
    inputs: EvictionInputs, _: KoordinatorCpuState, pods: Sequence[Pod], config: KoordinatorCpuConfig
) -> EvictionFinding:
    threshold, headroom = config.allocatable_threshold, inputs.headroom
    if threshold is None:
        return not_met_finding(
            NAME,
            "not_configured",
            "Requests above the headroom are not evaluated: the setting is off.",
            ALLOCATABLE,
        )
    if headroom is None or headroom.cores is None:
        return missing_input_finding(NAME, "The headroom of reclaimed pods", ALLOCATABLE)
    if headroom.cores <= 0:
        text = "The headroom of reclaimed pods is 0, and that alone evicts no pod."
        return not_met_finding(NAME, "nothing_promised", text, ALLOCATABLE)
    request, bound = sum(requested_reclaimed_cores(pod) for pod in pods), threshold * headroom.cores
    text = f"Reclaimed pods requested {request:.2f} cores; the headroom is {headroom.cores:.2f}, the threshold is {bound:.2f}."
    ranked = sorted(
        _evictable_pods(inputs, pods), key=lambda pod: (pod.priority, -requested_reclaimed_cores(pod), pod.key)
    )
    victims = candidates_until_released(request - bound, ranked, requested_reclaimed_cores, config.grace_s)
    return _finding(ALLOCATABLE, _ThresholdNumbers(bound, request, request > bound), text, victims, config)


def _evaluate_node_cpu(
    inputs: EvictionInputs, state: KoordinatorCpuState, pods: Sequence[Pod], config: KoordinatorCpuConfig
) -> EvictionFinding:
    threshold, capacity = config.node_threshold, len(inputs.snapshot.topology.cpus)
    if threshold is None:
        return not_met_finding(
            NAME, "not_configured", "CPU use of the node is not evaluated: the setting is off.", NODE
        )
    samples = [each for each in state.window if each.node is not None]
    if not _has_enough_samples(samples, state, config.window_s) or not capacity:
        return missing_input_finding(NAME, "CPU use of the node", NODE)
    # A terminating pod still uses CPU, which the latest sample includes, so the next victim waits for the cool-down.
    observed = min(mean([each.node or 0.0 for each in samples]), samples[-1].node or 0.0) / capacity
    lower = threshold - DEFAULT_RELEASE_MARGIN if config.node_lower is None else config.node_lower
    text = f"The node uses {observed:.1%} of its CPU; the threshold is {threshold:.0%}."
    met = observed >= threshold
    ranked = sorted(
        _evictable_pods(inputs, pods), key=lambda pod: (pod.priority, -state.pods.get(pod.key, 0.0), pod.key)
    )
    release = capacity * (observed - lower) if met else 0.0
    victims = candidates_until_released(release, ranked, lambda pod: state.pods.get(pod.key), config.grace_s)
    return _finding(NODE, _ThresholdNumbers(threshold, observed, met), text, victims, config)


class _ThresholdNumbers(NamedTuple):
    value: float
    observed: float
    met: bool
    below: bool = False


def _finding(
    scope: str,
    numbers: _ThresholdNumbers,
    text: str,
    victims: tuple[EvictionCandidate, ...],
    config: KoordinatorCpuConfig,
) -> EvictionFinding:
    threshold = make_threshold(
        NAME, ThresholdMet.HARD if numbers.met else ThresholdMet.NOT_MET, scope,
        value=numbers.value, observed=numbers.observed,
        below=numbers.below, text=text, inputs={"victims": len(victims)},
    )  # fmt: skip
    return EvictionFinding(
        threshold=threshold,
        candidates=victims,
        direct=True,
        forced=True,
        kind="cpu",
        cool_down_s=config.cool_down_s,
    )

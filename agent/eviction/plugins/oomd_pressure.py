"""Plugin oomd-pressure: oomd's detectors and victim choice evict reclaimed pods before the OOM killer acts.
Detectors: memory stalls (`full`) for 30 s, or little free swap. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.config.eviction import OomdConfig
from agent.eviction.eviction_inputs import EvictionInputs, memory_bytes, reclaimed_pods
from agent.eviction.finding import (
    EvictionCandidate,
    EvictionFinding,
    make_threshold,
    missing_input_finding,
    not_met_finding,
)
from api.eviction import ThresholdMet
from api.pod import Pod
from api.units import NS_PER_S

NAME = "oomd-pressure"
PRESSURE, SWAP = "memory.pressure", "swap"
DOMINANT_SHARE, MIN_GROWTH, PERCENTILE = 0.5, 1.25, 0.8
AVERAGE_DECAY = 4
"""Weight of a new size in a pod's moving average is 1 over this."""


class OomdState(msgspec.Struct, frozen=True, kw_only=True):
    """Since when all tasks stall (CLOCK_MONOTONIC), and the average size of each reclaimed pod in bytes."""

    since_ns: int | None = None
    sizes: Mapping[str, float] = {}


def evaluate_oomd(
    inputs: EvictionInputs, state: OomdState, config: OomdConfig
) -> tuple[tuple[EvictionFinding, ...], OomdState]:
    """Return one finding per detector."""
    pods = [(pod, size) for pod in reclaimed_pods(inputs.running_pods) if (size := memory_bytes(inputs, pod))]
    averages = {
        pod.key: before + (size - before) / AVERAGE_DECAY
        for pod, size in pods
        for before in (state.sizes.get(pod.key, size),)
    }
    ranked = _rank_pods(pods, averages)
    pressure, since = _evaluate_pressure(inputs, state.since_ns, ranked, config)
    return (pressure, _evaluate_swap(inputs, ranked, config)), OomdState(since_ns=since, sizes=averages)


def _rank_pods(pods: list[tuple[Pod, float]], averages: Mapping[str, float]) -> tuple[Pod, ...]:
    ordered = sorted(pods, key=lambda each: (-each[1], each[0].key))
    if not ordered or ordered[0][1] >= DOMINANT_SHARE * sum(size for _, size in ordered):
        return tuple(pod for pod, _ in ordered)
    largest = ordered[: max(round(len(ordered) * (1 - PERCENTILE)), 1)]
    growth = {pod.key: size / averages[pod.key] for pod, size in largest}
    # Pods that did not grow enough come last, in order of size.
    ordered.sort(key=lambda each: -growth[each[0].key] if growth.get(each[0].key, 0) >= MIN_GROWTH else 0)
    return tuple(pod for pod, _ in ordered)


def _evaluate_pressure(
    inputs: EvictionInputs, since: int | None, ranked: tuple[Pod, ...], config: OomdConfig
) -> tuple[EvictionFinding, int | None]:
    pressure = inputs.snapshot.node.memory_pressure
    if pressure is None or pressure.full_avg10 is None:
        return missing_input_finding(NAME, "memory pressure of the node", PRESSURE), None
    above = pressure.full_avg10 > config.full_avg10
    since = None if not above else inputs.now_ns if since is None else since
    for_s = 0.0 if since is None else (inputs.now_ns - since) / NS_PER_S
    text = (
        f"All tasks stalled on memory {pressure.full_avg10:g} % of the time. The value exceeded {config.full_avg10:g} % for "
        f"{for_s:.0f} s; pods are evicted after {config.duration_s:g} s."
    )
    met = above and for_s >= config.duration_s
    return _finding(PRESSURE, (config.duration_s, for_s), met=met, text=text, ranked=ranked, config=config), since


def _evaluate_swap(inputs: EvictionInputs, ranked: tuple[Pod, ...], config: OomdConfig) -> EvictionFinding:
    meminfo = inputs.snapshot.node.meminfo
    total, free = meminfo.get("SwapTotal"), meminfo.get("SwapFree")
    if total is None or free is None:
        return missing_input_finding(NAME, "free swap", SWAP)
    if not total:
        return not_met_finding(NAME, "no_swap", "The node has no swap.", SWAP)
    ratio = free / total
    text = f"{ratio:.1%} of the swap is free; the threshold is {config.swap_free_ratio:.0%}."
    met = ratio < config.swap_free_ratio
    return _finding(SWAP, (config.swap_free_ratio, ratio), met=met, text=text, ranked=ranked, config=config)


def _finding(
    scope: str, numbers: tuple[float, float], *, met: bool, text: str, ranked: tuple[Pod, ...], config: OomdConfig
) -> EvictionFinding:
    threshold = make_threshold(
        NAME, ThresholdMet.HARD if met else ThresholdMet.NOT_MET, scope,
        value=numbers[0], observed=numbers[1], below=scope == SWAP, text=text,
        inputs={"pods": len(ranked)},
    )  # fmt: skip
    candidates = tuple(EvictionCandidate(pod=pod, grace_s=config.grace_s) for pod in ranked) if met else ()
    return EvictionFinding(
        threshold=threshold,
        candidates=candidates,
        kind="memory",
        cool_down_s=config.cool_down_s,
        awaits_termination=True,
    )

"""oomd-pressure: oomd's detectors and its choice; reclaimed pods leave before the kernel's OOM killer has to choose. Pure.

Detectors: tasks stall for memory, all of them at once, 60 % of the time for 30 s [pressure_above]; or less than a tenth of
the swap is free [swap_free]. The choice [kill_by_memory_size_or_growth]: the largest pod if it has half of what reclaimed
pods use; else of the largest fifth the one that grew most, by a quarter at least; else the largest.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.config.eviction_memory import OomdConfig
from agent.eviction.judgement import Candidate, Finding, judged, missing, not_met
from agent.eviction.situation import NS_PER_S, Situation, memory_bytes, reclaimed
from api.evictions import Met
from api.pods import Pod

NAME = "oomd-pressure"
PRESSURE, SWAP = "memory.pressure", "swap"
SIZE_SHARE, GROWTH, PERCENTILE = 0.5, 1.25, 0.8
DECAY = 4
"""A pod's average moves by a quarter towards each new size."""


class OomdMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Since when tasks stall, CLOCK_MONOTONIC, and the average size of each reclaimed pod in bytes."""

    since_ns: int | None = None
    sizes: Mapping[str, float] = {}


def judge(situation: Situation, memory: OomdMemory, config: OomdConfig) -> tuple[tuple[Finding, ...], OomdMemory]:
    """One finding for each detector."""
    pods = [(pod, size) for pod in reclaimed(situation.staying) if (size := memory_bytes(situation, pod))]
    averages = {
        pod.key: before + (size - before) / DECAY for pod, size in pods for before in (memory.sizes.get(pod.key, size),)
    }
    ranked = _ranked(pods, averages)
    pressure, since = _pressure(situation, memory.since_ns, ranked, config)
    return (pressure, _swap(situation, ranked, config)), OomdMemory(since_ns=since, sizes=averages)


def _ranked(pods: list[tuple[Pod, float]], averages: Mapping[str, float]) -> tuple[Pod, ...]:
    ordered = sorted(pods, key=lambda each: (-each[1], each[0].key))
    if not ordered or ordered[0][1] >= SIZE_SHARE * sum(size for _, size in ordered):
        return tuple(pod for pod, _ in ordered)
    largest = ordered[: max(round(len(ordered) * (1 - PERCENTILE)), 1)]
    growth = {pod.key: size / averages[pod.key] for pod, size in largest}
    # Who did not grow enough stays in order of size, behind.
    ordered.sort(key=lambda each: -growth[each[0].key] if growth.get(each[0].key, 0) >= GROWTH else 0)
    return tuple(pod for pod, _ in ordered)


def _pressure(
    situation: Situation, since: int | None, ranked: tuple[Pod, ...], config: OomdConfig
) -> tuple[Finding, int | None]:
    pressure = situation.snapshot.node.memory_pressure
    if pressure is None or pressure.full_avg10 is None:
        return missing(NAME, "memory pressure of the node", PRESSURE), None
    above = pressure.full_avg10 > config.full_avg10
    since = None if not above else situation.now_ns if since is None else since
    for_s = 0.0 if since is None else (situation.now_ns - since) / NS_PER_S
    text = (
        f"All tasks stalled for memory {pressure.full_avg10:g} % of the time (threshold {config.full_avg10:g} %), above it for "
        f"{for_s:.0f} s of {config.duration_s:g} s."
    )
    met = above and for_s >= config.duration_s
    return _finding(PRESSURE, (config.duration_s, for_s), met=met, text=text, ranked=ranked, config=config), since


def _swap(situation: Situation, ranked: tuple[Pod, ...], config: OomdConfig) -> Finding:
    meminfo = situation.snapshot.node.meminfo
    total, free = meminfo.get("SwapTotal"), meminfo.get("SwapFree")
    if total is None or free is None:
        return missing(NAME, "free swap", SWAP)
    if not total:
        return not_met(NAME, "no_swap", "The node has no swap.", SWAP)
    ratio = free / total
    text = f"{ratio:.1%} of the swap are free; the threshold is {config.swap_free_ratio:.0%}."
    met = ratio < config.swap_free_ratio
    return _finding(SWAP, (config.swap_free_ratio, ratio), met=met, text=text, ranked=ranked, config=config)


def _finding(
    scope: str, numbers: tuple[float, float], *, met: bool, text: str, ranked: tuple[Pod, ...], config: OomdConfig
) -> Finding:
    threshold = judged(
        NAME, Met.HARD if met else Met.NOT_MET, scope, value=numbers[0], observed=numbers[1], below=scope == SWAP, text=text,
        inputs={"pods": len(ranked)},
    )  # fmt: skip
    candidates = tuple(Candidate(pod=pod, grace_s=config.grace_s) for pod in ranked) if met else ()
    return Finding(
        threshold=threshold, candidates=candidates, kind="memory", cool_down_s=config.cool_down_s, waits=True
    )

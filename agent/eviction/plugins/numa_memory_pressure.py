"""Plugin numa-memory-pressure-eviction-plugin: free memory of a NUMA node stays below the kernel's watermarks.
It is pure. Katalyst's margins (1 GiB above min, 256 MiB above low) are scaled down on NUMA nodes of less than 32
GiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from agent.config.eviction import NumaMemoryConfig
from agent.eviction.eviction_inputs import PAGE_BYTES, EvictionInputs, numa_memory_bytes
from agent.eviction.finding import (
    EvictionCandidate,
    EvictionFinding,
    make_threshold,
    missing_input_finding,
    rank_by_memory,
)
from api.eviction import EvictionThreshold, ThresholdMet
from api.pod import Pod
from api.qos import QoSLevel
from api.quantity import format_bytes
from api.snapshot import NodeSample
from api.units import GIB, MIB

NAME = "numa-memory-pressure-eviction-plugin"
SCOPE = "NumaMemory"
REFERENCE_NODE_BYTES = 32 * GIB
MIN_ROUNDS_FOR_KSWAPD = 2
"""Cycles below the low watermark, after which active reclaim counts as another cycle."""


class NumaMemoryPressureState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one NUMA node between two cycles."""

    read_at_ns: int | None = None
    """Time of the latest reading that was counted (CLOCK_REALTIME); each reading counts once."""
    rounds: Mapping[int, int] = {}
    """Readings below the low watermark, minus those above it since."""
    scanned: Mapping[int, int] = {}
    """Pages that reclaim had scanned by then."""


class NumaWatermarks(NamedTuple):
    """Free memory and watermarks of a NUMA node in bytes."""

    free: float
    low: float
    min: float
    total: float


def evaluate_numa_memory(
    inputs: EvictionInputs, state: NumaMemoryPressureState, config: NumaMemoryConfig
) -> tuple[tuple[EvictionFinding, ...], NumaMemoryPressureState]:
    """Return one finding per NUMA node. The count of a node without readings starts again."""
    node = inputs.snapshot.node
    if not inputs.node_files_fresh:
        return (missing_input_finding(NAME, "/proc/zoneinfo", SCOPE),), NumaMemoryPressureState()
    new = node.files_read_at_ns != state.read_at_ns
    rounds, scanned = ({}, {}) if new else (dict(state.rounds), dict(state.scanned))
    findings = []
    for number in sorted({zone.node for zone in node.zones} | node.numa.keys()):
        marks = _watermarks(inputs, number)
        if marks is None:
            findings.append(missing_input_finding(NAME, f"free memory of NUMA node {number}", SCOPE, f"numa{number}"))
            continue
        if new:
            scans = _scanned_pages(node, number)
            if scans is not None:
                scanned[number] = scans
            reclaiming = scans is not None and scans > state.scanned.get(number, scans)
            rounds[number] = _count_cycle(state.rounds.get(number, 0), marks, config, reclaiming=reclaiming)
        finding = _finding(inputs, number, marks, rounds[number], config)
        # The victim for this reading may be gone by now, which the reading does not show.
        findings.append(finding if new else msgspec.structs.replace(finding, candidates=()))
    if not findings:
        findings.append(missing_input_finding(NAME, "every NUMA node", SCOPE))
    # The worst node first: each plugin evicts one pod per cycle.
    findings.sort(
        key=lambda findings: (findings.threshold.met is ThresholdMet.NOT_MET, _watermark_ratio(findings.threshold))
    )
    return tuple(findings), NumaMemoryPressureState(read_at_ns=node.files_read_at_ns, rounds=rounds, scanned=scanned)


def _watermark_ratio(threshold: EvictionThreshold) -> float:
    if not threshold.value or threshold.observed is None:
        return 1.0
    return threshold.observed / threshold.value


def _scanned_pages(node: NodeSample, number: int) -> int | None:
    """Return the pages scanned by direct reclaim and by kswapd, of that node if the probe counts them, else of all nodes."""
    direct = node.vmstat.get("pgscan_direct")
    kswapd = node.kswapd[number].scanned_pages if number in node.kswapd else node.vmstat.get("pgscan_kswapd")
    return None if direct is None or kswapd is None else direct + kswapd


def _watermarks(inputs: EvictionInputs, number: int) -> NumaWatermarks | None:
    node = inputs.snapshot.node
    zones = [zone for zone in node.zones if zone.node == number]
    numa = node.numa.get(number)
    if not zones or numa is None or not {"MemTotal", "Inactive(file)"} <= numa.meminfo.keys():
        return None
    # All zones together: the kernel takes from the next one before it begins to reclaim (mm/page_alloc.c, zonelists).
    free, kernel_low, kernel_min = (
        PAGE_BYTES * sum(pages) for pages in zip(*((zone.free, zone.low, zone.min) for zone in zones), strict=True)
    )
    total = numa.meminfo["MemTotal"]
    scale = min(total / REFERENCE_NODE_BYTES, 1.0)
    low = kernel_low + 256 * MIB * scale
    least = 4 * GIB * scale
    if numa.meminfo["Inactive(file)"] < max(least, low):
        low = max(least, low + GIB * scale)
    terminating_bytes = sum(numa_memory_bytes(inputs, pod, number) or 0.0 for pod in inputs.terminating_pods)
    return NumaWatermarks(free=free + terminating_bytes, low=low, min=kernel_min + GIB * scale, total=total)


def _count_cycle(before: int, marks: NumaWatermarks, config: NumaMemoryConfig, *, reclaiming: bool) -> int:
    if marks.free < marks.min:
        after = max(before + 1, config.any_rounds - config.fast_wait_rounds)
    elif marks.free < marks.low:
        after = before + 1
        if reclaiming and before >= MIN_ROUNDS_FOR_KSWAPD:
            after += 1
    else:
        after = before - 1
    # The count is limited: a larger one would take as long to fall again.
    return max(min(after, config.any_rounds), 0)


def _finding(
    inputs: EvictionInputs, number: int, marks: NumaWatermarks, rounds: int, config: NumaMemoryConfig
) -> EvictionFinding:
    critical = marks.free < marks.min
    short = critical or marks.free < marks.low  # on small NUMA nodes the raised minimum may exceed the low watermark
    any_level = short and rounds >= config.any_rounds
    met = (
        ThresholdMet.HARD
        if critical or (short and rounds > config.reclaimed_rounds) or any_level
        else ThresholdMet.NOT_MET
    )
    bound = marks.min if critical else marks.low
    text = (
        f"NUMA node {number} has {format_bytes(marks.free)} of free memory, {'below' if short else 'not below'} its "
        f"{'min' if critical else 'low'} watermark of {format_bytes(bound)}; its count of readings below a watermark is "
        f"{rounds}. Reclaimed pods are evicted above {config.reclaimed_rounds}, all pods from {config.any_rounds} on."
    )
    candidates: tuple[EvictionCandidate, ...] = ()
    if met is ThresholdMet.HARD:
        candidates = rank_by_memory(
            inputs.running_pods,
            lambda pod: numa_memory_bytes(inputs, pod, number),
            lambda pod: _grace_s(pod, config),
            any_level=any_level,
            min_bytes=config.victim_ratio * marks.total,
        )
    facts = {
        "numa": number,
        "free_bytes": marks.free,
        "low_bytes": marks.low,
        "min_bytes": marks.min,
        "rounds": rounds,
    }
    return EvictionFinding(
        threshold=make_threshold(
            NAME,
            met,
            SCOPE,
            subject=f"numa{number}",
            value=bound,
            observed=marks.free,
            below=True,
            text=text,
            inputs=facts,
        ),
        candidates=candidates,
        kind="memory",
    )


def _grace_s(pod: Pod, config: NumaMemoryConfig) -> float | None:
    return config.reclaimed_grace_s if pod.qos is QoSLevel.RECLAIMED else config.grace_s

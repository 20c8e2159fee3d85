"""numa-memory-pressure-eviction-plugin: a NUMA node whose free memory stays below the kernel's marks. Pure.

The kernel's own marks are raised: below the minimum plus 1 GiB a reclaimed pod leaves at once, and a round later any pod may
have to. Below the low mark plus 256 MiB rounds are counted: a reclaimed pod leaves after six, any after twelve. Where little
page cache is left to drop (less than 4 GiB), the low mark is 4 GiB at least. Katalyst's numbers are for large nodes: NUMA
nodes below 32 GiB have a part of them that is in proportion, or they would always be under pressure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from agent.config.eviction_memory import NumaMemoryConfig
from agent.eviction.judgement import Candidate, Finding, judged, missing
from agent.eviction.ranking import by_memory
from agent.eviction.situation import PAGE_BYTES, Situation, numa_bytes
from api.evictions import Met, Threshold, size
from api.pods import Pod
from api.qos import QoSLevel
from api.samples import NodeSample

NAME = "numa-memory-pressure-eviction-plugin"
SCOPE = "NumaMemory"
MIB, GIB = 1 << 20, 1 << 30
FULL_SIZE = 32 * GIB
KSWAPD_AFTER = 2
"""Rounds below the low mark, after which reclaim at work counts for another round."""


class NumaMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of each NUMA node."""

    read_at_ns: int | None = None
    """When the reading was made that was counted last, CLOCK_REALTIME: each counts once, however often it is looked at."""
    rounds: Mapping[int, int] = {}
    """Below the low mark, less those above it since."""
    scanned: Mapping[int, int] = {}
    """Pages that reclaim had looked at by then."""


class Marks(NamedTuple):
    """In bytes."""

    free: float
    low: float
    min: float
    total: float


def judge(situation: Situation, memory: NumaMemory, config: NumaMemoryConfig) -> tuple[tuple[Finding, ...], NumaMemory]:
    """One finding for each NUMA node. Rounds of a node that is not known begin anew."""
    node = situation.snapshot.node
    if not situation.node_files_fresh:
        return (missing(NAME, "/proc/zoneinfo", SCOPE),), NumaMemory()
    new = node.files_read_at_ns != memory.read_at_ns
    rounds, scanned = ({}, {}) if new else (dict(memory.rounds), dict(memory.scanned))
    findings = []
    for number in sorted({zone.node for zone in node.zones} | node.numa.keys()):
        marks = _marks(situation, number)
        if marks is None:
            findings.append(missing(NAME, f"free memory of NUMA node {number}", SCOPE, f"numa{number}"))
            continue
        if new:
            scans = _scans(node, number)
            if scans is not None:
                scanned[number] = scans
            reclaiming = scans is not None and scans > memory.scanned.get(number, scans)
            rounds[number] = _counted(memory.rounds.get(number, 0), marks, config, reclaiming=reclaiming)
        finding = _finding(situation, number, marks, rounds[number], config)
        # Who left for this reading may be gone by now, and the reading does not tell.
        findings.append(finding if new else msgspec.structs.replace(finding, candidates=()))
    if not findings:
        findings.append(missing(NAME, "every NUMA node", SCOPE))
    # The worst node first: of one plugin one pod leaves in a round.
    findings.sort(key=lambda found: (found.threshold.met is Met.NOT_MET, _depth(found.threshold)))
    return tuple(findings), NumaMemory(read_at_ns=node.files_read_at_ns, rounds=rounds, scanned=scanned)


def _depth(threshold: Threshold) -> float:
    if not threshold.value or threshold.observed is None:
        return 1.0
    return threshold.observed / threshold.value


def _scans(node: NodeSample, number: int) -> int | None:
    """Pages that reclaim has looked at: in the background on that node where the probe tells, else on all; and direct."""
    direct = node.vmstat.get("pgscan_direct")
    kswapd = node.kswapd[number].scanned_pages if number in node.kswapd else node.vmstat.get("pgscan_kswapd")
    return None if direct is None or kswapd is None else direct + kswapd


def _marks(situation: Situation, number: int) -> Marks | None:
    node = situation.snapshot.node
    zones = [zone for zone in node.zones if zone.node == number]
    numa = node.numa.get(number)
    if not zones or numa is None or not {"MemTotal", "Inactive(file)"} <= numa.meminfo.keys():
        return None
    # All zones together: the kernel takes from the next one before it begins to reclaim (mm/page_alloc.c, zonelists).
    free, kernel_low, kernel_min = (
        PAGE_BYTES * sum(pages) for pages in zip(*((zone.free, zone.low, zone.min) for zone in zones), strict=True)
    )
    total = numa.meminfo["MemTotal"]
    scale = min(total / FULL_SIZE, 1.0)
    low = kernel_low + 256 * MIB * scale
    least = 4 * GIB * scale
    if numa.meminfo["Inactive(file)"] < max(least, low):
        low = max(least, low + GIB * scale)
    going = sum(numa_bytes(situation, pod, number) or 0.0 for pod in situation.going)
    return Marks(free=free + going, low=low, min=kernel_min + GIB * scale, total=total)


def _counted(before: int, marks: Marks, config: NumaMemoryConfig, *, reclaiming: bool) -> int:
    if marks.free < marks.min:
        after = max(before + 1, config.any_rounds - config.fast_wait_rounds)
    elif marks.free < marks.low:
        after = before + 1
        if reclaiming and before >= KSWAPD_AFTER:
            after += 1
    else:
        after = before - 1
    # More than enough for any pod is not remembered: it would take as long to forget.
    return max(min(after, config.any_rounds), 0)


def _finding(situation: Situation, number: int, marks: Marks, rounds: int, config: NumaMemoryConfig) -> Finding:
    critical = marks.free < marks.min
    short = critical or marks.free < marks.low  # of small zones the minimum, once raised, is the higher one
    any_level = short and rounds >= config.any_rounds
    met = Met.HARD if critical or (short and rounds > config.reclaimed_rounds) or any_level else Met.NOT_MET
    bound = marks.min if critical else marks.low
    text = (
        f"NUMA node {number} has {size(marks.free)} free, {'below' if short else 'not below'} the "
        f"{'minimum' if critical else 'low mark'} of {size(bound)}, counted {rounds} rounds; "
        f"above {config.reclaimed_rounds} reclaimed pods leave, from {config.any_rounds} on any."
    )
    candidates: tuple[Candidate, ...] = ()
    if met is Met.HARD:
        candidates = by_memory(
            situation.staying,
            lambda pod: numa_bytes(situation, pod, number),
            lambda pod: _grace(pod, config),
            any_level=any_level,
            least=config.victim_ratio * marks.total,
        )
    inputs = {
        "numa": number,
        "free_bytes": marks.free,
        "low_bytes": marks.low,
        "min_bytes": marks.min,
        "rounds": rounds,
    }
    return Finding(
        threshold=judged(
            NAME,
            met,
            SCOPE,
            subject=f"numa{number}",
            value=bound,
            observed=marks.free,
            below=True,
            text=text,
            inputs=inputs,
        ),
        candidates=candidates,
        kind="memory",
    )


def _grace(pod: Pod, config: NumaMemoryConfig) -> float | None:
    return config.reclaimed_grace_s if pod.qos is QoSLevel.RECLAIMED else config.grace_s

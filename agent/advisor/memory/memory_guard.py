"""Detects memory pressure of the node and its NUMA nodes, and limits reclaimed pods together (memory guard).
Critical is the larger of the configured minimum and twice kswapd's watermark: below it page cache is dropped.
The limit of a reclaim root is its use plus what is free above the critical watermark. It shrinks at once, grows
in steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from mmap import PAGESIZE
from typing import NamedTuple

from agent.advisor.memory.memory_inputs import (
    InputMissing,
    MemoryInputs,
    format_bytes,
    node_meminfo,
    node_memory_bytes,
    numa_meminfo,
    reclaimable_numa_nodes,
    reclaimed_bytes_by_numa,
    watermark_scale_factor,
    zone_low_bytes,
)
from agent.config.memory import MemoryConfig
from api.advice import KnobRequest, MemoryCondition, MemoryPressure
from api.knobs import Knob, Reason

_WATERMARK_SCALE = 10_000


def node_condition(inputs: MemoryInputs, config: MemoryConfig) -> MemoryCondition:
    """The state of the node as a whole."""
    snapshot = inputs.snapshot
    try:
        total, count = node_memory_bytes(snapshot), max(len(snapshot.topology.numa_nodes), 1)
        least = config.critical_bytes(total // count) * count
        return _memory_condition(
            "the node", node_meminfo(snapshot, "MemFree"), total, least, watermark_scale_factor(snapshot)
        )
    except InputMissing as missing:
        return _unknown_condition("the node", missing)


def numa_conditions(inputs: MemoryInputs, config: MemoryConfig) -> dict[int, MemoryCondition]:
    """The state of every NUMA node."""
    return {numa: _numa_condition(inputs, config, numa) for numa in inputs.snapshot.topology.numa_nodes}


def _numa_condition(inputs: MemoryInputs, config: MemoryConfig, numa: int) -> MemoryCondition:
    snapshot, where = inputs.snapshot, f"NUMA node {numa}"
    try:
        total = numa_meminfo(snapshot, numa, "MemTotal", config.stale_s)
        free = numa_meminfo(snapshot, numa, "MemFree", config.stale_s)
        return _memory_condition(where, free, total, config.critical_bytes(total), watermark_scale_factor(snapshot))
    except InputMissing as missing:
        return _unknown_condition(where, missing)


def _memory_condition(where: str, free: int, total: int, least: int, scale: int) -> MemoryCondition:
    critical = max(float(least), 2 * total * scale / _WATERMARK_SCALE)
    if free < critical:
        state, rule, what = (
            MemoryPressure.DROP_CACHE,
            "memory_drop_cache",
            f"less than the {format_bytes(critical)} that it must",
        )
    elif free < 2 * critical:
        state, rule, what = MemoryPressure.TUNE_MEMCG, "memory_tune_memcg", f"less than twice {format_bytes(critical)}"
    else:
        state, rule, what = MemoryPressure.NO_RISK, "memory_no_risk", f"at least twice {format_bytes(critical)}"
    return MemoryCondition(
        state=state,
        target_bytes=max(round(2 * critical - free), 0),
        reason=Reason(
            rule=rule,
            text=f"{where[0].upper()}{where[1:]} has {format_bytes(free)} free, {what}.",
            threshold=critical,
            inputs={"free_bytes": free, "total_bytes": total, "min_critical_bytes": least, "scale_factor": scale},
        ),
    )


def _unknown_condition(where: str, missing: InputMissing) -> MemoryCondition:
    text = f"How short memory is on {where} is not known: {missing} is missing."
    verdict = Reason(rule="memory_pressure_unknown", text=text, inputs={"missing": str(missing)})
    return MemoryCondition(state=MemoryPressure.UNKNOWN, reason=verdict)


_MIN_GROWTH = 1.01
"""Free memory changes all the time; a limit that grows by less is not worth a write."""


class GuardResult(NamedTuple):
    """Limits of the reclaim roots and what to remember of them."""

    knob_requests: tuple[KnobRequest, ...]
    bytes: Mapping[str, int]
    reason: Reason


def limit_reclaimed_memory(situation: MemoryInputs, config: MemoryConfig, before: Mapping[str, int]) -> GuardResult:
    """What the reclaim root and those of NUMA nodes may use; `before` is what was asked for the last time."""
    roots = set(situation.roots)
    unseen = {root: size for root, size in before.items() if root not in situation.snapshot.cgroups}
    if not roots and unseen:
        text = f"{', '.join(sorted(unseen))} cannot be seen: the limit on reclaimed pods stays as it was."
        return GuardResult((), unseen, Reason(rule="memory_guard_unknown", text=text))
    if not roots:
        text = "No cgroup holds all reclaimed pods: nothing limits their memory together."
        if config.reclaim_root in situation.snapshot.cgroups:
            text = (
                f"A pod that is not reclaimed is below {config.reclaim_root} (memory.reclaimRoot): it is not limited."
            )
        elif config.reclaim_root:
            text = f"There is no cgroup {config.reclaim_root} (memory.reclaimRoot): nothing limits reclaimed pods together."
        return GuardResult((), {}, Reason(rule="memory_guard_no_root", text=text))
    if not config.guard.enable:
        verdict = Reason(rule="memory_guard_disabled", text="The memory guard is switched off: there is no limit.")
        wishes = [wish for root in sorted(roots) for wish in _limit_requests(root, None, config, verdict)]
        return GuardResult(tuple(wishes), {}, verdict)
    try:
        open_nodes = reclaimable_numa_nodes(situation)
        nodes = situation.snapshot.topology.numa_nodes
        if not nodes:
            raise InputMissing("the NUMA nodes of this machine")
        spares = {numa: spare_bytes(situation, config, numa) if numa in open_nodes else 0.0 for numa in nodes}
        limits = {
            root: _root_use_bytes(situation, config, root) + spares[numa]
            for numa, root in situation.numa_roots.items()
            if root and numa in spares
        }
        if situation.root.path:
            limits[situation.root.path] = _root_use_bytes(situation, config, situation.root.path) + sum(spares.values())
    except InputMissing as missing:
        text = f"Not known: {missing}. The limit on reclaimed pods stays as it was."
        verdict = Reason(rule="memory_guard_unknown", text=text, inputs={"missing": str(missing)})
        kept = {root: size for root, size in before.items() if root in roots}
        wishes = [wish for root, size in sorted(kept.items()) for wish in _limit_requests(root, size, config, verdict)]
        return GuardResult(tuple(wishes), unseen | kept, verdict)
    sizes_told = " and ".join(f"{format_bytes(size)} in {root}" for root, size in sorted(limits.items()))
    text = f"Reclaimed pods may use {sizes_told}: what is there and what is free beyond the critical watermark."
    inputs: dict[str, float | int | str | None] = {
        f"numa{numa}_spare_bytes": round(size) for numa, size in spares.items()
    }
    verdict = Reason(
        rule="memory_guard", text=text, threshold=config.guard.critical_watermark_scale_factor, inputs=inputs
    )
    # What a group is charged with beyond its pages on NUMA nodes, such as the kernel's own memory, cannot be limited away.
    floors = {root: _charged_bytes(situation, root) for root in limits}
    sizes = {root: _round_limit(max(size, floors[root]), before.get(root)) for root, size in limits.items()}
    wishes = [wish for root, size in sorted(sizes.items()) for wish in _limit_requests(root, size, config, verdict)]
    return GuardResult(tuple(wishes), unseen | sizes, verdict)


def spare_bytes(inputs: MemoryInputs, config: MemoryConfig, numa: int) -> float:
    """What may be taken of one NUMA node beyond what is in use there, in bytes. Raises Unknown."""
    snapshot = inputs.snapshot
    free = numa_meminfo(snapshot, numa, "MemFree", config.stale_s)
    least = config.critical_bytes(numa_meminfo(snapshot, numa, "MemTotal", config.stale_s))
    low = zone_low_bytes(snapshot, numa, config.stale_s) * config.guard.critical_watermark_scale_factor
    return max(free - max(float(least), low), 0.0)


def _root_use_bytes(inputs: MemoryInputs, config: MemoryConfig, root: str) -> float:
    """What is in that cgroup, wherever it is: a limit below it would have the kernel kill somebody. Raises Unknown."""
    return float(sum(reclaimed_bytes_by_numa(inputs.snapshot, root, (), config.stale_s).values()))


def _charged_bytes(inputs: MemoryInputs, root: str) -> int:
    sample = inputs.snapshot.cgroups.get(root)
    return 0 if sample is None else sample.memory_bytes or 0


def _round_limit(size: float, before: int | None) -> int:
    if before is not None and before <= size < before * _MIN_GROWTH:
        return before
    return -(-int(size) // PAGESIZE) * PAGESIZE


def _limit_requests(
    root: str, size: int | None, config: MemoryConfig, reason: Reason
) -> tuple[KnobRequest, KnobRequest]:
    high = "max" if size is None else str(int(size * config.guard.high_ratio) // PAGESIZE * PAGESIZE)
    return (
        KnobRequest(cgroup=root, knob=Knob.MEMORY_MAX, value="max" if size is None else str(size), reason=reason),
        KnobRequest(cgroup=root, knob=Knob.MEMORY_HIGH, value=high, reason=reason),
    )

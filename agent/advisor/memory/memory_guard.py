"""Detects memory pressure of the node and its NUMA nodes, and limits reclaimed pods together (memory guard).
Critical is the larger of the configured minimum and twice kswapd's watermark: below it page cache is dropped.
The limit of a reclaim root is its use plus what is free above the critical watermark. A root without a reclaimed
container has no limit. A limit is not written if it changes by less than a tenth of the free memory above the watermark.
"""

from __future__ import annotations

from collections.abc import Mapping
from mmap import PAGESIZE
from typing import NamedTuple

from agent.advisor.memory.memory_inputs import (
    InputMissing,
    MemoryInputs,
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
from api.knobs import Knob, Reason, ReasonInputs
from api.quantity import format_bytes

_WATERMARK_SCALE = 10_000


def node_condition(inputs: MemoryInputs, config: MemoryConfig) -> MemoryCondition:
    """Return the memory pressure of the whole node."""
    snapshot = inputs.snapshot
    try:
        total, count = node_memory_bytes(snapshot), max(len(snapshot.topology.numa_nodes), 1)
        minimum = config.critical_bytes(total // count) * count
        return _memory_condition(
            "the node", node_meminfo(snapshot, "MemFree"), total, minimum, watermark_scale_factor(snapshot)
        )
    except InputMissing as missing:
        return _unknown_condition("the node", missing)


def numa_conditions(inputs: MemoryInputs, config: MemoryConfig) -> dict[int, MemoryCondition]:
    """Return the memory pressure of every NUMA node."""
    return {numa: _numa_condition(inputs, config, numa) for numa in inputs.snapshot.topology.numa_nodes}


def _numa_condition(inputs: MemoryInputs, config: MemoryConfig, numa: int) -> MemoryCondition:
    snapshot, place = inputs.snapshot, f"NUMA node {numa}"
    try:
        total = numa_meminfo(snapshot, numa, "MemTotal", config.stale_s)
        free = numa_meminfo(snapshot, numa, "MemFree", config.stale_s)
        return _memory_condition(place, free, total, config.critical_bytes(total), watermark_scale_factor(snapshot))
    except InputMissing as missing:
        return _unknown_condition(place, missing)


def _memory_condition(place: str, free: int, total: int, minimum: int, scale: int) -> MemoryCondition:
    critical = max(float(minimum), 2 * total * scale / _WATERMARK_SCALE)
    if free < critical:
        state, relation = MemoryPressure.DROP_CACHE, f"less than the critical {format_bytes(critical)}"
    elif free < 2 * critical:
        state, relation = MemoryPressure.TUNE_MEMCG, f"less than twice {format_bytes(critical)}"
    else:
        state, relation = MemoryPressure.NO_RISK, f"at least twice {format_bytes(critical)}"
    return MemoryCondition(
        state=state,
        target_bytes=max(round(2 * critical - free), 0),
        reason=Reason(
            rule=f"memory_{state}",
            text=f"{place[0].upper()}{place[1:]} has {format_bytes(free)} free, {relation}.",
            threshold=critical,
            inputs={"free_bytes": free, "total_bytes": total, "min_critical_bytes": minimum, "scale_factor": scale},
        ),
    )


def _unknown_condition(place: str, missing: InputMissing) -> MemoryCondition:
    text = f"The memory pressure of {place} is not known: {missing} is missing."
    reason = Reason(rule="memory_pressure_unknown", text=text, inputs={"missing": str(missing)})
    return MemoryCondition(state=MemoryPressure.UNKNOWN, reason=reason)


_MIN_GROWTH = 1.01
"""Minimum growth factor of a limit: a smaller change is not worth a write."""
_NOISE_RATIO = 0.1
"""Part of the free memory above the watermark by which a limit may be wrong. Free memory of an idle node changes by some
percent a minute; the nearer the watermark is, the more exact the limit becomes, and at the watermark it shrinks at once."""


class GuardResult(NamedTuple):
    """Limits of the reclaim roots, and the state for the next cycle."""

    knob_requests: tuple[KnobRequest, ...]
    bytes: Mapping[str, int]
    reason: Reason


def limit_reclaimed_memory(inputs: MemoryInputs, config: MemoryConfig, before: Mapping[str, int]) -> GuardResult:
    """Return the limits of the reclaim roots of the node and of NUMA nodes; `before` are the previous limits."""
    roots = {root for root in inputs.roots if _has_member(inputs, root)}
    hidden = {root: size for root, size in before.items() if root not in inputs.snapshot.cgroups}
    if inputs.roots and not roots:
        text = f"Memory of {' and '.join(inputs.roots)} is not limited, because no reclaimed pod runs there."
        return GuardResult((), hidden, Reason(rule="memory_guard_no_pod", text=text))
    if not roots and hidden:
        text = f"{', '.join(sorted(hidden))} cannot be read: the memory limit of reclaimed pods stays as it is."
        return GuardResult((), hidden, Reason(rule="memory_guard_unknown", text=text))
    if not roots:
        text = "No cgroup contains all reclaimed pods: their total memory is not limited."
        if config.reclaim_root in inputs.snapshot.cgroups:
            text = (
                f"{config.reclaim_root} (memory.reclaimRoot) contains a pod that is not reclaimed: it is not limited."
            )
        elif config.reclaim_root:
            text = f"There is no cgroup {config.reclaim_root} (memory.reclaimRoot)"
            text += ": the total memory of reclaimed pods is not limited."
        return GuardResult((), {}, Reason(rule="memory_guard_no_root", text=text))
    if not config.guard.enable:
        reason = Reason(rule="memory_guard_disabled", text="The memory guard is disabled: there is no limit.")
        return GuardResult(_limit_requests(dict.fromkeys(roots), config, reason), {}, reason)
    try:
        reclaimable = reclaimable_numa_nodes(inputs)
        nodes = inputs.snapshot.topology.numa_nodes
        if not nodes:
            raise InputMissing("the NUMA nodes of this machine")
        spares = {numa: spare_bytes(inputs, config, numa) if numa in reclaimable else 0.0 for numa in nodes}
        limits = {
            root: _root_use_bytes(inputs, config, root) + spares[numa]
            for numa, root in inputs.numa_roots.items()
            if root in roots and numa in spares
        }
        if inputs.root.path in roots:
            limits[inputs.root.path] = _root_use_bytes(inputs, config, inputs.root.path) + sum(spares.values())
    except InputMissing as missing:
        text = f"Not known: {missing}. The memory limit of reclaimed pods stays as it is."
        reason = Reason(rule="memory_guard_unknown", text=text, inputs={"missing": str(missing)})
        retained = {root: size for root, size in before.items() if root in roots}
        return GuardResult(_limit_requests(retained, config, reason), hidden | retained, reason)
    listed = " and ".join(f"{format_bytes(size)} in {root}" for root, size in sorted(limits.items()))
    text = f"Reclaimed pods may use {listed}: their use plus what is free above the critical watermark."
    reason_inputs: ReasonInputs = {f"numa{numa}_spare_bytes": round(size) for numa, size in spares.items()}
    reason = Reason(
        rule="memory_guard", text=text, threshold=config.guard.critical_watermark_scale_factor, inputs=reason_inputs
    )
    # A limit cannot reduce what is charged beyond pages on NUMA nodes, such as kernel memory.
    floors = {root: _charged_bytes(inputs, root) for root in limits}
    spare_by_root = {root: spares.get(numa, 0.0) for numa, root in inputs.numa_roots.items()}
    sizes = {
        root: _round_limit(max(size, floors[root]), before.get(root), spare_by_root.get(root, sum(spares.values())))
        for root, size in limits.items()
    }
    return GuardResult(_limit_requests(sizes, config, reason), hidden | sizes, reason)


def spare_bytes(inputs: MemoryInputs, config: MemoryConfig, numa: int) -> float:
    """Return the free memory of one NUMA node above the critical watermark, in bytes. Raises InputMissing."""
    snapshot = inputs.snapshot
    free = numa_meminfo(snapshot, numa, "MemFree", config.stale_s)
    minimum = config.critical_bytes(numa_meminfo(snapshot, numa, "MemTotal", config.stale_s))
    low = zone_low_bytes(snapshot, numa, config.stale_s) * config.guard.critical_watermark_scale_factor
    return max(free - max(float(minimum), low), 0.0)


def _root_use_bytes(inputs: MemoryInputs, config: MemoryConfig, root: str) -> float:
    """Memory of that cgroup on all NUMA nodes: a lower limit would make the kernel OOM-kill in it. Raises InputMissing."""
    return float(sum(reclaimed_bytes_by_numa(inputs.snapshot, root, (), config.stale_s).values()))


def _charged_bytes(inputs: MemoryInputs, root: str) -> int:
    sample = inputs.snapshot.cgroups.get(root)
    return 0 if sample is None else sample.memory_bytes or 0


def _has_member(inputs: MemoryInputs, root: str) -> bool:
    return any(cgroup.startswith(f"{root}/") for cgroup in inputs.root.members)


def _round_limit(size: float, before: int | None, spare: float) -> int:
    if before is not None:
        noise = spare * _NOISE_RATIO
        if before - noise <= size < before + max(noise, before * (_MIN_GROWTH - 1)):
            return before
    return -(-int(size) // PAGESIZE) * PAGESIZE


def _limit_requests(sizes: Mapping[str, int | None], config: MemoryConfig, reason: Reason) -> tuple[KnobRequest, ...]:
    """Requests of memory.max and memory.high by root; a size of None removes the limits."""
    requests: list[KnobRequest] = []
    for root, size in sorted(sizes.items()):
        high = "max" if size is None else str(int(size * config.guard.high_ratio) // PAGESIZE * PAGESIZE)
        values = {Knob.MEMORY_MAX: "max" if size is None else str(size), Knob.MEMORY_HIGH: high}
        requests += (KnobRequest(cgroup=root, knob=knob, value=value, reason=reason) for knob, value in values.items())
    return tuple(requests)

"""A limit on all reclaimed pods together, so that their growth never takes the last free memory: Katalyst's memory guard.

The limit of each cgroup is what is in it, and what is free beyond the critical watermark on each of its NUMA nodes of which
something may be lent: of all, or of the one that its pods are bound to.
Cgroups beside one another may all take the same free memory; the next reading, seconds later, sees what is left of it.

It shrinks at once and grows only by steps that are worth a write. Where an input is missing it stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from mmap import PAGESIZE
from typing import NamedTuple

from agent.advisor.memory.situation import Situation, Unknown, available_numa
from agent.advisor.memory.stats import human, numa_size, reclaimed_on_numa, zone_low_bytes
from agent.config.memory import MemoryConfig
from api.advice import Wish
from api.knobs import Knob, Verdict

_STEP = 1.01
"""Free memory changes all the time; a limit that grows by less is not worth a write."""


class Guarded(NamedTuple):
    """Limits of the reclaim roots and what to remember of them."""

    wishes: tuple[Wish, ...]
    bytes: Mapping[str, int]
    verdict: Verdict


def guard(situation: Situation, config: MemoryConfig, before: Mapping[str, int]) -> Guarded:
    """What the reclaim root and those of NUMA nodes may use; `before` is what was asked for the last time."""
    roots = set(situation.roots)
    unseen = {root: size for root, size in before.items() if root not in situation.snapshot.cgroups}
    if not roots and unseen:
        text = f"{', '.join(sorted(unseen))} cannot be seen: the limit on reclaimed pods stays as it was."
        return Guarded((), unseen, Verdict(rule="memory_guard_unknown", text=text))
    if not roots:
        text = "No cgroup holds all reclaimed pods: nothing limits their memory together."
        if config.reclaim_root in situation.snapshot.cgroups:
            text = (
                f"A pod that is not reclaimed is below {config.reclaim_root} (memory.reclaimRoot): it is not limited."
            )
        elif config.reclaim_root:
            text = f"There is no cgroup {config.reclaim_root} (memory.reclaimRoot): nothing limits reclaimed pods together."
        return Guarded((), {}, Verdict(rule="memory_guard_no_root", text=text))
    if not config.guard.enable:
        verdict = Verdict(rule="memory_guard_disabled", text="The memory guard is switched off: there is no limit.")
        wishes = [wish for root in sorted(roots) for wish in _wishes(root, None, config, verdict)]
        return Guarded(tuple(wishes), {}, verdict)
    try:
        open_nodes = available_numa(situation)
        nodes = situation.snapshot.topology.numa_nodes
        if not nodes:
            raise Unknown("the NUMA nodes of this machine")
        spares = {numa: spare(situation, config, numa) if numa in open_nodes else 0.0 for numa in nodes}
        limits = {
            root: _used(situation, config, root) + spares[numa]
            for numa, root in situation.numa_roots.items()
            if root and numa in spares
        }
        if situation.root.path:
            limits[situation.root.path] = _used(situation, config, situation.root.path) + sum(spares.values())
    except Unknown as missing:
        text = f"Not known: {missing}. The limit on reclaimed pods stays as it was."
        verdict = Verdict(rule="memory_guard_unknown", text=text, inputs={"missing": str(missing)})
        kept = {root: size for root, size in before.items() if root in roots}
        wishes = [wish for root, size in sorted(kept.items()) for wish in _wishes(root, size, config, verdict)]
        return Guarded(tuple(wishes), unseen | kept, verdict)
    sizes_told = " and ".join(f"{human(size)} in {root}" for root, size in sorted(limits.items()))
    text = f"Reclaimed pods may use {sizes_told}: what is there and what is free beyond the critical watermark."
    inputs: dict[str, float | int | str | None] = {
        f"numa{numa}_spare_bytes": round(size) for numa, size in spares.items()
    }
    verdict = Verdict(
        rule="memory_guard", text=text, threshold=config.guard.critical_watermark_scale_factor, inputs=inputs
    )
    # What a group is charged with beyond its pages on NUMA nodes, such as the kernel's own memory, cannot be limited away.
    floors = {root: _charged(situation, root) for root in limits}
    sizes = {root: _stepped(max(size, floors[root]), before.get(root)) for root, size in limits.items()}
    wishes = [wish for root, size in sorted(sizes.items()) for wish in _wishes(root, size, config, verdict)]
    return Guarded(tuple(wishes), unseen | sizes, verdict)


def spare(situation: Situation, config: MemoryConfig, numa: int) -> float:
    """What may be taken of one NUMA node beyond what is in use there, in bytes. Raises Unknown."""
    snapshot = situation.snapshot
    free = numa_size(snapshot, numa, "MemFree", config.stale_s)
    least = config.critical_bytes(numa_size(snapshot, numa, "MemTotal", config.stale_s))
    low = zone_low_bytes(snapshot, numa, config.stale_s) * config.guard.critical_watermark_scale_factor
    return max(free - max(float(least), low), 0.0)


def _used(situation: Situation, config: MemoryConfig, root: str) -> float:
    """What is in that cgroup, wherever it is: a limit below it would have the kernel kill somebody. Raises Unknown."""
    return float(sum(reclaimed_on_numa(situation.snapshot, root, (), config.stale_s).values()))


def _charged(situation: Situation, root: str) -> int:
    sample = situation.snapshot.cgroups.get(root)
    return 0 if sample is None else sample.memory_bytes or 0


def _stepped(size: float, before: int | None) -> int:
    if before is not None and before <= size < before * _STEP:
        return before
    return -(-int(size) // PAGESIZE) * PAGESIZE


def _wishes(root: str, size: int | None, config: MemoryConfig, verdict: Verdict) -> tuple[Wish, Wish]:
    high = "max" if size is None else str(int(size * config.guard.high_ratio) // PAGESIZE * PAGESIZE)
    return (
        Wish(cgroup=root, knob=Knob.MEMORY_MAX, value="max" if size is None else str(size), verdict=verdict),
        Wish(cgroup=root, knob=Knob.MEMORY_HIGH, value=high, verdict=verdict),
    )

"""A limit on all reclaimed pods together, so that their growth never takes the last free memory: Katalyst's memory guard.

The limit is what they use, and what is free beyond the critical watermark on each NUMA node of which something may be lent.
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
    roots = {situation.root.path, *situation.numa_roots.values()} - {""}
    if not roots:
        text = "No cgroup holds all reclaimed pods: nothing limits their memory together."
        return Guarded((), {}, Verdict(rule="memory_guard_no_root", text=text))
    if not config.guard.enable:
        verdict = Verdict(rule="memory_guard_disabled", text="The memory guard is switched off: there is no limit.")
        wishes = [wish for root in sorted(roots) for wish in _wishes(root, None, config, verdict)]
        return Guarded(tuple(wishes), {}, verdict)
    try:
        open_nodes = available_numa(situation)
        shares = {
            numa: share(situation, config, numa, lent=numa in open_nodes)
            for numa in situation.snapshot.topology.numa_nodes
        }
        if not shares:
            raise Unknown("the NUMA nodes of this machine")
    except Unknown as missing:
        text = f"Not known: {missing}. The limit on reclaimed pods stays as it was."
        verdict = Verdict(rule="memory_guard_unknown", text=text, inputs={"missing": str(missing)})
        kept = {root: size for root, size in before.items() if root in roots}
        wishes = [wish for root, size in sorted(kept.items()) for wish in _wishes(root, size, config, verdict)]
        return Guarded(tuple(wishes), kept, verdict)
    whole = sum(shares.values())
    text = f"Reclaimed pods may use {human(whole)}: what they have and what is free beyond the critical watermark."
    inputs: dict[str, float | int | str | None] = {f"numa{numa}_bytes": round(size) for numa, size in shares.items()}
    verdict = Verdict(
        rule="memory_guard", text=text, threshold=config.guard.critical_watermark_scale_factor, inputs=inputs
    )
    limits = {root: shares[numa] for numa, root in situation.numa_roots.items() if root and numa in shares}
    if situation.root.path:
        limits[situation.root.path] = whole
    # What a group is charged with beyond its pages on NUMA nodes, such as the kernel's own memory, cannot be limited away.
    floors = {root: _charged(situation, root) for root in limits}
    sizes = {root: _stepped(max(size, floors[root]), before.get(root)) for root, size in limits.items()}
    wishes = [wish for root, size in sorted(sizes.items()) for wish in _wishes(root, size, config, verdict)]
    return Guarded(tuple(wishes), sizes, verdict)


def share(situation: Situation, config: MemoryConfig, numa: int, *, lent: bool) -> float:
    """What reclaimed pods may use of one NUMA node, in bytes: no more than they have where nothing is lent. Raises Unknown.

    What they have there counts all the same: a limit below it would have the kernel kill them for it.
    """
    snapshot, root = situation.snapshot, situation.root
    own = situation.numa_roots.get(numa, "")
    used = reclaimed_on_numa(snapshot, root.path, root.members, config.stale_s).get(numa, 0)
    if own and not own.startswith(f"{root.path}/"):
        used += reclaimed_on_numa(snapshot, own, (), config.stale_s).get(numa, 0)
    if not lent:
        return float(used)
    free = numa_size(snapshot, numa, "MemFree", config.stale_s)
    least = config.critical_bytes(numa_size(snapshot, numa, "MemTotal", config.stale_s))
    low = zone_low_bytes(snapshot, numa, config.stale_s) * config.guard.critical_watermark_scale_factor
    return used + max(free - max(float(least), low), 0.0)


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

"""Attributes the run-queue latency of online containers to the cgroups that held the CPU meanwhile.
A reclaimed container that caused latency loses weight in the distribution of reclaimable CPU and regains it as
that grows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from agent.advisor.cpu_estimate import online_containers
from api.measurements import Blame
from api.rates import cgroups_by_container
from api.snapshot import Snapshot

MIN_WEIGHT_RATIO = 0.1
"""Of two reclaimed containers with the same request, the one that makes online pods wait keeps at least so much of a claim."""


class Interference(msgspec.Struct, frozen=True, kw_only=True):
    """Waits of one container between two snapshots by whoever had the CPU, in nanoseconds; own throttling is not among them."""

    total_ns: int
    by_reclaimed: Mapping[str, int]
    """By reclaimed container's cgroup."""
    other: str
    """Who of all others had it longest: a cgroup's path, or `higher scheduling classes`."""
    other_ns: int

    @property
    def reclaimed_ratio(self) -> float:
        """Part of the waits for which batch work had the CPU; nothing waited is nobody's doing."""
        return sum(self.by_reclaimed.values()) / self.total_ns if self.total_ns else 0.0


def attribute_latency(
    paths: Sequence[str], reclaimed: Collection[str], previous: Snapshot, current: Snapshot
) -> Interference | None:
    """Waits of these cgroups together, a container's own and those below it; None where some of it is not known."""
    total, by_reclaimed, others = 0, dict[str, int](), dict[str, int]()
    for path in paths:
        before, now = previous.cgroups.get(path), current.cgroups.get(path)
        if now is None or now.blame is None:
            return None
        known = before.blame if before is not None and before.id == now.id else None
        if known is None and before is not None:
            return None
        first = known or Blame(by_cgroup={}, throttled_ns=0, higher_class_ns=0, other_ns=0)
        classes = max(now.blame.higher_class_ns - first.higher_class_ns, 0)
        others["higher scheduling classes"] = others.get("higher scheduling classes", 0) + classes
        total += classes + max(now.blame.other_ns - first.other_ns, 0)
        for culprit, ns in now.blame.by_cgroup.items():
            spent = max(ns - first.by_cgroup.get(culprit, 0), 0)
            total += spent
            owner = _find_reclaimed_owner(culprit, reclaimed)
            share = others if owner is None else by_reclaimed
            share[owner or culprit] = share.get(owner or culprit, 0) + spent
    worst = max(others, key=lambda name: (others[name], name), default="")
    return Interference(total_ns=total, by_reclaimed=by_reclaimed, other=worst, other_ns=others.get(worst, 0))


def _find_reclaimed_owner(path: str, reclaimed: Collection[str]) -> str | None:
    """The reclaimed container that a cgroup is, or is below of."""
    while path:
        if path in reclaimed:
            return path
        path = path.rpartition("/")[0]
    return None


def update_weights(
    before: Mapping[str, float],
    reclaimed: Collection[str],
    blames: Mapping[str, Interference | None],
    *,
    shrink_ratio: float,
    recovered_ratio: float,
) -> dict[str, float]:
    """What part of its claim each reclaimed container keeps when lent CPU is shared out; those with all of it are left out.

    What is taken back, `taken_ratio` of what was lent, is taken from each by its part in the waits. When lending grows, each
    has `healed` given back.
    """
    guilt = dict.fromkeys(reclaimed, 0)
    for found in blames.values():
        for cgroup, ns in found.by_reclaimed.items() if found is not None else ():
            guilt[cgroup] += ns
    most = sum(guilt.values())
    kept = {}
    for cgroup, ns in guilt.items():
        claim = min(before.get(cgroup, 1.0) + recovered_ratio, 1.0)
        if most:
            claim = max(claim * (1 - shrink_ratio * ns / most), MIN_WEIGHT_RATIO)
        if claim < 1.0:
            kept[cgroup] = claim
    return kept


def measure_interference(
    containers: Iterable[str], reclaimed: Collection[str], snapshot: Snapshot, previous: Snapshot | None
) -> dict[str, Interference | None]:
    """Who had the CPU while these online containers waited, since the previous round; None where nobody knows."""
    found = dict.fromkeys(containers)
    if not found or previous is None:
        return dict(found)
    inside = cgroups_by_container(snapshot.cgroups, [c.cgroup for c in online_containers(snapshot)])
    return {c: attribute_latency(inside[c], reclaimed, previous, snapshot) if c in inside else None for c in found}

"""Attributes the run-queue latency of online containers to the cgroups that held the CPU meanwhile.
A reclaimed container that caused latency loses weight in the distribution of reclaimable CPU and regains it as
that grows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from agent.advisor.cpu_estimate import online_containers
from api.rates import cgroups_by_container
from api.snapshot import Blame, Snapshot

MIN_WEIGHT_RATIO = 0.1
"""Minimum weight of an aggressor, relative to a reclaimed container with the same request that caused no latency."""


class Interference(msgspec.Struct, frozen=True, kw_only=True):
    """Run-queue latency of one container between two snapshots, by the cgroup that had the CPU; own throttling is
    excluded."""

    total_ns: int
    by_reclaimed: Mapping[str, int]
    """By reclaimed container's cgroup."""
    other: str
    """The other aggressor with the largest part: the path of a cgroup, or `higher scheduling classes`."""
    other_ns: int

    @property
    def reclaimed_ratio(self) -> float:
        """Part of the latency during which reclaimed containers had the CPU; 0 without latency."""
        return sum(self.by_reclaimed.values()) / self.total_ns if self.total_ns else 0.0


def attribute_latency(
    paths: Sequence[str], reclaimed: Collection[str], previous: Snapshot, current: Snapshot
) -> Interference | None:
    """Return the latency of these cgroups by aggressor, a container's own and its descendants'; None if a part is
    missing."""
    total, by_reclaimed, others = 0, dict[str, int](), dict[str, int]()
    for path in paths:
        before, now = previous.cgroups.get(path), current.cgroups.get(path)
        if now is None or now.blame is None:
            return None
        earlier = before.blame if before is not None and before.id == now.id else None
        if earlier is None and before is not None:
            return None
        first = earlier or Blame(by_cgroup={}, throttled_ns=0, higher_class_ns=0, other_ns=0)
        classes = max(now.blame.higher_class_ns - first.higher_class_ns, 0)
        others["higher scheduling classes"] = others.get("higher scheduling classes", 0) + classes
        total += classes + max(now.blame.other_ns - first.other_ns, 0)
        for aggressor, ns in now.blame.by_cgroup.items():
            spent = max(ns - first.by_cgroup.get(aggressor, 0), 0)
            total += spent
            owner = _find_reclaimed_owner(aggressor, reclaimed)
            share = others if owner is None else by_reclaimed
            share[owner or aggressor] = share.get(owner or aggressor, 0) + spent
    worst = max(others, key=lambda name: (others[name], name), default="")
    return Interference(total_ns=total, by_reclaimed=by_reclaimed, other=worst, other_ns=others.get(worst, 0))


def _find_reclaimed_owner(path: str, reclaimed: Collection[str]) -> str | None:
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
    """Return the factor of each reclaimed container's share of reclaimable CPU; full shares are omitted.

    A shrink by `shrink_ratio` is charged to containers by their part of the latency. Growth gives back
    `recovered_ratio`.
    """
    latency_ns = dict.fromkeys(reclaimed, 0)
    for interference in blames.values():
        for cgroup, ns in interference.by_reclaimed.items() if interference is not None else ():
            latency_ns[cgroup] += ns
    total = sum(latency_ns.values())
    weights = {}
    for cgroup, ns in latency_ns.items():
        weight = min(before.get(cgroup, 1.0) + recovered_ratio, 1.0)
        if total:
            weight = max(weight * (1 - shrink_ratio * ns / total), MIN_WEIGHT_RATIO)
        if weight < 1.0:
            weights[cgroup] = weight
    return weights


def measure_interference(
    containers: Iterable[str], reclaimed: Collection[str], snapshot: Snapshot, previous: Snapshot | None
) -> dict[str, Interference | None]:
    """Attribute the latency of these online containers since the previous cycle; None for a container that is not
    measured."""
    suspects = dict.fromkeys(containers)
    if not suspects or previous is None:
        return dict(suspects)
    inside = cgroups_by_container(snapshot.cgroups, [c.cgroup for c in online_containers(snapshot)])
    return {c: attribute_latency(inside[c], reclaimed, previous, snapshot) if c in inside else None for c in suspects}

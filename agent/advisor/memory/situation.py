"""What memory advice is judged by, besides settings and memory of past rounds, and what is not known of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from agent.config.memory import OffloadConfig
from api.pods import Pod
from api.samples import Snapshot

NS_PER_S = 1_000_000_000


class Unknown(Exception):
    """An input is missing; the text names it."""


class ReclaimRoot(msgspec.Struct, frozen=True, kw_only=True):
    """Where reclaimed pods are kept together."""

    path: str = ""
    """The cgroup above all of them; empty where there is none, and then nothing can limit them together."""
    members: tuple[str, ...] = ()
    """Cgroups that make up its use where there is no such cgroup: those of the reclaimed containers."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known in a round."""

    snapshot: Snapshot
    now_ns: int
    """CLOCK_MONOTONIC."""
    root: ReclaimRoot = ReclaimRoot()
    numa_roots: Mapping[int, str] = {}
    """By NUMA node: the cgroup above the reclaimed pods that are bound to it."""
    enable_reclaim: bool = True
    not_reclaimable: Collection[str] = ()
    """Pods, `namespace/name`, that lend nothing although the node lends."""
    ramping: Collection[str] = ()
    """Cgroups of containers that are still taken at their requests."""
    forbidden_numa: tuple[int, ...] = ()
    """NUMA nodes of which nothing may be lent (disableReclaimSharePools)."""
    profiles: Mapping[str, OffloadConfig] = {}
    """Settings of offloading by pod, from its service profile."""

    @property
    def roots(self) -> tuple[str, ...]:
        """Cgroups above reclaimed pods alone: of all of them, and of those that are bound to one NUMA node."""
        return tuple(sorted({self.root.path, *self.numa_roots.values()} - {""}))

    def lends(self, pod: Pod) -> bool:
        """Whether what the pod leaves idle may be lent."""
        return self.enable_reclaim and pod.key not in self.not_reclaimable


def available_numa(situation: Situation) -> tuple[int, ...]:
    """NUMA nodes of which something may be lent: not those that a pod has for itself and does not lend.

    Raises Unknown where it is not known which ones that are.
    """
    taken = set(situation.forbidden_numa)
    for pod in situation.snapshot.pods:
        if pod.enhancements.numa_exclusive and pod.qos.online and not situation.lends(pod):
            if not pod.bound_numa:
                raise Unknown(f"the NUMA nodes that {pod.key} has for itself")
            taken.update(pod.bound_numa)
    return tuple(numa for numa in situation.snapshot.topology.numa_nodes if numa not in taken)


def elapsed(now_ns: int, then_ns: int | None, seconds: float) -> bool:
    """Whether so much time has passed. A time in the future is of an earlier boot: that one has passed."""
    return then_ns is None or not 0 <= now_ns - then_ns < seconds * NS_PER_S

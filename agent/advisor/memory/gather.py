"""From a snapshot, and what the advisor remembers, to what memory advice is judged by."""

from __future__ import annotations

import re
from collections.abc import Collection
from posixpath import dirname

import msgspec

from agent.advisor.headroom.kept import lent_nodes
from agent.advisor.memory.dying import is_named
from agent.advisor.memory.situation import ReclaimRoot, Situation
from agent.advisor.state import Memory
from agent.config import Config
from agent.config.memory import MemoryConfig, OffloadConfig
from api.pods import Pod
from api.qos import QoSLevel
from api.samples import Snapshot

_CLASS = re.compile(r"(?:.*-)?(?:kubepods|burstable|besteffort)(?:\.slice)?")
"""Names of such cgroups, with cgroupfs and with systemd."""


def situation_of(snapshot: Snapshot, advisor: Memory, config: Config, now_ns: int) -> Situation:
    """What is known in this round; `advisor` is what CPU advice remembers after it."""
    root = _root(snapshot, config.memory.reclaim_root)
    found = {numa: f"{root}-{numa}" for numa in snapshot.topology.numa_nodes} if root else {}
    members = tuple(c.cgroup for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED for c in pod.containers)
    return Situation(
        snapshot=snapshot,
        now_ns=now_ns,
        root=ReclaimRoot(path=root, members=members),
        numa_roots={numa: path for numa, path in found.items() if _root(snapshot, path)},
        enable_reclaim=config.advisor.enable_reclaim,
        not_reclaimable=frozenset(pod.key for pod in snapshot.pods if not pod.profile.lends),
        profiles={pod.key: _offload(pod) for pod in snapshot.pods if pod.profile.memory_offloading},
        ramping=frozenset(path for path, known in advisor.containers.items() if known.ramping),
        forbidden_numa=tuple(lent_nodes(snapshot, advisor, config.advisor).refused),
    )


def _offload(pod: Pod) -> OffloadConfig:
    """What its service profile says of offloading; it was checked where the pod came in."""
    return msgspec.convert(pod.profile.memory_offloading, OffloadConfig)


def named(situation: Situation, config: MemoryConfig) -> frozenset[str]:
    """Cgroups that are no container's and that the settings allow to be changed; also where they cannot be seen now."""
    snapshot, root = situation.snapshot, config.reclaim_root.rstrip("/")
    asked = {root, *(f"{root}-{numa}" for numa in snapshot.topology.numa_nodes)} if root else set()
    roots = {*situation.roots, *(asked - snapshot.cgroups.keys())}
    dying = (path for path in snapshot.cgroups if is_named(path, config)) if config.offloading.dying else ()
    return frozenset(roots.union(config.offloading.cgroups, dying))


def _root(snapshot: Snapshot, path: str) -> str:
    """That cgroup, where it is there and no pod is in it that is not reclaimed: its limit would be theirs too."""
    path = path.rstrip("/")
    if path not in snapshot.cgroups or any(_is_below(pod, path) for pod in snapshot.pods if _is_other(pod)):
        return ""
    return path


def of_the_kubelet(root: str) -> bool:
    """Whether it is the kubelet's own cgroup above pods. The kubelet writes shares there, at its start and while it runs; the
    kernel refuses shares of an idle group (kernel/sched/fair.c, sched_group_set_shares), and a kubelet that was refused does
    not start."""
    return _CLASS.fullmatch(root.rpartition("/")[2]) is not None


def nobody_else(snapshot: Snapshot, root: str) -> bool:
    """Whether all that runs below it is of listed reclaimed pods: what makes it give way would hold back whoever else is there.

    What lies beside a container in its pod's cgroup (the sandbox) is the pod's too. A cgroup whose tasks cannot be counted
    has some.
    """
    inside = [path for path in snapshot.cgroups if path.startswith(f"{root}/")]
    listed = (c.cgroup for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED for c in pod.containers)
    homes = {above if (above := dirname(path)).startswith(f"{root}/") else path for path in listed}
    leaves = set(inside) - {dirname(path) for path in inside}
    return all(snapshot.cgroups[path].threads == 0 or _is_in(path, homes, root) for path in leaves)


def _is_in(path: str, homes: Collection[str], root: str) -> bool:
    while len(path) > len(root):
        if path in homes:
            return True
        path = dirname(path)
    return False


def _is_other(pod: Pod) -> bool:
    return pod.qos is not QoSLevel.RECLAIMED


def _is_below(pod: Pod, path: str) -> bool:
    return any(container.cgroup == path or container.cgroup.startswith(f"{path}/") for container in pod.containers)

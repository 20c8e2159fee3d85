"""What the runtime asks about, as the rest of the agent knows it: a pod with one container that is to be, and its place."""

from __future__ import annotations

from collections.abc import Callable
from posixpath import dirname
from typing import Any

from agent.hierarchy import Hierarchy
from agent.nri.resources import PERIOD_US, Around
from agent.qrm.paths import below, effective
from agent.qrm.places import CFS_PERIOD, CFS_QUOTA
from agent.sense.cgroup_paths import plain, told_path
from agent.sense.podjoin import pod_of_kubelet
from agent.sense.podlist import Amounts, ContainerSpec, KubePod, Metadata, Spec
from agent.sense.podspec import Door
from api.pods import Pod

LEAST_SHARES, SHARES_PER_CPU, MILLI = 2, 1024, 1000
_LISTS = {True: ("cpuset.cpus.effective", "cpuset.mems.effective"), False: ("cpuset.cpus", "cpuset.mems")}
Listed = Callable[[str], KubePod | None]
"""What the kubelet has said of the pod with that uid, if it has."""


def cgroup_of(container: Any) -> str:
    """Where it will be. Raises ValueError where the runtime does not say so from the root on."""
    return told_path(container.linux.cgroups_path)


def pod_of(request: Any, cgroup: str, listed: Listed, door: Door) -> Pod:
    """The pod with that one container: as the kubelet lists it, else as the runtime tells it, which has no resources but CPU
    and memory, and no priority. Raises ValueError for a name that cannot be."""
    said, container = request.pod, request.container
    if not plain(said.uid) or not container.name:
        raise ValueError(f"{said.uid[:80]!r} is no uid of a pod, or its container has no name")
    kube = listed(said.uid)
    if kube is None or container.name not in _names(kube):
        amounts = _amounts(container.linux.resources)
        kube = KubePod(
            metadata=Metadata(
                name=said.name,
                uid=said.uid,
                namespace=said.namespace or "default",
                labels=dict(said.labels),
                annotations=dict(said.annotations),
            ),
            spec=Spec(containers=[ContainerSpec(name=container.name, resources=amounts)]),
        )
    return pod_of_kubelet(kube, {container.name: cgroup}, door)


def around(cgroup: str, hierarchy: Hierarchy) -> Around:
    """What bounds it, as its parent's files say now."""
    unified, above = hierarchy.mode == "v2", dirname(cgroup)
    cpuset = hierarchy.controller("cpuset")
    cpus = mems = None
    if cpuset is not None:
        files = _LISTS[unified]
        cpus, mems = (effective(below(cpuset, above), (file,)) for file in files)
    return Around(
        cpus=frozenset(cpus or ()),
        mems=frozenset(mems or ()),
        cores=None if unified else _quota(hierarchy, above),
        unified=unified,
    )


def _quota(hierarchy: Hierarchy, cgroup: str) -> float | None:
    """On version 1 nobody may have a larger part of his period than the cgroup above him."""
    cpu = hierarchy.controller("cpu")
    while cpu is not None and cgroup not in ("", "/"):
        try:
            quota, period = (int((below(cpu, cgroup) / file).read_text()) for file in (CFS_QUOTA, CFS_PERIOD))
        except (OSError, ValueError):
            return None
        if quota > 0:
            return quota / (period or PERIOD_US)
        cgroup = dirname(cgroup)
    return None


def _names(kube: KubePod) -> set[str]:
    kinds = (kube.spec.containers, kube.spec.init_containers or (), kube.spec.ephemeral_containers or ())
    return {each.name for kind in kinds for each in kind}


def _amounts(resources: Any) -> Amounts:
    """Requests and limits as the kubelet has translated them for the runtime."""
    cpu, memory = resources.cpu, resources.memory
    requests: dict[str, str | int | float] = {}
    limits: dict[str, str | int | float] = {}
    if cpu.quota.value > 0:
        limits["cpu"] = f"{cpu.quota.value * MILLI // (cpu.period.value or PERIOD_US)}m"
    if cpu.shares.value > LEAST_SHARES:
        # Rounded down as the kubelet rounds, so that it is never more than the limit.
        requests["cpu"] = f"{cpu.shares.value * MILLI // SHARES_PER_CPU}m"
    if memory.limit.value > 0:
        limits["memory"] = memory.limit.value
    return Amounts(requests=requests, limits=limits)

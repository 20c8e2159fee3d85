"""Computes the allowed and the reserved CPUs: those that pods may have, and those of system and interrupts.
Pure. The limit comes from `cpuset.effective_cpus` of that cgroup (a kubelet's reserved CPUs, a systemd slice, an
administrator). A reading may be 30 s old; the actuator clamps every list again when it writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from posixpath import commonpath, dirname

import msgspec

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.cpuset.select_cpus import NO_CPUS, select_round_robin
from agent.qrm.cpuset.state import parse_cpuset, rebuild_state
from agent.qrm.cpuset.topology_layout import CpuLayout, layout_of, restrict_topology
from api.cpu import format_cpu_list, parse_cpu_list
from api.knobs import Reason
from api.snapshot import CgroupSample, Snapshot


class AllowedCpus(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs of a cgroup as last read."""

    cgroup: str
    cpus: tuple[int, ...]


def allowed_cpus_of(snapshot: Snapshot, before: AllowedCpus | None) -> AllowedCpus | None:
    """Return the effective CPUs of the closest cgroup above all listed containers. A cgroup that cannot be read
    keeps its value of `before`; one that was never read is skipped for the next one above. None if only the root is
    above, which limits no pod."""
    above = {dirname(container.cgroup) for pod in snapshot.pods for container in pod.containers}
    path = commonpath(above) if above else "/"
    while path not in ("", "/"):
        if cpus := _effective_cpus(snapshot.cgroups.get(path)):
            return AllowedCpus(cgroup=path, cpus=tuple(sorted(cpus)))
        if before is not None and before.cgroup == path:
            return before
        path = dirname(path)
    return None


def restrict_to_allowed(snapshot: Snapshot, allowed: AllowedCpus | None) -> Snapshot:
    """Return the snapshot with the CPUs that pods may have."""
    if allowed is None or set(allowed.cpus).issuperset(snapshot.topology.ids):
        return snapshot
    return msgspec.structs.replace(snapshot, topology=restrict_topology(snapshot.topology, allowed.cpus))


def without_kubelet_exclusive(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot without the CPUs that the kubelet's static CPU manager made exclusive, and without their
    containers. No other container can run there, and these run nowhere else."""
    exclusive = snapshot.node.kubelet.exclusive if snapshot.node.kubelet is not None else {}
    exclusive_cpus = {cpu for containers in exclusive.values() for cpus in containers.values() for cpu in cpus}
    if not exclusive_cpus:
        return snapshot
    pods = tuple(
        msgspec.structs.replace(
            pod, containers=tuple(container for container in pod.containers if container.name not in exclusive[pod.uid])
        )
        if pod.uid in exclusive
        else pod
        for pod in snapshot.pods
    )
    topology = restrict_topology(snapshot.topology, [cpu for cpu in snapshot.topology.ids if cpu not in exclusive_cpus])
    return msgspec.structs.replace(snapshot, pods=pods, topology=topology)


def with_allowed_cpus_note(reason: Reason, allowed: AllowedCpus | None, cpus: int) -> Reason:
    """Add a note to the reason if a cgroup limits pods to fewer than the `cpus` of the node."""
    if allowed is None or len(allowed.cpus) >= cpus:
        return reason
    listed = format_cpu_list(allowed.cpus)
    text = f"{reason.text} {allowed.cgroup} limits pods to CPUs {listed} of the node's {cpus}."
    return msgspec.structs.replace(reason, text=text, inputs={**reason.inputs, "ceiling_cpus": listed})


def _effective_cpus(sample: CgroupSample | None) -> frozenset[int]:
    """Return the CPUs; none if unknown, since a cgroup with tasks has some."""
    if sample is None or not sample.limits.cpus:
        return frozenset()
    try:
        return parse_cpuset(sample.limits.cpus)
    except ValueError:
        return frozenset()


@dataclass(frozen=True)
class ReservedCpus:
    """Three disjoint sets that together are the whole node; `usable` is never empty."""

    reserve: frozenset[int]
    interrupt: frozenset[int]
    usable: frozenset[int]
    """CPUs for pools and dedicated containers."""


def reserve_cpus(
    layout: CpuLayout, config: CpuPlacementConfig, retained: frozenset[int] = NO_CPUS, used: frozenset[int] = NO_CPUS
) -> ReservedCpus:
    """Return the configured CPUs, as far as they are online and one is left for pods. A number of reserved CPUs is
    taken one per NUMA node in turn, each on a core of its own if possible. `retained` were reserved before; `used`
    belong to dedicated pods and are selected last."""
    online = frozenset(layout.order)
    interrupt = online.intersection(parse_cpu_list(config.interrupt_cpu_list))
    if interrupt == online:
        interrupt = frozenset()
    others = online - interrupt
    reserve = others.intersection(parse_cpu_list(config.reserved_cpu_list))
    if not config.reserved_cpu_list:
        reserve = select_round_robin(layout, min(config.reserved_cpus, len(others) - 1), others, retained, used)
    if reserve == others:
        reserve -= {max(reserve)}
    return ReservedCpus(reserve=reserve, interrupt=interrupt, usable=others - reserve)


def unshareable_cpus(snapshot: Snapshot, config: CpuPlacementConfig) -> frozenset[int]:
    """Return CPUs that reclaimed pods must not use without placement: reserved, interrupt and exclusive ones."""
    exclusive = rebuild_state(snapshot.pods, snapshot.cgroups, snapshot.topology, "", 0).exclusive_cpus()
    static = reserve_cpus(layout_of(snapshot.topology), config, used=exclusive)
    return static.reserve | static.interrupt | exclusive

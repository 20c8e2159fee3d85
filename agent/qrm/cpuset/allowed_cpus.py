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
    """What was last read of it."""

    cgroup: str
    cpus: tuple[int, ...]


def allowed_cpus_of(snapshot: Snapshot, before: AllowedCpus | None) -> AllowedCpus | None:
    """CPUs in force of the closest cgroup above all listed containers, and if they were never known, of the next one above.

    What cannot be read now is as it was `before`. None where only the whole machine is above, which limits nobody.
    """
    above = {dirname(container.cgroup) for pod in snapshot.pods for container in pod.containers}
    path = commonpath(above) if above else "/"
    while path not in ("", "/"):
        if cpus := _effective_cpus(snapshot.cgroups.get(path)):
            return AllowedCpus(cgroup=path, cpus=tuple(sorted(cpus)))
        if before is not None and before.cgroup == path:
            return before
        path = dirname(path)
    return None


def restrict_to_allowed(snapshot: Snapshot, ceiling: AllowedCpus | None) -> Snapshot:
    """The same node with no other CPUs than pods may have."""
    if ceiling is None or set(ceiling.cpus).issuperset(snapshot.topology.ids):
        return snapshot
    return msgspec.structs.replace(snapshot, topology=restrict_topology(snapshot.topology, ceiling.cpus))


def without_kubelet_exclusive(snapshot: Snapshot) -> Snapshot:
    """The same node without the CPUs that a static CPU manager of the kubelet has given to containers alone, and without those
    containers: nobody else can run there, and they run nowhere else."""
    given = snapshot.node.kubelet.exclusive if snapshot.node.kubelet is not None else {}
    own = {cpu for containers in given.values() for cpus in containers.values() for cpu in cpus}
    if not own:
        return snapshot
    pods = tuple(
        msgspec.structs.replace(pod, containers=tuple(one for one in pod.containers if one.name not in given[pod.uid]))
        if pod.uid in given
        else pod
        for pod in snapshot.pods
    )
    topology = restrict_topology(snapshot.topology, [cpu for cpu in snapshot.topology.ids if cpu not in own])
    return msgspec.structs.replace(snapshot, pods=pods, topology=topology)


def with_allowed_cpus_note(reason: Reason, ceiling: AllowedCpus | None, cpus: int) -> Reason:
    """The same reason, and where CPUs are nobody's to give, that they are; `cpus` are those of the whole node."""
    if ceiling is None or len(ceiling.cpus) >= cpus:
        return reason
    listed = format_cpu_list(ceiling.cpus)
    text = f"{reason.text} {ceiling.cgroup} leaves pods CPUs {listed} of the node's {cpus}."
    return msgspec.structs.replace(reason, text=text, inputs={**reason.inputs, "ceiling_cpus": listed})


def _effective_cpus(sample: CgroupSample | None) -> frozenset[int]:
    """No CPUs where they are not known: a cgroup that tasks run in has some."""
    if sample is None or not sample.limits.cpus:
        return frozenset()
    try:
        return parse_cpuset(sample.limits.cpus)
    except ValueError:
        return frozenset()


@dataclass(frozen=True)
class ReservedCpus:
    """Three sets that have nothing in common and are the whole node together; `usable` is never empty."""

    reserve: frozenset[int]
    interrupt: frozenset[int]
    usable: frozenset[int]
    """For pools and dedicated containers."""


def reserve_cpus(
    layout: CpuLayout, config: CpuPlacementConfig, kept: frozenset[int] = NO_CPUS, used: frozenset[int] = NO_CPUS
) -> ReservedCpus:
    """As configured, as far as the CPUs are online and one is left for everybody else.

    A number of reserved CPUs is taken one of each NUMA node in turn, each on a core of its own while there are any. `kept`
    was reserved before, `used` is what dedicated pods have: to be taken last.
    """
    online = frozenset(layout.order)
    interrupt = online.intersection(parse_cpu_list(config.interrupt_cpu_list))
    if interrupt == online:
        interrupt = frozenset()
    others = online - interrupt
    reserve = others.intersection(parse_cpu_list(config.reserved_cpu_list))
    if not config.reserved_cpu_list:
        reserve = select_round_robin(layout, min(config.reserved_cpus, len(others) - 1), others, kept, used)
    if reserve == others:
        reserve -= {max(reserve)}
    return ReservedCpus(reserve=reserve, interrupt=interrupt, usable=others - reserve)


def unshareable_cpus(snapshot: Snapshot, config: CpuPlacementConfig) -> frozenset[int]:
    """CPUs that reclaimed pods must not be sent to where nobody places anybody: reserved ones, those of interrupts, and what
    dedicated pods have by their own cpusets."""
    alone = rebuild_state(snapshot.pods, snapshot.cgroups, snapshot.topology, "", 0).alone()
    static = reserve_cpus(layout_of(snapshot.topology), config, used=alone)
    return static.reserve | static.interrupt | alone

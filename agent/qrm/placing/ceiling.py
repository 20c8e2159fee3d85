"""The CPUs that pods may have at all: those of the cgroup above all of them. Pure.

Whoever keeps pods to some CPUs of the machine (a kubelet's reserved CPUs, a slice of systemd's, a person) does it there, and
nothing below can be wider. A reading may be half a minute old; the actuator clamps every list to what is there when it writes.
"""

from __future__ import annotations

from posixpath import commonpath, dirname

import msgspec

from agent.qrm.placing.layout import within
from agent.qrm.placing.state import cpus_of
from api.cpus import format_cpu_list
from api.knobs import Verdict
from api.samples import CgroupSample, Snapshot


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """What was last read of it."""

    cgroup: str
    cpus: tuple[int, ...]


def ceiling_of(snapshot: Snapshot, before: Ceiling | None) -> Ceiling | None:
    """CPUs in force of the closest cgroup above all listed containers, and if they were never known, of the next one above.

    What cannot be read now is as it was `before`. None where only the whole machine is above, which limits nobody.
    """
    above = {dirname(container.cgroup) for pod in snapshot.pods for container in pod.containers}
    path = commonpath(above) if above else "/"
    while path not in ("", "/"):
        if cpus := _in_force(snapshot.cgroups.get(path)):
            return Ceiling(cgroup=path, cpus=tuple(sorted(cpus)))
        if before is not None and before.cgroup == path:
            return before
        path = dirname(path)
    return None


def below(snapshot: Snapshot, ceiling: Ceiling | None) -> Snapshot:
    """The same node with no other CPUs than pods may have."""
    if ceiling is None or set(ceiling.cpus).issuperset(snapshot.topology.ids):
        return snapshot
    return msgspec.structs.replace(snapshot, topology=within(snapshot.topology, ceiling.cpus))


def without_exclusive(snapshot: Snapshot) -> Snapshot:
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
    topology = within(snapshot.topology, [cpu for cpu in snapshot.topology.ids if cpu not in own])
    return msgspec.structs.replace(snapshot, pods=pods, topology=topology)


def with_ceiling(verdict: Verdict, ceiling: Ceiling | None, cpus: int) -> Verdict:
    """The same reason, and where CPUs are nobody's to give, that they are; `cpus` are those of the whole node."""
    if ceiling is None or len(ceiling.cpus) >= cpus:
        return verdict
    listed = format_cpu_list(ceiling.cpus)
    text = f"{verdict.text} {ceiling.cgroup} leaves pods CPUs {listed} of the node's {cpus}."
    return msgspec.structs.replace(verdict, text=text, inputs={**verdict.inputs, "ceiling_cpus": listed})


def _in_force(sample: CgroupSample | None) -> frozenset[int]:
    """No CPUs where they are not known: a cgroup that tasks run in has some."""
    if sample is None or not sample.limits.cpus:
        return frozenset()
    try:
        return cpus_of(sample.limits.cpus)
    except ValueError:
        return frozenset()

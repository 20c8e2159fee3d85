"""What the round that just was would have decided of a container that is about to be made. Pure.

The same judgement of the same snapshot, with one pod more in it: so that a container is made with what the next round would
give it anyhow, whatever the policy. What would become of others is left to that round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from agent.config import Config
from agent.policy import Remembered, Told, judge
from agent.qrm.placing.state import CpuState
from api.decisions import Decision
from api.knobs import Knob
from api.pods import Pod
from api.samples import CgroupSample, Snapshot

NOT_YET = 0
"""Id of a cgroup that is not there: no inode has it."""


class Basis(msgspec.Struct, frozen=True, kw_only=True):
    """What a round was judged by."""

    snapshot: Snapshot
    config: Config
    known: Remembered
    """Before it."""
    told: Told = Told()
    now_ns: int
    knobs: Mapping[str, Collection[Knob]]
    """Those that the kernel has for each cgroup of the snapshot."""


class Foreseen(NamedTuple):
    """What a round would make of it."""

    decisions: Mapping[Knob, Decision]
    """On the cgroup that was asked about."""
    cpus: CpuState
    """Who would have which CPUs."""


def foreseen(basis: Basis, coming: Sequence[Pod], cgroup: str) -> Foreseen:
    """What that cgroup is to have, which one of these pods has: those of which the snapshot does not know, or not with all
    their containers."""
    snapshot = basis.snapshot
    there: frozenset[Knob] = frozenset[Knob]().union(*basis.knobs.values()) or frozenset(Knob)
    fresh = [one.cgroup for pod in coming for one in pod.containers if one.cgroup not in snapshot.cgroups]
    groups = {**snapshot.cgroups, **{path: CgroupSample(path=path, id=NOT_YET) for path in fresh}}
    pods = {pod.uid: pod for pod in snapshot.pods}
    for pod in coming:
        pods[pod.uid] = joined(pods.get(pod.uid), pod)
    listed = tuple(sorted(pods.values(), key=lambda pod: pod.key))
    one_more = msgspec.structs.replace(snapshot, cgroups=groups, pods=listed)
    judged, after = judge(one_more, basis.config, basis.known, basis.now_ns, basis.told)
    decisions = judged.decisions(one_more, {**basis.knobs, **dict.fromkeys(fresh, there)})
    return Foreseen({decision.knob: decision for decision in decisions if decision.cgroup == cgroup}, after.cpus)


def joined(listed: Pod | None, coming: Pod) -> Pod:
    """The listed pod, with those containers of the other that it has not."""
    if listed is None:
        return coming
    known = {one.cgroup for one in listed.containers}
    more = tuple(one for one in coming.containers if one.cgroup not in known)
    if not more:
        return listed
    waiting = tuple(one for one in listed.waiting if one.name not in {each.name for each in more})
    return msgspec.structs.replace(listed, containers=(*listed.containers, *more), waiting=waiting)

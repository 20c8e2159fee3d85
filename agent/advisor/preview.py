"""Previews the decisions of the latest cycle for a container that is about to be created.
It evaluates the same snapshot with the same inputs and one more pod, so the result equals that of the next
cycle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from agent.advisor.engine import ExternalAdvice, PolicyState, evaluate_policy
from agent.config.config import AgentConfig
from agent.qrm.cpuset.state import CpusetState
from agent.qrm.decisions.compose import compose_decisions
from api.decision import Decision
from api.knobs import Knob
from api.pod import Pod
from api.snapshot import CgroupSample, Snapshot

NEW_CGROUP_ID = 0
"""Id of a cgroup that is not there: no inode has it."""


class PreviewInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What a round was judged by."""

    snapshot: Snapshot
    config: AgentConfig
    known: PolicyState
    """Before it."""
    told: ExternalAdvice = ExternalAdvice()
    now_ns: int
    knobs: Mapping[str, Collection[Knob]]
    """Those that the kernel has for each cgroup of the snapshot."""


class DecisionPreview(NamedTuple):
    """What a round would make of it."""

    decisions: Mapping[Knob, Decision]
    """On the cgroup that was asked about."""
    cpus: CpusetState
    """Who would have which CPUs."""


def preview_decisions(inputs: PreviewInputs, new_pods: Sequence[Pod], cgroup: str) -> DecisionPreview:
    """What that cgroup is to have, which one of these pods has: those of which the snapshot does not know, or not with all
    their containers."""
    snapshot = inputs.snapshot
    there: frozenset[Knob] = frozenset[Knob]().union(*inputs.knobs.values()) or frozenset(Knob)
    fresh = [one.cgroup for pod in new_pods for one in pod.containers if one.cgroup not in snapshot.cgroups]
    groups = {**snapshot.cgroups, **{path: CgroupSample(path=path, id=NEW_CGROUP_ID) for path in fresh}}
    pods = {pod.uid: pod for pod in snapshot.pods}
    for pod in new_pods:
        pods[pod.uid] = merge_containers(pods.get(pod.uid), pod)
    listed = tuple(sorted(pods.values(), key=lambda pod: pod.key))
    one_more = msgspec.structs.replace(snapshot, cgroups=groups, pods=listed)
    judged, after = evaluate_policy(one_more, inputs.config, inputs.known, inputs.now_ns, inputs.told)
    decisions = compose_decisions(judged, one_more, {**inputs.knobs, **dict.fromkeys(fresh, there)})
    return DecisionPreview({decision.knob: decision for decision in decisions if decision.cgroup == cgroup}, after.cpus)


def merge_containers(listed: Pod | None, new_pod: Pod) -> Pod:
    """The listed pod, with those containers of the other that it has not."""
    if listed is None:
        return new_pod
    known = {one.cgroup for one in listed.containers}
    more = tuple(one for one in new_pod.containers if one.cgroup not in known)
    if not more:
        return listed
    waiting = tuple(one for one in listed.waiting if one.name not in {each.name for each in more})
    return msgspec.structs.replace(listed, containers=(*listed.containers, *more), waiting=waiting)

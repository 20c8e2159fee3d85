"""Previews the decisions of the latest cycle for a container that is about to be created.
It evaluates the same snapshot with the same inputs and one more pod, so the result equals that of the next
cycle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from agent.advisor.engine import ExternalAdvice, PolicyState, evaluate_policy
from agent.config.config import AgentConfig
from agent.qrm.cpuset.state import CpusetState
from agent.qrm.decisions.cpu import compose_decisions
from api.decision import Decision
from api.knobs import Knob
from api.pod import Pod
from api.rates import Rates
from api.snapshot import CgroupSample, Snapshot

NEW_CGROUP_ID = 0
"""Id of a cgroup that does not exist yet: no inode has it."""


class PreviewInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of the latest cycle."""

    snapshot: Snapshot
    config: AgentConfig
    state: PolicyState
    """State before that cycle."""
    external_advice: ExternalAdvice = ExternalAdvice()
    now_ns: int
    knobs: Mapping[str, Collection[Knob]]
    """Knobs that the kernel offers, by cgroup of the snapshot."""
    rates: Rates | None = None
    """Rates since the cycle before; None computes them again for each preview."""


class DecisionPreview(NamedTuple):
    """Decisions of a cycle for one cgroup."""

    decisions: Mapping[Knob, Decision]
    """Decisions on that cgroup, by knob."""
    cpus: CpusetState
    """CPU assignment after that cycle."""


def preview_decisions(inputs: PreviewInputs, new_pods: Sequence[Pod], cgroup: str) -> DecisionPreview:
    """Return the decisions on `cgroup`, a container of one of `new_pods`.

    New pods are those that the snapshot does not contain, or not with all their containers.
    """
    snapshot = inputs.snapshot
    available: frozenset[Knob] = frozenset[Knob]().union(*inputs.knobs.values()) or frozenset(Knob)
    new_cgroups = [
        container.cgroup for pod in new_pods for container in pod.containers if container.cgroup not in snapshot.cgroups
    ]
    cgroups = {**snapshot.cgroups, **{path: CgroupSample(path=path, id=NEW_CGROUP_ID) for path in new_cgroups}}
    pods = {pod.uid: pod for pod in snapshot.pods}
    for pod in new_pods:
        pods[pod.uid] = merge_containers(pods.get(pod.uid), pod)
    ordered = tuple(sorted(pods.values(), key=lambda pod: pod.key))
    with_new_pods = replace(snapshot, cgroups=cgroups, pods=ordered)
    result, next_state = evaluate_policy(
        with_new_pods, inputs.config, inputs.state, inputs.now_ns, inputs.external_advice, inputs.rates
    )
    decisions = compose_decisions(result, with_new_pods, {**inputs.knobs, **dict.fromkeys(new_cgroups, available)})
    return DecisionPreview(
        {decision.knob: decision for decision in decisions if decision.cgroup == cgroup}, next_state.cpus
    )


def merge_containers(listed: Pod | None, new_pod: Pod) -> Pod:
    """Return the listed pod with the containers of the new one that it lacks."""
    if listed is None:
        return new_pod
    cgroups = {container.cgroup for container in listed.containers}
    added = tuple(container for container in new_pod.containers if container.cgroup not in cgroups)
    if not added:
        return listed
    waiting = tuple(container for container in listed.waiting if container.name not in {each.name for each in added})
    return replace(listed, containers=(*listed.containers, *added), waiting=waiting)

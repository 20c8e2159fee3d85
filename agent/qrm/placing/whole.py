"""Pods with those of their containers that do not run just now and have a place all the same: what a container had is nobody
else's until its pod ends, however often it is started anew. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agent.qrm.placing.state import CpuState, Placement
from api.pods import Container, Pod
from api.qos import QoSLevel

_NOWHERE = "waiting:"


def whole(pods: Sequence[Pod], state: CpuState) -> list[Pod]:
    """The pods that have a place, each with the containers that wait for theirs, whose cgroup is none (see `of_cgroups`). A pod
    of which nothing has run yet has none: it may never come to run."""
    return [pod for pod in kept(pods, state) if pod.containers]


def kept(pods: Sequence[Pod], state: CpuState) -> tuple[Pod, ...]:
    """All of them, with those containers: what is kept for one is not lent."""
    return tuple(_whole(pod, state) for pod in pods)


def of_cgroups(placement: Placement) -> Placement:
    """The same, of containers that run."""
    if all(map(_runs, placement.cpus)):
        return placement
    return msgspec.structs.replace(
        placement,
        cpus={cgroup: cpus for cgroup, cpus in placement.cpus.items() if _runs(cgroup)},
        mems={cgroup: mems for cgroup, mems in placement.mems.items() if _runs(cgroup)},
        verdicts={cgroup: verdict for cgroup, verdict in placement.verdicts.items() if _runs(cgroup)},
    )


def _whole(pod: Pod, state: CpuState) -> Pod:
    if not pod.waiting:
        return pod
    known = state.pod(pod.uid)
    begun = bool(pod.containers or known)
    waiting = [one for one in pod.waiting if one.name in known or (begun and _alone(pod, one))]
    if not waiting:
        return pod
    homeless = [msgspec.structs.replace(one, cgroup=f"{_NOWHERE}{pod.uid}/{one.name}") for one in waiting]
    return msgspec.structs.replace(pod, containers=(*pod.containers, *homeless))


def _alone(pod: Pod, container: Container) -> bool:
    """Whether the pod's CPUs are those of this container, which others of it share."""
    return pod.qos is QoSLevel.DEDICATED and not container.sidecar


def _runs(cgroup: str) -> bool:
    return not cgroup.startswith(_NOWHERE)

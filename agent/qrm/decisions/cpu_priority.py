"""Selects the cgroups that get the lowest CPU priority, and reports online pods against which it has no effect. Pure.
The kernel compares weights and `cpu.idle` only between the children of one cgroup (kernel/sched/fair.c, pick_next_entity()
on each level). Below a kubelet the competitor of a container is a pod or a QoS class, not another container, so the
priority is written to the pod's cgroup, and to that of a QoS class whose pods are all reclaimed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from posixpath import dirname
from typing import NamedTuple

from agent.sensors.cgroup.pod_cgroup_paths import (
    SLICE_SUFFIX,
    is_best_effort_class,
    is_qos_cgroup,
    normalized_uid,
    pod_cgroup_of,
    uid_of_pod_cgroup,
)
from api.advice import KnobRequest
from api.decision import Decision, Outcome, OutcomeStatus
from api.interfaces import Unavailable
from api.knobs import Knob, Reason
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import ABSENT, ComponentHealth, Machine, Snapshot
from api.units import NS_PER_S

YIELD_RULE = "yield_to_online"
"""Rule of the lowest priority of a reclaimed cgroup: it follows from reclaimed_cores, not from a measurement."""
MIN_WEIGHT = "1"
"""Weight where the kernel has no cpu.idle: a hundredth of the default, 10 shares on version 1."""
SLICE_RULE = "short_slice"
SHORT_SLICE = "100001"
"""Slice of reclaimed threads in nanoseconds: the kernel's minimum of 0.1 ms (kernel/sched/fair.c, __setparam_fair()), and one
more, so that it differs from slices that programs set themselves."""
SHORT_SLICE_MS = "0.1"
MIN_SYSTEMD_VERSION = 252
"""The first version that knows cpu.idle (CPUWeight=idle), and clears it before it writes a weight."""


POD_START_S = 30.0
"""For this long, tasks of a pod that is not listed are those of a pod that starts: its sandbox runs before the kubelet's
list has the pod. Then its class loses the priority without any failure that a person could fix."""
_UNLISTED_POD = "it contains tasks of a pod that is not listed"


def lowest_priority(knobs: Collection[Knob]) -> tuple[Knob, str]:
    """Return the knob and value that yield CPU to siblings; before Linux 5.15 only the minimum weight does."""
    return (Knob.IDLE, "1") if Knob.IDLE in knobs else (Knob.WEIGHT, MIN_WEIGHT)


@lru_cache(maxsize=512)
def yield_reason(parent: str, knob: Knob) -> Reason:
    """Return the reason of the lowest priority of a child of `parent`: it names the siblings that it holds against."""
    if knob is Knob.IDLE:
        text = (
            f"A task that wakes up in another child of {parent} interrupts the tasks of this cgroup on its CPU, unless that "
            "child has cpu.idle as well."
        )
        outside = (
            f" A task outside of {parent} does not interrupt them. When such a task wakes up, the scheduler only prefers CPUs "
            "on which all running tasks have cpu.idle."
        )
    else:
        text = (
            f"This cgroup has the lowest weight of the children of {parent}, because this kernel has no cpu.idle (Linux "
            "5.15)."
        )
        outside = f" The weight has no effect on tasks outside of {parent}."
    if parent != "/":
        text += outside
    return Reason(rule=YIELD_RULE, text=text)


def yield_request(cgroup: str, knobs: Collection[Knob]) -> KnobRequest | None:
    """Return the request for the lowest priority of a cgroup. None for a BestEffort pod without `cpu.idle`: the kubelet
    gave it 2 shares, the minimum of version 1, less than the minimum weight."""
    knob, value = lowest_priority(knobs)
    if knob is Knob.WEIGHT and is_best_effort_class(dirname(cgroup)):
        return None
    return KnobRequest(cgroup=cgroup, knob=knob, value=value, reason=yield_reason(dirname(cgroup), knob))


def priority_cgroups(pods: Sequence[Pod], cgroups: Collection[str] = ()) -> dict[str, Pod]:
    """Return the cgroups that get the priority of reclaimed pods: the pod's, or the container's if no kubelet created it.
    Among `cgroups` those of pods without a running container are looked for, so that a pod that starts or restarts has
    its priority before its container runs."""
    reclaimed = [pod for pod in pods if pod.qos is QoSLevel.RECLAIMED]
    targets = {pod_cgroup_of(c.cgroup) or c.cgroup: pod for pod in reclaimed for c in pod.containers}
    starting = [pod for pod in reclaimed if not pod.containers]
    if starting:
        by_uid = {uid: path for path in cgroups if (uid := uid_of_pod_cgroup(path))}
        targets |= {by_uid[uid]: pod for pod in starting if (uid := normalized_uid(pod.uid)) in by_uid}
    return targets


def reclaimed_qos_classes(snapshot: Snapshot) -> frozenset[str]:
    """Return the cgroups of the QoS classes that contain reclaimed pods; Guaranteed pods have none of their own."""
    parents = {dirname(cgroup) for cgroup in priority_cgroups(snapshot.pods, snapshot.cgroups)}
    return frozenset(path for path in parents if is_qos_cgroup(path) and is_qos_cgroup(dirname(path)))


def idle_class_obstacles(snapshot: Snapshot, enabled: bool | None) -> dict[str, Unavailable | None]:
    """Return the QoS classes that contain reclaimed pods; by class why it must not be idle, None if it may be. `enabled` is
    the setting `kubelet.idleClass`."""
    return {path: _idle_class_obstacle(snapshot, path, enabled) for path in reclaimed_qos_classes(snapshot)}


def _idle_class_obstacle(snapshot: Snapshot, path: str, enabled: bool | None) -> Unavailable | None:
    if enabled is False:
        return Unavailable("kubelet.idleClass is false", "remove the setting")
    others = [
        pod.key
        for pod in snapshot.pods
        if pod.qos is not QoSLevel.RECLAIMED and any(c.cgroup.startswith(f"{path}/") for c in pod.containers)
    ]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return Unavailable(
            f"it also contains {others[0]}{more}, which are not reclaimed"
            if more
            else f"it also contains {others[0]}, which is not reclaimed",
            "give pods that are not reclaimed CPU requests, which puts them into another QoS class",
        )
    if not has_only_reclaimed_pods(snapshot, path):
        return Unavailable(_UNLISTED_POD, "wait until the kubelet lists the pod")
    return _unsafe_idle_class(path, snapshot.node.machine, enabled)


def _unsafe_idle_class(path: str, machine: Machine, enabled: bool | None) -> Unavailable | None:
    """Return why a kubelet would not start while its class is idle. It writes the class's weight first, which the kernel
    refuses (kernel/sched/fair.c, sched_group_set_shares()). With the systemd driver on version 2, systemd clears cpu.idle
    before (src/core/cgroup.c, cgroup_apply_unified_cpu_idle())."""
    if machine.cgroup_version != "v2" or not path.endswith(SLICE_SUFFIX):
        return Unavailable(
            "with this cgroup driver a kubelet would not restart while the class is idle",
            "use cgroup version 2 and the kubelet's systemd driver (cgroupDriver: systemd)",
        )
    if machine.systemd_version is None and enabled:
        return None
    if machine.systemd_version is None:
        return Unavailable(
            f"a kubelet restarts with an idle class from systemd {MIN_SYSTEMD_VERSION} on, and the version here is unknown",
            f"if `systemctl --version` is {MIN_SYSTEMD_VERSION} or newer, set kubelet.idleClass to true; or let the agent read "
            "it from /proc/1/maps: add SYS_PTRACE to agent.capabilities",
        )
    if machine.systemd_version < MIN_SYSTEMD_VERSION:
        return Unavailable(
            f"with systemd {machine.systemd_version} a kubelet would not restart while the class is idle",
            f"upgrade systemd to {MIN_SYSTEMD_VERSION} or newer, then restart the agent",
        )
    return None


def has_only_reclaimed_pods(snapshot: Snapshot, root: str) -> bool:
    """Return whether all tasks below `root` belong to listed reclaimed pods. The other cgroups of a pod (its
    sandbox) count as the pod's. A cgroup with an unknown number of tasks has some."""
    inside = [path for path in snapshot.cgroups if path.startswith(f"{root}/")]
    targets = priority_cgroups(snapshot.pods, inside)
    # Without a kubelet the cgroup above a container is that of its pod.
    pod_cgroups = {
        above if not uid_of_pod_cgroup(path) and (above := dirname(path)).startswith(f"{root}/") else path
        for path in targets
    }
    parents = {path.rpartition("/")[0] for path in inside}
    return all(
        snapshot.cgroups[path].threads == 0 or _is_below_any(path, pod_cgroups, root)
        for path in inside
        if path not in parents
    )


def _is_below_any(path: str, ancestors: Collection[str], root: str) -> bool:
    while len(path) > len(root):
        if path in ancestors:
            return True
        path = dirname(path)
    return False


class PriorityGap(NamedTuple):
    """Online pods to which reclaimed pods do not yield, because they are outside of the reclaimed pods' parent cgroup."""

    online_pod: str
    others: int
    """Number of further such pods."""

    @property
    def listed(self) -> str:
        return f"{self.online_pod} and {self.others} more" if self.others else self.online_pod


def priority_gaps(snapshot: Snapshot, decisions: Sequence[Decision]) -> dict[str, PriorityGap]:
    """Return the online pods to which reclaimed pods do not yield, by the cgroup to whose children they do yield. The result is
    empty if reclaimed pods yield to all online pods. `decisions` are those of this cycle."""
    lowest = {decision.cgroup for decision in decisions if decision.reason.rule == YIELD_RULE}
    outermost = {
        path
        for pod in snapshot.pods
        if pod.qos is QoSLevel.RECLAIMED
        for container in pod.containers
        if (path := _outermost(container.cgroup, lowest))
    }
    # The node's own daemons (system_cores) are neither online nor batch.
    online = [(pod.key, c.cgroup) for pod in snapshot.pods if pod.qos.online for c in pod.containers]
    gaps: dict[str, PriorityGap] = {}
    for parent in sorted({dirname(path) for path in outermost}):
        outside = [pod for pod, cgroup in online if not cgroup.startswith(f"{parent.rstrip('/')}/")]
        if outside:
            gaps[parent] = PriorityGap(outside[0], len(set(outside)) - 1)
    return gaps


def slice_requests(snapshot: Snapshot, decisions: Sequence[Decision]) -> tuple[KnobRequest, ...]:
    """Return the requests for short slices of the reclaimed containers of a BestEffort class that is not idle
    (`knobs.shortSlices`). A running thread is not preempted before its slice ends (kernel/sched/fair.c, protect_slice()).
    In a class with more weight a short slice is harmful: it also gives an earlier deadline (docs/adr/0009)."""
    gaps = {path: gap for path, gap in priority_gaps(snapshot, decisions).items() if is_best_effort_class(path)}
    if not gaps:
        return ()
    return tuple(
        KnobRequest(cgroup=container.cgroup, knob=Knob.SLICE, value=SHORT_SLICE, reason=_slice_reason(parent, gap))
        for pod in snapshot.pods
        if pod.qos is QoSLevel.RECLAIMED
        for container in pod.containers
        for parent, gap in gaps.items()
        if container.cgroup.startswith(f"{parent}/")
    )


@lru_cache(maxsize=512)
def _slice_reason(parent: str, gap: PriorityGap) -> Reason:
    text = (
        f"{parent} is not idle, so {gap.listed} may have to wait until the slice of a reclaimed thread ends. Reclaimed "
        f"threads therefore have slices of {SHORT_SLICE_MS} ms."
    )
    return Reason(rule=SLICE_RULE, text=text, inputs={"slice_ns": int(SHORT_SLICE), "online_pod": gap.online_pod})


def unlisted_pod_since(obstacles: Mapping[str, Unavailable | None], before_ns: int | None, now_ns: int) -> int | None:
    """Return since when a class has contained tasks of a pod that is not listed, in each cycle; None if none does."""
    if not any(map(_has_unlisted_pod, obstacles.values())):
        return None
    return now_ns if before_ns is None else before_ns


def _has_unlisted_pod(obstacle: Unavailable | None) -> bool:
    return obstacle is not None and obstacle.reason == _UNLISTED_POD


def priority_health(
    snapshot: Snapshot,
    decisions: Sequence[Decision],
    obstacles: Mapping[str, Unavailable | None],
    outcomes: Sequence[Outcome] = (),
    unlisted_since_ns: int | None = None,
) -> tuple[ComponentHealth, ...]:
    """Return one failed component if reclaimed pods do not yield to some online pod. `decisions` and `outcomes` are those of
    this cycle, `obstacles` those of `idle_class_obstacles`. If the node does not allow the class to be idle, the component is
    absent, so that no alert fires. While a pod starts, it has not failed."""
    gaps = priority_gaps(snapshot, decisions)
    if unlisted_since_ns is not None and snapshot.taken_at_ns - unlisted_since_ns < POD_START_S * NS_PER_S:
        gaps = {path: gap for path, gap in gaps.items() if not _has_unlisted_pod(obstacles.get(path))}
    if not gaps:
        return ()
    parent, gap = next(iter(gaps.items()))
    error = f"reclaimed pods do not yield to {gap.listed}: CPU priority holds only between the children of {parent}"
    remedy = "place the cgroups of reclaimed and online pods below one parent cgroup"
    obstacle = obstacles.get(parent)
    if obstacle is not None:
        error, remedy = f"{error}. {parent} does not get cpu.idle: {obstacle.reason}", obstacle.remedy
    slices = [outcome for outcome in outcomes if outcome.decision.knob is Knob.SLICE]
    refused = [outcome for outcome in slices if outcome.status in (OutcomeStatus.REFUSED, OutcomeStatus.MISMATCH)]
    if refused:
        cause, _, other_remedy = refused[0].error.rpartition(": ")
        error += f". Threads of {refused[0].decision.cgroup} keep the default slice: {cause}"
        remedy += f"; or {other_remedy}"
    elif any(outcome.status in (OutcomeStatus.APPLIED, OutcomeStatus.UNCHANGED) for outcome in slices):
        error += f". {parent} has the lowest weight of its siblings, and its threads have slices of {SHORT_SLICE_MS} ms"
    detail = ABSENT if obstacle is not None and not refused else ""
    return (ComponentHealth(name="pod-siblings", ok=False, detail=detail, error=error, remedy=remedy),)


def _outermost(cgroup: str, lowest: Collection[str]) -> str:
    """Return the cgroup or the ancestor of it with the lowest priority that is nearest to the root; empty without one."""
    outermost = ""
    while cgroup not in ("", "/"):
        if cgroup in lowest:
            outermost = cgroup
        cgroup = dirname(cgroup)
    return outermost

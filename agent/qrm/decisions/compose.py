"""Composes the result of a policy into decisions: CPU first, then knob requests that do not conflict. Pure.
Knobs that the kubelet writes itself (static CPU manager, memory manager) are left out. `cpu.idle` is set on a reclaim
root only if the root contains nothing but reclaimed pods and is not a QoS cgroup of the kubelet.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from posixpath import dirname

import msgspec

from agent.qrm.cpuset.allowed_cpus import AllowedCpus, restrict_to_allowed
from agent.qrm.cpuset.state import CpusetAllocation
from agent.qrm.decisions.cpu import YIELD_REASON, cpu_requests, lowest_priority
from agent.qrm.decisions.knob_requests import KnobRequests, resolve_knob_requests
from api.advice import KnobRequest, MemoryAdvice, NodeAdvice
from api.decision import Advice, Decision
from api.forecast import Forecast
from api.knobs import Knob
from api.measurements import KubeletManagers
from api.qos import QoSLevel
from api.snapshot import Snapshot

_KUBELET_CGROUP = re.compile(r"(?:.*-)?(?:kubepods|burstable|besteffort)(?:\.slice)?")
"""Names of the kubelet's QoS cgroups, with the cgroupfs and with the systemd driver."""


class PolicyResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one cycle of the policy computed. Advice and placement are None with the policy `none`."""

    advice: Advice | None = None
    """CPU advice, with the CPUs of the pools."""
    placement: CpusetAllocation | None = None
    memory: MemoryAdvice | None = None
    extra_cgroups: frozenset[str] = frozenset()
    """Cgroups that belong to no pod and that the settings allow the agent to change."""
    knob_requests: KnobRequests = KnobRequests()
    node: NodeAdvice | None = None
    """Advice about the whole node; None if no such feature is enabled."""
    forecasts: tuple[Forecast, ...] = ()
    allowed_cpus: AllowedCpus | None = None
    reclaim_roots: tuple[str, ...] = ()
    """Cgroups that contain listed reclaimed pods and no other listed pods, of the node or of one NUMA node."""


def compose_decisions(
    result: PolicyResult, snapshot: Snapshot, knobs: Mapping[str, Collection[Knob]]
) -> tuple[Decision, ...]:
    """Return one decision per (cgroup, knob); `knobs` are those that the kernel offers for each cgroup. The CPU advice
    has precedence over other requests for the same knob."""
    managers, advice, placement = snapshot.node.kubelet, result.advice, result.placement
    if managers is not None and managers.manages_cpusets and advice is not None and not advice.idle:
        # The kubelet owns the cpusets, so priority and quota must separate what the pools would have separated.
        advice, placement = msgspec.structs.replace(advice, idle=True), None
    requests: tuple[KnobRequest, ...] = ()
    if advice is not None:
        requests = cpu_requests(advice, restrict_to_allowed(snapshot, result.allowed_cpus), knobs, placement)
        requests += _idle_root_requests(result.reclaim_roots, snapshot, knobs) if advice.idle else ()
    requests += result.memory.knob_requests if result.memory is not None else ()
    decisions = resolve_knob_requests(
        (*requests, *result.knob_requests.requests), snapshot, knobs, result.extra_cgroups
    )
    kubelet_knobs = _knobs_of_kubelet(managers)
    return tuple(decision for decision in decisions if decision.knob not in kubelet_knobs)


def _idle_root_requests(
    roots: Collection[str], snapshot: Snapshot, knobs: Mapping[str, Collection[Knob]]
) -> tuple[KnobRequest, ...]:
    # Priority only compares children of one parent, so the cgroup around the reclaimed pods needs it as well.
    knob, value = lowest_priority(frozenset[Knob]().union(*knobs.values()))
    return tuple(
        KnobRequest(cgroup=root, knob=knob, value=value, reason=YIELD_REASON)
        for root in roots
        if not is_kubelet_cgroup(root) and has_only_reclaimed_pods(snapshot, root)
    )


def is_kubelet_cgroup(root: str) -> bool:
    """Return whether the path is one of the kubelet's QoS cgroups. The kubelet writes cpu.shares there at its start
    and while it runs. The kernel refuses shares of an idle group (kernel/sched/fair.c, sched_group_set_shares()),
    and a kubelet whose write fails does not start."""
    return _KUBELET_CGROUP.fullmatch(root.rpartition("/")[2]) is not None


def has_only_reclaimed_pods(snapshot: Snapshot, root: str) -> bool:
    """Return whether all tasks below `root` belong to listed reclaimed pods. The other cgroups of a pod (its
    sandbox) count as the pod's. A cgroup with an unknown number of tasks has some."""
    inside = [path for path in snapshot.cgroups if path.startswith(f"{root}/")]
    listed = (c.cgroup for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED for c in pod.containers)
    pod_cgroups = {above if (above := dirname(path)).startswith(f"{root}/") else path for path in listed}
    leaves = set(inside) - {dirname(path) for path in inside}
    return all(snapshot.cgroups[path].threads == 0 or _is_below_any(path, pod_cgroups, root) for path in leaves)


def _is_below_any(path: str, ancestors: Collection[str], root: str) -> bool:
    while len(path) > len(root):
        if path in ancestors:
            return True
        path = dirname(path)
    return False


def _knobs_of_kubelet(managers: KubeletManagers | None) -> frozenset[Knob]:
    """Return the knobs that the kubelet's CPU and memory managers rewrite periodically."""
    if managers is None or not (managers.manages_cpusets or managers.mems):
        return frozenset()
    return frozenset({Knob.CPUSET, Knob.MEMS} if managers.manages_cpusets else {Knob.MEMS})

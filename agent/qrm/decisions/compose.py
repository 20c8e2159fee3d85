"""Composes the result of a policy into decisions: CPU first, then knob requests that do not conflict.
Knobs that the kubelet writes itself (static CPU manager, memory manager) are left out. Pure. cpu.idle is set on
a reclaim root only if it contains nothing but reclaimed pods and is not a QoS cgroup of the kubelet.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from posixpath import dirname

import msgspec

from agent.qrm.cpuset.allowed_cpus import AllowedCpus, restrict_to_allowed
from agent.qrm.cpuset.state import CpusetAllocation
from agent.qrm.decisions.cpu import YIELD_REASON, decide_cpu, lowest_priority
from agent.qrm.decisions.knob_requests import KnobRequests, resolve_knob_requests
from api.advice import KnobRequest, MemoryAdvice, NodeAdvice
from api.decision import Advice, Decision
from api.forecast import Forecast
from api.knobs import Knob
from api.measurements import KubeletManagers
from api.qos import QoSLevel
from api.snapshot import Snapshot

_KUBELET_CGROUP = re.compile(r"(?:.*-)?(?:kubepods|burstable|besteffort)(?:\.slice)?")
"""Names of such cgroups, with cgroupfs and with systemd."""


def is_kubelet_cgroup(root: str) -> bool:
    """Whether it is the kubelet's own cgroup above pods. The kubelet writes shares there, at its start and while it runs; the
    kernel refuses shares of an idle group (kernel/sched/fair.c, sched_group_set_shares), and a kubelet that was refused does
    not start."""
    return _KUBELET_CGROUP.fullmatch(root.rpartition("/")[2]) is not None


def has_only_reclaimed_pods(snapshot: Snapshot, root: str) -> bool:
    """Whether all that runs below it is of listed reclaimed pods: what makes it give way would hold back whoever else is there.

    What lies beside a container in its pod's cgroup (the sandbox) is the pod's too. A cgroup whose tasks cannot be counted
    has some.
    """
    inside = [path for path in snapshot.cgroups if path.startswith(f"{root}/")]
    listed = (c.cgroup for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED for c in pod.containers)
    homes = {above if (above := dirname(path)).startswith(f"{root}/") else path for path in listed}
    leaves = set(inside) - {dirname(path) for path in inside}
    return all(snapshot.cgroups[path].threads == 0 or _is_below_any(path, homes, root) for path in leaves)


def _is_below_any(path: str, homes: Collection[str], root: str) -> bool:
    while len(path) > len(root):
        if path in homes:
            return True
        path = dirname(path)
    return False


class PolicyResult(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be, with the CPUs of the pools in the advice; advice and placement are None where the policy is `none`."""

    advice: Advice | None = None
    placement: CpusetAllocation | None = None
    memory: MemoryAdvice | None = None
    named: frozenset[str] = frozenset()
    """Cgroups that are no pod's, and that the settings allow to be changed."""
    asked: KnobRequests = KnobRequests()
    node: NodeAdvice | None = None
    """Of the node as a whole; None where nothing of it is switched on."""
    forecasts: tuple[Forecast, ...] = ()
    ceiling: AllowedCpus | None = None
    reclaim_roots: tuple[str, ...] = ()
    """Cgroups above listed reclaimed pods and no other listed ones, of the whole node or of one NUMA node."""

    def decisions(self, snapshot: Snapshot, knobs: Mapping[str, Collection[Knob]]) -> tuple[Decision, ...]:
        """Every knob that something is to be said about, by the knobs that the kernel has for each cgroup: what the advice
        says of CPU comes first, and nothing that is wished for contradicts it."""
        managers = snapshot.node.kubelet
        if managers is not None and managers.manages_cpusets and self.advice is not None and not self.advice.idle:
            # Who may run where is the kubelet's: what pools would keep apart, priority and quota have to.
            yielding_too = msgspec.structs.replace(self.advice, idle=True)
            return msgspec.structs.replace(self, advice=yielding_too, placement=None).decisions(snapshot, knobs)
        inside = restrict_to_allowed(snapshot, self.ceiling)
        taken = () if self.advice is None else decide_cpu(self.advice, inside, knobs, self.placement)
        wishes = (
            *self._together(snapshot, knobs),
            *(self.memory.knob_requests if self.memory is not None else ()),
            *self.asked.knob_requests,
        )
        found = (*taken, *resolve_knob_requests(wishes, snapshot, knobs, taken, self.named))
        theirs = _knobs_of_kubelet(managers)
        return tuple(decision for decision in found if decision.knob not in theirs) if theirs else found

    def _together(self, snapshot: Snapshot, knobs: Mapping[str, Collection[Knob]]) -> tuple[KnobRequest, ...]:
        """Priority holds among the children of one parent: whoever is kept in a cgroup of its own has to yield with it."""
        if self.advice is None or not self.advice.idle or not self.reclaim_roots:
            return ()
        knob, value = lowest_priority(frozenset[Knob]().union(*knobs.values()))
        return tuple(
            KnobRequest(cgroup=root, knob=knob, value=value, reason=YIELD_REASON)
            for root in self.reclaim_roots
            if not is_kubelet_cgroup(root) and has_only_reclaimed_pods(snapshot, root)
        )


def _knobs_of_kubelet(managers: KubeletManagers | None) -> frozenset[Knob]:
    """Knobs that the kubelet writes itself, and again and again."""
    if managers is None or not (managers.manages_cpusets or managers.mems):
        return frozenset()
    return frozenset({Knob.CPUSET, Knob.MEMS} if managers.manages_cpusets else {Knob.MEMS})

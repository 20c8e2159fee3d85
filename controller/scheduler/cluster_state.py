"""State of the cluster for the scheduler: applies changes of Nodes, CustomNodeResources and Pods, and assumes pods.
An assumption counts a pod on a node until the watch delivers its binding; then the API server's data replace it. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from api.overcommit import OVERCOMMIT_KEYS
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from controller.scheduler.harm_indicators import parse_harm
from controller.scheduler.load_aware import estimate_load
from controller.scheduler.node_alignment import NodeAlignment
from controller.scheduler.node_arrays import HARM_INDICATORS, NodeArrays
from controller.scheduler.numa_topology import TopologyRules
from controller.scheduler.pod_alignment import PodAlignment
from controller.scheduler.scheduler_kinds import SchedulerCnr, SchedulerNode, SchedulerNodeAnnotations
from controller.scheduler.scheduling_pod import (
    CPU,
    MEMORY,
    Amounts,
    PodAnnotations,
    ScheduledPod,
    ScheduledPodSpec,
    SchedulingPod,
    amounts_of,
    parse_scheduling_pod,
    quantity_units,
)
from kube.objects import key_of, parse_timestamp

LOAD_RAMP_S = 30.0
"""Time that a new pod needs to pull its image and start its containers. A report less than this after its placement may lack
its usage, which is then estimated."""
HARM_HALF_LIFE_S = 60.0
"""Half-life of the average of each indicator of harm over the reports: one report has about one second of latencies."""
MAX_REPORTS = 20
"""Number of a node's latest reports from which the percentile of its usage is computed."""
MAX_PROBLEMS = 100
MAX_SHARED_CONTAINERS = 16


class PodCharge(NamedTuple):
    """What a pod takes from its node."""

    key: str
    node: str
    reclaimed: Amounts
    reclaimed_nonzero: Amounts
    native: Amounts
    load_basis: Amounts
    priority: int
    alignment: PodAlignment | None = None


class Assumption(NamedTuple):
    """Pod that counts on a node before the API server reports its binding: it is being bound, or planned with its gang."""

    charge: PodCharge
    since_s: float
    """Time of the plan, or of the latest request to bind it."""
    is_planned: bool = False
    """Whether no request to bind it was made yet, so that it may be planned on another node."""


class ClusterState:
    """All nodes with their pods. Every method is synchronous, so each is atomic on one event loop: a binding needs no other
    lock between its check and its assumption."""

    def __init__(
        self,
        load_factors: tuple[float, float] = (0.85, 0.70),
        percentile: float = 95,
        rules: TopologyRules | None = None,
    ) -> None:
        """`load_factors` are the shares of requested CPU and memory that a new pod is estimated to use; `percentile` is that of
        the usage in the latest reports; `rules` are those of NodeResourceTopology, without which zones are ignored."""
        self.nodes = NodeArrays()
        self.alignment = NodeAlignment(self.nodes, rules, self._holds_zones)
        self.problems: dict[str, str] = {}
        """Problems of objects with an invalid value, by kind and name of the object: the field, and what is wrong with it."""
        self.problem_changes = 0
        """Number of changes of `problems`, so that a reader need not compare them."""
        self._load_factors, self._percentile = np.array(load_factors), percentile
        self.namespace_requests: dict[str, Amounts] = {}
        """Reclaimed resources that the pods of each namespace request, assumed pods included."""
        self._reports: dict[int, deque[list[float]]] = {}
        self._charges: dict[str, PodCharge] = {}
        self._assumed: dict[tuple[str, str], Assumption] = {}
        self._reclaimed_uids: dict[int, set[str]] = {}
        self._pod_counts: dict[int, int] = {}
        self._recent: dict[int, dict[str, tuple[float, Amounts]]] = {}

    @property
    def assumptions(self) -> Mapping[tuple[str, str], Assumption]:
        """Assumed pods by uid and node."""
        return self._assumed

    @property
    def pod_count(self) -> int:
        """Number of pods with a node."""
        return len(self._charges)

    def charge(self, uid: str) -> PodCharge | None:
        """Return what a bound pod takes; None if no binding of the pod is known."""
        return self._charges.get(uid)

    def charges_on(self, row: int) -> dict[str, PodCharge]:
        """Return the bound pods of a node that take reclaimed resources, by uid."""
        return {uid: self._charges[uid] for uid in self._reclaimed_uids.get(row, ())}

    def apply_node(self, name: str, node: SchedulerNode | None) -> None:
        """Apply a new version of a Node, or its deletion."""
        subject = f"node {name}"
        self._clear_problem(subject)
        if node is None:
            if (row := self.nodes.row(name)) is not None:
                self.nodes.has_node[row] = False
                self.nodes.native_allocatable[row] = 0
                self.alignment.set_node(row, None)
                self._remove_if_unused(row)
            return
        row = self.nodes.add_row(name)
        self.nodes.has_node[row] = True
        annotations, listed = node.metadata.annotations, node.status.allocatable
        reported = self._amounts(subject, "status.allocatable", listed, (CPU, MEMORY))
        self.nodes.native_allocatable[row] = self._machine_amounts(subject, annotations, reported)
        self.alignment.set_node(row, annotations)

    def apply_cnr(self, name: str, cnr: SchedulerCnr | None) -> None:
        """Apply a new version of a CustomNodeResource, or its deletion.

        After a deletion the pods of the node still count. Katalyst (pkg/scheduler/cache/cache.go, RemoveCNR) forgets them with
        the CustomNodeResource: if it is created again, its resources are given away twice.
        """
        nodes, subject = self.nodes, f"customnoderesource {name}"
        self._clear_problem(subject)
        if cnr is None:
            if (row := nodes.row(name)) is not None:
                nodes.has_cnr[row] = False
                nodes.allocatable[row] = 0
                nodes.set_taints(row, ())
                self.alignment.set_cnr(row, None)
                self._set_report(row, np.nan, None)
                self._remove_if_unused(row)
            return
        row = nodes.add_row(name)
        nodes.has_cnr[row] = True
        status = cnr.status
        allocatable = None if status is None or status.resources is None else status.resources.allocatable
        keys = (RECLAIMED_CPU, RECLAIMED_MEMORY)
        # Without the list the node offers nothing: an agent in a dry run omits it (agent/reporter/cnr.py).
        nodes.allocatable[row] = self._amounts(subject, "status.resources.allocatable", allocatable or {}, keys)
        nodes.set_taints(row, () if cnr.spec is None else cnr.spec.taints or ())
        try:
            self.alignment.set_cnr(row, cnr)
        except ValueError as error:
            self._note(subject, str(error))
        metrics = None if status is None else status.node_metric_status
        reported_at_s = np.nan
        if metrics is not None and metrics.update_time:
            try:
                reported_at_s = parse_timestamp(metrics.update_time)
            except ValueError as error:
                self._note(subject, f"status.nodeMetricStatus.updateTime: {error}")
        usage = None if metrics is None or metrics.node_metric is None else metrics.node_metric.generic_usage
        self._set_report(row, reported_at_s, usage)

    def apply_pod(self, old: ScheduledPod | None, new: ScheduledPod | None, placed_at_s: float | None) -> None:
        """Apply a change of a pod. `placed_at_s` is the time at which it got its node, None if that was long ago."""
        if self.problems and (changed := new or old) is not None:
            self._clear_problem(f"pod {key_of(changed.metadata)}")
        if old is not None and (new is None or new.metadata.uid != old.metadata.uid):
            self._settle(old.metadata.uid)
            self._discharge(old.metadata.uid)
        if new is None:
            return
        uid = new.metadata.uid
        if not new.holds_resources:
            # A pod without a node may be in the middle of its binding: its assumption stays.
            if new.spec.node_name:
                self._settle(uid)
            self._discharge(uid)
            return
        assumed = self._assumed.get((uid, new.spec.node_name))
        since_s = placed_at_s if assumed is None else assumed.since_s
        self._settle(uid)
        previous = self._charges.get(uid)
        if previous is not None and previous.node == new.spec.node_name:
            since_s = self._recent.get(self.nodes.add_row(previous.node), {}).get(uid, (None, None))[0]
        self._discharge(uid)
        charge = charge_of(self._parse(new), new.spec.node_name)
        self._charges[uid] = charge
        row = self._add(uid, charge, since_s)
        if charge.reclaimed != (0, 0):
            self._reclaimed_uids.setdefault(row, set()).add(uid)

    def assume(self, pod: SchedulingPod, node: str, now_s: float, *, is_planned: bool = False) -> None:
        """Count a pod on a node before its binding is confirmed. A repeated call sets the time of the assumption again."""
        earlier = self._assumed.get((pod.uid, node))
        charge = charge_of(pod, node) if earlier is None else earlier.charge
        self._assumed[pod.uid, node] = Assumption(charge, now_s, is_planned)
        if earlier is None:
            self._add(pod.uid, charge, now_s)

    def release_plans(self, uids: Collection[str]) -> None:
        """End the planned assumptions of these pods; those of pods that are being bound stay."""
        for (uid, node), assumption in list(self._assumed.items()):
            if assumption.is_planned and uid in uids:
                self.release(uid, node)

    def release(self, uid: str, node: str) -> None:
        """End an assumption whose binding failed."""
        if (assumption := self._assumed.pop((uid, node), None)) is not None:
            self._subtract(uid, assumption.charge)

    @contextmanager
    def without(self, uid: str) -> Iterator[None]:
        """Leave a pod out while it is evaluated, so that it does not compete with itself: a running pod whose placement is
        explained, or a pod whose binding had no response."""
        charges = [each.charge for (assumed, _), each in self._assumed.items() if assumed == uid]
        if (bound := self._charges.get(uid)) is not None:
            charges.append(bound)
        held = [(self.nodes.add_row(charge.node), charge) for charge in charges]
        recents = [self._recent.get(row, {}).pop(uid, None) for row, _ in held]
        for row, charge in held:
            self._count(row, charge, -1)
            self._estimate(row)
            self.alignment.hide(row, uid)
        try:
            yield
        finally:
            for (row, charge), recent in zip(held, recents, strict=True):
                self._count(row, charge, 1)
                if recent is not None:
                    self._recent.setdefault(row, {})[uid] = recent
                self._estimate(row)
                self.alignment.hide(row, "")

    def _settle(self, uid: str) -> None:
        """End all assumptions of a pod, because the API server reported its node or its deletion."""
        for key in [key for key in self._assumed if key[0] == uid] if self._assumed else ():
            self.release(*key)

    def _discharge(self, uid: str) -> None:
        if (charge := self._charges.pop(uid, None)) is not None:
            row = self.nodes.row(charge.node)
            if row is not None and (uids := self._reclaimed_uids.get(row)) is not None:
                uids.discard(uid)
                if not uids:
                    del self._reclaimed_uids[row]
            self._subtract(uid, charge)

    def _add(self, uid: str, charge: PodCharge, since_s: float | None) -> int:
        row = self.nodes.add_row(charge.node)
        self._count(row, charge, 1)
        self._pod_counts[row] = self._pod_counts.get(row, 0) + 1
        if since_s is not None:
            self._recent.setdefault(row, {})[uid] = (since_s, charge.load_basis)
            self._estimate(row)
        self.alignment.add(row, uid, charge.alignment)
        return row

    def _subtract(self, uid: str, charge: PodCharge) -> None:
        row = self.nodes.row(charge.node)
        assert row is not None, "a row stays while a pod counts on it"
        self._count(row, charge, -1)
        self._pod_counts[row] -= 1
        self.alignment.remove(row, uid)
        if (recent := self._recent.get(row)) is not None and recent.pop(uid, None) is not None:
            self._estimate(row)
        self._remove_if_unused(row)

    def _holds_zones(self, uid: str) -> bool:
        """Return whether a pod that a CustomNodeResource lists has its zones for itself. An unknown pod counts as such: either
        it has ended and the CustomNodeResource still lists it, or the watch has not delivered it yet."""
        charge = self._charges.get(uid)
        return charge is None or (charge.alignment is not None and charge.alignment.dedicated)

    def _count(self, row: int, charge: PodCharge, sign: int) -> None:
        nodes = self.nodes
        nodes.requested[row] += sign * np.asarray(charge.reclaimed)
        nodes.requested_nonzero[row] += sign * np.asarray(charge.reclaimed_nonzero)
        nodes.native_requested[row] += sign * np.asarray(charge.native)
        if charge.reclaimed == (0, 0):
            return
        namespace = charge.key.partition("/")[0]
        cpu, memory = self.namespace_requests.get(namespace, Amounts())
        total = Amounts(cpu + sign * charge.reclaimed.millicpu, memory + sign * charge.reclaimed.memory)
        if total == (0, 0):
            self.namespace_requests.pop(namespace, None)
        else:
            self.namespace_requests[namespace] = total

    def _estimate(self, row: int) -> None:
        """Compute the load of pods that the latest report cannot contain."""
        reported_at_s = self.nodes.reported_at_s[row]
        recent = self._recent.get(row, {})
        for uid in [uid for uid, (since_s, _) in recent.items() if since_s + LOAD_RAMP_S <= reported_at_s]:
            del recent[uid]
        if not recent:
            self._recent.pop(row, None)
        self.nodes.unmeasured[row] = estimate_load([basis for _, basis in recent.values()], self._load_factors)

    def _set_report(self, row: int, reported_at_s: float, usage: Mapping[str, Any] | None) -> None:
        nodes, previous_at_s = self.nodes, self.nodes.reported_at_s[row]
        nodes.reported_at_s[row] = reported_at_s
        if usage is None:
            nodes.usage[row], nodes.usage_percentile[row], nodes.harm[row] = np.nan, np.nan, np.nan
            self._reports.pop(row, None)
        elif reported_at_s != previous_at_s or row not in self._reports:
            # A write of another field repeats the latest report, which counts once.
            self._apply_usage(row, usage, reported_at_s - previous_at_s)
        self._estimate(row)

    def _apply_usage(self, row: int, usage: Mapping[str, Any], since_s: float) -> None:
        nodes = self.nodes
        subject, field = f"customnoderesource {nodes.names[row]}", "status.nodeMetricStatus.nodeMetric.genericUsage"
        amounts = self._amounts(subject, field, usage, (CPU, MEMORY))
        values = [amount if key in usage else np.nan for key, amount in zip((CPU, MEMORY), amounts, strict=True)]
        reports = self._reports.setdefault(row, deque(maxlen=MAX_REPORTS))
        reports.append(values)
        nodes.usage[row] = values
        nodes.usage_percentile[row] = np.percentile(reports, self._percentile, axis=0)
        try:
            latest = np.array(parse_harm(usage))
        except ValueError as error:
            self._note(subject, f"{field}: {error}")
            latest = np.full(len(HARM_INDICATORS), np.nan)
        old = nodes.harm[row]
        share = 1 - 0.5 ** (max(since_s, 0.0) / HARM_HALF_LIFE_S) if since_s < np.inf else 1.0
        nodes.harm[row] = np.where(np.isnan(old), latest, old + (latest - old) * share)

    def _remove_if_unused(self, row: int) -> None:
        if not (self.nodes.has_node[row] or self.nodes.has_cnr[row] or self._pod_counts.get(row)):
            self._pod_counts.pop(row, None)
            self._recent.pop(row, None)
            self._reports.pop(row, None)
            self.alignment.remove_row(row)
            self.nodes.remove_row(row)

    def _amounts(self, subject: str, field: str, listed: Mapping[str, Any], keys: tuple[str, str]) -> Amounts:
        """Return both amounts; 0 for an invalid list, which offers nothing. `cpu` is in cores, reclaimed CPU in thousandths."""
        try:
            return amounts_of(listed, *keys, 1000 if keys[0] == CPU else 1)
        except (ValueError, TypeError) as error:
            self._note(subject, f"{field}: {error}")
            return Amounts()

    def _machine_amounts(self, subject: str, annotations: SchedulerNodeAnnotations, reported: Amounts) -> Amounts:
        """Return the amounts that the kubelet reported. The webhook multiplies the amounts of an overcommitted Node, and stores
        the original ones in annotations."""
        results = []
        originals = ((CPU, annotations.original_cpu, 1000), (MEMORY, annotations.original_memory, 1))
        for total, (name, text, scale) in zip(reported, originals, strict=True):
            try:
                original = quantity_units(text, scale) if text else total
            except ValueError as error:
                self._note(subject, f"annotation {OVERCOMMIT_KEYS[name].original_allocatable}: {error}")
                original = total
            results.append(min(original or total, total))
        return Amounts(*results)

    def _parse(self, pod: ScheduledPod) -> SchedulingPod:
        try:
            return parse_scheduling_pod(pod)
        except ValueError as error:
            self._note(f"pod {key_of(pod.metadata)}", str(error))
        plain = without_level(pod)
        try:
            # An unknown QoS level must not hide what the pod takes.
            return parse_scheduling_pod(plain)
        except ValueError:
            # The API server stores valid quantities only. If one is invalid nevertheless, the pod counts nothing: an exception
            # would end this process, and every later one that lists the pod.
            return parse_scheduling_pod(msgspec.structs.replace(plain, spec=ScheduledPodSpec()))

    def _note(self, subject: str, problem: str) -> None:
        if subject in self.problems or len(self.problems) < MAX_PROBLEMS:
            self.problems[subject] = problem
            self.problem_changes += 1

    def _clear_problem(self, subject: str) -> None:
        if self.problems.pop(subject, None) is not None:
            self.problem_changes += 1


def charge_of(pod: SchedulingPod, node: str) -> PodCharge:
    """Return what a pod takes from a node."""
    return PodCharge(
        pod.key,
        node,
        _shared(pod.reclaimed),
        _shared(pod.reclaimed_nonzero),
        _shared(pod.native),
        _shared(pod.load_basis),
        pod.priority,
        None if pod.alignment is None else shared_alignment(pod.alignment),
    )


def shared_alignment(alignment: PodAlignment) -> PodAlignment:
    """Return one object for equal alignments, of pods with few containers.

    An alignment of a thousand containers has 130 KiB, and would stay in the cache after its pod ended.
    """
    return _cached_alignment(alignment) if len(alignment.containers) <= MAX_SHARED_CONTAINERS else alignment


@lru_cache(maxsize=65_536)
def _shared(amounts: Amounts) -> Amounts:
    """Return one object for equal amounts: the pods of a cluster have few different requests, and 150,000 copies are 60 MiB."""
    return amounts


@lru_cache(maxsize=65_536)
def _cached_alignment(alignment: PodAlignment) -> PodAlignment:
    return alignment


def without_level(pod: ScheduledPod) -> ScheduledPod:
    """Return the pod without its QoS level, which makes it a shared_cores pod."""
    metadata = msgspec.structs.replace(pod.metadata, annotations=PodAnnotations())
    return msgspec.structs.replace(pod, metadata=metadata)

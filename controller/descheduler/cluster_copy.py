"""The descheduler's copy of the cluster: state and plugins of the scheduler, and objects that only the descheduler reads."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from api.eviction import TAINT_PREFIX
from api.qos import QoSLevel
from controller.descheduler.descheduler_kinds import (
    BUDGETS,
    MEASURED_CNRS,
    ZONED_MEASURED_CNRS,
    MovablePod,
    PodDisruptionBudget,
)
from controller.descheduler.descheduler_settings import DeschedulerSettings
from controller.descheduler.node_load import NodeLoad, Pair
from controller.descheduler.stock_placement import TargetNode, is_unschedulable
from controller.kinds import ControllerNode
from controller.lifecycle.agent_health import MAX_COPY_AGE_S, MAX_WATCH_S
from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.harm_indicators import parse_harm
from controller.scheduler.scheduler_kinds import (
    SCHEDULER_PODS,
    NodeMetadata,
    SchedulerCnr,
    SchedulerNode,
    SchedulerNodeAnnotations,
    SchedulerNodeStatus,
)
from controller.scheduler.scheduler_process import RUNNING_PODS, build_chain
from controller.scheduler.scheduler_settings import SchedulerConfig
from controller.scheduler.scheduling_pod import (
    Amounts,
    ScheduledPod,
    SchedulingPod,
    amounts_of,
    parse_scheduling_pod,
    quantity_units,
)
from controller.scheduler.topology_plugin import topology_rules
from controller.webhooks.colocation_profiles import parse_label_selector
from kube.client import KubeClient
from kube.informer import Informer
from kube.watch import ObjectChange


class ClusterCopy:
    """Informers, and the state that is computed from their objects. The caller runs the informers."""

    def __init__(self, client: KubeClient, nodes: Informer[ControllerNode], settings: DeschedulerSettings) -> None:
        scheduler = msgspec.convert(settings.scheduler, SchedulerConfig)
        rules = topology_rules(scheduler.topology)
        self.factors: Pair = (scheduler.load.cpu_factor / 100, scheduler.load.memory_factor / 100)
        self.state = ClusterState(self.factors, scheduler.load.percentile, rules)
        # Without elastic quotas, because an eviction frees the same amounts that the new pod requests.
        self.chain = build_chain(scheduler)
        self.nodes = nodes
        self.cnrs: Informer[SchedulerCnr] = Informer(
            client, MEASURED_CNRS if rules is None else ZONED_MEASURED_CNRS, max_s=MAX_WATCH_S
        )
        self.pods: Informer[ScheduledPod] = Informer(client, SCHEDULER_PODS, RUNNING_PODS, max_s=MAX_WATCH_S)
        self.budgets: Informer[PodDisruptionBudget] = Informer(client, BUDGETS, max_s=MAX_WATCH_S)
        self._selector = parse_label_selector("nodeSelector", settings.low_node_load.node_selector)
        nodes.listen(self._on_node)
        self.cnrs.listen(lambda change: self.state.apply_cnr(change.key, change.new))
        self.pods.listen(self._on_pod)

    @property
    def informers(self) -> tuple[Informer[Any], ...]:
        """The informers of this copy, except the informer of nodes, which belongs to the caller."""
        return (self.cnrs, self.pods, self.budgets)

    def stale_resources(self, tick_s: float) -> list[str]:
        """Return the resources without an event for more than MAX_COPY_AGE_S; `tick_s` is monotonic."""
        return [
            informer.resource.gvr
            for informer in (self.nodes, *self.informers)
            if (age_s := informer.age_s(tick_s)) is None or age_s > MAX_COPY_AGE_S
        ]

    def loads(self) -> dict[str, NodeLoad]:
        """Return the reported load of each selected node; one without a CustomNodeResource reports nothing."""
        result, arrays = {}, self.state.nodes
        for name, node in self.nodes.store.items():
            cnr, row = self.cnrs.store.get(name), arrays.row(name)
            if row is None or not self._selector.matches(node.metadata.labels):
                continue
            taints = () if cnr is None or cnr.spec is None else cnr.spec.taints or ()
            keys = (*(taint.key for taint in taints), *(str(taint.get("key", "")) for taint in node.spec.taints))
            result[name] = NodeLoad(
                name=name,
                capacity=_pair(arrays.native_allocatable[row].tolist()),
                usage=_pair(arrays.usage[row].tolist()),
                unmeasured=_pair(arrays.unmeasured[row].tolist()),
                harm=_latest_harm(cnr),
                pressures=tuple(
                    dict.fromkeys(key.removeprefix(TAINT_PREFIX) for key in keys if key.startswith(TAINT_PREFIX))
                ),
                reported_at_s=float(arrays.reported_at_s[row]),
                is_schedulable=not is_unschedulable(node.spec.taints),
            )
        return result

    def target_nodes(self, names: Iterable[str]) -> dict[str, TargetNode]:
        """Return the properties of these nodes that kube-scheduler's own plugins evaluate."""
        counts = Counter(pod.spec.node_name for pod in self.pods.store.values() if pod.holds_resources)
        result, arrays = {}, self.state.nodes
        for name in names:
            node, row = self.nodes.store.get(name), arrays.row(name)
            if node is None or row is None:
                continue
            millicpu, memory, max_pods = _reported_room(node)
            requested = arrays.native_requested[row].tolist()
            free = Amounts(millicpu - int(requested[0]), memory - int(requested[1]))
            result[name] = TargetNode(name, node.metadata.labels, node.spec.taints, free, max_pods - counts[name])
        return result

    def group_usages(self, name: str) -> dict[QoSLevel, Pair]:
        """Return the measured usage of the pods of each QoS level of a node; invalid and unknown ones are left out."""
        cnr = self.cnrs.store.get(name)
        metrics = None if cnr is None or cnr.status is None else cnr.status.node_metric_status
        result = {}
        for group in getattr(metrics, "group_metric", None) or ():
            usage = group.generic_usage or {}
            try:
                amounts = amounts_of(usage, "cpu", "memory", 1000)
                level = QoSLevel(group.qos_level)
            except (ValueError, TypeError):
                continue
            result[level] = (
                float(amounts.millicpu) if "cpu" in usage else math.nan,
                float(amounts.memory) if "memory" in usage else math.nan,
            )
        return result

    def with_requests(self, pods: Mapping[str, MovablePod]) -> list[tuple[MovablePod, SchedulingPod]]:
        """Return listed pods with their parsed requests; those that the state does not count yet are left out."""
        result = []
        for key, pod in pods.items():
            stored = self.pods.store.get(key)
            if stored is None or stored.metadata.uid != pod.metadata.uid or not stored.holds_resources:
                continue
            try:
                result.append((pod, parse_scheduling_pod(stored)))
            except ValueError:
                continue  # Its QoS level is unknown; the state counts it as shared_cores, and it stays.
        return result

    def _on_node(self, change: ObjectChange[ControllerNode]) -> None:
        node = change.new
        if node is None:
            self.state.apply_node(change.key, None)
            return
        annotations = msgspec.convert(dict(node.metadata.annotations), SchedulerNodeAnnotations)
        metadata = NodeMetadata(name=change.key, uid=node.metadata.uid, annotations=annotations)
        status = SchedulerNodeStatus(allocatable=node.status.allocatable)
        self.state.apply_node(change.key, SchedulerNode(metadata=metadata, status=status))

    def _on_pod(self, change: ObjectChange[ScheduledPod]) -> None:
        # Pods of the first list have run for a while; their usage is in the reports.
        self.state.apply_pod(change.old, change.new, time.time() if self.pods.synced.is_set() else None)


def _pair(amounts: list[float]) -> Pair:
    return (amounts[0], amounts[1])


def _latest_harm(cnr: SchedulerCnr | None) -> tuple[float, float, float, float]:
    """Return the harm of the latest report; NaN for what is invalid, which the state lists as a problem. The state has a mean
    that decays, in which one extreme report would be hot for as many reports as a node has to be hot before it is relieved."""
    metrics = None if cnr is None or cnr.status is None else cnr.status.node_metric_status
    usage = None if metrics is None or metrics.node_metric is None else metrics.node_metric.generic_usage
    try:
        harm = parse_harm(usage or {})
    except ValueError:
        harm = parse_harm({})
    return (harm[0], harm[1], harm[2], harm[3])


def _reported_room(node: ControllerNode) -> tuple[int, int, int]:
    """Return the thousandths of a core, bytes and pods that kube-scheduler gives away on a node: what the Node reports, after
    an overcommit ratio multiplied it; the state has the amounts before that."""
    allocatable = node.status.allocatable
    try:
        amounts = amounts_of(allocatable, "cpu", "memory", 1000)
        return (amounts.millicpu, amounts.memory, quantity_units(allocatable.get("pods", 0)))
    except (ValueError, TypeError):
        return (0, 0, 0)

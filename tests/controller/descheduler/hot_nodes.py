"""Nodes, pods and plan inputs for tests of the descheduler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.qos import QoSLevel
from controller.descheduler.descheduler_kinds import MovablePod, PodDisruptionBudget
from controller.descheduler.descheduler_settings import DeschedulerSettings
from controller.descheduler.movable_pods import DisruptionAllowances
from controller.descheduler.move_history import MoveHistory
from controller.descheduler.move_plan import HotNode, MovePlanner, NodePlan, PlanInputs
from controller.descheduler.node_load import NodeLoad, Pair, classify_nodes
from controller.descheduler.stock_placement import TargetNode
from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.scheduler_process import build_chain
from controller.scheduler.scheduler_settings import SchedulerConfig
from controller.scheduler.scheduling_pod import Amounts, ScheduledPod, parse_scheduling_pod
from kube.objects import format_timestamp
from tests.controller.scheduler.objects import NOW_S, a_cnr, a_node

GIB = 1 << 30
CAPACITY = (10_000.0, 100.0 * GIB)
"""10 cores and 100 GiB, so that 100 millicores or 1 GiB are one percent."""
OWNER = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-abc", "uid": "u", "controller": True}


def settings(**fields: Any) -> DeschedulerSettings:
    """Return settings in the names of the file; hot from 50 % on, targets up to 20 % of CPU."""
    node_load = {"lowThresholds": {"cpu": 20}, "highThresholds": {"cpu": 50}, **fields.pop("lowNodeLoad", {})}
    return msgspec.convert({"lowNodeLoad": node_load, **fields}, DeschedulerSettings)


def a_load(name: str, cpu: float = math.nan, memory: float = math.nan, **fields: Any) -> NodeLoad:
    """Return a node whose CPU and memory are used by these percentages."""
    usage = (cpu / 100 * CAPACITY[0], memory / 100 * CAPACITY[1])
    return NodeLoad(**{"name": name, "capacity": CAPACITY, "usage": usage, "reported_at_s": NOW_S, **fields})


def a_movable(name: str, *, owner: Mapping[str, Any] | None = OWNER, age_s: float = 3600, **fields: Any) -> MovablePod:
    """Return a running pod of a ReplicaSet; `fields` are `annotations`, `labels`, `restarts`, `phase` and fields of its
    spec."""
    metadata = {
        "name": name, "namespace": fields.pop("namespace", "default"), "uid": f"uid-{name}",
        "annotations": fields.pop("annotations", {}), "labels": fields.pop("labels", {}),
        "ownerReferences": [owner] if owner else [], "deletionTimestamp": fields.pop("deletionTimestamp", None),
    }  # fmt: skip
    started = format_timestamp(NOW_S - age_s)
    statuses = [{"restartCount": fields.pop("restarts", 0)}]
    status = {"phase": fields.pop("phase", "Running"), "startTime": started, "containerStatuses": statuses}
    spec = {"nodeName": "hot", "containers": [{"name": "main"}], **fields}
    return msgspec.convert({"metadata": metadata, "spec": spec, "status": status}, MovablePod)


class PodSpec(NamedTuple):
    """A pod on a node: its usage in percent of CPU is what its request is."""

    name: str
    cpu: float
    level: str = "reclaimed_cores"
    fields: Mapping[str, Any] = {}


class Cluster:
    """The state of the scheduler, with nodes by their CPU usage in percent; reclaimed room is what the nodes do not use."""

    def __init__(self, usages: Mapping[str, float], config: DeschedulerSettings, *, offered: int = 10_000) -> None:
        self.settings, self.state = config, ClusterState()
        self.chain = build_chain(SchedulerConfig())
        self.loads: dict[str, NodeLoad] = {}
        self._pods: dict[str, list[Any]] = {}
        for name, percent in usages.items():
            self.state.apply_node(name, a_node(name, "10", "100Gi"))
            usage = {"cpu": f"{percent * 100:.0f}m", "memory": "1Gi"}
            cnr = a_cnr(name, offered, 100 * GIB, usage=usage, at=format_timestamp(NOW_S))
            self.state.apply_cnr(name, cnr)
            self.loads[name] = a_load(name, percent, 1)

    def add(self, node: str, pod: PodSpec) -> None:
        """Place a pod on a node; its usage is its request."""
        movable = a_movable(pod.name, **{"owner": {**OWNER, "name": f"rs-{pod.name}"}, **pod.fields})
        amount = f"{pod.cpu * 100:.0f}"
        reclaimed = pod.level == "reclaimed_cores"
        requests = (
            {RECLAIMED_CPU: amount, RECLAIMED_MEMORY: "1048576"}
            if reclaimed
            else {"cpu": f"{amount}m", "memory": "1Mi"}
        )
        metadata = {
            "name": pod.name, "namespace": movable.metadata.namespace, "uid": movable.metadata.uid,
            "annotations": {"katalyst.kubewharf.io/qos_level": pod.level},
        }  # fmt: skip
        resources = {"requests": requests, "limits": requests}
        spec = {
            "nodeName": node,
            "priority": movable.spec.priority,
            "containers": [{"name": "main", "resources": resources}],
        }
        stored = msgspec.convert({"metadata": metadata, "spec": spec, "status": {"phase": "Running"}}, ScheduledPod)
        self.state.apply_pod(None, stored, None)
        self._pods.setdefault(node, []).append((movable, parse_scheduling_pod(stored)))

    def inputs(self, budgets: Sequence[Mapping[str, Any]] = (), history: MoveHistory | None = None) -> PlanInputs:
        classes, thresholds = classify_nodes(self.loads.values(), self.settings, NOW_S)
        allowances = DisruptionAllowances(msgspec.convert(list(budgets), list[PodDisruptionBudget]))
        targets = {name: TargetNode(name, {}, (), Amounts(10_000, 100 * GIB), 110) for name in self.loads}
        return PlanInputs(
            state=self.state, chain=self.chain, settings=self.settings, factors=(0.85, 0.7), loads=self.loads,
            classes=classes, thresholds=thresholds, targets=targets, allowances=allowances,
            history=history or MoveHistory(), now_s=NOW_S,
        )  # fmt: skip

    def hot_nodes(self) -> list[HotNode]:
        classes, _ = classify_nodes(self.loads.values(), self.settings, NOW_S)
        return [HotNode(name, self._pods.get(name, []), self._usage_by_level(name)) for name in classes.hot]

    def _usage_by_level(self, node: str) -> dict[QoSLevel, Pair]:
        """Return the usage of each QoS level, by which the estimate of a pod is its request."""
        result: dict[QoSLevel, Pair] = {}
        for _, parsed in self._pods.get(node, []):
            cpu, memory = result.get(parsed.level, (0.0, 0.0))
            result[parsed.level] = (cpu + parsed.load_basis.millicpu, memory + parsed.load_basis.memory)
        return result

    def plan(
        self, budgets: Sequence[Mapping[str, Any]] = (), history: MoveHistory | None = None
    ) -> tuple[list[tuple[str, str]], dict[str, str]]:
        """Return planned pods with their targets, and why each other pod stays."""
        plans = MovePlanner(self.inputs(budgets, history)).plan(self.hot_nodes())
        return moves_of(plans), {each.pod: each.reason for plan in plans for each in plan.skipped}


def moves_of(plans: Sequence[NodePlan]) -> list[tuple[str, str]]:
    """Return name and target of every planned pod."""
    return [(move.candidate.pod.metadata.name, move.target) for plan in plans for move in plan.moves]

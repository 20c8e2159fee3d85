"""Verbs filter, prioritize and preempt of the extender: plain messages in and out. Pure: the time is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from controller.scheduler.cluster_state import ClusterState, PodCharge
from controller.scheduler.extender_messages import (
    MAX_NODE_NAMES,
    ExtenderArgs,
    ExtenderFilterResult,
    ExtenderPreemptionArgs,
    ExtenderPreemptionResult,
    HostPriority,
    MetaPod,
    MetaVictims,
)
from controller.scheduler.gangs import GangRejection, Gangs
from controller.scheduler.node_arrays import BoolArray
from controller.scheduler.pending_pods import INCOMPLETE_GANG, INVALID_POD, UNKNOWN_NODES
from controller.scheduler.plugin_chain import FilterOutcome, PluginChain
from controller.scheduler.scheduling_pod import Amounts, SchedulingPod, parse_pending_pod

UNKNOWN_NODE = "node(s) not known to the extender yet"
MAX_EXTENDER_SCORE = 10
"""MaxExtenderPriority of kube-scheduler, which multiplies it by 10 to compare it with its own plugins' scores."""


class Extender:
    """Evaluates pods on the state of the cluster."""

    def __init__(self, state: ClusterState, chain: PluginChain) -> None:
        self.state, self.chain, self.gangs = state, chain, Gangs(state, chain)
        self.planned_keys: list[str] = []
        """Other pods of the gang that the latest filter request planned; kube-scheduler has to try them now."""
        self.rejecting_plugin = ""
        """Plugin that rejected most nodes of the latest filter request, or one of OTHER_REJECTIONS; empty if none did."""
        self.needs_room = True
        """Whether free resources of a node would help the pod of the latest filter request. False if its gang lacks pods, or if
        one of its values is invalid: then kube-scheduler tries it again when those pods arrive, or when it is corrected."""

    def filter(self, args: ExtenderArgs, now_s: float) -> ExtenderFilterResult:
        """Return the nodes that pass every plugin, and for each other node the reason why it does not."""
        names, self.planned_keys, self.rejecting_plugin, self.needs_room = _names(args), [], "", True
        if isinstance(names, str):
            return ExtenderFilterResult(error=names)
        rows = self.state.nodes.rows_of(names)
        try:
            pod = parse_pending_pod(args.pod)
            gang = self.gangs.choose_node(args.pod, names, rows, now_s)
        except ValueError as error:
            # The request is valid, the pod is not: it stays pending, with this text in its events, until it is corrected.
            self.rejecting_plugin, self.needs_room = INVALID_POD, False
            return ExtenderFilterResult(failed_and_unresolvable_nodes=dict.fromkeys(names, str(error)))
        if isinstance(gang, GangRejection):
            self.rejecting_plugin, self.needs_room = INCOMPLETE_GANG, gang.is_complete
            return ExtenderFilterResult(failed_and_unresolvable_nodes=dict.fromkeys(names, gang.message))
        if gang is not None:
            node, self.planned_keys = gang
            others = dict.fromkeys((name for name in names if name != node), f"planned with its gang on {node}")
            return ExtenderFilterResult(node_names=[node], failed_and_unresolvable_nodes=others)
        is_listed = rows >= 0
        with self.state.without(pod.uid):
            outcome = self.chain.filter(pod, self.state.nodes, rows, now_s)
        passes = outcome.passes & is_listed
        self.rejecting_plugin = self._rejecting_plugin(outcome, is_listed)
        # Every rejection is final for this attempt. kube-scheduler's own plugins accepted these nodes, so its preemption would
        # select no victim on them, and report an error for each (preemption.go, DryRunPreemption).
        rejected = {
            names[index]: self.chain.reason(outcome, index).message if is_listed[index] else UNKNOWN_NODE
            for index in np.flatnonzero(~passes).tolist()
        }
        passing = [names[index] for index in np.flatnonzero(passes).tolist()] if rejected else names
        return ExtenderFilterResult(node_names=passing, failed_and_unresolvable_nodes=rejected)

    def _rejecting_plugin(self, outcome: FilterOutcome, is_listed: BoolArray) -> str:
        sources = outcome.plugins[~outcome.passes & is_listed]
        if len(sources):
            return self.chain.plugins[int(np.bincount(sources).argmax())].name
        return "" if is_listed.all() else UNKNOWN_NODES

    def prioritize(self, args: ExtenderArgs, now_s: float) -> list[HostPriority]:
        """Return the score of each node, 0 to 10; no scores for an invalid request, whose filter reports the reason."""
        names = _names(args)
        try:
            pod = parse_pending_pod(args.pod)
        except ValueError:
            return []
        if isinstance(names, str):
            return []
        rows = self.state.nodes.rows_of(names)
        with self.state.without(pod.uid):
            scores = self.chain.score(pod, self.state.nodes, rows, now_s)
        scores[rows < 0] = 0
        rounded = np.rint(scores * (MAX_EXTENDER_SCORE / 100)).astype(np.int64).tolist()
        return list(map(HostPriority, names, rounded))

    def preempt(self, args: ExtenderPreemptionArgs, now_s: float) -> ExtenderPreemptionResult:
        """Return the nodes on which removing pods of lower priority makes room, with those pods.

        kube-scheduler does not count reclaimed resources, so the victims that it selects for other resources may be too few.
        Without this verb it would remove these victims although the pod does not fit even then. kube-scheduler considers only
        nodes on which its own plugins need victims (pkg/scheduler/framework/preemption/preemption.go, DryRunPreemption), so it
        never preempts for reclaimed resources alone.
        """
        try:
            pod = parse_pending_pod(args.pod)
        except ValueError:
            return ExtenderPreemptionResult()
        results: dict[str, MetaVictims] = {}
        for name, victims in (args.node_name_to_meta_victims or {}).items():
            selected = () if victims is None else [each.uid for each in victims.pods or ()]
            violations = 0 if victims is None else victims.num_pdb_violations
            if (uids := self._victims(pod, name, selected, now_s)) is not None:
                pods = [MetaPod(uid=uid) for uid in uids]
                results[name] = MetaVictims(pods=pods, num_pdb_violations=violations)
        return ExtenderPreemptionResult(node_name_to_meta_victims=results)

    def _victims(self, pod: SchedulingPod, name: str, selected: Iterable[str], now_s: float) -> list[str] | None:
        """Return the pods to remove from a node; None if the pod does not fit even then, or if no removal is needed."""
        nodes, row = self.state.nodes, self.state.nodes.row(name)
        if row is None:
            return None
        rows = np.array([row])
        outcome = self.chain.filter(pod, nodes, rows, now_s)
        if not outcome.passes[0] and not self.chain.reason(outcome, 0).preemptible:
            return None
        # The pods of a node may request more than it offers. That does not affect a pod without reclaimed requests.
        free = nodes.allocatable[row] - nodes.requested[row]
        missing = np.asarray(pod.reclaimed) - free if pod.reclaimed != (0, 0) else np.zeros(2, np.int64)
        return add_victims(pod.priority, missing.tolist(), self.state.charges_on(row), list(selected))


def add_victims(
    priority: int, missing: list[int], charges: Mapping[str, PodCharge], selected: list[str]
) -> list[str] | None:
    """Return the selected victims, and further ones until the missing CPU and memory are free; None if they cannot be freed.

    Only reclaimed pods below the priority are added, those with the lowest priority first, of these the largest.
    """
    cpu, memory = missing
    for uid in selected:
        freed = charges[uid].reclaimed if uid in charges else Amounts()
        cpu, memory = cpu - freed.millicpu, memory - freed.memory
    victims = list(selected)
    candidates = [(uid, each) for uid, each in charges.items() if uid not in selected and each.priority < priority]
    for uid, charge in sorted(candidates, key=lambda item: (item[1].priority, -item[1].reclaimed.millicpu, item[0])):
        if cpu <= 0 and memory <= 0:
            break
        if (cpu > 0 and charge.reclaimed.millicpu) or (memory > 0 and charge.reclaimed.memory):
            victims.append(uid)
            cpu, memory = cpu - charge.reclaimed.millicpu, memory - charge.reclaimed.memory
    return victims if victims and cpu <= 0 and memory <= 0 else None


def _names(args: ExtenderArgs) -> list[str] | str:
    """Return the candidate nodes, or what is wrong with the request."""
    if args.node_names is None:
        return (
            "the request has no NodeNames; set nodeCacheCapable: true for this extender in KubeSchedulerConfiguration"
        )
    if len(args.node_names) > MAX_NODE_NAMES:
        return f"the request names {len(args.node_names)} nodes; at most {MAX_NODE_NAMES} are supported"
    return args.node_names

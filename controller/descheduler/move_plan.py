"""Plans moves from hot nodes to targets, by the plugins that place pods. Pure.
Each planned pod is assumed on its target in the state of the cluster and charged to the target's usage, so that the next pod is
evaluated with it. At the end the assumptions are released, because the scheduler decides where a pod really runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from api.qos import QoSLevel
from controller.descheduler.descheduler_kinds import MovablePod
from controller.descheduler.descheduler_settings import RESOURCES, DeschedulerSettings
from controller.descheduler.movable_pods import (
    PASSING_OBSTACLES,
    DisruptionAllowances,
    MoveCandidate,
    MoveRules,
    estimate_usage,
    move_order,
    relief,
    workload_of,
)
from controller.descheduler.move_history import MoveHistory
from controller.descheduler.node_load import (
    HotCause,
    HotReason,
    NodeClasses,
    NodeLoad,
    NodeThresholds,
    Pair,
    find_hot_reasons,
    severity,
)
from controller.descheduler.stock_placement import TargetNode, stock_obstacle
from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.plugin_chain import PluginChain
from controller.scheduler.scheduling_pod import Amounts, SchedulingPod

MIN_RELIEF = 0.005
"""Minimum relief by a move, as a share of the node's capacity."""
MAX_EVALUATIONS = 100
"""Pods for which targets are searched in one evaluation: 0.5 s for 5,000 nodes, in which the controller does nothing else."""
_USAGE_CAUSES = (HotCause.CPU_USAGE, HotCause.MEMORY_USAGE)


class HotNode(NamedTuple):
    """A node to be relieved, with all its pods."""

    name: str
    pods: Sequence[tuple[MovablePod, SchedulingPod]]
    groups: Mapping[QoSLevel, Pair]
    """Measured usage of the pods of each QoS level; only what is reported."""


class PlanInputs(NamedTuple):
    """Inputs from which a plan is computed."""

    state: ClusterState
    chain: PluginChain
    settings: DeschedulerSettings
    factors: Pair
    """Estimated usage of a pod as a share of its requests, for CPU and memory, as in LoadAware."""
    loads: Mapping[str, NodeLoad]
    classes: NodeClasses
    thresholds: NodeThresholds
    targets: Mapping[str, TargetNode]
    allowances: DisruptionAllowances
    history: MoveHistory
    now_s: float


class PlannedMove(NamedTuple):
    """A pod to evict, and the node that would take it."""

    candidate: MoveCandidate
    source: str
    target: str
    gain: float
    """Estimated share of the source's capacity that the pod uses, in the resources that make the source hot."""
    reasons: tuple[HotReason, ...]


class SkippedPod(NamedTuple):
    """A pod of a hot node that is not moved, and why."""

    pod: str
    reason: str


class NodePlan(NamedTuple):
    """Moves of one hot node, and its pods that stay."""

    node: str
    moves: tuple[PlannedMove, ...]
    skipped: tuple[SkippedPod, ...]


class _Refusal(NamedTuple):
    why: str
    passes_by_itself: bool = False
    """Whether a later evaluation may move the pod: a budget or a cool-down does not allow it now."""


class MovePlanner:
    """Plans one evaluation; use it once."""

    def __init__(self, inputs: PlanInputs) -> None:
        self._inputs, self._rules = inputs, MoveRules(inputs.settings)
        weights = inputs.settings.low_node_load.resource_weights
        self._weights = (float(weights.get("cpu", 1)), float(weights.get("memory", 1)))
        resting = inputs.history.sources
        names = [name for name in inputs.classes.targets if name in inputs.targets and name not in resting]
        self._targets = {name: inputs.targets[name] for name in names}
        self._added = {name: [0.0, 0.0] for name in names}
        self._evicted: Counter[str] = Counter()
        """Planned evictions by namespace, by workload, and in all under an empty name."""
        self._assumed: list[tuple[str, str]] = []
        self._unplaceable: dict[tuple[str, Amounts, Amounts], str] = {}
        self._evaluations = 0

    def plan(self, nodes: Sequence[HotNode]) -> tuple[NodePlan, ...]:
        """Return the plan of each node, in this order. The state of the cluster is unchanged afterwards."""
        try:
            return tuple(self._relieve(node) for node in nodes)
        finally:
            for uid, name in self._assumed:
                self._inputs.state.release(uid, name)

    def added_usage(self, target: str) -> Pair:
        """Return the usage that the plan has charged to a target."""
        return (self._added[target][0], self._added[target][1])

    def _relieve(self, node: HotNode) -> NodePlan:
        inputs, now_s = self._inputs, self._inputs.now_s
        load = inputs.loads[node.name]
        usages = estimate_usage([parsed for _, parsed in node.pods], node.groups, load.usage, inputs.factors)
        columns = _columns(inputs.classes.hot[node.name])
        gains = {uid: relief(usage, load.capacity, columns, self._weights) for uid, usage in usages.items()}
        skipped, candidates = [], []
        waiting = ""
        for pod, parsed in node.pods:
            if obstacle := self._rules.obstacle(pod, parsed.level, now_s):
                skipped.append(SkippedPod(pod.key, obstacle))
                if parsed.is_reclaimed and obstacle in PASSING_OBSTACLES and gains[parsed.uid] >= MIN_RELIEF:
                    waiting = waiting or pod.key
            else:
                candidates.append(MoveCandidate(pod, parsed, workload_of(pod), usages[parsed.uid]))
        candidates.sort(key=lambda each: move_order(each, gains[each.parsed.uid], now_s))
        moves: list[PlannedMove] = []
        for candidate in candidates:
            remaining = self._remaining(load, moves)
            if not remaining:
                skipped.append(SkippedPod(candidate.pod.key, "the moves before it are enough for now"))
            elif waiting and not candidate.parsed.is_reclaimed:
                skipped.append(SkippedPod(candidate.pod.key, f"reclaimed pods are moved first, and {waiting} waits"))
            else:
                result = self._plan_move(candidate, load, remaining, len(moves))
                if isinstance(result, PlannedMove):
                    moves.append(result)
                    continue
                skipped.append(SkippedPod(candidate.pod.key, result.why))
                if result.passes_by_itself and candidate.parsed.is_reclaimed:
                    waiting = waiting or candidate.pod.key
        return NodePlan(node.name, tuple(moves), tuple(skipped))

    def _remaining(self, load: NodeLoad, moves: Sequence[PlannedMove]) -> tuple[HotReason, ...]:
        """Return why the node is still hot after the moves. The effect of a move on a latency or a pressure is not predictable:
        after one move these reasons are left out, and the next reports decide."""
        usage = tuple(
            amount - sum(move.candidate.usage[column] for move in moves) for column, amount in enumerate(load.usage)
        )
        reasons = find_hot_reasons(
            load._replace(usage=(usage[0], usage[1])), self._inputs.thresholds, self._inputs.settings
        )
        return tuple(reason for reason in reasons if reason.cause in _USAGE_CAUSES or not moves)

    def _plan_move(
        self, candidate: MoveCandidate, load: NodeLoad, reasons: tuple[HotReason, ...], planned: int
    ) -> PlannedMove | _Refusal:
        """Return the move of a pod, which is charged to its target, or why it is not moved."""
        if all(reason.cause is HotCause.INTERFERENCE for reason in reasons) and not candidate.parsed.is_reclaimed:
            return _Refusal("only reclaimed pods cause the interference")
        gain = relief(candidate.usage, load.capacity, _columns(reasons), self._weights)
        if gain < MIN_RELIEF:
            return _Refusal(f"its move would relieve {gain:.1%} of the node, less than {MIN_RELIEF:.1%}")
        if why := self._exhausted(candidate, planned):
            return _Refusal(why, passes_by_itself=True)
        if why := self._inputs.allowances.blocking(candidate.pod):
            return _Refusal(why, passes_by_itself=self._inputs.allowances.may_allow_later(candidate.pod))
        target = self._find_target(candidate, load.name)
        if isinstance(target, str):
            return _Refusal(target)
        self._charge(candidate, target)
        return PlannedMove(candidate, load.name, target.name, gain, reasons)

    def _exhausted(self, candidate: MoveCandidate, planned: int) -> str:
        """Return the limit or the cool-down that does not allow the move; empty if all allow it."""
        settings, namespace = self._inputs.settings, candidate.pod.metadata.namespace
        counts = (
            ("Node", planned, settings.max_no_of_pods_to_evict_per_node),
            ("Total", self._evicted[""], settings.max_no_of_pods_to_evict_total),
            ("Namespace", self._evicted[namespace], settings.max_no_of_pods_to_evict_per_namespace),
            ("Workload", self._evicted[candidate.workload], settings.max_no_of_pods_to_evict_per_workload),
        )
        for name, count, limit in counts:
            if count >= limit:
                field = f"maxNoOfPodsToEvict{'' if name == 'Total' else 'Per'}{name}"
                return f"{field} is {limit}"
        moved_at_s = self._inputs.history.workloads.get(candidate.workload)
        if moved_at_s is not None:
            age_s = max(self._inputs.now_s - moved_at_s, 0.0)
            requested = f"the eviction of a pod of {candidate.workload} was requested {age_s:.0f} s ago"
            return f"{requested}, workloadCooldownS is {settings.workload_cooldown_s:g}"
        return ""

    def _find_target(self, candidate: MoveCandidate, source: str) -> TargetNode | str:
        """Return the node with the best score of those that the pod fits without making them hot, or why there is none."""
        parsed = candidate.parsed
        kind = (candidate.workload, parsed.reclaimed, parsed.native)
        # Targets only become fuller during a plan, so a pod that did not fit does not fit later.
        if kind in self._unplaceable:
            return self._unplaceable[kind]
        if not self._targets:
            return "no node is below the low thresholds and without harm"
        if self._evaluations >= MAX_EVALUATIONS:
            return f"this evaluation has searched targets for {MAX_EVALUATIONS} pods already; the next one tries this pod again"
        self._evaluations += 1
        inputs, names = self._inputs, [name for name in self._targets if name != source]
        obstacles: Counter[str] = Counter()
        for name in self._by_score(parsed, names, obstacles):
            target = self._targets[name]
            why = stock_obstacle(candidate.pod, parsed.native, target) if inputs.settings.low_node_load.node_fit else ""
            if not (why := why or self._becomes_hot(candidate, name)):
                return target
            obstacles[why] += 1
        listed = ", ".join(f"{count} {text}" for text, count in obstacles.most_common(4))
        self._unplaceable[kind] = f"no target takes it: {listed}"
        return self._unplaceable[kind]

    def _by_score(self, parsed: SchedulingPod, names: list[str], obstacles: Counter[str]) -> list[str]:
        """Return the nodes that the scheduler's plugins accept, the one with the best score first."""
        inputs, nodes = self._inputs, self._inputs.state.nodes
        rows = nodes.rows_of(names)
        if not inputs.settings.low_node_load.node_fit:
            return sorted(names, key=lambda name: severity(inputs.loads[name], inputs.settings.low_node_load))
        outcome = inputs.chain.filter(parsed, nodes, rows, inputs.now_s)
        scores = inputs.chain.score(parsed, nodes, rows, inputs.now_s)
        for index in np.flatnonzero(~outcome.passes).tolist():
            obstacles[inputs.chain.reason(outcome, index).message] += 1
        order = np.argsort(-scores, kind="stable").tolist()
        return [names[index] for index in order if outcome.passes[index]]

    def _becomes_hot(self, candidate: MoveCandidate, name: str) -> str:
        load, added = self._inputs.loads[name], self._added[name]
        for column, amount in enumerate(self._charged(candidate)):
            high = self._inputs.thresholds.high[column]
            total = load.usage[column] + load.unmeasured[column] + added[column] + amount
            limit = (100.0 if high is None else high) / 100 * load.capacity[column]
            # NaN, an unknown usage, is not below a limit.
            if not total <= limit or math.isnan(limit):
                return f"{'CPU' if RESOURCES[column] == 'cpu' else 'memory'} usage would exceed the high threshold"
        return ""

    def _charged(self, candidate: MoveCandidate) -> Pair:
        """Return the usage that is charged to the target: the pod's measured usage or the estimate for a new pod, whichever is
        more."""
        basis, factors = candidate.parsed.load_basis, self._inputs.factors
        return (
            max(candidate.usage[0], basis.millicpu * factors[0]),
            max(candidate.usage[1], basis.memory * factors[1]),
        )

    def _charge(self, candidate: MoveCandidate, target: TargetNode) -> None:
        parsed, name = candidate.parsed, target.name
        moved = parsed._replace(uid=f"{parsed.uid}/moved")
        self._inputs.state.assume(moved, name, self._inputs.now_s)
        self._assumed.append((moved.uid, name))
        for column, amount in enumerate(self._charged(candidate)):
            self._added[name][column] += amount
        free = Amounts(target.free.millicpu - parsed.native.millicpu, target.free.memory - parsed.native.memory)
        self._targets[name] = target._replace(free=free, free_pods=target.free_pods - 1)
        self._inputs.allowances.take(candidate.pod)
        self._evicted.update(("", candidate.pod.metadata.namespace, candidate.workload))


def _columns(reasons: Sequence[HotReason]) -> tuple[int, ...]:
    return tuple(sorted({column for reason in reasons for column in reason.columns}))

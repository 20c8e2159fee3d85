"""Explains where a pod fits and where it does not, by the plugins that place it. Pure."""

from __future__ import annotations

from collections import Counter

import numpy as np

from api.placement import NodePlacement, PlacementExplanation, PluginVerdict
from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.plugin_chain import PluginChain
from controller.scheduler.scheduling_pod import ScheduledPod, SchedulingPod, parse_pending_pod

MAX_EXPLAINED_NODES = 100


def explain_placement(
    state: ClusterState, chain: PluginChain, stored: ScheduledPod, now_s: float, max_nodes: int
) -> PlacementExplanation:
    """Evaluate a pod on every node. A pod with a node is evaluated as if it had none."""
    key, bound = f"{stored.metadata.namespace}/{stored.metadata.name}", stored.spec.node_name
    try:
        pod = parse_pending_pod(stored)
    except ValueError as error:
        return PlacementExplanation(
            pod=key, level=stored.metadata.annotations.qos_level, node=bound, problem=str(error)
        )
    with state.without(pod.uid):
        nodes, names = state.nodes, state.nodes.all_names()
        rows = nodes.rows_of(names)
        outcome = chain.filter(pod, nodes, rows, now_s)
        scores = chain.score(pod, nodes, rows, now_s)
        rejections = Counter(chain.reason(outcome, index).message for index in np.flatnonzero(~outcome.passes).tolist())
        order = sorted(
            range(len(names)), key=lambda i: (names[i] != bound, not outcome.passes[i], -scores[i], names[i])
        )
        shown = order[:max_nodes]
        verdicts = _verdicts(chain, pod, state, rows[shown], now_s)
    return PlacementExplanation(
        pod=key,
        level=pod.level.value,
        node=bound,
        assumed=any(uid == pod.uid for uid, _ in state.assumptions),
        node_count=len(names),
        fitting=int(outcome.passes.sum()),
        rejections=dict(rejections.most_common()),
        nodes=tuple(
            NodePlacement(
                node=names[i], fits=bool(outcome.passes[i]), score=round(float(scores[i]), 1), verdicts=tuple(each)
            )
            for i, each in zip(shown, verdicts, strict=True)
        ),
    )


def _verdicts(
    chain: PluginChain, pod: SchedulingPod, state: ClusterState, rows: np.ndarray[tuple[int], np.dtype[np.intp]],
    now_s: float,
) -> list[list[PluginVerdict]]:  # fmt: skip
    """Return the verdicts of all plugins for each row, also of those after the first rejection."""
    results: list[list[PluginVerdict]] = [[] for _ in rows]
    for plugin in chain.plugins:
        numbers = plugin.filter(pod, state.nodes, rows, now_s)
        scores = plugin.score(pod, state.nodes, rows, now_s) if plugin.weight > 0 else None
        for index, verdicts in enumerate(results):
            number = 0 if numbers is None else int(numbers[index])
            verdict = PluginVerdict(
                plugin=plugin.name,
                rejection=plugin.reasons[number - 1].message if number else "",
                numbers=plugin.describe(pod, state.nodes, int(rows[index]), now_s),
                score=None if scores is None else round(float(scores[index]), 1),
                weight=plugin.weight,
            )
            verdicts.append(verdict)
    return results

"""Writes conditions of the eviction manager as taints of the Node, so that the scheduler avoids it.
An annotation of the Node records the taints that the agent added; all other taints stay as they are, also those of a
stock Katalyst agent, which have the same prefix. List and annotation are written together by compare-and-swap.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from agent.reporter.cnr import EFFECTS
from agent.reporter.desired_state_writer import NODES, PatchFields, WithdrawableWriter, patch_taints
from api.decision import Cycle
from api.eviction import (
    NODE_TAINTS_ANNOTATION,
    TAINT_PREFIX,
    EvictionResult,
    NodeTaint,
    format_recorded_taints,
    recorded_taints,
)
from kube.client import KubeClient
from kube.objects import TaintedObject

RESYNC_S = 60.0
"""Interval at which the Node is read again while it has taints, in case another client removed them."""
_TAINT_NAME = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)


def desired_node_taints(evictions: EvictionResult | None) -> frozenset[NodeTaint] | None:
    """Return the taints of active conditions; None without an evaluation. Names that no taint key can have are skipped,
    because the API server would refuse the whole list."""
    if evictions is None:
        return None
    return frozenset(
        (f"{TAINT_PREFIX}{active.condition.name}", effect)
        for active in evictions.conditions
        if active.condition.kind == "node" and _TAINT_NAME.fullmatch(active.condition.name)
        for effect in active.condition.effects
        if effect in EFFECTS
    )


def change_node_taints(node: TaintedObject, desired: frozenset[NodeTaint]) -> PatchFields | None:
    """Return annotation and taints of the Node with the desired taints; None if nothing changes.

    Recorded taints that are no longer desired are removed. A desired taint that another owner added is neither added nor
    recorded.
    """
    recorded, current = recorded_taints(node.metadata.annotations), node.spec.taints
    removed = recorded - desired
    retained = [taint for taint in current if _identity(taint) not in removed]
    added = sorted(desired - {_identity(taint) for taint in retained})
    record = (recorded & desired) | frozenset(added)
    if len(retained) == len(current) and not added and record == recorded:
        return None
    annotations = {NODE_TAINTS_ANNOTATION: format_recorded_taints(record)}
    return {"annotations": annotations}, [*retained, *({"key": key, "effect": effect} for key, effect in added)]


def _identity(taint: Mapping[str, Any]) -> NodeTaint:
    return str(taint.get("key", "")), str(taint.get("effect", ""))


class NodeTaints(WithdrawableWriter):
    """Taints of the Node for active conditions."""

    name, form = "node-taints", "patch"
    forbidden_remedy = "give the agent's role get and patch of nodes (the chart: --set agent.evictions=true)"
    leftover_text = f"the taints in its annotation {NODE_TAINTS_ANNOTATION} stay; remove them with kubectl"

    def __init__(self, client: KubeClient, node: str) -> None:
        super().__init__(client, node)
        self._desired: frozenset[NodeTaint] | None = None
        self._has_thresholds = False

    def publish(self, cycle: Cycle) -> None:
        """Take the conditions of this cycle. Without an evaluation the taints stay."""
        desired = desired_node_taints(cycle.evictions)
        if desired is not None:
            self._desired = desired
            self._has_thresholds = cycle.evictions is not None and bool(cycle.evictions.thresholds)

    async def _write(self, now_s: float) -> bool:
        desired = self._desired
        if desired is None:
            return False
        if self._written is None and not desired and not self._has_thresholds:
            return False  # Without an eviction plugin the agent's role need not allow reading Nodes.
        if desired == self._written and (not desired or now_s < self._resync_due_s):
            return False
        await patch_taints(self._client, NODES, self._node, partial(change_node_taints, desired=desired))
        self._written, self._resync_due_s = desired, now_s + RESYNC_S
        return True

    async def _delete(self) -> None:
        await patch_taints(self._client, NODES, self._node, partial(change_node_taints, desired=frozenset()))

    def _failure_text(self, error: Exception) -> str:
        return f"conditions cannot be written as taints of Node {self._node}: {error}"

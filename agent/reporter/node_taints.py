"""Writes conditions of the eviction manager as taints of the Node, so that the scheduler avoids it.
All taints below Katalyst's prefix belong to the agent; other taints stay as they are. The list is written by
compare-and-swap.
"""

from __future__ import annotations

import re

from agent.reporter.cnr import EFFECTS
from agent.reporter.desired_state_writer import NODES, WithdrawableWriter, write_taints
from api.decision import Cycle
from api.eviction import TAINT_PREFIX, EvictionResult
from kube.client import KubeClient

RESYNC_S = 60.0
"""Interval at which the Node is read again while it has taints, in case another client removed them."""
_TAINT_NAME = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)
NodeTaint = tuple[str, str]
"""Key and effect."""


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


class NodeTaints(WithdrawableWriter):
    """Taints of the Node below Katalyst's prefix."""

    name, form = "node-taints", "patch"
    forbidden_remedy = "give the agent's role get and patch of nodes"
    leftover_text = f"taints {TAINT_PREFIX}* stay; remove them with kubectl"

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
        taints = ({"key": key, "effect": effect} for key, effect in sorted(desired))
        await write_taints(self._client, NODES, self._node, taints)
        self._written, self._resync_due_s = desired, now_s + RESYNC_S
        return True

    async def _delete(self) -> None:
        await write_taints(self._client, NODES, self._node, ())

    def _failure_text(self, error: Exception) -> str:
        return f"conditions cannot be written as taints of Node {self._node}: {error}"

"""The cluster's budget of evictions: an annotation of a Lease, which the controller renews and agents count in.
Every agent that evicts a pod counts it by compare-and-swap. The controller resets the counts once per interval. Without the
controller nothing is renewed, so that all agents together evict what is left of one interval, and then none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

BUDGET_ANNOTATION = "dioptase.io/eviction-budget"
INTERVAL_S = 60.0
"""Time after which the controller resets the counts."""
MAX_ANNOTATION_CHARS = 1 << 16
Count = Annotated[int, Meta(ge=0, le=1 << 31)]


class EvictionBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the annotation."""

    limit: Count
    """Evictions of all agents in one interval."""
    evictions: Mapping[str, Count] = {}
    """Evictions in this interval by node."""

    @property
    def node_limit(self) -> int:
        """Evictions of one node in one interval: half of the limit, so that one node cannot take all."""
        return math.ceil(self.limit / 2)


def parse_budget(annotations: Mapping[str, str]) -> EvictionBudget | None:
    """Return the budget; None without a valid one, which allows no eviction."""
    text = annotations.get(BUDGET_ANNOTATION, "")
    if len(text) > MAX_ANNOTATION_CHARS:
        return None
    try:
        return msgspec.json.decode(text, type=EvictionBudget)
    except (msgspec.DecodeError, RecursionError):
        return None


def format_budget(budget: EvictionBudget) -> str:
    """Return the text of the annotation."""
    return msgspec.json.encode(budget, order="sorted").decode()


def exhausted_reason(budget: EvictionBudget | None, node: str) -> str:
    """Return why this node may not evict another pod now; empty if it may."""
    if budget is None:
        return "the controller has granted no evictions yet"
    total, own = sum(budget.evictions.values()), budget.evictions.get(node, 0)
    if total >= budget.limit:
        return f"the nodes of the cluster evicted {total} pods in this interval, the limit is {budget.limit}"
    if own >= budget.node_limit:
        return f"this node evicted {own} pods in this interval, the limit of a node is {budget.node_limit}"
    return ""


def with_eviction(budget: EvictionBudget, node: str) -> EvictionBudget:
    """Return the budget with one more eviction of this node."""
    return msgspec.structs.replace(budget, evictions={**budget.evictions, node: budget.evictions.get(node, 0) + 1})


def budget_limit(per_minute: int, node_share: float, nodes: int) -> int:
    """Return the evictions of one interval in a cluster of so many nodes."""
    return max(per_minute, math.ceil(node_share * nodes))

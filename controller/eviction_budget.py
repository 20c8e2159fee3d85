"""Renews the cluster's eviction budget, and observes in it which nodes evict; see api.eviction_budget."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from api.eviction_budget import (
    BUDGET_ANNOTATION,
    INTERVAL_S,
    EvictionBudget,
    budget_limit,
    format_budget,
    parse_budget,
)
from common.throttled_log import ThrottledLog
from controller.kcc.rollout_guard import NodeEviction
from controller.kinds import ControllerNode
from controller.reconcile import MetricValues
from controller.settings import EvictionBudgetConfig
from kube.budget_lease import count_eviction
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable
from kube.informer import Informer
from kube.objects import LEASE_METADATA

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 5.0
RETAINED_S = 600.0
"""Time for which evictions are remembered; a rollout is evaluated over less."""
USED_METRIC, LIMIT_METRIC = "dioptase_eviction_budget_used", "dioptase_eviction_budget_limit"


class EvictionBudgetRenewal:
    """Controller of the budget; `run` it while leading. The caller runs the informer of nodes."""

    def __init__(
        self,
        client: KubeClient,
        nodes: Informer[ControllerNode],
        namespace: str,
        config: EvictionBudgetConfig,
        metrics: MetricValues,
    ) -> None:
        self._client, self._nodes, self._config, self._metrics = client, nodes, config, metrics
        self._key = f"{namespace}/{config.lease}"
        self._renew_at_s = 0.0
        self._last_counts: Mapping[str, int] | None = None
        self._evictions: deque[NodeEviction] = deque()
        self._throttled_log = ThrottledLog(log)
        self.on_eviction: Callable[[], None] = lambda: None
        """Called when agents have evicted since the last reading."""

    @property
    def evictions(self) -> tuple[NodeEviction, ...]:
        """Evictions of the last minutes, oldest first."""
        return tuple(self._evictions)

    async def run(self) -> None:
        """Run until cancelled."""
        await self._nodes.synced.wait()
        self._renew_at_s = time.monotonic() + INTERVAL_S
        while True:
            try:
                await self.sync(time.monotonic(), time.time())
                self._throttled_log.clear()
            except (ApiError, ApiUnreachable) as error:
                if not (isinstance(error, ApiError) and error.conflict):
                    self._throttled_log.warn(f"the eviction budget in Lease {self._key} cannot be renewed: {error}")
            await asyncio.sleep(POLL_INTERVAL_S)

    async def sync(self, now_s: float, wall_s: float) -> None:
        """Read the budget, and renew it if an interval is over. `now_s` is monotonic, `wall_s` since the epoch.

        Raises ApiUnreachable, and ApiError, also for a conflict with an agent: the next call tries again."""
        limit = budget_limit(self._config.per_minute, self._config.node_share, len(self._nodes.store))
        try:
            lease = await self._client.get(LEASE_METADATA, self._key)
        except ApiError as error:
            if not error.missing:
                raise
            await self._create(limit)
            return
        budget = parse_budget(lease.metadata.annotations)
        self._observe({} if budget is None else budget.evictions, wall_s)
        self._metrics.set(USED_METRIC, [((), 0 if budget is None else sum(budget.evictions.values()))])
        self._metrics.set(LIMIT_METRIC, [((), limit)])
        if budget is not None and not budget.evictions:
            # An interval begins with its first eviction, so that nothing is written while no pod is evicted.
            self._renew_at_s = now_s + INTERVAL_S
        renews = now_s >= self._renew_at_s
        if budget is not None and budget.limit == limit and not renews:
            return
        evictions = {} if budget is None or renews else budget.evictions
        body = _annotation(EvictionBudget(limit=limit, evictions=evictions))
        body["metadata"]["resourceVersion"] = lease.metadata.resource_version
        await self._client.merge_patch(LEASE_METADATA, self._key, body)
        self._last_counts = dict(evictions)
        if renews:
            self._renew_at_s = now_s + INTERVAL_S

    async def take(self, node: str) -> str:
        """Count an eviction of the controller's own on a node; return why it is not allowed, empty if it is.

        Raises ApiUnreachable and ApiError; then the eviction may not be made."""
        return await count_eviction(self._client, self._key, node)

    async def _create(self, limit: int) -> None:
        namespace, _, name = self._key.rpartition("/")
        body = {
            "apiVersion": LEASE_METADATA.api_version,
            "kind": LEASE_METADATA.kind,
            **_annotation(EvictionBudget(limit=limit)),
        }
        body["metadata"]["name"] = name
        await self._client.create(LEASE_METADATA, body, namespace)
        self._last_counts = {}

    def _observe(self, evictions: Mapping[str, int], wall_s: float) -> None:
        """Remember the evictions since the last reading. The first reading of a new leader only sets the counts, because the
        time of earlier evictions is unknown."""
        before, self._last_counts = self._last_counts, dict(evictions)
        new = {} if before is None else {node: count - before.get(node, 0) for node, count in evictions.items()}
        self._evictions += [NodeEviction(wall_s, node, count) for node, count in new.items() if count > 0]
        if any(count > 0 for count in new.values()):
            self.on_eviction()
        while self._evictions and self._evictions[0].at_s < wall_s - RETAINED_S:
            self._evictions.popleft()


def _annotation(budget: EvictionBudget) -> dict[str, Any]:
    return {"metadata": {"annotations": {BUDGET_ANNOTATION: format_budget(budget)}}}

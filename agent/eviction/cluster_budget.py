"""Counts each eviction in the budget of the cluster before a pod is evicted; see api.eviction_budget.
Without an answer the agent evicts no pod, unless the node runs out of memory: while the agent waited, the kernel's OOM killer
or the kubelet would end online pods.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from agent.eviction.api_evictor import ApiEvictor, MethodResponse, MethodResult
from api.decision import Cycle
from api.eviction import EvictionBlock
from api.snapshot import NodeSample
from api.units import GIB, MIB
from kube.budget_lease import count_eviction
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable

log = logging.getLogger(__name__)
DENIAL_S = 5.0
"""Time for which a denial holds for all pods of the node, so that a wrong threshold does not load the API server."""
RECORD_TIMEOUT_S = 2.0
"""Time limit for counting an eviction while the node runs out of memory; after it the pod is evicted without being counted."""
EMERGENCY_MIN_BYTES, EMERGENCY_SHARE, EMERGENCY_MAX_BYTES = 200 * MIB, 0.02, 4 * GIB
"""Bounds and share of MemAvailable below which a node needs no budget. The kubelet evicts any pod from 100 MiB on
(pkg/kubelet/apis/config/v1beta1/defaults_linux.go, memory.available), so the agent has to act earlier. No configuration object
can change these numbers, because a wrong object is what the budget protects from."""
EMERGENCY_FULL_AVG10 = 40.0
"""Percent of 10 s in which all tasks of the node stalled on memory, from which a node needs no budget."""


def memory_emergency(node: NodeSample) -> bool:
    """Return whether the node runs out of memory, by the kernel's numbers alone."""
    available, total = node.memory_available_bytes, node.memory_total_bytes
    if available is not None and total is not None:
        bound = max(EMERGENCY_MIN_BYTES, min(EMERGENCY_SHARE * total, EMERGENCY_MAX_BYTES))
        if available < bound:
            return True
    stall = None if node.memory_pressure is None else node.memory_pressure.full_avg10
    return stall is not None and stall >= EMERGENCY_FULL_AVG10


class ClusterEvictionBudget:
    """The budget in a Lease. It lives on the event loop, and is a sink of cycles."""

    def __init__(self, client: KubeClient, lease: str, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`lease` is `NAMESPACE/NAME`."""
        self._client, self._lease, self._node, self._clock = client, lease, node, clock
        self.on_emergency: Callable[[], None] = lambda: None
        """Called when the node begins to run out of memory."""
        self._emergency = False
        self._denied_until_s, self._denial = 0.0, ""
        self._lock = asyncio.Lock()

    def publish(self, cycle: Cycle) -> None:
        """Take the memory of the node from this cycle."""
        before, self._emergency = self._emergency, memory_emergency(cycle.snapshot.node)
        if self._emergency and not before:
            log.warning("This node runs out of memory: pods are evicted without the budget of Lease %s", self._lease)
            self.on_emergency()

    async def refusal(self) -> MethodResponse | None:
        """Return why no pod may be evicted now; None if one may, which is counted."""
        if not self._emergency:
            denial = await self._denial_of_next()
            # The emergency may begin during the request to the API server.
            if not self._emergency:
                return denial
            if denial is None:
                return None
        try:
            async with asyncio.timeout(RECORD_TIMEOUT_S):
                await count_eviction(self._client, self._lease, self._node, forced=True)
        except (ApiError, ApiUnreachable, TimeoutError) as error:
            log.warning("An eviction could not be counted in Lease %s: %s", self._lease, error)
        return None

    async def _denial_of_next(self) -> MethodResponse | None:
        """Count an eviction within the budget, or return why there may be none."""
        async with self._lock:
            if self._clock() >= self._denied_until_s:
                try:
                    self._denial = await count_eviction(self._client, self._lease, self._node)
                except (ApiError, ApiUnreachable) as error:
                    self._denial = f"Lease {self._lease} cannot be used: {error}"
                if self._denial:
                    self._denied_until_s = self._clock() + DENIAL_S
            if not self._denial:
                return None
            return MethodResponse(
                result=MethodResult.BLOCKED,
                block=EvictionBlock.CLUSTER_BUDGET,
                text=f"the eviction budget of the cluster: {self._denial}",
                wait_s=DENIAL_S,
            )


def open_cluster_budget(client: KubeClient, lease: str, node: str, evictor: ApiEvictor) -> ClusterEvictionBudget:
    """Make the evictor count in the budget of this Lease, `NAMESPACE/NAME`; the budget takes cycles as a sink."""
    budget = ClusterEvictionBudget(client, lease, node)
    evictor.gate, budget.on_emergency = budget, evictor.retry_gated
    return budget

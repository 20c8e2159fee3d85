"""Writes conditions of the eviction manager as taints of the Node, so that the scheduler avoids it.
All taints below Katalyst's prefix belong to the agent; other taints stay as they are. The list is written by
compare-and-swap.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from agent.reporter.cnr import EFFECTS
from api.decision import Cycle
from api.eviction import TAINT_PREFIX, EvictionResult
from api.interfaces import ProbeReading, Unavailable
from common.backoff import Backoff
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable
from kube.objects import PartialObjectMetadata, ResourceType

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 5.0
RESYNC_S = 60.0
"""While there are any, the Node is looked at so often, in case somebody took them away."""
MAX_CAS_TRIES = 3
"""Of a compare-and-swap that somebody else was quicker at."""
WITHDRAW_TIMEOUT_S = 3.0
RETRY_BACKOFF = Backoff(first_s=2.0, max_s=60.0)
_TAINT_NAME = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)


class TaintedNodeSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is read of it: taints of others keep fields that are not known here."""

    taints: tuple[Mapping[str, Any], ...] | None = None


class TaintedNode(PartialObjectMetadata, frozen=True, kw_only=True):
    """A Node, as far as it is read."""

    spec: TaintedNodeSpec = TaintedNodeSpec()


NODES = ResourceType("", "v1", "nodes", "Node", TaintedNode)
NodeTaint = tuple[str, str]
"""Key and effect."""


def desired_node_taints(evictions: EvictionResult | None) -> frozenset[NodeTaint] | None:
    """The taints of conditions that are in force; None where nothing was judged. A name that no taint can have is left out."""
    if evictions is None:
        return None
    return frozenset(
        (f"{TAINT_PREFIX}{shown.condition.name}", effect)
        for shown in evictions.conditions
        if shown.condition.kind == "node" and _TAINT_NAME.fullmatch(shown.condition.name)
        for effect in shown.condition.effects
        if effect in EFFECTS
    )


def merge_node_taints(there: Iterable[Mapping[str, Any]], ours: Iterable[NodeTaint]) -> list[Mapping[str, Any]] | None:
    """The Node's taints with ours as they are to be, and those of others as they came; None where nothing changes."""
    there, names = list(there), set(ours)
    kept = [
        one
        for one in there
        if not str(one.get("key", "")).startswith(TAINT_PREFIX) or (one.get("key"), one.get("effect")) in names
    ]
    known = {(one.get("key"), one.get("effect")) for one in kept}
    new = [{"key": key, "effect": effect} for key, effect in sorted(names) if (key, effect) not in known]
    return None if len(kept) == len(there) and not new else [*kept, *new]


class NodeTaints:
    """Sink of rounds and a source of its own (api.interfaces.Probe)."""

    name, form = "node-taints", "patch"
    lost_events = None

    def __init__(self, client: KubeClient, node: str) -> None:
        self._client, self._node = client, node
        self._wanted: frozenset[NodeTaint] | None = None
        self._judging = False
        self._written: frozenset[NodeTaint] | None = None
        self._again_s = self._not_before_s = 0.0
        self._failures = 0
        self._trouble: Unavailable | None = None

    def publish(self, finished: Cycle) -> None:
        """Take what this round shows; never waits. Where nothing was judged, what is written stands."""
        found = desired_node_taints(finished.evictions)
        if found is not None:
            self._wanted = found
            self._judging = finished.evictions is not None and bool(finished.evictions.thresholds)

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - as every source is asked
        return ProbeReading()

    def problem(self) -> Unavailable | None:
        """Why the Node does not show what is in force; None where it does."""
        return self._trouble

    def close(self) -> None:
        """What is to be taken away is taken away by `withdraw`, which takes requests."""

    async def withdraw(self) -> None:
        """Take all of ours away: nobody looks any more whether they are still due. Never raises, and soon gives up."""
        if not self._written:
            return
        try:
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self._write(frozenset())
        except (ApiError, ApiUnreachable, TimeoutError) as error:
            log.warning("taints %s* stay on Node %s: %s; remove them with kubectl", TAINT_PREFIX, self._node, error)
        self._written = frozenset()

    async def run(self) -> None:
        """Until cancelled. Nothing that the API server says or does ends it."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self.look(time.monotonic())

    async def look(self, now_s: float) -> None:
        """Write what is due. Never raises for what the API server or the network does."""
        ours = self._wanted
        if ours is None or now_s < self._not_before_s:
            return
        if self._written is None and not ours and not self._judging:
            return  # where no plugin judges, an agent needs no right to look at Nodes
        if ours == self._written and (not ours or now_s < self._again_s):
            return
        try:
            await self._write(ours)
        except (ApiError, ApiUnreachable) as error:
            self._failures += 1
            self._not_before_s = now_s + RETRY_BACKOFF.wait_s(self._failures, random.random())
            remedy = "it is tried again; the scheduler goes by what was written last"
            if isinstance(error, ApiError) and error.status == 403:
                remedy = "give the agent's role get and patch of nodes"
            self._trouble = Unavailable(f"conditions cannot be shown on Node {self._node}: {error}", remedy)
        else:
            self._failures, self._trouble = 0, None
            self._written, self._again_s = ours, now_s + RESYNC_S

    async def _write(self, ours: frozenset[NodeTaint]) -> None:
        """Raises ApiError and Unreachable."""
        for left in range(MAX_CAS_TRIES - 1, -1, -1):
            there = await self._client.get(NODES, self._node)
            taints = merge_node_taints(there.spec.taints or (), ours)
            if taints is None:
                return
            body = {"metadata": {"resourceVersion": there.metadata.resource_version}, "spec": {"taints": taints}}
            try:
                await self._client.merge_patch(NODES, self._node, body)
            except ApiError as error:
                if not error.conflict or left == 0:
                    raise
            else:
                return

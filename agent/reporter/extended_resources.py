"""Writes reclaimable CPU and memory as extended resources of the Node, for a stock scheduler.
The kubelet resets them to zero when it registers the Node again, so they are written on change and every 30 s.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping

from agent.reporter.cnr_inputs import reclaimed_allocatable
from api.decision import Cycle
from api.interfaces import ProbeReading, Unavailable
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from common.backoff import Backoff
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable
from kube.objects import PartialObjectMetadata, ResourceType

log = logging.getLogger(__name__)
NODES = ResourceType("", "v1", "nodes", "Node", PartialObjectMetadata)
POLL_INTERVAL_S = 5.0
RESYNC_S = 30.0
MAX_SILENT_POLLS = 12
"""Looks without a judged round in between: an agent that judges nothing for a minute, or does not see its pods, takes nothing
back either, and does not promise anew what the controller has taken from its Node meanwhile."""
REMOVED_RESOURCES: Mapping[str, str | int | None] = {RECLAIMED_CPU: None, RECLAIMED_MEMORY: None}
WITHDRAW_TIMEOUT_S = 3.0
RETRY_BACKOFF = Backoff(first_s=2.0, max_s=60.0)


class ExtendedResources:
    """Sink of rounds and a source of its own (api.interfaces.Probe)."""

    name, form = "extended-resources", "patch"
    lost_events = None

    def __init__(self, client: KubeClient, node: str, *, lends: bool = True) -> None:
        """Unless it `lends`, as in a dry run, what an agent before this one promised is taken away."""
        self._client, self._node, self._lends = client, node, lends
        self._wanted: Mapping[str, str | int | None] = {}
        self._written: Mapping[str, str | int | None] = {}
        self._silent_looks = 0
        self._again_s = self._not_before_s = 0.0
        self._failures = 0
        self._trouble: Unavailable | None = None

    def publish(self, finished: Cycle) -> None:
        """Take what this round advertises; never waits. What is not known yet leaves everything as it is."""
        advertised = None if finished.advice is None else finished.advice.reported_headroom
        if not self._lends:
            self._silent_looks, self._wanted = 0, REMOVED_RESOURCES
        elif advertised is not None:
            if finished.snapshot.pods_fresh:
                self._silent_looks = 0
            self._wanted = dict(reclaimed_allocatable(advertised.cores, advertised.memory_bytes)) or self._wanted

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - as every source is asked
        return ProbeReading()

    def problem(self) -> Unavailable | None:
        """Why the Node does not say what is lent; None where it does."""
        return self._trouble

    def close(self) -> None:
        """What is to be taken away is taken away by `withdraw`, which takes a request."""

    async def withdraw(self) -> None:
        """Take the amounts away from the Node: nobody lends there any more. Never raises, and soon gives up; the next agent
        writes them again, or the controller's taint keeps pods away."""
        if not self._written:
            return
        nothing = dict.fromkeys(self._written)
        body = {"status": {"capacity": nothing, "allocatable": nothing}}
        try:
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self._client.merge_patch(NODES, self._node, body, "status")
        except (ApiError, ApiUnreachable, TimeoutError) as error:
            log.warning("Node %s goes on to promise what was lent: %s; remove it from its status", self._node, error)
        self._written = {}

    async def run(self) -> None:
        """Until cancelled. Nothing that the API server says or does ends it."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self.look(time.monotonic())

    async def look(self, now_s: float) -> None:
        """Write what is due. Never raises for what the API server or the network does."""
        wanted = self._wanted
        self._silent_looks += 1
        if self._silent_looks > MAX_SILENT_POLLS:
            return
        if not wanted or now_s < self._not_before_s or (wanted == self._written and now_s < self._again_s):
            return
        body = {"status": {"capacity": wanted, "allocatable": wanted}}
        try:
            await self._client.merge_patch(NODES, self._node, body, "status")
        except (ApiError, ApiUnreachable) as error:
            self._failures += 1
            self._not_before_s = now_s + RETRY_BACKOFF.wait_s(self._failures, random.random())
            remedy = "it is tried again; the scheduler goes by what was written last"
            if isinstance(error, ApiError) and error.status == 403:
                remedy = "give the agent's role patch of nodes/status (the chart: --set agent.extendedResources=true), "
                remedy += "or set report.extendedResources: false"
            self._trouble = Unavailable(f"what is lent cannot be written to Node {self._node}: {error}", remedy)
        else:
            self._failures, self._trouble = 0, None
            self._written, self._again_s = wanted, now_s + RESYNC_S

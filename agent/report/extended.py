"""What is lent as extended resources of the Node itself, so that a stock scheduler can place reclaimed pods.

The kubelet keeps what others write into `status.capacity` and copies it into `allocatable`; when it registers the node anew it
sets both to zero. So it is written when it changes, and again every half a minute, which costs the API server nothing where it
is so already.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping

from agent.report.amounts import promised
from api.decisions import Round
from api.pods import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.ports import Seen, Unavailable
from kube.client import Client
from kube.errors import ApiError, Unreachable
from kube.objects import Bare, Resource
from kube.pace import Backoff

log = logging.getLogger(__name__)
NODES = Resource("", "v1", "nodes", "Node", Bare)
LOOK_S = 5.0
AGAIN_S = 30.0
SILENT_LOOKS = 12
"""Looks without a judged round in between: an agent that judges nothing for a minute, or does not see its pods, takes nothing
back either, and does not promise anew what the controller has taken from its Node meanwhile."""
NOTHING: Mapping[str, str | int | None] = {RECLAIMED_CPU: None, RECLAIMED_MEMORY: None}
WITHDRAW_S = 3.0
PACE = Backoff(first_s=2.0, most_s=60.0)


class ExtendedResources:
    """Sink of rounds and a source of its own (api.ports.Probe)."""

    name, form = "extended-resources", "patch"
    lost_events = None

    def __init__(self, client: Client, node: str, *, lends: bool = True) -> None:
        """Unless it `lends`, as in a dry run, what an agent before this one promised is taken away."""
        self._client, self._node, self._lends = client, node, lends
        self._wanted: Mapping[str, str | int | None] = {}
        self._written: Mapping[str, str | int | None] = {}
        self._silent_looks = 0
        self._again_s = self._not_before_s = 0.0
        self._failures = 0
        self._trouble: Unavailable | None = None

    def publish(self, finished: Round) -> None:
        """Take what this round advertises; never waits. What is not known yet leaves everything as it is."""
        advertised = None if finished.advice is None else finished.advice.advertised
        if not self._lends:
            self._silent_looks, self._wanted = 0, NOTHING
        elif advertised is not None:
            if finished.snapshot.pods_known:
                self._silent_looks = 0
            self._wanted = dict(promised(advertised.cores, advertised.memory_bytes)) or self._wanted

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:  # noqa: ARG002 - as every source is asked
        return Seen()

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
            async with asyncio.timeout(WITHDRAW_S):
                await self._client.merge_patch(NODES, self._node, body, "status")
        except (ApiError, Unreachable, TimeoutError) as error:
            log.warning("Node %s goes on to promise what was lent: %s; remove it from its status", self._node, error)
        self._written = {}

    async def run(self) -> None:
        """Until cancelled. Nothing that the API server says or does ends it."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look(time.monotonic())

    async def look(self, now_s: float) -> None:
        """Write what is due. Never raises for what the API server or the network does."""
        wanted = self._wanted
        self._silent_looks += 1
        if self._silent_looks > SILENT_LOOKS:
            return
        if not wanted or now_s < self._not_before_s or (wanted == self._written and now_s < self._again_s):
            return
        body = {"status": {"capacity": wanted, "allocatable": wanted}}
        try:
            await self._client.merge_patch(NODES, self._node, body, "status")
        except (ApiError, Unreachable) as error:
            self._failures += 1
            self._not_before_s = now_s + PACE.wait_s(self._failures, random.random())
            remedy = "it is tried again; the scheduler goes by what was written last"
            if isinstance(error, ApiError) and error.status == 403:
                remedy = "give the agent's role patch of nodes/status (the chart: --set agent.extendedResources=true), "
                remedy += "or set report.extendedResources: false"
            self._trouble = Unavailable(f"what is lent cannot be written to Node {self._node}: {error}", remedy)
        else:
            self._failures, self._trouble = 0, None
            self._written, self._again_s = wanted, now_s + AGAIN_S

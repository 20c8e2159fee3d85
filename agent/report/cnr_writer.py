"""The node's CustomNodeResource kept as the rounds say: written when it changed, within a bounded rate, in a task of its own.

A round is only handed over. While the API server is gone nothing queues up: what is written then is what is so then.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from agent.report.cnr import Ours, ours, with_taints
from api.decisions import Round
from api.ports import Seen, Unavailable
from kube.client import Client
from kube.errors import ApiError, Unreachable
from kube.objects import Bare, Resource
from kube.pace import Backoff, Bucket

log = logging.getLogger(__name__)
MANAGER = "dioptase-agent"
LOOK_S = 5.0
"""[--reporter-collect-interval]"""
RATE_PER_S, BURST = 0.2, 5.0
"""Requests that write: a node's pods may come and go every second, and a cluster has a thousand nodes."""
AGAIN_S = 300.0
"""What was written is written again after so long, in case somebody changed it; half as long again at most."""
METRICS_S = 60.0
"""What is used changes with every round, and is written no more often than this."""
PACE = Backoff(first_s=2.0, most_s=120.0)


class CnrSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is read back: taints of others keep fields that are not known here."""

    taints: tuple[Mapping[str, Any], ...] | None = None


class Cnr(Bare, frozen=True, kw_only=True):
    """CustomNodeResource, as far as it is read."""

    spec: CnrSpec | None = None


CNRS = Resource("node.katalyst.kubewharf.io", "v1alpha1", "customnoderesources", "CustomNodeResource", Cnr)


class CnrWriter:
    """Sink of rounds and a source of its own (api.ports.Probe) that says how writing goes."""

    name, form = "cnr", "apply"
    lost_events = None

    def __init__(self, client: Client, node: str, *, metrics: bool) -> None:
        self._client, self._node, self._metrics = client, node, metrics
        self._latest: Round | None = None
        self._spec: dict[str, Any] | None = None
        self._status: dict[str, Any] | None = None
        self._taints: tuple[Any, ...] | None = None
        """As they were written last; None where that is to be done anew."""
        self._again_s = self._metrics_s = self._not_before_s = 0.0
        self._failures = 0
        self._bucket = Bucket(RATE_PER_S, BURST, time.monotonic())
        self._trouble: Unavailable | None = None
        self.writes = 0
        """That the API server took."""

    def publish(self, finished: Round) -> None:
        """Hand a round over; never waits."""
        self._latest = finished

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:  # noqa: ARG002 - as every source is asked
        return Seen()

    def problem(self) -> Unavailable | None:
        """Why the object is not as it should be; None where it is."""
        return self._trouble

    def close(self) -> None:
        """Nothing to give back: `run` is cancelled by who runs it, and what was written stands for the next agent."""

    async def run(self) -> None:
        """Until cancelled. Nothing that the API server says or does ends it."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look(time.monotonic())

    async def look(self, now_s: float) -> None:
        """Write what is due. Never raises for what the API server or the network does."""
        if self._latest is None or now_s < self._not_before_s:
            return
        if now_s >= self._again_s:
            self._spec = self._status = self._taints = None
            self._again_s = now_s + AGAIN_S * (1 + random.random() / 2)
        metrics_due = self._metrics and now_s >= self._metrics_s
        try:
            await self._write(ours(self._latest, metrics=self._metrics), now_s, metrics_due=metrics_due)
        except (ApiError, Unreachable) as error:
            self._failed(error, now_s)
        except Exception as error:
            # What is reported must never end what is done; and the next round may be another.
            log.exception("CustomNodeResource %s could not be made", self._node)
            self._failed(error, now_s)
        else:
            self._failures, self._trouble = 0, None

    async def _write(self, wanted: Ours, now_s: float, *, metrics_due: bool) -> None:
        spec, status = wanted.spec_body(), wanted.status_body()
        if spec != self._spec and self._bucket.take(now_s):
            # Creates it where it is missing.
            await self._client.apply(CNRS, self._node, spec, MANAGER)
            self._spec, self.writes = spec, self.writes + 1
        if self._spec is not None and self._taints != wanted.taints and self._bucket.take(now_s):
            await self._write_taints(wanted)
            self._taints = wanted.taints
        changed = metrics_due or _without_usage(status) != self._status
        if self._spec is not None and status and changed and self._bucket.take(now_s):
            await self._client.apply(CNRS, self._node, status, MANAGER, "status")
            self._status, self.writes = _without_usage(status), self.writes + 1
            self._metrics_s = now_s + METRICS_S

    async def _write_taints(self, wanted: Ours) -> None:
        """Ours among those of others, by compare-and-swap: a list has one owner, and it would be all ours by an apply."""
        there = await self._client.get(CNRS, self._node)
        taints = with_taints(() if there.spec is None else there.spec.taints or (), wanted.taints)
        if taints is not None:
            body = {"metadata": {"resourceVersion": there.metadata.resource_version}, "spec": {"taints": taints}}
            await self._client.merge_patch(CNRS, self._node, body)
            self.writes += 1

    def _failed(self, error: Exception, now_s: float) -> None:
        if isinstance(error, ApiError) and error.missing:
            # Gone between two writes, or its definition is: it is made anew, if it can be.
            self._spec = self._status = self._taints = None
        self._failures += 1
        self._not_before_s = now_s + PACE.wait_s(self._failures, random.random())
        self._trouble = Unavailable(f"CustomNodeResource {self._node} cannot be written: {error}", _remedy(error))


def _without_usage(status: Mapping[str, Any]) -> dict[str, Any]:
    inner = status.get("status", {})
    return {"status": {name: value for name, value in inner.items() if name != "nodeMetricStatus"}}


def _remedy(error: Exception) -> str:
    if isinstance(error, ApiError) and error.status == 403:
        return "give the agent's role get, create and patch of customnoderesources, and patch of customnoderesources/status"
    if isinstance(error, ApiError) and error.missing:
        return "install the definition of customnoderesources.node.katalyst.kubewharf.io"
    return "it is tried again; the scheduler goes by what was written last"

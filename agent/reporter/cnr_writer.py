"""Writes the node's CustomNodeResource when it changes, within a bounded rate and in its own task.
A cycle is only handed over and never waits. Spec and status use server-side apply, taints use compare-and-swap.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from agent.reporter.cnr import build_cnr_report, merge_cnr_taints, taint_identity
from agent.reporter.cnr_inputs import NO_CNR_INPUTS, CnrInputs
from agent.reporter.cnr_merge import MergedCnr, merge_plugin_fields
from api.decision import Cycle
from api.eviction import TAINT_PREFIX
from api.interfaces import ProbeReading, Unavailable
from api.katalyst.cnr import QosTaint
from api.node_resources import ReportedField
from common.backoff import Backoff, TokenBucket
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable, FieldConflict
from kube.objects import PartialObjectMetadata, ResourceType

log = logging.getLogger(__name__)
FIELD_MANAGER = "dioptase-agent"
POLL_INTERVAL_S = 5.0
"""[--reporter-collect-interval]"""
WRITES_PER_S, WRITE_BURST = 0.2, 5.0
"""Requests that write: a node's pods may come and go every second, and a cluster has a thousand nodes."""
RESYNC_S = 300.0
"""What was written is written again after so long, in case somebody changed it; half as long again at most."""
METRICS_INTERVAL_S = 60.0
"""What is used changes with every round, and is written no more often than this."""
INVALID_STATUSES = (400, 422)
_MAX_SHOWN_FIELDS = 3
"""Fields that are named where many are somebody else's."""
RETRY_BACKOFF = Backoff(first_s=2.0, max_s=120.0)


class StoredCnrSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is read back: taints of others keep fields that are not known here."""

    taints: tuple[Mapping[str, Any], ...] | None = None


class StoredCnr(PartialObjectMetadata, frozen=True, kw_only=True):
    """CustomNodeResource, as far as it is read."""

    spec: StoredCnrSpec | None = None


CNRS = ResourceType("node.katalyst.kubewharf.io", "v1alpha1", "customnoderesources", "CustomNodeResource", StoredCnr)


class CnrWriter:
    """Sink of rounds and a source of its own (api.interfaces.Probe) that says how writing goes. `beside` is what others on this
    node say that goes into the object too. Unless it `lends`, as in a dry run, it offers nothing, and fields that somebody else
    holds stay theirs."""

    name, form = "cnr", "apply"
    lost_events = None

    def __init__(
        self,
        client: KubeClient,
        node: str,
        *,
        metrics: bool,
        beside: Callable[[], CnrInputs] = lambda: NO_CNR_INPUTS,
        lends: bool = True,
    ) -> None:
        self._client, self._node, self._metrics, self._beside, self._lends = client, node, metrics, beside, lends
        self._woken = asyncio.Event()
        self._latest: Cycle | None = None
        self._spec: Mapping[str, Any] | None = None
        self._status: Mapping[str, Any] | None = None
        self._taints: tuple[Any, ...] | None = None
        """As they were written last; None where that is to be done anew."""
        self._theirs: frozenset[tuple[str, str, str]] = frozenset()
        """Taints of plugins among them, which are known by this alone once no plugin says them any more."""
        self._claims: dict[str, tuple[FieldConflict, ...]] = {}
        """By part of the object: what somebody else held when it was written last, and was taken over."""
        self._refused: tuple[str, ...] = ()
        self._fields: tuple[ReportedField, ...] = ()
        self._spoiling: tuple[ReportedField, ...] = ()
        """What plugins said when the API server refused the object for what is in it,"""
        self._why = ""
        """and its words."""
        self._again_s = self._metrics_s = self._not_before_s = 0.0
        self._failures = 0
        self._bucket = TokenBucket(WRITES_PER_S, WRITE_BURST, time.monotonic())
        self._trouble: Unavailable | None = None
        self.writes = 0
        """That the API server took."""

    def publish(self, finished: Cycle) -> None:
        """Hand a round over; never waits."""
        self._latest = finished

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - as every source is asked
        return ProbeReading()

    def problem(self) -> Unavailable | None:
        """Why the object is not as it should be, or not ours alone; None where all is well."""
        if self._trouble is not None:
            return self._trouble
        if claims := sorted({claim for part in self._claims.values() for claim in part}):
            held = ", ".join(f"{field} by {manager}" for manager, field in claims[:_MAX_SHOWN_FIELDS])
            more = f" and {len(claims) - _MAX_SHOWN_FIELDS} more" if len(claims) > _MAX_SHOWN_FIELDS else ""
            return Unavailable(
                f"CustomNodeResource {self._node}: others wrote what this agent writes, and it took that over: {held}{more}",
                "have one of the two leave these fields alone; it is looked at again within some minutes",
            )
        return Unavailable(self._refused[0], "mend or remove that plugin") if self._refused else None

    def wake(self) -> None:
        """Look at once: somebody beside us has something new to say."""
        self._woken.set()

    def close(self) -> None:
        """Nothing to give back: `run` is cancelled by who runs it, and what was written stands for the next agent."""

    async def run(self) -> None:
        """Until cancelled. Nothing that the API server says or does ends it."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S):
                    await self._woken.wait()
            self._woken.clear()
            await self.look(time.monotonic())

    async def look(self, now_s: float) -> None:
        """Write what is due. Never raises for what the API server or the network does."""
        if self._latest is None or now_s < self._not_before_s:
            return
        if now_s >= self._again_s:
            self._spec = self._status = self._taints = None
            self._again_s = now_s + RESYNC_S * (1 + random.random() / 2)
        metrics_due = self._metrics and now_s >= self._metrics_s
        try:
            whole = self._whole(self._latest)
            await self._write(whole, now_s, metrics_due=metrics_due)
        except (ApiError, ApiUnreachable) as error:
            self._failed(error, now_s)
            if isinstance(error, ApiError) and error.status in INVALID_STATUSES and self._fields != self._spoiling:
                # Ours alone is valid: without what plugins say it is written the next time.
                self._spoiling, self._why, self._not_before_s = self._fields, error.message, 0.0
        except Exception as error:
            # What is reported must never end what is done; and the next round may be another.
            log.exception("CustomNodeResource %s could not be made", self._node)
            self._failed(error, now_s)
        else:
            self._failures, self._trouble, self._refused = 0, None, whole.refused

    def _whole(self, latest: Cycle) -> MergedCnr:
        beside = self._beside()
        own, self._fields = (
            build_cnr_report(latest, metrics=self._metrics, inputs=beside, lends=self._lends),
            beside.fields,
        )
        if self._fields and self._fields == self._spoiling:
            said = (
                f"the API server refuses what plugins say, which is left out until they say something else: {self._why}"
            )
            return msgspec.structs.replace(merge_plugin_fields(own, ()), refused=(said,))
        return merge_plugin_fields(own, self._fields)

    async def _write(self, wanted: MergedCnr, now_s: float, *, metrics_due: bool) -> None:
        spec, status = wanted.spec, wanted.status
        if spec != self._spec and self._bucket.take(now_s):
            # Creates it where it is missing.
            await self._apply(spec)
            self._spec = spec
        if self._spec is not None and self._taints != wanted.taints and self._bucket.take(now_s):
            await self._write_taints(wanted.taints)
            self._taints = wanted.taints
        changed = metrics_due or _without_metrics(status) != self._status
        if self._spec is not None and status and changed and self._bucket.take(now_s):
            await self._apply(status, "status")
            self._status = _without_metrics(status)
            self._metrics_s = now_s + METRICS_INTERVAL_S

    async def _apply(self, body: Mapping[str, Any], part: str = "") -> None:
        """Ours are ours, but who held them is told."""
        claims: tuple[FieldConflict, ...] = ()
        try:
            await self._client.apply(CNRS, self._node, body, FIELD_MANAGER, part, force=False)
        except ApiError as error:
            if not error.claims:
                raise
            if not self._lends:
                log.info(
                    "CustomNodeResource %s is left to %s: nothing is lent here", self._node, error.claims[0].manager
                )
                return
            claims = error.claims
            await self._client.apply(CNRS, self._node, body, FIELD_MANAGER, part)
        self.writes += 1
        if claims and claims != self._claims.get(part):
            for manager, field in claims[:_MAX_SHOWN_FIELDS]:
                log.warning("CustomNodeResource %s: %s was %s's and is taken over", self._node, field, manager)
        self._claims[part] = claims

    async def _write_taints(self, wanted: tuple[QosTaint, ...]) -> None:
        """Ours among those of others, by compare-and-swap: a list has one owner, and it would be all ours by an apply."""
        there = await self._client.get(CNRS, self._node)
        taints = merge_cnr_taints(() if there.spec is None else there.spec.taints or (), wanted, self._theirs)
        if taints is not None:
            body = {"metadata": {"resourceVersion": there.metadata.resource_version}, "spec": {"taints": taints}}
            await self._client.merge_patch(CNRS, self._node, body)
            self.writes += 1
        self._theirs = frozenset(taint_identity(one) for one in wanted if not one.key.startswith(TAINT_PREFIX))

    def _failed(self, error: Exception, now_s: float) -> None:
        if isinstance(error, ApiError) and error.status == 404:
            # Gone between two writes, or its definition is: it is made anew, if it can be.
            self._spec = self._status = self._taints = None
        self._failures += 1
        self._not_before_s = now_s + RETRY_BACKOFF.wait_s(self._failures, random.random())
        self._trouble = Unavailable(f"CustomNodeResource {self._node} cannot be written: {error}", _remedy(error))


def _without_metrics(status: Mapping[str, Any]) -> dict[str, Any]:
    inner = status.get("status", {})
    return {"status": {name: value for name, value in inner.items() if name != "nodeMetricStatus"}}


def _remedy(error: Exception) -> str:
    if isinstance(error, ApiError) and error.status == 403:
        return "give the agent's role get, create and patch of customnoderesources, and patch of customnoderesources/status"
    if isinstance(error, ApiError) and error.missing:
        return "it is made anew"
    if isinstance(error, ApiError) and error.path_not_served:
        return "install the definition of customnoderesources.node.katalyst.kubewharf.io"
    return "it is tried again; the scheduler goes by what was written last"

"""Writes the node's CustomNodeResource when it changes, within a bounded rate and in its own task.
A cycle is only handed over and never waits. Spec and status use server-side apply, taints use compare-and-swap.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from agent.reporter.cnr import TaintIdentity, build_cnr_report, taint_identity
from agent.reporter.cnr_inputs import NO_CNR_INPUTS, CnrInputs
from agent.reporter.cnr_merge import MergedCnr, merge_plugin_fields
from agent.reporter.desired_state_writer import DesiredStateWriter, write_taints
from api.decision import Cycle
from api.eviction import TAINT_PREFIX
from api.interfaces import Unavailable
from api.katalyst.cnr import QosTaint
from api.node_resources import ReportedField
from api.overcommit import CPU_RATIO_KEY, MEMORY_RATIO_KEY
from common.backoff import Backoff, TokenBucket
from kube.client import KubeClient
from kube.errors import ApiError, FieldConflict
from kube.objects import ResourceType, TaintedObject

log = logging.getLogger(__name__)
FIELD_MANAGER = "dioptase-agent"
WRITES_PER_S, WRITE_BURST = 0.2, 5.0
"""Limit of writing requests: pods of a node may come and go every second, and a cluster has a thousand nodes."""
RESYNC_S = 300.0
"""Interval after which everything is written again, in case another client changed it; jitter adds up to a half."""
METRICS_INTERVAL_S = 60.0
"""Minimum interval between writes of node metrics and of overcommit ratios, which change all the time."""
INVALID_STATUSES = (400, 422)
_MAX_LISTED_FIELDS = 3
CNRS = ResourceType(
    "node.katalyst.kubewharf.io", "v1alpha1", "customnoderesources", "CustomNodeResource", TaintedObject
)


class CnrWriter(DesiredStateWriter):
    """The CustomNodeResource of the node, with the fields of reporter plugins."""

    name, form = "cnr", "apply"
    retry_backoff = Backoff(first_s=2.0, max_s=120.0)
    forbidden_remedy = (
        "give the agent's role get, create and patch of customnoderesources, and patch of customnoderesources/status"
    )

    def __init__(
        self,
        client: KubeClient,
        node: str,
        *,
        metrics: bool,
        inputs: Callable[[], CnrInputs] = lambda: NO_CNR_INPUTS,
        reports_reclaimable: bool = True,
    ) -> None:
        """`metrics` adds node metrics. `inputs` returns the parts that do not come from the cycle.

        Without `reports_reclaimable`, as in a dry run, nothing is reported as reclaimable and no field is taken over.
        """
        super().__init__(client, node)
        self._metrics, self._inputs, self._reports_reclaimable = metrics, inputs, reports_reclaimable
        self._latest: Cycle | None = None
        self._spec: Mapping[str, Any] | None = None
        self._status: Mapping[str, Any] | None = None
        self._taints: tuple[QosTaint, ...] | None = None
        """As written last, like the two above; None forces a write."""
        self._plugin_taints: frozenset[TaintIdentity] = frozenset()
        """Taints of plugins as written last: their keys have no prefix that marks them as the agent's."""
        self._conflicts: dict[str, tuple[FieldConflict, ...]] = {}
        """Fields taken over from other managers in the last write, by part of the object."""
        self._rejected: tuple[str, ...] = ()
        """Plugin fields left out, with the reason."""
        self._fields: tuple[ReportedField, ...] = ()
        self._invalid_fields: tuple[ReportedField, ...] = ()
        """Plugin fields with which the API server rejected the object."""
        self._rejection = ""
        """Message of that rejection."""
        self._metrics_due_s = self._ratios_due_s = 0.0
        self._annotations: Mapping[str, str] = {}
        """Overcommit annotations of the latest cycle that had any: they stay while there is no advice."""
        self._bucket = TokenBucket(WRITES_PER_S, WRITE_BURST, time.monotonic())
        self.writes = 0
        """Number of accepted writes."""

    def publish(self, cycle: Cycle) -> None:
        """Take a cycle without blocking."""
        self._latest = cycle

    def problem(self) -> Unavailable | None:
        """Return why writing fails, which fields other managers claim, or what was left out; None otherwise."""
        if self._failure is not None:
            return self._failure
        if conflicts := sorted({conflict for part in self._conflicts.values() for conflict in part}):
            fields = ", ".join(f"{field} by {manager}" for manager, field in conflicts[:_MAX_LISTED_FIELDS])
            more = f" and {len(conflicts) - _MAX_LISTED_FIELDS} more" if len(conflicts) > _MAX_LISTED_FIELDS else ""
            return Unavailable(
                f"CustomNodeResource {self._node}: fields of other managers were overwritten by this agent: {fields}{more}",
                "configure one of the two writers not to write these fields; they are checked again within 8 minutes",
            )
        return Unavailable(self._rejected[0], "fix or remove that plugin") if self._rejected else None

    async def _write(self, now_s: float) -> bool:
        if self._latest is None:
            return False
        if now_s >= self._resync_due_s:
            self._spec = self._status = self._taints = None
            self._resync_due_s = now_s + RESYNC_S * (1 + random.random() / 2)
        desired = self._desired(self._latest)
        if self._spec_changed(desired.spec, now_s) and self._bucket.take(now_s):
            await self._apply(desired.spec)  # Creates the object if it is missing.
            self._spec, self._ratios_due_s = desired.spec, now_s + METRICS_INTERVAL_S
        if self._spec is not None and self._taints != desired.taints and self._bucket.take(now_s):
            await self._write_taints(desired.taints)
            self._taints = desired.taints
        status = desired.status
        metrics_due = self._metrics and now_s >= self._metrics_due_s
        changed = metrics_due or _without_metrics(status) != self._status
        if self._spec is not None and status and changed and self._bucket.take(now_s):
            await self._apply(status, "status")
            self._status = _without_metrics(status)
            self._metrics_due_s = now_s + METRICS_INTERVAL_S
        self._rejected = desired.refused
        return True

    def _spec_changed(self, desired: Mapping[str, Any], now_s: float) -> bool:
        if self._spec is None or now_s >= self._ratios_due_s:
            return desired != self._spec
        return _without_ratios(desired) != _without_ratios(self._spec)

    def _desired(self, latest: Cycle) -> MergedCnr:
        inputs = self._inputs()
        self._fields = inputs.fields
        own = build_cnr_report(
            latest, metrics=self._metrics, inputs=inputs, reports_reclaimable=self._reports_reclaimable
        )
        self._annotations = own.annotations or self._annotations
        own = msgspec.structs.replace(own, annotations=self._annotations)
        if self._fields and self._fields == self._invalid_fields:
            text = (
                f"the API server rejects the fields of plugins; they are left out until they change: {self._rejection}"
            )
            return msgspec.structs.replace(merge_plugin_fields(own, ()), refused=(text,))
        return merge_plugin_fields(own, self._fields)

    async def _apply(self, body: Mapping[str, Any], part: str = "") -> None:
        """Apply without force first, so that fields taken over from other managers can be reported."""
        conflicts: tuple[FieldConflict, ...] = ()
        try:
            await self._client.apply(CNRS, self._node, body, FIELD_MANAGER, part, force=False)
        except ApiError as error:
            if not error.claims:
                raise
            if not self._reports_reclaimable:
                log.info(
                    "CustomNodeResource %s was not written, because manager %s owns fields of it and the agent runs dry",
                    self._node,
                    error.claims[0].manager,
                )
                return
            conflicts = error.claims
            await self._client.apply(CNRS, self._node, body, FIELD_MANAGER, part)
        self.writes += 1
        if conflicts and conflicts != self._conflicts.get(part):
            for manager, field in conflicts[:_MAX_LISTED_FIELDS]:
                log.warning("CustomNodeResource %s: took field %s over from manager %s", self._node, field, manager)
        self._conflicts[part] = conflicts

    async def _write_taints(self, desired: tuple[QosTaint, ...]) -> None:
        taints = (msgspec.to_builtins(taint) for taint in desired)
        self.writes += await write_taints(self._client, CNRS, self._node, taints, self._plugin_taints)
        self._plugin_taints = frozenset(
            taint_identity(taint) for taint in desired if not taint.key.startswith(TAINT_PREFIX)
        )

    def _back_off(self, error: Exception, now_s: float) -> None:
        super()._back_off(error, now_s)
        if not isinstance(error, ApiError):
            return
        if error.status == 404:
            # The object was deleted between two writes, or its definition was: create it again.
            self._spec = self._status = self._taints = None
        if error.status in INVALID_STATUSES and self._fields != self._invalid_fields:
            # The agent's own fields are valid: write them at once without those of the plugins.
            self._invalid_fields, self._rejection, self._retry_due_s = self._fields, error.message, 0.0

    def _failure_text(self, error: Exception) -> str:
        return f"CustomNodeResource {self._node} cannot be written: {error}"

    def _remedy(self, error: Exception) -> str:
        if isinstance(error, ApiError) and error.path_not_served:
            return "install the definition of customnoderesources.node.katalyst.kubewharf.io"
        return super()._remedy(error)


def _without_ratios(spec: Mapping[str, Any]) -> dict[str, Any]:
    metadata = spec.get("metadata", {})
    annotations = {
        key: text
        for key, text in metadata.get("annotations", {}).items()
        if key not in (CPU_RATIO_KEY, MEMORY_RATIO_KEY)
    }
    return {**spec, "metadata": {**metadata, "annotations": annotations}}


def _without_metrics(status: Mapping[str, Any]) -> dict[str, Any]:
    inner = status.get("status", {})
    return {"status": {name: value for name, value in inner.items() if name != "nodeMetricStatus"}}

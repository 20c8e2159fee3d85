"""Watches the configuration kinds and carries out their rollout plans against the API server.
Queue key ALL_KCCS stands for all KatalystCustomConfigs, a GroupVersionResource for all objects of that kind.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from common.backoff import TokenBucket
from controller.kcc import ownership
from controller.kcc.rollout_guard import RolloutGuard
from controller.kcc.rollout_plan import ConfigEntry, RolloutInputs, RolloutPlan, plan_rollout, with_entry
from controller.kinds import CNCS, KCCS, Cnc, GroupVersionResource, Kcc, target_resource_type
from controller.object_events import ObjectWarning, write_warning
from controller.reconcile import MetricValues, ignore_missing, reconcile_queue, run_all
from kube.client import KubeClient, RequestBody
from kube.errors import ApiError, ApiUnreachable
from kube.informer import Informer
from kube.objects import UnstructuredObject
from kube.work_queue import WorkQueue

log = logging.getLogger(__name__)

CONTROLLER_NAME, ALL_KCCS = "kcc", "all"
KCC_DELAY_S, TARGET_DELAY_S, NODE_DELAY_S = 0.2, 0.5, 2.0
"""Delays that combine changes made together: an apply of several objects, the nodes that a rollout has just written."""
PATCHES_PER_S, PATCHES_BURST, PATCHES_AT_ONCE = 10.0, 100.0, 16
"""Rate, burst and concurrency of a kind's patches."""
ROLLOUT_STEP_S = 5.0
"""A rollout continues with a new plan after this time, so pausing or invalidating an object takes effect within it."""
UNOWNED_GRACE_S = 300.0
"""Time without an owner after which a kind is removed from the nodes; its KCC may just be reinstalled."""
SYNC_RETRY_S, MISSING_KIND_RETRY_S = 1.0, 30.0


class KccController:
    """Controller of all KatalystCustomConfigs of the cluster; `run` it while leading."""

    def __init__(
        self,
        client: KubeClient,
        kccs: Informer[Kcc],
        cncs: Informer[Cnc],
        metrics: MetricValues,
        guard: Callable[[], RolloutGuard | None] = lambda: None,
    ) -> None:
        """`guard` returns the settings and observations of the guard of rollouts; None without one."""
        self._client, self._kccs, self._cncs, self._metrics, self._guard = client, kccs, cncs, metrics, guard
        self.queue: WorkQueue[GroupVersionResource | str] = WorkQueue(time.monotonic)
        self.kinds: dict[GroupVersionResource, Informer[UnstructuredObject]] = {}
        self._group = asyncio.TaskGroup()
        self._informer_tasks: dict[GroupVersionResource, asyncio.Task[None]] = {}
        self._buckets: dict[GroupVersionResource, TokenBucket] = {}
        self._ownership = ownership.KccOwnership(owners={}, reasons={})
        self._invalid: dict[GroupVersionResource, tuple[str, ...]] = {}
        self._unowned_since: dict[GroupVersionResource, float] = {}
        kccs.listen(lambda _: self.queue.add_after(ALL_KCCS, KCC_DELAY_S))
        cncs.listen(lambda _: self._nodes_changed())

    async def run(self) -> None:
        """Run until cancelled. The caller runs the given informers."""
        await self._kccs.synced.wait()
        await self._cncs.synced.wait()
        self.queue.add(ALL_KCCS)
        async with asyncio.TaskGroup() as self._group:
            self._group.create_task(reconcile_queue(CONTROLLER_NAME, self.queue, self._reconcile, self._metrics))
            self._group.create_task(self._sweep())

    def wake(self) -> None:
        """Plan the rollouts of all kinds again, because the guard observes something new."""
        for gvr in self._ownership.owners:
            self.queue.add(gvr)

    def _nodes_changed(self) -> None:
        for gvr in self._ownership.owners:
            self.queue.add_after(gvr, NODE_DELAY_S)

    async def _reconcile(self, key: GroupVersionResource | str) -> None:
        await (self._reconcile_kccs() if isinstance(key, str) else self._reconcile_kind(key))

    async def _reconcile_kccs(self) -> None:
        """Start and stop informers of the kinds, and update the status of every KCC."""
        resolved = ownership.resolve_owners(self._kccs.store, self._targets)
        for gvr in resolved.owners.keys() - self.kinds.keys():
            self._start_kind(gvr)
        for gvr in self.kinds.keys() - resolved.owners.keys():
            self._stop_kind(gvr)
        self._ownership = resolved
        if not all(informer.synced.is_set() for informer in self.kinds.values()):
            self.queue.add_after(ALL_KCCS, SYNC_RETRY_S)
        if any(informer.missing for informer in self.kinds.values()):
            self.queue.add_after(ALL_KCCS, MISSING_KIND_RETRY_S)
        await run_all(self._update_kcc(key, kcc) for key, kcc in list(self._kccs.store.items()))

    async def _update_kcc(self, key: str, kcc: Kcc) -> None:
        gvr = kcc.spec.target_type
        is_owner = self._ownership.owners.get(gvr) == key
        if is_owner and not self.kinds[gvr].synced.is_set():
            return
        targets = self._targets(gvr) if is_owner else ownership.TargetSummary()
        finalizers = ownership.planned_finalizers(kcc, targets.count)
        if finalizers is not None:
            await self._patch_finalizers(KCCS, key, kcc.metadata.resource_version, finalizers)
            if kcc.metadata.deletion_timestamp is not None:
                return
        if fields := ownership.changed_status(kcc, self._ownership.reasons[key], targets.invalid, time.time()):
            await ignore_missing(self._client.merge_patch(KCCS, key, {"status": fields}, "status"))

    def _targets(self, gvr: GroupVersionResource) -> ownership.TargetSummary:
        informer = self.kinds.get(gvr)
        if informer is None:
            return ownership.TargetSummary()
        count = len(informer.store.keys() | informer.problems.keys())
        return ownership.TargetSummary(missing=informer.missing, count=count, invalid=self._invalid.get(gvr, ()))

    def _start_kind(self, gvr: GroupVersionResource) -> None:
        informer = Informer(self._client, target_resource_type(gvr))
        informer.listen(lambda _: self.queue.add_after(gvr, TARGET_DELAY_S))
        informer.listen(lambda _: self.queue.add_after(ALL_KCCS, TARGET_DELAY_S))
        self.kinds[gvr] = informer
        self._buckets[gvr] = TokenBucket(PATCHES_PER_S, PATCHES_BURST, time.monotonic())
        self._informer_tasks[gvr] = self._group.create_task(informer.run())
        self.queue.add(gvr)

    def _stop_kind(self, gvr: GroupVersionResource) -> None:
        self._informer_tasks.pop(gvr).cancel()
        del self.kinds[gvr], self._buckets[gvr]
        self._invalid.pop(gvr, None)
        self._export(gvr, RolloutPlan())

    async def _reconcile_kind(self, gvr: GroupVersionResource) -> None:
        """Compute and carry out the plan of one kind."""
        informer, owner = self.kinds.get(gvr), self._ownership.owners.get(gvr)
        kcc = None if owner is None else self._kccs.store.get(owner)
        if informer is None or kcc is None:
            return
        if not informer.synced.is_set() or informer.missing:
            self.queue.add_after(gvr, MISSING_KIND_RETRY_S if informer.missing else SYNC_RETRY_S)
            return
        now_s = time.time()
        inputs = RolloutInputs(
            gvr=gvr,
            allowed=ownership.allowed_label_keys(kcc),
            objects=dict(informer.store),
            unreadable=dict(informer.problems),
            nodes=dict(self._cncs.store),
            guard=self._guard(),
        )
        # In a thread, because comparing thousands of objects takes seconds, and the lease has to be renewed every two.
        plan = await asyncio.to_thread(plan_rollout, inputs, now_s)
        if self._invalid.get(gvr, ()) != plan.invalid:
            self._invalid[gvr] = plan.invalid
            self.queue.add(ALL_KCCS)
        self._export(gvr, plan)
        if plan.wake_at_s is not None:
            self.queue.add_after(gvr, max(0.0, plan.wake_at_s - now_s))
        await self._carry_out(gvr, inputs, plan)

    async def _carry_out(self, gvr: GroupVersionResource, inputs: RolloutInputs, plan: RolloutPlan) -> None:
        # Finalizers first, so that no object is deleted before its nodes were moved. Nodes last, because an agent rejects
        # an object whose currentHash differs from its entry.
        steps: tuple[Callable[[], Awaitable[None]], ...] = (
            lambda: self._write_finalizers(gvr, inputs, plan),
            lambda: self._write_statuses(gvr, plan),
            lambda: self._write_entries(gvr, plan.entries),
        )
        await run_all(step() for step in steps)
        for key, message in plan.paused.items():
            log.warning("%s %s: %s", gvr.name, key, message)
            # Its condition has the message too.
            warning = ObjectWarning("RolloutPaused", "Pause", message)
            await write_warning(self._client, target_resource_type(gvr, key), inputs.objects[key].metadata, warning)
        for key in plan.expired:
            log.info("%s %s: deleted, because its lastDuration is over", gvr.name, key)
        uids = {key: inputs.objects[key].metadata.uid for key in plan.expired}
        await run_all(
            ignore_missing(self._client.delete(target_resource_type(gvr, key), key, uid)) for key, uid in uids.items()
        )

    async def _write_finalizers(self, gvr: GroupVersionResource, inputs: RolloutInputs, plan: RolloutPlan) -> None:
        versions = {key: inputs.objects[key].metadata.resource_version for key in plan.finalizers}
        await run_all(
            self._patch_finalizers(target_resource_type(gvr, key), key, versions[key], finalizers)
            for key, finalizers in plan.finalizers.items()
        )

    async def _write_statuses(self, gvr: GroupVersionResource, plan: RolloutPlan) -> None:
        await run_all(
            ignore_missing(self._client.merge_patch(target_resource_type(gvr, key), key, {"status": fields}, "status"))
            for key, fields in plan.statuses.items()
        )

    async def _write_entries(self, gvr: GroupVersionResource, entries: Mapping[str, ConfigEntry | None]) -> None:
        """Write the entries that the rate allows now, in the order of node names; the next plan has the rest.

        All of these are tried before the first error is raised.
        """
        bucket, limit = self._buckets[gvr], asyncio.Semaphore(PATCHES_AT_ONCE)

        async def write(cnc: Cnc) -> None:
            async with limit:
                new_entries = with_entry(cnc.status.katalyst_custom_config_list, gvr, entries[cnc.metadata.name])
                await self._patch_entries(gvr.name, cnc, new_entries)

        nodes = [node for node in sorted(entries) if bucket.take(time.monotonic())]
        if len(nodes) < len(entries):
            self.queue.add_after(gvr, ROLLOUT_STEP_S)
        requests = (write(cnc) for node in nodes if (cnc := self._cncs.store.get(node)))
        for result in await asyncio.gather(*requests, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _patch_entries(self, resource: str, cnc: Cnc, entries: list[ConfigEntry]) -> None:
        # At the version that was read, so that no entry that another writer added meanwhile is lost.
        body = {
            "metadata": {"resourceVersion": cnc.metadata.resource_version},
            "status": {"katalystCustomConfigList": entries},
        }
        written = await ignore_missing(self._client.merge_patch(CNCS, cnc.metadata.name, body, "status"))
        if written is not None:
            self._metrics.count("dioptase_kcc_node_updates_total", resource)
            self._cncs.record_write(written)

    async def _patch_finalizers(self, resource: Any, key: str, version: str, finalizers: tuple[str, ...]) -> None:
        body: RequestBody = {"metadata": {"resourceVersion": version, "finalizers": list(finalizers)}}
        await ignore_missing(self._client.merge_patch(resource, key, body))

    async def _sweep(self) -> None:
        """Remove entries of kinds that no KCC declares any more. Kinds of invalid KCCs still count as declared."""
        while True:
            await asyncio.sleep(UNOWNED_GRACE_S / 5)
            if self._kccs.problems or not self._kccs.synced.is_set():
                continue
            now_s = time.monotonic()
            declared = {kcc.spec.target_type for kcc in self._kccs.store.values()}
            unowned = {gvr for cnc in self._cncs.store.values() for gvr in _kinds_of_entries(cnc)} - declared
            self._unowned_since = {gvr: self._unowned_since.get(gvr, now_s) for gvr in unowned}
            expired = {gvr for gvr, since in self._unowned_since.items() if now_s - since >= UNOWNED_GRACE_S}
            for cnc in list(self._cncs.store.values()) if expired else ():
                entries = list(cnc.status.katalyst_custom_config_list)
                for gvr in expired:
                    entries = with_entry(tuple(entries), gvr, None)
                if len(entries) < len(cnc.status.katalyst_custom_config_list):
                    await self._remove_entries(cnc, entries)

    async def _remove_entries(self, cnc: Cnc, entries: list[ConfigEntry]) -> None:
        try:
            await self._patch_entries("unowned", cnc, entries)
        except (ApiError, ApiUnreachable) as error:
            log.debug("%s: %s; retried at the next sweep", cnc.metadata.name, error)

    def _export(self, gvr: GroupVersionResource, result: RolloutPlan) -> None:
        self._metrics.set(
            "dioptase_kcc_invalid_objects",
            [((gvr.name,), len(result.invalid))] if result != RolloutPlan() else {},
            (gvr.name,),
        )
        for metric, field in _COUNT_METRICS.items():
            values = [((gvr.name, key), counts[field]) for key, counts in result.counts.items()]
            self._metrics.set(metric, values, (gvr.name,))


_COUNT_METRICS = {
    "dioptase_kcc_target_nodes": "targetNodes",
    "dioptase_kcc_canary_nodes": "canaryNodes",
    "dioptase_kcc_updated_nodes": "updatedTargetNodes",
}


def _kinds_of_entries(cnc: Cnc) -> set[GroupVersionResource]:
    """Kinds of a node's entries, restricted to the groups that this controller may distribute."""
    kinds = set()
    for entry in cnc.status.katalyst_custom_config_list:
        try:
            gvr = msgspec.convert(entry.get("configType"), GroupVersionResource)
        except msgspec.ValidationError:
            continue
        if gvr.group in ownership.ALLOWED_GROUPS:
            kinds.add(gvr)
    return kinds

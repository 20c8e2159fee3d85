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
from controller.kcc.rollout_plan import ConfigEntry, RolloutInputs, RolloutPlan, plan_rollout, with_entry
from controller.kinds import CNCS, KCCS, Cnc, GroupVersionResource, Kcc, target_resource_type
from controller.reconcile import MetricValues, ignore_missing, reconcile_queue, run_all
from kube.client import KubeClient, RequestBody
from kube.errors import ApiError, ApiUnreachable
from kube.informer import Informer
from kube.objects import UnstructuredObject
from kube.work_queue import WorkQueue

log = logging.getLogger(__name__)

CONTROLLER_NAME, ALL_KCCS = "kcc", "all"
KCC_DELAY_S, TARGET_DELAY_S, NODE_DELAY_S = 0.2, 0.5, 2.0
"""What comes together is looked at once: an apply of several objects, the nodes that a rollout has just written."""
PATCHES_PER_S, PATCHES_BURST, PATCHES_AT_ONCE = 10.0, 100.0, 16
"""Of one kind; then it waits its turn."""
ROLLOUT_STEP_S = 5.0
"""A rollout goes on by a new plan: whoever pauses it, or breaks it, stops it within so long."""
UNOWNED_GRACE_S = 300.0
"""A kind that nobody owned for so long is taken from the nodes; before, it may only be installed anew."""
SYNC_RETRY_S, MISSING_KIND_RETRY_S = 1.0, 30.0


class KccController:
    """One for the cluster; `run` it while leading."""

    def __init__(self, client: KubeClient, kccs: Informer[Kcc], cncs: Informer[Cnc], tally: MetricValues) -> None:
        self._client, self._kccs, self._cncs, self._tally = client, kccs, cncs, tally
        self.queue: WorkQueue[GroupVersionResource | str] = WorkQueue(time.monotonic)
        self.kinds: dict[GroupVersionResource, Informer[UnstructuredObject]] = {}
        self._group = asyncio.TaskGroup()
        self._following: dict[GroupVersionResource, asyncio.Task[None]] = {}
        self._buckets: dict[GroupVersionResource, TokenBucket] = {}
        self._owned = ownership.KccOwnership(owners={}, reasons={})
        self._invalid: dict[GroupVersionResource, tuple[str, ...]] = {}
        self._unowned_since: dict[GroupVersionResource, float] = {}
        kccs.listen(lambda _: self.queue.add_after(ALL_KCCS, KCC_DELAY_S))
        cncs.listen(lambda _: self._nodes_changed())

    async def run(self) -> None:
        """Until cancelled. The informers that were given run elsewhere."""
        await self._kccs.synced.wait()
        await self._cncs.synced.wait()
        self.queue.add(ALL_KCCS)
        async with asyncio.TaskGroup() as self._group:
            self._group.create_task(reconcile_queue(CONTROLLER_NAME, self.queue, self._look, self._tally))
            self._group.create_task(self._sweep())

    def _nodes_changed(self) -> None:
        for gvr in self._owned.owners:
            self.queue.add_after(gvr, NODE_DELAY_S)

    async def _look(self, key: GroupVersionResource | str) -> None:
        await (self._own() if isinstance(key, str) else self._spread(key))

    async def _own(self) -> None:
        """Follow what is owned, and tell every KCC how it stands."""
        owned = ownership.resolve_owners(self._kccs.store, self._targets)
        for gvr in owned.owners.keys() - self.kinds.keys():
            self._follow(gvr)
        for gvr in self.kinds.keys() - owned.owners.keys():
            self._leave(gvr)
        self._owned = owned
        if not all(informer.synced.is_set() for informer in self.kinds.values()):
            self.queue.add_after(ALL_KCCS, SYNC_RETRY_S)
        if any(informer.missing for informer in self.kinds.values()):
            self.queue.add_after(ALL_KCCS, MISSING_KIND_RETRY_S)
        await run_all(self._tell_owner(key, kcc) for key, kcc in list(self._kccs.store.items()))

    async def _tell_owner(self, key: str, kcc: Kcc) -> None:
        gvr = kcc.spec.target_type
        mine = self._owned.owners.get(gvr) == key
        if mine and not self.kinds[gvr].synced.is_set():
            return
        targets = self._targets(gvr) if mine else ownership.TargetSummary()
        kept = ownership.wanted_finalizers(kcc, targets.count)
        if kept is not None:
            await self._patch_finalizers(KCCS, key, kcc.metadata.resource_version, kept)
        if kept is not None and kcc.metadata.deletion_timestamp is not None:
            return
        if fields := ownership.changed_status(kcc, self._owned.reasons[key], targets.invalid, time.time()):
            await ignore_missing(self._client.merge_patch(KCCS, key, {"status": fields}, "status"))

    def _targets(self, gvr: GroupVersionResource) -> ownership.TargetSummary:
        informer = self.kinds.get(gvr)
        if informer is None:
            return ownership.TargetSummary()
        count = len(informer.store.keys() | informer.problems.keys())
        return ownership.TargetSummary(missing=informer.missing, count=count, invalid=self._invalid.get(gvr, ()))

    def _follow(self, gvr: GroupVersionResource) -> None:
        informer = Informer(self._client, target_resource_type(gvr))
        informer.listen(lambda _: self.queue.add_after(gvr, TARGET_DELAY_S))
        informer.listen(lambda _: self.queue.add_after(ALL_KCCS, TARGET_DELAY_S))
        self.kinds[gvr] = informer
        self._buckets[gvr] = TokenBucket(PATCHES_PER_S, PATCHES_BURST, time.monotonic())
        self._following[gvr] = self._group.create_task(informer.run())
        self.queue.add(gvr)

    def _leave(self, gvr: GroupVersionResource) -> None:
        self._following.pop(gvr).cancel()
        del self.kinds[gvr], self._buckets[gvr]
        self._invalid.pop(gvr, None)
        self._show(gvr, RolloutPlan())

    async def _spread(self, gvr: GroupVersionResource) -> None:
        """Carry out the plan of one kind."""
        informer, owner = self.kinds.get(gvr), self._owned.owners.get(gvr)
        kcc = None if owner is None else self._kccs.store.get(owner)
        if informer is None or kcc is None:
            return
        if not informer.synced.is_set() or informer.missing:
            self.queue.add_after(gvr, MISSING_KIND_RETRY_S if informer.missing else SYNC_RETRY_S)
            return
        now_s = time.time()
        known = RolloutInputs(
            gvr=gvr,
            allowed=ownership.allowed_label_keys(kcc),
            objects=dict(informer.store),
            unreadable=dict(informer.problems),
            nodes=dict(self._cncs.store),
        )
        # In a thread: thousands of objects that somebody made take seconds to hold against each other, and the lease two.
        wanted = await asyncio.to_thread(plan_rollout, known, now_s)
        if self._invalid.get(gvr, ()) != wanted.invalid:
            self._invalid[gvr] = wanted.invalid
            self.queue.add(ALL_KCCS)
        self._show(gvr, wanted)
        if wanted.wake_at_s is not None:
            self.queue.add_after(gvr, max(0.0, wanted.wake_at_s - now_s))
        await self._carry_out(gvr, known, wanted)

    async def _carry_out(self, gvr: GroupVersionResource, known: RolloutInputs, wanted: RolloutPlan) -> None:
        # Finalizers first: from then on an object does not go before its nodes were moved. Nodes last: an agent takes no
        # content whose hash the object itself does not have yet.
        steps: tuple[Callable[[], Awaitable[None]], ...] = (
            lambda: self._keep(gvr, known, wanted),
            lambda: self._tell_objects(gvr, wanted),
            lambda: self._tell_nodes(gvr, wanted.entries),
        )
        await run_all(step() for step in steps)
        for key in wanted.expired:
            log.info("%s %s held for a time, which is over: it is deleted", gvr.name, key)
        uids = {key: known.objects[key].metadata.uid for key in wanted.expired}
        await run_all(
            ignore_missing(self._client.delete(target_resource_type(gvr, key), key, uid)) for key, uid in uids.items()
        )

    async def _keep(self, gvr: GroupVersionResource, known: RolloutInputs, wanted: RolloutPlan) -> None:
        versions = {key: known.objects[key].metadata.resource_version for key in wanted.finalizers}
        await run_all(
            self._patch_finalizers(target_resource_type(gvr, key), key, versions[key], kept)
            for key, kept in wanted.finalizers.items()
        )

    async def _tell_objects(self, gvr: GroupVersionResource, wanted: RolloutPlan) -> None:
        await run_all(
            ignore_missing(self._client.merge_patch(target_resource_type(gvr, key), key, {"status": fields}, "status"))
            for key, fields in wanted.statuses.items()
        )

    async def _tell_nodes(self, gvr: GroupVersionResource, entries: Mapping[str, ConfigEntry | None]) -> None:
        """As many as may be written now, by name; the rest by the next plan. All of these are tried before the first refusal is
        raised."""
        bucket, at_once = self._buckets[gvr], asyncio.Semaphore(PATCHES_AT_ONCE)

        async def tell(cnc: Cnc) -> None:
            async with at_once:
                entries_then = with_entry(cnc.status.katalyst_custom_config_list, gvr, entries[cnc.metadata.name])
                await self._patch_entries(gvr.name, cnc, entries_then)

        now = [node for node in sorted(entries) if bucket.take(time.monotonic())]
        if len(now) < len(entries):
            self.queue.add_after(gvr, ROLLOUT_STEP_S)
        told = (tell(cnc) for node in now if (cnc := self._cncs.store.get(node)))
        for result in await asyncio.gather(*told, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _patch_entries(self, resource: str, cnc: Cnc, entries: list[ConfigEntry]) -> None:
        """As of the version that was read: another's entry that came meanwhile must not be lost."""
        body = {
            "metadata": {"resourceVersion": cnc.metadata.resource_version},
            "status": {"katalystCustomConfigList": entries},
        }
        patched = self._client.merge_patch(CNCS, cnc.metadata.name, body, "status")
        written = await ignore_missing(patched)
        if written is not None:
            self._tally.count("dioptase_kcc_node_updates_total", resource)
            self._cncs.record_write(written)

    async def _patch_finalizers(self, resource: Any, key: str, version: str, kept: tuple[str, ...]) -> None:
        body: RequestBody = {"metadata": {"resourceVersion": version, "finalizers": list(kept)}}
        await ignore_missing(self._client.merge_patch(resource, key, body))

    async def _sweep(self) -> None:
        """Take from the nodes what no KCC is about any longer. One that is invalid or cannot be read is about something."""
        while True:
            await asyncio.sleep(UNOWNED_GRACE_S / 5)
            if self._kccs.problems or not self._kccs.synced.is_set():
                continue
            now_s = time.monotonic()
            named = {kcc.spec.target_type for kcc in self._kccs.store.values()}
            unowned = {gvr for cnc in self._cncs.store.values() for gvr in _kinds_of_entries(cnc)} - named
            self._unowned_since = {gvr: self._unowned_since.get(gvr, now_s) for gvr in unowned}
            over = {gvr for gvr, since in self._unowned_since.items() if now_s - since >= UNOWNED_GRACE_S}
            for cnc in list(self._cncs.store.values()) if over else ():
                entries = list(cnc.status.katalyst_custom_config_list)
                for gvr in over:
                    entries = with_entry(tuple(entries), gvr, None)
                if len(entries) < len(cnc.status.katalyst_custom_config_list):
                    await self._swept(cnc, entries)

    async def _swept(self, cnc: Cnc, entries: list[ConfigEntry]) -> None:
        try:
            await self._patch_entries("unowned", cnc, entries)
        except (ApiError, ApiUnreachable) as error:
            log.debug("%s: %s; at the next sweep", cnc.metadata.name, error)

    def _show(self, gvr: GroupVersionResource, result: RolloutPlan) -> None:
        self._tally.set(
            "dioptase_kcc_invalid_objects",
            [((gvr.name,), len(result.invalid))] if result != RolloutPlan() else {},
            (gvr.name,),
        )
        for metric, field in _COUNT_METRICS.items():
            values = [((gvr.name, key), counts[field]) for key, counts in result.counts.items()]
            self._tally.set(metric, values, (gvr.name,))


_COUNT_METRICS = {
    "dioptase_kcc_target_nodes": "targetNodes",
    "dioptase_kcc_canary_nodes": "canaryNodes",
    "dioptase_kcc_updated_nodes": "updatedTargetNodes",
}


def _kinds_of_entries(cnc: Cnc) -> set[GroupVersionResource]:
    """Of its entries, as far as they are of groups that are ours."""
    found = set()
    for entry in cnc.status.katalyst_custom_config_list:
        try:
            gvr = msgspec.convert(entry.get("configType"), GroupVersionResource)
        except msgspec.ValidationError:
            continue
        if gvr.group in ownership.ALLOWED_GROUPS:
            found.add(gvr)
    return found

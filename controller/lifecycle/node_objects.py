"""Creates, labels and deletes the CustomNodeResource and CustomNodeConfig of every node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from controller.lifecycle.mirroring import LabelMirroring, find_orphans, plan_mirror
from controller.reconcile import MetricValues, ignore_missing, reconcile_queue
from kube.client import KubeClient
from kube.errors import ApiError
from kube.informer import Informer
from kube.objects import KubeObject, PartialObjectMetadata
from kube.watch import ObjectChange
from kube.work_queue import RateLimit, WorkQueue

CONTROLLER_NAME = "lifecycle"
FIELD_MANAGER = "dioptase-lifecycle"
RECONCILE_LIMIT = RateLimit(per_s=50.0, burst=200.0)
WORKERS = 4
SWEEP_S = 30.0
LabelFingerprint = tuple[str, Mapping[str, str]]


class NodeObjects:
    """Controller of the nodes' objects; `run` it while leading. The caller runs the informers."""

    def __init__(
        self,
        client: KubeClient,
        nodes: Informer[PartialObjectMetadata],
        mirrored: Mapping[LabelMirroring, Informer[PartialObjectMetadata]],
        metrics: MetricValues,
    ) -> None:
        self._client, self._nodes, self._mirrored, self._metrics = client, nodes, mirrored, metrics
        self.queue: WorkQueue[str] = WorkQueue(time.monotonic, RECONCILE_LIMIT)
        self._applied: dict[tuple[LabelMirroring, str], LabelFingerprint] = {}
        for informer in (nodes, *mirrored.values()):
            informer.listen(self._changed)

    async def run(self) -> None:
        """Run until cancelled."""
        for informer in (self._nodes, *self._mirrored.values()):
            await informer.synced.wait()
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(reconcile_queue(CONTROLLER_NAME, self.queue, self._reconcile, self._metrics))
            group.create_task(self._sweep())

    def _changed(self, change: ObjectChange[PartialObjectMetadata]) -> None:
        # The kubelet writes its node's status every few minutes, and the agent its resource far more often.
        if change.old is None or change.new is None or _fingerprint(change.old) != _fingerprint(change.new):
            self.queue.add(change.key)

    async def _reconcile(self, name: str) -> None:
        node = self._nodes.store.get(name)
        if node is None:
            await self._delete_orphans(name)
            return
        for mode, informer in self._mirrored.items():
            applied = self._applied.get((mode, name)) == _fingerprint(node)
            patch = plan_mirror(node, informer.store.get(name), mode, applied=applied)
            if patch is None:
                continue
            await self._client.apply(informer.resource, name, patch.apply, FIELD_MANAGER)
            if patch.removed_labels:
                body = {"metadata": {"labels": dict.fromkeys(patch.removed_labels)}}
                await ignore_missing(self._client.merge_patch(informer.resource, name, body))
            self._applied[mode, name] = _fingerprint(node)

    async def _delete_orphans(self, name: str) -> None:
        """Delete the objects of a node after the API server has confirmed that the node does not exist."""
        for mode, informer in self._mirrored.items():
            self._applied.pop((mode, name), None)
            orphan = informer.store.get(name)
            if orphan is not None and await self._node_missing(name):
                await ignore_missing(self._client.delete(informer.resource, name, orphan.metadata.uid))

    async def _node_missing(self, name: str) -> bool:
        try:
            await self._client.get(self._nodes.resource, name)
        except ApiError as error:
            if not error.missing:
                raise
            return True
        return False

    async def _sweep(self) -> None:
        while True:
            for informer in self._mirrored.values():
                for name in find_orphans(self._nodes.store, informer.store):
                    self.queue.add(name)
            await asyncio.sleep(SWEEP_S)


def _fingerprint(object_: KubeObject) -> LabelFingerprint:
    assert isinstance(object_, PartialObjectMetadata)
    return object_.metadata.uid, object_.metadata.labels

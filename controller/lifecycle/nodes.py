"""The effects of mirroring: every node has its CustomNodeResource and CustomNodeConfig, and they go with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from controller.lifecycle.mirror import Mirrored, mirror, orphans
from controller.tally import Tally
from controller.working import settled, work
from kube.client import Client
from kube.errors import ApiError
from kube.informer import Informer
from kube.objects import Bare, Object
from kube.queue import Limit, WorkQueue
from kube.store import Change

NAME = "lifecycle"
MANAGER = "dioptase-lifecycle"
PACE = Limit(per_s=50.0, burst=200.0)
WORKERS = 4
SWEEP_S = 30.0
Fingerprint = tuple[str, Mapping[str, str]]


class NodeObjects:
    """`run` it while leading. The informers that are given run elsewhere."""

    def __init__(
        self, client: Client, nodes: Informer[Bare], mirrored: Mapping[Mirrored, Informer[Bare]], tally: Tally
    ) -> None:
        self._client, self._nodes, self._mirrored, self._tally = client, nodes, mirrored, tally
        self.queue: WorkQueue[str] = WorkQueue(time.monotonic, PACE)
        self._applied: dict[tuple[Mirrored, str], Fingerprint] = {}
        for informer in (nodes, *mirrored.values()):
            informer.listen(self._changed)

    async def run(self) -> None:
        """Until cancelled."""
        for informer in (self._nodes, *self._mirrored.values()):
            await informer.synced.wait()
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(work(NAME, self.queue, self._look, self._tally))
            group.create_task(self._sweep())

    def _changed(self, change: Change[Bare]) -> None:
        # A kubelet writes its node's status every few minutes, and an agent its resource far more often.
        if change.old is None or change.new is None or _print(change.old) != _print(change.new):
            self.queue.add(change.key)

    async def _look(self, name: str) -> None:
        node = self._nodes.store.get(name)
        if node is None:
            await self._gone(name)
            return
        for how, informer in self._mirrored.items():
            found = informer.store.get(name)
            wanted = mirror(node, found, how, applied=self._applied.get((how, name)) == _print(node))
            if wanted is None:
                continue
            await self._client.apply(informer.resource, name, wanted.apply, MANAGER)
            if wanted.drop:
                body = {"metadata": {"labels": dict.fromkeys(wanted.drop)}}
                await settled(self._client.merge_patch(informer.resource, name, body))
            self._applied[how, name] = _print(node)

    async def _gone(self, name: str) -> None:
        """Delete what a node has left, once the API server itself says that there is no such node."""
        for how, informer in self._mirrored.items():
            self._applied.pop((how, name), None)
            found = informer.store.get(name)
            if found is not None and await self._is_gone(name):
                await settled(self._client.delete(informer.resource, name, found.metadata.uid))

    async def _is_gone(self, name: str) -> bool:
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
                for name in orphans(self._nodes.store, informer.store):
                    self.queue.add(name)
            await asyncio.sleep(SWEEP_S)


def _print(object_: Object) -> Fingerprint:
    assert isinstance(object_, Bare)
    return object_.metadata.uid, object_.metadata.labels

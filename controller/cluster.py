"""The controllers together: what they watch, which of them run, and how they stand. Runs only while this replica leads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from controller.config import Config
from controller.kcc.loop import NAME as KCC
from controller.kcc.loop import KccController
from controller.kinds import CNCS, CNRS, KCCS, NODES
from controller.lifecycle.agents import WATCH_S, AgentHealth
from controller.lifecycle.mirror import Mirrored
from controller.lifecycle.nodes import NAME as LIFECYCLE
from controller.lifecycle.nodes import NodeObjects
from controller.metrics import Exposition
from controller.tally import Tally
from kube.client import Client
from kube.informer import Informer


class Cluster:
    """One term of leading: everything is read anew, for nothing of the term before need still hold."""

    def __init__(self, client: Client, config: Config, tally: Tally, exposition: Exposition) -> None:
        self._informers: list[Informer[Any]] = []
        self._running: list[Callable[[], Awaitable[None]]] = []
        cncs = self._watch(Informer(client, CNCS))
        queues: dict[str, Any] = {}
        self._kcc: KccController | None = None
        if KCC in config.controllers:
            self._kcc = KccController(client, self._watch(Informer(client, KCCS)), cncs, tally)
            self._running.append(self._kcc.run)
            queues[KCC] = self._kcc.queue
        if LIFECYCLE in config.controllers:
            nodes = self._watch(Informer(client, NODES, most_s=WATCH_S))
            cnrs = self._watch(Informer(client, CNRS, most_s=WATCH_S))
            objects = NodeObjects(client, nodes, {Mirrored.MERGED: cnrs, Mirrored.REPLACED: cncs}, tally)
            self._running.append(objects.run)
            queues[LIFECYCLE] = objects.queue
            if config.health.enabled:
                health = AgentHealth(client, nodes, cnrs, config.health, tally)
                self._running.append(health.run)
                self._informers.extend(health.pods)
        exposition.watch(self, queues)

    def __iter__(self) -> Iterator[Informer[Any]]:
        """Everything that is watched now."""
        yield from self._informers
        if self._kcc is not None:
            yield from self._kcc.kinds.values()

    def waiting(self) -> str:
        """Resources that were not listed yet."""
        names = [informer.resource.gvr for informer in self if not informer.synced.is_set()]
        return f"not listed yet: {', '.join(names)}" if names else ""

    async def run(self) -> None:
        """Until cancelled, or until one of them meets a bug: then all end, and the process with them."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers:
                group.create_task(informer.run())
            for run in self._running:
                group.create_task(_coroutine(run))

    def _watch(self, informer: Informer[Any]) -> Informer[Any]:
        self._informers.append(informer)
        return informer


async def _coroutine(run: Callable[[], Awaitable[None]]) -> None:
    await run()

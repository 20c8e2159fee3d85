"""Starts informers and controllers for one term of leadership.
Nothing is carried over from an earlier term, whose data may be outdated: everything is listed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from controller.descheduler.descheduling_report import DeschedulingReport
from controller.eviction_budget import EvictionBudgetRenewal
from controller.kcc.reconciler import CONTROLLER_NAME as KCC
from controller.kcc.reconciler import KccController
from controller.kcc.rollout_guard import RolloutGuard
from controller.kinds import CNCS, CNRS, KCCS, NOCS, NODES
from controller.lifecycle.agent_health import MAX_WATCH_S, AgentHealth
from controller.lifecycle.leftovers import LeftoverRemoval
from controller.lifecycle.mirroring import LabelMirroring
from controller.lifecycle.node_objects import CONTROLLER_NAME as LIFECYCLE
from controller.lifecycle.node_objects import NodeObjects
from controller.metrics import ControllerExposition
from controller.overcommit.node_overcommit import CONTROLLER_NAME as OVERCOMMIT
from controller.overcommit.node_overcommit import OvercommitController
from controller.reconcile import MetricValues
from controller.settings import ControllerConfig
from kube.client import KubeClient
from kube.informer import Informer, describe_unsynced

if TYPE_CHECKING:
    from controller.descheduler.descheduler import DeschedulerController

DESCHEDULER = "descheduler"


class ControllerManager:
    """Informers and controllers of one term of leadership."""

    def __init__(
        self,
        client: KubeClient,
        config: ControllerConfig,
        namespace: str,
        metrics: MetricValues,
        exposition: ControllerExposition,
    ) -> None:
        """`namespace` is the controller's own, which has its Leases."""
        self._config = config
        self._health: AgentHealth | None = None
        self._informers: list[Informer[Any]] = []
        self._run_functions: list[Callable[[], Awaitable[None]]] = []
        cncs = self._watch(Informer(client, CNCS))
        nodes = self._watch(Informer(client, NODES, max_s=MAX_WATCH_S))
        # Agents that evict need it, whichever controllers run.
        self._budget = EvictionBudgetRenewal(client, nodes, namespace, config.eviction_budget, metrics)
        self._run_functions.append(self._budget.run)
        queues: dict[str, Any] = {}
        self._kcc: KccController | None = None
        if KCC in config.controllers:
            self._kcc = KccController(client, self._watch(Informer(client, KCCS)), cncs, metrics, self._guard)
            self._budget.on_eviction = self._kcc.wake
            self._run_functions.append(self._kcc.run)
            queues[KCC] = self._kcc.queue
        cnrs: Informer[Any] = Informer(client, CNRS, max_s=MAX_WATCH_S)
        if LIFECYCLE in config.controllers or OVERCOMMIT in config.controllers:
            self._watch(cnrs)
        if LIFECYCLE in config.controllers:
            objects = NodeObjects(client, nodes, {LabelMirroring.MERGED: cnrs, LabelMirroring.REPLACED: cncs}, metrics)
            self._run_functions.append(objects.run)
            queues[LIFECYCLE] = objects.queue
            if config.leftovers:
                self._run_functions.append(LeftoverRemoval(client, nodes, config, metrics).run)
            if config.health.enabled:
                self._health = AgentHealth(client, nodes, cnrs, config.health, metrics)
                self._run_functions.append(self._health.run)
                self._informers.extend(self._health.pods)
        if OVERCOMMIT in config.controllers:
            overcommit = OvercommitController(client, nodes, cnrs, self._watch(Informer(client, NOCS)), metrics)
            self._run_functions.append(overcommit.run)
            queues[OVERCOMMIT] = overcommit.queue
        self._descheduler: DeschedulerController | None = None
        if DESCHEDULER in config.controllers:
            # The plugins of the scheduler need numpy, 15 MiB that a controller without a descheduler does not spend.
            from controller.descheduler.descheduler import DeschedulerController  # noqa: PLC0415

            self._descheduler = DeschedulerController(
                client, nodes, config.descheduler, namespace, self._budget.take, metrics
            )
            self._informers.extend(self._descheduler.copy.informers)
            self._run_functions.append(self._descheduler.run)
        exposition.watch(self, queues)

    @property
    def descheduling_report(self) -> DeschedulingReport | None:
        """The latest evaluation of the descheduler; None without one."""
        return None if self._descheduler is None else self._descheduler.report

    def __iter__(self) -> Iterator[Informer[Any]]:
        """All informers, including those of configuration kinds that are currently distributed."""
        yield from self._informers
        if self._kcc is not None:
            yield from self._kcc.kinds.values()

    def _guard(self) -> RolloutGuard:
        """Return what the guard of rollouts observes now. Without `health` it observes evictions only."""
        return RolloutGuard(
            canary=self._config.rollout.canary,
            soak_s=self._config.rollout.soak_s,
            evictions=self._budget.evictions,
            unready_since_s={} if self._health is None else self._health.unready_since_s,
        )

    def unsynced(self) -> str:
        """Resources that have not been listed yet; empty if all have."""
        return describe_unsynced(self)

    async def run(self) -> None:
        """Run until cancelled, or until one of them raises because of a bug, which ends all of them and the process."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers:
                group.create_task(informer.run())
            for run in self._run_functions:
                group.create_task(_as_coroutine(run))

    def _watch(self, informer: Informer[Any]) -> Informer[Any]:
        self._informers.append(informer)
        return informer


async def _as_coroutine(run: Callable[[], Awaitable[None]]) -> None:
    await run()

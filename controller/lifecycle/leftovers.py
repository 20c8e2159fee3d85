"""Removes from Nodes what their agents no longer write.
Helm takes a right away before the agents that used it end, and an agent that was killed removes nothing, so neither can
be left to the agents.
"""

from __future__ import annotations

import asyncio
import logging
import time

from controller.cleanup import NODE_STEPS, PatchStep
from controller.kinds import ControllerNode
from controller.label_selectors import parse_selector
from controller.lifecycle.agent_health import EVALUATION_INTERVAL_S, TAINTS_METRIC
from controller.lifecycle.health_policy import NodeRotation
from controller.reconcile import MetricValues
from controller.settings import ControllerConfig
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable
from kube.informer import Informer

log = logging.getLogger(__name__)
ACTIONS = {"reclaimed-resources": "take-back", "eviction-taints": "untaint"}
"""Value of the metric's label `action`."""


class LeftoverRemoval:
    """Controller of the leftovers on Nodes; `run` it while leading. The caller runs the informer."""

    def __init__(
        self, client: KubeClient, nodes: Informer[ControllerNode], config: ControllerConfig, metrics: MetricValues
    ) -> None:
        self._client, self._nodes, self._metrics = client, nodes, metrics
        self._selector = parse_selector(config.health.node_selector)
        self._rotations = {kind: NodeRotation() for kind in config.leftovers}

    async def run(self) -> None:
        """Run until cancelled."""
        await self._nodes.synced.wait()
        while True:
            await self.remove(time.monotonic())
            await asyncio.sleep(EVALUATION_INTERVAL_S)

    async def remove(self, now_s: float) -> None:
        """Remove all leftovers of the nodes that must have agents. A node that fails is tried again after a minute."""
        for kind, rotation in self._rotations.items():
            steps = {
                name: steps
                for name, node in self._nodes.store.items()
                if self._selector.matches(node.metadata.labels) and (steps := NODE_STEPS[kind](node))
            }
            for name in rotation.next_nodes(sorted(steps), now_s):
                await self._remove(kind, name, steps[name])

    async def _remove(self, kind: str, node: str, steps: list[PatchStep]) -> None:
        result = "done"
        try:
            for body, subresource in steps:
                # The next kind's patch needs the resource version that this one makes.
                self._nodes.record_write(await self._client.merge_patch(self._nodes.resource, node, body, subresource))
            log.info(
                "Removed the %s of node %s: the controller's setting `leftovers` names them",
                kind.replace("-", " "),
                node,
            )
        except (ApiError, ApiUnreachable) as error:
            result = "refused"
            log.warning("node %s: the %s remain: %s; retried in a minute", node, kind.replace("-", " "), error)
        self._metrics.count(TAINTS_METRIC, ACTIONS[kind], result)

"""Watches agent pods and carries out taints, withdrawal of reclaimed resources and evictions.
Each evaluation starts from current objects, so a node whose agent has recovered meanwhile is not changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from common.backoff import TokenBucket
from controller.kinds import PODS, ControllerNode, ControllerPod
from controller.label_selectors import parse_selector
from controller.lifecycle.health_policy import (
    AgentState,
    AgentStates,
    HaltReason,
    HealthResult,
    NodeRotation,
    agent_states,
    evaluate_agent_health,
    keep_same_nodes,
    reclaimed_victims,
    with_own_taint,
    without_own_taint,
)
from controller.reconcile import MetricValues
from controller.settings import HealthConfig
from kube.client import KubeClient, ListScope
from kube.errors import ApiError, ApiUnreachable
from kube.informer import Informer
from kube.objects import TaintedObject

log = logging.getLogger(__name__)

EVALUATION_INTERVAL_S, SETTLE_S = 5.0, 0.5
"""Maximum interval of evaluations, and the delay after a change, which combines the changes of a rollout."""
MAX_WATCH_S, MAX_COPY_AGE_S = 120, 150.0
"""Older copies count as stale: the API server sends bookmarks once a minute, or ends the watch."""
TAINTS_METRIC, EVICTIONS_METRIC = "dioptase_lifecycle_taints_total", "dioptase_lifecycle_evictions_total"


class AgentHealth:
    """Controller of the agents' health; `run` it while leading. The caller runs the informers, those of `pods` too."""

    def __init__(
        self,
        client: KubeClient,
        nodes: Informer[ControllerNode],
        cnrs: Informer[TaintedObject],
        config: HealthConfig,
        metrics: MetricValues,
    ) -> None:
        self._client, self._nodes, self._cnrs, self._config, self._metrics = client, nodes, cnrs, config, metrics
        self._agents = {name: parse_selector(text) for name, text in config.agents.items()}
        self._node_selector = parse_selector(config.node_selector)
        selectors = sorted(set(config.agents.values()))
        self.pods = [
            Informer(client, PODS, ListScope(namespace=config.namespace, labels=text), _pod_node, max_s=MAX_WATCH_S)
            for text in selectors
        ]
        self._result = HealthResult(at_s=time.time())
        self._uids: dict[str, str] = {}
        self._wake = asyncio.Event()
        for informer in self.pods:
            informer.listen(lambda _: self._wake.set())
        self._untaint_rotation, self._taint_rotation = NodeRotation(), _limited_rotation(config.taint_per_s)
        self._withdrawal_rotation = _limited_rotation(config.taint_per_s)
        self._eviction_rotation = _limited_rotation(config.evict_per_s)

    @property
    def unready_since_s(self) -> Mapping[str, float]:
        """Nodes with an agent that is not ready, with the time since the epoch."""
        return self._result.unhealthy_since_s

    async def run(self) -> None:
        """Run until cancelled."""
        for informer in self._informers():
            await informer.synced.wait()
        while True:
            self._wake.clear()
            await self._evaluate(time.time())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), EVALUATION_INTERVAL_S - SETTLE_S)
            await asyncio.sleep(SETTLE_S)

    async def _evaluate(self, now_s: float) -> None:
        selected = [
            name for name, node in self._nodes.store.items() if self._node_selector.matches(node.metadata.labels)
        ]
        pods = {name: [pod for informer in self.pods for pod in informer.store.group(name)] for name in selected}
        states = agent_states(selected, self._agents, pods)
        uids = {name: node.metadata.uid for name, node in self._nodes.store.items()}
        before, self._uids = keep_same_nodes(self._result, self._uids, uids), uids
        result = evaluate_agent_health(states, before, self._cnrs.store, self._config, now_s=now_s, fresh=self._fresh())
        self._export(states, result)
        self._result = result
        tick_s = time.monotonic()
        for node in self._untaint_rotation.next_nodes(result.untaint, tick_s):
            await self._write_taints("untaint", node)
        for node in self._taint_rotation.next_nodes(result.taint, tick_s):
            unhealthy_s = now_s - result.unhealthy_since_s[node]
            log.warning(
                "Tainted node %s for reclaimed pods: its agent has not been ready for %.0f s", node, unhealthy_s
            )
            await self._write_taints("taint", node)
        # A node that was deleted during the writes above reports no resources any more.
        reporting = [
            name for name in result.away if (node_ := self._nodes.store.get(name)) and node_.reclaimed_resources
        ]
        for node in self._withdrawal_rotation.next_nodes(reporting, tick_s):
            await self._withdraw_resources(node)
        for node in self._eviction_rotation.next_nodes(result.evict, tick_s):
            await self._evict_reclaimed(node, now_s - result.unhealthy_since_s[node])

    def _informers(self) -> list[Informer[Any]]:
        return [self._nodes, self._cnrs, *self.pods]

    def _fresh(self) -> bool:
        now_s = time.monotonic()
        ages = [informer.age_s(now_s) for informer in self._informers()]
        return all(age is not None and age <= MAX_COPY_AGE_S for age in ages)

    async def _write_taints(self, action: str, node: str) -> None:
        cnr = self._cnrs.store.get(node)
        if cnr is None:
            return  # deleted during an earlier write
        taints = with_own_taint(cnr, time.time()) if action == "taint" else without_own_taint(cnr)
        # A merge patch replaces the list as a whole, so it must fail if the object has changed.
        body = {"metadata": {"resourceVersion": cnr.metadata.resource_version}, "spec": {"taints": taints}}
        await self._patch(action, action, self._cnrs, node, body)

    async def _withdraw_resources(self, name: str) -> None:
        """Remove the reclaimed resources that the Node reports.

        They are removed, not set to zero, because a restarting kubelet rejects running pods that request more than the
        allocatable amount of a resource that the Node has.
        """
        node = self._nodes.store.get(name)
        if node is None or not node.reclaimed_resources:
            return  # deleted during an earlier write
        removed = dict.fromkeys(node.reclaimed_resources)
        body = {"status": {"capacity": removed, "allocatable": removed}}
        await self._patch("take-back", "remove its reclaimed resources", self._nodes, name, body)

    async def _patch(self, action: str, verb: str, informer: Informer[Any], node: str, body: Mapping[str, Any]) -> None:
        """Patch the object of a node, its status if the body has one, and count the result; a dry run only counts."""
        result = "dry-run" if self._config.dry_run else "done"
        try:
            if not self._config.dry_run:
                subresource = "status" if "status" in body else ""
                informer.record_write(await self._client.merge_patch(informer.resource, node, body, subresource))
        except (ApiError, ApiUnreachable) as error:
            result = "refused"
            log.warning("node %s: cannot %s: %s; retried in a minute", node, verb, error)
        self._metrics.count(TAINTS_METRIC, action, result)

    async def _evict_reclaimed(self, node: str, unhealthy_s: float) -> None:
        try:
            listing = await self._client.list(PODS, ListScope(fields=f"spec.nodeName={node}"))
        except (ApiError, ApiUnreachable) as error:
            log.warning("node %s: its pods cannot be listed: %s", node, error)
            return
        for pod in reclaimed_victims(listing.objects.values()):
            key = f"{pod.metadata.namespace}/{pod.metadata.name}"
            result = "dry-run" if self._config.dry_run else await self._evict(key, pod)
            self._metrics.count(EVICTIONS_METRIC, result)
            log.warning(
                "pod %s: %s: the agent of node %s has not been ready for %.0f s", key, result, node, unhealthy_s
            )

    async def _evict(self, key: str, pod: ControllerPod) -> str:
        try:
            await self._client.evict(PODS, key, pod.metadata.uid)
        except ApiError as error:
            if error.missing or error.conflict:
                return "gone"
            return "budget" if error.status == 429 else "refused"
        except ApiUnreachable:
            return "refused"
        return "evicted"

    def _export(self, states: AgentStates, result: HealthResult) -> None:
        counts = Counter((agent, state.value) for (_, agent), state in states.items())
        agents = [((agent, state.value), counts[agent, state.value]) for agent in self._agents for state in AgentState]
        self._metrics.set("dioptase_lifecycle_agents", agents)
        self._metrics.set("dioptase_lifecycle_unwell_nodes", [((), len(result.unhealthy_since_s))])
        self._metrics.set(
            "dioptase_lifecycle_halt", [((reason.value,), reason is result.halt) for reason in HaltReason]
        )
        if result.halt is not self._result.halt:
            log.warning(
                "taints and evictions %s: %d of %d nodes have an unhealthy agent",
                "resumed" if result.halt is HaltReason.NONE else f"halted ({result.halt.value})",
                len(result.unhealthy_since_s),
                len({node for node, _ in states}),
            )


def _limited_rotation(per_s: float) -> NodeRotation:
    return NodeRotation(TokenBucket(per_s, max(1.0, per_s * EVALUATION_INTERVAL_S), time.monotonic()))


def _pod_node(pod: ControllerPod) -> str:
    return pod.spec.node_name

"""Watches agent pods and carries out taints, withdrawal of reclaimed resources and evictions.
Each evaluation starts from current objects, so a node whose agent has recovered meanwhile is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from typing import Any

from common.backoff import TokenBucket
from controller.kinds import CNRS, NODES, PODS, ControllerCnr, ControllerNode, ControllerPod
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

log = logging.getLogger(__name__)

EVALUATION_INTERVAL_S, SETTLE_S = 5.0, 0.5
"""Between two looks at most, and after an agent's pod changed: a roll-out changes thousands, which are looked at together."""
MAX_WATCH_S, MAX_COPY_AGE_S = 120, 150.0
"""Bookmarks come once a minute, or where nothing has happened since the API server began a watch has ended by then; what was
heard of longer ago is not known."""
TAINTS_METRIC, EVICTIONS_METRIC = "dioptase_lifecycle_taints_total", "dioptase_lifecycle_evictions_total"


class AgentHealth:
    """`run` it while leading. The informers that are given run elsewhere, those of `pods` too."""

    def __init__(
        self,
        client: KubeClient,
        nodes: Informer[ControllerNode],
        cnrs: Informer[ControllerCnr],
        config: HealthConfig,
        tally: MetricValues,
    ) -> None:
        self._client, self._nodes, self._cnrs, self._config, self._tally = client, nodes, cnrs, config, tally
        self._agents = {name: parse_selector(text) for name, text in config.agents.items()}
        self._among = parse_selector(config.node_selector)
        selectors = sorted(set(config.agents.values()))
        self.pods = [
            Informer(client, PODS, ListScope(namespace=config.namespace, labels=text), _pod_node, max_s=MAX_WATCH_S)
            for text in selectors
        ]
        now_s = time.monotonic()
        self._taints = TokenBucket(config.taint_per_s, max(1.0, config.taint_per_s * EVALUATION_INTERVAL_S), now_s)
        self._promises = TokenBucket(config.taint_per_s, max(1.0, config.taint_per_s * EVALUATION_INTERVAL_S), now_s)
        self._evictions = TokenBucket(config.evict_per_s, max(1.0, config.evict_per_s * EVALUATION_INTERVAL_S), now_s)
        self._judged = HealthResult(at_s=time.time())
        self._uids: dict[str, str] = {}
        self._wake = asyncio.Event()
        for informer in self.pods:
            informer.listen(lambda _: self._wake.set())
        self._untainting, self._tainting, self._taking_back, self._evicting = (
            NodeRotation(),
            NodeRotation(),
            NodeRotation(),
            NodeRotation(),
        )

    async def run(self) -> None:
        """Until cancelled."""
        for informer in self._watched():
            await informer.synced.wait()
        while True:
            self._wake.clear()
            await self._round(time.time())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), EVALUATION_INTERVAL_S - SETTLE_S)
            await asyncio.sleep(SETTLE_S)

    async def _round(self, now_s: float) -> None:
        wanted = [name for name, node in self._nodes.store.items() if self._among.matches(node.metadata.labels)]
        pods = {name: [pod for informer in self.pods for pod in informer.store.group(name)] for name in wanted}
        states = agent_states(wanted, self._agents, pods)
        uids = {name: node.metadata.uid for name, node in self._nodes.store.items()}
        before, self._uids = keep_same_nodes(self._judged, self._uids, uids), uids
        judged = evaluate_agent_health(states, before, self._cnrs.store, self._config, now_s=now_s, fresh=self._fresh())
        self._show(states, judged)
        self._judged = judged
        tick_s = time.monotonic()
        for node in self._untainting.next_nodes(judged.untaint, tick_s):
            await self._write_taints("untaint", node)
        for node in self._tainting.next_nodes(judged.taint, tick_s, self._taints):
            lasted_s = now_s - judged.unhealthy_since_s[node]
            log.warning(
                "node %s: its agent has not been ready for %.0f s, no more reclaimed pods there", node, lasted_s
            )
            await self._write_taints("taint", node)
        # One that went while another was written lends nothing any more.
        lending = [node for node in judged.away if (found := self._nodes.store.get(node)) is not None and found.lent]
        for node in self._taking_back.next_nodes(lending, tick_s, self._promises):
            await self._take_back(node)
        for node in self._evicting.next_nodes(judged.evict, tick_s, self._evictions):
            await self._empty(node, now_s - judged.unhealthy_since_s[node])

    def _watched(self) -> list[Informer[Any]]:
        return [self._nodes, self._cnrs, *self.pods]

    def _fresh(self) -> bool:
        now_s = time.monotonic()
        ages = [informer.age_s(now_s) for informer in self._watched()]
        return all(age is not None and age <= MAX_COPY_AGE_S for age in ages)

    async def _write_taints(self, action: str, node: str) -> None:
        cnr = self._cnrs.store.get(node)
        if cnr is None:
            return  # it went while another was written
        taints = with_own_taint(cnr, time.time()) if action == "taint" else without_own_taint(cnr)
        # As of the version that was read: the list is replaced whole.
        body = {"metadata": {"resourceVersion": cnr.metadata.resource_version}, "spec": {"taints": taints}}
        if self._config.dry_run:
            self._tally.count(TAINTS_METRIC, action, "dry-run")
            return
        try:
            self._cnrs.record_write(await self._client.merge_patch(CNRS, node, body))
        except (ApiError, ApiUnreachable) as error:
            self._tally.count(TAINTS_METRIC, action, "refused")
            log.warning("node %s: cannot %s: %s; again in a minute", node, action, error)
        else:
            self._tally.count(TAINTS_METRIC, action, "done")

    async def _take_back(self, node: str) -> None:
        """What the Node promises to reclaimed pods. It is removed and not set to nothing: of pods that run there a kubelet that
        is started anew would refuse those that ask for more than there is."""
        found = self._nodes.store.get(node)
        if found is None or not found.lent:
            return  # it went while another was written
        if self._config.dry_run:
            self._tally.count(TAINTS_METRIC, "take-back", "dry-run")
            return
        nothing = dict.fromkeys(found.lent)
        body = {"status": {"capacity": nothing, "allocatable": nothing}}
        try:
            self._nodes.record_write(await self._client.merge_patch(NODES, node, body, "status"))
        except (ApiError, ApiUnreachable) as error:
            self._tally.count(TAINTS_METRIC, "take-back", "refused")
            log.warning("node %s: it goes on to promise what was lent: %s; again in a minute", node, error)
        else:
            self._tally.count(TAINTS_METRIC, "take-back", "done")

    async def _empty(self, node: str, lasted_s: float) -> None:
        try:
            listing = await self._client.list(PODS, ListScope(fields=f"spec.nodeName={node}"))
        except (ApiError, ApiUnreachable) as error:
            log.warning("node %s: its pods cannot be listed: %s", node, error)
            return
        for pod in reclaimed_victims(listing.objects.values()):
            key = f"{pod.metadata.namespace}/{pod.metadata.name}"
            result = "dry-run" if self._config.dry_run else await self._evict(key, pod)
            self._tally.count(EVICTIONS_METRIC, result)
            log.warning("pod %s on node %s, whose agent has not been ready for %.0f s: %s", key, node, lasted_s, result)

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

    def _show(self, states: AgentStates, judged: HealthResult) -> None:
        counts = Counter((agent, state.value) for (_, agent), state in states.items())
        shown = [((agent, state.value), counts[agent, state.value]) for agent in self._agents for state in AgentState]
        self._tally.set("dioptase_lifecycle_agents", shown)
        self._tally.set("dioptase_lifecycle_unwell_nodes", [((), len(judged.unhealthy_since_s))])
        self._tally.set("dioptase_lifecycle_halt", [((reason.value,), reason is judged.halt) for reason in HaltReason])
        if judged.halt is not self._judged.halt:
            log.warning(
                "tainting and evicting: %s, with %d of %d nodes unwell",
                "goes on" if judged.halt is HaltReason.NONE else f"halted ({judged.halt.value})",
                len(judged.unhealthy_since_s),
                len({node for node, _ in states}),
            )


def _pod_node(pod: ControllerPod) -> str:
    return pod.spec.node_name

"""Watches Nodes, CustomNodeResources and NodeOvercommitConfigs, and writes ratios to Nodes and matches to configurations.
Configurations have no finalizer, so they can be deleted while no controller runs: the controller removes its annotations from
every Node that no configuration matches. The annotations have no effect by themselves: the webhook applies them to the next
status that the kubelet writes, within ten seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from api.overcommit import CONFIG_KEY, NODE_POOL_LABEL
from common.backoff import TokenBucket
from controller.kinds import NOCS, ControllerNode, Noc
from controller.object_events import ObjectWarning, write_warning
from controller.overcommit.node_ratios import (
    INPUT_KEYS,
    RECOMMENDED_KEYS,
    annotation_changes,
    config_of,
    config_warnings,
    matched_nodes,
    resolve_configs,
)
from controller.reconcile import MetricValues, ignore_missing, reconcile_queue, run_all
from kube.client import KubeClient
from kube.informer import Informer
from kube.objects import PartialObjectMetadata, TaintedObject
from kube.watch import ObjectChange
from kube.work_queue import WorkQueue

log = logging.getLogger(__name__)
CONTROLLER_NAME, ALL_CONFIGS = "overcommit", ""
"""ALL_CONFIGS is the queue's key for the status of all configurations; other keys are names of Nodes."""
CONFIGS_DELAY_S = 0.5
"""Delay of an update of the statuses, which combines the changes of many Nodes into one update."""
PATCHES_PER_S, PATCHES_BURST, WORKERS = 50.0, 200.0, 4
"""Rate and burst of changes of Nodes. They are limited, because every scheduler receives all of them by its watch."""
MATCHED_METRIC = "dioptase_overcommit_matched_nodes"


class OvercommitController:
    """Controller of all NodeOvercommitConfigs; `run` it while leading. The caller runs the informers."""

    def __init__(
        self,
        client: KubeClient,
        nodes: Informer[ControllerNode],
        cnrs: Informer[TaintedObject],
        configs: Informer[Noc],
        metrics: MetricValues,
    ) -> None:
        self._client, self._nodes, self._cnrs, self._configs, self._metrics = client, nodes, cnrs, configs, metrics
        self.queue: WorkQueue[str] = WorkQueue(time.monotonic)
        self._bucket = TokenBucket(PATCHES_PER_S, PATCHES_BURST, time.monotonic())
        self._in_force: Mapping[str, Noc] = {}
        self._reported: set[tuple[str, ObjectWarning]] = set()
        nodes.listen(self._node_changed)
        cnrs.listen(self._cnr_changed)
        configs.listen(self._config_changed)

    async def run(self) -> None:
        """Run until cancelled."""
        for informer in (self._nodes, self._cnrs, self._configs):
            await informer.synced.wait()
        self._resolve()
        # Changes that arrived before all copies were complete may have been evaluated without their configuration.
        for name in self._nodes.store:
            self.queue.add(name)
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(reconcile_queue(CONTROLLER_NAME, self.queue, self._reconcile, self._metrics))

    def _node_changed(self, change: ObjectChange[ControllerNode]) -> None:
        before, after = _node_inputs(change.old), _node_inputs(change.new)
        if before == after:
            return  # The kubelet writes its Node's status every few minutes.
        self.queue.add(change.key)
        if before is None or after is None or before[0] != after[0]:
            self.queue.add_after(ALL_CONFIGS, CONFIGS_DELAY_S)

    def _cnr_changed(self, change: ObjectChange[TaintedObject]) -> None:
        # The agent writes its resource far more often than these annotations.
        if _recommended(change.old) != _recommended(change.new):
            self.queue.add(change.key)

    def _config_changed(self, change: ObjectChange[Noc]) -> None:
        self._resolve()
        names = {config.metadata.name for config in (change.old, change.new) if config is not None}
        pools = {config.spec.node_overcommit_selector_val for config in (change.old, change.new) if config is not None}
        for name, node in self._nodes.store.items():
            metadata = node.metadata
            if metadata.labels.get(NODE_POOL_LABEL) in pools or metadata.annotations.get(CONFIG_KEY) in names:
                self.queue.add(name)
        self.queue.add_after(ALL_CONFIGS, CONFIGS_DELAY_S)

    def _resolve(self) -> None:
        self._in_force = resolve_configs(self._configs.store.values())

    async def _reconcile(self, key: str) -> None:
        if not all(informer.synced.is_set() for informer in (self._nodes, self._cnrs, self._configs)):
            return  # `run` adds every Node again.
        await (self._update_configs() if key == ALL_CONFIGS else self._update_node(key))

    async def _update_node(self, name: str) -> None:
        if not self._changes(name):
            return
        await asyncio.sleep(self._bucket.reserve(time.monotonic()))
        if not (changes := self._changes(name)):
            return
        written = await ignore_missing(
            self._client.merge_patch(self._nodes.resource, name, {"metadata": {"annotations": changes}})
        )
        if written is not None:
            self._nodes.record_write(written)

    def _changes(self, name: str) -> dict[str, str | None]:
        node = self._nodes.store.get(name)
        if node is None:
            return {}
        return annotation_changes(node, config_of(node, self._in_force), _recommended(self._cnrs.store.get(name)))

    async def _update_configs(self) -> None:
        """Update the list of matched Nodes of every configuration, and report each problem of a configuration once."""
        matched = matched_nodes(self._nodes.store.values(), self._in_force)
        configs = dict(self._configs.store.items())
        self._metrics.set(MATCHED_METRIC, [((name,), len(matched.get(name, ()))) for name in configs])
        await run_all(self._update_config(config, matched.get(name, [])) for name, config in configs.items())
        uids = {config.metadata.uid for config in configs.values()}
        self._reported = {(uid, warning) for uid, warning in self._reported if uid in uids}

    async def _update_config(self, config: Noc, nodes: list[str]) -> None:
        for warning in config_warnings(config, self._in_force):
            if (config.metadata.uid, warning) not in self._reported:
                self._reported.add((config.metadata.uid, warning))
                log.warning("%s %s: %s", NOCS.plural, config.metadata.name, warning.message)
                await write_warning(self._client, NOCS, config.metadata, warning)
        if tuple(nodes) == config.status.matched_node_list:
            return
        body = {"status": {"matchedNodeList": nodes}}
        written = await ignore_missing(self._client.merge_patch(NOCS, config.metadata.name, body, "status"))
        if written is not None:
            self._configs.record_write(written)


def _node_inputs(node: ControllerNode | None) -> tuple[str | None, Mapping[str, str]] | None:
    """Return pool and annotations of a Node, on which the result depends; None without a Node."""
    if node is None:
        return None
    annotations = node.metadata.annotations
    return node.metadata.labels.get(NODE_POOL_LABEL), {key: annotations[key] for key in INPUT_KEYS & annotations.keys()}


def _recommended(cnr: PartialObjectMetadata | None) -> Mapping[str, str]:
    """Return the annotations of an agent about overcommitment; empty without any."""
    annotations = {} if cnr is None else cnr.metadata.annotations
    return {key: annotations[key] for key in RECOMMENDED_KEYS & annotations.keys()}

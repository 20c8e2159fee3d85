"""Follows the annotations of the Node object that policies read: power alerts and overcommit ratios.
Katalyst's agent reads the same annotations (pkg/agent/sysadvisor/plugin/poweraware/spec/fetcher.go). While the API server
is unreachable, those received last stay in force.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from agent.advisor.power_capping import check_power_annotations, power_annotation_keys
from agent.config.config import AgentConfig
from agent.dynamic_config.follow import describe_stale_watch
from api.interfaces import Unavailable
from api.overcommit import CPU_RATIO_KEY, MEMORY_RATIO_KEY
from kube.client import KubeClient, ListScope
from kube.informer import Informer
from kube.objects import PartialObjectMetadata, ResourceType

NODE_METADATA = ResourceType("", "v1", "nodes", "Node", PartialObjectMetadata)


class NodeAnnotations:
    """Holds the annotations of one Node in `latest`; also a component that reports its health."""

    name, form, lost_events = "node-annotations", "watch", None

    def __init__(self, client: KubeClient, node: str, config: AgentConfig) -> None:
        self._node, self._prefix = node, config.power.annotation_prefix
        self._keys = {CPU_RATIO_KEY, MEMORY_RATIO_KEY, *power_annotation_keys(self._prefix)}
        self._checks_alert = config.power.enable
        self._informer = Informer(client, NODE_METADATA, ListScope(fields=f"metadata.name={node}"))
        self._informer.listen(lambda change: self._take(change.new))
        self._started_s = time.monotonic()
        self._latest: Mapping[str, str] | None = None

    def latest(self) -> Mapping[str, str] | None:
        """Return the annotations for NodeSample.annotations; None before the first answer and without the Node.

        Any thread may call it.
        """
        return self._latest

    async def run(self) -> None:
        """List and watch until cancelled. Nothing that the API server does ends it."""
        await self._informer.run()

    def problem(self) -> Unavailable | None:
        """Return why the annotations are unknown, old or invalid; None otherwise."""
        if received := describe_stale_watch(self._informer, self._started_s):
            return Unavailable(
                f"the annotations of Node {self._node} were {received}: power alerts and overcommit ratios may be out of date",
                "check that the API server is reachable and the agent's role allows list and watch of nodes",
            )
        if self._latest is None and self._informer.age_s(time.monotonic()) is not None:
            return Unavailable(f"there is no Node {self._node}", "correct the name in --node")
        if self._checks_alert and (invalid := check_power_annotations(self._latest or {}, self._prefix)):
            return Unavailable(
                f"Node {self._node}: {invalid}: the power alert changes nothing", "correct the annotation"
            )
        return None

    def _take(self, node: PartialObjectMetadata | None) -> None:
        self._latest = None
        if node is not None:
            self._latest = {key: text for key, text in node.metadata.annotations.items() if key in self._keys}

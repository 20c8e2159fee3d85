"""Collects inputs of the CustomNodeResource from the kubelet's `/configz`, pod resources and /sys.
While a source cannot be reached its latest answer stays valid and the component reports the failure.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from agent.reporter.cnr_inputs import NO_TOPOLOGY_POLICY, CnrInputs
from agent.sensors.node.machine import read_hardware
from api.interfaces import Unavailable
from api.node_resources import NodeAllocatable, PodAllocation
from api.text import quote

if TYPE_CHECKING:
    from agent.sensors.pods.kubelet_configuration import KubeletConfigPoller, KubeletConfiguration

POLL_INTERVAL_S = 10.0
POLLS_PER_FULL_REFRESH = 30
"""Polls between two reads of values that change only with a restart."""
TOPOLOGY_POLICIES = {"single-numa-node": "SingleNUMANode", "restricted": "Restricted", "best-effort": "BestEffort"}
TOPOLOGY_SCOPES = {"container": "ContainerLevel", "pod": "PodLevel", "": "ContainerLevel"}


class PodResourcesSource(Protocol):
    """Implemented by agent.katalyst.pod_resources.PodResourcesListerClient."""

    async def pods(self) -> tuple[PodAllocation, ...]: ...

    async def node(self) -> NodeAllocatable | None: ...


def topology_policy(configuration: KubeletConfiguration) -> str:
    """Return Katalyst's name of the kubelet's topology policy. Raises Unavailable for policies without a name."""
    policy, scope = configuration.topology_manager_policy, configuration.topology_manager_scope
    if policy in ("", "none"):
        return NO_TOPOLOGY_POLICY
    if policy not in TOPOLOGY_POLICIES or scope not in TOPOLOGY_SCOPES:
        raise Unavailable(
            f"the kubelet's topology manager has the unknown policy {quote(policy, 40)} or scope {quote(scope, 40)}",
            "use a version of Dioptase that supports them",
        )
    return f"{TOPOLOGY_POLICIES[policy]}{TOPOLOGY_SCOPES[scope]}"


class CnrInputCollector:
    """Holds the latest inputs in `inputs`. Without a kubelet the policy stays as given; without pod resources there are no
    allocations."""

    name, form = "node-report", "kubelet"
    lost_events = None

    def __init__(
        self,
        roots: tuple[Path, Path],
        start: CnrInputs,
        kubelet: KubeletConfigPoller | None,
        pod_resources: PodResourcesSource | None,
    ) -> None:
        """`roots` are the mount points of /proc and /sys."""
        self._roots, self._kubelet, self._pod_resources = roots, kubelet, pod_resources
        self._failures: dict[str, Unavailable] = {}
        self._polls = 0
        self.inputs = start if kubelet is None else msgspec.structs.replace(start, policy=None)

    def problem(self) -> Unavailable | None:
        """Return the failure of a source; None if all answer."""
        return next(iter(self._failures.values()), None)

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_INTERVAL_S)

    async def poll(self) -> None:
        """Refresh what is due once. Never raises for failures of the sources."""
        full = self._polls % POLLS_PER_FULL_REFRESH == 0
        self._polls += 1
        if full:
            hardware = await asyncio.to_thread(read_hardware, *self._roots)
            self.inputs = msgspec.structs.replace(self.inputs, hardware=hardware)
        if self._kubelet is not None:
            self._refresh_policy(self._kubelet)
        if self._pod_resources is not None:
            full = full or self.inputs.node is None or "pod_resources" in self._failures
            await self._refresh_pod_resources(self._pod_resources, full=full)

    def _refresh_policy(self, kubelet: KubeletConfigPoller) -> None:
        try:
            if kubelet.configuration is not None:
                self.inputs = msgspec.structs.replace(self.inputs, policy=topology_policy(kubelet.configuration))
            if kubelet.problem is not None:
                raise kubelet.problem
        except Unavailable as error:
            self._failures["policy"] = error
        else:
            self._failures.pop("policy", None)

    async def _refresh_pod_resources(self, source: PodResourcesSource, *, full: bool) -> None:
        try:
            node = await source.node() if full else self.inputs.node
            pods = await source.pods()
        except Unavailable as error:
            self._failures["pod_resources"] = error
        else:
            self._failures.pop("pod_resources", None)
            self.inputs = msgspec.structs.replace(self.inputs, node=node, pods=pods)

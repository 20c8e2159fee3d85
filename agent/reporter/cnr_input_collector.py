"""Collects inputs of the CustomNodeResource from the kubelet's `/configz`, pod resources and /sys.
While a source cannot be reached its latest answer stays valid and the component reports the failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from agent.reporter.cnr_inputs import NO_TOPOLOGY_POLICY, CnrInputs
from agent.sensors.node.machine import read_hardware
from api.interfaces import ProbeReading, Unavailable
from api.node_resources import NodeAllocatable, PodAllocation

POLL_INTERVAL_S = 10.0
POLLS_PER_FULL_REFRESH = 30
"""So many looks pass between two at what changes with a restart only."""
TOPOLOGY_POLICIES = {"single-numa-node": "SingleNUMANode", "restricted": "Restricted", "best-effort": "BestEffort"}
TOPOLOGY_SCOPES = {"container": "ContainerLevel", "pod": "PodLevel", "": "ContainerLevel"}


class ConfigzClient(Protocol):
    """agent.sensors.pods.kubelet_client.KubeletClient at `/configz`."""

    async def ask(self) -> bytes: ...


class PodResourcesSource(Protocol):
    """agent.katalyst.pod_resources.PodResourcesListerClient."""

    async def pods(self) -> tuple[PodAllocation, ...]: ...

    async def node(self) -> NodeAllocatable | None: ...


class _TopologySettings(msgspec.Struct, frozen=True, rename="camel"):
    topology_manager_policy: str = ""
    topology_manager_scope: str = ""


class _ConfigzResponse(msgspec.Struct, frozen=True):
    kubeletconfig: _TopologySettings


def topology_policy(answer: bytes) -> str:
    """Katalyst's word for the policy in a kubelet's `/configz`. Raises Unavailable where there is no such word."""
    try:
        said = msgspec.json.decode(answer, type=_ConfigzResponse).kubeletconfig
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unavailable(f"the kubelet's /configz is not what it should be: {error}", "see its version") from None
    policy, scope = said.topology_manager_policy, said.topology_manager_scope
    if policy in ("", "none"):
        return NO_TOPOLOGY_POLICY
    if policy not in TOPOLOGY_POLICIES or scope not in TOPOLOGY_SCOPES:
        raise Unavailable(
            f"the kubelet's topology manager has policy {policy!r:.40} and scope {scope!r:.40}, which have no word here",
            "use a version of Dioptase that knows them",
        )
    return f"{TOPOLOGY_POLICIES[policy]}{TOPOLOGY_SCOPES[scope]}"


class CnrInputCollector:
    """What there is to say beside the rounds, and a source of its own (api.interfaces.Probe). Without a kubelet to ask there is no
    policy to tell, without shares nobody has anything alone."""

    name, form = "node-report", "kubelet"
    lost_events = None

    def __init__(
        self,
        roots: tuple[Path, Path],
        start: CnrInputs,
        kubelet: ConfigzClient | None,
        shares: PodResourcesSource | None,
    ) -> None:
        """`roots` are those of /proc and /sys."""
        self._roots, self._kubelet, self._shares = roots, kubelet, shares
        self._trouble: dict[str, Unavailable] = {}
        self._looks = 0
        self.beside = start if kubelet is None else msgspec.structs.replace(start, policy=None)

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - as every source is asked
        return ProbeReading()

    def problem(self) -> Unavailable | None:
        """What cannot be asked; None where all can."""
        return next(iter(self._trouble.values()), None)

    def close(self) -> None:
        """Nothing to give back: connections are closed by who opened them."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_INTERVAL_S)

    async def look(self) -> None:
        """Ask whoever is due. Never raises for what they do."""
        rarely = self._looks % POLLS_PER_FULL_REFRESH == 0
        self._looks += 1
        if rarely:
            hardware = await asyncio.to_thread(read_hardware, *self._roots)
            self.beside = msgspec.structs.replace(self.beside, hardware=hardware)
        if self._kubelet is not None and (rarely or "policy" in self._trouble):
            await self._ask_policy(self._kubelet)
        if self._shares is not None:
            await self._ask_shares(self._shares, whole=rarely or self.beside.node is None or "shares" in self._trouble)

    async def _ask_policy(self, kubelet: ConfigzClient) -> None:
        try:
            self.beside = msgspec.structs.replace(self.beside, policy=topology_policy(await kubelet.ask()))
        except Unavailable as error:
            self._trouble["policy"] = error
        else:
            self._trouble.pop("policy", None)

    async def _ask_shares(self, shares: PodResourcesSource, *, whole: bool) -> None:
        try:
            node = await shares.node() if whole else self.beside.node
            pods = await shares.pods()
        except Unavailable as error:
            self._trouble["shares"] = error
        else:
            self._trouble.pop("shares", None)
            self.beside = msgspec.structs.replace(self.beside, node=node, pods=pods)

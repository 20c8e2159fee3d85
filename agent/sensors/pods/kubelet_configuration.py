"""Polls the kubelet's `/configz`: the only reader, whose answer the managers' probe, the node's report and the doctor use."""

from __future__ import annotations

import asyncio

import msgspec

from agent.sensors.pods.kubelet_client import KubeletClient
from api.interfaces import Unavailable

MANAGER_OFF = "none"
POLL_INTERVAL_S = 10.0
"""A restarted kubelet may have another configuration."""


class KubeletConfiguration(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Fields of the kubelet's `/configz` that the agent needs. The kubelet fills in its defaults; old versions lack fields."""

    cpu_manager_policy: str
    memory_manager_policy: str = MANAGER_OFF
    topology_manager_policy: str = MANAGER_OFF
    topology_manager_scope: str = "container"
    cgroup_driver: str = "cgroupfs"
    cgroup_root: str = ""


class _ConfigzResponse(msgspec.Struct, frozen=True):
    kubeletconfig: KubeletConfiguration


def parse_configz(answer: bytes) -> KubeletConfiguration:
    """Return the configuration in a `/configz` answer. Raises Unavailable for any other text."""
    try:
        return msgspec.json.decode(answer, type=_ConfigzResponse).kubeletconfig
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unavailable(f"the kubelet's /configz has an unexpected format: {error}", "see its version") from None


class KubeletConfigPoller:
    """Polls the kubelet's configuration; the last answer stays valid while the kubelet is unreachable."""

    def __init__(self, kubelet: KubeletClient) -> None:
        """`kubelet` is a client of CONFIGZ_PATH."""
        self._kubelet = kubelet
        self.configuration: KubeletConfiguration | None = None
        """The latest valid answer; None before the first one."""
        self.problem: Unavailable | None = None
        """Why the latest poll failed; None if it succeeded, or before the first one."""

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self.poll()

    async def poll(self) -> None:
        """Poll once. Never raises for a failing kubelet."""
        try:
            self.configuration, self.problem = parse_configz(await self._kubelet.ask()), None
        except Unavailable as error:
            self.problem = error

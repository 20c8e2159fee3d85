"""The pod-resources service as Katalyst's ORM has it, for its reporter: who has how much of which NUMA node.

Devices are the kubelet's to give, so what it says of them is repeated, while it answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent.qrm.protocol.asked import CPU, MEMORY
from agent.qrm.protocol.pod_resources import KUBELET
from agent.qrm.protocol.resource_plugin import PluginDesk
from agent.rpc import Peer, Service
from api.ports import Unavailable
from api.proto import pod_resources_pb2 as wire

_LISTER = wire.DESCRIPTOR.services_by_name["PodResourcesLister"]
_ASK_S = 2.0
"""For a kubelet; whoever asks here does so every few seconds."""


class PodResourcesDesk:
    """Answers from what rounds saw, which `desk` has."""

    def __init__(self, desk: PluginDesk, kubelet: Path = KUBELET) -> None:
        self._desk, self._kubelet = desk, kubelet
        self.problem: Unavailable | None = None
        """Why devices are not known; None where they are, or where there is no kubelet."""

    def service(self) -> Service:
        return Service(_LISTER, {"List": self._list, "GetAllocatableResources": self._node})

    async def _list(self, _request: Any, _words: Mapping[str, str]) -> Any:
        answer = wire.ListPodResourcesResponse()
        pods = self._desk.listed()
        said = await self._ask("List", wire.ListPodResourcesRequest(), wire.ListPodResourcesResponse)
        devices = {
            (pod.namespace, pod.name, container.name): container.devices
            for pod in said.pod_resources
            for container in pod.containers
        }
        for pod in pods:
            made = answer.pod_resources.add(name=pod.name, namespace=pod.namespace)
            made.labels.update(pod.labels)
            made.annotations.update(pod.annotations)
            for container in pod.containers:
                its = made.containers.add(name=container.name)
                its.devices.extend(devices.get((pod.namespace, pod.name, container.name), ()))
                for resource in (CPU, MEMORY):
                    held = self._desk.held(resource, pod.uid, container.name)
                    if held is not None:
                        its.resources.append(_renamed(held, wire.TopologyAwareResource, resource))
        return answer

    async def _node(self, _request: Any, _words: Mapping[str, str]) -> Any:
        resources = [
            _renamed(self._desk.allocatable(resource), wire.AllocatableTopologyAwareResource, resource)
            for resource in (CPU, MEMORY)
        ]
        said = await self._ask(
            "GetAllocatableResources", wire.AllocatableResourcesRequest(), wire.AllocatableResourcesResponse
        )
        return wire.AllocatableResourcesResponse(devices=said.devices, resources=resources)

    async def _ask(self, method: str, request: Any, empty: Callable[[], Any]) -> Any:
        """What the kubelet says; nothing where it does not."""
        if not self._kubelet.exists():
            self.problem = None
            return empty()
        peer = Peer(self._kubelet, _LISTER, timeout_s=_ASK_S)
        try:
            said = await peer.call(method, request)
        except Unavailable as error:
            self.problem = error
            return empty()
        finally:
            await peer.close()
        self.problem = None
        return said


def _renamed(amounts: Any, kind: Callable[..., Any], resource: str) -> Any:
    """The same amounts in the other protocol, which has the same fields by the same names, and the resource's beside them."""
    made = kind(resource_name=resource)
    for field, value in amounts.ListFields():
        if field.is_repeated:
            for one in value:
                getattr(made, field.name).add(resource_value=one.resource_value, node=one.node)
        else:
            setattr(made, field.name, value)
    return made

"""What the kubelet, or Katalyst's ORM, says that containers have of a node: CPUs, memory, devices, and what KubeWharf adds."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class Level(StrEnum):
    """What a node of the machine's topology is."""

    NUMA = "numa"
    SOCKET = "socket"


class DeviceShare(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one resource that are near the same NUMA nodes."""

    resource: str
    ids: tuple[str, ...]
    numa_nodes: tuple[int, ...] = ()


class MemoryShare(msgspec.Struct, frozen=True, kw_only=True):
    """Memory, or huge pages of one size."""

    kind: str
    """`memory`, `hugepages-2Mi`, ..."""
    bytes: int
    numa_nodes: tuple[int, ...] = ()


class TopologyQuantity(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a resource, and where it is."""

    value: float
    node: int
    level: Level = Level.NUMA
    name: str = ""
    """Of what provides it, such as `eth0`,"""
    kind: str = ""
    """and what that is, such as `NIC`; empty of the node itself."""
    annotations: Mapping[str, str] = {}


class TopologyResource(msgspec.Struct, frozen=True, kw_only=True):
    """KubeWharf's: a resource as a whole and in parts; of a node its allocatable part, with its capacity beside it."""

    name: str
    total: float
    parts: tuple[TopologyQuantity, ...] = ()
    whole_total: float = 0.0
    """Of a container what it was given at first, of a node its capacity."""
    whole_parts: tuple[TopologyQuantity, ...] = ()
    node_resource: bool = False
    scalar: bool = False


class ContainerShare(msgspec.Struct, frozen=True, kw_only=True):
    """One container. CPUs are those that are its alone."""

    name: str
    cpus: tuple[int, ...] = ()
    memory: tuple[MemoryShare, ...] = ()
    devices: tuple[DeviceShare, ...] = ()
    resources: tuple[TopologyResource, ...] = ()


class PodShare(msgspec.Struct, frozen=True, kw_only=True):
    """One pod. The kubelet names no uid here."""

    namespace: str
    name: str
    containers: tuple[ContainerShare, ...]
    role: str = ""
    kind: str = ""
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


class NodeShare(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has to give."""

    cpus: tuple[int, ...] = ()
    memory: tuple[MemoryShare, ...] = ()
    devices: tuple[DeviceShare, ...] = ()
    resources: tuple[TopologyResource, ...] = ()

"""Resources of a node as others report them: kubelet allocations, reporter plugin fields, network cards."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class TopologyLevel(StrEnum):
    """What a node of the machine's topology is."""

    NUMA = "numa"
    SOCKET = "socket"


class DeviceAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one resource that are near the same NUMA nodes."""

    resource: str
    ids: tuple[str, ...]
    numa_nodes: tuple[int, ...] = ()


class MemoryAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """Memory, or huge pages of one size."""

    kind: str
    """`memory`, `hugepages-2Mi`, ..."""
    bytes: int
    numa_nodes: tuple[int, ...] = ()


class TopologyQuantity(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a resource, and where it is."""

    value: float
    node: int
    level: TopologyLevel = TopologyLevel.NUMA
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
    capacity_total: float = 0.0
    """Of a container what it was given at first, of a node its capacity."""
    capacity_parts: tuple[TopologyQuantity, ...] = ()
    node_resource: bool = False
    scalar: bool = False


class ContainerAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """One container. CPUs are those that are its alone."""

    name: str
    cpus: tuple[int, ...] = ()
    memory: tuple[MemoryAllocation, ...] = ()
    devices: tuple[DeviceAllocation, ...] = ()
    resources: tuple[TopologyResource, ...] = ()


class PodAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """One pod. The kubelet names no uid here."""

    namespace: str
    name: str
    containers: tuple[ContainerAllocation, ...]
    role: str = ""
    kind: str = ""
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


class NodeAllocatable(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has to give."""

    cpus: tuple[int, ...] = ()
    memory: tuple[MemoryAllocation, ...] = ()
    devices: tuple[DeviceAllocation, ...] = ()
    resources: tuple[TopologyResource, ...] = ()


class ObjectSection(StrEnum):
    """Where in an object a field is."""

    SPEC = "spec"
    STATUS = "status"
    METADATA = "metadata"


class ReportedField(msgspec.Struct, frozen=True, kw_only=True):
    """One field of the first level of one object of this node."""

    plugin: str
    group: str
    version: str
    kind: str
    part: ObjectSection
    name: str
    """Go's name of it, such as `NodeResourceProperties`."""
    value: msgspec.Raw
    """JSON."""


class NetworkInterfaceCard(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface that is a device."""

    name: str
    index: int
    numa: int
    """-1 where the firmware does not say."""
    pci: str
    """Its address on the bus; empty of one that is on another."""
    speed_mbit: int
    """-1 where it has no link, or is only emulated."""
    enabled: bool


class HardwareInventory(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine's files say that no policy looks at."""

    flags: tuple[str, ...] = ()
    """Of the first CPU, as the kernel calls them; empty where it does not say."""
    cards: tuple[NetworkInterfaceCard, ...] = ()

"""Resources of a node as other programs report them: kubelet allocations, reporter plugin fields, network cards."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class TopologyLevel(StrEnum):
    """Kind of a topology node."""

    NUMA = "numa"
    SOCKET = "socket"


class DeviceAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one resource with affinity to the same NUMA nodes."""

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
    """Part of a resource in one topology node."""

    value: float
    node: int
    level: TopologyLevel = TopologyLevel.NUMA
    name: str = ""
    """Name of the providing device, such as `eth0`."""
    kind: str = ""
    """Kind of that device, such as `NIC`; empty for the topology node itself."""
    annotations: Mapping[str, str] = {}


class TopologyResource(msgspec.Struct, frozen=True, kw_only=True):
    """Resource in KubeWharf's form: in total and by topology node; for a node the allocatable amount and the capacity."""

    name: str
    total: float
    parts: tuple[TopologyQuantity, ...] = ()
    capacity_total: float = 0.0
    """Original amount for a container, capacity for a node."""
    capacity_parts: tuple[TopologyQuantity, ...] = ()


class ContainerAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """Resources allocated to one container; `cpus` are exclusive CPUs."""

    name: str
    cpus: tuple[int, ...] = ()
    memory: tuple[MemoryAllocation, ...] = ()
    devices: tuple[DeviceAllocation, ...] = ()
    resources: tuple[TopologyResource, ...] = ()


class PodAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """Resources allocated to one pod. The kubelet's pod resources API does not report its uid."""

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
    """Allocatable resources of a node."""

    cpus: tuple[int, ...] = ()
    memory: tuple[MemoryAllocation, ...] = ()
    devices: tuple[DeviceAllocation, ...] = ()
    resources: tuple[TopologyResource, ...] = ()


class ObjectSection(StrEnum):
    """Section of an API object."""

    SPEC = "spec"
    STATUS = "status"
    METADATA = "metadata"


class ReportedField(msgspec.Struct, frozen=True, kw_only=True):
    """First-level field of a section of one of the node's API objects, as a reporter plugin sets it."""

    plugin: str
    group: str
    version: str
    kind: str
    part: ObjectSection
    name: str
    """Field name in Go, such as `NodeResourceProperties`."""
    value: msgspec.Raw
    """Value as JSON."""


class NetworkInterfaceCard(msgspec.Struct, frozen=True, kw_only=True):
    """Network interface of a device."""

    name: str
    index: int
    numa: int
    """-1 if the firmware does not report it."""
    pci: str
    """PCI address; empty for a device on another bus."""
    speed_mbit: int
    """-1 without a link, or for an emulated card."""
    enabled: bool


class HardwareInventory(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware properties that are reported but used by no policy."""

    flags: tuple[str, ...] = ()
    """Flags of the first CPU in the kernel's names; empty if unknown."""
    cards: tuple[NetworkInterfaceCard, ...] = ()

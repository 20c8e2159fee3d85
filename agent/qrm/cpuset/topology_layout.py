"""Indexes a CPU topology by physical core, third-level cache, NUMA node and socket. Pure.
`CpuLayout.order` lists the CPUs socket by socket, node by node, cache by cache and core by core.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from api.cpu import Cpu, Topology

Core = tuple[int, int]
"""Socket and core number: the kernel counts cores within a socket."""
Cache = tuple[int, int, int]
"""Socket, NUMA node and cache number; without cache numbers, each NUMA node counts as one cache."""


@dataclass(frozen=True)
class CpuLayout:
    """Lookup tables of a topology."""

    topology: Topology
    order: tuple[int, ...]
    """CPUs by socket, NUMA node, cache and core."""
    place: Mapping[int, int]
    """Position of each CPU in `order`."""
    cpu: Mapping[int, Cpu]
    core: Mapping[int, Core]
    cache: Mapping[int, Cache]
    cores: Mapping[Core, tuple[int, ...]]
    numa: Mapping[int, tuple[int, ...]]
    """CPUs of each NUMA node, in order of id."""
    sockets: Mapping[int, frozenset[int]]
    """Sockets of each NUMA node: one, unless the firmware interleaves them."""

    @property
    def threads(self) -> int:
        """Maximum number of logical CPUs per physical core."""
        return max(map(len, self.cores.values()), default=1)

    def sockets_of(self, nodes: Iterable[int]) -> frozenset[int]:
        return frozenset[int]().union(*(self.sockets[node] for node in nodes))

    def nodes_of(self, cpus: Iterable[int]) -> tuple[int, ...]:
        """Return the NUMA nodes of these CPUs, sorted."""
        return tuple(sorted({self.cpu[cpu].numa for cpu in cpus}))

    def on(self, nodes: Iterable[int]) -> frozenset[int]:
        """Return the CPUs of these NUMA nodes; an unknown node has none."""
        return frozenset(cpu for node in nodes for cpu in self.numa.get(node, ()))

    def whole_cores(self, cpus: Collection[int]) -> list[Core]:
        """Return the physical cores all of whose CPUs are among these."""
        among = frozenset(cpus)
        return [core for core in dict.fromkeys(self.core[cpu] for cpu in cpus) if among.issuperset(self.cores[core])]


@lru_cache(maxsize=8)
def layout_of(topology: Topology) -> CpuLayout:
    """Return the layout of the topology, computed once."""
    ordered = sorted(topology.cpus, key=lambda cpu: (cpu.socket, cpu.numa, cpu.l3, cpu.core, cpu.id))
    order = tuple(cpu.id for cpu in ordered)
    cores: dict[Core, tuple[int, ...]] = {}
    numa: dict[int, tuple[int, ...]] = {}
    for cpu in topology.cpus:
        core = (cpu.socket, cpu.core)
        cores[core] = (*cores.get(core, ()), cpu.id)
        numa[cpu.numa] = (*numa.get(cpu.numa, ()), cpu.id)
    return CpuLayout(
        topology=topology,
        order=order,
        place={cpu: position for position, cpu in enumerate(order)},
        cpu={cpu.id: cpu for cpu in topology.cpus},
        core={cpu.id: (cpu.socket, cpu.core) for cpu in topology.cpus},
        cache={cpu.id: (cpu.socket, cpu.numa, cpu.l3) for cpu in topology.cpus},
        cores=cores,
        numa=dict(sorted(numa.items())),
        sockets={node: frozenset(cpu.socket for cpu in topology.cpus if cpu.numa == node) for node in numa},
    )


def restrict_topology(topology: Topology, allowed: Collection[int] | None) -> Topology:
    """Return the topology with the allowed CPUs only; unchanged if none is given or none of them exists."""
    inside = tuple(cpu for cpu in topology.cpus if allowed is None or cpu.id in allowed)
    return Topology(cpus=inside) if inside else topology

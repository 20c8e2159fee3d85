"""What of each NUMA node is promised to whom while pods are bound one after another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from agent.qrm.placing.layout import Layout


@dataclass
class Ledger:
    """Lives for one placement. CPUs of dedicated containers, cores of NUMA-bound shared pods, nodes that are closed."""

    layout: Layout
    usable: frozenset[int]
    unbound_cores: float
    """Requests of the shared pods that are bound to no node."""
    used: frozenset[int]
    """What online pools had: to be taken last."""
    taken: dict[str, frozenset[int]] = field(default_factory=dict)
    """CPUs by container, whatever names it."""
    requested: dict[int, float] = field(default_factory=dict)
    """Cores of NUMA-bound shared pods by node."""
    bound: set[int] = field(default_factory=set)
    """Nodes with pods that are bound to them."""
    closed: set[int] = field(default_factory=set)
    """Nodes whose pods share them with no other bound pod."""
    owned: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Nodes that one pod has for itself, by its uid."""

    def __post_init__(self) -> None:
        self._free = self.usable

    @property
    def free(self) -> frozenset[int]:
        """CPUs that no dedicated container has."""
        return self._free

    def take(self, container: str, cpus: frozenset[int]) -> None:
        """These CPUs are that container's alone."""
        self.taken[container] = cpus
        self._free -= cpus

    def own(self, uid: str, nodes: tuple[int, ...]) -> frozenset[int]:
        """The pod has those nodes for itself; returns their CPUs."""
        self.owned[uid] = nodes
        self.closed.update(nodes)
        self.bound.update(nodes)
        cpus = self.layout.on(nodes) & self.usable
        self._free -= cpus
        return cpus

    def ask(self, nodes: Collection[int], cores: float) -> None:
        """A shared pod is bound there; it asks for so many cores of each in equal parts."""
        for node in nodes:
            self.requested[node] = self.requested.get(node, 0.0) + cores / len(nodes)
        self.bound.update(nodes)

    def available(self, *, alone: bool, first: bool = False) -> Mapping[int, float]:
        """Cores of each node that a pod can be bound to; `alone`: one that shares with no other bound pod.

        A node that is not bound to yet has none where the shared pods that are not bound would not fit on what is left,
        unless the pod goes `first`.
        """
        free = {node: float(len(self._free.intersection(cpus))) for node, cpus in self.layout.numa.items()}
        unbound = {node: cores for node, cores in free.items() if node not in self.bound}
        spare = sum(unbound.values()) - self.unbound_cores
        result = {}
        for node, cores in free.items():
            left = cores - self.requested.get(node, 0.0)
            if node in self.closed or (alone and node in self.bound):
                left = 0.0
            elif len(free) == 1 and not first:
                # The only node there is holds everybody.
                left -= self.unbound_cores
            elif node in unbound and spare < cores and not first:
                left = 0.0
            result[node] = max(left, 0.0)
        return result

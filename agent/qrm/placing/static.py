"""The pools that sizes have no say in: CPUs reserved for the system, and CPUs that serve interrupts and nobody else."""

from __future__ import annotations

from dataclasses import dataclass

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.placing.layout import Layout, layout
from agent.qrm.placing.picking import NONE, pick_in_turn
from agent.qrm.placing.state import rebuild
from api.cpus import parse_cpu_list
from api.samples import Snapshot


@dataclass(frozen=True)
class Static:
    """Three sets that have nothing in common and are the whole node together; `usable` is never empty."""

    reserve: frozenset[int]
    interrupt: frozenset[int]
    usable: frozenset[int]
    """For pools and dedicated containers."""


def static_pools(
    layout: Layout, config: CpuPlacementConfig, kept: frozenset[int] = NONE, used: frozenset[int] = NONE
) -> Static:
    """As configured, as far as the CPUs are online and one is left for everybody else.

    A number of reserved CPUs is taken one of each NUMA node in turn, each on a core of its own while there are any. `kept`
    was reserved before, `used` is what dedicated pods have: to be taken last.
    """
    online = frozenset(layout.order)
    interrupt = online.intersection(parse_cpu_list(config.interrupt_cpu_list))
    if interrupt == online:
        interrupt = frozenset()
    others = online - interrupt
    reserve = others.intersection(parse_cpu_list(config.reserved_cpu_list))
    if not config.reserved_cpu_list:
        reserve = pick_in_turn(layout, min(config.reserved_cpus, len(others) - 1), others, kept, used)
    if reserve == others:
        reserve -= {max(reserve)}
    return Static(reserve=reserve, interrupt=interrupt, usable=others - reserve)


def not_shared(snapshot: Snapshot, config: CpuPlacementConfig) -> frozenset[int]:
    """CPUs that reclaimed pods must not be sent to where nobody places anybody: reserved ones, those of interrupts, and what
    dedicated pods have by their own cpusets."""
    alone = rebuild(snapshot.pods, snapshot.cgroups, snapshot.topology, "", 0).alone()
    static = static_pools(layout(snapshot.topology), config, used=alone)
    return static.reserve | static.interrupt | alone

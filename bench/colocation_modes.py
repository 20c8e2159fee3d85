"""Modes of bench.colocation: how a batch job and the service share a node."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from agent.sensors.cgroup.hierarchy import Hierarchy
from api.cpu import format_cpu_list
from bench.colocation_layouts import CellCgroups

TARGETS_MS = (1.0, 3.0, 10.0, 30.0)
"""Targets of run-queue latency along the trade-off; the default is 10 ms."""


class ModeKnobs(msgspec.Struct, frozen=True):
    """The cgroups whose knobs a mode writes."""

    hierarchy: Hierarchy
    groups: CellCgroups
    cpus: tuple[int, ...]
    load: float
    """Share of all CPUs that the online service uses."""

    def write(self, group: str, controller: str, file: str, value: str) -> None:
        mount = self.hierarchy.controller(controller)
        assert mount is not None
        (mount / group.lstrip("/") / file).write_text(value)


class ColocationMode(msgspec.Struct, frozen=True, kw_only=True):
    """One way of running the batch job next to the service."""

    name: str
    what: str
    batch: bool = True
    sched_idle: bool = False
    write_knobs: Callable[[ModeKnobs], None] | None = None
    agent_config: str | None = None
    """Text of the agent's configuration file; None runs no agent."""
    target_ms: float | None = None
    """Target of policy `latency`; the modes with a target are the points of the trade-off."""


def _idle(node: ModeKnobs) -> None:
    node.write(node.groups.competing, "cpu", "cpu.idle", "1")


def _least_weight(node: ModeKnobs) -> None:
    if node.hierarchy.mode == "v2":
        node.write(node.groups.batch, "cpu", "cpu.weight", "1")
    else:
        node.write(node.groups.batch, "cpu", "cpu.shares", "2")


def share_pool_size(cpus: int, load: float, reserve: float = 0.0) -> int:
    """Katalyst's rule for disjoint pools: ceil(usage x 1.25 + reserve), at least 1, leaving at least 1 to reclaim."""
    return max(1, min(math.ceil(load * cpus * 1.25 + reserve), cpus - 1))


def _partition(node: ModeKnobs) -> None:
    size = share_pool_size(len(node.cpus), node.load)
    node.write(node.groups.online, "cpuset", "cpuset.cpus", format_cpu_list(node.cpus[:size]))
    node.write(node.groups.batch, "cpuset", "cpuset.cpus", format_cpu_list(node.cpus[size:] or node.cpus))


def _latency_config(target_ms: float) -> str:
    return f"advisor:\n  latency:\n    targetWaitMs: {target_ms:g}\n"


def _target_mode(target_ms: float) -> ColocationMode:
    return ColocationMode(
        name=f"ours-{target_ms:g}ms", what=f"the agent with targetWaitMs {target_ms:g}",
        agent_config=_latency_config(target_ms), target_ms=target_ms,
    )  # fmt: skip


SUPPRESS_CONFIG = """advisor: {policy: none}
knobs: {suppress: {policy: cfsQuota}}
eviction: {plugins: []}
report: {extendedResources: false}
memory: {reclaimRoot: ""}
"""
"""Koordinator's default threshold (65 %), and nothing else of the agent: no priority, no memory guard, no eviction."""
MODES: tuple[ColocationMode, ...] = (
    ColocationMode(name="alone", what="no batch job", batch=False),
    ColocationMode(name="floor", what="burners under SCHED_IDLE, and cpu.idle where their cgroup competes with the service's: "
         "the best this kernel gives on a full node",
         sched_idle=True, write_knobs=_idle),
    ColocationMode(name="unmanaged", what="two cgroups with equal shares"),
    ColocationMode(name="stock", what="the weights and limits that a kubelet writes, nothing else"),
    ColocationMode(name="shares", what="batch cgroup with the least weight (cpu.shares 2, cpu.weight 1)",
         write_knobs=_least_weight),
    ColocationMode(name="partition", what="disjoint cpusets sized by Katalyst's rule", write_knobs=_partition),
    ColocationMode(name="koordinator", what="Koordinator's CPU suppress: every second a quota of 65 % of the node less "
         "the use of everything else, by its formula (the agent with knobs.suppress alone)", agent_config=SUPPRESS_CONFIG),
    ColocationMode(name="ours", what="the agent as shipped, policy latency", agent_config="", target_ms=10.0),
    ColocationMode(name="ours-protect", what="the agent with a stricter target (targetWaitMs 3)",
         agent_config=_latency_config(3.0), target_ms=3.0),
    *(_target_mode(target_ms) for target_ms in TARGETS_MS if target_ms not in (3.0, 10.0)),
    ColocationMode(name="canonical", what="the agent with Katalyst's policy: disjoint pools, sized by their use",
         agent_config="advisor: {policy: canonical}\n"),
    ColocationMode(name="idle", what="cpu.idle alone, nothing else", write_knobs=_idle),
)  # fmt: skip
MODES_BY_NAME = {mode.name: mode for mode in MODES}
MAIN_MODES = ("alone", "floor", "ours", "ours-protect")
COMPARED_MODES = ("unmanaged", "partition")
"""Measured once in each scenario: their effect on the service is far larger than the noise."""
KUBELET_MODES = ("alone", "floor", "stock", "ours")
KUBELET_COMPARED_MODES = ("partition", "koordinator")
"""Modes on a kubelet's layout; those that are compared are measured once in each scenario."""
CURVE_MODES = (*MAIN_MODES, *(mode.name for mode in MODES if mode.name.endswith("ms")), "canonical")

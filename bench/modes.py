"""The ways to run a batch job beside an online service that the colocation bench compares."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from agent.hierarchy import Hierarchy
from api.cpus import format_cpu_list
from demo.cgroups import DemoCgroups

ONLINE, BATCH = "dioptase-bench-online", "dioptase-bench-batch"
TARGETS_MS = (1.0, 3.0, 10.0, 30.0)
"""What the agent is told that online pods may wait, along the trade-off; 10 ms unless told."""


class Node(msgspec.Struct, frozen=True):
    """What a mode may turn its knobs on."""

    hierarchy: Hierarchy
    groups: DemoCgroups
    cpus: tuple[int, ...]
    load: float
    """Of all CPUs, what the online service uses."""

    def write(self, group: str, controller: str, file: str, value: str) -> None:
        mount = self.hierarchy.controller(controller)
        assert mount is not None
        (mount / group / file).write_text(value)


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """One way."""

    name: str
    what: str
    batch: bool = True
    sched_idle: bool = False
    turn: Callable[[Node], None] | None = None
    agent_config: str | None = None
    """Text of the agent's configuration file; the real agent runs where this is not None."""
    target_ms: float | None = None
    """The wait that policy `latency` was told to hold: the modes that have one are the points of the trade-off."""


def _idle(node: Node) -> None:
    node.write(BATCH, "cpu", "cpu.idle", "1")


def _least_weight(node: Node) -> None:
    if node.hierarchy.mode == "v2":
        node.write(BATCH, "cpu", "cpu.weight", "1")
    else:
        node.write(BATCH, "cpu", "cpu.shares", "2")


def share_pool_size(cpus: int, load: float, reserve: float = 0.0) -> int:
    """Katalyst's rule for disjoint pools: ceil(usage x 1.25 + reserve), at least 1, leaving at least 1 to reclaim."""
    return max(1, min(math.ceil(load * cpus * 1.25 + reserve), cpus - 1))


def _partition(node: Node) -> None:
    size = share_pool_size(len(node.cpus), node.load)
    node.write(ONLINE, "cpuset", "cpuset.cpus", format_cpu_list(node.cpus[:size]))
    node.write(BATCH, "cpuset", "cpuset.cpus", format_cpu_list(node.cpus[size:] or node.cpus))


def _protecting(target_ms: float) -> str:
    return f"advisor:\n  latency:\n    targetWaitMs: {target_ms:g}\n"


def _told(target_ms: float) -> Mode:
    return Mode(
        name=f"ours-{target_ms:g}ms", what=f"the agent told that online pods may wait {target_ms:g} ms",
        agent_config=_protecting(target_ms), target_ms=target_ms,
    )  # fmt: skip


MODES: tuple[Mode, ...] = (
    Mode(name="alone", what="no batch job", batch=False),
    Mode(name="floor", what="burners under SCHED_IDLE and cpu.idle: the best this kernel gives on a full node",
         sched_idle=True, turn=_idle),
    Mode(name="unmanaged", what="two cgroups with equal shares"),
    Mode(name="shares", what="batch cgroup with the least weight (cpu.shares 2, cpu.weight 1)", turn=_least_weight),
    Mode(name="partition", what="disjoint cpusets sized by Katalyst's rule", turn=_partition),
    Mode(name="ours", what="the agent as shipped, policy latency", agent_config="", target_ms=10.0),
    Mode(name="ours-protect", what="the agent told to protect harder (targetWaitMs 3)", agent_config=_protecting(3.0),
         target_ms=3.0),
    *(_told(target_ms) for target_ms in TARGETS_MS if target_ms not in (3.0, 10.0)),
    Mode(name="canonical", what="the agent with Katalyst's policy: disjoint pools, sized by their use",
         agent_config="advisor: {policy: canonical}\n"),
    Mode(name="idle", what="cpu.idle alone, nothing else", turn=_idle),
)  # fmt: skip
BY_NAME = {mode.name: mode for mode in MODES}
MAIN_MODES = ("alone", "floor", "ours", "ours-protect")
COMPARED_MODES = ("unmanaged", "partition")
"""Measured once in each scenario: what they do to the service is not a matter of a few percent."""
CURVE_MODES = (*MAIN_MODES, *(mode.name for mode in MODES if mode.name.endswith("ms")), "canonical")

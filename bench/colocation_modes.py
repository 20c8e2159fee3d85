"""Modes (how a batch job and the service share a node) and scenarios (their loads) of bench.colocation."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from agent.sensors.cgroup.hierarchy import Hierarchy
from api.cpu import format_cpu_list
from demo.cgroups import DemoCgroups
from demo.schedule import ConstantRate, Schedule, random_bursts
from demo.workloads import WorkloadSize

ONLINE, BATCH = "dioptase-bench-online", "dioptase-bench-batch"
TARGETS_MS = (1.0, 3.0, 10.0, 30.0)
"""Targets of run-queue latency along the trade-off; the default is 10 ms."""


class ModeKnobs(msgspec.Struct, frozen=True):
    """The cgroups whose knobs a mode writes."""

    hierarchy: Hierarchy
    groups: DemoCgroups
    cpus: tuple[int, ...]
    load: float
    """Share of all CPUs that the online service uses."""

    def write(self, group: str, controller: str, file: str, value: str) -> None:
        mount = self.hierarchy.controller(controller)
        assert mount is not None
        (mount / group / file).write_text(value)


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
    node.write(BATCH, "cpu", "cpu.idle", "1")


def _least_weight(node: ModeKnobs) -> None:
    if node.hierarchy.mode == "v2":
        node.write(BATCH, "cpu", "cpu.weight", "1")
    else:
        node.write(BATCH, "cpu", "cpu.shares", "2")


def share_pool_size(cpus: int, load: float, reserve: float = 0.0) -> int:
    """Katalyst's rule for disjoint pools: ceil(usage x 1.25 + reserve), at least 1, leaving at least 1 to reclaim."""
    return max(1, min(math.ceil(load * cpus * 1.25 + reserve), cpus - 1))


def _partition(node: ModeKnobs) -> None:
    size = share_pool_size(len(node.cpus), node.load)
    node.write(ONLINE, "cpuset", "cpuset.cpus", format_cpu_list(node.cpus[:size]))
    node.write(BATCH, "cpuset", "cpuset.cpus", format_cpu_list(node.cpus[size:] or node.cpus))


def _latency_config(target_ms: float) -> str:
    return f"advisor:\n  latency:\n    targetWaitMs: {target_ms:g}\n"


def _target_mode(target_ms: float) -> ColocationMode:
    return ColocationMode(
        name=f"ours-{target_ms:g}ms", what=f"the agent with targetWaitMs {target_ms:g}",
        agent_config=_latency_config(target_ms), target_ms=target_ms,
    )  # fmt: skip


MODES: tuple[ColocationMode, ...] = (
    ColocationMode(name="alone", what="no batch job", batch=False),
    ColocationMode(name="floor", what="burners under SCHED_IDLE and cpu.idle: the best this kernel gives on a full node",
         sched_idle=True, write_knobs=_idle),
    ColocationMode(name="unmanaged", what="two cgroups with equal shares"),
    ColocationMode(name="shares", what="batch cgroup with the least weight (cpu.shares 2, cpu.weight 1)",
         write_knobs=_least_weight),
    ColocationMode(name="partition", what="disjoint cpusets sized by Katalyst's rule", write_knobs=_partition),
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
CURVE_MODES = (*MAIN_MODES, *(mode.name for mode in MODES if mode.name.endswith("ms")), "canonical")

CALM_SHARE, BURST_SHARE, BURSTING = 0.3, 0.7, 0.25
"""Load between bursts and in bursts, and the share of time in bursts: 40 % of the node on average. With higher bursts of
memory work the node would be overloaded, and the latency would show only the length of the bursts."""
BURST_EVERY_S = 1.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of workloads."""

    name: str
    what: str
    load: float
    """Average share of all CPUs that the online service uses."""
    bursty: bool = False
    memory: bool = False
    """Whether requests are work on memory and the batch job streams through memory and page cache."""

    def schedule(self, size: WorkloadSize, seconds: float, from_s: float) -> Schedule:
        """Return the requests of a cell whose measured time lasts `seconds` from `from_s` on; a steady rate before it."""
        if not self.bursty:
            return ConstantRate(rate=size.rate(self.load))
        drawn = random_bursts(
            size.rate(CALM_SHARE), size.rate(BURST_SHARE), period_s=seconds,
            count=max(round(seconds / BURST_EVERY_S), 1), on_share=BURSTING, seed=1,
        )  # fmt: skip
        return msgspec.structs.replace(drawn, from_s=from_s)


def steady(percent: int) -> Scenario:
    """A steady load with a batch job that computes."""
    return Scenario(
        name=f"steady-{percent}", what=f"{percent} % of the node, steadily; batch computes", load=percent / 100
    )


_BURSTS = f"{CALM_SHARE:.0%} of the node with bursts of {BURST_SHARE:.0%}, 40 % on average"
SCENARIOS: tuple[Scenario, ...] = (
    *map(steady, (10, 20, 40, 60)),
    Scenario(name="memory", what="40 %, steadily; both work on memory", load=0.4, memory=True),
    Scenario(name="bursty", what=f"{_BURSTS}; batch computes", load=0.4, bursty=True),
    Scenario(name="bursty-memory", what=f"{_BURSTS}; both work on memory", load=0.4, bursty=True, memory=True),
)
DEFAULT_SCENARIOS = ("steady-60", "memory", "bursty")
CURVE_SCENARIO = "bursty-memory"
"""Scenario of the trade-off: the worst interference and the least even load."""
SCENARIOS_BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}

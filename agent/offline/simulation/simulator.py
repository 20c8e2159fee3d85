"""Simulates CPU distribution and run-queue latency of a node in discrete steps, and runs a policy on it.
Deterministic. The model is coarse: CPU is divisible, tasks do not migrate, memory is constant. Cgroups without
cpu.idle are served first. Online latency is an M/M/c queue (Sakasegawa) plus backlog plus the delay caused by
running batch tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import exp, sqrt

from msgspec.structs import replace

from agent.config.config import AgentConfig
from agent.offline.replay import CycleFacts, PolicyOutcome, PolicyReplay, evaluate_outcome, measure_cycle
from agent.offline.simulation.workloads import SimulatedService, SimulationPlan
from api.cpu import parse_cpu_list
from api.decision import ActMode, Cycle, Decision
from api.histogram import BOUNDS_NS, SLOT_COUNT
from api.knobs import Knob
from api.rates import compute_rates
from api.snapshot import Blame, CgroupSample, CpuTimes, NodeSample, RunqLatency, Snapshot
from api.units import NS_PER_S, US_PER_S

IDLE_DELAY_S, SLICE_S = 100e-6, 3e-3
"""Wait of a waking task for running batch work: until the scheduler has switched, or until its slice is over."""
MAX_BUSY_RATIO = 0.99
MAX_BACKLOG_S = 5.0
"""Upper bound of the backlog in seconds of peak load: later requests are abandoned."""


class _SimulatedCgroup:
    """Cumulative counters of one container."""

    __slots__ = ("backlog", "by_aggressor", "own_ns", "service", "slots", "used_ns")

    def __init__(self, service: SimulatedService) -> None:
        self.service = service
        self.backlog = self.used_ns = self.own_ns = 0.0
        self.slots = [0.0] * SLOT_COUNT
        self.by_aggressor: dict[str, float] = {}


class Simulation:
    """One simulated node: `apply` sets knobs as the kernel would, `step` advances time and returns a snapshot."""

    def __init__(self, plan: SimulationPlan) -> None:
        self._plan = plan
        self._groups = [_SimulatedCgroup(service) for service in plan.services]
        self._knobs: dict[tuple[str, Knob], str] = {}
        self._busy_ns = dict.fromkeys(plan.topology.ids, 0.0)
        self._at_s = 0.0
        self._seq = 0
        self.shortage_s = 0.0
        """Core seconds that online services came to want in the latest step and could not have. What they had to wait for
        since an earlier step was counted there."""

    def apply(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            self._knobs[decision.cgroup, decision.knob] = decision.value

    def step(self, seconds: float) -> Snapshot:
        """Advance time; the demand is that at the start of the step."""
        demand = {id(g): g.service.demand_cores(self._at_s) + g.backlog / seconds for g in self._groups}
        free = dict.fromkeys(self._plan.topology.ids, 1.0)
        used: dict[int, float] = {}
        batch = dict.fromkeys(free, 0.0)
        for idle in (False, True):
            tier = [g for g in self._groups if (self._knobs.get((g.service.cgroup, Knob.IDLE)) == "1") is idle]
            self._share(tier, demand, free, used, batch)
        self.shortage_s = 0.0
        for group in self._groups:
            granted = used[id(group)]
            if group.service.pod.qos.online:
                left = max(demand[id(group)] - granted, 0.0) * seconds
                self.shortage_s += max(left - group.backlog, 0.0)
                group.backlog = min(left, MAX_BACKLOG_S * group.service.peak_cores)
                self._wait(group, granted * seconds, free, batch)
            group.used_ns += granted * seconds * NS_PER_S
        for cpu, left in free.items():
            self._busy_ns[cpu] += (1 - left) * seconds * NS_PER_S
        self._at_s += seconds
        self._seq += 1
        return self._snapshot()

    def _cpus(self, group: _SimulatedCgroup) -> tuple[int, ...]:
        return parse_cpu_list(self._knobs.get((group.service.cgroup, Knob.CPUSET), "")) or self._plan.topology.ids

    def _limit(self, group: _SimulatedCgroup) -> float:
        quota, _, period = self._knobs.get((group.service.cgroup, Knob.QUOTA), "max").partition(" ")
        return float("inf") if quota == "max" else int(quota) / int(period)

    def _share(
        self,
        groups: Collection[_SimulatedCgroup],
        demand: Mapping[int, float],
        free: dict[int, float],
        used: dict[int, float],
        batch: dict[int, float],
    ) -> None:
        """Give each group its part, the smallest CPU sets first, evenly over the CPUs that it may use."""
        by_cpus: dict[tuple[int, ...], list[_SimulatedCgroup]] = {}
        for group in groups:
            by_cpus.setdefault(self._cpus(group), []).append(group)
        for cpus, group_list in sorted(by_cpus.items(), key=lambda item: (len(item[0]), item[0])):
            requested = {id(g): min(demand[id(g)], self._limit(g)) for g in group_list}
            room, total = sum(free[cpu] for cpu in cpus), sum(requested.values())
            ratio = min(1.0, room / total) if total else 0.0
            for group in group_list:
                granted = used[id(group)] = requested[id(group)] * ratio
                part = granted / room if room else 0.0
                for cpu in cpus if not group.service.pod.qos.online else ():
                    batch[cpu] += free[cpu] * part
            consumed = min(total / room, 1.0) if room else 0.0
            for cpu in cpus:
                free[cpu] *= 1 - consumed

    def _wait(
        self, group: _SimulatedCgroup, used_s: float, free: Mapping[int, float], batch: Mapping[int, float]
    ) -> None:
        cpus = self._cpus(group)
        batch_ratio = sum(batch[cpu] for cpu in cpus) / len(cpus)
        busy = min(sum(1 - free[cpu] for cpu in cpus) / len(cpus) - batch_ratio, MAX_BUSY_RATIO)
        request_s = group.service.request_us / US_PER_S
        own_s = request_s * busy ** (sqrt(2 * (len(cpus) + 1)) - 1) / (len(cpus) * (1 - busy)) if busy > 0 else 0.0
        own_s += group.backlog / len(cpus)
        batches = [g.service.cgroup for g in self._groups if not g.service.pod.qos.online]
        idle = all(self._knobs.get((cgroup, Knob.IDLE)) == "1" for cgroup in batches)
        batch_s = batch_ratio * (IDLE_DELAY_S if idle else SLICE_S)
        count, mean_ns = used_s / request_s, max((own_s + batch_s) * NS_PER_S, 1.0)
        group.own_ns += count * own_s * NS_PER_S
        for aggressor in batches:
            part = count * batch_s * NS_PER_S / len(batches)
            group.by_aggressor[aggressor] = group.by_aggressor.get(aggressor, 0.0) + part
        above = 1.0
        for slot, bound in enumerate(BOUNDS_NS):
            longer = exp(-bound / mean_ns)
            group.slots[slot] += count * (above - longer)
            above = longer
        group.slots[-1] += count * above

    def _snapshot(self) -> Snapshot:
        now_ns = round(self._at_s * NS_PER_S)
        times = {cpu: _cpu_times(round(busy), now_ns) for cpu, busy in self._busy_ns.items()}
        busy_ns = sum(cpu.user_ns for cpu in times.values())
        total = _cpu_times(busy_ns, len(times) * now_ns)
        samples = {"/": CgroupSample(path="/", id=1, cpu_usage_ns=busy_ns)}
        for number, group in enumerate(self._groups):
            samples[group.service.cgroup] = _cgroup_sample(100 + number, group)
        return Snapshot(
            seq=self._seq,
            taken_at_ns=now_ns,
            wall_time_ns=now_ns,
            boot_id="simulated",
            topology=self._plan.topology,
            node=NodeSample(cpu=total, per_cpu=times, memory_total_bytes=self._plan.memory_bytes),
            cgroups=samples,
            pods=tuple(service.pod for service in self._plan.services),
        )


def _cpu_times(busy_ns: int, total_ns: int) -> CpuTimes:
    return CpuTimes(
        user_ns=busy_ns, nice_ns=0, system_ns=0, idle_ns=total_ns - busy_ns, iowait_ns=0, irq_ns=0, softirq_ns=0, steal_ns=0
    )  # fmt: skip


def _cgroup_sample(number: int, group: _SimulatedCgroup) -> CgroupSample:
    path, wait, blame = group.service.cgroup, None, None
    if group.service.pod.qos.online:
        slots = tuple(int(count) for count in group.slots)
        by_aggressor = {name: round(ns) for name, ns in group.by_aggressor.items()}
        own_ns = round(group.own_ns)
        wait = RunqLatency(sum_ns=own_ns + sum(by_aggressor.values()), count=sum(slots), slots=slots)
        blame = Blame(by_cgroup={path: own_ns, **by_aggressor}, throttled_ns=0, higher_class_ns=0, other_ns=0)
    return CgroupSample(
        path=path,
        id=number,
        cpu_usage_ns=round(group.used_ns),
        periods=0,
        throttled_periods=0,
        throttled_ns=0,
        threads=group.service.threads,
        wait=wait,
        blame=blame,
    )


def run_simulation(
    plan: SimulationPlan, config: AgentConfig, *, seconds: float, interval_s: float
) -> Iterator[tuple[Cycle, CycleFacts, PolicyOutcome]]:
    """Yield every cycle from the second on with its facts and outcome, all of them simulated and none assumed."""
    simulation, replay = Simulation(plan), PolicyReplay(config)
    before: Cycle | None = None
    for _ in range(max(round(seconds / interval_s), 2)):
        snapshot = simulation.step(interval_s)
        change = None if before is None else compute_rates(before.snapshot, snapshot)
        advice, changes = replay.evaluate(snapshot, change)
        cycle = Cycle(
            snapshot=snapshot,
            previous=None if before is None else before.snapshot,
            act=ActMode.ON,
            trigger="tick",
            advice=advice,
        )
        cycle.share_rates(change)
        if before is not None and change is not None:
            fact = measure_cycle(before, cycle, change, 0)
            predicted = evaluate_outcome(fact, advice, changes, replay.victims)
            outcome = replace(
                predicted,
                batch_cores=fact.batch_cores,
                interference_cores=fact.interference_cores,
                short_cores=simulation.shortage_s / interval_s,
            )
            yield cycle, fact, outcome
        simulation.apply(replay.decisions)
        before = cycle

"""Measures one whole agent cycle by stage (evaluate, decide, write) on large simulated nodes."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
from msgspec.structs import replace

import agent.advisor.engine
import agent.loop
from agent.config.config import AgentConfig
from agent.loop import Loop
from agent.offline.simulation.simulator import Simulation
from agent.offline.simulation.workloads import (
    SimulatedService,
    SimulationPlan,
    build_batch_job,
    build_load,
    build_service,
    build_topology,
)
from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.checkpoint import CpusetCheckpoint
from agent.qrm.actuator.state_dir import open_originals
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.cgroup.hierarchy import Hierarchy, detect_hierarchy
from api.cpu import format_cpu_list
from api.decision import ActMode, Decision, OutcomeStatus
from api.knobs import Knob, Reason
from api.qos import Enhancements, QoSLevel
from api.snapshot import RunqLatency, Snapshot
from bench.cycle_cost_report import SCALING_STAGES, ApplyCost, CycleCostResults, CycleCostRow, LatencySpread, markdown
from bench.machine import bench_parser, end_cleanly_on_sigterm, this_machine, write_results

KINDS = ("ramp", "bursty", "ramp", "step")
USUAL_POD_SHARE = 60
"""Time in the loads runs faster by this factor, so that a minute of cycles contains several bursts."""
DEDICATED_EVERY_N_PODS, NAMED_POOL_EVERY_N_PODS = 20, 5
PARENT = "/kubepods"
_CPUSET = ("cpuset.cpus", "cpuset.mems")
_PLAIN_FILES = {
    "cpu.weight": "100\n",
    "cpu.max": "max 100000\n",
    "cpu.max.burst": "0\n",
    "cpu.idle": "0\n",
    "cpuset.cpus": "\n",
    "cpuset.mems": "\n",
    "memory.max": "max\n",
    "memory.high": "max\n",
    "memory.low": "0\n",
    "memory.min": "0\n",
    "memory.current": "0\n",
    "memory.stat": "inactive_file 0\nactive_file 0\n",
    "memory.reclaim": "",
    "memory.numa_stat": "anon N0=0\nfile N0=0\n",
    "io.weight": "default 100\n",
    "io.max": "",
}
"""Files of cgroup version 2 with the kernel's defaults."""


def simulated_plan(cpus: int, numa: int, pods: int) -> SimulationPlan:
    """Plan half online and half batch pods. Some online pods have their own pools or CPUs; their peaks add up to four fifths of
    the node."""
    machine = build_topology(cpus, numa)
    online = pods // 2
    peak = 0.8 * cpus / online
    services = [_online(number, peak) for number in range(online)]
    jobs = [build_batch_job(f"batch{number}", cpus / (pods - online), parent=PARENT) for number in range(pods - online)]
    return SimulationPlan(topology=machine, memory_bytes=cpus << 32, services=(*services, *jobs))


def _online(number: int, peak_cores: float) -> SimulatedService:
    kind, seed = KINDS[number % len(KINDS)], 1
    service = build_service(f"web{number}", kind, peak_cores, seed=seed, parent=PARENT)
    usual = build_load(kind, seed)
    pod = service.pod
    if number % DEDICATED_EVERY_N_PODS == DEDICATED_EVERY_N_PODS - 1:
        one_cpu = replace(pod.containers[0], cpu_request_cores=1.0)
        pod = replace(pod, qos=QoSLevel.DEDICATED, containers=(one_cpu,))
    elif number % NAMED_POOL_EVERY_N_PODS == NAMED_POOL_EVERY_N_PODS - 1:
        pod = replace(pod, enhancements=Enhancements(cpuset_pool=f"pool{number // NAMED_POOL_EVERY_N_PODS % 3}"))
    return replace(service, pod=pod, load=lambda at_s: usual(at_s * USUAL_POD_SHARE))


@contextmanager
def plain_cgroup_tree(plan: SimulationPlan) -> Iterator[Hierarchy]:
    """A version 2 tree of ordinary files in memory, because this machine may not have these CPUs."""
    root = Path(tempfile.mkdtemp(prefix="dioptase-bench-", dir="/dev/shm"))
    try:
        everything = {
            "cpuset.cpus.effective": f"{format_cpu_list(plan.topology.ids)}\n",
            "cpuset.mems.effective": f"{format_cpu_list(plan.topology.numa_nodes)}\n",
        }
        for path in ("", PARENT, *(service.cgroup for service in plan.services)):
            directory = root / path.lstrip("/")
            directory.mkdir(exist_ok=True)
            for name, text in {**_PLAIN_FILES, **everything}.items():
                (directory / name).write_text(text)
        yield Hierarchy(v1={}, v2=root)
    finally:
        shutil.rmtree(root)


@contextmanager
def real_cgroups(hierarchy: Hierarchy, parent: str, count: int) -> Iterator[Sequence[str]]:
    """Create cgroups without tasks in every hierarchy that has knobs. Raises OSError."""
    names = ("cpu", "cpuset", "memory")
    mounts = {mount for mount in map(hierarchy.controller, names) if mount is not None}
    paths = [f"{parent}/{number}" for number in range(count)]
    with ExitStack() as stack:
        for mount in mounts:
            for path in (parent, *paths):
                directory = mount / path.lstrip("/")
                directory.mkdir()
                stack.callback(directory.rmdir)
                for name in _CPUSET:
                    file, above = directory / name, directory.parent / name
                    if file.exists() and above.exists() and not file.read_text().strip():
                        file.write_text(above.read_text())
            controllers = mount / parent.lstrip("/") / "cgroup.subtree_control"
            if controllers.exists() and hierarchy.mode == "v2":
                controllers.write_text("+cpu +cpuset +memory")
        yield paths


NODES = ((200, 64, 2, 20.0), (500, 256, 8, 100.0))
"""Pods, CPUs, NUMA nodes, and the goal in milliseconds."""
POLICIES = ("latency", SCALING_STAGES, "canonical")
INITIAL_RECLAIMED_CORES = 0.1
"""Reclaimable share of the node when growth begins."""
COLLECTIONS = (10_000, 10, 10)
"""Thresholds of the garbage collector as in the agent (agent/__main__.py)."""
STAGES: Mapping[str, tuple[object, str]] = {
    "advise": (agent.advisor.engine, "advise_cpu"),
    "place": (agent.advisor.engine, "allocate_cpusets"),
    "memory": (agent.advisor.engine, "advise_memory"),
    "other knobs": (agent.advisor.engine, "build_knob_requests"),
    "decide": (agent.loop, "compose_decisions"),
    "which knobs": (Actuator, "knobs"),
    "apply": (Actuator, "apply"),
    "release": (Actuator, "release"),
    "checkpoint": (CpusetCheckpoint, "save"),
}
"""Functions that a cycle calls, by stage; none is called inside another. The remaining time of a cycle is `rest`."""


class Stopwatch:
    """Adds up the time of each stage in nanoseconds."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Time every stage within the `with` block."""
        with ExitStack() as stack:
            for name, (owner, attribute) in STAGES.items():
                stack.enter_context(patch.object(owner, attribute, self._timed(name, getattr(owner, attribute))))
            yield

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[name] = self.spent.get(name, 0) + time.perf_counter_ns() - began

        return timed


class SimulatedSensor:
    """A sensor of a simulated node, with the node's clock."""

    def __init__(self, simulation: Simulation, ids: Mapping[str, int]) -> None:
        self._simulation, self._ids = simulation, ids
        self._next = simulation.step(1.0)

    @property
    def now_ns(self) -> int:
        return self._next.taken_at_ns

    def advance(self) -> None:
        """Advance the node by a second."""
        snapshot = self._simulation.step(1.0)
        cgroups = {
            path: msgspec.structs.replace(sample, id=self._ids[path]) if path in self._ids else sample
            for path, sample in snapshot.cgroups.items()
        }
        self._next = msgspec.structs.replace(snapshot, cgroups=cgroups)

    def snapshot(self, _seq: int, _now_ns: int, _wall_ns: int) -> Snapshot:
        return self._next

    def read_runq_latency(self, _ids: Sequence[int]) -> Mapping[int, RunqLatency]:
        return {}


@contextmanager
def _quiet_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def measure_cycles(pods: int, cpus: int, numa: int, goal_ms: float, policy: str, rounds: int) -> CycleCostRow:
    """Measure cycles at intervals of a simulated second, without the first ones, which write every value."""
    plan = simulated_plan(cpus, numa, pods)
    advisor: dict[str, Any] = {"policy": policy}
    settling = max(rounds // 5, 2)
    watch, total_ms, cpu, written = Stopwatch(), list[float](), list[float](), list[float]()
    stages: dict[str, list[float]] = {name: [] for name in STAGES}
    with ExitStack() as stack:
        if policy == SCALING_STAGES:
            growth_per_s = (1 - INITIAL_RECLAIMED_CORES) / (rounds + settling)
            # Trials of the quota would hold the growth that this benchmark needs in each cycle.
            advisor = {"policy": "latency", "latency": {"growRatioPerS": growth_per_s, "quotaTrials": False}}
            stack.enter_context(
                patch.object(Actuator, "previous_quota_cores", lambda *_: INITIAL_RECLAIMED_CORES * cpus)
            )
        config = msgspec.convert({"advisor": advisor}, AgentConfig)
        hierarchy = stack.enter_context(plain_cgroup_tree(plan))
        simulation = Simulation(plan)
        root = hierarchy.primary
        sensor = SimulatedSensor(
            simulation, {s.cgroup: (root / s.cgroup.lstrip("/")).stat().st_ino for s in plan.services}
        )
        loop = _acting_agent(config, sensor, hierarchy, stack)
        stack.enter_context(watch.attached())
        stack.enter_context(_quiet_collector())
        for number in range(settling + rounds):
            sensor.advance()
            watch.spent.clear()
            began, busy = time.perf_counter_ns(), time.thread_time_ns()
            finished = loop.run_cycle("tick")
            took_ns, busy_ns = time.perf_counter_ns() - began, time.thread_time_ns() - busy
            _check_snapshot(finished.snapshot)
            simulation.apply([outcome.decision for outcome in finished.outcomes])
            if number >= settling:
                total_ms.append(took_ns / 1e6)
                cpu.append(busy_ns / 1e6)
                written.append(sum(outcome.status is OutcomeStatus.APPLIED for outcome in finished.outcomes))
                for name, spent in stages.items():
                    spent.append(watch.spent.get(name, 0) / 1e6)
    rest = [total - sum(spent[i] for spent in stages.values()) for i, total in enumerate(total_ms)]
    return CycleCostRow(
        pods=pods,
        cpus=cpus,
        numa=numa,
        policy=policy,
        goal_ms=goal_ms,
        rounds=rounds,
        total=LatencySpread.of(total_ms),
        cpu=LatencySpread.of(cpu),
        stages={name: LatencySpread.of(spent) for name, spent in {**stages, "rest": rest}.items()},
        written=LatencySpread.of(written),
    )


def _acting_agent(config: AgentConfig, sensor: SimulatedSensor, hierarchy: Hierarchy, stack: ExitStack) -> Loop:
    """Return the loop of an agent with --act on and the clock of the node, valid until the stack is closed."""
    state, actuator = _open_actuator(hierarchy, stack)
    clock = SimpleNamespace(monotonic_ns=lambda: sensor.now_ns, time_ns=lambda: sensor.now_ns, monotonic=time.monotonic)
    stack.enter_context(patch.object(agent.loop, "time", clock))
    sensed: Any = sensor
    return Loop(
        config=config,
        sensor=sensed,
        actuator=actuator,
        sinks=(),
        checkpoint=CpusetCheckpoint(state, "bench"),
    )


def _open_actuator(hierarchy: Hierarchy, stack: ExitStack) -> tuple[Path, Actuator]:
    """Return a temporary state directory and an actuator that journals there, valid until the stack is closed."""
    state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dioptase-bench-")))
    files = KnobWriter(hierarchy)
    stack.callback(files.close)
    originals = open_originals(state, "bench")
    stack.callback(originals.close)
    return state, Actuator(files, originals, ActMode.ON)


def _check_snapshot(snapshot: Snapshot) -> None:
    failed = [f"{source.name}: {source.error}" for source in snapshot.sources if not source.ok]
    if failed:
        raise RuntimeError(f"a cycle failed, so its cost is not valid: {'; '.join(failed)}")


def measure_apply(hierarchy: Hierarchy, count: int, rounds: int) -> Iterator[ApplyCost]:
    """Measure `Actuator.apply` on real cgroups: every value changes in every repetition, or none does."""
    cpus = len(os.sched_getaffinity(0))
    knobs: Sequence[tuple[str, Knob, Callable[[int], str]]] = (
        ("a new quota for each", Knob.QUOTA, lambda turn: f"{20_000 + 10 * turn} 100000"),
        ("a lower quota for each", Knob.QUOTA, lambda turn: f"{20_000 - 10 * turn} 100000"),
        ("the same quotas as before", Knob.QUOTA, lambda _turn: "30000 100000"),
        ("other CPUs for each", Knob.CPUSET, lambda turn: str(turn % cpus)),
        ("cpu.idle on and off for each", Knob.IDLE, lambda turn: str(turn % 2)),
    )
    why = Reason(rule="bench", text="benchmark")
    with ExitStack() as stack:
        parent = f"/dioptase-bench-{os.getpid()}"
        paths = stack.enter_context(real_cgroups(hierarchy, parent, count))
        _, actuator = _open_actuator(hierarchy, stack)
        ids = [(hierarchy.primary / path.lstrip("/")).stat().st_ino for path in paths]
        stack.enter_context(_quiet_collector())
        for what, knob, value in knobs:
            took = []
            for turn in range(rounds + 1):
                decisions = [
                    Decision(cgroup=path, cgroup_id=number, pod="bench/bench", knob=knob, value=value(turn), reason=why)
                    for path, number in zip(paths, ids, strict=True)
                ]
                began = time.perf_counter_ns()
                outcomes = actuator.apply(decisions, time.monotonic_ns())
                took.append((time.perf_counter_ns() - began) / 1e6)
                refused = [
                    outcome.error
                    for outcome in outcomes
                    if outcome.status not in (OutcomeStatus.APPLIED, OutcomeStatus.UNCHANGED)
                ]
                if refused:
                    raise RuntimeError(f"{what}: {refused[0]}")
            # The first repetition journals the originals.
            yield ApplyCost(what=what, knobs=count, spread=LatencySpread.of(took[1:]))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser("cycle_cost", __doc__)
    parser.add_argument("--rounds", type=int, default=60, help="counted for each node and policy")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="only this one; may be repeated")
    parser.add_argument("--pods", type=int, action="append", help="only the node with so many pods; may be repeated")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the table; a missed goal does not fail the benchmark."""
    end_cleanly_on_sigterm()
    args = parse(argv)
    rows = []
    for pods, cpus, numa, goal_ms in NODES:
        for policy in args.policy or POLICIES:
            if args.pods is None or pods in args.pods:
                rows.append(measure_cycles(pods, cpus, numa, goal_ms, policy, args.rounds))
                last = rows[-1]
                print(
                    f"{last.reason} {pods} pods, {cpus} CPUs, {numa} NUMA nodes, {policy}: {last.total.median:.1f} ms, p99"
                    f" {last.total.p99:.1f} of {goal_ms:g} (CPU {last.cpu.median:.1f}, {last.cpu.p99:.1f})",
                    flush=True,
                )
    hierarchy = detect_hierarchy()
    applied: tuple[ApplyCost, ...] = ()
    try:
        applied = tuple(measure_apply(hierarchy, 200, args.rounds))
    except OSError as error:
        print(f"bench: cgroups cannot be created here, `apply` alone is left out: {error}", file=sys.stderr)
    results = CycleCostResults(machine=this_machine(hierarchy.mode), rows=tuple(rows), applied=applied)
    write_results(args.out, "cycle_cost", markdown(results), results)
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
import agent.qrm.decisions.compose
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
from api.measurements import RunqLatency
from api.qos import Enhancements, QoSLevel
from api.snapshot import Snapshot
from bench.cycle_cost_report import SCALING_STAGES, ApplyCost, CycleCostResults, CycleCostRow, LatencySpread, markdown
from bench.machine import end_cleanly_on_sigterm, this_machine

KINDS = ("ramp", "bursty", "ramp", "step")
USUAL_POD_SHARE = 60
"""So many times faster than in the world, so that a minute of rounds sees bursts come and go."""
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
"""Version 2's files with the kernel's defaults."""


def simulated_plan(cpus: int, numa: int, pods: int) -> SimulationPlan:
    """Half online, half batch. Of the online pods some have pools of their own and some CPUs of their own; their peaks
    together are four fifths of the node."""
    machine = build_topology(cpus, numa)
    online = pods // 2
    peak = 0.8 * cpus / online
    services = [_online(number, peak) for number in range(online)]
    jobs = [build_batch_job(f"batch{number}", cpus / (pods - online), parent=PARENT) for number in range(pods - online)]
    return SimulationPlan(topology=machine, memory_bytes=cpus << 32, services=(*services, *jobs))


def _online(number: int, peak_cores: float) -> SimulatedService:
    kind, seed = KINDS[number % len(KINDS)], 1
    made = build_service(f"web{number}", kind, peak_cores, seed=seed, parent=PARENT)
    usual = build_load(kind, seed)
    pod = made.pod
    if number % DEDICATED_EVERY_N_PODS == DEDICATED_EVERY_N_PODS - 1:
        one_cpu = replace(pod.containers[0], cpu_request_cores=1.0)
        pod = replace(pod, qos=QoSLevel.DEDICATED, containers=(one_cpu,))
    elif number % NAMED_POOL_EVERY_N_PODS == NAMED_POOL_EVERY_N_PODS - 1:
        pod = replace(pod, enhancements=Enhancements(cpuset_pool=f"pool{number // NAMED_POOL_EVERY_N_PODS % 3}"))
    return replace(made, pod=pod, load=lambda at_s: usual(at_s * USUAL_POD_SHARE))


@contextmanager
def plain_cgroup_tree(made: SimulationPlan) -> Iterator[Hierarchy]:
    """A version 2 tree of ordinary files in memory: this machine need not have those CPUs."""
    root = Path(tempfile.mkdtemp(prefix="dioptase-bench-", dir="/dev/shm"))
    try:
        everything = {
            "cpuset.cpus.effective": f"{format_cpu_list(made.topology.ids)}\n",
            "cpuset.mems.effective": f"{format_cpu_list(made.topology.numa_nodes)}\n",
        }
        for path in ("", PARENT, *(service.cgroup for service in made.services)):
            directory = root / path.lstrip("/")
            directory.mkdir(exist_ok=True)
            for name, text in {**_PLAIN_FILES, **everything}.items():
                (directory / name).write_text(text)
        yield Hierarchy(v1={}, v2=root)
    finally:
        shutil.rmtree(root)


@contextmanager
def real_cgroups(hierarchy: Hierarchy, parent: str, count: int) -> Iterator[Sequence[str]]:
    """So many cgroups without tasks, side by side, in every hierarchy that has knobs. Raises OSError."""
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


RESULTS = Path(__file__).parent / "results"
NS_PER_S = 1_000_000_000
NODES = ((200, 64, 2, 20.0), (500, 256, 8, 100.0))
"""Pods, CPUs, NUMA nodes, and the goal in milliseconds."""
POLICIES = ("latency", SCALING_STAGES, "canonical")
INITIAL_RECLAIMED_CORES = 0.1
"""Part of the node that is lent when growth begins."""
COLLECTIONS = (10_000, 10, 10)
"""As the agent has it (agent/__main__.py)."""
STAGES: Mapping[str, tuple[object, str]] = {
    "advise": (agent.advisor.engine, "advise_cpu"),
    "place": (agent.advisor.engine, "allocate_cpusets"),
    "memory": (agent.advisor.engine, "advise_memory"),
    "other knobs": (agent.advisor.engine, "build_knob_requests"),
    "decide": (agent.qrm.decisions.compose.PolicyResult, "decisions"),
    "which knobs": (Actuator, "knobs"),
    "apply": (Actuator, "apply"),
    "release": (Actuator, "release"),
    "checkpoint": (CpusetCheckpoint, "save"),
}
"""By what it is called here: the functions that a round goes through, none inside another. The rest of a round is `rest`."""


class Stopwatch:
    """Adds up what each stage takes, in nanoseconds."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within it, every stage is timed."""
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
    """A sensor of a node that is only computed. The time is the node's."""

    def __init__(self, simulation: Simulation, ids: Mapping[str, int]) -> None:
        self._simulation, self._ids = simulation, ids
        self._next = simulation.step(1.0)

    @property
    def now_ns(self) -> int:
        return self._next.taken_at_ns

    def advance(self) -> None:
        """Let a second pass."""
        found = self._simulation.step(1.0)
        cgroups = {
            path: msgspec.structs.replace(sample, id=self._ids[path]) if path in self._ids else sample
            for path, sample in found.cgroups.items()
        }
        self._next = msgspec.structs.replace(found, cgroups=cgroups)

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
    """Rounds a second of the node's time apart; the first ones, in which everything is written, are not counted."""
    made = simulated_plan(cpus, numa, pods)
    advisor: dict[str, Any] = {"policy": policy}
    settling = max(rounds // 5, 2)
    watch, whole, cpu, written = Stopwatch(), list[float](), list[float](), list[float]()
    stages: dict[str, list[float]] = {name: [] for name in STAGES}
    with ExitStack() as stack:
        if policy == SCALING_STAGES:
            pace = (1 - INITIAL_RECLAIMED_CORES) / (rounds + settling)
            advisor = {"policy": "latency", "latency": {"growRatioPerS": pace}}
            stack.enter_context(
                patch.object(Actuator, "previous_quota_cores", lambda *_: INITIAL_RECLAIMED_CORES * cpus)
            )
        config = msgspec.convert({"advisor": advisor}, AgentConfig)
        hierarchy = stack.enter_context(plain_cgroup_tree(made))
        simulation = Simulation(made)
        root = hierarchy.primary
        sensor = SimulatedSensor(
            simulation, {s.cgroup: (root / s.cgroup.lstrip("/")).stat().st_ino for s in made.services}
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
                whole.append(took_ns / 1e6)
                cpu.append(busy_ns / 1e6)
                written.append(sum(outcome.status is OutcomeStatus.APPLIED for outcome in finished.outcomes))
                for name, spent in stages.items():
                    spent.append(watch.spent.get(name, 0) / 1e6)
    rest = [total - sum(spent[i] for spent in stages.values()) for i, total in enumerate(whole)]
    return CycleCostRow(
        pods=pods,
        cpus=cpus,
        numa=numa,
        policy=policy,
        goal_ms=goal_ms,
        rounds=rounds,
        whole=LatencySpread.of(whole),
        cpu=LatencySpread.of(cpu),
        stages={name: LatencySpread.of(spent) for name, spent in {**stages, "rest": rest}.items()},
        written=LatencySpread.of(written),
    )


def _acting_agent(config: AgentConfig, sensor: SimulatedSensor, hierarchy: Hierarchy, stack: ExitStack) -> Loop:
    """An agent that acts, until the stack is left; for it the time is the node's."""
    state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dioptase-bench-")))
    files = KnobWriter(hierarchy)
    stack.callback(files.close)
    originals = open_originals(state, "bench")
    stack.callback(originals.close)
    clock = SimpleNamespace(monotonic_ns=lambda: sensor.now_ns, time_ns=lambda: sensor.now_ns, monotonic=time.monotonic)
    stack.enter_context(patch.object(agent.loop, "time", clock))
    sensed: Any = sensor
    return Loop(
        config=config,
        sensor=sensed,
        actuator=Actuator(files, originals, ActMode.ON),
        sinks=(),
        checkpoint=CpusetCheckpoint(state, "bench"),
    )


def _check_snapshot(snapshot: Snapshot) -> None:
    failed = [f"{source.name}: {source.error}" for source in snapshot.sources if not source.ok]
    if failed:
        raise RuntimeError(f"a round failed, so its cost means nothing: {'; '.join(failed)}")


def measure_apply(hierarchy: Hierarchy, count: int, rounds: int) -> Iterator[ApplyCost]:
    """`Actuator.apply` on cgroups of this machine's kernel: every value changes in every round, or none does."""
    cpus = len(os.sched_getaffinity(0))
    wanted: Sequence[tuple[str, Knob, Callable[[int], str]]] = (
        ("a new quota for each", Knob.QUOTA, lambda turn: f"{20_000 + 10 * turn} 100000"),
        ("a lower quota for each", Knob.QUOTA, lambda turn: f"{20_000 - 10 * turn} 100000"),
        ("the same quotas as before", Knob.QUOTA, lambda _turn: "30000 100000"),
        ("other CPUs for each", Knob.CPUSET, lambda turn: str(turn % cpus)),
        ("cpu.idle on and off for each", Knob.IDLE, lambda turn: str(turn % 2)),
    )
    why = Reason(rule="bench", text="for measuring")
    with ExitStack() as stack:
        parent = f"/dioptase-bench-{os.getpid()}"
        paths = stack.enter_context(real_cgroups(hierarchy, parent, count))
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dioptase-bench-")))
        files = KnobWriter(hierarchy)
        stack.callback(files.close)
        originals = open_originals(state, "bench")
        stack.callback(originals.close)
        actuator = Actuator(files, originals, ActMode.ON)
        ids = [(hierarchy.primary / path.lstrip("/")).stat().st_ino for path in paths]
        stack.enter_context(_quiet_collector())
        for what, knob, value in wanted:
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
            # In the first one originals are journalled.
            yield ApplyCost(what=what, knobs=count, spread=LatencySpread.of(took[1:]))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.cycle_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="counted for each node and policy")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="only this one; may be repeated")
    parser.add_argument("--pods", type=int, action="append", help="only the node with so many pods; may be repeated")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for cycle_cost.json and cycle_cost.md")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the table; goals that are missed are said so, and are no failure of the bench."""
    end_cleanly_on_sigterm()
    args = parse(argv)
    rows = []
    for pods, cpus, numa, goal_ms in NODES:
        for policy in args.policy or POLICIES:
            if args.pods is None or pods in args.pods:
                rows.append(measure_cycles(pods, cpus, numa, goal_ms, policy, args.rounds))
                last = rows[-1]
                print(
                    f"{last.reason} {pods} pods, {cpus} CPUs, {numa} NUMA nodes, {policy}: {last.whole.median:.1f} ms, p99"
                    f" {last.whole.p99:.1f} of {goal_ms:g} (CPU {last.cpu.median:.1f}, {last.cpu.p99:.1f})",
                    flush=True,
                )
    hierarchy = detect_hierarchy()
    applied: tuple[ApplyCost, ...] = ()
    try:
        applied = tuple(measure_apply(hierarchy, 200, args.rounds))
    except OSError as error:
        print(f"bench: cgroups cannot be made here, so apply alone is left out: {error}", file=sys.stderr)
    results = CycleCostResults(machine=this_machine(hierarchy.mode), rows=tuple(rows), applied=applied)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "cycle_cost.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    (args.out / "cycle_cost.md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

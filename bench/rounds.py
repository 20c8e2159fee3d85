"""What one whole round costs beside sensing and showing: judging, deciding, writing; by stage, on large nodes.

The rounds are the agent's own (`Loop.turn`) on nodes that are only computed (agent/simulation), whose cgroups are ordinary
files in memory, so that 256 CPUs can be had; time goes as fast as the rounds do. What a policy decides is felt in the next
round, and loads come and go, so knobs really change. How long the kernel takes over writes is measured apart, with real
cgroups on this machine.
"""

from __future__ import annotations

import argparse
import gc
import os
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

import agent.loop
import agent.policy
from agent.config import Config
from agent.hierarchy import Hierarchy, detect
from agent.loop import Loop
from agent.qrm.actuator import Actuator
from agent.qrm.checkpoint import Checkpoint
from agent.qrm.knobs import KnobFiles
from agent.qrm.originals import open_originals
from agent.simulation.model import Simulation
from api.decisions import Act, Decision, Status
from api.facts import Wait
from api.knobs import Knob, Verdict
from api.samples import Snapshot
from bench.machine import end_cleanly_on_sigterm, this_machine
from bench.rounds_node import plain_tree, plan, real_cgroups
from bench.rounds_report import GROWING, Applied, Results, Row, Spread, markdown

RESULTS = Path(__file__).parent / "results"
NS_PER_S = 1_000_000_000
NODES = ((200, 64, 2, 20.0), (500, 256, 8, 100.0))
"""Pods, CPUs, NUMA nodes, and the goal in milliseconds."""
POLICIES = ("latency", GROWING, "canonical")
FIRST_LENT = 0.1
"""Part of the node that is lent when growth begins."""
COLLECTIONS = (10_000, 10, 10)
"""As the agent has it (agent/__main__.py)."""
STAGES: Mapping[str, tuple[object, str]] = {
    "advise": (agent.policy, "advise"),
    "place": (agent.policy, "place"),
    "memory": (agent.policy, "advise_memory"),
    "other knobs": (agent.policy, "ask"),
    "decide": (agent.policy.Judged, "decisions"),
    "which knobs": (Actuator, "knobs"),
    "apply": (Actuator, "apply"),
    "release": (Actuator, "release"),
    "checkpoint": (Checkpoint, "save"),
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


class Computed:
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

    def read_waits(self, _ids: Sequence[int]) -> Mapping[int, Wait]:
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


def measure(pods: int, cpus: int, numa: int, goal_ms: float, policy: str, rounds: int) -> Row:
    """Rounds a second of the node's time apart; the first ones, in which everything is written, are not counted."""
    made = plan(cpus, numa, pods)
    advisor: dict[str, Any] = {"policy": policy}
    settling = max(rounds // 5, 2)
    watch, whole, cpu, written = Stopwatch(), list[float](), list[float](), list[float]()
    stages: dict[str, list[float]] = {name: [] for name in STAGES}
    with ExitStack() as stack:
        if policy == GROWING:
            pace = (1 - FIRST_LENT) / (rounds + settling)
            advisor = {"policy": "latency", "latency": {"growRatioPerS": pace}}
            stack.enter_context(patch.object(Actuator, "inherited_cores", lambda *_: FIRST_LENT * cpus))
        config = msgspec.convert({"advisor": advisor}, Config)
        hierarchy = stack.enter_context(plain_tree(made))
        simulation = Simulation(made)
        root = hierarchy.primary
        sensor = Computed(simulation, {s.cgroup: (root / s.cgroup.lstrip("/")).stat().st_ino for s in made.services})
        loop = _agent(config, sensor, hierarchy, stack)
        stack.enter_context(watch.attached())
        stack.enter_context(_quiet_collector())
        for number in range(settling + rounds):
            sensor.advance()
            watch.spent.clear()
            began, busy = time.perf_counter_ns(), time.thread_time_ns()
            finished = loop.turn("tick")
            took_ns, busy_ns = time.perf_counter_ns() - began, time.thread_time_ns() - busy
            _check(finished.snapshot)
            simulation.apply([outcome.decision for outcome in finished.outcomes])
            if number >= settling:
                whole.append(took_ns / 1e6)
                cpu.append(busy_ns / 1e6)
                written.append(sum(outcome.status is Status.APPLIED for outcome in finished.outcomes))
                for name, spent in stages.items():
                    spent.append(watch.spent.get(name, 0) / 1e6)
    rest = [total - sum(spent[i] for spent in stages.values()) for i, total in enumerate(whole)]
    return Row(
        pods=pods,
        cpus=cpus,
        numa=numa,
        policy=policy,
        goal_ms=goal_ms,
        rounds=rounds,
        whole=Spread.of(whole),
        cpu=Spread.of(cpu),
        stages={name: Spread.of(spent) for name, spent in {**stages, "rest": rest}.items()},
        written=Spread.of(written),
    )


def _agent(config: Config, sensor: Computed, hierarchy: Hierarchy, stack: ExitStack) -> Loop:
    """An agent that acts, until the stack is left; for it the time is the node's."""
    state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dioptase-bench-")))
    files = KnobFiles(hierarchy)
    stack.callback(files.close)
    originals = open_originals(state, "bench")
    stack.callback(originals.close)
    clock = SimpleNamespace(monotonic_ns=lambda: sensor.now_ns, time_ns=lambda: sensor.now_ns, monotonic=time.monotonic)
    stack.enter_context(patch.object(agent.loop, "time", clock))
    sensed: Any = sensor
    return Loop(
        config=config,
        sensor=sensed,
        actuator=Actuator(files, originals, Act.ON),
        sinks=(),
        checkpoint=Checkpoint(state, "bench"),
    )


def _check(snapshot: Snapshot) -> None:
    failed = [f"{source.name}: {source.error}" for source in snapshot.sources if not source.ok]
    if failed:
        raise RuntimeError(f"a round failed, so its cost means nothing: {'; '.join(failed)}")


def measure_apply(hierarchy: Hierarchy, count: int, rounds: int) -> Iterator[Applied]:
    """`Actuator.apply` on cgroups of this machine's kernel: every value changes in every round, or none does."""
    cpus = len(os.sched_getaffinity(0))
    wanted: Sequence[tuple[str, Knob, Callable[[int], str]]] = (
        ("a new quota for each", Knob.QUOTA, lambda turn: f"{20_000 + 10 * turn} 100000"),
        ("a lower quota for each", Knob.QUOTA, lambda turn: f"{20_000 - 10 * turn} 100000"),
        ("the same quotas as before", Knob.QUOTA, lambda _turn: "30000 100000"),
        ("other CPUs for each", Knob.CPUSET, lambda turn: str(turn % cpus)),
        ("cpu.idle on and off for each", Knob.IDLE, lambda turn: str(turn % 2)),
    )
    why = Verdict(rule="bench", text="for measuring")
    with ExitStack() as stack:
        parent = f"/dioptase-bench-{os.getpid()}"
        paths = stack.enter_context(real_cgroups(hierarchy, parent, count))
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dioptase-bench-")))
        files = KnobFiles(hierarchy)
        stack.callback(files.close)
        originals = open_originals(state, "bench")
        stack.callback(originals.close)
        actuator = Actuator(files, originals, Act.ON)
        ids = [(hierarchy.primary / path.lstrip("/")).stat().st_ino for path in paths]
        stack.enter_context(_quiet_collector())
        for what, knob, value in wanted:
            took = []
            for turn in range(rounds + 1):
                decisions = [
                    Decision(
                        cgroup=path, cgroup_id=number, pod="bench/bench", knob=knob, value=value(turn), verdict=why
                    )
                    for path, number in zip(paths, ids, strict=True)
                ]
                began = time.perf_counter_ns()
                outcomes = actuator.apply(decisions, time.monotonic_ns())
                took.append((time.perf_counter_ns() - began) / 1e6)
                refused = [
                    outcome.error for outcome in outcomes if outcome.status not in (Status.APPLIED, Status.UNCHANGED)
                ]
                if refused:
                    raise RuntimeError(f"{what}: {refused[0]}")
            # In the first one originals are journalled.
            yield Applied(what=what, knobs=count, spread=Spread.of(took[1:]))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.rounds", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="counted for each node and policy")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="only this one; may be repeated")
    parser.add_argument("--pods", type=int, action="append", help="only the node with so many pods; may be repeated")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for rounds.json and rounds.md")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the table; goals that are missed are said so, and are no failure of the bench."""
    end_cleanly_on_sigterm()
    args = parse(argv)
    rows = []
    for pods, cpus, numa, goal_ms in NODES:
        for policy in args.policy or POLICIES:
            if args.pods is None or pods in args.pods:
                rows.append(measure(pods, cpus, numa, goal_ms, policy, args.rounds))
                last = rows[-1]
                print(
                    f"{last.verdict} {pods} pods, {cpus} CPUs, {numa} NUMA nodes, {policy}: {last.whole.median:.1f} ms, p99"
                    f" {last.whole.p99:.1f} of {goal_ms:g} (CPU {last.cpu.median:.1f}, {last.cpu.p99:.1f})",
                    flush=True,
                )
    hierarchy = detect()
    applied: tuple[Applied, ...] = ()
    try:
        applied = tuple(measure_apply(hierarchy, 200, args.rounds))
    except OSError as error:
        print(f"bench: cgroups cannot be made here, so apply alone is left out: {error}", file=sys.stderr)
    results = Results(machine=this_machine(hierarchy.mode), rows=tuple(rows), applied=applied)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rounds.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    (args.out / "rounds.md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

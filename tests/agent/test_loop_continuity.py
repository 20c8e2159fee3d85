"""Assignments and limits survive a restart, CPUs that go offline and return, and cycles that miss measurements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

import agent.loop
from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from agent.loop import Loop
from agent.offline.simulation.simulator import Simulation
from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.checkpoint import CpusetCheckpoint
from agent.qrm.actuator.state_dir import open_originals
from agent.qrm.actuator.writer import KnobWriter
from api.cpu import parse_cpu_list
from api.decision import ActMode, Cycle, OutcomeStatus
from api.knobs import Knob
from api.qos import QoSLevel
from api.snapshot import Snapshot
from bench.cycle_cost import SimulatedSensor, plain_cgroup_tree, simulated_plan
from tests.agent.advisor.memory.builders import group, root, situation
from tests.agent.advisor.memory.builders import pod as memory_pod
from tests.agent.qrm.actuator.trees import Tree


class Node:
    """48 CPUs on two NUMA nodes, twelve pods, and the agents that start and end there; each cycle is a second later."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        plan = simulated_plan(48, 2, 12)
        self._hierarchy = stack.enter_context(plain_cgroup_tree(plan))
        self._simulation, self._state = Simulation(plan), root
        ids = {s.cgroup: (self._hierarchy.primary / s.cgroup[1:]).stat().st_ino for s in plan.services}
        self.computed = SimulatedSensor(self._simulation, ids)
        self.cpus = plan.topology.ids
        self._stack = stack
        self._agent: ExitStack | None = None
        self.start()

    def start(self) -> None:
        """Starts an agent; the one before it was killed."""
        if self._agent is not None:
            self._agent.close()
        self._agent = self._stack.enter_context(ExitStack())
        files, originals = KnobWriter(self._hierarchy), open_originals(self._state, "boot")
        self._agent.callback(files.close)
        self._agent.callback(originals.close)
        sensor: Any = self
        self._loop = Loop(
            config=AgentConfig(advisor=AdvisorConfig(policy="canonical")),
            sensor=sensor,
            actuator=Actuator(files, originals, ActMode.ON),
            sinks=(),
            checkpoint=CpusetCheckpoint(self._state, "boot"),
        )

    def snapshot(self, seq: int, now_ns: int, wall_ns: int) -> Snapshot:
        actual = self.computed.snapshot(seq, now_ns, wall_ns)
        there = tuple(cpu for cpu in actual.topology.cpus if cpu.id in self.cpus)
        return msgspec.structs.replace(actual, topology=msgspec.structs.replace(actual.topology, cpus=there))

    def round(self) -> Cycle:
        self.computed.advance()
        finished = self._loop.run_cycle("tick")
        assert all(source.ok for source in finished.snapshot.sources)
        self._simulation.apply([outcome.decision for outcome in finished.outcomes])
        return finished


@contextmanager
def _node(root: Path) -> Iterator[Node]:
    with ExitStack() as stack:
        node = SimpleNamespace(computed=None)
        clock = SimpleNamespace(monotonic_ns=lambda: node.computed.now_ns, time_ns=lambda: node.computed.now_ns)
        clock.monotonic = lambda: 0.0
        # Before the first cycle the loop reads the time once, to load the state.
        node.computed = SimpleNamespace(now_ns=0)
        stack.enter_context(patch.object(agent.loop, "time", clock))
        started = Node(root, stack)
        node.computed = started.computed
        yield started


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with _node(tmp_path / "state") as started:
        yield started


def pools(finished: Cycle) -> dict[str, tuple[int, ...]]:
    assert finished.advice is not None
    return {pool.name: pool.cpus for pool in finished.advice.pools}


def test_a_restart_moves_no_pod_although_nothing_is_measured_yet(node: Node) -> None:
    for _ in range(70):
        last = node.round()
    before = pools(last)
    requested = sum(
        container.cpu_request_cores or 0.0
        for pod in last.snapshot.pods
        if pod.qos.online
        for container in pod.containers
    )
    assert requested == pytest.approx(38.4)
    assert len(before["reclaim"]) > 48 - requested, "measured use allows more reclaimable CPUs than requests would"
    node.start()
    again = [node.round() for _ in range(3)]
    assert [pools(finished) for finished in again] == [before] * 3
    assert not [o for finished in again for o in finished.outcomes if o.status is OutcomeStatus.APPLIED]
    assert again[0].advice is not None
    assert "until something is measured" in again[0].advice.reason.text


def test_cpus_that_go_offline_leave_all_pools_and_return(node: Node) -> None:
    for _ in range(3):
        node.round()
    everything, node.cpus = node.cpus, tuple(range(0, 48, 2))
    fewer = node.round()
    actual = pools(fewer)
    assert {cpu for cpus in actual.values() for cpu in cpus} == set(node.cpus)
    assert sum(map(len, actual.values())) == len(node.cpus), "no CPU is in two pools"
    assert len(actual["reclaim"]) >= 4, "the minimum of reclaimed pods"
    lists = [o.decision.value for o in fewer.outcomes if o.decision.knob is Knob.CPUSET]
    assert lists
    assert all(parse_cpu_list(text) and set(parse_cpu_list(text)) <= set(node.cpus) for text in lists)
    node.cpus = everything
    assert {cpu for cpus in pools(node.round()).values() for cpu in cpus} == set(everything)


ROOT = "/kubepods/besteffort"


@pytest.mark.parametrize("mode", ["v1", "v2"])
@pytest.mark.parametrize("blind", [("/", ROOT, f"{ROOT}/b"), (ROOT,)])
def test_a_cgroup_that_one_cycle_misses_keeps_its_limits(tmp_path: Path, mode: str, blind: tuple[str, ...]) -> None:
    """The limit is 20 GiB free less a reserve of 4, and 10 in use; an online pod there restores the original at once."""
    tree = Tree(tmp_path / "cgroup", mode)
    ids = {path: tree.make(path) for path in ("/kubepods", ROOT, f"{ROOT}/b")}
    of = situation(
        [memory_pod("b", QoSLevel.RECLAIMED)],
        [root(on_numa={0: (10, 0)}), group(f"{ROOT}/b", on_numa={0: (10, 0)})],
        free=20, cpus=2,
    )  # fmt: skip
    cgroups = {path: msgspec.structs.replace(item, id=ids.get(path, 1)) for path, item in of.snapshot.cgroups.items()}
    complete = msgspec.structs.replace(of.snapshot, cgroups=cgroups)
    fewer = {path: item for path, item in complete.cgroups.items() if path not in blind}
    moved_in = msgspec.structs.replace(memory_pod("b", QoSLevel.SHARED), containers=complete.pods[0].containers)
    shots = [
        complete,
        msgspec.structs.replace(complete, cgroups=fewer),
        complete,
        msgspec.structs.replace(complete, pods=(moved_in,)),
    ]
    sensor: Any = SimpleNamespace(snapshot=lambda seq, *_: msgspec.structs.replace(shots[seq - 1], seq=seq))
    files, originals = KnobWriter(tree.hierarchy), open_originals(tmp_path / "state", "boot")
    config = msgspec.convert({"memory": {"reclaimRoot": ROOT}}, AgentConfig)
    loop, actual = Loop(config=config, sensor=sensor, actuator=Actuator(files, originals, ActMode.ON), sinks=()), []
    for _ in shots:
        loop.run_cycle("tick")
        actual.append(files.read(ROOT, ids[ROOT], Knob.MEMORY_MAX))
    files.close()
    originals.close()
    limit = str(26 << 30)
    assert actual == [limit, limit, limit, "max"]

"""The agent follows a node's pods with the CPU priority of pods and QoS classes, and leaves the kubelet's values behind."""

from __future__ import annotations

from collections.abc import Iterator
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
from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.state_dir import open_originals
from agent.qrm.actuator.writer import KnobWriter
from api.decision import ActMode, Cycle
from api.knobs import Knob
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import CgroupSample, KubeletManagers, Machine, Snapshot
from tests.agent.qrm.actuator.trees import Tree
from tests.builders.pods import reclaimed, shared
from tests.builders.snapshots import snapshot

KUBEPODS = "/kubepods.slice"
BURSTABLE, BEST_EFFORT = f"{KUBEPODS}/kubepods-burstable.slice", f"{KUBEPODS}/kubepods-besteffort.slice"
POD, OTHER_POD = (f"{BEST_EFFORT}/kubepods-besteffort-pod{uid}.slice" for uid in ("b", "other"))
BATCH = reclaimed("batch", uid="b", cgroup=f"{POD}/c")
WEB = shared("web", uid="w", cgroup=f"{BURSTABLE}/kubepods-burstable-podw.slice/c")
CANONICAL = AgentConfig(advisor=AdvisorConfig(policy="canonical"))
NOT_RECLAIMED = msgspec.structs.replace(BATCH, qos=QoSLevel.SHARED)


class Node:
    """A kubelet's cgroups of version 2 in ordinary files, and the agents that start and end there."""

    config = AgentConfig()
    managers: KubeletManagers | None = None
    machine = Machine(cgroup_version="v2", systemd_version=252)

    def __init__(self, root: Path) -> None:
        self._tree, self._state, self._second = Tree(root / "cgroup", "v2"), root / "state", 0
        self._ids = {
            path: self._tree.make(path, {"cpu.weight": weight})
            for path, weight in (
                (KUBEPODS, "79"), (BURSTABLE, "20"), (BEST_EFFORT, "1"), (POD, "1"), (f"{POD}/c", "1"),
                (WEB.containers[0].cgroup.rpartition("/")[0], "20"), (WEB.containers[0].cgroup, "20"),
                (OTHER_POD, "1"), (f"{OTHER_POD}/pause", "1"),
            )
        }  # fmt: skip
        self.before = self.texts()
        self.start()

    def start(self) -> None:
        """Start an agent; the one before it was killed."""
        self._files, self.originals = KnobWriter(self._tree.hierarchy), open_originals(self._state, "boot")
        sensor: Any = self
        actuator = Actuator(self._files, self.originals, ActMode.ON)
        self._loop = Loop(config=self.config, sensor=sensor, actuator=actuator, sinks=())

    def kill(self) -> None:
        """End the agent without restoring anything."""
        self.originals.close()
        self._files.close()

    def snapshot(self, seq: int, taken_at_ns: int, _wall_ns: int) -> Snapshot:
        observed = snapshot(self._second, self._pods, machine=4)
        cgroups = {
            path: CgroupSample(path=path, id=number, threads=2)
            for path, number in self._ids.items()
            if self._other_tasks or not path.startswith(OTHER_POD)
        }
        node = msgspec.structs.replace(observed.node, machine=self.machine, kubelet=self.managers)
        return msgspec.structs.replace(observed, seq=seq, taken_at_ns=taken_at_ns, cgroups=cgroups, node=node)

    def run(self, *pods: Pod, other_tasks: bool = False) -> Cycle:
        """Run a cycle, one second after the previous one; `other_tasks` run in the class below no listed pod."""
        self._pods, self._other_tasks = pods, other_tasks
        self._second += 1
        clock = SimpleNamespace(
            monotonic_ns=lambda: self._second * 10**9,
            time_ns=lambda: self._second * 10**9,
            monotonic=lambda: self._second,
        )
        with patch.object(agent.loop, "time", clock):
            return self._loop.run_cycle("tick")

    def clear_as_the_kubelet_does(self) -> None:
        """Systemd clears cpu.idle of the class before it writes the kubelet's weight."""
        self._tree.file(BEST_EFFORT, "cpu.idle").write_text("0\n")
        self._tree.file(BEST_EFFORT, "cpu.weight").write_text("1\n")

    @property
    def idle(self) -> dict[str, str]:
        """`cpu.idle` of the pod and its class."""
        return {path: self._tree.file(path, "cpu.idle").read_text().strip() for path in (POD, BEST_EFFORT)}

    def texts(self) -> list[str]:
        return [
            self._tree.file(path, name).read_text()
            for path in (KUBEPODS, BURSTABLE, BEST_EFFORT, POD, f"{POD}/c")
            for name in ("cpu.idle", "cpu.weight")
        ]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    started = Node(tmp_path)
    yield started
    started.kill()


def failed(cycle: Cycle) -> list[str]:
    return [f"{source.name}: {source.error}" for source in cycle.snapshot.sources if not source.ok]


def test_a_static_cpu_manager_leaves_priority_to_separate_the_pods_and_its_gap_is_reported(node: Node) -> None:
    """Policy canonical separates pods by cpusets, which the static manager owns."""
    node.kill()
    node.config, node.managers = CANONICAL, KubeletManagers(cpu="static", memory="none")
    node.machine = Machine(cgroup_version="v2", systemd_version=249)
    node.start()
    (problem,) = [text for text in failed(node.run(BATCH, WEB)) if text.startswith("pod-siblings")]
    assert "with systemd 249 a kubelet would not restart while the class is idle" in problem
    assert node.idle == {POD: "1", BEST_EFFORT: "0"}


def test_a_pod_that_is_not_reclaimed_ends_the_priority_of_the_class_in_the_same_cycle(node: Node) -> None:
    assert failed(node.run(BATCH, WEB)) == []
    assert node.idle == {POD: "1", BEST_EFFORT: "1"}
    node.run(BATCH, WEB, other_tasks=True)
    assert node.idle == {POD: "1", BEST_EFFORT: "0"}
    node.run(BATCH, WEB)
    assert node.idle == {POD: "1", BEST_EFFORT: "1"}
    node.run(NOT_RECLAIMED, WEB)
    assert node.texts() == node.before
    assert node.originals.entries() == ()


def test_a_gap_is_no_failure_while_a_pod_starts_and_one_after_half_a_minute(node: Node) -> None:
    """The sandbox of a new pod runs before the kubelet lists the pod: then nothing is wrong that a person could fix."""
    assert failed(node.run(BATCH, WEB)) == []
    for _ in range(2):
        assert [failed(node.run(BATCH, WEB, other_tasks=True)) for _ in range(30)] == [[]] * 30
        assert failed(node.run(BATCH, WEB)) == [], "the kubelet has listed the pod"
    cycles = [node.run(BATCH, WEB, other_tasks=True) for _ in range(31)]
    assert [failed(cycle) for cycle in cycles[:30]] == [[]] * 30
    (problem,) = failed(cycles[30])
    assert "pod-siblings: reclaimed pods do not yield to default/web" in problem
    assert "it contains tasks of a pod that is not listed" in problem


def test_what_the_kubelet_clears_is_written_again_in_the_next_cycle(node: Node) -> None:
    node.run(BATCH, WEB)
    for _ in range(8):
        node.clear_as_the_kubelet_does()
        (repaired,) = [o for o in node.run(BATCH, WEB).outcomes if o.decision.cgroup == BEST_EFFORT]
        assert (repaired.repaired, repaired.decision.knob) == (True, Knob.IDLE)
        assert node.idle == {POD: "1", BEST_EFFORT: "1"}


def test_a_killed_agent_s_successor_restores_the_kubelet_s_values(node: Node) -> None:
    node.run(BATCH, WEB)
    node.kill()
    node.clear_as_the_kubelet_does()
    node.start()
    node.run(BATCH, WEB)
    assert node.idle == {POD: "1", BEST_EFFORT: "1"}
    node.kill()
    node.start()
    node.run(WEB)
    assert node.texts() == node.before


def test_a_container_that_restarts_keeps_the_priority_of_its_pod(node: Node) -> None:
    node.run(BATCH, WEB)
    waiting = msgspec.structs.replace(BATCH, containers=(), waiting=BATCH.containers)
    finished = node.run(waiting, WEB)
    assert node.idle == {POD: "1", BEST_EFFORT: "1"}
    assert not [o for o in finished.outcomes if o.decision.knob is Knob.IDLE and o.status.value == "applied"]

"""On a kubelet's layout a real agent writes the priority to the pod's cgroup, explains it, and leaves the kubelet's values."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.qrm.actuator.sched_attr import SchedulerCalls
from agent.qrm.decisions.cpu_priority import SHORT_SLICE
from tests.builders.waiting import until
from tests.kernel.knob_cgroups import give_controllers
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.live.agent_process import DIOPTASE, Agent, pods_file

pytestmark = pytest.mark.live


class KubeletTree:
    """The cgroups of an online pod of the class Burstable and a batch pod, with a container in each."""

    def __init__(self, stack: ExitStack, batch_qos: str) -> None:
        self._stack = stack
        root = stack.enter_context(cgroup(require_writable_cgroups(), "prio"))
        give_controllers(root)
        kubepods = self._make(root, "kubepods", 1024)
        burstable = self._make(kubepods, "burstable", 1024)
        self.web = self._make(self._make(burstable, "podweb", 512), "c", 512)
        batch_class = burstable if batch_qos == "burstable" else self._make(kubepods, batch_qos, 2)
        self.pod = self._make(batch_class, "podbatch", 102)
        self.batch = self._make(self.pod, "c", 102)
        self.web.burn()
        self.batch.burn()

    def _make(self, above: TestCgroup, name: str, shares: int) -> TestCgroup:
        group = TestCgroup(above.hierarchy, f"{above.path}/{name}")
        self._stack.callback(group.close)
        if name != "c":
            give_controllers(group)
        if group.hierarchy.mode != "v2":
            group.file("cpu", "cpu.shares").write_text(str(shares))
        return group

    def texts(self) -> list[str]:
        weight = "cpu.weight" if self.pod.hierarchy.mode == "v2" else "cpu.shares"
        return [
            group.file("cpu", name).read_text() for group in (self.pod, self.batch) for name in (weight, "cpu.idle")
        ]

    @property
    def idle(self) -> tuple[str, str]:
        """`cpu.idle` of the batch pod and of its container."""
        return self.texts()[1].strip(), self.texts()[3].strip()


@pytest.fixture
def tree() -> Iterator[KubeletTree]:
    with ExitStack() as stack:
        yield KubeletTree(stack, "burstable")


def test_the_pod_yields_is_explained_and_reset_after_a_kill(tree: KubeletTree, tmp_path: Path) -> None:
    before = tree.texts()
    state = ("--state-dir", str(tmp_path / "state"))
    options = ("--act", "on", "--pods", str(pods_file(tmp_path / "pods.yaml", tree.web.path, tree.batch.path)), *state)
    with Agent(*options) as agent:
        until(lambda: tree.idle == ("1", "0"), "the pod yields, its container keeps its weight")
        assert "pod-siblings" not in [source["name"] for source in agent.view()["sources"]]
        answer = subprocess.run(
            [DIOPTASE, "explain", "batch", "--url", agent.url], capture_output=True, text=True, check=True
        )
        text = " ".join(answer.stdout.split())
        assert "cpu.idle of default/batch" in text
        parent = tree.pod.path.rpartition("/")[0]
        assert f"A task that wakes up in another child of {parent} interrupts the tasks of this cgroup" in text
        tree.pod.file("cpu", "cpu.idle").write_text("0\n")
        until(lambda: tree.idle == ("1", "0"), "it is written again")
        agent.end(signal.SIGKILL)
    assert tree.idle == ("1", "0")
    subprocess.run([DIOPTASE, "reset", *state], check=True, capture_output=True)
    assert tree.texts() == before


def test_slices_of_a_best_effort_pod_are_short_explained_and_reset_after_a_kill(tmp_path: Path) -> None:
    calls = SchedulerCalls()
    if (default := calls.default_slice_ns()) is None:
        pytest.skip("this kernel ignores slices: needs Linux 6.12")
    settings = tmp_path / "settings.yaml"
    settings.write_text("knobs: {shortSlices: true}\n")
    state = ("--state-dir", str(tmp_path / "state"))
    with ExitStack() as stack:
        tree = KubeletTree(stack, "besteffort")
        burner = tree.batch.processes[0].pid

        def slice_ns() -> int | None:
            reading = calls.read(burner)
            return None if reading is None else reading.slice_ns

        pods = ("--pods", str(pods_file(tmp_path / "pods.yaml", tree.web.path, tree.batch.path)))
        with Agent("--act", "on", "--config", str(settings), *pods, *state) as agent:
            until(lambda: slice_ns() == int(SHORT_SLICE))
            (failed,) = [source for source in agent.view()["sources"] if source["name"] == "pod-siblings"]
            assert "its threads have slices of 0.1 ms" in failed["error"]
            answer = subprocess.run(
                [DIOPTASE, "explain", "batch", "--url", agent.url], capture_output=True, text=True, check=True
            )
            assert "sched_runtime of default/batch" in " ".join(answer.stdout.split())
            agent.end(signal.SIGKILL)
        assert slice_ns() == int(SHORT_SLICE)
        output = subprocess.run([DIOPTASE, "reset", *state], check=True, capture_output=True, text=True).stdout
        assert f"{tree.batch.path} sched_runtime: restored" in output
        assert slice_ns() == default
        with Agent("--act", "on", "--config", str(settings), *pods, *state) as agent:
            until(lambda: slice_ns() == int(SHORT_SLICE))
            agent.end(signal.SIGTERM)
        assert slice_ns() == default, "an agent that ends restores it"

"""On a kubelet's layout a real agent writes the priority to the pod's cgroup, explains it, and leaves the kubelet's values."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.builders.waiting import until
from tests.kernel.knob_cgroups import give_controllers
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.live.agent_process import DIOPTASE, Agent, pods_file

pytestmark = pytest.mark.live


class KubeletTree:
    """The cgroups of an online and a batch pod of the class Burstable, with a container in each."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        root = stack.enter_context(cgroup(require_writable_cgroups(), "prio"))
        give_controllers(root)
        kubepods = self._make(root, "kubepods", 1024)
        burstable = self._make(kubepods, "burstable", 1024)
        self.web = self._make(self._make(burstable, "podweb", 512), "c", 512)
        self.pod = self._make(burstable, "podbatch", 102)
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
        yield KubeletTree(stack)


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

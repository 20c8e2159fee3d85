"""The agent on a real tmpfs that is filled to the last block: reserved space, refusals, readiness, kill -9, recovery."""

from __future__ import annotations

import os
import subprocess
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from agent.qrm.actuator.originals import RESERVE_NAME, RESERVE_SLOT_BYTES
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.kernel.test_actuator_failures import tmpfs
from tests.live.agent_process import DIOPTASE, Agent, write_pods

pytestmark = pytest.mark.live

SETTINGS = "probes: []\nadvisor: {policy: canonical}\n"


class Node:
    """An online pod and a batch pod, and a second batch pod that starts later."""

    def __init__(self, groups: dict[str, TestCgroup], directory: Path) -> None:
        self.groups, self.directory = groups, directory
        (directory / "settings.yaml").write_text(SETTINGS)
        self.texts = self.cpus()

    def options(self, state: Path, *names: str) -> list[str]:
        levels = {self.groups[name].path: "shared_cores" if name == "web" else "reclaimed_cores" for name in names}
        pods = write_pods(self.directory / "pods.yaml", levels, names)
        config = self.directory / "settings.yaml"
        return ["--act", "on", "--pods", str(pods), "--config", str(config), "--state-dir", str(state)]

    def cpus(self) -> dict[str, str]:
        return {name: group.file("cpuset", "cpuset.cpus").read_text().strip() for name, group in self.groups.items()}

    def changed(self, *names: str) -> bool:
        cpus = self.cpus()
        return all(cpus[name] != self.texts[name] for name in names)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two CPUs to part them")
    hierarchy = require_writable_cgroups()
    with ExitStack() as stack:
        groups = {name: stack.enter_context(cgroup(hierarchy, f"full-{name}")) for name in ("web", "batch", "late")}
        yield Node(groups, tmp_path)


@contextmanager
def full(state: Path) -> Iterator[None]:
    """Fill the file system to the last block; the space is free again after the block."""
    ballast = state / "ballast"
    subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=4096"], check=False, stderr=subprocess.DEVNULL)
    assert os.statvfs(state).f_bavail == 0
    try:
        yield
    finally:
        ballast.unlink()


def refusal(agent: Agent) -> str:
    """Return why the agent is not ready; empty while it is."""
    try:
        agent.get("/readyz")
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
    return ""


def failed(agent: Agent) -> dict[str, str]:
    return {source["name"]: source["error"] for source in agent.view()["sources"] if not source["ok"]}


def reset(state: Path) -> None:
    done = subprocess.run([DIOPTASE, "reset", "--state-dir", str(state)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_space_reserved_at_the_start_lets_a_new_pod_be_limited_and_survives_kill_9(node: Node, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "mount", "8m") as mount:
        state = mount / "state"
        with Agent(*node.options(state, "web", "batch")) as agent:
            until(lambda: node.changed("web", "batch"), lambda: f"both pods are limited: {agent.log}")
            reserve = state / RESERVE_NAME
            until(lambda: reserve.stat().st_blocks * 512 > 2 * RESERVE_SLOT_BYTES, "space is reserved")
            with full(state):
                node.options(state, "web", "batch", "late")
                until(lambda: node.changed("late"), lambda: f"the new pod is limited: {agent.log}")
                assert refusal(agent) == ""
                assert "saved in originals.reserve" in failed(agent)["originals-reserve"]
                agent.process.kill()
                agent.process.wait()
                # The next agent finds the originals in the reserve, and so does a reset, on the full disk.
                with Agent(*node.options(state, "web", "batch", "late")) as successor:
                    until(lambda: "values changed. This agent continues" in successor.log, "it found them")
                    successor.process.kill()
                    successor.process.wait()
                reset(state)
                assert node.cpus() == node.texts


def test_without_space_nothing_new_is_changed_and_readiness_has_the_reason(node: Node, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "mount", "256k") as mount:
        state = mount / "state"
        with Agent(*node.options(state, "web", "batch")) as agent:
            until(lambda: node.changed("web", "batch"), lambda: f"both pods are limited: {agent.log}")
            assert "no space is reserved for originals" in failed(agent)["originals-reserve"]
            with full(state):
                node.options(state, "web", "batch", "late")
                until(lambda: "original values cannot be journalled" in refusal(agent), "readiness names the reason")
                assert "No space left on device" in refusal(agent)
                assert not node.changed("late")
                assert agent.get("/healthz"), "a restart would not help"
                agent.process.kill()
                agent.process.wait()
                with Agent(*node.options(state, "web", "batch", "late")) as successor:
                    until(lambda: "original values cannot be journalled" in refusal(successor), "and so does the next")
                    assert node.cpus()["late"] == node.texts["late"]
                    ballast = state / "ballast"
                    ballast.unlink()
                    until(lambda: node.changed("late"), lambda: f"it recovers: {successor.log}")
                    until(lambda: refusal(successor) == "", "it is ready again")
                    assert successor.end() == 0
                    ballast.touch()
            assert node.cpus() == node.texts

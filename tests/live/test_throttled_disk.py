"""The agent on a loop device that the kernel throttles to few writes a second: cycles and health go on, a pod that ends gets
its values back at once, and a new knob is written only after its original is on disk.

tests/vm/test_slow_disk.py has more, on a device that delays each write by a given time.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from agent.qrm.actuator.originals import FILE_NAME, decode_journal
from agent.sensors.cgroup.hierarchy import Hierarchy
from tests.builders.waiting import PATIENCE_S, until
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.live.agent_process import Agent, write_pods

pytestmark = pytest.mark.live

THROTTLE = "blkio.throttle.write_iops_device"
CYCLES = 5
"""Cycles that have to finish while a sync is under way."""


class ThrottledDisk:
    """An ext4 file system on a loop device; version 1 throttles the root cgroup as well, with the kernel's own threads."""

    def __init__(self, directory: Path, throttle: Path) -> None:
        self.mount, self._throttle, image = directory / "mount", throttle, directory / "image"
        self.mount.mkdir()
        subprocess.run(["truncate", "-s", "32M", image], check=True)
        subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, self.mount], check=True)
        (source,) = [words[0] for words in self._mounts() if words[1] == str(self.mount)]
        self._number = (Path("/sys/class/block") / Path(source).name / "dev").read_text().strip()

    def limit(self, writes_per_s: int) -> None:
        """Let this many writes pass per second; 0 for all."""
        self._throttle.write_text(f"{self._number} {writes_per_s}")

    def close(self) -> None:
        self.limit(0)
        subprocess.run(["umount", self.mount], check=True)

    @staticmethod
    def _mounts() -> list[list[str]]:
        return [line.split() for line in Path("/proc/mounts").read_text().splitlines()]


class ThreePods:
    """An online pod, a batch pod that ends, and one that starts meanwhile."""

    def __init__(self, groups: dict[str, TestCgroup], directory: Path, state: Path) -> None:
        self.groups, self._directory, self.state = groups, directory, state
        (directory / "settings.yaml").write_text("probes: []\nadvisor: {policy: canonical}\n")
        self.own = self.cpus()

    def options(self, *names: str) -> list[str]:
        levels = {self.groups[name].path: "shared_cores" if name == "web" else "reclaimed_cores" for name in names}
        pods = write_pods(self._directory / "pods.yaml", levels, names)
        config = self._directory / "settings.yaml"
        return ["--act", "on", "--pods", str(pods), "--config", str(config), "--state-dir", str(self.state)]

    def cpus(self) -> dict[str, str]:
        return {name: group.file("cpuset", "cpuset.cpus").read_text().strip() for name, group in self.groups.items()}

    def changed(self) -> set[str]:
        return {name for name, cpus in self.cpus().items() if cpus != self.own[name]}

    def journalled(self) -> set[str]:
        try:
            _, entries = decode_journal((self.state / FILE_NAME).read_bytes())
        except FileNotFoundError:
            return set()
        paths = {entry.cgroup for entry in entries}
        return {name for name, group in self.groups.items() if group.path in paths}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[ThrottledDisk]:
    hierarchy: Hierarchy = require_writable_cgroups()
    blkio = hierarchy.v1.get("blkio", Path("/sys/fs/cgroup/blkio")) / THROTTLE
    if not blkio.exists():
        pytest.skip("only version 1 throttles the root cgroup: tests/vm/test_slow_disk.py has a slow disk on version 2")
    # In memory, so that other work of this machine's disk does not count. A mount namespace that another process made
    # meanwhile may hold a copy of the mount, and with it the image.
    ram = tmp_path / "ram"
    ram.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m,mode=0700", "none", ram], check=True)
    opened = ThrottledDisk(ram, blkio)
    yield opened
    opened.close()
    subprocess.run(["umount", "--lazy", ram], check=True)


@contextmanager
def three_pods(directory: Path, state: Path) -> Iterator[ThreePods]:
    """Create the cgroups of the pods, for an agent with this state directory."""
    hierarchy = require_writable_cgroups()
    with ExitStack() as stack:
        groups = {name: stack.enter_context(cgroup(hierarchy, f"slow-{name}")) for name in ("web", "batch", "late")}
        yield ThreePods(groups, directory, state)


@pytest.fixture
def pods(disk: ThrottledDisk, tmp_path: Path) -> Iterator[ThreePods]:
    with three_pods(tmp_path, disk.mount / "state") as created:
        yield created


def sequence(agent: Agent) -> int:
    """Return the number of the latest cycle; the agent has to be healthy and ready."""
    for path in ("/healthz", "/readyz"):
        agent.get(path)
    return int(json.loads(agent.get("/api/v1/view"))["seq"])


def pending_s(agent: Agent) -> float:
    name = "dioptase_state_sync_pending_seconds "
    (line,) = [line for line in agent.get("/metrics").splitlines() if line.startswith(name)]
    return float(line.removeprefix(name))


def check_nothing_waits_for_a_sync(
    pods: ThreePods,
    slow_down: Callable[[], None],
    speed_up: Callable[[], None],
    *,
    stalls: bool,
    ends_stall: bool,
    patience_s: float = PATIENCE_S,
) -> None:
    """Replace a pod while the disk is slow: the new knob waits for its original. If the sync `stalls`, cycles and the restore
    of the pod that ended do not; with `ends_stall` the disk is fast again before the new knob is written."""
    with Agent(*pods.options("web", "batch")) as agent:
        until(lambda: pods.changed() == {"web", "batch"}, lambda: f"both pods are limited: {agent.log}")
        until(lambda: pods.journalled() == {"web", "batch"} and pending_s(agent) == 0, "the disk is idle")
        slow_down()
        pods.options("web", "late")
        first = sequence(agent)

        def written() -> bool:
            changed = pods.changed()
            # The knob is read before the journal.
            assert "late" not in changed or "late" in pods.journalled()
            sequence(agent)
            return "late" in changed

        if stalls:
            until(lambda: "batch" not in pods.changed(), "the pod that ended has its CPUs back")
            assert "batch" in pods.journalled(), "nothing waited for the disk"
            until(lambda: written() or sequence(agent) >= first + CYCLES, "cycles finish during the sync")
            assert "late" not in pods.changed()
            assert pending_s(agent) > 0
            if ends_stall:
                speed_up()
        until(written, lambda: f"the new pod is limited: {agent.log}", patience_s)
        speed_up()
        assert agent.end() == 0
        assert "Traceback" not in agent.log
    assert pods.cpus() == pods.own
    assert pods.journalled() == set()


@pytest.mark.parametrize("writes_per_s", [20, 1])
def test_cycles_health_and_restores_do_not_wait_for_a_sync(
    disk: ThrottledDisk, pods: ThreePods, writes_per_s: int
) -> None:
    check_nothing_waits_for_a_sync(
        pods,
        partial(disk.limit, writes_per_s),
        partial(disk.limit, 0),
        stalls=writes_per_s == 1,
        ends_stall=False,
        patience_s=60,
    )


def test_an_agent_starts_without_waiting_for_a_sync(disk: ThrottledDisk, pods: ThreePods) -> None:
    disk.limit(1)
    with Agent(*pods.options("web", "batch")) as agent:
        until(lambda: sequence(agent) >= 3, lambda: f"cycles finish: {agent.log}")
        assert pending_s(agent) > 0
        assert pods.changed() == set()
        disk.limit(0)
        until(lambda: pods.changed() == {"web", "batch"}, "both pods are limited")

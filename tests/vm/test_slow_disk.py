"""The agent on a disk whose writes take 0.1 to 30 s (dm-delay): cycles, health and limits in force go on, and a new knob is
written only after its original is on disk.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agent.qrm.actuator.originals import FILE_NAME, decode_journal
from api.units import MIB
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.live.agent_process import DIOPTASE, Agent
from tests.vm.agent_cycles import pod, write

pytestmark = pytest.mark.vm

NAME, IMAGE_MIB = "dioptase-slow", 64
LATENCIES_S = (0.1, 1.0, 4.0, 30.0)
SETTINGS: dict[str, Any] = {"probes": [], "advisor": {"policy": "canonical"}}
CYCLES = 8
"""Cycles that have to finish while a sync is under way."""


def run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
    return done.stdout.strip()


class SlowDisk:
    """An ext4 file system on a device that delays every write and flush."""

    def __init__(self, directory: Path) -> None:
        self.mount, image = directory / "slow", directory / "slow.img"
        self.mount.mkdir()
        image.touch()
        subprocess.run(["truncate", "-s", f"{IMAGE_MIB}M", image], check=True)
        for module in ("loop", "dm-delay"):
            run("modprobe", module)
        self._loop = run("losetup", "--find", "--show", str(image))
        run("dmsetup", "create", NAME, "--noudevsync", "--table", self._table(0))
        device = f"/dev/dm-{run('dmsetup', 'info', '-c', '--noheadings', '-o', 'minor', NAME)}"
        run("mke2fs", "-q", "-F", "-t", "ext4", device)
        run("mount", device, str(self.mount))

    def delay(self, seconds: float) -> None:
        """Delay each later write and flush by this time."""
        run("dmsetup", "suspend", "--noflush", "--nolockfs", "--noudevsync", NAME)
        run("dmsetup", "reload", NAME, "--table", self._table(round(seconds * 1000)))
        run("dmsetup", "resume", "--noudevsync", NAME)

    def close(self) -> None:
        self.delay(0)
        run("umount", str(self.mount))
        run("dmsetup", "remove", "--noudevsync", NAME)
        run("losetup", "--detach", self._loop)

    def _table(self, delay_ms: int) -> str:
        sectors = IMAGE_MIB * MIB // 512
        return f"0 {sectors} delay {self._loop} 0 0 {self._loop} 0 {delay_ms}"


class Node:
    """An online pod and a batch pod, and a second pair that starts later."""

    def __init__(self, groups: dict[str, TestCgroup], directory: Path, state: Path) -> None:
        self.groups, self.directory, self.state = groups, directory, state

    def options(self, *names: str) -> list[str]:
        pods, config = write(self.directory, SETTINGS, [self._pod(name) for name in names])
        return ["--act", "on", "--pods", str(pods), "--config", str(config), "--state-dir", str(self.state)]

    def cpus(self, name: str) -> str:
        return self.groups[name].file("cpu", "cpuset.cpus").read_text().strip()

    def pools(self) -> tuple[str, str]:
        """Return the CPUs of the first pair of pods."""
        return self.cpus("web"), self.cpus("batch")

    def journalled(self) -> set[str]:
        """Return the names of pods with an original in the file."""
        try:
            _, entries = decode_journal((self.state / FILE_NAME).read_bytes())
        except FileNotFoundError:
            return set()
        paths = {entry.cgroup for entry in entries}
        return {name for name, group in self.groups.items() if group.path in paths}

    def _pod(self, name: str) -> dict[str, Any]:
        level = {"web": "shared_cores", "db": "dedicated_cores"}.get(name, "reclaimed_cores")
        return pod(self.groups[name], level, cpu=None if level == "reclaimed_cores" else 1.0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SlowDisk]:
    opened = SlowDisk(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def node(disk: SlowDisk, tmp_path: Path) -> Iterator[Node]:
    hierarchy = require_writable_cgroups()
    with ExitStack() as stack:
        groups = {name: stack.enter_context(cgroup(hierarchy, name)) for name in ("web", "batch", "db", "more")}
        yield Node(groups, tmp_path, disk.mount / "state")


def sequence(agent: Agent) -> int:
    """Return the number of the latest cycle; health has to be good before and after."""
    for path in ("/healthz", "/readyz"):
        agent.get(path)
    return int(json.loads(agent.get("/api/v1/view"))["seq"])


def metric(agent: Agent, name: str) -> float:
    """Return the sum over the series of a metric."""
    lines = [line for line in agent.get("/metrics").splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.parametrize("latency_s", LATENCIES_S)
def test_limits_in_force_cycles_and_health_do_not_wait_for_a_sync(disk: SlowDisk, node: Node, latency_s: float) -> None:
    with Agent(*node.options("web", "batch")) as agent:
        until(lambda: node.cpus("batch") and node.journalled() == {"web", "batch"}, "both pods are limited")
        until(lambda: metric(agent, "dioptase_state_sync_pending_seconds") == 0, "the disk is idle")
        before, own = node.pools(), {name: node.cpus(name) for name in ("db", "more")}
        disk.delay(latency_s)
        node.options("web", "batch", "db", "more")
        first, shrunk = sequence(agent), False

        def ordered() -> bool:
            """Whether no new knob was written before its original; the knob is read first."""
            written = {name for name in own if node.cpus(name) != own[name]}
            return written <= node.journalled()

        def written() -> bool:
            nonlocal shrunk
            assert ordered()
            # The dedicated pod takes a CPU of the other two, whose originals are on disk.
            shrunk = shrunk or (node.pools() != before and node.journalled() == {"web", "batch"})
            sequence(agent)
            return all(node.cpus(name) != own[name] for name in own)

        if latency_s >= 4:
            until(lambda: written() or sequence(agent) >= first + CYCLES, "cycles finish during the sync")
            assert shrunk, "CPUs were taken back before any sync had ended"
            assert metric(agent, "dioptase_state_sync_pending_seconds") > 0
            assert {name: node.cpus(name) for name in own} == own
            disk.delay(0)
        until(written, lambda: f"the new pods are limited: {agent.log}")
        assert node.journalled() == set(node.groups)
        disk.delay(0)
        assert agent.end() == 0
        assert "Traceback" not in agent.log
    assert {name: node.cpus(name) for name in own} == own
    assert node.journalled() == set()


def test_an_agent_starts_without_waiting_for_a_sync(disk: SlowDisk, node: Node) -> None:
    disk.delay(30.0)
    with Agent(*node.options("web", "batch")) as agent:
        until(lambda: sequence(agent) >= CYCLES, lambda: f"cycles finish: {agent.log}")
        assert metric(agent, "dioptase_state_syncs_total") == 0, "none has ended"
        assert metric(agent, "dioptase_state_sync_pending_seconds") > 0
        disk.delay(0)
        until(lambda: node.journalled() == {"web", "batch"}, "the originals are on disk")
        agent.process.kill()
    done = subprocess.run(
        [DIOPTASE, "reset", "--state-dir", str(node.state)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

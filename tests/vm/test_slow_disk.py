"""The agent on a disk whose writes take 0.1 to 30 s each (dm-delay): cycles and health go on, a pod that ends gets its values
back at once, and a new knob is written only after its original is on disk.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from api.units import MIB
from tests.builders.waiting import until
from tests.live.agent_process import DIOPTASE, Agent
from tests.live.test_throttled_disk import (
    CYCLES,
    ThreePods,
    check_nothing_waits_for_a_sync,
    pending_s,
    sequence,
    three_pods,
)

pytestmark = pytest.mark.vm_disk

NAME, IMAGE_MIB = "dioptase-slow", 32
LATENCIES_S = (0.1, 1.0, 4.0, 30.0)


def run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
    return done.stdout.strip()


class DelayedDisk:
    """An ext4 file system on a device that delays every write and flush."""

    def __init__(self, directory: Path) -> None:
        self.mount, image = directory / "slow", directory / "slow.img"
        self.mount.mkdir()
        run("truncate", "-s", f"{IMAGE_MIB}M", str(image))
        for module in ("loop", "dm-delay"):
            run("modprobe", module)
        self._loop = run("losetup", "--find", "--show", str(image))
        run("dmsetup", "create", NAME, "--noudevsync", "--table", self._table(0))
        device = f"/dev/dm-{run('dmsetup', 'info', '-c', '--noheadings', '-o', 'minor', NAME)}"
        run("mke2fs", "-q", "-F", "-t", "ext4", device)
        run("mount", device, str(self.mount))

    def delay(self, seconds: float) -> None:
        """Delay each later write and flush by this time; those under way end at once (drivers/md/dm-delay.c,
        delay_presuspend())."""
        run("dmsetup", "suspend", "--noflush", "--nolockfs", "--noudevsync", NAME)
        run("dmsetup", "reload", NAME, "--table", self._table(round(seconds * 1000)))
        run("dmsetup", "resume", "--noudevsync", NAME)

    def close(self) -> None:
        self.delay(0)
        run("umount", str(self.mount))
        run("dmsetup", "remove", "--noudevsync", NAME)
        run("losetup", "--detach", self._loop)

    def _table(self, delay_ms: int) -> str:
        return f"0 {IMAGE_MIB * MIB // 512} delay {self._loop} 0 0 {self._loop} 0 {delay_ms}"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DelayedDisk]:
    opened = DelayedDisk(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def pods(disk: DelayedDisk, tmp_path: Path) -> Iterator[ThreePods]:
    with three_pods(tmp_path, disk.mount / "state") as created:
        yield created


@pytest.mark.parametrize("latency_s", LATENCIES_S)
def test_cycles_health_and_restores_do_not_wait_for_a_delayed_sync(
    disk: DelayedDisk, pods: ThreePods, latency_s: float
) -> None:
    check_nothing_waits_for_a_sync(
        pods, partial(disk.delay, latency_s), partial(disk.delay, 0), stalls=latency_s >= 4, ends_stall=True
    )


def test_an_agent_starts_without_waiting_for_a_delayed_sync(disk: DelayedDisk, pods: ThreePods) -> None:
    disk.delay(30.0)
    with Agent(*pods.options("web", "batch")) as agent:
        until(lambda: sequence(agent) >= CYCLES, lambda: f"cycles finish: {agent.log}")
        assert "dioptase_state_syncs_total{" not in agent.get("/metrics"), "none has ended"
        assert pending_s(agent) > 0
        assert pods.changed() == set()
        disk.delay(0)
        until(lambda: pods.changed() == {"web", "batch"}, "both pods are limited")
        agent.process.kill()
    run(DIOPTASE, "reset", "--state-dir", str(pods.state))
    assert pods.cpus() == pods.own

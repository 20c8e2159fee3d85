"""The guest is the machine that all tests in it take it for, and looks so to the agent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.sensors.cgroup.hierarchy import detect_hierarchy
from agent.sensors.node.machine import read_topology
from agent.sensors.node.node_memory import parse_numa_distances

pytestmark = [pytest.mark.vm, pytest.mark.vm_four]

SYS = Path("/sys")
CONTROLLERS = {"cpu", "cpuset", "memory", "io", "pids"}


def test_sockets_of_two_cpus_are_numa_nodes_of_the_same_size_and_equally_far_apart() -> None:
    topology = read_topology(SYS)
    assert [(cpu.id, cpu.socket, cpu.numa) for cpu in topology.cpus] == [
        (n, n // 2, n // 2) for n in range(os.cpu_count() or 0)
    ]
    assert len(topology.numa_nodes) in (2, 4)
    assert not topology.smt
    nodes = list(topology.numa_nodes)
    directories = [SYS / f"devices/system/node/node{node}" for node in nodes]
    for node, directory in zip(nodes, directories, strict=True):
        assert parse_numa_distances((directory / "distance").read_bytes(), nodes) == {
            n: 10 if n == node else 21 for n in nodes
        }
    kib = [int((directory / "meminfo").read_text().split("MemTotal:")[1].split()[0]) for directory in directories]
    assert max(kib) - min(kib) < 150 << 10, kib


def test_version_2_is_the_only_hierarchy_and_its_controllers_are_there_for_every_cgroup() -> None:
    hierarchy = detect_hierarchy()
    assert (hierarchy.mode, hierarchy.primary) == ("v2", Path("/sys/fs/cgroup"))
    assert set((hierarchy.primary / "cgroup.subtree_control").read_text().split()) >= CONTROLLERS
    assert Path("/proc/self/cgroup").read_text() == "0::/system.slice\n"
    assert "some avg10=" in Path("/proc/pressure/memory").read_text()


def test_disks_are_known_by_their_serial_numbers_and_put_to_use() -> None:
    serials = {disk.name: (disk / "serial").read_text().strip() for disk in (SYS / "block").glob("vd*")}
    assert set(serials.values()) == {"swap", "data"}
    _, *swaps = Path("/proc/swaps").read_text().splitlines()
    ((device, _, kib, *_),) = (line.split() for line in swaps)
    assert (serials[Path(device).name], int(kib)) == ("swap", (1 << 20) - 4)
    (mounted,) = (line.split() for line in Path("/proc/mounts").read_text().splitlines() if " /run/data " in line)
    assert (serials[Path(mounted[0]).name], mounted[2]) == ("data", "ext4")


def test_the_kernel_is_debians_and_tells_its_types_and_the_host_is_not_written_to() -> None:
    release = os.uname().release
    assert release.endswith("-amd64")
    assert (Path("/lib/modules") / release / "modules.dep").exists()
    assert (SYS / "kernel/btf/vmlinux").stat().st_size > 1 << 20
    root = [line.split() for line in Path("/proc/mounts").read_text().splitlines() if line.split()[1] == "/"]
    assert root[-1][2] == "overlay", "writes go to the guest's memory"

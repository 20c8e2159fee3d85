"""CPU topology from declared sysfs trees, and what is assumed where sysfs is silent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.sensors.node.machine import parse_systemd_version, read_online_cpus_text, read_topology
from tests.agent.sensors import kernel_trees


def sysfs(root: Path, *, online: str, cores: dict[int, tuple[int, int]], nodes: dict[int, str]) -> Path:
    """A sysfs with these online CPUs, (core, socket) of each CPU, and CPU list of each NUMA node."""
    files = {"devices/system/cpu/online": f"{online}\n"}
    for cpu, (core, socket) in cores.items():
        files[f"devices/system/cpu/cpu{cpu}/topology/core_id"] = f"{core}\n"
        files[f"devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = f"{socket}\n"
    for node, cpus in nodes.items():
        files[f"devices/system/node/node{node}/cpulist"] = f"{cpus}\n"
    kernel_trees.make(root, files)
    return root


def places(root: Path) -> list[tuple[int, int, int, int]]:
    return [(cpu.id, cpu.core, cpu.socket, cpu.numa) for cpu in read_topology(root).cpus]


def test_two_sockets_with_threads_and_an_offline_cpu(tmp_path: Path) -> None:
    cores = {cpu: (cpu // 2, cpu // 4) for cpu in range(8)}
    root = sysfs(tmp_path, online="0-6", cores=cores, nodes={0: "0-3", 1: "4-7"})
    assert places(root) == [
        (0, 0, 0, 0), (1, 0, 0, 0), (2, 1, 0, 0), (3, 1, 0, 0), (4, 2, 1, 1), (5, 2, 1, 1), (6, 3, 1, 1),
    ]  # fmt: skip
    topology = read_topology(root)
    assert (topology.smt, topology.numa_nodes) == (True, (0, 1))


def test_cpus_of_one_third_level_cache_have_its_number(tmp_path: Path) -> None:
    root = sysfs(tmp_path, online="0-3", cores={cpu: (cpu, 0) for cpu in range(4)}, nodes={0: "0-3"})
    assert [cpu.l3 for cpu in read_topology(root).cpus] == [0, 0, 0, 0]
    kernel_trees.make(root, {f"devices/system/cpu/cpu{cpu}/cache/index3/id": f"{cpu // 2 + 4}\n" for cpu in range(4)})
    assert [cpu.l3 for cpu in read_topology(root).cpus] == [4, 4, 5, 5]


def test_a_cpu_that_goes_offline_leaves(tmp_path: Path) -> None:
    root = sysfs(tmp_path, online="0-1", cores={0: (0, 0), 1: (1, 0)}, nodes={0: "0-1"})
    before = read_online_cpus_text(root)
    (root / "devices/system/cpu/online").write_text("0\n")
    assert read_online_cpus_text(root) != before
    assert read_topology(root).ids == (0,)


def test_missing_files_mean_one_socket_one_node_a_core_per_cpu(tmp_path: Path) -> None:
    kernel_trees.make(tmp_path, {"devices/system/cpu/online": "0-2\n"})
    assert places(tmp_path) == [(0, 0, 0, 0), (1, 1, 0, 0), (2, 2, 0, 0)]
    kernel_trees.make(tmp_path, {"devices/system/cpu/cpu1/topology/physical_package_id": "-1\n"})
    assert places(tmp_path)[1] == (1, 1, 0, 0), "-1 is what kernels say where the firmware says nothing"


def test_without_the_list_each_cpu_says_for_itself(tmp_path: Path) -> None:
    kernel_trees.make(
        tmp_path,
        {
            "devices/system/cpu/cpu0/topology/core_id": "0",
            "devices/system/cpu/cpu1/online": "0",
            "devices/system/cpu/cpu2/online": "1",
            "devices/system/cpu/cpuidle/driver": "x",
        },
    )
    assert read_topology(tmp_path).ids == (0, 2)


@pytest.mark.parametrize("text", ["", "all", "3-1", "0-99999", "\0"])
def test_without_any_sysfs_python_counts(tmp_path: Path, text: str) -> None:
    assert read_topology(tmp_path).ids == tuple(range(os.cpu_count() or 1))
    kernel_trees.make(tmp_path, {"devices/system/cpu/online": text})
    assert len(read_topology(tmp_path).cpus) == os.cpu_count()


def test_this_machine() -> None:
    topology = read_topology(Path("/sys"))
    assert set(os.sched_getaffinity(0)) <= set(topology.ids)
    assert len(topology.ids) == os.sysconf("SC_NPROCESSORS_ONLN")


def test_what_is_no_file_of_sysfs_is_as_if_it_were_missing(tmp_path: Path) -> None:
    """A pipe would be waited for, and a list cut off at a bound would lose CPUs."""
    root = sysfs(tmp_path, online="0-1", cores={0: (0, 0), 1: (1, 1)}, nodes={0: "0", 1: "1"})
    for name in ("devices/system/cpu/cpu1/topology/core_id", "devices/system/node/node1/cpulist"):
        (root / name).unlink()
        os.mkfifo(root / name)
    assert places(root) == [(0, 0, 0, 0), (1, 1, 1, 0)]
    (root / "devices/system/cpu/online").write_text(",".join(["0"] * 40_000))
    assert read_online_cpus_text(root) == ""
    assert read_topology(root).ids == (0, 1)


@pytest.mark.parametrize(
    ("maps", "version"),
    [
        (b"7f r--p 00 08:01 12 /usr/lib/x86_64-linux-gnu/systemd/libsystemd-core-252.so\n", 252),
        (b"7f r-xp 00 08:01 12 /usr/lib/systemd/libsystemd-shared-252-46.el9.so\n", 252),
        (b"7f r-xp 00 08:01 12 /usr/lib/systemd/libsystemd-shared-249.so\n", 249),
        (b"7f r-xp 00 08:01 12 /usr/lib/libsystemd.so.0.35.0\n", None),
        (b"", None),
    ],
)
def test_the_version_of_systemd_is_in_the_names_of_its_libraries(maps: bytes, version: int | None) -> None:
    assert parse_systemd_version(maps) == version

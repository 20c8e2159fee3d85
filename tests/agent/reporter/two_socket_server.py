"""Files of a server with two sockets of 24 cores each, one thread a core, each with a NUMA node and two third-level caches."""

from __future__ import annotations

from pathlib import Path

from agent.sensors.cgroup.cgroup_reader import CgroupReader
from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.cgroup.schedstat import SchedstatRunqLatency
from agent.sensors.node.node_reader import NodeReader
from agent.sensors.pods.pod_indicators import PodIndicatorScraper
from agent.sensors.snapshot import Sensor
from api.snapshot import Snapshot
from tests.captures import NoPods

CPUS, PER_SOCKET, PER_CACHE = 48, 24, 12
MEMORY_KIB = 192 << 20
"""Of each NUMA node."""


def lay(root: Path) -> None:
    """Write /proc and /sys below `root`."""
    files = {
        "sys/devices/system/cpu/online": f"0-{CPUS - 1}",
        "proc/meminfo": f"MemTotal:       {2 * MEMORY_KIB} kB\nMemFree: {MEMORY_KIB} kB\nMemAvailable: {MEMORY_KIB} kB",
        "proc/cpuinfo": "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nstepping\t: 1\n"
        "flags\t\t: fpu avx2 avx512f",
    }
    for cpu in range(CPUS):
        directory = f"sys/devices/system/cpu/cpu{cpu}"
        files |= {
            f"{directory}/topology/core_id": str(cpu % PER_SOCKET),
            f"{directory}/topology/physical_package_id": str(cpu // PER_SOCKET),
            f"{directory}/cache/index3/id": str(cpu // PER_CACHE),
        }
    for node in (0, 1):
        directory = f"sys/devices/system/node/node{node}"
        files |= {
            f"{directory}/cpulist": f"{PER_SOCKET * node}-{PER_SOCKET * node + PER_SOCKET - 1}",
            f"{directory}/distance": "10 32" if node == 0 else "32 10",
            f"{directory}/meminfo": f"Node {node} MemTotal:       {MEMORY_KIB} kB\nNode {node} MemFree:  {MEMORY_KIB >> 1} kB",
        }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def snapshot(root: Path) -> Snapshot:
    """Return the sensor's snapshot of this server."""
    (root / "cgroup").mkdir(exist_ok=True)
    hierarchy = Hierarchy(v1={}, v2=root / "cgroup")
    node, cgroups = NodeReader(root / "proc", root / "sys", live=False), CgroupReader(hierarchy)
    try:
        sensor = Sensor(
            cgroups=cgroups,
            node=node,
            sys=root / "sys",
            pods=NoPods(),
            waits=SchedstatRunqLatency(root / "proc", hierarchy),
            indicators=PodIndicatorScraper(),
        )
        return sensor.snapshot(1, 1, 1)
    finally:
        cgroups.close()
        node.close()

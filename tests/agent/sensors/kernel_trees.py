"""Fake hosts: a tree of files declared in one expression and made real below tmp_path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agent.sensors.cgroup.hierarchy import Hierarchy

PRESSURE = "some avg10=1.50 avg60=0.75 avg300=0.25 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={}\n"
V1_CPU_STAT = "nr_periods 40\nnr_throttled 8\nthrottled_time 320000000\nnr_bursts 0\nburst_time 0\n"
V2_CPU_STAT = (
    "usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\nnice_usec 0\n"
    "nr_periods 40\nnr_throttled 8\nthrottled_usec 320000\nnr_bursts 0\nburst_usec 0\n"
)


def make(root: Path, files: Mapping[str, str]) -> None:
    """Write every file, making the directories on the way."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def open_files() -> int:
    """How many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def v1(root: Path, groups: tuple[str, ...]) -> Hierarchy:
    """Version 1 with one mount per controller. Every group has used 1.5 s, 64 KiB and runs 3 threads."""
    texts = {
        "cpu": {
            "cpu.stat": V1_CPU_STAT,
            "tasks": "11\n12\n",
            "cpu.cfs_quota_us": "200000\n",
            "cpu.cfs_period_us": "100000\n",
            "cpu.cfs_burst_us": "0\n",
            "cpu.shares": "512\n",
            "cpu.idle": "1\n",
        },
        "cpuacct": {
            "cpuacct.usage": "1500000000\n",
            "cpuacct.stat": "user 100\nsystem 50\n",
            "cpuacct.usage_percpu": "1000000000 500000000 \n",
        },
        "cpuset": {"cpuset.effective_cpus": "0-1\n", "cpuset.effective_mems": "0\n"},
        "memory": {
            "memory.usage_in_bytes": "65536\n",
            "memory.stat": "cache 4096\nrss 8192\ntotal_cache 16384\ntotal_rss 32768\ntotal_swap 12288\n",
            "memory.numa_stat": "total=16 N0=12 N1=4\nfile=3 N0=3 N1=0\nhierarchical_total=16 N0=12 N1=4\n",
            "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            "memory.kmem.usage_in_bytes": "20480\n",
            "memory.kmem.tcp.usage_in_bytes": "28672\n",
            "memory.kmem.tcp.limit_in_bytes": "9223372036854771712\n",
            "memory.limit_in_bytes": "1048576\n",
        },
        "pids": {"pids.current": "3\n", "pids.max": "max\n"},
        "blkio": {
            "blkio.throttle.io_service_bytes_recursive": "254:0 Read 4096\n254:0 Write 8192\n254:0 Sync 1\n"
            "254:0 Async 1\n254:0 Discard 0\n254:0 Total 12288\nTotal 12288\n",
            "blkio.throttle.io_serviced_recursive": "254:0 Read 1\n254:0 Write 2\n254:0 Discard 0\n254:0 Total 3\n",
        },
    }
    for controller, files in texts.items():
        (root / controller).mkdir(parents=True, exist_ok=True)
        for group in groups:
            make(root / controller / group, files)
    return Hierarchy(v1={controller: root / controller for controller in texts}, v2=None)


def v2(root: Path, groups: tuple[str, ...]) -> Hierarchy:
    """Version 2: the same numbers as `v1`, and 7 ms, 8 ms and 9 ms of pressure on CPU, memory and I/O."""
    (root / "unified").mkdir(parents=True, exist_ok=True)
    for group in groups:
        make(
            root / "unified" / group,
            {
                "cpu.stat": V2_CPU_STAT,
                "cgroup.threads": "11\n12\n",
                "memory.current": "65536\n",
                "pids.current": "3\n",
                "cpu.pressure": PRESSURE.format(7000, 70),
                "memory.pressure": PRESSURE.format(8000, 80),
                "io.pressure": PRESSURE.format(9000, 90),
                "cpu.max": "200000 100000\n",
                "cpu.max.burst": "0\n",
                "cpu.weight": "20\n",
                "cpu.idle": "1\n",
                "cpuset.cpus.effective": "0-1\n",
                "cpuset.mems.effective": "0\n",
                "memory.max": "1048576\n",
                "memory.high": "max\n",
                "memory.low": "0\n",
                "memory.min": "4096\n",
                "memory.swap.max": "max\n",
                "memory.swap.current": "12288\n",
                "memory.stat": "anon 32768\nfile 16384\nkernel 20480\n",
                "memory.numa_stat": "anon N0=24576 N1=8192\nfile N0=16384 N1=0\n",
                "memory.events": "low 0\nhigh 5\nmax 3\noom 2\noom_kill 2\n",
                "memory.events.local": "low 0\nhigh 1\nmax 0\noom 0\noom_kill 0\n",
                "pids.max": "max\n",
                "io.stat": "254:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n",
            },
        )
    return Hierarchy(v1={}, v2=root / "unified")


def hybrid(root: Path, groups: tuple[str, ...], unified: tuple[str, ...]) -> Hierarchy:
    """Version 1 plus the unified tree, which has only some of the cgroups."""
    return Hierarchy(v1=v1(root, groups).v1, v2=v2(root, unified).v2)

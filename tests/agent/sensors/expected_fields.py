"""What there is to read of a cgroup in the declared trees (trees.py), by version."""

from __future__ import annotations

from agent.sensors.cgroup.cgroup_files import FIELD_TABLE
from api.snapshot import UNLIMITED, CgroupLimits, CgroupSample, IoStat, Pressure

COUNTED: dict[str, object] = {
    "cpu_usage_ns": 1_500_000_000,
    "cpu_user_ns": 1_000_000_000,
    "cpu_system_ns": 500_000_000,
    "periods": 40,
    "throttled_periods": 8,
    "throttled_ns": 320_000_000,
    "threads": 3,
    "memory_bytes": 65536,
    "swap_bytes": 12288,
    "kernel_memory_bytes": 20480,
    "io": {"254:0": IoStat(read_bytes=4096, write_bytes=8192, reads=1, writes=2)},
}
SET = {
    "quota_us": 200_000,
    "period_us": 100_000,
    "burst_us": 0,
    "idle": True,
    "cpus": "0-1",
    "mems": "0",
    "memory_max_bytes": 1 << 20,
    "pids_max": UNLIMITED,
}
V1 = COUNTED | {
    "per_cpu_ns": (1_000_000_000, 500_000_000),
    "kernel_tcp_bytes": 28672,
    "memory_stat": {"cache": 4096, "rss": 8192, "total_cache": 16384, "total_rss": 32768, "total_swap": 12288},
    "numa_stat": {"total": {0: 12, 1: 4}, "file": {0: 3, 1: 0}, "hierarchical_total": {0: 12, 1: 4}},
    "memory_events": {"oom_kill": 2},
    "limits": CgroupLimits(**SET, weight=512, kernel_tcp_max_bytes=UNLIMITED),
}
STALLED = {
    f"{resource}_pressure": Pressure(
        some_us=us, some_avg10=1.5, some_avg60=0.75, some_avg300=0.25,
        full_us=us // 100, full_avg10=0.0, full_avg60=0.0, full_avg300=0.0,
    )
    for resource, us in (("cpu", 7000), ("memory", 8000), ("io", 9000))
}  # fmt: skip
V2 = COUNTED | STALLED | {
    "memory_stat": {"anon": 32768, "file": 16384, "kernel": 20480},
    "numa_stat": {"anon": {0: 24576, 1: 8192}, "file": {0: 16384, 1: 0}},
    "memory_events": {
        "low": 0, "high": 5, "max": 3, "oom": 2, "oom_kill": 2,
        "local.low": 0, "local.high": 1, "local.max": 0, "local.oom": 0, "local.oom_kill": 0,
    },
    "limits": CgroupLimits(
        **SET, weight=20, memory_high_bytes=UNLIMITED, memory_low_bytes=0, memory_min_bytes=4096, swap_max_bytes=UNLIMITED
    ),
}  # fmt: skip
FIELDS = {name.partition(".")[0] for name in FIELD_TABLE}


def values(sample: CgroupSample) -> dict[str, object]:
    result = {field: getattr(sample, field) for field in FIELDS}
    return {field: value for field, value in result.items() if value not in (None, {}, CgroupLimits())}

"""Kernel texts that cgroups and the node share, and their values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.sensors import parsers
from api.snapshot import CpuTimes, Pressure
from tests.agent.sensors.hostile_texts import numbers_in

V1_STAT = b"nr_periods 40\nnr_throttled 8\nthrottled_time 320000000\nnr_bursts 0\nburst_time 0\n"
V2_STAT = b"usage_usec 777906335\nuser_usec 481805692\nsystem_usec 296100643\nnice_usec 0\nnr_periods 3\n"
PSI = b"some avg10=0.84 avg60=6.41 avg300=19.14 total=238431316\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=17\n"
STAT = (
    b"cpu  48180 7 29205 486245 846 0 405 89 5 0\ncpu0 18205 0 14601 249316 44 0 162 45 0 0\nintr 1 2\ncpu11 1 2 3 4\n"
)
MEMINFO = b"MemTotal:       24684092 kB\nMemFree:        24241756 kB\nMemAvailable:   24320228 kB\n"
FULL = Pressure(
    some_us=238431316, some_avg10=0.84, some_avg60=6.41, some_avg300=19.14,
    full_us=17, full_avg10=0.0, full_avg60=0.0, full_avg300=0.0,
)  # fmt: skip
NODE_MEMINFO = b"Node 0 MemFree:   5593372 kB\nNode 0 HugePages_Total:     3\nNode 0 Active(anon):       1604 kB\n"
VMSTAT = b"nr_free_pages 1398343\npgscan_kswapd 0\nworkingset_refault_file 18446744073709551615\n"
TASK_STAT = b"12 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21\n"

PARSERS: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
    "number": (parsers.number, b"1500000000\n"),
    "nr_throttled": (parsers.keyed(b"nr_throttled"), V1_STAT),
    "usage_usec": (parsers.keyed(b"usage_usec", 1000), V2_STAT),
    "task_count": (parsers.task_count, b"11\n12\n"),
    "task_ids": (parsers.task_ids, b"11\n12\n"),
    "pressure": (parsers.pressure, PSI),
    "cpu_lines": (lambda text: parsers.cpu_lines(text, 100), STAT),
    "meminfo": (parsers.meminfo, MEMINFO),
    "flat": (parsers.flat, VMSTAT),
    "load": (parsers.load_averages, b"0.84 1.82 1.08 1/94 12303\n"),
    "schedstat": (parsers.schedstat, b"7 8 9\n"),
    "start_ticks": (parsers.start_ticks, TASK_STAT),
}


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parsers.number, b"42\n", 42),
        (parsers.number, b"18446744073709551615", 2**64 - 1),
        (parsers.number, b"18446744073709551616", None),
        (parsers.number, b"max\n", None),
        (parsers.number, b"-1", None),
        (parsers.number, b"1_000", None),
        (parsers.number, "٣".encode(), None),
        (parsers.number, b"", None),
        (parsers.keyed(b"nr_periods"), V1_STAT, 40),
        (parsers.keyed(b"nr_throttled"), V1_STAT, 8),
        (parsers.keyed(b"burst_time"), V1_STAT, 0),
        (parsers.keyed(b"throttled"), V1_STAT, None),
        (parsers.keyed(b"usage_usec", 1000), V2_STAT, 777906335000),
        (parsers.keyed(b"nr_periods"), V2_STAT, 3),
        (parsers.keyed(b"user_usec"), b"nice_user_usec 5\nuser_usec 6", 6),
        (parsers.keyed(b"a", 1000), b"a 18446744073709551615\n", None),
        (parsers.keyed(b"a"), b"a \n", None),
        (parsers.task_count, b"", 0),
        (parsers.task_count, b"11\n12\n", 2),
        (parsers.task_count, b"none\n", None),
        (parsers.task_ids, b"11\n0\n12\n", (11, 12)),
        (parsers.pressure, PSI, FULL),
        (
            parsers.pressure,
            PSI.split(b"\n")[0],
            Pressure(some_us=238431316, some_avg10=0.84, some_avg60=6.41, some_avg300=19.14),
        ),
        (parsers.pressure, PSI.split(b"\n")[1], None),
        (parsers.pressure, b"some avg10=nan avg60=0 avg300=0 total=1", None),
        (
            parsers.meminfo,
            MEMINFO,
            {"MemTotal": 24684092 * 1024, "MemFree": 24241756 * 1024, "MemAvailable": 24320228 * 1024},
        ),
        (parsers.meminfo, NODE_MEMINFO, {"MemFree": 5593372 * 1024, "HugePages_Total": 3, "Active(anon)": 1604 * 1024}),
        (parsers.meminfo, b"MemTotal: 18446744073709551615 kB\nMemFree: -1 kB\n: 5 kB\n", {}),
        (parsers.flat, VMSTAT, {"nr_free_pages": 1398343, "pgscan_kswapd": 0, "workingset_refault_file": 2**64 - 1}),
        (parsers.flat, b"a 1\nb\nc 3 4\nd -5\ne 6", {"a": 1, "e": 6}),
        (parsers.flat, b"a 1 b\n2 3 4\n", {}),
        (parsers.load_averages, b"0.84 1.82 1.08 1/94 12303\n", (0.84, 1.82, 1.08)),
        (parsers.load_averages, b"0.84 1e9 1.08", None),
        (parsers.schedstat, b"7 8 9\n", (7, 8, 9)),
        (parsers.schedstat, b"7 8\n", None),
        (parsers.start_ticks, TASK_STAT, 4711),
        (parsers.start_ticks, b"12 (a) S 1", None),
    ],
)  # fmt: skip
def test_texts_mean(parse: Callable[[bytes], Any], text: bytes, value: object) -> None:
    assert parse(text) == value


def test_cpu_lines_are_scaled_from_ticks_and_old_ones_have_no_steal() -> None:
    total, per_cpu = parsers.cpu_lines(STAT, 100)
    assert total is not None
    assert total.user_ns == 481_800_000_000
    assert (total.nice_ns, total.steal_ns) == (70_000_000, 890_000_000)
    assert total.total_ns == (48180 + 7 + 29205 + 486245 + 846 + 405 + 89) * 10_000_000
    assert per_cpu.keys() == {0, 11}
    assert per_cpu[11] == CpuTimes(
        user_ns=10_000_000, nice_ns=20_000_000, system_ns=30_000_000, idle_ns=40_000_000,
        iowait_ns=0, irq_ns=0, softirq_ns=0, steal_ns=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/proc/stat", "cpu_lines"),
        ("/proc/meminfo", "meminfo"),
        ("/proc/loadavg", "load"),
        ("/proc/self/schedstat", "schedstat"),
        ("/proc/self/stat", "start_ticks"),
    ],
)
def test_this_kernels_own_texts_are_understood(path: str, name: str) -> None:
    value = PARSERS[name][0](Path(path).read_bytes())
    assert value is not None
    assert numbers_in(value)

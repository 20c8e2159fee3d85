"""Texts of a cgroup's files, and their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent.sensors.cgroup import cgroup_files as files
from agent.sensors.cgroup.cgroup_files import FIELD_TABLE, PART_JOINERS, join_fields
from api.snapshot import UNLIMITED, IoStat

NUMA_V1 = b"total=6116 N0=6116\nfile=51 N0=51\nhierarchical_total=108181 N0=100000 N1=8181\n"
NUMA_V2 = b"anon N0=24576 N1=8192\nworkingset_refault_file N0=0 N1=1\n"
IO_STAT = (
    b"254:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=512 dios=3\n8:16 \n"
    b"8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6 cost.usage=7\n"
)
BLKIO = (
    b"254:0 Read 4096\n254:0 Write 8192\n254:0 Sync 1\n254:0 Discard 5\n254:0 Total 12288\n8:0 Read 1\nTotal 12289\n"
)
PARSERS: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
    "ticks": (files.user_hz_line(b"user"), b"user 1024005\nsystem 509538\n"),
    "numbers": (files.numbers, b"7402591670482 7932855885468 \n"),
    "limit": (files.limit, b"9223372036854771712\n"),
    "quota": (files.quota, b"-1\n"),
    "cpu_max_quota": (files.cpu_max_quota, b"max 100000\n"),
    "cpu_max_period": (files.cpu_max_period, b"max 100000\n"),
    "flag": (files.flag, b"1\n"),
    "ranges": (files.id_list, b"0-3,8\n"),
    "numa_v1": (files.numa_stat, NUMA_V1),
    "numa_v2": (files.numa_stat, NUMA_V2),
    "oom_kills": (files.oom_kills, b"oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"),
    "io_stat": (files.io_stat, IO_STAT),
    "blkio": (files.blkio, BLKIO),
}


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (files.user_hz_line(b"system"), b"user 1024005\nsystem 509538\n", 5_095_380_000_000),
        (files.numbers, b"1 2 3 \n", (1, 2, 3)),
        (files.numbers, b"1 -2 3\n", None),
        (files.numbers, b"\n", None),
        (files.numbers, b"18446744073709551616 1\n", None),
        (files.limit, b"1048576\n", 1 << 20),
        (files.limit, b"max\n", UNLIMITED),
        (files.limit, b"9223372036854771712\n", UNLIMITED),
        (files.limit, b"9223372036854710272\n", UNLIMITED),
        (files.limit, b"9223372036854644736\n", 9223372036854644736),
        (files.limit, b"-1\n", None),
        (files.quota, b"-1\n", -1),
        (files.quota, b"150000\n", 150000),
        (files.quota, b"-2\n", None),
        (files.cpu_max_quota, b"150000 100000\n", 150000),
        (files.cpu_max_quota, b"max 100000\n", -1),
        (files.cpu_max_quota, b"max\n", None),
        (files.cpu_max_period, b"max 100000\n", 100000),
        (files.flag, b"0\n", False),
        (files.flag, b"2\n", None),
        (files.id_list, b"0-3,8\n", "0-3,8"),
        (files.id_list, b"\n", ""),
        (files.id_list, b"0-3;8\n", None),
        (files.numa_stat, NUMA_V1, {"total": {0: 6116}, "file": {0: 51}, "hierarchical_total": {0: 100000, 1: 8181}}),
        (files.numa_stat, NUMA_V2, {"anon": {0: 24576, 1: 8192}, "workingset_refault_file": {0: 0, 1: 1}}),
        (files.numa_stat, b"anon N0=x Nx=1 M1=2 N1=3\n", {"anon": {1: 3}}),
        (files.oom_kills, b"oom_kill_disable 0\nunder_oom 0\noom_kill 7\n", {"oom_kill": 7}),
        (files.oom_kills, b"oom_kill_disable 0\nunder_oom 0\n", None),
        (
            files.io_stat,
            IO_STAT,
            {
                "254:0": IoStat(read_bytes=4096, write_bytes=8192, reads=1, writes=2, discard_bytes=512, discards=3),
                "8:0": IoStat(read_bytes=1, write_bytes=2, reads=3, writes=4, discard_bytes=5, discards=6),
            },
        ),
        (files.io_stat, b"254:0 rbytes=1 wbytes=2 rios=3\nvda rbytes=1 wbytes=2 rios=3 wios=4\n", {}),
        (files.blkio, BLKIO, {"254:0": {b"Read": 4096, b"Write": 8192, b"Discard": 5}, "8:0": {b"Read": 1}}),
        (files.blkio, b"", {}),
    ],
)  # fmt: skip
def test_texts_mean(parse: Callable[[bytes], Any], text: bytes, value: object) -> None:
    assert parse(text) == value


def test_a_device_whose_operations_are_not_known_is_left_out() -> None:
    parts = {"bytes": files.blkio(BLKIO), "operations": files.blkio(b"254:0 Read 1\n254:0 Write 2\n")}
    assert files.join_io(parts) == {
        "254:0": IoStat(read_bytes=4096, write_bytes=8192, reads=1, writes=2, discard_bytes=5)
    }
    assert files.join_io({"operations": parts["operations"]}) == {}


def test_every_part_is_joined() -> None:
    fields = {name.partition(".")[0] for name in FIELD_TABLE if "." in name}
    assert fields == PART_JOINERS.keys()
    assert join_fields({"memory_events.local": {"oom": 1}, "threads": None, "swap_bytes": 0}) == {
        "memory_events": {"local.oom": 1},
        "swap_bytes": 0,
    }

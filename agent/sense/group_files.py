"""Texts of a cgroup's files to values, for what only cgroups have. Pure and total, as `parsers` is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from agent.sense import parsers
from api.facts import UNLIMITED, IoStat

V1_NO_LIMIT = 0x7FFF_FFFF_FFFF_0000
"""Version 1 spells no limit as the largest whole number of pages (PAGE_COUNTER_MAX), here of up to 64 KiB."""
_NS_PER_TICK = parsers.NS_PER_S // os.sysconf("SC_CLK_TCK")
_MOST_NODES = 1024
_RANGES = b"0123456789-,"
_IO_STAT = {
    b"rbytes": "read_bytes",
    b"wbytes": "write_bytes",
    b"rios": "reads",
    b"wios": "writes",
    b"dbytes": "discard_bytes",
    b"dios": "discards",
}
_NEEDED = {"read_bytes", "write_bytes", "reads", "writes"}
"""Kernels before 4.20 know no discards."""
_BLKIO = {
    b"Read": ("read_bytes", "reads"),
    b"Write": ("write_bytes", "writes"),
    b"Discard": ("discard_bytes", "discards"),
}


def ticks(key: bytes) -> Callable[[bytes], int | None]:
    """A reader of one line of cpuacct.stat, which counts in USER_HZ; nanoseconds."""
    return parsers.keyed(key, _NS_PER_TICK)


def numbers(text: bytes) -> tuple[int, ...] | None:
    """cpuacct.usage_percpu: one number for each possible CPU."""
    words = text.split()
    if not words or not b"".join(words).isdigit() or max(map(len, words)) >= parsers.LONGEST_SAFE:
        return None
    return tuple(map(int, words))


def limit(text: bytes) -> int | None:
    """memory.max, pids.max and memory.limit_in_bytes: a number, UNLIMITED for `max` and for what version 1 says instead."""
    value = UNLIMITED if text.strip() == b"max" else parsers.number(text)
    return UNLIMITED if value is not None and value >= V1_NO_LIMIT else value


def quota(text: bytes) -> int | None:
    """cpu.cfs_quota_us: microseconds in a period, -1 for no limit."""
    return -1 if text.strip() == b"-1" else parsers.number(text)


def cpu_max_quota(text: bytes) -> int | None:
    """The first word of cpu.max; -1 for `max`."""
    words = text.split()
    if len(words) != 2:
        return None
    return -1 if words[0] == b"max" else parsers.number(words[0])


def cpu_max_period(text: bytes) -> int | None:
    """The second word of cpu.max."""
    words = text.split()
    return parsers.number(words[1]) if len(words) == 2 else None


def flag(text: bytes) -> bool | None:
    """cpu.idle: 1 or 0."""
    return {b"1": True, b"0": False}.get(text.strip())


def ranges(text: bytes) -> str | None:
    """A list of CPUs or memory nodes as the kernel writes it, `0-3,8`; empty where the group may use none."""
    line = text.strip()
    return None if line.translate(None, _RANGES) else line.decode("ascii")


def numa_stat(text: bytes) -> dict[str, Mapping[int, int]]:
    """memory.numa_stat: `total=9 N0=4 N1=5` of version 1, `anon N0=4 N1=5` of version 2, by kind and node."""
    found: dict[str, Mapping[int, int]] = {}
    for line in text.split(b"\n"):
        kind, _, rest = line.partition(b" ")
        by_node = _by_node(rest)
        if by_node and kind:
            found[parsers.name(kind.partition(b"=")[0])] = by_node
    return found


@lru_cache(maxsize=1024)
def _by_node(words: bytes) -> Mapping[int, int]:
    # Most are `N0=0 N1=0`, in every cgroup: one mapping for all of them.
    found = {}
    for word in words.split()[:_MOST_NODES]:
        node, _, amount = word.partition(b"=")
        number, value = parsers.number(node[1:]), parsers.number(amount)
        if node.startswith(b"N") and number is not None and value is not None:
            found[number] = value
    return found


def oom_kills(text: bytes) -> dict[str, int] | None:
    """memory.oom_control of version 1; the count is there since Linux 4.13."""
    kills = parsers.keyed(b"oom_kill")(text)
    return None if kills is None else {"oom_kill": kills}


def join_events(parts: Mapping[str, Any]) -> dict[str, int]:
    """memory.events, and memory.events.local with `local.` before its names."""
    local = parts.get("local", {})
    return {**parts.get("all", {}), **{f"local.{name}": count for name, count in local.items()}}


def io_stat(text: bytes) -> dict[str, IoStat]:
    """io.stat of version 2: `254:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6` for each device that was used."""
    found: dict[str, IoStat] = {}
    for line in text.split(b"\n"):
        device, *words = line.split() or (b"",)
        values = {}
        for word in words:
            key, _, amount = word.partition(b"=")
            value = parsers.number(amount)
            if key in _IO_STAT and value is not None:
                values[_IO_STAT[key]] = value
        if _is_device(device) and values.keys() >= _NEEDED:
            found[device.decode()] = IoStat(**values)
    return found


def blkio(text: bytes) -> dict[str, dict[bytes, int]]:
    """blkio.throttle.io_service_bytes and io_serviced of version 1: `254:0 Read 4096`, by device and kind."""
    found: dict[str, dict[bytes, int]] = {}
    for line in text.split(b"\n"):
        words = line.split()
        if len(words) == 3 and words[1] in _BLKIO and _is_device(words[0]):
            value = parsers.number(words[2])
            if value is not None:
                found.setdefault(words[0].decode(), {})[words[1]] = value
    return found


def join_io(parts: Mapping[str, Any]) -> dict[str, IoStat]:
    """io.stat as it is, or bytes and operations of version 1 brought together by device."""
    if "all" in parts:
        return dict(parts["all"])
    found: dict[str, IoStat] = {}
    for device, amounts in parts.get("bytes", {}).items():
        operations = parts.get("operations", {}).get(device, {})
        values = {_BLKIO[kind][0]: amount for kind, amount in amounts.items()}
        values |= {_BLKIO[kind][1]: count for kind, count in operations.items()}
        if values.keys() >= _NEEDED:
            found[device] = IoStat(**values)
    return found


def _is_device(word: bytes) -> bool:
    major, colon, minor = word.partition(b":")
    return bool(colon) and major.isdigit() and minor.isdigit() and len(word) <= 16

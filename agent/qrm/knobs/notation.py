"""Canonical spelling of knob values: cgroup v2 notation, and its conversion to the numbers of cgroup v1. Pure.
CPU weights are converted linearly, as in the kernel (`sched_weight_from_cgroup`, kernel/sched/sched.h) and in
systemd: 1024 shares are weight 100. Sizes are whole pages; a number that the kernel's counters cannot reach is
`max`. All parsers raise ValueError that quotes the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from resource import getpagesize

from api.cpu import format_cpu_list, parse_cpu_list
from api.text import quote

DEFAULT_SHARES, DEFAULT_WEIGHT = 1024, 100
DEFAULT_PERIOD_US = 100_000
MAX = "max"
UNLIMITED = f"{MAX} {DEFAULT_PERIOD_US}"
PAGE_BYTES = getpagesize()
UNLIMITED_BYTES = (2**63 - 1) // PAGE_BYTES * PAGE_BYTES
"""Version 1's text for no limit (PAGE_COUNTER_MAX)."""
IO_KEYS = ("rbps", "wbps", "riops", "wiops")
IO_UNLIMITED = {"rbps": 2**64 - 1, "wbps": 2**64 - 1, "riops": 2**32 - 1, "wiops": 2**32 - 1}
"""Values from which on the kernel means no limit (block/blk-throttle.c)."""
MAX_NUMA_NODES = 1024
_DEVICE = re.compile(r"(\d{1,4}):(\d{1,7})", re.ASCII)

IoLimits = Mapping[str, Mapping[str, int]]
"""Limit by device (`MAJOR:MINOR`) and key; a missing key is unlimited."""


def parse_number(text: str) -> int:
    """Return a whole number of at least 0."""
    stripped = text.strip()
    if not (stripped.isascii() and stripped.isdigit() and len(stripped) <= 20):
        raise ValueError(f"{quote(text, 60)} is not a whole number of at least 0")
    return int(stripped)


def canonical_cpus(text: str) -> str:
    """Return a list of CPUs."""
    return format_cpu_list(parse_cpu_list(text))


def canonical_nodes(text: str) -> str:
    """Return a list of NUMA nodes."""
    nodes = parse_cpu_list(text)
    if nodes and nodes[-1] >= MAX_NUMA_NODES:
        raise ValueError(f"{quote(text, 60)} names NUMA nodes beyond {MAX_NUMA_NODES - 1}")
    return format_cpu_list(nodes)


def canonical_number(text: str) -> str:
    """Return a number: weights, microseconds."""
    return str(parse_number(text))


def canonical_idle(text: str) -> str:
    """Return 0 or 1."""
    if text.strip() not in ("0", "1"):
        raise ValueError(f"{quote(text, 60)} is neither 0 nor 1")
    return text.strip()


def canonical_quota(text: str) -> str:
    """Return quota and period in us; without a period the kernel's default."""
    words = text.split()
    if not 1 <= len(words) <= 2:
        raise ValueError(
            f"{quote(text, 60)} is not a quota and a period in microseconds, such as 50000 100000 or max 100000"
        )
    period_us = parse_number(words[1]) if len(words) == 2 else DEFAULT_PERIOD_US
    return UNLIMITED if words[0] == MAX else f"{parse_number(words[0])} {period_us}"


def canonical_size(text: str) -> str:
    """Return a size in bytes, rounded down to pages, or `max`."""
    if text.strip() == MAX:
        return MAX
    size_bytes = parse_number(text)
    return MAX if size_bytes >= UNLIMITED_BYTES else str(size_bytes // PAGE_BYTES * PAGE_BYTES)


def canonical_amount(text: str) -> str:
    """Return a number of bytes of at least 1."""
    if (size_bytes := parse_number(text)) < 1:
        raise ValueError(f"{quote(text, 60)} is not a number of bytes of at least 1")
    return str(size_bytes)


def canonical_class_id(text: str) -> str:
    """Return a packet class of 32 bits; 0 is none."""
    if (value := parse_number(text)) >= 2**32:
        raise ValueError(f"{quote(text, 60)} does not fit into 32 bits")
    return str(value)


def canonical_migration(text: str) -> str:
    """Return two lists of NUMA nodes, source and target."""
    words = text.split()
    if len(words) != 2:
        raise ValueError(f"{quote(text, 60)} is not two lists of NUMA nodes, from and to, such as 0 1 or 0,2 1,3")
    return f"{canonical_nodes(words[0])} {canonical_nodes(words[1])}"


def canonical_io_max(text: str) -> str:
    """Return a line with all four keys for each limited device, sorted by device number; empty means no limit."""
    return format_io(parse_io(text))


def parse_io(text: str) -> dict[str, dict[str, int]]:
    """Return limits by device and key, without unlimited keys and devices."""
    limits_by_device: dict[str, dict[str, int]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        device, *pairs = line.split()
        name = _canonical_device(device)
        if name in limits_by_device:
            raise ValueError(f"{quote(device)} is listed twice")
        limits_by_device[name] = limits = {}
        for pair in pairs:
            key, _, value = pair.partition("=")
            if key not in IO_KEYS:
                raise ValueError(f"{quote(pair, 60)} is none of rbps=, wbps=, riops= and wiops= with a number or max")
            if value != MAX and (limit := parse_number(value)) < IO_UNLIMITED[key]:
                limits[key] = limit
    return {device: limits for device, limits in limits_by_device.items() if limits}


def format_io(limits: IoLimits) -> str:
    """Return the text of `parse_io`'s result."""
    return "\n".join(
        f"{device} {' '.join(f'{key}={limits[device].get(key, MAX)}' for key in IO_KEYS)}"
        for device in sorted_devices(limits)
        if limits[device]
    )


def sorted_devices(devices: Iterable[str]) -> list[str]:
    """Return the devices sorted by number."""
    return sorted(devices, key=lambda device: tuple(map(int, device.split(":"))))


def parse_devices(text: str) -> dict[str, int]:
    """Return the value by device of version 1 lines such as `8:16 1048576`."""
    values = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        device, _, value = line.partition(" ")
        values[_canonical_device(device)] = parse_number(value)
    return values


def _canonical_device(text: str) -> str:
    match = _DEVICE.fullmatch(text)
    if match is None:
        raise ValueError(f"{quote(text, 60)} is not the number of a device such as 8:16")
    return f"{int(match[1])}:{int(match[2])}"


def weight_to_shares(weight: int) -> int:
    """Return version 1's shares for a version 2 weight, rounded as in the kernel."""
    return (weight * DEFAULT_SHARES + DEFAULT_WEIGHT // 2) // DEFAULT_WEIGHT


def shares_to_weight(shares: int) -> int:
    """Return version 2's weight for version 1 shares; the inverse of `weight_to_shares` from 1 to 10000."""
    return (shares * DEFAULT_WEIGHT + DEFAULT_SHARES // 2) // DEFAULT_SHARES

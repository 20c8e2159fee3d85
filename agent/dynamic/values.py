"""Katalyst's values in the units of the settings. Each function takes what JSON has and raises ValueError for what cannot be.

The texts of errors do not name the field: who calls knows its path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil
from typing import Any

from api.durations import duration_s
from api.quantities import read_quantity

MIB = 1 << 20
_LARGEST = 1 << 62
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%", re.ASCII)
_MOUNT = re.compile(r"/sys/fs/cgroup(?:/(?:memory|cpu|cpu,cpuacct|cpuset))?(?=/)", re.ASCII)


def same(value: Any) -> Any:
    """As it is: text, truth, and numbers that are the same in both."""
    return value


def cores(value: Any) -> float:
    """A quantity of CPU: `500m` is half a core."""
    return float(read_quantity(value))


def whole_cores(value: Any) -> int:
    """The same, rounded up: what is kept is never less than what was asked for."""
    return ceil(cores(value))


def size(value: Any) -> int:
    """A quantity of bytes, or a plain number of them."""
    if isinstance(value, float):
        return _bounded(value)
    return _bounded(read_quantity(value))


def mebibytes(value: Any) -> int:
    """A quantity of bytes in MiB, rounded up."""
    return -(-size(value) // MIB)


def ratio(value: Any) -> float:
    """A part of one that is written as a quantity: `0.1`, `100m`."""
    return float(read_quantity(value))


def seconds(value: Any) -> float:
    """A duration as Go writes it."""
    return duration_s(value)


def grace(value: Any) -> float | None:
    """Seconds that a victim has; below zero it has what its own pod says."""
    return None if value < 0 else float(value)


def amount(value: Any) -> Mapping[str, Any]:
    """`10Gi`, `1000` or `10%`, as the settings write the two; nothing of an empty text, which switches the threshold off."""
    if not value:
        return {}
    if found := _PERCENT.fullmatch(value):
        return {"ratio": float(found[1]) / 100}
    return {"number": size(value)}


def cgroup(value: str) -> str:
    """A path with its mount point as the path below it, which is the same whatever the hierarchy is."""
    path = _MOUNT.sub("", value, count=1)
    if not path.startswith("/") or path == "/":
        raise ValueError(f"{value!r:.80} is no cgroup's path such as /sys/fs/cgroup/kubepods/besteffort")
    return path.rstrip("/")


def _bounded(value: Any) -> int:
    if not value <= _LARGEST:
        raise ValueError("more bytes than any machine has; lower it")
    return int(value)

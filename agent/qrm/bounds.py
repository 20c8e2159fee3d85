"""What a knob may be set to on this machine: one clamp per knob. Pure.

A value outside is brought to the nearest one inside that still means the same; one that has nothing in common with
what is possible raises ValueError, because any substitute would mean something else. What the owner has limited is
never loosened, and what the owner has protected is never taken away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import inf

import msgspec

from agent.qrm.notation import IO_KEYS, MAX, UNLIMITED, format_io, parse_io
from api.cpus import format_cpu_list, parse_cpu_list
from api.knobs import Knob

MIN_WEIGHT, MAX_WEIGHT = 1, 10_000
MIN_QUOTA_US = 1_000
MIN_PERIOD_US, MAX_PERIOD_US = 1_000, 1_000_000
"""min_cfs_quota_period and max_cfs_quota_period, kernel/sched/core.c."""
MIN_IO = {"rbps": 65_536, "wbps": 65_536, "riops": 10, "wiops": 10}
"""Below these a task that holds a lock of the file system while it waits for its disk holds up everybody."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine and the owner have for one knob of one cgroup."""

    ceiling: tuple[int, ...] | None = None
    """CPUs or NUMA nodes that the cgroup above may use; None where the kernel does not tell."""
    cpu_count: int = 1
    inherits: bool = True
    """Whether an empty cpuset means the parent's (version 2); on version 1 it would be no CPU at all."""
    own_quota: str = UNLIMITED
    """The owner's quota in canonical notation: a limit that somebody set for a reason is never loosened."""
    own: str | None = None
    """The owner's value of any other knob; None where it does not bound anything."""
    quota: str = UNLIMITED
    """The quota that the cgroup has or is getting, which its burst must not exceed."""
    floor_bytes: int = 0
    """A lower limit on memory than this would have the kernel kill somebody, or hold up the round."""
    weights: tuple[int, int] = (MIN_WEIGHT, MAX_WEIGHT)


def bound(knob: Knob, value: str, limits: Limits) -> str:
    """The canonical value that may be written for this canonical one. Raises ValueError where there is none."""
    return CLAMPS[knob](value, limits)


def at_most(value: str, limit: str) -> str:
    """The smaller of two sizes."""
    return min(value, limit, key=_bytes)


def _bytes(value: str) -> float:
    return inf if value == MAX else int(value)


def _list(what: str) -> Callable[[str, Limits], str]:
    # The containers of a pool all have the same, within the same.
    @lru_cache(maxsize=256)
    def among(value: str, ceiling: tuple[int, ...]) -> str:
        inside = set(parse_cpu_list(value)) & set(ceiling)
        if not inside:
            above = format_cpu_list(ceiling)
            raise ValueError(f"none of the {what} {value} is among those of the cgroup above, {above}")
        return format_cpu_list(inside)

    def clamp(value: str, limits: Limits) -> str:
        if limits.ceiling is None:
            return value
        if not value:
            return "" if limits.inherits else format_cpu_list(limits.ceiling)
        return among(value, limits.ceiling)

    return clamp


def _weight(value: str, limits: Limits) -> str:
    least, most = limits.weights
    return str(min(max(int(value), least), most))


def _quota(value: str, limits: Limits) -> str:
    quota, period = value.split()
    if ratio(value) >= ratio(limits.own_quota):
        return limits.own_quota
    asked_us, asked_period_us = int(quota), max(int(period), 1)
    period_us = min(max(asked_period_us, MIN_PERIOD_US), MAX_PERIOD_US)
    # The same part of a CPU, whatever became of the period.
    quota_us = max(asked_us * period_us // asked_period_us, MIN_QUOTA_US)
    return UNLIMITED if quota_us >= period_us * limits.cpu_count else f"{quota_us} {period_us}"


def ratio(value: str) -> float:
    """CPUs' worth of a canonical quota."""
    quota, period = value.split()
    return inf if quota == MAX else int(quota) / max(int(period), 1)


def _burst(value: str, limits: Limits) -> str:
    quota = limits.quota.split()[0]
    return value if quota == MAX else str(min(int(value), int(quota)))


def _limit(value: str, limits: Limits) -> str:
    return value if limits.own is None else at_most(value, limits.own)


def _stepped(value: str, limits: Limits) -> str:
    return _limit(value if value == MAX else str(max(int(value), limits.floor_bytes)), limits)


def _protection(value: str, limits: Limits) -> str:
    return value if limits.own is None else max(value, limits.own, key=_bytes)


def _io_max(value: str, limits: Limits) -> str:
    asked, own = parse_io(value), parse_io(limits.own or "")
    return format_io(
        {
            device: {
                key: min(
                    max(asked[device][key], MIN_IO[key]) if key in asked.get(device, {}) else 2**64,
                    own.get(device, {}).get(key, 2**64),
                )
                for key in IO_KEYS
                if key in asked.get(device, {}) or key in own.get(device, {})
            }
            for device in {**asked, **own}
        }
    )


def _as_it_is(value: str, _limits: Limits) -> str:
    return value


CLAMPS: Mapping[Knob, Callable[[str, Limits], str]] = {
    Knob.CPUSET: _list("CPUs"),
    Knob.MEMS: _list("NUMA nodes"),
    Knob.WEIGHT: _weight,
    Knob.QUOTA: _quota,
    Knob.BURST: _burst,
    Knob.IDLE: _as_it_is,
    Knob.MEMORY_MAX: _stepped,
    Knob.MEMORY_HIGH: _stepped,
    Knob.MEMORY_LOW: _protection,
    Knob.MEMORY_MIN: _protection,
    Knob.SWAP_MAX: _limit,
    Knob.IO_WEIGHT: _weight,
    Knob.IO_MAX: _io_max,
    Knob.NET_CLASS: _as_it_is,
}

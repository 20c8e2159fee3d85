"""What a knob may be set to on this machine: one clamp per knob. Pure.

A value outside is brought to the nearest one inside that still means the same; one that has nothing in common with
what is possible raises ValueError, because any substitute would mean something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from agent.qrm.table import UNLIMITED
from api.cpus import format_cpu_list, parse_cpu_list
from api.knobs import Knob

MIN_WEIGHT, MAX_WEIGHT = 1, 10_000
MIN_QUOTA_US = 1_000
MIN_PERIOD_US, MAX_PERIOD_US = 1_000, 1_000_000
"""min_cfs_quota_period and max_cfs_quota_period, kernel/sched/core.c."""


@dataclass(frozen=True)
class Limits:
    """What the machine has for one cgroup."""

    ceiling: tuple[int, ...] | None
    """CPUs that the cgroup above may use; None where the kernel does not tell."""
    cpu_count: int
    inherits: bool
    """Whether an empty cpuset means the parent's (version 2); on version 1 it would be no CPU at all."""
    own_quota: str = UNLIMITED
    """The owner's quota in canonical notation: a limit that somebody set for a reason is never loosened."""


def bound(knob: Knob, value: str, limits: Limits) -> str:
    """The canonical value that may be written for this canonical one. Raises ValueError where there is none."""
    return CLAMPS[knob](value, limits)


def _cpuset(value: str, limits: Limits) -> str:
    if limits.ceiling is None:
        return value
    ceiling = format_cpu_list(limits.ceiling)
    if not value:
        return "" if limits.inherits else ceiling
    inside = set(parse_cpu_list(value)) & set(limits.ceiling)
    if not inside:
        raise ValueError(f"none of the CPUs {value} is among those of the cgroup above, {ceiling}")
    return format_cpu_list(inside)


def _weight(value: str, _limits: Limits) -> str:
    return str(min(max(int(value), MIN_WEIGHT), MAX_WEIGHT))


def _quota(value: str, limits: Limits) -> str:
    quota, period = value.split()
    if _ratio(value) >= _ratio(limits.own_quota):
        return limits.own_quota
    asked_us, asked_period_us = int(quota), max(int(period), 1)
    period_us = min(max(asked_period_us, MIN_PERIOD_US), MAX_PERIOD_US)
    # The same part of a CPU, whatever became of the period.
    quota_us = max(asked_us * period_us // asked_period_us, MIN_QUOTA_US)
    return UNLIMITED if quota_us >= period_us * limits.cpu_count else f"{quota_us} {period_us}"


def _ratio(value: str) -> float:
    """CPUs' worth of a canonical quota."""
    quota, period = value.split()
    return inf if quota == "max" else int(quota) / max(int(period), 1)


def _idle(value: str, _limits: Limits) -> str:
    return value


CLAMPS: Mapping[Knob, Callable[[str, Limits], str]] = {
    Knob.CPUSET: _cpuset,
    Knob.WEIGHT: _weight,
    Knob.QUOTA: _quota,
    Knob.IDLE: _idle,
}

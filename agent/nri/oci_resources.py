"""Translates knob values to OCI resources and back, and clamps them to what the container requested.
It is pure. OCI has no word for `cpu.idle`: the lowest weight replaces it until the next cycle. On cgroup v2 the
weight is left to the cycle, because runtimes convert shares to `cpu.weight` differently (the mapping changed in
runc and crun).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from agent.qrm.knobs.notation import DEFAULT_SHARES, MAX, shares_to_weight, weight_to_shares
from api.cpu import format_cpu_list, parse_cpu_list
from api.knobs import Knob
from api.proto import nri_pb2 as wire

PERIOD_US, MIN_QUOTA_US = 100_000, 1000
MIN_WEIGHT = "1"
UNIFIED_KNOBS = (Knob.MEMORY_HIGH, Knob.MEMORY_LOW, Knob.MEMORY_MIN)
"""Files of version 2 that the runtime writes by their names."""
ADJUSTABLE_KNOBS = (Knob.CPUSET, Knob.MEMS, Knob.WEIGHT, Knob.QUOTA, Knob.MEMORY_MAX, *UNIFIED_KNOBS)


class ContainerBounds(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds a container that is about to be made: the cgroup that it will be in, and the version of its files."""

    cpus: frozenset[int] = frozenset()
    """Empty where that is not known."""
    mems: frozenset[int] = frozenset()
    cores: float | None = None
    """Quota of the pod; None where it has none, or none that binds what is below (version 2)."""
    unified: bool = False
    """Version 2."""


def requested_values(resources: Any, around: ContainerBounds) -> dict[Knob, str]:
    """What the runtime was told to give the container, by knob in version 2's notation."""
    cpu, memory = resources.cpu, resources.memory
    values = {
        Knob.QUOTA: _quota_text(cpu),
        Knob.CPUSET: cpu.cpus or _inherited_list(around.cpus, around),
        Knob.MEMS: cpu.mems or _inherited_list(around.mems, around),
        Knob.MEMORY_MAX: str(memory.limit.value) if memory.limit.value > 0 else MAX,
    }
    nothing = {Knob.MEMORY_HIGH: MAX, Knob.MEMORY_LOW: "0", Knob.MEMORY_MIN: "0"}
    if around.unified:
        return values | {knob: resources.unified.get(knob.value, nothing[knob]) for knob in UNIFIED_KNOBS}
    return values | {Knob.WEIGHT: str(shares_to_weight(cpu.shares.value or DEFAULT_SHARES))}


def knobs_in_resources(resources: Any) -> frozenset[Knob]:
    """The knobs that these resources say something about: whoever changes a container names only what changes."""
    cpu, memory = resources.cpu, resources.memory
    said = {
        Knob.CPUSET: cpu.cpus,
        Knob.MEMS: cpu.mems,
        Knob.WEIGHT: cpu.shares.value,
        Knob.QUOTA: cpu.quota.value,
        Knob.MEMORY_MAX: memory.limit.value,
        **{knob: resources.unified.get(knob.value, "") for knob in UNIFIED_KNOBS},
    }
    return frozenset(knob for knob, value in said.items() if value)


def clamp_values(
    wanted: Mapping[Knob, str], asked: Mapping[Knob, str], resources: Any, around: ContainerBounds
) -> dict[Knob, str]:
    """What of these values the container may have: no limit looser and no protection less than was asked for, nothing outside
    the cgroup above, and no CPUs but its own where the kubelet has chosen them already (its CPU or memory manager is static);
    its weight is as wanted."""
    found: dict[Knob, str] = {}
    if wanted.get(Knob.IDLE) == "1":
        wanted = {**wanted, Knob.WEIGHT: MIN_WEIGHT}
    for knob, chosen, there in (
        (Knob.CPUSET, resources.cpu.cpus, around.cpus),
        (Knob.MEMS, resources.cpu.mems, around.mems),
    ):
        if knob in wanted and not chosen and there:
            left = set(parse_cpu_list(wanted[knob])) & there
            if left and left != there:
                found[knob] = format_cpu_list(sorted(left))
    if Knob.WEIGHT in wanted and Knob.WEIGHT in asked:
        found[Knob.WEIGHT] = wanted[Knob.WEIGHT]
    if Knob.QUOTA in wanted and (quota := _min_quota(wanted[Knob.QUOTA], asked[Knob.QUOTA], around.cores)):
        found[Knob.QUOTA] = quota
    if Knob.MEMORY_MAX in wanted and _limit_bytes(wanted[Knob.MEMORY_MAX]) < _limit_bytes(asked[Knob.MEMORY_MAX]):
        found[Knob.MEMORY_MAX] = wanted[Knob.MEMORY_MAX]
    if around.unified:
        tightest = {Knob.MEMORY_HIGH: min, Knob.MEMORY_LOW: max, Knob.MEMORY_MIN: max}
        found |= {
            knob: tightest[knob](wanted[knob], asked[knob], key=_limit_bytes)
            for knob in UNIFIED_KNOBS
            if knob in wanted
        }
    return {knob: value for knob, value in found.items() if value != asked.get(knob)}


def original_values(changed: Collection[Knob], asked: Mapping[Knob, str], resources: Any) -> dict[Knob, str]:
    """What is to be put back of those knobs that are changed: as asked for, and of the weight the very shares."""
    return {
        knob: str(resources.cpu.shares.value or DEFAULT_SHARES) if knob is Knob.WEIGHT else asked[knob]
        for knob in changed
    }


def to_oci_resources(values: Mapping[Knob, str]) -> wire.LinuxResources:
    """The same in the runtime's words."""
    found = wire.LinuxResources()
    if Knob.CPUSET in values:
        found.cpu.cpus = values[Knob.CPUSET]
    if Knob.MEMS in values:
        found.cpu.mems = values[Knob.MEMS]
    if Knob.WEIGHT in values:
        found.cpu.shares.value = weight_to_shares(int(values[Knob.WEIGHT]))
    if Knob.QUOTA in values:
        quota, period = values[Knob.QUOTA].split()
        found.cpu.quota.value = -1 if quota == MAX else int(quota)
        found.cpu.period.value = int(period)
    if Knob.MEMORY_MAX in values:
        found.memory.limit.value = -1 if values[Knob.MEMORY_MAX] == MAX else int(values[Knob.MEMORY_MAX])
    for knob in UNIFIED_KNOBS:
        if knob in values:
            found.unified[knob.value] = values[knob]
    return found


def _quota_text(cpu: Any) -> str:
    period = cpu.period.value or PERIOD_US
    return f"{cpu.quota.value} {period}" if cpu.quota.value > 0 else f"{MAX} {PERIOD_US}"


def _min_quota(wanted: str, asked: str, cores: float | None) -> str:
    """The tightest of the quotas; empty where none limits."""
    least = min(_quota_cores(wanted), _quota_cores(asked), math.inf if cores is None else cores)
    if least == math.inf:
        return ""
    if _quota_cores(wanted) == least:
        return wanted
    return asked if _quota_cores(asked) == least else f"{max(int(least * PERIOD_US), MIN_QUOTA_US)} {PERIOD_US}"


def _quota_cores(quota: str) -> float:
    used, period = quota.split()
    return math.inf if used == MAX else int(used) / int(period)


def _limit_bytes(text: str) -> float:
    return math.inf if text == MAX else int(text)


def _inherited_list(numbers: frozenset[int], around: ContainerBounds) -> str:
    """Version 1 copies what the cgroup above has; on version 2 an empty list means that."""
    return "" if around.unified else format_cpu_list(sorted(numbers))

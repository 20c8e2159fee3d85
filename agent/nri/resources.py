"""Knobs as the runtime's word for them (OCI resources), and back. Pure.

What a container is given before it is made is less than a round gives: the runtime has no word for cpu.idle, for which the
least weight stands in until the next round, nor for what a disk or a network card has. On version 2 there are files by name,
and the weight is left to the round: which weight becomes of the owner's shares there differs from one runtime to the next, so
that nobody could say what to put back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from agent.qrm.notation import DEFAULT_SHARES, MAX, shares_of, weight_of
from api.cpus import format_cpu_list, parse_cpu_list
from api.knobs import Knob
from api.proto import nri_pb2 as wire

PERIOD_US, LEAST_QUOTA_US = 100_000, 1000
LEAST_WEIGHT = "1"
UNIFIED = (Knob.MEMORY_HIGH, Knob.MEMORY_LOW, Knob.MEMORY_MIN)
"""Files of version 2 that the runtime writes by their names."""
KNOWN = (Knob.CPUSET, Knob.MEMS, Knob.WEIGHT, Knob.QUOTA, Knob.MEMORY_MAX, *UNIFIED)


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds a container that is about to be made: the cgroup that it will be in, and the version of its files."""

    cpus: frozenset[int] = frozenset()
    """Empty where that is not known."""
    mems: frozenset[int] = frozenset()
    cores: float | None = None
    """Quota of the pod; None where it has none, or none that binds what is below (version 2)."""
    unified: bool = False
    """Version 2."""


def asked_for(resources: Any, around: Around) -> dict[Knob, str]:
    """What the runtime was told to give the container, by knob in version 2's notation."""
    cpu, memory = resources.cpu, resources.memory
    values = {
        Knob.QUOTA: _quota(cpu),
        Knob.CPUSET: cpu.cpus or _inherited(around.cpus, around),
        Knob.MEMS: cpu.mems or _inherited(around.mems, around),
        Knob.MEMORY_MAX: str(memory.limit.value) if memory.limit.value > 0 else MAX,
    }
    nothing = {Knob.MEMORY_HIGH: MAX, Knob.MEMORY_LOW: "0", Knob.MEMORY_MIN: "0"}
    if around.unified:
        return values | {knob: resources.unified.get(knob.value, nothing[knob]) for knob in UNIFIED}
    return values | {Knob.WEIGHT: str(weight_of(cpu.shares.value or DEFAULT_SHARES))}


def set_in(resources: Any) -> frozenset[Knob]:
    """The knobs that these resources say something about: whoever changes a container names only what changes."""
    cpu, memory = resources.cpu, resources.memory
    said = {
        Knob.CPUSET: cpu.cpus,
        Knob.MEMS: cpu.mems,
        Knob.WEIGHT: cpu.shares.value,
        Knob.QUOTA: cpu.quota.value,
        Knob.MEMORY_MAX: memory.limit.value,
        **{knob: resources.unified.get(knob.value, "") for knob in UNIFIED},
    }
    return frozenset(knob for knob, value in said.items() if value)


def bounded(wanted: Mapping[Knob, str], asked: Mapping[Knob, str], resources: Any, around: Around) -> dict[Knob, str]:
    """What of these values the container may have: no limit looser and no protection less than was asked for, nothing outside
    the cgroup above, and no CPUs but its own where the kubelet has chosen them already (its CPU or memory manager is static);
    its weight is as wanted."""
    found: dict[Knob, str] = {}
    if wanted.get(Knob.IDLE) == "1":
        wanted = {**wanted, Knob.WEIGHT: LEAST_WEIGHT}
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
    if Knob.QUOTA in wanted and (quota := _least_quota(wanted[Knob.QUOTA], asked[Knob.QUOTA], around.cores)):
        found[Knob.QUOTA] = quota
    if Knob.MEMORY_MAX in wanted and _size(wanted[Knob.MEMORY_MAX]) < _size(asked[Knob.MEMORY_MAX]):
        found[Knob.MEMORY_MAX] = wanted[Knob.MEMORY_MAX]
    if around.unified:
        tightest = {Knob.MEMORY_HIGH: min, Knob.MEMORY_LOW: max, Knob.MEMORY_MIN: max}
        found |= {knob: tightest[knob](wanted[knob], asked[knob], key=_size) for knob in UNIFIED if knob in wanted}
    return {knob: value for knob, value in found.items() if value != asked.get(knob)}


def owners(changed: Collection[Knob], asked: Mapping[Knob, str], resources: Any) -> dict[Knob, str]:
    """What is to be put back of those knobs that are changed: as asked for, and of the weight the very shares."""
    return {
        knob: str(resources.cpu.shares.value or DEFAULT_SHARES) if knob is Knob.WEIGHT else asked[knob]
        for knob in changed
    }


def resources_of(values: Mapping[Knob, str]) -> wire.LinuxResources:
    """The same in the runtime's words."""
    found = wire.LinuxResources()
    if Knob.CPUSET in values:
        found.cpu.cpus = values[Knob.CPUSET]
    if Knob.MEMS in values:
        found.cpu.mems = values[Knob.MEMS]
    if Knob.WEIGHT in values:
        found.cpu.shares.value = shares_of(int(values[Knob.WEIGHT]))
    if Knob.QUOTA in values:
        quota, period = values[Knob.QUOTA].split()
        found.cpu.quota.value = -1 if quota == MAX else int(quota)
        found.cpu.period.value = int(period)
    if Knob.MEMORY_MAX in values:
        found.memory.limit.value = -1 if values[Knob.MEMORY_MAX] == MAX else int(values[Knob.MEMORY_MAX])
    for knob in UNIFIED:
        if knob in values:
            found.unified[knob.value] = values[knob]
    return found


def _quota(cpu: Any) -> str:
    period = cpu.period.value or PERIOD_US
    return f"{cpu.quota.value} {period}" if cpu.quota.value > 0 else f"{MAX} {PERIOD_US}"


def _least_quota(wanted: str, asked: str, cores: float | None) -> str:
    """The tightest of the quotas; empty where none limits."""
    least = min(_cores(wanted), _cores(asked), math.inf if cores is None else cores)
    if least == math.inf:
        return ""
    if _cores(wanted) == least:
        return wanted
    return asked if _cores(asked) == least else f"{max(int(least * PERIOD_US), LEAST_QUOTA_US)} {PERIOD_US}"


def _cores(quota: str) -> float:
    used, period = quota.split()
    return math.inf if used == MAX else int(used) / int(period)


def _size(text: str) -> float:
    return math.inf if text == MAX else int(text)


def _inherited(numbers: frozenset[int], around: Around) -> str:
    """Version 1 copies what the cgroup above has; on version 2 an empty list means that."""
    return "" if around.unified else format_cpu_list(sorted(numbers))

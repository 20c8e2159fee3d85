"""Translates knob values to OCI resources and back, and clamps them to what the container requested.
It is pure. OCI has no field for `cpu.idle`: if the container itself is to have it, because no kubelet created a cgroup
for its pod, the lowest weight replaces it until the next cycle. On cgroup v2 the weight is left to the cycle, because
runtimes convert shares to `cpu.weight` differently (the mapping changed in runc and crun).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from agent.qrm.decisions.cpu_priority import MIN_WEIGHT
from agent.qrm.knobs.knob_files import LIST_KNOBS, MIN_QUOTA_US, KnobLimits, clamp_value, quota_ratio
from agent.qrm.knobs.notation import (
    DEFAULT_PERIOD_US,
    DEFAULT_SHARES,
    MAX,
    UNLIMITED,
    shares_to_weight,
    weight_to_shares,
)
from api.cpu import format_cpu_list
from api.knobs import Knob
from api.proto import nri_pb2 as wire

UNIFIED_KNOBS = (Knob.MEMORY_HIGH, Knob.MEMORY_LOW, Knob.MEMORY_MIN)
"""Files of cgroup v2 that the runtime writes by name (`unified` in OCI)."""
MAX_CPUS = 1 << 20
ADJUSTABLE_KNOBS = (Knob.CPUSET, Knob.MEMS, Knob.WEIGHT, Knob.QUOTA, Knob.MEMORY_MAX, *UNIFIED_KNOBS)


class ContainerBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the parent cgroup of a container, and the cgroup version."""

    cpus: frozenset[int] = frozenset()
    """Allowed CPUs; empty if unknown."""
    mems: frozenset[int] = frozenset()
    cores: float | None = None
    """CPU quota above the container in cores; None without one, and on cgroup v2, where it does not restrict children."""
    unified: bool = False
    """Whether the hierarchy is cgroup v2."""


def requested_values(resources: Any, bounds: ContainerBounds) -> dict[Knob, str]:
    """Return what the kubelet requested for the container, by knob in the notation of cgroup v2."""
    cpu, memory = resources.cpu, resources.memory
    values = {
        Knob.QUOTA: _quota_text(cpu),
        Knob.CPUSET: cpu.cpus or _inherited_list(bounds.cpus, bounds),
        Knob.MEMS: cpu.mems or _inherited_list(bounds.mems, bounds),
        Knob.MEMORY_MAX: str(memory.limit.value) if memory.limit.value > 0 else MAX,
    }
    defaults = {Knob.MEMORY_HIGH: MAX, Knob.MEMORY_LOW: "0", Knob.MEMORY_MIN: "0"}
    if bounds.unified:
        return values | {knob: resources.unified.get(knob.value, defaults[knob]) for knob in UNIFIED_KNOBS}
    return values | {Knob.WEIGHT: str(shares_to_weight(cpu.shares.value or DEFAULT_SHARES))}


def knobs_in_resources(resources: Any) -> frozenset[Knob]:
    """Return the knobs that these resources set. An update contains only what changes."""
    cpu, memory = resources.cpu, resources.memory
    values = {
        Knob.CPUSET: cpu.cpus,
        Knob.MEMS: cpu.mems,
        Knob.WEIGHT: cpu.shares.value,
        Knob.QUOTA: cpu.quota.value,
        Knob.MEMORY_MAX: memory.limit.value,
        **{knob: resources.unified.get(knob.value, "") for knob in UNIFIED_KNOBS},
    }
    return frozenset(knob for knob, value in values.items() if value)


def clamp_values(
    desired: Mapping[Knob, str], requested: Mapping[Knob, str], resources: Any, bounds: ContainerBounds
) -> dict[Knob, str]:
    """Clamp desired values to the request and to the parent cgroup; return those that differ from the request.

    No limit is looser and no protection weaker than requested. Lists that the kubelet has set stay, because its static CPU or
    memory manager assigned them. The weight is not clamped.
    """
    if desired.get(Knob.IDLE) == "1":
        desired = {**desired, Knob.WEIGHT: MIN_WEIGHT}
    assigned = {Knob.CPUSET: resources.cpu.cpus, Knob.MEMS: resources.cpu.mems}
    unrestricted = {Knob.CPUSET: format_cpu_list(bounds.cpus), Knob.MEMS: format_cpu_list(bounds.mems)}
    values: dict[Knob, str] = {}
    for knob in ADJUSTABLE_KNOBS:
        if knob in desired and knob in requested and not assigned.get(knob):
            with suppress(ValueError):  # the parent cgroup has none of these CPUs or NUMA nodes
                values[knob] = clamp_value(knob, desired[knob], _limits(knob, requested[knob], bounds))
    return {knob: value for knob, value in values.items() if value not in (requested[knob], unrestricted.get(knob))}


def _limits(knob: Knob, requested: str, bounds: ContainerBounds) -> KnobLimits:
    if knob in LIST_KNOBS:
        return KnobLimits(allowed=tuple(sorted(bounds.cpus if knob is Knob.CPUSET else bounds.mems)))
    if knob is Knob.QUOTA and bounds.cores is not None:
        parent = f"{max(int(bounds.cores * DEFAULT_PERIOD_US), MIN_QUOTA_US)} {DEFAULT_PERIOD_US}"
        requested = min(requested, parent, key=quota_ratio)
    # The number of CPUs is no limit here: a quota above it stays as it is.
    return KnobLimits(own=requested, own_quota=requested if knob is Knob.QUOTA else UNLIMITED, cpu_count=MAX_CPUS)


def original_values(changed: Collection[Knob], requested: Mapping[Knob, str], resources: Any) -> dict[Knob, str]:
    """Return the values to restore for changed knobs. A weight is restored as CPU shares, because several shares map to the
    same weight."""
    return {
        knob: str(resources.cpu.shares.value or DEFAULT_SHARES) if knob is Knob.WEIGHT else requested[knob]
        for knob in changed
    }


def to_oci_resources(values: Mapping[Knob, str]) -> wire.LinuxResources:
    """Return the values as OCI resources of an NRI message."""
    resources = wire.LinuxResources()
    if Knob.CPUSET in values:
        resources.cpu.cpus = values[Knob.CPUSET]
    if Knob.MEMS in values:
        resources.cpu.mems = values[Knob.MEMS]
    if Knob.WEIGHT in values:
        resources.cpu.shares.value = weight_to_shares(int(values[Knob.WEIGHT]))
    if Knob.QUOTA in values:
        quota, period = values[Knob.QUOTA].split()
        resources.cpu.quota.value = -1 if quota == MAX else int(quota)
        resources.cpu.period.value = int(period)
    if Knob.MEMORY_MAX in values:
        resources.memory.limit.value = -1 if values[Knob.MEMORY_MAX] == MAX else int(values[Knob.MEMORY_MAX])
    for knob in UNIFIED_KNOBS:
        if knob in values:
            resources.unified[knob.value] = values[knob]
    return resources


def _quota_text(cpu: Any) -> str:
    period = cpu.period.value or DEFAULT_PERIOD_US
    return f"{cpu.quota.value} {period}" if cpu.quota.value > 0 else UNLIMITED


def _inherited_list(numbers: frozenset[int], bounds: ContainerBounds) -> str:
    """Return the list that a container without its own gets: on cgroup v1 the runtime copies the parent's list, on v2 an empty
    file inherits it."""
    return "" if bounds.unified else format_cpu_list(sorted(numbers))

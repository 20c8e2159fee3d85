"""Windows of the latest samples of a plugin, and CPU use of pods between two samples of the kernel's counters.
It is pure. A window whose newest sample is too old is dropped and filled again from its first sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import msgspec

from agent.eviction.eviction_inputs import NS_PER_S, EvictionInputs
from api.pod import Pod
from api.rates import delta

WindowKey = TypeVar("WindowKey", int, str)


class SampleWindow(msgspec.Struct, frozen=True, array_like=True):
    """The last samples, and when the newest of them was taken, CLOCK_MONOTONIC."""

    at_ns: int
    values: tuple[float, ...]


def append_sample(ring: SampleWindow | None, value: float, size: int, at_ns: int) -> SampleWindow:
    """The ring with one more sample, at most `size` of them."""
    before = () if ring is None else ring.values
    return SampleWindow(at_ns, (*before, value)[-size:])


def recent_windows(rings: Mapping[WindowKey, SampleWindow], now_ns: int, age_s: float) -> dict[WindowKey, SampleWindow]:
    """Those that were sampled within so many seconds. Who comes back after that begins anew."""
    return {key: ring for key, ring in rings.items() if 0 <= now_ns - ring.at_ns <= age_s * NS_PER_S}


def ratio_above(ring: SampleWindow, bound: float, size: int) -> float:
    """Which part of a full ring is above the bound: samples that are still to come are not."""
    return sum(value > bound for value in ring.values) / size


class CgroupCpuCounters(msgspec.Struct, frozen=True, array_like=True):
    """Counters of one cgroup; the id tells a new cgroup of the same path apart."""

    id: int
    usage_ns: int
    system_ns: int | None = None


class CpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of pods' containers at one instant."""

    at_ns: int
    containers: Mapping[str, CgroupCpuCounters] = {}


class PodCpuUse(NamedTuple):
    """Cores."""

    total: float
    system: float | None
    """In the kernel; None where that is not known of all."""


def is_sample_due(before: CpuSample | None, situation: EvictionInputs, sample_s: float) -> bool:
    """Whether it is time for another sample, or a clock went backwards."""
    if before is None:
        return True
    return not 0 <= situation.snapshot.taken_at_ns - before.at_ns < sample_s * NS_PER_S


def read_cpu_counters(situation: EvictionInputs) -> CpuSample:
    """The counters as they are now."""
    cgroups = situation.snapshot.cgroups
    return CpuSample(
        at_ns=situation.snapshot.taken_at_ns,
        containers={
            container.cgroup: CgroupCpuCounters(sample.id, sample.cpu_usage_ns, sample.cpu_system_ns)
            for pod in situation.snapshot.pods
            for container in pod.containers
            if (sample := cgroups.get(container.cgroup)) is not None and sample.cpu_usage_ns is not None
        },
    )


def pod_cpu_use(pod: Pod, before: CpuSample | None, after: CpuSample) -> PodCpuUse | None:
    """Cores that a pod used between two samples; None unless it is known of each container that is in the later one."""
    if before is None or after.at_ns <= before.at_ns:
        return None
    interval_ns, total, system, seen = after.at_ns - before.at_ns, 0, 0, False
    system_known = True
    for container in pod.containers:
        now = after.containers.get(container.cgroup)
        if now is None:
            continue
        then = before.containers.get(container.cgroup)
        if then is None or then.id != now.id:
            return None
        usage, kernel = delta(then.usage_ns, now.usage_ns), delta(then.system_ns, now.system_ns)
        if usage is None:
            return None
        total, seen = total + usage, True
        system_known = system_known and kernel is not None
        system += kernel or 0
    if not seen:
        return None
    return PodCpuUse(total / interval_ns, system / interval_ns if system_known else None)

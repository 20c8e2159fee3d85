"""CPU use of pods over the time between two samples of a plugin, from the kernel's counters. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from agent.eviction.situation import NS_PER_S, Situation
from api.pods import Pod
from api.rates import delta


class Counted(msgspec.Struct, frozen=True, array_like=True):
    """Counters of one cgroup; the id tells a new cgroup of the same path apart."""

    id: int
    usage_ns: int
    system_ns: int | None = None


class CpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of pods' containers at one instant."""

    at_ns: int
    containers: Mapping[str, Counted] = {}


class Use(NamedTuple):
    """Cores."""

    total: float
    system: float | None
    """In the kernel; None where that is not known of all."""


def due(before: CpuSample | None, situation: Situation, sample_s: float) -> bool:
    """Whether it is time for another sample, or a clock went backwards."""
    if before is None:
        return True
    return not 0 <= situation.snapshot.taken_at_ns - before.at_ns < sample_s * NS_PER_S


def sampled(situation: Situation) -> CpuSample:
    """The counters as they are now."""
    cgroups = situation.snapshot.cgroups
    return CpuSample(
        at_ns=situation.snapshot.taken_at_ns,
        containers={
            container.cgroup: Counted(sample.id, sample.cpu_usage_ns, sample.cpu_system_ns)
            for pod in situation.snapshot.pods
            for container in pod.containers
            if (sample := cgroups.get(container.cgroup)) is not None and sample.cpu_usage_ns is not None
        },
    )


def used(pod: Pod, before: CpuSample | None, after: CpuSample) -> Use | None:
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
    return Use(total / interval_ns, system / interval_ns if system_known else None)

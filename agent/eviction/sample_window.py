"""Windows of the latest samples of a plugin, and CPU use of pods between two samples of the kernel's counters.
It is pure. A window whose newest sample is too old is dropped and filled again from its first sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from agent.eviction.eviction_inputs import EvictionInputs
from api.pod import Pod
from api.rates import delta
from api.units import NS_PER_S

WindowKey = TypeVar("WindowKey", int, str)


class SampleWindow(msgspec.Struct, frozen=True, array_like=True):
    """The latest samples, oldest first, and the time of the newest (CLOCK_MONOTONIC)."""

    at_ns: int
    values: tuple[float, ...]


def append_sample(window: SampleWindow | None, value: float, size: int, at_ns: int) -> SampleWindow:
    """Return the window with one more sample, at most `size` of them."""
    before = () if window is None else window.values
    return SampleWindow(at_ns, (*before, value)[-size:])


def append_pod_samples(
    windows: Mapping[str, SampleWindow], pods: Iterable[Pod], values: Mapping[str, float], size: int, at_ns: int
) -> dict[str, SampleWindow]:
    """Return the windows of these pods with one more sample each; a pod without a value keeps its window."""
    appended = {key: append_sample(windows.get(key), value, size, at_ns) for key, value in values.items()}
    retained = {pod.key: windows[pod.key] for pod in pods if pod.key in windows}
    return retained | appended


def recent_windows(
    windows: Mapping[WindowKey, SampleWindow], now_ns: int, age_s: float
) -> dict[WindowKey, SampleWindow]:
    """Return the windows whose newest sample is at most `age_s` old. Others start again with their next sample."""
    return {key: window for key, window in windows.items() if 0 <= now_ns - window.at_ns <= age_s * NS_PER_S}


def ratio_above(window: SampleWindow, bound: float, size: int) -> float:
    """Return the fraction of a full window above the bound; samples that are still missing do not count as above."""
    return sum(value > bound for value in window.values) / size


class CgroupCpuCounters(msgspec.Struct, frozen=True, array_like=True):
    """CPU counters of one cgroup. The id distinguishes a new cgroup with the same path."""

    id: int
    usage_ns: int
    system_ns: int | None = None


class CpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """CPU counters of all containers at one time."""

    at_ns: int
    containers: Mapping[str, CgroupCpuCounters] = {}


class PodCpuUse(NamedTuple):
    """CPU use in cores."""

    total: float
    system: float | None
    """In the kernel; None unless it is available for every container."""


def is_sample_due(before: CpuSample | None, inputs: EvictionInputs, sample_s: float) -> bool:
    """Return whether the next sample is due, also after the clock went backwards."""
    if before is None:
        return True
    return not 0 <= inputs.snapshot.taken_at_ns - before.at_ns < sample_s * NS_PER_S


def read_cpu_counters(inputs: EvictionInputs) -> CpuSample:
    """Return the counters in the snapshot."""
    cgroups = inputs.snapshot.cgroups
    return CpuSample(
        at_ns=inputs.snapshot.taken_at_ns,
        containers={
            container.cgroup: CgroupCpuCounters(sample.id, sample.cpu_usage_ns, sample.cpu_system_ns)
            for pod in inputs.snapshot.pods
            for container in pod.containers
            if (sample := cgroups.get(container.cgroup)) is not None and sample.cpu_usage_ns is not None
        },
    )


def pod_cpu_use(pod: Pod, before: CpuSample | None, after: CpuSample) -> PodCpuUse | None:
    """Return the cores that a pod used between two samples; None unless every container of the later one is in both."""
    if before is None or after.at_ns <= before.at_ns:
        return None
    interval_ns, total, system, measured = after.at_ns - before.at_ns, 0, 0, False
    system_known = True
    for container in pod.containers:
        now = after.containers.get(container.cgroup)
        if now is None:
            continue
        earlier = before.containers.get(container.cgroup)
        if earlier is None or earlier.id != now.id:
            return None
        usage, kernel = delta(earlier.usage_ns, now.usage_ns), delta(earlier.system_ns, now.system_ns)
        if usage is None:
            return None
        total, measured = total + usage, True
        system_known = system_known and kernel is not None
        system += kernel or 0
    if not measured:
        return None
    return PodCpuUse(total / interval_ns, system / interval_ns if system_known else None)
